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
    let reports = Reports::of(pool, inputs);
    let rejected = refused.or(inputs.assignment.conflict.as_ref());
    let degraded = degraded(pool, &reports, inputs);
    let findings = [
        Some(accepted(rejected)),
        Some(discovered(pool, &reports, rejected)),
        Some(cordoned(pool)),
        drained(pool, inputs, rejected),
        Some(fallback(pool, inputs)),
        blocked(pool, inputs),
        Some(ready(rejected, &reports, &degraded)),
        Some(degraded),
    ];
    let count = |test: fn(&Device) -> bool| number(reports.devices().filter(|device| test(device)).count());
    let sum = |of: fn(&Device) -> &Option<Quantity>| {
        let bytes = reports
            .devices()
            .filter(|device| is_open(device))
            .filter_map(|device| of(device).as_ref()?.bytes().ok());
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
    /// Number of these nodes that have applied the pool's current generation.
    applied: u32,
    /// Number of the latter nodes on which all devices are open.
    ready: u32,
}

impl<'a> Reports<'a> {
    fn of(pool: &SSDPool, inputs: &'a PoolInputs) -> Reports<'a> {
        let generation = pool.metadata.generation.unwrap_or_default();
        let nodes: Vec<&PoolNode> = inputs.nodes.iter().filter(|node| has_reported(&node.node)).collect();
        let has_applied =
            |node: &&&PoolNode| node.applied().is_some_and(|applied| applied.generation >= generation);
        let applied: Vec<&&PoolNode> = nodes.iter().filter(has_applied).collect();
        let ready =
            applied.iter().filter(|node| node.devices().all(is_open) && node.devices().next().is_some());
        Reports {
            selected: number(inputs.assignment.nodes.len()),
            applied: number(applied.len()),
            ready: number(ready.count()),
            nodes,
        }
    }

    fn devices(&self) -> impl Iterator<Item = &Device> {
        self.nodes.iter().flat_map(|node| node.devices())
    }

    /// Returns the nodes with a device of some state, and the first such device of each.
    fn with(&self, test: fn(&Device) -> bool) -> Vec<(&str, &Device)> {
        let first = |node: &&'a PoolNode| Some((node.name(), node.devices().find(|device| test(device))?));
        self.nodes.iter().filter_map(first).collect()
    }

    /// Returns the engines of open devices with the number of nodes.
    fn engines(&self) -> Vec<EngineUse> {
        let mut nodes: BTreeMap<Engine, u32> = BTreeMap::new();
        for node in &self.nodes {
            let engines = node.devices().filter(|device| is_open(device)).filter_map(|device| device.engine);
            for engine in engines.collect::<BTreeSet<_>>() {
                *nodes.entry(engine).or_default() += 1;
            }
        }
        nodes.into_iter().map(|(engine, nodes)| EngineUse { engine, nodes }).collect()
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
    let is_closed = |device: &Device| is_refused(device) && refusal(device) == Reason::EngineUnavailable;
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

fn degraded(pool: &SSDPool, reports: &Reports, inputs: &PoolInputs) -> Finding {
    let yes = |reason, message: String| Finding::yes(Type::Degraded, reason, message);
    let why = |(node, device): (&str, &Device)| format!("on {node}, {}: {}", device.path, device.message);
    let (failed, refused) = (reports.with(is_faulted), reports.with(is_refused));
    if let Some(first) = failed.first() {
        let count = failed.len();
        let message = format!(
            "devices of {count} nodes have failed, and their blocks count as misses; {}",
            why(*first)
        );
        return yes(Reason::DeviceFailed, message);
    }
    if let Some(first) = refused.first() {
        let reason = refusal(first.1);
        let (count, hint) = (refused.len(), unopened(inputs, reason));
        return yes(reason, format!("{count} nodes have refused devices; {}{hint}", why(*first)));
    }
    // Nodes that never reported are still starting.
    let is_silent = |node: &&PoolNode| {
        let status = node.node.status.as_ref();
        status.is_some_and(|status| status.last_updated.is_some()) && !has_reported(&node.node)
    };
    let silent: Vec<&str> = inputs.nodes.iter().filter(is_silent).map(PoolNode::name).collect();
    if !silent.is_empty() {
        let (count, names) = (silent.len(), join_names(silent.into_iter()));
        let message =
            format!("{count} nodes have not reported for a minute: {names}; check their agents' pods");
        return yes(Reason::NotReported, message);
    }
    let worn = (
        reports.with(|device| is_open(device) && device.worn),
        Reason::DeviceWorn,
        "have more media errors than health.maxMediaErrors, or less spare capacity than health.minSparePercent",
        "replace them before they fail, or raise the thresholds",
    );
    let slow = (
        reports.with(|device| is_open(device) && device.slow),
        Reason::DeviceSlow,
        "take longer for reads than health.maxReadLatency",
        "check the device's health and its other users, or raise the threshold",
    );
    for (found, reason, problem, remedy) in [worn, slow] {
        if let Some(first) = found.first() {
            let (count, why) = (found.len(), why(*first));
            let message = format!("devices of {count} nodes {problem}; {why}. They remain in use: {remedy}");
            return yes(reason, message);
        }
    }
    Finding::no(Type::Degraded, Reason::AsDesired, uncompared(pool, reports))
}

/// Returns a note on thresholds that cannot be checked, so that worse drives would go unnoticed.
fn uncompared(pool: &SSDPool, reports: &Reports) -> String {
    let unreported = reports.with(|device| is_open(device) && device.spare_percent.is_none());
    if pool.spec.health.min_spare_percent.is_none() || unreported.is_empty() {
        return String::new();
    }
    format!(
        "health.minSparePercent is not checked on {} nodes, whose drives do not report spare capacity: {}. Agents can query \
         NVMe drives if agents.deviceAccess.mode of the cluster is Privileged",
        unreported.len(),
        join_names(unreported.into_iter().map(|(node, _)| node)),
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
