//! Tables of nodes: the nodes that get a revision next, and condition `Distributed`.

use std::collections::BTreeSet;

use reprise_crds::fields::Digest;
use reprise_crds::status::ConditionStatus;
use serde_json::{Value, json};

use super::super::source::Revision;
use super::super::status;
use super::*;
use crate::reconcile::test_objects::{merged, object};

const OLD: &str = "old";
/// Digest of the current revision.
const NEW: &str = "new";
const GPU: &str = "NVIDIA H200";

fn profile(rollout: &Value) -> SlackProfile {
    let subject = json!({ "model": "m", "gpuProduct": GPU, "engineVersion": "e" });
    SlackProfile::new("p", object(json!({ "subject": subject, "rollout": rollout })))
}

/// A rollout without canaries.
fn plain(percent: u32) -> Value {
    json!({ "maxUnavailablePercent": percent })
}

fn with_canary() -> Value {
    json!({ "canary": { "nodeSelector": {} } })
}

/// Parses a node: name, stage, and flags. Names with the prefix `c` are canaries.
fn node(words: &str) -> ProfileNode {
    let words: Vec<&str> = words.split(' ').collect();
    let report = |more: Value| -> Option<AppliedProfile> {
        Some(object(merged(json!({ "name": "p", "digest": NEW }), more)))
    };
    let (desired, report) = match words[1] {
        "fresh" => (None, None),
        "waiting" => (Some(OLD), report(json!({ "digest": OLD }))),
        "assigned" => (Some(NEW), None),
        "updating" => (Some(NEW), report(json!({ "digest": OLD }))),
        "applied" => (Some(NEW), report(json!({}))),
        "measured" => (Some(NEW), report(json!({ "predictionErrorP99Percent": 30 }))),
        "drifted" => (Some(NEW), report(json!({ "predictionErrorP99Percent": 31 }))),
        "refused" => (Some(NEW), report(json!({ "refused": "it is odd" }))),
        other => panic!("no stage '{other}'"),
    };
    ProfileNode {
        name: words[0].to_owned(),
        desired: desired.map(str::to_owned),
        stage: RolloutStage::of(desired.filter(|desired| *desired == NEW), report.as_ref(), 30),
        report,
        canary: words[0].starts_with('c'),
        silent: words.contains(&"silent"),
        frozen: words.contains(&"frozen"),
    }
}

/// The inputs with revision 7 and these nodes, separated by semicolons.
fn inputs(nodes: &str) -> ProfileInputs {
    ProfileInputs {
        revision: Ok(Revision { digest: NEW.to_owned(), text: "{}".to_owned() }),
        refused: None,
        digest: Some(NEW.to_owned()),
        number: 7,
        clusters: vec!["n/c".to_owned()],
        nodes: nodes.split("; ").map(node).collect(),
        products: BTreeSet::from([GPU.to_owned()]),
    }
}

/// Asserts which nodes get the revision, and that all others keep theirs. Returns the obstacle.
fn check(rollout: &Value, words: &str, is_soaking: bool, expected: &str) -> Option<Finding> {
    let found = inputs(words);
    let (decided, obstacle) = build(&profile(rollout), &found, is_soaking);
    let news = found.nodes.iter().filter(|node| decided.get(&node.name) != node.desired.as_ref());
    let news: Vec<&str> = news.map(|node| node.name.as_str()).collect();
    assert_eq!(news.join(" "), expected, "{rollout} {words:?} {is_soaking}");
    assert!(news.iter().all(|name| decided[*name] == NEW), "{rollout} {words:?} {is_soaking}");
    obstacle
}

#[test]
fn rolls_out_to_few_nodes_at_once() {
    for (percent, words, expected) in [
        // One node may always be updating.
        (10, "n1 waiting; n2 waiting; n3 waiting", "n1"),
        (10, "n1 fresh; n2 fresh", "n1"),
        (10, "n1 updating; n2 waiting", ""),
        (10, "n1 assigned; n2 fresh", ""),
        (10, "n1 applied; n2 waiting", "n2"),
        (10, "n1 measured; n2 applied; n3 waiting", "n3"),
        (50, "n1 applied; n2 updating; n3 waiting; n4 waiting", "n3"),
        (100, "n1 waiting; n2 waiting", "n1 n2"),
        // Nodes that refuse it or drift count as unavailable.
        (10, "n1 refused; n2 waiting", ""),
        (50, "n1 drifted; n2 waiting; n3 waiting; n4 waiting", "n2"),
        (50, "n1 drifted; n2 updating; n3 waiting; n4 waiting", ""),
        (50, "n1 drifted; n2 refused; n3 waiting; n4 waiting", ""),
        // Silent and frozen nodes are skipped; a node that fell silent while updating still counts.
        (10, "n1 waiting silent; n2 waiting frozen; n3 waiting", "n3"),
        (10, "n1 updating silent; n2 waiting", ""),
    ] {
        assert_eq!(check(&plain(percent), words, false, expected), None);
    }
}

#[test]
fn rolls_out_to_canaries_first() {
    for (words, is_soaking, expected, obstacle) in [
        ("a waiting; c waiting; d waiting", false, "c", None),
        ("a waiting; c updating; d waiting", false, "", None),
        ("a waiting; c1 applied; c2 waiting", false, "c2", None),
        ("a waiting; c applied; d waiting", true, "", Some((Reason::Progressing, "soakingSince"))),
        ("a waiting; c applied; d waiting", false, "a", None),
        ("a waiting; c applied", false, "a", None),
        ("a waiting; c applied silent", false, "", Some((Reason::NotReported, "node c "))),
        ("a waiting; d waiting", false, "", Some((Reason::NoNodes, "label a node"))),
        ("a waiting; c1 waiting; c2 refused", false, "", Some((Reason::Refused, "canary node c2 refuses"))),
        ("a waiting; c drifted", false, "", Some((Reason::MeasuredDifference, "canary node c drifts"))),
        ("a applied; c drifted; d waiting", false, "", Some((Reason::MeasuredDifference, "of 31 %"))),
        ("a refused; c applied; d waiting", false, "", None),
        ("a applied; c applied", true, "", None),
    ] {
        let found = check(&with_canary(), words, is_soaking, expected);
        assert_eq!(found.as_ref().map(|found| found.reason), obstacle.map(|(reason, _)| reason), "{words}");
        let (message, words) = (found.map(|found| found.message), obstacle.map(|(_, words)| words));
        assert!(message.unwrap_or_default().contains(words.unwrap_or_default()), "{words:?}");
    }
}

#[test]
fn condition_counts_nodes_and_names_those_that_hold_up_the_rollout() {
    for (nodes, reason, words) in [
        ("n1 applied; n2 drifted", Reason::AsDesired, "all 2 nodes"),
        ("n1 applied; n2 fresh", Reason::Progressing, "1 of 2 nodes have revision 7"),
        ("n1 applied; n2 refused", Reason::Refused, "n2 refuses revision 7: it is odd. It counts"),
        ("n1 drifted; n2 fresh", Reason::MeasuredDifference, "n1 drifts from revision 7"),
        ("n1 applied; n2 fresh silent", Reason::NotReported, "a minute: n2"),
        ("n1 applied; n2 fresh frozen", Reason::Paused, "n2 cannot be changed"),
    ] {
        let (_, findings) = status::compute(&profile(&plain(10)), &inputs(nodes), None, None);
        let found = findings.into_iter().find(|found| found.kind == ConditionType::Distributed);
        let found = found.expect("the condition");
        assert_eq!(found.reason, reason, "{found:?}");
        assert_eq!(found.status == ConditionStatus::True, reason == Reason::AsDesired, "{found:?}");
        assert!(found.message.contains(words) && found.message.chars().count() < 600, "{found:?}");
    }
}

#[test]
fn soak_starts_once_all_canaries_have_applied_each_revision() {
    let [early, now] =
        ["2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z"].map(|time| object::<Time>(json!(time)));
    let soaking = |words: &str, known: Option<&str>| {
        let mut profile = profile(&with_canary());
        profile.status = known.map(|digest| {
            let (digest, soaking_since) = (Some(Digest::new(digest)), Some(early.clone()));
            reprise_crds::SlackProfileStatus { digest, soaking_since, ..Default::default() }
        });
        let since = soaking_since(&profile, &inputs(words), &now)?;
        Some((since.clone(), soak_left(&profile, &since, &now)))
    };
    let minutes = |minutes: u64| Some(Duration::from_secs(60 * minutes));
    assert_eq!(soaking("a waiting; c applied", None), Some((now.clone(), minutes(10))));
    assert_eq!(soaking("a waiting; c applied", Some(NEW)), Some((early.clone(), minutes(5))));
    assert_eq!(soaking("a waiting; c applied", Some(OLD)), Some((now.clone(), minutes(10))));
    for words in
        ["a applied", "c1 applied; c2 updating", "c drifted", "c refused", "c1 applied; c2 applied silent"]
    {
        assert_eq!(soaking(words, Some(NEW)), None, "{words:?}");
    }
}
