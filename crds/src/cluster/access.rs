//! Access of agent pods to raw devices, GPUs and RDMA.
//!
//! Each mode lists its additions to the pods, and the operator adds exactly these. This release accepts the
//! modes of raw devices only. It rejects modes for GPUs and RDMA, which its agents would not use.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::default_from_schema;
use crate::fields::{LabelKey, Name, choice};

/// Access of agents to the raw devices of their cluster's pools. Has no effect unless a pool of the cluster
/// has `devices`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.mode == 'DevicePlugin') == has(self.resourceName)")
    .message("deviceAccess.resourceName must be set with mode DevicePlugin and with no other mode: set it or remove it"))]
pub struct DeviceAccess {
    /// Access mode. A change restarts agents.
    #[serde(default)]
    pub mode: DeviceAccessMode,
    /// Extended resource that each agent requests once, with `DevicePlugin`. One unit must cover all
    /// devices of the node's pools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<LabelKey>,
}

choice! {
    /// Access mode for raw devices.
    DeviceAccessMode {
        /// No additional access. Pods see the device names and can open only devices that the container
        /// runtime permits; by default, none.
        None,
        /// One unit of a device plugin's resource. Nodes without the resource get no agent.
        DevicePlugin,
        /// Agents run in a privileged container.
        Privileged,
    }
    default None
}

/// Access of agents to GPUs. Transfers through host memory need no access, and agents list GPUs from `/proc`
/// without access. Agents of this release do not open GPUs, so the operator rejects all modes but `None`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.mode == 'Dra') == has(self.deviceClassName)")
    .message("gpuAccess.deviceClassName must be set with mode Dra and with no other mode: set it or remove it"))]
#[x_kube(validation = Rule::new("(self.mode == 'RuntimeClass') == has(self.runtimeClassName)")
    .message("gpuAccess.runtimeClassName must be set with mode RuntimeClass and with no other mode: set it or remove it"))]
pub struct GpuAccess {
    /// Access mode. A change restarts agents.
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
    /// Access mode for GPUs. This release accepts `None` only.
    GpuAccessMode {
        /// Pods get no additional access.
        None,
        /// A claim for all devices of the class with admin access, shared with their other users. The
        /// namespace must have the label `resource.kubernetes.io/admin-access: "true"`. Nodes without such
        /// a device get no agent.
        Dra,
        /// The management CDI device of the NVIDIA GPU Operator, requested by the annotation of its NRI
        /// plugin. The plugin must allow it for the namespace.
        ManagementCdi,
        /// A runtime class, and the environment variables for access to all GPUs in the NVIDIA runtime.
        RuntimeClass,
        /// Agents run in a privileged container.
        Privileged,
    }
    default None
}

/// Access of agents to RDMA. Agents of this release use TCP, so the operator rejects all modes but `None`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.mode in ['DevicePlugin', 'SrIov']) == has(self.resourceName)")
    .message("rdma.resourceName must be set with modes DevicePlugin and SrIov and with no other mode: set it or remove it"))]
#[x_kube(validation = Rule::new("(self.mode == 'Dra') == has(self.deviceClassName)")
    .message("rdma.deviceClassName must be set with mode Dra and with no other mode: set it or remove it"))]
pub struct Rdma {
    /// Access mode. A change restarts agents.
    #[serde(default)]
    pub mode: RdmaMode,
    /// Extended resource that each agent requests once, with `DevicePlugin` and `SrIov`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resource_name: Option<LabelKey>,
    /// Device class of the claim, with `Dra`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_class_name: Option<Name>,
}

choice! {
    /// Access mode for RDMA. This release accepts `None` only.
    RdmaMode {
        /// Pods get no additional access.
        None,
        /// A shared device of a device plugin, and the capability to lock memory. Nodes without the device
        /// get no agent.
        DevicePlugin,
        /// A dedicated virtual function, and the capability to lock memory. The pod does not get the
        /// function's network interface. Nodes without a free function get no agent.
        SrIov,
        /// A claim for one device of the class, and the capability to lock memory. Nodes without a free
        /// device get no agent.
        Dra,
        /// The node's network, its `/dev/infiniband`, and a privileged container, which is required to open
        /// the devices. Nodes without that directory get no agent. NetworkPolicies do not apply to such
        /// pods.
        HostNetwork,
    }
    default None
}

default_from_schema!(DeviceAccess, GpuAccess, Rdma);
