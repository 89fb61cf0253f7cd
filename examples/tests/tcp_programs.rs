//! Ranks as processes over TCP do what threads do, and miss one that is killed.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const RANKS: usize = 2;

/// Starts `train` as `RANKS` processes, or as one when `comm` is `threads`.
fn start(comm: &str, report: &Path, more: &[&str]) -> Vec<Child> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    drop(listener);
    let processes = if comm == "threads" { 1 } else { RANKS };
    let common = [
        "--config",
        "smoke",
        "--sequence-length",
        "24",
        "--batch",
        "4",
        "--ranks",
        "2",
        "--timing",
        "wall",
        "--balance",
        "exact",
        "--timeout",
        "20",
    ];
    (0..processes)
        .map(|rank| {
            Command::new(env!("CARGO_BIN_EXE_train"))
                .args(common)
                .args(["--comm", comm, "--report"])
                .arg(report)
                .args(more)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", processes.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", &port)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect()
}

fn losses(report: &Path) -> Value {
    let text = std::fs::read(report.join("report.json")).unwrap();
    let report: Value = serde_json::from_slice(&text).unwrap();
    report["runs"][0]["loss"].clone()
}

#[test]
fn losses_are_those_of_threads_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut all = Vec::new();
    for comm in ["threads", "tcp"] {
        let report = dir.path().join(comm);
        for (rank, child) in start(comm, &report, &["--steps", "3"])
            .into_iter()
            .enumerate()
        {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{comm}, rank {rank}: {said}");
            // Rank 0 alone prints.
            assert_eq!(output.stdout.is_empty(), rank > 0, "{comm}, rank {rank}");
        }
        all.push(losses(&report));
    }
    assert_eq!(all[0].as_array().unwrap().len(), 3);
    // As printed, which tells all f64 apart.
    assert_eq!(all[0], all[1]);
}

#[test]
fn a_killed_process_is_missed() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let more = ["--steps", "10000", "--save-every", "1", "--state"];
    let mut more = more.to_vec();
    more.push(state.to_str().unwrap());
    let mut children = start("tcp", &dir.path().join("report"), &more);
    // In the middle of training: a step has been saved.
    let saved = || {
        let steps = std::fs::read_dir(&state).into_iter().flatten().flatten();
        steps
            .map(|step| step.path().join("manifest.json"))
            .any(|m| m.exists())
    };
    let start = Instant::now();
    while !saved() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "no step was saved"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut killed = children.remove(1);
    killed.kill().unwrap();
    killed.wait().unwrap();
    let output = children.remove(0).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    // Who, and in what.
    assert!(
        said.contains("rank 1 ") && said.contains("micro-batch"),
        "{said}"
    );
    assert!(start.elapsed() < Duration::from_secs(180), "{said}");
}
