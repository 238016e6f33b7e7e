//! Tickets: what a session was promised to be told about the blocks of one commit.
//!
//! A ticket counts the items whose blocks are still on their way to a device. When none is left, one notice says
//! how many items are durable and which keys are not. An item that was a duplicate counts like its block.

use reprise_policy::{BlockKey, SessionId};

use super::AgentCore;
use super::slab::SlabId;
use crate::effect::{Effect, Ticket};

/// One commit's items on their way.
#[derive(Debug)]
pub(super) struct TicketState {
    pub(super) session: SessionId,
    pub(super) ticket: Ticket,
    /// Items whose block is not durable yet, plus one while the commit is being handled.
    pub(super) waiting: u32,
    pub(super) durable: u32,
    pub(super) lost: Vec<BlockKey>,
}

/// How an item ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ItemEnd {
    Durable,
    Lost,
}

/// Tickets that wait for one block. Nearly always there is one, so it needs no allocation.
#[derive(Debug, Default)]
pub(super) struct TicketList {
    first: Option<SlabId>,
    more: Vec<SlabId>,
}

impl TicketList {
    pub(super) fn push(&mut self, ticket: SlabId) {
        if self.first.is_none() {
            self.first = Some(ticket);
        } else {
            self.more.push(ticket);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = SlabId> {
        self.first.into_iter().chain(self.more.iter().copied())
    }
}

impl AgentCore {
    /// One item of each of these tickets has come to its end.
    pub(super) fn end_items(&mut self, tickets: &TicketList, key: BlockKey, end: ItemEnd) {
        for id in tickets.iter() {
            // The session may have gone, and its tickets with it.
            let Some(ticket) = self.tickets.get_mut(id) else { continue };
            ticket.waiting -= 1;
            match end {
                ItemEnd::Durable => ticket.durable += 1,
                ItemEnd::Lost => ticket.lost.push(key),
            }
            self.notify_if_ended(id);
        }
    }

    /// Tells the session when nothing of a ticket is on its way any more.
    pub(super) fn notify_if_ended(&mut self, id: SlabId) {
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
