//! Tenants: what each holds of this node's DRAM and NVMe, and what it may hold.
//!
//! A tenant counts every slot of the arena that is taken for it, whatever is in it, and every slot on a device that is
//! being written or holds one of its blocks, header page included. Slots whose end is not durable yet count for nobody:
//! nobody can have them.
//!
//! What it may hold is its quota from the configuration, under the limit of its last grant, if it was ever given one. A grant
//! changes with an event; what is held beyond a lowered limit goes a few blocks at a time, and until it has gone the tenant
//! gets nothing new. Nothing here ends with time: who is cut off from the control plane keeps its grants.
//!
//! * **DRAM.** Regions of the arena do not change tenants (nothing here zeroes memory), so a reservation keeps whole regions
//!   that nobody has had yet for its tenant ([`Arena`](super::arena::Arena)), and a tenant makes room for itself only.
//! * **NVMe.** Slots change tenants with their blocks: [`quota`] says who gives way.
//!
//! Memory: about 350 bytes a tenant; nothing a block (its shape says whose it is).

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::eviction::{EntryIndex, Group, Standing};
use reprise_policy::quota::{self, Giver, Holding, Quota, QuotaError, Want};
use reprise_policy::{TenantId, TenantName, Tick};

use super::AgentCore;
use super::limits::{SHRINK_EVERY, SHRINK_EVICTIONS_PER_APPLY, TENANTS_MAX};
use super::shapes::ShapeId;
use super::writeback::Lane;
use crate::effect::{Effect, Report, Room};
use crate::event::Grant;

/// Bytes of a slot's header page on a device.
const HEADER_PAGE_BYTES: u64 = reprise_policy::layout::PAGE_BYTES;

/// Number of a tenant in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TenantIndex(pub(super) u16);

/// Quotas of one tenant, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantQuotas {
    /// Whose.
    pub tenant: TenantId,
    /// Of the arena.
    pub dram: Quota,
    /// Of all devices together.
    pub nvme: Quota,
}

/// What a tenant holds and may hold, as of the last event. Also what a node reports to the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantUsage {
    /// Whose.
    pub tenant: TenantId,
    /// The last grant that was taken.
    pub grant: Option<Grant>,
    /// DRAM in use and its quota.
    pub dram: Holding,
    /// NVMe in use and its quota.
    pub nvme: Holding,
    /// Slots in use, of both.
    pub blocks: Blocks,
    /// What happened so far.
    pub counts: TenantCounts,
}

/// Slots of both kinds of room; each has a block, or is being filled with one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Of the arena.
    pub dram: u64,
    /// Of the devices.
    pub nvme: u64,
}

/// Counters of one tenant; they only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantCounts {
    /// Blocks dropped from DRAM.
    pub dram_evictions: u64,
    /// Blocks dropped from NVMe.
    pub nvme_evictions: u64,
    /// Bytes of blocks that were dropped from DRAM or found no slot there because of the tenant's own limit.
    pub dram_limited_bytes: u64,
    /// Bytes of blocks that were dropped from NVMe or not saved there because of the tenant's own limit.
    pub nvme_limited_bytes: u64,
}

/// One tenant.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) id: TenantId,
    /// Its name, if the runtime has said it.
    pub(super) name: Option<TenantName>,
    dram: Account,
    nvme: Account,
    grant: Option<Grant>,
    pub(super) counts: TenantCounts,
}

/// One kind of room of a tenant.
#[derive(Clone, Copy, Debug)]
struct Account {
    configured: Quota,
    /// By the last grant.
    granted: Option<Quota>,
    used: u64,
    slots: u64,
}

/// All tenants.
#[derive(Debug)]
pub(super) struct Tenants {
    tenants: Vec<Tenant>,
    by_id: BTreeMap<TenantId, TenantIndex>,
    /// Tenants that may hold more than their limits: only these are looked at by every event.
    shrinking: BTreeSet<TenantIndex>,
    /// When blocks of these go on going, if some can.
    shrink_at: Option<Tick>,
    /// NVMe that reservations can be taken from, and all reservations of it.
    nvme_capacity: u64,
    nvme_reserved: u64,
}

impl TenantUsage {
    /// Names and values, as `Stats` and metrics say them. A limit that nobody set is 2⁶⁴ − 1.
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

    fn holding(&self) -> Holding {
        let quota = self.granted.map_or(self.configured, |granted| self.configured.with(granted));
        Holding { quota, used: self.used }
    }

    /// A slot of so many bytes is taken.
    fn take(&mut self, bytes: u64) {
        self.used += bytes;
        self.slots += 1;
    }

    /// It is given back.
    fn give(&mut self, bytes: u64) {
        let taken = "what is given back was taken";
        self.used = self.used.checked_sub(bytes).expect(taken);
        self.slots = self.slots.checked_sub(1).expect(taken);
    }
}

impl Tenants {
    /// The tenants of the configuration; others get no reservation and no limit.
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
            if let Some(index) = tenants.enter(quotas.tenant) {
                let tenant = tenants.get_mut(index);
                tenant.dram.configured = quotas.dram;
                tenant.nvme.configured = quotas.nvme;
            }
        }
        tenants
    }

    /// The number of a tenant; `None` when there are too many.
    pub(super) fn enter(&mut self, id: TenantId) -> Option<TenantIndex> {
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

    /// What a tenant holds of the arena.
    pub(super) fn dram(&self, index: TenantIndex) -> Holding {
        self.get(index).dram.holding()
    }

    /// What it holds of the devices; its reservation is what the devices that are left can keep.
    pub(super) fn nvme(&self, index: TenantIndex) -> Holding {
        let holding = self.get(index).nvme.holding();
        Holding { quota: holding.quota.scaled(self.nvme_capacity, self.nvme_reserved), ..holding }
    }

    /// The limit of DRAM that the configuration sets, whatever is granted at the moment.
    pub(super) fn dram_limit_configured(&self, index: TenantIndex) -> u64 {
        self.get(index).dram.configured.limit()
    }

    /// All tenants.
    pub(super) fn ids(&self) -> impl Iterator<Item = TenantIndex> + use<> {
        (0..self.tenants.len() as u16).map(TenantIndex)
    }

    /// A slot of the arena is taken for a tenant.
    pub(super) fn take_dram(&mut self, index: TenantIndex, bytes: u64) {
        self.get_mut(index).dram.take(bytes);
    }

    /// It is given back.
    pub(super) fn give_dram(&mut self, index: TenantIndex, bytes: u64) {
        self.get_mut(index).dram.give(bytes);
    }

    /// A slot on a device is taken for a block of a tenant.
    pub(super) fn take_nvme(&mut self, index: TenantIndex, payload_bytes: u64) {
        self.get_mut(index).nvme.take(nvme_bytes(payload_bytes));
    }

    /// The block ends, or was not written.
    pub(super) fn give_nvme(&mut self, index: TenantIndex, payload_bytes: u64) {
        self.get_mut(index).nvme.give(nvme_bytes(payload_bytes));
    }

    /// What a tenant holds and may hold.
    pub(super) fn usage(&self, index: TenantIndex) -> TenantUsage {
        let tenant = self.get(index);
        let &Tenant { id, grant, counts, .. } = tenant;
        let blocks = Blocks { dram: tenant.dram.slots, nvme: tenant.nvme.slots };
        let (dram, nvme) = (self.dram(index), self.nvme(index));
        TenantUsage { tenant: id, grant, dram, nvme, blocks, counts }
    }

    /// Whether a tenant may hold more than its limits at the moment.
    pub(super) fn shrinks(&self, id: TenantId) -> bool {
        self.by_id.get(&id).is_some_and(|index| self.shrinking.contains(index))
    }

    /// When [`AgentCore::shrink_tenants`] is wanted.
    pub(super) fn shrink_at(&self) -> Option<Tick> {
        self.shrink_at
    }
}

/// Bytes that a block takes on a device.
pub(super) fn nvme_bytes(payload_bytes: u64) -> u64 {
    payload_bytes + HEADER_PAGE_BYTES
}

impl AgentCore {
    /// What each tenant holds and may hold, as of the last event.
    /// Tenants of the configuration come first, others in the order in which they came.
    pub fn tenant_usage(&self) -> impl Iterator<Item = TenantUsage> {
        self.tenants.ids().map(|index| self.tenants.usage(index))
    }

    /// Who has a shape.
    pub(super) fn tenant_of(&self, shape: ShapeId) -> TenantIndex {
        self.shapes.get(shape).tenant_index
    }

    /// Where a block stands in the order of eviction from devices.
    pub(super) fn nvme_standing(&self, entry: EntryIndex) -> Standing {
        let state = self.index.entry(entry);
        Standing { group: Group(self.tenant_of(state.shape()).0), class: state.class() }
    }

    /// Looks at quotas and at what recovery has found for the first time.
    pub(super) fn begin_tenants(&mut self) {
        self.tenants.shrinking.extend(self.tenants.ids());
        self.quotas_changed();
        self.shrink_tenants();
    }

    /// Blocks have come from a device: their tenants may hold more than they may.
    pub(super) fn limits_may_be_passed(&mut self) {
        self.tenants.shrinking.extend(self.tenants.ids());
    }

    /// A tenant's name has become known: blocks that are written from now on carry it.
    pub(super) fn name_tenant(&mut self, tenant: TenantId, name: TenantName) {
        if let Some(index) = self.tenants.enter(tenant) {
            self.tenants.get_mut(index).name = Some(name);
        }
    }

    /// A grant has come. One that is not younger than the last is passed over.
    pub(super) fn take_grant(&mut self, grant: Grant) {
        let Some(index) = self.tenants.enter(grant.tenant) else { return };
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

    /// Brings up to date what follows from quotas and from the devices that are left, and says so when not all reservations
    /// can be kept.
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
        let news = (self.tenants.nvme_capacity, self.tenants.nvme_reserved) != (capacity, reserved);
        (self.tenants.nvme_capacity, self.tenants.nvme_reserved) = (capacity, reserved);
        for (tenant, quota) in self.tenants.tenants.iter().zip(&dram) {
            self.arena.reserve(tenant.id, quota.reserved());
        }
        // A node without devices has nothing to reserve, and is told so by nobody.
        let nvme_check = nvme_check.err().filter(|_| news && usage.capacity_bytes > 0);
        self.report_overcommitted(Room::Nvme, nvme_check);
        self.report_overcommitted(Room::Dram, dram_check.err().filter(|_| news));
    }

    fn report_overcommitted(&mut self, room: Room, error: Option<QuotaError>) {
        if let Some(error) = error {
            self.emit(Effect::Report(Report::Overcommitted { room, error }));
        }
    }

    /// Drops blocks of tenants that hold more than their lowered limits, a bounded number by each event.
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
                self.urge_writeback();
            }
            if dram + nvme == 0 {
                self.tenants.shrinking.remove(&index);
            }
        }
        // What is read or written goes when that has ended, which is an event.
        self.tenants.shrink_at = (left == 0).then(|| self.now.after(SHRINK_EVERY));
    }

    /// Drops the block that a tenant's own order names first; `false` when it has none that can go.
    pub(super) fn evict_nvme_of(&mut self, index: TenantIndex) -> bool {
        let Some(entry) = self.devices.take_victim(Group(index.0)) else { return false };
        let bytes = self.shapes.get(self.index.entry(entry).shape()).slot_bytes;
        self.tenants.get_mut(index).counts.nvme_limited_bytes += bytes;
        self.drop_victim(entry);
        true
    }

    /// The stored block that goes next for blocks of a lane, or ahead of need, no longer in the order: of the first tenant
    /// that gives way ([`quota::givers`]) and has one that can go and is not too much.
    pub(super) fn take_nvme_victim(&mut self, wanting: Option<Lane>) -> Option<EntryIndex> {
        let holdings: Vec<Holding> = self.tenants.ids().map(|index| self.tenants.nvme(index)).collect();
        let want =
            |lane: Lane| Want { tenant: usize::from(lane.tenant.0), bytes: nvme_bytes(lane.slot_bytes) };
        for Giver { tenant, bytes_max } in quota::givers(&holdings, wanting.map(want)) {
            let group = Group(u16::try_from(tenant).expect("bounded by TENANTS_MAX"));
            let Some(entry) = self.devices.take_victim(group) else { continue };
            if nvme_bytes(self.shapes.get(self.index.entry(entry).shape()).slot_bytes) <= bytes_max {
                return Some(entry);
            }
            let standing = self.nvme_standing(entry);
            self.devices.put_back(entry, standing);
        }
        None
    }

    /// Whether these blocks may go for the sake of a tenant: nobody else loses what is reserved.
    pub(super) fn may_drop(&self, blocks: &[EntryIndex], wanting: Option<TenantIndex>) -> bool {
        let mut lost: BTreeMap<TenantIndex, u64> = BTreeMap::new();
        for entry in blocks {
            let shape = self.index.entry(*entry).shape();
            let bytes = nvme_bytes(self.shapes.get(shape).slot_bytes);
            *lost.entry(self.tenant_of(shape)).or_default() += bytes;
        }
        lost.into_iter()
            .all(|(index, bytes)| wanting == Some(index) || bytes <= self.tenants.nvme(index).over())
    }
}
