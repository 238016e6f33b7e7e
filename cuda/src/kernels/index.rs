//! The index of blocks on a GPU, for the comparison with one on the CPU ([`crate::index`]).

use std::ffi::c_void;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::Kernels;
use crate::gpu::{DeviceMemory, GpuError, Stream};
use crate::index::{CpuIndex, IndexEntry, IndexKey, IndexTimes, NO_PLACE, keys_of_seed, median};

/// Threads of a block, one for each key.
const THREADS: u32 = 128;

/// A table in GPU memory for the keys of requests, with buffers for the keys of one request.
#[derive(Debug)]
pub struct GpuIndex<'a> {
    kernels: &'a Kernels,
    insert: sys::CUfunction,
    find: sys::CUfunction,
    entries: DeviceMemory,
    mask: u64,
    keys: DeviceMemory,
    places: DeviceMemory,
    inserted: DeviceMemory,
    keys_max: usize,
}

impl<'a> GpuIndex<'a> {
    /// Creates a table with room for `keys` keys at a load of at most one half, for requests of `keys_max` keys.
    ///
    /// # Errors
    /// Too little GPU memory.
    pub fn with_room_for(
        kernels: &'a Kernels,
        keys: usize,
        keys_max: usize,
    ) -> Result<GpuIndex<'a>, GpuError> {
        let gpu = kernels.gpu();
        let count = (2 * keys.max(1)).next_power_of_two();
        let entries = DeviceMemory::with_contents(gpu, &vec![0; count * size_of::<IndexEntry>()])?;
        let room = keys_max.max(1) as u64;
        Ok(GpuIndex {
            kernels,
            insert: kernels.function("reprise_index_insert_kernel")?,
            find: kernels.function("reprise_index_find_kernel")?,
            entries,
            mask: count as u64 - 1,
            keys: DeviceMemory::new(gpu, room * size_of::<IndexKey>() as u64)?,
            places: DeviceMemory::new(gpu, room * 8)?,
            inserted: DeviceMemory::new(gpu, 8)?,
            keys_max: keys_max.max(1),
        })
    }

    /// Inserts keys with their places; returns how many had room. Waits for the end.
    ///
    /// # Errors
    /// More keys than `keys_max`, or not one place for each.
    pub fn insert(&self, stream: &Stream, keys: &[IndexKey], places: &[u64]) -> Result<usize, GpuError> {
        if keys.len() != places.len() {
            return Err(GpuError::Invalid(format!("{} keys with {} places", keys.len(), places.len())));
        }
        self.upload(keys)?;
        self.places.write(0, &places.iter().flat_map(|place| place.to_ne_bytes()).collect::<Vec<u8>>())?;
        self.inserted.write(0, &[0; 8])?;
        let mut inserted_at = self.inserted.address(0, 8)?;
        self.launch(stream, self.insert, keys.len(), Some(&mut inserted_at))?;
        stream.synchronize()?;
        let mut inserted = [0; 8];
        self.inserted.read(0, &mut inserted)?;
        Ok(u64::from_ne_bytes(inserted) as usize)
    }

    /// Returns the places of keys, [`NO_PLACE`] for those that are not there.
    ///
    /// # Errors
    /// More keys than `keys_max`.
    pub fn find(&self, stream: &Stream, keys: &[IndexKey]) -> Result<Vec<u64>, GpuError> {
        self.upload(keys)?;
        self.launch(stream, self.find, keys.len(), None)?;
        stream.synchronize()?;
        let mut places = vec![0_u8; keys.len() * 8];
        self.places.read(0, &mut places)?;
        let (words, _) = places.as_chunks::<8>();
        Ok(words.iter().map(|word| u64::from_ne_bytes(*word)).collect())
    }

    fn upload(&self, keys: &[IndexKey]) -> Result<(), GpuError> {
        if keys.is_empty() || keys.len() > self.keys_max {
            return Err(GpuError::Invalid(format!("{} keys: expected 1 to {}", keys.len(), self.keys_max)));
        }
        let bytes = keys.iter().flat_map(|key| [key.high, key.low]).flat_map(u64::to_ne_bytes);
        self.keys.write(0, &bytes.collect::<Vec<u8>>())
    }

    fn launch(
        &self,
        stream: &Stream,
        function: sys::CUfunction,
        count: usize,
        inserted_at: Option<&mut u64>,
    ) -> Result<(), GpuError> {
        let mut entries = self.entries.address(0, self.entries.bytes())?;
        let mut mask = self.mask;
        let mut keys = self.keys.address(0, self.keys.bytes())?;
        let mut places = self.places.address(0, self.places.bytes())?;
        let mut keys_count = count as u64;
        let mut parameters: Vec<*mut c_void> = vec![
            (&raw mut entries).cast(),
            (&raw mut mask).cast(),
            (&raw mut keys).cast(),
            (&raw mut places).cast(),
            (&raw mut keys_count).cast(),
        ];
        parameters.extend(inserted_at.map(|address| std::ptr::from_mut(address).cast::<c_void>()));
        let blocks = (count as u32).div_ceil(THREADS);
        // SAFETY: both kernels have these parameters, and insertion one more, which its caller passes. All arrays are
        // allocations of `self` with room for `keys_max` keys, and callers synchronize the stream before they end.
        unsafe { self.kernels.launch(stream, function, (blocks, 1, THREADS), &mut parameters) }
    }
}

/// Measures both designs for the keys of one request of `count` blocks, in indexes that hold `resident` others: the
/// CPU's map on one thread, and the GPU's table with the copies of keys and places that a request needs. Medians of
/// `repetitions`, each with other keys.
///
/// # Errors
/// Failures of the GPU; answers that differ between the two are `Invalid`.
pub fn compare_on_gpu(
    kernels: &Kernels,
    count: usize,
    resident: usize,
    repetitions: usize,
) -> Result<IndexTimes, GpuError> {
    let stream = Stream::new(kernels.gpu())?;
    let room = resident + count * repetitions;
    let table = GpuIndex::with_room_for(kernels, room, count.max(resident))?;
    let others = keys_of_seed(1, resident);
    let places: Vec<u64> = (0..resident.max(count) as u64).collect();
    let mut cpu: CpuIndex = others.iter().copied().zip(places.iter().copied()).collect();
    cpu.reserve(count * repetitions);
    if resident > 0 {
        table.insert(&stream, &others, &places[..resident])?;
    }
    let mut samples: [Vec<Duration>; 4] = Default::default();
    for repetition in 0..repetitions {
        let keys = keys_of_seed(2 + repetition as u64, count);
        let start = Instant::now();
        cpu.extend(keys.iter().copied().zip(places.iter().copied()));
        samples[0].push(start.elapsed());
        let start = Instant::now();
        let expected: Vec<u64> = keys.iter().map(|key| cpu.get(key).copied().unwrap_or(NO_PLACE)).collect();
        samples[1].push(start.elapsed());
        let start = Instant::now();
        let inserted = table.insert(&stream, &keys, &places[..count])?;
        samples[2].push(start.elapsed());
        let start = Instant::now();
        let found = table.find(&stream, &keys)?;
        samples[3].push(start.elapsed());
        if inserted != count || found != expected {
            return Err(GpuError::Invalid("the GPU's index gave other places than the CPU's".to_owned()));
        }
    }
    let [cpu_insert, cpu_find, gpu_insert, gpu_find] = samples.map(median);
    Ok(IndexTimes { keys: count, cpu_insert, cpu_find, gpu_insert, gpu_find })
}
