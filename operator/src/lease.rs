//! Which of the replicas works: the one that holds a Lease.
//!
//! ```text
//! waits ──lease free, or not renewed for LASTS──► holds ──renews every RENEWS──► holds
//!                                                   │
//!                                  another holds it, or no renewal for GIVES_UP ──► the process ends
//! ```
//!
//! Whether a lease was renewed is told by a change of its fields, and how long ago by our own clock: clocks of other machines are not
//! compared. A holder that runs gives up before others take over ([`GIVES_UP`] < [`LASTS`]). Identities are names of pods: no two processes that
//! run have the same.
//!
//! What is not excluded: a process that was stopped, or whose machine was, takes itself for the holder when it wakes, until it looks at the lease
//! again, and what it had sent may arrive late. What such a one does:
//! * Writes that name the version or unique id of what they change (finalizers, statuses of allocations, deletions) are refused when the
//!   object has changed since it was read.
//! * Children, specs of `CacheNode`s, other statuses, modes and budgets are written without one: they may be for a moment what was wanted before. The
//!   holder sees it, by its watch or its next look at the control plane, and puts it right.
//! * A grant of queues cannot be put right, since somebody else may have the same queues by then. So whoever grants asks here right before
//!   ([`Holding`]), and a grant that was on its way before another replica had the lease is refused by what that one does first: see
//!   [`crate::allocation::apply`].
//!
//! The lease belongs to the operator's service account, where that is known: when a release is uninstalled nothing of it is left.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, PostParams};
use kube::core::ObjectMeta;

use crate::clock;
use crate::error::OperatorError;

/// The lease's name.
pub const NAME: &str = "reprise-operator";
/// A lease that was not renewed for so long is free.
pub const LASTS: Duration = Duration::from_secs(15);
/// How often it is renewed, and looked at.
const RENEWS: Duration = Duration::from_secs(3);
/// A holder that could not renew for so long ends.
const GIVES_UP: Duration = Duration::from_secs(10);
/// HTTP's code when somebody else was first.
const CONFLICT: u16 = 409;

/// The service account of the operator's pods.
pub struct Account {
    /// Where it is looked up.
    pub api: Api<ServiceAccount>,
    /// Its name.
    pub name: String,
}

/// Says whether a replica holds the lease, to those who do not renew it.
#[derive(Clone)]
pub struct Holding {
    api: Api<Lease>,
    identity: String,
}

impl Holding {
    /// Of a replica.
    pub fn new(api: Api<Lease>, identity: impl Into<String>) -> Holding {
        Holding { api, identity: identity.into() }
    }

    /// Whether the lease was this replica's when the API server answered, and not more than that. One that has run out and that nobody has
    /// taken yet still is.
    ///
    /// # Errors
    /// It did not answer.
    pub async fn is_ours(&self) -> Result<bool, OperatorError> {
        // Without a version it is read from the store, not from a cache that may be late.
        let found = self.api.get_opt(NAME).await.map_err(OperatorError::api("look at the lease"))?;
        Ok(found.is_some_and(|lease| holder(&lease) == Some(self.identity.as_str())))
    }
}

/// One replica's view of the lease.
pub struct Election {
    api: Api<Lease>,
    identity: String,
    account: Option<Account>,
    /// What was seen last, and since when it is so.
    seen: Option<(LeaseSpec, Instant)>,
}

impl Election {
    /// A replica that holds nothing.
    pub fn new(api: Api<Lease>, identity: impl Into<String>, account: Option<Account>) -> Election {
        Election { api, identity: identity.into(), account, seen: None }
    }

    /// Waits until this replica holds the lease.
    pub async fn won(&mut self) {
        loop {
            match self.try_take().await {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "the lease cannot be looked at"),
            }
            tokio::time::sleep(RENEWS).await;
        }
    }

    /// Renews for ever; ends when the lease is lost.
    pub async fn lost(&mut self) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(RENEWS).await;
            let left = GIVES_UP.saturating_sub(renewed.elapsed());
            match tokio::time::timeout(left, self.try_take()).await {
                Ok(Ok(true)) => renewed = Instant::now(),
                Ok(Ok(false)) => {
                    tracing::error!("another replica holds the lease");
                    return;
                }
                Ok(Err(error)) => tracing::warn!(%error, "the lease cannot be renewed"),
                Err(_) => {
                    tracing::error!("the lease could not be renewed for {GIVES_UP:?}");
                    return;
                }
            }
        }
    }

    /// Gives it up, so that another need not wait.
    ///
    /// # Errors
    /// The API server did not take it; it runs out by itself.
    pub async fn release(&mut self) -> Result<(), OperatorError> {
        let found = self.api.get_opt(NAME).await.map_err(OperatorError::api("look at the lease"))?;
        let Some(mut lease) = found.filter(|lease| holder(lease) == Some(self.identity.as_str())) else {
            return Ok(());
        };
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = None;
        spec.renew_time = Some(clock::now_micro());
        let released = self.api.replace(NAME, &PostParams::default(), &lease).await;
        released.map(|_| ()).map_err(OperatorError::api("release the lease"))
    }

    /// Takes or renews it, if that may be. Whether this replica holds it.
    async fn try_take(&mut self) -> Result<bool, OperatorError> {
        let found = self.api.get_opt(NAME).await.map_err(OperatorError::api("look at the lease"))?;
        let Some(mut lease) = found else {
            let owner_references = self.owner().await.map(|owner| vec![owner]);
            let metadata =
                ObjectMeta { name: Some(NAME.to_owned()), owner_references, ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None)) };
            let made = self.api.create(&PostParams::default(), &lease).await.map(|_| ());
            return or_conflict(made, "make the lease");
        };
        let spec = lease.spec.clone().unwrap_or_default();
        if !self.may_take(&spec, Instant::now()) {
            return Ok(false);
        }
        lease.spec = Some(self.spec(Some(&spec)));
        if lease.metadata.owner_references.is_none() {
            lease.metadata.owner_references = self.owner().await.map(|owner| vec![owner]);
        }
        // With the version that was read: of two that take it at once, one is refused.
        let taken = self.api.replace(NAME, &PostParams::default(), &lease).await.map(|_| ());
        or_conflict(taken, "take the lease")
    }

    /// Whose end is the lease's end. None where nobody can say: then it stays.
    async fn owner(&self) -> Option<OwnerReference> {
        let account = self.account.as_ref()?;
        let found = account.api.get_opt(&account.name).await.ok()??;
        Some(OwnerReference {
            api_version: "v1".to_owned(),
            kind: "ServiceAccount".to_owned(),
            name: account.name.clone(),
            uid: found.metadata.uid?,
            ..OwnerReference::default()
        })
    }

    /// Whether a lease is ours, or free.
    fn may_take(&mut self, spec: &LeaseSpec, now: Instant) -> bool {
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder.is_empty() || holder == self.identity {
            return true;
        }
        match &self.seen {
            Some((seen, since)) if seen == spec => now.duration_since(*since) > LASTS,
            _ => {
                self.seen = Some((spec.clone(), now));
                false
            }
        }
    }

    /// The lease as held by this replica.
    fn spec(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = clock::now_micro();
        let own = before.filter(|before| before.holder_identity.as_deref() == Some(self.identity.as_str()));
        let transitions = before.and_then(|before| before.lease_transitions).unwrap_or_default();
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            acquire_time: own.and_then(|own| own.acquire_time.clone()).or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_duration_seconds: i32::try_from(LASTS.as_secs()).ok(),
            lease_transitions: Some(transitions + i32::from(own.is_none() && before.is_some())),
            ..LeaseSpec::default()
        }
    }
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref()
}

/// Whether it was done; that somebody else was first is no error.
fn or_conflict(outcome: Result<(), kube::Error>, what: &str) -> Result<bool, OperatorError> {
    match outcome {
        Ok(()) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == CONFLICT => Ok(false),
        Err(error) => Err(OperatorError::api(what)(error)),
    }
}
