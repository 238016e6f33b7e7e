//! The devices of this node's pool: opened, recovered or formatted, then one thread each.
//!
//! The thread that opens a device keeps it: it reads the journal, waits for the verdict of the others (one pool has
//! one identity), formats if the device is fresh, and becomes the device's worker. Devices open in parallel.
//!
//! A device of the configuration that cannot be opened at start is an error for the operator. One that is lost later costs its
//! capacity and nothing else. Devices that are claimed while the agent runs ([`open_some`]) fail each for itself; one that is closed
//! answers whatever still comes with errors until the core has let go of it.

mod health;
mod identity;
mod names;
mod open;
mod pieces;
mod reads;
mod worker;

pub(crate) use identity::{Membership, PoolIdentity};
pub(crate) use open::{Unusable, unusable};
pub(crate) use worker::read_error;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use reprise_agent_core::effect::{DeviceId, ReadBatch};
use reprise_agent_core::pool::{DeviceError, DeviceOp, DevicePool, PoolParams, StoredBlock};
use reprise_buffers::Arena;
use reprise_io::{Caching, EngineKind, Waker};
use reprise_policy::{TenantId, TenantName};

use crate::config::{DeviceSettings, PoolSettings};
use crate::core_loop::{Clock, Inbox};
use crate::error::{AgentError, ErrorKind};
use crate::metrics::Metrics;
use worker::{Surroundings, Worker};

/// Commands that a device may have waiting. What the core has under way at the most: a batch of reads for each of 64
/// loads of 256 sessions (16,384) and of 1,024 serves, and the operations of its write batches (a few × 1,024).
const COMMANDS_MAX: usize = 32_768;

/// Something for a device to do.
#[derive(Debug)]
pub(crate) enum Command {
    /// A pool operation; answered with `Event::DeviceDone`.
    Op(DeviceOp),
    /// Blocks to read; answered with fill updates.
    Read(ReadBatch),
    /// Give up the device; answer what is under way and what still comes with errors.
    Close,
    /// End.
    Stop,
}

/// A command that did not reach its device.
#[derive(Debug)]
pub(crate) struct Unsent {
    pub(crate) command: Command,
    pub(crate) why: DeviceError,
}

/// A running device.
pub(crate) struct Device {
    commands: Sender<Command>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    info: DeviceInfo,
}

/// What there is to know about a device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceInfo {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) engine: EngineKind,
    pub(crate) caching: Caching,
    pub(crate) recovery: RecoveryInfo,
    /// Set when a sync has failed: with a page cache, what is read from then on may not be on the medium.
    pub(crate) sync_failed: Arc<AtomicBool>,
    /// Operations since it was opened that met an error of the medium, or were lost on their way to it.
    pub(crate) media_errors: Arc<AtomicU32>,
}

/// What opening a device took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecoveryInfo {
    /// Time to read the journal.
    pub(crate) took: Duration,
    /// Journal records read.
    pub(crate) records: u64,
    /// Blocks found.
    pub(crate) blocks: u64,
    /// The device was fresh.
    pub(crate) formatted: bool,
}

/// What devices need of the agent.
#[derive(Clone)]
pub(crate) struct DeviceContext {
    pub(crate) inbox: Inbox,
    pub(crate) arena: Arc<Arena>,
    pub(crate) clock: Clock,
    pub(crate) metrics: Arc<Metrics>,
}

/// A device with what the core needs to know of it.
pub(crate) struct OpenedDevice {
    pub(crate) device: Device,
    pub(crate) pool: DevicePool,
    pub(crate) stored: Vec<StoredBlock>,
    /// Of tenants that have blocks there, as far as the blocks say.
    pub(crate) names: BTreeMap<TenantId, TenantName>,
    /// Which pool it is of.
    pub(crate) membership: Membership,
}

/// What an opening thread reports first.
enum Found {
    /// A pool.
    Pool(Box<Recovered>),
    /// Nothing: to be formatted with this size.
    Blank { device_bytes: u64 },
}

/// A pool that was read.
struct Recovered {
    pool: DevicePool,
    stored: Vec<StoredBlock>,
    names: BTreeMap<TenantId, TenantName>,
    recovery: RecoveryInfo,
}

/// What an opening thread is told when all have reported.
enum Verdict {
    Keep,
    Format(PoolParams),
}

/// A device while it is being opened.
struct Opening {
    path: PathBuf,
    found: Receiver<Result<Found, AgentError>>,
    verdict: Sender<Verdict>,
    opened: Receiver<Result<(Option<Recovered>, Facts), AgentError>>,
    commands: Sender<Command>,
    sync_failed: Arc<AtomicBool>,
    media_errors: Arc<AtomicU32>,
    thread: JoinHandle<()>,
}

/// What the worker's side knows about the open device.
struct Facts {
    bytes: u64,
    engine: EngineKind,
    caching: Caching,
    waker: Waker,
}

/// Opens all devices, in configuration order.
///
/// # Errors
/// The first device that cannot be used, with what to do about it.
pub(crate) fn open_all(
    settings: &PoolSettings,
    context: &DeviceContext,
) -> Result<Vec<OpenedDevice>, AgentError> {
    let numbered = |(index, device): (usize, &DeviceSettings)| {
        let index = u8::try_from(index).expect("the configuration allows 32 devices");
        (DeviceId(index), device.clone())
    };
    let devices: Vec<(DeviceId, DeviceSettings)> =
        settings.devices.iter().enumerate().map(numbered).collect();
    open_some(&devices, settings, PoolIdentity::default(), context).into_iter().collect()
}

/// Opens devices of one pool side by side, each under the number that it comes with; answers in their order. `identity` is that of
/// the devices of the pool that are open already.
pub(crate) fn open_some(
    devices: &[(DeviceId, DeviceSettings)],
    settings: &PoolSettings,
    mut identity: PoolIdentity,
    context: &DeviceContext,
) -> Vec<Result<OpenedDevice, AgentError>> {
    let mut errors: Vec<Option<AgentError>> = Vec::with_capacity(devices.len());
    let mut openings = Vec::with_capacity(devices.len());
    for (id, device) in devices {
        let begun = begin(*id, device, settings, context);
        errors.push(begun.map(|opening| openings.push(opening)).err());
    }
    let found = openings.iter().map(|opening| match answer(&opening.found, &opening.path) {
        Ok(found) => (Some(found), None),
        Err(error) => (None, Some(error)),
    });
    let (found, failed): (Vec<Option<Found>>, Vec<Option<AgentError>>) = found.unzip();
    let verdicts = identity::decide(&mut identity, &openings, &found, settings.segment_bytes);
    let parts = openings.into_iter().zip(found.into_iter().zip(failed)).zip(verdicts);
    let mut opened = parts.map(|((opening, (found, failed)), verdict)| match (found, failed, verdict) {
        (Some(found), _, Some(Ok(verdict))) => {
            // The thread is waiting for this; if it ended, `finish` gets its error.
            let _ = opening.verdict.send(verdict);
            finish(opening, found)
        }
        (_, Some(error), _) | (_, _, Some(Err(error))) => Err(error),
        (_, None, None) => unreachable!("who has found a device has a verdict"),
        (None, None, Some(Ok(_))) => unreachable!("a verdict is on what was found"),
    });
    let mut results = Vec::with_capacity(devices.len());
    for error in errors {
        results.push(match error {
            Some(error) => Err(error),
            None => opened.next().expect("every thread that was begun has a result"),
        });
    }
    results
}

impl Device {
    /// Hands a command to the device; never blocks.
    ///
    /// # Errors
    /// Gives the command back when the device's queue is full or its thread has ended.
    pub(crate) fn submit(&self, command: Command) -> Result<(), Unsent> {
        match self.commands.try_send(command) {
            Ok(()) => {
                self.waker.wake();
                Ok(())
            }
            Err(TrySendError::Full(command)) => Err(Unsent { command, why: DeviceError::Refused }),
            Err(TrySendError::Disconnected(command)) => Err(Unsent { command, why: DeviceError::Lost }),
        }
    }

    /// Has the device given up; it goes on answering, with errors, until it is stopped.
    pub(crate) fn close(&self) {
        if let Err(Unsent { why, .. }) = self.submit(Command::Close) {
            // Its queue has a place for everything that the core has under way, and for this.
            tracing::error!(path = %self.info.path.display(), %why, "a device cannot be told to close");
        }
    }

    /// What there is to know about it.
    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Commands that its thread has not taken yet.
    pub(crate) fn waiting(&self) -> usize {
        self.commands.len()
    }

    /// Ends the thread when its operations under way have ended.
    pub(crate) fn stop(mut self) {
        // A full queue: the disconnection below ends the thread just as well.
        let _ = self.submit(Command::Stop);
        let thread = self.thread.take();
        let (closed, _) = bounded(0);
        drop(std::mem::replace(&mut self.commands, closed));
        self.waker.wake();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// Starts the thread of one device.
fn begin(
    id: DeviceId,
    device: &DeviceSettings,
    settings: &PoolSettings,
    context: &DeviceContext,
) -> Result<Opening, AgentError> {
    let (found_sender, found) = bounded(1);
    let (verdict, verdict_receiver) = bounded(1);
    let (opened_sender, opened) = bounded(1);
    let (commands, command_receiver) = bounded(COMMANDS_MAX);
    let sync_failed = Arc::<AtomicBool>::default();
    let media_errors = Arc::<AtomicU32>::default();
    let around = Surroundings {
        device: id,
        path: device.path.display().to_string(),
        commands: command_receiver,
        inbox: context.inbox.clone(),
        arena: context.arena.clone(),
        clock: context.clock,
        metrics: context.metrics.device(id),
        sync_failed: sync_failed.clone(),
        media_errors: media_errors.clone(),
    };
    let recipe = open::Recipe::new(device, settings, &context.arena);
    let span = tracing::info_span!("device", path = %device.path.display());
    let body = move || {
        let _device = span.entered();
        let (mut open, found) = match open::open(&recipe) {
            Ok(open) => open,
            Err(error) => return drop(found_sender.send(Err(error))),
        };
        if found_sender.send(Ok(found)).is_err() {
            return;
        }
        // The starter gives up by dropping its end.
        let Ok(verdict) = verdict_receiver.recv() else { return };
        let result = open.settle(&verdict).map(|recovered| (recovered, open.facts()));
        let failed = result.is_err();
        if opened_sender.send(result).is_ok() && !failed {
            Worker::new(around, open.into_engine()).run();
        }
    };
    let thread = std::thread::Builder::new()
        .name(format!("device-{}", id.0))
        .spawn(body)
        .map_err(|error| AgentError::new(ErrorKind::Resource, "cannot start a thread").because(error))?;
    let path = device.path.clone();
    Ok(Opening { path, found, verdict, opened, commands, sync_failed, media_errors, thread })
}

fn finish(opening: Opening, found: Found) -> Result<OpenedDevice, AgentError> {
    let (settled, facts) = answer(&opening.opened, &opening.path)?;
    // A pool that was there comes with the first report, a fresh one with the second.
    let recovered = match found {
        Found::Pool(recovered) => *recovered,
        Found::Blank { .. } => settled.ok_or_else(|| {
            AgentError::new(
                ErrorKind::Internal,
                format!("device '{}' was not formatted", opening.path.display()),
            )
        })?,
    };
    let Recovered { pool, stored, names, recovery } = recovered;
    let membership = Membership::of(&pool);
    let Facts { bytes, engine, caching, waker } = facts;
    let (sync_failed, media_errors) = (opening.sync_failed, opening.media_errors);
    let info = DeviceInfo { path: opening.path, bytes, engine, caching, recovery, sync_failed, media_errors };
    tracing::info!(
        path = %info.path.display(), bytes, engine = %info.engine, blocks = recovery.blocks, records = recovery.records,
        took_ms = recovery.took.as_millis(), formatted = recovery.formatted, "pool device ready"
    );
    let device = Device { commands: opening.commands, waker, thread: Some(opening.thread), info };
    Ok(OpenedDevice { device, pool, stored, names, membership })
}

/// What a thread has to say; a thread that ends without a word has panicked.
fn answer<T>(from: &Receiver<Result<T, AgentError>>, path: &std::path::Path) -> Result<T, AgentError> {
    from.recv().unwrap_or_else(|_| {
        Err(AgentError::new(ErrorKind::Internal, format!("the thread of device '{}' ended", path.display())))
    })
}
