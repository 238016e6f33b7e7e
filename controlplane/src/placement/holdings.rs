//! What tenants hold: of those whose hash slots are this member's, while its place in the map is certain.

use reprise_controlplane_core::{HeldTogether, OwnPlace};
use reprise_policy::TenantName;
use reprise_policy::tenant::{TENANTS_MAX, TenantError};
use reprise_proto::controlplane::{self as wire, ListHoldingsReply, ListHoldingsRequest, TenantHolding};
use tonic::Status;

use super::PlacementService;
use super::reports::bytes;

/// Nodes that an answer names at the most: names are for people.
const NAMED_MAX: usize = 16;

/// Answers for this member's tenants, and for none while somebody else may have them.
pub(super) fn list(
    service: &PlacementService,
    request: &ListHoldingsRequest,
) -> Result<ListHoldingsReply, Status> {
    let tenants = names(&request.tenants)?;
    let cluster = &service.cluster;
    let Some(view) = service.shards.certain_map() else { return Ok(ListHoldingsReply::default()) };
    let Some(incarnation) = service.shards.incarnation(&view) else {
        return Ok(ListHoldingsReply::default());
    };
    let place = OwnPlace { map: &view.map, name: service.shards.name(), incarnation };
    let HeldTogether { tenants, unheard, away } =
        cluster.holdings.list(cluster.now(), &place, &cluster.known_nodes(), tenants);
    let named = unheard.iter().take(NAMED_MAX).filter_map(|node| Some(cluster.name_and_mode(*node)?.0));
    let tenants = tenants.into_iter().map(|(tenant, held)| TenantHolding {
        tenant: tenant.to_string(),
        used: Some(bytes(held.used)),
        blocks: held.blocks.map(|blocks| wire::Blocks { dram: blocks.dram, nvme: blocks.nvme }),
    });
    Ok(ListHoldingsReply {
        tenants: tenants.collect(),
        unheard: named.collect(),
        unheard_nodes: count(unheard.len()),
        away_nodes: count(away),
    })
}

/// There are fewer nodes than that.
fn count(nodes: usize) -> u32 {
    u32::try_from(nodes).unwrap_or(u32::MAX)
}

fn names(asked: &[String]) -> Result<Vec<TenantName>, Status> {
    if asked.len() > TENANTS_MAX {
        let many = asked.len();
        return Err(Status::invalid_argument(format!("{many} tenants: ask for {TENANTS_MAX} at the most")));
    }
    let name = |text: &String| {
        if text.is_empty() {
            return Err(Status::invalid_argument(
                "name the tenants; that of sessions that name none is 'default'",
            ));
        }
        text.parse().map_err(|error: TenantError| Status::invalid_argument(error.to_string()))
    };
    asked.iter().map(name).collect()
}
