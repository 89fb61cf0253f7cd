//! `plan --model`: sizes of models, against figures worked out by hand.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn plan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plan"))
        .args(args)
        .output()
        .unwrap()
}

/// What `--json` holds, and what is on the terminal.
fn sizes(args: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("sizes.json");
    let output = plan(&[args, &["--json", json.to_str().unwrap()]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    (value, String::from_utf8(output.stdout).unwrap())
}

/// DeepSeek-V3 at EP 64: 4 of 256 experts of 3 x 7168 x 2048 on a rank, of 58 layers.
#[test]
fn deepseek_v3_on_64_ranks() {
    let args = ["--model", "deepseek-v3", "--ep", "64", "--slots", "2"];
    let gpu = [
        "--gpu",
        "h100",
        "--precision",
        "fp8",
        "--tokens-per-rank",
        "4096",
    ];
    let (json, text) = sizes(&[&args[..], &gpu].concat());
    let (model, rank) = (&json["model"], &json["ranks"][0]);
    let expert = 3 * 7168 * 2048u64;
    let total = 671_026_419_200u64;
    let own = total - 58 * 252 * expert;
    for (field, expected) in [
        ("parameters", total),
        ("active", 37_552_297_472),
        ("expert", expert),
        ("routed", 58 * 256 * expert),
        ("mtp", 11_610_068_224),
        ("kv_values_per_token", 61 * (512 + 64)),
    ] {
        assert_eq!(model[field], expected, "{field}");
    }
    assert_eq!(model["kv_bytes_per_token"]["bf16"], 61 * 576 * 2);
    assert_eq!(model["bytes"]["f32"], 4 * total);
    assert_eq!(rank["parameters"], own);
    assert_eq!(rank["slot_parameters"], 2 * expert);
    assert_eq!(rank["bytes"]["bf16"], 2 * (own + 2 * expert));
    assert_eq!(rank["replicated_bytes_per_layer"], 2 * expert);

    // A rank's 4 experts are an eighth of a group, of which half are kept: it is passed over unless
    // its group is kept and not all 8 experts are among the other 124 of the 128 in kept groups.
    let others: f64 = (0..8)
        .map(|i| (124.0 - i as f64) / (128.0 - i as f64))
        .product();
    let remote = 63.0 * 0.5 * (1.0 - others);
    let close = |value: &Value, expected: f64| {
        let value = value.as_f64().unwrap();
        assert!((value / expected - 1.0).abs() < 1e-9, "{value} {expected}");
    };
    close(&rank["remote_ranks_per_token"], remote);
    close(
        &rank["dispatched_bytes_per_layer"],
        4096.0 * remote * 7168.0,
    );
    let floor = &rank["floor"];
    let active = (37_552_297_472u64 - 129_280 * 7168) as f64;
    close(&floor["compute_ms"], 2.0 * active * 4096.0 / 1979e12 * 1e3);
    close(&floor["memory_ms"], own as f64 / 3350e9 * 1e3);
    // 56 of the 63 others lie beyond the 8 ranks of the fast domain, on 50 GB/s.
    let far = 4096.0 * remote * 7168.0 * 56.0 / 63.0;
    close(&floor["tokens_ms"], 58.0 * 2.0 * far / 50e9 * 1e3);
    close(&floor["step_ms"], 58.0 * 2.0 * far / 50e9 * 1e3);
    assert_eq!(floor["fits"], true);
    for part in ["671 026 419 200", "37 552 297 472", "EP 64", "h100"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

/// GLM-5.2's shared indexers keep no keys.
#[test]
fn only_indexers_have_keys_in_the_cache() {
    let (json, _) = sizes(&["--model", "glm-5.2", "--ep", "8", "--slots", "0"]);
    // Layers 0 to 2, and from then on every fourth.
    let full = (0..78usize).filter(|i| (i + 1).saturating_sub(3) % 4 == 0);
    let expected = 78 * (512 + 64) + full.count() * 128;
    assert_eq!(json["model"]["kv_values_per_token"], expected);
}

#[test]
fn a_folder_or_file_is_a_model_too() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/mixtral");
    let file = folder.join("config.json");
    let args = ["--ep", "1,2,4", "--slots", "0,1"];
    let (of_folder, _) = sizes(&[&["--model", folder.to_str().unwrap()], &args[..]].concat());
    let (of_file, _) = sizes(&[&["--model", file.to_str().unwrap()], &args[..]].concat());
    assert_eq!(of_folder["ranks"], of_file["ranks"]);
    let ranks = of_file["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 6);
    assert_eq!(ranks[0]["parameters"], of_file["model"]["parameters"]);
    assert_eq!(ranks[0]["dispatched_bytes_per_layer"], 0.0);
}

#[test]
fn what_is_impossible_is_refused_in_one_line() {
    for (args, expected) in [
        (vec!["--model", "llama"], vec!["llama", "deepseek-v3"]),
        (
            vec!["--model", "mixtral-8x7b", "--ep", "3"],
            vec!["--ep 3", "num_experts (8)"],
        ),
        (
            vec!["--model", "mixtral-8x7b", "--ep", "8", "--gpu", "k80"],
            vec!["k80", "h100"],
        ),
        (
            vec![
                "--model",
                "mixtral-8x7b",
                "--ep",
                "8",
                "--gpu",
                "a100",
                "--precision",
                "fp8",
            ],
            vec!["fp8", "a100", "bf16"],
        ),
        (vec!["--synthetic", "--gpu", "h100"], vec!["--model"]),
        (
            vec!["--model", "glm-5", "--tokens-per-rank", "0"],
            vec!["--tokens-per-rank is 0"],
        ),
    ] {
        let output = plan(&args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        for part in expected {
            assert!(error.contains(part), "{args:?}: {error}");
        }
    }
}
