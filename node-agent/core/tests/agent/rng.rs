//! Reproducible random numbers: splitmix64.

/// Random number generator; equal seeds produce equal numbers.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Returns `true` with a probability in thousandths.
    pub(crate) fn chance(&mut self, permille: u64) -> bool {
        self.next() % 1000 < permille
    }
}

/// Mixes the bits of a number.
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Runs a test for `count` seeds from the one in `REPRISE_FIRST_SEED` on (0 if not set), or only for the one
/// in `REPRISE_SEED`; names the seed that failed.
pub(crate) fn for_seeds(count: u64, test: impl Fn(u64)) {
    if let Some(seed) = seed_wanted() {
        return test(seed);
    }
    for seed in seeds(count) {
        let run = std::panic::AssertUnwindSafe(|| test(seed));
        let ended = std::panic::catch_unwind(run);
        assert!(ended.is_ok(), "failed as above; replay with REPRISE_SEED={seed}");
    }
}

/// The `count` seeds from the one in `REPRISE_FIRST_SEED` on (0 if not set).
pub(crate) fn seeds(count: u64) -> std::ops::Range<u64> {
    let first = number("REPRISE_FIRST_SEED").unwrap_or_default();
    first..first + count
}

/// The seed to replay, if one is named.
fn seed_wanted() -> Option<u64> {
    number("REPRISE_SEED")
}

/// Whether the seeds are those of every run. What all runs together must reach is only known for them.
pub(crate) fn has_fixed_seeds() -> bool {
    seed_wanted().is_none() && number("REPRISE_FIRST_SEED").is_none()
}

/// The number in an environment variable, if it is set.
#[expect(clippy::disallowed_methods, reason = "how a person or `make soak` names seeds")]
fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("invalid {variable} \"{text}\": expected a number")))
}
