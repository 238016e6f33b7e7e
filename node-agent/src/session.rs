//! Sessions of engines over the unix socket.
//!
//! ```text
//!   accept ──► handshake ──► reader thread ── Input::Request ──► core thread
//!                  │                                                 │ replies, notices
//!                  └────────► writer thread ◄── queue ◄── Outbound ◄─┘ (straight to the socket when it can)
//! ```
//!
//! A reader blocks while the core's inbox is full: that is the back-pressure an engine feels. The core never
//! blocks on a session: what the socket does not take at once goes to a bounded queue, and a session whose
//! queue overflows or does not drain is closed. The end of a session is one event, sent after its last request.
//!
//! Deliberately absent: decisions about blocks (the core), authentication beyond the peer's user id and, in a cluster, its token ([`identity`]).

mod decode;
#[cfg(test)]
mod document;
mod encode;
mod frame;
mod handshake;
mod identity;
mod listener;
mod outbound;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use reprise_agent_core::agent::limits;
use reprise_agent_core::effect::{Reply, Ticket};
use reprise_agent_core::event::{self, Event, RequestId};
use reprise_buffers::{Arena, PROGRESS_BLOCKS_MAX, PROGRESS_ENTRIES};
use reprise_daemon::rejected::{Listener, Reason, RejectedConnections};
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{BlockKey, SessionId, TenantName};
use reprise_proto::local;

use crate::core_loop::{Inbox, Input, Request};
use decode::Decoded;
use frame::{FrameError, FrameReader};
use outbound::{Outbound, Outgoing};

pub(crate) use identity::Identity;
pub(crate) use listener::{SessionServer, SessionServerSettings};

/// Sessions at the same time: 8 GPUs × 32 processes of engines, tools and tests. Two threads each.
pub(crate) const SESSIONS_MAX: usize = 256;

// The core has room for all sessions and for those of which it has not heard that they ended.
const _: () = assert!(2 * SESSIONS_MAX <= limits::SESSIONS_MAX);

// The core gives loads the entries and bits that a progress page has.
const _: () = assert!(PROGRESS_ENTRIES as usize == limits::PROGRESS_ENTRIES);
const _: () = assert!(PROGRESS_BLOCKS_MAX == limits::LOAD_BLOCKS_MAX);

/// Requests of one session that have not been answered yet. Loads wait for I/O, everything else is
/// answered at once; an engine has at most a few dozen loads under way.
pub(crate) const REQUESTS_IN_FLIGHT_MAX: usize = 1024;

/// The core's end of a session.
pub(crate) struct Session {
    id: SessionId,
    peer: Peer,
    outbound: Outbound,
    in_flight: AtomicUsize,
    /// Blocks of one load at the most: its answer must fit a frame.
    load_blocks_max: usize,
}

/// Who is at the other end.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// As it named itself.
    pub(crate) client_name: String,
    /// Whose session it says it is.
    pub(crate) tenant: TenantName,
    /// Process id at the time of connecting.
    pub(crate) pid: i32,
    /// User id at the time of connecting.
    pub(crate) uid: u32,
}

/// What all sessions share.
pub(crate) struct SessionContext {
    pub(crate) inbox: Inbox,
    pub(crate) arena: Arc<Arena>,
    pub(crate) node: String,
    /// Whether sessions are whom they name; `None`: they are believed.
    pub(crate) identity: Option<Identity>,
    /// Who is who; in each greeting's hands for an instant.
    pub(crate) tenants: Arc<Mutex<TenantRegistry>>,
    /// Set while the agent is about to stop: requests are refused, notices still go out.
    pub(crate) draining: AtomicBool,
    /// Counts of connections that become no session.
    pub(crate) rejected: RejectedConnections,
}

impl SessionContext {
    /// Counts a connection that becomes no session.
    fn count_rejected(&self, reason: Reason) {
        self.rejected.count(Listener::Sessions, reason);
    }
}

impl Session {
    /// The session's id.
    pub(crate) fn id(&self) -> SessionId {
        self.id
    }

    /// Who is at the other end.
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Requests that have not been answered yet.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Answers a request; never blocks. A session that cannot take it is closed.
    pub(crate) fn reply(&self, request: RequestId, reply: Reply) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.outbound.send(Outgoing::Reply { request, reply });
    }

    /// Tells the engine what became of a commit; never blocks.
    pub(crate) fn durable(&self, ticket: Ticket, durable: u32, lost: &[BlockKey]) {
        let notice = encode::durable(ticket, durable, lost);
        self.outbound.send(Outgoing::Frame(notice));
    }

    /// Ends the session at once; its reader reports that.
    pub(crate) fn close(&self) {
        self.outbound.close();
    }

    fn refuse(&self, id: u64, kind: local::FailureKind, message: &str) {
        self.outbound.send(Outgoing::Frame(encode::failure(id, kind, message)));
    }
}

/// Reads requests until the session ends; then says so to the core.
fn read_requests(context: &SessionContext, session: &Session, frames: &mut FrameReader) {
    loop {
        match frames.next_frame() {
            Ok(Some(frame)) => match decode::request(frame) {
                Ok(decoded) => {
                    if !take_request(context, session, decoded) {
                        break;
                    }
                }
                Err(message) => {
                    tracing::warn!(session = session.id.0, %message, "session closed: unreadable request");
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
                tracing::debug!(session = session.id.0, %error, "session's socket failed");
                break;
            }
        }
    }
    let closed = Event::SessionClosed { session: session.id };
    // A stopped core has forgotten the session already.
    let _ = context.inbox.send(Input::Event(closed));
}

/// Hands one request to the core; false when the core has stopped.
fn take_request(context: &SessionContext, session: &Session, decoded: Decoded) -> bool {
    match decoded {
        Decoded::Refused { id, message } => {
            session.refuse(id, local::FailureKind::BadRequest, &message);
            true
        }
        Decoded::Request { id, body: _ } if context.draining.load(Ordering::Relaxed) => {
            session.refuse(
                id.0,
                local::FailureKind::Busy,
                "the agent is stopping; connect again when it is back",
            );
            true
        }
        Decoded::Request { id, body: event::Request::Load(load) }
            if load.keys.len() > session.load_blocks_max =>
        {
            let message = format!(
                "load: the answer for {} blocks of this layout exceeds a frame; load at most {} at a time",
                load.keys.len(),
                session.load_blocks_max
            );
            session.refuse(id.0, local::FailureKind::BadRequest, &message);
            true
        }
        Decoded::Request { id, body } => {
            // What gives something back is never refused: it would stay taken.
            let frees = matches!(body, event::Request::Abort { .. } | event::Request::Release { .. });
            if session.in_flight.fetch_add(1, Ordering::Relaxed) >= REQUESTS_IN_FLIGHT_MAX && !frees {
                session.in_flight.fetch_sub(1, Ordering::Relaxed);
                let message =
                    format!("{REQUESTS_IN_FLIGHT_MAX} requests of this session await their answer already");
                session.refuse(id.0, local::FailureKind::Busy, &message);
                return true;
            }
            let received = Instant::now();
            let request = Request { session: session.id, request: id, body, received };
            context.inbox.send(Input::Request(request)).is_ok()
        }
    }
}
