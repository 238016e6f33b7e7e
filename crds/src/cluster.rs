//! `KVCacheCluster`: one installation of Reprise: control plane, agents, and what they are told.
//!
//! Fields of `controlPlane` and `agents` stand for settings of `reprise-controlplane` and `reprise-agent` and have their bounds
//! and defaults; the description of each names what a change costs. What the operator decides itself (addresses, files of
//! secrets, names of members) has no field.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{Image, LabelSelector, ObjectRef, PullPolicy, SecretRef, choice, of_nothing};

mod access;
mod agents;
mod cache;
mod control_plane;
mod etcd;
mod status;

pub use access::{DeviceAccess, DeviceAccessMode, GpuAccess, GpuAccessMode, Rdma, RdmaMode};
pub use agents::{
    Agents, ClientTransport, Peers, Seccomp, SeccompMode, SessionSocket, UpdateStrategy, UpdateType,
};
pub use cache::{Cache, EvictionPolicy, HugePages, Limits, Placement, Shares, Writeback};
pub use control_plane::{Bounds, ControlPlane, Events, Membership, Publishing};
pub use etcd::{Etcd, EtcdMode, EtcdStorage, EtcdTls, EtcdUser, ExternalEtcd, ManagedEtcd};
pub use status::{
    AgentCounts, ClusterCapacity, Connection, KVCacheClusterStatus, MemberCounts, RunningVersions,
};

/// The longest name of a cluster. The longest name that is made of it is that of a revision of a StatefulSet,
/// `<name>-controlplane-<10>`: 36 + 14 + 10 + 1 = 61 of 63 characters.
pub const NAME_CHARS_MAX: usize = 36;

/// What is installed, and what it is told.
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
    doc = "An installation of Reprise: the members of its control plane, their store, and the agents on the nodes.",
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 36")
        .message("names of pods and services are made of the cluster's name: use 1 to 36 of a-z, 0-9 and '-', a letter first"),
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
    /// While true the operator changes nothing that belongs to this cluster and says so; the status goes on. For repairs by hand.
    #[serde(default)]
    pub paused: bool,
    /// What pods are started from. Absent images are those that the operator was released with. A change rolls the pods, agents one
    /// node at a time, control plane by members. Nothing may be more than one minor version from an agent or member that runs. Of an image
    /// whose name has no version, as with a digest, that is known once its processes have said it: `Compatible`.
    #[serde(default)]
    pub images: Images,
    /// Where the control plane keeps its few facts. Everything in it can be rebuilt from agents and custom resources.
    #[serde(default)]
    pub etcd: Etcd,
    /// The members of the control plane.
    #[serde(default)]
    pub control_plane: ControlPlane,
    /// The agents, one on each selected node.
    #[serde(default)]
    pub agents: Agents,
    /// What each agent does with its memory and devices.
    #[serde(default)]
    pub cache: Cache,
    /// Pools whose devices the agents use. None: blocks live in memory only and are gone with the agent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub pools: Vec<ObjectRef>,
    /// Profiles of this namespace that are distributed to the agents, by their labels; of more than 16 those that nodes have come first, then
    /// the oldest. Absent: none. Nothing on the data path uses them in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slack_profiles: Option<LabelSelector>,
    /// How engines' pods get the agent's socket and their environment.
    #[serde(default)]
    pub injection: Injection,
    /// How metrics are found.
    #[serde(default)]
    pub monitoring: Monitoring,
}

/// Images of the pods.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Images {
    /// Image of the agents.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<Image>,
    /// Image of the control plane's members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control_plane: Option<Image>,
    /// Image of etcd, where the operator runs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd: Option<Image>,
    /// When nodes fetch images.
    #[serde(default)]
    pub pull_policy: PullPolicy,
    /// Secrets of this namespace for the registries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub pull_secrets: Vec<SecretRef>,
}

/// How engines' pods get what they need.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Injection {
    /// Who puts the socket's directory and the environment into pods that ask for it by a label.
    #[serde(default)]
    pub mode: InjectionMode,
    /// Namespaces whose pods may ask. Empty selects none: nobody gets a directory of the node by accident.
    #[serde(default)]
    pub namespace_selector: LabelSelector,
}

choice! {
    /// Who changes pods.
    InjectionMode {
        /// Nobody; pods mount the socket's directory themselves.
        None,
        /// The operator's webhook; not in this release.
        Webhook,
        /// A MutatingAdmissionPolicy, Kubernetes 1.36 and later.
        AdmissionPolicy,
    }
    default None
}

/// How metrics are found.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Monitoring {
    /// What the operator makes for Prometheus.
    #[serde(default)]
    pub mode: MonitoringMode,
}

choice! {
    /// What is made for Prometheus.
    MonitoringMode {
        /// Nothing; the ports are there all the same.
        None,
        /// A PodMonitor each for agents, control plane and a managed etcd; needs Prometheus' operator.
        PodMonitor,
    }
    default None
}

macro_rules! default_of_nothing {
    ($($type:ty),+ $(,)?) => {
        $(impl Default for $type {
            /// What the API server makes of `{}`.
            fn default() -> Self {
                $crate::fields::of_nothing()
            }
        })+
    };
}
pub(crate) use default_of_nothing;

default_of_nothing!(Images, Injection, Monitoring);

impl Default for KVCacheClusterSpec {
    fn default() -> Self {
        of_nothing()
    }
}
