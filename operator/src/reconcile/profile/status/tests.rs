//! Conditions of profiles for nodes at various stages.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_crds::status::ConditionStatus;
use serde_json::json;

use super::super::dereference::{ProfileReport, SelectingCluster};
use super::*;

const NEW: &str = "new";
const GPU: &str = "NVIDIA H200";

fn profile() -> SlackProfile {
    let spec = json!({
        "subject": { "model": "m", "gpuProduct": GPU, "engineVersion": "e" }, "configMapRef": { "name": "c", "key": "k" },
    });
    let mut profile = SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"));
    profile.status =
        Some(SlackProfileStatus { digest: Some(Digest::new(NEW)), revision: 7, ..Default::default() });
    profile
}

/// A node that has applied the current revision.
fn works(name: &str) -> ProfileNode {
    let report = Some(ProfileReport { digest: NEW.to_owned(), ..ProfileReport::default() });
    ProfileNode { name: name.to_owned(), desired: Some(NEW.to_owned()), report, ..ProfileNode::default() }
}

fn measures(name: &str, p50: u32, p99: u32) -> ProfileNode {
    let node = works(name);
    let report = node.report.clone().map(|report| ProfileReport { p50: Some(p50), p99: Some(p99), ..report });
    ProfileNode { report, ..node }
}

fn refuses(name: &str) -> ProfileNode {
    let node = works(name);
    let report =
        node.report.clone().map(|report| ProfileReport { refused: Some("it is odd".to_owned()), ..report });
    ProfileNode { report, ..node }
}

fn fresh(name: &str) -> ProfileNode {
    ProfileNode { name: name.to_owned(), ..ProfileNode::default() }
}

fn found(nodes: Vec<ProfileNode>, products: &[&str]) -> ProfileInputs {
    ProfileInputs {
        source: Source::Text { location: "entry k of ConfigMap c".to_owned(), text: "{}".to_owned() },
        clusters: vec![SelectingCluster { cluster: "n/c".to_owned(), ahead: 0 }],
        nodes,
        products: products.iter().map(|product| (*product).to_owned()).collect::<BTreeSet<String>>(),
    }
}

/// Status and conditions for these nodes and this state of the rollout.
fn compute_for(found: &ProfileInputs, state: RolloutState) -> (SlackProfileStatus, Vec<Finding>) {
    let revision = Revision { digest: NEW.to_owned(), text: "{}".to_owned() };
    let decision = Rollout { nodes: BTreeMap::new(), state };
    compute(&StatusInputs {
        profile: &profile(),
        found,
        refused: None,
        revision: Ok(&revision),
        decision: &decision,
        soaking_since: None,
    })
}

fn condition(findings: &[Finding], kind: Type) -> (ConditionStatus, Reason, String) {
    let found = findings.iter().find(|found| found.kind == kind).expect("the condition");
    (found.status, found.reason, found.message.clone())
}

#[test]
fn counts_nodes_by_their_reports_on_the_current_revision() {
    let nodes = vec![measures("n1", 4, 20), measures("n2", 9, 30), refuses("n3"), fresh("n4")];
    let (status, _) = compute_for(&found(nodes, &[GPU]), RolloutState::Progressing);
    assert_eq!(status.nodes, Some(ProfileNodes { target: 4, applied: 2, failed: 1 }));
    let measured = Measured { prediction_error_p50_percent: 9, prediction_error_p99_percent: 30 };
    assert_eq!((status.measured, status.revision), (Some(measured), 7));
    assert_eq!(compute_for(&found(vec![works("n1")], &[GPU]), RolloutState::Complete).0.measured, None);
}

#[test]
fn new_digest_increments_the_revision_and_an_invalid_profile_keeps_it() {
    let (found, decision) =
        (found(vec![works("n1")], &[GPU]), Rollout { nodes: BTreeMap::new(), state: RolloutState::Idle });
    let other = Revision { digest: "other".to_owned(), text: "{}".to_owned() };
    let refusal = Refusal::new(Reason::ProfileInvalid, "windows[0]: no");
    let profile = profile();
    let of = |revision| {
        let inputs = StatusInputs {
            profile: &profile,
            found: &found,
            refused: None,
            revision,
            decision: &decision,
            soaking_since: None,
        };
        super::compute(&inputs)
    };
    let (status, _) = of(Ok(&other));
    assert_eq!((status.digest, status.revision), (Some(Digest::new("other")), 8));
    let (status, findings) = of(Err(&refusal));
    assert_eq!((status.digest, status.revision), (Some(Digest::new(NEW)), 7));
    let (valid, reason, message) = condition(&findings, Type::Valid);
    assert_eq!((valid, reason, message.as_str()), (ConditionStatus::False, refusal.reason, "windows[0]: no"));
    let (distributed, _, message) = condition(&findings, Type::Distributed);
    assert_eq!(distributed, ConditionStatus::False);
    assert!(message.contains("1 of 1 nodes keep"), "{message}");
    assert_eq!(condition(&findings, Type::Active).0, ConditionStatus::True, "the node keeps its revision");
}

#[test]
fn each_rollout_state_has_a_reason_and_a_remedy() {
    use ConditionStatus::{False, True};
    let stopped = |node: &str, stage| RolloutState::CanaryFailed { node: node.to_owned(), stage };
    let here = |nodes| found(nodes, &[GPU]);
    let silent = ProfileNode { silent: true, ..fresh("n2") };
    let frozen = ProfileNode { frozen: true, ..fresh("n2") };
    let exhausted = RolloutState::LimitReached { node: "n1".to_owned(), stage: RolloutStage::Refused };
    let soaking = RolloutState::Soaking(Duration::from_secs(3));
    for (found, state, status, reason, words) in [
        (
            here(vec![works("n1"), works("n2")]),
            RolloutState::Complete,
            True,
            Reason::AsDesired,
            "all 2 nodes",
        ),
        (
            here(vec![works("n1"), fresh("n2")]),
            RolloutState::Progressing,
            False,
            Reason::Progressing,
            "1 of 2 nodes",
        ),
        (
            here(vec![works("n1"), refuses("n2")]),
            RolloutState::Complete,
            False,
            Reason::Refused,
            "n2 refuses it: it is odd",
        ),
        (
            here(vec![works("n1"), silent]),
            RolloutState::Progressing,
            False,
            Reason::NotReported,
            "for a minute: n2",
        ),
        (
            here(vec![works("n1"), frozen]),
            RolloutState::Progressing,
            False,
            Reason::Paused,
            "n2 cannot be changed",
        ),
        (
            here(vec![works("n1"), fresh("n2")]),
            RolloutState::NoCanary,
            False,
            Reason::NoNodes,
            "label a node",
        ),
        (here(vec![works("n1"), fresh("n2")]), soaking, False, Reason::Progressing, "status.soakingSince"),
        (
            here(vec![works("n1"), fresh("n2")]),
            RolloutState::CanarySilent("n1".to_owned()),
            False,
            Reason::NotReported,
            "canary node n1",
        ),
        (
            here(vec![measures("n1", 9, 90), fresh("n2")]),
            stopped("n1", RolloutStage::Drifted),
            False,
            Reason::MeasuredDifference,
            "canary node n1 drifts from revision 7: an error of 90 %. The other nodes keep",
        ),
        (
            here(vec![refuses("n1"), fresh("n2")]),
            stopped("n1", RolloutStage::Refused),
            False,
            Reason::Refused,
            "canary node n1 refuses revision 7: it is odd",
        ),
        (here(vec![refuses("n1"), fresh("n2")]), exhausted, False, Reason::Refused, "1 of 2 nodes refuse"),
        (found(Vec::new(), &[]), RolloutState::Idle, False, Reason::NoNodes, "has reported a GPU"),
        (
            found(Vec::new(), &["NVIDIA L4"]),
            RolloutState::Idle,
            False,
            Reason::WrongGpu,
            "no node of n/c has the GPU 'NVIDIA H200', but they have 'NVIDIA L4'",
        ),
    ] {
        let (_, findings) = compute_for(&found, state.clone());
        let (is, why, message) = condition(&findings, Type::Distributed);
        assert_eq!((is, why), (status, reason), "{state:?}: {message}");
        assert!(message.contains(words), "{message}");
        assert!(message.chars().count() < 600, "{message}");
    }
}

#[test]
fn profile_is_active_once_all_nodes_have_applied_any_revision() {
    use ConditionStatus::{False, True};
    let older = ProfileNode {
        desired: Some("old".to_owned()),
        report: Some(ProfileReport { digest: "old".to_owned(), ..ProfileReport::default() }),
        ..works("n2")
    };
    for (nodes, expected) in [
        (vec![works("n1"), older], (True, Reason::AsDesired)),
        (vec![works("n1"), fresh("n2")], (False, Reason::Progressing)),
        (vec![works("n1"), refuses("n2")], (False, Reason::Refused)),
    ] {
        let (_, findings) = compute_for(&found(nodes, &[GPU]), RolloutState::Progressing);
        let (status, reason, message) = condition(&findings, Type::Active);
        assert_eq!((status, reason), expected);
        assert!(message.contains("no effect on the agents' own I/O"), "{message}");
    }
    let (_, findings) = compute_for(&found(Vec::new(), &["NVIDIA L4"]), RolloutState::Idle);
    assert_eq!(condition(&findings, Type::Active).1, Reason::WrongGpu);
}

#[test]
fn profile_has_drifted_once_one_node_reports_it_and_is_unknown_before_measurements() {
    use ConditionStatus::{False, True, Unknown};
    for (nodes, status, words) in [
        (vec![works("n1")], Unknown, "no node has measured"),
        (vec![works("n1"), measures("n2", 4, 30)], False, "than 30"),
        (vec![measures("n1", 4, 30), measures("n2", 4, 31)], True, "n2: an error of 31 %"),
    ] {
        let (_, findings) = compute_for(&found(nodes, &[GPU]), RolloutState::Complete);
        let (is, _, message) = condition(&findings, Type::Drifted);
        assert_eq!(is, status);
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn nodes_beyond_the_profile_limit_do_not_count_as_having_it() {
    let over_limit = |name| ProfileNode { over_limit: true, desired: None, ..works(name) };
    let found = found(vec![works("n1"), over_limit("n2"), over_limit("n3")], &[GPU]);
    let refusal = Refusal::new(Reason::Conflict, "16 others");
    let revision = Revision { digest: NEW.to_owned(), text: "{}".to_owned() };
    let decision = Rollout { nodes: BTreeMap::new(), state: RolloutState::Idle };
    let (status, findings) = compute(&StatusInputs {
        profile: &profile(),
        found: &found,
        refused: Some(&refusal),
        revision: Ok(&revision),
        decision: &decision,
        soaking_since: None,
    });
    assert_eq!(status.nodes, Some(ProfileNodes { target: 3, applied: 1, failed: 0 }));
    let (is, reason, message) = condition(&findings, Type::Distributed);
    assert_eq!((is, reason), (ConditionStatus::False, Reason::Conflict));
    assert!(message.contains("1 of 3 nodes keep their revision; 2 do not get it"), "{message}");
    assert!(message.contains("n2, n3. Narrow spec.slackProfiles"), "{message}");
    let (is, reason, message) = condition(&findings, Type::Active);
    assert_eq!((is, reason), (ConditionStatus::False, Reason::Conflict));
    assert!(message.contains("1 of 3 nodes"), "{message}");
}
