//! The registrar of a link: it owns the state of the link.
//!
//! ```text
//!   register (backoff) ──► granted ──► beats answered ⇄ beats failing      up ⇄ down
//!        ▲                                   │
//!        └──── beats unknown, fenced ────────┘                             down
//! ```
//!
//! While beats fail the registration is kept, with what is queued: a member that comes back within its memory of this
//! node needs no new inventory.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reprise_agent_core::backoff::Backoff;
use reprise_policy::{Epoch, NodeId};
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{RegisterReply, RegisterRequest};
use tokio::time::sleep;
use tonic::Status;
use tonic::transport::Channel;

use super::super::members::jitter;
use super::super::{DirectoryEvent, Shared};
use super::{Beats, Granted, Link, Up, within};

/// The condition of a member that does not register this node, in the log.
const NOT_REGISTERED: &str = "not_registered";

/// A registration that is lost sooner is renewed with growing delays: two agents of one name would otherwise take it
/// from each other as fast as they can.
const SETTLED_AFTER: Duration = Duration::from_secs(5);
/// Bounds of the heartbeat period that a control plane may ask for.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);

impl Link {
    /// Registers, and again whenever the registration is lost.
    pub(super) async fn register(&self, shared: &Shared) {
        let mut client = MembershipClient::new(self.channel.clone());
        let mut quarrel = Backoff::default();
        loop {
            let granted = self.register_once(shared, &mut client).await;
            let Granted { node, epoch, .. } = granted;
            shared.counters.registrations.fetch_add(1, Ordering::Relaxed);
            self.outbox().grant(node, epoch);
            self.beats.send_replace(Beats::Answered);
            self.granted.send_replace(Some(granted));
            shared.emit(DirectoryEvent::Registered { member: self.name.to_string(), node, epoch });
            self.set_up(shared, Up::Yes);
            self.outbox_changed.notify_one();
            let since = Instant::now();
            let reason = self.keep(shared, granted).await;
            tracing::info!(member = %self.name, node = node.0, epoch = epoch.0, reason, "registering again");
            self.granted.send_replace(None);
            self.outbox().lose();
            self.set_up(shared, Up::No);
            if since.elapsed() >= SETTLED_AFTER {
                quarrel.reset();
            } else {
                sleep(quarrel.next(jitter())).await;
            }
        }
    }

    /// Tries until the member answers.
    async fn register_once(&self, shared: &Shared, client: &mut MembershipClient<Channel>) -> Granted {
        let mut backoff = Backoff::default();
        loop {
            let status = match within(shared.settings.call_timeout, client.register(request(shared))).await {
                Ok(reply) => match granted(&reply) {
                    Some(granted) => {
                        tracing::info!(recovered = NOT_REGISTERED, member = %self.name, "the member registers this node");
                        return granted;
                    }
                    None => Status::internal(format!("node number {} does not fit 16 bits", reply.node)),
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

    /// Follows the beats until the registration is lost; says why.
    async fn keep(&self, shared: &Shared, granted: Granted) -> &'static str {
        let mut beats = self.beats.subscribe();
        let mut fenced = self.fenced.subscribe();
        loop {
            let now = *beats.borrow_and_update();
            match now {
                Beats::Answered => self.set_up(shared, Up::Yes),
                Beats::Failing => self.set_up(shared, Up::No),
                Beats::Unknown(epoch) if epoch == granted.epoch => return "the member does not know it",
                Beats::Unknown(_) => {}
            }
            if *fenced.borrow_and_update() == Some(granted.epoch) {
                return "a newer registration has taken its place";
            }
            tokio::select! {
                // The senders live in this link, so neither can be closed.
                _ = beats.changed() => {}
                _ = fenced.changed() => {}
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
        failure_domain: own.failure_domain,
        version: own.version,
    }
}

fn granted(reply: &RegisterReply) -> Option<Granted> {
    Some(Granted {
        node: NodeId(u16::try_from(reply.node).ok()?),
        epoch: Epoch(reply.epoch),
        heartbeat_every: Duration::from_micros(reply.heartbeat_every_us).clamp(HEARTBEAT_MIN, HEARTBEAT_MAX),
    })
}
