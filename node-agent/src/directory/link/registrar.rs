//! The registrar of a link: carries out what the [`Registrar`] decides, and owns the link's state.

use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use reprise_agent_core::registrar::{Granted, Heartbeat, Input, Output, Registrar, RegistrationEnd};
use reprise_policy::peer::PeerEndpoint;
use reprise_policy::{Epoch, NodeId};
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{PeerEndpoint as WireEndpoint, RegisterReply, RegisterRequest};
use reprise_proto::dial::cause;
use tokio::time::{Instant, sleep, sleep_until};
use tonic::Status;

use super::super::members::jitter;
use super::super::{DirectoryEvent, Shared};
use super::{HeartbeatState, Link, LinkState, within};

/// Log condition for a member that does not register this node.
const NOT_REGISTERED: &str = "not_registered";

/// A call of `register`, or the pause before it.
type Call<'a> = Pin<Box<dyn Future<Output = Input> + Send + 'a>>;

impl Link {
    /// Registers, and registers again whenever the registration is lost or outdated.
    pub(super) async fn register(&self, shared: &Shared) {
        let mut domains = shared.failure_domain.subscribe();
        let mut beats = self.beats.subscribe();
        let mut fenced = self.fenced.subscribe();
        let mut registrar = Registrar::new(domains.borrow_and_update().clone());
        let mut call: Option<Call<'_>> = Some(Box::pin(self.register_once(shared, Duration::ZERO)));
        let mut overdue = None;
        loop {
            // The senders are owned by this link and the client, so none can be closed.
            let input = tokio::select! {
                input = pending_unless(call.as_mut()) => {
                    call = None;
                    input
                }
                () = sleep_until(overdue.unwrap_or_else(Instant::now)), if overdue.is_some() => {
                    overdue = None;
                    Input::Overdue
                }
                _ = beats.changed() => heartbeat(*beats.borrow_and_update(), registrar.granted()),
                _ = fenced.changed() => Input::Fenced(fenced.borrow_and_update().unwrap_or_default()),
                _ = domains.changed() => Input::Domain(domains.borrow_and_update().clone()),
            };
            for output in registrar.on(shared.now(), input) {
                match output {
                    Output::Register(pause) => {
                        call = Some(Box::pin(self.register_once(shared, pause.draw(jitter()))));
                    }
                    Output::AwaitReplacement => overdue = Some(Instant::now() + shared.settings.call_timeout),
                    Output::Registered(granted) => {
                        overdue = None;
                        self.registered(shared, granted);
                    }
                    Output::Replacing(granted) => self.log_end(granted, RegistrationEnd::Outdated),
                    Output::Lost(granted, end) => {
                        self.log_end(granted, end);
                        self.granted.send_replace(None);
                        self.announcer().outbox_mut().unregister();
                    }
                    Output::UpChanged => {
                        self.set_up(shared, if registrar.is_up() { LinkState::Yes } else { LinkState::No });
                    }
                }
            }
        }
    }

    fn registered(&self, shared: &Shared, granted: Granted) {
        let Granted { node, epoch, .. } = granted;
        shared.counters.registrations.fetch_add(1, Ordering::Relaxed);
        self.update_outbox(|outbox| outbox.register(node, epoch));
        self.beats.send_replace(HeartbeatState::Answered);
        self.granted.send_replace(Some(granted));
        shared.emit(DirectoryEvent::Registered { member: self.name.to_string(), node, epoch });
    }

    fn log_end(&self, Granted { node, epoch, .. }: Granted, end: RegistrationEnd) {
        let reason = end.reason();
        tracing::info!(member = %self.name, node = node.0, epoch = epoch.0, reason, "registering again");
    }

    /// Registers after a pause. Returns the result with the registered failure domain.
    async fn register_once(&self, shared: &Shared, pause: Duration) -> Input {
        if !pause.is_zero() {
            sleep(pause).await;
        }
        let request = request(shared);
        let domain = request.failure_domain.clone();
        let mut client = MembershipClient::new(self.channel.clone());
        let status = match within(shared.settings.call_timeout, client.register(request)).await {
            Ok(reply) => match granted(&reply) {
                Some(granted) => {
                    tracing::info!(recovered = NOT_REGISTERED, member = %self.name, "the member registers this node again");
                    return Input::Granted { granted, domain };
                }
                None => Status::internal(format!("node number {} does not fit into 16 bits", reply.node)),
            },
            Err(status) => status,
        };
        let (code, reason) = (status.code(), cause(&status));
        tracing::warn!(
            condition = NOT_REGISTERED,
            member = %self.name,
            ?code,
            reason,
            "cannot register with the control plane"
        );
        Input::Refused
    }
}

/// Waits for a call, or forever without one.
async fn pending_unless(call: Option<&mut Call<'_>>) -> Input {
    match call {
        Some(call) => call.await,
        None => std::future::pending().await,
    }
}

/// Converts the state of the heartbeats. They are sent for the current registration only.
fn heartbeat(state: HeartbeatState, granted: Option<Granted>) -> Input {
    let current = granted.map(|granted| granted.epoch).unwrap_or_default();
    match state {
        HeartbeatState::Answered => Input::Heartbeat { epoch: current, result: Heartbeat::Answered },
        HeartbeatState::Failing => Input::Heartbeat { epoch: current, result: Heartbeat::Failed },
        HeartbeatState::Unknown(epoch) => Input::Heartbeat { epoch, result: Heartbeat::Unknown },
    }
}

fn request(shared: &Shared) -> RegisterRequest {
    let own = shared.settings.registration.clone();
    RegisterRequest {
        name: own.name,
        peer_endpoints: own.peer_endpoints.into_iter().map(endpoint).collect(),
        admin_address: own.admin_address,
        failure_domain: shared.failure_domain.borrow().clone(),
        version: own.version,
    }
}

fn endpoint(PeerEndpoint { protocol, address }: PeerEndpoint) -> WireEndpoint {
    WireEndpoint { protocol, address }
}

fn granted(reply: &RegisterReply) -> Option<Granted> {
    Some(Granted {
        node: NodeId(u16::try_from(reply.node).ok()?),
        epoch: Epoch(reply.epoch),
        heartbeat_every: Duration::from_micros(reply.heartbeat_every_us),
    })
}
