//! Computes the status of an allocation: its grant and its conditions. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use reprise_crds::fields::Serial;
use reprise_crds::queues::{QueueGrant, QueueIsolation};
use reprise_crds::status::{ConditionType as Type, Finding, Reason};
use reprise_crds::{GPUQueueAllocation, GPUQueueAllocationStatus};

use super::build::Candidate;
use super::dereference::{AgentQueues, GrantInputs, NodePresence, name};
use super::grant::{ControllerUsage, Verdict, WaitReason};
use super::lifecycle::{GrantEnd, Lifecycle, granted, pairs};
use super::programmed::{self, programmed};
use super::validate::is_reportable;
use crate::framework::refusal::Refusal;
use crate::framework::status::merge_findings;

/// Maximum number of names in a message.
const NAMES_MAX: usize = 5;

/// A status to write, with the changed conditions.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusUpdate {
    pub status: GPUQueueAllocationStatus,
    pub changes: Vec<Finding>,
}

/// Returns the status to write; `None` if it is unchanged or the allocation needs no status anymore.
pub fn compute(
    candidate: &Candidate<'_>,
    verdict: &Verdict,
    inputs: &GrantInputs,
    now: &Time,
) -> Option<StatusUpdate> {
    let object = &*candidate.of.object;
    let before = object.status.clone().unwrap_or_default();
    let mut status = before.clone();
    programmed::record(&mut status, inputs.agent_queues(object).as_ref(), inputs);
    let mut findings = vec![accepted(candidate, inputs)];
    match (&candidate.lifecycle, verdict) {
        (Lifecycle::Released | Lifecycle::Deleting, _) => return None,
        (Lifecycle::Pending, Verdict::Granted(serials)) => {
            status.allocations = serials.iter().map(|serial| grant(object, serial, inputs)).collect();
            status.expires_at = expires(object, now);
            findings.extend(active_grant(&status.allocations, None, inputs));
        }
        (Lifecycle::Pending, Verdict::Waiting(wait)) => findings.push(waits(object, wait, inputs)),
        (Lifecycle::Pending, Verdict::Unchanged | Verdict::Preempted { .. }) => {
            // A pending allocation that is accepted is granted or waits.
            let reason = candidate.refused.as_ref()?.reason;
            let message = "no queue pairs are set aside before the allocation is accepted";
            findings.push(Finding::no(Type::Allocated, reason, message));
        }
        (Lifecycle::Granted { kept }, Verdict::Preempted { by }) => {
            let message = format!(
                "the guaranteed GPUQueueAllocation {by} preempted this one to get a controller for itself: delete this one, and create \
                 a new GPUQueueAllocation, which waits for free queue pairs"
            );
            let end = GrantEnd { reason: Reason::TakenBack, message };
            findings.extend(end_grant(object, &mut status, &end, kept.as_ref(), inputs));
        }
        (Lifecycle::Granted { kept }, _) => {
            let mut active = active_grant(&status.allocations, kept.as_ref(), inputs);
            if let Some(violation) = violation(object, inputs) {
                active.retain(|finding| finding.kind != violation.kind);
                active.push(violation);
            }
            findings.extend(active);
        }
        (Lifecycle::Ending { end, kept }, _) => {
            findings.extend(end_grant(object, &mut status, end, kept.as_ref(), inputs));
        }
    }
    let generation = object.metadata.generation.unwrap_or_default();
    status.observed_generation = generation;
    let changes = merge_findings(&mut status.conditions, &findings, generation);
    (status != before).then_some(StatusUpdate { status, changes })
}

fn accepted(candidate: &Candidate<'_>, inputs: &GrantInputs) -> Finding {
    let kind = Type::Accepted;
    if let Some(Refusal { reason, message }) = &candidate.refused {
        return Finding::no(kind, *reason, message);
    }
    let spec = &candidate.of.object.spec;
    let (gpu, node) = (&spec.gpu_uuid, &inputs.node);
    let mut message = match is_reportable(gpu, inputs) {
        true => "the spec is valid".to_owned(),
        false => format!(
            "the spec is valid, but GPU {gpu} is not verified: the agent of node {node} reports no such GPU. It reports \
             whole GPUs once their driver is loaded"
        ),
    };
    let profile = spec.slack_profile_ref.as_ref().map(|profile| profile.name.as_str());
    if let Some(profile) = profile.filter(|profile| !has_profile(profile, inputs)) {
        message.push_str(&format!(
            ". SlackProfile {profile} has no effect, because node {node} does not have it: select it with spec.slackProfiles \
             of the KVCacheCluster"
        ));
    }
    Finding::yes(kind, Reason::AsDesired, message)
}

/// Whether a profile is distributed to the node.
fn has_profile(profile: &str, inputs: &GrantInputs) -> bool {
    let claims = inputs.cache_node.as_ref().map(|node| node.spec.profiles.as_slice()).unwrap_or_default();
    claims.iter().any(|claim| claim.name.as_str() == profile)
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

/// Returns the conditions of an active grant.
fn active_grant(grants: &[QueueGrant], kept: Option<&AgentQueues>, inputs: &GrantInputs) -> Vec<Finding> {
    let serials: Vec<&str> = grants.iter().map(|grant| grant.serial.as_str()).collect();
    let message = format!("{} queue pairs are set aside on {}", pairs(grants), join_names(&serials));
    vec![Finding::yes(Type::Allocated, Reason::AsDesired, message), programmed(kept, pairs(grants), inputs)]
}

/// Returns the conditions of a grant that ends. Clears the grant, which frees its queue pairs, if the agent holds none.
fn end_grant(
    object: &GPUQueueAllocation,
    status: &mut GPUQueueAllocationStatus,
    end: &GrantEnd,
    kept: Option<&AgentQueues>,
    inputs: &GrantInputs,
) -> Vec<Finding> {
    let (node, reason) = (&inputs.node, end.reason);
    let mut findings = vec![
        Finding::no(Type::Allocated, reason, &end.message),
        Finding::no(Type::Programmed, reason, &end.message),
    ];
    let left = match kept {
        None => {
            status.allocations.clear();
            // The finalizer of another component keeps a deleted object; for the operator its release is complete.
            let released = if reason == Reason::Releasing { Reason::AsDesired } else { reason };
            findings.push(Finding::yes(Type::Released, released, &end.message));
            return findings;
        }
        Some(AgentQueues::Reported(report)) => format!(
            "waiting for the agent of node {node} to release {} queue pairs, which it lists in status.applied.queues of the \
             CacheNode",
            report.kept.max(report.queue_pairs)
        ),
        Some(AgentQueues::Unconfirmed) => format!(
            "waiting for the agent of node {node} to report that it released the queue pairs, which needs its report on the \
             current spec of the CacheNode (status.observedGeneration)"
        ),
    };
    let gone = match inputs.presence {
        NodePresence::Removed => "An agent that reports nothing for a minute counts as gone",
        NodePresence::Present | NodePresence::Gone => {
            "If the node is gone permanently, delete its Node or CacheNode"
        }
    };
    let message = format!("{left}. {gone}");
    findings.push(Finding::no(Type::Released, Reason::Releasing, &message));
    if object.metadata.deletion_timestamp.is_some() {
        findings.push(Finding::yes(Type::DeletionBlocked, Reason::Releasing, message));
    }
    findings
}

/// Returns the condition of an allocation that waits.
fn waits(object: &GPUQueueAllocation, wait: &WaitReason, inputs: &GrantInputs) -> Finding {
    let (spec, node) = (&object.spec, &inputs.node);
    let pool = &spec.pool_ref.name;
    let request = match spec.isolation {
        QueueIsolation::TrustedShared => {
            format!("{} queue pairs are requested of each controller of SSDPool {pool}", spec.queue_pairs)
        }
        QueueIsolation::ExclusiveController => format!(
            "{} queue pairs are requested of an unused controller of SSDPool {pool}",
            spec.queue_pairs
        ),
    };
    let (reason, message) = match wait {
        WaitReason::NoController if inputs.status().is_none_or(|status| status.last_updated.is_none()) => (
            Reason::NotReported,
            format!("{request}; the agent of node {node} has not reported its controllers yet"),
        ),
        WaitReason::NoController => (
            Reason::NoDevices,
            format!(
                "{request}; node {node} has no controller with queue pairs to grant: check status.controllers of its CacheNode"
            ),
        ),
        WaitReason::ExceedsController { most } => (
            Reason::OverBudget,
            format!(
                "{request}, but at most {most} can be granted per controller: create a GPUQueueAllocation that requests fewer, or \
                 raise devices.maxGpuQueuePercent of the pool"
            ),
        ),
        WaitReason::NotEnoughFree(full) => {
            let full: Vec<String> = full.iter().map(describe).collect();
            let message = format!(
                "{request}, but too few are free: {}. The grant follows once enough are free, for example when one of these \
                 allocations is deleted",
                join_names(&full)
            );
            (Reason::OverBudget, message)
        }
        WaitReason::Preempting(full) => {
            let message = format!(
                "{request}; {} is reserved for it until the agent has released the pairs of the previous holders",
                describe(full)
            );
            (Reason::Releasing, message)
        }
    };
    Finding::no(Type::Allocated, reason, message)
}

/// Returns the violation of an existing grant as a condition; `None` if the grant is intact. A grant never shrinks: if
/// a controller is gone or its budget is reduced, the grant remains and the agent keeps its queue pairs.
fn violation(object: &GPUQueueAllocation, inputs: &GrantInputs) -> Option<Finding> {
    let (grants, node) = (granted(object), &inputs.node);
    if inputs.status().is_none_or(|status| status.last_updated.is_none()) {
        let message = format!(
            "{} queue pairs are set aside; the agent of node {node} has not reported its controllers yet",
            pairs(grants)
        );
        return Some(Finding::unknown(Type::Allocated, Reason::NotReported, message));
    }
    let pool = object.spec.pool_ref.name.as_str();
    let lost: Vec<String> = grants.iter().filter_map(|grant| lost(grant, pool, inputs)).collect();
    if !lost.is_empty() {
        let message = format!(
            "{} queue pairs were set aside, but {}: restore the controller, or delete this GPUQueueAllocation and create one for the \
             present controllers",
            pairs(grants),
            join_names(&lost)
        );
        return Some(Finding::no(Type::Allocated, Reason::NoDevices, message));
    }
    let over: Vec<String> = grants.iter().filter_map(|grant| over(grant, inputs)).collect();
    if over.is_empty() {
        return None;
    }
    let message = format!(
        "{} queue pairs were set aside, but the grants exceed the budget: {}. Grants do not shrink: delete one of these \
         allocations, or raise devices.maxGpuQueuePercent of SSDPool {pool}",
        pairs(grants),
        join_names(&over)
    );
    Some(Finding::no(Type::Allocated, Reason::OverBudget, message))
}

/// Describes a controller that the agent no longer reports, or that no longer belongs to the pool.
fn lost(grant: &QueueGrant, pool: &str, inputs: &GrantInputs) -> Option<String> {
    let (serial, node) = (grant.serial.as_str(), &inputs.node);
    let mut reported = inputs.status()?.controllers.iter();
    if !reported.any(|controller| controller.serial.as_str() == serial) {
        return Some(format!("node {node} no longer has controller {serial}"));
    }
    let is_in_pool = inputs.lenders.iter().any(|lender| lender.serial == serial && lender.pool == pool);
    (!is_in_pool)
        .then(|| format!("controller {serial} of node {node} no longer has a device of SSDPool {pool}"))
}

/// Describes a controller whose grants exceed its budget, with the holders.
fn over(grant: &QueueGrant, inputs: &GrantInputs) -> Option<String> {
    let serial = grant.serial.as_str();
    let budget = inputs.lenders.iter().find(|lender| lender.serial == serial)?.budget;
    let mut holders: Vec<(String, u32)> = Vec::new();
    for of in &inputs.allocations {
        let of_it = granted(&of.object).iter().filter(|grant| grant.serial.as_str() == serial);
        holders.extend(of_it.map(|grant| (name(&of.object), grant.queue_pairs)));
    }
    let all = holders.iter().map(|(_, pairs)| *pairs).fold(0, u32::saturating_add);
    (all > budget).then(|| describe(&ControllerUsage { serial: serial.to_owned(), budget, holders }))
}

/// Describes a controller: its serial number, budget and holders.
fn describe(full: &ControllerUsage) -> String {
    let holders: Vec<String> = full.holders.iter().map(|(name, pairs)| format!("{name} {pairs}")).collect();
    let holders = if holders.is_empty() { "no allocation".to_owned() } else { join_names(&holders) };
    format!("{} (budget {}; held by {holders})", full.serial, full.budget)
}

/// Joins the first [`NAMES_MAX`] names, followed by the number of the others.
fn join_names<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES_MAX).map(|name| name.as_ref()).collect();
    let more = names.len() - shown.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}
