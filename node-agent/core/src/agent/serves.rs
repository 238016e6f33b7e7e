//! Serves: blocks that this node sends to peers on request.
//!
//! Blocks in DRAM are sent at once: first all headers, then objects in rounds over the blocks. Each round
//! sends some layers of every block, so that the peer's engine can start early with layer 0. Blocks on a
//! device are read into the arena and sent as their layers are verified. A block is leased from the moment
//! its frame is known until the transport reports that it was sent.
//!
//! Serves must not displace this node's engines: frames leased to serves are at most a share of the arena
//! ([`Settings::arena_serves_permille`](super::Settings)). Further blocks wait until earlier ones end;
//! waiting requests take turns. One block may always start, so every request completes.
//!
//! A serve neither asks other peers nor waits for a fetch from one. Otherwise two agents could wait for each
//! other's fetches forever.

use std::collections::VecDeque;
use std::ops::Range;

use reprise_policy::{BlockKey, Layout, Tick, Tier};

use crate::agent::{AgentCore, Timer};
use crate::cache::{Dram, FrameIndex, Lease, LocalBlock, Read};
use crate::effect::{Effect, ServeId, ServeObjects};
use crate::event::PeerRequest;
use crate::limits::{SERVE_BLOCKS_MAX, SERVE_PIECES_MAX, SERVE_ROUND_BYTES, SERVES_MAX};
use crate::waiter::{Attached, FillRequest, Joins, WaitId, WaiterId, WaiterOwner};

/// Request of a peer.
#[derive(Debug)]
pub(crate) struct Serve {
    keys: Box<[BlockKey]>,
    layout: Layout,
    pub(crate) blocks: Box<[ServeBlock]>,
    /// First block that was not started.
    next: u32,
    /// Number of blocks that have not ended.
    open: u32,
    expires: Tick,
}

/// Arena space used by serves.
#[derive(Debug, Default)]
pub(crate) struct ServeShare {
    /// Slot bytes of the blocks leased to serves; a slot counts once for each lease.
    pub(crate) leased_bytes: u64,
    /// Requests with blocks that were not started.
    waiting: VecDeque<ServeId>,
}

/// State of a block of a serve.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ServeBlock {
    /// Not looked up yet.
    Due,
    /// Reported as absent, or sent.
    Ended,
    /// Being read into the arena.
    Waiting { lease: Lease<Read>, wait: WaitId, header: Header },
    /// Passed to the transport.
    Sending { lease: Lease<Read> },
}

/// Blocks that are started together, by location.
#[derive(Debug, Default)]
struct ServePartition {
    /// Blocks in DRAM, leased.
    in_dram: Vec<(u32, FrameIndex)>,
    /// Blocks on a device, or being read from one.
    on_device: Vec<(u32, LocalBlock)>,
}

/// Whether the peer has received a block's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Header {
    Due,
    Sent,
}

/// Id of a block that waits.
pub(crate) fn waiter(serve: ServeId, block: u32) -> WaiterId {
    WaiterId { object: serve.0, block, owner: WaiterOwner::Serve }
}

impl Serve {
    /// Slot bytes of the blocks that have not ended.
    pub(crate) fn open_bytes(&self) -> u64 {
        u64::from(self.open) * self.layout.slot_bytes()
    }
}

impl ServeBlock {
    fn is_leased(&self) -> bool {
        matches!(self, ServeBlock::Waiting { .. } | ServeBlock::Sending { .. })
    }
}

impl AgentCore {
    /// Handles a request of a peer.
    pub(crate) fn serve(&mut self, request: PeerRequest) {
        let id = request.serve;
        self.counters.serves += 1;
        let count = request.keys.len();
        let is_rejected =
            self.serves.len() >= SERVES_MAX || count > SERVE_BLOCKS_MAX || self.serves.contains_key(&id);
        if is_rejected {
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
            blocks: (0..count).map(|_| ServeBlock::Due).collect(),
            next: 0,
            open: count as u32,
            expires,
        };
        self.serves.insert(id, serve);
        self.timers.set(expires, Timer::Serve(id));
        self.serve_share.waiting.push_back(id);
    }

    /// Starts blocks of waiting requests, as far as the share of the arena allows.
    pub(crate) fn begin_serves(&mut self) {
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

    /// Returns the end of the range of a request's blocks that may start now.
    fn serve_limit(&self, serve: &Serve) -> u32 {
        let share = self.cache.arena.bytes() * u64::from(self.settings.arena_serves_permille) / 1000;
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
        let partition = self.partition_serve(id, &layout, &wanted);
        self.serve_from_devices(id, layout, partition.on_device);
        self.serve_from_dram(id, &layout, &partition.in_dram);
        self.end_serve_if_complete(id);
    }

    /// Handles the end of sending a block.
    pub(crate) fn serve_done(&mut self, id: ServeId, block: u32) {
        let Some(serve) = self.serves.get(&id) else { return };
        if let Some(ServeBlock::Sending { .. }) = serve.blocks.get(block as usize) {
            self.end_serve_block(id, block);
            self.end_serve_if_complete(id);
        }
    }

    /// Handles the loss of the peer's connection.
    pub(crate) fn serve_aborted(&mut self, id: ServeId) {
        let count = self.serves.get(&id).map_or(0, |serve| serve.blocks.len() as u32);
        for block in 0..count {
            self.detach_serve(id, block);
            self.end_serve_block(id, block);
        }
        self.remove_serve(id);
    }

    /// Handles the deadline of a request: incomplete blocks are reported as absent.
    pub(crate) fn expire_serve(&mut self, id: ServeId) {
        let count = self.serves.get(&id).map_or(0, |serve| serve.blocks.len() as u32);
        for block in 0..count {
            let Some(serve) = self.serves.get_mut(&id) else { return };
            serve.next = count;
            match serve.blocks[block as usize] {
                ServeBlock::Waiting { .. } => {
                    self.detach_serve(id, block);
                    self.serve_failed(id, block);
                }
                ServeBlock::Due => self.serve_absent(id, block),
                ServeBlock::Ended | ServeBlock::Sending { .. } => {}
            }
        }
        self.serve_share.waiting.retain(|waiting| *waiting != id);
        self.end_serve_if_complete(id);
    }

    /// Sends verified layers of a block that a peer waits for.
    pub(crate) fn stream_layers(&mut self, id: ServeId, block: u32, layers: Range<u32>) {
        let Some(serve) = self.serves.get_mut(&id) else { return };
        let Some(ServeBlock::Waiting { lease, header, .. }) = serve.blocks.get_mut(block as usize) else {
            return;
        };
        let frame = lease.frame();
        let before = std::mem::replace(header, Header::Sent);
        let layout = self.cache.sizes.get(self.cache.frames.get(frame).size_class).layout;
        if before == Header::Due {
            self.counters.serve_blocks_nvme += 1;
            self.emit_header(id, block, frame, Tier::Nvme);
        }
        if layers.end == layout.layers() {
            self.pass_serve_block(id, block);
        }
        self.emit_objects(id, block, frame, layers);
    }

    /// Reports a block as absent after its fill failed. Its lease ends now or, if sending has begun, with the
    /// sending.
    pub(crate) fn serve_failed(&mut self, id: ServeId, block: u32) {
        let Some(serve) = self.serves.get(&id) else { return };
        let begun = matches!(serve.blocks[block as usize], ServeBlock::Waiting { header: Header::Sent, .. });
        self.emit_absent(id, block);
        if begun {
            self.pass_serve_block(id, block);
        } else {
            self.end_serve_block(id, block);
        }
        self.end_serve_if_complete(id);
    }

    /// Leases the blocks in DRAM, attaches to fills, and reports absent blocks. Returns the blocks in DRAM
    /// and those to be read.
    fn partition_serve(
        &mut self,
        id: ServeId,
        layout: &Layout,
        wanted: &[(u32, BlockKey)],
    ) -> ServePartition {
        let mut partition = ServePartition::default();
        for (block, key) in wanted.iter().copied() {
            let found = self.cache.index.find(&key).filter(|entry| {
                self.cache.sizes.get(self.cache.index.entry(*entry).size_class()).layout == *layout
            });
            let Some(entry) = found else {
                self.serve_absent(id, block);
                continue;
            };
            self.replicate.note_read(&self.cache, self.now, entry);
            let state = self.cache.index.entry(entry);
            match (state.dram(), state.stored()) {
                (Dram::Resident(frame), _) => {
                    let lease = self.cache.lease(frame);
                    self.set_serve_block(id, block, ServeBlock::Sending { lease });
                    partition.in_dram.push((block, frame));
                }
                (Dram::Filling(_), _) => match self.cache.fill_of(entry) {
                    Some(fill) => partition.on_device.push((block, LocalBlock::Filling(fill))),
                    None => self.serve_absent(id, block),
                },
                (Dram::Absent, Some(_)) => partition.on_device.push((block, LocalBlock::Stored(entry))),
                (Dram::Absent, None) => self.serve_absent(id, block),
            }
        }
        partition
    }

    fn serve_from_devices(&mut self, id: ServeId, layout: Layout, local: Vec<(u32, LocalBlock)>) {
        if local.is_empty() {
            return;
        }
        let (object, read_bytes) = ((WaiterOwner::Serve, id.0), self.settings.read_bytes_default);
        let joins = Joins::DeviceReads;
        let request = FillRequest { object, layout, read_bytes, joins, local, remote: None };
        self.transfer.begin(&mut self.cache, context!(self), request);
        self.route();
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

    /// Attaches a block to its fill.
    pub(crate) fn serve_attached(&mut self, waiter: WaiterId, attached: Attached) {
        let (id, block) = (ServeId(waiter.object), waiter.block);
        let Attached { lease, wait, layers, .. } = attached;
        self.set_serve_block(id, block, ServeBlock::Waiting { lease, wait, header: Header::Due });
        if layers > 0 {
            self.stream_layers(id, block, 0..u32::from(layers));
        }
    }

    /// Detaches a block from its fill, if it waits for one.
    fn detach_serve(&mut self, id: ServeId, block: u32) {
        let Some(serve) = self.serves.get(&id) else { return };
        if let ServeBlock::Waiting { wait, .. } = serve.blocks[block as usize] {
            self.transfer.detach(wait, waiter(id, block));
        }
    }

    /// Marks a block that waited as passed to the transport.
    fn pass_serve_block(&mut self, id: ServeId, block: u32) {
        let Some(serve) = self.serves.get_mut(&id) else { return };
        let state = &mut serve.blocks[block as usize];
        *state = match std::mem::replace(state, ServeBlock::Ended) {
            ServeBlock::Waiting { lease, .. } => ServeBlock::Sending { lease },
            other => other,
        };
    }

    /// Ends a block and its lease.
    fn end_serve_block(&mut self, id: ServeId, block: u32) {
        let before = self.set_serve_block(id, block, ServeBlock::Ended);
        if let Some(ServeBlock::Waiting { lease, .. } | ServeBlock::Sending { lease }) = before {
            self.cache.release(lease);
        }
    }

    /// Sets the state of a block, and returns the state before.
    fn set_serve_block(&mut self, id: ServeId, block: u32, state: ServeBlock) -> Option<ServeBlock> {
        let serve = self.serves.get_mut(&id)?;
        let slot_bytes = serve.layout.slot_bytes();
        let (is_ended, is_leased) = (state == ServeBlock::Ended, state.is_leased());
        let before = std::mem::replace(&mut serve.blocks[block as usize], state);
        serve.open -= u32::from(is_ended && before != ServeBlock::Ended);
        match (before.is_leased(), is_leased) {
            (false, true) => self.serve_share.leased_bytes += slot_bytes,
            (true, false) => self.serve_share.leased_bytes -= slot_bytes,
            _ => {}
        }
        Some(before)
    }

    /// Reports an unleased block as absent.
    pub(crate) fn serve_absent(&mut self, id: ServeId, block: u32) {
        self.emit_absent(id, block);
        self.set_serve_block(id, block, ServeBlock::Ended);
    }

    pub(crate) fn end_serve_if_complete(&mut self, id: ServeId) {
        if self.serves.get(&id).is_some_and(|serve| serve.open == 0) {
            self.remove_serve(id);
        }
    }

    fn remove_serve(&mut self, id: ServeId) {
        let Some(serve) = self.serves.remove(&id) else { return };
        let entries = self.cache.index.find_all(serve.keys.iter());
        self.cache.touch_chain(entries.into_iter().flatten());
        self.timers.clear(serve.expires, Timer::Serve(id));
        if (serve.next as usize) < serve.blocks.len() {
            self.serve_share.waiting.retain(|waiting| *waiting != id);
        }
    }

    fn emit_header(&mut self, serve: ServeId, block: u32, frame: FrameIndex, tier: Tier) {
        let checksums = self.cache.checksums(frame).into();
        self.emit(Effect::ServeHeader { serve, block, tier, checksums });
    }

    fn emit_objects(&mut self, serve: ServeId, block: u32, frame: FrameIndex, layers: Range<u32>) {
        let layout = &self.cache.sizes.get(self.cache.frames.get(frame).size_class).layout;
        let offset = u64::from(layers.start) * layout.layer_bytes();
        let bytes = u64::from(layers.end - layers.start) * layout.layer_bytes();
        let last = layers.end == layout.layers();
        let slot = self.cache.frame_slot(frame);
        self.counters.serve_bytes += bytes;
        self.emit(Effect::ServeObjects(ServeObjects { serve, block, slot, offset, bytes, last }));
    }

    fn emit_absent(&mut self, serve: ServeId, block: u32) {
        self.counters.serve_blocks_absent += 1;
        self.emit(Effect::ServeAbsent { serve, block });
    }
}

/// Number of layers in one round over `blocks` blocks. If there are few blocks, a round sends about
/// [`SERVE_ROUND_BYTES`] over all of them. Otherwise it sends as many layers as needed to stay near
/// [`SERVE_PIECES_MAX`] pieces.
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
    fn rounds_have_a_minimum_size_and_a_bounded_number() {
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
