//! One slot a rank: plans are forests, and the last bit of balance comes from searching among them.

use super::fill::{Chunk, Task};

/// More ranks in a domain than this, and [`Forest`] is not used: with many ranks, constructive plans are near the
/// optimum, and a step of the search grows with their square.
pub(super) const MAX_RANKS: usize = 16;

/// Steps without progress before the search gives up. On real routing at 8 ranks, against exact solutions of the
/// instances that constructive strategies leave unbalanced, 4 steps close 90 % of the gap that the first local optimum
/// leaves, and more steps little of the rest.
const PATIENCE: u32 = 4;

/// Steps for which a rank that was moved stays where it is.
const TENURE: u32 = 3;

const NONE: u8 = u8::MAX;

/// A local search for plans with one slot a rank.
///
/// With one slot, a rank receives tokens of one other rank at most, its parent, and so a plan is a forest of ranks. For
/// a given forest and threshold, what each rank can take off its parent follows bottom-up: its slack and what its own
/// children take off it, but no more than the expert it gets (children that can take much get large experts). The
/// tokens above the threshold that no child takes are the deficit; the forest is a plan when there are none. The search
/// moves one rank to another parent or lets two ranks change places, always the change of lowest deficit, and for a few
/// steps accepts a higher deficit to leave a local optimum (tabu search, Glover 1989).
#[derive(Debug, Default)]
pub(super) struct Forest {
    /// The ranks of the domain; all else here counts ranks by their place in this list.
    ranks: Vec<u32>,
    load: Vec<u64>,
    /// Tokens and id of each expert, by rank, those with most tokens first.
    experts: Vec<(u64, u32)>,
    /// Where each rank's experts start in `experts`, `[ranks + 1]`.
    starts: Vec<usize>,
    threshold: u64,
    min_quota: u64,
    parent: Vec<u8>,
    /// Sets of ranks as bits.
    children: Vec<u32>,
    /// What each rank could take off its parent; negative: tokens above the threshold that nobody takes.
    room: Vec<i64>,
    /// The last step in which a rank must not be moved.
    until: Vec<u32>,
    /// Buffers of `share`.
    left: Vec<(u64, u32)>,
    shares: Vec<Chunk>,
}

/// A change of the forest.
#[derive(Debug, Clone, Copy)]
enum Change {
    Move { rank: u8, parent: u8 },
    Swap(u8, u8),
}

impl Forest {
    /// Appends to `chunks` a plan in which no rank of `ranks` has more than `threshold` tokens; false when it finds
    /// none with at most `most` copies. The search starts at the plan `start`.
    pub fn run(
        &mut self,
        task: &Task,
        ranks: &[u32],
        threshold: u64,
        start: &[Chunk],
        most: usize,
        chunks: &mut Vec<Chunk>,
    ) -> bool {
        self.prepare(task, ranks, threshold, start);
        if !self.climb() {
            return false;
        }
        let before = chunks.len();
        for root in 0..self.parent.len() as u8 {
            if self.parent[root as usize] == NONE {
                self.emit(root, 0, chunks);
            }
        }
        let enough = chunks.len() - before <= most;
        if !enough {
            chunks.truncate(before);
        }
        enough
    }

    fn prepare(&mut self, task: &Task, ranks: &[u32], threshold: u64, start: &[Chunk]) {
        let count = ranks.len();
        self.ranks.clear();
        self.ranks.extend_from_slice(ranks);
        self.load.clear();
        self.load
            .extend(ranks.iter().map(|&r| task.rank_load[r as usize]));
        self.experts.clear();
        self.starts.clear();
        self.starts.push(0);
        for &rank in ranks {
            let from = self.experts.len();
            let experts = task.placement.experts_of(rank as usize).iter();
            self.experts
                .extend(experts.map(|&e| (task.expert_load[e as usize], e)));
            self.experts[from..].sort_unstable_by_key(|&(load, e)| (std::cmp::Reverse(load), e));
            self.starts.push(self.experts.len());
        }
        self.threshold = threshold;
        self.min_quota = task.min_quota;
        self.parent.clear();
        self.parent.resize(count, NONE);
        self.children.clear();
        self.children.resize(count, 0);
        self.room.clear();
        self.room.resize(count, 0);
        self.until.clear();
        self.until.resize(count, 0);
        let place = |rank: u32| ranks.iter().position(|&r| r == rank);
        for chunk in start {
            let home = task.placement.home(chunk.expert as usize) as u32;
            if let (Some(rank), Some(home)) = (place(chunk.rank), place(home))
                && !self.above(rank as u8, home as u8)
            {
                self.attach(rank as u8, home as u8);
            }
        }
        for rank in 0..count as u8 {
            if self.parent[rank as usize] == NONE {
                self.measure_tree(rank);
            }
        }
    }

    /// Brings the deficit down to 0, if it finds a way.
    fn climb(&mut self) -> bool {
        let mut lowest = self.deficit();
        let (mut step, mut stalled) = (1, 0);
        while lowest > 0 {
            let Some((deficit, change)) = self.best_change(step, lowest) else {
                return false;
            };
            self.apply(change);
            let (a, b) = match change {
                Change::Move { rank, .. } => (rank, rank),
                Change::Swap(a, b) => (a, b),
            };
            self.until[a as usize] = step + TENURE;
            self.until[b as usize] = step + TENURE;
            step += 1;
            if deficit < lowest {
                (lowest, stalled) = (deficit, 0);
            } else {
                stalled += 1;
                if stalled > PATIENCE {
                    return false;
                }
            }
        }
        true
    }

    /// The change that leaves the lowest deficit. Only changes to trees with a deficit can lower it.
    fn best_change(&mut self, step: u32, lowest: u64) -> Option<(u64, Change)> {
        let count = self.parent.len() as u8;
        let mut short = 0u32;
        for rank in 0..count {
            if self.room[rank as usize] < 0 {
                short |= 1 << self.root(rank);
            }
        }
        let in_short = (0..count).filter(|&r| short >> self.root(r) & 1 == 1);
        let in_short = in_short.fold(0u32, |set, r| set | 1 << r);
        let mut best: Option<(u64, Change)> = None;
        let mut consider = |forest: &mut Self, change: Change, undo: Change, free: bool| {
            forest.apply(change);
            let deficit = forest.deficit();
            forest.apply(undo);
            if (free || deficit < lowest) && best.is_none_or(|(least, _)| deficit < least) {
                best = Some((deficit, change));
            }
        };
        for rank in 0..count {
            if self.room[rank as usize] <= 0 {
                continue;
            }
            let old = self.parent[rank as usize];
            let free = self.until[rank as usize] < step;
            for parent in members(in_short) {
                if parent != old && !self.above(rank, parent) {
                    let undo = Change::Move { rank, parent: old };
                    consider(self, Change::Move { rank, parent }, undo, free);
                }
            }
        }
        for a in members(in_short) {
            for b in 0..count {
                let twice = in_short >> b & 1 == 1 && b <= a;
                let (above_a, above_b) = (self.parent[a as usize], self.parent[b as usize]);
                let useless = above_a != NONE && self.room[b as usize] <= 0
                    || above_b != NONE && self.room[a as usize] <= 0;
                if twice || useless || above_a == above_b || self.above(a, b) || self.above(b, a) {
                    continue;
                }
                let free = self.until[a as usize] < step && self.until[b as usize] < step;
                consider(self, Change::Swap(a, b), Change::Swap(a, b), free);
            }
        }
        best
    }

    fn apply(&mut self, change: Change) {
        let old = match change {
            Change::Move { rank, parent } => {
                let old = self.parent[rank as usize];
                self.attach(rank, parent);
                (old, parent)
            }
            Change::Swap(a, b) => {
                let old = (self.parent[a as usize], self.parent[b as usize]);
                self.attach(a, old.1);
                self.attach(b, old.0);
                old
            }
        };
        self.measure_up(old.0);
        self.measure_up(old.1);
    }

    fn attach(&mut self, rank: u8, parent: u8) {
        let old = std::mem::replace(&mut self.parent[rank as usize], parent);
        if old != NONE {
            self.children[old as usize] &= !(1 << rank);
        }
        if parent != NONE {
            self.children[parent as usize] |= 1 << rank;
        }
    }

    /// Whether `rank` is `other` or one of its ancestors.
    fn above(&self, rank: u8, mut other: u8) -> bool {
        while other != NONE && other != rank {
            other = self.parent[other as usize];
        }
        other == rank
    }

    fn root(&self, mut rank: u8) -> u8 {
        while self.parent[rank as usize] != NONE {
            rank = self.parent[rank as usize];
        }
        rank
    }

    fn deficit(&self) -> u64 {
        self.room.iter().map(|r| r.min(&0).unsigned_abs()).sum()
    }

    fn measure_tree(&mut self, rank: u8) {
        for child in members(self.children[rank as usize]) {
            self.measure_tree(child);
        }
        self.room[rank as usize] = self.measure(rank);
    }

    fn measure_up(&mut self, mut rank: u8) {
        while rank != NONE {
            self.room[rank as usize] = self.measure(rank);
            rank = self.parent[rank as usize];
        }
    }

    /// The room of a rank whose children's are known.
    fn measure(&mut self, rank: u8) -> i64 {
        let own = self.threshold as i64 - self.load[rank as usize] as i64;
        let children = self.children[rank as usize];
        let taken = match children.count_ones() {
            0 => 0,
            // One child gets the largest expert: no need to share.
            1 => {
                let wanted = self.room[children.trailing_zeros() as usize].max(0) as u64;
                let experts = self.starts[rank as usize]..self.starts[rank as usize + 1];
                let taken = wanted.min(self.experts[experts].first().map_or(0, |e| e.0));
                if taken < self.min_quota { 0 } else { taken }
            }
            _ => {
                self.share(rank);
                self.shares.iter().map(|s| s.quota).sum()
            }
        };
        own + taken as i64
    }

    /// Lists in `shares` what each child of `rank` can take off it: children in order of their room, and each gets the
    /// smallest expert that has enough, or the largest there is. `rank` of these chunks is a place.
    fn share(&mut self, rank: u8) {
        self.shares.clear();
        for child in members(self.children[rank as usize]) {
            let room = self.room[child as usize];
            if room > 0 {
                self.shares.push(Chunk {
                    expert: 0,
                    rank: u32::from(child),
                    quota: room as u64,
                });
            }
        }
        self.shares
            .sort_unstable_by_key(|s| (std::cmp::Reverse(s.quota), s.rank));
        let range = self.starts[rank as usize]..self.starts[rank as usize + 1];
        self.left.clear();
        self.left.extend_from_slice(&self.experts[range]);
        for share in &mut self.shares {
            let enough = self.left.partition_point(|e| e.0 >= share.quota);
            let mut at = enough.saturating_sub(1);
            let Some(&(tokens, expert)) = self.left.get(at) else {
                share.quota = 0;
                continue;
            };
            share.quota = share.quota.min(tokens);
            if share.quota < self.min_quota {
                share.quota = 0;
            }
            share.expert = expert;
            // Keep the order.
            let rest = tokens - share.quota;
            while self.left.get(at + 1).is_some_and(|e| e.0 > rest) {
                self.left[at] = self.left[at + 1];
                at += 1;
            }
            self.left[at] = (rest, expert);
        }
    }

    /// Writes out what the children of `rank`, which receives `received` tokens, have to take: no more than brings it
    /// to the threshold, so that children that are not needed get no copy.
    fn emit(&mut self, rank: u8, received: u64, chunks: &mut Vec<Chunk>) {
        self.share(rank);
        let mut excess = (self.load[rank as usize] + received).saturating_sub(self.threshold);
        let from = chunks.len();
        for share in &self.shares {
            let quota = share.quota.min(excess.max(self.min_quota));
            if excess > 0 && quota > 0 {
                excess = excess.saturating_sub(quota);
                chunks.push(Chunk { quota, ..*share });
            }
        }
        let to = chunks.len();
        for child in members(self.children[rank as usize]) {
            let own = chunks[from..to].iter().find(|c| c.rank == u32::from(child));
            let received = own.map_or(0, |c| c.quota);
            self.emit(child, received, chunks);
        }
        for chunk in &mut chunks[from..to] {
            chunk.rank = self.ranks[chunk.rank as usize];
        }
    }
}

/// The ranks of a set.
fn members(mut set: u32) -> impl Iterator<Item = u8> {
    std::iter::from_fn(move || {
        let first = set.trailing_zeros();
        (first < 32).then(|| {
            set &= set - 1;
            first as u8
        })
    })
}
