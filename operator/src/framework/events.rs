//! Events on objects. An event that cannot be written is only logged.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube::runtime::events::Event;

use crate::framework::metrics::Write;
use crate::framework::services::Services;

/// Kubernetes' limit on the length of an event's note, in characters.
const NOTE_CHARS_MAX: usize = 1024;

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    /// Kind of the object, for metrics.
    pub kind: &'static str,
    pub reference: ObjectReference,
}

impl Subject {
    /// Returns a reference to a stored object.
    pub fn of<K: Resource<DynamicType = ()>>(object: &K) -> Subject {
        Subject { kind: kind_of::<K>(), reference: object.object_ref(&()) }
    }
}

/// Publishes an event. Its note is cut to the permitted length.
pub(crate) async fn publish(services: &Services, subject: &Subject, mut event: Event) {
    event.note = event.note.map(|note| note.chars().take(NOTE_CHARS_MAX).collect());
    match services.recorder.publish(&event, &subject.reference).await {
        Ok(()) => services.metrics.record_write(subject.kind, Write::Event),
        Err(error) => tracing::info!(%error, "cannot publish an event"),
    }
}

/// Returns the kind's name as a static string, for metric labels.
pub(crate) fn kind_of<K: Resource<DynamicType = ()>>() -> &'static str {
    match K::kind(&()) {
        Cow::Borrowed(kind) => kind,
        Cow::Owned(_) => "other",
    }
}
