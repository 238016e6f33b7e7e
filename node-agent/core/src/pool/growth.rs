//! Growth of a pool on a device that became larger.
//!
//! Segments are appended; blocks and both journal banks stay where they are. The number of blocks that the
//! checkpoint can contain also stays: see `docs/FORMAT.md`.
//!
//! Only the superblock changes, one copy after the other, each followed by a sync, before the pool uses the
//! new segments. So a crash leaves one copy with the former size or a torn one. Recovery takes the larger
//! intact copy, and the pool rewrites the other one.

use super::PoolUsage;
use super::device::DevicePool;
use super::geometry::SUPERBLOCK_OFFSETS;
use super::superblock::Superblock;

/// Growth of a pool that is planned and not applied yet.
#[derive(Clone, Debug)]
pub struct Growth {
    pub(super) superblock: Superblock,
    /// Bytes of the device before.
    pub bytes_before: u64,
    /// Bytes of the device that the pool uses afterwards.
    pub bytes_after: u64,
    /// Byte offsets and pages to write in this order, with a sync after each.
    pub writes: Vec<(u64, Vec<u8>)>,
}

impl DevicePool {
    /// Plans growth to a device of `device_bytes`; `None` if no further segment fits. Call it directly after
    /// recovery.
    pub fn plan_growth(&self, device_bytes: u64) -> Option<Growth> {
        let superblock =
            Superblock { geometry: self.superblock.geometry.grown(device_bytes)?, ..self.superblock };
        // A copy that must be rewritten anyway comes first, while the other one is intact.
        let bad = self.journal.superblock_repairs();
        let order = if bad[1] { [1, 0] } else { [0, 1] };
        let writes = order.map(|copy: usize| (SUPERBLOCK_OFFSETS[copy], superblock.encode()));
        Some(Growth {
            superblock,
            bytes_before: self.superblock.geometry.device_bytes,
            bytes_after: superblock.geometry.device_bytes,
            writes: writes.into(),
        })
    }

    /// Uses the additional segments of a planned growth whose writes are durable.
    pub fn apply_growth(&mut self, growth: &Growth) {
        assert!(
            growth.superblock.is_same_pool(&self.superblock),
            "a growth belongs to the pool that planned it"
        );
        self.superblock = growth.superblock;
        self.journal.set_superblock(&growth.superblock);
        self.slots.grow(growth.superblock.geometry.segments);
    }

    /// Bytes of the device that belong to the pool.
    pub fn device_bytes(&self) -> u64 {
        self.superblock.geometry.device_bytes
    }

    /// Payload bytes below which blocks cannot fill the device, because its checkpoint has too few entries.
    /// They grow with the device, while the checkpoint does not.
    pub fn payload_bytes_min(&self) -> u64 {
        let PoolUsage { capacity_bytes, entries_max, .. } = self.usage();
        capacity_bytes / entries_max
    }
}
