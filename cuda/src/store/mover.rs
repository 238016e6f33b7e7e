//! The trait of all backends: one bulk call moves one layer of many blocks.
//!
//! A call only enqueues. It returns a ticket, which is polled or waited for. Requests of one mover run in any order: a
//! request that depends on another one is made after the end of that one, or both are ordered by one stream of the engine
//! ([`RequestOrder`]).
//!
//! A request ends when all its blocks have ended, or at its deadline. Blocks that have not ended by then are reported as
//! timed out. The device may still access their memory and extents until [`LayerMover::given_up`] returns 0.

use std::time::Duration;

use reprise_io::IoError;

use crate::gpu::GpuError;
use crate::ring::{Operation, RingError};
use crate::store::{Backend, BlockPlace, EngineStream, KvGeometry, RequestOrder};

/// Maximum number of requests of a mover whose ends were not taken: several models of 126 layers.
pub const REQUESTS_MAX: usize = 1024;

/// One layer of some blocks.
#[derive(Clone, Copy, Debug)]
pub struct LayerRequest<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// The blocks; [`BlockPlace::device`] is an index of the mover's devices.
    pub blocks: &'a [BlockPlace],
    /// Limit from the call on.
    pub timeout: Duration,
    /// Order of the request and work of the engine's streams.
    pub order: RequestOrder<'a>,
}

/// A request whose end was not taken yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerTicket(pub(super) u64);

/// Why a block was not moved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// The block has not ended by the deadline of the request.
    #[error("not moved by the deadline")]
    TimedOut,
    /// Device, library or copy has failed.
    #[error("{0}")]
    Failed(String),
}

/// A block that was not moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockFailure {
    /// Index of the block in the request.
    pub block: usize,
    /// The first error of its transfers.
    pub error: BlockError,
}

/// End of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerOutcome {
    /// Number of blocks of the request.
    pub blocks: usize,
    /// Blocks that were not moved, in order, each once. The contents of their memory or extents are unspecified.
    pub failures: Vec<BlockFailure>,
}

impl LayerOutcome {
    /// Reports whether all blocks were moved.
    pub fn is_complete(&self) -> bool {
        self.failures.is_empty()
    }
}

/// Work of a mover since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoverCounters {
    /// Requests whose ends were taken.
    pub requests: u64,
    /// Blocks of these requests.
    pub blocks: u64,
    /// Blocks of them that were not moved.
    pub failed_blocks: u64,
    /// Bytes of the blocks that were moved.
    pub bytes: u64,
}

/// A request that was not accepted, or a mover that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoveError {
    /// The caller has asked for something invalid.
    #[error("{0}")]
    Invalid(String),
    /// Too many requests are open.
    #[error("{REQUESTS_MAX} requests of layers are open: poll or wait for some first")]
    Busy,
    /// Too many waits of a stream are open.
    #[error("all words of a stream have an open wait: wait for some requests first")]
    StreamBusy,
    /// The end of the request was taken already.
    #[error("unknown ticket of a layer: its end was taken, or it is of another mover")]
    UnknownTicket,
    /// A ring has failed.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A GPU has failed.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A device cannot be opened.
    #[error(transparent)]
    Io(#[from] IoError),
    /// A thread could not be started.
    #[error("cannot start a thread of a backend: {0}")]
    Thread(#[from] std::io::Error),
}

/// An open backend; see the module. One thread uses it.
pub trait LayerMover: Backend + std::fmt::Debug {
    /// Enqueues one layer of some blocks, in the direction of the operation.
    ///
    /// # Errors
    /// `Invalid` for a layer, block or device that does not exist, and a place outside of its device; `Busy`.
    fn submit(&mut self, operation: Operation, request: &LayerRequest<'_>) -> Result<LayerTicket, MoveError>;

    /// Enqueues the store of one layer: from KV memory to the places of the blocks.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    fn store_layer(&mut self, request: &LayerRequest<'_>) -> Result<LayerTicket, MoveError> {
        self.submit(Operation::Write, request)
    }

    /// Enqueues the retrieval of one layer: from the places of the blocks to KV memory.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    fn retrieve_layer(&mut self, request: &LayerRequest<'_>) -> Result<LayerTicket, MoveError> {
        self.submit(Operation::Read, request)
    }

    /// Delays later work of a stream until the end of a request, without a wait of the CPU.
    ///
    /// The stream continues when the request has ended, failed or reached its deadline, and when the mover is dropped. Only
    /// the outcome of the ticket states which blocks have arrived: take it before results of that work are used.
    ///
    /// # Errors
    /// `UnknownTicket`; `StreamBusy`; `Gpu`; `Thread`.
    fn delay_stream(&mut self, ticket: LayerTicket, stream: &EngineStream) -> Result<(), MoveError>;

    /// Takes the end of a request; `None` if it has not ended.
    ///
    /// # Errors
    /// `UnknownTicket`.
    fn poll(&mut self, ticket: LayerTicket) -> Result<Option<LayerOutcome>, MoveError>;

    /// Waits for the end of a request, until its deadline at most, and takes it.
    ///
    /// # Errors
    /// `UnknownTicket`.
    fn wait(&mut self, ticket: LayerTicket) -> Result<LayerOutcome, MoveError>;

    /// Returns the number of transfers of ended requests that may still access KV memory or devices. Memory and extents
    /// of blocks that have timed out may have another use when it is 0.
    fn given_up(&self) -> usize;

    /// Returns the work of the mover so far.
    fn counters(&self) -> MoverCounters;
}

/// Checks that layer, blocks and devices of a request exist, and that places are inside of devices of these sizes.
pub(super) fn check(
    geometry: &KvGeometry,
    devices: &[Option<u64>],
    request: &LayerRequest<'_>,
) -> Result<(), MoveError> {
    let invalid = |text: String| Err(MoveError::Invalid(text));
    if request.layer >= geometry.layers {
        return invalid(format!("layer {}: there are {}", request.layer, geometry.layers));
    }
    let bytes = (geometry.objects() * geometry.object_bytes) as u64;
    for place in request.blocks {
        if place.slot >= geometry.blocks {
            return invalid(format!("block {} of KV memory: there are {}", place.slot, geometry.blocks));
        }
        let Some(Some(size)) = devices.get(place.device) else {
            return invalid(format!("no device {} of the backend", place.device));
        };
        if place.payload.checked_add(bytes).is_none_or(|end| end > *size) {
            return invalid(format!(
                "{bytes} bytes at {}: device {} has {size}",
                place.payload, place.device
            ));
        }
    }
    Ok(())
}
