//! Sums over ranks that stay on the devices: a reduce-scatter and an all-gather, both by sending rows.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::tensor::{DType, Tensor};

use crate::comm::{CommError, Communicator, Key};
use crate::ops::{RowExchange, all_to_all_rows, reshape};

/// Most elements that travel at once, unless a single tensor has more: large enough to fill any wire, small against
/// the memory of a device, where they take three times as much. Small in tests, where there should be several.
const BUCKET: usize = if cfg!(test) { 50 } else { 1 << 26 };

/// Each of `values`, f32 with one dimension and not empty, summed over the ranks of `comm`, in rank order:
/// `((x0 + x1) + x2) + ...`, the bits of [`all_reduce_sum_f32`](Communicator::all_reduce_sum_f32). Each rank adds its
/// share of the elements. Lengths must be the same on all ranks.
///
/// # Errors
///
/// When a rank is lost or too late.
pub(super) fn sum_over_ranks(
    values: Vec<Tensor<1>>,
    comm: &Arc<dyn Communicator>,
    key: Key,
) -> Result<Vec<Tensor<1>>, CommError> {
    let lens: Vec<usize> = values.iter().map(|values| values.dims()[0]).collect();
    let mut values = values.into_iter();
    let mut sums = Vec::with_capacity(lens.len());
    for (part, bucket) in buckets(&lens).into_iter().enumerate() {
        // What was there is given up before there is more.
        let of_bucket = values.by_ref().take(bucket.len()).collect();
        let sum = sum_bucket(of_bucket, comm, key.with_part(part as u32))?;
        let mut from = 0;
        for len in &lens[bucket] {
            sums.push(sum.clone().narrow(0, from, *len));
            from += len;
        }
    }
    Ok(sums)
}

/// Neighbours that travel together.
fn buckets(lens: &[usize]) -> Vec<Range<usize>> {
    let mut buckets: Vec<Range<usize>> = Vec::new();
    let mut free = 0;
    for (i, len) in lens.iter().enumerate() {
        match buckets.last_mut().filter(|_| *len <= free) {
            Some(bucket) => {
                bucket.end += 1;
                free -= len;
            }
            None => {
                buckets.push(i..i + 1);
                free = BUCKET.saturating_sub(*len);
            }
        }
    }
    buckets
}

/// The sum of all of these one after the other, with some zeros behind them.
fn sum_bucket(
    mut values: Vec<Tensor<1>>,
    comm: &Arc<dyn Communicator>,
    key: Key,
) -> Result<Tensor<1>, CommError> {
    let ranks = comm.size();
    let device = values[0].device();
    let len: usize = values.iter().map(|values| values.dims()[0]).sum();
    let share = len.div_ceil(ranks);
    let padding = share * ranks - len;
    if padding > 0 {
        values.push(Tensor::zeros([padding], (&device, DType::F32)));
    }
    // A row for each rank.
    let own: Tensor<2> = reshape(Tensor::cat(values, 0), [ranks, share]);
    let exchange = RowExchange {
        comm: comm.clone(),
        key,
        backward_key: key,
        send: vec![1; ranks].into(),
        receive: vec![1; ranks].into(),
        before_backward: None,
    };
    // Operations on tensors cannot return errors: they unwind with them.
    catch_unwind(AssertUnwindSafe(|| {
        let rows = all_to_all_rows(own, exchange.clone());
        let row = |rank| rows.clone().slice([rank..rank + 1, 0..share]);
        let sum = (1..ranks).fold(row(0), |sum, rank| sum + row(rank));
        let sums = all_to_all_rows(sum.repeat_dim(0, ranks), exchange);
        reshape(sums, [ranks * share])
    }))
    .map_err(|payload| match payload.downcast::<CommError>() {
        Ok(error) => *error,
        Err(payload) => resume_unwind(payload),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::comm::nccl::tests::memory::run_linked;
    use crate::comm::{Op, RankOptions, run_ranks};

    const KEY: Key = Key::new(Op::GradReduce, 3, 1);

    /// Of sizes beside each other that meet the end of a bucket, and go beyond it alone.
    const LENS: [usize; 9] = [20, 29, 1, 50, 51, 7, 130, 1, 3];

    fn values(rank: usize, len: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 7919 + rank * 104_729 + len) % 1009) as f32 / 1009.0 - 0.5;
        (0..len).map(value).collect()
    }

    #[test]
    fn buckets_hold_all_and_not_too_much() {
        let all = buckets(&LENS);
        assert_eq!(all, [0..3, 3..4, 4..5, 5..6, 6..7, 7..9]);
        assert!(buckets(&[]).is_empty());
    }

    #[test]
    fn sums_have_the_bits_of_those_on_the_host() {
        for ranks in [1, 2, 3, 4] {
            let sums = run_ranks(ranks, RankOptions::default(), |comm| {
                let own = LENS.map(|len| values(comm.rank(), len));
                let device = Device::flex();
                let tensors = own.clone().map(|own| {
                    let len = own.len();
                    Tensor::from_data(TensorData::new(own, [len]), &device)
                });
                let sums = sum_over_ranks(tensors.into(), &comm, KEY).unwrap();
                let mut expected = own.concat();
                comm.all_reduce_sum_f32(KEY, &mut expected).unwrap();
                let sums = sums.iter().flat_map(|sum| {
                    let data = sum.to_data();
                    data.iter::<f32>().collect::<Vec<_>>()
                });
                assert!(
                    sums.map(f32::to_bits)
                        .eq(expected.iter().map(|x| x.to_bits()))
                );
            });
            sums.unwrap();
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_an_error_and_no_panic() {
        let options = RankOptions {
            timeout: Duration::from_secs(1),
            ..Default::default()
        };
        let run = run_linked(
            2,
            options,
            1,
            |_| None,
            |comm| {
                if comm.rank() == 1 {
                    // Alive for longer than the other one waits.
                    let _ = comm.recv(0, KEY.with_part(1));
                    let _ = comm.recv(0, KEY.with_part(1));
                    return None;
                }
                let value = Tensor::ones([3], &Device::flex());
                sum_over_ranks(vec![value], &comm, KEY).err()
            },
        );
        let error = run.unwrap().swap_remove(0);
        let error = error.expect("an error").to_string();
        assert!(
            error.contains("waited 1s for rank 1 in gradient reduce"),
            "{error}"
        );
    }
}
