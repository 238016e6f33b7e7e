//! Queue-pair grants under faults: rejected writes, concurrent writers, lost leases and missing controllers.

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

use crate::operator::queues::{
    GRANTED, KIND, WAITING, cluster_with_controllers, create_allocation, delete_and_wait, grant, grants,
    report_queues, wait_deleted,
};
use crate::operator::test_cluster::{OPERATOR_NAMESPACE, TestCluster};

/// Policy that makes the API server reject changes of one allocation.
const POLICY: &str = "broken";
/// Name of the operator's lease.
const LEASE: &str = "reprise-operator";
/// Maximum number of further attempts on a machine that is too busy for three seconds.
const DECIDES_WITHIN_TRIES: usize = 5;
/// Finalizer of another component.
const FOREIGN: &str = "others.example/hold";

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("an object")
}

/// Whether the API server accepts a change of an allocation's status. The change is a dry run.
fn is_writable(k8s: &TestCluster, name: &str) -> bool {
    let (api, params) = (k8s.api(KIND), PatchParams { dry_run: true, ..PatchParams::default() });
    let body = json!({ "status": { "expiresAt": "2030-01-01T00:00:00Z" } });
    k8s.server.block_on(api.patch_status(name, &params, &Patch::Merge(&body))).is_ok()
}

/// Rejects all updates of this allocation. It may still be deleted.
fn forbid(k8s: &TestCluster, name: &str) {
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
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(k8s.client());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(k8s.client());
    k8s.server.block_on(policies.create(&PostParams::default(), &policy)).expect("the policy is accepted");
    k8s.server.block_on(bindings.create(&PostParams::default(), &binding)).expect("the binding is accepted");
    wait_until("the policy is in effect", PATIENCE, || (!is_writable(k8s, name)).then_some(()));
}

/// Removes the policy again.
fn allow(k8s: &TestCluster, name: &str) {
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(k8s.client());
    k8s.server.block_on(bindings.delete(POLICY, &DeleteParams::background())).expect("the object exists");
    let is_over = || is_writable(k8s, name) || k8s.get(KIND, name).is_none();
    wait_until("the policy is no longer in effect", PATIENCE, || is_over().then_some(()));
}

#[test]
fn unwritable_allocation_blocks_only_its_own_queue_pairs() {
    let (k8s, _operator) = cluster_with_controllers(&["S1"]);
    k8s.env.require("reconcile failed; retrying");
    grant(&k8s, "broken", json!({ "queuePairs": 4 }));
    forbid(&k8s, "broken");
    // The operator cannot record the created queues in its status.
    report_queues(&k8s, "n1", &["S1"], &[("broken", 4)], json!({}));
    grant(&k8s, "good", json!({ "queuePairs": 4 }));
    create_allocation(&k8s, "waits", json!({ "queuePairs": 12 }));
    k8s.wait_condition(KIND, "waits", WAITING);
    delete_and_wait(&k8s, "good");
    k8s.wait_condition(KIND, "waits", GRANTED);
    create_allocation(&k8s, "needs", json!({ "queuePairs": 4 }));
    k8s.wait_condition(KIND, "needs", WAITING);
    k8s.delete(KIND, "broken");
    report_queues(&k8s, "n1", &["S1"], &[], json!({}));
    k8s.settle();
    assert!(k8s.get(KIND, "broken").is_some(), "its finalizer cannot be removed");
    assert!(
        grants(&k8s.get(KIND, "needs").expect("the object exists")).is_empty(),
        "its queue pairs are not free"
    );
    allow(&k8s, "broken");
    let mut attempts = 0;
    wait_until("the allocation is deleted", PATIENCE, || {
        // The retry delay has grown, so a change of another allocation triggers the node's reconcile.
        attempts += 1;
        k8s.merge(
            KIND,
            "waits",
            &json!({ "metadata": { "annotations": { "test/resync": attempts.to_string() } } }),
        );
        std::thread::sleep(Duration::from_millis(200));
        k8s.get(KIND, "broken").is_none().then_some(())
    });
    k8s.wait_condition(KIND, "needs", GRANTED);
}

#[test]
fn grant_reports_missing_controller_or_reduced_budget() {
    let (k8s, _operator) = cluster_with_controllers(&["S1", "S2"]);
    grant(&k8s, "a", json!({}));
    report_queues(&k8s, "n1", &["S2"], &[], json!({}));
    k8s.wait_message(
        KIND,
        "a",
        ["Allocated", "False", "NoDevices"],
        &["node n1 no longer has controller S1"],
    );
    report_queues(&k8s, "n1", &["S1", "S2"], &[], json!({}));
    k8s.wait_condition(KIND, "a", GRANTED);
    let percent = |percent: u32| json!({ "spec": { "devices": { "maxGpuQueuePercent": percent } } });
    k8s.merge("SSDPool", "p", &percent(10));
    k8s.wait_message(
        KIND,
        "a",
        ["Allocated", "False", "OverBudget"],
        &["S1 (budget 3; held by cache/a 8)", "maxGpuQueuePercent"],
    );
    assert_eq!(grants(&k8s.get(KIND, "a").expect("the object exists")).len(), 2, "the grant remains");
    k8s.merge("SSDPool", "p", &percent(25));
    k8s.wait_condition(KIND, "a", GRANTED);
}

#[test]
fn foreign_write_into_grant_is_kept_and_version_checked() {
    let (k8s, _operator) = cluster_with_controllers(&["S1"]);
    grant(&k8s, "a", json!({ "queuePairs": 2 }));
    report_queues(&k8s, "n1", &["S1"], &[("a", 2)], json!({}));
    k8s.wait_condition(KIND, "a", ["Programmed", "True", "AsDesired"]);
    let moved = json!([{ "serial": "S1", "pciAddress": "0000:17:00.0", "queuePairs": 2 }]);
    let claim = |version: Option<String>| {
        let body = json!({ "metadata": { "resourceVersion": version }, "status": { "allocations": moved } });
        k8s.server.block_on(k8s.api(KIND).patch_status("a", &PatchParams::default(), &Patch::Merge(&body)))
    };
    let seen = k8s.get(KIND, "a").expect("the object exists").resource_version();
    claim(seen.clone()).expect("the version is current");
    report_queues(&k8s, "n1", &["S1"], &[("a", 1)], json!({}));
    k8s.wait_condition(KIND, "a", ["Programmed", "False", "NotRequested"]);
    assert_eq!(json!(grants(&k8s.get(KIND, "a").expect("the object exists"))), moved);
    match claim(seen).expect_err("the operator has written a newer version") {
        kube::Error::Api(status) => assert_eq!(status.code, 409),
        other => panic!("{other}"),
    }
}

#[test]
fn grants_end_when_node_leaves_cluster() {
    let (k8s, _operator) = cluster_with_controllers(&["S1"]);
    for name in ["stays", "goes"] {
        grant(&k8s, name, json!({ "queuePairs": 4 }));
    }
    report_queues(&k8s, "n1", &["S1"], &[("stays", 4), ("goes", 4)], json!({}));
    k8s.delete(KIND, "goes");
    k8s.wait_condition(KIND, "goes", ["DeletionBlocked", "True", "Releasing"]);
    k8s.cluster(json!({ "pools": [{ "name": "p" }], "agents": { "nodeSelector": { "name": "n2" } } }));
    k8s.wait_condition(KIND, "stays", ["Released", "False", "Releasing"]);
    wait_until("the spec no longer has the allocations", PATIENCE, || {
        k8s.get("CacheNode", "n1").expect("the object exists").data["spec"]["queues"].is_null().then_some(())
    });
    k8s.settle();
    assert!(
        k8s.get(KIND, "goes").is_some() && k8s.get("CacheNode", "n1").is_some(),
        "the agent holds the queue pairs"
    );
    report_queues(&k8s, "n1", &["S1"], &[], json!({}));
    wait_deleted(&k8s, "goes");
    k8s.wait_message(
        KIND,
        "stays",
        ["Released", "True", "AgentGone"],
        &["node n1 no longer belongs to KVCacheCluster cache/c"],
    );
    wait_until("the allocation has no finalizer", PATIENCE, || {
        k8s.get(KIND, "stays").expect("the object exists").finalizers().is_empty().then_some(())
    });
    wait_until("its CacheNode is deleted", PATIENCE, || k8s.get("CacheNode", "n1").is_none().then_some(()));
}

#[test]
fn queue_pairs_of_deleted_allocation_with_foreign_finalizer_are_reused() {
    let (k8s, _operator) = cluster_with_controllers(&["S1"]);
    grant(&k8s, "a", json!({ "queuePairs": 12 }));
    k8s.merge(KIND, "a", &json!({ "metadata": { "finalizers": ["reprise.dev/queues", FOREIGN] } }));
    create_allocation(&k8s, "b", json!({}));
    k8s.wait_condition(KIND, "b", WAITING);
    k8s.delete(KIND, "a");
    k8s.wait_condition(KIND, "a", ["Released", "True", "AsDesired"]);
    k8s.wait_condition(KIND, "b", GRANTED);
    wait_until("only the foreign finalizer remains", PATIENCE, || {
        (k8s.get(KIND, "a")?.finalizers() == [FOREIGN]).then_some(())
    });
    k8s.merge(KIND, "a", &json!({ "metadata": { "finalizers": null } }));
    wait_deleted(&k8s, "a");
}

/// Takes the lease from an operator right after a renewal, and offers it something to grant.
///
/// Returns whether the operator decided to grant before it exited. It reads the lease every three seconds.
fn decides_without_its_lease(k8s: &TestCluster, operator: &Operator) -> bool {
    let leases: Api<Lease> = Api::namespaced(k8s.client(), OPERATOR_NAMESPACE);
    let renewed = || {
        let lease = k8s.server.block_on(leases.get(LEASE)).expect("the lease exists");
        lease.spec.and_then(|spec| spec.renew_time).expect("the lease has a renew time")
    };
    let before = renewed();
    wait_until("the lease is renewed", PATIENCE, || (renewed() != before).then_some(()));
    let taken = json!({ "spec": { "holderIdentity": "another" } });
    let patched = k8s.server.block_on(leases.patch(LEASE, &PatchParams::default(), &Patch::Merge(&taken)));
    patched.expect("the lease is accepted");
    report_queues(k8s, "n1", &["S1"], &[], json!({}));
    wait_until("the operator decides to grant, or exits", PATIENCE, || {
        let has_ended = operator.admin().get("/healthz").is_err();
        let x = k8s.get(KIND, "x").expect("the object exists");
        assert!(grants(&x).is_empty());
        let has_decided = x.finalizers() == ["reprise.dev/queues"];
        (has_decided || has_ended).then_some(has_decided)
    })
}

#[test]
fn operator_without_lease_grants_nothing_and_successor_does() {
    let (k8s, mut operator) = cluster_with_controllers(&[]);
    for words in ["another replica holds the lease", "lost the lease", "reconcile failed; retrying"] {
        k8s.env.allow(words);
    }
    create_allocation(&k8s, "x", json!({}));
    let leases: Api<Lease> = Api::namespaced(k8s.client(), OPERATOR_NAMESPACE);
    // The new holder does not exist, so the lease would have to expire.
    let give_up_lease = || {
        k8s.server.block_on(leases.delete(LEASE, &DeleteParams::background())).expect("the object exists");
    };
    for tries in 0.. {
        k8s.wait_condition(KIND, "x", ["Allocated", "False", "NoDevices"]);
        if decides_without_its_lease(&k8s, &operator) {
            break;
        }
        // The machine was too busy: the operator exited before its decision.
        assert!(tries < DECIDES_WITHIN_TRIES, "the operator decides nothing within three seconds");
        report_queues(&k8s, "n1", &[], &[], json!({}));
        give_up_lease();
        operator = k8s.operator();
        wait_until("the operator is active", PATIENCE, || {
            (operator.metric("reprise_operator_leader", "") > 0.0).then_some(())
        });
    }
    wait_until("the operator exits", PATIENCE, || {
        assert!(grants(&k8s.get(KIND, "x").expect("the object exists")).is_empty());
        operator.admin().get("/healthz").is_err().then_some(())
    });
    k8s.settle();
    assert!(grants(&k8s.get(KIND, "x").expect("the object exists")).is_empty());
    give_up_lease();
    let next = k8s.operator_files("next").start().expect("the operator starts");
    k8s.wait_condition(KIND, "x", GRANTED);
    next.kill();
}
