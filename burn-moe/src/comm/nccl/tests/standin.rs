//! The calls of CUDA and NCCL themselves, against libraries of that name that need no GPU: `standin/*.c`. They are loaded
//! as the real ones are, so each test runs in a process of its own that finds them.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use super::{KEY, exchange, link};
use crate::comm::nccl::{
    Lane, NcclError, NcclOptions, connect, library_version, local_device, plan,
};
use crate::comm::{CommError, Communicator, Key, Op, RankOptions, RanksError, fail, try_run_ranks};

type AnyError = Box<dyn Error + Send + Sync>;

/// Runs the rest of the test `name` of this file in a process that finds the libraries and these variables.
fn with_libraries(name: &str, variables: &[(&str, &str)], rest: fn()) {
    const CHILD: &str = "BURN_MOE_STANDIN";
    if std::env::var_os(CHILD).is_some() {
        return rest();
    }
    let folder = Libraries::build();
    let test = format!("{}::{name}", module_path!().split_once("::").unwrap().1);
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test])
        .env(CHILD, name)
        .env("LD_LIBRARY_PATH", folder.search_path())
        .env_remove("BURN_MOE_NCCL")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("LOCAL_RANK")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && text.contains("1 passed");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(passed, "{test}: {}\n{text}{said}", output.status);
}

/// A folder with the libraries, until it is dropped.
struct Libraries(PathBuf);

impl Libraries {
    fn build() -> Self {
        static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("burn-moe-standin-{}-{number}", std::process::id());
        let folder = Self(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&folder.0).unwrap();
        let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/src/comm/nccl/tests/standin");
        for (source, library) in [("cuda.c", "libcuda.so"), ("nccl.c", "libnccl.so.2")] {
            let status = Command::new("cc")
                .args(["-shared", "-fPIC", "-pthread", "-w", "-o"])
                .arg(folder.0.join(library))
                .arg(format!("{sources}/{source}"))
                .status()
                .expect("a C compiler, which linking needs too");
            assert!(status.success(), "cc {source}: {status}");
        }
        folder
    }

    /// Before all that this process searches.
    fn search_path(&self) -> OsString {
        let others = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let all = std::iter::once(self.0.clone()).chain(std::env::split_paths(&others));
        std::env::join_paths(all).unwrap()
    }
}

impl Drop for Libraries {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Ranks that are threads, each with a device of its own.
fn linked(
    size: usize,
    timeout: Duration,
    f: impl Fn(Arc<dyn Communicator>) -> Result<(), AnyError> + Sync,
) -> Result<(), RanksError> {
    let options = RankOptions {
        timeout,
        ..Default::default()
    };
    let run = |comm: Arc<dyn Communicator>| {
        f(connect(comm.clone(), comm.rank(), NcclOptions::default())?)
    };
    try_run_ranks(size, options, run).map(drop)
}

/// `bytes` bytes from everyone to everyone, and a look at them.
fn all(comm: &Arc<dyn Communicator>, lane: Lane, key: Key, bytes: usize) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let ones = vec![1; size];
    let byte = |from: usize, at: usize| (from * 77 + at * 5 + key.step as usize) as u8;
    let sent = (0..size * bytes).map(|at| byte(rank, at)).collect();
    let mut buffers = [sent, vec![0; size * bytes]];
    let round = plan::all_to_all(&ones, &ones, bytes);
    exchange(comm, lane, key, &[round], &mut buffers)?;
    let place = |at: usize| byte(at / bytes, rank * bytes + at % bytes);
    let expected: Vec<u8> = (0..size * bytes).map(place).collect();
    assert_eq!(buffers[plan::ROWS_RECEIVED], expected);
    Ok(())
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn both_lanes_work() {
    with_libraries("both_lanes_work", &[], || {
        assert_eq!(library_version().unwrap(), "2.28.3");
        assert_eq!(local_device(), Ok(0));
        for size in [1, 2, 4] {
            let done = linked(size, LONG, |comm| {
                for step in 0..20 {
                    all(&comm, Lane::Rows, Key { step, ..KEY }, 4)?;
                    all(&comm, Lane::Weights, Key::new(Op::Replicate, step, 0), 7)?;
                }
                // Connecting exchanged a row of a byte.
                let traffic = link(&comm).traffic();
                assert_eq!(traffic.row_exchanges, 21);
                assert_eq!(traffic.weight_bytes, 20 * 7 * size as u64);
                Ok(())
            });
            done.unwrap();
        }
    });
}

#[test]
fn losses_end_waits() {
    with_libraries("losses_end_waits", &[], || {
        let lost = linked(3, LONG, |comm| {
            if comm.rank() == 1 {
                return Err("out of memory".into());
            }
            all(&comm, Lane::Rows, KEY, 4).map_err(Into::into)
        });
        let text = lost.unwrap_err().to_string();
        assert!(text.starts_with("rank 1 failed: out of memory"), "{text}");
        assert!(text.contains("rank 0 was in dispatch"), "{text}");

        let silent = linked(3, Duration::from_secs(1), |comm| {
            if comm.rank() == 1 {
                std::thread::sleep(Duration::from_secs(4));
                return Ok(());
            }
            all(&comm, Lane::Rows, KEY, 4).map_err(Into::into)
        });
        let text = silent.unwrap_err().to_string();
        assert!(text.contains("for rank 1 in dispatch"), "{text}");

        // Sizes that differ are seen by the library or in the announcements, whichever is first.
        let broken = linked(2, Duration::from_secs(2), |comm| {
            let key = Key::new(Op::Replicate, 0, 0);
            let bytes = 4 + comm.rank();
            let ones = vec![1; 2];
            let mut buffers = [vec![0; 2 * bytes], vec![0; 2 * bytes]];
            let round = plan::all_to_all(&ones, &ones, bytes);
            exchange(&comm, Lane::Weights, key, &[round], &mut buffers)
                .unwrap_or_else(|it| fail(it));
            Ok(())
        });
        let text = broken.unwrap_err().to_string();
        let expected = ["internal error (3): the stand-in's last words", "bytes to "];
        assert!(expected.iter().any(|it| text.contains(it)), "{text}");
    });
}

#[test]
fn what_does_not_fit_is_refused_by_all() {
    with_libraries("what_does_not_fit_is_refused_by_all", &[], || {
        let errors = |device: fn(usize) -> usize, chunk_bytes: fn(usize) -> usize| {
            let options = RankOptions::default();
            let all = try_run_ranks(3, options, |comm| {
                let chunk_bytes = chunk_bytes(comm.rank());
                let error = connect(
                    comm.clone(),
                    device(comm.rank()),
                    NcclOptions { chunk_bytes },
                );
                Ok::<_, AnyError>(error.map(drop).unwrap_err().to_string())
            });
            all.unwrap()
        };
        for text in errors(|_| 0, |_| 1) {
            assert!(text.starts_with("ranks 0 and 1 both have GPU"), "{text}");
        }
        let texts = errors(|rank| if rank == 1 { 9 } else { rank }, |_| 1);
        assert_eq!(texts[1], "no CUDA device 9: there are 8");
        assert_eq!(texts[0], format!("rank 1 has no NCCL: {}", texts[1]));
        for text in errors(|rank| rank, |rank| rank / 2 + 1) {
            assert!(text.contains("chunk_bytes"), "{text}");
        }
    });
}

#[test]
fn an_old_library_is_refused() {
    with_libraries(
        "an_old_library_is_refused",
        &[("STANDIN_NCCL", "21602")],
        || {
            let text = library_version().unwrap_err().to_string();
            assert_eq!(text, "libnccl.so.2 is NCCL 2.16.2, needed is 2.18 or later");
        },
    );
}

#[test]
fn a_device_that_is_not_there_is_named() {
    with_libraries(
        "a_device_that_is_not_there_is_named",
        &[("STANDIN_DEVICES", "2"), ("LOCAL_RANK", "3")],
        || {
            let error = NcclError::NoDevice {
                device: 3,
                found: 2,
                visible_devices: None,
            };
            assert_eq!(local_device(), Err(error));
        },
    );
}

#[test]
fn no_device_is_said_plainly() {
    with_libraries(
        "no_device_is_said_plainly",
        &[("STANDIN_DEVICES", "0")],
        || {
            let text = local_device().unwrap_err().to_string();
            assert_eq!(text, "no CUDA device 0: there are 0");
        },
    );
}
