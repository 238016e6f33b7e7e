//! The transport between agents: fetches of blocks, and how they are served. Offers are in `offers.rs`.
//!
//! Received content is compared with the block's checksums before the core gets it, as in the transport. Not
//! reproduced: credits; a fetch is as large as the core makes it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use reprise_agent_core::effect::{ArenaSlot, FetchId, FetchRequest, FillId, ServeId, ServeObjects};
use reprise_agent_core::event::{Event, FillError, FillUpdate, PeerEvent, PeerRequest};
use reprise_policy::{BlockKey, Layout, Tier, peer};

use crate::environment::Environment;
use crate::memory::{Memory, Tag, is_damaged, verified};
use crate::messages::{Message, PeerMessage};
use crate::network::{Host, LineId};
use crate::observation::Observation;
use crate::outcomes::{Follow, Outcomes};
use crate::setup::Variant;
use crate::simulation::{AgentStep, take_where};
use crate::timed;

/// Connections that an agent has opened to others, by their index.
#[derive(Debug)]
pub(crate) struct PeerLines {
    node: usize,
    lines: BTreeMap<usize, LineId>,
}

/// Fetches and serves of one agent; see the module.
#[derive(Debug)]
pub(crate) struct Peers {
    node: usize,
    pub(crate) fetches: BTreeMap<FetchId, Fetch>,
    pub(crate) serves: BTreeMap<ServeId, Serve>,
    serves_begun: u64,
    /// Serves whose connection has ended without the core's knowledge yet: data for them is dropped, as in a
    /// transport.
    lost: BTreeSet<ServeId>,
}

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
    /// Fails the missing blocks.
    fn fail(&self, out: &mut Outcomes) {
        for block in self.blocks.iter().filter(|block| !block.over) {
            let update = FillUpdate::Failed(FillError::PeerLost);
            out.event(Event::Peer(PeerEvent::Fill { fill: block.fill, update }));
        }
    }

    /// Returns the slots that are still being filled.
    fn slots(&self) -> impl Iterator<Item = ArenaSlot> {
        self.blocks.iter().filter(|block| !block.over).map(|block| block.slot)
    }
}

impl Serve {
    /// Returns the slots that are still to be sent.
    fn slots(&self) -> impl Iterator<Item = ArenaSlot> {
        self.blocks.iter().flat_map(|block| &block.queue).map(|objects| objects.slot)
    }

    fn is_over(&self) -> bool {
        self.blocks.iter().all(|block| block.state == SendState::Ended)
    }
}

impl PeerLines {
    pub(crate) fn new(node: usize) -> PeerLines {
        PeerLines { node, lines: BTreeMap::new() }
    }

    /// Returns the connection to another agent.
    pub(crate) fn to(&mut self, env: &mut Environment, host: usize) -> LineId {
        let open = || env.open_line(Host::Node(self.node), Host::Node(host));
        *self.lines.entry(host).or_insert_with(open)
    }

    pub(crate) fn forget(&mut self, line: LineId) {
        self.lines.retain(|_, other| *other != line);
    }

    /// Forgets a connection whose other end has ended.
    pub(crate) fn forget_if_dead(&mut self, env: &Environment, line: LineId) {
        if !env.far_lives(line) {
            self.forget(line);
        }
    }
}

impl Peers {
    pub(crate) fn new(node: usize) -> Peers {
        let (fetches, serves, lost) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Peers { node, fetches, serves, serves_begun: 0, lost }
    }

    /// Returns the slots that are still being filled or sent.
    pub(crate) fn slots(&self) -> impl Iterator<Item = ArenaSlot> {
        self.fetches.values().flat_map(Fetch::slots).chain(self.serves.values().flat_map(Serve::slots))
    }

    // ---- requesting side ----------------------------------------------------------------------------------

    /// Sends a fetch over a connection.
    pub(crate) fn fetch(&mut self, env: &mut Environment, line: LineId, request: FetchRequest) {
        let FetchRequest { fetch: id, tenant, layout, blocks, deadline } = request;
        let keys = blocks.iter().map(|block| block.key).collect();
        let waiting = blocks.iter().map(|block| FetchBlock {
            fill: block.fill,
            key: block.key,
            slot: block.into,
            header: None,
            layers: 0,
            over: false,
        });
        self.fetches.insert(id, Fetch { line, layout, blocks: waiting.collect() });
        env.count("fetches");
        env.send(line, 1, Message::Peer(PeerMessage::Fetch { fetch: id, tenant, keys, layout, deadline }));
        env.later(self.node, deadline, AgentStep::FetchDeadline(id));
    }

    /// Fails the fetch of a node that was never reported, or is no longer reported.
    pub(crate) fn fail_unroutable_fetch(&self, env: &mut Environment, blocks: &[peer::FetchBlock]) {
        for block in blocks {
            let update = FillUpdate::Failed(FillError::PeerLost);
            env.later(
                self.node,
                Duration::ZERO,
                AgentStep::Event(Event::Peer(PeerEvent::Fill { fill: block.fill, update })),
            );
        }
    }

    /// Fails the missing blocks of a fetch at its deadline.
    pub(crate) fn fetch_deadline(
        &mut self,
        env: &mut Environment,
        lines: &mut PeerLines,
        id: FetchId,
        out: &mut Outcomes,
    ) {
        let Some(fetch) = self.fetches.remove(&id) else { return };
        lines.forget_if_dead(env, fetch.line);
        env.send(fetch.line, 1, Message::Peer(PeerMessage::Cancel { fetch: id }));
        fetch.fail(out);
    }

    /// Handles the end of a connection.
    pub(crate) fn line_lost(&mut self, line: LineId, out: &mut Outcomes) {
        let fetches = take_where(&mut self.fetches, |fetch| fetch.line == line);
        let serves = take_where(&mut self.serves, |serve| serve.line == line);
        // All at once: a slot that one of them frees must not belong to another ended one.
        fetches.iter().for_each(|(_, fetch)| fetch.fail(out));
        self.lost.extend(serves.iter().map(|(serve, _)| *serve));
        serves
            .iter()
            .for_each(|(serve, _)| out.event(Event::Peer(PeerEvent::ServeAborted { serve: *serve })));
    }

    /// Called before the core gets an event: one that ends a serve ends its data too.
    pub(crate) fn before_event(&mut self, event: &Event) {
        if let Event::Peer(PeerEvent::ServeAborted { serve }) = event {
            self.lost.remove(serve);
        }
    }

    /// Handles a message about a fetch or a serve.
    pub(crate) fn on_message(
        &mut self,
        env: &mut Environment,
        memory: &mut Memory,
        (line, message): (LineId, PeerMessage),
        out: &mut Outcomes,
    ) {
        match message {
            PeerMessage::Fetch { fetch, tenant, keys, layout, deadline } => {
                let request = PeerRequest { serve: ServeId(0), tenant, layout, keys, deadline };
                self.serve(env, (line, fetch), request, out);
            }
            PeerMessage::Cancel { fetch } => {
                let of = |serve: &Serve| serve.line == line && serve.fetch == fetch;
                let gone = take_where(&mut self.serves, of);
                gone.iter()
                    .for_each(|(serve, _)| out.event(Event::Peer(PeerEvent::ServeAborted { serve: *serve })));
            }
            PeerMessage::Header { fetch, block, tier, checksums } => {
                if let Some(block) = self.fetch_block(fetch, block) {
                    block.header = Some((tier, checksums));
                }
            }
            PeerMessage::Layers { fetch, block, first, tags } => {
                self.receive_layers(env, memory, (fetch, block, first, &tags), out);
            }
            PeerMessage::Absent { fetch, block } => {
                if let Some(block) = self.fetch_block(fetch, block) {
                    block.over = true;
                    let (fill, update) = (block.fill, FillUpdate::Failed(FillError::Absent));
                    self.forget_fetch(fetch);
                    out.event(Event::Peer(PeerEvent::Fill { fill, update }));
                }
            }
            PeerMessage::Offer { .. } | PeerMessage::OfferAnswer { .. } => unreachable!("not about blocks"),
        }
    }

    fn fetch_block(&mut self, fetch: FetchId, block: u32) -> Option<&mut FetchBlock> {
        let fetch = self.fetches.get_mut(&fetch)?;
        fetch.blocks.get_mut(block as usize).filter(|block| !block.over)
    }

    fn receive_layers(
        &mut self,
        env: &mut Environment,
        memory: &mut Memory,
        (fetch, number, first, tags): (FetchId, u32, u32, &[Tag]),
        out: &mut Outcomes,
    ) {
        let Some(layout) = self.fetches.get(&fetch).map(|fetch| fetch.layout) else { return };
        let checks = env.setup.variant != Variant::PeersUnverified;
        let Some(block) = self.fetch_block(fetch, number) else { return };
        assert_eq!(block.layers, first, "layers are in order");
        let end = first + tags.len() as u32;
        let (tier, checksums) = block.header.clone().expect("objects follow the header");
        let (fill, slot, key) = (block.fill, block.slot, block.key);
        let checked = verified(tags, first, &layout, &checksums);
        let content = if checks { checked } else { tags.first().copied() };
        (block.layers, block.over) = (end, content.is_none() || end == layout.layers());
        memory.write(slot, layout.layers(), first..end, tags);
        let update = if content.is_some() {
            env.observe(Observation::LayersReceived { key, layers: tags.to_vec() });
            FillUpdate::Layers { layers: end, checksums: (first == 0).then_some(checksums), tier }
        } else {
            FillUpdate::Failed(FillError::Corrupt)
        };
        self.forget_fetch(fetch);
        out.event(Event::Peer(PeerEvent::Fill { fill, update }));
    }

    fn forget_fetch(&mut self, id: FetchId) {
        if self.fetches.get(&id).is_some_and(|fetch| fetch.blocks.iter().all(|block| block.over)) {
            self.fetches.remove(&id);
        }
    }

    // ---- serving side -------------------------------------------------------------------------------------

    fn serve(
        &mut self,
        env: &mut Environment,
        (line, fetch): (LineId, FetchId),
        request: PeerRequest,
        out: &mut Outcomes,
    ) {
        self.serves_begun += 1;
        let id = ServeId(self.serves_begun);
        let blocks = request.keys.iter().map(|_| ServeBlock::default()).collect();
        self.serves.insert(id, Serve { line, fetch, layout: request.layout, blocks });
        env.count("serves");
        out.event(Event::PeerRequest(PeerRequest { serve: id, ..request }));
        out.next.push(Follow::EndServe(id));
    }

    fn block(&mut self, serve: ServeId, block: u32) -> (LineId, FetchId, &mut ServeBlock) {
        let serve = self.serves.get_mut(&serve).expect("a lost peer gets no data");
        (serve.line, serve.fetch, &mut serve.blocks[block as usize])
    }

    pub(crate) fn serve_header(
        &mut self,
        env: &mut Environment,
        (serve, number): (ServeId, u32),
        tier: Tier,
        checksums: Box<[u32]>,
    ) {
        if self.lost.contains(&serve) {
            return;
        }
        let (line, fetch, block) = self.block(serve, number);
        assert!(block.state == SendState::Open && block.checksums.is_none(), "one header per block, first");
        block.checksums = Some(checksums.clone());
        env.send(line, 0, Message::Peer(PeerMessage::Header { fetch, block: number, tier, checksums }));
    }

    pub(crate) fn serve_objects(&mut self, env: &mut Environment, objects: ServeObjects) {
        let (serve, number) = (objects.serve, objects.block);
        if self.lost.contains(&serve) {
            return;
        }
        let layout = self.serves[&serve].layout;
        let (line, _, block) = self.block(serve, number);
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
        let bytes = objects.bytes;
        block.queue.push_back(objects);
        self.send_later(env, (serve, number), (line, bytes));
    }

    /// Reports a block absent; returns whether there is a receiver.
    pub(crate) fn serve_absent(&mut self, env: &mut Environment, serve: ServeId, number: u32) -> bool {
        if self.lost.contains(&serve) {
            return false;
        }
        let (line, fetch, block) = self.block(serve, number);
        assert_eq!(block.state, SendState::Open, "a block is reported absent once");
        let begun = block.checksums.is_some();
        block.state = if begun { SendState::Queued } else { SendState::Ended };
        env.send(line, 0, Message::Peer(PeerMessage::Absent { fetch, block: number }));
        if begun {
            self.send_later(env, (serve, number), (line, 0));
        } else {
            // Deferred, because the core is still executing effects; the serve may end with it.
            env.later(self.node, Duration::ZERO, AgentStep::Send { serve, block: number });
        }
        true
    }

    fn send_later(
        &mut self,
        env: &mut Environment,
        (serve, block): (ServeId, u32),
        (line, bytes): (LineId, u64),
    ) {
        if timed::begin_send(env, self.node, (line, bytes), AgentStep::Send { serve, block }) {
            return;
        }
        let delay = env.rng.micros(10..300);
        env.later(self.node, delay, AgentStep::Send { serve, block });
    }

    /// Reads the next pieces of a block and sends them.
    pub(crate) fn send_objects(
        &mut self,
        env: &mut Environment,
        memory: &Memory,
        (serve, number): (ServeId, u32),
        out: &mut Outcomes,
    ) {
        let Some(layout) = self.serves.get(&serve).map(|serve| serve.layout) else { return };
        let (line, fetch, block) = self.block(serve, number);
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
            let tags = memory.layers(objects.slot)[span].to_vec();
            let (first, checksums) = (layers.start as u32, checksums.expect("objects follow the header"));
            let right = verified(&tags, first, &layout, &checksums).is_some() || is_damaged(&tags);
            assert!(right, "node {} sent {tags:?} from a slot of another block", self.node);
            let message = PeerMessage::Layers { fetch, block: number, first, tags };
            env.send(line, 0, Message::Peer(message));
        }
        if ends {
            out.event(Event::Peer(PeerEvent::ServeDone { serve, block: number }));
        }
        out.next.push(Follow::EndServe(serve));
    }

    /// Forgets a serve if all of its blocks have ended.
    pub(crate) fn forget_serve(&mut self, id: ServeId) {
        if self.serves.get(&id).is_some_and(Serve::is_over) {
            self.serves.remove(&id);
        }
    }
}
