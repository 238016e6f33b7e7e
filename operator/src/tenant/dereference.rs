//! Reads what the nodes of a tenant's clusters have, and what all tenants reserve there.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::Quantity;
use reprise_crds::{CacheTenant, KVCacheCluster};

use crate::cluster::dereference::tenants;
use crate::cluster::status::has_reported;
use crate::context::Context;
use crate::names::ClusterNames;

/// One kind of room, on one node or on all nodes of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Where it is.
    pub place: Place,
    /// The field of a tenant that reserves it.
    pub field: &'static str,
    /// Bytes that there are.
    pub there: u64,
    /// Bytes that all tenants of the cluster reserve.
    pub reserved: u64,
    /// Who does.
    pub tenants: Vec<String>,
}

/// Where room is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// On this node, as its agent said lately.
    Node(String),
    /// On each node of this cluster (`namespace/name`), as its spec says; and the tenants whose reservations its agents are not told, since they do not fit.
    Cluster(String, Vec<String>),
}

/// Reads it, from the stores; of nodes that have said something lately.
pub fn dereference(tenant: &CacheTenant, context: &Context) -> Vec<Room> {
    let world = &context.world;
    let plan = world.plan();
    let mut rooms = Vec::new();
    for cluster in world.clusters.state() {
        let names = ClusterNames::of(&cluster);
        let of_cluster = tenants(context, &names);
        if !of_cluster.iter().any(|other| other.name_any() == tenant.name_any()) {
            continue;
        }
        let memory: Reserves = |tenant| &tenant.spec.per_node.dram.reserved;
        let devices: Reserves = |tenant| &tenant.spec.per_node.ssd.reserved;
        let region = bytes(&cluster.spec.cache.region_size).max(1);
        let room =
            |place: Place, there: &Quantity, (field, reserves, unit): (&'static str, Reserves, u64)| {
                let who = of_cluster.iter().filter(|tenant| bytes(reserves(tenant)) > 0);
                Room {
                    place,
                    field,
                    there: bytes(there),
                    reserved: who
                        .clone()
                        .map(|tenant| whole(reserves(tenant), unit))
                        .fold(0, u64::saturating_add),
                    tenants: who.map(|tenant| tenant.name_any()).collect(),
                }
            };
        let of_memory = ("perNode.dram.reserved", memory, region);
        let left_out = left_out(&cluster, &of_cluster).into_iter().collect();
        rooms.push(room(Place::Cluster(names.key(), left_out), &cluster.spec.cache.dram, of_memory));
        for node in plan.cluster(&cluster).map(|plan| plan.nodes.as_slice()).unwrap_or_default() {
            let found = world.cache_nodes.get(&ObjectRef::new(node)).filter(|found| has_reported(found));
            let status = found.as_ref().and_then(|found| found.status.as_ref());
            let Some(capacity) = status.and_then(|status| status.capacity.as_ref()) else { continue };
            rooms.push(room(Place::Node(node.clone()), &capacity.dram_total, of_memory));
            let of_devices = ("perNode.ssd.reserved", devices, 1);
            rooms.push(room(Place::Node(node.clone()), &capacity.ssd_total, of_devices));
        }
    }
    rooms
}

/// What a tenant reserves.
type Reserves = fn(&CacheTenant) -> &Quantity;

fn bytes(quantity: &Quantity) -> u64 {
    quantity.bytes().unwrap_or_default()
}

/// As agents count it: in whole units.
fn whole(reserved: &Quantity, unit: u64) -> u64 {
    bytes(reserved).div_ceil(unit).saturating_mul(unit)
}

/// Tenants whose memory agents of a cluster do not reserve, since what older ones reserve leaves too little. An agent that was told more than
/// its memory has would not start.
pub fn left_out(cluster: &KVCacheCluster, tenants: &[Arc<CacheTenant>]) -> BTreeSet<String> {
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
    fn reservations_that_do_not_fit_in_whole_regions_are_left_out_the_youngest_first() {
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
            left_out(&cluster, &tenants).into_iter().collect()
        };
        let of_100 = |name, day| (name, day, "100Mi");
        // Each takes a whole region, of which there are four.
        let four = [of_100("a", 9), of_100("b", 2), of_100("c", 3), of_100("d", 4)];
        assert_eq!(out(&four), [""; 0]);
        let five: Vec<_> = four.into_iter().chain([of_100("e", 5)]).collect();
        assert_eq!(out(&five), ["a"]);
        // One that is too large leaves its room to younger ones.
        assert_eq!(out(&[("large", 1, "2Gi"), of_100("small", 2), ("nothing", 3, "0")]), ["large"]);
    }
}
