//! A control plane played by the test: a gRPC server on loopback with switches for its faults.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};

use reprise_policy::BlockKey;
use reprise_proto::controlplane::directory_server::{Directory, DirectoryServer};
use reprise_proto::controlplane::membership_server::{Membership, MembershipServer};
use reprise_proto::controlplane::{
    DescribeReply, DescribeRequest, HeartbeatReply, HeartbeatRequest, ListMembersRequest, ListNodesReply,
    ListNodesRequest, LookupReply, LookupRequest, MemberList, NodeChange, NodeInfo, RegisterReply,
    RegisterRequest, UpdateReply, UpdateRequest, WatchMembersRequest, WatchNodesRequest,
};
use tokio::runtime::Runtime;
use tokio::sync::broadcast;
use tokio_stream::Stream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use super::PATIENCE;

/// How a call is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Mode {
    /// As it should be.
    #[default]
    Answer,
    /// Never; an update is applied all the same, only its answer is lost.
    Stall,
    /// With an answer that does not fit the question.
    Garbage,
    /// With INVALID_ARGUMENT.
    Refuse,
}

/// What the fake member knows and has seen.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// Of the last registration; 0 before the first.
    pub(super) epoch: u64,
    pub(super) expected: u64,
    /// Changes applied since the last reset: keys and operation bytes.
    pub(super) log: Vec<(BlockKey, u8)>,
    pub(super) registrations: u32,
    pub(super) beats: u32,
    pub(super) updates: u32,
    pub(super) resets: u32,
    pub(super) lookups: u32,
    /// Node number of the last lookup's asker.
    pub(super) asking: u32,
    pub(super) replicas: HashMap<BlockKey, Vec<(u16, u8)>>,
    pub(super) nodes: Vec<NodeInfo>,
    pub(super) update_mode: Mode,
    pub(super) lookup_mode: Mode,
    pub(super) fence_updates_of: Option<u64>,
}

/// A running fake member; its connections break when it is stopped or dropped.
pub(super) struct Fake {
    runtime: Runtime,
    shared: Shared,
    port: u16,
}

#[derive(Clone)]
struct Shared {
    state: Arc<(Mutex<State>, Condvar)>,
    news: broadcast::Sender<NodeInfo>,
}

impl Fake {
    pub(super) fn start() -> Fake {
        Fake::start_at(0)
    }

    pub(super) fn start_at(port: u16) -> Fake {
        Fake::start_with(port, State::default())
    }

    pub(super) fn start_with(port: u16, state: State) -> Fake {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let shared =
            Shared { state: Arc::new((Mutex::new(state), Condvar::new())), news: broadcast::Sender::new(16) };
        let incoming = {
            let _context = runtime.enter();
            TcpIncoming::bind(([127, 0, 0, 1], port).into()).expect("the port is free")
        };
        let port = incoming.local_addr().expect("bound").port();
        let server = tonic::transport::Server::builder()
            .add_service(MembershipServer::new(shared.clone()))
            .add_service(DirectoryServer::new(shared.clone()))
            .serve_with_incoming(incoming);
        runtime.spawn(server);
        Fake { runtime, shared, port }
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Breaks all connections; the port is free again.
    pub(super) fn stop(self) -> u16 {
        self.runtime.shutdown_timeout(PATIENCE);
        self.port
    }

    pub(super) fn read<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        self.shared.with(|state| read(state))
    }

    pub(super) fn write(&self, write: impl FnOnce(&mut State)) {
        self.shared.with(write);
    }

    /// Waits until the client has brought the fake into a state.
    pub(super) fn wait(&self, wanted: impl Fn(&State) -> bool) {
        let (state, changed) = &*self.shared.state;
        let state = state.lock().expect("not poisoned");
        let (state, waited) =
            changed.wait_timeout_while(state, PATIENCE, |state| !wanted(state)).expect("not poisoned");
        assert!(!waited.timed_out(), "never came: {state:?}");
    }

    /// Changes a node and tells the watchers.
    pub(super) fn change_node(&self, node: NodeInfo) {
        self.write(|state| {
            state.nodes.retain(|known| known.node != node.node);
            state.nodes.push(node.clone());
        });
        self.shared.news.send(node).expect("somebody watches");
    }
}

impl Shared {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let (state, changed) = &*self.state;
        let result = act(&mut state.lock().expect("not poisoned"));
        changed.notify_all();
        result
    }
}

async fn stall() -> ! {
    std::future::pending().await
}

#[tonic::async_trait]
impl Membership for Shared {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<RegisterReply>, Status> {
        assert_eq!(request.get_ref().name, "node-a");
        let epoch = self.with(|state| {
            state.epoch += 1;
            state.registrations += 1;
            (state.expected, state.log) = (0, Vec::new());
            state.epoch
        });
        let heartbeat_every_us = 20_000;
        Ok(Response::new(RegisterReply {
            node: 1,
            epoch,
            heartbeat_every_us,
            dead_after_us: 6 * heartbeat_every_us,
        }))
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatReply>, Status> {
        let known = self.with(|state| {
            state.beats += 1;
            request.get_ref().epoch == state.epoch
        });
        Ok(Response::new(HeartbeatReply { known }))
    }

    async fn list_nodes(&self, _: Request<ListNodesRequest>) -> Result<Response<ListNodesReply>, Status> {
        Ok(Response::new(ListNodesReply { nodes: self.with(|state| state.nodes.clone()) }))
    }

    type WatchNodesStream = Pin<Box<dyn Stream<Item = Result<NodeChange, Status>> + Send>>;

    async fn watch_nodes(
        &self,
        _: Request<WatchNodesRequest>,
    ) -> Result<Response<Self::WatchNodesStream>, Status> {
        let news = tokio_stream::wrappers::BroadcastStream::new(self.news.subscribe());
        let changes = tokio_stream::StreamExt::map(news, |node| {
            let node = node.map_err(|lagged| Status::data_loss(lagged.to_string()))?;
            Ok(NodeChange { node: Some(node), removed: false })
        });
        Ok(Response::new(Box::pin(changes)))
    }

    async fn list_members(&self, _: Request<ListMembersRequest>) -> Result<Response<MemberList>, Status> {
        Err(Status::unimplemented("agents do not ask for members"))
    }

    type WatchMembersStream = Pin<Box<dyn Stream<Item = Result<MemberList, Status>> + Send>>;

    async fn watch_members(
        &self,
        _: Request<WatchMembersRequest>,
    ) -> Result<Response<Self::WatchMembersStream>, Status> {
        Err(Status::unimplemented("agents do not ask for members"))
    }
}

#[tonic::async_trait]
impl Directory for Shared {
    async fn update(&self, request: Request<UpdateRequest>) -> Result<Response<UpdateReply>, Status> {
        let request = request.into_inner();
        let (mode, reply) = self.with(|state| {
            state.updates += 1;
            (state.update_mode, apply(state, &request))
        });
        match mode {
            Mode::Stall => stall().await,
            Mode::Refuse => Err(Status::invalid_argument("as the test wants it")),
            _ => Ok(Response::new(reply)),
        }
    }

    async fn lookup(&self, request: Request<LookupRequest>) -> Result<Response<LookupReply>, Status> {
        let LookupRequest { keys, asking_node } = request.into_inner();
        let keys = BlockKey::unpack(&keys).expect("whole keys");
        assert!(keys.len() <= 8192);
        let mut reply = LookupReply { offsets: vec![0], ..LookupReply::default() };
        let mut packed = Vec::new();
        let mode = self.with(|state| {
            state.lookups += 1;
            state.asking = asking_node;
            for key in keys {
                for (node, tier) in state.replicas.get(&key).into_iter().flatten() {
                    let [low, high] = node.to_le_bytes();
                    packed.extend_from_slice(&[low, high, *tier, 0]);
                }
                reply.offsets.push(u32::try_from(packed.len() / 4).expect("few"));
            }
            state.lookup_mode
        });
        reply.replicas = packed.into();
        match mode {
            Mode::Stall => stall().await,
            Mode::Garbage => reply.offsets.push(17),
            _ => {}
        }
        Ok(Response::new(reply))
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeReply>, Status> {
        Err(Status::unimplemented("not asked by agents"))
    }
}

/// The rules of sequence and epoch, as `controlplane.proto` gives them.
fn apply(state: &mut State, request: &UpdateRequest) -> UpdateReply {
    let fenced = request.epoch != state.epoch || state.fence_updates_of == Some(request.epoch);
    if fenced {
        return UpdateReply { fenced, expected_sequence: 0 };
    }
    if state.update_mode != Mode::Refuse {
        if request.reset && request.sequence >= state.expected {
            state.resets += 1;
            (state.expected, state.log) = (request.sequence, Vec::new());
        }
        if request.sequence == state.expected {
            let keys = BlockKey::unpack(&request.keys).expect("whole keys");
            state.log.extend(keys.into_iter().zip(request.operations.iter().copied()));
            state.expected += request.operations.len() as u64;
        }
    }
    UpdateReply { fenced: false, expected_sequence: state.expected }
}
