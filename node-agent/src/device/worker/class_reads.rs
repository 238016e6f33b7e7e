//! Reads of both classes of a device: which tenant, class and batch is read next.
//!
//! Tenants get shares of each rank by weight ([`FairOrder`]). Within a tenant, promoted reads ahead alternate with the
//! reads of loads.

use std::collections::{BTreeMap, HashSet};

use reprise_agent_core::effect::{FillId, ReadBatch, ReadClass};
use reprise_agent_core::event::FillUpdate;
use reprise_buffers::{Arena, PageBufferPool};
use reprise_io::CloseOutcome;
use reprise_policy::TenantId;
use reprise_policy::fair_order::{FairOrder, Weights};

use crate::device::reads::{InvalidBatch, PendingReads, PieceRead, Reads};
use crate::encryption::EncryptionKeys;

/// Reads of one class, and whether their [`Work::Piece`](super::Work::Piece) is in the queue.
pub(super) struct ClassReads {
    pub(super) reads: Reads,
    pub(super) queued: ReadsQueued,
    /// Tenants with reads of the class's rank.
    shares: FairOrder<TenantId>,
}

/// Reads of both classes.
pub(super) struct ReadsByClass {
    awaited: ClassReads,
    prefetch: ClassReads,
    /// Whose turn it is for each tenant, while awaited reads and promoted ones wait.
    turns: BTreeMap<TenantId, ReadClass>,
}

/// Whether [`Work::Piece`](super::Work::Piece) of a class is in the queue; it is queued at most once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadsQueued {
    Yes,
    No,
}

impl ReadsByClass {
    pub(super) fn new(keys: &EncryptionKeys, weights: &Weights<TenantId>) -> ReadsByClass {
        let empty = || ClassReads {
            reads: Reads::with_keys(keys.clone()),
            queued: ReadsQueued::No,
            shares: FairOrder::new(weights.clone()),
        };
        ReadsByClass { awaited: empty(), prefetch: empty(), turns: BTreeMap::new() }
    }

    /// Adds a batch.
    ///
    /// # Errors
    /// The batch is invalid.
    pub(super) fn add(&mut self, arena: &Arena, batch: &ReadBatch) -> Result<(), InvalidBatch> {
        let class = self.of(batch.class);
        class.reads.add(arena, batch)?;
        class.shares.activate(&batch.tenant);
        Ok(())
    }

    /// Gives the blocks of these fills the rank of loads; returns whether any is being read here.
    pub(super) fn promote(&mut self, fills: &HashSet<FillId>) -> bool {
        let tenants = self.prefetch.reads.promote(fills);
        tenants.iter().for_each(|tenant| self.awaited.shares.activate(tenant));
        !tenants.is_empty()
    }

    /// Returns the next read of a rank, with the class whose batch it is of.
    pub(super) fn next(&mut self, rank: ReadClass, pages: &PageBufferPool) -> Option<(ReadClass, PieceRead)> {
        loop {
            let tenant = *self.of(rank).shares.first()?;
            let read = match rank {
                ReadClass::Prefetch => self.prefetch.reads.next(tenant, pages).map(|read| (rank, read)),
                ReadClass::Awaited => self.next_awaited(tenant, pages),
            };
            let shares = &mut self.of(rank).shares;
            match read {
                Some((class, read)) => {
                    shares.charge(&tenant, read.bytes());
                    return Some((class, read));
                }
                None => {
                    shares.deactivate(&tenant);
                    self.turns.remove(&tenant);
                }
            }
        }
    }

    /// Whether a write of a tenant may precede the waiting reads: not while it has had more than its share of them.
    pub(super) fn may_precede(&self, tenant: TenantId) -> bool {
        let waiting = if self.awaited.shares.first().is_some() { &self.awaited } else { &self.prefetch };
        waiting.shares.may_precede(&tenant)
    }

    /// Records a write: it counts against the tenant's share of the reads that it has preceded, which
    /// [`ReadsByClass::may_precede`] consults.
    pub(super) fn charge_write(&mut self, tenant: TenantId, bytes: u64) {
        let waiting =
            if self.awaited.shares.first().is_some() { &mut self.awaited } else { &mut self.prefetch };
        waiting.shares.charge(&tenant, bytes);
    }

    fn next_awaited(&mut self, tenant: TenantId, pages: &PageBufferPool) -> Option<(ReadClass, PieceRead)> {
        let turn = self.turns.get(&tenant).copied().unwrap_or(ReadClass::Prefetch);
        let mut of = |class| match class {
            ReadClass::Awaited => self.awaited.reads.next(tenant, pages),
            ReadClass::Prefetch => self.prefetch.reads.next_promoted(tenant, pages),
        };
        let other = match turn {
            ReadClass::Awaited => ReadClass::Prefetch,
            ReadClass::Prefetch => ReadClass::Awaited,
        };
        let (class, read) = match of(turn) {
            Some(read) => (turn, read),
            None => (other, of(other)?),
        };
        self.turns.insert(tenant, if class == turn { other } else { turn });
        Some((class, read))
    }

    pub(super) fn of(&mut self, class: ReadClass) -> &mut ClassReads {
        match class {
            ReadClass::Awaited => &mut self.awaited,
            ReadClass::Prefetch => &mut self.prefetch,
        }
    }

    pub(super) fn pending(&self) -> PendingReads {
        let (awaited, prefetch) = (self.awaited.reads.pending(), self.prefetch.reads.pending());
        PendingReads { pieces: awaited.pieces + prefetch.pieces, bytes: awaited.bytes + prefetch.bytes }
    }

    pub(super) fn take_updates(&mut self, updates: &mut Vec<(FillId, FillUpdate)>) {
        self.awaited.reads.take_updates(updates);
        self.prefetch.reads.take_updates(updates);
    }

    pub(super) fn fail_all(&mut self, closed: CloseOutcome) {
        self.awaited.reads.fail_all(closed);
        self.prefetch.reads.fail_all(closed);
    }
}
