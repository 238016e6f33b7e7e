//! Time of a transfer, T = ℓ + n·S/β, and the bandwidth β as measured.

use std::time::Duration;

/// Latency of one read of an NVMe device (TierKV §3.5: 80 µs).
const NVME_LATENCY: Duration = Duration::from_micros(80);

/// Bandwidth before the first measurement: that of a slow device, so that too little is read ahead rather than too
/// much.
const INITIAL_BYTES_PER_SECOND: u64 = 1 << 30;

/// Smallest measurement that counts: fewer bytes show the latency rather than the bandwidth.
const SAMPLE_BYTES_MIN: u64 = 8 << 20;

/// Shortest busy time that counts.
const SAMPLE_TIME_MIN: Duration = Duration::from_millis(1);

/// Part by which the bandwidth decreases with each lower measurement. A measurement with a short queue is below
/// what the device can do; a device that became slow is believed after some tens of measurements.
const DECAY_DIVISOR: u64 = 16;

/// Latency and bandwidth of a path between two tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Time until the first byte.
    pub latency: Duration,
    /// Bytes per second behind it; above zero.
    pub bytes_per_second: u64,
}

/// Path to a device, whose bandwidth is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channel {
    path: Path,
}

impl Path {
    /// Time to transfer some bytes: T = ℓ + n·S/β.
    pub fn transfer_time(&self, bytes: u64) -> Duration {
        let micros = u128::from(bytes) * 1_000_000;
        let micros = micros.div_ceil(u128::from(self.bytes_per_second.max(1)));
        self.latency.saturating_add(Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
    }

    /// Bytes that arrive within a time, latency included.
    pub fn bytes_within(&self, time: Duration) -> u64 {
        self.bytes_in(time.saturating_sub(self.latency))
    }

    /// Bytes that the path carries in a time while it is busy.
    pub fn bytes_in(&self, time: Duration) -> u64 {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        // Divisions of 128 bits would take most of a pass.
        if let Some(product) = micros.checked_mul(self.bytes_per_second) {
            return product / 1_000_000;
        }
        let bytes = u128::from(micros) * u128::from(self.bytes_per_second) / 1_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

impl Default for Channel {
    fn default() -> Channel {
        Channel { path: Path { latency: NVME_LATENCY, bytes_per_second: INITIAL_BYTES_PER_SECOND } }
    }
}

impl Channel {
    /// Latency and bandwidth as measured so far.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Adds a measurement: bytes read while the device was busy for some time. Returns whether it counts; otherwise
    /// the caller adds it to the next one.
    pub fn observe(&mut self, bytes: u64, busy: Duration) -> bool {
        if bytes < SAMPLE_BYTES_MIN || busy < SAMPLE_TIME_MIN {
            return false;
        }
        let measured = u128::from(bytes) * 1_000_000 / busy.as_micros();
        let measured = u64::try_from(measured).unwrap_or(u64::MAX);
        let known = self.path.bytes_per_second;
        self.path.bytes_per_second = measured.max(known - known / DECAY_DIVISOR);
        true
    }
}
