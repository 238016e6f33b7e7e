//! How the node is, out of what core, directory client, board and configuration know.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use reprise_agent_core::effect::DeviceId;
use reprise_agent_kubernetes::{
    ControlPlane, ControllerFact, Desired, DrainFact, Facts, GpuFact, Memory, NodeMode as SpecMode, PageKind,
    Phase,
};
use reprise_policy::NodeMode;

use super::ClaimsParts;
use super::board::{Board, Kind};
use super::controllers::Drive;
use super::profiles::Profiles;
use super::queues::Queues;
use super::slow::Slow;
use super::wear::{Limits, Place, Wear};
use crate::admin::AdminContext;
use crate::bindings::BindingsFile;
use crate::core_loop::{CoreView, Input};
use crate::directory::DirectoryStatus;

/// The core answers within microseconds, or behind a full inbox.
const CORE_PATIENCE: Duration = Duration::from_secs(1);

/// Where the agent is reached.
#[derive(Clone, Debug)]
pub(crate) struct OwnEndpoints {
    /// By other agents.
    pub(crate) peer: Option<String>,
    /// Metrics, health and status.
    pub(crate) admin: String,
    /// Directory of the socket of sessions.
    pub(crate) socket_directory: PathBuf,
}

/// What was found on the node beside its devices, its profiles, and what is kept for GPUs.
pub(super) struct Look<'a> {
    pub(super) controllers: &'a [ControllerFact],
    pub(super) gpus: &'a [GpuFact],
    pub(super) profiles: &'a Profiles,
    pub(super) queues: &'a Queues,
    pub(super) slow: &'a Slow,
    pub(super) wear: &'a Wear,
    /// Drives by the stable paths of devices.
    pub(super) drives: &'a BTreeMap<String, Drive>,
}

/// How the core is; `None` when it does not answer.
pub(super) fn core_view(admin: &AdminContext) -> Option<CoreView> {
    let until = Instant::now() + CORE_PATIENCE;
    let (answer, answered) = bounded(1);
    admin.inbox.send_within(Input::Inspect(answer), CORE_PATIENCE).ok()?;
    answered.recv_deadline(until).ok()
}

/// Devices that are open, and how long reads of them may take, where their pool says it.
pub(super) fn allowed(board: &Board, desired: &Desired) -> BTreeMap<DeviceId, Duration> {
    let of_pool = |pool: &str| desired.claims.iter().find(|claim| claim.pool == pool)?.max_read_latency;
    board.devices().into_iter().filter_map(|(id, fact)| Some((id?, of_pool(&fact.pool)?))).collect()
}

/// Devices that are open, to be asked how worn they are. A file is not asked: its drive may have several.
pub(super) fn open_devices(board: &Board) -> Vec<Place> {
    let open: BTreeSet<String> =
        board.devices().into_iter().filter_map(|(id, fact)| id.map(|_| fact.path)).collect();
    let places = board.wanted().iter().flat_map(|pool| &pool.places);
    let devices = places.filter(|place| place.recipe.kind == Kind::Device && open.contains(&place.path));
    devices.map(|place| (place.path.clone(), place.at.clone())).collect()
}

/// What the pool of a device allows.
fn limits(desired: &Desired, pool: &str) -> Limits {
    let claim = desired.claims.iter().find(|claim| claim.pool == pool);
    claim.map_or_else(Limits::default, |claim| Limits {
        media_errors_max: claim.max_media_errors,
        spare_percent_min: claim.min_spare_percent,
    })
}

/// What is told of the node.
pub(super) fn gather(
    parts: &ClaimsParts,
    board: &Board,
    desired: &Desired,
    look: &Look<'_>,
    view: &CoreView,
) -> Facts {
    let is_ready = parts.admin.ready.load(std::sync::atomic::Ordering::Acquire);
    let devices = board.devices().into_iter().map(|(id, mut fact)| {
        let usage = id.and_then(|id| view.device_usage.get(&id).copied()).unwrap_or_default();
        (fact.size, fact.used) = (usage.capacity_bytes, usage.slot_bytes_used);
        if let Some(reading) = id.and_then(|id| look.slow.of(id)) {
            (fact.read_p99_micros, fact.slow) = (reading.p99_micros, reading.slow);
        }
        let open = id.and_then(|id| view.devices.iter().find(|device| device.id == id));
        if let Some(open) = open {
            let errors = open.info.media_errors.load(Ordering::Relaxed);
            let reading = look.wear.of(&fact.path, errors, limits(desired, &fact.pool));
            fact.media_errors = Some(reading.media_errors);
            (fact.spare_percent, fact.worn) = (reading.spare_percent, reading.worn);
        }
        if let Some(drive) = look.drives.get(&fact.path) {
            (fact.serial, fact.model) = (Some(drive.serial.clone()), drive.model.clone());
        }
        fact
    });
    let wanted = desired.configuration_digest.as_deref();
    let drain = view.drain;
    let pending = parts.config.pending(wanted);
    Facts {
        phase: if is_ready { Phase::Serving } else { Phase::Starting },
        told: desired.told,
        generation: desired.generation,
        problems: desired.problems.iter().map(|problem| problem.message.clone()).collect(),
        configuration: Some(parts.config.digest().to_owned()),
        configuration_pending: pending.or_else(|| look.profiles.pending()),
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
        claims: board.claims(),
        devices: devices.collect(),
        gpus: look.gpus.to_vec(),
        tenants: parts.bindings.as_ref().map(BindingsFile::digest),
        profiles: look.profiles.facts(),
        queues: look.queues.facts(),
        controllers: look.controllers.to_vec(),
        mode: spec_mode(view.mode),
        drain: DrainFact {
            // Blocks of a device that is not open yet are not among those that were looked at.
            drained: drain.drained && view.counters.unsaved_blocks == 0 && board.is_settled(),
            walked: drain.walked_blocks,
            durable: drain.durable_blocks,
            nowhere: drain.nowhere_blocks,
        },
    }
}

fn control_plane(status: &DirectoryStatus) -> ControlPlane {
    let count = |members: u64| u32::try_from(members).unwrap_or(u32::MAX);
    match status.registered {
        _ if status.stand_alone => ControlPlane::None,
        Some((node, epoch)) if status.connected => ControlPlane::Connected {
            node: node.0,
            epoch: epoch.0,
            members: count(status.members),
            connected: count(status.members_connected),
        },
        _ => ControlPlane::Away { members: count(status.members) },
    }
}

/// The pages that most of the memory is in.
fn pages(parts: &ClaimsParts) -> PageKind {
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

/// A mode of a spec, as the agent has it.
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
