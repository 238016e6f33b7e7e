//! An engine from the view of the cache: saves blocks, loads them, and compares every loaded byte.

use std::path::Path;
use std::time::{Duration, Instant};

use reprise_client::{
    Client, ClientError, CommitOptions, CommitOutcome, ConnectOptions, Load, LoadRequest, Reservation, Scope,
    Source, Ticket,
};
use reprise_policy::{BlockKey, Layout, TenantName};
pub use reprise_testkit::keyed_blocks::{Outcome, object_bytes};
use reprise_testkit::{configuration, keyed_blocks};

use crate::content::{NAMESPACE, key, keys};
use crate::wait::PATIENCE;

/// One session with an agent.
#[derive(Clone, Debug)]
pub struct Engine {
    client: Client,
}

/// Parameters of a load.
#[derive(Clone, Copy, Debug)]
pub struct LoadParams {
    /// Time after which blocks that have not arrived count as missing.
    pub deadline: Duration,
    /// Where the agent searches for blocks.
    pub scope: Scope,
    /// Bytes of one device read; 0: the agent's default.
    pub read_bytes: u64,
}

impl LoadParams {
    /// Loads from this node only, with a long deadline.
    pub const LOCAL: LoadParams = LoadParams { deadline: PATIENCE, scope: Scope::Local, read_bytes: 0 };

    /// Loads from the whole cluster, with a long deadline.
    pub const CLUSTER: LoadParams = LoadParams { deadline: PATIENCE, scope: Scope::Cluster, read_bytes: 0 };

    /// Returns the same parameters with another deadline.
    pub fn within(self, deadline: Duration) -> LoadParams {
        LoadParams { deadline, ..self }
    }
}

impl Engine {
    /// Opens a session in the tests' namespace.
    ///
    /// # Errors
    /// As `Client::connect`.
    pub fn connect(socket: &Path, layout: Layout) -> Result<Engine, ClientError> {
        let options =
            ConnectOptions::new(socket, NAMESPACE, layout).client_name("e2e").call_timeout(PATIENCE);
        Client::connect(options).map(|client| Engine { client })
    }

    /// Opens a session of a tenant, whose salt it provides for the agents of the socket's folder.
    ///
    /// # Errors
    /// As `Client::connect`.
    pub fn connect_as(socket: &Path, layout: Layout, tenant: &str) -> Result<Engine, ClientError> {
        let tenant: TenantName = tenant.parse().expect("tests use valid tenant names");
        configuration::provide_salt(socket, &tenant).expect("the folder is the test's");
        Engine::connect_with_salt(socket, layout, &tenant)
    }

    /// Opens a session of a tenant, whose salt the agent must have.
    ///
    /// # Errors
    /// As `Client::connect`.
    pub fn connect_with_salt(
        socket: &Path,
        layout: Layout,
        tenant: &TenantName,
    ) -> Result<Engine, ClientError> {
        let options = ConnectOptions::new(socket, NAMESPACE, layout).tenant(tenant.clone());
        let options = options.call_timeout(PATIENCE);
        Client::connect(options).map(|client| Engine { client })
    }

    /// Returns the client of the session.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Reserves exactly `count` slots.
    ///
    /// # Errors
    /// As `Client::reserve`.
    ///
    /// # Panics
    /// If the arena has no room within [`PATIENCE`].
    pub fn reserve(&self, count: usize) -> Result<Vec<Reservation>, ClientError> {
        let mut reserved: Vec<Reservation> = Vec::with_capacity(count);
        while reserved.len() < count {
            let missing = u32::try_from(count - reserved.len()).expect("a few thousand blocks");
            let more = self.client.reserve(missing, PATIENCE)?;
            assert!(!more.is_empty(), "no room in the arena within {PATIENCE:?}");
            reserved.extend(more);
        }
        Ok(reserved)
    }

    /// Commits blocks with one ticket.
    ///
    /// # Errors
    /// As `Client::reserve` and `Client::commit`.
    pub fn save(&self, numbers: &[u64]) -> Result<CommitOutcome, ClientError> {
        self.save_with_parent(None, numbers)
    }

    /// Commits blocks that continue a chain after the block `parent`.
    ///
    /// # Errors
    /// As [`Engine::save`].
    pub fn save_with_parent(
        &self,
        parent: Option<u64>,
        numbers: &[u64],
    ) -> Result<CommitOutcome, ClientError> {
        let mut reserved = self.reserve(numbers.len())?;
        for (reservation, number) in reserved.iter_mut().zip(numbers) {
            self.fill(reservation, &key(*number))?;
        }
        let items = reserved.into_iter().zip(numbers.iter().copied().map(key)).collect();
        let position = parent.is_none().then_some(0);
        let options = CommitOptions { parent: parent.map(key), position, ..CommitOptions::default() };
        self.client.commit(items, options)
    }

    /// Writes a block's content into a reserved slot.
    ///
    /// # Errors
    /// As `Reservation::fill_object`.
    pub fn fill(&self, reservation: &mut Reservation, key: &BlockKey) -> Result<(), ClientError> {
        keyed_blocks::write(reservation, self.client.layout(), &key.0)
    }

    /// Saves blocks and waits until all are durable.
    ///
    /// # Panics
    /// If a block does not become durable.
    pub fn save_durably(&self, numbers: &[u64]) {
        let committed = self.save(numbers).unwrap_or_else(|error| panic!("cannot save blocks: {error}"));
        self.await_durable(committed.ticket, numbers.len());
    }

    /// Waits until all `count` blocks of a ticket are durable.
    ///
    /// # Panics
    /// If a block is lost.
    pub fn await_durable(&self, ticket: Ticket, count: usize) {
        let durable = self.client.wait_durable(ticket, PATIENCE);
        let durable = durable.unwrap_or_else(|error| panic!("no durability notice: {error}"));
        assert_eq!((durable.durable as usize, durable.lost_keys.len()), (count, 0));
    }

    /// Loads blocks layer by layer, and compares every byte of the loaded blocks.
    ///
    /// # Errors
    /// As `Client::load` and `Load::wait_layer`.
    ///
    /// # Panics
    /// If a byte is wrong: no test allows that.
    pub fn load(&self, numbers: &[u64], loading: &LoadParams) -> Result<Vec<Outcome>, ClientError> {
        let LoadParams { deadline, scope, read_bytes } = *loading;
        let request = LoadRequest { deadline, read_bytes, scope, ..LoadRequest::new(keys(numbers)) };
        let load = self.client.load(&request)?;
        self.compare(&load, numbers)
    }

    /// Compares every byte of a load, layer by layer.
    ///
    /// # Errors
    /// As `Load::wait_layer`.
    ///
    /// # Panics
    /// If a byte is wrong.
    pub fn compare(&self, load: &Load, numbers: &[u64]) -> Result<Vec<Outcome>, ClientError> {
        let keys: Vec<_> = keys(numbers).into_iter().map(|key| key.0).collect();
        let outcomes = keyed_blocks::compare(load, self.client.layout(), &keys, PATIENCE)?;
        for (number, outcome) in numbers.iter().zip(&outcomes) {
            assert!(!matches!(outcome, Outcome::Wrong { .. }), "wrong bytes in block {number}: {outcome:?}");
        }
        Ok(outcomes)
    }

    /// Loads blocks, which must all be available and right. Returns the source of each.
    ///
    /// # Panics
    /// If a block is missing or corrupt.
    pub fn load_all(&self, numbers: &[u64], loading: &LoadParams) -> Vec<Source> {
        let outcomes = self.load(numbers, loading).unwrap_or_else(|error| panic!("cannot load: {error}"));
        let source = |(number, outcome): (&u64, &Outcome)| match outcome {
            Outcome::Verified(source) => *source,
            other => panic!("block {number} is not available: {other:?}"),
        };
        numbers.iter().zip(&outcomes).map(source).collect()
    }

    /// Loads blocks. Returns the outcomes and the duration.
    ///
    /// # Panics
    /// If the load as a whole fails.
    pub fn timed_load(&self, numbers: &[u64], loading: &LoadParams) -> (Vec<Outcome>, Duration) {
        let started = Instant::now();
        let outcomes = self.load(numbers, loading).unwrap_or_else(|error| panic!("cannot load: {error}"));
        (outcomes, started.elapsed())
    }

    /// Returns the sources of the leading blocks that are available.
    ///
    /// # Panics
    /// If the agent does not respond.
    pub fn matches(&self, numbers: &[u64], scope: Scope) -> Vec<Source> {
        self.client.match_keys(&keys(numbers), scope).unwrap_or_else(|error| panic!("cannot match: {error}"))
    }

    /// Drops copies in DRAM so that the next load reads the device. Returns their number.
    ///
    /// # Panics
    /// If the agent does not respond.
    pub fn trim(&self) -> u64 {
        self.client.trim().unwrap_or_else(|error| panic!("cannot trim: {error}"))
    }
}
