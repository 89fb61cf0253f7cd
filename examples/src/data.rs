//! Text to train on: bytes of files, in an order that the seed decides, or the tokens they become.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use tokenizers::Tokenizer;
use twox_hash::XxHash3_128;

/// Bytes taken from one file at most, so that a batch or two see one file and the next another.
const MOST_OF_A_FILE: usize = 32 << 10;

/// Endings of the files in the sources of crates that are read.
const ENDINGS: [&str; 3] = ["rs", "md", "toml"];

/// Why there is nothing to train on.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file or folder cannot be read.
    #[error("{option}: {}: {source}", path.display())]
    Io {
        /// The option that names it.
        option: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is not a single byte.
    #[error("--data: {}: no text in it (at least {needed} bytes are needed)", path.display())]
    TooShort {
        /// The file or folder.
        path: PathBuf,
        /// Bytes that one step needs.
        needed: usize,
    },
    /// The text cannot be turned into tokens of the model.
    #[error("--data: {source_name}: {message}")]
    Tokens {
        /// Where the text comes from.
        source_name: String,
        /// What is wrong.
        message: String,
    },
    /// The default data is not on this machine.
    #[error(
        "no sources of this workspace's dependencies found ({searched}); name some text by \
         --data FILE_OR_DIR"
    )]
    NoSources {
        /// Where they were looked for.
        searched: String,
    },
}

/// Tokens to train on.
#[derive(Debug, Clone)]
pub struct Corpus {
    bytes: Vec<u8>,
    /// What the bytes are as tokens of a tokenizer; without one each byte is a token.
    tokens: Option<Vec<u32>>,
    /// Where they come from, for the report.
    pub source: String,
}

impl Corpus {
    /// Reads `--data`, or the sources of this workspace's dependencies; at most `wanted` bytes. When
    /// there are fewer, they are repeated.
    ///
    /// # Errors
    ///
    /// When nothing is found, a file cannot be read, or there are fewer than `needed` bytes.
    pub fn read(
        data: Option<&Path>,
        wanted: usize,
        needed: usize,
        seed: u64,
    ) -> Result<Self, DataError> {
        let Some(path) = data else {
            return Self::dependencies(wanted, seed);
        };
        let metadata = fs::metadata(path).map_err(io(path))?;
        let bytes = if metadata.is_dir() {
            let mut files = Vec::new();
            list(path, &|_| true, &mut files).map_err(io(path))?;
            shuffled_excerpts(files, wanted, seed)?
        } else {
            let mut bytes = Vec::new();
            let file = File::open(path).map_err(io(path))?;
            file.take(wanted as u64)
                .read_to_end(&mut bytes)
                .map_err(io(path))?;
            bytes
        };
        if bytes.len() < needed {
            return Err(DataError::TooShort {
                path: path.into(),
                needed,
            });
        }
        Ok(Self {
            bytes,
            tokens: None,
            source: path.display().to_string(),
        })
    }

    fn dependencies(wanted: usize, seed: u64) -> Result<Self, DataError> {
        let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.lock");
        let packages = locked_packages(&fs::read_to_string(&lock).unwrap_or_default());
        let home = std::env::var_os("CARGO_HOME")
            .map(PathBuf::from)
            .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))
            .unwrap_or_default();
        let registry = home.join("registry/src");
        let mut files = Vec::new();
        for index in fs::read_dir(&registry).into_iter().flatten().flatten() {
            for package in &packages {
                // A package that this platform does not use is not there.
                let _ = list(&index.path().join(package), &is_source, &mut files);
            }
        }
        let bytes = shuffled_excerpts(files, wanted, seed)?;
        if bytes.is_empty() {
            return Err(DataError::NoSources {
                searched: format!("{} packages in {}", packages.len(), registry.display()),
            });
        }
        Ok(Self {
            bytes,
            tokens: None,
            source: format!("sources of {} crates pinned in Cargo.lock", packages.len()),
        })
    }

    /// The same text as tokens of `tokenizer`, at most `wanted`, without special ones.
    ///
    /// # Errors
    ///
    /// When the tokenizer refuses the text, gives fewer than `needed` tokens, or one that is not
    /// below `vocabulary`.
    pub fn tokens(
        self,
        tokenizer: &Tokenizer,
        vocabulary: usize,
        wanted: usize,
        needed: usize,
    ) -> Result<Self, DataError> {
        let fault = |message: String| DataError::Tokens {
            source_name: self.source.clone(),
            message,
        };
        let text = String::from_utf8_lossy(&self.bytes);
        let encoding = tokenizer
            .encode_fast(text.as_ref(), false)
            .map_err(|error| fault(format!("the tokenizer refuses it: {error}")))?;
        let mut ids = encoding.get_ids().to_vec();
        ids.truncate(wanted);
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
            return Err(fault(format!(
                "the tokenizer gives id {id}, the model has {vocabulary}"
            )));
        }
        if ids.len() < needed {
            return Err(fault(format!(
                "{} tokens (at least {needed} are needed)",
                ids.len()
            )));
        }
        Ok(Self {
            tokens: Some(ids),
            ..self
        })
    }

    /// Sequences `first..first + count` of `length` inputs each, with one more token as the last
    /// target. Neighbours are neighbours in the text.
    pub fn sequences(&self, first: usize, count: usize, length: usize) -> Vec<Vec<u32>> {
        let token = |at: usize| match &self.tokens {
            Some(tokens) => tokens[at % tokens.len()],
            None => u32::from(self.bytes[at % self.bytes.len()]),
        };
        (first..first + count)
            .map(|sequence| (0..=length).map(|i| token(sequence * length + i)).collect())
            .collect()
    }

    /// Of all tokens, to find out whether another run has the same: XXH3, 128 bits.
    pub fn checksum(&self) -> String {
        let mut hash = XxHash3_128::new();
        hash.write(&self.bytes);
        for token in self.tokens.iter().flatten() {
            hash.write(&token.to_le_bytes());
        }
        format!("{:032x}", hash.finish_128())
    }

    /// Where it comes from and how much it is, to be shown.
    pub fn describe(&self) -> String {
        let kib = self.bytes.len() / 1024;
        match &self.tokens {
            Some(tokens) => format!("{} ({kib} KiB, {} tokens)", self.source, tokens.len()),
            None => format!("{} ({kib} KiB)", self.source),
        }
    }
}

/// `name-version` of the registry packages in a Cargo.lock.
fn locked_packages(lock: &str) -> Vec<String> {
    let mut packages = Vec::new();
    let (mut name, mut version) = ("", "");
    for line in lock.lines() {
        let value = |key: &str| {
            line.strip_prefix(key)?
                .strip_prefix(" = \"")?
                .strip_suffix('"')
        };
        if let Some(value) = value("name") {
            name = value;
        } else if let Some(value) = value("version") {
            version = value;
        } else if value("source").is_some() {
            packages.push(format!("{name}-{version}"));
        }
    }
    packages
}

/// Files below `path` that `wanted` accepts, in an order that does not depend on the machine.
fn list(
    path: &Path,
    wanted: &dyn Fn(&Path) -> bool,
    files: &mut Vec<PathBuf>,
) -> std::io::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(path)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() {
            list(&path, wanted, files)?;
        } else if kind.is_file() && wanted(&path) {
            files.push(path);
        }
    }
    Ok(())
}

fn is_source(path: &Path) -> bool {
    path.extension()
        .is_some_and(|ending| ENDINGS.iter().any(|known| ending == *known))
}

/// An excerpt of each file, in an order drawn by the seed, until `wanted` bytes are there.
fn shuffled_excerpts(
    mut files: Vec<PathBuf>,
    wanted: usize,
    seed: u64,
) -> Result<Vec<u8>, DataError> {
    let mut rng = StdRng::seed_from_u64(seed);
    files.shuffle(&mut rng);
    let mut bytes = Vec::new();
    for path in files {
        if bytes.len() >= wanted {
            break;
        }
        let text = fs::read(&path).map_err(io(&path))?;
        let most = MOST_OF_A_FILE.min(wanted - bytes.len());
        let start = if text.len() > most {
            rng.random_range(0..text.len() - most)
        } else {
            0
        };
        bytes.extend_from_slice(&text[start..(start + most).min(text.len())]);
    }
    Ok(bytes)
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> DataError {
    move |source| DataError::Io {
        option: "--data",
        path: path.into(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides_the_order() {
        let folder = tempfile::tempdir().unwrap();
        for i in 0..20u8 {
            fs::write(folder.path().join(format!("{i}.txt")), [b'a' + i; 100]).unwrap();
        }
        let read = |seed| {
            Corpus::read(Some(folder.path()), 2000, 100, seed)
                .unwrap()
                .bytes
        };
        assert_eq!(read(1), read(1));
        assert_ne!(read(1), read(2));
        let (mut a, mut b) = (read(1), read(2));
        a.sort_unstable();
        b.sort_unstable();
        assert_eq!(a, b, "the same text in another order");
    }

    #[test]
    fn sequences_overlap_by_the_target() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("text");
        fs::write(&file, b"abcdefghij").unwrap();
        let corpus = Corpus::read(Some(&file), 100, 4, 0).unwrap();
        let text = |s: &Vec<u32>| s.iter().map(|b| *b as u8 as char).collect::<String>();
        let sequences = corpus.sequences(0, 3, 4);
        assert_eq!(
            sequences.iter().map(text).collect::<Vec<_>>(),
            ["abcde", "efghi", "ijabc"]
        );
    }

    #[test]
    fn empty_or_missing_data_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let read = |path: &Path| Corpus::read(Some(path), 100, 4, 0).unwrap_err().to_string();
        assert!(read(folder.path()).contains("no text"));
        assert!(read(&folder.path().join("absent")).contains("absent"));
    }

    #[test]
    fn packages_of_a_lock_file() {
        let lock = "[[package]]\nname = \"own\"\nversion = \"0.1.0\"\n\n[[package]]\nname = \
                    \"rand\"\nversion = \"0.10.4\"\nsource = \"registry+x\"\n";
        assert_eq!(locked_packages(lock), ["rand-0.10.4"]);
    }
}
