//! The home: the member of the control plane that provides the lists of members and nodes.
//!
//! ```text
//!   choose ──► following ──► dropped: its streams end, it is silent, or it is unsure for long
//!     ▲                         │
//!     └────────── pause ◄───────┘ the next turn
//! ```
//!
//! Members of the last map are preferred to the configured ones. Agents begin at different turns, so that a
//! thousand of them are spread over the members.
//!
//! Pure: the caller opens the streams and detects silence.

use std::time::Duration;

use reprise_policy::{Epoch, Tick};

use crate::backoff::{Backoff, Pause};

/// How long a home may be unsure of its registration; a lease is usually regained sooner.
const UNSURE_MAX: Duration = Duration::from_secs(3);

/// The choice of homes; see the module.
#[derive(Debug, Default)]
pub struct Home {
    turn: usize,
    /// Time since which the present home is unsure of its registration.
    unsure_since: Option<Tick>,
    backoff: Backoff,
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

    /// Chooses the next home; `None` without any member.
    pub fn choose<T: Clone + PartialEq>(
        &mut self,
        of_map: impl IntoIterator<Item = T>,
        configured: impl IntoIterator<Item = T>,
    ) -> Option<T> {
        self.unsure_since = None;
        let mut homes: Vec<T> = of_map.into_iter().collect();
        for home in configured {
            if !homes.contains(&home) {
                homes.push(home);
            }
        }
        homes.get(self.turn.checked_rem(homes.len())?).cloned()
    }

    /// Records that the home provides its lists.
    pub fn follow(&mut self) {
        self.backoff.reset();
    }

    /// Records a list of members from the home. Afterwards, [`Home::doubt`] states how long it may stay.
    pub fn receive(&mut self, now: Tick, list: MemberListSource) {
        self.unsure_since = if list.registered { None } else { self.unsure_since.or(Some(now)) };
    }

    /// Returns the time after which the home must be dropped, unless a list arrives; `None` if the home is
    /// certain of its registration.
    pub fn doubt(&self, now: Tick) -> Option<Duration> {
        self.unsure_since.map(|since| since.after(UNSURE_MAX).since(now))
    }

    /// Drops the home. After the pause, choose the next one.
    pub fn drop_home(&mut self) -> Pause {
        (self.turn, self.unsure_since) = (self.turn.wrapping_add(1), None);
        self.backoff.next_pause()
    }
}

impl MemberListSource {
    /// Whether to apply a list from the home, if the current map has the epoch `known`. Without a map, a list
    /// of an uncertain member is better than none.
    pub fn applies_from_home(self, known: Option<Epoch>) -> bool {
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

    #[test]
    fn each_turn_chooses_another_home_and_members_of_the_map_come_first() {
        let mut home = Home::new(1);
        let mut chosen = Vec::new();
        for _ in 0..4 {
            chosen.extend(home.choose(["b", "c"], ["a", "b"]));
            home.drop_home();
        }
        assert_eq!(chosen, ["c", "a", "b", "c"]);
        assert_eq!(home.choose::<&str>([], []), None);
    }

    #[test]
    fn pauses_grow_until_a_home_provides_its_lists() {
        let mut home = Home::default();
        let [first, _, third] = [(); 3].map(|()| home.drop_home().draw(0));
        assert!(third > first);
        home.follow();
        assert_eq!(home.drop_home().draw(0), first);
    }

    #[test]
    fn unsure_home_is_kept_for_a_while() {
        let at = |seconds| Tick(0).after(Duration::from_secs(seconds));
        let mut home = Home::default();
        assert_eq!(home.doubt(at(0)), None);
        home.receive(at(1), list(false));
        home.receive(at(2), list(false));
        assert_eq!(home.doubt(at(2)), Some(Duration::from_secs(2)), "from the first list");
        assert_eq!(home.doubt(at(9)), Some(Duration::ZERO));
        home.receive(at(3), list(true));
        assert_eq!(home.doubt(at(3)), None);
        home.receive(at(4), list(false));
        home.choose(["a"], []);
        assert_eq!(home.doubt(at(5)), None, "doubts concern one home");
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
