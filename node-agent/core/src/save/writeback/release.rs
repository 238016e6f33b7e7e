//! Release of due writes: all at once, or what the windows of the engines admit.

use reprise_policy::Tick;

use super::Urgency;
use crate::cache::Cache;
use crate::context::Context;
use crate::limits::DEFERRED_SHARE_DIVISOR;
use crate::save::Save;
use crate::save::slack::{AtOnce, Release, ReleaseCause};

impl Save {
    /// Why slack does not limit the next flush; `None` if it does.
    pub(super) fn unlimited(&self, cache: &Cache, cx: &Context) -> Option<AtOnce> {
        if self.writeback.is_stopping {
            Some(AtOnce::Stopping)
        } else if cx.settings.slack_delay.is_zero() || cache.writable_devices() == 0 {
            Some(AtOnce::NoReport)
        } else if let Err(why) = self.writeback.slack.window(cx.now) {
            Some(why)
        } else if self.awaited_tickets > 0 {
            Some(AtOnce::Awaited)
        } else if self.is_short_of_memory(cache, cx) || self.writeback.urgency == Urgency::Immediate {
            Some(AtOnce::Memory)
        } else {
            None
        }
    }

    /// Whether due writes wait for reads from devices. The order of reads and writes within a device does not suffice: a
    /// write that has started delays the reads behind it.
    pub(super) fn yields_to_reads(&self, cache: &Cache, cx: &Context, why: AtOnce) -> bool {
        let is_free = matches!(why, AtOnce::NoReport | AtOnce::Fallback | AtOnce::Idle);
        is_free
            && !cx.settings.slack_delay.is_zero()
            && cache.writable_devices() > 0
            && self.awaited_tickets == 0
            && self.writeback.urgency != Urgency::Immediate
            && !self.is_short_of_memory(cache, cx)
    }

    /// Writes the blocks that have waited for the longest time. Returns when the next ones have.
    pub(super) fn write_back_at_bound(&mut self, cache: &mut Cache, cx: &mut Context) -> Option<Tick> {
        let longest = cx.settings.writeback_delay + cx.settings.slack_delay;
        if let Some(late) = cx.now.since(Tick(0)).checked_sub(longest) {
            let since = Tick(0).after(late);
            self.release(cache, cx, Release { since, ..Release::at_once(AtOnce::DelayBound) });
        }
        let bounds = self.writeback.queue.fronts().map(|(_, since)| since.after(longest));
        bounds.filter(|bound| *bound > cx.now).min()
    }

    /// Whether unsaved blocks take so much of the arena that their writes must not wait.
    fn is_short_of_memory(&self, cache: &Cache, cx: &Context) -> bool {
        let engines = self.reserved_bytes + self.writeback.unsaved_bytes_of_engines(cache);
        let engines_max = cache.share_of_arena(cx.settings.arena_unsaved_permille);
        engines > engines_max / DEFERRED_SHARE_DIVISOR
            || self.writeback.replicated_bytes > cache.pull_bytes_max() / DEFERRED_SHARE_DIVISOR
    }

    /// Writes what the windows of the engines admit, and the blocks that no window will admit in time. Returns when
    /// to continue with those that wait.
    pub(super) fn write_back_in_slack(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        device_reads: usize,
    ) -> Option<Tick> {
        let longest = cx.settings.writeback_delay + cx.settings.slack_delay;
        let bytes_max = self.writeback.slack.window(cx.now).ok()?.bytes_max;
        self.release(cache, cx, Release { above: bytes_max, ..Release::at_once(AtOnce::NothingFits) });
        if let Some(late) = cx.now.since(Tick(0)).checked_sub(longest) {
            let since = Tick(0).after(late);
            self.release(cache, cx, Release { since, ..Release::at_once(AtOnce::Overdue) });
        }
        let window = self.writeback.slack.window(cx.now).ok()?;
        let cause = ReleaseCause::InWindow { phase: window.phase, opened: window.opened };
        let bytes = if device_reads > 0 { 0 } else { window.bytes };
        let left = bytes - self.release(cache, cx, Release { cause, bytes, above: 0, since: cx.now });
        let waiting = self.writeback.queue.fronts().filter(|(slot_bytes, since)| {
            (left < *slot_bytes && *slot_bytes <= bytes_max) && since.after(longest) > cx.now
        });
        let overdue = waiting.map(|(_, since)| since.after(longest)).min()?;
        let next = window.next.filter(|_| device_reads == 0);
        Some(overdue.min(window.expires).min(next.unwrap_or(overdue)))
    }

    /// Starts batches of released blocks while devices have room. Returns the bytes written.
    pub(super) fn release(&mut self, cache: &mut Cache, cx: &mut Context, mut release: Release) -> u64 {
        let included = |(slot_bytes, since)| release.includes(slot_bytes, since, 0);
        if !self.writeback.queue.fronts().any(included) {
            return 0;
        }
        let bytes = release.bytes;
        while !self.writeback.queue.is_empty() {
            let (started, written) = self.writeback.start_batches(cache, cx, &release);
            if started == 0 {
                break;
            }
            self.counters.writeback_batches += started;
            release.count(written, &mut self.counters);
            release.bytes -= written.bytes;
            self.writeback.slack.charge(cx.now, written.bytes);
        }
        bytes - release.bytes
    }
}
