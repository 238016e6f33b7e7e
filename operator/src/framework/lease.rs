//! Leader election: the replica that holds the Lease object reconciles.
//!
//! ```text
//! waiting ──lease is free, or unchanged for LEASE_DURATION──► holding ──renews every RENEW_INTERVAL──► holding
//!                                                               │
//!                           another replica holds it, or no renewal for RENEW_DEADLINE ──► process exits
//! ```
//!
//! * Clocks of different machines are never compared. A replica sees a renewal as a change of the lease's
//!   fields, and measures the time since the last change with its own monotonic clock.
//! * A running holder stops before others take over ([`RENEW_DEADLINE`] < [`LEASE_DURATION`]). It counts from the moment
//!   before the request, so a late answer never extends its time. Every attempt has a timeout.
//! * Identities are pod names, so two running processes never share one.
//! * If the API server rejects a write because the lease changed (409), the holder is still unknown: the
//!   change may be this replica's own write, whose answer was lost. The next attempt reads the lease again.
//!
//! A suspended process (SIGSTOP, paused VM) still considers itself the holder when it resumes. Its late writes are rejected
//! if they have a resource version, or corrected by the current holder. A grant of GPU queues cannot be corrected, so
//! the granting code checks the lease immediately before the write ([`LeaseCheck`]), and the first write of a new holder
//! makes the API server reject grants that are still under way.
//!
//! The operator's service account owns the lease if it is known, so uninstalling the release deletes the lease.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, PostParams};
use tokio::time::Instant;

use crate::framework::clock;
use crate::framework::error::{CONFLICT, OperatorError, within};

/// Name of the Lease object.
pub const NAME: &str = "reprise-operator";

// Replicas must agree on these times.
/// Time without a renewal after which the lease is free.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Interval of renewals, and of polls while waiting.
const RENEW_INTERVAL: Duration = Duration::from_secs(3);
/// Delay after a failed renewal.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of one attempt. Two attempts fit before the renew deadline.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time without a successful renewal after which the holder exits.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);

/// The service account of the operator's pods. It owns objects that are deleted with the operator.
#[derive(Clone, Debug)]
pub struct Account {
    pub api: Api<ServiceAccount>,
    pub name: String,
}

/// Returns the account as the owner of a new object. An object without an owner is never deleted: `None` if there is no
/// account, or it cannot be read.
pub async fn owner(account: Option<&Account>) -> Option<OwnerReference> {
    let account = account?;
    let found = account.api.get_opt(&account.name).await.ok()??;
    Some(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "ServiceAccount".to_owned(),
        name: account.name.clone(),
        uid: found.metadata.uid?,
        ..OwnerReference::default()
    })
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
        let found = read(&self.api).await?;
        Ok(found.is_some_and(|lease| holder(&lease) == Some(self.identity.as_str())))
    }
}

/// One replica's state of the election.
pub struct Election {
    api: Api<Lease>,
    identity: String,
    account: Option<Account>,
    /// The lease as last seen with another holder, and since when it is unchanged.
    seen: Option<(LeaseSpec, Instant)>,
    /// Time before the last successful acquire or renew request, while the lease is held.
    renewed: Option<Instant>,
}

impl Election {
    /// Creates the state of a replica that does not hold the lease.
    pub fn new(api: Api<Lease>, identity: impl Into<String>, account: Option<Account>) -> Election {
        Election { api, identity: identity.into(), account, seen: None, renewed: None }
    }

    /// Waits until this replica holds the lease.
    pub async fn acquire(&mut self) {
        loop {
            let begun = Instant::now();
            match within(ATTEMPT_TIMEOUT, self.try_acquire()).await {
                Ok(true) => {
                    self.renewed = Some(begun);
                    return;
                }
                Ok(false) => {}
                Err(error) => log_failure(&error),
            }
            tokio::time::sleep(RENEW_INTERVAL).await;
        }
    }

    /// Renews the lease until it is lost. Returns at once if it is not held.
    pub async fn renew_until_lost(&mut self) {
        let mut wait = RENEW_INTERVAL;
        while let Some(renewed) = self.renewed {
            let remaining = || RENEW_DEADLINE.saturating_sub(renewed.elapsed());
            tokio::time::sleep(wait.min(remaining())).await;
            if remaining().is_zero() {
                tracing::error!("lease not renewed for {RENEW_DEADLINE:?}");
                self.renewed = None;
                return;
            }
            let begun = Instant::now();
            wait = RETRY_INTERVAL;
            match within(remaining().min(ATTEMPT_TIMEOUT), self.try_acquire()).await {
                Ok(true) => {
                    self.renewed = Some(begun);
                    wait = RENEW_INTERVAL;
                }
                Ok(false) => {
                    tracing::error!("another replica holds the lease");
                    self.renewed = None;
                }
                Err(error) => log_failure(&error),
            }
        }
    }

    /// Releases the lease, so that another replica need not wait until it expires.
    ///
    /// # Errors
    /// The API server rejected the write or did not answer. The lease then expires by itself.
    pub async fn release(&mut self) -> Result<(), OperatorError> {
        self.renewed = None;
        within(ATTEMPT_TIMEOUT, self.clear_holder()).await
    }

    async fn clear_holder(&self) -> Result<(), OperatorError> {
        let Some(mut lease) =
            read(&self.api).await?.filter(|lease| holder(lease) == Some(self.identity.as_str()))
        else {
            return Ok(());
        };
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = None;
        spec.renew_time = Some(clock::now_micro());
        let released = self.api.replace(NAME, &PostParams::default(), &lease).await;
        released.map(|_| ()).map_err(OperatorError::api("release the lease"))
    }

    /// Acquires or renews the lease if allowed. Returns whether this replica holds it.
    async fn try_acquire(&mut self) -> Result<bool, OperatorError> {
        let found = read(&self.api).await?;
        let before = found.as_ref().map(|lease| lease.spec.clone().unwrap_or_default());
        if before.as_ref().is_some_and(|before| !self.may_acquire(before, Instant::now())) {
            return Ok(false);
        }
        let exists = found.is_some();
        let mut lease = found.unwrap_or_default();
        lease.metadata.name = Some(NAME.to_owned());
        lease.spec = Some(self.spec(before.as_ref()));
        if lease.metadata.owner_references.is_none() {
            lease.metadata.owner_references = owner(self.account.as_ref()).await.map(|owner| vec![owner]);
        }
        let params = PostParams::default();
        // With the resource version that was read, so that only one of two concurrent writers succeeds.
        let written = if exists {
            self.api.replace(NAME, &params, &lease).await
        } else {
            self.api.create(&params, &lease).await
        };
        written.map(|_| true).map_err(OperatorError::api("acquire the lease"))
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
            Some((seen, since)) if seen == spec => now.duration_since(*since) > LEASE_DURATION,
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
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            lease_transitions: Some(transitions + i32::from(own.is_none() && before.is_some())),
            ..LeaseSpec::default()
        }
    }
}

async fn read(api: &Api<Lease>) -> Result<Option<Lease>, OperatorError> {
    api.get_opt(NAME).await.map_err(OperatorError::api("read the lease"))
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref()
}

fn log_failure(error: &OperatorError) {
    if error.code() == Some(CONFLICT) {
        tracing::info!("the lease was modified by another writer; trying again");
    } else {
        tracing::warn!(%error, "lease request failed; trying again");
    }
}

#[cfg(test)]
mod tests;
