//! Queue pairs that are lent, when something cannot be written, others write as well, or what was lent is not there any more.

use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use reprise_e2e::{Operator, PATIENCE, wait_until};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::lab::{Lab, SETTLED, SYSTEM};
use crate::queues::{GRANTED, KIND, WAITS, agent_says, ask, grants, lab_with, wait_gone};

/// A policy by which the API server lets nobody change one allocation.
const POLICY: &str = "broken";
/// The operator's lease.
const LEASE: &str = "reprise-operator";
/// A machine that is too busy for three seconds is given this many more tries.
const DECIDES_WITHIN_TRIES: usize = 5;
/// Somebody else's finalizer.
const FOREIGN: &str = "others.example/hold";

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("an object")
}

/// Whether the API server takes a change of an allocation's status, which is not made.
fn is_writable(lab: &Lab, name: &str) -> bool {
    let (api, params) = (lab.api(KIND), PatchParams { dry_run: true, ..PatchParams::default() });
    let body = json!({ "status": { "reservedFor": { "name": "nobody", "uid": "u-0" } } });
    lab.server.block_on(api.patch_status(name, &params, &Patch::Merge(&body))).is_ok()
}

/// From now on nobody changes this allocation. It may be deleted.
fn forbid(lab: &Lab, name: &str) {
    let policy: ValidatingAdmissionPolicy = object(json!({
        "metadata": { "name": POLICY },
        "spec": {
            "matchConstraints": { "resourceRules": [{
                "apiGroups": ["reprise.dev"], "apiVersions": ["v1alpha1"], "operations": ["UPDATE"],
                "resources": ["gpuqueueallocations", "gpuqueueallocations/status"],
            }] },
            "validations": [{ "expression": format!("object.metadata.name != '{name}'") }],
        },
    }));
    let binding: ValidatingAdmissionPolicyBinding = object(json!({
        "metadata": { "name": POLICY },
        "spec": { "policyName": POLICY, "validationActions": ["Deny"] },
    }));
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(lab.client());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(lab.client());
    lab.server.block_on(policies.create(&PostParams::default(), &policy)).expect("a policy is taken");
    lab.server.block_on(bindings.create(&PostParams::default(), &binding)).expect("a binding is taken");
    wait_until("the policy holds", PATIENCE, || (!is_writable(lab, name)).then_some(()));
}

/// The end of it.
fn allow(lab: &Lab, name: &str) {
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(lab.client());
    lab.server.block_on(bindings.delete(POLICY, &DeleteParams::background())).expect("it is there");
    let is_over = || is_writable(lab, name) || lab.get(KIND, name).is_none();
    wait_until("the policy holds no more", PATIENCE, || is_over().then_some(()));
}

#[test]
fn one_that_cannot_be_written_stops_nobody_but_who_needs_its_room() {
    let (lab, operator) = lab_with(&["S1"]);
    lab.world.require("a reconcile failed and is tried again");
    ask(&lab, "broken", json!({ "queuePairs": 4 }));
    lab.wait_condition(KIND, "broken", GRANTED);
    forbid(&lab, "broken");
    // That there are queues is to be said of it, and cannot be.
    agent_says(&lab, "n1", &["S1"], &[("broken", 4)], json!({}));
    ask(&lab, "good", json!({ "queuePairs": 4 }));
    lab.wait_condition(KIND, "good", GRANTED);
    ask(&lab, "waits", json!({ "queuePairs": 12 }));
    lab.wait_condition(KIND, "waits", WAITS);
    lab.delete(KIND, "good");
    wait_gone(&lab, "good");
    lab.wait_condition(KIND, "waits", GRANTED);
    ask(&lab, "needs", json!({ "queuePairs": 4 }));
    lab.wait_condition(KIND, "needs", WAITS);
    lab.delete(KIND, "broken");
    agent_says(&lab, "n1", &["S1"], &[], json!({}));
    std::thread::sleep(SETTLED);
    assert!(lab.get(KIND, "broken").is_some(), "nobody can take its finalizer away");
    assert!(grants(&lab.get(KIND, "needs").expect("it is there")).is_empty(), "its room is not free");
    allow(&lab, "broken");
    let mut look = 0;
    wait_until("it is gone", PATIENCE, || {
        // The delay has grown meanwhile: another of the node is looked at.
        look += 1;
        lab.merge(
            KIND,
            "waits",
            &json!({ "metadata": { "annotations": { "test/look": look.to_string() } } }),
        );
        std::thread::sleep(Duration::from_millis(200));
        lab.get(KIND, "broken").is_none().then_some(())
    });
    lab.wait_condition(KIND, "needs", GRANTED);
    operator.kill();
}

#[test]
fn a_grant_whose_controller_is_gone_or_lends_less_says_so() {
    let (lab, operator) = lab_with(&["S1", "S2"]);
    ask(&lab, "a", json!({}));
    lab.wait_condition(KIND, "a", GRANTED);
    agent_says(&lab, "n1", &["S2"], &[], json!({}));
    let said = lab.wait_condition(KIND, "a", ["Allocated", "False", "NoDevices"]);
    assert!(said.contains("no controller S1 any more"), "{said}");
    agent_says(&lab, "n1", &["S1", "S2"], &[], json!({}));
    lab.wait_condition(KIND, "a", GRANTED);
    let percent = |percent: u32| json!({ "spec": { "devices": { "maxGpuQueuePercent": percent } } });
    lab.merge("SSDPool", "p", &percent(10));
    let said = lab.wait_condition(KIND, "a", ["Allocated", "False", "OverBudget"]);
    assert!(
        said.contains("S1 (lends 3; held by cache/a 8)") && said.contains("maxGpuQueuePercent"),
        "{said}"
    );
    assert_eq!(grants(&lab.get(KIND, "a").expect("it is there")).len(), 2, "the grant stands");
    lab.merge("SSDPool", "p", &percent(25));
    lab.wait_condition(KIND, "a", GRANTED);
    operator.kill();
}

#[test]
fn what_an_agent_writes_into_a_grant_stays_and_counts_by_its_version() {
    let (lab, operator) = lab_with(&["S1"]);
    ask(&lab, "a", json!({ "queuePairs": 2 }));
    lab.wait_condition(KIND, "a", GRANTED);
    agent_says(&lab, "n1", &["S1"], &[("a", 2)], json!({}));
    lab.wait_condition(KIND, "a", ["Programmed", "True", "AsDesired"]);
    let numbered = json!([
        { "serial": "S1", "pciAddress": "0000:01:00.0", "queuePairs": 2, "queueIDs": [17, 18] },
    ]);
    let claim = |version: Option<String>| {
        let body =
            json!({ "metadata": { "resourceVersion": version }, "status": { "allocations": numbered } });
        lab.server.block_on(lab.api(KIND).patch_status("a", &PatchParams::default(), &Patch::Merge(&body)))
    };
    let seen = lab.get(KIND, "a").expect("it is there").resource_version();
    claim(seen.clone()).expect("nobody has written meanwhile");
    agent_says(&lab, "n1", &["S1"], &[("a", 1)], json!({}));
    lab.wait_condition(KIND, "a", ["Programmed", "False", "Progressing"]);
    assert_eq!(json!(grants(&lab.get(KIND, "a").expect("it is there"))), numbered);
    match claim(seen).expect_err("the operator has written meanwhile") {
        kube::Error::Api(status) => assert_eq!(status.code, 409),
        other => panic!("{other}"),
    }
    operator.kill();
}

#[test]
fn grants_of_a_node_that_leaves_its_cluster_end() {
    let (lab, operator) = lab_with(&["S1"]);
    for name in ["stays", "goes"] {
        ask(&lab, name, json!({ "queuePairs": 4 }));
        lab.wait_condition(KIND, name, GRANTED);
    }
    agent_says(&lab, "n1", &["S1"], &[("stays", 4), ("goes", 4)], json!({}));
    lab.delete(KIND, "goes");
    lab.wait_condition(KIND, "goes", ["DeletionBlocked", "True", "Releasing"]);
    lab.cluster(json!({ "pools": [{ "name": "p" }], "agents": { "nodeSelector": { "name": "n2" } } }));
    lab.wait_condition(KIND, "stays", ["Released", "False", "Releasing"]);
    wait_until("its agent is told to let go of them", PATIENCE, || {
        lab.get("CacheNode", "n1").expect("it is there").data["spec"]["queues"].is_null().then_some(())
    });
    std::thread::sleep(SETTLED);
    assert!(lab.get(KIND, "goes").is_some() && lab.get("CacheNode", "n1").is_some(), "its agent has them");
    agent_says(&lab, "n1", &["S1"], &[], json!({}));
    wait_gone(&lab, "goes");
    let said = lab.wait_condition(KIND, "stays", ["Released", "True", "AgentGone"]);
    assert!(said.contains("KVCacheCluster cache/c has node n1 no more"), "{said}");
    wait_until("nothing of ours holds it", PATIENCE, || {
        lab.get(KIND, "stays").expect("it is there").finalizers().is_empty().then_some(())
    });
    wait_until("its CacheNode is gone", PATIENCE, || lab.get("CacheNode", "n1").is_none().then_some(()));
    operator.kill();
}

#[test]
fn room_of_a_deleted_one_that_somebody_else_holds_is_lent() {
    let (lab, operator) = lab_with(&["S1"]);
    ask(&lab, "a", json!({ "queuePairs": 12 }));
    lab.wait_condition(KIND, "a", GRANTED);
    lab.merge(KIND, "a", &json!({ "metadata": { "finalizers": ["reprise.dev/queues", FOREIGN] } }));
    ask(&lab, "b", json!({}));
    lab.wait_condition(KIND, "b", WAITS);
    lab.delete(KIND, "a");
    lab.wait_condition(KIND, "a", ["Released", "True", "AsDesired"]);
    lab.wait_condition(KIND, "b", GRANTED);
    wait_until("only the other one holds it", PATIENCE, || {
        (lab.get(KIND, "a")?.finalizers() == [FOREIGN]).then_some(())
    });
    lab.merge(KIND, "a", &json!({ "metadata": { "finalizers": null } }));
    wait_gone(&lab, "a");
    operator.kill();
}

/// Takes the lease from an operator right after a renewal, and has it something to grant. Whether it has decided to grant before it ended: it has three
/// seconds for that, until it looks at the lease again.
fn decides_without_its_lease(lab: &Lab, operator: &Operator) -> bool {
    let leases: Api<Lease> = Api::namespaced(lab.client(), SYSTEM);
    let renewed = || {
        let lease = lab.server.block_on(leases.get(LEASE)).expect("the operator has it");
        lease.spec.and_then(|spec| spec.renew_time).expect("it is renewed")
    };
    let before = renewed();
    wait_until("the lease is renewed", PATIENCE, || (renewed() != before).then_some(()));
    let taken = json!({ "spec": { "holderIdentity": "another" } });
    let patched = lab.server.block_on(leases.patch(LEASE, &PatchParams::default(), &Patch::Merge(&taken)));
    patched.expect("a lease is taken");
    agent_says(lab, "n1", &["S1"], &[], json!({}));
    wait_until("the operator decides to grant, or ends", PATIENCE, || {
        let has_ended = operator.admin().get("/healthz").is_err();
        let x = lab.get(KIND, "x").expect("it is there");
        assert!(grants(&x).is_empty());
        let has_decided = x.finalizers() == ["reprise.dev/queues"];
        (has_decided || has_ended).then_some(has_decided)
    })
}

#[test]
fn an_operator_whose_lease_was_taken_grants_nothing_and_the_next_one_does() {
    let (lab, mut operator) = lab_with(&[]);
    for words in
        ["another replica holds the lease", "the lease is lost", "a reconcile failed and is tried again"]
    {
        lab.world.allow(words);
    }
    ask(&lab, "x", json!({}));
    let leases: Api<Lease> = Api::namespaced(lab.client(), SYSTEM);
    // The other one is not there, so the lease would have to run out.
    let give_up_lease = || {
        lab.server.block_on(leases.delete(LEASE, &DeleteParams::background())).expect("it is there");
    };
    for tries in 0.. {
        lab.wait_condition(KIND, "x", ["Allocated", "False", "NoDevices"]);
        if decides_without_its_lease(&lab, &operator) {
            break;
        }
        // The machine was too busy: the operator has ended before it came to that.
        assert!(tries < DECIDES_WITHIN_TRIES, "the operator decides nothing within three seconds");
        agent_says(&lab, "n1", &[], &[], json!({}));
        give_up_lease();
        operator = lab.operator();
        wait_until("it works", PATIENCE, || {
            (operator.metric("reprise_operator_leader", "") > 0.0).then_some(())
        });
    }
    wait_until("the operator ends", PATIENCE, || {
        assert!(grants(&lab.get(KIND, "x").expect("it is there")).is_empty());
        operator.admin().get("/healthz").is_err().then_some(())
    });
    std::thread::sleep(SETTLED);
    assert!(grants(&lab.get(KIND, "x").expect("it is there")).is_empty());
    give_up_lease();
    let next = lab.operator_files("next").start().expect("the operator starts");
    lab.wait_condition(KIND, "x", GRANTED);
    next.kill();
}
