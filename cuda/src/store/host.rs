//! The backend `host`: the CPU copies between slots in host memory, such as those of a session, and KV memory.

use reprise_buffers::{BufferError, Span};

use crate::ring::Operation;
use crate::store::mover::{BlockError, MoveError};
use crate::store::pool::{Piece, PieceMover, PoolMover};
use crate::store::{BackendKind, KvGeometry};

/// Threads that copy: two of them saturate a memory channel, and more would take cores from the engine.
const THREADS: usize = 2;

/// Bytes that are copied at once: they stay in the cache between load and store.
const CHUNK_BYTES: usize = 64 << 10;

/// Copies between regions of slots and KV memory. The regions are the devices of its places.
pub type HostMover = PoolMover<Copies>;

impl HostMover {
    /// Starts the threads.
    ///
    /// # Errors
    /// `Invalid` if KV memory or a region is not writable, or KV memory is too small; `Thread`.
    pub fn new(geometry: KvGeometry, memory: Span, regions: Vec<Span>) -> Result<HostMover, MoveError> {
        if (memory.len() as u64) < geometry.bytes() || !memory.is_writable() {
            return Err(MoveError::Invalid(format!(
                "KV memory of {} bytes: expected {} writable ones",
                memory.len(),
                geometry.bytes()
            )));
        }
        let sizes = regions.iter().map(|region| region.len() as u64).collect();
        PoolMover::start(("host-copy", THREADS), geometry, sizes, Copies { memory, regions })
    }
}

/// Regions and KV memory of a [`HostMover`].
#[derive(Debug)]
pub struct Copies {
    memory: Span,
    regions: Vec<Span>,
}

impl PieceMover for Copies {
    const KIND: BackendKind = BackendKind::Host;

    fn run(&self, operation: Operation, piece: &Piece) -> Result<(), BlockError> {
        let (kv, region) = (&self.memory, &self.regions[piece.device]);
        let (in_memory, on_device) = (piece.in_memory as usize, piece.on_device as usize);
        let copied = match operation {
            Operation::Write => copy((kv, in_memory), (region, on_device), piece.bytes as usize),
            Operation::Read => copy((region, on_device), (kv, in_memory), piece.bytes as usize),
        };
        copied.map_err(|error| BlockError::Failed(error.to_string()))
    }
}

fn copy(from: (&Span, usize), to: (&Span, usize), bytes: usize) -> Result<(), BufferError> {
    let mut buffer = vec![0; bytes.min(CHUNK_BYTES)];
    for at in (0..bytes).step_by(CHUNK_BYTES) {
        let chunk = &mut buffer[..CHUNK_BYTES.min(bytes - at)];
        from.0.read_at(from.1 + at, chunk)?;
        to.0.write_at(to.1 + at, chunk)?;
    }
    Ok(())
}
