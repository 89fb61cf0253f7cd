//! The table at the end, of criterion's estimates.

use std::path::{Path, PathBuf};

use super::shapes::Case;

const PEERS: [&str; 4] = ["ours", "layer", "loop", "candle"];

/// The benchmark that only reads weights.
pub const READ: &str = "read";

/// What was measured in this run.
pub struct Report {
    home: PathBuf,
    clock: &'static str,
    /// Floating-point operations of the benchmark of the machine's ceiling.
    pub ceiling: f64,
    rows: Vec<Row>,
    memory: Vec<String>,
}

struct Row {
    case: String,
    directory: String,
    pass: &'static str,
    flops: f64,
    peers: Vec<&'static str>,
}

/// Milliseconds of one iteration.
struct Time {
    median: f64,
    least: f64,
}

impl Report {
    pub fn new(home: PathBuf, clock: &'static str) -> Self {
        Self {
            home,
            clock,
            ceiling: 0.0,
            rows: Vec::new(),
            memory: Vec::new(),
        }
    }

    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Notes that a benchmark runs.
    pub fn ran(&mut self, case: &Case, pass: &'static str, peer: &'static str) {
        let directory = format!("{}-{}-{pass}", case.shape.name, case.tokens);
        let found = self.rows.iter().position(|row| row.directory == directory);
        let row = found.unwrap_or_else(|| {
            self.rows.push(Row {
                case: case.name(),
                directory,
                pass,
                flops: case.flops() * if pass == "forward" { 1.0 } else { 3.0 },
                peers: Vec::new(),
            });
            self.rows.len() - 1
        });
        if !self.rows[row].peers.contains(&peer) {
            self.rows[row].peers.push(peer);
        }
    }

    /// Notes peak memory and the least there can be.
    pub fn memory(&mut self, line: String) {
        self.memory.push(line);
    }

    fn time(&self, directory: &str, peer: &str) -> Option<Time> {
        let read = |file: &str| {
            let path = self.home.join(directory).join(peer).join("new").join(file);
            let text = std::fs::read_to_string(path).ok()?;
            serde_json::from_str::<serde_json::Value>(&text).ok()
        };
        let median = read("estimates.json")?["median"]["point_estimate"].as_f64()?;
        let samples = read("sample.json")?;
        let numbers = |name: &str| {
            let list = samples[name].as_array().cloned().unwrap_or_default();
            list.into_iter().filter_map(|v| v.as_f64())
        };
        let least = numbers("times")
            .zip(numbers("iters"))
            .map(|(time, iterations)| time / iterations)
            .fold(f64::INFINITY, f64::min);
        Some(Time {
            median: median / 1e6,
            least: least / 1e6,
        })
    }

    pub fn print(&self) {
        let ceiling = self.time("ceiling", "matmul").map(|time| {
            println!(
                "\nOne product [2048, 2048] x [2048, 2048]: {:.1} GFLOP/s (best {:.1})",
                self.ceiling / time.median / 1e6,
                self.ceiling / time.least / 1e6
            );
            self.ceiling / time.median / 1e6
        });
        println!(
            "Medians (and minima) in ms of {} time, one thread, f32; ratios of medians to ours.\n\
             ours, loop, candle: experts from given choices; layer: with router and planning.\n\
             training: forward and backward pass. read: the weights of experts with tokens, once.\n\
             of ceiling: the time of these operations in one product, or of read if longer, over ours.\n",
            self.clock
        );
        println!(
            "| case | pass | {} | read | loop / ours | candle / ours | GFLOP/s | of ceiling |",
            PEERS.join(" | ")
        );
        println!("|{}", "---|".repeat(PEERS.len() + 7));
        for row in &self.rows {
            let times = PEERS.map(|peer| {
                let ran = row.peers.contains(&peer);
                self.time(&row.directory, peer).filter(|_| ran)
            });
            let cell = |time: &Option<Time>| match time {
                Some(Time { median, least }) => format!("{median:.1} ({least:.1})"),
                None => "-".to_string(),
            };
            let [ours, _, looped, candle] = &times;
            let ratio = |of: &Option<Time>| match (of, ours) {
                (Some(of), Some(ours)) => format!("{:.2}", of.median / ours.median),
                _ => "-".to_string(),
            };
            let speed = ours.as_ref().map(|time| row.flops / time.median / 1e6);
            let read = self.time(&row.directory, READ);
            let share = ours.as_ref().zip(ceiling).map(|(ours, ceiling)| {
                let multiplied = row.flops / ceiling / 1e6;
                let read = read.as_ref().map_or(0.0, |read| read.median);
                multiplied.max(read) / ours.median
            });
            println!(
                "| {} | {} | {} | {} | {} | {} | {} | {} |",
                row.case,
                row.pass,
                times.iter().map(cell).collect::<Vec<_>>().join(" | "),
                cell(&read),
                ratio(looped),
                ratio(candle),
                speed.map_or("-".to_string(), |speed| format!("{speed:.1}")),
                share.map_or("-".to_string(), |share| format!("{:.0} %", 100.0 * share)),
            );
        }
        println!("\nPeak memory of a training step of ours:");
        for line in &self.memory {
            println!("{line}");
        }
    }
}
