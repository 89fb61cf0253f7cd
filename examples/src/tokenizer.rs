//! The tokenizer of a Hugging Face folder.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use crate::cli::CliError;

/// The file it is in.
pub(crate) const FILE: &str = "tokenizer.json";

/// The folder's tokenizer and its file, if there is one.
pub(crate) fn open(folder: &Path) -> Result<Option<(PathBuf, Tokenizer)>, CliError> {
    let path = folder.join(FILE);
    let fault = |message: String| CliError::Tokenizer {
        path: path.clone(),
        message,
    };
    if !path.exists() {
        return Ok(None);
    }
    let mut tokenizer =
        Tokenizer::from_file(&path).map_err(|error| fault(format!("not a tokenizer: {error}")))?;
    // Texts are packed, so none is filled up to a length, and none is cut off unasked.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .map_err(|error| fault(error.to_string()))?;
    Ok(Some((path, tokenizer)))
}
