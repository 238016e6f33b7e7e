//! The public tenant in the harness: which contents other tenants may see.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_agent_core::effect::{ArenaSlot, CopyBatch};
use reprise_agent_core::event::{CommitRequest, Event, LoadRequest, PublicKeys, Request, RequestId, Scope};
use reprise_policy::{BlockKey, NodeId, SessionId, TenantId, Tier};

use crate::engine::RequestKind;
use crate::harness::Harness;
use crate::jobs::Job;
use crate::memory::Tag;

/// The tenant that may be declared public. Tests use each key for this tenant or for other ones.
pub(crate) const PUBLIC: TenantId = TenantId(9);

/// Blocks of [`PUBLIC`], and their copies.
#[derive(Debug, Default)]
pub(crate) struct PublicBlocks {
    /// The public tenant, if it is declared.
    pub(crate) tenant: Option<TenantId>,
    /// Keys that the public tenant has saved, here or on a peer.
    pub(crate) keys: BTreeSet<BlockKey>,
    /// Contents that the public tenant has saved.
    pub(crate) contents: BTreeSet<Tag>,
    /// Keys of public blocks that may be copied under a key.
    pub(crate) copied_from: BTreeMap<BlockKey, BTreeSet<BlockKey>>,
}

impl PublicBlocks {
    /// Records a content that a tenant saves.
    pub(crate) fn note_content(&mut self, tenant: TenantId, tag: Tag) {
        if tenant == PUBLIC {
            self.contents.insert(tag);
        }
    }
}

impl Harness {
    /// Puts a block of the public tenant on a peer.
    pub(crate) fn add_public_replica(&mut self, node: NodeId, key: BlockKey, tier: Tier) {
        self.public.keys.insert(key);
        self.add_peer_replica(node, key, tier);
        let (tag, _) = self.peers.held[&node][&key];
        self.public.note_content(PUBLIC, tag);
    }

    /// Starts copies within the arena.
    pub(crate) fn begin_copies(&mut self, CopyBatch { tenant, layout, blocks }: CopyBatch) {
        assert_ne!(tenant, PUBLIC, "blocks are copied for other tenants");
        for copy in blocks {
            self.assert_unused(copy.into);
            self.jobs.push(Job::Copy { copy, layout });
        }
    }

    /// Slots that are being copied.
    pub(crate) fn copy_sources(&self) -> impl Iterator<Item = ArenaSlot> {
        self.jobs.iter().filter_map(|job| match job {
            Job::Copy { copy, .. } => Some(copy.from),
            _ => None,
        })
    }

    /// Latest content that was committed or copied under a key.
    pub(crate) fn last_tag(&self, key: &BlockKey) -> Tag {
        let sources = self.public.copied_from.get(key).into_iter().flatten();
        let mut tags = std::iter::once(key).chain(sources).filter_map(|key| self.committed_tags.get(key));
        *tags.find_map(|tags| tags.last()).expect("only committed and copied blocks are offered")
    }

    /// Records keys that a session commits, and public blocks that a load may copy.
    pub(crate) fn note_keys(&mut self, session: SessionId, body: &Request) {
        match body {
            Request::Commit(CommitRequest { items, .. }) => {
                let keys = items.iter().filter_map(|item| item.key);
                if self.engines[&session].tenant == PUBLIC {
                    self.public.keys.extend(keys.clone());
                }
                self.committed.extend(keys);
            }
            Request::Load(LoadRequest { keys, public: Some(public), .. })
                if self.public.tenant == Some(public.tenant) =>
            {
                for (key, of_public) in keys.iter().zip(&public.keys) {
                    self.public.copied_from.entry(*key).or_default().insert(*of_public);
                }
            }
            _ => {}
        }
    }

    /// Whether the content is that of a block of a public tenant that a load has named for this key.
    pub(crate) fn may_be_copy(&self, key: &BlockKey, tag: Tag) -> bool {
        let mut sources = self.public.copied_from.get(key).into_iter().flatten();
        self.public.contents.contains(&tag)
            && sources.any(|source| self.committed_tags.get(source).is_some_and(|tags| tags.contains(&tag)))
    }

    /// Declares the tenant whose blocks all tenants may copy.
    pub(crate) fn declare_public(&mut self, tenant: Option<TenantId>) {
        assert!(tenant.is_none_or(|tenant| tenant == PUBLIC), "the harness knows one public tenant");
        self.public.tenant = tenant;
        self.apply(Event::PublicTenant(tenant));
    }

    /// Loads blocks, or copies them from those of a tenant that have these keys.
    pub(crate) fn load_public(
        &mut self,
        session: SessionId,
        keys: &[BlockKey],
        public: PublicKeys,
        scope: Scope,
    ) -> RequestId {
        let answer_by = self.now.after(self.setup.settings.load_deadline_default);
        let kind = RequestKind::Load { keys: keys.to_vec(), answer_by };
        let (keys, deadline, public) = (keys.to_vec(), Duration::ZERO, Some(public));
        let body = Request::Load(LoadRequest { keys, deadline, read_bytes: 0, scope, public });
        self.request(session, kind, body)
    }
}
