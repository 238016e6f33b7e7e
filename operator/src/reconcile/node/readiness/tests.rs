//! The readiness condition of nodes.

use k8s_openapi::jiff::SignedDuration;
use reprise_crds::CacheNodeSpec;

use super::*;
use crate::framework::labels::{MANAGED_BY, OPERATOR};
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

/// A `CacheNode` of the operator with this condition, created and reported some seconds ago.
fn reported(seconds: i64, (status, reason, message): (&str, &str, &str)) -> CacheNode {
    let last = Time(clock::now().0 - SignedDuration::from_secs(seconds));
    let metadata = json!({ "name": "n1", "labels": { MANAGED_BY: OPERATOR }, "creationTimestamp": last });
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

fn managed() -> DesiredCacheNode {
    let spec: CacheNodeSpec = object(json!({ "nodeName": "n1" }));
    DesiredCacheNode::Spec(Box::new(spec))
}

/// Returns status, reason and message of the condition to set.
fn text(step: &Step) -> [&str; 3] {
    let Step::Set(condition) = step else { panic!("{step:?}") };
    let (reason, message) = (condition.reason.as_deref(), condition.message.as_deref());
    [&condition.status, reason.unwrap_or_default(), message.unwrap_or_default()]
}

#[test]
fn condition_states_whether_the_agent_reported_ready_within_a_minute() {
    let leaving = ("False", "AgentGone", "the agent is stopping");
    let mut without_condition = serving();
    without_condition.status.as_mut().expect("made above").conditions.clear();
    let silent = || reported(300, ("True", "AsDesired", SERVES));
    for (live, wanted, [status, reason, words]) in [
        (serving(), managed(), ["True", "AsDesired", SERVES]),
        (reported(5, leaving), managed(), ["False", "AgentGone", "the agent is stopping"]),
        (silent(), managed(), ["False", "NotReported", "not reported for a minute"]),
        (unreported(120), managed(), ["False", "NotReported", "not reported yet"]),
        (without_condition, managed(), ["False", "NotReported", "does not report whether"]),
        // The condition of a paused cluster states the actual state.
        (serving(), DesiredCacheNode::Unchanged, ["True", "AsDesired", SERVES]),
        (silent(), DesiredCacheNode::Unchanged, ["False", "NotReported", "not reported for a minute"]),
    ] {
        let step = next_step(&node(None), Some(&live), &wanted, &clock::now());
        let [has, why, message] = text(&step);
        assert_eq!((has, why), (status, reason), "{words}");
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn node_without_an_agent_has_no_condition() {
    let now = clock::now();
    let Step::Set(condition) = next_step(&node(None), Some(&serving()), &managed(), &now) else {
        panic!("a condition")
    };
    let (without, with) = (node(None), node(Some(&condition)));
    let mut deleted = serving();
    deleted.metadata.deletion_timestamp = Some(now.clone());
    let mut by_hand = serving();
    by_hand.metadata.labels = None;
    let absent = DesiredCacheNode::Absent;
    for (node, live, wanted, expected) in [
        (&with, None, &absent, Step::Remove),
        (&without, None, &absent, Step::Nothing),
        // Its CacheNode is about to be deleted, and the store may lag behind the last write.
        (&without, Some(serving()), &absent, Step::Remove),
        (&without, Some(deleted), &absent, Step::Nothing),
        // A CacheNode that was created manually is kept, and is not the operator's.
        (&without, Some(by_hand.clone()), &absent, Step::Nothing),
        (&with, Some(by_hand), &absent, Step::Remove),
        // A paused cluster has not started on this node.
        (&without, None, &DesiredCacheNode::Unchanged, Step::Nothing),
        // A new agent has a minute for its first report.
        (&without, None, &managed(), Step::Nothing),
        (&without, Some(unreported(20)), &managed(), Step::Nothing),
    ] {
        assert_eq!(next_step(node, live.as_ref(), wanted, &now), expected, "{live:?}");
    }
    // An existing condition is updated although the CacheNode was re-created.
    assert_eq!(text(&next_step(&with, Some(&unreported(20)), &managed(), &now))[1], "NotReported");
}

#[test]
fn unchanged_condition_is_not_written_and_keeps_its_transition_time() {
    let (early, late) = (at("2026-01-01T00:00:00Z"), at("2026-01-01T08:00:00Z"));
    let set = |node: &Node, live: Option<&CacheNode>, now: &Time| match next_step(node, live, &managed(), now)
    {
        Step::Set(condition) => *condition,
        other => panic!("{other:?}"),
    };
    let first = set(&node(None), Some(&serving()), &early);
    assert_eq!(first.last_transition_time.as_ref(), Some(&early));
    let before = node(Some(&first));
    // No heartbeat is written.
    assert_eq!(next_step(&before, Some(&serving()), &managed(), &late), Step::Nothing);

    // Another message, the same status.
    let second = set(&before, Some(&reported(5, ("True", "AsDesired", "more engines"))), &late);
    assert_eq!(second.last_transition_time.as_ref(), Some(&early));
    assert_eq!(second.last_heartbeat_time.as_ref(), Some(&late));

    let third = set(&node(Some(&second)), None, &late);
    assert_eq!((third.status.as_str(), third.last_transition_time.as_ref()), ("False", Some(&late)));
    assert_eq!(next_step(&node(Some(&third)), None, &managed(), &early), Step::Nothing);

    let mut deleted = before;
    deleted.metadata.deletion_timestamp = Some(late.clone());
    assert_eq!(next_step(&deleted, None, &managed(), &late), Step::Nothing, "a deleted node is not changed");

    // The API server returns no empty message.
    let terse = reported(5, ("True", "AsDesired", ""));
    let stored = NodeCondition { message: None, ..set(&node(None), Some(&terse), &early) };
    assert_eq!(next_step(&node(Some(&stored)), Some(&terse), &managed(), &late), Step::Nothing);
}
