//! The auxiliary losses are those of the papers, as plain loops compute them, and so are their
//! gradients.

use burn::tensor::{DType, Device, Tensor};
use burn_moe::layer::loss::{load_balancing, router_z, sequence_balancing};
use burn_moe::layer::{Router, RouterConfig, Routing, ScoreFunction};
use burn_moe_tests::naive::{self, NaiveRouter, NaiveRouting};
use burn_moe_tests::{assert_close, assert_gradient, cast, random, tensor64, values, with_values};

const EXPERTS: usize = 6;
const TOKENS: usize = 12;
const WIDTH: usize = 4;

type Loss = fn(&Routing) -> Tensor<1>;
type NaiveLoss = fn(&NaiveRouting, usize) -> f64;

const LOSSES: [(&str, Loss, NaiveLoss); 4] = [
    ("load balancing", load_balancing, |routing, k| {
        naive::sequence_balancing(routing, EXPERTS, k, TOKENS)
    }),
    (
        "sequences of 4",
        |routing| sequence_balancing(routing, 4),
        |routing, k| naive::sequence_balancing(routing, EXPERTS, k, 4),
    ),
    (
        "sequences of 1",
        |routing| sequence_balancing(routing, 1),
        |routing, k| naive::sequence_balancing(routing, EXPERTS, k, 1),
    ),
    ("router z", router_z, |routing, _| {
        naive::router_z(routing, EXPERTS)
    }),
];

/// A router in f64 with a bias, and the same as loops.
fn routers(config: RouterConfig, device: &Device) -> (Router, NaiveRouter) {
    let mut router = cast(config.init(device), DType::F64);
    let bias: Vec<f64> = random(EXPERTS, 2).iter().map(|v| 0.3 * v).collect();
    router.bias = router.bias.map(|param| with_values(param, &bias));
    let naive = NaiveRouter {
        config,
        gate: values(&router.gate.val()),
        bias,
    };
    (router, naive)
}

#[test]
fn losses_and_gradients() {
    let device = Device::flex().autodiff();
    for (name, loss, naive_loss) in LOSSES {
        for score_function in [ScoreFunction::Sigmoid, ScoreFunction::Softmax] {
            for k in [1, 3, EXPERTS] {
                let what = format!("{name}, {score_function:?}, k {k}");
                let config = RouterConfig::new(WIDTH, EXPERTS, k)
                    .with_score_function(score_function)
                    .with_routed_scaling_factor(2.5);
                let (router, naive) = routers(config, &device);
                let x_values = random(TOKENS * WIDTH, 3);
                let x = tensor64(&x_values, [TOKENS, WIDTH], &device).require_grad();
                let result = loss(&router.forward(x.clone()));
                let expected = naive_loss(&naive.route(&x_values), k);
                assert_close(&what, &values(&result), &[expected], 1e-12);
                let grads = result.backward();
                let of = |x: &[f64], gate: &[f64]| {
                    let naive = NaiveRouter {
                        gate: gate.to_vec(),
                        ..naive.clone()
                    };
                    naive_loss(&naive.route(x), k)
                };
                assert_gradient(
                    &format!("x: {what}"),
                    &values(&x.grad(&grads).expect("a gradient")),
                    &x_values,
                    |x| of(x, &naive.gate),
                );
                assert_gradient(
                    &format!("gate: {what}"),
                    &values(&router.gate.val().grad(&grads).expect("a gradient")),
                    &naive.gate,
                    |gate| of(&x_values, gate),
                );
            }
        }
    }
}

/// The two ends that the documentation names.
#[test]
fn balanced_is_one_and_collapsed_is_the_number_of_experts() {
    let device = Device::flex();
    let config = RouterConfig::new(EXPERTS, EXPERTS, 1).with_score_function(ScoreFunction::Softmax);
    let (mut router, _) = routers(config, &device);
    router.bias = None;
    let mut gate = vec![0.0; EXPERTS * EXPERTS];
    for i in 0..EXPERTS {
        gate[i * EXPERTS + i] = 50.0;
    }
    router.gate = with_values(router.gate, &gate);
    // Token t wants expert t mod E; then all want expert 2.
    let tokens = |wants: fn(usize) -> usize| {
        let mut x = vec![0.0; TOKENS * EXPERTS];
        for token in 0..TOKENS {
            x[token * EXPERTS + wants(token)] = 1.0;
        }
        tensor64(&x, [TOKENS, EXPERTS], &device)
    };
    for loss in [load_balancing, |r: &Routing| sequence_balancing(r, EXPERTS)] {
        let even = loss(&router.forward(tokens(|t| t % EXPERTS)));
        assert_close("balanced", &values(&even), &[1.0], 1e-9);
        let one = loss(&router.forward(tokens(|_| 2)));
        assert_close("collapsed", &values(&one), &[EXPERTS as f64], 1e-9);
    }
}

/// `exp` of these logits overflows f32; the loss does not.
#[test]
fn router_z_of_large_logits_is_finite() {
    let device = Device::flex().autodiff();
    let mut router = RouterConfig::new(2, 3, 1).init(&device);
    router.gate = with_values(router.gate, &[300.0, 100.0, -300.0, 0.0, 0.0, 0.0]);
    let x = Tensor::<2>::from_data([[1.0, 0.0], [-1.0, 0.0]], &device).require_grad();
    let loss = router_z(&router.forward(x.clone()));
    assert_close("loss", &values(&loss), &[300.0f64.powi(2)], 1e-6);
    let grads = loss.backward();
    let grad = values(&x.grad(&grads).expect("a gradient"));
    assert_close("gradient", &grad, &[9e4, 0.0, -9e4, 0.0], 1e-6);
}

#[test]
#[should_panic(expected = "sequences of 5 do not divide 12 tokens")]
fn sequences_must_divide_the_tokens() {
    let device = Device::flex();
    let (router, _) = routers(RouterConfig::new(WIDTH, EXPERTS, 2), &device);
    let x = tensor64(&random(TOKENS * WIDTH, 3), [TOKENS, WIDTH], &device);
    sequence_balancing(&router.forward(x), 5);
}
