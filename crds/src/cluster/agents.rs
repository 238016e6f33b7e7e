//! The agents' pods: where they run, what they may, how they are updated.
//!
//! The host path (blocks between an engine's memory, DRAM and files) needs no privileges. What gives more is in [`super::access`].

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::access::{DeviceAccess, GpuAccess, Rdma};
use super::default_of_nothing;
use crate::fields::{
    HostPath, LabelKey, Labels, LogSettings, Name, Quantity, Resources, SocketMode, Span, Text, Toleration,
    choice,
};

/// The agents, one on each selected node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.rdma.mode != 'HostNetwork' || self.peers.port != self.adminPort")
    .message("peers and admin pages need a port each on the node's network: change peers.port or adminPort"))]
pub struct Agents {
    /// Nodes that get an agent. Empty: all.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub node_selector: Labels,
    /// Taints that agents may run beside. Those of a node under disk pressure and of a node that is not ready are always
    /// tolerated: a cache that leaves then makes it worse.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub tolerations: Vec<Toleration>,
    /// How a change reaches the nodes. Blocks on devices stay; DRAM is filled again on demand.
    #[serde(default)]
    pub update_strategy: UpdateStrategy,
    /// Priority class of the pods. Absent: none. `system-node-critical` keeps agents from being evicted, where a quota allows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority_class_name: Option<Name>,
    /// CPU and memory besides the arena, which the operator adds. Absent: 1 core and 1Gi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Label of nodes whose value says which nodes fail together; blocks get their second replica elsewhere. Recorded; nothing uses it in this
    /// release.
    #[serde(default = "failure_domain_label")]
    pub failure_domain_label: LabelKey,
    /// Where engines connect.
    #[serde(default)]
    pub socket: SessionSocket,
    /// How engines reach the agent of their node.
    #[serde(default)]
    pub client_transport: ClientTransport,
    /// How agents open raw devices of pools. While no pool of the cluster has `devices`, it adds nothing.
    #[serde(default)]
    pub device_access: DeviceAccess,
    /// How agents reach GPUs. Agents of this release list them, for which none of it is needed, and do no I/O of GPUs.
    #[serde(default)]
    pub gpu_access: GpuAccess,
    /// How agents reach RDMA. Agents of this release have no transport for it and speak TCP: the condition `TransportFallback` says so.
    #[serde(default)]
    pub rdma: Rdma,
    /// Which calls to the kernel the agent may make. Of no effect where a mode makes its container privileged.
    #[serde(default)]
    pub seccomp: Seccomp,
    /// The transport between agents.
    #[serde(default)]
    pub peers: Peers,
    /// Port of metrics, health and status in the pod, not authenticated.
    #[serde(default = "admin_port")]
    #[schemars(range(min = 1024, max = 65_535))]
    pub admin_port: u16,
    /// The agents' log.
    #[serde(default)]
    pub log: LogSettings,
}

/// How a change reaches the nodes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UpdateStrategy {
    /// Who decides when a node's agent is replaced.
    #[serde(rename = "type", default)]
    pub kind: UpdateType,
    /// Agents that may be away at once, with `RollingUpdate`.
    #[serde(default = "max_unavailable")]
    #[schemars(range(min = 1, max = 100))]
    pub max_unavailable: u32,
}

choice! {
    /// Who decides when an agent is replaced.
    UpdateType {
        /// The operator, one node after the other once the one before is ready.
        RollingUpdate,
        /// Whoever deletes its pod.
        OnDelete,
    }
    default RollingUpdate
}

/// The unix socket of the agent.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionSocket {
    /// Directory of the node in which the socket `agent.sock` is. A change restarts agents, and engines' pods need the new one.
    #[serde(default = "socket_directory")]
    pub directory: HostPath,
    /// Mode bits of the socket, octal.
    #[serde(default = "socket_mode")]
    pub mode: SocketMode,
    /// Users that may connect, by number. Empty: the agent's own and root.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(range(min = 0, max = 4_294_967_295_u32)))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub allow_uids: Vec<u32>,
}

choice! {
    /// How engines reach the agent.
    ClientTransport {
        /// By the unix socket; memory is shared by descriptors.
        UnixSocket,
        /// By a Service of the node; not in this release.
        NodeLocalService,
    }
    default UnixSocket
}

/// Which calls to the kernel the agent may make. The default profiles of newer container runtimes forbid io_uring; an agent that
/// is not allowed it says so and does what the pool's `fallbackEngine` says.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.mode == 'Localhost') == has(self.localhostProfile)")
    .message("seccomp.localhostProfile goes with mode Localhost, and only with it: set it or remove it"))]
pub struct Seccomp {
    /// The profile.
    #[serde(default)]
    pub mode: SeccompMode,
    /// Path of the profile below the kubelet's `seccomp` directory, with `Localhost`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub localhost_profile: Option<Text>,
}

choice! {
    /// The seccomp profile.
    SeccompMode {
        /// The container runtime's; mostly without io_uring.
        RuntimeDefault,
        /// A profile that lies on the nodes, for example the chart's, which adds io_uring.
        Localhost,
        /// None; not allowed in namespaces of level baseline.
        Unconfined,
    }
    default RuntimeDefault
}

/// The transport between agents: framed TCP.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Peers {
    /// Port in the pod.
    #[serde(default = "peers_port")]
    #[schemars(range(min = 1024, max = 65_535))]
    pub port: u16,
    /// Bytes under way of one fetch.
    #[serde(default = "credit")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('1Mi')) >= 0 && quantity(self).compareTo(quantity('16Gi')) <= 0")
        .message("peers.credit is 1Mi to 16Gi: choose a size between"))]
    pub credit: Quantity,
    /// Silence after which a peer is lost.
    #[serde(default = "stall_timeout")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('50ms') && duration(self) <= duration('60s')")
        .message("peers.stallTimeout is 50ms to 60s: choose a time between"))]
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

default_of_nothing!(Agents, UpdateStrategy, SessionSocket, Seccomp, Peers);
