//! Serving peers: blocks that another agent wants.
//!
//! Blocks in DRAM go out at once: first all headers, then objects in rounds over the blocks, each round some layers of
//! every block, so that the peer's engine can start with layer 0 early. Blocks on a device are read into the arena
//! and go out as their layers are verified. A block is leased from the moment its frame is known until the
//! transport reports the end of its sending.
//!
//! A serve never asks other peers, and never waits for a fetch from one: two agents that wait for each other's fetches
//! would wait for ever.

use std::ops::Range;

use reprise_policy::{Layout, Tick, Tier};

use super::AgentCore;
use super::fills::{Origin, Waiter};
use super::frames::{FrameIndex, FrameState};
use super::index::Dram;
use super::limits::{SERVE_BLOCKS_MAX, SERVE_PIECES_MAX, SERVE_ROUND_BYTES, SERVES_MAX};
use super::placing::Reads;
use super::timers::Timer;
use crate::effect::{Effect, ServeId, ServeObjects};
use crate::event::PeerRequest;

/// A peer's request.
#[derive(Debug)]
pub(super) struct Serve {
    pub(super) blocks: Box<[ServeBlock]>,
    /// Blocks that have not ended.
    open: u32,
    expires: Tick,
}

/// One block of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServeBlock {
    /// Absent, or sent.
    Ended,
    /// On its way into the arena; leased.
    Waiting {
        /// Slot of the fill.
        fill: u32,
        header: Header,
    },
    /// The transport has it; leased.
    Sending { frame: FrameIndex },
}

/// Whether the peer knows a block's checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    Due,
    Sent,
}

impl AgentCore {
    /// A peer wants blocks.
    pub(super) fn serve(&mut self, request: &PeerRequest) {
        let id = request.serve;
        self.counters.serves += 1;
        let count = request.keys.len();
        let refused =
            self.serves.len() >= SERVES_MAX || count > SERVE_BLOCKS_MAX || self.serves.contains_key(&id);
        if refused {
            (0..count as u32).for_each(|block| self.emit_absent(id, block));
            return;
        }
        let expires = self.now.after(request.deadline);
        let blocks = vec![ServeBlock::Ended; count].into_boxed_slice();
        self.serves.insert(id, Serve { blocks, open: 0, expires });
        self.timers.set(expires, Timer::Serve(id));
        let (in_dram, on_device) = self.sort_serve(request);
        self.serve_from_devices(request, &on_device);
        self.serve_from_dram(id, &request.layout, &in_dram);
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
        let Some(serve) = self.serves.remove(&id) else { return };
        self.timers.clear(serve.expires, Timer::Serve(id));
        for (block, state) in (0..).zip(&serve.blocks) {
            match *state {
                ServeBlock::Ended => {}
                ServeBlock::Sending { frame } => self.unlease(frame),
                ServeBlock::Waiting { fill, .. } => {
                    let (frame, _) = self.leave_fill(fill, Waiter::Serve { serve: id, block });
                    self.unlease(frame);
                }
            }
        }
    }

    /// The peer does not wait any longer: what is not whole is absent.
    pub(super) fn expire_serve(&mut self, id: ServeId) {
        let blocks = self.serves.get(&id).map_or(0, |serve| serve.blocks.len() as u32);
        for block in 0..blocks {
            let Some(serve) = self.serves.get(&id) else { return };
            if let ServeBlock::Waiting { fill, .. } = serve.blocks[block as usize] {
                let (frame, _) = self.leave_fill(fill, Waiter::Serve { serve: id, block });
                self.serve_failed(id, block, frame);
            }
        }
        self.end_serve_if_over(id);
    }

    /// Layers of a block that a peer waits for are verified.
    pub(super) fn stream_layers(&mut self, id: ServeId, block: u32, frame: FrameIndex, layers: Range<u32>) {
        let Some(serve) = self.serves.get(&id) else { return };
        let Some(ServeBlock::Waiting { fill, header }) = serve.blocks.get(block as usize).copied() else {
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
            ServeBlock::Waiting { fill, header: Header::Sent }
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
    fn sort_serve(&mut self, request: &PeerRequest) -> (Vec<(u32, FrameIndex)>, Vec<u32>) {
        let mut in_dram = Vec::new();
        let mut on_device = Vec::new();
        for (block, key) in (0..).zip(&request.keys) {
            let known = self.index.find(key).map(|entry| self.index.entry(entry));
            let known = known.filter(|entry| self.shapes.get(entry.shape()).layout == request.layout);
            match known.map(|entry| (entry.dram(), entry.stored())) {
                Some((Dram::Resident(frame), _)) => {
                    self.lease(frame);
                    self.set_serve_block(request.serve, block, ServeBlock::Sending { frame });
                    in_dram.push((block, frame));
                }
                Some((Dram::Filling(frame), _)) if self.is_read_from_device(frame) => {
                    self.attach_serve(request.serve, block, frame);
                }
                Some((Dram::Absent, Some(_))) => on_device.push(block),
                Some(_) | None => self.emit_absent(request.serve, block),
            }
        }
        (in_dram, on_device)
    }

    fn serve_from_devices(&mut self, request: &PeerRequest, blocks: &[u32]) {
        let mut reads = Reads::default();
        for block in blocks {
            let entry =
                self.index.find(&request.keys[*block as usize]).expect("found before, and not evicted");
            let begun = match self.index.entry(entry).dram() {
                // The peer named it twice.
                Dram::Filling(frame) => Some(frame),
                _ => self.begin_read(entry).map(|(device, frame, read)| {
                    reads.push(device, read);
                    frame
                }),
            };
            match begun {
                Some(frame) => self.attach_serve(request.serve, *block, frame),
                None => self.emit_absent(request.serve, *block),
            }
        }
        self.emit_reads(reads, request.layout, self.settings.read_bytes_default);
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
        let (fill, layers) = self.enter_fill(frame, Waiter::Serve { serve: id, block });
        self.lease(frame);
        self.set_serve_block(id, block, ServeBlock::Waiting { fill, header: Header::Due });
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

    fn set_serve_block(&mut self, id: ServeId, block: u32, state: ServeBlock) {
        let Some(serve) = self.serves.get_mut(&id) else { return };
        let place = &mut serve.blocks[block as usize];
        serve.open += u32::from(state != ServeBlock::Ended);
        serve.open -= u32::from(*place != ServeBlock::Ended);
        *place = state;
    }

    fn end_serve_if_over(&mut self, id: ServeId) {
        if let Some(serve) = self.serves.get(&id).filter(|serve| serve.open == 0) {
            self.timers.clear(serve.expires, Timer::Serve(id));
            self.serves.remove(&id);
        }
    }

    fn emit_header(&mut self, serve: ServeId, block: u32, frame: FrameIndex, tier: Tier) {
        let checksums = self.frames.get(frame).checksums.clone();
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
