//! The simulated device as a state machine: operations enter, virtual time passes, completions are returned.
//!
//! The medium has three layers: `durable` (survives anything), `unsynced` (later writes that reached the
//! device, in order), and `seen` (the sum of both, which reads see).

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use reprise_buffers::Span;

use crate::error::{IoError, IoErrorKind};
use crate::op::{Bounds, Completion, IO_ALIGN, Op, Submission};
use crate::simulated::crash::{CrashMode, UnsyncedWrite, survive, tear};
use crate::simulated::fault::{Fault, FaultKind};
use crate::simulated::image::Image;
use crate::simulated::random::Random;
use crate::simulated::{SimulatedClock, SimulatedSettings};

/// State of a simulated device; see the module.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) settings: SimulatedSettings,
    pub(crate) faults: Vec<Fault>,
    pub(crate) seen: Image,
    /// End of the medium; less than the device's size after `truncate`.
    pub(crate) end: u64,
    pub(crate) power: Power,
    pub(crate) engine: EngineSeat,
    durable: Image,
    unsynced: VecDeque<UnsyncedWrite>,
    /// Number of unsynced writes that have become durable so far: `synced + unsynced.len()` is the number of
    /// the next one.
    synced: u64,
    random: Random,
    elapsed: Duration,
    started: Instant,
    /// By due time, then order of submission.
    in_flight: BTreeMap<(Duration, u64), InFlightOp>,
    submitted: u64,
    /// Operations that [`FaultKind::Hang`] holds.
    hanging: Vec<InFlightOp>,
}

/// Whether the device still works; off after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Power {
    On,
    Off,
}

/// Whether an engine uses the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineSeat {
    Free,
    Taken,
}

#[derive(Debug)]
struct InFlightOp {
    submission: Submission,
    done: usize,
    /// For a sync: number of the first write that it does not cover.
    covers: u64,
}

impl State {
    pub(crate) fn new(image: Image, settings: SimulatedSettings) -> State {
        State {
            faults: Vec::new(),
            end: image.bytes(),
            seen: image.clone(),
            durable: image,
            power: Power::On,
            engine: EngineSeat::Free,
            unsynced: VecDeque::new(),
            synced: 0,
            random: Random::new(settings.seed),
            elapsed: Duration::ZERO,
            started: Instant::now(),
            in_flight: BTreeMap::new(),
            submitted: 0,
            hanging: Vec::new(),
            settings,
        }
    }

    pub(crate) fn bounds(&self) -> Bounds {
        Bounds { size: self.seen.bytes(), access: self.settings.access }
    }

    pub(crate) fn now(&self) -> Duration {
        match self.settings.clock {
            SimulatedClock::Virtual => self.elapsed,
            SimulatedClock::Real => self.started.elapsed(),
        }
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        self.elapsed = self.elapsed.saturating_add(by);
    }

    pub(crate) fn next_due(&self) -> Option<Duration> {
        self.in_flight.first_key_value().map(|((due, _), _)| *due)
    }

    pub(crate) fn in_flight_ops(&self) -> usize {
        self.in_flight.len() + self.hanging.len()
    }

    /// Reports whether an operation hangs.
    pub(crate) fn hangs(&self) -> bool {
        !self.hanging.is_empty()
    }

    /// Executes the hung operations without completions: only memory and medium change.
    pub(crate) fn release_hung(&mut self) {
        for operation in std::mem::take(&mut self.hanging) {
            self.transfer(&operation, operation.total() - operation.done);
        }
    }

    /// Accepts an operation that [`Bounds::check`] has passed.
    pub(crate) fn submit(&mut self, submission: Submission) {
        let covers = self.synced + self.unsynced.len() as u64;
        self.schedule(InFlightOp { submission, done: 0, covers });
    }

    /// Completes the operations that are due now.
    pub(crate) fn complete_due(&mut self, out: &mut Vec<Completion>) {
        let now = self.now();
        while self.next_due().is_some_and(|due| due <= now || self.power == Power::Off) {
            let (_, operation) = self.in_flight.pop_first().expect("one is due");
            out.extend(self.step(operation));
        }
    }

    /// Completes all operations, as if enough time had passed.
    pub(crate) fn complete_all(&mut self, out: &mut Vec<Completion>) {
        while let Some((_, operation)) = self.in_flight.pop_first() {
            out.extend(self.step(operation));
        }
    }

    pub(crate) fn corrupt(&mut self, change: impl FnOnce(&mut Image)) {
        // Rot survives every crash. The unsynced writes become durable first, so that the change lies above
        // them.
        self.make_durable(u64::MAX);
        change(&mut self.seen);
        self.durable = self.seen.clone();
    }

    pub(crate) fn crash(&mut self, mode: CrashMode) -> Image {
        self.power = Power::Off;
        let operations = std::mem::take(&mut self.in_flight);
        let in_flight = operations
            .values()
            .chain(&self.hanging)
            .filter_map(|operation| operation.rest_of_write(self.end));
        let in_flight: Vec<_> = in_flight.collect();
        self.in_flight = operations;
        let sector = self.settings.sector_bytes as usize;
        match mode {
            CrashMode::UnsyncedDropped => self.durable.clone(),
            CrashMode::ProcessKilled => {
                let mut image = self.seen.clone();
                survive(&mut image, in_flight, sector, &mut self.random);
                image
            }
            CrashMode::PowerLost => {
                let (mut image, mut writes) = (self.durable.clone(), Vec::from(self.unsynced.clone()));
                writes.extend(in_flight);
                survive(&mut image, writes, sector, &mut self.random);
                image
            }
        }
    }

    fn schedule(&mut self, operation: InFlightOp) {
        let latency = &self.settings.latency;
        let range = match operation.submission.op {
            Op::Read { .. } => &latency.read,
            Op::Write { .. } => &latency.write,
            Op::Sync => &latency.sync,
        };
        let due = self.now().saturating_add(self.random.within(range));
        self.in_flight.insert((due, self.submitted), operation);
        self.submitted += 1;
    }

    /// Runs one step of an operation; returns its completion, or `None` if it needs further steps.
    fn step(&mut self, mut operation: InFlightOp) -> Option<Completion> {
        if self.power == Power::Off {
            let error = IoError::new(IoErrorKind::Lost, "the simulated device has crashed");
            return Some(operation.complete(Err(error)));
        }
        let (op, random) = (&operation.submission.op, &mut self.random);
        let fault = self.faults.iter_mut().find_map(|fault| fault.hits(op, random).then_some(fault.kind));
        if fault == Some(FaultKind::Hang) {
            self.hanging.push(operation);
            return None;
        }
        if let Some(kind) = fault {
            self.damage(kind, &operation);
            return Some(operation.complete(kind.error().map_or(Ok(()), Err)));
        }
        if matches!(operation.submission.op, Op::Sync) {
            self.make_durable(operation.covers);
            return Some(operation.complete(Ok(())));
        }
        let piece = self.piece_of(&operation);
        if piece == 0 {
            let text = format!("the medium ends at {}, inside the transfer", self.end);
            return Some(operation.complete(Err(IoError::new(IoErrorKind::ShortTransfer, text))));
        }
        self.transfer(&operation, piece);
        operation.done += piece;
        if operation.done == operation.total() {
            return Some(operation.complete(Ok(())));
        }
        self.schedule(operation);
        None
    }

    /// Number of bytes of the next step: the rest, or randomly less; zero at the end of the medium.
    fn piece_of(&mut self, operation: &InFlightOp) -> usize {
        let rest = operation.total() - operation.done;
        let left = usize::try_from(self.end.saturating_sub(operation.position())).unwrap_or(usize::MAX);
        let pages = rest.min(left) / IO_ALIGN;
        let one_in = self.settings.partial_one_in.map(NonZeroU32::get);
        let partial = pages > 1 && one_in.is_some_and(|count| self.random.one_in(u64::from(count)));
        let pages = if partial { 1 + self.random.below(pages as u64 - 1) as usize } else { pages };
        pages * IO_ALIGN
    }

    fn transfer(&mut self, operation: &InFlightOp, piece: usize) {
        let position = operation.position();
        match &operation.submission.op {
            Op::Sync => {}
            Op::Read { into, .. } => {
                let mut data = vec![0; piece];
                self.seen.read(position, &mut data);
                scatter(into, operation.done, &data);
            }
            Op::Write { from, .. } => {
                let data = gather(from, operation.done, piece);
                self.seen.write(position, &data);
                self.unsynced.push_back(UnsyncedWrite { offset: position, data });
            }
        }
    }

    /// Applies the side effects of a failing operation.
    fn damage(&mut self, kind: FaultKind, operation: &InFlightOp) {
        match (kind, &operation.submission.op) {
            (FaultKind::ReadError, Op::Read { into, .. }) => {
                let garbage = self.random.next().to_ne_bytes().repeat(operation.total() / 16);
                scatter(into, 0, &garbage);
            }
            (FaultKind::WriteError, Op::Write { .. }) => {
                let Some(write) = operation.rest_of_write(self.end) else { return };
                for piece in tear(&write, self.settings.sector_bytes as usize, &mut self.random) {
                    self.seen.write(piece.offset, &piece.data);
                    self.unsynced.push_back(piece);
                }
            }
            _ => {}
        }
    }

    /// Makes the unsynced writes below number `until` durable.
    fn make_durable(&mut self, until: u64) {
        while self.synced < until {
            let Some(write) = self.unsynced.pop_front() else { return };
            self.durable.write(write.offset, &write.data);
            self.synced += 1;
        }
    }
}

impl InFlightOp {
    fn total(&self) -> usize {
        self.submission.op.spans().iter().map(Span::len).sum()
    }

    fn position(&self) -> u64 {
        self.submission.op.offset() + self.done as u64
    }

    /// Returns the part of a write that has not reached the device yet, up to the end of the medium.
    fn rest_of_write(&self, end: u64) -> Option<UnsyncedWrite> {
        let Op::Write { from, .. } = &self.submission.op else { return None };
        let left = usize::try_from(end.saturating_sub(self.position())).unwrap_or(usize::MAX);
        let rest = (self.total() - self.done).min(left);
        Some(UnsyncedWrite { offset: self.position(), data: gather(from, self.done, rest) })
    }

    fn complete(self, result: Result<(), IoError>) -> Completion {
        let Submission { token, op } = self.submission;
        Completion { token, op, result }
    }
}

/// Copies `data` to spans, starting at byte `skip`.
fn scatter(spans: &[Span], mut skip: usize, mut data: &[u8]) {
    for span in spans {
        if skip >= span.len() {
            skip -= span.len();
            continue;
        }
        let (piece, rest) = data.split_at(data.len().min(span.len() - skip));
        let part = span.slice(skip, piece.len()).expect("shorter than the span");
        part.copy_in(piece).expect("Bounds::check ensures that it is writable");
        (skip, data) = (0, rest);
    }
}

/// Copies `len` bytes out of spans, starting at byte `skip`.
fn gather(spans: &[Span], mut skip: usize, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    let mut at = 0;
    for span in spans {
        if skip >= span.len() {
            skip -= span.len();
            continue;
        }
        let piece = (len - at).min(span.len() - skip);
        span.slice(skip, piece).expect("shorter than the span").copy_out(&mut data[at..at + piece]);
        (skip, at) = (0, at + piece);
    }
    data
}
