//! Simulated client that names the place of its blocks in their chain.

use reprise_agent_core::event::{CommitItem, CommitRequest, Priority, Ranks, Request, RequestId, Scope};
use reprise_policy::{BlockKey, SessionId};

use crate::engine::RequestKind;
use crate::harness::Harness;
use crate::memory::checksums;

impl Harness {
    /// Like `commit`, with the block before the first one in the chain. Without it, the chain begins with the first one.
    pub(crate) fn commit_after(
        &mut self,
        session: SessionId,
        keys: &[BlockKey],
        priority: Priority,
        parent: Option<BlockKey>,
    ) -> RequestId {
        let position = parent.is_none().then_some(0);
        self.commit_at(session, keys, priority, (parent, position))
    }

    /// Like `commit`, with the place of the first block in its chain.
    pub(crate) fn commit_at(
        &mut self,
        session: SessionId,
        keys: &[BlockKey],
        priority: Priority,
        (parent, position): (Option<BlockKey>, Option<u32>),
    ) -> RequestId {
        let engine = self.engines.get_mut(&session).expect("an open session");
        let (layout, tenant) = (engine.layout, engine.tenant);
        let slots: Vec<_> = engine.reserved.drain(..keys.len().min(engine.reserved.len())).collect();
        let mut items = Vec::new();
        for ((lease, slot), key) in slots.into_iter().zip(keys) {
            let tag = self.new_tag(*key);
            self.public.note_content(tenant, tag);
            self.memory.write(slot, &layout, 0..layout.layers(), tag);
            items.push(CommitItem { lease, key: Some(*key), checksums: checksums(tag, &layout) });
        }
        let committed = keys[..items.len()].to_vec();
        self.request(
            session,
            RequestKind::Commit(committed),
            Request::Commit(CommitRequest { items, priority, parent, position }),
        )
    }

    /// Like `match_keys`, with the number of blocks before the first one in its chain.
    pub(crate) fn match_at(
        &mut self,
        session: SessionId,
        keys: &[BlockKey],
        position: Option<u32>,
        scope: Scope,
    ) -> RequestId {
        let body = Request::Match { keys: keys.to_vec(), ranks: Ranks::Own, position, scope, public: None };
        self.request(session, RequestKind::Match(keys.to_vec(), scope), body)
    }
}
