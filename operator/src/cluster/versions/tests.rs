//! Versions that may not be together, and what is said where they are not known.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use reprise_crds::CacheNode;
use reprise_crds::status::ConditionStatus;
use reprise_policy::identity::PodBindings;
use serde_json::{Value, json};

use super::*;
use crate::cluster::dereference::Referred;
use crate::control_plane;
use crate::names::ClusterNames;
use crate::plan::ClusterPlan;

const DIGEST: &str = "sha256:00";

fn cluster(status: Value) -> KVCacheCluster {
    let mut cluster = KVCacheCluster::new("c", serde_json::from_value(json!({})).expect("a spec"));
    cluster.status = Some(serde_json::from_value(status).expect("a status"));
    cluster
}

/// Two nodes and two members of which nothing runs; `tags` are what is wanted of agents and members.
fn found(tags: [&str; 2]) -> Found {
    let cluster = cluster(json!({}));
    let image = |name: &str, tag: &str| match tag {
        DIGEST => format!("{name}@{tag}"),
        _ => format!("{name}:{tag}"),
    };
    Found {
        referred: Referred {
            names: ClusterNames::of(&cluster),
            pools: Vec::new(),
            tenants: Vec::new(),
            running: None,
        },
        plan: ClusterPlan { nodes: vec!["n1".to_owned(), "n2".to_owned()], refused: None },
        cache_nodes: Vec::new(),
        bindings: PodBindings::default(),
        profiles: BTreeMap::new(),
        images: DefaultImages {
            agent: image("a", tags[0]),
            control_plane: image("c", tags[1]),
            etcd: "e:1".to_owned(),
        },
        store: None,
        agents: None,
        members: None,
        said_by_members: None,
        volumes: None,
        authority: None,
        etcd: None,
        access: BTreeMap::new(),
    }
}

/// A StatefulSet or DaemonSet of two pods, of which so many run its template.
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

fn node(version: &str, said: Timestamp) -> Arc<CacheNode> {
    let spec = serde_json::from_value(json!({ "nodeName": "n" })).expect("a spec");
    let status = json!({ "lastUpdated": said.to_string(), "agent": { "version": version } });
    let mut node = CacheNode::new("n", spec);
    node.status = Some(serde_json::from_value(status).expect("a status"));
    Arc::new(node)
}

/// Members that run and say this; an empty version is none.
fn with_members(mut found: Found, image: &str, updated: u32, versions: &[&str]) -> Found {
    let member = |(index, version): (usize, &&str)| {
        (format!("c-{index}"), Some((*version).to_owned()).filter(|version| !version.is_empty()))
    };
    let members = versions.iter().enumerate().map(member).collect();
    found.members = Some(workload(image, updated));
    found.said_by_members =
        Some(Ok(Arc::new(control_plane::Known { members, ..control_plane::Known::default() })));
    found
}

fn with_agents(mut found: Found, image: &str, versions: &[&str]) -> Found {
    found.agents = Some(workload(image, 2));
    found.cache_nodes = versions.iter().map(|version| node(version, Timestamp::now())).collect();
    found
}

fn words(found: &Found) -> String {
    refused(&cluster(json!({})), found).map(|refused| refused.message).unwrap_or_default()
}

fn said(cluster: &KVCacheCluster, found: &Found) -> (ConditionStatus, Reason, String) {
    let finding = Versions::of(cluster, found).compatible(cluster, found);
    (finding.status, finding.reason, finding.message)
}

#[test]
fn wanted_versions_more_than_one_minor_apart_are_refused_with_the_one_to_go_through() {
    for (agent, control_plane, expected) in [
        ("0.1.0", "0.1.9", ""),
        ("0.1.0", "v0.2.0", ""),
        ("0.1.0", "0.3.0", "go through 0.2 first"),
        ("0.5.0", "0.3.0", "go through 0.4 first"),
        ("1.0.0", "0.9.0", "apply it anew"),
        (DIGEST, "0.9.0", ""),
        ("latest", "0.9.0", ""),
    ] {
        let words = words(&found([agent, control_plane]));
        assert_eq!(words.is_empty(), expected.is_empty(), "{agent} {control_plane}: {words}");
        assert!(words.contains(expected), "{words}");
    }
}

#[test]
fn only_a_tag_alone_tells_the_version_of_an_image() {
    let version = |image: &str| Minor::of_image(image).map(|version| version.to_string());
    assert_eq!(version("registry:5000/a:v0.1.0").as_deref(), Some("0.1"));
    for none in ["registry:5000/a", "a", "a:latest", "a:20260101", "a@sha256:00", "a:0.1.0@sha256:00"] {
        assert_eq!(version(none), None, "{none}");
    }
}

#[test]
fn a_member_that_was_not_replaced_yet_is_met_by_what_is_wanted_next() {
    let half_way = |tags| with_members(found(tags), "c:0.2.0", 1, &["0.1.0", "0.2.0"]);
    assert_eq!(words(&half_way(["0.2.0", "0.2.0"])), "", "it goes on");
    assert_eq!(words(&half_way(["0.1.0", "0.1.0"])), "", "and back");
    let members = "members of version 0.1 and members of version 0.3";
    assert!(words(&half_way(["0.2.0", "0.3.0"])).starts_with(members));
    let agents = "agents of version 0.3 and members of version 0.1";
    assert!(words(&half_way(["0.3.0", "0.2.0"])).starts_with(agents));
    let done = with_members(found(["0.2.0", "0.3.0"]), "c:0.2.0", 2, &["0.2.0", "0.2.0"]);
    assert_eq!(words(&done), "");
}

#[test]
fn a_member_that_is_away_while_others_are_replaced_is_what_was_said_before() {
    let before = cluster(json!({ "versions": { "controlPlane": "0.1.0", "controlPlaneMax": "0.2.0" } }));
    let of = |updated, versions: &[&str]| {
        let found = with_members(found(["0.2.0", "0.3.0"]), "c:0.2.0", updated, versions);
        refused(&before, &found).map(|refused| refused.reason)
    };
    assert_eq!(of(1, &["0.2.0"]), Some(Reason::VersionSkew), "it may come back");
    assert_eq!(of(2, &["0.2.0"]), None, "no pod of before is left");
    assert_eq!(of(1, &["0.2.0", "0.2.0"]), None, "all have said it");
}

#[test]
fn members_that_cannot_be_asked_are_what_they_said_before() {
    let before = cluster(json!({ "versions": { "controlPlane": "0.1.0", "controlPlaneMax": "0.1.0" } }));
    let mut wanted = with_members(found(["0.2.0", "0.3.0"]), "c@sha256:00", 2, &["0.1.0", "0.1.0"]);
    assert!(refused(&before, &wanted).is_some());
    wanted.said_by_members = None;
    assert!(refused(&before, &wanted).is_some());
    let running = Versions::of(&before, &wanted).running().expect("some are known");
    assert_eq!(running.control_plane, Some(Version::new("0.1.0")));
}

#[test]
fn why_members_cannot_be_asked_is_said() {
    let here = cluster(json!({}));
    let agents = with_agents(found(["0.1.0", "0.1.0"]), "a:0.1.0", &["0.1.0", "0.1.0"]);
    let mut unasked = with_members(agents, "c:0.1.0", 2, &[]);
    unasked.said_by_members = Some(Err("no answer within 3s".to_owned()));
    let (status, reason, message) = said(&here, &unasked);
    assert_eq!((status, reason), (ConditionStatus::Unknown, Reason::NotReported));
    assert!(message.starts_with("2 of the members have not said their version. "), "{message}");
    assert!(message.contains("network policies") && message.ends_with(": no answer within 3s"), "{message}");
}

#[test]
fn what_turned_out_to_be_too_far_apart_may_go_back_or_half_way() {
    let torn = |tags: [&str; 2]| {
        let agents = with_agents(found(tags), "a:0.1.0", &["0.1.0", "0.1.0"]);
        words(&with_members(agents, "c@sha256:00", 2, &["0.4.0", "0.4.0"]))
    };
    for leads_back in [["0.1.0", "0.1.0"], ["0.2.0", "0.2.0"], ["0.4.0", "0.3.0"]] {
        assert_eq!(torn(leads_back), "", "{leads_back:?}");
    }
    assert!(torn(["0.1.0", "0.4.0"]).contains("go through 0.2 first"), "it would stay as it is");
    assert!(torn(["0.6.0", "0.6.0"]).contains("version 0.6"), "it is too far from all that runs");
}

#[test]
fn what_was_wanted_last_counts_once_it_runs_and_agents_are_what_they_say() {
    let mut wanted = found(["0.3.0", "0.3.0"]);
    assert_eq!(words(&wanted), "", "nothing runs yet");
    wanted.agents = Some(workload("a:0.1.0", 2));
    assert!(words(&wanted).contains("go through 0.2 first"));
    let mut never = (*workload("a:0.11.0", 0)).clone();
    never.data["status"] = json!({});
    wanted.agents = Some(Arc::new(never));
    assert_eq!(words(&wanted), "", "nothing of it ever ran");

    let reported = with_agents(found(["0.3.0", "0.3.0"]), "a:0.3.0", &["0.2.0", "0.1.0"]);
    assert!(words(&reported).contains("agents of version 0.1"), "{}", words(&reported));
    let mut gone = found(["0.3.0", "0.3.0"]);
    gone.cache_nodes = vec![node("0.1.0", Timestamp::now() - SignedDuration::from_hours(1))];
    assert_eq!(words(&gone), "", "who has not reported lately does not run");
}

#[test]
fn an_image_without_a_version_is_what_its_processes_say() {
    let here = cluster(json!({}));
    let starts = with_agents(found(["0.1.0", DIGEST]), "a:0.1.0", &["0.1.0", "0.1.0"]);
    let (status, reason, message) = said(&here, &starts);
    assert_eq!((status, reason), (ConditionStatus::Unknown, Reason::Progressing));
    assert!(message.contains("image c@sha256:00 names no version, and 2 of the members"), "{message}");

    let half_way = with_members(starts.clone(), "c@sha256:00", 1, &["0.1.0", "0.1.0"]);
    let (status, _, message) = said(&here, &half_way);
    assert_eq!(status, ConditionStatus::Unknown);
    assert!(message.contains("not all members run it yet"), "{message}");

    let up = with_members(starts.clone(), "c@sha256:00", 2, &["0.2.0", "0.2.0"]);
    let expected = "agents run 0.1.0; members run 0.2.0".to_owned();
    assert_eq!(said(&here, &up), (ConditionStatus::True, Reason::AsDesired, expected));
    let next = DefaultImages { agent: "a:0.4.0".to_owned(), ..up.images.clone() };
    assert!(words(&Found { images: next, ..up }).contains("agents of version 0.4"), "it is known now");

    let far = with_members(starts, "c@sha256:00", 2, &["0.3.0", "0.3.0"]);
    let (status, reason, message) = said(&here, &far);
    assert_eq!((status, reason), (ConditionStatus::False, Reason::VersionSkew));
    assert!(message.contains("agents of version 0.1 and members of version 0.3"), "{message}");
}

#[test]
fn versions_are_told_as_they_were_said_whatever_images_are_called() {
    let here = cluster(json!({}));
    let running = |found: &Found| Versions::of(&here, found).running();
    assert_eq!(running(&found(["0.1.0", "0.1.0"])), None);
    let agents = with_agents(found(["0.2.0", "0.2.0"]), "a:0.2.0", &["0.10.0", "0.9.1", "odd one"]);
    let members = with_members(agents, "c:0.2.0", 2, &["0.9.0", ""]);
    let version = |text: &str| Some(Version::new(text));
    let expected = RunningVersions {
        control_plane: version("0.9.0"),
        control_plane_max: version("0.9.0"),
        agent_min: version("0.9.1"),
        agent_max: version("0.10.0"),
    };
    assert_eq!(running(&members), Some(expected));
    let (status, reason, message) = said(&here, &members);
    assert_eq!((status, reason), (ConditionStatus::Unknown, Reason::NotReported));
    assert_eq!(message, "1 of the members have not said their version");
}
