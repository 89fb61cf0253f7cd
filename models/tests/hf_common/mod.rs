//! Writing small model folders by hand, independently of the code under test.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

/// Name, dtype, shape, bytes.
pub type Raw = (String, &'static str, Vec<usize>, Vec<u8>);

/// The bytes of a safetensors file, put together as the format describes it.
pub fn safetensors(tensors: &[Raw]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        let info = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        header.insert(name.clone(), info);
        data.extend_from_slice(bytes);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.into_bytes());
    file.extend(data);
    file
}

pub fn single(dir: &Path, tensors: &[Raw]) {
    fs::write(dir.join("config.json"), "{}").unwrap();
    fs::write(dir.join("model.safetensors"), safetensors(tensors)).unwrap();
}

/// Shards `s0.safetensors`, `s1.safetensors`... and their index.
pub fn sharded(dir: &Path, shards: &[Vec<Raw>]) {
    fs::write(dir.join("config.json"), "{}").unwrap();
    let mut map = serde_json::Map::new();
    for (i, tensors) in shards.iter().enumerate() {
        let file = format!("s{i}.safetensors");
        fs::write(dir.join(&file), safetensors(tensors)).unwrap();
        for tensor in tensors {
            map.insert(tensor.0.clone(), file.clone().into());
        }
    }
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
}

pub fn f32_tensor(name: &str, shape: &[usize], values: &[f32]) -> Raw {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    (name.into(), "F32", shape.to_vec(), bytes.collect())
}

/// Reproducible numbers of both signs and many magnitudes.
pub fn numbers(len: usize, seed: usize) -> Vec<f32> {
    let mut state = seed as u64 * 2 + 1;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..len)
        .map(|_| (next() - 0.5) * 2f32.powi((next() * 8.0) as i32 - 4))
        .collect()
}

pub fn bytes(len: usize, seed: usize) -> Vec<u8> {
    let numbers = numbers(len, seed);
    numbers.iter().map(|x| (x.to_bits() >> 7) as u8).collect()
}

pub fn transposed(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    for r in 0..rows {
        for c in 0..cols {
            out[c * rows + r] = values[r * cols + c];
        }
    }
    out
}

pub fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(family)
}

pub const FAMILIES: [&str; 6] = [
    "deepseek_v3",
    "glm4_moe",
    "glm_moe_dsa",
    "minimax_m2",
    "qwen3_moe",
    "mixtral",
];

/// Files of a folder by name, with their contents.
pub fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_string();
            (name, fs::read(&path).unwrap())
        })
        .collect();
    files.sort();
    files
}
