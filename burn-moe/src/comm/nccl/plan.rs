//! What a rank sends and receives, as lists of transfers: arithmetic alone, so that it is tested without a device.
//!
//! NCCL tells messages apart by nothing but their order between two ranks. Every list here is in an order that sender
//! and receiver derive alike from what both know.

/// A piece of a buffer on its way to or from another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// The rank at the other end.
    pub peer: usize,
    /// In which direction.
    pub way: Way,
    /// Which of the exchange's buffers.
    pub buffer: usize,
    /// First byte within the buffer.
    pub offset: usize,
    /// How many.
    pub bytes: usize,
}

/// The direction of a transfer, as this rank sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From this rank.
    Send,
    /// To this rank.
    Receive,
}

/// Transfers that are under way at the same time: a grouped call of NCCL. None of them is empty.
pub(crate) type Round = Vec<Transfer>;

/// The ways of the weights of one layer's replicas that begin or end on this rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct WeightHops {
    /// The ways.
    pub hops: Vec<WeightHop>,
    /// Whether any rank relays, this one or another: all must know, as all then cut weights alike.
    pub relayed: bool,
}

/// The way of one expert's weights between this rank and another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WeightHop {
    /// The expert, as all ranks number it: the order of the hops between two ranks.
    pub expert: usize,
    /// The rank at the other end.
    pub peer: usize,
    /// In which direction.
    pub way: Way,
    /// Where the weights lie here.
    pub place: Place,
    /// How many hops come before this one: 0 from the expert's home, 1 from a relay.
    pub depth: usize,
}

/// Where the weights of an expert lie on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Among its own: position there.
    Home(usize),
    /// In a replica slot.
    Slot(usize),
}

/// Buffers of [`all_to_all`].
pub(crate) const ROWS_SENT: usize = 0;
pub(crate) const ROWS_RECEIVED: usize = 1;

/// Rows to and from every rank, this one included: `send` and `receive` in order of rank, the rows of a buffer too.
pub(crate) fn all_to_all(send: &[usize], receive: &[usize], row_bytes: usize) -> Round {
    let parts = |way, buffer, counts: &[usize]| {
        let mut offset = 0;
        let part = move |(peer, rows): (usize, &usize)| {
            let bytes = rows * row_bytes;
            let start = offset;
            offset += bytes;
            Transfer {
                peer,
                way,
                buffer,
                offset: start,
                bytes,
            }
        };
        counts.iter().enumerate().map(part).collect::<Vec<_>>()
    };
    let sent = parts(Way::Send, ROWS_SENT, send);
    let received = parts(Way::Receive, ROWS_RECEIVED, receive);
    let all = sent.into_iter().chain(received);
    all.filter(|transfer| transfer.bytes > 0).collect()
}

/// Buffers of [`replication`], one a matrix: experts at home.
pub(crate) const HOME: [usize; 2] = [0, 1];
/// Replica slots.
pub(crate) const SLOTS: [usize; 2] = [2, 3];

/// Weights of experts to replica slots; `bytes` is the size of one expert's two matrices.
///
/// Where nobody relays, all goes at once, straight from the parameters. Otherwise weights travel in chunks of
/// `chunk` bytes, in rounds: chunk `c` leaves its home in round `c` and the relay in round `c + 1`. A rank's rounds run
/// one after the other, so a relay has what it forwards; and as both ranks of a hop count its rounds alike, the
/// transfers of a round wait for those of earlier rounds only.
pub(crate) fn replication(hops: &WeightHops, bytes: [usize; 2], chunk: usize) -> Vec<Round> {
    let relayed = hops.relayed;
    let chunks = chunks(bytes, if relayed { chunk.max(1) } else { usize::MAX });
    let mut order: Vec<&WeightHop> = hops.hops.iter().collect();
    order.sort_by_key(|hop| hop.expert);
    let mut rounds: Vec<Round> = Vec::new();
    for hop in order {
        let (buffers, position) = match hop.place {
            Place::Home(expert) => (HOME, expert),
            Place::Slot(slot) => (SLOTS, slot),
        };
        for (number, (matrix, start, len)) in chunks.iter().enumerate() {
            let round = if relayed { number + hop.depth } else { 0 };
            if rounds.len() <= round {
                rounds.resize(round + 1, Vec::new());
            }
            rounds[round].push(Transfer {
                peer: hop.peer,
                way: hop.way,
                buffer: buffers[*matrix],
                offset: position * bytes[*matrix] + start,
                bytes: *len,
            });
        }
    }
    rounds
}

/// The pieces of an expert: matrix, first byte within it, bytes.
fn chunks(bytes: [usize; 2], chunk: usize) -> Vec<(usize, usize, usize)> {
    let of_matrix = |(matrix, size): (usize, usize)| {
        (0..size)
            .step_by(chunk.min(size.max(1)))
            .map(move |start| (matrix, start, chunk.min(size - start)))
    };
    bytes.into_iter().enumerate().flat_map(of_matrix).collect()
}

/// One replica whose gradients travel: to the expert's home (`Send`), or from the rank that hosts it (`Receive`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GradientHop {
    /// The expert's position at home: the order of the hops between two ranks, of which one is home to it.
    pub local_expert: usize,
    /// The rank at the other end.
    pub peer: usize,
    /// In which direction.
    pub way: Way,
    /// Position in the buffers: the slot, or the place among what is received.
    pub position: usize,
}

/// Buffers of [`gradients`], one a matrix: gradients of replica slots.
pub(crate) const SLOT_GRADIENTS: [usize; 2] = [0, 1];
/// Gradients from the hosts of replicas.
pub(crate) const HOSTED_GRADIENTS: [usize; 2] = [2, 3];

/// Gradients of replicas to the homes of their experts, directly: home adds them in a fixed order, and a relay that
/// added them up on the way would make another order. `bytes` is the size of one expert's two matrices.
pub(crate) fn gradients(hops: &[GradientHop], bytes: [usize; 2]) -> Round {
    let mut order: Vec<&GradientHop> = hops.iter().collect();
    order.sort_by_key(|hop| hop.local_expert);
    let of_hop = |hop: &GradientHop| {
        let buffers = match hop.way {
            Way::Send => SLOT_GRADIENTS,
            Way::Receive => HOSTED_GRADIENTS,
        };
        let (peer, way, position) = (hop.peer, hop.way, hop.position);
        [0, 1].map(|matrix| Transfer {
            peer,
            way,
            buffer: buffers[matrix],
            offset: position * bytes[matrix],
            bytes: bytes[matrix],
        })
    };
    let all = order.into_iter().flat_map(of_hop);
    all.filter(|transfer| transfer.bytes > 0).collect()
}
