//! What a pool is: conditions and sums over its nodes. Pure.

use std::collections::{BTreeMap, BTreeSet};

use reprise_crds::cluster::DeviceAccessMode;
use reprise_crds::fields::{Engine, NodeMode, Quantity};
use reprise_crds::node::{Device, DeviceState};
use reprise_crds::pool::{EngineUse, PoolCapacity, PoolDevices, PoolNodes};
use reprise_crds::status::{ConditionType as Type, Finding, Reason, find};
use reprise_crds::{SSDPool, SSDPoolStatus};

use super::build::{Wipe, wipe};
use super::dereference::{Found, PoolNode};
use crate::cluster::status::has_reported;
use crate::finalizers::{self, Attempt};
use crate::in_use::{self, Kept};
use crate::names::{IN_USE_FINALIZER, WIPE_FINALIZER};
use crate::plan::Refusal;

/// So many names are in a message, at the most.
const NAMES_MAX: usize = 5;
/// For what agents refuse devices.
const REFUSALS: [Reason; 6] = [
    Reason::ForeignSignature,
    Reason::DeviceNotPermitted,
    Reason::DeviceFailed,
    Reason::EngineUnavailable,
    Reason::Conflict,
    Reason::OverCapacity,
];

/// What to say of a pool.
pub fn of(pool: &SSDPool, found: &Found, refused: Option<&Refusal>) -> (SSDPoolStatus, Vec<Finding>) {
    let counts = Counts::of(pool, found, refused);
    let mut findings = vec![accepted(refused), discovered(pool, &counts), cordoned(pool)];
    findings.extend(drained(pool, found, refused));
    findings.push(fallback(pool, found));
    let degraded = degraded(pool, &counts, found);
    findings.extend(blocked(pool, found));
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
            reserved: Quantity::of_bytes(found.reserved.saturating_mul(u64::from(counts.selected))),
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

/// Sums over nodes.
#[derive(Debug, Default)]
struct Counts {
    selected: u32,
    /// Names of nodes that have said something lately and know the pool.
    reported: BTreeSet<String>,
    /// Of which all devices are open.
    ready: BTreeSet<String>,
    /// With a device that was refused, and why, in a word and in more.
    refused: BTreeMap<String, (Reason, String)>,
    /// With a device that failed, and why.
    failed: BTreeMap<String, String>,
    /// With a device that is more worn than the pool allows, and which.
    worn: BTreeMap<String, String>,
    /// With an open device whose drive does not tell what spare capacity it has left.
    mute: BTreeSet<String>,
    /// With a device that is slower than the pool allows, and which.
    slow: BTreeMap<String, String>,
    /// That have not said anything lately.
    silent: BTreeSet<String>,
    matched: u32,
    open: u32,
    faulted: u32,
    total: u64,
    used: u64,
    engines: BTreeMap<Engine, BTreeSet<String>>,
}

impl Counts {
    fn of(pool: &SSDPool, found: &Found, refused: Option<&Refusal>) -> Counts {
        let mut counts = Counts::default();
        // Nodes may have one that is refused, as it was.
        if refused.is_some() && found.plan.nodes.is_empty() {
            return counts;
        }
        counts.selected = number(found.plan.nodes.len());
        counts.silent = found.plan.nodes.iter().cloned().collect();
        for node in &found.nodes {
            // What is refused is not asked of nodes: they are to have what they had.
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
                    self.mute.insert(node.to_owned());
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
        None => Finding::yes(Type::Accepted, Reason::AsDesired, "the spec is right"),
    }
}

/// What to do where nodes have found nothing. A directory needs no name that matches, so its agents say why they have no file there.
fn nothing_found(pool: &SSDPool) -> String {
    match &pool.spec.directory {
        Some(directory) => format!(
            "no node has a file in {}: look at the agents' pods and at the conditions of their CacheNodes",
            directory.path
        ),
        None => {
            "no device matches: correct devices.globs, or look in /dev/disk/by-id of the nodes".to_owned()
        }
    }
}

fn discovered(pool: &SSDPool, counts: &Counts) -> Finding {
    let kind = Type::DevicesDiscovered;
    let message = format!("{} of {} nodes have said what they found", counts.reported.len(), counts.selected);
    if counts.selected == 0 {
        return Finding::no(kind, Reason::NoNodes, "no node matches the selection");
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
        NodeMode::Active => Finding::no(Type::Cordoned, Reason::AsDesired, "blocks may be placed on it"),
        NodeMode::Cordoned => Finding::yes(
            Type::Cordoned,
            Reason::SetByOperator,
            "mode is Cordoned: nothing is placed on it for others",
        ),
        NodeMode::Draining => Finding::yes(
            Type::Cordoned,
            Reason::Draining,
            "mode is Draining: nothing is placed on it for others",
        ),
    }
}

/// Only while somebody waits for it. What a node said before it knew that, or too long ago, does not count, and who says nothing is not empty.
fn drained(pool: &SSDPool, found: &Found, refused: Option<&Refusal>) -> Option<Finding> {
    let kind = Type::Drained;
    if pool.spec.mode != NodeMode::Draining {
        return None;
    }
    if let Some(refused) = refused {
        let message =
            "the pool is refused, so nobody says that nodes are empty of it: condition Accepted says why";
        return Some(Finding::unknown(kind, refused.reason, message));
    }
    let nodes = &found.plan.nodes;
    if nodes.is_empty() {
        let message =
            "no node has the pool, so nobody says what is left of it: label nodes, or change nodeSelector";
        return Some(Finding::unknown(kind, Reason::NoNodes, message));
    }
    let generation = pool.metadata.generation.unwrap_or_default();
    let empty: BTreeSet<&str> = found
        .nodes
        .iter()
        .filter(|node| is_empty(node, generation))
        .filter_map(|node| node.node.metadata.name.as_deref())
        .collect();
    let left: Vec<&str> = nodes.iter().map(String::as_str).filter(|node| !empty.contains(node)).collect();
    if left.is_empty() {
        let message = "every durable block is on another node as well";
        return Some(Finding::yes(kind, Reason::AsDesired, message));
    }
    let untold = untold(found).unwrap_or_default();
    let message = format!(
        "{} of {} nodes are not empty yet, or have not said so lately: {}{untold}",
        left.len(),
        nodes.len(),
        few(left.iter().copied()),
    );
    Some(Finding::no(kind, Reason::Draining, message))
}

/// Whether a node has said lately that it is empty, and knew of the pool as it is.
fn is_empty(node: &PoolNode, generation: i64) -> bool {
    let PoolNode { node, pool_uid, .. } = node;
    let Some(status) = &node.status else { return false };
    let claims = &node.spec.claims;
    // The mode of a node's spec is that of its claims: one of this generation was made together with it.
    let is_told =
        claims.iter().any(|claim| claim.uid.as_str() == pool_uid.as_str() && claim.generation >= generation);
    let is_seen = status.observed_generation >= node.metadata.generation.unwrap_or_default();
    let says_so = status.drain.as_ref().is_some_and(|drain| drain.drained);
    is_told && is_seen && says_so && has_reported(node)
}

/// Without the control plane's word no other node takes what a drained one gives away.
fn untold(found: &Found) -> Option<String> {
    let why = |node: &PoolNode| {
        let applied = find(&node.node.status.as_ref()?.conditions, Type::ModeApplied)?;
        let is_not = applied.status == reprise_crds::status::ConditionStatus::False;
        is_not.then(|| {
            let name = node.node.metadata.name.as_deref().unwrap_or_default();
            format!("; {name}: {}", applied.message)
        })
    };
    found.nodes.iter().find_map(why)
}

fn fallback(pool: &SSDPool, found: &Found) -> Finding {
    let kind = Type::EngineFallback;
    let other = |device: &Device| {
        device.state == DeviceState::Open && device.engine.is_some_and(|engine| engine != pool.spec.engine)
    };
    let nodes = found.nodes.iter().filter(|node| node.devices().any(other));
    let names: Vec<String> = nodes.filter_map(|node| node.node.metadata.name.clone()).collect();
    if names.is_empty() {
        // Closed, as `fallbackEngine: None` says.
        let is_closed = |device: &Device| {
            device.state == DeviceState::Refused && refusal(device) == Reason::EngineUnavailable
        };
        if found.nodes.iter().any(|node| node.devices().any(is_closed)) {
            let message = format!(
                "{} cannot be had, and fallbackEngine allows no other: the devices stay closed, see Degraded",
                pool.spec.engine
            );
            return Finding::no(kind, Reason::EngineUnavailable, message);
        }
        return Finding::no(kind, Reason::AsDesired, format!("devices are driven by {}", pool.spec.engine));
    }
    let message = format!(
        "{} cannot be had on {} nodes, which use fallbackEngine: {}. Look at agents.seccomp of the cluster: many default profiles \
         forbid io_uring",
        pool.spec.engine,
        names.len(),
        few(names.iter().map(String::as_str)),
    );
    Finding::yes(kind, Reason::EngineUnavailable, message)
}

fn few<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.take(NAMES_MAX).collect::<Vec<_>>().join(", ")
}

fn degraded(pool: &SSDPool, counts: &Counts, found: &Found) -> Finding {
    let kind = Type::Degraded;
    if let Some((node, why)) = counts.failed.first_key_value() {
        let nodes = counts.failed.len();
        let message =
            format!("devices of {nodes} nodes have failed, whose blocks are misses; on {node}, {why}");
        return Finding::yes(kind, Reason::DeviceFailed, message);
    }
    if let Some((node, (reason, why))) = counts.refused.first_key_value() {
        let hint = unopened(found, *reason);
        let message = format!("{} nodes have refused devices; on {node}, {why}{hint}", counts.refused.len());
        return Finding::yes(kind, *reason, message);
    }
    // Nodes that never reported are still on their way.
    let spoke = |node: &&PoolNode| {
        let name = node.node.metadata.name.clone().unwrap_or_default();
        counts.silent.contains(&name)
            && node.node.status.as_ref().is_some_and(|status| status.last_updated.is_some())
    };
    let silent: Vec<String> =
        found.nodes.iter().filter(spoke).filter_map(|node| node.node.metadata.name.clone()).collect();
    if !silent.is_empty() {
        let names = few(silent.iter().map(String::as_str));
        let message = format!(
            "{} nodes have not reported for a minute: {names}; look at their agents' pods",
            silent.len()
        );
        return Finding::yes(kind, Reason::NotReported, message);
    }
    if let Some((node, why)) = counts.worn.first_key_value() {
        let message = format!(
            "devices of {} nodes have more media errors than health.maxMediaErrors, or less spare capacity than health.minSparePercent; on \
             {node}, {why}. They are used all the same: replace them before they fail, or allow more",
            counts.worn.len()
        );
        return Finding::yes(kind, Reason::DeviceWorn, message);
    }
    if let Some((node, why)) = counts.slow.first_key_value() {
        let message = format!(
            "devices of {} nodes take longer for reads than health.maxReadLatency; on {node}, {why}. They are used all the same: look at \
             the device's health and at what else uses it, or allow more",
            counts.slow.len()
        );
        return Finding::yes(kind, Reason::DeviceSlow, message);
    }
    Finding::no(kind, Reason::AsDesired, uncompared(pool, counts))
}

/// What the pool asks for and nobody can compare: worse drives than it allows would not be seen.
fn uncompared(pool: &SSDPool, counts: &Counts) -> String {
    if pool.spec.health.min_spare_percent.is_none() || counts.mute.is_empty() {
        return String::new();
    }
    format!(
        "health.minSparePercent is not compared on {} nodes, whose drives do not tell it: {}. Agents may ask NVMe drives with \
         agents.deviceAccess.mode Privileged of the cluster",
        counts.mute.len(),
        few(counts.mute.iter().map(String::as_str)),
    )
}

/// Why an agent has refused a device, as far as it says so.
fn refusal(device: &Device) -> Reason {
    let said = device.reason.as_deref().unwrap_or_default();
    REFUSALS.into_iter().find(|reason| reason.as_str() == said).unwrap_or(Reason::Refused)
}

/// What to do where nobody has given the agents' pods the devices.
fn unopened(found: &Found, reason: Reason) -> &'static str {
    let mode = found.cluster.as_ref().map(|cluster| cluster.spec.agents.device_access.mode);
    if mode == Some(DeviceAccessMode::None) && reason == Reason::DeviceNotPermitted {
        "; the nodes' runtime does not let agents' pods open it: set agents.deviceAccess of the cluster"
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
        return Finding::no(
            kind,
            Reason::NoNodes,
            "no node matches the selection: label nodes, or change nodeSelector",
        );
    }
    let ready = number(counts.ready.len());
    let message = format!("{ready} of {} nodes have all devices open", counts.selected);
    if ready >= counts.selected {
        return Finding::yes(kind, Reason::AsDesired, message);
    }
    // A slow or worn device is open, so that is not what is waited for.
    let keeps_closed = ![Reason::DeviceSlow, Reason::DeviceWorn].contains(&degraded.reason);
    if degraded.status == reprise_crds::status::ConditionStatus::True && keeps_closed {
        return Finding::no(kind, degraded.reason, format!("{message}; {}", degraded.message));
    }
    Finding::no(kind, Reason::Progressing, message)
}

/// Only while the pool is being deleted.
fn blocked(pool: &SSDPool, found: &Found) -> Option<Finding> {
    let kind = Type::DeletionBlocked;
    let wipe = wipe(pool, found);
    // Nothing is wiped before.
    if let Some(mut used) = found.usage.blocked(pool) {
        if wipe == Wipe::TooLate {
            used.message += ". Its data stays: it was deleted before deletionPolicy was Wipe";
        }
        return Some(used);
    }
    match wipe {
        Wipe::None | Wipe::TooLate | Wipe::Done => None,
        Wipe::Unconfirmed => {
            let message = "deletionPolicy is Wipe and nobody has confirmed it: set wipeConfirmation to yes-really-destroy-the-data, \
                           or deletionPolicy to Retain";
            Some(Finding::yes(kind, Reason::ConfirmationMissing, message))
        }
        Wipe::Nobody => {
            let (reason, message) = match found.plan.refused {
                Some(_) => (
                    Reason::Conflict,
                    "deletionPolicy is Wipe and the pool is refused on nodes that never had it, so there is nothing of it to wipe: set \
                     deletionPolicy to Retain",
                ),
                None => (
                    Reason::ReferenceNotFound,
                    "deletionPolicy is Wipe and no cluster has the pool, so no agent can do it: name the pool in a cluster again, or set \
                     deletionPolicy to Retain",
                ),
            };
            Some(Finding::yes(kind, reason, message))
        }
        Wipe::UnderWay(left) => Some(Finding::yes(
            kind,
            Reason::Releasing,
            format!("{left} nodes have not wiped their devices yet"),
        )),
    }
}

/// Which of its finalizers may not be changed. Whatever else a deletion waits for does not come before that.
pub fn forbidden(pool: &SSDPool, kept: &Kept, attempt: &Attempt) -> Option<Finding> {
    match (kept, attempt) {
        (Kept::Forbidden(refused), _) => {
            Some(finalizers::forbidden(pool, IN_USE_FINALIZER, in_use::FOR_WHOM, refused))
        }
        (_, Attempt::Forbidden(refused)) => {
            Some(finalizers::forbidden(pool, WIPE_FINALIZER, "its data to be wiped", refused))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
