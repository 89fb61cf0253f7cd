//! Saving model folders: byte for byte what was loaded, and never half.

mod hf_common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn_moe_models::hf::{Dtype, Element, Experts, Folder, HfError, Layout, Saver, TensorInfo};
use half::{bf16, f16};
use hf_common::*;

/// Experts of a folder: layer, how many, `d_model`, `d_hidden`.
type Moe = (String, usize, usize, usize);

/// Loads all tensors as a model does (experts as experts, matrices transposed) and saves them.
fn load_and_save<E: Element>(folder: &Folder, moe: &[Moe], target: &Path) -> Result<(), HfError> {
    let layout = Layout::of(folder)?;
    let mut saver = Saver::create(&layout, target)?;
    let mut done = Vec::new();
    for (layer, count, d, f) in moe {
        let experts = Experts::find(folder, layer, *count, *d, *f)?;
        done.extend(experts.names());
        for expert in 0..*count {
            let (gate_up, down) = experts.read::<E>(expert..expert + 1)?;
            saver.write_expert(layer, *count, expert, [*d, *f], &gate_up, &down)?;
        }
    }
    for name in folder.names() {
        if done.iter().any(|done| done == name) || name.ends_with("_scale_inv") {
            continue;
        }
        let info = folder.info(name).unwrap();
        match info.shape[..] {
            [rows, cols] => {
                let values = folder.read_transposed::<E>(name, [rows, cols])?;
                saver.write_transposed(name, [rows, cols], &values)?;
            }
            _ => saver.write(name, &info.shape, &folder.read::<E>(name, &info.shape)?)?,
        }
    }
    saver.finish()
}

/// Everything but what is no part of the model.
fn model_files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files = files(dir);
    files.retain(|(name, _)| name != "reference.safetensors" && name != "gradients.safetensors");
    files
}

fn moe_of(folder: &Folder) -> Vec<Moe> {
    let config = folder.config_json();
    let number = |names: &[&str]| {
        let found = names.iter().find_map(|name| config.get(name)?.as_u64());
        found.unwrap() as usize
    };
    let experts = number(&["n_routed_experts", "num_experts", "num_local_experts"]);
    let d_hidden = number(&["moe_intermediate_size", "intermediate_size"]);
    let layers = (0..number(&["num_hidden_layers"])).map(|layer| format!("model.layers.{layer}"));
    layers
        .filter(|layer| {
            folder
                .names()
                .any(|name| name.starts_with(layer) && name.contains(".experts."))
        })
        .map(|layer| (layer, experts, number(&["hidden_size"]), d_hidden))
        .collect()
}

#[test]
fn fixtures_come_back_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let folder = Folder::open(fixture(family)).unwrap();
        let moe = moe_of(&folder);
        let before = model_files(&fixture(family));
        for half in [false, true] {
            // In bf16 too: what the model did not change keeps its bytes.
            let target = dir.path().join(format!("{family}-{half}"));
            match half {
                false => load_and_save::<f32>(&folder, &moe, &target).unwrap(),
                true => load_and_save::<bf16>(&folder, &moe, &target).unwrap(),
            }
            assert!(model_files(&target) == before, "{family}");
        }
    }
}

/// Fused FP8 experts, FP8, bf16 and f16 matrices with every bit pattern, and a tokenizer.
fn exotic(dir: &Path, ue8m0: bool) -> Vec<Moe> {
    let (e, d, f) = (2, 130, 100);
    let prefix = "model.layers.0.mlp.experts";
    let scales = |name: &str, shape: &[usize], seed: usize| -> Raw {
        let len = shape.iter().product();
        match ue8m0 {
            true => {
                let bytes = bytes(len, seed).iter().map(|b| b % 255).collect();
                (name.into(), "F8_E8M0", shape.to_vec(), bytes)
            }
            false => f32_tensor(name, shape, &numbers(len, seed)),
        }
    };
    let all: Vec<u8> = (0..=u16::MAX).flat_map(|bits| bits.to_le_bytes()).collect();
    sharded(
        dir,
        &[
            vec![
                (
                    format!("{prefix}.gate_up_proj"),
                    "F8_E4M3",
                    vec![e, 2 * f, d],
                    bytes(e * 2 * f * d, 1),
                ),
                scales(&format!("{prefix}.down_proj_scale_inv"), &[e, 2, 1], 2),
                ("bf16".into(), "BF16", vec![512, 128], all.clone()),
            ],
            vec![
                scales(&format!("{prefix}.gate_up_proj_scale_inv"), &[e, 2, 2], 3),
                (
                    format!("{prefix}.down_proj"),
                    "F8_E4M3",
                    vec![e, d, f],
                    bytes(e * d * f, 4),
                ),
                (
                    "fp8.weight".into(),
                    "F8_E4M3",
                    vec![300, 140],
                    bytes(300 * 140, 5),
                ),
                scales("fp8.weight_scale_inv", &[3, 2], 6),
                ("f16".into(), "F16", vec![512, 128], all),
            ],
        ],
    );
    fs::write(dir.join("tokenizer.json"), "{\"version\": 1}").unwrap();
    vec![("model.layers.0".into(), e, d, f)]
}

#[test]
fn every_dtype_comes_back_byte_for_byte() {
    for ue8m0 in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        let moe = exotic(&from, ue8m0);
        let folder = Folder::open(&from).unwrap();
        load_and_save::<f32>(&folder, &moe, &to).unwrap();
        assert!(files(&to) == files(&from), "f32");
        load_and_save::<bf16>(&folder, &moe, &to).unwrap();
        assert!(files(&to) == files(&from), "bf16");
        // Onto itself, too.
        let before = files(&from);
        load_and_save::<f32>(&folder, &moe, &from).unwrap();
        assert!(files(&from) == before, "itself");
    }
}

#[test]
fn changed_values_are_rounded_to_the_stored_kind() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    for ue8m0 in [false, true] {
        let _ = fs::remove_dir_all(&from);
        fs::create_dir(&from).unwrap();
        exotic(&from, ue8m0);
        let folder = Folder::open(&from).unwrap();
        let layout = Layout::of(&folder).unwrap();
        let mut saver = Saver::create(&layout, &to).unwrap();
        let values = numbers(512 * 128, 7);
        saver.write("bf16", &[512, 128], &values).unwrap();
        saver.write("f16", &[512, 128], &values).unwrap();
        saver
            .write("fp8.weight", &[300, 140], &values[..300 * 140])
            .unwrap();
        for name in folder.names().filter(|name| name.contains("experts")) {
            saver.keep(name).unwrap();
        }
        saver.finish().unwrap();

        let saved = Folder::open(&to).unwrap();
        let (b, h) = (
            saved.read_f32("bf16", &[512, 128]).unwrap(),
            saved.read_f32("f16", &[512, 128]).unwrap(),
        );
        let fp8 = saved.read_f32("fp8.weight", &[300, 140]).unwrap();
        for (i, &value) in values.iter().enumerate() {
            assert_eq!(b[i], bf16::from_f32(value).to_f32());
            assert_eq!(h[i], f16::from_f32(value).to_f32());
        }
        for (i, &got) in fp8.iter().enumerate() {
            let (r, c) = (i / 140, i % 140);
            let block =
                (0..300 * 140).filter(|j| j / 140 / 128 == r / 128 && j % 140 / 128 == c / 128);
            // The largest of a block is exact (in powers of two: within a step), others within half a
            // step of theirs.
            if i % 997 == 0 {
                let largest = block.map(|j| values[j].abs()).fold(0.0, f32::max);
                let bound = (values[i].abs() / 16.0).max(largest / 448.0 / 256.0);
                assert!((got - values[i]).abs() <= bound, "{got} {}", values[i]);
            }
        }
    }
}

#[test]
fn a_new_layout_is_sharded_and_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("new");
    let shapes: [(&str, Dtype, &[usize]); 5] = [
        ("a", Dtype::F32, &[30, 20]),
        ("b", Dtype::BF16, &[7]),
        ("q.weight", Dtype::F8_E4M3, &[130, 20]),
        ("q.weight_scale_inv", Dtype::F32, &[2, 1]),
        ("z", Dtype::F32, &[40, 20]),
    ];
    let tensors = || {
        shapes.iter().map(|(name, dtype, shape)| {
            let (dtype, shape) = (*dtype, shape.to_vec());
            (name.to_string(), TensorInfo { dtype, shape })
        })
    };
    for (limit, count) in [(3000, 3), (u64::MAX, 1)] {
        let config = serde_json::json!({"model_type": "x"});
        let layout = Layout::new(&config, tensors(), limit).unwrap();
        let mut saver = Saver::create(&layout, &target).unwrap();
        for (name, _, shape) in shapes.iter().filter(|(name, ..)| !name.ends_with("_inv")) {
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|i| (i % 9) as f32)
                .collect();
            saver.write(name, shape, &values).unwrap();
        }
        saver.finish().unwrap();
        let folder = Folder::open(&target).unwrap();
        let shards = files(&target)
            .iter()
            .filter(|(name, _)| name.ends_with(".safetensors"))
            .count();
        assert_eq!(shards, count);
        assert_eq!(folder.config_json(), &config);
        let a = folder.read_f32("z", &[40, 20]).unwrap();
        assert!(a.iter().enumerate().all(|(i, &x)| x == (i % 9) as f32));
        // 8 is the largest of the block: 448 in its scale, where steps are 32.
        let q = folder.read_f32("q.weight", &[130, 20]).unwrap();
        assert!(
            q.iter()
                .enumerate()
                .all(|(i, &x)| (x - (i % 9) as f32).abs() <= 0.3)
        );
    }
    let twice = tensors().chain(tensors());
    assert!(matches!(
        Layout::new(&serde_json::json!({}), twice, 100),
        Err(HfError::Format { .. })
    ));
}

#[test]
fn ranks_write_their_parts() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("to");
    let folder = Folder::open(fixture("mixtral")).unwrap();
    let layout = Layout::of(&folder).unwrap();
    let moe = moe_of(&folder);
    let write = |saver: &mut Saver, ours: std::ops::Range<usize>| {
        for (layer, count, d, f) in &moe {
            let experts = Experts::find(&folder, layer, *count, *d, *f).unwrap();
            for expert in ours.clone() {
                let (gate_up, down) = experts.read::<f32>(expert..expert + 1).unwrap();
                saver
                    .write_expert(layer, *count, expert, [*d, *f], &gate_up, &down)
                    .unwrap();
            }
        }
    };
    let mut first = Saver::create(&layout, &target).unwrap();
    let others: Vec<BTreeMap<String, u64>> = std::thread::scope(|scope| {
        let ranks = [1..2, 2..4].map(|ours| {
            let (layout, target) = (&layout, &target);
            scope.spawn(move || {
                let mut saver = Saver::join(layout, target).unwrap();
                write(&mut saver, ours);
                saver.flush().unwrap();
                saver.written().clone()
            })
        });
        write(&mut first, 0..1);
        for name in folder.names().filter(|name| !name.contains(".experts.")) {
            first.keep(name).unwrap();
        }
        ranks.map(|rank| rank.join().unwrap()).into()
    });
    others.iter().for_each(|other| first.add_written(other));
    first.finish().unwrap();
    assert!(model_files(&target) == model_files(&fixture("mixtral")));
}

#[test]
fn what_is_not_complete_does_not_replace_anything() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("to");
    let folder = Folder::open(fixture("mixtral")).unwrap();
    let layout = Layout::of(&folder).unwrap();
    load_and_save::<f32>(&folder, &moe_of(&folder), &target).unwrap();
    let before = files(&target);

    let mut saver = Saver::create(&layout, &target).unwrap();
    saver.keep("model.norm.weight").unwrap();
    let error = saver.finish().unwrap_err();
    assert!(
        matches!(error, HfError::Unwritten { written: 0, .. }),
        "{error}"
    );
    let mut saver = Saver::create(&layout, &target).unwrap();
    for name in folder.names() {
        saver.keep(name).unwrap();
    }
    saver.keep("model.norm.weight").unwrap();
    let error = saver.finish().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("model.norm.weight: 192 of 96 bytes"),
        "{error}"
    );
    drop(Saver::create(&layout, &target).unwrap());

    assert!(files(&target) == before);
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        1,
        "nothing is left beside"
    );
}

#[test]
fn tensors_that_the_layout_has_no_place_for() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::open(fixture("mixtral")).unwrap();
    let layout = Layout::of(&folder).unwrap();
    let mut saver = Saver::create(&layout, dir.path().join("to")).unwrap();
    let error = saver.write("nope", &[1], &[0f32]).unwrap_err();
    assert!(matches!(error, HfError::Missing { .. }) && error.to_string().contains("nope"));
    let error = saver.write("model.norm.weight", &[1], &[0f32]).unwrap_err();
    assert!(
        matches!(error, HfError::Shape { .. }) && error.to_string().contains("model.norm.weight")
    );
    assert!(matches!(saver.keep("nope"), Err(HfError::Missing { .. })));
}

#[test]
fn folders_that_hold_anything_else_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::open(fixture("mixtral")).unwrap();
    let layout = Layout::of(&folder).unwrap();
    let target = dir.path().join("to");
    fs::create_dir(&target).unwrap();
    drop(Saver::create(&layout, &target).unwrap()); // empty: allowed
    fs::write(target.join("config.json"), "{}").unwrap();
    assert!(matches!(
        Saver::create(&layout, &target),
        Err(HfError::Occupied { .. })
    ));
    single(&target, &[]);
    drop(Saver::create(&layout, &target).unwrap()); // a model: allowed
    for other in ["thesis.tex", "reference.safetensors"] {
        fs::write(target.join(other), "mine").unwrap();
        let error = Saver::create(&layout, &target).unwrap_err();
        assert!(matches!(error, HfError::Occupied { .. }) && error.to_string().contains(other));
        fs::remove_file(target.join(other)).unwrap();
    }
    fs::create_dir(target.join("more")).unwrap();
    assert!(matches!(
        Saver::create(&layout, &target),
        Err(HfError::Occupied { .. })
    ));
}
