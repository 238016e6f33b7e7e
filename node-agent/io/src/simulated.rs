//! A device in memory, for tests and simulations: latency, faults and crashes, all drawn from one seed.
//!
//! A test uses [`SimulatedDevice`] to inject faults, crash the device and inspect the medium.
//! [`SimulatedDevice::open_engine`] returns the [`IoEngine`](crate::IoEngine) for the code under test.
//!
//! The model is a disk with a volatile write cache behind a file system:
//!
//! * A completed write is visible to reads. It survives a crash if a sync was submitted after the write's
//!   completion was reaped, and that sync has completed.
//! * A power loss keeps, drops or tears each unsynced write independently, in any order, sector by sector. A
//!   write in flight counts as unsynced.
//! * Operations in flight complete in the order of their latencies, not of their submission. Their memory is
//!   read or written in one or more steps before completion.
//!
//! **Time** is virtual by default: `reap(Wait::No)` returns completions that are due at the virtual now;
//! `reap(Wait::Until(d))` jumps to the next completion, at most `d` ahead. Runs with the same seed and the
//! same calls are identical. With operations in flight that do not hang, `reap` never blocks in real time.
//! Otherwise it waits until a wake or the deadline. [`SimulatedClock::Real`] makes latencies real, for tests
//! of timeouts; it is not deterministic.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::device::FileAccess;
use crate::error::{IoError, IoErrorKind};
use crate::op::IO_ALIGN;

mod block_device;
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

/// Default size of the smallest unit that a crash writes whole; even the oldest disks guarantee it.
pub const SECTOR_BYTES_DEFAULT: u32 = 512;

/// Behaviour of the device without faults.
#[derive(Clone, Debug)]
pub struct SimulatedSettings {
    /// Seed of all random decisions.
    pub seed: u64,
    /// Maximum number of operations in flight.
    pub capacity: usize,
    /// Access mode of the device.
    pub access: FileAccess,
    /// Ranges of the durations of operations.
    pub latency: SimulatedLatency,
    /// One in this many steps of a transfer moves only a part; the rest takes a further latency. `None`: each
    /// transfer is one step.
    pub partial_one_in: Option<NonZeroU32>,
    /// Smallest unit that a crash keeps or drops whole; divides 4096.
    pub sector_bytes: u32,
    /// Kind of the device's clock.
    pub clock: SimulatedClock,
}

/// Ranges from which latencies are drawn evenly.
#[derive(Clone, Debug)]
pub struct SimulatedLatency {
    /// Latency of each step of a read.
    pub read: Range<Duration>,
    /// Latency of each step of a write.
    pub write: Range<Duration>,
    /// Latency of a sync.
    pub sync: Range<Duration>,
}

/// Kind of clock of a simulated device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimulatedClock {
    /// Time jumps when the engine waits or [`SimulatedDevice::advance`] is called.
    Virtual,
    /// The monotonic clock of the machine.
    Real,
}

/// Handle of a simulated device. Clones refer to the same device.
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
    /// Creates a device with the contents of `image`, all of it durable.
    ///
    /// # Errors
    /// `Invalid` for a capacity of zero or a sector size that does not divide 4096.
    pub fn new(image: Image, settings: SimulatedSettings) -> Result<SimulatedDevice, IoError> {
        let sector = settings.sector_bytes as usize;
        if settings.capacity == 0 {
            return Err(IoError::new(IoErrorKind::Invalid, "invalid capacity 0: expected at least 1"));
        }
        if sector == 0 || !IO_ALIGN.is_multiple_of(sector) {
            let text = format!("invalid sector size {sector}: expected a divisor of {IO_ALIGN}");
            return Err(IoError::new(IoErrorKind::Invalid, text));
        }
        Ok(SimulatedDevice { state: Arc::new(Mutex::new(State::new(image, settings))) })
    }

    /// Opens an engine on the device.
    ///
    /// # Errors
    /// `InUse` while another engine on it is alive; `Lost` after a crash: reopen on the surviving image.
    pub fn open_engine(&self) -> Result<SimulatedEngine, IoError> {
        SimulatedEngine::open(self)
    }

    /// Adds a fault; if several faults match, the first one added applies.
    pub fn inject(&self, fault: Fault) {
        self.lock().faults.push(fault);
    }

    /// Removes all injected faults.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    /// Executes the operations that [`FaultKind::Hang`] has held: their memory is written, even if it has a
    /// new owner. `reap` never returns a completion for them.
    pub fn release_hung(&self) {
        self.lock().release_hung();
    }

    /// Truncates the medium to `bytes`, as if the file was truncated behind the engine. Later reads and
    /// writes that reach beyond `bytes` fail at that offset.
    pub fn truncate(&self, bytes: u64) {
        self.lock().end = bytes;
    }

    /// Changes the contents of the medium silently: bit rot.
    pub fn corrupt(&self, change: impl FnOnce(&mut Image)) {
        self.lock().corrupt(change);
    }

    /// Returns the contents that a read would find now.
    pub fn image(&self) -> Image {
        self.lock().seen.clone()
    }

    /// Crashes the device and returns the surviving contents, chosen by the device's seed. Operations in
    /// flight and later submissions fail with `Lost`.
    pub fn crash(&self, mode: CrashMode) -> Image {
        self.lock().crash(mode)
    }

    /// Returns the virtual time (or the real time since the device was created).
    pub fn now(&self) -> Duration {
        self.lock().now()
    }

    /// Returns the time at which the next operation in flight is due.
    pub fn next_due(&self) -> Option<Duration> {
        self.lock().next_due()
    }

    /// Advances virtual time; the next `reap` returns the completions. No effect with a real clock.
    pub fn advance(&self, by: Duration) {
        self.lock().advance(by);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in a test's closure leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
