//! Allocations of one node when writes fail, other clients write concurrently, or granted controllers
//! disappear.

use std::sync::Arc;

use kube::ResourceExt;
use reprise_crds::CacheNode;
use reprise_crds::fields::Percent;
use reprise_crds::status::ConditionStatus;
use serde_json::{Value, json};

use super::stored::{ALL, Stored, with};
use super::{Accepted, Allocated, DeletionBlocked, FALSE, NodePresence, Programmed, Released, TRUE};
use crate::reconcile::allocation::violations::violation;
use crate::reconcile::names::QUEUES_FINALIZER;

/// Spec of an exclusive allocation.
fn own(more: Value) -> Value {
    with(json!({ "isolation": "ExclusiveController" }), more)
}

fn guaranteed() -> Value {
    own(json!({ "qos": "Guaranteed" }))
}

#[test]
fn failed_write_delays_only_allocations_that_need_its_pairs() {
    let mut stored = Stored::new();
    stored.create("ends", own(json!({ "ttl": "1m" })));
    stored.run_until_stable();
    stored.now = 60;
    stored.unwritable.insert("ends".to_owned());
    stored.create("needs", own(json!({})));
    stored.create("other", own(json!({})));
    assert_eq!(stored.run_pass(ALL), ["add-finalizer needs", "add-finalizer other"]);
    assert_eq!(stored.run_pass(ALL), ["grant other"], "the controller of the ending grant is not free");
    stored.expect("other", Allocated, TRUE, "AsDesired");
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new());
    stored.unwritable.clear();
    assert_eq!(stored.run_pass(ALL), ["end-grant ends", "grant needs"]);
    stored.run_until_stable();
    stored.expect("needs", Allocated, TRUE, "AsDesired");
}

#[test]
fn rejected_finalizer_prevents_only_its_own_grant_and_preempts_nothing() {
    let mut stored = Stored::new();
    stored.controllers = vec![("A", 32)];
    stored.create("effort", json!({ "qos": "BestEffort", "ttl": "1h", "queuePairs": 4 }));
    stored.run_until_stable();
    stored.create("own", guaranteed());
    stored.unwritable.insert("own".to_owned());
    stored.run_until_stable();
    stored.expect("effort", Allocated, TRUE, "AsDesired");
    stored.unwritable.clear();
    assert_eq!(stored.run_pass(ALL), ["add-finalizer own"]);
    stored.expect("effort", Allocated, TRUE, "AsDesired");
    assert_eq!(stored.run_pass(ALL), ["end-grant effort", "grant own"]);

    // Of two shared requests, one is granted without the other.
    let mut stored = Stored::new();
    stored.create("unwritable", json!({}));
    stored.create("good", json!({}));
    stored.unwritable.insert("unwritable".to_owned());
    assert_eq!(stored.run_pass(ALL), ["add-finalizer good"]);
    assert_eq!(stored.run_pass(ALL), ["grant good"]);
}

#[test]
fn unwritable_older_allocation_holds_no_pairs_back_from_a_younger_one() {
    let mut stored = Stored::new();
    stored.controllers = vec![("A", 32)];
    stored.create("older", json!({ "queuePairs": 12 }));
    stored.now = 1;
    stored.create("younger", json!({ "queuePairs": 8 }));
    stored.unwritable.insert("older".to_owned());
    assert_eq!(stored.run_pass(ALL), ["add-finalizer younger"]);
    assert_eq!(stored.run_pass(ALL), ["grant younger"]);
    stored.expect("younger", Allocated, TRUE, "AsDesired");
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new());
    stored.unwritable.clear();
    assert_eq!(stored.run_pass(ALL), ["update older"], "it waits for free pairs like any other");
    let message = stored.expect("older", Allocated, FALSE, "OverBudget");
    assert!(message.contains("A (budget 16; held by n/younger 8)"), "{message}");
    stored.delete("younger");
    stored.run_until_stable();
    stored.expect("older", Allocated, TRUE, "AsDesired");
}

#[test]
fn grants_the_first_writable_allocation_after_any_number_of_unwritable_ones() {
    let mut stored = Stored::new();
    for name in ["a", "b", "c", "d", "e"] {
        stored.now += 1;
        stored.create(name, json!({ "queuePairs": 16 }));
        stored.unwritable.insert(name.to_owned());
    }
    stored.now += 1;
    stored.create("last", json!({ "queuePairs": 16 }));
    assert_eq!(stored.run_pass(ALL), ["add-finalizer last"]);
    assert_eq!(stored.run_pass(ALL), ["grant last"]);
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new());
}

#[test]
fn allocation_that_fits_only_with_an_unwritable_one_waits_without_writes() {
    let mut stored = Stored::new();
    stored.create("holds", json!({ "qos": "BestEffort", "ttl": "1h", "queuePairs": 16 }));
    stored.run_until_stable();
    // Its name sorts before that of the one that preempts for both, so it gets its finalizer first.
    stored.create("also", json!({}));
    stored.create("own", guaranteed());
    stored.unwritable.insert("own".to_owned());
    stored.run_until_stable();
    stored.expect("holds", Allocated, TRUE, "AsDesired");
    stored.expect("also", Allocated, FALSE, "OverBudget");
    assert_eq!(stored.objects["also"].finalizers(), [QUEUES_FINALIZER]);
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new());
    stored.unwritable.clear();
    stored.run_until_stable();
    for granted in ["also", "own"] {
        stored.expect(granted, Allocated, TRUE, "AsDesired");
    }
}

#[test]
fn pairs_that_a_later_preemption_frees_are_granted_later() {
    let mut stored = Stored::new();
    stored.create("both", json!({ "qos": "BestEffort", "ttl": "1h", "queuePairs": 16 }));
    stored.run_until_stable();
    stored.create("shares", json!({}));
    // One of both controllers goes to the guaranteed allocation, the other becomes free.
    stored.create("own", guaranteed());
    stored.unwritable.insert("own".to_owned());
    stored.run_until_stable();
    stored.expect("both", Allocated, TRUE, "AsDesired");
    assert_eq!(stored.grants("shares"), json!([]));
    stored.unwritable.clear();
    stored.run_until_stable();
    for granted in ["own", "shares"] {
        stored.expect(granted, Allocated, TRUE, "AsDesired");
    }
    stored.expect("both", Released, TRUE, "TakenBack");
}

#[test]
fn grants_nothing_more_by_a_decision_after_a_conflict() {
    let mut stored = Stored::new();
    stored.create("x", json!({ "queuePairs": 1 }));
    stored.run_until_stable();
    stored.create("y", json!({ "queuePairs": 1 }));
    assert_eq!(stored.run_pass(ALL), ["add-finalizer y"]);
    // The agent creates queues, which must be reported in the status.
    stored.queues.insert("uid-x".to_owned(), 2);
    let due = stored.due();
    assert_eq!(due.len(), 2);
    stored.modify("x");
    assert_eq!(stored.execute(due), Vec::<String>::new());
    assert_eq!(stored.run_pass(ALL), ["update x", "grant y"]);
}

#[test]
fn late_grant_of_a_former_leader_is_rejected_or_known_whenever_it_arrives() {
    let mut landed = Vec::new();
    for point in 0..6 {
        let mut stored = Stored::new();
        stored.create("x", own(json!({})));
        assert_eq!(stored.run_pass(ALL), ["add-finalizer x"]);
        let late = stored.due();
        assert_eq!(late.len(), 1, "x gets the first controller");
        // Another replica takes over. A new allocation that is served first gets the controller.
        stored.fresh_finalizers.clear();
        stored.create("y", guaranteed());
        let mut before = point;
        let mut late = Some(late);
        for _ in 0..8 {
            let mut first = stored.due();
            let rest = first.split_off(before.min(first.len()));
            before -= first.len();
            stored.execute(first);
            if before == 0
                && let Some(late) = late.take()
            {
                let fresh = stored.fresh_finalizers.clone();
                landed.push(stored.execute(late));
                stored.fresh_finalizers = fresh;
            }
            stored.execute(rest);
        }
        for name in ["x", "y"] {
            stored.expect(name, Allocated, TRUE, "AsDesired");
        }
        assert_ne!(stored.grants("x")[0]["serial"], stored.grants("y")[0]["serial"]);
    }
    assert_eq!(landed[0], ["grant x"], "there is no other decision yet");
    assert!(landed[2..].iter().all(Vec::is_empty), "{landed:?}");
    assert_eq!(landed.len(), 6, "the late grant arrives in every run");
}

#[test]
fn reports_grants_on_lost_or_overcommitted_controllers_with_the_remedy() {
    let mut stored = Stored::new();
    stored.create("x", json!({ "queuePairs": 6 }));
    stored.create("y", json!({ "queuePairs": 5 }));
    stored.run_until_stable();
    stored.controllers = vec![("B", 32)];
    assert_eq!(stored.run_pass(ALL), ["update x", "update y"]);
    let message = stored.expect("x", Allocated, FALSE, "NoDevices");
    for part in [
        "12 queue pairs",
        "node n1 no longer has controller A",
        "restore the controller",
        "delete this GPUQueueAllocation",
    ] {
        assert!(message.contains(part), "{message}");
    }
    stored.expect("x", Programmed, FALSE, "Progressing");
    assert_ne!(stored.grants("x"), json!([]), "the grant remains");
    stored.controllers.push(("A", 32));
    stored.run_until_stable();
    stored.expect("x", Allocated, TRUE, "AsDesired");

    stored.percent = Percent(25);
    stored.run_until_stable();
    for name in ["x", "y"] {
        let message = stored.expect(name, Allocated, FALSE, "OverBudget");
        for part in ["A (budget 8; held by n/x 6, n/y 5)", "maxGpuQueuePercent", "delete one of these"] {
            assert!(message.contains(part), "{message}");
        }
    }
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new());
    stored.delete("x");
    stored.run_until_stable();
    stored.expect("y", Allocated, TRUE, "AsDesired");
}

#[test]
fn grants_end_when_the_node_no_longer_belongs_to_a_cluster() {
    let mut stored = Stored::new();
    for name in ["stays", "goes"] {
        stored.create(name, json!({ "queuePairs": 4 }));
        stored.queues.insert(format!("uid-{name}"), 8);
    }
    stored.run_until_stable();
    stored.delete("goes");
    stored.run_until_stable();
    stored.expect("goes", DeletionBlocked, TRUE, "Releasing");
    stored.presence = NodePresence::Removed;
    stored.queues.clear();
    stored.run_until_stable();
    assert!(!stored.objects.contains_key("goes"));
    let message = stored.expect("stays", Released, TRUE, "AgentGone");
    assert!(
        message.contains("node n1 no longer belongs to a KVCacheCluster")
            && message.contains("agents.nodeSelector"),
        "{message}"
    );
    stored.expect("stays", Accepted, FALSE, "ReferenceNotFound");
    assert!(stored.objects["stays"].finalizers().is_empty());
}

#[test]
fn frees_pairs_of_a_deleted_allocation_with_foreign_finalizers() {
    let mut stored = Stored::new();
    stored.controllers = vec![("A", 32)];
    stored.create("x", own(json!({})));
    stored.run_until_stable();
    stored.add_foreign_finalizer("x");
    stored.delete("x");
    stored.create("y", own(json!({})));
    assert_eq!(stored.run_pass(ALL), ["add-finalizer y", "end-grant x"]);
    stored.expect("x", Released, TRUE, "AsDesired");
    assert_eq!(stored.run_pass(ALL), ["remove-finalizer x", "grant y"]);
    assert_eq!(stored.objects["x"].finalizers(), ["others.example/hold"]);
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new());

    // The state after an operator removed its finalizer and was killed.
    let mut stored = Stored::new();
    stored.create("x", json!({}));
    stored.run_until_stable();
    stored.add_foreign_finalizer("x");
    stored.delete("x");
    let object = stored.objects.get_mut("x").expect("an object");
    object.finalizers_mut().retain(|one| one != QUEUES_FINALIZER);
    assert_eq!(stored.run_pass(ALL), ["end-grant x"]);
    assert_eq!(stored.grants("x"), json!([]));
}

#[test]
fn grant_status_is_unknown_while_the_agent_has_not_reported() {
    let mut stored = Stored::new();
    stored.create("x", json!({}));
    stored.run_until_stable();
    let mut found = stored.found();
    let mut node = CacheNode::clone(found.cache_node.as_ref().expect("a CacheNode"));
    node.status = None;
    found.cache_node = Some(Arc::new(node));
    let violation = violation(&stored.objects["x"], &found).expect("a violation");
    assert_eq!((violation.kind, violation.status), (Allocated, ConditionStatus::Unknown));
    assert!(violation.message.contains("node n1 has not reported"), "{}", violation.message);
}
