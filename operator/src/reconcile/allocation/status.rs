//! Computes the status of an allocation: its grant and its conditions. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use reprise_crds::fields::Serial;
use reprise_crds::queues::{QueueGrant, QueueIsolation};
use reprise_crds::status::{ConditionType as Type, Finding, Reason};
use reprise_crds::{GPUQueueAllocation, GPUQueueAllocationStatus};
use serde_json::{Value, json};

use super::build::Candidate;
use super::dereference::{AgentQueues, GrantInputs, NodePresence, name};
use super::grant::{Shares, Verdict, describe};
use super::lifecycle::{Lifecycle, granted, pairs};
use super::programmed::{self, programmed};
use super::validate::is_reportable;
use crate::framework::refusal::{self, Refusal, list};
use crate::framework::status::merge_findings;

/// A status to write, with the changed conditions.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusUpdate {
    pub status: GPUQueueAllocationStatus,
    pub changes: Vec<Finding>,
}

impl StatusUpdate {
    /// Returns the body of a merge patch. Fields of other writers cannot be lost: a concurrent change fails on the
    /// `resourceVersion`.
    pub fn body(&self, object: &GPUQueueAllocation) -> Value {
        let status = &self.status;
        let grants = if status.allocations.is_empty() { Value::Null } else { json!(status.allocations) };
        json!({
            "metadata": { "resourceVersion": object.metadata.resource_version },
            "status": {
                "observedGeneration": status.observed_generation,
                "allocations": grants,
                "queues": status.queues,
                "expiresAt": status.expires_at,
                "conditions": status.conditions,
            },
        })
    }
}

/// Returns the status to write; `None` if it is unchanged or the allocation needs no status anymore.
pub fn compute(
    candidate: &Candidate<'_>,
    verdict: &Verdict,
    inputs: &GrantInputs,
    now: &Time,
) -> Option<StatusUpdate> {
    let (object, kept) = (&*candidate.of.object, candidate.kept.as_ref());
    let before = object.status.clone().unwrap_or_default();
    let mut status = before.clone();
    programmed::record(&mut status, kept, inputs);
    let mut findings = vec![accepted(candidate, inputs)];
    let end = match (&candidate.lifecycle, verdict) {
        (Lifecycle::Released | Lifecycle::Deleting, _) => return None,
        (Lifecycle::Pending, Verdict::Waiting(wait)) => {
            findings.push(waits(object, wait, inputs));
            None
        }
        (Lifecycle::Pending, Verdict::Unchanged | Verdict::Preempted { .. }) => {
            // A pending allocation that is accepted is granted or waits.
            let reason = candidate.refused.as_ref()?.reason;
            let message = "no queue pairs are set aside before the allocation is accepted";
            findings.push(Finding::no(Type::Allocated, reason, message));
            None
        }
        (Lifecycle::Pending, Verdict::Granted(serials)) => {
            status.allocations = serials.iter().map(|serial| grant(object, serial, inputs)).collect();
            status.expires_at = expires(object, now);
            None
        }
        (Lifecycle::Granted, Verdict::Preempted { by }) => {
            let message = format!(
                "the guaranteed GPUQueueAllocation {by} preempted this one to get a controller for itself: delete this one, and create \
                 a new GPUQueueAllocation, which waits for free queue pairs"
            );
            Some(Refusal::new(Reason::TakenBack, message))
        }
        (Lifecycle::Granted, _) => None,
        (Lifecycle::Ending(end), _) => Some(end.clone()),
    };
    if let Some(end) = end {
        findings.extend(end_grant(object, &mut status, &end, kept, inputs));
    } else if !status.allocations.is_empty() {
        let all = pairs(&status.allocations);
        findings.push(allocated(object, &status.allocations, inputs));
        findings.push(programmed(kept, all, inputs));
    }
    let generation = object.metadata.generation.unwrap_or_default();
    status.observed_generation = generation;
    let changes = merge_findings(&mut status.conditions, &findings, generation);
    (status != before).then_some(StatusUpdate { status, changes })
}

/// Returns condition `Accepted`, with notes on parts of the spec that have no effect or are not verified.
fn accepted(candidate: &Candidate<'_>, inputs: &GrantInputs) -> Finding {
    let mut finding = refusal::accepted(candidate.refused.as_ref());
    let (spec, node) = (&candidate.of.object.spec, &inputs.node);
    if candidate.refused.is_none() && !is_reportable(&spec.gpu_uuid, inputs) {
        finding.message += &format!(
            ", but GPU {} is not verified: the agent of node {node} reports no such GPU. It reports whole GPUs once their \
             driver is loaded",
            spec.gpu_uuid
        );
    }
    let profiles = inputs.cache_node.as_ref().map(|node| node.spec.profiles.as_slice()).unwrap_or_default();
    if let Some(profile) = spec.slack_profile_ref.as_ref().map(|profile| &profile.name)
        && candidate.refused.is_none()
        && !profiles.iter().any(|claim| claim.name.as_str() == profile.as_str())
    {
        finding.message += &format!(
            ". SlackProfile {profile} has no effect, because node {node} does not have it: create it in the namespace of the \
             KVCacheCluster, select it with spec.slackProfiles of the cluster, and see its conditions"
        );
    }
    finding
}

/// Returns the grant of a controller's queue pairs, with the PCI address that the agent reports.
fn grant(object: &GPUQueueAllocation, serial: &str, inputs: &GrantInputs) -> QueueGrant {
    let mut controllers = inputs.status().into_iter().flat_map(|status| &status.controllers);
    QueueGrant {
        serial: Serial::new(serial),
        pci_address: controllers
            .find(|one| one.serial.as_str() == serial)
            .and_then(|one| one.pci_address.clone()),
        queue_pairs: object.spec.queue_pairs,
        queues: Vec::new(),
        generation: None,
    }
}

/// Returns the time at which a grant written now expires. A `ttl` that cannot be parsed or overflows never
/// expires; the CRD schema bounds it.
fn expires(object: &GPUQueueAllocation, now: &Time) -> Option<Time> {
    let ttl = object.spec.ttl.as_ref()?.duration().ok()?;
    let ttl = SignedDuration::try_from(ttl).ok()?;
    now.0.checked_add(ttl).ok().map(Time)
}

/// Returns the conditions of a grant that ends. Clears the grant, which frees its queue pairs, if the agent holds none.
fn end_grant(
    object: &GPUQueueAllocation,
    status: &mut GPUQueueAllocationStatus,
    end: &Refusal,
    kept: Option<&AgentQueues>,
    inputs: &GrantInputs,
) -> Vec<Finding> {
    let (node, reason) = (&inputs.node, end.reason);
    let mut findings = vec![
        Finding::no(Type::Allocated, reason, &end.message),
        Finding::no(Type::Programmed, reason, &end.message),
    ];
    let held = match kept {
        None => {
            status.allocations.clear();
            // The finalizer of another component keeps a deleted object; for the operator its release is complete.
            let released = if reason == Reason::Releasing { Reason::AsDesired } else { reason };
            findings.push(Finding::yes(Type::Released, released, &end.message));
            return findings;
        }
        Some(AgentQueues::Reported(report)) => {
            format!("the {} queue pairs in status.applied.queues", report.kept.max(report.queue_pairs))
        }
        Some(AgentQueues::Unconfirmed) => "all queue pairs that the spec no longer lists".to_owned(),
    };
    let gone = match inputs.presence {
        NodePresence::Removed => "An agent that reports nothing for a minute counts as gone",
        NodePresence::Present | NodePresence::Gone => {
            "If the node is gone permanently, delete its Node or CacheNode"
        }
    };
    let message = format!(
        "waiting until the agent of node {node} reports in its CacheNode that it released {held}. {gone}"
    );
    findings.push(Finding::no(Type::Released, Reason::Releasing, &message));
    if object.metadata.deletion_timestamp.is_some() {
        findings.push(Finding::yes(Type::DeletionBlocked, Reason::Releasing, message));
    }
    findings
}

/// Returns the condition of an allocation that waits.
fn waits(object: &GPUQueueAllocation, wait: &Refusal, inputs: &GrantInputs) -> Finding {
    let (spec, node) = (&object.spec, &inputs.node);
    let of = match spec.isolation {
        QueueIsolation::TrustedShared => "each controller",
        QueueIsolation::ExclusiveController => "an unused controller",
    };
    let (reason, message) = match inputs.status().is_none_or(|status| status.last_updated.is_none()) {
        true => {
            (Reason::NotReported, format!("the agent of node {node} has not reported its controllers yet"))
        }
        false => (wait.reason, wait.message.clone()),
    };
    let (pairs, pool) = (spec.queue_pairs, &spec.pool_ref.name);
    let message = format!("{pairs} queue pairs are requested of {of} of SSDPool {pool}; {message}");
    Finding::no(Type::Allocated, reason, message)
}

/// Returns the condition `Allocated` of an active grant. A grant never shrinks: if a controller is gone or its budget is
/// reduced, the grant remains and the agent keeps its queue pairs.
fn allocated(object: &GPUQueueAllocation, grants: &[QueueGrant], inputs: &GrantInputs) -> Finding {
    let (pool, all) = (object.spec.pool_ref.name.as_str(), pairs(grants));
    let no = |reason, message| {
        Finding::no(Type::Allocated, reason, format!("{all} queue pairs were set aside, but {message}"))
    };
    if inputs.status().is_none_or(|status| status.last_updated.is_none()) {
        let message = format!(
            "{all} queue pairs were set aside, but the agent of node {} has not reported its controllers yet",
            inputs.node
        );
        return Finding::unknown(Type::Allocated, Reason::NotReported, message);
    }
    let lost: Vec<String> = grants.iter().filter_map(|grant| lost(grant, pool, inputs)).collect();
    if !lost.is_empty() {
        let remedy = "restore the controller, or delete this GPUQueueAllocation and create one for the present controllers";
        return no(Reason::NoDevices, format!("{}: {remedy}", list(&lost)));
    }
    let over: Vec<String> = grants.iter().filter_map(|grant| over(grant, inputs)).collect();
    if !over.is_empty() {
        let remedy = "Grants do not shrink: delete one of these allocations, or raise devices.maxGpuQueuePercent of SSDPool";
        return no(
            Reason::OverBudget,
            format!("the grants exceed the budget: {}. {remedy} {pool}", list(&over)),
        );
    }
    let serials = list(grants.iter().map(|grant| grant.serial.as_str()));
    Finding::yes(Type::Allocated, Reason::AsDesired, format!("{all} queue pairs are set aside on {serials}"))
}

/// Describes a controller that the agent no longer reports, or that no longer belongs to the pool.
fn lost(grant: &QueueGrant, pool: &str, inputs: &GrantInputs) -> Option<String> {
    let (serial, node) = (grant.serial.as_str(), &inputs.node);
    let is_there = inputs.lenders.iter().any(|lender| lender.serial == serial && lender.pool == pool);
    (!is_there)
        .then(|| format!("node {node} no longer has controller {serial} with a device of SSDPool {pool}"))
}

/// Describes a controller whose grants exceed its budget, with the holders.
fn over(grant: &QueueGrant, inputs: &GrantInputs) -> Option<String> {
    let controller = inputs.lenders.iter().find(|lender| lender.serial == grant.serial.as_str())?;
    let mut holders = Shares::new();
    for of in &inputs.allocations {
        let of_it = granted(&of.object).iter().filter(|other| other.serial == grant.serial);
        holders.extend(of_it.map(|grant| (name(&of.object), grant.queue_pairs)));
    }
    let all = holders.iter().map(|(_, pairs)| *pairs).fold(0, u32::saturating_add);
    (all > controller.budget).then(|| describe(controller, &holders))
}
