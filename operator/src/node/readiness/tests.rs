//! What a node says of its cache, and how that is written.

use std::sync::Arc;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use reprise_crds::CacheNodeSpec;
use serde::de::DeserializeOwned;

use super::*;
use crate::names::{MANAGED_BY, OPERATOR};
use crate::requests::ApiRequests;
use crate::scripted::{Answer, Script, refusal, serve};
use crate::settings::{DefaultImages, Settings};
use crate::watch::Triggers;
use crate::world::World;

const SERVES: &str = "engines of the node are served";

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("an object")
}

fn at(text: &str) -> Time {
    object(json!(text))
}

/// A node with these conditions beside the kubelet's.
fn node(condition: Option<&NodeCondition>) -> Node {
    let kubelets = json!({ "type": "Ready", "status": "True" });
    let conditions: Vec<Value> =
        std::iter::once(kubelets).chain(condition.map(|condition| json!(condition))).collect();
    object(json!({ "metadata": { "name": "n1" }, "status": { "conditions": conditions } }))
}

/// A `CacheNode` of ours that said so long ago what its condition is.
fn said(ago: SignedDuration, status: &str, reason: &str, message: &str) -> CacheNode {
    let last = Time(Timestamp::now() - ago);
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
    said(SignedDuration::from_secs(5), "True", "AsDesired", SERVES)
}

/// One that is there for so long, and whose agent has never said anything.
fn never_said(ago: SignedDuration) -> CacheNode {
    let mut new = serving();
    new.status = None;
    new.metadata.creation_timestamp = Some(Time(Timestamp::now() - ago));
    new
}

fn had() -> Wanted {
    let spec: CacheNodeSpec = object(json!({ "nodeName": "n1" }));
    Wanted::Spec(Box::new(spec))
}

fn says(step: &Step) -> (&str, &str, &str) {
    let Step::Say(condition) = step else { panic!("{step:?}") };
    let (reason, message) = (condition.reason.as_deref(), condition.message.as_deref());
    (&condition.status, reason.unwrap_or_default(), message.unwrap_or_default())
}

#[test]
fn a_node_is_ready_while_its_agent_says_so_and_was_heard_within_a_minute() {
    let now = clock::now();
    let of = |live: Option<&CacheNode>| step(&node(None), live, &had(), &now);
    assert_eq!(says(&of(Some(&serving()))), ("True", "AsDesired", SERVES));

    let leaving = said(SignedDuration::from_secs(5), "False", "AgentGone", "the agent was told to stop");
    assert_eq!(says(&of(Some(&leaving))), ("False", "AgentGone", "the agent was told to stop"));

    let mut untold = serving();
    untold.status.as_mut().expect("made above").conditions.clear();
    let silent = said(SignedDuration::from_mins(5), "True", "AsDesired", SERVES);
    let new = never_said(SignedDuration::from_mins(2));
    for (live, words) in [
        (Some(&silent), "nothing for a minute"),
        (Some(&new), "not said anything yet"),
        (Some(&untold), "does not say whether"),
    ] {
        let step = of(live);
        let (status, reason, message) = says(&step);
        assert_eq!((status, reason), ("False", "NotReported"), "{words}");
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn an_agent_has_a_minute_to_say_something_before_its_node_says_that_it_does_not() {
    let now = clock::now();
    let new = never_said(SignedDuration::from_secs(20));
    for live in [Some(&new), None] {
        assert_eq!(step(&node(None), live, &had(), &now), Step::Nothing, "it may be about to");
    }
    let wait = look_again(Some(&new)).expect("nothing tells of its silence").as_secs();
    assert!((30..=41).contains(&wait), "{wait}");
    let overdue = never_said(SignedDuration::from_mins(2));
    assert_eq!(
        (says(&step(&node(None), Some(&overdue), &had(), &now)).1, look_again(Some(&overdue))),
        ("NotReported", None)
    );

    // What is said already is not left standing: the CacheNode was made anew.
    let Step::Say(before) = step(&node(None), Some(&serving()), &had(), &now) else { panic!("it is new") };
    assert_eq!(says(&step(&node(Some(&before)), Some(&new), &had(), &now)).1, "NotReported");
}

#[test]
fn what_is_said_is_not_said_again_and_since_when_it_is_so_is_kept() {
    let (early, late) = (at("2026-01-01T00:00:00Z"), at("2026-01-01T08:00:00Z"));
    let Step::Say(first) = step(&node(None), Some(&serving()), &had(), &early) else { panic!("it is new") };
    assert_eq!(first.last_transition_time.as_ref(), Some(&early));
    let before = node(Some(&first));
    assert_eq!(step(&before, Some(&serving()), &had(), &late), Step::Nothing, "that it lives is not told");

    // Other words, the same status.
    let other = said(SignedDuration::from_secs(5), "True", "AsDesired", "more of them are");
    let Step::Say(second) = step(&before, Some(&other), &had(), &late) else { panic!("other words") };
    assert_eq!(second.last_transition_time.as_ref(), Some(&early));
    assert_eq!(second.last_heartbeat_time.as_ref(), Some(&late));

    let Step::Say(third) = step(&node(Some(&second)), None, &had(), &late) else { panic!("it is away") };
    assert_eq!((third.status.as_str(), third.last_transition_time.as_ref()), ("False", Some(&late)));
    assert_eq!(step(&node(Some(&third)), None, &had(), &early), Step::Nothing);

    let mut goes = before;
    goes.metadata.deletion_timestamp = Some(late.clone());
    assert_eq!(step(&goes, None, &had(), &late), Step::Nothing, "the node goes, and what it says with it");
}

#[test]
fn a_node_that_no_cluster_has_says_nothing() {
    let now = clock::now();
    let Step::Say(condition) = step(&node(None), Some(&serving()), &had(), &now) else { panic!("new") };
    let (quiet, talks) = (node(None), node(Some(&condition)));
    assert_eq!(step(&talks, None, &Wanted::Nothing, &now), Step::Remove);
    assert_eq!(step(&quiet, None, &Wanted::Nothing, &now), Step::Nothing);
    // Its CacheNode is about to be removed, and the store may not have yet what was written last.
    assert_eq!(step(&quiet, Some(&serving()), &Wanted::Nothing, &now), Step::Remove);
    let mut goes = serving();
    goes.metadata.deletion_timestamp = Some(now.clone());
    assert_eq!(step(&quiet, Some(&goes), &Wanted::Nothing, &now), Step::Nothing, "it was removed before");
    // One that somebody has written by hand stays, and is nobody's.
    let mut by_hand = serving();
    by_hand.metadata.labels = None;
    assert_eq!(step(&quiet, Some(&by_hand), &Wanted::Nothing, &now), Step::Nothing);
    assert_eq!(step(&talks, Some(&by_hand), &Wanted::Nothing, &now), Step::Remove);
}

#[test]
fn agents_of_a_paused_cluster_are_told_of_as_they_are() {
    let now = clock::now();
    let paused = Wanted::Unchanged;
    assert_eq!(says(&step(&node(None), Some(&serving()), &paused, &now)).0, "True");
    let silent = said(SignedDuration::from_mins(5), "True", "AsDesired", SERVES);
    assert_eq!(says(&step(&node(None), Some(&silent), &paused, &now)).1, "NotReported");
    assert_eq!(step(&node(None), None, &paused, &now), Step::Nothing, "it has not begun with this node");
}

#[test]
fn who_goes_silent_is_looked_for_when_the_report_is_too_old() {
    let wait = look_again(Some(&said(SignedDuration::from_secs(20), "True", "AsDesired", "")));
    let wait = wait.expect("it was heard of").as_secs();
    assert!((30..=41).contains(&wait), "{wait}");
    let silent = said(SignedDuration::from_mins(5), "True", "AsDesired", "");
    assert_eq!((look_again(Some(&silent)), look_again(None)), (None, None), "its next report is an event");
}

/// A context whose API server answers so.
async fn context(answers: Vec<Answer>) -> (Context, Script) {
    let (client, script) = serve(answers).await;
    let settings = Settings {
        images: DefaultImages { agent: String::new(), control_plane: String::new(), etcd: String::new() },
        identity: "us".to_owned(),
        namespace: "n".to_owned(),
        service_account: None,
        admin: ([127, 0, 0, 1], 0).into(),
        control_planes: std::collections::BTreeMap::new(),
        unused_for: Duration::ZERO,
    };
    let (world, _writers) = World::new();
    let (triggers, _requests) = Triggers::new();
    let counted = (client, ApiRequests::default());
    (Context::new(counted, Arc::new(world), Arc::new(triggers), settings), script)
}

fn taken() -> Answer {
    Answer::Is(200, json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } }))
}

fn written(context: &Context) -> bool {
    context.metrics.text().contains("reprise_operator_writes_total{kind=\"Node\",what=\"status\"} 2")
}

#[tokio::test]
async fn the_condition_alone_is_applied_and_to_remove_it_nothing_is() {
    let (context, script) = context(vec![taken()]).await;
    let node = node(None);
    let says = step(&node, Some(&serving()), &had(), &at("2026-01-01T00:00:00Z"));
    for step in [&Step::Nothing, &says, &Step::Remove] {
        write(&node, step, &context).await.expect("the server takes it");
    }
    let asked = script.asked();
    assert_eq!(script.methods(), ["PATCH", "PATCH"]);
    for one in &asked {
        let (path, query) = one.path.split_once('?').expect("an apply says who writes");
        assert_eq!(path, "/api/v1/nodes/n1/status");
        assert!(query.contains("fieldManager=reprise-operator-readiness"), "{query}");
        assert!(!query.contains("force=true"), "somebody else's is taken only after it was named: {query}");
        assert_eq!(one.body["metadata"], json!({ "name": "n1" }), "whichever version it has");
    }
    let time = "2026-01-01T00:00:00Z";
    let condition = json!({
        "type": "reprise.dev/AgentReady", "status": "True", "reason": "AsDesired", "message": SERVES,
        "lastTransitionTime": time, "lastHeartbeatTime": time,
    });
    assert_eq!(asked[0].body["status"], json!({ "conditions": [condition] }));
    assert_eq!(asked[1].body.get("status"), None);
    assert!(written(&context), "{}", context.metrics.text());
}

#[tokio::test]
async fn a_node_that_is_gone_needs_nothing_and_a_right_that_lacks_stops_nothing_else() {
    let forbidden = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 403, "reason": "Forbidden",
        "message": "nodes \"n1\" is forbidden",
    });
    let answers = vec![refusal(404, &json!([])), Answer::Is(500, json!({})), Answer::Is(403, forbidden)];
    let (context, script) = context(answers).await;
    let node = node(None);
    write(&node, &Step::Remove, &context).await.expect("gone is as good");
    let failed = write(&node, &Step::Remove, &context).await.expect_err("it is tried again");
    assert!(failed.to_string().contains(AGENT_READY), "{failed}");
    write(&node, &Step::Remove, &context).await.expect("not allowed");
    write(&node, &Step::Remove, &context).await.expect("not tried again at once");
    assert_eq!(script.methods().len(), 3);
    assert!(!context.metrics.text().contains("kind=\"Node\""), "nothing was written");
}

#[test]
fn an_agent_that_has_nothing_to_add_is_not_written_again_and_again() {
    let now = clock::now();
    let terse = said(SignedDuration::from_secs(5), "True", "AsDesired", "");
    let Step::Say(mut condition) = step(&node(None), Some(&terse), &had(), &now) else {
        panic!("it is to be said")
    };
    // As the API server gives it back.
    condition.message = None;
    assert_eq!(step(&node(Some(&condition)), Some(&terse), &had(), &now), Step::Nothing);
}
