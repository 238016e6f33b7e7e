//! Names to numbers: node identities and their epochs in the store.
//!
//! Numbers start at 1 (0 means "no node" in requests) and are never given out twice, also when a node was forgotten: its record is
//! deleted, the counter stays, and whoever registers under its name is another node. A registration is one conditional transaction, so
//! members that share a store cannot give one number to two names or one epoch twice; forgetting is one as well, so a
//! registration comes before it and prevents it, or behind it and begins anew.
//!
//! All names that are new want the same counter. A member takes one such registration after the other: a thousand nodes that come at
//! once contend as the few members that they come to.

use std::sync::Arc;

use reprise_controlplane_core::{NodeDetails, NodeRecord};
use reprise_controlplane_store::{
    Condition, KeyValue, Outcome, Revision, Store, StoreError, Transaction, Write,
};
use reprise_policy::{Epoch, NodeId};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use crate::identity::Identity;
use crate::keys::{Family, Key};
use crate::modes;

/// Nodes at the most: numbers are 16 bits and begin at 1.
pub(crate) const NODES_MAX: usize = u16::MAX as usize;
/// Attempts against concurrent registrations. Each failure means that another registration succeeded.
const ATTEMPTS_MAX: usize = 64;

/// See the module.
#[derive(Clone, Debug)]
pub struct Registry {
    store: Arc<dyn Store>,
    identity: Identity,
    /// Held while a name that is new takes its number.
    newcomer: Arc<Mutex<()>>,
}

/// What was forgotten, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forgotten {
    /// Revision of the store that deleted the record.
    pub revision: Revision,
    /// Whether the node was cordoned or draining; whoever comes under its name is active.
    pub mode: ModeThen,
}

/// What became of the mode of a node that was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModeThen {
    /// It was active anyway.
    Kept,
    /// It was set to active by the same revision.
    TakenBack,
}

/// Why a node cannot be registered, or forgotten.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What the store holds is not a record of ours.
    #[error(
        "the store's record {key} cannot be read ({reason}): restore the store from a backup or start a new one"
    )]
    Record {
        /// Which.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// The store is not the one that this member has started with.
    #[error(
        "the store was emptied or replaced, or restored from a backup, while this member ran: it must be started again, \
         and agents announce everything to it"
    )]
    OtherStore,
    /// All numbers are given out.
    #[error(
        "{NODES_MAX} node names have been registered, no number is left: reuse names, or start a new store"
    )]
    Full,
    /// Others were always faster.
    #[error("{ATTEMPTS_MAX} concurrent registrations came first: try again")]
    Busy,
    /// The node that is to be forgotten has registered since it was looked at.
    #[error("it has registered just now: stop its agent first")]
    Registered,
    /// The node that is to be forgotten was forgotten since it was looked at.
    #[error("somebody else has forgotten it just now")]
    Forgotten,
}

/// The stored form of a node.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    node: u16,
    epoch: u64,
    peer_address: String,
    admin_address: String,
    failure_domain: String,
    version: String,
}

impl Registry {
    /// A registry over a store, which is to stay the same.
    pub fn new(store: Arc<dyn Store>, identity: Identity) -> Registry {
        Registry { store, identity, newcomer: Arc::default() }
    }

    /// All nodes that were registered and not forgotten, and a revision at which these were all.
    pub async fn nodes(&self) -> Result<(Vec<NodeRecord>, Revision), RegistryError> {
        let range = self.store.range(Family::Nodes.prefix().as_bytes(), NODES_MAX).await?;
        let nodes: Result<Vec<NodeRecord>, RegistryError> = range.entries.iter().map(read).collect();
        Ok((nodes?, range.revision))
    }

    /// The node of a name, unless none has registered under it or it was forgotten.
    pub async fn find(&self, name: &str) -> Result<Option<NodeRecord>, RegistryError> {
        self.store.get(&key_of(name)).await?.as_ref().map(read).transpose()
    }

    /// Gives the node its number (the same as ever for its name, until it is forgotten) and a higher epoch than ever; both are
    /// durable when this returns.
    pub async fn register(&self, name: &str, details: NodeDetails) -> Result<NodeRecord, RegistryError> {
        let key = key_of(name);
        let mut newcomer = None;
        for _ in 0..ATTEMPTS_MAX {
            let known = self.store.get(&key).await?;
            if known.is_none() && newcomer.is_none() {
                newcomer = Some(self.newcomer.lock().await);
                // Another call may have registered it while this one waited.
                continue;
            }
            let (record, mut transaction) = match known {
                Some(entry) => self.again(&key, &entry, &details)?,
                None => self.first(&key, name, &details).await?,
            };
            transaction.conditions.push(self.identity.unchanged());
            if let Outcome::Committed(revision) = self.store.transact(transaction).await? {
                return Ok(NodeRecord { revision: revision.0, ..record });
            }
            self.check_store().await?;
        }
        Err(RegistryError::Busy)
    }

    /// Deletes the record of a node as it was found, and takes its mode back. Its number is gone for good.
    ///
    /// # Errors
    /// It has registered since, or was forgotten; or the store's.
    pub async fn forget(&self, found: &NodeRecord) -> Result<Forgotten, RegistryError> {
        let key = key_of(&found.name);
        for _ in 0..ATTEMPTS_MAX {
            let (mode_unchanged, active) = modes::active(self.store.as_ref(), &found.name).await?;
            let mode = if active.is_some() { ModeThen::TakenBack } else { ModeThen::Kept };
            let unchanged = Condition::Modified { key: key.clone(), revision: Revision(found.revision) };
            let conditions = vec![unchanged, mode_unchanged, self.identity.unchanged()];
            let writes = std::iter::once(Write::Delete { key: key.clone() }).chain(active).collect();
            if let Outcome::Committed(revision) =
                self.store.transact(Transaction { conditions, writes }).await?
            {
                return Ok(Forgotten { revision, mode });
            }
            self.check_store().await?;
            match self.find(&found.name).await? {
                None => return Err(RegistryError::Forgotten),
                Some(record) if record.revision != found.revision => return Err(RegistryError::Registered),
                // Its mode was set.
                Some(_) => {}
            }
        }
        Err(RegistryError::Busy)
    }

    /// After a conflict: that the store is another one is reason enough.
    async fn check_store(&self) -> Result<(), RegistryError> {
        if self.identity.is_of(self.store.as_ref()).await? { Ok(()) } else { Err(RegistryError::OtherStore) }
    }

    /// A name that is known.
    fn again(
        &self,
        key: &[u8],
        entry: &KeyValue,
        details: &NodeDetails,
    ) -> Result<(NodeRecord, Transaction), RegistryError> {
        let known = read(entry)?;
        let record = NodeRecord { epoch: Epoch(known.epoch.0 + 1), details: details.clone(), ..known };
        let conditions = vec![Condition::Modified { key: key.to_vec(), revision: entry.modified }];
        let writes = vec![Write::Put { key: key.to_vec(), value: written(&record), lease: None }];
        Ok((record, Transaction { conditions, writes }))
    }

    /// A name that is new: it takes the next number.
    async fn first(
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
            Write::Put { key: key.to_vec(), value: written(&record), lease: None },
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
        .ok_or_else(|| bad(entry, "it is no number from 1 on"))
}

/// A record of the store.
pub(crate) fn read(entry: &KeyValue) -> Result<NodeRecord, RegistryError> {
    let name =
        Family::Nodes.name(&entry.key).ok_or_else(|| bad(entry, "its key is no node name"))?.to_owned();
    let stored: Stored =
        serde_json::from_slice(&entry.value).map_err(|error| bad(entry, &error.to_string()))?;
    let details = NodeDetails {
        peer_address: stored.peer_address,
        admin_address: stored.admin_address,
        failure_domain: stored.failure_domain,
        version: stored.version,
    };
    let (node, epoch) = (NodeId(stored.node), Epoch(stored.epoch));
    Ok(NodeRecord { node, name, epoch, details, revision: entry.modified.0 })
}

fn key_of(name: &str) -> Vec<u8> {
    Key::Of(Family::Nodes, name).bytes()
}

fn bad(entry: &KeyValue, reason: &str) -> RegistryError {
    RegistryError::Record { key: String::from_utf8_lossy(&entry.key).into_owned(), reason: reason.to_owned() }
}

fn written(record: &NodeRecord) -> Vec<u8> {
    let details = record.details.clone();
    let stored = Stored {
        node: record.node.0,
        epoch: record.epoch.0,
        peer_address: details.peer_address,
        admin_address: details.admin_address,
        failure_domain: details.failure_domain,
        version: details.version,
    };
    serde_json::to_vec(&stored).expect("a record of strings and numbers is always JSON")
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
        let identity = Identity::of(store.as_ref()).await.expect("made");
        Registry::new(store, identity)
    }

    #[tokio::test]
    async fn a_store_that_was_emptied_meanwhile_gives_out_no_numbers() {
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
    async fn a_name_keeps_its_number_and_each_registration_has_a_higher_epoch() {
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
    async fn a_name_that_was_forgotten_comes_back_as_another_node_and_active() {
        let registry = registry(Arc::new(MemoryStore::new())).await;
        let register =
            async |name| registry.register(name, NodeDetails::default()).await.expect("registered");
        let (first, second) = (register("a").await, register("b").await);
        let store = registry.store.as_ref();
        modes::set(store, &registry.identity, "a", NodeMode::Draining).await.expect("set");
        let forgotten = registry.forget(&first).await.expect("forgotten");
        assert_eq!(forgotten.mode, ModeThen::TakenBack);
        assert!(forgotten.revision.0 > second.revision);
        assert_eq!(registry.find("a").await.expect("readable"), None);
        let mode = store.get(b"modes/a").await.expect("readable").expect("kept");
        assert_eq!(modes::read(&mode).expect("ours").1.mode, NodeMode::Active);
        assert_eq!(mode.modified, forgotten.revision, "newer than any that an agent may have heard");
        let again = register("a").await;
        assert_eq!((first.node, second.node, again.node), (NodeId(1), NodeId(2), NodeId(3)));
        assert_eq!(registry.forget(&again).await.expect("forgotten").mode, ModeThen::Kept);
    }

    #[tokio::test]
    async fn a_node_that_registers_while_it_is_forgotten_stays() {
        let registry = registry(Arc::new(MemoryStore::new())).await;
        let found = registry.register("a", NodeDetails::default()).await.expect("registered");
        let since = registry.register("a", NodeDetails::default()).await.expect("registered");
        let refused = registry.forget(&found).await.expect_err("it has come back");
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
            assert!(given.insert((record.node, record.epoch)), "{record:?} was given out twice");
        }
        let mut numbers: Vec<_> = given.iter().map(|(node, _)| node.0).collect();
        numbers.dedup();
        assert_eq!(numbers, (1..=8).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn the_last_number_is_65535_and_then_names_are_refused_with_words() {
        let store = MemoryStore::new();
        put(&store, b"next_node", b"65535").await;
        let registry = registry(Arc::new(store)).await;
        assert_eq!(
            registry.register("last", NodeDetails::default()).await.expect("one left").node,
            NodeId(65535)
        );
        let base = registry.identity.epoch_base().0;
        let refused = registry.register("more", NodeDetails::default()).await.expect_err("none left");
        assert!(refused.to_string().contains("no number is left"), "{refused}");
        assert_eq!(registry.register("last", NodeDetails::default()).await.expect("known").epoch.0, base + 2);
    }

    #[tokio::test]
    async fn a_record_that_cannot_be_read_is_an_error_with_its_key() {
        let store = MemoryStore::new();
        put(&store, b"nodes/x", b"{").await;
        let registry = registry(Arc::new(store)).await;
        let refused = registry.nodes().await.expect_err("unreadable");
        assert!(refused.to_string().contains("nodes/x"), "{refused}");
        assert!(registry.register("x", NodeDetails::default()).await.is_err());
    }
}
