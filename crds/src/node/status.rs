//! What an agent reports about its node. The agent writes on change, on average at most once in 10 s.
//!
//! Size bounds: 32 devices of about 400 bytes, 16 GPUs, 32 controllers, 128 allocations of 100 bytes (400 if
//! rejected), and 6 bytes for each of their queue pairs. The status of a node is below 100 KiB with 128 queue pairs on
//! each of 32 controllers, and 3 KiB with four devices.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::fields::{
    DevicePath, Digest, Engine, GpuUuid, HostPath, Name, PciAddress, Percent, Quantity, Serial, ShortName,
    Text, Uid, Version, choice,
};
use crate::status::Condition;

/// Observed state of the node, as reported by its agent.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CacheNodeStatus {
    /// Generation of the spec that this status was computed for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Time of the agent's last report. Older than a minute: the agent is away, and the conditions may be
    /// outdated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_updated: Option<Time>,
    /// Process of the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentInfo>,
    /// Addresses of the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoints: Option<Endpoints>,
    /// Registration of the node with the control plane.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registration: Option<Registration>,
    /// Open sessions of engines and other clients on the node. Absent: the agent does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sessions: Option<u32>,
    /// Capacity and usage of memory and devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<NodeCapacity>,
    /// Devices and files, claimed or found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["path".into()]))]
    pub devices: Vec<Device>,
    /// GPUs of the node that are visible to the agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uuid".into()]))]
    pub gpus: Vec<Gpu>,
    /// NVMe controllers of the node and their queue pairs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["serial".into()]))]
    pub controllers: Vec<Controller>,
    /// Configuration, claims, profiles and allocations that the agent has applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub applied: Option<Applied>,
    /// Progress of draining, while `mode` is `Draining`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain: Option<Drain>,
    /// Conditions: `AgentReady`, `Connected`, `DevicesReady`, `ConfigurationApplied`, `EngineFallback`,
    /// `Degraded`, `Cordoned`, `Drained`, `StatusContested`. The operator sets `ModeApplied`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Process of the agent.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentInfo {
    /// Version of the agent.
    pub version: Version,
    /// Name of the agent's pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<Name>,
    /// Start time of the agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
}

/// Addresses of the agent.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Endpoints {
    /// Address for other agents, `host:port`. Absent: the agent has no peers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<Text>,
    /// Address of metrics, health and status, `host:port`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin: Option<Text>,
    /// Directory of the socket for engines on the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_directory: Option<HostPath>,
}

/// Registration of the node with the control plane.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Registration {
    /// Number of the node within its cluster.
    #[schemars(range(min = 1, max = 65_534))]
    pub node: u32,
    /// Epoch of the registration. A later registration fences earlier ones.
    #[schemars(range(min = 0))]
    pub epoch: i64,
    /// Control plane members that the agent is connected to.
    pub members_connected: u32,
    /// Control plane members that the agent knows.
    pub members: u32,
}

/// Capacity and usage of memory and devices of the node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeCapacity {
    /// Size of the DRAM arena in bytes.
    pub dram_total: Quantity,
    /// Bytes of the arena that hold blocks.
    pub dram_used: Quantity,
    /// Size of all open devices in bytes.
    pub ssd_total: Quantity,
    /// Bytes of the open devices that hold blocks.
    pub ssd_used: Quantity,
    /// Kind of memory pages of the arena.
    #[serde(default)]
    pub page_kind: PageKind,
}

choice! {
    /// Kind of memory pages.
    PageKind {
        /// Pages of 4 KiB.
        Small,
        /// Pages of 2 MiB, where the kernel has such pages available.
        Transparent,
        /// Reserved pages of 2 MiB.
        Huge,
    }
    default Small
}

/// One device or file of a pool.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Stable path of the device or file.
    pub path: DevicePath,
    /// SSDPool that it belongs to.
    pub pool: ShortName,
    /// State of the device or file.
    pub state: DeviceState,
    /// Reason why the device is not open or does not match its claim: a condition reason. Absent: it
    /// matches, or an older agent does not report reasons.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Z][A-Za-z]*$"))]
    pub reason: Option<String>,
    /// Explanations and remedies, if the device is not open or does not match its claim.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 512))]
    pub message: String,
    /// Serial number. Set for NVMe drives of `devices` pools, and for controllers that the agent drives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<Serial>,
    /// Model. Set for NVMe drives of `devices` pools, and for controllers that the agent drives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<Text>,
    /// Namespace of an NVMe controller that the agent drives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace_id: Option<u32>,
    /// Whether the agent emulates the NVMe controller: engine `UserNvme` with a `directory`.
    #[serde(default)]
    pub emulated: bool,
    /// Bytes used for blocks and their metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Quantity>,
    /// Bytes of blocks on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Quantity>,
    /// I/O engine in effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// Whether I/O bypasses the kernel's page cache.
    #[serde(default)]
    pub direct: bool,
    /// Media errors since the agent opened the device, or over the drive's lifetime; the larger count.
    /// Absent: not open. NVMe drives report lifetime counts only to an agent with CAP_SYS_ADMIN, for
    /// example with `deviceAccess.mode` `Privileged`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub media_errors: Option<u32>,
    /// Spare capacity that the drive reports, read once a minute. Absent: not reported, or not readable by
    /// this agent (see `mediaErrors`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spare_percent: Option<Percent>,
    /// 99th percentile of read latency in the last minute, in microseconds, within 25 %. Set only with
    /// `health.maxReadLatency` in the pool, after reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_latency_p99_micros: Option<u32>,
    /// Whether reads exceed the latency that the pool allows. The device stays in use.
    #[serde(default)]
    pub slow: bool,
    /// Whether the device has too many media errors or too little spare capacity for the pool. It stays in
    /// use.
    #[serde(default)]
    pub worn: bool,
}

choice! {
    /// State of a device.
    DeviceState {
        /// The device matches the claim and is not open yet.
        Found,
        /// The agent is reading the device's journal.
        Opening,
        /// The device is in use.
        Open,
        /// The agent does not use the device; the message gives the cause.
        Refused,
        /// The device failed, and the agent closed it.
        Faulted,
        /// The data was destroyed as confirmed.
        Wiped,
    }
    default Found
}

/// One GPU of the node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gpu {
    /// UUID of the GPU.
    pub uuid: GpuUuid,
    /// Product name, as reported by the driver.
    pub product: Text,
}

/// One NVMe controller of the node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Controller {
    /// Serial number of the controller.
    pub serial: Serial,
    /// Address on the PCI bus.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_address: Option<PciAddress>,
    /// SSDPool that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<ShortName>,
    /// I/O queue pairs of the controller: those of the kernel, or those that it has granted to the agent.
    pub queue_pairs: u32,
    /// Queue pairs that engines have created. `applied.queues` lists them by allocation.
    pub queue_pairs_lent: u32,
}

/// Configuration, claims, profiles and allocations that the agent has applied.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Applied {
    /// Digest of the configuration file that the agent runs with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configuration_digest: Option<Digest>,
    /// Pool claims that the agent has applied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pool".into()]))]
    pub pools: Vec<AppliedPool>,
    /// Digest of the file that maps pods to tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenants_digest: Option<Digest>,
    /// Profiles that the agent has validated or rejected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub profiles: Vec<AppliedProfile>,
    /// Allocations that the agent reserves queue pairs for, or rejects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub queues: Vec<AppliedQueues>,
}

/// A pool claim that the agent has applied.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedPool {
    /// Name of the SSDPool.
    pub pool: ShortName,
    /// UID of the SSDPool.
    pub uid: Uid,
    /// Generation of the applied claim.
    #[schemars(range(min = 0))]
    pub generation: i64,
}

/// A profile that the agent has validated or rejected.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedProfile {
    /// Name of the SlackProfile.
    pub name: Name,
    /// Digest of the profile's revision.
    pub digest: Digest,
    /// Cause of the rejection. Absent: the profile is valid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<Text>,
    /// Median prediction error in percent. Absent: not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction_error_p50_percent: Option<u32>,
    /// 99th percentile of the prediction error in percent. Absent: not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prediction_error_p99_percent: Option<u32>,
}

/// State of one allocation on the node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedQueues {
    /// UID of the GPUQueueAllocation.
    pub uid: Uid,
    /// Queue pairs that engines have created on all controllers.
    pub queue_pairs: u32,
    /// Queue pairs reserved for the allocation on all controllers.
    #[serde(default)]
    pub kept: u32,
    /// Queue pairs that exist, by controller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["serial".into()]))]
    pub created: Vec<CreatedQueues>,
    /// Why engines cannot create the queue pairs, for example because the kernel drives the controller. Absent: they
    /// can.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<Text>,
    /// Cause of the rejection, and the remedy. Absent: the queue pairs are reserved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<Text>,
}

/// Queue pairs of an allocation that exist on one controller.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreatedQueues {
    /// Serial number of the controller.
    pub serial: Serial,
    /// Generation of the last of these queue pairs, which the agent counts from its start. A controller uses numbers
    /// again; a queue pair that has the number of a deleted one has a higher generation.
    #[schemars(range(min = 0))]
    pub generation: i64,
    /// Numbers of the queue pairs, in ascending order.
    #[schemars(length(max = 128))]
    pub queues: Vec<u32>,
}

/// Progress of draining the node.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// Whether every durable block of the node has a replica on another node.
    pub drained: bool,
    /// Blocks that the current pass has checked.
    #[schemars(range(min = 0))]
    pub walked_blocks: i64,
    /// Durable blocks on the node.
    #[schemars(range(min = 0))]
    pub durable_blocks: i64,
    /// Durable blocks without room on any other node.
    #[schemars(range(min = 0))]
    pub nowhere_blocks: i64,
}
