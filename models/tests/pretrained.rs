//! Loading model folders into decoders: what the caller is told meanwhile.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn::tensor::Device;
use burn_moe::comm::{RankOptions, run_ranks};
use burn_moe::parallel::{ExpertParallel, ParallelOptions};
use burn_moe_models::hf::Folder;
use burn_moe_models::pretrained::{self, LoadOptions};

fn fixture(family: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    fixtures.join(family)
}

/// The calls of `progress` on each of `ranks`.
fn progress(family: &str, ranks: usize) -> Vec<Vec<(u64, u64)>> {
    run_ranks(ranks, RankOptions::default(), |comm| {
        let ep = ExpertParallel::new(comm, ParallelOptions::default()).unwrap();
        let folder = Folder::open(fixture(family)).unwrap();
        let config = pretrained::read_config(&folder).unwrap();
        let calls = Mutex::new(Vec::new());
        let progress = |read, total| calls.lock().unwrap().push((read, total));
        let options = LoadOptions {
            progress: Some(&progress),
        };
        pretrained::load_with(&config, &ep, &folder, &Device::flex(), &options).unwrap();
        calls.into_inner().unwrap()
    })
    .unwrap()
}

#[test]
fn progress_ends_with_all_bytes_of_the_rank() {
    for family in ["deepseek_v3", "mixtral"] {
        let folder = Folder::open(fixture(family)).unwrap();
        let (experts, others): (Vec<&str>, Vec<&str>) =
            folder.names().partition(|name| name.contains(".experts."));
        let bytes = |names: &[&str]| -> u64 { names.iter().map(|n| folder.bytes_of(n)).sum() };
        assert_eq!(bytes(&experts) + bytes(&others), folder.num_bytes());
        for ranks in [1, 2] {
            let expected = bytes(&others) + bytes(&experts) / ranks as u64;
            for calls in progress(family, ranks) {
                assert!(calls.len() > 10, "{family}: {} calls", calls.len());
                assert!(calls.is_sorted());
                assert!(calls.iter().all(|(_, total)| *total == expected));
                assert_eq!(calls.last().unwrap().0, expected, "{family}");
            }
        }
    }
}
