//! Agent pods: node selection, permissions, update strategy and ports.
//!
//! Transfers between engine memory, DRAM and files need no privileges. Additional access is in
//! [`super::access`].

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::access::{DeviceAccess, GpuAccess, Rdma};
use super::default_from_schema;
use crate::fields::{
    HostPath, LabelKey, Labels, LogSettings, Name, Quantity, Resources, SocketMode, Span, Text, Toleration,
    choice,
};

/// Agents, one on each selected node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.rdma.mode != 'HostNetwork' || self.peers.port != self.adminPort")
    .message("peers.port and adminPort are equal on the node's network: change peers.port or adminPort"))]
pub struct Agents {
    /// Labels of the nodes that get an agent. Empty: all nodes. A node that several clusters select belongs to the
    /// oldest of them.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub node_selector: Labels,
    /// Tolerations of the agent pods. Agents always tolerate the taints for disk pressure and for nodes
    /// that are not ready, because losing the cache increases the load.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub tolerations: Vec<Toleration>,
    /// Update strategy for agents. Blocks on devices are kept across an update; blocks in DRAM are lost.
    #[serde(default)]
    pub update_strategy: UpdateStrategy,
    /// Priority class of the pods. Absent: none. `system-node-critical` protects agents from eviction, if
    /// the namespace's quota allows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<Name>,
    /// CPU and memory of an agent in addition to the arena, which the operator adds. Absent: 1 core and
    /// 1Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Node label whose value is the failure domain of a node, such as a zone or a rack. A further replica of
    /// a hot block prefers nodes with the block in DRAM, then nodes of another domain. Among equal replicas,
    /// reads prefer those of their own domain. Without the label, a node's domain is unknown.
    #[serde(default = "failure_domain_label")]
    pub failure_domain_label: LabelKey,
    /// Unix socket for engine connections.
    #[serde(default)]
    pub socket: SessionSocket,
    /// Transport between engines and the agent of their node.
    #[serde(default)]
    pub client_transport: ClientTransport,
    /// Access of agents to raw devices. Has no effect unless a pool of the cluster has `devices`.
    #[serde(default)]
    pub device_access: DeviceAccess,
    /// Access of agents to GPUs. This release accepts mode `None` only: its agents list GPUs, which needs no
    /// access, and do no GPU I/O.
    #[serde(default)]
    pub gpu_access: GpuAccess,
    /// Access of agents to RDMA. This release accepts mode `None` only: its agents use TCP between nodes.
    #[serde(default)]
    pub rdma: Rdma,
    /// Seccomp profile of the agent container. Has no effect if a mode makes the container privileged.
    #[serde(default)]
    pub seccomp: Seccomp,
    /// Transport between the agents.
    #[serde(default)]
    pub peers: Peers,
    /// Port of metrics, health and status in the pod. Requests are not authenticated.
    #[serde(default = "admin_port")]
    #[schemars(range(min = 1024, max = 65_535))]
    pub admin_port: u16,
    /// Answer to `/trace` on the admin port: which blocks engines load and save, with tenants, sizes and times.
    #[serde(default)]
    pub trace: TraceAccess,
    /// Log of the agents.
    #[serde(default)]
    pub log: LogSettings,
}

/// Update strategy for agents.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpdateStrategy {
    /// Trigger for the replacement of an agent.
    #[serde(rename = "type", default)]
    pub kind: UpdateType,
    /// Upper bound on unavailable agents during an update, with `RollingUpdate`.
    #[serde(default = "max_unavailable")]
    #[schemars(range(min = 1, max = 100))]
    pub max_unavailable: u32,
}

choice! {
    /// Trigger for the replacement of an agent.
    UpdateType {
        /// The operator replaces agents on up to `maxUnavailable` nodes at a time, and continues when they
        /// are ready.
        RollingUpdate,
        /// An agent is replaced when its pod is deleted.
        OnDelete,
    }
    default RollingUpdate
}

/// Unix socket of the agent.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionSocket {
    /// Directory on the node that contains the socket `agent.sock`. A change restarts agents; engine pods
    /// must mount the new directory.
    #[serde(default = "socket_directory")]
    pub directory: HostPath,
    /// Mode bits of the socket, octal.
    #[serde(default = "socket_mode")]
    pub mode: SocketMode,
    /// User IDs that may connect. Empty: the agent's user and root.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(range(min = 0, max = 4_294_967_295_u32)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub allow_uids: Vec<u32>,
}

choice! {
    /// Clients to which an agent reports the calls of engines.
    TraceAccess {
        /// None.
        Disabled,
        /// Clients in the network namespace of the pod, for example those of `kubectl port-forward`.
        LocalClients,
    }
    default Disabled
}

choice! {
    /// Transport between engines and the agent.
    ClientTransport {
        /// The unix socket; memory is shared by file descriptors.
        UnixSocket,
        /// A node-local Service. Not in this release.
        NodeLocalService,
    }
    default UnixSocket
}

/// Seccomp profile of the agent container. Default profiles of recent container runtimes forbid io_uring.
/// Without io_uring an agent reports it and applies the pool's `fallbackEngine`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.mode == 'Localhost') == has(self.localhostProfile)")
    .message("seccomp.localhostProfile must be set with mode Localhost and with no other mode: set it or remove it"))]
pub struct Seccomp {
    /// Kind of the seccomp profile.
    #[serde(default)]
    pub mode: SeccompMode,
    /// Path of the profile below the kubelet's `seccomp` directory, with `Localhost`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub localhost_profile: Option<Text>,
}

choice! {
    /// Kind of the seccomp profile.
    SeccompMode {
        /// The default profile of the container runtime, which usually forbids io_uring.
        RuntimeDefault,
        /// A profile on the nodes, for example the chart's profile, which allows io_uring.
        Localhost,
        /// No profile. Not allowed in namespaces of the level `baseline`.
        Unconfined,
    }
    default RuntimeDefault
}

/// Transport between agents: framed TCP.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Peers {
    /// Port in the pod.
    #[serde(default = "peers_port")]
    #[schemars(range(min = 1024, max = 65_535))]
    pub port: u16,
    /// Upper bound on unacknowledged bytes of one fetch, from 1Mi to 16Gi.
    #[serde(default = "credit")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('1Mi')) >= 0 && quantity(self).compareTo(quantity('16Gi')) <= 0")
        .message("peers.credit is outside 1Mi to 16Gi: set a size in that range"))]
    pub credit: Quantity,
    /// Time without data after which a peer connection is closed, from 50ms to 60s.
    #[serde(default = "stall_timeout")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('50ms') && duration(self) <= duration('60s')")
        .message("peers.stallTimeout is outside 50ms to 60s: set a duration in that range"))]
    pub stall_timeout: Span,
}

fn max_unavailable() -> u32 {
    1
}

fn failure_domain_label() -> LabelKey {
    LabelKey::new("topology.kubernetes.io/zone")
}

fn socket_directory() -> HostPath {
    HostPath::new("/run/reprise")
}

fn socket_mode() -> SocketMode {
    SocketMode::new("0660")
}

fn admin_port() -> u16 {
    7411
}

fn peers_port() -> u16 {
    7410
}

fn credit() -> Quantity {
    Quantity::new("64Mi")
}

fn stall_timeout() -> Span {
    Span::new("2s")
}

default_from_schema!(Agents, UpdateStrategy, SessionSocket, Seccomp, Peers);
