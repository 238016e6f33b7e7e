//! Makes the children of a cluster as values. Pure; what it is given was found right.

use kube::Resource;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::EtcdMode;
use serde_json::{Value, json};

use super::certificates::Drawn;
use super::dereference::Found;
use crate::child::{Child, ChildKind, Ownership};
use crate::names::{ClusterNames, Component};

mod access;
mod agents;
pub mod configuration;
mod connection;
mod etcd;
mod identities;
mod injection;
mod members;
mod monitoring;
mod pods;
#[cfg(test)]
mod tests;

pub(super) use self::etcd::{ETCD_CLAIM, is_replaced};

/// All children of a cluster, in the order in which they are written. `drawn` are the certificates of a managed etcd.
pub fn build(cluster: &KVCacheCluster, found: &Found, drawn: Option<&Drawn>) -> Vec<Child> {
    let mut children = agents::build(cluster, found);
    children.extend(members::build(cluster, found, drawn.map(|drawn| drawn.certificates.as_str())));
    if cluster.spec.etcd.mode == EtcdMode::Managed {
        children.extend(etcd::build(cluster, found, drawn));
    }
    children.push(identities::build(cluster, found));
    children.push(connection::build(cluster, &found.referred.names));
    children.extend(injection::build(cluster, &found.referred.names));
    children.extend(monitoring::build(cluster, &found.referred.names));
    children.sort_by_key(|child| ChildKind::ALL.iter().position(|kind| *kind == child.kind));
    children
}

/// Metadata of a child: in the cluster's namespace, owned by the cluster.
pub(super) fn metadata(
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

/// A ConfigMap that nobody else has any business in.
fn config_map(metadata: Value, data: &Value) -> Child {
    Child::new(ChildKind::ConfigMap, Ownership::OursAlone, metadata, &json!({ "data": data }))
}

/// A service account without rights of its own.
fn service_account(metadata: Value) -> Child {
    let rest = json!({ "automountServiceAccountToken": false });
    Child::new(ChildKind::ServiceAccount, Ownership::OursAlone, metadata, &rest)
}
