//! Which of the replicas works: the one that holds a Lease.
//!
//! ```text
//! waits ──lease free, or not renewed for `lasts`──► holds ──renews every `renews`──► holds
//!                                                     │
//!                                    another holds it, or no renewal for `gives_up` ──► the process ends
//! ```
//!
//! Whether a lease was renewed is told by a change of its fields, and how long ago by our own clock: clocks of other machines are not
//! compared. A holder that runs gives up before others take over (`gives_up` < `lasts`, [`Pace`]), and counts from before it asked: an answer that
//! comes late makes nobody a holder for longer. So no request is waited for without a bound. Identities are names of pods: no two processes that
//! run have the same.
//!
//! A write that the API server refuses since the lease has changed (409) says nothing about who holds it: it may be our own write, of which the
//! answer was lost. It is read again, and what is there decides.
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
/// Reads and writes of one attempt, at the most: each time somebody else has written in between.
const TRIES_MAX: usize = 3;
/// HTTP's code when somebody else was first.
const CONFLICT: u16 = 409;

/// Times of an election.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// A lease that was not renewed for so long is free.
    pub lasts: Duration,
    /// How often it is renewed, and looked at.
    pub renews: Duration,
    /// After an attempt that failed the next one comes so soon.
    pub retries: Duration,
    /// An attempt that takes longer has failed. Two fit in before a holder gives up.
    pub answers: Duration,
    /// A holder that could not renew for so long ends.
    pub gives_up: Duration,
}

impl Pace {
    /// Of every replica: they must agree.
    pub const OURS: Pace = Pace {
        lasts: Duration::from_secs(15),
        renews: Duration::from_secs(3),
        retries: Duration::from_secs(1),
        answers: Duration::from_secs(3),
        gives_up: Duration::from_secs(10),
    };
}

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
    pace: Pace,
    /// What was seen last, and since when it is so.
    seen: Option<(LeaseSpec, Instant)>,
    /// Before the request that took or renewed it last, while it is held.
    renewed: Option<Instant>,
}

/// Whose the lease is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    Ours,
    Theirs,
    /// Somebody has written between our read and our write.
    Outdated,
}

impl Election {
    /// A replica that holds nothing.
    pub fn new(api: Api<Lease>, identity: impl Into<String>, account: Option<Account>) -> Election {
        Election { api, identity: identity.into(), account, pace: Pace::OURS, seen: None, renewed: None }
    }

    /// Waits until this replica holds the lease.
    pub async fn won(&mut self) {
        loop {
            let begun = Instant::now();
            match self.attempt(self.pace.answers).await {
                Ok(Claim::Ours) => {
                    self.renewed = Some(begun);
                    return;
                }
                Ok(Claim::Theirs | Claim::Outdated) => {}
                Err(error) => tracing::warn!(%error, "the lease cannot be looked at"),
            }
            tokio::time::sleep(self.pace.renews).await;
        }
    }

    /// Renews for ever; ends when the lease is lost, at once when it is not held.
    pub async fn lost(&mut self) {
        let mut wait = self.pace.renews;
        while let Some(renewed) = self.renewed {
            let left = |pace: Pace| pace.gives_up.saturating_sub(renewed.elapsed());
            tokio::time::sleep(wait.min(left(self.pace))).await;
            let left = left(self.pace);
            if left.is_zero() {
                tracing::error!("the lease could not be renewed for {:?}", self.pace.gives_up);
                self.renewed = None;
                return;
            }
            let begun = Instant::now();
            wait = self.pace.retries;
            match self.attempt(left.min(self.pace.answers)).await {
                Ok(Claim::Ours) => {
                    self.renewed = Some(begun);
                    wait = self.pace.renews;
                }
                Ok(Claim::Theirs) => {
                    tracing::error!("another replica holds the lease");
                    self.renewed = None;
                }
                Ok(Claim::Outdated) => {
                    tracing::info!("the lease changes all the time; it is renewed again soon");
                }
                Err(error) => tracing::warn!(%error, "the lease cannot be renewed"),
            }
        }
    }

    /// Gives it up, so that another need not wait.
    ///
    /// # Errors
    /// The API server did not take it; it runs out by itself.
    pub async fn release(&mut self) -> Result<(), OperatorError> {
        self.renewed = None;
        let within = self.pace.answers;
        tokio::time::timeout(within, self.give_up()).await.unwrap_or(Err(OperatorError::Late(within)))
    }

    async fn give_up(&self) -> Result<(), OperatorError> {
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

    /// Takes or renews it, if that may be; what is refused since it is outdated is read again.
    async fn attempt(&mut self, within: Duration) -> Result<Claim, OperatorError> {
        let trying = async {
            for _ in 1..TRIES_MAX {
                match self.try_take().await? {
                    Claim::Outdated => {}
                    known => return Ok(known),
                }
            }
            self.try_take().await
        };
        tokio::time::timeout(within, trying).await.unwrap_or(Err(OperatorError::Late(within)))
    }

    /// Reads it, and takes or renews it if that may be.
    async fn try_take(&mut self) -> Result<Claim, OperatorError> {
        let found = self.api.get_opt(NAME).await.map_err(OperatorError::api("look at the lease"))?;
        let Some(mut lease) = found else {
            let owner_references = self.owner().await.map(|owner| vec![owner]);
            let metadata =
                ObjectMeta { name: Some(NAME.to_owned()), owner_references, ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None)) };
            let made = self.api.create(&PostParams::default(), &lease).await.map(|_| ());
            return or_outdated(made, "make the lease");
        };
        let spec = lease.spec.clone().unwrap_or_default();
        if !self.may_take(&spec, Instant::now()) {
            return Ok(Claim::Theirs);
        }
        lease.spec = Some(self.spec(Some(&spec)));
        if lease.metadata.owner_references.is_none() {
            lease.metadata.owner_references = self.owner().await.map(|owner| vec![owner]);
        }
        // With the version that was read: of two that take it at once, one is refused.
        let taken = self.api.replace(NAME, &PostParams::default(), &lease).await.map(|_| ());
        or_outdated(taken, "take the lease")
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

    /// Whether a lease is ours, or free and we hold none: who had it, and finds it free, has been followed by somebody who has given it up.
    fn may_take(&mut self, spec: &LeaseSpec, now: Instant) -> bool {
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
            Some((seen, since)) if seen == spec => now.duration_since(*since) > self.pace.lasts,
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
            lease_duration_seconds: i32::try_from(self.pace.lasts.as_secs()).ok(),
            lease_transitions: Some(transitions + i32::from(own.is_none() && before.is_some())),
            ..LeaseSpec::default()
        }
    }
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref()
}

/// That somebody else was first is no error.
fn or_outdated(outcome: Result<(), kube::Error>, what: &str) -> Result<Claim, OperatorError> {
    match outcome {
        Ok(()) => Ok(Claim::Ours),
        Err(kube::Error::Api(status)) if status.code == CONFLICT => Ok(Claim::Outdated),
        Err(error) => Err(OperatorError::api(what)(error)),
    }
}

#[cfg(test)]
mod tests;
