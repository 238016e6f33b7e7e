//! Usage values in statuses, and how often they are written.

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

/// A tenant with at most 100 MiB on devices of each cluster.
fn limited() -> CacheTenant {
    tenant(json!({ "budget": { "ssd": { "limit": "100Mi" } } }))
}

fn holds(cluster: &str, mib: u64) -> UsageMeasurement {
    let used = TierBytes { dram: MIB, ssd: mib * MIB };
    let held = MeasuredUsage { used, blocks: Some(TierBytes { dram: 1, ssd: mib }), away: 0 };
    UsageMeasurement { cluster: cluster.to_owned(), usage: Ok(held) }
}

fn fails(unmeasured: UsageUnknown) -> UsageMeasurement {
    UsageMeasurement { cluster: "n/c".to_owned(), usage: Err(unmeasured) }
}

/// Stores a report as [`crate::framework::status::write`] does; returns whether the status changed.
fn stored(tenant: &mut CacheTenant, report: &UsageReport, now: &Time) -> bool {
    let generation = tenant.metadata.generation.unwrap_or_default();
    let before = tenant.status.clone().unwrap_or_default();
    let mut status = CacheTenantStatus { usage: report.usage.clone(), ..before.clone() };
    status.observed_generation = generation;
    status.conditions.retain(|one| report.findings.iter().any(|found| found.kind.as_str() == one.kind));
    for finding in &report.findings {
        set(&mut status.conditions, finding, generation, now);
    }
    let changed = status != before;
    tenant.status = Some(status);
    changed
}

fn of(report: &UsageReport, kind: Type) -> &Finding {
    report.findings.iter().find(|found| found.kind == kind).expect("the condition")
}

/// Evaluates and stores measurements at a time; returns whether that was a write.
fn writes(tenant: &mut CacheTenant, second: i64, measurements: &[UsageMeasurement]) -> bool {
    let report = evaluate(tenant, measurements, None, &at(second));
    stored(tenant, &report, &at(second))
}

fn ssd(tenant: &CacheTenant) -> String {
    let usage = tenant.status.as_ref().and_then(|status| status.usage.as_ref()).expect("usage");
    usage.ssd.as_str().to_owned()
}

#[test]
fn sums_clusters_and_rounds_up_to_whole_mib() {
    let one = UsageMeasurement {
        usage: Ok(MeasuredUsage { used: TierBytes { dram: 0, ssd: MIB + 1 }, blocks: None, away: 2 }),
        ..holds("n/d", 0)
    };
    let report = evaluate(&tenant(json!({})), &[holds("n/c", 3), one.clone()], None, &at(7));
    let usage = report.usage.clone().expect("usage");
    assert_eq!((usage.dram.as_str(), usage.ssd.as_str()), ("1Mi", "5Mi"));
    assert_eq!((usage.dram_blocks, usage.observed_time), (None, at(7)), "one cluster does not report blocks");
    let known = of(&report, Type::UsageKnown);
    assert_eq!((known.status, known.reason), (ConditionStatus::True, Reason::AsDesired));
    assert!(
        known.message.contains("n/c, n/d") && known.message.contains("2 are absent"),
        "{}",
        known.message
    );
    let report = evaluate(&tenant(json!({})), &[holds("n/c", 3)], None, &at(7));
    assert_eq!(report.usage.expect("usage").ssd_blocks, Some(3));
    let all = MeasuredUsage { used: TierBytes { dram: u64::MAX, ssd: u64::MAX }, blocks: None, away: 0 };
    let most = evaluate(&tenant(json!({})), &[UsageMeasurement { usage: Ok(all), ..one }], None, &at(7))
        .usage
        .expect("usage");
    assert!(most.ssd.as_str().trim_end_matches("Mi").len() <= 12, "the schema permits 12 digits: {most:?}");
}

#[test]
fn writes_equal_values_never_and_changed_ones_once_a_minute() {
    let mut tenant = limited();
    assert!(writes(&mut tenant, 0, &[holds("n/c", 10)]));
    for second in 1..1200 {
        assert!(!writes(&mut tenant, second, &[holds("n/c", 10)]), "after {second} s");
    }
    // Another value every second, for 10 minutes.
    let written: Vec<i64> = (1200..1800)
        .filter(|second| writes(&mut tenant, *second, &[holds("n/c", 10 + second.unsigned_abs() % 40)]))
        .collect();
    assert!((9..=10).contains(&written.len()), "{written:?}");
    assert!(written.windows(2).all(|pair| pair[1] - pair[0] >= 60), "{written:?}");
}

#[test]
fn small_changes_wait_five_minutes_but_large_ones_do_not() {
    let mut tenant = tenant(json!({}));
    assert!(writes(&mut tenant, 0, &[holds("n/c", 1000)]));
    assert!(!writes(&mut tenant, 299, &[holds("n/c", 1010)]));
    assert!(writes(&mut tenant, 300, &[holds("n/c", 1010)]));
    assert_eq!(ssd(&tenant), "1010Mi");
    assert!(!writes(&mut tenant, 359, &[holds("n/c", 0)]));
    let report = evaluate(&tenant, &[holds("n/c", 0)], None, &at(350));
    assert_eq!(report.next, Duration::from_secs(10), "the next measurement is due when it may be written");
    assert!(writes(&mut tenant, 360, &[holds("n/c", 0)]));
    assert_eq!(ssd(&tenant), "0");
}

#[test]
fn reports_exceeded_limit_with_the_remedy_and_handles_new_limits_at_once() {
    let mut tenant = limited();
    assert!(writes(&mut tenant, 0, &[holds("n/c", 100)]));
    assert_eq!(
        of(&evaluate(&tenant, &[holds("n/c", 100)], None, &at(1)), Type::OverQuota).status,
        ConditionStatus::False
    );
    tenant.spec.budget.ssd.limit = Some(Quantity::new("50Mi"));
    tenant.metadata.generation = Some(2);
    let report = evaluate(&tenant, &[holds("n/c", 99)], None, &at(2));
    let over = of(&report, Type::OverQuota);
    assert_eq!((over.status, over.reason), (ConditionStatus::True, Reason::AboveLimit));
    for message in ["n/c", "budget.ssd.limit (50Mi)", "BudgetApplied"] {
        assert!(over.message.contains(message), "{}", over.message);
    }
    assert!(stored(&mut tenant, &report, &at(2)));
    assert_eq!(ssd(&tenant), "99Mi", "values and condition are from one measurement");
    // Usage drops: condition and values change together, a minute later.
    assert!(!writes(&mut tenant, 61, &[holds("n/c", 40)]));
    assert!(writes(&mut tenant, 62, &[holds("n/c", 40)]));
    assert_eq!(ssd(&tenant), "40Mi");
    let report = evaluate(&tenant, &[holds("n/c", 40)], None, &at(63));
    assert_eq!(of(&report, Type::OverQuota).status, ConditionStatus::False);
    // A cluster above the limit is not offset by another one below it.
    let both = [holds("n/c", 1), holds("n/d", 51)];
    let over = super::over_quota(&tenant, &both, None).expect("the condition");
    assert!(over.status == ConditionStatus::True && over.message.contains("n/d"), "{over:?}");
}

#[test]
fn rejected_and_deleted_tenants_have_no_over_quota_condition() {
    let refused = Refusal::new(Reason::Unsupported, "no");
    let report = evaluate(&limited(), &[holds("n/c", 500)], Some(&refused), &at(0));
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
    let mut deleted = limited();
    deleted.metadata.deletion_timestamp = Some(at(0));
    assert_eq!(over_quota(&deleted, &[holds("n/c", 500)], None), None);
    let free = over_quota(&tenant(json!({})), &[holds("n/c", 500)], None).expect("the condition");
    assert_eq!(free.status, ConditionStatus::False);
}

#[test]
fn keeps_stored_values_and_reports_why_usage_is_unknown() {
    let mut tenant = limited();
    assert!(writes(&mut tenant, 0, &[holds("n/c", 30)]));
    for (unmeasured, reason, next) in [
        (
            UsageUnknown::MembersUnavailable("m-1 does not respond".to_owned()),
            Reason::ControlPlaneUnreachable,
            POLL_INTERVAL,
        ),
        (
            UsageUnknown::NodesUnreported("m-1 does not respond".to_owned()),
            Reason::NotReported,
            RETRY_INTERVAL,
        ),
    ] {
        let report = evaluate(&tenant, &[holds("n/b", 1), fails(unmeasured)], None, &at(100));
        let known = of(&report, Type::UsageKnown);
        assert_eq!((known.status, known.reason, report.next), (ConditionStatus::Unknown, reason, next));
        assert!(
            known.message.contains("n/c") && known.message.contains("m-1 does not respond"),
            "{}",
            known.message
        );
        assert_eq!(of(&report, Type::OverQuota).status, ConditionStatus::Unknown);
        assert!(stored(&mut tenant, &report, &at(100)));
        assert_eq!(ssd(&tenant), "30Mi", "the previous values");
        assert!(!stored(&mut tenant, &report, &at(101)), "written once");
    }
    // Usage above the limit is reported regardless of unknown clusters.
    let report = evaluate(
        &tenant,
        &[holds("n/b", 101), fails(UsageUnknown::NodesUnreported(String::new()))],
        None,
        &at(102),
    );
    assert_eq!(of(&report, Type::OverQuota).status, ConditionStatus::True);
    assert!(writes(&mut tenant, 103, &[holds("n/c", 31)]), "known again, and written at once");
    let unselected = evaluate(&limited(), &[], None, &at(0));
    assert_eq!(
        (unselected.usage.clone(), of(&unselected, Type::UsageKnown).reason),
        (None, Reason::ReferenceNotFound)
    );
}
