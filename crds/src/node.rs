//! `CacheNode`: one node of a cluster: what the operator wants of it, and what its agent says.
//!
//! The object has the name of its node and belongs to it. The operator writes the spec, which is all that an agent needs to
//! know and may read; the agent writes the status, by server-side apply and confined to its own node by an admission policy on
//! the node's name in its token. Of the status the operator has one condition, `ModeApplied`. So no other object carries a list of nodes, and no two nodes write to one object.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{
    ClusterRef, DeviceGlob, Digest, Engine, FallbackEngine, ForeignSignatures, HostPath, Name, NodeMode,
    NodeName, Percent, Quantity, Serial, ShortName, Span, Text, Uid,
};
use crate::queues::QueueIsolation;

mod status;

pub use status::{
    AgentInfo, Applied, AppliedPool, AppliedProfile, AppliedQueues, CacheNodeStatus, Controller, Device,
    DeviceState, Drain, Endpoints, Gpu, NodeCapacity, PageKind, Registration,
};

/// What is wanted of one node.
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
    doc = "One node of a cluster, under the node's name. The operator writes what it wants of it, the node's agent what is there. \
           Not meant to be edited by people.",
    validation = Rule::new("self.metadata.name == self.spec.nodeName")
        .message("a CacheNode has the name of its node: write the same name in metadata.name and spec.nodeName"),
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
    /// The node. Cannot be changed.
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("a CacheNode is of one node for good: make a new CacheNode"))]
    pub node_name: NodeName,
    /// The cluster that the node's agent belongs to. Absent: none yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_ref: Option<ClusterRef>,
    /// What the node is used for: what its pools say, or `Draining` while somebody drains the node.
    #[serde(default)]
    pub mode: NodeMode,
    /// Digest of the configuration file that the agent should run by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configuration_digest: Option<Digest>,
    /// What the agent should open. Claims that are gone are closed; what is on them stays unless `wipe` says otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pool".into()]))]
    pub claims: Vec<PoolClaim>,
    /// Profiles that the agent should have ready. Nothing on the data path uses them in this release.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub profiles: Vec<ProfileClaim>,
    /// Queue pairs that are granted to GPUs and that the agent should keep for them. One that is gone is let go of. No agent of this release makes
    /// queues of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["uid".into()]))]
    pub queues: Vec<QueueClaim>,
}

/// What one pool wants of the node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.globs) && size(self.globs) > 0) != has(self.file)")
    .message("a claim is for devices or for a file: set exactly one of globs and file"))]
pub struct PoolClaim {
    /// The SSDPool.
    pub pool: ShortName,
    /// Its unique id; a pool of the same name that comes later is another one.
    pub uid: Uid,
    /// Generation of the pool's spec that this claim was made from.
    #[schemars(range(min = 0))]
    pub generation: i64,
    /// Names of devices, as in the pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub globs: Vec<DeviceGlob>,
    /// Devices to take, at the most.
    #[serde(default = "devices_per_node")]
    #[schemars(range(min = 1, max = 32))]
    pub max_devices: u32,
    /// A file, made and allocated when it is not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<HostPath>,
    /// Bytes of each device or of the file. Absent: all of a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Quantity>,
    /// How devices are driven.
    #[serde(default)]
    pub engine: Engine,
    /// What happens where the engine cannot be had.
    #[serde(default)]
    pub fallback_engine: FallbackEngine,
    /// What happens to devices with somebody else's data.
    #[serde(default)]
    pub foreign_signatures: ForeignSignatures,
    /// Longest time that 99 of 100 reads of a minute may take. Absent: not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_read_latency: Option<Span>,
    /// Media errors, more than which a device is worn. Absent: not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_media_errors: Option<u32>,
    /// Spare capacity, less than which a device is worn. Absent: not compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_spare_percent: Option<Percent>,
    /// Set: the agent destroys the data of these devices and says so, then the claim goes.
    #[serde(default)]
    pub wipe: bool,
}

/// One profile that the agent should have ready.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProfileClaim {
    /// The SlackProfile.
    pub name: Name,
    /// Digest of the wanted revision, whose content comes with the agent's configuration.
    pub digest: Digest,
}

/// Queue pairs that are granted to a GPU of the node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueClaim {
    /// Unique id of the GPUQueueAllocation.
    pub uid: Uid,
    /// Its namespace and name, for people.
    pub allocation: Text,
    /// Who else may use the controllers.
    #[serde(default)]
    pub isolation: QueueIsolation,
    /// Queue pairs by controller.
    #[schemars(length(min = 1, max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["serial".into()]))]
    pub controllers: Vec<ControllerShare>,
}

/// Queue pairs of one controller.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ControllerShare {
    /// Serial number of the controller.
    pub serial: Serial,
    /// How many.
    #[schemars(range(min = 1, max = 128))]
    pub queue_pairs: u32,
}

fn devices_per_node() -> u32 {
    crate::pool::DEVICES_PER_NODE_MAX
}
