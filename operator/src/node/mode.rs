//! Tells the control plane what a node is for, as its `CacheNode` says.
//!
//! In a Kubernetes cluster modes are the resources' (pools' `spec.mode`, `kubectl drain`): what somebody sets at the control plane itself is set
//! back, and said. The condition `ModeApplied` is the one part of a `CacheNode`'s status that is not the agent's. It says on which mode the control
//! plane agreed last, so that a difference later is somebody else's doing, whoever asks and after any restart.
//!
//! A control plane that is away is said once something is to be told: a node that is active, which is what every node is at first, waits in
//! silence.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use kube::{Resource, ResourceExt};
use reprise_crds::CacheNode;
use reprise_crds::fields::NodeMode;
use reprise_crds::status::{Change, Condition, ConditionStatus, ConditionType, Finding, Reason, find, set};
use serde_json::json;

use super::dereference::{ClusterState, NodeCluster};
use crate::clock;
use crate::context::Context;
use crate::control_plane::{LOOK_AGAIN, LOOK_SOON, Look, Unmet};
use crate::error::OperatorError;
use crate::metrics::Write;
use crate::names::ClusterNames;
use crate::status::{apply, tell as tell_event};

/// HTTP's code for what is not there.
const NOT_FOUND: u16 = 404;

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing, and nothing new is to be said.
    Nothing,
    /// This is to be said.
    Say(Finding),
    /// The control plane is to be told.
    Set,
}

/// Makes the control plane have the mode of a node's `CacheNode`, and says whether it has. When to look again, if not at a change.
///
/// # Errors
/// The API server did not take what is said.
pub async fn tell(
    node: &Node,
    own: &NodeCluster,
    live: &CacheNode,
    context: &Context,
) -> Result<Option<Duration>, OperatorError> {
    if own.state == ClusterState::Left || live.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let (name, names) = (node.name_any(), ClusterNames::of(&own.cluster));
    let said = Said::of(live);
    let look = context.control_planes.look(&names, &context.metrics).await;
    let mut step = step(&said, &look, &name);
    if step == Step::Set {
        let mode = live.spec.mode;
        let planes = &context.control_planes;
        let before = planes.set_mode(&names, &name, mode, &context.metrics).await;
        if before.is_ok() {
            tracing::info!(node = name, mode = mode.as_str(), "the control plane is told the mode of a node");
        }
        step = after(&said, before);
    }
    let next = match &step {
        Step::Say(finding) if finding.status == ConditionStatus::True => LOOK_AGAIN,
        Step::Nothing if said.agreed => LOOK_AGAIN,
        _ => LOOK_SOON,
    };
    if let Step::Say(finding) = step {
        say(live, &finding, context).await?;
    }
    Ok(Some(next))
}

/// What a `CacheNode` wants, and what was said of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    mode: NodeMode,
    /// Whether the control plane had this mode, as far as anybody knows.
    agreed: bool,
    /// Whether the condition speaks of this generation.
    current: bool,
    /// What was said last.
    last: Last,
}

/// What a condition says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    /// There is none.
    Nothing,
    /// The control plane has the mode, perhaps that of an older generation.
    Told,
    /// It has not.
    Untold,
}

impl Said {
    fn of(live: &CacheNode) -> Said {
        let conditions = conditions(live);
        let generation = live.metadata.generation.unwrap_or_default();
        let last = find(conditions, ConditionType::ModeApplied);
        Said {
            mode: live.spec.mode,
            agreed: last.is_some_and(|last| {
                last.status == ConditionStatus::True
                    && (last.observed_generation >= generation
                        || last.message == agrees(live.spec.mode).message)
            }),
            current: last.is_some_and(|last| last.observed_generation >= generation),
            last: match last {
                None => Last::Nothing,
                Some(last) if last.status == ConditionStatus::True => Last::Told,
                Some(_) => Last::Untold,
            },
        }
    }

    /// Nothing was ever said, and what every node is at first is wanted.
    fn is_new(&self) -> bool {
        self.mode == NodeMode::Active && self.last == Last::Nothing
    }
}

fn conditions(live: &CacheNode) -> &[Condition] {
    live.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default()
}

fn step(said: &Said, look: &Look, node: &str) -> Step {
    let mode = said.mode;
    match look {
        // What it had of this generation it has still, as far as anybody knows.
        Err(_) if said.agreed || said.is_new() => Step::Nothing,
        Err(words) => unreachable(mode, words),
        Ok(known) => match known.modes.get(node) {
            None if said.agreed || said.is_new() => Step::Nothing,
            None => unregistered(mode),
            Some(has) if *has != mode => Step::Set,
            Some(_) if said.agreed && said.current => Step::Nothing,
            Some(_) => Step::Say(agrees(mode)),
        },
    }
}

/// What to say after the control plane was told.
fn after(said: &Said, before: Result<NodeMode, Unmet>) -> Step {
    let mode = said.mode;
    match before {
        // A member that did not know yet was looked at.
        Ok(before) if before == mode && said.agreed => Step::Nothing,
        Ok(before) if before != mode && said.agreed => {
            let message = format!(
                "somebody had set the node to {before} at the control plane; it is {mode} again: in Kubernetes modes are set by spec.mode \
                 of a pool, or by kubectl drain"
            );
            Step::Say(Finding::yes(ConditionType::ModeApplied, Reason::SetBack, message))
        }
        Ok(_) => Step::Say(agrees(mode)),
        Err(Unmet::Unknown(_)) => unregistered(mode),
        Err(Unmet::Absent(words) | Unmet::Refused(words)) => unreachable(mode, &words),
    }
}

fn agrees(mode: NodeMode) -> Finding {
    let message = format!("the control plane has the node as {mode}");
    Finding::yes(ConditionType::ModeApplied, Reason::AsDesired, message)
}

fn unreachable(mode: NodeMode, words: &str) -> Step {
    let message =
        format!("the control plane could not be told that the node is {mode}, and is tried again: {words}");
    Step::Say(Finding::no(ConditionType::ModeApplied, Reason::ControlPlaneUnreachable, message))
}

fn unregistered(mode: NodeMode) -> Step {
    let message = format!(
        "the node has not registered with the control plane, which is told that it is {mode} when it has"
    );
    Step::Say(Finding::no(ConditionType::ModeApplied, Reason::NotReported, message))
}

/// Writes the condition, and tells of it where somebody may want to act.
async fn say(live: &CacheNode, finding: &Finding, context: &Context) -> Result<(), OperatorError> {
    let generation = live.metadata.generation.unwrap_or_default();
    let ours = |condition: &&Condition| condition.kind == finding.kind.as_str();
    let mut conditions: Vec<Condition> = conditions(live).iter().filter(ours).cloned().collect();
    let was = conditions.first().map(|condition| (condition.status, condition.reason.clone()));
    if set(&mut conditions, finding, generation, &clock::now()) == Change::None {
        // As for other statuses: an older write of this process may not have come back yet.
        context.triggers.own.expect(live.metadata.uid.as_ref(), &conditions.first());
        // Once more, which the condition cannot show.
        if finding.reason == Reason::SetBack {
            tell_event(context, live, finding).await;
        }
        return Ok(());
    }
    let name = live.name_any();
    let body = json!({
        "apiVersion": CacheNode::api_version(&()),
        "kind": CacheNode::kind(&()),
        "metadata": { "name": name },
        "status": { "conditions": conditions },
    });
    let api: Api<CacheNode> = Api::all(context.client.clone());
    context.triggers.own.expect(live.metadata.uid.as_ref(), &conditions.first());
    match apply(context, live, &api, &body).await {
        // Contested, it is said when its turn comes: the control plane is asked again before.
        Ok(Some(_)) => return Ok(()),
        Ok(None) => {}
        // Deleted meanwhile.
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(()),
        Err(error) => {
            return Err(OperatorError::api(format!("write ModeApplied of CacheNode {name}"))(error));
        }
    }
    context.metrics.wrote("CacheNode", Write::Status);
    let is_news = match was {
        None => finding.reason != Reason::AsDesired,
        Some((status, reason)) => status != finding.status || reason != finding.reason.as_str(),
    };
    if is_news {
        tell_event(context, live, finding).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::control_plane::Known;

    const NEW: Said = Said { mode: NodeMode::Active, agreed: false, current: false, last: Last::Nothing };

    fn look(modes: &[(&str, NodeMode)]) -> Look {
        let modes: BTreeMap<String, NodeMode> =
            modes.iter().map(|(node, mode)| ((*node).to_owned(), *mode)).collect();
        Ok(Arc::new(Known { modes, ..Known::default() }))
    }

    fn reason(step: &Step) -> Option<(ConditionStatus, Reason)> {
        match step {
            Step::Say(finding) => Some((finding.status, finding.reason)),
            Step::Nothing | Step::Set => None,
        }
    }

    #[test]
    fn a_control_plane_is_told_when_it_says_something_else_and_only_then() {
        use NodeMode::{Active, Cordoned, Draining};
        let drains = Said { mode: Draining, ..NEW };
        let agreed = Said { agreed: true, current: true, last: Last::Told, ..drains };
        for (said, has, wanted) in [
            (NEW, Active, Step::Say(agrees(Active))),
            (NEW, Cordoned, Step::Set),
            (drains, Active, Step::Set),
            (drains, Draining, Step::Say(agrees(Draining))),
            (agreed, Draining, Step::Nothing),
            (agreed, Active, Step::Set),
            // Something else of the spec has changed.
            (Said { current: false, ..agreed }, Draining, Step::Say(agrees(Draining))),
        ] {
            assert_eq!(step(&said, &look(&[("n1", has), ("n2", Cordoned)]), "n1"), wanted, "{said:?} {has}");
        }
    }

    #[test]
    fn what_cannot_be_told_is_said_once_there_is_something_to_tell() {
        let away: Look = Err("nobody listens".to_owned());
        let drains = Said { mode: NodeMode::Draining, ..NEW };
        assert_eq!(step(&NEW, &away, "n1"), Step::Nothing);
        assert_eq!(step(&NEW, &look(&[]), "n1"), Step::Nothing);
        assert_eq!(
            step(&Said { agreed: true, current: true, last: Last::Told, ..drains }, &away, "n1"),
            Step::Nothing
        );
        let untold = step(&drains, &away, "n1");
        assert_eq!(reason(&untold), Some((ConditionStatus::False, Reason::ControlPlaneUnreachable)));
        assert!(matches!(&untold, Step::Say(finding) if finding.message.contains("nobody listens")));
        let unknown = step(&drains, &look(&[]), "n1");
        assert_eq!(reason(&unknown), Some((ConditionStatus::False, Reason::NotReported)));
        // A node that was to be drained and is active again has something to be told as well.
        let back = Said { last: Last::Untold, ..NEW };
        assert_eq!(
            reason(&step(&back, &away, "n1")),
            Some((ConditionStatus::False, Reason::ControlPlaneUnreachable))
        );
    }

    #[test]
    fn what_somebody_else_had_set_is_set_back_and_said() {
        let agreed = Said { agreed: true, current: true, last: Last::Told, ..NEW };
        let back = after(&agreed, Ok(NodeMode::Draining));
        assert_eq!(reason(&back), Some((ConditionStatus::True, Reason::SetBack)));
        assert!(matches!(&back, Step::Say(finding) if finding.message.contains("kubectl drain")));
        assert_eq!(after(&agreed, Ok(NodeMode::Active)), Step::Nothing);
        let first = after(&NEW, Ok(NodeMode::Draining));
        assert_eq!(reason(&first), Some((ConditionStatus::True, Reason::AsDesired)));
        let unknown = after(&NEW, Err(Unmet::Unknown("no node".to_owned())));
        assert_eq!(reason(&unknown), Some((ConditionStatus::False, Reason::NotReported)));
    }
}
