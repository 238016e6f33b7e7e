//! `SSDPool`: devices or directories of selected nodes that hold blocks.
//!
//! One object applies to many nodes: the operator writes a claim into the `CacheNode` of each selected
//! node. An agent has one pool of devices. Settings of the whole agent (`segmentSize`, `queueDepth`,
//! `eviction`, `admission`, `dailyWriteBudget`, `watermarks`) must therefore be equal in all pools of a cluster. The
//! operator rejects a pool that differs from the oldest one.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::cluster::{Admission, EvictionPolicy};
use crate::fields::{
    ConfirmationText, DeletionPolicy, DeviceClass, DeviceGlob, Engine, FallbackEngine, ForeignSignatures,
    HostPath, LabelSelector, Name, NodeMode, Percent, Permille, Quantity, Serial, Span, from_defaults,
};
use crate::status::Condition;

/// Upper bound on the devices of one node; the agent's limit.
pub const DEVICES_PER_NODE_MAX: u32 = 32;

/// Share of queue pairs of a controller that may be allocated to GPUs, unless `maxGpuQueuePercent` is set.
pub const GPU_QUEUE_PERCENT_DEFAULT: Percent = Percent(50);

/// Desired state of a pool: storage, nodes and settings.
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
    doc = "Devices or directories on selected nodes that hold blocks of the cache. The loss of a device or a pool \
           reduces the capacity and causes recomputation, never an outage.",
    validation = Rule::new("size(self.metadata.name) <= 40")
        .message("the pool's name is longer than 40 characters, the most for derived names: choose a shorter name"),
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
    .message("a pool needs exactly one of devices, directory and claims: set one of them and remove the others"))]
#[x_kube(validation = Rule::new("has(self.devices) == has(oldSelf.devices) && has(self.directory) == has(oldSelf.directory) \
    && has(self.claims) == has(oldSelf.claims)")
    .message("the storage of a pool (devices, directory or claims) is immutable: create a new SSDPool and delete this one"))]
#[x_kube(validation = Rule::new("!(self.engine in ['IoUringCmd', 'GpuQueue']) || has(self.devices)")
    .message("engines IoUringCmd and GpuQueue require raw devices: use devices, or engine IoUring or Plain"))]
#[x_kube(validation = Rule::new("!has(self.devices) || (self.devices.class == 'NvmeController') == (self.engine == 'UserNvme')")
    .message("engine UserNvme and devices of class NvmeController need each other: set both, or another engine and class"))]
#[x_kube(validation = Rule::new("self.engine != 'UserNvme' || self.fallbackEngine == 'None'")
    .message("the kernel does not serve controllers of engine UserNvme: set fallbackEngine to None"))]
#[x_kube(validation = Rule::new("self.fallbackEngine != self.engine")
    .message("fallbackEngine is equal to engine: set another engine, or None to keep devices closed without it"))]
#[x_kube(validation = Rule::new("!has(self.wipeConfirmation) || self.deletionPolicy == 'Wipe' || \
    (has(self.devices) && self.devices.foreignSignatures == 'Wipe')")
    .message("wipeConfirmation is set, but the pool wipes nothing: remove it, or set deletionPolicy or devices.foreignSignatures to Wipe"))]
#[x_kube(validation = Rule::new("!has(self.devices) || self.devices.foreignSignatures != 'Wipe' || has(self.wipeConfirmation)")
    .message("devices.foreignSignatures Wipe needs a confirmation: set wipeConfirmation to yes-really-destroy-the-data"))]
pub struct SSDPoolSpec {
    /// Selects nodes of the pool, among the nodes that have an agent. Empty: all of them. An agent whose
    /// node is no longer selected closes its devices and keeps their data. A device or directory that several pools
    /// name on a node belongs to the oldest of them.
    #[serde(default)]
    pub node_selector: LabelSelector,
    /// Raw block devices, or NVMe controllers that agents drive themselves. Agents need access to them (`agents.deviceAccess` of the KVCacheCluster).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<DeviceClaim>,
    /// One preallocated file in a directory of each node. Needs no privileges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<DirectoryClaim>,
    /// A volume for each node, by storage class. Not in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claims: Option<VolumeClaim>,
    /// I/O engine for the devices. A change reopens the devices and keeps the blocks. The status reports
    /// the engines in effect.
    #[serde(default)]
    pub engine: Engine,
    /// Fallback for nodes that do not support `engine`, for example because a seccomp profile forbids
    /// io_uring. The condition `EngineFallback` lists the nodes that use the fallback, `Degraded` the nodes
    /// that keep devices closed.
    #[serde(default)]
    pub fallback_engine: FallbackEngine,
    /// Allocation unit on a device, a multiple of 2Mi from 2Mi to 1Gi. It must hold at least one block and
    /// its header of 4 KiB. Immutable.
    #[serde(default = "segment_size")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 2097152 && quantity(self).asInteger() <= 1073741824 && \
        quantity(self).asInteger() % 2097152 == 0")
        .message("segmentSize is not a multiple of 2Mi from 2Mi to 1Gi: round it"))]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("segmentSize is immutable because devices are formatted with it: create a new SSDPool"))]
    pub segment_size: Quantity,
    /// Concurrent operations of each device. Must be equal to that of the oldest pool of the cluster. Agents restart to
    /// apply a change of the oldest pool.
    #[serde(default = "queue_depth")]
    #[schemars(range(min = 1, max = 1024))]
    pub queue_depth: u32,
    /// Eviction policy on devices. Must be equal to that of the oldest pool of the cluster. Agents restart to apply a
    /// change of the oldest pool.
    #[serde(default)]
    pub eviction: EvictionPolicy,
    /// Rule by which saved blocks are written to devices. Other blocks stay in memory until they are evicted there.
    /// Must be equal to that of the oldest pool of the cluster. Agents restart to apply a change of the oldest pool.
    #[serde(default)]
    pub admission: Admission,
    /// Bytes that each device may write in any 24 hours, to limit its wear. A hundredth of it can be written at once.
    /// Blocks beyond it stay in memory until they are evicted there. Absent: no limit. Must be equal to that of the
    /// oldest pool of the cluster. Agents restart to apply a change of the oldest pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('1Gi')) >= 0")
        .message("dailyWriteBudget is below 1Gi: set 1Gi or more, or remove it for unlimited writes"))]
    pub daily_write_budget: Option<Quantity>,
    /// Free space kept on devices.
    #[serde(default)]
    pub watermarks: Watermarks,
    /// Health thresholds of devices. A device beyond a threshold is reported by `Degraded` and stays in
    /// use. A failed device is closed and its blocks are dropped, regardless of thresholds.
    #[serde(default)]
    pub health: HealthThresholds,
    /// Mode of the pool's nodes. `kubectl drain` of a node has the effect of `Draining` for that node.
    #[serde(default)]
    pub mode: NodeMode,
    /// Handling of the data when the pool is deleted.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
    /// Set to `yes-really-destroy-the-data` to confirm `Wipe`. Without it, a deletion with `Wipe` waits
    /// with the condition `DeletionBlocked`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wipe_confirmation: Option<ConfirmationText>,
}

/// Raw devices, by their stable names.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.globs.all(glob, glob.startsWith('/sys/bus/pci/devices/') == (self.class == 'NvmeController'))")
    .message("globs do not fit the class: use /dev/disk/by-id/ for block devices, and /sys/bus/pci/devices/ for NVMe controllers"))]
#[x_kube(validation = Rule::new("self.class == 'NvmeController' || (!has(self.serials) && !has(self.namespaceId))")
    .message("serials and namespaceId are for devices of class NvmeController: remove them, or set class"))]
pub struct DeviceClaim {
    /// Class of the devices. Immutable.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("devices.class is immutable: create a new SSDPool and delete this one"))]
    pub class: DeviceClass,
    /// Patterns of names under `/dev/disk/by-id/`, with `*` and `?`. Other device names can change on
    /// reboot. A device with several matching names is used once. For class `NvmeController`: patterns of PCI
    /// addresses under `/sys/bus/pci/devices/`; a pattern with `*` or `?` matches only controllers that are
    /// bound to vfio-pci.
    #[schemars(length(min = 1, max = 16))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub globs: Vec<DeviceGlob>,
    /// Accepted serial numbers of NVMe controllers. A controller with another one is not used. Absent: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub serials: Vec<Serial>,
    /// Namespace of NVMe controllers. Absent: the only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub namespace_id: Option<u32>,
    /// Upper bound on devices per node. Devices in use take precedence, then block devices with pool data,
    /// then the order of names.
    #[serde(default = "devices_per_node")]
    #[schemars(range(min = 1, max = 32))]
    pub max_per_node: u32,
    /// Bytes of each device to use. Absent: the whole device. Must not decrease.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 1048576 && quantity(self).asInteger() <= 140737488355328 && \
        quantity(self).asInteger() % 4096 == 0")
        .message("devices.size is not a multiple of 4Ki from 1Mi to 128Ti: round it"))]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity(oldSelf)) >= 0")
        .message("devices.size must not decrease because blocks would be lost: create a new SSDPool"))]
    pub size: Option<Quantity>,
    /// Handling of devices with a file system, a partition table or another program's data.
    #[serde(default)]
    pub foreign_signatures: ForeignSignatures,
    /// Share of a controller's queue pairs that may be allocated to GPUs, in percent. The rest stays with the
    /// kernel, or with the agent that drives the controller.
    #[serde(default = "gpu_queue_percent")]
    #[schemars(range(min = 0, max = 75))]
    pub max_gpu_queue_percent: Percent,
}

/// One file in a directory of each node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DirectoryClaim {
    /// Directory on the node, on XFS or ext4. The agent creates it if it does not exist. Make sure that the
    /// intended file system is mounted there. Immutable.
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("directory.path is immutable because the data is stored there: create a new SSDPool"))]
    #[x_kube(validation = Rule::new("!['/bin', '/boot', '/dev', '/etc', '/lib', '/proc', '/run', '/sbin', '/sys', '/tmp', '/usr', \
        '/var'].exists(system, self == system) && !['/boot/', '/dev/', '/etc/', '/proc/', '/sys/', '/usr/'] \
        .exists(system, self.startsWith(system))")
        .message("directory.path is a system directory: use a dedicated directory, for example /var/lib/reprise/pool"))]
    pub path: HostPath,
    /// Size of the file, allocated on creation. Must not decrease.
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 1048576 && quantity(self).asInteger() <= 140737488355328 && \
        quantity(self).asInteger() % 4096 == 0")
        .message("directory.size is not a multiple of 4Ki from 1Mi to 128Ti: round it"))]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity(oldSelf)) >= 0")
        .message("directory.size must not decrease because blocks would be lost: create a new SSDPool"))]
    pub size: Quantity,
    /// Bytes that stay available to others on the file system when the file is created or grows. Absent:
    /// 5 % of the file system, at least 1Gi. An agent that finds less space does not open the file, and
    /// reports the possible size.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('128Ti')) <= 0")
        .message("directory.reserve is above 128Ti, the most that a pool can have: set fewer bytes"))]
    pub reserve: Option<Quantity>,
}

/// One volume for each node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeClaim {
    /// Storage class of the volumes. Immutable.
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("claims.storageClassName is immutable because the volumes exist: create a new SSDPool"))]
    pub storage_class_name: Name,
    /// Size of each volume. Must not decrease.
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity(oldSelf)) >= 0")
        .message("claims.size must not decrease, as volumes cannot shrink: create a new SSDPool"))]
    pub size: Quantity,
}

/// Free space kept on devices.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Watermarks {
    /// Thousandths of the pool kept free for writes; below it, blocks are evicted. Must be equal to those of the
    /// oldest pool of the cluster. For scale: 30 of a 30 TB pool is 15 minutes of writes at 1 GB/s. Agents restart
    /// to apply a change of the oldest pool.
    #[serde(default = "free_permille")]
    #[schemars(range(min = 0, max = 900))]
    pub free_permille: Permille,
}

/// Health thresholds of devices. A value that the device does not report is not checked.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthThresholds {
    /// Upper bound on media errors. Above it, the pool has the condition `Degraded` with the reason
    /// `DeviceWorn`. Absent: not checked. The count is the larger of two: errors since the agent opened the
    /// device, or errors over the drive's lifetime. An error is a read or write that the kernel failed or
    /// that did not complete. NVMe drives report lifetime errors once a minute, and only to an agent with
    /// CAP_SYS_ADMIN, for example with `deviceAccess.mode` `Privileged`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_media_errors: Option<u32>,
    /// Lower bound on the spare capacity in percent. Below it, the pool has the condition `Degraded` with
    /// the reason `DeviceWorn`. Absent: not checked. Only NVMe drives report spare capacity, and only to an
    /// agent with CAP_SYS_ADMIN, for example with `deviceAccess.mode` `Privileged`. Without a value in
    /// `status.devices[].sparePercent` of the CacheNode, nothing is checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_spare_percent: Option<Percent>,
    /// Upper bound on the 99th percentile of read latency, from 1ms to 60s. Absent: not checked. A change
    /// applies at once and closes no device. It is measured from submission to completion, over each minute
    /// with at least 100 reads. Above it, the pool has the condition `Degraded` with the reason
    /// `DeviceSlow`. The device recovers when the latency is at most 4/5 of the bound, or after a minute
    /// without reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1ms') && duration(self) <= duration('60s')")
        .message("health.maxReadLatency is outside 1ms to 60s: set a duration in that range"))]
    pub max_read_latency: Option<Span>,
}

/// Observed state of the pool, summed over its nodes. The state of each node is in its CacheNode.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SSDPoolStatus {
    /// Generation of the spec that this status was computed for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Counts of the pool's nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<PoolNodes>,
    /// Counts of devices or files on all nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub devices: Option<PoolDevices>,
    /// Capacity and usage of all nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<PoolCapacity>,
    /// I/O engines in effect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["engine".into()]))]
    pub effective_engines: Vec<EngineUse>,
    /// Conditions: `Ready`, `Accepted`, `DevicesDiscovered`, `Degraded`, `Cordoned`, `Drained`,
    /// `EngineFallback`, `DeletionBlocked`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Counts of the pool's nodes.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolNodes {
    /// Number of selected nodes.
    pub selected: u32,
    /// Number of nodes with all devices open.
    pub ready: u32,
    /// Number of nodes that rejected the claim, because of foreign data or an unavailable engine.
    pub refused: u32,
}

/// Counts of devices or files.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolDevices {
    /// Number of matching devices.
    pub matched: u32,
    /// Number of open devices.
    pub open: u32,
    /// Number of failed devices.
    pub faulted: u32,
}

/// Capacity and usage of a pool.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolCapacity {
    /// Size of all open devices in bytes.
    pub total: Quantity,
    /// Bytes of blocks, including their headers.
    pub used: Quantity,
    /// Bytes reserved for tenants.
    pub reserved: Quantity,
}

/// Number of nodes with an engine.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineUse {
    /// I/O engine in effect.
    pub engine: Engine,
    /// Number of nodes with the engine.
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
    GPU_QUEUE_PERCENT_DEFAULT
}

fn free_permille() -> Permille {
    Permille(30)
}

impl Default for Watermarks {
    fn default() -> Watermarks {
        from_defaults()
    }
}
