//! The binaries over processes do what they do over threads.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::world::{Engine, a_killed_process_is_missed_and_the_run_resumed, mpirun, same_bits};
use common::{refusal, report, succeeded};

/// Runs a binary with `args`, as `processes` processes when there are any.
fn run(binary: &str, processes: usize, args: &[&str]) -> Output {
    let mut command = match processes {
        0 => Command::new(binary),
        _ => mpirun(processes, binary),
    };
    command.args(args).output().unwrap()
}

#[test]
fn training_and_prefill_give_the_same_bits_over_threads_and_processes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("prompts"), "fn main\nlet x =\nuse std\npub fn\n").unwrap();
    let mut reports = Vec::new();
    let mut logits = Vec::new();
    let mut weights = Vec::new();
    for (name, processes, comm) in [("threads", 0, "threads"), ("processes", 4, "mpi")] {
        let (report_at, model) = (at(&format!("{name}.train")), at(&format!("{name}.model")));
        let train = [
            "--config",
            "smoke",
            "--steps",
            "4",
            "--sequence-length",
            "24",
            "--batch",
            "8",
            "--ranks",
            "4",
            "--balance",
            "none,exact",
            "--timing",
            "wall",
            "--comm",
            comm,
            "--report",
            &report_at,
            "--checkpoint",
            &model,
        ];
        let printed = succeeded(&run(env!("CARGO_BIN_EXE_train"), processes, &train));
        assert_eq!(printed.matches("report: ").count(), 1, "{printed}");
        assert_eq!(printed.matches("4 ranks").count(), 1, "{printed}");
        let losses: Vec<_> = report(Path::new(&report_at))["runs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|run| run["loss"].clone())
            .collect();
        assert_eq!(losses[1].as_array().unwrap().len(), 4);
        let mut files: Vec<_> = std::fs::read_dir(&model)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|it| it == "safetensors"))
            .collect();
        files.sort();
        weights.push(
            files
                .iter()
                .map(|it| std::fs::read(it).unwrap())
                .collect::<Vec<_>>(),
        );

        let (report_at, logits_at) = (
            at(&format!("{name}.prefill")),
            at(&format!("{name}.logits")),
        );
        let prefill = [
            "--checkpoint",
            &model,
            "--prompt",
            &at("prompts"),
            "--max-new-tokens",
            "3",
            "--ranks",
            "4",
            "--timing",
            "wall",
            "--comm",
            comm,
            "--report",
            &report_at,
            "--logits",
            &logits_at,
        ];
        let printed = succeeded(&run(env!("CARGO_BIN_EXE_prefill"), processes, &prefill));
        assert_eq!(printed.matches(" -> ").count(), 4, "{printed}");
        logits.push(std::fs::read(&logits_at).unwrap());
        let continuations = report(Path::new(&report_at))["runs"][0]["continuations"].clone();
        reports.push((losses, continuations));
    }
    // Losses as printed, which tells all f64 apart.
    assert_eq!(reports[0], reports[1]);
    assert!(weights[0] == weights[1], "weights differ");
    assert!(logits[0] == logits[1], "logits differ");
}

#[test]
fn a_number_of_ranks_that_is_not_that_of_the_processes() {
    let train = [
        "--config",
        "smoke",
        "--sequence-length",
        "24",
        "--steps",
        "1",
        "--ranks",
        "4",
        "--comm",
        "mpi",
    ];
    let output = run(env!("CARGO_BIN_EXE_train"), 2, &train);
    let text = refusal(&output);
    let expected = "error: 2 process(es) were started, needed is one for each of the 4 ranks";
    assert_eq!(text.matches(expected).count(), 1, "{text}");
}

#[test]
fn options_that_processes_cannot_have() {
    for (args, expected) in [
        (
            ["--nodes", "3"],
            "--nodes is 3, allowed: the divisors of the 4 ranks",
        ),
        (
            ["--timing", "critical-path"],
            "ranks that are processes have no critical-path timing",
        ),
    ] {
        let mut train = vec!["--config", "smoke", "--steps", "1", "--comm", "mpi"];
        train.extend(["--sequence-length", "24"]);
        train.extend(args);
        let output = run(env!("CARGO_BIN_EXE_train"), 4, &train);
        let text = refusal(&output);
        assert_eq!(text.matches(expected).count(), 1, "{text}");
    }
}

/// Data parallel times expert parallel, with tokens that go between nodes in two hops.
#[test]
fn all_engines_give_the_same_bits() {
    let engines = [Engine::Threads, Engine::Mpi, Engine::Tcp];
    let args = ["--steps", "3", "--accumulate", "2", "--batch", "16"];
    same_bits(&engines, 4, &[&args[..], &["--dp", "2"]].concat());
    let hops = ["--nodes", "2", "--hierarchical"];
    same_bits(&engines, 4, &[&args[..], &hops].concat());
}

#[test]
fn a_killed_process_is_missed() {
    // Rank 0 writes the manifests.
    a_killed_process_is_missed_and_the_run_resumed(Engine::Mpi, &[1, 0]);
}
