//! That etcd goes on where it was: its revisions only rise, and its cluster stays the same.
//!
//! An etcd that is restored from a backup, or emptied, is behind what it has said. Whoever goes on with what it knows from
//! before mixes two histories, so every call that shows it ends in [`StoreError::Replaced`].
//!
//! Reads and transactions are linearizable: whatever begins after something was seen at a revision is answered at that revision
//! or a later one. So an answer is compared with what had been seen when its call *began*. Watches tell what was committed, maybe
//! late, and are not compared themselves.
//!
//! Not noticed: a history that has grown past all that this process had seen, before its first call to it, in a cluster of the
//! same identity (etcd computes that from the names and addresses of its members, so that a restored one often has it).

use std::sync::atomic::{AtomicU64, Ordering};

use etcd_client::ResponseHeader;

use super::calls::{revision, unavailable};
use crate::contract::Revision;
use crate::error::StoreError;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct History {
    /// The highest revision that was seen.
    revision: AtomicU64,
    /// The identity of the cluster; 0 before the first answer.
    cluster: AtomicU64,
}

/// What had been seen when a call began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Before(Revision);

impl History {
    /// For a call that begins now.
    pub(super) fn before(&self) -> Before {
        Before(Revision(self.revision.load(Ordering::Acquire)))
    }

    /// The revision of an answer.
    ///
    /// # Errors
    /// `Replaced`: it is of another history than what was seen before.
    pub(super) fn answered(
        &self,
        Before(before): Before,
        header: Option<&ResponseHeader>,
    ) -> Result<Revision, StoreError> {
        let header = header.ok_or_else(|| unavailable("an answer without a header"))?;
        self.same_cluster(header.cluster_id())?;
        let now = revision(header.revision());
        if now < before {
            let reason = format!("it is at revision {now} and was at {before}");
            return Err(StoreError::Replaced { reason });
        }
        self.seen(now);
        Ok(now)
    }

    /// A watch has told what was committed at this revision.
    pub(super) fn seen(&self, revision: Revision) {
        self.revision.fetch_max(revision.0, Ordering::AcqRel);
    }

    /// A proxy may leave the identity out.
    fn same_cluster(&self, cluster: u64) -> Result<(), StoreError> {
        if cluster == 0 {
            return Ok(());
        }
        match self.cluster.compare_exchange(0, cluster, Ordering::AcqRel, Ordering::Acquire) {
            Err(known) if known != cluster => {
                Err(StoreError::Replaced { reason: format!("it is cluster {cluster:x} and was {known:x}") })
            }
            Ok(_) | Err(_) => Ok(()),
        }
    }
}
