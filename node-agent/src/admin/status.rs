//! `/status`: the state of the agent as a JSON object, for users and the command line.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use reprise_agent_core::TenantUsage;
use reprise_daemon::certificates::CertificateStatus;
use reprise_policy::block_command::RetentionUsage;
use reprise_policy::{ByteSize, DevicePlace, DrainProgress, Interval, NodeMode, quota};
use reprise_transport::Transport;
use serde::Serialize;

use super::AdminContext;
use crate::core_loop::CoreView;
use crate::device::{ControllerHandle, ControllerKind};
use crate::directory::DirectoryStatus;
use crate::executor::DeviceView;
use crate::metrics::{Kind, MetricValue};
use crate::queue_grants::GrantView;

/// JSON object of the agent. Sizes are bytes and times microseconds, unless the value has a unit.
#[derive(Serialize)]
pub(super) struct Status {
    node: Node,
    ready: bool,
    arena: Arena,
    writeback: Writeback,
    placement: Placement,
    devices: Vec<Device>,
    sessions: Vec<Session>,
    queue_grants: Vec<QueueGrant>,
    tenants: Vec<Tenant>,
    peers: Option<Peers>,
    controlplane: ControlPlane,
    /// Certificates in use; `null` on plain connections.
    tls: Option<CertificateStatus>,
    /// Inputs queued for the core.
    inbox_waiting: usize,
    counters: BTreeMap<&'static str, u64>,
}

#[derive(Serialize)]
struct Node {
    name: String,
    failure_domain: String,
    version: &'static str,
    pid: u32,
    socket: String,
}

#[derive(Serialize)]
struct Arena {
    bytes: u64,
    regions: usize,
    page_kind: String,
}

#[derive(Serialize)]
struct Writeback {
    delay: Interval,
    bytes: ByteSize,
    slack_delay: Interval,
}

/// Mode of the node and progress of draining it.
#[derive(Serialize)]
struct Placement {
    mode: &'static str,
    drained: bool,
    walked_blocks: u64,
    durable_blocks: u64,
    nowhere_blocks: u64,
    /// Bytes copied to other nodes since the start, for any reason.
    moved_bytes: u64,
}

#[derive(Serialize)]
struct Device {
    device: u8,
    path: String,
    bytes: u64,
    /// Capacity for blocks and their headers; 0 if the device is lost.
    slot_bytes: u64,
    used_bytes: u64,
    io_engine: String,
    /// The NVMe controller, if the agent drives it itself.
    controller: Option<Controller>,
    direct: bool,
    /// Where the device is; `null` if it has no place.
    place: Option<Place>,
    /// Why the device is lost.
    lost: Option<String>,
    /// Why the device rejects writes, while its blocks are still read.
    read_only: Option<String>,
    queue_waiting: usize,
    /// Bytes that the drive counts as written since it was opened; 0 while its health log is not read.
    drive_written_bytes: u64,
    recovery_us: u64,
    recovery_records: u64,
    recovered_blocks: u64,
    formatted: bool,
    /// Bytes that the pool gained when it was opened.
    grown_bytes: u64,
}

/// Place in the machine: sessions prefer devices near their GPU.
#[derive(Serialize)]
struct Place {
    /// PCIe root complex, as sysfs names it.
    pci_root: Option<String>,
    numa_node: Option<u32>,
}

/// Identity of an NVMe controller that the agent drives itself, and the queue pairs that it has granted.
#[derive(Serialize)]
struct Controller {
    emulated: bool,
    /// `null` for an emulated controller.
    pci_address: Option<String>,
    serial: String,
    model: String,
    namespace: u32,
    /// Granted I/O queue pairs, that of the agent included.
    queue_pairs: u16,
    /// How commands describe memory: SGL or PRP.
    data_format: String,
}

#[derive(Serialize)]
struct Session {
    session: u64,
    client: String,
    /// Tenant, as claimed by the session.
    tenant: String,
    pid: i32,
    uid: u32,
    /// Namespace digest in hexadecimal.
    namespace: String,
    /// Encoded layout in hexadecimal.
    layout: String,
    /// Place of the GPU that the session states.
    gpu: Option<Place>,
    requests_in_flight: usize,
    /// What moves the blocks of its extents; "arena" if it states nothing.
    backend: &'static str,
}

/// Queue pairs of a device that a session drives itself.
#[derive(Serialize)]
struct QueueGrant {
    generation: u64,
    session: u64,
    device: u8,
    /// Numbers of the queue pairs; empty while they are created, or if the controller did not confirm their deletion.
    queues: Vec<u16>,
    pairs: u32,
    depth: u32,
    /// Whether doorbells are registers or relayed by the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    doorbells: Option<String>,
    /// Namespace and name of its GPUQueueAllocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    allocation: Option<String>,
    /// Profile that the allocation names for the session.
    #[serde(skip_serializing_if = "Option::is_none")]
    slack_profile: Option<String>,
}

/// Usage and quotas of a tenant; `null` if unlimited.
#[derive(Serialize)]
struct Tenant {
    name: String,
    number: u16,
    /// Whether sessions of all tenants may read its blocks.
    public: bool,
    grant_version: u64,
    dram: ResourceUsage,
    nvme: ResourceUsage,
    retention: RetentionPins,
}

/// Blocks that retention pins keep from eviction.
#[derive(Serialize)]
struct RetentionPins {
    blocks: u64,
    blocks_max: u64,
    dram_bytes: u64,
    /// What the tenant may pin now.
    dram_bytes_max: u64,
    nvme_bytes: u64,
    nvme_bytes_max: u64,
}

#[derive(Serialize)]
struct ResourceUsage {
    used: u64,
    reserved: u64,
    limit: Option<u64>,
}

#[derive(Serialize)]
struct Peers {
    totals: BTreeMap<&'static str, u64>,
    nodes: Vec<PeerNode>,
}

/// One way to reach the peer transport of a node.
#[derive(Debug, Serialize)]
struct PeerEndpoint {
    protocol: String,
    address: String,
}

#[derive(Serialize)]
struct PeerNode {
    node: u16,
    name: String,
    endpoints: Vec<PeerEndpoint>,
    alive: bool,
}

#[derive(Serialize)]
struct ControlPlane {
    stand_alone: bool,
    connected: bool,
    members: u64,
    members_connected: u64,
    map_epoch: u64,
    node: Option<u16>,
    epoch: Option<u64>,
    changes_queued: u64,
    changes_announced: u64,
    lookups_answered: u64,
    lookups_failed: u64,
}

impl Status {
    pub(super) fn new(context: &AdminContext, view: &CoreView) -> Status {
        let settings = &context.settings;
        Status {
            node: Node {
                name: settings.node.name.clone(),
                failure_domain: context.directory.failure_domain(),
                version: env!("CARGO_PKG_VERSION"),
                pid: std::process::id(),
                socket: settings.session.socket.display().to_string(),
            },
            ready: context.ready.load(Ordering::Acquire),
            arena: Arena {
                bytes: context.arena.bytes,
                regions: context.arena.regions,
                page_kind: context.arena.page_kind.clone(),
            },
            writeback: Writeback {
                delay: Interval(settings.writeback_delay),
                bytes: ByteSize(settings.writeback_bytes),
                slack_delay: Interval(settings.slack_delay),
            },
            placement: placement(view),
            devices: view.devices.iter().map(|device| Device::new(device, view)).collect(),
            sessions: view.sessions.iter().map(session).collect(),
            queue_grants: context.queue_grants.views().into_iter().map(queue_grant).collect(),
            tenants: view.tenants.iter().map(|usage| tenant(context, usage)).collect(),
            peers: peers(context),
            controlplane: control_plane(&context.directory.status()),
            tls: context.certificates.status(),
            inbox_waiting: view.inbox_waiting,
            counters: view.counters.fields().collect(),
        }
    }
}

fn queue_grant(view: GrantView) -> QueueGrant {
    let GrantView { generation, request, queues, doorbells, allocation, slack_profile } = view;
    QueueGrant {
        generation: generation.0,
        session: request.session.0,
        device: request.device,
        queues,
        pairs: request.pairs,
        depth: request.depth,
        doorbells: doorbells.map(|kind| kind.to_string()),
        allocation,
        slack_profile,
    }
}

fn placement(view: &CoreView) -> Placement {
    let DrainProgress { drained, walked_blocks, durable_blocks, moved_bytes, nowhere_blocks } = view.drain;
    let mode = match view.mode {
        NodeMode::Active => "active",
        NodeMode::Cordoned => "cordoned",
        NodeMode::Draining => "draining",
    };
    Placement { mode, drained, walked_blocks, durable_blocks, nowhere_blocks, moved_bytes }
}

impl Device {
    fn new(device: &DeviceView, view: &CoreView) -> Device {
        let DeviceView { id, info, waiting, lost, read_only } = device;
        let usage = view.device_usage.get(id).copied().unwrap_or_default();
        Device {
            device: id.0,
            path: info.description.to_string(),
            bytes: info.bytes,
            slot_bytes: usage.capacity_bytes,
            used_bytes: usage.slot_bytes_used,
            io_engine: info.engine_name(),
            controller: info.controller.as_ref().map(Controller::new),
            direct: info.caching == reprise_io::Caching::Direct,
            place: info.place.as_ref().map(place),
            lost: lost.clone(),
            read_only: read_only.clone(),
            queue_waiting: *waiting,
            drive_written_bytes: info.drive_written_bytes.load(Ordering::Relaxed),
            recovery_us: u64::try_from(info.recovery.took.as_micros()).unwrap_or(u64::MAX),
            recovery_records: info.recovery.records,
            recovered_blocks: info.recovery.blocks,
            formatted: info.recovery.formatted,
            grown_bytes: info.recovery.grown_bytes,
        }
    }
}

fn place(place: &DevicePlace) -> Place {
    Place { pci_root: place.root.clone(), numa_node: place.numa_node }
}

impl Controller {
    fn new(handle: &ControllerHandle) -> Controller {
        let properties = handle.properties();
        Controller {
            emulated: properties.kind == ControllerKind::Emulated,
            pci_address: properties.address.map(|address| address.to_string()),
            serial: properties.serial.clone(),
            model: properties.model.clone(),
            namespace: properties.namespace,
            queue_pairs: properties.queue_pairs,
            data_format: properties.data_format.to_string(),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn session(view: &crate::executor::SessionView) -> Session {
    Session {
        session: view.id.0,
        client: view.peer.client_name.clone(),
        tenant: view.peer.tenant.to_string(),
        pid: view.peer.pid,
        uid: view.peer.ids.uid,
        namespace: hex(&view.namespace.0),
        layout: view.peer.layout.map_or_else(String::new, |layout| hex(&layout.encode())),
        gpu: view.peer.gpu.as_ref().map(place),
        requests_in_flight: view.in_flight,
        backend: view.backend.name(),
    }
}

fn tenant(context: &AdminContext, usage: &TenantUsage) -> Tenant {
    let holding = |held: &quota::QuotaUsage| ResourceUsage {
        used: held.used,
        reserved: held.quota.reserved(),
        limit: Some(held.quota.limit()).filter(|limit| *limit < u64::MAX),
    };
    let name = super::tenant_name(context, usage.tenant);
    Tenant {
        public: context.public_tenant.current().is_some_and(|public| public.as_str() == name),
        name,
        number: usage.tenant.0,
        grant_version: usage.grant.map_or(0, |grant| grant.version),
        dram: holding(&usage.dram),
        nvme: holding(&usage.nvme),
        retention: retention(usage.retention),
    }
}

fn retention(usage: RetentionUsage) -> RetentionPins {
    let RetentionUsage { blocks, blocks_max, dram_bytes, dram_bytes_max, nvme_bytes, nvme_bytes_max } = usage;
    RetentionPins { blocks, blocks_max, dram_bytes, dram_bytes_max, nvme_bytes, nvme_bytes_max }
}

fn endpoint(endpoint: &reprise_policy::peer::PeerEndpoint) -> PeerEndpoint {
    PeerEndpoint { protocol: endpoint.protocol.clone(), address: endpoint.address.clone() }
}

fn peers(context: &AdminContext) -> Option<Peers> {
    let totals = context.peers.as_ref()?.stats().fields().collect();
    let node = |node: crate::directory::PeerNode| PeerNode {
        node: node.node.0,
        name: node.name,
        endpoints: node.peer_endpoints.iter().map(endpoint).collect(),
        alive: node.alive,
    };
    Some(Peers { totals, nodes: context.directory.nodes().into_iter().map(node).collect() })
}

fn control_plane(status: &DirectoryStatus) -> ControlPlane {
    ControlPlane {
        stand_alone: status.stand_alone,
        connected: status.connected,
        members: status.members,
        members_connected: status.members_connected,
        map_epoch: status.map_epoch,
        node: status.registered.map(|(node, _)| node.0),
        epoch: status.registered.map(|(_, epoch)| epoch.0),
        changes_queued: status.changes_queued,
        changes_announced: status.changes_announced,
        lookups_answered: status.lookups_answered,
        lookups_failed: status.lookups_failed,
    }
}

/// Returns the directory client's counters as metrics.
pub(super) fn directory_numbers(status: &DirectoryStatus) -> Vec<MetricValue> {
    let number =
        |name: &str, kind, help, value| MetricValue { name: format!("directory_{name}"), help, kind, value };
    vec![
        number("connected", Kind::Gauge, "1 while the control plane responds", u64::from(status.connected)),
        number("members", Kind::Gauge, "Members of the control plane", status.members),
        number(
            "members_connected",
            Kind::Gauge,
            "Members of the control plane that respond and know this node",
            status.members_connected,
        ),
        number("changes_queued", Kind::Gauge, "Changes waiting to be announced", status.changes_queued),
        number(
            "changes_announced",
            Kind::Counter,
            "Changes that the directory has applied",
            status.changes_announced,
        ),
        number(
            "changes_superseded",
            Kind::Counter,
            "Changes that were replaced by an inventory",
            status.changes_superseded,
        ),
        number(
            "inventories_wanted",
            Kind::Counter,
            "Inventories requested by members",
            status.inventories_wanted,
        ),
        number("registrations", Kind::Counter, "Registrations made", status.registrations),
        number("lookups_answered", Kind::Counter, "Lookups answered", status.lookups_answered),
        number("lookups_failed", Kind::Counter, "Lookups failed", status.lookups_failed),
        number(
            "lookup_keys_redirected",
            Kind::Counter,
            "Keys that a member no longer owned",
            status.lookup_keys_redirected,
        ),
        number(
            "lookup_keys_unanswered",
            Kind::Counter,
            "Keys for which no member responded in time",
            status.lookup_keys_unanswered,
        ),
        number(
            "lookup_keys_partial",
            Kind::Counter,
            "Keys answered before every node had announced its inventory of the slot",
            status.lookup_keys_partial,
        ),
        number("beats_failed", Kind::Counter, "Heartbeats without a response", status.beats_failed),
    ]
}
