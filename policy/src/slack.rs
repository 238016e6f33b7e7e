//! Slack windows: spans of a GPU's compute in which I/O is free, and the I/O budget at any moment.
//!
//! ```text
//!  prefix
//!   32K ┤ 70 µs, 4 SMs │ 180 µs, 2 SMs        outside of all windows: the fallback
//!    8K ┤ 40 µs, 8 SMs │  90 µs, 4 SMs
//!     0 └──────────────┴──────────────
//!       0             2K             8K   input     (one such table for each phase)
//! ```
//!
//! A profile is one JSON object ([`Content`]), identical for its writers and readers: the digest of its text
//! identifies its revision. Its tables are those of Tutti §3.3: the duration and free multiprocessors of
//! windows by input and prefix length, layer durations of both phases, and the time and multiprocessors of
//! read and write kernels by IOCB count. [`scheduler`] decides by table lookup for a GPU, and [`WriteSlack`]
//! states the same limits for an agent's writes. [`prediction`] compares the tables with what engines measure.
//!
//! Invariants: windows of a phase do not overlap, so at most one applies. A budget never exceeds the
//! measurement. Outside of all windows, the fallback applies.
//!
//! Out of scope: the text and its digest (the caller's), and measuring windows.

use std::fmt;

use serde::{Deserialize, Serialize};

pub mod content;
pub mod measure;
pub mod prediction;
pub mod scheduler;
mod writes;

use content::PERCENT_MAX;
pub use content::{Content, Fallback, KernelTime, Measurement, ProfileError, Subject, Window};
pub use writes::{LayerSlack, WriteSlack};

/// Phase of a GPU's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Computes the KV of a prompt.
    Prefill,
    /// Generates one token after another.
    Decode,
}

/// Computation of one batch, the key of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Computation {
    /// Phase of the computation.
    pub phase: Phase,
    /// Tokens that the batch computes.
    pub input_tokens: u32,
    /// Tokens before the input whose KV exists, over all sequences of the batch.
    pub prefix_tokens: u32,
}

/// Kinds of I/O, by the urgency of its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// Writes of blocks to devices.
    Write,
    /// Reads of blocks that may be requested soon.
    Prefetch,
    /// Reads of blocks that a request waits for.
    AwaitedRead,
}

/// Direction of an I/O kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// From devices to the GPU.
    Read,
    /// From the GPU to devices.
    Write,
}

/// I/O budget at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// A window applies.
    Window {
        /// Microseconds of each layer that I/O may use.
        micros: u32,
        /// Multiprocessors that I/O may use at the same time.
        io_sms: u32,
    },
    /// No window applies.
    Outside(Fallback),
}

/// Profile whose content is validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    content: Content,
    /// Bytes of writes that fit the largest window.
    write_bytes_max: u64,
}

/// Predicted cost of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelCost {
    /// Microseconds from the launch to the last completion.
    pub micros: u64,
    /// Multiprocessors that the kernel occupies.
    pub sms: u32,
}

impl Profile {
    /// Creates a profile from its content, and sorts its windows.
    ///
    /// # Errors
    /// A table is empty or too large, a number is out of bounds, windows of a phase overlap, a bound is not a
    /// multiple of the step, or kernels are not sorted.
    pub fn new(mut content: Content) -> Result<Profile, ProfileError> {
        content.validate()?;
        let mut profile = Profile { content, write_bytes_max: 0 };
        profile.write_bytes_max = profile.largest_write();
        Ok(profile)
    }

    /// Content of the profile, with sorted windows.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// Window that applies to a computation, also if it has no slack.
    pub fn window(&self, of: Computation) -> Option<&Window> {
        let windows = &self.content.measurement.windows;
        windows
            .iter()
            .find(|window| window.phase == of.phase && window.contains(of.input_tokens, of.prefix_tokens))
    }

    /// I/O budget during a computation. The usable share of a window is rounded down; a window with no usable
    /// time does not apply.
    pub fn budget(&self, of: Computation) -> Budget {
        self.window(of).map_or(Budget::Outside(self.content.fallback), |window| self.budget_of(window))
    }

    fn budget_of(&self, window: &Window) -> Budget {
        let usable = u32::from(self.content.usable_percent);
        match window.slack_micros * usable / u32::from(PERCENT_MAX) {
            0 => Budget::Outside(self.content.fallback),
            micros => Budget::Window { micros, io_sms: window.free_sms },
        }
    }

    /// Maximum IOCBs of one launch that fits a budget: the largest row of the kernel table whose time and
    /// multiprocessors fit. 0 outside of all windows, and if no row fits.
    pub fn fitting(&self, direction: Direction, budget: Budget) -> u32 {
        let Budget::Window { micros, io_sms } = budget else { return 0 };
        let fits = |kernel: &&KernelTime| kernel.micros <= micros && kernel.sms <= io_sms;
        self.kernels(direction).iter().rfind(fits).map_or(0, |kernel| kernel.iocbs)
    }

    /// Predicted cost of a launch of `iocbs` IOCBs: that of the next larger row of the table. More IOCBs than
    /// the table has are predicted as several launches, one after another.
    pub fn cost(&self, direction: Direction, iocbs: u32) -> KernelCost {
        let kernels = self.kernels(direction);
        let Some(last) = kernels.last() else { return KernelCost::default() };
        let (whole, rest) = (iocbs / last.iocbs, iocbs % last.iocbs);
        let row = kernels.iter().find(|kernel| rest > 0 && rest <= kernel.iocbs);
        let whole_sms = if whole > 0 { last.sms } else { 0 };
        KernelCost {
            micros: u64::from(whole) * u64::from(last.micros) + row.map_or(0, |row| u64::from(row.micros)),
            sms: row.map_or(0, |row| row.sms).max(whole_sms),
        }
    }

    /// Kernel times of a direction, sorted by IOCB count. Never empty.
    pub fn kernels(&self, direction: Direction) -> &[KernelTime] {
        match direction {
            Direction::Read => &self.content.measurement.reads,
            Direction::Write => &self.content.measurement.writes,
        }
    }
}

impl Fallback {
    /// Whether I/O of a kind continues outside of all windows.
    pub fn admits(self, io: Io) -> bool {
        match self {
            Fallback::ThrottleWrites => io != Io::Write,
            Fallback::PauseIo => io == Io::AwaitedRead,
            Fallback::Ignore => true,
        }
    }

    /// Name of the fallback in profiles.
    pub fn as_str(self) -> &'static str {
        match self {
            Fallback::ThrottleWrites => "ThrottleWrites",
            Fallback::PauseIo => "PauseIo",
            Fallback::Ignore => "Ignore",
        }
    }
}

impl Phase {
    /// Both phases, in the order of profiles.
    pub const ALL: [Phase; 2] = [Phase::Prefill, Phase::Decode];

    /// Name of the phase in profiles.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Prefill => "Prefill",
            Phase::Decode => "Decode",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests;
