//! Slack windows: spans of a GPU's compute during which I/O costs nothing, and what I/O may take at any moment.
//!
//! ```text
//!  Decode   0          512           4096          8192   tokens of the batch
//!           ├── 40 µs ──┤              ├── 90 µs ──┤
//!                        └─ fallback ──┘            └─ fallback …
//! ```
//!
//! A profile is one JSON object ([`Content`]), the same for whoever writes it and whoever works by it: the digest of its text says which
//! revision it is. Its windows stand by phase and tokens, so that one set of measurements has one text.
//!
//! Laws: of a phase no two windows overlap, so at most one holds; a budget is never above what was measured; outside of all windows it is
//! the fallback's.
//!
//! Deliberately absent: text and digest (the callers'), how a window is measured, and how a device keeps to a budget.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Windows of one profile, at the most.
pub const WINDOWS_MAX: usize = 256;
/// Tokens of a batch that a window may end before.
pub const TOKENS_MAX: u32 = 16_777_217;
/// Microseconds of a layer: ten seconds.
pub const MICROS_MAX: u32 = 10_000_000;
/// Multiprocessors of a GPU.
pub const SMS_MAX: u32 = 256;
/// Share of a window that may be used, in hundredths. With [`MICROS_MAX`] a product fits 32 bits.
pub const USABLE_PERCENT_MIN: u8 = 10;
/// All of it.
pub const PERCENT_MAX: u8 = 100;

const _: () = assert!((MICROS_MAX as u64) * (PERCENT_MAX as u64) <= u32::MAX as u64);

/// A profile as it is written: what was measured, and how it is put to use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Content {
    /// What was measured.
    pub subject: Subject,
    /// Share of each window that is used, in hundredths.
    pub usable_percent: u8,
    /// What happens outside of all windows.
    pub fallback: Fallback,
    /// Error of its predictions beyond which it has drifted, in hundredths.
    pub max_error_percent: u8,
    /// The windows; of each phase by their tokens.
    pub windows: Vec<Window>,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Subject {
    /// Model, as the engine names it.
    pub model: String,
    /// GPU, as its driver names it.
    pub gpu_product: String,
    /// GPUs that the model was spread over.
    pub tensor_parallel: u32,
    /// Engine and its version.
    pub engine_version: String,
}

/// A span of compute during which I/O costs nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Window {
    /// What the GPU does.
    pub phase: Phase,
    /// Tokens of the batch, at the least.
    pub min_tokens: u32,
    /// Tokens of the batch; the window ends before so many.
    pub max_tokens: u32,
    /// Microseconds of a layer that I/O may take.
    pub slack_micros: u32,
    /// Multiprocessors that I/O may use at once.
    pub max_io_sms: u32,
}

/// What a GPU does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Computes a prompt.
    Prefill,
    /// Computes one token after the other.
    Decode,
}

/// What happens outside of all windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fallback {
    /// Writes wait, reads go on.
    ThrottleWrites,
    /// All I/O that nobody waits for stops.
    PauseIo,
    /// As if there were no profile.
    Ignore,
}

/// Kinds of I/O, by who waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// Blocks that are brought to devices.
    Write,
    /// Blocks that somebody may ask for soon.
    Prefetch,
    /// Blocks that somebody waits for.
    AwaitedRead,
}

/// What I/O may take at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// A window holds.
    Window {
        /// Microseconds of each layer.
        micros: u32,
        /// Multiprocessors at once.
        io_sms: u32,
    },
    /// None does.
    Outside(Fallback),
}

/// A profile whose content was found right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    content: Content,
}

/// Why a content is no profile. Places are counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// It says nothing.
    #[error("there are no windows: measure at least one")]
    Empty,
    /// It says too much.
    #[error("there are {0} windows, and {most} are allowed: join windows of equal slack", most = WINDOWS_MAX)]
    TooMany(usize),
    /// A number that cannot be.
    #[error("{place} is {value}: use {least} to {most}")]
    OutOfBounds {
        /// Which field.
        place: String,
        /// What it says.
        value: u32,
        /// What is allowed, at the least.
        least: u32,
        /// At the most.
        most: u32,
    },
    /// A window of no tokens.
    #[error("windows[{0}] ends where it begins or before: set maxTokens above minTokens")]
    NoTokens(usize),
    /// Windows of a phase stand by their tokens.
    #[error(
        "windows[{later}] begins before windows[{earlier}], which stands before it: sort the windows of {phase} by minTokens"
    )]
    Order {
        /// The one that should stand before.
        later: usize,
        /// The one that does.
        earlier: usize,
        /// Of both.
        phase: Phase,
    },
    /// Two windows of a phase hold at once.
    #[error(
        "windows[{later}] and windows[{earlier}] of {phase} overlap, the earlier one ends before {end} tokens: set minTokens of the \
         later one to {end} or more"
    )]
    Overlap {
        /// The one that begins too early.
        later: usize,
        /// The one that has not ended by then.
        earlier: usize,
        /// Of both.
        phase: Phase,
        /// Where the earlier one ends.
        end: u32,
    },
}

impl Profile {
    /// A profile of this content, its windows in their one order.
    ///
    /// # Errors
    /// It has no windows or too many, a number out of bounds, windows of a phase out of order or ones that overlap.
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
            // Those before it are in order, so the last of its phase ends last.
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

    /// What it says, in its one order.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// What I/O may take while a batch of so many tokens is in a phase. The share that is used of a window is rounded down; a window of
    /// which nothing is left is none.
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
    /// Whether I/O of a kind goes on outside of all windows.
    pub fn admits(self, io: Io) -> bool {
        match self {
            Fallback::ThrottleWrites => io != Io::Write,
            Fallback::PauseIo => io == Io::AwaitedRead,
            Fallback::Ignore => true,
        }
    }

    /// As profiles write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Fallback::ThrottleWrites => "ThrottleWrites",
            Fallback::PauseIo => "PauseIo",
            Fallback::Ignore => "Ignore",
        }
    }
}

impl Phase {
    /// All of them.
    pub const ALL: [Phase; 2] = [Phase::Prefill, Phase::Decode];

    /// As profiles write it.
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
    fn a_budget_is_the_usable_share_of_the_window_that_holds_and_else_the_fallback() {
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
        assert_eq!(profile(vec![short]).budget(Decode, 0), outside, "nothing is left of it");
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
    fn outside_of_windows_i_o_goes_on_as_the_fallback_says() {
        use Fallback::{Ignore, PauseIo, ThrottleWrites};
        for (fallback, write, prefetch) in
            [(ThrottleWrites, false, true), (PauseIo, false, false), (Ignore, true, true)]
        {
            assert_eq!((fallback.admits(Io::Write), fallback.admits(Io::Prefetch)), (write, prefetch));
            assert!(fallback.admits(Io::AwaitedRead), "somebody waits for it");
        }
    }

    #[test]
    fn what_is_no_profile_is_refused_with_the_place_and_what_to_do() {
        let odd = |change: fn(&mut Window)| {
            let mut odd = window(Decode, 0, 8);
            change(&mut odd);
            vec![window(Prefill, 0, 8), odd]
        };
        for (windows, words) in [
            (Vec::new(), "measure at least one"),
            (vec![window(Decode, 0, 1); WINDOWS_MAX + 1], "there are 257 windows"),
            (odd(|odd| odd.slack_micros = 0), "windows[1].slackMicros is 0: use 1 to 10000000"),
            (odd(|odd| odd.max_io_sms = 257), "windows[1].maxIoSms is 257: use 0 to 256"),
            (odd(|odd| odd.max_tokens = TOKENS_MAX + 1), "windows[1].maxTokens"),
            (odd(|odd| odd.min_tokens = 8), "windows[1] ends where it begins"),
            (
                vec![window(Decode, 8, 16), window(Prefill, 0, 8), window(Decode, 0, 8)],
                "windows[2] begins before windows[0], which stands before it: sort the windows of Decode",
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
    fn the_same_measurements_have_one_text_and_what_nobody_knows_is_refused() {
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
            "agents of other versions read this: a change of it is a new revision of every profile"
        );
        let read: Content = serde_json::from_str(&one).expect("it is read back");
        assert_eq!(read, *profile(vec![prefill, decode]).content());
        let more = one.replacen("\"usablePercent\"", "\"later\":1,\"usablePercent\"", 1);
        let error = serde_json::from_str::<Content>(&more).expect_err("unknown").to_string();
        assert!(error.contains("later"), "{error}");
    }

    proptest! {
        #[test]
        fn a_budget_is_never_above_what_was_measured(
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
