//! Every kernel of `cubecl-kernels` against loops in f64, at sizes around the edges of tiles. The
//! loops of grouped products are those of the kernels' own tests.

mod moving;
mod multiplying;
mod routing;

use cubecl::{CubeElement, client::Client};
use cubecl_kernels::{DeviceTensor, KernelError};
use half::{bf16, f16};

use crate::{
    common::{self, Value},
    device::{quietly, sync},
    report::Check,
};

/// All checks, in every element type that the device has.
pub fn run(client: &Client) -> Vec<Check> {
    let mut checks = Checks {
        client: client.clone(),
        done: Vec::new(),
    };
    routing::run(&mut checks);
    moving::run_for_any_type(&mut checks);
    run_for::<f32>(&mut checks);
    run_for::<f16>(&mut checks);
    run_for::<bf16>(&mut checks);
    checks.done
}

fn run_for<T: Value>(checks: &mut Checks) {
    if common::supports::<T>(&checks.client) {
        moving::run::<T>(checks);
        multiplying::run::<T>(checks);
    }
}

/// What has been checked.
struct Checks {
    client: Client,
    done: Vec<Check>,
}

type Outcome = Result<Option<f64>, String>;

impl Checks {
    /// Notes the largest relative error that `check` finds, or what went wrong.
    fn close<T: Value>(&mut self, kernel: &str, check: impl FnOnce(&Client) -> Outcome) {
        self.note(kernel, T::cube_type().to_string(), T::TOLERANCE, check);
    }

    /// For results that must be equal.
    fn equal(&mut self, kernel: &str, dtype: &str, check: impl FnOnce(&Client) -> Outcome) {
        self.note(kernel, dtype.into(), 0.0, check);
    }

    fn note(
        &mut self,
        kernel: &str,
        dtype: String,
        allowed: f64,
        check: impl FnOnce(&Client) -> Outcome,
    ) {
        let outcome = quietly(|| check(&self.client)).and_then(|outcome| outcome);
        let (error, problem) = match outcome {
            // A NaN among values has been made an infinite error.
            Ok(Some(error)) if error > allowed => (
                Some(error),
                Some(format!("off by {error:e}, {allowed:e} allowed")),
            ),
            Ok(error) => (error, None),
            Err(problem) => {
                // The next check must not be told of this one.
                let _ = sync(&self.client);
                (None, Some(problem))
            }
        };
        self.done.push(Check {
            kernel: kernel.into(),
            dtype,
            error,
            allowed,
            problem,
        });
    }
}

fn text(error: KernelError) -> String {
    error.to_string()
}

fn tensor<T: CubeElement>(
    client: &Client,
    values: &[T],
    shape: &[usize],
) -> Result<DeviceTensor, String> {
    DeviceTensor::from_data(client, values, shape).map_err(text)
}

/// Largest difference of a tensor from `expected`, relative to the largest value.
fn error_of<T: Value>(client: &Client, actual: &DeviceTensor, expected: &[f64]) -> Outcome {
    let values = actual.read::<T>(client).map_err(text)?;
    if values.len() != expected.len() {
        return Err(format!(
            "{} values, {} expected",
            values.len(),
            expected.len()
        ));
    }
    let values = values.iter().map(|value| value.f64());
    Ok(Some(common::relative_error(values, expected)))
}

/// That a tensor holds exactly `expected`.
fn same<T: CubeElement + PartialEq>(
    client: &Client,
    actual: &DeviceTensor,
    expected: &[T],
) -> Outcome {
    let values = actual.read::<T>(client).map_err(text)?;
    if values.len() != expected.len() {
        return Err(format!(
            "{} values, {} expected",
            values.len(),
            expected.len()
        ));
    }
    match values.iter().zip(expected).position(|(a, b)| a != b) {
        None => Ok(None),
        Some(i) => Err(format!("another value at {i} of {}", values.len())),
    }
}

/// The largest of some errors.
fn largest(outcomes: impl IntoIterator<Item = Outcome>) -> Outcome {
    outcomes
        .into_iter()
        .try_fold(None, |most: Option<f64>, outcome| {
            Ok(outcome?
                .map(|error| most.map_or(error, |most| most.max(error)))
                .or(most))
        })
}
