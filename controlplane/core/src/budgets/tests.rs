//! Unit tests of the ledger.

use proptest::prelude::*;

use super::*;

fn name() -> TenantName {
    "a".parse().expect("a name")
}

fn limit(bytes: u64) -> Budget {
    Budget { reserved: Amounts::default(), limit: Amounts::both(bytes) }
}

fn report(node: u16, version: u64, limit: u64, used: u64) -> QuotaReport {
    let amounts = Amounts::both;
    let (limit, used, limited) = (amounts(limit), amounts(used), amounts(0));
    let tenants = vec![TenantReport { tenant: name(), version, limit, used, limited }];
    QuotaReport { node: NodeId(node), epoch: Epoch(1), tenants }
}

/// Two nodes, each of which has acknowledged its first grant.
fn two_nodes(budget: u64) -> (Budgets, Vec<QuotaGrant>) {
    let mut budgets = Budgets::new([]);
    budgets.set_budget(&name(), limit(budget));
    (1..3).for_each(|node| budgets.register(NodeId(node), Epoch(1)));
    budgets.rebalance();
    let grants: Vec<QuotaGrant> = (1..3).flat_map(|node| budgets.report(&report(node, 0, 0, 0))).collect();
    for grant in &grants {
        budgets.report(&report(grant.node.0, grant.version, grant.limit.dram, 0));
    }
    (budgets, grants)
}

#[test]
fn idle_nodes_share_a_budget_and_grants_repeat_until_acknowledged() {
    let (mut budgets, grants) = two_nodes(1000);
    assert_eq!(grants.iter().map(|grant| grant.limit).collect::<Vec<_>>(), [Amounts::both(500); 2]);
    assert!(budgets.report(&report(1, grants[0].version, 500, 0)).is_empty(), "acknowledged");
    budgets.register(NodeId(1), Epoch(2));
    let again = QuotaReport { epoch: Epoch(2), ..report(1, 0, 0, 0) };
    let repeated = budgets.report(&again);
    assert_eq!((repeated.len(), repeated[0].limit), (1, Amounts::both(500)));
    assert!(repeated[0].version > grants[0].version && repeated[0].epoch == Epoch(2));
    assert_eq!(budgets.report(&again), repeated, "repeats until acknowledged");
}

#[test]
fn grants_bytes_elsewhere_only_after_their_node_reports_lower_usage() {
    let (mut budgets, grants) = two_nodes(1000);
    for _ in 0..REPORTS_BEFORE_LOWERING {
        budgets.report(&report(1, grants[0].version, 500, 100));
    }
    let mut wanting = report(2, grants[1].version, 500, 500);
    wanting.tenants[0].limited = Amounts::both(400);
    budgets.report(&wanting);
    budgets.rebalance();
    let lower = budgets.report(&report(1, grants[0].version, 500, 100)).remove(0);
    assert_eq!(lower.limit, Amounts::both(100));
    assert!(budgets.report(&wanting).is_empty(), "no bytes are free yet");
    budgets.report(&report(1, lower.version, 100, 300));
    budgets.rebalance();
    assert_eq!(budgets.charged(&name()), Amounts::both(1000), "free bytes are granted");
    let raised = budgets.report(&wanting).remove(0);
    assert_eq!(raised.limit, Amounts::both(700));
}

#[test]
fn applies_small_reductions_of_a_budget_exactly() {
    let (mut budgets, grants) = two_nodes(1000);
    budgets.set_budget(&name(), limit(990));
    budgets.rebalance();
    let mut lowered = 0;
    for grant in &grants {
        let reported = report(grant.node.0, grant.version, grant.limit.dram, 0);
        lowered += budgets.report(&reported)[0].limit.dram;
    }
    assert_eq!(lowered, 990);
}

#[test]
fn demand_above_the_budget_decays_as_fast_as_demand_of_its_size() {
    let (mut budgets, grants) = two_nodes(1000);
    let mut known: Vec<QuotaReport> =
        grants.iter().map(|grant| report(grant.node.0, grant.version, grant.limit.dram, 0)).collect();
    known[1].tenants[0].limited = Amounts::both(1_000_000_000);
    for _ in 0..4 * REPORTS_BEFORE_LOWERING {
        for report in &mut known {
            if let Some(grant) = budgets.report(report).pop() {
                (report.tenants[0].version, report.tenants[0].limit) = (grant.version, grant.limit);
            }
        }
        budgets.rebalance();
    }
    let granted: Vec<u64> = budgets.granted(&name()).map(|(_, amounts)| amounts.dram).collect();
    let apart = granted[0].abs_diff(granted[1]);
    assert!(apart <= 2 * 1000 / MIN_CHANGE_FRACTION, "{granted:?} of 1000 without demand");
}

#[test]
fn a_silent_node_keeps_its_charge_until_it_is_forgotten() {
    let (mut budgets, grants) = two_nodes(1000);
    let mut wanting = report(2, grants[1].version, 500, 500);
    wanting.tenants[0].limited = Amounts::both(500);
    budgets.report(&wanting);
    budgets.rebalance();
    assert!(budgets.report(&wanting).is_empty());
    budgets.forget(NodeId(1));
    budgets.rebalance();
    assert_eq!(budgets.report(&wanting)[0].limit, Amounts::both(1000));
}

#[test]
fn a_new_ledger_raises_no_grant_before_all_nodes_have_reported() {
    let mut budgets = Budgets::new([(NodeId(1), Epoch(0)), (NodeId(2), Epoch(0))]);
    budgets.set_budget(&name(), limit(1000));
    (1..3).for_each(|node| budgets.register(NodeId(node), Epoch(1)));
    assert!(budgets.report(&report(1, 0, 0, 0)).is_empty());
    budgets.rebalance();
    assert_eq!(budgets.charged(&name()), Amounts::default(), "node 2 may hold the whole budget");
    assert!(budgets.report(&report(2, 0, 900, 900)).is_empty());
    budgets.rebalance();
    let granted: Vec<_> = budgets.granted(&name()).map(|(_, amounts)| amounts.dram).collect();
    assert_eq!(granted, [50, 950], "nodes keep their bytes");
}

#[test]
fn a_new_ledger_grants_bytes_again_only_after_they_were_released() {
    let mut budgets = Budgets::new([(NodeId(1), Epoch(5)), (NodeId(2), Epoch(5))]);
    budgets.set_budget(&name(), limit(660));
    (1..3).for_each(|node| budgets.register(NodeId(node), Epoch(5)));
    let of_before = version_base(Epoch(4)) + 7;
    let report_at =
        |node, limit, used| QuotaReport { epoch: Epoch(5), ..report(node, of_before, limit, used) };
    let (over, within) = (report_at(1, 480, 550), report_at(2, 180, 160));
    assert!(budgets.report(&over).is_empty() && budgets.report(&within).is_empty());
    budgets.rebalance();
    assert_eq!(budgets.report(&over)[0].limit, Amounts::both(480));
    let lowered = budgets.report(&within).remove(0);
    assert_eq!(lowered.limit, Amounts::both(160));
}

#[test]
fn distinguishes_grants_of_another_stores_ledger_with_the_same_version() {
    let mut budgets = Budgets::new([]);
    budgets.set_budget(&name(), limit(1000));
    let of_new_store = |report: QuotaReport| QuotaReport { epoch: Epoch((7 << VERSION_BITS) + 1), ..report };
    budgets.register(NodeId(1), Epoch((7 << VERSION_BITS) + 1));
    budgets.rebalance();
    let version = version_base(Epoch(1)) + 2;
    assert_eq!(budgets.report(&of_new_store(report(1, 0, 0, 0)))[0].version, version);
    let grant = budgets.report(&of_new_store(report(1, version, 5000, 3000))).remove(0);
    assert!(grant.version > version && grant.limit == Amounts::both(1000), "{grant:?}");
    assert!(budgets.report(&of_new_store(report(1, grant.version, 1000, 900))).is_empty(), "acknowledged");
    assert_eq!(budgets.charged(&name()), Amounts::both(1000));
}

#[test]
fn grants_include_a_part_of_the_reservation_and_follow_its_changes() {
    let (mut budgets, grants) = two_nodes(1000);
    assert!(grants.iter().all(|grant| grant.reserved == Amounts::default()));
    budgets.set_budget(&name(), Budget { reserved: Amounts::both(300), limit: Amounts::both(1000) });
    let grant = budgets.report(&report(1, grants[0].version, grants[0].limit.dram, 0)).remove(0);
    assert_eq!((grant.limit, grant.reserved), (Amounts::both(500), Amounts::both(150)));
    assert!(grant.version > grants[0].version);
}

#[test]
fn an_empty_budget_counts_as_acknowledged_only_after_a_report_in_each_registration() {
    let (mut budgets, grants) = two_nodes(1000);
    let followers = |budgets: &Budgets| budgets.followers(&name()).collect::<Vec<NodeId>>();
    assert_eq!(followers(&budgets), [NodeId(1), NodeId(2)]);
    budgets.set_budget(&name(), limit(0));
    budgets.rebalance();
    assert!(followers(&budgets).is_empty(), "no node has acknowledged it yet");
    let last = |node: u16| grants[usize::from(node) - 1].version;
    let grant = budgets.report(&report(1, last(1), 500, 300)).remove(0);
    assert_eq!(grant.limit, Amounts::default());
    assert!(budgets.report(&report(1, grant.version, 0, 300)).is_empty(), "acknowledged");
    assert_eq!(followers(&budgets), [NodeId(1)]);
    assert_eq!(budgets.used(&name()).next(), Some((NodeId(1), Amounts::both(300))), "not evicted yet");
    budgets.report(&report(1, grant.version, 0, 0));
    assert_eq!(budgets.used(&name()).next(), Some((NodeId(1), Amounts::default())));
    budgets.register(NodeId(1), Epoch(2));
    assert!(followers(&budgets).is_empty(), "no report in this registration yet");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_division_is_within_the_total_and_fair(
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

#[test]
fn node_that_reports_the_highest_version_gets_no_further_grant() {
    let mut budgets = Budgets::new([(NodeId(1), Epoch(1))]);
    budgets.set_budget(&name(), limit(1 << 30));
    for _ in 0..10 {
        let grants = budgets.report(&report(1, u64::MAX, 1 << 30, 5));
        assert!(grants.iter().all(|grant| grant.version == u64::MAX), "no version is newer");
        budgets.rebalance();
    }
}
