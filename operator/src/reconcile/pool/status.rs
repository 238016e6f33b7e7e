//! Computes the status of a pool: conditions, and sums over its nodes. Pure.

use std::collections::{BTreeMap, BTreeSet};

use reprise_crds::cluster::DeviceAccessMode;
use reprise_crds::fields::{DeviceClass, Engine, NodeMode, Quantity};
use reprise_crds::node::{Device, DeviceState};
use reprise_crds::pool::{EngineUse, PoolCapacity, PoolDevices, PoolNodes};
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason, find};
use reprise_crds::{SSDPool, SSDPoolStatus};

use super::build::{Wipe, wipe};
use super::dereference::{PoolInputs, PoolNode};
use crate::framework::refusal::Refusal;
use crate::reconcile::membership::has_reported;

/// Maximum number of names in a message.
const NAMES_MAX: usize = 5;
/// Reasons for which agents refuse devices.
const REFUSALS: [Reason; 6] = [
    Reason::ForeignSignature,
    Reason::DeviceNotPermitted,
    Reason::DeviceFailed,
    Reason::EngineUnavailable,
    Reason::Conflict,
    Reason::OverCapacity,
];

/// Computes the status and conditions of a pool. `refused` is set if the pool is rejected as a whole.
pub fn compute(
    pool: &SSDPool,
    inputs: &PoolInputs,
    refused: Option<&Refusal>,
) -> (SSDPoolStatus, Vec<Finding>) {
    let counts = Counts::of(pool, inputs);
    let rejected = refused.or(inputs.assignment.conflict.as_ref());
    let degraded = degraded(pool, &counts, inputs);
    let findings = [
        Some(accepted(rejected)),
        Some(discovered(pool, &counts, rejected)),
        Some(cordoned(pool)),
        drained(pool, inputs, rejected),
        Some(fallback(pool, inputs)),
        blocked(pool, inputs),
        Some(ready(rejected, &counts, &degraded)),
        Some(degraded),
    ];
    let refused_nodes = counts.problems.get(&Problem::Refused).map_or(0, BTreeMap::len);
    let status = SSDPoolStatus {
        nodes: Some(PoolNodes {
            selected: counts.selected,
            ready: counts.ready,
            refused: number(refused_nodes),
        }),
        devices: Some(PoolDevices { matched: counts.matched, open: counts.open, faulted: counts.faulted }),
        capacity: Some(PoolCapacity {
            total: Quantity::of_bytes(counts.total),
            used: Quantity::of_bytes(counts.used),
            reserved: Quantity::of_bytes(inputs.reserved.saturating_mul(u64::from(counts.selected))),
        }),
        effective_engines: counts
            .engines
            .iter()
            .map(|(engine, nodes)| EngineUse { engine: *engine, nodes: number(nodes.len()) })
            .collect(),
        ..SSDPoolStatus::default()
    };
    (status, findings.into_iter().flatten().collect())
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// A problem of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Problem {
    Failed,
    Refused,
    /// It is more worn than the pool allows.
    Worn,
    /// It is slower than the pool allows.
    Slow,
}

/// Sums over the nodes of a pool.
#[derive(Debug, Default)]
struct Counts {
    selected: u32,
    /// Nodes that have reported recently with the pool's current generation.
    reported: u32,
    /// Nodes of `reported` on which all devices are open.
    ready: u32,
    /// Nodes with a problem: reason and message of the first device.
    problems: BTreeMap<Problem, BTreeMap<String, (Reason, String)>>,
    /// Nodes with an open device whose drive does not report its spare capacity.
    without_spare_report: BTreeSet<String>,
    /// Nodes that have reported before, but not recently.
    silent: BTreeSet<String>,
    matched: u32,
    open: u32,
    faulted: u32,
    total: u64,
    used: u64,
    engines: BTreeMap<Engine, BTreeSet<String>>,
}

impl Counts {
    fn of(pool: &SSDPool, inputs: &PoolInputs) -> Counts {
        let selected = number(inputs.assignment.nodes.len());
        let mut counts = Counts { selected, ..Counts::default() };
        for node in &inputs.nodes {
            counts.add(node, pool.metadata.generation.unwrap_or_default());
        }
        counts
    }

    fn add(&mut self, node: &PoolNode, generation: i64) {
        let name = node.name();
        if !has_reported(&node.node) {
            // Nodes that never reported are still starting.
            if node.node.status.as_ref().is_some_and(|status| status.last_updated.is_some()) {
                self.silent.insert(name.to_owned());
            }
            return;
        }
        for device in node.devices() {
            self.matched += 1;
            self.add_device(name, device);
        }
        let is_applied = node.applied().is_some_and(|applied| applied.generation >= generation);
        let is_open = node.devices().all(|device| device.state == DeviceState::Open);
        self.reported += u32::from(is_applied);
        self.ready += u32::from(is_applied && is_open && node.devices().next().is_some());
    }

    fn add_device(&mut self, node: &str, device: &Device) {
        let bytes = |quantity: &Option<Quantity>| {
            quantity.as_ref().and_then(|quantity| quantity.bytes().ok()).unwrap_or_default()
        };
        let mut problems = Vec::new();
        match device.state {
            DeviceState::Open => {
                self.open += 1;
                self.total = self.total.saturating_add(bytes(&device.size));
                self.used = self.used.saturating_add(bytes(&device.used));
                problems.extend(device.worn.then_some((Problem::Worn, Reason::DeviceWorn)));
                problems.extend(device.slow.then_some((Problem::Slow, Reason::DeviceSlow)));
                if device.spare_percent.is_none() {
                    self.without_spare_report.insert(node.to_owned());
                }
                if let Some(engine) = device.engine {
                    self.engines.entry(engine).or_default().insert(node.to_owned());
                }
            }
            DeviceState::Refused => problems.push((Problem::Refused, refusal(device))),
            DeviceState::Faulted => {
                self.faulted += 1;
                problems.push((Problem::Failed, Reason::DeviceFailed));
            }
            DeviceState::Found | DeviceState::Opening | DeviceState::Wiped => {}
        }
        for (problem, reason) in problems {
            let first = self.problems.entry(problem).or_default().entry(node.to_owned());
            first.or_insert_with(|| (reason, format!("{}: {}", device.path, device.message)));
        }
    }
}

fn accepted(rejected: Option<&Refusal>) -> Finding {
    match rejected {
        Some(Refusal { reason, message }) => Finding::no(Type::Accepted, *reason, message),
        None => Finding::yes(Type::Accepted, Reason::AsDesired, "the spec is valid"),
    }
}

/// Returns why a pool has no nodes.
fn no_nodes(rejected: Option<&Refusal>) -> (Reason, &'static str) {
    match rejected {
        Some(rejected) => (rejected.reason, "the pool is rejected on all nodes: see condition Accepted"),
        None => (Reason::NoNodes, "nodeSelector matches no node: label nodes, or change it"),
    }
}

/// Returns the remedy if nodes found no devices. Directories have no patterns; their agents report why the
/// file is missing.
fn nothing_found(pool: &SSDPool) -> String {
    let class = pool.spec.devices.as_ref().map(|devices| devices.class);
    match &pool.spec.directory {
        Some(directory) => format!(
            "no node has a file in {}: check the agents' pods and the conditions of their CacheNodes",
            directory.path
        ),
        None if class == Some(DeviceClass::NvmeController) => {
            "no controller matches devices.globs: correct it, or bind controllers to vfio-pci; reprise doctor lists those of \
             a node"
                .to_owned()
        }
        None => {
            "no device matches devices.globs: correct it, and compare it with /dev/disk/by-id on the nodes"
                .to_owned()
        }
    }
}

fn discovered(pool: &SSDPool, counts: &Counts, rejected: Option<&Refusal>) -> Finding {
    let kind = Type::DevicesDiscovered;
    let message = format!("{} of {} nodes have reported their devices", counts.reported, counts.selected);
    if counts.selected == 0 {
        let (reason, message) = no_nodes(rejected);
        return Finding::no(kind, reason, message);
    }
    if counts.reported < counts.selected {
        return Finding::no(kind, Reason::Progressing, message);
    }
    if counts.matched == 0 {
        return Finding::no(kind, Reason::NoDevices, nothing_found(pool));
    }
    Finding::yes(kind, Reason::AsDesired, message)
}

fn cordoned(pool: &SSDPool) -> Finding {
    let mode = pool.spec.mode;
    let reason = match mode {
        NodeMode::Active => {
            let message = "new replicas may be placed on it";
            return Finding::no(Type::Cordoned, Reason::AsDesired, message);
        }
        NodeMode::Cordoned => Reason::SetByOperator,
        NodeMode::Draining => Reason::Draining,
    };
    let message = format!("mode is {mode}: no replicas of blocks from other nodes are placed on it");
    Finding::yes(Type::Cordoned, reason, message)
}

/// Returns condition `Drained` while the pool is draining. Reports that are old, or of an earlier spec, do
/// not count; a node without a report counts as not empty.
fn drained(pool: &SSDPool, inputs: &PoolInputs, rejected: Option<&Refusal>) -> Option<Finding> {
    let kind = Type::Drained;
    if pool.spec.mode != NodeMode::Draining {
        return None;
    }
    let nodes = &inputs.assignment.nodes;
    if nodes.is_empty() {
        let (reason, message) = no_nodes(rejected);
        let message = format!("{message}. It is unknown whether blocks are left");
        return Some(Finding::unknown(kind, reason, message));
    }
    let generation = pool.metadata.generation.unwrap_or_default();
    let empty = inputs.nodes.iter().filter(|node| is_empty(node, generation));
    let empty: BTreeSet<&str> = empty.map(PoolNode::name).collect();
    let left: Vec<&str> = nodes.iter().map(String::as_str).filter(|node| !empty.contains(node)).collect();
    if left.is_empty() {
        let message = "every durable block has a replica on another node";
        return Some(Finding::yes(kind, Reason::AsDesired, message));
    }
    let message = format!(
        "{} of {} nodes are not empty yet, or have not reported so recently: {}{}",
        left.len(),
        nodes.len(),
        join_names(left.iter().copied()),
        mode_not_applied(inputs).unwrap_or_default(),
    );
    Some(Finding::no(kind, Reason::Draining, message))
}

/// Whether a node has recently reported that it is empty, for the current spec of the pool.
fn is_empty(node: &PoolNode, generation: i64) -> bool {
    let PoolNode { node, pool_uid, .. } = node;
    let Some(status) = &node.status else { return false };
    let claims = &node.spec.claims;
    // Mode and claims are written together, so a claim of this generation implies the mode.
    let is_current =
        claims.iter().any(|claim| claim.uid.as_str() == pool_uid.as_str() && claim.generation >= generation);
    let is_seen = status.observed_generation >= node.metadata.generation.unwrap_or_default();
    let is_drained = status.drain.as_ref().is_some_and(|drain| drain.drained);
    is_current && is_seen && is_drained && has_reported(node)
}

/// Describes a node whose mode the control plane does not have; other nodes then accept no blocks from it.
fn mode_not_applied(inputs: &PoolInputs) -> Option<String> {
    inputs.nodes.iter().find_map(|node| {
        let applied = find(&node.node.status.as_ref()?.conditions, Type::ModeApplied)?;
        let is_not = applied.status == ConditionStatus::False;
        is_not.then(|| format!("; {}: {}", node.name(), applied.message))
    })
}

fn fallback(pool: &SSDPool, inputs: &PoolInputs) -> Finding {
    let (kind, engine) = (Type::EngineFallback, pool.spec.engine);
    let nodes_with = |test: &dyn Fn(&Device) -> bool| -> Vec<&str> {
        let nodes = inputs.nodes.iter().filter(|node| node.devices().any(test));
        nodes.map(PoolNode::name).collect()
    };
    // Devices that are not open report no engine.
    let others = nodes_with(&|device| device.engine.is_some_and(|used| used != engine));
    if !others.is_empty() {
        let message = format!(
            "engine {engine} is unavailable on {} nodes, which use fallbackEngine: {}. Check agents.seccomp of the cluster: \
             many default profiles forbid io_uring",
            others.len(),
            join_names(others.into_iter()),
        );
        return Finding::yes(kind, Reason::EngineUnavailable, message);
    }
    // Devices stay closed because of `fallbackEngine: None`.
    let is_closed = |device: &Device| {
        device.state == DeviceState::Refused && refusal(device) == Reason::EngineUnavailable
    };
    if !nodes_with(&is_closed).is_empty() {
        let message = format!(
            "engine {engine} is unavailable and there is no fallback (fallbackEngine: None): the devices stay closed, see \
             condition Degraded"
        );
        return Finding::no(kind, Reason::EngineUnavailable, message);
    }
    Finding::no(kind, Reason::AsDesired, format!("devices use engine {engine}"))
}

fn join_names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.take(NAMES_MAX).collect::<Vec<_>>().join(", ")
}

fn degraded(pool: &SSDPool, counts: &Counts, inputs: &PoolInputs) -> Finding {
    let kind = Type::Degraded;
    let first = |problem: Problem| {
        let nodes = counts.problems.get(&problem)?;
        let (node, (reason, why)) = nodes.first_key_value()?;
        let (count, hint) = (nodes.len(), unopened(inputs, *reason));
        let message = match problem {
            Problem::Failed => {
                format!(
                    "devices of {count} nodes have failed, and their blocks count as misses; on {node}, {why}"
                )
            }
            Problem::Refused => format!("{count} nodes have refused devices; on {node}, {why}{hint}"),
            Problem::Worn => format!(
                "devices of {count} nodes have more media errors than health.maxMediaErrors, or less spare capacity than \
                 health.minSparePercent; on {node}, {why}. They remain in use: replace them before they fail, or raise the \
                 thresholds"
            ),
            Problem::Slow => format!(
                "devices of {count} nodes take longer for reads than health.maxReadLatency; on {node}, {why}. They remain in \
                 use: check the device's health and its other users, or raise the threshold"
            ),
        };
        Some(Finding::yes(kind, *reason, message))
    };
    let silent = || {
        let count = counts.silent.len();
        let names = join_names(counts.silent.iter().map(String::as_str));
        let message =
            format!("{count} nodes have not reported for a minute: {names}; check their agents' pods");
        (count > 0).then(|| Finding::yes(kind, Reason::NotReported, message))
    };
    first(Problem::Failed)
        .or_else(|| first(Problem::Refused))
        .or_else(silent)
        .or_else(|| first(Problem::Worn))
        .or_else(|| first(Problem::Slow))
        .unwrap_or_else(|| Finding::no(kind, Reason::AsDesired, uncompared(pool, counts)))
}

/// Returns a note on thresholds that cannot be checked, so that worse drives would go unnoticed.
fn uncompared(pool: &SSDPool, counts: &Counts) -> String {
    if pool.spec.health.min_spare_percent.is_none() || counts.without_spare_report.is_empty() {
        return String::new();
    }
    format!(
        "health.minSparePercent is not checked on {} nodes, whose drives do not report spare capacity: {}. Agents can query \
         NVMe drives if agents.deviceAccess.mode of the cluster is Privileged",
        counts.without_spare_report.len(),
        join_names(counts.without_spare_report.iter().map(String::as_str)),
    )
}

/// Returns the reason for which an agent refused a device, if it reported a known one.
fn refusal(device: &Device) -> Reason {
    let reported = device.reason.as_deref().unwrap_or_default();
    REFUSALS.into_iter().find(|reason| reason.as_str() == reported).unwrap_or(Reason::Refused)
}

/// Returns the remedy if the agents' pods have no access to the device.
fn unopened(inputs: &PoolInputs, reason: Reason) -> &'static str {
    let mode = inputs.cluster.as_ref().map(|cluster| cluster.spec.agents.device_access.mode);
    if mode == Some(DeviceAccessMode::None) && reason == Reason::DeviceNotPermitted {
        "; the container runtime denies the agents' pods access to it: set agents.deviceAccess of the cluster"
    } else {
        ""
    }
}

fn ready(rejected: Option<&Refusal>, counts: &Counts, degraded: &Finding) -> Finding {
    let kind = Type::Ready;
    if let Some(Refusal { reason, message }) = rejected {
        return Finding::no(kind, *reason, message);
    }
    if counts.selected == 0 {
        let (reason, message) = no_nodes(None);
        return Finding::no(kind, reason, message);
    }
    let message = format!("{} of {} nodes have all devices open", counts.ready, counts.selected);
    if counts.ready >= counts.selected {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    // Slow or worn devices are open, so they do not delay readiness.
    let keeps_closed = ![Reason::DeviceSlow, Reason::DeviceWorn].contains(&degraded.reason);
    if degraded.status == ConditionStatus::True && keeps_closed {
        return Finding::no(kind, degraded.reason, format!("{message}; {}", degraded.message));
    }
    Finding::no(kind, Reason::Progressing, message)
}

/// Returns condition `DeletionBlocked` while the pool is being deleted.
fn blocked(pool: &SSDPool, inputs: &PoolInputs) -> Option<Finding> {
    let wipe = wipe(pool, inputs);
    // Sessions block the wipe as well.
    if let Some(mut used) = inputs.guard.blocked_condition(pool) {
        if wipe == Wipe::TooLate {
            used.message += ". Its data is kept: the pool was deleted before deletionPolicy was set to Wipe";
        }
        return Some(used);
    }
    let (reason, message) = match wipe {
        Wipe::None | Wipe::TooLate | Wipe::Done => return None,
        Wipe::Unconfirmed => (
            Reason::ConfirmationMissing,
            "deletionPolicy is Wipe but the wipe is not confirmed: set wipeConfirmation to yes-really-destroy-the-data, or \
             deletionPolicy to Retain"
                .to_owned(),
        ),
        Wipe::Rejected => (
            Reason::Conflict,
            "deletionPolicy is Wipe but the pool is rejected, so nodes cannot wipe it: remove the cause that condition \
             Accepted names, or set deletionPolicy to Retain"
                .to_owned(),
        ),
        Wipe::NoCluster => (
            Reason::ReferenceNotFound,
            "deletionPolicy is Wipe but the pool belongs to no cluster, so no agent can wipe it: add the pool to a cluster \
             again, or set deletionPolicy to Retain"
                .to_owned(),
        ),
        Wipe::Contested { node, other } => (
            Reason::Conflict,
            format!(
                "deletionPolicy is Wipe but SSDPool {other} names the same devices on node {node}, so they are not wiped: set \
                 nodeSelector or the devices of one of the pools so that they differ, delete SSDPool {other}, or set \
                 deletionPolicy to Retain"
            ),
        ),
        Wipe::InProgress(left) => {
            (Reason::Releasing, format!("{left} nodes have not wiped their devices yet"))
        }
    };
    Some(Finding::yes(Type::DeletionBlocked, reason, message))
}

#[cfg(test)]
mod tests;
