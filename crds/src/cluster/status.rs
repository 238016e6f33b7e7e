//! Observed state of a cluster, summed over its nodes. The state of each node is in its CacheNode.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::fields::{HostPath, Name, Quantity, Text, Uid, Version};
use crate::status::Condition;

/// Observed state of the cluster. The operator writes it at most every 10 s.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KVCacheClusterStatus {
    /// Generation of the spec that this status was computed for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// ID of the installation. It changes when the cluster is re-created.
    #[serde(rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<Uid>,
    /// Versions of running processes, as they report them. Image names are not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub versions: Option<RunningVersions>,
    /// Members of the control plane.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub members: Option<MemberCounts>,
    /// Agents, one on each selected node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agents: Option<AgentCounts>,
    /// Capacity and usage of memory and devices of all nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<ClusterCapacity>,
    /// Connection settings for engines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection: Option<Connection>,
    /// Conditions: `Ready`, `Accepted`, `Progressing`, `Degraded`, `EtcdReady`, `ControlPlaneReady`,
    /// `AgentsReady`, `CertificatesReady`, `PoolsBound`, `Compatible`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Versions of running processes. Absent: not reported yet.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunningVersions {
    /// Version of the oldest member. During a rollout, an unavailable member counts with its last reported
    /// version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane: Option<Version>,
    /// Version of the newest control plane member.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane_max: Option<Version>,
    /// Version of the oldest agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_min: Option<Version>,
    /// Version of the newest agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_max: Option<Version>,
}

/// Counts of control plane members.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberCounts {
    /// Desired number of members.
    pub desired: u32,
    /// Number of ready members.
    pub ready: u32,
}

/// Counts of the cluster's agents.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentCounts {
    /// Number of nodes selected for an agent.
    pub desired: u32,
    /// Number of agents that serve engines.
    pub ready: u32,
    /// Number of agents with the current image and configuration.
    pub updated: u32,
}

/// Capacity and usage of memory and devices of all nodes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterCapacity {
    /// Size of all arenas in bytes.
    pub dram_total: Quantity,
    /// Size of all open devices in bytes.
    pub ssd_total: Quantity,
    /// Bytes of the open devices that hold blocks.
    pub ssd_used: Quantity,
    /// Time at which these sums were computed.
    pub last_updated: Time,
}

/// Connection settings for engines.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Connection {
    /// ConfigMap in the cluster's namespace with settings for engines.
    pub config_map: Name,
    /// Directory on each node that contains the agent's socket.
    pub socket_directory: HostPath,
    /// Address of the control plane, `host:port`, for gateways and the command line.
    pub control_plane: Text,
}
