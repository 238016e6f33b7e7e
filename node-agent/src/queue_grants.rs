//! Queue pairs that sessions drive themselves, and the memory that their commands access.
//!
//! ```text
//! RegisterMemory ─▶ map the engine's memory in this process
//! RequestQueues ──▶ map it for the controller ─▶ create queue pairs in files that both processes map ─▶ reply
//! end ────────────▶ delete queue pairs ─▶ unmap their files and the memory ─▶ the core may reuse the extents
//! ```
//!
//! A thread of the session makes all its calls, and its reader ends its grants before the core learns of the session's end
//! ([`QueueGrantService::close_session`]). So a killed engine's commands have ended before its leased extents leave
//! quarantine. If the controller does not confirm a deletion, its commands may still run: the session stays fenced, the
//! core keeps its extents until the device is closed, and the memory stays mapped until the controller was disabled.
//!
//! In a cluster, grants are parts of allocations, which the reconciler thread replaces
//! ([`QueueGrantService::set_allocations`]). It releases an allocation when no queue pair of it is left.
//!
//! The lock is never held during a command of a controller. [`reprise_policy::queue_grants`] has limits and generations.

mod resources;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use reprise_agent_core::effect::DeviceId;
use reprise_buffers::MappedRegion;
use reprise_nvme::{DoorbellKind, LentDevice, LentDoorbells, LentQueue, NvmeError, QueueLender};
use reprise_policy::SessionId;
use reprise_policy::queue_grants::{
    Allocation, GrantEnd, GrantGeneration, MemoryNumber, QueueGrantLimits, QueueGrantRefusal, QueueGrants,
    QueueRequest,
};

use resources::{HeldQueue, HeldQueues, MemoryAccess, Resources};

/// How long a returned grant waits for a deletion that another thread has begun: longer than admin commands take. The
/// session is fenced after it.
const END_WAIT: Duration = Duration::from_secs(10);

/// Finds the controller of a device; `None` after the device was closed.
pub(crate) type FindLender = Arc<dyn Fn() -> Option<Arc<dyn QueueLender>> + Send + Sync>;

/// Notifies a session that one of its grants was revoked, with the reason.
pub(crate) type RevocationSink = Arc<dyn Fn(GrantGeneration, &str, RevocationEnd) + Send + Sync>;

/// Knowledge about the commands of revoked queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RevocationEnd {
    /// They have ended.
    Confirmed,
    /// The controller has not confirmed their end: the session must end, which fences its extents.
    Unconfirmed,
}

/// A device whose controller may lend queue pairs.
#[derive(Clone)]
pub(crate) struct LendingDevice {
    pub(crate) find: FindLender,
    /// Serial number of the controller.
    pub(crate) serial: Arc<str>,
    pub(crate) namespace: u32,
    pub(crate) is_emulated: bool,
}

/// Queue pairs of a new grant, with the descriptors for the session.
#[derive(Debug)]
pub(crate) struct NewGrant {
    pub(crate) generation: GrantGeneration,
    /// Doorbells for the session.
    pub(crate) doorbells: LentDoorbells,
    pub(crate) queues: Vec<NewQueue>,
    pub(crate) device: LentDevice,
    pub(crate) namespace: u32,
    pub(crate) is_emulated: bool,
    /// Address of the first byte of the registered memory.
    pub(crate) memory_address: u64,
}

/// A queue pair of a new grant.
#[derive(Debug)]
pub(crate) struct NewQueue {
    pub(crate) id: u16,
    pub(crate) entries: u32,
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    pub(crate) address: u64,
    pub(crate) completions_at: u64,
    pub(crate) lists_at: u64,
    pub(crate) submission_doorbell: u64,
    pub(crate) completion_doorbell: u64,
}

/// A grant for the status page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GrantView {
    pub(crate) generation: GrantGeneration,
    pub(crate) request: QueueRequest,
    /// Numbers of the queue pairs; empty while they are created or after a failed deletion.
    pub(crate) queues: Vec<u16>,
    /// How doorbells reach the controller; `None` without queue pairs.
    pub(crate) doorbells: Option<DoorbellKind>,
    /// Namespace and name of the allocation that it is a part of, in a cluster.
    pub(crate) allocation: Option<String>,
    /// Slack profile that the allocation names.
    pub(crate) slack_profile: Option<String>,
}

/// Queue pairs of an allocation that exist on one controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CreatedQueues {
    /// Generation of the last grant. Controllers use numbers again; a queue pair with the number of an earlier one has
    /// a higher generation.
    pub(crate) generation: u64,
    /// Their numbers, in ascending order.
    pub(crate) queues: Vec<u16>,
}

/// Existing queue pairs by the uid of the allocation and the serial number of the controller.
pub(crate) type CreatedByAllocation = BTreeMap<String, BTreeMap<String, CreatedQueues>>;

/// Numbers of grants for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GrantCounters {
    pub(crate) grants: u64,
    pub(crate) pairs: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) queue_bytes: u64,
    pub(crate) granted_total: u64,
    pub(crate) refused_total: u64,
    pub(crate) revoked_total: u64,
    pub(crate) unconfirmed_total: u64,
}

/// Grants of all sessions; see the module.
pub(crate) struct QueueGrantService {
    state: Mutex<State>,
    /// Notified when a grant has ended, or was not confirmed.
    ended: Condvar,
    granted: AtomicU64,
    refused: AtomicU64,
    revoked: AtomicU64,
    unconfirmed: AtomicU64,
}

/// Grants of a device that is being closed, or of allocations that have ended.
struct Revocation {
    grants: Vec<(GrantGeneration, SessionId)>,
    reason: String,
}

struct State {
    table: QueueGrants,
    resources: Resources,
}

impl GrantCounters {
    /// Returns names and values, in the order of the table of metrics.
    pub(crate) fn fields(self) -> impl Iterator<Item = (&'static str, u64)> {
        let GrantCounters {
            grants,
            pairs,
            memory_bytes,
            queue_bytes,
            granted_total,
            refused_total,
            revoked_total,
            unconfirmed_total,
        } = self;
        [
            ("queue_grants", grants),
            ("queue_pairs_granted", pairs),
            ("registered_memory_bytes", memory_bytes),
            ("queue_pair_memory_bytes", queue_bytes),
            ("queue_grants_created", granted_total),
            ("queue_grants_refused", refused_total),
            ("queue_grants_revoked", revoked_total),
            ("queue_grants_unconfirmed", unconfirmed_total),
        ]
        .into_iter()
    }
}

impl QueueGrantService {
    /// Creates a service without devices, which grants queue pairs as the configuration allows.
    pub(crate) fn new(limits: QueueGrantLimits) -> QueueGrantService {
        QueueGrantService::with(QueueGrants::new(limits))
    }

    /// Creates a service without devices, which grants queue pairs of allocations.
    pub(crate) fn of_allocations(limits: QueueGrantLimits) -> QueueGrantService {
        QueueGrantService::with(QueueGrants::of_allocations(limits))
    }

    fn with(table: QueueGrants) -> QueueGrantService {
        let state = State { table, resources: Resources::default() };
        let [granted, refused, revoked, unconfirmed] = std::array::from_fn(|_| AtomicU64::new(0));
        QueueGrantService {
            state: Mutex::new(state),
            ended: Condvar::new(),
            granted,
            refused,
            revoked,
            unconfirmed,
        }
    }

    /// Whether sessions may have queue pairs, now or later.
    pub(crate) fn may_grant(&self) -> bool {
        self.lock().table.may_grant()
    }

    /// Refuses a request of a session unless sessions may have queue pairs.
    ///
    /// # Errors
    /// `Invalid`, with the setting that is missing.
    pub(crate) fn check_enabled(&self) -> Result<(), QueueGrantRefusal> {
        let enabled = self.lock().table.check_enabled();
        enabled.inspect_err(|_| self.count_refused())
    }

    /// Adds a device whose controller lends queue pairs.
    pub(crate) fn add_device(&self, device: DeviceId, lending: LendingDevice) {
        self.lock().resources.add_device(device, lending);
    }

    /// Stops granting queue pairs of a device, and revokes its grants on a thread, which is returned if there are any.
    pub(crate) fn revoke_device(self: &Arc<Self>, device: DeviceId, reason: &str) -> Option<JoinHandle<()>> {
        let revocation = {
            let mut state = self.lock();
            state.resources.remove_device(device)?;
            Revocation { grants: state.table.begin_revocation(device.0), reason: reason.to_owned() }
        };
        self.start_revocation(revocation)
    }

    /// Replaces the allocations of the node. Revokes the grants of those that are gone or have changed, on a thread,
    /// which is returned if there are any.
    pub(crate) fn set_allocations(self: &Arc<Self>, allocations: Vec<Allocation>) -> Option<JoinHandle<()>> {
        let reason = "the GPUQueueAllocation of the queue pairs has ended or changed".to_owned();
        let grants = self.lock().table.set_allocations(allocations);
        self.start_revocation(Revocation { grants, reason })
    }

    fn start_revocation(self: &Arc<Self>, revocation: Revocation) -> Option<JoinHandle<()>> {
        if revocation.grants.is_empty() {
            return None;
        }
        let revocation = Arc::new(Mutex::new(Some(revocation)));
        let (service, theirs) = (Arc::clone(self), Arc::clone(&revocation));
        let thread = std::thread::Builder::new().name("revoke-queues".to_owned());
        match thread.spawn(move || service.revoke(&theirs)) {
            Ok(thread) => Some(thread),
            Err(error) => {
                tracing::error!(%error, "cannot spawn a thread: revoking queue pairs without it");
                self.revoke(&revocation);
                None
            }
        }
    }

    fn revoke(&self, revocation: &Mutex<Option<Revocation>>) {
        let taken = revocation.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Revocation { grants, reason }) = taken else { return };
        for (generation, session) in grants {
            let end =
                if self.end(generation) { RevocationEnd::Confirmed } else { RevocationEnd::Unconfirmed };
            self.revoked.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(generation = generation.0, session = session.0, reason, "queue pairs revoked");
            let sink = self.lock().resources.sink(session);
            if let Some(sink) = sink {
                sink(generation, &reason, end);
            }
        }
    }

    /// Notes that the core has released a device, and thus holds no extent of it for a fenced session. Its controller is
    /// disabled next, and its number may be used again. Grants that still exist are revoked.
    pub(crate) fn device_released(self: &Arc<Self>, device: DeviceId) {
        self.revoke_device(device, "the agent has closed the device");
        self.lock().table.device_reset(device.0);
        self.ended.notify_all();
    }

    /// Maps memory of a session; returns its number.
    ///
    /// # Errors
    /// A limit is exceeded, or the descriptor cannot be mapped safely.
    pub(crate) fn register(
        &self,
        session: SessionId,
        (file, bytes): (OwnedFd, u64),
        sink: RevocationSink,
    ) -> Result<MemoryNumber, QueueGrantRefusal> {
        let number = self.lock().table.register(session, bytes).inspect_err(|_| self.count_refused())?;
        // Touches every page, so without the lock.
        match MappedRegion::map_sealed(file, bytes) {
            Ok(region) => {
                self.lock().resources.add_memory(session, number, region, sink);
                Ok(number)
            }
            Err(error) => {
                self.lock().table.unregister(session, number);
                self.count_refused();
                Err(QueueGrantRefusal::Invalid(format!("register memory: {error}")))
            }
        }
    }

    /// Returns the slack profile of the allocation whose queue pairs a session holds.
    pub(crate) fn slack_profile(&self, session: SessionId) -> Option<String> {
        self.lock().table.slack_profile(session).map(str::to_owned)
    }

    /// Creates queue pairs for a session.
    ///
    /// # Errors
    /// A limit is exceeded, or the controller has no further queue pairs, or cannot share them.
    pub(crate) fn grant(&self, request: QueueRequest) -> Result<NewGrant, QueueGrantRefusal> {
        let granted = self.try_grant(request);
        match &granted {
            Ok(_) => drop(self.granted.fetch_add(1, Ordering::Relaxed)),
            Err(_) => self.count_refused(),
        }
        granted
    }

    fn try_grant(&self, request: QueueRequest) -> Result<NewGrant, QueueGrantRefusal> {
        let QueueRequest { session, device, memory, .. } = request;
        let (generation, lending) = {
            let mut state = self.lock();
            let Some(lending) = state.resources.device(DeviceId(device)) else {
                return Err(QueueGrantRefusal::Invalid(format!(
                    "device {device} lends no queue pairs: only NVMe controllers that the agent drives itself do"
                )));
            };
            (state.table.request(request, &lending.serial)?, lending)
        };
        let created = (lending.find)()
            .ok_or_else(|| QueueGrantRefusal::Invalid(format!("device {device} is closed")))
            .and_then(|lender| self.create(&*lender, &lending, request));
        let (grant, held) = match created {
            Ok(created) => created,
            Err(refusal) => {
                self.lock().table.failed(generation);
                return Err(refusal);
            }
        };
        let mut state = self.lock();
        state.table.created(generation);
        state.resources.hold(generation, held);
        let revoked = match () {
            () if !state.resources.is_lent(DeviceId(device), &lending) => {
                format!("device {device} is closed")
            }
            () if !state.table.is_allocated(generation) => "the GPUQueueAllocation has ended".to_owned(),
            () => String::new(),
        };
        if !revoked.is_empty() {
            // Revoked while the queue pairs were created.
            state.table.begin_end(session, generation);
            drop(state);
            self.end(generation);
            return Err(QueueGrantRefusal::Invalid(revoked));
        }
        drop(state);
        let bytes: u64 = grant.queues.iter().map(|queue| queue.bytes).sum();
        tracing::info!(
            generation = generation.0, session = session.0, device, memory = memory.0, queues = grant.queues.len(),
            depth = request.depth, queue_bytes = bytes, format = %grant.device.format, emulated = grant.is_emulated,
            doorbells = %grant.doorbells.kind(),
            "queue pairs granted"
        );
        Ok(NewGrant { generation, ..grant })
    }

    /// Creates the queue pairs of a grant; those that exist are deleted again if one fails.
    fn create(
        &self,
        lender: &dyn QueueLender,
        lending: &LendingDevice,
        request: QueueRequest,
    ) -> Result<(NewGrant, HeldQueues), QueueGrantRefusal> {
        let QueueRequest { session, device, pairs, depth, memory, .. } = request;
        let invalid = |what: &str, error: &NvmeError| QueueGrantRefusal::Invalid(format!("{what}: {error}"));
        let Some(properties) = lender.lent_device(lending.namespace) else {
            return Err(QueueGrantRefusal::Invalid(format!("device {device} is closed")));
        };
        let mut doorbells =
            lender.lend_doorbells().map_err(|error| invalid("share doorbells of the controller", &error))?;
        let region = self.lock().resources.memory(session, memory);
        let span = region.and_then(|region| region.span(0, region.bytes()).ok());
        let span =
            span.ok_or_else(|| QueueGrantRefusal::Invalid(format!("memory {} is not registered", memory.0)))?;
        let at = (session, memory, DeviceId(device));
        let mapped = self.lock().resources.mapping(at, lending);
        let access = match mapped {
            Some(mapped) => mapped,
            None => {
                let mapping = lender.map_lent(&span).map_err(|error| invalid("map the memory", &error))?;
                let added = self.lock().resources.add_mapping(at, lending, mapping);
                added.ok_or_else(|| QueueGrantRefusal::Invalid(format!("device {device} is closed")))?
            }
        };
        let mut lent: Vec<LentQueue> = Vec::new();
        for _ in 0..pairs {
            match lender.lend(depth, &mut doorbells) {
                Ok(queue) => lent.push(queue),
                Err(error) => {
                    undo(lender, (DeviceId(device), &access), lent);
                    return Err(match error {
                        NvmeError::NoQueue { .. } | NvmeError::Memory(_) => {
                            QueueGrantRefusal::Exhausted(format!("create a queue pair: {error}"))
                        }
                        error => invalid("create a queue pair", &error),
                    });
                }
            }
        }
        let (queues, held) = lent.into_iter().map(resources::divide).unzip();
        let grant = NewGrant {
            // Replaced by the caller.
            generation: GrantGeneration(0),
            doorbells,
            queues,
            device: properties,
            namespace: lending.namespace,
            is_emulated: lending.is_emulated,
            memory_address: access.address(),
        };
        let find = Arc::clone(&lending.find);
        let serial = Arc::clone(&lending.serial);
        let (device, doorbells) = (DeviceId(device), grant.doorbells.kind());
        Ok((grant, HeldQueues { device, serial, find, doorbells, queues: held, _access: access }))
    }

    /// Ends a grant at the request of its session. One that was revoked has ended already, or ends now on another
    /// thread, for which this call waits some seconds: `Pending` if that was too short.
    pub(crate) fn return_grant(&self, session: SessionId, generation: GrantGeneration) -> GrantEnd {
        let begun = self.lock().table.begin_end(session, generation);
        if begun {
            return if self.end(generation) { GrantEnd::Ended } else { GrantEnd::Unconfirmed };
        }
        let end = |state: &State| state.table.end_of(session, generation);
        let pending = |state: &mut State| end(state) == GrantEnd::Pending;
        let waited = self.ended.wait_timeout_while(self.lock(), END_WAIT, pending);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        end(&state)
    }

    /// Ends all grants of a session, then its memory. Blocks for the controllers.
    pub(crate) fn close_session(&self, session: SessionId) {
        let ending = self.lock().table.begin_session_end(session);
        for generation in ending {
            self.end(generation);
        }
        let memory = self.lock().resources.remove_session(session);
        // Unmapped without the lock.
        drop(memory);
    }

    /// Deletes the queue pairs of a grant, then ends the access of the controller to their memory. Returns whether the
    /// controller has confirmed.
    fn end(&self, generation: GrantGeneration) -> bool {
        let taken = self.lock().resources.take(generation);
        let Some(held) = taken else { return true };
        // A controller whose device was closed was disabled.
        let lender = (held.find)();
        let queues: Vec<u16> = held.queues.iter().map(|queue| queue.id).collect();
        if let Some(lender) = &lender {
            lender.silence(&queues);
        }
        let confirmed = lender.as_ref().is_none_or(|lender| {
            let delete = |queue: &HeldQueue| {
                lender.delete(queue.id).inspect_err(|error| {
                    tracing::error!(
                        generation = generation.0, device = held.device.0, queue = queue.id, %error,
                        "cannot delete a granted queue pair: extents of its session stay reserved until the device is opened again"
                    );
                })
            };
            delete_all(held.queues.iter().map(delete))
        });
        match lender.filter(|_| !confirmed) {
            // Its memory stays mapped, since the controller may still access it.
            Some(lender) => lender.keep(Box::new(held)),
            None => drop(held),
        }
        let mut state = self.lock();
        if confirmed {
            state.table.ended(generation);
        } else {
            state.table.not_confirmed(generation);
            self.unconfirmed.fetch_add(1, Ordering::Relaxed);
        }
        drop(state);
        self.ended.notify_all();
        confirmed
    }

    /// Whether a controller may still run commands of a session that has ended.
    pub(crate) fn is_fenced(&self, session: SessionId) -> bool {
        self.lock().table.is_fenced(session)
    }

    /// Whether sessions reach a device through queue pairs.
    pub(crate) fn lends(&self, device: DeviceId) -> bool {
        self.lock().resources.device(device).is_some()
    }

    /// Returns all grants by generation.
    pub(crate) fn views(&self) -> Vec<GrantView> {
        let state = self.lock();
        let view = |(generation, request): (GrantGeneration, &QueueRequest)| GrantView {
            generation,
            request: *request,
            queues: state.resources.queues(generation),
            doorbells: state.resources.held(generation).map(|held| held.doorbells),
            allocation: state.table.allocation(generation).map(|of| of.name.clone()),
            slack_profile: state.table.allocation(generation).and_then(|of| of.slack_profile.clone()),
        };
        state.table.iter().map(view).collect()
    }

    /// Returns the queue pairs of allocations that exist, without those that are being deleted.
    pub(crate) fn created(&self) -> CreatedByAllocation {
        let state = self.lock();
        let mut all = CreatedByAllocation::new();
        for (generation, _) in state.table.iter() {
            let held = state.resources.held(generation).zip(state.table.allocation(generation));
            let Some((held, allocation)) = held else { continue };
            let of_controller = all.entry(allocation.uid.clone()).or_default();
            let created = of_controller.entry(held.serial.to_string()).or_default();
            created.generation = created.generation.max(generation.0);
            created.queues.extend(held.queues.iter().map(|queue| queue.id));
            created.queues.sort_unstable();
        }
        all
    }

    /// Returns the queue pairs of an allocation that exist or may exist.
    pub(crate) fn pairs_of(&self, uid: &str) -> u32 {
        self.lock().table.pairs_of(uid)
    }

    /// Returns numbers for metrics.
    pub(crate) fn counters(&self) -> GrantCounters {
        let state = self.lock();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        GrantCounters {
            grants: state.table.iter().count() as u64,
            pairs: state.table.pairs().into(),
            memory_bytes: state.table.memory_bytes(),
            queue_bytes: state.resources.queue_bytes(),
            granted_total: read(&self.granted),
            refused_total: read(&self.refused),
            revoked_total: read(&self.revoked),
            unconfirmed_total: read(&self.unconfirmed),
        }
    }

    fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Every change leaves the state consistent, so a poisoned lock is ignored.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes deletions; returns whether the controller has confirmed all of them. One that hangs is not waited for again,
/// because each deletion has the admin queue, which disabling the controller needs.
fn delete_all(deletions: impl Iterator<Item = Result<(), NvmeError>>) -> bool {
    let mut confirmed = true;
    for error in deletions.filter_map(Result::err) {
        confirmed = false;
        if matches!(error, NvmeError::Timeout { .. } | NvmeError::Fatal | NvmeError::Gone) {
            break;
        }
    }
    confirmed
}

/// Deletes queue pairs of a request that has failed. Without a confirmation, their memory stays mapped.
fn undo(lender: &dyn QueueLender, (device, access): (DeviceId, &MemoryAccess), lent: Vec<LentQueue>) {
    let delete = |queue: &LentQueue| {
        lender.delete(queue.id).inspect_err(|error| {
            tracing::error!(device = device.0, queue = queue.id, %error, "cannot delete a queue pair that was not granted");
        })
    };
    lender.silence(&lent.iter().map(|queue| queue.id).collect::<Vec<_>>());
    if !delete_all(lent.iter().map(delete)) {
        lender.keep(Box::new((lent, access.clone())));
    }
}
