//! Reads what the nodes of a tenant's clusters have, and what all tenants reserve there.

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::CacheTenant;
use reprise_crds::fields::Quantity;

use crate::cluster::dereference::tenants;
use crate::cluster::status::has_reported;
use crate::context::Context;
use crate::names::ClusterNames;

/// One kind of room on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// The node.
    pub node: String,
    /// The field of a tenant that reserves it.
    pub field: &'static str,
    /// Bytes that there are.
    pub there: u64,
    /// Bytes that all tenants of the cluster reserve.
    pub reserved: u64,
    /// Who does.
    pub tenants: Vec<String>,
}

/// Reads it, from the stores; of nodes that have said something lately.
pub fn dereference(tenant: &CacheTenant, context: &Context) -> Vec<Room> {
    let world = &context.world;
    let plan = world.plan();
    let mut rooms = Vec::new();
    for cluster in world.clusters.state() {
        let of_cluster = tenants(context, &ClusterNames::of(&cluster));
        if !of_cluster.iter().any(|other| other.name_any() == tenant.name_any()) {
            continue;
        }
        for node in plan.cluster(&cluster).map(|plan| plan.nodes.as_slice()).unwrap_or_default() {
            let found = world.cache_nodes.get(&ObjectRef::new(node)).filter(|found| has_reported(found));
            let status = found.as_ref().and_then(|found| found.status.as_ref());
            let Some(capacity) = status.and_then(|status| status.capacity.as_ref()) else { continue };
            type Reserves = fn(&CacheTenant) -> &Quantity;
            let kinds: [(&'static str, &Quantity, Reserves); 2] = [
                ("perNode.dram.reserved", &capacity.dram_total, |tenant| &tenant.spec.per_node.dram.reserved),
                ("perNode.ssd.reserved", &capacity.ssd_total, |tenant| &tenant.spec.per_node.ssd.reserved),
            ];
            for (field, there, reserves) in kinds {
                let bytes = |tenant: &CacheTenant| reserves(tenant).bytes().unwrap_or_default();
                let who = of_cluster.iter().filter(|tenant| bytes(tenant) > 0);
                rooms.push(Room {
                    node: node.clone(),
                    field,
                    there: there.bytes().unwrap_or_default(),
                    reserved: who.clone().map(|tenant| bytes(tenant)).fold(0, u64::saturating_add),
                    tenants: who.map(|tenant| tenant.name_any()).collect(),
                });
            }
        }
    }
    rooms
}
