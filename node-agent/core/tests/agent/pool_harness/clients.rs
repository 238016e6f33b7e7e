//! Clients that write and read slots of the pool themselves: their actions, and the guarantees of the pool.
//!
//! ```text
//! lease ─▶ Lending ─▶ Unwritten ─▶ Writing ─▶ Written ─▶ Committing ─▶ stored block
//!                        └────────── return ──────┴────▶ Returning ─▶ free
//! a crash of the agent alone: Writing ─▶ LateWrite ─▶ Earlier ─▶ Returning
//! pinned block is removed: Withdrawn ─▶ Returning
//! ```

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::pool::{BatchId, ExtentCommit, PageNumber, StoredBlock};
use reprise_policy::{BlockKey, Generation, Layout};

use super::model::check_block_on_disk;
use super::{Harness, PAGE, checksums, payload, tenant_of};

/// Bit of the tokens of clients' writes; those of the pool count from zero.
const CLIENT_BIT: u64 = 1 << 63;

/// Slot that belongs to a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lend {
    pub(crate) layout: Layout,
    /// Block that the client writes.
    pub(crate) key: BlockKey,
    /// Known as soon as the lease is offered.
    pub(crate) generation: Option<Generation>,
    pub(crate) state: LendState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LendState {
    /// Its record is not known to be durable.
    Lending,
    Unwritten,
    /// The client's write with this token is in flight.
    Writing(u64),
    Written,
    /// Its header is being written.
    Committing,
    /// Its pinned block was removed; the record is not known to be durable.
    Withdrawn,
    /// Its free record is not known to be durable.
    Returning,
    /// It was lent by a process that was killed.
    Earlier,
    /// The same, and the client's write of this block continues.
    LateWrite,
}

impl LendState {
    /// Whether a crash must not free the slot.
    fn is_durable(self) -> bool {
        match self {
            LendState::Unwritten | LendState::Writing(_) | LendState::Written => true,
            LendState::Earlier | LendState::LateWrite => true,
            LendState::Lending | LendState::Committing => false,
            LendState::Withdrawn | LendState::Returning => false,
        }
    }
}

/// How a crash ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Survivors {
    /// Power is lost.
    Nothing,
    /// Only the agent is killed.
    Clients,
}

/// Slots of clients, by page.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lends {
    slots: BTreeMap<u64, Lend>,
    batches: BTreeSet<BatchId>,
    writes: u64,
}

impl Lends {
    pub(crate) fn get(&self, page: u64) -> Option<&Lend> {
        self.slots.get(&page)
    }

    pub(crate) fn is_lease(&self, batch: BatchId) -> bool {
        self.batches.contains(&batch)
    }

    pub(crate) fn begin_lease(&mut self, batch: BatchId, slots: impl Iterator<Item = (PageNumber, Lend)>) {
        self.batches.insert(batch);
        slots.for_each(|(page, lend)| self.insert(page, lend));
    }

    pub(crate) fn insert(&mut self, page: PageNumber, lend: Lend) {
        self.slots.insert(page.0, lend);
    }

    /// The pool reported leases as durable.
    pub(crate) fn offered(&mut self, lent: &[StoredBlock]) {
        for slot in lent {
            let lend = self.slots.get_mut(&slot.page.0).expect("only requested slots are lent");
            assert_eq!((slot.key, slot.header_crc, slot.layout), (BlockKey([0; 16]), 0, lend.layout));
            assert_eq!(lend.state, LendState::Lending);
            (lend.generation, lend.state) = (Some(slot.generation), LendState::Unwritten);
        }
    }

    pub(crate) fn set(&mut self, page: PageNumber, state: LendState) {
        self.slots.get_mut(&page.0).expect("a slot of a client").state = state;
    }

    pub(crate) fn remove(&mut self, page: PageNumber) -> Option<Lend> {
        self.slots.remove(&page.0)
    }

    /// The slots in a state that matches.
    pub(crate) fn pages(&self, fits: impl Fn(LendState) -> bool) -> Vec<PageNumber> {
        let fitting = self.slots.iter().filter(|(_, lend)| fits(lend.state));
        fitting.map(|(page, _)| PageNumber(*page)).collect()
    }

    /// Compares the leases that recovery found with the permitted ones. A withdrawn slot has either its block
    /// or a lease.
    pub(crate) fn check_recovered(&self, found: &[PageNumber], stored: &[StoredBlock]) {
        let found: BTreeSet<u64> = found.iter().map(|page| page.0).collect();
        let blocks: BTreeSet<u64> = stored.iter().map(|block| block.page.0).collect();
        for page in &found {
            assert!(self.slots.contains_key(page), "page {page} was not lent");
            assert!(!blocks.contains(page), "page {page} is lent, and holds a block");
        }
        for (page, lend) in &self.slots {
            let is_lent = found.contains(page);
            assert!(is_lent || !lend.state.is_durable(), "the lease of page {page} was lost: {lend:?}");
            let is_withdrawn = lend.state == LendState::Withdrawn;
            assert!(!is_withdrawn || is_lent || blocks.contains(page), "page {page} became free: {lend:?}");
        }
    }

    /// Continues with the leases that recovery found; returns them, with their pages.
    pub(crate) fn crashed(&mut self, found: &[PageNumber], survivors: Survivors) -> Vec<(u64, u64)> {
        let found: BTreeSet<u64> = found.iter().map(|page| page.0).collect();
        self.slots.retain(|page, _| found.contains(page));
        self.batches.clear();
        for lend in self.slots.values_mut() {
            let is_writing = matches!(lend.state, LendState::Writing(_) | LendState::LateWrite);
            let continues = is_writing && survivors == Survivors::Clients;
            lend.state = if continues { LendState::LateWrite } else { LendState::Earlier };
        }
        self.slots.iter().map(|(page, lend)| (*page, lend.layout.slot_bytes() / PAGE + 1)).collect()
    }

    fn writes_in_flight(&self) -> u64 {
        self.pages(|state| matches!(state, LendState::Writing(_))).len() as u64
    }

    fn next_token(&mut self) -> u64 {
        self.writes += 1;
        CLIENT_BIT | self.writes
    }
}

impl Harness {
    /// Leases up to `count` slots as one batch; returns how many found a slot.
    pub(crate) fn lease(&mut self, count: u64, layout: Layout) -> usize {
        let first = self.model.new_key();
        let tenant = tenant_of(&first);
        let mut pages = Vec::new();
        while (pages.len() as u64) < count {
            let Some(page) = self.pool.allocate(layout.slot_bytes()) else { break };
            self.model.allocated(page, &layout);
            pages.push(page);
        }
        let batch = self.model.begin_lease(&pages, layout, tenant);
        let ops = self.pool.lend(batch, (tenant, layout), &pages);
        self.take(ops);
        pages.len()
    }

    /// Lets clients begin to write up to `count` leased slots.
    pub(crate) fn begin_client_writes(&mut self, count: u64) {
        for page in self.model.lends.pages(|state| state == LendState::Unwritten) {
            if self.model.lends.writes_in_flight() >= count {
                return;
            }
            let token = self.model.lends.next_token();
            self.model.lends.set(page, LendState::Writing(token));
            self.write_payload(page, token);
        }
    }

    /// Ends a random write of a client, also one that outlived its agent.
    pub(crate) fn end_client_write(&mut self) {
        let is_write = |state| matches!(state, LendState::Writing(_) | LendState::LateWrite);
        let pages = self.model.lends.pages(is_write);
        if pages.is_empty() {
            return;
        }
        let page = pages[self.random.index(pages.len())];
        let after = match self.model.lends.get(page.0).expect("just listed").state {
            LendState::Writing(token) => {
                self.disk.write_done(token);
                LendState::Written
            }
            _ => {
                let token = self.model.lends.next_token();
                self.write_payload(page, token);
                self.disk.write_done(token);
                LendState::Earlier
            }
        };
        self.model.lends.set(page, after);
    }

    /// Commits all written slots as one batch.
    pub(crate) fn commit_written(&mut self) {
        let pages = self.model.lends.pages(|state| state == LendState::Written);
        let commit = |page: &PageNumber| {
            let Lend { key, layout, .. } = *self.model.lends.get(page.0).expect("just listed");
            let (checksums, priority) = (checksums(&key, &layout), key.0[0] % 3);
            let (tenant, page) = (tenant_of(&key), *page);
            ExtentCommit { key, tenant, tenant_name: None, layout, priority, checksums, page }
        };
        let blocks: Vec<ExtentCommit> = pages.iter().map(commit).collect();
        if blocks.is_empty() {
            return;
        }
        let batch = self.model.begin_commit(&blocks);
        let ops = self.pool.commit_lent(batch, blocks);
        self.take(ops);
    }

    /// Returns all slots that their clients do not write.
    pub(crate) fn return_idle(&mut self) {
        for page in self.model.lends.pages(|state| matches!(state, LendState::Unwritten | LendState::Written))
        {
            self.model.lends.set(page, LendState::Returning);
            self.pool.return_lent(page);
        }
    }

    /// Frees the slots that a killed process lent, unless clients still write to them.
    pub(crate) fn end_earlier_leases(&mut self) {
        if !self.model.lends.pages(|state| state == LendState::LateWrite).is_empty() {
            return;
        }
        for page in self.model.lends.pages(|state| state == LendState::Earlier) {
            self.model.lends.set(page, LendState::Returning);
        }
        self.pool.end_earlier_leases();
    }

    /// Pins a stored block.
    pub(crate) fn pin_one(&mut self) {
        if let Some(page) = self.model.pick_stored(&mut self.random) {
            self.pins.insert(page);
        }
    }

    /// Ends a random pin; its block must be intact until then.
    pub(crate) fn unpin_one(&mut self) {
        let pins: Vec<PageNumber> = self.pins.iter().copied().collect();
        if pins.is_empty() {
            return;
        }
        let page = pins[self.random.index(pins.len())];
        self.pins.remove(&page);
        match self.withdrawn.remove(&page) {
            Some(block) => {
                check_block_on_disk(&block, &self.disk);
                self.model.lends.set(page, LendState::Returning);
                self.pool.return_lent(page);
            }
            None => check_block_on_disk(&self.pool.stored(page).expect("pinned"), &self.disk),
        }
    }

    /// Removes a pinned block, whose slot a client still reads.
    pub(crate) fn withdraw(&mut self, page: PageNumber) {
        self.withdrawn.insert(page, self.pool.stored(page).expect("stored"));
        self.model.withdrawn(page);
        self.pool.withdraw(page);
    }

    /// Ends everything that clients do.
    pub(crate) fn end_clients(&mut self) {
        while !self.pins.is_empty() {
            self.unpin_one();
        }
        self.run_to_completion();
        let is_write = |state| matches!(state, LendState::Writing(_) | LendState::LateWrite);
        while !self.model.lends.pages(is_write).is_empty() {
            self.end_client_write();
        }
        self.return_idle();
        self.end_earlier_leases();
    }

    fn write_payload(&mut self, page: PageNumber, token: u64) {
        let Lend { key, layout, .. } = *self.model.lends.get(page.0).expect("a slot of a client");
        self.disk.write_begun(token, page.offset() + PAGE, payload(&key, layout.slot_bytes()));
    }
}
