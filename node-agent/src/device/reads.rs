//! Blocks on their way from a device into the arena: what to read next, and what has been verified.
//!
//! A block goes through:
//!
//! ```text
//!   reading ── header page verified ──► objects verified piece by piece ── all ──► over (last `Layers`)
//!      └───────── error, mismatch ──► failing ── its reads in flight have come back ──► over (`Failed`)
//! ```
//!
//! Pieces complete in any order; those before the header wait for it. `Layers` counts leading layers of which
//! every object was checked against the checksums that the header pins. Nothing is said about a failed block before
//! the device has let go of its slot. One update per block and [`Reads::take_updates`], however many pieces came.
//!
//! No I/O here: [`Reads::next`] says what to read, [`Reads::finish`] is told what came.

use std::collections::VecDeque;

use reprise_agent_core::effect::{BlockRead, FillId, ReadBatch};
use reprise_agent_core::event::{FillError, FillUpdate};
use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_buffers::{Arena, PageBuffer, PageBufferPool, Span};
use reprise_io::Closed;
use reprise_policy::Tier;
use reprise_policy::layout::PAGE_BYTES;

use super::pieces::PieceMap;

/// Bytes that a batch reads before the next one gets its turn. Large, so that of two windows of one load the first ends
/// while the second still keeps the device busy; small enough (9 ms at 3.6 GB/s) that a short load behind long ones
/// gets its first layers soon.
const TURN_BYTES: u64 = 32 << 20;

/// Names a batch while it is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchIndex(usize);

/// One read, and what it is for.
#[derive(Debug)]
pub(super) struct PieceRead {
    pub(super) piece: PieceName,
    /// On the device.
    pub(super) offset: u64,
    pub(super) into: Vec<Span>,
    /// The header page, read with a block's first piece.
    pub(super) header: Option<PageBuffer>,
}

/// A piece of a block of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PieceName {
    batch: BatchIndex,
    block: usize,
    piece: u32,
}

/// A batch that cannot be read: its blocks are to be reported as failed.
#[derive(Debug)]
pub(super) struct BadBatch;

/// All blocks being read.
#[derive(Default)]
pub(super) struct Reads {
    batches: Vec<Option<Batch>>,
    /// Batches with something left to be read; the first one has the turn.
    order: VecDeque<BatchIndex>,
    /// Bytes that the first one has read in its turn.
    turn_bytes: u64,
    /// Blocks that have news.
    changed: VecDeque<(BatchIndex, usize)>,
    waiting: Waiting,
}

/// What is still to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) pieces: u64,
    /// With the headers.
    pub(super) bytes: u64,
}

struct Batch {
    pieces: PieceMap,
    blocks: Vec<Block>,
    /// Next to be read, in layer-major order.
    next: (u32, usize),
    /// Blocks that are not over.
    open: usize,
    waiting: Waiting,
}

struct Block {
    read: BlockRead,
    slot: Span,
    in_flight: u32,
    state: State,
    /// Bit for each piece that has arrived, verified once the header is.
    arrived: Box<[u64]>,
    /// Leading pieces that are verified.
    verified: u32,
    layers_reported: u32,
    has_news: bool,
}

enum State {
    /// The header has not come.
    Blind,
    /// The header is verified; `fresh` until its checksums have been reported.
    Reading {
        checksums: Box<[u32]>,
        fresh: bool,
    },
    Failing(FillError),
    Over,
}

impl Reads {
    /// Takes a batch on.
    ///
    /// # Errors
    /// A block's slot is not in the arena or too small, or there are no blocks: a mistake of the core.
    pub(super) fn add(&mut self, arena: &Arena, batch: &ReadBatch) -> Result<BatchIndex, BadBatch> {
        let pieces = PieceMap::new(batch.layout, batch.read_bytes);
        let blocks: Option<Vec<Block>> =
            batch.blocks.iter().map(|read| Block::new(arena, read, &pieces)).collect();
        let blocks = blocks.filter(|blocks| !blocks.is_empty()).ok_or(BadBatch)?;
        let open = blocks.len();
        let waiting = Waiting {
            pieces: u64::from(pieces.count()) * open as u64,
            bytes: (PAGE_BYTES + pieces.layout().slot_bytes()) * open as u64,
        };
        self.waiting.pieces += waiting.pieces;
        self.waiting.bytes += waiting.bytes;
        let batch = Some(Batch { pieces, blocks, next: (0, 0), open, waiting });
        let index = self.batches.iter().position(Option::is_none).unwrap_or(self.batches.len());
        match self.batches.get_mut(index) {
            Some(free) => *free = batch,
            None => self.batches.push(batch),
        }
        self.order.push_back(BatchIndex(index));
        Ok(BatchIndex(index))
    }

    /// The next read; `None` when nothing is left to be read.
    pub(super) fn next(&mut self, pages: &PageBufferPool) -> Option<PieceRead> {
        while let Some(index) = self.order.front().copied() {
            let Some(read) = self.next_of(index, pages) else {
                self.order.pop_front();
                self.turn_bytes = 0;
                continue;
            };
            self.turn_bytes += read.into.iter().map(|span| span.len() as u64).sum::<u64>();
            if self.turn_bytes >= TURN_BYTES {
                self.order.rotate_left(1);
                self.turn_bytes = 0;
            }
            return Some(read);
        }
        None
    }

    /// What is still to be read.
    pub(super) fn waiting(&self) -> Waiting {
        self.waiting
    }

    fn next_of(&mut self, index: BatchIndex, pages: &PageBufferPool) -> Option<PieceRead> {
        let batch = self.batches[index.0].as_mut()?;
        let before = batch.waiting;
        let read = batch.next_piece(index, pages);
        self.waiting.pieces -= before.pieces - batch.waiting.pieces;
        self.waiting.bytes -= before.bytes - batch.waiting.bytes;
        read
    }

    /// A read has ended; verifies what came.
    pub(super) fn finish(
        &mut self,
        name: PieceName,
        result: Result<(), FillError>,
        header: Option<&PageBuffer>,
    ) {
        let Some(batch) = &mut self.batches[name.batch.0] else { return };
        let block = &mut batch.blocks[name.block];
        block.in_flight -= 1;
        match result {
            Ok(()) => block.arrive(&batch.pieces, name.piece, header),
            Err(error) => block.fail(error),
        }
        if block.has_something_to_say(&batch.pieces) && !block.has_news {
            block.has_news = true;
            self.changed.push_back((name.batch, name.block));
        }
    }

    /// Fails every block: the device is lost. When its engine could not end its operations, slots with reads in flight
    /// are reported as such: the device may still write to them.
    pub(super) fn fail_all(&mut self, closed: Closed) {
        for (index, batch) in self.batches.iter_mut().enumerate() {
            let Some(batch) = batch else { continue };
            for (block_index, block) in batch.blocks.iter_mut().enumerate() {
                match (closed, std::mem::take(&mut block.in_flight)) {
                    (Closed::Leaked, 1..) => block.state = State::Failing(FillError::Stranded),
                    _ => block.fail(FillError::Device),
                }
                if block.has_something_to_say(&batch.pieces) && !block.has_news {
                    block.has_news = true;
                    self.changed.push_back((BatchIndex(index), block_index));
                }
            }
        }
    }

    /// News since the last call, oldest first.
    pub(super) fn take_updates(&mut self, updates: &mut Vec<(FillId, FillUpdate)>) {
        while let Some((index, block_index)) = self.changed.pop_front() {
            let Some(batch) = &mut self.batches[index.0] else { continue };
            let block = &mut batch.blocks[block_index];
            block.has_news = false;
            let Some(update) = block.say(&batch.pieces) else { continue };
            updates.push((block.read.fill, update));
            if matches!(block.state, State::Over) {
                batch.open -= 1;
                if batch.open == 0 {
                    // Pieces of failed blocks that were never asked for.
                    self.waiting.pieces -= batch.waiting.pieces;
                    self.waiting.bytes -= batch.waiting.bytes;
                    self.batches[index.0] = None;
                }
            }
        }
    }

    /// Whether a batch still has blocks that are not over.
    #[cfg(test)]
    fn is_open(&self, index: BatchIndex) -> bool {
        self.batches[index.0].is_some()
    }
}

impl Batch {
    /// The next read in layer-major order, passing over failed blocks.
    fn next_piece(&mut self, index: BatchIndex, pages: &PageBufferPool) -> Option<PieceRead> {
        while self.next.0 < self.pieces.count() {
            let (piece, block) = self.next;
            self.next = if block + 1 < self.blocks.len() { (piece, block + 1) } else { (piece + 1, 0) };
            self.waiting.pieces -= 1;
            self.waiting.bytes -= self.pieces.read_bytes(piece);
            let name = PieceName { batch: index, block, piece };
            if let Some(read) = self.blocks[block].read_piece(&self.pieces, name, pages) {
                return Some(read);
            }
        }
        None
    }
}

impl Block {
    fn new(arena: &Arena, read: &BlockRead, pieces: &PieceMap) -> Option<Block> {
        let slot = arena.span(read.slot.region.0, read.slot.offset, read.slot.bytes).ok()?;
        (slot.len() as u64 >= pieces.layout().slot_bytes()).then(|| Block {
            read: *read,
            slot,
            in_flight: 0,
            state: State::Blind,
            arrived: vec![0; (pieces.count() as usize).div_ceil(64)].into(),
            verified: 0,
            layers_reported: 0,
            has_news: false,
        })
    }

    /// `None` for a block that has failed.
    fn read_piece(
        &mut self,
        pieces: &PieceMap,
        name: PieceName,
        pages: &PageBufferPool,
    ) -> Option<PieceRead> {
        if matches!(self.state, State::Failing(_) | State::Over) {
            return None;
        }
        let range = pieces.bytes(name.piece);
        let start = usize::try_from(range.start).expect("a block is at most 128 MiB");
        let length = usize::try_from(range.end - range.start).expect("a block is at most 128 MiB");
        let payload =
            self.slot.slice(start, length).expect("checked against the slot when the block was taken on");
        let slot_offset = u64::from(self.read.page.0) * PAGE_BYTES;
        self.in_flight += 1;
        if name.piece > 0 {
            let offset = slot_offset + PAGE_BYTES + range.start;
            return Some(PieceRead { piece: name, offset, into: vec![payload], header: None });
        }
        let mut header = pages.take();
        let into = vec![header.span(), payload];
        Some(PieceRead { piece: name, offset: slot_offset, into, header: Some(header) })
    }

    fn arrive(&mut self, pieces: &PieceMap, piece: u32, header: Option<&PageBuffer>) {
        self.arrived[piece as usize / 64] |= 1 << (piece % 64);
        if let (State::Blind, Some(header)) = (&self.state, header) {
            match self.decode(pieces, header) {
                Some(checksums) => self.state = State::Reading { checksums, fresh: true },
                None => self.fail(FillError::Corrupt),
            }
        }
        // Only leading pieces are verified: a piece behind a gap would be out of the cache either way when its turn comes.
        while self.verified < pieces.count() && self.has_arrived(self.verified) {
            let State::Reading { checksums, .. } = &self.state else { return };
            if !verify(&self.slot, pieces, self.verified, checksums) {
                self.fail(FillError::Corrupt);
                return;
            }
            self.verified += 1;
        }
    }

    /// The checksums, if the header is the one that the journal promised.
    fn decode(&self, pieces: &PieceMap, page: &PageBuffer) -> Option<Box<[u32]>> {
        let BlockRead { key, generation, header_crc, .. } = self.read;
        let header = decode_header(page, &ExpectedHeader { key, generation, header_crc }).ok()?;
        let matches =
            header.layout == *pieces.layout() && header.checksums.len() == pieces.layout().objects() as usize;
        matches.then_some(header.checksums)
    }

    fn has_arrived(&self, piece: u32) -> bool {
        self.arrived[piece as usize / 64] & (1 << (piece % 64)) != 0
    }

    fn fail(&mut self, error: FillError) {
        if !matches!(self.state, State::Failing(_) | State::Over) {
            self.state = State::Failing(error);
        }
    }

    fn has_something_to_say(&self, pieces: &PieceMap) -> bool {
        match &self.state {
            State::Blind | State::Over => false,
            State::Reading { .. } => pieces.layers(self.verified) > self.layers_reported,
            State::Failing(_) => self.in_flight == 0,
        }
    }

    fn say(&mut self, pieces: &PieceMap) -> Option<FillUpdate> {
        if !self.has_something_to_say(pieces) {
            return None;
        }
        match &mut self.state {
            State::Failing(error) => {
                let update = FillUpdate::Failed(*error);
                self.state = State::Over;
                Some(update)
            }
            State::Reading { checksums, fresh } => {
                let layers = pieces.layers(self.verified);
                let complete = layers == pieces.layout().layers();
                let checksums = std::mem::take(fresh)
                    .then(|| if complete { std::mem::take(checksums) } else { checksums.clone() });
                self.layers_reported = layers;
                if complete {
                    self.state = State::Over;
                }
                Some(FillUpdate::Layers { layers, checksums, tier: Tier::Nvme })
            }
            State::Blind | State::Over => None,
        }
    }
}

/// Checks every object of a piece.
fn verify(slot: &Span, pieces: &PieceMap, piece: u32, checksums: &[u32]) -> bool {
    let bytes = usize::try_from(pieces.layout().object_bytes()).expect("a block is at most 128 MiB");
    pieces.objects(piece).all(|object| {
        let offset = usize::try_from(pieces.object_offset(object)).expect("a block is at most 128 MiB");
        slot.slice(offset, bytes).is_ok_and(|span| span.crc32c() == checksums[object as usize])
    })
}

#[cfg(test)]
mod tests;
