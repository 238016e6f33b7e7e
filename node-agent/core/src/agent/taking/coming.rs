//! What is on its way to the devices: taken and not fetched yet, being fetched to be saved, not durable yet.
//!
//! A block that is being written has its slot already and counts twice for as long as that takes: rather a block too few
//! is taken than one too many.

use std::collections::BTreeMap;

use super::super::tenants::{TenantIndex, nvme_bytes};

/// See the module. Bytes are those on a device, header pages included.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::agent) struct Coming {
    /// Of each tenant that has any.
    tenants: BTreeMap<TenantIndex, u64>,
    bytes: u64,
    blocks: u64,
    /// Blocks by their bytes.
    sizes: BTreeMap<u64, u64>,
}

impl Coming {
    /// One more block is on its way.
    pub(in crate::agent) fn enter(&mut self, tenant: TenantIndex, slot_bytes: u64) {
        let bytes = nvme_bytes(slot_bytes);
        *self.tenants.entry(tenant).or_default() += bytes;
        *self.sizes.entry(bytes).or_default() += 1;
        self.bytes += bytes;
        self.blocks += 1;
    }

    /// One is there, or will not come.
    pub(in crate::agent) fn leave(&mut self, tenant: TenantIndex, slot_bytes: u64) {
        let bytes = nvme_bytes(slot_bytes);
        let left = self.bytes_of(tenant).checked_sub(bytes).expect("whoever leaves has entered");
        if left == 0 {
            self.tenants.remove(&tenant);
        } else {
            self.tenants.insert(tenant, left);
        }
        let of_size = self.sizes.get_mut(&bytes).expect("whoever leaves has entered");
        *of_size -= 1;
        if *of_size == 0 {
            self.sizes.remove(&bytes);
        }
        self.bytes -= bytes;
        self.blocks -= 1;
    }

    /// Of all tenants.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a block, and how many of them there are.
    pub(super) fn sizes(&self) -> impl Iterator<Item = (u64, u64)> {
        self.sizes.iter().map(|(bytes, blocks)| (*bytes, *blocks))
    }

    /// Of one tenant.
    pub(super) fn bytes_of(&self, tenant: TenantIndex) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    /// Of all tenants.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }
}
