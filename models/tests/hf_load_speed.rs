//! How fast a large folder loads, and with how much memory: run with
//! `cargo test --release -p burn-moe-models --test hf_load_speed -- --ignored --nocapture`.
//! `HF_LOAD_GB` sets the size (4), `HF_LOAD_DIR` where the folder is made.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

use burn_moe_models::hf::{Dtype, Experts, Folder, Layout, TensorInfo};

const LAYERS: usize = 8;
const EXPERTS: usize = 16;
const D_MODEL: usize = 2048;
const RANKS: usize = 4;

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

fn cpu_seconds() -> f64 {
    let text = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = text.split_whitespace().collect();
    // utime and stime, in hundredths of a second.
    (fields[13].parse::<f64>().unwrap() + fields[14].parse::<f64>().unwrap()) / 100.0
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

fn measure(dtype: Dtype) {
    let gigabytes: f64 = std::env::var("HF_LOAD_GB").map_or(4.0, |text| text.parse().unwrap());
    let root = std::env::var("HF_LOAD_DIR").map_or(std::env::temp_dir(), Into::into);
    let temp = tempfile::tempdir_in(root).unwrap();
    let dir = temp.path().join("model");
    let d_hidden = make(&dir, dtype, (gigabytes * 1e9) as usize);
    let mut paths: Vec<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    paths.sort();

    read_all(&paths); // into the page cache
    let start = Instant::now();
    let bytes = read_all(&paths);
    let read = bytes as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for part in paths.chunks(paths.len().div_ceil(RANKS)) {
            scope.spawn(|| read_all(part));
        }
    });
    let read_ranks = bytes as f64 / start.elapsed().as_secs_f64();

    // The same, but kept: what it costs at least to have the files in memory of one's own.
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let kept: Vec<Vec<Vec<u8>>> = std::thread::scope(|scope| {
        let parts = paths.chunks(paths.len().div_ceil(RANKS));
        let ranks: Vec<_> = parts
            .map(|part| scope.spawn(|| part.iter().map(|path| fs::read(path).unwrap()).collect()))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let read_kept = bytes as f64 / start.elapsed().as_secs_f64();
    let read_kept_cpu = bytes as f64 / (cpu_seconds() - cpu);
    drop(kept);

    let _ = fs::write("/proc/self/clear_refs", "5"); // the peak starts anew
    let before = status("VmRSS");
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let per_rank = EXPERTS / RANKS;
    let loaded: Vec<Vec<(Vec<f32>, Vec<f32>)>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let dir = &dir;
                scope.spawn(move || {
                    let folder = Folder::open(dir).unwrap();
                    (0..LAYERS)
                        .map(|layer| {
                            let layer = format!("model.layers.{layer}");
                            let experts =
                                Experts::find(&folder, &layer, EXPERTS, D_MODEL, d_hidden).unwrap();
                            experts
                                .read(rank * per_rank..(rank + 1) * per_rank)
                                .unwrap()
                        })
                        .collect()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let load_cpu = bytes as f64 / (cpu_seconds() - cpu);
    let seconds = start.elapsed().as_secs_f64();
    let peak = status("VmHWM") - before;
    let pairs = loaded.iter().flatten();
    let parameters: usize = pairs.map(|(a, b)| a.len() + b.len()).sum::<usize>() * 4;
    let load = bytes as f64 / seconds;
    println!(
        "{dtype:?}: {:.2} GB on disk, {:.2} GB of parameters, d_hidden {d_hidden}",
        bytes as f64 / 1e9,
        parameters as f64 / 1e9
    );
    println!(
        "  read {:.2} GB/s, by {RANKS} threads {:.2} GB/s, kept {:.2} GB/s ({:.2} GB per CPU second)",
        read / 1e9,
        read_ranks / 1e9,
        read_kept / 1e9,
        read_kept_cpu / 1e9
    );
    println!(
        "  load by {RANKS} ranks {:.2} GB/s ({:.2} GB per CPU second): {:.2}, {:.2}, {:.2} of the above; \
         peak {:.3} x parameters",
        load / 1e9,
        load_cpu / 1e9,
        load / read,
        load / read_ranks,
        load / read_kept,
        peak / parameters as f64,
    );
    assert!(peak <= 1.15 * parameters as f64, "peak {peak}");
}

#[test]
#[ignore = "writes 4 GB"]
fn f32_folder() {
    measure(Dtype::F32);
}

#[test]
#[ignore = "writes 4 GB"]
fn bf16_folder() {
    measure(Dtype::BF16);
}
