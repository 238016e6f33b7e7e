//! The simulated device as a state machine: operations enter, virtual time passes, completions come out.
//!
//! Three layers of the medium: `durable` (survives anything), `unsynced` (reached the device after that, in order), and
//! `seen` (both together: what reads find).

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

/// See the module's doc.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) settings: SimulatedSettings,
    pub(crate) faults: Vec<Fault>,
    pub(crate) seen: Image,
    /// Where the medium ends; less than the device's size after `truncate`.
    pub(crate) end: u64,
    pub(crate) power: Power,
    pub(crate) engine: EngineSeat,
    durable: Image,
    unsynced: VecDeque<UnsyncedWrite>,
    /// Unsynced writes that ever became durable: `synced + unsynced.len()` numbers the next one.
    synced: u64,
    random: Random,
    elapsed: Duration,
    started: Instant,
    /// By due time, then order of submission.
    flying: BTreeMap<(Duration, u64), Flying>,
    submitted: u64,
    /// Hit by [`FaultKind::Hang`].
    hanging: Vec<Flying>,
}

/// Whether the device can still do anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Power {
    On,
    Off,
}

/// Whether an engine has the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineSeat {
    Free,
    Taken,
}

#[derive(Debug)]
struct Flying {
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
            flying: BTreeMap::new(),
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
        self.flying.first_key_value().map(|((due, _), _)| *due)
    }

    pub(crate) fn flying(&self) -> usize {
        self.flying.len() + self.hanging.len()
    }

    /// Whether something will never end by itself.
    pub(crate) fn hangs(&self) -> bool {
        !self.hanging.is_empty()
    }

    /// Does what hangs, for nobody to see but the memory and the medium.
    pub(crate) fn let_go(&mut self) {
        for flying in std::mem::take(&mut self.hanging) {
            self.transfer(&flying, flying.total() - flying.done);
        }
    }

    /// Takes in an operation that [`Bounds::check`] has passed.
    pub(crate) fn submit(&mut self, submission: Submission) {
        let covers = self.synced + self.unsynced.len() as u64;
        self.fly(Flying { submission, done: 0, covers });
    }

    /// Takes out what is due by now.
    pub(crate) fn complete_due(&mut self, out: &mut Vec<Completion>) {
        let now = self.now();
        while self.next_due().is_some_and(|due| due <= now || self.power == Power::Off) {
            let (_, flying) = self.flying.pop_first().expect("one is due");
            out.extend(self.step(flying));
        }
    }

    /// Takes out everything, as if time had passed far enough.
    pub(crate) fn complete_all(&mut self, out: &mut Vec<Completion>) {
        while let Some((_, flying)) = self.flying.pop_first() {
            out.extend(self.step(flying));
        }
    }

    pub(crate) fn corrupt(&mut self, change: impl FnOnce(&mut Image)) {
        // Rot is on the medium: it survives crashes, so unsynced writes move below it.
        self.make_durable(u64::MAX);
        change(&mut self.seen);
        self.durable = self.seen.clone();
    }

    pub(crate) fn crash(&mut self, mode: CrashMode) -> Image {
        self.power = Power::Off;
        let flying = std::mem::take(&mut self.flying);
        let in_flight =
            flying.values().chain(&self.hanging).filter_map(|flying| flying.rest_of_write(self.end));
        let in_flight: Vec<_> = in_flight.collect();
        self.flying = flying;
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

    fn fly(&mut self, flying: Flying) {
        let latency = &self.settings.latency;
        let range = match flying.submission.op {
            Op::Read { .. } => &latency.read,
            Op::Write { .. } => &latency.write,
            Op::Sync => &latency.sync,
        };
        let due = self.now().saturating_add(self.random.within(range));
        self.flying.insert((due, self.submitted), flying);
        self.submitted += 1;
    }

    /// Does one step of an operation; its completion, unless it flies on.
    fn step(&mut self, mut flying: Flying) -> Option<Completion> {
        if self.power == Power::Off {
            let error = IoError::new(IoErrorKind::Lost, "the simulated device has crashed");
            return Some(flying.complete(Err(error)));
        }
        let (op, random) = (&flying.submission.op, &mut self.random);
        let fault = self.faults.iter_mut().find_map(|fault| fault.hits(op, random).then_some(fault.kind));
        if fault == Some(FaultKind::Hang) {
            self.hanging.push(flying);
            return None;
        }
        if let Some(kind) = fault {
            self.damage(kind, &flying);
            return Some(flying.complete(kind.error().map_or(Ok(()), Err)));
        }
        if matches!(flying.submission.op, Op::Sync) {
            self.make_durable(flying.covers);
            return Some(flying.complete(Ok(())));
        }
        let piece = self.piece_of(&flying);
        if piece == 0 {
            let text = format!("the medium ends at {}, inside the transfer", self.end);
            return Some(flying.complete(Err(IoError::new(IoErrorKind::ShortTransfer, text))));
        }
        self.transfer(&flying, piece);
        flying.done += piece;
        if flying.done == flying.total() {
            return Some(flying.complete(Ok(())));
        }
        self.fly(flying);
        None
    }

    /// How many bytes the next step moves: the rest, or by chance less; zero at the end of the medium.
    fn piece_of(&mut self, flying: &Flying) -> usize {
        let rest = flying.total() - flying.done;
        let left = usize::try_from(self.end.saturating_sub(flying.position())).unwrap_or(usize::MAX);
        let pages = rest.min(left) / IO_ALIGN;
        let one_in = self.settings.partial_one_in.map(NonZeroU32::get);
        let partial = pages > 1 && one_in.is_some_and(|count| self.random.one_in(u64::from(count)));
        let pages = if partial { 1 + self.random.below(pages as u64 - 1) as usize } else { pages };
        pages * IO_ALIGN
    }

    fn transfer(&mut self, flying: &Flying, piece: usize) {
        let position = flying.position();
        match &flying.submission.op {
            Op::Sync => {}
            Op::Read { into, .. } => {
                let mut data = vec![0; piece];
                self.seen.read(position, &mut data);
                scatter(into, flying.done, &data);
            }
            Op::Write { from, .. } => {
                let data = gather(from, flying.done, piece);
                self.seen.write(position, &data);
                self.unsynced.push_back(UnsyncedWrite { offset: position, data });
            }
        }
    }

    /// What a failing operation leaves behind.
    fn damage(&mut self, kind: FaultKind, flying: &Flying) {
        match (kind, &flying.submission.op) {
            (FaultKind::ReadError, Op::Read { into, .. }) => {
                let garbage = self.random.next().to_ne_bytes().repeat(flying.total() / 16);
                scatter(into, 0, &garbage);
            }
            (FaultKind::WriteError, Op::Write { .. }) => {
                let Some(write) = flying.rest_of_write(self.end) else { return };
                for piece in tear(&write, self.settings.sector_bytes as usize, &mut self.random) {
                    self.seen.write(piece.offset, &piece.data);
                    self.unsynced.push_back(piece);
                }
            }
            _ => {}
        }
    }

    /// Makes unsynced writes durable, up to but without number `until`.
    fn make_durable(&mut self, until: u64) {
        while self.synced < until {
            let Some(write) = self.unsynced.pop_front() else { return };
            self.durable.write(write.offset, &write.data);
            self.synced += 1;
        }
    }
}

impl Flying {
    fn total(&self) -> usize {
        self.submission.op.spans().iter().map(Span::len).sum()
    }

    fn position(&self) -> u64 {
        self.submission.op.offset() + self.done as u64
    }

    /// What has not reached the device yet of a write, as far as there is a medium.
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

/// Copies `data` to spans, from byte `skip` of them on.
fn scatter(spans: &[Span], mut skip: usize, mut data: &[u8]) {
    for span in spans {
        if skip >= span.len() {
            skip -= span.len();
            continue;
        }
        let (piece, rest) = data.split_at(data.len().min(span.len() - skip));
        let part = span.slice(skip, piece.len()).expect("shorter than the span");
        part.copy_in(piece).expect("Bounds::check saw that it is writable");
        (skip, data) = (0, rest);
    }
}

/// Copies `len` bytes out of spans, from byte `skip` of them on.
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
