//! `train` with data parallel times expert parallel ranks: what is learned, reported and saved.

mod common;

use std::path::Path;
use std::process::Output;

use common::{course, numbers, refusal_in_one_line, report, succeeded, text_file, with_usual};
use serde_json::Value;
use tempfile::TempDir;

struct Run {
    folder: TempDir,
    data: String,
}

impl Run {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = text_file(folder.path());
        Self { folder, data }
    }

    fn train(&self, args: &[&str]) -> Output {
        let target = self.folder.path().join("report").display().to_string();
        let usual = [
            ("--config", "smoke"),
            ("--steps", "6"),
            ("--batch", "8"),
            ("--sequence-length", "16"),
            ("--balance", "exact"),
            ("--timing", "wall"),
            ("--timeout", "60"),
            ("--clip", "0.5"),
            ("--data", &self.data),
            ("--report", &target),
        ];
        common::train(with_usual(args, &usual))
    }

    fn report(&self, args: &[&str]) -> Value {
        succeeded(&self.train(args));
        report(&self.folder.path().join("report"))
    }

    fn at(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }
}

fn close(got: &Value, expected: &Value, most: f64, what: &str) {
    let (got, expected) = (numbers(got), numbers(expected));
    assert_eq!(got.len(), expected.len(), "{what}");
    for (a, b) in got.iter().zip(&expected) {
        assert!((a - b).abs() < most * b, "{what}: {got:?} {expected:?}");
    }
}

/// Groups of any size learn from the same batches what one rank does.
#[test]
fn every_grid_learns_what_one_rank_does() {
    let run = Run::new();
    let learned = |args: &[&str]| {
        let more = ["--bias-speed", "1e-2", "--accumulate", "2", "--batch", "16"];
        run.report(&[args, &more].concat())["runs"][0].clone()
    };
    let one = learned(&["--ranks", "1"]);
    let losses = numbers(&one["loss"]);
    assert!(losses[5] < losses[0] - 0.3, "it learns: {losses:?}");
    for (ranks, dp) in [("2", "2"), ("4", "1"), ("4", "2"), ("4", "4"), ("6", "3")] {
        let what = format!("{ranks} ranks, {dp} groups");
        let many = learned(&["--ranks", ranks, "--dp", dp]);
        close(&many["loss"], &one["loss"], 1e-3, &what);
        close(&many["grad_norm"], &one["grad_norm"], 1e-2, &what);
        // The first step has no choice of experts that rounding could have changed.
        let first = |run: &Value| numbers(&run["loss"])[0];
        assert!((first(&many) / first(&one) - 1.0).abs() < 1e-6, "{what}");
    }
}

/// Tokens and bytes are those of the whole world, loads and imbalance those of each group.
#[test]
fn the_report_is_of_all_groups() {
    let run = Run::new();
    let grid = ["--ranks", "4", "--dp", "2", "--timing", "critical-path"];
    let report = run.report(&[&grid[..], &["--balance", "none,exact"]].concat());
    assert_eq!([&report["ranks"], &report["dp"]], [4, 2]);
    let single = run.report(&["--ranks", "1"]);
    assert_eq!(report["parameters"], single["parameters"]);
    for of in report["runs"].as_array().unwrap() {
        let seconds = numbers(&of["step_seconds"]);
        let mut sorted = seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let expected = 8.0 * 16.0 / sorted[2];
        let rate = of["tokens_per_second"].as_f64().unwrap();
        assert!((rate / expected - 1.0).abs() < 1e-9, "{rate} {seconds:?}");
        assert_eq!(of["replica_buffer_bytes"].as_array().unwrap().len(), 4);
        // Two MoE layers of the config, in each of the two groups.
        assert_eq!(of["layers"], serde_json::json!([1, 2, 1, 2]));
        let mut worst = Vec::new();
        for (step, layers) in of["loads"].as_array().unwrap().iter().enumerate() {
            assert_eq!(layers.as_array().unwrap().len(), 4);
            for (at, loads) in layers.as_array().unwrap().iter().enumerate() {
                // A group has half of the batch's tokens, each of which chooses three experts.
                let copies = 4 * 16 * 3;
                let (ranks, experts) = (numbers(&loads["ranks"]), numbers(&loads["experts"]));
                assert_eq!(ranks.len(), 2);
                assert_eq!(ranks.iter().sum::<f64>() as usize, copies);
                assert_eq!(experts.iter().sum::<f64>() as usize, copies);
                let home = |rank: usize| experts[8 * rank..][..8].iter().sum::<f64>();
                let of_ranks = |a: f64, b: f64| a.max(b) / ((a + b) / 2.0);
                let found = numbers(&of["imbalance"][step][at]);
                assert!((found[0] - of_ranks(home(0), home(1))).abs() < 1e-9);
                assert!((found[1] - of_ranks(ranks[0], ranks[1])).abs() < 1e-9);
                worst.push(found[0]);
            }
        }
        let most = worst.into_iter().fold(0.0, f64::max);
        assert_eq!(of["imbalance_before"]["max"], most);
    }
}

/// Two hops between nodes change no bit.
#[test]
fn the_way_between_nodes_is_of_no_matter() {
    let run = Run::new();
    for dp in ["1", "2"] {
        let nodes = if dp == "1" { "2" } else { "4" };
        let ranks = if dp == "1" { "4" } else { "8" };
        let args = ["--ranks", ranks, "--dp", dp, "--nodes", nodes];
        let direct = run.report(&args);
        let hops = run.report(&[&args[..], &["--hierarchical"]].concat());
        assert_eq!(course(&direct), course(&hops), "{dp} groups");
        assert_eq!(
            [&direct["hierarchical"], &hops["hierarchical"]],
            [false, true]
        );
    }
    // Of prefill, too.
    let model = run.at("model");
    let prompts = run.at("prompts");
    std::fs::write(&prompts, "w1 w2\nw3\nw4 w5 w6\nw0\n").unwrap();
    succeeded(&run.train(&["--checkpoint", &model, "--steps", "1"]));
    let logits = |more: &[&str]| {
        let logits = run.at("logits");
        let usual = [
            ("--checkpoint", model.as_str()),
            ("--prompt", &prompts),
            ("--logits", &logits),
            ("--nodes", "2"),
            ("--max-new-tokens", "2"),
            ("--report", &run.at("prefill")),
        ];
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_prefill"));
        let output = command.args(with_usual(more, &usual)).output().unwrap();
        succeeded(&output);
        std::fs::read(&logits).unwrap()
    };
    assert!(logits(&[]) == logits(&["--hierarchical"]));
}

/// In the same groups to the bit, in others up to the order of additions.
#[test]
fn a_run_is_resumed_in_the_same_groups_and_in_others() {
    let run = Run::new();
    let grid = ["--ranks", "4", "--dp", "2", "--bias-speed", "1e-2"];
    let unbroken = run.report(&grid);
    let states = run.at("states");
    let saving = ["--state", &states, "--save-every", "3", "--keep", "9"];
    let saved = run.report(&[&grid[..], &saving].concat());
    assert_eq!(course(&saved), course(&unbroken));
    let step = format!("{states}/step-00000003");
    for (i, [ranks, dp]) in [["4", "2"], ["4", "1"], ["4", "4"], ["2", "1"], ["1", "1"]]
        .into_iter()
        .enumerate()
    {
        let elsewhere = run.at(&format!("elsewhere-{i}"));
        let args = [
            "--ranks",
            ranks,
            "--dp",
            dp,
            "--bias-speed",
            "1e-2",
            "--resume",
            &step,
            "--state",
            &elsewhere,
        ];
        let output = run.train(&args);
        let printed = succeeded(&output);
        let as_saved = [ranks, dp] == ["4", "2"];
        assert_eq!(!printed.contains("which 2 x 2 ranks saved"), as_saved);
        let resumed = report(Path::new(&run.at("report")));
        assert_eq!(resumed["first_step"], 3);
        if as_saved {
            assert_eq!(course(&resumed), course(&unbroken));
        }
        let (run, expected) = (&resumed["runs"][0], &unbroken["runs"][0]);
        let what = format!("{ranks} ranks, {dp} groups");
        close(&run["loss"], &expected["loss"], 1e-3, &what);
        close(&run["grad_norm"], &expected["grad_norm"], 1e-2, &what);
        assert_eq!(numbers(&run["loss"])[..3], numbers(&expected["loss"])[..3]);
    }
    // A damaged part of an expert's replica, which one file alone has.
    let file = format!("{step}/rank-00002-of-00004.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.len() - 5;
    bytes[at] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let args = ["--resume", &step, "--state", &run.at("damaged")];
    let text = refusal_in_one_line(&run.train(&[&grid[..], &args].concat()));
    assert!(
        text.contains("rank-00002-of-00004.safetensors: damaged"),
        "{text}"
    );
}

/// The model that one group saves is the model.
#[test]
fn the_model_is_saved_once() {
    let run = Run::new();
    let (many, one) = (run.at("many"), run.at("one"));
    succeeded(&run.train(&["--ranks", "4", "--dp", "2", "--checkpoint", &many]));
    succeeded(&run.train(&["--ranks", "2", "--checkpoint", &one]));
    let files = |folder: &str| {
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|it| it.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(files(&many), files(&one));
}

#[test]
fn grids_that_do_not_fit_are_refused() {
    let run = Run::new();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--dp", "3"], &["--dp is 3", "divisors of the 4 ranks"]),
        (&["--dp", "0"], &["--dp is 0", "1 or more"]),
        (&["--dp", "8"], &["--dp is 8", "divisors of the 4 ranks"]),
        (
            &["--ranks", "6", "--dp", "2", "--batch", "12"],
            &[
                "--ranks is 6",
                "2 times (--dp) the divisors",
                "(2, 4, 8, 16, 32)",
            ],
        ),
        (
            &["--ranks", "6", "--dp", "3", "--nodes", "2", "--batch", "12"],
            &["--nodes is 2", "--dp (3)"],
        ),
        (
            &["--hierarchical"],
            &["--hierarchical is set", "only with --nodes"],
        ),
        (
            &["--hierarchical", "--dp", "2", "--nodes", "2"],
            &["--hierarchical is set", "more --nodes (2) than groups (2)"],
        ),
    ];
    for (args, expected) in cases {
        let text = refusal_in_one_line(&run.train(args));
        for part in *expected {
            assert!(text.contains(part), "{args:?}: {text}");
        }
    }
    assert!(!Path::new(&run.at("report")).exists());
}
