//! Computes the status of a cluster: conditions, and sums over its nodes. Pure.

use reprise_crds::cluster::{AgentCounts, ClusterCapacity, Connection, MemberCounts};
use reprise_crds::fields::{HostPath, Name, Quantity, Text, Uid};
use reprise_crds::node::NodeCapacity;
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason};
use reprise_crds::{CacheNode, KVCacheCluster, KVCacheClusterStatus};

use super::build::configuration::agent_digest;
use super::dereference::ClusterInputs;
use super::etcd;
use super::versions::Versions;
use crate::framework::children::ApplyOutcome;
use crate::framework::clock;
use crate::framework::refusal::{Refusal, accepted, list};
use crate::reconcile::authority::AuthorityState;
use crate::reconcile::membership::{has_reported, is_ready};

/// Computes the status and conditions of a cluster. `applied` is `None` if the cluster is rejected or paused.
pub fn compute(
    cluster: &KVCacheCluster,
    inputs: &ClusterInputs,
    refused: Option<&Refusal>,
    applied: Option<&ApplyOutcome>,
) -> (KVCacheClusterStatus, Vec<Finding>) {
    let agents = agents(cluster, inputs);
    let members = MemberCounts { desired: cluster.spec.control_plane.replicas, ready: inputs.members.ready };
    let works = [
        accepted(refused.or(inputs.assignment.conflict.as_ref())),
        etcd::ready(cluster, inputs),
        control_plane(&members),
        agents_ready(inputs, &agents),
        pools(inputs),
    ];
    let versions = Versions::of(cluster, inputs);
    // Running agents and members keep their certificates, so a problem of the authority affects only new pods.
    let lasting = [certificates(inputs), versions.compatible()];
    let failed = applied.and_then(|applied| applied.refused.first());
    let degraded = degraded(cluster, inputs, works.iter().chain(&lasting), failed);
    let ready = match failed.cloned().or_else(|| works.iter().find(|one| !is_true(one)).map(refusal)) {
        Some(Refusal { reason, message }) => Finding::no(Type::Ready, reason, message),
        None => {
            Finding::yes(Type::Ready, Reason::AsDesired, "members, etcd, agents and pools are as desired")
        }
    };
    let progressing = progressing(cluster, inputs, refused, (&members, &agents));
    let connection = Connection {
        config_map: Name::new(inputs.agent_config.names.connection()),
        socket_directory: HostPath::new(cluster.spec.agents.socket.directory.as_str()),
        control_plane: Text::new(inputs.agent_config.names.control_plane_address()),
    };
    let status = KVCacheClusterStatus {
        cluster_id: cluster.metadata.uid.clone().map(Uid::new),
        versions: versions.status(),
        members: Some(members),
        agents: Some(agents),
        capacity: capacity(cluster, inputs),
        connection: refused.is_none().then_some(connection),
        ..KVCacheClusterStatus::default()
    };
    (status, works.into_iter().chain(lasting).chain([progressing, degraded, ready]).collect())
}

fn agents(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> AgentCounts {
    let wanted = agent_digest(cluster, &inputs.agent_config);
    let is_updated = |node: &CacheNode| {
        let applied = node.status.as_ref().and_then(|status| status.applied.as_ref());
        let digest = applied.and_then(|applied| applied.configuration_digest.as_ref());
        digest.is_some_and(|digest| digest.as_str() == wanted)
    };
    let count = |test: &dyn Fn(&CacheNode) -> bool| {
        u32::try_from(inputs.cache_nodes.iter().filter(|node| test(node)).count()).unwrap_or(u32::MAX)
    };
    AgentCounts {
        desired: u32::try_from(inputs.assignment.nodes.len()).unwrap_or(u32::MAX),
        ready: count(&is_ready),
        // The configuration does not cover the image, and the DaemonSet status does not cover the
        // configuration.
        updated: count(&|node| is_ready(node) && is_updated(node)).min(inputs.agents.updated),
    }
}

fn control_plane(members: &MemberCounts) -> Finding {
    let message = format!("{} of {} members are ready", members.ready, members.desired);
    if members.ready >= members.desired {
        Finding::yes(Type::ControlPlaneReady, Reason::AsDesired, message)
    } else {
        Finding::no(Type::ControlPlaneReady, Reason::Progressing, message)
    }
}

fn agents_ready(inputs: &ClusterInputs, agents: &AgentCounts) -> Finding {
    let kind = Type::AgentsReady;
    if let (0, Some(conflict)) = (agents.desired, &inputs.assignment.conflict) {
        return Finding::no(kind, conflict.reason, &conflict.message);
    }
    if agents.desired == 0 {
        let message = "agents.nodeSelector matches no node: label nodes accordingly, or change it";
        return Finding::no(kind, Reason::NoNodes, message);
    }
    let message = format!("{} of {} agents are ready", agents.ready, agents.desired);
    if agents.ready >= agents.desired {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    let is_late = |name: &&String| {
        !inputs.cache_nodes.iter().any(|node| node.metadata.name.as_ref() == Some(name) && is_ready(node))
    };
    let late = list(inputs.assignment.nodes.iter().filter(is_late));
    let message = format!("{message}; check the agents' pods on {late}");
    // Agents that never reported are still starting; an agent that stopped reporting is a loss.
    let lost = inputs.cache_nodes.iter().any(|node| {
        !is_ready(node) && node.status.as_ref().is_some_and(|status| status.last_updated.is_some())
    });
    Finding::no(kind, if lost { Reason::NodesNotReady } else { Reason::Progressing }, message)
}

fn pools(inputs: &ClusterInputs) -> Finding {
    let kind = Type::PoolsBound;
    let (pools, key) = (&inputs.agent_config.pools, inputs.agent_config.names.key());
    for named in pools {
        let (name, assignment) = (&named.name, &named.assignment);
        if named.pool.is_none() {
            let message = format!("SSDPool {name} does not exist: create it, or remove it from spec.pools");
            return Finding::no(kind, Reason::ReferenceNotFound, message);
        }
        if let Some(refused) = &assignment.refused {
            let message = format!("SSDPool {name} is rejected: {}", refused.message);
            return Finding::no(kind, refused.reason, message);
        }
        if let Some(other) = assignment.cluster.as_ref().filter(|cluster| **cluster != key) {
            let message = format!(
                "SSDPool {name} already belongs to KVCacheCluster {other}: create a separate pool for this cluster"
            );
            return Finding::no(kind, Reason::Conflict, message);
        }
        if let Some(conflict) = &assignment.conflict {
            let message = format!("SSDPool {name} is not on all its nodes: {}", conflict.message);
            return Finding::no(kind, conflict.reason, message);
        }
    }
    let message = match pools.len() {
        0 => "spec.pools is empty: blocks are kept in memory only".to_owned(),
        bound => format!("{bound} pools are bound"),
    };
    Finding::yes(kind, Reason::AsDesired, message)
}

/// Returns whether certificates can be issued.
fn certificates(inputs: &ClusterInputs) -> Finding {
    let kind = Type::CertificatesReady;
    match &inputs.certificates {
        AuthorityState::Absent => Finding::no(kind, Reason::Progressing, "the authority is being created"),
        AuthorityState::Unusable(refusal) => Finding::no(kind, refusal.reason, &refusal.message),
        AuthorityState::Present(authority) => match authority.days_left() {
            Some(days) => {
                let message = format!(
                    "the authority of the cluster's certificates ends in {days} days: delete Secret {}, and the operator \
                     creates another one; agents and members then get certificates of it without a restart",
                    inputs.agent_config.names.authority()
                );
                Finding::no(kind, Reason::EndsSoon, message)
            }
            None => {
                Finding::yes(kind, Reason::AsDesired, "agents and members get certificates from the operator")
            }
        },
    }
}

fn progressing(
    cluster: &KVCacheCluster,
    inputs: &ClusterInputs,
    refused: Option<&Refusal>,
    (members, agents): (&MemberCounts, &AgentCounts),
) -> Finding {
    let kind = Type::Progressing;
    if cluster.spec.paused {
        let message = "the cluster is paused, so the operator changes nothing: set paused to false to resume";
        return Finding::no(kind, Reason::Paused, message);
    }
    if let Some(refused) = refused {
        return Finding::no(kind, refused.reason, "the operator changes nothing until the spec is accepted");
    }
    let late_members = members.ready < members.desired || inputs.members.updated < members.desired;
    let (updated, desired, component) = if late_members {
        (inputs.members.updated, members.desired, "members")
    } else if agents.updated < agents.desired {
        (agents.updated, agents.desired, "agents")
    } else {
        return Finding::no(kind, Reason::AsDesired, "no changes are in progress");
    };
    let message = format!("{updated} of {desired} {component} are up to date");
    Finding::yes(kind, Reason::Progressing, message)
}

/// Reports the first problem that does not resolve by itself. The cluster works, but with reduced function.
fn degraded<'a>(
    cluster: &KVCacheCluster,
    inputs: &ClusterInputs,
    mut findings: impl Iterator<Item = &'a Finding>,
    failed: Option<&Refusal>,
) -> Finding {
    let is_problem =
        |one: &&Finding| one.status == ConditionStatus::False && one.reason != Reason::Progressing;
    let problem = failed.cloned().or_else(|| findings.find(is_problem).map(refusal));
    // Everything works with the present members of etcd, so no other condition reports missing ones.
    match problem.or_else(|| etcd::missing_members(cluster, inputs)) {
        Some(Refusal { reason, message }) => Finding::yes(Type::Degraded, reason, message),
        None => Finding::no(Type::Degraded, Reason::AsDesired, ""),
    }
}

fn refusal(finding: &Finding) -> Refusal {
    Refusal::new(finding.reason, format!("{}: {}", finding.kind, finding.message))
}

fn is_true(finding: &Finding) -> bool {
    finding.status == ConditionStatus::True
}

fn capacity(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Option<ClusterCapacity> {
    let capacities = || {
        let fresh = inputs.cache_nodes.iter().filter(|node| has_reported(node));
        fresh.filter_map(|node| node.status.as_ref()?.capacity.as_ref())
    };
    capacities().next()?;
    let sum = |of: fn(&NodeCapacity) -> &Quantity| {
        let bytes = capacities().filter_map(|capacity| of(capacity).bytes().ok());
        Quantity::of_bytes(bytes.fold(0, u64::saturating_add))
    };
    // `last_updated` is the time at which the sums changed. Otherwise every reconcile would write the status.
    let before = cluster.status.as_ref().and_then(|status| status.capacity.as_ref());
    let mut capacity = ClusterCapacity {
        dram_total: sum(|capacity| &capacity.dram_total),
        ssd_total: sum(|capacity| &capacity.ssd_total),
        ssd_used: sum(|capacity| &capacity.ssd_used),
        last_updated: before.map_or_else(clock::now, |before| before.last_updated.clone()),
    };
    if before != Some(&capacity) {
        capacity.last_updated = clock::now();
    }
    Some(capacity)
}

#[cfg(test)]
mod tests;
