//! The I/O engine on a controller: operations become commands of one queue pair.
//!
//! An operation is divided into parts: contiguous blocks, at most as large as the controller accepts. Memory of
//! registered arena regions is described to the controller; other memory (pages of headers and journals) passes
//! through a buffer of the engine.
//!
//! A command that exceeds its deadline is aborted. If it has not ended after another deadline, the engine is lost: it
//! resets the controller when it is closed. After that, the controller no longer accesses memory.
//!
//! There are no interrupts. A waiting [`reap`](IoEngine::reap) looks for completions without a pause at first, and then
//! in short sleeps.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_buffers::{Region, Span};
use reprise_io::{
    Bounds, CloseOutcome, Completion, Doorbell, EngineKind, IO_ALIGN, IoEngine, IoError, IoErrorKind, Op,
    Submission, Wait, Waker,
};

use crate::backing::{Backing, DmaMapping, DmaMemory};
use crate::controller::{Controller, Namespace};
use crate::data::{DataFormat, Piece};
use crate::error::NvmeError;
use crate::queue::{CommandId, Ended, QueuePair};
use crate::shared::{OpenController, SharedController};
use crate::spec::{Command, FLUSH, READ, Status, WRITE};

/// Pages of the buffer for memory that is not registered.
const BOUNCE_PAGES: usize = 256;
/// Time for which a waiting reap looks for completions without a sleep: twice the usual wait, within these limits. A
/// device that takes longer gets the shorter time.
const SPIN: Duration = Duration::from_micros(100);
const SPIN_MAX: Duration = Duration::from_micros(500);
/// Length of a sleep while commands are in flight.
const NAP: Duration = Duration::from_micros(50);
/// Time between two searches for overdue commands.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// An operation that has not ended.
#[derive(Debug)]
struct Operation {
    submission: Submission,
    /// Bytes that parts have covered.
    covered: u64,
    /// Span of the next part, and offset in it.
    span: usize,
    at: usize,
    /// Parts in flight.
    running: u32,
    error: Option<IoError>,
}

/// A command in flight.
#[derive(Debug)]
struct Part {
    operation: u64,
    id: CommandId,
    /// Pages of the buffer that the command uses, with the memory that they stand for.
    bounced: Vec<(usize, Span)>,
    /// Time until which an aborted command must end.
    aborted_until: Option<Instant>,
}

/// The engine; see the module.
pub struct NvmeEngine<B: Backing> {
    /// Disabled before queue and memory are dropped: see [`NvmeEngine::end`].
    controller: Arc<SharedController<B>>,
    queue: QueuePair<B>,
    bounce: B::Memory,
    free_pages: Vec<usize>,
    namespace: Namespace,
    bounds: Bounds,
    regions: BTreeMap<u16, (Arc<Region>, DmaMapping)>,
    capacity: usize,
    command_timeout: Duration,
    operations: BTreeMap<u64, Operation>,
    /// Operations with bytes that no part has covered, oldest first.
    waiting: VecDeque<u64>,
    parts: BTreeMap<u64, Part>,
    numbers: u64,
    ended: Vec<Completion>,
    checked: Instant,
    /// Moving average of the waits that ended with a completion.
    usual_wait: Duration,
    bell: Doorbell,
    /// Why the engine no longer works.
    lost: Option<String>,
    is_closed: bool,
}

impl<B: Backing> std::fmt::Debug for NvmeEngine<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NvmeEngine")
            .field("controller", &self.controller)
            .field("namespace", &self.namespace)
            .field("operations", &self.operations.len())
            .finish_non_exhaustive()
    }
}

impl<B: Backing> NvmeEngine<B> {
    pub(crate) fn new(
        mut controller: Controller<B>,
        namespace: Namespace,
        bounds: Bounds,
        entries: u32,
        command_timeout: Duration,
    ) -> Result<NvmeEngine<B>, NvmeError> {
        let queue = controller.create_queue_pair(entries)?;
        let bounce = controller.backing().allocate(BOUNCE_PAGES * IO_ALIGN)?;
        let controller = Arc::new(SharedController::new(controller));
        let bell = Doorbell::new().map_err(|error| NvmeError::Invalid(error.to_string()))?;
        Ok(NvmeEngine {
            controller,
            queue,
            bounce,
            free_pages: (0..BOUNCE_PAGES).rev().collect(),
            namespace,
            bounds,
            regions: BTreeMap::new(),
            capacity: 1,
            command_timeout,
            operations: BTreeMap::new(),
            waiting: VecDeque::new(),
            parts: BTreeMap::new(),
            numbers: 0,
            ended: Vec::new(),
            checked: Instant::now(),
            usual_wait: Duration::ZERO,
            bell,
            lost: None,
            is_closed: false,
        })
    }

    /// Sets the number of operations in flight, and maps arena regions.
    pub(crate) fn configure(&mut self, capacity: usize, regions: &[Arc<Region>]) -> Result<(), NvmeError> {
        self.capacity = capacity;
        for region in regions {
            let mapping = self.controller.backing().map_region(region)?;
            self.regions.insert(region.id(), (Arc::clone(region), mapping));
        }
        Ok(())
    }

    pub(crate) fn controller(&self) -> &Arc<SharedController<B>> {
        &self.controller
    }

    pub(crate) fn namespace(&self) -> Namespace {
        self.namespace
    }

    /// Runs a command without data while nothing else is in flight.
    pub(crate) fn run(&mut self, command: &Command) -> Result<(), IoError> {
        let deadline = Instant::now() + self.command_timeout;
        let mut ended = Vec::new();
        let submitted = self.queue.submit(command, 0, deadline);
        submitted.map_err(|error| self.lose(&error))?;
        self.queue.ring();
        while ended.is_empty() {
            self.queue.poll(&mut ended).map_err(|error| self.lose(&error))?;
            if Instant::now() >= deadline {
                let late = NvmeError::Timeout { what: "a command", limit: self.command_timeout };
                return Err(self.lose(&late));
            }
            std::thread::sleep(NAP);
        }
        check(command.opcode, ended[0].status)
    }

    /// Notes that the engine no longer works.
    fn lose(&mut self, error: &NvmeError) -> IoError {
        let text = error.to_string();
        let error = IoError::new(IoErrorKind::Lost, text.clone());
        self.lost.get_or_insert(text);
        error
    }

    /// Submits parts while there is room, takes completions, and searches for overdue commands now and then.
    fn progress(&mut self) -> Result<(), IoError> {
        if let Some(text) = &self.lost {
            return Err(IoError::new(IoErrorKind::Lost, text.clone()));
        }
        let result = self.try_progress();
        result.map_err(|error| self.lose(&error))
    }

    fn try_progress(&mut self) -> Result<(), NvmeError> {
        let mut ended = Vec::new();
        self.submit_parts()?;
        self.queue.poll(&mut ended)?;
        if !ended.is_empty() {
            ended.into_iter().for_each(|one| self.end_part(one));
            self.submit_parts()?;
        }
        let now = Instant::now();
        if now.duration_since(self.checked) >= CHECK_EVERY {
            self.checked = now;
            self.check_deadlines(now)?;
        }
        Ok(())
    }

    fn submit_parts(&mut self) -> Result<(), NvmeError> {
        while let Some(&number) = self.waiting.front() {
            if !self.submit_part(number)? {
                break;
            }
            let whole = self.operations.get(&number).is_none_or(is_covered);
            if whole {
                self.waiting.pop_front();
                self.end_operation_if_over(number);
            }
        }
        self.queue.ring();
        Ok(())
    }

    /// Submits the next part of an operation; false if there is no room for it.
    fn submit_part(&mut self, number: u64) -> Result<bool, NvmeError> {
        if self.queue.free() == 0 {
            return Ok(false);
        }
        let Some(operation) = self.operations.get_mut(&number) else { return Ok(true) };
        // After an error, the rest of the operation moves no bytes.
        if operation.error.is_some() {
            operation.covered = operation.submission.op.bytes();
            return Ok(true);
        }
        let (opcode, write) = match operation.submission.op {
            Op::Sync => (None, false),
            Op::Read { .. } => (Some(READ), false),
            Op::Write { .. } => (Some(WRITE), true),
        };
        let mut bounced = Vec::new();
        let command = if let Some(opcode) = opcode {
            let max = self.controller.transfer_max();
            let mapping = Mapping { regions: &self.regions, bounce: self.bounce.address() };
            let start = operation.submission.op.offset() + operation.covered;
            let pieces = take_pieces(operation, max, &mapping, &mut self.free_pages, &mut bounced);
            let bytes: u64 = pieces.iter().map(|piece| piece.bytes).sum();
            if bytes == 0 {
                return Ok(false);
            }
            if write {
                bounced.iter().for_each(|(page, span)| store_page(&self.bounce, *page, span));
            }
            let data = self.controller.data_format().describe(&self.queue, &pieces)?;
            let block = u64::from(self.namespace.block_bytes);
            let blocks = (bytes / block) as u32;
            Command::transfer(opcode, self.namespace.id, start / block, blocks).with_data(data)
        } else {
            operation.covered = u64::MAX;
            Command::flush(self.namespace.id)
        };
        operation.running += 1;
        self.numbers += 1;
        let id = self.queue.submit(&command, self.numbers, Instant::now() + self.command_timeout)?;
        self.parts.insert(self.numbers, Part { operation: number, id, bounced, aborted_until: None });
        Ok(true)
    }

    fn end_part(&mut self, ended: Ended) {
        let part = self.parts.remove(&ended.token).expect("the queue reports each command once");
        let operation = self.operations.get_mut(&part.operation).expect("it has a part in flight");
        operation.running -= 1;
        let opcode = match operation.submission.op {
            Op::Read { .. } => READ,
            Op::Write { .. } => WRITE,
            Op::Sync => FLUSH,
        };
        match check(opcode, ended.status) {
            Ok(()) if opcode == READ => {
                part.bounced.iter().for_each(|(page, span)| load_page(&self.bounce, *page, span));
            }
            Ok(()) => {}
            Err(error) => {
                operation.error.get_or_insert(error);
            }
        }
        self.free_pages.extend(part.bounced.into_iter().map(|(page, _)| page));
        self.end_operation_if_over(part.operation);
    }

    fn end_operation_if_over(&mut self, number: u64) {
        let over = |operation: &Operation| {
            operation.running == 0 && (is_covered(operation) || operation.error.is_some())
        };
        if !self.operations.get(&number).is_some_and(over) {
            return;
        }
        let operation = self.operations.remove(&number).expect("it was just found");
        // Operations that parts cover were removed when their last part was submitted.
        if !is_covered(&operation) {
            self.waiting.retain(|waiting| *waiting != number);
        }
        let Submission { token, op } = operation.submission;
        self.ended.push(Completion { token, op, result: operation.error.map_or(Ok(()), Err) });
    }

    /// Checks the controller, and aborts overdue commands, once each. A command that an abort does not end loses the engine.
    fn check_deadlines(&mut self, now: Instant) -> Result<(), NvmeError> {
        self.controller.check_alive()?;
        let overdue = self.queue.overdue(now);
        if overdue.is_empty() {
            return Ok(());
        }
        let (queue, limit) = (self.queue.id(), self.command_timeout);
        let hopeless =
            now.checked_sub(3 * limit).map(|earlier| self.queue.overdue(earlier)).unwrap_or_default();
        for part in self.parts.values_mut().filter(|part| overdue.contains(&part.id)) {
            match part.aborted_until {
                // The others are aborted by a later check, also while another user has the admin queue.
                None => {
                    let requested = self.controller.try_with(|one| one.request_abort(queue, part.id))?;
                    match requested {
                        Some(true) => part.aborted_until = Some(now + limit),
                        // The controller takes no further aborts, because it has not ended the earlier ones.
                        Some(false) if hopeless.contains(&part.id) => {
                            let what = "a command that cannot be aborted";
                            return Err(NvmeError::Timeout { what, limit: 3 * limit });
                        }
                        Some(false) | None => {}
                    }
                }
                Some(until) if until <= now => {
                    return Err(NvmeError::Timeout { what: "an aborted command", limit });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn take(&mut self, out: &mut Vec<Completion>) -> bool {
        let any = !self.ended.is_empty();
        out.append(&mut self.ended);
        any
    }

    /// Lets all accepted operations end, and shuts the controller down.
    fn end(&mut self) -> CloseOutcome {
        self.is_closed = true;
        while !self.operations.is_empty() && self.progress().is_ok() {
            std::thread::yield_now();
        }
        if self.lost.is_none() {
            if let Err(error) = self.controller.shut_down() {
                tracing::warn!(%error, "the NVMe controller was not shut down");
            }
            return CloseOutcome::Drained;
        }
        // A controller that was disabled has forgotten its commands, also those that did not end.
        if self.controller.disable().is_ok() {
            return CloseOutcome::Drained;
        }
        std::mem::forget(std::mem::take(&mut self.operations));
        std::mem::forget(std::mem::take(&mut self.parts));
        CloseOutcome::Leaked
    }
}

impl<B: Backing> IoEngine for NvmeEngine<B> {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.operations.len() + self.ended.len()
    }

    fn submit(&mut self, submission: Submission) -> Result<(), Submission> {
        if self.in_flight() >= self.capacity {
            return Err(submission);
        }
        if let Err(error) = self.bounds.check(&submission.op) {
            let Submission { token, op } = submission;
            self.ended.push(Completion { token, op, result: Err(error) });
            return Ok(());
        }
        self.numbers += 1;
        let operation = Operation { submission, covered: 0, span: 0, at: 0, running: 0, error: None };
        self.operations.insert(self.numbers, operation);
        self.waiting.push_back(self.numbers);
        Ok(())
    }

    fn reap(&mut self, wait: Wait, out: &mut Vec<Completion>) -> Result<(), IoError> {
        let start = Instant::now();
        let spin = self.usual_wait * 2;
        let spin = if spin <= SPIN_MAX { spin.max(SPIN) } else { SPIN };
        loop {
            let rung = wait != Wait::No && self.bell.answer();
            self.progress()?;
            let Wait::Until(limit) = wait else {
                self.take(out);
                return Ok(());
            };
            let elapsed = start.elapsed();
            if self.take(out) {
                self.usual_wait = (self.usual_wait * 7 + elapsed) / 8;
                // Commands that end meanwhile: the caller then submits more at once, for one doorbell. An error is
                // reported by the next reap.
                while self.progress().is_ok() && self.take(out) {}
                return Ok(());
            }
            if rung || elapsed >= limit {
                return Ok(());
            }
            match (self.operations.is_empty(), elapsed < spin) {
                (true, _) => self.bell.sleep(limit - elapsed),
                (false, true) => std::thread::yield_now(),
                (false, false) => self.bell.sleep(NAP.min(limit - elapsed)),
            }
        }
    }

    fn release_region(&mut self, region: u16) {
        self.regions.remove(&region);
    }

    fn add_region(&mut self, region: &Arc<Region>) {
        let is_known = self.regions.get(&region.id()).is_some_and(|(known, _)| Arc::ptr_eq(known, region));
        if is_known {
            return;
        }
        self.regions.remove(&region.id());
        match self.controller.backing().map_region(region) {
            Ok(mapping) => drop(self.regions.insert(region.id(), (Arc::clone(region), mapping))),
            Err(error) => {
                tracing::warn!(
                    region = region.id(),
                    %error,
                    "cannot map a region for the controller, its data passes through a buffer"
                );
            }
        }
    }

    fn waker(&self) -> Waker {
        self.bell.waker()
    }

    fn close(mut self: Box<Self>) -> CloseOutcome {
        self.end()
    }

    fn kind(&self) -> EngineKind {
        EngineKind::UserNvme
    }
}

impl<B: Backing> Drop for NvmeEngine<B> {
    fn drop(&mut self) {
        if !self.is_closed {
            // Memory that the controller may still access was leaked.
            let _ = self.end();
        }
    }
}

fn is_covered(operation: &Operation) -> bool {
    match operation.submission.op {
        Op::Sync => operation.covered > 0,
        Op::Read { .. } | Op::Write { .. } => operation.covered >= operation.submission.op.bytes(),
    }
}

/// Where memory lies for the controller.
struct Mapping<'a> {
    regions: &'a BTreeMap<u16, (Arc<Region>, DmaMapping)>,
    bounce: u64,
}

impl Mapping<'_> {
    /// Returns the address of a span of a registered region.
    fn address(&self, span: &Span) -> Option<u64> {
        let (region, mapping) = self.regions.get(&span.region_id()?)?;
        // A region of another arena may have the same number.
        let at = span.as_ptr().addr().checked_sub(region.as_ptr().addr())? as u64;
        (at + span.len() as u64 <= region.bytes()).then_some(mapping.address() + at)
    }
}

/// Takes the pieces of the next part of an operation; none if memory must pass through the buffer and it is full.
fn take_pieces(
    operation: &mut Operation,
    max: u64,
    mapping: &Mapping<'_>,
    free_pages: &mut Vec<usize>,
    bounced: &mut Vec<(usize, Span)>,
) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut total = 0;
    let spans = operation.submission.op.spans();
    while total < max && pieces.len() < DataFormat::PIECES_MAX {
        let Some(span) = spans.get(operation.span) else { break };
        let left = (span.len() - operation.at) as u64;
        let piece = match mapping.address(span) {
            Some(address) => Piece { address: address + operation.at as u64, bytes: left.min(max - total) },
            None => {
                let Some(page) = free_pages.pop() else { break };
                let part = span.slice(operation.at, IO_ALIGN).expect("spans are whole pages");
                bounced.push((page, part));
                Piece { address: mapping.bounce + (page * IO_ALIGN) as u64, bytes: IO_ALIGN as u64 }
            }
        };
        total += piece.bytes;
        operation.at += piece.bytes as usize;
        pieces.push(piece);
        if operation.at == span.len() {
            (operation.span, operation.at) = (operation.span + 1, 0);
        }
    }
    operation.covered += total;
    pieces
}

/// Copies a page of memory to the buffer.
fn store_page(bounce: &impl DmaMemory, page: usize, from: &Span) {
    let mut copy = [0; IO_ALIGN];
    from.copy_out(&mut copy);
    for (index, bytes) in copy.chunks_exact(8).enumerate() {
        let word = crate::spec::le!(bytes, 0, u64).to_le();
        bounce.word(page * IO_ALIGN + 8 * index).store(word, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Copies a page of the buffer to memory.
fn load_page(bounce: &impl DmaMemory, page: usize, into: &Span) {
    let mut copy = [0; IO_ALIGN];
    for (index, bytes) in copy.chunks_exact_mut(8).enumerate() {
        let word = bounce.word(page * IO_ALIGN + 8 * index).load(std::sync::atomic::Ordering::Relaxed);
        bytes.copy_from_slice(&u64::from_le(word).to_le_bytes());
    }
    into.copy_in(&copy).expect("the destination of a read is writable and a page long");
}

/// Classifies the status of a command, as the kernel's block layer does for its own driver.
fn check(opcode: u8, status: Status) -> Result<(), IoError> {
    if status.is_success() {
        return Ok(());
    }
    let (what, sync) = match opcode {
        READ => ("reading", false),
        WRITE => ("writing", false),
        FLUSH => ("flushing", true),
        _ => ("erasing", false),
    };
    let kind = match status.code() {
        // After a failed flush it is unknown which writes are durable.
        _ if sync => IoErrorKind::Lost,
        Status::WRITE_PROTECTED => IoErrorKind::ReadOnly,
        Status::CAPACITY => IoErrorKind::NoSpace,
        // The range was inside when the device was opened.
        Status::OUT_OF_RANGE => IoErrorKind::ShortTransfer,
        Status::INVALID_NAMESPACE | Status::INVALID_OPCODE => IoErrorKind::Lost,
        // Also a command that was aborted after its deadline, as in the kernel: many of them lose the device.
        _ => IoErrorKind::Media,
    };
    Err(IoError::new(kind, format!("{what} over NVMe: {status}")))
}
