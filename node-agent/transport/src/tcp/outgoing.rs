//! A connection that this node opened to fetch from a peer: the state shared by its two threads and `fetch`,
//! and the thread that sends requests and checks deadlines.
//!
//! * `fetch` puts the request into the shared state and wakes the sending thread; it never waits.
//! * The *receiving* thread ([`super::receiver`]) connects, greets, receives. Only this thread writes into
//!   destinations and reports events of fetches, so their order needs no lock.
//! * The *sending* thread sends requests, cancellations and credit, and handles timeouts: deadlines (it puts
//!   the fetch on the expired list and wakes the receiving thread), stalls and idleness (it closes the
//!   connection).
//!
//! ```text
//! Connecting ──greeted──► Open ──idle, stall, error, shutdown──► Closed (fetches fail, `begin` fails)
//!      └────────────────── error, stall, shutdown ─────────────────┘
//! ```

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use reprise_buffers::Gather;
use reprise_identity::Security;
use reprise_identity::limits::{Validity, VerifiedIdentity};
use reprise_policy::TenantName;
use reprise_policy::peer::Offer;

use super::Common;
use super::close::Close;
use super::settings::TcpSettings;
use super::socket::{PendingSend, SendProgress, Socket, Wake};
use crate::counters::add;
use crate::error::TransportError;
use crate::inbound::{EndedStreams, NewFetch, NewOffer, NewStream};
use crate::limits::{
    BLOCKS_PER_CONNECTION_MAX, CREDIT_PARTS, REQUEST_DEADLINE_MAX, REQUESTS_PER_CONNECTION_MAX,
};
use crate::wire::{BlocksBody, FrameHeader, Kind};

/// Value of `progress` while the receiving thread does not wait for the peer.
const SUSPENDED: u64 = u64::MAX;

/// Interval of deadline checks while a send waits for its socket: it covers fetches that begin meanwhile.
const DEADLINES_EVERY: Duration = Duration::from_millis(20);

/// One connection to a peer.
pub(super) struct Outgoing {
    /// Address of the peer, as [`TcpTransport`](super::TcpTransport) describes it.
    pub(super) peer: String,
    pub(super) common: Arc<Common>,
    /// Wakes the receiving thread.
    pub(super) wake: Arc<Wake>,
    /// Set when [`Outgoing::take_commands`] has a command; the receiving thread checks it even while data
    /// flows.
    has_command: AtomicBool,
    state: Mutex<State>,
    /// Wakes the sending thread.
    changed: Condvar,
    /// Time at which the receiving thread last received a byte, in nanoseconds since `born`, or
    /// [`SUSPENDED`].
    progress: AtomicU64,
    born: Instant,
    /// Age from which on the connection takes no new request.
    age_max: Duration,
    /// The same, by the certificate of the peer.
    peer_age_max: OnceLock<Duration>,
}

/// A fetch or an offer.
pub(super) enum OutgoingRequest {
    Fetch { fetch: NewFetch, tenant: TenantName, deadline: Duration },
    Offer(Offer<TenantName>),
}

/// Reason for which [`Outgoing::begin`] did not accept a request.
pub(super) enum BeginError {
    /// The connection is closed; contains the request, for another connection.
    Closed(OutgoingRequest),
    /// A limit is reached.
    Busy(TransportError),
}

/// Commands for the receiving thread.
pub(super) struct ReceiverCommands {
    /// Fetches whose deadline has passed.
    pub(super) expired: Vec<u64>,
    /// Reason to end the connection.
    pub(super) close: Option<Close>,
}

struct State {
    closing: Option<Closing>,
    /// `Some` once both sides have greeted.
    socket: Option<Arc<Socket>>,
    next_stream: u64,
    /// Fetches and offers that the receiving thread has not taken over yet.
    inbox: Vec<(u64, NewStream)>,
    sends: VecDeque<Send>,
    /// Consumed payload bytes whose credit was not returned.
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
    Local(&'static str),
    Stalled,
    /// Requests cannot be sent.
    Broken(io::ErrorKind),
    /// The receiving thread has ended: new requests fail.
    Finished,
}

enum Send {
    /// A request or an offer. The time that its body states is computed when it is sent.
    Blocks {
        kind: Kind,
        stream: u64,
        deadline: Instant,
        body: BlocksBody,
    },
    Cancel {
        stream: u64,
    },
}

impl Send {
    /// Reports whether the frame starts a stream on the peer.
    fn begins(&self, stream: u64) -> bool {
        match self {
            Send::Blocks { stream: queued, .. } => *queued == stream,
            Send::Cancel { .. } => false,
        }
    }
}

impl OutgoingRequest {
    /// Number of blocks that it counts as.
    fn blocks(&self) -> usize {
        match self {
            OutgoingRequest::Fetch { fetch, .. } => fetch.blocks.len(),
            OutgoingRequest::Offer(_) => 1,
        }
    }

    fn deadline(&self) -> Duration {
        match self {
            OutgoingRequest::Fetch { deadline, .. } => *deadline,
            OutgoingRequest::Offer(offer) => offer.deadline,
        }
    }

    /// Splits the request into the frame to send and the stream that waits for the answer.
    fn split(self, stream: u64, deadline: Instant) -> (Send, NewStream) {
        match self {
            OutgoingRequest::Fetch { fetch, tenant, deadline: limit } => {
                let keys = fetch.blocks.iter().map(|block| block.key).collect();
                let body = BlocksBody { layout: fetch.layout, deadline: limit, tenant, keys };
                (Send::Blocks { kind: Kind::Request, stream, deadline, body }, NewStream::Fetch(fetch))
            }
            OutgoingRequest::Offer(Offer { offer, layout, tenant, keys, deadline: limit }) => {
                let begun = NewStream::Offer(NewOffer { offer, keys: keys.len() });
                let body = BlocksBody { layout, deadline: limit, tenant, keys };
                (Send::Blocks { kind: Kind::Offer, stream, deadline, body }, begun)
            }
        }
    }
}

/// Age from which on a connection that opens now takes no new request, by the certificate of this process. The peer
/// closes it later.
fn own_age_max(settings: &TcpSettings) -> Duration {
    match &settings.security {
        Security::Plain => settings.age_max,
        Security::Tls(tls) => {
            let own = Validity::from(&*tls.credentials());
            settings.age_max.min(own.replaced_after())
        }
    }
}

/// Next action of the sending thread.
enum Work {
    Send { socket: Arc<Socket>, frames: Vec<u8> },
    End,
}

impl Outgoing {
    /// Creates a connection without threads.
    pub(super) fn new(peer: &str, common: &Arc<Common>) -> Result<Arc<Outgoing>, TransportError> {
        let wake =
            Wake::new().map_err(|error| TransportError::os("cannot create a wake-up descriptor", error))?;
        let now = Instant::now();
        Ok(Arc::new(Outgoing {
            peer: peer.to_owned(),
            common: Arc::clone(common),
            wake: Arc::new(wake),
            has_command: AtomicBool::new(false),
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
            age_max: own_age_max(&common.settings),
            peer_age_max: OnceLock::new(),
        }))
    }

    /// `host:port` of the peer.
    pub(super) fn address(&self) -> &str {
        self.peer.split_once('@').map_or(&self.peer, |(_, address)| address)
    }

    /// Node whose agent the peer must be, if it is known.
    pub(super) fn node(&self) -> Option<&str> {
        self.peer.split_once('@').map(|(node, _)| node)
    }

    /// Reports whether the connection takes no new request.
    pub(super) fn is_old(&self) -> bool {
        let age_max = self.peer_age_max.get().map_or(self.age_max, |by_peer| self.age_max.min(*by_peer));
        self.born.elapsed() >= age_max
    }

    /// Limits the age by the certificate of the peer, after its handshake.
    pub(super) fn limit_age(&self, peer: Option<&VerifiedIdentity>) {
        if let Some(peer) = peer {
            // A connection has one handshake.
            let _ = self.peer_age_max.set(peer.validity.replaced_after());
        }
    }

    /// Accepts a request or offer, unless the connection is closed or full.
    pub(super) fn begin(&self, request: OutgoingRequest) -> Result<(), BeginError> {
        let now = Instant::now();
        let mut state = self.lock();
        if state.closing.is_some() {
            return Err(BeginError::Closed(request));
        }
        if state.deadline_of.len() >= REQUESTS_PER_CONNECTION_MAX
            || state.open_blocks + request.blocks() > BLOCKS_PER_CONNECTION_MAX
        {
            return Err(BeginError::Busy(TransportError::busy(
                "too many requests or blocks in flight to this peer",
            )));
        }
        if state.deadline_of.is_empty() {
            state.since = now;
        }
        let stream = state.next_stream;
        state.next_stream += 1;
        let deadline = now + request.deadline().min(REQUEST_DEADLINE_MAX);
        tracing::trace!(stream, blocks = request.blocks(), peer = self.peer, "request accepted");
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

    /// Number of unfinished blocks on the connection; an offer counts as one.
    pub(super) fn open_blocks(&self) -> usize {
        self.lock().open_blocks
    }

    /// Ends the connection; its fetches fail.
    pub(super) fn close(&self, reason: &'static str) {
        self.close_as(Closing::Local(reason));
    }

    /// Publishes the socket of a connection after the greetings.
    pub(super) fn opened(&self, socket: &Arc<Socket>) {
        self.lock().socket = Some(Arc::clone(socket));
        self.changed.notify_one();
    }

    /// Records that the receiving thread has received data.
    pub(super) fn note_progress(&self) {
        let nanos =
            u64::try_from(self.born.elapsed().as_nanos()).expect("500 years fit 64 bits of nanoseconds");
        self.progress.store(nanos, Ordering::Relaxed);
    }

    /// Stops the stall clock while the receiving thread delivers events: that may wait for the core, which is
    /// not a stall of the peer. Ends with the next [`Outgoing::note_progress`].
    pub(super) fn suspend_stall_clock(&self) {
        self.progress.store(SUSPENDED, Ordering::Relaxed);
    }

    /// Returns credit for consumed payload to the sender.
    pub(super) fn give_credit(&self, bytes: u64) {
        self.lock().credit += bytes;
        self.changed.notify_one();
    }

    /// Number of consumed bytes after which credit is returned.
    pub(super) fn credit_portion(&self) -> u64 {
        (self.common.settings.credit_bytes / CREDIT_PARTS).max(1)
    }

    /// Takes the fetches and offers that have begun since the last call.
    pub(super) fn take_inbox(&self) -> Vec<(u64, NewStream)> {
        std::mem::take(&mut self.lock().inbox)
    }

    /// Reports whether there are commands.
    pub(super) fn has_commands(&self) -> bool {
        self.has_command.load(Ordering::Relaxed)
    }

    /// Takes the commands of the sending thread and `close`.
    pub(super) fn take_commands(&self) -> ReceiverCommands {
        let mut state = self.lock();
        // Commands are set under the lock, so none is missed.
        self.has_command.store(false, Ordering::Relaxed);
        let close = match state.closing {
            Some(Closing::Local(reason)) => Some(Close::Local(reason)),
            Some(Closing::Stalled) => Some(Close::Stalled("the peer owes an answer and sends nothing")),
            Some(Closing::Broken(kind)) => Some(Close::Io(kind.into())),
            Some(Closing::Finished) | None => None,
        };
        ReceiverCommands { expired: std::mem::take(&mut state.expired), close }
    }

    /// Subtracts ended fetches and blocks from the limits.
    pub(super) fn account(&self, ended: &EndedStreams) {
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

    /// Marks the receiving thread as ended: `begin` then fails. Returns the requests that were still waiting.
    pub(super) fn finish_receiving(&self) -> Vec<(u64, NewStream)> {
        let mut state = self.lock();
        state.closing = Some(Closing::Finished);
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

    /// Sends frames, and checks deadlines meanwhile.
    fn send(&self, socket: &Socket, frames: &[u8]) -> io::Result<()> {
        let mut gather = Gather::with_capacity(1);
        gather.bytes(frames);
        let mut sending = PendingSend::new(gather);
        loop {
            let now = Instant::now();
            self.expire(&mut self.lock(), now);
            if socket.send(&mut sending, Some(now + DEADLINES_EVERY))? == SendProgress::All {
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
            // The end of the last fetch wakes no thread, so idleness is noticed up to a stall timeout late.
            let (limit, closing) = if state.deadline_of.is_empty() {
                (state.since + self.common.settings.idle_timeout, Closing::Local("idle"))
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

    /// Time at which the peer last made progress, or began to owe some.
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
            self.notify_receiver();
        }
    }

    /// Notifies the receiving thread of commands; the caller holds the lock of the state.
    fn notify_receiver(&self) {
        self.has_command.store(true, Ordering::Relaxed);
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

    /// Makes both threads return from their waits.
    fn end_io(&self, state: &State) {
        if let Some(socket) = &state.socket {
            socket.shutdown();
        }
        self.notify_receiver();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Encodes all frames that wait to be sent: at most 256 requests of 128 KiB.
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
            Send::Blocks { kind, stream, deadline, body } => {
                let deadline = deadline.saturating_duration_since(now);
                let body = BlocksBody { deadline, ..body }.encode();
                frames.extend_from_slice(&FrameHeader::with_body(kind, stream, 0, &body).encode());
                frames.extend_from_slice(&body);
            }
        }
    }
    frames
}
