//! Tickets: pending durable notices, one per commit.
//!
//! A ticket counts the commit's items whose blocks are not durable or lost yet. When none remains, one notice
//! reports the number of durable items and the keys of the lost ones. A duplicate item has the outcome of its
//! block.

use reprise_policy::{BlockKey, SessionId};

use crate::agent::AgentCore;
use crate::effect::{Effect, Ticket};
use crate::slab::SlabId;

/// Pending items of one commit.
#[derive(Debug)]
pub(crate) struct TicketState {
    pub(crate) session: SessionId,
    pub(crate) ticket: Ticket,
    /// Number of items that are pending, plus one while the commit is being handled.
    pub(crate) waiting: u32,
    pub(crate) durable: u32,
    pub(crate) lost: Vec<BlockKey>,
}

/// Outcome of a committed item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ItemOutcome {
    Durable,
    Lost,
}

/// Tickets that wait for one block. Nearly always one, which needs no allocation.
#[derive(Debug, Default)]
pub(crate) struct TicketList {
    first: Option<SlabId>,
    more: Vec<SlabId>,
}

impl TicketList {
    pub(crate) fn push(&mut self, ticket: SlabId) {
        if self.first.is_none() {
            self.first = Some(ticket);
        } else {
            self.more.push(ticket);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = SlabId> {
        self.first.into_iter().chain(self.more.iter().copied())
    }
}

impl AgentCore {
    /// Records the outcome of one item in each of these tickets.
    pub(crate) fn end_items(&mut self, tickets: &TicketList, key: BlockKey, end: ItemOutcome) {
        for id in tickets.iter() {
            // The session and its tickets may be gone.
            let Some(ticket) = self.tickets.get_mut(id) else { continue };
            ticket.waiting -= 1;
            match end {
                ItemOutcome::Durable => ticket.durable += 1,
                ItemOutcome::Lost => ticket.lost.push(key),
            }
            self.notify_if_ended(id);
        }
    }

    /// Sends the notice of a ticket without pending items.
    pub(crate) fn notify_if_ended(&mut self, id: SlabId) {
        if self.tickets.get(id).is_none_or(|ticket| ticket.waiting > 0) {
            return;
        }
        let Some(ended) = self.tickets.remove(id) else { return };
        self.counters.durable_items += u64::from(ended.durable);
        self.counters.lost_items += ended.lost.len() as u64;
        if let Some(session) = self.sessions.get_mut(&ended.session) {
            session.tickets.remove(&id);
        }
        let TicketState { session, ticket, durable, lost, .. } = ended;
        self.emit(Effect::Durable { session, ticket, durable, lost });
    }
}
