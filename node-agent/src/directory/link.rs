//! A link to one member of the control plane: registration, and announcements of what is in its slots.
//!
//! Registrar ([`registering`]) and announcer ([`announcing`]) go on side by side; they share the outbox, and what beats say.

mod announcing;
mod registering;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_agent_core::outbox::Outbox;
use reprise_policy::shards::MemberName;
use reprise_policy::{Epoch, NodeId};
use reprise_proto::connection::Connection;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::{DirectoryStatus, Shared, reporting};

/// Pings on the idle connection, and the time for their answer: a half-open connection is noticed within both.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(2);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(2);
/// HTTP/2 windows: the answer to 8,192 keys (up to 545 KiB) arrives without a wait for our acknowledgement.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

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

    fn set_up(&self, shared: &Shared, up: Up) {
        let up = up == Up::Yes;
        if self.up.send_if_modified(|known| std::mem::replace(known, up) != up) {
            shared.links_changed();
        }
    }

    /// The registrar takes the registration away meanwhile.
    pub(super) fn fence(&self, epoch: Epoch) {
        self.fenced.send_replace(Some(epoch));
    }
}

/// Whether a link is up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Up {
    Yes,
    No,
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
