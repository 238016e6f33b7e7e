//! The readiness condition of nodes, and its requests.

use std::sync::Arc;

use k8s_openapi::jiff::SignedDuration;
use reprise_crds::CacheNodeSpec;
use serde::de::DeserializeOwned;

use super::*;
use crate::framework::api_client::ApiRequests;
use crate::framework::labels::{MANAGED_BY, OPERATOR};
use crate::framework::test_api_server::{CannedResponse, RequestLog, error_response, serve};
use crate::reconcile::stores::Stores;
use crate::settings::{DefaultImages, Settings};

const SERVES: &str = "the agent serves engines";

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("an object")
}

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

/// A `CacheNode` of the operator with this condition, reported `ago`.
fn reported(ago: SignedDuration, status: &str, reason: &str, message: &str) -> CacheNode {
    let last = Time(clock::now().0 - ago);
    object(json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode",
        "metadata": { "name": "n1", "labels": { MANAGED_BY: OPERATOR } }, "spec": { "nodeName": "n1" },
        "status": {
            "lastUpdated": last,
            "conditions": [{
                "type": "AgentReady", "status": status, "reason": reason, "message": message, "lastTransitionTime": last,
            }],
        },
    }))
}

fn serving() -> CacheNode {
    reported(SignedDuration::from_secs(5), "True", "AsDesired", SERVES)
}

/// A `CacheNode` created `ago`, without any report.
fn silent_since_creation(ago: SignedDuration) -> CacheNode {
    let mut new = serving();
    new.status = None;
    new.metadata.creation_timestamp = Some(Time(clock::now().0 - ago));
    new
}

fn managed() -> DesiredCacheNode {
    let spec: CacheNodeSpec = object(json!({ "nodeName": "n1" }));
    DesiredCacheNode::Spec(Box::new(spec))
}

fn text(step: &Step) -> (&str, &str, &str) {
    let Step::Set(condition) = step else { panic!("{step:?}") };
    let (reason, message) = (condition.reason.as_deref(), condition.message.as_deref());
    (&condition.status, reason.unwrap_or_default(), message.unwrap_or_default())
}

#[test]
fn node_is_ready_while_its_agent_reported_so_within_a_minute() {
    let now = clock::now();
    let of = |live: Option<&CacheNode>| next_step(&node(None), live, &managed(), &now);
    assert_eq!(text(&of(Some(&serving()))), ("True", "AsDesired", SERVES));

    let leaving = reported(SignedDuration::from_secs(5), "False", "AgentGone", "the agent is stopping");
    assert_eq!(text(&of(Some(&leaving))), ("False", "AgentGone", "the agent is stopping"));

    let mut without_condition = serving();
    without_condition.status.as_mut().expect("made above").conditions.clear();
    let silent = reported(SignedDuration::from_mins(5), "True", "AsDesired", SERVES);
    let new = silent_since_creation(SignedDuration::from_mins(2));
    for (live, part) in [
        (Some(&silent), "not reported for a minute"),
        (Some(&new), "not reported yet"),
        (Some(&without_condition), "does not report whether"),
    ] {
        let step = of(live);
        let (status, reason, message) = text(&step);
        assert_eq!((status, reason), ("False", "NotReported"), "{part}");
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn new_agent_has_a_minute_for_its_first_report() {
    let now = clock::now();
    let new = silent_since_creation(SignedDuration::from_secs(20));
    for live in [Some(&new), None] {
        assert_eq!(next_step(&node(None), live, &managed(), &now), Step::Nothing, "its report may follow");
    }
    let wait = next_check(Some(&new)).expect("a delay").as_secs();
    assert!((30..=41).contains(&wait), "{wait}");
    let overdue = silent_since_creation(SignedDuration::from_mins(2));
    assert_eq!(
        (text(&next_step(&node(None), Some(&overdue), &managed(), &now)).1, next_check(Some(&overdue))),
        ("NotReported", None)
    );

    // An existing condition is updated although the CacheNode was re-created.
    let Step::Set(before) = next_step(&node(None), Some(&serving()), &managed(), &now) else {
        panic!("a condition")
    };
    assert_eq!(text(&next_step(&node(Some(&before)), Some(&new), &managed(), &now)).1, "NotReported");
}

#[test]
fn unchanged_condition_is_not_written_and_keeps_its_transition_time() {
    let (early, late) = (at("2026-01-01T00:00:00Z"), at("2026-01-01T08:00:00Z"));
    let Step::Set(first) = next_step(&node(None), Some(&serving()), &managed(), &early) else {
        panic!("a condition")
    };
    assert_eq!(first.last_transition_time.as_ref(), Some(&early));
    let before = node(Some(&first));
    assert_eq!(
        next_step(&before, Some(&serving()), &managed(), &late),
        Step::Nothing,
        "no heartbeat is written"
    );

    // Another message, the same status.
    let other = reported(SignedDuration::from_secs(5), "True", "AsDesired", "the agent serves more engines");
    let Step::Set(second) = next_step(&before, Some(&other), &managed(), &late) else {
        panic!("another message")
    };
    assert_eq!(second.last_transition_time.as_ref(), Some(&early));
    assert_eq!(second.last_heartbeat_time.as_ref(), Some(&late));

    let Step::Set(third) = next_step(&node(Some(&second)), None, &managed(), &late) else {
        panic!("a condition")
    };
    assert_eq!((third.status.as_str(), third.last_transition_time.as_ref()), ("False", Some(&late)));
    assert_eq!(next_step(&node(Some(&third)), None, &managed(), &early), Step::Nothing);

    let mut deleted = before;
    deleted.metadata.deletion_timestamp = Some(late.clone());
    assert_eq!(
        next_step(&deleted, None, &managed(), &late),
        Step::Nothing,
        "a node that is being deleted is not changed"
    );
}

#[test]
fn node_without_a_cluster_has_no_condition() {
    let now = clock::now();
    let Step::Set(condition) = next_step(&node(None), Some(&serving()), &managed(), &now) else {
        panic!("a condition")
    };
    let (without, with) = (node(None), node(Some(&condition)));
    assert_eq!(next_step(&with, None, &DesiredCacheNode::Absent, &now), Step::Remove);
    assert_eq!(next_step(&without, None, &DesiredCacheNode::Absent, &now), Step::Nothing);
    // Its CacheNode is about to be deleted, and the store may lag behind the last write.
    assert_eq!(next_step(&without, Some(&serving()), &DesiredCacheNode::Absent, &now), Step::Remove);
    let mut deleted = serving();
    deleted.metadata.deletion_timestamp = Some(now.clone());
    assert_eq!(
        next_step(&without, Some(&deleted), &DesiredCacheNode::Absent, &now),
        Step::Nothing,
        "it was removed earlier"
    );
    // A CacheNode that was created manually is kept, and is not the operator's.
    let mut by_hand = serving();
    by_hand.metadata.labels = None;
    assert_eq!(next_step(&without, Some(&by_hand), &DesiredCacheNode::Absent, &now), Step::Nothing);
    assert_eq!(next_step(&with, Some(&by_hand), &DesiredCacheNode::Absent, &now), Step::Remove);
}

#[test]
fn reports_the_actual_state_of_agents_of_a_paused_cluster() {
    let now = clock::now();
    let paused = DesiredCacheNode::Unchanged;
    assert_eq!(text(&next_step(&node(None), Some(&serving()), &paused, &now)).0, "True");
    let silent = reported(SignedDuration::from_mins(5), "True", "AsDesired", SERVES);
    assert_eq!(text(&next_step(&node(None), Some(&silent), &paused, &now)).1, "NotReported");
    assert_eq!(
        next_step(&node(None), None, &paused, &now),
        Step::Nothing,
        "the cluster has not started on this node"
    );
}

#[test]
fn checks_again_when_the_last_report_expires() {
    let wait = next_check(Some(&reported(SignedDuration::from_secs(20), "True", "AsDesired", "")));
    let wait = wait.expect("a delay").as_secs();
    assert!((30..=41).contains(&wait), "{wait}");
    let silent = reported(SignedDuration::from_mins(5), "True", "AsDesired", "");
    assert_eq!(
        (next_check(Some(&silent)), next_check(None)),
        (None, None),
        "its next report causes an event"
    );
}

/// A context whose API server gives these responses.
async fn context(answers: Vec<CannedResponse>) -> (Context, RequestLog) {
    let (client, requests_log) = serve(answers);
    let settings = Settings {
        images: DefaultImages {
            agent: String::new(),
            control_plane: String::new(),
            etcd: String::new(),
            operator: String::new(),
        },
        identity: "us".to_owned(),
        namespace: "n".to_owned(),
        service_account: None,
        admin: ([127, 0, 0, 1], 0).into(),
        admin_plain: true,
        control_planes: Vec::new(),
        unused_for: Duration::ZERO,
    };
    let (stores, _writers) = Stores::new();
    let counted = (client, ApiRequests::default());
    (Context::new(counted, Arc::new(stores), settings), requests_log)
}

fn taken() -> CannedResponse {
    CannedResponse::Json(200, json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } }))
}

fn written(context: &Context) -> bool {
    context.metrics.text().contains("reprise_operator_writes_total{kind=\"Node\",what=\"status\"} 2")
}

#[tokio::test]
async fn applies_only_the_condition_and_removes_it_by_an_empty_apply() {
    let (context, requests_log) = context(vec![taken()]).await;
    let node = node(None);
    let set = next_step(&node, Some(&serving()), &managed(), &at("2026-01-01T00:00:00Z"));
    for step in [&Step::Nothing, &set, &Step::Remove] {
        write(&node, step, &context).await.expect("a successful write");
    }
    let requests = requests_log.requests();
    assert_eq!(requests_log.methods(), ["PATCH", "PATCH"]);
    for one in &requests {
        let (path, query) = one.path.split_once('?').expect("a field manager");
        assert_eq!(path, "/api/v1/nodes/n1/status");
        assert!(query.contains("fieldManager=reprise-operator-readiness"), "{query}");
        assert!(
            !query.contains("force=true"),
            "foreign fields are taken only after a reported conflict: {query}"
        );
        assert_eq!(one.body["metadata"], json!({ "name": "n1" }), "no resourceVersion");
    }
    let time = "2026-01-01T00:00:00Z";
    let condition = json!({
        "type": "reprise.dev/AgentReady", "status": "True", "reason": "AsDesired", "message": SERVES,
        "lastTransitionTime": time, "lastHeartbeatTime": time,
    });
    assert_eq!(requests[0].body["status"], json!({ "conditions": [condition] }));
    assert_eq!(requests[1].body.get("status"), None);
    assert!(written(&context), "{}", context.metrics.text());
}

#[tokio::test]
async fn ignores_deleted_nodes_and_reports_other_errors() {
    let answers = vec![error_response(404, &json!([])), error_response(403, &json!([]))];
    let (context, requests_log) = context(answers).await;
    let node = node(None);
    write(&node, &Step::Remove, &context).await.expect("ignored");
    let failed = write(&node, &Step::Remove, &context).await.expect_err("an error");
    assert!(failed.to_string().contains(AGENT_READY), "{failed}");
    assert_eq!(requests_log.methods().len(), 2);
    assert!(!context.metrics.text().contains("kind=\"Node\""), "nothing was written");
}

#[test]
fn empty_message_does_not_cause_repeated_writes() {
    let now = clock::now();
    let terse = reported(SignedDuration::from_secs(5), "True", "AsDesired", "");
    let Step::Set(mut condition) = next_step(&node(None), Some(&terse), &managed(), &now) else {
        panic!("a condition")
    };
    // As the API server returns it.
    condition.message = None;
    assert_eq!(next_step(&node(Some(&condition)), Some(&terse), &managed(), &now), Step::Nothing);
}
