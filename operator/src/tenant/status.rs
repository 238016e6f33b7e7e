//! What a tenant is. Pure.

use reprise_crds::CacheTenantStatus;
use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason};

use super::dereference::Room;
use crate::plan::Refusal;

/// What to say of a tenant.
pub fn of(rooms: &[Room], refused: Option<&Refusal>) -> (CacheTenantStatus, Vec<Finding>) {
    let feasible = feasible(rooms);
    let accepted = match refused {
        Some(Refusal { reason, message }) => Finding::no(Type::Accepted, *reason, message),
        None => Finding::yes(Type::Accepted, Reason::AsDesired, "the spec is right"),
    };
    let wrong = [&accepted, &feasible].into_iter().find(|found| found.status == ConditionStatus::False);
    let ready = match wrong {
        Some(found) => Finding::no(Type::Ready, found.reason, &found.message),
        None => Finding::yes(
            Type::Ready,
            Reason::AsDesired,
            "the limits on each node are in the agents' configuration",
        ),
    };
    (CacheTenantStatus::default(), vec![accepted, feasible, ready])
}

/// Whether the reservations of all tenants together fit every node that has said what it has.
fn feasible(rooms: &[Room]) -> Finding {
    let kind = Type::QuotaFeasible;
    if rooms.is_empty() {
        return Finding::unknown(kind, Reason::NotReported, "no node has said yet what it has");
    }
    let Some(room) = rooms.iter().find(|room| room.reserved > room.there) else {
        return Finding::yes(kind, Reason::AsDesired, "the reservations of all tenants fit every node");
    };
    let message = format!(
        "node {} has {} and {} of all tenants together is {}: lower that of {}, or give the node more",
        room.node,
        Quantity::of_bytes(room.there),
        room.field,
        Quantity::of_bytes(room.reserved),
        room.tenants.join(", "),
    );
    Finding::no(kind, Reason::OverCapacity, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_above_what_a_node_has_are_not_feasible() {
        let room = |reserved: u64| Room {
            node: "n1".to_owned(),
            field: "perNode.ssd.reserved",
            there: 1 << 30,
            reserved,
            tenants: vec!["a".to_owned(), "b".to_owned()],
        };
        assert_eq!(feasible(&[]).status, ConditionStatus::Unknown);
        assert_eq!(feasible(&[room(1 << 30)]).status, ConditionStatus::True);
        let not = feasible(&[room(0), room(3 << 30)]);
        assert_eq!((not.status, not.reason), (ConditionStatus::False, Reason::OverCapacity));
        assert!(not.message.contains("has 1Gi") && not.message.contains("a, b"), "{}", not.message);
    }
}
