//! The thread of the backend `staged`: it owns the I/O engines and the window.

use std::ops::Range;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};
use reprise_io::{
    Completion, DeviceFile, EngineChoice, EngineSettings, IoEngine, IoError, Op, Submission, Token, Wait,
    open_engine,
};

use super::convert::Converter;
use super::{Job, WINDOW_BYTES};
use crate::copy::{CopyJob, KvLayout};
use crate::gpu::HostMemory;
use crate::ring::{Operation, RingError};
use crate::staged::Staged;
use crate::store::mover::{BlockError, MoveError};
use crate::store::waiting::Inbox;
use crate::store::{KvGeometry, KvMemory};

/// Longest wait for completions of one device before those of the others are taken.
const REAP_LIMIT: Duration = Duration::from_millis(1);

/// Slots of the window at most, also if they are small: half of them are in flight at once.
const SLOTS_MAX: u64 = 1024;

/// Engines, window and converter.
struct Worker<'k> {
    engines: Vec<Box<dyn IoEngine>>,
    converter: Converter<'k>,
    window: Span,
    /// Bytes of a slot: a layer of a block.
    slot_bytes: usize,
    half_slots: usize,
    /// What each half of the window has in flight.
    halves: [Vec<Flight>; 2],
    completions: Vec<Completion>,
    /// Why no engine can be used any longer.
    broken: Option<String>,
}

/// A block whose operation was started.
struct Flight {
    /// Index of the block in the request.
    block: usize,
    /// How the operation has ended.
    result: Option<Result<(), BlockError>>,
}

/// Opens everything, reports whether that succeeded, and runs requests until the sender is dropped.
pub(super) fn run(
    geometry: KvGeometry,
    memory: &KvMemory,
    files: Vec<DeviceFile>,
    opened: &SyncSender<Result<(), MoveError>>,
    mut jobs: Inbox<Job>,
) {
    let slot_bytes = geometry.parts * geometry.object_bytes;
    let half_slots = (WINDOW_BYTES / 2 / slot_bytes as u64).clamp(1, SLOTS_MAX / 2) as usize;
    let open = || -> Result<_, MoveError> {
        let bytes = (2 * half_slots * slot_bytes) as u64;
        let config = ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Never };
        let arena = Arena::new(&config).map_err(RingError::from)?;
        let settings = EngineSettings {
            // Both halves may be in flight on one device.
            queue_depth: 2 * half_slots as u32,
            engine: EngineChoice::IoUring,
            regions: arena.regions().to_vec(),
        };
        let engines: Result<Vec<_>, IoError> =
            files.into_iter().map(|file| open_engine(file, &settings)).collect();
        let window = arena.span(0, 0, bytes).map_err(RingError::from)?;
        let layers: Result<Vec<KvLayout>, _> =
            (0..geometry.layers).map(|layer| geometry.layer_layout(layer)).collect();
        Ok((engines?, window, layers?))
    };
    let (engines, window, layers) = match open() {
        Ok(parts) => parts,
        Err(error) => return report(opened, Err(error)),
    };
    let converter = match memory {
        KvMemory::Host(memory) => {
            Ok(Converter::Host { memory: memory.clone(), window: window.clone(), layers })
        }
        KvMemory::Gpu(memory) => (|| {
            let (kernels, bytes) = (&*memory.kernels, slot_bytes as u64);
            kernels.gpu().enter_own_thread()?;
            let mut staged = Staged::new(kernels, &memory.partition, bytes, crate::staged::WINDOW_BYTES)?;
            let layers = Converter::device_layouts(&layers, &memory.memory)?;
            layers.iter().try_for_each(|layer| staged.reserve(layer, half_slots))?;
            let window = HostMemory::register(kernels.gpu(), &window)?;
            Ok(Converter::Gpu { staged: Box::new(staged), window, layers })
        })(),
    };
    match converter {
        Err(error) => report(opened, Err(MoveError::Gpu(error))),
        Ok(converter) => {
            report(opened, Ok(()));
            let (halves, completions, broken) = ([Vec::new(), Vec::new()], Vec::new(), None);
            let mut worker =
                Worker { engines, converter, window, slot_bytes, half_slots, halves, completions, broken };
            while let Some((job, ready)) = jobs.take() {
                match ready {
                    Ok(()) => worker.run(&job),
                    Err(error) => fail(&job, &error),
                }
            }
        }
    }
}

fn report(opened: &SyncSender<Result<(), MoveError>>, result: Result<(), MoveError>) {
    // The other side waits for exactly this one.
    let _ = opened.send(result);
}

/// Ends all blocks of a request that cannot begin.
fn fail(job: &Job, error: &BlockError) {
    for block in 0..job.blocks.len() {
        if job.progress.start(1) {
            job.progress.end(block as u32, Err(error.clone()));
        }
    }
}

impl Worker<'_> {
    /// Runs a request. When it returns, no operation of the request is in flight, unless an engine has failed.
    fn run(&mut self, job: &Job) {
        let starts = (0..job.blocks.len()).step_by(self.half_slots);
        for (index, first) in starts.clone().enumerate() {
            self.begin(job, index % 2, first..(first + self.half_slots).min(job.blocks.len()));
            if index > 0 {
                self.complete(job, (index - 1) % 2);
            }
        }
        if let Some(last) = starts.count().checked_sub(1) {
            self.complete(job, last % 2);
        }
    }

    /// Starts the operations of some blocks in one half of the window; for a store, after their conversion.
    fn begin(&mut self, job: &Job, half: usize, blocks: Range<usize>) {
        let blocks = blocks.filter(|_| job.progress.start(1));
        let mut flights: Vec<Flight> = blocks.map(|block| Flight { block, result: None }).collect();
        let mut failed = self.broken.clone();
        if failed.is_none() && job.operation == Operation::Write && !flights.is_empty() {
            let jobs = self.copy_jobs(job, half, &flights);
            failed =
                self.converter.convert(job.operation, job.layer, &jobs).err().map(|error| error.to_string());
        }
        for (index, flight) in flights.iter_mut().enumerate() {
            flight.result = match &failed {
                Some(text) => Some(Err(BlockError::Failed(text.clone()))),
                None => self.submit(job, (half, index), flight.block).err().map(Err),
            };
        }
        self.halves[half] = flights;
        // Operations start with a reap.
        self.reap(Wait::No);
    }

    fn submit(&mut self, job: &Job, (half, index): (usize, usize), block: usize) -> Result<(), BlockError> {
        let failed = |text: String| BlockError::Failed(text);
        let place = &job.blocks[block];
        let offset = place.payload + (job.layer * self.slot_bytes) as u64;
        let at = (half * self.half_slots + index) * self.slot_bytes;
        let slot = self.window.slice(at, self.slot_bytes).map_err(|error| failed(error.to_string()))?;
        let op = match job.operation {
            Operation::Read => Op::Read { offset, into: vec![slot] },
            Operation::Write => Op::Write { offset, from: vec![slot] },
        };
        let token = Token((half as u64) << 32 | index as u64);
        let submitted = self.engines[place.device].submit(Submission { token, op });
        submitted.map_err(|_| failed("the queue of a device is full".to_owned()))
    }

    /// Waits for the operations of one half and ends its blocks; for a retrieval, after their conversion.
    fn complete(&mut self, job: &Job, half: usize) {
        while self.halves[half].iter().any(|flight| flight.result.is_none()) {
            if self.broken.is_some() {
                // Their memory may still be accessed: they are never reported as ended.
                break;
            }
            if !self.reap(Wait::No) {
                self.reap(Wait::Until(REAP_LIMIT));
            }
        }
        let mut flights = std::mem::take(&mut self.halves[half]);
        if job.operation == Operation::Read && !job.progress.is_over() {
            self.scatter(job, half, &mut flights);
        }
        for flight in flights {
            if let Some(result) = flight.result {
                job.progress.end(flight.block as u32, result);
            }
        }
    }

    /// Converts the blocks that were read.
    fn scatter(&mut self, job: &Job, half: usize, flights: &mut [Flight]) {
        let all = self.copy_jobs(job, half, flights);
        let is_read = |flight: &Flight| flight.result == Some(Ok(()));
        let jobs = flights.iter().zip(all).filter(|(flight, _)| is_read(flight)).map(|(_, job)| job);
        let jobs: Vec<CopyJob> = jobs.collect();
        if jobs.is_empty() {
            return;
        }
        if let Err(error) = self.converter.convert(job.operation, job.layer, &jobs) {
            for flight in flights.iter_mut().filter(|flight| is_read(flight)) {
                flight.result = Some(Err(BlockError::Failed(error.to_string())));
            }
        }
    }

    fn copy_jobs(&self, job: &Job, half: usize, flights: &[Flight]) -> Vec<CopyJob> {
        let slot = |index: usize| (half * self.half_slots + index) as u32;
        let of = |(index, flight): (usize, &Flight)| CopyJob {
            block: job.blocks[flight.block].slot as u32,
            slot: slot(index),
        };
        flights.iter().enumerate().map(of).collect()
    }

    /// Takes completions of all engines; waits for those of the first engine with operations. Returns whether there was
    /// one.
    fn reap(&mut self, wait: Wait) -> bool {
        let busy = self.engines.iter_mut().filter(|engine| engine.in_flight() > 0);
        let mut failed = None;
        for engine in busy {
            failed = failed.or(engine.reap(wait, &mut self.completions).err());
            if wait != Wait::No {
                break;
            }
        }
        let has_some = !self.completions.is_empty();
        for Completion { token: Token(token), result, .. } in self.completions.drain(..) {
            let (half, index) = ((token >> 32) as usize, token as u32 as usize);
            let result = result.map_err(|error| BlockError::Failed(error.to_string()));
            self.halves[half][index].result = Some(result);
        }
        if let Some(error) = failed {
            tracing::error!(%error, "an I/O engine of the backend has failed; open the backend again");
            self.broken = Some(format!("{error}; open the backend again"));
        }
        has_some
    }
}
