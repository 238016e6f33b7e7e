//! Device space that will be needed: accepted blocks, fetches of blocks to be saved, and unsaved blocks.
//!
//! A block that is being written has its slot already and is counted twice until the write ends. The estimate
//! thus errs on the safe side: it accepts a block too few, never one too many.

use std::collections::BTreeMap;

use crate::cache::accounts::{TenantIndex, nvme_bytes};

/// Device bytes and blocks that are pending, header pages included.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PendingSpace {
    /// Bytes of each tenant with pending blocks.
    tenants: BTreeMap<TenantIndex, u64>,
    bytes: u64,
    blocks: u64,
    /// Number of blocks by their size in bytes.
    sizes: BTreeMap<u64, u64>,
}

impl PendingSpace {
    /// Adds a pending block.
    pub(crate) fn add(&mut self, tenant: TenantIndex, slot_bytes: u64) {
        let bytes = nvme_bytes(slot_bytes);
        *self.tenants.entry(tenant).or_default() += bytes;
        *self.sizes.entry(bytes).or_default() += 1;
        self.bytes += bytes;
        self.blocks += 1;
    }

    /// Removes a block that is durable or was dropped.
    pub(crate) fn remove(&mut self, tenant: TenantIndex, slot_bytes: u64) {
        let bytes = nvme_bytes(slot_bytes);
        let left = self.bytes_of(tenant).checked_sub(bytes).expect("every removal follows an addition");
        if left == 0 {
            self.tenants.remove(&tenant);
        } else {
            self.tenants.insert(tenant, left);
        }
        let of_size = self.sizes.get_mut(&bytes).expect("every removal follows an addition");
        *of_size -= 1;
        if *of_size == 0 {
            self.sizes.remove(&bytes);
        }
        self.bytes -= bytes;
        self.blocks -= 1;
    }

    /// Pending bytes of all tenants.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Block sizes in bytes, each with the number of blocks.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (u64, u64)> {
        self.sizes.iter().map(|(bytes, blocks)| (*bytes, *blocks))
    }

    /// Pending bytes of one tenant.
    pub(super) fn bytes_of(&self, tenant: TenantIndex) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    /// Pending blocks of all tenants.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }
}
