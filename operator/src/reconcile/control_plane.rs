//! Client of the clusters' control planes: reads modes of nodes, budgets of tenants and versions of members,
//! and sets modes and budgets.
//!
//! One read lists all nodes, budgets and members of a cluster and is cached for [`HEALTHY_TTL`]: 1,000 nodes
//! cost three calls. A change of the members' StatefulSet invalidates the cache
//! ([`ControlPlanes::require_members_version`]), because it may describe replaced members. After an
//! unanswered call, no calls are made for a delay that grows. Each call uses a new connection, so the next
//! one may reach another member, and ends within [`TIMEOUT`].
//!
//! Usage of tenants is read from every member, once a minute for all tenants ([`usage`]).
//!
//! The desired values are decided elsewhere: [`crate::reconcile::node::mode`], [`crate::reconcile::tenant::budget`] and
//! [`crate::reconcile::tenant::usage`].

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use reprise_crds::fields::NodeMode;
use reprise_identity::Security;
use reprise_proto::connection::is_absence;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    self as wire, Bytes, ListMembersRequest, ListNodesRequest, ListTenantsRequest, MemberInfo,
    RemoveTenantRequest, SetNodeRequest, SetTenantRequest,
};
use reprise_proto::dial;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::framework::backoff::Backoff;
use crate::framework::metrics::{Call, Metrics};
use crate::reconcile::names::ClusterNames;
use crate::settings::ControlPlaneAddress;

mod holders;
mod usage;

pub use usage::{MeasuredUsage, UsageResult};

/// Lifetime of a successful read.
const HEALTHY_TTL: Duration = Duration::from_secs(25);
/// Maximum lifetime of a failed read.
const FAILED_TTL_MAX: Duration = Duration::from_secs(30);
/// Timeout of a call including the connection, which normally takes milliseconds.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout per member of a call to all members, within the timeout of the whole call.
const MEMBER_TIMEOUT: Duration = Duration::from_secs(1);
/// Idle time after which the cache of a cluster is dropped.
const EVICT_AFTER: Duration = Duration::from_secs(600);

/// Interval for checking that the control plane still has the desired state.
pub const POLL_INTERVAL: Duration = Duration::from_secs(30);
/// Interval for retrying until the control plane has the desired state.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Limits of a tenant in the whole cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes guaranteed to the tenant.
    pub reserved: TierBytes,
    /// Maximum bytes; 2⁶⁴ − 1 means no limit.
    pub limit: TierBytes,
}

impl Budget {
    /// Budget of a tenant whose blocks are purged.
    pub const ZERO: Budget =
        Budget { reserved: TierBytes { dram: 0, ssd: 0 }, limit: TierBytes { dram: 0, ssd: 0 } };
}

/// Numbers of bytes per tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierBytes {
    /// Bytes in the nodes' arenas.
    pub dram: u64,
    /// Bytes on the nodes' devices.
    pub ssd: u64,
}

/// State that a control plane reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlPlaneState {
    /// Modes of registered nodes, by name.
    pub modes: BTreeMap<String, NodeMode>,
    /// Budgets of tenants that have one.
    pub budgets: BTreeMap<String, Budget>,
    /// Bytes by which reservations of budgets exceed the capacity of living nodes.
    pub overcommitted: TierBytes,
    /// Versions of registered members by name; `None` if a member does not report one.
    pub members: BTreeMap<String, Option<String>>,
}

/// Why a call to a control plane failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// It does not respond, or is temporarily unable to.
    Unavailable(String),
    /// The named object does not exist.
    NotFound(String),
    /// It rejects the request; the message is meant for users.
    Rejected(String),
}

/// The state, or why it could not be read.
pub type StateResult = Result<Arc<ControlPlaneState>, String>;

/// Clients and caches of all control planes.
#[derive(Debug, Default)]
pub struct ControlPlanes {
    /// Certificates by `namespace/name` of clusters.
    securities: StdMutex<BTreeMap<String, Security>>,
    /// Addresses by `namespace/name` of control planes that are not reached by their service.
    addresses: BTreeMap<String, ControlPlaneAddress>,
    /// Caches by the cluster's uid, with the time of the last access.
    caches: StdMutex<HashMap<String, (Instant, Arc<ClusterCache>)>>,
    backoff: Backoff,
}

/// Cached reads of one control plane.
#[derive(Debug, Default)]
struct ClusterCache {
    /// Locked during a read, so that other callers wait for its result.
    state: Mutex<StateCache>,
    /// The same for usage of tenants.
    usage: Mutex<Option<usage::CachedUsage>>,
}

#[derive(Debug, Default)]
struct StateCache {
    cached: Option<CachedState>,
    /// Last observed `resourceVersion` of the members' StatefulSet; the cached state is at least as new.
    members: Option<String>,
}

#[derive(Clone, Debug)]
struct CachedState {
    until: Instant,
    result: StateResult,
}

impl ControlPlanes {
    /// Uses these addresses, and the service of the cluster for all others.
    pub fn new(addresses: BTreeMap<String, ControlPlaneAddress>) -> ControlPlanes {
        ControlPlanes { addresses, ..ControlPlanes::default() }
    }

    /// Sets the certificates for calls to a cluster.
    pub fn set_security(&self, cluster: &ClusterNames, security: Security) {
        let mut securities = self.securities.lock().unwrap_or_else(PoisonError::into_inner);
        securities.insert(cluster.key(), security);
    }

    /// Returns the state of a cluster's control plane within [`TIMEOUT`], possibly from the cache.
    pub async fn state(&self, cluster: &ClusterNames, metrics: &Metrics) -> StateResult {
        let shared = self.cache(cluster);
        let mut cache = shared.state.lock().await;
        if let Some(held) = cache.current() {
            return held.result.clone();
        }
        let request = async { list(&self.target(cluster)?).await };
        let response = timed((Call::List, metrics), request).await;
        let result = response.map(Arc::new).map_err(|error| error.message().to_owned());
        let until = Instant::now() + self.ttl(cluster, result.is_ok());
        cache.cached = Some(CachedState { until, result: result.clone() });
        result
    }

    /// Invalidates a state that was read before this `resourceVersion` of the members' StatefulSet. It waits for a read
    /// in progress. A cached failure remains valid.
    pub async fn require_members_version(&self, cluster: &ClusterNames, members: String) {
        let shared = self.cache(cluster);
        let mut cache = shared.state.lock().await;
        if cache.members.as_ref() != Some(&members) {
            cache.members = Some(members);
            cache.cached = cache.cached.take().filter(|held| held.result.is_err());
        }
    }

    /// Sets the mode of a node and returns the previous one.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn set_mode(
        &self,
        cluster: &ClusterNames,
        node: &str,
        mode: NodeMode,
        metrics: &Metrics,
    ) -> Result<NodeMode, CallError> {
        let request = SetNodeRequest { name: node.to_owned(), mode: wire_mode(mode).into() };
        let request = async {
            let reply = self.target(cluster)?.placement().await?.set_node(request).await?;
            Ok::<_, CallError>(crds_mode(reply.into_inner().before))
        };
        let change = |state: &mut ControlPlaneState| {
            state.modes.insert(node.to_owned(), mode);
        };
        self.call(cluster, (Call::SetNode, metrics), request, change).await
    }

    /// Sets the budget of a tenant.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn set_budget(
        &self,
        cluster: &ClusterNames,
        tenant: &str,
        budget: Budget,
        metrics: &Metrics,
    ) -> Result<(), CallError> {
        let Budget { reserved, limit } = budget;
        let wanted = wire::Tenant {
            name: tenant.to_owned(),
            reserved: Some(reserved.into()),
            limit: Some(limit.into()),
        };
        let request = SetTenantRequest { tenant: Some(wanted) };
        let request = async {
            self.target(cluster)?.placement().await?.set_tenant(request).await?;
            Ok::<_, CallError>(())
        };
        let change = |state: &mut ControlPlaneState| {
            state.budgets.insert(tenant.to_owned(), budget);
        };
        self.call(cluster, (Call::SetTenant, metrics), request, change).await
    }

    /// Removes the budget of a tenant, if it has one.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn remove_budget(
        &self,
        cluster: &ClusterNames,
        tenant: &str,
        metrics: &Metrics,
    ) -> Result<(), CallError> {
        let request = RemoveTenantRequest { name: tenant.to_owned() };
        let request = async {
            match self.target(cluster)?.placement().await?.remove_tenant(request).await {
                Err(status) if status.code() != Code::NotFound => Err(CallError::from(status)),
                _ => Ok(()),
            }
        };
        let change = |state: &mut ControlPlaneState| {
            state.budgets.remove(tenant);
        };
        self.call(cluster, (Call::RemoveTenant, metrics), request, change).await
    }

    /// Calls a cluster's control plane within [`TIMEOUT`], and applies the change to the cached state. A failed call is
    /// cached too, so that further calls wait.
    async fn call<T>(
        &self,
        cluster: &ClusterNames,
        label: (Call, &Metrics),
        request: impl Future<Output = Result<T, CallError>>,
        change: impl FnOnce(&mut ControlPlaneState),
    ) -> Result<T, CallError> {
        let called = timed(label, request).await;
        let shared = self.cache(cluster);
        let mut cache = shared.state.lock().await;
        match &called {
            Ok(_) => {
                if let Some(CachedState { result: Ok(known), .. }) = cache.cached.as_mut() {
                    change(Arc::make_mut(known));
                }
            }
            Err(CallError::Unavailable(message)) => {
                let until = Instant::now() + self.ttl(cluster, false);
                cache.cached = Some(CachedState { until, result: Err(message.clone()) });
            }
            // The cached state is outdated.
            Err(CallError::NotFound(_)) => cache.cached = None,
            Err(CallError::Rejected(_)) => {}
        }
        called
    }

    /// Returns the error that currently prevents calls, if there is one.
    async fn backoff_error(&self, cluster: &ClusterNames) -> Option<CallError> {
        let shared = self.cache(cluster);
        let cache = shared.state.lock().await;
        cache
            .current()
            .and_then(|held| held.result.as_ref().err())
            .map(|message| CallError::Unavailable(message.clone()))
    }

    fn ttl(&self, cluster: &ClusterNames, is_good: bool) -> Duration {
        if is_good {
            self.backoff.record_success(&cluster.uid);
            return HEALTHY_TTL;
        }
        self.backoff.record_failure(&cluster.uid).min(FAILED_TTL_MAX)
    }

    fn cache(&self, cluster: &ClusterNames) -> Arc<ClusterCache> {
        let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        caches.retain(|uid, (last_used, _)| {
            let is_kept = *uid == cluster.uid || now.duration_since(*last_used) < EVICT_AFTER;
            if !is_kept {
                self.backoff.record_success(uid);
            }
            is_kept
        });
        let (last_used, shared) = caches.entry(cluster.uid.clone()).or_insert_with(|| (now, Arc::default()));
        *last_used = now;
        Arc::clone(shared)
    }

    fn target(&self, cluster: &ClusterNames) -> Result<Target, CallError> {
        let key = cluster.key();
        let address = match self.addresses.get(&key) {
            Some(ControlPlaneAddress::Plain(address)) => {
                return Ok(Target { address: address.to_string(), security: Security::Plain });
            }
            Some(ControlPlaneAddress::Tls(address)) => address.clone(),
            None => cluster.control_plane_address(),
        };
        let securities = self.securities.lock().unwrap_or_else(PoisonError::into_inner);
        let security = securities.get(&key).cloned();
        let missing =
            || CallError::Unavailable("the operator has no certificate of the cluster yet".to_owned());
        Ok(Target { address, security: security.ok_or_else(missing)? })
    }
}

impl StateCache {
    /// Returns the cached state if it is still valid.
    fn current(&self) -> Option<&CachedState> {
        self.cached.as_ref().filter(|held| Instant::now() < held.until)
    }
}

impl CallError {
    /// The message of the error.
    pub fn message(&self) -> &str {
        match self {
            CallError::Unavailable(message) | CallError::NotFound(message) | CallError::Rejected(message) => {
                message
            }
        }
    }
}

impl From<Status> for CallError {
    fn from(status: Status) -> CallError {
        let message = status.message().to_owned();
        match status.code() {
            _ if is_absence(&status) => CallError::Unavailable(message),
            Code::NotFound => CallError::NotFound(message),
            _ => CallError::Rejected(message),
        }
    }
}

impl From<TierBytes> for Bytes {
    fn from(room: TierBytes) -> Bytes {
        Bytes { dram: room.dram, nvme: room.ssd }
    }
}

impl From<Bytes> for TierBytes {
    fn from(bytes: Bytes) -> TierBytes {
        TierBytes { dram: bytes.dram, ssd: bytes.nvme }
    }
}

/// Runs a call within [`TIMEOUT`] and counts it by its result.
async fn timed<T>(
    (call, metrics): (Call, &Metrics),
    request: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    let called = within(TIMEOUT, request).await;
    let result = match &called {
        Ok(_) => "done",
        Err(CallError::Unavailable(_)) => "absent",
        Err(CallError::NotFound(_) | CallError::Rejected(_)) => "refused",
    };
    metrics.record_call(call, result);
    called
}

async fn within<T>(
    timeout: Duration,
    request: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    let missing = |_| Err(CallError::Unavailable(format!("no response within {timeout:?}")));
    tokio::time::timeout(timeout, request).await.unwrap_or_else(missing)
}

/// Calls all members concurrently, and returns their answers by name. A hanging member does not delay the others beyond
/// [`MEMBER_TIMEOUT`]. `first` is a connection to any of them.
async fn call_members<T, F>(
    target: &Target,
    first: &Channel,
    request: impl Fn(PlacementClient<Channel>) -> F,
) -> Result<Vec<(String, Result<T, CallError>)>, CallError>
where
    F: Future<Output = Result<T, CallError>>,
{
    let listed = MembershipClient::new(first.clone()).list_members(ListMembersRequest {}).await?.into_inner();
    let (request, answering) = (&request, &listed.answering);
    let answers = listed.members.iter().map(|member| async move {
        let answer = within(MEMBER_TIMEOUT, async {
            // Reuse the connection to the member that answered.
            let reached = if member.name == *answering {
                first.clone()
            } else {
                Target { address: member.address.clone(), ..target.clone() }.connect().await?
            };
            request(PlacementClient::new(reached)).await
        });
        (member.name.clone(), answer.await)
    });
    Ok(join_all(answers).await)
}

/// Address of members, and the certificates for them.
#[derive(Clone, Debug)]
struct Target {
    address: String,
    security: Security,
}

impl Target {
    async fn placement(&self) -> Result<PlacementClient<Channel>, CallError> {
        Ok(PlacementClient::new(self.connect().await?))
    }

    async fn connect(&self) -> Result<Channel, CallError> {
        let Target { address, security } = self;
        let unavailable = |error: tonic::transport::Error| {
            // The innermost error contains the cause; the transport's own messages are generic.
            let cause = std::iter::successors(error.source(), |&error| error.source()).last();
            let cause = cause.map_or_else(|| error.to_string(), ToString::to_string);
            CallError::Unavailable(format!("{address}: {cause}"))
        };
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(unavailable)?;
        let endpoint = endpoint.connect_timeout(TIMEOUT).timeout(TIMEOUT);
        dial::connect(&endpoint, security).await.map_err(unavailable)
    }
}

async fn list(target: &Target) -> Result<ControlPlaneState, CallError> {
    let channel = target.connect().await?;
    let mut membership = MembershipClient::new(channel.clone());
    let nodes = membership.list_nodes(ListNodesRequest {}).await?.into_inner();
    let members = membership.list_members(ListMembersRequest {}).await?.into_inner();
    let tenants = PlacementClient::new(channel).list_tenants(ListTenantsRequest {}).await?.into_inner();
    let room = |bytes: Option<Bytes>| bytes.map(TierBytes::from).unwrap_or_default();
    let budgets = tenants.tenants.into_iter().filter_map(|state| state.tenant);
    let budgets = budgets.map(|wire::Tenant { name, reserved, limit }| {
        (name, Budget { reserved: room(reserved), limit: room(limit) })
    });
    let version =
        |member: MemberInfo| (member.name, Some(member.version).filter(|version| !version.is_empty()));
    Ok(ControlPlaneState {
        modes: nodes.nodes.into_iter().map(|node| (node.name, crds_mode(node.mode))).collect(),
        budgets: budgets.collect(),
        overcommitted: room(tenants.overcommitted),
        members: members.members.into_iter().map(version).collect(),
    })
}

fn wire_mode(mode: NodeMode) -> wire::NodeMode {
    match mode {
        NodeMode::Active => wire::NodeMode::Active,
        NodeMode::Cordoned => wire::NodeMode::Cordoned,
        NodeMode::Draining => wire::NodeMode::Draining,
    }
}

/// Converts a mode; unknown modes of newer versions count as cordoned.
fn crds_mode(mode: i32) -> NodeMode {
    match wire::NodeMode::try_from(mode) {
        Ok(wire::NodeMode::Active | wire::NodeMode::Unspecified) => NodeMode::Active,
        Ok(wire::NodeMode::Draining) => NodeMode::Draining,
        Ok(wire::NodeMode::Cordoned) | Err(_) => NodeMode::Cordoned,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framework::api_client::ApiRequests;

    fn names() -> ClusterNames {
        ClusterNames { namespace: "n".to_owned(), name: "c".to_owned(), uid: "u".to_owned() }
    }

    fn planes_at(address: std::net::SocketAddr) -> ControlPlanes {
        ControlPlanes::new(BTreeMap::from([("n/c".to_owned(), ControlPlaneAddress::Plain(address))]))
    }

    /// A control plane at an address without a listener.
    fn absent() -> (ControlPlanes, String) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        drop(listener);
        (planes_at(address), address.to_string())
    }

    fn has_called(metrics: &Metrics, times: u32) {
        let call = "reprise_operator_control_plane_calls_total{call=\"list\",result=\"absent\"}";
        let text = metrics.text();
        let is_it = |line: &str| *line == format!("{call} {times}");
        assert!(text.lines().any(is_it), "{times} times: {text}");
    }

    #[tokio::test]
    async fn reports_absent_control_plane_and_does_not_call_again_immediately() {
        let (planes, address) = absent();
        let (metrics, names) = (Metrics::new(ApiRequests::default()), names());
        let first = planes.state(&names, &metrics).await.expect_err("a failure");
        assert!(first.contains(&address) && first.contains("refused"), "{first}");
        assert_eq!(planes.state(&names, &metrics).await, Err(first.clone()));
        let holders = planes.holders(&names, "t", &[], &metrics).await;
        assert_eq!(holders, Err(CallError::Unavailable(first)), "the cached failure");
        has_called(&metrics, 1);
        // An unanswered call to all members delays other calls as well.
        let (planes, _) = absent();
        let first = planes.holders(&names, "t", &[], &metrics).await.expect_err("a failure");
        assert_eq!(planes.state(&names, &metrics).await, Err(first.message().to_owned()));
        has_called(&metrics, 2);
    }

    #[tokio::test]
    async fn change_of_members_invalidates_the_cached_state() {
        let (planes, _) = absent();
        let (metrics, names) = (Metrics::new(ApiRequests::default()), names());
        planes.require_members_version(&names, "1".to_owned()).await;
        let result: StateResult = Ok(Arc::new(ControlPlaneState::default()));
        let held = CachedState { until: Instant::now() + HEALTHY_TTL, result };
        planes.cache(&names).state.lock().await.cached = Some(held);
        planes.require_members_version(&names, "1".to_owned()).await;
        assert!(planes.state(&names, &metrics).await.is_ok(), "the cached state is valid");
        planes.require_members_version(&names, "2".to_owned()).await;
        let failure = planes.state(&names, &metrics).await.expect_err("another call, which fails");
        planes.require_members_version(&names, "3".to_owned()).await;
        assert_eq!(planes.state(&names, &metrics).await, Err(failure), "the cached failure remains valid");
        has_called(&metrics, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn times_out_if_the_server_accepts_but_does_not_respond() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let planes = planes_at(listener.local_addr().expect("bound"));
        let (metrics, names) = (Metrics::new(ApiRequests::default()), names());
        let begun = tokio::time::Instant::now();
        let read = || planes.state(&names, &metrics);
        let (one, other) = tokio::join!(read(), read());
        assert!(one.is_err() && one == other);
        assert!(begun.elapsed() < 2 * TIMEOUT, "the second caller waits for the result of the first");
    }
}
