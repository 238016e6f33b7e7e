//! Allocations of a node when something cannot be written, others write meanwhile, or what was granted is not there any more.

use std::sync::Arc;

use kube::ResourceExt;
use reprise_crds::CacheNode;
use reprise_crds::fields::Percent;
use reprise_crds::status::ConditionStatus;
use serde_json::{Value, json};

use super::stored::{ALL, Stored, with};
use super::{Accepted, Allocated, DeletionBlocked, FALSE, Presence, Programmed, Released, TRUE};
use crate::allocation::standing::doubt;
use crate::names::QUEUES_FINALIZER;

/// Of a controller that nobody else has anything of.
fn own(more: Value) -> Value {
    with(json!({ "isolation": "ExclusiveController" }), more)
}

fn guaranteed() -> Value {
    own(json!({ "qos": "Guaranteed" }))
}

#[test]
fn one_that_cannot_be_written_stops_nobody_but_who_needs_its_room() {
    let mut stored = Stored::new();
    stored.make("ends", own(json!({ "ttl": "1m" })));
    stored.settle();
    stored.now = 60;
    stored.broken.insert("ends".to_owned());
    stored.make("needs", own(json!({})));
    stored.make("other", own(json!({})));
    assert_eq!(stored.turn(ALL), ["hold needs", "hold other"]);
    assert_eq!(stored.turn(ALL), ["grant other"], "the controller of the one that ends is not free");
    stored.expect("other", Allocated, TRUE, "AsDesired");
    assert_eq!(stored.turn(ALL), Vec::<String>::new());
    stored.broken.clear();
    assert_eq!(stored.turn(ALL), ["give back ends", "grant needs"]);
    stored.settle();
    stored.expect("needs", Allocated, TRUE, "AsDesired");
}

#[test]
fn a_finalizer_that_cannot_be_written_stops_its_own_grant_and_takes_nothing_back() {
    let mut stored = Stored::new();
    stored.controllers = vec![("A", 32)];
    stored.make("effort", json!({ "qos": "BestEffort", "ttl": "1h", "queuePairs": 4 }));
    stored.settle();
    stored.make("own", guaranteed());
    stored.broken.insert("own".to_owned());
    stored.settle();
    stored.expect("effort", Allocated, TRUE, "AsDesired");
    stored.broken.clear();
    assert_eq!(stored.turn(ALL), ["hold own"]);
    stored.expect("effort", Allocated, TRUE, "AsDesired");
    assert_eq!(stored.turn(ALL), ["give back effort", "grant own"]);

    // Of two that want to share, one goes without the other.
    let mut stored = Stored::new();
    stored.make("broken", json!({}));
    stored.make("good", json!({}));
    stored.broken.insert("broken".to_owned());
    assert_eq!(stored.turn(ALL), ["hold good"]);
    assert_eq!(stored.turn(ALL), ["grant good"]);
}

#[test]
fn an_older_one_that_nobody_may_write_keeps_no_room_from_a_younger_one() {
    let mut stored = Stored::new();
    stored.controllers = vec![("A", 32)];
    stored.make("older", json!({ "queuePairs": 12 }));
    stored.now = 1;
    stored.make("younger", json!({ "queuePairs": 8 }));
    stored.broken.insert("older".to_owned());
    assert_eq!(stored.turn(ALL), ["hold younger"]);
    assert_eq!(stored.turn(ALL), ["grant younger"]);
    stored.expect("younger", Allocated, TRUE, "AsDesired");
    assert_eq!(stored.turn(ALL), Vec::<String>::new());
    stored.broken.clear();
    assert_eq!(stored.turn(ALL), ["say older"], "it waits for room like any other");
    let words = stored.expect("older", Allocated, FALSE, "OverBudget");
    assert!(words.contains("A (lends 16; held by n/younger 8)"), "{words}");
    stored.delete("younger");
    stored.settle();
    stored.expect("older", Allocated, TRUE, "AsDesired");
}

#[test]
fn however_many_nobody_may_write_the_first_that_can_be_written_is_served() {
    let mut stored = Stored::new();
    for name in ["a", "b", "c", "d", "e"] {
        stored.now += 1;
        stored.make(name, json!({ "queuePairs": 16 }));
        stored.broken.insert(name.to_owned());
    }
    stored.now += 1;
    stored.make("last", json!({ "queuePairs": 16 }));
    assert_eq!(stored.turn(ALL), ["hold last"]);
    assert_eq!(stored.turn(ALL), ["grant last"]);
    assert_eq!(stored.turn(ALL), Vec::<String>::new());
}

#[test]
fn one_that_fits_only_beside_one_that_nobody_may_write_waits_without_a_write() {
    let mut stored = Stored::new();
    stored.make("holds", json!({ "qos": "BestEffort", "ttl": "1h", "queuePairs": 16 }));
    stored.settle();
    // Its name is before that of the one that takes back for both, so it gets its finalizer first.
    stored.make("also", json!({}));
    stored.make("own", guaranteed());
    stored.broken.insert("own".to_owned());
    stored.settle();
    stored.expect("holds", Allocated, TRUE, "AsDesired");
    stored.expect("also", Allocated, FALSE, "OverBudget");
    assert_eq!(stored.objects["also"].finalizers(), [QUEUES_FINALIZER]);
    assert_eq!(stored.turn(ALL), Vec::<String>::new());
    stored.broken.clear();
    stored.settle();
    for granted in ["also", "own"] {
        stored.expect(granted, Allocated, TRUE, "AsDesired");
    }
}

#[test]
fn what_would_be_left_by_one_that_is_taken_back_later_is_lent_later() {
    let mut stored = Stored::new();
    stored.make("both", json!({ "qos": "BestEffort", "ttl": "1h", "queuePairs": 16 }));
    stored.settle();
    stored.make("shares", json!({}));
    // Of both controllers one is for the guaranteed one, and the other is what is left.
    stored.make("own", guaranteed());
    stored.broken.insert("own".to_owned());
    stored.settle();
    stored.expect("both", Allocated, TRUE, "AsDesired");
    assert_eq!(stored.grants("shares"), json!([]));
    stored.broken.clear();
    stored.settle();
    for granted in ["own", "shares"] {
        stored.expect(granted, Allocated, TRUE, "AsDesired");
    }
    stored.expect("both", Released, TRUE, "TakenBack");
}

#[test]
fn when_somebody_else_has_written_meanwhile_nothing_more_is_granted_by_that_decision() {
    let mut stored = Stored::new();
    stored.make("x", json!({ "queuePairs": 1 }));
    stored.settle();
    stored.make("y", json!({ "queuePairs": 1 }));
    assert_eq!(stored.turn(ALL), ["hold y"]);
    // The agent makes queues, which is to be said.
    stored.queues.insert("uid-x".to_owned(), 2);
    let due = stored.due();
    assert_eq!(due.len(), 2);
    stored.touch("x");
    assert_eq!(stored.carry_out(due), Vec::<String>::new());
    assert_eq!(stored.turn(ALL), ["say x", "grant y"]);
}

#[test]
fn a_grant_of_a_former_replica_is_refused_or_known_whenever_it_arrives() {
    let mut landed = Vec::new();
    for point in 0..6 {
        let mut stored = Stored::new();
        stored.make("x", own(json!({})));
        assert_eq!(stored.turn(ALL), ["hold x"]);
        let late = stored.due();
        assert_eq!(late.len(), 1, "x gets the first controller");
        // Another replica works, and somebody has come who is served before: he gets that controller.
        stored.held.clear();
        stored.make("y", guaranteed());
        let mut before = point;
        let mut late = Some(late);
        for _ in 0..8 {
            let mut first = stored.due();
            let rest = first.split_off(before.min(first.len()));
            before -= first.len();
            stored.carry_out(first);
            if before == 0
                && let Some(late) = late.take()
            {
                let held = stored.held.clone();
                landed.push(stored.carry_out(late));
                stored.held = held;
            }
            stored.carry_out(rest);
        }
        for name in ["x", "y"] {
            stored.expect(name, Allocated, TRUE, "AsDesired");
        }
        assert_ne!(stored.grants("x")[0]["serial"], stored.grants("y")[0]["serial"]);
    }
    assert_eq!(landed[0], ["grant x"], "nobody has decided otherwise yet");
    assert!(landed[2..].iter().all(Vec::is_empty), "{landed:?}");
    assert_eq!(landed.len(), 6, "it arrives each time");
}

#[test]
fn a_grant_whose_controller_is_gone_or_lends_less_says_so_and_what_to_do() {
    let mut stored = Stored::new();
    stored.make("x", json!({ "queuePairs": 6 }));
    stored.make("y", json!({ "queuePairs": 5 }));
    stored.settle();
    stored.controllers = vec![("B", 32)];
    assert_eq!(stored.turn(ALL), ["say x", "say y"]);
    let words = stored.expect("x", Allocated, FALSE, "NoDevices");
    for part in ["12 queue pairs", "node n1 has no controller A", "bring it back", "delete this one"] {
        assert!(words.contains(part), "{words}");
    }
    stored.expect("x", Programmed, FALSE, "Progressing");
    assert_ne!(stored.grants("x"), json!([]), "the grant stands");
    stored.controllers.push(("A", 32));
    stored.settle();
    stored.expect("x", Allocated, TRUE, "AsDesired");

    stored.lent = Percent(25);
    stored.settle();
    for name in ["x", "y"] {
        let words = stored.expect(name, Allocated, FALSE, "OverBudget");
        for part in ["A (lends 8; held by n/x 6, n/y 5)", "maxGpuQueuePercent", "delete one of these"] {
            assert!(words.contains(part), "{words}");
        }
    }
    assert_eq!(stored.turn(ALL), Vec::<String>::new());
    stored.delete("x");
    stored.settle();
    stored.expect("y", Allocated, TRUE, "AsDesired");
}

#[test]
fn with_the_agent_of_a_node_that_no_cluster_has_any_more_grants_end() {
    let mut stored = Stored::new();
    for name in ["stays", "goes"] {
        stored.make(name, json!({ "queuePairs": 4 }));
        stored.queues.insert(format!("uid-{name}"), 8);
    }
    stored.settle();
    stored.delete("goes");
    stored.settle();
    stored.expect("goes", DeletionBlocked, TRUE, "Releasing");
    stored.presence = Presence::Left;
    stored.queues.clear();
    stored.settle();
    assert!(!stored.objects.contains_key("goes"));
    let words = stored.expect("stays", Released, TRUE, "AgentGone");
    assert!(
        words.contains("no KVCacheCluster has node n1") && words.contains("agents.nodeSelector"),
        "{words}"
    );
    stored.expect("stays", Accepted, FALSE, "ReferenceNotFound");
    assert!(stored.objects["stays"].finalizers().is_empty());
}

#[test]
fn room_of_a_deleted_one_that_others_hold_is_free() {
    let mut stored = Stored::new();
    stored.controllers = vec![("A", 32)];
    stored.make("x", own(json!({})));
    stored.settle();
    stored.hold_for_others("x");
    stored.delete("x");
    stored.make("y", own(json!({})));
    assert_eq!(stored.turn(ALL), ["hold y", "give back x"]);
    stored.expect("x", Released, TRUE, "AsDesired");
    assert_eq!(stored.turn(ALL), ["let go x", "grant y"]);
    assert_eq!(stored.objects["x"].finalizers(), ["others.example/hold"]);
    assert_eq!(stored.turn(ALL), Vec::<String>::new());

    // As an operator left it that took its finalizer away and no more.
    let mut stored = Stored::new();
    stored.make("x", json!({}));
    stored.settle();
    stored.hold_for_others("x");
    stored.delete("x");
    let object = stored.objects.get_mut("x").expect("it is held");
    object.finalizers_mut().retain(|one| one != QUEUES_FINALIZER);
    assert_eq!(stored.turn(ALL), ["give back x"]);
    assert_eq!(stored.grants("x"), json!([]));
}

#[test]
fn a_grant_is_in_doubt_while_nobody_says_what_there_is() {
    let mut stored = Stored::new();
    stored.make("x", json!({}));
    stored.settle();
    let mut found = stored.found();
    let mut node = CacheNode::clone(found.cache_node.as_ref().expect("it is there"));
    node.status = None;
    found.cache_node = Some(Arc::new(node));
    let doubt = doubt(&stored.objects["x"], &found).expect("it is in doubt");
    assert_eq!((doubt.kind, doubt.status), (Allocated, ConditionStatus::Unknown));
    assert!(doubt.message.contains("node n1 has not said yet"), "{}", doubt.message);
}
