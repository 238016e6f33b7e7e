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
use reprise_controlplane_core::agent_calls::LEDGER_INTERVAL;
use reprise_policy::{Amounts, Epoch, TenantId, Tick};

use crate::environment::Environment;
use crate::member::Member;
use crate::network::Host;
use crate::setup::large_layout;
use crate::simulation::{Action, Simulation};
use crate::store::{Key, Value};
use crate::tenants::tenant_name;

/// Time of the first budget, and the interval of further changes.
pub(crate) const FIRST_BUDGET_AFTER: Duration = Duration::from_millis(500);
const BUDGET_EVERY_MS: std::ops::Range<u64> = 200..6000;
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

// ---- operator -----------------------------------------------------------------------------------------

/// Sets or removes a tenant's budget at a random member.
pub(crate) fn change_budget(env: &mut Environment, members: &mut [Option<Member>]) {
    if env.calm {
        return;
    }
    let delay = env.rng.millis(BUDGET_EVERY_MS);
    env.after(delay, Action::Budget);
    let tenant = TenantId(env.rng.below(usize::from(env.setup.tenants)) as u16);
    let member = env.rng.below(members.len());
    let slot = large_layout().slot_bytes();
    let amount = |count: usize| slot * (4 + count as u64);
    let (dram, nvme) = (amount(env.rng.below(60)), amount(env.rng.below(200)));
    let limit = Amounts { dram, nvme };
    let part = env.rng.one_of(&[0, 0, 4]);
    let reserved = |bytes: u64| bytes.checked_div(part).unwrap_or(0);
    let reserved = Amounts { dram: reserved(dram), nvme: reserved(nvme) };
    let budget = if env.rng.chance(150) { None } else { Some(Budget { reserved, limit }) };
    if let Some(running) = members[member].as_mut().filter(|running| running.reachable(env)) {
        env.count(if budget.is_some() { "budgets set" } else { "budgets removed" });
        running.talk.set_budget(env, tenant, budget);
    }
}

// ---- audit --------------------------------------------------------------------------------------------

/// Compares the budgets with those in the store.
pub(crate) fn note_budgets(simulation: &mut Simulation) {
    for tenant in 0..simulation.env.setup.tenants {
        let tenant = TenantId(tenant);
        let entry = simulation.store_process.store.get(Key::Tenant(tenant));
        let now = entry.map(|entry| match &entry.value {
            Value::Budget(budget) => budget.limit,
            other => unreachable!("unexpected value of a budget: {other:?}"),
        });
        let before = match now {
            Some(limit) => simulation.budget_audit.budgets.insert(tenant, limit),
            None => simulation.budget_audit.budgets.remove(&tenant),
        };
        if let Some(before) = before.filter(|before| Some(*before) != now) {
            simulation.budget_audit.replaced.push((tenant, before, simulation.env.now));
        }
    }
}

/// Unbinds all nodes, because the store has lost its data.
pub(crate) fn clear_bounds(simulation: &mut Simulation) {
    simulation.budget_audit.bound.clear();
    simulation.budget_audit.waiting.clear();
    simulation.budget_audit.given_up.clear();
    note_budgets(simulation);
}

/// Unbinds the nodes that a member may have given up from the member's ledgers.
pub(crate) fn note_given_up(simulation: &mut Simulation, member: usize) {
    let now = simulation.env.time(Host::Member(member));
    let Some(running) = &mut simulation.members[member] else { return };
    for node in running.given_up(now) {
        let running = simulation.members[member].as_ref().expect("the member runs");
        let (Some(host), Some(epoch)) = (running.host_of(node), running.epoch_of(node)) else { continue };
        for tenant in 0..simulation.env.setup.tenants {
            let tenant = TenantId(tenant);
            let running = simulation.members[member].as_ref().expect("the member runs");
            if running.has_slot_of(&tenant_name(tenant)) {
                simulation.budget_audit.give_up((tenant, host));
                let fenced = simulation.budget_audit.given_up.entry((tenant, host)).or_insert(epoch);
                *fenced = epoch.max(*fenced);
            }
        }
    }
}

/// Checks a new grant of a node, which a ledger has sent to the registration of an epoch.
pub(crate) fn audit_order(
    simulation: &mut Simulation,
    (node, tenant): (usize, TenantId),
    epoch: Epoch,
    before: Option<Grant>,
) {
    let after = limits(&simulation.grant_of(node, tenant).expect("the grant was just applied"));
    let is_late =
        simulation.budget_audit.given_up.get(&(tenant, node)).is_some_and(|fenced| epoch <= *fenced);
    if after == Amounts::UNLIMITED || is_late || !is_of_the_store(simulation, epoch) {
        return simulation.budget_audit.give_up((tenant, node));
    }
    let Some(allowed) = simulation.budget_audit.allowed(tenant, simulation.env.now) else { return };
    if simulation.budget_audit.bound.contains(&(tenant, node)) {
        let before = limits(&before.expect("a bound node has a grant"));
        let sum = bound_by(simulation, tenant);
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
        simulation.budget_audit.waiting.insert((tenant, node));
    }
    bind_waiting(simulation, tenant, allowed);
}

/// Reports whether a registration belongs to the current data of the store, and not to data that it has
/// lost.
fn is_of_the_store(simulation: &Simulation, epoch: Epoch) -> bool {
    let identity = simulation.store_process.store.get(Key::Identity);
    identity.is_some_and(|entry| match entry.value {
        Value::Number(number) => u64::from(number) == epoch.0 >> 32,
        _ => false,
    })
}

/// Binds waiting nodes as far as there is room.
fn bind_waiting(simulation: &mut Simulation, tenant: TenantId, allowed: Amounts) {
    let waiting: Vec<usize> = simulation
        .budget_audit
        .waiting
        .iter()
        .filter(|(of, _)| *of == tenant)
        .map(|(_, node)| *node)
        .collect();
    for node in waiting {
        simulation.budget_audit.bound.insert((tenant, node));
        let sum = bound_by(simulation, tenant);
        if KINDS.iter().all(|kind| kind(&sum) <= kind(&allowed)) {
            simulation.budget_audit.waiting.remove(&(tenant, node));
            simulation.env.count("nodes bound by a budget");
        } else {
            simulation.budget_audit.bound.remove(&(tenant, node));
        }
    }
}

/// Returns the sum of the limits of all bound nodes.
fn bound_by(simulation: &Simulation, tenant: TenantId) -> Amounts {
    let bound = simulation.budget_audit.bound.iter().filter(|(of, _)| *of == tenant);
    let granted =
        bound.map(|(_, node)| simulation.grant_of(*node, tenant).expect("a bound node has a grant"));
    granted.fold(Amounts::default(), |sum, grant| Amounts {
        dram: sum.dram.saturating_add(grant.dram.limit()),
        nvme: sum.nvme.saturating_add(grant.nvme.limit()),
    })
}

/// Checks the state after the end of all faults: one ledger for each budget that binds all nodes, and
/// nothing left over.
pub(crate) fn assert_budgets_converged(simulation: &Simulation) {
    for tenant in (0..simulation.env.setup.tenants).map(TenantId) {
        let name = tenant_name(tenant);
        let states = simulation.members.iter().flatten();
        let states: Vec<_> = states.filter_map(|member| member.tenancy.ledgers.state(&name)).collect();
        let budget = simulation.budget_audit.budgets.get(&tenant).copied();
        assert_eq!(
            states.len(),
            usize::from(budget.is_some()),
            "ledgers of {name}, of the budget {budget:?}"
        );
        match budget {
            Some(budget) => assert_split(simulation, tenant, &budget),
            None => assert_unbound(simulation, tenant),
        }
    }
}

fn assert_split(simulation: &Simulation, tenant: TenantId, budget: &Amounts) {
    let mut sum = Amounts::default();
    for node in 0..simulation.nodes.len() {
        let grant = simulation.grant_of(node, tenant);
        let limit = limits(&grant.unwrap_or_else(|| panic!("node {node} has no grant for {tenant:?}")));
        sum = Amounts { dram: sum.dram + limit.dram, nvme: sum.nvme + limit.nvme };
        let core = &simulation.nodes[node].process.as_ref().expect("the agent runs").core;
        let usage = core.tenant_usage().find(|usage| usage.tenant == tenant).expect("the tenant has a grant");
        let used = Amounts { dram: usage.dram.used, nvme: usage.nvme.used };
        let within = KINDS.iter().all(|kind| kind(&used) <= kind(&limit));
        assert!(within, "node {node}: {tenant:?} uses {used:?} of {limit:?}");
    }
    for kind in KINDS {
        let (sum, budget) = (kind(&sum), kind(budget));
        assert!(sum <= budget, "nodes may hold {sum} bytes of {budget} for {tenant:?}");
    }
    let left = unassigned_bytes(simulation, tenant, budget);
    assert_eq!(left, None, "without faults nodes may hold the whole budget {budget:?} of {tenant:?}");
}

/// After the end of all faults: waits until bytes that move between nodes have been granted again.
pub(crate) fn share_out(simulation: &mut Simulation) {
    let give_up = simulation.env.now.after(SHARED_OUT_WITHIN);
    while simulation.env.now < give_up && has_unassigned_bytes(simulation) {
        simulation.run_until(simulation.env.now.after(LEDGER_INTERVAL));
    }
}

fn has_unassigned_bytes(simulation: &Simulation) -> bool {
    let mut budgets = simulation.budget_audit.budgets.iter();
    budgets.any(|(tenant, budget)| unassigned_bytes(simulation, *tenant, budget).is_some())
}

/// Returns the unassigned part of a budget, if it exceeds the changes that ledgers skip.
fn unassigned_bytes(simulation: &Simulation, tenant: TenantId, budget: &Amounts) -> Option<u64> {
    let granted = (0..simulation.nodes.len()).filter_map(|node| simulation.grant_of(node, tenant));
    let granted: Vec<Amounts> = granted.map(|grant| limits(&grant)).collect();
    KINDS.iter().find_map(|kind| {
        let sum = granted.iter().fold(0, |sum: u64, limit| sum.saturating_add(kind(limit)));
        let undone = (kind(budget) / SMALLEST_CHANGE + 1) * simulation.nodes.len() as u64;
        kind(budget).checked_sub(sum).filter(|left| *left > undone)
    })
}

fn assert_unbound(simulation: &Simulation, tenant: TenantId) {
    for node in 0..simulation.nodes.len() {
        let limit = simulation.grant_of(node, tenant).map(|grant| limits(&grant));
        let is_free = limit.is_none_or(|limit| limit == Amounts::UNLIMITED);
        assert!(is_free, "node {node} is bound by a budget of {tenant:?} that has ended: {limit:?}");
    }
}
