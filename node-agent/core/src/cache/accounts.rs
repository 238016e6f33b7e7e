//! Accounts of tenants: their use of this node's DRAM and NVMe, and their quotas.
//!
//! A tenant is charged for every arena slot allocated for it, and for every device slot that is being written
//! or holds one of its blocks, header page included. Slots whose free record is not durable yet are charged
//! to no tenant, because no tenant can use them.
//!
//! * **DRAM.** A tenant that needs a slot evicts its own blocks. Memory changes tenants by whole regions
//!   (`arena::renewal`), so a reservation keeps back unused regions for its tenant ([`Arena`](super::arena::Arena)).
//! * **NVMe.** Slots change tenants with their blocks: [`quota`] selects the tenant to evict from.
//!
//! Memory: about 350 bytes per tenant. None per block, because the size class identifies the tenant.

use std::collections::BTreeMap;

use reprise_policy::block_command::RetentionUsage;
use reprise_policy::fair_order::Weights;
use reprise_policy::quota::{self, Quota, QuotaError, QuotaUsage};
use reprise_policy::{TenantId, TenantName};

use crate::cache::{Cache, FrameIndex, SlotRequest};
use crate::event::Grant;
use crate::limits::TENANTS_MAX;

/// Bytes of a slot's header page on a device.
const HEADER_PAGE_BYTES: u64 = reprise_policy::layout::PAGE_BYTES;

/// Index of a tenant in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TenantIndex(pub(crate) u16);

/// Configured quotas of one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantQuotas {
    /// Tenant that the quotas apply to.
    pub tenant: TenantId,
    /// Quota in the arena.
    pub dram: Quota,
    /// Quota over all devices together.
    pub nvme: Quota,
}

/// Usage and quotas of a tenant as of the last event; the node reports them to the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantUsage {
    /// Tenant that is described.
    pub tenant: TenantId,
    /// Last grant that was applied.
    pub grant: Option<Grant>,
    /// DRAM in use and its quota.
    pub dram: QuotaUsage,
    /// NVMe in use and its quota.
    pub nvme: QuotaUsage,
    /// Slots in use, in DRAM and on NVMe.
    pub blocks: TenantBlocks,
    /// Counters since the start of the agent.
    pub counts: TenantCounts,
    /// Retention pins, and what the tenant may pin.
    pub retention: RetentionUsage,
}

/// Numbers of slots in use; each holds a block or is being filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantBlocks {
    /// Slots of the arena.
    pub dram: u64,
    /// Slots on the devices.
    pub nvme: u64,
}

/// Counters of one tenant; they never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantCounts {
    /// Blocks evicted from DRAM.
    pub dram_evictions: u64,
    /// Blocks evicted from NVMe.
    pub nvme_evictions: u64,
    /// Bytes of blocks that were evicted from DRAM, or found no slot there, because of the tenant's own
    /// limit.
    pub dram_limited_bytes: u64,
    /// Bytes of blocks that were evicted from NVMe, or not saved there, because of the tenant's own limit.
    pub nvme_limited_bytes: u64,
    /// Bytes of blocks whose read from NVMe was started.
    pub nvme_read_bytes: u64,
    /// Bytes of blocks whose write to NVMe was started.
    pub nvme_written_bytes: u64,
    /// Bytes of blocks that were sent to peers, are being sent, or are read for them, also if the read fails.
    pub served_bytes: u64,
}

/// State of one tenant.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    /// Name of the tenant, once the runtime has sent it.
    pub(crate) name: Option<TenantName>,
    /// Whether its encryption keys are gone: it gets no slots.
    is_erased: bool,
    dram: Account,
    nvme: Account,
    pub(crate) counts: TenantCounts,
}

/// Usage and quota of a tenant in one tier.
#[derive(Clone, Copy, Debug)]
struct Account {
    configured: Quota,
    /// Quota of the last grant.
    granted: Option<Quota>,
    used: u64,
    slots: u64,
}

/// Table of all tenants.
#[derive(Debug)]
pub(crate) struct Accounts {
    tenants: Vec<Tenant>,
    by_id: BTreeMap<TenantId, TenantIndex>,
    /// NVMe capacity available for reservations, and the sum of all reservations.
    nvme_capacity: u64,
    nvme_reserved: u64,
}

impl TenantUsage {
    /// Names and values, as in `Stats` and metrics. A limit that is not set is 2⁶⁴ − 1.
    pub fn fields(&self) -> [(&'static str, u64); 16] {
        let TenantUsage { dram, nvme, counts, retention, .. } = self;
        [
            ("tenant_dram_used_bytes", dram.used),
            ("tenant_dram_reserved_bytes", dram.quota.reserved()),
            ("tenant_dram_limit_bytes", dram.quota.limit()),
            ("tenant_nvme_used_bytes", nvme.used),
            ("tenant_nvme_reserved_bytes", nvme.quota.reserved()),
            ("tenant_nvme_limit_bytes", nvme.quota.limit()),
            ("tenant_dram_evictions", counts.dram_evictions),
            ("tenant_nvme_evictions", counts.nvme_evictions),
            ("tenant_dram_limited_bytes", counts.dram_limited_bytes),
            ("tenant_nvme_limited_bytes", counts.nvme_limited_bytes),
            ("tenant_nvme_read_bytes", counts.nvme_read_bytes),
            ("tenant_nvme_written_bytes", counts.nvme_written_bytes),
            ("tenant_served_bytes", counts.served_bytes),
            ("tenant_retention_blocks", retention.blocks),
            ("tenant_retention_dram_bytes", retention.dram_bytes),
            ("tenant_retention_nvme_bytes", retention.nvme_bytes),
        ]
    }
}

impl Account {
    fn new(configured: Quota) -> Account {
        Account { configured, granted: None, used: 0, slots: 0 }
    }

    fn holding(&self) -> QuotaUsage {
        let quota = self.granted.map_or(self.configured, |granted| self.configured.with(granted));
        QuotaUsage { quota, used: self.used }
    }

    /// Charges a slot of this size.
    fn charge(&mut self, bytes: u64) {
        self.used += bytes;
        self.slots += 1;
    }

    /// Releases the charge of a slot.
    fn release(&mut self, bytes: u64) {
        let message = "every release follows a charge";
        self.used = self.used.checked_sub(bytes).expect(message);
        self.slots = self.slots.checked_sub(1).expect(message);
    }
}

impl Accounts {
    /// Creates the configured tenants. Other tenants have no reservation and no limit.
    pub(crate) fn new(configured: &[TenantQuotas]) -> Accounts {
        let mut tenants = Accounts {
            tenants: Vec::new(),
            by_id: BTreeMap::new(),
            nvme_capacity: u64::MAX,
            nvme_reserved: 0,
        };
        for quotas in configured {
            if let Some(index) = tenants.register(quotas.tenant) {
                let tenant = tenants.get_mut(index);
                tenant.dram.configured = quotas.dram;
                tenant.nvme.configured = quotas.nvme;
            }
        }
        tenants
    }

    /// Returns the index of a tenant, adding it if necessary; `None` if the table is full.
    pub(super) fn register(&mut self, id: TenantId) -> Option<TenantIndex> {
        if let Some(known) = self.by_id.get(&id) {
            return Some(*known);
        }
        if self.tenants.len() >= TENANTS_MAX {
            return None;
        }
        let index = TenantIndex(self.tenants.len() as u16);
        let account = Account::new(Quota::UNLIMITED);
        let counts = TenantCounts::default();
        self.tenants.push(Tenant { id, name: None, is_erased: false, dram: account, nvme: account, counts });
        self.by_id.insert(id, index);
        Some(index)
    }

    pub(crate) fn get(&self, index: TenantIndex) -> &Tenant {
        &self.tenants[usize::from(index.0)]
    }

    pub(crate) fn get_mut(&mut self, index: TenantIndex) -> &mut Tenant {
        &mut self.tenants[usize::from(index.0)]
    }

    /// Usage and quota of a tenant in DRAM.
    pub(crate) fn dram(&self, index: TenantIndex) -> QuotaUsage {
        self.get(index).dram.holding()
    }

    /// Usage and quota of a tenant on NVMe; its reservation is scaled to the remaining capacity.
    pub(crate) fn nvme(&self, index: TenantIndex) -> QuotaUsage {
        let holding = self.get(index).nvme.holding();
        QuotaUsage { quota: holding.quota.scaled(self.nvme_capacity, self.nvme_reserved), ..holding }
    }

    /// Configured DRAM limit of a tenant, regardless of grants.
    pub(crate) fn dram_limit_configured(&self, index: TenantIndex) -> u64 {
        self.get(index).dram.configured.limit()
    }

    /// Indices of all tenants.
    pub(crate) fn ids(&self) -> impl Iterator<Item = TenantIndex> + use<> {
        (0..self.tenants.len() as u16).map(TenantIndex)
    }

    /// Returns the weights by index.
    pub(crate) fn weights(&self, weights: &Weights<TenantId>) -> Weights<TenantIndex> {
        self.ids().map(|index| (index, weights.of(&self.get(index).id))).collect()
    }

    /// Charges a tenant for an arena slot.
    pub(super) fn charge_dram(&mut self, index: TenantIndex, bytes: u64) {
        self.get_mut(index).dram.charge(bytes);
    }

    /// Releases a tenant's charge for an arena slot.
    pub(super) fn release_dram(&mut self, index: TenantIndex, bytes: u64) {
        self.get_mut(index).dram.release(bytes);
    }

    /// Charges a tenant for a device slot.
    pub(crate) fn charge_nvme(&mut self, index: TenantIndex, payload_bytes: u64) {
        self.get_mut(index).nvme.charge(nvme_bytes(payload_bytes));
    }

    /// Releases a tenant's charge for a device slot.
    pub(crate) fn release_nvme(&mut self, index: TenantIndex, payload_bytes: u64) {
        self.get_mut(index).nvme.release(nvme_bytes(payload_bytes));
    }

    /// Usage, quotas and counters of a tenant, without its grant and its pins.
    pub(crate) fn usage(&self, index: TenantIndex) -> TenantUsage {
        let tenant = self.get(index);
        let &Tenant { id, counts, .. } = tenant;
        let blocks = TenantBlocks { dram: tenant.dram.slots, nvme: tenant.nvme.slots };
        let (dram, nvme) = (self.dram(index), self.nvme(index));
        let retention = RetentionUsage::default();
        TenantUsage { tenant: id, grant: None, dram, nvme, blocks, counts, retention }
    }
}

/// Bytes that a block uses on a device.
pub(crate) fn nvme_bytes(payload_bytes: u64) -> u64 {
    payload_bytes + HEADER_PAGE_BYTES
}

/// Reservations that cannot be met.
#[derive(Debug)]
pub(crate) struct Unmet {
    pub(crate) nvme: Option<QuotaError>,
    pub(crate) dram: Option<QuotaError>,
}

impl Cache {
    /// Indices of all tenants.
    pub(crate) fn tenants(&self) -> impl Iterator<Item = TenantIndex> + use<> {
        self.accounts.ids()
    }

    /// Returns the index of a tenant, adding it if necessary; `None` if the table is full.
    pub(crate) fn register_tenant(&mut self, tenant: TenantId) -> Option<TenantIndex> {
        self.accounts.register(tenant)
    }

    /// Usage, quotas and counters of a tenant, without its grant and its pins.
    pub(crate) fn tenant_usage(&self, index: TenantIndex) -> TenantUsage {
        self.accounts.usage(index)
    }

    /// Usage and quota of a tenant in DRAM.
    pub(crate) fn dram_usage(&self, index: TenantIndex) -> QuotaUsage {
        self.accounts.dram(index)
    }

    /// Usage and quota of a tenant on NVMe.
    pub(crate) fn nvme_usage(&self, index: TenantIndex) -> QuotaUsage {
        self.accounts.nvme(index)
    }

    /// Sets the granted quotas of a tenant.
    pub(crate) fn set_granted(&mut self, index: TenantIndex, dram: Quota, nvme: Quota) {
        let tenant = self.accounts.get_mut(index);
        tenant.dram.granted = Some(dram);
        tenant.nvme.granted = Some(nvme);
    }

    /// Applies quotas and device capacity to the reservations; returns those that cannot be met, if the
    /// reservations or the capacity changed.
    pub(crate) fn apply_reservations(&mut self) -> Unmet {
        let usage = self.devices.usage();
        let kept_free = usage.capacity_bytes * u64::from(self.pool_free_permille) / 1000;
        let quotas = |kind: fn(&Tenant) -> &Account| {
            let quotas: Vec<Quota> =
                self.accounts.tenants.iter().map(|tenant| kind(tenant).holding().quota).collect();
            quotas
        };
        let (dram, nvme) = (quotas(|tenant| &tenant.dram), quotas(|tenant| &tenant.nvme));
        let capacity = usage.capacity_bytes - kept_free;
        let nvme_check = quota::check_reservations(capacity, 1, nvme.iter().copied());
        let dram_check = self.arena.check_reservations(&dram);
        let reserved = nvme.iter().map(Quota::reserved).fold(0, u64::saturating_add);
        let is_changed = (self.accounts.nvme_capacity, self.accounts.nvme_reserved) != (capacity, reserved);
        (self.accounts.nvme_capacity, self.accounts.nvme_reserved) = (capacity, reserved);
        for (tenant, quota) in self.accounts.tenants.iter().zip(&dram) {
            self.arena.reserve(tenant.id, quota.reserved());
        }
        Unmet {
            // A node without devices has no capacity to reserve, which is not an error.
            nvme: nvme_check.err().filter(|_| is_changed && usage.capacity_bytes > 0),
            dram: dram_check.err().filter(|_| is_changed),
        }
    }

    /// Sets a tenant's name, which blocks carry from now on.
    pub(crate) fn name_tenant(&mut self, tenant: TenantId, name: TenantName) {
        if let Some(index) = self.accounts.register(tenant) {
            self.accounts.get_mut(index).name = Some(name);
        }
    }

    /// Sets whether the encryption keys of a tenant are gone.
    pub(crate) fn set_erased(&mut self, index: TenantIndex, is_erased: bool) {
        self.accounts.get_mut(index).is_erased = is_erased;
    }

    /// Whether the encryption keys of a tenant are gone.
    pub(crate) fn is_erased(&self, index: TenantIndex) -> bool {
        self.accounts.get(index).is_erased
    }

    /// Counts a block that is not saved because the tenant's limit is smaller than one block.
    pub(crate) fn count_limited(&mut self, request: SlotRequest) {
        self.accounts.get_mut(request.tenant).counts.nvme_limited_bytes += request.slot_bytes;
    }

    /// Counts a block that is sent to a peer, from a leased frame.
    pub(crate) fn count_served(&mut self, frame: FrameIndex) {
        let size_class = self.frames.get(frame).size_class;
        let (tenant, bytes) = (self.tenant_of(size_class), self.sizes.get(size_class).slot_bytes);
        self.accounts.get_mut(tenant).counts.served_bytes += bytes;
    }

    /// Whether blocks of a lane fit a device and the tenant's limit, and can be encrypted if they must be.
    pub(crate) fn may_be_saved(&self, request: SlotRequest) -> bool {
        !self.is_erased(request.tenant)
            && self.devices.can_hold(request.slot_bytes)
            && self.accounts.nvme(request.tenant).quota.limit() >= nvme_bytes(request.slot_bytes)
    }
}
