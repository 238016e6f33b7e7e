//! What nodes are for, in the store: `modes/<node name>`, JSON, written by `SetNode` of any member.
//!
//! A record is put and never deleted: its revision orders it against what nodes have heard, also after all members were
//! away. So a node that is taken back, or forgotten, has a record that says *active*; one that was never set has none.

use reprise_controlplane_core::SetMode;
use reprise_controlplane_store::{Condition, KeyValue, Outcome, Store, Transaction, Write};
use reprise_policy::NodeMode;
use serde::{Deserialize, Serialize};

use crate::identity::Identity;
use crate::keys::{Family, Key};
use crate::registry::RegistryError;

/// Attempts against others that set the same node's mode. Each failure means that another has succeeded.
const ATTEMPTS_MAX: usize = 64;

/// The stored form of a mode.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    mode: StoredMode,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredMode {
    Active,
    Cordoned,
    Draining,
}

/// Sets a node's mode; returns what it was and what it is now, durably. Nothing is written when it is the same.
///
/// # Errors
/// The store's, or another store than that of the identity.
pub async fn set(
    store: &dyn Store,
    identity: &Identity,
    name: &str,
    mode: NodeMode,
) -> Result<(NodeMode, SetMode), RegistryError> {
    let key = Key::Of(Family::Modes, name).bytes();
    for _ in 0..ATTEMPTS_MAX {
        let entry = store.get(&key).await?;
        let before = entry.as_ref().map(read).transpose()?.map(|(_, set)| set).unwrap_or_default();
        if before.mode == mode {
            return Ok((mode, before));
        }
        let unchanged = match &entry {
            None => Condition::Absent { key: key.clone() },
            Some(entry) => Condition::Modified { key: key.clone(), revision: entry.modified },
        };
        let conditions = vec![unchanged, identity.unchanged()];
        let writes = vec![Write::Put { key: key.clone(), value: written(mode), lease: None }];
        if let Outcome::Committed(revision) = store.transact(Transaction { conditions, writes }).await? {
            return Ok((before.mode, SetMode { mode, revision: revision.0 }));
        }
        if !identity.is_of(store).await? {
            return Err(RegistryError::OtherStore);
        }
    }
    Err(RegistryError::Busy)
}

/// What makes a node active in a transaction about more than its mode: the condition that this is as it was read, and a write
/// unless it is active already.
///
/// # Errors
/// The store's.
pub async fn active(store: &dyn Store, name: &str) -> Result<(Condition, Option<Write>), RegistryError> {
    let key = Key::Of(Family::Modes, name).bytes();
    let Some(entry) = store.get(&key).await? else {
        return Ok((Condition::Absent { key }, None));
    };
    let (_, set) = read(&entry)?;
    let unchanged = Condition::Modified { key: key.clone(), revision: entry.modified };
    let put = Write::Put { key, value: written(NodeMode::Active), lease: None };
    Ok((unchanged, (set.mode != NodeMode::Active).then_some(put)))
}

/// A record of the store: whose, and what it says.
///
/// # Errors
/// It is none of ours.
pub fn read(entry: &KeyValue) -> Result<(&str, SetMode), RegistryError> {
    let bad = |reason: &str| RegistryError::Record {
        key: String::from_utf8_lossy(&entry.key).into_owned(),
        reason: reason.to_owned(),
    };
    let name = Family::Modes.name(&entry.key).ok_or_else(|| bad("its key is no node name"))?;
    let stored: Stored = serde_json::from_slice(&entry.value).map_err(|error| bad(&error.to_string()))?;
    let mode = match stored.mode {
        StoredMode::Active => NodeMode::Active,
        StoredMode::Cordoned => NodeMode::Cordoned,
        StoredMode::Draining => NodeMode::Draining,
    };
    Ok((name, SetMode { mode, revision: entry.modified.0 }))
}

fn written(mode: NodeMode) -> Vec<u8> {
    let mode = match mode {
        NodeMode::Active => StoredMode::Active,
        NodeMode::Cordoned => StoredMode::Cordoned,
        NodeMode::Draining => StoredMode::Draining,
    };
    serde_json::to_vec(&Stored { mode }).expect("a record of a word is always JSON")
}

#[cfg(test)]
mod tests {
    use reprise_controlplane_store::MemoryStore;

    use super::*;

    #[tokio::test]
    async fn a_mode_is_kept_with_the_revision_that_set_it_and_said_again_it_writes_nothing() {
        let store = MemoryStore::new();
        let identity = Identity::of(&store).await.expect("made");
        let set = async |mode| set(&store, &identity, "a", mode).await.expect("set");
        assert_eq!(set(NodeMode::Active).await, (NodeMode::Active, SetMode::default()), "as ever");
        let (before, cordoned) = set(NodeMode::Cordoned).await;
        assert_eq!((before, cordoned.mode), (NodeMode::Active, NodeMode::Cordoned));
        assert_eq!(set(NodeMode::Cordoned).await, (NodeMode::Cordoned, cordoned));
        let (before, active) = set(NodeMode::Active).await;
        assert_eq!((before, active.mode), (NodeMode::Cordoned, NodeMode::Active));
        assert!(active.revision > cordoned.revision && cordoned.revision > 0);
        let entry = store.get(b"modes/a").await.expect("read").expect("it stays");
        assert_eq!(read(&entry).expect("ours"), ("a", active));
    }

    #[tokio::test]
    async fn another_store_takes_no_mode_and_a_record_of_others_is_an_error_with_its_key() {
        let (store, other) = (MemoryStore::new(), MemoryStore::new());
        let identity = Identity::of(&store).await.expect("made");
        let refused = set(&other, &identity, "a", NodeMode::Draining).await.expect_err("another store");
        assert!(matches!(refused, RegistryError::OtherStore), "{refused}");
        let write = Write::Put { key: b"modes/a".to_vec(), value: b"{\"mode\":\"x\"}".to_vec(), lease: None };
        store.transact(Transaction { conditions: Vec::new(), writes: vec![write] }).await.expect("valid");
        let refused = set(&store, &identity, "a", NodeMode::Draining).await.expect_err("unreadable");
        assert!(refused.to_string().contains("modes/a"), "{refused}");
    }
}
