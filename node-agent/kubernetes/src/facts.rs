//! State of the node as the agent reports it, in plain types without Kubernetes objects.

use std::path::PathBuf;

use reprise_crds::fields::{Engine, NodeMode};
use reprise_crds::node::{DeviceState, PageKind};
use reprise_crds::status::Reason;
use reprise_policy::slack::prediction::PredictionError;

/// State of the node at one point in time.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Life cycle phase of the agent.
    pub phase: Phase,
    /// Sequence number of the [`Desired`](crate::Desired) in effect when the facts were collected.
    pub sequence: u64,
    /// Generation of the spec in effect; 0 without a spec.
    pub generation: i64,
    /// Parts of the spec that are invalid or cannot be applied.
    pub problems: Vec<String>,
    /// Digest of the active configuration file.
    pub configuration: Option<String>,
    /// Why the desired configuration is not active; `None` if it is.
    pub configuration_pending: Option<String>,
    /// Address for other agents, `host:port`.
    pub peer: Option<String>,
    /// Address for metrics, health and status, `host:port`.
    pub admin: String,
    /// Directory of the session socket.
    pub socket_directory: PathBuf,
    /// Connection to the control plane.
    pub control_plane: ControlPlane,
    /// Size and usage of the memory for blocks.
    pub memory: Memory,
    /// Number of open sessions of engines.
    pub sessions: u32,
    /// Claims that are applied.
    pub claims: Vec<ClaimFact>,
    /// Devices and files of the claims.
    pub devices: Vec<DeviceFact>,
    /// GPUs of the node.
    pub gpus: Vec<GpuFact>,
    /// Digest of the file that maps pods to tenants; `None` without one.
    pub tenants: Option<String>,
    /// Slack profiles that are active or rejected.
    pub profiles: Vec<ProfileFact>,
    /// Queue pairs reserved for GPUs.
    pub queues: Vec<QueueFact>,
    /// NVMe controllers of the node, each serial number once.
    pub controllers: Vec<ControllerFact>,
    /// Mode of the node in effect.
    pub mode: NodeMode,
    /// Progress of draining the node.
    pub drain: DrainFact,
}

/// Life cycle phase of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The first spec is not applied yet.
    Starting,
    /// The agent serves engines.
    Serving,
    /// The agent is stopping.
    Stopping,
}

/// Connection of the agent to the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlPlane {
    /// No control plane is configured.
    NotConfigured,
    /// No member of the control plane responds.
    Unreachable {
        /// Number of known members.
        members: u32,
    },
    /// The node is registered.
    Connected {
        /// Number of the node in the control plane.
        node: u16,
        /// Epoch of its registration.
        epoch: u64,
        /// Number of known members.
        members: u32,
        /// Number of members that respond.
        connected: u32,
    },
}

/// Memory for blocks, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Size of the arena, in bytes.
    pub total: u64,
    /// Bytes occupied by blocks.
    pub used: u64,
    /// Kind of pages that back most of it.
    pub pages: PageKind,
}

/// A claim that is applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimFact {
    /// Name of the pool.
    pub pool: String,
    /// Unique id of the pool.
    pub uid: String,
    /// Generation of the applied claim.
    pub generation: i64,
    /// Why the claim has no devices, or fewer than it selects.
    pub fault: Option<DeviceFault>,
}

/// Why a claim or device is not in the desired state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFault {
    /// Machine-readable reason for conditions.
    pub reason: Reason,
    /// Cause and remedy, as a sentence.
    pub message: String,
}

/// A tracked device or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFact {
    /// Stable path of the device.
    pub path: String,
    /// Name of its pool.
    pub pool: String,
    /// State of the device.
    pub state: DeviceState,
    /// Why it is not open, or failed.
    pub fault: Option<DeviceFault>,
    /// Why it does not use the engine that its claim asks for.
    pub fallback: Option<DeviceFault>,
    /// Capacity for blocks, in bytes.
    pub size: u64,
    /// Bytes occupied by blocks.
    pub used: u64,
    /// Engine in use; `None` if the device is not open.
    pub engine: Option<Engine>,
    /// Whether I/O bypasses the page cache.
    pub direct: bool,
    /// p99 of the read latency of the last minute in microseconds, if the pool has a limit.
    pub read_p99_micros: Option<u32>,
    /// Why its reads exceed the latency limit, if they do.
    pub slow: Option<String>,
    /// Media errors: the greater of the agent's count since opening and the drive's count. `None` if the
    /// device is not open.
    pub media_errors: Option<u32>,
    /// Remaining spare capacity as reported by the drive, in percent.
    pub spare_percent: Option<u8>,
    /// Which wear limits are exceeded, if any.
    pub worn: Option<String>,
    /// Serial number of the drive.
    pub serial: Option<String>,
    /// Model of the drive.
    pub model: Option<String>,
    /// Namespace of a controller that the agent drives.
    pub namespace: Option<u32>,
    /// Whether the agent emulates the controller.
    pub emulated: bool,
}

/// An NVMe controller of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerFact {
    /// Serial number of the drive.
    pub serial: String,
    /// PCI address of the controller.
    pub pci_address: Option<String>,
    /// The pool that uses one of its devices.
    pub pool: Option<String>,
    /// Number of I/O queue pairs that the kernel has, or that the controller has granted to the agent.
    pub queue_pairs: u32,
}

/// A GPU of the node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GpuFact {
    /// Unique id of the GPU.
    pub uuid: String,
    /// Product name, as reported by the driver.
    pub product: String,
}

/// State of a grant of queue pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueFact {
    /// Unique id of the allocation.
    pub uid: String,
    /// Queue pairs reserved on all controllers.
    pub kept: u32,
    /// Queue pairs that exist, by controller.
    pub created: Vec<CreatedFact>,
    /// Why engines cannot create the queue pairs, if they cannot.
    pub unavailable: Option<String>,
    /// Why the grant was refused, if it was.
    pub refused: Option<String>,
}

/// Queue pairs of a grant that exist on one controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreatedFact {
    /// Serial number of the controller.
    pub serial: String,
    /// Generation of the last of them, in the life of the agent.
    pub generation: u64,
    /// Numbers of the queue pairs.
    pub queues: Vec<u16>,
}

/// A slack profile that is active or was rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileFact {
    /// Name of the profile.
    pub name: String,
    /// Digest of the revision.
    pub digest: String,
    /// Why the revision was rejected, if it was.
    pub refused: Option<String>,
    /// Error of its predictions; `None` before enough layers were measured.
    pub prediction_error: Option<PredictionError>,
}

/// Progress of draining the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainFact {
    /// Whether every durable block also exists on another node.
    pub drained: bool,
    /// Durable blocks checked in this pass.
    pub walked: u64,
    /// Durable blocks in total.
    pub durable: u64,
    /// Blocks for which no node has capacity.
    pub nowhere: u64,
}
