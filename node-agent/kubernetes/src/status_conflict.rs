//! Detects other writers of the status of this node's `CacheNode`.
//!
//! The operator and users rely on these fields, so the agent overwrites changes by other writers. It first
//! applies the status without force, since only then the API server reports the owners of the fields. For
//! some time afterwards the condition `StatusContested` lists them. The conflict does not increase the rate of
//! writes.

use std::time::Duration;

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::Status;
use reprise_crds::AGENT_FIELD_MANAGER;
use reprise_crds::status::{ConditionType, Finding, Reason};
use serde_json::Value;
use tokio::time::Instant;

/// HTTP status code of a conflict.
const CONFLICT: u16 = 409;

/// Cause that the API server reports for each field that another manager owns.
const FIELD_MANAGER: &str = "FieldManagerConflict";

/// Maximum number of fields in a message.
const FIELDS_MAX: usize = 5;

/// How long a conflict is reported after it last occurred.
const REPORTED_FOR: Duration = Duration::from_secs(600);

/// The last conflict with another writer of the status.
#[derive(Debug, Default)]
pub(crate) struct StatusConflict {
    last: Option<(String, Instant)>,
}

impl StatusConflict {
    /// Records a conflict, with a description of fields and writers.
    pub(crate) fn record(&mut self, words: String, now: Instant) {
        // Logged once, not at each write of a lasting conflict.
        if self.condition(now).is_none() || self.last.as_ref().is_some_and(|(last, _)| *last != words) {
            tracing::warn!(
                words,
                "overwrote changes by another writer to the status of this node's CacheNode"
            );
        }
        self.last = Some((words, now));
    }

    /// Returns the condition to report, if a conflict is recent.
    pub(crate) fn condition(&self, now: Instant) -> Option<Finding> {
        let (words, last) = self.last.as_ref()?;
        let message = format!(
            "another writer changed status fields that the agent owns; the agent restored them: {words}"
        );
        let is_recent = now.duration_since(*last) < REPORTED_FOR;
        is_recent.then(|| Finding::yes(ConditionType::StatusContested, Reason::FieldConflict, message))
    }
}

/// Applies a status, with force if other managers own fields of it. Returns a description of the conflict
/// in that case.
///
/// # Errors
/// The API server did not accept the status.
pub(crate) async fn apply(
    api: &Api<DynamicObject>,
    name: &str,
    object: &Value,
) -> Result<(DynamicObject, Option<String>), kube::Error> {
    let (params, patch) = (PatchParams::apply(AGENT_FIELD_MANAGER), Patch::Apply(object));
    match api.patch_status(name, &params, &patch).await {
        Err(kube::Error::Api(status)) if is_of_fields(&status) => {
            let stored = api.patch_status(name, &params.force(), &patch).await?;
            Ok((stored, Some(words(&status))))
        }
        answer => answer.map(|stored| (stored, None)),
    }
}

fn is_of_fields(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == CONFLICT && causes.into_iter().any(|cause| cause.reason == FIELD_MANAGER)
}

/// Describes the conflict without timestamps, so that the text is the same for the same writer.
fn words(status: &Status) -> String {
    let causes = status.details.iter().flat_map(|details| &details.causes).take(FIELDS_MAX);
    let described = causes.map(|cause| {
        let manager = cause.message.split(" at ").next().unwrap_or_default();
        format!("{}: {manager}", cause.field)
    });
    described.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refusal(code: u16, reason: &str) -> Status {
        let cause = |field: &str| {
            let message = "conflict with \"kubectl-edit\" using v1 at 2026-01-01T00:00:00Z";
            json!({ "reason": reason, "message": message, "field": field })
        };
        let causes: Vec<Value> = ["a", "b", "c", "d", "e", "f"].map(cause).to_vec();
        let status = json!({ "status": "Failure", "code": code, "reason": "Conflict", "details": { "causes": causes } });
        serde_json::from_value(status).expect("a status")
    }

    #[test]
    fn only_field_conflicts_are_forced_and_their_description_is_bounded() {
        let conflict = refusal(409, FIELD_MANAGER);
        assert!(is_of_fields(&conflict));
        assert!(!is_of_fields(&refusal(409, "Other")) && !is_of_fields(&refusal(422, FIELD_MANAGER)));
        let described = words(&conflict);
        assert!(described.starts_with("a: conflict with \"kubectl-edit\" using v1, b: "), "{described}");
        assert!(!described.contains("2026") && !described.contains("f: "), "{described}");
    }

    #[test]
    fn conflict_is_reported_for_ten_minutes_after_it_last_occurred() {
        let mut conflict = StatusConflict::default();
        let start = Instant::now();
        let described = |conflict: &StatusConflict, after: u64| {
            conflict.condition(start + Duration::from_secs(after)).map(|found| found.message)
        };
        assert_eq!(described(&conflict, 0), None);
        conflict.record("a: mine".to_owned(), start);
        assert!(described(&conflict, 599).is_some_and(|message| message.ends_with("a: mine")));
        assert_eq!(described(&conflict, 600), None);
        conflict.record("b: mine".to_owned(), start + Duration::from_secs(600));
        assert!(described(&conflict, 1199).is_some_and(|message| message.ends_with("b: mine")));
    }
}
