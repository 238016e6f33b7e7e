//! Registry of nodes in the store: their names, numbers and epochs.
//!
//! Numbers start at 1 (0 means "no node" in requests) and are never reused. Forgetting a node deletes its
//! record but not the counter, so a later registration under the same name is a new node. A registration is
//! one conditional transaction. Therefore members that share a store cannot assign a number to two names, or
//! an epoch twice. Forgetting is one as well: a concurrent registration either prevents it, or follows it and
//! creates a new node.
//!
//! Registrations of new names contend for the counter. Each member serializes them, so a thousand new nodes
//! contend only as many times as there are members.

use std::sync::Arc;

use reprise_controlplane_core::store_writes::{
    ATTEMPTS_MAX, NodeRegistration, NumberCounter, RegistrationInput, RegistrationRejection,
    RegistrationStep, RegistrationWrite, Unchanged, WriteAttempts, WriteRejection,
};
use reprise_controlplane_core::{NodeDetails, NodeRecord};
use reprise_controlplane_store::{
    Condition, KeyValue, Outcome, Revision, Store, StoreError, Transaction, Write,
};
use reprise_policy::peer::PeerEndpoint;
use reprise_policy::{Epoch, NodeId};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::identity::Identity;
use crate::modes;
use crate::store_keys::{Family, Key};
use crate::store_watch::Records;

/// Maximum number of nodes: numbers have 16 bits and start at 1.
pub(crate) const NODES_MAX: usize = u16::MAX as usize;
/// Node records by name.
pub(crate) const RECORDS: Records<String, NodeRecord> = Records {
    family: Family::Nodes,
    limit: NODES_MAX,
    name: |name| Some(name.to_owned()),
    read: |entry| {
        let record = read(entry);
        record.inspect_err(|error| tracing::error!(%error, "ignoring an invalid node record")).ok()
    },
};

/// The node registry of one member.
#[derive(Clone, Debug)]
pub struct Registry {
    store: Arc<dyn Store>,
    identity: Identity,
    /// Serializes registrations of new names.
    new_name_lock: Arc<Mutex<()>>,
}

/// Result of removing a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRemoval {
    /// Store revision of the removal.
    pub revision: Revision,
    /// Whether the node's mode was reset; a later node of this name is active.
    pub mode: ModeReset,
}

/// Effect of a removal on the node's mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModeReset {
    /// The node was active already.
    Unneeded,
    /// The mode was reset to active in the same revision.
    Reset,
}

/// Reasons for which a node cannot be registered or forgotten.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A record in the store is invalid.
    #[error(
        "invalid record {key} in the store ({reason}): if another release wrote it, use that release or start a new \
         store; otherwise restore the store from a backup"
    )]
    Record {
        /// Key of the record.
        key: String,
        /// Reason why it is invalid.
        reason: String,
    },
    /// The store has another identity than at the start of this member.
    #[error(
        "the store was emptied, replaced or restored while this member ran: restart this member, after which \
         agents announce their inventories again"
    )]
    OtherStore,
    /// All node numbers are assigned.
    #[error("all {NODES_MAX} node numbers are assigned: reuse node names, or start a new store")]
    Full,
    /// Every attempt conflicted with another change.
    #[error("{ATTEMPTS_MAX} attempts conflicted with concurrent registrations: retry")]
    Busy,
    /// The node to forget has registered meanwhile.
    #[error("it has just registered: stop its agent first")]
    Registered,
    /// The node to forget was forgotten meanwhile.
    #[error("another request has just forgotten it")]
    Forgotten,
}

/// A node record as stored.
#[derive(Debug, Serialize, Deserialize)]
struct NodeJson {
    node: u16,
    epoch: u64,
    peer_endpoints: Vec<EndpointJson>,
    admin_address: String,
    failure_domain: String,
    version: String,
}

/// A peer endpoint as stored.
#[derive(Debug, Serialize, Deserialize)]
struct EndpointJson {
    protocol: String,
    address: String,
}

impl Registry {
    /// Creates a registry over a store with this identity.
    pub fn new(store: Arc<dyn Store>, identity: Identity) -> Registry {
        Registry { store, identity, new_name_lock: Arc::default() }
    }

    /// All registered nodes, and the store revision of this list.
    pub async fn nodes(&self) -> Result<(Vec<NodeRecord>, Revision), RegistryError> {
        let range = self.store.range(Family::Nodes.prefix().as_bytes(), NODES_MAX).await?;
        let nodes: Result<Vec<NodeRecord>, RegistryError> = range.entries.iter().map(read).collect();
        Ok((nodes?, range.revision))
    }

    /// The node of a name, if it is registered.
    pub async fn find(&self, name: &str) -> Result<Option<NodeRecord>, RegistryError> {
        self.store.get(&node_key(name)).await?.as_ref().map(read).transpose()
    }

    /// Registers a node: returns its number, which stays the same for a name until it is forgotten, and a
    /// higher epoch than before. Both are durable on return.
    pub async fn register(&self, name: &str, details: NodeDetails) -> Result<NodeRecord, RegistryError> {
        let key = node_key(name);
        let mut new_name_lock = None;
        let mut write = RegistrationWrite::new(name, details, self.identity.epoch_base());
        let mut step = RegistrationStep::ReadRecord;
        loop {
            let input = match step {
                RegistrationStep::ReadRecord => RegistrationInput::Record(self.find(name).await?),
                RegistrationStep::ReadCounter if new_name_lock.is_none() => {
                    new_name_lock = Some(self.new_name_lock.lock().await);
                    // Another call may have registered the name during the wait.
                    RegistrationInput::Record(self.find(name).await?)
                }
                RegistrationStep::ReadCounter => RegistrationInput::Counter(self.counter().await?),
                RegistrationStep::Write(registration) => {
                    match self.store.transact(self.transaction(&key, &registration)).await? {
                        Outcome::Committed(revision) => RegistrationInput::Committed(revision.0),
                        Outcome::Conflict => RegistrationInput::Conflict,
                    }
                }
                RegistrationStep::Compare => {
                    RegistrationInput::Compared(self.identity.compare(self.store.as_ref()).await?)
                }
                RegistrationStep::Done(record) => return Ok(record),
                RegistrationStep::Rejected(RegistrationRejection::NoNumberLeft) => {
                    return Err(RegistryError::Full);
                }
                RegistrationStep::Rejected(RegistrationRejection::Write(rejection)) => {
                    return Err(rejection.into());
                }
            };
            step = write.on(input);
        }
    }

    /// Deletes the unchanged record of a node and resets its mode. Its number is not reused.
    ///
    /// # Errors
    /// The node has registered or was forgotten meanwhile; errors of the store.
    pub async fn forget(&self, found: &NodeRecord) -> Result<NodeRemoval, RegistryError> {
        let key = node_key(&found.name);
        let mut attempts = WriteAttempts::default();
        loop {
            let (mode_unchanged, active) = modes::prepare_active(self.store.as_ref(), &found.name).await?;
            let mode = if active.is_some() { ModeReset::Reset } else { ModeReset::Unneeded };
            let unchanged = Condition::Modified { key: key.clone(), revision: Revision(found.revision) };
            let conditions = vec![unchanged, mode_unchanged, self.identity.unchanged()];
            let writes = std::iter::once(Write::Delete { key: key.clone() }).chain(active).collect();
            if let Outcome::Committed(revision) =
                self.store.transact(Transaction { conditions, writes }).await?
            {
                return Ok(NodeRemoval { revision, mode });
            }
            self.retry(&mut attempts).await?;
            match self.find(&found.name).await? {
                None => return Err(RegistryError::Forgotten),
                Some(record) if record.revision != found.revision => return Err(RegistryError::Registered),
                // Only the mode changed: retry.
                Some(_) => {}
            }
        }
    }

    async fn retry(&self, attempts: &mut WriteAttempts) -> Result<(), RegistryError> {
        Ok(attempts.retry(self.identity.compare(self.store.as_ref()).await?)?)
    }

    /// The next node number; `None` if no number was assigned yet.
    async fn counter(&self) -> Result<Option<NumberCounter>, RegistryError> {
        let entry = self.store.get(&Key::NextNode.bytes()).await?;
        let counter =
            |entry: KeyValue| Ok(NumberCounter { next: read_counter(&entry)?, revision: entry.modified.0 });
        entry.map(counter).transpose()
    }

    fn transaction(&self, key: &[u8], registration: &NodeRegistration) -> Transaction {
        let NodeRegistration { record, unchanged, counter } = registration;
        let mut conditions = vec![condition(key.to_vec(), *unchanged), self.identity.unchanged()];
        let mut writes = vec![Write::Put { key: key.to_vec(), value: encode(record), lease: None }];
        if let Some((unchanged, next)) = counter {
            let key = Key::NextNode.bytes();
            conditions.push(condition(key.clone(), *unchanged));
            writes.push(Write::Put { key, value: next.to_string().into_bytes(), lease: None });
        }
        Transaction { conditions, writes }
    }
}

/// Encodes a condition on a record that was read.
pub(crate) fn condition(key: Vec<u8>, unchanged: Unchanged) -> Condition {
    match unchanged {
        Unchanged::Absent => Condition::Absent { key },
        Unchanged::At(revision) => Condition::Modified { key, revision: Revision(revision) },
    }
}

impl From<WriteRejection> for RegistryError {
    fn from(rejection: WriteRejection) -> RegistryError {
        match rejection {
            WriteRejection::OtherStore => RegistryError::OtherStore,
            WriteRejection::Busy => RegistryError::Busy,
        }
    }
}

fn read_counter(entry: &KeyValue) -> Result<u32, RegistryError> {
    std::str::from_utf8(&entry.value)
        .ok()
        .and_then(|text| text.parse().ok())
        .filter(|number| *number > 0)
        .ok_or_else(|| invalid_record(entry, "expected a number from 1"))
}

/// Decodes a node record.
pub(crate) fn read(entry: &KeyValue) -> Result<NodeRecord, RegistryError> {
    let name = Family::Nodes
        .name(&entry.key)
        .ok_or_else(|| invalid_record(entry, "its key is not a node name"))?
        .to_owned();
    let stored: NodeJson =
        serde_json::from_slice(&entry.value).map_err(|error| invalid_record(entry, &error.to_string()))?;
    let details = NodeDetails {
        peer_endpoints: stored
            .peer_endpoints
            .into_iter()
            .map(|EndpointJson { protocol, address }| PeerEndpoint { protocol, address })
            .collect(),
        admin_address: stored.admin_address,
        failure_domain: stored.failure_domain,
        version: stored.version,
    };
    let (node, epoch) = (NodeId(stored.node), Epoch(stored.epoch));
    Ok(NodeRecord { node, name, epoch, details, revision: entry.modified.0 })
}

fn node_key(name: &str) -> Vec<u8> {
    Key::Record(Family::Nodes, name).bytes()
}

fn invalid_record(entry: &KeyValue, reason: &str) -> RegistryError {
    RegistryError::Record { key: String::from_utf8_lossy(&entry.key).into_owned(), reason: reason.to_owned() }
}

fn encode(record: &NodeRecord) -> Vec<u8> {
    let details = record.details.clone();
    let stored = NodeJson {
        node: record.node.0,
        epoch: record.epoch.0,
        peer_endpoints: details
            .peer_endpoints
            .into_iter()
            .map(|PeerEndpoint { protocol, address }| EndpointJson { protocol, address })
            .collect(),
        admin_address: details.admin_address,
        failure_domain: details.failure_domain,
        version: details.version,
    };
    serde_json::to_vec(&stored).expect("strings and numbers serialize to JSON")
}

#[cfg(test)]
mod tests {
    use reprise_controlplane_store::MemoryStore;
    use reprise_policy::NodeMode;

    use super::*;

    async fn put(store: &MemoryStore, key: &[u8], value: &[u8]) {
        let write = Write::Put { key: key.to_vec(), value: value.to_vec(), lease: None };
        store.transact(Transaction { conditions: Vec::new(), writes: vec![write] }).await.expect("valid");
    }

    async fn registry(store: Arc<MemoryStore>) -> Registry {
        let identity = Identity::load_or_create(store.as_ref()).await.expect("made");
        Registry::new(store, identity)
    }

    #[tokio::test]
    async fn assigns_no_numbers_from_an_emptied_store() {
        let store = Arc::new(MemoryStore::new());
        let registry = registry(store.clone()).await;
        registry.register("a", NodeDetails::default()).await.expect("registered");
        let Condition::Modified { key, .. } = registry.identity.unchanged() else {
            panic!("a key's revision")
        };
        let writes =
            [b"nodes/a".to_vec(), Key::NextNode.bytes(), key].map(|key| Write::Delete { key }).into();
        store.transact(Transaction { conditions: Vec::new(), writes }).await.expect("valid");
        let refused = registry.register("b", NodeDetails::default()).await.expect_err("another store");
        assert!(matches!(refused, RegistryError::OtherStore), "{refused}");
        assert!(registry.nodes().await.expect("readable").0.is_empty(), "nothing was written");
    }

    #[tokio::test]
    async fn a_name_keeps_its_number_and_each_registration_raises_the_epoch() {
        let registry = registry(Arc::new(MemoryStore::new())).await;
        let base = registry.identity.epoch_base();
        let register = async |name| {
            let record = registry.register(name, NodeDetails::default()).await.expect("registered");
            (record.node.0, record.epoch.0 - base.0)
        };
        assert_eq!(register("a").await, (1, 1));
        assert_eq!(register("b").await, (2, 1));
        assert_eq!(register("a").await, (1, 2));
        assert_eq!(register("a").await, (1, 3));
        let (nodes, revision) = registry.nodes().await.expect("readable");
        assert!(nodes.iter().all(|node| (1..=revision.0).contains(&node.revision)), "{nodes:?}");
        assert_eq!(nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[tokio::test]
    async fn a_forgotten_name_returns_as_a_new_active_node() {
        let registry = registry(Arc::new(MemoryStore::new())).await;
        let register =
            async |name| registry.register(name, NodeDetails::default()).await.expect("registered");
        let (first, second) = (register("a").await, register("b").await);
        let store = registry.store.as_ref();
        modes::set(store, &registry.identity, "a", NodeMode::Draining).await.expect("set");
        let forgotten = registry.forget(&first).await.expect("forgotten");
        assert_eq!(forgotten.mode, ModeReset::Reset);
        assert!(forgotten.revision.0 > second.revision);
        assert_eq!(registry.find("a").await.expect("readable"), None);
        let mode = store.get(b"modes/a").await.expect("readable").expect("kept");
        assert_eq!(modes::read(&mode).expect("valid").1.mode, NodeMode::Active);
        assert_eq!(mode.modified, forgotten.revision, "newer than any revision that an agent received");
        let again = register("a").await;
        assert_eq!((first.node, second.node, again.node), (NodeId(1), NodeId(2), NodeId(3)));
        assert_eq!(registry.forget(&again).await.expect("forgotten").mode, ModeReset::Unneeded);
    }

    #[tokio::test]
    async fn keeps_a_node_that_registers_while_it_is_being_forgotten() {
        let registry = registry(Arc::new(MemoryStore::new())).await;
        let found = registry.register("a", NodeDetails::default()).await.expect("registered");
        let since = registry.register("a", NodeDetails::default()).await.expect("registered");
        let refused = registry.forget(&found).await.expect_err("it registered again");
        assert!(matches!(refused, RegistryError::Registered), "{refused}");
        assert_eq!(registry.find("a").await.expect("readable"), Some(since.clone()));
        registry.forget(&since).await.expect("forgotten");
        let refused = registry.forget(&since).await.expect_err("twice");
        assert!(matches!(refused, RegistryError::Forgotten), "{refused}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn concurrent_registrations_never_share_a_number_or_an_epoch() {
        let registry = registry(Arc::new(MemoryStore::new())).await;
        let tasks: Vec<_> = (0..40)
            .map(|task| {
                let registry = registry.clone();
                tokio::spawn(async move {
                    let name = format!("n{}", task % 8);
                    registry.register(&name, NodeDetails::default()).await.expect("registered")
                })
            })
            .collect();
        let mut given = std::collections::BTreeSet::new();
        for task in tasks {
            let record = task.await.expect("no panic");
            assert!(given.insert((record.node, record.epoch)), "{record:?} was assigned twice");
        }
        let mut numbers: Vec<_> = given.iter().map(|(node, _)| node.0).collect();
        numbers.dedup();
        assert_eq!(numbers, (1..=8).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn rejects_new_names_after_number_65535() {
        let store = MemoryStore::new();
        put(&store, b"next_node", b"65535").await;
        let registry = registry(Arc::new(store)).await;
        assert_eq!(
            registry.register("last", NodeDetails::default()).await.expect("one left").node,
            NodeId(65535)
        );
        let base = registry.identity.epoch_base().0;
        let refused = registry.register("more", NodeDetails::default()).await.expect_err("no numbers left");
        assert!(refused.to_string().contains("node numbers are assigned"), "{refused}");
        assert_eq!(registry.register("last", NodeDetails::default()).await.expect("known").epoch.0, base + 2);
    }

    #[tokio::test]
    async fn reports_the_key_of_an_unreadable_record() {
        let store = MemoryStore::new();
        put(&store, b"nodes/x", b"{").await;
        let registry = registry(Arc::new(store)).await;
        let refused = registry.nodes().await.expect_err("unreadable");
        assert!(refused.to_string().contains("nodes/x"), "{refused}");
        assert!(registry.register("x", NodeDetails::default()).await.is_err());
    }
}
