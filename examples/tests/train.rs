//! `train` beyond its defaults: scaled-down models, loaded ones, and the optimizer's options.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use burn_moe_models::hf::Folder;
use burn_moe_models::pretrained;
use common::{copy_fixture, numbers, refusal, report, succeeded, text_file, with_usual};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

fn train(args: &[&str], report: &Path) -> Output {
    let report = report.display().to_string();
    common::train(with_usual(
        args,
        &[("--timeout", "60"), ("--report", &report)],
    ))
}

/// A fixture of a family with a tokenizer for the words of `text_file`.
fn model(family: &str, folder: &Path, tokenizer: bool) -> PathBuf {
    let target = copy_fixture(family, folder);
    if tokenizer {
        let mut vocab = serde_json::Map::new();
        vocab.insert("[UNK]".into(), json!(0));
        for i in 0..40 {
            vocab.insert(format!("w{i}"), json!(i + 1));
        }
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
        });
        std::fs::write(target.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    }
    target
}

/// Loads, learns through the tokenizer, and saves in the same layout, on one rank and on four.
#[test]
fn loaded_models_learn_and_are_saved() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    for family in ["deepseek_v3", "qwen3_moe", "mixtral"] {
        let from = model(family, folder.path(), true);
        // Two replicas of the model, one of which is saved.
        let dp = if family == "deepseek_v3" { "2" } else { "1" };
        let losses = [("1", "1"), ("4", dp)].map(|(ranks, dp)| {
            let saved = folder.path().join(format!("{family}-{ranks}"));
            let target = folder.path().join("report");
            let args = [
                "--model",
                from.to_str().unwrap(),
                "--save",
                saved.to_str().unwrap(),
                "--data",
                &data,
                "--ranks",
                ranks,
                "--dp",
                dp,
                "--steps",
                "12",
                "--batch",
                "8",
                "--sequence-length",
                "16",
                "--lr",
                "1e-2",
            ];
            let shown = succeeded(&train(&args, &target));
            assert!(
                shown.contains("bits/token") && shown.contains("1537 tokens"),
                "{shown}"
            );
            let report = report(&target);
            assert_eq!(report["unit"], "token");
            assert_eq!(report["runs"][0]["balance"], "exact");

            // The same files with other numbers, which load again.
            let names = |folder: &Path| {
                let entries = std::fs::read_dir(folder).unwrap();
                let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
                names.sort();
                names
            };
            assert_eq!(names(&saved), names(&from));
            let opened = Folder::open(&saved).unwrap();
            let config = pretrained::read_config(&opened).unwrap();
            let shape = [config.vocab_size, config.d_model];
            let read = |folder: &Folder| {
                let name = "model.embed_tokens.weight";
                folder.read_f32(name, &shape).unwrap()
            };
            assert_ne!(read(&opened), read(&Folder::open(&from).unwrap()));
            numbers(&report["runs"][0]["loss"])
        });
        let [one, four] = &losses;
        assert!(one[11] < one[0] - 0.3, "{family} learns: {one:?}");
        for (a, b) in one.iter().zip(four) {
            assert!((a - b).abs() < 2e-3, "{family}: {one:?} {four:?}");
        }
        // Continues where it stopped.
        let saved = folder.path().join(format!("{family}-4"));
        let target = folder.path().join("report");
        let args = [
            "--model",
            saved.to_str().unwrap(),
            "--data",
            &data,
            "--ranks",
            "2",
            "--steps",
            "1",
            "--batch",
            "8",
            "--sequence-length",
            "16",
        ];
        succeeded(&train(&args, &target));
        let again = numbers(&report(&target)["runs"][0]["loss"])[0];
        assert!(again < one[0] - 0.3, "{family}: {again}");
    }
}

/// The fixture of a family with a vocabulary of all bytes: rows of the two tables repeated.
fn byte_model(folder: &Path) -> PathBuf {
    let from = model("mixtral", folder, false);
    let target = folder.join("bytes");
    std::fs::create_dir(&target).unwrap();
    let text = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["vocab_size"] = json!(256);
    std::fs::write(target.join("config.json"), config.to_string()).unwrap();
    let opened = Folder::open(&from).unwrap();
    let mut tensors = Vec::new();
    for name in opened.names() {
        let mut shape = opened.info(name).unwrap().shape;
        let mut values = opened.read_f32(name, &shape).unwrap();
        if ["model.embed_tokens.weight", "lm_head.weight"].contains(&name) {
            let row = values.len() / shape[0];
            shape[0] = 256;
            values = values.iter().copied().cycle().take(256 * row).collect();
        }
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensors.push((name.to_owned(), shape, bytes));
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    let file = target.join("model.safetensors");
    safetensors::serialize_to_file(views, None, &file).unwrap();
    target
}

#[test]
fn without_a_tokenizer_bytes_are_the_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let from = byte_model(folder.path());
    let saved = folder.path().join("saved");
    let target = folder.path().join("report");
    #[rustfmt::skip]
    let args = [
        "--model", from.to_str().unwrap(),
        "--save", saved.to_str().unwrap(),
        "--data", &data,
        "--ranks", "2",
        "--steps", "8",
        "--batch", "4",
        "--sequence-length", "16",
        "--lr", "1e-2",
        "--dtype", "bf16",
    ];
    let shown = succeeded(&train(&args, &target));
    assert!(
        shown.contains("no tokenizer.json in") && shown.contains("bits/byte"),
        "{shown}"
    );
    let loss = numbers(&report(&target)["runs"][0]["loss"]);
    assert!(loss[7] < loss[0] - 0.3, "{loss:?}");
    // Trained in bf16, saved as f32 as the folder has it.
    let name = "model.embed_tokens.weight";
    let info = Folder::open(&saved).unwrap().info(name).unwrap();
    assert_eq!((info.dtype, info.shape[0]), (Dtype::F32, 256));
}

/// DeepSeek-V3 with 1/64 of its widths and its real routing: 256 experts in 8 groups, top-8.
#[test]
fn a_scaled_down_model_keeps_its_routing() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let target = folder.path().join("report");
    let args = [
        "--config",
        "deepseek-v3",
        "--scale",
        "1/64",
        "--layers",
        "3",
        "--data",
        &data,
        "--ranks",
        "4",
        "--steps",
        "2",
        "--batch",
        "4",
        "--sequence-length",
        "16",
        "--balance",
        "exact",
    ];
    let shown = succeeded(&train(&args, &target));
    assert!(shown.contains("deepseek-v3 x 1/64, 3 layers"), "{shown}");
    assert!(shown.contains("\"d_model\": 112"), "{shown}");
    let report = report(&target);
    let config = &report["config"];
    assert_eq!(
        [
            &config["num_experts"],
            &config["top_k"],
            &config["n_group"],
            &config["topk_group"]
        ],
        [256, 8, 8, 4]
    );
    assert_eq!(report["runs"][0]["layers"].as_array().unwrap().len(), 2);
}

/// A run of six steps.
fn smoke(data: &str, more: &[&str], report: &Path) -> Output {
    let usual = [
        ("--config", "smoke"),
        ("--data", data),
        ("--steps", "6"),
        ("--batch", "8"),
        ("--sequence-length", "24"),
        ("--balance", "exact"),
    ];
    let args = with_usual(more, &usual);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    train(&args, report)
}

/// Micro-batches and recomputed activations change nothing but memory.
#[test]
fn accumulation_and_checkpointing_learn_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let losses = |more: &[&str]| {
        let target = folder.path().join("report");
        succeeded(&smoke(&data, more, &target));
        numbers(&report(&target)["runs"][0]["loss"])
    };
    let plain = losses(&["--ranks", "2"]);
    assert_eq!(losses(&["--ranks", "2", "--checkpointing"]), plain);
    for more in [
        &["--ranks", "2", "--accumulate", "4"],
        &["--ranks", "4", "--accumulate", "2"],
    ] {
        for (a, b) in losses(more).iter().zip(&plain) {
            assert!((a - b).abs() < 1e-3, "{more:?}: {a} and {b} bits per byte");
        }
    }
}

/// The norm does not depend on the ranks, and clipping by it changes what is learned.
#[test]
fn clipping_is_the_same_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let norms = |ranks: &str, clip: &str| {
        let target = folder.path().join("report");
        let more = ["--ranks", ranks, "--clip", clip];
        succeeded(&smoke(&data, &more, &target));
        numbers(&report(&target)["runs"][0]["grad_norm"])
    };
    let one = norms("1", "0.5");
    assert_eq!(one.len(), 6);
    for ranks in ["2", "4"] {
        let many = norms(ranks, "0.5");
        assert!((many[0] / one[0] - 1.0).abs() < 1e-6, "{many:?} {one:?}");
        assert!((many[5] / one[5] - 1.0).abs() < 1e-2, "{many:?} {one:?}");
    }
    assert_ne!(norms("1", "1e-3")[5], one[5]);
}

#[test]
fn bf16_learns() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let losses = |dtype: &str| {
        let target = folder.path().join("report");
        let more = [
            "--ranks",
            "2",
            "--dtype",
            dtype,
            "--clip",
            "1",
            "--accumulate",
            "2",
        ];
        succeeded(&smoke(&data, &more, &target));
        let report = report(&target);
        assert_eq!(report["dtype"], dtype);
        numbers(&report["runs"][0]["loss"])
    };
    let (narrow, full) = (losses("bf16"), losses("f32"));
    assert!(narrow[5] < narrow[0] - 0.3, "{narrow:?}");
    for (a, b) in narrow.iter().zip(&full) {
        assert!((a - b).abs() < 0.1, "{narrow:?} {full:?}");
    }
}

#[test]
fn schedules_differ() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let losses = |more: &[&str]| {
        let target = folder.path().join("report");
        let all: Vec<&str> = ["--ranks", "1"].iter().chain(more).copied().collect();
        succeeded(&smoke(&data, &all, &target));
        numbers(&report(&target)["runs"][0]["loss"])
    };
    let cosine = losses(&[]);
    let constant = losses(&["--schedule", "constant"]);
    // The first step of a cosine has the full rate, so two losses are the same.
    assert_eq!(cosine[..2], constant[..2]);
    assert_ne!(cosine[5], constant[5]);
    let warm = losses(&["--schedule", "constant", "--warmup", "3"]);
    assert_eq!(warm[0], constant[0]);
    assert!(
        warm[1] > constant[1],
        "a third of the rate: {warm:?} {constant:?}"
    );
}

#[test]
fn a_run_that_diverges_stops() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let target = folder.path().join("report");
    let more = [
        "--ranks",
        "2",
        "--lr",
        "1",
        "--aux-loss",
        "1e38",
        "--clip",
        "1",
    ];
    let output = smoke(&data, &more, &target);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("step 1: ") && text.contains("gradients is"),
        "{text}"
    );
}

#[test]
fn bad_options_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let target = folder.path().join("report");
    let bytes = model("mixtral", folder.path(), false);
    let bytes = bytes.to_str().unwrap();
    let words = model("qwen3_moe", folder.path(), true);
    let broken = folder.path().join("broken");
    std::fs::create_dir(&broken).unwrap();
    for entry in std::fs::read_dir(&words).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, broken.join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(broken.join("tokenizer.json"), "{}").unwrap();
    let (words, broken) = (words.to_str().unwrap(), broken.to_str().unwrap());
    let occupied = folder.path().join("occupied");
    std::fs::create_dir(&occupied).unwrap();
    std::fs::write(occupied.join("thesis.tex"), "mine").unwrap();
    let occupied = occupied.to_str().unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--accumulate", "0"], &["--accumulate is 0", "1 or more"]),
        (
            &["--accumulate", "5"],
            &["--batch is 16", "micro-batch (20)"],
        ),
        (
            &["--warmup", "50"],
            &["--warmup is 50", "less than --steps (50)"],
        ),
        (&["--weight-decay", "2"], &["--weight-decay is 2", "0 to 1"]),
        (&["--clip", "0"], &["--clip is 0", "more than 0"]),
        (&["--clip", "inf"], &["--clip is inf"]),
        (&["--lr", "0"], &["--lr is 0"]),
        (&["--scale", "3/2"], &["3/2", "--scale", "at most 1"]),
        (
            &["--scale", "1/1000", "--config", "deepseek-v3"],
            &[
                "--scale is 1/1000",
                "d_model 7168 x 1/1000 = 7.2",
                "at least 8",
            ],
        ),
        (
            &["--config", "deepseek-v3"],
            &["--config is deepseek-v3", "GiB of memory", "--scale"],
        ),
        (&["--layers", "9"], &["--layers is 9", "1 to 4"]),
        (&["--layers", "0"], &["--layers is 0"]),
        (&["--dtype", "f16"], &["f16", "--dtype"]),
        (&["--schedule", "linear"], &["linear", "--schedule"]),
        (
            &["--model", bytes],
            &["--model is", "tokenizer.json", "it is 48"],
        ),
        (
            &["--model", broken],
            &["broken/tokenizer.json", "not a tokenizer"],
        ),
        (&["--model", "/nonexistent"], &["/nonexistent"]),
        (&["--model", words, "--ranks", "3"], &["--ranks is 3"]),
        (
            &["--model", words, "--save", occupied],
            &["occupied", "thesis.tex"],
        ),
        (
            &["--model", words, "--config", "tiny"],
            &["--config", "cannot be used with"],
        ),
        (
            &["--model", words, "--scale", "1/2"],
            &["--scale", "cannot be used with"],
        ),
        (&["--save", "somewhere"], &["required", "--model"]),
    ];
    for (args, expected) in cases {
        let all: Vec<&str> = ["--data", &data].iter().chain(*args).copied().collect();
        let text = refusal(&train(&all, &target));
        for part in *expected {
            assert!(text.contains(part), "{args:?}: {text}");
        }
    }
    assert!(!target.exists(), "nothing is written");
}

#[test]
fn help_names_every_option() {
    let output = Command::new(env!("CARGO_BIN_EXE_train"))
        .arg("--help")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    for option in [
        "--config",
        "--scale",
        "--layers",
        "--model",
        "--save",
        "--dtype",
        "--accumulate",
        "--checkpointing",
        "--lr",
        "--schedule",
        "--warmup",
        "--weight-decay",
        "--clip",
        "--balance",
        "--ranks",
        "--dp",
        "--nodes",
        "--hierarchical",
        "Model:",
        "Optimizer (AdamW):",
        "--state",
        "--save-every",
        "--keep",
        "--resume",
        "Checkpoints of the run:",
    ] {
        assert!(text.contains(option), "{option}: {text}");
    }
}
