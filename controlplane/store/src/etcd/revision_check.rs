//! Detection of a replaced etcd: revisions must not decrease, and the cluster id must not change.
//!
//! After etcd was restored from a backup or emptied, its revision is lower than before. Continuing would mix
//! two histories, so the first reply that shows it fails with [`StoreError::Replaced`].
//!
//! Reads and transactions are linearizable: a call that starts after a revision was seen gets that revision
//! or a later one. So a reply is compared with the revision known when the call *started*. Watches may report
//! late; their revisions are recorded, but not compared.
//!
//! Not detected: a restored history that has grown beyond all revisions known to this process before its next
//! call, in a cluster of the same id. A restored cluster often keeps its id, because etcd derives it from the
//! names and addresses of the members.

use std::sync::atomic::{AtomicU64, Ordering};

use etcd_client::ResponseHeader;

use super::calls::{revision, unavailable};
use crate::contract::Revision;
use crate::error::StoreError;

/// Highest known revision and id of the cluster.
#[derive(Debug, Default)]
pub(super) struct RevisionCheck {
    /// Highest revision seen.
    revision: AtomicU64,
    /// Id of the cluster; 0 before the first reply.
    cluster: AtomicU64,
}

/// Highest revision known when a call started.
#[derive(Clone, Copy, Debug)]
pub(super) struct RevisionAtStart(Revision);

impl RevisionCheck {
    /// Records the start of a call.
    pub(super) fn begin_call(&self) -> RevisionAtStart {
        RevisionAtStart(Revision(self.revision.load(Ordering::Acquire)))
    }

    /// Checks the header of a reply and returns its revision.
    ///
    /// # Errors
    /// `Replaced`: the cluster id differs, or the revision is lower than at the start of the call.
    pub(super) fn check_answer(
        &self,
        RevisionAtStart(before): RevisionAtStart,
        header: Option<&ResponseHeader>,
    ) -> Result<Revision, StoreError> {
        let header = header.ok_or_else(|| unavailable("etcd sent a reply without a header"))?;
        self.same_cluster(header.cluster_id())?;
        let now = revision(header.revision());
        if now < before {
            let reason = format!("revision {now}, was {before}");
            return Err(StoreError::Replaced { reason });
        }
        self.record(now);
        Ok(now)
    }

    /// Records a revision that a watch reported.
    pub(super) fn record(&self, revision: Revision) {
        self.revision.fetch_max(revision.0, Ordering::AcqRel);
    }

    /// Checks the cluster id, which a proxy may omit.
    fn same_cluster(&self, cluster: u64) -> Result<(), StoreError> {
        if cluster == 0 {
            return Ok(());
        }
        match self.cluster.compare_exchange(0, cluster, Ordering::AcqRel, Ordering::Acquire) {
            Err(known) if known != cluster => {
                Err(StoreError::Replaced { reason: format!("cluster {cluster:x}, was {known:x}") })
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }
}
