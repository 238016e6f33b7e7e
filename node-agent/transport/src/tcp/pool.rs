//! The connections that this node opened, by peer: opened on demand, closed when idle, limited in number.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::outgoing::{BeginError, Outgoing, OutgoingRequest};
use super::{Common, lock, receiver};
use crate::error::TransportError;

/// Open connections by peer address.
#[derive(Default)]
pub(super) struct Pool {
    peers: Mutex<HashMap<String, Vec<Arc<Outgoing>>>>,
}

impl Pool {
    /// Passes a request or offer to the least busy connection of a peer, or to a new one.
    pub(super) fn ask(
        &self,
        common: &Arc<Common>,
        peer: &str,
        mut request: OutgoingRequest,
    ) -> Result<(), TransportError> {
        loop {
            let connection = self.connection(common, peer)?;
            match connection.begin(request) {
                Ok(()) => return Ok(()),
                Err(BeginError::Busy(error)) => return Err(error),
                // The connection was closed a moment ago. Each iteration removes one closed connection, so
                // the loop ends.
                Err(BeginError::Closed(back)) => {
                    self.remove(&connection);
                    request = back;
                }
            }
        }
    }

    pub(super) fn remove(&self, connection: &Arc<Outgoing>) {
        let mut peers = lock(&self.peers);
        if let Some(connections) = peers.get_mut(&connection.peer) {
            connections.retain(|other| !Arc::ptr_eq(other, connection));
            if connections.is_empty() {
                peers.remove(&connection.peer);
            }
        }
    }

    pub(super) fn close_all(&self) {
        for connection in lock(&self.peers).values().flatten() {
            connection.close("shutdown");
        }
    }

    fn connection(&self, common: &Arc<Common>, peer: &str) -> Result<Arc<Outgoing>, TransportError> {
        let mut peers = lock(&self.peers);
        // Checked under the lock that `close_all` acquires afterwards: a connection is either rejected here
        // or closed there.
        if common.is_closing() {
            return Err(TransportError::closed());
        }
        let young = || peers.get(peer).into_iter().flatten().filter(|connection| !connection.is_old());
        let open = young().count();
        let least = young().min_by_key(|connection| connection.open_blocks()).cloned();
        if let Some(least) = least
            && (open >= common.settings.connections_per_peer || least.open_blocks() == 0)
        {
            return Ok(least);
        }
        if peers.values().map(Vec::len).sum::<usize>() >= common.settings.connections_max {
            close_idle(&mut peers)?;
        }
        let connection = start(common, peer)?;
        peers.entry(peer.to_owned()).or_default().push(Arc::clone(&connection));
        Ok(connection)
    }
}

/// Makes room for one more connection.
fn close_idle(peers: &mut HashMap<String, Vec<Arc<Outgoing>>>) -> Result<(), TransportError> {
    let idle = peers.values().flatten().find(|connection| connection.open_blocks() == 0).cloned();
    let Some(idle) = idle else {
        return Err(TransportError::busy("all peer connections are busy and their limit is reached"));
    };
    idle.close("replaced by a connection to another peer");
    if let Some(connections) = peers.get_mut(&idle.peer) {
        connections.retain(|other| !Arc::ptr_eq(other, &idle));
    }
    peers.retain(|_, connections| !connections.is_empty());
    Ok(())
}

fn start(common: &Arc<Common>, peer: &str) -> Result<Arc<Outgoing>, TransportError> {
    let connection = Outgoing::new(peer, common)?;
    let cannot_start = |error| TransportError::os("cannot spawn a thread for a peer connection", error);
    let sending = Arc::clone(&connection);
    common.threads.spawn("peer-request", move || sending.run_sender()).map_err(cannot_start)?;
    let receiving = Arc::clone(&connection);
    let spawned = common.threads.spawn("peer-receive", move || {
        let _connection = tracing::info_span!("fetching", peer = receiving.peer).entered();
        receiver::run(&receiving);
        receiving.common.pool.remove(&receiving);
    });
    if let Err(error) = spawned {
        // Without its receiving thread the connection never opens; this ends its sending thread.
        connection.finish_receiving();
        return Err(cannot_start(error));
    }
    Ok(connection)
}
