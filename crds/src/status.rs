//! Conditions of custom resources: type, status, reason, message and time of the last transition.
//!
//! Conditions are a list-map by type, so that several writers can each own their types by server-side
//! apply. Each carries the generation of the spec that it was computed for. Types and reasons come from
//! this module only: `docs/resources/README.md` lists them, and users may wait for them.
//!
//! Invariant: a condition's transition time changes with its status, not with its message ([`set`]). A
//! writer that repeats a condition writes nothing.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::fields::choice;

mod words;

pub use words::{ConditionType, Reason};

/// Upper bound on the conditions of one object: every type once.
pub const CONDITIONS_MAX: usize = 16;
/// Upper bound on the characters of a message; longer ones are truncated.
pub const MESSAGE_CHARS_MAX: usize = 1024;

/// One condition of an object.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type of the condition.
    #[serde(rename = "type")]
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Z][A-Za-z]*$"))]
    pub kind: String,
    /// Status of the condition.
    pub status: ConditionStatus,
    /// Generation of the spec that this condition was computed for. Below `metadata.generation`: it
    /// describes an older spec.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Time of the last change of `status`.
    pub last_transition_time: Time,
    /// Cause of the status, in CamelCase.
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Z][A-Za-z]*$"))]
    pub reason: String,
    /// Explanation of the status, and the remedy if there is one.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    pub message: String,
}

choice! {
    /// Whether the condition is true.
    ConditionStatus {
        /// The condition is true.
        True,
        /// The condition is false.
        False,
        /// The status cannot be determined at the moment.
        Unknown,
    }
    default Unknown
}

/// Status of one condition as its writer has computed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Type of the condition.
    pub kind: ConditionType,
    /// Status of the condition.
    pub status: ConditionStatus,
    /// Cause of the status, in CamelCase.
    pub reason: Reason,
    /// Explanation of the status, and the remedy if there is one.
    pub message: String,
}

/// How [`set`] changed a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The condition did not change.
    None,
    /// Only the message or the generation changed. Messages contain counters, so this change is not
    /// reported as an event.
    Words,
    /// The reason changed and the status did not. Another action may be required.
    Reason,
    /// The status changed, or the condition is new.
    Status,
}

impl Finding {
    /// The condition is true.
    pub fn yes(kind: ConditionType, reason: Reason, message: impl Into<String>) -> Finding {
        Finding { kind, status: ConditionStatus::True, reason, message: message.into() }
    }

    /// The condition is false.
    pub fn no(kind: ConditionType, reason: Reason, message: impl Into<String>) -> Finding {
        Finding { kind, status: ConditionStatus::False, reason, message: message.into() }
    }

    /// The status is unknown.
    pub fn unknown(kind: ConditionType, reason: Reason, message: impl Into<String>) -> Finding {
        Finding { kind, status: ConditionStatus::Unknown, reason, message: message.into() }
    }
}

/// Updates or inserts a condition of an object of this generation.
pub fn set(conditions: &mut Vec<Condition>, finding: &Finding, generation: i64, now: &Time) -> Change {
    let mut next = Condition {
        kind: finding.kind.as_str().to_owned(),
        status: finding.status,
        observed_generation: generation,
        last_transition_time: now.clone(),
        reason: finding.reason.as_str().to_owned(),
        message: finding.message.chars().take(MESSAGE_CHARS_MAX).collect(),
    };
    let Some(current) = conditions.iter_mut().find(|condition| condition.kind == next.kind) else {
        conditions.push(next);
        conditions.sort_by(|a, b| a.kind.cmp(&b.kind));
        return Change::Status;
    };
    let same_status = current.status == next.status;
    if same_status {
        next.last_transition_time = current.last_transition_time.clone();
    }
    let change = match (same_status, current.reason == next.reason, *current == next) {
        (true, _, true) => Change::None,
        (true, true, false) => Change::Words,
        (true, false, _) => Change::Reason,
        (false, ..) => Change::Status,
    };
    *current = next;
    change
}

/// Returns the condition of this type, if it was ever set.
pub fn find(conditions: &[Condition], kind: ConditionType) -> Option<&Condition> {
    conditions.iter().find(|condition| condition.kind == kind.as_str())
}

/// Returns whether the condition is true for this generation or a later one.
pub fn holds(conditions: &[Condition], kind: ConditionType, generation: i64) -> bool {
    find(conditions, kind).is_some_and(|condition| {
        condition.status == ConditionStatus::True && condition.observed_generation >= generation
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Time {
        serde_json::from_value(text.into()).expect("a time")
    }

    #[test]
    fn transition_time_changes_only_with_the_status() {
        let (early, late) = (at("2026-01-01T00:00:00Z"), at("2026-01-02T00:00:00Z"));
        let mut conditions = Vec::new();
        let waits = Finding::no(ConditionType::Ready, Reason::Progressing, "2 of 3 agents are ready");
        assert_eq!(set(&mut conditions, &waits, 1, &early), Change::Status);
        assert_eq!(set(&mut conditions, &waits, 1, &late), Change::None);
        let other = Finding { message: "1 of 3".to_owned(), ..waits };
        assert_eq!(set(&mut conditions, &other, 2, &late), Change::Words);
        assert_eq!(conditions[0].last_transition_time, early);
        assert!(!holds(&conditions, ConditionType::Ready, 2));
        let refused = Finding { reason: Reason::FieldConflict, ..other };
        assert_eq!(set(&mut conditions, &refused, 2, &late), Change::Reason);
        assert_eq!(conditions[0].last_transition_time, early);
        let ready = Finding::yes(ConditionType::Ready, Reason::AsDesired, "");
        assert_eq!(set(&mut conditions, &ready, 2, &late), Change::Status);
        assert_eq!((conditions.len(), &conditions[0].last_transition_time), (1, &late));
        assert!(holds(&conditions, ConditionType::Ready, 2));
        assert!(!holds(&conditions, ConditionType::Ready, 3), "true of an older spec only");
    }

    #[test]
    fn conditions_stay_sorted_and_messages_are_truncated() {
        let now = at("2026-01-01T00:00:00Z");
        let mut conditions = Vec::new();
        for kind in [ConditionType::Ready, ConditionType::Degraded] {
            let finding = Finding::unknown(kind, Reason::NotReported, "ü".repeat(2 * MESSAGE_CHARS_MAX));
            set(&mut conditions, &finding, 1, &now);
        }
        let kinds: Vec<&str> = conditions.iter().map(|condition| condition.kind.as_str()).collect();
        assert_eq!(kinds, ["Degraded", "Ready"]);
        assert_eq!(conditions[0].message.chars().count(), MESSAGE_CHARS_MAX);
    }
}
