//! The backend `host`: the CPU copies between slots in host memory, such as those of a session, and KV memory.

use reprise_buffers::{BufferError, Span};

use crate::ring::Operation;
use crate::store::mover::{
    BlockError, LayerMover, LayerOutcome, LayerRequest, LayerTicket, MoveError, MoverCounters,
};
use crate::store::pool::{Piece, PieceMover, Pool};
use crate::store::{Backend, BackendKind, KvGeometry};

/// Threads that copy: two of them saturate a memory channel, and more would take cores from the engine.
const THREADS: usize = 2;

/// Bytes that are copied at once: they stay in the cache between load and store.
const CHUNK_BYTES: usize = 64 << 10;

/// Copies between regions of slots and KV memory. The regions are the devices of its places.
#[derive(Debug)]
pub struct HostMover {
    pool: Pool,
}

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
        let pool = Pool::start(("host-copy", THREADS), geometry, sizes, Copies { memory, regions })?;
        Ok(HostMover { pool })
    }
}

impl Backend for HostMover {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn is_emulated(&self) -> bool {
        false
    }
}

impl LayerMover for HostMover {
    fn submit(&mut self, operation: Operation, request: &LayerRequest<'_>) -> Result<LayerTicket, MoveError> {
        self.pool.submit(operation, request)
    }

    fn poll(&mut self, ticket: LayerTicket) -> Result<Option<LayerOutcome>, MoveError> {
        self.pool.poll(ticket)
    }

    fn wait(&mut self, ticket: LayerTicket) -> Result<LayerOutcome, MoveError> {
        self.pool.wait(ticket)
    }

    fn given_up(&self) -> usize {
        self.pool.given_up()
    }

    fn counters(&self) -> MoverCounters {
        self.pool.counters()
    }
}

struct Copies {
    memory: Span,
    regions: Vec<Span>,
}

impl PieceMover for Copies {
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
