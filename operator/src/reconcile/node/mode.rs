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

use std::slice;
use std::time::Duration;

use kube::ResourceExt;
use reprise_crds::fields::NodeMode;
use reprise_crds::status::{Condition, ConditionStatus, ConditionType, Finding, Reason, find};
use reprise_crds::{CacheNode, KVCacheCluster};

use super::apply::{is_foreign, write_condition};
use crate::framework::error::OperatorError;
use crate::framework::status::{merge_findings, publish_event};
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::{CallError, POLL_INTERVAL, RETRY_INTERVAL};
use crate::reconcile::membership::{belongs_to, conditions, is_frozen};
use crate::reconcile::names::ClusterNames;

/// Brings the node's mode at the control plane to that of its `CacheNode` and reports the result. Returns the
/// delay until the next check; `None` if only a change requires one.
///
/// # Errors
/// The API server rejected the condition.
pub async fn sync(
    cluster: &KVCacheCluster,
    live: &CacheNode,
    context: &Context,
) -> Result<Option<Duration>, OperatorError> {
    let (node, names) = (live.name_any(), ClusterNames::of(cluster));
    let is_deleted = live.metadata.deletion_timestamp.is_some();
    if is_frozen(cluster) || is_deleted || is_foreign(live) || !belongs_to(live, &names) {
        return Ok(None);
    }
    let (mode, recorded) = (live.spec.mode, RecordedMode::of(live));
    let control_planes = &context.control_planes;
    let known = match control_planes.state(&names).await {
        Ok(state) => state.modes.get(&node).copied().ok_or_else(|| CallError::NotFound(node.clone())),
        Err(error) => Err(CallError::Unavailable(error)),
    };
    let before = match known {
        // Without contrary information, the control plane still has the recorded mode.
        Err(_) if recorded.agreed => return Ok(Some(POLL_INTERVAL)),
        Err(_) if recorded.is_new => return Ok(Some(RETRY_INTERVAL)),
        Ok(known) if known != mode => {
            let before = control_planes.set_mode(&names, &node, mode).await;
            if before.is_ok() {
                tracing::info!(node, mode = mode.as_str(), "set the mode of a node at the control plane");
            }
            before
        }
        known => known,
    };
    let Some(finding) = finding(mode, &recorded, before) else { return Ok(Some(POLL_INTERVAL)) };
    report(live, &finding, context).await?;
    let is_applied = finding.status == ConditionStatus::True;
    Ok(Some(if is_applied { POLL_INTERVAL } else { RETRY_INTERVAL }))
}

/// Content of the last condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RecordedMode {
    /// Whether the condition states that the control plane had the desired mode.
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
        RecordedMode { agreed, current, is_new: mode == NodeMode::Active && last.is_none() }
    }
}

/// Returns the condition to report, if it changes. `before` is the mode that the control plane had.
fn finding(mode: NodeMode, recorded: &RecordedMode, before: Result<NodeMode, CallError>) -> Option<Finding> {
    let (reason, message) = match before {
        Ok(before) if before == mode && recorded.agreed && recorded.current => return None,
        Ok(before) if before != mode && recorded.agreed => {
            let message = format!(
                "another client had set the node to {before} at the control plane; it is {mode} again: in Kubernetes, set modes \
                 with spec.mode of a pool or with kubectl drain"
            );
            return Some(Finding::yes(ConditionType::ModeApplied, Reason::SetBack, message));
        }
        Ok(_) => return Some(agrees(mode)),
        Err(CallError::NotFound(_)) => {
            let message = format!(
                "the node has not registered with the control plane: its mode is set to {mode} once it has"
            );
            (Reason::NotReported, message)
        }
        Err(CallError::Unavailable(error) | CallError::Rejected(error)) => {
            let message = format!("cannot set the node to {mode} at the control plane; retrying: {error}");
            (Reason::ControlPlaneUnreachable, message)
        }
    };
    Some(Finding::no(ConditionType::ModeApplied, reason, message))
}

fn agrees(mode: NodeMode) -> Finding {
    let message = format!("the mode of the node at the control plane is {mode}");
    Finding::yes(ConditionType::ModeApplied, Reason::AsDesired, message)
}

/// Writes the condition, and publishes an event if users may want to act.
async fn report(live: &CacheNode, finding: &Finding, context: &Context) -> Result<(), OperatorError> {
    let generation = live.metadata.generation.unwrap_or_default();
    let before = find(conditions(live), ConditionType::ModeApplied);
    let mut merged: Vec<Condition> = before.into_iter().cloned().collect();
    let changed = merge_findings(&mut merged, slice::from_ref(finding), generation);
    // An older write of this process may not have reached the store yet.
    context.own_writes.record(live, &merged.first());
    if merged.first() != before && !write_condition(live, merged.first(), context).await? {
        return Ok(());
    }
    let is_first = before.is_none() && finding.reason == Reason::AsDesired;
    // The condition does not change if the mode is reverted repeatedly.
    if finding.reason == Reason::SetBack || (!is_first && !changed.is_empty()) {
        publish_event(context, live, finding).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_applied_reverted_and_pending_modes() {
        use ConditionStatus::{False, True};
        use NodeMode::{Active, Draining};
        let new = RecordedMode { agreed: false, current: false, is_new: true };
        let agreed = RecordedMode { agreed: true, current: true, is_new: false };
        let away = || Err(CallError::Unavailable("connection refused".to_owned()));
        let unregistered = || Err(CallError::NotFound("n1".to_owned()));
        for (recorded, before, expected) in [
            (new, Ok(Active), Some((True, Reason::AsDesired))),
            (new, Ok(Draining), Some((True, Reason::AsDesired))),
            (agreed, Ok(Draining), None),
            // Another field of the spec has changed.
            (RecordedMode { current: false, ..agreed }, Ok(Draining), Some((True, Reason::AsDesired))),
            // Another client had set the mode.
            (agreed, Ok(Active), Some((True, Reason::SetBack))),
            (new, away(), Some((False, Reason::ControlPlaneUnreachable))),
            (new, unregistered(), Some((False, Reason::NotReported))),
        ] {
            let case = format!("{recorded:?} {before:?}");
            let found = finding(Draining, &recorded, before);
            assert_eq!(found.map(|found| (found.status, found.reason)), expected, "{case}");
        }
    }
}
