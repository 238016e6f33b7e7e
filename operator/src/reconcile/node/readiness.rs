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
//!   node on which such a cluster has not started has no condition.
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
use kube::api::Api;
use reprise_crds::CacheNode;
use reprise_crds::status::{ConditionStatus, ConditionType, Reason};
use serde_json::{Value, json};

use super::apply::is_ours;
use super::build::DesiredCacheNode;
use crate::framework::clock;
use crate::framework::error::OperatorError;
use crate::framework::metrics::Write;
use crate::framework::status::apply;
use crate::reconcile::context::Context;
use crate::reconcile::membership::{REPORT_TIMEOUT, has_reported, is_ready};
use crate::reconcile::names::AGENT_READY;

/// Field manager of the condition and of nothing else, so applying an empty status removes the condition.
const FIELD_MANAGER: &str = "reprise-operator-readiness";

/// Margin after a report's expiry, because timestamps have second resolution.
const MARGIN: Duration = Duration::from_secs(1);

/// Next action on a node's condition.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// The condition is as desired.
    Nothing,
    /// Set this condition on the node.
    Set(Box<NodeCondition>),
    /// Remove the condition from the node.
    Remove,
}

/// Returns the next action on a node's condition. `live` is the existing `CacheNode`.
pub fn next_step(node: &Node, live: Option<&CacheNode>, wanted: &DesiredCacheNode, now: &Time) -> Step {
    let before = condition(node);
    let has_agent = match wanted {
        DesiredCacheNode::Spec(_) => true,
        DesiredCacheNode::Unchanged => live.is_some(),
        DesiredCacheNode::Absent | DesiredCacheNode::Releasing(_) => false,
    };
    if !has_agent {
        // Before the CacheNode is deleted, remove it even if the local store does not show a condition yet: the store
        // may lag.
        let is_deleted_next = *wanted == DesiredCacheNode::Absent
            && live.is_some_and(|live| is_ours(live) && live.metadata.deletion_timestamp.is_none());
        return if is_deleted_next || before.is_some() { Step::Remove } else { Step::Nothing };
    }
    let (status, reason, message) = desired(live);
    // The API server does not store empty texts.
    let is_in = |before: &NodeCondition| {
        before.status == status.as_str()
            && before.reason.as_deref().unwrap_or_default() == reason
            && before.message.as_deref().unwrap_or_default() == message
    };
    let is_so = before.map_or_else(|| is_awaited(live), is_in);
    if is_so || node.metadata.deletion_timestamp.is_some() {
        return Step::Nothing;
    }
    let since = before.filter(|before| before.status == status.as_str());
    let since = since.and_then(|before| before.last_transition_time.clone());
    Step::Set(Box::new(NodeCondition {
        type_: AGENT_READY.to_owned(),
        status: status.as_str().to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_transition_time: Some(since.unwrap_or_else(|| now.clone())),
        last_heartbeat_time: Some(now.clone()),
    }))
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

fn last_report(live: &CacheNode) -> Option<&Time> {
    live.status.as_ref()?.last_updated.as_ref()
}

/// Executes the action.
///
/// # Errors
/// The API server rejected the write.
pub async fn write(node: &Node, step: &Step, context: &Context) -> Result<(), OperatorError> {
    let name = node.name_any();
    let wanted = match step {
        Step::Nothing => return Ok(()),
        Step::Set(condition) => Some(&**condition),
        Step::Remove => None,
    };
    let body = body(&name, wanted);
    let api: Api<Node> = Api::all(context.client.clone());
    match apply(context, node, &api, FIELD_MANAGER, &body).await {
        Ok(None) => {}
        // Written later: the agent's next report triggers it.
        Ok(Some(_)) => return Ok(()),
        // The node was deleted concurrently, and the condition with it.
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
        Err(error) => {
            return Err(OperatorError::api(format!("write {AGENT_READY} of Node {name}"))(error));
        }
    }
    context.metrics.record_write("Node", Write::Status);
    match step {
        Step::Set(desired) => {
            let (status, reason) = (desired.status.as_str(), desired.reason.as_deref());
            tracing::info!(node = name, status, reason, "set the AgentReady condition of a node");
        }
        Step::Remove | Step::Nothing => {
            tracing::info!(node = name, "removed the AgentReady condition of a node");
        }
    }
    Ok(())
}

/// Body of the apply request. Without a condition, the manager's earlier one is removed.
fn body(name: &str, condition: Option<&NodeCondition>) -> Value {
    let mut body = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
    if let Some(condition) = condition {
        body["status"] = json!({ "conditions": [condition] });
    }
    body
}

fn condition(node: &Node) -> Option<&NodeCondition> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == AGENT_READY)
}

/// Returns status, reason and message of the condition of a node that belongs to a cluster.
fn desired(live: Option<&CacheNode>) -> (ConditionStatus, &str, &str) {
    let silent = |message| (ConditionStatus::False, Reason::NotReported.as_str(), message);
    let Some(live) = live.filter(|live| last_report(live).is_some()) else {
        return silent("the node's agent has not reported yet: check its pod");
    };
    if !has_reported(live) {
        return silent("the node's agent has not reported for a minute: check its pod and the node");
    }
    let conditions = live.status.iter().flat_map(|status| &status.conditions);
    let mut own = conditions.filter(|condition| condition.kind == ConditionType::AgentReady.as_str());
    let Some(own) = own.next() else {
        return silent("the node's agent does not report whether it serves engines: check its version");
    };
    // The agent's message changes only with its state.
    let status = if is_ready(live) { ConditionStatus::True } else { ConditionStatus::False };
    (status, &own.reason, &own.message)
}

#[cfg(test)]
mod tests;
