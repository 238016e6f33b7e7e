//! The thread of one device: owns its I/O engine, keeps the device busy, verifies what it reads.
//!
//! ```text
//!   core ── commands ──► queue (reads before writes) ──► engine ──► completed ──► verify ──► Fills, DeviceDone ──► core
//! ```
//!
//! One turn of the loop takes commands, submits up to the limits, reaps without waiting while completions are still
//! unprocessed, and processes completions of at most [`TURN_BYTES`]. So the device gets its next work before pieces
//! are verified: 512 KiB take 26 µs at 20 GB/s of CRC32C, while 16 or more pieces are under way.
//!
//! Limits: as many operations as the engine takes, and [`IN_FLIGHT_BYTES_MAX`], but always [`IN_FLIGHT_OPS_MIN`].
//! In the queue all reads together are one item; [`Reads`] says which block is next.
//!
//! Every report wakes the core's thread, so progress of fills is gathered for [`NEWS_DELAY_MAX`] while the device has
//! more to read. Ends of operations are reported at once: the pool's next step waits for them.
//!
//! A device that is lost loses capacity only: see `lost`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError};
use reprise_agent_core::effect::{DeviceId, ReadBatch};
use reprise_agent_core::event::{FillError, FillUpdate};
use reprise_agent_core::pool::{DeviceError, DeviceOp, DeviceOpKind, OpToken};
use reprise_buffers::{Arena, PageBuffer, PageBufferPool, Span};
use reprise_io::{
    Completion, IoEngine, IoError, IoErrorKind, Op, OpClass, QueueSettings, ReadFirstQueue, Submission,
    Token, Wait,
};
use reprise_policy::layout::PAGE_BYTES;

use super::health::Health;
use super::reads::{PieceName, Reads};
use super::{COMMANDS_MAX, Command};
use crate::core_loop::{Clock, DeviceReport, Inbox, Input};
use crate::metrics::{DeviceMetrics, Queued};

/// Bytes under way: what a device of 14 GB/s gives in its latency of half a millisecond. More keeps none busier, and what has come is out
/// of the processor's cache before it is verified and copied: 128 MiB took 51 ms with 4 to 16 MiB and 64 ms with 32 MiB, from a device
/// that gives them in 41. A new load waits the 2 to 3 ms that they take before its first piece.
const IN_FLIGHT_BYTES_MAX: u64 = 8 << 20;

/// Operations that are always allowed under way, however large (a write is a whole block): enough to hide verification and latency.
const IN_FLIGHT_OPS_MIN: usize = 4;

/// How long a write may stand behind reads; small beside the write-back delay that it adds to.
const WRITE_DELAY_MAX: Duration = Duration::from_millis(20);

/// A wait ends at the latest after this; it usually ends with a completion or a command.
const IDLE_WAIT: Duration = Duration::from_secs(1);

/// Bytes of completions that are processed before the device gets new work.
const TURN_BYTES: u64 = 512 << 10;

/// How old the progress of a fill may be when the core learns of it.
const NEWS_DELAY_MAX: Duration = Duration::from_micros(100);

/// Header pages kept for reuse: one for each operation of the deepest engine.
const PAGES_KEPT: usize = 1024;

/// What a worker has around it, with or without a device.
pub(super) struct Surroundings {
    pub(super) device: DeviceId,
    pub(super) path: String,
    pub(super) commands: Receiver<Command>,
    pub(super) inbox: Inbox,
    pub(super) arena: Arc<Arena>,
    pub(super) clock: Clock,
    pub(super) metrics: DeviceMetrics,
    /// See [`DeviceInfo`](super::DeviceInfo).
    pub(super) sync_failed: Arc<AtomicBool>,
    /// See [`DeviceInfo`](super::DeviceInfo).
    pub(super) media_errors: Arc<AtomicU32>,
}

/// The thread's state while the device works.
pub(super) struct Worker {
    around: Surroundings,
    engine: Box<dyn IoEngine>,
    queue: ReadFirstQueue<Work>,
    reads: Reads,
    in_flight: Vec<Option<InFlight>>,
    free_tokens: Vec<usize>,
    in_flight_bytes: u64,
    /// Of writes that wait in the queue.
    write_bytes_queued: u64,
    reads_in_queue: InQueue,
    pieces_in_flight: usize,
    completed: VecDeque<Done>,
    reaped: Vec<Completion>,
    report: DeviceReport,
    /// Since when there is progress of fills that the core does not know.
    news_since: Option<Instant>,
    pages: PageBufferPool,
    health: Health,
}

/// Something to do, in the queue.
enum Work {
    /// The next piece of whichever batch has its turn.
    Piece,
    Write {
        token: OpToken,
        offset: u64,
        from: Vec<Span>,
        pages: PageBuffer,
    },
    Sync {
        token: OpToken,
    },
}

/// What an operation of the engine is for.
struct InFlight {
    purpose: Purpose,
    bytes: u64,
    started: Instant,
}

enum Purpose {
    Piece { piece: PieceName, header: Option<PageBuffer> },
    Write { token: OpToken, pages: PageBuffer },
    Sync { token: OpToken },
}

/// An operation that has ended.
struct Done {
    purpose: Purpose,
    bytes: u64,
    latency: Duration,
    result: Result<(), IoError>,
}

/// Whether [`Work::Piece`] stands in the queue; it never does twice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InQueue {
    Yes,
    No,
}

/// Whether the thread goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Commands {
    Open,
    /// Nobody wants the device any more.
    Closed,
    /// Stopped, or the core is gone.
    Ended,
}

impl Work {
    /// Bytes of a write.
    fn bytes(&self) -> u64 {
        match self {
            Work::Write { from, .. } => from.iter().map(|span| span.len() as u64).sum(),
            Work::Piece | Work::Sync { .. } => 0,
        }
    }
}

impl Surroundings {
    fn empty_report(&self) -> DeviceReport {
        DeviceReport { device: self.device, lost: None, done: Vec::new(), fills: Vec::new() }
    }

    /// Hands a report to the core, if there is anything in it.
    fn send(&self, report: &mut DeviceReport) {
        if report.lost.is_some() || !report.done.is_empty() || !report.fills.is_empty() {
            let report = std::mem::replace(report, self.empty_report());
            // The core may have stopped; then nobody wants to know.
            let _ = self.inbox.send(Input::Device(report));
        }
    }
}

impl Worker {
    pub(super) fn new(around: Surroundings, engine: Box<dyn IoEngine>) -> Worker {
        let capacity = engine.capacity();
        Worker {
            queue: ReadFirstQueue::new(QueueSettings {
                capacity: COMMANDS_MAX + 1,
                delay_max: WRITE_DELAY_MAX,
            }),
            reads: Reads::default(),
            in_flight: (0..capacity).map(|_| None).collect(),
            free_tokens: (0..capacity).rev().collect(),
            in_flight_bytes: 0,
            write_bytes_queued: 0,
            reads_in_queue: InQueue::No,
            pieces_in_flight: 0,
            completed: VecDeque::with_capacity(capacity),
            reaped: Vec::with_capacity(capacity),
            report: around.empty_report(),
            news_since: None,
            pages: PageBufferPool::new(PAGES_KEPT.min(capacity)),
            health: Health::default(),
            around,
            engine,
        }
    }

    /// Runs until told to stop, then ends what is under way; queued work is dropped with the agent.
    pub(super) fn run(mut self) {
        loop {
            match self.turn() {
                Ok(Commands::Open) => {}
                Ok(Commands::Ended) => return,
                Ok(Commands::Closed) => return self.lose(None).run(),
                Err(reason) => return self.lose(Some(reason)).run(),
            }
        }
    }

    /// One turn of the loop; `Err` when the device is lost, with the reason.
    fn turn(&mut self) -> Result<Commands, String> {
        match self.take_commands() {
            Commands::Open => {}
            over => return Ok(over),
        }
        self.submit();
        self.reap(self.wait()).map_err(|error| error.to_string())?;
        let mut bytes = 0;
        while bytes < TURN_BYTES
            && let Some(done) = self.completed.pop_front()
        {
            bytes += done.bytes.max(1);
            self.finish(done)?;
        }
        self.say();
        Ok(Commands::Open)
    }

    /// How long there is nothing to do but wait for the device or a command.
    fn wait(&self) -> Wait {
        match self.news_since {
            _ if !self.completed.is_empty() => Wait::No,
            Some(since) => Wait::Until(NEWS_DELAY_MAX.saturating_sub(since.elapsed())),
            None => Wait::Until(IDLE_WAIT),
        }
    }

    fn take_commands(&mut self) -> Commands {
        loop {
            match self.around.commands.try_recv() {
                Ok(Command::Op(op)) => self.queue_op(op),
                Ok(Command::Read(batch)) => self.queue_batch(&batch),
                Ok(Command::Close) => return Commands::Closed,
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return Commands::Ended,
                Err(TryRecvError::Empty) => return Commands::Open,
            }
        }
    }

    fn queue_batch(&mut self, batch: &ReadBatch) {
        if self.reads.add(&self.around.arena, batch).is_ok() {
            return self.queue_reads();
        }
        tracing::error!(path = %self.around.path, blocks = batch.blocks.len(), "a batch of reads cannot be taken");
        let refused = FillUpdate::Failed(FillError::Refused);
        self.report.fills.extend(batch.blocks.iter().map(|block| (block.fill, refused.clone())));
        self.news_since.get_or_insert_with(Instant::now);
    }

    /// Puts the reads into the queue, unless they are in it.
    fn queue_reads(&mut self) {
        if self.reads_in_queue == InQueue::No {
            let pushed = self.queue.push(self.around.clock.now(), OpClass::Read, Work::Piece);
            assert!(pushed.is_ok(), "one place of the queue is kept for the reads");
            self.reads_in_queue = InQueue::Yes;
        }
    }

    fn queue_op(&mut self, op: DeviceOp) {
        let token = op.token;
        let (class, work) = match op.kind {
            DeviceOpKind::Sync => (OpClass::Sync, Work::Sync { token }),
            DeviceOpKind::WritePages { offset, bytes } => match PageBuffer::new(bytes.len()) {
                Ok(mut pages) => {
                    pages.copy_from_slice(&bytes);
                    let from = vec![pages.span()];
                    (OpClass::Write, Work::Write { token, offset, from, pages })
                }
                Err(error) => return self.refuse_op(token, &error.to_string()),
            },
            DeviceOpKind::WriteBlock { offset, header, slot } => {
                match self.around.arena.span(slot.region.0, slot.offset, slot.bytes) {
                    Ok(payload) if header.len() as u64 == PAGE_BYTES => {
                        let mut pages = self.pages.take();
                        pages.copy_from_slice(&header);
                        let from = vec![pages.span(), payload];
                        (OpClass::Write, Work::Write { token, offset, from, pages })
                    }
                    _ => return self.refuse_op(token, "slot or header of a wrong size"),
                }
            }
        };
        // The last place is for the reads.
        let has_room = self.queue.len() < COMMANDS_MAX;
        let bytes = work.bytes();
        if !has_room || self.queue.push(self.around.clock.now(), class, work).is_err() {
            return self.refuse_op(token, "the device's queue is full");
        }
        self.write_bytes_queued += bytes;
    }

    /// Only a mistake of the core gets here.
    fn refuse_op(&mut self, token: OpToken, reason: &str) {
        tracing::error!(path = %self.around.path, reason, "a device operation cannot be taken");
        self.report.done.push((token, Err(DeviceError::Refused)));
        self.news_since.get_or_insert_with(Instant::now);
    }

    fn may_submit(&self) -> bool {
        let ops = self.in_flight.len() - self.free_tokens.len();
        !self.free_tokens.is_empty()
            && (ops < IN_FLIGHT_OPS_MIN || self.in_flight_bytes < IN_FLIGHT_BYTES_MAX)
    }

    fn submit(&mut self) {
        while self.may_submit() {
            let now = self.around.clock.now();
            let Some(work) = self.queue.pop(now) else { break };
            self.write_bytes_queued -= work.bytes();
            let (purpose, op) = match work {
                Work::Sync { token } => (Purpose::Sync { token }, Op::Sync),
                Work::Write { token, offset, from, pages } => {
                    (Purpose::Write { token, pages }, Op::Write { offset, from })
                }
                Work::Piece => {
                    self.reads_in_queue = InQueue::No;
                    let Some(read) = self.reads.next(&self.pages) else { continue };
                    self.queue_reads();
                    self.pieces_in_flight += 1;
                    let op = Op::Read { offset: read.offset, into: read.into };
                    (Purpose::Piece { piece: read.piece, header: read.header }, op)
                }
            };
            self.start(purpose, op);
        }
        let reads = self.reads.waiting();
        self.around.metrics.queue(&Queued {
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
        self.engine.submit(submission).expect("the engine takes as many operations as there are tokens");
    }

    fn reap(&mut self, wait: Wait) -> Result<(), IoError> {
        // The buffer is moved out and in, so that completions can be matched while it is drained.
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
            // Spans go here, so that header pages can be looked at.
            drop(completion.op);
            let latency = started.elapsed();
            self.completed.push_back(Done { purpose, bytes, latency, result: completion.result });
        }
        self.reaped = reaped;
        outcome
    }

    /// Takes one operation to its end; `Err` when the device is lost, with the reason.
    fn finish(&mut self, done: Done) -> Result<(), String> {
        let Done { purpose, bytes, latency, result } = done;
        let error = match &result {
            Ok(()) => None,
            Err(error) => {
                if error.kind() == IoErrorKind::Media {
                    self.around.media_errors.fetch_add(1, Ordering::Relaxed);
                }
                Some(self.health.judge(error, &self.around.path))
            }
        };
        match purpose {
            Purpose::Piece { piece, header } => {
                self.around.metrics.read(bytes, latency);
                let outcome = error.map_or(Ok(()), |error| Err(read_error(error)));
                self.reads.finish(piece, outcome, header.as_ref());
                self.news_since.get_or_insert_with(Instant::now);
                if let Some(header) = header {
                    self.pages.give(header);
                }
            }
            Purpose::Write { token, pages } => {
                self.around.metrics.write(bytes, latency);
                self.pages.give(pages);
                self.report.done.push((token, error.map_or(Ok(()), Err)));
            }
            Purpose::Sync { token } => {
                self.around.metrics.sync(latency);
                // A sync that failed leaves nothing certain: fsync(2), and the reports of 2018 about it.
                let outcome = if error.is_none() { Ok(()) } else { Err(DeviceError::Lost) };
                self.around.sync_failed.fetch_or(outcome.is_err(), Ordering::AcqRel);
                self.report.done.push((token, outcome));
            }
        }
        match (error, result) {
            (Some(DeviceError::Lost), Err(error)) => Err(reason_of_loss(&error)),
            _ => Ok(()),
        }
    }

    /// Reports what there is to report, unless it can wait for company.
    fn say(&mut self) {
        let may_wait = self.report.done.is_empty()
            && (self.pieces_in_flight > 0 || !self.completed.is_empty())
            && self.news_since.is_none_or(|since| since.elapsed() < NEWS_DELAY_MAX);
        if !may_wait {
            self.news_since = None;
            self.reads.take_updates(&mut self.report.fills);
            self.around.send(&mut self.report);
        }
    }
}

/// Why a device is lost, for the operator; with the remedy where there is another one than a new device.
fn reason_of_loss(error: &IoError) -> String {
    match error.kind() {
        IoErrorKind::NoSpace => format!("{error}: free space on the file system that holds the pool"),
        _ => error.to_string(),
    }
}

/// What a failed operation means for the blocks that it was to read.
pub(crate) fn read_error(error: DeviceError) -> FillError {
    match error {
        DeviceError::Media | DeviceError::Lost => FillError::Device,
        DeviceError::Refused => FillError::Refused,
    }
}

#[cfg(test)]
mod desk;
mod lost;
#[cfg(test)]
mod power_loss;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod write_errors;
