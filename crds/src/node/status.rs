//! What an agent says of its node. Slow facts only: the agent writes when something changed, and one status in 10 s over time.
//!
//! Bounded: 32 devices of about 400 bytes, 16 GPUs, 32 controllers, 128 allocations of 100 bytes, or of 400 with why they are refused: under 80 KiB at the very most,
//! 3 KiB of a node with four devices.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::fields::{
    DevicePath, Digest, Engine, GpuUuid, HostPath, Name, PciAddress, Percent, Quantity, Serial, ShortName,
    Text, Uid, Version, choice,
};
use crate::status::Condition;

/// What the agent says of its node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CacheNodeStatus {
    /// Generation of the spec that this status was found for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// When the agent said this. Older than a minute: the agent is away, whatever the conditions say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_updated: Option<Time>,
    /// The agent itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentInfo>,
    /// Where it is reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoints: Option<Endpoints>,
    /// What the control plane calls it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registration: Option<Registration>,
    /// Sessions of engines and other clients that are open on the node. Absent: the agent does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions: Option<u32>,
    /// Its memory and devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<NodeCapacity>,
    /// Devices and files, wanted or found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["path".into()]))]
    pub devices: Vec<Device>,
    /// GPUs of the node, where the agent may see them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uuid".into()]))]
    pub gpus: Vec<Gpu>,
    /// NVMe controllers and their queue pairs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["serial".into()]))]
    pub controllers: Vec<Controller>,
    /// What the agent has put into effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub applied: Option<Applied>,
    /// How far the node is emptied, while its mode is `Draining`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain: Option<Drain>,
    /// What is so: `AgentReady`, `Connected`, `DevicesReady`, `ConfigurationApplied`, `EngineFallback`, `Degraded`, `Cordoned`,
    /// `Drained`, `StatusContested`; by the operator `ModeApplied`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// The agent itself.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentInfo {
    /// Its version.
    pub version: Version,
    /// Its pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<Name>,
    /// When it started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
}

/// Where the agent is reached.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Endpoints {
    /// By other agents, `host:port`. Absent: it has no peers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<Text>,
    /// Metrics, health and status, `host:port`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin: Option<Text>,
    /// By engines of the node: the directory of its socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_directory: Option<HostPath>,
}

/// What the control plane calls the node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Registration {
    /// Number of the node.
    #[schemars(range(min = 1, max = 65_534))]
    pub node: u32,
    /// Epoch of the registration; a later one fences earlier ones.
    #[schemars(range(min = 0))]
    pub epoch: i64,
    /// Members of the control plane that it is connected to.
    pub members_connected: u32,
    /// Members that it knows of.
    pub members: u32,
}

/// Memory and devices of the node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeCapacity {
    /// Bytes of the arena.
    pub dram_total: Quantity,
    /// Bytes of blocks in it.
    pub dram_used: Quantity,
    /// Bytes of open devices.
    pub ssd_total: Quantity,
    /// Bytes of blocks on them.
    pub ssd_used: Quantity,
    /// Pages of the arena.
    #[serde(default)]
    pub page_kind: PageKind,
}

choice! {
    /// Kinds of pages.
    PageKind {
        /// Of 4 KiB.
        Small,
        /// Of 2 MiB where the kernel found some.
        Transparent,
        /// Of 2 MiB, reserved.
        Huge,
    }
    default Small
}

/// One device or file.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Its stable path.
    pub path: DevicePath,
    /// The SSDPool that it belongs to.
    pub pool: ShortName,
    /// What it is.
    pub state: DeviceState,
    /// Why it is not open, or not as wanted, in one word: a reason of conditions. Absent: it is as wanted, or its agent is of a version that does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Z][A-Za-z]*$"))]
    pub reason: Option<String>,
    /// Why, where it is not open, and what to do about it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 512))]
    pub message: String,
    /// Its serial number. Of NVMe drives of `devices` pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<Serial>,
    /// Its model, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<Text>,
    /// Its bytes that are used for blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Quantity>,
    /// Bytes of blocks on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Quantity>,
    /// The engine that is really in effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// Whether the kernel's page cache is passed by.
    #[serde(default)]
    pub direct: bool,
    /// Media errors that the agent has met since it opened the device, or that the drive tells of its whole life, whichever are more. An NVMe drive tells
    /// them only to an agent with CAP_SYS_ADMIN, as with `deviceAccess.mode` `Privileged`. Absent: it is not open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub media_errors: Option<u32>,
    /// Spare capacity that it tells, once a minute. Absent: it does not tell, or not to this agent (see `mediaErrors`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spare_percent: Option<Percent>,
    /// Time in microseconds below which 99 of 100 reads of the last minute were, up to a quarter off. Only where the pool has
    /// `health.maxReadLatency` and there were reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_latency_p99_micros: Option<u32>,
    /// Whether reads take longer than the pool allows. It is used all the same.
    #[serde(default)]
    pub slow: bool,
    /// Whether it has more media errors, or less spare capacity, than the pool allows. It is used all the same.
    #[serde(default)]
    pub worn: bool,
}

choice! {
    /// What a device is.
    DeviceState {
        /// Matched, not opened yet.
        Found,
        /// Its journal is read.
        Opening,
        /// In use.
        Open,
        /// Left alone; the message says why.
        Refused,
        /// It failed, or was given up.
        Faulted,
        /// Its data is destroyed, as was confirmed.
        Wiped,
    }
    default Found
}

/// One GPU.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// Its unique id.
    pub uuid: GpuUuid,
    /// What it is, as its driver names it.
    pub product: Text,
}

/// One NVMe controller.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Controller {
    /// Its serial number.
    pub serial: Serial,
    /// Its address on the PCI bus.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_address: Option<PciAddress>,
    /// The SSDPool that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<ShortName>,
    /// Queue pairs that it has for I/O.
    pub queue_pairs: u32,
    /// Queue pairs that the agent has made for GPUs. 0 in this release; what is set aside is in the allocations.
    pub queue_pairs_lent: u32,
}

/// What the agent has put into effect.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Applied {
    /// Digest of the configuration file that it runs by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configuration_digest: Option<Digest>,
    /// Claims of pools that it follows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pool".into()]))]
    pub pools: Vec<AppliedPool>,
    /// Digest of the file by which it knows which pods are which tenant's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenants_digest: Option<Digest>,
    /// Profiles that it has checked and keeps ready, or refuses. Nothing on the data path uses them in this release.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub profiles: Vec<AppliedProfile>,
    /// Allocations that it keeps queue pairs for, or refuses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub queues: Vec<AppliedQueues>,
}

/// A claim that the agent follows.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedPool {
    /// The SSDPool.
    pub pool: ShortName,
    /// Its unique id.
    pub uid: Uid,
    /// Generation of the claim that was put into effect.
    #[schemars(range(min = 0))]
    pub generation: i64,
}

/// A profile that the agent has.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedProfile {
    /// The SlackProfile.
    pub name: Name,
    /// Digest of its revision.
    pub digest: Digest,
    /// Why it was refused. Absent: it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<Text>,
    /// Error of its predictions, hundredths, half of all are below it. Absent: nothing measured yet. Not written in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction_error_p50_percent: Option<u32>,
    /// Error of its predictions, hundredths, 99 of 100 are below it. Absent: nothing measured yet. Not written in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction_error_p99_percent: Option<u32>,
}

/// What the agent has of one allocation.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedQueues {
    /// Unique id of the GPUQueueAllocation.
    pub uid: Uid,
    /// Queue pairs that it has made, on all controllers. 0 in this release.
    pub queue_pairs: u32,
    /// Queue pairs that it keeps for the allocation, on all controllers.
    #[serde(default)]
    pub kept: u32,
    /// Why it keeps none, and what to do. Absent: it keeps them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<Text>,
}

/// How far the node is emptied.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// Whether every durable block is somewhere else as well.
    pub drained: bool,
    /// Blocks that were looked at in this walk.
    #[schemars(range(min = 0))]
    pub walked_blocks: i64,
    /// Durable blocks of the node.
    #[schemars(range(min = 0))]
    pub durable_blocks: i64,
    /// Blocks that no node has room for.
    #[schemars(range(min = 0))]
    pub nowhere_blocks: i64,
}
