//! Model of the expected blocks on a device that loses power.

use std::collections::BTreeMap;

use reprise_agent_core::pool::{BatchId, PageNumber, StoredBlock};
use reprise_policy::Layout;

use super::Random;
use crate::device::worker::test_bench::number;

/// Coverage of the power losses of a test. A test that does not cover all cases proves less than it claims.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct Coverage {
    pub(in super::super) power_losses: u64,
    /// Blocks reported as durable before the loss and read after it.
    pub(in super::super) survived: u64,
    /// Blocks not reported as durable that survived.
    pub(in super::super) early: u64,
    /// Blocks not reported as durable that were lost.
    pub(in super::super) missing: u64,
    /// Blocks that reappeared because their free was not durable yet.
    pub(in super::super) revived: u64,
    pub(in super::super) slots_reused: u64,
    pub(in super::super) bank_changes: u64,
}

impl Coverage {
    /// Returns the sum of two coverages.
    pub(in super::super) fn plus(self, other: Coverage) -> Coverage {
        Coverage {
            power_losses: self.power_losses + other.power_losses,
            survived: self.survived + other.survived,
            early: self.early + other.early,
            missing: self.missing + other.missing,
            revived: self.revived + other.revived,
            slots_reused: self.slots_reused + other.slots_reused,
            bank_changes: self.bank_changes + other.bank_changes,
        }
    }
}

/// Expected state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpectedState {
    /// Being written: may exist or not.
    Writing(BatchId),
    /// Reported as durable: must exist.
    Durable(StoredBlock),
    /// Being freed: may exist or not.
    Freeing,
    /// Freed durably, or missing at an earlier start: must never reappear.
    Gone,
}

/// A block that was written at some time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) page: PageNumber,
    pub(super) layout: Layout,
    pub(super) expected: ExpectedState,
}

/// All blocks ever written, by number; survives power losses.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    blocks: BTreeMap<u64, Block>,
    pub(super) coverage: Coverage,
}

impl Ledger {
    /// Records a new block and returns its number.
    pub(super) fn begin(&mut self, block: Block) -> u64 {
        self.coverage.slots_reused += u64::from(self.blocks.values().any(|other| other.page == block.page));
        let number = self.blocks.len() as u64;
        self.blocks.insert(number, block);
        number
    }

    /// Records a reported batch and returns the numbers of its blocks.
    pub(super) fn durable(&mut self, batch: BatchId, stored: &[StoredBlock]) -> Vec<u64> {
        let numbers: Vec<u64> = stored.iter().map(|stored| number(&stored.key)).collect();
        for (number, stored) in numbers.iter().zip(stored) {
            let block = self.blocks.get_mut(number).expect("a block that was written");
            assert_eq!(
                (block.expected, block.page),
                (ExpectedState::Writing(batch), stored.page),
                "block {number}"
            );
            block.expected = ExpectedState::Durable(*stored);
        }
        let is_left = |block: &Block| block.expected == ExpectedState::Writing(batch);
        assert!(!self.blocks.values().any(is_left), "a batch is reported completely");
        numbers
    }

    /// Selects a stored block to free.
    pub(super) fn free_one(&mut self, random: &mut Random) -> Option<PageNumber> {
        let is_stored = |block: &&mut Block| matches!(block.expected, ExpectedState::Durable(_));
        let stored =
            self.blocks.values().filter(|block| matches!(block.expected, ExpectedState::Durable(_))).count();
        let nth = random.below(stored.max(1) as u64) as usize;
        let block = self.blocks.values_mut().filter(is_stored).nth(nth)?;
        block.expected = ExpectedState::Freeing;
        Some(block.page)
    }

    pub(super) fn frees_are_durable(&mut self) {
        let freeing = self.blocks.values_mut().filter(|block| block.expected == ExpectedState::Freeing);
        freeing.for_each(|block| block.expected = ExpectedState::Gone);
    }

    /// Compares the blocks found after a power loss with the expectations, which are then updated to the
    /// actual state.
    pub(super) fn verify(&mut self, found: &[StoredBlock]) {
        let mut by_number: BTreeMap<u64, StoredBlock> =
            found.iter().map(|stored| (number(&stored.key), *stored)).collect();
        assert_eq!(by_number.len(), found.len(), "a block is found once");
        self.coverage.power_losses += 1;
        for (number, block) in &mut self.blocks {
            let found = by_number.remove(number);
            match (block.expected, found) {
                (ExpectedState::Durable(promised), _) => {
                    assert_eq!(found, Some(promised), "block {number} was reported durable");
                    self.coverage.survived += 1;
                }
                (ExpectedState::Writing(_), Some(_)) => self.coverage.early += 1,
                (ExpectedState::Writing(_), None) => self.coverage.missing += 1,
                (ExpectedState::Freeing, found) => self.coverage.revived += u64::from(found.is_some()),
                (ExpectedState::Gone, found) => assert_eq!(found, None, "block {number} has reappeared"),
            }
            if let Some(found) = &found {
                assert_eq!((found.page, found.layout), (block.page, block.layout), "block {number}");
            }
            block.expected = found.map_or(ExpectedState::Gone, ExpectedState::Durable);
        }
        assert!(by_number.is_empty(), "blocks that were never written: {by_number:?}");
    }
}
