//! `prefill --model`: a folder of Hugging Face's against what transformers computed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::SafeTensors;

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../models/tests/fixtures")
        .join(family)
}

fn prefill(model: &Path, ids: &Path, args: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_prefill"))
        .arg("--model")
        .arg(model)
        .arg("--ids")
        .arg(ids)
        .args(["--max-new-tokens", "1", "--report"])
        .arg(folder.join("report"))
        .args(args)
        .output()
        .unwrap()
}

fn f32s(file: &SafeTensors<'_>, name: &str) -> (Vec<usize>, Vec<f32>) {
    let view = file.tensor(name).unwrap();
    let values = view.data().chunks_exact(4);
    let values = values.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    (view.shape().to_vec(), values.collect())
}

fn i64s(file: &SafeTensors<'_>, name: &str) -> Vec<i64> {
    let view = file.tensor(name).unwrap();
    let values = view.data().chunks_exact(8);
    values
        .map(|b| i64::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

/// Prompts of other lengths: causality makes a shortened prompt's logits the first of the full one's.
#[test]
fn logits_are_those_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for family in ["deepseek_v3", "mixtral"] {
        let model = fixture(family);
        let bytes = std::fs::read(model.join("reference.safetensors")).unwrap();
        let reference = SafeTensors::deserialize(&bytes).unwrap();
        let (shape, logits) = f32s(&reference, "logits");
        let (length, vocab) = (shape[1], shape[2]);
        let tokens = i64s(&reference, "input_ids");
        let prompts = [&tokens[..length], &tokens[length..length + 7]];
        let ids = folder.path().join("ids.json");
        std::fs::write(&ids, serde_json::to_string(&prompts).unwrap()).unwrap();
        let out = folder.path().join("logits.safetensors");
        let path = out.display().to_string();
        let run = prefill(
            &model,
            &ids,
            &["--ranks", "2", "--logits", &path],
            folder.path(),
        );
        assert!(
            run.status.success(),
            "{}",
            String::from_utf8_lossy(&run.stderr)
        );
        let bytes = std::fs::read(&out).unwrap();
        let saved = SafeTensors::deserialize(&bytes).unwrap();
        for (i, prompt) in prompts.iter().enumerate() {
            let (shape, got) = f32s(&saved, &format!("logits.{i}"));
            assert_eq!(shape, [prompt.len(), vocab], "{family}");
            let want = &logits[i * length * vocab..];
            for (got, want) in got.iter().zip(want) {
                assert!((got - want).abs() < 2e-5, "{family}: {got} {want}");
            }
            let (shape, weights) = f32s(&saved, &format!("router.1.weights.{i}"));
            assert_eq!(shape[0], prompt.len());
            assert_eq!(
                i64s(&saved, &format!("router.1.indices.{i}")).len(),
                weights.len()
            );
        }
    }
}

#[test]
fn unusable_ids_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let ids = folder.path().join("ids.json");
    for (text, expected) in [
        ("[[1, 2], [48]]", "--ids is 48"),
        ("[[1], []]", "--ids"),
        ("[]", "--ids"),
        ("[[1], -2]", "--ids"),
        ("{", "ids.json"),
    ] {
        std::fs::write(&ids, text).unwrap();
        let run = prefill(&fixture("mixtral"), &ids, &[], folder.path());
        let error = String::from_utf8_lossy(&run.stderr).into_owned();
        assert_eq!(run.status.code(), Some(2), "{error}");
        assert!(
            error.contains(expected) && error.lines().count() == 1,
            "{error}"
        );
    }
}
