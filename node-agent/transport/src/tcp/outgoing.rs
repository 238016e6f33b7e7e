//! A connection that this node opened to fetch from a peer: what its two threads and `fetch` share, and the
//! thread that sends requests and keeps time.
//!
//! * `fetch` puts the request into the shared state and wakes the sending thread; it never waits.
//! * The *receiving* thread ([`super::receiver`]) connects, greets, receives. It alone writes into destinations and
//!   it alone reports events of fetches, so their order needs no lock.
//! * The *sending* thread sends requests, cancellations and credit, and watches the clock: deadlines (the fetch is
//!   put on the expired list and the receiving thread woken), stalls and idleness (the connection is closed).
//!
//! ```text
//! Connecting ──greeted──► Open ──idle, stall, error, shutdown──► Closed (fetches fail, `begin` refuses)
//!      └────────────────── error, stall, shutdown ─────────────────┘
//! ```

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_buffers::Gather;
use reprise_policy::{BlockKey, Layout, TenantName};

use super::Common;
use super::close::Close;
use super::socket::{Sending, Sent, Socket, Wake};
use crate::api::{FetchRequest, OfferRequest};
use crate::counters::add;
use crate::error::TransportError;
use crate::inbound::{Begun, Ended, NewFetch, NewOffer};
use crate::limits::{
    BLOCKS_PER_CONNECTION_MAX, CREDIT_PARTS, REQUEST_DEADLINE_MAX, REQUESTS_PER_CONNECTION_MAX,
};
use crate::wire::{FrameHeader, Kind, OfferBody, RequestBody};

/// Progress while the receiving thread is not waiting for the peer.
const SUSPENDED: u64 = u64::MAX;

/// While a send waits for its socket, deadlines are looked at this often: fetches that begin meanwhile have theirs.
const DEADLINES_EVERY: Duration = Duration::from_millis(20);

/// One connection to a peer.
pub(super) struct Outgoing {
    pub(super) peer: String,
    pub(super) common: Arc<Common>,
    /// Wakes the receiving thread.
    pub(super) wake: Arc<Wake>,
    /// There is something for the receiving thread in [`Outgoing::take_orders`]: it looks even while data flows.
    ordered: AtomicBool,
    state: Mutex<State>,
    /// Wakes the sending thread.
    changed: Condvar,
    /// When the receiving thread last received a byte, in nanoseconds since `born`, or [`SUSPENDED`].
    progress: AtomicU64,
    born: Instant,
}

/// What a peer is asked.
pub(super) enum Asked {
    Fetch(FetchRequest),
    Offer(OfferRequest),
}

/// Why [`Outgoing::begin`] did not take a request.
pub(super) enum Refused {
    /// The connection is closed; here is the request for another one.
    Closed(Asked),
    /// A limit is reached.
    Busy(TransportError),
}

/// What the receiving thread finds when it was woken.
pub(super) struct Orders {
    /// Fetches whose deadline has passed.
    pub(super) expired: Vec<u64>,
    /// End the connection.
    pub(super) close: Option<Close>,
}

struct State {
    closing: Option<Closing>,
    /// There once both sides have greeted.
    socket: Option<Arc<Socket>>,
    next_stream: u64,
    /// Fetches and offers that the receiving thread has not taken over yet.
    inbox: Vec<(u64, Begun)>,
    sends: VecDeque<Send>,
    /// Consumed payload bytes to give back.
    credit: u64,
    deadlines: BTreeSet<(Instant, u64)>,
    deadline_of: HashMap<u64, Instant>,
    expired: Vec<u64>,
    open_blocks: usize,
    /// Since when the connection owes an answer, or since when it owes none.
    since: Instant,
}

#[derive(Clone, Copy)]
enum Closing {
    Ours(&'static str),
    Stalled,
    /// Requests cannot be sent.
    Broken(io::ErrorKind),
    /// The receiving thread has ended: nothing is taken any more.
    Over,
}

enum Send {
    Request { stream: u64, layout: Layout, deadline: Instant, keys: Vec<BlockKey> },
    Offer { stream: u64, layout: Layout, deadline: Instant, tenant: TenantName, keys: Vec<BlockKey> },
    Cancel { stream: u64 },
}

impl Send {
    /// Whether the peer learns of a stream by it.
    fn begins(&self, stream: u64) -> bool {
        match self {
            Send::Request { stream: queued, .. } | Send::Offer { stream: queued, .. } => *queued == stream,
            Send::Cancel { .. } => false,
        }
    }
}

impl Asked {
    /// Blocks that it counts as.
    fn blocks(&self) -> usize {
        match self {
            Asked::Fetch(request) => request.blocks.len(),
            Asked::Offer(_) => 1,
        }
    }

    fn deadline(&self) -> Duration {
        match self {
            Asked::Fetch(request) => request.deadline,
            Asked::Offer(request) => request.deadline,
        }
    }

    /// What is sent, and what is waited for.
    fn split(self, stream: u64, deadline: Instant) -> (Send, Begun) {
        match self {
            Asked::Fetch(FetchRequest { layout, blocks, .. }) => {
                let keys = blocks.iter().map(|block| block.key).collect();
                let send = Send::Request { stream, layout, deadline, keys };
                (send, Begun::Fetch(NewFetch { layout, blocks }))
            }
            Asked::Offer(OfferRequest { offer, layout, tenant, keys, .. }) => {
                let begun = Begun::Offer(NewOffer { offer, keys: keys.len() });
                (Send::Offer { stream, layout, deadline, tenant, keys }, begun)
            }
        }
    }
}

/// What the sending thread does next.
enum Work {
    Send { socket: Arc<Socket>, frames: Vec<u8> },
    End,
}

impl Outgoing {
    /// A connection without threads yet.
    pub(super) fn new(peer: &str, common: &Arc<Common>) -> Result<Arc<Outgoing>, TransportError> {
        let wake =
            Wake::new().map_err(|error| TransportError::os("cannot make a wake-up descriptor", error))?;
        let now = Instant::now();
        Ok(Arc::new(Outgoing {
            peer: peer.to_owned(),
            common: Arc::clone(common),
            wake: Arc::new(wake),
            ordered: AtomicBool::new(false),
            state: Mutex::new(State {
                closing: None,
                socket: None,
                next_stream: 1,
                inbox: Vec::new(),
                sends: VecDeque::new(),
                credit: 0,
                deadlines: BTreeSet::new(),
                deadline_of: HashMap::new(),
                expired: Vec::new(),
                open_blocks: 0,
                since: now,
            }),
            changed: Condvar::new(),
            progress: AtomicU64::new(0),
            born: now,
        }))
    }

    /// Takes a request or offer, unless the connection is closed or full.
    pub(super) fn begin(&self, request: Asked) -> Result<(), Refused> {
        let now = Instant::now();
        let mut state = self.lock();
        if state.closing.is_some() {
            return Err(Refused::Closed(request));
        }
        if state.deadline_of.len() >= REQUESTS_PER_CONNECTION_MAX
            || state.open_blocks + request.blocks() > BLOCKS_PER_CONNECTION_MAX
        {
            return Err(Refused::Busy(TransportError::busy(
                "too many requests or blocks in flight to this peer",
            )));
        }
        if state.deadline_of.is_empty() {
            state.since = now;
        }
        let stream = state.next_stream;
        state.next_stream += 1;
        let deadline = now + request.deadline().min(REQUEST_DEADLINE_MAX);
        tracing::trace!(stream, blocks = request.blocks(), peer = self.peer, "a request begins");
        state.deadlines.insert((deadline, stream));
        state.deadline_of.insert(stream, deadline);
        state.open_blocks += request.blocks();
        let (send, begun) = request.split(stream, deadline);
        state.sends.push_back(send);
        state.inbox.push((stream, begun));
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Unfinished blocks on the connection; an offer counts as one.
    pub(super) fn open_blocks(&self) -> usize {
        self.lock().open_blocks
    }

    /// Ends the connection; its fetches fail.
    pub(super) fn close(&self, reason: &'static str) {
        self.close_as(Closing::Ours(reason));
    }

    /// The receiving thread has a greeted connection.
    pub(super) fn opened(&self, socket: &Arc<Socket>) {
        self.lock().socket = Some(Arc::clone(socket));
        self.changed.notify_one();
    }

    /// The receiving thread has received something.
    pub(super) fn note_progress(&self) {
        let nanos =
            u64::try_from(self.born.elapsed().as_nanos()).expect("500 years fit 64 bits of nanoseconds");
        self.progress.store(nanos, Ordering::Relaxed);
    }

    /// The receiving thread hands events over, which may wait for the core: that is no stall of the peer. Ends with
    /// the next [`Outgoing::note_progress`].
    pub(super) fn suspend_stall_clock(&self) {
        self.progress.store(SUSPENDED, Ordering::Relaxed);
    }

    /// Payload was consumed: its sender may send as much again.
    pub(super) fn give_credit(&self, bytes: u64) {
        self.lock().credit += bytes;
        self.changed.notify_one();
    }

    /// Credit is given back in portions of this many bytes.
    pub(super) fn credit_portion(&self) -> u64 {
        (self.common.settings.credit_bytes / CREDIT_PARTS).max(1)
    }

    /// Fetches and offers that have begun since the last call.
    pub(super) fn take_inbox(&self) -> Vec<(u64, Begun)> {
        std::mem::take(&mut self.lock().inbox)
    }

    /// Whether there are orders to take.
    pub(super) fn has_orders(&self) -> bool {
        self.ordered.load(Ordering::Relaxed)
    }

    /// What the sending thread or `close` want of the receiving thread.
    pub(super) fn take_orders(&self) -> Orders {
        let mut state = self.lock();
        // Orders are given under the lock, so none is missed.
        self.ordered.store(false, Ordering::Relaxed);
        let close = match state.closing {
            Some(Closing::Ours(reason)) => Some(Close::Ours(reason)),
            Some(Closing::Stalled) => Some(Close::Stalled("it owes an answer and sends nothing")),
            Some(Closing::Broken(kind)) => Some(Close::Io(kind.into())),
            Some(Closing::Over) | None => None,
        };
        Orders { expired: std::mem::take(&mut state.expired), close }
    }

    /// Fetches and blocks have come to their end.
    pub(super) fn account(&self, ended: &Ended) {
        let mut state = self.lock();
        state.open_blocks -= ended.blocks;
        for stream in &ended.streams {
            if let Some(deadline) = state.deadline_of.remove(stream) {
                state.deadlines.remove(&(deadline, *stream));
            }
        }
        if !ended.streams.is_empty() && state.deadline_of.is_empty() {
            state.since = Instant::now();
        }
    }

    /// The receiving thread ends: no request is taken from here on. Returns those that were still waiting.
    pub(super) fn over(&self) -> Vec<(u64, Begun)> {
        let mut state = self.lock();
        state.closing = Some(Closing::Over);
        state.sends.clear();
        if let Some(socket) = state.socket.take() {
            socket.shutdown();
        }
        let inbox = std::mem::take(&mut state.inbox);
        drop(state);
        self.changed.notify_one();
        inbox
    }

    /// Body of the sending thread.
    pub(super) fn run_sender(&self) {
        while let Work::Send { socket, frames } = self.next_work() {
            if let Err(error) = self.send(&socket, &frames) {
                self.close_as(match error.kind() {
                    io::ErrorKind::TimedOut => Closing::Stalled,
                    kind => Closing::Broken(kind),
                });
            }
        }
    }

    /// Sends, and keeps the deadlines meanwhile.
    fn send(&self, socket: &Socket, frames: &[u8]) -> io::Result<()> {
        let mut gather = Gather::with_capacity(1);
        gather.bytes(frames);
        let mut sending = Sending::new(gather);
        loop {
            let now = Instant::now();
            self.expire(&mut self.lock(), now);
            if socket.send(&mut sending, Some(now + DEADLINES_EVERY))? == Sent::All {
                return Ok(());
            }
        }
    }

    fn next_work(&self) -> Work {
        let mut state = self.lock();
        loop {
            if state.closing.is_some() {
                return Work::End;
            }
            let now = Instant::now();
            self.expire(&mut state, now);
            // The end of the last fetch wakes nobody, so idleness is noticed up to a stall timeout late.
            let (limit, closing) = if state.deadline_of.is_empty() {
                (state.since + self.common.settings.idle_timeout, Closing::Ours("idle"))
            } else {
                (self.last_progress(&state, now) + self.common.settings.stall_timeout, Closing::Stalled)
            };
            if now >= limit {
                state.closing = Some(closing);
                self.end_io(&state);
                return Work::End;
            }
            let has_work = !state.sends.is_empty() || state.credit > 0;
            if let Some(socket) = state.socket.clone().filter(|_| has_work) {
                return Work::Send { socket, frames: take_frames(&mut state, now) };
            }
            let next = state.deadlines.first().map_or(limit, |(deadline, _)| limit.min(*deadline));
            let timeout = next.saturating_duration_since(now);
            state = self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// When the peer last made progress, or began to owe some.
    fn last_progress(&self, state: &State, now: Instant) -> Instant {
        match self.progress.load(Ordering::Relaxed) {
            SUSPENDED => now,
            nanos => state.since.max(self.born + Duration::from_nanos(nanos)),
        }
    }

    /// Puts fetches whose deadline has passed on the expired list.
    fn expire(&self, state: &mut State, now: Instant) {
        let mut any = false;
        while let Some((deadline, stream)) = state.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            any = true;
            state.deadlines.remove(&(deadline, stream));
            state.expired.push(stream);
            add(&self.common.counters.deadlines_passed, 1);
            let queued = state.sends.iter().position(|send| send.begins(stream));
            match queued {
                Some(index) => drop(state.sends.remove(index)),
                None => state.sends.push_back(Send::Cancel { stream }),
            }
        }
        if any {
            self.order();
        }
    }

    /// Tells the receiving thread that there are orders; with the state locked.
    fn order(&self) {
        self.ordered.store(true, Ordering::Relaxed);
        self.wake.wake();
    }

    fn close_as(&self, closing: Closing) {
        let mut state = self.lock();
        if state.closing.is_none() {
            state.closing = Some(closing);
            self.end_io(&state);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Makes both threads return from whatever they wait for.
    fn end_io(&self, state: &State) {
        if let Some(socket) = &state.socket {
            socket.shutdown();
        }
        self.order();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Encodes everything that waits to be sent. At most 256 requests of 128 KiB.
fn take_frames(state: &mut State, now: Instant) -> Vec<u8> {
    let mut frames = Vec::new();
    if state.credit > 0 {
        frames.extend_from_slice(&FrameHeader::bare(Kind::Credit, state.credit, 0).encode());
        state.credit = 0;
    }
    for send in state.sends.drain(..) {
        match send {
            Send::Cancel { stream } => {
                frames.extend_from_slice(&FrameHeader::bare(Kind::Cancel, stream, 0).encode());
            }
            Send::Offer { stream, layout, deadline, tenant, keys } => {
                let deadline = deadline.saturating_duration_since(now);
                let body = OfferBody { layout, deadline, tenant, keys }.encode();
                frames.extend_from_slice(&FrameHeader::with_body(Kind::Offer, stream, 0, &body).encode());
                frames.extend_from_slice(&body);
            }
            Send::Request { stream, layout, deadline, keys } => {
                let deadline = deadline.saturating_duration_since(now);
                let body = RequestBody { layout, deadline, keys }.encode();
                frames.extend_from_slice(&FrameHeader::with_body(Kind::Request, stream, 0, &body).encode());
                frames.extend_from_slice(&body);
            }
        }
    }
    frames
}
