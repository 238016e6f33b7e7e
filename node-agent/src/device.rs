//! The devices of this node's pool: opening, recovery or formatting, then one thread per device.
//!
//! The thread that opens a device keeps it: it reads the journal, waits for the decision based on all
//! devices (a pool has one identity), formats a blank device, and becomes the device's worker. Devices open
//! in parallel.
//!
//! A configured device that cannot be opened at start is an error. A device that is lost later costs only
//! its capacity. Devices claimed at run time ([`open_some`]) fail independently. A closed device completes
//! all commands with errors until the core has released it.

pub(crate) mod access;
mod encryption;
mod health;
mod identity;
mod names;
mod open;
mod pieces;
mod reads;
mod user_nvme;
mod worker;

pub(crate) use identity::{Membership, PoolIdentity};
pub(crate) use open::{OpenErrorKind, is_held_by_earlier, open_error_kind};
pub(crate) use user_nvme::{ControllerHandle, ControllerKind, ControllerProperties};
pub(crate) use worker::read_error;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use reprise_agent_core::effect::{DeviceId, FillId, ReadBatch};
use reprise_agent_core::pool::{DeviceError, DeviceOp, DevicePool, PoolParams, StoredBlock};
use reprise_buffers::{Arena, Region};
use reprise_io::{Caching, DeviceDescription, EngineKind, SharedFile, Waker};
use reprise_nvme::QueueLender;
use reprise_policy::fair_order::Weights;
use reprise_policy::{DevicePlace, TenantId, TenantName};

use crate::config::{DeviceSettings, PoolSettings};
use crate::core_loop::{Clock, Inbox};
use crate::encryption::EncryptionKeys;
use crate::error::{AgentError, ErrorKind};
use crate::metrics::Metrics;
use crate::queue_grants::LendingDevice;
use worker::{Worker, WorkerContext};

/// Capacity of a device's command queue: the core's maximum in flight. That is a batch of reads for each of
/// 64 loads of 256 sessions (16,384) and of 1,024 serves, and the operations of its write batches (a few ×
/// 1,024).
const COMMANDS_MAX: usize = 32_768;

/// A command for a device.
#[derive(Debug)]
pub(crate) enum Command {
    /// A pool operation; completes with `Event::DeviceDone`.
    Op(DeviceOp),
    /// Blocks to read; complete with fill updates.
    Read(ReadBatch),
    /// Something awaits these reads ahead from now on. A device that takes no commands fails them in any case.
    Promote(Vec<FillId>),
    /// End the registration of a region's memory; the sender is dropped when it has ended.
    ReleaseRegion(u16, Sender<()>),
    /// Register the new memory of a region.
    AddRegion(Arc<Region>),
    /// Close the device: fail everything in flight and all later commands.
    Close,
    Stop,
}

/// A command that was not queued.
#[derive(Debug)]
pub(crate) struct UnsentCommand {
    pub(crate) command: Command,
    pub(crate) why: DeviceError,
}

pub(crate) struct Device {
    commands: Sender<Command>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    /// The file for clients that read and write it themselves, if it is suitable.
    shared: Option<Arc<SharedFile>>,
    info: DeviceInfo,
}

/// Properties of an open device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceInfo {
    pub(crate) description: DeviceDescription,
    pub(crate) bytes: u64,
    pub(crate) engine: EngineKind,
    /// The controller, if this process drives it.
    pub(crate) controller: Option<ControllerHandle>,
    pub(crate) caching: Caching,
    /// Place in the machine, if it has one.
    pub(crate) place: Option<DevicePlace>,
    pub(crate) recovery: RecoveryInfo,
    /// Set when a sync has failed: with a page cache, later reads may return data that is not on the
    /// medium.
    pub(crate) sync_failed: Arc<AtomicBool>,
    /// Set with the reason and the remedy when the device rejects writes.
    pub(crate) write_error: Arc<OnceLock<String>>,
    /// Operations since opening that failed with a medium error or were lost on the way to it.
    pub(crate) media_errors: Arc<AtomicU32>,
    /// Bytes that the drive counts as written since it was opened; 0 while its health log is not read.
    pub(crate) drive_written_bytes: Arc<AtomicU64>,
}

impl DeviceInfo {
    /// Returns the name of the engine, which states an emulated controller.
    pub(crate) fn engine_name(&self) -> String {
        let kind = self.controller.as_ref().map(|controller| controller.properties().kind);
        match kind {
            Some(ControllerKind::Emulated) => format!("{}-emulated", self.engine),
            Some(ControllerKind::Hardware) | None => self.engine.to_string(),
        }
    }
}

/// Result of the recovery.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecoveryInfo {
    /// Time to read the journal.
    pub(crate) took: Duration,
    /// Number of journal records read.
    pub(crate) records: u64,
    /// Number of blocks found.
    pub(crate) blocks: u64,
    /// Whether the device was blank and has been formatted.
    pub(crate) formatted: bool,
    /// Bytes that the pool gained because its configured size or its device grew.
    pub(crate) grown_bytes: u64,
}

/// Dependencies shared by all devices.
#[derive(Clone)]
pub(crate) struct DeviceContext {
    pub(crate) inbox: Inbox,
    pub(crate) arena: Arc<Arena>,
    pub(crate) keys: EncryptionKeys,
    /// Weights of tenants in shares of devices.
    pub(crate) bandwidth: Weights<TenantId>,
    pub(crate) clock: Clock,
    pub(crate) metrics: Arc<Metrics>,
}

/// A running device with its recovered content.
pub(crate) struct OpenedDevice {
    pub(crate) device: Device,
    pub(crate) pool: DevicePool,
    pub(crate) stored: Vec<StoredBlock>,
    /// Names of tenants with blocks on the device, as far as block headers contain them.
    pub(crate) names: BTreeMap<TenantId, TenantName>,
    /// The device's position in its pool.
    pub(crate) membership: Membership,
}

/// The content of a device, as first reported by its opening thread.
enum DeviceContent {
    Pool(Box<RecoveredPool>),
    /// No data; to be formatted with this size.
    Blank {
        device_bytes: u64,
    },
}

struct RecoveredPool {
    pool: DevicePool,
    stored: Vec<StoredBlock>,
    names: BTreeMap<TenantId, TenantName>,
    recovery: RecoveryInfo,
}

/// What the opening thread does after all threads have reported.
enum OpenDecision {
    Keep,
    Format(PoolParams),
}

/// A device that is being opened.
struct Opening {
    description: DeviceDescription,
    found: Receiver<Result<DeviceContent, AgentError>>,
    decision: Sender<OpenDecision>,
    opened: Receiver<Result<(Option<RecoveredPool>, OpenProperties), AgentError>>,
    commands: Sender<Command>,
    sync_failed: Arc<AtomicBool>,
    write_error: Arc<OnceLock<String>>,
    media_errors: Arc<AtomicU32>,
    thread: JoinHandle<()>,
}

/// Properties that the worker side reports about an open device.
struct OpenProperties {
    bytes: u64,
    engine: EngineKind,
    caching: Caching,
    shared: Option<Arc<SharedFile>>,
    controller: Option<ControllerHandle>,
    waker: Waker,
}

/// Opens all devices in configuration order.
///
/// # Errors
/// The first device that cannot be used, with the remedy.
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

/// Opens devices of one pool in parallel under the given numbers, and returns the results in that order.
/// `identity` covers the devices of the pool that are already open.
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
    let found = openings.iter().map(|opening| match answer(&opening.found, &opening.description) {
        Ok(found) => (Some(found), None),
        Err(error) => (None, Some(error)),
    });
    let (found, failed): (Vec<Option<DeviceContent>>, Vec<Option<AgentError>>) = found.unzip();
    let decisions = identity::decide(&mut identity, &openings, &found, settings.segment_bytes);
    let parts = openings.into_iter().zip(found.into_iter().zip(failed)).zip(decisions);
    let mut opened = parts.map(|((opening, (found, failed)), decision)| match (found, failed, decision) {
        (Some(found), _, Some(Ok(decision))) => {
            // Fails if the thread has ended; `finish` then returns its error.
            let _ = opening.decision.send(decision);
            finish(opening, found)
        }
        (_, Some(error), _) | (_, _, Some(Err(error))) => Err(error),
        (_, None, None) => unreachable!("a thread that reported content has a decision"),
        (None, None, Some(Ok(_))) => unreachable!("a decision requires reported content"),
    });
    let mut results = Vec::with_capacity(devices.len());
    for error in errors {
        results.push(match error {
            Some(error) => Err(error),
            None => opened.next().expect("every started thread has a result"),
        });
    }
    results
}

impl Device {
    /// Queues a command for the device; never blocks.
    ///
    /// # Errors
    /// Returns the command if the device's queue is full or its thread has ended.
    pub(crate) fn submit(&self, command: Command) -> Result<(), UnsentCommand> {
        match self.commands.try_send(command) {
            Ok(()) => {
                self.waker.wake();
                Ok(())
            }
            Err(TrySendError::Full(command)) => Err(UnsentCommand { command, why: DeviceError::Refused }),
            Err(TrySendError::Disconnected(command)) => {
                Err(UnsentCommand { command, why: DeviceError::Lost })
            }
        }
    }

    /// Closes the device; it completes commands with errors until it is stopped.
    pub(crate) fn close(&self) {
        if let Err(UnsentCommand { why, .. }) = self.submit(Command::Close) {
            // The queue has room for the core's maximum in flight, and for this command.
            tracing::error!(path = %self.info.description, %why, "cannot queue the close command of a device");
        }
    }

    /// Returns the properties of the device.
    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Returns the file for clients, if it is suitable.
    pub(crate) fn shared(&self) -> Option<&SharedFile> {
        self.shared.as_deref()
    }

    /// Returns how sessions get queue pairs of the device; `None` unless this process drives its controller.
    pub(crate) fn lending(&self) -> Option<LendingDevice> {
        let controller = self.info.controller.clone()?;
        let ControllerProperties { namespace, kind, .. } = *controller.properties();
        let serial = controller.properties().serial.as_str().into();
        let is_emulated = kind == ControllerKind::Emulated;
        let find = move || controller.controller().map(|controller| controller as Arc<dyn QueueLender>);
        Some(LendingDevice { find: Arc::new(find), serial, namespace, is_emulated })
    }

    /// Returns the number of commands that its thread has not received yet.
    pub(crate) fn waiting(&self) -> usize {
        self.commands.len()
    }

    /// Ends the thread after its operations in flight have completed.
    pub(crate) fn stop(mut self) {
        // If the queue is full, the disconnection below ends the thread.
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
    let (decision, decision_receiver) = bounded(1);
    let (opened_sender, opened) = bounded(1);
    let (commands, command_receiver) = bounded(COMMANDS_MAX);
    let sync_failed = Arc::<AtomicBool>::default();
    let write_error = Arc::<OnceLock<String>>::default();
    let media_errors = Arc::<AtomicU32>::default();
    let around = WorkerContext {
        device: id,
        path: device.description.to_string(),
        commands: command_receiver,
        inbox: context.inbox.clone(),
        arena: context.arena.clone(),
        keys: context.keys.clone(),
        bandwidth: context.bandwidth.clone(),
        clock: context.clock,
        metrics: context.metrics.device(id),
        sync_failed: sync_failed.clone(),
        write_error: write_error.clone(),
        media_errors: media_errors.clone(),
    };
    let params_of_device = open::OpenParams::new(device, settings, &context.arena);
    let span = tracing::info_span!("device", path = %device.description);
    let body = move || {
        let _device = span.entered();
        let (mut open, found) = match open::open(&params_of_device) {
            Ok(open) => open,
            Err(error) => return drop(found_sender.send(Err(error))),
        };
        if found_sender.send(Ok(found)).is_err() {
            return;
        }
        // The caller aborts by dropping its end.
        let Ok(decision) = decision_receiver.recv() else { return };
        // It refers to the memory of all regions, which may be replaced later.
        drop(params_of_device);
        let result = open.apply(&decision).map(|recovered| (recovered, open.properties()));
        let failed = result.is_err();
        if opened_sender.send(result).is_ok() && !failed {
            Worker::new(around, open.into_engine()).run();
        }
    };
    let thread =
        std::thread::Builder::new().name(format!("device-{}", id.0)).spawn(body).map_err(|error| {
            AgentError::new(ErrorKind::Resource, "cannot spawn a device thread").with_source(error)
        })?;
    let description = device.description.clone();
    Ok(Opening {
        description,
        found,
        decision,
        opened,
        commands,
        sync_failed,
        write_error,
        media_errors,
        thread,
    })
}

fn finish(opening: Opening, found: DeviceContent) -> Result<OpenedDevice, AgentError> {
    let (formatted, properties) = answer(&opening.opened, &opening.description)?;
    // An existing pool is in the first report, a formatted one in the second.
    let recovered = match found {
        DeviceContent::Pool(recovered) => *recovered,
        DeviceContent::Blank { .. } => formatted.ok_or_else(|| {
            AgentError::new(
                ErrorKind::Internal,
                format!("device '{}' was not formatted", opening.description),
            )
        })?,
    };
    let RecoveredPool { pool, stored, names, recovery } = recovered;
    let membership = Membership::of(&pool);
    let OpenProperties { bytes, engine, caching, shared, controller, waker } = properties;
    let Opening { description, commands, sync_failed, write_error, media_errors, thread, .. } = opening;
    let info = DeviceInfo {
        description,
        bytes,
        engine,
        controller,
        caching,
        place: pool.place().cloned(),
        recovery,
        sync_failed,
        write_error,
        media_errors,
        drive_written_bytes: Arc::default(),
    };
    tracing::info!(
        path = %info.description, bytes, engine = info.engine_name(), blocks = recovery.blocks, records = recovery.records,
        took_ms = recovery.took.as_millis(), formatted = recovery.formatted, grown_bytes = recovery.grown_bytes,
        "pool device ready"
    );
    let device = Device { commands, waker, thread: Some(thread), shared, info };
    Ok(OpenedDevice { device, pool, stored, names, membership })
}

/// Receives a report of a thread; a missing report means that the thread panicked.
fn answer<T>(from: &Receiver<Result<T, AgentError>>, device: &DeviceDescription) -> Result<T, AgentError> {
    from.recv().unwrap_or_else(|_| {
        Err(AgentError::new(ErrorKind::Internal, format!("the thread of device '{device}' ended")))
    })
}
