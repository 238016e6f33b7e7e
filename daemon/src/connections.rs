//! Connection limit of a listener, shared by its accept loop and its connections.
//!
//! The policy is that of [`ConnectionTable`]: a full listener closes its longest-idle connection for a new
//! one, and rejects the new one only if all are busy. A connection learns from its [`Permit`] that it must
//! close.
//!
//! A limit with shares counts each connection against the address of its client, and against the client's identity once
//! it has shown one: no client takes the connections of others.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_identity::limits::{Client, share_of};
use reprise_identity::{Identity, Security};
use reprise_policy::connection_table::{Admission, Assignment, ConnectionId, ConnectionTable};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::{sleep, timeout};

use crate::rejected_connections::{Listener, Reason, RejectedConnections};

/// Pause after a failed accept. Usually the process is out of descriptors, and the connection stays in the
/// queue.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Maximum wait for a connection that is being closed to make room.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// Connection limit of one listener. Clones share it.
#[derive(Clone, Debug)]
pub struct ConnectionLimit {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    listener: Listener,
    rejected: RejectedConnections,
    table: Mutex<ConnectionTable<Arc<Notify>, Client>>,
    /// Whether clients have shares: connections of all clients look the same without certificates on loopback.
    shared_out: bool,
    /// Notified when a connection has ended.
    ended: Notify,
}

/// Permission for one connection; released on drop.
#[derive(Debug)]
pub struct Permit {
    limit: ConnectionLimit,
    id: ConnectionId,
    close: Arc<Notify>,
}

impl ConnectionLimit {
    /// Creates a limit of `connections_max` connections.
    pub fn new(listener: Listener, connections_max: usize, rejected: RejectedConnections) -> ConnectionLimit {
        let table = Mutex::new(ConnectionTable::with_share(connections_max, connections_max));
        let (ended, shared_out) = (Notify::new(), false);
        ConnectionLimit { shared: Arc::new(Shared { listener, rejected, table, shared_out, ended }) }
    }

    /// Creates a limit of `connections_max` connections, of which one client has at most a share with certificates.
    /// Without them, all clients look the same on loopback.
    pub fn of(
        security: &Security,
        listener: Listener,
        connections_max: usize,
        rejected: RejectedConnections,
    ) -> ConnectionLimit {
        match security {
            Security::Plain => ConnectionLimit::new(listener, connections_max, rejected),
            Security::Tls(_) => {
                let shares = (connections_max, share_of(connections_max));
                ConnectionLimit::with_share(listener, shares, rejected)
            }
        }
    }

    /// Creates a limit of `connections_max` connections, of which one client has at most `share_max`.
    pub fn with_share(
        listener: Listener,
        (connections_max, share_max): (usize, usize),
        rejected: RejectedConnections,
    ) -> ConnectionLimit {
        let table = Mutex::new(ConnectionTable::with_share(connections_max, share_max));
        let (ended, shared_out) = (Notify::new(), true);
        ConnectionLimit { shared: Arc::new(Shared { listener, rejected, table, shared_out, ended }) }
    }

    /// Accepts the next admitted connection. Rejected connections are closed; errors are logged and retried.
    pub async fn accept(&self, listener: &TcpListener) -> (TcpStream, Permit) {
        loop {
            self.wait_for_closing().await;
            let (stream, client) = match listener.accept().await {
                Ok((stream, client)) => (stream, client),
                // The client closed it before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    self.count(Reason::System);
                    let listener = self.shared.listener.as_str();
                    tracing::warn!(listener, %error, "cannot accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let address = self.shared.shared_out.then(|| Client::at(client.ip()));
            if let Some(permit) = self.admit_from(address) {
                return (stream, permit);
            }
        }
    }

    /// Waits for connections that are being closed to make room, usually until their tasks have run.
    async fn wait_for_closing(&self) {
        let all_ended = async {
            while self.table().must_wait() {
                self.shared.ended.notified().await;
            }
        };
        // After the timeout they still count against the limit, but no longer delay the listener.
        let _ = timeout(CLOSED_WITHIN, all_ended).await;
    }

    /// Admits an accepted connection without an owner; `None` if all connections are busy.
    pub fn admit(&self) -> Option<Permit> {
        self.admit_from(None)
    }

    fn admit_from(&self, client: Option<Client>) -> Option<Permit> {
        let close = Arc::new(Notify::new());
        let admission = self.table().admit_from(client.clone(), Arc::clone(&close));
        let id = match admission {
            Admission::Admitted(id) => id,
            Admission::Replaced { id, closed } => {
                self.count(Reason::Idle);
                closed.notify_one();
                id
            }
            Admission::Full(_) => {
                self.count(Reason::Full);
                let (listener, client) = (self.shared.listener.as_str(), client.map(tracing::field::display));
                tracing::warn!(listener, client, "rejected a connection: all connections are in use");
                return None;
            }
        };
        Some(Permit { limit: self.clone(), id, close })
    }

    /// Counts a connection that was closed without service.
    pub fn count(&self, reason: Reason) {
        self.shared.rejected.count(self.shared.listener, reason);
    }

    /// Listener of this limit, for metrics and the log.
    pub fn listener(&self) -> Listener {
        self.shared.listener
    }

    /// Locks the table. A poisoned lock is usable, because a panic cannot leave a change half applied.
    fn table(&self) -> MutexGuard<'_, ConnectionTable<Arc<Notify>, Client>> {
        self.shared.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// Marks the connection as busy, so that it is not closed until [`set_idle`](Permit::set_idle). Returns
    /// false if it was already closed to make room: it must end, which [`closed`](Permit::closed) reports as
    /// well.
    pub fn set_busy(&self) -> bool {
        self.limit.table().set_busy(self.id)
    }

    /// Marks the connection as idle, so that it may be closed.
    pub fn set_idle(&self) {
        self.limit.table().set_known(self.id, Arc::clone(&self.close));
    }

    /// Counts the connection against the identity of its client, and marks it as idle: other clients close it only if
    /// no connection without a request is left. Returns false if the connection must end, because all connections of
    /// this identity are busy or this one was already closed to make room.
    pub fn set_identity(&self, identity: &Identity) -> bool {
        if self.limit.shared.shared_out {
            let assigned = self.limit.table().assign(self.id, Client::Identity(identity.clone()));
            match assigned {
                Assignment::Assigned => {}
                Assignment::Replaced(closed) => {
                    self.limit.count(Reason::Idle);
                    closed.notify_one();
                }
                Assignment::Refused => {
                    self.limit.count(Reason::Full);
                    let listener = self.limit.listener().as_str();
                    tracing::warn!(listener, client = %identity, "rejected a connection: this client uses its whole share");
                    return false;
                }
            }
        }
        self.set_idle();
        true
    }

    /// Waits until the connection must close to make room.
    pub async fn closed(&self) {
        self.close.notified().await;
    }

    /// Like [`closed`](Permit::closed), as a future that a poll function can store.
    pub fn closed_owned(&self) -> OwnedNotified {
        Arc::clone(&self.close).notified_owned()
    }

    /// Limit that the permit belongs to.
    pub fn limit(&self) -> &ConnectionLimit {
        &self.limit
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.limit.table().remove(self.id);
        self.limit.shared.ended.notify_one();
    }
}
