//! Why an object is refused: reason and message of a condition, and names in messages.

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

/// Most names in a message.
const NAMES_MAX: usize = 5;

/// Lists the first names for a message, and the number of the others.
pub fn list<T: AsRef<str>>(names: impl IntoIterator<Item = T>) -> String {
    let names: Vec<T> = names.into_iter().collect();
    let shown: Vec<&str> = names.iter().take(NAMES_MAX).map(AsRef::as_ref).collect();
    match names.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Returns the condition `Accepted` of an object, with the reason if it is refused.
pub fn accepted(refused: Option<&Refusal>) -> Finding {
    match refused {
        Some(Refusal { reason, message }) => Finding::no(ConditionType::Accepted, *reason, message),
        None => Finding::yes(ConditionType::Accepted, Reason::AsDesired, "the spec is valid"),
    }
}
