//! Whether volumes of a managed etcd can come: the storage class that they ask for is there, or one is the default.
//!
//! Asked only while etcd's members are not ready, and of claims that are pending, since it is then that volumes are what they wait for: a claim
//! that is bound needs no class any more. Claims that name no class get one as soon as one becomes the default, and those that name one
//! are bound as soon as it is there, so children are made all the same. A volume that somebody made for the claims by hand needs no class:
//! then they are bound.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, DynamicObject, ListParams};
use kube::{Client, ResourceExt};
use reprise_crds::KVCacheCluster;
use reprise_crds::cluster::EtcdMode;
use tokio::sync::Mutex;

use super::build::ETCD_CLAIM;
use super::status::etcd_members;
use crate::context::Context;
use crate::in_use;
use crate::names::ClusterNames;

/// How long a look holds: all clusters that wait share it.
const STAYS: Duration = Duration::from_secs(4);

/// Annotations that make a class the default one; the second is Kubernetes' older name of it.
const IS_DEFAULT: [&str; 2] =
    ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"];

/// Phase of a claim that has no volume.
const PENDING: &str = "Pending";

/// So many classes are named, at the most.
const NAMES_MAX: usize = 5;

/// A storage class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    name: String,
    is_default: bool,
}

/// All of them. `None`: they cannot be looked at.
type Classes = Option<Vec<Class>>;

/// The last look at classes.
#[derive(Debug, Default)]
pub struct ClassLooks {
    last: Mutex<Option<(Instant, Classes)>>,
}

impl ClassLooks {
    /// What keeps volumes of a cluster's etcd from coming, in words. `None`: nothing does, nobody waits for them, or nobody can say.
    pub async fn missing(
        &self,
        cluster: &KVCacheCluster,
        etcd: Option<&DynamicObject>,
        context: &Context,
    ) -> Option<String> {
        // Claims are made by the controller of its StatefulSet; a cluster that is refused may have none.
        if etcd.is_none() || !wait(cluster, etcd) {
            return None;
        }
        let pending = pending(cluster, &context.client).await?;
        let class = pending.spec.and_then(|spec| spec.storage_class_name);
        lacks(class.as_deref(), &self.look(&context.client).await?)
    }

    async fn look(&self, client: &Client) -> Classes {
        let mut last = self.last.lock().await;
        if let Some((when, look)) = &*last
            && when.elapsed() < STAYS
        {
            return look.clone();
        }
        let api: Api<StorageClass> = Api::all(client.clone());
        let listed = api.list_metadata(&ListParams::default()).await;
        let look = match listed {
            Ok(found) => Some(found.items.iter().map(class).collect()),
            Err(error) => {
                // The chart of an older version gives no right to it.
                tracing::debug!(%error, "storage classes cannot be looked at");
                None
            }
        };
        *last = Some((Instant::now(), look.clone()));
        look
    }
}

/// Whether volumes of a cluster's etcd may be what it waits for. Not of one that is left as it is.
pub(super) fn wait(cluster: &KVCacheCluster, etcd: Option<&DynamicObject>) -> bool {
    let is_kept = in_use::is_kept(cluster) && !cluster.spec.paused;
    is_kept && cluster.spec.etcd.mode == EtcdMode::Managed && !etcd_members(cluster, etcd).answer()
}

/// The first claim of a cluster's etcd that is not bound, if there is one, and somebody can say.
async fn pending(cluster: &KVCacheCluster, client: &Client) -> Option<PersistentVolumeClaim> {
    let names = ClusterNames::of(cluster);
    let replicas = cluster.spec.etcd.managed.clone().unwrap_or_default().replicas;
    let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &names.namespace);
    for member in 0..replicas {
        // As the controller of StatefulSets names them.
        let name = format!("{ETCD_CLAIM}-{}-{member}", names.etcd());
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
                // The chart of an older version gives no right to it.
                tracing::debug!(%error, claim = name, "a volume claim of etcd cannot be looked at");
                return None;
            }
        }
    }
    None
}

fn class(found: &impl ResourceExt) -> Class {
    let says_so = |key: &&str| found.annotations().get(*key).is_some_and(|value| value == "true");
    Class { name: found.name_any(), is_default: IS_DEFAULT.iter().any(says_so) }
}

/// What is wrong with the wanted class among those that there are, and what to do.
fn lacks(wanted: Option<&str>, classes: &[Class]) -> Option<String> {
    let have = match classes {
        [] => "there is none at all".to_owned(),
        some => {
            let names: Vec<&str> = some.iter().take(NAMES_MAX).map(|class| class.name.as_str()).collect();
            format!("there are {}", names.join(", "))
        }
    };
    match wanted {
        Some(name) if !classes.iter().any(|class| class.name == name) => Some(format!(
            "etcd's volume claims ask for StorageClass {name}, and there is none of this name ({have}), so they stay pending: make that StorageClass, or make the KVCacheCluster anew with another one, since it cannot be changed"
        )),
        None if !classes.iter().any(|class| class.is_default) => Some(format!(
            "no StorageClass is the default one ({have}), so etcd's volume claims stay pending: annotate one with {}: \"true\", or \
             make the KVCacheCluster anew with etcd.managed.storage.storageClassName, which cannot be set afterwards",
            IS_DEFAULT[0]
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn named(name: &str, is_default: bool) -> Class {
        Class { name: name.to_owned(), is_default }
    }

    #[test]
    fn a_class_that_is_not_there_is_lacking_and_the_others_are_named() {
        let said = lacks(Some("fast"), &[named("slow", true)]).expect("it is not there");
        assert!(said.contains("StorageClass fast") && said.contains("there are slow"), "{said}");
        assert_eq!(lacks(Some("fast"), &[named("slow", true), named("fast", false)]), None);
    }

    #[test]
    fn without_a_name_one_must_be_the_default() {
        let said = lacks(None, &[named("slow", false)]).expect("none is");
        assert!(said.contains("is-default-class: \"true\"") && said.contains("slow"), "{said}");
        assert!(lacks(None, &[]).expect("there is none").contains("none at all"));
        assert_eq!(lacks(None, &[named("slow", false), named("fast", true)]), None);
    }

    #[test]
    fn the_default_class_is_known_by_either_annotation_and_by_true_alone() {
        let of = |key: &str, value: &str| -> Class {
            let object = json!({
                "provisioner": "x", "metadata": { "name": "s", "annotations": { key: value } },
            });
            class(&serde_json::from_value::<StorageClass>(object).expect("a class"))
        };
        for key in IS_DEFAULT {
            assert!(of(key, "true").is_default, "{key}");
            assert!(!of(key, "false").is_default, "{key}");
        }
        assert!(!of("is-default-class", "true").is_default);
    }
}
