//! Tables of nodes, and the nodes that get a revision next.

use reprise_crds::fields::{Digest, Name, Text};
use reprise_crds::node::AppliedProfile;
use serde_json::{Value, json};

use super::*;

const OLD: &str = "old";
/// Digest of the current revision.
pub(crate) const NEW: &str = "new";
const SOAK: Duration = Duration::from_secs(600);

fn profile(rollout: &Value) -> SlackProfile {
    let spec = json!({
        "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" }, "configMapRef": { "name": "c", "key": "k" }, "rollout": rollout,
    });
    SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"))
}

/// A rollout without canaries.
fn plain(percent: u32) -> Value {
    json!({ "maxUnavailablePercent": percent })
}

fn with_canary() -> Value {
    json!({ "canary": { "nodeSelector": {} } })
}

fn report(digest: &str) -> AppliedProfile {
    AppliedProfile {
        name: Name::new("p"),
        digest: Digest::new(digest),
        refused: None,
        prediction_error_p50_percent: None,
        prediction_error_p99_percent: None,
    }
}

fn measures(p50: u32, p99: u32) -> AppliedProfile {
    AppliedProfile {
        prediction_error_p50_percent: Some(p50),
        prediction_error_p99_percent: Some(p99),
        ..report(NEW)
    }
}

/// Parses a node: name, stage, and flags. Names with the prefix `c` are canaries.
fn node(words: &str) -> ProfileNode {
    let mut words = words.split(' ');
    let name = words.next().expect("a name");
    let (desired, report) = match words.next().expect("a stage") {
        "fresh" => (None, None),
        "waiting" => (Some(OLD), Some(report(OLD))),
        "assigned" => (Some(NEW), None),
        "updating" => (Some(NEW), Some(report(OLD))),
        "applied" => (Some(NEW), Some(report(NEW))),
        "measured" => (Some(NEW), Some(measures(4, 30))),
        "drifted" => (Some(NEW), Some(measures(9, 31))),
        "refused" => {
            (Some(NEW), Some(AppliedProfile { refused: Some(Text::new("it is odd")), ..report(NEW) }))
        }
        other => panic!("no stage '{other}'"),
    };
    let more: Vec<&str> = words.collect();
    ProfileNode {
        name: name.to_owned(),
        desired: desired.map(str::to_owned),
        report,
        canary: name.starts_with('c'),
        silent: more.contains(&"silent"),
        frozen: more.contains(&"frozen"),
    }
}

/// Parses nodes that are separated by semicolons.
pub(crate) fn nodes(words: &str) -> Vec<ProfileNode> {
    words.split("; ").filter(|words| !words.is_empty()).map(node).collect()
}

/// Names of nodes that newly get the revision.
fn given(nodes: &[ProfileNode], decision: &Rollout) -> Vec<String> {
    let is_news = |node: &&ProfileNode| {
        node.desired.as_deref() != Some(NEW)
            && decision.nodes.get(&node.name).is_some_and(|desired| desired == NEW)
    };
    nodes.iter().filter(is_news).map(|node| node.name.clone()).collect()
}

#[test]
fn rolls_out_to_few_nodes_at_once_and_to_canaries_first() {
    use Obstacle::{CanarySilent, NoCanary, Soaking};
    let none = || Some(Duration::ZERO);
    let half = || Some(SOAK / 2);
    let done = || Some(SOAK);
    let (drifted, refused) = (RolloutStage::Drifted, RolloutStage::Refused);
    let stopped = |node: &str, stage| Some(Obstacle::CanaryFailed { node: node.to_owned(), stage });
    for (rollout, words, soaked, expected, obstacle) in [
        // One node may always be updating.
        (plain(10), "n1 waiting; n2 waiting; n3 waiting", None, "n1", None),
        (plain(10), "n1 fresh; n2 fresh", None, "n1", None),
        (plain(10), "n1 updating; n2 waiting", None, "", None),
        (plain(10), "n1 assigned; n2 fresh", None, "", None),
        (plain(10), "n1 applied; n2 waiting", None, "n2", None),
        (plain(10), "n1 measured; n2 applied; n3 waiting", None, "n3", None),
        (plain(50), "n1 applied; n2 updating; n3 waiting; n4 waiting", None, "n3", None),
        (plain(100), "n1 waiting; n2 waiting", None, "n1 n2", None),
        // Nodes that refuse it or drift count as unavailable.
        (plain(10), "n1 refused; n2 waiting", None, "", None),
        (plain(50), "n1 drifted; n2 waiting; n3 waiting; n4 waiting", None, "n2", None),
        (plain(50), "n1 drifted; n2 updating; n3 waiting; n4 waiting", None, "", None),
        (plain(50), "n1 drifted; n2 refused; n3 waiting; n4 waiting", None, "", None),
        // Silent and frozen nodes are skipped; a node that fell silent while updating still counts.
        (plain(10), "n1 waiting silent; n2 waiting frozen; n3 waiting", None, "n3", None),
        (plain(10), "n1 updating silent; n2 waiting", None, "", None),
        // Rollouts with canaries.
        (with_canary(), "a waiting; c waiting; d waiting", None, "c", None),
        (with_canary(), "a waiting; c updating; d waiting", None, "", None),
        (with_canary(), "a waiting; c1 applied; c2 waiting", None, "c2", None),
        (with_canary(), "a waiting; c applied; d waiting", none(), "", Some(Soaking(SOAK))),
        (with_canary(), "a waiting; c applied; d waiting", half(), "", Some(Soaking(SOAK / 2))),
        (with_canary(), "a waiting; c applied; d waiting", done(), "a", None),
        (with_canary(), "a waiting; c applied", done(), "a", None),
        (with_canary(), "a waiting; c applied silent", done(), "", Some(CanarySilent("c".to_owned()))),
        (with_canary(), "a waiting; d waiting", None, "", Some(NoCanary)),
        (with_canary(), "a waiting; c1 waiting; c2 refused", None, "", stopped("c2", refused)),
        (with_canary(), "a waiting; c drifted", done(), "", stopped("c", drifted)),
        (with_canary(), "a applied; c drifted; d waiting", done(), "", stopped("c", drifted)),
        (with_canary(), "a refused; c applied; d waiting", done(), "", None),
        (with_canary(), "a applied; c applied", none(), "", None),
    ] {
        let nodes = nodes(words);
        let decision = build(&profile(&rollout), &nodes, Some(NEW), soaked);
        assert_eq!(given(&nodes, &decision).join(" "), expected, "{rollout} {words:?} {soaked:?}");
        assert_eq!(decision.obstacle, obstacle, "{rollout} {words:?} {soaked:?}");
        let expected: Vec<&str> = expected.split(' ').collect();
        for node in &nodes {
            if !expected.contains(&node.name.as_str()) {
                assert_eq!(
                    decision.nodes.get(&node.name),
                    node.desired.as_ref(),
                    "nodes keep their revision"
                );
            }
        }
    }
}

#[test]
fn soak_starts_once_all_canaries_have_applied_each_revision() {
    let time = |text: &str| -> Time { serde_json::from_value(text.into()).expect("a time") };
    let (early, now) = (time("2026-01-01T00:00:00Z"), time("2026-01-01T00:05:00Z"));
    let soaking = |words: &str, known: Option<&str>| {
        let mut profile = profile(&with_canary());
        profile.status = known.map(|digest| {
            let (digest, soaking_since) = (Some(Digest::new(digest)), Some(early.clone()));
            reprise_crds::SlackProfileStatus { digest, soaking_since, ..Default::default() }
        });
        soaking_since(&profile, &nodes(words), Some(NEW), &now)
    };
    assert_eq!(soaking("a waiting; c applied", None), Some(now.clone()));
    assert_eq!(soaking("a waiting; c applied", Some(NEW)), Some(early.clone()));
    assert_eq!(soaking("a waiting; c applied", Some(OLD)), Some(now.clone()));
    for words in
        ["a applied", "c1 applied; c2 updating", "c drifted", "c refused", "c1 applied; c2 applied silent"]
    {
        assert_eq!(soaking(words, Some(NEW)), None, "{words:?}");
    }
}
