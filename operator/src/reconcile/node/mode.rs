//! Sets a node's mode at the control plane to that of its `CacheNode`.
//!
//! In Kubernetes, modes come from resources (`spec.mode` of pools, `kubectl drain`). A mode that was set
//! directly at the control plane is reverted, and the reversal is reported. Condition `ModeApplied` is the
//! only part of a `CacheNode`'s status that the agent does not write. It records the mode on which the
//! control plane last agreed. A later difference is therefore a change by another client, after restarts of
//! the operator too.
//!
//! An unreachable control plane is reported only if there is a mode to set: nodes start active, so an active
//! node needs no report.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use kube::{Resource, ResourceExt};
use reprise_crds::fields::NodeMode;
use reprise_crds::status::{Change, Condition, ConditionStatus, ConditionType, Finding, Reason, find, set};
use reprise_crds::{CacheNode, KVCacheCluster};
use serde_json::json;

use crate::framework::clock;
use crate::framework::error::OperatorError;
use crate::framework::metrics::Write;
use crate::framework::status::{apply, publish_event};
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::{CallError, POLL_INTERVAL, RETRY_INTERVAL, StateResult};
use crate::reconcile::membership::is_frozen;
use crate::reconcile::names::ClusterNames;

/// HTTP status code: not found.
const NOT_FOUND: u16 = 404;

/// Next action on a node's mode.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// There is nothing to do.
    Nothing,
    /// Set this condition `ModeApplied`.
    Report(Finding),
    /// Set the mode at the control plane.
    Set,
}

/// Brings the node's mode at the control plane to that of its `CacheNode` and reports the result. Returns the
/// delay until the next check; `None` if only a change requires one.
///
/// # Errors
/// The API server rejected the condition.
pub async fn sync(
    node: &Node,
    cluster: &KVCacheCluster,
    live: &CacheNode,
    context: &Context,
) -> Result<Option<Duration>, OperatorError> {
    if is_frozen(cluster) || live.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let (name, names) = (node.name_any(), ClusterNames::of(cluster));
    let recorded = RecordedMode::of(live);
    let state = context.control_planes.state(&names, &context.metrics).await;
    let mut step = step(&recorded, &state, &name);
    if step == Step::Set {
        let mode = live.spec.mode;
        let control_planes = &context.control_planes;
        let before = control_planes.set_mode(&names, &name, mode, &context.metrics).await;
        if before.is_ok() {
            tracing::info!(node = name, mode = mode.as_str(), "set the mode of a node at the control plane");
        }
        step = after(&recorded, before);
    }
    let next = match &step {
        Step::Report(finding) if finding.status == ConditionStatus::True => POLL_INTERVAL,
        Step::Nothing if recorded.agreed => POLL_INTERVAL,
        _ => RETRY_INTERVAL,
    };
    if let Step::Report(finding) = step {
        report(live, &finding, context).await?;
    }
    Ok(Some(next))
}

/// The desired mode, and the last condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RecordedMode {
    mode: NodeMode,
    /// Whether the condition states that the control plane had this mode.
    agreed: bool,
    /// Whether the condition is of the current generation.
    current: bool,
    /// Result that the last condition reports.
    last: LastReport,
}

/// The result that a condition reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastReport {
    /// There is no condition.
    None,
    /// The control plane had the mode, possibly of an older generation.
    Applied,
    /// The control plane did not have the mode.
    NotApplied,
}

impl RecordedMode {
    fn of(live: &CacheNode) -> RecordedMode {
        let conditions = conditions(live);
        let generation = live.metadata.generation.unwrap_or_default();
        let last = find(conditions, ConditionType::ModeApplied);
        RecordedMode {
            mode: live.spec.mode,
            agreed: last.is_some_and(|last| {
                last.status == ConditionStatus::True
                    && (last.observed_generation >= generation
                        || last.message == agrees(live.spec.mode).message)
            }),
            current: last.is_some_and(|last| last.observed_generation >= generation),
            last: match last {
                None => LastReport::None,
                Some(last) if last.status == ConditionStatus::True => LastReport::Applied,
                Some(_) => LastReport::NotApplied,
            },
        }
    }

    /// Whether the default mode is desired and there is no condition.
    fn is_new(&self) -> bool {
        self.mode == NodeMode::Active && self.last == LastReport::None
    }
}

fn conditions(live: &CacheNode) -> &[Condition] {
    live.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default()
}

fn step(recorded: &RecordedMode, state: &StateResult, node: &str) -> Step {
    let mode = recorded.mode;
    match state {
        // Without contrary information, the control plane still has the recorded mode.
        Err(_) if recorded.agreed || recorded.is_new() => Step::Nothing,
        Err(error) => unreachable(mode, error),
        Ok(state) => match state.modes.get(node) {
            None if recorded.agreed || recorded.is_new() => Step::Nothing,
            None => unregistered(mode),
            Some(has) if *has != mode => Step::Set,
            Some(_) if recorded.agreed && recorded.current => Step::Nothing,
            Some(_) => Step::Report(agrees(mode)),
        },
    }
}

/// Returns the action after a request to the control plane; `before` is the mode that it replaced.
fn after(recorded: &RecordedMode, before: Result<NodeMode, CallError>) -> Step {
    let mode = recorded.mode;
    match before {
        // The cached state came from a member that lagged behind.
        Ok(before) if before == mode && recorded.agreed => Step::Nothing,
        Ok(before) if before != mode && recorded.agreed => {
            let message = format!(
                "another client had set the node to {before} at the control plane; it is {mode} again: in Kubernetes, set modes \
                 with spec.mode of a pool or with kubectl drain"
            );
            Step::Report(Finding::yes(ConditionType::ModeApplied, Reason::SetBack, message))
        }
        Ok(_) => Step::Report(agrees(mode)),
        Err(CallError::NotFound(_)) => unregistered(mode),
        Err(CallError::Unavailable(error) | CallError::Rejected(error)) => unreachable(mode, &error),
    }
}

fn agrees(mode: NodeMode) -> Finding {
    let message = format!("the mode of the node at the control plane is {mode}");
    Finding::yes(ConditionType::ModeApplied, Reason::AsDesired, message)
}

fn unreachable(mode: NodeMode, error: &str) -> Step {
    let message = format!("cannot set the node to {mode} at the control plane; retrying: {error}");
    Step::Report(Finding::no(ConditionType::ModeApplied, Reason::ControlPlaneUnreachable, message))
}

fn unregistered(mode: NodeMode) -> Step {
    let message =
        format!("the node has not registered with the control plane: its mode is set to {mode} once it has");
    Step::Report(Finding::no(ConditionType::ModeApplied, Reason::NotReported, message))
}

/// Writes the condition, and publishes an event if users may want to act.
async fn report(live: &CacheNode, finding: &Finding, context: &Context) -> Result<(), OperatorError> {
    let generation = live.metadata.generation.unwrap_or_default();
    let ours = |condition: &&Condition| condition.kind == finding.kind.as_str();
    let mut conditions: Vec<Condition> = conditions(live).iter().filter(ours).cloned().collect();
    let was = conditions.first().map(|condition| (condition.status, condition.reason.clone()));
    if set(&mut conditions, finding, generation, &clock::now()) == Change::None {
        // An older write of this process may not have reached the store yet.
        context.own_writes.record(live.metadata.uid.as_ref(), &conditions.first());
        // The condition does not change if the mode is reverted repeatedly.
        if finding.reason == Reason::SetBack {
            publish_event(context, live, finding).await;
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
    context.own_writes.record(live.metadata.uid.as_ref(), &conditions.first());
    match apply(context, live, &api, &body).await {
        // Paced: written later, after the next check of the control plane.
        Ok(Some(_)) => return Ok(()),
        Ok(None) => {}
        // The object was deleted concurrently.
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(()),
        Err(error) => {
            return Err(OperatorError::api(format!("write ModeApplied of CacheNode {name}"))(error));
        }
    }
    context.metrics.record_write("CacheNode", Write::Status);
    let is_new = match was {
        None => finding.reason != Reason::AsDesired,
        Some((status, reason)) => status != finding.status || reason != finding.reason.as_str(),
    };
    if is_new {
        publish_event(context, live, finding).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::reconcile::control_plane::ControlPlaneState;

    const NEW: RecordedMode =
        RecordedMode { mode: NodeMode::Active, agreed: false, current: false, last: LastReport::None };

    fn state_of(modes: &[(&str, NodeMode)]) -> StateResult {
        let modes: BTreeMap<String, NodeMode> =
            modes.iter().map(|(node, mode)| ((*node).to_owned(), *mode)).collect();
        Ok(Arc::new(ControlPlaneState { modes, ..ControlPlaneState::default() }))
    }

    fn reason(step: &Step) -> Option<(ConditionStatus, Reason)> {
        match step {
            Step::Report(finding) => Some((finding.status, finding.reason)),
            Step::Nothing | Step::Set => None,
        }
    }

    #[test]
    fn sets_mode_only_if_the_control_plane_has_another_one() {
        use NodeMode::{Active, Cordoned, Draining};
        let draining = RecordedMode { mode: Draining, ..NEW };
        let agreed = RecordedMode { agreed: true, current: true, last: LastReport::Applied, ..draining };
        for (recorded, has, wanted) in [
            (NEW, Active, Step::Report(agrees(Active))),
            (NEW, Cordoned, Step::Set),
            (draining, Active, Step::Set),
            (draining, Draining, Step::Report(agrees(Draining))),
            (agreed, Draining, Step::Nothing),
            (agreed, Active, Step::Set),
            // Another field of the spec has changed.
            (RecordedMode { current: false, ..agreed }, Draining, Step::Report(agrees(Draining))),
        ] {
            assert_eq!(
                step(&recorded, &state_of(&[("n1", has), ("n2", Cordoned)]), "n1"),
                wanted,
                "{recorded:?} {has}"
            );
        }
    }

    #[test]
    fn reports_unreachable_control_plane_only_if_there_is_a_mode_to_set() {
        let away: StateResult = Err("connection refused".to_owned());
        let draining = RecordedMode { mode: NodeMode::Draining, ..NEW };
        assert_eq!(step(&NEW, &away, "n1"), Step::Nothing);
        assert_eq!(step(&NEW, &state_of(&[]), "n1"), Step::Nothing);
        assert_eq!(
            step(
                &RecordedMode { agreed: true, current: true, last: LastReport::Applied, ..draining },
                &away,
                "n1"
            ),
            Step::Nothing
        );
        let unapplied = step(&draining, &away, "n1");
        assert_eq!(reason(&unapplied), Some((ConditionStatus::False, Reason::ControlPlaneUnreachable)));
        assert!(
            matches!(&unapplied, Step::Report(finding) if finding.message.contains("connection refused"))
        );
        let unknown = step(&draining, &state_of(&[]), "n1");
        assert_eq!(reason(&unknown), Some((ConditionStatus::False, Reason::NotReported)));
        // A node that is active again after a failed drain has a mode to set as well.
        let back = RecordedMode { last: LastReport::NotApplied, ..NEW };
        assert_eq!(
            reason(&step(&back, &away, "n1")),
            Some((ConditionStatus::False, Reason::ControlPlaneUnreachable))
        );
    }

    #[test]
    fn reverts_and_reports_modes_set_by_other_clients() {
        let agreed = RecordedMode { agreed: true, current: true, last: LastReport::Applied, ..NEW };
        let back = after(&agreed, Ok(NodeMode::Draining));
        assert_eq!(reason(&back), Some((ConditionStatus::True, Reason::SetBack)));
        assert!(matches!(&back, Step::Report(finding) if finding.message.contains("kubectl drain")));
        assert_eq!(after(&agreed, Ok(NodeMode::Active)), Step::Nothing);
        let first = after(&NEW, Ok(NodeMode::Draining));
        assert_eq!(reason(&first), Some((ConditionStatus::True, Reason::AsDesired)));
        let unknown = after(&NEW, Err(CallError::NotFound("no node".to_owned())));
        assert_eq!(reason(&unknown), Some((ConditionStatus::False, Reason::NotReported)));
    }
}
