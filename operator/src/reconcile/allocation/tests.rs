//! Allocations of one node from creation to release: the writes, their order, and the conditions.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

mod faults;
pub(super) mod stored;

use kube::ResourceExt;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_crds::status::{ConditionStatus, ConditionType, find};
use reprise_crds::{CacheNode, SSDPool, SlackProfile};
use serde_json::{Value, json};
use stored::{ALL, Stored, at, object, with};

use super::dereference::{AgentQueues, GrantInputs, NodePresence, ResolvedAllocation};
use super::validate::validate;
use super::*;
use crate::framework::refusal::Refusal;

/// Random nodes, and events on each of them.
const NODES: u64 = 60;
const EVENTS: usize = 120;

const TRUE: ConditionStatus = ConditionStatus::True;
const FALSE: ConditionStatus = ConditionStatus::False;

use ConditionType::{Accepted, Allocated, DeletionBlocked, Programmed, Released};

#[test]
fn adds_finalizer_then_writes_grant_then_writes_nothing() {
    let mut stored = Stored::new();
    stored.create("x", json!({ "ttl": "1h" }));
    assert_eq!(stored.run_pass(ALL), ["add-finalizer x"]);
    assert_eq!(stored.run_pass(ALL), ["grant x"]);
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new());
    let grant = |serial: &str| json!({ "serial": serial, "pciAddress": "0000:01:00.0", "queuePairs": 8 });
    assert_eq!(stored.grants("x"), json!([grant("A"), grant("B")]));
    let status = stored.objects["x"].status.clone().expect("written");
    assert_eq!(status.expires_at, Some(at(3600)));
    assert!(stored.expect("x", Allocated, TRUE, "AsDesired").contains("16 queue pairs"));
    assert!(stored.expect("x", Accepted, TRUE, "AsDesired").contains("reports no such GPU"));
    assert!(stored.expect("x", Programmed, FALSE, "Progressing").contains("n1 has not reported yet"));
    for (made, status, reason) in [(15, FALSE, "NotRequested"), (16, TRUE, "AsDesired")] {
        stored.queues.insert("uid-x".to_owned(), made);
        assert_eq!(stored.run_pass(ALL), ["update x"]);
        stored.expect("x", Programmed, status, reason);
    }
}

#[test]
fn waiting_allocation_names_the_holders_and_is_granted_once_pairs_are_free() {
    let mut stored = Stored::new();
    stored.create("first", json!({ "queuePairs": 12 }));
    stored.run_until_stable();
    stored.create("second", json!({}));
    assert_eq!(stored.run_pass(ALL), ["update second"]);
    let message = stored.expect("second", Allocated, FALSE, "OverBudget");
    for part in ["8 queue pairs", "A (budget 16; held by n/first 12)", "B (budget 16"] {
        assert!(message.contains(part), "{message}");
    }
    assert_eq!(stored.condition("second", Programmed), None);
    stored.delete("first");
    assert_eq!(stored.run_pass(ALL), ["remove-finalizer first"], "its pairs are free once it is deleted");
    assert_eq!(stored.run_pass(ALL), ["add-finalizer second"]);
    assert_eq!(stored.run_pass(ALL), ["grant second"]);
    stored.create("third", json!({ "queuePairs": 17 }));
    stored.run_until_stable();
    let message = stored.expect("third", Allocated, FALSE, "OverBudget");
    assert!(
        message.contains("at most 16 can be granted") && message.contains("maxGpuQueuePercent"),
        "{message}"
    );
}

#[test]
fn deletion_waits_until_the_agent_no_longer_lists_the_queues() {
    let mut stored = Stored::new();
    stored.create("x", json!({}));
    stored.run_until_stable();
    stored.queues.insert("uid-x".to_owned(), 16);
    stored.run_until_stable();
    stored.delete("x");
    assert_eq!(stored.run_pass(ALL), ["end-grant x"]);
    let message = stored.expect("x", DeletionBlocked, TRUE, "Releasing");
    assert!(message.contains("n1") && message.contains("16 queue pairs"), "{message}");
    stored.expect("x", Allocated, FALSE, "Releasing");
    stored.expect("x", Released, FALSE, "Releasing");
    stored.create("y", json!({ "queuePairs": 16 }));
    stored.run_until_stable();
    stored.expect("y", Allocated, FALSE, "OverBudget");
    stored.queues.clear();
    assert_eq!(stored.run_pass(ALL), ["remove-finalizer x"]);
    stored.run_until_stable();
    stored.expect("y", Allocated, TRUE, "AsDesired");
}

#[test]
fn expired_grant_is_released_and_not_granted_again() {
    let mut stored = Stored::new();
    stored.create("x", json!({ "ttl": "1m" }));
    stored.run_until_stable();
    stored.queues.insert("uid-x".to_owned(), 16);
    stored.now = 59;
    stored.run_until_stable();
    stored.expect("x", Allocated, TRUE, "AsDesired");
    stored.now = 60;
    assert_eq!(stored.run_pass(ALL), ["end-grant x"]);
    assert!(stored.expect("x", Allocated, FALSE, "Expired").contains("ttl"));
    stored.expect("x", Released, FALSE, "Releasing");
    assert_ne!(stored.grants("x"), json!([]), "its pairs stay in use while the agent has queues");
    stored.queues.clear();
    stored.create("y", json!({ "queuePairs": 16 }));
    assert_eq!(stored.run_pass(ALL), ["add-finalizer y", "end-grant x"], "its pairs are free");
    stored.expect("x", Released, TRUE, "Expired");
    assert_eq!(stored.run_pass(ALL), ["remove-finalizer x", "grant y"]);
    stored.delete("y");
    stored.run_until_stable();
    assert_eq!(stored.grants("x"), json!([]));
    stored.expect("x", Released, TRUE, "Expired");
}

#[test]
fn guaranteed_allocation_preempts_and_the_preempted_one_names_it() {
    let mut stored = Stored::new();
    stored.controllers = vec![("A", 32)];
    stored.create("effort", json!({ "qos": "BestEffort", "ttl": "1h" }));
    stored.run_until_stable();
    stored.queues.insert("uid-effort".to_owned(), 8);
    stored.run_until_stable();
    stored.create("own", json!({ "qos": "Guaranteed", "isolation": "ExclusiveController" }));
    assert_eq!(stored.run_pass(ALL), ["end-grant effort", "update own"]);
    let message = stored.expect("effort", Allocated, FALSE, "TakenBack");
    assert!(message.contains("n/own"), "{message}");
    let message = stored.expect("own", Allocated, FALSE, "Releasing");
    assert!(message.contains("n/effort 8"), "{message}");
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new());
    stored.queues.clear();
    assert_eq!(stored.run_pass(ALL), ["add-finalizer own", "end-grant effort"]);
    assert_eq!(stored.run_pass(ALL), ["remove-finalizer effort", "grant own"]);
    assert!(stored.expect("effort", Released, TRUE, "TakenBack").contains("n/own"));
    stored.run_until_stable();
    stored.expect("own", Allocated, TRUE, "AsDesired");
    assert!(stored.objects["effort"].finalizers().is_empty());
}

#[test]
fn releases_all_grants_when_the_node_is_gone() {
    let mut stored = Stored::new();
    for name in ["stays", "goes"] {
        stored.create(name, json!({ "queuePairs": 4 }));
        stored.queues.insert(format!("uid-{name}"), 8);
    }
    stored.run_until_stable();
    stored.delete("goes");
    stored.run_until_stable();
    stored.expect("goes", DeletionBlocked, TRUE, "Releasing");
    stored.presence = NodePresence::Gone;
    // Earlier reports of the agent no longer count.
    stored.queues.clear();
    stored.run_until_stable();
    assert!(!stored.objects.contains_key("goes"));
    assert!(stored.expect("stays", Released, TRUE, "AgentGone").contains("n1"));
    stored.expect("stays", Accepted, FALSE, "ReferenceNotFound");
}

#[test]
fn pairs_are_free_once_the_agent_has_reported_a_spec_without_them() {
    let mut stored = Stored::new();
    stored.create("x", json!({}));
    stored.run_until_stable();
    stored.write_spec();
    stored.delete("x");
    assert_eq!(stored.run_pass(ALL), ["end-grant x"], "the spec still lists it");
    let message = stored.expect("x", DeletionBlocked, TRUE, "Releasing");
    assert!(message.contains("n1 to report that it released") && message.contains("delete its Node"));
    stored.agent_applies_spec();
    stored.write_spec();
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new(), "the agent may hold it and has not reported");
    stored.agent_applies_spec();
    assert_eq!(stored.run_pass(ALL), Vec::<String>::new());
    stored.agent_reports();
    assert_eq!(stored.run_pass(ALL), ["remove-finalizer x"]);
}

/// Queue pairs that the agent holds, according to its `CacheNode`.
#[test]
fn agent_that_left_or_never_reported_holds_nothing_outside_the_spec() {
    let mut stored = Stored::new();
    stored.create("x", json!({}));
    stored.run_until_stable();
    stored.claims.0 = 7;
    let kept = |change: &dyn Fn(&mut Value)| {
        let mut found = stored.found();
        let node = found.cache_node.as_deref().expect("a CacheNode");
        let mut node = serde_json::to_value(node).expect("an object");
        change(&mut node);
        found.cache_node = Some(Arc::new(object(node)));
        found.agent_queues(&stored.objects["x"])
    };
    let ready = |status: &str, reason: &str| json!([{ "type": "AgentReady", "status": status, "reason": reason, "lastTransitionTime": at(0) }]);
    let listed = |more: Value| json!([with(json!({ "uid": "uid-x", "queuePairs": 0 }), more)]);
    assert_eq!(kept(&|_| {}), Some(AgentQueues::Unconfirmed), "it reports an older spec");
    assert_eq!(kept(&|node| node["status"]["observedGeneration"] = json!(7)), None);
    assert_eq!(kept(&|node| node["status"]["conditions"] = ready("False", "AgentGone")), None);
    let serving = kept(&|node| node["status"]["conditions"] = ready("True", "AsDesired"));
    assert_eq!(serving, Some(AgentQueues::Unconfirmed));
    assert_eq!(kept(&|node| node["status"]["lastUpdated"] = Value::Null), None, "it has never reported");
    assert_eq!(kept(&|node| node["status"] = Value::Null), None);
    let still = kept(&|node| {
        node["status"]["conditions"] = ready("False", "AgentGone");
        node["status"]["applied"]["queues"] = listed(json!({ "kept": 8 }));
    });
    assert_eq!(still, Some(reported(8, None)));
    let refused = kept(&|node| node["status"]["applied"]["queues"] = listed(json!({ "refused": "no room" })));
    assert_eq!(refused, Some(reported(0, Some("no room"))));
    stored.write_spec();
    let inputs = stored.found();
    assert_eq!(inputs.agent_queues(&stored.objects["x"]), Some(AgentQueues::Unconfirmed));
    assert_eq!(
        GrantInputs { presence: NodePresence::Gone, ..inputs }.agent_queues(&stored.objects["x"]),
        None
    );
}

#[test]
fn programmed_condition_follows_the_report_of_the_agent() {
    let mut stored = Stored::new();
    stored.create("x", json!({}));
    stored.run_until_stable();
    let conditions = |kept: &AgentQueues| {
        let (found, object) = (stored.found(), &stored.objects["x"]);
        let lifecycle = lifecycle::Lifecycle::Granted { kept: Some(kept.clone()) };
        let candidate = build::Candidate { of: &found.allocations[0], refused: None, lifecycle };
        let reported = status::compute(&candidate, &grant::Verdict::Unchanged, &found, &at(0));
        let status =
            reported.map_or_else(|| object.status.clone().expect("written"), |reported| reported.status);
        let of = find(&status.conditions, Programmed).expect("the condition is set").clone();
        (of.reason, of.message)
    };
    let (reason, message) = conditions(&reported(16, None));
    assert_eq!(reason, "NotRequested");
    assert!(message.contains("n1 has set 16 queue pairs aside"), "{message}");
    let (reason, message) = conditions(&reported(0, Some("no room")));
    assert_eq!(reason, "Refused");
    assert!(message.contains("no room"), "{message}");
    assert_eq!(conditions(&AgentQueues::Unconfirmed).0, "Progressing");
}

/// A report of an agent about an allocation of which no queue pair exists.
fn reported(kept: u32, refused: Option<&str>) -> AgentQueues {
    let refused = refused.map(str::to_owned);
    AgentQueues::Reported { kept, made: 0, created: Vec::new(), unavailable: None, refused }
}

#[test]
fn numbers_are_in_the_status_while_the_queue_pairs_exist() {
    let mut stored = Stored::new();
    stored.create("x", json!({}));
    stored.run_until_stable();
    stored.claims.1.insert("uid-x".to_owned());
    let numbers = |stored: &Stored| {
        let status = stored.objects["x"].status.clone().expect("written");
        let generations: Vec<_> = status.allocations.iter().map(|of| of.generation).collect();
        (status.queues.map(|text| text.to_string()), generations)
    };
    let created =
        |serial: &str, queues: &[u32]| json!({ "serial": serial, "generation": 5, "queues": queues });
    stored.queues.insert("uid-x".to_owned(), 2);
    stored.created = vec![created("A", &[1, 2])];
    stored.run_until_stable();
    assert_eq!(numbers(&stored), (Some("A 1-2".to_owned()), vec![Some(5), None]));
    assert!(stored.expect("x", Programmed, FALSE, "NotRequested").contains("2 of 16"));
    // The engine has ended.
    (stored.created, stored.queues) = (Vec::new(), [("uid-x".to_owned(), 0)].into());
    stored.run_until_stable();
    assert_eq!(numbers(&stored), (None, vec![None, None]));
    stored.created =
        vec![created("A", &(1..9).collect::<Vec<_>>()), created("B", &(1..9).collect::<Vec<_>>())];
    stored.queues.insert("uid-x".to_owned(), 16);
    stored.run_until_stable();
    stored.expect("x", Programmed, TRUE, "AsDesired");
    // The queue pairs are gone, and the agent has not released them.
    stored.delete("x");
    (stored.created, stored.queues) = (Vec::new(), [("uid-x".to_owned(), 0)].into());
    stored.run_until_stable();
    assert_eq!(numbers(&stored).0, None);
    stored.expect("x", Programmed, FALSE, "Releasing");
    stored.expect("x", Released, FALSE, "Releasing");
}

/// A profile of this GPU product with this status of its condition `Valid`.
fn profile(product: &str, valid: Value) -> SlackProfile {
    let conditions = valid.as_str().map(|status| {
        json!([{
            "type": "Valid", "status": status, "reason": "AsDesired", "message": "message of the profile",
            "lastTransitionTime": at(0),
        }])
    });
    object(json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile", "metadata": { "name": "s", "namespace": "n" },
        "spec": { "subject": { "model": "m", "gpuProduct": product, "engineVersion": "e" }, "configMapRef": { "name": "c", "key": "k" } },
        "status": { "conditions": conditions.unwrap_or(json!([])) },
    }))
}

#[test]
fn rejects_missing_or_unsuitable_references() {
    let mut stored = Stored::new();
    stored.gpus = vec![json!({ "uuid": "GPU-0", "product": "H200" })];
    stored.create("x", json!({ "slackProfileRef": { "name": "s" } }));
    let found = stored.found();
    let of = |change: &dyn Fn(&mut GrantInputs, &mut ResolvedAllocation)| {
        let mut found = found.clone();
        let mut of = found.allocations.remove(0);
        of.profile = Some(Arc::new(profile("H200", json!("True"))));
        change(&mut found, &mut of);
        validate(&of, &found).map(|refused| format!("{}: {}", refused.reason, refused.message))
    };
    let spec = |of: &mut ResolvedAllocation, field: &str, value: Value| {
        let mut whole = serde_json::to_value(&*of.object).expect("an object");
        whole["spec"][field] = value;
        of.object = Arc::new(object(whole));
    };
    assert_eq!(of(&|_, _| {}), None);
    let measured_on = |of: &mut ResolvedAllocation, product: &str| {
        of.profile = Some(Arc::new(profile(product, json!("True"))));
    };
    let valid =
        |of: &mut ResolvedAllocation, valid: Value| of.profile = Some(Arc::new(profile("H200", valid)));
    assert_eq!(of(&|_, of| spec(of, "gpuUuid", json!("MIG-9"))), None, "agents do not report MIG partitions");
    let unseen = of(&|found, of| {
        let mut node = CacheNode::clone(found.cache_node.as_ref().expect("a CacheNode"));
        node.status.as_mut().expect("a report").gpus.clear();
        found.cache_node = Some(Arc::new(node));
        measured_on(of, "L4");
    });
    assert_eq!(unseen, None, "the GPU is unknown before its driver is loaded");
    type Change<'a> = &'a dyn Fn(&mut GrantInputs, &mut ResolvedAllocation);
    let changes: [(Change<'_>, &str); 15] = [
        (&|found, _| found.presence = NodePresence::Gone, "ReferenceNotFound: node n1 does not exist"),
        (&|found, _| found.cache_node = None, "ReferenceNotFound: node n1 belongs to no KVCacheCluster"),
        (&|_, of| of.pool = None, "ReferenceNotFound: SSDPool p does not exist: create it"),
        (
            &|_, of| {
                let spec = json!({ "directory": { "path": "/p", "size": "1Gi" } });
                of.pool = Some(Arc::new(SSDPool::new("p", object(spec))));
            },
            "InvalidSpec: SSDPool p does not use raw devices",
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
            &|_, of| of.assignment.refused = Some(Refusal::new(reprise_crds::status::Reason::Conflict, "no")),
            "Conflict: SSDPool p is rejected: no",
        ),
        (&|_, of| of.assignment.nodes.clear(), "ReferenceNotFound: SSDPool p is not on node n1"),
        (
            &|_, of| spec(of, "gpuUuid", json!("GPU-9")),
            "ReferenceNotFound: node n1 has no GPU GPU-9: create a GPUQueueAllocation that names one of GPU-0",
        ),
        (&|_, of| of.profile = None, "ReferenceNotFound: SlackProfile s does not exist in namespace n"),
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
            "ProfileInvalid: SlackProfile s is invalid: message of the profile. Correct it",
        ),
        (
            &|_, of| valid(of, json!("Unknown")),
            "ReferenceNotFound: cannot determine whether SlackProfile s is valid: message of the profile",
        ),
        (&|_, of| valid(of, Value::Null), "Progressing: SlackProfile s has not been validated yet"),
        (
            &|_, of| measured_on(of, "L4"),
            "WrongGpu: SlackProfile s was measured on L4, but GPU GPU-0 of node n1 is H200: create a GPUQueueAllocation with a matching profile",
        ),
        (
            &|_, of| {
                spec(of, "gpuUuid", json!("MIG-9"));
                measured_on(of, "L4");
            },
            "WrongGpu: SlackProfile s was measured on L4, but GPU MIG-9 of node n1 is H200",
        ),
    ];
    let elsewhere = of(&|found, _| {
        let mut node = CacheNode::clone(found.cache_node.as_ref().expect("a CacheNode"));
        node.spec.cluster_ref.as_mut().expect("a cluster").namespace =
            serde_json::from_value(json!("other")).expect("a name");
        found.cache_node = Some(Arc::new(node));
    });
    let words = "ReferenceNotFound: SlackProfile s of namespace n cannot reach node n1, which gets profiles of namespace other";
    assert!(elsewhere.as_deref().is_some_and(|text| text.starts_with(words)), "{elsewhere:?}");
    for (change, message) in changes {
        let reported = of(change).unwrap_or_default();
        assert!(reported.starts_with(message), "'{reported}' is not '{message}'");
    }
}

#[test]
fn rejected_allocation_is_reported_and_granted_once_it_is_valid() {
    let mut stored = Stored::new();
    stored.gpus = vec![json!({ "uuid": "GPU-1", "product": "H200" })];
    stored.create("x", json!({}));
    assert_eq!(stored.run_pass(ALL), ["update x"]);
    stored.expect("x", Accepted, FALSE, "ReferenceNotFound");
    stored.expect("x", Allocated, FALSE, "ReferenceNotFound");
    stored.gpus.push(json!({ "uuid": "GPU-0", "product": "H200" }));
    stored.run_until_stable();
    assert_eq!(stored.expect("x", Accepted, TRUE, "AsDesired"), "the spec is valid");
    stored.expect("x", Allocated, TRUE, "AsDesired");
}

/// A random event caused by users, agents or time.
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
            stored.create(&format!("x{number}"), with(more, pairs));
        }
        2 if !names.is_empty() => stored.delete(&names[random.random_range(0..names.len())]),
        // The spec is written; the agent applies it, reports, and stops, each at a random time.
        3..6 => match random.random_range(0..8) {
            0..3 => stored.write_spec(),
            3..5 => stored.agent_applies_spec(),
            5..7 => stored.agent_reports(),
            _ => stored.stop_agent(random.random_bool(0.3)),
        },
        _ => stored.now += random.random_range(0..90),
    }
}

#[test]
fn grants_nothing_twice_and_completes_releases_when_killed_between_any_two_writes() {
    let mut ended = 0;
    for seed in 0..NODES {
        let mut random = StdRng::seed_from_u64(seed);
        let mut stored = Stored::new();
        stored.controllers.push(("C", 20));
        for event in 0..EVENTS {
            disturb(&mut stored, &mut random, event);
            stored.run_pass(random.random_range(0..4));
        }
        // The agent releases ending grants, and events stop.
        stored.run_until_stable();
        for _ in 0..stored.objects.len() + 2 {
            stored.write_spec();
            stored.agent_applies_spec();
            stored.agent_reports();
            stored.run_until_stable();
        }
        for (name, object) in &stored.objects {
            assert!(object.metadata.deletion_timestamp.is_none(), "seed {seed}: {name} is not deleted");
            let reported = stored.condition(name, Released);
            assert!(
                reported.as_ref().is_none_or(|(status, ..)| *status == TRUE),
                "seed {seed}, {name}: {reported:?}"
            );
            ended += usize::from(reported.is_some());
        }
    }
    assert!(ended > 20, "{ended}: too few releases for a meaningful test");
}
