//! Leader election: the replica that holds the Lease object reconciles.
//!
//! ```text
//! waiting ──lease is free, or unchanged for `lease_duration`──► holding ──renews every `renew_interval`──► holding
//!                                                                 │
//!                           another replica holds it, or no renewal for `renew_deadline` ──► process exits
//! ```
//!
//! * Clocks of different machines are never compared. A replica sees a renewal as a change of the lease's
//!   fields, and measures the time since the last change with its own monotonic clock.
//! * A running holder stops before others take over (`renew_deadline` < `lease_duration`, [`Timing`]). It
//!   counts from the moment before the request, so a late answer never extends its time. Every attempt has a
//!   timeout.
//! * Identities are pod names, so two running processes never share one.
//! * If the API server rejects a write because the lease changed (409), the holder is still unknown: the
//!   change may be this replica's own write, whose answer was lost. The replica reads the lease again and
//!   decides by its content.
//!
//! A suspended process (SIGSTOP, paused VM) still considers itself the holder when it resumes, until it reads
//! the lease. Requests that it sent earlier may arrive late. The effects are bounded:
//! * Writes with a resource version or unique id (finalizers, statuses of allocations, deletions) are
//!   rejected if the object has changed since it was read.
//! * Children, `CacheNode` specs, other statuses, modes and budgets are written without one. They may hold
//!   outdated values for a moment. The current holder sees that by its watch or its next poll of the control
//!   plane, and corrects it.
//! * A grant of GPU queues cannot be corrected, because the queues may be granted to another pod by then. So
//!   the granting code checks the lease immediately before the write ([`LeaseCheck`]). The first write of a
//!   new holder makes the API server reject grants that are still under way.
//!
//! The lease is owned by the operator's service account if that is known, so uninstalling the release deletes
//! it.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, PostParams};
use kube::core::ObjectMeta;
use tokio::time::Instant;

use crate::framework::clock;
use crate::framework::error::OperatorError;

/// Name of the Lease object.
pub const NAME: &str = "reprise-operator";
/// Reads and writes per attempt. Each repetition means that another writer modified the lease in between.
const TRIES_MAX: usize = 3;
/// HTTP status code: the lease was modified or created by another writer.
const CONFLICT: u16 = 409;

/// Time limits of the election.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time without a renewal after which the lease is free.
    pub lease_duration: Duration,
    /// Interval of renewals, and of polls while waiting.
    pub renew_interval: Duration,
    /// Delay after a failed renewal.
    pub retry_interval: Duration,
    /// Timeout of one attempt. Two attempts fit before the renew deadline.
    pub attempt_timeout: Duration,
    /// Time without a successful renewal after which the holder exits.
    pub renew_deadline: Duration,
}

impl Timing {
    /// The values of every replica. Replicas must agree on them.
    pub const DEFAULT: Timing = Timing {
        lease_duration: Duration::from_secs(15),
        renew_interval: Duration::from_secs(3),
        retry_interval: Duration::from_secs(1),
        attempt_timeout: Duration::from_secs(3),
        renew_deadline: Duration::from_secs(10),
    };
}

/// The service account of the operator's pods. It owns objects that are deleted with the operator.
#[derive(Clone, Debug)]
pub struct Account {
    /// Client for service accounts.
    pub api: Api<ServiceAccount>,
    /// Name of the account.
    pub name: String,
}

impl Account {
    /// Returns the account as the owner of a new object. An object without an owner is never deleted: `None` if the account
    /// cannot be read.
    pub async fn owner(&self) -> Option<OwnerReference> {
        let found = self.api.get_opt(&self.name).await.ok()??;
        Some(OwnerReference {
            api_version: "v1".to_owned(),
            kind: "ServiceAccount".to_owned(),
            name: self.name.clone(),
            uid: found.metadata.uid?,
            ..OwnerReference::default()
        })
    }
}

/// Check whether this replica holds the lease, for code that does not renew it.
#[derive(Clone)]
pub struct LeaseCheck {
    api: Api<Lease>,
    identity: String,
}

impl LeaseCheck {
    /// Creates a check for a replica's identity.
    pub fn new(api: Api<Lease>, identity: impl Into<String>) -> LeaseCheck {
        LeaseCheck { api, identity: identity.into() }
    }

    /// Returns whether this replica held the lease when the API server answered. An expired lease that no
    /// other replica has acquired still counts as held.
    ///
    /// # Errors
    /// The API server did not answer.
    pub async fn is_held(&self) -> Result<bool, OperatorError> {
        // Without a resource version the API server reads from etcd, not from a cache that may lag.
        let found = self.api.get_opt(NAME).await.map_err(OperatorError::api("read the lease"))?;
        Ok(found.is_some_and(|lease| holder(&lease) == Some(self.identity.as_str())))
    }
}

/// One replica's state of the election.
pub struct Election {
    api: Api<Lease>,
    identity: String,
    account: Option<Account>,
    timing: Timing,
    /// The lease as last seen with another holder, and since when it is unchanged.
    seen: Option<(LeaseSpec, Instant)>,
    /// Time before the last successful acquire or renew request, while the lease is held.
    renewed: Option<Instant>,
}

/// Result of one attempt to acquire or renew the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttemptOutcome {
    Held,
    HeldByOther,
    /// Another writer modified the lease between the read and the write.
    Modified,
}

impl Election {
    /// Creates the state of a replica that does not hold the lease.
    pub fn new(api: Api<Lease>, identity: impl Into<String>, account: Option<Account>) -> Election {
        let timing = Timing::DEFAULT;
        Election { api, identity: identity.into(), account, timing, seen: None, renewed: None }
    }

    /// Waits until this replica holds the lease.
    pub async fn acquire(&mut self) {
        loop {
            let begun = Instant::now();
            match self.attempt(self.timing.attempt_timeout).await {
                Ok(AttemptOutcome::Held) => {
                    self.renewed = Some(begun);
                    return;
                }
                Ok(AttemptOutcome::HeldByOther | AttemptOutcome::Modified) => {}
                Err(error) => tracing::warn!(%error, "lease request failed; trying to acquire again"),
            }
            tokio::time::sleep(self.timing.renew_interval).await;
        }
    }

    /// Renews the lease until it is lost. Returns at once if it is not held.
    pub async fn renew_until_lost(&mut self) {
        let mut wait = self.timing.renew_interval;
        while let Some(renewed) = self.renewed {
            let remaining = |timing: Timing| timing.renew_deadline.saturating_sub(renewed.elapsed());
            tokio::time::sleep(wait.min(remaining(self.timing))).await;
            let remaining = remaining(self.timing);
            if remaining.is_zero() {
                tracing::error!("lease not renewed for {:?}", self.timing.renew_deadline);
                self.renewed = None;
                return;
            }
            let begun = Instant::now();
            wait = self.timing.retry_interval;
            match self.attempt(remaining.min(self.timing.attempt_timeout)).await {
                Ok(AttemptOutcome::Held) => {
                    self.renewed = Some(begun);
                    wait = self.timing.renew_interval;
                }
                Ok(AttemptOutcome::HeldByOther) => {
                    tracing::error!("another replica holds the lease");
                    self.renewed = None;
                }
                Ok(AttemptOutcome::Modified) => {
                    tracing::info!("the lease was modified by other writers; renewing again");
                }
                Err(error) => tracing::warn!(%error, "lease request failed; trying to renew again"),
            }
        }
    }

    /// Releases the lease, so that another replica need not wait until it expires.
    ///
    /// # Errors
    /// The API server rejected the write or did not answer. The lease then expires by itself.
    pub async fn release(&mut self) -> Result<(), OperatorError> {
        self.renewed = None;
        let within = self.timing.attempt_timeout;
        tokio::time::timeout(within, self.clear_holder()).await.unwrap_or(Err(OperatorError::Timeout(within)))
    }

    async fn clear_holder(&self) -> Result<(), OperatorError> {
        let found = self.api.get_opt(NAME).await.map_err(OperatorError::api("read the lease"))?;
        let Some(mut lease) = found.filter(|lease| holder(lease) == Some(self.identity.as_str())) else {
            return Ok(());
        };
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = None;
        spec.renew_time = Some(clock::now_micro());
        let released = self.api.replace(NAME, &PostParams::default(), &lease).await;
        released.map(|_| ()).map_err(OperatorError::api("release the lease"))
    }

    /// Acquires or renews the lease if allowed. Retries immediately if another writer modified it meanwhile.
    async fn attempt(&mut self, within: Duration) -> Result<AttemptOutcome, OperatorError> {
        let trying = async {
            for _ in 1..TRIES_MAX {
                match self.try_acquire().await? {
                    AttemptOutcome::Modified => {}
                    known => return Ok(known),
                }
            }
            self.try_acquire().await
        };
        tokio::time::timeout(within, trying).await.unwrap_or(Err(OperatorError::Timeout(within)))
    }

    /// Reads the lease once, and acquires or renews it if allowed.
    async fn try_acquire(&mut self) -> Result<AttemptOutcome, OperatorError> {
        let found = self.api.get_opt(NAME).await.map_err(OperatorError::api("read the lease"))?;
        let Some(mut lease) = found else {
            let owner_references = self.owners().await;
            let metadata =
                ObjectMeta { name: Some(NAME.to_owned()), owner_references, ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None)) };
            let created = self.api.create(&PostParams::default(), &lease).await.map(|_| ());
            return conflict_as_modified(created, "create the lease");
        };
        let spec = lease.spec.clone().unwrap_or_default();
        if !self.may_acquire(&spec, Instant::now()) {
            return Ok(AttemptOutcome::HeldByOther);
        }
        lease.spec = Some(self.spec(Some(&spec)));
        if lease.metadata.owner_references.is_none() {
            lease.metadata.owner_references = self.owners().await;
        }
        // With the resource version that was read, so that only one of two concurrent writers succeeds.
        let replaced = self.api.replace(NAME, &PostParams::default(), &lease).await.map(|_| ());
        conflict_as_modified(replaced, "acquire the lease")
    }

    async fn owners(&self) -> Option<Vec<OwnerReference>> {
        Some(vec![self.account.as_ref()?.owner().await?])
    }

    /// Returns whether this replica may write itself as holder: the lease is its own, or free while it holds
    /// none.
    ///
    /// A holder that finds its lease free has lost it: another replica acquired and released it in between.
    fn may_acquire(&mut self, spec: &LeaseSpec, now: Instant) -> bool {
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder == self.identity {
            return true;
        }
        if self.renewed.is_some() {
            return false;
        }
        if holder.is_empty() {
            return true;
        }
        match &self.seen {
            Some((seen, since)) if seen == spec => now.duration_since(*since) > self.timing.lease_duration,
            _ => {
                self.seen = Some((spec.clone(), now));
                false
            }
        }
    }

    /// Builds the spec of the lease with this replica as holder.
    fn spec(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = clock::now_micro();
        let own = before.filter(|before| before.holder_identity.as_deref() == Some(self.identity.as_str()));
        let transitions = before.and_then(|before| before.lease_transitions).unwrap_or_default();
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            acquire_time: own.and_then(|own| own.acquire_time.clone()).or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_duration_seconds: i32::try_from(self.timing.lease_duration.as_secs()).ok(),
            lease_transitions: Some(transitions + i32::from(own.is_none() && before.is_some())),
            ..LeaseSpec::default()
        }
    }
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref()
}

/// Maps the API server's 409 to [`AttemptOutcome::Modified`].
fn conflict_as_modified(
    outcome: Result<(), kube::Error>,
    what: &str,
) -> Result<AttemptOutcome, OperatorError> {
    match outcome {
        Ok(()) => Ok(AttemptOutcome::Held),
        Err(kube::Error::Api(status)) if status.code == CONFLICT => Ok(AttemptOutcome::Modified),
        Err(error) => Err(OperatorError::api(what)(error)),
    }
}

#[cfg(test)]
mod tests;
