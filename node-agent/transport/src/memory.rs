//! In-memory transports that share a hub: for simulation and tests. Without threads, clock and randomness: a
//! frame moves with each call of [`MemoryHub::step`], time passes with [`MemoryHub::advance`], and the same
//! calls produce the same events.
//!
//! The hub drives the same state machines as the TCP transport, over queues of frames instead of sockets,
//! with one channel per pair of requester and server. Faults are set per channel.
//!
//! Not included: bandwidth and latency; a simulator delays its calls of `step` according to its network
//! model.

mod channel;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_buffers::Arena;
use reprise_policy::peer::{
    FetchRequest, Offer, PeerEvent, PeerOffer, PeerOfferId, PeerRequest, ServeId, ServeObjects,
};
use reprise_policy::{TenantName, Tier};

use crate::api::{EventSink, Transport, TransportEvent, check_fetch, check_offer, span};
use crate::counters::{Counters, TransportStats, add};
use crate::error::TransportError;
use crate::inbound::NewFetch;
use crate::outbound::{InvalidCall, Outbound};
use crate::wire::BlocksBody;
use channel::{Channel, DeliveryOutcome, Ends, Line};

/// Settings of the channels of a hub.
#[derive(Clone, Copy, Debug)]
pub struct MemorySettings {
    /// Payload bytes that one server may have in flight towards one requester.
    pub credit_bytes: u64,
    /// A channel that stalls for this time is lost. A serve ends this long after its request's deadline.
    pub stall_timeout: Duration,
}

/// A pair of requester and server, by their addresses in [`MemoryHub::join`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    /// The node that fetches.
    pub requester: String,
    /// The node that serves.
    pub server: String,
}

/// Fault of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Connections break and new ones are rejected.
    Cut,
    /// Nothing moves; after the stall timeout the requester gives up.
    Stall,
    /// One bit of every data frame flips.
    Corrupt,
}

/// Connects the transports of one process. Clones are the same hub.
#[derive(Clone)]
pub struct MemoryHub {
    state: Arc<Mutex<HubState>>,
}

/// A node's [`Transport`] over a [`MemoryHub`].
pub struct MemoryTransport {
    hub: MemoryHub,
    address: String,
    arena: Arc<Arena>,
    counters: Arc<Counters>,
}

struct HubState {
    settings: MemorySettings,
    /// Time since the creation of the hub.
    now: Duration,
    nodes: BTreeMap<String, Node>,
    channels: BTreeMap<Link, Channel>,
    faults: BTreeMap<Link, Fault>,
    routes: HashMap<u64, Link>,
    /// Channel of each offer that was not answered.
    offer_routes: HashMap<u64, Link>,
    next_serve: u64,
    /// The channel that moved last: the next step begins behind it.
    last: Option<Link>,
}

#[derive(Clone)]
struct Node {
    sink: EventSink,
    counters: Arc<Counters>,
}

/// Events to deliver once the hub is unlocked.
type Outbox = Vec<(EventSink, TransportEvent)>;

impl MemoryHub {
    /// Creates a hub without nodes at time zero.
    pub fn new(settings: MemorySettings) -> MemoryHub {
        MemoryHub {
            state: Arc::new(Mutex::new(HubState {
                settings,
                now: Duration::ZERO,
                nodes: BTreeMap::new(),
                channels: BTreeMap::new(),
                faults: BTreeMap::new(),
                routes: HashMap::new(),
                offer_routes: HashMap::new(),
                next_serve: 1,
                last: None,
            })),
        }
    }

    /// Adds a node, which fetches into `arena` and serves from it. A node with the same address is removed, as
    /// if it had crashed.
    pub fn join(&self, address: &str, arena: Arc<Arena>, sink: EventSink) -> MemoryTransport {
        let counters = Arc::new(Counters::default());
        let mut outbox = Outbox::new();
        let mut state = self.lock();
        state.remove_node(address, &mut outbox);
        state.nodes.insert(address.to_owned(), Node { sink, counters: Arc::clone(&counters) });
        deliver(state, outbox);
        MemoryTransport { hub: self.clone(), address: address.to_owned(), arena, counters }
    }

    /// Moves one frame and delivers the resulting events; returns false when no frame can move.
    pub fn step(&self) -> bool {
        let mut outbox = Outbox::new();
        let mut state = self.lock();
        let moved = state.step(&mut outbox);
        deliver(state, outbox);
        moved
    }

    /// Steps until no frame can move; returns the number of steps.
    pub fn run(&self) -> u64 {
        let mut steps = 0;
        while self.step() {
            steps += 1;
        }
        steps
    }

    /// Returns the time since the creation of the hub at which the next deadline or stall timeout passes.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.lock().next_deadline()
    }

    /// Returns the time since the creation of the hub.
    pub fn now(&self) -> Duration {
        self.lock().now
    }

    /// Advances time: deadlines and stalls within it take effect, in order. No frame moves.
    pub fn advance(&self, by: Duration) {
        let until = self.now() + by;
        loop {
            let mut outbox = Outbox::new();
            let mut state = self.lock();
            let next = state.next_deadline().filter(|next| *next <= until);
            state.now = next.unwrap_or(until).max(state.now);
            state.pass_deadlines(&mut outbox);
            deliver(state, outbox);
            if next.is_none() {
                return;
            }
        }
    }

    /// Sets the fault of a channel, or (`None`) clears it.
    pub fn set_fault(&self, link: &Link, fault: Option<Fault>) {
        let mut outbox = Outbox::new();
        let mut state = self.lock();
        match fault {
            Some(fault) => state.faults.insert(link.clone(), fault),
            None => state.faults.remove(link),
        };
        match fault {
            Some(Fault::Cut) => state.end(link, &mut outbox),
            Some(Fault::Stall) => state.stall(link),
            Some(Fault::Corrupt) | None => state.unstall(link),
        }
        deliver(state, outbox);
    }

    fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a fetch or offer on the channel from a node to a peer.
    fn begin(
        &self,
        node: &MemoryTransport,
        peer: &str,
        begin: impl FnOnce(&mut Channel, Duration) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let mut state = self.lock();
        if !state.nodes.get(&node.address).is_some_and(|known| Arc::ptr_eq(&known.counters, &node.counters)) {
            return Err(TransportError::closed());
        }
        let (now, window) = (state.now, state.settings.credit_bytes);
        let link = Link { requester: node.address.clone(), server: peer.to_owned() };
        let stalled_since = (state.faults.get(&link) == Some(&Fault::Stall)).then_some(now);
        begin(state.channels.entry(link).or_insert_with(|| Channel::new(window, stalled_since)), now)
    }

    fn answer(&self, PeerOfferId(offer): PeerOfferId, taken: &[u32], retry_after: Duration) {
        let mut state = self.lock();
        let Some(link) = state.offer_routes.remove(&offer) else { return };
        let Some(channel) = state.channels.get_mut(&link) else { return };
        if let Err(error) = channel.outbound.answer(offer, taken, retry_after) {
            tracing::error!(offer, %error, "rejected an answer to an offer");
        }
    }

    fn serve(&self, ServeId(serve): ServeId, call: impl FnOnce(&mut Outbound) -> Result<(), InvalidCall>) {
        let mut state = self.lock();
        let Some(link) = state.routes.get(&serve).cloned() else { return };
        let Some(channel) = state.channels.get_mut(&link) else { return };
        if let Err(error) = call(&mut channel.outbound) {
            tracing::error!(serve, %error, "rejected a call to serve a block");
        }
    }
}

impl Transport for MemoryTransport {
    fn fetch(&self, peer: &str, request: FetchRequest<TenantName>) -> Result<(), TransportError> {
        let blocks = check_fetch(&request, &self.arena)?;
        let FetchRequest { tenant, layout, deadline, .. } = request;
        let fetch = NewFetch { layout, blocks };
        self.hub.begin(self, peer, |channel, now| channel.begin(now, fetch, (tenant, deadline)))?;
        add(&self.counters.fetches, 1);
        Ok(())
    }

    fn serve_header(&self, serve: ServeId, block: u32, tier: Tier, checksums: &[u32]) {
        self.hub.serve(serve, |outbound| outbound.header((serve.0, block), tier, checksums));
    }

    fn serve_objects(&self, objects: &ServeObjects) {
        let ServeObjects { serve, block, offset, last, .. } = *objects;
        let from = objects.source().and_then(|from| span(&self.arena, from).ok());
        self.hub.serve(serve, |outbound| outbound.objects((serve.0, block), from, (offset, last)));
    }

    fn serve_absent(&self, serve: ServeId, block: u32) {
        self.hub.serve(serve, |outbound| outbound.absent(serve.0, block));
    }

    fn offer(&self, peer: &str, offer: Offer<TenantName>) -> Result<(), TransportError> {
        check_offer(&offer)?;
        self.hub.begin(self, peer, |channel, now| channel.begin_offer(now, offer))?;
        add(&self.counters.offers, 1);
        Ok(())
    }

    fn answer_offer(&self, offer: PeerOfferId, taken: &[u32], retry_after: Duration) {
        self.hub.answer(offer, taken, retry_after);
    }

    fn stats(&self) -> TransportStats {
        self.counters.snapshot()
    }

    fn shutdown(&self) {
        let mut outbox = Outbox::new();
        let mut state = self.hub.lock();
        let ours =
            state.nodes.get(&self.address).is_some_and(|node| Arc::ptr_eq(&node.counters, &self.counters));
        if ours {
            state.remove_node(&self.address, &mut outbox);
        }
        deliver(state, outbox);
    }
}

impl Drop for MemoryTransport {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// Calls the sinks, which may call the hub.
fn deliver(state: MutexGuard<'_, HubState>, outbox: Outbox) {
    drop(state);
    for (sink, event) in outbox {
        sink(event);
    }
}

impl HubState {
    /// Moves a frame on the first channel with work after the last one that moved.
    fn step(&mut self, outbox: &mut Outbox) -> bool {
        let links: Vec<Link> = self.channels.keys().cloned().collect();
        let behind = self.last.as_ref().map_or(0, |last| links.partition_point(|link| link <= last));
        for link in links[behind..].iter().chain(&links[..behind]) {
            if self.step_channel(link, outbox) {
                self.last = Some(link.clone());
                return true;
            }
        }
        false
    }

    fn step_channel(&mut self, link: &Link, outbox: &mut Outbox) -> bool {
        let fault = self.faults.get(link).copied();
        let channel = self.channels.get_mut(link).expect("the caller listed it");
        if fault == Some(Fault::Stall) || !channel.has_work() {
            return false;
        }
        let (Some(requester), Some(server)) = (self.nodes.get(&link.requester), self.nodes.get(&link.server))
        else {
            self.end(link, outbox);
            return true;
        };
        if fault == Some(Fault::Cut) {
            self.end(link, outbox);
            return true;
        }
        let ends = Ends { requester: &requester.counters, server: &server.counters };
        let line = if fault == Some(Fault::Corrupt) { Line::Corrupting } else { Line::Clean };
        let delivered = channel.deliver(line, &ends);
        let (requester, server) = (requester.clone(), server.clone());
        self.apply(link, (&requester, &server), delivered, outbox);
        true
    }

    /// Converts the outcome of a step to events.
    fn apply(
        &mut self,
        link: &Link,
        (requester, server): (&Node, &Node),
        delivered: DeliveryOutcome,
        outbox: &mut Outbox,
    ) {
        match delivered {
            DeliveryOutcome::Nothing => {}
            DeliveryOutcome::Request { stream, body } => {
                let serve = self.next_serve;
                self.next_serve += 1;
                let channel = self.channels.get_mut(link).expect("a step does not remove it");
                let until = self.now + body.deadline + self.settings.stall_timeout;
                channel
                    .outbound
                    .open((serve, stream), &body, until)
                    .expect("a requester in memory respects the limits");
                self.routes.insert(serve, link.clone());
                add(&server.counters.requests, 1);
                let BlocksBody { layout, deadline, tenant, keys } = body;
                let request = PeerRequest { serve: ServeId(serve), tenant, layout, keys, deadline };
                let from = link.requester.clone();
                outbox.push((Arc::clone(&server.sink), TransportEvent::Request { from, request }));
            }
            DeliveryOutcome::Offer { stream, body } => {
                let offer = self.next_serve;
                self.next_serve += 1;
                let channel = self.channels.get_mut(link).expect("a step does not remove it");
                let until = self.now + body.deadline + self.settings.stall_timeout;
                let opened = channel.outbound.open_offer((offer, stream), &body, until);
                opened.expect("a requester in memory respects the limits");
                self.offer_routes.insert(offer, link.clone());
                add(&server.counters.offers_received, 1);
                let BlocksBody { layout, tenant, keys, .. } = body;
                let from = link.requester.clone();
                let offer = PeerOffer { offer: PeerOfferId(offer), from, tenant, layout, keys };
                outbox.push((Arc::clone(&server.sink), TransportEvent::Offer(offer)));
            }
            DeliveryOutcome::Served { done, ended } => {
                if ended {
                    self.routes.remove(&done.serve);
                }
                let event = PeerEvent::ServeDone { serve: ServeId(done.serve), block: done.block }.into();
                outbox.push((Arc::clone(&server.sink), event));
            }
            DeliveryOutcome::Aborted { serve } => self.abort(serve, server, outbox),
        }
        self.collect(link, requester, outbox);
    }

    fn abort(&mut self, serve: u64, server: &Node, outbox: &mut Outbox) {
        self.routes.remove(&serve);
        add(&server.counters.serves_aborted, 1);
        outbox.push((Arc::clone(&server.sink), PeerEvent::ServeAborted { serve: ServeId(serve) }.into()));
    }

    /// Takes a channel's events for its requester.
    fn collect(&mut self, link: &Link, requester: &Node, outbox: &mut Outbox) {
        if let Some(channel) = self.channels.get_mut(link) {
            outbox.extend(channel.take_events().map(|event| (Arc::clone(&requester.sink), event.into())));
        }
    }

    /// Breaks a channel: its fetches fail, its serves are aborted.
    fn end(&mut self, link: &Link, outbox: &mut Outbox) {
        let Some(mut channel) = self.channels.remove(link) else { return };
        self.offer_routes.retain(|_, of| of != link);
        if let Some(requester) = self.nodes.get(&link.requester) {
            channel.fail_all(&requester.counters);
            outbox.extend(channel.take_events().map(|event| (Arc::clone(&requester.sink), event.into())));
        }
        let open = channel.outbound.abort_all();
        drop(channel);
        self.abort_all(link, open, outbox);
    }

    /// Aborts serves that have no frame in flight.
    fn abort_all(&mut self, link: &Link, serves: Vec<u64>, outbox: &mut Outbox) {
        let server = self.nodes.get(&link.server).cloned();
        for serve in serves {
            match &server {
                Some(server) => self.abort(serve, server, outbox),
                None => drop(self.routes.remove(&serve)),
            }
        }
    }

    /// Removes a node and breaks its channels.
    fn remove_node(&mut self, address: &str, outbox: &mut Outbox) {
        let links: Vec<Link> = self
            .channels
            .keys()
            .filter(|link| link.requester == address || link.server == address)
            .cloned()
            .collect();
        for link in links {
            self.end(&link, outbox);
        }
        self.nodes.remove(address);
    }

    fn stall(&mut self, link: &Link) {
        let now = self.now;
        if let Some(channel) = self.channels.get_mut(link) {
            channel.stalled_since.get_or_insert(now);
        }
    }

    fn unstall(&mut self, link: &Link) {
        if let Some(channel) = self.channels.get_mut(link) {
            channel.stalled_since = None;
        }
    }

    fn next_deadline(&self) -> Option<Duration> {
        let timeout = self.settings.stall_timeout;
        self.channels.values().filter_map(|channel| channel.next_deadline(timeout)).min()
    }

    fn pass_deadlines(&mut self, outbox: &mut Outbox) {
        let links: Vec<Link> = self.channels.keys().cloned().collect();
        for link in links {
            let Some(requester) = self.nodes.get(&link.requester).cloned() else { continue };
            let channel =
                self.channels.get_mut(&link).expect("listed just now, and only this link's is removed");
            channel.pass_deadlines(self.now, &requester.counters);
            let lost = channel.is_lost(self.now, self.settings.stall_timeout);
            let expired = channel.expire_serves(self.now);
            self.collect(&link, &requester, outbox);
            self.abort_all(&link, expired, outbox);
            if lost {
                add(&requester.counters.stalls, 1);
                self.end(&link, outbox);
            }
        }
    }
}
