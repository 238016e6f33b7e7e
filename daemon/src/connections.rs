//! A bound on the connections of a listener, shared by its accept loop and its connections.
//!
//! The rule is [`ConnectionTable`]'s: a full listener closes its longest-idle connection for a new one, and refuses the new
//! one only when all are busy. A connection learns of its end from its [`Permit`].

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_policy::connection_table::{Admission, ConnectionId, ConnectionTable};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::{sleep, timeout};

use crate::rejected::{Listener, Reason, RejectedConnections};

/// Pause after a failed accept: most often no descriptor is free, and the connection stays in the listener's queue.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection that is closed to make room ends within this time, or is not waited for.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// The bound of one listener; clones are the same one.
#[derive(Clone, Debug)]
pub struct ConnectionLimit {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    listener: Listener,
    rejected: RejectedConnections,
    table: Mutex<ConnectionTable<Arc<Notify>>>,
    /// A connection has ended.
    ended: Notify,
}

/// A connection's place under the bound; returned when dropped.
#[derive(Debug)]
pub struct Permit {
    limit: ConnectionLimit,
    id: ConnectionId,
    close: Arc<Notify>,
}

impl ConnectionLimit {
    /// At most `connections_max` connections.
    pub fn new(listener: Listener, connections_max: usize, rejected: RejectedConnections) -> ConnectionLimit {
        let table = Mutex::new(ConnectionTable::new(connections_max));
        ConnectionLimit { shared: Arc::new(Shared { listener, rejected, table, ended: Notify::new() }) }
    }

    /// The next connection, with its place. Connections that find no place are closed; failures are logged and retried.
    pub async fn accept(&self, listener: &TcpListener) -> (TcpStream, Permit) {
        loop {
            self.wait_for_closing().await;
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                // It was closed before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    self.count(Reason::System);
                    let listener = self.shared.listener.as_str();
                    tracing::warn!(listener, %error, "cannot accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            if let Some(permit) = self.admit().await {
                return (stream, permit);
            }
        }
    }

    /// Waits until connections that were closed to make room have ended, most often for as long as their task takes to run.
    async fn wait_for_closing(&self) {
        let all_ended = async {
            while self.table().must_wait() {
                self.shared.ended.notified().await;
            }
        };
        // Late ones still count against the bound; the listener accepts without waiting longer.
        let _ = timeout(CLOSED_WITHIN, all_ended).await;
    }

    /// A place for a connection that was accepted; `None` when all connections are in use.
    pub async fn admit(&self) -> Option<Permit> {
        let close = Arc::new(Notify::new());
        let admission = self.table().admit(Arc::clone(&close));
        let id = match admission {
            Admission::Admitted(id) => id,
            Admission::Replaced { id, closed } => {
                self.count(Reason::Idle);
                closed.notify_one();
                id
            }
            Admission::Full(_) => {
                self.count(Reason::Full);
                let listener = self.shared.listener.as_str();
                tracing::warn!(listener, "refused a connection: all connections are in use");
                return None;
            }
        };
        Some(Permit { limit: self.clone(), id, close })
    }

    /// Counts a connection that ends without service.
    pub fn count(&self, reason: Reason) {
        self.shared.rejected.count(self.shared.listener, reason);
    }

    /// The listener, for the log.
    pub fn listener(&self) -> Listener {
        self.shared.listener
    }

    /// Each change is whole, so a poisoned lock is as good as any.
    fn table(&self) -> MutexGuard<'_, ConnectionTable<Arc<Notify>>> {
        self.shared.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// The connection is in use: it stays until [`set_idle`](Permit::set_idle).
    /// False when it was closed to make room before this call: it must end, which [`closed`](Permit::closed) reports as well.
    pub fn set_busy(&self) -> bool {
        self.limit.table().set_busy(self.id)
    }

    /// The connection has been of use, and may be closed from now on.
    pub fn set_idle(&self) {
        self.limit.table().set_known(self.id, Arc::clone(&self.close));
    }

    /// Waits until the connection is closed to make room.
    pub async fn closed(&self) {
        self.close.notified().await;
    }

    /// The same for a poll function.
    pub fn closed_owned(&self) -> OwnedNotified {
        Arc::clone(&self.close).notified_owned()
    }

    /// The bound that it is of.
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
