//! Computes the status of a pool: conditions, and sums over its nodes. Pure.

use std::collections::{BTreeMap, BTreeSet};

use reprise_crds::cluster::DeviceAccessMode;
use reprise_crds::fields::{DeviceClass, Engine, NodeMode, Quantity};
use reprise_crds::node::{Device, DeviceState};
use reprise_crds::pool::{EngineUse, PoolCapacity, PoolDevices, PoolNodes};
use reprise_crds::status::{ConditionType as Type, Finding, Reason, find};
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

/// Computes the status and conditions of a pool.
pub fn compute(
    pool: &SSDPool,
    inputs: &PoolInputs,
    refused: Option<&Refusal>,
) -> (SSDPoolStatus, Vec<Finding>) {
    let counts = Counts::of(pool, inputs, refused);
    let mut findings = vec![accepted(refused), discovered(pool, &counts), cordoned(pool)];
    findings.extend(drained(pool, inputs, refused));
    findings.push(fallback(pool, inputs));
    let degraded = degraded(pool, &counts, inputs);
    findings.extend(blocked(pool, inputs));
    findings.push(ready(refused, &counts, &degraded));
    findings.push(degraded);
    let status = SSDPoolStatus {
        nodes: Some(PoolNodes {
            selected: counts.selected,
            ready: number(counts.ready.len()),
            refused: number(counts.refused.len()),
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
    (status, findings)
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Sums over the nodes of a pool.
#[derive(Debug, Default)]
struct Counts {
    selected: u32,
    /// Nodes that have reported recently with the pool's current generation.
    reported: BTreeSet<String>,
    /// Nodes of `reported` on which all devices are open.
    ready: BTreeSet<String>,
    /// Nodes with a refused device: the reason, and the message.
    refused: BTreeMap<String, (Reason, String)>,
    /// Nodes with a failed device, and its message.
    failed: BTreeMap<String, String>,
    /// Nodes with a device that is more worn than the pool allows, and its message.
    worn: BTreeMap<String, String>,
    /// Nodes with an open device whose drive does not report its spare capacity.
    without_spare_report: BTreeSet<String>,
    /// Nodes with a device that is slower than the pool allows, and its message.
    slow: BTreeMap<String, String>,
    /// Nodes that have not reported recently.
    silent: BTreeSet<String>,
    matched: u32,
    open: u32,
    faulted: u32,
    total: u64,
    used: u64,
    engines: BTreeMap<Engine, BTreeSet<String>>,
}

impl Counts {
    fn of(pool: &SSDPool, inputs: &PoolInputs, refused: Option<&Refusal>) -> Counts {
        let mut counts = Counts::default();
        // Nodes may still have a rejected pool, as it was before.
        if refused.is_some() && inputs.assignment.nodes.is_empty() {
            return counts;
        }
        counts.selected = number(inputs.assignment.nodes.len());
        counts.silent = inputs.assignment.nodes.iter().cloned().collect();
        for node in &inputs.nodes {
            // A rejected spec is not sent to nodes; they keep the previous one.
            let generation = match refused {
                Some(_) => node.claimed().unwrap_or_default(),
                None => pool.metadata.generation.unwrap_or_default(),
            };
            counts.add(node, generation);
        }
        counts
    }

    fn add(&mut self, node: &PoolNode, generation: i64) {
        if !has_reported(&node.node) {
            return;
        }
        let name = node.node.metadata.name.clone().unwrap_or_default();
        self.silent.remove(&name);
        let mut all_open = true;
        let mut devices = 0_u32;
        for device in node.devices() {
            devices += 1;
            self.matched += 1;
            all_open &= device.state == DeviceState::Open;
            self.add_device(&name, device);
        }
        let applied = node.applied().is_some_and(|applied| applied.generation >= generation);
        if applied {
            self.reported.insert(name.clone());
        }
        if applied && all_open && devices > 0 {
            self.ready.insert(name);
        }
    }

    fn add_device(&mut self, node: &str, device: &Device) {
        let bytes = |quantity: &Option<Quantity>| {
            quantity.as_ref().and_then(|quantity| quantity.bytes().ok()).unwrap_or_default()
        };
        let why = || format!("{}: {}", device.path, device.message);
        match device.state {
            DeviceState::Open => {
                self.open += 1;
                self.total = self.total.saturating_add(bytes(&device.size));
                self.used = self.used.saturating_add(bytes(&device.used));
                if device.worn {
                    self.worn.entry(node.to_owned()).or_insert_with(why);
                }
                if device.spare_percent.is_none() {
                    self.without_spare_report.insert(node.to_owned());
                }
                if device.slow {
                    self.slow.entry(node.to_owned()).or_insert_with(why);
                }
                if let Some(engine) = device.engine {
                    self.engines.entry(engine).or_default().insert(node.to_owned());
                }
            }
            DeviceState::Refused => {
                self.refused.entry(node.to_owned()).or_insert_with(|| (refusal(device), why()));
            }
            DeviceState::Faulted => {
                self.faulted += 1;
                self.failed.entry(node.to_owned()).or_insert_with(why);
            }
            DeviceState::Found | DeviceState::Opening | DeviceState::Wiped => {}
        }
    }
}

fn accepted(refused: Option<&Refusal>) -> Finding {
    match refused {
        Some(Refusal { reason, message }) => Finding::no(Type::Accepted, *reason, message),
        None => Finding::yes(Type::Accepted, Reason::AsDesired, "the spec is valid"),
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

fn discovered(pool: &SSDPool, counts: &Counts) -> Finding {
    let kind = Type::DevicesDiscovered;
    let message =
        format!("{} of {} nodes have reported their devices", counts.reported.len(), counts.selected);
    if counts.selected == 0 {
        return Finding::no(kind, Reason::NoNodes, "nodeSelector matches no node: label nodes, or change it");
    }
    if number(counts.reported.len()) < counts.selected {
        return Finding::no(kind, Reason::Progressing, message);
    }
    if counts.matched == 0 {
        return Finding::no(kind, Reason::NoDevices, nothing_found(pool));
    }
    Finding::yes(kind, Reason::AsDesired, message)
}

fn cordoned(pool: &SSDPool) -> Finding {
    match pool.spec.mode {
        NodeMode::Active => {
            Finding::no(Type::Cordoned, Reason::AsDesired, "new replicas may be placed on it")
        }
        NodeMode::Cordoned => Finding::yes(
            Type::Cordoned,
            Reason::SetByOperator,
            "mode is Cordoned: no replicas of blocks from other nodes are placed on it",
        ),
        NodeMode::Draining => Finding::yes(
            Type::Cordoned,
            Reason::Draining,
            "mode is Draining: no replicas of blocks from other nodes are placed on it",
        ),
    }
}

/// Returns condition `Drained` while the pool is draining. Reports that are old, or of an earlier spec, do
/// not count; a node without a report counts as not empty.
fn drained(pool: &SSDPool, inputs: &PoolInputs, refused: Option<&Refusal>) -> Option<Finding> {
    let kind = Type::Drained;
    if pool.spec.mode != NodeMode::Draining {
        return None;
    }
    if let Some(refused) = refused {
        let message =
            "the pool is rejected, so its nodes do not report whether they are empty: see condition Accepted";
        return Some(Finding::unknown(kind, refused.reason, message));
    }
    let nodes = &inputs.assignment.nodes;
    if nodes.is_empty() {
        let message = "nodeSelector matches no node, so it is unknown whether blocks are left: label nodes, or change it";
        return Some(Finding::unknown(kind, Reason::NoNodes, message));
    }
    let generation = pool.metadata.generation.unwrap_or_default();
    let empty: BTreeSet<&str> = inputs
        .nodes
        .iter()
        .filter(|node| is_empty(node, generation))
        .filter_map(|node| node.node.metadata.name.as_deref())
        .collect();
    let left: Vec<&str> = nodes.iter().map(String::as_str).filter(|node| !empty.contains(node)).collect();
    if left.is_empty() {
        let message = "every durable block has a replica on another node";
        return Some(Finding::yes(kind, Reason::AsDesired, message));
    }
    let mode_not_applied = mode_not_applied(inputs).unwrap_or_default();
    let message = format!(
        "{} of {} nodes are not empty yet, or have not reported so recently: {}{mode_not_applied}",
        left.len(),
        nodes.len(),
        join_names(left.iter().copied()),
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
    let why = |node: &PoolNode| {
        let applied = find(&node.node.status.as_ref()?.conditions, Type::ModeApplied)?;
        let is_not = applied.status == reprise_crds::status::ConditionStatus::False;
        is_not.then(|| {
            let name = node.node.metadata.name.as_deref().unwrap_or_default();
            format!("; {name}: {}", applied.message)
        })
    };
    inputs.nodes.iter().find_map(why)
}

fn fallback(pool: &SSDPool, inputs: &PoolInputs) -> Finding {
    let kind = Type::EngineFallback;
    // Devices that are not open report no engine.
    let other = |device: &Device| device.engine.is_some_and(|engine| engine != pool.spec.engine);
    let nodes = inputs.nodes.iter().filter(|node| node.devices().any(other));
    let names: Vec<String> = nodes.filter_map(|node| node.node.metadata.name.clone()).collect();
    if names.is_empty() {
        // Devices stay closed because of `fallbackEngine: None`.
        let is_closed = |device: &Device| {
            device.state == DeviceState::Refused && refusal(device) == Reason::EngineUnavailable
        };
        if inputs.nodes.iter().any(|node| node.devices().any(is_closed)) {
            let message = format!(
                "engine {} is unavailable and there is no fallback (fallbackEngine: None): the devices stay closed, see condition Degraded",
                pool.spec.engine
            );
            return Finding::no(kind, Reason::EngineUnavailable, message);
        }
        return Finding::no(kind, Reason::AsDesired, format!("devices use engine {}", pool.spec.engine));
    }
    let message = format!(
        "engine {} is unavailable on {} nodes, which use fallbackEngine: {}. Check agents.seccomp of the cluster: many default \
         profiles forbid io_uring",
        pool.spec.engine,
        names.len(),
        join_names(names.iter().map(String::as_str)),
    );
    Finding::yes(kind, Reason::EngineUnavailable, message)
}

fn join_names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.take(NAMES_MAX).collect::<Vec<_>>().join(", ")
}

fn degraded(pool: &SSDPool, counts: &Counts, inputs: &PoolInputs) -> Finding {
    let kind = Type::Degraded;
    if let Some((node, why)) = counts.failed.first_key_value() {
        let nodes = counts.failed.len();
        let message = format!(
            "devices of {nodes} nodes have failed, and their blocks count as misses; on {node}, {why}"
        );
        return Finding::yes(kind, Reason::DeviceFailed, message);
    }
    if let Some((node, (reason, why))) = counts.refused.first_key_value() {
        let hint = unopened(inputs, *reason);
        let message = format!("{} nodes have refused devices; on {node}, {why}{hint}", counts.refused.len());
        return Finding::yes(kind, *reason, message);
    }
    // Nodes that never reported are still starting.
    let has_reported_before = |node: &&PoolNode| {
        let name = node.node.metadata.name.clone().unwrap_or_default();
        counts.silent.contains(&name)
            && node.node.status.as_ref().is_some_and(|status| status.last_updated.is_some())
    };
    let silent: Vec<String> = inputs
        .nodes
        .iter()
        .filter(has_reported_before)
        .filter_map(|node| node.node.metadata.name.clone())
        .collect();
    if !silent.is_empty() {
        let names = join_names(silent.iter().map(String::as_str));
        let message = format!(
            "{} nodes have not reported for a minute: {names}; check their agents' pods",
            silent.len()
        );
        return Finding::yes(kind, Reason::NotReported, message);
    }
    if let Some((node, why)) = counts.worn.first_key_value() {
        let message = format!(
            "devices of {} nodes have more media errors than health.maxMediaErrors, or less spare capacity than health.minSparePercent; on \
             {node}, {why}. They remain in use: replace them before they fail, or raise the thresholds",
            counts.worn.len()
        );
        return Finding::yes(kind, Reason::DeviceWorn, message);
    }
    if let Some((node, why)) = counts.slow.first_key_value() {
        let message = format!(
            "devices of {} nodes take longer for reads than health.maxReadLatency; on {node}, {why}. They remain in use: check \
             the device's health and its other users, or raise the threshold",
            counts.slow.len()
        );
        return Finding::yes(kind, Reason::DeviceSlow, message);
    }
    Finding::no(kind, Reason::AsDesired, uncompared(pool, counts))
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

fn ready(refused: Option<&Refusal>, counts: &Counts, degraded: &Finding) -> Finding {
    let kind = Type::Ready;
    if let Some(Refusal { reason, message }) = refused {
        return Finding::no(kind, *reason, message);
    }
    if counts.selected == 0 {
        return Finding::no(kind, Reason::NoNodes, "nodeSelector matches no node: label nodes, or change it");
    }
    let ready = number(counts.ready.len());
    let message = format!("{ready} of {} nodes have all devices open", counts.selected);
    if ready >= counts.selected {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    // Slow or worn devices are open, so they do not delay readiness.
    let keeps_closed = ![Reason::DeviceSlow, Reason::DeviceWorn].contains(&degraded.reason);
    if degraded.status == reprise_crds::status::ConditionStatus::True && keeps_closed {
        return Finding::no(kind, degraded.reason, format!("{message}; {}", degraded.message));
    }
    Finding::no(kind, Reason::Progressing, message)
}

/// Returns condition `DeletionBlocked` while the pool is being deleted.
fn blocked(pool: &SSDPool, inputs: &PoolInputs) -> Option<Finding> {
    let kind = Type::DeletionBlocked;
    let wipe = wipe(pool, inputs);
    // Sessions block the wipe as well.
    if let Some(mut used) = inputs.guard.blocked_condition(pool) {
        if wipe == Wipe::TooLate {
            used.message += ". Its data is kept: the pool was deleted before deletionPolicy was set to Wipe";
        }
        return Some(used);
    }
    match wipe {
        Wipe::None | Wipe::TooLate | Wipe::Done => None,
        Wipe::Unconfirmed => {
            let message = "deletionPolicy is Wipe but the wipe is not confirmed: set wipeConfirmation to yes-really-destroy-the-data, \
                           or deletionPolicy to Retain";
            Some(Finding::yes(kind, Reason::ConfirmationMissing, message))
        }
        Wipe::NoCluster => {
            let (reason, message) = match inputs.assignment.refused {
                Some(_) => (
                    Reason::Conflict,
                    "deletionPolicy is Wipe but the pool was rejected before any node had it, so there is no data to wipe: set \
                     deletionPolicy to Retain",
                ),
                None => (
                    Reason::ReferenceNotFound,
                    "deletionPolicy is Wipe but the pool belongs to no cluster, so no agent can wipe it: add the pool to a cluster again, \
                     or set deletionPolicy to Retain",
                ),
            };
            Some(Finding::yes(kind, reason, message))
        }
        Wipe::InProgress(left) => Some(Finding::yes(
            kind,
            Reason::Releasing,
            format!("{left} nodes have not wiped their devices yet"),
        )),
    }
}

#[cfg(test)]
mod tests;
