//! Namespaces of the blocks of a tenant and layout, as far as sessions have saved some.
//!
//! The index has no namespace of a block: a key implies it. The blocks of a tenant and layout are those of one namespace
//! exactly if all sessions that saved some have used it. So a command for a whole namespace is refused otherwise.
//!
//! Blocks that recovery found, or that peers placed here, may be of a namespace in which no session has saved. They count
//! as those of the namespace that a command names.

use std::collections::BTreeMap;

use reprise_policy::{Layout, NamespaceDigest, SessionId, TenantId};

use crate::limits::NAMESPACES_KNOWN_MAX;

/// Namespaces that sessions have named.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    of_session: BTreeMap<SessionId, NamespaceDigest>,
    /// The namespace of each tenant and encoded layout; `None` if there are several.
    saved: BTreeMap<(TenantId, [u8; 16]), Option<NamespaceDigest>>,
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

    /// Records that a session saves blocks.
    pub(crate) fn saved(&mut self, session: SessionId, tenant: TenantId, layout: &Layout) {
        let Some(namespace) = self.of_session.get(&session) else { return };
        let is_full = self.saved.len() >= NAMESPACES_KNOWN_MAX;
        match self.saved.get_mut(&(tenant, layout.encode())) {
            Some(known) if *known != Some(*namespace) => *known = None,
            Some(_) => {}
            // `check` refuses layouts that are not in a full table.
            None if is_full => {}
            None => drop(self.saved.insert((tenant, layout.encode()), Some(*namespace))),
        }
    }

    /// Checks that all blocks of a tenant and layout are those of the namespace of a session.
    ///
    /// # Errors
    /// What differs, and the remedy.
    pub(crate) fn check(
        &self,
        session: SessionId,
        tenant: TenantId,
        layout: &Layout,
    ) -> Result<(), &'static str> {
        match self.saved.get(&(tenant, layout.encode())) {
            Some(None) => {
                Err("sessions of this tenant have saved blocks of this layout in several namespaces, but \
                               blocks name none: select blocks by tokens or keys")
            }
            Some(known) if known.as_ref() != self.of_session.get(&session) => Err(
                "the blocks of this tenant and layout are of another namespace: pass the one that the agent's \
                     status page shows for the engine",
            ),
            None if self.saved.len() >= NAMESPACES_KNOWN_MAX => Err(
                "the node has blocks of too many layouts to know their namespaces: select blocks by tokens or keys",
            ),
            Some(_) | None => Ok(()),
        }
    }
}
