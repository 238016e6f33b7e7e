//! Table of the requests of peers, and the leases of their blocks.

use std::ops::Range;

use reprise_policy::{BlockKey, Layout, TenantId, Tick, Tier};

use crate::cache::{Cache, FrameIndex, Lease, Read};
use crate::context::Context;
use crate::effect::ServeId;
use crate::event::PeerRequest;
use crate::serve::send::round_layers;
use crate::serve::{ServeOutcome, Serves};
use crate::waiter::{WaitId, WaiterId, WaiterOwner};

/// Request of a peer.
#[derive(Debug)]
pub(super) struct Serve {
    pub(super) keys: Box<[BlockKey]>,
    pub(super) tenant: TenantId,
    pub(super) layout: Layout,
    pub(super) blocks: Box<[ServeBlock]>,
    /// First block that was not started.
    pub(super) next: u32,
    /// Leased blocks in DRAM to send once the reads of the others were started.
    pub(super) in_dram: Vec<u32>,
    /// Number of blocks that have not ended.
    open: u32,
    expires: Tick,
}

/// State of a block of a serve.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ServeBlock {
    /// Not looked up yet.
    Due,
    /// Reported as absent, or sent.
    Ended,
    /// Being read into the arena.
    Waiting { lease: Lease<Read>, wait: WaitId, header: Header },
    /// Passed to the transport.
    Sending { lease: Lease<Read> },
}

/// Whether the peer has received a block's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    Due,
    Sent,
}

/// Id of a block that waits.
pub(super) fn waiter(serve: ServeId, block: u32) -> WaiterId {
    WaiterId { object: serve.0, block, owner: WaiterOwner::Serve }
}

impl Serve {
    /// Creates a request whose blocks were not started.
    pub(super) fn new(request: PeerRequest, expires: Tick) -> Serve {
        let count = request.keys.len() as u32;
        Serve {
            keys: request.keys.into_boxed_slice(),
            tenant: request.tenant,
            layout: request.layout,
            blocks: (0..count).map(|_| ServeBlock::Due).collect(),
            next: 0,
            in_dram: Vec::new(),
            open: count,
            expires,
        }
    }

    /// Slot bytes of the blocks that have not ended.
    pub(super) fn open_bytes(&self) -> u64 {
        u64::from(self.open) * self.layout.slot_bytes()
    }
}

impl ServeBlock {
    /// Lease on the block's slot.
    pub(super) fn lease(&self) -> Option<&Lease<Read>> {
        match self {
            ServeBlock::Waiting { lease, .. } | ServeBlock::Sending { lease } => Some(lease),
            ServeBlock::Due | ServeBlock::Ended => None,
        }
    }
}

impl Serves {
    /// Detaches a block from its fill, if it waits for one.
    pub(super) fn detach(&mut self, id: ServeId, block: u32) {
        let Some(serve) = self.serves.get(&id) else { return };
        if let ServeBlock::Waiting { wait, .. } = serve.blocks[block as usize] {
            self.outcomes.push(ServeOutcome::Detach { wait, waiter: waiter(id, block) });
        }
    }

    /// Marks a block that waited as passed to the transport.
    pub(super) fn mark_sending(&mut self, id: ServeId, block: u32) {
        let Some(serve) = self.serves.get_mut(&id) else { return };
        let state = &mut serve.blocks[block as usize];
        *state = match std::mem::replace(state, ServeBlock::Ended) {
            ServeBlock::Waiting { lease, .. } => ServeBlock::Sending { lease },
            other => other,
        };
    }

    /// Ends a block and its lease.
    pub(super) fn end_block(&mut self, cache: &mut Cache, id: ServeId, block: u32) {
        let before = self.set_block(id, block, ServeBlock::Ended);
        if let Some(ServeBlock::Waiting { lease, .. } | ServeBlock::Sending { lease }) = before {
            cache.release(lease);
        }
    }

    /// Reports an unleased block as absent.
    pub(super) fn lose(&mut self, cx: &mut Context, id: ServeId, block: u32) {
        self.send_absent(cx, id, block);
        self.set_block(id, block, ServeBlock::Ended);
    }

    /// Sends verified layers of a block that waits.
    pub(super) fn stream(
        &mut self,
        cache: &Cache,
        cx: &mut Context,
        (id, block): (ServeId, u32),
        layers: Range<u32>,
    ) {
        let Some(serve) = self.serves.get_mut(&id) else { return };
        let Some(ServeBlock::Waiting { lease, header, .. }) = serve.blocks.get_mut(block as usize) else {
            return;
        };
        let frame = lease.frame();
        if std::mem::replace(header, Header::Sent) == Header::Due {
            self.counters.serve_blocks_nvme += 1;
            Serves::send_header(cache, cx, (id, block), frame, Tier::Nvme);
        }
        if layers.end == serve.layout.layers() {
            self.mark_sending(id, block);
        }
        self.send_objects(cache, cx, (id, block), (frame, layers));
    }

    /// Sends the blocks in DRAM: first all headers, then the objects in rounds.
    pub(super) fn send_in_dram(&mut self, cache: &Cache, cx: &mut Context, id: ServeId) {
        let Some(serve) = self.serves.get_mut(&id) else { return };
        let (layout, blocks) = (serve.layout, std::mem::take(&mut serve.in_dram));
        let frame = |block: &u32| serve.blocks[*block as usize].lease().map(|lease| (*block, lease.frame()));
        let blocks: Vec<(u32, FrameIndex)> = blocks.iter().filter_map(frame).collect();
        self.counters.serve_blocks_dram += blocks.len() as u64;
        for (block, frame) in &blocks {
            Serves::send_header(cache, cx, (id, *block), *frame, Tier::Dram);
        }
        let stride = round_layers(&layout, blocks.len() as u64);
        for from in (0..layout.layers()).step_by(stride as usize) {
            let to = (from + stride).min(layout.layers());
            for (block, frame) in &blocks {
                self.send_objects(cache, cx, (id, *block), (*frame, from..to));
            }
        }
    }

    /// Sets the state of a block, and returns the state before.
    pub(super) fn set_block(&mut self, id: ServeId, block: u32, state: ServeBlock) -> Option<ServeBlock> {
        let serve = self.serves.get_mut(&id)?;
        let (tenant, slot_bytes) = (serve.tenant, serve.layout.slot_bytes());
        let (is_ended, is_leased) = (state == ServeBlock::Ended, state.lease().is_some());
        let before = std::mem::replace(&mut serve.blocks[block as usize], state);
        serve.open -= u32::from(is_ended && before != ServeBlock::Ended);
        match (before.lease().is_some(), is_leased) {
            (false, true) => self.leased.begin(tenant, slot_bytes),
            (true, false) => self.leased.end(tenant, slot_bytes),
            _ => {}
        }
        Some(before)
    }

    /// Removes a request whose blocks have all ended.
    pub(super) fn end_if_complete(&mut self, cache: &mut Cache, id: ServeId) {
        if self.serves.get(&id).is_some_and(|serve| serve.open == 0) {
            self.remove(cache, id);
        }
    }

    /// Removes a request, and marks its blocks as used.
    pub(super) fn remove(&mut self, cache: &mut Cache, id: ServeId) {
        let Some(serve) = self.serves.remove(&id) else { return };
        let entries = cache.find_all(serve.keys.iter());
        cache.touch_chain(entries.into_iter().flatten());
        self.timers.clear(serve.expires, id);
        if (serve.next as usize) < serve.blocks.len() {
            self.waiting.retain(|waiting| *waiting != id);
        }
    }
}
