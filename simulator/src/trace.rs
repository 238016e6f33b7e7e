//! Record of a run: always a digest, and lines on request.

use reprise_policy::Tick;

use crate::rng::mix;

/// Whether the lines of a run are recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recording {
    /// Only the digest is kept.
    #[default]
    Digest,
    /// A line for each step.
    Lines,
}

/// Record of a run; see the module.
#[derive(Debug)]
pub(crate) struct Trace {
    recording: Recording,
    digest: u64,
    steps: u64,
    lines: Vec<String>,
}

impl Trace {
    pub(crate) fn new(recording: Recording) -> Trace {
        Trace { recording, digest: 0, steps: 0, lines: Vec::new() }
    }

    /// Records one step: numbers for the digest, and its description.
    pub(crate) fn step(&mut self, now: Tick, what: [u64; 3], words: impl FnOnce() -> String) {
        self.steps += 1;
        for number in [now.0, what[0], what[1], what[2]] {
            self.digest = mix(self.digest.rotate_left(5) ^ number);
        }
        if self.recording == Recording::Lines {
            self.lines.push(format!("{:>12.6} {}", now.0 as f64 / 1e6, words()));
        }
    }

    /// Adds a note to the current step.
    pub(crate) fn note(&mut self, words: impl FnOnce() -> String) {
        if self.recording == Recording::Lines {
            self.lines.push(format!("{:>14}{}", "", words()));
        }
    }

    pub(crate) fn digest(&self) -> u64 {
        self.digest
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    pub(crate) fn take_lines(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lines)
    }
}
