//! Commits: reserved slots become blocks.
//!
//! After the commit, the block is readable on the node. A commit of a block that exists already releases the
//! slot. A commit of a block that is only being fetched from a peer replaces the fetch, which continues for
//! those that wait for it.
//!
//! The items of a commit are consecutive blocks of a chain, and the commit names the block before them. Each
//! new block therefore enters the eviction orders directly before its parent ([`crate::cache`]).

use reprise_policy::admission::Verdict;
use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, SessionId};

use crate::cache::{Cache, ChainPlace, CommitTarget, Durability, Lease, Save as Saving};
use crate::context::{Caller, Context};
use crate::effect::{CommitStatus, Reply, Ticket};
use crate::event::{CommitItem, CommitRequest, Priority};
use crate::limits::{COMMIT_ITEMS_MAX, TICKETS_PER_SESSION_MAX};
use crate::save::Save;
use crate::save::tickets::{ItemOutcome, TicketState};
use crate::slab::SlabId;

/// Parameters of a commit for one of its blocks.
#[derive(Clone, Copy, Debug)]
struct CommitContext {
    ticket: SlabId,
    priority: Priority,
    place: ChainPlace,
}

impl Save {
    /// Makes filled slots readable, and their blocks durable.
    pub(crate) fn commit(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        caller: Caller,
        commit: &CommitRequest,
    ) {
        let items = &commit.items;
        if items.len() > COMMIT_ITEMS_MAX {
            let text = format!("{} items in one commit: send at most {COMMIT_ITEMS_MAX}", items.len());
            return cx.reply(caller, Reply::BadRequest(text));
        }
        let Some(writer) = self.sessions.get_mut(&caller.session) else { return };
        if writer.tickets.len() >= TICKETS_PER_SESSION_MAX as usize {
            let message = "too many commits wait for their durable notice".to_owned();
            let retry_after = cx.settings.retry_after;
            return cx.reply(caller, Reply::Busy { message, retry_after });
        }
        writer.commits += 1;
        let ticket = Ticket(writer.commits);
        // The extra count is for this call: it delays the notice until after the reply.
        let waiting = TicketState {
            session: caller.session,
            ticket,
            waiting: 1,
            durable: 0,
            lost: Vec::new(),
            is_awaited: false,
        };
        let id = self.tickets.insert(waiting);
        writer.tickets.insert(id);
        self.counters.commits += 1;
        let statuses = items
            .iter()
            .zip(commit.chain())
            .map(|(item, place)| {
                let saved = CommitContext { ticket: id, priority: commit.priority, place };
                self.commit_item(cache, cx, (caller.session, item), saved)
            })
            .collect();
        cx.reply(caller, Reply::Committed { ticket: Some(ticket), statuses });
        let waiting = self.tickets.get_mut(id).expect("it waits for this call");
        waiting.waiting -= 1;
        self.notify_if_ended(cx, id);
    }

    fn commit_item(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        (session, item): (SessionId, &CommitItem),
        saved: CommitContext,
    ) -> CommitStatus {
        let Some(lease) = self.remove_reservation(session, item.lease) else {
            self.counters.refused_items += 1;
            return CommitStatus::NoLease;
        };
        match cache.commit_target(&lease, item) {
            CommitTarget::Invalid => {
                self.counters.refused_items += 1;
                self.free_slot(cache, lease);
                CommitStatus::BadItem
            }
            CommitTarget::Exists(key, entry) => {
                self.free_slot(cache, lease);
                self.commit_duplicate(cache, cx, (key, entry), saved);
                CommitStatus::Duplicate
            }
            CommitTarget::New(key) => {
                self.reserved_bytes -= cache.slot(&lease).bytes;
                self.counters.committed_blocks += 1;
                self.counters.committed_bytes += cache.block_bytes(&lease);
                let (entry, lease) = cache.publish(lease, key, &item.checksums, saved.priority);
                cache.learn_committed(entry, saved.place);
                self.save_or_lose(cache, cx, (key, lease), saved);
                CommitStatus::Committed
            }
        }
    }

    /// Handles a commit of an existing block: the item becomes durable or lost with the block.
    fn commit_duplicate(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        (key, entry): (BlockKey, EntryIndex),
        saved: CommitContext,
    ) {
        self.counters.duplicate_items += 1;
        cache.raise_priority(entry, saved.priority);
        cache.learn_committed(entry, saved.place);
        cache.settle(entry);
        match cache.recommit(entry) {
            Durability::Durable => self.count_item(saved.ticket, key, ItemOutcome::Durable),
            Durability::Unsaved(record) => self.join_unsaved(cache, record, saved.ticket),
            Durability::DramOnly(frame) => {
                let lease = cache.claim(frame);
                self.save_or_lose(cache, cx, (key, lease), saved);
            }
        }
    }

    /// Queues a readable, unstored block for writing. Counts it as lost if it cannot be stored or is not admitted:
    /// the client learns at once that it is in DRAM only.
    fn save_or_lose(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        (key, lease): (BlockKey, Lease<Saving>),
        CommitContext { ticket, .. }: CommitContext,
    ) {
        if !cache.may_be_saved(cache.slot_request(&lease)) {
            cache.report_unsavable(cx, &lease);
        } else if cache.admit(&lease) == Verdict::Admit {
            return self.queue_commit(cache, cx.now, lease, ticket);
        }
        let (entry, _) = cache.not_saved(lease);
        cache.settle(entry);
        self.count_item(ticket, key, ItemOutcome::Lost);
    }
}
