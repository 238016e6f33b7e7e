//! For how long nothing has been heard of sessions on an object, by this process's own monotonic clock.
//!
//! Times that agents write are not compared with ours: their clocks are theirs. What counts is that they have written nothing new.
//!
//! A look counts from the one before only if that was not long ago ([`GAP_MAX`]): who was stopped in between has seen nothing. And a process that
//! cannot reach the API server loses the lease within seconds and ends, so that all begins anew when it starts again: an agent that could not
//! write meanwhile has the whole time to do so.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Two looks at a held object are not further apart than this, unless the process stood still.
const GAP_MAX: Duration = Duration::from_secs(90);
/// Objects that nobody has looked at for so long are gone: others are at least once a minute.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// What the agents of an object's nodes have said that had sessions: node, how many, and when, by the node's clock.
pub(super) type Said = Vec<(String, u32, String)>;

/// That, and whether the object was guarded.
type State = (Said, bool);

/// What was seen of objects, by their unique ids.
#[derive(Debug, Default)]
pub struct Rests {
    seen: Mutex<HashMap<String, Seen>>,
}

#[derive(Debug)]
struct Seen {
    state: State,
    since: Instant,
    last: Instant,
}

impl Rests {
    /// For how long it has been so, as it is now. Nothing at the first look.
    pub(super) fn look(&self, uid: &str, state: &State, is_held: bool, now: Instant) -> Duration {
        let mut all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(seen) = all.get_mut(uid) {
            let gap = now.duration_since(seen.last);
            seen.last = now;
            if seen.state != *state || (is_held && gap > GAP_MAX) {
                seen.state.clone_from(state);
                seen.since = now;
            }
            return now.duration_since(seen.since);
        }
        all.retain(|_, seen| now.duration_since(seen.last) < FORGOTTEN_AFTER);
        all.insert(uid.to_owned(), Seen { state: state.clone(), since: now, last: now });
        Duration::ZERO
    }

    /// What was seen of it counts no more.
    pub(super) fn begin_anew(&self, uid: &str) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn said(sessions: u32, when: &str) -> State {
        (vec![("n1".to_owned(), sessions, when.to_owned())], false)
    }

    fn none() -> State {
        (Vec::new(), false)
    }

    #[test]
    fn it_rests_from_the_last_news_on_whatever_that_was() {
        let (rests, begun) = (Rests::default(), Instant::now());
        let at = |seconds: u32, state: State| rests.look("u", &state, true, begun + seconds * SECOND);
        assert_eq!(at(0, said(1, "a")), Duration::ZERO);
        assert_eq!(at(20, said(1, "a")), 20 * SECOND);
        assert_eq!(at(30, said(1, "b")), Duration::ZERO, "the same, said again");
        assert_eq!(at(40, none()), Duration::ZERO, "none any more");
        assert_eq!(at(65, none()), 25 * SECOND);
        assert_eq!(at(65, (Vec::new(), true)), Duration::ZERO, "a guard that begins or ends");
        assert_eq!(at(66, said(1, "b")), Duration::ZERO);
        assert_eq!(at(76, said(1, "b")), 10 * SECOND);
        rests.begin_anew("u");
        assert_eq!(at(86, said(1, "b")), Duration::ZERO, "nothing counts that was seen before");
        assert_eq!(rests.look("other", &none(), true, begun + 90 * SECOND), Duration::ZERO);
    }

    #[test]
    fn a_process_that_stood_still_begins_anew_with_what_it_holds() {
        for (is_held, wanted) in [(true, Duration::ZERO), (false, 100 * SECOND)] {
            let (rests, begun) = (Rests::default(), Instant::now());
            rests.look("u", &said(1, "a"), is_held, begun);
            assert_eq!(rests.look("u", &said(1, "a"), is_held, begun + 100 * SECOND), wanted, "{is_held}");
        }
    }

    #[test]
    fn objects_that_are_gone_are_forgotten() {
        let (rests, begun) = (Rests::default(), Instant::now());
        rests.look("gone", &none(), true, begun);
        rests.look("new", &none(), true, begun + FORGOTTEN_AFTER);
        assert_eq!(rests.seen.lock().expect("nobody panicked").len(), 1);
    }
}
