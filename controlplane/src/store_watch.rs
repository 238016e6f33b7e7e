//! Lists the records of one family in the store and then follows every change, across failures of the store.
//!
//! [`reprise_controlplane_core::record_watch`] decides which call is next.

use std::sync::Arc;

use reprise_controlplane_core::record_watch::{RecordCall, RecordChange, RecordUpdate, WatchEnd};
use reprise_controlplane_store::{Event, KeyValue, Range, Revision, Store, StoreError, WatchBatch};
use tokio::time::sleep;

use crate::store_keys::Family;

/// How the records of a family are listed and decoded.
#[derive(Clone, Copy, Debug)]
pub struct Records<K, V> {
    /// Family of the records.
    pub family: Family,
    /// Maximum number of records in a listing.
    pub limit: usize,
    /// Decodes the name in a key; records with an invalid name are ignored.
    pub name: fn(&str) -> Option<K>,
    /// Decodes a record; logs an invalid one.
    pub read: fn(&KeyValue) -> Option<V>,
}

impl<K, V> Records<K, V> {
    /// Decodes a listing of the family.
    pub fn listing(&self, range: &Range) -> RecordUpdate<K, V> {
        let record = |entry| Some((self.name_of(entry)?, (self.read)(entry)));
        RecordUpdate::All(range.entries.iter().filter_map(record).collect())
    }

    fn changes(&self, batch: &WatchBatch) -> RecordUpdate<K, V> {
        let change = |event: &Event| match event {
            Event::Put(entry) => Some(RecordChange::Put(self.name_of(entry)?, (self.read)(entry))),
            Event::Deleted { key, revision } => {
                let name = self.family.name(key).and_then(self.name)?;
                Some(RecordChange::Deleted(name, revision.0))
            }
        };
        RecordUpdate::Changes(batch.events.iter().filter_map(change).collect())
    }

    fn name_of(&self, entry: &KeyValue) -> Option<K> {
        let name = self.family.name(&entry.key).and_then(self.name);
        if name.is_none() {
            let key = String::from_utf8_lossy(&entry.key);
            tracing::error!(%key, "ignoring a record with an invalid name: remove it from the store");
        }
        name
    }
}

/// Follows the records of a family; never returns. `apply` receives every update in order, with the revision of
/// the store after it. After a failure, or if changes were compacted meanwhile, it receives all records again.
pub async fn follow<K, V>(
    store: &Arc<dyn Store>,
    records: Records<K, V>,
    mut apply: impl FnMut(Revision, RecordUpdate<K, V>),
) {
    let prefix = records.family.prefix();
    let mut call = RecordCall::first();
    loop {
        let ended = match call {
            RecordCall::List(pause) => {
                sleep(pause).await;
                store.range(prefix.as_bytes(), records.limit).await.map(|range| {
                    tracing::info!(recovered = "store_not_followed", prefix, "following the store");
                    apply(range.revision, records.listing(&range));
                    RecordCall::after_list(range.revision.0)
                })
            }
            RecordCall::Watch(from) => watch(store, &records, from, &mut apply).await,
        };
        call = ended.unwrap_or_else(|error| match error {
            StoreError::Compacted { .. } => RecordCall::after(WatchEnd::Compacted),
            error => {
                tracing::warn!(
                    condition = "store_not_followed",
                    %error,
                    prefix,
                    "cannot follow the store; retrying"
                );
                RecordCall::after(WatchEnd::Failed)
            }
        });
    }
}

/// Applies changes from a revision on, until the watch ends with an error.
async fn watch<K, V>(
    store: &Arc<dyn Store>,
    records: &Records<K, V>,
    from: u64,
    apply: &mut impl FnMut(Revision, RecordUpdate<K, V>),
) -> Result<RecordCall, StoreError> {
    let mut watch = store.watch(records.family.prefix().as_bytes(), Revision(from)).await?;
    loop {
        let batch = watch.next().await?;
        apply(batch.revision, records.changes(&batch));
    }
}
