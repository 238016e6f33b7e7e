//! The guarantees of the pool for every block.

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_agent_core::pool::{
    BatchId, BlockWrite, ExtentCommit, PageNumber, PoolEvent, PoolUsage, StoredBlock,
};
use reprise_policy::{BlockKey, Generation, Layout, TenantId};

use super::clients::{Lend, LendState, Lends, Survivors};
use super::disk::Disk;
use super::random::Random;
use super::{PAGE, checksums, payload, tenant_of};

/// The permitted outcomes of a block after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// Being written: it may be recovered or not.
    Writing,
    /// Reported durable: it must be recovered.
    Stored,
    /// Its free or quarantine was requested: it may be recovered or not.
    Removing,
    /// Durably removed, or its write failed: it must not be recovered.
    Gone,
}

/// A block of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelBlock {
    /// Its slot.
    pub(crate) page: PageNumber,
    /// Its layout.
    pub(crate) layout: Layout,
    /// Its permitted outcomes.
    pub(crate) outcome: BlockState,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    keys: u64,
    batches: u64,
    /// Every block ever written. Keys are never reused.
    pub(crate) blocks: BTreeMap<BlockKey, ModelBlock>,
    /// First page and number of pages of every slot that must not be allocated.
    taken: BTreeMap<u64, u64>,
    /// Slots whose quarantine is durable, with their number of pages.
    quarantined: BTreeMap<u64, u64>,
    /// Quarantines whose record is not known to be durable.
    quarantining: BTreeSet<u64>,
    stored: Vec<PageNumber>,
    by_page: BTreeMap<u64, BlockKey>,
    generations: BTreeSet<(u64, Generation)>,
    /// Slots of clients that write or read them.
    pub(crate) lends: Lends,
    lost: bool,
}

impl Model {
    /// A key that was never used.
    pub(crate) fn new_key(&mut self) -> BlockKey {
        self.keys += 1;
        let mut bits = Random::new(self.keys);
        let mut key = [0; 16];
        key[..8].copy_from_slice(&bits.bits().to_le_bytes());
        key[8..].copy_from_slice(&self.keys.to_le_bytes());
        BlockKey(key)
    }

    /// The pool allocated a slot. This implies that the removals of earlier blocks in that slot are
    /// durable.
    pub(crate) fn allocated(&mut self, page: PageNumber, layout: &Layout) {
        let pages = layout.slot_bytes() / PAGE + 1;
        while let Some((first, length)) =
            self.taken.range(..page.0 + pages).next_back().map(|(a, b)| (*a, *b))
        {
            if first + length <= page.0 {
                break;
            }
            if let Some(lend) = self.lends.remove(PageNumber(first)) {
                assert_eq!(lend.state, LendState::Returning, "slot {page:?} overlaps {lend:?} at {first}");
                self.taken.remove(&first);
                continue;
            }
            let there = self.by_page.get(&first).copied().filter(|_| !self.quarantining.contains(&first));
            let known = there.and_then(|key| self.blocks.get_mut(&key));
            let known = known.expect("a reserved or quarantined slot is not allocated");
            assert_eq!(
                known.outcome,
                BlockState::Removing,
                "slot {page:?} of {pages} pages overlaps one at {first} of {length}"
            );
            known.outcome = BlockState::Gone;
            self.taken.remove(&first);
        }
        self.taken.insert(page.0, pages);
    }

    /// The pool got a batch.
    pub(crate) fn begin_batch(&mut self, blocks: &[BlockWrite]) -> BatchId {
        for block in blocks {
            let known = ModelBlock { page: block.page, layout: block.layout, outcome: BlockState::Writing };
            self.blocks.insert(block.key, known);
            self.by_page.insert(block.page.0, block.key);
        }
        self.batches += 1;
        BatchId(self.batches)
    }

    /// The pool is to lend these slots.
    pub(crate) fn begin_lease(&mut self, pages: &[PageNumber], layout: Layout, tenant: TenantId) -> BatchId {
        let lends: Vec<(PageNumber, Lend)> =
            pages.iter().map(|page| (*page, self.new_lend(layout, tenant))).collect();
        self.batches += 1;
        self.lends.begin_lease(BatchId(self.batches), lends.into_iter());
        BatchId(self.batches)
    }

    /// A lend of a slot for a new block of a tenant.
    fn new_lend(&mut self, layout: Layout, tenant: TenantId) -> Lend {
        loop {
            let key = self.new_key();
            if tenant_of(&key) == tenant {
                return Lend { layout, key, generation: None, state: LendState::Lending };
            }
        }
    }

    /// The pool is to commit blocks that clients have written.
    pub(crate) fn begin_commit(&mut self, blocks: &[ExtentCommit]) -> BatchId {
        for block in blocks {
            self.lends.set(block.page, LendState::Committing);
            let known = ModelBlock { page: block.page, layout: block.layout, outcome: BlockState::Writing };
            self.blocks.insert(block.key, known);
            self.by_page.insert(block.page.0, block.key);
        }
        self.batches += 1;
        BatchId(self.batches)
    }

    /// A pinned block is removed.
    pub(crate) fn withdrawn(&mut self, page: PageNumber) {
        let key = self.remove(page);
        self.known(&key).outcome = BlockState::Removing;
        let layout = self.blocks[&key].layout;
        let lend = Lend { layout, key, generation: None, state: LendState::Withdrawn };
        self.lends.insert(page, lend);
    }

    /// The key of the block whose header is written at this offset.
    pub(crate) fn key_being_written(&self, offset: u64) -> BlockKey {
        self.by_page[&(offset / PAGE)]
    }

    /// The page of a random stored block.
    pub(crate) fn pick_stored(&self, random: &mut Random) -> Option<PageNumber> {
        (!self.stored.is_empty()).then(|| self.stored[random.index(self.stored.len())])
    }

    /// Pages of all stored blocks.
    pub(crate) fn stored_pages(&self) -> Vec<PageNumber> {
        self.stored.clone()
    }

    /// The free of a block is requested.
    pub(crate) fn free_requested(&mut self, page: PageNumber) {
        let key = self.remove(page);
        self.known(&key).outcome = BlockState::Removing;
    }

    /// The quarantine of a block's slot is requested.
    pub(crate) fn quarantine_requested(&mut self, page: PageNumber) {
        let key = self.remove(page);
        self.known(&key).outcome = BlockState::Removing;
        self.quarantining.insert(page.0);
    }

    /// All frees requested so far are durable.
    pub(crate) fn frees_are_durable(&mut self) {
        for page in self.lends.pages(|state| state == LendState::Returning) {
            self.lends.remove(page);
            self.taken.remove(&page.0);
        }
        let (quarantining, lends, taken) = (&self.quarantining, &self.lends, &mut self.taken);
        for known in self.blocks.values_mut().filter(|known| known.outcome == BlockState::Removing) {
            if !quarantining.contains(&known.page.0) && lends.get(known.page.0).is_none() {
                known.outcome = BlockState::Gone;
                taken.remove(&known.page.0);
            }
        }
    }

    /// The pool reported an event.
    pub(crate) fn event(&mut self, event: &PoolEvent) {
        match event {
            PoolEvent::BatchDone { batch, stored, .. } if self.lends.is_lease(*batch) => {
                self.lends.offered(stored);
            }
            PoolEvent::BatchDone { stored, failed, .. } => {
                for block in stored {
                    self.check_block(block);
                    assert_eq!(self.blocks[&block.key].outcome, BlockState::Writing);
                    self.known(&block.key).outcome = BlockState::Stored;
                    self.stored.push(block.page);
                    if let Some(lend) = self.lends.remove(block.page) {
                        assert_eq!(
                            lend.generation,
                            Some(block.generation),
                            "a commit keeps its lease's generation"
                        );
                    }
                    let fresh = self.generations.insert((block.page.0, block.generation));
                    assert!(fresh, "generation {:?} of {:?} was used before", block.generation, block.page);
                }
                for key in failed {
                    let page = self.blocks[key].page.0;
                    self.known(key).outcome = BlockState::Gone;
                    self.lends.remove(PageNumber(page));
                    self.quarantined.insert(page, self.taken[&page]);
                }
            }
            PoolEvent::SpaceFreed => {}
            PoolEvent::DeviceLost { .. } | PoolEvent::WritesStopped { .. } => self.lost = true,
        }
    }

    /// Compares the recovered blocks and leases with the permitted outcomes.
    pub(crate) fn check_recovered(&self, stored: &[StoredBlock], leases: &[PageNumber], disk: &Disk) {
        self.lends.check_recovered(leases, stored);
        let mut found = BTreeSet::new();
        for block in stored {
            self.check_block(block);
            let outcome = self.blocks[&block.key].outcome;
            assert_ne!(outcome, BlockState::Gone, "block {} was durably removed", block.key);
            assert!(found.insert(block.key), "block {} was found twice", block.key);
            check_block_on_disk(block, disk);
        }
        for (key, known) in self.blocks.iter().filter(|(_, known)| known.outcome == BlockState::Stored) {
            assert!(found.contains(key), "block {key} at {:?} was durable and was not recovered", known.page);
        }
    }

    /// Continues from the recovered blocks and leases.
    pub(crate) fn crashed(&mut self, stored: &[StoredBlock], leases: &[PageNumber], survivors: Survivors) {
        let found: BTreeSet<BlockKey> = stored.iter().map(|block| block.key).collect();
        self.taken.clone_from(&self.quarantined);
        for (key, known) in &mut self.blocks {
            known.outcome = if found.contains(key) { BlockState::Stored } else { BlockState::Gone };
        }
        self.blocks.retain(|_, known| known.outcome == BlockState::Stored);
        self.by_page = self.blocks.iter().map(|(key, known)| (known.page.0, *key)).collect();
        self.stored = stored.iter().map(|block| block.page).collect();
        self.generations.extend(stored.iter().map(|block| (block.page.0, block.generation)));
        for block in stored {
            self.allocated(block.page, &block.layout);
        }
        self.taken.extend(self.lends.crashed(leases, survivors));
        self.quarantining.clear();
    }

    /// Checks the usage figures that the model also tracks.
    pub(crate) fn check_usage(&self, usage: &PoolUsage) {
        assert_eq!(usage.blocks_stored, self.stored.len() as u64, "{usage:?}");
        let quarantined = self.quarantined.len() as u64;
        assert!(usage.slots_quarantined >= quarantined, "{usage:?}: a durable quarantine is missing");
    }

    fn remove(&mut self, page: PageNumber) -> BlockKey {
        self.stored.retain(|other| *other != page);
        self.by_page[&page.0]
    }

    fn known(&mut self, key: &BlockKey) -> &mut ModelBlock {
        self.blocks.get_mut(key).expect("the model knows every block of the pool")
    }

    fn check_block(&self, block: &StoredBlock) {
        let known = self.blocks.get(&block.key).expect("the model knows every block of the pool");
        assert_eq!((block.page, block.layout), (known.page, known.layout));
        assert_eq!(block.tenant, tenant_of(&block.key), "a block keeps its tenant");
        assert_eq!(block.priority, block.key.0[0] % 3);
    }
}

/// Checks header and payload of a stored block on the disk.
pub(crate) fn check_block_on_disk(block: &StoredBlock, disk: &Disk) {
    let expected =
        ExpectedHeader { key: block.key, generation: block.generation, header_crc: block.header_crc };
    let header = decode_header(&disk.read(block.page.offset(), 4096).expect("readable"), &expected);
    let header = header.expect("a stored block has a valid header");
    assert_eq!(header.checksums, checksums(&block.key, &block.layout));
    assert_eq!((header.layout, header.page), (block.layout, block.page));
    let bytes = block.layout.slot_bytes();
    let found =
        disk.read(block.page.offset() + PAGE, usize::try_from(bytes).expect("small")).expect("readable");
    assert!(found == payload(&block.key, bytes), "the payload of a stored block is intact");
}
