//! Routing files: recorded router decisions, as micro-batches of loads.

use anyhow::{Context, Result, bail, ensure};
use burn_moe::balance::LoadMatrix;
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

/// Router decisions of a model on some text: for each layer and token the experts chosen.
#[derive(Debug)]
pub struct Routing {
    pub layers: usize,
    pub tokens: usize,
    pub top_k: usize,
    pub experts: usize,
    /// Expert ids, `[layers, tokens, top_k]`.
    ids: Vec<u16>,
}

impl Routing {
    /// Reads a safetensors file with `ids` `[layers, tokens, k]` (u8, u16 or i32) and the number of experts as
    /// metadata `experts`.
    pub fn read(path: &Path) -> Result<Self> {
        let read = || -> Result<Self> {
            let bytes = std::fs::read(path)?;
            let (_, metadata) = SafeTensors::read_metadata(&bytes)?;
            let experts = metadata.metadata().as_ref().and_then(|m| m.get("experts"));
            let experts = experts.context("no metadata `experts`")?;
            let experts: usize = experts.parse().map_err(|_| {
                anyhow::anyhow!("metadata `experts` is `{experts}`, allowed: a number")
            })?;
            ensure!(
                (1..=1 << 16).contains(&experts),
                "metadata `experts` is {experts}, allowed: 1 to 65536"
            );
            let tensors = SafeTensors::deserialize(&bytes)?;
            let names = tensors.names().into_iter().collect::<Vec<_>>().join(", ");
            let ids = tensors.tensor("ids");
            let ids = ids.map_err(|_| anyhow::anyhow!("no tensor `ids`; the file has: {names}"))?;
            let &[layers, tokens, top_k] = ids.shape() else {
                bail!(
                    "`ids` has shape {:?}, allowed: [layers, tokens, k]",
                    ids.shape()
                );
            };
            ensure!(
                layers > 0 && tokens > 0 && top_k > 0,
                "`ids` has shape {:?}, allowed: no zero",
                ids.shape()
            );
            let ids = parse_ids(ids.dtype(), ids.data(), experts)?;
            Ok(Self {
                layers,
                tokens,
                top_k,
                experts,
                ids,
            })
        };
        read().with_context(|| format!("routing file {}", path.display()))
    }

    /// Whole micro-batches of `size` tokens; what is left at the end is not used.
    pub fn micro_batches(&self, size: usize) -> usize {
        self.tokens / size
    }

    /// Counts one micro-batch of one layer into `load`: its tokens are split evenly and in order over the source ranks.
    pub fn count(&self, layer: usize, micro_batch: usize, size: usize, load: &mut LoadMatrix) {
        let ranks = load.ranks();
        let start = layer * self.tokens + micro_batch * size;
        for source in 0..ranks {
            let (from, to) = (source * size / ranks, (source + 1) * size / ranks);
            let ids = &self.ids[(start + from) * self.top_k..(start + to) * self.top_k];
            let row = load.row_mut(source);
            row.fill(0);
            ids.iter().for_each(|&id| row[usize::from(id)] += 1);
        }
    }
}

fn parse_ids(dtype: Dtype, data: &[u8], experts: usize) -> Result<Vec<u16>> {
    let ids: Vec<i64> = match dtype {
        Dtype::U8 => data.iter().map(|&b| i64::from(b)).collect(),
        Dtype::U16 => {
            let words = data.as_chunks::<2>().0.iter();
            words.map(|&b| i64::from(u16::from_le_bytes(b))).collect()
        }
        Dtype::I32 => {
            let words = data.as_chunks::<4>().0.iter();
            words.map(|&b| i64::from(i32::from_le_bytes(b))).collect()
        }
        other => bail!("`ids` is of type {other:?}, allowed: U8, U16, I32"),
    };
    ids.into_iter()
        .map(|id| {
            let known = u16::try_from(id).ok().filter(|&i| usize::from(i) < experts);
            known.with_context(|| format!("`ids` holds {id}, allowed: below {experts} experts"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;
    use std::collections::HashMap;

    /// Writes a routing file and reads it back.
    fn read(
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        data: &[u8],
        experts: &str,
    ) -> Result<Routing> {
        let path = std::env::temp_dir().join(format!("plan-{}-{name}", std::process::id()));
        let view = TensorView::new(dtype, shape.to_vec(), data)?;
        let metadata = HashMap::from([("experts".to_owned(), experts.to_owned())]);
        safetensors::serialize_to_file([("ids", view)], Some(metadata), &path)?;
        let routing = Routing::read(&path);
        std::fs::remove_file(&path)?;
        routing
    }

    #[test]
    fn tokens_go_to_sources_in_order() {
        // Two layers of three tokens with two experts each.
        let ids = [0, 1, 2, 3, 0, 3, 1, 2, 1, 2, 1, 2];
        let wide: Vec<u8> = ids
            .iter()
            .flat_map(|&id| i32::from(id).to_le_bytes())
            .collect();
        for routing in [
            read("u8", Dtype::U8, &[2, 3, 2], &ids, "4").unwrap(),
            read("i32", Dtype::I32, &[2, 3, 2], &wide, "4").unwrap(),
        ] {
            assert_eq!((routing.layers, routing.tokens, routing.top_k), (2, 3, 2));
            assert_eq!(routing.micro_batches(2), 1);
            let mut load = LoadMatrix::new(2, 4);
            routing.count(0, 0, 2, &mut load);
            assert_eq!(load.counts(), [1, 1, 0, 0, 0, 0, 1, 1]);
            routing.count(1, 0, 3, &mut load);
            assert_eq!(load.counts(), [0, 1, 1, 0, 0, 2, 2, 0]);
        }
    }

    #[test]
    fn bad_files_say_what_is_wrong() {
        let error = |result: Result<Routing>| format!("{:#}", result.unwrap_err());
        let too_high = error(read("high", Dtype::U8, &[1, 2, 1], &[0, 4], "4"));
        assert!(too_high.contains("holds 4"), "{too_high}");
        let negative = error(read(
            "minus",
            Dtype::I32,
            &[1, 1, 1],
            &(-1i32).to_le_bytes(),
            "4",
        ));
        assert!(negative.contains("holds -1"), "{negative}");
        let flat = error(read("flat", Dtype::U8, &[2], &[0, 1], "4"));
        assert!(flat.contains("[layers, tokens, k]"), "{flat}");
        let wrong_type = error(read("i8", Dtype::I8, &[1, 2, 1], &[0, 1], "4"));
        assert!(wrong_type.contains("I8"), "{wrong_type}");
        let experts = error(read("experts", Dtype::U8, &[1, 2, 1], &[0, 1], "many"));
        assert!(experts.contains("many"), "{experts}");
    }
}
