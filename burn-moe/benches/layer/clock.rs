//! What is measured: time on the wall, or with `BURN_MOE_CLOCK=cpu` the time that the processor works
//! for this process, which other processes on the machine disturb less.

use std::time::{Duration, Instant};

use criterion::measurement::{Measurement, ValueFormatter, WallTime};

pub enum Clock {
    Wall,
    #[cfg(unix)]
    Cpu,
}

pub enum Start {
    Wall(Instant),
    #[cfg(unix)]
    Cpu(Duration),
}

impl Clock {
    pub fn chosen() -> Self {
        match std::env::var("BURN_MOE_CLOCK").as_deref() {
            #[cfg(unix)]
            Ok("cpu") => Self::Cpu,
            Ok("wall") | Err(_) => Self::Wall,
            Ok(other) => panic!("BURN_MOE_CLOCK: wall or cpu, not {other}"),
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::Wall => "wall",
            #[cfg(unix)]
            Self::Cpu => "processor",
        }
    }
}

/// Time of the processor that this process has used.
#[cfg(unix)]
fn used() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid to be written to.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "the system keeps the time of processes");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Measurement for Clock {
    type Intermediate = Start;
    type Value = Duration;

    fn start(&self) -> Start {
        match self {
            Self::Wall => Start::Wall(Instant::now()),
            #[cfg(unix)]
            Self::Cpu => Start::Cpu(used()),
        }
    }

    fn end(&self, start: Start) -> Duration {
        match start {
            Start::Wall(start) => start.elapsed(),
            #[cfg(unix)]
            Start::Cpu(start) => used() - start,
        }
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}
