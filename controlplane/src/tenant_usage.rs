//! Reported usage of the tenants in this member's slots, behind a lock
//! ([`reprise_controlplane_core::UsageTable`]).

use std::sync::{Mutex, MutexGuard, PoisonError};

use reprise_controlplane_core::member_parts::EXPECTED_FOR;
use reprise_controlplane_core::{self as core, KnownNode, MemberPlace, ReportedUsage, UsageSummary};
use reprise_policy::{Epoch, NodeId, TenantName, Tick};

/// The locked usage table of one member.
#[derive(Debug, Default)]
pub struct UsageTable {
    inner: Mutex<core::UsageTable>,
}

impl UsageTable {
    /// Applies a node's report under the map of `place`.
    pub fn report(
        &self,
        now: Tick,
        place: &MemberPlace<'_>,
        node: (NodeId, Epoch),
        usage: Vec<ReportedUsage>,
    ) {
        self.inner().report(now, place, node, usage);
    }

    /// Sums the usage of tenants over the registered nodes.
    pub fn list(
        &self,
        now: Tick,
        place: &MemberPlace<'_>,
        nodes: &[KnownNode],
        tenants: Vec<TenantName>,
    ) -> UsageSummary {
        self.inner().list(now, place, (nodes, EXPECTED_FOR), tenants)
    }

    /// Locks the table. A poisoned lock is usable, because a panic cannot leave a change half applied.
    fn inner(&self) -> MutexGuard<'_, core::UsageTable> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
