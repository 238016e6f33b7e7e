//! The Membership service. Requests are validated before any change; every error states the valid values.

mod node_removal;

#[cfg(test)]
pub(crate) mod fuzz;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use reprise_controlplane_core::{Member, MemberView, NodeDetails};
use reprise_controlplane_store::StoreError;
use reprise_identity::Security;
use reprise_identity::access::Call as AccessCall;
use reprise_policy::peer::{PEER_ENDPOINTS_MAX, PROTOCOL_BYTES_MAX, PeerEndpoint, TCP, is_protocol_name};
use reprise_policy::{Epoch, NodeId};
use reprise_proto::controlplane::membership_server::Membership;
use reprise_proto::controlplane::{
    self as wire, ForgetNodeReply, ForgetNodeRequest, HeartbeatReply, HeartbeatRequest, ListMembersRequest,
    ListNodesReply, ListNodesRequest, MemberInfo, MemberList, NodeChange, RegisterReply, RegisterRequest,
    WatchMembersRequest, WatchNodesRequest,
};
use tokio::sync::watch;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tokio_stream::wrappers::{BroadcastStream, WatchStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use crate::cluster::{Cluster, WatchEvent};
use crate::config::MembershipConfig;
use crate::grpc_server::caller::Caller;
use crate::metrics::{Call, WatchLabels, WatchOf};
use crate::registry::{Registry, RegistryError};
use crate::shards::{MembersUpdate, Shards};

/// Maximum length of a node name in bytes: twice the length of a Kubernetes node name.
pub(crate) const NAME_BYTES_MAX: usize = 512;
/// Maximum length of an address, a failure domain or a version, in bytes.
const TEXT_BYTES_MAX: usize = 512;

/// The Membership service of one member.
#[derive(Debug)]
pub struct MembershipService {
    cluster: Arc<Cluster>,
    registry: Registry,
    shards: Arc<Shards>,
    config: MembershipConfig,
    /// For calls to other members.
    security: Security,
    /// Receives the reason when the store starts to reject this process.
    store_lost: watch::Sender<Option<String>>,
}

/// Stream of node changes.
pub type NodeChanges = Pin<Box<dyn Stream<Item = Result<NodeChange, Status>> + Send>>;

/// Stream of member lists.
pub type MemberLists = Pin<Box<dyn Stream<Item = Result<MemberList, Status>> + Send>>;

impl MembershipService {
    /// Creates the service over the shared state.
    pub fn new(
        cluster: Arc<Cluster>,
        registry: Registry,
        shards: Arc<Shards>,
        (config, security): (&MembershipConfig, Security),
        store_lost: watch::Sender<Option<String>>,
    ) -> MembershipService {
        MembershipService { cluster, registry, shards, config: config.clone(), security, store_lost }
    }

    fn status_of(&self, error: &RegistryError) -> Status {
        if matches!(error, RegistryError::Store(StoreError::Io { .. }) | RegistryError::OtherStore) {
            self.store_lost
                .send_if_modified(|lost| lost.is_none().then(|| *lost = Some(error.to_string())).is_some());
        }
        status_of(error)
    }
}

#[tonic::async_trait]
impl Membership for MembershipService {
    #[tracing::instrument(level = "debug", skip_all, fields(name = request.get_ref().name))]
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<RegisterReply>, Status> {
        let start = Instant::now();
        Caller::authorise_node(&request, AccessCall::Register, || Some(request.get_ref().name.clone()))?;
        let request = request.into_inner();
        check(&request)?;
        let details = NodeDetails {
            peer_endpoints: request.peer_endpoints.into_iter().map(endpoint).collect(),
            admin_address: request.admin_address,
            failure_domain: request.failure_domain,
            version: request.version,
        };
        let record =
            self.registry.register(&request.name, details).await.map_err(|error| self.status_of(&error))?;
        let (node, epoch) = (record.node, record.epoch);
        self.cluster.register(record).map_err(|refused| Status::unavailable(refused.to_string()))?;
        self.cluster.metrics.observe_call(Call::register, start.elapsed());
        let micros =
            |interval: reprise_policy::Interval| u64::try_from(interval.0.as_micros()).unwrap_or(u64::MAX);
        Ok(Response::new(RegisterReply {
            node: u32::from(node.0),
            epoch: epoch.0,
            heartbeat_every_us: micros(self.config.heartbeat_every),
            dead_after_us: micros(self.config.dead_after),
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatReply>, Status> {
        Caller::authorise_number(&request, AccessCall::Heartbeat, &self.cluster, request.get_ref().node)?;
        let HeartbeatRequest { node, epoch } = request.into_inner();
        let known = self.cluster.heartbeat(node_number(node)?, Epoch(epoch));
        Ok(Response::new(HeartbeatReply { known, slots_version: self.cluster.slots_version() }))
    }

    async fn list_nodes(&self, _: Request<ListNodesRequest>) -> Result<Response<ListNodesReply>, Status> {
        self.cluster.expire();
        Ok(Response::new(ListNodesReply { nodes: self.cluster.nodes() }))
    }

    type WatchNodesStream = NodeChanges;

    async fn watch_nodes(&self, _: Request<WatchNodesRequest>) -> Result<Response<NodeChanges>, Status> {
        let permit = self.cluster.acquire_watcher(WatchOf::nodes)?;
        let metrics = self.cluster.metrics.clone();
        let (nodes, news) = self.cluster.watch_nodes();
        let now = tokio_stream::iter(
            nodes.into_iter().map(|node| Ok(NodeChange { node: Some(node), removed: false })),
        );
        let changes = BroadcastStream::new(news).map(move |news| {
            let _open = &permit;
            match news {
                Ok(WatchEvent::Change(change)) => Ok(change),
                Ok(WatchEvent::Closing) => Err(shutting_down()),
                Err(BroadcastStreamRecvError::Lagged(missed)) => {
                    metrics.watch_missed.get_or_create(&WatchLabels { of: WatchOf::nodes }).inc();
                    Err(Status::data_loss(format!("the watch missed {missed} node changes: open it again")))
                }
            }
        });
        Ok(Response::new(Box::pin(now.chain(changes))))
    }

    async fn list_members(&self, _: Request<ListMembersRequest>) -> Result<Response<MemberList>, Status> {
        match self.shards.view() {
            Some(view) => Ok(Response::new(member_list(&self.shards, &view))),
            None => Err(shutting_down()),
        }
    }

    type WatchMembersStream = MemberLists;

    async fn watch_members(&self, _: Request<WatchMembersRequest>) -> Result<Response<MemberLists>, Status> {
        let permit = self.cluster.acquire_watcher(WatchOf::members)?;
        let shards = self.shards.clone();
        let lists = WatchStream::new(shards.watch()).map(move |news| {
            let _open = &permit;
            match news {
                MembersUpdate::Members(view) => Ok(member_list(&shards, &view)),
                MembersUpdate::Closing => Err(shutting_down()),
            }
        });
        Ok(Response::new(Box::pin(lists)))
    }

    #[tracing::instrument(level = "debug", skip_all, fields(name = request.get_ref().name))]
    async fn forget_node(
        &self,
        request: Request<ForgetNodeRequest>,
    ) -> Result<Response<ForgetNodeReply>, Status> {
        node_removal::forget(self, &request.into_inner().name).await.map(Response::new)
    }
}

fn shutting_down() -> Status {
    Status::unavailable("the control plane is shutting down")
}

fn member_list(shards: &Shards, view: &MemberView) -> MemberList {
    let info = |member: &Member| MemberInfo {
        name: member.name.to_string(),
        address: member.address.clone(),
        incarnation: member.incarnation,
        version: member.version.clone(),
    };
    MemberList {
        epoch: view.map.epoch().0,
        members: view.members.iter().map(info).collect(),
        answering: shards.name().to_string(),
        registered: shards.is_certain_in(view),
    }
}

/// Parses a node number of a request.
pub(crate) fn node_number(number: u32) -> Result<NodeId, Status> {
    u16::try_from(number).map(NodeId).map_err(|_| {
        Status::invalid_argument(format!("invalid node number {number}: expected 1 to {}", u16::MAX))
    })
}

/// Converts a failed change of the store to a gRPC status, and logs it.
pub(crate) fn status_of(error: &RegistryError) -> Status {
    match error {
        RegistryError::Full => Status::resource_exhausted(error.to_string()),
        RegistryError::Busy => Status::unavailable(error.to_string()),
        RegistryError::Registered => Status::failed_precondition(error.to_string()),
        RegistryError::Forgotten => Status::not_found(error.to_string()),
        RegistryError::Store(StoreError::Unavailable { .. }) => {
            tracing::warn!(%error, "cannot write to the store; the client retries");
            Status::unavailable(error.to_string())
        }
        // This process exits soon.
        RegistryError::OtherStore | RegistryError::Store(StoreError::Replaced { .. }) => {
            Status::unavailable(error.to_string())
        }
        RegistryError::Store(_) | RegistryError::Record { .. } => {
            tracing::error!(%error, "cannot write to the store");
            Status::internal(error.to_string())
        }
    }
}

fn check(request: &RegisterRequest) -> Result<(), Status> {
    let allowed = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
    let name = &request.name;
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(allowed) {
        return Err(Status::invalid_argument(format!(
            "invalid name '{}': expected 1 to {NAME_BYTES_MAX} letters, digits, '.', '_' or '-'",
            name.chars().take(64).collect::<String>().escape_default()
        )));
    }
    // Empty: the node has no such port.
    if !request.admin_address.is_empty() {
        check_address("admin_address", &request.admin_address)?;
    }
    check_endpoints(&request.peer_endpoints)?;
    for (field, text) in [("failure_domain", &request.failure_domain), ("version", &request.version)] {
        if text.len() > TEXT_BYTES_MAX {
            return Err(Status::invalid_argument(format!(
                "{field} has {} bytes: expected at most {TEXT_BYTES_MAX}",
                text.len()
            )));
        }
    }
    Ok(())
}

fn endpoint(wire::PeerEndpoint { protocol, address }: wire::PeerEndpoint) -> PeerEndpoint {
    PeerEndpoint { protocol, address }
}

/// Checks the endpoints of a node. A node without endpoints is not offered to others. The form of an address is
/// known for TCP only: agents may have newer protocols than members.
fn check_endpoints(endpoints: &[wire::PeerEndpoint]) -> Result<(), Status> {
    if endpoints.len() > PEER_ENDPOINTS_MAX {
        return Err(Status::invalid_argument(format!(
            "{} peer endpoints: expected at most {PEER_ENDPOINTS_MAX}",
            endpoints.len()
        )));
    }
    for (index, wire::PeerEndpoint { protocol, address }) in endpoints.iter().enumerate() {
        let is_repeated = endpoints[..index].iter().any(|other| other.protocol == *protocol);
        if is_repeated || !is_protocol_name(protocol) {
            return Err(Status::invalid_argument(format!(
                "invalid protocol '{}' of a peer endpoint: expected 1 to {PROTOCOL_BYTES_MAX} lowercase letters, digits \
                 or '-', each protocol once",
                protocol.chars().take(64).collect::<String>().escape_default()
            )));
        }
        if protocol == TCP {
            check_address("address of peer endpoint tcp", address)?;
        } else if address.is_empty() || address.len() > TEXT_BYTES_MAX {
            return Err(Status::invalid_argument(format!(
                "the address of peer endpoint {protocol} has {} bytes: expected 1 to {TEXT_BYTES_MAX}",
                address.len()
            )));
        }
    }
    Ok(())
}

fn check_address(field: &str, text: &str) -> Result<(), Status> {
    let parts = text.rsplit_once(':').filter(|_| text.len() <= TEXT_BYTES_MAX);
    match parts {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) => Ok(()),
        _ => Err(Status::invalid_argument(format!(
            "invalid {field} '{}': expected host:port at which other nodes reach it",
            text.chars().take(64).collect::<String>().escape_default()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(protocol: &str, address: &str) -> wire::PeerEndpoint {
        wire::PeerEndpoint { protocol: protocol.to_owned(), address: address.to_owned() }
    }

    fn with(peer_endpoints: Vec<wire::PeerEndpoint>) -> RegisterRequest {
        RegisterRequest { peer_endpoints, ..request() }
    }

    fn request() -> RegisterRequest {
        RegisterRequest {
            name: "node-1.example_x".to_owned(),
            peer_endpoints: vec![at("tcp", "[::1]:7000")],
            ..RegisterRequest::default()
        }
    }

    #[test]
    fn accepts_a_registration_with_name_and_address() {
        check(&request()).expect("valid");
        check(&with(Vec::new())).expect("a node without a peer endpoint is valid");
        let newer = vec![at("rdma-2", "fe80::1%mlx5_0/7"), at("tcp", "host:1")];
        check(&with(newer)).expect("the form of an address is that of its protocol");
    }

    #[test]
    fn rejects_invalid_names_and_addresses_and_states_the_format() {
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        for name in ["", "a/b", "a b", "ä", "\n", &long] {
            let refused = check(&RegisterRequest { name: name.to_owned(), ..request() }).expect_err(name);
            assert!(refused.message().contains("letters, digits"), "{refused}");
        }
        for address in ["host", "host:", ":1", "host:0", "host:65536", "host:x", &format!("{long}:1")] {
            let refused = check(&with(vec![at("tcp", address)])).expect_err(address);
            assert!(refused.message().contains("host:port"), "{refused}");
        }
        for (endpoints, words) in [
            (vec![at("", "x")], "invalid protocol ''"),
            (vec![at("TCP", "x:1")], "invalid protocol 'TCP'"),
            (vec![at(&"p".repeat(PROTOCOL_BYTES_MAX + 1), "x")], "1 to 32 lowercase"),
            (vec![at("rdma", "x"), at("rdma", "y")], "each protocol once"),
            (vec![at("rdma", "")], "has 0 bytes"),
            (vec![at("rdma", &"x".repeat(TEXT_BYTES_MAX + 1))], "expected 1 to"),
            (
                (0..9).map(|number| at(&format!("p{number}"), "x")).collect(),
                "9 peer endpoints: expected at most 8",
            ),
        ] {
            let refused = check(&with(endpoints)).expect_err(words);
            assert!(refused.message().contains(words), "{refused}");
        }
        let version = long.clone();
        assert!(check(&RegisterRequest { version, ..request() }).is_err());
    }
}
