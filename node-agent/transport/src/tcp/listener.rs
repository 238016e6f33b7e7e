//! Accepts connections of peers, with one thread each.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use super::Common;
use super::incoming;
use super::settings::name_congestion;
use super::socket::{Wake, wait_accept};
use crate::error::TransportError;

/// Pause after a failed accept (usually out of descriptors): the pending connection stays pending.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Backlog of the listening socket. The peer of a connection beyond it retries after a second.
const BACKLOG: i32 = 4096;

/// Handle of the accepting thread.
pub(super) struct Listener {
    wake: Arc<Wake>,
}

impl Listener {
    /// Listens on the configured address.
    pub(super) fn start(common: &Arc<Common>) -> Result<(Listener, SocketAddr), TransportError> {
        let listen = common.settings.listen;
        let cannot_listen = |error| TransportError::os(format!("cannot listen on {listen}"), error);
        let listener = TcpListener::bind(listen).map_err(cannot_listen)?;
        name_congestion(&listener, &common.settings.congestion).map_err(|error| {
            TransportError::invalid(format!(
                "invalid congestion control: this kernel does not have or allow it: {error}"
            ))
        })?;
        listener.set_nonblocking(true).map_err(cannot_listen)?;
        rustix::net::listen(&listener, BACKLOG).map_err(|error| cannot_listen(error.into()))?;
        let address = listener.local_addr().map_err(cannot_listen)?;
        let wake = Arc::new(Wake::new().map_err(cannot_listen)?);
        let (accepting, waking) = (Arc::clone(common), Arc::clone(&wake));
        common
            .threads
            .spawn("peer-accept", move || run(&accepting, &listener, &waking))
            .map_err(cannot_listen)?;
        Ok((Listener { wake }, address))
    }

    /// Ends the accepting thread.
    pub(super) fn stop(&self) {
        self.wake.wake();
    }
}

fn run(common: &Arc<Common>, listener: &TcpListener, wake: &Wake) {
    while !common.is_closing() {
        common.wait_for_closing();
        match listener.accept() {
            Ok((stream, address)) => {
                // Here and not in its thread: connections are registered in the order of their arrival.
                let Some(entered) = incoming::enter(common, stream, address) else { continue };
                let serving = Arc::clone(common);
                let spawned = common.threads.spawn("peer-read", move || incoming::run(&serving, entered));
                if let Err(error) = spawned {
                    tracing::error!(%error, "cannot spawn a thread for a peer connection");
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if let Err(error) = wait_accept(listener, wake) {
                    tracing::error!(%error, "cannot wait for peer connections, accepting has ended");
                    return;
                }
            }
            // The connection ended before it was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a peer connection");
                // Wait only for the pause: the pending connection keeps the listener ready.
                let _ = super::socket::wait(None, Some(wake), Some(ACCEPT_RETRY));
            }
        }
    }
}
