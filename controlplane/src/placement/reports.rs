//! Reports of nodes: what they have and do goes to the members' table, what they say of tenants to the ledgers and the holdings.
//!
//! Ledgers and holdings hear only reports that were made by the map that they are kept by. A node names the tenants that it holds
//! something of; whose map is older may be granted one that it does not name, by the member that it takes for the owner.
//! What is compared is the list of members: two members may know one list under two epochs.

use reprise_controlplane_core::{Amounts, Held, NodeReport, Order, OwnPlace, Said, TenantReport, TenantSaid};
use reprise_policy::tenant::TENANTS_MAX;
use reprise_policy::{DrainProgress, Epoch, TenantName};
use reprise_proto::controlplane::{self as wire, ReportReply, ReportRequest, TenantOrder};
use tonic::Status;

use super::PlacementService;
use crate::membership::node_number;
use crate::shards::MemberView;

/// Takes a report and answers what the node is to do.
pub(super) fn take(service: &PlacementService, request: ReportRequest) -> Result<ReportReply, Status> {
    let (node, epoch) = (node_number(request.node)?, Epoch(request.epoch));
    // Older agents do not say by which map they report.
    let is_by = |view: &MemberView| [0, view.map.digest()].contains(&request.map_digest);
    let (said, told): (Vec<Said>, Vec<TenantSaid>) = said(request.tenants)?.into_iter().unzip();
    let report = node_report(request.usage.unwrap_or_default(), request.drain.unwrap_or_default());
    if !service.cluster.report(node, epoch, report) {
        return Ok(ReportReply { fenced: true, ..ReportReply::default() });
    }
    let mut orders = Vec::new();
    if let Some(view) = service.shards.certain_map().filter(|view| is_by(view))
        && let Some(incarnation) = service.shards.incarnation(&view)
    {
        let place = OwnPlace { map: &view.map, name: service.shards.name(), incarnation };
        service.cluster.holdings.report(service.cluster.now(), &place, (node, epoch), told);
        if let Some(budgets) = service.tenants.budgets() {
            let made = service.cluster.ledgers.report(&place, &budgets, (node, epoch), &said);
            orders.extend(made.iter().map(order));
        }
    }
    let r#move = service.decides_moves().then(|| service.cluster.move_of(node)).flatten();
    Ok(ReportReply { orders, r#move, ..service.cluster.directions(node) })
}

fn node_report(usage: wire::NodeUsage, drain: wire::DrainProgress) -> NodeReport {
    NodeReport {
        capacity: amounts(usage.capacity),
        used: amounts(usage.used),
        queued_bytes: usage.queued_bytes,
        drain: DrainProgress {
            drained: drain.drained,
            walked_blocks: drain.walked_blocks,
            durable_blocks: drain.durable_blocks,
            moved_bytes: drain.moved_bytes,
            nowhere_blocks: drain.nowhere_blocks,
        },
    }
}

/// What is said of each tenant, to the ledger and to the holdings.
fn said(reports: Vec<wire::TenantReport>) -> Result<Vec<(Said, TenantSaid)>, Status> {
    if reports.len() > TENANTS_MAX {
        return Err(Status::invalid_argument(format!(
            "{} tenants in a report: a node knows at most {TENANTS_MAX}",
            reports.len()
        )));
    }
    let read = |report: wire::TenantReport| {
        let tenant: TenantName =
            report.tenant.parse().map_err(|error: reprise_policy::tenant::TenantError| {
                Status::invalid_argument(error.to_string())
            })?;
        if report.elsewhere {
            return Ok((Said::Elsewhere(tenant.clone()), TenantSaid::Elsewhere(tenant)));
        }
        let used = amounts(report.used);
        let blocks = report.blocks.map(|wire::Blocks { dram, nvme }| Amounts { dram, nvme });
        let told = TenantSaid::Held(tenant.clone(), Held { used, blocks });
        let said = Said::Here(TenantReport {
            tenant,
            version: report.version,
            limit: amounts(report.limit),
            used,
            limited: amounts(report.limited),
        });
        Ok((said, told))
    };
    reports.into_iter().map(read).collect()
}

/// Without a limit, and sure of nothing, the budget has ended.
fn order(order: &Order) -> TenantOrder {
    let is_limited = order.limit != Amounts::UNLIMITED;
    TenantOrder {
        tenant: order.tenant.to_string(),
        version: order.version,
        reserved: (is_limited || order.reserved != Amounts::default()).then(|| bytes(order.reserved)),
        limit: is_limited.then(|| bytes(order.limit)),
    }
}

pub(super) fn amounts(bytes: Option<wire::Bytes>) -> Amounts {
    let wire::Bytes { dram, nvme } = bytes.unwrap_or_default();
    Amounts { dram, nvme }
}

pub(crate) fn bytes(amounts: Amounts) -> wire::Bytes {
    wire::Bytes { dram: amounts.dram, nvme: amounts.nvme }
}
