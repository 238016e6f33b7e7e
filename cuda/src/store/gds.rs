//! The backend `gds`: cuFile moves layers between files and registered memory, usually of a GPU.
//!
//! Threads make the calls, which are synchronous. A call that runs beyond the deadline of its request cannot be
//! cancelled: it is given up until it ends.

mod cufile;

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::sync::Arc;

use crate::gpu::Gpu;
use crate::ring::Operation;
use crate::store::mover::{BlockError, MoveError};
use crate::store::pool::{Piece, PieceMover, PoolMover};
use crate::store::{BackendKind, KvGeometry, KvMemory};

pub use cufile::CuFile;
use cufile::{RegisteredFile, RegisteredRange};

/// Calls in flight: enough for one device at transfers of 32 KiB and more.
const THREADS: usize = 16;

/// Size of a page, of which objects must be multiples: cuFile would read and rewrite the others.
const PAGE: usize = reprise_io::IO_ALIGN;

/// Registered files and memory, and the threads that use them; see the module.
pub type GdsMover = PoolMover<Calls>;

impl GdsMover {
    /// Registers memory and files. The files must be open for direct I/O.
    ///
    /// # Errors
    /// `Invalid` if objects are not whole pages, or cuFile rejects the memory or a file, with the remedy; `Thread`.
    pub fn new(
        library: &Arc<CuFile>,
        geometry: KvGeometry,
        memory: &KvMemory,
        files: Vec<File>,
    ) -> Result<GdsMover, MoveError> {
        if geometry.object_bytes == 0 || !geometry.object_bytes.is_multiple_of(PAGE) {
            return Err(MoveError::Invalid(format!(
                "objects of {} bytes: cuFile needs whole pages of {PAGE} bytes; use more tokens per block",
                geometry.object_bytes
            )));
        }
        memory.check(&geometry)?;
        let gpu = match memory {
            KvMemory::Gpu(memory) => Some(memory.memory.gpu().clone()),
            KvMemory::Host(_) => None,
        };
        if let Some(gpu) = &gpu {
            gpu.enter()?;
        }
        let range = RegisteredRange::of(library, memory, geometry.bytes()).map_err(MoveError::Invalid)?;
        let mut sizes = Vec::new();
        let mut registered = Vec::new();
        for file in files {
            // Block devices report their size as the end of the file only.
            sizes.push((&file).seek(SeekFrom::End(0))?);
            registered.push(RegisteredFile::of(library, file).map_err(MoveError::Invalid)?);
        }
        let calls = Calls { gpu, range, files: registered };
        PoolMover::start(("gds", THREADS), geometry, sizes, calls)
    }
}

/// Registered files and memory of a [`GdsMover`].
#[derive(Debug)]
pub struct Calls {
    /// Its context must be current in a thread that calls cuFile.
    gpu: Option<Gpu>,
    files: Vec<RegisteredFile>,
    range: RegisteredRange,
}

impl PieceMover for Calls {
    const KIND: BackendKind = BackendKind::Gds;

    fn run(&self, operation: Operation, piece: &Piece) -> Result<(), BlockError> {
        if let Some(gpu) = &self.gpu {
            gpu.enter_own_thread().map_err(|error| BlockError::Failed(error.to_string()))?;
        }
        let file = &self.files[piece.device];
        file.transfer(operation, &self.range, piece).map_err(BlockError::Failed)
    }
}
