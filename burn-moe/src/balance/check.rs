use super::{LoadMatrix, Placement, Plan};
use thiserror::Error;

/// How a plan breaks the rules; see [`check`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// Load and placement are of different shapes.
    #[error(
        "load is [{load_ranks} ranks, {load_experts} experts], but the placement has {ranks} ranks, {experts} experts"
    )]
    Shape {
        /// Ranks of the load.
        load_ranks: usize,
        /// Experts of the load.
        load_experts: usize,
        /// Ranks of the placement.
        ranks: usize,
        /// Experts of the placement.
        experts: usize,
    },
    /// A replica names an expert or a rank that does not exist.
    #[error(
        "replica of expert {expert} on rank {rank}: only {experts} experts and {ranks} ranks exist"
    )]
    OutOfRange {
        /// The replica's expert.
        expert: u32,
        /// The replica's rank.
        rank: u32,
        /// Experts that exist.
        experts: usize,
        /// Ranks that exist.
        ranks: usize,
    },
    /// Replicas are not in ascending order of (expert, rank), or one rank holds an expert twice.
    #[error("replica of expert {expert} on rank {rank} is out of order or there twice")]
    OrderOrTwice {
        /// The replica's expert.
        expert: u32,
        /// The replica's rank.
        rank: u32,
    },
    /// A replica on the expert's own home rank.
    #[error("replica of expert {expert} on its home rank {rank}")]
    OnHome {
        /// The replica's expert.
        expert: u32,
        /// The replica's rank.
        rank: u32,
    },
    /// A replica outside the fast domain of the expert's home.
    #[error(
        "replica of expert {expert} on rank {rank}, outside the domain of its home rank {home}"
    )]
    OutsideDomain {
        /// The replica's expert.
        expert: u32,
        /// The replica's rank.
        rank: u32,
        /// The expert's home rank.
        home: usize,
    },
    /// A slot beyond those the rank has.
    #[error("replica of expert {expert} on rank {rank} is in slot {slot}, allowed: below {slots}")]
    NoSuchSlot {
        /// The replica's expert.
        expert: u32,
        /// The replica's rank.
        rank: u32,
        /// The replica's slot.
        slot: u32,
        /// Slots that a rank has.
        slots: usize,
    },
    /// Two replicas in one slot.
    #[error("slot {slot} of rank {rank} holds two replicas")]
    SlotTaken {
        /// The rank.
        rank: u32,
        /// The slot.
        slot: u32,
    },
    /// A replica that computes nothing.
    #[error("replica of expert {expert} on rank {rank} has no tokens")]
    NoTokens {
        /// The replica's expert.
        expert: u32,
        /// The replica's rank.
        rank: u32,
    },
    /// Quotas of an expert's replicas exceed its load.
    #[error("replicas of expert {expert} have quotas of {quotas} tokens, but its load is {load}")]
    TooManyTokens {
        /// The expert.
        expert: u32,
        /// Sum of its replicas' quotas.
        quotas: u128,
        /// Its load.
        load: u64,
    },
}

/// Whether `plan` is legal for this load, placement and number of slots on each rank.
///
/// Legal means: replicas sorted by (expert, rank); at most one instance of an expert on a rank; at most `slots`
/// replicas on a rank, each in a slot of its own; replicas inside the domain of the expert's home; every replica has
/// tokens, and an expert's quotas do not exceed its load (the home instance computes the rest, so that the instances'
/// quotas sum to the load exactly).
///
/// # Errors
///
/// The first rule that is broken.
pub fn check(
    load: &LoadMatrix,
    placement: &Placement,
    slots: usize,
    plan: &Plan,
) -> Result<(), PlanError> {
    let (ranks, experts) = (placement.ranks(), placement.experts());
    if load.ranks() != ranks || load.experts() != experts {
        return Err(PlanError::Shape {
            load_ranks: load.ranks(),
            load_experts: load.experts(),
            ranks,
            experts,
        });
    }
    let mut taken = Vec::with_capacity(plan.replicas.len());
    let mut previous = None;
    for &replica in &plan.replicas {
        let (expert, rank, slot) = (replica.expert, replica.rank, replica.slot);
        if expert as usize >= experts || rank as usize >= ranks {
            return Err(PlanError::OutOfRange {
                expert,
                rank,
                experts,
                ranks,
            });
        }
        if previous >= Some((expert, rank)) {
            return Err(PlanError::OrderOrTwice { expert, rank });
        }
        previous = Some((expert, rank));
        let home = placement.home(expert as usize);
        if home == rank as usize {
            return Err(PlanError::OnHome { expert, rank });
        }
        if !placement.same_domain(home, rank as usize) {
            return Err(PlanError::OutsideDomain { expert, rank, home });
        }
        if slot as usize >= slots {
            return Err(PlanError::NoSuchSlot {
                expert,
                rank,
                slot,
                slots,
            });
        }
        if replica.quota == 0 {
            return Err(PlanError::NoTokens { expert, rank });
        }
        taken.push((rank, slot));
    }
    taken.sort_unstable();
    if let Some(pair) = taken.windows(2).find(|pair| pair[0] == pair[1]) {
        let (rank, slot) = pair[0];
        return Err(PlanError::SlotTaken { rank, slot });
    }
    for of_expert in plan.replicas.chunk_by(|a, b| a.expert == b.expert) {
        let expert = of_expert[0].expert;
        let quotas: u128 = of_expert.iter().map(|r| u128::from(r.quota)).sum();
        let load = load.expert_load(expert as usize);
        if quotas > u128::from(load) {
            return Err(PlanError::TooManyTokens {
                expert,
                quotas,
                load,
            });
        }
    }
    Ok(())
}
