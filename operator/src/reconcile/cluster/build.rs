//! Builds the children of a cluster as values. Pure; its inputs were validated.

use kube::Resource;
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::EtcdMode;
use serde_json::{Value, json};

use super::certificates::CertificateDigests;
use super::dereference::ClusterInputs;
use crate::framework::child::{Child, ChildKind, Ownership};
use crate::reconcile::names::{ClusterNames, Component};

mod access;
mod agents;
pub mod certificates;
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

pub(super) use self::etcd::{ETCD_CLAIM, is_scaled_to_zero};

/// Returns all children of a cluster in the order in which they are applied. `certificates` belong to a
/// managed etcd.
pub fn build(
    cluster: &KVCacheCluster,
    inputs: &ClusterInputs,
    certificates: Option<&CertificateDigests>,
) -> Vec<Child> {
    let mut children = agents::build(cluster, inputs);
    children.extend(members::build(
        cluster,
        inputs,
        certificates.map(|certificates| certificates.certificates.as_str()),
    ));
    if cluster.spec.etcd.mode == EtcdMode::Managed {
        children.extend(etcd::build(cluster, inputs, certificates));
    }
    children.extend(certificates::build(cluster, inputs));
    children.push(identities::build(cluster, inputs));
    children.push(connection::build(cluster, &inputs.agent_config.names));
    children.extend(injection::build(cluster, &inputs.agent_config.names));
    children.extend(monitoring::build(cluster, &inputs.agent_config.names));
    children.sort_by_key(|child| ChildKind::ALL.iter().position(|kind| *kind == child.kind));
    children
}

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
fn config_map(metadata: Value, data: &Value) -> Child {
    Child::new(ChildKind::ConfigMap, Ownership::Exclusive, metadata, &json!({ "data": data }))
}

/// A service account without a mounted token.
fn service_account(metadata: Value) -> Child {
    let rest = json!({ "automountServiceAccountToken": false });
    Child::new(ChildKind::ServiceAccount, Ownership::Exclusive, metadata, &rest)
}
