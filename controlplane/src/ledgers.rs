//! Budget ledgers of the tenants in this member's slots, behind a lock
//! ([`reprise_controlplane_core::Ledgers`]).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use reprise_controlplane_core::member_parts::EXPECTED_FOR;
use reprise_controlplane_core::{
    self as core, Budget, KnownNode, LedgerState, MemberPlace, QuotaGrant, ReportedTenant,
};
use reprise_policy::{Epoch, NodeId, TenantName, Tick};

/// The locked ledgers of one member.
#[derive(Debug, Default)]
pub struct Ledgers {
    inner: Mutex<core::Ledgers>,
}

impl Ledgers {
    /// Updates the ledgers for map, budgets and nodes, and rebalances their grants. Called once a second. `known`
    /// is `None` while this member's place in the map is uncertain or the budgets are unknown.
    pub fn update(
        &self,
        now: Tick,
        known: Option<(&MemberPlace<'_>, &BTreeMap<TenantName, Budget>)>,
        nodes: &[KnownNode],
    ) {
        self.inner().update(now, known, (nodes, EXPECTED_FOR));
    }

    /// Adds a node that has registered with this member.
    pub fn register(&self, node: NodeId, epoch: Epoch) {
        self.inner().register(node, epoch);
    }

    /// Removes a fenced node.
    pub fn forget(&self, node: NodeId) {
        self.inner().forget(node);
    }

    /// Applies a node's report; returns the grants that it has not confirmed.
    pub fn report(
        &self,
        place: &MemberPlace<'_>,
        budgets: &BTreeMap<TenantName, Budget>,
        node: (NodeId, Epoch),
        reports: &[ReportedTenant],
    ) -> Vec<QuotaGrant> {
        self.inner().report(place, budgets, node, reports)
    }

    /// Distribution of a tenant's budget; `None` if another member has the ledger.
    pub fn state(&self, tenant: &TenantName) -> Option<LedgerState> {
        self.inner().state(tenant)
    }

    /// Locks the ledgers. A poisoned lock is usable, because a panic cannot leave a change half applied.
    fn inner(&self) -> MutexGuard<'_, core::Ledgers> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
