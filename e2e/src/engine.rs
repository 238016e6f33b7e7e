//! An engine, as far as a cache can tell: it saves blocks, loads them, and looks at every byte that it gets.

use std::path::Path;
use std::time::{Duration, Instant};

use reprise_client::{
    BlockStatus, Client, ClientError, CommitOptions, CommitOutcome, ConnectOptions, CopyError, Load,
    LoadRequest, Reservation, Scope, Source, Ticket,
};
use reprise_policy::{BlockKey, Layout, TenantName};

use crate::content::{NAMESPACE, first_difference, key, keys, write_object};
use crate::wait::PATIENCE;

/// One session with an agent.
#[derive(Clone, Debug)]
pub struct Engine {
    client: Client,
}

/// How to load.
#[derive(Clone, Copy, Debug)]
pub struct Loading {
    /// What is not there by then is missing.
    pub deadline: Duration,
    /// Where to look.
    pub scope: Scope,
    /// Bytes of one device read; 0: the agent's default.
    pub read_bytes: u64,
}

/// What became of a block of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every byte of it was compared.
    Right(Source),
    /// The agent says that it is not there.
    Missing(BlockStatus),
    /// The client has found that it is not what was committed.
    Detected,
}

impl Loading {
    /// From this node, with patience.
    pub const LOCAL: Loading = Loading { deadline: PATIENCE, scope: Scope::Local, read_bytes: 0 };

    /// From anywhere, with patience.
    pub const CLUSTER: Loading = Loading { deadline: PATIENCE, scope: Scope::Cluster, read_bytes: 0 };

    /// The same with another deadline.
    pub fn within(self, deadline: Duration) -> Loading {
        Loading { deadline, ..self }
    }
}

impl Outcome {
    /// Whether the block came, and was right.
    pub fn is_right(self) -> bool {
        matches!(self, Outcome::Right(_))
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

    /// Opens a session of a tenant, in a namespace of its own.
    ///
    /// # Errors
    /// As `Client::connect`.
    pub fn connect_as(socket: &Path, layout: Layout, tenant: &str) -> Result<Engine, ClientError> {
        let tenant: TenantName = tenant.parse().expect("tests name tenants right");
        let mut namespace = NAMESPACE;
        namespace.0.iter_mut().zip(tenant.number().0.to_le_bytes()).for_each(|(byte, salt)| *byte ^= salt);
        let options = ConnectOptions::new(socket, namespace, layout).tenant(tenant).call_timeout(PATIENCE);
        Client::connect(options).map(|client| Engine { client })
    }

    /// Its session.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Exactly so many slots.
    ///
    /// # Errors
    /// As `Client::reserve`.
    ///
    /// # Panics
    /// When the arena has no room for a long time.
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

    /// Commits these blocks with one ticket.
    ///
    /// # Errors
    /// As `Client::reserve` and `Client::commit`.
    pub fn save(&self, numbers: &[u64]) -> Result<CommitOutcome, ClientError> {
        self.save_behind(None, numbers)
    }

    /// The same for blocks of a chain that begins before them, with the block that they follow.
    ///
    /// # Errors
    /// As [`Engine::save`].
    pub fn save_behind(&self, parent: Option<u64>, numbers: &[u64]) -> Result<CommitOutcome, ClientError> {
        let mut reserved = self.reserve(numbers.len())?;
        for (reservation, number) in reserved.iter_mut().zip(numbers) {
            self.fill(reservation, &key(*number))?;
        }
        let items = reserved.into_iter().zip(numbers.iter().copied().map(key)).collect();
        self.client.commit(items, CommitOptions { parent: parent.map(key), ..CommitOptions::default() })
    }

    /// Writes a block's content into a slot.
    ///
    /// # Errors
    /// As `Reservation::fill_object`.
    pub fn fill(&self, reservation: &mut Reservation, key: &BlockKey) -> Result<(), ClientError> {
        let layout = self.client.layout();
        let mut object = vec![0; object_bytes(layout)];
        for index in 0..layout.objects() {
            write_object(key, index, &mut object);
            reservation.fill_object(index, &object)?;
        }
        Ok(())
    }

    /// Saves blocks that must all become durable.
    ///
    /// # Panics
    /// When one does not.
    pub fn save_durably(&self, numbers: &[u64]) {
        let committed = self.save(numbers).unwrap_or_else(|error| panic!("blocks cannot be saved: {error}"));
        self.await_durable(committed.ticket, numbers.len());
    }

    /// Waits until all of so many blocks that were saved are durable.
    ///
    /// # Panics
    /// When one is not.
    pub fn await_durable(&self, ticket: Ticket, count: usize) {
        let durable = self.client.wait_durable(ticket, PATIENCE);
        let durable = durable.unwrap_or_else(|error| panic!("no durable notice: {error}"));
        assert_eq!((durable.durable as usize, durable.lost_keys.len()), (count, 0));
    }

    /// Loads blocks layer by layer, and compares every byte of those that come.
    ///
    /// # Errors
    /// As `Client::load` and `Load::wait_layer`.
    ///
    /// # Panics
    /// When a byte is wrong: no test allows that.
    pub fn load(&self, numbers: &[u64], loading: &Loading) -> Result<Vec<Outcome>, ClientError> {
        let Loading { deadline, scope, read_bytes } = *loading;
        let request = LoadRequest { keys: keys(numbers), deadline, read_bytes, scope };
        let load = self.client.load(&request)?;
        self.compare(&load, numbers)
    }

    /// Looks at every byte of a load, layer by layer.
    ///
    /// # Errors
    /// As `Load::wait_layer`.
    ///
    /// # Panics
    /// When a byte is wrong.
    pub fn compare(&self, load: &Load, numbers: &[u64]) -> Result<Vec<Outcome>, ClientError> {
        let layout = *self.client.layout();
        let keys = keys(numbers);
        let mut object = vec![0; object_bytes(&layout)];
        let mut bad: Vec<Option<Outcome>> = vec![None; numbers.len()];
        for layer in 0..layout.layers() {
            load.wait_layer(layer, PATIENCE)?;
            for (block, key) in keys.iter().enumerate() {
                let objects = layer * layout.parts()..(layer + 1) * layout.parts();
                let copied = objects.clone().try_for_each(|index| {
                    load.copy_object(block, index, &mut object)?;
                    let difference = first_difference(key, index, &object);
                    assert_eq!(difference, None, "wrong bytes in object {index} of block {}", numbers[block]);
                    Ok(())
                });
                if let Err(error) = copied {
                    bad[block].get_or_insert(missing(error));
                }
            }
        }
        let outcome = |(block, bad): (usize, Option<Outcome>)| {
            let source =
                || load.blocks()[block].source().expect("a block that was copied came from somewhere");
            bad.unwrap_or_else(|| Outcome::Right(source()))
        };
        Ok(bad.into_iter().enumerate().map(outcome).collect())
    }

    /// Loads blocks that must all be there and right; where each came from.
    ///
    /// # Panics
    /// When one is not.
    pub fn load_all(&self, numbers: &[u64], loading: &Loading) -> Vec<Source> {
        let outcomes = self.load(numbers, loading).unwrap_or_else(|error| panic!("no load: {error}"));
        let source = |(number, outcome): (&u64, &Outcome)| match outcome {
            Outcome::Right(source) => *source,
            other => panic!("block {number} must be there: {other:?}"),
        };
        numbers.iter().zip(&outcomes).map(source).collect()
    }

    /// Loads blocks; gives the outcomes and how long it took.
    ///
    /// # Panics
    /// When the load itself fails.
    pub fn timed_load(&self, numbers: &[u64], loading: &Loading) -> (Vec<Outcome>, Duration) {
        let started = Instant::now();
        let outcomes = self.load(numbers, loading).unwrap_or_else(|error| panic!("no load: {error}"));
        (outcomes, started.elapsed())
    }

    /// Sources of the leading blocks that are available.
    ///
    /// # Panics
    /// When the agent does not answer.
    pub fn matches(&self, numbers: &[u64], scope: Scope) -> Vec<Source> {
        self.client.match_keys(&keys(numbers), scope).unwrap_or_else(|error| panic!("no match: {error}"))
    }

    /// Drops copies in DRAM, so that the next load of them is cold; how many.
    ///
    /// # Panics
    /// When the agent does not answer.
    pub fn trim(&self) -> u64 {
        self.client.trim().unwrap_or_else(|error| panic!("no trim: {error}"))
    }
}

/// Bytes of an object, as a length of memory.
pub fn object_bytes(layout: &Layout) -> usize {
    usize::try_from(layout.object_bytes()).expect("objects are small")
}

/// What a refused copy means for its block.
fn missing(error: CopyError) -> Outcome {
    match error {
        CopyError::Corrupt { .. } => Outcome::Detected,
        CopyError::Unavailable { status, .. } => Outcome::Missing(status),
        other => panic!("the call was right, and its layer ready: {other}"),
    }
}
