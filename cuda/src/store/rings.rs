//! The backend `gpu-queue`: rings move blocks between KV memory and NVMe namespaces, without a copy elsewhere.
//!
//! A GPU drives the queue pairs, or threads of this process do. Each device has its own ring. Transfers of a layer are
//! divided among the queue pairs of their device; batches that find no room wait in the order of their requests. Those
//! that wait for a point of a stream are passed.
//!
//! Commands of a ring that was stopped may run until their queue pairs are deleted. Until then, or the deadline of their
//! request, streams wait for them: [`DetachedRing`].

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_policy::session::TransferBackend;

use crate::ring::{
    BatchSettings, CONTEXTS_MAX, ContextStatus, Cqe, GpuRunner, HostRunner, Operation, Ring, Ticket, Transfer,
};
use crate::store::backoff::Backoff;
use crate::store::mover::{
    BlockError, LayerMover, LayerOutcome, LayerRequest, LayerTicket, MoveError, MoverCounters, check,
};
use crate::store::progress::{Progress, Requests};
use crate::store::waiting::{Ordered, Waiting};
use crate::store::{
    Backend, BackendKind, DevicePlan, EngineStream, KvGeometry, MappingTable, PlanCounters, Planned, Point,
    RequestOrder, plan_layer,
};

/// What drives the queue pairs of a ring.
#[derive(Debug)]
pub enum Processor<'k> {
    /// A thread for each queue pair.
    Host(HostRunner),
    /// A warp for each queue pair.
    Gpu(GpuRunner<'k>),
}

/// Work that rings have issued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingCounters {
    /// Batches, each with one doorbell.
    pub batches: u64,
    /// Contexts of the batches: one for each transfer of objects or of a header page.
    pub contexts: u64,
    /// Bytes of reads, header pages included.
    pub bytes_read: u64,
    /// Bytes of writes.
    pub bytes_written: u64,
}

impl RingCounters {
    /// Counts a batch of one operation.
    fn issue(&mut self, operation: Operation, batch: &[Planned]) {
        let bytes: u64 = batch.iter().map(|planned| u64::from(planned.bytes)).sum();
        self.batches += 1;
        self.contexts += batch.len() as u64;
        match operation {
            Operation::Read => self.bytes_read += bytes,
            Operation::Write => self.bytes_written += bytes,
        }
    }
}

impl std::ops::Add for RingCounters {
    type Output = RingCounters;

    fn add(self, other: RingCounters) -> RingCounters {
        RingCounters {
            batches: self.batches + other.batches,
            contexts: self.contexts + other.contexts,
            bytes_read: self.bytes_read + other.bytes_read,
            bytes_written: self.bytes_written + other.bytes_written,
        }
    }
}

/// Namespace of a ring, and limits of its commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceLimits {
    /// Number of the namespace at its controller.
    pub namespace: u32,
    /// Size of the namespace in bytes; `u64::MAX` if only the controller knows it.
    pub bytes: u64,
    /// Size of a logical block in bytes.
    pub block_bytes: u32,
    /// Maximum bytes of a transfer that joins adjacent objects.
    pub transfer_max: u64,
    /// The controller is software.
    pub is_emulated: bool,
}

/// A running ring of one device, and the descriptors of KV memory for its controller.
#[derive(Debug)]
pub struct RingDevice<'k> {
    /// Parks the queues before the ring is dropped.
    processor: Processor<'k>,
    work: RingWork,
}

/// A ring with its waiting and running batches.
#[derive(Debug)]
struct RingWork {
    ring: Ring,
    table: MappingTable,
    limits: NamespaceLimits,
    next_queue: usize,
    waiting: Waiting<Batch>,
    in_flight: Vec<(Ticket, Batch)>,
    /// Transfers that had not ended when the processor stopped.
    parked: Vec<Batch>,
    counters: RingCounters,
}

/// Transfers of a request for one queue pair.
#[derive(Debug)]
struct Batch {
    operation: Operation,
    planned: Vec<Planned>,
    after: Option<Point>,
    progress: Arc<Progress>,
}

impl<'k> RingDevice<'k> {
    /// Takes a ring whose queues all have a queue pair and run.
    ///
    /// # Errors
    /// `Invalid` for a block size that no namespace has.
    pub fn new(
        ring: Ring,
        processor: Processor<'k>,
        table: MappingTable,
        limits: NamespaceLimits,
    ) -> Result<RingDevice<'k>, MoveError> {
        if !limits.block_bytes.is_power_of_two() {
            return Err(MoveError::Invalid(format!("{limits:?}: expected blocks of a power of two")));
        }
        let (waiting, in_flight, parked) = (Waiting::default(), Vec::new(), Vec::new());
        let (next_queue, counters) = (0, RingCounters::default());
        let work = RingWork { ring, table, limits, next_queue, waiting, in_flight, parked, counters };
        Ok(RingDevice { processor, work })
    }
}

impl RingWork {
    fn has_unfinished(&self) -> bool {
        let ended = |(_, batch): &(Ticket, Batch)| batch.progress.is_over();
        let given_up = |queue| self.ring.given_up(queue) > 0 || self.ring.is_broken(queue);
        self.in_flight.iter().any(ended) || (0..self.ring.queues()).any(given_up)
    }

    /// Takes batches that have ended, and issues others into their room.
    fn advance(&mut self) {
        while let Some(cqe) = self.ring.poll_cqe() {
            self.take(&cqe);
        }
        let mut waiting = std::mem::take(&mut self.waiting);
        let mut pass = waiting.pass();
        while self.ring.free_iocbs() > 0 {
            match pass.take() {
                Some((batch, Ok(()))) => self.issue(batch),
                Some((batch, Err(error))) => batch.fail(&error),
                None => break,
            }
        }
        self.waiting = waiting;
    }

    fn issue(&mut self, batch: Batch) {
        let left = batch.progress.deadline().saturating_duration_since(Instant::now());
        if left.is_zero() || !batch.progress.start(batch.planned.len()) {
            return;
        }
        let NamespaceLimits { namespace, block_bytes, .. } = self.limits;
        let settings = BatchSettings { operation: batch.operation, namespace, timeout: Some(left), token: 0 };
        let Some(mut iocb) = self.ring.get_iocb(&settings) else {
            return batch.end_all(|| Err(BlockError::Failed("no free batch of a ring".to_owned())));
        };
        for planned in &batch.planned {
            let Planned { address, offset, bytes, .. } = *planned;
            iocb.push(&Transfer { address, block: offset / u64::from(block_bytes), bytes, checksum: 0 });
        }
        let issued = iocb.issue_io(self.next_queue);
        self.next_queue = (self.next_queue + 1) % self.ring.queues();
        match issued {
            Ok(ticket) => {
                self.counters.issue(batch.operation, &batch.planned);
                self.in_flight.push((ticket, batch));
            }
            Err(error) => {
                let text = error.to_string();
                batch.end_all(|| Err(BlockError::Failed(text.clone())));
            }
        }
    }

    fn take(&mut self, cqe: &Cqe) {
        let Some(at) = self.in_flight.iter().position(|(ticket, _)| *ticket == cqe.ticket) else { return };
        let (ticket, mut batch) = self.in_flight.swap_remove(at);
        if cqe.failed == 0 {
            return batch.end_all(|| Ok(()));
        }
        let mut parked = Vec::new();
        for (planned, status) in batch.planned.iter().zip(self.ring.statuses(ticket)) {
            let result = match status {
                ContextStatus::Done => Ok(()),
                ContextStatus::TimedOut => Err(BlockError::TimedOut),
                // The processor has stopped, but the controller may still run the command.
                ContextStatus::Parked => {
                    parked.push(*planned);
                    continue;
                }
                other => Err(BlockError::Failed(format!("transfer at {}: {other:?}", planned.offset))),
            };
            batch.progress.end(planned.block, result);
        }
        if !parked.is_empty() {
            batch.planned = parked;
            self.parked.push(batch);
        }
    }
}

impl RingWork {
    /// Takes batches that have ended, and fails those that have not begun. Afterwards, only commands in flight are left.
    fn stop(&mut self) {
        while let Some(cqe) = self.ring.poll_cqe() {
            self.take(&cqe);
        }
        self.waiting.drain().for_each(|batch| batch.fail(&stopped()));
    }
}

fn stopped() -> BlockError {
    BlockError::Failed("the ring was stopped".to_owned())
}

impl Batch {
    fn end_all(&self, result: impl Fn() -> Result<(), BlockError>) {
        self.planned.iter().for_each(|planned| self.progress.end(planned.block, result()));
    }

    /// Ends transfers that have not begun.
    fn fail(&self, error: &BlockError) {
        if self.progress.start(self.planned.len()) {
            self.end_all(|| Err(error.clone()));
        }
    }
}

impl Ordered for Batch {
    fn after(&self) -> Option<&Point> {
        self.after.as_ref()
    }

    fn progress(&self) -> &Progress {
        &self.progress
    }
}

/// A ring that was removed from its mover, and whose processor has stopped. Commands may access memory until its queue
/// pairs are deleted.
///
/// Delete the queue pairs, then call [`release`](Self::release): streams and requests wait for that, up to the deadlines
/// of the requests. Dropping the value instead leaves them to their deadlines. With a GPU, dropping releases memory, which
/// waits for all streams.
#[derive(Debug)]
#[must_use = "delete the queue pairs, then release the ring"]
pub struct DetachedRing {
    work: RingWork,
}

impl DetachedRing {
    /// Ends the transfers that were in flight: the queue pairs are deleted, so no command accesses memory.
    pub fn release(mut self) {
        let RingWork { in_flight, parked, .. } = &mut self.work;
        let running = in_flight.drain(..).map(|(_, batch)| batch).chain(parked.drain(..));
        running.for_each(|batch| batch.end_all(|| Err(stopped())));
    }
}

/// Rings by the index of their device; also for the thread that advances them for streams.
type Rings = Arc<Mutex<Vec<Option<RingWork>>>>;

/// Rings of some devices over one KV memory; see the module.
#[derive(Debug)]
pub struct RingMover<'k> {
    geometry: KvGeometry,
    /// Processors of the rings; dropped before them.
    processors: Vec<Option<Processor<'k>>>,
    rings: Rings,
    requests: Requests,
    plans: PlanCounters,
    /// Work of detached devices.
    detached: RingCounters,
}

impl<'k> RingMover<'k> {
    /// Creates a mover without devices.
    pub fn new(geometry: KvGeometry) -> RingMover<'k> {
        let rings = Rings::default();
        let of_thread = Arc::clone(&rings);
        let requests = Requests::with_pump(Arc::new(move || {
            advance(&mut lock(&of_thread));
        }));
        let (plans, detached) = (PlanCounters::default(), RingCounters::default());
        RingMover { geometry, processors: Vec::new(), rings, requests, plans, detached }
    }

    /// Adds a device; returns its index.
    pub fn attach(&mut self, device: RingDevice<'k>) -> usize {
        self.processors.push(Some(device.processor));
        lock(&self.rings).push(Some(device.work));
        self.processors.len() - 1
    }

    /// Reports whether the mover has no device.
    pub fn is_empty(&self) -> bool {
        self.processors.iter().all(Option::is_none)
    }

    /// Replaces a device that was [detached](Self::detach), at the same index.
    pub fn replace(&mut self, index: usize, device: RingDevice<'k>) {
        self.processors[index] = Some(device.processor);
        lock(&self.rings)[index] = Some(device.work);
    }

    /// Removes a device, and stops the processor of its ring. Blocks of open requests that it has not moved fail or time
    /// out. Commands may access memory until the queue pairs are deleted: see [`DetachedRing`]. With a GPU, stopping one
    /// device waits for the kernels of the others ([`GpuRunner`]): use [`detach_all`](Self::detach_all).
    pub fn detach(&mut self, index: usize) -> Option<DetachedRing> {
        drop(self.processors.get_mut(index)?.take()?);
        self.take_work(index)
    }

    /// Removes all devices; stops all processors before the first ring is returned.
    pub fn detach_all(&mut self) -> Vec<DetachedRing> {
        self.processors.iter_mut().for_each(|processor| drop(processor.take()));
        (0..self.processors.len()).filter_map(|index| self.take_work(index)).collect()
    }

    fn take_work(&mut self, index: usize) -> Option<DetachedRing> {
        let mut work = lock(&self.rings).get_mut(index)?.take()?;
        work.stop();
        self.detached = self.detached + work.counters;
        Some(DetachedRing { work })
    }

    /// Reports whether commands of a device were given up, or may run beyond the end of their request.
    pub fn has_unfinished(&self, index: usize) -> bool {
        let rings = lock(&self.rings);
        rings.get(index).is_some_and(|ring| ring.as_ref().is_some_and(RingWork::has_unfinished))
    }

    /// Returns the work of planning so far.
    pub fn plan_counters(&self) -> PlanCounters {
        self.plans
    }

    /// Returns the work of all rings so far.
    pub fn ring_counters(&self) -> RingCounters {
        let rings = lock(&self.rings);
        let of_devices = rings.iter().flatten().map(|ring| ring.counters);
        of_devices.fold(self.detached, std::ops::Add::add)
    }

    /// Enqueues transfers outside of layers, such as header pages: for each device a list. `blocks` is the number of
    /// blocks that they name, each with at least one transfer.
    ///
    /// # Errors
    /// `Invalid` for a device that does not exist; `Busy`.
    pub fn submit_transfers(
        &mut self,
        operation: Operation,
        lists: Vec<(usize, Vec<Planned>)>,
        blocks: usize,
        timeout: Duration,
    ) -> Result<LayerTicket, MoveError> {
        self.enqueue((operation, timeout, RequestOrder::Unordered), lists, blocks)
    }

    fn enqueue(
        &mut self,
        (operation, timeout, order): (Operation, Duration, RequestOrder<'_>),
        lists: Vec<(usize, Vec<Planned>)>,
        blocks: usize,
    ) -> Result<LayerTicket, MoveError> {
        let is_there = |(index, _): &(usize, _)| self.processors.get(*index).is_some_and(Option::is_some);
        if !lists.iter().all(is_there) {
            return Err(MoveError::Invalid("transfers of a device that the mover does not have".to_owned()));
        }
        let (mut transfers, mut bytes) = (vec![0; blocks], 0);
        for planned in lists.iter().flat_map(|(_, list)| list) {
            transfers[planned.block as usize] += 1;
            bytes += u64::from(planned.bytes);
        }
        // All blocks of a request have the same size.
        let block_bytes = bytes / blocks.max(1) as u64;
        let after = order.begin()?;
        let (ticket, progress) = self.requests.open(transfers, block_bytes, timeout)?;
        let ticket = self.requests.finish_order(ticket, order)?;
        let mut rings = lock(&self.rings);
        for (index, list) in lists {
            let Some(device) = &mut rings[index] else { continue };
            // All queue pairs get a part.
            let part = list.len().div_ceil(device.ring.queues()).clamp(1, CONTEXTS_MAX);
            for planned in list.chunks(part) {
                let (planned, after, progress) = (planned.to_vec(), after.clone(), Arc::clone(&progress));
                device.waiting.push(Batch { operation, planned, after, progress });
            }
        }
        advance(&mut rings);
        Ok(ticket)
    }
}

fn advance(rings: &mut [Option<RingWork>]) {
    rings.iter_mut().flatten().for_each(RingWork::advance);
}

/// Every change leaves a ring consistent, so a poisoned lock is ignored.
fn lock(rings: &Rings) -> MutexGuard<'_, Vec<Option<RingWork>>> {
    rings.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for RingMover<'_> {
    /// Stops all processors before any memory is released: a GPU releases memory only when it has nothing to do. Streams
    /// wait for commands in flight until the deadlines of their requests, because the mover cannot know of a deletion.
    fn drop(&mut self) {
        let rings = self.detach_all();
        self.requests.close();
        drop(rings);
    }
}

impl Backend for RingMover<'_> {
    fn kind(&self) -> BackendKind {
        BackendKind::GpuQueue
    }

    /// True if threads drive a ring, or a controller is emulated; also without any device, because no GPU runs then.
    fn is_emulated(&self) -> bool {
        let is_on_gpu = |processor: &Processor<'_>| matches!(processor, Processor::Gpu(_));
        let is_real = self.processors.iter().flatten().all(is_on_gpu)
            && lock(&self.rings).iter().flatten().all(|ring| !ring.limits.is_emulated);
        self.is_empty() || !is_real
    }

    fn transfer_backend(&self) -> TransferBackend {
        let has_emulated = lock(&self.rings).iter().flatten().any(|ring| ring.limits.is_emulated);
        match (self.is_emulated(), has_emulated) {
            (false, _) => TransferBackend::GpuQueue,
            (true, false) if !self.is_empty() => TransferBackend::GpuQueueHost,
            (true, _) => TransferBackend::GpuQueueEmulated,
        }
    }
}

impl LayerMover for RingMover<'_> {
    fn submit(&mut self, operation: Operation, request: &LayerRequest<'_>) -> Result<LayerTicket, MoveError> {
        let rings = lock(&self.rings);
        let Some(devices) = rings.iter().map(Option::as_ref).collect::<Option<Vec<_>>>() else {
            return Err(MoveError::Invalid("a device was detached and not replaced".to_owned()));
        };
        let sizes: Vec<_> = devices.iter().map(|device| Some(device.limits.bytes)).collect();
        check(&self.geometry, &sizes, request)?;
        let limits = devices.iter().map(|device| (&device.table, device.limits.transfer_max));
        let mut plans: Vec<DevicePlan<'_>> = limits
            .map(|(table, transfer_max)| DevicePlan { table, transfer_max, planned: Vec::new() })
            .collect();
        plan_layer((request.blocks, request.layer), &mut plans, &mut self.plans);
        let planned = plans.into_iter().map(|plan| plan.planned).enumerate();
        let lists = planned.filter(|(_, planned)| !planned.is_empty()).collect();
        drop(rings);
        self.enqueue((operation, request.timeout, request.order), lists, request.blocks.len())
    }

    fn delay_stream(&mut self, ticket: LayerTicket, stream: &EngineStream) -> Result<(), MoveError> {
        self.requests.delay(ticket, stream)
    }

    fn poll(&mut self, ticket: LayerTicket) -> Result<Option<LayerOutcome>, MoveError> {
        advance(&mut lock(&self.rings));
        self.requests.poll(ticket)
    }

    fn wait(&mut self, ticket: LayerTicket) -> Result<LayerOutcome, MoveError> {
        let mut pause = Backoff::start();
        loop {
            if let Some(outcome) = self.poll(ticket)? {
                return Ok(outcome);
            }
            pause.wait();
        }
    }

    fn given_up(&self) -> usize {
        let of_ring = |ring: &Ring| -> usize {
            let of_queue = |queue| ring.given_up(queue) as usize + usize::from(ring.is_broken(queue));
            (0..ring.queues()).map(of_queue).sum()
        };
        let of_rings: usize = lock(&self.rings).iter().flatten().map(|work| of_ring(&work.ring)).sum();
        self.requests.given_up() + of_rings
    }

    fn counters(&self) -> MoverCounters {
        self.requests.counters()
    }
}
