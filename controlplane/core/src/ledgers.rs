//! Ledgers of the tenants in this member's hash slots: one [`Budgets`] each.
//!
//! A ledger exists while this member's place in the map is certain and includes the slot. Two members never
//! have a tenant's ledger at once, as far as the clocks of their leases agree. A new ledger takes over the
//! usage that nodes report. A node that considers another member the owner marks the tenant in its report,
//! and counts as not reported yet. It accepts no grant from a member to which it no longer reports the
//! tenant.
//!
//! Nodes that were known when a ledger started, but do not register, are waited for as long as for their
//! inventories.
//!
//! The leases that make the place certain, and the store of the budgets, are the caller's.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{Amounts, Epoch, NodeId, TenantName, Tick};

use crate::budgets::{Budget, Budgets, QuotaGrant, QuotaReport, TenantReport};

/// A node that ledgers wait for: number, newest registration, presence.
pub type KnownNode = (NodeId, Epoch, Presence);

/// Whether a node has registered with this member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Registered with this member.
    Registered,
    /// Known from the store only.
    Absent,
}

/// Hash slot whose owner decides the moves of blocks between nodes.
pub const MOVES_SLOT: u16 = 0;

/// The ledgers of one member.
#[derive(Debug, Default)]
pub struct Ledgers {
    /// Incarnation of this member for which the ledgers were made.
    incarnation: Option<u64>,
    ledgers: BTreeMap<TenantName, Ledger>,
    /// Nodes that all ledgers have registered.
    followed: Vec<KnownNode>,
}

#[derive(Debug)]
struct Ledger {
    budgets: Budgets,
    started: Tick,
}

/// A tenant in a node's report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportedTenant {
    /// The node considers this member the owner of the ledger.
    Owned(TenantReport),
    /// The node considers another member the owner.
    Elsewhere(TenantName),
}

/// Distribution of a tenant's budget.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerState {
    /// Usage on all nodes.
    pub used: Amounts,
    /// Maximum that nodes may hold.
    pub charged: Amounts,
    /// Shares, ordered by node.
    pub shares: Vec<ShareState>,
}

/// A tenant's share on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareState {
    /// Node of the share.
    pub node: NodeId,
    /// Newest grant to the node.
    pub granted: Amounts,
    /// Usage as last reported.
    pub used: Amounts,
    /// Whether the usage was reported under the newest grant.
    pub follows: bool,
}

/// A member's place in a map; exists only while it is certain.
#[derive(Clone, Copy, Debug)]
pub struct MemberPlace<'a> {
    /// Map of the hash slots.
    pub map: &'a ShardMap,
    /// Name of the member.
    pub name: &'a MemberName,
    /// Incarnation of its registration.
    pub incarnation: u64,
}

impl MemberPlace<'_> {
    /// Whether this member owns the tenant's hash slot.
    pub fn owns(&self, tenant: &TenantName) -> bool {
        self.owns_slot(tenant.hash_slot())
    }

    /// Whether this member decides the moves of blocks between nodes. The owner of one slot does, so that exactly
    /// one member does.
    pub fn decides_moves(&self) -> bool {
        self.owns_slot(MOVES_SLOT)
    }

    /// Whether tenants in a report with this digest of the map count. A node reports only the tenants of which it
    /// holds something. Under another list of members, a tenant that is missing in the report may still have a
    /// grant from the member that the node considers the owner. Agents of older versions send 0.
    pub fn accepts_tenants(&self, map_digest: u64) -> bool {
        [0, self.map.digest()].contains(&map_digest)
    }

    fn owns_slot(&self, slot: u16) -> bool {
        self.map.owner(slot) == self.map.position(self.name)
    }
}

impl ReportedTenant {
    fn tenant(&self) -> &TenantName {
        match self {
            ReportedTenant::Owned(report) => &report.tenant,
            ReportedTenant::Elsewhere(tenant) => tenant,
        }
    }
}

impl Ledgers {
    /// As [`Ledgers::rebalance`], if the member's place is certain and the budgets are known. Otherwise drops all
    /// ledgers.
    pub fn update(
        &mut self,
        now: Tick,
        known: Option<(&MemberPlace<'_>, &BTreeMap<TenantName, Budget>)>,
        nodes: (&[KnownNode], Duration),
    ) {
        match known {
            Some((place, budgets)) => self.rebalance(now, place, budgets, nodes),
            None => self.drop_all(),
        }
    }

    /// Updates the ledgers for map, budgets and nodes, then rebalances grants. Call it about once a second.
    /// Absent nodes are waited for up to `patience`.
    pub fn rebalance(
        &mut self,
        now: Tick,
        place: &MemberPlace<'_>,
        budgets: &BTreeMap<TenantName, Budget>,
        (nodes, patience): (&[KnownNode], Duration),
    ) {
        if self.incarnation != Some(place.incarnation) {
            self.ledgers.clear();
            self.incarnation = Some(place.incarnation);
        }
        let is_own = |tenant: &TenantName| place.owns(tenant);
        self.ledgers.retain(|tenant, _| budgets.contains_key(tenant) && is_own(tenant));
        let followed = std::mem::take(&mut self.followed);
        for (tenant, budget) in budgets.iter().filter(|(tenant, _)| is_own(tenant)) {
            if !self.ledgers.contains_key(tenant) {
                let mut ledger = Ledger::start(now, nodes);
                ledger.budgets.set_budget(tenant, *budget);
                ledger.follow(nodes);
                self.ledgers.insert(tenant.clone(), ledger);
            }
            let ledger = self.ledgers.get_mut(tenant).expect("inserted above");
            ledger.budgets.set_budget(tenant, *budget);
            if followed != nodes {
                ledger.follow(nodes);
            }
            ledger.stop_expecting(now, nodes, patience);
            ledger.budgets.rebalance();
        }
        self.followed = nodes.to_vec();
    }

    /// Drops all ledgers, because this member's place is uncertain and another member may have them.
    pub fn drop_all(&mut self) {
        *self = Ledgers::default();
    }

    /// Adds a node that has registered with this member.
    pub fn register(&mut self, node: NodeId, epoch: Epoch) {
        self.ledgers.values_mut().for_each(|ledger| ledger.budgets.register(node, epoch));
    }

    /// Removes a fenced node.
    pub fn forget(&mut self, node: NodeId) {
        // Register the nodes again: a newer registration of this node may have been added before.
        self.followed.clear();
        self.ledgers.values_mut().for_each(|ledger| ledger.budgets.forget(node));
    }

    /// Applies a node's report; returns the grants that it has not acknowledged.
    pub fn report(
        &mut self,
        place: &MemberPlace<'_>,
        budgets: &BTreeMap<TenantName, Budget>,
        (node, epoch): (NodeId, Epoch),
        reports: &[ReportedTenant],
    ) -> Vec<QuotaGrant> {
        let mut grants = Vec::new();
        if self.incarnation == Some(place.incarnation) {
            self.ledgers.retain(|tenant, _| budgets.contains_key(tenant) && place.owns(tenant));
            let by_tenant: BTreeMap<&TenantName, &ReportedTenant> =
                reports.iter().rev().map(|report| (report.tenant(), report)).collect();
            for (tenant, ledger) in &mut self.ledgers {
                let tenants = match by_tenant.get(tenant) {
                    Some(ReportedTenant::Elsewhere(_)) => continue,
                    Some(ReportedTenant::Owned(report)) => vec![report.clone()],
                    None => Vec::new(),
                };
                grants.extend(ledger.budgets.report(&QuotaReport { node, epoch, tenants }));
            }
        }
        let ended = reports.iter().filter_map(|report| match report {
            ReportedTenant::Owned(report) => Some(report),
            ReportedTenant::Elsewhere(_) => None,
        });
        let ended =
            ended.filter(|report| place.owns(&report.tenant) && !budgets.contains_key(&report.tenant));
        grants.extend(ended.filter_map(|report| end_of_budget((node, epoch), report)));
        grants
    }

    /// Distribution of a tenant's budget; `None` if another member has the ledger.
    pub fn state(&self, tenant: &TenantName) -> Option<LedgerState> {
        let budgets = &self.ledgers.get(tenant)?.budgets;
        let granted: BTreeMap<NodeId, Amounts> = budgets.granted(tenant).collect();
        let followers: BTreeSet<NodeId> = budgets.followers(tenant).collect();
        let share = |(node, used): (NodeId, Amounts)| ShareState {
            node,
            granted: granted.get(&node).copied().unwrap_or_default(),
            used,
            follows: followers.contains(&node),
        };
        let shares: Vec<ShareState> = budgets.used(tenant).map(share).collect();
        let used = shares.iter().fold(Amounts::default(), |sum, share| Amounts {
            dram: sum.dram.saturating_add(share.used.dram),
            nvme: sum.nvme.saturating_add(share.used.nvme),
        });
        Some(LedgerState { used, charged: budgets.charged(tenant), shares })
    }
}

impl Ledger {
    fn start(now: Tick, nodes: &[KnownNode]) -> Ledger {
        let budgets = Budgets::new(nodes.iter().map(|(node, epoch, _)| (*node, *epoch)));
        Ledger { budgets, started: now }
    }

    /// Registers the nodes that are registered with this member.
    fn follow(&mut self, nodes: &[KnownNode]) {
        for (node, epoch, presence) in nodes {
            if *presence == Presence::Registered {
                self.budgets.register(*node, *epoch);
            }
        }
    }

    /// Forgets absent nodes once `patience` has passed.
    fn stop_expecting(&mut self, now: Tick, nodes: &[KnownNode], patience: Duration) {
        let unreported: Vec<NodeId> = self.budgets.unreported().collect();
        if unreported.is_empty() || now.since(self.started) < patience {
            return;
        }
        let registered = nodes.iter().filter(|(_, _, presence)| *presence == Presence::Registered);
        let registered: BTreeSet<NodeId> = registered.map(|(node, ..)| *node).collect();
        unreported
            .into_iter()
            .filter(|node| !registered.contains(node))
            .for_each(|node| self.budgets.forget(node));
    }
}

/// Grant that ends a removed budget, if the node knows one. At the highest version there is nothing to send.
fn end_of_budget((node, epoch): (NodeId, Epoch), report: &TenantReport) -> Option<QuotaGrant> {
    let knows_limit = report.version > 0 && report.limit != Amounts::UNLIMITED;
    let version = report.version.checked_add(1).filter(|_| knows_limit)?;
    let (tenant, reserved) = (report.tenant.clone(), Amounts::default());
    Some(QuotaGrant { node, epoch, tenant, version, limit: Amounts::UNLIMITED, reserved })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn name() -> TenantName {
        "a".parse().expect("a name")
    }

    fn member() -> MemberName {
        MemberName::new("m").expect("a name")
    }

    fn map() -> ShardMap {
        ShardMap::new(Epoch(1), [member()]).expect("one member")
    }

    fn budgets(bytes: u64) -> BTreeMap<TenantName, Budget> {
        let limit = Amounts::both(bytes);
        BTreeMap::from([(name(), Budget { reserved: Amounts::default(), limit })])
    }

    fn reports(version: u64, bytes: u64) -> Vec<ReportedTenant> {
        let (limit, none) = (Amounts::both(bytes), Amounts::default());
        vec![ReportedTenant::Owned(TenantReport {
            tenant: name(),
            version,
            limit,
            used: none,
            limited: none,
        })]
    }

    fn at(seconds: u64) -> Tick {
        Tick(0).after(Duration::from_secs(seconds))
    }

    #[test]
    fn a_new_ledger_waits_for_nodes_that_report_elsewhere_and_for_absent_nodes_up_to_patience() {
        let (map, own) = (map(), member());
        let place = MemberPlace { map: &map, name: &own, incarnation: 1 };
        let nodes = [(NodeId(1), Epoch(1), Presence::Registered), (NodeId(2), Epoch(1), Presence::Absent)];
        let mut ledgers = Ledgers::default();
        let mut report_at = |second, reports: &[ReportedTenant]| {
            ledgers.rebalance(at(second), &place, &budgets(100), (&nodes, PATIENCE));
            ledgers.report(&place, &budgets(100), (NodeId(1), Epoch(1)), reports)
        };
        assert!(report_at(0, &[ReportedTenant::Elsewhere(name())]).is_empty());
        assert!(
            report_at(10, &[ReportedTenant::Elsewhere(name())]).is_empty(),
            "another member may have granted bytes"
        );
        assert!(report_at(11, &reports(0, 100)).is_empty(), "absent node still waited for");
        assert_eq!(report_at(12, &reports(0, 100))[0].limit, Amounts::both(100));
    }

    #[test]
    fn sends_the_end_of_a_budget_once_to_nodes_with_a_grant() {
        let (map, own) = (map(), member());
        let place = MemberPlace { map: &map, name: &own, incarnation: 1 };
        let mut ledgers = Ledgers::default();
        let mut report = |reports: &[ReportedTenant]| {
            ledgers.report(&place, &BTreeMap::new(), (NodeId(1), Epoch(1)), reports)
        };
        let grant = report(&reports(7, 100)).remove(0);
        assert_eq!((grant.version, grant.limit), (8, Amounts::UNLIMITED));
        assert!(report(&reports(8, u64::MAX)).is_empty());
        assert!(report(&reports(0, 100)).is_empty(), "it has no grant");
        assert!(report(&reports(u64::MAX, 100)).is_empty(), "it has the highest version");
    }
}
