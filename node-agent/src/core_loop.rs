//! The thread that runs the core: receives an input, applies it, executes the effects.
//!
//! All inputs of an agent pass through one bounded channel, so decisions are made one at a time and without
//! locks. Senders may block. This thread blocks only on the channel, until the core's next deadline and for
//! at most [`BEAT_EVERY`]. Executing an effect is a try-send or a system call that does not block
//! ([`crate::executor`]).

mod liveness;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use reprise_agent_core::effect::{DeviceId, Effect, FillId, RegionId};
use reprise_agent_core::event::{Event, FillUpdate, Renewal, RequestId, SessionOpened};
use reprise_agent_core::pool::{DeviceError, DevicePool, OpToken, PoolUsage};
use reprise_agent_core::{AgentCore, BlockDescription, Counters, TenantUsage};
use reprise_buffers::{ProgressWriter, Region};
use reprise_policy::peer::{PeerOffer, PeerRequest};
use reprise_policy::{BlockKey, DrainProgress, NodeMode, SessionId, TenantId, TenantName, Tick};

use crate::device::Device;
use crate::directory::{OwnState, StrangerRequest};
use crate::executor::{DeviceView, Executor, SessionView};
use crate::session::Session;
use liveness::BEAT_EVERY;
pub(crate) use liveness::Liveness;

/// Capacity of the inbox. An input takes 1 to 100 µs, so the last of 4,096 waits for at most 0.4 s. Beyond
/// that, senders block.
const INBOX_MAX: usize = 4096;

/// Interval between two updates of the state for the control plane, which is reported once a second. With
/// 1,024 tenants an update takes 0.1 ms.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// Maximum number of inputs between two checks of the core's deadlines.
const INPUTS_PER_TURN: usize = 64;

/// Monotonic clock of the agent; copies are identical.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
}

/// Sender of inputs for the core.
#[derive(Clone)]
pub(crate) struct Inbox(Sender<Input>);

/// The core has stopped and accepts no inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped;

/// An input for the core's thread.
pub(crate) enum Input {
    /// An event for the core.
    Event(Event),
    /// Completions of a device since its previous report.
    Device(DeviceReport),
    /// A request of a peer, named by its greeting.
    PeerRequest {
        from: String,
        request: PeerRequest<TenantName>,
    },
    /// A request whose node was not known to act for the tenant, and whether it does.
    StrangerDecided {
        request: StrangerRequest,
        acts_for: bool,
    },
    /// An offer of blocks by a peer.
    PeerOffer(Box<PeerOffer<String, TenantName>>),
    /// A request, with the time at which it was received.
    Request(Request),
    /// A session that has completed its handshake.
    SessionOpened(Box<NewSession>),
    /// A query of the core's state.
    Inspect(Sender<CoreView>),
    /// A query of a block's copies.
    Describe {
        key: BlockKey,
        answer: Sender<Option<LocatedBlock>>,
    },
    /// A device was opened under a free number; events with its blocks follow.
    Attach(Box<AttachedDevice>),
    /// A tenant that must be encrypted has no key.
    TenantErased(TenantName),
    /// Such a tenant has a key again.
    TenantRestored(TenantName),
    /// The memory of a region was replaced, or that failed.
    RegionRenewed {
        renewal: Renewal,
        /// The current memory of the region.
        memory: std::sync::Arc<Region>,
    },
    /// A device must be closed.
    Detach(DeviceId),
    /// Writes all blocks and notifies the sender when they are durable.
    Flush(Sender<()>),
    Stop,
}

/// A request of a session.
pub(crate) struct Request {
    pub(crate) session: SessionId,
    pub(crate) request: RequestId,
    pub(crate) body: reprise_agent_core::event::Request,
    pub(crate) received: Instant,
}

/// Completions of operations and progress of fills of one device.
pub(crate) struct DeviceReport {
    pub(crate) device: DeviceId,
    /// Why the device is lost, in the first report of the loss.
    pub(crate) lost: Option<String>,
    pub(crate) done: Vec<(OpToken, Result<(), DeviceError>)>,
    pub(crate) fills: Vec<(FillId, FillUpdate)>,
}

/// A session that has completed its handshake.
pub(crate) struct NewSession {
    pub(crate) opened: SessionOpened,
    pub(crate) session: std::sync::Arc<Session>,
    pub(crate) progress: ProgressWriter,
}

/// A device that was opened for the core.
pub(crate) struct AttachedDevice {
    pub(crate) id: DeviceId,
    pub(crate) device: Device,
    pub(crate) pool: DevicePool,
}

/// The core's description of a block, with the path or address of its device.
#[derive(Clone, Debug)]
pub(crate) struct LocatedBlock {
    pub(crate) description: BlockDescription,
    pub(crate) path: Option<String>,
}

/// State of the core at one point in time.
#[derive(Default)]
pub(crate) struct CoreView {
    pub(crate) counters: Counters,
    pub(crate) tenants: Vec<TenantUsage>,
    pub(crate) mode: NodeMode,
    pub(crate) drain: DrainProgress,
    pub(crate) sessions: Vec<SessionView>,
    pub(crate) devices: Vec<DeviceView>,
    /// Usage of the devices that are not lost.
    pub(crate) device_usage: BTreeMap<DeviceId, PoolUsage>,
    pub(crate) inbox_waiting: usize,
}

/// State of the core's thread.
pub(crate) struct CoreLoop {
    core: AgentCore,
    clock: Clock,
    liveness: Liveness,
    inbox: Receiver<Input>,
    executor: Executor,
    /// Reused for each input.
    effects: Vec<Effect>,
    await_durable: Option<Sender<()>>,
    /// When the state for the control plane was last updated.
    reported_at: Instant,
    /// Tenants of sessions in that update.
    reported_session_tenants: BTreeSet<TenantName>,
}

/// Whether the loop continues.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Continue,
    Stop,
}

impl Clock {
    /// Creates a clock that starts now.
    pub(crate) fn start() -> Clock {
        Clock { start: Instant::now() }
    }

    /// Returns the microseconds since the start.
    pub(crate) fn now(&self) -> Tick {
        self.tick(Instant::now())
    }

    /// Returns the microseconds from the start to an instant.
    fn tick(&self, instant: Instant) -> Tick {
        let since = instant.saturating_duration_since(self.start);
        Tick(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
    }

    /// Returns the instant of a tick, or a far instant if it is not representable.
    fn instant(&self, tick: Tick) -> Instant {
        const FAR: Duration = Duration::from_secs(365 * 86_400);
        self.start + Duration::from_micros(tick.0).min(FAR)
    }
}

impl Inbox {
    /// Creates the channel to the core.
    pub(crate) fn new() -> (Inbox, Receiver<Input>) {
        let (sender, receiver) = bounded(INBOX_MAX);
        (Inbox(sender), receiver)
    }

    /// Sends an input; blocks while the inbox is full.
    ///
    /// # Errors
    /// The core has stopped.
    pub(crate) fn send(&self, input: Input) -> Result<(), Stopped> {
        self.0.send(input).map_err(|_| Stopped)
    }

    /// Sends an input; blocks for at most `patience` while the inbox is full.
    ///
    /// # Errors
    /// The core has stopped, or the inbox stayed full.
    pub(crate) fn send_within(&self, input: Input, patience: Duration) -> Result<(), Stopped> {
        self.0.send_timeout(input, patience).map_err(|_| Stopped)
    }
}

impl CoreLoop {
    /// Creates the loop. `effects` are the initial effects of the core.
    pub(crate) fn new(
        (core, effects): (AgentCore, Vec<Effect>),
        (clock, liveness): (Clock, Liveness),
        inbox: Receiver<Input>,
        executor: Executor,
    ) -> CoreLoop {
        CoreLoop {
            core,
            clock,
            liveness,
            inbox,
            executor,
            effects,
            await_durable: None,
            reported_at: Instant::now(),
            reported_session_tenants: BTreeSet::new(),
        }
    }

    /// Runs until it is stopped. Returns the executor, whose devices the caller stops.
    pub(crate) fn run(mut self) -> Executor {
        self.execute();
        self.report_state();
        loop {
            if self.run_once() == Flow::Stop {
                self.executor.close_sessions();
                return self.executor;
            }
        }
    }

    /// Waits for an input or a deadline, then handles the queued inputs.
    fn run_once(&mut self) -> Flow {
        self.liveness.beat();
        // Wakes up in time for the next beat even without inputs or deadlines.
        let beat = Instant::now() + BEAT_EVERY;
        let next_beat = self.executor.next_extent_poll().map_or(beat, |poll| poll.min(beat));
        let until = self
            .core
            .next_deadline()
            .map_or(next_beat, |deadline| self.clock.instant(deadline).min(next_beat));
        let mut next = match self.inbox.recv_deadline(until) {
            Ok(input) => Some(input),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Flow::Stop,
        };
        let mut taken = 0;
        while let Some(input) = next {
            if self.handle(input) == Flow::Stop {
                return Flow::Stop;
            }
            taken += 1;
            next = if taken < INPUTS_PER_TURN { self.inbox.try_recv().ok() } else { None };
        }
        let now = self.clock.now();
        if self.core.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.apply(Event::Tick);
        }
        self.poll_extents();
        self.notify_if_durable();
        if self.reported_at.elapsed() >= REPORT_EVERY {
            self.report_state();
        }
        Flow::Continue
    }

    fn handle(&mut self, input: Input) -> Flow {
        match input {
            Input::Event(event) => {
                let closed = match &event {
                    Event::SessionClosed { session } => Some(*session),
                    _ => None,
                };
                self.apply(event);
                // After the core, which may ask for the end of the session's own I/O.
                if let Some(session) = closed {
                    self.executor.session_closed(session);
                }
            }
            Input::Device(DeviceReport { device, lost, done, fills }) => {
                if let Some(reason) = lost {
                    self.apply(Event::DeviceLost { device, reason });
                }
                for (token, result) in done {
                    self.apply(Event::DeviceDone { device, token, result });
                }
                for (fill, update) in fills {
                    self.apply(Event::Fill { fill, update });
                }
            }
            Input::PeerRequest { from, request } => {
                if let Some(request) = self.executor.resolve_request(from, request) {
                    self.apply(Event::PeerRequest(request));
                }
            }
            Input::StrangerDecided { request, acts_for } => {
                if let Some(request) = self.executor.decided(request, acts_for) {
                    self.apply(Event::PeerRequest(request));
                }
            }
            Input::PeerOffer(offer) => {
                if let Some(offer) = self.executor.resolve_offer(*offer) {
                    self.pass_tenant_name(offer.tenant);
                    self.apply(Event::PeerOffer(offer));
                }
            }
            Input::Request(Request { session, request, body, received }) => {
                let _applying = self.executor.request_received(session, request, &body, received).entered();
                let received = self.clock.tick(received);
                self.apply(Event::Request { session, request, body, received });
            }
            Input::SessionOpened(opened) => {
                let NewSession { opened, session, progress } = *opened;
                let namespace = session.stated_namespace();
                self.executor.session_opened(session, namespace, progress);
                self.pass_tenant_name(opened.tenant);
                self.apply(Event::SessionOpened(opened));
                if self.executor.session_tenants() != self.reported_session_tenants {
                    self.report_state();
                }
            }
            Input::Inspect(answer) => {
                // The requester may have timed out.
                let _ = answer.try_send(self.view());
            }
            Input::Describe { key, answer } => {
                let described = self.core.describe(&key).map(|description| {
                    let path = description.nvme.and_then(|device| self.executor.device_path(device));
                    LocatedBlock { description, path }
                });
                let _ = answer.try_send(described);
            }
            Input::Attach(attached) => {
                let AttachedDevice { id, device, pool } = *attached;
                self.executor.add_device(id, device);
                self.apply(Event::DeviceAttached { device: id, pool: Box::new(pool) });
            }
            Input::TenantErased(name) => {
                self.executor.end_sessions_of(&name);
                if let Some(tenant) = self.executor.tenant_number(&name) {
                    self.apply(Event::TenantErased { tenant });
                }
            }
            Input::TenantRestored(name) => {
                if let Some(tenant) = self.executor.tenant_number(&name) {
                    self.apply(Event::TenantRestored { tenant });
                }
            }
            Input::RegionRenewed { renewal, memory } => {
                let region = RegionId(memory.id());
                self.executor.region_renewed(region, memory);
                self.apply(Event::RegionRenewed { region, renewal });
            }
            Input::Detach(device) => {
                // Queue pairs first: the core releases an idle device immediately. Then the core, so that it issues no
                // further operations for the device.
                self.executor.revoke_queues(device);
                self.apply(Event::DeviceDetached { device });
                self.executor.close_device(device);
            }
            Input::Flush(answer) => {
                self.await_durable = Some(answer);
                self.apply(Event::Flush);
            }
            Input::Stop => return Flow::Stop,
        }
        Flow::Continue
    }

    /// Passes a tenant's name to the core before a block of the tenant can be written.
    fn pass_tenant_name(&mut self, tenant: TenantId) {
        if let Some(name) = self.executor.new_tenant_name(tenant) {
            self.apply(Event::TenantNamed { tenant, name });
        }
    }

    /// Applies an event and the events that its effects return immediately.
    fn apply(&mut self, event: Event) {
        self.apply_single(event);
        while let Some(event) = self.executor.pop_feedback() {
            self.apply_single(event);
        }
    }

    fn apply_single(&mut self, event: Event) {
        self.executor.record_latencies(&event);
        self.core.apply(self.clock.now(), event, &mut self.effects);
        self.execute();
    }

    fn execute(&mut self) {
        for effect in self.effects.drain(..) {
            self.executor.execute(effect);
        }
    }

    /// Reports holders of extents whose I/O has ended.
    fn poll_extents(&mut self) {
        for holder in self.executor.released_extents() {
            self.apply(Event::ExtentsReleased { holder });
        }
    }

    fn notify_if_durable(&mut self) {
        if self.core.unsaved_blocks() == 0
            && let Some(answer) = self.await_durable.take()
        {
            let _ = answer.try_send(());
        }
    }

    fn report_state(&mut self) {
        self.reported_at = Instant::now();
        let tenants = self.core.tenant_usage().collect();
        let drain = self.core.drain_progress();
        let session_tenants = self.executor.session_tenants();
        self.reported_session_tenants.clone_from(&session_tenants);
        self.executor.report_state(OwnState {
            usage: self.core.node_usage(),
            drain,
            tenants,
            session_tenants,
        });
    }

    fn view(&self) -> CoreView {
        CoreView {
            counters: self.core.counters(),
            tenants: self.core.tenant_usage().collect(),
            mode: self.core.mode(),
            drain: self.core.drain_progress(),
            sessions: self.executor.session_views(),
            devices: self.executor.device_views(),
            device_usage: self.core.device_usage().collect(),
            inbox_waiting: self.inbox.len(),
        }
    }
}
