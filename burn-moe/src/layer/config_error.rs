use thiserror::Error;

/// A field of a config has a value that is not allowed.
#[derive(Debug, Clone, PartialEq, Error)]
#[error("{field} is {value}, allowed: {allowed}")]
pub struct ConfigError {
    /// The field, as the config struct names it.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// Which values are allowed.
    pub allowed: String,
}

impl ConfigError {
    /// `Ok` when `allowed` holds for the field, else an error that says `what` is allowed.
    pub fn check(
        allowed: bool,
        field: &'static str,
        value: impl ToString,
        what: impl Into<String>,
    ) -> Result<(), Self> {
        if allowed {
            return Ok(());
        }
        Err(Self {
            field,
            value: value.to_string(),
            allowed: what.into(),
        })
    }
}
