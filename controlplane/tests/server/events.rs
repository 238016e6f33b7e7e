//! Following a directory: snapshot, later changes, resuming at a position, and a slow reader.

use std::collections::BTreeSet;

use reprise_controlplane::server::ControlPlane;
use reprise_policy::{BlockKey, ByteSize};
use reprise_proto::connection::is_absence;
use reprise_proto::controlplane::follow_reply::Event;
use reprise_proto::controlplane::snapshot_begins::Reason;
use reprise_proto::controlplane::{FollowReply, FollowRequest, Position};
use tokio::time::timeout;
use tonic::{Status, Streaming};

use crate::harness::{self, Node, PATIENCE};

/// State of a follower: node, key, tier.
type Replicas = BTreeSet<(u16, BlockKey, u8)>;

struct Follower {
    stream: Streaming<FollowReply>,
    held: Replicas,
    position: Option<Position>,
    snapshots: Vec<Reason>,
    /// Number of received messages.
    messages: usize,
}

impl Follower {
    async fn new(member: &ControlPlane, from: Option<Position>) -> Follower {
        let request = FollowRequest { from };
        let stream = harness::events(member).await.follow(request).await.expect("answered").into_inner();
        Follower { stream, held: Replicas::new(), position: from, snapshots: Vec::new(), messages: 0 }
    }

    async fn message(&mut self) -> Result<FollowReply, Status> {
        let message = timeout(PATIENCE, self.stream.message()).await.expect("in time")?;
        Ok(message.expect("the stream does not end by itself"))
    }

    /// Receives one message; returns whether it reports that the state is current.
    async fn take(&mut self) -> bool {
        let FollowReply { position, event } = self.message().await.expect("no error");
        self.position = position;
        self.messages += 1;
        match event.expect("an event") {
            Event::Snapshot(begins) => {
                self.snapshots.push(begins.reason());
                self.held.clear();
            }
            Event::Changes(changes) => {
                let keys = BlockKey::unpack(&changes.keys).expect("whole keys");
                let nodes = changes.nodes.chunks_exact(2).map(|node| u16::from_le_bytes([node[0], node[1]]));
                assert_eq!((keys.len() * 2, keys.len()), (changes.nodes.len(), changes.operations.len()));
                assert!(keys.len() <= 2048, "{} changes in a message", keys.len());
                for ((key, node), operation) in keys.into_iter().zip(nodes).zip(&changes.operations) {
                    let replica = (node, key, operation & 0x7f);
                    if operation & 0x80 == 0 {
                        self.held.insert(replica)
                    } else {
                        self.held.remove(&replica)
                    };
                }
            }
            Event::Cleared(cleared) => {
                assert!(cleared.slots.is_empty());
                self.held.retain(|(node, ..)| u32::from(*node) != cleared.node);
            }
            Event::Current(_) => return true,
        }
        false
    }

    async fn until_current(&mut self) {
        while !self.take().await {}
    }

    /// Receives messages until this is the state.
    async fn until(&mut self, held: &Replicas) {
        while self.held != *held {
            self.take().await;
        }
    }
}

fn held(node: u16, numbers: std::ops::Range<u64>, tier: u8) -> Replicas {
    numbers.map(|number| (node, harness::key(number), tier)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_gets_a_snapshot_and_then_every_change() {
    let member = harness::start().await;
    let mut node = Node::register(&member, "a").await;
    let mut other = Node::register(&member, "b").await;
    for first in (0..20_000).step_by(5000) {
        node.announce(harness::keys(first..first + 5000), 2).await;
    }
    other.announce(harness::keys(0..10), 1).await;
    let mut follower = Follower::new(&member, None).await;
    follower.until_current().await;
    let mut expected = held(1, 0..20_000, 2);
    expected.extend(held(2, 0..10, 1));
    assert!(follower.held == expected, "{} replicas", follower.held.len());
    assert_eq!(follower.snapshots, [Reason::Start]);

    node.announce(harness::keys(0..1), 0x82).await;
    expected.remove(&(1, harness::key(0), 2));
    follower.until(&expected).await;
    let mut inventory = node.update(harness::keys(7..9), 1);
    inventory.reset = true;
    inventory.begins = reprise_policy::SlotSet::ALL.to_bytes().to_vec().into();
    let reply = node.send(inventory.clone()).await;
    expected = held(1, 7..9, 1);
    expected.extend(held(2, 0..10, 1));
    follower.until(&expected).await;
    // The message was received already: no second snapshot.
    node.send(inventory).await;
    node.sequence = reply.expected_sequence;
    node.announce(harness::keys(9..10), 1).await;
    expected.extend(held(1, 9..10, 1));
    follower.take().await;
    assert!(follower.held == expected, "the next message is the new change");

    let _again = Node::register(&member, "b").await;
    follower.until(&held(1, 7..10, 1)).await;
    assert_eq!(follower.snapshots, [Reason::Start]);
    member.shutdown().await;
    let ended = follower.message().await.expect_err("the member shuts down");
    assert!(is_absence(&ended), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_with_a_position_gets_only_missed_changes() {
    let member = harness::start().await;
    let mut node = Node::register(&member, "a").await;
    node.announce(harness::keys(0..5000), 2).await;
    let mut follower = Follower::new(&member, None).await;
    follower.until_current().await;
    let position = follower.position.expect("a position to resume from");
    let known = std::mem::take(&mut follower.held);
    drop(follower);
    node.announce(harness::keys(5000..5010), 2).await;
    node.announce(harness::keys(3..4), 0x82).await;

    let mut back = Follower::new(&member, Some(position)).await;
    back.held = known;
    back.until_current().await;
    let mut expected = held(1, 0..5010, 2);
    expected.remove(&(1, harness::key(3), 2));
    assert!(back.held == expected);
    assert_eq!((back.snapshots.len(), back.messages), (0, 2), "the changes, and the end of catching up");

    let elsewhere = Position { log: position.log.wrapping_add(1), next: position.next };
    let mut foreign = Follower::new(&member, Some(elsewhere)).await;
    foreign.until_current().await;
    assert_eq!(foreign.snapshots, [Reason::OtherLog]);
    assert!(foreign.held == expected);
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_follower_gets_another_snapshot_and_converges() {
    let mut config = harness::config();
    config.events.history = ByteSize(1 << 20);
    let member = ControlPlane::start(config).await.expect("started");
    let mut node = Node::register(&member, "a").await;
    let mut slow = Follower::new(&member, None).await;
    slow.until_current().await;
    let keys = harness::keys(0..8192);
    // More than the connection's windows and the log hold together: 400 batches are 62 MiB of messages.
    for round in 0..400 {
        node.announce(keys.clone(), if round % 2 == 0 { 1 } else { 0x81 }).await;
    }
    node.announce(harness::keys(0..3), 2).await;
    slow.until(&held(1, 0..3, 2)).await;
    while slow.snapshots.len() < 2 {
        slow.take().await;
    }
    slow.until(&held(1, 0..3, 2)).await;
    assert_eq!(slow.snapshots, [Reason::Start, Reason::Behind]);
    let (_, metrics) = harness::http(&member, "/metrics").await;
    assert!(metrics.contains("reprise_controlplane_watch_missed_total{of=\"directory\"} 1"), "{metrics}");
    member.shutdown().await;
}
