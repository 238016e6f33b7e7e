//! Budgets in USD a month, and their text.

use std::str::FromStr;

use super::PlanError;

/// Hours of a month, as clouds bill it.
pub const HOURS_PER_MONTH: f64 = 730.0;

/// Hours of a year.
pub const HOURS_PER_YEAR: f64 = 8_760.0;

/// Largest budget in USD a month: above it, a unit is wrong.
const USD_PER_MONTH_MAX: f64 = 1e12;

/// Money for hardware. Profiles have prices of an hour, so every budget is one of an hour.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Budget {
    /// USD an hour.
    pub usd_per_hour: f64,
}

impl Budget {
    /// Budget in USD a month.
    pub fn usd_per_month(self) -> f64 {
        self.usd_per_hour * HOURS_PER_MONTH
    }
}

impl FromStr for Budget {
    type Err = PlanError;

    /// Parses an amount of USD a month, or with a unit: `50000`, `$50k`, `70/hour`, `600000/year`, `150000/3years`.
    fn from_str(text: &str) -> Result<Budget, PlanError> {
        let invalid = || PlanError::InvalidBudget(text.to_owned());
        let (amount, unit) = text.split_once('/').unwrap_or((text, "month"));
        let amount: String = amount
            .trim()
            .trim_start_matches('$')
            .chars()
            .filter(|character| !matches!(character, ',' | '_'))
            .collect();
        let (digits, factor) = match amount.as_bytes().last() {
            Some(b'k' | b'K') => (&amount[..amount.len() - 1], 1e3),
            Some(b'm' | b'M') => (&amount[..amount.len() - 1], 1e6),
            _ => (amount.as_str(), 1.0),
        };
        let usd = digits.parse::<f64>().map_err(|_| invalid())? * factor;
        let hours = hours_of(unit.trim()).ok_or_else(invalid)?;
        let usd_per_hour = usd / hours;
        // Written so that NaN is outside.
        if !(0.0..=USD_PER_MONTH_MAX).contains(&(usd_per_hour * HOURS_PER_MONTH)) {
            return Err(invalid());
        }
        Ok(Budget { usd_per_hour })
    }
}

/// Hours of a unit of time, or of a number of years.
fn hours_of(unit: &str) -> Option<f64> {
    match unit {
        "hour" | "h" => return Some(1.0),
        "month" => return Some(HOURS_PER_MONTH),
        "year" => return Some(HOURS_PER_YEAR),
        _ => {}
    }
    let years: f64 = unit.strip_suffix("years")?.trim().parse().ok()?;
    (0.1..=30.0).contains(&years).then_some(years * HOURS_PER_YEAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn month(text: &str) -> f64 {
        text.parse::<Budget>().map(Budget::usd_per_month).expect(text)
    }

    #[test]
    fn amounts_have_units_and_default_to_a_month() {
        assert!((month("50000") - 50_000.0).abs() < 1e-6);
        assert!((month("$50k") - month("50,000/month")).abs() < 1e-6);
        assert!((month("10/hour") - 7_300.0).abs() < 1e-6);
        assert!((month("876000/year") - 73_000.0).abs() < 1e-6);
        assert!((month("2_628_000/3years") - 73_000.0).abs() < 1e-6);
    }

    #[test]
    fn invalid_amounts_are_refused_with_the_accepted_forms() {
        for text in ["", "much", "-5", "nan", "inf", "5/week", "5/0years", "1e300", "k"] {
            let error = text.parse::<Budget>().expect_err(text).to_string();
            assert!(error.contains("/3years") && error.contains(text), "{error}");
        }
    }
}
