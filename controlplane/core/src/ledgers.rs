//! The ledgers of those tenants whose hash slot is this member's: one [`Budgets`] each.
//!
//! A ledger begins when this member's place in the map is certain and gives it the slot, and ends with either. Two members
//! never have a tenant's ledger at once as far as their leases' clocks agree, and a new one takes over what nodes say that
//! they hold. A node that takes another member for the owner says so, and counts as not heard yet; on its side it takes no
//! order from a member that it has stopped reporting the tenant to.
//!
//! Nodes that were known when a ledger began and do not come are waited for as long as for their inventories.
//!
//! Deliberately absent: what a place in the map is certain by (leases), and the store that has the budgets.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{Epoch, NodeId, TenantName, Tick};

use crate::budgets::{Amounts, Budget, Budgets, Order, Report, TenantReport};

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
    /// Of this member, in the map that the ledgers are of.
    incarnation: Option<u64>,
    ledgers: BTreeMap<TenantName, Ledger>,
    /// The nodes that all ledgers follow already.
    followed: Vec<KnownNode>,
}

#[derive(Debug)]
struct Ledger {
    budgets: Budgets,
    begun: Tick,
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
    /// By node.
    pub shares: Vec<ShareState>,
}

/// How much of a budget is on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareState {
    /// The node.
    pub node: NodeId,
    /// What it may hold by the newest order.
    pub granted: Amounts,
    /// What it holds, as it has said last.
    pub used: Amounts,
    /// Whether it has said so under the newest order.
    pub follows: bool,
}

/// A member's place in a map, while it is certain.
#[derive(Clone, Copy, Debug)]
pub struct OwnPlace<'a> {
    /// The map.
    pub map: &'a ShardMap,
    /// The member.
    pub name: &'a MemberName,
    /// Of its registration.
    pub incarnation: u64,
}

impl OwnPlace<'_> {
    /// Whether the ledger of a tenant belongs there.
    pub fn owns(&self, tenant: &TenantName) -> bool {
        self.map.owner(tenant.hash_slot()) == self.map.position(self.name)
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
    /// the nodes; then moves bytes. For a timer of a second. Nodes that do not come are waited for as long as `patience`.
    pub fn rebalance(
        &mut self,
        now: Tick,
        place: &OwnPlace<'_>,
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
                let mut ledger = Ledger::begin(now, nodes);
                ledger.budgets.set_budget(tenant, *budget);
                ledger.follow(nodes);
                self.ledgers.insert(tenant.clone(), ledger);
            }
            let ledger = self.ledgers.get_mut(tenant).expect("there is one now");
            ledger.budgets.set_budget(tenant, *budget);
            if followed != nodes {
                ledger.follow(nodes);
            }
            ledger.give_up(now, nodes, patience);
            ledger.budgets.rebalance();
        }
        self.followed = nodes.to_vec();
    }

    /// This member's place is not certain: whoever is certain has the ledgers.
    pub fn end(&mut self) {
        *self = Ledgers::default();
    }

    /// A node has registered with this member.
    pub fn register(&mut self, node: NodeId, epoch: Epoch) {
        self.ledgers.values_mut().for_each(|ledger| ledger.budgets.register(node, epoch));
    }

    /// A node is fenced.
    pub fn forget(&mut self, node: NodeId) {
        // Where a newer registration has come first, it is followed again.
        self.followed.clear();
        self.ledgers.values_mut().for_each(|ledger| ledger.budgets.forget(node));
    }

    /// A node reports; returns its orders. `place` is this member's.
    pub fn report(
        &mut self,
        place: &OwnPlace<'_>,
        budgets: &BTreeMap<TenantName, Budget>,
        (node, epoch): (NodeId, Epoch),
        said: &[Said],
    ) -> Vec<Order> {
        let mut orders = Vec::new();
        if self.incarnation == Some(place.incarnation) {
            self.ledgers.retain(|tenant, _| budgets.contains_key(tenant) && place.owns(tenant));
            let by_tenant: BTreeMap<&TenantName, &Said> =
                said.iter().rev().map(|said| (said.tenant(), said)).collect();
            for (tenant, ledger) in &mut self.ledgers {
                let tenants = match by_tenant.get(tenant) {
                    Some(Said::Elsewhere(_)) => continue,
                    Some(Said::Here(report)) => vec![report.clone()],
                    None => Vec::new(),
                };
                orders.extend(ledger.budgets.report(&Report { node, epoch, tenants }));
            }
        }
        let ended = said.iter().filter_map(|said| match said {
            Said::Here(report) => Some(report),
            Said::Elsewhere(_) => None,
        });
        let ended =
            ended.filter(|report| place.owns(&report.tenant) && !budgets.contains_key(&report.tenant));
        orders.extend(ended.filter_map(|report| no_budget((node, epoch), report)));
        orders
    }

    /// How much of a budget is where; `None` when the ledger is another member's.
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
    fn begin(now: Tick, nodes: &[KnownNode]) -> Ledger {
        let budgets = Budgets::new(nodes.iter().map(|(node, epoch, _)| (*node, *epoch)));
        Ledger { budgets, begun: now }
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
    fn give_up(&mut self, now: Tick, nodes: &[KnownNode], patience: Duration) {
        let unheard: Vec<NodeId> = self.budgets.unheard().collect();
        if unheard.is_empty() || now.since(self.begun) < patience {
            return;
        }
        let here = nodes.iter().filter(|(_, _, presence)| *presence == Presence::Here);
        let here: BTreeSet<NodeId> = here.map(|(node, ..)| *node).collect();
        unheard.into_iter().filter(|node| !here.contains(node)).for_each(|node| self.budgets.forget(node));
    }
}

/// The budget of which a node knows orders has ended. A version that is used up stays as it is.
fn no_budget((node, epoch): (NodeId, Epoch), report: &TenantReport) -> Option<Order> {
    let knows_limit = report.version > 0 && report.limit != Amounts::UNLIMITED;
    let version = report.version.checked_add(1).filter(|_| knows_limit)?;
    let (tenant, reserved) = (report.tenant.clone(), Amounts::default());
    Some(Order { node, epoch, tenant, version, limit: Amounts::UNLIMITED, reserved })
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

    fn said(version: u64, bytes: u64) -> Vec<Said> {
        let (limit, none) = (Amounts::both(bytes), Amounts::default());
        vec![Said::Here(TenantReport { tenant: name(), version, limit, used: none, limited: none })]
    }

    fn at(seconds: u64) -> Tick {
        Tick(0).after(Duration::from_secs(seconds))
    }

    #[test]
    fn a_new_ledger_waits_for_nodes_that_take_another_for_the_owner_and_for_those_away_as_long_as_patience() {
        let (map, own) = (map(), member());
        let place = OwnPlace { map: &map, name: &own, incarnation: 1 };
        let nodes = [(NodeId(1), Epoch(1), Presence::Here), (NodeId(2), Epoch(1), Presence::Away)];
        let mut ledgers = Ledgers::default();
        let mut turn = |second, said: &[Said]| {
            ledgers.rebalance(at(second), &place, &budgets(100), (&nodes, PATIENCE));
            ledgers.report(&place, &budgets(100), (NodeId(1), Epoch(1)), said)
        };
        assert!(turn(0, &[Said::Elsewhere(name())]).is_empty());
        assert!(turn(10, &[Said::Elsewhere(name())]).is_empty(), "it may hold what another has granted");
        assert!(turn(11, &said(0, 100)).is_empty(), "until now");
        assert_eq!(turn(12, &said(0, 100))[0].limit, Amounts::both(100));
    }

    #[test]
    fn a_budget_that_has_ended_is_told_once_to_whom_it_bound() {
        let (map, own) = (map(), member());
        let place = OwnPlace { map: &map, name: &own, incarnation: 1 };
        let mut ledgers = Ledgers::default();
        let mut told = |said: &[Said]| ledgers.report(&place, &BTreeMap::new(), (NodeId(1), Epoch(1)), said);
        let order = told(&said(7, 100)).remove(0);
        assert_eq!((order.version, order.limit), (8, Amounts::UNLIMITED));
        assert!(told(&said(8, u64::MAX)).is_empty());
        assert!(told(&said(0, 100)).is_empty(), "no order has bound it");
        assert!(told(&said(u64::MAX, 100)).is_empty(), "its versions are used up");
    }
}
