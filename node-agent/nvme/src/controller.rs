//! A controller: its start, its admin queue, and the queue pairs that it has granted.

mod memory_buffer;
mod raw;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use reprise_io::HealthLog;

use crate::backing::{Backing, DmaMemory, read_u64, write_u64};
use crate::data::DataFormat;
use crate::error::NvmeError;
use crate::queue::{CommandId, Ended, QueueMemory, QueuePair, QueueShape};
use crate::spec::{
    self, AdminQueueSizes, Capabilities, Command, Configuration, ControllerIdentity, ControllerStatus,
    DELETE_CQ, DELETE_SQ, DataPointer, HEALTH_BYTES, HEALTH_LOG, IDENTIFY_BYTES, NamespaceIdentity,
    NamespaceList, PAGE_BYTES, Shutdown, ShutdownStatus, Status, Version, cns, offset,
};

pub use raw::{QueueAddresses, RawQueuePair};

/// Entries of the admin queues.
const ADMIN_ENTRIES: u16 = 32;
/// Pause between two reads of a state that takes milliseconds to change.
const PAUSE: Duration = Duration::from_micros(50);
/// The largest LBA data size that is used: a page of the pool.
const LBA_POWER_MAX: u8 = 12;

/// Limits of a driver.
#[derive(Clone, Copy, Debug)]
pub struct DriverSettings {
    /// Number of I/O queue pairs to request; the controller may grant fewer.
    pub queue_pairs: u16,
    /// Deadline of an admin command.
    pub admin_timeout: Duration,
    /// Deadline of a shutdown, after which the controller is disabled without it.
    pub shutdown_timeout: Duration,
}

impl Default for DriverSettings {
    /// 64 queue pairs; 5 s for admin commands and for a shutdown.
    fn default() -> DriverSettings {
        let limit = Duration::from_secs(5);
        DriverSettings { queue_pairs: 64, admin_timeout: limit, shutdown_timeout: limit }
    }
}

/// A namespace that this driver can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Identifier.
    pub id: u32,
    /// Size in logical blocks.
    pub blocks: u64,
    /// Size of a logical block in bytes: 512 to 4,096.
    pub block_bytes: u32,
    /// The namespace rejects writes.
    pub write_protected: bool,
}

impl Namespace {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_bytes))
    }
}

/// Commands of a queue pair that was deleted.
#[derive(Debug)]
pub struct DeletedQueue {
    /// Commands that have ended before, and that were not polled.
    pub ended: Vec<Ended>,
    /// Tokens of the other commands. They may have run.
    pub unfinished: Vec<u64>,
}

/// A started controller. Dropping it disables the controller, so that it no longer accesses memory.
pub struct Controller<B: Backing> {
    backing: Arc<B>,
    settings: DriverSettings,
    capabilities: Capabilities,
    version: Version,
    admin: QueuePair<B>,
    /// Data of admin commands.
    page: B::Memory,
    identity: ControllerIdentity,
    namespaces: Vec<Namespace>,
    granted: u16,
    /// Numbers of I/O queues that are not in use.
    free_queues: Vec<u16>,
    next_token: u64,
    /// Results of Asynchronous Event Requests that have ended, oldest first.
    events: Vec<u32>,
    /// Event requests and aborts in flight.
    event_tokens: Vec<u64>,
    abort_tokens: Vec<u64>,
}

impl<B: Backing> std::fmt::Debug for Controller<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller")
            .field("model", &self.identity.model)
            .field("serial", &self.identity.serial)
            .field("granted", &self.granted)
            .finish_non_exhaustive()
    }
}

impl<B: Backing> Controller<B> {
    /// Resets and starts a controller (Base 2.0, 3.5.1), and identifies it and its namespaces.
    ///
    /// # Errors
    /// `Gone`, `Fatal` or `Timeout` if it does not start, `Unsupported` if it lacks what this driver requires,
    /// `Refused` if it rejects a command of the start, `Memory`.
    pub fn start(backing: B, settings: DriverSettings) -> Result<Controller<B>, NvmeError> {
        let backing = Arc::new(backing);
        if ControllerStatus(backing.read(offset::CSTS)).is_gone() {
            return Err(NvmeError::Gone);
        }
        let capabilities = Capabilities(read_u64(&*backing, offset::CAP));
        check_capabilities(capabilities)?;
        let limit = capabilities.ready_timeout();
        disable(&*backing, limit)?;
        let shape =
            QueueShape { id: 0, entries: ADMIN_ENTRIES.into(), stride: capabilities.doorbell_stride() };
        if capabilities.has_memory_buffer() {
            // Otherwise an address from before could hide memory that is mapped there now.
            memory_buffer::disable(&*backing);
        }
        let memory = QueueMemory::allocate(&*backing, shape.entries)?;
        let admin = QueuePair::new(Arc::clone(&backing), shape, memory)?;
        let page = backing.allocate(PAGE_BYTES)?;
        let sizes = AdminQueueSizes { submission: ADMIN_ENTRIES, completion: ADMIN_ENTRIES };
        backing.write(offset::AQA, sizes.encode());
        let (submissions, completions) = admin.addresses();
        write_u64(&*backing, offset::ASQ, submissions);
        write_u64(&*backing, offset::ACQ, completions);
        backing.write(offset::INTMS, u32::MAX);
        backing.write(offset::CC, Configuration { enable: true, shutdown: Shutdown::None }.encode());
        let mut controller = Controller {
            version: Version(backing.read(offset::VS)),
            // From here on, an error drops the controller, which disables it.
            backing,
            settings,
            capabilities,
            admin,
            page,
            identity: ControllerIdentity::decode(&[0; IDENTIFY_BYTES]),
            namespaces: Vec::new(),
            granted: 0,
            free_queues: Vec::new(),
            next_token: 0,
            events: Vec::new(),
            event_tokens: Vec::new(),
            abort_tokens: Vec::new(),
        };
        await_ready(&*controller.backing, true, limit)?;
        controller.identify()?;
        Ok(controller)
    }

    fn identify(&mut self) -> Result<(), NvmeError> {
        let data = self.read_page("Identify Controller", &Command::identify(cns::CONTROLLER, 0))?;
        self.identity = ControllerIdentity::decode(&data);
        let list = self.read_page("Identify of the namespaces", &Command::identify(cns::NAMESPACES, 0))?;
        for id in NamespaceList::decode(&list).0 {
            let data = self.read_page("Identify Namespace", &Command::identify(cns::NAMESPACE, id))?;
            self.namespaces.extend(usable(id, NamespaceIdentity::decode(&data)));
        }
        let wanted = self.settings.queue_pairs.clamp(1, u16::MAX - 1);
        let granted = self.command("Set Features, number of queues", &Command::request_queues(wanted))?;
        let (submission, completion) = (granted as u16, (granted >> 16) as u16);
        // Doorbells of more queues would lie outside the registers.
        let stride = self.capabilities.doorbell_stride();
        let doorbells = self.backing.register_bytes().saturating_sub(offset::DOORBELLS) / (2 * stride);
        let with_doorbells = u16::try_from(doorbells.saturating_sub(1)).unwrap_or(u16::MAX);
        self.granted = submission.min(completion).saturating_add(1).min(wanted).min(with_doorbells);
        if self.granted == 0 {
            let bytes = self.backing.register_bytes();
            return Err(NvmeError::Unsupported(format!(
                "its BAR 0 of {bytes} bytes has no doorbells of I/O queues"
            )));
        }
        self.free_queues = (1..=self.granted).rev().collect();
        Ok(())
    }

    /// Returns the identity of the controller.
    pub fn identity(&self) -> &ControllerIdentity {
        &self.identity
    }

    /// Returns the version of the specification that the controller implements.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the namespaces that this driver can use.
    pub fn namespaces(&self) -> &[Namespace] {
        &self.namespaces
    }

    /// Returns the number of I/O queue pairs that the controller has granted.
    pub fn granted(&self) -> u16 {
        self.granted
    }

    /// Returns how data is described: SGLs if the controller has them, else PRP lists.
    pub fn data_format(&self) -> DataFormat {
        if self.identity.sgl { DataFormat::Sgl } else { DataFormat::Prp }
    }

    /// Returns the maximum size of the data of one command in bytes.
    pub fn transfer_max(&self) -> u64 {
        self.identity.transfer_max.unwrap_or(u64::MAX).min(DataFormat::BYTES_MAX)
    }

    /// Returns the registers and the memory of the controller.
    pub fn backing(&self) -> &Arc<B> {
        &self.backing
    }

    /// Creates an I/O queue pair with at least 2 entries, and at most as many as the controller supports.
    ///
    /// # Errors
    /// `NoQueue` if all granted pairs are in use, `Refused`, `Memory`, or the admin queue fails.
    pub fn create_queue_pair(&mut self, entries: u32) -> Result<QueuePair<B>, NvmeError> {
        let entries = entries.clamp(2, self.entries_max());
        let memory = QueueMemory::allocate(&*self.backing, entries)?;
        self.create_queue_pair_in(entries, memory)
    }

    /// Creates an I/O queue pair in memory of the caller: of the host, of the controller's memory buffer, or of another
    /// device.
    ///
    /// # Errors
    /// `Invalid` if the memory is too small or the number of entries not possible; else as
    /// [`create_queue_pair`](Self::create_queue_pair).
    pub fn create_queue_pair_in(
        &mut self,
        entries: u32,
        memory: QueueMemory<B::Memory>,
    ) -> Result<QueuePair<B>, NvmeError> {
        let max = self.entries_max();
        if !(2..=max).contains(&entries) {
            return Err(NvmeError::Invalid(format!("a queue pair of {entries} entries: 2 to {max}")));
        }
        let stride = self.capabilities.doorbell_stride();
        self.with_free_number(|controller, id| {
            let shape = QueueShape { id, entries, stride };
            let queue = QueuePair::new(Arc::clone(&controller.backing), shape, memory)?;
            let (submissions, completions) = queue.addresses();
            controller.create_queues(id, entries, QueueAddresses { submissions, completions })?;
            Ok(queue)
        })
    }

    /// Creates something with the number of a queue pair, which is free again if that fails.
    fn with_free_number<T>(
        &mut self,
        create: impl FnOnce(&mut Controller<B>, u16) -> Result<T, NvmeError>,
    ) -> Result<T, NvmeError> {
        let Some(id) = self.free_queues.pop() else {
            return Err(NvmeError::NoQueue { granted: self.granted });
        };
        let created = create(self, id);
        // A number whose state is unknown is not used again before a reset.
        if let Err(NvmeError::Refused { .. } | NvmeError::Memory(_) | NvmeError::Invalid(_)) = created {
            self.free_queues.push(id);
        }
        created
    }

    fn create_queues(&mut self, id: u16, entries: u32, at: QueueAddresses) -> Result<(), NvmeError> {
        self.command("Create I/O Completion Queue", &Command::create_cq(id, entries, at.completions))?;
        let created =
            self.command("Create I/O Submission Queue", &Command::create_sq(id, entries, at.submissions));
        if let Err(error @ NvmeError::Refused { .. }) = created {
            self.command("Delete I/O Completion Queue", &Command::delete_queue(DELETE_CQ, id))?;
            return Err(error);
        }
        created.map(|_| ())
    }

    /// Deletes a queue pair. The controller no longer accesses the memory of its commands.
    ///
    /// # Errors
    /// If the controller does not confirm, the memory of its commands must not be used again before a reset.
    pub fn delete_queue_pair(&mut self, mut queue: QueuePair<B>) -> Result<DeletedQueue, NvmeError> {
        let id = queue.id();
        // The submission queue first (Base 2.0, 5.6).
        self.command("Delete I/O Submission Queue", &Command::delete_queue(DELETE_SQ, id))?;
        let mut ended = Vec::new();
        let polled = queue.poll(&mut ended);
        self.command("Delete I/O Completion Queue", &Command::delete_queue(DELETE_CQ, id))?;
        polled?;
        self.free_queues.push(id);
        Ok(DeletedQueue { ended, unfinished: queue.into_tokens() })
    }

    /// Requests the abort of a command (Base 2.0, 5.1) without waiting. The command ends with a completion, with or
    /// without an error. Returns false, without a request, if as many are outstanding as the controller allows.
    ///
    /// # Errors
    /// If the admin queue fails.
    pub fn request_abort(&mut self, queue: u16, id: CommandId) -> Result<bool, NvmeError> {
        self.poll_admin()?;
        let most = usize::from(self.identity.aborts_max).min(usize::from(ADMIN_ENTRIES) / 4);
        if self.abort_tokens.len() >= most {
            return Ok(false);
        }
        let token = self.submit_unawaited(&Command::abort(queue, id.0))?;
        self.abort_tokens.push(token);
        Ok(true)
    }

    /// Reads the health log of the controller.
    ///
    /// # Errors
    /// `Refused`, or the admin queue fails.
    pub fn health(&mut self) -> Result<HealthLog, NvmeError> {
        let data = self.read_page("Get Log Page", &Command::log_page(HEALTH_LOG, HEALTH_BYTES))?;
        let page: &[u8; HEALTH_BYTES] = data.first_chunk().expect("a page has more bytes than the log");
        Ok(HealthLog::parse(page))
    }

    /// Requests one notification of an asynchronous event (Base 2.0, 5.2).
    ///
    /// # Errors
    /// `Invalid` if as many are outstanding as the controller allows.
    pub fn request_event(&mut self) -> Result<(), NvmeError> {
        // Half of the admin queue stays free for other commands.
        let most = usize::from(self.identity.events_max).min(usize::from(ADMIN_ENTRIES) / 2);
        if self.event_tokens.len() == most {
            return Err(NvmeError::Invalid(format!("{most} event requests are outstanding")));
        }
        let token = self.submit_unawaited(&Command::new(spec::ASYNC_EVENT_REQUEST))?;
        self.event_tokens.push(token);
        Ok(())
    }

    /// Submits an admin command that the driver does not wait for, and returns its token.
    fn submit_unawaited(&mut self, command: &Command) -> Result<u64, NvmeError> {
        let token = self.take_token();
        let never = Instant::now() + Duration::from_secs(86_400 * 365);
        self.admin.submit(command, token, never)?;
        self.admin.ring();
        Ok(token)
    }

    /// Takes the events that were reported: dword 0 of their completions.
    ///
    /// # Errors
    /// If the admin queue fails.
    pub fn take_events(&mut self) -> Result<Vec<u32>, NvmeError> {
        self.poll_admin()?;
        Ok(std::mem::take(&mut self.events))
    }

    fn poll_admin(&mut self) -> Result<(), NvmeError> {
        let mut ended = Vec::new();
        self.admin.poll(&mut ended)?;
        ended.into_iter().for_each(|one| self.note_unawaited(one));
        Ok(())
    }

    /// Notes the end of an event request or an abort. Other commands on the admin queue are awaited.
    fn note_unawaited(&mut self, ended: Ended) {
        self.abort_tokens.retain(|token| *token != ended.token);
        let known = self.event_tokens.iter().position(|token| *token == ended.token);
        if let Some(index) = known {
            self.event_tokens.swap_remove(index);
            if ended.status.is_success() {
                self.events.push(ended.result);
            }
        }
    }

    /// Shuts the controller down (Base 2.0, 3.6.1): it writes its caches. It runs no commands afterwards.
    ///
    /// # Errors
    /// `Timeout` or `Gone`.
    pub fn shut_down(&mut self) -> Result<(), NvmeError> {
        self.backing.write(offset::CC, Configuration { enable: true, shutdown: Shutdown::Normal }.encode());
        let limit = self.settings.shutdown_timeout;
        let is_over = |status: ControllerStatus| status.shutdown() == ShutdownStatus::Complete;
        await_status(&*self.backing, "the shutdown", limit, is_over)
    }

    /// Disables the controller: it forgets all queues and commands, and no longer accesses memory.
    ///
    /// # Errors
    /// `Timeout` or `Gone`. After `Timeout`, the controller may still access memory.
    pub(crate) fn disable(&mut self) -> Result<(), NvmeError> {
        disable(&*self.backing, self.capabilities.ready_timeout())
    }

    /// Checks that the controller works.
    ///
    /// # Errors
    /// `Gone` or `Fatal`.
    pub fn check_alive(&self) -> Result<(), NvmeError> {
        check_alive(ControllerStatus(self.backing.read(offset::CSTS)))
    }

    /// Runs an admin command to its end; returns dword 0 of its completion.
    fn command(&mut self, what: &'static str, command: &Command) -> Result<u32, NvmeError> {
        let limit = self.settings.admin_timeout;
        let (token, deadline) = (self.take_token(), Instant::now() + limit);
        let id = self.admin.submit(command, token, deadline)?;
        self.admin.ring();
        let (mut ended, mut others) = (Vec::new(), Vec::new());
        loop {
            self.admin.poll(&mut ended)?;
            let mut own = None;
            for one in ended.drain(..) {
                if one.token == token {
                    own = Some(one);
                } else {
                    others.push(one);
                }
            }
            others.drain(..).for_each(|one| self.note_unawaited(one));
            match own {
                Some(one) if one.status.is_success() => return Ok(one.result),
                Some(one) => return Err(NvmeError::Refused { what, status: one.status }),
                None => {}
            }
            let alive = self.check_alive();
            if alive.is_err() || Instant::now() >= deadline {
                self.admin.give_up(id);
                return Err(alive.err().unwrap_or(NvmeError::Timeout { what, limit }));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Runs an admin command that fills a page.
    fn read_page(
        &mut self,
        what: &'static str,
        command: &Command,
    ) -> Result<Box<[u8; PAGE_BYTES]>, NvmeError> {
        for at in (0..PAGE_BYTES).step_by(8) {
            self.page.word(at).store(0, Ordering::Relaxed);
        }
        self.command(what, &command.with_data(DataPointer::prp(self.page.address(), 0)))?;
        let mut data = Box::new([0; PAGE_BYTES]);
        for (index, place) in data.chunks_exact_mut(8).enumerate() {
            place.copy_from_slice(&self.page.word(8 * index).load(Ordering::Relaxed).to_le_bytes());
        }
        Ok(data)
    }

    fn take_token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }
}

impl<B: Backing> Drop for Controller<B> {
    fn drop(&mut self) {
        // A controller that does not stop is unable to access memory that is dropped: see `DmaMemory`.
        let _ = disable(&*self.backing, self.capabilities.ready_timeout());
    }
}

fn check_capabilities(capabilities: Capabilities) -> Result<(), NvmeError> {
    if !capabilities.has_nvm_commands() {
        return Err(NvmeError::Unsupported("it lacks the NVM command set".into()));
    }
    if capabilities.entries_max() < 2 {
        return Err(NvmeError::Unsupported("its queues have fewer than 2 entries".into()));
    }
    if !capabilities.has_small_pages() {
        return Err(NvmeError::Unsupported("its smallest page is larger than 4 KiB".into()));
    }
    Ok(())
}

pub(crate) fn check_alive(status: ControllerStatus) -> Result<(), NvmeError> {
    match status {
        status if status.is_gone() => Err(NvmeError::Gone),
        status if status.is_fatal() => Err(NvmeError::Fatal),
        _ => Ok(()),
    }
}

/// Disables a controller: it forgets its queues, and no longer accesses memory.
fn disable(backing: &impl Backing, limit: Duration) -> Result<(), NvmeError> {
    backing.write(offset::CC, Configuration { enable: false, shutdown: Shutdown::None }.encode());
    let is_over = |status: ControllerStatus| !status.is_ready();
    await_status(backing, "the reset", limit, is_over)
}

fn await_ready(backing: &impl Backing, ready: bool, limit: Duration) -> Result<(), NvmeError> {
    let is_over = |status: ControllerStatus| status.is_ready() == ready || status.is_fatal();
    await_status(backing, "the start", limit, is_over)?;
    check_alive(ControllerStatus(backing.read(offset::CSTS)))
}

/// Waits for a state.
fn await_status(
    backing: &impl Backing,
    what: &'static str,
    limit: Duration,
    is_over: impl Fn(ControllerStatus) -> bool,
) -> Result<(), NvmeError> {
    let start = Instant::now();
    loop {
        let status = ControllerStatus(backing.read(offset::CSTS));
        if status.is_gone() {
            return Err(NvmeError::Gone);
        }
        if is_over(status) {
            return Ok(());
        }
        if start.elapsed() >= limit {
            return Err(NvmeError::Timeout { what, limit });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns a namespace if its format can be used: blocks of 512 to 4,096 bytes without metadata.
fn usable(id: u32, identity: NamespaceIdentity) -> Option<Namespace> {
    let format = identity.format;
    let fits = (9..=LBA_POWER_MAX).contains(&format.data_power) && format.metadata_bytes == 0;
    (fits && identity.blocks > 0).then(|| Namespace {
        id,
        blocks: identity.blocks,
        block_bytes: 1 << format.data_power,
        write_protected: identity.write_protected,
    })
}

/// Reports whether a command has ended because it was aborted, or its queue deleted.
pub fn was_aborted(status: Status) -> bool {
    matches!(status.code(), Status::ABORTED | Status::QUEUE_DELETED)
}
