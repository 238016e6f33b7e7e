//! Computes the status of a tenant. Pure.

use reprise_crds::CacheTenant;
use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason};

use super::NO_CLUSTER;
use super::budget::{self, BudgetResult};
use crate::framework::refusal::{Refusal, accepted};
use crate::reconcile::control_plane::TierBytes;
use crate::reconcile::names::{BUDGET_FINALIZER, PURGE_FINALIZER};

/// Computes the conditions of a tenant. `of_nodes` is that of reservations per node, and `more` also affects `Ready`.
pub fn compute(
    tenant: &CacheTenant,
    of_nodes: Finding,
    results: &[BudgetResult],
    refused: Option<&Refusal>,
    more: impl IntoIterator<Item = Finding>,
) -> Vec<Finding> {
    let mut findings = vec![accepted(refused), infeasible(results).unwrap_or(of_nodes)];
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
    findings
}

/// Returns condition `BudgetApplied`; `None` if there is no budget to apply.
fn applied(tenant: &CacheTenant, results: &[BudgetResult], refused: Option<&Refusal>) -> Option<Finding> {
    let kind = Type::BudgetApplied;
    let wanted = budget::desired(tenant);
    if let Some(refused) = refused {
        let message = "the spec is not accepted, so control planes keep their budgets";
        return wanted.is_some().then(|| Finding::no(kind, refused.reason, message));
    }
    let failures = results.iter().filter_map(|result| result.outcome.as_ref().err());
    if let Some(failure) = failures.into_iter().find(|failure| failure.reason != Reason::Releasing) {
        return Some(Finding::no(kind, failure.reason, &failure.message));
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
    let failure = results.iter().find_map(|result| result.outcome.as_ref().err())?;
    let (kept, finalizer) = match budget::is_purging(tenant) {
        true => ("blocks", PURGE_FINALIZER),
        false => ("budget", BUDGET_FINALIZER),
    };
    let message = format!(
        "{}. The operator retries; to keep the {kept} of the tenant, remove finalizer {finalizer}",
        failure.message
    );
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

/// Returns condition `QuotaFeasible` if budget reservations do not fit the control planes' capacity.
fn infeasible(results: &[BudgetResult]) -> Option<Finding> {
    let failures = results.iter().filter_map(|result| result.outcome.as_ref().err());
    let rejected = failures.into_iter().find(|failure| failure.reason == Reason::OverCapacity);
    let lost = || {
        let lost = results.iter().find(|result| result.overcommitted != TierBytes::default())?;
        let TierBytes { dram, ssd } = lost.overcommitted;
        Some(format!(
            "the reservations of all budgets exceed the capacity of living nodes of {} by {} of memory and {} on devices: lower \
             budget.dram.reserved or budget.ssd.reserved of some tenants, or add nodes",
            lost.cluster,
            Quantity::of_bytes(dram),
            Quantity::of_bytes(ssd),
        ))
    };
    let message = rejected.map(|failure| failure.message.clone()).or_else(lost)?;
    Some(Finding::no(Type::QuotaFeasible, Reason::OverCapacity, message))
}

#[cfg(test)]
mod tests {
    use reprise_crds::status::ConditionStatus::{False, Unknown};

    use super::*;

    fn at(is_member: bool, ssd: u64) -> BudgetResult {
        let overcommitted = TierBytes { dram: 0, ssd };
        BudgetResult { cluster: "n/c".to_owned(), is_member, outcome: Ok(()), overcommitted }
    }

    #[test]
    fn reservations_above_the_capacity_of_living_nodes_are_not_feasible() {
        assert_eq!(infeasible(&[at(true, 0)]), None);
        let message = infeasible(&[at(true, 0), at(true, 1 << 30)]).expect("the condition").message;
        assert!(message.contains("n/c by 0 of memory and 1Gi on devices"), "{message}");
    }

    #[test]
    fn completed_purge_names_checked_and_skipped_clusters() {
        let skipped = ["n/d".to_owned(), "n/e".to_owned()];
        let nowhere = "the tenant applies to no remaining KVCacheCluster";
        for (is_member, skipped, status, reason, begin, end) in [
            (true, &[][..], False, Reason::AsDesired, "no node of n/c holds", "of the tenant"),
            (true, &skipped[..], Unknown, Reason::Releasing, "no node of n/c holds", "again then"),
            // At the other cluster only the budget was removed.
            (false, &skipped[..], Unknown, Reason::Releasing, nowhere, "again then"),
        ] {
            let found = purged(&[at(is_member, 0)], skipped);
            assert_eq!((found.status, found.reason), (status, reason));
            assert!(found.message.starts_with(begin) && found.message.ends_with(end), "{}", found.message);
            assert_eq!(found.message.contains(": n/d, n/e. "), !skipped.is_empty(), "{}", found.message);
        }
    }
}
