//! Simulated peers: their blocks, their requests, and the directory.

use std::collections::{BTreeMap, VecDeque};

use reprise_agent_core::effect::{ServeId, ServeObjects};
use reprise_agent_core::event::Replica;
use reprise_policy::routing::LoadClass;
use reprise_policy::{BlockKey, Layout, NodeId, Tier};

use crate::memory::{Memory, Tag, overlap};
use crate::rng::Rng;

/// Blocks of other nodes.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    pub(crate) held: BTreeMap<NodeId, BTreeMap<BlockKey, (Tag, Tier)>>,
}

impl Peers {
    /// Answer of the directory, with random errors.
    pub(crate) fn find(&self, key: &BlockKey, rng: &mut Rng, lies_permille: u64) -> Vec<Replica> {
        let mut found = Vec::new();
        let load = LoadClass::default();
        for (node, blocks) in &self.held {
            match blocks.get(key) {
                Some((_, tier)) if !rng.chance(lies_permille) => {
                    found.push(Replica { node: *node, tier: *tier, load });
                }
                None if rng.chance(lies_permille) => {
                    found.push(Replica { node: *node, tier: Tier::Dram, load });
                }
                _ => {}
            }
        }
        found
    }

    /// Whether a block is durable on a node, or (`None`) on any node.
    pub(crate) fn is_durable(&self, key: &BlockKey, on: Option<NodeId>) -> bool {
        let here = |(node, blocks): (&NodeId, &BTreeMap<BlockKey, (Tag, Tier)>)| {
            on.is_none_or(|on| on == *node) && blocks.get(key).is_some_and(|(_, tier)| *tier == Tier::Nvme)
        };
        self.held.iter().any(here)
    }
}

/// Request of a peer, as seen by the transport.
#[derive(Debug)]
pub(crate) struct PeerServe {
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) layout: Layout,
    pub(crate) blocks: Vec<PeerServeBlock>,
}

/// State of one block of the request.
#[derive(Debug, Default)]
pub(crate) struct PeerServeBlock {
    checksums: Option<Box<[u32]>>,
    /// Objects passed to the transport and not sent yet.
    queue: VecDeque<ServeObjects>,
    given: u64,
    pub(crate) state: SendState,
}

/// State of sending a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SendState {
    /// The core may still send more.
    #[default]
    Open,
    /// The core has sent everything, and the transport has not reported the end.
    Given,
    /// The block has ended.
    Ended,
}

impl PeerServe {
    pub(crate) fn new(keys: Vec<BlockKey>, layout: Layout) -> PeerServe {
        let blocks = keys.iter().map(|_| PeerServeBlock::default()).collect();
        PeerServe { keys, layout, blocks }
    }

    pub(crate) fn on_header(&mut self, block: u32, checksums: Box<[u32]>) {
        let block = &mut self.blocks[block as usize];
        assert!(block.state == SendState::Open && block.checksums.is_none(), "one header per block, first");
        assert_eq!(checksums.len(), self.layout.objects() as usize);
        block.checksums = Some(checksums);
    }

    pub(crate) fn on_objects(&mut self, objects: ServeObjects) {
        let layer_bytes = self.layout.layer_bytes();
        let block = &mut self.blocks[objects.block as usize];
        assert!(block.state == SendState::Open && block.checksums.is_some(), "objects follow the header");
        assert!(objects.offset == block.given && objects.bytes > 0, "objects come in order");
        assert!(objects.bytes.is_multiple_of(layer_bytes), "whole layers");
        block.given += objects.bytes;
        assert_eq!(objects.last, block.given == self.layout.block_bytes(), "the last objects are marked");
        if objects.last {
            block.state = SendState::Given;
        }
        block.queue.push_back(objects);
    }

    pub(crate) fn on_absent(&mut self, block: u32) {
        let block = &mut self.blocks[block as usize];
        assert_eq!(block.state, SendState::Open, "a block is reported absent at most once");
        block.state = if block.checksums.is_some() { SendState::Given } else { SendState::Ended };
    }

    /// Sends the next objects of a block and reads them; returns whether there were any.
    pub(crate) fn send(&mut self, block: u32, memory: &Memory, mut read: impl FnMut(&BlockKey, Tag)) -> bool {
        let key = &self.keys[block as usize];
        let state = &mut self.blocks[block as usize];
        let Some(objects) = state.queue.pop_front() else { return false };
        let checksums = state.checksums.as_ref().expect("objects follow the header");
        let layers = ((objects.offset + objects.bytes) / self.layout.layer_bytes()) as u32;
        let tag = memory.verify(objects.slot, &self.layout, checksums, layers);
        read(key, tag.unwrap_or_else(|| panic!("{key}: sent {:?}", memory.layers(objects.slot))));
        true
    }

    /// Whether the transport may report the end of a block.
    pub(crate) fn is_sent(&self, block: u32) -> bool {
        let block = &self.blocks[block as usize];
        block.state == SendState::Given && block.queue.is_empty()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.blocks.iter().all(|block| block.state == SendState::Ended)
    }

    /// Whether objects of a slot are still to be sent.
    pub(crate) fn uses(&self, slot: reprise_agent_core::effect::ArenaSlot) -> bool {
        self.blocks.iter().flat_map(|block| &block.queue).any(|objects| overlap(objects.slot, slot))
    }
}

/// Ascending ids of peer requests.
#[derive(Debug, Default)]
pub(crate) struct ServeIds(u64);

impl ServeIds {
    pub(crate) fn next(&mut self) -> ServeId {
        self.0 += 1;
        ServeId(self.0)
    }
}
