//! Passes of the planner, and the reads that they start.

use std::time::Duration;

use reprise_policy::prefetch::{Channel, ChannelState, Pass, Plan};
use reprise_policy::{SessionId, Tick};

use crate::cache::{AheadCopy, Cache, LocalBlock, SizeClassId, TenantIndex};
use crate::context::{Caller, Context};
use crate::effect::ReadClass;
use crate::limits::{DEVICES_MAX, PREFETCH_RETRIES_MAX};
use crate::prefetch::requests::{Hinted, ListedBlock};
use crate::prefetch::staged::StagedBlock;
use crate::prefetch::{Prefetch, PrefetchOutcome};
use crate::settings::PrefetchSettings;
use crate::transfer::{DeviceRate, DeviceReads};
use crate::waiter::{FillRequest, Joins, WaiterOwner};

/// Bandwidth of a device, and the amounts up to which it was measured.
#[derive(Debug, Default)]
pub(super) struct MeasuredChannel {
    channel: Channel,
    read_bytes: u64,
    busy: Duration,
}

/// Slot bytes that staged blocks may fill.
pub(super) fn reserve(cache: &Cache, settings: &PrefetchSettings) -> u64 {
    share_of_limit(cache.arena_bytes(), settings)
}

/// Share of a tenant's limit in DRAM that its staged blocks may fill.
fn share_of_limit(limit: u64, settings: &PrefetchSettings) -> u64 {
    let share = u128::from(limit) * u128::from(settings.arena_permille) / 1000;
    u64::try_from(share).unwrap_or(u64::MAX)
}

/// Blocks to read of one size class.
pub(super) type ReadsOfClass = (SizeClassId, Vec<(u32, LocalBlock)>);

impl Prefetch {
    /// Measures the bandwidth of each device since the last measurement.
    pub(super) fn measure(&mut self, reads: &DeviceReads, now: Tick) {
        for DeviceRate { device, read_bytes, busy, .. } in reads.rates(now) {
            let measured = self.channels.entry(device).or_default();
            let bytes = read_bytes - measured.read_bytes;
            if measured.channel.observe(bytes, busy.saturating_sub(measured.busy)) {
                (measured.read_bytes, measured.busy) = (read_bytes, busy);
            }
        }
    }

    /// Plans the reads of one session's requests and starts them.
    pub(super) fn pass(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        (caller, reads): (Caller, &DeviceReads),
    ) {
        let session = caller.session;
        self.hold_staged(session);
        self.retry_failed(cache, cx);
        let channels = self.channel_states(reads, cx.now);
        let limits = cx.settings.prefetch;
        let reserve_bytes = self.free_reserve(cache, &limits, (session, cache.tenant_of(caller.size_class)));
        let Some(hinted) = self.sessions.get_mut(&session) else { return };
        let Some(iteration) = hinted.iteration.expected() else { return };
        let (candidates, of) = hinted.candidates();
        let transfer = candidates.iter().map(|candidate| {
            let path = channels[usize::from(candidate.channel)].path;
            path.transfer_time(u64::from(candidate.blocks) * candidate.block_bytes)
        });
        hinted.window.cover(transfer.max().unwrap_or_default(), iteration);
        let window = hinted.window.iterations().min(limits.window_max);
        let high_water_permille = limits.high_water_permille;
        let mut plan = std::mem::take(&mut self.plan);
        let pass = Pass { iteration, window, channels: &channels, reserve_bytes, high_water_permille };
        plan.make(&pass, &candidates);
        self.count_held(session, &plan, &of);
        for read in &plan.reads {
            let (request, pending) = of[read.candidate];
            self.start(cache, cx, (session, request), (pending, read.blocks));
        }
        self.plan = plan;
    }

    /// Adds requests as holders of their next blocks that are staged for another one: a shared prefix.
    fn hold_staged(&mut self, session: SessionId) {
        let Some(hinted) = self.sessions.get_mut(&session).filter(|_| !self.staged.is_empty()) else {
            return;
        };
        for wanted in hinted.requests.values_mut() {
            for pending in &mut wanted.pending {
                while let Some((key, class)) = pending.keys.front()
                    && let Some(id) = self.staged.find(key, *class)
                {
                    self.staged.hold(id);
                    wanted.blocks.push(ListedBlock { key: *key, class: *class, staged: Some(id) });
                    pending.keys.pop_front();
                    pending.taken += 1;
                }
            }
        }
    }

    fn channel_states(&self, reads: &DeviceReads, now: Tick) -> Vec<ChannelState> {
        let unmeasured = ChannelState { path: Channel::default().path(), queued_bytes: 0 };
        let mut states = vec![unmeasured; DEVICES_MAX];
        for DeviceRate { device, in_flight_bytes, .. } in reads.rates(now) {
            let path = self.channels.get(&device).map_or(unmeasured.path, |known| known.channel.path());
            states[usize::from(device.0)] = ChannelState { path, queued_bytes: in_flight_bytes };
        }
        states
    }

    /// Counts the blocks of a plan that wait, each once for each cause.
    fn count_held(&mut self, session: SessionId, plan: &Plan, of: &[(u64, usize)]) {
        let Some(hinted) = self.sessions.get_mut(&session) else { return };
        for held in &plan.held {
            let (request, at) = of[held.candidate];
            let Some(pending) = hinted.requests.get_mut(&request).and_then(|it| it.pending.get_mut(at))
            else {
                continue;
            };
            let unstaged = pending.taken + held.admitted;
            let (deferred, late) = (unstaged + held.unstaged, unstaged + held.unstaged + held.deferred);
            let counted = &mut pending.counted;
            self.counters.prefetch_unstaged_blocks += counted.unstaged.add(unstaged, held.unstaged);
            self.counters.prefetch_deferred_blocks += counted.deferred.add(deferred, held.deferred);
            self.counters.prefetch_late_blocks += counted.late.add(late, held.late);
        }
    }

    /// Reads blocks again whose read has failed, within the reserve.
    fn retry_failed(&mut self, cache: &Cache, cx: &Context) {
        let mut fetches = Vec::new();
        let mut tried = 0;
        for _ in 0..self.failed.len() {
            if tried == PREFETCH_RETRIES_MAX {
                break;
            }
            let Some(id) = self.failed.pop_front() else { break };
            // Ended blocks do not count, so that the list cannot outgrow the blocks.
            let Some(block) = self.staged.failed(id) else { continue };
            tried += 1;
            let (class, bytes) = (block.size_class, block.slot_bytes);
            match cache.ahead_copy(&block.key, class) {
                AheadCopy::OnDevice(_, entry)
                    if bytes
                        <= self.free_reserve(cache, &cx.settings.prefetch, (block.session, block.tenant)) =>
                {
                    self.staged.retry(id);
                    fetches.push((class, vec![(id.slot(), LocalBlock::Stored(entry))]));
                }
                AheadCopy::OnDevice(..) | AheadCopy::Filling => self.failed.push_back(id),
                // A load has read it.
                AheadCopy::InDram => drop(self.staged.remove(id)),
                AheadCopy::Absent => {}
            }
        }
        self.fetch(cache, cx, fetches);
    }

    /// Slot bytes that a session may still stage. Staged blocks count against their tenant's limit, so they use at
    /// most the same share of it as of the arena.
    pub(super) fn free_reserve(
        &self,
        cache: &Cache,
        settings: &PrefetchSettings,
        (session, tenant): (SessionId, TenantIndex),
    ) -> u64 {
        let reserve = reserve(cache, settings);
        let of_tenant = share_of_limit(cache.dram_usage(tenant).quota.limit(), settings).min(reserve);
        let of_session = of_tenant * settings.session_permille / 1000;
        let free = reserve.saturating_sub(self.staged.bytes());
        let free = free.min(of_tenant.saturating_sub(self.staged.bytes_of_tenant(tenant)));
        free.min(of_session.saturating_sub(self.staged.bytes_of(session)))
    }

    /// Requests the fills of a request's next blocks on one device.
    fn start(
        &mut self,
        cache: &Cache,
        cx: &Context,
        (session, request): (SessionId, u64),
        (pending, blocks): (usize, u32),
    ) {
        let Some(hinted) = self.sessions.get_mut(&session) else { return };
        let Hinted { requests, keys, .. } = hinted;
        let Some(wanted) = requests.get_mut(&request) else { return };
        let Some(left) = wanted.pending.get_mut(pending) else { return };
        let mut reads: Vec<ReadsOfClass> = Vec::new();
        for _ in 0..blocks {
            let Some((key, class)) = left.keys.pop_front() else { break };
            left.taken += 1;
            if let Some(id) = self.staged.find(&key, class) {
                self.staged.hold(id);
                wanted.blocks.push(ListedBlock { key, class, staged: Some(id) });
                continue;
            }
            let entry = match cache.ahead_copy(&key, class) {
                AheadCopy::OnDevice(_, entry) => entry,
                AheadCopy::InDram | AheadCopy::Filling => {
                    wanted.blocks.push(ListedBlock { key, class, staged: None });
                    continue;
                }
                AheadCopy::Absent => {
                    *keys -= 1;
                    self.counters.prefetch_unknown_keys += 1;
                    wanted.known = false;
                    continue;
                }
            };
            let id = self.staged.insert(StagedBlock::requested(cache, (key, class), session));
            wanted.blocks.push(ListedBlock { key, class, staged: Some(id) });
            let block = (id.slot(), LocalBlock::Stored(entry));
            match reads.iter_mut().find(|(other, _)| *other == class) {
                Some((_, of_class)) => of_class.push(block),
                None => reads.push((class, vec![block])),
            }
        }
        let staged_until = cx.now.after(cx.settings.prefetch.staged);
        if !reads.is_empty() && wanted.due.is_none_or(|due| staged_until < due) {
            if let Some(before) = wanted.due.replace(staged_until) {
                self.timers.clear(before, (session, request));
            }
            self.timers.set(staged_until, (session, request));
        }
        self.fetch(cache, cx, reads);
    }

    /// Requests fills, one request for each size class.
    pub(super) fn fetch(&mut self, cache: &Cache, cx: &Context, reads: Vec<ReadsOfClass>) {
        self.outcomes.extend(reads.into_iter().map(|(class, local)| {
            PrefetchOutcome::Fetch(FillRequest {
                object: (WaiterOwner::Prefetch, 0),
                layout: cache.size_class(class).layout,
                read_bytes: cx.settings.read_bytes_default,
                class: ReadClass::Prefetch,
                joins: Joins::Local,
                local,
                imports: None,
                remote: None,
            })
        }));
    }
}
