//! Tables of controllers and allocations, and random ones, of which some things always hold.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_crds::queues::QueueIsolation::{ExclusiveController, TrustedShared};
use reprise_crds::queues::QueueQos::{BestEffort, Burstable, Guaranteed};

use super::*;

/// Random worlds, and events in each.
const WORLDS: u64 = 200;
const EVENTS: usize = 80;

fn lender(serial: &str, budget: u32) -> Lender {
    Lender { serial: serial.to_owned(), pool: "p".to_owned(), budget }
}

/// Two controllers that lend 16 queue pairs each.
fn two() -> Vec<Lender> {
    vec![lender("A", 16), lender("B", 16)]
}

/// Wants so many pairs; the later one is made, the greater `made` is.
fn wants(name: &str, made: i64, pairs: u32) -> Claimant {
    Claimant {
        name: name.to_owned(),
        made,
        pool: "p".to_owned(),
        pairs,
        qos: Burstable,
        isolation: TrustedShared,
        has: Hold::Wants,
    }
}

fn exclusive(name: &str, made: i64, qos: QueueQos) -> Claimant {
    Claimant { qos, isolation: ExclusiveController, ..wants(name, made, 8) }
}

fn shares(of: &[(&str, u32)]) -> Vec<Share> {
    of.iter().map(|(serial, pairs)| Share { serial: (*serial).to_owned(), pairs: *pairs }).collect()
}

fn has(claimant: Claimant, of: &[(&str, u32)], queues: Queues) -> Claimant {
    Claimant { has: Hold::Stands { shares: shares(of), queues }, ..claimant }
}

fn granted(of: &[(&str, u32)]) -> Verdict {
    Verdict::Granted(shares(of))
}

fn taken_back(by: &str) -> Verdict {
    Verdict::TakenBack { by: by.to_owned() }
}

fn full(serial: &str, holders: &[(&str, u32)]) -> Full {
    let holders = holders.iter().map(|(name, pairs)| ((*name).to_owned(), *pairs)).collect();
    Full { serial: serial.to_owned(), budget: 16, holders }
}

fn short(of: Vec<Full>) -> Verdict {
    Verdict::Waits(Wait::Short(of))
}

#[test]
fn a_budget_is_a_share_of_the_queue_pairs_rounded_down() {
    for (pairs, percent, lent) in
        [(128, 50, 64), (127, 50, 63), (1, 50, 0), (10, 0, 0), (u32::MAX, 75, 3_221_225_471)]
    {
        assert_eq!(budget(pairs, Percent(percent)), lent, "{percent} of {pairs}");
    }
}

#[test]
fn a_shared_allocation_gets_pairs_of_every_controller_of_its_pool_or_waits() {
    let mut lenders = two();
    lenders.push(Lender { pool: "other".to_owned(), ..lender("C", 16) });
    let both = [("A", 8), ("B", 8)];
    assert_eq!(decide(&lenders, &[wants("x", 1, 8)]), [granted(&both)]);
    // A budget that one controller does not have keeps the whole from being granted.
    let holder = has(wants("h", 1, 12), &[("B", 12)], Queues::None);
    let waits = short(vec![full("B", &[("h", 12)])]);
    assert_eq!(decide(&lenders, &[holder, wants("x", 2, 8)]), [Verdict::Stays, waits]);
    assert_eq!(decide(&lenders, &[wants("x", 1, 17)]), [Verdict::Waits(Wait::TooMany { most: 16 })]);
    let nowhere = Claimant { pool: "none".to_owned(), ..wants("x", 1, 1) };
    assert_eq!(decide(&lenders, &[nowhere]), [Verdict::Waits(Wait::NoController)]);
    assert_eq!(decide(&[], &[exclusive("x", 1, Guaranteed)]), [Verdict::Waits(Wait::NoController)]);
}

#[test]
fn the_better_class_is_first_then_the_older_then_the_name_and_who_fits_gets_what_is_left() {
    let lenders = [lender("A", 16)];
    let effort = |name: &str, made| Claimant { qos: BestEffort, ..wants(name, made, 12) };
    let all = [effort("old", 1), wants("b", 5, 12), wants("a", 5, 12), wants("small", 9, 4)];
    let taken = || short(vec![full("A", &[("a", 12), ("small", 4)])]);
    let expected = [taken(), taken(), granted(&[("A", 12)]), granted(&[("A", 4)])];
    assert_eq!(decide(&lenders, &all), expected);
    // Whatever the order of the list is.
    let turned: Vec<Claimant> = all.iter().rev().cloned().collect();
    let mut decided = decide(&lenders, &turned);
    decided.reverse();
    assert_eq!(decided, expected);
}

#[test]
fn an_exclusive_controller_is_nobody_elses() {
    let all = [exclusive("own", 1, Burstable), wants("shared", 2, 8)];
    assert_eq!(decide(&two(), &all), [granted(&[("A", 8)]), granted(&[("B", 8)])]);
    // Beside others there is none, and burstable ones take nothing back.
    let shared = has(wants("shared", 1, 1), &[("A", 1), ("B", 1)], Queues::None);
    let waits = short(vec![full("A", &[("shared", 1)]), full("B", &[("shared", 1)])]);
    let decided = decide(&two(), &[shared, exclusive("own", 2, Burstable)]);
    assert_eq!(decided, [Verdict::Stays, waits]);
    let owns = |serial: &str| has(exclusive(serial, 1, Guaranteed), &[(serial, 8)], Queues::Kept);
    let waits = short(vec![full("A", &[("A", 8)]), full("B", &[("B", 8)])]);
    assert_eq!(decide(&two(), &[owns("A"), owns("B"), wants("x", 2, 1)])[2], waits);
    assert_eq!(decide(&two(), &[owns("A"), owns("B"), exclusive("x", 2, Guaranteed)])[2], waits);
    // Of several the one that lends the fewest.
    let lenders = [lender("A", 32), lender("B", 8), lender("C", 4)];
    assert_eq!(decide(&lenders, &[exclusive("own", 1, BestEffort)]), [granted(&[("B", 8)])]);
}

#[test]
fn a_guaranteed_one_takes_back_best_effort_first_then_burstable_and_never_another_guaranteed_one() {
    let effort = |name: &str, serial: &str| {
        has(Claimant { qos: BestEffort, ..wants(name, 1, 4) }, &[(serial, 4)], Queues::None)
    };
    let burst = |name: &str, serial: &str| has(wants(name, 1, 4), &[(serial, 4)], Queues::None);
    let asks = || exclusive("g", 9, Guaranteed);
    let all = [burst("b", "A"), effort("e1", "B"), effort("e2", "B"), asks()];
    let expected = [Verdict::Stays, taken_back("g"), taken_back("g"), granted(&[("B", 8)])];
    assert_eq!(decide(&two(), &all), expected);
    let all = [burst("b1", "A"), burst("b2", "A"), burst("b3", "B"), effort("e", "B"), asks()];
    let expected = [Verdict::Stays, Verdict::Stays, taken_back("g"), taken_back("g"), granted(&[("B", 8)])];
    assert_eq!(decide(&two(), &all), expected);
    // What does not fit even then takes nothing back.
    let many = Claimant { pairs: 17, ..asks() };
    let waits = Verdict::Waits(Wait::TooMany { most: 16 });
    assert_eq!(
        decide(&two(), &[effort("e", "A"), burst("b", "B"), many]),
        [Verdict::Stays, Verdict::Stays, waits]
    );
    // Two of them take two controllers; a third finds none.
    let all = [
        effort("e", "A"),
        burst("b", "B"),
        asks(),
        exclusive("h", 10, Guaranteed),
        exclusive("i", 11, Guaranteed),
    ];
    let decided = decide(&two(), &all);
    assert_eq!(decided[..4], [taken_back("g"), taken_back("h"), granted(&[("A", 8)]), granted(&[("B", 8)])]);
    assert_eq!(decided[4], short(vec![full("A", &[("g", 8)]), full("B", &[("h", 8)])]));
}

#[test]
fn a_grant_is_taken_back_whole_and_its_other_controllers_are_lent_at_once() {
    let effort = Claimant { qos: BestEffort, ..wants("e", 1, 12) };
    let both = has(effort, &[("A", 12), ("B", 12)], Queues::None);
    let decided = decide(&two(), &[both, exclusive("g", 3, Guaranteed), wants("late", 4, 16)]);
    assert_eq!(decided, [taken_back("g"), granted(&[("A", 8)]), granted(&[("B", 16)])]);
}

#[test]
fn a_controller_with_queues_is_kept_until_they_are_destroyed() {
    let effort = Claimant { qos: BestEffort, ..wants("e", 1, 4) };
    let all =
        |has: Hold| [Claimant { has, ..effort.clone() }, exclusive("g", 3, Guaranteed), wants("late", 4, 4)];
    let lenders = [lender("A", 16)];
    let coming = Verdict::Waits(Wait::Coming(full("A", &[("e", 4)])));
    let waits = short(vec![full("A", &[("e", 4)])]);
    let stands = Hold::Stands { shares: shares(&[("A", 4)]), queues: Queues::Kept };
    assert_eq!(decide(&lenders, &all(stands)), [taken_back("g"), coming.clone(), waits.clone()]);
    let ends = Hold::Ends(shares(&[("A", 4)]));
    assert_eq!(decide(&lenders, &all(ends)), [Verdict::Stays, coming.clone(), waits]);
    let waits = short(vec![full("A", &[("g", 8)])]);
    assert_eq!(decide(&lenders, &all(Hold::Nothing)), [Verdict::Stays, granted(&[("A", 8)]), waits]);
    // What leaves already is waited for, and nobody else is made to leave.
    let leaves = Claimant { has: Hold::Ends(shares(&[("B", 4)])), ..wants("leaves", 1, 4) };
    let stays = has(Claimant { qos: BestEffort, ..wants("stays", 1, 4) }, &[("A", 4)], Queues::None);
    let decided = decide(&two(), &[leaves, stays, exclusive("g", 2, Guaranteed)]);
    let coming = Verdict::Waits(Wait::Coming(full("B", &[("leaves", 4)])));
    assert_eq!(decided, [Verdict::Stays, Verdict::Stays, coming]);
}

#[test]
fn a_lower_share_takes_nothing_from_what_was_granted() {
    let lenders = [lender("A", 4)];
    let all = [has(wants("h", 1, 8), &[("A", 8), ("gone", 8)], Queues::Kept), wants("x", 2, 1)];
    let waits = short(vec![Full { budget: 4, ..full("A", &[("h", 8)]) }]);
    assert_eq!(decide(&lenders, &all), [Verdict::Stays, waits]);
}

/// Queue pairs of each controller that are lent, and to how many, those among them that want it for themselves.
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

/// Whether an allocation could be given what it asks for, by another way of counting than the decision's.
fn fits(lenders: &[Lender], claimants: &[Claimant], wanted: &Claimant) -> bool {
    let held = held(claimants);
    let of = |serial: &str| held.get(serial).copied().unwrap_or_default();
    let own: Vec<&Lender> = lenders.iter().filter(|lender| lender.pool == wanted.pool).collect();
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

/// What agents and people do between two decisions.
fn disturb(random: &mut StdRng, claimants: &mut Vec<Claimant>, number: usize) {
    if claimants.len() < 12 && random.random_bool(0.6) {
        claimants.push(random_claimant(random, number));
    }
    if claimants.is_empty() {
        return;
    }
    let index = random.random_range(0..claimants.len());
    let next = match claimants[index].has.clone() {
        Hold::Stands { shares, queues: Queues::None } if random.random_bool(0.5) => {
            Hold::Stands { shares, queues: Queues::Kept }
        }
        Hold::Stands { queues: Queues::None, .. } => Hold::Nothing,
        Hold::Stands { shares, queues: Queues::Kept } => Hold::Ends(shares),
        Hold::Ends(_) | Hold::Nothing => {
            claimants.remove(index);
            return;
        }
        Hold::Wants if random.random_bool(0.2) => Hold::Nothing,
        Hold::Wants => Hold::Wants,
    };
    claimants[index].has = next;
}

/// Does what was decided.
fn follow(claimants: &mut [Claimant], verdicts: &[Verdict]) {
    for (claimant, verdict) in claimants.iter_mut().zip(verdicts) {
        match (verdict, claimant.has.clone()) {
            (Verdict::Granted(shares), has) => {
                assert_eq!(has, Hold::Wants, "only what is wanted is granted");
                assert!(shares.iter().all(|share| share.pairs == claimant.pairs), "it is granted whole");
                claimant.has = Hold::Stands { shares: shares.clone(), queues: Queues::None };
            }
            (Verdict::TakenBack { .. }, Hold::Stands { shares, queues }) => {
                assert_ne!(claimant.qos, Guaranteed);
                claimant.has = if queues == Queues::Kept { Hold::Ends(shares) } else { Hold::Nothing };
            }
            (Verdict::TakenBack { .. }, has) => panic!("{has:?} cannot be taken back"),
            (Verdict::Waits(_), has) => assert_eq!(has, Hold::Wants),
            (Verdict::Stays, has) => assert_ne!(has, Hold::Wants, "who wants something is answered"),
        }
    }
}

#[test]
fn whatever_is_asked_for_and_given_back_budgets_hold_and_no_room_is_kept_from_who_fits() {
    let (mut grants, mut taken, mut coming) = (0, 0, 0);
    for seed in 0..WORLDS {
        let mut random = StdRng::seed_from_u64(seed);
        let lenders: Vec<Lender> = (0..random.random_range(1..5))
            .map(|index| {
                let pool = if random.random_bool(0.8) { "p" } else { "q" };
                Lender { pool: pool.to_owned(), ..lender(&format!("S{index}"), random.random_range(0..32)) }
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
                let lender = lenders.iter().find(|lender| lender.serial == serial).expect("it was lent");
                assert!(pairs <= lender.budget, "{serial} lends too much; {}", context());
                assert!(exclusive == 0 || holders == 1, "{serial} is not exclusive; {}", context());
            }
            for (claimant, was) in claimants.iter().zip(&before) {
                if let (Hold::Stands { shares: now, .. }, Hold::Stands { shares: then, .. }) =
                    (&claimant.has, &was.has)
                {
                    assert_eq!(now, then, "{} has changed; {}", claimant.name, context());
                }
            }
            let waits_for_queues =
                verdicts.iter().any(|verdict| matches!(verdict, Verdict::Waits(Wait::Coming(_))));
            for claimant in claimants.iter().filter(|claimant| claimant.has == Hold::Wants) {
                // A controller that is kept for somebody is lent to nobody.
                let is_left = !waits_for_queues && fits(&lenders, &claimants, claimant);
                assert!(!is_left, "{} would fit; {}", claimant.name, context());
            }
            let again = decide(&lenders, &claimants);
            assert!(
                again.iter().all(|verdict| matches!(verdict, Verdict::Stays | Verdict::Waits(_))),
                "once decided nothing more is to be done: {again:?}; {}",
                context()
            );
            grants += verdicts.iter().filter(|verdict| matches!(verdict, Verdict::Granted(_))).count();
            taken += verdicts.iter().filter(|verdict| matches!(verdict, Verdict::TakenBack { .. })).count();
            coming += usize::from(waits_for_queues);
        }
    }
    assert!(grants > 300 && taken > 30 && coming > 30, "{grants} {taken} {coming}: it was a real test");
}
