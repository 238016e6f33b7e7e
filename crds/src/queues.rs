//! `GPUQueueAllocation`: NVMe queue pairs of one node, reserved for one GPU.
//!
//! The spec is immutable, as that of a resource claim: a change is a new object. The operator sums the
//! requests for each controller and grants them within the pool's `maxGpuQueuePercent`. The agent reserves
//! the granted queue pairs. Engines of the node create them, if the agent drives the controller; `Programmed` and
//! the numbers in the status follow. The agent deletes and releases them before the finalizer is removed.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{GpuUuid, NodeName, ObjectRef, PciAddress, Quantity, Serial, Span, Text, choice};
use crate::status::Condition;

/// Requested queue pairs for one GPU of one node. Immutable.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "reprise.dev",
    version = "v1alpha1",
    kind = "GPUQueueAllocation",
    plural = "gpuqueueallocations",
    shortname = "gqa",
    category = "reprise",
    namespaced,
    status = "GPUQueueAllocationStatus",
    derive = "PartialEq",
    selectable = ".spec.nodeName",
    doc = "NVMe queue pairs of one node, reserved for one GPU, so that GPU kernels can read and write blocks directly. \
           The operator grants them and the node's agent reserves them. Engines of the node create them, in a pool whose \
           controllers the agent drives (engine UserNvme).",
    validation = Rule::new("size(self.metadata.name) <= 63")
        .message("the allocation's name is longer than 63 characters, the most for a label value: use at most 63 characters"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "GPU", type_ = "string", json_path = ".spec.gpuUuid", priority = 1),
    printcolumn(name = "Pool", type_ = "string", json_path = ".spec.poolRef.name"),
    printcolumn(name = "Pairs", type_ = "integer", json_path = ".spec.queuePairs"),
    printcolumn(name = "Allocated", type_ = "string", json_path = ".status.conditions[?(@.type==\"Allocated\")].status"),
    printcolumn(name = "Programmed", type_ = "string", json_path = ".status.conditions[?(@.type==\"Programmed\")].status"),
    printcolumn(name = "Queues", type_ = "string", json_path = ".status.queues"),
    printcolumn(name = "Expires", type_ = "date", json_path = ".status.expiresAt"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Allocated\")].reason", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(validation = Rule::new("self == oldSelf")
    .message("the spec of an allocation is immutable: create a new GPUQueueAllocation and delete this one"))]
#[x_kube(validation = Rule::new("self.qos != 'Guaranteed' || self.isolation == 'ExclusiveController'")
    .message("qos Guaranteed needs an exclusive controller: set isolation to ExclusiveController, or qos to Burstable"))]
#[x_kube(validation = Rule::new("self.qos != 'BestEffort' || has(self.ttl)")
    .message("qos BestEffort needs a time to live: set ttl, or qos to Burstable"))]
pub struct GPUQueueAllocationSpec {
    /// Node of the GPU and of the devices.
    pub node_name: NodeName,
    /// UUID of the GPU, as shown by `nvidia-smi -L`.
    pub gpu_uuid: GpuUuid,
    /// Pool whose controllers provide the queue pairs. It must have raw `devices`, or engine `UserNvme`, whose
    /// controllers engines can use.
    pub pool_ref: ObjectRef,
    /// Queue pairs on each controller of the pool. With `ExclusiveController`: on one controller without
    /// other users.
    #[schemars(range(min = 1, max = 128))]
    pub queue_pairs: u32,
    /// Maximum entries of each queue.
    #[serde(default = "depth")]
    #[x_kube(validation = Rule::new("self in [32, 64, 128, 256, 512, 1024, 2048, 4096]")
        .message("depth is not a power of two from 32 to 4096: round it"))]
    pub depth: u32,
    /// Maximum memory that engines register for commands of these queue pairs, from 2Mi to 1Pi. The agent rejects requests
    /// for queue pairs above it. Absent: the limit of each session, 1Ti.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('2Mi')) >= 0 && quantity(self).compareTo(quantity('1Pi')) <= 0")
        .message("registeredMemory is outside 2Mi to 1Pi: set a size in that range"))]
    pub registered_memory: Option<Quantity>,
    /// Sharing of the controllers with other allocations.
    #[serde(default)]
    pub isolation: QueueIsolation,
    /// Preemption of the allocation when queue pairs are scarce.
    #[serde(default)]
    pub qos: QueueQos,
    /// SlackProfile of the engines that hold these queue pairs, while they compute its model. Absent: the first profile of
    /// their model by name. It has an effect on nodes that have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slack_profile_ref: Option<ObjectRef>,
    /// Time to live of the grant, from 1m to 720h; it is released afterwards. Absent: until the object is
    /// deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1m') && duration(self) <= duration('720h')")
        .message("ttl is outside 1m to 720h: set a duration in that range"))]
    pub ttl: Option<Span>,
}

choice! {
    /// Sharing of a controller with other allocations.
    QueueIsolation {
        /// Other trusted allocations use the same controller. Any queue of a controller reaches the whole device
        /// and all memory that is mapped for the controller, so a user of one queue can access the data of the others.
        TrustedShared,
        /// No other allocation uses the controller.
        ExclusiveController,
    }
    default TrustedShared
}

choice! {
    /// Preemption of the allocation when queue pairs are scarce.
    QueueQos {
        /// The allocation is never preempted.
        Guaranteed,
        /// A guaranteed allocation can preempt it, after all `BestEffort` allocations.
        Burstable,
        /// The allocation is preempted first.
        BestEffort,
    }
    default Burstable
}

/// Observed state of the allocation.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GPUQueueAllocationStatus {
    /// Generation of the spec that this status was computed for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Granted queue pairs by controller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["serial".into()]))]
    pub allocations: Vec<QueueGrant>,
    /// Numbers of the existing queue pairs, for display. With several controllers, their serial numbers come first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<Text>,
    /// End of the grant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Time>,
    /// Conditions: `Accepted`, `Allocated`, `Programmed`, `Released`, `DeletionBlocked`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Queue pairs on one controller.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueGrant {
    /// Serial number of the controller.
    pub serial: Serial,
    /// Address on the PCI bus.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_address: Option<PciAddress>,
    /// Number of reserved queue pairs.
    pub queue_pairs: u32,
    /// Numbers of the queue pairs that exist. Engines create them, and they end with the engine's session.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    pub queues: Vec<u32>,
    /// Generation of the last of `queues`, which the agent counts from its start. A controller uses numbers again; a
    /// queue pair that has the number of a deleted one has a higher generation. Absent: none exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub generation: Option<i64>,
}

pub(crate) fn depth() -> u32 {
    1024
}
