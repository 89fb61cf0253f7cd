//! Checks every kernel of `cubecl-kernels` on one device, then measures them beside what else could do
//! their work. `benches/gpu.sh` runs it on a machine with a GPU; on any other it shows that it works.

mod checks;
// What the kernels' own tests compare with.
#[path = "../../../../cubecl-kernels/tests/common/mod.rs"]
mod common;
mod dense;
mod device;
mod measure;
mod movement;
mod products;
mod report;
mod shapes;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use cubecl::{client::Client, ir::FloatKind};

use device::Runtime;
use measure::Timing;
use movement::Sizes;
use products::{Product, Tensors};
use report::{PeerFile, Report};
use shapes::Case;

/// Checks the kernels of burn-moe on one device, and measures them.
///
/// Ends with 0 when everything is right, with 1 when a kernel is wrong or fails, and with 2 when
/// there is no device to run on.
#[derive(Parser)]
struct Cli {
    /// The runtime; by default the most capable one of this binary.
    #[arg(long)]
    runtime: Option<Runtime>,
    /// Which of several GPUs.
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Small shapes and few repetitions: to see that everything works, not for figures.
    #[arg(long)]
    quick: bool,
    /// Only the checks.
    #[arg(long)]
    checks: bool,
    /// Seconds after which no further kernel is measured.
    #[arg(long, default_value_t = 180)]
    seconds: u64,
    /// Writes what was found to this file too, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Times that another program took for the same cases, as benches/grouped_mm.py writes them.
    #[arg(long)]
    peers: Option<PathBuf>,
    /// What the report should say besides, such as `driver=570.1`.
    #[arg(long, value_name = "NAME=VALUE", value_parser = note)]
    note: Vec<(String, String)>,
    /// Prints the cases as JSON, for other programs to measure, and ends.
    #[arg(long)]
    cases: bool,
}

fn note(argument: &str) -> Result<(String, String), String> {
    let (name, value) = argument.split_once('=').ok_or("NAME=VALUE is allowed")?;
    Ok((name.into(), value.into()))
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(code) => code,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode, String> {
    let start = Instant::now();
    let cases = if cli.quick {
        Case::quick()
    } else {
        Case::all()
    };
    if cli.cases {
        println!(
            "{}",
            serde_json::to_string(&cases).map_err(|e| e.to_string())?
        );
        return Ok(ExitCode::SUCCESS);
    }
    let peers = cli.peers.as_deref().map(read_peers).transpose()?;
    let runtime = cli.runtime.unwrap_or_else(Runtime::of_build);
    let client = runtime.client(cli.device).map_err(|e| e.to_string())?;
    let mut report = Report {
        date: report::today(),
        device: device::describe(&client),
        versions: report::versions(),
        notes: cli.note.clone(),
        checks: checks::run(&client),
        rows: Vec::new(),
        left_out: Vec::new(),
    };
    for case in &cases {
        let (rows, imbalance) = (case.rows(), case.imbalance());
        let load = format!("{rows} rows, the busiest expert has {imbalance:.1} times the mean");
        report.notes.push((case.name.into(), load));
    }
    for check in report.checks.iter().filter(|check| !check.passed()) {
        let problem = check.problem.as_deref().unwrap_or_default();
        eprintln!("wrong: {}, {}: {problem}", check.kernel, check.dtype);
    }
    eprintln!("checked in {:.0} s", start.elapsed().as_secs_f64());
    let mut right = report.checks.iter().all(report::Check::passed);
    if !cli.checks {
        let deadline = start + Duration::from_secs(cli.seconds);
        right &= measure(cli, &client, &cases, deadline, &mut report);
    }
    if let Some(peers) = peers {
        report.add_peers(peers);
    }
    report.print();
    if let Some(path) = &cli.json {
        let json = serde_json::to_string_pretty(&report).map_err(|e| e.to_string())?;
        std::fs::write(path, json).map_err(|e| format!("writing {}: {e}", path.display()))?;
    }
    Ok(if right {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Whether everything that was begun worked.
fn measure(
    cli: &Cli,
    client: &Client,
    cases: &[Case],
    deadline: Instant,
    report: &mut Report,
) -> bool {
    let timing = match cli.quick {
        true => Timing {
            sample: Duration::ZERO,
            samples: 1,
        },
        false => Timing {
            sample: Duration::from_millis(40),
            samples: 5,
        },
    };
    let sizes = if cli.quick { Sizes::QUICK } else { Sizes::FULL };
    let more_time = || Instant::now() < deadline;
    let mut failed = false;
    let mut note = |report: &mut Report, what: String, row: Result<report::Row, String>| match row {
        Ok(row) => {
            eprintln!("{what}: {:.1} us", row.seconds * 1e6);
            report.rows.push(row);
        }
        Err(message) => {
            eprintln!("{what}: {message}");
            failed |= !message.ends_with("no time left");
            report.left_out.push(format!("{what}: {message}"));
        }
    };
    let kinds = [FloatKind::BF16, FloatKind::F32];
    // The most telling figures first.
    for (number, kind) in kinds.into_iter().enumerate() {
        if !supported(client, kind) {
            report
                .left_out
                .push(format!("{kind:?}: this device does not have it"));
            continue;
        }
        for case in cases {
            for product in Product::ALL {
                let what = format!("{}, {kind:?}, {}", case.name, product.name());
                let row = match more_time() {
                    true => Tensors::new(client, case, kind)
                        .and_then(|tensors| tensors.measure(timing, product, true)),
                    false => Err("no time left".into()),
                };
                note(report, what, row);
            }
        }
        if number == 0
            || report
                .rows
                .iter()
                .all(|row| row.kind == report::Kind::Product)
        {
            for row in movement::measure(client, timing, sizes, kind, &more_time) {
                let what = row
                    .as_ref()
                    .map_or("movement", |row| &row.kernel)
                    .to_string();
                note(report, what, row);
            }
        }
    }
    !failed
}

fn supported(client: &Client, kind: FloatKind) -> bool {
    match kind {
        FloatKind::BF16 => common::supports::<half::bf16>(client),
        _ => common::supports::<f32>(client),
    }
}

fn read_peers(path: &Path) -> Result<PeerFile, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}
