//! Reads of 4 KiB per second: this driver, and the kernel's with io_uring, on the same controller, in alternating rounds.
//!
//! The kernel's loop is the fastest known one: O_DIRECT, registered file and buffers (`reprise_io::bare`). Runs are short
//! and many, since other work on this machine's processors makes some of them slower.

use std::path::Path;
use std::time::{Duration, Instant};

use reprise_buffers::{Arena, Span};
use reprise_io::bare::{self, BareLoop};
use reprise_io::{
    BlockDevice, DeviceFile, EngineSettings, FileAccess, IfMissing, IoEngine, Op, Submission, Token, Wait,
};
use reprise_nvme::spec::{Command, READ};
use reprise_nvme::vfio::{FunctionError, PciFunction, VfioController};
use reprise_nvme::{DeviceSettings, NvmeDevice};

use crate::driver::lab_device;
use crate::lab::{self, BLOCK, LONG, Lab, Queue};
use crate::{Outcome, ensure, test};

const PAGE: u64 = 4096;
/// Rounds end at the first one after which the goal is reached, but not before the minimum.
const ROUNDS_MIN: usize = 2;
const ROUNDS_MAX: usize = 8;
/// Runs of each kind in a round.
const RUNS: usize = 4;
const DEPTHS: [usize; 2] = [1, 32];
/// Ratio of the engine's rate to the kernel's that is the goal, and the one that a busy machine reaches at least.
const RATIO_GOAL: f64 = 1.0;
const RATIO_MIN: f64 = 0.7;
/// Size of the range that is read.
const RANGE: u64 = 32 << 20;

/// Time without a completion after which the loop on a queue pair sleeps between two polls, and that sleep.
const SPIN: Duration = Duration::from_micros(300);
const NAP: Duration = Duration::from_micros(20);

/// Number of reads of one measurement.
fn reads(depth: usize) -> usize {
    if depth == 1 { 500 } else { 4_000 }
}

fn offsets(depth: usize) -> Vec<u64> {
    (0..reads(depth) as u64).map(|index| index * 977 % (RANGE / PAGE) * PAGE).collect()
}

fn rate(depth: usize, elapsed: Duration) -> f64 {
    reads(depth) as f64 / elapsed.as_secs_f64()
}

fn buffers(arena: &Arena, depth: usize) -> Vec<Span> {
    (0..depth as u64).map(|index| arena.span(0, index * PAGE, PAGE).expect("inside")).collect()
}

/// The kernel's driver with io_uring.
fn kernel(path: &Path, arena: &Arena, depth: usize) -> Outcome<f64> {
    let file = DeviceFile::open(path, FileAccess::ReadOnly, IfMissing::Fail)?;
    let run = bare::read_loop(&BareLoop {
        file: &file,
        block_bytes: PAGE as u32,
        offsets: &offsets(depth),
        depth,
        buffers: &buffers(arena, depth),
        sync_every: None,
    })?;
    Ok(rate(depth, run.elapsed))
}

/// A queue pair of this driver.
fn queue_pair(lab: &Lab, queue: &mut Queue, depth: usize) -> Outcome<f64> {
    let format = lab.controller.data_format();
    let (mut ended, mut free) = (Vec::new(), (0..depth as u64).collect::<Vec<_>>());
    let offsets = offsets(depth);
    let (mut next, mut done) = (offsets.iter().peekable(), 0);
    let start = Instant::now();
    let (deadline, mut found) = (start + LONG, start);
    while done < offsets.len() {
        while next.peek().is_some()
            && let Some(buffer) = free.pop()
        {
            let data = format.describe(queue, &[lab.piece(buffer * PAGE, PAGE)])?;
            let offset = next.next().expect("just seen");
            let command = Command::transfer(READ, 1, offset / BLOCK, (PAGE / BLOCK) as u32).with_data(data);
            queue.submit(&command, buffer, deadline)?;
        }
        queue.poll(&mut ended)?;
        if ended.is_empty() {
            // One doorbell for all that came since the last completion.
            queue.ring();
            let waited = found.elapsed();
            ensure(waited < LONG, "the reads do not end")?;
            if waited > SPIN {
                std::thread::sleep(NAP);
            }
            continue;
        }
        found = Instant::now();
        for one in ended.drain(..) {
            lab::expect(one.status)?;
            free.push(one.token);
            done += 1;
        }
    }
    Ok(rate(depth, start.elapsed()))
}

/// Starts the I/O engine on this driver.
fn start_engine(function: &PciFunction, arena: &Arena, depth: usize) -> Outcome<Box<dyn IoEngine>> {
    let settings =
        DeviceSettings { namespace: Some(1), access: FileAccess::ReadOnly, ..DeviceSettings::default() };
    let device = NvmeDevice::open(VfioController::open(function.clone())?, &settings)?;
    let regions = arena.regions().to_vec();
    let settings = EngineSettings { queue_depth: depth as u32, regions, ..EngineSettings::default() };
    Ok(Box::new(device).start_engine(&settings)?)
}

fn engine(engine: &mut dyn IoEngine, arena: &Arena, depth: usize) -> Outcome<f64> {
    let (offsets, mut free, mut ended) = (offsets(depth), buffers(arena, depth), Vec::new());
    let (mut next, mut done) = (offsets.iter().peekable(), 0);
    let start = Instant::now();
    while done < offsets.len() {
        while next.peek().is_some()
            && let Some(buffer) = free.pop()
        {
            let offset = *next.next().expect("just seen");
            let op = Op::Read { offset, into: vec![buffer] };
            ensure(engine.submit(Submission { token: Token(offset), op }).is_ok(), "there is room")?;
        }
        engine.reap(Wait::Until(LONG), &mut ended)?;
        for one in ended.drain(..) {
            one.result?;
            done += 1;
            let Op::Read { into, .. } = one.op else { return Err("another operation".into()) };
            free.extend(into);
        }
        ensure(start.elapsed() < LONG, "the reads do not end")?;
    }
    Ok(rate(depth, start.elapsed()))
}

fn median(rates: &[f64]) -> f64 {
    let mut rates = rates.to_vec();
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

fn best(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(0.0, f64::max)
}

/// Rates of all runs at one depth.
#[derive(Default)]
struct Rates {
    kernel: Vec<f64>,
    queue_pair: Vec<f64>,
    engine: Vec<f64>,
}

impl Rates {
    /// Compares the engine with the kernel by the best runs, and by the medians; returns the higher ratio. On a busy
    /// machine, either of them may be that of another process's pauses.
    fn ratio(&self) -> f64 {
        let best = best(&self.engine) / best(&self.kernel);
        best.max(median(&self.engine) / median(&self.kernel))
    }
}

/// Gives the controller to vfio-pci. The kernel closes files of an io_uring some time after the ring.
fn bind(function: &PciFunction) -> Outcome {
    let start = Instant::now();
    loop {
        match function.bind_to_vfio() {
            Err(FunctionError::InUse { .. }) if start.elapsed() < LONG => {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return Ok(result?),
        }
    }
}

fn measure(function: &PciFunction) -> Outcome<Vec<Rates>> {
    let arena = lab::arena()?;
    let mut all: Vec<Rates> = DEPTHS.iter().map(|_| Rates::default()).collect();
    for round in 1..=ROUNDS_MAX {
        let path = lab_device(function)?;
        for (depth, rates) in DEPTHS.into_iter().zip(&mut all) {
            for _ in 0..RUNS {
                rates.kernel.push(kernel(&path, &arena, depth)?);
            }
        }
        bind(function)?;
        // Opened once for all runs: opening takes longer than a run.
        let mut lab = Lab::open(function)?;
        let mut queue = lab.controller.create_queue_pair(64)?;
        for (depth, rates) in DEPTHS.into_iter().zip(&mut all) {
            for _ in 0..RUNS {
                rates.queue_pair.push(queue_pair(&lab, &mut queue, depth)?);
            }
        }
        drop((queue, lab));
        for (depth, rates) in DEPTHS.into_iter().zip(&mut all) {
            let mut started = start_engine(function, &arena, depth)?;
            for _ in 0..RUNS {
                rates.engine.push(engine(&mut *started, &arena, depth)?);
            }
        }
        function.release_to_kernel()?;
        if round >= ROUNDS_MIN && all.iter().all(|rates| rates.ratio() >= RATIO_GOAL) {
            break;
        }
    }
    Ok(all)
}

pub(crate) fn run(function: &PciFunction) -> bool {
    let mut measured = Vec::new();
    let mut passed = test("speed-measured", || {
        measured = measure(function)?;
        Ok(())
    });
    for (depth, rates) in DEPTHS.into_iter().zip(measured) {
        for (name, of) in [("IOPS", best as fn(&[f64]) -> f64), ("IOPS-medians", median)] {
            let (kernel, own, engine) = (of(&rates.kernel), of(&rates.queue_pair), of(&rates.engine));
            println!(
                "{name} depth={depth} runs={} kernel-io_uring={kernel:.0} queue-pair={own:.0} engine={engine:.0} \
                 ratio={:.2}",
                rates.kernel.len(),
                engine / kernel
            );
        }
        passed &= test(&format!("speed-depth-{depth}"), || {
            let ratio = rates.ratio();
            ensure(ratio >= RATIO_MIN, format!("the engine reaches {ratio:.2} of the kernel's rate"))
        });
    }
    passed
}
