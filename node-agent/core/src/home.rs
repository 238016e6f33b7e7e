//! The home: the member of the control plane that provides the lists of members and nodes.
//!
//! ```text
//!   choose ──► opening ──► following ──► closed: its streams end, it is silent, or it is unsure for long
//!     ▲           └──────────────────────► │
//!     └────────────── pause ◄──────────────┘ the next turn
//! ```
//!
//! Members of the last map are preferred to the configured ones. Agents begin at different turns, so that a
//! thousand of them are spread over the members.
//!
//! Pure: the caller opens and closes the streams, measures pauses and doubts, and detects silence.

use std::time::Duration;

use reprise_policy::{Epoch, Tick};

use crate::backoff::{Backoff, Pause};

/// How long a home may be unsure of its registration; a lease is usually regained sooner.
const UNSURE_MAX: Duration = Duration::from_secs(3);

/// The choice of homes; see the module.
#[derive(Debug, Default)]
pub struct Home {
    turn: usize,
    state: State,
    backoff: Backoff,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// No home is chosen.
    #[default]
    Closed,
    /// The streams of the home are being opened.
    Opening,
    /// The home provides its lists.
    Following {
        /// Time since which it is unsure of its registration.
        unsure_since: Option<Tick>,
    },
}

/// Input of a home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The home provides its lists.
    Opened,
    /// The home has sent a list of members. The current map has the epoch `known`.
    List { list: MemberListSource, known: Option<Epoch> },
    /// Heartbeats to the home fail.
    Silent,
    /// The time of [`Home::doubt`] has passed.
    Overdue,
    /// A stream has ended, or was not opened.
    Ended,
}

/// Instruction to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Apply the list.
    Apply,
    /// Close the streams. After the pause, choose the next home.
    Close(Pause, CloseReason),
}

/// Why a home is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// A stream has ended, or was not opened.
    Ended,
    /// It does not respond to heartbeats.
    Silent,
    /// It has been unsure of its registration for long.
    Unsure,
}

/// What decides whether a list of members is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberListSource {
    /// Epoch of the list.
    pub epoch: Epoch,
    /// Number of members in the list.
    pub members: usize,
    /// Whether the answering member is certain of its registration.
    pub registered: bool,
}

impl Home {
    /// Creates a choice that begins at a turn.
    pub fn new(turn: usize) -> Home {
        Home { turn, ..Home::default() }
    }

    /// Chooses the next home, whose streams the caller opens; `None` without any member.
    pub fn choose<T: Clone + PartialEq>(
        &mut self,
        of_map: impl IntoIterator<Item = T>,
        configured: impl IntoIterator<Item = T>,
    ) -> Option<T> {
        let mut homes: Vec<T> = of_map.into_iter().collect();
        for home in configured {
            if !homes.contains(&home) {
                homes.push(home);
            }
        }
        let home = homes.get(self.turn.checked_rem(homes.len())?).cloned();
        self.state = State::Opening;
        home
    }

    /// Whether a home provides its lists.
    pub fn is_followed(&self) -> bool {
        matches!(self.state, State::Following { .. })
    }

    /// Returns the time after which [`Input::Overdue`] is due, unless a list arrives; `None` if the home is
    /// certain of its registration.
    pub fn doubt(&self, now: Tick) -> Option<Duration> {
        match self.state {
            State::Following { unsure_since } => unsure_since.map(|since| since.after(UNSURE_MAX).since(now)),
            State::Closed | State::Opening => None,
        }
    }

    /// Processes an input; returns the instruction. Afterwards, ask for [`Home::doubt`].
    pub fn on(&mut self, now: Tick, input: Input) -> Option<Output> {
        match (self.state, input) {
            (State::Opening, Input::Opened) => {
                self.backoff.reset();
                self.state = State::Following { unsure_since: None };
                None
            }
            (State::Following { unsure_since }, Input::List { list, known }) => {
                let unsure_since = if list.registered { None } else { unsure_since.or(Some(now)) };
                self.state = State::Following { unsure_since };
                list.applies_from_home(known).then_some(Output::Apply)
            }
            (State::Following { .. }, Input::Silent) => Some(self.close(CloseReason::Silent)),
            (State::Following { .. }, Input::Overdue) => {
                let is_over = self.doubt(now) == Some(Duration::ZERO);
                is_over.then(|| self.close(CloseReason::Unsure))
            }
            (State::Opening | State::Following { .. }, Input::Ended) => Some(self.close(CloseReason::Ended)),
            (State::Closed | State::Opening | State::Following { .. }, _) => None,
        }
    }

    fn close(&mut self, reason: CloseReason) -> Output {
        (self.turn, self.state) = (self.turn.wrapping_add(1), State::Closed);
        Output::Close(self.backoff.next_pause(), reason)
    }
}

impl CloseReason {
    /// Returns the reason, for logs.
    pub fn reason(self) -> &'static str {
        match self {
            CloseReason::Ended => "a stream of the member has ended",
            CloseReason::Silent => "the member does not respond to heartbeats",
            CloseReason::Unsure => "the member is unsure of its registration",
        }
    }
}

impl MemberListSource {
    /// Whether to apply a list from the home, if the current map has the epoch `known`. Without a map, a list
    /// of an uncertain member is better than none.
    fn applies_from_home(self, known: Option<Epoch>) -> bool {
        self.registered || (known.is_none() && self.members > 0)
    }

    /// Whether to apply a list that was fetched from a member with a newer map. It may still be older than one
    /// that arrived from the home meanwhile. Such a list is ignored, because the home does not repeat the
    /// newer one. If the store restarts with new epochs, a new home reports that.
    pub fn applies_if_fetched(self, known: Option<Epoch>) -> bool {
        self.registered && known.is_none_or(|known| self.epoch > known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(registered: bool) -> MemberListSource {
        MemberListSource { epoch: Epoch(5), members: 2, registered }
    }

    fn at(seconds: u64) -> Tick {
        Tick(0).after(Duration::from_secs(seconds))
    }

    fn followed() -> Home {
        let mut home = Home::default();
        home.choose(["a"], []);
        assert_eq!(home.on(at(0), Input::Opened), None);
        home
    }

    fn reason(output: Option<Output>) -> Option<CloseReason> {
        match output? {
            Output::Close(_, reason) => Some(reason),
            Output::Apply => None,
        }
    }

    #[test]
    fn each_turn_chooses_another_home_and_members_of_the_map_come_first() {
        let mut home = Home::new(1);
        let mut chosen = Vec::new();
        for _ in 0..4 {
            chosen.extend(home.choose(["b", "c"], ["a", "b"]));
            home.on(at(0), Input::Ended);
        }
        assert_eq!(chosen, ["c", "a", "b", "c"]);
        assert_eq!(home.choose::<&str>([], []), None);
    }

    #[test]
    fn pauses_grow_until_a_home_provides_its_lists() {
        let mut home = Home::default();
        let mut end = |opens: bool| {
            home.choose(["a"], []);
            if opens {
                home.on(at(0), Input::Opened);
            }
            match home.on(at(0), Input::Ended) {
                Some(Output::Close(pause, CloseReason::Ended)) => pause.draw(0),
                other => panic!("unexpected {other:?}"),
            }
        };
        let [first, _, third] = [(); 3].map(|()| end(false));
        assert!(third > first);
        assert_eq!(end(true), first);
    }

    #[test]
    fn unsure_home_is_kept_for_a_while() {
        let mut home = followed();
        let receive = |home: &mut Home, now, registered| {
            home.on(now, Input::List { list: list(registered), known: Some(Epoch(4)) })
        };
        assert_eq!(home.doubt(at(0)), None);
        assert_eq!(receive(&mut home, at(1), false), None, "a map of a certain member is known");
        receive(&mut home, at(2), false);
        assert_eq!(home.doubt(at(2)), Some(Duration::from_secs(2)), "from the first list");
        assert_eq!(home.on(at(3), Input::Overdue), None, "of an earlier home");
        assert_eq!(receive(&mut home, at(3), true), Some(Output::Apply));
        assert_eq!(home.doubt(at(3)), None);
        assert_eq!(home.on(at(9), Input::Overdue), None, "it is certain again");
        receive(&mut home, at(10), false);
        assert_eq!(reason(home.on(at(13), Input::Overdue)), Some(CloseReason::Unsure));
        home.choose(["a"], []);
        assert_eq!(home.doubt(at(14)), None, "doubts concern one home");
    }

    #[test]
    fn a_home_is_closed_once() {
        let mut home = followed();
        assert!(home.is_followed());
        assert_eq!(reason(home.on(at(1), Input::Silent)), Some(CloseReason::Silent));
        assert!(!home.is_followed());
        for late in [Input::Silent, Input::Ended, Input::Overdue, Input::Opened] {
            assert_eq!(home.on(at(2), late), None, "{late:?} of a closed home");
        }
        let late = Input::List { list: list(true), known: None };
        assert_eq!(home.on(at(2), late), None, "a list of a closed home");
    }

    #[test]
    fn silence_before_a_home_provides_its_lists_is_ignored() {
        let mut home = Home::default();
        home.choose(["a"], []);
        assert_eq!(home.on(at(0), Input::Silent), None, "the call has its own time limit");
        assert_eq!(reason(home.on(at(0), Input::Ended)), Some(CloseReason::Ended));
    }

    #[test]
    fn lists_are_applied_by_source_and_epoch() {
        let (sure, unsure) = (list(true), list(false));
        assert!(sure.applies_from_home(Some(Epoch(9))), "a new home may have a new store");
        assert!(unsure.applies_from_home(None) && !unsure.applies_from_home(Some(Epoch(1))));
        assert!(!MemberListSource { members: 0, ..unsure }.applies_from_home(None));
        assert!(sure.applies_if_fetched(None) && sure.applies_if_fetched(Some(Epoch(4))));
        assert!(!sure.applies_if_fetched(Some(Epoch(5))) && !unsure.applies_if_fetched(None));
    }
}
