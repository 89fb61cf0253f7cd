//! Self-contained report pages: one HTML file with style, script and data in it, that opens offline.

use std::borrow::Cow;

use serde::Serialize;

use crate::report::{LayerSummary, Loads, PrefillReport, TrainReport};

/// What every page has: style, charts, and where the rest goes.
const SHELL: &str = include_str!("page/shell.html");
const STYLE: &str = include_str!("page/common.css");
const CHARTS: &str = include_str!("page/charts.js");

/// A page stays small enough to open on a phone: of runs whose loads hold more numbers than this
/// together, it has the loads of some steps only.
const LOAD_NUMBERS: usize = 600_000;

/// The page of `train`.
pub fn train(report: &TrainReport) -> String {
    let every = every(report.runs.iter().map(|run| &run.layers), LOAD_NUMBERS);
    let mut report = Cow::Borrowed(report);
    if every > 1 {
        for run in &mut report.to_mut().runs {
            thin(&mut run.layers, every);
        }
    }
    assemble(
        "Training report",
        include_str!("page/train.html"),
        include_str!("page/train.js"),
        &*report,
    )
}

/// The page of `prefill`.
pub fn prefill(report: &PrefillReport) -> String {
    let every = every(report.runs.iter().map(|run| &run.layers), LOAD_NUMBERS);
    let mut report = Cow::Borrowed(report);
    if every > 1 {
        for run in &mut report.to_mut().runs {
            thin(&mut run.layers, every);
        }
    }
    assemble(
        "Prefill report",
        include_str!("page/prefill.html"),
        include_str!("page/prefill.js"),
        &*report,
    )
}

/// A page of `body` and `script`, which finds `data` as the constant of that name and may call what
/// `charts.js` has.
pub fn assemble(title: &str, body: &str, script: &str, data: &impl Serialize) -> String {
    // Text may hold `</script>`; as JSON `<` can always be written as an escape.
    let data = serde_json::to_string(data)
        .unwrap_or_else(|_| "null".into())
        .replace('<', "\\u003c");
    // The data comes last: it may hold anything, the name of a placeholder too.
    [
        ("__TITLE__", title),
        ("__CSS__", STYLE),
        ("__BODY__", body),
        ("__CHARTS__", CHARTS),
        ("__SCRIPT__", script),
        ("__DATA__", &data),
    ]
    .iter()
    .fold(SHELL.to_owned(), |page, (place, part)| {
        page.replacen(place, part, 1)
    })
}

/// Of how many steps one keeps its loads, for all to be at most `most` numbers.
fn every<'a>(runs: impl Iterator<Item = &'a LayerSummary>, most: usize) -> usize {
    let size = |loads: &Loads| loads.ranks.len() + loads.experts.len() + 3 * loads.replicas.len();
    runs.flat_map(|layers| layers.loads.iter().flatten())
        .map(size)
        .sum::<usize>()
        .div_ceil(most)
        .max(1)
}

/// Empties the loads of all steps but one of `every`, beginning with the first.
fn thin(layers: &mut LayerSummary, every: usize) {
    for (step, loads) in layers.loads.iter_mut().enumerate() {
        if step % every != 0 {
            *loads = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Continuation, DecodeRun, PrefillRun, RunReport, Summary};
    use burn_moe_models::ModelConfig;
    use serde_json::Value;

    const NASTY: &str = "</script><script>alert(1)</script> __SCRIPT__ __DATA__ \u{2028} \"'&";

    fn layers(steps: usize) -> LayerSummary {
        let loads = Loads {
            ranks: vec![3, 3],
            experts: vec![6, 0],
            replicas: vec![[0, 1, 3]],
        };
        LayerSummary {
            imbalance_before: Summary::of([2.0]),
            imbalance_after: Summary::of([1.0]),
            copies_per_plan: Summary::of([1.0]),
            planning_us: Summary::of([2.5]),
            bytes_dispatched_per_step: 1e6,
            bytes_replicated_per_step: 2e6,
            layers: vec![1],
            imbalance: vec![vec![[2.0, 1.0]]; steps],
            loads: vec![vec![loads]; steps],
        }
    }

    fn train_report(steps: usize) -> TrainReport {
        TrainReport {
            config: ModelConfig::named("tiny").unwrap(),
            config_name: NASTY.into(),
            parameters: 1000,
            ranks: 2,
            dp: 1,
            nodes: None,
            hierarchical: false,
            slots: 1,
            planner: "quota".into(),
            seed: 0,
            steps,
            first_step: 0,
            batch: 2,
            sequence_length: 8,
            accumulate: 1,
            checkpointing: false,
            dtype: "f32",
            lr: 1e-3,
            schedule: "cosine",
            warmup: 0,
            weight_decay: 1e-4,
            clip: None,
            unit: "byte",
            timing: "wall",
            data: NASTY.into(),
            runs: vec![RunReport {
                balance: "exact",
                loss: vec![8.0; steps],
                grad_norm: Vec::new(),
                step_seconds: vec![0.5; steps],
                tokens_per_second: 32.0,
                ratio_to_ideal: Some(f64::NAN),
                replica_buffer_bytes: vec![1024, 1024],
                layers: layers(steps),
            }],
        }
    }

    fn prefill_report() -> PrefillReport {
        PrefillReport {
            config: ModelConfig::named("tiny").unwrap(),
            checkpoint: NASTY.into(),
            ranks: 2,
            slots: 1,
            planner: "quota".into(),
            timing: "critical-path",
            tokens: "bytes",
            prompt_tokens: 5,
            chunk: Some(2),
            max_new_tokens: 4,
            runs: vec![PrefillRun {
                balance: "exact",
                time_to_first_token: 0.25,
                tokens_per_second: 20.0,
                replica_buffer_bytes: vec![1024, 1024],
                kv_cache_bytes: vec![2048, 4096],
                layers: layers(1),
                decode: DecodeRun::default(),
                continuations: vec![Continuation {
                    prompt: NASTY.into(),
                    continuation: NASTY.into(),
                }],
            }],
        }
    }

    /// What the page's script reads.
    fn embedded(page: &str) -> Value {
        let (_, rest) = page
            .split_once("<script type=\"application/json\" id=\"data\">")
            .unwrap();
        serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
    }

    fn through_text(report: &impl Serialize) -> Value {
        serde_json::from_str(&serde_json::to_string(report).unwrap()).unwrap()
    }

    #[test]
    fn the_data_comes_back_equal_whatever_the_text() {
        let (train_report, prefill_report) = (train_report(3), prefill_report());
        assert_eq!(embedded(&train(&train_report)), through_text(&train_report));
        assert_eq!(
            embedded(&prefill(&prefill_report)),
            through_text(&prefill_report)
        );
    }

    #[test]
    fn pages_need_nothing_else() {
        for page in [train(&train_report(3)), prefill(&prefill_report())] {
            // The SVG namespace is a name, not a request.
            let page = page.replace("http://www.w3.org/2000/svg", "");
            for request in ["http:", "https:", "src=", "@import", "fetch(", "\"//"] {
                assert!(!page.contains(request), "{request}");
            }
            // The shell's three scripts, and none from the text.
            assert_eq!(page.matches("<script").count(), 3);
            assert_eq!(page.matches("</script>").count(), 3);
            let links = page.matches("href=").count();
            assert_eq!(links, page.matches("href=\"data:,\"").count());
        }
    }

    #[test]
    fn large_runs_keep_the_loads_of_some_steps() {
        // Seven numbers a step.
        let mut report = train_report(10);
        let every = every(report.runs.iter().map(|run| &run.layers), 20);
        assert_eq!(every, 4);
        thin(&mut report.runs[0].layers, every);
        let kept: Vec<usize> = report.runs[0].layers.loads.iter().map(Vec::len).collect();
        assert_eq!(kept, [1, 0, 0, 0, 1, 0, 0, 0, 1, 0]);
    }
}
