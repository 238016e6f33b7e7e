//! Node modes in the store: `modes/<node name>`, JSON, written by `SetNode` on any member.
//!
//! A record is updated but never deleted, because its revision orders it against the mode that a node last
//! received, even after all members were down. A node that is reset or forgotten keeps a record with mode
//! `active`; a node whose mode was never set has no record.

use reprise_controlplane_core::ModeRecord;
use reprise_controlplane_core::store_writes::{ModeInput, ModeStep, ModeWrite};
use reprise_controlplane_store::{Condition, KeyValue, Outcome, Store, Transaction, Write};
use reprise_policy::NodeMode;
use serde::{Deserialize, Serialize};

use crate::identity::Identity;
use crate::registry::{NODES_MAX, RegistryError, condition};
use crate::store_keys::{Family, Key};
use crate::store_watch::Records;

/// Modes by node name.
pub(crate) const RECORDS: Records<String, ModeRecord> = Records {
    family: Family::Modes,
    limit: NODES_MAX,
    name: |name| Some(name.to_owned()),
    read: |entry| {
        let mode =
            read(entry).inspect_err(|error| tracing::error!(%error, "ignoring an invalid mode record"));
        mode.ok().map(|(_, set)| set)
    },
};

/// A mode as stored.
#[derive(Debug, Serialize, Deserialize)]
struct ModeJson {
    mode: ModeName,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ModeName {
    Active,
    Cordoned,
    Draining,
}

/// Sets a node's mode; returns the previous and the current one, durably. Writes nothing if they are equal.
///
/// # Errors
/// Errors of the store, or the store's identity has changed.
pub async fn set(
    store: &dyn Store,
    identity: &Identity,
    name: &str,
    mode: NodeMode,
) -> Result<(NodeMode, ModeRecord), RegistryError> {
    let key = Key::Record(Family::Modes, name).bytes();
    let (mut write, mut step) = (ModeWrite::new(mode), ModeStep::Read);
    loop {
        let input = match step {
            ModeStep::Read => {
                let entry = store.get(&key).await?;
                ModeInput::Record(entry.as_ref().map(read).transpose()?.map(|(_, set)| set))
            }
            ModeStep::Write(unchanged) => {
                let conditions = vec![condition(key.clone(), unchanged), identity.unchanged()];
                let writes = vec![Write::Put { key: key.clone(), value: encode(mode), lease: None }];
                match store.transact(Transaction { conditions, writes }).await? {
                    Outcome::Committed(revision) => ModeInput::Committed(revision.0),
                    Outcome::Conflict => ModeInput::Conflict,
                }
            }
            ModeStep::Compare => ModeInput::Compared(identity.compare(store).await?),
            ModeStep::Done(before, set) => return Ok((before, set)),
            ModeStep::Rejected(rejection) => return Err(rejection.into()),
        };
        step = write.on(input);
    }
}

/// Prepares the change to mode `active` for a larger transaction: the condition that the record is unchanged,
/// and a write unless the node is active.
///
/// # Errors
/// Errors of the store.
pub async fn prepare_active(
    store: &dyn Store,
    name: &str,
) -> Result<(Condition, Option<Write>), RegistryError> {
    let key = Key::Record(Family::Modes, name).bytes();
    let Some(entry) = store.get(&key).await? else {
        return Ok((Condition::Absent { key }, None));
    };
    let (_, set) = read(&entry)?;
    let unchanged = Condition::Modified { key: key.clone(), revision: entry.modified };
    let put = Write::Put { key, value: encode(NodeMode::Active), lease: None };
    Ok((unchanged, (set.mode != NodeMode::Active).then_some(put)))
}

/// Decodes a mode record into node name and mode.
///
/// # Errors
/// The record is not a valid mode record.
pub fn read(entry: &KeyValue) -> Result<(&str, ModeRecord), RegistryError> {
    let bad = |reason: &str| RegistryError::Record {
        key: String::from_utf8_lossy(&entry.key).into_owned(),
        reason: reason.to_owned(),
    };
    let name = Family::Modes.name(&entry.key).ok_or_else(|| bad("its key is not a node name"))?;
    let stored: ModeJson = serde_json::from_slice(&entry.value).map_err(|error| bad(&error.to_string()))?;
    let mode = match stored.mode {
        ModeName::Active => NodeMode::Active,
        ModeName::Cordoned => NodeMode::Cordoned,
        ModeName::Draining => NodeMode::Draining,
    };
    Ok((name, ModeRecord { mode, revision: entry.modified.0 }))
}

fn encode(mode: NodeMode) -> Vec<u8> {
    let mode = match mode {
        NodeMode::Active => ModeName::Active,
        NodeMode::Cordoned => ModeName::Cordoned,
        NodeMode::Draining => ModeName::Draining,
    };
    serde_json::to_vec(&ModeJson { mode }).expect("a mode serializes to JSON")
}

#[cfg(test)]
mod tests {
    use reprise_controlplane_store::MemoryStore;

    use super::*;

    #[tokio::test]
    async fn stores_a_mode_with_its_revision_and_skips_unchanged_writes() {
        let store = MemoryStore::new();
        let identity = Identity::load_or_create(&store).await.expect("made");
        let set = async |mode| set(&store, &identity, "a", mode).await.expect("set");
        assert_eq!(
            set(NodeMode::Active).await,
            (NodeMode::Active, ModeRecord::default()),
            "active by default"
        );
        let (before, cordoned) = set(NodeMode::Cordoned).await;
        assert_eq!((before, cordoned.mode), (NodeMode::Active, NodeMode::Cordoned));
        assert_eq!(set(NodeMode::Cordoned).await, (NodeMode::Cordoned, cordoned));
        let (before, active) = set(NodeMode::Active).await;
        assert_eq!((before, active.mode), (NodeMode::Cordoned, NodeMode::Active));
        assert!(active.revision > cordoned.revision && cordoned.revision > 0);
        let entry = store.get(b"modes/a").await.expect("read").expect("the record stays");
        assert_eq!(read(&entry).expect("valid"), ("a", active));
    }

    #[tokio::test]
    async fn rejects_another_store_and_reports_the_key_of_an_invalid_record() {
        let (store, other) = (MemoryStore::new(), MemoryStore::new());
        let identity = Identity::load_or_create(&store).await.expect("made");
        let refused = set(&other, &identity, "a", NodeMode::Draining).await.expect_err("another store");
        assert!(matches!(refused, RegistryError::OtherStore), "{refused}");
        let write = Write::Put { key: b"modes/a".to_vec(), value: b"{\"mode\":\"x\"}".to_vec(), lease: None };
        store.transact(Transaction { conditions: Vec::new(), writes: vec![write] }).await.expect("valid");
        let refused = set(&store, &identity, "a", NodeMode::Draining).await.expect_err("unreadable");
        assert!(refused.to_string().contains("modes/a"), "{refused}");
    }
}
