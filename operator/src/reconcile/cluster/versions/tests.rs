//! Incompatible versions, and the condition while versions are unknown.

use std::sync::Arc;

use reprise_crds::CacheNode;
use reprise_crds::status::ConditionStatus::{False, True, Unknown};
use serde_json::json;

use super::*;
use crate::framework::clock;
use crate::reconcile::cluster::dereference::tests::inputs;
use crate::reconcile::control_plane::ControlPlaneState;
use crate::reconcile::test_objects::{object, resource};

const DIGEST: &str = "sha256:00";

fn cluster() -> KVCacheCluster {
    resource(
        json!({ "name": "c", "namespace": "n" }),
        json!({ "spec": { "controlPlane": { "replicas": 2 } } }),
    )
}

/// Inputs with two nodes and two members, none of them running; `tags` are the desired image tags of agents
/// and members.
fn inputs_with_tags(tags: [&str; 2]) -> ClusterInputs {
    let image = |name: &str, tag: &str| match tag {
        DIGEST => format!("{name}@{tag}"),
        _ => format!("{name}:{tag}"),
    };
    let mut inputs = inputs(&cluster());
    inputs.assignment.nodes = vec!["n1".to_owned(), "n2".to_owned()];
    (inputs.images.agent, inputs.images.control_plane) = (image("a", tags[0]), image("c", tags[1]));
    inputs
}

fn node(version: &str) -> Arc<CacheNode> {
    let status = json!({ "lastUpdated": clock::now(), "agent": { "version": version } });
    Arc::new(resource(json!({ "name": "n" }), json!({ "spec": { "nodeName": "n" }, "status": status })))
}

/// Adds running processes with these reported versions; all pods have the desired image.
fn run(inputs: &mut ClusterInputs, agents: &[&str], members: &[&str]) {
    (inputs.agents.updated, inputs.members.updated, inputs.members.current) = (2, 2, 2);
    inputs.cache_nodes = agents.iter().map(|version| node(version)).collect();
    let names = ["c-0", "c-1"].map(str::to_owned).into_iter();
    let versions = members.iter().map(|version| Some((*version).to_owned()));
    let state = ControlPlaneState { members: names.zip(versions).collect(), ..ControlPlaneState::default() };
    inputs.control_plane_state = Some(Ok(Arc::new(state)));
}

#[test]
fn reads_version_from_tag_only_without_digest() {
    assert_eq!(minor_of_image("registry:5000/a:v0.1.0"), Some((0, 1)));
    for none in ["registry:5000/a", "a", "a:latest", "a:20260101", "a@sha256:00", "a:0.1.0@sha256:00"] {
        assert_eq!(minor_of_image(none), None, "{none}");
    }
}

#[test]
fn desired_versions_must_be_compatible_with_each_other_and_with_running_ones() {
    let none: &[&str] = &[];
    let half_way = &["0.1.0", "0.2.0"];
    for (tags, agents, members, expected) in [
        (["0.1.0", "0.1.9"], none, none, ""),
        (["0.1.0", "v0.2.0"], none, none, ""),
        (["0.1.0", "0.3.0"], none, none, "set the image of the agents to 0.2 first"),
        (["0.5.0", "0.3.0"], none, none, "set the image of the members to 0.4 first"),
        (["1.0.0", "0.9.0"], none, none, "create it again"),
        ([DIGEST, "0.9.0"], none, none, ""),
        (["latest", "0.9.0"], none, none, ""),
        // A rollout continues, or is rolled back.
        (["0.2.0", "0.2.0"], none, half_way, ""),
        (["0.1.0", "0.1.0"], none, half_way, ""),
        (["0.2.0", "0.3.0"], none, half_way, "members of version 0.1 and members of version 0.3"),
        (["0.3.0", "0.2.0"], none, half_way, "members of version 0.1 and agents of version 0.3"),
        (["0.3.0", "0.3.0"], half_way, none, "agents of version 0.1"),
        // Versions that are incompatible already permit those that are compatible with one of them.
        (["0.1.0", "0.1.0"], &["0.1.0"], &["0.4.0"], ""),
        (["0.4.0", "0.3.0"], &["0.1.0"], &["0.4.0"], ""),
        (["0.1.0", "0.4.0"], &["0.1.0"], &["0.4.0"], "set the image of the agents to 0.2 first"),
        (["0.6.0", "0.6.0"], &["0.1.0"], &["0.4.0"], "version 0.6"),
    ] {
        let mut inputs = inputs_with_tags(tags);
        run(&mut inputs, agents, members);
        let message = skew(&cluster(), &inputs).map(|refused| refused.message).unwrap_or_default();
        assert!(message.contains(expected), "{tags:?} {agents:?} {members:?}: {message}");
        assert_eq!(message.is_empty(), expected.is_empty(), "{tags:?} {agents:?} {members:?}: {message}");
    }
}

#[test]
fn absent_members_count_with_their_last_version_during_a_rollout() {
    let mut cluster = cluster();
    let versions = json!({ "versions": { "controlPlane": "0.1.0", "controlPlaneMax": "0.2.0" } });
    cluster.status = Some(object(versions));
    for (current, members, is_skewed) in [
        // It may return with the old version.
        (1, &["0.2.0"][..], true),
        // No pod of the previous template is left.
        (2, &["0.2.0"], false),
        (1, &["0.2.0", "0.2.0"], false),
    ] {
        let mut inputs = inputs_with_tags(["0.2.0", "0.3.0"]);
        run(&mut inputs, &[], members);
        inputs.members.current = current;
        assert_eq!(skew(&cluster, &inputs).is_some(), is_skewed, "{current} {members:?}");
        inputs.control_plane_state = None;
        assert!(skew(&cluster, &inputs).is_some(), "no member is reachable");
        assert_eq!(
            Versions::of(&cluster, &inputs).status().and_then(|all| all.control_plane),
            Some(Version::new("0.1.0"))
        );
    }
}

#[test]
fn compatibility_is_unknown_until_all_processes_report() {
    let two = &["0.1.0", "0.1.0"];
    for (tag, updated, agents, members, expected, words) in [
        ("0.1.0", 2, &two[..], &two[..], True, "agents run 0.1.0; members run 0.1.0"),
        (
            "0.1.0",
            2,
            &["0.10.0", "0.9.1", "odd one"],
            &["0.9.0", "0.9.0"],
            True,
            "agents run 0.9.1 to 0.10.0",
        ),
        (DIGEST, 1, two, two, Unknown, "not all members"),
        (DIGEST, 2, two, &["0.3.0", "0.3.0"], False, "agents of version 0.1 and members of version 0.3"),
        ("0.1.0", 2, two, &["0.1.0"], Unknown, "1 of 2 members: version"),
    ] {
        let mut inputs = inputs_with_tags(["0.1.0", tag]);
        run(&mut inputs, agents, members);
        inputs.members.updated = updated;
        let finding = Versions::of(&cluster(), &inputs).compatible();
        assert_eq!(finding.status, expected, "{members:?}");
        assert!(finding.message.contains(words), "{words}: {}", finding.message);
    }
    let mut inputs = inputs_with_tags(["0.1.0", "0.1.0"]);
    inputs.control_plane_state = Some(Err("no response within 3s".to_owned()));
    let versions = Versions::of(&cluster(), &inputs);
    assert_eq!(versions.status(), None, "image tags are not versions of processes");
    let message = versions.compatible().message;
    assert!(message.ends_with("network policies: no response within 3s"), "{message}");
}
