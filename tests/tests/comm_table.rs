//! The program that fills the README's table of communication runs, over whatever engines are built.

use std::process::{Command, Output};

fn table(args: &[&str]) -> Output {
    let small = [
        "--steps", "2", "--warm", "1", "--layers", "1", "--width", "16",
    ];
    let mut command = Command::new(env!("CARGO_BIN_EXE_comm_table"));
    command
        .args(small)
        .args(["--hidden", "16", "--tokens", "64"]);
    command.args(args).output().unwrap()
}

#[test]
fn every_engine_has_a_row() {
    let output = table(&["--ranks", "2"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
    let engines = 2 + usize::from(cfg!(feature = "mpi"));
    assert_eq!(rows.len(), 2 + engines, "{text}");
    // A Markdown table: all rows have as many cells as the heading.
    let cells = |row: &&str| row.matches('|').count();
    assert!(
        rows.iter().all(|row| cells(row) == cells(&rows[0])),
        "{text}"
    );
    for row in &rows[2..] {
        let dispatched: f64 = row
            .split(['|', ','])
            .nth(2)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert!(dispatched > 0.0, "{row}");
        assert!(row.ends_with(") |") && row.contains(" % ("), "{row}");
    }
}

#[test]
fn ranks_that_do_not_divide_the_experts_are_refused() {
    let output = table(&["--ranks", "3"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        text.contains("--ranks is 3, allowed: divisors of the 32 experts"),
        "{text}"
    );
}
