//! Metadata of a cluster's children, and the children that consist of little else.

use kube::Resource;
use reprise_crds::KVCacheCluster;
use serde_json::{Value, json};

use crate::framework::child::{Child, ChildKind};
use crate::reconcile::names::{ClusterNames, Component};

/// Metadata of a child: in the cluster's namespace, owned by the cluster.
pub(crate) fn metadata(
    cluster: &KVCacheCluster,
    names: &ClusterNames,
    component: Component,
    name: &str,
) -> Value {
    let owner = json!([{
        "apiVersion": KVCacheCluster::api_version(&()),
        "kind": KVCacheCluster::kind(&()),
        "name": names.name,
        "uid": cluster.metadata.uid,
        "controller": true,
        "blockOwnerDeletion": true,
    }]);
    json!({
        "name": name,
        "namespace": names.namespace,
        "labels": names.labels(component),
        "ownerReferences": owner,
    })
}

/// A ConfigMap that only the operator writes.
pub(super) fn config_map(metadata: Value, data: &Value) -> Child {
    Child::new(ChildKind::ConfigMap, metadata, &json!({ "data": data }))
}

/// A service account without a mounted token.
pub(crate) fn service_account(metadata: Value) -> Child {
    let rest = json!({ "automountServiceAccountToken": false });
    Child::new(ChildKind::ServiceAccount, metadata, &rest)
}

/// Binds a ClusterRole of the chart to service accounts. It is not namespaced, so the cluster cannot own it
/// ([`crate::reconcile::orphans`]).
pub(super) fn role_binding(
    names: &ClusterNames,
    component: Component,
    name: &str,
    role: &str,
    accounts: &[String],
) -> Child {
    let account = |name| json!({ "kind": "ServiceAccount", "name": name, "namespace": names.namespace });
    let rest = json!({
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role },
        "subjects": accounts.iter().map(account).collect::<Vec<Value>>(),
    });
    let metadata = json!({ "name": name, "labels": names.labels(component) });
    Child::new(ChildKind::ClusterRoleBinding, metadata, &rest)
}
