//! Transports of one process that share a hub: for simulation and tests. No thread, no clock, no randomness: frames
//! move when somebody calls [`MemoryHub::step`], time passes when somebody calls [`MemoryHub::advance`], and the
//! same calls give the same events.
//!
//! It drives the same state machines as the TCP transport, over queues of frames instead of sockets, one channel
//! per pair of requester and server. Faults are switched per channel.
//!
//! Deliberately absent: bandwidth and latency; a simulator delays its calls of `step` as its network model says.

mod channel;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_policy::Tier;

use crate::api::{
    EventSink, FetchRequest, IncomingOffer, IncomingRequest, OfferRequest, ServedObjects, Transport,
    TransportEvent,
};
use crate::counters::{Counters, TransportStats, add};
use crate::error::TransportError;
use crate::outbound::{Misuse, Outbound};
use crate::wire::OfferBody;
use channel::{Channel, Delivered, Ends, Line};

/// How channels of a hub behave.
#[derive(Clone, Copy, Debug)]
pub struct MemorySettings {
    /// Payload bytes that one server may have in flight towards one requester.
    pub credit_bytes: u64,
    /// A channel that is stalled for this time is lost. A serve ends this long after its request's deadline.
    pub stall_timeout: Duration,
}

/// Who fetches from whom: addresses as given to [`MemoryHub::join`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    /// The node that fetches.
    pub requester: String,
    /// The node that serves.
    pub server: String,
}

/// What is wrong with a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Connections break and new ones are refused.
    Cut,
    /// Nothing moves; after the stall timeout the requester gives up.
    Stall,
    /// One bit of every data frame flips.
    Corrupt,
}

/// Joins the transports of one process. Clones are the same hub.
#[derive(Clone)]
pub struct MemoryHub {
    world: Arc<Mutex<World>>,
}

/// A node's [`Transport`] over a [`MemoryHub`].
pub struct MemoryTransport {
    hub: MemoryHub,
    address: String,
    counters: Arc<Counters>,
}

struct World {
    settings: MemorySettings,
    /// Since the hub was made.
    now: Duration,
    nodes: BTreeMap<String, Node>,
    channels: BTreeMap<Link, Channel>,
    faults: BTreeMap<Link, Fault>,
    routes: HashMap<u64, Link>,
    /// The same of offers that were not answered.
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

/// Events to deliver once the world is unlocked.
type Outbox = Vec<(EventSink, TransportEvent)>;

impl MemoryHub {
    /// A hub without nodes at time zero.
    pub fn new(settings: MemorySettings) -> MemoryHub {
        MemoryHub {
            world: Arc::new(Mutex::new(World {
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

    /// Adds a node; it replaces one of the same address, which is as if that had crashed.
    pub fn join(&self, address: &str, sink: EventSink) -> MemoryTransport {
        let counters = Arc::new(Counters::default());
        let mut outbox = Outbox::new();
        let mut world = self.lock();
        world.leave(address, &mut outbox);
        world.nodes.insert(address.to_owned(), Node { sink, counters: Arc::clone(&counters) });
        deliver(world, outbox);
        MemoryTransport { hub: self.clone(), address: address.to_owned(), counters }
    }

    /// Moves one frame and delivers the events that it causes; false when nothing can move.
    pub fn step(&self) -> bool {
        let mut outbox = Outbox::new();
        let mut world = self.lock();
        let moved = world.step(&mut outbox);
        deliver(world, outbox);
        moved
    }

    /// Steps until nothing can move; the number of steps.
    pub fn run(&self) -> u64 {
        let mut steps = 0;
        while self.step() {
            steps += 1;
        }
        steps
    }

    /// The instant, since the hub was made, at which a deadline or stall timeout passes next.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.lock().next_deadline()
    }

    /// Since the hub was made.
    pub fn now(&self) -> Duration {
        self.lock().now
    }

    /// Lets time pass: deadlines and stalls within it take effect, in order. No frame moves.
    pub fn advance(&self, by: Duration) {
        let until = self.now() + by;
        loop {
            let mut outbox = Outbox::new();
            let mut world = self.lock();
            let next = world.next_deadline().filter(|next| *next <= until);
            world.now = next.unwrap_or(until).max(world.now);
            world.pass_deadlines(&mut outbox);
            deliver(world, outbox);
            if next.is_none() {
                return;
            }
        }
    }

    /// Breaks a channel, or (`None`) mends it.
    pub fn set_fault(&self, link: &Link, fault: Option<Fault>) {
        let mut outbox = Outbox::new();
        let mut world = self.lock();
        match fault {
            Some(fault) => world.faults.insert(link.clone(), fault),
            None => world.faults.remove(link),
        };
        match fault {
            Some(Fault::Cut) => world.end(link, &mut outbox),
            Some(Fault::Stall) => world.stall(link),
            Some(Fault::Corrupt) | None => world.unstall(link),
        }
        deliver(world, outbox);
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins something on the channel from a node to a peer.
    fn begin(
        &self,
        node: &MemoryTransport,
        peer: &str,
        begin: impl FnOnce(&mut Channel, Duration) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let mut world = self.lock();
        if !world.nodes.get(&node.address).is_some_and(|known| Arc::ptr_eq(&known.counters, &node.counters)) {
            return Err(TransportError::closed());
        }
        let (now, window) = (world.now, world.settings.credit_bytes);
        let link = Link { requester: node.address.clone(), server: peer.to_owned() };
        let stalled_since = (world.faults.get(&link) == Some(&Fault::Stall)).then_some(now);
        begin(world.channels.entry(link).or_insert_with(|| Channel::new(window, stalled_since)), now)
    }

    fn answer(&self, offer: u64, taken: &[u32], retry_after: Duration) {
        let mut world = self.lock();
        let Some(link) = world.offer_routes.remove(&offer) else { return };
        let Some(channel) = world.channels.get_mut(&link) else { return };
        if let Err(misuse) = channel.outbound.answer(offer, taken, retry_after) {
            tracing::error!(offer, %misuse, "refused to answer an offer");
        }
    }

    fn serve(&self, serve: u64, call: impl FnOnce(&mut Outbound) -> Result<(), Misuse>) {
        let mut world = self.lock();
        let Some(link) = world.routes.get(&serve).cloned() else { return };
        let Some(channel) = world.channels.get_mut(&link) else { return };
        if let Err(misuse) = call(&mut channel.outbound) {
            tracing::error!(serve, %misuse, "refused to serve a block");
        }
    }
}

impl Transport for MemoryTransport {
    fn fetch(&self, peer: &str, request: FetchRequest) -> Result<(), TransportError> {
        request.check()?;
        self.hub.begin(self, peer, |channel, now| channel.begin(now, request))?;
        add(&self.counters.fetches, 1);
        Ok(())
    }

    fn serve_header(&self, serve: u64, block: u32, tier: Tier, checksums: &[u32]) {
        self.hub.serve(serve, |outbound| outbound.header((serve, block), tier, checksums));
    }

    fn serve_objects(&self, objects: ServedObjects) {
        self.hub.serve(objects.serve, |outbound| outbound.objects(objects));
    }

    fn serve_absent(&self, serve: u64, block: u32) {
        self.hub.serve(serve, |outbound| outbound.absent(serve, block));
    }

    fn offer(&self, peer: &str, request: OfferRequest) -> Result<(), TransportError> {
        request.check()?;
        self.hub.begin(self, peer, |channel, now| channel.begin_offer(now, request))?;
        add(&self.counters.offers, 1);
        Ok(())
    }

    fn answer_offer(&self, offer: u64, taken: &[u32], retry_after: Duration) {
        self.hub.answer(offer, taken, retry_after);
    }

    fn stats(&self) -> TransportStats {
        self.counters.snapshot()
    }

    fn shutdown(&self) {
        let mut outbox = Outbox::new();
        let mut world = self.hub.lock();
        let ours =
            world.nodes.get(&self.address).is_some_and(|node| Arc::ptr_eq(&node.counters, &self.counters));
        if ours {
            world.leave(&self.address, &mut outbox);
        }
        deliver(world, outbox);
    }
}

impl Drop for MemoryTransport {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// Calls the sinks, which may call the hub.
fn deliver(world: MutexGuard<'_, World>, outbox: Outbox) {
    drop(world);
    for (sink, event) in outbox {
        sink(event);
    }
}

impl World {
    /// Moves a frame on the first channel behind the last one that has something to move.
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

    /// Turns what a step did into events.
    fn apply(
        &mut self,
        link: &Link,
        (requester, server): (&Node, &Node),
        delivered: Delivered,
        outbox: &mut Outbox,
    ) {
        match delivered {
            Delivered::Nothing => {}
            Delivered::Request { stream, body } => {
                let serve = self.next_serve;
                self.next_serve += 1;
                let channel = self.channels.get_mut(link).expect("a step does not remove it");
                let until = self.now + body.deadline + self.settings.stall_timeout;
                channel
                    .outbound
                    .open((serve, stream), &body, until)
                    .expect("a requester in memory keeps the limits");
                self.routes.insert(serve, link.clone());
                add(&server.counters.requests, 1);
                let request =
                    IncomingRequest { serve, keys: body.keys, layout: body.layout, deadline: body.deadline };
                outbox.push((Arc::clone(&server.sink), TransportEvent::Request(request)));
            }
            Delivered::Offer { stream, body } => {
                let offer = self.next_serve;
                self.next_serve += 1;
                let channel = self.channels.get_mut(link).expect("a step does not remove it");
                let until = self.now + body.deadline + self.settings.stall_timeout;
                let opened = channel.outbound.open_offer((offer, stream), &body, until);
                opened.expect("a requester in memory keeps the limits");
                self.offer_routes.insert(offer, link.clone());
                add(&server.counters.offers_received, 1);
                let OfferBody { layout, deadline, tenant, keys } = body;
                let from = link.requester.clone();
                let incoming = IncomingOffer { offer, from, tenant, layout, keys, deadline };
                outbox.push((Arc::clone(&server.sink), TransportEvent::Offer(incoming)));
            }
            Delivered::Served { done, ended } => {
                if ended {
                    self.routes.remove(&done.serve);
                }
                let event = TransportEvent::ServeDone { serve: done.serve, block: done.block };
                outbox.push((Arc::clone(&server.sink), event));
            }
            Delivered::Aborted { serve } => self.abort(serve, server, outbox),
        }
        self.collect(link, requester, outbox);
    }

    fn abort(&mut self, serve: u64, server: &Node, outbox: &mut Outbox) {
        self.routes.remove(&serve);
        add(&server.counters.serves_aborted, 1);
        outbox.push((Arc::clone(&server.sink), TransportEvent::ServeAborted { serve }));
    }

    /// Takes a channel's events for its requester.
    fn collect(&mut self, link: &Link, requester: &Node, outbox: &mut Outbox) {
        if let Some(channel) = self.channels.get_mut(link) {
            outbox.extend(channel.take_events().map(|event| (Arc::clone(&requester.sink), event)));
        }
    }

    /// Breaks a channel: its fetches fail, its serves are aborted.
    fn end(&mut self, link: &Link, outbox: &mut Outbox) {
        let Some(mut channel) = self.channels.remove(link) else { return };
        self.offer_routes.retain(|_, of| of != link);
        if let Some(requester) = self.nodes.get(&link.requester) {
            channel.fail_all(&requester.counters);
            outbox.extend(channel.take_events().map(|event| (Arc::clone(&requester.sink), event)));
        }
        let open = channel.outbound.abort_all();
        drop(channel);
        self.abort_all(link, open, outbox);
    }

    /// Aborts serves of which nothing is on its way any more.
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
    fn leave(&mut self, address: &str, outbox: &mut Outbox) {
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
