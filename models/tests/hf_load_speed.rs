//! How fast a large folder loads, and with how much memory: run with
//! `cargo test --release --workspace --test hf_load_speed -- --ignored --nocapture --test-threads=1`.
//! `HF_LOAD_GB` sets the size (4), `HF_LOAD_DIR` where the folder is made.
//!
//! Files lie in the page cache, and what is compared runs in turn in the same process, as many threads
//! as ranks, the best of several rounds:
//! - *kept*: all bytes by `read()` into new memory of their own: what any loader has to do at least,
//!   for in the end the parameters lie in memory of their own. Loading a model must reach 0.7 of its
//!   speed.
//! - *read*: all bytes by `read()` into one small buffer again and again, which stays in the cache and
//!   keeps nothing. Printed beside it, and not asserted, is a loader that transposes into the same
//!   buffers again and again: it shows the cost of transposing alone, without that of new memory.
//!
//! The model has the elements of the folder; a folder of bf16 as f32, whose parameters need twice the
//! memory, is measured for information.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn_moe_models::hf::{Dtype, Element, Experts, Folder, Layout, TensorInfo};

const LAYERS: usize = 8;
const EXPERTS: usize = 16;
const D_MODEL: usize = 2048;
const RANKS: usize = 4;
const ROUNDS: usize = 5;

/// Reads a rank's part of all files in pieces of `piece` bytes at most, each given to `each` to keep or
/// to give back for the next.
fn read_part(paths: &[PathBuf], rank: usize, piece: u64, mut each: impl FnMut(Vec<u8>) -> Vec<u8>) {
    let mut buffer = Vec::new();
    for path in paths {
        let file = File::open(path).unwrap();
        let len = file.metadata().unwrap().len();
        let (mut at, end) = (
            len * rank as u64 / RANKS as u64,
            len * (rank as u64 + 1) / RANKS as u64,
        );
        while at < end {
            let bytes = piece.min(end - at);
            if buffer.len() as u64 != bytes {
                // Of zeros that are not there before something is written to them.
                buffer = vec![0; bytes as usize];
            }
            file.read_exact_at(&mut buffer, at).unwrap();
            buffer = each(buffer);
            at += bytes;
        }
    }
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

fn beside(dir: &Path) -> PathBuf {
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

/// Loads a folder of `stored` as `E`; returns the speed of loading as a share of *kept*.
fn measure<E: Element>(stored: Dtype) -> f64 {
    let gigabytes: f64 = std::env::var("HF_LOAD_GB").map_or(4.0, |text| text.parse().unwrap());
    let root = std::env::var("HF_LOAD_DIR").map_or(std::env::temp_dir(), Into::into);
    let temp = tempfile::tempdir_in(root).unwrap();
    let dir = temp.path().join("model");
    let d_hidden = make(&dir, stored, (gigabytes * 1e9) as usize);
    let entries = fs::read_dir(&dir).unwrap();
    let mut paths: Vec<_> = entries.map(|e| e.unwrap().path()).collect();
    paths.sort();
    let bytes: u64 = paths
        .iter()
        .map(|path| fs::metadata(path).unwrap().len())
        .sum();
    let read = || seconds(|rank| read_part(&paths, rank, 1 << 20, |buffer| buffer)).0;
    read(); // into the page cache
    let own = |rank: usize| rank * EXPERTS / RANKS..(rank + 1) * EXPERTS / RANKS;
    let layer = |layer: usize| format!("model.layers.{layer}");

    let mut best = [f64::INFINITY; 4];
    let (mut peak, mut parameters) = (0f64, 0);
    for _ in 0..ROUNDS {
        let read = read();
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
        // What was read is dropped here: loading gets memory as new as this.
        // What was read is dropped here: loading gets memory as new as this.
        let kept = seconds(|rank| {
            let mut all = Vec::new();
            read_part(&paths, rank, u64::MAX, |buffer| {
                all.push(buffer);
                Vec::new()
            });
            all
        })
        .0;
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
    shares[1]
}

fn check<E: Element>() {
    let share = measure::<E>(E::DTYPE);
    assert!(
        share >= 0.7,
        "loads at {share:.2} of read() into new memory"
    );
}

#[test]
#[ignore = "measures speed, on 4 GB that it writes to disk first"]
fn f32_folder() {
    check::<f32>();
}

#[test]
#[ignore = "measures speed, on 4 GB that it writes to disk first"]
fn bf16_folder() {
    check::<half::bf16>();
}

#[test]
#[ignore = "measures speed, on 4 GB that it writes to disk first"]
fn bf16_folder_as_f32() {
    measure::<f32>(Dtype::BF16);
}
