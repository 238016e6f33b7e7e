//! A link to one member of the control plane: registration, and announcement of the replicas in its slots.
//!
//! Registrar ([`registrar`]) and announcer ([`announcer`]) run concurrently; they share the outbox and the
//! results of heartbeats. Their decisions are made in `reprise_agent_core`.

mod announcer;
mod registrar;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_agent_core::announcer::Announcer;
use reprise_agent_core::outbox::Outbox;
use reprise_agent_core::registrar::Granted;
use reprise_identity::Security;
use reprise_policy::Epoch;
use reprise_policy::shards::MemberName;
use reprise_proto::connection::Connection;
use reprise_proto::dial::connect_lazy;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::{DirectorySettings, DirectoryStatus, Shared, reporting};

/// Keep-alive interval and timeout: together they bound the time to detect a half-open connection.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(2);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(2);
/// HTTP/2 windows: the response for 8,192 keys (up to 545 KiB) arrives without waiting for our window
/// update.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// A link to one member; see the module.
#[derive(Debug)]
pub(super) struct Link {
    /// Name of the member.
    pub(super) name: MemberName,
    /// Address of the member, `host:port`.
    pub(super) address: String,
    /// For the heartbeat thread, which has its own connection.
    pub(super) endpoint: Endpoint,
    /// For the link thread: lookups, and everything else.
    pub(super) lookups: Connection,
    pub(super) channel: Channel,
    pub(super) granted: watch::Sender<Option<Granted>>,
    pub(super) beats: watch::Sender<HeartbeatState>,
    announcer: Mutex<Announcer>,
    /// Version of the member's slots from the last heartbeat, for the announcer. Separate from the outbox,
    /// which may be locked while an inventory is copied: heartbeats must not wait.
    slots_version: Mutex<Option<(Epoch, u64)>>,
    /// The outbox has a message to send or an event to emit.
    outbox_changed: Notify,
    /// The directory rejected an update of this epoch: register again.
    fenced: watch::Sender<Option<Epoch>>,
    up: watch::Sender<bool>,
    closed: watch::Sender<bool>,
}

/// State of the heartbeats, as seen by the link thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeartbeatState {
    /// The last heartbeat was answered, or none was sent yet.
    Answered,
    /// The last heartbeat timed out.
    Failing,
    /// The member does not know this registration.
    Unknown(Epoch),
}

/// Creates the channel for everything except heartbeats. It connects when it is used; must be called on the
/// runtime that uses it.
pub(super) fn connect(endpoint: &Endpoint, security: &Security) -> Channel {
    let endpoint = endpoint
        .clone()
        .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
        .keep_alive_timeout(KEEP_ALIVE_ANSWER)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    connect_lazy(&endpoint, security)
}

/// A link equals itself only: a later one to the same member has another registration.
impl PartialEq for Link {
    fn eq(&self, other: &Link) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Link {
    /// Creates a link, which is idle until [run](Link::run) is called. `address` is the `host:port` of the
    /// endpoint.
    pub(super) fn new(
        name: MemberName,
        address: String,
        (endpoint, lookups): (Endpoint, Connection),
        settings: &DirectorySettings,
    ) -> Link {
        Link {
            name,
            address,
            lookups,
            channel: connect(&endpoint, &settings.security),
            endpoint,
            granted: watch::Sender::new(None),
            beats: watch::Sender::new(HeartbeatState::Answered),
            announcer: Mutex::new(Announcer::new(settings.changes_queued_max)),
            slots_version: Mutex::new(None),
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
        self.set_up(shared, LinkState::No);
    }

    /// Closes the link permanently.
    pub(super) fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Waits until the link is closed.
    pub(super) async fn closed(&self) {
        // The sender is owned by this link.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Returns whether the member responds and knows this node.
    pub(super) fn is_up(&self) -> bool {
        *self.up.borrow()
    }

    /// Returns this node's number at the member, 0 if not registered.
    pub(super) fn node(&self) -> u32 {
        self.granted.borrow().map_or(0, |granted| u32::from(granted.node.0))
    }

    /// Changes the outbox and wakes the announcer.
    pub(super) fn update_outbox(&self, change: impl FnOnce(&mut Outbox)) {
        change(self.announcer().outbox_mut());
        self.outbox_changed.notify_one();
    }

    /// Records a heartbeat response with the version of the member's slots.
    pub(super) fn record_heartbeat(&self, epoch: Epoch, version: u64) {
        *self.slots_version.lock().unwrap_or_else(PoisonError::into_inner) = Some((epoch, version));
        self.outbox_changed.notify_one();
    }

    /// Returns the number of changes dropped because an inventory replaces them.
    pub(super) fn superseded(&self) -> u64 {
        self.announcer().outbox().superseded()
    }

    /// Adds this link's counters.
    pub(super) fn add_to(&self, status: &mut DirectoryStatus) {
        let announcer = self.announcer();
        let outbox = announcer.outbox();
        status.changes_queued += outbox.queued() as u64;
        status.changes_superseded += outbox.superseded();
        let registered = self.granted.borrow().map(|granted| (granted.node, granted.epoch));
        status.registered = status.registered.max(registered);
    }

    /// Locks the announcer. Every change leaves it consistent, so a poisoned lock is ignored.
    fn announcer(&self) -> MutexGuard<'_, Announcer> {
        self.announcer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_up(&self, shared: &Shared, up: LinkState) {
        let up = up == LinkState::Yes;
        if self.up.send_if_modified(|known| std::mem::replace(known, up) != up) {
            shared.links_changed();
        }
    }

    /// Makes the registrar give up the registration.
    pub(super) fn fence(&self, epoch: Epoch) {
        self.fenced.send_replace(Some(epoch));
    }
}

/// Whether a link is up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LinkState {
    Yes,
    No,
}

/// Limits the duration of a call; a timeout is reported like other transient failures.
pub(super) async fn within<T>(
    time: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    match timeout(time, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded("timed out")),
    }
}
