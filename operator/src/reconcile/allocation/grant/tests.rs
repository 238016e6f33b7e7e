//! Tables of controllers and allocations, and random ones that are checked for invariants.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_crds::queues::QueueIsolation::{ExclusiveController, TrustedShared};
use reprise_crds::queues::QueueQos::{BestEffort, Burstable, Guaranteed};

use super::*;

/// Random nodes, and events on each of them.
const NODES: u64 = 200;
const EVENTS: usize = 80;

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

fn shares(of: &[(&str, u32)]) -> Vec<Share> {
    of.iter().map(|(serial, pairs)| Share { serial: (*serial).to_owned(), pairs: *pairs }).collect()
}

fn has(claimant: Claimant, of: &[(&str, u32)], queues: QueueState) -> Claimant {
    Claimant { state: ClaimState::Granted { shares: shares(of), queues }, ..claimant }
}

fn granted(of: &[(&str, u32)]) -> Verdict {
    Verdict::Granted(shares(of))
}

fn preempted(by: &str) -> Verdict {
    Verdict::Preempted { by: by.to_owned() }
}

fn full(serial: &str, holders: &[(&str, u32)]) -> ControllerUsage {
    let holders = holders.iter().map(|(name, pairs)| ((*name).to_owned(), *pairs)).collect();
    ControllerUsage { serial: serial.to_owned(), budget: 16, holders }
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
    let both = [("A", 8), ("B", 8)];
    assert_eq!(decide(&lenders, &[wants("x", 1, 8)]), [granted(&both)]);
    // A single controller with too few free pairs prevents the whole grant.
    let holder = has(wants("h", 1, 12), &[("B", 12)], QueueState::None);
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
    let taken = || short(vec![full("A", &[("a", 12), ("small", 4)])]);
    let expected = [taken(), taken(), granted(&[("A", 12)]), granted(&[("A", 4)])];
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
    assert_eq!(decide(&two(), &all), [granted(&[("A", 8)]), granted(&[("B", 8)])]);
    // Controllers with holders are not exclusive, and burstable allocations preempt nothing.
    let shared = has(wants("shared", 1, 1), &[("A", 1), ("B", 1)], QueueState::None);
    let waits = short(vec![full("A", &[("shared", 1)]), full("B", &[("shared", 1)])]);
    let decided = decide(&two(), &[shared, exclusive("own", 2, Burstable)]);
    assert_eq!(decided, [Verdict::Unchanged, waits]);
    let owns = |serial: &str| has(exclusive(serial, 1, Guaranteed), &[(serial, 8)], QueueState::InUse);
    let waits = short(vec![full("A", &[("A", 8)]), full("B", &[("B", 8)])]);
    assert_eq!(decide(&two(), &[owns("A"), owns("B"), wants("x", 2, 1)])[2], waits);
    assert_eq!(decide(&two(), &[owns("A"), owns("B"), exclusive("x", 2, Guaranteed)])[2], waits);
    // Among several it gets the one with the smallest sufficient budget.
    let lenders = [lender("A", 32), lender("B", 8), lender("C", 4)];
    assert_eq!(decide(&lenders, &[exclusive("own", 1, BestEffort)]), [granted(&[("B", 8)])]);
}

#[test]
fn guaranteed_allocation_preempts_best_effort_then_burstable_but_never_guaranteed() {
    let effort = |name: &str, serial: &str| {
        has(Claimant { qos: BestEffort, ..wants(name, 1, 4) }, &[(serial, 4)], QueueState::None)
    };
    let burst = |name: &str, serial: &str| has(wants(name, 1, 4), &[(serial, 4)], QueueState::None);
    let asks = || exclusive("g", 9, Guaranteed);
    let all = [burst("b", "A"), effort("e1", "B"), effort("e2", "B"), asks()];
    let expected = [Verdict::Unchanged, preempted("g"), preempted("g"), granted(&[("B", 8)])];
    assert_eq!(decide(&two(), &all), expected);
    let all = [burst("b1", "A"), burst("b2", "A"), burst("b3", "B"), effort("e", "B"), asks()];
    let expected =
        [Verdict::Unchanged, Verdict::Unchanged, preempted("g"), preempted("g"), granted(&[("B", 8)])];
    assert_eq!(decide(&two(), &all), expected);
    // A request that does not fit even then preempts nothing.
    let many = Claimant { pairs: 17, ..asks() };
    let waits = Verdict::Waiting(WaitReason::ExceedsController { most: 16 });
    assert_eq!(
        decide(&two(), &[effort("e", "A"), burst("b", "B"), many]),
        [Verdict::Unchanged, Verdict::Unchanged, waits]
    );
    // Two guaranteed allocations take two controllers; a third one finds none.
    let all = [
        effort("e", "A"),
        burst("b", "B"),
        asks(),
        exclusive("h", 10, Guaranteed),
        exclusive("i", 11, Guaranteed),
    ];
    let decided = decide(&two(), &all);
    assert_eq!(decided[..4], [preempted("g"), preempted("h"), granted(&[("A", 8)]), granted(&[("B", 8)])]);
    assert_eq!(decided[4], short(vec![full("A", &[("g", 8)]), full("B", &[("h", 8)])]));
}

#[test]
fn preempts_whole_grants_and_grants_the_other_controllers_immediately() {
    let effort = Claimant { qos: BestEffort, ..wants("e", 1, 12) };
    let both = has(effort, &[("A", 12), ("B", 12)], QueueState::None);
    let decided = decide(&two(), &[both, exclusive("g", 3, Guaranteed), wants("late", 4, 16)]);
    assert_eq!(decided, [preempted("g"), granted(&[("A", 8)]), granted(&[("B", 16)])]);
}

#[test]
fn controller_with_queues_stays_reserved_until_they_are_released() {
    let effort = Claimant { qos: BestEffort, ..wants("e", 1, 4) };
    let all = |state: ClaimState| {
        [Claimant { state, ..effort.clone() }, exclusive("g", 3, Guaranteed), wants("late", 4, 4)]
    };
    let lenders = [lender("A", 16)];
    let coming = Verdict::Waiting(WaitReason::Preempting(full("A", &[("e", 4)])));
    let waits = short(vec![full("A", &[("e", 4)])]);
    let active = ClaimState::Granted { shares: shares(&[("A", 4)]), queues: QueueState::InUse };
    assert_eq!(decide(&lenders, &all(active)), [preempted("g"), coming.clone(), waits.clone()]);
    let ends = ClaimState::Ending(shares(&[("A", 4)]));
    assert_eq!(decide(&lenders, &all(ends)), [Verdict::Unchanged, coming.clone(), waits]);
    let waits = short(vec![full("A", &[("g", 8)])]);
    assert_eq!(
        decide(&lenders, &all(ClaimState::Inactive)),
        [Verdict::Unchanged, granted(&[("A", 8)]), waits]
    );
    // It waits for a grant that already ends instead of preempting another one.
    let leaves = Claimant { state: ClaimState::Ending(shares(&[("B", 4)])), ..wants("leaves", 1, 4) };
    let stays = has(Claimant { qos: BestEffort, ..wants("stays", 1, 4) }, &[("A", 4)], QueueState::None);
    let decided = decide(&two(), &[leaves, stays, exclusive("g", 2, Guaranteed)]);
    let coming = Verdict::Waiting(WaitReason::Preempting(full("B", &[("leaves", 4)])));
    assert_eq!(decided, [Verdict::Unchanged, Verdict::Unchanged, coming]);
}

#[test]
fn reduced_budget_does_not_shrink_existing_grants() {
    let lenders = [lender("A", 4)];
    let all = [has(wants("h", 1, 8), &[("A", 8), ("gone", 8)], QueueState::InUse), wants("x", 2, 1)];
    let waits = short(vec![ControllerUsage { budget: 4, ..full("A", &[("h", 8)]) }]);
    assert_eq!(decide(&lenders, &all), [Verdict::Unchanged, waits]);
}

/// For each controller: granted queue pairs, holders, and exclusive holders.
fn held(claimants: &[Claimant]) -> BTreeMap<String, (u32, usize, usize)> {
    let mut held: BTreeMap<String, (u32, usize, usize)> = BTreeMap::new();
    for claimant in claimants {
        for share in claimant.shares() {
            let (pairs, holders, exclusive) = held.entry(share.serial.clone()).or_default();
            *pairs += share.pairs;
            *holders += 1;
            *exclusive += usize::from(claimant.isolation == ExclusiveController);
        }
    }
    held
}

/// Whether a request would fit, counted independently of the decision.
fn fits(lenders: &[LendableController], claimants: &[Claimant], wanted: &Claimant) -> bool {
    let held = held(claimants);
    let of = |serial: &str| held.get(serial).copied().unwrap_or_default();
    let own: Vec<&LendableController> = lenders.iter().filter(|lender| lender.pool == wanted.pool).collect();
    match wanted.isolation {
        ExclusiveController => {
            own.iter().any(|lender| of(&lender.serial).1 == 0 && lender.budget >= wanted.pairs)
        }
        TrustedShared => {
            let mut open = own.iter().filter(|lender| of(&lender.serial).2 == 0).peekable();
            open.peek().is_some() && open.all(|lender| of(&lender.serial).0 + wanted.pairs <= lender.budget)
        }
    }
}

fn random_claimant(random: &mut StdRng, number: usize) -> Claimant {
    let isolation = if random.random_bool(0.3) { ExclusiveController } else { TrustedShared };
    let qos = match (random.random_range(0..3), isolation) {
        (0, ExclusiveController) => Guaranteed,
        (1, _) => BestEffort,
        _ => Burstable,
    };
    let pool = if random.random_bool(0.8) { "p" } else { "q" };
    Claimant {
        qos,
        isolation,
        pool: pool.to_owned(),
        ..wants(&format!("n/{number}"), i64::from(random.random_range(0..5_u8)), random.random_range(1..20))
    }
}

/// Random changes by agents and users between two decisions.
fn disturb(random: &mut StdRng, claimants: &mut Vec<Claimant>, number: usize) {
    if claimants.len() < 12 && random.random_bool(0.6) {
        claimants.push(random_claimant(random, number));
    }
    if claimants.is_empty() {
        return;
    }
    let index = random.random_range(0..claimants.len());
    let next = match claimants[index].state.clone() {
        ClaimState::Granted { shares, queues: QueueState::None } if random.random_bool(0.5) => {
            ClaimState::Granted { shares, queues: QueueState::InUse }
        }
        ClaimState::Granted { queues: QueueState::None, .. } => ClaimState::Inactive,
        ClaimState::Granted { shares, queues: QueueState::InUse } => ClaimState::Ending(shares),
        ClaimState::Ending(_) | ClaimState::Inactive => {
            claimants.remove(index);
            return;
        }
        ClaimState::Pending if random.random_bool(0.2) => ClaimState::Inactive,
        ClaimState::Pending => ClaimState::Pending,
    };
    claimants[index].state = next;
}

/// Applies the verdicts to the claimants.
fn follow(claimants: &mut [Claimant], verdicts: &[Verdict]) {
    for (claimant, verdict) in claimants.iter_mut().zip(verdicts) {
        match (verdict, claimant.state.clone()) {
            (Verdict::Granted(shares), has) => {
                assert_eq!(has, ClaimState::Pending, "only pending requests are granted");
                assert!(
                    shares.iter().all(|share| share.pairs == claimant.pairs),
                    "the whole request is granted"
                );
                claimant.state = ClaimState::Granted { shares: shares.clone(), queues: QueueState::None };
            }
            (Verdict::Preempted { .. }, ClaimState::Granted { shares, queues }) => {
                assert_ne!(claimant.qos, Guaranteed);
                claimant.state = if queues == QueueState::InUse {
                    ClaimState::Ending(shares)
                } else {
                    ClaimState::Inactive
                };
            }
            (Verdict::Preempted { .. }, has) => panic!("{has:?} cannot be preempted"),
            (Verdict::Waiting(_), has) => assert_eq!(has, ClaimState::Pending),
            (Verdict::Unchanged, has) => {
                assert_ne!(has, ClaimState::Pending, "every pending request gets a verdict");
            }
        }
    }
}

#[test]
fn random_events_never_exceed_budgets_and_every_fitting_request_is_granted() {
    let (mut grants, mut taken, mut coming) = (0, 0, 0);
    let first =
        std::env::var("REPRISE_FIRST_SEED").map_or(0, |seed| seed.parse().expect("a seed is a number"));
    for seed in first..first + NODES {
        let mut random = StdRng::seed_from_u64(seed);
        let lenders: Vec<LendableController> = (0..random.random_range(1..5))
            .map(|index| {
                let pool = if random.random_bool(0.8) { "p" } else { "q" };
                LendableController {
                    pool: pool.to_owned(),
                    ..lender(&format!("S{index}"), random.random_range(0..32))
                }
            })
            .collect();
        let mut claimants = Vec::new();
        for event in 0..EVENTS {
            disturb(&mut random, &mut claimants, event);
            let verdicts = decide(&lenders, &claimants);
            let before = claimants.clone();
            follow(&mut claimants, &verdicts);
            let context = || format!("seed {seed}, event {event}: {lenders:?} {before:?} {verdicts:?}");
            for (serial, (pairs, holders, exclusive)) in held(&claimants) {
                let lender = lenders.iter().find(|lender| lender.serial == serial).expect("a controller");
                assert!(pairs <= lender.budget, "{serial} exceeds its budget; {}", context());
                assert!(exclusive == 0 || holders == 1, "{serial} is not exclusive; {}", context());
            }
            for (claimant, was) in claimants.iter().zip(&before) {
                if let (ClaimState::Granted { shares: now, .. }, ClaimState::Granted { shares: then, .. }) =
                    (&claimant.state, &was.state)
                {
                    assert_eq!(now, then, "{} has changed; {}", claimant.name, context());
                }
            }
            let waits_for_queues =
                verdicts.iter().any(|verdict| matches!(verdict, Verdict::Waiting(WaitReason::Preempting(_))));
            for claimant in claimants.iter().filter(|claimant| claimant.state == ClaimState::Pending) {
                // A reserved controller is granted to no other allocation.
                let is_left = !waits_for_queues && fits(&lenders, &claimants, claimant);
                assert!(!is_left, "{} would fit; {}", claimant.name, context());
            }
            let again = decide(&lenders, &claimants);
            assert!(
                again.iter().all(|verdict| matches!(verdict, Verdict::Unchanged | Verdict::Waiting(_))),
                "a second decision changes nothing: {again:?}; {}",
                context()
            );
            grants += verdicts.iter().filter(|verdict| matches!(verdict, Verdict::Granted(_))).count();
            taken += verdicts.iter().filter(|verdict| matches!(verdict, Verdict::Preempted { .. })).count();
            coming += usize::from(waits_for_queues);
        }
    }
    assert!(
        grants > 300 && taken > 30 && coming > 30,
        "{grants} {taken} {coming}: too few events for a meaningful test"
    );
}
