//! The agent's part in a Kubernetes cluster: opens and closes devices as the node's claims require, applies
//! the node's mode, and reports the node's state.
//!
//! ```text
//!  watch ── Desired ──► reconciler thread ── Attach, Detach, Mode ──► core
//!    ▲                     │ ▲   │ ▲ Released                          │
//!    └────── Facts ────────┘ │   └─┴───────────────────────────────────┘
//!                            └── threads that open and wipe devices
//! ```
//!
//! The thread also reads the health logs of drives ([`device_health`]), scans the node's NVMe controllers
//! and GPUs, reserves queue pairs for GPUs ([`queue_reservations`]), and loads slack profiles
//! ([`profiles`]).
//!
//! Events are handled one at a time: each is reported to the [`reconciler`], which returns the next
//! actions. Slow work runs on other threads, so facts stay current while a disk is erased. Sessions are not
//! interrupted: the core learns of a device after it was opened, and drops it before it is closed.
//!
//! Out of scope: access to the Kubernetes API (see `reprise-agent-kubernetes`), and agents that are
//! configured by a file only, which have no claims.

mod controllers;
mod device_health;
mod device_records;
mod device_tasks;
mod engines;
mod facts;
mod gpus;
mod profiles;
mod queue_reservations;
mod reconciler;
mod resolve;
mod signatures;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, select, tick};
use reprise_agent_core::event::Event as CoreEvent;
use reprise_agent_kubernetes::{ControllerFact, Desired, DeviceFault, Facts, GpuFact, Reason};
use reprise_io::{DeviceDescription, HealthLog};
use tokio::sync::watch;

use crate::admin::AdminContext;
use crate::bindings::BindingsFile;
use crate::config::{PoolSettings, ReloadableConfig};
use crate::core_loop::{AttachedDevice, CoreView, Inbox, Input};
use crate::device::{ControllerHandle, DeviceContext, OpenedDevice, access};
use crate::error::{AgentError, ErrorKind};
use crate::executor::ReleasedDevice;
use crate::modes::Modes;
use crate::runtime::{OwnEndpoints, public_tenant_event};
use device_health::{Amplification, LatencyMonitor, WearMonitor};
use device_records::DeviceRecords;
use device_tasks::{OpenResult, WipeOutcome};
use profiles::Profiles;
use queue_reservations::QueueReservations;
use reconciler::{Action, DeviceReconciler, LossCause, OpenRequest, Retry};
use resolve::ResolveContext;

/// Interval between two collections of facts, an order of magnitude shorter than the interval between
/// status writes.
const COLLECT_EVERY: Duration = Duration::from_secs(1);

/// Interval between two resolutions of device names, and between retries of refused devices.
const RESOLVE_EVERY: Duration = Duration::from_secs(10);

/// Recovered blocks in one input of the core (4,096 take a millisecond), so that the core serves engines in
/// between.
const RECOVERED_PER_INPUT: usize = 4096;

/// Capacity of the queue of task results: at least one for each device.
const EVENTS_MAX: usize = 64;

/// Dependencies of the reconciler thread.
pub(crate) struct ReconcilerParts {
    pub(crate) context: DeviceContext,
    pub(crate) pool: PoolSettings,
    pub(crate) released: Receiver<ReleasedDevice>,
    pub(crate) modes: Arc<Mutex<Modes>>,
    /// Set once every device of the first spec was attempted; see `ExecutorParts`.
    pub(crate) complete: Arc<AtomicBool>,
    pub(crate) admin: Arc<AdminContext>,
    /// Mount point of the node's root file system.
    pub(crate) root: PathBuf,
    /// The persisted device-to-pool mapping.
    pub(crate) records: DeviceRecordsFile,
    pub(crate) config: ReloadableConfig,
    /// Mapping of pods to tenants, re-read periodically.
    pub(crate) bindings: Option<BindingsFile>,
    pub(crate) endpoints: OwnEndpoints,
    pub(crate) facts: watch::Sender<Option<Facts>>,
}

pub(crate) use device_records::DeviceRecordsFile;

/// The running reconciler thread.
pub(crate) struct ReconcilerThread {
    handle: Handle,
    thread: JoinHandle<()>,
}

/// Submits specs to the reconciler thread; a newer spec replaces one that was not handled yet.
#[derive(Clone)]
pub(crate) struct Handle {
    desired_slot: Arc<Mutex<Option<Desired>>>,
    wakeup: Sender<Wakeup>,
}

/// Wakes up the reconciler thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wakeup {
    Desired,
    Stop,
}

/// The result of a task that ran on its own thread.
enum TaskResult {
    Opened(Vec<OpenResult>),
    /// The data of a device or file is destroyed, or the reason why not.
    Erased {
        path: String,
        description: DeviceDescription,
        result: Result<WipeOutcome, DeviceFault>,
    },
    Wiped {
        path: String,
        result: Result<(), DeviceFault>,
    },
    HealthRead {
        path: String,
        log: Option<HealthLog>,
    },
}

/// State of the reconciler thread.
struct Worker {
    parts: ReconcilerParts,
    desired_slot: Arc<Mutex<Option<Desired>>>,
    reconciler: DeviceReconciler,
    desired: Option<Desired>,
    results: (Sender<TaskResult>, Receiver<TaskResult>),
    /// The last fault logged for each refused device, so that each fault is logged once.
    reported: BTreeMap<String, DeviceFault>,
    resolved: Instant,
    /// Names in use that did not resolve at the last resolution.
    missing_before: BTreeSet<String>,
    /// The records as last written to disk.
    persisted: DeviceRecords,
    /// Error of the last attempt to write the records.
    persist_error: Option<String>,
    profiles: Profiles,
    /// Queue pairs reserved for GPUs.
    queues: QueueReservations,
    /// Devices whose reads exceed the latency limit of their pool.
    latency: LatencyMonitor,
    /// Devices whose wear exceeds the limits of their pool.
    wear: WearMonitor,
    amplification: Amplification,
    gpus: Vec<GpuFact>,
    /// NVMe controllers of the node, as of the last resolution.
    controllers: Vec<ControllerFact>,
    /// Drives by device path, as of the last resolution.
    drives: BTreeMap<String, controllers::Drive>,
    /// Controllers that the agent drives, by device path.
    open_controllers: BTreeMap<String, ControllerHandle>,
}

impl ReconcilerThread {
    /// Starts the thread, which waits for its first spec.
    ///
    /// # Errors
    /// The thread cannot be spawned.
    pub(crate) fn start(parts: ReconcilerParts) -> Result<ReconcilerThread, AgentError> {
        let desired_slot = Arc::new(Mutex::new(None));
        let (wakeup, wakeups) = bounded(1);
        let handle = Handle { desired_slot: desired_slot.clone(), wakeup };
        let persisted = parts.records.load().unwrap_or_else(|error| {
            tracing::warn!(
                error,
                "cannot read the persisted device-to-pool mapping; it is rebuilt as devices are opened, and pools are not wiped before"
            );
            DeviceRecords::default()
        });
        let profiles = Profiles::new(parts.config.folder(), parts.admin.slack.clone());
        let worker = Worker {
            profiles,
            queues: QueueReservations::default(),
            latency: LatencyMonitor::default(),
            wear: WearMonitor::default(),
            amplification: Amplification::default(),
            gpus: Vec::new(),
            parts,
            desired_slot,
            reconciler: DeviceReconciler::with_records(persisted.clone()),
            desired: None,
            results: bounded(EVENTS_MAX),
            reported: BTreeMap::new(),
            resolved: Instant::now(),
            missing_before: BTreeSet::new(),
            persisted,
            persist_error: None,
            controllers: Vec::new(),
            drives: BTreeMap::new(),
            open_controllers: BTreeMap::new(),
        };
        let thread = std::thread::Builder::new()
            .name("reconciler".to_owned())
            .spawn(move || worker.run(&wakeups))
            .map_err(|error| {
                AgentError::new(ErrorKind::Resource, "cannot spawn the reconciler thread").with_source(error)
            })?;
        Ok(ReconcilerThread { handle, thread })
    }

    /// Returns a handle for submitting specs.
    pub(crate) fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Ends the thread; devices keep their state.
    pub(crate) fn stop(self) {
        // Blocks until the queue has room: an unhandled wakeup may be ahead.
        let _ = self.handle.wakeup.send(Wakeup::Stop);
        // A panic would have aborted the process.
        let _ = self.thread.join();
    }
}

impl Handle {
    /// Replaces the spec to reconcile. Never blocks.
    pub(crate) fn set_desired(&self, desired: Desired) {
        *self.desired_slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(desired);
        match self.wakeup.try_send(Wakeup::Desired) {
            // A wakeup is already queued, or the agent is stopping.
            Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
        }
    }
}

impl Worker {
    fn run(mut self, wakeups: &Receiver<Wakeup>) {
        let (ticks, released, results) =
            (tick(COLLECT_EVERY), self.parts.released.clone(), self.results.1.clone());
        loop {
            select! {
                recv(wakeups) -> wakeup => match wakeup {
                    Ok(Wakeup::Desired) => self.take_desired(),
                    Ok(Wakeup::Stop) | Err(_) => return,
                },
                recv(results) -> results => {
                    if let Ok(results) = results {
                        self.handle_result(results);
                    }
                }
                recv(released) -> released => match released {
                    Ok(ReleasedDevice { id, device }) => {
                        // Blocks until the device's operations in flight have completed; its number is free
                        // only then.
                        device.stop();
                        self.reconciler.released(id);
                    }
                    // The core has stopped.
                    Err(_) => return,
                },
                recv(ticks) -> _ => {}
            }
            self.run_once();
        }
    }

    /// Reconciles after an event, and publishes the node's facts.
    fn run_once(&mut self) {
        let view = facts::core_view(&self.parts.admin);
        // Losses first, so that the actions below do not treat a lost device as open.
        for device in view.iter().flat_map(|view| &view.devices) {
            if let Some(reason) = &device.lost {
                let loss = match device.info.sync_failed.load(Ordering::Acquire) {
                    true => LossCause::Sync,
                    false => LossCause::Other,
                };
                self.reconciler.lost(device.id, reason, loss);
            } else if let Some(reason) = &device.read_only {
                self.reconciler.rejects_writes(device.id, reason);
            }
        }
        let retry = if self.resolved.elapsed() >= RESOLVE_EVERY {
            self.resolve();
            Retry::Refused
        } else {
            Retry::None
        };
        for action in self.reconciler.next_actions(retry) {
            self.act(action);
        }
        if self.queues.has_ending() {
            self.settle_queues();
        }
        // The error is logged there; the next run retries.
        let _ = self.persist_records();
        self.read_health_logs();
        if let Some(view) = &view {
            self.report_drive_writes(view);
        }
        // Without the core's view, facts would be incomplete. The core processed earlier attachments before
        // it replied.
        let (Some(desired), Some(view)) = (&self.desired, view) else { return };
        if self.reconciler.is_attempted() && !self.parts.admin.ready.swap(true, Ordering::AcqRel) {
            tracing::info!(generation = desired.generation, "the node's first spec is applied");
            self.parts.complete.store(true, Ordering::Release);
        }
        let metrics = &self.parts.context.metrics;
        let open = facts::latency_limits(&self.reconciler, desired);
        self.latency.update(Instant::now(), &open, |id| metrics.read_times(id));
        let observed = facts::NodeObservations {
            controllers: &self.controllers,
            gpus: &self.gpus,
            profiles: &self.profiles,
            queues: self.queues.facts(&self.parts.admin.queue_grants.created(), &self.open_controllers),
            latency: &self.latency,
            wear: &self.wear,
            drives: &self.drives,
        };
        let facts = facts::gather(&self.parts, &self.reconciler, desired, &observed, &view);
        self.parts.facts.send_replace(Some(facts));
    }

    /// Starts a thread for each drive whose health log is due.
    fn read_health_logs(&mut self) {
        let open = facts::open_devices(&self.reconciler, &self.open_controllers);
        for (path, description) in self.wear.due(Instant::now(), &open) {
            let (results, asked) = (self.results.0.clone(), path.clone());
            let controller = self.open_controllers.get(&path).cloned();
            let body = move || {
                let log = match controller {
                    Some(controller) => controller.health_log(),
                    None => access::health_log(&description),
                };
                let _ = results.send(TaskResult::HealthRead { path: asked, log });
            };
            if spawn("health-log", body).is_err() {
                self.wear.record(&path, None);
            }
        }
    }

    /// Publishes what the drives count as written since they were opened.
    fn report_drive_writes(&mut self, view: &CoreView) {
        let metrics = &self.parts.context.metrics;
        let mut all = BTreeMap::new();
        for (id, fact) in self.reconciler.device_facts() {
            let Some((id, bytes)) = id.zip(self.wear.written(&fact.path)) else { continue };
            let Some(open) = view.devices.iter().find(|device| device.id == id) else { continue };
            metrics.drive_written(id, bytes);
            open.info.drive_written_bytes.store(bytes, Ordering::Relaxed);
            all.insert(fact.path.clone(), bytes);
        }
        let is_whole = all.len() == view.devices.len();
        self.amplification.add(is_whole.then_some(all), view.counters.stored_bytes_total);
        metrics.drive_amplification(self.amplification.permille());
    }

    /// Persists the device-to-pool mapping if it has changed. An error is logged once and retried at the
    /// next run.
    fn persist_records(&mut self) -> Result<(), String> {
        if *self.reconciler.records() != self.persisted {
            let records = self.reconciler.records().clone();
            if let Err(error) = self.parts.records.save(&records) {
                let error_text = error.to_string();
                if self.persist_error.as_ref() != Some(&error_text) {
                    tracing::warn!(%error, "cannot persist the device-to-pool mapping on this node");
                    self.persist_error = Some(error_text.clone());
                }
                return Err(error_text);
            }
            (self.persisted, self.persist_error) = (records, None);
        }
        Ok(())
    }

    fn take_desired(&mut self) {
        let desired_slot = self.desired_slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(desired) = desired_slot else { return };
        for problem in &desired.problems {
            tracing::warn!(problem = problem.message, "ignoring an invalid part of the node's spec");
        }
        if let Some(mode) = desired.mode {
            let event = self
                .parts
                .modes
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .set_by_spec(facts::mode(mode));
            self.send_to_core(event);
        }
        if let Some(domain) = &desired.failure_domain {
            self.parts.admin.directory.set_failure_domain(domain);
        }
        self.profiles.set_desired(desired.profiles.clone());
        self.queues.set_desired(desired.queues.clone());
        self.desired = Some(desired);
        self.follow_configuration();
        self.resolve();
    }

    /// Resolves the claims to devices again. A claim that cannot be parsed keeps its devices.
    fn resolve(&mut self) {
        self.resolved = Instant::now();
        // The kubelet may deliver configuration and profile files later than the spec that names them.
        self.follow_configuration();
        self.profiles.refresh();
        if let Some(bindings) = &self.parts.bindings {
            bindings.refresh();
            let public = &self.parts.admin.public_tenant;
            if public.set(bindings.current().public()) {
                self.send_to_core(Some(public_tenant_event(public, &self.parts.admin.tenants)));
            }
        }
        self.gpus = gpus::read(&self.parts.root);
        let Some(desired) = &self.desired else { return };
        // A part that cannot be parsed may be a claim, so no claim is known to be gone.
        if desired.problems.is_empty() {
            self.reconciler.release_unclaimed(&desired.claims);
        }
        let retained_paths = self.reconciler.retained_paths(&desired.claims);
        let context =
            ResolveContext { root: &self.parts.root, retained_paths, missed: &mut self.missing_before };
        let mut pools = resolve::resolve(&desired.claims, context);
        let persisted = self.reconciler.wanted().iter().filter(|pool| desired.is_unreadable(&pool.pool));
        let is_known = |name: &str| desired.claims.iter().any(|claim| claim.pool == name);
        let persisted: Vec<_> = persisted.filter(|pool| !is_known(&pool.pool)).cloned().collect();
        pools.extend(persisted);
        self.reconciler.set_desired(pools);
        let sys = self.parts.root.join("sys");
        self.open_controllers.retain(|_, handle| handle.controller().is_some());
        self.controllers = controllers::scan(&sys, self.reconciler.wanted(), &self.open_controllers);
        self.settle_queues();
        self.drives = controllers::drives(&sys, self.reconciler.wanted());
    }

    /// Lets sessions have the queue pairs of reserved grants only, and releases ended grants whose queue pairs are gone.
    fn settle_queues(&mut self) {
        let grants = &self.parts.admin.queue_grants;
        // First, because a session could otherwise get queue pairs of a grant that is being released. Revocations run on
        // their own threads.
        drop(grants.set_allocations(self.queues.allocations()));
        self.queues.update(&self.controllers, |uid| grants.pairs_of(uid));
        drop(grants.set_allocations(self.queues.allocations()));
    }

    /// Applies settings of the configuration file that may change at run time.
    fn follow_configuration(&mut self) {
        let wanted = self.desired.as_ref().and_then(|desired| desired.configuration_digest.clone());
        if let Some(permille) = self.parts.config.follow(wanted.as_deref()) {
            self.send_to_core(Some(CoreEvent::PoolFree { permille }));
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Detach(id) => {
                tracing::info!(device = id.0, "closing a device");
                let _ = self.inbox().send(Input::Detach(id));
            }
            Action::Open { identity, devices: requests } => {
                let (settings, context) = (self.parts.pool.clone(), self.parts.context.clone());
                let submitted: Vec<OpenRequest> = requests.clone();
                let results = self.results.0.clone();
                let body = move || {
                    let _ = results.send(TaskResult::Opened(device_tasks::open(
                        requests, identity, &settings, &context,
                    )));
                };
                if let Err(fault) = spawn("opening", body) {
                    for request in submitted {
                        self.reconciler.refused(&request.path, Some(request.id), fault.clone());
                    }
                }
            }
            Action::Wipe(request) => {
                let (results, name) = (self.results.0.clone(), request.path.clone());
                let body = move || {
                    let result = device_tasks::wipe(&request);
                    let _ = results.send(TaskResult::Erased {
                        path: request.path,
                        description: request.description,
                        result,
                    });
                };
                if let Err(fault) = spawn("wiping", body) {
                    self.reconciler.refused(&name, None, fault);
                }
            }
        }
    }

    fn handle_result(&mut self, results: TaskResult) {
        match results {
            TaskResult::Opened(tried) => {
                for OpenResult { path, id, result } in tried {
                    match result {
                        Ok((opened, facts)) => {
                            if let Some(controller) = &opened.device.info().controller {
                                self.open_controllers.insert(path.clone(), controller.clone());
                            }
                            self.attach(id, *opened);
                            self.reported.remove(&path);
                            self.reconciler.opened(&path, id, facts);
                        }
                        Err(fault) => {
                            self.report_once(&path, &fault);
                            self.reconciler.refused(&path, Some(id), fault);
                        }
                    }
                }
            }
            TaskResult::HealthRead { path, log } => self.wear.record(&path, log),
            TaskResult::Erased { path, description, result: Ok(WipeOutcome::FileRemains) } => {
                // Recorded before the file is removed; after a restart in between, the file would otherwise
                // count as missing.
                self.reconciler.erased(&path);
                if let Err(error_text) = self.persist_records() {
                    let message = format!(
                        "the file is erased, but the agent cannot record that on this node: {error_text}"
                    );
                    let fault = DeviceFault { reason: Reason::DeviceFailed, message };
                    self.report_once(&path, &fault);
                    return self.reconciler.refused(&path, None, fault);
                }
                let (results, name) = (self.results.0.clone(), path.clone());
                let body = move || {
                    let _ =
                        results.send(TaskResult::Wiped { path, result: device_tasks::remove(&description) });
                };
                if let Err(fault) = spawn("removing", body) {
                    self.reconciler.refused(&name, None, fault);
                }
            }
            TaskResult::Erased { path, result: Ok(WipeOutcome::Wiped), .. }
            | TaskResult::Wiped { path, result: Ok(()) } => {
                tracing::info!(path, "destroyed the data of a device");
                self.reconciler.wiped(&path);
            }
            TaskResult::Erased { path, result: Err(fault), .. }
            | TaskResult::Wiped { path, result: Err(fault) } => {
                self.report_once(&path, &fault);
                self.reconciler.refused(&path, None, fault);
            }
        }
    }

    /// Logs the reason why a device is not used, once per reason.
    fn report_once(&mut self, path: &str, fault: &DeviceFault) {
        if self.reported.get(path) != Some(fault) {
            tracing::warn!(path, reason = %fault.reason, message = fault.message, "a claimed device is not used");
            self.reported.insert(path.to_owned(), fault.clone());
        }
    }

    /// Attaches an open device to the core, then submits the recovered blocks in chunks.
    fn attach(&self, id: reprise_agent_core::effect::DeviceId, opened: OpenedDevice) {
        let OpenedDevice { device, pool, stored, names, .. } = opened;
        let admin = &self.parts.admin;
        crate::runtime::restore_tenant_names(&admin.tenants, &names);
        // The device may name another number of the public tenant.
        self.send_to_core(Some(public_tenant_event(&admin.public_tenant, &admin.tenants)));
        self.parts.context.metrics.device_opened(id, device.info());
        // Fails only if the core has stopped; then nothing is left to do.
        let _ = self.inbox().send(Input::Attach(Box::new(AttachedDevice { id, device, pool })));
        for blocks in stored.chunks(RECOVERED_PER_INPUT) {
            let event = CoreEvent::Recovered { device: id, blocks: blocks.to_vec() };
            let _ = self.inbox().send(Input::Event(event));
        }
        for name in names.into_values().filter(|name| self.parts.context.keys.is_erased(name)) {
            let _ = self.inbox().send(Input::TenantErased(name));
        }
    }

    fn send_to_core(&self, event: Option<CoreEvent>) {
        if let Some(event) = event {
            let _ = self.inbox().send(Input::Event(event));
        }
    }

    fn inbox(&self) -> &Inbox {
        &self.parts.context.inbox
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), DeviceFault> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map(drop).map_err(|error| DeviceFault {
        reason: reprise_agent_kubernetes::Reason::OverCapacity,
        message: format!("cannot spawn a thread: {error}"),
    })
}
