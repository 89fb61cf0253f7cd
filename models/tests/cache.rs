//! Reading sequences in parts with a cache of keys and values gives what one forward pass gives,
//! which `parity.rs` compares with transformers.

mod hf_common;

use burn::tensor::Device;
use burn_moe::comm::{RankOptions, run_ranks};
use burn_moe::parallel::{Balance, CombineOrder, ExpertParallel, ParallelOptions};
use burn_moe_models::hf::Folder;
use burn_moe_models::{
    CacheError, Decoder, DecoderOutput, GenerateOptions, Generation, LogitsOf, ModelConfig,
    TokenBatch, pretrained,
};
use hf_common::{FAMILIES, fixture};

/// Uneven, two equal, one token, and longer than YaRN's original length and the indexer's choice.
fn sequences(vocab: usize) -> Vec<Vec<u32>> {
    [9usize, 9, 30, 1, 17]
        .iter()
        .enumerate()
        .map(|(i, length)| {
            (0..*length)
                .map(|t| ((t * t * 7 + t * 5 + i * 13) % vocab) as u32)
                .collect()
        })
        .collect()
}

fn options(combine: CombineOrder) -> ParallelOptions {
    ParallelOptions {
        balance: Balance::Exact,
        combine,
        ..Default::default()
    }
}

fn load(family: &str, ep: &std::sync::Arc<ExpertParallel>) -> (ModelConfig, Decoder) {
    let folder = Folder::open(fixture(family)).unwrap();
    let config = pretrained::read_config(&folder).unwrap();
    let decoder = pretrained::load(&config, ep, &folder, &Device::flex()).unwrap();
    (config, decoder)
}

fn values(out: &DecoderOutput) -> Vec<f32> {
    out.logits.to_data().iter().collect()
}

/// Of each sequence, its tokens' logits.
fn in_one_pass(family: &str) -> Vec<Vec<f32>> {
    let ep = ExpertParallel::solo(options(CombineOrder::Exact)).unwrap();
    let (config, decoder) = load(family, &ep);
    let one = |sequence: &Vec<u32>| values(&decoder.forward(&TokenBatch::new([sequence])));
    sequences(config.vocab_size).iter().map(one).collect()
}

/// Of a sequence and a pass, how many tokens the pass reads at most.
type Part = dyn Fn(usize, usize) -> usize + Sync;

/// The same in parts. Ranks share the sequences.
fn in_parts(family: &str, ranks: usize, passes: usize, part: &Part) -> Vec<Vec<f32>> {
    run_ranks(ranks, RankOptions::default(), |comm| {
        let rank = comm.rank();
        let ep = ExpertParallel::new(comm, options(CombineOrder::default())).unwrap();
        let (config, decoder) = load(family, &ep);
        let all = sequences(config.vocab_size);
        let range = all.len() * rank / ranks..all.len() * (rank + 1) / ranks;
        let own = &all[range.clone()];
        let lengths: Vec<usize> = own.iter().map(Vec::len).collect();
        // Less room than is needed.
        let halves: Vec<usize> = lengths.iter().map(|length| length / 2).collect();
        let mut cache = decoder.cache(&lengths, 0);
        assert_eq!(cache.bytes(), 0);
        let mut small = decoder.cache(&halves, 1);
        let mut logits = vec![Vec::new(); own.len()];
        for pass in 0..passes {
            let batch: Vec<&[u32]> = (range.clone().zip(own).zip(cache.lengths()))
                .map(|((i, sequence), past)| {
                    &sequence[past..sequence.len().min(past + part(i, pass))]
                })
                .collect();
            let batch = TokenBatch::new(batch);
            let out = decoder
                .forward_cached(&batch, &mut cache, LogitsOf::All)
                .unwrap();
            let rows = values(&out);
            let mut rows = rows.chunks_exact(config.vocab_size);
            for (logits, new) in logits.iter_mut().zip(&batch.lengths) {
                logits.extend(rows.by_ref().take(*new).flatten());
            }
            assert!(rows.next().is_none());
            let last = decoder
                .forward_cached(&batch, &mut small, LogitsOf::Last)
                .unwrap();
            assert_eq!(last.routings.len(), out.routings.len());
            let with_tokens = batch.lengths.iter().filter(|n| **n > 0).count();
            assert_eq!(last.logits.dims(), [with_tokens, config.vocab_size]);
        }
        assert!(cache.lengths().eq(lengths), "every token has been read");
        logits
    })
    .unwrap()
    .concat()
}

fn assert_close(got: &[Vec<f32>], want: &[Vec<f32>], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{what}: sequence {i}");
        for (at, (a, b)) in got.iter().zip(want).enumerate() {
            assert!(
                (a - b).abs() < 1e-5,
                "{what}: sequence {i}, logit {at}: {a} {b}"
            );
        }
    }
}

#[test]
fn parts_and_ranks_change_nothing() {
    for family in FAMILIES {
        let whole = in_one_pass(family);
        for ranks in [1, 2, 4] {
            // Token by token; chunks; a short part before a long one; all at once; parts of another
            // size in each sequence and pass, none too.
            let ways: [(_, _, &Part); 5] = [
                ("tokens", 30, &|_, _| 1),
                ("chunks", 5, &|_, _| 7),
                ("long behind short", 2, &|_, pass| [2, 28][pass]),
                ("at once", 1, &|_, _| 30),
                ("uneven", 12, &|i, pass| (i * 3 + pass * 5) % 8),
            ];
            for (name, passes, part) in ways {
                let got = in_parts(family, ranks, passes, part);
                assert_close(&got, &whole, &format!("{family}, {ranks} ranks, {name}"));
            }
        }
    }
}

#[test]
fn a_batch_that_does_not_fit_is_refused() {
    let ep = ExpertParallel::solo(options(CombineOrder::Exact)).unwrap();
    let (config, decoder) = load("mixtral", &ep);
    let mut cache = decoder.cache(&[2, 3], 0);
    let mut read = |batch: TokenBatch| decoder.forward_cached(&batch, &mut cache, LogitsOf::Last);
    let refused = read(TokenBatch::new([[1u32, 2]])).unwrap_err();
    assert_eq!(
        refused,
        CacheError::Sequences {
            found: 1,
            expected: 2
        }
    );
    let longest = config.max_sequence_length;
    read(TokenBatch::new([vec![1], vec![1; longest - 1]])).unwrap();
    let refused = read(TokenBatch::new([vec![1], vec![1; 2]])).unwrap_err();
    assert_eq!(
        refused,
        CacheError::TooLong {
            sequence: 1,
            length: longest + 1,
            longest
        }
    );
    read(TokenBatch::new([vec![1], vec![1; 1]])).unwrap();
    assert!(cache.lengths().eq([2, longest]));
}

#[test]
fn prompts_that_cannot_be_read_are_refused() {
    let ep = ExpertParallel::solo(options(CombineOrder::Exact)).unwrap();
    let (config, decoder) = load("qwen3_moe", &ep);
    let longest = config.max_sequence_length;
    let generation = |prompts: &[Vec<u32>], max_new_tokens| {
        let options = GenerateOptions {
            max_new_tokens,
            ..Default::default()
        };
        let refused = Generation::new(&decoder, ep.comm().as_ref(), prompts, options);
        refused.err().map(|error| error.to_string())
    };
    for (prompts, more, parts) in [
        (vec![vec![1], vec![]], 1, ["prompt 1 is empty", "1 or more"]),
        (vec![vec![48]], 1, ["prompt 0 has the id 48", "(48)"]),
        (
            vec![vec![0; longest + 1]],
            0,
            ["prompt 0 of 129 tokens", "max_sequence_length (128)"],
        ),
        (vec![vec![0; longest - 1]], 2, ["127 tokens", "with 2 more"]),
        (vec![vec![0]], usize::MAX, ["1 tokens", "(128)"]),
    ] {
        let error = generation(&prompts, more).expect("a refusal");
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    assert_eq!(generation(&[vec![0; longest - 1]], 1), None);
    assert_eq!(generation(&[], 1), None);
}

/// What the cache holds a token, as `cached_values` says.
#[test]
fn the_cache_has_the_promised_size() {
    for family in FAMILIES {
        let ep = ExpertParallel::solo(options(CombineOrder::Exact)).unwrap();
        let (config, decoder) = load(family, &ep);
        let mut cache = decoder.cache(&[5, 8], 3);
        let mut pass = |lengths: [usize; 2]| {
            let batch = TokenBatch::new(lengths.map(|length| vec![1; length]));
            decoder
                .forward_cached(&batch, &mut cache, LogitsOf::Last)
                .unwrap();
            cache.bytes()
        };
        let a_token = config.num_layers * config.attention.cached_values() * size_of::<f32>();
        assert_eq!(pass([5, 2]), (8 + 11) * a_token, "{family}");
        assert_eq!(pass([3, 9]), (8 + 11) * a_token, "{family}");
        assert_eq!(pass([1, 0]), (16 + 11) * a_token, "{family}");
    }
}
