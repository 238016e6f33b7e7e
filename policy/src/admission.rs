//! Admission to NVMe: which saved blocks are written to a device.
//!
//! A write that nothing ever reads wears out a drive for nothing. [`Admission`] decides for one block at a time:
//!
//! | mode | a block is written |
//! |---|---|
//! | `always` (default) | after its commit |
//! | `second_use` | once it was used after its commit, or committed again after its eviction |
//! | `expected_reuse` | if the time that a later read saves is worth the time of the write |
//!
//! A block that is not admitted stays in DRAM until it is evicted there. Each mode is subject to the
//! [`WriteBudget`](budget::WriteBudget) of the devices, which the caller keeps.
//!
//! **Expected reuse.** With p the probability that a block is used again, a block is admitted if
//!
//! ```text
//!   p × (time to compute the block − time to read it)  ≥  time to write it × scarcity
//! ```
//!
//! * p is observed for each tenant and position in the chain, in powers of two: used blocks ÷ committed blocks. Heads
//!   of chains are shared, tails are not.
//! * Scarcity is 1 without a write budget. With one, it is the inverse of the part of the burst that is left, so
//!   that the last bytes of a budget go to the blocks with the most reuse.
//!
//! Out of scope: when admitted blocks are written, and which blocks are evicted for them.

use serde::{Deserialize, Serialize};

use crate::eviction::Group;
use crate::eviction::restore_cost::{RestoreFrom, restore_ns};

pub mod budget;
#[cfg(test)]
mod laws;
mod reuse;
mod seen;

use reuse::ReuseByTenant;
use seen::SeenKeys;

/// Rule by which blocks are admitted to NVMe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdmissionMode {
    /// Every block.
    #[default]
    Always,
    /// Blocks with a use after their first commit.
    SecondUse,
    /// Blocks whose expected reuse is worth the write.
    ExpectedReuse,
}

impl AdmissionMode {
    /// All modes, in the order of their documentation.
    pub const ALL: [AdmissionMode; 3] =
        [AdmissionMode::Always, AdmissionMode::SecondUse, AdmissionMode::ExpectedReuse];

    /// Name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            AdmissionMode::Always => "always",
            AdmissionMode::SecondUse => "second_use",
            AdmissionMode::ExpectedReuse => "expected_reuse",
        }
    }
}

/// Whether a block was used since its first commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// Not since it was committed.
    None,
    /// A load, a read by a peer or another commit has used it.
    Used,
}

/// Facts of a block that could be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Hash of the key.
    pub key_hash: u64,
    /// Tenant of the block.
    pub tenant: Group,
    /// Number of blocks before it in its chain; `None` if unknown.
    pub position: Option<u32>,
    /// Uses since its first commit.
    pub reuse: Reuse,
    /// Bytes that the write takes, header page included.
    pub bytes: u64,
    /// Tokens that an engine computes to get the block again.
    pub tokens: u64,
    /// Thousandths of the burst that the devices' budgets have left; 1000 without a budget.
    pub budget_left_permille: u16,
}

/// Decision about a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The block is written.
    Admit,
    /// The mode requires a use after the commit.
    RefuseFirstUse,
    /// The expected reuse is not worth the write.
    RefuseLowValue,
}

/// Lowest remainder of a budget that scarcity is computed from: at most 16 times the time of a write.
const BUDGET_LEFT_PERMILLE_MIN: u64 = 63;

/// State of the admission of one agent.
#[derive(Debug)]
pub struct Admission {
    mode: AdmissionMode,
    seen: SeenKeys,
    reuse: ReuseByTenant,
}

impl Admission {
    /// Creates the state; only `second_use` allocates memory for keys.
    pub fn new(mode: AdmissionMode) -> Admission {
        let seen = match mode {
            AdmissionMode::SecondUse => SeenKeys::new(),
            AdmissionMode::Always | AdmissionMode::ExpectedReuse => SeenKeys::disabled(),
        };
        Admission { mode, seen, reuse: ReuseByTenant::default() }
    }

    /// Mode of the agent.
    pub fn mode(&self) -> AdmissionMode {
        self.mode
    }

    /// Records the first commit of a block.
    pub fn committed(&mut self, tenant: Group, position: Option<u32>) {
        self.reuse.committed(tenant, position);
    }

    /// Records the first use of a block after its commit.
    pub fn reused(&mut self, tenant: Group, position: Option<u32>) {
        self.reuse.reused(tenant, position);
    }

    /// Decides about a block. A key that `second_use` refuses is admitted when it is offered again.
    pub fn decide(&mut self, block: &Candidate) -> Verdict {
        match self.mode {
            AdmissionMode::Always => Verdict::Admit,
            AdmissionMode::SecondUse => match block.reuse {
                Reuse::Used => Verdict::Admit,
                Reuse::None if self.seen.take(block.key_hash) => Verdict::Admit,
                Reuse::None => {
                    self.seen.add(block.key_hash);
                    Verdict::RefuseFirstUse
                }
            },
            AdmissionMode::ExpectedReuse if self.is_worth(block) => Verdict::Admit,
            AdmissionMode::ExpectedReuse => Verdict::RefuseLowValue,
        }
    }

    /// Decides about a block that DRAM is about to evict, without a change of the state.
    pub fn decide_again(&self, block: &Candidate) -> Verdict {
        match self.mode {
            AdmissionMode::Always => Verdict::Admit,
            AdmissionMode::SecondUse if block.reuse == Reuse::Used => Verdict::Admit,
            AdmissionMode::SecondUse => Verdict::RefuseFirstUse,
            AdmissionMode::ExpectedReuse if self.is_worth(block) => Verdict::Admit,
            AdmissionMode::ExpectedReuse => Verdict::RefuseLowValue,
        }
    }

    fn is_worth(&self, block: &Candidate) -> bool {
        let read = restore_ns(RestoreFrom::Device, block.bytes, block.tokens);
        let gain = restore_ns(RestoreFrom::Recompute, block.bytes, block.tokens).saturating_sub(read);
        let (used, of) = self.reuse.odds(block.tenant, block.position, block.reuse);
        let left = u64::from(block.budget_left_permille).clamp(BUDGET_LEFT_PERMILLE_MIN, 1000);
        // A write takes as long as a read. Products of u64 values fit u128.
        u128::from(used) * u128::from(gain) * u128::from(left) >= u128::from(of) * u128::from(read) * 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANT: Group = Group(3);

    /// 16 tokens and 2 MiB: 1.6 ms to compute, 0.69 ms to read or write.
    fn block(key_hash: u64, position: u32) -> Candidate {
        Candidate {
            key_hash,
            tenant: TENANT,
            position: Some(position),
            reuse: Reuse::None,
            bytes: 2 << 20,
            tokens: 16,
            budget_left_permille: 1000,
        }
    }

    #[test]
    fn second_use_admits_a_block_that_returns_or_was_used() {
        let mut admission = Admission::new(AdmissionMode::SecondUse);
        assert_eq!(admission.decide(&block(1, 0)), Verdict::RefuseFirstUse);
        assert_eq!(
            admission.decide_again(&block(1, 0)),
            Verdict::RefuseFirstUse,
            "an eviction does not count"
        );
        assert_eq!(admission.decide(&block(1, 0)), Verdict::Admit, "committed again after its eviction");
        assert_eq!(admission.decide(&block(2, 0)), Verdict::RefuseFirstUse);
        assert_eq!(admission.decide(&Candidate { reuse: Reuse::Used, ..block(3, 0) }), Verdict::Admit);
    }

    #[test]
    fn expected_reuse_refuses_positions_that_nothing_uses_again() {
        let mut admission = Admission::new(AdmissionMode::ExpectedReuse);
        assert_eq!(admission.decide(&block(1, 100)), Verdict::Admit, "nothing is known");
        for _ in 0..1000 {
            admission.committed(TENANT, Some(100));
            admission.committed(TENANT, Some(3));
            admission.reused(TENANT, Some(3));
        }
        assert_eq!(admission.decide(&block(1, 100)), Verdict::RefuseLowValue);
        assert_eq!(admission.decide(&block(1, 90)), Verdict::RefuseLowValue, "same power of two");
        assert_eq!(admission.decide(&block(1, 3)), Verdict::Admit);
        let scarce = Candidate { budget_left_permille: 100, ..block(1, 3) };
        assert_eq!(admission.decide(&scarce), Verdict::RefuseLowValue, "the budget is nearly spent");
    }

    #[test]
    fn expected_reuse_of_a_tenant_is_not_learned_from_others() {
        let mut admission = Admission::new(AdmissionMode::ExpectedReuse);
        (0..100_000).for_each(|_| admission.committed(TENANT, Some(0)));
        assert_eq!(admission.decide(&block(1, 0)), Verdict::RefuseLowValue, "a batch of unique prompts");
        for tenant in [Group(0), Group(2), Group(400)] {
            let other = Candidate { tenant, ..block(1, 0) };
            assert_eq!(admission.decide(&other), Verdict::Admit, "nothing is known of {tenant:?}");
        }
    }

    #[test]
    fn expected_reuse_of_unknown_positions_is_not_that_of_heads() {
        let mut admission = Admission::new(AdmissionMode::ExpectedReuse);
        (0..1000).for_each(|_| admission.committed(TENANT, None));
        let unknown = Candidate { position: None, ..block(1, 0) };
        assert_eq!(admission.decide(&unknown), Verdict::RefuseLowValue);
        assert_eq!(admission.decide(&block(1, 0)), Verdict::Admit, "no head was seen");
    }

    #[test]
    fn expected_reuse_refuses_blocks_that_are_computed_faster_than_read() {
        let mut admission = Admission::new(AdmissionMode::ExpectedReuse);
        assert_eq!(admission.decide(&Candidate { tokens: 4, ..block(1, 0) }), Verdict::RefuseLowValue);
    }

    #[test]
    fn mode_is_read_by_name_and_an_unknown_one_is_refused_with_the_list() {
        #[derive(Debug, Deserialize)]
        struct Section {
            admission: AdmissionMode,
        }
        for mode in AdmissionMode::ALL {
            let section: Section =
                toml::from_str(&format!("admission = '{}'", mode.name())).expect("a known mode");
            assert_eq!(section.admission, mode);
        }
        let error = toml::from_str::<Section>("admission = 'never'").expect_err("unknown").to_string();
        assert!(AdmissionMode::ALL.iter().all(|mode| error.contains(mode.name())), "{error}");
    }
}
