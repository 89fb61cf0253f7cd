//! Loaded models saved again, from any number of ranks.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use burn_moe::comm::{Key, Op, RankOptions, run_ranks};
use burn_moe::parallel::{ExpertParallel, ParallelOptions};
use burn_moe_models::hf::Folder;
use burn_moe_models::{TokenBatch, pretrained};

const FAMILIES: [&str; 6] = [
    "deepseek_v3",
    "glm4_moe",
    "glm_moe_dsa",
    "minimax_m2",
    "mixtral",
    "qwen3_moe",
];

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(family)
}

/// The files of a model, without those that only the tests read.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, fs::read(&path).unwrap())
    });
    let of_tests = ["reference.safetensors", "gradients.safetensors"];
    entries
        .filter(|(name, _)| !of_tests.contains(&name.as_str()))
        .collect()
}

/// Adds to every parameter.
struct Shift(f64);

impl ModuleMapper for Shift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor + self.0)
    }
}

/// Loads, shifts and saves over `ranks`, and returns the logits of the shifted model.
fn shift_and_save(from: &Path, to: &Path, shift: f64, ranks: usize) -> Vec<f64> {
    let options = RankOptions {
        timeout: Duration::from_secs(30),
        ..Default::default()
    };
    let outputs = run_ranks(ranks, options, |comm| {
        let ep = ExpertParallel::new(comm, ParallelOptions::default()).unwrap();
        let folder = Folder::open(from).unwrap();
        let config = pretrained::read_config(&folder).unwrap();
        let mut decoder = pretrained::load(&config, &ep, &folder, &Device::flex()).unwrap();
        if shift != 0.0 {
            decoder = decoder.map(&mut Shift(shift));
        }
        let key = Key::new(Op::Custom(1), 0, 0);
        pretrained::save(&decoder, &config, &ep, &folder, to, key).unwrap();
        logits(&decoder)
    });
    outputs.unwrap().swap_remove(0)
}

fn logits(decoder: &burn_moe_models::Decoder) -> Vec<f64> {
    let batch = TokenBatch::new([[3, 1, 4, 1, 5, 9, 2, 6]]);
    decoder.forward(&batch).logits.into_data().iter().collect()
}

#[test]
fn what_was_not_changed_keeps_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let from = fixture(family);
        for ranks in [1, 2, 4] {
            let to = dir.path().join(format!("{family}-{ranks}"));
            shift_and_save(&from, &to, 0.0, ranks);
            assert!(files(&to) == files(&from), "{family} on {ranks} ranks");
        }
    }
}

/// What was changed is read back as it was when saved, and has the same files from any number of
/// ranks; layers for multi-token prediction, which the model leaves aside, stay.
#[test]
fn what_was_changed_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let from = fixture(family);
        let single = dir.path().join(family);
        let expected = shift_and_save(&from, &single, 0.03, 1);
        let to = dir.path().join(format!("{family}-4"));
        shift_and_save(&from, &to, 0.03, 4);
        assert!(files(&to) == files(&single), "{family}");
        assert!(files(&to) != files(&from), "{family}");
        let again = dir.path().join(format!("{family}-again"));
        let read = shift_and_save(&to, &again, 0.0, 1);
        assert_eq!(read, expected, "{family}");
        assert_eq!(files(&to).len(), files(&from).len(), "{family}");
    }
}

/// A folder with something else is left alone, on every rank.
#[test]
fn occupied_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    fs::write(to.join("thesis.tex"), "mine").unwrap();
    let from = fixture("mixtral");
    let options = RankOptions {
        timeout: Duration::from_secs(30),
        ..Default::default()
    };
    let messages = run_ranks(2, options, |comm| {
        let ep = ExpertParallel::new(comm, ParallelOptions::default()).unwrap();
        let folder = Folder::open(&from).unwrap();
        let config = pretrained::read_config(&folder).unwrap();
        let decoder = pretrained::load(&config, &ep, &folder, &Device::flex()).unwrap();
        let key = Key::new(Op::Custom(1), 0, 0);
        let saved = pretrained::save(&decoder, &config, &ep, &folder, &to, key);
        saved.unwrap_err().to_string()
    })
    .unwrap();
    assert!(messages[0].contains("thesis.tex"), "{}", messages[0]);
    assert!(messages[1].contains("rank 0"), "{}", messages[1]);
    assert_eq!(fs::read(to.join("thesis.tex")).unwrap(), b"mine");
}
