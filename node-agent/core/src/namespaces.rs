//! Namespaces of the blocks of a tenant and layout, as far as sessions have saved or loaded some.
//!
//! The index has no namespace of a block: a key implies it. The blocks of a tenant and layout are those of one namespace
//! exactly if all sessions that saved or loaded some have used it, and no block has come in another way. So a command for a
//! whole namespace is refused otherwise. A session that only opens adds no namespace, because it brings no block: a command
//! with a wrong namespace must not make those with the right one ambiguous.
//!
//! Blocks that recovery found, or that peers placed here, may be of any namespace. Commands that remove copies are refused
//! while the tenant and layout have such blocks.

use std::collections::BTreeMap;

use reprise_policy::block_command::BlockAction;
use reprise_policy::{NamespaceDigest, SessionId, TenantId};

use crate::cache::SizeClass;
use crate::limits::NAMESPACES_KNOWN_MAX;

/// Namespaces that sessions have named.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    of_session: BTreeMap<SessionId, NamespaceDigest>,
    /// The namespace of each tenant and encoded layout; `None` if there are several.
    used: BTreeMap<(TenantId, [u8; 16]), Option<NamespaceDigest>>,
}

impl Namespaces {
    /// Adds an open session.
    pub(crate) fn open(&mut self, session: SessionId, namespace: NamespaceDigest) {
        self.of_session.insert(session, namespace);
    }

    /// Removes a session that has ended.
    pub(crate) fn close(&mut self, session: SessionId) {
        self.of_session.remove(&session);
    }

    /// Records that a session saves or loads blocks.
    pub(crate) fn used(&mut self, session: SessionId, blocks: &SizeClass) {
        let Some(namespace) = self.of_session.get(&session) else { return };
        let is_full = self.used.len() >= NAMESPACES_KNOWN_MAX;
        let of = (blocks.tenant, blocks.layout.encode());
        match self.used.get_mut(&of) {
            Some(known) if *known != Some(*namespace) => *known = None,
            Some(_) => {}
            // `check` refuses layouts that are not in a full table.
            None if is_full => {}
            None => drop(self.used.insert(of, Some(*namespace))),
        }
    }

    /// Checks that all blocks of a size class are those of the namespace of a session, as far as sessions have brought
    /// them; for commands that remove copies, also that no block has come in another way.
    ///
    /// # Errors
    /// What differs, and the remedy.
    pub(crate) fn check(
        &self,
        session: SessionId,
        blocks: &SizeClass,
        action: BlockAction,
    ) -> Result<(), &'static str> {
        let removes_copies = matches!(action, BlockAction::Demote | BlockAction::Delete);
        match self.used.get(&(blocks.tenant, blocks.layout.encode())) {
            Some(None) => {
                Err("sessions of this tenant have saved or loaded blocks of this layout in several \
                               namespaces, but blocks name none: select blocks by tokens, keys or session")
            }
            Some(known) if known.as_ref() != self.of_session.get(&session) => Err(
                "the blocks of this tenant and layout are of another namespace: pass the one that the agent's \
                     status page shows for the engine",
            ),
            None if self.used.len() >= NAMESPACES_KNOWN_MAX => Err(
                "the node has blocks of too many layouts to know their namespaces: select blocks by tokens or keys",
            ),
            Some(_) | None if removes_copies && blocks.has_blocks_from_elsewhere() => Err(
                "the node has found blocks of this tenant and layout on a device when it started, or peers have placed \
                     some here: they may be of any namespace, because blocks name none. Select blocks by tokens, keys \
                     or session",
            ),
            Some(_) | None => Ok(()),
        }
    }
}
