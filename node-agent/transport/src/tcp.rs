//! The framed TCP transport: blocking threads, bounded connections, no copies on the sending side.
//!
//! A connection serves one direction: its opener fetches, its acceptor serves. Each side has two threads per
//! connection. No thread ever works for two peers, so a slow peer delays no other.
//!
//! ```text
//! fetch ─► Outgoing ─ sending thread ──requests, credit──► reading thread ─► sink(Request)
//!             └─ receiving thread ◄── headers, payload ─── writing thread ◄─ serve_* (queue)
//!                  └► destination, sink(Layers, Failed)         └► sink(ServeDone, ServeAborted)
//! ```

mod close;
mod frames;
mod handshake;
mod incoming;
mod kernel_tls;
mod listener;
mod outgoing;
mod pool;
mod receiver;
mod settings;
mod socket;
mod threads;
mod writer;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_buffers::Arena;
use reprise_identity::limits::{Client, share_of};
use reprise_identity::{Identity, Security};
use reprise_policy::connection_table::{Admission, Assignment, ConnectionId, ConnectionTable};
use reprise_policy::peer::{FetchRequest, Offer, PeerOfferId, ServeId, ServeObjects};
use reprise_policy::{TenantName, Tier};

use crate::api::{EventSink, Transport, check_fetch, check_offer, span};
use crate::counters::{Counters, TransportStats, add};
use crate::error::TransportError;
use crate::inbound::NewFetch;
use crate::outbound::{InvalidCall, Outbound};
use crate::wire::Hello;
use incoming::Incoming;
use listener::Listener;
use outgoing::OutgoingRequest;
use pool::Pool;
use socket::Socket;
use threads::Threads;

pub use kernel_tls::record_layer;
pub(crate) use settings::name_congestion;
pub use settings::{Congestion, TcpSettings};

/// A [`Transport`] over TCP. A peer is named `HOST:PORT`, or `NODE@HOST:PORT`: with TLS, it must then have the
/// certificate of that node's agent, and otherwise that of any agent.
pub struct TcpTransport {
    common: Arc<Common>,
    listener: Listener,
    local_address: SocketAddr,
}

/// Maximum time to wait for a connection that is closed to make room.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// State shared by all connections of a transport.
struct Common {
    settings: TcpSettings,
    arena: Arc<Arena>,
    sink: EventSink,
    counters: Counters,
    threads: Threads,
    pool: Pool,
    closing: AtomicBool,
    next_serve: AtomicU64,
    /// Connection of each open incoming request.
    routes: Mutex<HashMap<u64, Arc<Incoming>>>,
    /// Connection of each incoming offer that was not answered.
    offer_routes: Mutex<HashMap<u64, Arc<Incoming>>>,
    /// Sockets of accepted connections, so that shutdown can end them.
    accepted: Mutex<Accepted>,
    /// Notified when an accepted connection has ended.
    accepted_ended: Condvar,
}

struct Accepted {
    table: ConnectionTable<Arc<Socket>, Client>,
    sockets: HashMap<ConnectionId, Arc<Socket>>,
}

/// An accepted connection in [`Common::accepted`]; removed on drop.
struct AcceptedGuard {
    common: Arc<Common>,
    id: ConnectionId,
}

impl TcpTransport {
    /// Listens for peers. Fetched blocks are written to `arena`, and served ones are read from it. `sink`
    /// receives every event.
    ///
    /// # Errors
    /// `Invalid` names the setting to change; `Os` when it cannot listen on the address.
    pub fn bind(
        settings: TcpSettings,
        arena: Arc<Arena>,
        sink: EventSink,
    ) -> Result<TcpTransport, TransportError> {
        settings.validate()?;
        let share_max = match settings.security {
            // All clients look the same without certificates on loopback.
            Security::Plain => settings.connections_max,
            Security::Tls(_) => share_of(settings.connections_max),
        };
        let table = ConnectionTable::with_share(settings.connections_max, share_max);
        let accepted = Mutex::new(Accepted { table, sockets: HashMap::new() });
        let common = Arc::new(Common {
            settings,
            arena,
            sink,
            counters: Counters::default(),
            threads: Threads::default(),
            pool: Pool::default(),
            closing: AtomicBool::new(false),
            next_serve: AtomicU64::new(1),
            routes: Mutex::default(),
            offer_routes: Mutex::default(),
            accepted,
            accepted_ended: Condvar::new(),
        });
        let (listener, local_address) = Listener::start(&common)?;
        Ok(TcpTransport { common, listener, local_address })
    }

    /// Returns the address on which peers connect.
    pub fn local_address(&self) -> SocketAddr {
        self.local_address
    }

    fn serve(&self, ServeId(serve): ServeId, call: impl FnOnce(&mut Outbound) -> Result<(), InvalidCall>) {
        let incoming = lock(&self.common.routes).get(&serve).cloned();
        if let Some(incoming) = incoming
            && let Err(error) = incoming.apply(call)
        {
            tracing::error!(serve, %error, "rejected a call to serve a block");
        }
    }
}

impl Transport for TcpTransport {
    fn fetch(&self, peer: &str, request: FetchRequest<TenantName>) -> Result<(), TransportError> {
        let blocks = check_fetch(&request, &self.common.arena)?;
        let FetchRequest { tenant, layout, deadline, .. } = request;
        let request = OutgoingRequest::Fetch { fetch: NewFetch { layout, blocks }, tenant, deadline };
        self.common.pool.ask(&self.common, peer, request)?;
        add(&self.common.counters.fetches, 1);
        Ok(())
    }

    fn serve_header(&self, serve: ServeId, block: u32, tier: Tier, checksums: &[u32]) {
        self.serve(serve, |outbound| outbound.header((serve.0, block), tier, checksums));
    }

    fn serve_objects(&self, objects: &ServeObjects) {
        let ServeObjects { serve, block, offset, last, .. } = *objects;
        let from = objects.source().and_then(|from| span(&self.common.arena, from).ok());
        self.serve(serve, |outbound| outbound.objects((serve.0, block), from, (offset, last)));
    }

    fn serve_absent(&self, serve: ServeId, block: u32) {
        self.serve(serve, |outbound| outbound.absent(serve.0, block));
    }

    fn offer(&self, peer: &str, offer: Offer<TenantName>) -> Result<(), TransportError> {
        check_offer(&offer)?;
        self.common.pool.ask(&self.common, peer, OutgoingRequest::Offer(offer))?;
        add(&self.common.counters.offers, 1);
        Ok(())
    }

    fn answer_offer(&self, PeerOfferId(offer): PeerOfferId, taken: &[u32], retry_after: Duration) {
        let incoming = lock(&self.common.offer_routes).remove(&offer);
        if let Some(incoming) = incoming
            && let Err(error) = incoming.apply(|outbound| outbound.answer(offer, taken, retry_after))
        {
            tracing::error!(offer, %error, "rejected an answer to an offer");
        }
    }

    fn stats(&self) -> TransportStats {
        self.common.counters.snapshot()
    }

    fn shutdown(&self) {
        self.common.closing.store(true, Ordering::SeqCst);
        self.listener.stop();
        self.common.pool.close_all();
        for socket in lock(&self.common.accepted).sockets.values() {
            socket.shutdown();
        }
        self.common.threads.join_all();
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Common {
    fn hello(&self) -> Hello {
        Hello {
            node_name: self.settings.node_name.clone(),
            credit_bytes: self.settings.credit_bytes,
            stall_timeout: self.settings.stall_timeout,
        }
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Allocates a number for a request that arrived on `incoming`.
    fn route(&self, incoming: &Arc<Incoming>) -> u64 {
        let serve = self.next_serve.fetch_add(1, Ordering::Relaxed);
        lock(&self.routes).insert(serve, Arc::clone(incoming));
        serve
    }

    /// Allocates a number for an offer that arrived on `incoming`.
    fn route_offer(&self, incoming: &Arc<Incoming>) -> u64 {
        let offer = self.next_serve.fetch_add(1, Ordering::Relaxed);
        lock(&self.offer_routes).insert(offer, Arc::clone(incoming));
        offer
    }

    /// Removes the offers of a connection that has ended; they can no longer be answered.
    fn unroute_offers(&self, incoming: &Arc<Incoming>) {
        lock(&self.offer_routes).retain(|_, of| !Arc::ptr_eq(of, incoming));
    }

    fn unroute(&self, serve: u64) {
        lock(&self.routes).remove(&serve);
    }

    /// Waits until connections that were closed to make room have ended: their threads free their
    /// descriptors.
    fn wait_for_closing(&self) {
        let accepted = lock(&self.accepted);
        let waits = |accepted: &mut Accepted| accepted.table.must_wait();
        // Without the time limit a hanging thread would keep all peers out.
        drop(self.accepted_ended.wait_timeout_while(accepted, CLOSED_WITHIN, waits));
    }

    /// Registers an accepted connection of a client at `address`. When there are too many, of all clients or of this
    /// one, it replaces the connection that is idle for longest. `None` when all of them have requests, or the transport
    /// shuts down.
    fn register_incoming(
        self: &Arc<Self>,
        socket: &Arc<Socket>,
        address: SocketAddr,
    ) -> Option<AcceptedGuard> {
        let mut accepted = lock(&self.accepted);
        // Read under the lock that `shutdown` acquires afterwards: a socket is either rejected here or shut
        // down there.
        if self.is_closing() {
            return None;
        }
        // Without certificates, a connection never gets an identity and has no share.
        let client = match self.settings.security {
            Security::Plain => None,
            Security::Tls(_) => Some(Client::at(address.ip())),
        };
        let id = match accepted.table.admit_from(client, Arc::clone(socket)) {
            Admission::Admitted(id) => id,
            Admission::Replaced { id, closed } => {
                add(&self.counters.connections_evicted, 1);
                closed.shutdown();
                id
            }
            Admission::Full(_) => {
                add(&self.counters.connections_refused, 1);
                let limit = self.settings.connections_max;
                let client = address.ip();
                tracing::warn!(limit, %client, "peer connection rejected: all connections have requests");
                return None;
            }
        };
        accepted.sockets.insert(id, Arc::clone(socket));
        Some(AcceptedGuard { common: Arc::clone(self), id })
    }
}

impl AcceptedGuard {
    /// Counts the connection against the agent in its certificate. Returns an error if all connections of this agent have
    /// requests, or this one was closed to make room.
    fn set_identity(&self, identity: &Identity) -> Result<(), &'static str> {
        let assigned = lock(&self.common.accepted).table.assign(self.id, Client::Identity(identity.clone()));
        match assigned {
            Assignment::Assigned => Ok(()),
            Assignment::Replaced(closed) => {
                add(&self.common.counters.connections_evicted, 1);
                closed.shutdown();
                Ok(())
            }
            Assignment::Refused => {
                add(&self.common.counters.connections_refused, 1);
                tracing::warn!(client = %identity, "peer connection rejected: this agent uses its whole share");
                Err("this agent uses its whole share of the connections")
            }
        }
    }

    /// Marks the connection as having a request: it is not closed for another one.
    fn set_busy(&self) {
        lock(&self.common.accepted).table.set_busy(self.id);
    }

    /// Marks the connection as idle: it may be closed for another one.
    fn set_idle(&self, socket: &Arc<Socket>) {
        lock(&self.common.accepted).table.set_known(self.id, Arc::clone(socket));
    }
}

impl Drop for AcceptedGuard {
    fn drop(&mut self) {
        let mut accepted = lock(&self.common.accepted);
        accepted.table.remove(self.id);
        accepted.sockets.remove(&self.id);
        drop(accepted);
        self.common.accepted_ended.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
