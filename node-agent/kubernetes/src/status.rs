//! Builds the status of a `CacheNode` from facts: fields and conditions.
//!
//! Used bytes are rounded down to 1/256 of the total, so a full or idle node does not cause writes.
//! Transition times of unchanged conditions are taken from the previous status.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use reprise_crds::CacheNodeStatus;
use reprise_crds::fields::{
    DevicePath, Digest, GpuUuid, HostPath, Name, NodeMode, PciAddress, Percent, Quantity, Serial, ShortName,
    Text, Uid, Version,
};
use reprise_crds::node::{
    AgentInfo, Applied, AppliedPool, AppliedProfile, AppliedQueues, Controller, CreatedQueues, Device,
    DeviceState, Drain, Endpoints, Gpu, NodeCapacity, Registration,
};
use reprise_crds::status::{Condition, ConditionStatus, ConditionType, Finding, Reason, set};

use crate::facts::{
    ClaimFact, ControlPlane, ControllerFact, CreatedFact, DeviceFact, Facts, GpuFact, Phase, ProfileFact,
    QueueFact,
};

/// Number of steps in which used bytes are reported.
const STEPS: u64 = 256;

/// Maximum length of a device's message, in characters.
const DEVICE_MESSAGE_CHARS_MAX: usize = 512;

/// Maximum length of a path of the node, in characters.
const HOST_PATH_CHARS_MAX: usize = 90;

/// Maximum number of devices in a status.
const DEVICES_MAX: usize = 32;

/// Maximum number of GPUs in a status.
const GPUS_MAX: usize = 16;

/// Maximum length of short texts from other sources, in characters.
const TEXT_CHARS_MAX: usize = 253;

/// Maximum number of controllers in a status.
const CONTROLLERS_MAX: usize = 32;

/// Maximum number of queue allocations in a status.
const QUEUES_MAX: usize = 128;

/// Maximum number of reported queue pairs of one allocation on one controller.
const QUEUE_NUMBERS_MAX: usize = 128;

/// Properties that do not change while the agent runs.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// Version of the agent.
    pub(crate) version: String,
    /// Name of its pod.
    pub(crate) pod: Option<String>,
    /// Start time of the agent.
    pub(crate) started_at: Time,
}

/// Builds a status without its write time. `contested` is the condition about other writers, if any.
/// `conditions` are those of the previous status; conditions that other writers own are omitted.
pub(crate) fn status(
    identity: &Identity,
    facts: &Facts,
    contested: Option<Finding>,
    conditions: &[Condition],
    now: &Time,
) -> CacheNodeStatus {
    let mut findings = findings(facts);
    findings.extend(contested);
    let is_ours =
        |condition: &&Condition| findings.iter().any(|finding| finding.kind.as_str() == condition.kind);
    let mut conditions: Vec<Condition> = conditions.iter().filter(is_ours).cloned().collect();
    for finding in &findings {
        set(&mut conditions, finding, facts.generation, now);
    }
    CacheNodeStatus {
        observed_generation: facts.generation,
        last_updated: None,
        agent: Some(AgentInfo {
            version: Version::new(&identity.version),
            pod_name: identity.pod.as_ref().map(Name::new),
            started_at: Some(identity.started_at.clone()),
        }),
        endpoints: Some(endpoints(facts)),
        registration: registration(facts.control_plane),
        // Sessions end with the agent.
        sessions: Some(if facts.phase == Phase::Stopping { 0 } else { facts.sessions }),
        capacity: Some(capacity(facts)),
        devices: facts.devices.iter().take(DEVICES_MAX).map(device).collect(),
        controllers: facts
            .controllers
            .iter()
            .take(CONTROLLERS_MAX)
            .map(|one| controller(one, facts))
            .collect(),
        gpus: facts.gpus.iter().take(GPUS_MAX).map(gpu).collect(),
        applied: Some(applied(facts)),
        drain: (facts.mode == NodeMode::Draining).then(|| drain(facts)),
        conditions,
    }
}

/// Removes amounts and messages from a status. The rest changes only if users or the operator may have to
/// act.
pub(crate) fn without_amounts(status: &CacheNodeStatus) -> CacheNodeStatus {
    let mut left = status.clone();
    left.sessions = left.sessions.map(|sessions| sessions.min(1));
    // A restarting member changes this number on all nodes at once. If no member responds, a condition
    // reports it.
    left.registration =
        left.registration.map(|registration| Registration { members_connected: 0, ..registration });
    if let Some(capacity) = &mut left.capacity {
        (capacity.dram_used, capacity.ssd_used) = (quantity(0), quantity(0));
    }
    for device in &mut left.devices {
        (device.used, device.media_errors) = (None, None);
        (device.spare_percent, device.read_latency_p99_micros) = (None, None);
        device.message.clear();
    }
    left.drain = left.drain.map(|drain| Drain { drained: drain.drained, ..Drain::default() });
    for condition in &mut left.conditions {
        condition.message.clear();
    }
    left
}

fn endpoints(facts: &Facts) -> Endpoints {
    Endpoints {
        peer: facts.peer.as_ref().map(Text::new),
        admin: Some(Text::new(&facts.admin)),
        socket_directory: host_path(&facts.socket_directory.display().to_string()),
    }
}

/// Returns the path if the schema accepts it: one invalid value would invalidate the whole status.
fn host_path(path: &str) -> Option<HostPath> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_segment =
        |segment: &str| !segment.is_empty() && !segment.starts_with('.') && segment.chars().all(fits);
    let segments = path.strip_prefix('/')?;
    let is_path = path.len() <= HOST_PATH_CHARS_MAX && segments.split('/').all(is_segment);
    is_path.then(|| HostPath::new(path))
}

fn registration(control_plane: ControlPlane) -> Option<Registration> {
    let ControlPlane::Connected { node, epoch, members, connected } = control_plane else { return None };
    Some(Registration {
        node: u32::from(node),
        epoch: i64::try_from(epoch).unwrap_or(i64::MAX),
        members_connected: connected,
        members,
    })
}

fn capacity(facts: &Facts) -> NodeCapacity {
    let open = || facts.devices.iter().filter(|device| device.state == DeviceState::Open);
    let (total, used) = (open().map(|device| device.size).sum(), open().map(|device| device.used).sum());
    NodeCapacity {
        dram_total: quantity(facts.memory.total),
        dram_used: quantity(rounded(facts.memory.used, facts.memory.total)),
        ssd_total: quantity(total),
        ssd_used: quantity(rounded(used, total)),
        page_kind: facts.memory.pages,
    }
}

fn device(fact: &DeviceFact) -> Device {
    let is_open = fact.state == DeviceState::Open;
    // A device that uses another engine can also fail: its reason is then that of the failure.
    let faults = || fact.fault.iter().chain(&fact.fallback);
    let reason = faults().next().map(|fault| fault.reason.as_str().to_owned());
    let health = fact.worn.as_deref().into_iter().chain(fact.slow.as_deref());
    let message = faults().map(|fault| fault.message.as_str()).chain(health).collect::<Vec<_>>().join("; ");
    Device {
        path: DevicePath::new(&fact.path),
        pool: ShortName::new(&fact.pool),
        state: fact.state,
        reason,
        message: message.chars().take(DEVICE_MESSAGE_CHARS_MAX).collect(),
        serial: fact.serial.as_ref().map(Serial::new),
        model: fact.model.as_deref().map(short),
        namespace_id: fact.namespace,
        emulated: fact.emulated,
        size: is_open.then(|| quantity(fact.size)),
        used: is_open.then(|| quantity(rounded(fact.used, fact.size))),
        engine: fact.engine,
        direct: fact.direct,
        media_errors: fact.media_errors,
        spare_percent: fact.spare_percent.map(Percent),
        read_latency_p99_micros: fact.read_p99_micros,
        slow: fact.slow.is_some(),
        worn: fact.worn.is_some(),
    }
}

fn controller(fact: &ControllerFact, facts: &Facts) -> Controller {
    let created = facts.queues.iter().flat_map(|queues| &queues.created);
    let created = created.filter(|created| created.serial == fact.serial);
    let lent = created.map(|created| created.queues.len()).sum();
    Controller {
        serial: Serial::new(&fact.serial),
        pci_address: fact.pci_address.as_ref().map(PciAddress::new),
        pool: fact.pool.as_ref().map(ShortName::new),
        queue_pairs: fact.queue_pairs,
        queue_pairs_lent: match facts.phase {
            Phase::Stopping => 0,
            Phase::Starting | Phase::Serving => count(lent),
        },
    }
}

fn gpu(fact: &GpuFact) -> Gpu {
    Gpu { uuid: GpuUuid::new(&fact.uuid), product: short(&fact.product) }
}

fn profile(fact: &ProfileFact) -> AppliedProfile {
    AppliedProfile {
        name: Name::new(&fact.name),
        digest: Digest::new(&fact.digest),
        refused: fact.refused.as_deref().map(short),
        prediction_error_p50_percent: fact.prediction_error.map(|error| error.p50_percent),
        prediction_error_p99_percent: fact.prediction_error.map(|error| error.p99_percent),
    }
}

fn queues(fact: &QueueFact) -> AppliedQueues {
    let created = |created: &CreatedFact| CreatedQueues {
        serial: Serial::new(&created.serial),
        generation: i64::try_from(created.generation).unwrap_or(i64::MAX),
        queues: created.queues.iter().take(QUEUE_NUMBERS_MAX).copied().map(u32::from).collect(),
    };
    AppliedQueues {
        uid: Uid::new(&fact.uid),
        queue_pairs: count(fact.created.iter().map(|created| created.queues.len()).sum()),
        kept: fact.kept,
        created: fact.created.iter().take(CONTROLLERS_MAX).map(created).collect(),
        unavailable: fact.unavailable.as_deref().map(short),
        refused: fact.refused.as_deref().map(short),
    }
}

fn count(of: usize) -> u32 {
    u32::try_from(of).unwrap_or(u32::MAX)
}

/// Joins lines and truncates the text: one invalid value would invalidate the whole status.
fn short(text: &str) -> Text {
    let line = text.split(['\r', '\n']).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    Text::new(line.chars().take(TEXT_CHARS_MAX).collect::<String>())
}

fn applied(facts: &Facts) -> Applied {
    let pool = |claim: &ClaimFact| AppliedPool {
        pool: ShortName::new(&claim.pool),
        uid: Uid::new(&claim.uid),
        generation: claim.generation,
    };
    Applied {
        configuration_digest: facts.configuration.as_ref().map(Digest::new),
        pools: facts.claims.iter().map(pool).collect(),
        tenants_digest: facts.tenants.as_ref().map(Digest::new),
        profiles: facts.profiles.iter().map(profile).collect(),
        // Reservations end with the agent.
        queues: match facts.phase {
            Phase::Stopping => Vec::new(),
            Phase::Starting | Phase::Serving => facts.queues.iter().take(QUEUES_MAX).map(queues).collect(),
        },
    }
}

fn drain(facts: &Facts) -> Drain {
    let count = |blocks: u64| i64::try_from(blocks).unwrap_or(i64::MAX);
    Drain {
        drained: facts.drain.drained,
        walked_blocks: count(facts.drain.walked),
        durable_blocks: count(facts.drain.durable),
        nowhere_blocks: count(facts.drain.nowhere),
    }
}

/// Rounds to whole KiB, so that 12 digits suffice.
fn quantity(bytes: u64) -> Quantity {
    Quantity::of_bytes(bytes / 1024 * 1024)
}

fn rounded(used: u64, total: u64) -> u64 {
    let step = (total / STEPS).max(1);
    used / step * step
}

fn findings(facts: &Facts) -> Vec<Finding> {
    vec![
        agent_ready(facts),
        connected(facts),
        devices_ready(facts),
        configuration_applied(facts),
        engine_fallback(facts),
        degraded(facts),
        cordoned(facts),
        drained(facts),
    ]
}

fn agent_ready(facts: &Facts) -> Finding {
    let kind = ConditionType::AgentReady;
    match facts.phase {
        Phase::Starting => {
            Finding::no(kind, Reason::Progressing, "the agent has not applied its first spec yet")
        }
        Phase::Serving => Finding::yes(kind, Reason::AsDesired, "serving engines on this node"),
        Phase::Stopping => Finding::no(kind, Reason::AgentGone, "the agent is stopping"),
    }
}

fn connected(facts: &Facts) -> Finding {
    let kind = ConditionType::Connected;
    match facts.control_plane {
        ControlPlane::NotConfigured => {
            Finding::yes(kind, Reason::AsDesired, "no control plane is configured")
        }
        ControlPlane::Connected { members, connected, .. } => {
            Finding::yes(kind, Reason::AsDesired, format!("{connected} of {members} members respond"))
        }
        ControlPlane::Unreachable { .. } => Finding::no(
            kind,
            Reason::ControlPlaneUnreachable,
            "no member of the control plane responds; local hits continue. Check the members' pods and NetworkPolicies",
        ),
    }
}

fn devices_ready(facts: &Facts) -> Finding {
    let kind = ConditionType::DevicesReady;
    let of_claims = facts.claims.iter().filter_map(|claim| {
        claim.fault.as_ref().map(|fault| (fault.reason, format!("pool {}: {}", claim.pool, fault.message)))
    });
    let is_closed = |device: &&DeviceFact| !matches!(device.state, DeviceState::Open | DeviceState::Wiped);
    let of_devices = facts.devices.iter().filter(is_closed).map(|device| match &device.fault {
        Some(fault) => (fault.reason, format!("{}: {}", device.path, fault.message)),
        None => (Reason::Progressing, format!("{}: {}", device.path, device.state)),
    });
    let faults: Vec<(Reason, String)> = of_claims.chain(of_devices).collect();
    let worst = faults.iter().find(|(reason, _)| *reason != Reason::Progressing).or(faults.first());
    match worst {
        None if facts.devices.is_empty() => Finding::yes(kind, Reason::AsDesired, "no pool claims a device"),
        None => Finding::yes(kind, Reason::AsDesired, format!("{} open", facts.devices.len())),
        Some((reason, first)) => {
            let others = faults.len() - 1;
            let others = if others > 0 { format!("; and {others} more") } else { String::new() };
            Finding::no(kind, *reason, format!("{first}{others}"))
        }
    }
}

fn configuration_applied(facts: &Facts) -> Finding {
    let kind = ConditionType::ConfigurationApplied;
    match (&facts.problems[..], &facts.configuration_pending) {
        ([], None) => Finding::yes(kind, Reason::AsDesired, ""),
        ([], Some(why)) => Finding::no(kind, Reason::Progressing, why),
        (problems, _) => Finding::no(kind, Reason::InvalidSpec, problems.join("; ")),
    }
}

/// True if a device uses another engine. The reason is `EngineUnavailable` also if no fallback is allowed.
fn engine_fallback(facts: &Facts) -> Finding {
    let kind = ConditionType::EngineFallback;
    let fallback = |device: &DeviceFact| Some((device.path.clone(), device.fallback.clone()?.message));
    let fallen: Vec<(String, String)> = facts.devices.iter().filter_map(fallback).collect();
    let unavailable = |device: &&DeviceFact| {
        device.fault.as_ref().is_some_and(|fault| fault.reason == Reason::EngineUnavailable)
    };
    match (fallen.first(), facts.devices.iter().find(unavailable)) {
        (Some((path, why)), _) => Finding::yes(
            kind,
            Reason::EngineUnavailable,
            format!(
                "{} of {} devices do not use the desired engine: {path}: {why}",
                fallen.len(),
                facts.devices.len(),
            ),
        ),
        (None, Some(closed)) => Finding::no(
            kind,
            Reason::EngineUnavailable,
            format!("{} stays closed: the claim has no available fallback engine", closed.path),
        ),
        (None, None) => Finding::no(kind, Reason::AsDesired, "all devices use the desired engine"),
    }
}

fn degraded(facts: &Facts) -> Finding {
    let kind = ConditionType::Degraded;
    let devices = devices_ready(facts);
    let (is_ready, is_coming) =
        (devices.status == ConditionStatus::True, devices.reason == Reason::Progressing);
    match () {
        () if !is_ready && !is_coming => Finding::yes(kind, devices.reason, devices.message),
        () if matches!(facts.control_plane, ControlPlane::Unreachable { .. }) => {
            Finding::yes(kind, Reason::ControlPlaneUnreachable, "cannot look up blocks on other nodes")
        }
        () => match worn(facts).or_else(|| slow(facts)) {
            Some((reason, path, words)) => Finding::yes(kind, reason, format!("{path}: {words}")),
            None => Finding::no(kind, Reason::AsDesired, ""),
        },
    }
}

fn worn(facts: &Facts) -> Option<(Reason, &str, &str)> {
    let device = facts.devices.iter().find(|device| device.worn.is_some())?;
    Some((Reason::DeviceWorn, &device.path, device.worn.as_deref()?))
}

fn slow(facts: &Facts) -> Option<(Reason, &str, &str)> {
    let device = facts.devices.iter().find(|device| device.slow.is_some())?;
    Some((Reason::DeviceSlow, &device.path, device.slow.as_deref()?))
}

fn cordoned(facts: &Facts) -> Finding {
    let kind = ConditionType::Cordoned;
    match facts.mode {
        NodeMode::Active => Finding::no(kind, Reason::AsDesired, ""),
        mode => {
            Finding::yes(kind, Reason::SetByOperator, format!("the node is {mode}: it gets no new replicas"))
        }
    }
}

fn drained(facts: &Facts) -> Finding {
    let kind = ConditionType::Drained;
    let drain = &facts.drain;
    match (facts.mode, drain.drained) {
        (NodeMode::Draining, true) => {
            Finding::yes(kind, Reason::AsDesired, "every durable block also exists on another node")
        }
        (NodeMode::Draining, false) if drain.nowhere > 0 => Finding::no(
            kind,
            Reason::OverCapacity,
            format!(
                "no other node has capacity for {} blocks: add nodes, or drain fewer nodes at once",
                drain.nowhere
            ),
        ),
        // Counts are in the status itself, so the message stays the same while draining.
        (NodeMode::Draining, false) => Finding::no(kind, Reason::Draining, "copying blocks to other nodes"),
        _ => Finding::no(kind, Reason::AsDesired, "the node is not draining"),
    }
}

#[cfg(test)]
pub(crate) mod tests;
