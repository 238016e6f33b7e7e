//! What a cluster is: conditions and sums over its nodes. Pure.

use std::sync::Arc;
use std::time::Duration;

use kube::api::DynamicObject;
use reprise_crds::cluster::{
    AgentCounts, ClusterCapacity, Connection, DeviceAccessMode, EtcdMode, MemberCounts, RdmaMode,
};
use reprise_crds::fields::{HostPath, Name, Quantity, Text, Uid};
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason, find, holds};
use reprise_crds::{CacheNode, KVCacheCluster, KVCacheClusterStatus};

use super::REPORTED_WITHIN;
use super::build::configuration::agent_digest;
use super::build::is_replaced;
use super::dereference::Found;
use super::versions::{Versions, image_of};
use crate::children::Applied;
use crate::clock;
use crate::names::ClusterNames;
use crate::plan::Refusal;

/// A store that answers for the first time has all of its members so soon.
const MEMBERS_COME_WITHIN: Duration = Duration::from_secs(60);

/// So many names are in a message, at the most.
const NAMES_MAX: usize = 5;

/// What to say of a cluster. Nothing was applied where it is refused or paused.
pub fn of(
    cluster: &KVCacheCluster,
    found: &Found,
    refused: Option<&Refusal>,
    applied: Option<&Applied>,
) -> (KVCacheClusterStatus, Vec<Finding>) {
    let agents = agents(cluster, found);
    let members = MemberCounts {
        desired: cluster.spec.control_plane.replicas,
        ready: number(found.members.as_deref(), "readyReplicas"),
    };
    let mut findings = vec![
        accepted(refused),
        etcd(cluster, found),
        control_plane(&members),
        agents_ready(found, &agents),
        pools(cluster, found),
    ];
    let works = findings.clone();
    let versions = Versions::of(cluster, found);
    let compatible = versions.compatible(cluster, found);
    findings.push(progressing(cluster, found, refused, &members, &agents));
    findings.push(degraded(cluster, found, (&works, &compatible), applied));
    findings.push(ready(&works, applied));
    findings.push(compatible);
    findings.push(transport(cluster));
    let connection = Connection {
        config_map: Name::new(found.referred.names.connection()),
        socket_directory: HostPath::new(cluster.spec.agents.socket.directory.as_str()),
        control_plane: Text::new(found.referred.names.control_plane_address()),
    };
    let status = KVCacheClusterStatus {
        cluster_id: cluster.metadata.uid.clone().map(Uid::new),
        versions: versions.running(),
        members: Some(members),
        agents: Some(agents),
        capacity: capacity(cluster, found),
        connection: refused.is_none().then_some(connection),
        ..KVCacheClusterStatus::default()
    };
    (status, findings)
}

/// Pods of a workload that run what is wanted of them, by a field of its status: none while its controller has not seen what that is.
pub(super) fn updated(workload: Option<&DynamicObject>, image: &str, field: &str) -> u32 {
    let is_seen = |workload: &&DynamicObject| {
        let observed = workload.data["status"]["observedGeneration"].as_i64();
        observed.is_some() && observed == workload.metadata.generation
    };
    let is_wanted = |workload: &&DynamicObject| image_of(workload).is_some_and(|runs| runs == image);
    number(workload.filter(is_seen).filter(is_wanted), field)
}

/// A number of a workload's status, nothing while it is not there.
fn number(workload: Option<&DynamicObject>, field: &str) -> u32 {
    let number = workload.and_then(|workload| workload.data["status"][field].as_u64());
    number.and_then(|number| u32::try_from(number).ok()).unwrap_or_default()
}

/// Whether a node's agent has said something lately.
pub fn has_reported(node: &CacheNode) -> bool {
    let last = node.status.as_ref().and_then(|status| status.last_updated.as_ref());
    last.is_some_and(|last| clock::since(last) <= REPORTED_WITHIN)
}

/// Whether a node's agent serves engines.
pub fn is_ready(node: &CacheNode) -> bool {
    let conditions = node.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    has_reported(node) && holds(conditions, Type::AgentReady, 0)
}

fn agents(cluster: &KVCacheCluster, found: &Found) -> AgentCounts {
    let wanted = agent_digest(cluster, &found.referred);
    let is_updated = |node: &CacheNode| {
        let applied = node.status.as_ref().and_then(|status| status.applied.as_ref());
        let digest = applied.and_then(|applied| applied.configuration_digest.as_ref());
        digest.is_some_and(|digest| digest.as_str() == wanted)
    };
    let count = |test: &dyn Fn(&CacheNode) -> bool| {
        u32::try_from(found.cache_nodes.iter().filter(|node| test(node)).count()).unwrap_or(u32::MAX)
    };
    AgentCounts {
        desired: u32::try_from(found.plan.nodes.len()).unwrap_or(u32::MAX),
        ready: count(&is_ready),
        // The configuration says nothing of images, and the DaemonSet's controller nothing of what agents have read.
        updated: count(&|node| is_ready(node) && is_updated(node)).min(updated(
            found.agents.as_deref(),
            &found.images.agent,
            "updatedNumberScheduled",
        )),
    }
}

fn accepted(refused: Option<&Refusal>) -> Finding {
    match refused {
        Some(Refusal { reason, message }) => Finding::no(Type::Accepted, *reason, message),
        None => Finding::yes(Type::Accepted, Reason::AsDesired, "the spec is right"),
    }
}

fn etcd(cluster: &KVCacheCluster, found: &Found) -> Finding {
    let kind = Type::EtcdReady;
    match (&found.store, cluster.spec.etcd.mode) {
        (Some(look), _) => match (&look.secrets, &look.answer) {
            (Err(refused), _) => Finding::no(kind, refused.reason, &refused.message),
            (_, Ok(())) => Finding::yes(kind, Reason::AsDesired, "etcd answers"),
            (_, Err(said)) => {
                let endpoints = cluster.spec.etcd.external.as_ref().map(|external| {
                    external.endpoints.iter().map(|endpoint| endpoint.as_str()).collect::<Vec<_>>().join(", ")
                });
                let message = format!(
                    "etcd at {} cannot be used: {said}. Look at endpoints, network policies, certificates and user",
                    endpoints.unwrap_or_default()
                );
                Finding::no(kind, Reason::EtcdUnreachable, message)
            }
        },
        (None, EtcdMode::External) => Finding::unknown(kind, Reason::Progressing, "not looked at yet"),
        (None, EtcdMode::Managed) => {
            if found.etcd.as_deref().is_some_and(is_replaced) {
                let message = "no member of etcd is wanted just now: all are replaced at once for a new authority of certificates, or \
                               somebody has scaled it to 0";
                return Finding::no(kind, Reason::Progressing, message);
            }
            let members = etcd_members(cluster, found.etcd.as_deref());
            let EtcdMembers { desired, ready } = members;
            if members.answer() {
                return Finding::yes(
                    kind,
                    Reason::AsDesired,
                    format!("{ready} of {desired} members are ready"),
                );
            }
            if let Some(lacks) = &found.volumes {
                return Finding::no(kind, Reason::NoStorageClass, lacks);
            }
            let message = format!(
                "{ready} of {desired} members of etcd are ready; if it stays so, look at pods and volume claims of {}",
                found.referred.names.etcd()
            );
            Finding::no(kind, Reason::Progressing, message)
        }
    }
}

/// Members of an etcd that the operator runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct EtcdMembers {
    desired: u32,
    ready: u32,
}

impl EtcdMembers {
    /// A store answers while most of its members do.
    pub(super) fn answer(self) -> bool {
        self.ready > self.desired / 2
    }

    /// What to say of a store that answers without some of them: the next loss may be one too many.
    fn missing(self, names: &ClusterNames) -> Option<Refusal> {
        let EtcdMembers { desired, ready } = self;
        let more = ready.saturating_sub(desired / 2);
        let message = format!(
            "{ready} of {desired} members of etcd are ready, and it answers; without {more} more it does not: look at pods and volume claims of {}",
            names.etcd()
        );
        (self.answer() && ready < desired).then(|| Refusal::new(Reason::MembersMissing, message))
    }
}

/// How many there are.
pub(super) fn etcd_members(cluster: &KVCacheCluster, etcd: Option<&DynamicObject>) -> EtcdMembers {
    let desired = u32::from(cluster.spec.etcd.managed.clone().unwrap_or_default().replicas);
    EtcdMembers { desired, ready: number(etcd, "readyReplicas") }
}

fn control_plane(members: &MemberCounts) -> Finding {
    let message = format!("{} of {} members are ready", members.ready, members.desired);
    if members.ready >= members.desired {
        Finding::yes(Type::ControlPlaneReady, Reason::AsDesired, message)
    } else {
        Finding::no(Type::ControlPlaneReady, Reason::Progressing, message)
    }
}

fn agents_ready(found: &Found, agents: &AgentCounts) -> Finding {
    let kind = Type::AgentsReady;
    if agents.desired == 0 {
        let message = "no node is selected: label nodes as agents.nodeSelector says, or change it";
        return Finding::no(kind, Reason::NoNodes, message);
    }
    let message = format!("{} of {} agents are ready", agents.ready, agents.desired);
    if agents.ready >= agents.desired {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let ready = |node: &String| {
        found.cache_nodes.iter().any(|one| one.metadata.name.as_ref() == Some(node) && is_ready(one))
    };
    let late: Vec<&str> =
        found.plan.nodes.iter().filter(|node| !ready(node)).map(String::as_str).take(NAMES_MAX).collect();
    let message = format!("{message}; look at the agents' pods on {}", late.join(", "));
    // Agents that have never said anything are on their way; one that was there and is not any more is a loss.
    let spoke = |node: &&Arc<CacheNode>| {
        !is_ready(node) && node.status.as_ref().is_some_and(|status| status.last_updated.is_some())
    };
    let lost = found.cache_nodes.iter().any(|node| spoke(&node));
    Finding::no(kind, if lost { Reason::NodesNotReady } else { Reason::Progressing }, message)
}

fn pools(cluster: &KVCacheCluster, found: &Found) -> Finding {
    let kind = Type::PoolsBound;
    let key = found.referred.names.key();
    let wrong = found.referred.pools.iter().find_map(|named| {
        let name = &named.name;
        if named.pool.is_none() {
            let message = format!("SSDPool {name} is not there: make it, or remove it from pools");
            return Some((Reason::ReferenceNotFound, message));
        }
        if let Some(refused) = &named.plan.refused {
            return Some((refused.reason, format!("SSDPool {name} is refused: {}", refused.message)));
        }
        let other = named.plan.cluster.as_ref().filter(|cluster| **cluster != key)?;
        let message =
            format!("SSDPool {name} belongs to KVCacheCluster {other} already: make one of its own");
        Some((Reason::Conflict, message))
    });
    match wrong {
        Some((reason, message)) => Finding::no(kind, reason, message),
        None if found.referred.pools.is_empty() => {
            Finding::yes(kind, Reason::AsDesired, "no pools are named: blocks live in memory only")
        }
        None => {
            let bound = format!("{} pools are bound", found.referred.pools.len());
            Finding::yes(kind, Reason::AsDesired, bound + &unopened(cluster, found))
        }
    }
}

/// What to know of raw devices that nothing gives to the agents' pods. Runtimes can be told to allow them, so nothing is refused.
fn unopened(cluster: &KVCacheCluster, found: &Found) -> String {
    let raw: Vec<&str> = found.referred.raw_pools().take(NAMES_MAX).collect();
    if raw.is_empty() || cluster.spec.agents.device_access.mode != DeviceAccessMode::None {
        return String::new();
    }
    format!(
        "; agents' pods open the raw devices of {} only where the nodes' runtime allows it, since agents.deviceAccess.mode is None: where \
         it does not, use DevicePlugin or Privileged",
        raw.join(", ")
    )
}

/// As with the engines of pools, what is done another way works, so it is not counted as degraded.
fn transport(cluster: &KVCacheCluster) -> Finding {
    let kind = Type::TransportFallback;
    match cluster.spec.agents.rdma.mode {
        RdmaMode::None => Finding::no(kind, Reason::AsDesired, "agents speak TCP, as is wanted"),
        mode => {
            let message = format!(
                "agents speak TCP: this release has no RDMA transport. agents.rdma.mode {} gives their pods what one needs, and nothing \
                 uses it: use None to take it away",
                mode.as_str()
            );
            Finding::yes(kind, Reason::Unsupported, message)
        }
    }
}

fn progressing(
    cluster: &KVCacheCluster,
    found: &Found,
    refused: Option<&Refusal>,
    members: &MemberCounts,
    agents: &AgentCounts,
) -> Finding {
    let kind = Type::Progressing;
    if cluster.spec.paused {
        let message =
            "the cluster is paused and nothing of it is changed: set paused to false when you are done";
        return Finding::no(kind, Reason::Paused, message);
    }
    if let Some(refused) = refused {
        return Finding::no(kind, refused.reason, "nothing is changed until the spec is accepted");
    }
    let updated = updated(found.members.as_deref(), &found.images.control_plane, "updatedReplicas");
    if members.ready < members.desired || updated < members.desired {
        let message = format!("{updated} of {} members run what is wanted", members.desired);
        return Finding::yes(kind, Reason::Progressing, message);
    }
    if agents.updated < agents.desired {
        let message = format!("{} of {} agents run what is wanted", agents.updated, agents.desired);
        return Finding::yes(kind, Reason::Progressing, message);
    }
    Finding::no(kind, Reason::AsDesired, "nothing is under way")
}

/// The first thing that is not so, and that nobody waits for: it works, with less.
fn degraded(
    cluster: &KVCacheCluster,
    found: &Found,
    (works, compatible): (&[Finding], &Finding),
    applied: Option<&Applied>,
) -> Finding {
    let refused = applied.and_then(|applied| applied.refused.first());
    if let Some(refused) = refused {
        return Finding::yes(Type::Degraded, refused.reason, &refused.message);
    }
    let wrong = works.iter().find(|found| !found.is_good() && found.reason != Reason::Progressing);
    let far = Some(compatible).filter(|found| found.reason == Reason::VersionSkew);
    if let Some(wrong) = wrong.or(far) {
        return Finding::yes(Type::Degraded, wrong.reason, format!("{}: {}", wrong.kind, wrong.message));
    }
    // All works with the certificates and members that there are, so nothing else says it.
    match found.authority.clone().or_else(|| missing_member(cluster, found)) {
        Some(lost) => Finding::yes(Type::Degraded, lost.reason, &lost.message),
        None => Finding::no(Type::Degraded, Reason::AsDesired, ""),
    }
}

/// What to say of an etcd of the operator's that answers without some of its members, once all have had the time to come, and unless they are
/// replaced one after the other.
fn missing_member(cluster: &KVCacheCluster, found: &Found) -> Option<Refusal> {
    let etcd = found.etcd.as_deref();
    let said = cluster.status.as_ref().and_then(|status| find(&status.conditions, Type::EtcdReady));
    let has_settled = said.is_some_and(|said| {
        said.status == ConditionStatus::True
            && clock::since(&said.last_transition_time) >= MEMBERS_COME_WITHIN
    });
    let is_managed = cluster.spec.etcd.mode == EtcdMode::Managed;
    let members = etcd_members(cluster, etcd);
    let is_updated = updated(etcd, &found.images.etcd, "updatedReplicas") >= members.desired;
    members.missing(&found.referred.names).filter(|_| is_managed && has_settled && is_updated)
}

fn ready(works: &[Finding], applied: Option<&Applied>) -> Finding {
    let kind = Type::Ready;
    if let Some(refused) = applied.and_then(|applied| applied.refused.first()) {
        return Finding::no(kind, refused.reason, &refused.message);
    }
    match works.iter().find(|found| !found.is_good()) {
        Some(found) => Finding::no(kind, found.reason, format!("{}: {}", found.kind, found.message)),
        None => Finding::yes(kind, Reason::AsDesired, "members, store, agents and pools are as desired"),
    }
}

/// Whether a condition that is good when true is true.
trait Good {
    fn is_good(&self) -> bool;
}

impl Good for Finding {
    fn is_good(&self) -> bool {
        self.status == reprise_crds::status::ConditionStatus::True
    }
}

fn capacity(cluster: &KVCacheCluster, found: &Found) -> Option<ClusterCapacity> {
    let capacities = || {
        let fresh = found.cache_nodes.iter().filter(|node| has_reported(node));
        fresh.filter_map(|node| node.status.as_ref()?.capacity.as_ref())
    };
    capacities().next()?;
    let sum = |of: fn(&reprise_crds::node::NodeCapacity) -> &Quantity| {
        let bytes = capacities().filter_map(|capacity| of(capacity).bytes().ok());
        Quantity::of_bytes(bytes.fold(0, u64::saturating_add))
    };
    let mut fresh = ClusterCapacity {
        dram_total: sum(|capacity| &capacity.dram_total),
        ssd_total: sum(|capacity| &capacity.ssd_total),
        ssd_used: sum(|capacity| &capacity.ssd_used),
        last_updated: clock::now(),
    };
    // The time of the sums is that of their last change: a status that says the same again is not written.
    let before = cluster.status.as_ref().and_then(|status| status.capacity.as_ref());
    if let Some(before) = before {
        let now = std::mem::replace(&mut fresh.last_updated, before.last_updated.clone());
        if fresh != *before {
            fresh.last_updated = now;
        }
    }
    Some(fresh)
}

#[cfg(test)]
mod tests;
