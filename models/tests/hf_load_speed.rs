//! How fast a large folder loads, and with how much memory: run with
//! `cargo test --release -p burn-moe-models --test hf_load_speed -- --ignored --nocapture`.
//! `HF_LOAD_GB` sets the size (4), `HF_LOAD_DIR` where the folder is made.
//!
//! Files lie in the page cache, and what is compared runs in turn in the same process, as many threads
//! as ranks, the best of several rounds:
//! - *read*: all bytes by `read()` into one small buffer again and again. No memory is needed for it,
//!   so a loader is compared with it that transposes into the same buffers again and again.
//! - *kept*: all bytes by `read()` into buffers of their own that are new: what any loader has to do at
//!   least, and what loading a model, into new memory too, is compared with.
//!
//! The model has the elements of the folder; a folder of bf16 as f32 is measured for information.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

use burn_moe_models::hf::{Dtype, Element, Experts, Folder, Layout, TensorInfo};

const LAYERS: usize = 8;
const EXPERTS: usize = 16;
const D_MODEL: usize = 2048;
const RANKS: usize = 4;
const ROUNDS: usize = 5;

fn read_all(paths: &[std::path::PathBuf]) -> u64 {
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0;
    for path in paths {
        let mut file = File::open(path).unwrap();
        loop {
            match file.read(&mut buffer).unwrap() {
                0 => break,
                n => total += n as u64,
            }
        }
    }
    total
}

fn status(field: &str) -> f64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    let kb: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kb * 1024.0
}

/// Makes a folder of about `bytes` with random-looking tensors.
fn make(dir: &Path, dtype: Dtype, bytes: usize) -> usize {
    let size = dtype.bitsize() / 8;
    let d_hidden = bytes / size / (LAYERS * EXPERTS * 3 * D_MODEL) / 128 * 128;
    let mut tensors = Vec::new();
    for layer in 0..LAYERS {
        for expert in 0..EXPERTS {
            for (part, shape) in [
                ("gate_proj", [d_hidden, D_MODEL]),
                ("up_proj", [d_hidden, D_MODEL]),
                ("down_proj", [D_MODEL, d_hidden]),
            ] {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
                let shape = shape.to_vec();
                tensors.push((name, TensorInfo { dtype, shape }));
            }
        }
    }
    let config = serde_json::json!({});
    let layout = Layout::new(&config, tensors, 1 << 29).unwrap();
    let saver = burn_moe_models::hf::Saver::create(&layout, dir).unwrap();
    // The headers are in place; the contents do not matter, but must be on disk.
    let mut names: Vec<_> = fs::read_dir(beside(dir))
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    names.sort();
    let block: Vec<u8> = (0..1u32 << 18)
        .flat_map(|i| (i as f32).sin().to_le_bytes())
        .collect();
    for path in names
        .iter()
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
    {
        let mut file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        let mut len = [0; 8];
        file.read_exact(&mut len).unwrap();
        let header = 8 + u64::from_le_bytes(len);
        let mut left = file.metadata().unwrap().len() - header;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(header)).unwrap();
        while left > 0 {
            let n = left.min(block.len() as u64) as usize;
            file.write_all(&block[..n]).unwrap();
            left -= n as u64;
        }
    }
    fs::rename(beside(dir), dir).unwrap();
    drop(saver);
    d_hidden
}

fn beside(dir: &Path) -> std::path::PathBuf {
    dir.with_file_name(format!(
        "{}.partial",
        dir.file_name().unwrap().to_str().unwrap()
    ))
}

/// Runs `each` for every rank on a thread of its own; the seconds until all are done.
fn seconds<T: Send>(each: impl Fn(usize) -> T + Sync) -> (f64, Vec<T>) {
    let start = Instant::now();
    let all = std::thread::scope(|scope| {
        let each = &each;
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| scope.spawn(move || each(rank)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    (start.elapsed().as_secs_f64(), all)
}

/// Loads a folder of `E::DTYPE`, or of `stored`, as `E`; returns the loaders' speeds in shares of the
/// reads': into buffers in use against *read*, into new memory against *kept*.
fn measure<E: Element>(stored: Dtype) -> [f64; 2] {
    let gigabytes: f64 = std::env::var("HF_LOAD_GB").map_or(4.0, |text| text.parse().unwrap());
    let root = std::env::var("HF_LOAD_DIR").map_or(std::env::temp_dir(), Into::into);
    let temp = tempfile::tempdir_in(root).unwrap();
    let dir = temp.path().join("model");
    let d_hidden = make(&dir, stored, (gigabytes * 1e9) as usize);
    let entries = fs::read_dir(&dir).unwrap();
    let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    paths.sort();
    let bytes = read_all(&paths); // into the page cache
    let part = |rank: usize| &paths[paths.len() * rank / RANKS..paths.len() * (rank + 1) / RANKS];
    let own = |rank: usize| rank * EXPERTS / RANKS..(rank + 1) * EXPERTS / RANKS;
    let layer = |layer: usize| format!("model.layers.{layer}");

    let mut best = [f64::INFINITY; 4];
    let (mut peak, mut parameters) = (0f64, 0);
    for _ in 0..ROUNDS {
        let read = seconds(|rank| read_all(part(rank))).0;
        let again = seconds(|rank| {
            let folder = Folder::open(&dir).unwrap();
            let len = D_MODEL * d_hidden;
            let (mut gate_up, mut down) = (vec![E::zeroed(); 2 * len], vec![E::zeroed(); len]);
            for i in 0..LAYERS {
                let experts =
                    Experts::find(&folder, &layer(i), EXPERTS, D_MODEL, d_hidden).unwrap();
                for expert in own(rank) {
                    experts.read_into(expert, &mut gate_up, &mut down).unwrap();
                }
            }
        });
        let kept = seconds(|rank| {
            let files = part(rank).iter().map(|path| fs::read(path).unwrap());
            files.collect::<Vec<_>>()
        });
        let kept = kept.0;
        let _ = fs::write("/proc/self/clear_refs", "5"); // the peak starts anew
        let before = status("VmRSS");
        let (load, loaded) = seconds(|rank| {
            let folder = Folder::open(&dir).unwrap();
            let layers = (0..LAYERS).map(|i| {
                let experts =
                    Experts::find(&folder, &layer(i), EXPERTS, D_MODEL, d_hidden).unwrap();
                experts.read::<E>(own(rank)).unwrap()
            });
            layers.collect::<Vec<_>>()
        });
        peak = peak.max(status("VmHWM") - before);
        let pairs = loaded.iter().flatten();
        parameters = pairs.map(|(a, b)| a.len() + b.len()).sum::<usize>() * size_of::<E>();
        for (best, seconds) in best.iter_mut().zip([read, again.0, kept, load]) {
            *best = best.min(seconds);
        }
    }
    let speed = best.map(|seconds| bytes as f64 / seconds / 1e9);
    let shares = [best[0] / best[1], best[2] / best[3]];
    println!(
        "{stored:?} as {:?}: {:.2} GB on disk, {:.2} GB of parameters, GB/s on disk by {RANKS} ranks:\n  \
         read {:.2}, load again {:.2}, share {:.2}; kept {:.2}, load {:.2}, share {:.2}; peak {:.3} x parameters",
        E::DTYPE,
        bytes as f64 / 1e9,
        parameters as f64 / 1e9,
        speed[0],
        speed[1],
        shares[0],
        speed[2],
        speed[3],
        shares[1],
        peak / parameters as f64,
    );
    assert!(peak <= 1.15 * parameters as f64, "peak {peak}");
    shares
}

fn check<E: Element>() {
    for (share, what) in measure::<E>(E::DTYPE).into_iter().zip(["read", "kept"]) {
        assert!(share >= 0.7, "loads at {share:.2} of {what}");
    }
}

#[test]
#[ignore = "writes 4 GB"]
fn f32_folder() {
    check::<f32>();
}

#[test]
#[ignore = "writes 4 GB"]
fn bf16_folder() {
    check::<half::bf16>();
}

#[test]
#[ignore = "writes 4 GB"]
fn bf16_folder_as_f32() {
    measure::<f32>(Dtype::BF16);
}
