//! What a tenant is. Pure.

use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason};
use reprise_crds::{CacheTenant, CacheTenantStatus};

use super::budget::{self, Outcome, Settled};
use super::dereference::{Place, Room};
use crate::control_plane;
use crate::names::{BUDGET_FINALIZER, PURGE_FINALIZER};
use crate::plan::Refusal;

/// What to say of a tenant.
pub fn of(
    tenant: &CacheTenant,
    rooms: &[Room],
    settled: &[Settled],
    refused: Option<&Refusal>,
    pods: Option<Finding>,
) -> (CacheTenantStatus, Vec<Finding>) {
    let mut findings = vec![match refused {
        Some(Refusal { reason, message }) => Finding::no(Type::Accepted, *reason, message),
        None => Finding::yes(Type::Accepted, Reason::AsDesired, "the spec is right"),
    }];
    findings.push(feasible(rooms, settled));
    findings.extend(applied(tenant, settled, refused));
    findings.extend(pods);
    let wrong = findings.iter().find(|found| found.status == ConditionStatus::False);
    let ready = match wrong {
        Some(found) => Finding::no(Type::Ready, found.reason, &found.message),
        None => Finding::yes(
            Type::Ready,
            Reason::AsDesired,
            "the limits on each node are in the agents' configuration, and control planes have its budget",
        ),
    };
    findings.push(ready);
    findings.extend(blocked(tenant, settled));
    (CacheTenantStatus::default(), findings)
}

/// Whether control planes have the budget; nothing where there is none to have.
fn applied(tenant: &CacheTenant, settled: &[Settled], refused: Option<&Refusal>) -> Option<Finding> {
    let kind = Type::BudgetApplied;
    let wanted = budget::wanted(tenant);
    if let Some(refused) = refused {
        let message = "the spec is not accepted, and control planes keep what they have";
        return wanted.is_some().then(|| Finding::no(kind, refused.reason, message));
    }
    let wrong = settled.iter().find_map(|settled| {
        let cluster = &settled.cluster;
        let (reason, message) = match &settled.outcome {
            Outcome::Kept | Outcome::Held(_) => return None,
            Outcome::Untold(words) => (
                Reason::ControlPlaneUnreachable,
                format!("the control plane of {cluster} could not be told the budget, and is tried again: {words}"),
            ),
            Outcome::Refused(words) => {
                (Reason::OverCapacity, format!("the control plane of {cluster} refuses the budget: {words}"))
            }
            Outcome::Foreign => (
                Reason::Conflict,
                format!(
                    "the control plane of {cluster} has a budget for the tenant that somebody else has set: write it into budget, or \
                     remove it by reprise tenant remove"
                ),
            ),
            Outcome::Paused => (
                Reason::Paused,
                format!("KVCacheCluster {cluster} is paused, and its control plane has another budget"),
            ),
        };
        Some(Finding::no(kind, reason, message))
    });
    if wrong.is_some() {
        return wrong;
    }
    wanted?;
    if settled.is_empty() {
        let message = "no KVCacheCluster has the tenant: make one, or correct clusters";
        return Some(Finding::no(kind, Reason::ReferenceNotFound, message));
    }
    let clusters: Vec<&str> = settled.iter().map(|settled| settled.cluster.as_str()).collect();
    let message = format!("the control planes of {} have it", clusters.join(", "));
    Some(Finding::yes(kind, Reason::AsDesired, message))
}

/// Only while the tenant is being deleted and a control plane has its budget still.
fn blocked(tenant: &CacheTenant, settled: &[Settled]) -> Option<Finding> {
    tenant.metadata.deletion_timestamp.as_ref()?;
    let left = settled.iter().find(|settled| settled.outcome != Outcome::Kept)?;
    let cluster = &left.cluster;
    let why = match &left.outcome {
        Outcome::Untold(words) | Outcome::Refused(words) | Outcome::Held(words) => words.as_str(),
        Outcome::Paused => "the cluster is paused",
        Outcome::Foreign | Outcome::Kept => "it is somebody else's",
    };
    let message = if budget::is_purging(tenant) {
        format!(
            "nodes of {cluster} may hold blocks of the tenant still, which is looked at again: {why}. To leave them there, remove the finalizer \
             {PURGE_FINALIZER}"
        )
    } else {
        format!(
            "the control plane of {cluster} may have the tenant's budget still, which is tried again: {why}. To leave it there, remove the \
             finalizer {BUDGET_FINALIZER}"
        )
    };
    Some(Finding::yes(Type::DeletionBlocked, Reason::Releasing, message))
}

/// What a purge has come to: true of clusters that were asked, and of no others.
pub fn purged(asked: &[String], unasked: &[String]) -> Finding {
    let done = match asked {
        [] => "no KVCacheCluster that stays has the tenant, and nobody was asked for its blocks".to_owned(),
        asked => format!("no node of {} has a block of the tenant any more", asked.join(", ")),
    };
    let kind = Type::DeletionBlocked;
    if unasked.is_empty() {
        return Finding::no(kind, Reason::AsDesired, done);
    }
    let message = format!(
        "{done}; not asked, since they are being deleted: {}. What their nodes have on devices that are kept comes back with a KVCacheCluster that \
         is made anew there: purge the tenant again then",
        unasked.join(", ")
    );
    // Somebody has to look at it, so it is not told as what is good.
    Finding::unknown(kind, Reason::Releasing, message)
}

/// Whether reservations fit: those of budgets what the control planes count, those on each node what each has.
fn feasible(rooms: &[Room], settled: &[Settled]) -> Finding {
    let refused = settled.iter().find_map(|settled| match &settled.outcome {
        Outcome::Refused(words) => Some(format!("{}: {words}", settled.cluster)),
        _ => None,
    });
    let exceeds = |settled: &&Settled| settled.overcommitted != control_plane::Room::default();
    let lost = settled.iter().find(exceeds).map(|settled| {
        let control_plane::Room { dram, ssd } = settled.overcommitted;
        format!(
            "the reservations of all budgets exceed what living nodes of {} have by {} of memory and {} of devices: lower \
             budget.dram.reserved or budget.ssd.reserved of some tenants, or add nodes",
            settled.cluster,
            Quantity::of_bytes(dram),
            Quantity::of_bytes(ssd),
        )
    });
    match refused.or(lost) {
        Some(message) => Finding::no(Type::QuotaFeasible, Reason::OverCapacity, message),
        None => fits_nodes(rooms),
    }
}

/// Whether the reservations of all tenants together fit every node: as clusters say that they are made, and as each has said what it has.
fn fits_nodes(rooms: &[Room]) -> Finding {
    let kind = Type::QuotaFeasible;
    let Some(room) = rooms.iter().find(|room| room.reserved > room.there) else {
        if rooms.iter().any(|room| matches!(room.place, Place::Node(_))) {
            return Finding::yes(kind, Reason::AsDesired, "the reservations of all tenants fit every node");
        }
        return Finding::unknown(kind, Reason::NotReported, "no node has said yet what it has");
    };
    let (field, there, reserved) =
        (room.field, Quantity::of_bytes(room.there), Quantity::of_bytes(room.reserved));
    let tenants = room.tenants.join(", ");
    let message = match &room.place {
        Place::Node(node) => format!(
            "node {node} has {there} and {field} of all tenants together is {reserved}: lower that of {tenants}, or give the node more"
        ),
        Place::Cluster(cluster, left_out) => format!(
            "cache.dram of KVCacheCluster {cluster} is {there} and {field} of all tenants together, each in whole regions, is {reserved}: lower \
             that of {tenants}, or raise cache.dram. Until then its agents reserve nothing for {}",
            left_out.join(", ")
        ),
    };
    Finding::no(kind, Reason::OverCapacity, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_above_what_a_node_has_are_not_feasible() {
        let room = |reserved: u64| Room {
            place: Place::Node("n1".to_owned()),
            field: "perNode.ssd.reserved",
            there: 1 << 30,
            reserved,
            tenants: vec!["a".to_owned(), "b".to_owned()],
        };
        assert_eq!(feasible(&[], &[]).status, ConditionStatus::Unknown);
        assert_eq!(feasible(&[room(1 << 30)], &[]).status, ConditionStatus::True);
        let not = feasible(&[room(0), room(3 << 30)], &[]);
        assert_eq!((not.status, not.reason), (ConditionStatus::False, Reason::OverCapacity));
        assert!(not.message.contains("has 1Gi") && not.message.contains("a, b"), "{}", not.message);
        let of_cluster = |reserved: u64| {
            let place = Place::Cluster("n/c".to_owned(), vec!["b".to_owned()]);
            Room { place, field: "perNode.dram.reserved", ..room(reserved) }
        };
        assert_eq!(feasible(&[of_cluster(1)], &[]).status, ConditionStatus::Unknown, "no node has said it");
        let not = feasible(&[of_cluster(3 << 30), room(0)], &[]);
        assert_eq!((not.status, not.reason), (ConditionStatus::False, Reason::OverCapacity));
        for words in ["cache.dram of KVCacheCluster n/c is 1Gi", "is 3Gi", "reserve nothing for b"] {
            assert!(not.message.contains(words), "{words}: {}", not.message);
        }
    }

    fn at(outcome: Outcome) -> Settled {
        Settled { cluster: "n/c".to_owned(), outcome, overcommitted: control_plane::Room::default() }
    }

    fn tenant(spec: serde_json::Value) -> CacheTenant {
        CacheTenant::new("t", serde_json::from_value(spec).expect("a spec"))
    }

    #[test]
    fn what_control_planes_refuse_or_cannot_keep_is_said_in_their_words() {
        let refused = at(Outcome::Refused("dram: 10B more than there is".to_owned()));
        let not = feasible(&[], &[at(Outcome::Kept), refused.clone()]);
        assert_eq!((not.status, not.reason), (ConditionStatus::False, Reason::OverCapacity));
        assert!(not.message.contains("n/c") && not.message.contains("10B more"), "{}", not.message);
        let lost =
            Settled { overcommitted: control_plane::Room { dram: 0, ssd: 1 << 30 }, ..at(Outcome::Kept) };
        assert!(feasible(&[], &[lost]).message.contains("1Gi of devices"));
        let spec = tenant(serde_json::json!({ "budget": { "dram": { "limit": "1Gi" } } }));
        let (_, findings) = of(&spec, &[], &[refused], None, None);
        let of_kind = |kind| findings.iter().find(|found| found.kind == kind).expect("said");
        assert_eq!(of_kind(Type::BudgetApplied).reason, Reason::OverCapacity);
        assert_eq!(of_kind(Type::Ready).status, ConditionStatus::False);
    }

    #[test]
    fn a_tenant_that_is_purged_names_who_may_hold_its_blocks_and_what_to_do() {
        let goes = |finalizers: serde_json::Value| -> CacheTenant {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "spec": {},
                "metadata": { "name": "t", "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers },
            }))
            .expect("a tenant")
        };
        let held = at(Outcome::Held("n1 is away".to_owned()));
        let said = |tenant: &CacheTenant| blocked(tenant, std::slice::from_ref(&held)).expect("said").message;
        let purged = said(&goes(serde_json::json!([BUDGET_FINALIZER, PURGE_FINALIZER])));
        assert!(purged.contains("n/c") && purged.contains("n1 is away") && purged.contains(PURGE_FINALIZER));
        assert!(blocked(&goes(serde_json::json!([BUDGET_FINALIZER])), &[at(Outcome::Kept)]).is_none());
    }

    #[test]
    fn a_purge_that_has_ended_says_who_was_not_asked() {
        let asked = ["n/c".to_owned()];
        let whole = purged(&asked, &[]);
        assert_eq!((whole.status, whole.reason), (ConditionStatus::False, Reason::AsDesired));
        assert_eq!(whole.message, "no node of n/c has a block of the tenant any more");
        let part = purged(&asked, &["n/d".to_owned(), "n/e".to_owned()]);
        assert_eq!((part.status, part.reason), (ConditionStatus::Unknown, Reason::Releasing));
        assert!(part.message.starts_with("no node of n/c has") && part.message.contains(": n/d, n/e. "));
        let none = purged(&[], &["n/d".to_owned()]);
        assert!(none.message.starts_with("no KVCacheCluster that stays has"), "{}", none.message);
        assert!(!none.message.contains("no node of"), "nobody has said that: {}", none.message);
    }

    #[test]
    fn a_budget_is_applied_when_all_control_planes_have_it() {
        let with = tenant(serde_json::json!({ "budget": { "dram": { "limit": "1Gi" } } }));
        let without = tenant(serde_json::json!({}));
        let said = |tenant: &CacheTenant, settled: &[Settled]| {
            applied(tenant, settled, None).map(|found| (found.status, found.reason))
        };
        let untold = at(Outcome::Untold("nobody listens".to_owned()));
        assert_eq!(said(&without, &[]), None);
        assert_eq!(said(&without, &[at(Outcome::Kept)]), None);
        assert_eq!(said(&without, &[at(Outcome::Foreign)]), Some((ConditionStatus::False, Reason::Conflict)));
        assert_eq!(said(&with, &[at(Outcome::Kept)]), Some((ConditionStatus::True, Reason::AsDesired)));
        assert_eq!(said(&with, &[]), Some((ConditionStatus::False, Reason::ReferenceNotFound)));
        let both = [at(Outcome::Kept), untold];
        assert_eq!(said(&with, &both), Some((ConditionStatus::False, Reason::ControlPlaneUnreachable)));
    }
}
