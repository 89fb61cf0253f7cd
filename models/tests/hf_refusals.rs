//! Model folders that are refused, each with the file and the tensor named.

mod hf_common;

use std::fs;
use std::path::Path;

use burn_moe_models::hf::{Experts, Folder, HfError, ignorable};
use hf_common::*;
use tempfile::TempDir;

const INDEX: &str = "model.safetensors.index.json";

fn two_shards() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    sharded(
        dir.path(),
        &[
            vec![f32_tensor("a", &[2, 3], &numbers(6, 1))],
            vec![
                f32_tensor("b", &[4], &numbers(4, 2)),
                f32_tensor("c", &[2], &numbers(2, 3)),
            ],
        ],
    );
    dir
}

/// The error's text names all of these.
fn names<T>(result: Result<T, HfError>, parts: &[&str]) -> HfError {
    let Err(error) = result else {
        panic!("not refused: {parts:?}");
    };
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} not in: {text}");
    }
    error
}

fn open(dir: &Path) -> Folder {
    Folder::open(dir).unwrap()
}

#[test]
fn missing_tensor() {
    let dir = two_shards();
    let error = names(
        open(dir.path()).read_f32("d", &[1]),
        &[INDEX, "tensor d", "missing"],
    );
    assert!(matches!(error, HfError::Missing { .. }));
    let error = names(
        open(dir.path()).check_names(["a", "b", "c", "d"], |_| false),
        &[INDEX, "tensor d", "missing"],
    );
    assert!(matches!(error, HfError::Missing { .. }));
    names(
        Experts::find(&open(dir.path()), "model.layers.0", 1, 1, 1),
        &[INDEX, "model.layers.0.mlp.experts.0.gate_proj.weight"],
    );
}

#[test]
fn tensor_that_the_index_promises_is_not_in_its_shard() {
    let dir = two_shards();
    let shard = safetensors(&[f32_tensor("b", &[4], &numbers(4, 2))]);
    fs::write(dir.path().join("s1.safetensors"), shard).unwrap();
    let error = names(
        Folder::open(dir.path()),
        &["s1.safetensors", "tensor c", "missing"],
    );
    assert!(matches!(error, HfError::Missing { .. }));
}

#[test]
fn missing_files() {
    let dir = two_shards();
    fs::remove_file(dir.path().join("s1.safetensors")).unwrap();
    let error = names(Folder::open(dir.path()), &["s1.safetensors"]);
    assert!(matches!(error, HfError::Io { .. }));
    fs::remove_file(dir.path().join(INDEX)).unwrap();
    names(
        Folder::open(dir.path()),
        &["holds neither model.safetensors nor"],
    );
    fs::remove_file(dir.path().join("config.json")).unwrap();
    names(Folder::open(dir.path()), &["config.json"]);
    names(Folder::open(dir.path().join("nowhere")), &["nowhere"]);
}

#[test]
fn surplus_tensor() {
    let dir = two_shards();
    let error = names(
        open(dir.path()).check_names(["a", "b"], |_| false),
        &["s1.safetensors", "tensor c", "no place"],
    );
    assert!(matches!(error, HfError::Surplus { .. }));
    open(dir.path())
        .check_names(["a", "b"], |name| name == "c")
        .unwrap();
}

#[test]
fn tensor_that_the_index_does_not_list() {
    let dir = two_shards();
    let b = f32_tensor("b", &[4], &numbers(4, 2));
    let c = f32_tensor("c", &[2], &numbers(2, 3));
    for more in [f32_tensor("z", &[1], &[0.0]), f32_tensor("a", &[1], &[0.0])] {
        let name = format!("tensor {}", more.0);
        let shard = safetensors(&[b.clone(), c.clone(), more]);
        fs::write(dir.path().join("s1.safetensors"), shard).unwrap();
        let result = open(dir.path()).check_names(["a", "b", "c"], |_| false);
        names(result, &["s1.safetensors", &name, "no place"]);
    }
}

#[test]
fn prediction_layer_and_rotary_tables_are_no_surplus() {
    let dir = tempfile::tempdir().unwrap();
    let names = [
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.eh_proj.weight",
    ];
    single(
        dir.path(),
        &names.map(|name| f32_tensor(name, &[1], &[1.0])),
    );
    let folder = open(dir.path());
    folder
        .check_names([names[0]], |name| ignorable(name, 1))
        .unwrap();
    assert!(
        folder
            .check_names([names[0]], |name| ignorable(name, 2))
            .is_err()
    );
}

#[test]
fn misshapen_tensor() {
    let dir = two_shards();
    for shape in [&[3, 2][..], &[6], &[2, 3, 1], &[2, 2]] {
        let error = names(
            open(dir.path()).read_f32("a", shape),
            &[
                "s0.safetensors",
                "tensor a",
                "[2, 3]",
                &format!("{shape:?}"),
            ],
        );
        assert!(matches!(error, HfError::Shape { .. }));
    }
    names(
        open(dir.path()).read_transposed::<f32>("a", [3, 2]),
        &["tensor a", "[2, 3]"],
    );
}

#[test]
fn truncated_shard() {
    let dir = two_shards();
    let path = dir.path().join("s1.safetensors");
    let whole = fs::read(&path).unwrap();
    for keep in 0..whole.len() {
        fs::write(&path, &whole[..keep]).unwrap();
        let error = names(Folder::open(dir.path()), &["s1.safetensors", "truncated"]);
        assert!(matches!(error, HfError::Truncated { .. }));
        let in_b = keep < whole.len() - 8 && keep + 24 >= whole.len();
        if in_b || keep + 8 >= whole.len() {
            names(
                Err::<(), _>(error),
                &[if in_b { "tensor b" } else { "tensor c" }],
            );
        }
    }
    let longer = [&whole[..], &[0; 4]].concat();
    fs::write(&path, longer).unwrap();
    names(
        Folder::open(dir.path()),
        &["s1.safetensors", "its header describes"],
    );
}

#[test]
fn bad_json() {
    let dir = two_shards();
    let (index, config) = (dir.path().join(INDEX), dir.path().join("config.json"));
    let text = fs::read_to_string(&index).unwrap();
    for bad in [
        &text[..text.len() - 2],
        "",
        "[]",
        "{}",
        r#"{"weight_map": []}"#,
        r#"{"weight_map": {"a": 3}}"#,
    ] {
        fs::write(&index, bad).unwrap();
        let error = names(Folder::open(dir.path()), &[INDEX]);
        assert!(matches!(error, HfError::Format { .. }), "{bad}");
    }
    fs::write(&index, text).unwrap();
    for bad in ["{", "[1]", "\u{7f}"] {
        fs::write(&config, bad).unwrap();
        names(Folder::open(dir.path()), &["config.json"]);
    }
}

#[test]
fn damaged_headers() {
    let dir = two_shards();
    let path = dir.path().join("s0.safetensors");
    let whole = fs::read(&path).unwrap();
    let damaged = |from: &str, to: &str| {
        let len = whole[0] as usize;
        let header = std::str::from_utf8(&whole[8..8 + len])
            .unwrap()
            .replace(from, to);
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.into_bytes());
        file.extend(&whole[8 + len..]);
        file
    };
    for (from, to) in [
        ("[0,24]", "[4,24]"),
        ("[0,24]", "[24,0]"),
        ("[2,3]", "[2,4]"),
        ("[2,3]", "[18446744073709551615,3]"),
        ("\"shape\"", "\"form\""),
        ("}}", "}"),
    ] {
        fs::write(&path, damaged(from, to)).unwrap();
        names(Folder::open(dir.path()), &["s0.safetensors"]);
    }
    for first in [[0xff; 8], [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]] {
        let mut file = whole.clone();
        file[..8].copy_from_slice(&first);
        fs::write(&path, file).unwrap();
        names(Folder::open(dir.path()), &["s0.safetensors"]);
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    names(Folder::open(dir.path()), &["s0.safetensors", "not a file"]);
}

#[test]
fn shard_names_that_leave_the_folder() {
    for bad in [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "C:x.safetensors",
        "passwd",
        "a..safetensors",
    ] {
        let dir = two_shards();
        let index = serde_json::json!({"weight_map": {"a": "s0.safetensors", "b": bad}});
        fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
        let error = names(
            Folder::open(dir.path()),
            &[INDEX, "tensor b", &format!("{bad:?}")],
        );
        assert!(matches!(error, HfError::ShardName { .. }));
    }
}

#[test]
fn router_values_that_are_not_finite() {
    let name = "model.layers.3.mlp.gate.e_score_correction_bias";
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let dir = tempfile::tempdir().unwrap();
        single(dir.path(), &[f32_tensor(name, &[3], &[0.5, bad, 1.0])]);
        let error = names(
            open(dir.path()).read_finite_f32(name, &[3]),
            &["model.safetensors", name, "at 1"],
        );
        assert!(matches!(error, HfError::NotFinite { index: 1, .. }));
    }
}

#[test]
fn scales_that_are_missing_misshapen_or_not_finite() {
    let weight = || ("x.weight".into(), "F8_E4M3", vec![200, 4], vec![0x38; 800]);
    let dir = tempfile::tempdir().unwrap();
    let refused = |tensors: &[Raw], parts: &[&str]| {
        single(dir.path(), tensors);
        names(open(dir.path()).read_f32("x.weight", &[200, 4]), parts)
    };
    refused(&[weight()], &["tensor x.weight_scale_inv", "missing"]);
    let scale = "x.weight_scale_inv";
    refused(
        &[weight(), f32_tensor(scale, &[1, 1], &[1.0])],
        &[scale, "[1, 1]", "[2, 1]"],
    );
    refused(
        &[weight(), f32_tensor(scale, &[2, 1], &[1.0, f32::NAN])],
        &[scale, "NaN at 1"],
    );
    refused(
        &[
            weight(),
            (scale.into(), "F8_E8M0", vec![2, 1], vec![255, 3]),
        ],
        &[scale, "NaN at 0"],
    );
    refused(
        &[weight(), (scale.into(), "I16", vec![2, 1], vec![0; 4])],
        &[scale, "I16"],
    );
    let mut lonely = vec![weight(), f32_tensor(scale, &[2, 1], &[1.0, 1.0])];
    lonely.push(f32_tensor("y.weight_scale_inv", &[1], &[1.0]));
    single(dir.path(), &lonely);
    names(
        open(dir.path()).check_names(["x.weight"], |_| false),
        &["y.weight_scale_inv", "no place"],
    );
}

#[test]
fn elements_of_other_kinds() {
    let dir = tempfile::tempdir().unwrap();
    for (dtype, bytes) in [
        ("I64", 8),
        ("U8", 1),
        ("BOOL", 1),
        ("F64", 8),
        ("F8_E5M2", 1),
        ("F8_E8M0", 1),
    ] {
        single(
            dir.path(),
            &[("x".into(), dtype, vec![2, 1], vec![0; 2 * bytes])],
        );
        let error = names(
            open(dir.path()).read_f32("x", &[2, 1]),
            &["model.safetensors", "tensor x", dtype],
        );
        assert!(matches!(error, HfError::Dtype { .. }));
    }
    single(dir.path(), &[("x".into(), "F8_E4M3", vec![2], vec![0; 2])]);
    names(
        open(dir.path()).read_f32("x", &[2]),
        &["tensor x", "F8_E4M3"],
    );
    single(dir.path(), &[("x".into(), "F3", vec![2], vec![0; 2])]);
    names(
        Folder::open(dir.path()),
        &["model.safetensors", "tensor x", "F3"],
    );
}
