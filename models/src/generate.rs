use burn_moe::comm::{CommError, Communicator, Key, Op};

use crate::{CacheError, Decoder, DecoderOutput, KvCache, LogitsOf, TokenBatch};

/// How a [`Generation`] reads and writes.
#[derive(Debug, Clone, Default)]
pub struct GenerateOptions {
    /// Most tokens of a prompt that one forward pass reads; 0: all.
    pub chunk: usize,
    /// Tokens to write behind each prompt.
    pub max_new_tokens: usize,
    /// Ids of tokens that end a sequence.
    pub eos: Vec<u32>,
    /// Only ids below are written; 0: the whole vocabulary.
    pub candidates: usize,
}

/// Why prompts cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// A prompt has no tokens.
    #[error("prompt {prompt} is empty; 1 or more tokens are needed")]
    Empty {
        /// Which, counted from 0.
        prompt: usize,
    },
    /// A prompt has an id that the vocabulary has not.
    #[error("prompt {prompt} has the id {id}; allowed are ids below vocab_size ({vocab_size})")]
    Id {
        /// Which, counted from 0.
        prompt: usize,
        /// The id.
        id: u32,
        /// Ids of the vocabulary.
        vocab_size: usize,
    },
    /// A prompt and what is written behind it become too long.
    #[error(
        "prompt {prompt} of {length} tokens with {more} more becomes longer than the model's \
         max_sequence_length ({longest})"
    )]
    TooLong {
        /// Which, counted from 0.
        prompt: usize,
        /// Its tokens.
        length: usize,
        /// Tokens to write.
        more: usize,
        /// Tokens the model allows.
        longest: usize,
    },
    /// The cache refuses a batch.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Another rank was lost or too late.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// A rank's prompts, read in chunks and continued greedily, with their keys and values kept.
///
/// With expert parallelism all ranks must call its methods alike, even without prompts: forward
/// passes go on until the last rank is done.
pub struct Generation<'a> {
    decoder: &'a Decoder,
    comm: &'a dyn Communicator,
    options: GenerateOptions,
    prompts: &'a [Vec<u32>],
    written: Vec<Vec<u32>>,
    cache: KvCache,
    /// Exchanges with the other ranks so far.
    agreed: u64,
}

impl<'a> Generation<'a> {
    /// # Errors
    ///
    /// When a prompt is empty, has an unknown id, or becomes too long for the model.
    pub fn new(
        decoder: &'a Decoder,
        comm: &'a dyn Communicator,
        prompts: &'a [Vec<u32>],
        options: GenerateOptions,
    ) -> Result<Self, GenerateError> {
        let (vocab_size, longest) = (decoder.vocab_size(), decoder.max_sequence_length());
        for (prompt, ids) in prompts.iter().enumerate() {
            let length = ids.len();
            if length == 0 {
                return Err(GenerateError::Empty { prompt });
            }
            if let Some(id) = ids.iter().find(|id| **id as usize >= vocab_size) {
                let id = *id;
                return Err(GenerateError::Id {
                    prompt,
                    id,
                    vocab_size,
                });
            }
            let more = options.max_new_tokens;
            if length.saturating_add(more) > longest {
                return Err(GenerateError::TooLong {
                    prompt,
                    length,
                    more,
                    longest,
                });
            }
        }
        let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
        Ok(Self {
            decoder,
            comm,
            cache: decoder.cache(&lengths, options.max_new_tokens.saturating_sub(1)),
            written: vec![Vec::new(); prompts.len()],
            prompts,
            options,
            agreed: 0,
        })
    }

    /// Reads the prompts and writes the first token behind each. `seen` gets every forward pass and
    /// the tokens it read; its logits are those of `logits`.
    ///
    /// # Errors
    ///
    /// When a rank is lost or too late.
    pub fn prefill(
        &mut self,
        logits: LogitsOf,
        mut seen: impl FnMut(&TokenBatch, &DecoderOutput),
    ) -> Result<(), GenerateError> {
        let chunk = match self.options.chunk {
            0 => usize::MAX,
            chunk => chunk,
        };
        while self.any(self.unread() > 0)? {
            let parts = self.prompts.iter().zip(self.cache.lengths());
            let parts = parts
                .map(|(prompt, past)| &prompt[past..past.saturating_add(chunk).min(prompt.len())]);
            let batch = TokenBatch::new(parts);
            let out = self
                .decoder
                .forward_cached(&batch, &mut self.cache, logits)?;
            seen(&batch, &out);
            self.write(&batch, out, logits);
        }
        Ok(())
    }

    /// Goes on writing until every sequence of every rank has its end or `max_new_tokens`. `seen`
    /// gets every forward pass.
    ///
    /// # Errors
    ///
    /// When a rank is lost or too late.
    pub fn decode(
        &mut self,
        mut seen: impl FnMut(&TokenBatch, &DecoderOutput),
    ) -> Result<(), GenerateError> {
        loop {
            let last = self.written.iter().map(|written| match written.as_slice() {
                [.., last] if !self.ended(written) => std::slice::from_ref(last),
                _ => &[],
            });
            let batch = TokenBatch::new(last);
            if !self.any(!batch.ids.is_empty())? {
                return Ok(());
            }
            let logits = LogitsOf::Last;
            let out = self
                .decoder
                .forward_cached(&batch, &mut self.cache, logits)?;
            seen(&batch, &out);
            self.write(&batch, out, logits);
        }
    }

    /// Tokens written behind each prompt, the one that ends a sequence included.
    pub fn written(&self) -> &[Vec<u32>] {
        &self.written
    }

    /// The keys and values.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Forward passes that reading takes when the longest prompt of all ranks has `longest` tokens.
    pub fn passes(longest: usize, chunk: usize) -> usize {
        match chunk {
            0 => longest.min(1),
            chunk => longest.div_ceil(chunk),
        }
    }

    fn unread(&self) -> usize {
        let of = |(prompt, past): (&Vec<u32>, usize)| prompt.len().saturating_sub(past);
        self.prompts.iter().zip(self.cache.lengths()).map(of).sum()
    }

    fn ended(&self, written: &[u32]) -> bool {
        written.len() >= self.options.max_new_tokens
            || written
                .last()
                .is_some_and(|last| self.options.eos.contains(last))
    }

    /// Whether it is so on any rank.
    fn any(&mut self, here: bool) -> Result<bool, GenerateError> {
        let key = Key::new(Op::AllGather, self.agreed, u32::MAX);
        self.agreed += 1;
        let all = self.comm.all_gather(key, vec![u8::from(here)].into())?;
        Ok(all.iter().any(|rank| rank.as_ref() != [0]))
    }

    /// Writes what the model holds most likely behind each sequence whose last token was read.
    fn write(&mut self, batch: &TokenBatch, out: DecoderOutput, of: LogitsOf) {
        let [_, vocab_size] = out.logits.dims();
        let candidates = match self.options.candidates {
            0 => vocab_size,
            some => some.min(vocab_size),
        };
        if self.options.max_new_tokens == 0 {
            return;
        }
        let logits: Vec<f32> = out.logits.into_data().iter().collect();
        let mut end = 0;
        for (i, length) in batch.lengths.iter().enumerate().filter(|(_, n)| **n > 0) {
            end += match of {
                LogitsOf::All => *length,
                LogitsOf::Last => 1,
            };
            let past = self.cache.sequences[i].past;
            if past < self.prompts[i].len() {
                continue;
            }
            let row = &logits[(end - 1) * vocab_size..][..candidates];
            // The first of equals wins.
            let next = (0..candidates)
                .rev()
                .max_by(|a, b| row[*a].total_cmp(&row[*b]));
            self.written[i].extend(next.map(|id| id as u32));
        }
    }
}
