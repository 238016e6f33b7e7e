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
    }
}

fn exclusive(name: &str, made: i64, qos: QueueQos) -> Claimant {
    Claimant { qos, isolation: ExclusiveController, ..wants(name, made, 8) }
}

fn shares(of: &[(&str, u32)]) -> Shares {
    of.iter().map(|(name, pairs)| ((*name).to_owned(), *pairs)).collect()
}

fn has(claimant: Claimant, of: &[(&str, u32)]) -> Claimant {
    Claimant { state: ClaimState::Granted(shares(of)), ..claimant }
}

fn granted(of: &[&str]) -> Verdict {
    Verdict::Granted(of.iter().map(|serial| (*serial).to_owned()).collect())
}

fn preempted(by: &str) -> Verdict {
    Verdict::Preempted { by: by.to_owned() }
}

fn full(serial: &str, holders: &[(&str, u32)]) -> ControllerUsage {
    ControllerUsage { serial: serial.to_owned(), budget: 16, holders: shares(holders) }
}

fn short(of: Vec<ControllerUsage>) -> Verdict {
    Verdict::Waiting(WaitReason::NotEnoughFree(of))
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
    assert_eq!(decide(&lenders, &[wants("x", 1, 8)]), [granted(&["A", "B"])]);
    // A single controller with too few free pairs prevents the whole grant.
    let holder = has(wants("h", 1, 12), &[("B", 12)]);
    let waits = short(vec![full("B", &[("h", 12)])]);
    assert_eq!(decide(&lenders, &[holder, wants("x", 2, 8)]), [Verdict::Unchanged, waits]);
    assert_eq!(
        decide(&lenders, &[wants("x", 1, 17)]),
        [Verdict::Waiting(WaitReason::ExceedsController { most: 16 })]
    );
    let nowhere = Claimant { pool: "none".to_owned(), ..wants("x", 1, 1) };
    assert_eq!(decide(&lenders, &[nowhere]), [Verdict::Waiting(WaitReason::NoController)]);
    assert_eq!(decide(&[], &[exclusive("x", 1, Guaranteed)]), [Verdict::Waiting(WaitReason::NoController)]);
}

#[test]
fn serves_by_class_then_age_then_name_and_grants_the_rest_to_smaller_requests() {
    let lenders = [lender("A", 16)];
    let effort = |name: &str, made| Claimant { qos: BestEffort, ..wants(name, made, 12) };
    let all = [effort("old", 1), wants("b", 5, 12), wants("a", 5, 12), wants("small", 9, 4)];
    let taken = |by: &[(&str, u32)]| short(vec![full("A", by)]);
    let expected = [taken(&[("a", 12), ("small", 4)]), taken(&[("a", 12)]), granted(&["A"]), granted(&["A"])];
    assert_eq!(decide(&lenders, &all), expected);
    // The order of the list does not matter.
    let turned: Vec<Claimant> = all.iter().rev().cloned().collect();
    let mut decided = decide(&lenders, &turned);
    decided.reverse();
    assert_eq!(decided, expected);
}

#[test]
fn exclusive_controller_is_not_shared() {
    let all = [exclusive("own", 1, Burstable), wants("shared", 2, 8)];
    assert_eq!(decide(&two(), &all), [granted(&["A"]), granted(&["B"])]);
    // Controllers with holders are not exclusive, and burstable allocations preempt nothing.
    let shared = has(wants("shared", 1, 1), &[("A", 1), ("B", 1)]);
    let waits = short(vec![full("A", &[("shared", 1)]), full("B", &[("shared", 1)])]);
    let decided = decide(&two(), &[shared, exclusive("own", 2, Burstable)]);
    assert_eq!(decided, [Verdict::Unchanged, waits]);
    let owns = |serial: &str| has(exclusive(serial, 1, Guaranteed), &[(serial, 8)]);
    let waits = short(vec![full("A", &[("A", 8)]), full("B", &[("B", 8)])]);
    assert_eq!(decide(&two(), &[owns("A"), owns("B"), wants("x", 2, 1)])[2], waits);
    assert_eq!(decide(&two(), &[owns("A"), owns("B"), exclusive("x", 2, Guaranteed)])[2], waits);
    // Among several it gets the one with the smallest sufficient budget.
    let lenders = [lender("A", 32), lender("B", 8), lender("C", 4)];
    assert_eq!(decide(&lenders, &[exclusive("own", 1, BestEffort)]), [granted(&["B"])]);
}

#[test]
fn guaranteed_allocation_preempts_best_effort_then_burstable_but_never_guaranteed() {
    let effort =
        |name: &str, serial: &str| has(Claimant { qos: BestEffort, ..wants(name, 1, 4) }, &[(serial, 4)]);
    let burst = |name: &str, serial: &str| has(wants(name, 1, 4), &[(serial, 4)]);
    let asks = || exclusive("g", 9, Guaranteed);
    let coming = |of: ControllerUsage| Verdict::Waiting(WaitReason::Preempting(of));
    let decided = decide(&two(), &[burst("b", "A"), effort("e1", "B"), effort("e2", "B"), asks()]);
    let reserved = coming(full("B", &[("e1", 4), ("e2", 4)]));
    assert_eq!(decided, [Verdict::Unchanged, preempted("g"), preempted("g"), reserved]);
    let decided =
        decide(&two(), &[burst("b1", "A"), burst("b2", "A"), burst("b3", "B"), effort("e", "B"), asks()]);
    assert_eq!(decided[..4], [Verdict::Unchanged, Verdict::Unchanged, preempted("g"), preempted("g")]);
    // A request that does not fit even then preempts nothing.
    let many = Claimant { pairs: 17, ..asks() };
    let waits = Verdict::Waiting(WaitReason::ExceedsController { most: 16 });
    let decided = decide(&two(), &[effort("e", "A"), burst("b", "B"), many]);
    assert_eq!(decided, [Verdict::Unchanged, Verdict::Unchanged, waits]);
    // Two guaranteed allocations take two controllers; a third one finds none.
    let more = [exclusive("h", 10, Guaranteed), exclusive("i", 11, Guaranteed)];
    let all = [effort("e", "A"), burst("b", "B"), asks()].into_iter().chain(more).collect::<Vec<_>>();
    let decided = decide(&two(), &all);
    let reserved = |serial: &str, holder: &str| coming(full(serial, &[(holder, 4)]));
    let expected = [preempted("g"), preempted("h"), reserved("A", "e"), reserved("B", "b")];
    assert_eq!(decided[..4], expected);
    assert_eq!(decided[4], short(vec![full("A", &[("e", 4)]), full("B", &[("b", 4)])]));
    // It waits for a grant that already ends instead of preempting another one.
    let leaves = Claimant { state: ClaimState::Ending(shares(&[("B", 4)])), ..wants("leaves", 1, 4) };
    let decided = decide(&two(), &[leaves, effort("stays", "A"), asks()]);
    assert_eq!(decided, [Verdict::Unchanged, Verdict::Unchanged, reserved("B", "leaves")]);
}

#[test]
fn reserved_controller_is_not_shared_until_it_is_granted() {
    let all = |state: ClaimState| {
        let effort = Claimant { qos: BestEffort, state, ..wants("e", 1, 12) };
        [effort, exclusive("g", 3, Guaranteed), wants("late", 4, 16)]
    };
    let both = || shares(&[("A", 12), ("B", 12)]);
    let coming = Verdict::Waiting(WaitReason::Preempting(full("A", &[("e", 12)])));
    let waits = short(vec![full("B", &[("e", 12)])]);
    let expected = [preempted("g"), coming.clone(), waits.clone()];
    assert_eq!(decide(&two(), &all(ClaimState::Granted(both()))), expected);
    let expected = [Verdict::Unchanged, coming, waits];
    assert_eq!(decide(&two(), &all(ClaimState::Ending(both()))), expected);
    let expected = [Verdict::Unchanged, granted(&["A"]), granted(&["B"])];
    assert_eq!(decide(&two(), &all(ClaimState::Inactive)), expected);
}

#[test]
fn reduced_budget_does_not_shrink_existing_grants() {
    let lenders = [lender("A", 4)];
    let all = [has(wants("h", 1, 8), &[("A", 8), ("gone", 8)]), wants("x", 2, 1)];
    let waits = short(vec![ControllerUsage { budget: 4, ..full("A", &[("h", 8)]) }]);
    assert_eq!(decide(&lenders, &all), [Verdict::Unchanged, waits]);
}
