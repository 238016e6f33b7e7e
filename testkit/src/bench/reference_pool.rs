//! Bare io_uring loop over an agent's pool file: the reference of cold loads.
//!
//! The loop reads the payloads of the loaded blocks in the agent's own pool file, into as much memory as a load:
//! into 8 MiB it would measure the processor's cache where a virtual disk copies. Its buffers are 2 MiB pages, and its
//! depth is the best of several, determined first.

use std::num::NonZeroU32;
use std::path::Path;

use anyhow::{Context, ensure};
use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};
use reprise_io::bare::{self, BARE_BUFFERS_MAX, BareLoop};
use reprise_io::{DeviceFile, FileAccess, IfMissing};

use super::pool_file;
use super::report::median;
use crate::kv_function::mix;

/// Bytes of the largest operation: a block of 2 MiB.
const BLOCK_BYTES: u32 = 2 << 20;

/// Memory that the loop uses, the same as that of a cold load: two calls of 64 blocks in flight.
pub const REFERENCE_BYTES: u64 = 256 << 20;

/// Depths that are tried for reads of whole blocks, and for smaller ones.
const DEPTHS: [usize; 4] = [4, 8, 16, 32];
const DEPTHS_OF_OBJECTS: [usize; 4] = [16, 32, 64, 128];

/// Number of writes in flight.
const WRITE_DEPTH: usize = 16;

/// Input of the bare loop: the agent's pool, and [`REFERENCE_BYTES`] of memory in 2 MiB pages.
pub struct ReferencePool {
    pool: DeviceFile,
    _arena: Arena,
    memory: Span,
}

/// Returns the bytes per second at which a bare loop reads payloads of `payload_bytes` from an agent's pool,
/// at most `count` of them.
pub fn payload_read_rate(pool: &Path, payload_bytes: u64, count: usize) -> anyhow::Result<f64> {
    let payloads: Vec<u64> = pool_file::payloads(pool, payload_bytes)?.into_values().take(count).collect();
    ensure!(!payloads.is_empty(), "{} has no block of {payload_bytes} bytes", pool.display());
    let bytes = u64::from(BLOCK_BYTES).min(payload_bytes);
    let within = (0..payload_bytes).step_by(usize::try_from(bytes).context("a piece fits in memory")?);
    let offsets = payloads.iter().flat_map(|payload| within.clone().map(move |at| payload + at)).collect();
    let (offsets, bytes) = (shuffled(offsets), u32::try_from(bytes).expect("at most a block"));
    let bare = ReferencePool::new(pool)?;
    let depth = bare.best_depth(bytes, &offsets)?;
    Ok(bare.read(bytes, &offsets, depth)? * 1e9)
}

/// Returns the offsets in a shuffled order, always the same.
pub fn shuffled(mut offsets: Vec<u64>) -> Vec<u64> {
    offsets.sort_by_key(|offset| mix(*offset));
    offsets
}

impl ReferencePool {
    /// Opens an agent's pool file, and allocates and fills the memory.
    ///
    /// # Errors
    /// The file cannot be opened, or there is too little memory.
    pub fn new(pool: &Path) -> anyhow::Result<ReferencePool> {
        let pool = DeviceFile::open(pool, FileAccess::ReadUnlocked, IfMissing::Fail)
            .with_context(|| format!("opening {}", pool.display()))?;
        let bytes = REFERENCE_BYTES;
        let arena = Arena::new(&ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Prefer })
            .context("memory of the bare loop")?;
        let memory = arena.span(0, 0, bytes).context("memory of the bare loop")?;
        let pattern: Vec<u8> = (0..bytes / 8).flat_map(|index| mix(index).to_le_bytes()).collect();
        memory.copy_in(&pattern).context("filling the bare loop's memory")?;
        Ok(ReferencePool { pool, _arena: arena, memory })
    }

    /// Returns the depth with the highest rate of reads of `bytes` at these offsets.
    ///
    /// # Errors
    /// As [`ReferencePool::read`].
    pub fn best_depth(&self, bytes: u32, offsets: &[u64]) -> anyhow::Result<usize> {
        let depths: &[usize] = if bytes == BLOCK_BYTES { &DEPTHS } else { &DEPTHS_OF_OBJECTS };
        let mut best = (0.0, depths[0]);
        for depth in depths {
            let runs = [self.read(bytes, offsets, *depth)?, self.read(bytes, offsets, *depth)?];
            let rate = median(runs.to_vec());
            if rate > best.0 {
                best = (rate, *depth);
            }
        }
        Ok(best.1)
    }

    /// Reads `bytes` at each offset; returns GB/s.
    ///
    /// # Errors
    /// A failed read.
    pub fn read(&self, bytes: u32, offsets: &[u64], depth: usize) -> anyhow::Result<f64> {
        let buffers = self.buffers(bytes)?;
        let parameters = BareLoop {
            file: &self.pool,
            block_bytes: bytes,
            offsets,
            depth,
            buffers: &buffers,
            sync_every: None,
        };
        Ok(bare::read_loop(&parameters).context("the bare read loop")?.bytes_per_second() / 1e9)
    }

    /// Divides the whole memory into buffers of `bytes`.
    fn buffers(&self, bytes: u32) -> anyhow::Result<Vec<Span>> {
        let count = usize::try_from(REFERENCE_BYTES / u64::from(bytes)).expect("256 MiB fit in memory");
        Ok(bare::cut(&self.memory, bytes, count.min(BARE_BUFFERS_MAX))?)
    }

    /// Writes blocks of 2 MiB to the offsets of a file, with a sync after every `sync_every` of them, at once like the
    /// agent; returns GB/s.
    ///
    /// # Errors
    /// A failed write or sync.
    pub fn write(&self, file: &DeviceFile, offsets: &[u64], sync_every: NonZeroU32) -> anyhow::Result<f64> {
        let buffers = self.buffers(BLOCK_BYTES)?;
        let parameters = BareLoop {
            file,
            block_bytes: BLOCK_BYTES,
            offsets,
            depth: WRITE_DEPTH,
            buffers: &buffers,
            sync_every: Some(sync_every),
        };
        Ok(bare::write_loop(&parameters).context("the bare write loop")?.bytes_per_second() / 1e9)
    }
}
