//! What is trained: a model of a config, or one loaded from a folder.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::Device;
use burn_moe::parallel::ExpertParallel;
use burn_moe_models::hf::{Folder, check_target};
use burn_moe_models::{Decoder, ModelConfig, Scale, checkpoint, pretrained};
use tokenizers::Tokenizer;

use super::TrainArgs;
use crate::cli::{CliError, check};
use crate::data::Corpus;
use crate::tokenizer;

/// The model, and how text becomes its tokens.
pub struct Subject {
    /// As asked for.
    pub name: String,
    pub config: ModelConfig,
    folder: Option<Folder>,
    tokenizer: Option<Tokenizer>,
}

impl Subject {
    /// Reads what the options name, and checks them against it.
    pub fn open(args: &TrainArgs) -> Result<Self, CliError> {
        let subject = match &args.model {
            Some(path) => Self::of_folder(path)?,
            None => Self::of_config(args)?,
        };
        args.validate(&subject.config)?;
        if let Some(target) = &args.checkpoint {
            checkpoint::check_target(target, &subject.config)?;
        }
        if let Some(target) = &args.save {
            check_target(target)?;
        }
        Ok(subject)
    }

    fn of_config(args: &TrainArgs) -> Result<Self, CliError> {
        let mut name = args.config.clone();
        let mut config = ModelConfig::resolve(&name)?;
        if let Some(scale) = args.scale {
            config = config.scaled(scale).map_err(|error| {
                let value = format!("{scale}, and so {} {}", error.field, error.value);
                CliError::option("--scale", value, error.allowed)
            })?;
            if scale != Scale::ONE {
                name = format!("{name} x {scale}");
            }
        }
        if let Some(layers) = args.layers {
            config = config
                .with_layers(layers)
                .map_err(|error| CliError::option("--layers", error.value, error.allowed))?;
            name = format!("{name}, {layers} layers");
        }
        check(config.vocab_size >= 256, "--config", &args.config, || {
            format!(
                "configs with a vocab_size of 256 or more, bytes are the vocabulary (it has {})",
                config.vocab_size
            )
        })?;
        Ok(Self {
            name,
            config,
            folder: None,
            tokenizer: None,
        })
    }

    fn of_folder(path: &Path) -> Result<Self, CliError> {
        let folder = Folder::open(path)?;
        let config = pretrained::read_config(&folder)?;
        let tokenizer = tokenizer::open(path)?.map(|(_, tokenizer)| tokenizer);
        check(
            tokenizer.is_some() || config.vocab_size >= 256,
            "--model",
            path.display(),
            || {
                format!(
                    "folders with a tokenizer.json, or with a vocab_size of 256 or more, so that \
                     bytes can be the tokens (it is {})",
                    config.vocab_size
                )
            },
        )?;
        Ok(Self {
            name: path.display().to_string(),
            config,
            folder: Some(folder),
            tokenizer,
        })
    }

    /// Whether the model comes from a folder.
    pub fn folder(&self) -> Option<&Folder> {
        self.folder.as_ref()
    }

    /// What a token is: `byte` or `token`.
    pub fn unit(&self) -> &'static str {
        match self.tokenizer {
            Some(_) => "token",
            None => "byte",
        }
    }

    /// The text to train on.
    pub fn corpus(&self, args: &TrainArgs) -> Result<Corpus, CliError> {
        let needed = args.tokens_per_step();
        let least = (args.sequence_length + 1).min(needed);
        let wanted = args.steps * needed + 1;
        let data = args.data.as_deref();
        let Some(tokenizer) = &self.tokenizer else {
            return Ok(Corpus::read(data, wanted, least, args.seed)?);
        };
        // A token is some bytes; hardly ever more than eight on average.
        let text = Corpus::read(data, 8 * wanted, least, args.seed)?;
        let vocabulary = self.config.vocab_size;
        Ok(text.tokens(tokenizer, vocabulary, wanted, least)?)
    }

    /// One rank's part of the model.
    pub fn model(
        &self,
        ep: &Arc<ExpertParallel>,
        seed: u64,
        device: &Device,
    ) -> Result<Decoder, CliError> {
        Ok(match &self.folder {
            Some(folder) => pretrained::load(&self.config, ep, folder, device)?,
            None => self.config.init(ep, seed, device)?,
        })
    }
}
