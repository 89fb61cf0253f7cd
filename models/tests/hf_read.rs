//! Reading model folders, against the safetensors crate and plain loops.

mod hf_common;

use burn_moe_models::hf::{Experts, Folder, ignorable};
use half::{bf16, f16};
use hf_common::*;
use safetensors::SafeTensors;

#[test]
fn fixtures_read_as_the_safetensors_crate_reads_them() {
    for family in FAMILIES {
        let dir = fixture(family);
        let folder = Folder::open(&dir).unwrap();
        assert_eq!(folder.config_json()["model_type"], family);
        let mut count = 0;
        for (name, file) in files(&dir) {
            if !name.starts_with("model-") {
                continue;
            }
            for (name, view) in SafeTensors::deserialize(&file).unwrap().iter() {
                let expected: Vec<f32> = bytemuck::pod_collect_to_vec(view.data());
                assert_eq!(folder.read_f32(name, view.shape()).unwrap(), expected);
                if let [rows, cols] = *view.shape() {
                    let got: Vec<f32> = folder.read_transposed(name, [rows, cols]).unwrap();
                    assert_eq!(got, transposed(&expected, rows, cols), "{name}");
                }
                count += 1;
            }
        }
        assert_eq!(count, folder.names().count());
        let names: Vec<String> = folder.names().map(String::from).collect();
        folder.check_names(names, |_| false).unwrap();
    }
}

/// Gate, up and down of every expert, by name.
fn naive(folder: &Folder, names: [&str; 3], expert: usize, d: usize, f: usize) -> [Vec<f32>; 2] {
    let read = |name: &str, shape: [usize; 2]| {
        let name = name.replace('N', &expert.to_string());
        folder.read_f32(&name, &shape).unwrap()
    };
    let (gate, up) = (read(names[0], [f, d]), read(names[1], [f, d]));
    let down = read(names[2], [d, f]);
    let (mut gate_up, mut down_t) = (Vec::new(), Vec::new());
    for i in 0..d {
        gate_up.extend((0..f).map(|j| gate[j * d + i]));
        gate_up.extend((0..f).map(|j| up[j * d + i]));
    }
    for j in 0..f {
        down_t.extend((0..d).map(|i| down[i * f + j]));
    }
    [gate_up, down_t]
}

#[test]
fn experts_are_transposed_with_the_gate_first() {
    let (d, f) = (24, 12);
    for (family, layer, block, parts, count) in [
        (
            "deepseek_v3",
            1,
            "mlp",
            ["gate_proj", "up_proj", "down_proj"],
            16,
        ),
        (
            "glm_moe_dsa",
            2,
            "mlp",
            ["gate_proj", "up_proj", "down_proj"],
            8,
        ),
        ("mixtral", 0, "block_sparse_moe", ["w1", "w3", "w2"], 4),
        ("minimax_m2", 1, "block_sparse_moe", ["w1", "w3", "w2"], 8),
    ] {
        let folder = Folder::open(fixture(family)).unwrap();
        let layer = format!("model.layers.{layer}");
        let experts = Experts::find(&folder, &layer, count, d, f).unwrap();
        assert_eq!(experts.names().len(), 3 * count);
        assert!(experts.names().iter().all(|name| folder.contains(name)));
        let names = parts.map(|part| format!("{layer}.{block}.experts.N.{part}.weight"));
        let (gate_up, down) = experts.read::<f32>(1..count).unwrap();
        for expert in 1..count {
            let names = [&*names[0], &*names[1], &*names[2]];
            let [expected_gate_up, expected_down] = naive(&folder, names, expert, d, f);
            let at = expert - 1;
            assert_eq!(gate_up[at * 2 * d * f..][..2 * d * f], expected_gate_up);
            assert_eq!(down[at * d * f..][..d * f], expected_down);
        }
    }
}

#[test]
fn fused_experts_are_the_same_as_single_ones() {
    let (e, d, f) = (3, 40, 37);
    let (gate_up, down) = (numbers(e * 2 * f * d, 1), numbers(e * d * f, 2));
    let (fused, single_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let prefix = "model.layers.0.mlp.experts";
    single(
        fused.path(),
        &[
            f32_tensor(&format!("{prefix}.gate_up_proj"), &[e, 2 * f, d], &gate_up),
            f32_tensor(&format!("{prefix}.down_proj"), &[e, d, f], &down),
        ],
    );
    let mut tensors = Vec::new();
    for i in 0..e {
        let gate_up = &gate_up[i * 2 * f * d..][..2 * f * d];
        for (part, shape, values) in [
            ("gate_proj", [f, d], &gate_up[..f * d]),
            ("up_proj", [f, d], &gate_up[f * d..]),
            ("down_proj", [d, f], &down[i * d * f..][..d * f]),
        ] {
            tensors.push(f32_tensor(
                &format!("{prefix}.{i}.{part}.weight"),
                &shape,
                values,
            ));
        }
    }
    single(single_dir.path(), &tensors);
    let read = |dir: &std::path::Path| {
        let folder = Folder::open(dir).unwrap();
        let experts = Experts::find(&folder, "model.layers.0", e, d, f).unwrap();
        experts.read::<f32>(0..e).unwrap()
    };
    assert_eq!(read(fused.path()), read(single_dir.path()));
}

#[test]
fn half_precision_reads_exactly_and_into_either() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let dir = tempfile::tempdir().unwrap();
    let shape = vec![256, 256];
    single(
        dir.path(),
        &[
            ("b".into(), "BF16", shape.clone(), bytes.clone()),
            ("h".into(), "F16", shape.clone(), bytes),
        ],
    );
    let folder = Folder::open(dir.path()).unwrap();
    let (b, h) = (
        folder.read_f32("b", &shape).unwrap(),
        folder.read_f32("h", &shape).unwrap(),
    );
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    for &bits in &bits {
        assert!(same(b[bits as usize], bf16::from_bits(bits).to_f32()));
        assert!(same(h[bits as usize], f16::from_bits(bits).to_f32()));
    }
    let narrow: Vec<bf16> = folder.read("b", &shape).unwrap();
    for (bits, value) in bits.iter().zip(narrow) {
        assert!(value.to_bits() == *bits || value.is_nan());
    }
}

/// Values and scales decoded as models.md says, in f64.
fn fp8_value(byte: u8, scale: f64) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    sign * scale
        * match exponent {
            0 => mantissa / 512.0,
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        }
}

#[test]
fn fp8_with_short_last_blocks() {
    for (rows, cols) in [(576usize, 200usize), (300, 128), (5, 700), (10944, 3)] {
        let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
        let mut weights = bytes(rows * cols, rows);
        weights
            .iter_mut()
            .filter(|b| **b & 0x7f == 0x7f)
            .for_each(|b| *b = 1);
        let exponents: Vec<u8> = (0..blocks[0] * blocks[1])
            .map(|i| 120 + (i * 5 % 13) as u8)
            .collect();
        let floats: Vec<f32> = (0..blocks[0] * blocks[1])
            .map(|i| 0.01 + i as f32 * 0.37)
            .collect();
        let scale = |ue8m0: bool, i: usize| match ue8m0 {
            true => 2f64.powi(i32::from(exponents[i]) - 127),
            false => f64::from(floats[i]),
        };
        for ue8m0 in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let scales = match ue8m0 {
                true => (
                    "x.weight_scale_inv".into(),
                    "F8_E8M0",
                    blocks.to_vec(),
                    exponents.clone(),
                ),
                false => f32_tensor("x.weight_scale_inv", &blocks, &floats),
            };
            let weight = (
                "x.weight".into(),
                "F8_E4M3",
                vec![rows, cols],
                weights.clone(),
            );
            sharded(dir.path(), &[vec![weight], vec![scales]]);
            let folder = Folder::open(dir.path()).unwrap();
            let got = folder.read_f32("x.weight", &[rows, cols]).unwrap();
            for r in 0..rows {
                for c in 0..cols {
                    let scale = scale(ue8m0, r / 128 * blocks[1] + c / 128);
                    let expected = fp8_value(weights[r * cols + c], scale) as f32;
                    assert_eq!(got[r * cols + c], expected, "{rows} x {cols}: {r}, {c}");
                }
            }
            let turned: Vec<f32> = folder.read_transposed("x.weight", [rows, cols]).unwrap();
            assert_eq!(turned, transposed(&got, rows, cols));
            folder.check_names(["x.weight"], |_| false).unwrap();
        }
    }
}

#[test]
fn fused_fp8_experts_have_scales_of_their_own() {
    let (e, d, f) = (2, 130, 100);
    let prefix = "model.layers.0.mlp.experts";
    let scales = [numbers(e * 2 * 2, 3), numbers(e * 2, 4)];
    let mut weights = [bytes(e * 2 * f * d, 5), bytes(e * d * f, 6)];
    for byte in weights.iter_mut().flatten() {
        *byte = byte.wrapping_mul(2) / 2; // no NaN: clears the sign
        if *byte == 0x7f {
            *byte = 3;
        }
    }
    let dir = tempfile::tempdir().unwrap();
    single(
        dir.path(),
        &[
            (
                format!("{prefix}.gate_up_proj"),
                "F8_E4M3",
                vec![e, 2 * f, d],
                weights[0].clone(),
            ),
            f32_tensor(
                &format!("{prefix}.gate_up_proj_scale_inv"),
                &[e, 2, 2],
                &scales[0],
            ),
            (
                format!("{prefix}.down_proj"),
                "F8_E4M3",
                vec![e, d, f],
                weights[1].clone(),
            ),
            f32_tensor(
                &format!("{prefix}.down_proj_scale_inv"),
                &[e, 2, 1],
                &scales[1],
            ),
        ],
    );
    let folder = Folder::open(dir.path()).unwrap();
    let experts = Experts::find(&folder, "model.layers.0", e, d, f).unwrap();
    let (gate_up, down) = experts.read::<f32>(1..2).unwrap();
    for r in 0..2 * f {
        for c in 0..d {
            let scale = f64::from(scales[0][4 + r / 128 * 2 + c / 128]);
            let expected = fp8_value(weights[0][2 * f * d + r * d + c], scale);
            assert_eq!(gate_up[c * 2 * f + r], expected as f32);
        }
    }
    for r in 0..d {
        for c in 0..f {
            let expected = fp8_value(
                weights[1][d * f + r * f + c],
                f64::from(scales[1][2 + r / 128]),
            );
            assert_eq!(down[c * d + r], expected as f32);
        }
    }
}

#[test]
fn tiles_and_bands_meet_without_seams() {
    // More than a band (4 MB), and sides that no tile divides.
    for (rows, cols) in [(1500, 1031), (129, 513), (1, 7), (131, 1)] {
        let values = numbers(rows * cols, 9);
        let dir = tempfile::tempdir().unwrap();
        single(dir.path(), &[f32_tensor("x", &[rows, cols], &values)]);
        let folder = Folder::open(dir.path()).unwrap();
        assert_eq!(folder.read_f32("x", &[rows, cols]).unwrap(), values);
        let turned: Vec<f32> = folder.read_transposed("x", [rows, cols]).unwrap();
        assert_eq!(turned, transposed(&values, rows, cols));
    }
}

#[test]
fn other_ranks_of_tensors_and_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let values = numbers(60, 1);
    single(
        dir.path(),
        &[
            f32_tensor("scalar", &[], &values[..1]),
            f32_tensor("vector", &[60], &values),
            f32_tensor("cube", &[3, 4, 5], &values),
            f32_tensor("empty", &[0, 4, 5], &[]),
            f32_tensor("gate", &[4, 5], &values[..20]),
            f32_tensor("up", &[4, 5], &values[20..40]),
        ],
    );
    let folder = Folder::open(dir.path()).unwrap();
    assert_eq!(folder.read_f32("scalar", &[]).unwrap(), values[..1]);
    assert_eq!(folder.read_f32("vector", &[60]).unwrap(), values);
    assert_eq!(folder.read_f32("cube", &[3, 4, 5]).unwrap(), values);
    assert!(folder.read_f32("empty", &[0, 4, 5]).unwrap().is_empty());
    let both: Vec<f32> = folder.read_side_by_side(&["gate", "up"], [4, 5]).unwrap();
    for i in 0..5 {
        for j in 0..4 {
            assert_eq!(both[i * 8 + j], values[j * 5 + i]);
            assert_eq!(both[i * 8 + 4 + j], values[20 + j * 5 + i]);
        }
    }
}

#[test]
fn threads_read_from_one_folder() {
    let folder = Folder::open(fixture("deepseek_v3")).unwrap();
    let read = || {
        let experts = Experts::find(&folder, "model.layers.2", 16, 24, 12).unwrap();
        experts.read::<f32>(0..16).unwrap()
    };
    let expected = read();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| (0..20).map(|_| read()).next_back()))
            .collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap().unwrap(), expected);
        }
    });
}

#[test]
fn what_a_model_may_leave_aside() {
    assert!(ignorable("model.layers.61.eh_proj.weight", 61));
    assert!(ignorable(
        "model.layers.61.mlp.experts.3.up_proj.weight",
        61
    ));
    assert!(ignorable(
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        61
    ));
    assert!(!ignorable("model.layers.60.mlp.gate.weight", 61));
    assert!(!ignorable("model.norm.weight", 61));
    assert!(!ignorable("model.layers.x.weight", 61));
}
