//! Model test of budgets: nodes apply grants over a network that loses, duplicates and reorders messages.
//! Nodes die, restart, are forgotten and return, and ledgers restart.
//!
//! After every step, the bytes of all nodes that the ledger has not forgotten are within the budget. At the
//! end, when all messages arrive, bytes are where they are in demand.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use reprise_controlplane_core::budgets::{Budget, Budgets, QuotaGrant, QuotaReport, TenantReport};
use reprise_policy::{Amounts, Epoch, NodeId, TenantName};

const BUDGET: u64 = 6400;

/// Maximum number of messages in flight; the oldest are lost first.
const NETWORK_MAX: usize = 24;

fn budget() -> Budget {
    Budget { reserved: Amounts::default(), limit: Amounts::both(BUDGET) }
}

/// An agent, reduced to its budgets. DRAM and NVMe behave alike.
#[derive(Clone, Debug)]
struct Node {
    epoch: Epoch,
    version: u64,
    limit: u64,
    used: u64,
    /// Bytes that it would use without a limit.
    demand: u64,
    limited: u64,
    alive: bool,
}

impl Node {
    fn held(&self) -> u64 {
        self.limit.max(self.used)
    }

    fn apply_grant(&mut self, grant: &QuotaGrant) {
        if self.alive && grant.epoch == self.epoch && grant.version > self.version {
            (self.version, self.limit) = (grant.version, grant.limit.dram);
        }
    }

    /// Uses more bytes within its limit, or evicts some of the excess.
    fn work(&mut self, blocks: u64) {
        if !self.alive {
            return;
        }
        let wanted = self.demand.saturating_sub(self.used).min(blocks);
        let room = self.limit.saturating_sub(self.used);
        self.limited += wanted.saturating_sub(room);
        self.used += wanted.min(room);
        if self.used > self.limit {
            self.used -= (self.used - self.limit).min(blocks);
        }
    }

    fn report(&self, node: NodeId, tenant: &TenantName) -> QuotaReport {
        let both = Amounts::both;
        let (limit, used, limited) = (both(self.limit), both(self.used), both(self.limited));
        let tenants =
            vec![TenantReport { tenant: tenant.clone(), version: self.version, limit, used, limited }];
        QuotaReport { node, epoch: self.epoch, tenants }
    }
}

#[derive(Clone, Debug)]
enum Message {
    QuotaReport(QuotaReport),
    QuotaGrant(QuotaGrant),
}

#[derive(Debug)]
struct TestCluster {
    tenant: TenantName,
    ledger: Budgets,
    nodes: BTreeMap<NodeId, Node>,
    /// Forgotten nodes that have not met a grant since.
    outside: BTreeSet<NodeId>,
    /// Registrations as the store knows them.
    registered: BTreeMap<NodeId, Epoch>,
    network: Vec<Message>,
    epochs: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Work { node: u16, blocks: u64 },
    Demand { node: u16, bytes: u64 },
    QuotaReport { node: u16 },
    Deliver { message: usize },
    Double { message: usize },
    Lose { message: usize },
    Rebalance,
    Register { node: u16, learns: bool },
    Die { node: u16 },
    Restart { node: u16 },
    Forget { node: u16 },
    RestartLedger,
}

impl TestCluster {
    fn new(nodes: u16) -> TestCluster {
        let tenant: TenantName = "a".parse().expect("a name");
        let mut cluster = TestCluster {
            ledger: Budgets::new([]),
            nodes: BTreeMap::new(),
            outside: BTreeSet::new(),
            registered: BTreeMap::new(),
            network: Vec::new(),
            epochs: 0,
            tenant,
        };
        cluster.ledger.set_budget(&cluster.tenant, budget());
        for node in 0..nodes {
            let (epoch, alive) = (Epoch(0), true);
            let fresh = Node { epoch, version: 0, limit: 0, used: 0, demand: 0, limited: 0, alive };
            cluster.nodes.insert(NodeId(node), fresh);
            cluster.register(NodeId(node), true);
        }
        cluster
    }

    /// Registers a node with a new epoch; the reply may be lost.
    fn register(&mut self, id: NodeId, learns: bool) {
        self.epochs += 1;
        let epoch = Epoch(self.epochs);
        self.registered.insert(id, epoch);
        self.ledger.register(id, epoch);
        let node = self.nodes.get_mut(&id).expect("one of the nodes");
        if learns && node.alive {
            node.epoch = epoch;
        }
    }

    fn deliver(&mut self, message: Message) {
        match message {
            Message::QuotaReport(report) => {
                let grants = self.ledger.report(&report);
                self.network.extend(grants.into_iter().map(Message::QuotaGrant));
            }
            Message::QuotaGrant(grant) => {
                let node = self.nodes.get_mut(&grant.node).expect("one of the nodes");
                node.apply_grant(&grant);
            }
        }
        let excess = self.network.len().saturating_sub(NETWORK_MAX);
        self.network.drain(..excess);
    }

    fn take(&mut self, message: usize) -> Option<Message> {
        (!self.network.is_empty()).then(|| self.network.swap_remove(message % self.network.len()))
    }

    fn step(&mut self, step: Step) {
        let count = self.nodes.len() as u16;
        let id = |node: u16| NodeId(node % count);
        match step {
            Step::Work { node, blocks } => self.nodes.get_mut(&id(node)).expect("there").work(blocks),
            Step::Demand { node, bytes } => self.nodes.get_mut(&id(node)).expect("there").demand = bytes,
            Step::QuotaReport { node } => self.report(id(node)),
            Step::Deliver { message } => {
                if let Some(message) = self.take(message) {
                    self.deliver(message);
                }
            }
            Step::Double { message } => {
                if let Some(message) = self.take(message) {
                    self.network.push(message.clone());
                    self.deliver(message);
                }
            }
            Step::Lose { message } => drop(self.take(message)),
            Step::Rebalance => self.ledger.rebalance(),
            Step::Register { node, learns } => self.register(id(node), learns),
            Step::Die { node } => self.nodes.get_mut(&id(node)).expect("there").alive = false,
            Step::Restart { node } => self.restart(id(node)),
            Step::Forget { node } => self.forget(id(node)),
            Step::RestartLedger => self.restart_ledger(),
        }
        self.readmit();
        self.check();
    }

    fn report(&mut self, id: NodeId) {
        let node = &self.nodes[&id];
        if node.alive {
            self.network.push(Message::QuotaReport(node.report(id, &self.tenant)));
        }
    }

    /// Restarts the agent with the blocks on its devices; it allocates nothing before its next grant.
    fn restart(&mut self, id: NodeId) {
        let node = self.nodes.get_mut(&id).expect("one of the nodes");
        (node.alive, node.version, node.limit, node.limited) = (true, 0, node.used, 0);
        self.register(id, true);
    }

    fn forget(&mut self, id: NodeId) {
        self.ledger.forget(id);
        self.registered.remove(&id);
        self.outside.insert(id);
    }

    /// Restarts the ledger: all members lost their memory, know the nodes from the store, and require
    /// registrations.
    fn restart_ledger(&mut self) {
        self.ledger = Budgets::new(self.registered.iter().map(|(id, epoch)| (*id, *epoch)));
        self.ledger.set_budget(&self.tenant, budget());
        for id in self.registered.keys().copied().collect::<Vec<_>>() {
            self.register(id, true);
        }
    }

    /// Counts a forgotten node again once it is registered, is within a grant of that registration, and fits
    /// next to the bytes of the others. It had its bytes all the time, so this adds none.
    fn readmit(&mut self) {
        for id in self.outside.clone() {
            let node = &self.nodes[&id];
            let current = self.registered.get(&id) == Some(&node.epoch);
            let obeys = node.version >> 32 == node.epoch.0 && node.used <= node.limit;
            if current && obeys && self.inside() + node.held() <= BUDGET {
                self.outside.remove(&id);
            }
        }
    }

    fn inside(&self) -> u64 {
        let inside = self.nodes.iter().filter(|(id, _)| !self.outside.contains(id));
        inside.map(|(_, node)| node.held()).sum()
    }

    fn check(&self) {
        let held = self.inside();
        assert!(held <= BUDGET, "{held} of {BUDGET} bytes are in use: {self:?}");
    }

    /// Delivers all messages; all live nodes apply their grants.
    fn deliver_all(&mut self) {
        self.network.clear();
        for id in self.nodes.keys().copied().collect::<Vec<_>>() {
            if self.nodes[&id].alive {
                self.register(id, true);
            } else {
                self.forget(id);
            }
        }
        for _ in 0..200 {
            for id in self.nodes.keys().copied().collect::<Vec<_>>() {
                self.nodes.get_mut(&id).expect("there").work(BUDGET);
                self.report(id);
            }
            while !self.network.is_empty() {
                let message = self.network.remove(0);
                self.deliver(message);
            }
            self.ledger.rebalance();
            self.readmit();
            self.check();
        }
    }
}

fn steps() -> impl Strategy<Value = Step> {
    let (node, message) = (0u16..8, 0usize..NETWORK_MAX);
    prop_oneof![
        6 => (node.clone(), 1u64..2000).prop_map(|(node, blocks)| Step::Work { node, blocks }),
        2 => (node.clone(), 0u64..8000).prop_map(|(node, bytes)| Step::Demand { node, bytes }),
        6 => node.clone().prop_map(|node| Step::QuotaReport { node }),
        9 => message.clone().prop_map(|message| Step::Deliver { message }),
        1 => message.clone().prop_map(|message| Step::Double { message }),
        1 => message.prop_map(|message| Step::Lose { message }),
        5 => Just(Step::Rebalance),
        3 => (node.clone(), any::<bool>()).prop_map(|(node, learns)| Step::Register { node, learns }),
        1 => node.clone().prop_map(|node| Step::Die { node }),
        1 => node.clone().prop_map(|node| Step::Restart { node }),
        2 => node.prop_map(|node| Step::Forget { node }),
        1 => Just(Step::RestartLedger),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) })]

    #[test]
    fn nodes_stay_within_the_budget_despite_lost_duplicated_and_late_messages(
        nodes in 1u16..5, steps in prop::collection::vec(steps(), 0..500)
    ) {
        let mut cluster = TestCluster::new(nodes);
        for step in steps {
            cluster.step(step);
        }
        cluster.deliver_all();
        let living: Vec<&Node> = cluster.nodes.values().filter(|node| node.alive).collect();
        let demand: u64 = living.iter().map(|node| node.demand).sum();
        let used: u64 = living.iter().map(|node| node.used).sum();
        // Every node may deviate by changes that are too small to be made.
        let slack = BUDGET / 64 * living.len() as u64;
        let wanted = if living.is_empty() { 0 } else { demand.min(BUDGET) };
        prop_assert!(used + slack >= wanted, "{used} used, {wanted} wanted: {cluster:?}");
        prop_assert!(cluster.outside.iter().all(|id| !cluster.nodes[id].alive), "{cluster:?}");
    }
}
