//! What a cluster is at the moment, added up over its nodes; what each node is, is in its CacheNode.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::fields::{HostPath, Name, Quantity, Text, Uid, Version};
use crate::status::Condition;

/// What the cluster is at the moment. Written by the operator, at most every 10 s.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KVCacheClusterStatus {
    /// Generation of the spec that this status was found for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Id of the installation; another one means that the cluster was made anew.
    #[serde(rename = "clusterID", skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<Uid>,
    /// Versions that really run, as the processes have said; what images are called is not asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub versions: Option<RunningVersions>,
    /// Members of the control plane.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub members: Option<MemberCounts>,
    /// Agents, one on each selected node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agents: Option<AgentCounts>,
    /// Memory and devices of all nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<ClusterCapacity>,
    /// What engines need to connect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection: Option<Connection>,
    /// What is so: `Ready`, `Accepted`, `Progressing`, `Degraded`, `EtcdReady`, `ControlPlaneReady`, `AgentsReady`, `PoolsBound`,
    /// `Compatible`, `TransportFallback`, `DeletionBlocked`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Versions that really run. Absent: none has said it.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunningVersions {
    /// Oldest member of the control plane. While members are replaced, one that is away counts as what was said before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane: Option<Version>,
    /// Newest member of the control plane.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane_max: Option<Version>,
    /// Oldest agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_min: Option<Version>,
    /// Newest agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_max: Option<Version>,
}

/// Members, counted.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberCounts {
    /// Members that the spec wants.
    pub desired: u32,
    /// Members that answer.
    pub ready: u32,
}

/// Agents, counted.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentCounts {
    /// Nodes that should have an agent.
    pub desired: u32,
    /// Agents that serve engines.
    pub ready: u32,
    /// Agents that run the wanted image with the wanted configuration.
    pub updated: u32,
}

/// Memory and devices of all nodes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterCapacity {
    /// Bytes of the arenas.
    pub dram_total: Quantity,
    /// Bytes of open devices.
    pub ssd_total: Quantity,
    /// Bytes of blocks on them.
    pub ssd_used: Quantity,
    /// When this was added up.
    pub last_updated: Time,
}

/// What engines need to connect.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Connection {
    /// ConfigMap of the cluster's namespace with configuration for engines.
    pub config_map: Name,
    /// Directory of each node with the agent's socket.
    pub socket_directory: HostPath,
    /// Address of the control plane, `host:port`, for gateways and the command line.
    pub control_plane: Text,
}
