//! `CacheNode`: the desired and the observed state of one node of a cluster.
//!
//! The object has the name of its node and is owned by it. The operator writes the spec, which contains
//! everything that an agent needs and may read. The agent writes the status by server-side apply. An
//! admission policy confines each agent to its own node, by the node name in its token. The only status
//! field of the operator is the condition `ModeApplied`.
//!
//! This layout keeps lists of nodes out of all other objects, and no two nodes write to one object.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{
    ClusterRef, DeviceGlob, Digest, Engine, FallbackEngine, ForeignSignatures, HostPath, LabelValue, Name,
    NodeMode, NodeName, Percent, Quantity, Serial, ShortName, Span, Text, Uid,
};
use crate::queues::QueueIsolation;

mod status;

pub use status::{
    AgentInfo, Applied, AppliedPool, AppliedProfile, AppliedQueues, CacheNodeStatus, Controller,
    CreatedQueues, Device, DeviceState, Drain, Endpoints, Gpu, NodeCapacity, PageKind, Registration,
};

/// Desired state of one node.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "reprise.dev",
    version = "v1alpha1",
    kind = "CacheNode",
    plural = "cachenodes",
    shortname = "cnode",
    category = "reprise",
    status = "CacheNodeStatus",
    derive = "PartialEq",
    selectable = ".spec.nodeName",
    doc = "One node of a cluster, under the node's name. The operator writes the desired state to the spec. The node's agent \
           writes the observed state to the status. Not meant to be edited by users.",
    validation = Rule::new("self.metadata.name == self.spec.nodeName")
        .message("a CacheNode has the name of its node: set metadata.name and spec.nodeName to the same name"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"AgentReady\")].status"),
    printcolumn(name = "Version", type_ = "string", json_path = ".status.agent.version"),
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "DRAM", type_ = "string", json_path = ".status.capacity.dramTotal"),
    printcolumn(name = "SSD", type_ = "string", json_path = ".status.capacity.ssdTotal"),
    printcolumn(name = "SSD Used", type_ = "string", json_path = ".status.capacity.ssdUsed"),
    printcolumn(name = "Engine", type_ = "string", json_path = ".status.devices[0].engine"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"AgentReady\")].reason", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct CacheNodeSpec {
    /// Name of the node. Immutable.
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("nodeName is immutable: create a new CacheNode"))]
    pub node_name: NodeName,
    /// Cluster that the node's agent belongs to. Absent: no cluster selects the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_ref: Option<ClusterRef>,
    /// Mode of the node: that of its pools, or `Draining` during a `kubectl drain` of the node.
    #[serde(default)]
    pub mode: NodeMode,
    /// Failure domain of the node: the value of its label `agents.failureDomainLabel`. Absent: unknown. The
    /// agent registers with the control plane again when it changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<LabelValue>,
    /// Digest of the configuration file that the agent must run with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configuration_digest: Option<Digest>,
    /// Devices and files that the agent opens, by pool. Removing a claim closes them; their data stays
    /// unless `wipe` is set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pool".into()]))]
    pub claims: Vec<PoolClaim>,
    /// Profiles that the agent validates and keeps ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub profiles: Vec<ProfileClaim>,
    /// Queue pairs that the agent reserves for GPUs, and that engines of the node may create. Removing an entry deletes
    /// and releases them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub queues: Vec<QueueClaim>,
}

/// Devices or a file of the node, claimed by one pool.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.globs) && size(self.globs) > 0) != has(self.file)")
    .message("a claim is for devices or for a file: set exactly one of globs and file"))]
pub struct PoolClaim {
    /// Name of the SSDPool.
    pub pool: ShortName,
    /// UID of the SSDPool. A pool that is re-created under the same name has another UID.
    pub uid: Uid,
    /// Generation of the pool's spec that this claim was made from.
    #[schemars(range(min = 0))]
    pub generation: i64,
    /// Patterns of device names, as in the pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub globs: Vec<DeviceGlob>,
    /// Accepted serial numbers of NVMe controllers, as in the pool. Empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub serials: Vec<Serial>,
    /// Namespace of NVMe controllers. Absent: the only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub namespace_id: Option<u32>,
    /// Upper bound on the devices used on the node.
    #[serde(default = "devices_per_node")]
    #[schemars(range(min = 1, max = 32))]
    pub max_devices: u32,
    /// Path of the file. The agent creates and allocates it if it does not exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<HostPath>,
    /// Bytes to use of each device or of the file. Absent: each device completely.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Quantity>,
    /// Bytes that stay available to others on the file system of the file. Absent: 5 % of the file system,
    /// at least 1Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve: Option<Quantity>,
    /// I/O engine for the devices.
    #[serde(default)]
    pub engine: Engine,
    /// Fallback if the node does not support `engine`.
    #[serde(default)]
    pub fallback_engine: FallbackEngine,
    /// Handling of devices that carry other data.
    #[serde(default)]
    pub foreign_signatures: ForeignSignatures,
    /// Upper bound on the 99th percentile of read latency within a minute. Absent: not checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_read_latency: Option<Span>,
    /// Media errors above which a device counts as worn. Absent: not checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_media_errors: Option<u32>,
    /// Spare capacity in percent below which a device counts as worn. Absent: not checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_spare_percent: Option<Percent>,
    /// If true, the agent destroys the data on these devices and reports it. The operator then removes the
    /// claim.
    #[serde(default)]
    pub wipe: bool,
}

/// One profile that the agent validates and keeps ready.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProfileClaim {
    /// Name of the SlackProfile.
    pub name: Name,
    /// Digest of the desired revision. Its content is part of the agent's configuration.
    pub digest: Digest,
}

/// Queue pairs that are reserved for a GPU of the node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueClaim {
    /// UID of the GPUQueueAllocation.
    pub uid: Uid,
    /// Namespace and name of the GPUQueueAllocation, for display only.
    pub allocation: Text,
    /// Sharing of the controllers with other allocations.
    #[serde(default)]
    pub isolation: QueueIsolation,
    /// Maximum entries of each queue.
    #[serde(default = "crate::queues::depth")]
    #[schemars(range(min = 2, max = 4096))]
    pub depth: u32,
    /// Maximum memory that engines register for commands of these queue pairs. Absent: no limit of the allocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registered_memory: Option<Quantity>,
    /// Name of the SlackProfile of the engines that hold these queue pairs. Absent: the first one of their model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slack_profile: Option<ShortName>,
    /// Queue pairs by controller.
    #[schemars(length(min = 1, max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["serial".into()]))]
    pub controllers: Vec<ControllerShare>,
}

/// Queue pairs on one controller.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ControllerShare {
    /// Serial number of the controller.
    pub serial: Serial,
    /// Number of queue pairs.
    #[schemars(range(min = 1, max = 128))]
    pub queue_pairs: u32,
}

fn devices_per_node() -> u32 {
    crate::pool::DEVICES_PER_NODE_MAX
}
