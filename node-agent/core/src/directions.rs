//! What answers to reports say that a node is to do: which of it is news.
//!
//! Every member answers reports, each with what it knows of the node's mode; one of them decides about moves. Deliberately
//! absent: which member that is (the caller has the map), and what the core makes of it.

use reprise_policy::Epoch;

use crate::event::Move;

/// The owner of this hash slot decides who gives blocks to whom.
pub const REBALANCER_SLOT: u16 = 0;
/// The upper half of an epoch names the store that it came out of.
const STORE_SHIFT: u32 = 32;

/// See the module.
#[derive(Debug, Default)]
pub struct Directions {
    /// Which store this node is registered in, and the revision of the newest mode that came out of it.
    store: u64,
    mode_revision: Option<u64>,
    /// Modes that were told on, over all stores.
    modes: u64,
    given: Option<Move>,
}

impl Directions {
    /// The number of a mode that a member has told under a registration, counted from 1; `None` when it is not newer than the
    /// last. Revisions of different stores say nothing of each other: in a store that was emptied they begin anew.
    pub fn number_mode(&mut self, registration: Epoch, revision: u64) -> Option<u64> {
        let store = registration.0 >> STORE_SHIFT;
        if std::mem::replace(&mut self.store, store) != store {
            self.mode_revision = None;
        }
        if self.mode_revision >= Some(revision) {
            return None;
        }
        self.mode_revision = Some(revision);
        self.modes += 1;
        Some(self.modes)
    }

    /// The member that decides about moves has told one, or none; whether that is to be told on. The same move again is as
    /// much again: it holds until the next report.
    pub fn is_news(&mut self, told: Option<Move>) -> bool {
        let news = told.is_some() || self.given.is_some();
        self.given = told;
        news
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::NodeId;

    use super::*;

    #[test]
    fn of_two_modes_the_one_with_the_higher_revision_of_the_same_store_holds() {
        let granted = |store: u64| Epoch((store << STORE_SHIFT) + 7);
        let mut directions = Directions::default();
        assert_eq!(directions.number_mode(granted(3), 40), Some(1));
        assert_eq!(directions.number_mode(granted(3), 40), None);
        assert_eq!(directions.number_mode(granted(3), 39), None);
        assert_eq!(directions.number_mode(granted(3), 41), Some(2));
        assert_eq!(
            directions.number_mode(granted(5), 0),
            Some(3),
            "the store was emptied: nobody has set a mode"
        );
        assert_eq!(directions.number_mode(granted(5), 0), None);
    }

    #[test]
    fn every_move_is_news_and_that_there_is_none_is_news_once() {
        let mut directions = Directions::default();
        let told = Some(Move { to: NodeId(2), bytes: 100 });
        let news = [None, told, told, None, None].map(|told| directions.is_news(told));
        assert_eq!(news, [false, true, true, true, false]);
    }
}
