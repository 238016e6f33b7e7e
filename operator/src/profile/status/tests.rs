//! What is said of nodes that are so and so far.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_crds::status::ConditionStatus;
use serde_json::json;

use super::super::dereference::{Said, Selecting};
use super::*;

const NEW: &str = "new";
const GPU: &str = "NVIDIA H200";

fn profile() -> SlackProfile {
    let spec = json!({
        "subject": { "model": "m", "gpuProduct": GPU, "engineVersion": "e" }, "windows": [],
    });
    let mut profile = SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"));
    profile.status =
        Some(SlackProfileStatus { digest: Some(Digest::new(NEW)), revision: 7, ..Default::default() });
    profile
}

/// A node that works by the present revision.
fn works(name: &str) -> ProfileNode {
    let said = Some(Said { digest: NEW.to_owned(), ..Said::default() });
    ProfileNode { name: name.to_owned(), wanted: Some(NEW.to_owned()), said, ..ProfileNode::default() }
}

fn measures(name: &str, p50: u32, p99: u32) -> ProfileNode {
    let node = works(name);
    let said = node.said.clone().map(|said| Said { p50: Some(p50), p99: Some(p99), ..said });
    ProfileNode { said, ..node }
}

fn refuses(name: &str) -> ProfileNode {
    let node = works(name);
    let said = node.said.clone().map(|said| Said { refused: Some("it is odd".to_owned()), ..said });
    ProfileNode { said, ..node }
}

fn fresh(name: &str) -> ProfileNode {
    ProfileNode { name: name.to_owned(), ..ProfileNode::default() }
}

fn found(nodes: Vec<ProfileNode>, products: &[&str]) -> Found {
    Found {
        source: Source::Windows(Vec::new()),
        clusters: vec![Selecting { cluster: "n/c".to_owned(), ahead: 0 }],
        nodes,
        products: products.iter().map(|product| (*product).to_owned()).collect::<BTreeSet<String>>(),
    }
}

/// What is said of these nodes, when it goes on so.
fn said(found: &Found, pace: Pace) -> (SlackProfileStatus, Vec<Finding>) {
    let revision = Revision { digest: NEW.to_owned(), text: "{}".to_owned() };
    let wave = Wave { nodes: BTreeMap::new(), pace };
    of(&Seen {
        profile: &profile(),
        found,
        refused: None,
        revision: Ok(&revision),
        wave: &wave,
        soaking_since: None,
    })
}

fn condition(findings: &[Finding], kind: Type) -> (ConditionStatus, Reason, String) {
    let found = findings.iter().find(|found| found.kind == kind).expect("all are said");
    (found.status, found.reason, found.message.clone())
}

#[test]
fn nodes_are_counted_by_what_they_say_of_the_present_revision() {
    let nodes = vec![measures("n1", 4, 20), measures("n2", 9, 30), refuses("n3"), fresh("n4")];
    let (status, _) = said(&found(nodes, &[GPU]), Pace::Moving);
    assert_eq!(status.nodes, Some(ProfileNodes { target: 4, applied: 2, failed: 1 }));
    let measured = Measured { prediction_error_p50_percent: 9, prediction_error_p99_percent: 30 };
    assert_eq!((status.measured, status.revision), (Some(measured), 7));
    assert_eq!(said(&found(vec![works("n1")], &[GPU]), Pace::Given).0.measured, None);
}

#[test]
fn another_digest_is_another_revision_and_an_invalid_profile_keeps_the_one_before() {
    let (found, wave) =
        (found(vec![works("n1")], &[GPU]), Wave { nodes: BTreeMap::new(), pace: Pace::Still });
    let other = Revision { digest: "other".to_owned(), text: "{}".to_owned() };
    let refusal = Refusal::new(Reason::ProfileInvalid, "windows[0]: no");
    let profile = profile();
    let of = |revision| {
        let seen = Seen {
            profile: &profile,
            found: &found,
            refused: None,
            revision,
            wave: &wave,
            soaking_since: None,
        };
        super::of(&seen)
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
    assert_eq!(condition(&findings, Type::Active).0, ConditionStatus::True, "the node works on");
}

#[test]
fn every_way_of_going_on_is_a_reason_with_words_on_what_to_do() {
    use ConditionStatus::{False, True};
    let stopped = |node: &str, stage| Pace::Stopped { node: node.to_owned(), stage };
    let here = |nodes| found(nodes, &[GPU]);
    let silent = ProfileNode { silent: true, ..fresh("n2") };
    let left = ProfileNode { left: true, ..fresh("n2") };
    let exhausted = Pace::Exhausted { node: "n1".to_owned(), stage: Stage::Refused };
    let soaking = Pace::Soaking(Duration::from_secs(3));
    for (found, pace, status, reason, words) in [
        (here(vec![works("n1"), works("n2")]), Pace::Given, True, Reason::AsDesired, "all 2 nodes"),
        (here(vec![works("n1"), fresh("n2")]), Pace::Moving, False, Reason::Progressing, "1 of 2 nodes"),
        (
            here(vec![works("n1"), refuses("n2")]),
            Pace::Given,
            False,
            Reason::Refused,
            "n2 refuses it: it is odd",
        ),
        (here(vec![works("n1"), silent]), Pace::Moving, False, Reason::NotReported, "for a minute: n2"),
        (here(vec![works("n1"), left]), Pace::Moving, False, Reason::Paused, "n2 are left as they are"),
        (here(vec![works("n1"), fresh("n2")]), Pace::NoCanary, False, Reason::NoNodes, "label a node"),
        (here(vec![works("n1"), fresh("n2")]), soaking, False, Reason::Progressing, "status.soakingSince"),
        (
            here(vec![works("n1"), fresh("n2")]),
            Pace::CanarySilent("n1".to_owned()),
            False,
            Reason::NotReported,
            "canary node n1",
        ),
        (
            here(vec![measures("n1", 9, 90), fresh("n2")]),
            stopped("n1", Stage::Drifted),
            False,
            Reason::MeasuredDifference,
            "canary node n1 drifts from revision 7: an error of 90 %. The other nodes keep",
        ),
        (
            here(vec![refuses("n1"), fresh("n2")]),
            stopped("n1", Stage::Refused),
            False,
            Reason::Refused,
            "canary node n1 refuses revision 7: it is odd",
        ),
        (here(vec![refuses("n1"), fresh("n2")]), exhausted, False, Reason::Refused, "1 of 2 nodes refuse"),
        (found(Vec::new(), &[]), Pace::Still, False, Reason::NoNodes, "has said that it has a GPU"),
        (
            found(Vec::new(), &["NVIDIA L4"]),
            Pace::Still,
            False,
            Reason::WrongGpu,
            "no node of n/c has the GPU 'NVIDIA H200', but they have 'NVIDIA L4'",
        ),
    ] {
        let (_, findings) = said(&found, pace.clone());
        let (is, why, message) = condition(&findings, Type::Distributed);
        assert_eq!((is, why), (status, reason), "{pace:?}: {message}");
        assert!(message.contains(words), "{message}");
        assert!(message.chars().count() < 600, "{message}");
    }
}

#[test]
fn nodes_work_by_a_profile_when_all_of_them_do_by_any_revision() {
    use ConditionStatus::{False, True};
    let older = ProfileNode {
        wanted: Some("old".to_owned()),
        said: Some(Said { digest: "old".to_owned(), ..Said::default() }),
        ..works("n2")
    };
    for (nodes, expected) in [
        (vec![works("n1"), older], (True, Reason::AsDesired)),
        (vec![works("n1"), fresh("n2")], (False, Reason::Progressing)),
        (vec![works("n1"), refuses("n2")], (False, Reason::Refused)),
    ] {
        let (_, findings) = said(&found(nodes, &[GPU]), Pace::Moving);
        let (status, reason, message) = condition(&findings, Type::Active);
        assert_eq!((status, reason), expected);
        assert!(message.contains("nothing on the data path uses it"), "{message}");
    }
    let (_, findings) = said(&found(Vec::new(), &["NVIDIA L4"]), Pace::Still);
    assert_eq!(condition(&findings, Type::Active).1, Reason::WrongGpu);
}

#[test]
fn a_profile_has_drifted_when_one_node_says_so_and_nobody_knows_before_one_has_measured() {
    use ConditionStatus::{False, True, Unknown};
    for (nodes, status, words) in [
        (vec![works("n1")], Unknown, "no node has measured"),
        (vec![works("n1"), measures("n2", 4, 30)], False, "than 30"),
        (vec![measures("n1", 4, 30), measures("n2", 4, 31)], True, "n2: an error of 31 %"),
    ] {
        let (_, findings) = said(&found(nodes, &[GPU]), Pace::Given);
        let (is, _, message) = condition(&findings, Type::Drifted);
        assert_eq!(is, status);
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn nodes_that_have_no_place_for_a_profile_are_not_said_to_have_it() {
    let crowded = |name| ProfileNode { crowded: true, wanted: None, ..works(name) };
    let found = found(vec![works("n1"), crowded("n2"), crowded("n3")], &[GPU]);
    let refusal = Refusal::new(Reason::Conflict, "16 others");
    let revision = Revision { digest: NEW.to_owned(), text: "{}".to_owned() };
    let wave = Wave { nodes: BTreeMap::new(), pace: Pace::Still };
    let (status, findings) = of(&Seen {
        profile: &profile(),
        found: &found,
        refused: Some(&refusal),
        revision: Ok(&revision),
        wave: &wave,
        soaking_since: None,
    });
    assert_eq!(status.nodes, Some(ProfileNodes { target: 3, applied: 1, failed: 0 }));
    let (is, reason, message) = condition(&findings, Type::Distributed);
    assert_eq!((is, reason), (ConditionStatus::False, Reason::Conflict));
    assert!(message.contains("1 of 3 nodes keep the revision that they have; 2 do not have it"), "{message}");
    assert!(message.contains("n2, n3. Narrow slackProfiles"), "{message}");
    let (is, reason, message) = condition(&findings, Type::Active);
    assert_eq!((is, reason), (ConditionStatus::False, Reason::Conflict));
    assert!(message.contains("1 of 3 nodes"), "{message}");
}
