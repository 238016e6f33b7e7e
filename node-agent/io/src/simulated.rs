//! A device in memory, for tests and simulations: latency, faults and crashes, all drawn from one seed.
//!
//! [`SimulatedDevice`] is the handle that a test keeps: it injects faults, pulls the plug and looks at the
//! medium. [`SimulatedDevice::open_engine`] gives the [`IoEngine`](crate::IoEngine) that the code under test drives.
//!
//! What it models, as a disk with a volatile write cache behind a file system:
//! * A write may be seen by reads once it completed, and survives a crash only once a sync, submitted after its
//!   completion was reaped, has completed.
//! * A power loss keeps, drops or tears each unsynced write for itself, in any order, sector by sector. A write in
//!   flight counts as unsynced.
//! * Operations in flight complete in the order of their latencies, not of their submission. Their memory is read or
//!   written in steps on the way; a transfer may take several.
//!
//! **Time** is virtual by default: `reap(Wait::No)` gives what is due at the virtual now; `reap(Wait::Until(d))`
//! jumps to the next completion, at most `d` ahead. With the same seed and the same calls, everything repeats exactly.
//! Only when nothing is in flight does a waiting `reap` really block, since nothing but a wake can end it early.
//! [`SimulatedClock::Real`] makes latencies real, for tests of timeouts; it is not deterministic.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::device::FileAccess;
use crate::error::{IoError, IoErrorKind};
use crate::op::IO_ALIGN;

mod crash;
mod engine;
mod fault;
mod image;
mod random;
mod state;

pub use crash::CrashMode;
pub use engine::SimulatedEngine;
pub use fault::{Fault, FaultKind, Trigger};
pub use image::Image;
use state::State;

/// Smallest unit that a crash writes whole, by default: what the oldest disks promise.
pub const SECTOR_BYTES_DEFAULT: u32 = 512;

/// How the device behaves when nothing is wrong.
#[derive(Clone, Debug)]
pub struct SimulatedSettings {
    /// Source of all chance.
    pub seed: u64,
    /// Operations in flight at once.
    pub capacity: usize,
    /// What may be done with it.
    pub access: FileAccess,
    /// How long operations take.
    pub latency: SimulatedLatency,
    /// One of this many transfers moves only a part at first and takes another latency for the rest.
    pub partial_one_in: Option<NonZeroU32>,
    /// Smallest unit that a crash keeps or drops whole; divides 4096.
    pub sector_bytes: u32,
    /// Whether latencies pass virtually or really.
    pub clock: SimulatedClock,
}

/// Ranges from which latencies are drawn evenly.
#[derive(Clone, Debug)]
pub struct SimulatedLatency {
    /// Of each step of a read.
    pub read: Range<Duration>,
    /// Of each step of a write.
    pub write: Range<Duration>,
    /// Of a sync.
    pub sync: Range<Duration>,
}

/// How time passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimulatedClock {
    /// By jumps, as the engine waits or [`SimulatedDevice::advance`] is called.
    Virtual,
    /// As on the wall.
    Real,
}

/// Handle on a simulated device. Clones name the same device.
#[derive(Clone, Debug)]
pub struct SimulatedDevice {
    state: Arc<Mutex<State>>,
}

impl Default for SimulatedSettings {
    fn default() -> SimulatedSettings {
        let micros = |range: Range<u64>| Duration::from_micros(range.start)..Duration::from_micros(range.end);
        SimulatedSettings {
            seed: 0,
            capacity: 64,
            access: FileAccess::ReadWrite,
            latency: SimulatedLatency {
                read: micros(60..400),
                write: micros(20..300),
                sync: micros(200..2_000),
            },
            partial_one_in: NonZeroU32::new(16),
            sector_bytes: SECTOR_BYTES_DEFAULT,
            clock: SimulatedClock::Virtual,
        }
    }
}

impl SimulatedDevice {
    /// A device that holds `image`, all of it durable.
    ///
    /// # Errors
    /// `Invalid` for a capacity of zero or a sector that does not divide a page.
    pub fn new(image: Image, settings: SimulatedSettings) -> Result<SimulatedDevice, IoError> {
        let sector = settings.sector_bytes as usize;
        if settings.capacity == 0 || sector == 0 || !IO_ALIGN.is_multiple_of(sector) {
            let text = format!("capacity {} or sector of {sector} bytes", settings.capacity);
            return Err(IoError::new(IoErrorKind::Invalid, text));
        }
        Ok(SimulatedDevice { state: Arc::new(Mutex::new(State::new(image, settings))) })
    }

    /// An engine on the device.
    ///
    /// # Errors
    /// `InUse` while another engine on it is alive; `Lost` after a crash: reopen on the surviving image.
    pub fn open_engine(&self) -> Result<SimulatedEngine, IoError> {
        SimulatedEngine::open(self)
    }

    /// Adds a fault; the earliest added that applies to an operation decides.
    pub fn inject(&self, fault: Fault) {
        self.lock().faults.push(fault);
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    /// Does at last what [`FaultKind::Hang`] has kept: memory is written, whoever owns it by now. No completion comes.
    pub fn let_go(&self) {
        self.lock().let_go();
    }

    /// Cuts the medium: from here on reads and writes that reach beyond `bytes` stop there, as when a file was
    /// truncated behind the engine's back.
    pub fn truncate(&self, bytes: u64) {
        self.lock().end = bytes;
    }

    /// Changes what is on the medium, unnoticed: bit rot.
    pub fn corrupt(&self, change: impl FnOnce(&mut Image)) {
        self.lock().corrupt(change);
    }

    /// What a read would find now.
    pub fn image(&self) -> Image {
        self.lock().seen.clone()
    }

    /// Crashes: gives what survives, chosen by the device's seed. Whatever is in flight or submitted later
    /// on this device fails with `Lost`.
    pub fn crash(&self, mode: CrashMode) -> Image {
        self.lock().crash(mode)
    }

    /// The virtual now (or the real time since the device was made).
    pub fn now(&self) -> Duration {
        self.lock().now()
    }

    /// When the next operation in flight is due.
    pub fn next_due(&self) -> Option<Duration> {
        self.lock().next_due()
    }

    /// Lets virtual time pass; completions are given by the next `reap`. Nothing happens with a real clock.
    pub fn advance(&self, by: Duration) {
        self.lock().advance(by);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in a test's closure leaves the state as whole as any other moment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
