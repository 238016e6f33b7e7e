//! Computes the status of a tenant. Pure.

use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason};
use reprise_crds::{CacheTenant, CacheTenantStatus};

use super::budget::{self, BudgetOutcome, BudgetResult};
use super::dereference::{CapacityCheck, CapacityScope};
use crate::framework::refusal::Refusal;
use crate::reconcile::control_plane;
use crate::reconcile::names::{BUDGET_FINALIZER, PURGE_FINALIZER};

/// Computes the status and conditions of a tenant.
pub fn compute(
    tenant: &CacheTenant,
    checks: &[CapacityCheck],
    results: &[BudgetResult],
    refused: Option<&Refusal>,
    more: impl IntoIterator<Item = Finding>,
) -> (CacheTenantStatus, Vec<Finding>) {
    let mut findings = vec![match refused {
        Some(Refusal { reason, message }) => Finding::no(Type::Accepted, *reason, message),
        None => Finding::yes(Type::Accepted, Reason::AsDesired, "the spec is valid"),
    }];
    findings.push(feasible(checks, results));
    findings.extend(applied(tenant, results, refused));
    findings.extend(more);
    let wrong = findings.iter().find(|found| found.status == ConditionStatus::False);
    let ready = match wrong {
        Some(found) => Finding::no(Type::Ready, found.reason, &found.message),
        None => Finding::yes(
            Type::Ready,
            Reason::AsDesired,
            "agents have the limits per node, and control planes have the budget",
        ),
    };
    findings.push(ready);
    findings.extend(blocked(tenant, results));
    (CacheTenantStatus::default(), findings)
}

/// Returns condition `BudgetApplied`; `None` if there is no budget to apply.
fn applied(tenant: &CacheTenant, results: &[BudgetResult], refused: Option<&Refusal>) -> Option<Finding> {
    let kind = Type::BudgetApplied;
    let wanted = budget::desired(tenant);
    if let Some(refused) = refused {
        let message = "the spec is not accepted, so control planes keep their budgets";
        return wanted.is_some().then(|| Finding::no(kind, refused.reason, message));
    }
    let wrong = results.iter().find_map(|result| {
        let cluster = &result.cluster;
        let (reason, message) = match &result.outcome {
            BudgetOutcome::Applied | BudgetOutcome::BlocksRemain(_) => return None,
            BudgetOutcome::Unreachable(message) => (
                Reason::ControlPlaneUnreachable,
                format!("cannot set the budget at the control plane of {cluster}; retrying: {message}"),
            ),
            BudgetOutcome::Rejected(message) => {
                (Reason::OverCapacity, format!("the control plane of {cluster} rejects the budget: {message}"))
            }
            BudgetOutcome::Foreign => (
                Reason::Conflict,
                format!(
                    "the control plane of {cluster} has a budget for the tenant that another client set: add it to spec.budget, or \
                     remove it with reprise tenant remove"
                ),
            ),
            BudgetOutcome::Paused => (
                Reason::Paused,
                format!("the control plane of {cluster} has another budget, and KVCacheCluster {cluster} is paused: set paused to false"),
            ),
        };
        Some(Finding::no(kind, reason, message))
    });
    if wrong.is_some() {
        return wrong;
    }
    wanted?;
    if results.is_empty() {
        let message = "the tenant applies to no KVCacheCluster: create one, or correct spec.clusters";
        return Some(Finding::no(kind, Reason::ReferenceNotFound, message));
    }
    let clusters: Vec<&str> = results.iter().map(|result| result.cluster.as_str()).collect();
    let message = format!("the control planes of {} have the budget", clusters.join(", "));
    Some(Finding::yes(kind, Reason::AsDesired, message))
}

/// Returns condition `DeletionBlocked` while the tenant is being deleted and a control plane still has its
/// budget.
fn blocked(tenant: &CacheTenant, results: &[BudgetResult]) -> Option<Finding> {
    tenant.metadata.deletion_timestamp.as_ref()?;
    let left = results.iter().find(|result| result.outcome != BudgetOutcome::Applied)?;
    let cluster = &left.cluster;
    let why = match &left.outcome {
        BudgetOutcome::Unreachable(message)
        | BudgetOutcome::Rejected(message)
        | BudgetOutcome::BlocksRemain(message) => message.as_str(),
        BudgetOutcome::Paused => "the cluster is paused",
        BudgetOutcome::Foreign | BudgetOutcome::Applied => "the budget belongs to another client",
    };
    let message = if budget::is_purging(tenant) {
        format!(
            "nodes of {cluster} may still hold blocks of the tenant: {why}. The operator checks again; to keep the blocks, remove \
             finalizer {PURGE_FINALIZER}"
        )
    } else {
        format!(
            "the control plane of {cluster} may still have the tenant's budget: {why}. The operator retries; to keep the budget, \
             remove finalizer {BUDGET_FINALIZER}"
        )
    };
    Some(Finding::yes(Type::DeletionBlocked, Reason::Releasing, message))
}

/// Returns the result of a purge, for the clusters that were checked and those that were skipped.
pub fn purged(purged: &[String], skipped: &[String]) -> Finding {
    let done = match purged {
        [] => "the tenant applies to no remaining KVCacheCluster, so no nodes were checked for its blocks"
            .to_owned(),
        purged => format!("no node of {} holds blocks of the tenant", purged.join(", ")),
    };
    let kind = Type::DeletionBlocked;
    if skipped.is_empty() {
        return Finding::no(kind, Reason::AsDesired, done);
    }
    let message = format!(
        "{done}; skipped because they are being deleted: {}. Blocks on retained devices of their nodes return with a new \
         KVCacheCluster there: purge the tenant again then",
        skipped.join(", ")
    );
    // Users must act on it, so it must not be published as a success.
    Finding::unknown(kind, Reason::Releasing, message)
}

/// Returns condition `QuotaFeasible`: whether budget reservations fit the control planes' capacity, and node
/// reservations fit each node.
fn feasible(checks: &[CapacityCheck], results: &[BudgetResult]) -> Finding {
    let refused = results.iter().find_map(|result| match &result.outcome {
        BudgetOutcome::Rejected(message) => Some(format!("{}: {message}", result.cluster)),
        _ => None,
    });
    let exceeds = |result: &&BudgetResult| result.overcommitted != control_plane::TierBytes::default();
    let lost = results.iter().find(exceeds).map(|result| {
        let control_plane::TierBytes { dram, ssd } = result.overcommitted;
        format!(
            "the reservations of all budgets exceed the capacity of living nodes of {} by {} of memory and {} on devices: lower \
             budget.dram.reserved or budget.ssd.reserved of some tenants, or add nodes",
            result.cluster,
            Quantity::of_bytes(dram),
            Quantity::of_bytes(ssd),
        )
    });
    match refused.or(lost) {
        Some(message) => Finding::no(Type::QuotaFeasible, Reason::OverCapacity, message),
        None => fits_nodes(checks),
    }
}

/// Checks the reservations of all tenants against the capacity of clusters' specs and of nodes' reports.
fn fits_nodes(checks: &[CapacityCheck]) -> Finding {
    let kind = Type::QuotaFeasible;
    let Some(check) = checks.iter().find(|check| check.reserved > check.available) else {
        if checks.iter().any(|check| matches!(check.scope, CapacityScope::Node(_))) {
            return Finding::yes(kind, Reason::AsDesired, "the reservations of all tenants fit every node");
        }
        return Finding::unknown(kind, Reason::NotReported, "no node has reported its capacity yet");
    };
    let (field, available, reserved) =
        (check.field, Quantity::of_bytes(check.available), Quantity::of_bytes(check.reserved));
    let tenants = check.tenants.join(", ");
    let message = match &check.scope {
        CapacityScope::Node(node) => format!(
            "node {node} has {available}, but {field} of all tenants is {reserved} in total: lower that of {tenants}, or extend the \
             node"
        ),
        CapacityScope::Cluster(cluster, unreserved) => format!(
            "cache.dram of KVCacheCluster {cluster} is {available}, but {field} of all tenants, each in whole regions, is {reserved} in \
             total: lower that of {tenants}, or raise cache.dram. Until then its agents reserve nothing for {}",
            unreserved.join(", ")
        ),
    };
    Finding::no(kind, Reason::OverCapacity, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_above_the_capacity_of_a_node_are_not_feasible() {
        let check = |reserved: u64| CapacityCheck {
            scope: CapacityScope::Node("n1".to_owned()),
            field: "perNode.ssd.reserved",
            available: 1 << 30,
            reserved,
            tenants: vec!["a".to_owned(), "b".to_owned()],
        };
        assert_eq!(feasible(&[], &[]).status, ConditionStatus::Unknown);
        assert_eq!(feasible(&[check(1 << 30)], &[]).status, ConditionStatus::True);
        let not = feasible(&[check(0), check(3 << 30)], &[]);
        assert_eq!((not.status, not.reason), (ConditionStatus::False, Reason::OverCapacity));
        assert!(not.message.contains("has 1Gi") && not.message.contains("a, b"), "{}", not.message);
        let of_cluster = |reserved: u64| {
            let scope = CapacityScope::Cluster("n/c".to_owned(), vec!["b".to_owned()]);
            CapacityCheck { scope, field: "perNode.dram.reserved", ..check(reserved) }
        };
        assert_eq!(
            feasible(&[of_cluster(1)], &[]).status,
            ConditionStatus::Unknown,
            "no node has reported it"
        );
        let not = feasible(&[of_cluster(3 << 30), check(0)], &[]);
        assert_eq!((not.status, not.reason), (ConditionStatus::False, Reason::OverCapacity));
        for message in ["cache.dram of KVCacheCluster n/c is 1Gi", "is 3Gi in total", "reserve nothing for b"]
        {
            assert!(not.message.contains(message), "{message}: {}", not.message);
        }
    }

    fn at(outcome: BudgetOutcome) -> BudgetResult {
        BudgetResult {
            cluster: "n/c".to_owned(),
            outcome,
            overcommitted: control_plane::TierBytes::default(),
        }
    }

    fn tenant(spec: serde_json::Value) -> CacheTenant {
        CacheTenant::new("t", serde_json::from_value(spec).expect("a spec"))
    }

    #[test]
    fn reports_rejected_and_overcommitted_budgets() {
        let refused = at(BudgetOutcome::Rejected("dram: 10B more than there is".to_owned()));
        let not = feasible(&[], &[at(BudgetOutcome::Applied), refused.clone()]);
        assert_eq!((not.status, not.reason), (ConditionStatus::False, Reason::OverCapacity));
        assert!(not.message.contains("n/c") && not.message.contains("10B more"), "{}", not.message);
        let lost = BudgetResult {
            overcommitted: control_plane::TierBytes { dram: 0, ssd: 1 << 30 },
            ..at(BudgetOutcome::Applied)
        };
        assert!(feasible(&[], &[lost]).message.contains("1Gi on devices"));
        let spec = tenant(serde_json::json!({ "budget": { "dram": { "limit": "1Gi" } } }));
        let (_, findings) = compute(&spec, &[], &[refused], None, []);
        let of_kind = |kind| findings.iter().find(|found| found.kind == kind).expect("a condition");
        assert_eq!(of_kind(Type::BudgetApplied).reason, Reason::OverCapacity);
        assert_eq!(of_kind(Type::Ready).status, ConditionStatus::False);
    }

    #[test]
    fn blocked_purge_names_the_nodes_and_the_remedy() {
        let goes = |finalizers: serde_json::Value| -> CacheTenant {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "spec": {},
                "metadata": { "name": "t", "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers },
            }))
            .expect("a tenant")
        };
        let held = at(BudgetOutcome::BlocksRemain("n1 is absent".to_owned()));
        let message_of =
            |tenant: &CacheTenant| blocked(tenant, std::slice::from_ref(&held)).expect("a condition").message;
        let purged = message_of(&goes(serde_json::json!([BUDGET_FINALIZER, PURGE_FINALIZER])));
        assert!(
            purged.contains("n/c") && purged.contains("n1 is absent") && purged.contains(PURGE_FINALIZER)
        );
        assert!(
            blocked(&goes(serde_json::json!([BUDGET_FINALIZER])), &[at(BudgetOutcome::Applied)]).is_none()
        );
    }

    #[test]
    fn completed_purge_names_skipped_clusters() {
        let checked = ["n/c".to_owned()];
        let whole = purged(&checked, &[]);
        assert_eq!((whole.status, whole.reason), (ConditionStatus::False, Reason::AsDesired));
        assert_eq!(whole.message, "no node of n/c holds blocks of the tenant");
        let part = purged(&checked, &["n/d".to_owned(), "n/e".to_owned()]);
        assert_eq!((part.status, part.reason), (ConditionStatus::Unknown, Reason::Releasing));
        assert!(part.message.starts_with("no node of n/c holds") && part.message.contains(": n/d, n/e. "));
        let none = purged(&[], &["n/d".to_owned()]);
        assert!(
            none.message.starts_with("the tenant applies to no remaining KVCacheCluster"),
            "{}",
            none.message
        );
        assert!(!none.message.contains("no node of"), "no node was checked: {}", none.message);
    }

    #[test]
    fn budget_is_applied_once_all_control_planes_have_it() {
        let with = tenant(serde_json::json!({ "budget": { "dram": { "limit": "1Gi" } } }));
        let without = tenant(serde_json::json!({}));
        let condition = |tenant: &CacheTenant, results: &[BudgetResult]| {
            applied(tenant, results, None).map(|found| (found.status, found.reason))
        };
        let unreachable = at(BudgetOutcome::Unreachable("connection refused".to_owned()));
        assert_eq!(condition(&without, &[]), None);
        assert_eq!(condition(&without, &[at(BudgetOutcome::Applied)]), None);
        assert_eq!(
            condition(&without, &[at(BudgetOutcome::Foreign)]),
            Some((ConditionStatus::False, Reason::Conflict))
        );
        assert_eq!(
            condition(&with, &[at(BudgetOutcome::Applied)]),
            Some((ConditionStatus::True, Reason::AsDesired))
        );
        assert_eq!(condition(&with, &[]), Some((ConditionStatus::False, Reason::ReferenceNotFound)));
        let both = [at(BudgetOutcome::Applied), unreachable];
        assert_eq!(condition(&with, &both), Some((ConditionStatus::False, Reason::ControlPlaneUnreachable)));
    }
}
