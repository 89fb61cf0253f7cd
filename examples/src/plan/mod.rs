//! The rooms of the `plan` binary: where loads come from, what is measured, and how it is shown.

pub mod measure;
pub mod output;
pub mod report;
pub mod routing;
pub mod synthetic;
