//! Detects why volumes of a managed etcd cannot be provisioned: the requested storage class does not exist,
//! or there is no default class.
//!
//! It checks the first claim only while it is pending and etcd has no quorum. The children are created regardless:
//! Kubernetes binds claims once their class exists, and a volume created by hand needs no class.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, ListParams};
use kube::core::PartialObjectMeta;
use kube::{Client, ResourceExt};

use super::DATA_VOLUME;
use crate::framework::refusal::list;
use crate::reconcile::names::ClusterNames;

/// Annotation that marks the default class.
const IS_DEFAULT: &str = "storageclass.kubernetes.io/is-default-class";

/// Describes why volumes of a cluster's etcd cannot be provisioned. Returns `None` if there is no such
/// reason, or the API does not permit the check.
pub(crate) async fn problem(names: &ClusterNames, client: &Client) -> Option<String> {
    let found = missing_class(names, client).await;
    // The operator may lack the permission.
    found.inspect_err(|error| tracing::debug!(%error, "cannot check the volumes of etcd")).ok().flatten()
}

async fn missing_class(names: &ClusterNames, client: &Client) -> Result<Option<String>, kube::Error> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &names.namespace);
    // The name that the StatefulSet controller gives to the claim.
    let claim = claims.get_opt(&format!("{DATA_VOLUME}-{}-0", names.etcd())).await?;
    let phase = |claim: &PersistentVolumeClaim| claim.status.as_ref()?.phase.clone();
    let Some(claim) = claim.filter(|claim| phase(claim).as_deref() == Some("Pending")) else {
        return Ok(None);
    };
    let classes = Api::<StorageClass>::all(client.clone()).list_metadata(&ListParams::default()).await?.items;
    let have = match classes.as_slice() {
        [] => "there are no StorageClasses".to_owned(),
        some => format!("existing: {}", list(some.iter().map(ResourceExt::name_any))),
    };
    let is_default = |class: &PartialObjectMeta<StorageClass>| {
        class.annotations().get(IS_DEFAULT).is_some_and(|value| value == "true")
    };
    Ok(match claim.spec.and_then(|spec| spec.storage_class_name) {
        Some(name) if !classes.iter().any(|class| class.name_any() == name) => Some(format!(
            "etcd's volume claims are pending because StorageClass {name} does not exist ({have}): create it, or re-create the \
             KVCacheCluster with another class, since the field is immutable"
        )),
        None if !classes.iter().any(is_default) => Some(format!(
            "etcd's volume claims are pending because there is no default StorageClass ({have}): annotate one with {IS_DEFAULT}: \"true\", or \
             re-create the KVCacheCluster with etcd.managed.storage.storageClassName, which cannot be set later"
        )),
        _ => None,
    })
}
