//! Records of one family in the store, followed: all of them first, then every change, whatever happens to the store.

use std::sync::Arc;
use std::time::Duration;

use reprise_controlplane_store::{Event, KeyValue, Range, Revision, Store, StoreError, WatchBatch};
use tokio::time::sleep;

use crate::keys::Family;

/// Pause after the store failed.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// What whoever follows is told.
#[derive(Clone, Copy, Debug)]
pub enum News<'a> {
    /// All records, in the order of their keys; there are no others.
    All(&'a Range),
    /// Changes since, in order.
    Changes(&'a WatchBatch),
}

impl<'a> News<'a> {
    /// A revision of the store at which the records are what they are with these news.
    pub fn revision(&self) -> Revision {
        match self {
            News::All(range) => range.revision,
            News::Changes(batch) => batch.revision,
        }
    }

    /// The records that there are now, or that were put; for those who need not know of deletions.
    pub fn entries(&self) -> impl Iterator<Item = &'a KeyValue> + use<'a> {
        let (all, changes): (&[KeyValue], &[Event]) = match self {
            News::All(range) => (&range.entries, &[]),
            News::Changes(batch) => (&[], &batch.events),
        };
        let put = changes.iter().filter_map(|event| match event {
            Event::Put(entry) => Some(entry),
            Event::Deleted { .. } => None,
        });
        all.iter().chain(put)
    }
}

/// Follows at most `limit` records of a family; never returns. `take` is told everything in order, also when the store was
/// away or has compacted what came meanwhile: then it is told all records again.
pub async fn follow(store: &Arc<dyn Store>, family: Family, limit: usize, mut take: impl FnMut(News<'_>)) {
    let prefix = family.prefix();
    loop {
        let mut answered = false;
        let error = follow_on(store, family, limit, |news| {
            if !std::mem::replace(&mut answered, true) {
                tracing::info!(recovered = "store_not_followed", prefix, "following the store again");
            }
            take(news);
        })
        .await;
        match error {
            // Read the range again, at once.
            StoreError::Compacted { .. } => {}
            error => {
                tracing::warn!(
                    condition = "store_not_followed",
                    %error,
                    prefix,
                    "the store cannot be followed; trying again"
                );
                sleep(RETRY_AFTER).await;
            }
        }
    }
}

/// Follows until the store fails.
async fn follow_on(
    store: &Arc<dyn Store>,
    family: Family,
    limit: usize,
    mut take: impl FnMut(News<'_>),
) -> StoreError {
    let prefix = family.prefix().as_bytes();
    let follow = async {
        let range = store.range(prefix, limit).await?;
        take(News::All(&range));
        let mut watch = store.watch(prefix, Revision(range.revision.0 + 1)).await?;
        loop {
            take(News::Changes(&watch.next().await?));
        }
    };
    let ended: Result<std::convert::Infallible, StoreError> = follow.await;
    let Err(error) = ended;
    error
}
