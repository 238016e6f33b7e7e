//! Says among a node's own conditions whether its cache serves: `reprise.dev/AgentReady`, for schedulers, for rules that keep pods from nodes until
//! something is so, and for people.
//!
//! The operator writes it, by what the agent says in its `CacheNode`: an agent that has died cannot say so, and this way agents need no right on nodes.
//!
//! ```text
//!  no cluster has the node ───────────────────────────────▶ no condition
//!  a cluster has it ──the agent said within a minute that it serves──▶ True
//!                   ├──it says otherwise, or nothing──────▶ False, with the reason
//!                   └──new, and nothing within a minute yet▶ no condition
//! ```
//!
//! * It says what is, not what is wanted: a paused cluster's agents serve or do not, and so do those of one whose spec is not accepted. Of a node that
//!   such a cluster has not begun with, nothing is said.
//! * A node that just came has no condition until its agent has said something or had a minute for it: that it starts is no news, and with 1,000
//!   nodes that come together it is 1,000 writes fewer.
//! * It is written when it changes and not to tell that somebody lives: `lastHeartbeatTime` is that of the last change. Who has gone silent is
//!   looked for when the last report is too old ([`look_again`]).
//! * It goes before the `CacheNode` does, so who waits for that finds no condition afterwards.
//! * A right that lacks stops nothing else of the node.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, NodeCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Api, PatchParams};
use kube::{Resource, ResourceExt};
use reprise_crds::CacheNode;
use reprise_crds::status::{ConditionStatus, ConditionType, Reason, find};
use serde_json::{Value, json};

use super::apply::is_ours;
use super::build::Wanted;
use crate::clock;
use crate::cluster::REPORTED_WITHIN;
use crate::cluster::status::{has_reported, is_ready};
use crate::conflict::Part;
use crate::context::Context;
use crate::error::OperatorError;
use crate::metrics::Write;
use crate::names::AGENT_READY;
use crate::put_back::{self, Ours, Outcome};
use crate::status::{PutBack, tell_put_back};

/// Who writes the condition, and nothing else of a node: so to apply nothing is to remove it.
const FIELD_MANAGER: &str = "reprise-operator-readiness";

/// HTTP's code for what is not there.
const NOT_FOUND: u16 = 404;
/// HTTP's code for what one may not do.
const FORBIDDEN: u16 = 403;

/// Behind the time at which a report is too old: clocks have seconds.
const BEHIND: Duration = Duration::from_secs(1);

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// It is as it should be.
    Nothing,
    /// This is to be said.
    Say(Box<NodeCondition>),
    /// Nothing is to be said any more.
    Remove,
}

/// What to do about a node's condition. `live` is what there is of its `CacheNode`.
pub fn step(node: &Node, live: Option<&CacheNode>, wanted: &Wanted, now: &Time) -> Step {
    let before = condition(node);
    let says = match (wanted, live) {
        // Also where the store does not have yet what was written last.
        (Wanted::Nothing, Some(live)) if is_ours(live) && live.metadata.deletion_timestamp.is_none() => {
            return Step::Remove;
        }
        (Wanted::Nothing | Wanted::Leaves(_), _) | (Wanted::Unchanged, None) if before.is_some() => {
            return Step::Remove;
        }
        (Wanted::Nothing | Wanted::Leaves(_), _) | (Wanted::Unchanged, None) => return Step::Nothing,
        (Wanted::Spec(_) | Wanted::Queues(_) | Wanted::Unchanged, live) => Says::of(live),
    };
    let is_so = before.map_or_else(|| is_awaited(live), |before| says.is_in(before));
    if is_so || node.metadata.deletion_timestamp.is_some() {
        return Step::Nothing;
    }
    let since = before.filter(|before| before.status == says.status.as_str());
    let since = since.and_then(|before| before.last_transition_time.clone());
    Step::Say(Box::new(NodeCondition {
        type_: AGENT_READY.to_owned(),
        status: says.status.as_str().to_owned(),
        reason: Some(says.reason),
        message: Some(says.message),
        last_transition_time: Some(since.unwrap_or_else(|| now.clone())),
        last_heartbeat_time: Some(now.clone()),
    }))
}

/// When the last report of an agent, or the time for its first one, is too long ago, if it is not: nothing tells of that.
pub fn look_again(live: Option<&CacheNode>) -> Option<Duration> {
    let live = live?;
    let last = last_report(live).or(live.metadata.creation_timestamp.as_ref())?;
    REPORTED_WITHIN.checked_sub(clock::since(last)).map(|left| left + BEHIND)
}

/// Whether an agent that has never said anything still has time to. One whose `CacheNode` is not there yet has.
fn is_awaited(live: Option<&CacheNode>) -> bool {
    live.is_none_or(|live| last_report(live).is_none() && look_again(Some(live)).is_some())
}

fn last_report(live: &CacheNode) -> Option<&Time> {
    live.status.as_ref()?.last_updated.as_ref()
}

/// Does it.
///
/// # Errors
/// The API server did not take it, and has not forbidden it.
pub async fn write(node: &Node, step: &Step, context: &Context) -> Result<(), OperatorError> {
    let name = node.name_any();
    let wanted = match step {
        Step::Nothing => {
            // As for other statuses: an older write of this process may not have come back yet.
            context.triggers.own.expect(node.metadata.uid.as_ref(), &condition(node));
            return Ok(());
        }
        Step::Say(condition) => Some(&**condition),
        Step::Remove => None,
    };
    let body = body(&name, wanted);
    if context.refusals.of_all(AGENT_READY) {
        return Ok(());
    }
    let api: Api<Node> = Api::all(context.client.clone());
    let key = format!("{AGENT_READY} of Node//{name}");
    let params = PatchParams::apply(FIELD_MANAGER);
    let ours = Ours { api: &api, key: &key, name: &name, part: Part::Status, params, body: &body };
    context.triggers.own.expect(node.metadata.uid.as_ref(), &wanted);
    match put_back::apply(&context.disputes, &ours).await {
        Ok(Outcome::Written(_)) => {}
        Ok(Outcome::PutBack(written, taken)) => {
            let put_back = PutBack { kind: "Node", what: written.object_ref(&()), taken };
            tell_put_back(context, node, &put_back).await;
        }
        // It is said at its turn: the agent's next report asks for it.
        Ok(Outcome::Waits(_)) => return Ok(()),
        // Gone meanwhile, and the condition with it.
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(()),
        Err(kube::Error::Api(status)) if status.code == FORBIDDEN => {
            let words = status.message.as_str();
            tracing::warn!(
                node = name,
                words,
                "conditions of nodes cannot be written, so they do not say whether caches serve: let the operator patch nodes/status"
            );
            context.refusals.add_of_all(AGENT_READY, words);
            return Ok(());
        }
        Err(error) => {
            return Err(OperatorError::api(format!("write {AGENT_READY} of Node {name}"))(error));
        }
    }
    context.metrics.wrote("Node", Write::Status);
    match step {
        Step::Say(says) => {
            let (status, reason) = (says.status.as_str(), says.reason.as_deref());
            tracing::info!(node = name, status, reason, "whether a node's cache serves is written");
        }
        Step::Remove | Step::Nothing => {
            tracing::info!(node = name, "a node says nothing of a cache any more");
        }
    }
    Ok(())
}

/// What is applied to a node's status. Without a condition what this manager has written before goes.
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

/// What a condition says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Says {
    status: ConditionStatus,
    reason: String,
    message: String,
}

impl Says {
    /// Of a node that a cluster has.
    fn of(live: Option<&CacheNode>) -> Says {
        let status = live.and_then(|live| live.status.as_ref());
        let (Some(live), Some(status)) = (live, status.filter(|status| status.last_updated.is_some())) else {
            return Says::silent("the node's agent has not said anything yet: look at its pod");
        };
        if !has_reported(live) {
            return Says::silent(
                "the node's agent has said nothing for a minute: look at its pod and at the node",
            );
        }
        let Some(own) = find(&status.conditions, ConditionType::AgentReady) else {
            return Says::silent(
                "the node's agent does not say whether it serves engines: look at its version",
            );
        };
        // The agent's own words, which change only with what is so.
        let says = if is_ready(live) { ConditionStatus::True } else { ConditionStatus::False };
        Says { status: says, reason: own.reason.clone(), message: own.message.clone() }
    }

    fn silent(message: &str) -> Says {
        let reason = Reason::NotReported.as_str().to_owned();
        Says { status: ConditionStatus::False, reason, message: message.to_owned() }
    }

    fn is_in(&self, condition: &NodeCondition) -> bool {
        // The API server keeps no empty texts.
        condition.status == self.status.as_str()
            && condition.reason.as_deref().unwrap_or_default() == self.reason
            && condition.message.as_deref().unwrap_or_default() == self.message
    }
}

#[cfg(test)]
mod tests;
