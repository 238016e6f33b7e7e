//! Client of the clusters' control planes: reads modes of nodes, budgets of tenants and versions of members,
//! and sets modes and budgets.
//!
//! One read lists all nodes, budgets and members of a cluster and is cached for [`STATE_TTL`]: 1,000 nodes
//! cost three calls. A change of the members' StatefulSet invalidates the cache
//! ([`ControlPlanes::require_members_version`]), because it may describe replaced members. After an
//! unanswered call, no calls are made for [`RETRY_INTERVAL`]. Each call uses a new connection, so the next
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
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use reprise_crds::fields::NodeMode;
use reprise_identity::Security;
use reprise_proto::connection::{REPLY_BYTES_MAX, is_absence};
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

use crate::framework::metrics::Labels;
use crate::reconcile::authority::Certificates;
use crate::reconcile::names::ClusterNames;
use crate::settings::ControlPlaneAddress;

mod holders;
mod usage;

pub use usage::{MeasuredUsage, UsageResult};

/// Lifetime of a successful read.
const STATE_TTL: Duration = Duration::from_secs(25);
/// Timeout of a call including the connection, which normally takes milliseconds.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout per member of a call to all members, within the timeout of the whole call.
const MEMBER_TIMEOUT: Duration = Duration::from_secs(1);
/// Idle time after which the cache of a cluster is dropped.
const EVICT_AFTER: Duration = Duration::from_secs(600);
/// Maximum number of nodes in a message.
const NAMED_MAX: usize = 8;

/// Interval for checking that the control plane still has the desired state.
pub const POLL_INTERVAL: Duration = Duration::from_secs(30);
/// Interval for retrying until the control plane has the desired state.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Limits of a tenant in the whole cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Bytes guaranteed to the tenant.
    pub reserved: TierBytes,
    /// Maximum bytes; 2⁶⁴ − 1 means no limit.
    pub limit: TierBytes,
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
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// It does not respond, or is temporarily unable to.
    #[error("{0}")]
    Unavailable(String),
    /// The named object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// It rejects the request; the message is meant for users.
    #[error("{0}")]
    Rejected(String),
}

/// The state, or why it could not be read.
pub type StateResult = Result<Arc<ControlPlaneState>, String>;

/// Clients and caches of all control planes.
#[derive(Debug, Default)]
pub struct ControlPlanes {
    /// Addresses by `namespace/name` of control planes that are not reached by their service.
    addresses: BTreeMap<String, ControlPlaneAddress>,
    pub certificates: Certificates,
    /// Caches by the cluster's uid, with the time of the last access.
    caches: StdMutex<HashMap<String, (Instant, Arc<ClusterCache>)>>,
    /// Calls by name and result.
    calls: Family<Labels<2>, Counter>,
}

/// Cached reads of one control plane. Each is locked during a read, so that other callers wait for its result.
#[derive(Debug, Default)]
struct ClusterCache {
    state: Mutex<StateCache>,
    usage: Mutex<Option<usage::CachedUsage>>,
}

#[derive(Debug, Default)]
struct StateCache {
    /// The result of the last read or a failed call, and its end.
    cached: Option<(Instant, StateResult)>,
    /// Last observed `resourceVersion` of the members' StatefulSet; the cached state is at least as new.
    members: String,
}

impl StateCache {
    /// Returns the cached result if it is still valid.
    fn current(&self) -> Option<&StateResult> {
        self.cached.as_ref().filter(|(until, _)| Instant::now() < *until).map(|(_, result)| result)
    }

    fn set(&mut self, result: StateResult) {
        let ttl = if result.is_ok() { STATE_TTL } else { RETRY_INTERVAL };
        self.cached = Some((Instant::now() + ttl, result));
    }
}

impl ControlPlanes {
    /// Uses these addresses, and the service of the cluster for all others. Counts calls.
    pub fn new(
        addresses: BTreeMap<String, ControlPlaneAddress>,
        calls: Family<Labels<2>, Counter>,
    ) -> ControlPlanes {
        ControlPlanes { addresses, calls, ..ControlPlanes::default() }
    }

    /// Returns the state of a cluster's control plane within [`TIMEOUT`], possibly from the cache.
    pub async fn state(&self, cluster: &ClusterNames) -> StateResult {
        let shared = self.cache(cluster);
        let mut cache = shared.state.lock().await;
        if let Some(result) = cache.current() {
            return result.clone();
        }
        // The lack of a certificate is not cached: the next reconcile of the cluster ends it.
        let target = self.target(cluster).map_err(|error| error.to_string())?;
        let request = async { list(connect(&target.0, &target.1).await?).await };
        let response = self.counted("list", request).await;
        let result = response.map(Arc::new).map_err(|error| error.to_string());
        cache.set(result.clone());
        result
    }

    /// Invalidates a state that was read before this `resourceVersion` of the members' StatefulSet. It waits for a read
    /// in progress. A cached failure remains valid.
    pub async fn require_members_version(&self, cluster: &ClusterNames, members: String) {
        let shared = self.cache(cluster);
        let mut cache = shared.state.lock().await;
        if cache.members != members {
            cache.members = members;
            cache.cached.take_if(|(_, result)| result.is_ok());
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
    ) -> Result<NodeMode, CallError> {
        let request = SetNodeRequest { name: node.to_owned(), mode: wire_mode(mode).into() };
        let request = async { Ok(self.placement(cluster).await?.set_node(request).await?.into_inner()) };
        let reply = self.call(cluster, "set_node", request).await?;
        let change = |state: &mut ControlPlaneState| state.modes.insert(node.to_owned(), mode);
        self.update(cluster, change).await;
        Ok(crds_mode(reply.before))
    }

    /// Sets the budget of a tenant, or removes it.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn set_budget(
        &self,
        cluster: &ClusterNames,
        tenant: &str,
        budget: Option<Budget>,
    ) -> Result<(), CallError> {
        let name = tenant.to_owned();
        let Some(budget) = budget else {
            let request = async {
                match self.placement(cluster).await?.remove_tenant(RemoveTenantRequest { name }).await {
                    Err(status) if status.code() != Code::NotFound => Err(CallError::from(status)),
                    _ => Ok(()),
                }
            };
            self.call(cluster, "remove_tenant", request).await?;
            self.update(cluster, |state| state.budgets.remove(tenant)).await;
            return Ok(());
        };
        let Budget { reserved, limit } = budget;
        let wanted = wire::Tenant { name, reserved: Some(reserved.into()), limit: Some(limit.into()) };
        let request = SetTenantRequest { tenant: Some(wanted) };
        let request = async { Ok(self.placement(cluster).await?.set_tenant(request).await?) };
        self.call(cluster, "set_tenant", request).await?;
        self.update(cluster, |state| state.budgets.insert(tenant.to_owned(), budget)).await;
        Ok(())
    }

    /// Calls a cluster's control plane, unless a call has just failed. An unanswered call delays further calls.
    async fn call<T>(
        &self,
        cluster: &ClusterNames,
        name: &'static str,
        request: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        let shared = self.cache(cluster);
        self.target(cluster)?;
        if let Some(Err(message)) = shared.state.lock().await.current() {
            return Err(CallError::Unavailable(message.clone()));
        }
        let called = self.counted(name, request).await;
        match &called {
            Err(CallError::Unavailable(message)) => shared.state.lock().await.set(Err(message.clone())),
            // The cached state is outdated.
            Err(CallError::NotFound(_)) => shared.state.lock().await.cached = None,
            _ => {}
        }
        called
    }

    /// Runs a call within [`TIMEOUT`] and counts it by its result.
    async fn counted<T>(
        &self,
        name: &'static str,
        request: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        let called = within(TIMEOUT, request).await;
        let result = match &called {
            Ok(_) => "done",
            Err(CallError::Unavailable(_)) => "absent",
            Err(CallError::NotFound(_) | CallError::Rejected(_)) => "refused",
        };
        self.calls.get_or_create(&[("call", name), ("result", result)]).inc();
        called
    }

    /// Applies a write to the cached state.
    async fn update<R>(&self, cluster: &ClusterNames, change: impl FnOnce(&mut ControlPlaneState) -> R) {
        let shared = self.cache(cluster);
        if let Some((_, Ok(known))) = &mut shared.state.lock().await.cached {
            change(Arc::make_mut(known));
        }
    }

    fn cache(&self, cluster: &ClusterNames) -> Arc<ClusterCache> {
        let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        caches.retain(|uid, (last_used, _)| *uid == cluster.uid || last_used.elapsed() < EVICT_AFTER);
        let now = Instant::now();
        let (last_used, shared) = caches.entry(cluster.uid.clone()).or_insert_with(|| (now, Arc::default()));
        *last_used = now;
        Arc::clone(shared)
    }

    async fn placement(&self, cluster: &ClusterNames) -> Result<PlacementClient<Channel>, CallError> {
        Ok(placement(self.connect(cluster).await?.0))
    }

    /// Connects to any member. Also returns the certificates, for connections to the other members.
    async fn connect(&self, cluster: &ClusterNames) -> Result<(Channel, Security), CallError> {
        let (address, security) = self.target(cluster)?;
        Ok((connect(&address, &security).await?, security))
    }

    /// Returns the address of a cluster's control plane, and the certificates for it.
    fn target(&self, cluster: &ClusterNames) -> Result<(String, Security), CallError> {
        let certificates = || {
            let missing = "the operator has no certificate of the cluster yet";
            self.certificates.get(cluster).ok_or_else(|| CallError::Unavailable(missing.to_owned()))
        };
        Ok(match self.addresses.get(&cluster.key()) {
            Some(ControlPlaneAddress::Plain(address)) => (address.to_string(), Security::Plain),
            Some(ControlPlaneAddress::Tls(address)) => (address.clone(), certificates()?),
            None => (cluster.control_plane_address(), certificates()?),
        })
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
    first: &Channel,
    security: &Security,
    request: impl Fn(PlacementClient<Channel>) -> F,
) -> Result<Vec<(String, Result<T, CallError>)>, CallError>
where
    F: Future<Output = Result<T, CallError>>,
{
    let listed = MembershipClient::new(first.clone()).list_members(ListMembersRequest {}).await?.into_inner();
    let (request, answering) = (&request, &listed.answering);
    let answers = listed.members.into_iter().map(|member| async move {
        let answer = within(MEMBER_TIMEOUT, async {
            // Reuse the connection to the member that answered.
            let reached = if member.name == *answering {
                first.clone()
            } else {
                connect(&member.address, security).await?
            };
            request(placement(reached)).await
        });
        let answer = answer.await;
        (member.name, answer)
    });
    Ok(join_all(answers).await)
}

fn placement(channel: Channel) -> PlacementClient<Channel> {
    PlacementClient::new(channel).max_decoding_message_size(REPLY_BYTES_MAX)
}

async fn connect(address: &str, security: &Security) -> Result<Channel, CallError> {
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

/// Lists the first parts of a message, and the number of the others.
fn list_first(parts: &[String], all: usize, separator: &str) -> String {
    let shown = &parts[..parts.len().min(NAMED_MAX)];
    let listed = shown.join(separator);
    match all.saturating_sub(shown.len()) {
        0 => listed,
        more => format!("{listed}{separator}and {more} more"),
    }
}

async fn list(channel: Channel) -> Result<ControlPlaneState, CallError> {
    let mut membership = MembershipClient::new(channel.clone());
    let nodes = membership.list_nodes(ListNodesRequest {}).await?.into_inner();
    let members = membership.list_members(ListMembersRequest {}).await?.into_inner();
    let tenants = placement(channel).list_tenants(ListTenantsRequest {}).await?.into_inner();
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
    use std::future::pending;

    use super::*;
    use crate::reconcile::test_objects::names;

    /// Number of unanswered calls.
    fn absent(planes: &ControlPlanes) -> u64 {
        planes.calls.get_or_create(&[("call", "list"), ("result", "absent")]).get()
    }

    /// Control planes of which no member listens.
    fn unreachable() -> ControlPlanes {
        let address = ControlPlaneAddress::Plain(([127, 0, 0, 1], 1).into());
        ControlPlanes::new(BTreeMap::from([(names().key(), address)]), Family::default())
    }

    #[tokio::test]
    async fn lack_of_a_certificate_is_not_a_failed_call() {
        let (planes, names) = (ControlPlanes::default(), names());
        let failure = planes.state(&names).await.expect_err("there is no certificate");
        assert!(failure.contains("no certificate"), "{failure}");
        assert!(planes.set_mode(&names, "n1", NodeMode::Active).await.is_err());
        assert!(planes.cache(&names).state.lock().await.cached.is_none());
        assert_eq!(absent(&planes), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn unanswered_call_ends_and_delays_all_others() {
        let (planes, names, begun) = (unreachable(), names(), Instant::now());
        let unanswered = planes.call::<()>(&names, "list", pending()).await.expect_err("no answer");
        assert!(begun.elapsed() < 2 * TIMEOUT);
        assert_eq!(planes.state(&names).await, Err(unanswered.to_string()));
        assert_eq!(planes.holders(&names, "t", &[]).await, Err(unanswered));
        assert_eq!(absent(&planes), 1);
        tokio::time::advance(RETRY_INTERVAL).await;
        let failure = planes.state(&names).await.expect_err("no member listens");
        assert_eq!(planes.state(&names).await, Err(failure));
        assert_eq!(absent(&planes), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn change_of_members_invalidates_the_cached_state() {
        let (planes, names) = (unreachable(), names());
        planes.require_members_version(&names, "1".to_owned()).await;
        planes.cache(&names).state.lock().await.set(Ok(Arc::default()));
        planes.require_members_version(&names, "1".to_owned()).await;
        assert!(planes.state(&names).await.is_ok(), "the cached state is valid");
        planes.require_members_version(&names, "2".to_owned()).await;
        let failure = planes.state(&names).await.expect_err("another call, which fails");
        planes.require_members_version(&names, "3".to_owned()).await;
        assert_eq!(planes.state(&names).await, Err(failure), "the cached failure remains valid");
        assert_eq!(absent(&planes), 1);
    }
}
