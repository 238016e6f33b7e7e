//! What an allocation is: its grant and its conditions. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use reprise_crds::fields::Serial;
use reprise_crds::queues::{QueueGrant, QueueIsolation};
use reprise_crds::status::{ConditionType as Type, Finding, Reason};
use reprise_crds::{GPUQueueAllocation, GPUQueueAllocationStatus};

use super::build::Member;
use super::dereference::{Found, Kept, Presence};
use super::grant::{Full, Share, Verdict, Wait};
use super::life::{Cause, Ending, Life, pairs};
use super::standing::doubt;
use super::validate::is_told;
use crate::plan::Refusal;
use crate::status::conclude;

/// So many names are in a message, at the most.
const NAMES_MAX: usize = 5;

/// A status to write.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    /// All of it.
    pub status: GPUQueueAllocationStatus,
    /// What has changed, for events.
    pub news: Vec<Finding>,
}

/// What to say of an allocation; nothing where it is said already, or where nothing is left to say.
pub fn of(member: &Member<'_>, verdict: &Verdict, found: &Found, now: &Time) -> Option<Said> {
    let object = &*member.of.object;
    let before = object.status.clone().unwrap_or_default();
    let mut status = before.clone();
    let mut findings = vec![accepted(member, found)];
    match (&member.life, verdict) {
        (Life::Over | Life::Goes, _) => return None,
        (Life::Refused, _) => findings.push(nothing(member.refused.as_ref())),
        (Life::Wants, Verdict::Granted(shares)) => {
            status.allocations = grants(shares, found);
            status.expires_at = expires(object, now);
            findings.extend(stands(object, &status.allocations, None, found));
        }
        (Life::Wants, Verdict::Waits(wait)) => findings.push(waits(object, wait, found)),
        // Who wants something is given it or waits.
        (Life::Wants, Verdict::Stays | Verdict::TakenBack { .. }) => return None,
        (Life::Stands { kept }, Verdict::TakenBack { by }) => {
            let message = format!(
                "it was taken back for GPUQueueAllocation {by}, which is guaranteed and needs a controller of its own: make a new \
                 GPUQueueAllocation, which waits for room, and delete this one"
            );
            let ending = Ending { cause: Cause::TakenBack, message };
            match kept {
                Some(left) => findings.extend(ends(object, &ending, left, found)),
                None => findings.extend(ended(&mut status, &ending)),
            }
        }
        (Life::Stands { kept }, _) => {
            let mut said = stands(object, &status.allocations, kept.as_ref(), found);
            if let Some(doubt) = doubt(object, found) {
                said.retain(|finding| finding.kind != doubt.kind);
                said.push(doubt);
            }
            findings.extend(said);
        }
        (Life::Ends(ending, left), _) => findings.extend(ends(object, ending, left, found)),
        (Life::Ended(ending), _) => findings.extend(ended(&mut status, ending)),
    }
    let generation = object.metadata.generation.unwrap_or_default();
    status.observed_generation = generation;
    let news = conclude(&mut status.conditions, &findings, generation);
    (status != before).then_some(Said { status, news })
}

fn accepted(member: &Member<'_>, found: &Found) -> Finding {
    let kind = Type::Accepted;
    if let Some(Refusal { reason, message }) = &member.refused {
        return Finding::no(kind, *reason, message);
    }
    let gpu = &member.of.object.spec.gpu_uuid;
    if is_told(gpu, found) {
        return Finding::yes(kind, Reason::AsDesired, "the spec is right");
    }
    let message = format!(
        "the spec is right, as far as it is known: the agent of node {} sees no GPU like {gpu}, so nobody has looked for it; it tells whole GPUs, \
         once their driver is loaded",
        found.node
    );
    Finding::yes(kind, Reason::AsDesired, message)
}

fn nothing(refused: Option<&Refusal>) -> Finding {
    let reason = refused.map_or(Reason::InvalidSpec, |refused| refused.reason);
    Finding::no(Type::Allocated, reason, "nothing is set aside before the allocation is accepted")
}

/// The grant as it is written, with the addresses that the agent tells.
fn grants(shares: &[Share], found: &Found) -> Vec<QueueGrant> {
    let address = |serial: &str| {
        let controllers = &found.status()?.controllers;
        controllers.iter().find(|one| one.serial.as_str() == serial)?.pci_address.clone()
    };
    let grant = |share: &Share| QueueGrant {
        serial: Serial::new(&share.serial),
        pci_address: address(&share.serial),
        queue_pairs: share.pairs,
        queue_ids: Vec::new(),
        lease_id: None,
    };
    shares.iter().map(grant).collect()
}

/// When a grant of now ends. A time that cannot be read or reached never comes; the definitions bound it.
fn expires(object: &GPUQueueAllocation, now: &Time) -> Option<Time> {
    let ttl = object.spec.ttl.as_ref()?.duration().ok()?;
    let ttl = SignedDuration::try_from(ttl).ok()?;
    now.0.checked_add(ttl).ok().map(Time)
}

/// A grant that stands.
fn stands(
    object: &GPUQueueAllocation,
    grants: &[QueueGrant],
    kept: Option<&Kept>,
    found: &Found,
) -> Vec<Finding> {
    let serials: Vec<&str> = grants.iter().map(|grant| grant.serial.as_str()).collect();
    let message = format!("{} queue pairs are set aside, of {}", pairs(grants), few(&serials));
    let mut findings = vec![Finding::yes(Type::Allocated, Reason::AsDesired, message)];
    findings.push(programmed(kept, pairs(grants), &found.node));
    let used = object.status.as_ref().and_then(|status| status.reserved_for.as_ref());
    if let Some(pod) = used.filter(|_| object.metadata.deletion_timestamp.is_some()) {
        let message = format!(
            "pod {} ({}) uses it: it goes when status.reservedFor is taken away, by whoever reserved it for the pod",
            pod.name, pod.uid
        );
        findings.push(Finding::yes(Type::DeletionBlocked, Reason::InUse, message));
    }
    findings
}

/// What the agent has made of a grant that stands.
fn programmed(kept: Option<&Kept>, all: u32, node: &str) -> Finding {
    let kind = Type::Programmed;
    match kept {
        None | Some(Kept::Unanswered) => {
            let message = format!("the agent of node {node} has not said yet that it keeps them");
            Finding::no(kind, Reason::Progressing, message)
        }
        Some(Kept::Told { refused: Some(why), .. }) => {
            let message = format!("the agent of node {node} does not keep them: {why}. It tries again");
            Finding::no(kind, Reason::Refused, message)
        }
        Some(Kept::Told { made, .. }) if *made >= all => {
            Finding::yes(kind, Reason::AsDesired, format!("the agent has made {made} queue pairs"))
        }
        Some(Kept::Told { kept, made: 0, .. }) => {
            let message = format!(
                "the agent of node {node} keeps {kept} queue pairs for it. No agent of this release makes queues of them, so nothing uses them"
            );
            Finding::no(kind, Reason::Unsupported, message)
        }
        Some(Kept::Told { made, .. }) => {
            Finding::no(kind, Reason::Progressing, format!("the agent has made {made} of {all} queue pairs"))
        }
    }
}

/// A grant that ends, of which the agent has something left.
fn ends(object: &GPUQueueAllocation, ending: &Ending, left: &Kept, found: &Found) -> Vec<Finding> {
    let node = &found.node;
    let left = match left {
        Kept::Told { kept, made, .. } => format!(
            "the agent of node {node} lists {} queue pairs of it in status.applied.queues of the CacheNode: it lets go of them first",
            kept.max(made)
        ),
        Kept::Unanswered => format!(
            "the agent of node {node} has not said yet that it has let go of it: it does once it has seen the spec of the CacheNode \
             (status.observedGeneration)"
        ),
    };
    let gone = match found.presence {
        Presence::Left => "One that says nothing for a minute counts as gone",
        Presence::Here | Presence::Gone => "If the node is gone for good, delete its Node or CacheNode",
    };
    let message = format!("{left}. {gone}");
    let mut findings = vec![
        Finding::no(Type::Allocated, ending.cause.reason(), &ending.message),
        Finding::no(Type::Released, Reason::Releasing, &message),
    ];
    if object.metadata.deletion_timestamp.is_some() {
        findings.push(Finding::yes(Type::DeletionBlocked, Reason::Releasing, message));
    }
    findings
}

/// A grant that has ended; its room is free with this status.
fn ended(status: &mut GPUQueueAllocationStatus, ending: &Ending) -> Vec<Finding> {
    status.allocations.clear();
    let reason = ending.cause.reason();
    // One that somebody else's finalizer holds: of ours nothing is under way any more.
    let released = if ending.cause == Cause::Deleted { Reason::AsDesired } else { reason };
    vec![
        Finding::no(Type::Allocated, reason, &ending.message),
        Finding::yes(Type::Released, released, &ending.message),
    ]
}

/// Why nothing is granted yet.
fn waits(object: &GPUQueueAllocation, wait: &Wait, found: &Found) -> Finding {
    let (spec, node) = (&object.spec, &found.node);
    let pool = &spec.pool_ref.name;
    let asked = match spec.isolation {
        QueueIsolation::TrustedShared => {
            format!("{} queue pairs are asked for, of each controller of SSDPool {pool}", spec.queue_pairs)
        }
        QueueIsolation::ExclusiveController => format!(
            "{} queue pairs are asked for, of a controller of SSDPool {pool} that nobody else uses",
            spec.queue_pairs
        ),
    };
    let (reason, message) = match wait {
        Wait::NoController if found.status().is_none_or(|status| status.last_updated.is_none()) => (
            Reason::NotReported,
            format!("{asked}; the agent of node {node} has not said yet which controllers there are"),
        ),
        Wait::NoController => (
            Reason::NoDevices,
            format!(
                "{asked}; there is none on node {node} whose queue pairs could be lent: look at status.controllers of its CacheNode"
            ),
        ),
        Wait::TooMany { most } => (
            Reason::OverBudget,
            format!(
                "{asked}, and {most} may be lent of one at the most: ask for fewer in a new GPUQueueAllocation, or raise \
                 devices.maxGpuQueuePercent of the pool"
            ),
        ),
        Wait::Short(full) => {
            let full: Vec<String> = full.iter().map(held).collect();
            let message = format!(
                "{asked}, and there is no room: {}. It is granted when there is, for example when one of these is deleted",
                few(&full)
            );
            (Reason::OverBudget, message)
        }
        Wait::Coming(full) => {
            let message =
                format!("{asked}; {} is kept for it until agents have let go of what others had", held(full));
            (Reason::Releasing, message)
        }
    };
    Finding::no(Type::Allocated, reason, message)
}

/// A controller, its budget, and who has what of it.
pub(super) fn held(full: &Full) -> String {
    let holders: Vec<String> = full.holders.iter().map(|(name, pairs)| format!("{name} {pairs}")).collect();
    let holders = if holders.is_empty() { "nobody".to_owned() } else { few(&holders) };
    format!("{} (lends {}; held by {holders})", full.serial, full.budget)
}

/// The first of some names, and how many more there are.
pub(super) fn few<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES_MAX).map(|name| name.as_ref()).collect();
    let more = names.len() - shown.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}
