//! Sizes and times with units, as in configurations and in tables for users.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Number of bytes. Text form: `4096`, `64KiB`, `2MiB`, `1GiB`, `30TB` (binary and decimal units).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Span of time. Text form: `50ms`, `2s`, `1m 30s`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Interval(pub Duration);

/// Invalid size or time; the message contains the expected form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid {kind} '{text}': expected {expected}")]
pub struct UnitError {
    text: String,
    kind: &'static str,
    expected: &'static str,
}

/// Unit suffixes and their factors, longest match first within a prefix.
const UNITS: [(&str, u64); 10] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let refuse = || UnitError {
            text: text.to_owned(),
            kind: "size",
            expected: "a number of bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB or TB",
        };
        let trimmed = text.trim();
        let (number, factor) = UNITS
            .iter()
            .find_map(|(suffix, factor)| trimmed.strip_suffix(suffix).map(|number| (number, *factor)))
            .unwrap_or((trimmed, 1));
        let number: u64 = number.trim().parse().map_err(|_| refuse())?;
        number.checked_mul(factor).map(ByteSize).ok_or_else(refuse)
    }
}

impl fmt::Display for ByteSize {
    /// Formats with the largest binary unit that divides the size, so that the text parses to the same
    /// number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (suffix, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if self.0 != 0 && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{suffix}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl FromStr for Interval {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let refuse =
            || UnitError { text: text.to_owned(), kind: "time", expected: "for example 50ms, 2s or 1m" };
        humantime::parse_duration(text).map(Interval).map_err(|_| refuse())
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", humantime::format_duration(self.0))
    }
}

macro_rules! serde_as_text {
    ($type:ty) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    };
}

serde_as_text!(ByteSize);
serde_as_text!(Interval);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_with_unit_round_trips() {
        for (text, bytes) in [("4096", 4096), ("2MiB", 2 << 20), ("1GB", 1_000_000_000), (" 3 KiB ", 3072)] {
            let size: ByteSize = text.parse().expect("a size");
            assert_eq!(size, ByteSize(bytes));
            assert_eq!(size.to_string().parse(), Ok(size));
        }
    }

    #[test]
    fn rejects_invalid_and_too_large_sizes_with_expected_form() {
        for text in ["", "many", "-1MiB", "99999999999TiB", "1.5GiB"] {
            let error = text.parse::<ByteSize>().expect_err("not a size");
            assert!(error.to_string().contains("KiB"), "{error}");
        }
    }

    #[test]
    fn time_requires_a_unit() {
        assert_eq!("50ms".parse(), Ok(Interval(Duration::from_millis(50))));
        assert!("50".parse::<Interval>().is_err());
    }
}
