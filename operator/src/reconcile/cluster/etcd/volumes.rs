//! Detects why volumes of a managed etcd cannot be provisioned: the requested storage class does not exist,
//! or there is no default class.
//!
//! It checks only pending claims while etcd has no quorum; a bound claim needs no class. Kubernetes assigns a
//! default class to claims without one as soon as it exists, and binds claims once their class exists, so the
//! children are created regardless. A manually created volume binds without a class.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::PartialObjectMeta;
use kube::{Client, ResourceExt};
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::EtcdMode;

use super::{DATA_VOLUME, Members};
use crate::reconcile::names::ClusterNames;

/// Annotations that mark the default class: the current one and the older beta one.
const IS_DEFAULT: [&str; 2] =
    ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"];

/// Phase of a claim that has no volume.
const PENDING: &str = "Pending";

/// Maximum number of classes in a message.
const NAMES_MAX: usize = 5;

/// Describes why volumes of a cluster's etcd cannot be provisioned. Returns `None` if there is no such
/// reason, etcd does not wait for volumes, or the API does not permit the check.
pub(crate) async fn problem(
    cluster: &KVCacheCluster,
    etcd: Option<&DynamicObject>,
    client: &Client,
) -> Option<String> {
    // The StatefulSet controller creates the claims; a rejected cluster may have no StatefulSet.
    if etcd.is_none() || !may_be_missing(cluster, etcd) {
        return None;
    }
    let pending = pending(cluster, client).await?;
    let wanted = pending.spec.and_then(|spec| spec.storage_class_name);
    let classes: Api<StorageClass> = Api::all(client.clone());
    // The operator may lack the permission.
    let classes = classes.list_metadata(&ListParams::default()).await;
    let classes = classes.inspect_err(|error| tracing::debug!(%error, "cannot list storage classes")).ok()?;
    missing_class(wanted.as_deref(), &classes.items)
}

/// Whether a cluster may be waiting for etcd's volumes. False if the operator does not change the cluster.
pub(crate) fn may_be_missing(cluster: &KVCacheCluster, etcd: Option<&DynamicObject>) -> bool {
    let is_managed = cluster.spec.etcd.mode == EtcdMode::Managed && !cluster.spec.paused;
    is_managed && !Members::of(cluster, etcd).answer()
}

/// Returns the first pending claim of a cluster's etcd, if there is one and claims can be read.
async fn pending(cluster: &KVCacheCluster, client: &Client) -> Option<PersistentVolumeClaim> {
    let names = ClusterNames::of(cluster);
    let replicas = cluster.spec.etcd.managed.clone().unwrap_or_default().replicas;
    let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &names.namespace);
    for member in 0..replicas {
        // The name that the StatefulSet controller gives to the claim.
        let name = format!("{DATA_VOLUME}-{}-{member}", names.etcd());
        let found = api.get_opt(&name).await;
        // The operator may lack the permission.
        let found = found.inspect_err(|error| tracing::debug!(%error, claim = name, "cannot read a claim"));
        let phase = |claim: &PersistentVolumeClaim| claim.status.as_ref()?.phase.clone();
        if let Some(claim) = found.ok()?.filter(|claim| phase(claim).as_deref() == Some(PENDING)) {
            return Some(claim);
        }
    }
    None
}

/// Describes why the requested class is unavailable, and the remedy.
fn missing_class(wanted: Option<&str>, classes: &[PartialObjectMeta<StorageClass>]) -> Option<String> {
    let names: Vec<String> = classes.iter().map(ResourceExt::name_any).collect();
    let have = match names.as_slice() {
        [] => "there are no StorageClasses".to_owned(),
        some => format!("existing: {}", some[..some.len().min(NAMES_MAX)].join(", ")),
    };
    let is_default = |class: &PartialObjectMeta<StorageClass>| {
        IS_DEFAULT.iter().any(|key| class.annotations().get(*key).is_some_and(|value| value == "true"))
    };
    match wanted {
        Some(name) if !names.iter().any(|one| one == name) => Some(format!(
            "etcd's volume claims are pending because StorageClass {name} does not exist ({have}): create it, or re-create the \
             KVCacheCluster with another class, since the field is immutable"
        )),
        None if !classes.iter().any(is_default) => Some(format!(
            "etcd's volume claims are pending because there is no default StorageClass ({have}): annotate one with {}: \"true\", or \
             re-create the KVCacheCluster with etcd.managed.storage.storageClassName, which cannot be set later",
            IS_DEFAULT[0]
        )),
        _ => None,
    }
}
