//! Checkpoint file with the samples so far, so that `--continue` resumes an interrupted run or adds
//! repetitions.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::Machine;
use super::samples::{Samples, System};

/// Name of the file in the benchmark's folder.
const FILE: &str = "samples.json";

/// The checkpoint file of one measurement.
pub(super) struct Checkpoint {
    path: PathBuf,
    conditions: Conditions,
}

/// Conditions that must be equal for repetitions of one measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Conditions {
    version: String,
    machine: String,
    prompts: u64,
    prompt_tokens: u64,
    layers: u64,
    dtype: String,
    systems: Vec<System>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    conditions: Conditions,
    repetitions: usize,
    samples: Samples,
}

impl Checkpoint {
    /// Returns the file of a measurement in `folder`.
    pub(super) fn new(folder: &std::path::Path, machine: &Machine, systems: Vec<System>) -> Checkpoint {
        let conditions = Conditions {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machine: machine.machine.clone(),
            prompts: machine.prompts,
            prompt_tokens: machine.prompt_tokens,
            layers: machine.layers,
            dtype: machine.dtype.to_owned(),
            systems,
        };
        Checkpoint { path: folder.join(FILE), conditions }
    }

    /// Reads the number of repetitions and their samples.
    ///
    /// # Errors
    /// The file does not exist, is invalid, or belongs to another measurement.
    pub(super) fn read(&self) -> anyhow::Result<(usize, Samples)> {
        let text = fs::read_to_string(&self.path).with_context(|| {
            format!("nothing to continue: cannot read {}; omit --continue", self.path.display())
        })?;
        let content: Content = serde_json::from_str(&text)
            .with_context(|| format!("{} has no samples of this version", self.path.display()))?;
        ensure!(
            content.conditions == self.conditions,
            "{} was measured under other conditions ({:?}, expected {:?}): omit --continue to start again",
            self.path.display(),
            content.conditions,
            self.conditions
        );
        Ok((content.repetitions, content.samples))
    }

    /// Writes the samples after a number of repetitions, atomically by a rename.
    pub(super) fn write(&self, repetitions: usize, samples: &Samples) -> anyhow::Result<()> {
        let content = Content { conditions: self.conditions.clone(), repetitions, samples: samples.clone() };
        let new = self.path.with_extension("new");
        let text = serde_json::to_string(&content).context("encoding samples")?;
        fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
        fs::rename(&new, &self.path).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::engine::Answer;
    use super::super::samples::Leg;
    use super::*;
    use reprise_testkit::bench::process_memory::ProcessMemory;

    fn machine(tokens: u64) -> Machine {
        Machine {
            bench: "vllm",
            machine: "this one".to_owned(),
            repetitions: 5,
            prompts: 6,
            prompt_tokens: tokens,
            layers: 8,
            dtype: "bfloat16",
            kv_bytes_per_prompt: 1,
            samples: "",
            memory_held: "",
            memory_peak: "",
        }
    }

    #[test]
    fn reads_written_samples_only_for_the_same_measurement() {
        let folder = std::env::temp_dir().join(format!("reprise-checkpoint-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("writable");
        let systems = || vec![System::Reprise, System::MooncakeTcp];
        let checkpoint = Checkpoint::new(&folder, &machine(4096), systems());
        assert!(checkpoint.read().expect_err("no file").to_string().contains("omit --continue"));
        let mut samples = Samples::default();
        samples.begin(1);
        let answer = Answer { ttft_ms: 1.5, ttlt_ms: 2.5, tokens: vec![7], cached: 0 };
        samples.answered((System::Reprise, Leg::Peer), &[3], std::slice::from_ref(&answer), 1.0);
        samples.missed(&[4], std::slice::from_ref(&answer), std::slice::from_ref(&answer));
        samples.held(System::Reprise, ProcessMemory { now: 5, peak: 6 });
        samples.started(System::Reprise, 3);
        samples.took(System::Reprise, 7.5);
        checkpoint.write(2, &samples).expect("the file is written");
        let (repetitions, read) = checkpoint.read().expect("the file exists");
        assert_eq!(repetitions, 2);
        assert_eq!(format!("{read:?}"), format!("{samples:?}"));
        let other =
            Checkpoint::new(&folder, &machine(512), systems()).read().expect_err("another measurement");
        assert!(other.to_string().contains("other conditions"), "{other}");
        fs::remove_dir_all(&folder).expect("the folder is ours");
    }
}
