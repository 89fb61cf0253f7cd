//! What the processes of an MPI world do in the tests of `tests/mpi.rs`.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device};
use burn_moe::comm::{Communicator, Key, Op};
use burn_moe::layer::{MoeConfig, RouterConfig};
use burn_moe::parallel::{ExpertParallel, ParallelOptions};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use crate::{random, tensor_of};

type Comm = Arc<dyn Communicator>;
type Done = Result<(), Box<dyn Error + Send + Sync>>;

fn key(op: Op, step: u64) -> Key {
    Key::new(op, step, 3)
}

/// What rank `from` sends to rank `to`: any rank can work it out. From nothing to some hundred KB.
fn content(seed: u64, from: usize, to: usize) -> Bytes {
    let mut rng = StdRng::seed_from_u64(seed ^ ((from as u64) << 32) ^ ((to as u64) << 48));
    let len = match rng.random_range(0..8) {
        0 => 0,
        1..5 => rng.random_range(1..3000),
        5 => rng.random_range(3000..3200),
        6 => rng.random_range(4000..20_000),
        _ => rng.random_range(20_000..300_000),
    };
    let first: u8 = rng.random();
    (0..len)
        .map(|i| first.wrapping_add((i % 251) as u8))
        .collect()
}

/// Rounds of every operation with random sizes, each rank with its own order of messages, against what a plain loop gives.
pub fn messages(comm: &Comm) -> Done {
    let (rank, size) = (comm.rank(), comm.size());
    // All ranks draw the same collectives; `own` makes each rank order its messages in its own way.
    let (mut shared, mut own) = (
        StdRng::seed_from_u64(99),
        StdRng::seed_from_u64(rank as u64),
    );
    for round in 0..100 {
        let seed = shared.random();
        let mut messages: Vec<_> = (0..size)
            .flat_map(|peer| (0..3).map(move |part| (peer, part)))
            .collect();
        let at = |part| key(Op::Replicate, round).with_part(part);
        let of = |from, to, n: u32| content(seed ^ u64::from(n), from, to);
        messages.shuffle(&mut own);
        for (to, n) in &messages {
            comm.send(*to, at(*n), of(rank, *to, *n))?;
            // A second one with the same key: they must stay in order whatever their sizes.
            comm.send(*to, at(*n), of(rank, *to, *n + 9))?;
        }
        match shared.random_range(0..5) {
            0 => {
                let parts = (0..size).map(|to| content(seed, rank, to)).collect();
                let got = comm.all_to_all(key(Op::Combine, round), parts)?;
                let expected: Vec<_> = (0..size).map(|it| content(seed, it, rank)).collect();
                assert!(got == expected, "all-to-all of round {round}");
            }
            1 => {
                let root = shared.random_range(0..size);
                let payload = (root == rank).then(|| content(seed, rank, rank));
                let got = comm.broadcast(key(Op::Broadcast, round), root, payload)?;
                assert!(
                    got == content(seed, root, root),
                    "broadcast of round {round}"
                );
            }
            2 => {
                let input = |rank: usize| -> Vec<f32> {
                    random(1000, seed ^ rank as u64)
                        .iter()
                        .map(|x| *x as f32)
                        .collect()
                };
                let mut data = input(rank);
                comm.all_reduce_sum_f32(key(Op::AllReduce, round), &mut data)?;
                let mut sums = input(0);
                for rank in 1..size {
                    sums.iter_mut()
                        .zip(input(rank))
                        .for_each(|(sum, x)| *sum += x);
                }
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&data), bits(&sums), "all-reduce of round {round}");
            }
            3 => {
                let got = comm.all_gather(key(Op::Count, round), content(seed, rank, 0))?;
                let expected: Vec<_> = (0..size).map(|it| content(seed, it, 0)).collect();
                assert!(got == expected, "all-gather of round {round}");
            }
            _ => comm.barrier(key(Op::Barrier, round))?,
        }
        messages.shuffle(&mut own);
        for (from, n) in &messages {
            for n in [*n, *n + 9] {
                let got = comm.recv(*from, at(n % 9))?;
                assert!(
                    got == of(*from, rank, n),
                    "message {n} of {from} in round {round}"
                );
            }
        }
    }
    // Several threads of a process at once, each with its own keys.
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for round in 0..50 {
                    let key = key(Op::Custom(thread), round);
                    let got = comm.all_gather(key, content(round, rank, thread as usize));
                    let got = got.expect("all ranks");
                    for (from, got) in got.iter().enumerate() {
                        assert!(*got == content(round, from, thread as usize));
                    }
                }
            });
        }
    });
    // Left on the way: whoever finishes must see to them, and nobody will ask for them.
    for to in 0..size {
        for n in 0..20 {
            comm.send(to, key(Op::Telemetry, n), content(n, rank, to))?;
        }
        comm.send(to, key(Op::Telemetry, 99), vec![1; 30 << 20].into())?;
    }
    Ok(())
}

/// One payload of more bytes than a 32-bit count holds.
pub fn large(comm: &Comm) -> Done {
    const WORDS: usize = (2 << 30) / 8 + 12_345;
    let key = key(Op::Replicate, 0);
    let word = |i: usize| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    match comm.rank() {
        0 => {
            let mut payload = Vec::with_capacity(8 * WORDS);
            (0..WORDS).for_each(|i| payload.extend_from_slice(&word(i).to_le_bytes()));
            comm.send(1, key, payload.into())?;
        }
        1 => {
            let payload = comm.recv(0, key)?;
            assert_eq!(payload.len(), 8 * WORDS);
            for (i, bytes) in payload.chunks_exact(8).enumerate() {
                assert_eq!(bytes, word(i).to_le_bytes(), "word {i}");
            }
        }
        _ => {}
    }
    Ok(())
}

/// Rank 0 sends as much as takes a while, and returns. It says when it is about to, and when it has.
pub fn send_and_return(comm: &Comm) -> Done {
    const BYTES: usize = 400 << 20;
    let key = key(Op::Replicate, 0);
    match comm.rank() {
        0 => {
            let payload = vec![7; BYTES];
            println!("ready");
            // For the test to find out about the processes.
            std::thread::sleep(Duration::from_millis(500));
            comm.send(1, key, payload.into())?;
            println!("sent");
        }
        1 => {
            let payload = comm.recv(0, key)?;
            assert_eq!(payload.len(), BYTES);
            assert_eq!([payload[0], payload[BYTES / 2], payload[BYTES - 1]], [7; 3]);
        }
        _ => {}
    }
    Ok(())
}

/// Trains a stack of layers for a number of steps; rank 0 prints each. Further arguments make one rank fail:
/// `panic|error|return|busy RANK STEP`.
pub fn train(comm: &Comm, arguments: &[String]) -> Done {
    const WIDTH: usize = 64;
    const TOKENS: usize = 64;
    let steps: usize = arguments.first().ok_or("how many steps?")?.parse()?;
    let fault = match &arguments[1..] {
        [what, rank, step] => Some((what.as_str(), rank.parse()?, step.parse()?)),
        _ => None,
    };
    let device = Device::flex().autodiff();
    let ep = ExpertParallel::new(comm.clone(), ParallelOptions::default())?;
    let config = MoeConfig::new(RouterConfig::new(WIDTH, 8, 3), 64);
    let layers = (0..2)
        .map(|layer| config.init_parallel(&ep, layer, &device))
        .collect::<Result<Vec<_>, _>>()?;
    for step in 0..steps {
        if fault.is_some_and(|(_, rank, at): (_, usize, usize)| (rank, at) == (comm.rank(), step)) {
            match fault.map(|(what, ..)| what) {
                Some("panic") => panic!("out of luck"),
                Some("error") => return Err("out of memory".into()),
                Some("return") => return Ok(()),
                // Computes for longer than anyone waits, and never communicates.
                Some("busy") => loop {
                    std::hint::black_box(random(1000, step as u64));
                },
                what => return Err(format!("{what:?} is no fault").into()),
            }
        }
        let tokens = random(TOKENS * WIDTH, (step * comm.size() + comm.rank()) as u64);
        let mut x = tensor_of(&tokens, [TOKENS, WIDTH], DType::F32, &device).require_grad();
        for layer in &layers {
            x = layer.forward(x.clone()) + x;
        }
        x.sum().backward();
        ep.take_stats();
        if comm.rank() == 0 {
            println!("step {step}");
        }
    }
    Ok(())
}
