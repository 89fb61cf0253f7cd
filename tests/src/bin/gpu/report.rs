//! What was found, as tables and as JSON.

use std::time::{SystemTime, UNIX_EPOCH};

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use serde::{Deserialize, Serialize};

use crate::device::Description;

/// Everything a run found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Day of the run, UTC.
    pub date: String,
    pub device: Description,
    /// Crates and their versions.
    pub versions: Vec<(&'static str, String)>,
    /// What the caller knows: driver, revision of the sources.
    pub notes: Vec<(String, String)>,
    pub checks: Vec<Check>,
    pub rows: Vec<Row>,
    /// What was not done, and why.
    pub left_out: Vec<String>,
}

/// A kernel against loops in f64.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    pub kernel: String,
    pub dtype: String,
    /// Largest difference relative to the largest value; none where results must be equal.
    pub error: Option<f64>,
    /// What the error may be at most.
    pub allowed: f64,
    /// What went wrong.
    pub problem: Option<String>,
}

/// A kernel's time.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub case: String,
    pub dtype: String,
    pub kernel: String,
    pub kind: Kind,
    /// Of one run.
    pub seconds: f64,
    /// Floating-point operations of one run, where they are what counts.
    pub flops: Option<f64>,
    /// Bytes that one run must read or write at least.
    pub bytes: f64,
    pub peers: Vec<Peer>,
}

/// Which table a row belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Grouped products.
    Product,
    /// Everything else.
    Movement,
}

/// Something else that does a row's work.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Peer {
    pub name: String,
    /// None if it could not do it.
    pub seconds: Option<f64>,
    /// Its variant, or why it could not.
    pub detail: String,
}

impl Peer {
    pub fn new(name: &str, seconds: f64) -> Self {
        Self {
            name: name.into(),
            seconds: Some(seconds),
            detail: String::new(),
        }
    }

    pub fn refused(name: &str, detail: String) -> Self {
        Self {
            name: name.into(),
            seconds: None,
            detail,
        }
    }

    pub fn with(self, detail: String) -> Self {
        Self { detail, ..self }
    }
}

impl Check {
    pub fn passed(&self) -> bool {
        self.problem.is_none()
    }
}

/// A peer's file: what `benches/grouped_mm.py` writes.
#[derive(Debug, Deserialize)]
pub struct PeerFile {
    /// Such as `torch 2.10.0`.
    pub version: String,
    pub rows: Vec<PeerRow>,
}

#[derive(Debug, Deserialize)]
pub struct PeerRow {
    pub case: String,
    pub dtype: String,
    pub kernel: String,
    #[serde(flatten)]
    pub peer: Peer,
}

impl Report {
    /// Adds the times of a peer's file to the rows they belong to.
    pub fn add_peers(&mut self, file: PeerFile) {
        self.notes.push(("peer".into(), file.version));
        for found in file.rows {
            let belongs = |row: &&mut Row| {
                (&row.case, &row.dtype, &row.kernel) == (&found.case, &found.dtype, &found.kernel)
            };
            if let Some(row) = self.rows.iter_mut().find(belongs) {
                row.peers.push(found.peer);
            }
        }
    }

    pub fn print(&self) {
        let device = &self.device;
        println!("\n{} ({}), {}", device.name, device.runtime, self.date);
        for (name, value) in &self.notes {
            println!("{name}: {value}");
        }
        let failed = self.checks.iter().filter(|check| !check.passed()).count();
        println!("{} checks, {failed} failed", self.checks.len());
        for kind in [Kind::Product, Kind::Movement] {
            let rows: Vec<&Row> = self.rows.iter().filter(|row| row.kind == kind).collect();
            if !rows.is_empty() {
                println!("\n{}", table(&rows));
            }
        }
        println!("A peer's column is its time over ours: above 1 ours is faster.");
        for row in &self.rows {
            for peer in row.peers.iter().filter(|peer| !peer.detail.is_empty()) {
                let Row {
                    case,
                    kernel,
                    dtype,
                    ..
                } = row;
                println!(
                    "  {case}, {dtype} {kernel}: {} is {}",
                    peer.name, peer.detail
                );
            }
        }
        for line in &self.left_out {
            println!("left out: {line}");
        }
    }
}

fn table(rows: &[&Row]) -> Table {
    let mut peers: Vec<&str> = Vec::new();
    for peer in rows.iter().flat_map(|row| &row.peers) {
        if !peers.contains(&peer.name.as_str()) {
            peers.push(&peer.name);
        }
    }
    let with_flops = rows.iter().any(|row| row.flops.is_some());
    let mut table = Table::new();
    table.load_preset(NOTHING);
    let mut header = vec!["case", "type", "kernel", "us"];
    header.extend(with_flops.then_some("TFLOP/s"));
    header.push("GB/s");
    header.extend(&peers);
    let columns = header.len();
    table.set_header(header);
    for row in rows {
        let mut cells = vec![
            row.case.clone(),
            row.dtype.clone(),
            row.kernel.clone(),
            format!("{:.1}", row.seconds * 1e6),
        ];
        if with_flops {
            let rate = row.flops.map(|flops| flops / row.seconds / 1e12);
            cells.push(rate.map_or(String::new(), |rate| format!("{rate:.2}")));
        }
        cells.push(format!("{:.1}", row.bytes / row.seconds / 1e9));
        for name in &peers {
            let peer = row.peers.iter().find(|peer| peer.name == *name);
            cells.push(match peer.map(|peer| peer.seconds) {
                Some(Some(seconds)) => format!("{:.2}", seconds / row.seconds),
                Some(None) => "refused".into(),
                None => String::new(),
            });
        }
        table.add_row(cells);
    }
    for column in 3..columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Versions of the crates that decide about the figures, as this binary was built from them.
pub fn versions() -> Vec<(&'static str, String)> {
    let lock = include_str!("../../../../Cargo.lock");
    ["burn", "cubecl", "cubek-matmul", "cubecl-kernels"]
        .into_iter()
        .filter_map(|name| {
            let after = lock
                .split_once(&format!("name = \"{name}\"\nversion = \""))?
                .1;
            Some((name, after.split('"').next()?.to_string()))
        })
        .collect()
}

/// Today, as `YYYY-MM-DD`, UTC.
pub fn today() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let days = since.map_or(0, |since| since.as_secs() / 86_400);
    let [year, month, day] = civil(days);
    format!("{year:04}-{month:02}-{day:02}")
}

/// Year, month and day of so many days after 1970-01-01, in the Gregorian calendar.
fn civil(days: u64) -> [u64; 3] {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let (mut year, mut left) = (1970, days);
    loop {
        let length = if leap(year) { 366 } else { 365 };
        if left < length {
            break;
        }
        left -= length;
        year += 1;
    }
    let february = if leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    [year, month, left + 1]
}
