use crate::attention::{LayerCache, SequenceCache};

/// Keys and values of the tokens that a rank's sequences have behind them, of all layers, for
/// [`Decoder::forward_cached`](crate::Decoder::forward_cached).
///
/// Multi-head latent attention keeps its compressed vectors and rotated keys, grouped-query attention
/// keys and values, a sparse indexer its own keys. Sequences grow each by itself.
///
/// The indexer's exact ties fall as in PyTorch, where they depend on how many keys a forward pass
/// has in all. The prompts' lengths, given beforehand, make a prompt read in parts come out as read
/// at once.
#[derive(Debug, Clone)]
pub struct KvCache {
    pub(crate) sequences: Vec<SequenceCache>,
    pub(crate) layers: Vec<LayerCache>,
}

/// Why tokens cannot be put behind those in a [`KvCache`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// The batch has not as many sequences as the cache.
    #[error("the batch has {found} sequences, the cache {expected}")]
    Sequences {
        /// Of the batch.
        found: usize,
        /// Of the cache.
        expected: usize,
    },
    /// A sequence becomes longer than the model allows.
    #[error(
        "sequence {sequence} would have {length} tokens, at most max_sequence_length ({longest}) \
         are allowed"
    )]
    TooLong {
        /// Which.
        sequence: usize,
        /// Tokens it would have.
        length: usize,
        /// Tokens the model allows.
        longest: usize,
    },
}

impl KvCache {
    /// Room for prompts of these lengths and `more` tokens behind each; what becomes longer is moved
    /// to twice the room.
    pub(crate) fn new(layers: usize, prompts: &[usize], more: usize) -> Self {
        let sequences = prompts.iter().enumerate().map(|(i, prompt)| SequenceCache {
            sequence: i,
            past: 0,
            prompt: *prompt,
            room: prompt + more,
        });
        Self {
            sequences: sequences.collect(),
            layers: vec![LayerCache::new(prompts.len()); layers],
        }
    }

    /// Tokens of each sequence so far.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.sequences.iter().map(|sequence| sequence.past)
    }

    /// Bytes allocated for all layers, room for tokens to come included.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerCache::bytes).sum()
    }

    /// Checks that the sequences may go on by these lengths.
    pub(crate) fn check(&self, lengths: &[usize], longest: usize) -> Result<(), CacheError> {
        if lengths.len() != self.sequences.len() {
            return Err(CacheError::Sequences {
                found: lengths.len(),
                expected: self.sequences.len(),
            });
        }
        for (sequence, new) in self.sequences.iter().zip(lengths) {
            let length = sequence.past + new;
            if length > longest {
                return Err(CacheError::TooLong {
                    sequence: sequence.sequence,
                    length,
                    longest,
                });
            }
        }
        Ok(())
    }

    /// The sequences have gone on by these lengths.
    pub(crate) fn advance(&mut self, lengths: &[usize]) {
        for (sequence, new) in self.sequences.iter_mut().zip(lengths) {
            sequence.past += new;
        }
    }
}
