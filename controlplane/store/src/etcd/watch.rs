//! A watch that survives broken connections.

use std::time::Duration;

use etcd_client::{EventType, WatchOptions, WatchResponse, WatchStream};
use tokio::time::sleep;

use super::calls::{denied, revision, unavailable, wire, within};
use super::{EtcdStore, MESSAGE_BYTES_MAX};
use crate::contract::{Event, Revision, Store, StoreFuture, WatchBatch, WatchSource};
use crate::error::StoreError;

/// Pauses between attempts to reopen a watch, doubling from the first to the second.
const REOPEN_PAUSE_MIN: Duration = Duration::from_millis(50);
const REOPEN_PAUSE_MAX: Duration = Duration::from_secs(2);

/// A watch on etcd that reconnects.
pub(super) struct EtcdWatch {
    store: EtcdStore,
    prefix: Vec<u8>,
    /// First revision that was not reported yet.
    next: u64,
    stream: Option<WatchStream>,
    pause: Duration,
}

impl EtcdWatch {
    /// Opens a watch from revision `from`.
    pub(super) async fn start(
        store: EtcdStore,
        prefix: Vec<u8>,
        from: Revision,
    ) -> Result<EtcdWatch, StoreError> {
        // In etcd, 0 would start at the current revision.
        let next = from.0.max(1);
        let mut source = EtcdWatch { store, prefix, next, stream: None, pause: REOPEN_PAUSE_MIN };
        source.open().await?;
        Ok(source)
    }

    async fn open(&mut self) -> Result<(), StoreError> {
        // A call renews an expired token; a watch does not. The call also detects a restored etcd, for which
        // the watch would wait until its revision has caught up.
        self.store.revision().await?;
        let mut client = self.store.client().watch_client().max_decoding_message_size(MESSAGE_BYTES_MAX);
        let prefix = self.store.full(&self.prefix);
        let options = WatchOptions::new().with_prefix().with_start_revision(wire(self.next));
        self.stream = Some(within(client.watch(prefix, Some(options))).await?);
        Ok(())
    }

    /// Converts a reply to a batch; `None` without events.
    fn batch(&mut self, answer: &WatchResponse) -> Result<Option<WatchBatch>, StoreError> {
        if answer.compact_revision() > 0 {
            let oldest = Revision(revision(answer.compact_revision()).0 + 1);
            return Err(StoreError::Compacted { oldest });
        }
        if answer.canceled() {
            let reason = answer.cancel_reason();
            return Err(if reason.contains("permission denied") {
                denied(reason)
            } else {
                unavailable(reason)
            });
        }
        let mut events = Vec::with_capacity(answer.events().len());
        for event in answer.events() {
            let Some(entry) = event.kv() else { continue };
            events.push(match event.event_type() {
                EventType::Put => Event::Put(self.store.entry(entry)?),
                EventType::Delete => Event::Deleted {
                    key: self.store.key(entry.key())?.to_vec(),
                    revision: revision(entry.mod_revision()),
                },
            });
        }
        let Some(last) = events.last().map(Event::revision) else { return Ok(None) };
        self.next = last.0 + 1;
        self.store.revisions.record(last);
        Ok(Some(WatchBatch { revision: last, events }))
    }
}

impl WatchSource for EtcdWatch {
    fn next(&mut self) -> StoreFuture<'_, WatchBatch> {
        Box::pin(async move {
            loop {
                let answer = match &mut self.stream {
                    Some(stream) => stream.message().await,
                    None => {
                        sleep(self.pause).await;
                        self.pause = (self.pause * 2).min(REOPEN_PAUSE_MAX);
                        match self.open().await {
                            Ok(()) | Err(StoreError::Unavailable { .. }) => continue,
                            Err(error) => return Err(error),
                        }
                    }
                };
                match answer {
                    Ok(Some(answer)) => match self.batch(&answer) {
                        Ok(Some(batch)) => {
                            self.pause = REOPEN_PAUSE_MIN;
                            return Ok(batch);
                        }
                        Ok(None) => {}
                        Err(StoreError::Unavailable { .. }) => self.stream = None,
                        Err(error) => return Err(error),
                    },
                    Ok(None) | Err(_) => self.stream = None,
                }
            }
        })
    }
}
