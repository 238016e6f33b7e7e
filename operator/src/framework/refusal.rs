//! Why an object is refused: reason and message of a condition.

use reprise_crds::status::Reason;

/// Why a resource, or a child of one, is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Reason of the condition.
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
