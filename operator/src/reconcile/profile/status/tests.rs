//! Conditions of profiles for nodes at various stages.

use std::time::Duration;

use reprise_crds::status::ConditionStatus::{False, True, Unknown};
use serde_json::json;

use super::super::build::tests::{NEW, nodes};
use super::super::content::Revision;
use super::*;

const GPU: &str = "NVIDIA H200";

/// A condition for these nodes, GPU product and obstacle of the rollout.
fn condition(words: &str, product: &str, obstacle: Option<&Obstacle>, kind: Type) -> Finding {
    let spec = json!({ "subject": { "model": "m", "gpuProduct": GPU, "engineVersion": "e" } });
    let mut profile = SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"));
    profile.status =
        Some(SlackProfileStatus { digest: Some(Digest::new(NEW)), revision: 7, ..Default::default() });
    let found = ProfileInputs {
        revision: Ok(Revision { digest: NEW.to_owned(), text: "{}".to_owned() }),
        clusters: vec!["n/c".to_owned()],
        full: None,
        nodes: nodes(words),
        products: Some(product.to_owned()).filter(|product| !product.is_empty()).into_iter().collect(),
    };
    let inputs =
        StatusInputs { profile: &profile, found: &found, refused: None, obstacle, soaking_since: None };
    let (_, findings) = compute(&inputs);
    findings.into_iter().find(|found| found.kind == kind).expect("the condition")
}

#[test]
fn each_obstacle_of_a_rollout_has_a_reason_and_a_remedy() {
    use Obstacle::{CanarySilent, NoCanary, Soaking};
    let stopped = |stage| Obstacle::CanaryFailed { node: "n1".to_owned(), stage };
    let of_canary = "canary node n1 drifts from revision 7: an error of 31 %. The other nodes keep";
    let other_gpu = "no node of n/c has the GPU 'NVIDIA H200', but they have 'NVIDIA L4'";
    for (nodes, product, obstacle, status, reason, words) in [
        ("n1 applied; n2 drifted", GPU, None, True, Reason::AsDesired, "all 2 nodes"),
        ("n1 applied; n2 fresh", GPU, None, False, Reason::Progressing, "1 of 2 nodes"),
        ("n1 applied; n2 refused", GPU, None, False, Reason::Refused, "n2 refuses it: it is odd. It counts"),
        ("n1 drifted; n2 fresh", GPU, None, False, Reason::MeasuredDifference, "n1 drifts from it"),
        ("n1 applied; n2 fresh silent", GPU, None, False, Reason::NotReported, "a minute: n2"),
        ("n1 applied; n2 fresh frozen", GPU, None, False, Reason::Paused, "n2 cannot be changed"),
        ("n1 applied; n2 fresh", GPU, Some(NoCanary), False, Reason::NoNodes, "label a node"),
        ("n1 applied", GPU, Some(Soaking(Duration::ZERO)), False, Reason::Progressing, "soakingSince"),
        ("n1 applied", GPU, Some(CanarySilent("n1".to_owned())), False, Reason::NotReported, "node n1"),
        (
            "n1 drifted; n2 fresh",
            GPU,
            Some(stopped(RolloutStage::Drifted)),
            False,
            Reason::MeasuredDifference,
            of_canary,
        ),
        ("", "", None, False, Reason::NoNodes, "has reported a GPU"),
        ("", "NVIDIA L4", None, False, Reason::WrongGpu, other_gpu),
    ] {
        let found = condition(nodes, product, obstacle.as_ref(), Type::Distributed);
        assert_eq!((found.status, found.reason), (status, reason), "{found:?}");
        assert!(found.message.contains(words) && found.message.chars().count() < 600, "{found:?}");
    }
}

#[test]
fn reports_use_and_drift_from_the_reports_of_nodes() {
    for (nodes, kind, status, words) in [
        ("n1 applied; n2 waiting", Type::Active, True, "2 of 2 nodes have applied a revision"),
        ("n1 applied; n2 fresh", Type::Active, False, "1 of 2 nodes have applied a revision"),
        ("n1 applied; n2 refused", Type::Active, False, "no effect on the agents' own I/O"),
        ("n1 applied", Type::Drifted, Unknown, "no node has measured"),
        ("n1 applied; n2 measured", Type::Drifted, False, "than 30"),
        ("n1 measured; n2 drifted", Type::Drifted, True, "n2: an error of 31 %"),
    ] {
        let found = condition(nodes, GPU, None, kind);
        assert_eq!(found.status, status, "{nodes}: {found:?}");
        assert!(found.message.contains(words), "{found:?}");
    }
}
