//! Tables of nodes, and which of them are given a revision.

use serde_json::{Value, json};

use super::super::dereference::Said;
use super::*;

const OLD: &str = "old";
const NEW: &str = "new";
const SOAK: Duration = Duration::from_secs(600);

fn profile(rollout: &Value) -> SlackProfile {
    let spec = json!({
        "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" }, "windows": [], "rollout": rollout,
    });
    SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"))
}

/// One percentage for nodes, and no canary.
fn plain(percent: u32) -> Value {
    json!({ "maxUnavailablePercent": percent })
}

fn with_canary() -> Value {
    json!({ "canary": { "nodeSelector": {} } })
}

fn said(digest: &str) -> Option<Said> {
    Some(Said { digest: digest.to_owned(), ..Said::default() })
}

/// A node by words: its name, how far it is, and what is special. A name that begins with `c` is a canary's.
fn node(words: &str) -> ProfileNode {
    let mut words = words.split(' ');
    let name = words.next().expect("a name");
    let stage = words.next().expect("a stage");
    let wanted = |digest: &str| Some(digest.to_owned());
    let (wanted, said) = match stage {
        "fresh" => (None, None),
        "before" => (wanted(OLD), said(OLD)),
        "given" => (wanted(NEW), None),
        "between" => (wanted(NEW), said(OLD)),
        "works" => (wanted(NEW), said(NEW)),
        "refused" => {
            let refused = Some("it is odd".to_owned());
            (wanted(NEW), said(NEW).map(|said| Said { refused, ..said }))
        }
        "drifted" => (wanted(NEW), said(NEW).map(|said| Said { p99: Some(31), ..said })),
        other => panic!("no stage '{other}'"),
    };
    let more: Vec<&str> = words.collect();
    ProfileNode {
        name: name.to_owned(),
        wanted,
        said,
        canary: name.starts_with('c'),
        silent: more.contains(&"silent"),
        left: more.contains(&"left"),
        crowded: more.contains(&"crowded"),
    }
}

fn nodes(words: &str) -> Vec<ProfileNode> {
    words.split("; ").map(node).collect()
}

/// Names of nodes that should have the revision and did not have to before.
fn given(nodes: &[ProfileNode], wave: &Wave) -> Vec<String> {
    let is_news = |node: &&ProfileNode| {
        node.wanted.as_deref() != Some(NEW) && wave.nodes.get(&node.name).is_some_and(|wanted| wanted == NEW)
    };
    nodes.iter().filter(is_news).map(|node| node.name.clone()).collect()
}

fn stopped(node: &str, stage: Stage) -> Pace {
    Pace::Stopped { node: node.to_owned(), stage }
}

fn exhausted_by(node: &str, stage: Stage) -> Pace {
    Pace::Exhausted { node: node.to_owned(), stage }
}

#[test]
fn nodes_are_given_a_revision_so_that_few_are_between_two_and_canaries_come_first() {
    use Pace::{CanarySilent, Given, Moving, NoCanary, Soaking};
    let none = || Some(Duration::ZERO);
    let half = || Some(SOAK / 2);
    let done = || Some(SOAK);
    for (rollout, words, soaked, expected, pace) in [
        // One may always be between two revisions.
        (plain(10), "n1 before; n2 before; n3 before", None, "n1", Moving),
        (plain(10), "n1 fresh; n2 fresh", None, "n1", Moving),
        (plain(10), "n1 between; n2 before", None, "", Moving),
        (plain(10), "n1 given; n2 fresh", None, "", Moving),
        (plain(10), "n1 works; n2 before", None, "n2", Given),
        (plain(10), "n1 works; n2 works", None, "", Given),
        (plain(50), "n1 works; n2 between; n3 before; n4 before", None, "n3", Moving),
        (plain(100), "n1 before; n2 before", None, "n1 n2", Given),
        // Those that take it badly take the places of others.
        (plain(10), "n1 refused; n2 before", None, "", exhausted_by("n1", Stage::Refused)),
        (plain(50), "n1 drifted; n2 before; n3 before; n4 before", None, "n2", Moving),
        (plain(50), "n1 drifted; n2 between; n3 before; n4 before", None, "", Moving),
        (
            plain(50),
            "n1 drifted; n2 refused; n3 before; n4 before",
            None,
            "",
            exhausted_by("n1", Stage::Drifted),
        ),
        // Who does not report, or must not be changed, is passed over; who fell silent with it is not forgotten.
        (plain(10), "n1 before silent; n2 before left; n3 before", None, "n3", Moving),
        (plain(10), "n1 between silent; n2 before", None, "", Moving),
        (plain(10), "n1 fresh crowded; n2 before", None, "n2", Moving),
        // Canaries.
        (with_canary(), "a before; c before; d before", None, "c", Moving),
        (with_canary(), "a before; c between; d before", None, "", Moving),
        (with_canary(), "a before; c1 works; c2 before", None, "c2", Moving),
        (with_canary(), "a before; c works; d before", none(), "", Soaking(SOAK)),
        (with_canary(), "a before; c works; d before", half(), "", Soaking(SOAK / 2)),
        (with_canary(), "a before; c works; d before", done(), "a", Moving),
        (with_canary(), "a before; c works", done(), "a", Given),
        (with_canary(), "a before; c works silent", done(), "", CanarySilent("c".to_owned())),
        (with_canary(), "a before; d before", None, "", NoCanary),
        (with_canary(), "a before; c1 before; c2 refused", None, "", stopped("c2", Stage::Refused)),
        (with_canary(), "a before; c drifted", done(), "", stopped("c", Stage::Drifted)),
        (with_canary(), "a works; c drifted; d before", done(), "", stopped("c", Stage::Drifted)),
        (with_canary(), "a refused; c works; d before", done(), "", exhausted_by("a", Stage::Refused)),
        (with_canary(), "a works; c works", none(), "", Given),
    ] {
        let nodes = nodes(words);
        let wave = build(&profile(&rollout), &nodes, Some(NEW), soaked);
        assert_eq!(given(&nodes, &wave).join(" "), expected, "{rollout} {words:?} {soaked:?}");
        assert_eq!(wave.pace, pace, "{rollout} {words:?} {soaked:?}");
        let expected: Vec<&str> = expected.split(' ').collect();
        for node in &nodes {
            if !expected.contains(&node.name.as_str()) {
                assert_eq!(wave.nodes.get(&node.name), node.wanted.as_ref(), "nothing is taken back");
            }
        }
    }
}

#[test]
fn without_a_revision_or_nodes_everything_stays() {
    let there = nodes("n1 before; n2 fresh; n3 works");
    let wave = build(&profile(&plain(100)), &there, None, None);
    assert_eq!(wave.pace, Pace::Still);
    let kept: Vec<(&str, &str)> =
        wave.nodes.iter().map(|(node, digest)| (node.as_str(), digest.as_str())).collect();
    assert_eq!(kept, [("n1", OLD), ("n3", NEW)]);
    assert_eq!(build(&profile(&plain(100)), &[], Some(NEW), None).pace, Pace::Still);
}

#[test]
fn every_node_gets_it_in_the_end_and_never_more_than_may_are_between_two() {
    const NODES: usize = 25;
    let mut all: Vec<ProfileNode> = (0..NODES).map(|index| node(&format!("n{index:02} before"))).collect();
    let profile = profile(&plain(10));
    let mut steps = 0;
    loop {
        let wave = build(&profile, &all, Some(NEW), None);
        for node in &mut all {
            node.wanted = wave.nodes.get(&node.name).cloned();
        }
        let busy = all.iter().filter(|node| Stage::of(node, NEW, 30) == Stage::Between).count();
        assert!(busy <= 2, "10 of 100 of {NODES}");
        // One of them answers.
        let Some(answers) = all.iter_mut().rfind(|node| Stage::of(node, NEW, 30) == Stage::Between) else {
            break;
        };
        answers.said = said(NEW);
        steps += 1;
        assert!(steps <= NODES, "it makes progress");
    }
    assert!(all.iter().all(|node| Stage::of(node, NEW, 30) == Stage::Works));
}

#[test]
fn the_soak_begins_when_all_canaries_work_and_again_with_another_revision() {
    let time = |text: &str| -> Time { serde_json::from_value(text.into()).expect("a time") };
    let (early, now) = (time("2026-01-01T00:00:00Z"), time("2026-01-01T00:05:00Z"));
    let soaking = |words: &str, known: Option<&str>| {
        let mut profile = profile(&with_canary());
        profile.status = known.map(|digest| {
            let digest = Some(reprise_crds::fields::Digest::new(digest));
            reprise_crds::SlackProfileStatus {
                digest,
                soaking_since: Some(early.clone()),
                ..Default::default()
            }
        });
        soaking_since(&profile, &nodes(words), Some(NEW), &now)
    };
    assert_eq!(soaking("a before; c works", None), Some(now.clone()));
    assert_eq!(soaking("a before; c works", Some(NEW)), Some(early.clone()));
    assert_eq!(soaking("a before; c works", Some(OLD)), Some(now.clone()));
    for words in ["a works", "c1 works; c2 between", "c drifted", "c refused", "c1 works; c2 works silent"] {
        assert_eq!(soaking(words, Some(NEW)), None, "{words:?}");
    }
}

#[test]
fn a_node_that_has_no_place_for_the_profile_any_more_should_not_have_it() {
    let nodes = nodes("n1 works; n2 works crowded");
    for digest in [Some(NEW), None] {
        let wave = build(&profile(&plain(10)), &nodes, digest, None);
        assert_eq!(wave.nodes.keys().collect::<Vec<_>>(), ["n1"], "{digest:?}");
    }
}
