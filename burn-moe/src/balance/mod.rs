//! Exact-load expert balancing: pure integer planning on load counts.
//!
//! One micro-batch of one MoE layer sends `load[s][e]` token copies from source rank `s` to expert `e`
//! ([`LoadMatrix`]). Every expert has a home rank ([`Placement`]); a [`Planner`] may add replicas of experts on other
//! ranks and give each a quota of the expert's token copies ([`Plan`]). [`Reroute`] then turns plan and load into a
//! destination rank for every token copy. Every rank runs the same planner on the same counts, so all of it is
//! deterministic and integer; nothing is negotiated.
//!
//! This module knows no tensor and no communicator. To add a planner, write one file with a type that implements
//! [`Planner`], and add it to [`PLANNERS`] and [`planner`]: the legality tests and the `plan` binary pick it up.
//!
//! Letters used throughout: `G` ranks, `E` experts, `R` replica slots on each rank, `T` tokens, `K` experts a token.

mod board;
mod check;
mod error;
mod load;
mod none;
mod placement;
mod plan;
mod quota;
mod reroute;

pub use check::{PlanError, check};
pub use error::BalanceError;
pub use load::LoadMatrix;
pub use none::NoBalance;
pub use placement::Placement;
pub use plan::{Plan, Replica, imbalance};
pub use quota::Quota;
pub use reroute::Reroute;

/// Decides, for one micro-batch of one layer, which experts get replicas where and how many token copies each serves.
///
/// Planners are deterministic: equal inputs (and, for planners with history, equal earlier calls) give equal plans on
/// every rank. `&mut self` holds buffers that are reused, so planning allocates nothing after the first calls, and
/// history where the planner uses it: keep one instance for each layer.
pub trait Planner: Send {
    /// The name under which [`planner`] makes this planner.
    fn name(&self) -> &'static str;

    /// Replaces `plan` with the plan for `load` when each rank has room for `slots` replicas.
    ///
    /// The plan passes [`check`] with the same arguments, whatever the load, unless the planner's documentation says
    /// that it ignores `slots`. A `load` whose shape differs from that of `placement` gives the empty plan.
    fn plan(&mut self, load: &LoadMatrix, placement: &Placement, slots: usize, plan: &mut Plan);
}

/// The names that [`planner`] knows.
pub const PLANNERS: &[&str] = &["none", "quota"];

/// Makes the planner of that name with its default settings.
///
/// # Errors
///
/// [`BalanceError::UnknownPlanner`] when `name` is not in [`PLANNERS`].
pub fn planner(name: &str) -> Result<Box<dyn Planner>, BalanceError> {
    match name {
        "none" => Ok(Box::new(NoBalance)),
        "quota" => Ok(Box::new(Quota::default())),
        _ => Err(BalanceError::UnknownPlanner {
            name: name.to_owned(),
            allowed: PLANNERS.join(", "),
        }),
    }
}

#[cfg(test)]
mod tests;
