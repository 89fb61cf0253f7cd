use thiserror::Error;

/// A load, a placement or a name that cannot be used; says which field, its value, and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BalanceError {
    /// A number or a length outside of what is allowed.
    #[error("{field} is {value}, allowed: {allowed}")]
    Invalid {
        /// What was given, such as `counts.len()`.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The values that work.
        allowed: String,
    },
    /// No planner has this name.
    #[error("planner is `{name}`, allowed: {allowed}")]
    UnknownPlanner {
        /// The name asked for.
        name: String,
        /// The names that exist.
        allowed: String,
    },
}

impl BalanceError {
    pub(crate) fn invalid(field: &'static str, value: usize, allowed: impl Into<String>) -> Self {
        Self::Invalid {
            field,
            value: value as u64,
            allowed: allowed.into(),
        }
    }
}
