//! Checks that a backend moves the right bytes: random stores and retrievals, compared with a model after each round.
//!
//! All backends run the same rounds of a seed, so their results are equal if none differs from the model.

mod rings;
mod streams;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use reprise_buffers::Span;

use crate::gpu::DeviceMemory;
use crate::gpu_bench::Random;
use crate::ring::{Operation, RingError};
use crate::store::mover::{LayerMover, LayerRequest, LayerTicket, MoveError, MoverCounters};
use crate::store::{BlockPlace, KvGeometry, KvOrder, RequestOrder};

pub use rings::EmulatedRings;
pub use streams::{StreamMemory, StreamWork, verify_streams};

/// Limit of a request: none must reach it.
const LIMIT: Duration = Duration::from_secs(60);

/// Gap in front of the payload of an extent, as a header page has.
const HEADER_BYTES: u64 = 4096;

/// Extents of each device.
const EXTENTS: u64 = 9;

/// Memory or a device whose bytes can be compared.
#[derive(Debug)]
pub enum Contents {
    /// Memory of this process.
    Host(Span),
    /// Memory of a GPU.
    Gpu(Arc<DeviceMemory>),
    /// A file; of a device that is accessed past the page cache, the kernel keeps both equal.
    File(File),
}

impl Contents {
    fn read(&self, bytes: usize) -> Result<Vec<u8>, MoveError> {
        let mut contents = vec![0; bytes];
        match self {
            Contents::Host(span) => span.read_at(0, &mut contents).map_err(RingError::from)?,
            Contents::Gpu(memory) => memory.read(0, &mut contents)?,
            Contents::File(file) => file.read_exact_at(&mut contents, 0)?,
        }
        Ok(contents)
    }

    fn write(&self, contents: &[u8]) -> Result<(), MoveError> {
        match self {
            Contents::Host(span) => span.write_at(0, contents).map_err(RingError::from)?,
            Contents::Gpu(memory) => memory.write(0, contents)?,
            Contents::File(file) => {
                file.write_all_at(contents, 0)?;
                file.sync_all()?;
            }
        }
        Ok(())
    }
}

/// Geometries of the layouts of engines: block-major, layer-major, K and V apart, and one part for each layer (MLA).
pub fn geometries(blocks: usize) -> [(&'static str, KvGeometry); 4] {
    let of = |parts, order| KvGeometry { layers: 3, parts, blocks, object_bytes: 8192, order };
    [
        ("block-major", of(2, KvOrder::BlockLayerPart)),
        ("layer-major", of(2, KvOrder::LayerBlockPart)),
        ("K/V split", of(2, KvOrder::LayerPartBlock)),
        ("MLA", of(1, KvOrder::LayerPartBlock)),
    ]
}

/// Returns the size that each device of [`verify_mover`] needs, in bytes.
pub fn device_bytes(geometry: &KvGeometry) -> u64 {
    EXTENTS * extent_bytes(geometry)
}

fn extent_bytes(geometry: &KvGeometry) -> u64 {
    HEADER_BYTES + (geometry.objects() * geometry.object_bytes) as u64
}

/// Bytes that memory and devices must have.
struct Model {
    geometry: KvGeometry,
    memory: Vec<u8>,
    devices: Vec<Vec<u8>>,
}

impl Model {
    fn apply(&mut self, operation: Operation, layer: usize, places: &[BlockPlace]) {
        let KvGeometry { parts, object_bytes, .. } = self.geometry;
        for place in places {
            for object in layer * parts..(layer + 1) * parts {
                let at = self.geometry.offset(object, place.slot) as usize;
                let memory = &mut self.memory[at..at + object_bytes];
                let at = place.payload as usize + object * object_bytes;
                let device = &mut self.devices[place.device][at..at + object_bytes];
                match operation {
                    Operation::Write => device.copy_from_slice(memory),
                    Operation::Read => memory.copy_from_slice(device),
                }
            }
        }
    }

    /// Compares memory and devices with the model.
    fn compare(&self, memory: &Contents, devices: &[Contents], round: &str) -> Result<(), MoveError> {
        let named = [("KV memory".to_owned(), memory, &self.memory)].into_iter();
        let of_device = |(index, (device, model))| (format!("device {index}"), device, model);
        let all = named.chain(devices.iter().zip(&self.devices).enumerate().map(of_device));
        for (name, contents, model) in all {
            let found = contents.read(model.len())?;
            if let Some(at) = found.iter().zip(model).position(|(found, expected)| found != expected) {
                return Err(MoveError::Invalid(format!(
                    "{round}: byte {at} of {name} is {:#x}, expected {:#x}",
                    found[at], model[at]
                )));
            }
        }
        Ok(())
    }
}

/// Runs random rounds: each moves all layers of some blocks in one direction, as one request for each layer.
///
/// # Errors
/// `Invalid` for a byte that differs, or a block that was not moved; errors of the mover.
pub fn verify_mover(
    mover: &mut dyn LayerMover,
    geometry: &KvGeometry,
    (memory, devices): (&Contents, &[Contents]),
    (seed, rounds): (u64, u64),
) -> Result<MoverCounters, MoveError> {
    let mut random = Random(seed);
    let mut random_bytes = |count: u64| {
        let mut bytes = vec![0; count as usize];
        random.fill(&mut bytes);
        bytes
    };
    let all = devices.iter().map(|_| random_bytes(device_bytes(geometry)));
    let devices_at_start: Vec<Vec<u8>> = all.collect();
    let mut model =
        Model { geometry: *geometry, memory: random_bytes(geometry.bytes()), devices: devices_at_start };
    memory.write(&model.memory)?;
    devices.iter().zip(&model.devices).try_for_each(|(device, bytes)| device.write(bytes))?;
    for number in 0..rounds {
        let operation = [Operation::Write, Operation::Read][random.below(2) as usize];
        let places = places(geometry, devices.len(), &mut random);
        let round = format!("{} round {number} of seed {seed}, {operation:?}", mover.name());
        let mut tickets: Vec<LayerTicket> = Vec::new();
        for layer in 0..geometry.layers {
            let request =
                LayerRequest { layer, blocks: &places, timeout: LIMIT, order: RequestOrder::Unordered };
            tickets.push(match operation {
                Operation::Write => mover.store_layer(&request)?,
                Operation::Read => mover.retrieve_layer(&request)?,
            });
            model.apply(operation, layer, &places);
        }
        // In the order of their enqueueing and in the opposite order.
        if number % 2 == 1 {
            tickets.reverse();
        }
        for ticket in tickets {
            let outcome = mover.wait(ticket)?;
            if let Some(failure) = outcome.failures.first() {
                return Err(MoveError::Invalid(format!(
                    "{round}: block {}: {}",
                    failure.block, failure.error
                )));
            }
        }
        model.compare(memory, devices, &round)?;
    }
    Ok(mover.counters())
}

/// Returns random blocks, each with its own extent.
fn places(geometry: &KvGeometry, devices: usize, random: &mut Random) -> Vec<BlockPlace> {
    let extents = random.permutation((devices as u64 * EXTENTS) as u32);
    let slots = random.permutation(geometry.blocks as u32);
    let count = 1 + random.below(slots.len().min(extents.len()) as u64) as usize;
    let place = |(extent, slot): (u32, u32)| BlockPlace {
        device: extent as usize % devices,
        payload: u64::from(extent) / devices as u64 * extent_bytes(geometry) + HEADER_BYTES,
        slot: slot as usize,
    };
    extents.into_iter().zip(slots).take(count).map(place).collect()
}
