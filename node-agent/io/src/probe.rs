//! I/O features that the kernel grants this process, for `reprise doctor`.

use std::fmt;
use std::sync::Arc;

use reprise_buffers::Region;

use crate::error::{IoError, IoErrorKind};
use crate::sys;
use crate::uring::{FixedBuffers, Ring};

/// Depth of the ring for probing.
const PROBE_DEPTH: usize = 64;

/// How a ring processes completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingMode {
    /// When the engine asks for them (DEFER_TASKRUN and SINGLE_ISSUER, Linux 6.1).
    DeferredTaskRun,
    /// At the engine's next system call (COOP_TASKRUN, Linux 5.19).
    CooperativeTaskRun,
    /// By interrupting the engine's thread.
    Interrupting,
}

/// Result of a call of [`probe`].
#[derive(Debug)]
pub struct IoProbe {
    /// The ring mode that engines will use, or the error for which io_uring is not available (the plain
    /// engine is then used).
    pub io_uring: Result<RingMode, IoError>,
    /// Number of registered buffers, or the error (each operation then maps its memory).
    pub registered_buffers: Result<usize, IoError>,
    /// Soft limit of locked memory in bytes, `None` when unlimited. It limits the registered buffers of
    /// processes without CAP_IPC_LOCK.
    pub memlock_limit: Option<u64>,
}

impl fmt::Display for RingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RingMode::DeferredTaskRun => "deferred task run",
            RingMode::CooperativeTaskRun => "cooperative task run",
            RingMode::Interrupting => "interrupting",
        })
    }
}

/// Tries to set up a ring with these regions as registered buffers.
pub fn probe(regions: &[Arc<Region>]) -> IoProbe {
    let memlock_limit = sys::memlock_limit();
    let ring = match Ring::set_up(PROBE_DEPTH) {
        Ok(ring) => ring,
        Err(error) => {
            let registered_buffers = Err(IoError::new(IoErrorKind::Unsupported, "io_uring is not available"));
            return IoProbe { io_uring: Err(error), registered_buffers, memlock_limit };
        }
    };
    let registered_buffers = FixedBuffers::register(&ring.uring, regions).map(|fixed| fixed.count());
    let registered_buffers = registered_buffers
        .map_err(|error| IoError::with_source(IoErrorKind::Unsupported, "registering buffers", error));
    IoProbe { io_uring: Ok(ring.mode), registered_buffers, memlock_limit }
}
