//! `plan --model`: the sizes of a model, on the terminal and as JSON.

use std::path::Path;

use anyhow::{Result, bail};
use burn_moe_models::ModelConfig;
use serde::Serialize;

use super::gpu::{GPUS, Gpu};
use super::output::write_file;
use super::sizes::{Bytes, ModelSizes, Precision, RankSizes};

/// What is asked about a model.
pub struct Question<'a> {
    pub model: &'a str,
    pub ep: &'a [usize],
    pub slots: &'a [usize],
    pub tokens_per_rank: u32,
    pub precision: Precision,
    pub gpu: Option<&'a str>,
    pub json: Option<&'a Path>,
}

#[derive(Serialize)]
struct Answer {
    model: ModelSizes,
    ranks: Vec<RankSizes>,
}

/// Answers.
pub fn run(question: &Question<'_>) -> Result<()> {
    let config = ModelConfig::resolve(question.model)?;
    let gpu = question.gpu.map(find_gpu).transpose()?;
    let (model, counts) = ModelSizes::new(question.model, &config)?;
    let mut ranks = Vec::new();
    for &ep in question.ep {
        for &slots in question.slots {
            let (tokens, precision) = (question.tokens_per_rank, question.precision);
            let sizes = RankSizes::new(&config, &counts, [ep, slots], tokens, precision, gpu)?;
            ranks.push(sizes);
        }
    }
    print_model(&model);
    ranks.iter().for_each(print_rank);
    if let Some(path) = question.json {
        write_file(path, &serde_json::to_vec_pretty(&Answer { model, ranks })?)?;
    }
    Ok(())
}

fn find_gpu(name: &str) -> Result<&'static Gpu> {
    let Some(gpu) = Gpu::named(name) else {
        let names: Vec<_> = GPUS.iter().map(|gpu| gpu.name).collect();
        bail!("--gpu is {name}, allowed: {}", names.join(", "));
    };
    Ok(gpu)
}

fn print_model(model: &ModelSizes) {
    println!("{}", model.model);
    println!("  parameters           {:>22}", digits(model.parameters));
    println!("    a token passes     {:>22}", digits(model.active));
    println!(
        "    routed experts     {:>22}   {} in each of {} layers of {}, {} for a token",
        digits(model.routed),
        model.experts,
        model.moe_layers,
        model.layers,
        model.top_k
    );
    println!("    one expert         {:>22}", digits(model.expert));
    println!("    embedding          {:>22}", digits(model.embedding));
    match model.head {
        0 => println!("    head                                the embedding"),
        head => println!("    head               {:>22}", digits(head)),
    }
    if model.mtp > 0 {
        println!(
            "    left out           {:>22}   multi-token prediction, not among the parameters",
            digits(model.mtp)
        );
    }
    println!("  weights              {}", kinds(&model.bytes));
    println!(
        "  cache, a token       {}",
        kinds(&model.kv_bytes_per_token)
    );
}

fn print_rank(rank: &RankSizes) {
    println!(
        "\nEP {}, {} replica slots a rank, {} tokens a rank, {:?}",
        rank.ep, rank.slots, rank.tokens_per_rank, rank.precision
    );
    println!("  parameters of a rank {:>22}", digits(rank.parameters));
    println!(
        "    in replica slots   {:>22}   for all layers together",
        digits(rank.slot_parameters)
    );
    println!("  both                 {}", kinds(&rank.bytes));
    println!(
        "  dispatched a layer   {:>22}   bytes a rank sends, to {:.2} other ranks a token; as many come back",
        digits(rank.dispatched_bytes_per_layer.round() as u64),
        rank.remote_ranks_per_token
    );
    println!(
        "  replicated a layer   {:>22}   bytes a rank receives at most",
        digits(rank.replicated_bytes_per_layer)
    );
    let Some(floor) = &rank.floor else { return };
    let gpu = &floor.gpu;
    println!(
        "  on {} ({} TFLOP/s, {} GB of {} GB/s, NVLink {} GB/s among {}, network {} GB/s), at least:",
        gpu.name,
        match rank.precision {
            Precision::Bf16 => gpu.bf16_tflops,
            Precision::Fp8 => gpu.fp8_tflops.unwrap_or_default(),
        },
        gpu.memory_gb,
        gpu.memory_gb_s,
        gpu.nvlink_gb_s,
        gpu.nvlink_domain,
        gpu.network_gb_s
    );
    for (what, ms) in [
        ("products", floor.compute_ms),
        ("reading weights", floor.memory_ms),
        ("moving tokens", floor.tokens_ms),
        ("moving replicas", floor.replicas_ms),
        ("forward pass", floor.step_ms),
    ] {
        println!("    {what:<18} {ms:>22.3}   ms");
    }
    println!(
        "    tokens a second    {:>22}   a GPU{}",
        digits(floor.tokens_per_second_per_gpu as u64),
        if floor.fits {
            ""
        } else {
            "; weights do not fit into its memory"
        }
    );
}

fn kinds(bytes: &Bytes) -> String {
    format!(
        "{:>22}   bytes in FP8, {} in BF16, {} in F32",
        digits(bytes.fp8),
        digits(bytes.bf16),
        digits(bytes.f32)
    )
}

/// 1234567 as 1 234 567.
fn digits(number: u64) -> String {
    let text = number.to_string();
    let groups = text.as_bytes().rchunks(3).rev();
    let groups: Vec<_> = groups.map(String::from_utf8_lossy).collect();
    groups.join(" ")
}
