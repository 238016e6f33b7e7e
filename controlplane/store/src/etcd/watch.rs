//! A watch that outlives its connection.

use std::time::Duration;

use etcd_client::{EventType, WatchOptions, WatchResponse, WatchStream};
use tokio::time::sleep;

use super::calls::{denied, revision, unavailable, wire, within};
use super::{EtcdStore, MESSAGE_BYTES_MAX};
use crate::contract::{Event, Revision, Store, StoreFuture, WatchBatch, WatchSource};
use crate::error::StoreError;

/// Pauses between attempts to open a watch again: doubling up to the last.
const REOPEN_PAUSE_MIN: Duration = Duration::from_millis(50);
const REOPEN_PAUSE_MAX: Duration = Duration::from_secs(2);

/// See the module.
pub(super) struct Source {
    store: EtcdStore,
    prefix: Vec<u8>,
    /// The first revision not yet reported.
    next: u64,
    stream: Option<WatchStream>,
    pause: Duration,
}

impl Source {
    /// A watch that is open.
    pub(super) async fn start(
        store: EtcdStore,
        prefix: Vec<u8>,
        from: Revision,
    ) -> Result<Source, StoreError> {
        // 0 would mean from now on.
        let next = from.0.max(1);
        let mut source = Source { store, prefix, next, stream: None, pause: REOPEN_PAUSE_MIN };
        source.open().await?;
        Ok(source)
    }

    async fn open(&mut self) -> Result<(), StoreError> {
        // A token that has expired is renewed by calls, and not by watches. And an etcd that has gone back is noticed: a watch
        // would wait for a revision that others will make.
        self.store.revision().await?;
        let mut client = self.store.client.watch_client().max_decoding_message_size(MESSAGE_BYTES_MAX);
        let prefix = self.store.full(&self.prefix);
        let options = WatchOptions::new().with_prefix().with_start_revision(wire(self.next));
        self.stream = Some(within(client.watch(prefix, Some(options))).await?);
        Ok(())
    }

    /// What an answer says; `None` when it says nothing new.
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
        self.store.history.seen(last);
        Ok(Some(WatchBatch { revision: last, events }))
    }
}

impl WatchSource for Source {
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
