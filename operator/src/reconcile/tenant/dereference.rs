//! Reads the clusters of a tenant.

use std::sync::Arc;

use reprise_crds::{CacheTenant, KVCacheCluster};

use crate::reconcile::membership::applies_to;
use crate::reconcile::names::ClusterNames;

/// The clusters of the Kubernetes cluster, as one tenant sees them.
#[derive(Clone, Debug, Default)]
pub struct TenantClusters {
    /// All clusters whose control planes stay, by name.
    pub present: Vec<TenantCluster>,
    /// Clusters that the tenant applies to and that are being deleted, as `namespace/name`.
    pub released: Vec<String>,
}

/// A cluster, as one tenant sees it.
#[derive(Clone, Debug)]
pub struct TenantCluster {
    pub cluster: Arc<KVCacheCluster>,
    pub names: ClusterNames,
    /// Whether the tenant applies to it.
    pub is_member: bool,
}

impl TenantClusters {
    /// Evaluates the stored clusters for a tenant.
    pub fn of(tenant: &CacheTenant, clusters: Vec<Arc<KVCacheCluster>>) -> TenantClusters {
        let mut of_tenant = TenantClusters::default();
        for cluster in clusters {
            let names = ClusterNames::of(&cluster);
            let is_member = applies_to(tenant, &names);
            match cluster.metadata.deletion_timestamp.is_some() {
                false => of_tenant.present.push(TenantCluster { cluster, names, is_member }),
                true if is_member => of_tenant.released.push(names.key()),
                true => {}
            }
        }
        of_tenant.present.sort_by_key(|one| one.names.key());
        of_tenant.released.sort();
        of_tenant
    }

    /// Returns the present clusters that the tenant applies to.
    pub fn members(&self) -> impl Iterator<Item = &TenantCluster> {
        self.present.iter().filter(|one| one.is_member)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reconcile::test_objects::{object, resource};

    #[test]
    fn deleted_clusters_are_released_and_unselected_ones_are_absent() {
        let cluster = |(name, deleted): (&str, Option<&str>)| -> Arc<KVCacheCluster> {
            let metadata = json!({ "namespace": "n", "name": name, "deletionTimestamp": deleted });
            Arc::new(resource(metadata, json!({ "spec": {} })))
        };
        let then = Some("2026-01-01T00:00:00Z");
        let clusters = [("stays", None), ("other", None), ("deleted", then), ("also", then)].map(cluster);
        let named = json!([{ "namespace": "n", "name": "stays" }, { "namespace": "n", "name": "deleted" }]);
        for (named, members, released) in [
            (json!([]), vec!["n/other", "n/stays"], vec!["n/also", "n/deleted"]),
            (named, vec!["n/stays"], vec!["n/deleted"]),
        ] {
            let tenant = CacheTenant::new("t", object(json!({ "clusters": named })));
            let of = TenantClusters::of(&tenant, clusters.to_vec());
            assert_eq!(of.present.len(), 2);
            assert_eq!(of.members().map(|one| one.names.key()).collect::<Vec<_>>(), members);
            assert_eq!(of.released, released);
        }
    }
}
