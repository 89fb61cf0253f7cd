//! Groups of some ranks talk among themselves, whatever the others do with the same keys.

use super::*;

/// Everything a rank can send, with the same keys, in the whole, in its group and in a group of that.
#[test]
fn the_same_key_in_the_whole_and_in_two_levels_of_groups() {
    run_ranks(8, patient(), |comm| {
        let rank = comm.rank();
        let half = split(&comm, key(Op::Custom(0)), rank / 4).unwrap();
        let pair = split(&half, key(Op::Custom(0)), half.rank() / 2).unwrap();
        let cross = split(&comm, key(Op::Custom(1)), rank % 4).unwrap();
        assert_eq!((half.rank(), half.size()), (rank % 4, 4));
        assert_eq!((pair.rank(), pair.size()), (rank % 2, 2));
        assert_eq!((cross.rank(), cross.size()), (rank / 4, 2));
        let tag = |level: u8| Bytes::from(vec![level, rank as u8]);
        let all = [&comm, &half, &pair, &cross];
        // All sends first: only the group keeps them apart.
        for (level, group) in all.iter().enumerate() {
            for to in 0..group.size() {
                group.send(to, key(Op::Dispatch), tag(level as u8)).unwrap();
            }
        }
        let members = [
            (0..8).collect::<Vec<_>>(),
            (rank / 4 * 4..rank / 4 * 4 + 4).collect(),
            (rank / 2 * 2..rank / 2 * 2 + 2).collect(),
            vec![rank % 4, rank % 4 + 4],
        ];
        for (level, group) in all.iter().enumerate().rev() {
            for (from, member) in members[level].iter().enumerate() {
                let got = group.recv(from, key(Op::Dispatch)).unwrap();
                assert_eq!(got, vec![level as u8, *member as u8]);
            }
            let mut sum = [rank as f32];
            group
                .all_reduce_sum_f32(key(Op::AllReduce), &mut sum)
                .unwrap();
            assert_eq!(sum[0], members[level].iter().sum::<usize>() as f32);
        }
    })
    .unwrap();
}

#[test]
fn a_group_knows_its_place() {
    run_ranks(4, patient(), |comm| {
        // 3 and 1 of 4, in the order of ranks, whatever the color is.
        let group = split(&comm, key(Op::Custom(0)), 9 - comm.rank() % 2).unwrap();
        assert_eq!((group.rank(), group.size()), (comm.rank() / 2, 2));
        assert_eq!(group.topology(), Topology::flat(2));
        assert_eq!(group.timeout(), comm.timeout());
        let invalid = group.send(2, key(Op::Count), Bytes::new()).unwrap_err();
        assert_eq!(
            invalid.to_string(),
            "count (layer 3, micro-batch 17): there is no rank 2, ranks are 0 to 1"
        );
    })
    .unwrap();
}

/// The loss of a rank that is in another group ends a group too, and is named as everyone knows it.
#[test]
fn losses_are_named_by_world_rank() {
    let failure = failure(run_ranks(4, patient(), |comm| {
        let group = split(&comm, key(Op::Custom(0)), comm.rank() % 2).unwrap();
        if comm.rank() == 3 {
            // A loss ends every wait, and splitting is one: the others must have their groups.
            for other in 0..3 {
                comm.recv(other, key(Op::Custom(1))).unwrap();
            }
            panic!("boom");
        }
        comm.send(3, key(Op::Custom(1)), Bytes::new()).unwrap();
        group
            .all_gather(key(Op::Count), Bytes::new())
            .unwrap_or_else(|error| fail(error));
        // The pair of 0 and 2 is complete: it learns of 3 in the whole.
        comm.barrier(key(Op::Barrier))
            .unwrap_or_else(|error| fail(error));
    }));
    assert_eq!(failure.rank, 3);
    let RankOutcome::Comm(CommError::RankLost {
        lost, rank, key, ..
    }) = &failure.others[1].1
    else {
        panic!("{failure}");
    };
    assert_eq!((*lost, *rank, key.op), (3, 1, Op::Count));
    assert!(
        failure
            .to_string()
            .contains("rank 1 was in count (layer 3, micro-batch 17, group ")
    );
}
