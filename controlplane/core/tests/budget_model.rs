//! Budgets against nodes that follow their orders, over a network that loses, doubles and reorders, with nodes that die,
//! restart, are forgotten and come back, and ledgers that begin anew.
//!
//! After every step: what nodes may hold that the ledger has not given up on is within the budget. In the end, when messages
//! arrive again, bytes are where they are wanted.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use reprise_controlplane_core::budgets::{Amounts, Budget, Budgets, Order, Report, TenantReport};
use reprise_policy::{Epoch, NodeId, TenantName};

const BUDGET: u64 = 6400;

/// Messages under way at the most; the oldest are lost first.
const NETWORK_MAX: usize = 24;

fn budget() -> Budget {
    Budget { reserved: Amounts::default(), limit: Amounts::both(BUDGET) }
}

/// An agent as far as budgets go. Both kinds of bytes do the same.
#[derive(Clone, Debug)]
struct Node {
    epoch: Epoch,
    version: u64,
    limit: u64,
    used: u64,
    /// What it would use if it might.
    demand: u64,
    limited: u64,
    alive: bool,
}

impl Node {
    fn held(&self) -> u64 {
        self.limit.max(self.used)
    }

    fn obey(&mut self, order: &Order) {
        if self.alive && order.epoch == self.epoch && order.version > self.version {
            (self.version, self.limit) = (order.version, order.limit.dram);
        }
    }

    /// Uses more, within its limit, or evicts some of what is beyond it.
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

    fn report(&self, node: NodeId, tenant: &TenantName) -> Report {
        let both = Amounts::both;
        let (limit, used, limited) = (both(self.limit), both(self.used), both(self.limited));
        let tenants =
            vec![TenantReport { tenant: tenant.clone(), version: self.version, limit, used, limited }];
        Report { node, epoch: self.epoch, tenants }
    }
}

#[derive(Clone, Debug)]
enum Message {
    Report(Report),
    Order(Order),
}

#[derive(Debug)]
struct World {
    tenant: TenantName,
    ledger: Budgets,
    nodes: BTreeMap<NodeId, Node>,
    /// Nodes that the ledger has given up on and that have not met an order since.
    outside: BTreeSet<NodeId>,
    /// As the store knows them.
    registered: BTreeMap<NodeId, Epoch>,
    network: Vec<Message>,
    epochs: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Work { node: u16, blocks: u64 },
    Demand { node: u16, bytes: u64 },
    Report { node: u16 },
    Deliver { message: usize },
    Double { message: usize },
    Lose { message: usize },
    Rebalance,
    Register { node: u16, learns: bool },
    Die { node: u16 },
    Restart { node: u16 },
    Forget { node: u16 },
    LedgerBeginsAnew,
}

impl World {
    fn new(nodes: u16) -> World {
        let tenant: TenantName = "a".parse().expect("a name");
        let mut world = World {
            ledger: Budgets::new([]),
            nodes: BTreeMap::new(),
            outside: BTreeSet::new(),
            registered: BTreeMap::new(),
            network: Vec::new(),
            epochs: 0,
            tenant,
        };
        world.ledger.set_budget(&world.tenant, budget());
        for node in 0..nodes {
            let (epoch, alive) = (Epoch(0), true);
            let fresh = Node { epoch, version: 0, limit: 0, used: 0, demand: 0, limited: 0, alive };
            world.nodes.insert(NodeId(node), fresh);
            world.register(NodeId(node), true);
        }
        world
    }

    /// The control plane gives a node a new epoch; the answer may be lost.
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
            Message::Report(report) => {
                let orders = self.ledger.report(&report);
                self.network.extend(orders.into_iter().map(Message::Order));
            }
            Message::Order(order) => {
                let node = self.nodes.get_mut(&order.node).expect("one of the nodes");
                node.obey(&order);
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
            Step::Report { node } => self.report(id(node)),
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
            Step::LedgerBeginsAnew => self.begin_anew(),
        }
        self.let_in();
        self.check();
    }

    fn report(&mut self, id: NodeId) {
        let node = &self.nodes[&id];
        if node.alive {
            self.network.push(Message::Report(node.report(id, &self.tenant)));
        }
    }

    /// The process begins anew, with what is on its devices; it takes nothing more before it knows an order.
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

    /// All members have lost their memory: nodes are known from the store, and told to register again.
    fn begin_anew(&mut self) {
        self.ledger = Budgets::new(self.registered.iter().map(|(id, epoch)| (*id, *epoch)));
        self.ledger.set_budget(&self.tenant, budget());
        for id in self.registered.keys().copied().collect::<Vec<_>>() {
            self.register(id, true);
        }
    }

    /// Who was outside counts again when it is registered, holds no more than an order of that registration, and there is room
    /// for that beside what the others still hold: it has had its bytes all the time, so being let in adds none.
    fn let_in(&mut self) {
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
        assert!(held <= BUDGET, "{held} of {BUDGET} are held: {self:?}");
    }

    /// Everything arrives, and everybody who lives does as it is told.
    fn settle(&mut self) {
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
            self.let_in();
            self.check();
        }
    }
}

fn steps() -> impl Strategy<Value = Step> {
    let (node, message) = (0u16..8, 0usize..NETWORK_MAX);
    prop_oneof![
        6 => (node.clone(), 1u64..2000).prop_map(|(node, blocks)| Step::Work { node, blocks }),
        2 => (node.clone(), 0u64..8000).prop_map(|(node, bytes)| Step::Demand { node, bytes }),
        6 => node.clone().prop_map(|node| Step::Report { node }),
        9 => message.clone().prop_map(|message| Step::Deliver { message }),
        1 => message.clone().prop_map(|message| Step::Double { message }),
        1 => message.prop_map(|message| Step::Lose { message }),
        5 => Just(Step::Rebalance),
        3 => (node.clone(), any::<bool>()).prop_map(|(node, learns)| Step::Register { node, learns }),
        1 => node.clone().prop_map(|node| Step::Die { node }),
        1 => node.clone().prop_map(|node| Step::Restart { node }),
        2 => node.prop_map(|node| Step::Forget { node }),
        1 => Just(Step::LedgerBeginsAnew),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) })]

    #[test]
    fn whatever_is_lost_doubled_or_late_nodes_hold_no_more_than_the_budget(
        nodes in 1u16..5, steps in prop::collection::vec(steps(), 0..500)
    ) {
        let mut world = World::new(nodes);
        for step in steps {
            world.step(step);
        }
        world.settle();
        let living: Vec<&Node> = world.nodes.values().filter(|node| node.alive).collect();
        let demand: u64 = living.iter().map(|node| node.demand).sum();
        let used: u64 = living.iter().map(|node| node.used).sum();
        // A change that is too small to be worth it is left undone on every node.
        let slack = BUDGET / 64 * living.len() as u64;
        let wanted = if living.is_empty() { 0 } else { demand.min(BUDGET) };
        prop_assert!(used + slack >= wanted, "{used} used, {wanted} wanted: {world:?}");
        prop_assert!(world.outside.iter().all(|id| !world.nodes[id].alive), "{world:?}");
    }
}
