//! Time since the last change of an object's session reports, by this process's monotonic clock.
//!
//! Timestamps of agents are not compared with local time, because their clocks may differ. Only a change of a
//! report counts.
//!
//! The quiet time must have been observed without gaps. A process that was suspended for longer than
//! [`GAP_MAX`] may have missed reports, so the period restarts. A process that cannot reach the API server
//! loses the lease within seconds and exits; its successor starts without observations. So an agent that
//! could not write has the whole period to do so.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Longest time between two observations of an object with the finalizer, unless the process was suspended.
const GAP_MAX: Duration = Duration::from_secs(90);
/// Age of the last observation from which on an object is forgotten. Existing objects are observed at least
/// once a minute.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Latest reports of nodes with sessions: node, number of sessions, and timestamp by the node's clock.
pub(super) type SessionReports = Vec<(String, u32, String)>;

/// Session reports, and whether the object was guarded.
type State = (SessionReports, bool);

/// Latest observation of each object, by unique id.
#[derive(Debug, Default)]
pub struct Quiescence {
    observations: Mutex<HashMap<String, Observation>>,
}

/// State of an object, since when it is unchanged, and when it was last observed.
#[derive(Debug)]
struct Observation {
    state: State,
    since: Instant,
    observed: Instant,
}

impl Quiescence {
    /// Records the current state of an object and returns how long it has been unchanged; zero for the first
    /// observation.
    pub(super) fn observe(&self, uid: &str, state: &State, has_finalizer: bool, now: Instant) -> Duration {
        let mut all = self.observations.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = all.get_mut(uid) {
            let gap = now.duration_since(last.observed);
            last.observed = now;
            if last.state != *state || (has_finalizer && gap > GAP_MAX) {
                last.state.clone_from(state);
                last.since = now;
            }
            return now.duration_since(last.since);
        }
        all.retain(|_, last| now.duration_since(last.observed) < FORGOTTEN_AFTER);
        all.insert(uid.to_owned(), Observation { state: state.clone(), since: now, observed: now });
        Duration::ZERO
    }

    /// Forgets the observations of an object, so that the quiet period restarts.
    pub(super) fn reset(&self, uid: &str) {
        self.observations.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn reports(sessions: u32, when: &str) -> State {
        (vec![("n1".to_owned(), sessions, when.to_owned())], false)
    }

    fn none() -> State {
        (Vec::new(), false)
    }

    #[test]
    fn counts_from_the_last_change_of_reports_or_guard() {
        let (quiescence, begun) = (Quiescence::default(), Instant::now());
        let at = |seconds: u32, state: State| quiescence.observe("u", &state, true, begun + seconds * SECOND);
        assert_eq!(at(0, reports(1, "a")), Duration::ZERO);
        assert_eq!(at(20, reports(1, "a")), 20 * SECOND);
        assert_eq!(at(30, reports(1, "b")), Duration::ZERO, "the same count in a new report");
        assert_eq!(at(40, none()), Duration::ZERO, "the last session ended");
        assert_eq!(at(65, none()), 25 * SECOND);
        assert_eq!(at(65, (Vec::new(), true)), Duration::ZERO, "the guard changed");
        assert_eq!(at(66, reports(1, "b")), Duration::ZERO);
        assert_eq!(at(76, reports(1, "b")), 10 * SECOND);
        quiescence.reset("u");
        assert_eq!(at(86, reports(1, "b")), Duration::ZERO, "starts again after a reset");
        assert_eq!(quiescence.observe("other", &none(), true, begun + 90 * SECOND), Duration::ZERO);
    }

    #[test]
    fn suspended_process_restarts_the_period_of_objects_with_finalizer() {
        for (has_finalizer, expected) in [(true, Duration::ZERO), (false, 100 * SECOND)] {
            let (quiescence, begun) = (Quiescence::default(), Instant::now());
            let at = |time: Instant| quiescence.observe("u", &reports(1, "a"), has_finalizer, time);
            at(begun);
            assert_eq!(at(begun + 100 * SECOND), expected, "{has_finalizer}");
        }
    }

    #[test]
    fn forgets_objects_that_are_no_longer_observed() {
        let (quiescence, begun) = (Quiescence::default(), Instant::now());
        quiescence.observe("gone", &none(), true, begun);
        quiescence.observe("new", &none(), true, begun + FORGOTTEN_AFTER);
        assert_eq!(quiescence.observations.lock().expect("no panic").len(), 1);
    }
}
