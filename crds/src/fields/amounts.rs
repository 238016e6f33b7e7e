//! Amounts with a unit: bytes, durations, shares.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Upper bound on the length of a [`Quantity`]: 12 digits and a unit.
const QUANTITY_CHARS_MAX: u32 = 14;
/// Upper bound on the length of a [`Span`]: 7 digits and a unit.
const SPAN_CHARS_MAX: u32 = 9;

/// Units of [`Quantity`] and their factors. A unit precedes those that are its suffix.
const BYTE_UNITS: [(&str, u64); 10] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
];

/// Units of [`Quantity::of_bytes`] and their factors, with the largest numbers that the schema permits.
const EXACT_UNITS: [(&str, u64, u64); 6] = [
    ("", 1, 999_999_999_999),
    ("Ki", 1 << 10, 999_999_999_999),
    ("Mi", 1 << 20, 999_999_999_999),
    ("Gi", 1 << 30, 9_999_999_999),
    ("Ti", 1 << 40, 9_999_999),
    ("Pi", 1 << 50, 9_999),
];

/// Units of [`Span`] in milliseconds; `ms` precedes its suffix `s`.
const TIME_UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];

/// Bytes in Kubernetes notation: `4096`, `64Mi`, `2Ti`. Whole numbers only.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Quantity(String);

/// Duration: a whole number with `ms`, `s`, `m` or `h`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Span(String);

/// Percentage from 0 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Percent(pub u8);

/// Thousandths from 0 to 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Permille(pub u16);

/// Error for a text that is not a valid amount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AmountError {
    text: String,
    expected: &'static str,
}

impl Quantity {
    /// Creates a value without validation.
    pub fn new(text: impl Into<String>) -> Quantity {
        Quantity(text.into())
    }

    /// Returns the quantity for a number of bytes, in the largest binary unit that divides it. A number with more digits
    /// than the schema permits is rounded up to a larger unit, and is at most 9999Pi.
    pub fn of_bytes(bytes: u64) -> Quantity {
        let divides = |(_, factor, _): &(&str, u64, u64)| bytes != 0 && bytes.is_multiple_of(*factor);
        let exact = EXACT_UNITS.iter().rposition(divides).unwrap_or_default();
        let rounded = EXACT_UNITS[exact..].iter().find_map(|(unit, factor, most)| {
            let count = bytes.div_ceil(*factor);
            (count <= *most).then(|| Quantity(format!("{count}{unit}")))
        });
        rounded.unwrap_or_else(|| Quantity("9999Pi".to_owned()))
    }

    /// Returns the text as written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the number of bytes.
    ///
    /// # Errors
    /// The text is not a quantity, or the number of bytes exceeds 64 bits.
    pub fn bytes(&self) -> Result<u64, AmountError> {
        scaled(&self.0, &BYTE_UNITS, Some(1))
            .ok_or_else(|| AmountError { text: self.0.clone(), expected: "bytes, for example 64Mi or 2Ti" })
    }
}

impl Span {
    /// Creates a value without validation.
    pub fn new(text: impl Into<String>) -> Span {
        Span(text.into())
    }

    /// Returns the text as written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the duration.
    ///
    /// # Errors
    /// The text is not a duration.
    pub fn duration(&self) -> Result<Duration, AmountError> {
        scaled(&self.0, &TIME_UNITS, None).map(Duration::from_millis).ok_or_else(|| AmountError {
            text: self.0.clone(),
            expected: "a duration, for example 50ms or 2s",
        })
    }
}

/// Parses digits and a unit. `bare` is the factor of a number without a unit, where that is allowed.
fn scaled(text: &str, units: &[(&str, u64)], bare: Option<u64>) -> Option<u64> {
    let (digits, factor) = units
        .iter()
        .find_map(|(unit, factor)| text.strip_suffix(unit).map(|digits| (digits, Some(*factor))))
        .unwrap_or((text, bare));
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = digits.parse().ok().filter(|_| plain)?;
    number.checked_mul(factor?)
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for AmountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid amount \"{}\": expected {}", self.text, self.expected)
    }
}

impl std::error::Error for AmountError {}

macro_rules! schema_of {
    ($type:ident, $schema:expr) => {
        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                $schema
            }
        }
    };
}

schema_of!(
    Quantity,
    json_schema!({
        "type": "string",
        "description": "Bytes: a whole number, alone or with k, M, G, T, P, Ki, Mi, Gi, Ti or Pi. At most 9999Pi.",
        "minLength": 1,
        "maxLength": QUANTITY_CHARS_MAX,
        // At most 64 bits of bytes.
        "pattern": "^([0-9]{1,12}([KM]i|[kM])?|[0-9]{1,10}Gi?|[0-9]{1,7}Ti?|[0-9]{1,4}Pi?)$",
    })
);
schema_of!(
    Span,
    json_schema!({
        "type": "string",
        "description": "Duration: a whole number with ms, s, m or h.",
        "minLength": 2,
        "maxLength": SPAN_CHARS_MAX,
        "pattern": "^[0-9]{1,7}(ms|s|m|h)$",
    })
);
schema_of!(
    Percent,
    json_schema!({
        "type": "integer", "format": "int32", "minimum": 0, "maximum": 100, "description": "Percentage.",
    })
);
schema_of!(
    Permille,
    json_schema!({
        "type": "integer", "format": "int32", "minimum": 0, "maximum": 1000, "description": "Thousandths.",
    })
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantity_parses_bytes_and_formats_in_the_largest_unit() {
        for (text, bytes) in
            [("0", 0), ("4096", 4096), ("4Ki", 4096), ("2Mi", 2 << 20), ("3k", 3000), ("1Pi", 1 << 50)]
        {
            assert_eq!(Quantity::new(text).bytes(), Ok(bytes), "{text}");
            assert_eq!(Quantity::of_bytes(bytes).bytes(), Ok(bytes), "{text}");
        }
        assert_eq!(Quantity::of_bytes(1536 << 30).as_str(), "1536Gi");
        assert_eq!(Quantity::of_bytes(1_000_001).as_str(), "1000001");
        // Rounded up to what the schema permits.
        for (bytes, text) in [
            (1_234_500_000_001, "1205566407Ki"),
            (1_000_000_000_001 << 10, "976562501Mi"),
            (10_000 << 50, "9999Pi"),
            (u64::MAX, "9999Pi"),
        ] {
            assert_eq!(Quantity::of_bytes(bytes).as_str(), text, "{bytes}");
        }
    }

    #[test]
    fn rejects_invalid_amounts_with_an_example() {
        for text in ["", "Mi", "1.5Gi", "-1", "+1", "1 Gi", "1MiB", "999999999999Pi"] {
            let error = Quantity::new(text).bytes().expect_err(text).to_string();
            assert!(error.contains("64Mi"), "{error}");
        }
        for text in ["", "1", "s", "1.5s", "-1s", "1d"] {
            let error = Span::new(text).duration().expect_err(text).to_string();
            assert!(error.contains("50ms"), "{error}");
        }
    }

    #[test]
    fn span_parses_to_a_duration() {
        for (text, millis) in [("50ms", 50), ("2s", 2000), ("3m", 180_000), ("1h", 3_600_000)] {
            assert_eq!(Span::new(text).duration(), Ok(Duration::from_millis(millis)), "{text}");
        }
    }
}
