//! `SetTenant`, `RemoveTenant` and `ListTenants`: tenant budgets.

use reprise_controlplane_core::{Budget, LedgerState, ShareState};
use reprise_policy::TenantName;
use reprise_policy::tenant::TenantError;
use reprise_proto::controlplane::{
    self as wire, ListTenantsReply, RemoveTenantRequest, SetTenantRequest, TenantShare, TenantState,
};
use tonic::Status;

use super::PlacementService;
use super::reports::{amounts, bytes};
use crate::tenants::TenantsError;

/// Handles a `SetTenant` request.
pub(super) async fn set(service: &PlacementService, request: SetTenantRequest) -> Result<(), Status> {
    let tenant = request.tenant.ok_or_else(|| Status::invalid_argument("tenant is required"))?;
    let name = name(&tenant.name)?;
    let limit = tenant.limit.ok_or_else(|| {
        Status::invalid_argument("limit is required: set dram and nvme; to end a budget, remove the tenant")
    })?;
    let budget = Budget { reserved: amounts(tenant.reserved), limit: amounts(Some(limit)) };
    service
        .tenants
        .set(&name, budget, service.cluster.capacity_known())
        .await
        .map_err(|error| status_of(&name, &error))
}

/// Handles a `RemoveTenant` request.
pub(super) async fn remove(service: &PlacementService, request: RemoveTenantRequest) -> Result<(), Status> {
    let name = name(&request.name)?;
    service.tenants.remove(&name).await.map_err(|error| status_of(&name, &error))
}

/// Handles a `ListTenants` request: all budgets, with their distribution if this member has the ledger.
pub(super) fn list(service: &PlacementService) -> Result<ListTenantsReply, Status> {
    let budgets = service.tenants.budgets();
    let budgets = budgets.ok_or_else(|| Status::unavailable("the store has not been read yet: retry"))?;
    let capacity = service.cluster.capacity();
    let tenants = budgets.iter().map(|(name, budget)| {
        let tenant = wire::Tenant {
            name: name.to_string(),
            reserved: Some(bytes(budget.reserved)),
            limit: Some(bytes(budget.limit)),
        };
        let ledger = service.cluster.ledgers.state(name);
        let ledger_here = ledger.is_some();
        let LedgerState { used, charged, shares } = ledger.unwrap_or_default();
        let shares = shares.into_iter().map(|ShareState { node, granted, used, follows }| TenantShare {
            node: u32::from(node.0),
            granted: Some(bytes(granted)),
            used: Some(bytes(used)),
            follows,
        });
        TenantState {
            tenant: Some(tenant),
            ledger_here,
            used: Some(bytes(used)),
            charged: Some(bytes(charged)),
            shares: shares.collect(),
        }
    });
    Ok(ListTenantsReply {
        tenants: tenants.collect(),
        capacity: Some(bytes(capacity)),
        overcommitted: Some(bytes(service.tenants.overcommitted(capacity))),
    })
}

fn name(text: &str) -> Result<TenantName, Status> {
    if text.is_empty() {
        return Err(Status::invalid_argument(
            "empty tenant name: sessions without a tenant belong to 'default'",
        ));
    }
    text.parse().map_err(|error: TenantError| Status::invalid_argument(error.to_string()))
}

fn status_of(name: &TenantName, error: &TenantsError) -> Status {
    let text = format!("tenant '{name}': {error}");
    match error {
        TenantsError::Quota { .. } => Status::failed_precondition(text),
        TenantsError::Full => Status::resource_exhausted(text),
        TenantsError::Unknown(_) => Status::not_found(error.to_string()),
        TenantsError::Registering
        | TenantsError::Busy
        | TenantsError::OtherStore
        | TenantsError::Store(_) => Status::unavailable(text),
    }
}
