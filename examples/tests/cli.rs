//! The binaries as a user calls them: what they write, and what they refuse.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{numbers, refusal_in_one_line, report, succeeded, with_usual};
use serde_json::Value;

/// Options of a small run.
const USUAL: [(&str, &str); 3] = [
    ("--config", "smoke"),
    ("--sequence-length", "24"),
    ("--batch", "8"),
];

fn train(args: &[&str], report: &Path) -> Output {
    let report = report.display().to_string();
    common::train(with_usual(&[args, &["--report", &report]].concat(), &USUAL))
}

fn prefill(args: &[&str], checkpoint: &Path, prompt: &Path, report: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_prefill"))
        .arg("--checkpoint")
        .arg(checkpoint)
        .arg("--prompt")
        .arg(prompt)
        .arg("--report")
        .arg(report)
        .args(args)
        .output()
        .unwrap()
}

fn text_file(folder: &Path) -> String {
    let path = folder.join("text.txt");
    let text: String = (0..400)
        .map(|i| format!("line {i}: the {} of {}\n", i * 7 % 31, i * 13 % 17))
        .collect();
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn balancers_and_one_rank_learn_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let ranks = folder.path().join("ranks");
    let one = folder.path().join("one");
    let many = [
        "--data",
        &data,
        "--steps",
        "12",
        "--ranks",
        "4",
        "--balance",
        "none,exact,ideal",
    ];
    let table = succeeded(&train(&many, &ranks));
    assert!(table.contains("ratio to") && table.contains("exact"));
    let single = [
        "--data",
        &data,
        "--steps",
        "12",
        "--ranks",
        "1",
        "--balance",
        "none",
    ];
    succeeded(&train(&single, &one));

    let (ranks, one) = (report(&ranks), report(&one));
    let names: Vec<_> = ranks["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| &r["balance"])
        .collect();
    assert_eq!(names, ["none", "exact", "ideal"]);
    let expected = numbers(&one["runs"][0]["loss"]);
    assert_eq!(expected.len(), 12);
    assert!(expected[11] < expected[0] - 0.5, "it learns: {expected:?}");
    for run in 0..2 {
        for (a, b) in numbers(&ranks["runs"][run]["loss"]).iter().zip(&expected) {
            assert!((a - b).abs() < 2e-3, "run {run}: {a} and {b} bits per byte");
        }
    }
    let imbalance = |run: usize, when: &str| ranks["runs"][run][when]["mean"].as_f64().unwrap();
    assert_eq!(
        imbalance(0, "imbalance_before"),
        imbalance(0, "imbalance_after")
    );
    assert!(imbalance(1, "imbalance_after") < imbalance(1, "imbalance_before"));
    assert!(imbalance(2, "imbalance_after") < 1.01);
    assert_eq!(ranks["runs"][2]["ratio_to_ideal"], 1.0);
    assert_eq!(ranks["parameters"], one["parameters"]);
    for field in [
        "config",
        "ranks",
        "slots",
        "seed",
        "steps",
        "timing",
        "parameters",
        "data",
    ] {
        assert!(!ranks[field].is_null(), "report.json has no {field}");
    }
    for field in [
        "loss",
        "tokens_per_second",
        "copies_per_plan",
        "planning_us",
        "bytes_dispatched_per_step",
        "bytes_replicated_per_step",
        "replica_buffer_bytes",
    ] {
        assert!(!ranks["runs"][1][field].is_null(), "a run has no {field}");
    }
}

#[test]
fn the_same_seed_gives_the_same_losses() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let losses = |name: &str, seed: &str| {
        let target = folder.path().join(name);
        let args = [
            "--data",
            &data,
            "--steps",
            "4",
            "--balance",
            "exact",
            "--seed",
            seed,
        ];
        succeeded(&train(&args, &target));
        numbers(&report(&target)["runs"][0]["loss"])
    };
    assert_eq!(losses("a", "1"), losses("b", "1"));
    assert_ne!(losses("a", "1"), losses("c", "2"));
}

#[test]
fn a_checkpoint_prefills_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let checkpoint = folder.path().join("checkpoint");
    let routing = folder.path().join("routing.safetensors");
    let args = [
        "--data",
        &data,
        "--steps",
        "3",
        "--balance",
        "exact",
        "--checkpoint",
        checkpoint.to_str().unwrap(),
        "--save-routing",
        routing.to_str().unwrap(),
    ];
    succeeded(&train(&args, &folder.path().join("train")));
    let bytes = std::fs::read(&routing).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids = tensors.tensor("ids").unwrap();
    assert_eq!(ids.shape(), [2, 3 * 8 * 24, 3]);
    assert!(ids.data().iter().all(|id| *id < 16));

    let prompt = folder.path().join("prompts.txt");
    std::fs::write(&prompt, "line 1: the\n\nline 22\nl\n").unwrap();
    let continuations = |ranks: &str| {
        let target = folder.path().join(format!("prefill-{ranks}"));
        let args = ["--ranks", ranks, "--max-new-tokens", "6", "--timeout", "30"];
        let shown = succeeded(&prefill(&args, &checkpoint, &prompt, &target));
        assert!(shown.contains("\"line 22\" -> "), "{shown}");
        let report = report(&target);
        assert_eq!(report["prompt_tokens"], 11 + 7 + 1);
        report["runs"][0]["continuations"].clone()
    };
    let expected = continuations("1");
    assert_eq!(expected.as_array().unwrap().len(), 3);
    for ranks in ["2", "4", "8"] {
        assert_eq!(continuations(ranks), expected, "{ranks} ranks");
    }

    // Of another config, or damaged: refused, and nothing is written.
    let before = std::fs::read(checkpoint.join("index.json")).unwrap();
    let other = folder.path().join("other.json");
    let config = std::fs::read_to_string(checkpoint.join("config.json")).unwrap();
    std::fs::write(&other, config.replace("\"top_k\": 3", "\"top_k\": 2")).unwrap();
    let other = other.to_str().unwrap();
    let args = ["--config", other, "--data", &data, "--steps", "1"];
    let target = ["--checkpoint", checkpoint.to_str().unwrap()];
    let line = refusal_in_one_line(&train(
        &[&args[..], &target].concat(),
        &folder.path().join("refused"),
    ));
    assert!(line.contains("another config"), "{line}");
    assert_eq!(
        std::fs::read(checkpoint.join("index.json")).unwrap(),
        before
    );
    let target = folder.path().join("refused");
    let line = refusal_in_one_line(&prefill(
        &["--config", other],
        &checkpoint,
        &prompt,
        &target,
    ));
    assert!(line.contains("--config"), "{line}");
    std::fs::write(checkpoint.join("rank-00001-of-00004.safetensors"), "no").unwrap();
    let line = refusal_in_one_line(&prefill(&[], &checkpoint, &prompt, &target));
    assert!(line.contains("rank-00001-of-00004.safetensors"), "{line}");
    assert!(!target.exists());
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let target = folder.path().join("report");
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    let base = serde_json::to_value(burn_moe_models::ModelConfig::named("smoke").unwrap()).unwrap();
    let config = |name: &str, change: &dyn Fn(&mut serde_json::Map<String, Value>)| {
        let mut value = base.clone();
        change(value.as_object_mut().unwrap());
        let path = folder.path().join(name);
        std::fs::write(&path, value.to_string()).unwrap();
        path.display().to_string()
    };
    let unknown = config("unknown.json", &|c| {
        c.insert("num_expertz".into(), 3.into());
    });
    let missing = config("missing.json", &|c| {
        c.remove("top_k");
    });
    let too_many = config("too-many.json", &|c| {
        c.insert("top_k".into(), 17.into());
    });
    let empty = empty.display().to_string();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--ranks", "3"], &["--ranks is 3", "1, 2, 4, 8, 16"]),
        (&["--ranks", "0"], &["--ranks is 0"]),
        (&["--config", &too_many], &["top_k is 17", "1 to"]),
        (&["--config", &unknown], &["unknown.json", "num_expertz"]),
        (&["--config", &missing], &["missing.json", "top_k"]),
        (&["--config", "absent"], &["absent", "tiny"]),
        (&["--data", &empty], &["empty", "no text"]),
        (&["--data", "/nonexistent/text"], &["/nonexistent/text"]),
        (&["--batch", "3"], &["--batch is 3", "4"]),
        (
            &["--sequence-length", "65"],
            &["--sequence-length is 65", "64"],
        ),
        (&["--steps", "0"], &["--steps is 0"]),
        (
            &["--balance", "exact,exact"],
            &["--balance", "at most once"],
        ),
        (&["--timeout", "0"], &["--timeout is 0"]),
    ];
    for (args, expected) in cases {
        let mut args = args.to_vec();
        if !args.contains(&"--data") {
            args.extend(["--data", &data]);
        }
        let line = refusal_in_one_line(&train(&args, &target));
        for part in *expected {
            assert!(line.contains(part), "{args:?}: {line}");
        }
    }
    assert!(!target.exists(), "nothing is written");
}
