//! The ways that replicas' weights take between devices: straight from home, or through relays.

use crate::balance::{Placement, Plan, Schedule};
use crate::comm::nccl::plan::{Place, Way, WeightHop, WeightHops};

/// The hops of `plan`'s weights that begin or end on `rank`, by the balancer's own [`Schedule`].
pub(crate) fn weight_hops(rank: usize, placement: &Placement, plan: &Plan) -> WeightHops {
    let mut schedule = Schedule::default();
    schedule.relayed(placement, plan, &mut Vec::new());
    let slot_of = |expert: u32| {
        let replicas = plan.replicas_of(expert as usize);
        let here = replicas.iter().find(|it| it.rank as usize == rank);
        here.map(|it| Place::Slot(it.slot as usize))
    };
    let home_of = |expert: u32| {
        let own = placement.experts_of(rank);
        own.binary_search(&expert).ok().map(Place::Home)
    };
    let hops = schedule.hops.iter().filter_map(|hop| {
        let home = placement.home(hop.expert as usize);
        let depth = usize::from(hop.from as usize != home);
        let (way, peer, place) = match (hop.from as usize == rank, hop.to as usize == rank) {
            (true, _) if depth == 0 => (Way::Send, hop.to, home_of(hop.expert)?),
            (true, _) => (Way::Send, hop.to, slot_of(hop.expert)?),
            (_, true) => (Way::Receive, hop.from, slot_of(hop.expert)?),
            _ => return None,
        };
        Some(WeightHop {
            expert: hop.expert as usize,
            peer: peer as usize,
            way,
            place,
            depth,
        })
    });
    WeightHops {
        hops: hops.collect(),
        relayed: schedule.relayed,
    }
}
