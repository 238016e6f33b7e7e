//! Incompatible versions, and the condition while versions are unknown.

use std::sync::Arc;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use reprise_crds::CacheNode;
use reprise_crds::status::ConditionStatus;
use serde_json::{Value, json};

use super::*;
use crate::framework::clock;
use crate::reconcile::cluster::inputs;
use crate::reconcile::control_plane;

const DIGEST: &str = "sha256:00";

fn cluster(status: Value) -> KVCacheCluster {
    let mut cluster = KVCacheCluster::new("c", serde_json::from_value(json!({})).expect("a spec"));
    cluster.status = Some(serde_json::from_value(status).expect("a status"));
    cluster
}

/// Inputs with two nodes and two members, none of them running; `tags` are the desired image tags of agents
/// and members.
fn inputs_with_tags(tags: [&str; 2]) -> ClusterInputs {
    let image = |name: &str, tag: &str| match tag {
        DIGEST => format!("{name}@{tag}"),
        _ => format!("{name}:{tag}"),
    };
    let mut inputs = inputs::tests::of(&cluster(json!({})));
    inputs.assignment.nodes = vec!["n1".to_owned(), "n2".to_owned()];
    (inputs.images.agent, inputs.images.control_plane) = (image("a", tags[0]), image("c", tags[1]));
    inputs
}

/// A workload of two pods; `updated` of them run the current template.
fn workload(image: &str, updated: u32) -> Arc<DynamicObject> {
    let template = json!({ "spec": { "containers": [{ "image": image }] } });
    let status = json!({
        "observedGeneration": 1, "readyReplicas": 2, "numberReady": 2,
        "updatedReplicas": updated, "updatedNumberScheduled": updated,
    });
    let whole = json!({
        "metadata": { "name": "w", "generation": 1 }, "spec": { "replicas": 2, "template": template }, "status": status,
    });
    Arc::new(serde_json::from_value(whole).expect("an object"))
}

fn node(version: &str, reported: Timestamp) -> Arc<CacheNode> {
    let spec = serde_json::from_value(json!({ "nodeName": "n" })).expect("a spec");
    let status = json!({ "lastUpdated": reported.to_string(), "agent": { "version": version } });
    let mut node = CacheNode::new("n", spec);
    node.status = Some(serde_json::from_value(status).expect("a status"));
    Arc::new(node)
}

/// Running members that report these versions; an empty string stands for no report.
fn with_members(mut inputs: ClusterInputs, image: &str, updated: u32, versions: &[&str]) -> ClusterInputs {
    let member = |(index, version): (usize, &&str)| {
        (format!("c-{index}"), Some((*version).to_owned()).filter(|version| !version.is_empty()))
    };
    let members = versions.iter().enumerate().map(member).collect();
    inputs.members = Some(workload(image, updated));
    inputs.control_plane_state = Some(Ok(Arc::new(control_plane::ControlPlaneState {
        members,
        ..control_plane::ControlPlaneState::default()
    })));
    inputs
}

fn with_agents(mut inputs: ClusterInputs, image: &str, versions: &[&str]) -> ClusterInputs {
    inputs.agents = Some(workload(image, 2));
    inputs.cache_nodes = versions.iter().map(|version| node(version, clock::now().0)).collect();
    inputs
}

fn skew_message(inputs: &ClusterInputs) -> String {
    skew(&cluster(json!({})), inputs).map(|refused| refused.message).unwrap_or_default()
}

fn reported(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> (ConditionStatus, Reason, String) {
    let finding = Versions::of(cluster, inputs).compatible();
    (finding.status, finding.reason, finding.message)
}

#[test]
fn rejects_desired_versions_more_than_one_minor_apart_and_reports_the_intermediate_version() {
    for (agent, control_plane, expected) in [
        ("0.1.0", "0.1.9", ""),
        ("0.1.0", "v0.2.0", ""),
        ("0.1.0", "0.3.0", "set the image of the agents to 0.2 first"),
        ("0.5.0", "0.3.0", "set the image of the members to 0.4 first"),
        ("1.0.0", "0.9.0", "create it again"),
        (DIGEST, "0.9.0", ""),
        ("latest", "0.9.0", ""),
    ] {
        let message = skew_message(&inputs_with_tags([agent, control_plane]));
        assert_eq!(message.is_empty(), expected.is_empty(), "{agent} {control_plane}: {message}");
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn reads_version_from_tag_only_without_digest() {
    let version = |image: &str| Minor::of_image(image).map(|version| version.to_string());
    assert_eq!(version("registry:5000/a:v0.1.0").as_deref(), Some("0.1"));
    for none in ["registry:5000/a", "a", "a:latest", "a:20260101", "a@sha256:00", "a:0.1.0@sha256:00"] {
        assert_eq!(version(none), None, "{none}");
    }
}

#[test]
fn desired_version_must_be_compatible_with_members_still_running_the_previous_version() {
    let half_way = |tags| with_members(inputs_with_tags(tags), "c:0.2.0", 1, &["0.1.0", "0.2.0"]);
    assert_eq!(skew_message(&half_way(["0.2.0", "0.2.0"])), "", "the rollout continues");
    assert_eq!(skew_message(&half_way(["0.1.0", "0.1.0"])), "", "a rollback is allowed");
    let members = "members of version 0.1 and members of version 0.3";
    assert!(skew_message(&half_way(["0.2.0", "0.3.0"])).starts_with(members));
    let agents = "agents of version 0.3 and members of version 0.1";
    assert!(skew_message(&half_way(["0.3.0", "0.2.0"])).starts_with(agents));
    let done = with_members(inputs_with_tags(["0.2.0", "0.3.0"]), "c:0.2.0", 2, &["0.2.0", "0.2.0"]);
    assert_eq!(skew_message(&done), "");
}

#[test]
fn absent_member_counts_with_its_last_known_version_during_a_rollout() {
    let before = cluster(json!({ "versions": { "controlPlane": "0.1.0", "controlPlaneMax": "0.2.0" } }));
    let of = |updated, versions: &[&str]| {
        let inputs = with_members(inputs_with_tags(["0.2.0", "0.3.0"]), "c:0.2.0", updated, versions);
        skew(&before, &inputs).map(|refused| refused.reason)
    };
    assert_eq!(of(1, &["0.2.0"]), Some(Reason::VersionSkew), "it may return with the old version");
    assert_eq!(of(2, &["0.2.0"]), None, "no pod of the previous template is left");
    assert_eq!(of(1, &["0.2.0", "0.2.0"]), None, "all have reported it");
}

#[test]
fn unreachable_members_count_with_their_last_known_version() {
    let before = cluster(json!({ "versions": { "controlPlane": "0.1.0", "controlPlaneMax": "0.1.0" } }));
    let mut wanted =
        with_members(inputs_with_tags(["0.2.0", "0.3.0"]), "c@sha256:00", 2, &["0.1.0", "0.1.0"]);
    assert!(skew(&before, &wanted).is_some());
    wanted.control_plane_state = None;
    assert!(skew(&before, &wanted).is_some());
    let running = Versions::of(&before, &wanted).running().expect("some are known");
    assert_eq!(running.control_plane, Some(Version::new("0.1.0")));
}

#[test]
fn reports_why_members_cannot_be_read() {
    let here = cluster(json!({}));
    let agents = with_agents(inputs_with_tags(["0.1.0", "0.1.0"]), "a:0.1.0", &["0.1.0", "0.1.0"]);
    let mut call_error = with_members(agents, "c:0.1.0", 2, &[]);
    call_error.control_plane_state = Some(Err("no response within 3s".to_owned()));
    let (status, reason, message) = reported(&here, &call_error);
    assert_eq!((status, reason), (ConditionStatus::Unknown, Reason::NotReported));
    assert!(message.starts_with("2 of 2 members: version not reported. "), "{message}");
    assert!(
        message.contains("network policies") && message.ends_with(": no response within 3s"),
        "{message}"
    );
}

#[test]
fn incompatible_running_versions_allow_rollback_and_intermediate_versions() {
    let skewed = |tags: [&str; 2]| {
        let agents = with_agents(inputs_with_tags(tags), "a:0.1.0", &["0.1.0", "0.1.0"]);
        skew_message(&with_members(agents, "c@sha256:00", 2, &["0.4.0", "0.4.0"]))
    };
    for recovery_tags in [["0.1.0", "0.1.0"], ["0.2.0", "0.2.0"], ["0.4.0", "0.3.0"]] {
        assert_eq!(skewed(recovery_tags), "", "{recovery_tags:?}");
    }
    assert!(
        skewed(["0.1.0", "0.4.0"]).contains("set the image of the agents to 0.2 first"),
        "the skew would remain"
    );
    assert!(
        skewed(["0.6.0", "0.6.0"]).contains("version 0.6"),
        "it is incompatible with all running versions"
    );
}

#[test]
fn pod_template_counts_once_a_pod_is_ready_and_agents_count_as_reported() {
    let mut wanted = inputs_with_tags(["0.3.0", "0.3.0"]);
    assert_eq!(skew_message(&wanted), "", "nothing runs yet");
    wanted.agents = Some(workload("a:0.1.0", 2));
    assert!(skew_message(&wanted).contains("set the image of the agents to 0.2 first"));
    let mut never = (*workload("a:0.11.0", 0)).clone();
    never.data["status"] = json!({});
    wanted.agents = Some(Arc::new(never));
    assert_eq!(skew_message(&wanted), "", "none of its pods was ever ready");

    let reported = with_agents(inputs_with_tags(["0.3.0", "0.3.0"]), "a:0.3.0", &["0.2.0", "0.1.0"]);
    assert!(skew_message(&reported).contains("agents of version 0.1"), "{}", skew_message(&reported));
    let mut gone = inputs_with_tags(["0.3.0", "0.3.0"]);
    gone.cache_nodes = vec![node("0.1.0", clock::now().0 - SignedDuration::from_hours(1))];
    assert_eq!(skew_message(&gone), "", "an agent without a recent report does not count");
}

#[test]
fn image_without_a_version_has_the_versions_that_its_processes_report() {
    let here = cluster(json!({}));
    let starts = with_agents(inputs_with_tags(["0.1.0", DIGEST]), "a:0.1.0", &["0.1.0", "0.1.0"]);
    let (status, reason, message) = reported(&here, &starts);
    assert_eq!((status, reason), (ConditionStatus::Unknown, Reason::Progressing));
    assert!(
        message.starts_with("image c@sha256:00 has no version in its tag")
            && message.ends_with("(2 of 2 members: version not reported)"),
        "{message}"
    );

    let half_way = with_members(starts.clone(), "c@sha256:00", 1, &["0.1.0", "0.1.0"]);
    let (status, _, message) = reported(&here, &half_way);
    assert_eq!(status, ConditionStatus::Unknown);
    assert!(message.contains("not all members run it yet"), "{message}");

    let up = with_members(starts.clone(), "c@sha256:00", 2, &["0.2.0", "0.2.0"]);
    let expected = "agents run 0.1.0; members run 0.2.0".to_owned();
    assert_eq!(reported(&here, &up), (ConditionStatus::True, Reason::AsDesired, expected));
    let next = DefaultImages { agent: "a:0.4.0".to_owned(), ..up.images.clone() };
    assert!(
        skew_message(&ClusterInputs { images: next, ..up }).contains("agents of version 0.4"),
        "the version is known now"
    );

    let far = with_members(starts, "c@sha256:00", 2, &["0.3.0", "0.3.0"]);
    let (status, reason, message) = reported(&here, &far);
    assert_eq!((status, reason), (ConditionStatus::False, Reason::VersionSkew));
    assert!(message.contains("agents of version 0.1 and members of version 0.3"), "{message}");
}

#[test]
fn reports_the_versions_of_processes_regardless_of_image_tags() {
    let here = cluster(json!({}));
    let running = |inputs: &ClusterInputs| Versions::of(&here, inputs).running();
    assert_eq!(running(&inputs_with_tags(["0.1.0", "0.1.0"])), None);
    let agents =
        with_agents(inputs_with_tags(["0.2.0", "0.2.0"]), "a:0.2.0", &["0.10.0", "0.9.1", "odd one"]);
    let members = with_members(agents, "c:0.2.0", 2, &["0.9.0", ""]);
    let version = |text: &str| Some(Version::new(text));
    let expected = RunningVersions {
        control_plane: version("0.9.0"),
        control_plane_max: version("0.9.0"),
        agent_min: version("0.9.1"),
        agent_max: version("0.10.0"),
    };
    assert_eq!(running(&members), Some(expected));
    let (status, reason, message) = reported(&here, &members);
    assert_eq!((status, reason), (ConditionStatus::Unknown, Reason::NotReported));
    assert_eq!(message, "1 of 2 members: version not reported");
}
