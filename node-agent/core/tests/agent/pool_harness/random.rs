//! Seeded random choices (SplitMix64), and a guard that prints the seed of a failing test.

/// A deterministic random source.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: u64,
    seed: u64,
}

impl Random {
    /// A source whose choices depend only on the seed.
    pub(crate) fn new(seed: u64) -> Random {
        Random { state: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66, seed }
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit
    }

    /// An index into `len` elements.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("below len")
    }

    /// True in `wins` of `of` cases, at random.
    pub(crate) fn chance(&mut self, wins: u64, of: u64) -> bool {
        self.below(of) < wins
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

/// Prints the seed of a failing test.
pub(crate) struct SeedGuard {
    /// The name of the function to replay.
    pub(crate) run: &'static str,
    /// Its seed.
    pub(crate) seed: u64,
}

impl Drop for SeedGuard {
    #[expect(clippy::print_stderr, reason = "a failing test prints how to replay it")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with seed {}; to replay, call {}({}) alone", self.seed, self.run, self.seed);
        }
    }
}
