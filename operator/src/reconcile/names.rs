//! Names, labels, annotations and finalizers of objects. Names are derived from the cluster's name, which has
//! at most 36 characters. So they, and the names that Kubernetes derives from them, stay within 63.

use kube::ResourceExt;
use reprise_crds::KVCacheCluster;
use serde::Serialize;
use serde_json::{Value, json};

use crate::framework::labels::{CLUSTER_UID, MANAGED_BY, OPERATOR};

/// Port of the members' gRPC services.
pub const GRPC_PORT: u16 = 7400;
/// Annotation of pods: digest of the configuration at their start.
pub const CONFIGURATION: &str = "reprise.dev/configuration";
/// Annotation of pods: digest of the secrets at their start.
pub const SECRETS: &str = "reprise.dev/secrets";
/// Label of engine pods: name of the cluster whose agent socket is injected.
pub const INJECT: &str = "reprise.dev/inject";
/// Finalizer of pools whose data is wiped before deletion.
pub const WIPE_FINALIZER: &str = "reprise.dev/wipe";
/// Finalizer of tenants that control planes have budgets of.
pub const BUDGET_FINALIZER: &str = "reprise.dev/budget";
/// Finalizer of tenants whose blocks are evicted before deletion.
pub const PURGE_FINALIZER: &str = "reprise.dev/purge";
/// Finalizer of allocations that have a grant.
pub const QUEUES_FINALIZER: &str = "reprise.dev/queues";
/// Finalizer of pools whose agents have engine sessions.
pub const IN_USE_FINALIZER: &str = "reprise.dev/in-use";
/// Annotation of pools: with the value `yes`, a deletion does not wait for engines.
pub const DELETE_IN_USE: &str = "reprise.dev/delete-in-use";
/// Condition type of nodes: whether the node's cache serves engines.
pub const AGENT_READY: &str = "reprise.dev/AgentReady";
/// Label of objects that a release of the chart applied: the name of the release.
pub const RELEASE: &str = "reprise.dev/release";

/// Components of a cluster, as the component label names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Component {
    Agent,
    ControlPlane,
    /// The etcd store that the operator runs.
    Etcd,
}

/// Derives the names of a cluster's children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterNames {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl ClusterNames {
    /// Reads namespace, name and unique id of a stored cluster.
    pub fn of(cluster: &KVCacheCluster) -> ClusterNames {
        ClusterNames {
            namespace: cluster.namespace().unwrap_or_default(),
            name: cluster.name_any(),
            uid: cluster.uid().unwrap_or_default(),
        }
    }

    /// Returns `namespace/name`, the key of the cluster.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Name of the agents' service account, ConfigMap, DaemonSet and Service.
    pub fn agent(&self) -> String {
        format!("{}-agent", self.name)
    }

    /// Name of the control plane's StatefulSet, ConfigMap, Service and disruption budget.
    pub fn control_plane(&self) -> String {
        format!("{}-controlplane", self.name)
    }

    /// Name of the headless Service that gives members DNS names.
    pub fn members(&self) -> String {
        format!("{}-controlplane-members", self.name)
    }

    /// Name of a member's pod.
    pub fn member(&self, index: u32) -> String {
        format!("{}-{index}", self.control_plane())
    }

    /// Name of etcd's service account, StatefulSet, headless Service and disruption budget.
    pub fn etcd(&self) -> String {
        format!("{}-etcd", self.name)
    }

    /// Host names of a pod of etcd. Clients and peers use the first one. etcd also compares the name that DNS has for the
    /// address of a peer, which is the second one with the usual domain.
    pub fn etcd_hosts(&self, pod: &str) -> [String; 2] {
        let host = format!("{pod}.{}.{}.svc", self.etcd(), self.namespace);
        let with_domain = format!("{host}.cluster.local");
        [host, with_domain]
    }

    /// Name of the Secret with the authority of the cluster's certificates. No pod mounts it.
    pub fn authority(&self) -> String {
        format!("{}-ca", self.name)
    }

    /// Name of the ConfigMap with the certificates of the trusted authorities.
    pub fn authorities(&self) -> String {
        format!("{}-authorities", self.name)
    }

    /// Name of the Secret with the certificate of scrapers and dashboards.
    pub fn console(&self) -> String {
        format!("{}-console", self.name)
    }

    /// Name of the Secret with the isolation salts of tenants. Agents mount it.
    pub fn salts(&self) -> String {
        format!("{}-salts", self.name)
    }

    /// Name of the Secret with the encryption keys of tenants. Agents mount it.
    pub fn keys(&self) -> String {
        format!("{}-keys", self.name)
    }

    /// Name of the cluster in certificates. Names of namespaces and clusters contain no dots.
    pub fn in_certificates(&self) -> String {
        format!("{}.{}", self.name, self.namespace)
    }

    /// Name of the ConfigMap with connection settings for engines.
    pub fn connection(&self) -> String {
        format!("{}-connection", self.name)
    }

    /// Name of the ConfigMap that maps pods to tenants.
    pub fn tenants(&self) -> String {
        format!("{}-agent-tenants", self.name)
    }

    /// Name of the ClusterRoleBinding of the agents.
    pub fn agent_binding(&self) -> String {
        format!("reprise-{}-{}-agent", self.namespace, self.name)
    }

    /// Name of the ClusterRoleBinding of the control plane's members and of etcd.
    pub fn member_binding(&self) -> String {
        format!("reprise-{}-{}-controlplane", self.namespace, self.name)
    }

    /// Name of the admission policy that mutates engine pods, and of its binding.
    pub fn injection(&self) -> String {
        format!("reprise-{}-{}-inject", self.namespace, self.name)
    }

    /// Returns `host:port` of the control plane's Service.
    pub fn control_plane_address(&self) -> String {
        format!("{}.{}.svc:{}", self.control_plane(), self.namespace, GRPC_PORT)
    }

    /// Labels of all objects of a component.
    pub fn labels(&self, component: Component) -> Value {
        let mut labels = self.selector(component);
        labels[MANAGED_BY] = json!(OPERATOR);
        labels[CLUSTER_UID] = json!(self.uid);
        labels
    }

    /// Label selector for the pods of a component.
    pub fn selector(&self, component: Component) -> Value {
        json!({
            "app.kubernetes.io/name": "reprise",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_longest_cluster_name_stay_within_63_characters() {
        let name = "c".repeat(reprise_crds::cluster::NAME_CHARS_MAX);
        let names = ClusterNames { namespace: "n".to_owned(), name, uid: "u".to_owned() };
        for made in [names.agent(), names.members(), names.etcd(), names.connection(), names.tenants()] {
            assert!(made.len() <= 63, "{made}");
        }
        // A StatefulSet revision is named after it, with '-' and ten characters.
        assert!(names.control_plane().len() + 11 <= 63);
    }
}
