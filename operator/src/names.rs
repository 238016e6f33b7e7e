//! Names and labels of what belongs to a cluster. The longest name is bounded by that of the cluster (36 characters), so that all of them,
//! and those that Kubernetes makes of them, stay within 63.

use kube::ResourceExt;
use reprise_crds::KVCacheCluster;
use serde_json::{Value, json};

/// Who made an object.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// The value of [`MANAGED_BY`].
pub const OPERATOR: &str = "reprise-operator";
/// The unique id of the cluster that an object belongs to.
pub const CLUSTER_UID: &str = "reprise.dev/cluster-uid";
/// Annotation: digest of what was applied last.
pub const APPLIED: &str = "reprise.dev/applied";
/// Annotation of pods: digest of the configuration that they started with.
pub const CONFIGURATION: &str = "reprise.dev/configuration";
/// Annotation of pods: digest of the secrets that they started with.
pub const SECRETS: &str = "reprise.dev/secrets";
/// Label of engines' pods: the name of the cluster whose agent's socket they ask for.
pub const INJECT: &str = "reprise.dev/inject";
/// Annotation of these pods: what became of it.
pub const INJECTION: &str = "reprise.dev/injection";
/// Whose the pod was when it was made, or `none`: what has come of the tenants' namespaces since is not in it.
pub const INJECTED_TENANT: &str = "reprise.dev/tenant";
/// Finalizer of pools.
pub const WIPE_FINALIZER: &str = "reprise.dev/wipe";
/// Finalizer of tenants that control planes were told budgets of.
pub const BUDGET_FINALIZER: &str = "reprise.dev/budget";
/// Finalizer of tenants whose blocks are evicted before they go.
pub const PURGE_FINALIZER: &str = "reprise.dev/purge";
/// Finalizer of allocations that have a grant.
pub const QUEUES_FINALIZER: &str = "reprise.dev/queues";
/// Finalizer of clusters and pools whose agents have sessions of engines.
pub const IN_USE_FINALIZER: &str = "reprise.dev/in-use";
/// Annotation of clusters and pools: `yes` lets them go while engines use them.
pub const DELETE_IN_USE: &str = "reprise.dev/delete-in-use";
/// Type of a condition of nodes: whether the node's cache serves engines.
pub const AGENT_READY: &str = "reprise.dev/AgentReady";
/// Label of the objects that a release of the chart applied: its name.
pub const RELEASE: &str = "reprise.dev/release";

/// The parts of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// The agents.
    Agent,
    /// The members.
    ControlPlane,
    /// The store.
    Etcd,
}

impl Component {
    /// As the label has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Component::Agent => "agent",
            Component::ControlPlane => "control-plane",
            Component::Etcd => "etcd",
        }
    }
}

/// A cluster, as names are made of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterNames {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its unique id.
    pub uid: String,
}

impl ClusterNames {
    /// Those of a cluster that is stored.
    pub fn of(cluster: &KVCacheCluster) -> ClusterNames {
        ClusterNames {
            namespace: cluster.namespace().unwrap_or_default(),
            name: cluster.name_any(),
            uid: cluster.uid().unwrap_or_default(),
        }
    }

    /// `namespace/name`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Service account, configuration, DaemonSet and service of the agents.
    pub fn agent(&self) -> String {
        format!("{}-agent", self.name)
    }

    /// Template of a claim of the agents' pods: for what, and a digest of what it says.
    pub fn claim(&self, of: &str, digest: &str) -> String {
        format!("{}-{of}-{digest}", self.agent())
    }

    /// StatefulSet, configuration, service and disruption budget of the members.
    pub fn control_plane(&self) -> String {
        format!("{}-controlplane", self.name)
    }

    /// The headless service that names members.
    pub fn members(&self) -> String {
        format!("{}-controlplane-members", self.name)
    }

    /// Pod of a member.
    pub fn member(&self, index: u32) -> String {
        format!("{}-{index}", self.control_plane())
    }

    /// StatefulSet, headless service and disruption budget of etcd.
    pub fn etcd(&self) -> String {
        format!("{}-etcd", self.name)
    }

    /// Secret with etcd's certificates, mounted by etcd and members.
    pub fn etcd_tls(&self) -> String {
        format!("{}-etcd-tls", self.name)
    }

    /// Secret with the authority of these certificates, mounted by nobody.
    pub fn etcd_authority(&self) -> String {
        format!("{}-etcd-ca", self.name)
    }

    /// ConfigMap with what engines need.
    pub fn connection(&self) -> String {
        format!("{}-connection", self.name)
    }

    /// ConfigMap with whose pods are whose.
    pub fn tenants(&self) -> String {
        format!("{}-agent-tenants", self.name)
    }

    /// Binding of the agents' rights.
    pub fn agent_binding(&self) -> String {
        format!("reprise-{}-{}-agent", self.namespace, self.name)
    }

    /// Admission policy that changes engines' pods, and its binding.
    pub fn injection(&self) -> String {
        format!("reprise-{}-{}-inject", self.namespace, self.name)
    }

    /// `host:port` of any member.
    pub fn control_plane_address(&self) -> String {
        format!("{}.{}.svc:{}", self.control_plane(), self.namespace, crate::cluster::GRPC_PORT)
    }

    /// Labels of everything of a component.
    pub fn labels(&self, component: Component) -> Value {
        json!({
            "app.kubernetes.io/name": "reprise",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component.as_str(),
            MANAGED_BY: OPERATOR,
            CLUSTER_UID: self.uid,
        })
    }

    /// Labels by which pods of a component are found.
    pub fn selector(&self, component: Component) -> Value {
        json!({
            "app.kubernetes.io/name": "reprise",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component.as_str(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_longest_cluster_stay_within_63_characters() {
        let name = "c".repeat(reprise_crds::cluster::NAME_CHARS_MAX);
        let names = ClusterNames { namespace: "n".to_owned(), name, uid: "u".to_owned() };
        for made in
            [names.agent(), names.members(), names.etcd_authority(), names.connection(), names.tenants()]
        {
            assert!(made.len() <= 63, "{made}");
        }
        // A revision of a StatefulSet: its name, '-', ten characters.
        assert!(names.control_plane().len() + 11 <= 63);
    }
}
