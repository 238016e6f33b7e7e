//! Measured rates: of an engine's computation, and of the loads from each source.

use std::time::Duration;

use super::Step;
use super::line_fit::{LineFit, Without};
use crate::time::Tick;

/// Time after which the measurements of a source are old, and one load measures it again.
pub const RATE_LIFETIME: Duration = Duration::from_secs(30);

/// Longest time of a step that counts; a longer one shows a pause of the process.
pub const STEP_TIME_MAX: Duration = Duration::from_secs(60);

/// Smallest number of tokens of a step that shows the time of a token: fewer take about as long as one, because the
/// step reads all weights.
pub const STEP_TOKENS_MIN: u64 = 128;

/// Time of computing a token, as a function of the number of tokens before it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ComputeRate {
    per_token: LineFit,
}

/// Time of a load from one source, as a function of its bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SourceRate {
    seconds: LineFit,
    measured_at: Tick,
    /// Whether a load measures the source again.
    is_exploring: bool,
}

impl ComputeRate {
    /// Adds a valid step. Large steps count more, because the fixed part of a step is small in them.
    pub(super) fn add(&mut self, step: &Step) {
        if step.tokens >= STEP_TOKENS_MIN {
            let tokens = step.tokens as f64;
            self.per_token.add(step.context, step.seconds / tokens, tokens);
        }
    }

    /// Expected time of tokens behind a prefix.
    pub(super) fn seconds(&self, prefix_tokens: u64, tokens: u64) -> Option<f64> {
        let (first, per_context) = self.per_token.line(Without::Slope)?;
        let tokens = tokens as f64;
        Some(tokens * (first + per_context * (prefix_tokens as f64 + tokens / 2.0)))
    }
}

impl SourceRate {
    /// Adds the time of a load. It replaces old measurements: the source may have been much slower then.
    pub(super) fn add(&mut self, bytes: f64, seconds: f64, now: Tick) {
        if self.is_old(now) {
            self.seconds = LineFit::default();
        }
        self.seconds.add(bytes, seconds, 1.0);
        (self.measured_at, self.is_exploring) = (now, false);
    }

    /// Notes that a load of this source has begun.
    pub(super) fn exploring(&mut self, now: Tick) {
        self.is_exploring |= self.is_old(now);
    }

    /// Notes that a load of this source has ended, with or without a measurement.
    pub(super) fn explored(&mut self) {
        self.is_exploring = false;
    }

    /// Latency, and time of each byte; `None` if the source must be measured.
    pub(super) fn line(&self, now: Tick) -> Option<(f64, f64)> {
        let needs_measurement = self.is_old(now) && !self.is_exploring;
        self.seconds.line(Without::Intercept).filter(|_| !needs_measurement)
    }

    /// Expected time of a load by the last measurements, however old.
    pub(super) fn seconds(&self, bytes: f64) -> Option<f64> {
        self.seconds.line(Without::Intercept).map(|(latency, per_byte)| latency + per_byte * bytes)
    }

    fn is_old(&self, now: Tick) -> bool {
        now.since(self.measured_at) > RATE_LIFETIME
    }
}

/// Converts seconds that are at least 0; saturates.
pub(super) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}
