//! Conditions of profiles for nodes at various stages.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_crds::status::ConditionStatus::{False, True};
use serde_json::json;

use super::super::build::tests::{NEW, nodes};
use super::super::content::Revision;
use super::*;

const GPU: &str = "NVIDIA H200";

/// Condition `Distributed` for these nodes, GPU product and obstacle of the rollout.
fn distributed_to(words: &str, obstacle: Option<&Obstacle>) -> Finding {
    let spec = json!({ "subject": { "model": "m", "gpuProduct": GPU, "engineVersion": "e" } });
    let mut profile = SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"));
    profile.status =
        Some(SlackProfileStatus { digest: Some(Digest::new(NEW)), revision: 7, ..Default::default() });
    let found = ProfileInputs {
        revision: Ok(Revision { digest: NEW.to_owned(), text: "{}".to_owned() }),
        clusters: vec!["n/c".to_owned()],
        full: None,
        nodes: nodes(words),
        products: BTreeSet::from([GPU.to_owned()]),
    };
    let (_, findings) = compute(&profile, &found, None, obstacle, None);
    findings.into_iter().find(|found| found.kind == Type::Distributed).expect("the condition")
}

#[test]
fn each_obstacle_of_a_rollout_has_a_reason_and_a_remedy() {
    use Obstacle::{CanarySilent, NoCanary, Soaking};
    for (nodes, obstacle, status, reason, words) in [
        ("n1 applied; n2 drifted", None, True, Reason::AsDesired, "all 2 nodes"),
        ("n1 applied; n2 fresh", None, False, Reason::Progressing, "1 of 2 nodes"),
        ("n1 applied; n2 refused", None, False, Reason::Refused, "n2 refuses it: it is odd. It counts"),
        ("n1 drifted; n2 fresh", None, False, Reason::MeasuredDifference, "n1 drifts from it"),
        ("n1 applied; n2 fresh silent", None, False, Reason::NotReported, "a minute: n2"),
        ("n1 applied; n2 fresh frozen", None, False, Reason::Paused, "n2 cannot be changed"),
        ("n1 applied; n2 fresh", Some(NoCanary), False, Reason::NoNodes, "label a node"),
        ("n1 applied", Some(Soaking(Duration::ZERO)), False, Reason::Progressing, "soakingSince"),
        ("n1 applied", Some(CanarySilent("n1".to_owned())), False, Reason::NotReported, "node n1"),
    ] {
        let found = distributed_to(nodes, obstacle.as_ref());
        assert_eq!((found.status, found.reason), (status, reason), "{found:?}");
        assert!(found.message.contains(words) && found.message.chars().count() < 600, "{found:?}");
    }
}
