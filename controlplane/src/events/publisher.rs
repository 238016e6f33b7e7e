//! The publisher: this member's changes as numbered batches of KV events, for routers that follow vLLM.
//!
//! ```text
//!   Reading ──► batches ──► Buffer: the last `buffer_steps` of them ──► each subscriber, from a number of its own
//!                                    └──────────────────────────────► replays
//! ```
//!
//! Batches are numbered from 0 within one life of the member. The first of a life, and of every snapshot in between, says
//! that everything is void. A snapshot comes where the format has no words for what happened: hash slots that went to
//! another member, or a log that went on faster than it was read.
//!
//! Invariants:
//! * A number means one batch for ever, and numbers have no gaps.
//! * Whoever applies all batches from the first, or a replay and all batches behind it, holds what the directory held.
//! * Nobody is waited for: a subscriber that is slower than `buffer_steps` batches misses some and sees it in the numbers.
//!
//! Arithmetic: 10,000 batches of at most 4.8 KiB are 48 MiB, shared by all subscribers and replays.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use bytes::Bytes;
use reprise_controlplane_core::{LiveNodes, Run, Told};
use reprise_daemon::connections::ConnectionLimit;
use reprise_policy::NodeId;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use super::format::{self, BLOCKS_PER_BATCH_MAX, Seconds};
use super::zmtp::Role;
use super::{Reading, sockets};
use crate::background::Background;
use crate::cluster::Cluster;
use crate::config::EventsConfig;

/// Changes that are cut into batches together, 200 KiB: replicas of a snapshot come by hash, so 100 nodes have 80 each in it.
const PART_BLOCKS: usize = 8192;

/// Where a running publisher is found.
#[derive(Debug)]
pub struct Publisher {
    /// Where it publishes.
    pub publish: SocketAddr,
    /// Where it answers replays.
    pub replay: Option<SocketAddr>,
}

/// What its tasks share.
#[derive(Debug)]
pub(super) struct Hub {
    pub(super) cluster: Arc<Cluster>,
    /// First frame of every message.
    pub(super) topic: String,
    /// Snapshots are read for one replay at a time.
    pub(super) snapshots: Semaphore,
    state: Mutex<State>,
    /// Number of the next batch.
    published: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    buffer: VecDeque<Bytes>,
    buffer_steps: usize,
    /// Number of the next batch.
    next: u64,
    /// Nodes of which something was published.
    known: LiveNodes,
}

/// What there is of a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Batch {
    /// Its payload.
    There(Bytes),
    /// It was published and is not kept any more; this is the oldest that is.
    Gone { oldest: u64 },
    /// It is yet to be published.
    NotYet,
}

impl Publisher {
    /// Starts to publish in the background, where the configuration says so. Errors say what to change.
    pub async fn start(
        cluster: Arc<Cluster>,
        config: &EventsConfig,
        background: &mut Background,
    ) -> anyhow::Result<Option<Publisher>> {
        let Some(publish) = config.publish else { return Ok(None) };
        let hub = Arc::new(Hub::new(cluster, config));
        let mut serve = async |field, address, role: Role| -> anyhow::Result<SocketAddr> {
            let listener = TcpListener::bind(address)
                .await
                .with_context(|| format!("cannot listen on {address}: change '{field}' or free it"))?;
            let address = listener.local_addr()?;
            let (of, rejected) = (role.listener(), hub.cluster.metrics.rejected.clone());
            let limit = ConnectionLimit::new(of, config.subscribers, rejected);
            background.for_ever(field, sockets::serve(listener, role, hub.clone(), limit));
            Ok(address)
        };
        let publish = serve("events.publish", publish, Role::Publisher).await?;
        let replay = match config.replay {
            Some(address) => Some(serve("events.replay", address, Role::Router).await?),
            None => None,
        };
        background.for_ever("KV events", publish_for_ever(hub));
        tracing::info!(%publish, replay = replay.map(tracing::field::display), "publishing KV events");
        Ok(Some(Publisher { publish, replay }))
    }
}

async fn publish_for_ever(hub: Arc<Hub>) {
    let read = || Reading::new(hub.cluster.clone(), None, PART_BLOCKS);
    let mut reading = read();
    while let Some(told) = reading.next().await {
        match told {
            Told::SnapshotBegins(_) => hub.begin_snapshot(),
            Told::Run { run: Run::Changes(changes), .. } => {
                let known = changes.iter().map(|change| change.node);
                hub.push(known, format::changed(now(), &changes, BLOCKS_PER_BATCH_MAX));
            }
            Told::Run { run: Run::Cleared { node: Some(node), slots }, .. } if slots.is_empty() => {
                hub.push([node], [format::cleared(now(), Some(node))]);
            }
            // There is no event for a part of a node, or for a part of all.
            Told::Run { run: Run::Cleared { .. }, .. } => reading = read(),
            Told::Current(_) => {}
        }
        // Whoever reads faster than it waits still lets others run.
        tokio::task::yield_now().await;
    }
}

impl Hub {
    pub(super) fn new(cluster: Arc<Cluster>, config: &EventsConfig) -> Hub {
        let state = State {
            buffer: VecDeque::new(),
            buffer_steps: config.buffer_steps,
            next: 0,
            known: LiveNodes::default(),
        };
        Hub {
            cluster,
            topic: config.topic.clone(),
            snapshots: Semaphore::new(1),
            state: Mutex::new(state),
            published: watch::Sender::new(0),
        }
    }

    /// Publishes batches that are about these nodes.
    pub(super) fn push(
        &self,
        known: impl IntoIterator<Item = NodeId>,
        batches: impl IntoIterator<Item = Vec<u8>>,
    ) {
        let mut state = self.state();
        known.into_iter().for_each(|node| state.known.insert(node));
        for batch in batches {
            if state.buffer.len() == state.buffer_steps {
                state.buffer.pop_front();
            }
            state.buffer.push_back(batch.into());
            state.next += 1;
            self.cluster.metrics.event_batches.inc();
        }
        self.published.send_replace(state.next);
    }

    /// Everything published is void.
    fn begin_snapshot(&self) {
        let known = self.known();
        self.push([], clearings(&known));
    }

    pub(super) fn batch(&self, number: u64) -> Batch {
        let state = self.state();
        let oldest = state.oldest();
        if number >= state.next {
            return Batch::NotYet;
        }
        // The buffer's length is a number of places in memory.
        let index = number.checked_sub(oldest).and_then(|index| usize::try_from(index).ok());
        match index.and_then(|index| state.buffer.get(index)) {
            Some(batch) => Batch::There(batch.clone()),
            None => Batch::Gone { oldest },
        }
    }

    /// Numbers of the oldest batch that is kept and of the next one.
    pub(super) fn kept(&self) -> std::ops::Range<u64> {
        let state = self.state();
        state.oldest()..state.next
    }

    /// Nodes of which something was published.
    pub(super) fn known(&self) -> Vec<NodeId> {
        let state = self.state();
        (0..=u16::MAX).map(NodeId).filter(|node| state.known.contains(*node)).collect()
    }

    /// The number of the next batch, whenever it changes.
    pub(super) fn published(&self) -> watch::Receiver<u64> {
        self.published.subscribe()
    }

    /// Each change is whole, so a poisoned lock is as good as any.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn oldest(&self) -> u64 {
        self.next - self.buffer.len() as u64
    }
}

/// Batches that void what was told of these nodes, and before that of all: for subscribers that file by node, and for those
/// that have it from a former life.
pub(super) fn clearings(known: &[NodeId]) -> impl Iterator<Item = Vec<u8>> {
    let ts = now();
    let nodes = std::iter::once(None).chain(known.iter().copied().map(Some));
    nodes.map(move |node| format::cleared(ts, node))
}

/// The time by the machine's clock; before 1970 it is 0.
pub(super) fn now() -> Seconds {
    Seconds(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64())
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use reprise_controlplane_core::{Changes, MemberSettings, Opening, Scope, Update};
    use reprise_policy::{BlockKey, Epoch, SlotSet};
    use rmpv::Value;

    use super::*;
    use crate::events::Events;
    use crate::metrics::Metrics;

    const NODE: NodeId = NodeId(7);

    pub(crate) fn cluster() -> Arc<Cluster> {
        let settings =
            MemberSettings { dead_after: Duration::from_secs(1), forget_after: Duration::from_secs(1) };
        let cluster = Cluster::new(settings, 1, Events::new(1 << 20), Metrics::new().0);
        let mut directory = cluster.directory_mut();
        directory.own(&SlotSet::ALL);
        directory.register(NODE, Epoch(1));
        directory.update(&Update {
            node: NODE,
            epoch: Epoch(1),
            sequence: 0,
            opening: Opening::Slots(&SlotSet::ALL),
            changes: Changes::parse(&[], &[]).expect("no changes"),
            ends: &SlotSet::ALL,
        });
        drop(directory);
        Arc::new(cluster)
    }

    /// A change of one key, numbered by the caller.
    fn change(cluster: &Cluster, sequence: u64, key: BlockKey, operation: u8) {
        let operations = [operation];
        let changes = Changes::parse(&key.0, &operations).expect("well formed");
        let (opening, ends) = (Opening::Nothing, &SlotSet::EMPTY);
        // Number 0 was that of the opening.
        let update = Update { node: NODE, epoch: Epoch(1), sequence: 1 + sequence, opening, changes, ends };
        let mut directory = cluster.directory_mut();
        directory.update(&update);
        cluster.events.changed(NODE, directory.taken(NODE, changes));
    }

    fn key(slot: u8) -> BlockKey {
        BlockKey([slot; 16])
    }

    /// Node, type and number of blocks of the only event of a batch.
    fn told(batch: &[u8]) -> (Option<u64>, String, usize) {
        let batch = rmpv::decode::read_value(&mut &*batch).expect("msgpack");
        let event: &Value = &batch[1][0];
        let blocks = event["block_hashes"].as_array().map_or(0, Vec::len);
        (batch[2].as_u64(), event["type"].as_str().expect("a type").to_owned(), blocks)
    }

    /// Takes batches until one satisfies `last`.
    async fn until(hub: &Hub, next: &mut u64, last: impl Fn(&(Option<u64>, String, usize)) -> bool) {
        let mut published = hub.published();
        loop {
            match hub.batch(*next) {
                Batch::There(batch) => {
                    *next += 1;
                    if last(&told(&batch)) {
                        return;
                    }
                }
                Batch::NotYet => published.changed().await.expect("it is published"),
                Batch::Gone { .. } => panic!("all are kept"),
            }
        }
    }

    #[tokio::test]
    async fn hash_slots_that_went_to_another_member_are_told_by_a_new_snapshot() {
        let cluster = cluster();
        let hub = Arc::new(Hub::new(cluster.clone(), &EventsConfig::default()));
        let publishing = tokio::spawn(publish_for_ever(hub.clone()));
        let mut next = 0;
        change(&cluster, 0, key(1), 1);
        change(&cluster, 1, key(2), 1);
        until(&hub, &mut next, |event| *event == (Some(7), "BlockStored".to_owned(), 2)).await;
        change(&cluster, 2, key(1), 0x81);
        cluster.events.cleared(Scope::slot(key(1).hash_slot()));
        until(&hub, &mut next, |event| *event == (None, "AllBlocksCleared".to_owned(), 0)).await;
        until(&hub, &mut next, |event| *event == (Some(7), "AllBlocksCleared".to_owned(), 0)).await;
        until(&hub, &mut next, |event| *event == (Some(7), "BlockStored".to_owned(), 1)).await;
        cluster.events.close();
        publishing.await.expect("it ends with the member");
    }
}
