//! The thread that runs the core: take an input, apply it, execute the effects.
//!
//! Everything that happens to an agent comes through one bounded channel, so decisions are made one at a time and
//! without locks. Whoever sends may wait for room; this thread waits for nothing but the channel and the core's
//! next deadline, and never longer than [`PULSE_EVERY`]. Executing an effect is a try-send or a system call
//! that cannot block ([`crate::executor`]).

mod pulse;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use reprise_agent_core::agent::{AgentCore, BlockDescription, Counters, TenantUsage};
use reprise_agent_core::effect::{DeviceId, Effect, FillId};
use reprise_agent_core::event::{Event, FillUpdate, RequestId, SessionOpened};
use reprise_agent_core::pool::{DeviceError, DevicePool, OpToken, PoolUsage};
use reprise_buffers::ProgressWriter;
use reprise_policy::{BlockKey, DrainProgress, NodeMode, SessionId, TenantId, Tick};
use reprise_transport::IncomingOffer;

use crate::device::Device;
use crate::directory::OwnState;
use crate::executor::{DeviceView, Executor, SessionView};
use crate::session::Session;
use pulse::PULSE_EVERY;
pub(crate) use pulse::Pulse;

/// Inputs that wait for the core. An input takes 1 to 100 µs, so the last of 4,096 waits for 0.4 s at the worst;
/// beyond that, senders wait.
const INBOX_MAX: usize = 4096;

/// Pause between two looks at what is reported to the control plane, which is once a second. With 1,024 tenants a look
/// takes 0.1 ms.
const TELL_EVERY: Duration = Duration::from_millis(250);

/// Inputs taken before the core's deadlines are looked at again.
const INPUTS_PER_TURN: usize = 64;

/// The agent's monotonic time; copies agree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
}

/// The way into the core.
#[derive(Clone)]
pub(crate) struct Inbox(Sender<Input>);

/// The core has stopped: nothing is taken any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped;

/// Something for the core's thread.
pub(crate) enum Input {
    /// For the core as it is.
    Event(Event),
    /// What a device has done since it last said something.
    Device(DeviceReport),
    /// A peer offers blocks.
    PeerOffer(Box<IncomingOffer>),
    /// A request, with the instant at which it had been received.
    Request(Request),
    /// A session that was greeted.
    Opened(Box<Opened>),
    /// Wants to know how things are.
    Inspect(Sender<CoreView>),
    /// Wants to know what is here of a block, and why.
    Describe { key: BlockKey, answer: Sender<Option<Described>> },
    /// A device has been opened under a free number; what was found there follows as events.
    Attach(Box<Attached>),
    /// A device is not wanted any more.
    Detach(DeviceId),
    /// Wants all blocks written, and to be told when they are durable.
    Flush(Sender<()>),
    /// The end.
    Stop,
}

/// A request of a session.
pub(crate) struct Request {
    pub(crate) session: SessionId,
    pub(crate) request: RequestId,
    pub(crate) body: reprise_agent_core::event::Request,
    pub(crate) received: Instant,
}

/// Ends of operations and progress of fills, of one device.
pub(crate) struct DeviceReport {
    pub(crate) device: DeviceId,
    /// Why the device is lost, when that is news.
    pub(crate) lost: Option<String>,
    pub(crate) done: Vec<(OpToken, Result<(), DeviceError>)>,
    pub(crate) fills: Vec<(FillId, FillUpdate)>,
}

/// A session that was greeted.
pub(crate) struct Opened {
    pub(crate) opened: SessionOpened,
    pub(crate) session: std::sync::Arc<Session>,
    pub(crate) progress: ProgressWriter,
}

/// A device that has been opened.
pub(crate) struct Attached {
    pub(crate) id: DeviceId,
    pub(crate) device: Device,
    pub(crate) pool: DevicePool,
}

/// What is here of a block, and on which device.
#[derive(Clone, Debug)]
pub(crate) struct Described {
    pub(crate) description: BlockDescription,
    pub(crate) path: Option<PathBuf>,
}

/// How things are, at one moment.
#[derive(Default)]
pub(crate) struct CoreView {
    pub(crate) counters: Counters,
    pub(crate) tenants: Vec<TenantUsage>,
    pub(crate) mode: NodeMode,
    pub(crate) drain: DrainProgress,
    pub(crate) sessions: Vec<SessionView>,
    pub(crate) devices: Vec<DeviceView>,
    /// Space of the devices that are usable.
    pub(crate) device_usage: BTreeMap<DeviceId, PoolUsage>,
    pub(crate) inbox_waiting: usize,
}

/// The thread's state.
pub(crate) struct CoreLoop {
    core: AgentCore,
    clock: Clock,
    pulse: Pulse,
    inbox: Receiver<Input>,
    executor: Executor,
    /// Reused between inputs.
    effects: Vec<Effect>,
    await_durable: Option<Sender<()>>,
    /// When the control plane was last told how things are.
    told: Instant,
}

/// Whether the loop goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    On,
    Stop,
}

impl Clock {
    /// Starts now.
    pub(crate) fn start() -> Clock {
        Clock { start: Instant::now() }
    }

    /// Microseconds since the start.
    pub(crate) fn now(&self) -> Tick {
        self.tick(Instant::now())
    }

    /// Microseconds from the start to an instant.
    fn tick(&self, instant: Instant) -> Tick {
        let since = instant.saturating_duration_since(self.start);
        Tick(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
    }

    /// The instant of a tick; far ahead for one that no `Instant` reaches.
    fn instant(&self, tick: Tick) -> Instant {
        const FAR: Duration = Duration::from_secs(365 * 86_400);
        self.start + Duration::from_micros(tick.0).min(FAR)
    }
}

impl Inbox {
    /// A channel into the core, and the core's end of it.
    pub(crate) fn new() -> (Inbox, Receiver<Input>) {
        let (sender, receiver) = bounded(INBOX_MAX);
        (Inbox(sender), receiver)
    }

    /// Sends; waits for room.
    ///
    /// # Errors
    /// The core has stopped.
    pub(crate) fn send(&self, input: Input) -> Result<(), Stopped> {
        self.0.send(input).map_err(|_| Stopped)
    }

    /// Sends; waits for room, but not longer than this.
    ///
    /// # Errors
    /// The core has stopped, or its inbox was full all the time.
    pub(crate) fn send_within(&self, input: Input, patience: Duration) -> Result<(), Stopped> {
        self.0.send_timeout(input, patience).map_err(|_| Stopped)
    }
}

impl CoreLoop {
    /// `effects` are what the core wanted when it was made.
    pub(crate) fn new(
        (core, effects): (AgentCore, Vec<Effect>),
        (clock, pulse): (Clock, Pulse),
        inbox: Receiver<Input>,
        executor: Executor,
    ) -> CoreLoop {
        let told = Instant::now();
        CoreLoop { core, clock, pulse, inbox, executor, effects, await_durable: None, told }
    }

    /// Runs until told to stop; gives the executor back, whose devices are to be stopped.
    pub(crate) fn run(mut self) -> Executor {
        self.execute();
        self.tell_state();
        loop {
            if self.turn() == Flow::Stop {
                self.executor.close_sessions();
                return self.executor;
            }
        }
    }

    /// Waits for an input or a deadline, then takes what is there.
    fn turn(&mut self) -> Flow {
        self.pulse.beat();
        let pulse = Instant::now() + PULSE_EVERY;
        let until =
            self.core.next_deadline().map_or(pulse, |deadline| self.clock.instant(deadline).min(pulse));
        let mut next = match self.inbox.recv_deadline(until) {
            Ok(input) => Some(input),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Flow::Stop,
        };
        let mut taken = 0;
        while let Some(input) = next {
            if self.take(input) == Flow::Stop {
                return Flow::Stop;
            }
            taken += 1;
            next = if taken < INPUTS_PER_TURN { self.inbox.try_recv().ok() } else { None };
        }
        let now = self.clock.now();
        if self.core.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.apply(Event::Tick);
        }
        self.tell_if_durable();
        if self.told.elapsed() >= TELL_EVERY {
            self.tell_state();
        }
        Flow::On
    }

    fn take(&mut self, input: Input) -> Flow {
        match input {
            Input::Event(event) => {
                if let Event::SessionClosed { session } = &event {
                    self.executor.session_closed(*session);
                }
                self.apply(event);
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
            Input::PeerOffer(offer) => {
                if let Some(offer) = self.executor.offered(*offer) {
                    self.name_tenant(offer.tenant);
                    self.apply(Event::PeerOffer(offer));
                }
            }
            Input::Request(Request { session, request, body, received }) => {
                let _applying = self.executor.request_received(session, request, &body, received).entered();
                let received = self.clock.tick(received);
                self.apply(Event::Request { session, request, body, received });
            }
            Input::Opened(opened) => {
                let Opened { opened, session, progress } = *opened;
                self.executor.session_opened(session, opened.namespace, progress);
                self.name_tenant(opened.tenant);
                self.apply(Event::SessionOpened(opened));
            }
            Input::Inspect(answer) => {
                // Whoever asked may have lost patience.
                let _ = answer.try_send(self.view());
            }
            Input::Describe { key, answer } => {
                let described = self.core.describe(&key).map(|description| {
                    let path = description.nvme.and_then(|device| self.executor.device_path(device));
                    Described { description, path }
                });
                let _ = answer.try_send(described);
            }
            Input::Attach(attached) => {
                let Attached { id, device, pool } = *attached;
                self.executor.hold_device(id, device);
                self.apply(Event::DeviceAttached { device: id, pool: Box::new(pool) });
            }
            Input::Detach(device) => {
                // First the core, which asks the device for nothing new from then on.
                self.apply(Event::DeviceDetached { device });
                self.executor.close_device(device);
            }
            Input::Flush(answer) => {
                self.await_durable = Some(answer);
                self.apply(Event::Flush);
            }
            Input::Stop => return Flow::Stop,
        }
        Flow::On
    }

    /// Tells the core a tenant's name before any block of it can be written.
    fn name_tenant(&mut self, tenant: TenantId) {
        if let Some(name) = self.executor.name_for_core(tenant) {
            self.apply(Event::TenantNamed { tenant, name });
        }
    }

    /// Applies one event, and what its effects bring back at once.
    fn apply(&mut self, event: Event) {
        self.apply_one(event);
        while let Some(event) = self.executor.take_feedback() {
            self.apply_one(event);
        }
    }

    fn apply_one(&mut self, event: Event) {
        self.executor.observe(&event);
        self.core.apply(self.clock.now(), event, &mut self.effects);
        self.execute();
    }

    fn execute(&mut self) {
        for effect in self.effects.drain(..) {
            self.executor.execute(effect);
        }
    }

    fn tell_if_durable(&mut self) {
        if self.core.counters().unsaved_blocks == 0
            && let Some(answer) = self.await_durable.take()
        {
            let _ = answer.try_send(());
        }
    }

    fn tell_state(&mut self) {
        self.told = Instant::now();
        let tenants = self.core.tenant_usage().collect();
        let drain = self.core.drain_progress();
        self.executor.tell_state(OwnState { usage: self.core.node_usage(), drain, tenants });
    }

    fn view(&self) -> CoreView {
        CoreView {
            counters: self.core.counters().clone(),
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
