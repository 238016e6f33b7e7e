//! What a ledger does, step by step.

use proptest::prelude::*;

use super::*;

fn name() -> TenantName {
    "a".parse().expect("a name")
}

fn limit(bytes: u64) -> Budget {
    Budget { reserved: Amounts::default(), limit: Amounts::both(bytes) }
}

fn report(node: u16, version: u64, limit: u64, used: u64) -> Report {
    let amounts = Amounts::both;
    let (limit, used, limited) = (amounts(limit), amounts(used), amounts(0));
    let tenants = vec![TenantReport { tenant: name(), version, limit, used, limited }];
    Report { node: NodeId(node), epoch: Epoch(1), tenants }
}

/// Two nodes, each of which knows its first order.
fn two_nodes(budget: u64) -> (Budgets, Vec<Order>) {
    let mut budgets = Budgets::new([]);
    budgets.set_budget(&name(), limit(budget));
    (1..3).for_each(|node| budgets.register(NodeId(node), Epoch(1)));
    budgets.rebalance();
    let orders: Vec<Order> = (1..3).flat_map(|node| budgets.report(&report(node, 0, 0, 0))).collect();
    for order in &orders {
        budgets.report(&report(order.node.0, order.version, order.limit.dram, 0));
    }
    (budgets, orders)
}

#[test]
fn idle_nodes_share_a_budget_and_orders_are_repeated_until_they_are_known() {
    let (mut budgets, orders) = two_nodes(1000);
    assert_eq!(orders.iter().map(|order| order.limit).collect::<Vec<_>>(), [Amounts::both(500); 2]);
    assert!(budgets.report(&report(1, orders[0].version, 500, 0)).is_empty(), "it is known");
    budgets.register(NodeId(1), Epoch(2));
    let again = Report { epoch: Epoch(2), ..report(1, 0, 0, 0) };
    let repeated = budgets.report(&again);
    assert_eq!((repeated.len(), repeated[0].limit), (1, Amounts::both(500)));
    assert!(repeated[0].version > orders[0].version && repeated[0].epoch == Epoch(2));
    assert_eq!(budgets.report(&again), repeated, "until it says that it knows");
}

#[test]
fn bytes_are_granted_elsewhere_only_when_their_node_says_that_it_holds_no_more() {
    let (mut budgets, orders) = two_nodes(1000);
    for _ in 0..REPORTS_BEFORE_LOWERING {
        budgets.report(&report(1, orders[0].version, 500, 100));
    }
    let mut wanting = report(2, orders[1].version, 500, 500);
    wanting.tenants[0].limited = Amounts::both(400);
    budgets.report(&wanting);
    budgets.rebalance();
    let lower = budgets.report(&report(1, orders[0].version, 500, 100)).remove(0);
    assert_eq!(lower.limit, Amounts::both(100));
    assert!(budgets.report(&wanting).is_empty(), "nothing is free yet");
    budgets.report(&report(1, lower.version, 100, 300));
    budgets.rebalance();
    assert_eq!(budgets.charged(&name()), Amounts::both(1000), "what is free by then is granted");
    let raised = budgets.report(&wanting).remove(0);
    assert_eq!(raised.limit, Amounts::both(700));
}

#[test]
fn a_budget_that_is_lowered_by_little_is_met_to_the_byte() {
    let (mut budgets, orders) = two_nodes(1000);
    budgets.set_budget(&name(), limit(990));
    budgets.rebalance();
    let mut lowered = 0;
    for order in &orders {
        let reported = report(order.node.0, order.version, order.limit.dram, 0);
        lowered += budgets.report(&reported)[0].limit.dram;
    }
    assert_eq!(lowered, 990);
}

#[test]
fn a_want_far_above_the_budget_is_forgotten_as_soon_as_one_of_its_size() {
    let (mut budgets, orders) = two_nodes(1000);
    let mut known: Vec<Report> =
        orders.iter().map(|order| report(order.node.0, order.version, order.limit.dram, 0)).collect();
    known[1].tenants[0].limited = Amounts::both(1_000_000_000);
    for _ in 0..4 * REPORTS_BEFORE_LOWERING {
        for report in &mut known {
            if let Some(order) = budgets.report(report).pop() {
                (report.tenants[0].version, report.tenants[0].limit) = (order.version, order.limit);
            }
        }
        budgets.rebalance();
    }
    let granted: Vec<u64> = budgets.granted(&name()).map(|(_, amounts)| amounts.dram).collect();
    let apart = granted[0].abs_diff(granted[1]);
    assert!(apart <= 2 * 1000 / SMALLEST_CHANGE, "{granted:?} of 1000 that nobody wants");
}

#[test]
fn a_silent_node_keeps_its_charge_until_it_is_forgotten() {
    let (mut budgets, orders) = two_nodes(1000);
    let mut wanting = report(2, orders[1].version, 500, 500);
    wanting.tenants[0].limited = Amounts::both(500);
    budgets.report(&wanting);
    budgets.rebalance();
    assert!(budgets.report(&wanting).is_empty());
    budgets.forget(NodeId(1));
    budgets.rebalance();
    assert_eq!(budgets.report(&wanting)[0].limit, Amounts::both(1000));
}

#[test]
fn a_new_ledger_raises_nothing_before_it_has_heard_of_everybody() {
    let mut budgets = Budgets::new([(NodeId(1), Epoch(0)), (NodeId(2), Epoch(0))]);
    budgets.set_budget(&name(), limit(1000));
    (1..3).for_each(|node| budgets.register(NodeId(node), Epoch(1)));
    assert!(budgets.report(&report(1, 0, 0, 0)).is_empty());
    budgets.rebalance();
    assert_eq!(budgets.charged(&name()), Amounts::default(), "node 2 may hold it all");
    assert!(budgets.report(&report(2, 0, 900, 900)).is_empty());
    budgets.rebalance();
    let granted: Vec<_> = budgets.granted(&name()).map(|(_, amounts)| amounts.dram).collect();
    assert_eq!(granted, [50, 950], "what is held is kept");
}

#[test]
fn a_new_ledger_gives_no_more_to_a_node_that_is_about_to_evict_before_another_has_let_go_of_it() {
    let mut budgets = Budgets::new([(NodeId(1), Epoch(5)), (NodeId(2), Epoch(5))]);
    budgets.set_budget(&name(), limit(660));
    (1..3).for_each(|node| budgets.register(NodeId(node), Epoch(5)));
    let of_before = version_base(Epoch(4)) + 7;
    let said = |node, limit, used| Report { epoch: Epoch(5), ..report(node, of_before, limit, used) };
    let (over, within) = (said(1, 480, 550), said(2, 180, 160));
    assert!(budgets.report(&over).is_empty() && budgets.report(&within).is_empty());
    budgets.rebalance();
    assert_eq!(budgets.report(&over)[0].limit, Amounts::both(480));
    let lowered = budgets.report(&within).remove(0);
    assert_eq!(lowered.limit, Amounts::both(160));
}

#[test]
fn an_order_of_another_stores_ledger_is_not_taken_for_one_of_the_same_version() {
    let mut budgets = Budgets::new([]);
    budgets.set_budget(&name(), limit(1000));
    let of_new_store = |report: Report| Report { epoch: Epoch((7 << VERSION_BITS) + 1), ..report };
    budgets.register(NodeId(1), Epoch((7 << VERSION_BITS) + 1));
    budgets.rebalance();
    let version = version_base(Epoch(1)) + 2;
    assert_eq!(budgets.report(&of_new_store(report(1, 0, 0, 0)))[0].version, version);
    let order = budgets.report(&of_new_store(report(1, version, 5000, 3000))).remove(0);
    assert!(order.version > version && order.limit == Amounts::both(1000), "{order:?}");
    assert!(budgets.report(&of_new_store(report(1, order.version, 1000, 900))).is_empty(), "it is known");
    assert_eq!(budgets.charged(&name()), Amounts::both(1000));
}

#[test]
fn nodes_are_sure_of_their_part_of_the_reservation_and_hear_when_it_changes() {
    let (mut budgets, orders) = two_nodes(1000);
    assert!(orders.iter().all(|order| order.reserved == Amounts::default()));
    budgets.set_budget(&name(), Budget { reserved: Amounts::both(300), limit: Amounts::both(1000) });
    let order = budgets.report(&report(1, orders[0].version, orders[0].limit.dram, 0)).remove(0);
    assert_eq!((order.limit, order.reserved), (Amounts::both(500), Amounts::both(150)));
    assert!(order.version > orders[0].version);
}

#[test]
fn a_budget_of_nothing_is_followed_when_a_node_has_said_so_and_again_by_each_registration() {
    let (mut budgets, orders) = two_nodes(1000);
    let followers = |budgets: &Budgets| budgets.followers(&name()).collect::<Vec<NodeId>>();
    assert_eq!(followers(&budgets), [NodeId(1), NodeId(2)]);
    budgets.set_budget(&name(), limit(0));
    budgets.rebalance();
    assert!(followers(&budgets).is_empty(), "nobody has heard of it yet");
    let last = |node: u16| orders[usize::from(node) - 1].version;
    let order = budgets.report(&report(1, last(1), 500, 300)).remove(0);
    assert_eq!(order.limit, Amounts::default());
    assert!(budgets.report(&report(1, order.version, 0, 300)).is_empty(), "it is known");
    assert_eq!(followers(&budgets), [NodeId(1)]);
    assert_eq!(budgets.used(&name()).next(), Some((NodeId(1), Amounts::both(300))), "it has not gone yet");
    budgets.report(&report(1, order.version, 0, 0));
    assert_eq!(budgets.used(&name()).next(), Some((NodeId(1), Amounts::default())));
    budgets.register(NodeId(1), Epoch(2));
    assert!(followers(&budgets).is_empty(), "what it has now it has not said");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_split_is_within_the_total_and_fair(
        total in 0u64..10_000, needs in prop::collection::vec(0u64..5_000, 1..8)
    ) {
        let parts = split(total, &needs);
        let sum: u64 = parts.iter().sum();
        prop_assert!(sum <= total && total - sum < needs.len() as u64, "{:?}", parts);
        for (one, need) in parts.iter().zip(&needs) {
            let richest = parts.iter().max().expect("some");
            prop_assert!(one >= need || *richest <= one + 1, "{:?} of {:?}", parts, needs);
        }
    }
}
