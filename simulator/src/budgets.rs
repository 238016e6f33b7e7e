//! Budgets of tenants: the operator's changes, and the check that the nodes' grants stay within the budget.
//!
//! The bound is that of docs/adr/0003. A node that has accepted a grant is *bound*: its limit counts. A grant
//! that raises a bound node's limit must not make the sum of all bound limits exceed the budget. A higher
//! budget that was replaced recently is tolerated, because members and nodes learn of a lower one later. A
//! node is not bound in these cases:
//!
//! * It has had no grant yet, for example after a restart: it cannot know that there is a budget.
//! * The owner of the tenant's slot has given it up after a long silence. It continues within its old grant.
//!   It is bound again when it has accepted another grant and there is room for it.
//! * The store has lost its data. No node is then bound until it gets a grant of a member that uses the new
//!   store. Members that have not noticed the loss bind no node, because members of the new store do not know
//!   their grants.
//!
//! After the end of all faults, every tenant with a budget has one ledger, all nodes are bound by it, and the
//! whole budget is granted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_agent_core::event::Grant;
use reprise_controlplane_core::Budget;
use reprise_policy::{Amounts, Epoch, TenantId, Tick};

use crate::membership::MemberStep;
use crate::network::Host;
use crate::setup::large_layout;
use crate::simulation::{Action, Simulation};
use crate::store::{Key, Value};
use crate::tenants::tenant_name;

/// Time of the first budget, and the interval of further changes.
pub(crate) const FIRST_BUDGET_AFTER: Duration = Duration::from_millis(500);
const BUDGET_EVERY_MS: std::ops::Range<u64> = 200..6000;
/// As `server.rs`: interval of the ledger updates.
const REBALANCE_EVERY: Duration = Duration::from_secs(1);
/// Time within which all members and nodes know of a lowered budget. It covers a member's longest pause, the
/// rest of its lease, a failed call to the store, and a grant in flight.
const KNOWN_AFTER: Duration = Duration::from_secs(20);
/// Ledgers skip changes of a node's limit below this fraction of the budget.
const SMALLEST_CHANGE: u64 = 64;

/// Time within which the whole budget is granted after the end of all faults: a node's heartbeats and several
/// steps of a ledger.
const SHARED_OUT_WITHIN: Duration = Duration::from_secs(15);

/// Accessors for both kinds of bytes.
const KINDS: [fn(&Amounts) -> u64; 2] = [|amounts| amounts.dram, |amounts| amounts.nvme];

/// State of the budget checks.
#[derive(Debug, Default)]
pub(crate) struct BudgetAudit {
    /// Budgets in the store.
    budgets: BTreeMap<TenantId, Amounts>,
    /// Replaced budgets, and the time of the replacement.
    replaced: Vec<(TenantId, Amounts, Tick)>,
    /// Nodes whose limit counts.
    bound: BTreeSet<(TenantId, usize)>,
    /// Nodes that will be bound as soon as there is room for their limit.
    waiting: BTreeSet<(TenantId, usize)>,
    /// The registration under which a node was given up last: late grants to it, or to earlier ones, do not
    /// bind the node.
    given_up: BTreeMap<(TenantId, usize), Epoch>,
}

impl BudgetAudit {
    /// Handles the end of an agent's process, which ends its grants.
    pub(crate) fn remove_node(&mut self, node: usize) {
        self.bound.retain(|(_, other)| *other != node);
        self.waiting.retain(|(_, other)| *other != node);
    }

    fn give_up(&mut self, of: (TenantId, usize)) {
        self.bound.remove(&of);
        self.waiting.remove(&of);
    }

    /// Returns the highest budget that a member or node may still use; `None` if there is no budget.
    fn allowed(&mut self, tenant: TenantId, now: Tick) -> Option<Amounts> {
        self.replaced.retain(|(.., at)| now.since(*at) < KNOWN_AFTER);
        let replaced = self.replaced.iter().filter(|(of, ..)| *of == tenant).map(|(_, budget, _)| *budget);
        let all = self.budgets.get(&tenant).copied().into_iter().chain(replaced);
        all.reduce(|one, other| Amounts { dram: one.dram.max(other.dram), nvme: one.nvme.max(other.nvme) })
    }
}

fn limits(grant: &Grant) -> Amounts {
    Amounts { dram: grant.dram.limit(), nvme: grant.nvme.limit() }
}

impl Simulation {
    // ---- operator -----------------------------------------------------------------------------------------

    /// Sets or removes a tenant's budget at a random member.
    pub(crate) fn change_budget(&mut self) {
        if self.env.calm {
            return;
        }
        let delay = self.env.rng.millis(BUDGET_EVERY_MS);
        self.env.after(delay, Action::Budget);
        let tenant = TenantId(self.env.rng.below(usize::from(self.env.setup.tenants)) as u16);
        let member = self.env.rng.below(self.members.len());
        let slot = large_layout().slot_bytes();
        let amount = |count: usize| slot * (4 + count as u64);
        let (dram, nvme) = (amount(self.env.rng.below(60)), amount(self.env.rng.below(200)));
        let limit = Amounts { dram, nvme };
        let part = self.env.rng.one_of(&[0, 0, 4]);
        let reserved = |bytes: u64| bytes.checked_div(part).unwrap_or(0);
        let reserved = Amounts { dram: reserved(dram), nvme: reserved(nvme) };
        let budget = if self.env.rng.chance(150) { None } else { Some(Budget { reserved, limit }) };
        if self.serves(member) && self.env.is_awake(Host::Member(member)) {
            self.env.count(if budget.is_some() { "budgets set" } else { "budgets removed" });
            self.set_budget(member, tenant, budget);
        }
    }

    /// Updates a member's ledgers, and schedules the next update.
    pub(crate) fn rebalance(&mut self, member: usize) {
        let now = self.env.time(Host::Member(member));
        self.member(member).rebalance(now);
        self.member_later(member, REBALANCE_EVERY, MemberStep::Rebalance);
        self.note_given_up(member);
    }

    // ---- audit --------------------------------------------------------------------------------------------

    /// Compares the budgets with those in the store.
    pub(crate) fn note_budgets(&mut self) {
        for tenant in 0..self.env.setup.tenants {
            let tenant = TenantId(tenant);
            let entry = self.store_process.store.get(Key::Tenant(tenant));
            let now = entry.map(|entry| match &entry.value {
                Value::Budget(budget) => budget.limit,
                other => unreachable!("unexpected value of a budget: {other:?}"),
            });
            let before = match now {
                Some(limit) => self.budget_audit.budgets.insert(tenant, limit),
                None => self.budget_audit.budgets.remove(&tenant),
            };
            if let Some(before) = before.filter(|before| Some(*before) != now) {
                self.budget_audit.replaced.push((tenant, before, self.env.now));
            }
        }
    }

    /// Unbinds all nodes, because the store has lost its data.
    pub(crate) fn clear_bounds(&mut self) {
        self.budget_audit.bound.clear();
        self.budget_audit.waiting.clear();
        self.budget_audit.given_up.clear();
        self.note_budgets();
    }

    /// Unbinds the nodes that a member may have given up from the member's ledgers.
    pub(crate) fn note_given_up(&mut self, member: usize) {
        let now = self.env.time(Host::Member(member));
        let running = self.member(member);
        for node in running.given_up(now) {
            let running = self.members[member].as_ref().expect("the member runs");
            let (Some(host), Some(epoch)) = (running.host_of(node), running.epoch_of(node)) else { continue };
            for tenant in 0..self.env.setup.tenants {
                let tenant = TenantId(tenant);
                let running = self.members[member].as_ref().expect("the member runs");
                if running.has_slot_of(&tenant_name(tenant)) {
                    self.budget_audit.give_up((tenant, host));
                    let fenced = self.budget_audit.given_up.entry((tenant, host)).or_insert(epoch);
                    *fenced = epoch.max(*fenced);
                }
            }
        }
    }

    /// Checks a new grant of a node, which a ledger has sent to the registration of an epoch.
    pub(crate) fn audit_order(
        &mut self,
        (node, tenant): (usize, TenantId),
        epoch: Epoch,
        before: Option<Grant>,
    ) {
        let after = limits(&self.grant_of(node, tenant).expect("the grant was just applied"));
        let is_late = self.budget_audit.given_up.get(&(tenant, node)).is_some_and(|fenced| epoch <= *fenced);
        if after == Amounts::UNLIMITED || is_late || !self.is_of_the_store(epoch) {
            return self.budget_audit.give_up((tenant, node));
        }
        let Some(allowed) = self.budget_audit.allowed(tenant, self.env.now) else { return };
        if self.budget_audit.bound.contains(&(tenant, node)) {
            let before = limits(&before.expect("a bound node has a grant"));
            let sum = self.bound_by(tenant);
            for (room, kind) in [("DRAM", KINDS[0]), ("NVMe", KINDS[1])] {
                assert!(
                    kind(&after) <= kind(&before) || kind(&sum) <= kind(&allowed),
                    "node {node} is granted {} bytes of {room} for {tenant:?} instead of {}: nodes may then hold {} \
                     of a budget of {}",
                    kind(&after),
                    kind(&before),
                    kind(&sum),
                    kind(&allowed)
                );
            }
        } else {
            self.budget_audit.waiting.insert((tenant, node));
        }
        self.bind_waiting(tenant, allowed);
    }

    /// Reports whether a registration belongs to the current data of the store, and not to data that it has
    /// lost.
    fn is_of_the_store(&self, epoch: Epoch) -> bool {
        let identity = self.store_process.store.get(Key::Identity);
        identity.is_some_and(|entry| match entry.value {
            Value::Number(number) => u64::from(number) == epoch.0 >> 32,
            _ => false,
        })
    }

    /// Binds waiting nodes as far as there is room.
    fn bind_waiting(&mut self, tenant: TenantId, allowed: Amounts) {
        let waiting: Vec<usize> =
            self.budget_audit.waiting.iter().filter(|(of, _)| *of == tenant).map(|(_, node)| *node).collect();
        for node in waiting {
            self.budget_audit.bound.insert((tenant, node));
            let sum = self.bound_by(tenant);
            if KINDS.iter().all(|kind| kind(&sum) <= kind(&allowed)) {
                self.budget_audit.waiting.remove(&(tenant, node));
                self.env.count("nodes bound by a budget");
            } else {
                self.budget_audit.bound.remove(&(tenant, node));
            }
        }
    }

    /// Returns the sum of the limits of all bound nodes.
    fn bound_by(&self, tenant: TenantId) -> Amounts {
        let bound = self.budget_audit.bound.iter().filter(|(of, _)| *of == tenant);
        let granted = bound.map(|(_, node)| self.grant_of(*node, tenant).expect("a bound node has a grant"));
        granted.fold(Amounts::default(), |sum, grant| Amounts {
            dram: sum.dram.saturating_add(grant.dram.limit()),
            nvme: sum.nvme.saturating_add(grant.nvme.limit()),
        })
    }

    /// Checks the state after the end of all faults: one ledger for each budget that binds all nodes, and
    /// nothing left over.
    pub(crate) fn assert_budgets_converged(&self) {
        for tenant in (0..self.env.setup.tenants).map(TenantId) {
            let name = tenant_name(tenant);
            let states = self.members.iter().flatten();
            let states: Vec<_> = states.filter_map(|member| member.tenancy.ledgers.state(&name)).collect();
            let budget = self.budget_audit.budgets.get(&tenant).copied();
            assert_eq!(
                states.len(),
                usize::from(budget.is_some()),
                "ledgers of {name}, of the budget {budget:?}"
            );
            match budget {
                Some(budget) => self.assert_split(tenant, &budget),
                None => self.assert_unbound(tenant),
            }
        }
    }

    fn assert_split(&self, tenant: TenantId, budget: &Amounts) {
        let mut sum = Amounts::default();
        for node in 0..self.nodes.len() {
            let grant = self.grant_of(node, tenant);
            let limit = limits(&grant.unwrap_or_else(|| panic!("node {node} has no grant for {tenant:?}")));
            sum = Amounts { dram: sum.dram + limit.dram, nvme: sum.nvme + limit.nvme };
            let core = &self.nodes[node].process.as_ref().expect("the agent runs").core;
            let usage =
                core.tenant_usage().find(|usage| usage.tenant == tenant).expect("the tenant has a grant");
            let used = Amounts { dram: usage.dram.used, nvme: usage.nvme.used };
            let within = KINDS.iter().all(|kind| kind(&used) <= kind(&limit));
            assert!(within, "node {node}: {tenant:?} uses {used:?} of {limit:?}");
        }
        for kind in KINDS {
            let (sum, budget) = (kind(&sum), kind(budget));
            assert!(sum <= budget, "nodes may hold {sum} bytes of {budget} for {tenant:?}");
        }
        let left = self.unassigned_bytes(tenant, budget);
        assert_eq!(left, None, "without faults nodes may hold the whole budget {budget:?} of {tenant:?}");
    }

    /// After the end of all faults: waits until bytes that move between nodes have been granted again.
    pub(crate) fn share_out(&mut self) {
        let give_up = self.env.now.after(SHARED_OUT_WITHIN);
        while self.env.now < give_up && self.has_unassigned_bytes() {
            self.run_until(self.env.now.after(REBALANCE_EVERY));
        }
    }

    fn has_unassigned_bytes(&self) -> bool {
        let mut budgets = self.budget_audit.budgets.iter();
        budgets.any(|(tenant, budget)| self.unassigned_bytes(*tenant, budget).is_some())
    }

    /// Returns the unassigned part of a budget, if it exceeds the changes that ledgers skip.
    fn unassigned_bytes(&self, tenant: TenantId, budget: &Amounts) -> Option<u64> {
        let granted = (0..self.nodes.len()).filter_map(|node| self.grant_of(node, tenant));
        let granted: Vec<Amounts> = granted.map(|grant| limits(&grant)).collect();
        KINDS.iter().find_map(|kind| {
            let sum = granted.iter().fold(0, |sum: u64, limit| sum.saturating_add(kind(limit)));
            let undone = (kind(budget) / SMALLEST_CHANGE + 1) * self.nodes.len() as u64;
            kind(budget).checked_sub(sum).filter(|left| *left > undone)
        })
    }

    fn assert_unbound(&self, tenant: TenantId) {
        for node in 0..self.nodes.len() {
            let limit = self.grant_of(node, tenant).map(|grant| limits(&grant));
            let is_free = limit.is_none_or(|limit| limit == Amounts::UNLIMITED);
            assert!(is_free, "node {node} is bound by a budget of {tenant:?} that has ended: {limit:?}");
        }
    }
}
