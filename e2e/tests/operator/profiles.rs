//! Slack profiles: target nodes, rollout order, counts of reports, rejected profiles, and the limit per node.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::operator::convergence::wait_until_idle;
use crate::operator::test_cluster::{QUIET_PERIOD, TestCluster, measurement, window};

const H200: &str = "NVIDIA H200";
const L4: &str = "NVIDIA L4";

/// Measurement with `micros` microseconds of slack in decode.
fn measured(micros: u32) -> Value {
    measurement(&json!([window("Decode", [0, 512], micros), window("Prefill", [0, 8192], 900)]))
}

/// Applies profile `p` with additional spec fields.
fn profile(k8s: &TestCluster, more: Value) {
    let mut spec =
        json!({ "subject": { "model": "llama", "gpuProduct": H200, "engineVersion": "vllm 0.33" } });
    spec.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
    k8s.apply_resource("SlackProfile", "p", spec);
}

/// Simulates a report of a node's agent with a GPU and these profiles.
fn report_profiles(k8s: &TestCluster, node: &str, product: &str, profiles: Value) {
    let found = k8s.wait_for("CacheNode", node);
    // A time in the future, so that the agent does not count as silent on a slow machine.
    let last_updated = (Timestamp::now() + SignedDuration::from_hours(1)).to_string();
    let status = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": node },
        "status": {
            "observedGeneration": found.metadata.generation,
            "lastUpdated": last_updated,
            "gpus": [{ "uuid": "GPU-0a", "product": product }],
            "applied": { "profiles": profiles },
        },
    });
    let params = PatchParams::apply("reprise-agent").force();
    let api = k8s.api("CacheNode");
    let patched = k8s.server.block_on(api.patch_status(node, &params, &Patch::Apply(&status)));
    patched.expect("the status is accepted");
}

/// Report of a node that uses a revision.
fn running_revision(digest: &str) -> Value {
    json!([{ "name": "p", "digest": digest }])
}

/// Digest of the revision in a node's spec.
fn claim(k8s: &TestCluster, node: &str) -> Option<String> {
    let claims = k8s.get("CacheNode", node)?.data["spec"]["profiles"].clone();
    let claim = claims.as_array()?.iter().find(|claim| claim["name"] == "p")?;
    claim["digest"].as_str().map(str::to_owned)
}

/// Waits until a node's spec has another revision than this.
fn wait_claim(k8s: &TestCluster, node: &str, unlike: &str) -> String {
    wait_until(&format!("the spec of {node} has another revision than '{unlike}'"), PATIENCE, || {
        claim(k8s, node).filter(|digest| digest != unlike)
    })
}

/// Waits until a condition of the profile has this status and reason. Returns its message.
fn wait(k8s: &TestCluster, wanted: [&str; 3]) -> String {
    k8s.wait_condition("SlackProfile", "p", wanted)
}

/// Both agents report a GPU and no profile.
fn report_no_profiles(k8s: &TestCluster) {
    for node in ["n1", "n2"] {
        report_profiles(k8s, node, H200, json!([]));
    }
}

/// Reports the first revision on `n1`, and waits until `n2` gets it and all nodes have it.
fn distribute_to_n2(k8s: &TestCluster, first: &str) {
    report_profiles(k8s, "n1", H200, running_revision(first));
    assert_eq!(wait_claim(k8s, "n2", ""), first);
    report_profiles(k8s, "n2", H200, running_revision(first));
    wait(k8s, ["Distributed", "True", "AsDesired"]);
}

fn wait_message(k8s: &TestCluster, wanted: [&str; 3], words: &[&str]) {
    k8s.wait_message("SlackProfile", "p", wanted, words);
}

fn status(k8s: &TestCluster) -> Value {
    k8s.get("SlackProfile", "p").expect("the object exists").data["status"].clone()
}

fn file(digest: &str) -> String {
    format!("profile-{}.json", digest.trim_start_matches("sha256:"))
}

/// The content of a revision in the agents' ConfigMap.
fn content(k8s: &TestCluster, digest: &str) -> Option<String> {
    let map = k8s.get("ConfigMap", "c-agent")?;
    map.data["data"][file(digest)].as_str().map(str::to_owned)
}

#[test]
fn profile_is_distributed_to_nodes_with_its_gpu_and_counted_from_reports() {
    let (k8s, _operator) = TestCluster::with_operator();
    profile(&k8s, json!({ "measurement": measured(60) }));
    wait_message(&k8s, ["Accepted", "False", "ReferenceNotFound"], &["set spec.slackProfiles"]);
    k8s.cluster(json!({ "slackProfiles": {} }));
    wait_message(&k8s, ["Distributed", "False", "NoNodes"], &["no node of cache/c has reported a GPU"]);
    wait(&k8s, ["Accepted", "True", "AsDesired"]);
    wait(&k8s, ["Valid", "True", "AsDesired"]);
    for node in ["n1", "n2"] {
        report_profiles(&k8s, node, L4, json!([]));
    }
    wait_message(&k8s, ["Distributed", "False", "WrongGpu"], &[H200, L4, "subject.gpuProduct"]);
    assert_eq!((claim(&k8s, "n1"), claim(&k8s, "n2")), (None, None));

    report_profiles(&k8s, "n1", H200, json!([]));
    let digest = wait_claim(&k8s, "n1", "");
    wait(&k8s, ["Distributed", "False", "Progressing"]);
    let text = wait_until("the agents' ConfigMap has its content", PATIENCE, || content(&k8s, &digest));
    let hex: String = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(format!("sha256:{hex}"), digest);
    let read: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((&read["subject"]["gpuProduct"], &read["usablePercent"]), (&json!(H200), &json!(80)));

    let measured = json!([{
        "name": "p", "digest": digest, "predictionErrorP50Percent": 4, "predictionErrorP99Percent": 12,
    }]);
    report_profiles(&k8s, "n1", H200, measured);
    for (condition, is) in [("Distributed", "True"), ("Active", "True"), ("Drifted", "False")] {
        wait(&k8s, [condition, is, "AsDesired"]);
    }
    let found = status(&k8s);
    assert_eq!(found["nodes"], json!({ "target": 1, "applied": 1, "failed": 0 }));
    let measured = json!({ "predictionErrorP50Percent": 4, "predictionErrorP99Percent": 12 });
    assert_eq!((&found["measured"], &found["revision"]), (&measured, &json!(1)));
    assert_eq!(found["digest"], digest);
    assert_eq!(claim(&k8s, "n2"), None, "the node has another GPU");

    // Distributed profiles are not written again.
    let versions = || {
        ["CacheNode/n1", "CacheNode/n2", "ConfigMap/c-agent"].map(|key| {
            let (kind, name) = key.split_once('/').expect("kind and name");
            k8s.get(kind, name).expect("the object exists").resource_version()
        })
    };
    wait_until_idle(&k8s);
    let before = (versions(), status(&k8s));
    k8s.merge("SlackProfile", "p", &json!({ "metadata": { "annotations": { "test/resync": "1" } } }));
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!((versions(), status(&k8s)), before);

    k8s.delete("SlackProfile", "p");
    wait_until("the node no longer has a profile", PATIENCE, || claim(&k8s, "n1").is_none().then_some(()));
    wait_until("its content is removed", PATIENCE, || content(&k8s, &digest).is_none().then_some(()));
    let map = k8s.wait_for("ConfigMap", "c-agent");
    assert!(map.data["data"]["agent.toml"].is_string(), "the configuration remains");
}

#[test]
fn rejecting_or_drifting_canary_stops_rollout() {
    let (k8s, _operator) = TestCluster::with_operator();
    let canary = json!({ "nodeSelector": { "matchLabels": { "name": "n1" } }, "soak": "3s" });
    let revision = |usable: u32| {
        let rollout = json!({ "canary": canary });
        profile(&k8s, json!({ "measurement": measured(60), "usablePercent": usable, "rollout": rollout }));
    };
    revision(80);
    k8s.cluster(json!({ "slackProfiles": {} }));
    report_no_profiles(&k8s);
    let first = wait_claim(&k8s, "n1", "");
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!(claim(&k8s, "n2"), None, "the canary has not reported yet");
    report_profiles(&k8s, "n1", H200, running_revision(&first));
    wait_until("the canary soaks", PATIENCE, || {
        wait(&k8s, ["Distributed", "False", "Progressing"]).contains("rollout.canary.soak").then_some(())
    });
    assert!(status(&k8s)["soakingSince"].is_string());
    assert_eq!(wait_claim(&k8s, "n2", ""), first);
    report_profiles(&k8s, "n2", H200, running_revision(&first));
    wait(&k8s, ["Distributed", "True", "AsDesired"]);

    // The canary rejects the next revision, and the other node keeps the first one.
    revision(50);
    let second = wait_claim(&k8s, "n1", &first);
    report_profiles(&k8s, "n1", H200, json!([{ "name": "p", "digest": second, "refused": "it is odd" }]));
    wait_message(
        &k8s,
        ["Distributed", "False", "Refused"],
        &["canary node n1 refuses revision 2: it is odd"],
    );
    wait(&k8s, ["Active", "False", "Refused"]);
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!(claim(&k8s, "n2").as_deref(), Some(first.as_str()));
    assert_eq!(status(&k8s)["nodes"], json!({ "target": 2, "applied": 0, "failed": 1 }));

    // The canary measures a drift of the next revision.
    revision(60);
    let third = wait_claim(&k8s, "n1", &second);
    let drifts = json!([{
        "name": "p", "digest": third, "predictionErrorP50Percent": 40, "predictionErrorP99Percent": 90,
    }]);
    report_profiles(&k8s, "n1", H200, drifts);
    wait_message(&k8s, ["Drifted", "True", "MeasuredDifference"], &["n1: an error of 90 %"]);
    wait_message(
        &k8s,
        ["Distributed", "False", "MeasuredDifference"],
        &["The other nodes keep their revision"],
    );
    // Longer than the soak time.
    std::thread::sleep(3 * QUIET_PERIOD);
    assert_eq!(claim(&k8s, "n2").as_deref(), Some(first.as_str()));
    for digest in [&first, &third] {
        assert!(content(&k8s, digest).is_some(), "both revisions are in use");
    }

    // Old content gets a new revision number, and the content of the third revision is removed.
    revision(80);
    assert_eq!(wait_claim(&k8s, "n1", &third), first);
    report_profiles(&k8s, "n1", H200, running_revision(&first));
    wait(&k8s, ["Distributed", "True", "AsDesired"]);
    assert_eq!(status(&k8s)["revision"], 4);
    wait_until("the content of the third revision is removed", PATIENCE, || {
        content(&k8s, &third).is_none().then_some(())
    });
}

#[test]
fn config_map_measurements_are_followed_and_invalid_ones_rejected() {
    let (k8s, _operator) = TestCluster::with_operator();
    let write = |measurement: &str| {
        k8s.apply(&json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "measured" }, "data": { "measurement": measurement },
        }));
    };
    profile(&k8s, json!({ "configMapRef": { "name": "measured", "key": "measurement" } }));
    k8s.cluster(json!({ "slackProfiles": {} }));
    report_no_profiles(&k8s);
    wait_message(
        &k8s,
        ["Accepted", "False", "ReferenceNotFound"],
        &["ConfigMap measured does not exist in namespace cache"],
    );
    let mut asleep = measured(60);
    asleep["windows"][0]["phase"] = json!("Nap");
    write(&asleep.to_string());
    wait_message(&k8s, ["Valid", "False", "ProfileInvalid"], &["windows[0]", "Nap", "expected JSON such as"]);
    assert_eq!((claim(&k8s, "n1"), claim(&k8s, "n2")), (None, None));

    // Without a canary, one node at a time changes its revision, starting with n1.
    write(&measured(60).to_string());
    wait(&k8s, ["Valid", "True", "AsDesired"]);
    let first = wait_claim(&k8s, "n1", "");
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!(claim(&k8s, "n2"), None);
    distribute_to_n2(&k8s, &first);

    write(&measured(70).to_string());
    let second = wait_claim(&k8s, "n1", &first);
    wait_message(&k8s, ["Distributed", "False", "Progressing"], &["have revision 2"]);

    // Invalid windows change nothing on the nodes.
    let mut twice = measured(70);
    twice["windows"][1]["phase"] = json!("Decode");
    write(&twice.to_string());
    wait_message(
        &k8s,
        ["Valid", "False", "ProfileInvalid"],
        &["windows[1] and windows[0] of Decode overlap"],
    );
    wait_message(&k8s, ["Distributed", "False", "ProfileInvalid"], &["2 of 2 nodes keep"]);
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!((claim(&k8s, "n1"), claim(&k8s, "n2")), (Some(second.clone()), Some(first)));
    assert_eq!(status(&k8s)["digest"], second);

    let digest = format!("registry.example/slack/llama@sha256:{}", "0f".repeat(32));
    profile(&k8s, json!({ "ociRef": { "reference": digest } }));
    wait_message(&k8s, ["Accepted", "False", "Unsupported"], &["ociRef is not supported by this release"]);
}

#[test]
fn restarted_operator_continues_rollout() {
    let k8s = TestCluster::new();
    let files = k8s.operator_files("operator");
    let operator = files.start().expect("the operator starts");
    profile(&k8s, json!({ "measurement": measured(60) }));
    k8s.cluster(json!({ "slackProfiles": {} }));
    report_no_profiles(&k8s);
    let first = wait_claim(&k8s, "n1", "");
    distribute_to_n2(&k8s, &first);
    profile(&k8s, json!({ "measurement": measured(70) }));
    let second = wait_claim(&k8s, "n1", &first);
    assert!(operator.terminate().success());

    // During a rollout both nodes keep their revisions after the restart, and both contents remain.
    let again = files.start().expect("the operator starts again");
    wait_until("the profile is reconciled", PATIENCE, || {
        let reconciles = again.metric("reprise_operator_reconciles_total", "kind=\"SlackProfile\"");
        (reconciles >= 1.0).then_some(())
    });
    std::thread::sleep(QUIET_PERIOD);
    assert_eq!((claim(&k8s, "n1"), claim(&k8s, "n2")), (Some(second.clone()), Some(first.clone())));
    for digest in [&first, &second] {
        assert!(content(&k8s, digest).is_some(), "a node uses the revision");
    }
    report_profiles(&k8s, "n1", H200, running_revision(&second));
    assert_eq!(wait_claim(&k8s, "n2", &first), second);
    wait_until("the status has the second revision", PATIENCE, || {
        (status(&k8s)["revision"] == 2).then_some(())
    });
}

#[test]
fn youngest_profile_over_node_limit_waits() {
    let (k8s, _operator) = TestCluster::with_operator();
    let named = |name: &str| {
        let subject = json!({ "model": "llama", "gpuProduct": H200, "engineVersion": "vllm 0.33" });
        k8s.apply(&json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile", "metadata": { "name": name },
            "spec": { "subject": subject, "measurement": measured(60) },
        }));
    };
    let all: Vec<String> = (0..16).map(|number| format!("p{number:02}")).collect();
    for name in &all {
        named(name);
    }
    // Creation times have a resolution of one second.
    std::thread::sleep(Duration::from_millis(1100));
    named("a-young-one");
    k8s.cluster(json!({ "slackProfiles": {} }));
    report_profiles(&k8s, "n1", H200, json!([]));
    let claimed = || {
        let claims = k8s.get("CacheNode", "n1").expect("the object exists").data["spec"]["profiles"].clone();
        let claims = claims.as_array().cloned().unwrap_or_default();
        let mut names: Vec<String> =
            claims.iter().map(|claim| claim["name"].as_str().expect("a name").to_owned()).collect();
        names.sort();
        names
    };
    wait_until("the node has the older profiles", PATIENCE, || (claimed() == all).then_some(()));
    let waits = |condition: &str, words: &str| {
        k8s.wait_message("SlackProfile", "a-young-one", [condition, "False", "Conflict"], &[words]);
    };
    waits("Accepted", "selects 16 older profiles");
    waits("Distributed", "0 of 1 nodes keep their revision");
    for name in &all {
        k8s.wait_condition("SlackProfile", name, ["Accepted", "True", "AsDesired"]);
    }
    k8s.delete("SlackProfile", "p07");
    wait_until("the node has the waiting profile", PATIENCE, || {
        (claimed().first().map(String::as_str) == Some("a-young-one")).then_some(())
    });
    k8s.wait_condition("SlackProfile", "a-young-one", ["Accepted", "True", "AsDesired"]);
    assert_eq!(claimed().len(), 16);
}
