//! Condition `reprise.dev/AgentReady` on `Node`s: whether the node's cache serves engines. Schedulers,
//! admission rules and users can read it.
//!
//! The operator writes it according to the agent's report in the `CacheNode`. A dead agent cannot report
//! itself, and agents need no permission on nodes.
//!
//! ```text
//! node belongs to no cluster ─────────────────────────────▶ no condition
//! node belongs to a cluster ──reported ready within 1 min──▶ True
//!                           ├──otherwise───────────────────▶ False, with the reason
//!                           └──new, no report for < 1 min──▶ no condition
//! ```
//!
//! * The condition states the actual state: agents of a paused or rejected cluster may be ready or not. A
//!   node on which such a cluster has not started has no condition. One that leaves a cluster keeps the
//!   condition until its `CacheNode` is deleted.
//! * A new node has no condition until its agent has reported, or for one minute. Starting is not worth an
//!   event, and with 1,000 new nodes it saves 1,000 writes.
//! * It is written only when it changes; `lastHeartbeatTime` is the time of the last change. Silent agents
//!   are detected by a timer ([`next_check`]).
//! * It is removed before the `CacheNode`, so a client that waits for that deletion finds no condition
//!   afterwards.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, NodeCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::CacheNode;
use reprise_crds::status::{ConditionStatus, ConditionType, Reason, find};

use super::apply::write_condition;
use crate::framework::clock;
use crate::framework::error::OperatorError;
use crate::reconcile::context::Context;
use crate::reconcile::membership::{REPORT_TIMEOUT, conditions, has_reported, is_ready, last_report};
use crate::reconcile::names::AGENT_READY;

/// Margin after a report's expiry, because timestamps have second resolution.
const MARGIN: Duration = Duration::from_secs(1);

/// Returns the desired condition of a node. `live` is the existing `CacheNode`; `is_member` is false if there should be
/// none.
pub fn desired(node: &Node, live: Option<&CacheNode>, is_member: bool, now: &Time) -> Option<NodeCondition> {
    let before = present(node);
    if !is_member {
        return None;
    }
    if node.metadata.deletion_timestamp.is_some() || (before.is_none() && is_awaited(live)) {
        return before.cloned();
    }
    let (status, reason, message) = state(live);
    let of_status = before.filter(|before| before.status == status.as_str());
    let since = of_status.and_then(|before| before.last_transition_time.clone());
    // The API server does not store empty texts.
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let mut desired = NodeCondition {
        type_: AGENT_READY.to_owned(),
        status: status.as_str().to_owned(),
        reason: text(reason),
        message: text(message),
        last_transition_time: Some(since.unwrap_or_else(|| now.clone())),
        last_heartbeat_time: before.and_then(|before| before.last_heartbeat_time.clone()),
    };
    if before != Some(&desired) {
        desired.last_heartbeat_time = Some(now.clone());
    }
    Some(desired)
}

/// Returns the delay until the agent's last report, or the time for its first one, expires; `None` if it
/// already has. Expiry causes no event.
pub fn next_check(live: Option<&CacheNode>) -> Option<Duration> {
    let live = live?;
    let last = last_report(live).or(live.metadata.creation_timestamp.as_ref())?;
    REPORT_TIMEOUT.checked_sub(clock::since(last)).map(|left| left + MARGIN)
}

/// Whether an agent without any report still has time for its first one. This includes agents whose
/// `CacheNode` does not exist yet.
fn is_awaited(live: Option<&CacheNode>) -> bool {
    live.is_none_or(|live| last_report(live).is_none() && next_check(Some(live)).is_some())
}

/// Writes or removes the condition if it differs from the desired one. `live` is the existing `CacheNode`.
///
/// # Errors
/// The API server rejected the write.
pub async fn write(
    node: &Node,
    desired: Option<NodeCondition>,
    live: Option<&CacheNode>,
    context: &Context,
) -> Result<(), OperatorError> {
    // Without a write as well: an older write of this process may not have reached the store yet.
    context.own_writes.record(node, &desired);
    // With a `CacheNode`, the store may lag behind the condition that is removed now.
    let is_written = desired.as_ref() == present(node) && (desired.is_some() || live.is_none());
    // If restoring it is paced, the agent's next report repeats the write.
    if !is_written && write_condition(node, desired.as_ref(), context).await? {
        let status = desired.map(|desired| desired.status);
        tracing::info!(node = node.name_any(), ?status, "wrote the AgentReady condition of a node");
    }
    Ok(())
}

fn present(node: &Node) -> Option<&NodeCondition> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == AGENT_READY)
}

/// Returns status, reason and message of the condition of a node that belongs to a cluster.
fn state(live: Option<&CacheNode>) -> (ConditionStatus, &str, &str) {
    let silent = |message| (ConditionStatus::False, Reason::NotReported.as_str(), message);
    let Some(live) = live.filter(|live| last_report(live).is_some()) else {
        return silent("the node's agent has not reported yet: check its pod");
    };
    if !has_reported(live) {
        return silent("the node's agent has not reported for a minute: check its pod and the node");
    }
    let Some(own) = find(conditions(live), ConditionType::AgentReady) else {
        return silent("the node's agent does not report whether it serves engines: check its version");
    };
    // The agent's message changes only with its state.
    let status = if is_ready(live) { ConditionStatus::True } else { ConditionStatus::False };
    (status, &own.reason, &own.message)
}

#[cfg(test)]
mod tests;
