//! Budgets in escrow: a tenant's bytes in the whole cluster, split into grants to nodes.
//!
//! A node allocates within its grants without asking anybody. Bytes move from one node to another in three steps, and
//! between them nobody has them:
//!
//! ```text
//! node A granted 60 ──order: 40──▶ A evicts ──report: holds 40──▶ ledger: 20 free ──order: 20 more──▶ node B
//!        charged 60                charged 60                     charged 40                charged to B
//! ```
//!
//! The ledger charges a node with the most that it may hold: what it said that it holds under the newest order it knows, and
//! every order sent since. So whatever is lost, doubled or late, the sum of what nodes hold stays within the budget:
//! * an order raises what a node is charged when it is made, not when it arrives;
//! * an order lowers it when the node says that it holds no more ([`TenantReport`]), not when it is sent;
//! * a node that is silent keeps its charge until it is forgotten, which is when its epoch is fenced;
//! * a ledger that has just begun raises nothing before every node that was there has reported, or was forgotten.
//!
//! A node that was forgotten and comes back holds what it has until it knows its new orders. That is charged as well. As
//! long as all charges together fit the budget, whoever holds something may keep it; when they do not, who holds it by an
//! order of its last registration may, and the others evict down to what they should have. The same rule lets a new ledger
//! take over what it finds.
//!
//! Orders carry the epoch of the node's registration and a version that grows with it. Both directions repeat with every
//! heartbeat ([`Budgets::report`]); losing a message costs time only. [`Budgets::rebalance`] is for a timer of about a
//! second: it costs tenants × nodes.
//!
//! Split: every node gets what it uses and wants, and an equal share of the rest; when there is not enough, nodes get equal
//! amounts, but none more than it needs. As long as all charges together fit the budget, changes of less than 1/64 of it are
//! left undone, and a grant is lowered only when the node has had it for some reports.
//!
//! Deliberately absent: messages on a wire, time, and limits of single nodes (their configuration holds besides).

use std::collections::BTreeMap;

use reprise_policy::{Epoch, NodeId, TenantName};

/// Versions of one epoch: 2³² changes of one tenant's grant on one node, at one a second for 136 years. The upper half of
/// a version is the lower half of its epoch, which counts a node's registrations under one store.
const VERSION_BITS: u32 = 32;

/// Changes below this part of a budget are left undone.
const SMALLEST_CHANGE: u64 = 64;

/// Reports under an order before what they say is a reason to lower it: what a node uses follows its grant with a delay, and
/// a grant that is taken back before it was used swings back and forth. A second at four heartbeats a second.
const REPORTS_BEFORE_LOWERING: u32 = 4;

/// Bytes of both kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Of arenas.
    pub dram: u64,
    /// Of pools, header pages included.
    pub nvme: u64,
}

/// What a node says of its tenants, with each heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Who.
    pub node: NodeId,
    /// Its registration.
    pub epoch: Epoch,
    /// Every tenant that holds something there or was granted something.
    pub tenants: Vec<TenantReport>,
}

/// What a node says of one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantReport {
    /// Whose.
    pub tenant: TenantName,
    /// The newest order that holds there; 0: none.
    pub version: u64,
    /// What that order says; what the node would allow by itself as long as there is none.
    pub limit: Amounts,
    /// What it uses.
    pub used: Amounts,
    /// Bytes dropped or refused for its limit, counted from the start of the agent.
    pub limited: Amounts,
}

/// What a node may let a tenant hold from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// To whom.
    pub node: NodeId,
    /// Orders of another registration are passed over.
    pub epoch: Epoch,
    /// Whose.
    pub tenant: TenantName,
    /// Orders that are not newer than the last are passed over.
    pub version: u64,
    /// At the most.
    pub limit: Amounts,
    /// Of that, what the tenant is sure of there: its reservation in the proportion of limit to budget.
    pub reserved: Amounts,
}

/// What a tenant may have in the whole cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Sure to have; at most the limit.
    pub reserved: Amounts,
    /// At the most.
    pub limit: Amounts,
}

/// The ledger; see the module.
#[derive(Debug, Default)]
pub struct Budgets {
    tenants: BTreeMap<TenantName, Ledger>,
    nodes: BTreeMap<NodeId, Epoch>,
    /// Nodes that may hold what this ledger does not know of, with their last registration before it.
    unheard: BTreeMap<NodeId, Epoch>,
}

/// One tenant's.
#[derive(Debug, Default)]
struct Ledger {
    budget: Amounts,
    reserved: Amounts,
    shares: BTreeMap<NodeId, Share>,
}

/// One tenant's on one node.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    /// Of the newest order.
    version: u64,
    /// The newest order, if there was one.
    granted: Option<Amounts>,
    /// The limit of the order that the node follows, whoever's it is; counts as long as it has none of this ledger's.
    follows: Option<Amounts>,
    /// Whether the node has said that it knows the newest order.
    known: bool,
    /// How often it has said so.
    reports: u32,
    /// The most that the node may hold.
    charged: Amounts,
    used: Amounts,
    /// What it would have liked to use as well, fading; at most the budget.
    wanted: Amounts,
    limited: Amounts,
}

impl Amounts {
    /// A limit that is none.
    pub const UNLIMITED: Amounts = Amounts { dram: u64::MAX, nvme: u64::MAX };

    /// The same of both kinds.
    pub fn both(bytes: u64) -> Amounts {
        Amounts { dram: bytes, nvme: bytes }
    }

    fn with(self, other: Amounts, act: impl Fn(u64, u64) -> u64) -> Amounts {
        Amounts { dram: act(self.dram, other.dram), nvme: act(self.nvme, other.nvme) }
    }

    fn max(self, other: Amounts) -> Amounts {
        self.with(other, u64::max)
    }

    fn min(self, other: Amounts) -> Amounts {
        self.with(other, u64::min)
    }

    fn plus(self, other: Amounts) -> Amounts {
        self.with(other, u64::saturating_add)
    }

    fn minus(self, other: Amounts) -> Amounts {
        self.with(other, u64::saturating_sub)
    }
}

impl Budgets {
    /// A ledger of a control plane that has just begun, and the nodes that were registered before it.
    pub fn new(nodes: impl IntoIterator<Item = (NodeId, Epoch)>) -> Budgets {
        Budgets { unheard: nodes.into_iter().collect(), ..Budgets::default() }
    }

    /// Sets a tenant's budget. A lower one is met as nodes follow their orders.
    pub fn set_budget(&mut self, tenant: &TenantName, budget: Budget) {
        let is_same = |ledger: &Ledger| ledger.reserved == budget.reserved && ledger.budget == budget.limit;
        if self.tenants.get(tenant).is_some_and(is_same) {
            return;
        }
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        let ledger = self.tenants.entry(tenant.clone()).or_default();
        (ledger.reserved, ledger.budget) = (budget.reserved, budget.limit);
        // What nodes keep for the tenant follows from both.
        ledger.shares.values_mut().for_each(Share::repeat);
        for node in nodes {
            ledger.shares.entry(node).or_default();
        }
    }

    /// A node has registered. What it was charged with stays; orders of before are repeated under the new epoch.
    pub fn register(&mut self, node: NodeId, epoch: Epoch) {
        if self.nodes.get(&node).is_some_and(|known| *known >= epoch) {
            return;
        }
        self.nodes.insert(node, epoch);
        for ledger in self.tenants.values_mut() {
            let share = ledger.shares.entry(node).or_default();
            share.version = version_base(epoch) + 1;
            (share.known, share.reports, share.limited) = (false, 0, Amounts::default());
        }
    }

    /// A node is gone for good: it is fenced, and what it held is free.
    pub fn forget(&mut self, node: NodeId) {
        self.nodes.remove(&node);
        self.unheard.remove(&node);
        for ledger in self.tenants.values_mut() {
            ledger.shares.remove(&node);
        }
    }

    /// A node reports; returns its orders, those that it does not know yet. A report of another registration says nothing.
    pub fn report(&mut self, report: &Report) -> Vec<Order> {
        let Report { node, epoch, .. } = *report;
        if self.nodes.get(&node) != Some(&epoch) {
            return Vec::new();
        }
        let before = self.unheard.remove(&node);
        for reported in &report.tenants {
            let Some(ledger) = self.tenants.get_mut(&reported.tenant) else { continue };
            if let Some(share) = ledger.shares.get_mut(&node) {
                share.take(reported, before);
                share.wanted = share.wanted.min(ledger.budget);
            }
        }
        let orders = self.tenants.iter().filter_map(|(tenant, ledger)| {
            let share = ledger.shares.get(&node).filter(|share| !share.known)?;
            let (version, limit) = (share.version, share.granted?);
            let reserved = ledger.reserved_within(limit);
            Some(Order { node, epoch, tenant: tenant.clone(), version, limit, reserved })
        });
        orders.collect()
    }

    /// Ends a tenant's budget: its nodes go back to their configuration when they hear of it.
    pub fn remove_budget(&mut self, tenant: &TenantName) {
        self.tenants.remove(tenant);
    }

    /// Nodes that may hold what this ledger does not know of. As long as there are any it raises nothing.
    pub fn unheard(&self) -> impl Iterator<Item = NodeId> {
        self.unheard.keys().copied()
    }

    /// Moves bytes to where they are used and wanted.
    pub fn rebalance(&mut self) {
        if self.unheard.is_empty() {
            self.tenants.values_mut().for_each(Ledger::rebalance);
        }
    }

    /// What a tenant's nodes use together, as far as this ledger has heard.
    pub fn used(&self, tenant: &TenantName) -> impl Iterator<Item = (NodeId, Amounts)> {
        let shares = self.tenants.get(tenant).into_iter().flat_map(|ledger| &ledger.shares);
        shares.map(|(node, share)| (*node, share.used))
    }

    /// What a tenant's nodes may hold together, at the most, as far as this ledger has heard.
    pub fn charged(&self, tenant: &TenantName) -> Amounts {
        self.tenants.get(tenant).map_or(Amounts::default(), Ledger::charged)
    }

    /// Nodes that have said that they follow the newest order about a tenant; what they use is of then or later.
    pub fn followers(&self, tenant: &TenantName) -> impl Iterator<Item = NodeId> {
        let shares = self.tenants.get(tenant).into_iter().flat_map(|ledger| &ledger.shares);
        shares.filter(|(_, share)| share.known && share.granted.is_some()).map(|(node, _)| *node)
    }

    /// The newest orders to all nodes about a tenant.
    pub fn granted(&self, tenant: &TenantName) -> impl Iterator<Item = (NodeId, Amounts)> {
        let shares = self.tenants.get(tenant).into_iter().flat_map(|ledger| &ledger.shares);
        shares.filter_map(|(node, share)| Some((*node, share.granted?)))
    }
}

impl Ledger {
    fn charged(&self) -> Amounts {
        self.shares.values().fold(Amounts::default(), |sum, share| sum.plus(share.charged))
    }

    /// Of the reservation what belongs to a part of the budget.
    fn reserved_within(&self, limit: Amounts) -> Amounts {
        let part = |reserved: u64, budget: u64, limit: u64| {
            let part = u128::from(reserved) * u128::from(limit) / u128::from(budget.max(1));
            u64::try_from(part).unwrap_or(u64::MAX).min(limit)
        };
        let (reserved, budget) = (self.reserved, self.budget);
        Amounts {
            dram: part(reserved.dram, budget.dram, limit.dram),
            nvme: part(reserved.nvme, budget.nvme, limit.nvme),
        }
    }

    /// Makes new orders. What is raised beyond what is charged already is taken from what is free.
    fn rebalance(&mut self) {
        let (targets, charged) = (self.targets(), self.charged());
        let mut free = self.budget.minus(charged);
        let ordered = self.shares.values().filter(|share| share.granted.is_some());
        let ordered = ordered.fold(Amounts::default(), |sum, share| sum.plus(share.charged));
        let mut unordered = self.budget.minus(ordered);
        let kept = charged.with(self.budget, |charged, budget| if charged <= budget { u64::MAX } else { 0 });
        let least = self.budget.with(Amounts::both(SMALLEST_CHANGE), |bytes, part| (bytes / part).max(1));
        // Of what exceeds the budget nothing is too little.
        let least_lowered = least.with(kept, |least, kept| if kept > 0 { least } else { 1 });
        for (share, target) in self.shares.values_mut().zip(targets) {
            // As long as everything fits, who has no order yet keeps what it holds; else, what it should have of the rest.
            // What it uses beyond an order that it follows it is about to evict, and gets back only of what is free.
            let base = share.granted.unwrap_or_else(|| {
                let held = share.charged.min(share.follows.unwrap_or(Amounts::UNLIMITED));
                held.min(kept.max(target.min(unordered)))
            });
            if share.granted.is_none() {
                unordered = unordered.minus(base);
            }
            let worth = |change: Amounts, least: Amounts| {
                change.with(least, |bytes, least| if bytes >= least { bytes } else { 0 })
            };
            let follows = share.known && share.reports >= REPORTS_BEFORE_LOWERING;
            let patient = kept.with(kept, |kept, _| if kept > 0 && !follows { u64::MAX } else { 0 });
            let lower = worth(base.minus(target.max(patient)), least_lowered);
            let raise = worth(target.minus(base).min(free), least);
            let order = base.minus(lower).plus(raise);
            share.wanted = share.wanted.with(share.wanted, |bytes, _| bytes / 2);
            if share.granted == Some(order) {
                continue;
            }
            let charged = share.charged.max(order);
            free = free.minus(charged.minus(share.charged));
            (share.charged, share.granted, share.known) = (charged, Some(order), false);
            share.reports = 0;
            share.version += 1;
        }
    }

    /// What each node should have, in the order of the shares. Their sum is at most the budget.
    fn targets(&self) -> Vec<Amounts> {
        let needs: Vec<Amounts> = self.shares.values().map(|share| share.used.plus(share.wanted)).collect();
        let of = |kind: fn(&Amounts) -> u64| {
            split(kind(&self.budget), &needs.iter().map(kind).collect::<Vec<u64>>())
        };
        let (dram, nvme) = (of(|amounts| amounts.dram), of(|amounts| amounts.nvme));
        dram.into_iter().zip(nvme).map(|(dram, nvme)| Amounts { dram, nvme }).collect()
    }
}

impl Share {
    /// The order is to be said anew.
    fn repeat(&mut self) {
        if self.granted.is_some() {
            (self.version, self.known) = (self.version + 1, false);
        }
    }

    /// Takes what a node says; `before` is its registration with the ledger before this one, in its first report.
    fn take(&mut self, report: &TenantReport, before: Option<Epoch>) {
        let held = report.limit.max(report.used);
        let by_order =
            |epoch: Epoch| report.version > version_base(epoch) && same_epoch(report.version, epoch);
        if before.is_some_and(by_order) {
            (self.granted, self.charged) = (Some(report.limit), self.charged.max(held));
        }
        self.follows = Some(report.limit).filter(|_| report.version > 0);
        // Versions of another store's ledger may be like those of this one, for a registration of that store.
        let is_another = report.version == self.version && report.version > 0;
        let is_another = is_another && self.granted != Some(report.limit);
        if report.version > self.version || is_another {
            // Of a ledger before this one, in the same registration: newer orders must be newer than that.
            (self.version, self.known, self.reports) = (report.version + 1, false, 0);
            self.charged = self.charged.max(held);
        } else if report.version == self.version {
            // Within a version a node holds less and less, so of reports that overtake each other the least is the last.
            self.charged = if self.known { self.charged.min(held) } else { held };
            self.known = true;
            self.reports = self.reports.saturating_add(1);
        } else {
            // It may still hold that much, and does not know of later orders.
            self.charged = self.charged.max(held);
        }
        let more = report.limited.minus(self.limited);
        self.limited = self.limited.max(report.limited);
        self.wanted = self.wanted.plus(more);
        self.used = report.used;
    }
}

/// Below all versions of a registration.
fn version_base(epoch: Epoch) -> u64 {
    epoch.0 << VERSION_BITS
}

fn same_epoch(version: u64, epoch: Epoch) -> bool {
    version >> VERSION_BITS == version_base(epoch) >> VERSION_BITS
}

/// Splits `total` by needs: all get what they need and an equal share of the rest, or, when there is not enough, equal
/// amounts up to their needs. The sum is at most `total`.
fn split(total: u64, needs: &[u64]) -> Vec<u64> {
    let count = needs.len() as u64;
    let sum = needs.iter().fold(0, |sum: u64, need| sum.saturating_add(*need));
    if sum <= total {
        let more = (total - sum).checked_div(count).unwrap_or(0);
        return needs.iter().map(|need| need + more).collect();
    }
    let mut ascending: Vec<u64> = needs.to_vec();
    ascending.sort_unstable();
    let (mut left, mut level) = (total, 0);
    for (need, takers) in ascending.into_iter().zip((1..=count).rev()) {
        level = left / takers;
        if need > level {
            break;
        }
        left -= need;
    }
    needs.iter().map(|need| (*need).min(level)).collect()
}

#[cfg(test)]
mod tests;
