//! What nodes hold of the tenants whose hash slot is this member's, behind a lock ([`reprise_controlplane_core::Holdings`]).

use std::sync::{Mutex, MutexGuard, PoisonError};

use reprise_controlplane_core::{self as core, HeldTogether, KnownNode, OwnPlace, TenantSaid};
use reprise_policy::{Epoch, NodeId, TenantName, Tick};

use crate::cluster::EXPECTED_FOR;

/// See the module.
#[derive(Debug, Default)]
pub struct Holdings {
    inner: Mutex<core::Holdings>,
}

impl Holdings {
    /// A node reports, by the map that `place` is in.
    pub fn report(&self, now: Tick, place: &OwnPlace<'_>, node: (NodeId, Epoch), told: Vec<TenantSaid>) {
        self.inner().report(now, place, node, told);
    }

    /// What these tenants hold on the nodes that are here.
    pub fn list(
        &self,
        now: Tick,
        place: &OwnPlace<'_>,
        nodes: &[KnownNode],
        tenants: Vec<TenantName>,
    ) -> HeldTogether {
        self.inner().list(now, place, (nodes, EXPECTED_FOR), tenants)
    }

    /// Every change leaves the holdings whole, so a poisoned lock is as good as any.
    fn inner(&self) -> MutexGuard<'_, core::Holdings> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
