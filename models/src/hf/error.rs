use std::path::{Path, PathBuf};

/// Why a Hugging Face folder cannot be read or written. Every variant names the file, and the
/// tensor where there is one.
#[derive(Debug, thiserror::Error)]
pub enum HfError {
    /// A file cannot be read or written.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file or folder.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A JSON file, or the header of a shard, is not what it should be.
    #[error("{}: {message}", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The index names a shard that is not a plain file name.
    #[error(
        "{}: tensor {tensor} is said to be in {shard:?}; allowed are plain names of .safetensors \
         files in the same folder",
        file.display()
    )]
    ShardName {
        /// The index.
        file: PathBuf,
        /// A tensor of the shard.
        tensor: String,
        /// The name that was refused.
        shard: String,
    },
    /// A shard is shorter than its header says.
    #[error("{}: truncated: {found} bytes, its header needs {expected}{}", file.display(), last_tensor(tensor))]
    Truncated {
        /// The shard.
        file: PathBuf,
        /// The first tensor that is not complete, unless the header itself is not.
        tensor: Option<String>,
        /// Bytes the file should have.
        expected: u64,
        /// Bytes it has.
        found: u64,
    },
    /// A tensor is not there.
    #[error("{}: tensor {tensor} is missing", file.display())]
    Missing {
        /// The shard that should hold it, or the folder.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor that the model has no place for.
    #[error("{}: tensor {tensor} has no place in the model", file.display())]
    Surplus {
        /// The shard that holds it.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor has another shape than the model's.
    #[error("{}: tensor {tensor} has shape {found:?}, the model needs {expected:?}", file.display())]
    Shape {
        /// The shard.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The model's shape.
        expected: Vec<usize>,
        /// The tensor's shape.
        found: Vec<usize>,
    },
    /// A tensor has elements of a kind that cannot be read here.
    #[error("{}: tensor {tensor} has elements {dtype}; allowed here: {allowed}", file.display())]
    Dtype {
        /// The shard.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its kind of elements, as safetensors writes it.
        dtype: String,
        /// What can be read.
        allowed: &'static str,
    },
    /// A tensor that must be finite is not: a router's weight or bias, or scales.
    #[error("{}: tensor {tensor} has {value} at {index}; only finite values are allowed", file.display())]
    NotFinite {
        /// The shard.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first such element, counted in row-major order.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// The folder to save to holds something else.
    #[error("{}: {message}; nothing was written", folder.display())]
    Occupied {
        /// The folder.
        folder: PathBuf,
        /// What it holds.
        message: String,
    },
    /// Saving ends although a tensor was not written completely.
    #[error("{}: tensor {tensor}: {written} of {expected} bytes were written", file.display())]
    Unwritten {
        /// The shard.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Bytes written.
        written: u64,
        /// Bytes it has.
        expected: u64,
    },
}

fn last_tensor(tensor: &Option<String>) -> String {
    match tensor {
        Some(tensor) => format!("; tensor {tensor} is not complete"),
        None => String::new(),
    }
}

pub(super) fn io(file: &Path) -> impl FnOnce(std::io::Error) -> HfError {
    move |source| HfError::Io {
        file: file.into(),
        source,
    }
}

pub(super) fn format_error(file: &Path, message: impl Into<String>) -> HfError {
    HfError::Format {
        file: file.into(),
        message: message.into(),
    }
}
