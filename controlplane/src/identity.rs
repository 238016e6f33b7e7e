//! Which store this is: a member must not go on with what it knows from one store when it is another now.
//!
//! It is a random text under one key, and in the name of another one ([`crate::keys`]).
//!
//! A store that is emptied, or restored from a backup, while members run gives out node numbers again that they know as
//! others'. So every registration is conditional on the store's identity ([`Identity::unchanged`]), and a member that finds
//! another one ends: the next process begins anew, and agents announce everything to it. That the random text is in a key makes
//! the condition one of those that a [`Store`] has.
//!
//! A store that is restored keeps its identity. Whoever has seen more than the backup holds notices
//! ([`StoreError::Replaced`]), and takes the identity from the store: so all other members end as well, and epochs begin at a new
//! number, also those of nodes that the backup does not know.
//!
//! Epochs of registrations begin at a number of the identity, so that no registration under one store is taken for one
//! under another.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use reprise_controlplane_store::{
    Condition, Outcome, Range, Revision, Store, StoreError, Transaction, Write,
};
use reprise_policy::Epoch;
use tokio::time::sleep;

use crate::keys::Key;

/// Attempts against other members that start at the same moment: one of them succeeds.
const ATTEMPTS_MAX: usize = 8;
/// Pause after the store failed.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// The identity of a store, as it was when this was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    key: Vec<u8>,
    revision: Revision,
    /// 31 random bits.
    number: u32,
}

impl Identity {
    /// Reads it; gives the store one when it has none.
    ///
    /// # Errors
    /// The store's.
    pub async fn of(store: &dyn Store) -> Result<Identity, StoreError> {
        let mut last = StoreError::Unavailable { reason: "its identity changes all the time".to_owned() };
        for _ in 0..ATTEMPTS_MAX {
            match Identity::read(store).await {
                Ok(Some(identity)) => return Ok(identity),
                Ok(None) => drop(create(store).await?),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Holds while the store is the same.
    pub fn unchanged(&self) -> Condition {
        Condition::Modified { key: self.key.clone(), revision: self.revision }
    }

    /// Whether the store is still the same.
    ///
    /// # Errors
    /// The store's.
    pub async fn is_of(&self, store: &dyn Store) -> Result<bool, StoreError> {
        Ok(store.get(&self.key).await?.is_some_and(|entry| entry.modified == self.revision))
    }

    /// Below every epoch of a registration under this store.
    pub fn epoch_base(&self) -> Epoch {
        Epoch(u64::from(self.number) << 32)
    }

    /// Waits until the store is another one, or was restored from a backup; in the second case it has this identity no more
    /// when this returns, if it answers.
    pub async fn lost(&self, store: &Arc<dyn Store>) {
        loop {
            // A watch ends with the connection, and a store that was emptied has ended its connections.
            match store.range(&self.key, 1).await {
                Ok(range) if !self.is_in(&range) => return,
                Ok(range) => match store.watch(&self.key, Revision(range.revision.0 + 1)).await {
                    Ok(mut watch) => {
                        // Anything that happens to it is its end; whether it has gone back the next look shows.
                        if watch.next().await.is_ok() {
                            return;
                        }
                    }
                    Err(error) => tracing::debug!(%error, "the identity of the store cannot be watched"),
                },
                Err(StoreError::Replaced { reason }) => {
                    tracing::info!(reason, "the store is another than before: its identity is taken from it");
                    return self.end(store.as_ref()).await;
                }
                Err(error) => tracing::debug!(%error, "the identity of the store cannot be read"),
            }
            sleep(RETRY_AFTER).await;
        }
    }

    /// Takes the identity from the store, where it is there.
    async fn end(&self, store: &dyn Store) {
        let conditions = vec![self.unchanged()];
        let writes = [Key::Identity.bytes(), self.key.clone()].map(|key| Write::Delete { key }).to_vec();
        match store.transact(Transaction { conditions, writes }).await {
            // That it is another store is known; the identity is gone.
            Ok(_) | Err(StoreError::Replaced { .. }) => {}
            Err(error) => tracing::warn!(
                %error,
                "other members may not notice that the store was restored from a backup: start them again"
            ),
        }
    }

    fn is_in(&self, range: &Range) -> bool {
        range.entries.first().is_some_and(|entry| entry.key == self.key && entry.modified == self.revision)
    }

    async fn read(store: &dyn Store) -> Result<Option<Identity>, StoreError> {
        let Some(entry) = store.get(&Key::Identity.bytes()).await? else { return Ok(None) };
        // Ours is text; any other is as good as long as it stays.
        let text = String::from_utf8_lossy(&entry.value);
        let key = Key::IdentityOf(&text).bytes();
        let number = text.get(..8);
        let number = number.and_then(|text| u32::from_str_radix(text, 16).ok()).unwrap_or_default() >> 1;
        Ok(store.get(&key).await?.map(|entry| Identity { key, revision: entry.modified, number }))
    }
}

async fn create(store: &dyn Store) -> Result<Outcome, StoreError> {
    // The standard library seeds each `RandomState` differently: enough to tell stores apart.
    let text = format!("{:016x}", RandomState::new().hash_one("identity"));
    let key = Key::IdentityOf(&text).bytes();
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
    async fn members_of_a_store_agree_about_it_and_other_stores_are_others() {
        let (one, other) = (store(), store());
        let identity = Identity::of(one.as_ref()).await.expect("made");
        assert_eq!(Identity::of(one.as_ref()).await.expect("read"), identity);
        assert!(identity.is_of(one.as_ref()).await.expect("read"));
        assert_ne!(Identity::of(other.as_ref()).await.expect("made"), identity);
        assert!(!identity.is_of(other.as_ref()).await.expect("read"));
        // As a registration would.
        let writes = vec![Write::Put { key: b"nodes/a".to_vec(), value: Vec::new(), lease: None }];
        let conditions = vec![identity.unchanged()];
        let transaction = Transaction { conditions, writes };
        let refused = other.transact(transaction.clone()).await.expect("valid");
        assert_eq!(refused, Outcome::Conflict);
        assert!(matches!(one.transact(transaction).await.expect("valid"), Outcome::Committed(_)));
    }

    #[tokio::test]
    async fn a_store_that_is_emptied_is_noticed() {
        let store = store();
        let identity = Identity::of(store.as_ref()).await.expect("made");
        let waiting = timeout(Duration::from_millis(20), identity.lost(&store)).await;
        assert!(waiting.is_err(), "it is there");
        let lost = tokio::spawn({
            let (store, identity) = (store.clone(), identity.clone());
            async move { identity.lost(&store).await }
        });
        delete(store.as_ref(), &identity.key).await;
        timeout(Duration::from_secs(10), lost).await.expect("noticed").expect("no panic");
        delete(store.as_ref(), b"identity").await;
        assert_ne!(Identity::of(store.as_ref()).await.expect("made again"), identity);
    }
}
