//! The readiness condition of nodes.

use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};

use super::*;
use crate::reconcile::test_objects::{object, resource};

const SERVES: &str = "the agent serves engines";

fn at(text: &str) -> Time {
    object(json!(text))
}

/// A node with this condition in addition to the kubelet's.
fn node(condition: Option<&NodeCondition>) -> Node {
    let kubelets = json!({ "type": "Ready", "status": "True" });
    let conditions: Vec<Value> =
        std::iter::once(kubelets).chain(condition.map(|condition| json!(condition))).collect();
    object(json!({ "metadata": { "name": "n1" }, "status": { "conditions": conditions } }))
}

/// A `CacheNode` with this condition, created and reported some seconds ago.
fn reported(seconds: i64, (status, reason, message): (&str, &str, &str)) -> CacheNode {
    let last = Time(clock::now().0 - SignedDuration::from_secs(seconds));
    let metadata = json!({ "name": "n1", "creationTimestamp": last });
    let condition = json!({
        "type": "AgentReady", "status": status, "reason": reason, "message": message, "lastTransitionTime": last,
    });
    let status = json!({ "lastUpdated": last, "conditions": [condition] });
    resource(metadata, json!({ "spec": { "nodeName": "n1" }, "status": status }))
}

fn serving() -> CacheNode {
    reported(5, ("True", "AsDesired", SERVES))
}

/// A `CacheNode` that was created some seconds ago, without any report.
fn unreported(seconds: i64) -> CacheNode {
    CacheNode { status: None, ..reported(seconds, ("True", "AsDesired", SERVES)) }
}

/// Returns the condition of a node of a cluster.
fn set(node: &Node, live: Option<&CacheNode>, now: &Time) -> NodeCondition {
    desired(node, live, true, now).expect("a condition")
}

#[test]
fn condition_states_whether_the_agent_reported_ready_within_a_minute() {
    let now = clock::now();
    let leaving = ("False", "AgentGone", "the agent is stopping");
    let mut without_condition = serving();
    without_condition.status.as_mut().expect("made above").conditions.clear();
    let silent = reported(300, ("True", "AsDesired", SERVES));
    for (live, expected) in [
        (serving(), ["True", "AsDesired", SERVES]),
        (reported(5, leaving), ["False", "AgentGone", "the agent is stopping"]),
        (silent, ["False", "NotReported", "not reported for a minute"]),
        (unreported(120), ["False", "NotReported", "not reported yet"]),
        (without_condition, ["False", "NotReported", "does not report whether"]),
    ] {
        let condition = set(&node(None), Some(&live), &now);
        let [reason, message] = [condition.reason, condition.message].map(Option::unwrap_or_default);
        assert_eq!([condition.status, reason], expected[..2]);
        assert!(message.contains(expected[2]), "{message}");
    }
}

#[test]
fn node_without_an_agent_has_no_condition() {
    let now = clock::now();
    let with = node(Some(&set(&node(None), Some(&serving()), &now)));
    for (node, live, is_member) in [
        (&with, None, false),
        (&with, Some(serving()), false),
        // A new agent has a minute for its first report.
        (&node(None), None, true),
        (&node(None), Some(unreported(20)), true),
    ] {
        assert_eq!(desired(node, live.as_ref(), is_member, &now), None, "{live:?}");
    }
    // An existing condition is updated although the CacheNode was re-created.
    assert_eq!(set(&with, Some(&unreported(20)), &now).reason.as_deref(), Some("NotReported"));
}

#[test]
fn unchanged_condition_is_not_written_and_keeps_its_transition_time() {
    let (early, late) = (at("2026-01-01T00:00:00Z"), at("2026-01-01T08:00:00Z"));
    let first = set(&node(None), Some(&serving()), &early);
    assert_eq!(first.last_transition_time.as_ref(), Some(&early));
    let before = node(Some(&first));
    assert_eq!(set(&before, Some(&serving()), &late), first, "no heartbeat is written");

    // Another message, the same status.
    let second = set(&before, Some(&reported(5, ("True", "AsDesired", "more engines"))), &late);
    assert_eq!(second.last_transition_time.as_ref(), Some(&early));
    assert_eq!(second.last_heartbeat_time.as_ref(), Some(&late));

    let third = set(&node(Some(&second)), None, &late);
    assert_eq!((third.status.as_str(), third.last_transition_time.as_ref()), ("False", Some(&late)));

    let mut deleted = before;
    deleted.metadata.deletion_timestamp = Some(late.clone());
    assert_eq!(set(&deleted, None, &late), first, "a deleted node is not changed");

    // The API server returns no empty message.
    let terse = reported(5, ("True", "AsDesired", ""));
    let stored = set(&node(None), Some(&terse), &early);
    assert_eq!(stored.message, None);
    assert_eq!(set(&node(Some(&stored)), Some(&terse), &late), stored);
}
