//! The ledgers of those tenants whose hash slot is this member's: one [`Budgets`] each.
//!
//! A ledger begins when this member's place in the map is certain and gives it the slot, and ends with either. Two members
//! never have a tenant's ledger at once as far as their leases' clocks agree, and a new one takes over what nodes say that
//! they hold. A node that takes another member for the owner says so, and counts as not heard yet; on its side it takes no
//! order from a member that it has stopped reporting the tenant to.
//!
//! Nodes that were known when a ledger began and do not come are waited for as long as for their inventories.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_controlplane_core::{Amounts, Budget, Budgets, Order, Report, TenantReport};
use reprise_policy::shards::MemberName;
use reprise_policy::{Epoch, NodeId, TenantName};

use crate::shards::MemberView;

/// Nodes that a ledger may hear of: number, newest registration, whether it is known to live.
pub type KnownNode = (NodeId, Epoch, Presence);

/// Whether a node is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Registered with this member.
    Here,
    /// Known from the store only.
    Away,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Ledgers {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Of this member, in the map that the ledgers are of.
    incarnation: Option<u64>,
    ledgers: BTreeMap<TenantName, Ledger>,
    /// The nodes that all ledgers follow already.
    followed: Vec<KnownNode>,
}

#[derive(Debug)]
struct Ledger {
    budgets: Budgets,
    begun: Instant,
}

/// What a node says of a tenant on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// This member is taken for the one with the ledger.
    Here(TenantReport),
    /// Another is.
    Elsewhere(TenantName),
}

/// How much of a budget is where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerState {
    /// By all nodes.
    pub used: Amounts,
    /// What nodes may hold at the most.
    pub charged: Amounts,
    /// Node, what it was granted, what it uses.
    pub shares: Vec<(NodeId, Amounts, Amounts)>,
}

/// A member's place in a map, while it is certain.
#[derive(Clone, Copy, Debug)]
pub struct OwnPlace<'a> {
    /// The map.
    pub view: &'a MemberView,
    /// The member.
    pub name: &'a MemberName,
    /// Of its registration.
    pub incarnation: u64,
}

impl OwnPlace<'_> {
    /// Whether the ledger of a tenant belongs there.
    pub fn owns(&self, tenant: &TenantName) -> bool {
        self.view.map.owner(tenant.hash_slot()) == self.view.map.position(self.name)
    }
}

impl Said {
    fn tenant(&self) -> &TenantName {
        match self {
            Said::Here(report) => &report.tenant,
            Said::Elsewhere(tenant) => tenant,
        }
    }
}

impl Ledgers {
    /// Brings the ledgers in line with a map in which this member's place is certain, with the budgets of the store and with
    /// the nodes; then moves bytes. For a timer of a second, and before reports of a map that is new.
    pub fn rebalance(
        &self,
        place: &OwnPlace<'_>,
        budgets: &BTreeMap<TenantName, Budget>,
        nodes: &[KnownNode],
        patience: Duration,
    ) {
        let mut inner = self.inner();
        if inner.incarnation != Some(place.incarnation) {
            inner.ledgers.clear();
            inner.incarnation = Some(place.incarnation);
        }
        let is_own = |tenant: &TenantName| place.owns(tenant);
        inner.ledgers.retain(|tenant, _| budgets.contains_key(tenant) && is_own(tenant));
        let followed = std::mem::take(&mut inner.followed);
        for (tenant, budget) in budgets.iter().filter(|(tenant, _)| is_own(tenant)) {
            if !inner.ledgers.contains_key(tenant) {
                let mut ledger = Ledger::begin(nodes);
                ledger.budgets.set_budget(tenant, *budget);
                ledger.follow(nodes);
                inner.ledgers.insert(tenant.clone(), ledger);
            }
            let ledger = inner.ledgers.get_mut(tenant).expect("there is one now");
            ledger.budgets.set_budget(tenant, *budget);
            if followed != nodes {
                ledger.follow(nodes);
            }
            ledger.give_up(nodes, patience);
            ledger.budgets.rebalance();
        }
        inner.followed = nodes.to_vec();
    }

    /// This member's place is not certain: whoever is certain has the ledgers.
    pub fn end(&self) {
        *self.inner() = Inner::default();
    }

    /// A node has registered with this member.
    pub fn register(&self, node: NodeId, epoch: Epoch) {
        self.inner().ledgers.values_mut().for_each(|ledger| ledger.budgets.register(node, epoch));
    }

    /// A node is fenced.
    pub fn forget(&self, node: NodeId) {
        let mut inner = self.inner();
        // Where a newer registration has come first, it is followed again.
        inner.followed.clear();
        inner.ledgers.values_mut().for_each(|ledger| ledger.budgets.forget(node));
    }

    /// A node reports; returns its orders. `place` is this member's.
    pub fn report(
        &self,
        place: &OwnPlace<'_>,
        budgets: &BTreeMap<TenantName, Budget>,
        (node, epoch): (NodeId, Epoch),
        said: &[Said],
    ) -> Vec<Order> {
        let mut inner = self.inner();
        if inner.incarnation != Some(place.incarnation) {
            return Vec::new();
        }
        inner.ledgers.retain(|tenant, _| budgets.contains_key(tenant) && place.owns(tenant));
        let by_tenant: BTreeMap<&TenantName, &Said> =
            said.iter().rev().map(|said| (said.tenant(), said)).collect();
        let mut orders = Vec::new();
        for (tenant, ledger) in &mut inner.ledgers {
            let tenants = match by_tenant.get(tenant) {
                Some(Said::Elsewhere(_)) => continue,
                Some(Said::Here(report)) => vec![report.clone()],
                None => Vec::new(),
            };
            orders.extend(ledger.budgets.report(&Report { node, epoch, tenants }));
        }
        orders
    }

    /// How much of a budget is where; `None` when the ledger is another member's.
    pub fn state(&self, tenant: &TenantName) -> Option<LedgerState> {
        let inner = self.inner();
        let budgets = &inner.ledgers.get(tenant)?.budgets;
        let granted: BTreeMap<NodeId, Amounts> = budgets.granted(tenant).collect();
        let shares: Vec<(NodeId, Amounts, Amounts)> = budgets
            .used(tenant)
            .map(|(node, used)| (node, granted.get(&node).copied().unwrap_or_default(), used))
            .collect();
        let used = shares.iter().fold(Amounts::default(), |sum, (_, _, used)| Amounts {
            dram: sum.dram.saturating_add(used.dram),
            nvme: sum.nvme.saturating_add(used.nvme),
        });
        Some(LedgerState { used, charged: budgets.charged(tenant), shares })
    }

    /// Every change leaves the ledgers whole, so a poisoned lock is as good as any.
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger {
    fn begin(nodes: &[KnownNode]) -> Ledger {
        let budgets = Budgets::new(nodes.iter().map(|(node, epoch, _)| (*node, *epoch)));
        Ledger { budgets, begun: Instant::now() }
    }

    /// Whoever is registered here takes part.
    fn follow(&mut self, nodes: &[KnownNode]) {
        for (node, epoch, presence) in nodes {
            if *presence == Presence::Here {
                self.budgets.register(*node, *epoch);
            }
        }
    }

    /// Who was away for too long is not waited for.
    fn give_up(&mut self, nodes: &[KnownNode], patience: Duration) {
        let unheard: Vec<NodeId> = self.budgets.unheard().collect();
        if unheard.is_empty() || self.begun.elapsed() < patience {
            return;
        }
        let here = nodes.iter().filter(|(_, _, presence)| *presence == Presence::Here);
        let here: BTreeSet<NodeId> = here.map(|(node, ..)| *node).collect();
        unheard.into_iter().filter(|node| !here.contains(node)).for_each(|node| self.budgets.forget(node));
    }
}
