//! What an outsider knows of the blocks of a device that loses power.

use std::collections::BTreeMap;

use reprise_agent_core::pool::{BatchId, PageNumber, StoredBlock};
use reprise_policy::Layout;

use super::Random;
use crate::device::worker::desk::number;

/// What the power losses of a test have met. A test that does not meet everything proves less than it says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Met {
    pub(super) power_losses: u64,
    /// Reported durable before the loss, and read again after it.
    pub(super) kept: u64,
    /// Not reported durable, and there all the same.
    pub(super) early: u64,
    /// Not reported durable, and not there.
    pub(super) missing: u64,
    /// Whose free was asked for and not durable yet, and that came back.
    pub(super) revived: u64,
    pub(super) slots_reused: u64,
    pub(super) bank_changes: u64,
}

/// What may have become of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Being written: there or not.
    Unknown(BatchId),
    /// Reported durable: there.
    Durable(StoredBlock),
    /// Being freed: there or not.
    Freeing,
    /// Freed for good, or not there at an earlier start: never there again.
    Gone,
}

/// A block that was ever written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) page: PageNumber,
    pub(super) layout: Layout,
    pub(super) fate: Fate,
}

/// Every block ever written, by the number that its key and bytes are made of; outlives power losses.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    blocks: BTreeMap<u64, Block>,
    pub(super) met: Met,
}

impl Ledger {
    /// The number of a new block.
    pub(super) fn begin(&mut self, block: Block) -> u64 {
        self.met.slots_reused += u64::from(self.blocks.values().any(|other| other.page == block.page));
        let number = self.blocks.len() as u64;
        self.blocks.insert(number, block);
        number
    }

    /// A batch was reported; gives the numbers of its blocks.
    pub(super) fn durable(&mut self, batch: BatchId, stored: &[StoredBlock]) -> Vec<u64> {
        let numbers: Vec<u64> = stored.iter().map(|stored| number(&stored.key)).collect();
        for (number, stored) in numbers.iter().zip(stored) {
            let block = self.blocks.get_mut(number).expect("a block that was written");
            assert_eq!((block.fate, block.page), (Fate::Unknown(batch), stored.page), "block {number}");
            block.fate = Fate::Durable(*stored);
        }
        let is_left = |block: &Block| block.fate == Fate::Unknown(batch);
        assert!(!self.blocks.values().any(is_left), "a batch is reported whole");
        numbers
    }

    /// Picks a stored block to free.
    pub(super) fn free_one(&mut self, random: &mut Random) -> Option<PageNumber> {
        let is_stored = |block: &&mut Block| matches!(block.fate, Fate::Durable(_));
        let stored = self.blocks.values().filter(|block| matches!(block.fate, Fate::Durable(_))).count();
        let nth = random.below(stored.max(1) as u64) as usize;
        let block = self.blocks.values_mut().filter(is_stored).nth(nth)?;
        block.fate = Fate::Freeing;
        Some(block.page)
    }

    pub(super) fn frees_are_durable(&mut self) {
        let freeing = self.blocks.values_mut().filter(|block| block.fate == Fate::Freeing);
        freeing.for_each(|block| block.fate = Fate::Gone);
    }

    /// Compares what was found after a power loss with what was promised before it; from now on that is what there is.
    pub(super) fn settle(&mut self, found: &[StoredBlock]) {
        let mut by_number: BTreeMap<u64, StoredBlock> =
            found.iter().map(|stored| (number(&stored.key), *stored)).collect();
        assert_eq!(by_number.len(), found.len(), "a block is found once");
        self.met.power_losses += 1;
        for (number, block) in &mut self.blocks {
            let found = by_number.remove(number);
            match (block.fate, found) {
                (Fate::Durable(promised), _) => {
                    assert_eq!(found, Some(promised), "block {number} was reported durable");
                    self.met.kept += 1;
                }
                (Fate::Unknown(_), Some(_)) => self.met.early += 1,
                (Fate::Unknown(_), None) => self.met.missing += 1,
                (Fate::Freeing, found) => self.met.revived += u64::from(found.is_some()),
                (Fate::Gone, found) => assert_eq!(found, None, "block {number} has come back"),
            }
            if let Some(found) = &found {
                assert_eq!((found.page, found.layout), (block.page, block.layout), "block {number}");
            }
            block.fate = found.map_or(Fate::Gone, Fate::Durable);
        }
        assert!(by_number.is_empty(), "blocks that nobody has written: {by_number:?}");
    }
}
