//! Passes over the allocations of a node, and reports of its agent.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

mod model;

use model::{ALL, Model, at};
use serde_json::{Value, json};

use super::dereference::NodePresence;
use super::*;
use crate::reconcile::test_objects::object;

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

/// A node with a grant of 8 pairs of `A` to `x`, after a change of its `CacheNode`.
fn granted_with(path: &str, value: Value) -> GrantInputs {
    let mut model = Model::new();
    model.controllers.truncate(1);
    model.create("x", json!({}));
    model.run();
    (model.spec.0, model.reported.0) = (7, 6);
    let mut inputs = model.inputs();
    let mut node = serde_json::to_value(inputs.cache_node.as_deref()).expect("an object");
    let (parent, field) = path.rsplit_once('/').expect("a path");
    node.pointer_mut(parent).expect("an object")[field] = value;
    inputs.cache_node = Some(Arc::new(object(node)));
    inputs
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
        ("/status/applied/queues", json!([{ "uid": "uid-x", "queuePairs": 0, "kept": 8 }]), true),
    ];
    for (path, value, is_held) in cases {
        let inputs = granted_with(path, value);
        let held = inputs.agent_queues(&inputs.allocations[0].object);
        assert_eq!(held.is_some(), is_held, "{path}: {held:?}");
        let gone = GrantInputs { presence: NodePresence::Gone, ..inputs };
        assert_eq!(gone.agent_queues(&gone.allocations[0].object), None);
    }
}
