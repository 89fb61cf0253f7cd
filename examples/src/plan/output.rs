//! The table on the terminal, the JSON rows, and the emitted plans.

use super::measure::{Outcome, Row};
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Prints a table of rows.
pub fn print_table(rows: &[Row]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let mut workload = None;
    for row in rows {
        if workload != Some(&row.workload) {
            workload = Some(&row.workload);
            writeln!(out, "\n{}", row.workload)?;
            writeln!(
                out,
                "{:>5} {:>5}  {:<23} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>6} {:>7} {:>8} {:>8} {:>9}",
                "EP",
                "slots",
                "planner",
                "before",
                "mean",
                "p50",
                "p95",
                "max",
                "copies",
                "most",
                "remote",
                "plan p50",
                "plan p95",
                "step"
            )?;
            writeln!(
                out,
                "{:>5} {:>5}  {:<23} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>6} {:>7} {:>8} {:>8} {:>9}",
                "", "", "", "max/avg", "max/avg", "", "", "", "mean", "", "", "us", "us", "us"
            )?;
        }
        let slots = if row.slots_used > row.slots {
            format!("({})", row.slots_used)
        } else {
            row.slots.to_string()
        };
        writeln!(
            out,
            "{:>5} {:>5}  {:<23} {:>7.3} {:>7.4} {:>7.4} {:>7.4} {:>7.4} {:>7.2} {:>6} {:>7.3} {:>8.1} {:>8.1} {:>9.1}",
            row.ep,
            slots,
            row.planner,
            row.before.mean,
            row.after.mean,
            row.after.p50,
            row.after.p95,
            row.after.max,
            row.copies_mean,
            row.copies_max,
            row.remote_fraction,
            row.plan_us_p50,
            row.plan_us_p95,
            row.step_us
        )?;
    }
    if rows.iter().any(|r| r.slots_used > r.slots) {
        writeln!(
            out,
            "\nslots in brackets: used by a planner that ignores their number"
        )?;
    }
    Ok(())
}

/// Writes `bytes` beside `path` and renames, so that a reader never sees half a file.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> Result<()> {
        let part = part_of(path);
        std::fs::write(&part, bytes)?;
        std::fs::rename(&part, path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

fn part_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// Plans as they are made, one JSON object a line.
pub struct Emitter {
    path: PathBuf,
    file: BufWriter<File>,
}

#[derive(Serialize)]
struct Line<'a> {
    workload: &'a str,
    planner: &'a str,
    ep: usize,
    slots: usize,
    layer: usize,
    micro_batch: usize,
    loads: &'a [u64],
    replicas: Vec<(u32, u32, u64)>,
    rank_load: &'a [u64],
}

impl Emitter {
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(part_of(path));
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self {
            path: path.to_owned(),
            file: BufWriter::new(file),
        })
    }

    pub fn plan(
        &mut self,
        workload: &str,
        planner: &str,
        slots: usize,
        outcome: &Outcome,
    ) -> Result<()> {
        let replicas = outcome.plan.replicas.iter();
        let line = Line {
            workload,
            planner,
            ep: outcome.rank_load.len(),
            slots,
            layer: outcome.layer,
            micro_batch: outcome.micro_batch,
            loads: outcome.expert_load,
            replicas: replicas.map(|r| (r.expert, r.rank, r.quota)).collect(),
            rank_load: outcome.rank_load,
        };
        serde_json::to_writer(&mut self.file, &line)?;
        self.file.write_all(b"\n")?;
        Ok(())
    }

    pub fn finish(mut self) -> Result<()> {
        self.file.flush()?;
        std::fs::rename(part_of(&self.path), &self.path)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}
