//! Tenants: their use of this node's DRAM and NVMe, and their quotas.
//!
//! A tenant is charged for every arena slot allocated for it, and for every device slot that is being written
//! or holds one of its blocks, header page included. Slots whose free record is not durable yet are charged
//! to no tenant, because no tenant can use them.
//!
//! The quota is the configured one, combined with the tenant's last grant, if any. A grant takes effect with
//! its event. Usage above a lowered limit is evicted a few blocks at a time; until then, the tenant gets no
//! new slots. Grants do not expire: a node that is disconnected from the control plane keeps them.
//!
//! * **DRAM.** Regions of the arena never change tenants, because this core never zeroes memory. A
//!   reservation therefore keeps back unused regions for its tenant ([`Arena`](super::arena::Arena)), and a
//!   tenant evicts only its own blocks.
//! * **NVMe.** Slots change tenants with their blocks: [`quota`] selects the tenant to evict from.
//!
//! Memory: about 350 bytes per tenant. None per block, because the size class identifies the tenant.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::eviction::{EntryIndex, Group, Rank};
use reprise_policy::quota::{self, Quota, QuotaError, QuotaUsage, SpaceRequest, Victim};
use reprise_policy::{TenantId, TenantName, Tick};

use super::AgentCore;
use super::limits::{SHRINK_EVICTIONS_PER_APPLY, SHRINK_INTERVAL, TENANTS_MAX};
use super::size_class::SizeClassId;
use super::writeback::Lane;
use crate::effect::{Diagnostic, Effect, QuotaResource};
use crate::event::Grant;

/// Bytes of a slot's header page on a device.
const HEADER_PAGE_BYTES: u64 = reprise_policy::layout::PAGE_BYTES;

/// Index of a tenant in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TenantIndex(pub(super) u16);

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
}

/// State of one tenant.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) id: TenantId,
    /// Name of the tenant, once the runtime has sent it.
    pub(super) name: Option<TenantName>,
    dram: Account,
    nvme: Account,
    grant: Option<Grant>,
    pub(super) counts: TenantCounts,
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
pub(super) struct Tenants {
    tenants: Vec<Tenant>,
    by_id: BTreeMap<TenantId, TenantIndex>,
    /// Tenants that may exceed their limits; every event checks only these.
    shrinking: BTreeSet<TenantIndex>,
    /// Time of the next evictions, if more are possible.
    shrink_at: Option<Tick>,
    /// NVMe capacity available for reservations, and the sum of all reservations.
    nvme_capacity: u64,
    nvme_reserved: u64,
}

impl TenantUsage {
    /// Names and values, as in `Stats` and metrics. A limit that is not set is 2⁶⁴ − 1.
    pub fn fields(&self) -> [(&'static str, u64); 10] {
        let TenantUsage { dram, nvme, counts, .. } = self;
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

impl Tenants {
    /// Creates the configured tenants. Other tenants have no reservation and no limit.
    pub(super) fn new(configured: &[TenantQuotas]) -> Tenants {
        let mut tenants = Tenants {
            tenants: Vec::new(),
            by_id: BTreeMap::new(),
            shrinking: BTreeSet::new(),
            shrink_at: None,
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
        self.tenants.push(Tenant { id, name: None, dram: account, nvme: account, grant: None, counts });
        self.by_id.insert(id, index);
        Some(index)
    }

    pub(super) fn get(&self, index: TenantIndex) -> &Tenant {
        &self.tenants[usize::from(index.0)]
    }

    pub(super) fn get_mut(&mut self, index: TenantIndex) -> &mut Tenant {
        &mut self.tenants[usize::from(index.0)]
    }

    /// Usage and quota of a tenant in DRAM.
    pub(super) fn dram(&self, index: TenantIndex) -> QuotaUsage {
        self.get(index).dram.holding()
    }

    /// Usage and quota of a tenant on NVMe; its reservation is scaled to the remaining capacity.
    pub(super) fn nvme(&self, index: TenantIndex) -> QuotaUsage {
        let holding = self.get(index).nvme.holding();
        QuotaUsage { quota: holding.quota.scaled(self.nvme_capacity, self.nvme_reserved), ..holding }
    }

    /// Configured DRAM limit of a tenant, regardless of grants.
    pub(super) fn dram_limit_configured(&self, index: TenantIndex) -> u64 {
        self.get(index).dram.configured.limit()
    }

    /// Indices of all tenants.
    pub(super) fn ids(&self) -> impl Iterator<Item = TenantIndex> + use<> {
        (0..self.tenants.len() as u16).map(TenantIndex)
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
    pub(super) fn charge_nvme(&mut self, index: TenantIndex, payload_bytes: u64) {
        self.get_mut(index).nvme.charge(nvme_bytes(payload_bytes));
    }

    /// Releases a tenant's charge for a device slot.
    pub(super) fn release_nvme(&mut self, index: TenantIndex, payload_bytes: u64) {
        self.get_mut(index).nvme.release(nvme_bytes(payload_bytes));
    }

    /// Usage, quotas and counters of a tenant.
    pub(super) fn usage(&self, index: TenantIndex) -> TenantUsage {
        let tenant = self.get(index);
        let &Tenant { id, grant, counts, .. } = tenant;
        let blocks = TenantBlocks { dram: tenant.dram.slots, nvme: tenant.nvme.slots };
        let (dram, nvme) = (self.dram(index), self.nvme(index));
        TenantUsage { tenant: id, grant, dram, nvme, blocks, counts }
    }

    /// Whether a tenant may exceed its limits at the moment.
    pub(super) fn is_shrinking(&self, id: TenantId) -> bool {
        self.by_id.get(&id).is_some_and(|index| self.shrinking.contains(index))
    }

    /// Time at which to call [`AgentCore::shrink_tenants`] again.
    pub(super) fn shrink_at(&self) -> Option<Tick> {
        self.shrink_at
    }
}

/// Bytes that a block uses on a device.
pub(super) fn nvme_bytes(payload_bytes: u64) -> u64 {
    payload_bytes + HEADER_PAGE_BYTES
}

impl AgentCore {
    /// Usage and quotas of each tenant as of the last event: configured tenants first, then others in order
    /// of appearance.
    pub fn tenant_usage(&self) -> impl Iterator<Item = TenantUsage> {
        self.tenants.ids().map(|index| self.tenants.usage(index))
    }

    /// Tenant of a size class.
    pub(super) fn tenant_of(&self, size_class: SizeClassId) -> TenantIndex {
        self.size_classes.get(size_class).tenant_index
    }

    /// Rank of a block in the NVMe eviction order.
    pub(super) fn nvme_rank(&self, entry: EntryIndex) -> Rank {
        let state = self.index.entry(entry);
        Rank { group: Group(self.tenant_of(state.size_class()).0), class: state.class() }
    }

    /// Applies the configured quotas to the blocks that recovery found.
    pub(super) fn init_tenants(&mut self) {
        self.tenants.shrinking.extend(self.tenants.ids());
        self.quotas_changed();
        self.shrink_tenants();
    }

    /// Makes the next event check the limits of all tenants, after blocks were added from a device.
    pub(super) fn recheck_limits(&mut self) {
        self.tenants.shrinking.extend(self.tenants.ids());
    }

    /// Sets a tenant's name, which blocks carry from now on.
    pub(super) fn name_tenant(&mut self, tenant: TenantId, name: TenantName) {
        if let Some(index) = self.tenants.register(tenant) {
            self.tenants.get_mut(index).name = Some(name);
        }
    }

    /// Applies a grant, unless it is older than the last one.
    pub(super) fn apply_grant(&mut self, grant: Grant) {
        let Some(index) = self.tenants.register(grant.tenant) else { return };
        let tenant = self.tenants.get_mut(index);
        if tenant.grant.is_some_and(|known| grant.version <= known.version) {
            return;
        }
        tenant.grant = Some(grant);
        tenant.dram.granted = Some(grant.dram);
        tenant.nvme.granted = Some(grant.nvme);
        self.tenants.shrinking.insert(index);
        self.quotas_changed();
    }

    /// Updates everything derived from quotas and device capacity, and reports reservations that cannot be
    /// met.
    pub(super) fn quotas_changed(&mut self) {
        let usage = self.devices.usage();
        let kept_free = usage.capacity_bytes * u64::from(self.settings.pool_free_permille) / 1000;
        let quotas = |kind: fn(&Tenant) -> &Account| {
            let quotas: Vec<Quota> =
                self.tenants.tenants.iter().map(|tenant| kind(tenant).holding().quota).collect();
            quotas
        };
        let (dram, nvme) = (quotas(|tenant| &tenant.dram), quotas(|tenant| &tenant.nvme));
        let capacity = usage.capacity_bytes - kept_free;
        let nvme_check = quota::check_reservations(capacity, 1, nvme.iter().copied());
        let dram_check = self.arena.check_reservations(&dram);
        let reserved = nvme.iter().map(Quota::reserved).fold(0, u64::saturating_add);
        let is_changed = (self.tenants.nvme_capacity, self.tenants.nvme_reserved) != (capacity, reserved);
        (self.tenants.nvme_capacity, self.tenants.nvme_reserved) = (capacity, reserved);
        for (tenant, quota) in self.tenants.tenants.iter().zip(&dram) {
            self.arena.reserve(tenant.id, quota.reserved());
        }
        // A node without devices has no capacity to reserve, which is not an error.
        let nvme_check = nvme_check.err().filter(|_| is_changed && usage.capacity_bytes > 0);
        self.report_overcommitted(QuotaResource::Nvme, nvme_check);
        self.report_overcommitted(QuotaResource::Dram, dram_check.err().filter(|_| is_changed));
    }

    fn report_overcommitted(&mut self, resource: QuotaResource, error: Option<QuotaError>) {
        if let Some(error) = error {
            self.emit(Effect::Diagnostic(Diagnostic::Overcommitted { resource, error }));
        }
    }

    /// Evicts blocks of tenants above their lowered limits, a bounded number per event.
    pub(super) fn shrink_tenants(&mut self) {
        if self.tenants.shrinking.is_empty() {
            return;
        }
        let mut left = SHRINK_EVICTIONS_PER_APPLY;
        for index in self.tenants.shrinking.clone() {
            while left > 0 && self.tenants.dram(index).excess() > 0 && self.evict_dram_of(index) {
                left -= 1;
            }
            while left > 0 && self.tenants.nvme(index).excess() > 0 && self.evict_nvme_of(index) {
                left -= 1;
            }
            let (dram, nvme) = (self.tenants.dram(index).excess(), self.tenants.nvme(index).excess());
            if dram > 0 {
                self.expedite_writeback();
            }
            if dram + nvme == 0 {
                self.tenants.shrinking.remove(&index);
            }
        }
        // Blocks that are in use are evicted after their read or write has ended, which is an event.
        self.tenants.shrink_at = (left == 0).then(|| self.now.after(SHRINK_INTERVAL));
    }

    /// Evicts the next victim of a tenant from its device; `false` if it has no evictable block.
    pub(super) fn evict_nvme_of(&mut self, index: TenantIndex) -> bool {
        let Some(entry) = self.devices.take_victim(Group(index.0)) else { return false };
        let bytes = self.size_classes.get(self.index.entry(entry).size_class()).slot_bytes;
        self.tenants.get_mut(index).counts.nvme_limited_bytes += bytes;
        self.drop_victim(entry);
        true
    }

    /// Removes and returns the next NVMe victim, for a lane or ahead of writes. It belongs to the first
    /// tenant in the order of [`quota::victims`] that has an evictable block of at most the allowed size.
    pub(super) fn take_nvme_victim(&mut self, wanting: Option<Lane>) -> Option<EntryIndex> {
        let holdings: Vec<QuotaUsage> = self.tenants.ids().map(|index| self.tenants.nvme(index)).collect();
        let space_request = |lane: Lane| SpaceRequest {
            tenant: usize::from(lane.tenant.0),
            bytes: nvme_bytes(lane.slot_bytes),
        };
        for Victim { tenant, bytes_max } in quota::victims(&holdings, wanting.map(space_request)) {
            let group = Group(u16::try_from(tenant).expect("bounded by TENANTS_MAX"));
            let Some(entry) = self.devices.take_victim(group) else { continue };
            if nvme_bytes(self.size_classes.get(self.index.entry(entry).size_class()).slot_bytes) <= bytes_max
            {
                return Some(entry);
            }
            let rank = self.nvme_rank(entry);
            self.devices.insert_oldest(entry, rank);
        }
        None
    }

    /// Whether evicting these blocks for a tenant leaves the reservations of other tenants untouched.
    pub(super) fn may_drop(&self, blocks: &[EntryIndex], wanting: Option<TenantIndex>) -> bool {
        let mut lost: BTreeMap<TenantIndex, u64> = BTreeMap::new();
        for entry in blocks {
            let size_class = self.index.entry(*entry).size_class();
            let bytes = nvme_bytes(self.size_classes.get(size_class).slot_bytes);
            *lost.entry(self.tenant_of(size_class)).or_default() += bytes;
        }
        lost.into_iter()
            .all(|(index, bytes)| wanting == Some(index) || bytes <= self.tenants.nvme(index).over())
    }
}
