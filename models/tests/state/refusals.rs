//! What is not the checkpoint is refused, by the file's name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::optim::AdamWConfig;
use burn_moe::comm::{RankOptions, run_ranks, solo, try_run_ranks};
use burn_moe_models::state::{SavedState, StateError, StateFolder};
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};
use twox_hash::XxHash3_128;

use crate::common::*;

const FIRST: &str = "rank-00000-of-00002.safetensors";
const SECOND: &str = "rank-00001-of-00002.safetensors";

/// A run saved on two ranks after steps 2 and 4.
fn run(name: &str) -> TempDir {
    let folder = tempdir().unwrap();
    saved(&StateFolder::new(folder.path()), name, 2, &[2, 4]);
    folder
}

fn newest(folder: &TempDir) -> PathBuf {
    folder.path().join("step-00000004")
}

/// Why one rank does not load it.
fn refusal(path: &Path) -> String {
    match Trainee::load(solo(), path) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{} is loaded", path.display()),
    }
}

fn assert_names(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

fn edit_manifest(folder: &Path, edit: impl FnOnce(&mut Value)) {
    let path = folder.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut manifest);
    fs::write(&path, manifest.to_string()).unwrap();
}

/// Makes the manifest say what the file is now.
fn forge(folder: &Path, file: &str, rank: usize) {
    let bytes = fs::read(folder.join(file)).unwrap();
    edit_manifest(folder, |manifest| {
        manifest["shards"][rank]["bytes"] = json!(bytes.len());
        let hash = XxHash3_128::oneshot(&bytes);
        manifest["shards"][rank]["xxh3"] = json!(format!("{hash:032x}"));
    });
}

#[test]
fn truncated_and_damaged_files() {
    let folder = run("a");
    let newest = newest(&folder);
    let path = newest.join(SECOND);
    let whole = fs::read(&path).unwrap();
    for len in [0, 1, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..len]).unwrap();
        let text = refusal(folder.path());
        assert_names(
            &text,
            &[SECOND, &format!("{len} bytes"), &whole.len().to_string()],
        );
    }
    for at in [3, 500, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(&path, damaged).unwrap();
        assert_names(&refusal(folder.path()), &[SECOND]);
    }
    let mut longer = whole.clone();
    longer.push(0);
    fs::write(&path, longer).unwrap();
    assert_names(&refusal(folder.path()), &[SECOND, "bytes"]);
    fs::remove_file(&path).unwrap();
    assert_names(&refusal(folder.path()), &[SECOND]);
    fs::write(&path, whole).unwrap();
    assert_eq!(
        Trainee::load(solo(), folder.path()).unwrap().state,
        state("a", 4)
    );
}

/// Whichever rank it is that reads the damaged file, that rank's error is the one reported.
#[test]
fn a_damaged_file_is_named_on_many_ranks() {
    let folder = run("a");
    for file in [FIRST, SECOND] {
        let path = newest(&folder).join(file);
        let whole = fs::read(&path).unwrap();
        let mut damaged = whole.clone();
        damaged[whole.len() - 9] ^= 64;
        fs::write(&path, damaged).unwrap();
        let result = try_run_ranks(4, RankOptions::default(), |comm| {
            let loaded = Trainee::load(comm, folder.path());
            loaded.map(|_| ()).map_err(of_rank)
        });
        let text = result.unwrap_err().to_string();
        assert_names(&text, &[file, "damaged: checksum"]);
        fs::write(&path, whole).unwrap();
    }
}

#[test]
fn exchanged_and_foreign_files() {
    let (folder, other) = (run("a"), run("b"));
    let newest = newest(&folder);
    let [first, second] = [FIRST, SECOND].map(|file| newest.join(file));
    let [whole, other_half] = [&first, &second].map(|path| fs::read(path).unwrap());
    // Each in the other's place.
    fs::write(&first, &other_half).unwrap();
    fs::write(&second, &whole).unwrap();
    assert_names(
        &refusal(folder.path()),
        &[FIRST, "rank 1 where rank 0 belongs"],
    );
    fs::write(&second, &other_half).unwrap();
    // Of another step, and of another run.
    fs::copy(folder.path().join("step-00000002").join(FIRST), &first).unwrap();
    assert_names(
        &refusal(folder.path()),
        &[FIRST, "step 2 where step 4 belongs"],
    );
    fs::copy(other.path().join("step-00000004").join(FIRST), &first).unwrap();
    assert_names(
        &refusal(folder.path()),
        &[FIRST, "run b where run a belongs"],
    );
    // Even when the manifest has its checksum.
    forge(&newest, FIRST, 0);
    assert_names(
        &refusal(folder.path()),
        &[FIRST, "run b where run a belongs"],
    );
    // A manifest of another step.
    fs::write(&first, &whole).unwrap();
    let of_other = folder.path().join("step-00000002/manifest.json");
    fs::copy(of_other, newest.join("manifest.json")).unwrap();
    assert_names(&refusal(&newest), &[FIRST, "step 4 where step 2 belongs"]);
    // No file of a training run at all.
    let stranger = safetensors::serialize(
        Vec::<(String, safetensors::tensor::TensorView)>::new(),
        None,
    );
    fs::write(&first, stranger.unwrap()).unwrap();
    assert_names(&refusal(&newest), &[FIRST, "run none where run a belongs"]);
}

#[test]
fn manifests() {
    let folder = run("a");
    let newest = newest(&folder);
    let path = newest.join("manifest.json");
    let whole = fs::read(&path).unwrap();
    for len in 0..whole.len() - 1 {
        fs::write(&path, &whole[..len]).unwrap();
        let text = SavedState::open(folder.path()).unwrap_err().to_string();
        assert_names(&text, &["manifest.json", "not a manifest"]);
    }
    let edited = |edit: &dyn Fn(&mut Value)| {
        fs::write(&path, &whole).unwrap();
        edit_manifest(&newest, edit);
        refusal(folder.path())
    };
    let text = edited(&|m| m["format"] = json!("burn-moe training state 9"));
    assert_names(&text, &["manifest.json", "state 9", "state 1"]);
    for name in ["../../etc/passwd", "/etc/passwd", FIRST] {
        let text = edited(&|m| m["shards"][1]["file"] = json!(name));
        assert_names(&text, &["manifest.json", name, SECOND]);
    }
    assert_names(
        &edited(&|m| m["ranks"] = json!(0)),
        &["manifest.json", "0 ranks"],
    );
    assert_names(&edited(&|m| m["ranks"] = json!(3)), &["2 files of 3 ranks"]);
    assert_names(
        &edited(&|m| m["position"] = json!(17)),
        &[FIRST, "position 16"],
    );
    assert_names(
        &edited(&|m| m["step"] = json!(5)),
        &[FIRST, "step 4 where step 5"],
    );
    assert_names(
        &edited(&|m| m["extra"] = json!(1)),
        &["manifest.json", "extra"],
    );
    let text = edited(&|m| m["config"]["d_model"] = json!(48));
    assert_names(&text, &["config.d_model is 32, allowed: 48"]);
    // Without one, the checkpoint before is the newest.
    fs::remove_file(&path).unwrap();
    assert_eq!(SavedState::open(folder.path()).unwrap().step(), 2);
    assert_names(&refusal(&newest), &["step-00000004", "no manifest.json"]);
    assert_names(
        &refusal(&folder.path().join("absent")),
        &["absent", "no such folder"],
    );
    let empty = tempdir().unwrap();
    assert_names(&refusal(empty.path()), &["no complete checkpoint"]);
}

/// Headers that promise more than there is must cost nothing.
#[test]
fn forged_headers() {
    let folder = run("a");
    let newest = newest(&folder);
    let path = newest.join(FIRST);
    let whole = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(whole[8..8 + header].to_vec()).unwrap();
    for length in [u64::MAX, 1 << 62, 1 << 40, whole.len() as u64] {
        let mut forged = whole.clone();
        forged[..8].copy_from_slice(&length.to_le_bytes());
        fs::write(&path, forged).unwrap();
        forge(&newest, FIRST, 0);
        assert_names(&refusal(folder.path()), &[FIRST, "not a safetensors file"]);
    }
    // Another shape of as many numbers, another type of as many bytes, another name.
    let swapped = |from: &str, to: &str| {
        assert!(text.contains(from), "{from:?} is not in the header");
        let text = text.replacen(from, to, 1);
        let mut forged = (text.len() as u64).to_le_bytes().to_vec();
        forged.extend_from_slice(text.as_bytes());
        forged.extend_from_slice(&whole[8 + header..]);
        fs::write(&path, forged).unwrap();
        forge(&newest, FIRST, 0);
        refusal(folder.path())
    };
    let name = "model/layers.1.feed_forward.Moe.experts.0.gate_up";
    let shape = format!("\"{name}\":{{\"dtype\":\"F32\",\"shape\":[32,48]");
    let text_of = |to: &str| swapped(&shape, &shape.replace("\"F32\",\"shape\":[32,48]", to));
    assert_names(
        &text_of("\"F32\",\"shape\":[48,32]"),
        &[FIRST, name, "[48, 32]"],
    );
    assert_names(&text_of("\"F64\",\"shape\":[16,48]"), &[FIRST, name, "F64"]);
    assert_names(&text_of("\"U32\",\"shape\":[32,48]"), &[FIRST, name, "U32"]);
    assert_names(&swapped(name, "model/nonsense"), &[name, "missing"]);
    let moment = "optimizer/layers.1.feed_forward.Moe.experts.0.gate_up/moment_1";
    let text = swapped(moment, &moment.replace("moment_1", "moment_9"));
    assert_names(
        &text,
        &[
            "optimizer/layers.1.feed_forward.Moe.experts.1.gate_up",
            "moment_9",
        ],
    );
    let text = swapped(moment, "optimizer/nonsense/moment_1");
    assert_names(&text, &["optimizer/"]);
    let history = swapped("history/loss", "histories/loss");
    assert_names(&history, &[FIRST, "histories/loss", "no such parameter"]);
}

#[test]
fn another_model_other_settings_another_optimizer() {
    let folder = run("a");
    let opened = SavedState::open(folder.path()).unwrap();
    let settings = state("a", 4).settings;
    opened.check(&config(), &settings).unwrap();
    let mut other = config();
    other.num_experts = 32;
    let text = opened.check(&other, &settings).unwrap_err().to_string();
    assert_names(
        &text,
        &["step-00000004", "config.num_experts is 32, allowed: 16"],
    );
    let refused = |settings: BTreeMap<String, String>| match opened.check(&config(), &settings) {
        Err(StateError::Setting {
            setting,
            saved,
            given,
            ..
        }) => [setting, saved, given],
        other => panic!("{other:?}"),
    };
    let lr = |value: &str| ("--lr".to_owned(), value.to_owned());
    assert_eq!(refused([lr("0.02")].into()), ["--lr", "0.01", "0.02"]);
    assert_eq!(refused([].into()), ["--lr", "0.01", "not set"]);
    let more = [lr("0.01"), ("--clip".to_owned(), "1".to_owned())];
    assert_eq!(refused(more.into()), ["--clip", "not set", "1"]);

    run_ranks(1, RankOptions::default(), |comm| {
        let (mesh, ep) = parallel(comm);
        let error = opened
            .load(&other, &ep, &mesh, &device(), QUIET)
            .err()
            .unwrap();
        assert_names(&error.to_string(), &["config.num_experts"]);
        let loaded = opened
            .load(&config(), &ep, &mesh, &device(), QUIET)
            .unwrap();
        // Plain AdamW names its moments otherwise.
        let error = loaded.optimizer(AdamWConfig::new().init()).err().unwrap();
        assert_names(
            &error.to_string(),
            &["step-00000004", "the optimizer takes"],
        );
    })
    .unwrap();
}
