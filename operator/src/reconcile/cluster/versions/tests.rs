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

/// Versions that processes report, the image of their pods, and how many of the pods have the current template.
type Running<'a> = (&'a str, u32, &'a [&'a str]);

/// Adds running processes; an empty version stands for no report.
fn run(inputs: &mut ClusterInputs, agents: Running<'_>, members: Running<'_>) {
    let reports = |version: &&&str| !version.is_empty();
    let (image, updated, versions) = agents;
    inputs.agents = Some(workload(image, updated));
    inputs.cache_nodes =
        versions.iter().filter(reports).map(|version| node(version, clock::now().0)).collect();
    let (image, updated, versions) = members;
    inputs.members = Some(workload(image, updated));
    let names = ["c-0", "c-1"].map(str::to_owned).into_iter();
    let versions = versions.iter().map(|version| Some((*version).to_owned()).filter(|one| !one.is_empty()));
    let state = control_plane::ControlPlaneState {
        members: names.zip(versions).collect(),
        ..control_plane::ControlPlaneState::default()
    };
    inputs.control_plane_state = Some(Ok(Arc::new(state)));
}

fn node(version: &str, reported: Timestamp) -> Arc<CacheNode> {
    let spec = serde_json::from_value(json!({ "nodeName": "n" })).expect("a spec");
    let status = json!({ "lastUpdated": reported.to_string(), "agent": { "version": version } });
    let mut node = CacheNode::new("n", spec);
    node.status = Some(serde_json::from_value(status).expect("a status"));
    Arc::new(node)
}

fn skew_message(before: &KVCacheCluster, inputs: &ClusterInputs) -> String {
    skew(before, inputs).map(|refused| refused.message).unwrap_or_default()
}

fn assert_contains(message: &str, expected: &str, what: impl std::fmt::Debug) {
    assert_eq!(message.is_empty(), expected.is_empty(), "{what:?}: {message}");
    assert!(message.contains(expected), "{what:?}: {message}");
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
        let message = skew_message(&cluster(json!({})), &inputs_with_tags([agent, control_plane]));
        assert_contains(&message, expected, (agent, control_plane));
    }
}

#[test]
fn reads_version_from_tag_only_without_digest() {
    assert_eq!(minor_of_image("registry:5000/a:v0.1.0"), Some((0, 1)));
    for none in ["registry:5000/a", "a", "a:latest", "a:20260101", "a@sha256:00", "a:0.1.0@sha256:00"] {
        assert_eq!(minor_of_image(none), None, "{none}");
    }
}

#[test]
fn desired_versions_must_be_compatible_with_all_running_ones() {
    let none: Running<'_> = ("a:0.2.0", 2, &[]);
    let half_way: Running<'_> = ("c:0.2.0", 1, &["0.1.0", "0.2.0"]);
    for (tags, agents, members, expected) in [
        // A rollout continues, or is rolled back.
        (["0.2.0", "0.2.0"], none, half_way, ""),
        (["0.1.0", "0.1.0"], none, half_way, ""),
        (["0.2.0", "0.3.0"], none, half_way, "members of version 0.1 and members of version 0.3"),
        (["0.3.0", "0.2.0"], none, half_way, "agents of version 0.3 and members of version 0.1"),
        (["0.2.0", "0.3.0"], none, ("c:0.2.0", 2, &["0.2.0", "0.2.0"]), ""),
        (
            ["0.3.0", "0.3.0"],
            ("a:0.3.0", 2, &["0.2.0", "0.1.0"]),
            ("c:0.3.0", 2, &[]),
            "agents of version 0.1",
        ),
    ] {
        let mut inputs = inputs_with_tags(tags);
        run(&mut inputs, agents, members);
        assert_contains(&skew_message(&cluster(json!({})), &inputs), expected, (tags, agents, members));
    }
    let mut gone = inputs_with_tags(["0.3.0", "0.3.0"]);
    gone.cache_nodes = vec![node("0.1.0", clock::now().0 - SignedDuration::from_hours(1))];
    assert_eq!(
        skew_message(&cluster(json!({})), &gone),
        "",
        "an agent without a recent report does not count"
    );
}

#[test]
fn incompatible_running_versions_allow_rollback_and_intermediate_versions() {
    for (tags, expected) in [
        (["0.1.0", "0.1.0"], ""),
        (["0.2.0", "0.2.0"], ""),
        (["0.4.0", "0.3.0"], ""),
        // The skew would remain.
        (["0.1.0", "0.4.0"], "set the image of the agents to 0.2 first"),
        // It is incompatible with all running versions.
        (["0.6.0", "0.6.0"], "version 0.6"),
    ] {
        let mut inputs = inputs_with_tags(tags);
        let members: Running<'_> = ("c@sha256:00", 2, &["0.4.0", "0.4.0"]);
        run(&mut inputs, ("a:0.1.0", 2, &["0.1.0", "0.1.0"]), members);
        assert_contains(&skew_message(&cluster(json!({})), &inputs), expected, tags);
    }
}

#[test]
fn absent_members_count_with_their_last_known_version_during_a_rollout() {
    let before = cluster(json!({ "versions": { "controlPlane": "0.1.0", "controlPlaneMax": "0.2.0" } }));
    let of = |members: Running<'_>| {
        let mut inputs = inputs_with_tags(["0.2.0", "0.3.0"]);
        run(&mut inputs, ("a:0.2.0", 2, &[]), members);
        inputs
    };
    for (members, is_skewed) in [
        // It may return with the old version.
        (("c:0.2.0", 1, &["0.2.0"][..]), true),
        // No pod of the previous template is left.
        (("c:0.2.0", 2, &["0.2.0"]), false),
        (("c:0.2.0", 1, &["0.2.0", "0.2.0"]), false),
    ] {
        assert_eq!(skew(&before, &of(members)).is_some(), is_skewed, "{members:?}");
    }
    let mut unreachable = of(("c:0.2.0", 2, &["0.2.0", "0.2.0"]));
    unreachable.control_plane_state = None;
    assert!(skew(&before, &unreachable).is_some());
    let running = Versions::of(&before, &unreachable).running().expect("some are known");
    assert_eq!(running.control_plane, Some(Version::new("0.1.0")));
}

#[test]
fn reports_versions_of_processes_regardless_of_image_tags() {
    use ConditionStatus::{False, Unknown};
    let here = cluster(json!({}));
    let agents: Running<'_> = ("a:0.1.0", 2, &["0.1.0", "0.1.0"]);
    for (tag, members, expected, words) in [
        (
            DIGEST,
            ("c@sha256:00", 1, &["0.1.0", "0.1.0"][..]),
            (Unknown, Reason::Progressing),
            "not all members",
        ),
        (
            DIGEST,
            ("c@sha256:00", 2, &["0.3.0", "0.3.0"]),
            (False, Reason::VersionSkew),
            "agents of version 0.1 and members of version 0.3",
        ),
        ("0.1.0", ("c:0.1.0", 2, &["0.1.0", ""]), (Unknown, Reason::NotReported), "1 of 2 members: version"),
    ] {
        let mut inputs = inputs_with_tags(["0.1.0", tag]);
        run(&mut inputs, agents, members);
        let finding = Versions::of(&here, &inputs).compatible();
        assert_eq!((finding.status, finding.reason), expected, "{members:?}");
        assert!(finding.message.contains(words), "{words}: {}", finding.message);
    }
    let mut inputs = inputs_with_tags(["0.1.0", "0.1.0"]);
    assert_eq!(Versions::of(&here, &inputs).running(), None);
    run(&mut inputs, ("a:0.1.0", 2, &["0.10.0", "0.9.1", "odd one"]), ("c:0.1.0", 2, &["0.9.0", ""]));
    let version = |text: &str| Some(Version::new(text));
    let expected = RunningVersions {
        control_plane: version("0.9.0"),
        control_plane_max: version("0.9.0"),
        agent_min: version("0.9.1"),
        agent_max: version("0.10.0"),
    };
    assert_eq!(Versions::of(&here, &inputs).running(), Some(expected));
    run(&mut inputs, agents, ("c:0.1.0", 2, &[]));
    inputs.control_plane_state = Some(Err("no response within 3s".to_owned()));
    let Finding { reason, message, .. } = Versions::of(&here, &inputs).compatible();
    assert_eq!(reason, Reason::NotReported);
    assert!(message.starts_with("2 of 2 members: version not reported. "), "{message}");
    assert!(
        message.contains("network policies") && message.ends_with(": no response within 3s"),
        "{message}"
    );
}
