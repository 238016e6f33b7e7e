//! The thread of one device: owns its I/O engine, keeps the device busy, verifies the data that it reads.
//!
//! ```text
//!   core ── commands ──► queue (reads before writes) ──► engine ──► completed ──► verify ──► Fills, DeviceDone ──► core
//! ```
//!
//! Each pass receives commands, submits operations up to the limits, reaps completions (without waiting
//! while some are unprocessed) and processes at most [`PASS_BYTES`] of them. The device thus gets new work
//! before pieces are verified: 512 KiB take 26 µs at 20 GB/s of CRC32C, while 16 or more pieces are in
//! flight.
//!
//! Limits: the engine's maximum of operations, and [`IN_FLIGHT_BYTES_MAX`], but always
//! [`IN_FLIGHT_OPS_MIN`] operations. All reads of a class together are one item of the queue;
//! [`Reads`](super::reads::Reads) selects the next block.
//!
//! Every report wakes the core's thread, so progress of fills is collected for up to [`REPORT_DELAY_MAX`]
//! while the device has more to read. Completed operations are reported immediately, since the pool waits
//! for them.
//!
//! A lost device costs only its capacity: see `lost`. A device that rejects writes is still read.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError};
use reprise_agent_core::effect::{DeviceId, FillId, ReadBatch, ReadClass};
use reprise_agent_core::event::{FillError, FillUpdate};
use reprise_agent_core::pool::{DeviceError, DeviceOp, DeviceOpKind, OpToken};
use reprise_buffers::{Arena, PageBuffer, PageBufferPool, Span};
use reprise_io::{
    Completion, IoEngine, IoError, IoErrorKind, Op, OpClass, QueueSettings, ReadFirstQueue, Submission,
    Token, Wait, WriteFlow,
};
use reprise_policy::TenantId;
use reprise_policy::fair_order::Weights;
use reprise_policy::layout::PAGE_BYTES;

use super::encryption::{EncryptError, Encryptor, WriteForm, form_of};
use super::health::{Access, Health};
use super::reads::PieceName;
use super::{COMMANDS_MAX, Command};
use crate::core_loop::{Clock, DeviceReport, Inbox, Input};
use crate::encryption::EncryptionKeys;
use crate::metrics::{DeviceMetrics, QueueDepths};
use class_reads::{ReadsByClass, ReadsQueued};

/// Number of read classes.
const READ_CLASSES: usize = 2;

/// Maximum bytes in flight: the bandwidth-delay product of a device with 14 GB/s and 0.5 ms. More does not
/// increase throughput, but data leaves the CPU cache before it is verified and copied. For 128 MiB from a
/// device that delivers them in 41 ms, loads took 51 ms with 4 to 16 MiB and 64 ms with 32 MiB. A new load
/// waits at most 2 to 3 ms for the operations in flight.
const IN_FLIGHT_BYTES_MAX: u64 = 8 << 20;

/// Operations that may be in flight regardless of their size (a write is a whole block), to overlap
/// verification and latency.
const IN_FLIGHT_OPS_MIN: usize = 4;

/// Maximum time that a write waits behind reads; short compared to the write-back delay.
const WRITE_DELAY_MAX: Duration = Duration::from_millis(20);

/// Maximum duration of a wait, which usually ends with a completion or a command.
const IDLE_WAIT: Duration = Duration::from_secs(1);

/// Bytes of completions that are processed before new operations are submitted.
const PASS_BYTES: u64 = 512 << 10;

/// Maximum delay of a progress report to the core.
const REPORT_DELAY_MAX: Duration = Duration::from_micros(100);

/// Number of header page buffers: one for each operation of the deepest engine.
const PAGES_KEPT: usize = 1024;

/// Resources of a worker that do not depend on the device.
pub(super) struct WorkerContext {
    pub(super) device: DeviceId,
    pub(super) path: String,
    pub(super) commands: Receiver<Command>,
    pub(super) inbox: Inbox,
    pub(super) arena: Arc<Arena>,
    pub(super) keys: EncryptionKeys,
    /// Weights of tenants in shares of the device.
    pub(super) bandwidth: Weights<TenantId>,
    pub(super) clock: Clock,
    pub(super) metrics: DeviceMetrics,
    /// See [`DeviceInfo`](super::DeviceInfo).
    pub(super) sync_failed: Arc<AtomicBool>,
    /// See [`DeviceInfo`](super::DeviceInfo).
    pub(super) write_error: Arc<OnceLock<String>>,
    /// See [`DeviceInfo`](super::DeviceInfo).
    pub(super) media_errors: Arc<AtomicU32>,
}

/// State of the thread while the device works.
pub(super) struct Worker {
    context: WorkerContext,
    engine: Box<dyn IoEngine>,
    queue: ReadFirstQueue<Work>,
    reads: ReadsByClass,
    in_flight: Vec<Option<InFlight>>,
    free_tokens: Vec<usize>,
    in_flight_bytes: u64,
    /// Bytes of writes in the queue.
    write_bytes_queued: u64,
    pieces_in_flight: usize,
    completed: VecDeque<CompletedOp>,
    reaped: Vec<Completion>,
    report: DeviceReport,
    /// Time of the first unreported progress.
    progress_since: Option<Instant>,
    pages: PageBufferPool,
    encryptor: Encryptor,
    health: Health,
}

/// An item of the queue.
enum Work {
    /// The next piece of the batch of this class whose turn it is.
    Piece(ReadClass),
    Write {
        token: OpToken,
        /// `None` for pages of the journal.
        tenant: Option<TenantId>,
        offset: u64,
        pages: PageBuffer,
        /// Of a block, and how it is written.
        payload: Option<(Span, Box<WriteForm>)>,
    },
    Sync {
        token: OpToken,
    },
}

/// An operation of the engine.
struct InFlight {
    purpose: Purpose,
    bytes: u64,
    started: Instant,
}

enum Purpose {
    Piece { class: ReadClass, piece: PieceName, header: Option<PageBuffer> },
    Write { token: OpToken, pages: PageBuffer, encrypted: Option<PageBuffer> },
    Sync { token: OpToken },
}

struct CompletedOp {
    purpose: Purpose,
    bytes: u64,
    latency: Duration,
    result: Result<(), IoError>,
}

/// Whether the thread continues.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CommandState {
    Open,
    /// The device must be closed.
    Closed,
    /// Stopped, or the core has ended.
    Ended,
}

impl Work {
    /// Returns the bytes of a write.
    fn bytes(&self) -> u64 {
        match self {
            Work::Write { pages, payload, .. } => {
                (pages.len() + payload.as_ref().map_or(0, |(payload, _)| payload.len())) as u64
            }
            Work::Piece(_) | Work::Sync { .. } => 0,
        }
    }
}

impl WorkerContext {
    fn empty_report(&self) -> DeviceReport {
        DeviceReport { device: self.device, lost: None, done: Vec::new(), fills: Vec::new() }
    }

    /// Sends a report to the core unless it is empty.
    fn send(&self, report: &mut DeviceReport) {
        if report.lost.is_some() || !report.done.is_empty() || !report.fills.is_empty() {
            let report = std::mem::replace(report, self.empty_report());
            // Fails only if the core has stopped.
            let _ = self.inbox.send(Input::Device(report));
        }
    }
}

impl Worker {
    pub(super) fn new(context: WorkerContext, engine: Box<dyn IoEngine>) -> Worker {
        let capacity = engine.capacity();
        Worker {
            queue: ReadFirstQueue::new(QueueSettings {
                capacity: COMMANDS_MAX + READ_CLASSES,
                delay_max: WRITE_DELAY_MAX,
                weights: context.bandwidth.clone(),
            }),
            reads: ReadsByClass::new(&context.keys, &context.bandwidth),
            in_flight: (0..capacity).map(|_| None).collect(),
            free_tokens: (0..capacity).rev().collect(),
            in_flight_bytes: 0,
            write_bytes_queued: 0,
            pieces_in_flight: 0,
            completed: VecDeque::with_capacity(capacity),
            reaped: Vec::with_capacity(capacity),
            report: context.empty_report(),
            progress_since: None,
            pages: PageBufferPool::new(PAGES_KEPT.min(capacity)),
            encryptor: Encryptor::default(),
            health: Health::default(),
            context,
            engine,
        }
    }

    /// Runs until it is stopped, then completes the operations in flight; queued work is dropped.
    pub(super) fn run(mut self) {
        loop {
            match self.run_once() {
                Ok(CommandState::Open) => {}
                Ok(CommandState::Ended) => return,
                Ok(CommandState::Closed) => return self.into_lost(None).run(),
                Err(reason) => return self.into_lost(Some(reason)).run(),
            }
        }
    }

    /// Runs one pass; `Err` with the reason if the device is lost.
    fn run_once(&mut self) -> Result<CommandState, String> {
        match self.take_commands() {
            CommandState::Open => {}
            over => return Ok(over),
        }
        // Submit before processing completions: the device works while pieces are verified.
        self.submit();
        self.reap(self.wait()).map_err(|error| error.to_string())?;
        let mut bytes = 0;
        while bytes < PASS_BYTES
            && let Some(done) = self.completed.pop_front()
        {
            // Counts at least one byte, so that operations without data (syncs) also end the loop.
            bytes += done.bytes.max(1);
            self.finish(done)?;
        }
        self.send_report();
        Ok(CommandState::Open)
    }

    /// Returns how long to wait for the device or a command.
    fn wait(&self) -> Wait {
        match self.progress_since {
            _ if !self.completed.is_empty() => Wait::No,
            Some(since) => Wait::Until(REPORT_DELAY_MAX.saturating_sub(since.elapsed())),
            None => Wait::Until(IDLE_WAIT),
        }
    }

    fn take_commands(&mut self) -> CommandState {
        loop {
            match self.context.commands.try_recv() {
                Ok(Command::Op(op)) => self.queue_op(op),
                Ok(Command::Read(batch)) => self.queue_batch(&batch),
                Ok(Command::Promote(fills)) => self.promote(fills),
                Ok(Command::ReleaseRegion(region, released)) => {
                    self.engine.release_region(region);
                    drop(released);
                }
                Ok(Command::AddRegion(region)) => self.engine.add_region(&region),
                Ok(Command::Close) => return CommandState::Closed,
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return CommandState::Ended,
                Err(TryRecvError::Empty) => return CommandState::Open,
            }
        }
    }

    fn queue_batch(&mut self, batch: &ReadBatch) {
        if self.reads.add(&self.context.arena, batch).is_ok() {
            return self.queue_reads(batch.class);
        }
        tracing::error!(path = %self.context.path, blocks = batch.blocks.len(), "invalid batch of reads");
        let refused = FillUpdate::Failed(FillError::Refused);
        self.report.fills.extend(batch.blocks.iter().map(|block| (block.fill, refused.clone())));
        self.progress_since.get_or_insert_with(Instant::now);
    }

    /// Reads the remaining pieces of these fills with the rank of loads.
    fn promote(&mut self, fills: Vec<FillId>) {
        if self.reads.promote(&fills.into_iter().collect()) {
            self.queue_reads(ReadClass::Awaited);
        }
    }

    /// Queues the reads of a class unless they are queued.
    fn queue_reads(&mut self, class: ReadClass) {
        let queued = &mut self.reads.of(class).queued;
        if *queued == ReadsQueued::No {
            *queued = ReadsQueued::Yes;
            let rank = match class {
                ReadClass::Awaited => OpClass::Read,
                ReadClass::Prefetch => OpClass::Prefetch,
            };
            let pushed = self.queue.push(self.context.clock.now(), rank, Work::Piece(class));
            assert!(pushed.is_ok(), "one entry of the queue is reserved for each class of reads");
        }
    }

    fn queue_op(&mut self, op: DeviceOp) {
        let (token, tenant) = (op.token, op.kind.tenant());
        let work = match op.kind {
            DeviceOpKind::Sync => Work::Sync { token },
            DeviceOpKind::WritePages { offset, bytes } => match PageBuffer::new(bytes.len()) {
                Ok(mut pages) => {
                    pages.copy_from_slice(&bytes);
                    Work::Write { token, tenant, offset, pages, payload: None }
                }
                Err(error) => return self.refuse_op(token, &error.to_string()),
            },
            DeviceOpKind::WriteHeader { offset, header } => {
                if header.len() as u64 != PAGE_BYTES {
                    return self.refuse_op(token, "invalid size of a header");
                }
                if !matches!(form_of(&header, &self.context.keys), Ok(WriteForm::Plain)) {
                    return self.refuse_plaintext(token, &EncryptError::Plaintext);
                }
                let mut pages = self.pages.take();
                pages.copy_from_slice(&header);
                Work::Write { token, tenant, offset, pages, payload: None }
            }
            DeviceOpKind::WriteBlock { offset, header, slot, .. } => {
                match self.context.arena.span(slot.region.0, slot.offset, slot.bytes) {
                    Ok(payload) if header.len() as u64 == PAGE_BYTES => {
                        let mut pages = self.pages.take();
                        pages.copy_from_slice(&header);
                        let form = match form_of(&header, &self.context.keys) {
                            Ok(form) => form,
                            Err(error) => return self.refuse_plaintext(token, &error),
                        };
                        Work::Write { token, tenant, offset, pages, payload: Some((payload, Box::new(form))) }
                    }
                    _ => return self.refuse_op(token, "invalid size of a slot or header"),
                }
            }
        };
        // The last entries are reserved for the reads.
        if self.queue.len() >= COMMANDS_MAX {
            return self.refuse_op(token, "the device's queue is full");
        }
        let (now, bytes) = (self.context.clock.now(), work.bytes());
        let pushed = if matches!(work, Work::Sync { .. }) {
            self.queue.push(now, OpClass::Sync, work)
        } else {
            self.queue.push_write(now, WriteFlow { tenant, bytes }, work)
        };
        if pushed.is_err() {
            return self.refuse_op(token, "the device's queue is full");
        }
        self.write_bytes_queued += bytes;
    }

    /// Only a bug in the core leads here.
    fn refuse_op(&mut self, token: OpToken, reason: &str) {
        tracing::error!(path = %self.context.path, reason, "rejected a device operation");
        self.report.done.push((token, Err(DeviceError::Refused)));
        self.progress_since.get_or_insert_with(Instant::now);
    }

    /// The tenant's keys were removed meanwhile, or a peer offered blocks of a layout that cannot be encrypted.
    fn refuse_plaintext(&mut self, token: OpToken, error: &EncryptError) {
        tracing::warn!(path = %self.context.path, %error, "did not write a block, because it cannot be encrypted");
        self.report.done.push((token, Err(DeviceError::Refused)));
        self.progress_since.get_or_insert_with(Instant::now);
    }

    fn may_submit(&self) -> bool {
        let ops = self.in_flight.len() - self.free_tokens.len();
        !self.free_tokens.is_empty()
            && (ops < IN_FLIGHT_OPS_MIN || self.in_flight_bytes < IN_FLIGHT_BYTES_MAX)
    }

    fn submit(&mut self) {
        while self.may_submit() {
            let now = self.context.clock.now();
            let Some(work) = self.queue.pop(now, |tenant| self.reads.may_precede(tenant)) else { break };
            self.write_bytes_queued -= work.bytes();
            let (purpose, op) = match work {
                Work::Sync { token } => (Purpose::Sync { token }, Op::Sync),
                Work::Write { token, tenant, offset, mut pages, payload } => {
                    let written = match payload {
                        None => Ok((None, None)),
                        Some((payload, form)) => match *form {
                            WriteForm::Plain => Ok((None, Some(payload))),
                            WriteForm::Encrypted { layout, key } => {
                                let encrypted = self.encryptor.encrypt(&mut pages, &payload, (&layout, &key));
                                encrypted.map(|mut buffer| {
                                    let span = buffer.span();
                                    (Some(buffer), Some(span))
                                })
                            }
                        },
                    };
                    let (encrypted, payload) = match written {
                        Ok(written) => written,
                        Err(error) => {
                            self.refuse_plaintext(token, &error);
                            continue;
                        }
                    };
                    let from = std::iter::once(pages.span()).chain(payload).collect();
                    let op = Op::Write { offset, from };
                    if let Some(tenant) = tenant {
                        self.reads.charge_write(tenant, op.bytes());
                    }
                    (Purpose::Write { token, pages, encrypted }, op)
                }
                Work::Piece(class) => {
                    self.reads.of(class).queued = ReadsQueued::No;
                    let Some((home, read)) = self.reads.next(class, &self.pages) else { continue };
                    // The next piece is queued again behind writes that are due, so reads cannot starve
                    // them.
                    self.queue_reads(class);
                    self.pieces_in_flight += 1;
                    let op = Op::Read { offset: read.offset, into: read.into };
                    (Purpose::Piece { class: home, piece: read.piece, header: read.header }, op)
                }
            };
            self.start(purpose, op);
        }
        let reads = self.reads.pending();
        self.context.metrics.queue(&QueueDepths {
            reads: reads.pieces,
            read_bytes: reads.bytes,
            writes: (self.queue.count(OpClass::Write) + self.queue.count(OpClass::Sync)) as u64,
            write_bytes: self.write_bytes_queued,
            in_flight: (self.in_flight.len() - self.free_tokens.len()) as u64,
        });
    }

    fn start(&mut self, purpose: Purpose, op: Op) {
        let token = self.free_tokens.pop().expect("may_submit saw a free token");
        let bytes = op.bytes();
        self.in_flight_bytes += bytes;
        self.in_flight[token] = Some(InFlight { purpose, bytes, started: Instant::now() });
        let submission = Submission { token: Token(token as u64), op };
        self.engine.submit(submission).expect("there are as many tokens as the engine accepts operations");
    }

    fn reap(&mut self, wait: Wait) -> Result<(), IoError> {
        // The buffer is moved out and back, so that completions can be matched while it is drained.
        let mut reaped = std::mem::take(&mut self.reaped);
        let outcome = self.engine.reap(wait, &mut reaped);
        for completion in reaped.drain(..) {
            let token = usize::try_from(completion.token.0).expect("tokens are indices");
            let InFlight { purpose, bytes, started } =
                self.in_flight[token].take().expect("each operation completes once");
            self.free_tokens.push(token);
            self.in_flight_bytes -= bytes;
            if matches!(purpose, Purpose::Piece { .. }) {
                self.pieces_in_flight -= 1;
            }
            // Releases the spans, so that header pages can be read.
            drop(completion.op);
            let latency = started.elapsed();
            self.completed.push_back(CompletedOp { purpose, bytes, latency, result: completion.result });
        }
        self.reaped = reaped;
        outcome
    }

    /// Handles a completed operation; `Err` with the reason if the device is lost.
    fn finish(&mut self, done: CompletedOp) -> Result<(), String> {
        let CompletedOp { purpose, bytes, latency, result } = done;
        let error = match &result {
            Ok(()) => None,
            Err(error) => {
                if error.kind() == IoErrorKind::Media {
                    self.context.media_errors.fetch_add(1, Ordering::Relaxed);
                }
                let access = match &purpose {
                    Purpose::Piece { .. } => Access::Read,
                    Purpose::Write { .. } => Access::Write,
                    Purpose::Sync { .. } => Access::Sync,
                };
                let judged = self.health.judge(access, error, &self.context.path);
                if judged == DeviceError::Unwritable {
                    self.context.write_error.get_or_init(|| reason_of_stop(error));
                }
                Some(judged)
            }
        };
        match purpose {
            Purpose::Piece { class, piece, mut header } => {
                self.context.metrics.read(bytes, latency);
                let outcome = error.map_or(Ok(()), |error| Err(read_error(error)));
                self.reads.of(class).reads.finish(piece, outcome, header.as_mut());
                self.progress_since.get_or_insert_with(Instant::now);
                if let Some(header) = header {
                    self.pages.put(header);
                }
            }
            Purpose::Write { token, pages, encrypted } => {
                self.context.metrics.write(bytes, latency);
                self.pages.put(pages);
                if let Some(buffer) = encrypted {
                    self.encryptor.put(buffer);
                }
                self.report.done.push((token, error.map_or(Ok(()), Err)));
            }
            Purpose::Sync { token } => {
                self.context.metrics.sync(latency);
                // After a failed sync the state of written data is unknown: fsync(2), and the PostgreSQL
                // reports of 2018.
                let outcome = if error.is_none() { Ok(()) } else { Err(DeviceError::Lost) };
                self.context.sync_failed.fetch_or(outcome.is_err(), Ordering::AcqRel);
                self.report.done.push((token, outcome));
            }
        }
        match (error, result) {
            (Some(DeviceError::Lost), Err(error)) => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    /// Sends the collected report, unless it can wait for more progress.
    fn send_report(&mut self) {
        let may_wait = self.report.done.is_empty()
            && (self.pieces_in_flight > 0 || !self.completed.is_empty())
            && self.progress_since.is_none_or(|since| since.elapsed() < REPORT_DELAY_MAX);
        if !may_wait {
            self.progress_since = None;
            self.reads.take_updates(&mut self.report.fills);
            self.context.send(&mut self.report);
        }
    }
}

/// Returns the reason why writing has ended, with the remedy.
fn reason_of_stop(error: &IoError) -> String {
    match error.kind() {
        IoErrorKind::NoSpace => format!("{error}: free space on the file system that holds the pool"),
        IoErrorKind::ReadOnly => format!("{error}: make the file system or the device writable"),
        _ => format!("{error}: check the device"),
    }
}

/// Converts the error of a failed read for its blocks.
pub(crate) fn read_error(error: DeviceError) -> FillError {
    match error {
        DeviceError::Media | DeviceError::Unwritable | DeviceError::Lost => FillError::Device,
        DeviceError::Refused => FillError::Refused,
    }
}

mod class_reads;
mod lost;
#[cfg(test)]
mod power_loss;
#[cfg(test)]
mod test_bench;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod user_nvme;
#[cfg(test)]
mod write_errors;
