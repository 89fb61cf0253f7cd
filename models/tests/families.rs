//! Configs of published models: their parameter counts, and what is refused.

use burn::tensor::Device;
use burn_moe::layer::ScoreFunction;
use burn_moe_models::attention::{AttentionConfig, QkNorm, RopePairs};
use burn_moe_models::{ModelConfig, ParameterCounts};
use serde_json::{Value, json};

/// Counted by other means, equal to those of transformers' own models: in all, active with and
/// without the embedding and without embedding and head, of multi-token prediction, of an expert, of
/// all routed experts, layers with experts, of a layer's attention and of its indexer.
#[rustfmt::skip]
const COUNTS: &[(&str, [u64; 10])] = &[
    ("deepseek-v3", [671_026_419_200, 37_552_297_472, 36_625_618_432, 35_698_939_392, 11_610_068_224, 44_040_192, 653_908_770_816, 58, 187_107_328, 0]),
    ("deepseek-v3.2", [671_877_944_064, 38_403_822_336, 37_477_143_296, 36_550_464_256, 11_624_027_648, 44_040_192, 653_908_770_816, 58, 187_107_328, 13_959_424]),
    ("glm-4.5-air", [106_852_251_264, 13_424_129_664, 12_803_372_672, 12_182_615_680, 2_375_059_584, 17_301_504, 99_656_663_040, 45, 109_066_240, 0]),
    ("glm-4.5", [352_797_829_024, 33_632_266_144, 32_856_319_904, 32_080_373_664, 3_988_069_792, 23_592_960, 335_963_750_400, 89, 136_329_472, 0]),
    ("glm-4.6", [352_797_829_024, 33_632_266_144, 32_856_319_904, 32_080_373_664, 3_988_069_792, 23_592_960, 335_963_750_400, 89, 136_329_472, 0]),
    ("glm-5.1", [743_911_218_432, 41_784_728_832, 40_833_146_112, 39_881_563_392, 9_952_920_576, 37_748_736, 724_775_731_200, 75, 165_022_208, 9_371_904]),
    ("glm-5.2", [743_377_019_904, 41_250_530_304, 40_298_947_584, 39_347_364_864, 9_952_920_576, 37_748_736, 724_775_731_200, 75, 165_022_208, 9_371_904]),
    ("glm-5", [743_911_218_432, 41_784_728_832, 40_833_146_112, 39_881_563_392, 9_952_920_576, 37_748_736, 724_775_731_200, 75, 165_022_208, 9_371_904]),
    ("minimax-m2", [228_689_764_864, 11_030_553_088, 10_415_956_480, 9_801_359_872, 0, 14_155_776, 224_680_476_672, 62, 44_047_360, 0]),
    ("mixtral-8x22b", [140_630_071_296, 39_161_468_928, 38_960_142_336, 38_758_815_744, 0, 301_989_888, 135_291_469_824, 56, 88_080_384, 0]),
    ("mixtral-8x7b", [46_702_792_704, 12_879_925_248, 12_748_853_248, 12_617_781_248, 0, 176_160_768, 45_097_156_608, 32, 41_943_040, 0]),
    ("qwen3-235b-a22b", [235_093_634_560, 22_190_763_520, 21_568_433_664, 20_946_103_808, 0, 18_874_368, 227_096_395_776, 94, 71_303_424, 0]),
    ("qwen3-30b-a3b", [30_532_122_624, 3_353_032_704, 3_041_867_776, 2_730_702_848, 0, 4_718_592, 28_991_029_248, 48, 18_874_624, 0]),
];

fn counts(config: &ModelConfig) -> ParameterCounts {
    config.counts(&Device::flex()).unwrap()
}

#[test]
fn published_models_have_their_parameters() {
    for (name, expected) in COUNTS {
        let count = counts(&ModelConfig::named(name).expect(name));
        let got = [
            count.total,
            count.active,
            count.active - count.embedding,
            count.active - count.embedding - count.head,
            count.mtp,
            count.expert,
            count.routed,
            count.moe_layers,
            count.attention_layer,
            count.indexer_layer,
        ];
        assert_eq!(got, *expected, "{name}");
        let others = count.total - count.routed;
        assert_eq!(count.per_rank(4).unwrap(), others + count.routed / 4);
        assert!(
            count
                .per_rank(3)
                .unwrap_err()
                .to_string()
                .contains("ranks is 3")
        );
    }
}

#[test]
fn every_name_is_a_config() {
    for name in ModelConfig::NAMES {
        let config = ModelConfig::named(name).unwrap_or_else(|| panic!("{name}"));
        config.validate().unwrap();
    }
    assert!(ModelConfig::named("llama").is_none());
}

fn fixture(family: &str) -> Value {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let text = std::fs::read_to_string(folder.join(family).join("config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn read(json: &Value) -> ModelConfig {
    ModelConfig::from_hugging_face(json).unwrap()
}

/// `json` with some fields replaced, or removed where the new value is null.
fn with(mut json: Value, changes: Value) -> Value {
    let fields = json.as_object_mut().unwrap();
    for (name, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => fields.remove(name),
            value => fields.insert(name.clone(), value.clone()),
        };
    }
    json
}

/// Fault 9: files that transformers has saved leave `scoring_func` and `topk_method` out, and write
/// `rope_parameters`.
#[test]
fn both_spellings_mean_the_same() {
    let new = fixture("deepseek_v3");
    assert!(new.get("scoring_func").is_none());
    let mut scaling = new["rope_parameters"].clone();
    let scaling = scaling.as_object_mut().unwrap();
    let theta = scaling.remove("rope_theta").unwrap();
    let kind = scaling.remove("rope_type").unwrap();
    scaling.insert("type".into(), kind);
    let old = json!({
        "rope_parameters": null, "rope_scaling": scaling, "rope_theta": theta,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    });
    assert_eq!(read(&new), read(&with(new.clone(), old)));
    assert_eq!(read(&new).score_function, ScoreFunction::Sigmoid);
    assert!(read(&new).selection_bias);
    for (family, function, bias) in [
        ("glm4_moe", ScoreFunction::Sigmoid, true),
        ("glm_moe_dsa", ScoreFunction::Sigmoid, true),
        ("minimax_m2", ScoreFunction::Sigmoid, true),
        ("qwen3_moe", ScoreFunction::Softmax, false),
        ("mixtral", ScoreFunction::Softmax, false),
    ] {
        let config = read(&fixture(family));
        assert_eq!(
            (config.score_function, config.selection_bias),
            (function, bias),
            "{family}"
        );
    }
}

/// Faults 13 and 14, as far as the config decides: which norm, and which pairs are rotated.
#[test]
fn attention_follows_the_family() {
    for (family, norm, rotary_dim) in [
        ("glm4_moe", QkNorm::PerHead, 4),
        ("minimax_m2", QkNorm::AllHeads, 4),
        ("qwen3_moe", QkNorm::PerHead, 8),
        ("mixtral", QkNorm::None, 12),
    ] {
        let AttentionConfig::Gqa(gqa) = read(&fixture(family)).attention else {
            panic!("{family}");
        };
        assert_eq!(
            (gqa.qk_norm, gqa.rotary_dim),
            (norm, rotary_dim),
            "{family}"
        );
        assert_eq!(gqa.rope.pairs, RopePairs::HalfSplit);
    }
    for (name, indexer) in [
        ("deepseek-v3", None),
        ("deepseek-v3.2", Some(RopePairs::HalfSplit)),
        ("glm-5", Some(RopePairs::Interleaved)),
    ] {
        let AttentionConfig::Mla(mla) = ModelConfig::named(name).unwrap().attention else {
            panic!("{name}");
        };
        assert_eq!(mla.rope.pairs, RopePairs::Interleaved, "{name}");
        assert_eq!(mla.indexer.map(|indexer| indexer.pairs), indexer, "{name}");
    }
}

/// As `Qwen3MoeDecoderLayer` decides: dense where listed, and where `(layer + 1) % step` is not 0.
#[test]
fn dense_layers_may_lie_anywhere() {
    let layers = |changes| {
        let changes = with(json!({"num_hidden_layers": 6}), changes);
        let config = read(&with(fixture("qwen3_moe"), changes));
        config.moe_layers().collect::<Vec<_>>()
    };
    assert_eq!(layers(json!({})), [0, 1, 2, 3, 4, 5]);
    assert_eq!(layers(json!({"decoder_sparse_step": 2})), [1, 3, 5]);
    assert_eq!(layers(json!({"mlp_only_layers": [0, 1]})), [2, 3, 4, 5]);
    let both = json!({"decoder_sparse_step": 2, "mlp_only_layers": [3, 9]});
    assert_eq!(layers(both), [1, 5]);
}

/// A tied table counts once.
#[test]
fn tied_embeddings_have_no_head() {
    let own = counts(&read(&fixture("mixtral")));
    let tied = with(fixture("mixtral"), json!({"tie_word_embeddings": true}));
    let tied = counts(&read(&tied));
    assert!(own.head > 0);
    assert_eq!((tied.head, tied.total), (0, own.total - own.head));
    assert_eq!(tied.active, own.active - own.head);
}

#[test]
fn impossible_values_are_refused_by_field_and_value() {
    for (family, changes, expected) in [
        (
            "deepseek_v3",
            json!({"model_type": "llama"}),
            vec!["model_type", "llama", "deepseek_v3"],
        ),
        (
            "deepseek_v3",
            json!({"model_type": null}),
            vec!["model_type"],
        ),
        (
            "deepseek_v3",
            json!({"hidden_size": null}),
            vec!["hidden_size", "absent"],
        ),
        (
            "deepseek_v3",
            json!({"hidden_size": -3}),
            vec!["hidden_size", "-3"],
        ),
        (
            "deepseek_v3",
            json!({"n_group": 3}),
            vec!["n_group is 3", "divisor"],
        ),
        (
            "deepseek_v3",
            json!({"scoring_func": "softmax"}),
            vec!["scoring_func", "softmax"],
        ),
        (
            "deepseek_v3",
            json!({"num_experts_per_tok": 9}),
            vec!["top_k is 9"],
        ),
        (
            "deepseek_v3",
            json!({"rope_parameters": {"rope_type": "llama3"}}),
            vec!["rope_type", "llama3"],
        ),
        (
            "glm4_moe",
            json!({"hidden_act": "gelu"}),
            vec!["hidden_act", "gelu"],
        ),
        (
            "glm4_moe",
            json!({"num_key_value_heads": 3}),
            vec!["num_kv_heads is 3"],
        ),
        (
            "glm_moe_dsa",
            json!({"index_topk": 0}),
            vec!["index_topk is 0"],
        ),
        (
            "glm_moe_dsa",
            json!({"indexer_types": ["full"]}),
            vec!["indexer_types"],
        ),
        (
            "mixtral",
            json!({"sliding_window": 64}),
            vec!["sliding_window is 64"],
        ),
        (
            "mixtral",
            json!({"tie_word_embeddings": 1}),
            vec!["tie_word_embeddings", "1"],
        ),
        (
            "qwen3_moe",
            json!({"decoder_sparse_step": 0}),
            vec!["decoder_sparse_step is 0", "1 or more"],
        ),
        (
            "qwen3_moe",
            json!({"mlp_only_layers": [-1]}),
            vec!["mlp_only_layers", "-1"],
        ),
        (
            "minimax_m2",
            json!({"num_local_experts": "many"}),
            vec!["num_local_experts", "many"],
        ),
    ] {
        let json = with(fixture(family), changes);
        let error = ModelConfig::from_hugging_face(&json)
            .unwrap_err()
            .to_string();
        for part in expected {
            assert!(error.contains(part), "{family}: {error}");
        }
    }
    assert!(ModelConfig::from_hugging_face(&json!([])).is_err());
}
