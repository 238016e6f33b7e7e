//! A member in this process and a node that calls it.

use std::path::Path;
use std::time::{Duration, Instant};

use reprise_controlplane::config::{Config, StoreConfig};
use reprise_controlplane::server::ControlPlane;
use reprise_identity::TlsSettings;
use reprise_policy::{BlockKey, Interval, SlotSet};
use reprise_proto::controlplane::directory_client::DirectoryClient;
use reprise_proto::controlplane::events_client::EventsClient;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{
    HeartbeatRequest, LookupReply, LookupRequest, PeerEndpoint, RegisterReply, RegisterRequest, SlotsReply,
    SlotsRequest, UpdateReply, UpdateRequest,
};
use reprise_testkit::http::ask_async;
use tonic::transport::{Channel, Endpoint};

/// Time limit for any event that must happen. A busy machine delays events by seconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Longer than any test: a node stays alive without heartbeats.
const ALIVE_FOR: Duration = Duration::from_secs(3600);

/// Configuration with free ports and a memory store. Nodes stay alive without heartbeats.
pub(crate) fn config() -> Config {
    let mut config = config_of_expiring_nodes();
    config.membership.dead_after = Interval(ALIVE_FOR);
    config.membership.forget_after = Interval(ALIVE_FOR);
    config
}

/// Configuration with free ports and a memory store. Nodes die without heartbeats, as by default.
pub(crate) fn config_of_expiring_nodes() -> Config {
    Config {
        listen: "127.0.0.1:0".parse().expect("an address"),
        admin: "127.0.0.1:0".parse().expect("an address"),
        store: StoreConfig::Memory {},
        tls: TlsSettings { plain: true, ..TlsSettings::default() },
        ..Config::default()
    }
}

/// Configuration with free ports and an embedded store. Nodes die without heartbeats, as by default.
pub(crate) fn config_with_store(path: &Path) -> Config {
    Config { store: StoreConfig::Embedded { path: path.to_owned() }, ..config_of_expiring_nodes() }
}

/// Restarts a member on the store of one that was shut down. Calls that end with it may hold the file a
/// little longer.
pub(crate) async fn start_again(path: &Path) -> ControlPlane {
    let give_up = Instant::now() + PATIENCE;
    loop {
        match ControlPlane::start(config_with_store(path)).await {
            Ok(member) => return member,
            Err(error) => {
                let is_held = format!("{error:#}").contains("is in use by another process");
                assert!(is_held && Instant::now() < give_up, "cannot restart: {error:#}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn start() -> ControlPlane {
    ControlPlane::start(config()).await.expect("started")
}

/// Starts a member whose nodes die without heartbeats, as by default.
pub(crate) async fn start_with_expiring_nodes() -> ControlPlane {
    ControlPlane::start(config_of_expiring_nodes()).await.expect("started")
}

pub(crate) async fn channel(member: &ControlPlane) -> Channel {
    Endpoint::from_shared(format!("http://{}", member.grpc))
        .expect("an address")
        .connect()
        .await
        .expect("connected")
}

pub(crate) async fn membership(member: &ControlPlane) -> MembershipClient<Channel> {
    MembershipClient::new(channel(member).await)
}

pub(crate) async fn directory(member: &ControlPlane) -> DirectoryClient<Channel> {
    DirectoryClient::new(channel(member).await)
}

pub(crate) async fn events(member: &ControlPlane) -> EventsClient<Channel> {
    EventsClient::new(channel(member).await)
}

pub(crate) fn registration(name: &str) -> RegisterRequest {
    RegisterRequest {
        name: name.to_owned(),
        peer_endpoints: vec![PeerEndpoint::tcp("127.0.0.1:7000")],
        admin_address: "127.0.0.1:7001".to_owned(),
        failure_domain: "rack-1".to_owned(),
        version: "0.1.0".to_owned(),
    }
}

/// A uniformly distributed key, like one made by SHA-256.
pub(crate) fn key(number: u64) -> BlockKey {
    let mix = |seed: u64| {
        let mut value = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value ^ (value >> 31)
    };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mix(2 * number + 1).to_le_bytes());
    bytes[8..].copy_from_slice(&mix(2 * number + 2).to_le_bytes());
    BlockKey(bytes)
}

pub(crate) fn keys(numbers: std::ops::Range<u64>) -> Vec<u8> {
    numbers.flat_map(|number| key(number).0).collect()
}

/// A registered node with the sequence of its changes.
pub(crate) struct Node {
    pub(crate) membership: MembershipClient<Channel>,
    pub(crate) directory: DirectoryClient<Channel>,
    pub(crate) granted: RegisterReply,
    pub(crate) sequence: u64,
}

impl Node {
    /// Registers a node with an empty inventory in all slots.
    pub(crate) async fn register(member: &ControlPlane, name: &str) -> Node {
        let mut node = Node::register_only(member, name).await;
        let give_up = Instant::now() + PATIENCE;
        while node.slots().await.wanted != SlotSet::ALL.to_bytes().as_slice() {
            assert!(Instant::now() < give_up, "the member did not get its slots");
            tokio::task::yield_now().await;
        }
        let all = SlotSet::ALL.to_bytes();
        node.open(&all, &all).await;
        node
    }

    /// Registers a node without an inventory.
    pub(crate) async fn register_only(member: &ControlPlane, name: &str) -> Node {
        let mut membership = membership(member).await;
        let granted = membership.register(registration(name)).await.expect("registered").into_inner();
        Node { membership, directory: directory(member).await, granted, sequence: 0 }
    }

    pub(crate) async fn slots(&mut self) -> SlotsReply {
        let request = SlotsRequest { node: self.granted.node, epoch: self.granted.epoch };
        self.directory.slots(request).await.expect("answered").into_inner()
    }

    /// Begins and ends inventories without replicas.
    pub(crate) async fn open(&mut self, begins: &[u8], ends: &[u8]) {
        let (begins, ends) = (begins.to_vec().into(), ends.to_vec().into());
        let request = UpdateRequest { begins, ends, ..self.update(Vec::new(), 1) };
        self.sequence += 1;
        assert_eq!(self.send(request).await.expected_sequence, self.sequence);
    }

    pub(crate) async fn heartbeat(&mut self) -> bool {
        let request = HeartbeatRequest { node: self.granted.node, epoch: self.granted.epoch };
        self.membership.heartbeat(request).await.expect("answered").into_inner().known
    }

    /// A request that continues the node's changes.
    pub(crate) fn update(&self, keys: Vec<u8>, operation: u8) -> UpdateRequest {
        let operations = vec![operation; keys.len() / BlockKey::SIZE];
        UpdateRequest {
            node: self.granted.node,
            epoch: self.granted.epoch,
            sequence: self.sequence,
            keys: keys.into(),
            operations: operations.into(),
            ..UpdateRequest::default()
        }
    }

    pub(crate) async fn send(&mut self, request: UpdateRequest) -> UpdateReply {
        self.directory.update(request).await.expect("answered").into_inner()
    }

    /// Sends changes that must be accepted.
    pub(crate) async fn announce(&mut self, keys: Vec<u8>, operation: u8) {
        let request = self.update(keys, operation);
        self.sequence += request.operations.len() as u64;
        let reply = self.send(request).await;
        assert_eq!((reply.fenced, reply.expected_sequence), (false, self.sequence));
    }

    pub(crate) async fn lookup(&mut self, keys: Vec<u8>) -> Vec<Vec<(u16, u8)>> {
        let request = LookupRequest { keys: keys.into(), asking_node: self.granted.node };
        replicas(&self.directory.lookup(request).await.expect("answered").into_inner())
    }
}

/// Node and tier of each key's replicas.
pub(crate) fn replicas(reply: &LookupReply) -> Vec<Vec<(u16, u8)>> {
    let packed: Vec<(u16, u8)> = reply
        .replicas
        .chunks(4)
        .map(|replica| {
            assert_eq!(replica[3], 0);
            (u16::from_le_bytes([replica[0], replica[1]]), replica[2])
        })
        .collect();
    assert_eq!(reply.offsets.first(), Some(&0));
    assert_eq!(reply.offsets.last().map(|last| *last as usize), Some(packed.len()));
    reply.offsets.windows(2).map(|bounds| packed[bounds[0] as usize..bounds[1] as usize].to_vec()).collect()
}

/// Requests a page of the admin endpoint; returns status and body.
pub(crate) async fn http(member: &ControlPlane, path: &str) -> (u16, String) {
    let answer = ask_async(&member.admin.to_string(), path).await.expect("answered");
    (answer.code, answer.body)
}
