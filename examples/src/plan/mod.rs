//! The rooms of the `plan` binary: where loads come from, what is measured, and how it is shown; and
//! the sizes of models.

pub mod gpu;
pub mod measure;
pub mod model;
pub mod output;
pub mod report;
pub mod routing;
pub mod sizes;
pub mod synthetic;
