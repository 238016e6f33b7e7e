//! Why an object is refused: reason and message of a condition.

use reprise_crds::status::{ConditionType, Finding, Reason};

/// Why a resource, or a child of one, is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    /// Message of the condition: the problem and its remedy.
    pub message: String,
}

impl Refusal {
    /// Creates a refusal from reason and message.
    pub fn new(reason: Reason, message: impl Into<String>) -> Refusal {
        Refusal { reason, message: message.into() }
    }
}

/// Returns the condition `Accepted` of an object, with the reason if it is refused.
pub fn accepted(refused: Option<&Refusal>) -> Finding {
    match refused {
        Some(Refusal { reason, message }) => Finding::no(ConditionType::Accepted, *reason, message),
        None => Finding::yes(ConditionType::Accepted, Reason::AsDesired, "the spec is valid"),
    }
}
