//! Writes statuses and events on changes.
//!
//! A status is written at once if its conditions or generation change; other changes are written at most
//! every 10 s ([`crate::framework::services::STATUS_WRITE_INTERVAL`]). Each change of a condition's status or reason is
//! published as an event. A change of only the message is not, because messages contain counts of nodes and
//! pods.

use std::fmt::Debug;
use std::time::Duration;

use kube::api::{Api, PatchParams};
use kube::core::object::HasStatus;
use kube::runtime::events::{Event, EventType};
use kube::{Resource, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_crds::status::{Change, Condition, ConditionStatus, ConditionType, Finding, Reason, set};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::framework::clock;
use crate::framework::error::{NOT_FOUND, OperatorError};
use crate::framework::events::{self, Subject, kind_of};
use crate::framework::field_ownership::restore::{self, Extras, OwnedWrite, WriteOutcome};
use crate::framework::metrics::Write;
use crate::framework::services::Services;

/// Merges findings into conditions and removes conditions without a finding. Returns the findings to publish
/// as events.
pub fn merge_findings(
    conditions: &mut Vec<Condition>,
    findings: &[Finding],
    generation: i64,
) -> Vec<Finding> {
    let now = clock::now();
    conditions.retain(|condition| findings.iter().any(|found| found.kind.as_str() == condition.kind));
    let changed = findings.iter().filter(|found| {
        let first = !conditions.iter().any(|condition| condition.kind == found.kind.as_str());
        let change = set(conditions, found, generation, &now);
        // The start of progress on a new object is not worth an event.
        [Change::Reason, Change::Status].contains(&change) && !(first && found.reason == Reason::Progressing)
    });
    changed.cloned().collect()
}

/// Writes a status with these conditions if it differs from the stored one. `fresh` lacks conditions and generation.
/// Returns the delay after which a postponed change must be written.
///
/// # Errors
/// The API server rejected the write.
pub async fn write<K>(
    context: &Services,
    object: &K,
    api: &Api<K>,
    findings: &[Finding],
    fresh: K::Status,
) -> Result<Option<Duration>, OperatorError>
where
    K: Resource<DynamicType = ()> + HasStatus + Clone + Debug + DeserializeOwned + Serialize,
    K::Status: Serialize,
{
    let (kind, name) = (kind_of::<K>(), object.name_any());
    let observed_generation = object.meta().generation.unwrap_or_default();
    let before = json!(object.status());
    let stored: Vec<Condition> = serde_json::from_value(before["conditions"].clone()).unwrap_or_default();
    let mut conditions = stored.clone();
    let changed = merge_findings(&mut conditions, findings, observed_generation);
    let urgent = conditions != stored;
    let mut status = json!(fresh);
    status["observedGeneration"] = json!(observed_generation);
    status["conditions"] = json!(conditions);
    if status == before {
        return Ok(None);
    }
    let key = format!("{kind}/{}/{name}", object.namespace().unwrap_or_default());
    if !urgent && let Some(wait) = context.status_write_delay(&key) {
        return Ok(Some(wait));
    }
    let body = json!({
        "apiVersion": K::api_version(&()),
        "kind": kind,
        "metadata": { "name": name },
        "status": status,
    });
    match apply(context, object, api, OPERATOR_FIELD_MANAGER, &body).await {
        Ok(None) => {}
        Ok(Some(wait)) => return Ok(Some(wait)),
        // The object was deleted concurrently.
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(None),
        Err(error) => return Err(OperatorError::api(format!("write the status of {key}"))(error)),
    }
    context.metrics.record_write(kind, Write::Status);
    context.record_status_write(&key);
    for finding in &changed {
        publish_event(context, object, finding).await;
    }
    Ok(None)
}

/// Applies status fields that only the operator owns. Changes by other writers are reverted and reported.
/// Returns the delay if restoring the object is paced ([`crate::framework::field_ownership::restore`]).
///
/// # Errors
/// The API server rejected the write.
pub(crate) async fn apply<K>(
    context: &Services,
    object: &K,
    api: &Api<K>,
    manager: &str,
    body: &Value,
) -> Result<Option<Duration>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
{
    let name = object.name_any();
    let key = format!("status of {}/{}/{name}", kind_of::<K>(), object.namespace().unwrap_or_default());
    let ours = OwnedWrite {
        api,
        kind: kind_of::<K>(),
        key: &key,
        name: &name,
        is_status: true,
        params: PatchParams::apply(manager),
        body,
        extras: Extras::Kept,
        subject: &Subject::of(object),
    };
    match restore::apply(context, &ours, |_| None).await? {
        WriteOutcome::Written(_) => Ok(None),
        WriteOutcome::Paced(wait) => Ok(Some(wait)),
    }
}

/// Publishes and logs an event. An event that cannot be written is only logged.
pub(crate) async fn publish_event<K: Resource<DynamicType = ()>>(
    context: &Services,
    object: &K,
    finding: &Finding,
) {
    let kind = kind_of::<K>();
    let (name, condition, reason) = (object.name_any(), finding.kind.as_str(), finding.reason.as_str());
    let (status, message) = (finding.status.as_str(), &finding.message);
    tracing::info!(kind, name, condition, status, reason, %message, "condition changed");
    let event = Event {
        type_: severity(finding, object.meta().creation_timestamp.as_ref().map(clock::since)),
        reason: reason.to_owned(),
        note: Some(format!("{condition} is {status}: {message}")),
        action: condition.to_owned(),
        secondary: None,
    };
    events::publish(context, &Subject::of(object), event).await;
}

/// Age of an object up to which transient reasons cause no warning: referenced objects may follow, and agents
/// and control planes are starting.
const GRACE_PERIOD: Duration = Duration::from_secs(60);

/// Reasons that resolve when another object or a report arrives.
const TRANSIENT_REASONS: [Reason; 5] = [
    Reason::ReferenceNotFound,
    Reason::NoNodes,
    Reason::NodesNotReady,
    Reason::NotReported,
    Reason::ControlPlaneUnreachable,
];

/// Returns the type of the event for an object of this age. The condition itself does not depend on the age.
fn severity(finding: &Finding, age: Option<Duration>) -> EventType {
    let is_new = age.is_some_and(|age| age < GRACE_PERIOD);
    if is_good(finding) || (is_new && TRANSIENT_REASONS.contains(&finding.reason)) {
        EventType::Normal
    } else {
        EventType::Warning
    }
}

/// Whether users need not act. Some conditions report a problem when they are true.
fn is_good(finding: &Finding) -> bool {
    let negative = [
        ConditionType::Degraded,
        ConditionType::EngineFallback,
        ConditionType::DeletionBlocked,
        ConditionType::Drifted,
        ConditionType::OverQuota,
        ConditionType::StatusContested,
    ];
    let neutral = [ConditionType::Progressing, ConditionType::Cordoned, ConditionType::Drained];
    let progressing = [Reason::Progressing, Reason::AsDesired, Reason::Paused].contains(&finding.reason);
    // The state is as desired again, but another client had changed it.
    if finding.reason == Reason::SetBack {
        return false;
    }
    let good = if negative.contains(&finding.kind) { ConditionStatus::False } else { ConditionStatus::True };
    neutral.contains(&finding.kind) || progressing || finding.status == good
}

#[cfg(test)]
mod tests;
