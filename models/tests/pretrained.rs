//! Loading model folders into decoders, and saving decoders as model folders.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use burn_moe::comm::{RankOptions, run_ranks};
use burn_moe::parallel::{ExpertParallel, ParallelOptions};
use burn_moe_models::hf::{Dtype, Folder, Layout, Saver, TensorInfo};
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

const FAMILIES: [&str; 6] = [
    "deepseek_v3",
    "glm4_moe",
    "glm_moe_dsa",
    "minimax_m2",
    "mixtral",
    "qwen3_moe",
];

/// The files of a folder; of fixtures without what belongs to the test.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap());
    let files = entries.map(|entry| {
        let name = entry.file_name().into_string().unwrap();
        (name, std::fs::read(entry.path()).unwrap())
    });
    let of_test = ["reference.safetensors", "gradients.safetensors"];
    files
        .filter(|(name, _)| !of_test.contains(&name.as_str()))
        .collect()
}

struct Double;

impl ModuleMapper for Double {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor * 2.0)
    }
}

/// Loads `from` on `ranks` ranks, doubles every parameter if `doubled`, and saves to `to`.
fn copy(from: &Path, to: &Path, ranks: usize, doubled: bool) {
    let outcomes = run_ranks(ranks, RankOptions::default(), |comm| {
        let ep = ExpertParallel::new(comm, ParallelOptions::default()).unwrap();
        let folder = Folder::open(from).unwrap();
        let config = pretrained::read_config(&folder).unwrap();
        let mut decoder = pretrained::load(&config, &ep, &folder, &Device::flex()).unwrap();
        if doubled {
            decoder = decoder.map(&mut Double);
        }
        let layout = Layout::of(&folder).unwrap();
        pretrained::save(&decoder, &config, &ep, &layout, to, 0).map_err(|e| e.to_string())
    });
    for outcome in outcomes.unwrap() {
        outcome.unwrap();
    }
}

fn assert_same_files(a: &Path, b: &Path) {
    let (a, b) = (files(a), files(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        assert!(b[name] == *bytes, "{name} differs");
    }
}

/// How a fixture is stored anew: its elements, fused experts or not, in one file or several.
struct Form {
    dtype: Dtype,
    fused: bool,
    max_shard_bytes: u64,
}

/// Stores a fixture in another form, by way of plain `f32` tensors.
fn store(family: &str, form: &Form, target: &Path) {
    let folder = Folder::open(fixture(family)).unwrap();
    let read = |name: &str| {
        let shape = folder.info(name).unwrap().shape;
        let values = folder.read_f32(name, &shape).unwrap();
        (shape, values)
    };
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for name in folder.names() {
        let parts: Vec<&str> = name.split(".experts.").collect();
        let [of, rest] = parts[..] else {
            tensors.insert(name.into(), read(name));
            continue;
        };
        if !form.fused {
            tensors.insert(name.into(), read(name));
            continue;
        }
        // In the order of the experts: gate and up go into one tensor, down into another.
        let (expert, part) = rest.split_once('.').unwrap();
        let expert: usize = expert.parse().unwrap();
        let (shape, values) = read(name);
        let (to, slot) = match part {
            "gate_proj.weight" | "w1.weight" => ("gate_up_proj", 2 * expert),
            "up_proj.weight" | "w3.weight" => ("gate_up_proj", 2 * expert + 1),
            _ => ("down_proj", expert),
        };
        let experts = folder
            .names()
            .filter(|n| n.starts_with(&format!("{of}.experts.")) && n.ends_with(part))
            .count();
        let entry = tensors
            .entry(format!("{of}.experts.{to}"))
            .or_insert_with(|| {
                let rows = shape[0] * if to == "down_proj" { 1 } else { 2 };
                (
                    vec![experts, rows, shape[1]],
                    vec![0.0; experts * rows * shape[1]],
                )
            });
        entry.1[slot * values.len()..][..values.len()].copy_from_slice(&values);
    }
    let mut infos = Vec::new();
    for (name, (shape, _)) in &tensors {
        let router = name.contains("e_score_correction_bias") || name.ends_with("gate.weight");
        let matrix = shape.len() >= 2 && !router && !name.contains("embed");
        let dtype = match form.dtype {
            _ if router => Dtype::F32,
            Dtype::F8_E4M3 if !matrix => Dtype::BF16,
            dtype => dtype,
        };
        if dtype == Dtype::F8_E4M3 {
            let mut blocks = shape.clone();
            let sides = blocks.len() - 2;
            for side in &mut blocks[sides..] {
                *side = side.div_ceil(128);
            }
            let info = TensorInfo {
                dtype: Dtype::F32,
                shape: blocks,
            };
            infos.push((format!("{name}_scale_inv"), info));
        }
        let shape = shape.clone();
        infos.push((name.clone(), TensorInfo { dtype, shape }));
    }
    let layout = Layout::new(folder.config_json(), infos, form.max_shard_bytes).unwrap();
    let mut saver = Saver::create(&layout, target).unwrap();
    for (name, (shape, values)) in &tensors {
        saver.write(name, shape, values).unwrap();
    }
    saver.finish().unwrap();
}

#[test]
fn unchanged_models_are_saved_byte_for_byte() {
    let temp = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let target = temp.path().join(family);
        copy(&fixture(family), &target, 2, false);
        assert_same_files(&fixture(family), &target);
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F8_E4M3] {
            for (fused, max_shard_bytes) in [(false, 4_000), (true, 4_000), (true, u64::MAX)] {
                let form = Form {
                    dtype,
                    fused,
                    max_shard_bytes,
                };
                let name = format!("{family}-{dtype:?}-{fused}-{max_shard_bytes}");
                let stored = temp.path().join(&name);
                store(family, &form, &stored);
                let single = stored.join("model.safetensors").exists();
                assert_eq!(single, max_shard_bytes == u64::MAX);
                let target = temp.path().join(format!("{name}-saved"));
                copy(&stored, &target, 2, false);
                assert_same_files(&stored, &target);
            }
        }
    }
}

/// Doubling is exact in every kind of float, and in FP8 it doubles a block's scale.
#[test]
fn changed_models_are_saved_with_their_new_values() {
    let temp = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        for (dtype, fused) in [
            (Dtype::F32, false),
            (Dtype::BF16, true),
            (Dtype::F8_E4M3, false),
        ] {
            let form = Form {
                dtype,
                fused,
                max_shard_bytes: 20_000,
            };
            let stored = temp.path().join(format!("{family}-{dtype:?}"));
            store(family, &form, &stored);
            let target = temp.path().join(format!("{family}-{dtype:?}-doubled"));
            copy(&stored, &target, 2, true);
            let (old, new) = (
                Folder::open(&stored).unwrap(),
                Folder::open(&target).unwrap(),
            );
            for name in old.names().filter(|name| !name.ends_with("_scale_inv")) {
                let info = old.info(name).unwrap();
                assert_eq!(new.info(name).unwrap(), info, "{name}");
                let was = old.read_f32(name, &info.shape).unwrap();
                let is = new.read_f32(name, &info.shape).unwrap();
                for (was, is) in was.iter().zip(is) {
                    let off = (2.0 * was - is).abs();
                    let allowed = match info.dtype {
                        Dtype::F8_E4M3 => 1e-6 * is.abs(),
                        _ => 0.0,
                    };
                    assert!(off <= allowed, "{family}: {name}: {was} twice is {is}");
                }
            }
        }
    }
}

/// A folder with something else is left alone, and every rank is told.
#[test]
fn occupied_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    std::fs::create_dir(&to).unwrap();
    std::fs::write(to.join("thesis.tex"), "mine").unwrap();
    let from = fixture("mixtral");
    let messages = run_ranks(2, RankOptions::default(), |comm| {
        let ep = ExpertParallel::new(comm, ParallelOptions::default()).unwrap();
        let folder = Folder::open(&from).unwrap();
        let config = pretrained::read_config(&folder).unwrap();
        let decoder = pretrained::load(&config, &ep, &folder, &Device::flex()).unwrap();
        let layout = Layout::of(&folder).unwrap();
        let saved = pretrained::save(&decoder, &config, &ep, &layout, &to, 0);
        saved.unwrap_err().to_string()
    })
    .unwrap();
    assert!(messages[0].contains("thesis.tex"), "{}", messages[0]);
    assert!(messages[1].contains("rank 0"), "{}", messages[1]);
    assert_eq!(std::fs::read(to.join("thesis.tex")).unwrap(), b"mine");
}
