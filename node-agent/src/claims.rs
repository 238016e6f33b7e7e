//! The node's side of a cluster: opens and closes devices as the node's claims say, follows its mode, and tells how the node is.
//!
//! ```text
//!  watch ── Desired ──► Claims (one thread) ── Attach, Detach, Mode ──► core
//!    ▲                     │ ▲   │ ▲ Released                             │
//!    └────── Facts ────────┘ │   └─┴──────────────────────────────────────┘
//!                            └── threads that open and wipe devices
//! ```
//!
//! Beside devices and mode it has drives asked how worn they are ([`wear`]), looks at the node's NVMe controllers and GPUs, keeps queue pairs for GPUs
//! ([`queues`]), and the profiles ready that the node should work by ([`profiles`]).
//!
//! One thing at a time: what happens is told to the [`board`], which says what to do. Whatever takes its time is done by other threads,
//! so facts stay fresh while a disk is erased. Sessions go on meanwhile: the core learns of a device when it is open, and forgets it
//! before it is closed.
//!
//! Deliberately absent: Kubernetes (see `reprise-agent-kubernetes`), and any claim of an agent that is configured by its file alone.

mod board;
mod controllers;
mod facts;
mod gpus;
mod known;
mod opening;
mod profiles;
mod queues;
mod resolve;
mod signatures;
mod slow;
mod wear;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, select, tick};
use reprise_agent_core::event::Event as CoreEvent;
use reprise_agent_kubernetes::{ControllerFact, Desired, Facts, GpuFact, Reason, Trouble};
use reprise_io::HealthLog;
use tokio::sync::watch;

use crate::admin::AdminContext;
use crate::bindings::BindingsFile;
use crate::config::{FollowedConfig, PoolSettings};
use crate::core_loop::{Attached, Inbox, Input};
use crate::device::{DeviceContext, OpenedDevice};
use crate::error::{AgentError, ErrorKind};
use crate::executor::Released;
use crate::modes::Modes;
use board::{Action, Board, Loss, Retry, ToOpen};
use known::Known;
use opening::{Left, Tried};
use profiles::Profiles;
use queues::Queues;
use resolve::Names;
use slow::Slow;
use wear::Wear;

/// How often facts are gathered: an order of magnitude more often than they are told.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How often names of devices are looked up again, and what was refused is tried again.
const RESOLVE_EVERY: Duration = Duration::from_secs(10);

/// Blocks that the core takes in one input: it answers engines in between (4,096 take a millisecond).
const RECOVERED_PER_INPUT: usize = 4096;

/// Ends of work that wait: one for each device.
const EVENTS_MAX: usize = 64;

/// What the thread needs of the agent.
pub(crate) struct ClaimsParts {
    pub(crate) context: DeviceContext,
    pub(crate) pool: PoolSettings,
    pub(crate) released: Receiver<Released>,
    pub(crate) modes: Arc<Mutex<Modes>>,
    /// Set once what the first spec wants was tried; see `ExecutorParts`.
    pub(crate) complete: Arc<AtomicBool>,
    pub(crate) admin: Arc<AdminContext>,
    /// Where the node's root is mounted.
    pub(crate) root: PathBuf,
    /// Which pools devices are of, as it was and is to be kept.
    pub(crate) known: KnownFile,
    pub(crate) config: FollowedConfig,
    /// Whose pods are whose, looked at again from time to time.
    pub(crate) bindings: Option<BindingsFile>,
    pub(crate) endpoints: facts::OwnEndpoints,
    pub(crate) facts: watch::Sender<Option<Facts>>,
}

pub(crate) use facts::OwnEndpoints;
pub(crate) use known::KnownFile;

/// The running thread.
pub(crate) struct Claims {
    desk: Desk,
    thread: JoinHandle<()>,
}

/// Where wishes are left; only the last one counts.
#[derive(Clone)]
pub(crate) struct Desk {
    wish: Arc<Mutex<Option<Desired>>>,
    bell: Sender<Bell>,
}

/// Says that there is something to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bell {
    Wish,
    Stop,
}

/// The end of something that took its time.
enum Ended {
    Opened(Vec<Tried>),
    /// The data of a place is destroyed, which is at this path now, or why not.
    Erased {
        path: String,
        at: PathBuf,
        result: Result<Left, Trouble>,
    },
    Wiped {
        path: String,
        result: Result<(), Trouble>,
    },
    Asked {
        path: String,
        log: Option<HealthLog>,
    },
}

/// The thread's state.
struct Worker {
    parts: ClaimsParts,
    wish: Arc<Mutex<Option<Desired>>>,
    board: Board,
    desired: Option<Desired>,
    ended: (Sender<Ended>, Receiver<Ended>),
    /// What was said of each refused place, so that it is said once.
    said: BTreeMap<String, Trouble>,
    resolved: Instant,
    /// Names in use that led nowhere then.
    missed: BTreeSet<String>,
    /// What is kept on disk of which pools devices are of.
    kept: Known,
    /// Why it could not be kept at the last try, if so.
    unkept: Option<String>,
    profiles: Profiles,
    /// What is kept for GPUs.
    queues: Queues,
    /// Which devices are slower than their pools allow.
    slow: Slow,
    /// Which are more worn.
    wear: Wear,
    gpus: Vec<GpuFact>,
    /// NVMe controllers of the node, as they were at the last look at names.
    controllers: Vec<ControllerFact>,
    /// Drives of devices, likewise.
    drives: BTreeMap<String, controllers::Drive>,
}

impl Claims {
    /// Starts the thread; it waits for its first wish.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub(crate) fn start(parts: ClaimsParts) -> Result<Claims, AgentError> {
        let wish = Arc::new(Mutex::new(None));
        let (bell, rings) = bounded(1);
        let desk = Desk { wish: wish.clone(), bell };
        let kept = parts.known.load().unwrap_or_else(|error| {
            tracing::warn!(
                error,
                "which pools devices are of cannot be read; they say so themselves when they are opened"
            );
            Known::default()
        });
        let profiles = Profiles::new(parts.config.folder(), parts.admin.slack.clone());
        let worker = Worker {
            profiles,
            queues: Queues::default(),
            slow: Slow::default(),
            wear: Wear::default(),
            gpus: Vec::new(),
            parts,
            wish,
            board: Board::knowing(kept.clone()),
            desired: None,
            ended: bounded(EVENTS_MAX),
            said: BTreeMap::new(),
            resolved: Instant::now(),
            missed: BTreeSet::new(),
            kept,
            unkept: None,
            controllers: Vec::new(),
            drives: BTreeMap::new(),
        };
        let thread = std::thread::Builder::new()
            .name("claims".to_owned())
            .spawn(move || worker.run(&rings))
            .map_err(|error| AgentError::new(ErrorKind::Resource, "cannot start a thread").because(error))?;
        Ok(Claims { desk, thread })
    }

    /// Where wishes are left.
    pub(crate) fn desk(&self) -> Desk {
        self.desk.clone()
    }

    /// Ends the thread; devices stay as they are.
    pub(crate) fn stop(self) {
        // Waits for room: a wish that nobody has looked at yet may stand before it.
        let _ = self.desk.bell.send(Bell::Stop);
        // A panic has ended the process already.
        let _ = self.thread.join();
    }
}

impl Desk {
    /// Leaves a wish in place of the one before. Never blocks.
    pub(crate) fn leave(&self, desired: Desired) {
        *self.wish.lock().unwrap_or_else(PoisonError::into_inner) = Some(desired);
        match self.bell.try_send(Bell::Wish) {
            // Somebody has rung already, or the agent stops.
            Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
        }
    }
}

impl Worker {
    fn run(mut self, rings: &Receiver<Bell>) {
        let (looks, released, ended) = (tick(LOOK_EVERY), self.parts.released.clone(), self.ended.1.clone());
        loop {
            select! {
                recv(rings) -> bell => match bell {
                    Ok(Bell::Wish) => self.take_wish(),
                    Ok(Bell::Stop) | Err(_) => return,
                },
                recv(ended) -> ended => {
                    if let Ok(ended) = ended {
                        self.take_end(ended);
                    }
                }
                recv(released) -> released => match released {
                    Ok(Released { id, device }) => {
                        device.stop();
                        self.board.released(id);
                    }
                    // The core has stopped.
                    Err(_) => return,
                },
                recv(looks) -> _ => {}
            }
            self.turn();
        }
    }

    /// Does what follows from what has happened, and tells how things are.
    fn turn(&mut self) {
        let view = facts::core_view(&self.parts.admin);
        for device in view.iter().flat_map(|view| &view.devices) {
            if let Some(reason) = &device.lost {
                let loss = match device.info.sync_failed.load(Ordering::Acquire) {
                    true => Loss::Sync,
                    false => Loss::Other,
                };
                self.board.lost(device.id, reason, loss);
            }
        }
        let retry = if self.resolved.elapsed() >= RESOLVE_EVERY {
            self.resolve();
            Retry::Refused
        } else {
            Retry::Nothing
        };
        for action in self.board.decide(retry) {
            self.act(action);
        }
        // Said there, and tried again at the next turn.
        let _ = self.keep_known();
        self.ask_drives();
        // Without the core's word nothing is known. It has taken what was attached before it was asked.
        let (Some(desired), Some(view)) = (&self.desired, view) else { return };
        if self.board.is_settled() && !self.parts.admin.ready.swap(true, Ordering::AcqRel) {
            tracing::info!(generation = desired.generation, "the node's first spec is applied");
            self.parts.complete.store(true, Ordering::Release);
        }
        let metrics = &self.parts.context.metrics;
        let open = facts::allowed(&self.board, desired);
        self.slow.look(Instant::now(), &open, |id| metrics.read_times(id));
        let look = facts::Look {
            controllers: &self.controllers,
            gpus: &self.gpus,
            profiles: &self.profiles,
            queues: &self.queues,
            slow: &self.slow,
            wear: &self.wear,
            drives: &self.drives,
        };
        let facts = facts::gather(&self.parts, &self.board, desired, &look, &view);
        self.parts.facts.send_replace(Some(facts));
    }

    /// Has drives asked how worn they are, when it is time.
    fn ask_drives(&mut self) {
        for (path, at) in self.wear.due(Instant::now(), &facts::open_devices(&self.board)) {
            let (ended, asked) = (self.ended.0.clone(), path.clone());
            let body = move || {
                let log = reprise_io::health_log(&at);
                let _ = ended.send(Ended::Asked { path: asked, log });
            };
            if spawn("asking-a-drive", body).is_err() {
                self.wear.answered(&path, None);
            }
        }
    }

    /// Keeps on disk which pools devices are of, when that has changed. What cannot be kept is said once, and tried again.
    fn keep_known(&mut self) -> Result<(), String> {
        if *self.board.known() != self.kept {
            let known = self.board.known().clone();
            if let Err(error) = self.parts.known.save(&known) {
                let words = error.to_string();
                if self.unkept.as_ref() != Some(&words) {
                    tracing::warn!(%error, "which pools devices are of cannot be kept on this node");
                    self.unkept = Some(words.clone());
                }
                return Err(words);
            }
            (self.kept, self.unkept) = (known, None);
        }
        Ok(())
    }

    fn take_wish(&mut self) {
        let wish = self.wish.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(desired) = wish else { return };
        for problem in &desired.problems {
            tracing::warn!(problem = problem.message, "the node's spec cannot be read in part");
        }
        if let Some(mode) = desired.mode {
            let news =
                self.parts.modes.lock().unwrap_or_else(PoisonError::into_inner).wanted(facts::mode(mode));
            self.tell_core(news);
        }
        self.profiles.want(desired.profiles.clone());
        self.queues.want(desired.queues.clone());
        self.desired = Some(desired);
        self.follow_configuration();
        self.resolve();
    }

    /// Looks again which devices are meant. What cannot be read stays as it was.
    fn resolve(&mut self) {
        self.resolved = Instant::now();
        // The file may have come after the wish for it, and so may those of profiles.
        self.follow_configuration();
        self.profiles.look();
        if let Some(bindings) = &self.parts.bindings {
            bindings.look();
        }
        self.gpus = gpus::read(&self.parts.root);
        let Some(desired) = &self.desired else { return };
        // What cannot be read may be a claim, and then none has gone.
        if desired.problems.is_empty() {
            self.board.let_go(&desired.claims);
        }
        let held = self.board.held(&desired.claims);
        let names = Names { root: &self.parts.root, held, missed: &mut self.missed };
        let mut pools = resolve::resolve(&desired.claims, names);
        let kept = self.board.wanted().iter().filter(|pool| desired.is_unreadable(&pool.pool));
        let is_known = |name: &str| desired.claims.iter().any(|claim| claim.pool == name);
        let kept: Vec<_> = kept.filter(|pool| !is_known(&pool.pool)).cloned().collect();
        pools.extend(kept);
        self.board.want(pools);
        let sys = self.parts.root.join("sys");
        self.controllers = controllers::look(&sys, self.board.wanted());
        self.queues.look(&self.controllers);
        self.drives = controllers::drives(&sys, self.board.wanted());
    }

    /// Takes over from the configuration file what an agent can change while it runs.
    fn follow_configuration(&mut self) {
        let wanted = self.desired.as_ref().and_then(|desired| desired.configuration_digest.clone());
        if let Some(permille) = self.parts.config.follow(wanted.as_deref()) {
            self.tell_core(Some(CoreEvent::PoolFree { permille }));
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Detach(id) => {
                tracing::info!(device = id.0, "closing a device");
                let _ = self.inbox().send(Input::Detach(id));
            }
            Action::Open { identity, places } => {
                let (settings, context) = (self.parts.pool.clone(), self.parts.context.clone());
                let names: Vec<ToOpen> = places.clone();
                let ended = self.ended.0.clone();
                let body = move || {
                    let _ = ended.send(Ended::Opened(opening::open(places, identity, &settings, &context)));
                };
                if let Err(trouble) = spawn("opening", body) {
                    for place in names {
                        self.board.refused(&place.path, Some(place.id), trouble.clone());
                    }
                }
            }
            Action::Wipe(place) => {
                let (ended, name) = (self.ended.0.clone(), place.path.clone());
                let body = move || {
                    let result = opening::wipe(&place);
                    let _ = ended.send(Ended::Erased { path: place.path, at: place.at, result });
                };
                if let Err(trouble) = spawn("wiping", body) {
                    self.board.refused(&name, None, trouble);
                }
            }
        }
    }

    fn take_end(&mut self, ended: Ended) {
        match ended {
            Ended::Opened(tried) => {
                for Tried { path, id, result } in tried {
                    match result {
                        Ok((opened, facts)) => {
                            self.attach(id, *opened);
                            self.said.remove(&path);
                            self.board.opened(&path, id, facts);
                        }
                        Err(trouble) => {
                            self.say(&path, &trouble);
                            self.board.refused(&path, Some(id), trouble);
                        }
                    }
                }
            }
            Ended::Asked { path, log } => self.wear.answered(&path, log),
            Ended::Erased { path, at, result: Ok(Left::File) } => {
                // Noted before it goes: otherwise it would be missed after a restart in between.
                self.board.erased(&path);
                if let Err(words) = self.keep_known() {
                    let message = format!("it is erased, which cannot be noted on this node: {words}");
                    let trouble = Trouble { reason: Reason::DeviceFailed, message };
                    self.say(&path, &trouble);
                    return self.board.refused(&path, None, trouble);
                }
                let (ended, name) = (self.ended.0.clone(), path.clone());
                let body = move || {
                    let _ = ended.send(Ended::Wiped { path, result: opening::remove(&at) });
                };
                if let Err(trouble) = spawn("removing", body) {
                    self.board.refused(&name, None, trouble);
                }
            }
            Ended::Erased { path, result: Ok(Left::Nothing), .. } | Ended::Wiped { path, result: Ok(()) } => {
                tracing::info!(path, "the data of a device is destroyed");
                self.board.wiped(&path);
            }
            Ended::Erased { path, result: Err(trouble), .. }
            | Ended::Wiped { path, result: Err(trouble) } => {
                self.say(&path, &trouble);
                self.board.refused(&path, None, trouble);
            }
        }
    }

    /// Says once why a device is not used.
    fn say(&mut self, path: &str, trouble: &Trouble) {
        if self.said.get(path) != Some(trouble) {
            tracing::warn!(path, reason = %trouble.reason, message = trouble.message, "a device of a claim is not used");
            self.said.insert(path.to_owned(), trouble.clone());
        }
    }

    /// Hands an open device to the core, and then what was found on it, piece by piece.
    fn attach(&self, id: reprise_agent_core::effect::DeviceId, opened: OpenedDevice) {
        let OpenedDevice { device, pool, stored, names, .. } = opened;
        crate::runtime::recall_tenants(&self.parts.admin.tenants, &names);
        self.parts.context.metrics.device_opened(id, device.info());
        // A core that has stopped wants nothing any more.
        let _ = self.inbox().send(Input::Attach(Box::new(Attached { id, device, pool })));
        for blocks in stored.chunks(RECOVERED_PER_INPUT) {
            let event = CoreEvent::Recovered { device: id, blocks: blocks.to_vec() };
            let _ = self.inbox().send(Input::Event(event));
        }
    }

    fn tell_core(&self, event: Option<CoreEvent>) {
        if let Some(event) = event {
            let _ = self.inbox().send(Input::Event(event));
        }
    }

    fn inbox(&self) -> &Inbox {
        &self.parts.context.inbox
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Trouble> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map(drop).map_err(|error| Trouble {
        reason: reprise_agent_kubernetes::Reason::OverCapacity,
        message: format!("no thread is to be had: {error}"),
    })
}
