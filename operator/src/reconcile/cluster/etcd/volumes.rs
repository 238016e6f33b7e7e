//! Detects why volumes of a managed etcd cannot be provisioned: the requested storage class does not exist,
//! or there is no default class.
//!
//! It checks only pending claims while etcd has no quorum; a bound claim needs no class. Kubernetes assigns a
//! default class to claims without one as soon as it exists, and binds claims once their class exists, so the
//! children are created regardless. A manually created volume binds without a class.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DynamicObject, ListParams};
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

/// Name of a storage class, and whether it is the default.
struct ClassInfo {
    name: String,
    is_default: bool,
}

/// Describes why volumes of a cluster's etcd cannot be provisioned. Returns `None` if there is no such
/// reason, etcd does not wait for volumes, or the API does not permit the check.
pub(in crate::reconcile::cluster) async fn problem(
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
    match classes.list_metadata(&ListParams::default()).await {
        Ok(found) => {
            let classes: Vec<ClassInfo> = found.items.iter().map(class).collect();
            missing_class(wanted.as_deref(), &classes)
        }
        Err(error) => {
            // The operator may lack the permission.
            tracing::debug!(%error, "cannot list storage classes");
            None
        }
    }
}

/// Whether a cluster may be waiting for etcd's volumes. False if the operator does not change the cluster.
pub(in crate::reconcile::cluster) fn may_be_missing(
    cluster: &KVCacheCluster,
    etcd: Option<&DynamicObject>,
) -> bool {
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
        match api.get_opt(&name).await {
            Ok(found) => {
                let waits = |claim: &PersistentVolumeClaim| {
                    claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some(PENDING)
                };
                if let Some(claim) = found.filter(waits) {
                    return Some(claim);
                }
            }
            Err(error) => {
                // The operator may lack the permission.
                tracing::debug!(%error, claim = name, "cannot read a volume claim of etcd");
                return None;
            }
        }
    }
    None
}

fn class(found: &impl ResourceExt) -> ClassInfo {
    let is_set = |key: &&str| found.annotations().get(*key).is_some_and(|value| value == "true");
    ClassInfo { name: found.name_any(), is_default: IS_DEFAULT.iter().any(is_set) }
}

/// Describes why the requested class is unavailable, and the remedy.
fn missing_class(wanted: Option<&str>, classes: &[ClassInfo]) -> Option<String> {
    let have = match classes {
        [] => "there are no StorageClasses".to_owned(),
        some => {
            let names: Vec<&str> = some.iter().take(NAMES_MAX).map(|class| class.name.as_str()).collect();
            format!("existing: {}", names.join(", "))
        }
    };
    match wanted {
        Some(name) if !classes.iter().any(|class| class.name == name) => Some(format!(
            "etcd's volume claims are pending because StorageClass {name} does not exist ({have}): create it, or re-create the \
             KVCacheCluster with another class, since the field is immutable"
        )),
        None if !classes.iter().any(|class| class.is_default) => Some(format!(
            "etcd's volume claims are pending because there is no default StorageClass ({have}): annotate one with {}: \"true\", or \
             re-create the KVCacheCluster with etcd.managed.storage.storageClassName, which cannot be set later",
            IS_DEFAULT[0]
        )),
        _ => None,
    }
}
