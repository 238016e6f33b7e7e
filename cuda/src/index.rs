//! An index of blocks as a GPU would keep it, next to one on the CPU (Tutti, Fig. 3).
//!
//! Reprise keeps its index on the CPU: it is asked for the keys of one request at a time, which is too little work for a
//! GPU. [`compare_on_host`] measures both designs on one thread of the host build; on a GPU, the kernels in
//! `native/index_kernel.cuh` run the same code with one thread per key.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

use crate::gpu_bench::Random;

/// Answer for a key that is not in the index.
pub const NO_PLACE: u64 = u64::MAX;

/// Entry of the table, as in `native/index.h`: key, place, state; all zeros if empty.
#[repr(C, align(32))]
#[derive(Clone, Copy, Debug, Default)]
pub struct IndexEntry {
    key: IndexKey,
    place: u64,
    state: u32,
    unused: u32,
}

const _: () = assert!(size_of::<IndexEntry>() == 32);

/// Key of a block, 16 uniform bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct IndexKey {
    /// First 8 bytes.
    pub high: u64,
    /// Last 8 bytes, which are the hash.
    pub low: u64,
}

unsafe extern "C" {
    fn reprise_index_insert(
        entries: *mut IndexEntry,
        mask: u64,
        keys: *const IndexKey,
        places: *const u64,
        count: u64,
    ) -> u64;
    fn reprise_index_find(
        entries: *const IndexEntry,
        mask: u64,
        keys: *const IndexKey,
        places: *mut u64,
        count: u64,
    );
}

/// The table of the host build: open addressing with a power of two of entries.
#[derive(Debug)]
pub struct HostIndex {
    entries: Vec<IndexEntry>,
}

impl HostIndex {
    /// Creates a table with room for `keys` keys at a load of at most one half.
    pub fn with_room_for(keys: usize) -> HostIndex {
        let entries = (2 * keys.max(1)).next_power_of_two();
        HostIndex { entries: vec![IndexEntry::default(); entries] }
    }

    fn mask(&self) -> u64 {
        self.entries.len() as u64 - 1
    }

    /// Inserts keys with their places, or replaces the places; returns how many keys had room. Panics if the slices
    /// differ in length.
    pub fn insert(&mut self, keys: &[IndexKey], places: &[u64]) -> usize {
        assert_eq!(keys.len(), places.len(), "each key has a place");
        let mask = self.mask();
        // SAFETY: all three arrays have the stated lengths, `mask + 1` is the number of entries, and `&mut self` excludes
        // other users of the entries.
        let inserted = unsafe {
            reprise_index_insert(
                self.entries.as_mut_ptr(),
                mask,
                keys.as_ptr(),
                places.as_ptr(),
                keys.len() as u64,
            )
        };
        inserted as usize
    }

    /// Returns the places of keys, [`NO_PLACE`] for those that are not there.
    pub fn find(&self, keys: &[IndexKey]) -> Vec<u64> {
        let mut places = vec![0; keys.len()];
        // SAFETY: the arrays have the stated lengths, and `mask + 1` is the number of entries, which `&self` protects from changes.
        unsafe {
            reprise_index_find(
                self.entries.as_ptr(),
                self.mask(),
                keys.as_ptr(),
                places.as_mut_ptr(),
                keys.len() as u64,
            );
        }
        places
    }
}

/// A hash of uniform keys: their last 8 bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct LowBytes(u64);

impl Hasher for LowBytes {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        // `low` is hashed last.
        self.0 = value;
    }
}

/// The index on the CPU: a hash map of the standard library, with the keys as their own hashes.
pub type CpuIndex = HashMap<IndexKey, u64, BuildHasherDefault<LowBytes>>;

/// Times of the two designs for the keys of one request.
#[derive(Clone, Copy, Debug)]
pub struct IndexTimes {
    /// Keys of the request.
    pub keys: usize,
    /// Insertion of all keys into the index on the CPU.
    pub cpu_insert: Duration,
    /// Search for all keys in the index on the CPU.
    pub cpu_find: Duration,
    /// Insertion with the code of the other design.
    pub gpu_insert: Duration,
    /// Search with the code of the other design.
    pub gpu_find: Duration,
}

/// Draws uniform keys from a seed, for measurements.
pub fn keys_of_seed(seed: u64, count: usize) -> Vec<IndexKey> {
    let mut random = Random(seed);
    (0..count).map(|_| IndexKey { high: random.draw(), low: random.draw() }).collect()
}

/// Measures both designs on one thread: the keys of one request of `count` blocks, in indexes that hold `resident`
/// others. Medians of `repetitions`, each with other keys.
pub fn compare_on_host(count: usize, resident: usize, repetitions: usize) -> IndexTimes {
    let others = keys_of_seed(1, resident);
    let places: Vec<u64> = (0..resident.max(count) as u64).collect();
    let mut cpu: CpuIndex = others.iter().copied().zip(places.iter().copied()).collect();
    cpu.reserve(count * repetitions);
    let mut table = HostIndex::with_room_for(resident + count * repetitions);
    table.insert(&others, &places[..resident]);
    let mut samples: [Vec<Duration>; 4] = Default::default();
    for repetition in 0..repetitions {
        let keys = keys_of_seed(2 + repetition as u64, count);
        samples[0].push(timed(|| cpu.extend(keys.iter().copied().zip(places.iter().copied()))));
        let mut found = vec![0; count];
        samples[1].push(timed(|| {
            for (found, key) in found.iter_mut().zip(&keys) {
                *found = cpu.get(key).copied().unwrap_or(NO_PLACE);
            }
        }));
        let mut inserted = 0;
        samples[2].push(timed(|| inserted = table.insert(&keys, &places[..count])));
        let mut same = Vec::new();
        samples[3].push(timed(|| same = table.find(&keys)));
        assert_eq!((inserted, &same), (count, &found), "both indexes give the same places");
    }
    let [cpu_insert, cpu_find, gpu_insert, gpu_find] = samples.map(median);
    IndexTimes { keys: count, cpu_insert, cpu_find, gpu_insert, gpu_find }
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

pub(crate) fn median(mut samples: Vec<Duration>) -> Duration {
    samples.sort();
    samples.get(samples.len() / 2).copied().unwrap_or_default()
}
