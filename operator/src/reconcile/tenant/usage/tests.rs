//! Usage values in statuses, and when they are replaced.

use reprise_crds::CacheTenantStatus;
use reprise_crds::status::ConditionStatus::{self, False, True, Unknown};
use reprise_crds::status::set;
use serde_json::json;

use super::*;

const MIB: u64 = 1 << 20;

fn at(second: u32) -> Time {
    serde_json::from_value(json!(format!("2026-01-01T00:00:{second:02}Z"))).expect("a time")
}

/// A tenant with at most 100 MiB on devices of each cluster.
fn limited() -> CacheTenant {
    let spec = json!({ "budget": { "ssd": { "limit": "100Mi" } } });
    CacheTenant::new("t", serde_json::from_value(spec).expect("a spec"))
}

fn holds(cluster: &str, mib: u64) -> UsageMeasurement {
    let used = TierBytes { dram: MIB, ssd: mib * MIB };
    let held = MeasuredUsage { used, blocks: Some(TierBytes { dram: 1, ssd: mib }), away: 0 };
    UsageMeasurement { cluster: cluster.to_owned(), usage: Ok(held) }
}

fn fails(reason: Reason) -> UsageMeasurement {
    let usage = Err(Refusal::new(reason, "m-1 does not respond"));
    UsageMeasurement { cluster: "n/c".to_owned(), usage }
}

fn of(findings: &[Finding], kind: Type) -> &Finding {
    findings.iter().find(|found| found.kind == kind).expect("the condition")
}

/// Evaluates and stores measurements; returns the stored size on devices with its time, and `OverQuota`.
fn store(
    tenant: &mut CacheTenant,
    second: u32,
    measurements: &[UsageMeasurement],
) -> (String, Time, ConditionStatus) {
    let (usage, findings) = evaluate(tenant, measurements, None, &at(second));
    let mut status = CacheTenantStatus { usage: usage.clone(), ..CacheTenantStatus::default() };
    for finding in &findings {
        set(&mut status.conditions, finding, 1, &at(second));
    }
    tenant.status = Some(status);
    let usage = usage.expect("usage");
    (usage.ssd.as_str().to_owned(), usage.observed_time, of(&findings, Type::OverQuota).status)
}

#[test]
fn sums_clusters_and_rounds_up_to_whole_mib() {
    let one = UsageMeasurement {
        usage: Ok(MeasuredUsage { used: TierBytes { dram: 0, ssd: MIB + 1 }, blocks: None, away: 2 }),
        ..holds("n/d", 0)
    };
    let (usage, findings) = evaluate(&limited(), &[holds("n/c", 3), one.clone()], None, &at(7));
    let usage = usage.expect("usage");
    assert_eq!((usage.dram.as_str(), usage.ssd.as_str()), ("1Mi", "5Mi"));
    assert_eq!((usage.dram_blocks, usage.observed_time), (None, at(7)), "one cluster does not report blocks");
    let known = of(&findings, Type::UsageKnown);
    assert_eq!((known.status, known.reason), (True, Reason::AsDesired));
    assert!(known.message.contains("n/c, n/d") && known.message.contains("2 are absent"), "{known:?}");
    let all = MeasuredUsage { used: TierBytes { dram: u64::MAX, ssd: u64::MAX }, blocks: None, away: 0 };
    let most = figures(&[UsageMeasurement { usage: Ok(all), ..one }], &at(7));
    assert!(most.ssd.as_str().trim_end_matches("Mi").len() <= 12, "the schema permits 12 digits: {most:?}");
}

#[test]
fn values_are_replaced_only_if_they_differ_by_a_64th_or_the_limit_is_crossed() {
    let mut tenant = limited();
    for (second, mib, stored, observed, over) in [
        (1, 98, "98Mi", 1, False),
        (2, 98, "98Mi", 1, False),
        (3, 99, "98Mi", 1, False),
        (4, 90, "90Mi", 4, False),
        (5, 100, "100Mi", 5, False),
        // Values and condition are from one measurement.
        (6, 101, "101Mi", 6, True),
        (7, 0, "0", 7, False),
    ] {
        let is = store(&mut tenant, second, &[holds("n/c", mib)]);
        assert_eq!(is, (stored.to_owned(), at(observed), over), "after {second} s");
    }
}

#[test]
fn keeps_stored_values_and_reports_why_usage_is_unknown() {
    let mut tenant = limited();
    store(&mut tenant, 0, &[holds("n/c", 30)]);
    for reason in [Reason::ControlPlaneUnreachable, Reason::NotReported] {
        let (usage, findings) = evaluate(&tenant, &[holds("n/b", 1), fails(reason)], None, &at(1));
        let known = of(&findings, Type::UsageKnown);
        assert_eq!((known.status, known.reason), (Unknown, reason));
        assert!(known.message.contains("n/c is unknown: m-1 does not respond"), "{known:?}");
        assert_eq!(usage, tenant.status.as_ref().and_then(|status| status.usage.clone()));
        assert_eq!(of(&findings, Type::OverQuota).status, Unknown);
    }
    let (usage, findings) = evaluate(&limited(), &[], None, &at(0));
    assert_eq!((usage, of(&findings, Type::UsageKnown).reason), (None, Reason::ReferenceNotFound));
}

#[test]
fn over_quota_is_evaluated_for_each_cluster_of_an_accepted_tenant() {
    // A cluster above the limit is not offset by another one below it, nor hidden by an unknown one.
    for other in [holds("n/b", 1), fails(Reason::NotReported)] {
        let over = over_quota(&limited(), &[other, holds("n/d", 101)], None).expect("the condition");
        assert_eq!((over.status, over.reason), (True, Reason::AboveLimit));
        for words in ["n/d", "budget.ssd.limit (100Mi)", "BudgetApplied"] {
            assert!(over.message.contains(words), "{over:?}");
        }
    }
    let free = CacheTenant::new("t", serde_json::from_value(json!({})).expect("a spec"));
    let over = over_quota(&free, &[holds("n/c", 500)], None).expect("the condition");
    assert_eq!(over.status, False, "there is no limit");
    let refused = Refusal::new(Reason::Unsupported, "no");
    assert_eq!(over_quota(&limited(), &[holds("n/c", 500)], Some(&refused)), None);
    let mut deleted = limited();
    deleted.metadata.deletion_timestamp = Some(at(0));
    assert_eq!(over_quota(&deleted, &[holds("n/c", 500)], None), None);
}
