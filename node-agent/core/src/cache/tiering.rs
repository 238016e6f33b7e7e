//! Tiering: which blocks of the arena are written to devices, and when.
//!
//! ```text
//!            admitted                         durable
//!  commit ───────────▶ unsaved ─────────────────────────▶ in DRAM and on NVMe
//!    │ refused            ▲ used again, or demoted
//!    ▼                    │ before its eviction
//!  in DRAM only ──────────┤
//!                         └─ otherwise: evicted, and computed again
//! ```
//!
//! The decisions are those of [`reprise_policy::admission`] and [`reprise_policy::demotion`]; this file keeps their
//! facts. The owner of saves starts the writes. A load of a block that is on NVMe only fills a slot of the arena, which
//! promotes it.
//!
//! Facts cost nothing while all blocks are admitted without a budget. Otherwise, a frame has 4 more bytes for the time
//! of its last use. Only blocks that engines of this node saved are demoted: peers have the others.
//!
//! Out of scope: a tier behind NVMe.

use std::time::Duration;

use reprise_policy::Tick;
use reprise_policy::admission::{Admission, AdmissionMode, Candidate, Reuse, Verdict};
use reprise_policy::demotion::{self, IdleTimes, Pressure, Temperature};
use reprise_policy::eviction::{EntryIndex, Group};

use crate::cache::accounts::nvme_bytes;
use crate::cache::describe::BlockOrigin;
use crate::cache::devices::Device;
use crate::cache::frames::{EvictionPosition, FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::cache::lease::{Lease, Save};
use crate::cache::rotation::Target;
use crate::cache::{Cache, SlotRequest};
use crate::counters::Counters;
use crate::effect::DeviceId;
use crate::limits::{DEMOTION_BLOCKS_MAX, DEMOTION_INTERVAL, DEMOTION_VICTIMS_MAX};
use crate::pool::{DeviceOp, DeviceOpKind};
use crate::settings::Settings;

/// Facts for admission and demotion.
#[derive(Debug)]
pub(super) struct Tiering {
    admission: Admission,
    /// Whether blocks can be in DRAM only, or leave DRAM early: otherwise, uses are not recorded.
    is_active: bool,
    skip_dram: bool,
    idle_times: IdleTimes,
    /// Time of the last use of each frame's block.
    last_uses: Vec<Coarse>,
    next_pass: Tick,
    /// Number of passes over the next victims.
    passes: usize,
}

/// Time in units of 1,024 µs, modulo 2^32: 50 days.
#[derive(Clone, Copy, Debug, Default)]
struct Coarse(u32);

/// Batch of blocks to demote.
#[derive(Debug)]
pub(crate) struct Demotions {
    pub(crate) frames: Vec<(FrameIndex, Temperature)>,
    pub(crate) pressure: Pressure,
}

impl Coarse {
    fn of(now: Tick) -> Coarse {
        Coarse((now.0 >> 10) as u32)
    }

    fn since(self, earlier: Coarse) -> Duration {
        Duration::from_micros(u64::from(self.0.wrapping_sub(earlier.0)) << 10)
    }
}

impl Tiering {
    pub(super) fn new(settings: &Settings) -> Tiering {
        let (mode, budget) = (settings.admission, settings.daily_write_budget);
        Tiering {
            admission: Admission::new(mode),
            is_active: mode != AdmissionMode::Always || budget.is_some() || settings.skip_dram,
            skip_dram: settings.skip_dram,
            idle_times: IdleTimes::default(),
            last_uses: Vec::new(),
            next_pass: Tick(0),
            passes: 0,
        }
    }

    /// Records a use of a frame's block; returns the time since the previous one.
    fn used(&mut self, frame: FrameIndex, now: Tick) -> Duration {
        let at = frame.0 as usize;
        if self.last_uses.len() <= at {
            self.last_uses.resize(at + 1, Coarse::default());
        }
        let now = Coarse::of(now);
        now.since(std::mem::replace(&mut self.last_uses[at], now))
    }

    fn idle(&self, frame: FrameIndex, now: Tick) -> Duration {
        let last = self.last_uses.get(frame.0 as usize).copied().unwrap_or_default();
        Coarse::of(now).since(last)
    }
}

impl Device {
    /// Whether the write budget admits this many bytes.
    pub(super) fn may_write(&self, now: Tick, bytes: u64) -> bool {
        self.budget.as_ref().is_none_or(|budget| budget.admits(now, bytes))
    }
}

impl Cache {
    /// Sets the time of the current event.
    pub(crate) fn set_now(&mut self, now: Tick) {
        self.now = now;
    }

    /// Records a use of a block by a request.
    pub(super) fn note_use(&mut self, entry: EntryIndex) {
        if !self.tiering.is_active {
            return;
        }
        let state = self.index.entry_mut(entry);
        let (is_first, position, size_class) = (state.mark_reused(), state.position(), state.size_class());
        if is_first {
            let tenant = self.tenant_of(size_class);
            self.tiering.admission.reused(Group(tenant.0), position);
        }
        let state = self.index.entry(entry);
        let Dram::Resident(frame) = state.dram() else { return };
        let idle = self.tiering.used(frame, self.now);
        self.tiering.idle_times.observe(idle);
        if self.is_dram_only(frame) {
            self.outcomes.used_again.push(frame);
        }
    }

    /// Rule by which saved blocks are admitted to devices.
    pub(crate) fn admission_mode(&self) -> AdmissionMode {
        self.tiering.admission.mode()
    }

    /// Decides whether a committed block is written, and counts the decision.
    pub(crate) fn admit(&mut self, lease: &Lease<Save>) -> Verdict {
        let entry = self.frames.get(lease.frame()).entry().expect("a readable block can be found");
        if self.tiering.is_active {
            self.tiering.used(lease.frame(), self.now);
        }
        let block = self.candidate(entry);
        if block.reuse == Reuse::None {
            self.tiering.admission.committed(block.tenant, block.position);
        }
        let verdict = self.tiering.admission.decide(&block);
        match verdict {
            Verdict::Admit => self.counters.admission_admitted_blocks += 1,
            Verdict::RefuseFirstUse => self.counters.admission_first_use_blocks += 1,
            Verdict::RefuseLowValue => self.counters.admission_low_value_blocks += 1,
        }
        verdict
    }

    /// Claims a block that is in DRAM only, to make it durable; `None` if it is no longer there, or not
    /// worth a write.
    pub(crate) fn claim_dram_only(&mut self, frame: FrameIndex) -> Option<Lease<Save>> {
        if !self.is_dram_only(frame) || !self.is_worth_writing(frame) {
            return None;
        }
        Some(Lease::new(frame))
    }

    /// Counts a block that a later use has admitted.
    pub(crate) fn count_used_again(&mut self) {
        self.counters.admission_used_again_blocks += 1;
    }

    /// Counts a block that no write budget admits.
    pub(crate) fn count_over_budget(&mut self) {
        self.counters.admission_budget_blocks += 1;
    }

    /// Counts a demoted block that is durable.
    pub(crate) fn count_demoted(&mut self, temperature: Temperature) {
        match temperature {
            Temperature::Cold => self.counters.demoted_blocks += 1,
            Temperature::Warm => self.counters.demoted_emergency_blocks += 1,
        }
    }

    /// Returns the next batch of blocks to demote, of at most `bytes` slot bytes and within the write budget that is
    /// left; `None` if no pass is due. `demoted` are slot bytes that are being demoted: they are room too.
    pub(crate) fn due_demotions(&mut self, demoted: u64, bytes: u64) -> Option<Demotions> {
        let capacity = self.arena.bytes();
        let free = self.arena.free_bytes() + demoted;
        let is_due = self.tiering.is_active && self.now >= self.tiering.next_pass;
        if !is_due || demotion::pressure(free, capacity) == Pressure::None {
            return None;
        }
        self.tiering.next_pass = self.now.after(DEMOTION_INTERVAL);
        let (watched, tau) =
            (demotion::room_watched(capacity), demotion::threshold(&self.tiering.idle_times));
        let mut demotions = Demotions { frames: Vec::new(), pressure: Pressure::None };
        let (mut left, mut budget) = (bytes, self.budget_left_bytes());
        let mut groups = self.arena.next_victims(DEMOTION_VICTIMS_MAX);
        // The budget may end with the first group, so each pass begins with another one.
        let first = self.tiering.passes % groups.len().max(1);
        groups.rotate_left(first);
        self.tiering.passes = self.tiering.passes.wrapping_add(1);
        for victims in groups {
            let mut room = free;
            for frame in victims {
                let slot_bytes = self.frame_slot(frame).bytes;
                let is_full = left < slot_bytes || demotions.frames.len() >= DEMOTION_BLOCKS_MAX;
                if room >= watched || is_full || budget == 0 {
                    break;
                }
                let pressure = demotion::pressure(room, capacity);
                room += slot_bytes;
                let temperature = demotion::temperature(self.tiering.idle(frame, self.now), tau);
                let is_due = demotion::is_due(pressure, temperature);
                if !is_due || !self.is_dram_only(frame) || !self.is_worth_writing(frame) {
                    continue;
                }
                left -= slot_bytes;
                // As for the budget itself, the last block may exceed it.
                budget = budget.saturating_sub(nvme_bytes(slot_bytes));
                demotions.frames.push((frame, temperature));
                demotions.pressure = demotions.pressure.max(pressure);
            }
        }
        (!demotions.frames.is_empty()).then_some(demotions)
    }

    /// Position of a saved block's DRAM copy in the order of eviction.
    pub(crate) fn position_after_save(
        &mut self,
        entry: EntryIndex,
        position: EvictionPosition,
    ) -> EvictionPosition {
        let pressure = demotion::pressure(self.arena.free_bytes(), self.arena.bytes());
        let skips = self.tiering.skip_dram && demotion::skips_dram(pressure, self.reuse(entry));
        if position == EvictionPosition::Last && skips {
            self.counters.skipped_dram_blocks += 1;
            return EvictionPosition::First;
        }
        position
    }

    /// Whether a device that may get a block of this size has a write budget for it. True without devices.
    pub(crate) fn has_write_budget(&self, slot_bytes: u64) -> bool {
        let has_slot = |device: &&Device| device.pool.allocatable(slot_bytes) > 0;
        let with_slot: Vec<&Device> = self.devices.writable_devices().filter(has_slot).collect();
        let devices = match with_slot.is_empty() {
            true => self.devices.writable_devices().collect(),
            false => with_slot,
        };
        devices.is_empty() || devices.iter().any(|device| device.may_write(self.now, nvme_bytes(slot_bytes)))
    }

    /// Charges a block to the budget of its device, and removes the device from the targets if it has none left for
    /// another block.
    pub(super) fn charge_write(&mut self, device: DeviceId, slot_bytes: u64, targets: &mut Vec<Target>) {
        let (bytes, now) = (nvme_bytes(slot_bytes), self.now);
        let state = self.devices.device_mut(device);
        let Some(budget) = &mut state.budget else { return };
        budget.charge(now, bytes);
        if !budget.admits(now, bytes) {
            targets.retain(|target| target.device != device);
        }
    }

    /// Counts the bytes of operations, and charges those that belong to no block of the arena.
    pub(super) fn count_written(&mut self, device: DeviceId, ops: &[DeviceOp]) {
        let (mut pages, mut headers, mut blocks) = (0, 0, 0);
        for op in ops {
            match &op.kind {
                DeviceOpKind::WritePages { bytes, .. } => pages += bytes.len() as u64,
                DeviceOpKind::WriteHeader { header, .. } => headers += header.len() as u64,
                DeviceOpKind::WriteBlock { header, slot, .. } => blocks += header.len() as u64 + slot.bytes,
                DeviceOpKind::Sync => {}
            }
        }
        self.counters.pool_written_bytes += pages + headers + blocks;
        self.counters.journal_written_bytes += pages;
        // The header of a lent slot was charged with the slot.
        let now = self.now;
        if let Some(budget) = self.devices.get_mut(device).and_then(|device| device.budget.as_mut()) {
            budget.charge(now, pages);
        }
    }

    /// Sets the gauges of admission and demotion.
    pub(super) fn set_tiering_counters(&self, all: &mut Counters) {
        let budgets = || self.devices.usable_devices().filter_map(|device| device.budget.as_ref());
        all.write_budget_bytes = budgets().map(|budget| budget.limits().bytes).sum();
        all.write_budget_left_bytes = budgets().map(|budget| budget.left(self.now)).sum();
        let amplified = all.pool_written_bytes.saturating_mul(1000).checked_div(all.stored_bytes_total);
        all.write_amplification_permille = amplified.unwrap_or(0);
        let tau = demotion::threshold(&self.tiering.idle_times);
        all.idle_threshold_micros = u64::try_from(tau.as_micros()).unwrap_or(u64::MAX);
    }

    /// Whether a frame has a saved block that is on no device and is not being written.
    fn is_dram_only(&self, frame: FrameIndex) -> bool {
        let state = self.frames.get(frame);
        let is_saved = |entry: EntryIndex| {
            let entry = self.index.entry(entry);
            entry.origin() == BlockOrigin::Saved && entry.stored().is_none()
        };
        state.state == FrameState::Clean && state.entry().is_some_and(is_saved)
    }

    /// Whether admission, quotas, devices and budgets let a block in DRAM be written.
    fn is_worth_writing(&self, frame: FrameIndex) -> bool {
        let request: SlotRequest = self.slot_request(&Lease::<Save>::new(frame));
        let entry = self.frames.get(frame).entry().expect("the caller has checked");
        self.may_be_saved(request)
            && self.has_write_budget(request.slot_bytes)
            && self.tiering.admission.decide_again(&self.candidate(entry)) == Verdict::Admit
    }

    fn reuse(&self, entry: EntryIndex) -> Reuse {
        if self.index.entry(entry).is_reused() { Reuse::Used } else { Reuse::None }
    }

    fn candidate(&self, entry: EntryIndex) -> Candidate {
        let state = self.index.entry(entry);
        let size_class = self.sizes.get(state.size_class());
        Candidate {
            key_hash: state.key().table_hash(),
            tenant: Group(size_class.tenant_index.0),
            position: state.position(),
            reuse: self.reuse(entry),
            bytes: nvme_bytes(size_class.slot_bytes),
            tokens: size_class.layout.tokens(),
            budget_left_permille: self.budget_left_permille(),
        }
    }

    /// Bytes that the budgets of all writable devices have left; without limits, the maximum.
    fn budget_left_bytes(&self) -> u64 {
        let left = |device: &Device| device.budget.as_ref().map_or(u64::MAX, |budget| budget.left(self.now));
        self.devices.writable_devices().map(left).fold(0, u64::saturating_add)
    }

    /// Part of the bucket that the device with most of it has left, in thousandths; 1000 without budgets.
    fn budget_left_permille(&self) -> u16 {
        let left =
            |device: &Device| device.budget.as_ref().map_or(1000, |budget| budget.left_permille(self.now));
        self.devices.writable_devices().map(left).max().unwrap_or(1000)
    }
}
