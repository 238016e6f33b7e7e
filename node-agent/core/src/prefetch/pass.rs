//! Passes of the planner, and the reads that they start.

use std::time::Duration;

use reprise_policy::prefetch::{Channel, ChannelState, Pass};
use reprise_policy::{SessionId, Tick};

use crate::cache::{AheadCopy, Cache, LocalBlock, SizeClassId};
use crate::context::Context;
use crate::effect::ReadClass;
use crate::limits::{DEVICES_MAX, LOOKAHEAD_STAGED_MAX, PREFETCH_ARENA_PERMILLE, PREFETCH_SESSION_PERMILLE};
use crate::prefetch::requests::Hinted;
use crate::prefetch::staged::{BlockState, StagedBlock};
use crate::prefetch::{Prefetch, PrefetchOutcome};
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
pub(super) fn reserve(cache: &Cache) -> u64 {
    cache.arena_bytes() * PREFETCH_ARENA_PERMILLE / 1000
}

/// Blocks to read of one size class.
type ReadsOfClass = (SizeClassId, Vec<(u32, LocalBlock)>);

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
        (session, reads): (SessionId, &DeviceReads),
    ) {
        self.hold_staged(session);
        let channels = self.channel_states(reads, cx.now);
        let reserve_bytes = self.free_reserve(cache, session);
        let Some(hinted) = self.sessions.get_mut(&session) else { return };
        let Some(iteration) = hinted.iteration.expected() else { return };
        let (candidates, of) = hinted.candidates();
        let transfer = candidates.iter().map(|candidate| {
            let path = channels[usize::from(candidate.channel)].path;
            path.transfer_time(u64::from(candidate.blocks) * candidate.block_bytes)
        });
        hinted.window.cover(transfer.max().unwrap_or_default(), iteration);
        let window = hinted.window.iterations();
        let mut plan = std::mem::take(&mut self.plan);
        plan.make(&Pass { iteration, window, channels: &channels, reserve_bytes }, &candidates);
        self.counters.prefetch_deferred_blocks += plan.deferred_blocks;
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
                    wanted.blocks.push(id);
                    pending.keys.pop_front();
                    hinted.pending_keys -= 1;
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

    /// Slot bytes that a session may still stage.
    fn free_reserve(&self, cache: &Cache, session: SessionId) -> u64 {
        let reserve = reserve(cache);
        let of_session = reserve * PREFETCH_SESSION_PERMILLE / 1000;
        let free = reserve.saturating_sub(self.staged.bytes());
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
        let Hinted { requests, pending_keys, .. } = hinted;
        let Some(wanted) = requests.get_mut(&request) else { return };
        let Some(left) = wanted.pending.get_mut(pending) else { return };
        let mut reads: Vec<ReadsOfClass> = Vec::new();
        for _ in 0..blocks {
            let Some((key, class)) = left.keys.pop_front() else { break };
            *pending_keys -= 1;
            if let Some(id) = self.staged.find(&key, class) {
                self.staged.hold(id);
                wanted.blocks.push(id);
                continue;
            }
            let entry = match cache.ahead_copy(&key, class) {
                AheadCopy::OnDevice(_, entry) => entry,
                AheadCopy::InDram => continue,
                AheadCopy::Absent => {
                    self.counters.prefetch_unknown_keys += 1;
                    wanted.known = false;
                    continue;
                }
            };
            let size_class = cache.size_class(class);
            let id = self.staged.insert(StagedBlock {
                key,
                size_class: class,
                slot_bytes: size_class.slot_bytes,
                payload_bytes: size_class.layout.block_bytes(),
                session,
                holders: 1,
                state: BlockState::Requested,
            });
            wanted.blocks.push(id);
            let block = (id.slot(), LocalBlock::Stored(entry));
            match reads.iter_mut().find(|(other, _)| *other == class) {
                Some((_, of_class)) => of_class.push(block),
                None => reads.push((class, vec![block])),
            }
        }
        if !reads.is_empty() && wanted.due.is_none() {
            let due = cx.now.after(LOOKAHEAD_STAGED_MAX);
            wanted.due = Some(due);
            self.timers.set(due, (session, request));
        }
        self.outcomes.extend(reads.into_iter().map(|(class, local)| {
            PrefetchOutcome::Fetch(FillRequest {
                object: (WaiterOwner::Prefetch, 0),
                layout: cache.size_class(class).layout,
                read_bytes: cx.settings.read_bytes_default,
                class: ReadClass::Prefetch,
                joins: Joins::DeviceReads,
                local,
                remote: None,
            })
        }));
    }
}
