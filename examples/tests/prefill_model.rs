//! `prefill --model`: a folder of Hugging Face's against what transformers computed, and what does
//! not depend on ranks, chunks and batches.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::{copy_fixture as copy, fixture, refusal_in_one_line as refusal};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const FAMILIES: [&str; 6] = [
    "deepseek_v3",
    "glm4_moe",
    "glm_moe_dsa",
    "minimax_m2",
    "mixtral",
    "qwen3_moe",
];

fn prefill(model: &Path, args: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_prefill"))
        .arg("--model")
        .arg(model)
        .arg("--report")
        .arg(folder.join("report"))
        .args(args)
        .output()
        .unwrap()
}

/// The report of a run that succeeds.
fn report(model: &Path, args: &[&str], folder: &Path) -> Value {
    common::succeeded(&prefill(model, args, folder));
    common::report(&folder.join("report"))
}

fn write_ids(folder: &Path, prompts: &impl serde::Serialize) -> String {
    let path = folder.join("ids.json");
    std::fs::write(&path, serde_json::to_string(prompts).unwrap()).unwrap();
    path.display().to_string()
}

fn f32s(file: &SafeTensors<'_>, name: &str) -> (Vec<usize>, Vec<f32>) {
    let view = file.tensor(name).unwrap();
    let values = view.data().chunks_exact(4);
    let values = values.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    (view.shape().to_vec(), values.collect())
}

fn i64s(file: &SafeTensors<'_>, name: &str) -> Vec<i64> {
    let view = file.tensor(name).unwrap();
    let values = view.data().chunks_exact(8);
    values
        .map(|b| i64::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

fn close(got: &[f32], want: &[f32], most: f32, what: &str) {
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() < most, "{what}: {got} {want}");
    }
}

/// Causality makes a shortened prompt's logits the first of the full one's; the sparse indexer's
/// exact ties make an exception (they depend on the length), so there both prompts are full. Logits
/// and routing of every MoE layer, at once on one rank and in chunks on more.
#[test]
fn logits_and_routing_are_those_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let model = fixture(family);
        let bytes = std::fs::read(model.join("reference.safetensors")).unwrap();
        let reference = SafeTensors::deserialize(&bytes).unwrap();
        let (shape, logits) = f32s(&reference, "logits");
        let (length, vocab) = (shape[1], shape[2]);
        let tokens = i64s(&reference, "input_ids");
        let second = if family == "glm_moe_dsa" { length } else { 7 };
        let prompts = [&tokens[..length], &tokens[length..length + second]];
        let ids = write_ids(folder.path(), &prompts);
        for (ranks, chunk) in [("1", None), ("2", Some("3")), ("4", Some("1"))] {
            let what = format!("{family}, {ranks} ranks, chunk {chunk:?}");
            let out = folder.path().join("logits.safetensors");
            let path = out.display().to_string();
            let mut args = vec!["--ids", &ids, "--ranks", ranks, "--logits", &path];
            args.extend(["--max-new-tokens", "1"]);
            args.extend(chunk.iter().flat_map(|chunk| ["--chunk", chunk]));
            let report = report(&model, &args, folder.path());
            let bytes = std::fs::read(&out).unwrap();
            let saved = SafeTensors::deserialize(&bytes).unwrap();
            let layers = report["runs"][0]["layers"].as_array().unwrap();
            assert_eq!(saved.len(), 2 * (1 + 2 * layers.len()), "{what}");
            for (i, prompt) in prompts.iter().enumerate() {
                let (shape, got) = f32s(&saved, &format!("logits.{i}"));
                assert_eq!(shape, [prompt.len(), vocab], "{what}");
                close(&got, &logits[i * length * vocab..], 2e-5, &what);
                for layer in layers {
                    let of = format!("model.layers.{layer}.mlp.gate");
                    let (shape, weights) = f32s(&reference, &format!("{of}.weights"));
                    let (k, rows) = (shape[1], i * length..i * length + prompt.len());
                    let pairs = |ids: Vec<i64>, weights: Vec<f32>| {
                        let mut pairs: Vec<_> = ids.into_iter().zip(weights).collect();
                        // The reference has a token's experts in no order.
                        pairs
                            .chunks_exact_mut(k)
                            .for_each(|row| row.sort_by_key(|p| p.0));
                        pairs.into_iter().unzip::<i64, f32, Vec<_>, Vec<_>>()
                    };
                    let want = pairs(i64s(&reference, &format!("{of}.indices")), weights);
                    let (shape, got) = f32s(&saved, &format!("router.{layer}.weights.{i}"));
                    assert_eq!(shape, [prompt.len(), k], "{what}");
                    let got = pairs(i64s(&saved, &format!("router.{layer}.indices.{i}")), got);
                    let rows = rows.start * k..rows.end * k;
                    assert_eq!(got.0, want.0[rows.clone()], "{what}");
                    close(&got.1, &want.1[rows], 1e-6, &what);
                }
            }
        }
    }
}

/// Greedy continuations of uneven prompts, against one that the logits of the whole text decide anew
/// after every token, with no cache; however many ranks and however small the chunks. (Not so the
/// sparse indexer: its exact ties depend on the length of the text. There, ranks and chunks agree.)
#[test]
fn continuations_are_those_without_a_cache() {
    use burn_moe::parallel::{ExpertParallel, ParallelOptions};
    use burn_moe_models::{TokenBatch, hf::Folder, pretrained};
    let folder = tempfile::tempdir().unwrap();
    let prompts = [
        vec![5u32, 9, 14],
        vec![40],
        vec![2, 3, 5, 7, 11, 13, 17, 19, 23],
    ];
    let ids = write_ids(folder.path(), &prompts);
    for family in FAMILIES {
        let files = Folder::open(fixture(family)).unwrap();
        let config = pretrained::read_config(&files).unwrap();
        let ep = ExpertParallel::solo(ParallelOptions::default()).unwrap();
        let device = burn::tensor::Device::flex();
        let decoder = pretrained::load(&config, &ep, &files, &device).unwrap();
        let mut expected: Option<Vec<String>> = None;
        if family != "glm_moe_dsa" {
            // The families have other ids for the end of a text.
            let eos = files.config_json()["eos_token_id"].as_u64();
            let without_cache = |prompt: &Vec<u32>| {
                let mut text = prompt.clone();
                for _ in 0..12 {
                    let logits = decoder.forward(&TokenBatch::new([&text])).logits;
                    let last = text.len() - 1;
                    let row = logits.slice_dim(0, last..last + 1);
                    text.push(row.argmax(1).into_scalar::<i64>() as u32);
                    if text.last().map(|id| u64::from(*id)) == eos {
                        break;
                    }
                }
                format!("{:?}", &text[prompt.len()..])
            };
            expected = Some(prompts.iter().map(without_cache).collect());
        }
        for (ranks, chunk) in [("1", "100"), ("2", "4"), ("4", "1")] {
            let args = ["--ids", &ids, "--ranks", ranks, "--chunk", chunk];
            let args = [&args[..], &["--max-new-tokens", "12"]].concat();
            let report = report(&fixture(family), &args, folder.path());
            let run = &report["runs"][0];
            let written = run["continuations"].as_array().unwrap();
            let written: Vec<String> = written
                .iter()
                .map(|c| c["continuation"].as_str().unwrap().to_owned())
                .collect();
            let expected = expected.get_or_insert_with(|| written.clone());
            assert_eq!(written, *expected, "{family}, {ranks} ranks");
            assert!(run["decode"]["tokens_per_second"].as_f64().unwrap() > 0.0);
            let held = run["kv_cache_bytes"].as_array().unwrap();
            assert_eq!(held.len().to_string(), ranks);
            let held: u64 = held.iter().map(|bytes| bytes.as_u64().unwrap()).sum();
            let a_token = config.num_layers * config.attention.cached_values() * 4;
            assert_eq!(held as usize, (3 + 1 + 9 + 3 * 11) * a_token);
        }
    }
}

/// A token that `generation_config.json` or else `config.json` names ends a text; the others go on.
#[test]
fn texts_end_where_the_model_ends_them() {
    let folder = tempfile::tempdir().unwrap();
    let model = copy("mixtral", folder.path());
    let ids = write_ids(folder.path(), &[[7, 8, 9], [30, 2, 41]]);
    let written = |model: &Path| {
        let args = ["--ids", &ids, "--ranks", "2", "--max-new-tokens", "9"];
        let report = report(model, &args, folder.path());
        let texts = report["runs"][0]["continuations"].as_array().unwrap();
        let ids = |c: &Value| serde_json::from_str(c["continuation"].as_str().unwrap()).unwrap();
        texts.iter().map(ids).collect::<Vec<Vec<u32>>>()
    };
    let set = |name: &str, eos: Value| {
        let path = model.join(name);
        let text = std::fs::read_to_string(&path).unwrap_or("{}".into());
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["eos_token_id"] = eos;
        std::fs::write(path, config.to_string()).unwrap();
    };
    set("config.json", Value::Null);
    let full = written(&model);
    assert_eq!([full[0].len(), full[1].len()], [9, 9]);
    let until = |text: &[u32], eos: u32| {
        let end = text.iter().position(|id| *id == eos);
        text[..end.map_or(text.len(), |end| end + 1)].to_vec()
    };
    let (a, b) = (full[0][3], full[1][5]);
    set("config.json", json!(a));
    assert_eq!(written(&model), [until(&full[0], a), until(&full[1], a)]);
    set("generation_config.json", json!([b, 4000]));
    assert_eq!(written(&model), [until(&full[0], b), until(&full[1], b)]);
    set("generation_config.json", json!("end"));
    let run = prefill(&model, &["--ids", &ids], folder.path());
    let error = refusal(&run);
    assert!(error.contains("eos_token_id is \"end\""), "{error}");
}

/// Words split at spaces, `<s>` in front, and settings that would cut prompts off and fill them up.
fn tokenizer() -> Value {
    let vocab: serde_json::Map<String, Value> = (0..48)
        .map(|id| match id {
            0 => ("<s>".into(), json!(0)),
            1 => ("</s>".into(), json!(1)),
            2 => ("?".into(), json!(2)),
            id => (format!("w{id}"), json!(id)),
        })
        .collect();
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    };
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 1, "pad_type_id": 0, "pad_token": "</s>"},
        "added_tokens": [added(0, "<s>"), added(1, "</s>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|\\s"},
                          "behavior": "Removed", "invert": false},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
        },
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}
    })
}

#[test]
fn text_is_read_with_the_models_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let model = copy("qwen3_moe", folder.path());
    let prompt = folder.path().join("prompts.txt");
    std::fs::write(&prompt, "w5 w9 w14\n\nw40 what w7 w8 w9 w3\r\n").unwrap();
    let prompt = prompt.display().to_string();
    let text = ["--prompt", &prompt, "--ranks", "2", "--max-new-tokens", "4"];

    let error = refusal(&prefill(&model, &text, folder.path()));
    assert!(
        error.contains("tokenizer.json: missing") && error.contains("--ids"),
        "{error}"
    );
    std::fs::write(model.join("tokenizer.json"), "{\"model\": 3}").unwrap();
    let error = refusal(&prefill(&model, &text, folder.path()));
    assert!(error.contains("tokenizer.json: not a tokenizer"), "{error}");

    std::fs::write(model.join("tokenizer.json"), tokenizer().to_string()).unwrap();
    let as_text = report(&model, &text, folder.path());
    assert_eq!(as_text["tokens"], "text");
    let ids = [vec![0, 5, 9, 14], vec![0, 40, 2, 7, 8, 9, 3]];
    assert_eq!(as_text["prompt_tokens"], 11);
    let ids = write_ids(folder.path(), &ids);
    let numbers = ["--ids", &ids, "--ranks", "1", "--max-new-tokens", "4"];
    let as_ids = report(&model, &numbers, folder.path());
    for i in 0..2 {
        let of = |report: &Value, what: &str| {
            let text = &report["runs"][0]["continuations"][i][what];
            text.as_str().unwrap().to_owned()
        };
        let written: Vec<u32> = serde_json::from_str(&of(&as_ids, "continuation")).unwrap();
        let words: Vec<String> = written
            .iter()
            .filter(|id| **id > 1)
            .map(|id| {
                if *id == 2 {
                    "?".into()
                } else {
                    format!("w{id}")
                }
            })
            .collect();
        assert_eq!(of(&as_text, "continuation"), words.join(" "));
    }
    let shown = &as_text["runs"][0]["continuations"][1]["prompt"];
    assert_eq!(shown, "w40 ? w7 w8 w9 w3");

    // A vocabulary larger than the model's.
    let larger = tokenizer().to_string().replace("\"w7\":7", "\"w7\":48");
    std::fs::write(model.join("tokenizer.json"), larger).unwrap();
    let error = refusal(&prefill(&model, &text, folder.path()));
    assert!(
        error.contains("--prompt is 48") && error.contains("vocab_size (48)"),
        "{error}"
    );
}

#[test]
fn unusable_prompts_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("mixtral");
    let ids = folder.path().join("ids.json");
    let at = ids.display().to_string();
    let long = |length: usize| json!([[1], vec![1; length]]).to_string();
    let cases: &[(String, &[&str], &[&str])] = &[
        ("[[1, 2], [48]]".into(), &[], &["--ids is 48"]),
        ("[[1], []]".into(), &[], &["--ids", "none of them empty"]),
        ("[]".into(), &[], &["--ids"]),
        ("[[1], -2]".into(), &[], &["--ids"]),
        ("{".into(), &[], &["ids.json"]),
        (
            long(129),
            &[],
            &["prompt 1 with 129 tokens", "max_sequence_length (128)"],
        ),
        (
            long(120),
            &[],
            &["--max-new-tokens is 32", "longest prompt (120)"],
        ),
        (long(3), &["--chunk", "0"], &["--chunk is 0", "1 or more"]),
        (long(3), &["--ranks", "3"], &["--ranks is 3"]),
    ];
    for (text, args, expected) in cases {
        std::fs::write(&ids, text).unwrap();
        let args = [&["--ids", at.as_str()], *args].concat();
        let error = refusal(&prefill(&model, &args, folder.path()));
        for part in *expected {
            assert!(error.contains(part), "{error}");
        }
    }
    assert!(!folder.path().join("report").exists());
    // As long as can be.
    std::fs::write(&ids, long(128)).unwrap();
    let args = ["--ids", &at, "--max-new-tokens", "0", "--ranks", "1"];
    let report = report(&model, &args, folder.path());
    assert_eq!(report["runs"][0]["decode"]["passes"], 0);
}
