//! The ledgers of those tenants whose hash slot is this member's, behind a lock ([`reprise_controlplane_core::Ledgers`]).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use reprise_controlplane_core::{self as core, Budget, KnownNode, LedgerState, Order, OwnPlace, Said};
use reprise_policy::{Epoch, NodeId, TenantName, Tick};

use crate::cluster::EXPECTED_FOR;

/// See the module.
#[derive(Debug, Default)]
pub struct Ledgers {
    inner: Mutex<core::Ledgers>,
}

impl Ledgers {
    /// Brings the ledgers in line with everything, and moves bytes. For a timer of a second.
    pub fn rebalance(
        &self,
        now: Tick,
        place: &OwnPlace<'_>,
        budgets: &BTreeMap<TenantName, Budget>,
        nodes: &[KnownNode],
    ) {
        self.inner().rebalance(now, place, budgets, (nodes, EXPECTED_FOR));
    }

    /// This member's place is not certain.
    pub fn end(&self) {
        self.inner().end();
    }

    /// A node has registered with this member.
    pub fn register(&self, node: NodeId, epoch: Epoch) {
        self.inner().register(node, epoch);
    }

    /// A node is fenced.
    pub fn forget(&self, node: NodeId) {
        self.inner().forget(node);
    }

    /// A node reports; returns its orders.
    pub fn report(
        &self,
        place: &OwnPlace<'_>,
        budgets: &BTreeMap<TenantName, Budget>,
        node: (NodeId, Epoch),
        said: &[Said],
    ) -> Vec<Order> {
        self.inner().report(place, budgets, node, said)
    }

    /// How much of a budget is where; `None` when the ledger is another member's.
    pub fn state(&self, tenant: &TenantName) -> Option<LedgerState> {
        self.inner().state(tenant)
    }

    /// Every change leaves the ledgers whole, so a poisoned lock is as good as any.
    fn inner(&self) -> MutexGuard<'_, core::Ledgers> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
