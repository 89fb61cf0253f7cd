//! Self-contained report pages.

use crate::report::{PrefillReport, TrainReport};

/// The page of `train`.
pub fn train(report: &TrainReport) -> String {
    serde_json::to_string(report).unwrap_or_default()
}

/// The page of `prefill`.
pub fn prefill(report: &PrefillReport) -> String {
    serde_json::to_string(report).unwrap_or_default()
}
