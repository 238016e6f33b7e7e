//! Tenant budgets in escrow: the bytes of a tenant in the whole cluster, divided into grants to nodes.
//!
//! A node allocates within its grants without asking. Bytes move between nodes in three steps, and in between
//! belong to no node:
//!
//! ```text
//! node A granted 60 ──grant: 40──▶ A evicts ──report: holds 40──▶ ledger: 20 free ──grant: 20 more──▶ node B
//!        charged 60                charged 60                     charged 40                charged to B
//! ```
//!
//! The ledger charges a node with the most that it may hold: the usage reported under the newest grant that
//! the node knows, and every grant sent since. Therefore the sum of what nodes hold stays within the budget,
//! even if messages are lost, duplicated or late:
//! * A grant that raises the charge counts from when it is made, not from when it arrives.
//! * A grant that lowers it counts from when the node reports its lower usage ([`TenantReport`]), not from
//!   when it is sent.
//! * A silent node keeps its charge until it is forgotten, that is, until its epoch is fenced.
//! * A new ledger raises no grant until every known node has reported or was forgotten.
//!
//! A forgotten node that returns still holds its bytes until it receives new grants. They are charged as
//! well. While all charges together fit into the budget, every node may keep its bytes. Otherwise, nodes
//! with a grant under their last registration keep it, and the others evict down to their target. The same
//! rule lets a new ledger take over the existing usage.
//!
//! Grants carry the epoch of the node's registration and a version that increases within it. Reports and
//! grants are repeated with every heartbeat ([`Budgets::report`]), so a lost message costs only time. Call
//! [`Budgets::rebalance`] about once a second; it costs tenants × nodes.
//!
//! Division: every node gets its usage and demand, and an equal share of the rest. If that exceeds the
//! budget, nodes get equal amounts up to their needs. While all charges together fit, changes below 1/64 of
//! the budget are omitted, and a grant is lowered only after some reports under it.
//!
//! Messages, time, and the limits of single nodes (which apply in addition) are the caller's.

use std::collections::BTreeMap;

use reprise_policy::{Amounts, Epoch, NodeId, TenantName};

/// Bits of a version below the epoch: 2³² changes of one grant, enough for 136 years at one a second. The
/// upper half is the lower half of the node's epoch, which counts its registrations under one store.
const VERSION_BITS: u32 = 32;

/// Changes below the budget divided by this number are omitted.
const MIN_CHANGE_FRACTION: u64 = 64;

/// Reports under a grant before it may be lowered: one second at four heartbeats a second. Usage follows a
/// grant with a delay, and lowering it earlier would make grants oscillate.
const REPORTS_BEFORE_LOWERING: u32 = 4;

/// A node's report about its tenants, sent with each heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaReport {
    /// Reporting node.
    pub node: NodeId,
    /// Registration of the node.
    pub epoch: Epoch,
    /// Every tenant with bytes or a grant on the node.
    pub tenants: Vec<TenantReport>,
}

/// A node's report about one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantReport {
    /// Reported tenant.
    pub tenant: TenantName,
    /// Version of the newest grant in effect on the node; 0 without a grant.
    pub version: u64,
    /// Limit of that grant; without a grant, the limit of the node's configuration.
    pub limit: Amounts,
    /// Bytes in use on the node.
    pub used: Amounts,
    /// Bytes evicted or rejected because of the limit since the start of the agent.
    pub limited: Amounts,
}

/// A grant: what a tenant may hold on a node from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaGrant {
    /// Receiving node.
    pub node: NodeId,
    /// Registration of the node; grants of other registrations are ignored.
    pub epoch: Epoch,
    /// Tenant of the grant.
    pub tenant: TenantName,
    /// Version of the grant; older or equal versions are ignored.
    pub version: u64,
    /// Maximum that the tenant may hold on the node.
    pub limit: Amounts,
    /// Guaranteed part of the limit: the reservation in the proportion of limit to budget.
    pub reserved: Amounts,
}

/// A tenant's budget for the whole cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Guaranteed amounts, at most the limit.
    pub reserved: Amounts,
    /// Maximum amounts in the cluster.
    pub limit: Amounts,
}

/// The ledger of budgets and grants.
#[derive(Debug, Default)]
pub struct Budgets {
    tenants: BTreeMap<TenantName, Ledger>,
    nodes: BTreeMap<NodeId, Epoch>,
    /// Nodes with unknown usage that have not reported to this ledger, with their last registration.
    unreported: BTreeMap<NodeId, Epoch>,
}

/// Ledger of one tenant.
#[derive(Debug, Default)]
struct Ledger {
    budget: Amounts,
    reserved: Amounts,
    shares: BTreeMap<NodeId, Share>,
}

/// A tenant's share on one node.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    /// Version of the newest grant.
    version: u64,
    /// The newest grant, if any.
    granted: Option<Amounts>,
    /// Limit of the grant in effect on the node, made by any ledger; used until this ledger has made a grant.
    applied: Option<Amounts>,
    /// Whether the node has reported the newest grant's version.
    acknowledged: bool,
    /// Number of such reports.
    reports: u32,
    /// Maximum that the node may hold.
    charged: Amounts,
    used: Amounts,
    /// Demand beyond the usage; halves with every rebalance, at most the budget.
    wanted: Amounts,
    limited: Amounts,
}

impl Budgets {
    /// Creates the ledger of a new control plane; `nodes` were registered before it.
    pub fn new(nodes: impl IntoIterator<Item = (NodeId, Epoch)>) -> Budgets {
        Budgets { unreported: nodes.into_iter().collect(), ..Budgets::default() }
    }

    /// Sets a tenant's budget. A lower one takes effect as nodes apply their grants.
    pub fn set_budget(&mut self, tenant: &TenantName, budget: Budget) {
        let is_same = |ledger: &Ledger| ledger.reserved == budget.reserved && ledger.budget == budget.limit;
        if self.tenants.get(tenant).is_some_and(is_same) {
            return;
        }
        let nodes: Vec<NodeId> = self.nodes.keys().copied().collect();
        let ledger = self.tenants.entry(tenant.clone()).or_default();
        (ledger.reserved, ledger.budget) = (budget.reserved, budget.limit);
        // Grants include the reservation, so a change of either requires new grants.
        ledger.shares.values_mut().for_each(Share::resend);
        for node in nodes {
            ledger.shares.entry(node).or_default();
        }
    }

    /// Registers a node. Its charge stays, and its grants are resent under the new epoch.
    pub fn register(&mut self, node: NodeId, epoch: Epoch) {
        if self.nodes.get(&node).is_some_and(|acknowledged| *acknowledged >= epoch) {
            return;
        }
        self.nodes.insert(node, epoch);
        for ledger in self.tenants.values_mut() {
            let share = ledger.shares.entry(node).or_default();
            share.version = version_base(epoch) + 1;
            (share.acknowledged, share.reports, share.limited) = (false, 0, Amounts::default());
        }
    }

    /// Removes a fenced node and frees its charge.
    pub fn forget(&mut self, node: NodeId) {
        self.nodes.remove(&node);
        self.unreported.remove(&node);
        for ledger in self.tenants.values_mut() {
            ledger.shares.remove(&node);
        }
    }

    /// Applies a node's report; returns the grants that the node has not acknowledged. Ignores reports of
    /// other registrations.
    pub fn report(&mut self, report: &QuotaReport) -> Vec<QuotaGrant> {
        let QuotaReport { node, epoch, .. } = *report;
        if self.nodes.get(&node) != Some(&epoch) {
            return Vec::new();
        }
        let before = self.unreported.remove(&node);
        for reported in &report.tenants {
            let Some(ledger) = self.tenants.get_mut(&reported.tenant) else { continue };
            if let Some(share) = ledger.shares.get_mut(&node) {
                share.apply_report(reported, before);
                share.wanted = share.wanted.min(ledger.budget);
            }
        }
        let grants = self.tenants.iter().filter_map(|(tenant, ledger)| {
            let share = ledger.shares.get(&node).filter(|share| !share.acknowledged)?;
            let (version, limit) = (share.version, share.granted?);
            let reserved = ledger.reserved_within(limit);
            Some(QuotaGrant { node, epoch, tenant: tenant.clone(), version, limit, reserved })
        });
        grants.collect()
    }

    /// Removes a tenant's budget; its nodes fall back to their configuration when they learn of it.
    pub fn remove_budget(&mut self, tenant: &TenantName) {
        self.tenants.remove(tenant);
    }

    /// Nodes that have not reported their usage yet; while there are any, no grant is raised.
    pub fn unreported(&self) -> impl Iterator<Item = NodeId> {
        self.unreported.keys().copied()
    }

    /// Adjusts grants to usage and demand.
    pub fn rebalance(&mut self) {
        if self.unreported.is_empty() {
            self.tenants.values_mut().for_each(Ledger::rebalance);
        }
    }

    /// Reported usage of a tenant by node.
    pub fn used(&self, tenant: &TenantName) -> impl Iterator<Item = (NodeId, Amounts)> {
        let shares = self.tenants.get(tenant).into_iter().flat_map(|ledger| &ledger.shares);
        shares.map(|(node, share)| (*node, share.used))
    }

    /// Maximum that a tenant's nodes may hold together.
    pub fn charged(&self, tenant: &TenantName) -> Amounts {
        self.tenants.get(tenant).map_or(Amounts::default(), Ledger::charged)
    }

    /// Nodes that have acknowledged the newest grant of a tenant; their usage was reported under it.
    pub fn followers(&self, tenant: &TenantName) -> impl Iterator<Item = NodeId> {
        let shares = self.tenants.get(tenant).into_iter().flat_map(|ledger| &ledger.shares);
        shares.filter(|(_, share)| share.acknowledged && share.granted.is_some()).map(|(node, _)| *node)
    }

    /// Newest grants of a tenant by node.
    pub fn granted(&self, tenant: &TenantName) -> impl Iterator<Item = (NodeId, Amounts)> {
        let shares = self.tenants.get(tenant).into_iter().flat_map(|ledger| &ledger.shares);
        shares.filter_map(|(node, share)| Some((*node, share.granted?)))
    }
}

impl Ledger {
    fn charged(&self) -> Amounts {
        self.shares.values().fold(Amounts::default(), |sum, share| sum.plus(share.charged))
    }

    /// Part of the reservation that belongs to a part of the budget.
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

    /// Makes new grants. Raises beyond the current charges are taken from the free part of the budget.
    fn rebalance(&mut self) {
        let (targets, charged) = (self.targets(), self.charged());
        let mut free = self.budget.minus(charged);
        let granted = self.shares.values().filter(|share| share.granted.is_some());
        let granted = granted.fold(Amounts::default(), |sum, share| sum.plus(share.charged));
        let mut ungranted = self.budget.minus(granted);
        let kept = charged.with(self.budget, |charged, budget| if charged <= budget { u64::MAX } else { 0 });
        let least = self.budget.with(Amounts::both(MIN_CHANGE_FRACTION), |bytes, part| (bytes / part).max(1));
        // Amounts above the budget are reclaimed even in small steps.
        let least_lowered = least.with(kept, |least, kept| if kept > 0 { least } else { 1 });
        for (share, target) in self.shares.values_mut().zip(targets) {
            // While everything fits, a node without a grant keeps its bytes; otherwise it keeps its target of
            // the rest. Usage above an acknowledged grant is about to be evicted, and is granted again only
            // from the free part.
            let base = share.granted.unwrap_or_else(|| {
                let held = share.charged.min(share.applied.unwrap_or(Amounts::UNLIMITED));
                held.min(kept.max(target.min(ungranted)))
            });
            if share.granted.is_none() {
                ungranted = ungranted.minus(base);
            }
            let worth = |change: Amounts, least: Amounts| {
                change.with(least, |bytes, least| if bytes >= least { bytes } else { 0 })
            };
            let applied = share.acknowledged && share.reports >= REPORTS_BEFORE_LOWERING;
            let patient = kept.with(kept, |kept, _| if kept > 0 && !applied { u64::MAX } else { 0 });
            let lower = worth(base.minus(target.max(patient)), least_lowered);
            let raise = worth(target.minus(base).min(free), least);
            let grant = base.minus(lower).plus(raise);
            share.wanted = share.wanted.with(share.wanted, |bytes, _| bytes / 2);
            if share.granted == Some(grant) {
                continue;
            }
            let charged = share.charged.max(grant);
            free = free.minus(charged.minus(share.charged));
            (share.charged, share.granted, share.acknowledged) = (charged, Some(grant), false);
            share.reports = 0;
            share.version = share.version.saturating_add(1);
        }
    }

    /// Target of each node, in the order of the shares. Their sum is at most the budget.
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
    /// Makes the node's next report return the grant again.
    fn resend(&mut self) {
        if self.granted.is_some() {
            (self.version, self.acknowledged) = (self.version.saturating_add(1), false);
        }
    }

    /// Applies a node's report. `before` is its registration under the previous ledger, for its first report
    /// to this one.
    fn apply_report(&mut self, report: &TenantReport, before: Option<Epoch>) {
        let held = report.limit.max(report.used);
        let by_grant =
            |epoch: Epoch| report.version > version_base(epoch) && same_epoch(report.version, epoch);
        if before.is_some_and(by_grant) {
            (self.granted, self.charged) = (Some(report.limit), self.charged.max(held));
        }
        self.applied = Some(report.limit).filter(|_| report.version > 0);
        // Versions of another store's ledger may equal ours, for a registration under that store.
        let is_another = report.version == self.version && report.version > 0;
        let is_another = is_another && self.granted != Some(report.limit);
        if report.version > self.version || is_another {
            // Made by a previous ledger in the same registration: our grants need higher versions. No ledger makes the
            // highest one; a node that reports it gets no further grant.
            (self.version, self.acknowledged, self.reports) = (report.version.saturating_add(1), false, 0);
            self.charged = self.charged.max(held);
        } else if report.version == self.version {
            // Within a version usage only falls, so the lowest of reordered reports is the latest.
            self.charged = if self.acknowledged { self.charged.min(held) } else { held };
            self.acknowledged = true;
            self.reports = self.reports.saturating_add(1);
        } else {
            // The node has not applied later grants and may still hold this much.
            self.charged = self.charged.max(held);
        }
        let more = report.limited.minus(self.limited);
        self.limited = self.limited.max(report.limited);
        self.wanted = self.wanted.plus(more);
        self.used = report.used;
    }
}

/// Lower bound of the versions of a registration.
fn version_base(epoch: Epoch) -> u64 {
    epoch.0 << VERSION_BITS
}

fn same_epoch(version: u64, epoch: Epoch) -> bool {
    version >> VERSION_BITS == version_base(epoch) >> VERSION_BITS
}

/// Divides `total` by needs: all needs and an equal share of the rest, or, if that exceeds `total`, equal
/// amounts up to the needs. The sum is at most `total`.
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
