//! The client for tokio.
//!
//! Each call runs on tokio's blocking pool. A call waits on a channel or a futex anyway, and a second
//! implementation of the protocol would have to be kept equal to the first. At most [`BLOCKING_CALLS_MAX`]
//! calls run at a time, so an application that starts thousands of calls queues here instead of filling the
//! pool.
//!
//! A call whose future is dropped still runs to its end. The slots and loads that it obtains are released.

use std::sync::Arc;
use std::time::Duration;

use reprise_policy::BlockKey;
use reprise_policy::session::{Scope, Source, Ticket};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::client::{Client, ConnectOptions};
use crate::commit::{CommitOptions, CommitOutcome};
use crate::durable::DurableOutcome;
use crate::error::ClientError;
use crate::load::{LayerReady, Load, LoadRequest};
use crate::reservation::Reservation;

/// Maximum number of calls of one client that occupy a thread at a time: an eighth of tokio's default pool of
/// 512.
pub const BLOCKING_CALLS_MAX: usize = 64;

/// A session with this node's agent, for tokio. Clones share it.
#[derive(Clone, Debug)]
pub struct AsyncClient {
    client: Client,
    permits: Arc<Semaphore>,
}

impl AsyncClient {
    /// Opens a session; see [`Client::connect`].
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub async fn connect(options: ConnectOptions) -> Result<AsyncClient, ClientError> {
        let connected = spawn_blocking(move || Client::connect(options)).await;
        connected.map_err(|error| join_error(&error))?.map(AsyncClient::from)
    }

    /// Returns the blocking client of the same session, for calls that do not block, such as copies.
    pub fn blocking(&self) -> &Client {
        &self.client
    }

    /// See [`Client::reserve`].
    ///
    /// # Errors
    /// As [`Client::reserve`].
    pub async fn reserve(&self, count: u32, wait: Duration) -> Result<Vec<Reservation>, ClientError> {
        self.run(move |client| client.reserve(count, wait)).await
    }

    /// See [`Client::commit`].
    ///
    /// # Errors
    /// As [`Client::commit`].
    pub async fn commit(
        &self,
        items: Vec<(Reservation, BlockKey)>,
        options: CommitOptions,
    ) -> Result<CommitOutcome, ClientError> {
        self.run(move |client| client.commit(items, options)).await
    }

    /// See [`Client::wait_durable`].
    ///
    /// # Errors
    /// As [`Client::wait_durable`].
    pub async fn wait_durable(
        &self,
        ticket: Ticket,
        timeout: Duration,
    ) -> Result<DurableOutcome, ClientError> {
        self.run(move |client| client.wait_durable(ticket, timeout)).await
    }

    /// See [`Client::match_keys`].
    ///
    /// # Errors
    /// As [`Client::match_keys`].
    pub async fn match_keys(&self, keys: Vec<BlockKey>, scope: Scope) -> Result<Vec<Source>, ClientError> {
        self.run(move |client| client.match_keys(&keys, scope)).await
    }

    /// See [`Client::load`].
    ///
    /// # Errors
    /// As [`Client::load`].
    pub async fn load(&self, request: LoadRequest) -> Result<Arc<Load>, ClientError> {
        self.run(move |client| client.load(&request)).await.map(Arc::new)
    }

    /// See [`Load::wait_layer`].
    ///
    /// # Errors
    /// As [`Load::wait_layer`].
    pub async fn wait_layer(
        &self,
        load: &Arc<Load>,
        layer: u32,
        timeout: Duration,
    ) -> Result<LayerReady, ClientError> {
        if load.ready_layers() > layer {
            return load.wait_layer(layer, Duration::ZERO);
        }
        let load = Arc::clone(load);
        self.run(move |_| load.wait_layer(layer, timeout)).await
    }

    /// See [`Client::stats`].
    ///
    /// # Errors
    /// As [`Client::stats`].
    pub async fn stats(&self) -> Result<Vec<(String, u64)>, ClientError> {
        self.run(Client::stats).await
    }

    /// See [`Client::trim`].
    ///
    /// # Errors
    /// As [`Client::trim`].
    pub async fn trim(&self) -> Result<u64, ClientError> {
        self.run(Client::trim).await
    }

    /// Runs a blocking call on tokio's blocking pool.
    async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Client) -> Result<T, ClientError> + Send + 'static,
    ) -> Result<T, ClientError> {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let client = self.client.clone();
        let ran = spawn_blocking(move || {
            let result = call(&client);
            drop(permit);
            result
        });
        ran.await.map_err(|error| join_error(&error))?
    }
}

impl From<Client> for AsyncClient {
    fn from(client: Client) -> AsyncClient {
        AsyncClient { client, permits: Arc::new(Semaphore::new(BLOCKING_CALLS_MAX)) }
    }
}

/// Error for a runtime that shuts down, or for a call that panicked; the panic hook has reported the panic.
fn join_error(error: &tokio::task::JoinError) -> ClientError {
    ClientError::AgentLost { reason: format!("the call did not complete: {error}") }
}
