//! Conditions of profiles for nodes at various stages.

use std::time::Duration;

use reprise_crds::status::ConditionStatus::{self, False, True, Unknown};
use serde_json::json;

use super::super::build::tests::{NEW, nodes};
use super::super::content::Revision;
use super::super::dereference::SelectingCluster;
use super::*;

const GPU: &str = "NVIDIA H200";

/// A condition for these nodes, GPU products and this state of the rollout.
fn condition(words: &str, products: &[&str], state: &RolloutState, kind: Type) -> Finding {
    let spec = json!({ "subject": { "model": "m", "gpuProduct": GPU, "engineVersion": "e" } });
    let mut profile = SlackProfile::new("p", serde_json::from_value(spec).expect("a spec"));
    profile.status =
        Some(SlackProfileStatus { digest: Some(Digest::new(NEW)), revision: 7, ..Default::default() });
    let found = ProfileInputs {
        revision: Ok(Revision { digest: NEW.to_owned(), text: "{}".to_owned() }),
        clusters: vec![SelectingCluster { cluster: "n/c".to_owned(), ahead: 0 }],
        nodes: nodes(words),
        products: products.iter().map(|product| (*product).to_owned()).collect(),
    };
    let inputs = StatusInputs { profile: &profile, found: &found, refused: None, state, soaking_since: None };
    let (_, findings) = compute(&inputs);
    findings.into_iter().find(|found| found.kind == kind).expect("the condition")
}

#[test]
fn each_rollout_state_has_a_reason_and_a_remedy() {
    use RolloutState::{CanarySilent, Complete, Idle, NoCanary, Progressing, Soaking};
    let (drifted, refused) = (RolloutStage::Drifted, RolloutStage::Refused);
    let n1 = || "n1".to_owned();
    let stopped = |stage| RolloutState::CanaryFailed { node: n1(), stage };
    let exhausted = |stage| RolloutState::LimitReached { node: n1(), stage };
    let of_canary = "canary node n1 drifts from revision 7: an error of 31 %. The other nodes keep";
    let other_gpu = "no node of n/c has the GPU 'NVIDIA H200', but they have 'NVIDIA L4'";
    for (nodes, products, state, status, reason, words) in [
        ("n1 applied; n2 applied", GPU, Complete, True, Reason::AsDesired, "all 2 nodes"),
        ("n1 applied; n2 fresh", GPU, Progressing, False, Reason::Progressing, "1 of 2 nodes"),
        ("n1 applied; n2 refused", GPU, Complete, False, Reason::Refused, "n2 refuses it: it is odd"),
        ("n1 applied; n2 fresh silent", GPU, Progressing, False, Reason::NotReported, "a minute: n2"),
        ("n1 applied; n2 fresh frozen", GPU, Progressing, False, Reason::Paused, "n2 cannot be changed"),
        ("n1 applied; n2 fresh", GPU, NoCanary, False, Reason::NoNodes, "label a node"),
        ("n1 applied", GPU, Soaking(Duration::ZERO), False, Reason::Progressing, "soakingSince"),
        ("n1 applied; n2 fresh", GPU, CanarySilent(n1()), False, Reason::NotReported, "canary node n1"),
        ("n1 drifted; n2 fresh", GPU, stopped(drifted), False, Reason::MeasuredDifference, of_canary),
        ("n1 refused; n2 fresh", GPU, stopped(refused), False, Reason::Refused, "n1 refuses revision 7"),
        ("n1 refused; n2 fresh", GPU, exhausted(refused), False, Reason::Refused, "1 of 2 nodes refuse"),
        ("", "", Idle, False, Reason::NoNodes, "has reported a GPU"),
        ("", "NVIDIA L4", Idle, False, Reason::WrongGpu, other_gpu),
    ] {
        let products: Vec<&str> =
            Some(products).filter(|products| !products.is_empty()).into_iter().collect();
        let Finding { status: is, reason: why, message, .. } =
            condition(nodes, &products, &state, Type::Distributed);
        assert_eq!((is, why), (status, reason), "{state:?}: {message}");
        assert!(message.contains(words) && message.chars().count() < 600, "{message}");
    }
}

#[test]
fn reports_use_and_drift_from_the_reports_of_nodes() {
    let cases: [(&str, Type, ConditionStatus, &str); 6] = [
        ("n1 applied; n2 waiting", Type::Active, True, "2 of 2 nodes have applied a revision"),
        ("n1 applied; n2 fresh", Type::Active, False, "1 of 2 nodes have applied a revision"),
        ("n1 applied; n2 refused", Type::Active, False, "no effect on the agents' own I/O"),
        ("n1 applied", Type::Drifted, Unknown, "no node has measured"),
        ("n1 applied; n2 measured", Type::Drifted, False, "than 30"),
        ("n1 measured; n2 drifted", Type::Drifted, True, "n2: an error of 31 %"),
    ];
    for (nodes, kind, status, words) in cases {
        let found = condition(nodes, &[GPU], &RolloutState::Progressing, kind);
        assert_eq!(found.status, status, "{nodes}: {}", found.message);
        assert!(found.message.contains(words), "{}", found.message);
    }
}
