//! Allocations of a node from their making to their end: what is written, in which order, and what is said.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

mod faults;
mod stored;

use kube::ResourceExt;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_crds::status::{ConditionStatus, ConditionType, find};
use reprise_crds::{CacheNode, CacheTenant, SSDPool, SlackProfile};
use serde_json::{Value, json};
use stored::{ALL, Stored, at, object, with};

use super::dereference::{Found, Kept, Presence, Referring};
use super::validate::validate;
use super::*;
use crate::plan::Refusal;

/// Random nodes, and events on each.
const NODES: u64 = 60;
const EVENTS: usize = 120;

const TRUE: ConditionStatus = ConditionStatus::True;
const FALSE: ConditionStatus = ConditionStatus::False;

use ConditionType::{Accepted, Allocated, DeletionBlocked, Programmed, Released};

#[test]
fn an_allocation_gets_its_finalizer_then_its_grant_and_then_nothing_is_written() {
    let mut stored = Stored::new();
    stored.make("x", json!({ "ttl": "1h" }));
    assert_eq!(stored.turn(ALL), ["hold x"]);
    assert_eq!(stored.turn(ALL), ["grant x"]);
    assert_eq!(stored.turn(ALL), Vec::<String>::new());
    let grant = |serial: &str| json!({ "serial": serial, "pciAddress": "0000:01:00.0", "queuePairs": 8 });
    assert_eq!(stored.grants("x"), json!([grant("A"), grant("B")]));
    let status = stored.objects["x"].status.clone().expect("written");
    assert_eq!(status.expires_at, Some(at(3600)));
    assert!(stored.expect("x", Allocated, TRUE, "AsDesired").contains("16 queue pairs"));
    assert!(stored.expect("x", Accepted, TRUE, "AsDesired").contains("sees no GPU"));
    assert!(stored.expect("x", Programmed, FALSE, "Progressing").contains("n1 has not said yet"));
    // No agent makes queues yet, and one that does is believed.
    for (made, status, reason) in [(15, FALSE, "Progressing"), (16, TRUE, "AsDesired")] {
        stored.queues.insert("uid-x".to_owned(), made);
        assert_eq!(stored.turn(ALL), ["say x"]);
        stored.expect("x", Programmed, status, reason);
    }
}

#[test]
fn who_does_not_fit_is_told_what_there_is_and_who_has_it_and_gets_it_when_there_is_room() {
    let mut stored = Stored::new();
    stored.make("first", json!({ "queuePairs": 12 }));
    stored.settle();
    stored.make("second", json!({}));
    assert_eq!(stored.turn(ALL), ["say second"]);
    let words = stored.expect("second", Allocated, FALSE, "OverBudget");
    for part in ["8 queue pairs", "A (lends 16; held by n/first 12)", "B (lends 16"] {
        assert!(words.contains(part), "{words}");
    }
    assert_eq!(stored.said("second", Programmed), None);
    stored.delete("first");
    assert_eq!(stored.turn(ALL), ["let go first"], "its room is free when it is gone");
    assert_eq!(stored.turn(ALL), ["hold second"]);
    assert_eq!(stored.turn(ALL), ["grant second"]);
    stored.make("third", json!({ "queuePairs": 17 }));
    stored.settle();
    let words = stored.expect("third", Allocated, FALSE, "OverBudget");
    assert!(words.contains("16 may be lent") && words.contains("maxGpuQueuePercent"), "{words}");
}

#[test]
fn a_deletion_waits_until_the_agent_lists_the_queues_no_more() {
    let mut stored = Stored::new();
    stored.make("x", json!({}));
    stored.settle();
    stored.queues.insert("uid-x".to_owned(), 16);
    stored.settle();
    stored.delete("x");
    assert_eq!(stored.turn(ALL), ["give back x"]);
    let words = stored.expect("x", DeletionBlocked, TRUE, "Releasing");
    assert!(words.contains("n1") && words.contains("16 queue pairs"), "{words}");
    stored.expect("x", Allocated, FALSE, "Releasing");
    stored.expect("x", Released, FALSE, "Releasing");
    stored.make("y", json!({ "queuePairs": 16 }));
    stored.settle();
    stored.expect("y", Allocated, FALSE, "OverBudget");
    stored.queues.clear();
    assert_eq!(stored.turn(ALL), ["let go x"]);
    stored.settle();
    stored.expect("y", Allocated, TRUE, "AsDesired");
}

#[test]
fn a_pod_that_uses_a_grant_keeps_it_from_being_deleted_and_not_from_ending() {
    let mut stored = Stored::new();
    stored.make("x", json!({ "ttl": "1h" }));
    stored.settle();
    let reserve = |stored: &mut Stored, pod: Value| {
        let status = stored.objects.get_mut("x").and_then(|object| object.status.as_mut()).expect("a status");
        status.reserved_for = serde_json::from_value(pod).expect("a pod");
    };
    reserve(&mut stored, json!({ "name": "engine", "uid": "u-1" }));
    stored.settle();
    assert_eq!(stored.said("x", DeletionBlocked), None);
    stored.delete("x");
    stored.settle();
    let words = stored.expect("x", DeletionBlocked, TRUE, "InUse");
    assert!(words.contains("engine") && words.contains("u-1"), "{words}");
    stored.expect("x", Allocated, TRUE, "AsDesired");
    let mut other = Stored { objects: stored.objects.clone(), ..Stored::new() };
    other.now = 3600;
    assert_eq!(other.turn(ALL), ["let go x"], "its time is over");
    reserve(&mut stored, Value::Null);
    assert_eq!(stored.turn(ALL), ["let go x"]);
}

#[test]
fn a_grant_ends_with_its_time_and_is_not_granted_again() {
    let mut stored = Stored::new();
    stored.make("x", json!({ "ttl": "1m" }));
    stored.settle();
    stored.queues.insert("uid-x".to_owned(), 16);
    stored.now = 59;
    stored.settle();
    stored.expect("x", Allocated, TRUE, "AsDesired");
    stored.now = 60;
    assert_eq!(stored.turn(ALL), ["give back x"]);
    assert!(stored.expect("x", Allocated, FALSE, "Expired").contains("ttl"));
    stored.expect("x", Released, FALSE, "Releasing");
    assert_ne!(stored.grants("x"), json!([]), "its room is held as long as there are queues");
    stored.queues.clear();
    stored.make("y", json!({ "queuePairs": 16 }));
    assert_eq!(stored.turn(ALL), ["hold y", "give back x"], "the room is there");
    stored.expect("x", Released, TRUE, "Expired");
    assert_eq!(stored.turn(ALL), ["let go x", "grant y"]);
    stored.delete("y");
    stored.settle();
    assert_eq!(stored.grants("x"), json!([]));
    stored.expect("x", Released, TRUE, "Expired");
}

#[test]
fn a_guaranteed_allocation_takes_back_and_says_so_where_it_took() {
    let mut stored = Stored::new();
    stored.controllers = vec![("A", 32)];
    stored.make("effort", json!({ "qos": "BestEffort", "ttl": "1h" }));
    stored.settle();
    stored.queues.insert("uid-effort".to_owned(), 8);
    stored.settle();
    stored.make("own", json!({ "qos": "Guaranteed", "isolation": "ExclusiveController" }));
    assert_eq!(stored.turn(ALL), ["give back effort", "say own"]);
    let words = stored.expect("effort", Allocated, FALSE, "TakenBack");
    assert!(words.contains("n/own"), "{words}");
    let words = stored.expect("own", Allocated, FALSE, "Releasing");
    assert!(words.contains("n/effort 8"), "{words}");
    assert_eq!(stored.turn(ALL), Vec::<String>::new());
    stored.queues.clear();
    assert_eq!(stored.turn(ALL), ["hold own", "give back effort"]);
    assert_eq!(stored.turn(ALL), ["let go effort", "grant own"]);
    assert!(stored.expect("effort", Released, TRUE, "TakenBack").contains("n/own"));
    stored.settle();
    stored.expect("own", Allocated, TRUE, "AsDesired");
    assert!(stored.objects["effort"].finalizers().is_empty());
}

#[test]
fn with_its_node_everything_is_given_back() {
    let mut stored = Stored::new();
    for name in ["stays", "goes"] {
        stored.make(name, json!({ "queuePairs": 4 }));
        stored.queues.insert(format!("uid-{name}"), 8);
    }
    stored.settle();
    stored.delete("goes");
    stored.settle();
    stored.expect("goes", DeletionBlocked, TRUE, "Releasing");
    stored.presence = Presence::Gone;
    // What the agent had said of it counts no more.
    stored.queues.clear();
    stored.settle();
    assert!(!stored.objects.contains_key("goes"));
    assert!(stored.expect("stays", Released, TRUE, "AgentGone").contains("n1"));
    stored.expect("stays", Accepted, FALSE, "ReferenceNotFound");
}

#[test]
fn what_ends_is_free_once_the_agent_has_seen_that_it_is_told_so_no_more() {
    let mut stored = Stored::new();
    stored.make("x", json!({}));
    stored.settle();
    stored.tell();
    stored.delete("x");
    assert_eq!(stored.turn(ALL), ["give back x"], "it is told to keep it");
    let words = stored.expect("x", DeletionBlocked, TRUE, "Releasing");
    assert!(words.contains("n1 has not said yet that it has let go") && words.contains("delete its Node"));
    stored.obey();
    stored.tell();
    assert_eq!(stored.turn(ALL), Vec::<String>::new(), "it may have it, and has not said so");
    stored.obey();
    assert_eq!(stored.turn(ALL), Vec::<String>::new());
    stored.answer();
    assert_eq!(stored.turn(ALL), ["let go x"]);
}

/// What an agent has of an allocation, as its `CacheNode` says.
#[test]
fn an_agent_that_has_left_or_was_never_there_keeps_nothing_that_it_is_not_told_to() {
    let mut stored = Stored::new();
    stored.make("x", json!({}));
    stored.settle();
    stored.told.0 = 7;
    let kept = |change: &dyn Fn(&mut Value)| {
        let mut found = stored.found();
        let node = found.cache_node.as_deref().expect("it is there");
        let mut node = serde_json::to_value(node).expect("an object");
        change(&mut node);
        found.cache_node = Some(Arc::new(object(node)));
        found.kept(&stored.objects["x"])
    };
    let ready = |status: &str, reason: &str| json!([{ "type": "AgentReady", "status": status, "reason": reason, "lastTransitionTime": at(0) }]);
    let listed = |more: Value| json!([with(json!({ "uid": "uid-x", "queuePairs": 0 }), more)]);
    assert_eq!(kept(&|_| {}), Some(Kept::Unanswered), "it speaks of another spec");
    assert_eq!(kept(&|node| node["status"]["observedGeneration"] = json!(7)), None);
    assert_eq!(kept(&|node| node["status"]["conditions"] = ready("False", "AgentGone")), None);
    let serving = kept(&|node| node["status"]["conditions"] = ready("True", "AsDesired"));
    assert_eq!(serving, Some(Kept::Unanswered));
    assert_eq!(kept(&|node| node["status"]["lastUpdated"] = Value::Null), None, "it has never said anything");
    assert_eq!(kept(&|node| node["status"] = Value::Null), None);
    let still = kept(&|node| {
        node["status"]["conditions"] = ready("False", "AgentGone");
        node["status"]["applied"]["queues"] = listed(json!({ "kept": 8 }));
    });
    assert_eq!(still, Some(Kept::Told { kept: 8, made: 0, refused: None }));
    let refused = kept(&|node| node["status"]["applied"]["queues"] = listed(json!({ "refused": "no room" })));
    assert_eq!(refused, Some(Kept::Told { kept: 0, made: 0, refused: Some("no room".to_owned()) }));
    stored.tell();
    let told = stored.found();
    assert_eq!(told.kept(&stored.objects["x"]), Some(Kept::Unanswered));
    assert_eq!(Found { presence: Presence::Gone, ..told }.kept(&stored.objects["x"]), None);
}

#[test]
fn what_the_agent_says_of_a_grant_is_said_of_it() {
    let mut stored = Stored::new();
    stored.make("x", json!({}));
    stored.settle();
    let said = |kept: &Kept| {
        let (found, object) = (stored.found(), &stored.objects["x"]);
        let life = life::Life::Stands { kept: Some(kept.clone()) };
        let member = build::Member { of: &found.allocations[0], refused: None, life };
        let said = status::of(&member, &grant::Verdict::Stays, &found, &at(0));
        let status = said.map_or_else(|| object.status.clone().expect("written"), |said| said.status);
        let of = find(&status.conditions, Programmed).expect("it is said").clone();
        (of.reason, of.message)
    };
    let (reason, words) = said(&Kept::Told { kept: 16, made: 0, refused: None });
    assert_eq!(reason, "Unsupported");
    assert!(words.contains("n1 keeps 16 queue pairs") && words.contains("nothing uses them"), "{words}");
    let (reason, words) = said(&Kept::Told { kept: 0, made: 0, refused: Some("no room".to_owned()) });
    assert_eq!(reason, "Refused");
    assert!(words.contains("no room"), "{words}");
    assert_eq!(said(&Kept::Unanswered).0, "Progressing");
}

/// A profile of this GPU, with what its status says of it.
fn profile(product: &str, valid: Value) -> SlackProfile {
    let conditions = valid.as_str().map(|status| {
        json!([{
            "type": "Valid", "status": status, "reason": "AsDesired", "message": "words of the profile",
            "lastTransitionTime": at(0),
        }])
    });
    object(json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile", "metadata": { "name": "s", "namespace": "n" },
        "spec": { "subject": { "model": "m", "gpuProduct": product, "engineVersion": "e" }, "windows": [] },
        "status": { "conditions": conditions.unwrap_or(json!([])) },
    }))
}

#[test]
fn what_an_allocation_refers_to_must_be_there() {
    let mut stored = Stored::new();
    stored.gpus = vec![json!({ "uuid": "GPU-0", "product": "H200" })];
    stored.make("x", json!({ "tenantRef": { "name": "t" }, "slackProfileRef": { "name": "s" } }));
    let found = stored.found();
    let of = |change: &dyn Fn(&mut Found, &mut Referring)| {
        let mut found = found.clone();
        let mut of = found.allocations.remove(0);
        let tenant = CacheTenant::new("t", object(json!({})));
        (of.tenant, of.profile) = (Some(Arc::new(tenant)), Some(Arc::new(profile("H200", json!("True")))));
        change(&mut found, &mut of);
        validate(&of, &found).map(|refused| format!("{}: {}", refused.reason, refused.message))
    };
    let spec = |of: &mut Referring, field: &str, value: Value| {
        let mut whole = serde_json::to_value(&*of.object).expect("an object");
        whole["spec"][field] = value;
        of.object = Arc::new(object(whole));
    };
    assert_eq!(of(&|_, _| {}), None);
    let measured_on =
        |of: &mut Referring, product: &str| of.profile = Some(Arc::new(profile(product, json!("True"))));
    let valid = |of: &mut Referring, valid: Value| of.profile = Some(Arc::new(profile("H200", valid)));
    assert_eq!(of(&|_, of| spec(of, "gpuUuid", json!("MIG-9"))), None, "no agent tells parts of GPUs");
    let unseen = of(&|found, of| {
        let mut node = CacheNode::clone(found.cache_node.as_ref().expect("it is there"));
        node.status.as_mut().expect("it has said something").gpus.clear();
        found.cache_node = Some(Arc::new(node));
        measured_on(of, "L4");
    });
    assert_eq!(unseen, None, "nobody knows the GPU before its driver is loaded");
    type Change<'a> = &'a dyn Fn(&mut Found, &mut Referring);
    let changes: [(Change<'_>, &str); 19] = [
        (&|found, _| found.presence = Presence::Gone, "ReferenceNotFound: node n1 is not there"),
        (&|found, _| found.cache_node = None, "ReferenceNotFound: no KVCacheCluster has node n1"),
        (&|_, of| of.pool = None, "ReferenceNotFound: SSDPool p is not there: make it"),
        (
            &|_, of| {
                let spec = json!({ "directory": { "path": "/p", "size": "1Gi" } });
                of.pool = Some(Arc::new(SSDPool::new("p", object(spec))));
            },
            "InvalidSpec: SSDPool p is not made of raw devices",
        ),
        (
            &|_, of| {
                let mut pool = SSDPool::clone(of.pool.as_ref().expect("set above"));
                pool.metadata.deletion_timestamp = Some(at(0));
                of.pool = Some(Arc::new(pool));
            },
            "ReferenceNotFound: SSDPool p is being deleted",
        ),
        (
            &|_, of| of.plan.refused = Some(Refusal::new(reprise_crds::status::Reason::Conflict, "no")),
            "Conflict: SSDPool p is refused: no",
        ),
        (&|_, of| of.plan.nodes.clear(), "ReferenceNotFound: SSDPool p is not on node n1"),
        (
            &|_, of| spec(of, "gpuUuid", json!("GPU-9")),
            "ReferenceNotFound: node n1 has no GPU GPU-9: name one of GPU-0",
        ),
        (&|_, of| of.tenant = None, "ReferenceNotFound: CacheTenant t is not there"),
        (
            &|_, of| {
                of.tenant = Some(Arc::new(CacheTenant::new("t", object(json!({ "isolation": "Shared" })))));
            },
            "Unsupported: CacheTenant t is refused: isolation Shared",
        ),
        (
            &|_, of| {
                let other = json!({ "clusters": [{ "namespace": "n", "name": "other" }] });
                of.tenant = Some(Arc::new(CacheTenant::new("t", object(other))));
            },
            "ReferenceNotFound: KVCacheCluster n/c, which has node n1, does not know CacheTenant t",
        ),
        (&|_, of| of.profile = None, "ReferenceNotFound: SlackProfile s is not there in namespace n"),
        (
            &|_, of| {
                let mut profile = profile("H200", json!("True"));
                profile.metadata.deletion_timestamp = Some(at(0));
                of.profile = Some(Arc::new(profile));
            },
            "ReferenceNotFound: SlackProfile s is being deleted",
        ),
        (
            &|_, of| valid(of, json!("False")),
            "ProfileInvalid: SlackProfile s is not valid: words of the profile. Correct it",
        ),
        (
            &|_, of| valid(of, json!("Unknown")),
            "ReferenceNotFound: nobody knows whether SlackProfile s is valid: words of the profile",
        ),
        (&|_, of| valid(of, Value::Null), "Progressing: SlackProfile s has not been looked at yet"),
        (
            &|_, of| measured_on(of, "L4"),
            "WrongGpu: SlackProfile s was measured on L4, and GPU GPU-0 of node n1 is H200: name a profile",
        ),
        (
            &|_, of| {
                spec(of, "gpuUuid", json!("MIG-9"));
                measured_on(of, "L4");
            },
            "WrongGpu: SlackProfile s was measured on L4, and GPU MIG-9 of node n1 is H200",
        ),
        (
            &|_, of| {
                spec(of, "tenantRef", json!({ "name": "default" }));
                (of.tenant, of.profile) = (None, None);
            },
            "ReferenceNotFound: SlackProfile s",
        ),
    ];
    for (change, words) in changes {
        let said = of(change).unwrap_or_default();
        assert!(said.starts_with(words), "'{said}' is not '{words}'");
    }
}

#[test]
fn a_refused_allocation_is_said_so_and_granted_when_it_is_right() {
    let mut stored = Stored::new();
    stored.gpus = vec![json!({ "uuid": "GPU-1", "product": "H200" })];
    stored.make("x", json!({}));
    assert_eq!(stored.turn(ALL), ["say x"]);
    stored.expect("x", Accepted, FALSE, "ReferenceNotFound");
    stored.expect("x", Allocated, FALSE, "ReferenceNotFound");
    stored.gpus.push(json!({ "uuid": "GPU-0", "product": "H200" }));
    stored.settle();
    assert_eq!(stored.expect("x", Accepted, TRUE, "AsDesired"), "the spec is right");
    stored.expect("x", Allocated, TRUE, "AsDesired");
}

/// Something that people, agents or time do.
fn disturb(stored: &mut Stored, random: &mut StdRng, number: usize) {
    let names: Vec<String> = stored.objects.keys().cloned().collect();
    match random.random_range(0..7) {
        0 | 1 if names.len() < 10 => {
            let more = match random.random_range(0..4) {
                0 => json!({ "qos": "Guaranteed", "isolation": "ExclusiveController" }),
                1 => json!({ "qos": "BestEffort", "ttl": "2m" }),
                2 => json!({ "isolation": "ExclusiveController", "ttl": "4m" }),
                _ => json!({}),
            };
            let pairs = json!({ "queuePairs": random.random_range(1..18) });
            stored.make(&format!("x{number}"), with(more, pairs));
        }
        2 if !names.is_empty() => stored.delete(&names[random.random_range(0..names.len())]),
        // The agent is told, sees it and says so, each at any time, and stops.
        3..6 => match random.random_range(0..8) {
            0..3 => stored.tell(),
            3..5 => stored.obey(),
            5..7 => stored.answer(),
            _ => stored.stop(random.random_bool(0.3)),
        },
        _ => stored.now += random.random_range(0..90),
    }
}

#[test]
fn killed_between_any_two_writes_an_operator_lends_nothing_twice_and_ends_what_it_began() {
    let mut ended = 0;
    for seed in 0..NODES {
        let mut random = StdRng::seed_from_u64(seed);
        let mut stored = Stored::new();
        stored.controllers.push(("C", 20));
        for event in 0..EVENTS {
            disturb(&mut stored, &mut random, event);
            stored.turn(random.random_range(0..4));
        }
        // The agent lets go of what ends, and then it is quiet.
        stored.settle();
        for _ in 0..stored.objects.len() + 2 {
            stored.tell();
            stored.obey();
            stored.answer();
            stored.settle();
        }
        for (name, object) in &stored.objects {
            assert!(object.metadata.deletion_timestamp.is_none(), "seed {seed}: {name} does not go");
            let said = stored.said(name, Released);
            assert!(
                said.as_ref().is_none_or(|(status, ..)| *status == TRUE),
                "seed {seed}, {name}: {said:?}"
            );
            ended += usize::from(said.is_some());
        }
    }
    assert!(ended > 20, "{ended}: it was a real test");
}
