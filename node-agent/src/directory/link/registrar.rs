//! The registrar of a link, which owns the link's state.
//!
//! ```text
//!   register (backoff) ──► granted ──► heartbeats answered ⇄ failing       up ⇄ down
//!        ▲                                   │
//!        ├── registration unknown, fenced ───┤                            down
//!        └── failure domain changed ─────────┘                            stays up
//! ```
//!
//! While heartbeats fail, the registration and the queued changes are kept: a member that returns before it
//! has removed this node needs no new inventory.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reprise_agent_core::backoff::Backoff;
use reprise_policy::{Epoch, NodeId};
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{RegisterReply, RegisterRequest};
use tokio::time::{sleep, timeout};
use tonic::Status;
use tonic::transport::Channel;

use super::super::members::jitter;
use super::super::{DirectoryEvent, Shared};
use super::{GrantedRegistration, HeartbeatState, Link, LinkState, within};

/// Log condition for a member that does not register this node.
const NOT_REGISTERED: &str = "not_registered";

/// A registration that is lost sooner is renewed with increasing delays. Otherwise two agents with one name
/// would replace each other's registration continuously.
const STABLE_AFTER: Duration = Duration::from_secs(5);
/// Nodes register a changed failure domain within this time.
const REPLACED_WITHIN: Duration = Duration::from_secs(3);
/// Accepted range of the heartbeat period requested by the control plane.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);

/// Why a registration is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RegistrationEnd {
    /// The member does not know the registration.
    Unknown,
    /// A newer registration has replaced it.
    Fenced,
    /// It is valid, but has another failure domain than the node.
    Outdated,
}

impl RegistrationEnd {
    fn reason(self) -> &'static str {
        match self {
            RegistrationEnd::Unknown => "the member does not know the registration",
            RegistrationEnd::Fenced => "a newer registration has replaced it",
            RegistrationEnd::Outdated => "the node's failure domain has changed",
        }
    }
}

impl Link {
    /// Registers, and registers again whenever the registration is lost or outdated.
    pub(super) async fn register(&self, shared: &Shared) {
        let mut client = MembershipClient::new(self.channel.clone());
        let mut backoff = Backoff::default();
        let mut replacement = None;
        loop {
            let (granted, failure_domain) = match replacement.take() {
                Some(replacement) => replacement,
                None => self.register_once(shared, &mut client).await,
            };
            let GrantedRegistration { node, epoch, .. } = granted;
            shared.counters.registrations.fetch_add(1, Ordering::Relaxed);
            self.outbox().register(node, epoch);
            self.beats.send_replace(HeartbeatState::Answered);
            self.granted.send_replace(Some(granted));
            shared.emit(DirectoryEvent::Registered { member: self.name.to_string(), node, epoch });
            self.set_up(shared, LinkState::Yes);
            self.outbox_changed.notify_one();
            let since = Instant::now();
            let mut end = self.keep(shared, granted, Some(&failure_domain)).await;
            if end == RegistrationEnd::Outdated {
                tracing::info!(member = %self.name, node = node.0, epoch = epoch.0, reason = end.reason(), "registering again");
                // The present registration stays valid until the next one replaces it, or until it ends.
                let mut next = Box::pin(self.replace(shared, &mut client, since));
                let replaced = tokio::select! {
                    replaced = &mut next => Some(replaced),
                    lost = self.keep(shared, granted, None) => {
                        end = lost;
                        // Usually the member has granted the next one, and its reply is on the way.
                        timeout(shared.settings.call_timeout, &mut next).await.ok()
                    }
                };
                if replaced.is_some() {
                    replacement = replaced;
                    continue;
                }
            }
            let reason = end.reason();
            tracing::info!(member = %self.name, node = node.0, epoch = epoch.0, reason, "registering again");
            self.granted.send_replace(None);
            self.outbox().unregister();
            self.set_up(shared, LinkState::No);
            if since.elapsed() >= STABLE_AFTER {
                backoff.reset();
            } else {
                sleep(backoff.next(jitter())).await;
            }
        }
    }

    /// Retries until the member grants a registration. Returns it with the registered failure domain.
    async fn register_once(
        &self,
        shared: &Shared,
        client: &mut MembershipClient<Channel>,
    ) -> (GrantedRegistration, String) {
        let mut backoff = Backoff::default();
        loop {
            let request = request(shared);
            let failure_domain = request.failure_domain.clone();
            let status = match within(shared.settings.call_timeout, client.register(request)).await {
                Ok(reply) => match granted(&reply) {
                    Some(granted) => {
                        tracing::info!(recovered = NOT_REGISTERED, member = %self.name, "the member registers this node again");
                        return (granted, failure_domain);
                    }
                    None => Status::internal(format!("node number {} does not fit into 16 bits", reply.node)),
                },
                Err(status) => status,
            };
            let (code, reason) = (status.code(), status.message());
            tracing::warn!(
                condition = NOT_REGISTERED,
                member = %self.name,
                ?code,
                reason,
                "cannot register with the control plane"
            );
            sleep(backoff.next(jitter())).await;
        }
    }

    /// Registers with a changed failure domain. A label of all nodes may change at once, so nodes that have
    /// run for a while spread their registrations, each of which makes a member request an inventory.
    async fn replace(
        &self,
        shared: &Shared,
        client: &mut MembershipClient<Channel>,
        since: Instant,
    ) -> (GrantedRegistration, String) {
        if since.elapsed() >= STABLE_AFTER {
            sleep(REPLACED_WITHIN.mul_f64(f64::from(jitter()) / f64::from(u32::MAX))).await;
        }
        self.register_once(shared, client).await
    }

    /// Watches the heartbeats until the registration is lost, or until `failure_domain` is outdated.
    async fn keep(
        &self,
        shared: &Shared,
        granted: GrantedRegistration,
        failure_domain: Option<&str>,
    ) -> RegistrationEnd {
        let mut domains = shared.failure_domain.subscribe();
        let mut beats = self.beats.subscribe();
        let mut fenced = self.fenced.subscribe();
        loop {
            let now = *beats.borrow_and_update();
            match now {
                HeartbeatState::Answered => self.set_up(shared, LinkState::Yes),
                HeartbeatState::Failing => self.set_up(shared, LinkState::No),
                HeartbeatState::Unknown(epoch) if epoch == granted.epoch => {
                    return RegistrationEnd::Unknown;
                }
                HeartbeatState::Unknown(_) => {}
            }
            if *fenced.borrow_and_update() == Some(granted.epoch) {
                return RegistrationEnd::Fenced;
            }
            let is_outdated = |domain: &str| failure_domain.is_some_and(|registered| registered != domain);
            if is_outdated(&domains.borrow_and_update()) {
                return RegistrationEnd::Outdated;
            }
            tokio::select! {
                // The senders are owned by this link and the client, so none can be closed.
                _ = beats.changed() => {}
                _ = fenced.changed() => {}
                _ = domains.changed() => {}
            }
        }
    }
}

fn request(shared: &Shared) -> RegisterRequest {
    let own = shared.settings.registration.clone();
    RegisterRequest {
        name: own.name,
        peer_address: own.peer_address,
        admin_address: own.admin_address,
        failure_domain: shared.failure_domain.borrow().clone(),
        version: own.version,
    }
}

fn granted(reply: &RegisterReply) -> Option<GrantedRegistration> {
    Some(GrantedRegistration {
        node: NodeId(u16::try_from(reply.node).ok()?),
        epoch: Epoch(reply.epoch),
        heartbeat_every: Duration::from_micros(reply.heartbeat_every_us).clamp(HEARTBEAT_MIN, HEARTBEAT_MAX),
    })
}
