//! `train` over ranks that are threads or processes, and one of them that is killed.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::{course, numbers, report, succeeded, text_file, with_usual};

/// What connects the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Threads,
    Tcp,
    Mpi,
}

/// No test waits longer than this for a world.
const LIMIT: Duration = Duration::from_secs(120);

/// A run of `train`.
pub struct World {
    engine: Engine,
    /// The process of each rank over TCP; otherwise one, of all threads or `mpirun`.
    children: Vec<Child>,
}

impl World {
    /// Starts a run of `ranks` ranks.
    pub fn start(engine: Engine, ranks: usize, args: &[String]) -> Self {
        let train = env!("CARGO_BIN_EXE_train");
        let spawn = |command: &mut Command, comm: &str| {
            command.args(["--ranks", &ranks.to_string(), "--comm", comm]);
            command.args(args).stdin(Stdio::null());
            let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().expect("the program")
        };
        let children = match engine {
            Engine::Threads => vec![spawn(&mut Command::new(train), "threads")],
            Engine::Mpi => vec![spawn(&mut mpirun(ranks, train), "mpi")],
            Engine::Tcp => {
                // Nobody else gets this port so soon.
                let port = TcpListener::bind("127.0.0.1:0")
                    .and_then(|listener| listener.local_addr())
                    .expect("a port")
                    .port();
                let rank = |rank: usize| {
                    let mut command = Command::new(train);
                    command
                        .env("RANK", rank.to_string())
                        .env("WORLD_SIZE", ranks.to_string())
                        .env("MASTER_ADDR", "127.0.0.1")
                        .env("MASTER_PORT", port.to_string());
                    spawn(&mut command, "tcp")
                };
                (0..ranks).map(rank).collect()
            }
        };
        Self { engine, children }
    }

    /// The processes that are ranks, by rank.
    fn processes(&self) -> BTreeMap<usize, u32> {
        match self.engine {
            Engine::Mpi => ranks_of(self.children[0].id()),
            _ => self.children.iter().map(Child::id).enumerate().collect(),
        }
    }

    /// Waits until all have ended; rank by rank over TCP.
    pub fn end(mut self) -> Vec<Output> {
        let start = Instant::now();
        let ended = |child: &mut Child| child.try_wait().expect("our child").is_some();
        while !self.children.iter_mut().all(ended) {
            assert!(start.elapsed() < LIMIT, "the world hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
        let children = std::mem::take(&mut self.children).into_iter();
        children
            .map(|it| it.wait_with_output().expect("pipes"))
            .collect()
    }
}

/// A test that fails leaves nothing behind.
impl Drop for World {
    fn drop(&mut self) {
        if self.engine == Engine::Mpi && !self.children.is_empty() {
            for pid in self.processes().values() {
                kill(*pid);
            }
        }
        for child in &mut self.children {
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// `mpirun` of a program.
pub fn mpirun(processes: usize, program: &str) -> Command {
    let mut command = Command::new("mpirun");
    command
        .args(["--oversubscribe", "--bind-to", "none", "-n"])
        .args([&processes.to_string(), program])
        // Containers often run everything as root.
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

/// The processes that an `mpirun` has started, by rank.
fn ranks_of(mpirun: u32) -> BTreeMap<usize, u32> {
    let threads = fs::read_dir(format!("/proc/{mpirun}/task"));
    let children: String = threads
        .into_iter()
        .flatten()
        .flatten()
        .map(|thread| fs::read_to_string(thread.path().join("children")).unwrap_or_default())
        .collect();
    let rank_of = |pid: &u32| -> Option<usize> {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let mut variables = environment.split(|byte| *byte == 0);
        let rank = |it: &[u8]| {
            let text = std::str::from_utf8(it).ok()?;
            text.strip_prefix("OMPI_COMM_WORLD_RANK=")?.parse().ok()
        };
        variables.find_map(rank)
    };
    let pids = children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok());
    pids.filter_map(|pid| Some((rank_of(&pid)?, pid))).collect()
}

/// Ends a process of this test by SIGKILL; false when it is gone.
fn kill(pid: u32) -> bool {
    let sent = Command::new("kill")
        .args(["-KILL", &pid.to_string()])
        .status();
    sent.is_ok_and(|status| status.success())
}

/// Whether a process ends soon. It may stay as a zombie where nobody waits for orphans.
fn gone(pid: u32) -> bool {
    let end = Instant::now() + Duration::from_secs(5);
    let alive = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(')').map_or("", |(_, after)| after.trim());
        !state.is_empty() && !state.starts_with('Z')
    };
    while alive() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// Options of a small run, unless it has its own.
const USUAL: &[(&str, &str)] = &[
    ("--config", "smoke"),
    ("--sequence-length", "16"),
    ("--batch", "8"),
    ("--balance", "exact"),
    ("--timing", "wall"),
    ("--timeout", "30"),
    ("--clip", "0.5"),
];

/// Runs the same over each of `engines`: the same losses and norms, to the bit. Rank 0 alone prints.
pub fn same_bits(engines: &[Engine], ranks: usize, args: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let courses: Vec<_> = engines
        .iter()
        .map(|engine| {
            let target = folder.path().join(format!("{engine:?}"));
            let target_name = target.display().to_string();
            let args = [args, &["--data", &data, "--report", &target_name]].concat();
            let world = World::start(*engine, ranks, &with_usual(&args, USUAL));
            let printed: Vec<String> = world.end().iter().map(succeeded).collect();
            for (rank, printed) in printed.iter().enumerate() {
                let reports = usize::from(rank == 0);
                assert_eq!(printed.matches("report: ").count(), reports, "{printed}");
                assert!(rank == 0 || printed.is_empty(), "rank {rank}: {printed}");
            }
            let report = report(&target);
            assert!(numbers(&report["runs"][0]["loss"]).len() > 1);
            course(&report)
        })
        .collect();
    for (engine, course) in engines.iter().zip(&courses) {
        assert_eq!(course, &courses[0], "{engine:?} and {:?}", engines[0]);
    }
}

/// Ranks of the runs in which one is killed.
const RANKS: usize = 4;

/// Four processes, two times two, save every other step. One is killed in the middle: all others end in
/// time, say who was lost and what they were in, and none is left. Resumed, the run ends with the losses
/// and norms of one that was left alone, to the bit. Each of `victims` in a run of its own.
pub fn a_killed_process_is_missed_and_the_run_resumed(engine: Engine, victims: &[usize]) {
    let folder = tempfile::tempdir().unwrap();
    let data = text_file(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    let reports = at("report");
    let args = |more: &[&str]| {
        let common = [
            "--dp", "2", "--steps", "30", "--data", &data, "--report", &reports,
        ];
        with_usual(&[&common, more].concat(), USUAL)
    };
    World::start(Engine::Threads, RANKS, &args(&[]))
        .end()
        .iter()
        .for_each(|it| drop(succeeded(it)));
    let unbroken = course(&report(Path::new(&reports)));

    for victim in victims.iter().copied() {
        let states = at(&format!("states-{victim}"));
        let saving = args(&["--state", &states, "--save-every", "2"]);
        let world = World::start(engine, RANKS, &saving);
        let saved = |step: usize| {
            let step = format!("step-{step:08}/manifest.json");
            Path::new(&states).join(step).exists()
        };
        let start = Instant::now();
        while !saved(4) {
            assert!(start.elapsed() < LIMIT, "no step was saved");
            std::thread::sleep(Duration::from_millis(2));
        }
        let processes = world.processes();
        assert_eq!(processes.len(), RANKS);
        assert!(kill(processes[&victim]));
        let killed = Instant::now();
        let outputs = world.end();
        let took = killed.elapsed();
        assert!(took < Duration::from_secs(30), "the timeout: {took:?}");
        for (rank, pid) in &processes {
            assert!(gone(*pid), "rank {rank} is an orphan");
        }
        assert!(!saved(30), "the run was over before");

        let said: String = outputs
            .iter()
            .map(|it| String::from_utf8_lossy(&it.stderr).into_owned())
            .collect();
        let codes: Vec<_> = outputs.iter().map(|it| it.status.code()).collect();
        match engine {
            // One code, of the world.
            Engine::Mpi => assert!(codes[0].is_some_and(|code| code != 0), "{codes:?}"),
            _ => {
                for (rank, code) in codes.iter().enumerate() {
                    let expected = if rank == victim { None } else { Some(1) };
                    assert_eq!(*code, expected, "rank {rank}: {said}");
                }
            }
        }
        for rank in (0..RANKS).filter(|rank| *rank != victim) {
            let told = said.lines().any(|line| {
                line.starts_with(&format!("error: rank {victim} "))
                    && line.contains(&format!("; meanwhile rank {rank} was in "))
                    && line.contains("micro-batch")
            });
            assert!(told, "rank {rank} says nothing: {said}");
        }

        let resuming = args(&["--resume", &states, "--save-every", "2"]);
        let outputs = World::start(engine, RANKS, &resuming).end();
        outputs.iter().for_each(|it| drop(succeeded(it)));
        let resumed = report(Path::new(&reports));
        let first = resumed["first_step"].as_u64().unwrap();
        assert!((4..30).contains(&first), "resumed from step {first}");
        assert_eq!(course(&resumed), unbroken);
    }
}
