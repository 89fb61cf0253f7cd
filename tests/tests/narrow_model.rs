//! A model in bf16, made the way Burn makes one: the device's default type is bf16. Settings of a
//! device last for the process, so these tests have one of their own.

use std::sync::Once;

use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, FloatDType};
use burn_moe::comm::{Key, Op, RankOptions, run_ranks};
use burn_moe::layer::{MoeConfig, RouterConfig};
use burn_moe::parallel::{CombineOrder, ExpertParallel, ParallelOptions, reduce_gradients};
use burn_moe_tests::naive::NaiveMoe;
use burn_moe_tests::{assert_close, random, rounded, tensor_of, values};

fn device() -> Device {
    static CONFIGURED: Once = Once::new();
    CONFIGURED.call_once(|| {
        Device::flex()
            .configure(FloatDType::BF16)
            .expect("nothing was made on this device before");
    });
    Device::flex()
}

fn config() -> MoeConfig {
    MoeConfig::new(RouterConfig::new(24, 8, 3), 16).with_num_shared_experts(1)
}

/// Fault 4, and what DeepSeek's and GLM's code does: gate and bias are f32 whatever the model is.
#[test]
fn the_router_keeps_its_parameters_in_f32() {
    let mut moe = config().init(&device().autodiff());
    assert_eq!(moe.experts.gate_up.val().dtype(), DType::BF16);
    assert_eq!(moe.experts.down.val().dtype(), DType::BF16);
    assert_eq!(moe.router.gate.val().dtype(), DType::F32);
    let bias = moe.router.bias.as_ref().expect("a bias");
    assert_eq!(bias.val().dtype(), DType::F32);
    // Steps that bf16 could not hold: 256 of them and one more.
    for _ in 0..257 {
        moe.router.update_bias(&[9, 0, 0, 0, 0, 0, 0, 0], 0.001);
    }
    let bias = moe.router.bias.as_ref().expect("a bias").val();
    assert_eq!(bias.dtype(), DType::F32);
    assert_close("bias", &values(&bias)[..2], &[-0.257, 0.257], 1e-5);
}

#[test]
fn forward_is_near_the_loop() {
    let device = device();
    let moe = config().init(&device);
    let naive = NaiveMoe::of(&config(), &moe);
    let x = rounded(&random(30 * 24, 1), DType::BF16);
    let routed = moe.forward_routed(tensor_of(&x, [30, 24], DType::BF16, &device));
    let expected = naive.router.route(&x);
    let ids = routed.routing.ids.to_data();
    assert!(
        ids.iter::<i64>()
            .eq(expected.ids.iter().map(|id| *id as i64))
    );
    assert_close(
        "weights",
        &values(&routed.routing.weights),
        &expected.weights,
        1e-6,
    );
    assert_eq!(routed.output.dtype(), DType::BF16);
    assert_close("output", &values(&routed.output), &naive.forward(&x), 1e-2);
}

/// A training step over ranks: bf16 rows and experts travel, gradients have the types of their
/// parameters, and all ranks have the same.
#[test]
fn training_over_ranks() {
    device();
    for combine in [CombineOrder::Rank, CombineOrder::Exact] {
        let outputs = [1, 2, 4].map(|ranks| {
            let parts = run_ranks(ranks, RankOptions::default(), |comm| {
                let device = Device::flex().autodiff();
                let options = ParallelOptions {
                    combine,
                    ..Default::default()
                };
                let ep = ExpertParallel::new(comm.clone(), options).expect("options");
                let mut moe = config().init_parallel(&ep, 0, &device).expect("a layer");
                let mut optimizer = SgdConfig::new().init();
                let own = 32 * comm.rank() / ranks..32 * (comm.rank() + 1) / ranks;
                let x = &random(32 * 24, 1)[own.start * 24..own.end * 24];
                let mut outputs = Vec::new();
                for step in 0..3 {
                    let x = tensor_of(x, [own.len(), 24], DType::BF16, &device);
                    let out = moe.forward(x);
                    outputs.push(values(&out));
                    let loss = out.square().sum() / 32.0;
                    let grads = GradientsParams::from_grads(loss.backward(), &moe);
                    let key = Key::new(Op::GradReduce, step, 0);
                    let grads = reduce_gradients(grads, &moe, &comm, key).expect("all ranks");
                    let gate = grads.get::<2>(moe.router.gate.id).expect("a gradient");
                    assert_eq!(gate.dtype(), DType::F32);
                    let experts = grads.get::<3>(moe.experts.down.id).expect("a gradient");
                    assert_eq!(experts.dtype(), DType::BF16);
                    moe = optimizer.step(0.1, moe, grads);
                }
                assert_eq!(moe.router.gate.val().dtype(), DType::F32);
                (outputs, values(&moe.router.gate.val()))
            })
            .expect("all ranks");
            for (_, gate) in &parts {
                assert_eq!(*gate, parts[0].1);
            }
            (0..3)
                .map(|step| parts.iter().flat_map(|part| part.0[step].clone()).collect())
                .collect::<Vec<Vec<f64>>>()
        });
        for ranks in &outputs[1..] {
            for (step, (actual, single)) in ranks.iter().zip(&outputs[0]).enumerate() {
                assert_close(&format!("step {step}"), actual, single, 2e-2);
            }
            if combine == CombineOrder::Exact {
                assert_eq!(ranks[0], outputs[0][0], "forward bits");
            }
        }
    }
}
