//! `ListHoldings`: usage of the tenants in this member's slots, while its place in the map is certain.

use reprise_controlplane_core::UsageSummary;
use reprise_policy::TenantName;
use reprise_policy::tenant::{TENANTS_MAX, TenantError};
use reprise_proto::controlplane::{self as wire, ListHoldingsReply, ListHoldingsRequest, TenantHolding};
use tonic::Status;

use super::PlacementService;
use super::reports::bytes;

/// Maximum number of node names in a reply; they are for display.
const NAMED_MAX: usize = 16;

/// Handles a `ListHoldings` request; replies without tenants while this member's place is uncertain.
pub(super) fn list(
    service: &PlacementService,
    request: &ListHoldingsRequest,
) -> Result<ListHoldingsReply, Status> {
    let tenants = names(&request.tenants)?;
    let cluster = &service.cluster;
    let summary = service
        .shards
        .with_place(|place| cluster.tenant_usage.list(cluster.now(), place, &cluster.known_nodes(), tenants));
    let Some(UsageSummary { tenants, unreported, absent }) = summary else {
        return Ok(ListHoldingsReply::default());
    };
    let named = unreported.iter().take(NAMED_MAX).filter_map(|node| Some(cluster.name_and_mode(*node)?.0));
    let tenants = tenants.into_iter().map(|(tenant, held)| TenantHolding {
        tenant: tenant.to_string(),
        used: Some(bytes(held.used)),
        blocks: held.blocks.map(|blocks| wire::Blocks { dram: blocks.dram, nvme: blocks.nvme }),
    });
    Ok(ListHoldingsReply {
        tenants: tenants.collect(),
        unheard: named.collect(),
        unheard_nodes: count(unreported.len()),
        away_nodes: count(absent),
    })
}

/// Converts a number of nodes, which is below 2³².
fn count(nodes: usize) -> u32 {
    u32::try_from(nodes).unwrap_or(u32::MAX)
}

fn names(requested: &[String]) -> Result<Vec<TenantName>, Status> {
    if requested.len() > TENANTS_MAX {
        let many = requested.len();
        return Err(Status::invalid_argument(format!(
            "invalid request with {many} tenants: expected at most {TENANTS_MAX}"
        )));
    }
    let name = |text: &String| {
        if text.is_empty() {
            return Err(Status::invalid_argument(
                "empty tenant name: sessions without a tenant belong to 'default'",
            ));
        }
        text.parse().map_err(|error: TenantError| Status::invalid_argument(error.to_string()))
    };
    requested.iter().map(name).collect()
}
