//! Budgets of tenants: the operator who sets them, and the auditor who looks whether what nodes may hold stays within.
//!
//! The bound is that of docs/adr/0003. A node that has taken an order is *bound*: it counts with its limit. No order that
//! raises a bound node's limit may make the sum of all bound nodes' limits exceed the budget, or a higher one that was
//! replaced not long ago, because members and nodes hear of a lower one later. Not bound is
//! * who has had no order yet, as after a restart: it cannot know that there is a budget;
//! * who was given up by the owner of the tenant's slot, because nothing was heard of it for long. It goes on within what it
//!   was granted, and is bound again when it has taken another order and there is room for it;
//! * everybody, when the store has lost its memory, until an order of a member that knows the new one has come: a member that
//!   has not noticed yet binds nobody, for members of the new store hear nothing of its orders.
//!
//! In calm every tenant with a budget has one ledger, all nodes are bound by it, and nothing of the budget is left over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_agent_core::event::Grant;
use reprise_controlplane_core::{Amounts, Budget};
use reprise_policy::{Epoch, TenantId, Tick};

use crate::joining::MemberStep;
use crate::network::Host;
use crate::setup::large_layout;
use crate::store::{Key, Value};
use crate::tenants::tenant_name;
use crate::world::{Action, World};

/// The first budget is set so soon, and others after it at such times.
pub(crate) const FIRST_BUDGET_AFTER: Duration = Duration::from_millis(500);
const BUDGET_EVERY_MS: std::ops::Range<u64> = 200..6000;
/// As `server.rs`: pause between two looks at the ledgers.
const REBALANCE_EVERY: Duration = Duration::from_secs(1);
/// A budget that was lowered is heard of by everybody within this: a member's longest pause, the life of a lease that it
/// believes in then, a call to the store that fails, and an order under way.
const HEARD_AFTER: Duration = Duration::from_secs(20);
/// Changes below this part of a budget are left undone on a node.
const SMALLEST_CHANGE: u64 = 64;

/// In calm a budget is shared out within this: a node's heartbeats, and steps of a ledger, for some moves one after the other.
const SHARED_OUT_WITHIN: Duration = Duration::from_secs(15);

/// Both kinds of bytes.
const KINDS: [fn(&Amounts) -> u64; 2] = [|amounts| amounts.dram, |amounts| amounts.nvme];

/// What the auditor knows.
#[derive(Debug, Default)]
pub(crate) struct Books {
    /// Budgets in the store.
    budgets: BTreeMap<TenantId, Amounts>,
    /// Budgets that were replaced, and when.
    replaced: Vec<(TenantId, Amounts, Tick)>,
    /// Nodes that count.
    bound: BTreeSet<(TenantId, usize)>,
    /// Nodes that would count, if there were room for them.
    waiting: BTreeSet<(TenantId, usize)>,
    /// The registration under which a node was given up last: orders to it, or to one before, that come late bind nobody.
    given_up: BTreeMap<(TenantId, usize), Epoch>,
}

impl Books {
    /// An agent's process has ended, and what it was granted with it.
    pub(crate) fn leave(&mut self, node: usize) {
        self.bound.retain(|(_, other)| *other != node);
        self.waiting.retain(|(_, other)| *other != node);
    }

    fn give_up(&mut self, of: (TenantId, usize)) {
        self.bound.remove(&of);
        self.waiting.remove(&of);
    }

    /// The highest budget that somebody may still go by; `None`: there is none.
    fn allowed(&mut self, tenant: TenantId, now: Tick) -> Option<Amounts> {
        self.replaced.retain(|(.., at)| now.since(*at) < HEARD_AFTER);
        let replaced = self.replaced.iter().filter(|(of, ..)| *of == tenant).map(|(_, budget, _)| *budget);
        let all = self.budgets.get(&tenant).copied().into_iter().chain(replaced);
        all.reduce(|one, other| Amounts { dram: one.dram.max(other.dram), nvme: one.nvme.max(other.nvme) })
    }
}

fn limits(grant: &Grant) -> Amounts {
    Amounts { dram: grant.dram.limit(), nvme: grant.nvme.limit() }
}

impl World {
    // ---- the operator ------------------------------------------------------------------------------------------

    /// An operator has some member set or remove a tenant's budget.
    pub(crate) fn change_budget(&mut self) {
        if self.calm {
            return;
        }
        let delay = self.rng.millis(BUDGET_EVERY_MS);
        self.after(delay, Action::Budget);
        let tenant = TenantId(self.rng.below(usize::from(self.setup.tenants)) as u16);
        let member = self.rng.below(self.members.len());
        let slot = large_layout().slot_bytes();
        let amount = |count: usize| slot * (4 + count as u64);
        let (dram, nvme) = (amount(self.rng.below(60)), amount(self.rng.below(200)));
        let limit = Amounts { dram, nvme };
        let part = self.rng.one_of(&[0, 0, 4]);
        let reserved = |bytes: u64| bytes.checked_div(part).unwrap_or(0);
        let reserved = Amounts { dram: reserved(dram), nvme: reserved(nvme) };
        let budget = if self.rng.chance(150) { None } else { Some(Budget { reserved, limit }) };
        if self.serves(member) && self.is_awake(Host::Member(member)) {
            self.count(if budget.is_some() { "budgets set" } else { "budgets removed" });
            self.set_budget(member, tenant, budget);
        }
    }

    /// The ledgers of a member are brought in line, and again after a while.
    pub(crate) fn rebalance(&mut self, member: usize) {
        let now = self.time(Host::Member(member));
        self.member(member).rebalance(now);
        self.member_later(member, REBALANCE_EVERY, MemberStep::Rebalance);
        self.note_given_up(member);
    }

    // ---- the auditor -------------------------------------------------------------------------------------------

    /// The store may have other budgets.
    pub(crate) fn note_budgets(&mut self) {
        for tenant in 0..self.setup.tenants {
            let tenant = TenantId(tenant);
            let entry = self.keeper.store.get(Key::Tenant(tenant));
            let now = entry.map(|entry| match &entry.value {
                Value::Budget(budget) => budget.limit,
                other => unreachable!("{other:?} is no budget"),
            });
            let before = match now {
                Some(limit) => self.books.budgets.insert(tenant, limit),
                None => self.books.budgets.remove(&tenant),
            };
            if let Some(before) = before.filter(|before| Some(*before) != now) {
                self.books.replaced.push((tenant, before, self.now));
            }
        }
    }

    /// The store has lost its memory.
    pub(crate) fn nobody_is_bound(&mut self) {
        self.books.bound.clear();
        self.books.waiting.clear();
        self.books.given_up.clear();
        self.note_budgets();
    }

    /// Whoever a member may have given up is bound no more by the ledgers that the member has.
    pub(crate) fn note_given_up(&mut self, member: usize) {
        let now = self.time(Host::Member(member));
        let running = self.member(member);
        for node in running.given_up(now) {
            let running = self.members[member].as_ref().expect("it runs");
            let (Some(host), Some(epoch)) = (running.host_of(node), running.epoch_of(node)) else { continue };
            for tenant in 0..self.setup.tenants {
                let tenant = TenantId(tenant);
                let running = self.members[member].as_ref().expect("it runs");
                if running.has_slot_of(&tenant_name(tenant)) {
                    self.books.give_up((tenant, host));
                    let fenced = self.books.given_up.entry((tenant, host)).or_insert(epoch);
                    *fenced = epoch.max(*fenced);
                }
            }
        }
    }

    /// A node follows another grant than before, by an order to the registration of an epoch.
    pub(crate) fn audit_order(
        &mut self,
        (node, tenant): (usize, TenantId),
        epoch: Epoch,
        before: Option<Grant>,
    ) {
        let after = limits(&self.grant_of(node, tenant).expect("it was just granted"));
        let is_late = self.books.given_up.get(&(tenant, node)).is_some_and(|fenced| epoch <= *fenced);
        if after == Amounts::UNLIMITED || is_late || !self.is_of_the_store(epoch) {
            return self.books.give_up((tenant, node));
        }
        let Some(allowed) = self.books.allowed(tenant, self.now) else { return };
        if self.books.bound.contains(&(tenant, node)) {
            let before = limits(&before.expect("who is bound was granted something"));
            let sum = self.bound_by(tenant);
            for (room, kind) in [("DRAM", KINDS[0]), ("NVMe", KINDS[1])] {
                assert!(
                    kind(&after) <= kind(&before) || kind(&sum) <= kind(&allowed),
                    "node {node} is ordered to hold {} bytes of {room} for {tenant:?}, not {}: then nodes may hold {} \
                     of a budget of {}",
                    kind(&after),
                    kind(&before),
                    kind(&sum),
                    kind(&allowed)
                );
            }
        } else {
            self.books.waiting.insert((tenant, node));
        }
        self.bind_waiting(tenant, allowed);
    }

    /// Whether a registration is in the store as it is now, and not as it was before it lost its memory.
    fn is_of_the_store(&self, epoch: Epoch) -> bool {
        let identity = self.keeper.store.get(Key::Identity);
        identity.is_some_and(|entry| match entry.value {
            Value::Number(number) => u64::from(number) == epoch.0 >> 32,
            _ => false,
        })
    }

    /// Binds whom there is room for.
    fn bind_waiting(&mut self, tenant: TenantId, allowed: Amounts) {
        let waiting: Vec<usize> =
            self.books.waiting.iter().filter(|(of, _)| *of == tenant).map(|(_, node)| *node).collect();
        for node in waiting {
            self.books.bound.insert((tenant, node));
            let sum = self.bound_by(tenant);
            if KINDS.iter().all(|kind| kind(&sum) <= kind(&allowed)) {
                self.books.waiting.remove(&(tenant, node));
                self.count("nodes bound by a budget");
            } else {
                self.books.bound.remove(&(tenant, node));
            }
        }
    }

    /// What all bound nodes may hold together.
    fn bound_by(&self, tenant: TenantId) -> Amounts {
        let bound = self.books.bound.iter().filter(|(of, _)| *of == tenant);
        let granted = bound.map(|(_, node)| self.grant_of(*node, tenant).expect("it is bound"));
        granted.fold(Amounts::default(), |sum, grant| Amounts {
            dram: sum.dram.saturating_add(grant.dram.limit()),
            nvme: sum.nvme.saturating_add(grant.nvme.limit()),
        })
    }

    /// In calm: one ledger for each budget, which binds everybody, and nothing is left over.
    pub(crate) fn assert_budgets_converged(&self) {
        for tenant in (0..self.setup.tenants).map(TenantId) {
            let name = tenant_name(tenant);
            let states = self.members.iter().flatten();
            let states: Vec<_> = states.filter_map(|member| member.tenancy.ledgers.state(&name)).collect();
            let budget = self.books.budgets.get(&tenant).copied();
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
            let limit = limits(&grant.unwrap_or_else(|| panic!("node {node} has no order for {tenant:?}")));
            sum = Amounts { dram: sum.dram + limit.dram, nvme: sum.nvme + limit.nvme };
            let core = &self.nodes[node].process.as_ref().expect("it runs").core;
            let usage = core.tenant_usage().find(|usage| usage.tenant == tenant).expect("it was granted");
            let used = Amounts { dram: usage.dram.used, nvme: usage.nvme.used };
            let within = KINDS.iter().all(|kind| kind(&used) <= kind(&limit));
            assert!(within, "node {node}: {tenant:?} uses {used:?} of {limit:?}");
        }
        for kind in KINDS {
            let (sum, budget) = (kind(&sum), kind(budget));
            assert!(sum <= budget, "nodes may hold {sum} bytes of {budget} for {tenant:?}");
        }
        let left = self.left_over(tenant, budget);
        assert_eq!(left, None, "in calm nodes may hold all of the budget {budget:?} of {tenant:?}");
    }

    /// In calm: lets bytes arrive that are on their way from one node to another, for a while.
    pub(crate) fn share_out(&mut self) {
        let give_up = self.now.after(SHARED_OUT_WITHIN);
        while self.now < give_up && self.is_something_left_over() {
            self.run_until(self.now.after(REBALANCE_EVERY));
        }
    }

    fn is_something_left_over(&self) -> bool {
        let mut budgets = self.books.budgets.iter();
        budgets.any(|(tenant, budget)| self.left_over(*tenant, budget).is_some())
    }

    /// What no node may hold, more than ledgers leave undone.
    fn left_over(&self, tenant: TenantId, budget: &Amounts) -> Option<u64> {
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
