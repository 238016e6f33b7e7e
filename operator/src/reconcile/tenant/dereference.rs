//! Reads the capacity of the nodes of a tenant's clusters, and the reservations of all tenants there.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::Quantity;
use reprise_crds::{CacheTenant, KVCacheCluster};

use crate::reconcile::context::Context;
use crate::reconcile::membership::has_reported;
use crate::reconcile::membership::tenants;
use crate::reconcile::names::ClusterNames;

/// Capacity and reservations of one kind, for one node or for every node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapacityCheck {
    /// The node or cluster.
    pub scope: CapacityScope,
    /// The field of a tenant that reserves it.
    pub field: &'static str,
    /// Bytes available in the scope.
    pub available: u64,
    /// Bytes that all tenants of the cluster reserve.
    pub reserved: u64,
    /// Tenants that reserve some of it.
    pub tenants: Vec<String>,
}

/// Scope of a capacity check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CapacityScope {
    /// A node, by its agent's recent report.
    Node(String),
    /// Every node of this cluster (`namespace/name`), by its spec; with the tenants whose reservations do not
    /// fit and are not applied.
    Cluster(String, Vec<String>),
}

/// Reads the checks from the local stores, for nodes that have reported recently.
pub fn dereference(tenant: &CacheTenant, context: &Context) -> Vec<CapacityCheck> {
    let stores = &context.stores;
    let assignment = stores.assignment();
    let mut checks = Vec::new();
    for cluster in stores.clusters.state() {
        let names = ClusterNames::of(&cluster);
        let of_cluster = tenants(context, &names);
        if !of_cluster.iter().any(|other| other.name_any() == tenant.name_any()) {
            continue;
        }
        let memory: Reserves = |tenant| &tenant.spec.per_node.dram.reserved;
        let devices: Reserves = |tenant| &tenant.spec.per_node.ssd.reserved;
        let region = bytes(&cluster.spec.cache.region_size).max(1);
        let check = |scope: CapacityScope,
                     available: &Quantity,
                     (field, reserves, unit): (&'static str, Reserves, u64)| {
            let reserving = of_cluster.iter().filter(|tenant| bytes(reserves(tenant)) > 0);
            CapacityCheck {
                scope,
                field,
                available: bytes(available),
                reserved: reserving
                    .clone()
                    .map(|tenant| whole(reserves(tenant), unit))
                    .fold(0, u64::saturating_add),
                tenants: reserving.map(|tenant| tenant.name_any()).collect(),
            }
        };
        let of_memory = ("perNode.dram.reserved", memory, region);
        let unreserved = without_reservation(&cluster, &of_cluster).into_iter().collect();
        checks.push(check(
            CapacityScope::Cluster(names.key(), unreserved),
            &cluster.spec.cache.dram,
            of_memory,
        ));
        for node in
            assignment.cluster(&cluster).map(|assignment| assignment.nodes.as_slice()).unwrap_or_default()
        {
            let found = stores.cache_nodes.get(&ObjectRef::new(node)).filter(|found| has_reported(found));
            let status = found.as_ref().and_then(|found| found.status.as_ref());
            let Some(capacity) = status.and_then(|status| status.capacity.as_ref()) else { continue };
            checks.push(check(CapacityScope::Node(node.clone()), &capacity.dram_total, of_memory));
            let of_devices = ("perNode.ssd.reserved", devices, 1);
            checks.push(check(CapacityScope::Node(node.clone()), &capacity.ssd_total, of_devices));
        }
    }
    checks
}

/// Returns a reserved quantity of a tenant.
type Reserves = fn(&CacheTenant) -> &Quantity;

fn bytes(quantity: &Quantity) -> u64 {
    quantity.bytes().unwrap_or_default()
}

/// Rounds up to whole units, as agents do.
fn whole(reserved: &Quantity, unit: u64) -> u64 {
    bytes(reserved).div_ceil(unit).saturating_mul(unit)
}

/// Returns the tenants whose memory reservations the agents of a cluster do not apply, because those of older
/// tenants leave too little. An agent with larger reservations than memory would not start.
pub fn without_reservation(cluster: &KVCacheCluster, tenants: &[Arc<CacheTenant>]) -> BTreeSet<String> {
    let region = bytes(&cluster.spec.cache.region_size).max(1);
    let mut left = bytes(&cluster.spec.cache.dram);
    let mut by_age: Vec<&Arc<CacheTenant>> = tenants.iter().collect();
    by_age.sort_by_cached_key(|tenant| {
        (tenant.metadata.creation_timestamp.as_ref().map(|time| time.0), tenant.name_any())
    });
    let mut out = BTreeSet::new();
    for tenant in by_age {
        match left.checked_sub(whole(&tenant.spec.per_node.dram.reserved, region)) {
            Some(rest) => left = rest,
            None => {
                out.insert(tenant.name_any());
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn drops_youngest_reservations_that_do_not_fit_in_whole_regions() {
        let cluster: KVCacheCluster = serde_json::from_value(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "metadata": { "name": "c" },
            "spec": { "cache": { "dram": "1Gi", "regionSize": "256Mi" } },
        }))
        .expect("a cluster");
        let tenant = |(name, day, reserved): (&str, u32, &str)| -> Arc<CacheTenant> {
            let whole = json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant",
                "metadata": { "name": name, "creationTimestamp": format!("2026-01-{day:02}T00:00:00Z") },
                "spec": { "perNode": { "dram": { "reserved": reserved } } },
            });
            Arc::new(serde_json::from_value(whole).expect("a tenant"))
        };
        let out = |tenants: &[(&str, u32, &str)]| -> Vec<String> {
            let tenants: Vec<Arc<CacheTenant>> = tenants.iter().copied().map(tenant).collect();
            without_reservation(&cluster, &tenants).into_iter().collect()
        };
        let of_100 = |name, day| (name, day, "100Mi");
        // Each takes a whole region, and there are four.
        let four = [of_100("a", 9), of_100("b", 2), of_100("c", 3), of_100("d", 4)];
        assert_eq!(out(&four), [""; 0]);
        let five: Vec<_> = four.into_iter().chain([of_100("e", 5)]).collect();
        assert_eq!(out(&five), ["a"]);
        // One that is too large leaves the memory to younger ones.
        assert_eq!(out(&[("large", 1, "2Gi"), of_100("small", 2), ("nothing", 3, "0")]), ["large"]);
    }
}
