//! Blocks that a command reads ahead, without a hint.
//!
//! They take the same reserve and the same rank at their device as blocks of hints, and count as one more session of
//! their tenant. No plan limits them: their number is that of one command, and other reads come first. Each command is
//! one request, whose blocks stay staged for `PREFETCH_REQUESTED_MAX`. Then they are blocks of the cache like all others.

use reprise_policy::{BlockKey, SessionId};

use crate::cache::{AheadCopy, BlockChange, Cache, LocalBlock, SizeClassId, TenantIndex};
use crate::context::Context;
use crate::limits::PREFETCH_REQUESTED_MAX;
use crate::prefetch::pass::ReadsOfClass;
use crate::prefetch::requests::{Hinted, ListedBlock, Phase, Wanted};
use crate::prefetch::staged::StagedBlock;
use crate::prefetch::{Ending, Prefetch};

/// A command that reads blocks ahead, while it is being handled.
#[derive(Debug)]
pub(crate) struct RequestedReads {
    tenant: TenantIndex,
    wanted: Wanted,
    reads: Vec<ReadsOfClass>,
}

impl RequestedReads {
    /// Begins a command of a tenant.
    pub(crate) fn new(tenant: TenantIndex) -> RequestedReads {
        let mut wanted = Wanted::new(1, 1, 0);
        wanted.phase = Phase::Left;
        RequestedReads { tenant, wanted, reads: Vec::new() }
    }
}

impl Prefetch {
    /// Adds a block to a command.
    pub(crate) fn request(
        &mut self,
        cache: &Cache,
        cx: &Context,
        requested: &mut RequestedReads,
        (key, class): (BlockKey, SizeClassId),
    ) -> BlockChange {
        let entry = match cache.ahead_copy(&key, class) {
            AheadCopy::Absent => return BlockChange::Absent,
            AheadCopy::InDram | AheadCopy::Filling => return BlockChange::Unneeded,
            AheadCopy::OnDevice(_, entry) => entry,
        };
        if self.staged.find(&key, class).is_some() {
            // Its read has failed; a hint tries it again.
            return BlockChange::InUse;
        }
        let bytes = cache.slot_bytes(class);
        let session = session_of(requested.tenant);
        let keys = self.sessions.get(&session).map_or(0, |hinted| hinted.keys) + requested.wanted.keys();
        if keys >= cx.settings.prefetch.session_keys
            || bytes > self.free_reserve(cache, &cx.settings.prefetch, (session, requested.tenant))
        {
            return BlockChange::OverLimit;
        }
        let id = self.staged.insert(StagedBlock::requested(cache, (key, class), session));
        requested.wanted.blocks.push(ListedBlock { key, class, staged: Some(id) });
        let block = (id.slot(), LocalBlock::Stored(entry));
        match requested.reads.iter_mut().find(|(other, _)| *other == class) {
            Some((_, of_class)) => of_class.push(block),
            None => requested.reads.push((class, vec![block])),
        }
        self.counters.prefetch_requested_blocks += 1;
        BlockChange::Done(bytes)
    }

    /// Removes the state of a tenant's commands after the last one has ended.
    pub(super) fn forget_requested(&mut self, session: SessionId) {
        let is_over = |hinted: &Hinted| hinted.requests.is_empty();
        if session >= session_of(TenantIndex(u16::MAX)) && self.sessions.get(&session).is_some_and(is_over) {
            self.sessions.remove(&session);
        }
    }

    /// Starts the reads of a command.
    pub(crate) fn start_requested(&mut self, cache: &Cache, cx: &Context, requested: RequestedReads) {
        let RequestedReads { tenant, mut wanted, reads } = requested;
        if wanted.blocks.is_empty() {
            return;
        }
        let session = session_of(tenant);
        let hinted = self.sessions.entry(session).or_default();
        hinted.hints += 1;
        let number = hinted.hints;
        hinted.keys += wanted.keys();
        let due = cx.now.after(PREFETCH_REQUESTED_MAX);
        wanted.due = Some(due);
        hinted.requests.insert(number, wanted);
        self.timers.set(due, (session, number));
        self.fetch(cache, cx, reads);
    }

    /// Ends the lease of a block that is about to be removed from the cache.
    pub(crate) fn drop_block(&mut self, cache: &mut Cache, key: &BlockKey, class: SizeClassId) {
        if let Some(id) = self.staged.find(key, class)
            && let Some(block) = self.staged.remove(id)
        {
            self.end(cache, id, block, Ending::Wasted);
        }
    }

    /// Blocks that the requests of a session list, each once.
    pub(crate) fn listed(&self, session: SessionId) -> Vec<(BlockKey, SizeClassId)> {
        let Some(hinted) = self.sessions.get(&session) else { return Vec::new() };
        let mut listed = Vec::with_capacity(hinted.keys);
        for wanted in hinted.requests.values() {
            listed.extend(wanted.blocks.iter().map(|block| (block.key, block.class)));
            listed.extend(wanted.pending.iter().flat_map(|pending| pending.keys.iter().copied()));
        }
        listed.sort_unstable_by_key(|(key, _)| *key);
        listed.dedup_by_key(|(key, _)| *key);
        listed
    }
}

/// Number under which the reads of a tenant's commands are charged; no session has it.
fn session_of(TenantIndex(tenant): TenantIndex) -> SessionId {
    SessionId(u64::MAX - u64::from(tenant))
}
