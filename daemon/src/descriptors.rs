//! The limit on open files (RLIMIT_NOFILE): raised at start, and divided among the listeners of a program.
//!
//! The soft limit exists for programs that use select(2), which handles at most 1,024 descriptors. No program
//! of Reprise does, so each raises it to the hard limit. Child processes inherit the raised limit.
//!
//! Division: fixed use is subtracted first. Each [`Part`] gets its minimum, and a share of the rest in
//! proportion to the difference to its maximum.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A part of a program with a variable number of descriptors, usually a listener.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Descriptors per unit, such as a connection.
    pub each: u64,
    /// Minimum number of units with which the program is useful.
    pub min: u64,
    /// Maximum number of units.
    pub max: u64,
}

/// The hard limit is below what a program needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the hard limit on open files is {limit}, but at least {needed} are needed: raise it (`LimitNOFILE=` of a systemd \
     unit, `ulimit -Hn` of a shell, the defaults of a container runtime)"
)]
pub struct TooFewDescriptors {
    /// Current hard limit.
    pub limit: u64,
    /// Required limit.
    pub needed: u64,
}

/// Raises the soft limit on open files to the hard limit, and returns it.
///
/// # Errors
/// Error of the system; the limit is unchanged.
pub fn raise_limit() -> io::Result<u64> {
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard })?;
    Ok(limit())
}

/// Current soft limit on open files.
pub fn limit() -> u64 {
    // `None` means RLIM_INFINITY, getrlimit(2).
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Divides `limit` descriptors after subtracting `fixed` ones; returns the units of each part.
///
/// # Errors
/// The limit is below the sum of all minima.
pub fn divide<const PARTS: usize>(
    limit: u64,
    fixed: u64,
    parts: [Part; PARTS],
) -> Result<[u64; PARTS], TooFewDescriptors> {
    let needed = fixed + parts.iter().map(|part| part.each * part.min).sum::<u64>();
    let Some(rest) = limit.checked_sub(needed) else { return Err(TooFewDescriptors { limit, needed }) };
    let lacking = |part: &Part| u128::from(part.each * part.max.saturating_sub(part.min));
    let all_lacking: u128 = parts.iter().map(lacking).sum();
    Ok(parts.map(|part| {
        let share = match all_lacking {
            0 => 0,
            all => lacking(&part) * u128::from(rest).min(all) / all / u128::from(part.each.max(1)),
        };
        part.min + u64::try_from(share).expect("at most the lacking units")
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSIONS: Part = Part { each: 6, min: 8, max: 256 };
    const PAGES: Part = Part { each: 1, min: 8, max: 64 };

    #[test]
    fn a_large_limit_gives_every_part_its_maximum() {
        assert_eq!(divide(1 << 20, 100, [SESSIONS, PAGES]), Ok([256, 64]));
        assert_eq!(divide(u64::MAX, 100, [SESSIONS, PAGES]), Ok([256, 64]));
    }

    #[test]
    fn the_sum_of_all_parts_fits_within_every_sufficient_limit() {
        for limit in 156..2000 {
            let [sessions, pages] = divide(limit, 100, [SESSIONS, PAGES]).expect("enough");
            assert!(100 + 6 * sessions + pages <= limit, "{sessions} and {pages} of {limit}");
            assert!((8..=256).contains(&sessions) && (8..=64).contains(&pages));
        }
    }

    #[test]
    fn rejects_a_limit_below_the_minima_and_reports_the_required_one() {
        let refused = divide(155, 100, [SESSIONS, PAGES]).expect_err("one too few");
        assert_eq!(refused, TooFewDescriptors { limit: 155, needed: 156 });
        assert!(refused.to_string().contains("is 155, but at least 156 are needed"), "{refused}");
    }

    #[test]
    fn raises_the_soft_limit_to_the_hard_limit() {
        let raised = raise_limit().expect("a process may raise its soft limit");
        assert_eq!(Some(raised), getrlimit(Resource::Nofile).maximum.or(Some(u64::MAX)));
        assert_eq!(limit(), raised);
    }
}
