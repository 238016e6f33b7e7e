//! Writes statuses and events, where something has changed.
//!
//! A status whose conditions, generation or anything else but sums changed is written at once, other changes every 10 s at the most
//! ([`crate::context::STATUS_EVERY`]). Each change of a condition's status or reason is an event, that of its message alone is none: messages count
//! nodes and pods, so there would be one at every step.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Api, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Resource, ResourceExt};
use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_crds::status::{Change, Condition, ConditionStatus, ConditionType, Finding, Reason, set};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::clock;
use crate::conflict::Part;
use crate::context::Context;
use crate::error::OperatorError;
use crate::metrics::Write;
use crate::put_back::{self, Ours, Outcome, Taken};

/// HTTP's code for what is not there.
const NOT_FOUND: u16 = 404;

/// A status of ours, without what is special to its kind.
pub trait Status: Clone + Default + PartialEq + Serialize {
    /// Its conditions.
    fn conditions(&mut self) -> &mut Vec<Condition>;
    /// Sets the generation that it speaks of.
    fn observe(&mut self, generation: i64);
}

macro_rules! status_of {
    ($($type:ty),+ $(,)?) => {
        $(impl Status for $type {
            fn conditions(&mut self) -> &mut Vec<Condition> {
                &mut self.conditions
            }

            fn observe(&mut self, generation: i64) {
                self.observed_generation = generation;
            }
        })+
    };
}
status_of!(
    reprise_crds::KVCacheClusterStatus,
    reprise_crds::SSDPoolStatus,
    reprise_crds::CacheTenantStatus,
    reprise_crds::SlackProfileStatus,
    reprise_crds::GPUQueueAllocationStatus,
);

/// What has been found of an object, and where it is.
pub struct Found<'a, K, S> {
    /// The object.
    pub object: &'a K,
    /// Where objects of its kind are.
    pub api: &'a Api<K>,
    /// Its status as it is stored.
    pub before: Option<&'a S>,
    /// What is so.
    pub findings: &'a [Finding],
}

/// Puts findings into conditions and drops those of which nothing was found. What changed, for events.
pub fn conclude(conditions: &mut Vec<Condition>, findings: &[Finding], generation: i64) -> Vec<Finding> {
    let now = clock::now();
    conditions.retain(|condition| findings.iter().any(|found| found.kind.as_str() == condition.kind));
    let news = findings.iter().filter(|found| {
        let first = !conditions.iter().any(|condition| condition.kind == found.kind.as_str());
        let change = set(conditions, found, generation, &now);
        // That something new is under way is no news.
        [Change::Reason, Change::Status].contains(&change) && !(first && found.reason == Reason::Progressing)
    });
    news.cloned().collect()
}

/// Writes a status if it differs from the one that is stored; `fresh` has everything but conditions and generation. How long to wait
/// with what was not urgent.
///
/// # Errors
/// The API server did not take it.
pub async fn write<K, S>(
    context: &Context,
    found: Found<'_, K, S>,
    fresh: S,
) -> Result<Option<Duration>, OperatorError>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    S: Status,
{
    let Found { object, api, before, findings } = found;
    let (kind, name) = (kind_of::<K>(), object.name_any());
    let generation = object.meta().generation.unwrap_or_default();
    let mut before = before.cloned().unwrap_or_default();
    let mut status = fresh;
    status.observe(generation);
    status.conditions().clone_from(before.conditions());
    let news = conclude(status.conditions(), findings, generation);
    if status == before {
        // The store may be older than a write of this process: its event is news, because something else is wanted by now.
        context.triggers.own.expect(object.meta().uid.as_ref(), &Some(&status));
        return Ok(None);
    }
    let key = format!("{kind}/{}/{name}", object.namespace().unwrap_or_default());
    let urgent = status.conditions() != before.conditions();
    if !urgent && let Some(wait) = context.status_waits(&key) {
        return Ok(Some(wait));
    }
    let body = json!({
        "apiVersion": K::api_version(&()),
        "kind": kind,
        "metadata": { "name": name },
        "status": status,
    });
    context.triggers.own.expect(object.meta().uid.as_ref(), &Some(&status));
    match apply(context, object, api, &body).await {
        Ok(None) => {}
        Ok(Some(wait)) => return Ok(Some(wait)),
        // Deleted meanwhile.
        Err(kube::Error::Api(status)) if status.code == NOT_FOUND => return Ok(None),
        Err(error) => return Err(OperatorError::api(format!("write the status of {key}"))(error)),
    }
    context.metrics.wrote(kind, Write::Status);
    context.status_was_written(&key);
    for finding in &news {
        tell(context, object, finding).await;
    }
    Ok(None)
}

/// Applies fields of a status that only the operator owns. What another writer put there is put back and reported. Returns how long to wait if the
/// object is paced ([`crate::put_back`]).
///
/// # Errors
/// The API server did not take it.
pub(crate) async fn apply<K>(
    context: &Context,
    object: &K,
    api: &Api<K>,
    body: &Value,
) -> Result<Option<Duration>, kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let name = object.name_any();
    let key = format!("status of {}/{}/{name}", kind_of::<K>(), object.namespace().unwrap_or_default());
    let params = PatchParams::apply(OPERATOR_FIELD_MANAGER);
    let ours = Ours { api, key: &key, name: &name, part: Part::Status, params, body };
    match put_back::apply(&context.disputes, &ours).await? {
        Outcome::Written(_) => {}
        Outcome::PutBack(_, taken) => {
            let put_back = PutBack { kind: kind_of::<K>(), what: object.object_ref(&()), taken };
            tell_put_back(context, object, &put_back).await;
        }
        Outcome::Waits(wait) => return Ok(Some(wait)),
    }
    Ok(None)
}

/// The kind's name; there are so many, so it lives for ever.
pub(crate) fn kind_of<K: Resource<DynamicType = ()>>() -> &'static str {
    match K::kind(&()).as_ref() {
        "KVCacheCluster" => "KVCacheCluster",
        "SSDPool" => "SSDPool",
        "CacheTenant" => "CacheTenant",
        "CacheNode" => "CacheNode",
        "SlackProfile" => "SlackProfile",
        "GPUQueueAllocation" => "GPUQueueAllocation",
        "Node" => "Node",
        _ => "other",
    }
}

/// An event; one that cannot be written is in the log all the same.
pub(crate) async fn tell<K: Resource<DynamicType = ()>>(context: &Context, object: &K, finding: &Finding) {
    let kind = kind_of::<K>();
    let (name, condition, reason) = (object.name_any(), finding.kind.as_str(), finding.reason.as_str());
    let (status, message) = (finding.status.as_str(), &finding.message);
    tracing::info!(kind, name, condition, status, reason, %message, "a condition has changed");
    let note = format!("{condition} is {status}: {message}");
    let event = Event {
        type_: severity(finding, object.meta().creation_timestamp.as_ref().map(clock::since)),
        reason: reason.to_owned(),
        note: Some(note.chars().take(NOTE_CHARS_MAX).collect()),
        action: condition.to_owned(),
        secondary: None,
    };
    match context.recorder.publish(&event, &object.object_ref(&())).await {
        Ok(()) => context.metrics.wrote(kind, Write::Event),
        Err(error) => tracing::info!(%error, "an event could not be written"),
    }
}

/// Something of which fields were put back.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PutBack {
    /// Its kind.
    pub(crate) kind: &'static str,
    /// It.
    pub(crate) what: ObjectReference,
    /// Whose they had become.
    pub(crate) taken: Taken,
}

/// That fields were put back, counted, and as an event on an object whose reader can do something about it.
pub(crate) async fn tell_put_back<K>(context: &Context, object: &K, put_back: &PutBack)
where
    K: Resource<DynamicType = ()>,
{
    let PutBack { kind, what, taken: Taken { by, fields } } = put_back;
    let name = what.name.clone().unwrap_or_default();
    context.metrics.put_back(kind);
    tracing::info!(kind, name, by, fields, "what somebody else had written is put back");
    let note = format!(
        "only the operator owns {fields} of {kind} {name}; they were written by {by}, and the operator has put them back. Change the field of the \
         Reprise resource or of the chart that they are made of. From the fifth time within 10 min on, the operator puts an object back once a minute"
    );
    let event = Event {
        type_: EventType::Warning,
        reason: Reason::SetBack.as_str().to_owned(),
        note: Some(note.chars().take(NOTE_CHARS_MAX).collect()),
        action: PUT_BACK.to_owned(),
        // Events of one object and reason become one, with the first one's note: other fields are another event.
        secondary: Some(ObjectReference { field_path: Some(fields.clone()), ..what.clone() }),
    };
    match context.recorder.publish(&event, &object.object_ref(&())).await {
        Ok(()) => context.metrics.wrote(kind_of::<K>(), Write::Event),
        Err(error) => tracing::info!(%error, "an event could not be written"),
    }
}

/// What is done when fields are put back, in the word of events.
const PUT_BACK: &str = "PutBack";

/// Kubernetes' own bound of an event's note.
const NOTE_CHARS_MAX: usize = 1024;

/// Objects that refer to each other are made in some order, agents report and control planes answer when they have started: for this
/// long that is no warning.
const SETTLES_WITHIN: Duration = Duration::from_secs(60);

/// Reasons that pass when another object or a report comes.
const PASSING: [Reason; 5] = [
    Reason::ReferenceNotFound,
    Reason::NoNodes,
    Reason::NodesNotReady,
    Reason::NotReported,
    Reason::ControlPlaneUnreachable,
];

/// Type of the event about an object of this age. The condition is the same for an object of any age.
fn severity(finding: &Finding, age: Option<Duration>) -> EventType {
    let is_new = age.is_some_and(|age| age < SETTLES_WITHIN);
    if is_good(finding) || (is_new && PASSING.contains(&finding.reason)) {
        EventType::Normal
    } else {
        EventType::Warning
    }
}

/// Whether nobody has to look at it. Some conditions tell of trouble when they are true.
fn is_good(finding: &Finding) -> bool {
    let troubles = [
        ConditionType::Degraded,
        ConditionType::EngineFallback,
        ConditionType::TransportFallback,
        ConditionType::DeletionBlocked,
        ConditionType::Drifted,
        ConditionType::OverQuota,
        ConditionType::StatusContested,
    ];
    let plain = [ConditionType::Progressing, ConditionType::Cordoned, ConditionType::Drained];
    let progressing = [Reason::Progressing, Reason::AsDesired, Reason::Paused].contains(&finding.reason);
    // It is so again, and somebody did otherwise.
    if finding.reason == Reason::SetBack {
        return false;
    }
    let good = if troubles.contains(&finding.kind) { ConditionStatus::False } else { ConditionStatus::True };
    plain.contains(&finding.kind) || progressing || finding.status == good
}

#[cfg(test)]
mod tests;
