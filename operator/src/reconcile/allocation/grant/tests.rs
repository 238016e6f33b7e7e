//! Tables of controllers and allocations.

use reprise_crds::queues::QueueIsolation::{ExclusiveController, TrustedShared};
use reprise_crds::queues::QueueQos::{BestEffort, Burstable, Guaranteed};

use super::*;

fn lender(serial: &str, budget: u32) -> LendableController {
    LendableController { serial: serial.to_owned(), pool: "p".to_owned(), budget }
}

/// Two controllers with a budget of 16 queue pairs each.
fn two() -> Vec<LendableController> {
    vec![lender("A", 16), lender("B", 16)]
}

/// A pending shared request; a greater `made` is a later creation.
fn wants(name: &str, made: i64, pairs: u32) -> Claimant {
    Claimant {
        name: name.to_owned(),
        made,
        pool: "p".to_owned(),
        pairs,
        qos: Burstable,
        isolation: TrustedShared,
        state: ClaimState::Pending,
        shares: Shares::new(),
    }
}

fn exclusive(name: &str, made: i64, qos: QueueQos) -> Claimant {
    Claimant { qos, isolation: ExclusiveController, ..wants(name, made, 8) }
}

fn has(claimant: Claimant, of: &[(&str, u32)]) -> Claimant {
    let shares = of.iter().map(|(serial, pairs)| ((*serial).to_owned(), *pairs)).collect();
    Claimant { state: ClaimState::Granted, shares, ..claimant }
}

/// Checks the verdicts: the beginning of their names and values, or of the message of an allocation that waits.
fn check(lenders: &[LendableController], claimants: &[Claimant], expected: &[&str]) {
    let text = |verdict: Verdict| match verdict {
        Verdict::Unchanged => "unchanged".to_owned(),
        Verdict::Granted(of) => format!("granted {}.", of.join(" ")),
        Verdict::Preempted { by } => format!("preempted by {by}."),
        Verdict::Waiting(why) => why.message,
    };
    let texts: Vec<String> = decide(lenders, claimants).into_iter().map(text).collect();
    assert_eq!(texts.len(), expected.len());
    for (text, expected) in texts.iter().zip(expected) {
        assert!(text.starts_with(expected), "'{expected}' is missing in {texts:#?}");
    }
}

#[test]
fn budget_is_a_percentage_of_the_queue_pairs_rounded_down() {
    for (pairs, percent, lent) in
        [(128, 50, 64), (127, 50, 63), (1, 50, 0), (10, 0, 0), (u32::MAX, 75, 3_221_225_471)]
    {
        assert_eq!(budget(pairs, Percent(percent)), lent, "{percent} of {pairs}");
    }
}

#[test]
fn shared_allocation_gets_pairs_of_every_controller_of_its_pool_or_waits() {
    let mut lenders = two();
    lenders.push(LendableController { pool: "other".to_owned(), ..lender("C", 16) });
    check(&lenders, &[wants("x", 1, 8)], &["granted A B."]);
    // A single controller with too few free pairs prevents the whole grant.
    let holder = has(wants("h", 1, 12), &[("B", 12)]);
    let waits = "too few are free: B (budget 16; held by h 12). ";
    check(&lenders, &[holder, wants("x", 2, 8)], &["unchanged", waits]);
    check(&lenders, &[wants("x", 1, 17)], &["at most 16 can be granted per controller"]);
    let nowhere = Claimant { pool: "none".to_owned(), ..wants("x", 1, 1) };
    check(&lenders, &[nowhere], &["the node has no controller"]);
    check(&[], &[exclusive("x", 1, Guaranteed)], &["the node has no controller"]);
}

#[test]
fn serves_by_class_then_age_then_name_and_grants_the_rest_to_smaller_requests() {
    let effort = |name: &str, made| Claimant { qos: BestEffort, ..wants(name, made, 12) };
    let mut all = [effort("old", 1), wants("b", 5, 12), wants("a", 5, 12), wants("small", 9, 4)];
    let mut expected = [
        "too few are free: A (budget 16; held by a 12, small 4). ",
        "too few are free: A (budget 16; held by a 12). ",
        "granted A.",
        "granted A.",
    ];
    check(&[lender("A", 16)], &all, &expected);
    // The order of the list does not matter.
    all.reverse();
    expected.reverse();
    check(&[lender("A", 16)], &all, &expected);
}

#[test]
fn exclusive_controller_is_not_shared() {
    let all = [exclusive("own", 1, Burstable), wants("shared", 2, 8)];
    check(&two(), &all, &["granted A.", "granted B."]);
    // Controllers with holders are not exclusive, and burstable allocations preempt nothing.
    let shared = has(wants("shared", 1, 1), &[("A", 1), ("B", 1)]);
    let waits = "too few are free: A (budget 16; held by shared 1), B (budget 16; held by shared 1). ";
    check(&two(), &[shared, exclusive("own", 2, Burstable)], &["unchanged", waits]);
    let owns = |serial: &str| has(exclusive(serial, 1, Guaranteed), &[(serial, 8)]);
    let expected = ["unchanged", "unchanged", "too few are free: A (budget 16; held by A 8), B "];
    check(&two(), &[owns("A"), owns("B"), wants("x", 2, 1)], &expected);
    check(&two(), &[owns("A"), owns("B"), exclusive("x", 2, Guaranteed)], &expected);
    // Among several it gets the one with the smallest sufficient budget.
    let lenders = [lender("A", 32), lender("B", 8), lender("C", 4)];
    check(&lenders, &[exclusive("own", 1, BestEffort)], &["granted B."]);
}

#[test]
fn guaranteed_allocation_preempts_best_effort_then_burstable_but_never_guaranteed() {
    let effort =
        |name: &str, serial: &str| has(Claimant { qos: BestEffort, ..wants(name, 1, 4) }, &[(serial, 4)]);
    let burst = |name: &str, serial: &str| has(wants(name, 1, 4), &[(serial, 4)]);
    let asks = |name: &str, made| exclusive(name, made, Guaranteed);
    let all = [burst("b", "A"), effort("e1", "B"), effort("e2", "B"), asks("g", 9)];
    let reserved = "B (budget 16; held by e1 4, e2 4) is reserved";
    check(&two(), &all, &["unchanged", "preempted by g.", "preempted by g.", reserved]);
    let all = [burst("b1", "A"), burst("b2", "A"), burst("b3", "B"), effort("e", "B"), asks("g", 9)];
    let expected = ["unchanged", "unchanged", "preempted by g.", "preempted by g.", "B (budget 16; "];
    check(&two(), &all, &expected);
    // A request that does not fit even then preempts nothing.
    let many = Claimant { pairs: 17, ..asks("g", 9) };
    let all = [effort("e", "A"), burst("b", "B"), many];
    check(&two(), &all, &["unchanged", "unchanged", "at most 16 can be granted"]);
    // Two guaranteed allocations take two controllers; a third one finds none.
    let all = [effort("e", "A"), burst("b", "B"), asks("g", 9), asks("h", 10), asks("i", 11)];
    let expected = [
        "preempted by g.",
        "preempted by h.",
        "A (budget 16; held by e 4) is reserved",
        "B (budget 16; held by b 4) is reserved",
        "too few are free: A (budget 16; held by e 4), B (budget 16; held by b 4). ",
    ];
    check(&two(), &all, &expected);
    // It waits for a grant that already ends instead of preempting another one.
    let leaves = Claimant { state: ClaimState::Ending, ..burst("leaves", "B") };
    let expected = ["unchanged", "unchanged", "B (budget 16; held by leaves 4) is reserved"];
    check(&two(), &[leaves, effort("stays", "A"), asks("g", 9)], &expected);
}

#[test]
fn reserved_controller_is_not_shared_until_it_is_granted() {
    let reserved = "A (budget 16; held by e 12) is reserved";
    let waits = "too few are free: B (budget 16; held by e 12). ";
    for (state, expected) in [
        (ClaimState::Granted, ["preempted by g.", reserved, waits]),
        (ClaimState::Ending, ["unchanged", reserved, waits]),
        (ClaimState::Inactive, ["unchanged", "granted A.", "granted B."]),
    ] {
        let mut effort = has(Claimant { qos: BestEffort, ..wants("e", 1, 12) }, &[("A", 12), ("B", 12)]);
        effort.state = state;
        effort.shares.retain(|_| state != ClaimState::Inactive);
        check(&two(), &[effort, exclusive("g", 3, Guaranteed), wants("late", 4, 16)], &expected);
    }
}

#[test]
fn reduced_budget_does_not_shrink_existing_grants() {
    let holder = has(wants("h", 1, 8), &[("A", 8), ("gone", 8)]);
    let waits = "too few are free: A (budget 4; held by h 8). ";
    check(&[lender("A", 4)], &[holder, wants("x", 2, 1)], &["unchanged", waits]);
}
