//! Computes the status of a tenant. Pure.

use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason};
use reprise_crds::{CacheTenant, CacheTenantStatus};

use super::NO_CLUSTER;
use super::budget::{self, BudgetOutcome, BudgetResult};
use super::dereference::{CapacityCheck, CapacityScope};
use crate::framework::refusal::{Refusal, accepted};
use crate::reconcile::control_plane::TierBytes;
use crate::reconcile::names::{BUDGET_FINALIZER, PURGE_FINALIZER};

/// Computes the status and conditions of a tenant.
pub fn compute(
    tenant: &CacheTenant,
    checks: &[CapacityCheck],
    results: &[BudgetResult],
    refused: Option<&Refusal>,
    more: impl IntoIterator<Item = Finding>,
) -> (CacheTenantStatus, Vec<Finding>) {
    let mut findings = vec![accepted(refused), feasible(checks, results)];
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
        return Some(Finding::no(kind, Reason::ReferenceNotFound, NO_CLUSTER));
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

/// Returns the result of a purge, for the clusters that were checked and those that were skipped because they are being
/// deleted.
pub fn purged(results: &[BudgetResult], skipped: &[String]) -> Finding {
    let checked = results.iter().filter(|result| result.is_member);
    let checked: Vec<&str> = checked.map(|result| result.cluster.as_str()).collect();
    let done = if checked.is_empty() {
        "the tenant applies to no remaining KVCacheCluster, so no nodes were checked for its blocks"
            .to_owned()
    } else {
        format!("no node of {} holds blocks of the tenant", checked.join(", "))
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
    let lost = results.iter().find(|result| result.overcommitted != TierBytes::default()).map(|result| {
        let TierBytes { dram, ssd } = result.overcommitted;
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
    use reprise_crds::status::ConditionStatus::{False, True, Unknown};

    use super::*;

    fn at(is_member: bool, ssd: u64) -> BudgetResult {
        let (outcome, overcommitted) = (BudgetOutcome::Applied, TierBytes { dram: 0, ssd });
        BudgetResult { cluster: "n/c".to_owned(), is_member, outcome, overcommitted }
    }

    #[test]
    fn reservations_above_the_capacity_of_nodes_are_not_feasible() {
        let check = |reserved: u64| CapacityCheck {
            scope: CapacityScope::Node("n1".to_owned()),
            field: "perNode.ssd.reserved",
            available: 1 << 30,
            reserved,
            tenants: vec!["a".to_owned(), "b".to_owned()],
        };
        let of_cluster = |reserved: u64| {
            let scope = CapacityScope::Cluster("n/c".to_owned(), vec!["b".to_owned()]);
            CapacityCheck { scope, field: "perNode.dram.reserved", ..check(reserved) }
        };
        let cluster_words = ["of KVCacheCluster n/c is 1Gi", "is 3Gi in total", "reserve nothing for b"];
        for (checks, results, status, words) in [
            (vec![], vec![], Unknown, &["no node has reported"][..]),
            (vec![of_cluster(1)], vec![], Unknown, &["no node has reported"][..]),
            (vec![check(1 << 30)], vec![at(true, 0)], True, &["fit every node"][..]),
            (vec![check(0), check(3 << 30)], vec![], False, &["n1 has 1Gi", "3Gi in total", "a, b"][..]),
            (vec![of_cluster(3 << 30), check(0)], vec![], False, &cluster_words[..]),
            (vec![check(0)], vec![at(true, 1 << 30)], False, &["n/c by 0 of memory and 1Gi on devices"][..]),
        ] {
            let found = feasible(&checks, &results);
            assert_eq!(found.status, status, "{}", found.message);
            for words in words {
                assert!(found.message.contains(words), "{words}: {}", found.message);
            }
        }
    }

    #[test]
    fn completed_purge_names_checked_and_skipped_clusters() {
        let skipped = ["n/d".to_owned(), "n/e".to_owned()];
        let nowhere = "the tenant applies to no remaining KVCacheCluster";
        for (results, skipped, status, reason, begin, end) in [
            (vec![at(true, 0)], &[][..], False, Reason::AsDesired, "no node of n/c holds", "of the tenant"),
            (
                vec![at(true, 0)],
                &skipped[..],
                Unknown,
                Reason::Releasing,
                "no node of n/c holds",
                "again then",
            ),
            // At the other cluster only the budget was removed.
            (vec![at(false, 0)], &skipped[..], Unknown, Reason::Releasing, nowhere, "again then"),
        ] {
            let found = purged(&results, skipped);
            assert_eq!((found.status, found.reason), (status, reason));
            assert!(found.message.starts_with(begin) && found.message.ends_with(end), "{}", found.message);
            assert_eq!(found.message.contains(": n/d, n/e. "), !skipped.is_empty(), "{}", found.message);
        }
    }
}
