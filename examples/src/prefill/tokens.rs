//! From prompts to tokens, and back to what is shown.

use std::path::Path;

use super::PrefillArgs;
use crate::cli::{CliError, check};
use crate::data::DataError;
use crate::tokenizer;

/// What tokens stand for.
pub(super) enum Tokens {
    /// Bytes of a text file's lines.
    Bytes,
    /// Given as numbers.
    Ids,
    /// Pieces of text, as the model's tokenizer cuts it.
    Text(std::path::PathBuf, Box<tokenizers::Tokenizer>),
}

impl Tokens {
    /// Numbers with `--ids`; for text the tokenizer of a Hugging Face folder, bytes for others.
    pub fn open(args: &PrefillArgs) -> Result<Self, CliError> {
        match (&args.ids, &args.model) {
            (Some(_), _) => Ok(Self::Ids),
            (None, None) => Ok(Self::Bytes),
            (None, Some(folder)) => match tokenizer::open(folder)? {
                Some((path, tokenizer)) => Ok(Self::Text(path, Box::new(tokenizer))),
                None => Err(CliError::Tokenizer {
                    path: folder.join(tokenizer::FILE),
                    message: "missing; --prompt needs it, --ids does not".into(),
                }),
            },
        }
    }

    /// For the report.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Ids => "ids",
            Self::Text(..) => "text",
        }
    }

    /// The prompts of `--prompt` or `--ids`, at least one and none empty.
    pub fn prompts(&self, args: &PrefillArgs) -> Result<Vec<Vec<u32>>, CliError> {
        let (option, path) = match (&args.ids, &args.prompt) {
            (Some(path), _) => ("--ids", path.clone()),
            (None, path) => ("--prompt", path.clone().unwrap_or_default()),
        };
        let io = |source| DataError::Io {
            option,
            path: path.clone(),
            source,
        };
        let bytes = std::fs::read(&path).map_err(io)?;
        if let Self::Ids = self {
            return ids(&path, &bytes);
        }
        let readable = matches!(self, Self::Bytes) || std::str::from_utf8(&bytes).is_ok();
        check(readable, option, path.display(), || "UTF-8 text".into())?;
        let lines = bytes
            .split(|byte| *byte == b'\n')
            .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
            .filter(|line| !line.is_empty());
        let prompts: Result<Vec<_>, _> = lines.map(|line| self.encode(line)).collect();
        let prompts = prompts?;
        check(!prompts.is_empty(), option, path.display(), || {
            "a file with at least one line that is not empty".into()
        })?;
        Ok(prompts)
    }

    fn encode(&self, line: &[u8]) -> Result<Vec<u32>, CliError> {
        match self {
            Self::Text(path, tokenizer) => {
                let text = String::from_utf8_lossy(line);
                let fault = |error| CliError::Tokenizer {
                    path: path.clone(),
                    message: format!("{text:?}: {error}"),
                };
                let encoding = tokenizer.encode(text.as_ref(), true).map_err(fault)?;
                Ok(encoding.get_ids().to_vec())
            }
            Self::Bytes | Self::Ids => Ok(line.iter().map(|byte| u32::from(*byte)).collect()),
        }
    }

    /// Tokens as they are shown.
    pub fn text(&self, ids: &[u32]) -> String {
        match self {
            Self::Ids => format!("{ids:?}"),
            Self::Bytes => {
                let bytes: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Self::Text(_, tokenizer) => {
                let text = tokenizer.decode(ids, true);
                text.unwrap_or_else(|_| format!("{ids:?}"))
            }
        }
    }
}

fn ids(path: &Path, bytes: &[u8]) -> Result<Vec<Vec<u32>>, CliError> {
    let (prompts, fault) = match serde_json::from_slice::<Vec<Vec<u32>>>(bytes) {
        Ok(prompts) => (prompts, String::new()),
        Err(error) => (Vec::new(), format!(" ({error})")),
    };
    let usable = !prompts.is_empty() && prompts.iter().all(|prompt| !prompt.is_empty());
    check(usable, "--ids", path.display(), || {
        format!("a JSON list of lists of token ids, none of them empty{fault}")
    })?;
    Ok(prompts)
}
