//! What agents' pods get beyond the host path: raw devices, GPUs, RDMA.
//!
//! Every mode says what it adds to the pods; the operator adds exactly that. A mode gives access and promises no use of it: what
//! this release does with it is said in the field.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::default_of_nothing;
use crate::fields::{LabelKey, Name, choice};

/// How agents open the raw devices of their cluster's pools. While no pool of the cluster has `devices`, nothing is added.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.mode == 'DevicePlugin') == has(self.resourceName)")
    .message("deviceAccess.resourceName goes with mode DevicePlugin, and only with it: set it or remove it"))]
pub struct DeviceAccess {
    /// The way. A change restarts agents.
    #[serde(default)]
    pub mode: DeviceAccessMode,
    /// Extended resource of which each agent asks for one, with `DevicePlugin`. One of it must be all devices of the node's pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<LabelKey>,
}

choice! {
    /// The way to raw devices.
    DeviceAccessMode {
        /// The pods see the devices' names and may open what the nodes' runtime lets them, which by default is none.
        None,
        /// A device of a device plugin. Nodes without it get no agent.
        DevicePlugin,
        /// A privileged container.
        Privileged,
    }
    default None
}

/// How agents reach GPUs. The host path needs none, and agents list those that the driver names in `/proc` with every mode. No agent of
/// this release opens one: a mode prepares pods for it.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.mode == 'Dra') == has(self.deviceClassName)")
    .message("gpuAccess.deviceClassName goes with mode Dra, and only with it: set it or remove it"))]
#[x_kube(validation = Rule::new("(self.mode == 'RuntimeClass') == has(self.runtimeClassName)")
    .message("gpuAccess.runtimeClassName goes with mode RuntimeClass, and only with it: set it or remove it"))]
pub struct GpuAccess {
    /// The way. A change restarts agents.
    #[serde(default)]
    pub mode: GpuAccessMode,
    /// Device class of the claim, with `Dra`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_class_name: Option<Name>,
    /// Runtime class of the pods, with `RuntimeClass`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_class_name: Option<Name>,
}

choice! {
    /// The way to GPUs.
    GpuAccessMode {
        /// Nothing is added.
        None,
        /// A claim of all devices of the class with admin access, beside whoever uses them. Its namespace must have the label
        /// `resource.kubernetes.io/admin-access: "true"`. Nodes without such a device get no agent.
        Dra,
        /// The management device of NVIDIA's GPU operator, by the annotation that its NRI plugin reads. The plugin must allow it to the
        /// namespace.
        ManagementCdi,
        /// A runtime class, and the environment that tells NVIDIA's runtime to show all GPUs for management.
        RuntimeClass,
        /// A privileged container.
        Privileged,
    }
    default None
}

/// How agents reach RDMA. Agents of this release speak TCP among them whatever it says, and the condition `TransportFallback` is true
/// while it is not `None`: a mode prepares pods for a transport that is to come.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.mode in ['DevicePlugin', 'SrIov']) == has(self.resourceName)")
    .message("rdma.resourceName goes with modes DevicePlugin and SrIov, and only with them: set it or remove it"))]
#[x_kube(validation = Rule::new("(self.mode == 'Dra') == has(self.deviceClassName)")
    .message("rdma.deviceClassName goes with mode Dra, and only with it: set it or remove it"))]
pub struct Rdma {
    /// The way. A change restarts agents.
    #[serde(default)]
    pub mode: RdmaMode,
    /// Extended resource of which each agent asks for one, with `DevicePlugin` and `SrIov`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<LabelKey>,
    /// Device class of the claim, with `Dra`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_class_name: Option<Name>,
}

choice! {
    /// The way to RDMA.
    RdmaMode {
        /// Nothing is added.
        None,
        /// A shared device of a device plugin, and the right to lock memory. Nodes without it get no agent.
        DevicePlugin,
        /// A virtual function of its own, and the right to lock memory. Its network interface is not brought into the pod. Nodes without
        /// it get no agent.
        SrIov,
        /// A claim of one device of the class, and the right to lock memory. Nodes without a free one get no agent.
        Dra,
        /// The node's network and its `/dev/infiniband`, and a privileged container, without which no device of it opens. Nodes without
        /// that directory get no agent. NetworkPolicies do not hold for such pods.
        HostNetwork,
    }
    default None
}

default_of_nothing!(DeviceAccess, GpuAccess, Rdma);
