//! What is said of figures, and how often.

use reprise_crds::status::set;
use serde_json::json;

use super::*;

const MIB: u64 = 1 << 20;

fn at(seconds: i64) -> Time {
    let minutes = seconds / 60;
    serde_json::from_value(json!(format!("2026-01-01T00:{minutes:02}:{:02}Z", seconds % 60))).expect("a time")
}

fn tenant(spec: serde_json::Value) -> CacheTenant {
    let mut tenant = CacheTenant::new("t", serde_json::from_value(spec).expect("a spec"));
    tenant.metadata.generation = Some(1);
    tenant
}

/// At most 100 Mi on devices of each cluster.
fn limited() -> CacheTenant {
    tenant(json!({ "budget": { "ssd": { "limit": "100Mi" } } }))
}

fn holds(cluster: &str, mib: u64) -> Measured {
    let used = Room { dram: MIB, ssd: mib * MIB };
    let held = Holding { used, blocks: Some(Room { dram: 1, ssd: mib }), away: 0 };
    Measured { cluster: cluster.to_owned(), held: Ok(held) }
}

fn fails(unmeasured: Unmeasured) -> Measured {
    Measured { cluster: "n/c".to_owned(), held: Err(unmeasured) }
}

/// Stores what is said, as [`crate::status::write`] does; whether anything has changed.
fn stored(tenant: &mut CacheTenant, told: &Told, now: &Time) -> bool {
    let generation = tenant.metadata.generation.unwrap_or_default();
    let before = tenant.status.clone().unwrap_or_default();
    let mut status = CacheTenantStatus { usage: told.usage.clone(), ..before.clone() };
    status.observed_generation = generation;
    status.conditions.retain(|one| told.findings.iter().any(|found| found.kind.as_str() == one.kind));
    for finding in &told.findings {
        set(&mut status.conditions, finding, generation, now);
    }
    let changed = status != before;
    tenant.status = Some(status);
    changed
}

fn of(told: &Told, kind: Type) -> &Finding {
    told.findings.iter().find(|found| found.kind == kind).expect("it is said")
}

/// Tells at a time and stores it; whether that was a write.
fn writes(tenant: &mut CacheTenant, second: i64, measured: &[Measured]) -> bool {
    let told = tell(tenant, measured, None, &at(second));
    stored(tenant, &told, &at(second))
}

fn ssd(tenant: &CacheTenant) -> String {
    let usage = tenant.status.as_ref().and_then(|status| status.usage.as_ref()).expect("it is there");
    usage.ssd.as_str().to_owned()
}

#[test]
fn clusters_are_added_up_and_rounded_up_to_whole_mi() {
    let one = Measured {
        held: Ok(Holding { used: Room { dram: 0, ssd: MIB + 1 }, blocks: None, away: 2 }),
        ..holds("n/d", 0)
    };
    let told = tell(&tenant(json!({})), &[holds("n/c", 3), one.clone()], None, &at(7));
    let usage = told.usage.clone().expect("it is known");
    assert_eq!((usage.dram.as_str(), usage.ssd.as_str()), ("1Mi", "5Mi"));
    assert_eq!((usage.dram_blocks, usage.observed_time), (None, at(7)), "one does not say how many");
    let known = of(&told, Type::UsageKnown);
    assert_eq!((known.status, known.reason), (ConditionStatus::True, Reason::AsDesired));
    assert!(known.message.contains("n/c, n/d") && known.message.contains("2 are away"), "{}", known.message);
    let told = tell(&tenant(json!({})), &[holds("n/c", 3)], None, &at(7));
    assert_eq!(told.usage.expect("it is known").ssd_blocks, Some(3));
    let all = Holding { used: Room { dram: u64::MAX, ssd: u64::MAX }, blocks: None, away: 0 };
    let most =
        tell(&tenant(json!({})), &[Measured { held: Ok(all), ..one }], None, &at(7)).usage.expect("known");
    assert!(most.ssd.as_str().trim_end_matches("Mi").len() <= 12, "the schema takes no more: {most:?}");
}

#[test]
fn what_is_the_same_is_never_written_again_and_what_changes_once_a_minute() {
    let mut tenant = limited();
    assert!(writes(&mut tenant, 0, &[holds("n/c", 10)]));
    for second in 1..1200 {
        assert!(!writes(&mut tenant, second, &[holds("n/c", 10)]), "after {second} s");
    }
    // Another figure at every second, for 10 minutes.
    let written: Vec<i64> = (1200..1800)
        .filter(|second| writes(&mut tenant, *second, &[holds("n/c", 10 + second.unsigned_abs() % 40)]))
        .collect();
    assert!((9..=10).contains(&written.len()), "{written:?}");
    assert!(written.windows(2).all(|pair| pair[1] - pair[0] >= 60), "{written:?}");
}

#[test]
fn small_changes_wait_for_five_minutes_and_a_tenant_that_has_emptied_does_not() {
    let mut tenant = tenant(json!({}));
    assert!(writes(&mut tenant, 0, &[holds("n/c", 1000)]));
    assert!(!writes(&mut tenant, 299, &[holds("n/c", 1010)]));
    assert!(writes(&mut tenant, 300, &[holds("n/c", 1010)]));
    assert_eq!(ssd(&tenant), "1010Mi");
    assert!(!writes(&mut tenant, 359, &[holds("n/c", 0)]));
    let told = tell(&tenant, &[holds("n/c", 0)], None, &at(350));
    assert_eq!(told.next, Duration::from_secs(10), "it is looked at again when it may be written");
    assert!(writes(&mut tenant, 360, &[holds("n/c", 0)]));
    assert_eq!(ssd(&tenant), "0");
}

#[test]
fn more_than_the_limit_is_said_with_what_to_do_and_a_new_limit_is_answered_at_once() {
    let mut tenant = limited();
    assert!(writes(&mut tenant, 0, &[holds("n/c", 100)]));
    assert_eq!(
        of(&tell(&tenant, &[holds("n/c", 100)], None, &at(1)), Type::OverQuota).status,
        ConditionStatus::False
    );
    tenant.spec.budget.ssd.limit = Some(Quantity::new("50Mi"));
    tenant.metadata.generation = Some(2);
    let told = tell(&tenant, &[holds("n/c", 99)], None, &at(2));
    let over = of(&told, Type::OverQuota);
    assert_eq!((over.status, over.reason), (ConditionStatus::True, Reason::AboveLimit));
    for words in ["n/c", "budget.ssd.limit (50Mi)", "BudgetApplied"] {
        assert!(over.message.contains(words), "{}", over.message);
    }
    assert!(stored(&mut tenant, &told, &at(2)));
    assert_eq!(ssd(&tenant), "99Mi", "figures and condition are of one time");
    // It gives way: condition and figures change together, a minute later.
    assert!(!writes(&mut tenant, 61, &[holds("n/c", 40)]));
    assert!(writes(&mut tenant, 62, &[holds("n/c", 40)]));
    assert_eq!(ssd(&tenant), "40Mi");
    let told = tell(&tenant, &[holds("n/c", 40)], None, &at(63));
    assert_eq!(of(&told, Type::OverQuota).status, ConditionStatus::False);
    // One cluster that holds too much is not made good by another that holds little.
    let both = [holds("n/c", 1), holds("n/d", 51)];
    let over = super::over(&tenant, &both, None).expect("it is said");
    assert!(over.status == ConditionStatus::True && over.message.contains("n/d"), "{over:?}");
}

#[test]
fn of_a_refused_or_deleted_tenant_nobody_says_that_it_holds_too_much() {
    let refused = Refusal::new(Reason::Unsupported, "no");
    let told = tell(&limited(), &[holds("n/c", 500)], Some(&refused), &at(0));
    assert_eq!(told.findings.len(), 1, "{:?}", told.findings);
    let mut deleted = limited();
    deleted.metadata.deletion_timestamp = Some(at(0));
    assert_eq!(over(&deleted, &[holds("n/c", 500)], None), None);
    let free = over(&tenant(json!({})), &[holds("n/c", 500)], None).expect("it is said");
    assert_eq!(free.status, ConditionStatus::False);
}

#[test]
fn figures_that_may_be_too_small_are_not_told_and_why_is_said() {
    let mut tenant = limited();
    assert!(writes(&mut tenant, 0, &[holds("n/c", 30)]));
    for (unmeasured, reason, next) in [
        (Unmeasured::Unasked("m-1 does not answer".to_owned()), Reason::ControlPlaneUnreachable, LOOK_AGAIN),
        (Unmeasured::Unheard("m-1 does not answer".to_owned()), Reason::NotReported, LOOK_SOON),
    ] {
        let told = tell(&tenant, &[holds("n/b", 1), fails(unmeasured)], None, &at(100));
        let known = of(&told, Type::UsageKnown);
        assert_eq!((known.status, known.reason, told.next), (ConditionStatus::Unknown, reason, next));
        assert!(
            known.message.contains("n/c") && known.message.contains("m-1 does not answer"),
            "{}",
            known.message
        );
        assert_eq!(of(&told, Type::OverQuota).status, ConditionStatus::Unknown);
        assert!(stored(&mut tenant, &told, &at(100)));
        assert_eq!(ssd(&tenant), "30Mi", "what was found before");
        assert!(!stored(&mut tenant, &told, &at(101)), "said once");
    }
    // What exceeds the limit already does so whatever others hold.
    let told = tell(&tenant, &[holds("n/b", 101), fails(Unmeasured::Unheard(String::new()))], None, &at(102));
    assert_eq!(of(&told, Type::OverQuota).status, ConditionStatus::True);
    assert!(writes(&mut tenant, 103, &[holds("n/c", 31)]), "known again, and said at once");
    let nobody = tell(&limited(), &[], None, &at(0));
    assert_eq!(
        (nobody.usage.clone(), of(&nobody, Type::UsageKnown).reason),
        (None, Reason::ReferenceNotFound)
    );
}
