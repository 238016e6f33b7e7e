//! A fake control plane member: a gRPC server on loopback with switchable faults.

mod placement;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};

use reprise_policy::{BlockKey, SlotSet};
use reprise_proto::controlplane::directory_server::{Directory, DirectoryServer};
use reprise_proto::controlplane::membership_server::{Membership, MembershipServer};
use reprise_proto::controlplane::placement_server::PlacementServer;
use reprise_proto::controlplane::{
    DescribeReply, DescribeRequest, ForgetNodeReply, ForgetNodeRequest, HeartbeatReply, HeartbeatRequest,
    ListMembersRequest, ListNodesReply, ListNodesRequest, LookupReply, LookupRequest, MemberInfo, MemberList,
    NodeChange, NodeInfo, PlaceReply, PlaceRequest, RegisterReply, RegisterRequest, ReportReply,
    ReportRequest, SlotsReply, SlotsRequest, UpdateReply, UpdateRequest, WatchMembersRequest,
    WatchNodesRequest,
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
    /// With a valid reply.
    #[default]
    Answer,
    /// Never; an update is applied nevertheless, and only its reply is lost.
    Stall,
    /// With a reply that does not match the request.
    Garbage,
    /// With the error INVALID_ARGUMENT.
    Refuse,
}

/// State and observations of the fake member.
#[derive(Clone, Debug)]
pub(super) struct State {
    /// Name of the member.
    pub(super) name: &'static str,
    /// Member list that it reports; `None`: itself only.
    pub(super) members: Option<MemberList>,
    /// Its slots, and the number of changes of this set.
    pub(super) owned: SlotSet,
    pub(super) version: u64,
    /// Epoch of its map, in replies to lookups.
    pub(super) map_epoch: u64,
    /// Slots with a begun inventory, and those with a complete one.
    pub(super) begun: SlotSet,
    pub(super) whole: SlotSet,
    /// Epoch of the last registration; 0 before the first.
    pub(super) epoch: u64,
    pub(super) expected: u64,
    /// Changes applied since the last reset: keys and operation bytes.
    pub(super) log: Vec<(BlockKey, u8)>,
    pub(super) registrations: u32,
    /// Failure domain of the last registration.
    pub(super) failure_domain: String,
    pub(super) beats: u32,
    pub(super) updates: u32,
    pub(super) resets: u32,
    pub(super) lookups: u32,
    /// Node number in the last lookup.
    pub(super) asking: u32,
    pub(super) replicas: HashMap<BlockKey, Vec<(u16, u8)>>,
    pub(super) nodes: Vec<NodeInfo>,
    pub(super) update_mode: Mode,
    pub(super) lookup_mode: Mode,
    pub(super) fence_updates_of: Option<u64>,
    /// All reports, and the reply to each.
    pub(super) reports: Vec<ReportRequest>,
    pub(super) report_reply: ReportReply,
    /// All placement requests, and the reply to each; `None`: an error.
    pub(super) requests: Vec<PlaceRequest>,
    pub(super) place_reply: Option<PlaceReply>,
}

impl Default for State {
    fn default() -> State {
        State {
            name: "a",
            members: None,
            owned: SlotSet::ALL,
            version: 1,
            map_epoch: 1,
            begun: SlotSet::EMPTY,
            whole: SlotSet::EMPTY,
            epoch: 0,
            expected: 0,
            log: Vec::new(),
            registrations: 0,
            failure_domain: String::new(),
            beats: 0,
            updates: 0,
            resets: 0,
            lookups: 0,
            asking: 0,
            replicas: HashMap::new(),
            nodes: Vec::new(),
            update_mode: Mode::Answer,
            lookup_mode: Mode::Answer,
            fence_updates_of: None,
            reports: Vec::new(),
            report_reply: ReportReply::default(),
            requests: Vec::new(),
            place_reply: None,
        }
    }
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
    node_changes: broadcast::Sender<NodeInfo>,
    member_changes: broadcast::Sender<()>,
    port: u16,
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
        let incoming = {
            let _context = runtime.enter();
            TcpIncoming::bind(([127, 0, 0, 1], port).into()).expect("the port is free")
        };
        let port = incoming.local_addr().expect("bound").port();
        let shared = Shared {
            state: Arc::new((Mutex::new(state), Condvar::new())),
            node_changes: broadcast::Sender::new(16),
            member_changes: broadcast::Sender::new(16),
            port,
        };
        let server = tonic::transport::Server::builder()
            .add_service(MembershipServer::new(shared.clone()))
            .add_service(DirectoryServer::new(shared.clone()))
            .add_service(PlacementServer::new(shared.clone()))
            .serve_with_incoming(incoming);
        runtime.spawn(server);
        Fake { runtime, shared, port }
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Breaks all connections and frees the port.
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
        assert!(!waited.timed_out(), "timed out: {state:?}");
    }

    /// Returns its entry in a member list.
    pub(super) fn info(&self) -> MemberInfo {
        self.shared.info(&self.read(Clone::clone))
    }

    /// Changes the reported member list and its own slots.
    pub(super) fn change_members(&self, members: &MemberList, owned: SlotSet) {
        self.write(|state| {
            state.members = Some(members.clone());
            state.map_epoch = members.epoch;
            state.own(owned);
        });
        // Fails without watchers, which is fine.
        let _ = self.shared.member_changes.send(());
    }

    /// Changes a node and notifies the watchers.
    pub(super) fn change_node(&self, node: NodeInfo) {
        self.write(|state| {
            state.nodes.retain(|known| known.node != node.node);
            state.nodes.push(node.clone());
        });
        // Fails without watchers; they get the list when they connect.
        let _ = self.shared.node_changes.send(node);
    }
}

impl State {
    /// Changes its slots and the version of the set.
    pub(super) fn own(&mut self, owned: SlotSet) {
        (self.begun, self.whole) = (self.begun.and(&owned), self.whole.and(&owned));
        self.log.retain(|(key, _)| owned.has_key(key));
        self.owned = owned;
        self.version += 1;
    }
}

impl Shared {
    fn info(&self, state: &State) -> MemberInfo {
        let address = format!("127.0.0.1:{}", self.port);
        MemberInfo { name: state.name.to_owned(), address, incarnation: 1, ..MemberInfo::default() }
    }

    fn members(&self) -> MemberList {
        self.with(|state| {
            let alone = MemberList {
                epoch: state.map_epoch,
                members: vec![self.info(state)],
                answering: String::new(),
                registered: true,
            };
            let list = state.members.clone().unwrap_or(alone);
            MemberList { answering: state.name.to_owned(), ..list }
        })
    }

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
            state.failure_domain.clone_from(&request.get_ref().failure_domain);
            (state.expected, state.log) = (0, Vec::new());
            (state.begun, state.whole) = (SlotSet::EMPTY, SlotSet::EMPTY);
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
        let reply = self.with(|state| {
            state.beats += 1;
            let known = request.get_ref().epoch == state.epoch;
            HeartbeatReply { known, slots_version: state.version }
        });
        Ok(Response::new(reply))
    }

    async fn list_nodes(&self, _: Request<ListNodesRequest>) -> Result<Response<ListNodesReply>, Status> {
        Ok(Response::new(ListNodesReply { nodes: self.with(|state| state.nodes.clone()) }))
    }

    type WatchNodesStream = Pin<Box<dyn Stream<Item = Result<NodeChange, Status>> + Send>>;

    async fn watch_nodes(
        &self,
        _: Request<WatchNodesRequest>,
    ) -> Result<Response<Self::WatchNodesStream>, Status> {
        let news = tokio_stream::wrappers::BroadcastStream::new(self.node_changes.subscribe());
        let changes = tokio_stream::StreamExt::map(news, |node| {
            let node = node.map_err(|lagged| Status::data_loss(lagged.to_string()))?;
            Ok(NodeChange { node: Some(node), removed: false })
        });
        Ok(Response::new(Box::pin(changes)))
    }

    async fn list_members(&self, _: Request<ListMembersRequest>) -> Result<Response<MemberList>, Status> {
        Ok(Response::new(self.members()))
    }

    type WatchMembersStream = Pin<Box<dyn Stream<Item = Result<MemberList, Status>> + Send>>;

    async fn watch_members(
        &self,
        _: Request<WatchMembersRequest>,
    ) -> Result<Response<Self::WatchMembersStream>, Status> {
        let news = tokio_stream::wrappers::BroadcastStream::new(self.member_changes.subscribe());
        let shared = self.clone();
        let changes = tokio_stream::StreamExt::map(news, move |_| Ok(shared.members()));
        let now = tokio_stream::once(Ok(self.members()));
        Ok(Response::new(Box::pin(tokio_stream::StreamExt::chain(now, changes))))
    }

    async fn forget_node(&self, _: Request<ForgetNodeRequest>) -> Result<Response<ForgetNodeReply>, Status> {
        Err(Status::unimplemented("not used by agents"))
    }
}

#[tonic::async_trait]
impl Directory for Shared {
    async fn slots(&self, request: Request<SlotsRequest>) -> Result<Response<SlotsReply>, Status> {
        let reply = self.with(|state| SlotsReply {
            fenced: request.get_ref().epoch != state.epoch,
            slots_version: state.version,
            owned: state.owned.to_bytes().to_vec().into(),
            wanted: state.owned.without(&state.begun).to_bytes().to_vec().into(),
        });
        Ok(Response::new(reply))
    }

    async fn update(&self, request: Request<UpdateRequest>) -> Result<Response<UpdateReply>, Status> {
        let request = request.into_inner();
        let (mode, reply) = self.with(|state| {
            state.updates += 1;
            (state.update_mode, apply(state, &request))
        });
        match mode {
            Mode::Stall => stall().await,
            Mode::Refuse => Err(Status::invalid_argument("requested by the test")),
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
            reply.map_epoch = state.map_epoch;
            for (index, key) in (0..).zip(keys) {
                if !state.owned.has_key(&key) {
                    reply.elsewhere.push(index);
                }
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
        Err(Status::unimplemented("not used by agents"))
    }
}

/// Applies the rules for sequence, epoch and inventories of `controlplane.proto`.
fn apply(state: &mut State, request: &UpdateRequest) -> UpdateReply {
    let fenced = request.epoch != state.epoch || state.fence_updates_of == Some(request.epoch);
    if fenced {
        return UpdateReply { fenced, ..UpdateReply::default() };
    }
    let set = |bytes: &[u8]| SlotSet::from_bytes(bytes).unwrap_or_default();
    let (begins, ends) = (set(&request.begins), set(&request.ends));
    if state.update_mode != Mode::Refuse {
        if request.reset && request.sequence >= state.expected {
            state.resets += 1;
            (state.expected, state.log) = (request.sequence, Vec::new());
            (state.begun, state.whole) = (SlotSet::EMPTY, SlotSet::EMPTY);
        }
        if request.sequence == state.expected {
            let begins = begins.and(&state.owned);
            state.log.retain(|(key, _)| !begins.has_key(key));
            state.begun = state.begun.or(&begins);
            let keys = BlockKey::unpack(&request.keys).expect("whole keys");
            let begun = state.begun.clone();
            let changes = keys.into_iter().zip(request.operations.iter().copied());
            state.log.extend(changes.filter(|(key, _)| begun.has_key(key)));
            state.whole = state.whole.or(&ends.and(&begun));
            state.expected += request.operations.len() as u64;
            state.expected += u64::from(request.reset || !request.begins.is_empty());
        }
    }
    UpdateReply { fenced: false, expected_sequence: state.expected, slots_version: state.version }
}
