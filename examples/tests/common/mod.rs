//! What the tests of the binaries have in common.

// Every test is a crate of its own and uses some of it.
#![allow(dead_code)]

pub mod world;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// What a run that succeeded has printed.
#[track_caller]
pub fn succeeded(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What a refusal says, which has exit code 2.
#[track_caller]
pub fn refusal(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    text
}

/// The one line of a refusal that is not one of the parser's.
#[track_caller]
pub fn refusal_in_one_line(output: &Output) -> String {
    let text = refusal(output);
    assert_eq!(text.lines().count(), 1, "more than one line: {text}");
    text
}

/// What a run has written to its folder.
#[track_caller]
pub fn report(folder: &Path) -> Value {
    let page = std::fs::read_to_string(folder.join("report.html")).unwrap();
    assert!(page.contains("<html") && page.contains("</html>"));
    let text = std::fs::read_to_string(folder.join("report.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

pub fn numbers(value: &Value) -> Vec<f64> {
    let values = value.as_array().unwrap();
    values.iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Losses and norms of the first run as texts: numbers are equal to the bit when their shortest texts
/// are.
pub fn course(report: &Value) -> [String; 2] {
    let run = &report["runs"][0];
    ["loss", "grad_norm"].map(|name| run[name].to_string())
}

/// Words of a small vocabulary, so that a few steps learn something.
pub fn text_file(folder: &Path) -> String {
    let path = folder.join("text.txt");
    let text: String = (0..600)
        .map(|i| format!("w{} w{} w{}\n", i % 7, i * 3 % 11, (i * i) % 5))
        .collect();
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// `args` of `train`, with those of `usual` that are not among them.
pub fn with_usual(args: &[&str], usual: &[(&str, &str)]) -> Vec<String> {
    let missing = usual.iter().filter(|(option, _)| !args.contains(option));
    let missing = missing.flat_map(|(option, value)| [*option, *value]);
    missing
        .chain(args.iter().copied())
        .map(String::from)
        .collect()
}

/// Runs `train` with these options.
pub fn train<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_train"));
    command.args(args).output().unwrap()
}

pub fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../models/tests/fixtures")
        .join(family)
}

/// A copy of a fixture, to add files to.
pub fn copy_fixture(family: &str, folder: &Path) -> PathBuf {
    let copy = folder.join(family);
    std::fs::create_dir_all(&copy).unwrap();
    for entry in std::fs::read_dir(fixture(family)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name == "config.json" || name.starts_with("model") {
            std::fs::copy(&path, copy.join(name)).unwrap();
        }
    }
    copy
}
