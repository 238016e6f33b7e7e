//! Passes over the allocations of a node, and tables of inputs and conditions.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

mod model;

use model::{ALL, Model, at};
use reprise_crds::status::Reason;
use serde_json::{Value, json};

use super::dereference::{NodePresence, ResolvedAllocation};
use super::*;
use crate::framework::refusal::Refusal;
use crate::reconcile::assignment::PoolAssignment;
use crate::reconcile::test_objects::{merged, object};

#[test]
fn rejected_write_affects_only_allocations_that_need_its_pairs() {
    let mut model = Model::new();
    model.create("ends", json!({ "isolation": "ExclusiveController", "ttl": "1m" }));
    model.run();
    model.now = 60;
    model.unwritable.insert("ends".to_owned());
    for name in ["gets", "waits"] {
        model.create(name, json!({ "isolation": "ExclusiveController" }));
    }
    assert_eq!(model.run(), ["AddFinalizer gets", "UpdateStatus waits", "Grant gets"]);
    model.unwritable.clear();
    let all = ["EndGrant ends", "RemoveFinalizer ends", "AddFinalizer waits", "Grant waits"];
    assert_eq!(model.run(), all);
    // Requests that cannot be written hold no pairs back.
    let mut model = Model::new();
    for name in ["a", "b", "c", "last"] {
        model.create(name, json!({ "queuePairs": 16 }));
    }
    model.unwritable.extend(["a", "b", "c"].map(str::to_owned));
    assert_eq!(model.run(), ["AddFinalizer last", "Grant last"]);
}

#[test]
fn removes_finalizers_of_another_process_before_it_grants() {
    let interrupted = || {
        let mut model = Model::new();
        model.create("x", json!({}));
        assert_eq!(model.run_pass(ALL), ["AddFinalizer x"]);
        assert_eq!(model.run_pass(0), Vec::<String>::new(), "the grant is late");
        model.create("y", json!({ "qos": "Guaranteed", "isolation": "ExclusiveController" }));
        model
    };
    let mut model = interrupted();
    let all = ["RemoveFinalizer x", "AddFinalizer x", "AddFinalizer y", "Grant x", "Grant y"];
    assert_eq!(model.run(), all);
    assert_eq!(model.arrive(), Some(false));
    // While it cannot be written, its late grant may still take effect.
    let mut model = interrupted();
    model.unwritable.insert("x".to_owned());
    assert_eq!(model.run(), Vec::<String>::new());
    model.unwritable.clear();
    assert_eq!(model.arrive(), Some(true));
}

/// Changes a field of an object, which may be absent.
fn set(object: &mut Value, path: &str, value: Value) {
    let (parent, field) = path.rsplit_once('/').expect("a path");
    object.pointer_mut(parent).expect("an object")[field] = value;
}

/// A node with a grant of 8 pairs of `A` to `x`, after a change of its `CacheNode`.
fn granted_with(path: &str, value: Value) -> GrantInputs {
    let mut model = Model::new();
    model.controllers.truncate(1);
    model.create("x", json!({}));
    model.run();
    (model.spec.0, model.reported.0) = (7, 6);
    let mut inputs = model.inputs();
    let mut node = serde_json::to_value(inputs.cache_node.as_deref()).expect("an object");
    set(&mut node, path, value);
    inputs.cache_node = Some(Arc::new(object(node)));
    inputs
}

/// A report of the agent on `x`.
fn applied(more: Value) -> Value {
    json!([merged(json!({ "uid": "uid-x", "queuePairs": 0, "kept": 8 }), more)])
}

#[test]
fn agent_holds_queue_pairs_until_it_reports_the_current_spec_without_them_or_leaves() {
    let ready = |status: &str, reason: &str| json!([{ "type": "AgentReady", "status": status, "reason": reason, "lastTransitionTime": at(0) }]);
    let spec =
        json!([{ "uid": "uid-x", "allocation": "n/x", "controllers": [{ "serial": "A", "queuePairs": 8 }] }]);
    let cases = [
        ("/status/observedGeneration", json!(6), true),
        ("/status/observedGeneration", json!(7), false),
        ("/status/conditions", ready("False", "AgentGone"), false),
        ("/status/conditions", ready("True", "AsDesired"), true),
        ("/status/lastUpdated", Value::Null, false),
        ("/status", Value::Null, false),
        ("/spec/queues", spec, true),
        ("/status/applied/queues", applied(json!({})), true),
    ];
    for (path, value, is_held) in cases {
        let inputs = granted_with(path, value);
        let held = inputs.agent_queues(&inputs.allocations[0].object);
        assert_eq!(held.is_some(), is_held, "{path}: {held:?}");
        let gone = GrantInputs { presence: NodePresence::Gone, ..inputs };
        assert_eq!(gone.agent_queues(&gone.allocations[0].object), None);
    }
}

#[test]
fn programmed_and_numbers_follow_the_report_of_the_agent() {
    let created = |numbers: &[u32]| json!([{ "serial": "A", "generation": 5, "queues": numbers }]);
    let many: Vec<u32> = (0..128).map(|number| 2 * number).collect();
    let cases = [
        (json!({ "refused": "no room" }), "Refused", "no room. It retries", None),
        (json!({ "unavailable": "why" }), "Unsupported", "no engine can create them: why", None),
        (json!({}), "NotRequested", "no engine has requested them yet", None),
        (
            json!({ "queuePairs": 4, "created": created(&[2, 3, 4, 9]) }),
            "NotRequested",
            "4 of 8",
            Some("2-4,9"),
        ),
        (json!({ "queuePairs": 8, "created": created(&[1, 3]) }), "AsDesired", "created 8", Some("1,3")),
        (json!({ "queuePairs": 128, "created": created(&many) }), "AsDesired", "created 128", Some("0,2,4")),
    ];
    for (report, reason, words, numbers) in cases {
        let mut inputs = granted_with("/status/applied/queues", applied(report));
        let of = |inputs: &GrantInputs| {
            let object = &inputs.allocations[0].object;
            let (report, mut status) = (inputs.agent_queues(object), object.status.clone().expect("a grant"));
            programmed::record(&mut status, report.as_ref(), inputs);
            (programmed::programmed(report.as_ref(), 8, inputs), status)
        };
        let (finding, status) = of(&inputs);
        assert_eq!(finding.reason.as_str(), reason);
        assert!(finding.message.contains(words), "{}", finding.message);
        let shown = status.queues.map(|queues| queues.to_string());
        assert_eq!(shown.is_some(), numbers.is_some());
        let begins = shown.as_deref().unwrap_or_default().starts_with(numbers.unwrap_or_default());
        assert!(begins && shown.is_none_or(|shown| shown.chars().count() <= 253), "{numbers:?}");
        assert_eq!(status.allocations[0].generation, numbers.map(|_| 5));
        // Queue pairs end with the agent.
        inputs.is_silent = true;
        let (finding, status) = of(&inputs);
        assert_eq!(finding.reason == Reason::NotReported, numbers.is_some());
        assert_eq!((status.queues, status.allocations[0].generation), (None, None));
    }
}

/// Validates an allocation that names a pool and a profile, after changes of the objects.
fn refusal(changes: &[(&str, Value)]) -> String {
    let mut model = Model::new();
    model.create("x", json!({ "slackProfileRef": { "name": "s" } }));
    let mut inputs = model.inputs();
    let of = inputs.allocations.remove(0);
    let mut all = json!({
        "assigned": ["n1"], "refused": null,
        "allocation": *of.object, "node": inputs.cache_node.as_deref(), "pool": of.pool.as_deref(),
        "profile": {
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile",
            "metadata": { "name": "s", "namespace": "n" },
            "spec": {
                "subject": { "model": "m", "gpuProduct": "H200", "engineVersion": "e" },
                "configMapRef": { "name": "c", "key": "k" },
            },
            "status": { "conditions": [{
                "type": "Valid", "status": "True", "reason": "AsDesired", "message": "text", "lastTransitionTime": at(0),
            }] },
        },
    });
    all["node"]["status"]["gpus"] = json!([{ "uuid": "GPU-0", "product": "H200" }]);
    for (path, value) in changes {
        set(&mut all, path, value.clone());
    }
    inputs.cache_node = Some(Arc::new(object(all["node"].take())));
    let refused = all["refused"].as_str().map(|message| Refusal::new(Reason::Conflict, message));
    let assignment =
        PoolAssignment { nodes: object(all["assigned"].take()), refused, ..PoolAssignment::default() };
    let of = ResolvedAllocation {
        object: Arc::new(object(all["allocation"].take())),
        pool: Some(Arc::new(object(all["pool"].take()))),
        assignment,
        profile: Some(Arc::new(object(all["profile"].take()))),
    };
    let refused = validate::validate(&of, &inputs);
    refused.map(|refused| format!("{}: {}", refused.reason, refused.message)).unwrap_or_default()
}

#[test]
fn rejects_missing_or_unsuitable_references() {
    assert_eq!(refusal(&[]), "");
    let mig = ("/allocation/spec/gpuUuid", json!("MIG-9"));
    let product = ("/profile/spec/subject/gpuProduct", json!("L4"));
    assert_eq!(refusal(std::slice::from_ref(&mig)), "", "agents do not report MIG partitions");
    let unseen = refusal(&[("/node/status/gpus", json!([])), product.clone()]);
    assert_eq!(unseen, "", "the GPU is unknown before its driver is loaded");
    assert!(
        refusal(&[mig, product]).starts_with("WrongGpu: SlackProfile s was measured on L4, but GPU MIG-9")
    );
    let cases = [
        ("/pool/metadata/deletionTimestamp", json!(at(0)), "ReferenceNotFound: SSDPool p is being deleted"),
        ("/refused", json!("no"), "Conflict: SSDPool p is rejected: no"),
        ("/assigned", json!([]), "ReferenceNotFound: SSDPool p is not on node n1"),
        (
            "/profile/metadata/deletionTimestamp",
            json!(at(0)),
            "ReferenceNotFound: SlackProfile s is being deleted",
        ),
        (
            "/profile/status/conditions/0/status",
            json!("Unknown"),
            "ReferenceNotFound: cannot determine whether SlackProfile s is valid: text. See",
        ),
        ("/profile/status/conditions", json!([]), "Progressing: SlackProfile s has not been validated yet"),
        (
            "/node/spec/clusterRef/namespace",
            json!("other"),
            "ReferenceNotFound: SlackProfile s of namespace n cannot reach node n1, which gets profiles of namespace other",
        ),
    ];
    for (path, value, words) in cases {
        let reported = refusal(&[(path, value)]);
        assert!(reported.starts_with(words), "'{reported}' is not '{words}'");
    }
}
