//! `SSDPool`: devices of selected nodes that hold blocks.
//!
//! One object speaks for many nodes: the operator turns it into a claim in the `CacheNode` of each node that it selects. An
//! agent has one pool of devices, so what is set once for an agent (`segmentSize`, `queueDepth`, `engine`,
//! `watermarks`) must be the same in all pools that select the same node; the operator refuses the younger one otherwise.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{
    ConfirmationText, DeletionPolicy, DeviceGlob, Engine, FallbackEngine, ForeignSignatures, HostPath,
    LabelSelector, Name, NodeMode, Percent, Permille, Quantity, Span, of_nothing,
};
use crate::status::Condition;

/// Devices of one node, at the most; the agent's own limit.
pub const DEVICES_PER_NODE_MAX: u32 = 32;

/// What the pool is made of, on which nodes.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "reprise.dev",
    version = "v1alpha1",
    kind = "SSDPool",
    plural = "ssdpools",
    shortname = "ssdp",
    category = "reprise",
    status = "SSDPoolStatus",
    derive = "PartialEq",
    doc = "Devices or directories on selected nodes that hold blocks of the cache. A pool loses nothing but time when it goes: \
           a failed device is lost capacity, never an outage.",
    validation = Rule::new("size(self.metadata.name) <= 40")
        .message("the pool's name is longer than 40 characters, too long for the names made of it: choose a shorter one"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes.ready"),
    printcolumn(name = "Devices", type_ = "integer", json_path = ".status.devices.open"),
    printcolumn(name = "Total", type_ = "string", json_path = ".status.capacity.total"),
    printcolumn(name = "Used", type_ = "string", json_path = ".status.capacity.used"),
    printcolumn(name = "Engine", type_ = "string", json_path = ".spec.engine"),
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(validation = Rule::new("[has(self.devices), has(self.directory), has(self.claims)].exists_one(given, given)")
    .message("a pool is made of exactly one of devices, directory and claims: set one of them and remove the others"))]
#[x_kube(validation = Rule::new("has(self.devices) == has(oldSelf.devices) && has(self.directory) == has(oldSelf.directory) \
    && has(self.claims) == has(oldSelf.claims)")
    .message("a pool stays what it was made of (devices, directory or claims): make a new SSDPool and delete this one"))]
#[x_kube(validation = Rule::new("!(self.engine in ['IoUringCmd', 'GpuQueue']) || has(self.devices)")
    .message("engines IoUringCmd and GpuQueue speak to raw devices: use devices, or engine IoUring or Plain"))]
#[x_kube(validation = Rule::new("self.fallbackEngine != self.engine")
    .message("fallbackEngine is the engine itself: name another one, or None to keep devices closed without it"))]
#[x_kube(validation = Rule::new("!has(self.wipeConfirmation) || self.deletionPolicy == 'Wipe' || \
    (has(self.devices) && self.devices.foreignSignatures == 'Wipe')")
    .message("wipeConfirmation is given, but nothing is to be wiped: remove it, or set deletionPolicy or \
              devices.foreignSignatures to Wipe"))]
#[x_kube(validation = Rule::new("!has(self.devices) || self.devices.foreignSignatures != 'Wipe' || has(self.wipeConfirmation)")
    .message("foreign devices are overwritten only when wipeConfirmation is yes-really-destroy-the-data"))]
pub struct SSDPoolSpec {
    /// Nodes that the pool is on, among those that the cluster's agents run on. Empty: all of them. A node that is no longer
    /// selected closes its devices; what is on them stays.
    #[serde(default)]
    pub node_selector: LabelSelector,
    /// Raw block devices. The agent needs access to them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<DeviceClaim>,
    /// One preallocated file in a directory of the node. Needs no privileges; the simplest choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<DirectoryClaim>,
    /// A volume for each node, by a storage class. Agents are then StatefulSets, one a node; not in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claims: Option<VolumeClaim>,
    /// How devices are driven. A change reopens the devices; blocks are kept. What is really in effect is in the status.
    #[serde(default)]
    pub engine: Engine,
    /// What happens on nodes that cannot have `engine`, for example because a seccomp profile forbids io_uring. Never silent: the
    /// condition `EngineFallback` says which nodes use another one, `Degraded` which keep devices closed.
    #[serde(default)]
    pub fallback_engine: FallbackEngine,
    /// Unit of allocation on a device, bytes: at least one block and its header of 4 KiB, a multiple of 2 MiB. Cannot be changed.
    #[serde(default = "segment_size")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 2097152 && quantity(self).asInteger() <= 1073741824 && \
        quantity(self).asInteger() % 2097152 == 0")
        .message("segmentSize is 2Mi to 1Gi and a multiple of 2Mi: round it"))]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("segmentSize is on the devices and cannot be changed: make a new SSDPool"))]
    pub segment_size: Quantity,
    /// Operations under way for each device. All pools of a cluster have the same; a change restarts its agents, once all have it.
    #[serde(default = "queue_depth")]
    #[schemars(range(min = 1, max = 1024))]
    pub queue_depth: u32,
    /// How full devices get.
    #[serde(default)]
    pub watermarks: Watermarks,
    /// What a device must keep to. One that does not is told of (`Degraded`) and used all the same; one that fails is given up without a
    /// threshold: it is closed, and its blocks are forgotten.
    #[serde(default)]
    pub health: HealthThresholds,
    /// What the nodes of the pool are used for. `kubectl drain` of a node does the same for that node.
    #[serde(default)]
    pub mode: NodeMode,
    /// What is left on the nodes when the pool is deleted.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
    /// Write `yes-really-destroy-the-data` to allow what `Wipe` says. A deletion with `Wipe` and without it waits, with the
    /// condition `DeletionBlocked`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wipe_confirmation: Option<ConfirmationText>,
}

/// Raw block devices, by their stable names.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceClaim {
    /// Names under `/dev/disk/by-id/`, with `*` and `?`. A device that matches several is taken once. Other names change when
    /// a machine starts.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub globs: Vec<DeviceGlob>,
    /// Devices to take on each node, at the most: those in use, then those with a pool on them, then the first by name.
    #[serde(default = "devices_per_node")]
    #[schemars(range(min = 1, max = 32))]
    pub max_per_node: u32,
    /// Bytes of each device to use. Absent: all. May only grow.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 1048576 && quantity(self).asInteger() <= 17592186044416 && \
        quantity(self).asInteger() % 4096 == 0")
        .message("devices.size is 1Mi to 16Ti and a multiple of 4Ki: round it"))]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity(oldSelf)) >= 0")
        .message("devices.size may only grow, since blocks lie behind a smaller one: make a new SSDPool"))]
    pub size: Option<Quantity>,
    /// What happens to a device that carries a file system, a partition table or another program's data.
    #[serde(default)]
    pub foreign_signatures: ForeignSignatures,
    /// Share of a controller's queue pairs that may be lent to GPUs; the rest stays with the kernel.
    #[serde(default = "gpu_queue_percent")]
    #[schemars(range(min = 0, max = 75))]
    pub max_gpu_queue_percent: Percent,
}

/// One file in a directory of each node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DirectoryClaim {
    /// The directory on the node; made when it is not there. XFS or ext4 on the device that is meant. Cannot be changed.
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("directory.path cannot be changed, the data lies there: make a new SSDPool"))]
    #[x_kube(validation = Rule::new("!['/bin', '/boot', '/dev', '/etc', '/lib', '/proc', '/run', '/sbin', '/sys', '/tmp', '/usr', \
        '/var'].exists(system, self == system) && !['/boot/', '/dev/', '/etc/', '/proc/', '/sys/', '/usr/'] \
        .exists(system, self.startsWith(system))")
        .message("directory.path is one of the system's own: use a directory of its own, for example /var/lib/reprise/pool"))]
    pub path: HostPath,
    /// Bytes of the file, allocated when it is made. May only grow.
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 1048576 && quantity(self).asInteger() <= 17592186044416 && \
        quantity(self).asInteger() % 4096 == 0")
        .message("directory.size is 1Mi to 16Ti and a multiple of 4Ki: round it"))]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity(oldSelf)) >= 0")
        .message("directory.size may only grow, since blocks lie behind a smaller one: make a new SSDPool"))]
    pub size: Quantity,
}

/// One volume for each node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeClaim {
    /// Storage class of the volumes. Cannot be changed.
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("claims.storageClassName cannot be changed, the volumes are made: make a new SSDPool"))]
    pub storage_class_name: Name,
    /// Bytes of each volume. May only grow.
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity(oldSelf)) >= 0")
        .message("claims.size may only grow, as volumes do: make a new SSDPool"))]
    pub size: Quantity,
}

/// How full devices get.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Watermarks {
    /// Thousandths of the pool kept free ahead of writes. Below it blocks are evicted. 30 of 30 TB are 15 minutes of writing at 1 GB/s. All pools of a
    /// cluster have the same; a change restarts its agents, once all have it.
    #[serde(default = "free_permille")]
    #[schemars(range(min = 0, max = 900))]
    pub free_permille: Permille,
}

/// What a device must keep to. What a device does not tell is not compared.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthThresholds {
    /// Media errors, more than which are too many: those that the agent has met since it opened the device (reads and writes that the kernel gave up, or
    /// that never came back), or those that the drive tells of its whole life, whichever are more. NVMe drives tell theirs once a minute, if the agent
    /// has the right CAP_SYS_ADMIN, as with `deviceAccess.mode` `Privileged` only. A device with more is told of, `Degraded` with the reason `DeviceWorn`. Absent:
    /// not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_media_errors: Option<u32>,
    /// Spare capacity that the device tells, less than which is too little; it is told of in the same way. Only NVMe drives tell it, and only to an agent
    /// with CAP_SYS_ADMIN, as with `deviceAccess.mode` `Privileged` only; where `status.devices[].sparePercent` of the `CacheNode` is absent, nothing is compared.
    /// Absent: not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_spare_percent: Option<Percent>,
    /// Longest time that a read may take, from its submission to its end, 99 of 100 within a minute in which there are at least 100. A
    /// device that takes longer is told of, `Degraded` with the reason `DeviceSlow`, until it takes 4/5 of it at the most or has not been
    /// read from for a minute. Changes at once; no device is closed. Absent: not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1ms') && duration(self) <= duration('60s')")
        .message("health.maxReadLatency is 1ms to 60s: choose a time between"))]
    pub max_read_latency: Option<Span>,
}

/// What the nodes of the pool say, added up. What each node has is in its CacheNode.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SSDPoolStatus {
    /// Generation of the spec that this status was found for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Nodes of the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<PoolNodes>,
    /// Devices or files of all nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<PoolDevices>,
    /// Bytes of all nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<PoolCapacity>,
    /// Engines that are really in effect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["engine".into()]))]
    pub effective_engines: Vec<EngineUse>,
    /// What is so: `Ready`, `Accepted`, `DevicesDiscovered`, `Degraded`, `Cordoned`, `Drained`, `EngineFallback`, `DeletionBlocked`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Nodes, counted.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolNodes {
    /// Nodes that the pool selects.
    pub selected: u32,
    /// Nodes of which all devices are open.
    pub ready: u32,
    /// Nodes that refused the claim, because of foreign data or because the engine cannot be had.
    pub refused: u32,
}

/// Devices or files, counted.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolDevices {
    /// Devices that match.
    pub matched: u32,
    /// Devices that are open.
    pub open: u32,
    /// Devices that failed or were given up.
    pub faulted: u32,
}

/// Bytes of a pool.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolCapacity {
    /// Bytes of open devices.
    pub total: Quantity,
    /// Bytes of blocks, their headers included.
    pub used: Quantity,
    /// Bytes that tenants are sure of.
    pub reserved: Quantity,
}

/// How many nodes use an engine.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineUse {
    /// The engine.
    pub engine: Engine,
    /// Nodes that use it.
    pub nodes: u32,
}

fn segment_size() -> Quantity {
    Quantity::new("64Mi")
}

fn queue_depth() -> u32 {
    128
}

fn devices_per_node() -> u32 {
    DEVICES_PER_NODE_MAX
}

fn gpu_queue_percent() -> Percent {
    Percent(50)
}

fn free_permille() -> Permille {
    Permille(30)
}

impl Default for Watermarks {
    fn default() -> Watermarks {
        of_nothing()
    }
}
