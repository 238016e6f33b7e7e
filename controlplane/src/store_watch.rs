//! Lists the records of one family in the store and then follows every change, across failures of the store.

use std::sync::Arc;
use std::time::Duration;

use reprise_controlplane_store::{Event, KeyValue, Range, Revision, Store, StoreError, WatchBatch};
use tokio::time::sleep;

use crate::store_keys::Family;

/// Pause after a failed access to the store.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// An update of a followed family.
#[derive(Clone, Copy, Debug)]
pub enum StoreUpdate<'a> {
    /// All records, in key order; any other record is gone.
    All(&'a Range),
    /// Changes since the last update, in order.
    Changes(&'a WatchBatch),
}

impl<'a> StoreUpdate<'a> {
    /// Store revision at which the records are as this update leaves them.
    pub fn revision(&self) -> Revision {
        match self {
            StoreUpdate::All(range) => range.revision,
            StoreUpdate::Changes(batch) => batch.revision,
        }
    }

    /// Current or written records, without deletions.
    pub fn entries(&self) -> impl Iterator<Item = &'a KeyValue> + use<'a> {
        let (all, changes): (&[KeyValue], &[Event]) = match self {
            StoreUpdate::All(range) => (&range.entries, &[]),
            StoreUpdate::Changes(batch) => (&[], &batch.events),
        };
        let put = changes.iter().filter_map(|event| match event {
            Event::Put(entry) => Some(entry),
            Event::Deleted { .. } => None,
        });
        all.iter().chain(put)
    }
}

/// Follows at most `limit` records of a family; never returns. `apply` receives every update in order. After
/// a failure, or if changes were compacted meanwhile, it receives all records again.
pub async fn follow(
    store: &Arc<dyn Store>,
    family: Family,
    limit: usize,
    mut apply: impl FnMut(StoreUpdate<'_>),
) {
    let prefix = family.prefix();
    loop {
        let mut answered = false;
        let error = follow_until_error(store, family, limit, |update| {
            if !std::mem::replace(&mut answered, true) {
                tracing::info!(recovered = "store_not_followed", prefix, "following the store");
            }
            apply(update);
        })
        .await;
        match error {
            // Changes were compacted away: list all records again, without a pause.
            StoreError::Compacted { .. } => {}
            error => {
                tracing::warn!(
                    condition = "store_not_followed",
                    %error,
                    prefix,
                    "cannot follow the store; retrying"
                );
                sleep(RETRY_AFTER).await;
            }
        }
    }
}

/// Follows until an error of the store, and returns it.
async fn follow_until_error(
    store: &Arc<dyn Store>,
    family: Family,
    limit: usize,
    mut apply: impl FnMut(StoreUpdate<'_>),
) -> StoreError {
    let prefix = family.prefix().as_bytes();
    let follow = async {
        let range = store.range(prefix, limit).await?;
        apply(StoreUpdate::All(&range));
        let mut watch = store.watch(prefix, Revision(range.revision.0 + 1)).await?;
        loop {
            apply(StoreUpdate::Changes(&watch.next().await?));
        }
    };
    let ended: Result<std::convert::Infallible, StoreError> = follow.await;
    let Err(error) = ended;
    error
}
