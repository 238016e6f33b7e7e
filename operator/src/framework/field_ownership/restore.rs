//! The one rule for fields that another writer changes: the operator owns all fields that it applies, so it writes them
//! again, and reports their writer by an event and a metric (ADR 18).
//!
//! ```text
//!  apply without force ──no other manager owns the fields──▶ written
//!        └──another manager owns some──▶ apply with force; event with manager and fields; metric
//!                                             └──fifth time within 10 min──▶ paced: at most once a minute
//! ```
//!
//! * The first apply is without force, because only then the API server names the owners of the fields.
//! * An apply does not remove what another writer added: [`extra_fields`] does.
//! * A field that another writer removed has no owner. The caller detects that case.
//! * The pace never drops below once a minute: the other writer may be an attacker, whose change would last that long.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::{Patch, PatchParams};
use kube::core::Status;
use kube::runtime::events::{Event, EventType};
use kube::{Api, Resource};
use reprise_crds::status::Reason;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Instant;

use crate::framework::error::CONFLICT;
use crate::framework::events::{self, Subject};
use crate::framework::field_ownership::extra_fields;
use crate::framework::services::Services;

/// Reason of the cause that the API server lists for each field that another manager owns.
const FIELD_MANAGER: &str = "FieldManagerConflict";

/// Number of restores of one object within [`WITHIN`] from which on it is paced.
pub(crate) const PACED_FROM: usize = 5;
const WITHIN: Duration = Duration::from_secs(600);
/// Time between two restores of a paced object.
const PACED_INTERVAL: Duration = Duration::from_secs(60);
/// Most fields that an event names.
const FIELDS_MAX: usize = 5;

/// Handling of entries that other managers add to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extras {
    /// They are kept: other components add to workloads, services and accounts.
    Kept,
    /// They are removed: they would be a right, a setting or a device.
    Removed,
}

/// A write of fields that the operator owns.
pub(crate) struct OwnedWrite<'a, K> {
    pub api: &'a Api<K>,
    /// Kind of the object, for the metric.
    pub kind: &'static str,
    /// Key of the object: `kind/namespace/name`.
    pub key: &'a str,
    pub name: &'a str,
    /// Whether the status is written, not the rest of the object.
    pub is_status: bool,
    /// Field manager and validation, without force.
    pub params: PatchParams,
    pub body: &'a Value,
    pub extras: Extras,
    /// Object that users watch: events are published on it.
    pub subject: &'a Subject,
}

/// Result of an [`OwnedWrite`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WriteOutcome<K> {
    /// Written, if necessary over the values of another writer.
    Written(K),
    /// Not written: the object is paced for this long.
    Paced(Duration),
}

/// Fields of the operator that another writer changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ForeignWrite {
    /// Field managers, as the API server names them.
    pub by: String,
    /// Paths of the fields, comma-separated.
    pub fields: String,
}

impl ForeignWrite {
    /// Reads managers and fields from a field conflict.
    pub(crate) fn from_status(status: &Status) -> ForeignWrite {
        let causes: Vec<_> = status.details.iter().flat_map(|details| &details.causes).collect();
        let managers: BTreeSet<&str> =
            causes.iter().map(|cause| cause.message.trim_start_matches("conflict with ")).collect();
        let fields: BTreeSet<&str> = causes.iter().map(|cause| cause.field.as_str()).collect();
        let more = match fields.len().saturating_sub(FIELDS_MAX) {
            0 => None,
            more => Some(format!("{more} more")),
        };
        let named = fields.iter().take(FIELDS_MAX).map(|field| (*field).to_owned()).chain(more);
        ForeignWrite { by: Vec::from_iter(managers).join(", "), fields: Vec::from_iter(named).join(", ") }
    }
}

/// Writes fields that the operator owns, unless the object is paced. Reports another writer of these fields by an event
/// and a metric. `removed` returns the fields that another writer had removed, by the written object.
///
/// # Errors
/// The API server rejected a request for another reason than field ownership.
pub(crate) async fn apply<K>(
    services: &Services,
    write: &OwnedWrite<'_, K>,
    removed: impl FnOnce(&K) -> Option<String>,
) -> Result<WriteOutcome<K>, kube::Error>
where
    K: Resource + Clone + Debug + DeserializeOwned + Serialize,
{
    let OwnedWrite { api, key, name, is_status, params, body, extras, .. } = write;
    let other_writers = &services.other_writers;
    if let Some(wait) = other_writers.pacing_delay(key, Instant::now()) {
        return Ok(WriteOutcome::Paced(wait));
    }
    let patch = Patch::Apply(body);
    let send = async |params: &PatchParams| {
        if *is_status {
            api.patch_status(name, params, &patch).await
        } else {
            api.patch(name, params, &patch).await
        }
    };
    let (mut written, mut foreign) = match send(params).await {
        Err(kube::Error::Api(status)) if is_field_conflict(&status) => {
            (send(&params.clone().force()).await?, Some(ForeignWrite::from_status(&status)))
        }
        answer => (answer?, None),
    };
    if *extras == Extras::Removed
        && let Some((without, added)) = extra_fields::remove(api, &written, body).await?
    {
        (written, foreign) = (without, Some(added));
    }
    // No manager owns removed fields, so the API server names none.
    let by = || "an unknown writer, which removed them".to_owned();
    let foreign = foreign.or_else(|| removed(&written).map(|fields| ForeignWrite { by: by(), fields }));
    if let Some(foreign) = foreign {
        other_writers.record_restore(key, Instant::now());
        report(services, write, &written, &foreign).await;
    }
    Ok(WriteOutcome::Written(written))
}

/// Returns whether the API server rejected an apply because other managers own fields. An apply carries no resource
/// version, so the API server itself retries one that another write overtakes.
fn is_field_conflict(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == CONFLICT && causes.into_iter().any(|cause| cause.reason == FIELD_MANAGER)
}

/// Counts restored fields and publishes an event.
async fn report<K: Resource>(
    services: &Services,
    write: &OwnedWrite<'_, K>,
    written: &K,
    ForeignWrite { by, fields }: &ForeignWrite,
) {
    let kind = write.kind;
    services.metrics.record_restore(kind);
    tracing::info!(kind, name = write.name, by, fields, "restored fields that another writer had changed");
    let note = format!(
        "{fields} of {kind} {}, which only the operator owns, were changed by {by}; the operator has restored them. Change \
         the Reprise resource or the chart value from which they derive. From the fifth time within 10 min, the operator \
         restores an object once a minute",
        write.name
    );
    let event = Event {
        type_: EventType::Warning,
        reason: Reason::SetBack.as_str().to_owned(),
        note: Some(note),
        action: "PutBack".to_owned(),
        // Events with the same object and reason are merged, keeping the first note; the field path keeps
        // events about other fields separate.
        secondary: Some(ObjectReference {
            api_version: write.body["apiVersion"].as_str().map(str::to_owned),
            kind: Some(kind.to_owned()),
            name: Some(write.name.to_owned()),
            namespace: written.meta().namespace.clone(),
            uid: written.meta().uid.clone(),
            field_path: Some(fields.clone()),
            ..ObjectReference::default()
        }),
    };
    events::publish(services, write.subject, event).await;
}

/// One process's memory of other writers. It decides when to write, never what a condition reports.
#[derive(Debug, Default)]
pub(crate) struct OtherWriters {
    /// Times of restores, by object key, oldest first.
    of_fields: Mutex<HashMap<String, VecDeque<Instant>>>,
}

impl OtherWriters {
    /// Records that an object was restored.
    pub(crate) fn record_restore(&self, key: &str, now: Instant) {
        let mut all = self.of_fields.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, times| recent_restores(times, now) > 0);
        all.entry(key.to_owned()).or_default().push_back(now);
    }

    /// Returns how long to wait before an object may be restored again, or `None` if it is not paced.
    pub(crate) fn pacing_delay(&self, key: &str, now: Instant) -> Option<Duration> {
        let mut all = self.of_fields.lock().unwrap_or_else(PoisonError::into_inner);
        let times = all.get_mut(key)?;
        if recent_restores(times, now) < PACED_FROM {
            return None;
        }
        let passed = now.duration_since(*times.back()?);
        PACED_INTERVAL.checked_sub(passed).filter(|rest| !rest.is_zero())
    }
}

/// Drops times older than [`WITHIN`] and returns the number of the remaining ones.
fn recent_restores(times: &mut VecDeque<Instant>, now: Instant) -> usize {
    while times.front().is_some_and(|first| now.duration_since(*first) > WITHIN) {
        times.pop_front();
    }
    times.len()
}

#[cfg(test)]
mod tests;
