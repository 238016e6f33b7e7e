//! Blocks being read from a device into the arena: the next reads, and the verification of completed ones.
//!
//! States of a block:
//!
//! ```text
//!   reading ── header page verified ──► objects verified piece by piece ── all ──► done (last `Layers`)
//!      └───────── error, mismatch ──► failing ── its reads in flight have completed ──► done (`Failed`)
//! ```
//!
//! Pieces complete in any order; pieces that complete before the header wait for it. `Layers` is the number
//! of leading layers whose objects match the checksums that the header pins. A failed block is reported
//! only after the device has released its slot. [`Reads::take_updates`] returns at most one update per
//! block.
//!
//! This module does no I/O: [`Reads::next`] returns the next read, [`Reads::finish`] takes its completion.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use reprise_agent_core::effect::{BlockRead, FillId, ReadBatch};
use reprise_agent_core::event::{FillError, FillUpdate};
use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_buffers::{Arena, PageBuffer, PageBufferPool, Span};
use reprise_io::CloseOutcome;
use reprise_policy::layout::PAGE_BYTES;
use reprise_policy::{TenantId, Tier};

use super::encryption::Decryptor;
use super::pieces::PieceMap;
use crate::encryption::EncryptionKeys;

/// Bytes that a batch reads before the next batch gets its turn. Large enough that, of two windows of one
/// load, the first completes while the second keeps the device busy. Small enough (9 ms at 3.6 GB/s) that a
/// short load behind long ones gets its first layers soon.
const TURN_BYTES: u64 = 32 << 20;

/// Identifies a batch while it is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchIndex(usize);

/// A read of one piece.
#[derive(Debug)]
pub(super) struct PieceRead {
    pub(super) piece: PieceName,
    /// Byte offset on the device.
    pub(super) offset: u64,
    pub(super) into: Vec<Span>,
    /// Buffer for the header page, which is read with a block's first piece.
    pub(super) header: Option<PageBuffer>,
}

/// Identifies a piece of a block of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PieceName {
    batch: BatchIndex,
    block: usize,
    piece: u32,
}

/// An invalid batch: the caller reports its blocks as failed.
#[derive(Debug)]
pub(super) struct InvalidBatch;

/// All batches being read.
#[derive(Default)]
pub(super) struct Reads {
    batches: Vec<Option<Batch>>,
    /// Batches with pieces left to read, by tenant.
    turns: BTreeMap<TenantId, Turns>,
    /// Batches with promoted blocks, which [`Reads::next_promoted`] returns.
    promoted: BTreeMap<TenantId, VecDeque<BatchIndex>>,
    /// Blocks with unreported changes.
    changed: VecDeque<(BatchIndex, usize)>,
    pending: PendingReads,
    keys: EncryptionKeys,
}

/// Batches of one tenant with pieces left to read.
#[derive(Default)]
struct Turns {
    /// The first one has the turn.
    order: VecDeque<BatchIndex>,
    /// Bytes that the first batch has read in its turn.
    turn_bytes: u64,
}

/// Pieces left to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PendingReads {
    pub(super) pieces: u64,
    /// Bytes to read, including header pages.
    pub(super) bytes: u64,
}

struct Batch {
    tenant: TenantId,
    pieces: PieceMap,
    blocks: Vec<Block>,
    /// Next piece and block, in layer-major order.
    next: (u32, usize),
    /// Blocks that something awaits, and the next one of them, in the same order.
    promoted: Vec<usize>,
    next_promoted: (u32, usize),
    /// Number of blocks that are not done.
    open: usize,
    pending: PendingReads,
}

struct Block {
    read: BlockRead,
    slot: Span,
    in_flight: u32,
    /// First piece that was not submitted.
    next_piece: u32,
    state: State,
    /// One bit per completed piece; pieces are verified once the header is.
    arrived: Box<[u64]>,
    /// Number of verified leading pieces.
    verified: u32,
    layers_reported: u32,
    is_changed: bool,
}

enum State {
    /// The header has not arrived.
    AwaitingHeader,
    /// The header is verified; `fresh` until its checksums were reported.
    Reading {
        checksums: Box<[u32]>,
        fresh: bool,
        /// Of an encrypted block.
        decryptor: Option<Box<Decryptor>>,
    },
    Failing(FillError),
    Done,
}

impl PieceRead {
    /// Bytes to read, including a header page.
    pub(super) fn bytes(&self) -> u64 {
        self.into.iter().map(|span| span.len() as u64).sum()
    }
}

impl Reads {
    /// Decrypts blocks of encrypted tenants with these keys.
    pub(super) fn with_keys(keys: EncryptionKeys) -> Reads {
        Reads { keys, ..Reads::default() }
    }

    /// Adds a batch.
    ///
    /// # Errors
    /// A slot is outside the arena or too small, or the batch has no blocks: a bug in the core.
    pub(super) fn add(&mut self, arena: &Arena, batch: &ReadBatch) -> Result<BatchIndex, InvalidBatch> {
        let pieces = PieceMap::new(batch.layout, batch.read_bytes);
        let blocks: Option<Vec<Block>> =
            batch.blocks.iter().map(|read| Block::new(arena, read, &pieces)).collect();
        let blocks = blocks.filter(|blocks| !blocks.is_empty()).ok_or(InvalidBatch)?;
        let open = blocks.len();
        let pending = PendingReads {
            pieces: u64::from(pieces.count()) * open as u64,
            bytes: (PAGE_BYTES + pieces.layout().slot_bytes()) * open as u64,
        };
        self.pending.pieces += pending.pieces;
        self.pending.bytes += pending.bytes;
        let tenant = batch.tenant;
        let batch = Some(Batch {
            tenant,
            pieces,
            blocks,
            next: (0, 0),
            promoted: Vec::new(),
            next_promoted: (0, 0),
            open,
            pending,
        });
        let index = self.batches.iter().position(Option::is_none).unwrap_or(self.batches.len());
        match self.batches.get_mut(index) {
            Some(free) => *free = batch,
            None => self.batches.push(batch),
        }
        self.turns.entry(tenant).or_default().order.push_back(BatchIndex(index));
        Ok(BatchIndex(index))
    }

    /// Returns the next read of a tenant; `None` if nothing is left to read.
    pub(super) fn next(&mut self, tenant: TenantId, pages: &PageBufferPool) -> Option<PieceRead> {
        while let Some(index) = self.turns.get(&tenant)?.order.front().copied() {
            let read = self.next_of(index, pages);
            let turns = self.turns.get_mut(&tenant)?;
            let Some(read) = read else {
                turns.order.pop_front();
                turns.turn_bytes = 0;
                continue;
            };
            turns.turn_bytes += read.bytes();
            if turns.turn_bytes >= TURN_BYTES {
                turns.order.rotate_left(1);
                turns.turn_bytes = 0;
            }
            return Some(read);
        }
        self.turns.remove(&tenant);
        None
    }

    /// Returns the next read of a tenant's promoted blocks; `None` if none has pieces left to read.
    pub(super) fn next_promoted(&mut self, tenant: TenantId, pages: &PageBufferPool) -> Option<PieceRead> {
        while let Some(index) = self.promoted.get(&tenant)?.front().copied() {
            if let Some(read) = self.next_in(index, |batch| batch.next_promoted_piece(index, pages)) {
                return Some(read);
            }
            self.promoted.get_mut(&tenant)?.pop_front();
        }
        self.promoted.remove(&tenant);
        None
    }

    /// Promotes the blocks of these fills; returns the tenants of those that are being read here.
    pub(super) fn promote(&mut self, fills: &HashSet<FillId>) -> BTreeSet<TenantId> {
        let mut tenants = BTreeSet::new();
        for (at, batch) in self.batches.iter_mut().enumerate() {
            let Some(batch) = batch else { continue };
            let before = batch.promoted.len();
            let all = batch.blocks.iter().enumerate();
            let named = all.filter(|(_, block)| fills.contains(&block.read.fill)).map(|(block, _)| block);
            let added: Vec<usize> = named.filter(|block| !batch.promoted.contains(block)).collect();
            batch.promoted.extend(added);
            if batch.promoted.len() > before {
                batch.promoted.sort_unstable();
                // Pieces that were submitted are passed over.
                batch.next_promoted = (0, 0);
                tenants.insert(batch.tenant);
                let promoted = self.promoted.entry(batch.tenant).or_default();
                if !promoted.contains(&BatchIndex(at)) {
                    promoted.push_back(BatchIndex(at));
                }
            }
        }
        tenants
    }

    /// Returns the amount left to read.
    pub(super) fn pending(&self) -> PendingReads {
        self.pending
    }

    fn next_of(&mut self, index: BatchIndex, pages: &PageBufferPool) -> Option<PieceRead> {
        self.next_in(index, |batch| batch.next_piece(index, pages))
    }

    fn next_in(
        &mut self,
        index: BatchIndex,
        next: impl FnOnce(&mut Batch) -> Option<PieceRead>,
    ) -> Option<PieceRead> {
        let batch = self.batches[index.0].as_mut()?;
        let before = batch.pending;
        let read = next(batch);
        self.pending.pieces -= before.pieces - batch.pending.pieces;
        self.pending.bytes -= before.bytes - batch.pending.bytes;
        read
    }

    /// Handles a completed read and verifies its data.
    pub(super) fn finish(
        &mut self,
        name: PieceName,
        result: Result<(), FillError>,
        header: Option<&mut PageBuffer>,
    ) {
        let Some(batch) = &mut self.batches[name.batch.0] else { return };
        let block = &mut batch.blocks[name.block];
        block.in_flight -= 1;
        match result {
            Ok(()) => block.arrive(&batch.pieces, name.piece, header, &self.keys),
            Err(error) => block.fail(error),
        }
        if block.has_update(&batch.pieces) && !block.is_changed {
            block.is_changed = true;
            self.changed.push_back((name.batch, name.block));
        }
    }

    /// Fails every block because the device is lost. If the engine could not complete its operations, slots
    /// with reads in flight are reported as stranded: the device may still write to them.
    pub(super) fn fail_all(&mut self, closed: CloseOutcome) {
        for (index, batch) in self.batches.iter_mut().enumerate() {
            let Some(batch) = batch else { continue };
            for (block_index, block) in batch.blocks.iter_mut().enumerate() {
                match (closed, std::mem::take(&mut block.in_flight)) {
                    (CloseOutcome::Leaked, 1..) => block.state = State::Failing(FillError::Stranded),
                    _ => block.fail(FillError::Device),
                }
                if block.has_update(&batch.pieces) && !block.is_changed {
                    block.is_changed = true;
                    self.changed.push_back((BatchIndex(index), block_index));
                }
            }
        }
    }

    /// Appends the updates since the last call, oldest first.
    pub(super) fn take_updates(&mut self, updates: &mut Vec<(FillId, FillUpdate)>) {
        while let Some((index, block_index)) = self.changed.pop_front() {
            let Some(batch) = &mut self.batches[index.0] else { continue };
            let block = &mut batch.blocks[block_index];
            block.is_changed = false;
            let Some(update) = block.take_update(&batch.pieces) else { continue };
            updates.push((block.read.fill, update));
            if matches!(block.state, State::Done) {
                batch.open -= 1;
                if batch.open == 0 {
                    // Pieces of failed blocks that were never submitted.
                    self.pending.pieces -= batch.pending.pieces;
                    self.pending.bytes -= batch.pending.bytes;
                    let tenant = batch.tenant;
                    self.batches[index.0] = None;
                    self.end_turns(index, tenant);
                }
            }
        }
    }

    /// Removes a batch that has ended from the turns of its tenant. Its index is used again, maybe for another tenant.
    fn end_turns(&mut self, index: BatchIndex, tenant: TenantId) {
        if let Some(turns) = self.turns.get_mut(&tenant) {
            if turns.order.front() == Some(&index) {
                turns.turn_bytes = 0;
            }
            turns.order.retain(|turn| *turn != index);
        }
        if let Some(promoted) = self.promoted.get_mut(&tenant) {
            promoted.retain(|batch| *batch != index);
        }
    }

    /// Returns whether a batch has blocks that are not done.
    #[cfg(test)]
    fn is_open(&self, index: BatchIndex) -> bool {
        self.batches[index.0].is_some()
    }
}

impl Batch {
    /// Returns the next read in layer-major order, skipping failed blocks.
    fn next_piece(&mut self, index: BatchIndex, pages: &PageBufferPool) -> Option<PieceRead> {
        while self.next.0 < self.pieces.count() {
            let (piece, block) = self.next;
            self.next = if block + 1 < self.blocks.len() { (piece, block + 1) } else { (piece + 1, 0) };
            if let Some(read) = self.submit(PieceName { batch: index, block, piece }, pages) {
                return Some(read);
            }
        }
        None
    }

    /// Returns the next read of a promoted block, in the same order.
    fn next_promoted_piece(&mut self, index: BatchIndex, pages: &PageBufferPool) -> Option<PieceRead> {
        while self.next_promoted.0 < self.pieces.count()
            && let (piece, at) = self.next_promoted
            && let Some(block) = self.promoted.get(at).copied()
        {
            self.next_promoted = if at + 1 < self.promoted.len() { (piece, at + 1) } else { (piece + 1, 0) };
            if let Some(read) = self.submit(PieceName { batch: index, block, piece }, pages) {
                return Some(read);
            }
        }
        None
    }

    /// Returns the read of a piece, unless it was submitted before or its block has failed.
    fn submit(&mut self, name: PieceName, pages: &PageBufferPool) -> Option<PieceRead> {
        let block = &mut self.blocks[name.block];
        if block.next_piece != name.piece {
            return None;
        }
        block.next_piece += 1;
        self.pending.pieces -= 1;
        self.pending.bytes -= self.pieces.read_bytes(name.piece);
        block.read_piece(&self.pieces, name, pages)
    }
}

impl Block {
    fn new(arena: &Arena, read: &BlockRead, pieces: &PieceMap) -> Option<Block> {
        let slot = arena.span(read.slot.region.0, read.slot.offset, read.slot.bytes).ok()?;
        (slot.len() as u64 >= pieces.layout().slot_bytes()).then(|| Block {
            read: *read,
            slot,
            in_flight: 0,
            next_piece: 0,
            state: State::AwaitingHeader,
            arrived: vec![0; (pieces.count() as usize).div_ceil(64)].into(),
            verified: 0,
            layers_reported: 0,
            is_changed: false,
        })
    }

    /// Returns `None` for a failed block.
    fn read_piece(
        &mut self,
        pieces: &PieceMap,
        name: PieceName,
        pages: &PageBufferPool,
    ) -> Option<PieceRead> {
        if matches!(self.state, State::Failing(_) | State::Done) {
            return None;
        }
        let range = pieces.bytes(name.piece);
        let start = usize::try_from(range.start).expect("a block is at most 128 MiB");
        let length = usize::try_from(range.end - range.start).expect("a block is at most 128 MiB");
        let payload = self.slot.slice(start, length).expect("the slot was checked when the batch was added");
        let slot_offset = self.read.page.offset();
        self.in_flight += 1;
        if name.piece > 0 {
            let offset = slot_offset + PAGE_BYTES + range.start;
            return Some(PieceRead { piece: name, offset, into: vec![payload], header: None });
        }
        let mut header = pages.take();
        let into = vec![header.span(), payload];
        Some(PieceRead { piece: name, offset: slot_offset, into, header: Some(header) })
    }

    fn arrive(
        &mut self,
        pieces: &PieceMap,
        piece: u32,
        header: Option<&mut PageBuffer>,
        keys: &EncryptionKeys,
    ) {
        self.arrived[piece as usize / 64] |= 1 << (piece % 64);
        if let (State::AwaitingHeader, Some(header)) = (&self.state, header) {
            match self.decode(pieces, header, keys) {
                Ok((checksums, decryptor)) => {
                    self.state =
                        State::Reading { checksums, fresh: true, decryptor: decryptor.map(Box::new) };
                }
                Err(error) => self.fail(error),
            }
        }
        // Only leading pieces are verified: data behind a gap would leave the CPU cache before the gap
        // closes in any case.
        while self.verified < pieces.count() && self.has_arrived(self.verified) {
            let State::Reading { checksums, decryptor, .. } = &self.state else { return };
            let is_intact = match decryptor {
                Some(decryptor) => decryptor.open_piece(&self.slot, (pieces, self.verified), checksums),
                None => verify(&self.slot, pieces, self.verified, checksums),
            };
            if !is_intact {
                self.fail(FillError::Corrupt);
                return;
            }
            self.verified += 1;
        }
    }

    /// Returns the checksums if the header, decrypted, matches the journal.
    fn decode(
        &self,
        pieces: &PieceMap,
        page: &mut PageBuffer,
        keys: &EncryptionKeys,
    ) -> Result<(Box<[u32]>, Option<Decryptor>), FillError> {
        let BlockRead { key, generation, header_crc, .. } = self.read;
        let expected = ExpectedHeader { key, generation, header_crc };
        let decryptor = Decryptor::of_page(page, &expected, keys)?;
        let header = decode_header(page, &expected).map_err(|_| FillError::Corrupt)?;
        let matches =
            header.layout == *pieces.layout() && header.checksums.len() == pieces.layout().objects() as usize;
        if matches { Ok((header.checksums, decryptor)) } else { Err(FillError::Corrupt) }
    }

    fn has_arrived(&self, piece: u32) -> bool {
        self.arrived[piece as usize / 64] & (1 << (piece % 64)) != 0
    }

    fn fail(&mut self, error: FillError) {
        if !matches!(self.state, State::Failing(_) | State::Done) {
            self.state = State::Failing(error);
        }
    }

    fn has_update(&self, pieces: &PieceMap) -> bool {
        match &self.state {
            State::AwaitingHeader | State::Done => false,
            State::Reading { .. } => pieces.layers(self.verified) > self.layers_reported,
            State::Failing(_) => self.in_flight == 0,
        }
    }

    fn take_update(&mut self, pieces: &PieceMap) -> Option<FillUpdate> {
        if !self.has_update(pieces) {
            return None;
        }
        match &mut self.state {
            State::Failing(error) => {
                let update = FillUpdate::Failed(*error);
                self.state = State::Done;
                Some(update)
            }
            State::Reading { checksums, fresh, .. } => {
                let layers = pieces.layers(self.verified);
                let complete = layers == pieces.layout().layers();
                let checksums = std::mem::take(fresh)
                    .then(|| if complete { std::mem::take(checksums) } else { checksums.clone() });
                self.layers_reported = layers;
                if complete {
                    self.state = State::Done;
                }
                Some(FillUpdate::Layers { layers, checksums, tier: Tier::Nvme })
            }
            State::AwaitingHeader | State::Done => None,
        }
    }
}

/// Verifies every object of a piece.
fn verify(slot: &Span, pieces: &PieceMap, piece: u32, checksums: &[u32]) -> bool {
    let bytes = usize::try_from(pieces.layout().object_bytes()).expect("a block is at most 128 MiB");
    pieces.objects(piece).all(|object| {
        let offset = usize::try_from(pieces.object_offset(object)).expect("a block is at most 128 MiB");
        slot.slice(offset, bytes).is_ok_and(|span| span.crc32c() == checksums[object as usize])
    })
}

#[cfg(test)]
mod tests;
