//! The publisher: this member's changes as numbered batches of KV events, for routers that follow vLLM.
//!
//! ```text
//!   ChangeReader ──► batches ──► buffer: the last `buffer_steps` ──► subscribers, each at its own number
//!                                             └───────────────────► replays
//! ```
//!
//! Batches are numbered from 0 in each run of the member. The first batches of a run, and of every later
//! snapshot, clear all earlier state. A snapshot is needed where the format cannot express a change: hash
//! slots moved to another member, or the reader fell behind the log.
//!
//! Invariants:
//! * A number identifies one batch within a run, and numbers have no gaps.
//! * A subscriber that applies all batches from the first, or a replay and all batches after it, has the
//!   state of the directory.
//! * The publisher never waits. A subscriber that lags by more than `buffer_steps` batches misses some, and
//!   detects it by the numbers.
//!
//! 10,000 batches of at most 4.8 KiB take 48 MiB, shared by all subscribers and replays.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use bytes::Bytes;
use reprise_controlplane_core::{FollowerMessage, LiveNodes, Run};
use reprise_daemon::connections::ConnectionLimit;
use reprise_identity::Security;
use reprise_policy::NodeId;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use super::format::{self, BLOCKS_PER_BATCH_MAX, Seconds};
use super::zmtp::Role;
use super::{ChangeReader, sockets};
use crate::background::Background;
use crate::cluster::Cluster;
use crate::config::EventsConfig;

/// Changes that are split into batches together: 200 KiB. Snapshots are read by hash, so with 100 nodes each
/// node has about 80 of them.
const PART_BLOCKS: usize = 8192;

/// Addresses of a running publisher.
#[derive(Debug)]
pub struct Publisher {
    /// Address of the PUB socket.
    pub publish: SocketAddr,
    /// Address of the ROUTER socket for replays.
    pub replay: Option<SocketAddr>,
}

/// State that the tasks of the publisher share.
#[derive(Debug)]
pub(super) struct Hub {
    pub(super) cluster: Arc<Cluster>,
    /// First frame of every message.
    pub(super) topic: String,
    /// Permit to read a snapshot, for one replay at a time.
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
    /// Nodes with published events.
    known: LiveNodes,
}

/// A batch by its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Batch {
    /// Payload of the batch.
    Available(Bytes),
    /// Evicted from the buffer, whose first number is `oldest`.
    Evicted { oldest: u64 },
    /// Not published yet.
    Pending,
}

impl Publisher {
    /// Starts to publish in the background, if configured. Errors name the setting to change.
    pub async fn start(
        cluster: Arc<Cluster>,
        (config, security): (&EventsConfig, &Security),
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
            let limit = match security {
                Security::Plain => ConnectionLimit::new(of, config.subscribers, rejected),
                Security::Tls(_) => {
                    let shares = (config.subscribers, config.subscribers.div_ceil(2));
                    ConnectionLimit::with_share(of, shares, rejected)
                }
            };
            let listening = (listener, security.clone());
            background.spawn_permanent(field, sockets::serve(listening, role, hub.clone(), limit));
            Ok(address)
        };
        let publish = serve("events.publish", publish, Role::Publisher).await?;
        let replay = match config.replay {
            Some(address) => Some(serve("events.replay", address, Role::Router).await?),
            None => None,
        };
        background.spawn_permanent("KV events", run_publisher(hub));
        tracing::info!(%publish, replay = replay.map(tracing::field::display), "publishing KV events");
        Ok(Some(Publisher { publish, replay }))
    }
}

async fn run_publisher(hub: Arc<Hub>) {
    let read = || ChangeReader::new(hub.cluster.clone(), None, PART_BLOCKS);
    let mut reader = read();
    while let Some(message) = reader.next().await {
        match message {
            FollowerMessage::SnapshotBegins(_) => hub.begin_snapshot(),
            FollowerMessage::Run { run: Run::Changes(changes), .. } => {
                let known = changes.iter().map(|change| change.node);
                hub.push(known, format::changed(now(), &changes, BLOCKS_PER_BATCH_MAX));
            }
            FollowerMessage::Run { run: Run::Cleared { node: Some(node), slots }, .. }
                if slots.is_empty() =>
            {
                hub.push([node], [format::cleared(now(), Some(node))]);
            }
            // The format has no event for some slots of a node, or for some slots of all nodes: start with a
            // snapshot.
            FollowerMessage::Run { run: Run::Cleared { .. }, .. } => reader = read(),
            FollowerMessage::Current(_) => {}
        }
        // Reading may never wait, so let other tasks run.
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

    /// Publishes batches that concern these nodes.
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

    /// Clears everything published so far.
    fn begin_snapshot(&self) {
        let known = self.known();
        self.push([], clear_batches(&known));
    }

    pub(super) fn batch(&self, number: u64) -> Batch {
        let state = self.state();
        let oldest = state.oldest();
        if number >= state.next {
            return Batch::Pending;
        }
        // The buffer's length fits in usize.
        let index = number.checked_sub(oldest).and_then(|index| usize::try_from(index).ok());
        match index.and_then(|index| state.buffer.get(index)) {
            Some(batch) => Batch::Available(batch.clone()),
            None => Batch::Evicted { oldest },
        }
    }

    /// Numbers of the oldest buffered batch and of the next one.
    pub(super) fn buffered(&self) -> std::ops::Range<u64> {
        let state = self.state();
        state.oldest()..state.next
    }

    /// Nodes with published events.
    pub(super) fn known(&self) -> Vec<NodeId> {
        let state = self.state();
        (0..=u16::MAX).map(NodeId).filter(|node| state.known.contains(*node)).collect()
    }

    /// Watch of the next batch's number.
    pub(super) fn published(&self) -> watch::Receiver<u64> {
        self.published.subscribe()
    }

    /// Locks the state. A poisoned lock is usable, because a panic cannot leave a change half applied.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn oldest(&self) -> u64 {
        self.next - self.buffer.len() as u64
    }
}

/// Batches that clear all nodes, and then each of these nodes: for subscribers that keep state by node, and
/// for subscribers with state of an earlier run.
pub(super) fn clear_batches(known: &[NodeId]) -> impl Iterator<Item = Vec<u8>> {
    let ts = now();
    let nodes = std::iter::once(None).chain(known.iter().copied().map(Some));
    nodes.map(move |node| format::cleared(ts, node))
}

/// Current wall-clock time; 0 before 1970.
pub(super) fn now() -> Seconds {
    Seconds(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64())
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use reprise_controlplane_core::{Changes, LivenessSettings, Opening, Scope, Update};
    use reprise_policy::{BlockKey, Epoch, SlotSet};
    use rmpv::Value;

    use super::*;
    use crate::events::Events;
    use crate::metrics::Metrics;

    const NODE: NodeId = NodeId(7);

    pub(crate) fn cluster() -> Arc<Cluster> {
        let settings =
            LivenessSettings { dead_after: Duration::from_secs(1), forget_after: Duration::from_secs(1) };
        let cluster = Cluster::new(settings, 1, Events::new(1 << 20), Metrics::new().0);
        let mut directory = cluster.directory_mut();
        directory.set_owned_slots(&SlotSet::ALL);
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

    /// Applies a change of one key with an explicit sequence number.
    fn change(cluster: &Cluster, sequence: u64, key: BlockKey, operation: u8) {
        let operations = [operation];
        let changes = Changes::parse(&key.0, &operations).expect("well formed");
        let (opening, ends) = (Opening::Nothing, &SlotSet::EMPTY);
        // Sequence number 0 is the opening.
        let update = Update { node: NODE, epoch: Epoch(1), sequence: 1 + sequence, opening, changes, ends };
        let mut directory = cluster.directory_mut();
        directory.update(&update);
        cluster.events.record_changes(NODE, directory.accepted_changes(NODE, changes));
    }

    fn key(slot: u8) -> BlockKey {
        BlockKey([slot; 16])
    }

    /// Node, type and number of blocks of the single event of a batch.
    fn only_event(batch: &[u8]) -> (Option<u64>, String, usize) {
        let batch = rmpv::decode::read_value(&mut &*batch).expect("msgpack");
        let event: &Value = &batch[1][0];
        let blocks = event["block_hashes"].as_array().map_or(0, Vec::len);
        (batch[2].as_u64(), event["type"].as_str().expect("a type").to_owned(), blocks)
    }

    /// Reads batches until one satisfies `last`.
    async fn until(hub: &Hub, next: &mut u64, last: impl Fn(&(Option<u64>, String, usize)) -> bool) {
        let mut published = hub.published();
        loop {
            match hub.batch(*next) {
                Batch::Available(batch) => {
                    *next += 1;
                    if last(&only_event(&batch)) {
                        return;
                    }
                }
                Batch::Pending => published.changed().await.expect("the sender exists"),
                Batch::Evicted { .. } => panic!("all are buffered"),
            }
        }
    }

    #[tokio::test]
    async fn publishes_a_snapshot_after_slots_moved_to_another_member() {
        let cluster = cluster();
        let hub = Arc::new(Hub::new(cluster.clone(), &EventsConfig::default()));
        let publishing = tokio::spawn(run_publisher(hub.clone()));
        let mut next = 0;
        change(&cluster, 0, key(1), 1);
        change(&cluster, 1, key(2), 1);
        until(&hub, &mut next, |event| *event == (Some(7), "BlockStored".to_owned(), 2)).await;
        change(&cluster, 2, key(1), 0x81);
        cluster.events.record_clearing(Scope::slot(key(1).hash_slot()));
        until(&hub, &mut next, |event| *event == (None, "AllBlocksCleared".to_owned(), 0)).await;
        until(&hub, &mut next, |event| *event == (Some(7), "AllBlocksCleared".to_owned(), 0)).await;
        until(&hub, &mut next, |event| *event == (Some(7), "BlockStored".to_owned(), 1)).await;
        cluster.events.close();
        publishing.await.expect("ends with the member");
    }
}
