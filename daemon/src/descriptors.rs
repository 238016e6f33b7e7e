//! The limit on open files (RLIMIT_NOFILE): raised at start, and divided among the parts of a program.
//!
//! The soft limit is a convention for programs that use select(2), which has room for 1,024 descriptors. No program of
//! Reprise does, so each raises it to the hard limit. Children inherit the raised limit.
//!
//! What is fixed comes off first. Each [`Part`] then gets its minimum, and what is left in proportion to what it lacks.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A part of a program whose descriptors grow with use: most often a listener.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Descriptors of one unit, such as a connection.
    pub each: u64,
    /// Fewest units with which the program is of use.
    pub min: u64,
    /// Most units.
    pub max: u64,
}

/// The hard limit is below what a program needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the hard limit on open files is {limit}, and at least {needed} are needed: raise it (`LimitNOFILE=` of a systemd \
     unit, `ulimit -Hn` of a shell, the defaults of a container runtime)"
)]
pub struct TooFewDescriptors {
    /// The hard limit.
    pub limit: u64,
    /// What it must be at least.
    pub needed: u64,
}

/// Raises the soft limit on open files to the hard limit, and returns it.
///
/// # Errors
/// What the system reports; the limit is then as it was.
pub fn raise_limit() -> io::Result<u64> {
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard })?;
    Ok(limit())
}

/// The soft limit on open files.
pub fn limit() -> u64 {
    // None is RLIM_INFINITY, getrlimit(2).
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Divides `limit` descriptors, of which `fixed` are in use whatever happens; returns the units of each part.
///
/// # Errors
/// The minima do not fit.
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
        part.min + u64::try_from(share).expect("at most what the part lacks")
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
    fn the_sum_of_all_parts_fits_under_every_limit_that_is_enough() {
        for limit in 156..2000 {
            let [sessions, pages] = divide(limit, 100, [SESSIONS, PAGES]).expect("enough");
            assert!(100 + 6 * sessions + pages <= limit, "{sessions} and {pages} of {limit}");
            assert!((8..=256).contains(&sessions) && (8..=64).contains(&pages));
        }
    }

    #[test]
    fn a_limit_below_the_minima_is_refused_with_the_number_that_is_needed() {
        let refused = divide(155, 100, [SESSIONS, PAGES]).expect_err("one too few");
        assert_eq!(refused, TooFewDescriptors { limit: 155, needed: 156 });
        assert!(refused.to_string().contains("is 155, and at least 156 are needed"), "{refused}");
    }

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let raised = raise_limit().expect("a process may raise its soft limit");
        assert_eq!(Some(raised), getrlimit(Resource::Nofile).maximum.or(Some(u64::MAX)));
        assert_eq!(limit(), raised);
    }
}
