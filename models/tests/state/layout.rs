//! What is in the folder, and that it can be loaded on any number of ranks.

use std::collections::BTreeMap;
use std::fs;

use burn::tensor::DType;
use burn_moe::comm::{RankOptions, run_ranks};
use burn_moe_models::state::{SavedState, StateError, StateFolder};
use safetensors::SafeTensors;
use tempfile::tempdir;

use crate::common::*;

/// Saved after three steps on some ranks, loaded and continued for two on others, which form other
/// groups too: weights to the bit as if nothing had happened, which they are only if every moment,
/// count and master weight is.
#[test]
fn any_ranks_in_any_groups_continue_to_the_bit() {
    // Ranks, and how many of them share the experts.
    let one_group = [(1, 1), (4, 4), (4, 2), (2, 4), (4, 1), (1, 8)].map(|(a, b)| [(a, a), (b, b)]);
    let groups_of = [
        [(4, 2), (4, 2)],
        [(4, 2), (4, 4)],
        [(4, 1), (2, 1)],
        [(2, 2), (4, 2)],
        [(6, 2), (4, 1)],
    ];
    for dtype in [DType::F32, DType::BF16] {
        let expected = unbroken(1, 5, dtype);
        for [from, to] in one_group.into_iter().chain(groups_of) {
            let folder = tempdir().unwrap();
            let states = StateFolder::new(folder.path());
            run_ranks(from.0, RankOptions::default(), |comm| {
                let mut trainee = Trainee::new_in(groups(comm, from.1), "a", dtype);
                (0..3).for_each(|_| trainee.step());
                trainee.save(&states).unwrap();
            })
            .unwrap();
            let opened = SavedState::open(folder.path()).unwrap();
            assert_eq!((opened.ranks(), opened.expert_ranks()), from);
            let got = on_ranks(to.0, |comm| {
                let mut trainee = Trainee::load_in(groups(comm, to.1), folder.path()).unwrap();
                assert_eq!(trainee.state, state("a", 3));
                (0..2).for_each(|_| trainee.step());
                trainee.weights()
            });
            assert_eq!(got.len(), expected.len());
            for (name, bytes) in &expected {
                assert!(
                    got[name] == *bytes,
                    "{dtype:?}, {from:?} to {to:?} ranks: {name}"
                );
            }
        }
    }
}

/// Bytes of tensors by name, over all files of a checkpoint.
fn tensors(folder: &std::path::Path) -> Vec<(String, usize, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|ending| ending == "safetensors")
        {
            let bytes = fs::read(&path).unwrap();
            let file = path.file_name().unwrap().to_string_lossy().into_owned();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
                found.push((name.to_owned(), view.data().len(), file.clone()));
            }
        }
    }
    found
}

/// However many ranks hold it.
#[test]
fn everything_is_stored_once_and_shared_out() {
    for (ranks, ep) in [(4, 4), (4, 2), (4, 1), (6, 2)] {
        let folder = tempdir().unwrap();
        let states = StateFolder::new(folder.path());
        run_ranks(ranks, RankOptions::default(), |comm| {
            let mut trainee = Trainee::new_in(groups(comm, ep), "a", DType::F32);
            (0..2).for_each(|_| trainee.step());
            trainee.save(&states).unwrap();
        })
        .unwrap();
        let found = tensors(&folder.path().join("step-00000002"));
        let mut names: Vec<_> = found.iter().map(|(name, ..)| name).collect();
        names.sort();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all, "a tensor is stored twice");

        let sum = |kind: &str| -> usize {
            let of_kind = found.iter().filter(|(name, ..)| name.starts_with(kind));
            of_kind.map(|(_, bytes, _)| *bytes).sum()
        };
        let parameters = sum("model/") / 4;
        let expected: usize = unbroken(1, 0, DType::F32)
            .values()
            .map(|w| w.len() / 4)
            .sum();
        assert_eq!(parameters, expected);
        let moments: usize = found
            .iter()
            .filter(|(name, ..)| name.ends_with("/moment_1") || name.ends_with("/moment_2"))
            .map(|(_, bytes, _)| bytes / 4)
            .sum();
        // Router biases, one value for each of 16 experts in both layers, have none.
        assert_eq!(moments, 2 * (parameters - 2 * 16));

        let mut files: BTreeMap<&str, usize> = BTreeMap::new();
        for (_, bytes, file) in &found {
            *files.entry(file).or_default() += bytes;
        }
        assert_eq!(files.len(), ranks);
        let (least, most) = (files.values().min().unwrap(), files.values().max().unwrap());
        assert!(*most < 2 * least, "uneven files: {files:?}");
        // Experts are where they live: expert 3 on the first rank of a group when there are four
        // ranks in it or fewer.
        let of_third = |name: &str| name.contains(".experts.3.");
        let files: Vec<_> = found.iter().filter(|(name, ..)| of_third(name)).collect();
        assert!(!files.is_empty());
        for (name, _, file) in files {
            let rank: usize = file[5..10].parse().unwrap();
            assert_eq!(rank % ep, 0, "{name} is in {file}");
        }
    }
}

#[test]
fn the_newest_are_kept() {
    let folder = tempdir().unwrap();
    saved(
        &StateFolder::new(folder.path()).with_keep(2),
        "a",
        2,
        &[1, 3, 4, 7],
    );
    let mut left: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["step-00000004", "step-00000007"]);
    assert_eq!(SavedState::open(folder.path()).unwrap().step(), 7);
    let older = SavedState::open(&folder.path().join("step-00000004")).unwrap();
    assert_eq!((older.step(), older.ranks(), older.run()), (4, 2, "a"));
}

#[test]
fn progress_ends_with_all_bytes() {
    let folder = tempdir().unwrap();
    let states = StateFolder::new(folder.path());
    saved(&states, "a", 2, &[1]);
    run_ranks(2, RankOptions::default(), |comm| {
        let last = std::cell::Cell::new((0, 0));
        let saved = SavedState::open(folder.path()).unwrap();
        let note = |done, total| {
            assert!(done > last.get().0, "it goes on");
            last.set((done, total));
        };
        let rank = comm.rank();
        let (mesh, ep) = parallel(comm);
        saved.load(&config(), &ep, &mesh, &device(), &note).unwrap();
        let file = format!("rank-{rank:05}-of-00002.safetensors");
        let bytes = fs::metadata(saved.folder().join(file)).unwrap().len();
        assert_eq!(last.get(), (bytes, bytes));
    })
    .unwrap();
}

#[test]
fn runs_do_not_mix() {
    let folder = tempdir().unwrap();
    let states = StateFolder::new(folder.path());
    saved(&states, "a", 1, &[3]);
    let refused = |run: &str, step: u64| match states.check_target(run, step) {
        Err(StateError::Occupied { message, .. }) => message,
        other => panic!("{other:?}"),
    };
    assert!(refused("b", 9).contains("another run"));
    assert!(refused("a", 3).contains("not older than step 3"));
    states.check_target("a", 4).unwrap();
    run_ranks(1, RankOptions::default(), |comm| {
        let trainee = Trainee::new(comm, "b", DType::F32);
        let error = trainee.save(&states).unwrap_err();
        assert!(error.to_string().contains("step-00000003"), "{error}");
    })
    .unwrap();
}
