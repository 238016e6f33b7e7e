//! Profiles: to which nodes they go and in what order, what is counted of what nodes say, what is refused, and what waits for a place.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::convergence::settle;
use crate::lab::{Lab, SETTLED};

const H200: &str = "NVIDIA H200";
const L4: &str = "NVIDIA L4";

/// Windows of so many microseconds.
fn windows(micros: u32) -> Value {
    json!([
        { "phase": "Decode", "minTokens": 0, "maxTokens": 512, "slackMicros": micros, "maxIoSms": 4 },
        { "phase": "Prefill", "minTokens": 0, "maxTokens": 8192, "slackMicros": 900, "maxIoSms": 8 },
    ])
}

/// A profile `p` with more in its spec.
fn profile(lab: &Lab, more: Value) {
    let mut spec =
        json!({ "subject": { "model": "llama", "gpuProduct": H200, "engineVersion": "vllm 0.33" } });
    spec.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile", "metadata": { "name": "p" }, "spec": spec,
    }));
}

/// Plays the agent of a node: it has a GPU, and says this of profiles.
fn reports(lab: &Lab, node: &str, product: &str, profiles: Value) {
    let found = lab.wait_for("CacheNode", node);
    // However slow the machine is, the agent does not go silent while the test looks.
    let said = (Timestamp::now() + SignedDuration::from_hours(1)).to_string();
    let status = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": node },
        "status": {
            "observedGeneration": found.metadata.generation,
            "lastUpdated": said,
            "gpus": [{ "uuid": "GPU-0a", "product": product }],
            "applied": { "profiles": profiles },
        },
    });
    let params = PatchParams::apply("reprise-agent").force();
    let api = lab.api("CacheNode");
    let patched = lab.server.block_on(api.patch_status(node, &params, &Patch::Apply(&status)));
    patched.expect("a status is taken");
}

/// A node that works by a revision.
fn works(digest: &str) -> Value {
    json!([{ "name": "p", "digest": digest }])
}

/// The revision that a node should have.
fn claim(lab: &Lab, node: &str) -> Option<String> {
    let claims = lab.get("CacheNode", node)?.data["spec"]["profiles"].clone();
    let claim = claims.as_array()?.iter().find(|claim| claim["name"] == "p")?;
    claim["digest"].as_str().map(str::to_owned)
}

/// Waits until a node should have another revision than this.
fn wait_claim(lab: &Lab, node: &str, unlike: &str) -> String {
    wait_until(&format!("{node} should have another revision than '{unlike}'"), PATIENCE, || {
        claim(lab, node).filter(|digest| digest != unlike)
    })
}

/// Waits until a condition of the profile says this; its message.
fn wait(lab: &Lab, wanted: [&str; 3]) -> String {
    lab.wait_condition("SlackProfile", "p", wanted)
}

fn status(lab: &Lab) -> Value {
    lab.get("SlackProfile", "p").expect("it is there").data["status"].clone()
}

fn file(digest: &str) -> String {
    format!("profile-{}.json", digest.trim_start_matches("sha256:"))
}

/// The content of a revision, as agents get it.
fn content(lab: &Lab, digest: &str) -> Option<String> {
    let map = lab.get("ConfigMap", "c-agent")?;
    map.data["data"][file(digest)].as_str().map(str::to_owned)
}

#[test]
fn a_profile_goes_to_the_nodes_that_have_its_gpu_and_is_counted_by_what_they_say() {
    let lab = Lab::new();
    let operator = lab.operator();
    profile(&lab, json!({ "windows": windows(60) }));
    let said = wait(&lab, ["Accepted", "False", "ReferenceNotFound"]);
    assert!(said.contains("set slackProfiles"), "{said}");
    lab.cluster(json!({ "slackProfiles": {} }));
    let said = wait(&lab, ["Distributed", "False", "NoNodes"]);
    assert!(said.contains("no node of cache/c has said that it has a GPU"), "{said}");
    wait(&lab, ["Accepted", "True", "AsDesired"]);
    wait(&lab, ["Valid", "True", "AsDesired"]);
    for node in ["n1", "n2"] {
        reports(&lab, node, L4, json!([]));
    }
    let said = wait(&lab, ["Distributed", "False", "WrongGpu"]);
    assert!(said.contains(H200) && said.contains(L4) && said.contains("subject.gpuProduct"), "{said}");
    assert_eq!((claim(&lab, "n1"), claim(&lab, "n2")), (None, None));

    reports(&lab, "n1", H200, json!([]));
    let digest = wait_claim(&lab, "n1", "");
    wait(&lab, ["Distributed", "False", "Progressing"]);
    let text = wait_until("its content lies beside the configuration", PATIENCE, || content(&lab, &digest));
    let hex: String = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(format!("sha256:{hex}"), digest);
    let read: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((&read["subject"]["gpuProduct"], &read["usablePercent"]), (&json!(H200), &json!(80)));

    let measured = json!([{
        "name": "p", "digest": digest, "predictionErrorP50Percent": 4, "predictionErrorP99Percent": 12,
    }]);
    reports(&lab, "n1", H200, measured);
    for (condition, is) in [("Distributed", "True"), ("Active", "True"), ("Drifted", "False")] {
        wait(&lab, [condition, is, "AsDesired"]);
    }
    let found = status(&lab);
    assert_eq!(found["nodes"], json!({ "target": 1, "applied": 1, "failed": 0 }));
    let measured = json!({ "predictionErrorP50Percent": 4, "predictionErrorP99Percent": 12 });
    assert_eq!((&found["measured"], &found["revision"]), (&measured, &json!(1)));
    assert_eq!(found["digest"], digest);
    assert_eq!(claim(&lab, "n2"), None, "it has another GPU");

    // What is as it should be is written no more.
    let versions = || {
        ["CacheNode/n1", "CacheNode/n2", "ConfigMap/c-agent"].map(|key| {
            let (kind, name) = key.split_once('/').expect("kind and name");
            lab.get(kind, name).expect("it is there").resource_version()
        })
    };
    settle(&lab);
    let before = (versions(), status(&lab));
    lab.merge("SlackProfile", "p", &json!({ "metadata": { "annotations": { "test/looked": "at" } } }));
    std::thread::sleep(SETTLED);
    assert_eq!((versions(), status(&lab)), before);

    lab.delete("SlackProfile", "p");
    wait_until("the node has none any more", PATIENCE, || claim(&lab, "n1").is_none().then_some(()));
    wait_until("its content goes", PATIENCE, || content(&lab, &digest).is_none().then_some(()));
    let map = lab.wait_for("ConfigMap", "c-agent");
    assert!(map.data["data"]["agent.toml"].is_string(), "the configuration stays");
    operator.kill();
}

#[test]
fn canary_nodes_come_first_and_one_that_refuses_or_drifts_stops_the_others() {
    let lab = Lab::new();
    let operator = lab.operator();
    let canary = json!({ "nodeSelector": { "matchLabels": { "name": "n1" } }, "soak": "3s" });
    let revision = |usable: u32| {
        let rollout = json!({ "canary": canary });
        profile(&lab, json!({ "windows": windows(60), "usablePercent": usable, "rollout": rollout }));
    };
    revision(80);
    lab.cluster(json!({ "slackProfiles": {} }));
    for node in ["n1", "n2"] {
        reports(&lab, node, H200, json!([]));
    }
    let first = wait_claim(&lab, "n1", "");
    std::thread::sleep(SETTLED);
    assert_eq!(claim(&lab, "n2"), None, "the canary has not said anything yet");
    reports(&lab, "n1", H200, works(&first));
    wait_until("the canary soaks", PATIENCE, || {
        wait(&lab, ["Distributed", "False", "Progressing"]).contains("rollout.canary.soak").then_some(())
    });
    assert!(status(&lab)["soakingSince"].is_string());
    assert_eq!(wait_claim(&lab, "n2", ""), first);
    reports(&lab, "n2", H200, works(&first));
    wait(&lab, ["Distributed", "True", "AsDesired"]);

    // It refuses the next one, and the other keeps what it has.
    revision(50);
    let second = wait_claim(&lab, "n1", &first);
    reports(&lab, "n1", H200, json!([{ "name": "p", "digest": second, "refused": "it is odd" }]));
    let said = wait(&lab, ["Distributed", "False", "Refused"]);
    assert!(said.contains("canary node n1 refuses revision 2: it is odd"), "{said}");
    wait(&lab, ["Active", "False", "Refused"]);
    std::thread::sleep(SETTLED);
    assert_eq!(claim(&lab, "n2").as_deref(), Some(first.as_str()));
    assert_eq!(status(&lab)["nodes"], json!({ "target": 2, "applied": 0, "failed": 1 }));

    // It measures that the next one is wrong.
    revision(60);
    let third = wait_claim(&lab, "n1", &second);
    let drifts = json!([{
        "name": "p", "digest": third, "predictionErrorP50Percent": 40, "predictionErrorP99Percent": 90,
    }]);
    reports(&lab, "n1", H200, drifts);
    let said = wait(&lab, ["Drifted", "True", "MeasuredDifference"]);
    assert!(said.contains("n1: an error of 90 %"), "{said}");
    let said = wait(&lab, ["Distributed", "False", "MeasuredDifference"]);
    assert!(said.contains("The other nodes keep the revision that they have"), "{said}");
    // Longer than it would have soaked.
    std::thread::sleep(3 * SETTLED);
    assert_eq!(claim(&lab, "n2").as_deref(), Some(first.as_str()));
    for digest in [&first, &third] {
        assert!(content(&lab, digest).is_some(), "nodes have both");
    }

    // The one before is a revision as any other, and the content of the third goes.
    revision(80);
    assert_eq!(wait_claim(&lab, "n1", &third), first);
    reports(&lab, "n1", H200, works(&first));
    wait(&lab, ["Distributed", "True", "AsDesired"]);
    assert_eq!(status(&lab)["revision"], 4);
    wait_until("it goes", PATIENCE, || content(&lab, &third).is_none().then_some(()));
    operator.kill();
}

#[test]
fn windows_of_a_config_map_are_followed_and_what_is_no_list_of_windows_is_refused_in_words() {
    let lab = Lab::new();
    let operator = lab.operator();
    let write = |windows: &str| {
        lab.apply(&json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "measured" }, "data": { "windows": windows },
        }));
    };
    profile(&lab, json!({ "configMapRef": { "name": "measured", "key": "windows" } }));
    lab.cluster(json!({ "slackProfiles": {} }));
    for node in ["n1", "n2"] {
        reports(&lab, node, H200, json!([]));
    }
    let said = wait(&lab, ["Accepted", "False", "ReferenceNotFound"]);
    assert!(said.contains("ConfigMap measured is not in namespace cache"), "{said}");
    write(r#"[{"phase": "Nap", "minTokens": 0, "maxTokens": 1, "slackMicros": 1, "maxIoSms": 1}]"#);
    let said = wait(&lab, ["Valid", "False", "ProfileInvalid"]);
    assert!(said.contains("windows[0]") && said.contains("Nap") && said.contains("write it like"), "{said}");
    assert_eq!((claim(&lab, "n1"), claim(&lab, "n2")), (None, None));

    // One node may be between two revisions, and it is the first.
    write(&windows(60).to_string());
    wait(&lab, ["Valid", "True", "AsDesired"]);
    let first = wait_claim(&lab, "n1", "");
    std::thread::sleep(SETTLED);
    assert_eq!(claim(&lab, "n2"), None);
    reports(&lab, "n1", H200, works(&first));
    assert_eq!(wait_claim(&lab, "n2", ""), first);
    reports(&lab, "n2", H200, works(&first));
    wait(&lab, ["Distributed", "True", "AsDesired"]);

    write(&windows(70).to_string());
    let second = wait_claim(&lab, "n1", &first);
    let said = wait(&lab, ["Distributed", "False", "Progressing"]);
    assert!(said.contains("have revision 2"), "{said}");

    // What is wrong changes nothing on the nodes.
    let mut twice = windows(70);
    twice[1]["phase"] = json!("Decode");
    write(&twice.to_string());
    let said = wait(&lab, ["Valid", "False", "ProfileInvalid"]);
    assert!(said.contains("windows[1] and windows[0] of Decode overlap"), "{said}");
    let said = wait(&lab, ["Distributed", "False", "ProfileInvalid"]);
    assert!(said.contains("2 of 2 nodes keep"), "{said}");
    std::thread::sleep(SETTLED);
    assert_eq!((claim(&lab, "n1"), claim(&lab, "n2")), (Some(second.clone()), Some(first)));
    assert_eq!(status(&lab)["digest"], second);

    let digest = format!("registry.example/slack/llama@sha256:{}", "0f".repeat(32));
    profile(&lab, json!({ "ociRef": { "reference": digest } }));
    let said = wait(&lab, ["Accepted", "False", "Unsupported"]);
    assert!(said.contains("ociRef is not in this release"), "{said}");
    operator.kill();
}

#[test]
fn an_operator_that_starts_anew_goes_on_with_what_nodes_have() {
    let lab = Lab::new();
    let files = lab.operator_files("operator");
    let operator = files.start().expect("the operator starts");
    profile(&lab, json!({ "windows": windows(60) }));
    lab.cluster(json!({ "slackProfiles": {} }));
    for node in ["n1", "n2"] {
        reports(&lab, node, H200, json!([]));
    }
    let first = wait_claim(&lab, "n1", "");
    reports(&lab, "n1", H200, works(&first));
    assert_eq!(wait_claim(&lab, "n2", ""), first);
    reports(&lab, "n2", H200, works(&first));
    wait(&lab, ["Distributed", "True", "AsDesired"]);
    profile(&lab, json!({ "windows": windows(70) }));
    let second = wait_claim(&lab, "n1", &first);
    assert!(operator.terminate().success());

    // Two revisions are on the way: neither node is taken back or given more, and both contents stay.
    let again = files.start().expect("the operator starts again");
    wait_until("it has looked at the profile", PATIENCE, || {
        let looked = again.metric("reprise_operator_reconciles_total", "kind=\"SlackProfile\"");
        (looked >= 1.0).then_some(())
    });
    std::thread::sleep(SETTLED);
    assert_eq!((claim(&lab, "n1"), claim(&lab, "n2")), (Some(second.clone()), Some(first.clone())));
    for digest in [&first, &second] {
        assert!(content(&lab, digest).is_some(), "a node has it");
    }
    reports(&lab, "n1", H200, works(&second));
    assert_eq!(wait_claim(&lab, "n2", &first), second);
    wait_until("it is the second revision", PATIENCE, || (status(&lab)["revision"] == 2).then_some(()));
    again.kill();
}

#[test]
fn a_profile_more_than_a_node_has_room_for_waits_however_old_it_is_and_says_so() {
    let lab = Lab::new();
    let files = lab.operator_files("operator");
    let operator = files.start().expect("the operator starts");
    let named = |name: &str, labels: Value| {
        let subject = json!({ "model": "llama", "gpuProduct": H200, "engineVersion": "vllm 0.33" });
        lab.apply(&json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile", "metadata": { "name": name, "labels": labels },
            "spec": { "subject": subject, "windows": windows(60) },
        }));
    };
    let chat = || json!({ "for": "chat" });
    named("a-old-one", json!({}));
    // Objects are as old as whole seconds.
    std::thread::sleep(Duration::from_millis(1100));
    let all: Vec<String> = (0..16).map(|number| format!("p{number:02}")).collect();
    for name in &all {
        named(name, chat());
    }
    lab.cluster(json!({ "slackProfiles": { "matchLabels": chat() } }));
    reports(&lab, "n1", H200, json!([]));
    let claimed = || {
        let claims = lab.get("CacheNode", "n1").expect("it is there").data["spec"]["profiles"].clone();
        let claims = claims.as_array().cloned().unwrap_or_default();
        let mut names: Vec<String> =
            claims.iter().map(|claim| claim["name"].as_str().expect("a name").to_owned()).collect();
        names.sort();
        names
    };
    wait_until("the node should have all of them", PATIENCE, || (claimed() == all).then_some(()));

    // It is selected from now on, and older than all that are.
    named("a-old-one", chat());
    let waits = |reason: &str, words: &str| {
        let said = lab.wait_condition("SlackProfile", "a-old-one", [reason, "False", "Conflict"]);
        assert!(said.contains(words) && said.contains("Narrow slackProfiles"), "{said}");
    };
    waits("Accepted", "selects 16 profiles that come before this one");
    waits("Distributed", "0 of 1 nodes keep the revision that they have; 1 do not have it");
    std::thread::sleep(SETTLED);
    assert_eq!(claimed(), all);
    for name in &all {
        lab.wait_condition("SlackProfile", name, ["Accepted", "True", "AsDesired"]);
    }

    // One that knows only what stands in the specs decides the same.
    assert!(operator.terminate().success());
    let again = files.start().expect("the operator starts again");
    wait_until("it has looked at all profiles", PATIENCE, || {
        let looked = again.metric("reprise_operator_reconciles_total", "kind=\"SlackProfile\"");
        (looked >= 17.0).then_some(())
    });
    std::thread::sleep(SETTLED);
    assert_eq!(claimed(), all);
    lab.delete("SlackProfile", "p07");
    wait_until("it has the place", PATIENCE, || {
        (claimed().first().map(String::as_str) == Some("a-old-one")).then_some(())
    });
    lab.wait_condition("SlackProfile", "a-old-one", ["Accepted", "True", "AsDesired"]);
    assert_eq!(claimed().len(), 16);
    again.kill();
}
