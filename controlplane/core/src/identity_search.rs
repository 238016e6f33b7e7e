//! The search for the identity of the store at the start of a member.
//!
//! ```text
//!   read the name ── present ──► read the marker ── present ──► found
//!    ▲          │ absent              │ absent
//!    │          └──────► create ◄─────┘
//!    └───────────────────┘ created, or another member was faster; a failed reading is repeated
//! ```
//!
//! The identity is a name and a marker whose key contains the name. Members that start at the same moment all try to
//! create one, and one of them succeeds.
//!
//! Pure: the caller reads and writes.

/// Attempts to read the identity.
const ATTEMPTS_MAX: u32 = 8;

/// The search; see the module. Its first step is [`SearchStep::ReadName`].
#[derive(Clone, Copy, Debug)]
pub struct IdentitySearch {
    step: SearchStep,
    attempts: u32,
}

/// Next step of the search. Except after the last two, an input follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchStep {
    /// Read the name.
    ReadName,
    /// Read the marker of that name.
    ReadMarker,
    /// Create a name and its marker, if the store has no name.
    Create,
    /// The identity is that of the name and the marker.
    Found,
    /// The last call has failed, or all attempts were in vain.
    GiveUp,
}

/// Input of the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchInput {
    /// The key that was read is present.
    Present,
    /// The key that was read is absent.
    Absent,
    /// The identity was created, or the store has one already.
    Created,
    /// The call has failed.
    Failed,
}

impl Default for IdentitySearch {
    fn default() -> IdentitySearch {
        IdentitySearch { step: SearchStep::ReadName, attempts: 1 }
    }
}

impl IdentitySearch {
    /// Processes an input; returns the next step.
    pub fn on(&mut self, input: SearchInput) -> SearchStep {
        self.step = match (self.step, input) {
            (SearchStep::Create, SearchInput::Failed) => SearchStep::GiveUp,
            (_, SearchInput::Created | SearchInput::Failed) if self.attempts == ATTEMPTS_MAX => {
                SearchStep::GiveUp
            }
            (_, SearchInput::Created | SearchInput::Failed) => {
                self.attempts += 1;
                SearchStep::ReadName
            }
            (SearchStep::ReadName, SearchInput::Present) => SearchStep::ReadMarker,
            (_, SearchInput::Present) => SearchStep::Found,
            (_, SearchInput::Absent) => SearchStep::Create,
        };
        self.step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(inputs: &[SearchInput]) -> SearchStep {
        let mut search = IdentitySearch::default();
        inputs.iter().fold(SearchStep::ReadName, |_, input| search.on(*input))
    }

    #[test]
    fn identity_is_found_or_created_and_then_read() {
        use SearchInput::{Absent, Created, Present};
        assert_eq!(after(&[Present]), SearchStep::ReadMarker);
        assert_eq!(after(&[Present, Present]), SearchStep::Found);
        assert_eq!(after(&[Absent]), SearchStep::Create);
        assert_eq!(after(&[Present, Absent]), SearchStep::Create, "the name was deleted meanwhile");
        assert_eq!(after(&[Absent, Created]), SearchStep::ReadName, "another member may be faster");
        assert_eq!(after(&[Absent, Created, Present, Present]), SearchStep::Found);
    }

    #[test]
    fn failed_reading_is_repeated_but_not_forever_and_a_failed_write_is_not() {
        assert_eq!(after(&[SearchInput::Absent, SearchInput::Failed]), SearchStep::GiveUp);
        let mut search = IdentitySearch::default();
        let repeated = std::iter::repeat_with(|| search.on(SearchInput::Failed));
        let count = repeated.take_while(|step| *step == SearchStep::ReadName).count();
        assert_eq!(count as u32, ATTEMPTS_MAX - 1);
    }
}
