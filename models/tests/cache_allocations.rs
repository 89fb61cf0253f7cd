//! A token behind a long past copies nothing of the cache.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use burn::tensor::Device;
use burn_moe::parallel::{ExpertParallel, ParallelOptions};
use burn_moe_models::attention::{AttentionConfig, GqaConfig, MlaConfig, QkNorm};
use burn_moe_models::{LogitsOf, ModelConfig, TokenBatch};

struct Counting;

thread_local! {
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system allocator unchanged; counting touches no heap.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.with(|bytes| bytes.set(bytes.get() + layout.size()));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        BYTES.with(|bytes| bytes.set(bytes.get() + layout.size()));
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        BYTES.with(|bytes| bytes.set(bytes.get() + size));
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// `smoke` with wide keys and few heads, so that the cache is large beside everything else.
fn configs() -> [ModelConfig; 2] {
    let smoke = ModelConfig::named("smoke").unwrap();
    let AttentionConfig::Mla(mla) = &smoke.attention else {
        panic!("smoke has MLA");
    };
    let gqa = GqaConfig {
        num_heads: 2,
        num_kv_heads: 1,
        head_dim: 512,
        rotary_dim: 512,
        rope: mla.rope.clone(),
        qk_norm: QkNorm::PerHead,
        qkv_bias: false,
        output_bias: false,
    };
    let mla = MlaConfig {
        kv_lora_rank: 512,
        ..mla.clone()
    };
    [AttentionConfig::Mla(mla), AttentionConfig::Gqa(gqa)].map(|attention| ModelConfig {
        attention,
        max_sequence_length: 4096,
        ..smoke.clone()
    })
}

#[test]
fn one_token_copies_no_cache() {
    for config in configs() {
        let ep = ExpertParallel::solo(ParallelOptions::default()).unwrap();
        let decoder = config.init(&ep, 0, &Device::flex()).unwrap();
        let mut cache = decoder.cache(&[2000], 100);
        let mut pass = |tokens: usize| {
            let batch = TokenBatch::new([vec![7; tokens]]);
            let before = BYTES.get();
            decoder
                .forward_cached(&batch, &mut cache, LogitsOf::Last)
                .unwrap();
            (BYTES.get() - before, cache.bytes())
        };
        for _ in 0..8 {
            pass(250);
        }
        let (_, held) = pass(1);
        for _ in 0..5 {
            let (allocated, still) = pass(1);
            assert_eq!(still, held);
            assert!(
                allocated < held / 8,
                "{allocated} bytes for a token, the cache has {held}"
            );
        }
    }
}
