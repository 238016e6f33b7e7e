//! Slack windows: spans of a GPU's compute in which I/O is free, and the I/O budget at any moment.
//!
//! ```text
//!  Decode   0          512           4096          8192   tokens of the batch
//!           ├── 40 µs ──┤              ├── 90 µs ──┤
//!                        └─ fallback ──┘            └─ fallback …
//! ```
//!
//! A profile is one JSON object ([`Content`]), identical for its writers and readers: the digest of its text
//! identifies its revision. The windows are sorted by phase and tokens, so that a set of measurements has
//! exactly one text.
//!
//! Invariants: windows of a phase do not overlap, so at most one applies. A budget never exceeds the
//! measurement. Outside of all windows, the fallback applies.
//!
//! Out of scope: the text and its digest (the caller's), measuring windows, and enforcing budgets.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Maximum windows of one profile.
pub const WINDOWS_MAX: usize = 256;
/// Upper bound of a window's `max_tokens`.
pub const TOKENS_MAX: u32 = 16_777_217;
/// Maximum microseconds of a layer: ten seconds.
pub const MICROS_MAX: u32 = 10_000_000;
/// Maximum multiprocessors of a GPU.
pub const SMS_MAX: u32 = 256;
/// Minimum usable share of a window, in hundredths. With [`MICROS_MAX`], a product fits 32 bits.
pub const USABLE_PERCENT_MIN: u8 = 10;
/// The whole of a window, in hundredths.
pub const PERCENT_MAX: u8 = 100;

const _: () = assert!((MICROS_MAX as u64) * (PERCENT_MAX as u64) <= u32::MAX as u64);

/// Profile as it is written: measurements, and how to apply them.
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
    /// Windows, sorted by tokens within each phase.
    pub windows: Vec<Window>,
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

/// Span of compute in which I/O is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Window {
    /// Phase of the computation.
    pub phase: Phase,
    /// Minimum tokens of the batch.
    pub min_tokens: u32,
    /// Upper bound of the batch's tokens, exclusive.
    pub max_tokens: u32,
    /// Microseconds of each layer that I/O may use.
    pub slack_micros: u32,
    /// Multiprocessors that I/O may use at the same time.
    pub max_io_sms: u32,
}

/// Phase of a GPU's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Computes the KV of a prompt.
    Prefill,
    /// Generates one token after another.
    Decode,
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

/// Profile whose windows are validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    content: Content,
}

/// Reason why a content is not a valid profile. Positions are counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// The profile has no windows.
    #[error("there are no windows: measure at least one")]
    Empty,
    /// The profile has too many windows.
    #[error("there are {0} windows, and {most} are allowed: join windows of equal slack", most = WINDOWS_MAX)]
    TooMany(usize),
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
    /// A window contains no token count.
    #[error("windows[{0}] ends where it begins or before: set maxTokens above minTokens")]
    NoTokens(usize),
    /// The windows of a phase are not sorted by their tokens.
    #[error(
        "windows[{later}] begins before windows[{earlier}], which precedes it in the list: sort the windows of {phase} by minTokens"
    )]
    Order {
        /// Window that should come first.
        later: usize,
        /// Window that comes first.
        earlier: usize,
        /// Phase of both windows.
        phase: Phase,
    },
    /// Two windows of a phase overlap.
    #[error(
        "windows[{later}] and windows[{earlier}] of {phase} overlap, the earlier one ends before {end} tokens: set minTokens of \
        the later one to {end} or more"
    )]
    Overlap {
        /// Window that begins too early.
        later: usize,
        /// Window that ends too late.
        earlier: usize,
        /// Phase of both windows.
        phase: Phase,
        /// End of the earlier window.
        end: u32,
    },
}

impl Profile {
    /// Creates a profile from its content, and sorts its windows.
    ///
    /// # Errors
    /// The content has no windows or too many, a number is out of bounds, or windows of a phase overlap or
    /// are not sorted.
    pub fn new(mut content: Content) -> Result<Profile, ProfileError> {
        let percent = |place: &str, value: u8, least: u8| {
            within(place.to_owned(), u32::from(value), (u32::from(least), u32::from(PERCENT_MAX)))
        };
        percent("usablePercent", content.usable_percent, USABLE_PERCENT_MIN)?;
        percent("maxErrorPercent", content.max_error_percent, 1)?;
        match content.windows.len() {
            0 => return Err(ProfileError::Empty),
            count if count > WINDOWS_MAX => return Err(ProfileError::TooMany(count)),
            _ => {}
        }
        for (index, window) in content.windows.iter().enumerate() {
            check(index, window)?;
            let mut earlier = content.windows[..index].iter().enumerate();
            // The previous windows are sorted, so the last one of this phase ends last.
            let before = earlier.rfind(|(_, other)| other.phase == window.phase);
            if let Some((earlier, other)) = before {
                let (later, phase, end) = (index, window.phase, other.max_tokens);
                if window.min_tokens < other.min_tokens {
                    return Err(ProfileError::Order { later, earlier, phase });
                }
                if window.min_tokens < end {
                    return Err(ProfileError::Overlap { later, earlier, phase, end });
                }
            }
        }
        content.windows.sort_by_key(|window| (window.phase, window.min_tokens));
        Ok(Profile { content })
    }

    /// Content of the profile, with sorted windows.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// I/O budget while a batch of `tokens` tokens is in a phase. The usable share of a window is rounded
    /// down; a window with no usable time does not apply.
    pub fn budget(&self, phase: Phase, tokens: u32) -> Budget {
        let windows = &self.content.windows;
        let begun = windows.partition_point(|window| (window.phase, window.min_tokens) <= (phase, tokens));
        let last = begun.checked_sub(1).map(|index| &windows[index]);
        let held = last.filter(|window| window.phase == phase && tokens < window.max_tokens);
        let budget = held.map(|window| {
            let micros =
                window.slack_micros * u32::from(self.content.usable_percent) / u32::from(PERCENT_MAX);
            (micros, window.max_io_sms)
        });
        match budget {
            Some((micros, io_sms)) if micros > 0 => Budget::Window { micros, io_sms },
            _ => Budget::Outside(self.content.fallback),
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

fn check(index: usize, window: &Window) -> Result<(), ProfileError> {
    let Window { phase: _, min_tokens, max_tokens, slack_micros, max_io_sms } = *window;
    for (field, value, bounds) in [
        ("minTokens", min_tokens, (0, TOKENS_MAX - 1)),
        ("maxTokens", max_tokens, (1, TOKENS_MAX)),
        ("slackMicros", slack_micros, (1, MICROS_MAX)),
        ("maxIoSms", max_io_sms, (0, SMS_MAX)),
    ] {
        within(format!("windows[{index}].{field}"), value, bounds)?;
    }
    if min_tokens >= max_tokens { Err(ProfileError::NoTokens(index)) } else { Ok(()) }
}

fn within(place: String, value: u32, (least, most): (u32, u32)) -> Result<(), ProfileError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(ProfileError::OutOfBounds { place, value, least, most })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn window(phase: Phase, min_tokens: u32, max_tokens: u32) -> Window {
        Window { phase, min_tokens, max_tokens, slack_micros: 55, max_io_sms: 4 }
    }

    fn content(windows: Vec<Window>) -> Content {
        let subject = Subject {
            model: "m".to_owned(),
            gpu_product: "g".to_owned(),
            tensor_parallel: 1,
            engine_version: "e".to_owned(),
        };
        let fallback = Fallback::ThrottleWrites;
        Content { subject, usable_percent: 80, fallback, max_error_percent: 30, windows }
    }

    fn profile(windows: Vec<Window>) -> Profile {
        Profile::new(content(windows)).expect("a profile")
    }

    use Phase::{Decode, Prefill};

    #[test]
    fn budget_is_the_usable_share_of_the_window_or_the_fallback() {
        let whole = profile(vec![window(Decode, 0, 512), window(Decode, 4096, 8192), window(Prefill, 8, 16)]);
        let inside = Budget::Window { micros: 44, io_sms: 4 };
        let outside = Budget::Outside(Fallback::ThrottleWrites);
        for (phase, tokens, expected) in [
            (Decode, 0, inside),
            (Decode, 511, inside),
            (Decode, 512, outside),
            (Decode, 4095, outside),
            (Decode, 4096, inside),
            (Decode, 8192, outside),
            (Decode, u32::MAX, outside),
            (Prefill, 7, outside),
            (Prefill, 8, inside),
            (Prefill, 16, outside),
        ] {
            assert_eq!(whole.budget(phase, tokens), expected, "{phase} {tokens}");
        }
        let short = Window { slack_micros: 1, ..window(Decode, 0, 1) };
        assert_eq!(profile(vec![short]).budget(Decode, 0), outside, "no usable time is left");
        let long = Window { slack_micros: MICROS_MAX, ..window(Decode, 0, TOKENS_MAX) };
        let all = Content { usable_percent: PERCENT_MAX, ..content(vec![long]) };
        let all = Profile::new(all).expect("a profile");
        assert_eq!(
            all.budget(Decode, TOKENS_MAX - 1),
            Budget::Window { micros: MICROS_MAX, io_sms: 4 },
            "the largest product fits"
        );
    }

    #[test]
    fn fallback_decides_about_io_outside_of_windows() {
        use Fallback::{Ignore, PauseIo, ThrottleWrites};
        for (fallback, write, prefetch) in
            [(ThrottleWrites, false, true), (PauseIo, false, false), (Ignore, true, true)]
        {
            assert_eq!((fallback.admits(Io::Write), fallback.admits(Io::Prefetch)), (write, prefetch));
            assert!(fallback.admits(Io::AwaitedRead), "a request waits for it");
        }
    }

    #[test]
    fn rejects_invalid_profile_with_position_and_remedy() {
        let invalid_window = |change: fn(&mut Window)| {
            let mut invalid_window = window(Decode, 0, 8);
            change(&mut invalid_window);
            vec![window(Prefill, 0, 8), invalid_window]
        };
        for (windows, words) in [
            (Vec::new(), "measure at least one"),
            (vec![window(Decode, 0, 1); WINDOWS_MAX + 1], "there are 257 windows"),
            (
                invalid_window(|invalid_window| invalid_window.slack_micros = 0),
                "windows[1].slackMicros is 0: use 1 to 10000000",
            ),
            (
                invalid_window(|invalid_window| invalid_window.max_io_sms = 257),
                "windows[1].maxIoSms is 257: use 0 to 256",
            ),
            (
                invalid_window(|invalid_window| invalid_window.max_tokens = TOKENS_MAX + 1),
                "windows[1].maxTokens",
            ),
            (
                invalid_window(|invalid_window| invalid_window.min_tokens = 8),
                "windows[1] ends where it begins",
            ),
            (
                vec![window(Decode, 8, 16), window(Prefill, 0, 8), window(Decode, 0, 8)],
                "windows[2] begins before windows[0], which precedes it in the list: sort the windows of Decode",
            ),
            (
                vec![window(Decode, 0, 9), window(Decode, 8, 16)],
                "windows[1] and windows[0] of Decode overlap, the earlier one ends before 9 tokens",
            ),
        ] {
            let error = Profile::new(content(windows)).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
        let share = Content { usable_percent: 9, ..content(vec![window(Decode, 0, 8)]) };
        let error = Profile::new(share).expect_err("too little").to_string();
        assert_eq!(error, "usablePercent is 9: use 10 to 100");
    }

    #[test]
    fn equal_measurements_have_equal_text_and_unknown_fields_are_rejected() {
        let (prefill, decode) = (window(Prefill, 0, 8), window(Decode, 0, 8));
        let text = |windows| serde_json::to_string(profile(windows).content()).expect("JSON");
        let one = text(vec![decode, prefill]);
        assert_eq!(one, text(vec![prefill, decode]));
        assert_eq!(
            one,
            r#"{"subject":{"model":"m","gpuProduct":"g","tensorParallel":1,"engineVersion":"e"},"usablePercent":80,"#.to_owned()
                + r#""fallback":"ThrottleWrites","maxErrorPercent":30,"windows":["#
                + r#"{"phase":"Prefill","minTokens":0,"maxTokens":8,"slackMicros":55,"maxIoSms":4},"#
                + r#"{"phase":"Decode","minTokens":0,"maxTokens":8,"slackMicros":55,"maxIoSms":4}]}"#,
            "agents of other versions read this: any change creates a new revision of every profile"
        );
        let read: Content = serde_json::from_str(&one).expect("it is read back");
        assert_eq!(read, *profile(vec![prefill, decode]).content());
        let more = one.replacen("\"usablePercent\"", "\"later\":1,\"usablePercent\"", 1);
        let error = serde_json::from_str::<Content>(&more).expect_err("unknown").to_string();
        assert!(error.contains("later"), "{error}");
    }

    proptest! {
        #[test]
        fn budget_never_exceeds_the_measurement(
            steps in proptest::collection::vec((0u32..100, 1u32..100, 1u32..1000), 1..20),
            usable in USABLE_PERCENT_MIN..=PERCENT_MAX,
            tokens in 0u32..5000,
        ) {
            let mut end = 0;
            let mut windows = Vec::new();
            for (gap, length, slack_micros) in steps {
                let min_tokens = end + gap;
                end = min_tokens + length;
                windows.push(Window { slack_micros, ..window(Decode, min_tokens, end) });
            }
            let holds = |window: &&Window| (window.min_tokens..window.max_tokens).contains(&tokens);
            let held = windows.iter().find(holds).copied();
            let all = Content { usable_percent: usable, ..content(windows) };
            let usable = u32::from(usable);
            match Profile::new(all).expect("a profile").budget(Decode, tokens) {
                Budget::Window { micros, .. } => {
                    let most = held.map_or(0, |window| window.slack_micros * usable);
                    prop_assert!(micros > 0 && micros * 100 <= most);
                }
                Budget::Outside(_) => {
                    let left = held.map_or(0, |window| window.slack_micros * usable / 100);
                    prop_assert_eq!(left, 0);
                }
            }
        }
    }
}
