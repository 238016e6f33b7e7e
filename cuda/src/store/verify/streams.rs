//! Checks of the order between requests and a stream: work of the stream before, between and after requests, without a
//! wait of the CPU in between.

use std::sync::Arc;
use std::time::Duration;

use reprise_buffers::Span;

use super::{Contents, LIMIT, Model, device_bytes, places};
use crate::gpu::{DeviceMemory, HostMemory, Stream};
use crate::gpu_bench::Random;
use crate::ring::{Operation, RingError};
use crate::store::mover::{LayerMover, LayerRequest, LayerTicket, MoveError, MoverCounters};
use crate::store::{EngineStream, HostStream, KvGeometry, RequestOrder};

/// Requests of a round at most, besides those of one pass over all layers.
const STEPS: u64 = 6;
/// Longest pause of emulated work.
const PAUSE_MAX_US: u64 = 300;

/// A stream whose work accesses KV memory, and memory for snapshots of it.
#[derive(Debug)]
pub enum StreamWork {
    /// An emulated stream, with KV memory of this process.
    Host {
        /// The stream.
        stream: HostStream,
        /// KV memory.
        memory: Span,
        /// Room for a snapshot in each step.
        snapshots: Span,
    },
    /// A stream of a GPU, with KV memory of that GPU.
    Gpu {
        /// The stream.
        stream: Arc<Stream>,
        /// The same stream for requests: created before rings start a kernel, and dropped after it.
        engine: EngineStream,
        /// KV memory.
        memory: StreamMemory,
        /// Room for a snapshot in each step.
        snapshots: Arc<DeviceMemory>,
    },
}

/// KV memory that a stream of a GPU accesses.
#[derive(Debug)]
pub enum StreamMemory {
    /// Memory of the GPU.
    Device(Arc<DeviceMemory>),
    /// Memory of the host, as emulated controllers reach it.
    Host {
        /// KV memory, registered for the GPU.
        memory: HostMemory,
        /// Room for an object, from which the stream copies.
        scratch: DeviceMemory,
    },
}

impl StreamWork {
    /// Returns the bytes of snapshots for a geometry.
    pub fn snapshot_bytes(geometry: &KvGeometry) -> u64 {
        (STEPS + geometry.layers as u64) * geometry.bytes()
    }

    fn engine_stream(&self) -> EngineStream {
        match self {
            StreamWork::Host { stream, .. } => EngineStream::on_host(stream),
            StreamWork::Gpu { engine, .. } => engine.clone(),
        }
    }

    /// Enqueues a fill of KV memory; emulated work takes a random time.
    fn fill(&self, (offset, bytes): (u64, u64), value: u8, pause: Duration) -> Result<(), MoveError> {
        match self {
            StreamWork::Host { stream, memory, .. } => {
                let target = memory.slice(offset as usize, bytes as usize).map_err(RingError::from)?;
                stream.launch(move || {
                    std::thread::sleep(pause);
                    // A missing write is found by the comparison.
                    let _ = target.write_at(0, &vec![value; target.len()]);
                });
            }
            StreamWork::Gpu { stream, memory: StreamMemory::Device(memory), .. } => {
                stream.fill((memory, offset), bytes, value)?;
            }
            StreamWork::Gpu { stream, memory: StreamMemory::Host { memory, scratch }, .. } => {
                stream.fill((scratch, 0), bytes, value)?;
                stream.copy_to_host((scratch, 0), (memory, offset), bytes)?;
            }
        }
        Ok(())
    }

    /// Enqueues a copy of all KV memory.
    fn snapshot(&self, index: u64, bytes: u64) -> Result<(), MoveError> {
        match self {
            StreamWork::Host { stream, memory, snapshots } => {
                let (from, to) = (memory.clone(), snapshots.clone());
                stream.launch(move || {
                    let mut copy = vec![0; bytes as usize];
                    // A missing copy is found by the comparison.
                    let _ = from
                        .read_at(0, &mut copy)
                        .and_then(|()| to.write_at((index * bytes) as usize, &copy));
                });
            }
            StreamWork::Gpu { stream, memory, snapshots, .. } => match memory {
                StreamMemory::Device(memory) => {
                    stream.copy_on_device((memory, 0), (snapshots, index * bytes), bytes)?;
                }
                StreamMemory::Host { memory, .. } => {
                    stream.copy_to_device((memory, 0), (snapshots, index * bytes), bytes)?;
                }
            },
        }
        Ok(())
    }

    /// Waits for the stream, and returns snapshots.
    fn finish(&self, bytes: u64) -> Result<Vec<u8>, MoveError> {
        let mut found = vec![0; bytes as usize];
        match self {
            StreamWork::Host { stream, snapshots, .. } => {
                stream.synchronize();
                snapshots.read_at(0, &mut found).map_err(RingError::from)?;
            }
            StreamWork::Gpu { stream, snapshots, .. } => {
                stream.synchronize()?;
                snapshots.read(0, &mut found)?;
            }
        }
        Ok(found)
    }
}

/// A round: requests and work of the stream, and what each snapshot must be.
struct Round<'a> {
    mover: &'a mut dyn LayerMover,
    work: &'a StreamWork,
    stream: &'a EngineStream,
    model: &'a mut Model,
    devices: usize,
    random: Random,
    tickets: Vec<LayerTicket>,
    expected: Vec<u8>,
}

impl Round<'_> {
    /// Fills an object, and moves a layer of random blocks in the order of the stream.
    fn step(&mut self) -> Result<(), MoveError> {
        let geometry = self.model.geometry;
        let layer = self.random.below(geometry.layers as u64) as usize;
        let operation = [Operation::Write, Operation::Read][self.random.below(2) as usize];
        let blocks = places(&geometry, self.devices, &mut self.random);
        self.fill(layer)?;
        let request =
            LayerRequest { layer, blocks: &blocks, timeout: LIMIT, order: RequestOrder::On(self.stream) };
        self.tickets.push(self.mover.submit(operation, &request)?);
        self.model.apply(operation, layer, &blocks);
        self.snapshot()?;
        // Later work overwrites moved bytes.
        self.fill(layer)
    }

    /// Retrieves all layers at once; the stream waits for each layer before the work that uses it.
    fn pass(&mut self) -> Result<(), MoveError> {
        let geometry = self.model.geometry;
        let blocks = places(&geometry, self.devices, &mut self.random);
        let point = self.stream.mark()?;
        let mut tickets = Vec::new();
        for layer in 0..geometry.layers {
            let order = RequestOrder::After(&point);
            let request = LayerRequest { layer, blocks: &blocks, timeout: LIMIT, order };
            tickets.push(self.mover.retrieve_layer(&request)?);
        }
        for (layer, ticket) in tickets.into_iter().enumerate() {
            self.mover.delay_stream(ticket, self.stream)?;
            self.model.apply(Operation::Read, layer, &blocks);
            self.fill(layer)?;
            self.tickets.push(ticket);
        }
        self.snapshot()
    }

    fn fill(&mut self, layer: usize) -> Result<(), MoveError> {
        let KvGeometry { parts, object_bytes, blocks, .. } = self.model.geometry;
        let object = layer * parts + self.random.below(parts as u64) as usize;
        let at = self.model.geometry.offset(object, self.random.below(blocks as u64) as usize);
        let value = self.random.below(256) as u8;
        self.model.memory[at as usize..][..object_bytes].fill(value);
        let pause = Duration::from_micros(self.random.below(PAUSE_MAX_US));
        self.work.fill((at, object_bytes as u64), value, pause)
    }

    fn snapshot(&mut self) -> Result<(), MoveError> {
        let bytes = self.model.geometry.bytes();
        let index = self.expected.len() as u64 / bytes;
        self.expected.extend(&self.model.memory);
        self.work.snapshot(index, bytes)
    }
}

/// Runs random rounds on a stream: fills, stores, retrievals and snapshots, with one wait of the CPU at the end of each.
///
/// # Errors
/// `Invalid` for a byte that differs, or a block that was not moved; errors of the mover and of the GPU.
pub fn verify_streams(
    mover: &mut dyn LayerMover,
    geometry: &KvGeometry,
    (memory, devices): (&Contents, &[Contents]),
    work: &StreamWork,
    (seed, rounds): (u64, u64),
) -> Result<MoverCounters, MoveError> {
    let stream = work.engine_stream();
    let mut random = Random(seed);
    let mut random_bytes = |count: u64| {
        let mut bytes = vec![0; count as usize];
        random.fill(&mut bytes);
        bytes
    };
    let at_start = devices.iter().map(|_| random_bytes(device_bytes(geometry))).collect();
    let mut model = Model { geometry: *geometry, memory: random_bytes(geometry.bytes()), devices: at_start };
    memory.write(&model.memory)?;
    devices.iter().zip(&model.devices).try_for_each(|(device, bytes)| device.write(bytes))?;
    for number in 0..rounds {
        let name = format!("{} stream round {number} of seed {seed}", mover.name());
        let (tickets, expected) = (Vec::new(), Vec::new());
        let random = Random(random.draw());
        let (model, devices_count) = (&mut model, devices.len());
        let mut round = Round {
            mover: &mut *mover,
            work,
            stream: &stream,
            model: &mut *model,
            devices: devices_count,
            random,
            tickets,
            expected,
        };
        for _ in 0..STEPS {
            round.step()?;
        }
        round.pass()?;
        let Round { tickets, expected, .. } = round;
        let found = work.finish(expected.len() as u64)?;
        if let Some(at) = found.iter().zip(&expected).position(|(found, expected)| found != expected) {
            let (snapshot, byte) = (at as u64 / geometry.bytes(), at as u64 % geometry.bytes());
            return Err(MoveError::Invalid(format!(
                "{name}: byte {byte} of snapshot {snapshot} is {:#x}, expected {:#x}",
                found[at], expected[at]
            )));
        }
        for ticket in tickets {
            if let Some(failure) = mover.wait(ticket)?.failures.first() {
                return Err(MoveError::Invalid(format!(
                    "{name}: block {}: {}",
                    failure.block, failure.error
                )));
            }
        }
        model.compare(memory, devices, &name)?;
    }
    Ok(mover.counters())
}
