//! Collects the node's facts from the core, the directory client, the reconciler and the configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use reprise_agent_core::effect::DeviceId;
use reprise_agent_kubernetes::{
    ControlPlane, ControllerFact, Desired, DrainFact, Facts, GpuFact, Memory, NodeMode as SpecMode, PageKind,
    Phase, QueueFact,
};
use reprise_policy::NodeMode;

use super::ReconcilerParts;
use super::controllers::Drive;
use super::device_health::{DevicePath, LatencyMonitor, WearLimits, WearMonitor};
use super::profiles::Profiles;
use super::reconciler::{DesiredDevice, DeviceReconciler, Kind};
use crate::admin::AdminContext;
use crate::bindings::BindingsFile;
use crate::core_loop::{CoreView, Input};
use crate::device::{ControllerHandle, ControllerKind};
use crate::directory::DirectoryStatus;

/// Time limit for the core's response: it takes microseconds unless its inbox is full.
const CORE_PATIENCE: Duration = Duration::from_secs(1);

/// State of the node other than its devices.
pub(super) struct NodeObservations<'a> {
    pub(super) controllers: &'a [ControllerFact],
    pub(super) gpus: &'a [GpuFact],
    pub(super) profiles: &'a Profiles,
    pub(super) queues: Vec<QueueFact>,
    pub(super) latency: &'a LatencyMonitor,
    pub(super) wear: &'a WearMonitor,
    /// Drives by device path.
    pub(super) drives: &'a BTreeMap<String, Drive>,
}

/// Returns the core's state; `None` if it does not respond in time.
pub(super) fn core_view(admin: &AdminContext) -> Option<CoreView> {
    let until = Instant::now() + CORE_PATIENCE;
    let (answer, answered) = bounded(1);
    admin.inbox.send_within(Input::Inspect(answer), CORE_PATIENCE).ok()?;
    answered.recv_deadline(until).ok()
}

/// Returns the open devices whose pool limits read latency, with the limit.
pub(super) fn latency_limits(
    reconciler: &DeviceReconciler,
    desired: &Desired,
) -> BTreeMap<DeviceId, Duration> {
    let of_pool = |pool: &str| desired.claims.iter().find(|claim| claim.pool == pool)?.max_read_latency;
    reconciler.device_facts().into_iter().filter_map(|(id, fact)| Some((id?, of_pool(&fact.pool)?))).collect()
}

/// Returns the open devices whose health logs are read: block devices and controllers. Files are excluded, as
/// several drives may back a file.
pub(super) fn open_devices(
    reconciler: &DeviceReconciler,
    controllers: &BTreeMap<String, ControllerHandle>,
) -> Vec<DevicePath> {
    let open: BTreeSet<String> =
        reconciler.device_facts().into_iter().filter_map(|(id, fact)| id.map(|_| fact.path)).collect();
    let devices = reconciler.wanted().iter().flat_map(|pool| &pool.devices);
    let has_log = |device: &DesiredDevice| match device.spec.kind {
        Kind::Device => true,
        // Also a file on which the agent emulates a controller.
        Kind::Controller | Kind::File => controllers.contains_key(&device.path),
    };
    let devices = devices.filter(|device| has_log(device) && open.contains(&device.path));
    devices.map(|device| (device.path.clone(), device.description.clone())).collect()
}

/// Returns the wear limits of a pool.
fn limits(desired: &Desired, pool: &str) -> WearLimits {
    let claim = desired.claims.iter().find(|claim| claim.pool == pool);
    claim.map_or_else(WearLimits::default, |claim| WearLimits {
        media_errors_max: claim.max_media_errors,
        spare_percent_min: claim.min_spare_percent,
    })
}

/// Collects the facts of the node.
pub(super) fn gather(
    parts: &ReconcilerParts,
    reconciler: &DeviceReconciler,
    desired: &Desired,
    observed: &NodeObservations<'_>,
    view: &CoreView,
) -> Facts {
    let is_ready = parts.admin.ready.load(std::sync::atomic::Ordering::Acquire);
    let devices = reconciler.device_facts().into_iter().map(|(id, mut fact)| {
        let usage = id.and_then(|id| view.device_usage.get(&id).copied()).unwrap_or_default();
        (fact.size, fact.used) = (usage.capacity_bytes, usage.slot_bytes_used);
        if let Some(reading) = id.and_then(|id| observed.latency.of(id)) {
            (fact.read_p99_micros, fact.slow) = (reading.p99_micros, reading.slow);
        }
        let open = id.and_then(|id| view.devices.iter().find(|device| device.id == id));
        if let Some(open) = open {
            let errors = open.info.media_errors.load(Ordering::Relaxed);
            let reading = observed.wear.of(&fact.path, errors, limits(desired, &fact.pool));
            fact.media_errors = Some(reading.media_errors);
            (fact.spare_percent, fact.worn) = (reading.spare_percent, reading.worn);
            if let Some(controller) = &open.info.controller {
                let properties = controller.properties();
                (fact.serial, fact.model) = (Some(properties.serial.clone()), Some(properties.model.clone()));
                fact.namespace = Some(properties.namespace);
                fact.emulated = properties.kind == ControllerKind::Emulated;
            }
        }
        if let Some(drive) = observed.drives.get(&fact.path) {
            (fact.serial, fact.model) = (Some(drive.serial.clone()), drive.model.clone());
        }
        fact
    });
    let wanted = desired.configuration_digest.as_deref();
    let drain = view.drain;
    let pending = parts.config.pending(wanted);
    Facts {
        phase: if is_ready { Phase::Serving } else { Phase::Starting },
        sequence: desired.sequence,
        generation: desired.generation,
        problems: desired.problems.iter().map(|problem| problem.message.clone()).collect(),
        configuration: Some(parts.config.digest().to_owned()),
        configuration_pending: pending.or_else(|| observed.profiles.pending()),
        peer: parts.endpoints.peer.clone(),
        admin: parts.endpoints.admin.clone(),
        socket_directory: parts.endpoints.socket_directory.clone(),
        control_plane: control_plane(&parts.admin.directory.status()),
        memory: Memory {
            total: view.counters.arena_bytes,
            used: view.counters.arena_used_bytes,
            pages: pages(parts),
        },
        sessions: u32::try_from(view.sessions.len()).unwrap_or(u32::MAX),
        claims: reconciler.claim_facts(),
        devices: devices.collect(),
        gpus: observed.gpus.to_vec(),
        tenants: parts.bindings.as_ref().map(BindingsFile::digest),
        profiles: observed.profiles.facts(),
        queues: observed.queues.clone(),
        controllers: observed.controllers.to_vec(),
        mode: spec_mode(view.mode),
        drain: DrainFact {
            // The drain counters exclude blocks of devices that are not open yet.
            drained: drain.drained && view.counters.unsaved_blocks == 0 && reconciler.is_attempted(),
            walked: drain.walked_blocks,
            durable: drain.durable_blocks,
            nowhere: drain.nowhere_blocks,
        },
    }
}

fn control_plane(status: &DirectoryStatus) -> ControlPlane {
    let count = |members: u64| u32::try_from(members).unwrap_or(u32::MAX);
    match status.registered {
        _ if status.stand_alone => ControlPlane::NotConfigured,
        Some((node, epoch)) if status.connected => ControlPlane::Connected {
            node: node.0,
            epoch: epoch.0,
            members: count(status.members),
            connected: count(status.members_connected),
        },
        _ => ControlPlane::Unreachable { members: count(status.members) },
    }
}

/// Returns the page kind that backs most of the memory.
fn pages(parts: &ReconcilerParts) -> PageKind {
    use reprise_buffers::PageKind as Kind;
    let coverage = parts.context.arena.coverage();
    let most = [Kind::HugeTlb, Kind::TransparentHuge, Kind::Small]
        .into_iter()
        .max_by_key(|kind| coverage.bytes_of(*kind));
    match most {
        Some(Kind::HugeTlb) => PageKind::Huge,
        Some(Kind::TransparentHuge) => PageKind::Transparent,
        Some(Kind::Small) | None => PageKind::Small,
    }
}

/// Converts a mode of the spec to the agent's type.
pub(super) fn mode(mode: SpecMode) -> NodeMode {
    match mode {
        SpecMode::Active => NodeMode::Active,
        SpecMode::Cordoned => NodeMode::Cordoned,
        SpecMode::Draining => NodeMode::Draining,
    }
}

fn spec_mode(mode: NodeMode) -> SpecMode {
    match mode {
        NodeMode::Active => SpecMode::Active,
        NodeMode::Cordoned => SpecMode::Cordoned,
        NodeMode::Draining => SpecMode::Draining,
    }
}
