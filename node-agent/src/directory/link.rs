//! A link to one member of the control plane: registration, and announcements of what is in its slots.
//!
//! The registrar owns the state of the link:
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
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_agent_core::backoff::Backoff;
use reprise_agent_core::outbox::{Batch, Next, Outbox, Outcome};
use reprise_policy::shards::MemberName;
use reprise_policy::{Epoch, NodeId, SlotSet};
use reprise_proto::connection::Connection;
use reprise_proto::controlplane::directory_client::DirectoryClient as DirectoryService;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::{RegisterReply, RegisterRequest, SlotsRequest};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::members::jitter;
use super::{DirectoryEvent, DirectoryStatus, Shared, reporting, wire};

/// Pings on the idle connection, and the time for their answer: a half-open connection is noticed within both.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(2);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(2);
/// A registration that is lost sooner is renewed with growing delays: two agents of one name would otherwise take it
/// from each other as fast as they can.
const SETTLED_AFTER: Duration = Duration::from_secs(5);
/// HTTP/2 windows: the answer to 8,192 keys (up to 545 KiB) arrives without a wait for our acknowledgement.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Bounds of the heartbeat period that a control plane may ask for.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug)]
pub(super) struct Link {
    /// The member.
    pub(super) name: MemberName,
    /// Where it is reached, `host:port`.
    pub(super) address: String,
    /// For the heartbeat thread, which connects by itself.
    pub(super) endpoint: Endpoint,
    /// For the link thread: look-ups, and everything else.
    pub(super) lookups: Connection,
    pub(super) channel: Channel,
    pub(super) granted: watch::Sender<Option<Granted>>,
    pub(super) beats: watch::Sender<Beats>,
    outbox: Mutex<Outbox>,
    /// What a beat has heard of the member's slots, for the announcer: the outbox may be locked for as long as an inventory
    /// is copied, and beats wait for nothing.
    heard: Mutex<Option<(Epoch, u64)>>,
    /// The outbox has something to send or to say.
    outbox_changed: Notify,
    /// The directory refused an update of this epoch: register again.
    fenced: watch::Sender<Option<Epoch>>,
    up: watch::Sender<bool>,
    closed: watch::Sender<bool>,
}

/// A registration that the member has granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Granted {
    pub(super) node: NodeId,
    pub(super) epoch: Epoch,
    pub(super) heartbeat_every: Duration,
}

/// What the heartbeat thread reports to the link thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beats {
    /// Answered, or nothing to beat for yet.
    Answered,
    /// The last beat had no answer in time.
    Failing,
    /// The member does not know this registration.
    Unknown(Epoch),
}

/// How a connection to a member for anything but beats is made. Connects when it is used; must be called on the
/// runtime that uses it.
pub(super) fn connect(endpoint: &Endpoint) -> Channel {
    endpoint
        .clone()
        .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
        .keep_alive_timeout(KEEP_ALIVE_ANSWER)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .connect_lazy()
}

impl Link {
    /// A link that does nothing until it is [run](Link::run). `address` is that of the endpoint, `host:port`.
    pub(super) fn new(
        name: MemberName,
        address: String,
        (endpoint, lookups): (Endpoint, Connection),
        queued_max: usize,
    ) -> Link {
        Link {
            name,
            address,
            lookups,
            channel: connect(&endpoint),
            endpoint,
            granted: watch::Sender::new(None),
            beats: watch::Sender::new(Beats::Answered),
            outbox: Mutex::new(Outbox::new(queued_max)),
            heard: Mutex::new(None),
            outbox_changed: Notify::new(),
            fenced: watch::Sender::new(None),
            up: watch::Sender::new(false),
            closed: watch::Sender::new(false),
        }
    }

    /// Registers and announces until the link is closed.
    pub(super) async fn run(&self, shared: &Shared) {
        tokio::select! {
            () = self.closed() => {}
            () = self.register(shared) => {}
            () = self.announce(shared) => {}
            () = reporting::report(shared, self) => {}
        }
        self.set_up(shared, Up::No);
    }

    /// Ends the link for good.
    pub(super) fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Waits until the link is closed.
    pub(super) async fn closed(&self) {
        // The sender lives in this link.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Whether the member answers and knows this node.
    pub(super) fn is_up(&self) -> bool {
        *self.up.borrow()
    }

    /// This node's number there, 0 for none.
    pub(super) fn node(&self) -> u32 {
        self.granted.borrow().map_or(0, |granted| u32::from(granted.node.0))
    }

    /// Changes the outbox, and has it looked at.
    pub(super) fn tell(&self, change: impl FnOnce(&mut Outbox)) {
        change(&mut self.outbox());
        self.outbox_changed.notify_one();
    }

    /// A beat of a registration was answered, with the version of the member's slots.
    pub(super) fn hear(&self, epoch: Epoch, version: u64) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Some((epoch, version));
        self.outbox_changed.notify_one();
    }

    /// Changes dropped because an inventory replaces them.
    pub(super) fn superseded(&self) -> u64 {
        self.outbox().superseded()
    }

    /// Adds this link's numbers.
    pub(super) fn add_to(&self, status: &mut DirectoryStatus) {
        let outbox = self.outbox();
        status.changes_queued += outbox.queued() as u64;
        status.changes_superseded += outbox.superseded();
        let registered = self.granted.borrow().map(|granted| (granted.node, granted.epoch));
        status.registered = status.registered.max(registered);
    }

    /// The outbox. Every change of it leaves it consistent, so a poisoned lock is as good as any.
    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- registration ------------------------------------------------------------------------------------------

    async fn register(&self, shared: &Shared) {
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
        let mut reported = None;
        loop {
            let status = match within(shared.settings.call_timeout, client.register(request(shared))).await {
                Ok(reply) => match granted(&reply) {
                    Some(granted) => return granted,
                    None => Status::internal(format!("node number {} does not fit 16 bits", reply.node)),
                },
                Err(status) => status,
            };
            // Once per kind of failure, not once per attempt.
            if reported != Some(status.code()) {
                let (code, reason) = (status.code(), status.message());
                tracing::warn!(member = %self.name, ?code, reason, "cannot register with the control plane");
                reported = Some(code);
            }
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

    fn set_up(&self, shared: &Shared, up: Up) {
        let up = up == Up::Yes;
        if self.up.send_if_modified(|known| std::mem::replace(known, up) != up) {
            shared.links_changed();
        }
    }

    // ---- announcements -----------------------------------------------------------------------------------------

    /// Sends batches one after the other: order is worth more than a second batch in flight.
    async fn announce(&self, shared: &Shared) {
        let mut client = DirectoryService::new(self.channel.clone());
        let mut backoff = Backoff::default();
        loop {
            let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner).take();
            let next = {
                let mut outbox = self.outbox();
                if let Some((epoch, version)) = heard {
                    outbox.heard(epoch, version);
                }
                outbox.next_step()
            };
            let sent = match next {
                Next::Wait => {
                    self.outbox_changed.notified().await;
                    continue;
                }
                Next::Inventory(slots) => {
                    shared.counters.inventories_wanted.fetch_add(1, Ordering::Relaxed);
                    shared.emit(DirectoryEvent::InventoryWanted { slots });
                    continue; // the sink may have taken a while: look again
                }
                Next::Standing(node, epoch) => self.ask_standing(shared, &mut client, node, epoch).await,
                Next::Send(batch) => self.send(shared, &mut client, &batch).await,
            };
            match sent {
                Sent::Settled => backoff.reset(),
                Sent::Again => sleep(backoff.next(jitter())).await,
            }
        }
    }

    /// Asks which slots the member owns, and of which it wants an inventory.
    async fn ask_standing(
        &self,
        shared: &Shared,
        client: &mut DirectoryService<Channel>,
        node: NodeId,
        epoch: Epoch,
    ) -> Sent {
        let request = SlotsRequest { node: u32::from(node.0), epoch: epoch.0 };
        let Ok(reply) = within(shared.settings.call_timeout, client.slots(request)).await else {
            return Sent::Again;
        };
        if reply.fenced {
            return self.fence(epoch);
        }
        let sets = (SlotSet::from_bytes(&reply.owned), SlotSet::from_bytes(&reply.wanted));
        let (Some(owned), Some(wanted)) = sets else {
            tracing::error!(member = %self.name, "the member's slots are no sets of slots");
            return Sent::Again;
        };
        self.outbox().follow(epoch, reply.slots_version, &owned, &wanted);
        Sent::Settled
    }

    async fn send(&self, shared: &Shared, client: &mut DirectoryService<Channel>, batch: &Batch) -> Sent {
        let (epoch, sequence) = (batch.epoch, batch.sequence);
        match within(shared.settings.call_timeout, client.update(wire::update_request(batch))).await {
            Ok(reply) => {
                let outcome = {
                    let mut outbox = self.outbox();
                    outbox.heard(epoch, reply.slots_version);
                    outbox.answered(epoch, sequence, wire::answer(&reply))
                };
                match outcome {
                    Outcome::Applied(changes) => {
                        shared.counters.changes_announced.fetch_add(changes as u64, Ordering::Relaxed);
                    }
                    Outcome::Gap => tracing::info!(
                        member = %self.name,
                        sequence,
                        expected = reply.expected_sequence,
                        "the directory has missed changes; announcing everything again"
                    ),
                    Outcome::Fenced => return self.fence(epoch),
                    Outcome::Stale => {}
                }
                Sent::Settled
            }
            Err(status) if status.code() == Code::InvalidArgument => {
                let reason = status.message();
                tracing::error!(member = %self.name, sequence, reason, "the directory refused an announcement");
                self.outbox().refused();
                Sent::Again
            }
            // The registrar reports an absent member; the batch stays and goes out again.
            Err(_) => Sent::Again,
        }
    }

    /// The registrar takes the registration away meanwhile.
    pub(super) fn fence(&self, epoch: Epoch) -> Sent {
        self.fenced.send_replace(Some(epoch));
        Sent::Again
    }
}

/// Whether a link is up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Up {
    Yes,
    No,
}

/// What became of a message.
pub(super) enum Sent {
    /// Answered; go on at once.
    Settled,
    /// Try again after a while.
    Again,
}

/// One call with its time; running out of it reads like any other transient failure.
pub(super) async fn within<T>(
    time: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match timeout(time, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded("no answer in time")),
    }
}

fn request(shared: &Shared) -> RegisterRequest {
    let own = shared.settings.registration.clone();
    RegisterRequest {
        name: own.name,
        peer_address: own.peer_address,
        admin_address: own.admin_address,
        dram_bytes: own.dram_bytes,
        nvme_bytes: own.nvme_bytes,
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
