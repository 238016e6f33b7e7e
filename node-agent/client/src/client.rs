//! The blocking client: connecting, and the calls of a session.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Sender, bounded};
use reprise_policy::session::Ticket;
use reprise_policy::{BlockKey, GpuPlace, Layout, NamespaceDigest, TenantName};
use reprise_proto::local::{self, KEYS_PER_CALL_MAX, PROTOCOL_VERSION, request, response};

use crate::commit::{CommitOptions, CommitOutcome, commit_message, commit_outcome};
use crate::connection::{Connection, PendingCall};
use crate::deadline;
use crate::durable::DurableOutcome;
use crate::error::ClientError;
use crate::extents::{self, ExtentStatus, LeasedExtent, PinOutcome};
use crate::learned_salt::{LearnedSalt, salt_of};
use crate::load::{Load, LoadRequest, PendingLoad};
use crate::reservation::{Reservation, reservations};
use crate::token::read_token;

/// Default time that a call waits for its answer. Calls other than loads take microseconds; the limit covers
/// an agent that is stopped in a debugger or starved of CPU.
pub const CALL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(5);

/// Maximum length of a client's name in bytes. The name appears in the agent's logs and status.
pub const CLIENT_NAME_BYTES_MAX: usize = 64;

/// Shortest pause between two attempts to reserve, even if the agent proposes a shorter one.
const RESERVE_PAUSE_MIN: Duration = Duration::from_micros(200);

/// Pause after the agent has reported that it is busy: about the time in which it processes a full event
/// queue.
const RESERVE_PAUSE_BUSY: Duration = Duration::from_millis(5);

/// Address of the agent, and the description of the blocks that this engine stores there.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// The agent's unix socket.
    pub socket: PathBuf,
    /// Namespace of this engine's blocks, without the tenant: only blocks of one namespace are comparable.
    pub namespace: NamespaceDigest,
    /// Geometry of the blocks.
    pub layout: Layout,
    /// Tenant that owns the blocks; their bytes count against its quotas. Its salt, which the agent hands to its
    /// sessions, is part of all keys ([`Client::namespace`]).
    pub tenant: TenantName,
    /// Receives the tenant's salt of each session, for keys that are computed without the session.
    pub learned_salt: Option<LearnedSalt>,
    /// File with a service account token for the audience `reprise.dev`. An agent in Kubernetes checks the
    /// token where a `CacheTenant` names its pods. The file is read at each connection, because tokens are
    /// rotated.
    pub token_file: Option<PathBuf>,
    /// Place of the GPU that accesses extents: they are leased from devices near it, as long as those have space.
    /// `None`: no preference.
    pub gpu: Option<GpuPlace>,
    /// Name for logs and status; at most [`CLIENT_NAME_BYTES_MAX`] bytes.
    pub client_name: String,
    /// Time that a call waits for its answer. A load waits for its own deadline in addition.
    pub call_timeout: Duration,
}

/// A session with this node's agent. Clones share it; it ends with the last clone, reservation and load.
#[derive(Clone, Debug)]
pub struct Client {
    session: Arc<Session>,
}

/// State shared by client handles, reservations and loads. Dropping the last reference ends the session.
#[derive(Debug)]
pub(crate) struct Session {
    connection: Arc<Connection>,
    reader: Mutex<Option<JoinHandle<()>>>,
    layout: Layout,
    call_timeout: Duration,
    pub(crate) welcome: local::Welcome,
    /// Namespace with the tenant's salt.
    namespace: NamespaceDigest,
    pub(crate) learned_salt: Option<LearnedSalt>,
}

impl ConnectOptions {
    /// Creates options with defaults for everything except the three arguments.
    pub fn new(socket: impl Into<PathBuf>, namespace: NamespaceDigest, layout: Layout) -> ConnectOptions {
        ConnectOptions {
            socket: socket.into(),
            namespace,
            layout,
            tenant: TenantName::default_tenant(),
            learned_salt: None,
            token_file: None,
            gpu: None,
            client_name: "client".to_owned(),
            call_timeout: CALL_TIMEOUT_DEFAULT,
        }
    }

    /// Sets the name for logs and status.
    pub fn client_name(mut self, name: impl Into<String>) -> ConnectOptions {
        self.client_name = name.into();
        self
    }

    /// Sets the tenant; the default is the default tenant.
    pub fn tenant(mut self, tenant: TenantName) -> ConnectOptions {
        self.tenant = tenant;
        self
    }

    /// Sets the receiver of the tenant's salt.
    pub fn learned_salt(mut self, salt: LearnedSalt) -> ConnectOptions {
        self.learned_salt = Some(salt);
        self
    }

    /// Sets the file with the token that identifies this pod.
    pub fn token_file(mut self, path: impl Into<PathBuf>) -> ConnectOptions {
        self.token_file = Some(path.into());
        self
    }

    /// Sets the place of the GPU that accesses extents.
    pub fn gpu(mut self, gpu: GpuPlace) -> ConnectOptions {
        self.gpu = Some(gpu);
        self
    }

    /// Sets the time that a call waits for its answer.
    pub fn call_timeout(mut self, timeout: Duration) -> ConnectOptions {
        self.call_timeout = timeout;
        self
    }

    fn into_hello(self) -> Result<local::Hello, ClientError> {
        let spec = self.layout.spec();
        let service_account_token =
            self.token_file.as_deref().map(read_token).transpose()?.unwrap_or_default();
        Ok(local::Hello {
            protocol_version: PROTOCOL_VERSION,
            namespace: Bytes::copy_from_slice(&self.namespace.0),
            layout: Some(local::Layout {
                layers: u32::from(spec.layers),
                parts: spec.parts as u32,
                kv_heads: u32::from(spec.kv_heads),
                head_dim: u32::from(spec.head_dim),
                dtype: spec.dtype as u32,
                tokens_per_block: u32::from(spec.tokens_per_block),
                tp_rank: u32::from(spec.tp_rank),
                tp_size: u32::from(spec.tp_size),
            }),
            client_name: self.client_name,
            tenant: self.tenant.into(),
            service_account_token,
            gpu: self.gpu.map(|gpu| match gpu {
                GpuPlace::Pci(address) => local::hello::Gpu::GpuPciAddress(address.to_string()),
                GpuPlace::NumaNode(node) => local::hello::Gpu::GpuNumaNode(node),
            }),
        })
    }
}

impl Client {
    /// Opens a session.
    ///
    /// # Errors
    /// `AgentAbsent`, `Forbidden`, `Version`, `BadRequest` (the agent refuses namespace, layout, tenant or
    /// user), `Timeout`, `AgentLost`.
    pub fn connect(options: ConnectOptions) -> Result<Client, ClientError> {
        if options.client_name.len() > CLIENT_NAME_BYTES_MAX {
            return Err(ClientError::BadRequest(format!(
                "the client's name has {} bytes: at most {CLIENT_NAME_BYTES_MAX} are allowed",
                options.client_name.len()
            )));
        }
        let (connection, reader) = open(&options.socket, options.call_timeout)?;
        // The session owns the connection from here on, so that a rejected greeting ends connection and
        // thread.
        let mut session = Session {
            connection,
            reader: Mutex::new(Some(reader)),
            layout: options.layout,
            call_timeout: options.call_timeout,
            welcome: local::Welcome::default(),
            namespace: options.namespace,
            learned_salt: options.learned_salt.clone(),
        };
        let tenant = options.tenant.clone();
        match session.call("hello", request::Body::Hello(options.into_hello()?)) {
            Ok(response::Body::Welcome(mut welcome)) => {
                // The salt is a secret: it must not appear in a debug form.
                let salt = salt_of(&tenant, &std::mem::take(&mut welcome.tenant_salt))
                    .map_err(|error| session.broken(error))?;
                session.namespace = session.namespace.of_tenant(salt.as_ref());
                session.welcome = welcome;
                if let Some(learned) = &session.learned_salt {
                    learned.set(salt, session.has_public_tenant());
                }
            }
            Ok(_) => return Err(session.broken(ClientError::unexpected("hello"))),
            // The agent may reject a process with a message that precedes the greeting; that message is the
            // better error.
            Err(error) => return Err(session.connection.refusal().unwrap_or(error)),
        }
        Ok(Client { session: Arc::new(session) })
    }

    /// Returns the geometry of the session's blocks.
    pub fn layout(&self) -> &Layout {
        self.session.layout()
    }

    /// Returns the namespace from which the keys of this session's blocks derive: the one of its options, with the
    /// tenant's salt.
    pub fn namespace(&self) -> &NamespaceDigest {
        &self.session.namespace
    }

    /// Returns the name of the agent's node.
    pub fn node(&self) -> &str {
        &self.session.welcome.node
    }

    /// Returns the agent's version.
    pub fn agent_version(&self) -> &str {
        &self.session.welcome.agent_version
    }

    /// Reports whether the session is open. After its end, calls fail, but blocks of open loads can still be
    /// copied.
    pub fn is_alive(&self) -> bool {
        !self.session.connection.has_ended()
    }

    /// Reserves up to `count` slots (`1..=8192`) for filling, and waits up to `wait` for at least one. An
    /// arena that is full of leased blocks gets room as loads are released. The result is empty if no slot
    /// became free in that time.
    ///
    /// # Errors
    /// `BadRequest`, `Timeout`, `AgentLost`.
    pub fn reserve(&self, count: u32, wait: Duration) -> Result<Vec<Reservation>, ClientError> {
        self.reserve_within(count, wait, self.session.call_timeout)
    }

    /// [`Client::reserve`] with a specific timeout for each answer.
    pub(crate) fn reserve_within(
        &self,
        count: u32,
        wait: Duration,
        answer_timeout: Duration,
    ) -> Result<Vec<Reservation>, ClientError> {
        if count == 0 || count as usize > KEYS_PER_CALL_MAX {
            return Err(ClientError::BadRequest(format!(
                "reserve: invalid number of slots {count}: expected 1 to {KEYS_PER_CALL_MAX}"
            )));
        }
        let deadline = deadline::after(wait);
        loop {
            let reserve = local::Reserve { count, kind: local::PlaceKind::Arena.into() };
            let reserve = request::Body::Reserve(reserve);
            let retry_after = match self.session.call_within("reserve", reserve, answer_timeout) {
                Ok(response::Body::Reserved(reserved)) if !reserved.leases.is_empty() => {
                    return reservations(&self.session, &reserved)
                        .map_err(|error| self.session.broken(error));
                }
                Ok(response::Body::Reserved(reserved)) => Duration::from_micros(reserved.retry_after_us),
                Ok(_) => return Err(self.session.broken(ClientError::unexpected("reserve"))),
                Err(ClientError::Busy(_)) => RESERVE_PAUSE_BUSY,
                Err(error) => return Err(error),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Vec::new());
            }
            self.session.connection.durable_outcomes().pause(retry_after.max(RESERVE_PAUSE_MIN).min(left))?;
        }
    }

    /// Publishes filled reservations under their keys with one ticket. The blocks must be consecutive blocks
    /// of one chain, in its order: the agent evicts the last of them first. If the call fails, all slots are
    /// released.
    ///
    /// # Errors
    /// `BadRequest` (a reservation is not filled, or too many at once), `Timeout`, `AgentLost`.
    pub fn commit(
        &self,
        items: Vec<(Reservation, BlockKey)>,
        options: CommitOptions,
    ) -> Result<CommitOutcome, ClientError> {
        self.commit_within(items, options, self.session.call_timeout)
    }

    /// [`Client::commit`] with a specific timeout for the answer.
    pub(crate) fn commit_within(
        &self,
        items: Vec<(Reservation, BlockKey)>,
        options: CommitOptions,
        answer_timeout: Duration,
    ) -> Result<CommitOutcome, ClientError> {
        check_count("commit", items.len())?;
        let body = request::Body::Commit(commit_message(&items, options)?);
        let response::Body::Committed(committed) =
            self.session.call_within("commit", body, answer_timeout)?
        else {
            return Err(self.session.broken(ClientError::unexpected("commit")));
        };
        let outcome = commit_outcome(&committed, items.len()).map_err(|error| self.session.broken(error))?;
        items.into_iter().for_each(|(reservation, _)| reservation.mark_committed());
        Ok(outcome)
    }

    /// Leases up to `count` extents (`1..=8192`) of pool files, to write blocks without the arena, and waits up
    /// to `wait` for at least one. The result is empty if none became free in that time.
    ///
    /// # Errors
    /// `BadRequest` (the agent lends no extents, or `count` is invalid), `Busy` (the session holds its share),
    /// `Timeout`, `AgentLost`.
    pub fn lease_extents(&self, count: u32, wait: Duration) -> Result<Vec<LeasedExtent>, ClientError> {
        check_count("lease extents", count as usize)?;
        let deadline = deadline::after(wait);
        loop {
            let lease = local::Reserve { count, kind: local::PlaceKind::Extent.into() };
            let response::Body::Reserved(leased) =
                self.session.call("lease extents", request::Body::Reserve(lease))?
            else {
                return Err(self.session.broken(ClientError::unexpected("lease extents")));
            };
            if !leased.leases.is_empty() {
                return extents::leased(&self.session, &leased).map_err(|error| self.session.broken(error));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Vec::new());
            }
            let pause = Duration::from_micros(leased.retry_after_us).max(RESERVE_PAUSE_MIN);
            self.session.connection.durable_outcomes().pause(pause.min(left))?;
        }
    }

    /// Publishes blocks whose payloads are in leased extents, and waits until each is durable or has failed.
    /// All writes to the extents must have ended. The blocks must be consecutive blocks of one chain, in its
    /// order. Readers verify the checksums: a wrong one makes the block unreadable.
    ///
    /// # Errors
    /// `BadRequest` (too many at once, or an invalid number of checksums), `Busy`, `Timeout`, `AgentLost`. All leases
    /// have ended then.
    pub fn commit_extents(
        &self,
        items: Vec<(LeasedExtent, BlockKey, Vec<u32>)>,
        options: CommitOptions,
    ) -> Result<Vec<ExtentStatus>, ClientError> {
        check_count("commit extents", items.len())?;
        let count = items.len();
        let body = request::Body::Commit(extents::commit_message(&self.session, &items, options)?);
        let response::Body::Committed(committed) = self.session.call("commit extents", body)? else {
            return Err(self.session.broken(ClientError::unexpected("commit extents")));
        };
        items.into_iter().for_each(|(extent, ..)| extent.mark_committed());
        extents::statuses(&committed, count).map_err(|error| self.session.broken(error))
    }

    /// Pins durable blocks of this node, to read them from the device without the arena.
    ///
    /// # Errors
    /// `BadRequest` (too many keys), `Timeout`, `AgentLost`.
    pub fn pin_extents(&self, keys: &[BlockKey]) -> Result<Vec<PinOutcome>, ClientError> {
        self.pin_extents_within(keys, self.session.call_timeout())
    }

    /// [`Client::pin_extents`] with a limit, if that is shorter than the timeout of calls.
    ///
    /// # Errors
    /// As [`Client::pin_extents`].
    pub fn pin_extents_within(
        &self,
        keys: &[BlockKey],
        limit: Duration,
    ) -> Result<Vec<PinOutcome>, ClientError> {
        check_count("pin extents", keys.len())?;
        let body = request::Body::Pin(local::Pin { keys: BlockKey::pack(keys).into() });
        let limit = limit.min(self.session.call_timeout());
        let response::Body::Pinned(pinned) = self.session.call_within("pin extents", body, limit)? else {
            return Err(self.session.broken(ClientError::unexpected("pin extents")));
        };
        extents::pinned(&self.session, &pinned, keys.len()).map_err(|error| self.session.broken(error))
    }

    /// Waits until every block of a commit is durable or lost. The outcome can be read repeatedly, and by
    /// several threads; the latest [`OUTCOMES_MAX`](crate::durable::OUTCOMES_MAX) outcomes are kept.
    ///
    /// # Errors
    /// `Timeout`, `AgentLost`, `BadRequest` (the outcome is no longer kept).
    pub fn wait_durable(&self, ticket: Ticket, timeout: Duration) -> Result<DurableOutcome, ClientError> {
        let outcomes = self.session.connection.durable_outcomes();
        // A call that does not wait asks only whether the outcome is known.
        if !timeout.is_zero() && !outcomes.is_known(ticket) {
            // The agent otherwise defers the writes of the commit to the slack of engines.
            let awaited = local::AwaitDurable { ticket: ticket.0 };
            self.session.connection.cast(request::Body::AwaitDurable(awaited));
        }
        outcomes.wait(ticket, timeout)
    }

    /// Loads blocks into the arena. Returns when every block has failed or is placed with layer 0 verified.
    ///
    /// # Errors
    /// `BadRequest` (too many keys), `Busy`, `Timeout`, `AgentLost`.
    pub fn load(&self, request: &LoadRequest) -> Result<Load, ClientError> {
        self.start_load(request)?.wait()
    }

    /// Sends a load request and returns without waiting for the answer, so that the next load runs while one
    /// is used.
    ///
    /// # Errors
    /// `BadRequest` (too many keys), `Busy`, `AgentLost`.
    pub fn start_load(&self, request: &LoadRequest) -> Result<PendingLoad, ClientError> {
        check_count("load", request.keys.len())?;
        PendingLoad::start(&self.session, request)
    }

    /// Returns the agent's counters by name.
    ///
    /// # Errors
    /// `Timeout`, `AgentLost`.
    pub fn stats(&self) -> Result<Vec<(String, u64)>, ClientError> {
        match self.session.call("stats", request::Body::Stats(local::Stats {}))? {
            response::Body::Stats(reply) => {
                Ok(reply.stats.into_iter().map(|stat| (stat.name, stat.value)).collect())
            }
            _ => Err(self.session.broken(ClientError::unexpected("stats"))),
        }
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Reports whether both are clients of one session.
    pub fn is_same_session(&self, other: &Client) -> bool {
        Arc::ptr_eq(&self.session, &other.session)
    }

    /// Checks that the agent answers.
    ///
    /// # Errors
    /// `Timeout`, `AgentLost`.
    pub(crate) fn probe(&self, timeout: Duration) -> Result<(), ClientError> {
        self.session.probe(timeout)
    }

    /// Drops clean DRAM copies of blocks that are on NVMe, so that the next load of them reads NVMe. Returns
    /// the number of dropped copies.
    ///
    /// # Errors
    /// `Timeout`, `AgentLost`.
    pub fn trim(&self) -> Result<u64, ClientError> {
        match self.session.call("trim", request::Body::Trim(local::Trim {}))? {
            response::Body::Trimmed(trimmed) => Ok(trimmed.blocks),
            _ => Err(self.session.broken(ClientError::unexpected("trim"))),
        }
    }

    /// Returns the error for calls on a session that has ended.
    pub(crate) fn ended_error(&self) -> ClientError {
        self.session.connection.ended_error()
    }

    /// Registers `watcher`, which is notified when the session ends, or now if it has. Only the first watcher
    /// is kept.
    pub(crate) fn watch(&self, watcher: Sender<()>) {
        self.session.connection.watch(watcher);
    }

    /// Ends the session for all its handles: reservations and loads are released, later calls fail. Without
    /// this call the session ends with the last handle.
    pub fn close(&self) {
        self.session.end();
    }
}

impl Session {
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    pub(crate) fn call_timeout(&self) -> Duration {
        self.call_timeout
    }

    /// Runs one call with the session's timeout.
    pub(crate) fn call(
        &self,
        call: &'static str,
        body: request::Body,
    ) -> Result<response::Body, ClientError> {
        self.call_within(call, body, self.call_timeout)
    }

    /// Runs one call with a specific timeout.
    pub(crate) fn call_within(
        &self,
        call: &'static str,
        body: request::Body,
        timeout: Duration,
    ) -> Result<response::Body, ClientError> {
        let _span = self.span(call).entered();
        self.connection.begin(call, body, timeout).and_then(PendingCall::wait)
    }

    /// Sends the cheapest request and ignores the contents of the answer.
    pub(crate) fn probe(&self, timeout: Duration) -> Result<(), ClientError> {
        self.call_within("stats", request::Body::Stats(local::Stats {}), timeout).map(drop)
    }

    /// Tracing span of a call. The session number is 0 until the agent has assigned one. A span without a
    /// subscriber costs one atomic load.
    pub(crate) fn span(&self, call: &'static str) -> tracing::Span {
        tracing::debug_span!("agent_call", request = call, session = self.number())
    }

    /// Number that the agent gave the session.
    pub(crate) fn number(&self) -> u64 {
        self.welcome.session
    }

    /// Ends the session because the agent broke the protocol.
    pub(crate) fn broken(&self, error: ClientError) -> ClientError {
        self.connection.end(&error.to_string());
        error
    }

    fn end(&self) {
        self.connection.close();
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(reader) = reader {
            // The panic hook has reported a panic of the reader thread; the connection is closed either way.
            let _ = reader.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
    }
}

/// Connects within `timeout` and starts the reader thread.
///
/// The thread connects, because connect(2) has no deadline: it blocks while the agent's backlog is full.
fn open(socket: &Path, timeout: Duration) -> Result<(Arc<Connection>, JoinHandle<()>), ClientError> {
    // Capacity 0: the send fails once the receiver has given up, so that a late connection is closed and not
    // leaked.
    let (sender, receiver) = bounded::<io::Result<Arc<Connection>>>(0);
    let path = socket.to_owned();
    let reader = thread::Builder::new()
        .name("reprise-client".to_owned())
        .spawn(move || {
            let connected = UnixStream::connect(path).and_then(Connection::new).map(Arc::new);
            let connection = connected.as_ref().ok().cloned();
            if let (Ok(()), Some(connection)) = (sender.send(connected), connection) {
                connection.read();
            }
        })
        .map_err(|error| ClientError::Busy(format!("cannot spawn the reader thread: {error}")))?;
    match receiver.recv_timeout(timeout) {
        Ok(Ok(connection)) => Ok((connection, reader)),
        Ok(Err(source)) => Err(ClientError::unreachable(socket, source)),
        Err(_) => Err(ClientError::Timeout { call: "connect", after: timeout }),
    }
}

pub(crate) fn check_count(call: &'static str, count: usize) -> Result<(), ClientError> {
    if (1..=KEYS_PER_CALL_MAX).contains(&count) {
        return Ok(());
    }
    Err(ClientError::BadRequest(format!(
        "{call}: invalid number of blocks {count}: expected 1 to {KEYS_PER_CALL_MAX}"
    )))
}
