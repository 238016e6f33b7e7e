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
use super::guard::Guard;
use super::validate::validate;
use crate::framework::refusal::{Refusal, accepted, list};
use crate::reconcile::membership::has_reported;

/// Computes the status and conditions of a pool.
pub fn compute(pool: &SSDPool, inputs: &PoolInputs, guard: &Guard) -> (SSDPoolStatus, Vec<Finding>) {
    let refused = validate(pool, inputs);
    let rejected = refused.as_ref().or(inputs.assignment.conflict.as_ref());
    let reports = Reports::of(inputs);
    // A silent agent still uses the engine that it reported last.
    let all = Reports { nodes: inputs.nodes.iter().collect(), ..Reports::of(inputs) };
    let degraded = degraded(&reports, inputs);
    let findings = [
        Some(accepted(rejected)),
        Some(discovered(pool, &reports, rejected)),
        Some(cordoned(pool.spec.mode)),
        drained(pool, inputs, rejected),
        Some(fallback(pool.spec.engine, &all)),
        guard.blocked_condition(pool).or_else(|| wipe_blocked(wipe(pool, inputs))),
        Some(ready(rejected, &reports, &degraded)),
        Some(degraded),
    ];
    let count = |test: fn(&Device) -> bool| number(reports.devices().filter(|device| test(device)).count());
    let sum = |of: fn(&Device) -> &Option<Quantity>| {
        let open = reports.devices().filter(|device| is_open(device));
        let bytes = open.filter_map(|device| of(device).as_ref()?.bytes().ok());
        Quantity::of_bytes(bytes.fold(0, u64::saturating_add))
    };
    let reserved = inputs.reserved.saturating_mul(u64::from(reports.selected));
    let status = SSDPoolStatus {
        nodes: Some(PoolNodes {
            selected: reports.selected,
            ready: reports.ready,
            refused: number(reports.with(is_refused).len()),
        }),
        devices: Some(PoolDevices {
            matched: count(|_| true),
            open: count(is_open),
            faulted: count(is_faulted),
        }),
        capacity: Some(PoolCapacity {
            total: sum(|device| &device.size),
            used: sum(|device| &device.used),
            reserved: Quantity::of_bytes(reserved),
        }),
        effective_engines: reports.engines(),
        ..SSDPoolStatus::default()
    };
    (status, findings.into_iter().flatten().collect())
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn is_open(device: &Device) -> bool {
    device.state == DeviceState::Open
}

fn is_refused(device: &Device) -> bool {
    device.state == DeviceState::Refused
}

fn is_faulted(device: &Device) -> bool {
    device.state == DeviceState::Faulted
}

/// Recent reports of a pool's nodes.
struct Reports<'a> {
    /// Number of assigned nodes.
    selected: u32,
    /// Nodes that have reported recently, sorted by name.
    nodes: Vec<&'a PoolNode>,
    /// Number of these nodes that have applied the current claim.
    applied: u32,
    /// Number of the latter nodes on which all devices are open.
    ready: u32,
}

impl<'a> Reports<'a> {
    fn of(inputs: &'a PoolInputs) -> Reports<'a> {
        let nodes: Vec<&PoolNode> = inputs.nodes.iter().filter(|node| has_reported(&node.node)).collect();
        let applied = || nodes.iter().filter(|node| node.is_applied);
        let ready = applied().filter(|node| !node.devices.is_empty() && node.devices.iter().all(is_open));
        Reports {
            selected: number(inputs.assignment.nodes.len()),
            applied: number(applied().count()),
            ready: number(ready.count()),
            nodes,
        }
    }

    fn devices(&self) -> impl Iterator<Item = &Device> {
        self.nodes.iter().flat_map(|node| &node.devices)
    }

    /// Returns the nodes with a device that meets a test, and the first such device of each.
    fn with(&self, test: impl Fn(&Device) -> bool) -> Vec<(&'a str, &'a Device)> {
        let first =
            |node: &&'a PoolNode| Some((node.name(), node.devices.iter().find(|device| test(device))?));
        self.nodes.iter().filter_map(first).collect()
    }

    /// Returns the engines of open devices with the number of nodes.
    fn engines(&self) -> Vec<EngineUse> {
        let mut nodes: BTreeMap<Engine, u32> = BTreeMap::new();
        for node in &self.nodes {
            let open = node.devices.iter().filter(|device| is_open(device));
            for engine in open.filter_map(|device| device.engine).collect::<BTreeSet<_>>() {
                *nodes.entry(engine).or_default() += 1;
            }
        }
        nodes.into_iter().map(|(engine, nodes)| EngineUse { engine, nodes }).collect()
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

fn discovered(pool: &SSDPool, reports: &Reports, rejected: Option<&Refusal>) -> Finding {
    let kind = Type::DevicesDiscovered;
    let Reports { selected, applied, .. } = *reports;
    if selected == 0 {
        let (reason, message) = no_nodes(rejected);
        return Finding::no(kind, reason, message);
    }
    let message = format!("{applied} of {selected} nodes have reported their devices");
    if applied < selected {
        return Finding::no(kind, Reason::Progressing, message);
    }
    if reports.devices().next().is_none() {
        return Finding::no(kind, Reason::NoDevices, nothing_found(pool));
    }
    Finding::yes(kind, Reason::AsDesired, message)
}

fn cordoned(mode: NodeMode) -> Finding {
    let reason = match mode {
        NodeMode::Active => {
            return Finding::no(Type::Cordoned, Reason::AsDesired, "new replicas may be placed on it");
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
    let empty: BTreeSet<&str> =
        inputs.nodes.iter().filter(|node| is_empty(node)).map(PoolNode::name).collect();
    let left: Vec<&String> = nodes.iter().filter(|node| !empty.contains(node.as_str())).collect();
    if left.is_empty() {
        let message = "every durable block has a replica on another node";
        return Some(Finding::yes(kind, Reason::AsDesired, message));
    }
    let message = format!(
        "{} of {} nodes are not empty yet, or have not reported so recently: {}{}",
        left.len(),
        nodes.len(),
        list(left.iter()),
        mode_not_applied(inputs).unwrap_or_default(),
    );
    Some(Finding::no(kind, Reason::Draining, message))
}

/// Whether a node has recently reported that it is empty, for the current spec of the pool. Mode and claims are written
/// together, so the current claim implies the mode.
fn is_empty(PoolNode { node, is_claimed, .. }: &PoolNode) -> bool {
    node.status.as_ref().is_some_and(|status| {
        let is_seen = status.observed_generation >= node.metadata.generation.unwrap_or_default();
        let is_drained = status.drain.as_ref().is_some_and(|drain| drain.drained);
        *is_claimed && is_seen && is_drained && has_reported(node)
    })
}

/// Describes a node whose mode the control plane does not have; other nodes then accept no blocks from it.
fn mode_not_applied(inputs: &PoolInputs) -> Option<String> {
    inputs.nodes.iter().find_map(|node| {
        let applied = find(&node.node.status.as_ref()?.conditions, Type::ModeApplied)?;
        let is_not = applied.status == ConditionStatus::False;
        is_not.then(|| format!("; {}: {}", node.name(), applied.message))
    })
}

fn fallback(engine: Engine, reports: &Reports) -> Finding {
    let kind = Type::EngineFallback;
    // Devices that are not open report no engine.
    let others = reports.with(|device| device.engine.is_some_and(|used| used != engine));
    if !others.is_empty() {
        let message = format!(
            "engine {engine} is unavailable on {} nodes, which use fallbackEngine: {}. Check agents.seccomp of the cluster: \
             many default profiles forbid io_uring",
            others.len(),
            list(others.iter().map(|(node, _)| node)),
        );
        return Finding::yes(kind, Reason::EngineUnavailable, message);
    }
    // Devices stay closed because of `fallbackEngine: None`.
    let closed = |device: &Device| is_refused(device) && refusal(device) == Reason::EngineUnavailable;
    if !reports.with(closed).is_empty() {
        let message = format!(
            "engine {engine} is unavailable and there is no fallback (fallbackEngine: None): the devices stay closed, see \
             condition Degraded"
        );
        return Finding::no(kind, Reason::EngineUnavailable, message);
    }
    Finding::no(kind, Reason::AsDesired, format!("devices use engine {engine}"))
}

/// Test for a problem of devices, reason, and words about the problem and its remedy.
type Problem = (fn(&Device) -> bool, Reason, &'static str, &'static str);

/// Problems of devices that cannot be used.
const UNUSABLE: [Problem; 2] = [
    (is_faulted, Reason::DeviceFailed, "have failed", "their blocks count as misses"),
    (is_refused, Reason::Refused, "are refused", "see the conditions of the CacheNode"),
];

/// Problems of devices in use.
const IN_USE: [Problem; 2] = [
    (
        |device| is_open(device) && device.worn,
        Reason::DeviceWorn,
        "have more media errors than health.maxMediaErrors, or less spare capacity than health.minSparePercent",
        "they remain in use: replace them before they fail, or raise the thresholds",
    ),
    (
        |device| is_open(device) && device.slow,
        Reason::DeviceSlow,
        "take longer for reads than health.maxReadLatency",
        "they remain in use: check the device's health and its other users, or raise the threshold",
    ),
];

/// Returns condition `Degraded` with the most severe problem.
fn degraded(reports: &Reports, inputs: &PoolInputs) -> Finding {
    let worst =
        |problems: [Problem; 2]| problems.iter().find_map(|problem| of_devices(problem, reports, inputs));
    let found = worst(UNUSABLE).or_else(|| silent(inputs)).or_else(|| worst(IN_USE));
    found.unwrap_or_else(|| Finding::no(Type::Degraded, Reason::AsDesired, ""))
}

fn of_devices(
    (test, reason, problem, remedy): &Problem,
    reports: &Reports,
    inputs: &PoolInputs,
) -> Option<Finding> {
    let found = reports.with(test);
    let (node, device) = found.first()?;
    let reason = if is_refused(device) { refusal(device) } else { *reason };
    let mode = inputs.cluster.as_ref().map(|cluster| cluster.spec.agents.device_access.mode);
    let remedy = match reason {
        Reason::DeviceNotPermitted if mode == Some(DeviceAccessMode::None) => {
            "the container runtime denies the agents' pods access to it: set agents.deviceAccess of the cluster"
        }
        _ => remedy,
    };
    let (count, path, why) = (found.len(), &device.path, &device.message);
    let message = format!("devices of {count} nodes {problem}; on {node}, {path}: {why}; {remedy}");
    Some(Finding::yes(Type::Degraded, reason, message))
}

/// Reports nodes whose agents no longer report. Those that never reported are still starting.
fn silent(inputs: &PoolInputs) -> Option<Finding> {
    let is_silent = |node: &&PoolNode| {
        let status = node.node.status.as_ref();
        status.is_some_and(|status| status.last_updated.is_some()) && !has_reported(&node.node)
    };
    let silent: Vec<&str> = inputs.nodes.iter().filter(is_silent).map(PoolNode::name).collect();
    let (count, names) = (silent.len(), list(&silent));
    let message = format!("{count} nodes have not reported for a minute: {names}; check their agents' pods");
    (count > 0).then(|| Finding::yes(Type::Degraded, Reason::NotReported, message))
}

/// Returns the reason for which an agent refused a device, if it reported a known one.
fn refusal(device: &Device) -> Reason {
    let known = Reason::MEANINGS.iter().map(|(reason, _)| *reason);
    let mut reported = known.filter(|reason| device.reason.as_deref() == Some(reason.as_str()));
    reported.next().unwrap_or(Reason::Refused)
}

fn ready(rejected: Option<&Refusal>, reports: &Reports, degraded: &Finding) -> Finding {
    let kind = Type::Ready;
    if let Some(Refusal { reason, message }) = rejected {
        return Finding::no(kind, *reason, message);
    }
    let Reports { selected, ready, .. } = *reports;
    if selected == 0 {
        let (reason, message) = no_nodes(None);
        return Finding::no(kind, reason, message);
    }
    let message = format!("{ready} of {selected} nodes have all devices open");
    if ready >= selected {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    // Slow or worn devices are open, so they do not delay readiness.
    let keeps_closed = ![Reason::DeviceSlow, Reason::DeviceWorn].contains(&degraded.reason);
    if degraded.status == ConditionStatus::True && keeps_closed {
        return Finding::no(kind, degraded.reason, format!("{message}; {}", degraded.message));
    }
    Finding::no(kind, Reason::Progressing, message)
}

/// Returns condition `DeletionBlocked` while a wipe delays the deletion.
fn wipe_blocked(wipe: Wipe) -> Option<Finding> {
    let (reason, message) = match wipe {
        Wipe::None | Wipe::Done => return None,
        Wipe::Blocked(refusal) => (refusal.reason, refusal.message),
        Wipe::InProgress(left) => {
            (Reason::Releasing, format!("{left} nodes have not wiped their devices yet"))
        }
    };
    Some(Finding::yes(Type::DeletionBlocked, reason, message))
}

#[cfg(test)]
mod tests;
