//! Conditions: what is so, since when, and what to do.
//!
//! Conditions are a list-map by type, so that several writers can each own theirs by server-side apply. Each carries the
//! generation of the spec that it speaks of. Types and reasons are words of this module and no others: `docs/RESOURCES.md`
//! lists them from here, and whoever waits for one can rely on it.
//!
//! Invariant: the time of a condition changes with its status, not with its words ([`set`]); a writer that says the same again
//! writes nothing.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::fields::choice;

mod words;

pub use words::{ConditionType, Reason};

/// Conditions of one object, at the most: every type once.
pub const CONDITIONS_MAX: usize = 16;
/// Characters of a message; longer ones are cut.
pub const MESSAGE_CHARS_MAX: usize = 1024;

/// One thing that is so, is not so, or is not known.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What it speaks of.
    #[serde(rename = "type")]
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Z][A-Za-z]*$"))]
    pub kind: String,
    /// Whether it is so.
    pub status: ConditionStatus,
    /// Generation of the spec that this was found for. Below `metadata.generation`: it speaks of an older spec.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// When `status` changed last.
    pub last_transition_time: Time,
    /// Why, in one word.
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Z][A-Za-z]*$"))]
    pub reason: String,
    /// Why, and what to do about it.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    pub message: String,
}

choice! {
    /// Whether a condition holds.
    ConditionStatus {
        /// It is so.
        True,
        /// It is not so.
        False,
        /// Nobody can say at the moment.
        Unknown,
    }
    default Unknown
}

/// What a writer finds about one condition of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What it speaks of.
    pub kind: ConditionType,
    /// Whether it is so.
    pub status: ConditionStatus,
    /// Why, in one word.
    pub reason: Reason,
    /// Why, and what to do about it.
    pub message: String,
}

/// Whether a condition was changed by [`set`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It says what it said.
    None,
    /// Another message or generation, the same status for the same reason. Messages have numbers in them, so this is no news.
    Words,
    /// The same status for another reason: somebody may have to do something else about it.
    Reason,
    /// Another status.
    Status,
}

impl Finding {
    /// It is so.
    pub fn yes(kind: ConditionType, reason: Reason, message: impl Into<String>) -> Finding {
        Finding { kind, status: ConditionStatus::True, reason, message: message.into() }
    }

    /// It is not so.
    pub fn no(kind: ConditionType, reason: Reason, message: impl Into<String>) -> Finding {
        Finding { kind, status: ConditionStatus::False, reason, message: message.into() }
    }

    /// Nobody can say.
    pub fn unknown(kind: ConditionType, reason: Reason, message: impl Into<String>) -> Finding {
        Finding { kind, status: ConditionStatus::Unknown, reason, message: message.into() }
    }
}

/// Puts a finding among the conditions of an object of this generation.
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

/// The condition of a type, if it was ever set.
pub fn find(conditions: &[Condition], kind: ConditionType) -> Option<&Condition> {
    conditions.iter().find(|condition| condition.kind == kind.as_str())
}

/// Whether a condition is true of this generation.
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
    fn the_time_of_a_condition_changes_with_its_status_only() {
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
    fn conditions_keep_one_order_and_messages_their_length() {
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
