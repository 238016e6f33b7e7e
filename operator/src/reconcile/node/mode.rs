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
use reprise_crds::status::{Condition, ConditionStatus, ConditionType, Finding, Reason, find};
use reprise_crds::{CacheNode, KVCacheCluster, OPERATOR_FIELD_MANAGER};
use serde_json::json;

use crate::framework::error::OperatorError;
use crate::framework::metrics::Write;
use crate::framework::status::{apply, merge_findings, publish_event};
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::{CallError, POLL_INTERVAL, RETRY_INTERVAL, StateResult};
use crate::reconcile::membership::is_frozen;
use crate::reconcile::names::ClusterNames;

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

/// The desired mode, and the content of the last condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RecordedMode {
    mode: NodeMode,
    /// Whether the condition states that the control plane had this mode.
    agreed: bool,
    /// Whether the condition is of the current generation.
    current: bool,
    /// Whether the default mode is desired and there is no condition.
    is_new: bool,
}

impl RecordedMode {
    fn of(live: &CacheNode) -> RecordedMode {
        let (mode, generation) = (live.spec.mode, live.metadata.generation.unwrap_or_default());
        let last = find(conditions(live), ConditionType::ModeApplied);
        let current = last.is_some_and(|last| last.observed_generation >= generation);
        let agreed = last.is_some_and(|last| {
            last.status == ConditionStatus::True && (current || last.message == agrees(mode).message)
        });
        RecordedMode { mode, agreed, current, is_new: mode == NodeMode::Active && last.is_none() }
    }
}

fn conditions(live: &CacheNode) -> &[Condition] {
    live.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default()
}

fn step(recorded: &RecordedMode, state: &StateResult, node: &str) -> Step {
    let mode = recorded.mode;
    match state {
        // Without contrary information, the control plane still has the recorded mode.
        Err(_) if recorded.agreed || recorded.is_new => Step::Nothing,
        Err(error) => unreachable(mode, error),
        Ok(state) => match state.modes.get(node) {
            None if recorded.agreed || recorded.is_new => Step::Nothing,
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
    let before = find(conditions(live), ConditionType::ModeApplied);
    let mut conditions: Vec<Condition> = before.into_iter().cloned().collect();
    let changed = merge_findings(&mut conditions, std::slice::from_ref(finding), generation);
    // The condition does not change if the mode is reverted repeatedly.
    let is_reverted = finding.reason == Reason::SetBack;
    if conditions.first() != before {
        let name = live.name_any();
        let body = json!({
            "apiVersion": CacheNode::api_version(&()),
            "kind": CacheNode::kind(&()),
            "metadata": { "name": name },
            "status": { "conditions": conditions },
        });
        let api: Api<CacheNode> = Api::all(context.client.clone());
        match apply(context, live, &api, OPERATOR_FIELD_MANAGER, &body).await {
            // Paced: written later, after the next check of the control plane.
            Ok(Some(_)) => return Ok(()),
            Ok(None) => context.metrics.record_write("CacheNode", Write::Status),
            // The object was deleted concurrently.
            Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
            Err(error) => {
                return Err(OperatorError::api(format!("write ModeApplied of CacheNode {name}"))(error));
            }
        }
    }
    let is_worth_it = before.is_some() || finding.reason != Reason::AsDesired;
    if is_reverted || (is_worth_it && !changed.is_empty()) {
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
        RecordedMode { mode: NodeMode::Active, agreed: false, current: false, is_new: true };
    const DRAINING: RecordedMode = RecordedMode { mode: NodeMode::Draining, is_new: false, ..NEW };
    const AGREED: RecordedMode = RecordedMode { agreed: true, current: true, ..DRAINING };

    fn reported(status: ConditionStatus, reason: Reason) -> Option<(ConditionStatus, Reason)> {
        Some((status, reason))
    }

    fn described(step: Step) -> (bool, Option<(ConditionStatus, Reason)>) {
        match step {
            Step::Nothing => (false, None),
            Step::Set => (true, None),
            Step::Report(finding) => (false, Some((finding.status, finding.reason))),
        }
    }

    #[test]
    fn sets_mode_if_the_control_plane_has_another_one_and_reports_the_result() {
        use ConditionStatus::{False, True};
        use NodeMode::{Active, Cordoned, Draining};
        let nothing = || (false, None);
        let set = || (true, None);
        let applied = || (false, reported(True, Reason::AsDesired));
        let unreachable = || (false, reported(False, Reason::ControlPlaneUnreachable));
        let unregistered = || (false, reported(False, Reason::NotReported));
        let state_of = |mode: Option<NodeMode>| -> StateResult {
            let modes = [("n1", mode), ("n2", Some(Cordoned))];
            let modes: BTreeMap<String, NodeMode> =
                modes.into_iter().filter_map(|(node, mode)| Some((node.to_owned(), mode?))).collect();
            Ok(Arc::new(ControlPlaneState { modes, ..ControlPlaneState::default() }))
        };
        let away = || -> StateResult { Err("connection refused".to_owned()) };
        for (recorded, state, expected) in [
            (NEW, state_of(Some(Active)), applied()),
            (NEW, state_of(Some(Cordoned)), set()),
            (DRAINING, state_of(Some(Active)), set()),
            (DRAINING, state_of(Some(Draining)), applied()),
            (AGREED, state_of(Some(Draining)), nothing()),
            (AGREED, state_of(Some(Active)), set()),
            // Another field of the spec has changed.
            (RecordedMode { current: false, ..AGREED }, state_of(Some(Draining)), applied()),
            // An unreachable control plane matters only if there is a mode to set.
            (NEW, away(), nothing()),
            (NEW, state_of(None), nothing()),
            (AGREED, away(), nothing()),
            (DRAINING, away(), unreachable()),
            (DRAINING, state_of(None), unregistered()),
            // A node that is active again after a failed drain has a mode to set as well.
            (RecordedMode { is_new: false, ..NEW }, away(), unreachable()),
        ] {
            assert_eq!(described(step(&recorded, &state, "n1")), expected, "{recorded:?} {state:?}");
        }
        let not_found = CallError::NotFound("no node".to_owned());
        for (recorded, before, expected) in [
            // Another client had set the mode.
            (AGREED, Ok(Active), (false, reported(True, Reason::SetBack))),
            (AGREED, Ok(Draining), nothing()),
            (NEW, Ok(Draining), applied()),
            (NEW, Err(not_found), unregistered()),
            (NEW, Err(CallError::Unavailable("away".to_owned())), unreachable()),
        ] {
            let case = format!("{recorded:?} {before:?}");
            assert_eq!(described(after(&recorded, before)), expected, "{case}");
        }
    }
}
