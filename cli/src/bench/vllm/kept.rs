//! What has been measured so far, in a file: a run of hours that was interrupted goes on with the repetition that it was in, and
//! repetitions may be run when the machine has nothing else to do.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::Machine;
use super::samples::{Samples, System};

/// Its name in the benchmark's folder.
const FILE: &str = "samples.json";

/// The file.
pub(super) struct Kept {
    path: PathBuf,
    conditions: Conditions,
}

/// What must be equal for repetitions to be of one measurement.
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

impl Kept {
    /// The file of a measurement in `folder`.
    pub(super) fn new(folder: &std::path::Path, machine: &Machine, systems: Vec<System>) -> Kept {
        let conditions = Conditions {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machine: machine.machine.clone(),
            prompts: machine.prompts,
            prompt_tokens: machine.prompt_tokens,
            layers: machine.layers,
            dtype: machine.dtype.to_owned(),
            systems,
        };
        Kept { path: folder.join(FILE), conditions }
    }

    /// What was measured before, and in how many repetitions.
    ///
    /// # Errors
    /// There is nothing, or it was another measurement.
    pub(super) fn read(&self) -> anyhow::Result<(usize, Samples)> {
        let text = fs::read_to_string(&self.path).with_context(|| {
            format!("nothing to continue: {} cannot be read; leave out --continue", self.path.display())
        })?;
        let content: Content = serde_json::from_str(&text)
            .with_context(|| format!("{} holds no samples of this version", self.path.display()))?;
        ensure!(
            content.conditions == self.conditions,
            "{} was measured otherwise, with {:?} and not {:?}: leave out --continue to begin anew",
            self.path.display(),
            content.conditions,
            self.conditions
        );
        Ok((content.repetitions, content.samples))
    }

    /// Keeps what there is after so many repetitions, in one piece.
    pub(super) fn write(&self, repetitions: usize, samples: &Samples) -> anyhow::Result<()> {
        let content = Content { conditions: self.conditions.clone(), repetitions, samples: samples.clone() };
        let beside = self.path.with_extension("new");
        let text = serde_json::to_string(&content).context("encoding samples")?;
        fs::write(&beside, text).with_context(|| format!("cannot write {}", beside.display()))?;
        fs::rename(&beside, &self.path).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::resident::Held;
    use super::super::engine::Answer;
    use super::super::samples::Leg;
    use super::*;

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
    fn what_was_measured_comes_back_as_it_was_and_not_into_another_measurement() {
        let folder = std::env::temp_dir().join(format!("reprise-kept-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("writable");
        let systems = || vec![System::Reprise, System::MooncakeTcp];
        let kept = Kept::new(&folder, &machine(4096), systems());
        assert!(kept.read().expect_err("there is none").to_string().contains("leave out --continue"));
        let mut samples = Samples::default();
        samples.begin(1);
        let answer = Answer { ttft_ms: 1.5, ttlt_ms: 2.5, tokens: vec![7], cached: 0 };
        samples.answered((System::Reprise, Leg::Peer), &[3], std::slice::from_ref(&answer), 1.0);
        samples.missed(&[4], std::slice::from_ref(&answer), std::slice::from_ref(&answer));
        samples.held(System::Reprise, Held { now: 5, peak: 6 });
        samples.started(System::Reprise, 3);
        samples.took(System::Reprise, 7.5);
        kept.write(2, &samples).expect("written");
        let (repetitions, read) = kept.read().expect("it is there");
        assert_eq!(repetitions, 2);
        assert_eq!(format!("{read:?}"), format!("{samples:?}"));
        let other = Kept::new(&folder, &machine(512), systems()).read().expect_err("another measurement");
        assert!(other.to_string().contains("measured otherwise"), "{other}");
        fs::remove_dir_all(&folder).expect("it is ours");
    }
}
