use std::ops::Range;

use rayon::prelude::*;

use super::element::Element;
use super::error::HfError;
use super::folder::Folder;
use super::matrix::Matrix;
use super::read::{map_pages, zeros};

/// How the experts of a layer are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpertLayout {
    /// Three matrices an expert: gate and up `[d_hidden, d_model]`, down `[d_model, d_hidden]`.
    PerExpert {
        /// Their names after `experts.N.`, in this order: gate, up, down.
        parts: [&'static str; 3],
    },
    /// Two tensors a layer: `gate_up_proj [experts, 2 * d_hidden, d_model]` with the gate first, and
    /// `down_proj [experts, d_model, d_hidden]`.
    Fused,
}

const PROJ: [&str; 3] = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"];
const W: [&str; 3] = ["w1.weight", "w3.weight", "w2.weight"];

/// The names of a layer's experts.
#[derive(Debug, Clone)]
pub(super) struct ExpertNames {
    /// Up to and including `experts`.
    prefix: String,
    layout: ExpertLayout,
}

impl ExpertNames {
    /// Finds out which names are there; otherwise gives the most common one.
    pub fn find(layer: &str, contains: impl Fn(&str) -> bool) -> Result<Self, String> {
        let layouts = [
            (String::from("gate_up_proj"), ExpertLayout::Fused),
            (
                format!("0.{}", PROJ[0]),
                ExpertLayout::PerExpert { parts: PROJ },
            ),
            (format!("0.{}", W[0]), ExpertLayout::PerExpert { parts: W }),
        ];
        for block in ["mlp", "block_sparse_moe"] {
            let prefix = format!("{layer}.{block}.experts");
            for (first, layout) in &layouts {
                if contains(&format!("{prefix}.{first}")) {
                    let layout = layout.clone();
                    return Ok(Self { prefix, layout });
                }
            }
        }
        Err(format!("{layer}.mlp.experts.0.{}", PROJ[0]))
    }

    /// When fused: gate and up, down.
    pub fn fused(&self) -> Option<[String; 2]> {
        let name = |part: &str| format!("{}.{part}", self.prefix);
        (self.layout == ExpertLayout::Fused).then(|| [name("gate_up_proj"), name("down_proj")])
    }

    /// Otherwise, of one expert: gate, up, down.
    pub fn of(&self, expert: usize) -> [String; 3] {
        let parts = match self.layout {
            ExpertLayout::PerExpert { parts } => parts,
            ExpertLayout::Fused => PROJ,
        };
        parts.map(|part| format!("{}.{expert}.{part}", self.prefix))
    }
}

/// The routed experts of one layer of a [`Folder`], in whichever layout they are stored.
///
/// They are read in the layout of `burn-moe`'s grouped experts: `gate_up [d_model, 2 * d_hidden]`
/// with the gate first, `down [d_hidden, d_model]`.
#[derive(Debug, Clone)]
pub struct Experts<'a> {
    folder: &'a Folder,
    names: ExpertNames,
    num_experts: usize,
    d_model: usize,
    d_hidden: usize,
}

impl<'a> Experts<'a> {
    /// The experts of layer `layer` (such as `model.layers.3`), under `mlp.experts` or
    /// `block_sparse_moe.experts`.
    ///
    /// # Errors
    ///
    /// [`HfError::Missing`] when there are none; names the tensor of the most common layout.
    pub fn find(
        folder: &'a Folder,
        layer: &str,
        num_experts: usize,
        d_model: usize,
        d_hidden: usize,
    ) -> Result<Self, HfError> {
        let names = ExpertNames::find(layer, |name| folder.contains(name))
            .map_err(|name| folder.missing(&name))?;
        Ok(Self {
            folder,
            names,
            num_experts,
            d_model,
            d_hidden,
        })
    }

    /// How they are stored.
    pub fn layout(&self) -> &ExpertLayout {
        &self.names.layout
    }

    /// The names of all their tensors, without FP8 scales.
    pub fn names(&self) -> Vec<String> {
        match self.names.fused() {
            Some(names) => names.into(),
            None => (0..self.num_experts)
                .flat_map(|expert| self.names.of(expert))
                .collect(),
        }
    }

    /// Bytes on disk of some experts, with their FP8 scales.
    pub fn bytes_of(&self, experts: Range<usize>) -> u64 {
        if let Some(names) = self.names.fused() {
            let all: u64 = names.iter().map(|name| self.folder.bytes_of(name)).sum();
            return all / self.num_experts.max(1) as u64 * experts.len() as u64;
        }
        let names = experts.flat_map(|expert| self.names.of(expert));
        names.map(|name| self.folder.bytes_of(&name)).sum()
    }

    /// Reads one expert.
    ///
    /// # Errors
    ///
    /// As [`Folder::read`]. `gate_up` and `down` are then in an unknown state.
    ///
    /// # Panics
    ///
    /// When `expert` is not below `num_experts`, or the lengths of `gate_up` (`d_model * 2 *
    /// d_hidden`) or `down` (`d_hidden * d_model`) are wrong.
    pub fn read_into<E: Element>(
        &self,
        expert: usize,
        gate_up: &mut [E],
        down: &mut [E],
    ) -> Result<(), HfError> {
        let (d, f) = (self.d_model, self.d_hidden);
        assert!(expert < self.num_experts, "expert {expert}");
        assert_eq!(gate_up.len(), d * 2 * f, "length of gate_up");
        assert_eq!(down.len(), f * d, "length of down");
        if let Some([gate_up_name, down_name]) = self.names.fused() {
            let n = self.num_experts;
            Matrix::find(self.folder, &gate_up_name, &[n, 2 * f, d], expert)?.read_transposed_into(
                gate_up,
                2 * f,
                0,
            );
            Matrix::find(self.folder, &down_name, &[n, d, f], expert)?
                .read_transposed_into(down, d, 0);
            return Ok(());
        }
        let [gate, up, down_name] = self.names.of(expert);
        let find = |name: &str, shape: [usize; 2]| Matrix::find(self.folder, name, &shape, 0);
        find(&gate, [f, d])?.read_transposed_into(gate_up, 2 * f, 0);
        find(&up, [f, d])?.read_transposed_into(gate_up, 2 * f, f);
        find(&down_name, [d, f])?.read_transposed_into(down, d, 0);
        Ok(())
    }

    /// Reads some experts on all threads of the current rayon pool: `gate_up [count, d_model,
    /// 2 * d_hidden]` and `down [count, d_hidden, d_model]`.
    ///
    /// # Errors
    ///
    /// As [`Folder::read`].
    ///
    /// # Panics
    ///
    /// When the range goes beyond `num_experts`.
    pub fn read<E: Element>(&self, experts: Range<usize>) -> Result<(Vec<E>, Vec<E>), HfError> {
        self.read_noting(experts, |_| ())
    }

    /// [`read`](Self::read); calls `done` with each expert that has been read.
    pub(crate) fn read_noting<E: Element>(
        &self,
        experts: Range<usize>,
        done: impl Fn(usize) + Sync,
    ) -> Result<(Vec<E>, Vec<E>), HfError> {
        let num_experts = self.num_experts;
        assert!(experts.end <= num_experts, "{experts:?} of {num_experts}");
        let len = self.d_model * self.d_hidden;
        let mut gate_up = zeros(experts.len() * 2 * len);
        let mut down = zeros(experts.len() * len);
        gate_up
            .par_chunks_exact_mut((2 * len).max(1))
            .zip(down.par_chunks_exact_mut(len.max(1)))
            .enumerate()
            .try_for_each(|(i, (gate_up, down))| {
                map_pages(gate_up);
                map_pages(down);
                self.read_into(experts.start + i, gate_up, down)?;
                done(experts.start + i);
                Ok(())
            })?;
        Ok((gate_up, down))
    }
}
