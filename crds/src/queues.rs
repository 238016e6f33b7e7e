//! `GPUQueueAllocation`: NVMe queue pairs of one node, lent to one GPU.
//!
//! Immutable, as a resource claim is: a change is a new object. The operator adds up what is asked for of each controller and
//! grants within the pool's `maxGpuQueuePercent`; the agent keeps what was granted and, before the finalizer ends, has let go of it.
//! No agent of this release makes queues of it, and `Programmed` says so.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{GpuUuid, Name, NodeName, ObjectRef, PciAddress, Serial, Span, Text, Uid, choice};
use crate::status::Condition;

/// Queue pairs for one GPU of one node. Nothing in the spec can be changed.
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
    doc = "NVMe queue pairs of one node, set aside for one GPU, so that its kernels read and write blocks themselves. They are counted, \
           granted, and kept by the node's agent; no agent of this release makes queues of them.",
    validation = Rule::new("size(self.metadata.name) <= 63")
        .message("the allocation's name is a label of what is made for it: use at most 63 characters"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "GPU", type_ = "string", json_path = ".spec.gpuUuid", priority = 1),
    printcolumn(name = "Pool", type_ = "string", json_path = ".spec.poolRef.name"),
    printcolumn(name = "Pairs", type_ = "integer", json_path = ".spec.queuePairs"),
    printcolumn(name = "Allocated", type_ = "string", json_path = ".status.conditions[?(@.type==\"Allocated\")].status"),
    printcolumn(name = "Expires", type_ = "date", json_path = ".status.expiresAt"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Allocated\")].reason", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(validation = Rule::new("self == oldSelf")
    .message("an allocation cannot be changed, the queues are lent: make a new GPUQueueAllocation and delete this one"))]
#[x_kube(validation = Rule::new("self.qos != 'Guaranteed' || self.isolation == 'ExclusiveController'")
    .message("a guaranteed share needs a controller of its own: set isolation to ExclusiveController, or qos to Burstable"))]
#[x_kube(validation = Rule::new("self.qos != 'BestEffort' || has(self.ttl)")
    .message("a grant of best effort ends by itself: set ttl, or qos to Burstable"))]
pub struct GPUQueueAllocationSpec {
    /// The node of GPU and devices.
    pub node_name: NodeName,
    /// The GPU, as `nvidia-smi -L` names it.
    pub gpu_uuid: GpuUuid,
    /// The pool whose devices' queues are lent; a pool of raw `devices`.
    pub pool_ref: ObjectRef,
    /// Queue pairs on each controller of the pool; with `ExclusiveController` on one that nobody else uses.
    #[schemars(range(min = 1, max = 128))]
    pub queue_pairs: u32,
    /// Entries of each queue. Recorded; nothing uses it in this release.
    #[serde(default = "depth")]
    #[x_kube(validation = Rule::new("self in [32, 64, 128, 256, 512, 1024, 2048, 4096]")
        .message("depth is a power of two from 32 to 4096: round it"))]
    pub depth: u32,
    /// Where the queues are. Recorded; nothing uses it in this release.
    #[serde(default)]
    pub memory: QueueMemory,
    /// Who else may use the controller.
    #[serde(default)]
    pub isolation: QueueIsolation,
    /// Who gives way when queues are short.
    #[serde(default)]
    pub qos: QueueQos,
    /// Profile by which the GPU paces its I/O. Absent: none. It must be there; nothing uses it in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slack_profile_ref: Option<ObjectRef>,
    /// Tenant that the queue pairs count for. Absent: `default`. It must be there and known to the node's cluster; nothing is counted by it in
    /// this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant_ref: Option<ObjectRef>,
    /// Time after which the grant ends and is released. Absent: when the object is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1m') && duration(self) <= duration('720h')")
        .message("ttl is 1m to 720h: choose a time between"))]
    pub ttl: Option<Span>,
}

choice! {
    /// Where queues are.
    QueueMemory {
        /// In the GPU's memory, with NVMe peer to peer.
        Device,
        /// In pinned memory of the host.
        Host,
    }
    default Device
}

choice! {
    /// Who else may use a controller.
    QueueIsolation {
        /// Others that are trusted as well: who has one queue of a controller can reach all of them, since they share its registers.
        TrustedShared,
        /// Nobody.
        ExclusiveController,
    }
    default TrustedShared
}

choice! {
    /// Who gives way when queues are short.
    QueueQos {
        /// Nobody takes these back.
        Guaranteed,
        /// Taken back when a guaranteed allocation needs them, after the others.
        Burstable,
        /// Taken back first.
        BestEffort,
    }
    default Burstable
}

/// What was granted.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GPUQueueAllocationStatus {
    /// Generation of the spec that this status was found for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// What was granted, by controller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["serial".into()]))]
    pub allocations: Vec<QueueGrant>,
    /// The pod that uses it. A deletion waits until it is taken away; nobody sets it in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_for: Option<PodRef>,
    /// When the grant ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Time>,
    /// What is so: `Accepted`, `Allocated`, `Programmed`, `Released`, `DeletionBlocked`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Queue pairs of one controller.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueGrant {
    /// Serial number of the controller.
    pub serial: Serial,
    /// Its address on the PCI bus.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_address: Option<PciAddress>,
    /// Queue pairs that were set aside.
    pub queue_pairs: u32,
    /// Their numbers, once there are queues. Not written in this release.
    #[serde(rename = "queueIDs", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(range(min = 1, max = 65_535)))]
    pub queue_ids: Vec<u32>,
    /// Lease in etcd that lives as long as their holder. Not written in this release.
    #[serde(rename = "leaseID", skip_serializing_if = "Option::is_none")]
    pub lease_id: Option<Text>,
}

/// A pod.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRef {
    /// Its name, in the allocation's namespace.
    pub name: Name,
    /// Its unique id; a pod of the same name that comes later is another one.
    pub uid: Uid,
}

fn depth() -> u32 {
    1024
}
