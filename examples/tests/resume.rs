//! A run of `train` that is interrupted, by any means, and resumed.

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use burn_moe_models::state::SavedState;
use common::{copy_fixture, course, numbers, refusal, succeeded, text_file, with_usual};
use serde_json::Value;
use tempfile::TempDir;

/// A small run: its text, and where it reports.
struct Run {
    folder: TempDir,
    data: String,
    steps: String,
}

impl Run {
    fn new(steps: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self {
            data: text_file(folder.path()),
            folder,
            steps: steps.to_string(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let report = self.path("report").display().to_string();
        let mut usual = vec![
            ("--batch", "4"),
            ("--sequence-length", "12"),
            ("--warmup", "2"),
            ("--clip", "0.5"),
            ("--timeout", "60"),
            ("--timing", "wall"),
            ("--data", &self.data),
            ("--steps", &self.steps),
            ("--report", &report),
        ];
        if !args.contains(&"--model") {
            usual.push(("--config", "smoke"));
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_train"));
        command.args(with_usual(args, &usual));
        command
    }

    fn succeed(&self, args: &[&str]) -> Value {
        succeeded(&self.command(args).output().unwrap());
        self.report()
    }

    fn report(&self) -> Value {
        common::report(&self.path("report"))
    }

    fn refuse(&self, args: &[&str]) -> String {
        refusal(&self.command(args).output().unwrap())
    }
}

fn newest_step(folder: &Path) -> u64 {
    SavedState::open(folder).map_or(0, |saved| saved.step())
}

/// Kills runs until `rounds` have been killed, resumes each, and compares with a run that was left
/// alone. Prints what happened.
fn kill_rounds(rounds: usize, steps: usize) {
    let run = Run::new(steps);
    let ranks = ["--ranks", "4"];
    let start = Instant::now();
    let expected = course(&run.succeed(&["--ranks", "4", "--balance", "exact"]));
    let whole = start.elapsed();
    let mut random = 2026u64;
    let mut draw = |below: u64| {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (random >> 33) % below
    };
    let (mut killed, mut finished, mut within_save) = (0, 0, 0);
    let mut lost = 0u64;
    while killed < rounds {
        let states = run.path("states");
        let folder = states.display().to_string();
        let _ = fs::remove_dir_all(&states);
        // One run, killed until it ends by itself.
        loop {
            let saved = newest_step(&states);
            let mut args = vec!["--save-every", "1", "--keep", "2"];
            args.extend(ranks);
            args.extend(match saved {
                0 => ["--state", &folder],
                _ => ["--resume", &folder],
            });
            let mut child = run
                .command(&args)
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stderr.take().unwrap()).lines();
            let reader = std::thread::spawn(move || {
                let lines = lines.map_while(Result::ok);
                let steps = lines.filter_map(|line| {
                    let step = line.strip_prefix("step ")?.split_once(" is saved")?.0;
                    step.parse::<u64>().ok()
                });
                steps.max().unwrap_or(0)
            });
            let end = Instant::now() + Duration::from_millis(draw(whole.as_millis() as u64));
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break Some(status),
                    None if killed < rounds && Instant::now() > end => {
                        child.kill().unwrap();
                        child.wait().unwrap();
                        break None;
                    }
                    None => std::thread::sleep(Duration::from_micros(200)),
                }
            };
            let told = reader.join().unwrap();
            let newest = newest_step(&states);
            assert!(
                newest >= saved.max(told),
                "steps {saved} and {told} were saved, {newest} is left"
            );
            if let Some(status) = status {
                assert!(status.success());
                assert_eq!(course(&run.report()), expected);
                finished += 1;
                break;
            }
            killed += 1;
            if killed.is_multiple_of(20) {
                eprintln!("{killed} killed, {:.0} s", start.elapsed().as_secs_f64());
            }
            lost += u64::from(newest < told);
            let folders = fs::read_dir(&states).map_or(0, |entries| {
                let entries = entries.map(|entry| entry.unwrap().path());
                entries
                    .filter(|path| !path.join("manifest.json").exists())
                    .count()
            });
            within_save += usize::from(folders > 0);
        }
    }
    println!(
        "{killed} processes killed, {within_save} of them within a save; {lost} saved steps lost; \
         {finished} runs of {steps} steps ended with the losses of an unbroken run, bit by bit; \
         {:.0} s",
        start.elapsed().as_secs_f64()
    );
    assert_eq!(lost, 0);
}

#[test]
fn killed_runs_lose_no_saved_step() {
    kill_rounds(4, 8);
}

/// `cargo test --release --workspace --test resume -- --ignored --nocapture`; the variable
/// `ROUNDS` says how many.
#[test]
#[ignore = "kills 200 processes, which takes 15 minutes; four rounds run always"]
fn two_hundred_killed_runs_lose_no_saved_step() {
    let rounds = std::env::var("ROUNDS")
        .ok()
        .and_then(|rounds| rounds.parse().ok());
    kill_rounds(rounds.unwrap_or(200), 12);
}

#[test]
fn resumed_on_other_ranks_the_losses_are_the_same_up_to_order() {
    let run = Run::new(8);
    let losses = |report: &Value| numbers(&report["runs"][0]["loss"]);
    let unbroken = losses(&run.succeed(&["--batch", "8", "--ranks", "4", "--balance", "exact"]));
    let states = run.path("states").display().to_string();
    run.succeed(&[
        "--batch",
        "8",
        "--ranks",
        "4",
        "--state",
        &states,
        "--save-every",
        "3",
        "--keep",
        "9",
    ]);
    // From the checkpoint of a step, saving elsewhere.
    let step = run.path("states/step-00000003").display().to_string();
    for (ranks, slots) in [("2", "2"), ("1", "2"), ("8", "1")] {
        let elsewhere = run
            .path(&format!("elsewhere-{ranks}"))
            .display()
            .to_string();
        let args = [
            "--batch", "8", "--resume", &step, "--state", &elsewhere, "--ranks", ranks, "--slots",
            slots,
        ];
        let report = run.succeed(&args);
        assert_eq!(report["first_step"], 3);
        assert_eq!(
            report["runs"][0]["step_seconds"].as_array().unwrap().len(),
            5
        );
        let found = losses(&report);
        assert_eq!(found.len(), 8);
        assert_eq!(found[..3], unbroken[..3]);
        for (a, b) in found.iter().zip(&unbroken) {
            assert!(
                (a - b).abs() < 2e-3,
                "{ranks} ranks: {found:?} {unbroken:?}"
            );
        }
        assert_eq!(newest_step(&run.path(&format!("elsewhere-{ranks}"))), 8);
    }
    // A run that is done is done.
    let report = run.succeed(&["--batch", "8", "--resume", &states, "--ranks", "4"]);
    assert_eq!(report["first_step"], 8);
    assert_eq!(losses(&report), unbroken);
}

/// Narrow weights, whose optimizer keeps wide ones, and a model that was loaded.
#[test]
fn every_kind_of_run_resumes_to_the_bit() {
    let run = Run::new(6);
    let model = copy_fixture("qwen3_moe", run.folder.path());
    // Each line of text is a token of the smallest tokenizer there is.
    let tokenizer = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
        "decoder": null, "model": {"type": "WordLevel", "vocab": {"?": 0, "w0": 1, "w1": 2, "w2": 3,
        "w3": 4, "w4": 5, "w5": 6, "w6": 7}, "unk_token": "?"}}"#;
    fs::write(model.join("tokenizer.json"), tokenizer).unwrap();
    let model = model.display().to_string();
    let kinds: [&[&str]; 3] = [
        &[
            "--dtype",
            "bf16",
            "--accumulate",
            "2",
            "--schedule",
            "constant",
        ],
        &["--balance", "none", "--planner", "quota", "--checkpointing"],
        &["--model", &model, "--lr", "1e-2"],
    ];
    for (i, kind) in kinds.iter().enumerate() {
        let args = |more: &[&str]| -> Vec<String> {
            let all = kind.iter().chain(&["--ranks", "2"]).chain(more);
            all.map(ToString::to_string).collect()
        };
        let succeed = |more: &[&str]| {
            let args = args(more);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            course(&run.succeed(&args))
        };
        let states = run.path(&format!("states-{i}")).display().to_string();
        let unbroken = succeed(&["--state", &states, "--save-every", "4"]);
        let step = format!("{states}/step-00000004");
        let elsewhere = run.path(&format!("elsewhere-{i}")).display().to_string();
        let resumed = succeed(&["--resume", &step, "--state", &elsewhere]);
        assert_eq!(resumed, unbroken, "{kind:?}");
    }
}

#[test]
fn what_would_be_another_run_is_refused() {
    let run = Run::new(4);
    let path = run.path("states");
    let states = path.display().to_string();
    run.succeed(&["--state", &states, "--save-every", "2", "--ranks", "2"]);
    let _ = fs::remove_dir_all(run.path("report"));
    let other_text = run.path("other.txt");
    fs::write(&other_text, "another text ".repeat(99)).unwrap();
    let other_text = other_text.display().to_string();
    let cases: &[(&[&str], &[&str])] = &[
        (
            &["--lr", "1e-3"],
            &["step-00000004", "--lr is 0.001", "0.003"],
        ),
        (&["--seed", "7"], &["--seed is 7", "0"]),
        (&["--steps", "9"], &["--steps is 9", "4"]),
        (&["--batch", "8"], &["--batch is 8", "4"]),
        (&["--accumulate", "2"], &["--accumulate is 2"]),
        (&["--dtype", "bf16"], &["--dtype is bf16", "f32"]),
        (&["--balance", "none"], &["--balance is none", "exact"]),
        (
            &["--balance", "none,exact"],
            &["--balance is none,exact", "one alone"],
        ),
        (&["--data", &other_text], &["--data, by checksum"]),
        (
            &["--config", "tiny"],
            &["config.attention.kv_lora_rank is 32", "16"],
        ),
        (&["--keep", "0"], &["--keep is 0", "1 or more"]),
        (&["--save-every", "0"], &["--save-every is 0", "1 or more"]),
    ];
    for (args, expected) in cases {
        let mut args = args.to_vec();
        args.extend(["--resume", &states, "--ranks", "2"]);
        let text = run.refuse(&args);
        for part in *expected {
            assert!(text.contains(part), "{args:?}: {text}");
        }
    }
    let text = run.refuse(&["--save-every", "3"]);
    assert!(text.contains("only with --state or --resume"), "{text}");
    let text = run.refuse(&["--state", &states]);
    assert!(
        text.contains("step-00000004") && text.contains("another run"),
        "{text}"
    );
    let text = run.refuse(&["--resume", &run.path("absent").display().to_string()]);
    assert!(
        text.contains("absent") && text.contains("no such folder"),
        "{text}"
    );
    // An older checkpoint would be saved over newer ones.
    let older = path.join("step-00000002").display().to_string();
    let text = run.refuse(&["--resume", &older, "--ranks", "2"]);
    assert!(text.contains("not older than step 3"), "{text}");
    // A damaged file, by its name.
    let file = path.join("step-00000004/rank-00001-of-00002.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.len() - 5;
    bytes[at] ^= 1;
    fs::write(&file, bytes).unwrap();
    let text = run.refuse(&["--resume", &states, "--ranks", "2"]);
    assert!(
        text.contains("rank-00001-of-00002.safetensors: damaged"),
        "{text}"
    );
    assert!(!run.path("report").exists(), "nothing is reported");
}
