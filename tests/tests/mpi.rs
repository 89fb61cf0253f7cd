//! Ranks that are processes: the bodies of the equality tests, every operation, and what happens when a process dies,
//! stops, fails or leaves. Each test starts real processes with `mpirun`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A world of processes that is being tested.
struct World {
    mpirun: Child,
    lines: Receiver<String>,
    stderr: Option<std::thread::JoinHandle<String>>,
    started: Instant,
    /// One world at a time: they would only wait for each other's cores.
    _turn: MutexGuard<'static, ()>,
}

/// How a world ended.
struct End {
    code: Option<i32>,
    stdout: Vec<String>,
    stderr: String,
}

/// No test waits longer than this for a world.
const LIMIT: Duration = Duration::from_secs(300);

impl World {
    /// `processes` processes, told that there are `ranks` ranks, and what to do.
    fn start(processes: usize, ranks: usize, timeout: f64, task: &[&str]) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut command = Command::new("mpirun");
        command
            .args(["--oversubscribe", "--bind-to", "none", "-n"])
            .arg(processes.to_string())
            .arg(env!("CARGO_BIN_EXE_rank"))
            .args([ranks.to_string(), timeout.to_string()])
            .args(task)
            // Containers often run everything as root.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut mpirun = command.spawn().expect("mpirun, of OpenMPI");
        let (sender, lines) = channel();
        let stdout = BufReader::new(mpirun.stdout.take().expect("a pipe"));
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut errors = mpirun.stderr.take().expect("a pipe");
        let stderr = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = errors.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Self {
            mpirun,
            lines,
            stderr: Some(stderr),
            started: Instant::now(),
            _turn: turn,
        }
    }

    /// Waits for a line on the standard output.
    fn await_line(&self, expected: &str) {
        loop {
            let line = self.lines.recv_timeout(LIMIT).expect("a line");
            if line == expected {
                return;
            }
        }
    }

    /// The process of each rank.
    fn pids(&self) -> BTreeMap<usize, u32> {
        let parent = self.mpirun.id();
        let mut pids = BTreeMap::new();
        for entry in std::fs::read_dir("/proc").expect("Linux").flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
                continue;
            };
            // Some have gone meanwhile, some belong to others.
            let read = |file| std::fs::read(entry.path().join(file)).unwrap_or_default();
            let stat = String::from_utf8_lossy(&read("stat")).into_owned();
            let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
            if after.split_whitespace().nth(1) != Some(&parent.to_string()) {
                continue;
            }
            let environment = read("environ");
            let rank = environment.split(|byte| *byte == 0).find_map(|variable| {
                let text = std::str::from_utf8(variable).ok()?;
                text.strip_prefix("OMPI_COMM_WORLD_RANK=")?.parse().ok()
            });
            if let Some(rank) = rank {
                pids.insert(rank, pid);
            }
        }
        pids
    }

    /// Waits for the end, and that no process is left.
    fn end(mut self, pids: &BTreeMap<usize, u32>) -> End {
        let code = loop {
            if let Some(status) = self.mpirun.try_wait().expect("our child") {
                break status.code();
            }
            if self.started.elapsed() > LIMIT {
                for pid in self.pids().values() {
                    signal("KILL", *pid);
                }
                let _ = self.mpirun.kill();
                panic!("the world hangs");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let stderr = self.stderr.take().expect("read once");
        let end = End {
            code,
            stdout: self.lines.iter().collect(),
            stderr: stderr.join().expect("the reader"),
        };
        for (rank, pid) in pids {
            assert!(gone(*pid), "rank {rank} is an orphan: {}", end.stderr);
        }
        end
    }
}

/// Whether the process ends soon. It may stay as a zombie where nobody waits for orphans.
fn gone(pid: u32) -> bool {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat
            .rsplit_once(')')
            .map_or("", |(_, after)| after.trim_start());
        if state.is_empty() || state.starts_with('Z') {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(name: &str, pid: u32) {
    let sent = Command::new("kill")
        .arg(format!("-{name}"))
        .arg(pid.to_string())
        .status();
    assert!(sent.expect("kill").success());
}

fn succeeds(processes: usize, task: &[&str]) -> End {
    let end = World::start(processes, processes, 60.0, task).end(&BTreeMap::new());
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    end
}

fn bodies(processes: usize) {
    let end = succeeds(processes, &["bodies"]);
    let run: Vec<_> = end.stdout.iter().filter(|l| l.ends_with(" ok")).collect();
    let all: Vec<_> = burn_moe_tests::bodies::all()
        .map(|(name, _)| format!("{name} ok"))
        .collect();
    assert!(!all.is_empty());
    assert!(run.into_iter().eq(&all), "{:?}", end.stdout);
}

#[test]
fn the_equality_suite_over_two_processes() {
    bodies(2);
}

#[test]
fn the_equality_suite_over_four_processes() {
    bodies(4);
}

#[test]
fn every_operation() {
    for processes in [1, 2, 3, 4] {
        succeeds(processes, &["messages"]);
    }
}

#[test]
#[ignore = "needs 5 GB of memory for a payload of over 2 GiB"]
fn a_payload_beyond_32_bits() {
    succeeds(2, &["large"]);
}

#[test]
fn a_world_of_another_size_is_a_typed_error() {
    let end = World::start(2, 4, 10.0, &["messages"]).end(&BTreeMap::new());
    assert_ne!(end.code, Some(0));
    let expected = "error: 2 process(es) were started, needed is one for each of the 4 ranks";
    assert!(end.stderr.contains(expected), "{}", end.stderr);
}

#[test]
fn critical_path_timing_is_a_typed_error() {
    let end = World::start(2, 2, 10.0, &["critical-path"]).end(&BTreeMap::new());
    assert_ne!(end.code, Some(0));
    let expected = "error: ranks that are processes have no critical-path timing";
    assert!(end.stderr.contains(expected), "{}", end.stderr);
}

/// Every rank but `lost` has said, on a line of its own, that `lost` did `what` and what it was in itself.
#[track_caller]
fn assert_told(end: &End, ranks: usize, lost: usize, what: &str) {
    assert!(end.code.is_none_or(|code| code != 0), "{}", end.stderr);
    for rank in (0..ranks).filter(|rank| *rank != lost) {
        let start = format!("error: rank {lost} {what}");
        let place = format!("; meanwhile rank {rank} was in ");
        let line = end.stderr.lines().find(|line| {
            let told = line.contains(&start) && line.contains(&place);
            told && line.contains("(layer ") && line.contains("micro-batch ")
        });
        assert!(line.is_some(), "rank {rank} says nothing: {}", end.stderr);
    }
}

/// Lets four ranks train, and does something to the process of one of them in the middle of a step.
fn train_and(victim: usize, timeout: f64, fault: impl Fn(u32)) -> (End, Duration) {
    let world = World::start(4, 4, timeout, &["train", "1000000"]);
    world.await_line("step 3");
    let pids = world.pids();
    assert_eq!(pids.len(), 4);
    fault(pids[&victim]);
    let at = Instant::now();
    let end = world.end(&pids);
    (end, at.elapsed())
}

#[test]
fn a_killed_process() {
    // Rank 0 is the one that the others are connected to.
    for victim in [2, 0, 3] {
        let (end, took) = train_and(victim, 60.0, |pid| signal("KILL", pid));
        assert_told(&end, 4, victim, "died: its process ended");
        assert!(took < Duration::from_secs(20), "took {took:?}");
    }
}

#[test]
fn a_stopped_process() {
    for victim in [1, 0] {
        let (end, took) = train_and(victim, 3.0, |pid| signal("STOP", pid));
        assert_told(&end, 4, victim, "gave no sign of life for ");
        assert!(took > Duration::from_secs(2), "took {took:?}");
        assert!(took < Duration::from_secs(20), "took {took:?}");
    }
}

#[test]
fn a_process_that_is_stopped_for_less_than_the_timeout() {
    let world = World::start(4, 4, 30.0, &["train", "12"]);
    world.await_line("step 3");
    let pids = world.pids();
    signal("STOP", pids[&3]);
    std::thread::sleep(Duration::from_secs(2));
    signal("CONT", pids[&3]);
    let end = world.end(&pids);
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    assert!(end.stdout.contains(&"step 11".to_owned()));
}

/// Its process stays until its messages have arrived, so they are waited for, here while it is stopped.
#[test]
fn a_large_message_of_a_rank_that_has_returned() {
    let world = World::start(2, 2, 60.0, &["send-and-return"]);
    world.await_line("ready");
    let pids = world.pids();
    world.await_line("sent");
    signal("STOP", pids[&0]);
    std::thread::sleep(Duration::from_secs(3));
    signal("CONT", pids[&0]);
    let end = world.end(&pids);
    assert_eq!(end.code, Some(0), "{}", end.stderr);
}

#[test]
fn a_rank_that_panics_fails_or_returns() {
    for (fault, victim, what) in [
        ("panic", "1", "panicked: out of luck"),
        ("error", "0", "failed: out of memory"),
        ("return", "3", "returned early"),
    ] {
        let world = World::start(4, 4, 60.0, &["train", "20", fault, victim, "4"]);
        let end = world.end(&BTreeMap::new());
        let victim: usize = victim.parse().expect("a number");
        assert_told(&end, 4, victim, what);
        if fault != "return" {
            let own = format!("error: rank {victim} {what}");
            assert!(end.stderr.lines().any(|line| line == own), "{}", end.stderr);
        }
    }
}

/// Alive, but not in any operation: the others give up after the timeout, and it is ended too.
#[test]
fn a_rank_that_never_comes() {
    let world = World::start(4, 4, 3.0, &["train", "20", "busy", "2", "4"]);
    world.await_line("step 3");
    let pids = world.pids();
    let end = world.end(&pids);
    assert_ne!(end.code, Some(0));
    let expected = "waited 3s for rank 2 in count (layer 0, micro-batch 4) and gave up";
    assert!(end.stderr.contains(expected), "{}", end.stderr);
    // Ended from outside, it still says what it knows.
    assert!(
        end.stderr.contains("meanwhile rank 2 was in "),
        "{}",
        end.stderr
    );
}
