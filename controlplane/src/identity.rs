//! Identity of the store, by which a member detects that the store was replaced, emptied or restored.
//!
//! The identity is a random text. It is stored under one key, and as the name of a second key
//! ([`crate::store_keys`]).
//!
//! A store that is emptied or restored while members run assigns node numbers that the members know as other
//! nodes'. Therefore every registration is conditional on the identity ([`Identity::unchanged`]). A member
//! that finds another identity exits; its next process starts empty, and agents announce their inventories
//! again. The text is part of a key so that the condition is one that a [`Store`] supports.
//!
//! A restored store keeps its identity. A member that has seen a later revision than the backup's detects it
//! ([`StoreError::Replaced`]) and deletes the identity. All other members then exit as well, and epochs start
//! at a new base, also for nodes that are missing in the backup.
//!
//! Each identity has its own epoch base, so epochs of registrations under different stores never compare as
//! equal.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use reprise_controlplane_core::identity_search::{IdentitySearch, SearchInput, SearchStep};
use reprise_controlplane_core::record_watch::{IdentityAnswer, IdentityCall};
use reprise_controlplane_core::store_writes::StoreIdentity;
use reprise_controlplane_store::{
    Condition, KeyValue, Outcome, Range, Revision, Store, StoreError, Transaction, Write,
};
use reprise_policy::Epoch;
use tokio::time::sleep;

use crate::store_keys::Key;

/// The identity of a store, as read at the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    key: Vec<u8>,
    revision: Revision,
    /// 31 random bits: the upper half of epochs.
    number: u32,
}

/// The name of an identity.
#[derive(Debug)]
struct Name {
    /// Key of its marker.
    marker: Vec<u8>,
    number: u32,
}

impl Identity {
    /// Reads the identity; creates one if the store has none.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn load_or_create(store: &dyn Store) -> Result<Identity, StoreError> {
        let mut last = StoreError::Unavailable { reason: "its identity changes repeatedly".to_owned() };
        let (mut search, mut step) = (IdentitySearch::default(), SearchStep::ReadName);
        let (mut name, mut marker) = (None, None);
        loop {
            let answer = match step {
                SearchStep::ReadName => store.get(&Key::Identity.bytes()).await.map(|entry| {
                    name = entry.as_ref().map(Name::of);
                    presence(name.is_some())
                }),
                SearchStep::ReadMarker => {
                    let key = name.as_ref().map_or_else(Vec::new, |name: &Name| name.marker.clone());
                    store.get(&key).await.map(|entry| {
                        marker = entry.map(|entry| entry.modified);
                        presence(marker.is_some())
                    })
                }
                SearchStep::Create => create(store).await.map(|_| SearchInput::Created),
                SearchStep::Found | SearchStep::GiveUp => break,
            };
            let input = answer.unwrap_or_else(|error| {
                last = error;
                SearchInput::Failed
            });
            step = search.on(input);
        }
        let found = name.zip(marker).filter(|_| step == SearchStep::Found);
        found
            .map(|(Name { marker, number }, revision)| Identity { key: marker, revision, number })
            .ok_or(last)
    }

    /// Condition that the store still has this identity.
    pub fn unchanged(&self) -> Condition {
        Condition::Modified { key: self.key.clone(), revision: self.revision }
    }

    /// Whether the store still has this identity.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn is_current(&self, store: &dyn Store) -> Result<bool, StoreError> {
        Ok(store.get(&self.key).await?.is_some_and(|entry| entry.modified == self.revision))
    }

    /// Compares the identity of the store with this one, after a conflict.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn compare(&self, store: &dyn Store) -> Result<StoreIdentity, StoreError> {
        let is_current = self.is_current(store).await?;
        Ok(if is_current { StoreIdentity::Same } else { StoreIdentity::Other })
    }

    /// Lower bound of epochs of registrations under this store.
    pub fn epoch_base(&self) -> Epoch {
        Epoch(u64::from(self.number) << 32)
    }

    /// Waits until the store was replaced or restored from a backup. A restored store has lost this identity
    /// when this returns, unless it is unreachable.
    pub async fn wait_until_replaced(&self, store: &Arc<dyn Store>) {
        let mut call = IdentityCall::Read(Duration::ZERO);
        loop {
            let answer = match call {
                IdentityCall::Read(pause) => {
                    sleep(pause).await;
                    store.range(&self.key, 1).await.map(|range| match self.is_in(&range) {
                        true => IdentityAnswer::Unchanged(range.revision.0),
                        false => IdentityAnswer::Changed,
                    })
                }
                IdentityCall::Watch(from) => self.watch(store, from).await,
                IdentityCall::End => return,
                IdentityCall::DeleteAndEnd => return self.delete(store.as_ref()).await,
            };
            call = IdentityCall::after(answer.unwrap_or_else(|error| answer_of(&error)));
        }
    }

    /// Waits for a change of the identity. A watch ends with its connection, and replacing a store ends its
    /// connections. The next read detects a restored store.
    async fn watch(&self, store: &Arc<dyn Store>, from: u64) -> Result<IdentityAnswer, StoreError> {
        store.watch(&self.key, Revision(from)).await?.next().await.map(|_| IdentityAnswer::Changed)
    }

    /// Deletes this identity from the store, if present.
    async fn delete(&self, store: &dyn Store) {
        let conditions = vec![self.unchanged()];
        let writes = [Key::Identity.bytes(), self.key.clone()].map(|key| Write::Delete { key }).to_vec();
        match store.transact(Transaction { conditions, writes }).await {
            // `Replaced` is expected here; the transaction was committed.
            Ok(_) | Err(StoreError::Replaced { .. }) => {}
            Err(error) => tracing::warn!(
                %error,
                "cannot delete the identity of a restored store: restart all other members"
            ),
        }
    }

    fn is_in(&self, range: &Range) -> bool {
        range.entries.first().is_some_and(|entry| entry.key == self.key && entry.modified == self.revision)
    }
}

impl Name {
    fn of(entry: &KeyValue) -> Name {
        // Other versions may write another format; any text that stays the same identifies the store.
        let text = String::from_utf8_lossy(&entry.value);
        let marker = Key::IdentityMarker(&text).bytes();
        let number = text.get(..8);
        let number = number.and_then(|text| u32::from_str_radix(text, 16).ok()).unwrap_or_default() >> 1;
        Name { marker, number }
    }
}

fn presence(is_present: bool) -> SearchInput {
    if is_present { SearchInput::Present } else { SearchInput::Absent }
}

fn answer_of(error: &StoreError) -> IdentityAnswer {
    if let StoreError::Replaced { reason } = error {
        tracing::info!(reason, "the store was replaced or restored: deleting its identity");
        return IdentityAnswer::Restored;
    }
    tracing::debug!(%error, "cannot follow the identity of the store");
    IdentityAnswer::Failed
}

async fn create(store: &dyn Store) -> Result<Outcome, StoreError> {
    // The standard library seeds each `RandomState` differently: enough to distinguish stores.
    let text = format!("{:016x}", RandomState::new().hash_one("identity"));
    let key = Key::IdentityMarker(&text).bytes();
    let put = |key: Vec<u8>, value: Vec<u8>| Write::Put { key, value, lease: None };
    store
        .transact(Transaction {
            conditions: vec![Condition::Absent { key: Key::Identity.bytes() }],
            writes: vec![put(Key::Identity.bytes(), text.into_bytes()), put(key, Vec::new())],
        })
        .await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reprise_controlplane_store::MemoryStore;
    use tokio::time::timeout;

    use super::*;

    fn store() -> Arc<dyn Store> {
        Arc::new(MemoryStore::new())
    }

    async fn delete(store: &dyn Store, key: &[u8]) {
        let writes = vec![Write::Delete { key: key.to_vec() }];
        store.transact(Transaction { conditions: Vec::new(), writes }).await.expect("valid");
    }

    #[tokio::test]
    async fn members_of_one_store_share_its_identity_and_stores_differ() {
        let (one, other) = (store(), store());
        let identity = Identity::load_or_create(one.as_ref()).await.expect("made");
        assert_eq!(Identity::load_or_create(one.as_ref()).await.expect("read"), identity);
        assert!(identity.is_current(one.as_ref()).await.expect("read"));
        assert_ne!(Identity::load_or_create(other.as_ref()).await.expect("made"), identity);
        assert!(!identity.is_current(other.as_ref()).await.expect("read"));
        // Like a registration.
        let writes = vec![Write::Put { key: b"nodes/a".to_vec(), value: Vec::new(), lease: None }];
        let conditions = vec![identity.unchanged()];
        let transaction = Transaction { conditions, writes };
        let refused = other.transact(transaction.clone()).await.expect("valid");
        assert_eq!(refused, Outcome::Conflict);
        assert!(matches!(one.transact(transaction).await.expect("valid"), Outcome::Committed(_)));
    }

    #[tokio::test]
    async fn detects_an_emptied_store() {
        let store = store();
        let identity = Identity::load_or_create(store.as_ref()).await.expect("made");
        let waiting = timeout(Duration::from_millis(20), identity.wait_until_replaced(&store)).await;
        assert!(waiting.is_err(), "the identity is present");
        let lost = tokio::spawn({
            let (store, identity) = (store.clone(), identity.clone());
            async move { identity.wait_until_replaced(&store).await }
        });
        delete(store.as_ref(), &identity.key).await;
        timeout(Duration::from_secs(10), lost).await.expect("detected").expect("no panic");
        delete(store.as_ref(), b"identity").await;
        assert_ne!(Identity::load_or_create(store.as_ref()).await.expect("made again"), identity);
    }
}
