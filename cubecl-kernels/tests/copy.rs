//! Streaming copies move every byte of the chunks and touch no other, with any number of cubes.

mod common;

use cubecl::CubeElement;
use cubecl_kernels::copy::{Chunk, copy_chunks, gather_experts, scatter_experts};
use cubecl_kernels::{DeviceTensor, KernelError};
use proptest::prelude::*;

fn numbers(len: usize, first: u32) -> Vec<u32> {
    (first..first + len as u32).collect()
}

#[test]
fn experts_there_and_back() {
    let client = common::client();
    for (shape, size) in [
        (vec![6, 1], 1),
        (vec![6, 3, 5], 15),
        (vec![6, 64, 64], 4096),
        (vec![6, 200, 400], 80_000),
    ] {
        let values = numbers(6 * size, 0);
        let weights = DeviceTensor::from_data(&client, &values, shape.clone()).unwrap();
        for cubes in [1, 2, 7] {
            let chosen = [4, 0, 4, 5];
            let sent = gather_experts(&client, &weights, &chosen, cubes).unwrap();
            assert_eq!(sent.shape()[0], 4);
            let expected: Vec<u32> = chosen
                .iter()
                .flat_map(|e| values[e * size..(e + 1) * size].to_vec())
                .collect();
            assert_eq!(sent.read::<u32>(&client).unwrap(), expected);

            let mut slots = numbers(6 * size, 1_000_000);
            let tensor = DeviceTensor::from_data(&client, &slots, shape.clone()).unwrap();
            scatter_experts(&client, &sent, &tensor, &[3, 1, 0, 5], cubes).unwrap();
            for (i, slot) in [3, 1, 0, 5].into_iter().enumerate() {
                slots[slot * size..(slot + 1) * size]
                    .copy_from_slice(&expected[i * size..(i + 1) * size]);
            }
            assert_eq!(tensor.read::<u32>(&client).unwrap(), slots);
        }
        let none = gather_experts(&client, &weights, &[], 3).unwrap();
        assert!(none.is_empty());
        scatter_experts(&client, &none, &weights, &[], 3).unwrap();
        assert_eq!(weights.read::<u32>(&client).unwrap(), values);
    }
}

fn check_chunks<T: CubeElement + PartialEq + std::fmt::Debug>(
    values: &[T],
    before: &[T],
    chunks: &[Chunk],
    cubes: u32,
) {
    let client = common::client();
    let source = DeviceTensor::from_data(&client, values, [values.len()]).unwrap();
    let destination = DeviceTensor::from_data(&client, before, [before.len()]).unwrap();
    copy_chunks(&client, &source, &destination, chunks, cubes).unwrap();
    let mut expected = before.to_vec();
    for chunk in chunks {
        expected[chunk.destination..chunk.destination + chunk.len]
            .clone_from_slice(&values[chunk.source..chunk.source + chunk.len]);
    }
    assert_eq!(
        destination.read::<T>(&client).unwrap(),
        expected,
        "{chunks:?}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Pieces at any distance from each other, so that words of every size occur.
    #[test]
    fn any_chunks(
        pieces in prop::collection::vec((0usize..3000, 0usize..30, 0usize..900), 0..12),
        step in prop::sample::select(vec![1usize, 2, 4]),
        cubes in 1u32..5,
    ) {
        let mut chunks = Vec::new();
        let mut end = 0;
        for (source, gap, len) in pieces {
            let [source, gap, len] = [source, gap, len].map(|v| v / step * step);
            chunks.push(Chunk { source, destination: end + gap, len });
            end += gap + len;
        }
        chunks.reverse();
        check_chunks(&numbers(4096, 0), &numbers(end + 5, 100_000), &chunks, cubes);
    }
}

/// More than one tile of a chunk, and types that do not fill words.
#[test]
fn every_type() {
    let client = common::client();
    let chunk = |source, destination, len| Chunk {
        source,
        destination,
        len,
    };
    for chunks in [
        [chunk(8, 16, 40_000), chunk(0, 0, 8)],
        [chunk(2, 100, 39_999), chunk(50_000, 1, 33)],
    ] {
        let floats = common::random(60_000, 1);
        check_chunks(&floats, &vec![0.5f32; 60_000], &chunks, 3);
        let halves: Vec<half::f16> = floats.iter().map(|v| half::f16::from_f32(*v)).collect();
        let usage = client.features().type_usage(half::f16::cube_type());
        if !usage.is_empty() {
            let before = vec![half::f16::ONE; 60_000];
            check_chunks(&halves, &before, &chunks, 3);
        }
    }
}

#[test]
fn misuse_is_named() {
    let client = common::client();
    let a = DeviceTensor::from_data(&client, &[0u32; 8], [4, 2]).unwrap();
    let b = DeviceTensor::from_data(&client, &[0u32; 8], [4, 2]).unwrap();
    let refused = |result: Result<(), KernelError>, name: &str| match result.unwrap_err() {
        KernelError::Value { argument, .. } => assert_eq!(argument, name),
        error => panic!("{error}"),
    };
    let chunk = |source, destination, len| Chunk {
        source,
        destination,
        len,
    };
    refused(copy_chunks(&client, &a, &b, &[], 0), "cubes");
    refused(
        copy_chunks(&client, &a, &b, &[chunk(7, 0, 2)], 1),
        "chunks.source",
    );
    refused(
        copy_chunks(&client, &a, &b, &[chunk(0, usize::MAX, 2)], 1),
        "chunks.destination",
    );
    refused(
        copy_chunks(&client, &a, &b, &[chunk(0, 3, 2), chunk(0, 2, 2)], 1),
        "chunks.destination",
    );
    refused(gather_experts(&client, &a, &[4], 1).map(|_| ()), "experts");
    refused(
        scatter_experts(&client, &a, &b, &[0, 1, 1, 2], 1),
        "chunks.destination",
    );
}
