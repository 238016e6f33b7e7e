//! What devices read: bytes in flight, bytes read, and the time for which a device was busy.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_policy::Tick;

use crate::effect::DeviceId;

/// Reads of all devices. Device numbers are few, so entries stay.
#[derive(Debug, Default)]
pub(crate) struct DeviceReads {
    by_device: BTreeMap<DeviceId, Reads>,
}

/// Reads of one device at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceRate {
    pub(crate) device: DeviceId,
    /// Slot bytes of the blocks that are being read.
    pub(crate) in_flight_bytes: u64,
    /// Slot bytes of the blocks read so far.
    pub(crate) read_bytes: u64,
    /// Time so far in which at least one block was being read.
    pub(crate) busy: Duration,
}

#[derive(Debug, Default)]
struct Reads {
    in_flight_bytes: u64,
    read_bytes: u64,
    busy_before: Duration,
    /// Begin of the current busy time.
    busy_since: Tick,
}

/// How a read ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadEnd {
    Complete,
    Failed,
}

impl DeviceReads {
    /// Counts a read that begins.
    pub(super) fn begin(&mut self, device: DeviceId, slot_bytes: u64, now: Tick) {
        let reads = self.by_device.entry(device).or_default();
        if reads.in_flight_bytes == 0 {
            reads.busy_since = now;
        }
        reads.in_flight_bytes += slot_bytes;
    }

    /// Counts a read that has ended.
    pub(super) fn end(&mut self, device: DeviceId, slot_bytes: u64, now: Tick, end: ReadEnd) {
        let reads = self.by_device.entry(device).or_default();
        reads.in_flight_bytes -= slot_bytes;
        if end == ReadEnd::Complete {
            reads.read_bytes += slot_bytes;
        }
        if reads.in_flight_bytes == 0 {
            reads.busy_before += now.since(reads.busy_since);
        }
    }

    /// Returns the reads of each device that has read since the start.
    pub(crate) fn rates(&self, now: Tick) -> impl Iterator<Item = DeviceRate> {
        self.by_device.iter().map(move |(device, reads)| {
            let Reads { in_flight_bytes, read_bytes, busy_before, busy_since } = *reads;
            let current = if in_flight_bytes > 0 { now.since(busy_since) } else { Duration::ZERO };
            DeviceRate { device: *device, in_flight_bytes, read_bytes, busy: busy_before + current }
        })
    }

    /// Slot bytes of all blocks that are being read.
    pub(super) fn in_flight_bytes(&self) -> u64 {
        self.by_device.values().map(|reads| reads.in_flight_bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_busy_while_at_least_one_block_is_read() {
        let (mut reads, device) = (DeviceReads::default(), DeviceId(3));
        reads.begin(device, 10, Tick(100));
        reads.begin(device, 20, Tick(150));
        reads.end(device, 10, Tick(200), ReadEnd::Complete);
        let rate = |reads: &DeviceReads, now| reads.rates(Tick(now)).next().expect("it has read");
        assert_eq!(
            rate(&reads, 250),
            DeviceRate { device, in_flight_bytes: 20, read_bytes: 10, busy: Duration::from_micros(150) }
        );
        reads.end(device, 20, Tick(300), ReadEnd::Failed);
        assert_eq!(
            rate(&reads, 900),
            DeviceRate { device, in_flight_bytes: 0, read_bytes: 10, busy: Duration::from_micros(200) }
        );
    }
}
