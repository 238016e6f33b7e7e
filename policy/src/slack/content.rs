//! Content of a profile: its measurement, how to apply it, and their validation.

use serde::{Deserialize, Serialize};

use super::Phase;

/// Maximum windows of one profile.
pub const WINDOWS_MAX: usize = 256;
/// Maximum rows of a table of kernel times.
pub const KERNELS_MAX: usize = 64;
/// Upper bound of the exclusive ends of token ranges.
pub const TOKENS_MAX: u32 = 16_777_217;
/// Maximum tokens of a step of the table.
pub const STEP_TOKENS_MAX: u32 = 65_536;
/// Maximum bytes of an IOCB: 2,048 contexts of 1 MiB.
pub const IOCB_BYTES_MAX: u32 = 2_147_483_648;
/// Maximum IOCBs of one launch in a table.
pub const IOCBS_MAX: u32 = 65_536;
/// Maximum microseconds of a layer or kernel: ten seconds.
pub const MICROS_MAX: u32 = 10_000_000;
/// Maximum multiprocessors of a GPU.
pub const SMS_MAX: u32 = 256;
/// Minimum usable share of a window, in hundredths. With [`MICROS_MAX`], a product fits 32 bits.
pub const USABLE_PERCENT_MIN: u8 = 10;
/// The whole of a window, in hundredths.
pub const PERCENT_MAX: u8 = 100;

const _: () = assert!((MICROS_MAX as u64) * (PERCENT_MAX as u64) <= u32::MAX as u64);

/// Profile as it is written: a measurement, and how to apply it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Content {
    /// Measured model, GPU and engine.
    pub subject: Subject,
    /// Usable share of each window, in hundredths.
    pub usable_percent: u8,
    /// Behaviour outside of all windows.
    pub fallback: Fallback,
    /// Prediction error beyond which the profile counts as drifted, in hundredths.
    pub max_error_percent: u8,
    /// Measured windows and kernels.
    pub measurement: Measurement,
}

/// Measured model, GPU and engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Subject {
    /// Model name in the engine's notation.
    pub model: String,
    /// GPU product in the driver's notation.
    pub gpu_product: String,
    /// Number of GPUs that the model is distributed over.
    pub tensor_parallel: u32,
    /// Name and version of the engine.
    pub engine_version: String,
}

/// Windows of layers, and times of I/O kernels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Measurement {
    /// Tokens that one warp computes. Bounds of prefill windows are multiples of it.
    pub step_tokens: u32,
    /// Bytes that each IOCB of the kernel tables transfers.
    pub iocb_bytes: u32,
    /// Windows, sorted by phase, input length and prefix length.
    pub windows: Vec<Window>,
    /// Read kernels, sorted by IOCB count.
    pub reads: Vec<KernelTime>,
    /// Write kernels, sorted by IOCB count.
    pub writes: Vec<KernelTime>,
}

/// Layer's computation at a range of input and prefix lengths, and the window in it during which I/O is free.
///
/// The input are the tokens that a batch computes: of prompts in prefill, one per sequence in decode. The
/// prefix are the tokens before the input whose KV exists, over all sequences of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Window {
    /// Phase of the computation.
    pub phase: Phase,
    /// Minimum input length in tokens.
    pub min_input_tokens: u32,
    /// Upper bound of the input length in tokens, exclusive.
    pub max_input_tokens: u32,
    /// Minimum prefix length in tokens.
    pub min_prefix_tokens: u32,
    /// Upper bound of the prefix length in tokens, exclusive.
    pub max_prefix_tokens: u32,
    /// Microseconds of the layer's computation without I/O.
    pub layer_micros: u32,
    /// Microseconds of each layer that I/O may use; 0 if the layer has no window.
    pub slack_micros: u32,
    /// Multiprocessors that the computation leaves free during the window.
    pub free_sms: u32,
}

/// Duration and multiprocessors of an I/O kernel with a number of IOCBs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelTime {
    /// IOCBs of the launch.
    pub iocbs: u32,
    /// Microseconds from the launch to the last completion.
    pub micros: u32,
    /// Multiprocessors that the kernel occupies.
    pub sms: u32,
}

/// Behaviour outside of all windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fallback {
    /// Writes wait; reads continue.
    ThrottleWrites,
    /// All I/O without a waiting request stops.
    PauseIo,
    /// I/O continues as without a profile.
    Ignore,
}

/// Reason why a content is not a valid profile. Positions are counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// A table has no rows.
    #[error("there are no {0}: measure at least one")]
    Empty(&'static str),
    /// A table has too many rows.
    #[error("there are {count} {table}, and {most} are allowed: {remedy}")]
    TooMany {
        /// Name of the table.
        table: &'static str,
        /// Rows of the table.
        count: usize,
        /// Maximum rows of the table.
        most: usize,
        /// How to get fewer rows.
        remedy: &'static str,
    },
    /// A number is out of bounds.
    #[error("{place} is {value}: use {least} to {most}")]
    OutOfBounds {
        /// Field with the number.
        place: String,
        /// Value of the field.
        value: u32,
        /// Minimum value of the field.
        least: u32,
        /// Maximum value of the field.
        most: u32,
    },
    /// A window contains no length.
    #[error(
        "windows[{index}] ends where it begins or before: set max{dimension}Tokens above min{dimension}Tokens"
    )]
    NoTokens {
        /// Position of the window.
        index: usize,
        /// Dimension without a length.
        dimension: &'static str,
    },
    /// A window has more slack than its layer takes.
    #[error(
        "windows[{index}].slackMicros is {slack}, more than layerMicros ({layer}): a window is within its layer"
    )]
    SlackBeyondLayer {
        /// Position of the window.
        index: usize,
        /// Microseconds of the window.
        slack: u32,
        /// Microseconds of the layer.
        layer: u32,
    },
    /// A bound of a prefill window is not a multiple of the step.
    #[error("{place} is {value}: use a multiple of stepTokens ({step})")]
    NotAStep {
        /// Field with the bound.
        place: String,
        /// Value of the field.
        value: u32,
        /// Tokens of a step.
        step: u32,
    },
    /// Two windows of a phase overlap.
    #[error(
        "windows[{later}] and windows[{earlier}] of {phase} overlap: change the input or prefix lengths of one of them"
    )]
    Overlap {
        /// Second window of the list.
        later: usize,
        /// First window of the list.
        earlier: usize,
        /// Phase of both windows.
        phase: Phase,
    },
    /// A table of kernel times is not sorted, or its times decrease.
    #[error(
        "{table}[{index}] has iocbs {iocbs} and micros {micros}, and the row before has {before_iocbs} and {before_micros}: sort by \
         iocbs, one row for each number, with times that do not decrease"
    )]
    KernelOrder {
        /// Name of the table.
        table: &'static str,
        /// Position of the row.
        index: usize,
        /// IOCBs of the row.
        iocbs: u32,
        /// Microseconds of the row.
        micros: u32,
        /// IOCBs of the row before.
        before_iocbs: u32,
        /// Microseconds of the row before.
        before_micros: u32,
    },
}

impl Content {
    /// Validates the content and sorts its windows.
    pub(super) fn validate(&mut self) -> Result<(), ProfileError> {
        let percent = |place: &str, value: u8, least: u8| {
            within(place.to_owned(), u32::from(value), (u32::from(least), u32::from(PERCENT_MAX)))
        };
        percent("usablePercent", self.usable_percent, USABLE_PERCENT_MIN)?;
        percent("maxErrorPercent", self.max_error_percent, 1)?;
        self.measurement.validate()
    }
}

impl Measurement {
    /// Validates the measurement and sorts its windows, so that a set of windows has exactly one text.
    ///
    /// # Errors
    /// A table is empty or too large, a number is out of bounds, windows overlap, or kernels are not sorted.
    pub fn validate(&mut self) -> Result<(), ProfileError> {
        within("stepTokens".to_owned(), self.step_tokens, (1, STEP_TOKENS_MAX))?;
        within("iocbBytes".to_owned(), self.iocb_bytes, (1, IOCB_BYTES_MAX))?;
        rows("windows", self.windows.len(), WINDOWS_MAX, "join windows of equal slack")?;
        for (index, window) in self.windows.iter().enumerate() {
            check_window(index, window, self.step_tokens)?;
            let overlaps = |other: &Window| other.phase == window.phase && other.overlaps(window);
            if let Some(earlier) = self.windows[..index].iter().position(overlaps) {
                return Err(ProfileError::Overlap { later: index, earlier, phase: window.phase });
            }
        }
        self.windows.sort_by_key(|window| (window.phase, window.min_input_tokens, window.min_prefix_tokens));
        check_kernels("reads", &self.reads)?;
        check_kernels("writes", &self.writes)
    }
}

impl Window {
    /// Whether the window applies to an input and prefix length in tokens.
    pub fn contains(&self, input_tokens: u32, prefix_tokens: u32) -> bool {
        (self.min_input_tokens..self.max_input_tokens).contains(&input_tokens)
            && (self.min_prefix_tokens..self.max_prefix_tokens).contains(&prefix_tokens)
    }

    fn overlaps(&self, other: &Window) -> bool {
        self.min_input_tokens < other.max_input_tokens
            && other.min_input_tokens < self.max_input_tokens
            && self.min_prefix_tokens < other.max_prefix_tokens
            && other.min_prefix_tokens < self.max_prefix_tokens
    }
}

fn check_window(index: usize, window: &Window, step: u32) -> Result<(), ProfileError> {
    let place = |field: &str| format!("windows[{index}].{field}");
    let tokens = [
        ("minInputTokens", window.min_input_tokens, (0, TOKENS_MAX - 1)),
        ("maxInputTokens", window.max_input_tokens, (1, TOKENS_MAX)),
        ("minPrefixTokens", window.min_prefix_tokens, (0, TOKENS_MAX - 1)),
        ("maxPrefixTokens", window.max_prefix_tokens, (1, TOKENS_MAX)),
    ];
    let others = [
        ("layerMicros", window.layer_micros, (1, MICROS_MAX)),
        ("slackMicros", window.slack_micros, (0, MICROS_MAX)),
        ("freeSms", window.free_sms, (0, SMS_MAX)),
    ];
    for (field, value, bounds) in tokens.into_iter().chain(others) {
        within(place(field), value, bounds)?;
    }
    if window.min_input_tokens >= window.max_input_tokens {
        return Err(ProfileError::NoTokens { index, dimension: "Input" });
    }
    if window.min_prefix_tokens >= window.max_prefix_tokens {
        return Err(ProfileError::NoTokens { index, dimension: "Prefix" });
    }
    if window.slack_micros > window.layer_micros {
        let (slack, layer) = (window.slack_micros, window.layer_micros);
        return Err(ProfileError::SlackBeyondLayer { index, slack, layer });
    }
    // A decode batch has one token per sequence: steps apply to prompts. The largest end stands for no end.
    let is_step = |value: u32| value == TOKENS_MAX || value.is_multiple_of(step);
    match tokens.into_iter().find(|(_, value, _)| window.phase == Phase::Prefill && !is_step(*value)) {
        Some((field, value, _)) => Err(ProfileError::NotAStep { place: place(field), value, step }),
        None => Ok(()),
    }
}

fn check_kernels(table: &'static str, kernels: &[KernelTime]) -> Result<(), ProfileError> {
    rows(table, kernels.len(), KERNELS_MAX, "measure fewer IOCB counts")?;
    for (index, kernel) in kernels.iter().enumerate() {
        for (field, value, bounds) in [
            ("iocbs", kernel.iocbs, (1, IOCBS_MAX)),
            ("micros", kernel.micros, (1, MICROS_MAX)),
            ("sms", kernel.sms, (0, SMS_MAX)),
        ] {
            within(format!("{table}[{index}].{field}"), value, bounds)?;
        }
        let Some(before) = index.checked_sub(1).map(|before| kernels[before]) else { continue };
        if kernel.iocbs <= before.iocbs || kernel.micros < before.micros {
            let (iocbs, micros) = (kernel.iocbs, kernel.micros);
            let (before_iocbs, before_micros) = (before.iocbs, before.micros);
            return Err(ProfileError::KernelOrder {
                table,
                index,
                iocbs,
                micros,
                before_iocbs,
                before_micros,
            });
        }
    }
    Ok(())
}

fn rows(table: &'static str, count: usize, most: usize, remedy: &'static str) -> Result<(), ProfileError> {
    match count {
        0 => Err(ProfileError::Empty(table)),
        _ if count > most => Err(ProfileError::TooMany { table, count, most, remedy }),
        _ => Ok(()),
    }
}

fn within(place: String, value: u32, (least, most): (u32, u32)) -> Result<(), ProfileError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(ProfileError::OutOfBounds { place, value, least, most })
}
