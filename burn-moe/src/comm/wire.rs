//! How a message looks between processes: a header of fixed size, then the payload.

use crate::comm::{Key, Op};

/// Bytes of a header. A multiple of 16, so that numbers behind it stay aligned.
pub(super) const HEADER: usize = 48;

/// What comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub key: Key,
    /// Bytes of the payload.
    pub len: u64,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let (code, number) = code(self.key.op);
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &code.to_le_bytes());
        put(4, &number.to_le_bytes());
        put(8, &self.key.layer.to_le_bytes());
        put(12, &self.key.part.to_le_bytes());
        put(16, &self.key.step.to_le_bytes());
        put(24, &self.key.group.to_le_bytes());
        put(32, &self.len.to_le_bytes());
        put(40, &MAGIC.to_le_bytes());
        bytes
    }

    /// `None` when the bytes are no header.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER] = bytes.get(..HEADER)?.try_into().ok()?;
        let narrow = |at: usize| bytes[at..at + 4].try_into().ok().map(u32::from_le_bytes);
        let wide = |at: usize| bytes[at..at + 8].try_into().ok().map(u64::from_le_bytes);
        if wide(40)? != MAGIC {
            return None;
        }
        Some(Self {
            key: Key {
                op: op(narrow(0)?, narrow(4)?)?,
                layer: narrow(8)?,
                part: narrow(12)?,
                step: wide(16)?,
                group: wide(24)?,
            },
            len: wide(32)?,
        })
    }
}

/// Tells a header from anything else, and another version of it.
const MAGIC: u64 = u64::from_le_bytes(*b"burnmoe1");

const CUSTOM: u32 = u32::MAX;

/// The operations without a number, by their code.
const OPS: [Op; 18] = [
    Op::Count,
    Op::Dispatch,
    Op::DispatchIds,
    Op::DispatchWeights,
    Op::Combine,
    Op::Replicate,
    Op::DispatchBackward,
    Op::DispatchWeightsBackward,
    Op::CombineBackward,
    Op::ReplicateBackward,
    Op::ReplicaGrad,
    Op::GradReduce,
    Op::AllReduce,
    Op::AllGather,
    Op::AllToAll,
    Op::Broadcast,
    Op::Barrier,
    Op::Telemetry,
];

fn code(op: Op) -> (u32, u32) {
    // By name, so that the compiler asks for a new operation.
    let code = match op {
        Op::Count => 0,
        Op::Dispatch => 1,
        Op::DispatchIds => 2,
        Op::DispatchWeights => 3,
        Op::Combine => 4,
        Op::Replicate => 5,
        Op::DispatchBackward => 6,
        Op::DispatchWeightsBackward => 7,
        Op::CombineBackward => 8,
        Op::ReplicateBackward => 9,
        Op::ReplicaGrad => 10,
        Op::GradReduce => 11,
        Op::AllReduce => 12,
        Op::AllGather => 13,
        Op::AllToAll => 14,
        Op::Broadcast => 15,
        Op::Barrier => 16,
        Op::Telemetry => 17,
        Op::Custom(number) => return (CUSTOM, number),
    };
    (code, 0)
}

fn op(code: u32, number: u32) -> Option<Op> {
    match code {
        CUSTOM => Some(Op::Custom(number)),
        code => OPS.get(code as usize).copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_as_they_were() {
        for op in OPS.into_iter().chain([Op::Custom(0), Op::Custom(u32::MAX)]) {
            let key = Key {
                step: 1 << 40,
                layer: 61,
                op,
                part: 7,
                group: 0xfeed_f00d_dead_beef,
            };
            let header = Header { key, len: 3 << 32 };
            let bytes = header.encode();
            assert_eq!(Header::decode(&bytes), Some(header));
            assert_eq!(Header::decode(&bytes[1..]), None);
        }
    }

    #[test]
    fn other_bytes_are_no_header() {
        assert_eq!(Header::decode(&[0; HEADER]), None);
        let mut bytes = Header {
            key: Key::new(Op::Count, 0, 0),
            len: 0,
        }
        .encode();
        bytes[0] = 200;
        assert_eq!(Header::decode(&bytes), None);
    }
}
