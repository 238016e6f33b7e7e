//! Queue pairs of NVMe controllers that this process drives itself.
//!
//! ```text
//! register_memory ─▶ RegisteredMemory ─▶ request_queues ─▶ QueueGrant: submit commands without a call ─▶ return_queues
//! ```
//!
//! Some devices lend extents that are read and written through queue pairs only ([`LeasedExtent::device`]). Commands name
//! registered memory by addresses of the controller. A queue pair accesses the whole device: use the offsets of extents
//! only.
//!
//! A grant ends with its session, or when the agent closes its device ([`QueueGrant::revoked`]). Commands that have not
//! ended then never end, so each needs a deadline.
//!
//! [`LeasedExtent::device`]: crate::extents::LeasedExtent::device

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use reprise_buffers::{Access, MappedRegion};
use reprise_proto::local::{self, request, response};

use crate::client::{Client, Session};
use crate::connection::PendingCall;
use crate::error::ClientError;

/// Maximum queue pairs of one request: each has a descriptor in the answer.
pub const QUEUE_PAIRS_MAX: u32 = 64;

/// Limit of calls about memory and queue pairs, unless the session's call timeout is longer. The agent pins the memory for
/// the controller (about a second for 4 GiB), and waits for admin commands: 5 s each if the controller hangs, and 10 s for
/// a deletion on another thread. Other calls of the session continue meanwhile.
pub const QUEUE_CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum revocations that are kept for grants that are not known yet.
const EARLY_REVOCATIONS_MAX: usize = 64;

/// Memory of this process that controllers may access. It stays registered until the session ends.
#[derive(Clone, Debug)]
pub struct RegisteredMemory {
    pub(crate) number: u32,
    pub(crate) bytes: u64,
}

impl RegisteredMemory {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Memory whose registration the agent has not confirmed.
#[derive(Debug)]
pub struct PendingMemory {
    session: Arc<Session>,
    call: PendingCall,
    bytes: u64,
}

impl PendingMemory {
    /// Returns the memory if it is registered within `patience`; `None`: poll again.
    ///
    /// # Errors
    /// As [`Client::register_memory`]. Do not poll again after an error.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<RegisteredMemory>, ClientError> {
        match self.call.poll(patience)? {
            None => Ok(None),
            Some(response::Body::MemoryRegistered(registered)) => {
                Ok(Some(RegisteredMemory { number: registered.memory, bytes: self.bytes }))
            }
            Some(_) => Err(self.session.broken(ClientError::unexpected("register memory"))),
        }
    }
}

impl Client {
    /// Registers memory of this process for controllers: the first `bytes` bytes of a memfd that is sealed against
    /// shrinking and allocated as a whole, such as
    /// [`MappedRegion::allocate`](reprise_buffers::MappedRegion::allocate) returns. The agent maps it until the session
    /// ends.
    ///
    /// # Errors
    /// `BadRequest` (the agent grants no queue pairs, or the memory is unsuitable), `Timeout`, `AgentLost`.
    pub fn register_memory(&self, file: OwnedFd, bytes: u64) -> Result<RegisteredMemory, ClientError> {
        let after = self.queue_call_timeout();
        let timed_out = ClientError::Timeout { call: "register memory", after };
        self.start_register_memory(file, bytes)?.poll(Duration::MAX)?.ok_or(timed_out)
    }

    /// Starts [`Client::register_memory`]. The agent maps the memory also if the result is not taken.
    ///
    /// # Errors
    /// `Busy`, `AgentLost`.
    pub fn start_register_memory(&self, file: OwnedFd, bytes: u64) -> Result<PendingMemory, ClientError> {
        let body = request::Body::RegisterMemory(local::RegisterMemory { bytes });
        let session = Arc::clone(self.session());
        let _span = session.span("register memory").entered();
        let timeout = self.queue_call_timeout();
        let call = session.connection().try_begin_with("register memory", (body, Some(file)), timeout)?;
        Ok(PendingMemory { session: Arc::clone(self.session()), call, bytes })
    }

    /// Requests `pairs` queue pairs of `depth` entries on a device, for commands that access one registered memory.
    ///
    /// # Errors
    /// `BadRequest` (a limit, or the device lends none), `Busy` (others hold them), `Timeout`, `AgentLost`.
    pub fn request_queues(
        &self,
        device: u32,
        (pairs, depth): (u32, u32),
        memory: &RegisteredMemory,
    ) -> Result<QueueGrant, ClientError> {
        self.request_queues_within(device, (pairs, depth), memory, self.queue_call_timeout())
    }

    /// [`Client::request_queues`] with a specific timeout. A grant that arrives later is returned to the agent.
    ///
    /// # Errors
    /// As [`Client::request_queues`].
    pub fn request_queues_within(
        &self,
        device: u32,
        (pairs, depth): (u32, u32),
        memory: &RegisteredMemory,
        timeout: Duration,
    ) -> Result<QueueGrant, ClientError> {
        let request = local::RequestQueues { device, pairs, depth, memory: memory.number };
        let body = request::Body::RequestQueues(request);
        match self.session().call_within("request queues", body, timeout)? {
            response::Body::QueuesGranted(answer) => {
                granted(self.session(), device, &answer).map_err(|error| self.session().broken(error))
            }
            _ => Err(self.session().broken(ClientError::unexpected("request queues"))),
        }
    }

    /// Returns a grant, and waits until the agent has deleted its queue pairs: no command accesses memory afterwards.
    ///
    /// # Errors
    /// `AgentLost`; `Timeout` and the agent's refusals, after which the session has ended. The agent then keeps the
    /// session's extents until the queue pairs are deleted or the device is reset.
    pub fn return_queues(&self, grant: QueueGrant) -> Result<(), ClientError> {
        self.return_queues_within(grant, self.queue_call_timeout())
    }

    /// [`Client::return_queues`] with a specific timeout.
    ///
    /// # Errors
    /// As [`Client::return_queues`].
    pub fn return_queues_within(&self, grant: QueueGrant, timeout: Duration) -> Result<(), ClientError> {
        let body = request::Body::ReturnQueues(local::ReturnQueues { generation: grant.generation() });
        let answer = self.session().call_within("return queues", body, timeout);
        drop(grant);
        match answer {
            Ok(response::Body::QueuesReturned(local::QueuesReturned {})) => Ok(()),
            Ok(_) => Err(self.session().broken(ClientError::unexpected("return queues"))),
            // Commands may still run. In this session, dropped leases and pins would free their extents.
            Err(error) => Err(self.session().broken(error)),
        }
    }

    fn queue_call_timeout(&self) -> Duration {
        QUEUE_CALL_TIMEOUT.max(self.session().call_timeout())
    }
}

/// How commands describe their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataFormat {
    /// Lists of pages: the memory of a queue pair has a page for the list of each command slot.
    Prp,
    /// One data block descriptor in the command.
    Sgl,
}

/// Properties of the device of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueDevice {
    /// Number of the device in extents.
    pub device: u32,
    /// Namespace of all commands.
    pub namespace: u32,
    /// Bytes of a logical block.
    pub block_bytes: u32,
    /// Maximum bytes of the data of one command.
    pub transfer_max: u64,
    /// Description of memory in commands.
    pub format: DataFormat,
    /// The agent emulates the controller.
    pub is_emulated: bool,
}

/// A queue pair. Its memory is zeroed when it is granted.
#[derive(Debug)]
pub struct GrantedQueuePair {
    /// Number of both queues.
    pub id: u16,
    /// Entries of each queue.
    pub entries: u32,
    /// Submission queue, completion queue, and pages for lists.
    pub memory: MappedRegion,
    /// Address of the memory for the controller.
    pub address: u64,
    /// Offset of the completion queue in the memory.
    pub completions_at: u64,
    /// Offset of the pages for lists in the memory; its end with SGLs.
    pub lists_at: u64,
    /// Offset of the submission queue's doorbell in the grant's [`doorbells`](QueueGrant::doorbells).
    pub submission_doorbell: u64,
    /// Offset of the completion queue's doorbell in the grant's doorbells.
    pub completion_doorbell: u64,
}

/// Queue pairs of one device. All commands must have ended before it is dropped: the agent then deletes the queue pairs
/// without an answer. [`Client::return_queues`](crate::Client::return_queues) waits for the deletion.
#[derive(Debug)]
pub struct QueueGrant {
    session: Arc<Session>,
    generation: u64,
    device: QueueDevice,
    doorbells: MappedRegion,
    queues: Vec<GrantedQueuePair>,
    memory_address: u64,
    revocation: Arc<OnceLock<String>>,
}

impl QueueGrant {
    /// Returns the number that identifies the grant in logs and status.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the properties of the device.
    pub fn device(&self) -> &QueueDevice {
        &self.device
    }

    /// Returns the memory with the doorbells: registers of the controller, or words that the agent forwards. Only the
    /// doorbells of the granted queue pairs may be written.
    pub fn doorbells(&self) -> &MappedRegion {
        &self.doorbells
    }

    /// Returns the queue pairs.
    pub fn queues(&self) -> &[GrantedQueuePair] {
        &self.queues
    }

    /// Returns the address of the first byte of the registered memory for the controller.
    pub fn memory_address(&self) -> u64 {
        self.memory_address
    }

    /// Returns why the grant has ended; `None` while its queue pairs can be used.
    pub fn revoked(&self) -> Option<String> {
        match self.revocation.get() {
            Some(reason) => Some(reason.clone()),
            None if self.session.connection().has_ended() => Some("the session has ended".to_owned()),
            None => None,
        }
    }
}

impl Drop for QueueGrant {
    fn drop(&mut self) {
        let connection = self.session.connection();
        connection.grants().forget(self.generation);
        connection.cast(request::Body::ReturnQueues(local::ReturnQueues { generation: self.generation }));
    }
}

/// Grants of a session: memory that arrived for them, and their revocations.
#[derive(Debug, Default)]
pub(crate) struct GrantMap {
    state: Mutex<Grants>,
}

#[derive(Debug, Default)]
struct Grants {
    known: BTreeMap<u64, Incoming>,
    /// Reasons of revocations by generation: a notice may arrive before its grant, or after the grant was returned.
    early: BTreeMap<u64, String>,
}

#[derive(Debug)]
struct Incoming {
    /// Doorbells and queue pairs, until the caller takes them.
    memory: Vec<MappedRegion>,
    revocation: Arc<OnceLock<String>>,
}

impl GrantMap {
    /// Maps the memory of a grant whose descriptors have arrived with its message.
    ///
    /// # Errors
    /// `Memory` if it cannot be mapped, or the error of `next`.
    pub(crate) fn insert(
        &self,
        granted: &local::QueuesGranted,
        mut next: impl FnMut() -> Result<OwnedFd, ClientError>,
    ) -> Result<(), ClientError> {
        let mut map = |bytes: u64| {
            let mapped = MappedRegion::map(next()?, bytes, Access::ReadWrite);
            mapped.map_err(|source| ClientError::Memory { context: "map granted queue pairs", source })
        };
        let mut memory = vec![map(granted.doorbells_bytes)?];
        for queue in &granted.queues {
            memory.push(map(queue.bytes)?);
        }
        let mut grants = self.lock();
        let revoked = grants.early.remove(&granted.generation);
        let revocation = Arc::new(revoked.map_or_else(OnceLock::new, OnceLock::from));
        grants.known.insert(granted.generation, Incoming { memory, revocation });
        Ok(())
    }

    /// Notes that a grant was revoked. The notice of a grant that is not known is kept until the grant arrives; of too
    /// many, those of the latest generations are kept, because generations grow.
    pub(crate) fn revoke(&self, notice: &local::QueuesRevoked) {
        let mut grants = self.lock();
        if let Some(incoming) = grants.known.get(&notice.generation) {
            // The first reason stays.
            let _ = incoming.revocation.set(notice.reason.clone());
            return;
        }
        grants.early.insert(notice.generation, notice.reason.clone());
        if grants.early.len() > EARLY_REVOCATIONS_MAX {
            grants.early.pop_first();
        }
    }

    pub(crate) fn forget(&self, generation: u64) {
        self.lock().known.remove(&generation);
    }

    fn take(&self, generation: u64) -> Option<(Vec<MappedRegion>, Arc<OnceLock<String>>)> {
        let mut grants = self.lock();
        let incoming = grants.known.get_mut(&generation)?;
        Some((std::mem::take(&mut incoming.memory), Arc::clone(&incoming.revocation)))
    }

    /// Every change leaves the map consistent, so a poisoned lock is ignored.
    fn lock(&self) -> MutexGuard<'_, Grants> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Builds a grant from the answer to a request.
///
/// # Errors
/// `Protocol` if a place lies outside its memory, or a value is invalid.
pub(crate) fn granted(
    session: &Arc<Session>,
    device: u32,
    granted: &local::QueuesGranted,
) -> Result<QueueGrant, ClientError> {
    let invalid = |what: &str| ClientError::Protocol(format!("grant of queue pairs with {what}"));
    let taken = session.connection().grants().take(granted.generation);
    let (memory, revocation) = taken.ok_or_else(|| invalid("an unknown generation"))?;
    let mut memory = memory.into_iter();
    let doorbells = memory.next().ok_or_else(|| invalid("no doorbells"))?;
    let format = match granted.format() {
        local::DataFormat::Prp => DataFormat::Prp,
        local::DataFormat::Sgl => DataFormat::Sgl,
        local::DataFormat::DataUnspecified => return Err(invalid("an unknown data format")),
    };
    if !granted.block_bytes.is_power_of_two() || granted.transfer_max < u64::from(granted.block_bytes) {
        return Err(invalid("invalid sizes of the device"));
    }
    let queue = |(queue, memory): (&local::GrantedQueue, MappedRegion)| {
        let (entries, bytes) = (u64::from(queue.entries), memory.bytes());
        let words = [queue.submission_doorbell, queue.completion_doorbell];
        let inside = entries >= 2
            && queue.completions_at >= 64 * entries
            && queue.lists_at >= queue.completions_at.saturating_add(16 * entries)
            && queue.lists_at <= bytes
            && words.iter().all(|at| at % 4 == 0 && at.saturating_add(4) <= doorbells.bytes());
        let has_lists = format == DataFormat::Sgl
            || bytes - queue.lists_at.min(bytes) >= 4096 * entries.saturating_sub(1);
        let id = u16::try_from(queue.queue).ok().filter(|_| inside && has_lists);
        Ok(GrantedQueuePair {
            id: id.ok_or_else(|| invalid("a queue pair outside of its memory"))?,
            entries: queue.entries,
            memory,
            address: queue.address,
            completions_at: queue.completions_at,
            lists_at: queue.lists_at,
            submission_doorbell: queue.submission_doorbell,
            completion_doorbell: queue.completion_doorbell,
        })
    };
    let queues = granted.queues.iter().zip(memory).map(queue).collect::<Result<Vec<_>, ClientError>>()?;
    let device = QueueDevice {
        device,
        namespace: granted.namespace,
        block_bytes: granted.block_bytes,
        transfer_max: granted.transfer_max,
        format,
        is_emulated: granted.emulated,
    };
    Ok(QueueGrant {
        session: Arc::clone(session),
        generation: granted.generation,
        device,
        doorbells,
        queues,
        memory_address: granted.memory_address,
        revocation,
    })
}
