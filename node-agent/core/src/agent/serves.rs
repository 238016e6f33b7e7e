//! Serving peers: blocks that another agent wants.
//!
//! Blocks in DRAM go out at once: first all headers, then objects in rounds over the blocks, each round some layers of
//! every block, so that the peer's engine can start with layer 0 early. Blocks on a device are read into the arena
//! and go out as their layers are verified. A block is leased from the moment its frame is known until the
//! transport reports the end of its sending.
//!
//! Peers do not get the arena from this node's engines: the frames that are leased to serves are a share of it at
//! the most ([`Settings::arena_serves_permille`](super::Settings)). Blocks beyond that wait, and are begun as earlier
//! ones end, the waiting requests in turn. One block may always be begun, so every request comes to its end.
//!
//! A serve never asks other peers, and never waits for a fetch from one: two agents that wait for each other's fetches
//! would wait for ever.

use std::collections::VecDeque;
use std::ops::Range;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, Layout, Tick, Tier};

use super::AgentCore;
use super::fills::{Origin, WaitPlace, Waiter};
use super::frames::{FrameIndex, FrameState};
use super::index::Dram;
use super::limits::{SERVE_BLOCKS_MAX, SERVE_PIECES_MAX, SERVE_ROUND_BYTES, SERVES_MAX};
use super::placing::{ArenaRoom, Reads};
use super::timers::Timer;
use crate::effect::{Effect, ServeId, ServeObjects};
use crate::event::PeerRequest;

/// A peer's request.
#[derive(Debug)]
pub(super) struct Serve {
    keys: Box<[BlockKey]>,
    layout: Layout,
    pub(super) blocks: Box<[ServeBlock]>,
    /// Blocks from here on have not been begun.
    next: u32,
    /// Blocks that have not ended.
    open: u32,
    expires: Tick,
}

/// What serves have of the arena.
#[derive(Debug, Default)]
pub(super) struct ServeShare {
    /// Slot bytes of the blocks leased to serves; a slot counts once for each.
    pub(super) leased_bytes: u64,
    /// Requests with blocks that have not been begun.
    waiting: VecDeque<ServeId>,
}

/// One block of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServeBlock {
    /// Not looked for yet.
    Due,
    /// Absent, or sent.
    Ended,
    /// On its way into the arena; leased.
    Waiting { place: WaitPlace, header: Header },
    /// The transport has it; leased.
    Sending { frame: FrameIndex },
}

/// Blocks that are begun together, by where they are.
#[derive(Debug, Default)]
struct Sorted {
    /// Leased.
    in_dram: Vec<(u32, FrameIndex)>,
    /// To be read.
    on_device: Vec<(u32, EntryIndex)>,
}

/// Whether the peer knows a block's checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    Due,
    Sent,
}

impl Serve {
    /// Slot bytes of the blocks that have not ended.
    pub(super) fn open_bytes(&self) -> u64 {
        u64::from(self.open) * self.layout.slot_bytes()
    }
}

impl ServeBlock {
    fn is_leased(self) -> bool {
        matches!(self, ServeBlock::Waiting { .. } | ServeBlock::Sending { .. })
    }
}

impl AgentCore {
    /// A peer wants blocks.
    pub(super) fn serve(&mut self, request: PeerRequest) {
        let id = request.serve;
        self.counters.serves += 1;
        let count = request.keys.len();
        let refused =
            self.serves.len() >= SERVES_MAX || count > SERVE_BLOCKS_MAX || self.serves.contains_key(&id);
        if refused {
            (0..count as u32).for_each(|block| self.emit_absent(id, block));
            return;
        }
        if count == 0 {
            return;
        }
        let expires = self.now.after(request.deadline);
        let serve = Serve {
            keys: request.keys.into_boxed_slice(),
            layout: request.layout,
            blocks: vec![ServeBlock::Due; count].into_boxed_slice(),
            next: 0,
            open: count as u32,
            expires,
        };
        self.serves.insert(id, serve);
        self.timers.set(expires, Timer::Serve(id));
        self.serve_share.waiting.push_back(id);
    }

    /// Begins blocks of waiting requests as far as the share of the arena allows.
    pub(super) fn begin_serves(&mut self) {
        while let Some(id) = self.serve_share.waiting.pop_front() {
            let Some(serve) = self.serves.get(&id) else { continue };
            let blocks = serve.next..self.serve_limit(serve);
            if blocks.is_empty() {
                return self.serve_share.waiting.push_front(id);
            }
            let is_begun = blocks.end as usize == serve.blocks.len();
            self.begin_serve_blocks(id, blocks);
            if !is_begun {
                self.serve_share.waiting.push_back(id);
            }
        }
    }

    /// The end of the blocks of a request that may be begun now.
    fn serve_limit(&self, serve: &Serve) -> u32 {
        let share = self.arena.bytes() * u64::from(self.settings.arena_serves_permille) / 1000;
        let leased = self.serve_share.leased_bytes;
        let blocks = share.saturating_sub(leased) / serve.layout.slot_bytes();
        let blocks = if leased == 0 { blocks.max(1) } else { blocks };
        (u64::from(serve.next) + blocks).min(serve.blocks.len() as u64) as u32
    }

    fn begin_serve_blocks(&mut self, id: ServeId, blocks: Range<u32>) {
        let Some(serve) = self.serves.get_mut(&id) else { return };
        serve.next = blocks.end;
        let layout = serve.layout;
        let keys = serve.keys[blocks.start as usize..blocks.end as usize].to_vec();
        let wanted: Vec<(u32, BlockKey)> = blocks.zip(keys).collect();
        let sorted = self.sort_serve(id, &layout, &wanted);
        self.serve_from_devices(id, layout, &sorted.on_device);
        self.serve_from_dram(id, &layout, &sorted.in_dram);
        self.end_serve_if_over(id);
    }

    /// The transport is done with a block.
    pub(super) fn serve_done(&mut self, id: ServeId, block: u32) {
        let Some(serve) = self.serves.get(&id) else { return };
        if let Some(ServeBlock::Sending { frame }) = serve.blocks.get(block as usize).copied() {
            self.set_serve_block(id, block, ServeBlock::Ended);
            self.unlease(frame);
            self.end_serve_if_over(id);
        }
    }

    /// The peer's connection is gone.
    pub(super) fn serve_aborted(&mut self, id: ServeId) {
        let count = self.serves.get(&id).map_or(0, |serve| serve.blocks.len() as u32);
        for block in 0..count {
            let Some(serve) = self.serves.get(&id) else { return };
            let frame = match serve.blocks[block as usize] {
                ServeBlock::Due | ServeBlock::Ended => continue,
                ServeBlock::Sending { frame } => frame,
                ServeBlock::Waiting { place, .. } => self.leave_fill(place).0,
            };
            self.set_serve_block(id, block, ServeBlock::Ended);
            self.unlease(frame);
        }
        self.forget_serve(id);
    }

    /// The peer does not wait any longer: what is not whole is absent.
    pub(super) fn expire_serve(&mut self, id: ServeId) {
        let count = self.serves.get(&id).map_or(0, |serve| serve.blocks.len() as u32);
        for block in 0..count {
            let Some(serve) = self.serves.get_mut(&id) else { return };
            serve.next = count;
            match serve.blocks[block as usize] {
                ServeBlock::Waiting { place, .. } => {
                    let (frame, _) = self.leave_fill(place);
                    self.serve_failed(id, block, frame);
                }
                ServeBlock::Due => self.serve_absent(id, block),
                ServeBlock::Ended | ServeBlock::Sending { .. } => {}
            }
        }
        self.serve_share.waiting.retain(|waiting| *waiting != id);
        self.end_serve_if_over(id);
    }

    /// Layers of a block that a peer waits for are verified.
    pub(super) fn stream_layers(&mut self, id: ServeId, block: u32, frame: FrameIndex, layers: Range<u32>) {
        let Some(serve) = self.serves.get(&id) else { return };
        let Some(ServeBlock::Waiting { place, header }) = serve.blocks.get(block as usize).copied() else {
            return;
        };
        let layout = self.shapes.get(self.frames.get(frame).shape).layout;
        if header == Header::Due {
            self.counters.serve_blocks_nvme += 1;
            self.emit_header(id, block, frame, Tier::Nvme);
        }
        let whole = layers.end == layout.layers();
        let state = if whole {
            ServeBlock::Sending { frame }
        } else {
            ServeBlock::Waiting { place, header: Header::Sent }
        };
        self.set_serve_block(id, block, state);
        self.emit_objects(id, block, frame, layers);
    }

    /// A block that a peer waits for will not come. Its lease ends now, or with its sending if that has begun.
    pub(super) fn serve_failed(&mut self, id: ServeId, block: u32, frame: FrameIndex) {
        let Some(serve) = self.serves.get(&id) else { return };
        let begun = matches!(serve.blocks[block as usize], ServeBlock::Waiting { header: Header::Sent, .. });
        self.emit_absent(id, block);
        if begun {
            self.set_serve_block(id, block, ServeBlock::Sending { frame });
        } else {
            self.set_serve_block(id, block, ServeBlock::Ended);
            self.unlease(frame);
        }
        self.end_serve_if_over(id);
    }

    /// Leases what is in DRAM, attaches to what is being read, reports what is not here, and returns the
    /// blocks in DRAM and those to be read.
    fn sort_serve(&mut self, id: ServeId, layout: &Layout, wanted: &[(u32, BlockKey)]) -> Sorted {
        let mut sorted = Sorted::default();
        for (block, key) in wanted.iter().copied() {
            let found = self
                .index
                .find(&key)
                .filter(|entry| self.shapes.get(self.index.entry(*entry).shape()).layout == *layout);
            let Some(entry) = found else {
                self.serve_absent(id, block);
                continue;
            };
            self.note_read(entry);
            let state = self.index.entry(entry);
            match (state.dram(), state.stored()) {
                (Dram::Resident(frame), _) => {
                    self.lease(frame);
                    self.set_serve_block(id, block, ServeBlock::Sending { frame });
                    sorted.in_dram.push((block, frame));
                }
                (Dram::Filling(frame), _) if self.is_read_from_device(frame) => {
                    self.attach_serve(id, block, frame);
                }
                (Dram::Absent, Some(_)) => sorted.on_device.push((block, entry)),
                _ => self.serve_absent(id, block),
            }
        }
        sorted
    }

    fn serve_from_devices(&mut self, id: ServeId, layout: Layout, blocks: &[(u32, EntryIndex)]) {
        let (mut reads, mut room) = (Reads::default(), ArenaRoom::Maybe);
        for (block, entry) in blocks.iter().copied() {
            let begun = match self.index.entry(entry).dram() {
                // The peer named it twice.
                Dram::Filling(frame) => Some(frame),
                _ if room == ArenaRoom::None => None,
                _ => self.begin_read(entry).map(|(device, frame, read)| {
                    reads.push(device, read);
                    frame
                }),
            };
            match begun {
                Some(frame) => self.attach_serve(id, block, frame),
                None => {
                    room = ArenaRoom::None;
                    self.serve_absent(id, block);
                }
            }
        }
        self.emit_reads(reads, layout, self.settings.read_bytes_default);
    }

    fn serve_from_dram(&mut self, id: ServeId, layout: &Layout, blocks: &[(u32, FrameIndex)]) {
        self.counters.serve_blocks_dram += blocks.len() as u64;
        for (block, frame) in blocks {
            self.emit_header(id, *block, *frame, Tier::Dram);
        }
        let stride = round_layers(layout, blocks.len() as u64);
        for from in (0..layout.layers()).step_by(stride as usize) {
            let to = (from + stride).min(layout.layers());
            for (block, frame) in blocks {
                self.emit_objects(id, *block, *frame, from..to);
            }
        }
    }

    fn attach_serve(&mut self, id: ServeId, block: u32, frame: FrameIndex) {
        let (place, layers) = self.enter_fill(frame, Waiter::Serve { serve: id, block });
        self.lease(frame);
        self.set_serve_block(id, block, ServeBlock::Waiting { place, header: Header::Due });
        if layers > 0 {
            self.stream_layers(id, block, frame, 0..layers);
        }
    }

    fn is_read_from_device(&self, frame: FrameIndex) -> bool {
        match self.frames.get(frame).state {
            FrameState::Filling(fill) => {
                self.fills.at(fill).is_some_and(|fill| matches!(fill.origin, Origin::Device(_)))
            }
            _ => false,
        }
    }

    /// A block's place among the waiters of its fill has changed.
    pub(super) fn move_serve_block(&mut self, id: ServeId, block: u32, to: WaitPlace) {
        let serve = self.serves.get_mut(&id).expect("a serve leaves its fills before it ends");
        if let ServeBlock::Waiting { place, .. } = &mut serve.blocks[block as usize] {
            *place = to;
        }
    }

    fn set_serve_block(&mut self, id: ServeId, block: u32, state: ServeBlock) {
        let Some(serve) = self.serves.get_mut(&id) else { return };
        let slot_bytes = serve.layout.slot_bytes();
        let before = std::mem::replace(&mut serve.blocks[block as usize], state);
        serve.open -= u32::from(state == ServeBlock::Ended && before != ServeBlock::Ended);
        match (before.is_leased(), state.is_leased()) {
            (false, true) => self.serve_share.leased_bytes += slot_bytes,
            (true, false) => self.serve_share.leased_bytes -= slot_bytes,
            _ => {}
        }
    }

    /// A block that is not leased is not to be had.
    fn serve_absent(&mut self, id: ServeId, block: u32) {
        self.emit_absent(id, block);
        self.set_serve_block(id, block, ServeBlock::Ended);
    }

    fn end_serve_if_over(&mut self, id: ServeId) {
        if self.serves.get(&id).is_some_and(|serve| serve.open == 0) {
            self.forget_serve(id);
        }
    }

    fn forget_serve(&mut self, id: ServeId) {
        let Some(serve) = self.serves.remove(&id) else { return };
        let entries = self.index.find_all(serve.keys.iter());
        self.touch_chain(entries.into_iter().flatten());
        self.timers.clear(serve.expires, Timer::Serve(id));
        if (serve.next as usize) < serve.blocks.len() {
            self.serve_share.waiting.retain(|waiting| *waiting != id);
        }
    }

    fn emit_header(&mut self, serve: ServeId, block: u32, frame: FrameIndex, tier: Tier) {
        let checksums = self.checksums(frame).into();
        self.emit(Effect::ServeHeader { serve, block, tier, checksums });
    }

    fn emit_objects(&mut self, serve: ServeId, block: u32, frame: FrameIndex, layers: Range<u32>) {
        let layout = &self.shapes.get(self.frames.get(frame).shape).layout;
        let offset = u64::from(layers.start) * layout.layer_bytes();
        let bytes = u64::from(layers.end - layers.start) * layout.layer_bytes();
        let last = layers.end == layout.layers();
        let slot = self.frame_slot(frame);
        self.counters.serve_bytes += bytes;
        self.emit(Effect::ServeObjects(ServeObjects { serve, block, slot, offset, bytes, last }));
    }

    fn emit_absent(&mut self, serve: ServeId, block: u32) {
        self.counters.serve_blocks_absent += 1;
        self.emit(Effect::ServeAbsent { serve, block });
    }
}

/// Layers of one round over so many blocks: about [`SERVE_ROUND_BYTES`] of all blocks together when they are few, at
/// the most so many bytes of each block, and more layers than that only to stay near [`SERVE_PIECES_MAX`].
fn round_layers(layout: &Layout, blocks: u64) -> u32 {
    let layer_bytes = layout.layer_bytes();
    let worthwhile = SERVE_ROUND_BYTES.div_ceil(layer_bytes * blocks.max(1));
    let bounded = (blocks * u64::from(layout.layers())).div_ceil(SERVE_PIECES_MAX);
    worthwhile.max(bounded).clamp(1, u64::from(layout.layers())) as u32
}

#[cfg(test)]
mod tests {
    use reprise_policy::{Dtype, LayoutSpec, Parts};

    use super::*;

    #[test]
    fn a_round_is_worth_a_call_and_the_pieces_stay_bounded() {
        let layout = LayoutSpec {
            layers: 32,
            parts: Parts::KeyValue,
            kv_heads: 8,
            head_dim: 128,
            dtype: Dtype::Bf16,
            tokens_per_block: 16,
            tp_rank: 0,
            tp_size: 1,
        };
        let layout = layout.validate().expect("valid");
        assert_eq!(layout.layer_bytes(), 64 << 10);
        assert_eq!(round_layers(&layout, 1), 16, "1 MiB of one block");
        assert_eq!(round_layers(&layout, 16), 1, "one layer of 16 blocks is 1 MiB");
        assert_eq!(round_layers(&layout, 8192), 16, "16,384 pieces");
    }
}
