//! Replicas of a model, each over ranks of its own, stay equal.

use burn::module::Module;
use burn::tensor::Device;
use burn_moe::comm::{Key, Op, RankOptions, run_ranks};
use burn_moe::parallel::{ExpertParallel, Mesh, ParallelOptions};
use burn_moe_models::{Decoder, FeedForwardKind, ModelConfig, TokenBatch};

const BATCH: usize = 8;
const LENGTH: usize = 12;

/// The bits of all routers' biases.
fn biases(model: &Decoder) -> Vec<Vec<u32>> {
    let of = |bias: &burn::module::Param<burn::tensor::Tensor<1>>| {
        let data = bias.val().inner().into_data();
        data.iter::<f32>().map(f32::to_bits).collect()
    };
    let moes = model
        .layers
        .iter()
        .filter_map(|block| match &block.feed_forward {
            FeedForwardKind::Moe(moe) => moe.router.bias.as_ref(),
            FeedForwardKind::Dense(_) => None,
        });
    moes.map(of).collect()
}

/// Two steps in which only biases move, on `size` ranks of which `ep` share the experts; the biases of
/// each rank.
fn moved(size: usize, ep: usize) -> Vec<Vec<Vec<u32>>> {
    let ranks = run_ranks(size, RankOptions::default(), |comm| {
        let mesh = Mesh::new(comm, ep).unwrap();
        let ep = ExpertParallel::new(mesh.ep().clone(), ParallelOptions::default()).unwrap();
        let config = ModelConfig::named("smoke").unwrap();
        let mut model = config.init(&ep, 3, &Device::flex().autodiff()).unwrap();
        assert!(model.num_params() > 0);
        for step in 0..2 {
            let rank = mesh.world().rank();
            let own = BATCH * rank / size..BATCH * (rank + 1) / size;
            let token = |i: usize, t: usize| ((i * 37 + t * t * 11 + step * 5) % 256) as u32;
            let sequence = |i| (0..LENGTH).map(|t| token(i, t)).collect::<Vec<_>>();
            model.forward(&TokenBatch::new(own.map(sequence)));
            let key = Key::new(Op::Count, step as u64 + 1, u32::MAX);
            model.reduce_load(mesh.dp().as_ref(), key).unwrap();
            model.update_bias(0.25);
        }
        biases(&model)
    });
    ranks.unwrap()
}

/// Whole counts, so exactly; the steps are so large that a group that moved by its own load alone would
/// end elsewhere.
#[test]
fn biases_move_by_the_load_of_all_replicas() {
    let single = moved(1, 1).remove(0);
    assert!(single.iter().flatten().any(|bias| *bias != 0));
    for (size, ep) in [(2, 1), (4, 2), (4, 1), (4, 4)] {
        for (rank, own) in moved(size, ep).iter().enumerate() {
            assert!(*own == single, "rank {rank} of {size} in groups of {ep}");
        }
    }
}
