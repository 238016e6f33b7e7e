//! Tickets: pending durable notices, one per commit.
//!
//! A ticket counts the commit's items whose blocks are not durable or lost yet. When none remains, one notice
//! reports the number of durable items and the keys of the lost ones. A duplicate item has the outcome of its
//! block.

use std::collections::BTreeSet;

use reprise_policy::{BlockKey, SessionId};

use crate::context::{Caller, Context};
use crate::effect::{Effect, Reply, Ticket};
use crate::save::Save;
use crate::slab::SlabId;

/// Pending items of one commit.
#[derive(Debug)]
pub(super) struct TicketState {
    pub(super) session: SessionId,
    pub(super) ticket: Ticket,
    /// Number of items that are pending, plus one while the commit is being handled.
    pub(super) waiting: u32,
    pub(super) durable: u32,
    pub(super) lost: Vec<BlockKey>,
    /// The client waits for the notice.
    pub(super) is_awaited: bool,
}

/// Outcome of a committed item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ItemOutcome {
    Durable,
    Lost,
}

/// Tickets that wait for one block. Nearly always one, which needs no allocation.
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

impl Save {
    /// Records the outcome of one item in each of these tickets.
    pub(super) fn end_items(
        &mut self,
        cx: &mut Context,
        tickets: &TicketList,
        key: BlockKey,
        end: ItemOutcome,
    ) {
        for id in tickets.iter() {
            // The session and its tickets may be gone.
            let Some(ticket) = self.tickets.get_mut(id) else { continue };
            ticket.waiting -= 1;
            match end {
                ItemOutcome::Durable => ticket.durable += 1,
                ItemOutcome::Lost => ticket.lost.push(key),
            }
            self.notify_if_ended(cx, id);
        }
    }

    /// Records the outcome of an item that is known at the time of the commit.
    pub(super) fn count_item(&mut self, ticket: SlabId, key: BlockKey, end: ItemOutcome) {
        let waiting = self.tickets.get_mut(ticket).expect("it waits for this call");
        match end {
            ItemOutcome::Durable => waiting.durable += 1,
            ItemOutcome::Lost => waiting.lost.push(key),
        }
    }

    /// Counts one more item whose block is not durable yet.
    pub(super) fn await_item(&mut self, ticket: SlabId) {
        self.tickets.get_mut(ticket).expect("it waits for this call").waiting += 1;
    }

    /// Sends the notice of a ticket without pending items.
    pub(super) fn notify_if_ended(&mut self, cx: &mut Context, id: SlabId) {
        if self.tickets.get(id).is_none_or(|ticket| ticket.waiting > 0) {
            return;
        }
        let Some(ended) = self.tickets.remove(id) else { return };
        self.awaited_tickets -= usize::from(ended.is_awaited);
        self.counters.durable_items += u64::from(ended.durable);
        self.counters.lost_items += ended.lost.len() as u64;
        if let Some(writer) = self.sessions.get_mut(&ended.session) {
            writer.tickets.remove(&id);
        }
        let TicketState { session, ticket, durable, lost, .. } = ended;
        cx.emit(Effect::Durable { session, ticket, durable, lost });
    }

    /// Notes that a client waits for the notice of a ticket, so that writes are not deferred; ignores a ticket whose
    /// notice was sent. Costs time in proportion to the session's pending tickets.
    pub(crate) fn await_durable(&mut self, cx: &mut Context, caller: Caller, ticket: Ticket) {
        if let Some(writer) = self.sessions.get(&caller.session) {
            let is_named = |id: &&SlabId| self.tickets.get(**id).is_some_and(|known| known.ticket == ticket);
            if let Some(id) = writer.tickets.iter().rev().find(is_named).copied() {
                let named = self.tickets.get_mut(id).expect("just found");
                self.awaited_tickets += usize::from(!std::mem::replace(&mut named.is_awaited, true));
            }
        }
        cx.reply(caller, Reply::DurableAwaited);
    }

    /// Drops the tickets of a session that has closed.
    pub(super) fn drop_tickets(&mut self, tickets: &BTreeSet<SlabId>) {
        for ticket in tickets {
            let dropped = self.tickets.remove(*ticket);
            self.awaited_tickets -= usize::from(dropped.is_some_and(|ticket| ticket.is_awaited));
        }
    }

    /// Checks that every ticket belongs to an open session.
    pub(super) fn audit_tickets(&self) -> Result<(), String> {
        let listed: usize = self.sessions.values().map(|writer| writer.tickets.len()).sum();
        ensure!(listed == self.tickets.len(), "tickets without a session");
        let awaited = self.tickets.iter().filter(|(_, ticket)| ticket.is_awaited).count();
        ensure!(
            awaited == self.awaited_tickets,
            "{awaited} tickets are awaited, {} counted",
            self.awaited_tickets
        );
        Ok(())
    }
}
