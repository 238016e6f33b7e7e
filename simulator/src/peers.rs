//! The transport between agents: fetches of blocks, and how they are served. Offers are in `offers.rs`.
//!
//! Received content is compared with the block's checksums before the core gets it, as in the transport. Not
//! reproduced: credits; a fetch is as large as the core makes it.

use std::collections::VecDeque;
use std::time::Duration;

use reprise_agent_core::effect::{ArenaSlot, FetchId, FetchRequest, FillId, ServeId, ServeObjects};
use reprise_agent_core::event::{Event, FillError, FillUpdate, PeerEvent, PeerRequest};
use reprise_policy::{BlockKey, Layout, NodeId, Tier, peer};

use crate::memory::{Tag, is_damaged, verified};
use crate::messages::{Message, PeerMessage};
use crate::network::{Host, LineId};
use crate::setup::Variant;
use crate::simulation::{AgentStep, Simulation, take_where};

/// A fetch of blocks from a peer.
#[derive(Debug)]
pub(crate) struct Fetch {
    line: LineId,
    layout: Layout,
    blocks: Vec<FetchBlock>,
}

#[derive(Debug)]
struct FetchBlock {
    fill: FillId,
    key: BlockKey,
    slot: ArenaSlot,
    header: Option<(Tier, Box<[u32]>)>,
    layers: u32,
    over: bool,
}

/// A request of a peer.
#[derive(Debug)]
pub(crate) struct Serve {
    line: LineId,
    fetch: FetchId,
    layout: Layout,
    blocks: Vec<ServeBlock>,
}

#[derive(Debug, Default)]
struct ServeBlock {
    checksums: Option<Box<[u32]>>,
    /// Passed to the transport, not sent yet.
    queue: VecDeque<ServeObjects>,
    given: u64,
    state: SendState,
}

/// State of a block of a serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SendState {
    /// The core may pass further pieces.
    #[default]
    Open,
    /// The core has passed everything; the transport has not reported the end.
    Queued,
    /// The block has ended.
    Ended,
}

impl Fetch {
    /// Returns the slots that are still being filled.
    pub(crate) fn slots(&self) -> impl Iterator<Item = ArenaSlot> {
        self.blocks.iter().filter(|block| !block.over).map(|block| block.slot)
    }
}

impl Serve {
    /// Returns the slots that are still to be sent.
    pub(crate) fn slots(&self) -> impl Iterator<Item = ArenaSlot> {
        self.blocks.iter().flat_map(|block| &block.queue).map(|objects| objects.slot)
    }

    fn is_over(&self) -> bool {
        self.blocks.iter().all(|block| block.state == SendState::Ended)
    }
}

impl Simulation {
    // ---- requesting side ----------------------------------------------------------------------------------

    pub(crate) fn fetch(&mut self, node: usize, from: NodeId, request: FetchRequest) {
        let FetchRequest { fetch: id, layout, blocks, deadline } = request;
        let Some(host) = self.client(node).host_of(from) else {
            // The node was never reported, or is no longer reported.
            return self.fail_unroutable_fetch(node, &blocks);
        };
        blocks.iter().for_each(|block| self.assert_unused(node, block.into));
        let line = self.peer_line(node, host);
        let keys = blocks.iter().map(|block| block.key).collect();
        let waiting = blocks.iter().map(|block| FetchBlock {
            fill: block.fill,
            key: block.key,
            slot: block.into,
            header: None,
            layers: 0,
            over: false,
        });
        let blocks = waiting.collect();
        self.process(node).fetches.insert(id, Fetch { line, layout, blocks });
        self.env.count("fetches");
        self.env.send(line, 1, Message::Peer(PeerMessage::Fetch { fetch: id, keys, layout, deadline }));
        self.env.later(node, deadline, AgentStep::FetchDeadline(id));
    }

    /// Returns the connection to another agent.
    pub(crate) fn peer_line(&mut self, node: usize, host: usize) -> LineId {
        let known = self.process(node).peer_lines.get(&host).copied();
        let line = known.unwrap_or_else(|| self.env.open_line(Host::Node(node), Host::Node(host)));
        self.process(node).peer_lines.insert(host, line);
        line
    }

    fn fail_unroutable_fetch(&mut self, node: usize, blocks: &[peer::FetchBlock]) {
        for block in blocks {
            let update = FillUpdate::Failed(FillError::PeerLost);
            let event = Event::Peer(PeerEvent::Fill { fill: block.fill, update });
            self.env.later(node, Duration::ZERO, AgentStep::Event(event));
        }
    }

    /// Fails the missing blocks of a fetch at its deadline.
    pub(crate) fn fetch_deadline(&mut self, node: usize, id: FetchId) {
        let Some(fetch) = self.process(node).fetches.remove(&id) else { return };
        if !self.env.far_lives(fetch.line) {
            self.process(node).peer_lines.retain(|_, line| *line != fetch.line);
        }
        self.env.send(fetch.line, 1, Message::Peer(PeerMessage::Cancel { fetch: id }));
        self.fetch_failed(node, &fetch);
    }

    fn fetch_failed(&mut self, node: usize, fetch: &Fetch) {
        for block in fetch.blocks.iter().filter(|block| !block.over) {
            let update = FillUpdate::Failed(FillError::PeerLost);
            self.apply(node, Event::Peer(PeerEvent::Fill { fill: block.fill, update }));
        }
    }

    pub(crate) fn peer_line_lost(&mut self, node: usize, line: LineId) {
        let process = self.process(node);
        process.peer_lines.retain(|_, other| *other != line);
        let fetches = take_where(&mut process.fetches, |fetch| fetch.line == line);
        let serves = take_where(&mut process.serves, |serve| serve.line == line);
        // All at once: a slot that one of them frees must not belong to another ended one.
        fetches.iter().for_each(|(_, fetch)| self.fetch_failed(node, fetch));
        self.process(node).serves_lost.extend(serves.iter().map(|(serve, _)| *serve));
        for (serve, _) in serves {
            self.process(node).serves_lost.remove(&serve);
            self.apply(node, Event::Peer(PeerEvent::ServeAborted { serve }));
        }
        self.offers_lost(node, line);
    }

    /// Reports whether the serve has no receiver and the core does not know it yet.
    fn is_lost(&mut self, node: usize, serve: ServeId) -> bool {
        self.process(node).serves_lost.contains(&serve)
    }

    pub(crate) fn on_peer_message(&mut self, node: usize, line: LineId, message: PeerMessage) {
        match message {
            PeerMessage::Fetch { fetch, keys, layout, deadline } => {
                self.serve(node, (line, fetch), PeerRequest { serve: ServeId(0), keys, layout, deadline });
            }
            PeerMessage::Cancel { fetch } => {
                let serves = &mut self.process(node).serves;
                let of = |serve: &Serve| serve.line == line && serve.fetch == fetch;
                let gone = take_where(serves, of);
                for (serve, _) in gone {
                    self.apply(node, Event::Peer(PeerEvent::ServeAborted { serve }));
                }
            }
            PeerMessage::Header { fetch, block, tier, checksums } => {
                if let Some(block) = self.fetch_block(node, fetch, block) {
                    block.header = Some((tier, checksums));
                }
            }
            PeerMessage::Layers { fetch, block, first, tags } => {
                self.receive_layers(node, (fetch, block), first, &tags);
            }
            PeerMessage::Offer(offer) => self.offered(node, line, *offer),
            PeerMessage::OfferAnswer { offer, taken, retry_after } => {
                self.offer_answered(node, offer, (taken, retry_after));
            }
            PeerMessage::Absent { fetch, block } => {
                if let Some(block) = self.fetch_block(node, fetch, block) {
                    let fill = block.fill;
                    block.over = true;
                    let update = FillUpdate::Failed(FillError::Absent);
                    self.apply(node, Event::Peer(PeerEvent::Fill { fill, update }));
                    self.forget_fetch(node, fetch);
                }
            }
        }
    }

    fn fetch_block(&mut self, node: usize, fetch: FetchId, block: u32) -> Option<&mut FetchBlock> {
        let fetch = self.process(node).fetches.get_mut(&fetch)?;
        fetch.blocks.get_mut(block as usize).filter(|block| !block.over)
    }

    fn receive_layers(&mut self, node: usize, of: (FetchId, u32), first: u32, tags: &[Tag]) {
        let (fetch, number) = of;
        let Some(layout) = self.process(node).fetches.get(&fetch).map(|fetch| fetch.layout) else { return };
        let checks = self.env.setup.variant != Variant::PeersUnverified;
        let Some(block) = self.fetch_block(node, fetch, number) else { return };
        assert_eq!(block.layers, first, "layers are in order");
        let end = first + tags.len() as u32;
        let (tier, checksums) = block.header.clone().expect("objects follow the header");
        let (fill, slot, key) = (block.fill, block.slot, block.key);
        let checked = verified(tags, first, &layout, &checksums);
        let content = if checks { checked } else { tags.first().copied() };
        (block.layers, block.over) = (end, content.is_none() || end == layout.layers());
        self.process(node).memory.write(slot, layout.layers(), first..end, tags);
        let update = match content {
            Some(tag) => {
                let committed = self.truth[&key].contains(&tag) && tags.iter().all(|other| *other == tag);
                assert!(committed, "{key}: a peer sent {tags:?}, which was never committed");
                FillUpdate::Layers { layers: end, checksums: (first == 0).then_some(checksums), tier }
            }
            None => FillUpdate::Failed(FillError::Corrupt),
        };
        self.apply(node, Event::Peer(PeerEvent::Fill { fill, update }));
        self.forget_fetch(node, fetch);
    }

    fn forget_fetch(&mut self, node: usize, id: FetchId) {
        let fetches = &mut self.process(node).fetches;
        if fetches.get(&id).is_some_and(|fetch| fetch.blocks.iter().all(|block| block.over)) {
            fetches.remove(&id);
        }
    }

    // ---- serving side -------------------------------------------------------------------------------------

    fn serve(&mut self, node: usize, of: (LineId, FetchId), request: PeerRequest) {
        let (line, fetch) = of;
        let process = self.process(node);
        process.serves_begun += 1;
        let id = ServeId(process.serves_begun);
        let blocks = request.keys.iter().map(|_| ServeBlock::default()).collect();
        process.serves.insert(id, Serve { line, fetch, layout: request.layout, blocks });
        self.env.count("serves");
        self.apply(node, Event::Peer(PeerEvent::Request(PeerRequest { serve: id, ..request })));
        self.forget_serve(node, id);
    }

    fn serve_block(&mut self, node: usize, serve: ServeId, block: u32) -> (LineId, FetchId, &mut ServeBlock) {
        let serve = self.process(node).serves.get_mut(&serve).expect("a lost peer gets no data");
        (serve.line, serve.fetch, &mut serve.blocks[block as usize])
    }

    pub(crate) fn serve_header(
        &mut self,
        node: usize,
        of: (ServeId, u32),
        tier: Tier,
        checksums: Box<[u32]>,
    ) {
        if self.is_lost(node, of.0) {
            return;
        }
        let (line, fetch, block) = self.serve_block(node, of.0, of.1);
        assert!(block.state == SendState::Open && block.checksums.is_none(), "one header per block, first");
        block.checksums = Some(checksums.clone());
        self.env.send(line, 0, Message::Peer(PeerMessage::Header { fetch, block: of.1, tier, checksums }));
    }

    pub(crate) fn serve_objects(&mut self, node: usize, objects: ServeObjects) {
        let (serve, number) = (objects.serve, objects.block);
        if self.is_lost(node, serve) {
            return;
        }
        let layout = self.process(node).serves[&serve].layout;
        let (_, _, block) = self.serve_block(node, serve, number);
        assert!(block.state == SendState::Open && block.checksums.is_some(), "objects follow the header");
        assert!(objects.offset == block.given && objects.bytes > 0, "objects are in order");
        assert!(objects.bytes.is_multiple_of(layout.layer_bytes()), "whole layers");
        block.given += objects.bytes;
        assert_eq!(
            objects.last,
            block.given == layout.block_bytes(),
            "only the last objects are marked as last"
        );
        if objects.last {
            block.state = SendState::Queued;
        }
        block.queue.push_back(objects);
        self.send_later(node, serve, number);
    }

    pub(crate) fn serve_absent(&mut self, node: usize, serve: ServeId, number: u32) {
        if self.is_lost(node, serve) {
            return;
        }
        let (line, fetch, block) = self.serve_block(node, serve, number);
        assert_eq!(block.state, SendState::Open, "a block is reported absent once");
        let begun = block.checksums.is_some();
        block.state = if begun { SendState::Queued } else { SendState::Ended };
        self.env.send(line, 0, Message::Peer(PeerMessage::Absent { fetch, block: number }));
        self.note_unreadable(node);
        if begun {
            self.send_later(node, serve, number);
        } else {
            // Deferred, because the core is still executing effects; the serve may end with it.
            self.env.later(node, Duration::ZERO, AgentStep::Send { serve, block: number });
        }
    }

    fn send_later(&mut self, node: usize, serve: ServeId, block: u32) {
        let delay = self.env.rng.micros(10..300);
        self.env.later(node, delay, AgentStep::Send { serve, block });
    }

    /// Reads the next pieces of a block and sends them.
    pub(crate) fn send_objects(&mut self, node: usize, serve: ServeId, number: u32) {
        let Some(layout) = self.process(node).serves.get(&serve).map(|serve| serve.layout) else { return };
        let (line, fetch, block) = self.serve_block(node, serve, number);
        let checksums = block.checksums.clone();
        let next = block.queue.pop_front();
        let ends = block.queue.is_empty() && block.state == SendState::Queued;
        if ends {
            block.state = SendState::Ended;
        }
        if let Some(objects) = next {
            let layers = objects.offset / layout.layer_bytes()
                ..(objects.offset + objects.bytes) / layout.layer_bytes();
            let span = layers.start as usize..layers.end as usize;
            let tags = self.process(node).memory.layers(objects.slot)[span].to_vec();
            let (first, checksums) = (layers.start as u32, checksums.expect("objects follow the header"));
            let right = verified(&tags, first, &layout, &checksums).is_some() || is_damaged(&tags);
            assert!(right, "node {node} sent {tags:?} from a slot of another block");
            let message = PeerMessage::Layers { fetch, block: number, first, tags };
            self.env.send(line, 0, Message::Peer(message));
        }
        if ends {
            self.apply(node, Event::Peer(PeerEvent::ServeDone { serve, block: number }));
        }
        self.forget_serve(node, serve);
    }

    fn forget_serve(&mut self, node: usize, id: ServeId) {
        let serves = &mut self.process(node).serves;
        if serves.get(&id).is_some_and(Serve::is_over) {
            serves.remove(&id);
        }
    }
}
