//! Commands on blocks: which blocks they select, and which owner changes them.
//!
//! A command changes blocks of its session's tenant only. It takes time in proportion to the selected blocks: at most
//! one message of keys, the keys that one session lists, or one step over the index.

use reprise_policy::block_command::{
    BlockAction, BlockCommand, BlockCounts, BlockReport, BlockSelection, RETENTION_TTL_MIN,
};
use reprise_policy::eviction::EntryIndex;
use reprise_policy::session::Ranks;
use reprise_policy::{BlockKey, SessionId, Tick};

use crate::cache::{BlockChange, SizeClassId};
use crate::context::Caller;
use crate::core::AgentCore;
use crate::effect::Reply;
use crate::limits::NAMESPACE_STEP_ENTRIES;
use crate::prefetch::RequestedReads;

/// Blocks of a command; without a class, no block of the key's rank is on this node.
type Selected = Vec<(BlockKey, Option<SizeClassId>)>;

impl AgentCore {
    /// Executes a command and answers it.
    pub(super) fn manage(&mut self, caller: Caller, command: BlockCommand) {
        let BlockCommand { action, selection, ranks } = command;
        let selected = self.check_ttl(action).and_then(|()| self.select(caller, action, (selection, ranks)));
        let reply = match selected {
            Err(text) => Reply::BadRequest(text),
            Ok((blocks, next)) => {
                let counts = self.change_all(caller, action, &blocks);
                let tenant = self.cache.tenant_of(caller.size_class);
                let retention = self.retention.usage(&self.cache, &self.settings, tenant);
                Reply::Managed(BlockReport { counts, next, retention })
            }
        };
        context!(self).reply(caller, reply);
    }

    fn check_ttl(&self, action: BlockAction) -> Result<(), String> {
        let (least, most) = (RETENTION_TTL_MIN, self.settings.retention_ttl_max);
        match action {
            BlockAction::Pin { ttl } if !(least..=most).contains(&ttl) => Err(format!(
                "pin: a time of {ttl:?} is invalid: expected {least:?} to {most:?} (retention.ttl_max)"
            )),
            _ => Ok(()),
        }
    }

    /// Returns the selected blocks, and where the next step begins.
    fn select(
        &self,
        caller: Caller,
        action: BlockAction,
        (selection, ranks): (BlockSelection, Ranks),
    ) -> Result<(Selected, Option<u64>), String> {
        let classes = self.cache.rank_classes(caller.size_class, ranks);
        match selection {
            BlockSelection::Keys(keys) if !keys.len().is_multiple_of(classes.ranks()) => {
                let (keys, ranks) = (keys.len(), classes.ranks());
                Err(format!("{keys} keys of {ranks} ranks: expected {ranks} keys for each block"))
            }
            BlockSelection::Keys(keys) => Ok((keys.into_iter().zip(classes.cycle()).collect(), None)),
            BlockSelection::Listed(session) => self.listed(caller, session).map(|blocks| (blocks, None)),
            BlockSelection::Namespace { from } => {
                let classes: Vec<SizeClassId> = classes.cycle().take(classes.ranks()).flatten().collect();
                for class in &classes {
                    let blocks = self.cache.size_class(*class);
                    self.namespaces.check(caller.session, blocks, action)?;
                }
                let places = self.cache.entry_places();
                let first = usize::try_from(from).unwrap_or(places).min(places);
                let index = EntryIndex(u32::try_from(first).unwrap_or(u32::MAX));
                let entries = self.cache.entries_from(index, NAMESPACE_STEP_ENTRIES);
                let blocks = entries
                    .filter(|(_, entry)| classes.contains(&entry.size_class()))
                    .map(|(_, entry)| (entry.key(), Some(entry.size_class())));
                let next = first + NAMESPACE_STEP_ENTRIES;
                Ok((blocks.collect(), (next < places).then_some(next as u64)))
            }
        }
    }

    fn listed(&self, caller: Caller, session: SessionId) -> Result<Selected, String> {
        let tenant = self.cache.tenant_of(caller.size_class);
        // Sessions of other tenants are as unknown as those that have ended.
        let class = self.sessions.get(&session).filter(|class| self.cache.tenant_of(**class) == tenant);
        if class.is_none() {
            let SessionId(session) = session;
            return Err(format!(
                "session {session} of this tenant does not exist: the agent's status page lists the open sessions"
            ));
        }
        Ok(self.prefetch.listed(session).into_iter().map(|(key, class)| (key, Some(class))).collect())
    }

    fn change_all(
        &mut self,
        caller: Caller,
        action: BlockAction,
        blocks: &[(BlockKey, Option<SizeClassId>)],
    ) -> BlockCounts {
        let tenant = self.cache.tenant_of(caller.size_class);
        let mut counts = BlockCounts::default();
        let mut allowance = self.retention.allowance(&self.cache, &self.settings, tenant);
        let mut reads = RequestedReads::new(tenant);
        for (key, class) in blocks {
            let Some(class) = *class else {
                counts.absent += 1;
                continue;
            };
            let block = (*key, class);
            let is_pinned = self.retention.is_pinned(key);
            let (cache, cx) = (&mut self.cache, context!(self));
            let change = match action {
                BlockAction::Pin { ttl } => {
                    let expires: Tick = cx.now.after(ttl);
                    self.retention.pin(cache, cx, block, (expires, &mut allowance))
                }
                BlockAction::Unpin => self.retention.unpin(cache, key, class),
                BlockAction::Prefetch => self.prefetch.request(cache, cx, &mut reads, block),
                BlockAction::Demote | BlockAction::Delete
                    if is_pinned && cache.local_source(key, class).is_some() =>
                {
                    counts.pinned += 1;
                    continue;
                }
                BlockAction::Demote => cache.demote(key, class),
                BlockAction::Delete => {
                    let change = cache.delete(key, class);
                    if matches!(change, BlockChange::Done(_)) {
                        self.prefetch.drop_block(cache, key, class);
                    }
                    change
                }
            };
            count(&mut counts, change);
        }
        let (cache, cx) = (&self.cache, context!(self));
        self.prefetch.start_requested(cache, cx, reads);
        counts
    }
}

fn count(counts: &mut BlockCounts, change: BlockChange) {
    match change {
        BlockChange::Done(bytes) => {
            counts.affected += 1;
            counts.bytes += bytes;
        }
        BlockChange::Unneeded => counts.unchanged += 1,
        BlockChange::Absent => counts.absent += 1,
        BlockChange::InUse => counts.in_use += 1,
        BlockChange::OverLimit => counts.over_limit += 1,
    }
}
