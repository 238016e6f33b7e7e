//! The framed TCP transport: blocking threads, bounded connections, no copies on the sending side.
//!
//! A connection serves one direction: who opened it fetches, who accepted it serves. Two threads a connection and
//! side; no thread ever works for two peers, so a slow peer delays nobody else.
//!
//! ```text
//! fetch ─► Outgoing ─ sending thread ──requests, credit──► reading thread ─► sink(Request)
//!             └─ receiving thread ◄── headers, payload ─── writing thread ◄─ serve_* (queue)
//!                  └► destination, sink(Layers, Failed)         └► sink(ServeDone, ServeAborted)
//! ```

mod close;
mod frames;
mod incoming;
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

use reprise_policy::Tier;
use reprise_policy::connection_table::{Admission, ConnectionId, ConnectionTable};

use crate::api::{EventSink, FetchRequest, OfferRequest, ServedObjects, Transport};
use crate::counters::{Counters, TransportStats, add};
use crate::error::TransportError;
use crate::outbound::{Misuse, Outbound};
use crate::wire::Hello;
use incoming::Incoming;
use listener::Listener;
use outgoing::Asked;
use pool::Pool;
use socket::Socket;
use threads::Threads;

pub(crate) use settings::name_congestion;
pub use settings::{Congestion, TcpSettings};

/// [`Transport`] over TCP.
pub struct TcpTransport {
    common: Arc<Common>,
    listener: Listener,
    local_address: SocketAddr,
}

/// A connection that is closed to make room ends within this time, or is not waited for.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// What all connections of a transport share.
struct Common {
    settings: TcpSettings,
    sink: EventSink,
    counters: Counters,
    threads: Threads,
    pool: Pool,
    closing: AtomicBool,
    next_serve: AtomicU64,
    /// Which connection an open incoming request is on.
    routes: Mutex<HashMap<u64, Arc<Incoming>>>,
    /// The same of incoming offers that were not answered.
    offer_routes: Mutex<HashMap<u64, Arc<Incoming>>>,
    /// Sockets of accepted connections, so that shutdown can end them.
    accepted: Mutex<Accepted>,
    /// An accepted connection has ended.
    accepted_ended: Condvar,
}

struct Accepted {
    table: ConnectionTable<Arc<Socket>>,
    sockets: HashMap<ConnectionId, Arc<Socket>>,
}

/// An accepted connection in [`Common::accepted`]; leaves it when dropped.
struct Registered {
    common: Arc<Common>,
    id: ConnectionId,
}

impl TcpTransport {
    /// Listens for peers. `sink` gets every event.
    ///
    /// # Errors
    /// `Invalid` names the setting to change; `Os` when the address cannot be listened on.
    pub fn bind(settings: TcpSettings, sink: EventSink) -> Result<TcpTransport, TransportError> {
        settings.validate()?;
        let table = ConnectionTable::new(settings.connections_max);
        let accepted = Mutex::new(Accepted { table, sockets: HashMap::new() });
        let common = Arc::new(Common {
            settings,
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

    /// Where peers connect to.
    pub fn local_address(&self) -> SocketAddr {
        self.local_address
    }

    fn serve(&self, serve: u64, call: impl FnOnce(&mut Outbound) -> Result<(), Misuse>) {
        let incoming = lock(&self.common.routes).get(&serve).cloned();
        if let Some(incoming) = incoming
            && let Err(misuse) = incoming.apply(call)
        {
            tracing::error!(serve, %misuse, "refused to serve a block");
        }
    }
}

impl Transport for TcpTransport {
    fn fetch(&self, peer: &str, request: FetchRequest) -> Result<(), TransportError> {
        request.check()?;
        self.common.pool.ask(&self.common, peer, Asked::Fetch(request))?;
        add(&self.common.counters.fetches, 1);
        Ok(())
    }

    fn serve_header(&self, serve: u64, block: u32, tier: Tier, checksums: &[u32]) {
        self.serve(serve, |outbound| outbound.header((serve, block), tier, checksums));
    }

    fn serve_objects(&self, objects: ServedObjects) {
        self.serve(objects.serve, |outbound| outbound.objects(objects));
    }

    fn serve_absent(&self, serve: u64, block: u32) {
        self.serve(serve, |outbound| outbound.absent(serve, block));
    }

    fn offer(&self, peer: &str, request: OfferRequest) -> Result<(), TransportError> {
        request.check()?;
        self.common.pool.ask(&self.common, peer, Asked::Offer(request))?;
        add(&self.common.counters.offers, 1);
        Ok(())
    }

    fn answer_offer(&self, offer: u64, taken: &[u32], retry_after: Duration) {
        let incoming = lock(&self.common.offer_routes).remove(&offer);
        if let Some(incoming) = incoming
            && let Err(misuse) = incoming.apply(|outbound| outbound.answer(offer, taken, retry_after))
        {
            tracing::error!(offer, %misuse, "refused to answer an offer");
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

    /// A number for a request that came on `incoming`.
    fn route(&self, incoming: &Arc<Incoming>) -> u64 {
        let serve = self.next_serve.fetch_add(1, Ordering::Relaxed);
        lock(&self.routes).insert(serve, Arc::clone(incoming));
        serve
    }

    /// A number for an offer that came on `incoming`.
    fn route_offer(&self, incoming: &Arc<Incoming>) -> u64 {
        let offer = self.next_serve.fetch_add(1, Ordering::Relaxed);
        lock(&self.offer_routes).insert(offer, Arc::clone(incoming));
        offer
    }

    /// The offers of a connection that has ended can be answered no more.
    fn unroute_offers(&self, incoming: &Arc<Incoming>) {
        lock(&self.offer_routes).retain(|_, of| !Arc::ptr_eq(of, incoming));
    }

    fn unroute(&self, serve: u64) {
        lock(&self.routes).remove(&serve);
    }

    /// Waits until connections that were closed to make room have ended: their threads free their descriptors.
    fn wait_for_closing(&self) {
        let accepted = lock(&self.accepted);
        let waits = |accepted: &mut Accepted| accepted.table.must_wait();
        // Without the time limit a thread that hangs would keep all peers out.
        drop(self.accepted_ended.wait_timeout_while(accepted, CLOSED_WITHIN, waits));
    }

    /// Enters an accepted connection, in place of the longest-idle one when there are too many; `None` when all of them
    /// have requests, or the transport shuts down.
    fn register_incoming(self: &Arc<Self>, socket: &Arc<Socket>) -> Option<Registered> {
        let mut accepted = lock(&self.accepted);
        // Read under the lock that `shutdown` takes afterwards: a socket is either refused or shut down.
        if self.is_closing() {
            return None;
        }
        let id = match accepted.table.admit(Arc::clone(socket)) {
            Admission::Admitted(id) => id,
            Admission::Replaced { id, closed } => {
                add(&self.counters.connections_evicted, 1);
                closed.shutdown();
                id
            }
            Admission::Full(_) => {
                add(&self.counters.connections_refused, 1);
                let limit = self.settings.connections_max;
                tracing::warn!(limit, "refused a peer connection: all connections have requests");
                return None;
            }
        };
        accepted.sockets.insert(id, Arc::clone(socket));
        Some(Registered { common: Arc::clone(self), id })
    }
}

impl Registered {
    /// The connection has a request: it stays.
    fn set_busy(&self) {
        lock(&self.common.accepted).table.set_busy(self.id);
    }

    /// The connection has no request, and may be closed for another one.
    fn set_idle(&self, socket: &Arc<Socket>) {
        lock(&self.common.accepted).table.set_known(self.id, Arc::clone(socket));
    }
}

impl Drop for Registered {
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
