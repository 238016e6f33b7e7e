//! Checks that the reservations of all tenants fit the capacity of clusters and of their nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::{CacheTenant, KVCacheCluster};

use super::dereference::{TenantCluster, TenantClusters};
use crate::framework::refusal::list;
use crate::reconcile::context::Context;
use crate::reconcile::membership::{has_reported, tenants};

/// Reservations of all tenants of a cluster for each node, of one kind.
struct Reservations {
    /// The field of a tenant.
    field: &'static str,
    /// How the bytes are counted.
    counted: &'static str,
    bytes: u64,
    /// Tenants that reserve some of it.
    tenants: Vec<String>,
}

/// Returns condition `QuotaFeasible` for reservations per node: whether those of all tenants in a tenant's clusters fit
/// the memory of the spec, and the capacity of the nodes that have reported recently.
pub fn finding(tenant: &CacheTenant, clusters: &TenantClusters, context: &Context) -> Finding {
    let (kind, stores) = (ConditionType::QuotaFeasible, &context.stores);
    let assignment = stores.assignment();
    let mut has_capacity = false;
    for TenantCluster { cluster, names, .. } in clusters.members() {
        let of_cluster = tenants(context, names);
        // A rejected tenant reserves nothing.
        if !of_cluster.iter().any(|other| other.name_any() == tenant.name_any()) {
            continue;
        }
        let memory = Reservations::of_memory(cluster, &of_cluster);
        let devices = Reservations::of(&of_cluster, ("perNode.ssd.reserved", "in total"), |tenant| {
            bytes(&tenant.spec.per_node.ssd.reserved)
        });
        let unreserved = without_reservation(cluster, &of_cluster);
        let spec = format!("cache.dram of KVCacheCluster {}", names.key());
        let excess = memory.above(&spec, &cluster.spec.cache.dram).map(|excess| {
            format!("{excess}. Until then its agents reserve nothing for {}", list(&unreserved))
        });
        let nodes = assignment.cluster(cluster).map(|own| own.nodes.as_slice()).unwrap_or_default();
        let excess = excess.or_else(|| {
            nodes.iter().find_map(|node| {
                let found =
                    stores.cache_nodes.get(&ObjectRef::new(node)).filter(|found| has_reported(found))?;
                let capacity = found.status.as_ref()?.capacity.as_ref()?;
                has_capacity = true;
                let node = format!("node {node}");
                memory
                    .above(&node, &capacity.dram_total)
                    .or_else(|| devices.above(&node, &capacity.ssd_total))
            })
        });
        if let Some(message) = excess {
            return Finding::no(kind, Reason::OverCapacity, message);
        }
    }
    if !has_capacity {
        return Finding::unknown(kind, Reason::NotReported, "no node has reported its capacity yet");
    }
    Finding::yes(kind, Reason::AsDesired, "the reservations of all tenants fit every node")
}

impl Reservations {
    fn of(
        tenants: &[Arc<CacheTenant>],
        (field, counted): (&'static str, &'static str),
        reserved: impl Fn(&CacheTenant) -> u64,
    ) -> Reservations {
        let reserving = tenants.iter().filter(|tenant| reserved(tenant) > 0);
        Reservations {
            field,
            counted,
            bytes: tenants.iter().fold(0, |sum, tenant| sum.saturating_add(reserved(tenant))),
            tenants: reserving.map(|tenant| tenant.name_any()).collect(),
        }
    }

    fn of_memory(cluster: &KVCacheCluster, tenants: &[Arc<CacheTenant>]) -> Reservations {
        Reservations::of(tenants, ("perNode.dram.reserved", "in whole regions"), |tenant| {
            memory(cluster, tenant)
        })
    }

    /// Describes the excess above a capacity, with the tenants that should reserve less.
    fn above(&self, owner: &str, available: &Quantity) -> Option<String> {
        let Reservations { field, counted, bytes: reserved, tenants } = self;
        let (total, tenants) = (Quantity::of_bytes(*reserved), list(tenants));
        (*reserved > bytes(available)).then(|| {
            format!(
                "{field} of all tenants is {total} {counted}, above the {available} of {owner}: lower that of {tenants}, or extend {owner}"
            )
        })
    }
}

fn bytes(quantity: &Quantity) -> u64 {
    quantity.bytes().unwrap_or_default()
}

/// Returns the memory that a tenant reserves in whole regions of a cluster's arenas, as agents do.
fn memory(cluster: &KVCacheCluster, tenant: &CacheTenant) -> u64 {
    let region = bytes(&cluster.spec.cache.region_size).max(1);
    bytes(&tenant.spec.per_node.dram.reserved).div_ceil(region).saturating_mul(region)
}

/// Returns the tenants whose memory reservations the agents of a cluster do not apply, because those of older
/// tenants leave too little. An agent with larger reservations than memory would not start.
pub fn without_reservation(cluster: &KVCacheCluster, tenants: &[Arc<CacheTenant>]) -> BTreeSet<String> {
    let mut left = bytes(&cluster.spec.cache.dram);
    let mut by_age: Vec<&Arc<CacheTenant>> = tenants.iter().collect();
    by_age.sort_by_cached_key(|tenant| (tenant.creation_timestamp(), tenant.name_any()));
    let does_not_fit = |tenant: &&Arc<CacheTenant>| match left.checked_sub(memory(cluster, tenant)) {
        Some(rest) => {
            left = rest;
            false
        }
        None => true,
    };
    by_age.into_iter().filter(does_not_fit).map(|tenant| tenant.name_any()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reconcile::test_objects::resource;

    #[test]
    fn drops_youngest_reservations_that_do_not_fit_in_whole_regions() {
        let spec = json!({ "cache": { "dram": "1Gi", "regionSize": "256Mi" } });
        let cluster: KVCacheCluster = resource(json!({ "name": "c" }), json!({ "spec": spec }));
        let tenant = |(name, day, reserved): &(&str, u32, &str)| -> Arc<CacheTenant> {
            let metadata =
                json!({ "name": name, "creationTimestamp": format!("2026-01-{day:02}T00:00:00Z") });
            let spec = json!({ "perNode": { "dram": { "reserved": reserved } } });
            Arc::new(resource(metadata, json!({ "spec": spec })))
        };
        let four = [("a", 9, "100Mi"), ("b", 2, "100Mi"), ("c", 3, "100Mi"), ("d", 4, "100Mi")];
        let five = [&four[..], &[("e", 5, "100Mi")]].concat();
        for (tenants, without, excess) in [
            // Each takes a whole region, and there are four.
            (&four[..], &[][..], None),
            (
                &five[..],
                &["a"][..],
                Some("perNode.dram.reserved of all tenants is 1280Mi in whole regions, above the 1Gi of c"),
            ),
            // One that is too large leaves the memory to younger ones.
            (
                &[("large", 1, "2Gi"), ("small", 2, "100Mi"), ("nothing", 3, "0")][..],
                &["large"][..],
                Some("lower that of large, small, or extend c"),
            ),
        ] {
            let tenants: Vec<Arc<CacheTenant>> = tenants.iter().map(tenant).collect();
            assert!(without_reservation(&cluster, &tenants).iter().eq(without), "{without:?}");
            let found = Reservations::of_memory(&cluster, &tenants).above("c", &cluster.spec.cache.dram);
            assert_eq!(found.is_some(), excess.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(excess.unwrap_or_default()), "{excess:?}");
        }
    }
}
