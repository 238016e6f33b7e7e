//! The control planes of clusters, as the operator calls them: what they say of nodes' modes, tenants' budgets and their own versions, and what
//! they are told.
//!
//! One look at a control plane lists all nodes, budgets and members, and holds for [`STAYS_GOOD`], for whoever asks: 1,000 nodes cost three calls.
//! One from before the members' StatefulSet changed is not told any more ([`ControlPlanes::heed`]): it may be of members that have been replaced
//! since. After a call that was not answered nobody calls for a time that grows. Every call is a connection of its own, so the next one goes
//! to another member, and ends within [`PATIENCE`].
//!
//! What tenants hold is asked of every member, once a minute for all tenants ([`holdings`]).
//!
//! Nothing here decides what is wanted: see [`crate::node::mode`], [`crate::tenant::budget`] and [`crate::tenant::usage`].

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::{Duration, Instant};

use reprise_crds::fields::NodeMode;
use reprise_proto::connection::is_absence;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    self as wire, Bytes, ListMembersRequest, ListNodesRequest, ListTenantsRequest, MemberInfo,
    RemoveTenantRequest, SetNodeRequest, SetTenantRequest,
};
use tokio::sync::Mutex;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::backoff::Backoff;
use crate::metrics::{Call, Metrics};
use crate::names::ClusterNames;

mod holders;
mod holdings;

pub use holdings::{Holding, Unmeasured};

/// How long a look holds at which all was well.
const STAYS_GOOD: Duration = Duration::from_secs(25);
/// How long one holds, at the most, at which the control plane did not answer.
const STAYS_BAD_MAX: Duration = Duration::from_secs(30);
/// Connecting and answering takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(3);
/// What nobody has asked for so long belongs to a cluster that is gone.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Whoever tells a control plane something looks again so soon whether it is still so.
pub const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// The same as long as it is not so.
pub const LOOK_SOON: Duration = Duration::from_secs(5);

/// What a tenant may have in the whole cluster, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Sure to have.
    pub reserved: Room,
    /// At the most; 2⁶⁴ − 1 is no limit.
    pub limit: Room,
}

impl Budget {
    /// That of a tenant whose blocks are to go.
    pub const NOTHING: Budget =
        Budget { reserved: Room { dram: 0, ssd: 0 }, limit: Room { dram: 0, ssd: 0 } };
}

/// Bytes of both kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Of arenas.
    pub dram: u64,
    /// Of devices.
    pub ssd: u64,
}

/// What a control plane says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Of nodes that have registered, by name.
    pub modes: BTreeMap<String, NodeMode>,
    /// Of tenants that have budgets.
    pub budgets: BTreeMap<String, Budget>,
    /// By how much reservations of budgets exceed what living nodes have.
    pub overcommitted: Room,
    /// Versions of the members that are registered, by name; none of one that does not say it.
    pub members: BTreeMap<String, Option<String>>,
}

/// Why a control plane did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unmet {
    /// It does not answer, or cannot at the moment.
    Absent(String),
    /// There is nothing of this name.
    Unknown(String),
    /// It refuses, in words for people.
    Refused(String),
}

/// The version in which the StatefulSet of members was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MembersSeen(pub String);

/// A look, or why there is none.
pub type Look = Result<Arc<Known>, String>;

/// All control planes.
#[derive(Debug, Default)]
pub struct ControlPlanes {
    /// Where those are that are not found by their service, by `namespace/name`.
    addresses: BTreeMap<String, String>,
    /// By the cluster's unique id.
    planes: StdMutex<HashMap<String, Arc<Plane>>>,
    backoff: Backoff,
}

/// One of them.
#[derive(Debug)]
struct Plane {
    /// Held while it is asked: the others wait for the answer.
    last: Mutex<Last>,
    /// The same, of what tenants hold.
    holdings: Mutex<Option<holdings::Look>>,
    /// When somebody was interested in it last.
    asked: StdMutex<Instant>,
}

#[derive(Debug, Default)]
struct Last {
    held: Option<Held>,
    /// Members as they were seen last. What is held is not older.
    members: Option<MembersSeen>,
}

#[derive(Clone, Debug)]
struct Held {
    until: Instant,
    look: Look,
}

impl ControlPlanes {
    /// Those at these addresses are reached there, all others by the service of their cluster.
    pub fn new(addresses: BTreeMap<String, String>) -> ControlPlanes {
        ControlPlanes { addresses, ..ControlPlanes::default() }
    }

    /// What the control plane of a cluster says, within [`PATIENCE`].
    pub async fn look(&self, cluster: &ClusterNames, metrics: &Metrics) -> Look {
        let plane = self.plane(cluster);
        let mut last = plane.last.lock().await;
        if let Some(held) = last.held() {
            return held.look.clone();
        }
        let asked = within(list(&self.address(cluster))).await;
        metrics.called(Call::List, result(&asked));
        let look = asked.map(Arc::new).map_err(|unmet| unmet.words().to_owned());
        let until = Instant::now() + self.holds(cluster, look.is_ok());
        last.held = Some(Held { until, look: look.clone() });
        look
    }

    /// The members of a cluster were seen so. A look at others does not hold any more, also where it is under way; that nobody answers does.
    pub async fn heed(&self, cluster: &ClusterNames, members: MembersSeen) {
        let plane = self.plane(cluster);
        let mut last = plane.last.lock().await;
        if last.members.as_ref() != Some(&members) {
            last.members = Some(members);
            last.held = last.held.take().filter(|held| held.look.is_err());
        }
    }

    /// Sets what a node is for; what it was for before.
    ///
    /// # Errors
    /// [`Unmet`].
    pub async fn set_mode(
        &self,
        cluster: &ClusterNames,
        node: &str,
        mode: NodeMode,
        metrics: &Metrics,
    ) -> Result<NodeMode, Unmet> {
        let request = SetNodeRequest { name: node.to_owned(), mode: wire_mode(mode).into() };
        let called = within(async {
            let mut members = self.members(cluster).await?;
            Ok(members.set_node(request).await?.into_inner().before)
        });
        let called = called.await;
        metrics.called(Call::SetNode, result(&called));
        self.note(cluster, &called, |known| {
            known.modes.insert(node.to_owned(), mode);
        })
        .await;
        called.map(crds_mode)
    }

    /// Sets what a tenant may have.
    ///
    /// # Errors
    /// [`Unmet`].
    pub async fn set_budget(
        &self,
        cluster: &ClusterNames,
        tenant: &str,
        budget: Budget,
        metrics: &Metrics,
    ) -> Result<(), Unmet> {
        let Budget { reserved, limit } = budget;
        let wanted = wire::Tenant {
            name: tenant.to_owned(),
            reserved: Some(reserved.into()),
            limit: Some(limit.into()),
        };
        let request = SetTenantRequest { tenant: Some(wanted) };
        let called = within(async {
            self.members(cluster).await?.set_tenant(request).await?;
            Ok(())
        });
        let called = called.await;
        metrics.called(Call::SetTenant, result(&called));
        self.note(cluster, &called, |known| {
            known.budgets.insert(tenant.to_owned(), budget);
        })
        .await;
        called
    }

    /// Ends a tenant's budget, if it has one.
    ///
    /// # Errors
    /// [`Unmet`].
    pub async fn remove_budget(
        &self,
        cluster: &ClusterNames,
        tenant: &str,
        metrics: &Metrics,
    ) -> Result<(), Unmet> {
        let request = RemoveTenantRequest { name: tenant.to_owned() };
        let called = within(async {
            self.members(cluster).await?.remove_tenant(request).await?;
            Ok(())
        });
        let called = match called.await {
            Err(Unmet::Unknown(_)) => Ok(()),
            other => other,
        };
        metrics.called(Call::RemoveTenant, result(&called));
        self.note(cluster, &called, |known| {
            known.budgets.remove(tenant);
        })
        .await;
        called
    }

    async fn members(&self, cluster: &ClusterNames) -> Result<PlacementClient<Channel>, Unmet> {
        Ok(PlacementClient::new(channel(&self.address(cluster)).await?))
    }

    /// Puts what was done into the look that holds; after a call without an answer the next ones wait as well.
    async fn note<T>(
        &self,
        cluster: &ClusterNames,
        called: &Result<T, Unmet>,
        change: impl FnOnce(&mut Known),
    ) {
        let plane = self.plane(cluster);
        let mut last = plane.last.lock().await;
        match called {
            Ok(_) => {
                if let Some(Held { look: Ok(known), .. }) = last.held.as_mut() {
                    change(Arc::make_mut(known));
                }
            }
            Err(Unmet::Absent(words)) => {
                let until = Instant::now() + self.holds(cluster, false);
                last.held = Some(Held { until, look: Err(words.clone()) });
            }
            // The members know something else than the look.
            Err(Unmet::Unknown(_)) => last.held = None,
            Err(Unmet::Refused(_)) => {}
        }
    }

    /// Why nobody calls at the moment, if so.
    async fn silence(&self, cluster: &ClusterNames) -> Option<Unmet> {
        let plane = self.plane(cluster);
        let last = plane.last.lock().await;
        last.held().and_then(|held| held.look.as_ref().err()).map(|words| Unmet::Absent(words.clone()))
    }

    fn holds(&self, cluster: &ClusterNames, is_good: bool) -> Duration {
        if is_good {
            self.backoff.succeeded(&cluster.uid);
            return STAYS_GOOD;
        }
        self.backoff.failed(&cluster.uid).min(STAYS_BAD_MAX)
    }

    fn plane(&self, cluster: &ClusterNames) -> Arc<Plane> {
        let mut planes = self.planes.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let asked = |plane: &Plane| *plane.asked.lock().unwrap_or_else(PoisonError::into_inner);
        planes.retain(|uid, plane| {
            let stays = *uid == cluster.uid || now.duration_since(asked(plane)) < FORGOTTEN_AFTER;
            if !stays {
                self.backoff.succeeded(uid);
            }
            stays
        });
        let new = || {
            Arc::new(Plane { last: Mutex::default(), holdings: Mutex::default(), asked: StdMutex::new(now) })
        };
        let plane = planes.entry(cluster.uid.clone()).or_insert_with(new);
        *plane.asked.lock().unwrap_or_else(PoisonError::into_inner) = now;
        Arc::clone(plane)
    }

    fn address(&self, cluster: &ClusterNames) -> String {
        self.addresses.get(&cluster.key()).cloned().unwrap_or_else(|| cluster.control_plane_address())
    }
}

impl Last {
    /// What is told still.
    fn held(&self) -> Option<&Held> {
        self.held.as_ref().filter(|held| Instant::now() < held.until)
    }
}

impl Unmet {
    /// What to say of it.
    pub fn words(&self) -> &str {
        match self {
            Unmet::Absent(words) | Unmet::Unknown(words) | Unmet::Refused(words) => words,
        }
    }
}

impl From<Status> for Unmet {
    fn from(status: Status) -> Unmet {
        let words = status.message().to_owned();
        match status.code() {
            _ if is_absence(&status) => Unmet::Absent(words),
            Code::NotFound => Unmet::Unknown(words),
            _ => Unmet::Refused(words),
        }
    }
}

impl From<Room> for Bytes {
    fn from(room: Room) -> Bytes {
        Bytes { dram: room.dram, nvme: room.ssd }
    }
}

impl From<Bytes> for Room {
    fn from(bytes: Bytes) -> Room {
        Room { dram: bytes.dram, ssd: bytes.nvme }
    }
}

/// As metrics call what became of a call.
fn result<T>(called: &Result<T, Unmet>) -> &'static str {
    match called {
        Ok(_) => "done",
        Err(Unmet::Absent(_)) => "absent",
        Err(Unmet::Unknown(_) | Unmet::Refused(_)) => "refused",
    }
}

async fn within<T>(call: impl Future<Output = Result<T, Unmet>>) -> Result<T, Unmet> {
    let late = || Unmet::Absent(format!("no answer within {PATIENCE:?}"));
    tokio::time::timeout(PATIENCE, call).await.unwrap_or_else(|_| Err(late()))
}

async fn channel(address: &str) -> Result<Channel, Unmet> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"));
    let endpoint = endpoint.map_err(|error| Unmet::Absent(format!("{address}: {}", innermost(&error))))?;
    let connecting = endpoint.connect_timeout(PATIENCE).timeout(PATIENCE).connect().await;
    connecting.map_err(|error| Unmet::Absent(format!("{address}: {}", innermost(&error))))
}

/// The transport's own words say nothing; those of what lies beneath do.
fn innermost(error: &dyn Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

async fn list(address: &str) -> Result<Known, Unmet> {
    let channel = channel(address).await?;
    let mut membership = MembershipClient::new(channel.clone());
    let nodes = membership.list_nodes(ListNodesRequest {}).await?.into_inner();
    let members = membership.list_members(ListMembersRequest {}).await?.into_inner();
    let tenants = PlacementClient::new(channel).list_tenants(ListTenantsRequest {}).await?.into_inner();
    let room = |bytes: Option<Bytes>| bytes.map(Room::from).unwrap_or_default();
    let budgets = tenants.tenants.into_iter().filter_map(|state| state.tenant);
    let budgets = budgets.map(|wire::Tenant { name, reserved, limit }| {
        (name, Budget { reserved: room(reserved), limit: room(limit) })
    });
    Ok(Known {
        modes: nodes.nodes.into_iter().map(|node| (node.name, crds_mode(node.mode))).collect(),
        budgets: budgets.collect(),
        overcommitted: room(tenants.overcommitted),
        members: members.members.into_iter().map(said_by).collect(),
    })
}

/// A member's name, and its version where it says one.
fn said_by(member: MemberInfo) -> (String, Option<String>) {
    let MemberInfo { name, version, .. } = member;
    (name, Some(version).filter(|version| !version.is_empty()))
}

fn wire_mode(mode: NodeMode) -> wire::NodeMode {
    match mode {
        NodeMode::Active => wire::NodeMode::Active,
        NodeMode::Cordoned => wire::NodeMode::Cordoned,
        NodeMode::Draining => wire::NodeMode::Draining,
    }
}

/// A mode that this version does not know is one in which nothing is placed there.
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
    use crate::requests::ApiRequests;

    fn names() -> ClusterNames {
        ClusterNames { namespace: "n".to_owned(), name: "c".to_owned(), uid: "u".to_owned() }
    }

    /// A control plane at whose address nobody listens.
    fn absent() -> (ControlPlanes, String) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        drop(listener);
        (ControlPlanes::new(BTreeMap::from([("n/c".to_owned(), address.clone())])), address)
    }

    fn has_called(metrics: &Metrics, times: u32) {
        let call = "reprise_operator_control_plane_calls_total{call=\"list\",result=\"absent\"}";
        let text = metrics.text();
        let is_it = |line: &str| *line == format!("{call} {times}");
        assert!(text.lines().any(is_it), "{times} times: {text}");
    }

    #[tokio::test]
    async fn a_control_plane_that_is_away_is_said_to_be_and_not_called_again_at_once() {
        let (planes, address) = absent();
        let metrics = Metrics::new(ApiRequests::default());
        let first = planes.look(&names(), &metrics).await.expect_err("nobody listens");
        assert!(first.contains(&address) && first.contains("refused"), "{first}");
        assert_eq!(planes.look(&names(), &metrics).await, Err(first.clone()));
        let holders = planes.holders(&names(), "t", &[], &metrics).await;
        assert_eq!(holders, Err(Unmet::Absent(first)), "whoever asks");
        has_called(&metrics, 1);
    }

    #[tokio::test]
    async fn who_is_not_answered_who_holds_blocks_keeps_the_others_from_calling() {
        let (planes, _) = absent();
        let metrics = Metrics::new(ApiRequests::default());
        let first = planes.holders(&names(), "t", &[], &metrics).await.expect_err("nobody listens");
        assert_eq!(planes.holders(&names(), "t", &[], &metrics).await, Err(first.clone()));
        assert_eq!(planes.look(&names(), &metrics).await, Err(first.words().to_owned()));
        has_called(&metrics, 1);
    }

    #[tokio::test]
    async fn a_look_from_before_members_changed_is_not_told_any_more() {
        let (planes, _) = absent();
        let (metrics, names) = (Metrics::new(ApiRequests::default()), names());
        let seen = |version: &str| MembersSeen(version.to_owned());
        planes.heed(&names, seen("1")).await;
        let look: Look = Ok(Arc::new(Known::default()));
        let held = Held { until: Instant::now() + STAYS_GOOD, look };
        planes.plane(&names).last.lock().await.held = Some(held);
        planes.heed(&names, seen("1")).await;
        assert!(planes.look(&names, &metrics).await.is_ok(), "nothing has changed");
        planes.heed(&names, seen("2")).await;
        let asked = planes.look(&names, &metrics).await.expect_err("it is asked again, and nobody listens");
        planes.heed(&names, seen("3")).await;
        assert_eq!(planes.look(&names, &metrics).await, Err(asked), "who is away is left alone all the same");
        has_called(&metrics, 1);
    }

    #[tokio::test]
    async fn one_that_takes_connections_and_says_nothing_is_given_up() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let planes = ControlPlanes::new(BTreeMap::from([("n/c".to_owned(), address)]));
        let (metrics, names) = (Metrics::new(ApiRequests::default()), names());
        let begun = Instant::now();
        let asked = || planes.look(&names, &metrics);
        let (one, other) = tokio::join!(asked(), asked());
        assert!(one.is_err() && one == other);
        assert!(begun.elapsed() < 2 * PATIENCE, "the second waits for the answer to the first");
    }

    #[test]
    fn what_members_say_is_told_from_their_absence() {
        let unmet = |status: Status| Unmet::from(status);
        assert!(matches!(unmet(Status::unavailable("not now")), Unmet::Absent(_)));
        assert!(matches!(unmet(Status::not_found("no node")), Unmet::Unknown(_)));
        let refused = unmet(Status::failed_precondition("dram: too much"));
        assert_eq!(refused, Unmet::Refused("dram: too much".to_owned()));
    }

    #[test]
    fn a_member_that_says_no_version_has_none() {
        let member = |version: &str| MemberInfo {
            name: "m".to_owned(),
            version: version.to_owned(),
            ..MemberInfo::default()
        };
        assert_eq!(said_by(member("0.1.0")), ("m".to_owned(), Some("0.1.0".to_owned())));
        assert_eq!(said_by(member("")), ("m".to_owned(), None));
    }

    #[test]
    fn modes_go_there_and_back() {
        for mode in [NodeMode::Active, NodeMode::Cordoned, NodeMode::Draining] {
            assert_eq!(crds_mode(wire_mode(mode).into()), mode);
        }
        assert_eq!(crds_mode(99), NodeMode::Cordoned);
    }
}
