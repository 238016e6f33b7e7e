//! `Report`: applies a node's report to the node table, its tenant usage to the ledgers and the usage table.
//!
//! Ledgers and usage table accept only reports made under the member list that they are kept by. Digests of the
//! lists are compared, because two members may know one list under two epochs.

use std::collections::BTreeSet;

use reprise_controlplane_core::agent_calls::{self, ReportCall};
use reprise_controlplane_core::{
    NodeReport, QuotaGrant, ReportedTenant, ReportedUsage, TenantReport, UsageAmounts,
};
use reprise_policy::tenant::{TENANTS_MAX, TenantError};
use reprise_policy::{Amounts, DrainProgress, Epoch, TenantName};
use reprise_proto::controlplane::{self as wire, ReportReply, ReportRequest, TenantOrder};
use tonic::Status;

use super::PlacementService;
use crate::cluster::node_selection::wire_mode;
use crate::membership::node_number;

/// Handles a `Report` request; replies with grants, mode and moves for the node.
pub(super) fn handle(service: &PlacementService, request: ReportRequest) -> Result<ReportReply, Status> {
    let (node, epoch) = (node_number(request.node)?, Epoch(request.epoch));
    let acts_for = parse_acts_for(&request)?;
    let (tenants, usage) = parse_tenants(request.tenants)?.into_iter().unzip();
    let report = node_report(request.usage.unwrap_or_default(), request.drain.unwrap_or_default());
    let call = ReportCall { node: (node, epoch), report, tenants, usage, map_digest: request.map_digest };
    let Some(answer) = agent_calls::report(&mut service.answers(), service.cluster.now(), call) else {
        return Ok(ReportReply { fenced: true, ..ReportReply::default() });
    };
    service.cluster.set_tenants(node, epoch, acts_for);
    Ok(ReportReply {
        fenced: false,
        orders: answer.grants.iter().map(tenant_order).collect(),
        mode: answer.mode.map_or(0, |set| wire_mode(set.mode).into()),
        mode_revision: answer.mode.map_or(0, |set| set.revision),
        r#move: answer
            .planned
            .map(|planned| wire::Move { to: u32::from(planned.to.0), bytes: planned.bytes }),
    })
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

/// Returns the tenants that the node acts for: those with sessions, and all others that the report names.
fn parse_acts_for(request: &ReportRequest) -> Result<BTreeSet<TenantName>, Status> {
    if request.session_tenants.len() > TENANTS_MAX {
        return Err(Status::invalid_argument(format!(
            "invalid report with {} tenants of sessions: expected at most {TENANTS_MAX}",
            request.session_tenants.len()
        )));
    }
    let reported = request.tenants.iter().map(|report| &report.tenant);
    let names = request.session_tenants.iter().chain(reported);
    names.map(|name| name.parse().map_err(|error| invalid(&error))).collect()
}

fn invalid(error: &TenantError) -> Status {
    Status::invalid_argument(error.to_string())
}

/// Decodes the tenants of a report, once for the ledgers and once for the usage table.
pub(super) fn parse_tenants(
    reports: Vec<wire::TenantReport>,
) -> Result<Vec<(ReportedTenant, ReportedUsage)>, Status> {
    if reports.len() > TENANTS_MAX {
        return Err(Status::invalid_argument(format!(
            "invalid report with {} tenants: expected at most {TENANTS_MAX}",
            reports.len()
        )));
    }
    let read = |report: wire::TenantReport| {
        let tenant: TenantName = report.tenant.parse().map_err(|error| invalid(&error))?;
        if report.elsewhere {
            return Ok((ReportedTenant::Elsewhere(tenant.clone()), ReportedUsage::Elsewhere(tenant)));
        }
        let used = amounts(report.used);
        let blocks = report.blocks.map(|wire::Blocks { dram, nvme }| Amounts { dram, nvme });
        let usage = ReportedUsage::Owned(tenant.clone(), UsageAmounts { used, blocks });
        let reported = ReportedTenant::Owned(TenantReport {
            tenant,
            version: report.version,
            limit: amounts(report.limit),
            used,
            limited: amounts(report.limited),
        });
        Ok((reported, usage))
    };
    reports.into_iter().map(read).collect()
}

/// Encodes a grant. Without a limit and a reservation, the budget has been removed.
fn tenant_order(order: &QuotaGrant) -> TenantOrder {
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
