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
mod bound;
mod check;
mod eplb;
mod error;
mod exact_fit;
mod least_loaded;
mod load;
mod none;
mod pairing;
mod placement;
mod plan;
mod quota;
mod reroute;
mod transfer;

pub use bound::lower_bound;
pub use check::{PlanError, check};
pub use eplb::Eplb;
pub use error::BalanceError;
pub use exact_fit::{ExactFit, ExactFitConfig};
pub use least_loaded::LeastLoaded;
pub use load::LoadMatrix;
pub use none::NoBalance;
pub use pairing::Pairing;
pub use placement::Placement;
pub use plan::{Plan, Replica, imbalance};
pub use quota::Quota;
pub use reroute::Reroute;
pub use transfer::{CostModel, Hop, Schedule, TransferSimulator};

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
    /// The plan passes [`check`] with the same arguments, whatever the load; a planner that
    /// [ignores slots](Planner::ignores_slots) may use more than `slots`. A `load` whose shape differs from that of `placement` gives the empty plan.
    fn plan(&mut self, load: &LoadMatrix, placement: &Placement, slots: usize, plan: &mut Plan);

    /// Whether plans may use more slots on a rank than they were given; see [`Plan::slots_used`].
    fn ignores_slots(&self) -> bool {
        false
    }
}

/// The names that [`planner`] knows.
pub const PLANNERS: &[&str] = &[
    "none",
    "eplb",
    "eplb-hierarchical",
    "quota",
    "pairing",
    "pairing-unlimited",
    "least-loaded",
    "least-loaded-unlimited",
    "exact-fit",
    "exact-fit-strict",
];

/// Makes the planner of that name with its default settings.
///
/// # Errors
///
/// [`BalanceError::UnknownPlanner`] when `name` is not in [`PLANNERS`].
pub fn planner(name: &str) -> Result<Box<dyn Planner>, BalanceError> {
    Ok(match name {
        "none" => Box::new(NoBalance),
        "eplb" => Box::new(Eplb::default()),
        "eplb-hierarchical" => Box::new(Eplb::new(8, true)),
        "quota" => Box::new(Quota::default()),
        "pairing" => Box::new(Pairing::default()),
        "pairing-unlimited" => Box::new(Pairing::unlimited()),
        "least-loaded" => Box::new(LeastLoaded::default()),
        "least-loaded-unlimited" => Box::new(LeastLoaded::unlimited()),
        "exact-fit" => Box::new(ExactFit::default()),
        "exact-fit-strict" => Box::new(ExactFit::new(ExactFitConfig::strict())),
        _ => {
            return Err(BalanceError::UnknownPlanner {
                name: name.to_owned(),
                allowed: PLANNERS.join(", "),
            });
        }
    })
}

#[cfg(test)]
mod tests;
