//! The KV-event publisher, used like vLLM's publisher: with third-party sockets and a third-party decoder.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use reprise_controlplane::server::ControlPlane;
use reprise_policy::BlockKey;
use rmpv::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use crate::harness::{self, Node, PATIENCE};

/// Index of a router: node, block, medium.
type Index = BTreeSet<(u16, BlockKey, String)>;

fn loopback() -> Option<SocketAddr> {
    Some("127.0.0.1:0".parse().expect("an address"))
}

async fn start(buffer_steps: usize) -> ControlPlane {
    let mut config = harness::config();
    config.events.publish = loopback();
    config.events.replay = loopback();
    config.events.buffer_steps = buffer_steps;
    ControlPlane::start(config).await.expect("started")
}

fn addresses(member: &ControlPlane) -> (SocketAddr, SocketAddr) {
    let publisher = member.publisher.as_ref().expect("the publisher runs");
    (publisher.publish, publisher.replay.expect("replays are enabled"))
}

/// A router: an index, and the number of the last applied batch.
#[derive(Default)]
struct Router {
    index: Index,
    last: Option<u64>,
    batches: Vec<(u64, usize)>,
}

impl Router {
    fn apply(&mut self, number: u64, payload: &[u8]) {
        let batch = rmpv::decode::read_value(&mut &*payload).expect("msgpack");
        let batch = batch.as_array().expect("a batch is an array");
        assert_eq!(batch.len(), 3);
        assert!(batch[0].as_f64().is_some_and(|seconds| seconds > 1.0e9), "{:?}", batch[0]);
        let node = batch[2].as_u64().map(|node| u16::try_from(node).expect("a node number"));
        let events = batch[1].as_array().expect("events");
        events.iter().for_each(|event| self.event(node, event));
        self.batches.push((number, events.len()));
        self.last = Some(number);
    }

    fn event(&mut self, node: Option<u16>, event: &Value) {
        let blocks = || {
            let hashes = event["block_hashes"].as_array().expect("hashes").iter();
            let medium = event["medium"].as_str().expect("a medium").to_owned();
            let node = node.expect("blocks are on a node");
            hashes
                .map(move |hash| {
                    let key = BlockKey(hash.as_slice().expect("bytes").try_into().expect("16 of them"));
                    (node, key, medium.clone())
                })
                .collect::<Vec<_>>()
        };
        match event["type"].as_str().expect("a type") {
            "BlockStored" => self.index.extend(blocks()),
            "BlockRemoved" => blocks().iter().for_each(|block| {
                self.index.remove(block);
            }),
            "AllBlocksCleared" => self.index.retain(|(of, ..)| node.is_some_and(|node| node != *of)),
            other => panic!("{other}"),
        }
    }

    /// Requests a replay from a number on and applies it; numbers must have no gaps once they start.
    async fn replay(&mut self, address: SocketAddr, from: u64) {
        let mut socket = DealerSocket::new();
        socket.connect(&format!("tcp://{address}")).await.expect("connected");
        let mut request = ZmqMessage::from(Vec::new());
        request.push_back(from.to_be_bytes().to_vec().into());
        socket.send(request).await.expect("sent");
        let mut following: Option<u64> = None;
        loop {
            let message = timeout(PATIENCE, socket.recv()).await.expect("in time").expect("a message");
            let [delimiter, topic, number, payload] = &message.into_vec()[..] else { panic!("four frames") };
            assert!(delimiter.is_empty());
            if number[..] == (-1_i64).to_be_bytes() {
                assert!(topic.is_empty() && payload.is_empty(), "the end has no payload");
                return;
            }
            assert_eq!(topic[..], b"kv-events"[..]);
            let number = u64::from_be_bytes(number[..].try_into().expect("8 bytes"));
            assert!(
                following.is_none_or(|following| following == number),
                "{number}, expected {following:?}"
            );
            assert!(number >= from);
            following = Some(number + 1);
            self.apply(number, payload);
        }
    }
}

async fn subscribe(address: SocketAddr, topic: &str) -> SubSocket {
    let mut socket = SubSocket::new();
    socket.connect(&format!("tcp://{address}")).await.expect("connected");
    socket.subscribe(topic).await.expect("subscribed");
    socket
}

async fn receive(socket: &mut SubSocket) -> (u64, Vec<u8>) {
    let message = timeout(PATIENCE, socket.recv()).await.expect("in time").expect("a message").into_vec();
    let [topic, number, payload] = &message[..] else { panic!("three frames") };
    assert_eq!(topic[..], b"kv-events"[..]);
    (u64::from_be_bytes(number[..].try_into().expect("8 bytes")), payload.to_vec())
}

/// An established subscriber that has received its first batch, which was announced for it.
async fn subscribed(address: SocketAddr, node: &mut Node) -> (SubSocket, u64, Vec<u8>) {
    let mut socket = subscribe(address, "kv").await;
    for round in 0.. {
        node.announce(harness::keys(0..1), if round % 2 == 0 { 2 } else { 0x82 }).await;
        if let Ok(message) = timeout(std::time::Duration::from_millis(50), socket.recv()).await {
            let message = message.expect("a message").into_vec();
            let number = u64::from_be_bytes(message[1][..].try_into().expect("8 bytes"));
            return (socket, number, message[2].to_vec());
        }
        assert!(round < 1200, "the subscription did not take effect");
    }
    unreachable!("rounds are limited")
}

fn stored(node: u16, numbers: std::ops::Range<u64>, medium: &str) -> Index {
    numbers.map(|number| (node, harness::key(number), medium.to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_replays_and_then_subscribes_has_the_complete_index() {
    let member = start(10_000).await;
    let (publish, replay) = addresses(&member);
    let mut node = Node::register(&member, "a").await;
    let mut other = Node::register(&member, "b").await;
    node.announce(harness::keys(10..700), 1).await;
    other.announce(harness::keys(20..30), 2).await;
    let (mut socket, number, payload) = subscribed(publish, &mut node).await;
    let mut router = Router::default();
    router.replay(replay, 0).await;
    assert_eq!(router.batches[0].0, 0, "all batches are buffered");
    router.apply(number, &payload);

    other.announce(harness::keys(20..21), 0x82).await;
    let mut inventory = node.update(harness::keys(1000..1010), 2);
    inventory.reset = true;
    inventory.begins = reprise_policy::SlotSet::ALL.to_bytes().to_vec().into();
    node.send(inventory).await;
    let mut expected = stored(2, 21..30, "STORAGE");
    expected.extend(stored(1, 1000..1010, "STORAGE"));
    let mut following = number + 1;
    while router.index != expected {
        let (number, payload) = receive(&mut socket).await;
        assert_eq!(number, following, "numbers have no gaps");
        following += 1;
        // Batches before the end of the replay arrive twice, which has no effect.
        router.apply(number, &payload);
    }
    let mut again = Router::default();
    again.replay(replay, 0).await;
    assert_eq!(again.index, expected);
    again.batches.clear();
    again.replay(replay, following + 1).await;
    assert_eq!(again.batches, [], "without missed batches none are sent");
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_from_evicted_batches_is_a_snapshot_and_later_batches() {
    let member = start(64).await;
    let (_, replay) = addresses(&member);
    let mut nodes = Vec::new();
    for name in ["a", "b", "c"] {
        nodes.push(Node::register(&member, name).await);
    }
    let mut expected = Index::new();
    for round in 0..100 {
        let node = &mut nodes[round as usize % 3];
        let keys = round * 100..(round + 1) * 100;
        node.announce(harness::keys(keys.clone()), 2).await;
        expected.extend(stored(node.granted.node as u16, keys, "STORAGE"));
    }
    // A batch is published shortly after it was applied.
    let mut router = Router::default();
    timeout(PATIENCE, async {
        while router.index != expected {
            router = Router::default();
            router.index.insert((9, harness::key(1), "CPU".to_owned()));
            router.replay(replay, 0).await;
        }
    })
    .await
    .expect("all batches are published");
    let (first, last) = (router.batches[0].0, router.last.expect("batches"));
    assert!(first > 0 && last - first <= 64 + 32, "{first} to {last}");
    let stored_in = router.batches.iter().filter(|(_, events)| *events > 0).count();
    assert!(stored_in < router.batches.len(), "unused numbers are sent as empty batches");
    let (_, metrics) = harness::http(&member, "/metrics").await;
    assert!(
        !metrics.contains("reprise_controlplane_event_replays_total{result=\"snapshot\"} 0"),
        "{metrics}"
    );
    assert!(
        metrics.contains("reprise_controlplane_event_replays_total{result=\"incomplete\"} 0"),
        "{metrics}"
    );
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_incomplete_replay_has_a_visible_gap() {
    let member = start(1).await;
    let (_, replay) = addresses(&member);
    let mut node = Node::register(&member, "a").await;
    // After two clearing batches, each announcement is one batch, since the next one follows only after it was
    // published. A publisher that is late may send empty batches behind it, and keep the last of them only: then more
    // blocks are announced.
    let (mut last, mut keys) = (1, 0..);
    for _ in 0..4 {
        let mut router = Router::default();
        let is_published = |router: &Router| router.last > Some(last) && !router.index.is_empty();
        timeout(PATIENCE, async {
            while !is_published(&router) {
                let key = keys.next().expect("without end");
                node.announce(harness::keys(key..key + 1), 2).await;
                for _ in 0..100 {
                    if !is_published(&router) {
                        router.replay(replay, last + 1).await;
                    }
                }
            }
        })
        .await
        .expect("published");
        last = router.last.expect("published");
    }
    // The clearing batches of a snapshot alone exceed the available numbers.
    let mut late = Router::default();
    late.replay(replay, last - 1).await;
    assert!(late.index.is_empty() && late.last.is_none_or(|number| number < last), "{:?}", late.batches);
    let (_, metrics) = harness::http(&member, "/metrics").await;
    assert!(
        metrics.contains("reprise_controlplane_event_replays_total{result=\"incomplete\"} 1"),
        "{metrics}"
    );
    member.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscriber_of_another_topic_receives_nothing() {
    let member = start(100).await;
    let (publish, _) = addresses(&member);
    let mut node = Node::register(&member, "a").await;
    let mut elsewhere = subscribe(publish, "other").await;
    let (mut socket, ..) = subscribed(publish, &mut node).await;
    node.announce(harness::keys(5..6), 1).await;
    receive(&mut socket).await;
    assert!(futures_are_pending(&mut elsewhere).await);
    member.shutdown().await;
}

// The protocol is written by hand, so that no library reads ahead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_subscriber_misses_batches_with_a_visible_gap_and_blocks_no_other() {
    let member = start(16).await;
    let (publish, _) = addresses(&member);
    let mut node = Node::register(&member, "a").await;
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("a small window");
    let mut stream = socket.connect(publish).await.expect("connected");
    let mut hello = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
    hello.extend_from_slice(b"NULL");
    hello.resize(64, 0);
    hello.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB");
    hello.extend_from_slice(b"\x00\x01\x01");
    stream.write_all(&hello).await.expect("sent");
    let mut greeting = [0; 64 + 27];
    stream.read_exact(&mut greeting).await.expect("greeted");

    // 960,000 blocks are 17 MiB of batches: more than the kernel buffers for one connection.
    let keys = harness::keys(0..8000);
    for round in 0..120 {
        node.announce(keys.clone(), if round % 2 == 0 { 1 } else { 0x81 }).await;
    }
    let (mut last, mut gaps) = (None::<u64>, 0);
    let read = async {
        loop {
            let (topic, number) = (frame(&mut stream).await, frame(&mut stream).await);
            frame(&mut stream).await;
            assert_eq!(topic, b"kv-events");
            let number = u64::from_be_bytes(number.try_into().expect("8 bytes"));
            assert!(last.is_none_or(|last| last < number), "{number} after {last:?}");
            gaps += u64::from(last.is_some_and(|last| last + 1 < number));
            last = Some(number);
            if gaps == 0 {
                continue;
            }
            // The batch after the gap is near the end.
            let (_, metrics) = harness::http(&member, "/metrics").await;
            let published = metric(&metrics, "reprise_controlplane_event_batches_total");
            if number + 1 == published {
                return metric(&metrics, "reprise_controlplane_event_batches_skipped_total");
            }
        }
    };
    let skipped = timeout(PATIENCE, read).await.expect("the subscriber catches up");
    assert!(skipped > 0, "{gaps} gaps");
    member.shutdown().await;
}

/// Body of the next frame.
async fn frame(stream: &mut TcpStream) -> Vec<u8> {
    let flags = stream.read_u8().await.expect("a frame");
    let length = if flags & 2 == 0 {
        u64::from(stream.read_u8().await.expect("a length"))
    } else {
        stream.read_u64().await.expect("a length")
    };
    let mut body = vec![0; usize::try_from(length).expect("small")];
    stream.read_exact(&mut body).await.expect("a body");
    body
}

fn metric(metrics: &str, name: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.expect("a metric").parse().expect("a number")
}

/// Whether no message has arrived.
async fn futures_are_pending(socket: &mut SubSocket) -> bool {
    timeout(std::time::Duration::from_millis(20), socket.recv()).await.is_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closes_invalid_and_excess_connections_and_serves_others() {
    let mut config = harness::config();
    config.events.publish = loopback();
    config.events.replay = loopback();
    config.events.subscribers = 2;
    let member = ControlPlane::start(config).await.expect("started");
    let (publish, replay) = addresses(&member);
    for address in [publish, replay] {
        for garbage in [
            &b"GET / HTTP/1.1\r\nHost: here\r\nAccept: everything that is there, please\r\n\r\n"[..],
            &[0xff; 200],
        ] {
            let mut stream = TcpStream::connect(address).await.expect("connected");
            stream.write_all(garbage).await.expect("sent");
            let mut answer = Vec::new();
            // The connection is closed, or reset if the server left input unread.
            let _ = timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("closed at once");
            assert_eq!(answer.first(), Some(&0xff), "a greeting was sent");
        }
    }
    let mut silent = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(publish).await.expect("connected");
        assert_eq!(stream.read_u8().await.expect("a greeting"), 0xff);
        silent.push(stream);
    }
    let mut third = TcpStream::connect(publish).await.expect("connected");
    assert_eq!(third.read_u8().await.expect("a greeting"), 0xff, "it replaces the first connection");
    let ended = timeout(PATIENCE, silent[0].read_to_end(&mut Vec::new())).await;
    ended.expect("the longest-idle one is closed").expect("closed without reset");
    let (_, metrics) = harness::http(&member, "/metrics").await;
    for (listener, reason) in [("events", "idle"), ("events", "protocol"), ("replay", "protocol")] {
        let name = "reprise_controlplane_connections_rejected_total";
        let none = format!("{name}{{listener=\"{listener}\",reason=\"{reason}\"}} 0");
        assert!(metrics.contains(name) && !metrics.contains(&none), "{none} in {metrics}");
    }
    drop((silent, third));
    let mut node = Node::register(&member, "a").await;
    subscribed(publish, &mut node).await;
    member.shutdown().await;
}
