//! Others who write the status of this node's `CacheNode`.
//!
//! Its fields are the agent's alone: the operator and people go by them, so what somebody else has written there is put back. But not in silence: it is
//! applied without force first, since only then the API server says whose the fields are, and for a while the condition `StatusContested` names them,
//! which the operator makes an event of. Nobody is fought at full speed: a status is written as often as any other.

use std::time::Duration;

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::Status;
use reprise_crds::AGENT_FIELD_MANAGER;
use reprise_crds::status::{ConditionType, Finding, Reason};
use serde_json::Value;
use tokio::time::Instant;

/// HTTP's code for a conflict.
const CONFLICT: u16 = 409;

/// The cause that the API server names for each field that another manager owns.
const FIELD_MANAGER: &str = "FieldManagerConflict";

/// Fields that are named.
const FIELDS_MAX: usize = 5;

/// It is said for so long after the last time.
const SAID_FOR: Duration = Duration::from_secs(600);

/// Whether anybody else writes it.
#[derive(Debug, Default)]
pub(crate) struct Contested {
    last: Option<(String, Instant)>,
}

impl Contested {
    /// Somebody did, in words.
    pub(crate) fn by(&mut self, words: String, now: Instant) {
        // Once, and not at every write of a fight.
        if self.finding(now).is_none() || self.last.as_ref().is_some_and(|(last, _)| *last != words) {
            tracing::warn!(
                words,
                "somebody else had written the status of this node's CacheNode; it is put back"
            );
        }
        self.last = Some((words, now));
    }

    /// What is to be said of it.
    pub(crate) fn finding(&self, now: Instant) -> Option<Finding> {
        let (words, last) = self.last.as_ref()?;
        let message = format!("fields of the status are the agent's alone and were put back: {words}");
        let is_said = now.duration_since(*last) < SAID_FOR;
        is_said.then(|| Finding::yes(ConditionType::StatusContested, Reason::FieldConflict, message))
    }
}

/// Applies a status, over what others have written if need be; who they were and what, in that case.
///
/// # Errors
/// The API server did not take it.
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

/// Without the times that the API server may name: the same writer is the same words.
fn words(status: &Status) -> String {
    let causes = status.details.iter().flat_map(|details| &details.causes).take(FIELDS_MAX);
    let said = causes.map(|cause| {
        let manager = cause.message.split(" at ").next().unwrap_or_default();
        format!("{}: {manager}", cause.field)
    });
    said.collect::<Vec<_>>().join(", ")
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
    fn only_fields_of_others_are_taken_by_force_and_a_few_are_named() {
        let conflict = refusal(409, FIELD_MANAGER);
        assert!(is_of_fields(&conflict));
        assert!(!is_of_fields(&refusal(409, "Other")) && !is_of_fields(&refusal(422, FIELD_MANAGER)));
        let said = words(&conflict);
        assert!(said.starts_with("a: conflict with \"kubectl-edit\" using v1, b: "), "{said}");
        assert!(!said.contains("2026") && !said.contains("f: "), "{said}");
    }

    #[test]
    fn it_is_said_for_ten_minutes_after_the_last_time() {
        let mut contested = Contested::default();
        let start = Instant::now();
        let said = |contested: &Contested, after: u64| {
            contested.finding(start + Duration::from_secs(after)).map(|found| found.message)
        };
        assert_eq!(said(&contested, 0), None);
        contested.by("a: mine".to_owned(), start);
        assert!(said(&contested, 599).is_some_and(|message| message.ends_with("a: mine")));
        assert_eq!(said(&contested, 600), None);
        contested.by("b: mine".to_owned(), start + Duration::from_secs(600));
        assert!(said(&contested, 1199).is_some_and(|message| message.ends_with("b: mine")));
    }
}
