//! Class of a block while requests that have begun list it.
//!
//! ```text
//!  commit ──▶ own class ──listed by a running request──▶ active
//!                │  ▲──────────── no longer listed ─────────┘
//!                └──▶ listed by preempted requests only: idle
//! ```
//!
//! The own class of a block does not change, so nothing is left behind when its requests end, or their engine dies.

use crate::eviction::Class;
use crate::prefetch::RequestState;

/// Number of requests that list a block, by their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListedBy {
    running: u32,
    preempted: u32,
}

impl ListedBy {
    /// Adds a request in a state.
    pub fn add(&mut self, state: RequestState) {
        *self.count_mut(state) += 1;
    }

    /// Removes a request, which was added in this state.
    pub fn remove(&mut self, state: RequestState) {
        let count = self.count_mut(state);
        *count = count.checked_sub(1).expect("a request is removed once");
    }

    /// Whether no request lists the block.
    pub fn is_empty(self) -> bool {
        self == ListedBy::default()
    }

    /// Class of a block with this own class. A block of class active stays active while its request is preempted: other
    /// requests have the same prefix.
    pub fn class(self, own: Class) -> Class {
        match own {
            _ if self.running > 0 => Class::Active,
            Class::Evictable | Class::Recent if self.preempted > 0 => Class::Idle,
            own => own,
        }
    }

    fn count_mut(&mut self, state: RequestState) -> &mut u32 {
        match state {
            RequestState::Running => &mut self.running,
            RequestState::Preempted => &mut self.preempted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [Class; 3] = [Class::Evictable, Class::Recent, Class::Active];

    #[test]
    fn block_is_active_while_any_request_runs_and_idle_while_all_are_preempted() {
        let mut listed = ListedBy::default();
        assert_eq!(OWN.map(|own| listed.class(own)), OWN);
        listed.add(RequestState::Preempted);
        assert_eq!(OWN.map(|own| listed.class(own)), [Class::Idle, Class::Idle, Class::Active]);
        listed.add(RequestState::Running);
        assert_eq!(OWN.map(|own| listed.class(own)), [Class::Active; 3]);
        listed.remove(RequestState::Preempted);
        assert_eq!(OWN.map(|own| listed.class(own)), [Class::Active; 3]);
        listed.remove(RequestState::Running);
        assert!(listed.is_empty());
        assert_eq!(OWN.map(|own| listed.class(own)), OWN, "nothing is left behind");
    }
}
