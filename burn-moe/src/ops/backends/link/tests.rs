//! Layers over a link between ranks that share CubeCL's CPU runtime, whose "devices" are the
//! process's memory: to the bit what they are through host memory.

use std::sync::Arc;

use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};

use crate::comm::nccl::LinkTraffic;
use crate::comm::nccl::tests::memory::run_linked;
use crate::comm::{Communicator, Key, Op, RankOptions, run_ranks};
use crate::layer::{Moe, MoeConfig, RouterConfig};
use crate::parallel::{Balance, CombineOrder, ExpertParallel, ParallelOptions, reduce_gradients};

const WIDTH: usize = 12;
const EXPERTS: usize = 10;

/// What a rank does.
#[derive(Clone, Copy, Debug)]
struct Run {
    combine: CombineOrder,
    overlap: bool,
    /// Whether the experts are to learn.
    trained: bool,
}

/// What came out on a rank, to the bit.
#[derive(PartialEq, Eq, Debug)]
struct Bits {
    output: Vec<u32>,
    grads: Vec<Option<Vec<u32>>>,
    replicas: Vec<usize>,
}

fn bits<const D: usize>(tensor: &Tensor<D>) -> Vec<u32> {
    tensor.to_data().iter::<f32>().map(f32::to_bits).collect()
}

fn tensor<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    let len: usize = shape.iter().product();
    let value = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5;
    let values: Vec<f32> = (0..len).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// All tokens choose this expert, so that it is replicated everywhere.
fn heat(moe: &mut Moe, expert: usize) {
    let Some(bias) = moe.router.bias.take() else {
        return;
    };
    let mut values = vec![0.0f32; EXPERTS];
    values[expert] = 100.0;
    moe.router.bias = Some(bias.map(|bias| {
        let data = TensorData::new(values, [EXPERTS]);
        Tensor::from_data(data, &bias.device()).set_require_grad(false)
    }));
}

impl Run {
    /// Two layers, forward and backward.
    fn rank(self, comm: &Arc<dyn Communicator>) -> Bits {
        let device = Device::cpu().autodiff();
        let options = ParallelOptions {
            balance: Balance::Exact,
            slots: 2,
            combine: self.combine,
            overlap: self.overlap,
            ..Default::default()
        };
        let ep = ExpertParallel::new(comm.clone(), options).unwrap();
        // Normalised, the weight of a single expert would be 1, and not learn.
        let router = RouterConfig::new(WIDTH, EXPERTS, 1).with_norm_topk_prob(false);
        let config = MoeConfig::new(router, 10)
            .with_num_shared_experts(1)
            .with_seed(4);
        let layers = [0, 1].map(|number| {
            let mut moe = config.init_parallel(&ep, number, &device).unwrap();
            heat(&mut moe, 3 + 4 * number as usize);
            if !self.trained {
                moe.experts.gate_up = moe.experts.gate_up.set_require_grad(false);
                moe.experts.down = moe.experts.down.set_require_grad(false);
            }
            moe
        });
        let tokens = 20 + comm.rank();
        let x = tensor([tokens, WIDTH], comm.rank(), &device);
        let x = if self.trained { x.require_grad() } else { x };
        let hidden = x.clone() + layers[0].forward(x.clone());
        let output = layers[1].forward(hidden);
        let factors = tensor([tokens, WIDTH], 50 + comm.rank(), &device);
        let mut grads = (output.clone() * factors).sum().backward();
        let mut of = vec![x.grad(&grads).map(|grad| bits(&grad))];
        for (number, moe) in layers.iter().enumerate() {
            for weights in [&moe.experts.gate_up, &moe.experts.down] {
                of.push(weights.val().grad(&grads).map(|grad| bits(&grad)));
            }
            of.push(moe.router.gate.val().grad(&grads).map(|grad| bits(&grad)));
            // The router and the shared expert over all ranks, of which the last has nothing of the router.
            let shared = moe.shared.as_ref().unwrap();
            let mut dense = GradientsParams::from_module(&mut grads, moe);
            if comm.rank() > 0 && comm.rank() + 1 == comm.size() {
                dense.remove::<2>(moe.router.gate.id);
            }
            let key = Key::new(Op::GradReduce, 0, number as u32);
            let sums = reduce_gradients(dense, moe, comm, key).unwrap();
            for param in [&moe.router.gate, &shared.gate_up, &shared.down] {
                of.push(sums.get::<2>(param.id).map(|sum| bits(&sum)));
            }
        }
        Bits {
            output: bits(&output),
            grads: of,
            replicas: ep.take_stats().iter().map(|it| it.replicas.len()).collect(),
        }
    }
}

/// The same over a link and through the host; what went over the link.
fn compare(ranks: usize, run: Run) -> Vec<LinkTraffic> {
    let through_host = run_ranks(ranks, RankOptions::default(), |comm| run.rank(&comm)).unwrap();
    let linked = run_linked(
        ranks,
        RankOptions::default(),
        200,
        |_| None,
        |comm| {
            let bits = run.rank(&comm);
            (bits, comm.device_link().unwrap().traffic())
        },
    );
    let mut traffic = Vec::new();
    for (rank, (linked, host)) in linked.unwrap().into_iter().zip(through_host).enumerate() {
        let (bits, sent) = linked;
        assert!(bits == host, "rank {rank} of {ranks}, {run:?}");
        // Of five ranks, four host the hot expert of each layer: some of them relay.
        assert!(ranks < 5 || bits.replicas.iter().all(|replicas| *replicas >= 4));
        traffic.push(sent);
    }
    traffic
}

#[test]
fn layers_are_those_through_the_host() {
    for (ranks, combine, overlap) in [
        (1, CombineOrder::Rank, true),
        (2, CombineOrder::Exact, true),
        (2, CombineOrder::Rank, false),
        (5, CombineOrder::Rank, true),
    ] {
        let run = Run {
            combine,
            overlap,
            trained: true,
        };
        for sent in compare(ranks, run) {
            // Dispatch and combine of two layers and two passes, and the router's weights of the rank order; two to sum
            // the gradients of each bucket: the router's and each matrix of the shared experts.
            let exchanges = match combine {
                CombineOrder::Exact => 8,
                CombineOrder::Rank => 12,
            };
            let sums = if ranks == 1 { 0 } else { 2 * 2 * 3 };
            assert_eq!(sent.row_exchanges, exchanges + sums, "{run:?}");
            // Weights out in two passes, gradients back.
            let expected = if ranks == 1 { 0 } else { 6 };
            assert_eq!(sent.weight_exchanges, expected, "{run:?}");
        }
    }
}

/// The weights are sent for the backward pass, in which nobody wants them.
#[test]
fn frozen_experts_do_not_end_the_link() {
    let run = Run {
        combine: CombineOrder::Rank,
        overlap: true,
        trained: false,
    };
    compare(2, run);
}
