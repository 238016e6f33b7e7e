//! The I/O engine on a namespace through VFIO: what every engine guarantees (a subset of the conformance suite of
//! `reprise-io`, which runs on the emulated controller), and errors of the medium.

use reprise_buffers::{Arena, PageBuffer, Span};
use reprise_io::{
    BlockDevice, Completion, EngineKind, EngineSettings, FileAccess, IoEngine, IoErrorKind, Op, Submission,
    Token, Wait,
};
use reprise_nvme::vfio::{PciFunction, VfioController};
use reprise_nvme::{DeviceSettings, NvmeDevice};

use crate::lab::{self, BLOCK, LONG, pattern};
use crate::{Outcome, ensure, test};

const PAGE: u64 = 4096;
const CAPACITY: usize = 16;

/// An engine on a namespace, with registered memory.
struct Rig {
    engine: Box<dyn IoEngine>,
    arena: Arena,
}

/// Opens a namespace, with the default settings of a device.
pub(crate) fn open(
    function: &PciFunction,
    namespace: u32,
    access: FileAccess,
    arena: &Arena,
) -> Outcome<Box<dyn IoEngine>> {
    let settings = DeviceSettings { namespace: Some(namespace), access, ..DeviceSettings::default() };
    let device = NvmeDevice::open(VfioController::open(function.clone())?, &settings)?;
    let regions = arena.regions().to_vec();
    let settings = EngineSettings { queue_depth: CAPACITY as u32, regions, ..EngineSettings::default() };
    Ok(Box::new(device).start_engine(&settings)?)
}

impl Rig {
    fn open(function: &PciFunction, namespace: u32, access: FileAccess) -> Outcome<Rig> {
        let arena = lab::arena()?;
        let engine = open(function, namespace, access, &arena)?;
        ensure(engine.kind() == EngineKind::UserNvme, "another engine")?;
        Ok(Rig { engine, arena })
    }

    fn span(&self, at: u64, bytes: u64) -> Span {
        self.arena.span(0, at, bytes).expect("inside")
    }

    fn submit(&mut self, token: u64, op: Op) -> Outcome {
        let accepted = self.engine.submit(Submission { token: Token(token), op });
        ensure(accepted.is_ok(), format!("operation {token} was not accepted"))
    }

    /// Waits until nothing is in flight.
    fn finish(&mut self) -> Outcome<Vec<Completion>> {
        let (start, mut done) = (std::time::Instant::now(), Vec::new());
        while self.engine.in_flight() > 0 {
            self.engine.reap(Wait::Until(LONG), &mut done)?;
            ensure(start.elapsed() < LONG, "operations do not end")?;
        }
        Ok(done)
    }

    /// Runs one operation, which must succeed.
    fn run(&mut self, op: Op) -> Outcome {
        self.submit(1, op)?;
        for done in self.finish()? {
            done.result?;
        }
        Ok(())
    }

    fn error_of(&mut self, op: Op) -> Outcome<Option<IoErrorKind>> {
        self.submit(1, op)?;
        Ok(self.finish()?.pop().and_then(|done| done.result.err()).map(|error| error.kind()))
    }
}

fn bytes_of(span: &Span) -> Vec<u8> {
    let mut bytes = vec![0; span.len()];
    span.copy_out(&mut bytes);
    bytes
}

pub(crate) fn run(function: &PciFunction, bad: u64) -> bool {
    let mut passed = true;
    let mut on_rig = |name: &str, access: FileAccess, namespace: u32, body: &dyn Fn(&mut Rig) -> Outcome| {
        passed &= test(name, || body(&mut Rig::open(function, namespace, access)?));
    };
    on_rig("engine-registered-memory", FileAccess::ReadWrite, 1, &registered_memory);
    on_rig("engine-other-memory", FileAccess::ReadWrite, 1, &other_memory);
    on_rig("engine-scattered-spans", FileAccess::ReadWrite, 1, &scattered_spans);
    on_rig("engine-random-load", FileAccess::ReadWrite, 1, &random_load);
    on_rig("engine-capacity", FileAccess::ReadWrite, 1, &capacity);
    on_rig("engine-read-only", FileAccess::ReadOnly, 1, &read_only);
    on_rig("engine-media-error", FileAccess::ReadWrite, 2, &|rig| media_error(rig, bad));
    on_rig("engine-dropped-in-flight", FileAccess::ReadWrite, 1, &dropped_in_flight);
    passed
}

fn registered_memory(rig: &mut Rig) -> Outcome {
    for (seed, offset) in [(1, 0), (2, 12_288), (3, 32 << 20)] {
        let (from, into) = (rig.span(0, 1 << 20), rig.span(1 << 20, 1 << 20));
        from.copy_in(&pattern(seed, 1 << 20))?;
        rig.run(Op::Write { offset, from: vec![from] })?;
        rig.run(Op::Sync)?;
        rig.run(Op::Read { offset, into: vec![into.clone()] })?;
        ensure(bytes_of(&into) == pattern(seed, 1 << 20), format!("offset {offset}"))?;
    }
    Ok(())
}

fn other_memory(rig: &mut Rig) -> Outcome {
    let mut from = PageBuffer::new(64 << 10)?;
    from.copy_from_slice(&pattern(5, 64 << 10));
    let mut into = PageBuffer::new(64 << 10)?;
    rig.run(Op::Write { offset: 8192, from: vec![from.span()] })?;
    rig.run(Op::Read { offset: 8192, into: vec![into.span()] })?;
    ensure(into[..] == from[..], "bytes differ")
}

/// Spans of both kinds of memory, in an order that is not that of their addresses.
fn scattered_spans(rig: &mut Rig) -> Outcome {
    let mut header = PageBuffer::new(PAGE as usize)?;
    header.copy_from_slice(&pattern(1, PAGE));
    let mut whole = pattern(1, PAGE);
    let mut from = vec![header.span()];
    for (seed, (at, bytes)) in (2..).zip([(3 << 20, 8192), (0, PAGE), (2 << 20, 12_288)]) {
        let span = rig.span(at, bytes);
        span.copy_in(&pattern(seed, bytes))?;
        whole.extend(pattern(seed, bytes));
        from.push(span);
    }
    let into = rig.span(4 << 20, whole.len() as u64);
    rig.run(Op::Write { offset: 40_960, from })?;
    rig.run(Op::Read { offset: 40_960, into: vec![into.clone()] })?;
    ensure(bytes_of(&into) == whole, "bytes differ")
}

/// Random operations on disjoint places agree with a model of the device, and each token completes once.
fn random_load(rig: &mut Rig) -> Outcome {
    const PLACES: u64 = 64;
    const STEP: u64 = 32 << 10;
    let mut state = 31_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    let mut seeds = vec![0; PLACES as usize];
    for place in 0..PLACES {
        let from = rig.span(0, STEP);
        from.copy_in(&pattern(0, STEP))?;
        rig.run(Op::Write { offset: place * STEP, from: vec![from] })?;
    }
    for round in 1..60 {
        let first = random(PLACES);
        let mut reads = Vec::new();
        for index in 0..CAPACITY as u64 {
            let (place, slot) = ((first + index * 3) % PLACES, rig.span(index * STEP, STEP));
            let offset = place * STEP;
            if random(2) == 0 {
                let seed = round * 100 + index;
                slot.copy_in(&pattern(seed, STEP))?;
                seeds[place as usize] = seed;
                rig.submit(index, Op::Write { offset, from: vec![slot] })?;
            } else {
                reads.push((slot.clone(), seeds[place as usize]));
                rig.submit(index, Op::Read { offset, into: vec![slot] })?;
            }
        }
        let mut tokens: Vec<u64> = Vec::new();
        for done in rig.finish()? {
            done.result?;
            tokens.push(done.token.0);
        }
        tokens.sort_unstable();
        ensure(tokens == (0..CAPACITY as u64).collect::<Vec<_>>(), format!("tokens {tokens:?}"))?;
        for (slot, seed) in reads {
            ensure(bytes_of(&slot) == pattern(seed, STEP), format!("round {round}: bytes differ"))?;
        }
    }
    Ok(())
}

fn capacity(rig: &mut Rig) -> Outcome {
    for token in 0..CAPACITY as u64 {
        let into = vec![rig.span(token * PAGE, PAGE)];
        rig.submit(token, Op::Read { offset: token * PAGE, into })?;
    }
    let more = Submission { token: Token(99), op: Op::Sync };
    ensure(rig.engine.submit(more).is_err(), "more than the capacity was accepted")?;
    ensure(rig.finish()?.len() == CAPACITY, "each operation ends once")
}

fn read_only(rig: &mut Rig) -> Outcome {
    let page = vec![rig.span(0, PAGE)];
    rig.run(Op::Read { offset: 0, into: page.clone() })?;
    let error = rig.error_of(Op::Write { offset: 0, from: page })?;
    ensure(error.is_some(), "a write was accepted")
}

/// A block that cannot be read is an error of its place only.
fn media_error(rig: &mut Rig, bad: u64) -> Outcome {
    let offset = bad * BLOCK;
    let page = |rig: &Rig| vec![rig.span(0, PAGE)];
    let op = Op::Read { offset, into: page(rig) };
    let error = rig.error_of(op)?;
    ensure(error == Some(IoErrorKind::Media), format!("{error:?}"))?;
    for neighbour in [offset - PAGE, offset + PAGE] {
        let into = page(rig);
        rig.run(Op::Read { offset: neighbour, into })?;
    }
    Ok(())
}

/// Dropping the engine ends the operations in flight first: memory that the test has again does not change afterwards.
fn dropped_in_flight(rig: &mut Rig) -> Outcome {
    let from = rig.span(0, 1 << 20);
    from.copy_in(&pattern(8, 1 << 20))?;
    rig.run(Op::Write { offset: 0, from: vec![from] })?;
    for token in 0..CAPACITY as u64 {
        let into = vec![rig.span((1 << 20) + token * (64 << 10), 64 << 10)];
        rig.submit(token, Op::Read { offset: token * (64 << 10), into })?;
    }
    rig.engine.reap(Wait::No, &mut Vec::new())?;
    rig.engine = Box::new(Ended);
    let memory = rig.span(1 << 20, 1 << 20);
    memory.copy_in(&vec![0x55; 1 << 20])?;
    std::thread::sleep(std::time::Duration::from_millis(50));
    ensure(bytes_of(&memory).iter().all(|byte| *byte == 0x55), "memory was written after the engine's end")
}

/// Takes the place of an engine that was dropped.
struct Ended;

impl IoEngine for Ended {
    fn capacity(&self) -> usize {
        0
    }
    fn in_flight(&self) -> usize {
        0
    }
    fn submit(&mut self, submission: Submission) -> Result<(), Submission> {
        Err(submission)
    }
    fn reap(&mut self, _wait: Wait, _out: &mut Vec<Completion>) -> Result<(), reprise_io::IoError> {
        Ok(())
    }
    fn waker(&self) -> reprise_io::Waker {
        reprise_io::Doorbell::new().expect("a descriptor").waker()
    }
    fn close(self: Box<Self>) -> reprise_io::CloseOutcome {
        reprise_io::CloseOutcome::Drained
    }
    fn kind(&self) -> EngineKind {
        EngineKind::UserNvme
    }
}
