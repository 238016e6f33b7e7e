//! Choice of an engine for a device.

use std::sync::Arc;

use reprise_buffers::Region;

use crate::device::DeviceFile;
use crate::engine::IoEngine;
use crate::error::{IoError, IoErrorKind};
use crate::plain::PlainEngine;
use crate::uring::UringEngine;

/// Default number of operations in flight: 64 reads of 32 KiB or larger saturate the measured disks, and a
/// small load behind a large one still starts early.
pub const QUEUE_DEPTH_DEFAULT: u32 = 64;

/// Maximum number of operations in flight: the default limit of entries of one io_uring is 32,768, and this
/// is 32 times the deepest NVMe queue that helps.
pub const QUEUE_DEPTH_MAX: u32 = 16_384;

/// The engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring where the kernel supports it, otherwise plain.
    #[default]
    Auto,
    /// io_uring, or an error.
    IoUring,
    /// The plain engine only.
    Plain,
}

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Number of operations in flight, 1 to [`QUEUE_DEPTH_MAX`].
    pub queue_depth: u32,
    /// The engine to use.
    pub engine: EngineChoice,
    /// Arena regions to register with the ring. Operations may use other memory too.
    pub regions: Vec<Arc<Region>>,
}

impl Default for EngineSettings {
    fn default() -> EngineSettings {
        EngineSettings { queue_depth: QUEUE_DEPTH_DEFAULT, engine: EngineChoice::Auto, regions: Vec::new() }
    }
}

/// Opens an engine on a device, and logs its kind.
///
/// # Errors
/// `Invalid` for a depth outside its range; `Unsupported` when io_uring is required and the kernel rejects
/// it; `Unavailable` when the process is out of descriptors or threads.
pub fn open_engine(file: DeviceFile, settings: &EngineSettings) -> Result<Box<dyn IoEngine>, IoError> {
    let depth = settings.queue_depth;
    if depth == 0 || depth > QUEUE_DEPTH_MAX {
        let text = format!("invalid queue depth {depth}: expected 1 to {QUEUE_DEPTH_MAX}");
        return Err(IoError::new(IoErrorKind::Invalid, text));
    }
    let capacity = depth as usize;
    if settings.engine != EngineChoice::Plain {
        match UringEngine::prepare(&file, capacity) {
            Ok(ring) => return Ok(Box::new(UringEngine::new(file, ring, capacity, &settings.regions))),
            Err(error) if settings.engine == EngineChoice::IoUring => return Err(error),
            Err(error) => {
                let path = file.path().display();
                tracing::warn!(%path, %error, "io_uring is not available, using the slower plain engine");
            }
        }
    }
    tracing::info!(path = %file.path().display(), engine = "plain", capacity, caching = ?file.caching(), "device opened");
    Ok(Box::new(PlainEngine::new(file, capacity)?))
}
