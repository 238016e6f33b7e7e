//! What the pool has promised about every block.

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_agent_core::pool::{BatchId, BlockWrite, PageNumber, PoolEvent, PoolUsage, StoredBlock};
use reprise_policy::{BlockKey, Generation, Layout};

use super::disk::Disk;
use super::random::Random;
use super::{PAGE, checksums, payload, tenant_of};

/// What may have become of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Being written: after a crash it may be there or not.
    Writing,
    /// Reported durable: it must be there.
    Stored,
    /// Free or quarantine was asked for: it may be there or not.
    Leaving,
    /// Durably gone, or its write failed: it must not be there.
    Gone,
}

/// One block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    /// Its slot.
    pub(crate) page: PageNumber,
    /// Its layout.
    pub(crate) layout: Layout,
    /// Its fate.
    pub(crate) fate: Fate,
}

/// The model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    keys: u64,
    batches: u64,
    /// Every block ever written. Keys are never used twice.
    pub(crate) blocks: BTreeMap<BlockKey, Known>,
    /// First page and pages of every slot that must not be handed out.
    taken: BTreeMap<u32, u32>,
    /// Slots whose quarantine is durable, with their pages.
    quarantined: BTreeMap<u32, u32>,
    /// Quarantines whose record is not known to be durable.
    quarantining: BTreeSet<u32>,
    stored: Vec<PageNumber>,
    by_page: BTreeMap<u32, BlockKey>,
    generations: BTreeSet<(u32, Generation)>,
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

    /// The pool handed out a slot. By that it says that the ends of the blocks there are durable.
    pub(crate) fn allocated(&mut self, page: PageNumber, layout: &Layout) {
        let pages = u32::try_from(layout.slot_bytes() / PAGE + 1).expect("small");
        while let Some((first, length)) =
            self.taken.range(..page.0 + pages).next_back().map(|(a, b)| (*a, *b))
        {
            if first + length <= page.0 {
                break;
            }
            let there = self.by_page.get(&first).copied().filter(|_| !self.quarantining.contains(&first));
            let known = there.and_then(|key| self.blocks.get_mut(&key));
            let known = known.expect("a reserved or quarantined slot is not handed out again");
            assert_eq!(
                known.fate,
                Fate::Leaving,
                "slot {page:?} of {pages} pages overlaps one at {first} of {length}"
            );
            known.fate = Fate::Gone;
            self.taken.remove(&first);
        }
        self.taken.insert(page.0, pages);
    }

    /// A batch was handed to the pool.
    pub(crate) fn begin_batch(&mut self, blocks: &[BlockWrite]) -> BatchId {
        for block in blocks {
            let known = Known { page: block.page, layout: block.layout, fate: Fate::Writing };
            self.blocks.insert(block.key, known);
            self.by_page.insert(block.page.0, block.key);
        }
        self.batches += 1;
        BatchId(self.batches)
    }

    /// The key of the block whose header goes to this offset.
    pub(crate) fn key_being_written(&self, offset: u64) -> BlockKey {
        self.by_page[&u32::try_from(offset / PAGE).expect("a page")]
    }

    /// Any stored block's page.
    pub(crate) fn pick_stored(&self, random: &mut Random) -> Option<PageNumber> {
        (!self.stored.is_empty()).then(|| self.stored[random.index(self.stored.len())])
    }

    /// Pages of all stored blocks.
    pub(crate) fn stored_pages(&self) -> Vec<PageNumber> {
        self.stored.clone()
    }

    /// A block is to be freed.
    pub(crate) fn free_requested(&mut self, page: PageNumber) {
        let key = self.leaves(page);
        self.known(&key).fate = Fate::Leaving;
    }

    /// A block's slot is to be quarantined.
    pub(crate) fn quarantine_requested(&mut self, page: PageNumber) {
        let key = self.leaves(page);
        self.known(&key).fate = Fate::Leaving;
        self.quarantining.insert(page.0);
    }

    /// Every free so far is durable.
    pub(crate) fn frees_are_durable(&mut self) {
        let (quarantining, taken) = (&self.quarantining, &mut self.taken);
        for known in self.blocks.values_mut().filter(|known| known.fate == Fate::Leaving) {
            if !quarantining.contains(&known.page.0) {
                known.fate = Fate::Gone;
                taken.remove(&known.page.0);
            }
        }
    }

    /// The pool reported something.
    pub(crate) fn event(&mut self, event: &PoolEvent) {
        match event {
            PoolEvent::BatchDone { stored, failed, .. } => {
                for block in stored {
                    self.check_block(block);
                    assert_eq!(self.blocks[&block.key].fate, Fate::Writing);
                    self.known(&block.key).fate = Fate::Stored;
                    self.stored.push(block.page);
                    let fresh = self.generations.insert((block.page.0, block.generation));
                    assert!(fresh, "generation {:?} of {:?} was used before", block.generation, block.page);
                }
                for key in failed {
                    let page = self.blocks[key].page.0;
                    self.known(key).fate = Fate::Gone;
                    self.quarantined.insert(page, self.taken[&page]);
                }
            }
            PoolEvent::SpaceFreed => {}
            PoolEvent::DeviceLost { .. } => self.lost = true,
        }
    }

    /// Compares what recovery found with what was promised.
    pub(crate) fn check_recovered(&self, stored: &[StoredBlock], disk: &Disk) {
        let mut found = BTreeSet::new();
        for block in stored {
            self.check_block(block);
            let fate = self.blocks[&block.key].fate;
            assert_ne!(fate, Fate::Gone, "block {} was durably gone", block.key);
            assert!(found.insert(block.key), "block {} was found twice", block.key);
            check_on_disk(block, disk);
        }
        for (key, known) in self.blocks.iter().filter(|(_, known)| known.fate == Fate::Stored) {
            assert!(found.contains(key), "block {key} at {:?} was durable and is lost", known.page);
        }
    }

    /// The world goes on with what recovery found.
    pub(crate) fn crashed(&mut self, stored: &[StoredBlock]) {
        let found: BTreeSet<BlockKey> = stored.iter().map(|block| block.key).collect();
        self.taken.clone_from(&self.quarantined);
        for (key, known) in &mut self.blocks {
            known.fate = if found.contains(key) { Fate::Stored } else { Fate::Gone };
        }
        self.blocks.retain(|_, known| known.fate == Fate::Stored);
        self.by_page = self.blocks.iter().map(|(key, known)| (known.page.0, *key)).collect();
        self.stored = stored.iter().map(|block| block.page).collect();
        self.generations.extend(stored.iter().map(|block| (block.page.0, block.generation)));
        for block in stored {
            self.allocated(block.page, &block.layout);
        }
        self.quarantining.clear();
    }

    /// Figures that the model knows as well.
    pub(crate) fn check_usage(&self, usage: &PoolUsage) {
        assert_eq!(usage.blocks_stored, self.stored.len() as u64, "{usage:?}");
        let quarantined = self.quarantined.len() as u64;
        assert!(
            usage.slots_quarantined >= quarantined,
            "{usage:?}: a quarantine known to be durable is forgotten"
        );
    }

    fn leaves(&mut self, page: PageNumber) -> BlockKey {
        self.stored.retain(|other| *other != page);
        self.by_page[&page.0]
    }

    fn known(&mut self, key: &BlockKey) -> &mut Known {
        self.blocks.get_mut(key).expect("the pool invents no blocks")
    }

    fn check_block(&self, block: &StoredBlock) {
        let known = self.blocks.get(&block.key).expect("the pool invents no blocks");
        assert_eq!((block.page, block.layout), (known.page, known.layout));
        assert_eq!(block.tenant, tenant_of(&block.key), "a block stays its tenant's");
        assert_eq!(block.priority, block.key.0[0] % 3);
    }
}

/// Checks header and payload of a stored block on the disk.
pub(crate) fn check_on_disk(block: &StoredBlock, disk: &Disk) {
    let expected =
        ExpectedHeader { key: block.key, generation: block.generation, header_crc: block.header_crc };
    let header = decode_header(&disk.read(block.page.offset(), 4096).expect("readable"), &expected);
    let header = header.expect("a stored block has its header");
    assert_eq!(header.checksums, checksums(&block.key, &block.layout));
    assert_eq!((header.layout, header.page), (block.layout, block.page));
    let bytes = block.layout.slot_bytes();
    let found =
        disk.read(block.page.offset() + PAGE, usize::try_from(bytes).expect("small")).expect("readable");
    assert!(found == payload(&block.key, bytes), "the payload of a stored block is whole");
}
