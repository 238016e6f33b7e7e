//! `KVCacheCluster`: one installation of Reprise, that is, its control plane, its agents and their
//! settings.
//!
//! Fields of `controlPlane` and `agents` map to settings of `reprise-controlplane` and `reprise-agent`,
//! with the same bounds and defaults. Each description states the effect of a change. Values that the
//! operator derives itself (addresses, secret files, member names) have no field.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{Image, LabelSelector, ObjectRef, PullPolicy, SecretRef, choice, from_defaults};

mod access;
mod agents;
mod cache;
mod control_plane;
mod etcd;
mod status;

pub use access::{DeviceAccess, DeviceAccessMode, GpuAccess, GpuAccessMode, Rdma, RdmaMode};
pub use agents::{
    Agents, ClientTransport, Peers, Seccomp, SeccompMode, SessionSocket, TraceAccess, UpdateStrategy,
    UpdateType,
};
pub use cache::{Admission, Cache, EvictionPolicy, HugePages, Limits, Placement, Shares, Writeback};
pub use control_plane::{Bounds, ControlPlane, Events, Membership, Publishing};
pub use etcd::{Etcd, EtcdMode, EtcdStorage, EtcdTls, EtcdUser, ExternalEtcd, ManagedEtcd};
pub use status::{
    AgentCounts, ClusterCapacity, Connection, KVCacheClusterStatus, MemberCounts, RunningVersions,
};

/// Upper bound on the length of a cluster's name. The longest derived name is that of a StatefulSet
/// revision, `<name>-controlplane-<10>`: 36 + 14 + 10 + 1 = 61 of 63 characters.
pub const NAME_CHARS_MAX: usize = 36;

/// Desired state of one installation of Reprise.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "reprise.dev",
    version = "v1alpha1",
    kind = "KVCacheCluster",
    plural = "kvcacheclusters",
    shortname = "kvcc",
    category = "reprise",
    namespaced,
    status = "KVCacheClusterStatus",
    derive = "PartialEq",
    doc = "An installation of Reprise: the control plane, its etcd, and the agents on the nodes.",
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 36")
        .message("invalid cluster name: use 1 to 36 of a-z, 0-9 and '-', beginning with a letter and not ending with '-'"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Members", type_ = "integer", json_path = ".status.members.ready"),
    printcolumn(name = "Agents", type_ = "integer", json_path = ".status.agents.ready"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.agents.desired"),
    printcolumn(name = "DRAM", type_ = "string", json_path = ".status.capacity.dramTotal"),
    printcolumn(name = "SSD", type_ = "string", json_path = ".status.capacity.ssdTotal"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct KVCacheClusterSpec {
    /// Pause reconciliation, for manual repairs. The operator changes none of the cluster's objects and
    /// continues to update the status.
    #[serde(default)]
    pub paused: bool,
    /// Container images. Absent images: those that the operator was released with. A change rolls agents
    /// one node at a time, and control plane members one by one.
    ///
    /// No image may differ by more than one minor version from a running agent or member. If an image name
    /// has no version, for example with a digest, the operator learns the version from the running
    /// processes and sets `Compatible`.
    #[serde(default)]
    pub images: Images,
    /// The etcd in which the control plane stores its state. The state can be rebuilt from agents and
    /// custom resources.
    #[serde(default)]
    pub etcd: Etcd,
    /// Members of the control plane.
    #[serde(default)]
    pub control_plane: ControlPlane,
    /// Agents, one on each selected node.
    #[serde(default)]
    pub agents: Agents,
    /// Memory, placement and limits of each agent.
    #[serde(default)]
    pub cache: Cache,
    /// Pools whose devices the agents use. Empty: blocks are in memory only and are lost when the agent
    /// stops. A pool that several clusters list belongs to the oldest of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub pools: Vec<ObjectRef>,
    /// Selects SlackProfiles of this namespace to distribute to agents. Absent: none. A node receives at
    /// most 16, the oldest ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slack_profiles: Option<LabelSelector>,
    /// Injection of the agent's socket and environment into engine pods.
    #[serde(default)]
    pub injection: Injection,
    /// Objects for monitoring with Prometheus.
    #[serde(default)]
    pub monitoring: Monitoring,
}

/// Container images of the pods.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Images {
    /// Image of the agents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<Image>,
    /// Image of the control plane members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane: Option<Image>,
    /// Image of etcd, with `etcd.mode` `Managed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd: Option<Image>,
    /// Pull policy for all images.
    #[serde(default)]
    pub pull_policy: PullPolicy,
    /// Pull secrets in this namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub pull_secrets: Vec<SecretRef>,
}

/// Injection of the agent's socket and environment into engine pods.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Injection {
    /// Mechanism that adds the socket directory and the environment to pods with the injection label.
    #[serde(default)]
    pub mode: InjectionMode,
    /// Namespaces whose pods may request injection. Empty selects no namespace, because injection mounts a
    /// directory of the node.
    #[serde(default)]
    pub namespace_selector: LabelSelector,
}

choice! {
    /// Mechanism of the injection.
    InjectionMode {
        /// No injection; pods mount the socket directory themselves.
        None,
        /// The operator's webhook. Not in this release.
        Webhook,
        /// A MutatingAdmissionPolicy. Requires Kubernetes 1.36 or later.
        AdmissionPolicy,
    }
    default None
}

/// Objects for monitoring with Prometheus.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Monitoring {
    /// Objects that the operator creates for the Prometheus Operator.
    #[serde(default)]
    pub mode: MonitoringMode,
}

choice! {
    /// Objects for the Prometheus Operator.
    MonitoringMode {
        /// No object. The metrics ports exist anyway.
        None,
        /// PodMonitors for agents, control plane and managed etcd. Requires the Prometheus Operator.
        PodMonitor,
    }
    default None
}

macro_rules! default_from_schema {
    ($($type:ty),+ $(,)?) => {
        $(impl Default for $type {
            /// Returns the value that the API server makes from `{}`.
            fn default() -> Self {
                $crate::fields::from_defaults()
            }
        })+
    };
}
pub(crate) use default_from_schema;

default_from_schema!(Images, Injection, Monitoring);

impl Default for KVCacheClusterSpec {
    fn default() -> Self {
        from_defaults()
    }
}
