//! Compares the desired devices with the tracked ones and decides on actions; other modules carry them out.
//!
//! ```text
//!  Vacant ──open──▶ Opening ──▶ Open ──▶ ReadOnly ──▶ Faulted
//!    │ ▲                └──▶ Refused  │ unclaimed, respecified, missing │
//!    │ └──────released── Closing ◀────┴─────────────────────────────────┘
//!    └──wipe──▶ Wiping ──▶ Wiped, Refused
//! ```
//!
//! Devices and files are identified by their stable path. No action starts on a device while a task or the
//! core is using it; the desired state is compared again afterwards. Devices of one pool are opened
//! together, so that they agree on one pool identity.
//!
//! Invariants:
//!
//! - A device number belongs to one device at a time.
//! - A device that no claim selects is closed and dropped.
//! - A faulted device is retried when its claim changes; a refused one also periodically.
//! - A selected device stays selected ([`DeviceReconciler::retained_paths`]), in particular while it is
//!   wiped.
//! - A blank file never replaces a file that the claim had ([`DeviceRecords::expects`]), and such a file
//!   does not count as wiped while it is missing.

mod tracked_device;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use reprise_agent_core::effect::DeviceId;
use reprise_agent_kubernetes::{
    Claim, ClaimFact, DataPolicy, DeviceFact, DeviceFault, Engine, FallbackEngine, ForeignSignatures, Reason,
    Source,
};
use reprise_io::{DeviceDescription, IfMissing};

use super::device_records::DeviceRecords;
use crate::device::{Membership, PoolIdentity};
use tracked_device::{State, TrackedDevice, Transition, missing_fault};

/// Maximum number of open devices.
pub(super) const OPEN_DEVICES_MAX: u8 = 32;

/// The devices of a claim, resolved on this node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DesiredPool {
    pub(super) pool: String,
    pub(super) uid: String,
    pub(super) generation: i64,
    pub(super) data: DataPolicy,
    pub(super) devices: Vec<DesiredDevice>,
    /// Why the claim has no devices, or fewer than it selects.
    pub(super) fault: Option<DeviceFault>,
}

/// A device or file that a claim selects.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DesiredDevice {
    /// Stable path on the node.
    pub(super) path: String,
    /// The device as seen in this process's mount namespace.
    pub(super) description: DeviceDescription,
    pub(super) presence: Presence,
    pub(super) spec: DeviceSpec,
}

/// Whether a selected device can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Present,
    /// It existed before and no longer does.
    Missing,
}

/// How to open a device; an open device is reopened when its spec changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceSpec {
    pub(super) pool: String,
    pub(super) uid: String,
    pub(super) kind: Kind,
    pub(super) bytes: Option<u64>,
    /// Bytes that a file leaves on its file system; `None`: the agent's default.
    pub(super) reserve_bytes: Option<u64>,
    pub(super) engine: Engine,
    pub(super) fallback: FallbackEngine,
    pub(super) foreign: ForeignSignatures,
}

/// How a claim names a device, which decides on its life cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A file, which the agent creates, and removes when it wipes it.
    File,
    /// A block device, which exists without the agent.
    Device,
    /// An NVMe controller that the agent drives, by its PCI address. It exists without the agent.
    Controller,
}

/// Properties of an open device.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct OpenDevice {
    pub(super) membership: Membership,
    pub(super) engine: Engine,
    /// Why it does not use the desired engine.
    pub(super) fallback: Option<DeviceFault>,
    pub(super) direct: bool,
}

/// An action for the caller to carry out.
#[derive(Debug)]
pub(super) enum Action {
    /// Open these devices of one pool.
    Open { identity: PoolIdentity, devices: Vec<OpenRequest> },
    /// Destroy the data of a device.
    Wipe(WipeRequest),
    /// Close a device and release its number.
    Detach(DeviceId),
}

/// A device to open.
#[derive(Clone, Debug)]
pub(super) struct OpenRequest {
    pub(super) id: DeviceId,
    pub(super) path: String,
    pub(super) description: DeviceDescription,
    pub(super) spec: DeviceSpec,
    /// Whether to create the file if it is missing.
    pub(super) missing: IfMissing,
}

/// A device to wipe.
#[derive(Clone, Debug)]
pub(super) struct WipeRequest {
    pub(super) path: String,
    pub(super) description: DeviceDescription,
    pub(super) kind: Kind,
    /// The pool that was opened for the claim, if any: only its data is destroyed.
    pub(super) pool: Option<[u8; 16]>,
    /// Whether the device is recorded as a member of that pool: an earlier erase may then have started.
    pub(super) is_member: bool,
    /// Whether the device must exist: a missing file may be on a file system that is not mounted, with its
    /// data.
    pub(super) is_expected: bool,
}

/// Whether refused devices are retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retry {
    Refused,
    None,
}

/// Why a device was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LossCause {
    /// A sync of the device failed.
    Sync,
    Other,
}

/// Tracks the devices of all claims and decides on actions.
#[derive(Debug, Default)]
pub(super) struct DeviceReconciler {
    pools: Vec<DesiredPool>,
    devices: BTreeMap<String, TrackedDevice>,
    used: BTreeSet<u8>,
    /// Blank devices join the pool recorded for their claim, even while its other devices are missing.
    records: DeviceRecords,
    /// Paths whose page cache may hold data that a failed sync did not write to the medium. Recovery would
    /// read that data and report it as durable.
    stale_cache: BTreeSet<String>,
}

impl DeviceReconciler {
    /// Returns a reconciler without devices that starts with these records.
    pub(super) fn with_records(records: DeviceRecords) -> DeviceReconciler {
        DeviceReconciler { records, ..DeviceReconciler::default() }
    }

    /// Sets the desired pools.
    pub(super) fn set_desired(&mut self, pools: Vec<DesiredPool>) {
        self.records.forget_beyond_bound(|uid| pools.iter().any(|pool| pool.uid == uid));
        self.pools = pools;
    }

    /// Releases records of devices that none of these claims selects; `claims` must be complete. A released
    /// device may be missing when a claim selects it again, so a node that is removed from a pool and added
    /// again starts with a blank file.
    pub(super) fn release_unclaimed(&mut self, claims: &[Claim]) {
        let means = |claim: &Claim, path: &str| match &claim.source {
            Source::File(file) => file == Path::new(path),
            Source::Devices { .. } => true,
        };
        self.records.release(|uid, path| claims.iter().any(|claim| claim.uid == uid && means(claim, path)));
    }

    /// Returns the recorded mapping of devices to pools.
    pub(super) fn records(&self) -> &DeviceRecords {
        &self.records
    }

    /// Returns the desired pools.
    pub(super) fn wanted(&self) -> &[DesiredPool] {
        &self.pools
    }

    /// Returns the paths that stay selected by their claims. Excluded are devices that were refused without
    /// being used, and missing devices whose claim has changed. Devices to wipe are always included, as
    /// another device would take their place otherwise.
    pub(super) fn retained_paths(&self, claims: &[Claim]) -> BTreeSet<String> {
        let is_as_before = |device: &TrackedDevice| {
            claims.iter().any(|claim| claim.uid == device.spec.uid && claim.generation == device.generation)
        };
        let is_held = |(path, device): &(&String, &TrackedDevice)| match &device.state {
            State::Faulted { id: None, .. } => is_as_before(device),
            State::Vacant | State::Refused(_) if device.refusal().is_some() => {
                device.data == DataPolicy::Wipe || self.records.has(&device.spec.uid, path)
            }
            _ => true,
        };
        self.devices.iter().filter(is_held).map(|(path, _)| path.clone()).collect()
    }

    /// Returns whether every desired device was attempted.
    pub(super) fn is_attempted(&self) -> bool {
        self.pools.iter().all(|pool| self.all_devices(pool, TrackedDevice::was_attempted))
    }

    fn all_devices(&self, pool: &DesiredPool, holds: impl Fn(&TrackedDevice, &DesiredPool) -> bool) -> bool {
        pool.devices
            .iter()
            .all(|wanted| self.devices.get(&wanted.path).is_some_and(|device| holds(device, pool)))
    }

    /// Records that a device was opened.
    pub(super) fn opened(&mut self, path: &str, id: DeviceId, opened: OpenDevice) {
        if let Some(device) = self.devices.get_mut(path) {
            self.records.note(&device.spec.uid, path, opened.membership);
            device.refused = None;
            device.state = State::Open { id, opened };
        }
    }

    /// Records that a device was not opened or not wiped. `id` is the number reserved for it, if any.
    pub(super) fn refused(&mut self, path: &str, id: Option<DeviceId>, fault: DeviceFault) {
        if let Some(id) = id {
            self.used.remove(&id.0);
        }
        if let Some(device) = self.devices.get_mut(path) {
            device.refuse(fault);
        }
    }

    /// Records that the data of a file is destroyed. The file is removed next, so it need not exist.
    pub(super) fn erased(&mut self, path: &str) {
        if let Some(device) = self.devices.get(path) {
            self.records.wiped(&device.spec.uid, path);
        }
    }

    /// Records that a device was wiped.
    pub(super) fn wiped(&mut self, path: &str) {
        if let Some(device) = self.devices.get_mut(path) {
            self.stale_cache.remove(path);
            self.records.wiped(&device.spec.uid, path);
            device.refused = None;
            device.state = State::Wiped;
        }
    }

    /// Records that a device failed.
    pub(super) fn lost(&mut self, lost: DeviceId, reason: &str, loss: LossCause) {
        for (path, device) in &mut self.devices {
            if let State::Open { id, opened } | State::ReadOnly { id, opened, .. } = &device.state
                && *id == lost
            {
                let id = *id;
                if loss == LossCause::Sync && !opened.direct {
                    self.stale_cache.insert(path.clone());
                }
                let message = format!(
                    "the device failed: {reason}. Its blocks are misses. Replace the device, then change the pool or restart the agent"
                );
                let fault = DeviceFault { reason: Reason::DeviceFailed, message };
                device.state = State::Faulted { id: Some(id), fault };
            }
        }
    }

    /// Records that a device rejects writes. It stays open, and its blocks are read.
    pub(super) fn rejects_writes(&mut self, rejecting: DeviceId, reason: &str) {
        for device in self.devices.values_mut() {
            if let State::Open { id, opened } = &device.state
                && *id == rejecting
            {
                let message = format!(
                    "the device rejects writes: {reason}. Its blocks are still read. Remove the cause, then change the pool or restart the agent"
                );
                let fault = DeviceFault { reason: Reason::DeviceFailed, message };
                device.state = State::ReadOnly { id: rejecting, opened: opened.clone(), fault };
            }
        }
    }

    /// Records that the core has released a device and its thread has ended.
    pub(super) fn released(&mut self, released: DeviceId) {
        self.used.remove(&released.0);
        for device in self.devices.values_mut() {
            if let State::Closing { id, fault } = &device.state
                && *id == released
            {
                device.state = match fault.clone() {
                    Some(fault) => State::Faulted { id: None, fault },
                    None => State::Vacant,
                };
            }
        }
    }

    /// Returns the next actions. Each counts as started.
    pub(super) fn next_actions(&mut self, retry: Retry) -> Vec<Action> {
        let mut actions = Vec::new();
        for path in self.devices.keys().cloned().collect::<Vec<_>>() {
            let wanted = self.desired_device(&path).map(|(pool, device)| (pool.clone(), device.clone()));
            let device = self.devices.get_mut(&path).expect("its path is in the map");
            match device.next(wanted.as_ref().map(|(pool, device)| (pool, device)), retry) {
                Transition::Keep => {
                    if let (State::Open { .. }, Some((pool, wanted))) = (&device.state, wanted) {
                        // The open device satisfies the new spec.
                        (device.spec, device.generation) = (wanted.spec, pool.generation);
                    }
                }
                Transition::Forget => drop(self.devices.remove(&path)),
                Transition::Replace(state) => device.state = state,
                Transition::Close { id, fault } => {
                    device.state = State::Closing { id, fault };
                    actions.push(Action::Detach(id));
                }
            }
        }
        for pool in self.pools.clone() {
            self.begin(&pool, &mut actions);
        }
        actions
    }

    fn desired_device(&self, path: &str) -> Option<(&DesiredPool, &DesiredDevice)> {
        self.pools.iter().find_map(|pool| {
            pool.devices.iter().find(|device| device.path == path).map(|device| (pool, device))
        })
    }

    /// Starts the actions that a pool needs on idle devices.
    fn begin(&mut self, pool: &DesiredPool, actions: &mut Vec<Action>) {
        let mut to_open = Vec::new();
        // A device that joins a pool needs the identities of the pool's other devices.
        let is_busy = |device: &TrackedDevice| {
            device.spec.uid == pool.uid && matches!(device.state, State::Opening | State::Closing { .. })
        };
        let may_open = !self.devices.values().any(is_busy);
        for wanted in &pool.devices {
            let device =
                self.devices.entry(wanted.path.clone()).or_insert_with(|| TrackedDevice::new(pool, wanted));
            if !matches!(device.state, State::Vacant) {
                continue;
            }
            device.retarget(pool, wanted);
            // A file that is not open is attempted even if it is missing: it is created, unless the claim
            // had one.
            let is_file = wanted.spec.kind == Kind::File;
            let may_create = is_file && !self.records.expects(&pool.uid, &wanted.path);
            let missing = if may_create { IfMissing::Create } else { IfMissing::Fail };
            // For a file, the open attempt detects whether it is missing, with the right remedy.
            let presence = if is_file { Presence::Present } else { wanted.presence };
            match (presence, pool.data) {
                (Presence::Missing, _) => {
                    device.state = State::Faulted { id: None, fault: missing_fault(wanted.spec.kind) };
                }
                (Presence::Present, DataPolicy::Wipe) => {
                    device.state = State::Wiping;
                    let (path, description) = (wanted.path.clone(), wanted.description.clone());
                    actions.push(Action::Wipe(WipeRequest {
                        kind: wanted.spec.kind,
                        pool: self.records.pool(&pool.uid),
                        is_member: self.records.has(&pool.uid, &path),
                        is_expected: self.records.expects(&pool.uid, &path),
                        path,
                        description,
                    }));
                }
                (Presence::Present, DataPolicy::Keep) if self.stale_cache.contains(&wanted.path) => {
                    device.refuse(stale_cache_fault());
                }
                (Presence::Present, DataPolicy::Keep) if may_open => {
                    let Some(id) = (0..OPEN_DEVICES_MAX).find(|id| !self.used.contains(id)) else {
                        let message =
                            format!("the limit of {OPEN_DEVICES_MAX} open devices on this node is reached");
                        device.refuse(DeviceFault { reason: Reason::OverCapacity, message });
                        continue;
                    };
                    self.used.insert(id);
                    device.state = State::Opening;
                    let DesiredDevice { path, description, spec, .. } = wanted.clone();
                    to_open.push(OpenRequest { id: DeviceId(id), path, description, spec, missing });
                }
                // Another device of the pool is opening or closing. This one is attempted again afterwards.
                (Presence::Present, DataPolicy::Keep) => {}
            }
        }
        if !to_open.is_empty() {
            // The devices to open report their own membership.
            let is_other = |path: &str| to_open.iter().all(|device| device.path != path);
            let identity = self.records.identity(&pool.uid, is_other);
            actions.push(Action::Open { identity, devices: to_open });
        }
    }

    /// Returns the claims that are applied.
    pub(super) fn claim_facts(&self) -> Vec<ClaimFact> {
        let is_applied = |pool: &&DesiredPool| self.all_devices(pool, TrackedDevice::is_applied);
        let fact = |pool: &DesiredPool| ClaimFact {
            pool: pool.pool.clone(),
            uid: pool.uid.clone(),
            generation: pool.generation,
            fault: pool.fault.clone(),
        };
        self.pools.iter().filter(is_applied).map(fact).collect()
    }

    /// Returns the facts of all devices. The caller adds usage, health and drive by the device's number.
    pub(super) fn device_facts(&self) -> Vec<(Option<DeviceId>, DeviceFact)> {
        self.devices.iter().map(|(path, device)| device.fact(path)).collect()
    }
}

/// Returns the fault of a missing file that must not be replaced by a blank one.
pub(super) fn missing_file_fault() -> DeviceFault {
    let message = "the file that this node had is missing, and a blank one would hide that: restore it (mount its file \
        system, then restart the agent's pod). To start with a blank file, remove the node from the pool's nodeSelector \
        until its CacheNode no longer lists the file, then add it again, or create a new SSDPool";
    DeviceFault { reason: Reason::DeviceFailed, message: message.to_owned() }
}

/// Returns the fault of a missing file that cannot count as wiped.
pub(super) fn not_destroyed_fault() -> DeviceFault {
    let message = "the file that this node had is missing, so its data cannot be destroyed: restore it (mount its file \
        system, then restart the agent's pod). If it is permanently lost, remove the node from the pool's nodeSelector";
    DeviceFault { reason: Reason::DeviceFailed, message: message.to_owned() }
}

/// Returns the fault of a device that is not reopened after a failed sync.
fn stale_cache_fault() -> DeviceFault {
    let message = "a sync of the file failed, and its page cache may hold data that the disk does not have: restart the node, or wipe the pool";
    DeviceFault { reason: Reason::DeviceFailed, message: message.to_owned() }
}

#[cfg(test)]
mod tests;
