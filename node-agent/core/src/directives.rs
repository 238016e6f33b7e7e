//! Directives in replies to reports: filters out modes and moves that the core already has.
//!
//! Every member replies to reports with the node's mode as the member knows it. One member, the owner of
//! [`REBALANCER_SLOT`], decides about moves. Out of scope: which member that is (the caller has the shard
//! map), and how the core applies directives.

use reprise_policy::Epoch;

use crate::event::Move;
use crate::quota_grants::SlotOwner;

/// Hash slot whose owner decides which nodes move blocks to which.
pub const REBALANCER_SLOT: u16 = 0;
/// Bits below the part of an epoch that identifies the store.
const STORE_SHIFT: u32 = 32;

/// Filter for the directives of all members.
#[derive(Debug, Default)]
pub struct Directives {
    /// Store in which this node is registered. Changes when the store is replaced.
    store: u64,
    /// Revision of the newest mode from this store.
    mode_revision: Option<u64>,
    /// Modes forwarded to the core, over all stores.
    modes: u64,
    // Move of the last report, if any.
    order: Option<Move>,
}

/// Directives in a member's reply to a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyDirectives {
    /// Revision of the node's mode, if the member knows one.
    pub mode_revision: Option<u64>,
    /// Move of blocks, if any.
    pub order: Option<Move>,
    /// Whether the member owns [`REBALANCER_SLOT`].
    pub from: SlotOwner,
}

/// Directives that the core does not have yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewDirectives {
    /// Number of the mode, which increases with every mode.
    pub mode_number: Option<u64>,
    /// The move, or the end of moves; `None` if nothing changes.
    pub order: Option<Option<Move>>,
}

impl Directives {
    /// Filters the directives in a reply to a report under a registration.
    pub fn receive(&mut self, registration: Epoch, reply: ReplyDirectives) -> NewDirectives {
        let ReplyDirectives { mode_revision, order, from } = reply;
        let mode_number = mode_revision.and_then(|revision| self.number_mode(registration, revision));
        let order = (from == SlotOwner::ThisMember && self.accept_move(order)).then_some(order);
        NewDirectives { mode_number, order }
    }

    /// Returns the number of a mode received under a registration, counted from 1, or `None` if it is not
    /// newer than the last mode. Revisions of different stores are not comparable: an emptied store counts
    /// from the beginning again.
    fn number_mode(&mut self, registration: Epoch, revision: u64) -> Option<u64> {
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

    /// Records the move in a reply of the deciding member; returns whether to forward it to the core. A
    /// repeated move is forwarded again: it grants the same number of bytes once more and holds until the
    /// next report.
    fn accept_move(&mut self, order: Option<Move>) -> bool {
        let is_new = order.is_some() || self.order.is_some();
        self.order = order;
        is_new
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::NodeId;

    use super::*;

    #[test]
    fn accepts_only_newer_revisions_of_a_store() {
        let granted = |store: u64| Epoch((store << STORE_SHIFT) + 7);
        let mut directives = Directives::default();
        assert_eq!(directives.number_mode(granted(3), 40), Some(1));
        assert_eq!(directives.number_mode(granted(3), 40), None);
        assert_eq!(directives.number_mode(granted(3), 39), None);
        assert_eq!(directives.number_mode(granted(3), 41), Some(2));
        assert_eq!(
            directives.number_mode(granted(5), 0),
            Some(3),
            "the store was emptied and has no mode yet"
        );
        assert_eq!(directives.number_mode(granted(5), 0), None);
    }

    #[test]
    fn obeys_the_moves_of_the_deciding_member_only() {
        let mut directives = Directives::default();
        let order = Some(Move { to: NodeId(2), bytes: 100 });
        let reply = |from| ReplyDirectives { mode_revision: None, order, from };
        let none = NewDirectives { mode_number: None, order: None };
        assert_eq!(directives.receive(Epoch(1), reply(SlotOwner::Another)), none);
        let received = directives.receive(Epoch(1), reply(SlotOwner::ThisMember));
        assert_eq!(received, NewDirectives { mode_number: None, order: Some(order) });
        let mode = ReplyDirectives { mode_revision: Some(4), ..reply(SlotOwner::Another) };
        assert_eq!(directives.receive(Epoch(1), mode).mode_number, Some(1), "any member reports the mode");
    }

    #[test]
    fn forwards_every_move_and_the_first_absence_of_one() {
        let mut directives = Directives::default();
        let order = Some(Move { to: NodeId(2), bytes: 100 });
        let forwarded = [None, order, order, None, None].map(|order| directives.accept_move(order));
        assert_eq!(forwarded, [false, true, true, true, false]);
    }
}
