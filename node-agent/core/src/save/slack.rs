//! Limits of the write-back: device writes go into the slack of the layers that engines compute.
//!
//! ```text
//!  blocks are due ──► no recent report, engines idle, memory short, awaited … ──► all at once
//!        │
//!        ├── larger than every window, or deferred for the maximum ──► these at once
//!        ├── blocks are being read from devices ──► the others wait: reads come first
//!        └── otherwise ──► as many as fit the open windows; the rest waits for the next ones
//! ```
//!
//! A report opens one window after another, in the layers of its computation, until the next report or until it
//! expires. Unused slack ends with its window. The engines of a node share its devices, so a write counts against the
//! windows of all of them.
//!
//! Reads are never deferred: they start at once, also when they exceed a window or are the bottleneck.
//!
//! Invariant: a report belongs to an open session.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_policy::slack::{LayerSlack, Phase, WriteSlack};
use reprise_policy::{SessionId, Tick};

use crate::counters::SaveCounters;
use crate::limits::{SLACK_REPORT_MIN, SLACK_REPORT_WINDOWS};

/// Last report of each session with a slack profile.
#[derive(Debug, Default)]
pub(super) struct Slack {
    reports: BTreeMap<SessionId, Report>,
}

/// Report of a session about its computation.
#[derive(Debug)]
struct Report {
    slack: WriteSlack,
    /// Time of the latest report with this slack.
    reported: Tick,
    /// Time of the first report with this slack, at which its first window opened.
    began: Tick,
    /// Bytes written in the window that ends at `spent_until`.
    spent: u64,
    spent_until: Tick,
}

/// Why writes do not wait for a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AtOnce {
    /// No session has reported a computation with a profile recently, or deferring is disabled.
    NoReport,
    /// No window applies, and the profile lets writes continue.
    Fallback,
    /// All engines with a report compute nothing.
    Idle,
    /// No window of a profile fits the block.
    NothingFits,
    /// The block was deferred for the maximum time.
    Overdue,
    /// The block has waited for reads from devices for the maximum time.
    DelayBound,
    /// A client waits until a commit is durable.
    Awaited,
    /// Unsaved blocks take much of the arena.
    Memory,
    /// The agent is about to stop.
    Stopping,
}

/// Windows that are open for writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpenWindow {
    /// Decode, unless an engine computes a prompt.
    pub(super) phase: Phase,
    /// Time at which the last of the windows opened.
    pub(super) opened: Tick,
    /// Bytes that fit all windows.
    pub(super) bytes: u64,
    /// Bytes that fit the largest window of every profile.
    pub(super) bytes_max: u64,
    /// Time at which all windows are open again; `None` if a window fits no write.
    pub(super) next: Option<Tick>,
    /// Time at which the first of the reports expires.
    pub(super) expires: Tick,
}

/// Part of the queue that may be written now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    pub(super) cause: ReleaseCause,
    /// Maximum bytes of all its blocks.
    pub(super) bytes: u64,
    /// Slots of its blocks are larger than this.
    pub(super) above: u64,
    /// Its blocks were queued at this time or before.
    pub(super) since: Tick,
}

/// Reason why blocks are written now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReleaseCause {
    AtOnce(AtOnce),
    InWindow { phase: Phase, opened: Tick },
}

/// Blocks of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    /// Blocks that were due before the window opened.
    pub(super) carried_over: u64,
}

impl Slack {
    /// Records the report of a session; `None`: its model has no profile.
    pub(super) fn report(&mut self, now: Tick, session: SessionId, slack: Option<WriteSlack>) {
        let Some(slack) = slack else { return self.remove(session) };
        let (spent, spent_until) = match self.reports.get_mut(&session) {
            Some(known) if known.slack == slack => {
                known.reported = now;
                return;
            }
            Some(known) => (known.spent, known.spent_until),
            None => (0, now),
        };
        let report = Report { slack, reported: now, began: now, spent, spent_until };
        self.reports.insert(session, report);
    }

    /// Removes the report of a session.
    pub(super) fn remove(&mut self, session: SessionId) {
        self.reports.remove(&session);
    }

    /// Sessions with a report, for the audit.
    pub(super) fn sessions(&self) -> impl Iterator<Item = SessionId> {
        self.reports.keys().copied()
    }

    /// Removes reports that no longer count.
    pub(super) fn drop_expired(&mut self, now: Tick) {
        self.reports.retain(|_, report| report.expires() > now);
    }

    /// Windows that are open now, by all reports.
    ///
    /// # Errors
    /// The reason why no window limits writes.
    pub(super) fn window(&self, now: Tick) -> Result<OpenWindow, AtOnce> {
        let limits = |report: &&Report| matches!(report.slack, WriteSlack::Layers(_));
        let expires = self.reports.values().filter(limits).map(Report::expires).min();
        let Some(expires) = expires else {
            let has = |slack| self.reports.values().any(|report| report.slack == slack);
            return Err(match (has(WriteSlack::Unrestricted), has(WriteSlack::Idle)) {
                (true, _) => AtOnce::Fallback,
                (false, true) => AtOnce::Idle,
                (false, false) => AtOnce::NoReport,
            });
        };
        let mut all = OpenWindow {
            phase: Phase::Decode,
            opened: Tick(0),
            bytes: u64::MAX,
            bytes_max: u64::MAX,
            next: Some(Tick(0)),
            expires,
        };
        for report in self.reports.values() {
            let WriteSlack::Layers(slack) = &report.slack else { continue };
            all.bytes_max = all.bytes_max.min(slack.bytes_max);
            if slack.phase == Phase::Prefill {
                all.phase = Phase::Prefill;
            }
            match report.window(slack, now) {
                Some((opened, closes, left)) => {
                    all.opened = all.opened.max(opened);
                    all.bytes = all.bytes.min(left);
                    all.next = all.next.map(|next| next.max(closes));
                }
                None => (all.bytes, all.next) = (0, None),
            }
        }
        Ok(all)
    }

    /// Counts written bytes against the open windows.
    pub(super) fn charge(&mut self, now: Tick, bytes: u64) {
        for report in self.reports.values_mut() {
            let WriteSlack::Layers(slack) = report.slack else { continue };
            let Some((_, closes, _)) = report.window(&slack, now) else { continue };
            if report.spent_until <= now {
                (report.spent, report.spent_until) = (0, closes);
            }
            report.spent = report.spent.saturating_add(bytes);
        }
    }
}

impl Report {
    /// Time from which the report no longer counts.
    fn expires(&self) -> Tick {
        let windows = match &self.slack {
            WriteSlack::Layers(slack) => cycle(slack) * SLACK_REPORT_WINDOWS,
            WriteSlack::Idle | WriteSlack::Unrestricted => Duration::ZERO,
        };
        self.reported.after(windows.max(SLACK_REPORT_MIN))
    }

    /// Times at which the current window opened and closes, and the bytes left in it; `None` if no write fits.
    fn window(&self, slack: &LayerSlack, now: Tick) -> Option<(Tick, Tick, u64)> {
        let cycle = cycle(slack);
        if slack.bytes == 0 || cycle.is_zero() {
            return None;
        }
        let past = now.since(self.began).as_micros() / cycle.as_micros();
        let opened = self.began.after(cycle * u32::try_from(past).unwrap_or(u32::MAX));
        let spent = if self.spent_until > now { self.spent } else { 0 };
        Some((opened, opened.after(cycle), slack.bytes.saturating_sub(spent)))
    }
}

fn cycle(slack: &LayerSlack) -> Duration {
    Duration::from_micros(u64::from(slack.cycle_micros))
}

impl Written {
    /// Adds a block that was due at a time.
    pub(super) fn add(&mut self, release: &Release, slot_bytes: u64, due: Tick) {
        self.blocks += 1;
        self.bytes += slot_bytes;
        self.carried_over += match release.cause {
            ReleaseCause::InWindow { opened, .. } => u64::from(due < opened),
            ReleaseCause::AtOnce(_) => 0,
        };
    }
}

impl Release {
    /// Creates the release of all blocks.
    pub(super) fn at_once(why: AtOnce) -> Release {
        Release { cause: ReleaseCause::AtOnce(why), bytes: u64::MAX, above: 0, since: Tick(u64::MAX) }
    }

    /// Whether the release includes a block that was queued at this time, next to `bytes` of other blocks.
    pub(super) fn includes(&self, slot_bytes: u64, since: Tick, bytes: u64) -> bool {
        slot_bytes > self.above && since <= self.since && bytes.saturating_add(slot_bytes) <= self.bytes
    }

    /// Counts the blocks of a batch.
    pub(super) fn count(&self, written: Written, counters: &mut SaveCounters) {
        let blocks = match self.cause {
            ReleaseCause::InWindow { phase: Phase::Prefill, .. } => &mut counters.writeback_slack_blocks,
            ReleaseCause::InWindow { phase: Phase::Decode, .. } => &mut counters.writeback_decode_blocks,
            ReleaseCause::AtOnce(why) => match why {
                AtOnce::NoReport => &mut counters.writeback_no_report_blocks,
                AtOnce::Fallback => &mut counters.writeback_fallback_blocks,
                AtOnce::Idle => &mut counters.writeback_idle_blocks,
                AtOnce::NothingFits => &mut counters.writeback_nothing_fits_blocks,
                AtOnce::Overdue => &mut counters.writeback_overdue_blocks,
                AtOnce::DelayBound => &mut counters.writeback_bound_blocks,
                AtOnce::Awaited => &mut counters.writeback_awaited_blocks,
                AtOnce::Memory => &mut counters.writeback_memory_blocks,
                AtOnce::Stopping => &mut counters.writeback_stopping_blocks,
            },
        };
        *blocks += written.blocks;
        counters.writeback_carried_over_blocks += written.carried_over;
    }
}

#[cfg(test)]
mod tests;
