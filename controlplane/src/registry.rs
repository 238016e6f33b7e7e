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

/// Maximum number of nodes: numbers have 16 bits and start at 1.
pub(crate) const NODES_MAX: usize = u16::MAX as usize;
/// Attempts against concurrent registrations. Each conflict means that another registration succeeded.
const ATTEMPTS_MAX: usize = 64;

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
        "invalid record {key} in the store ({reason}): restore the store from a backup or start a new one"
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
        for _ in 0..ATTEMPTS_MAX {
            let known = self.store.get(&key).await?;
            if known.is_none() && new_name_lock.is_none() {
                new_name_lock = Some(self.new_name_lock.lock().await);
                // Another call may have registered the name during the wait.
                continue;
            }
            let (record, mut transaction) = match known {
                Some(entry) => self.reregister(&key, &entry, &details)?,
                None => self.assign_number(&key, name, &details).await?,
            };
            transaction.conditions.push(self.identity.unchanged());
            if let Outcome::Committed(revision) = self.store.transact(transaction).await? {
                return Ok(NodeRecord { revision: revision.0, ..record });
            }
            self.check_store().await?;
        }
        Err(RegistryError::Busy)
    }

    /// Deletes the unchanged record of a node and resets its mode. Its number is not reused.
    ///
    /// # Errors
    /// The node has registered or was forgotten meanwhile; errors of the store.
    pub async fn forget(&self, found: &NodeRecord) -> Result<NodeRemoval, RegistryError> {
        let key = node_key(&found.name);
        for _ in 0..ATTEMPTS_MAX {
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
            self.check_store().await?;
            match self.find(&found.name).await? {
                None => return Err(RegistryError::Forgotten),
                Some(record) if record.revision != found.revision => return Err(RegistryError::Registered),
                // Only the mode changed: retry.
                Some(_) => {}
            }
        }
        Err(RegistryError::Busy)
    }

    /// Distinguishes, after a conflict, a replaced store from a concurrent change.
    async fn check_store(&self) -> Result<(), RegistryError> {
        if self.identity.is_current(self.store.as_ref()).await? {
            Ok(())
        } else {
            Err(RegistryError::OtherStore)
        }
    }

    /// Prepares the registration of a known name.
    fn reregister(
        &self,
        key: &[u8],
        entry: &KeyValue,
        details: &NodeDetails,
    ) -> Result<(NodeRecord, Transaction), RegistryError> {
        let known = read(entry)?;
        let record = NodeRecord { epoch: Epoch(known.epoch.0 + 1), details: details.clone(), ..known };
        let conditions = vec![Condition::Modified { key: key.to_vec(), revision: entry.modified }];
        let writes = vec![Write::Put { key: key.to_vec(), value: encode(&record), lease: None }];
        Ok((record, Transaction { conditions, writes }))
    }

    /// Prepares the registration of a new name under the next number.
    async fn assign_number(
        &self,
        key: &[u8],
        name: &str,
        details: &NodeDetails,
    ) -> Result<(NodeRecord, Transaction), RegistryError> {
        let counter = self.store.get(&Key::NextNode.bytes()).await?;
        let unchanged = match &counter {
            None => Condition::Absent { key: Key::NextNode.bytes() },
            Some(entry) => Condition::Modified { key: Key::NextNode.bytes(), revision: entry.modified },
        };
        let next = counter.map_or(Ok(1), |entry| read_counter(&entry))?;
        let node = NodeId(u16::try_from(next).map_err(|_| RegistryError::Full)?);
        let epoch = Epoch(self.identity.epoch_base().0 + 1);
        let record = NodeRecord { node, name: name.to_owned(), epoch, details: details.clone(), revision: 0 };
        let conditions = vec![Condition::Absent { key: key.to_vec() }, unchanged];
        let writes = vec![
            Write::Put { key: key.to_vec(), value: encode(&record), lease: None },
            Write::Put {
                key: Key::NextNode.bytes(),
                value: (next + 1).to_string().into_bytes(),
                lease: None,
            },
        ];
        Ok((record, Transaction { conditions, writes }))
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
