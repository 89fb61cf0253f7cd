//! The decoder against transformers, on the fixtures of the six families.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor, TensorData};
use burn_moe::comm::{RankOptions, run_ranks};
use burn_moe::parallel::{Balance, CombineOrder, ExpertParallel, ParallelOptions};
use burn_moe_models::hf::Folder;
use burn_moe_models::{FeedForwardKind, TokenBatch, pretrained};
use safetensors::SafeTensors;

const FAMILIES: [&str; 6] = [
    "deepseek_v3",
    "glm4_moe",
    "glm_moe_dsa",
    "minimax_m2",
    "mixtral",
    "qwen3_moe",
];

/// Fixtures of the crate, or those of the folder that `BURN_MOE_FIXTURES` names.
fn fixtures() -> Vec<PathBuf> {
    if let Ok(folder) = std::env::var("BURN_MOE_FIXTURES") {
        let entries = std::fs::read_dir(folder).unwrap();
        let folders = entries.map(|entry| entry.unwrap().path());
        return folders
            .filter(|path| path.join("reference.safetensors").exists())
            .collect();
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    FAMILIES.map(|family| folder.join(family)).into()
}

/// Tensors of `reference.safetensors` as f64, with their shapes.
struct Reference(BTreeMap<String, (Vec<usize>, Vec<f64>)>);

impl Reference {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.tensors().into_iter().map(|(name, view)| {
            let data = view.data();
            let values = match view.dtype() {
                safetensors::Dtype::I64 => data
                    .chunks_exact(8)
                    .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64)
                    .collect(),
                _ => data
                    .chunks_exact(4)
                    .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
                    .collect(),
            };
            (name, (view.shape().to_vec(), values))
        });
        Self(tensors.collect())
    }

    fn get(&self, name: &str) -> (&[usize], &[f64]) {
        let (shape, values) = &self.0[name];
        (shape, values)
    }

    fn sequences(&self) -> Vec<Vec<u32>> {
        let (shape, ids) = self.get("input_ids");
        let rows = ids.chunks_exact(shape[1]);
        rows.map(|row| row.iter().map(|id| *id as u32).collect())
            .collect()
    }
}

/// What a rank computed: logits, and of each MoE layer ids and weights.
type Output = (Vec<f64>, Vec<(Vec<u32>, Vec<f64>)>);

fn run(folder: &Path, sequences: &[Vec<u32>], ranks: usize) -> Vec<Output> {
    run_ranks(ranks, RankOptions::default(), |comm| {
        let (rank, count) = (comm.rank(), sequences.len());
        let options = ParallelOptions {
            balance: Balance::Exact,
            combine: CombineOrder::Exact,
            ..Default::default()
        };
        let ep = ExpertParallel::new(comm, options).unwrap();
        let folder = Folder::open(folder).unwrap();
        let config = pretrained::read_config(&folder).unwrap();
        let decoder = pretrained::load(&config, &ep, &folder, &Device::flex()).unwrap();
        let own = &sequences[count * rank / ranks..count * (rank + 1) / ranks];
        let out = decoder.forward(&TokenBatch::new(own));
        let routings = out.routings.into_iter().map(|routing| {
            let ids = routing.ids.into_data().iter::<u32>().collect();
            (ids, routing.weights.into_data().iter::<f64>().collect())
        });
        let routings = routings.collect();
        (out.logits.into_data().iter::<f64>().collect(), routings)
    })
    .unwrap()
}

fn furthest(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let distances = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    distances.fold(
        0.0,
        |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) },
    )
}

#[test]
fn families_compute_what_transformers_computes() {
    let (mut faults, mut refused) = (Vec::new(), Vec::new());
    for folder in fixtures() {
        let family = folder.file_name().unwrap().to_string_lossy().into_owned();
        let config = pretrained::read_config(&Folder::open(&folder).unwrap());
        if let Err(error) = config {
            println!("{family}: refused: {error}");
            refused.push(family);
            continue;
        }
        let reference = Reference::read(&folder.join("reference.safetensors"));
        for ranks in [1, 2, 4] {
            let outputs = run(&folder, &reference.sequences(), ranks);
            let logits: Vec<f64> = outputs.iter().flat_map(|out| out.0.clone()).collect();
            let off = furthest(&logits, reference.get("logits").1);
            let (mut weights_off, mut other) = (0f64, 0);
            let layers: Vec<&str> = reference
                .0
                .keys()
                .filter_map(|name| name.strip_suffix(".gate.indices"))
                .collect();
            assert_eq!(layers.len(), outputs[0].1.len(), "{family}: MoE layers");
            for (i, layer) in layers.iter().enumerate() {
                let (shape, ids) = reference.get(&format!("{layer}.gate.indices"));
                let weights = reference.get(&format!("{layer}.gate.weights")).1;
                let of = |out: &Output| out.1[i].clone();
                let (got_ids, got_weights): (Vec<_>, Vec<_>) = outputs.iter().map(of).unzip();
                // The reference has a token's experts in no order.
                let sorted = |ids: Vec<u32>, weights: &[f64]| {
                    let mut rows: Vec<(u32, f64)> = ids.into_iter().zip(weights.to_vec()).collect();
                    for row in rows.chunks_exact_mut(shape[1]) {
                        row.sort_by_key(|(id, _)| *id);
                    }
                    rows.into_iter().unzip::<u32, f64, Vec<_>, Vec<_>>()
                };
                let want = sorted(ids.iter().map(|id| *id as u32).collect(), weights);
                let got = sorted(got_ids.concat(), &got_weights.concat());
                let pairs = want.0.iter().zip(&got.0);
                other += pairs.filter(|(a, b)| a != b).count();
                weights_off = weights_off.max(furthest(&got.1, &want.1));
            }
            println!(
                "{family} EP {ranks}: logits {off:.1e}, weights {weights_off:.1e}, other experts {other}"
            );
            if off > 2e-5 || weights_off > 1e-6 || other > 0 {
                faults.push(format!("{family} on {ranks} ranks"));
            }
        }
    }
    let own = std::env::var("BURN_MOE_FIXTURES").is_err();
    assert!(refused.is_empty() || !own, "refused: {refused:?}");
    assert!(faults.is_empty(), "differ from transformers: {faults:?}");
}

/// Largest distance relative to the largest gradient, of a Burn gradient that may be transposed.
fn relative(got: Option<Tensor<2>>, transposed: bool, want: &[f64]) -> f64 {
    let got = got.expect("a gradient");
    let got = if transposed { got.swap_dims(0, 1) } else { got };
    let got: Vec<f64> = got.into_data().iter().collect();
    let largest = want.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    // Experts without tokens have none at all.
    furthest(&got, want) / largest.max(1e-30)
}

#[test]
fn gradients_are_those_of_autograd() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for family in ["deepseek_v3", "qwen3_moe"] {
        let path = fixtures.join(family);
        let reference = Reference::read(&path.join("reference.safetensors"));
        let wanted = Reference::read(&path.join("gradients.safetensors"));
        let ep = ExpertParallel::solo(ParallelOptions::default()).unwrap();
        let folder = Folder::open(&path).unwrap();
        let config = pretrained::read_config(&folder).unwrap();
        let device = Device::flex().autodiff();
        let decoder = pretrained::load(&config, &ep, &folder, &device).unwrap();
        let out = decoder.forward(&TokenBatch::new(reference.sequences()));
        let factors = wanted.get("factors").1.iter().map(|v| *v as f32);
        let factors = TensorData::new(factors.collect::<Vec<_>>(), out.logits.shape());
        let loss = (out.logits * Tensor::from_data(factors, &device)).sum();
        let grads = loss.backward();
        let block = &decoder.layers[1];
        let FeedForwardKind::Moe(moe) = &block.feed_forward else {
            panic!("layer 1 has experts");
        };
        let row = |grad: Option<Tensor<1>>| grad.map(|grad| grad.unsqueeze::<2>());
        let experts = config.num_experts;
        let expert = |grad: Option<Tensor<3>>, id: usize, part: Range<usize>| {
            grad.map(|grad| {
                grad.slice_dim(0, id..id + 1)
                    .squeeze_dim::<2>(0)
                    .slice_dim(1, part)
            })
        };
        let (width, hidden) = (config.d_model, config.d_hidden_expert);
        let (gate_up, down) = (moe.experts.gate_up.val(), moe.experts.down.val());
        let mut checks = vec![
            (
                "model.embed_tokens.weight".to_owned(),
                decoder.embedding.weight.val().grad(&grads),
                false,
            ),
            (
                "lm_head.weight".into(),
                decoder.head.as_ref().unwrap().weight.val().grad(&grads),
                true,
            ),
            (
                "model.norm.weight".into(),
                row(decoder.norm.gamma.val().grad(&grads)),
                false,
            ),
            (
                "model.layers.1.input_layernorm.weight".into(),
                row(block.attention_norm.gamma.val().grad(&grads)),
                false,
            ),
            (
                "model.layers.1.mlp.gate.weight".into(),
                moe.router.gate.val().grad(&grads),
                true,
            ),
        ];
        for id in [0, experts - 1] {
            let of = format!("model.layers.1.mlp.experts.{id}");
            for (name, grad) in [
                ("gate_proj", expert(gate_up.grad(&grads), id, 0..hidden)),
                (
                    "up_proj",
                    expert(gate_up.grad(&grads), id, hidden..2 * hidden),
                ),
                ("down_proj", expert(down.grad(&grads), id, 0..width)),
            ] {
                checks.push((format!("{of}.{name}.weight"), grad, true));
            }
        }
        for (name, grad, transposed) in checks {
            let off = relative(grad, transposed, wanted.get(&name).1);
            assert!(off < 1e-4, "{family}: {name}: {off:.1e}");
        }
    }
}
