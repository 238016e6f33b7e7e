//! Sessions of engines over the unix socket.
//!
//! ```text
//!   accept ──► handshake ──► reader thread ── Input::Request ──► core thread
//!                  │                                                 │ replies, notices
//!                  └────────► writer thread ◄── queue ◄── Outbound ◄─┘ (directly to the socket if possible)
//! ```
//!
//! A reader blocks while the core's inbox is full, which creates back-pressure for the engine. The core
//! never blocks on a session: data that the socket does not accept immediately goes to a bounded queue. A
//! session whose queue overflows or does not drain is closed. The end of a session is one event, sent after
//! its last request.
//!
//! A further thread of a session with queue pairs makes its calls about them ([`queue_calls`]).
//!
//! Out of scope: decisions about blocks (the core's task). Clients are authenticated only by their user id
//! and, in a cluster, their token ([`identity`]).

mod backend;
mod decode;
#[cfg(test)]
mod document;
mod encode;
mod frame;
#[cfg(test)]
mod fuzz;
mod handshake;
mod identity;
mod listener;
mod manage;
mod outbound;
mod queue_calls;
mod salts;
mod users;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use reprise_agent_core::effect::{DeviceId, PlaceKind, Reply, Ticket};
use reprise_agent_core::event::{self, Event, LoadRequest, PublicKeys, RequestId};
use reprise_agent_core::limits;
use reprise_buffers::{Arena, PROGRESS_BLOCKS_MAX, PROGRESS_ENTRIES};
use reprise_daemon::rejected_connections::{Listener, Reason, RejectedConnections};
use reprise_policy::session::{LayerReport, TransferBackend};
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{
    BlockKey, DevicePlace, KeyInputs, Layout, NamespaceDigest, SessionId, TenantId, TenantName, TenantSalt,
};
use reprise_proto::local;

use crate::core_loop::{Inbox, Input, Request};
use crate::encryption::EncryptionKeys;
use crate::metrics::{BlockCount, BlockPath, Direction};
use crate::public_tenant::PublicTenant;
use crate::queue_grants::QueueGrantService;
use crate::recorder::{Caller, Recorder};
use crate::slack::{ActiveProfiles, SlackReports};
use backend::StatedBackend;
use decode::DecodeResult;
use frame::{FrameError, FrameReader};
use outbound::{Outbound, Outgoing};
use queue_calls::QueueCalls;

pub(crate) use frame::{DESCRIPTORS_PER_PART, DESCRIPTORS_WAITING_MAX};
pub(crate) use identity::{Identity, Review};
pub(crate) use listener::{SessionServer, SessionServerSettings, own_uid};
pub(crate) use queue_calls::CALLS_WAITING_MAX;
pub(crate) use salts::TenantSalts;
pub(crate) use users::{Ids, TenantUsers};

/// Maximum number of sessions: 8 GPUs × 32 processes of engines, tools and tests. Each has two threads,
/// or three with queue pairs.
pub(crate) const SESSIONS_MAX: usize = 256;

// The core has room for all sessions, and for as many whose end it has not processed yet.
const _: () = assert!(2 * SESSIONS_MAX <= limits::SESSIONS_MAX);

// The core assigns loads the entries and bits of a progress page.
const _: () = assert!(PROGRESS_ENTRIES as usize == limits::PROGRESS_ENTRIES);
const _: () = assert!(PROGRESS_BLOCKS_MAX == limits::LOAD_BLOCKS_MAX);

/// Maximum number of pending requests of a session. Loads wait for I/O, other requests are answered
/// immediately; an engine has at most a few dozen loads in flight.
pub(crate) const REQUESTS_IN_FLIGHT_MAX: usize = 1024;

/// Answer to requests during shutdown.
const STOPPING: &str = "the agent is stopping; reconnect when it is available again";

/// Answer to requests of an encrypted tenant for extents or queue pairs.
const NO_EXTENTS: &str = "blocks of this tenant are encrypted on devices, so clients cannot read or write them there: use \
                          the arena, or a tenant without encryption";

/// The core's end of a session.
pub(crate) struct Session {
    id: SessionId,
    /// Its number in the core.
    tenant: TenantId,
    peer: Peer,
    outbound: Outbound,
    in_flight: AtomicUsize,
    /// A controller may still run its commands: no further request is read, since it could free their extents.
    is_fenced: AtomicBool,
    /// Maximum number of blocks of a load, so that its reply fits into a frame.
    load_blocks_max: usize,
    layout: Layout,
    /// Namespace from its greeting, without the tenant's salt.
    namespace: NamespaceDigest,
    /// Tenant whose blocks it may copy.
    public: Option<PublicSalt>,
    backend: StatedBackend,
}

/// The public tenant for sessions of other tenants. They never get its salt.
struct PublicSalt {
    tenant: TenantId,
    salt: TenantSalt,
}

/// Properties of a client.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// Name from its greeting.
    pub(crate) client_name: String,
    /// Tenant from its greeting.
    pub(crate) tenant: TenantName,
    /// Process id when it connected.
    pub(crate) pid: i32,
    /// User and group when it connected.
    pub(crate) ids: Ids,
    /// Place of the GPU that its greeting states.
    pub(crate) gpu: Option<DevicePlace>,
    /// Layout from its greeting.
    pub(crate) layout: Option<Layout>,
}

/// State shared by all sessions.
pub(crate) struct SessionContext {
    pub(crate) inbox: Inbox,
    pub(crate) arena: Arc<Arena>,
    pub(crate) node: String,
    /// Root of the file system whose `/sys` has the places of GPUs.
    pub(crate) root: PathBuf,
    /// Verifies tenants of sessions; `None`: tenants are not verified.
    pub(crate) identity: Option<Identity>,
    /// Users and groups of tenants.
    pub(crate) users: TenantUsers,
    /// Isolation salts, which sessions receive.
    pub(crate) salts: TenantSalts,
    /// Encryption keys of tenants.
    pub(crate) keys: EncryptionKeys,
    /// Tenant whose blocks all tenants may copy.
    pub(crate) public_tenant: PublicTenant,
    /// Names and numbers of tenants; locked briefly by each greeting.
    pub(crate) tenants: Arc<Mutex<TenantRegistry>>,
    /// Set during shutdown: requests are rejected, notices are still sent.
    pub(crate) draining: AtomicBool,
    /// Counters of rejected connections.
    pub(crate) rejected: RejectedConnections,
    /// Slack profiles, and what engines report about their layers.
    pub(crate) slack: ActiveProfiles,
    pub(crate) queue_grants: Arc<QueueGrantService>,
    pub(crate) recorder: Arc<Recorder>,
}

impl SessionContext {
    /// Counts a rejected connection.
    fn count_rejected(&self, reason: Reason) {
        self.rejected.count(Listener::Sessions, reason);
    }
}

impl Session {
    /// Returns the id of the session.
    pub(crate) fn id(&self) -> SessionId {
        self.id
    }

    /// Returns the properties of the client.
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns the namespace from the greeting, without the tenant's salt.
    pub(crate) fn stated_namespace(&self) -> NamespaceDigest {
        self.namespace
    }

    /// Adds the keys of the same blocks of the public tenant. The core checks whether the tenant still is public.
    fn add_public_keys(&self, body: &mut event::Request, inputs: Option<KeyInputs>) {
        let Some((PublicSalt { tenant, salt }, inputs)) = self.public.as_ref().zip(inputs) else {
            return;
        };
        let (event::Request::Match { public, .. } | event::Request::Load(LoadRequest { public, .. })) = body
        else {
            return;
        };
        *public = Some(PublicKeys { tenant: *tenant, keys: inputs.keys(&self.namespace, salt) });
    }

    /// Returns the number of pending requests.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the backend that the session states; the arena without a statement.
    pub(crate) fn backend(&self) -> BlockPath {
        self.backend.get().map_or(BlockPath::Arena, BlockPath::Backend)
    }

    /// Returns which blocks a reply to this session confirms as stored, or makes readable.
    pub(crate) fn moved_blocks(&self, reply: &Reply) -> Option<(BlockPath, Direction, BlockCount)> {
        let (path, direction, blocks) = backend::moved_blocks(self.backend.get(), reply)?;
        Some((
            path,
            direction,
            BlockCount { blocks, bytes: blocks.saturating_mul(self.layout.block_bytes()) },
        ))
    }

    /// Sends a reply, with descriptors of devices that the session does not have; never blocks. A session that
    /// cannot accept it is closed.
    pub(crate) fn reply(&self, request: RequestId, reply: Reply, devices: Vec<(DeviceId, Option<OwnedFd>)>) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.outbound.send(Outgoing::Reply { request, reply, devices });
    }

    /// Notifies the engine about the durability of a commit; never blocks.
    pub(crate) fn durable(&self, ticket: Ticket, durable: u32, lost: &[BlockKey]) {
        let notice = encode::durable(ticket, durable, lost);
        self.outbound.send(Outgoing::Frame(notice));
    }

    /// Closes the session immediately; its reader reports the end.
    pub(crate) fn close(&self) {
        self.outbound.close();
    }

    /// Reports to the client why its session ends, and reads no further request.
    pub(crate) fn end(&self, message: &str) {
        self.fence();
        self.refuse(0, local::FailureKind::BadRequest, message);
        self.outbound.close_when_sent();
    }

    /// Reads no further request of the session.
    fn fence(&self) {
        self.is_fenced.store(true, Ordering::Release);
    }

    fn is_fenced(&self) -> bool {
        self.is_fenced.load(Ordering::Acquire)
    }

    fn refuse(&self, id: u64, kind: local::FailureKind, message: &str) {
        self.outbound.send(Outgoing::Frame(encode::failure(id, kind, message)));
    }
}

/// Reads requests until the session ends, then reports the end to the core.
fn read_requests(context: &SessionContext, session: &Arc<Session>, frames: &mut FrameReader) {
    std::thread::scope(|scope| {
        let queues = QueueCalls::new(scope, context, session);
        read_until_end(context, session, frames, queues);
    });
    context.slack.session_closed(session.id);
    // First, so that no command of its queue pairs runs when the core frees its extents.
    context.queue_grants.close_session(session.id);
    let closed = Event::SessionClosed { session: session.id };
    // Fails only if the core has stopped.
    let _ = context.inbox.send(Input::Event(closed));
}

/// Reads requests until the session ends.
fn read_until_end(
    context: &SessionContext,
    session: &Session,
    frames: &mut FrameReader,
    mut queues: QueueCalls<'_, '_>,
) {
    let mut slack_reports = SlackReports::default();
    loop {
        match frames.next_frame() {
            Ok(Some(_)) if session.is_fenced() => break,
            Ok(Some(frame)) => match decode::request(frame) {
                Ok(DecodeResult::Queues { id, call }) => queues.make(frames, id, call),
                Ok(DecodeResult::Layer { id, report }) => {
                    if !report_layer(context, session, &mut slack_reports, (id, &report)) {
                        break;
                    }
                }
                Ok(DecodeResult::Backend { id, backend }) => use_backend(session, id, backend),
                Ok(decoded) => {
                    if !queues.submit(decoded) {
                        break;
                    }
                }
                Err(message) => {
                    tracing::warn!(session = session.id.0, %message, "session closed: invalid request");
                    session.refuse(0, local::FailureKind::BadRequest, &message);
                    session.outbound.close_when_sent();
                    break;
                }
            },
            Ok(None) => break,
            Err(FrameError::TooLong(bytes)) => {
                let message =
                    format!("a frame of {bytes} bytes exceeds the limit of {}", local::FRAME_BYTES_MAX);
                tracing::warn!(session = session.id.0, %message, "session closed");
                session.refuse(0, local::FailureKind::BadRequest, &message);
                session.outbound.close_when_sent();
                break;
            }
            Err(FrameError::Io(error)) => {
                tracing::debug!(session = session.id.0, %error, "the socket of a session failed");
                break;
            }
        }
    }
}

/// Whether a request lets the client read or write a device itself.
fn uses_extents(body: &event::Request) -> bool {
    use event::Request::{Pin, Reserve};
    matches!(body, Pin { .. } | Reserve { kind: PlaceKind::Extent, .. })
}

fn frees_resources(body: &event::Request) -> bool {
    use event::Request::{Abort, Release, Unpin};
    matches!(body, Abort { .. } | Release { .. } | Unpin { .. })
}

/// Records the backend that a session states.
fn use_backend(session: &Session, id: u64, backend: TransferBackend) {
    if session.backend.get() != Some(backend) {
        tracing::info!(session = session.id.0, client = session.peer.client_name, %backend, "session uses a backend");
    }
    session.backend.set(backend);
    session.outbound.send(Outgoing::Frame(encode::backend_used(id)));
}

/// Answers a report about the engine's computation, and passes the slack for writes to the core; returns false if the
/// core has stopped.
fn report_layer(
    context: &SessionContext,
    session: &Session,
    reports: &mut SlackReports,
    (id, report): (u64, &LayerReport),
) -> bool {
    let preferred = context.queue_grants.slack_profile(session.id);
    let reported = context.slack.report(session.id, report, preferred.as_deref());
    session.outbound.send(Outgoing::Frame(encode::layer(id, reported.guidance)));
    if !reports.is_news(reported.slack, Instant::now()) {
        return true;
    }
    let event = Event::LayerReported { session: session.id, slack: reported.slack };
    context.inbox.send(Input::Event(event)).is_ok()
}

/// Passes a request to the core; returns false if the core has stopped.
fn submit_request(context: &SessionContext, session: &Session, decoded: DecodeResult) -> bool {
    match decoded {
        DecodeResult::Queues { .. } | DecodeResult::Layer { .. } | DecodeResult::Backend { .. } => {
            unreachable!("the reader answers these calls")
        }
        DecodeResult::Rejection { id, message } => {
            session.refuse(id, local::FailureKind::BadRequest, &message);
            true
        }
        DecodeResult::Request { id, .. } if context.draining.load(Ordering::Relaxed) => {
            session.refuse(id.0, local::FailureKind::Busy, STOPPING);
            true
        }
        DecodeResult::Request { id, body, .. }
            if uses_extents(&body) && context.keys.of(&session.peer.tenant).is_some() =>
        {
            session.refuse(id.0, local::FailureKind::BadRequest, NO_EXTENTS);
            true
        }
        DecodeResult::Request { id, body: event::Request::Load(load), .. }
            if load.keys.len() > session.load_blocks_max =>
        {
            let message = format!(
                "load: the reply for {} blocks of this layout exceeds a frame; load at most {} at once",
                load.keys.len(),
                session.load_blocks_max
            );
            session.refuse(id.0, local::FailureKind::BadRequest, &message);
            true
        }
        DecodeResult::Request { id, mut body, inputs } => {
            session.add_public_keys(&mut body, inputs);
            // Requests that release resources are never rejected, as the resources would stay in use.
            let frees = frees_resources(&body);
            if session.in_flight.fetch_add(1, Ordering::Relaxed) >= REQUESTS_IN_FLIGHT_MAX && !frees {
                session.in_flight.fetch_sub(1, Ordering::Relaxed);
                let message = format!("this session already has {REQUESTS_IN_FLIGHT_MAX} requests in flight");
                session.refuse(id.0, local::FailureKind::Busy, &message);
                return true;
            }
            let caller =
                Caller { session: session.id, tenant: &session.peer.tenant, layout: &session.layout };
            context.recorder.note(caller, &body);
            let received = Instant::now();
            let request = Request { session: session.id, request: id, body, received };
            context.inbox.send(Input::Request(request)).is_ok()
        }
    }
}
