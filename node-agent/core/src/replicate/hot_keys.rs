//! Detection of hot blocks: blocks that peers read often.
//!
//! A bounded table of read counts (the space-saving algorithm). A new key replaces the key with the lowest
//! count and inherits that count as its possible error. A key is hot when it was certainly read often enough.
//! The first read after the end of a window halves all counts, so no timer is needed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_policy::{BlockKey, Tick};

use crate::limits::HOT_KEYS_MAX;

/// Windows after which repeated halving has reduced every 32-bit count to zero.
const WINDOWS_KEPT: u64 = 32;

/// Read counts of the most read keys.
#[derive(Debug)]
pub(crate) struct HotKeys {
    reads: u32,
    window: Duration,
    window_ends: Tick,
    counts: BTreeMap<BlockKey, Count>,
    /// The same keys, ordered by count.
    by_count: BTreeSet<(u32, BlockKey)>,
}

#[derive(Clone, Copy, Debug)]
struct Count {
    /// Upper bound of the number of reads.
    count: u32,
    /// Part of the count that may belong to other keys.
    error: u32,
    reported: Reported,
}

/// Whether a key was reported as hot in this window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reported {
    No,
    Yes,
}

/// Result of counting a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heat {
    /// The key is not hot, or was reported already.
    Unchanged,
    /// The key became hot, for the first time in this window.
    BecameHot,
}

impl HotKeys {
    /// Creates a table in which `reads` within `window` make a key hot.
    pub(crate) fn new(reads: u32, window: Duration) -> HotKeys {
        HotKeys {
            reads: reads.max(1),
            window: window.max(Duration::from_millis(1)),
            window_ends: Tick(0),
            counts: BTreeMap::new(),
            by_count: BTreeSet::new(),
        }
    }

    /// Counts a read by a peer.
    pub(crate) fn note(&mut self, key: BlockKey, now: Tick) -> Heat {
        self.end_windows(now);
        let mut count = match self.counts.get(&key) {
            Some(known) => *known,
            None => self.new_count(),
        };
        self.by_count.remove(&(count.count, key));
        count.count = count.count.saturating_add(1);
        let hot = count.count - count.error >= self.reads;
        let is_new = hot && count.reported == Reported::No;
        if is_new {
            count.reported = Reported::Yes;
        }
        self.by_count.insert((count.count, key));
        self.counts.insert(key, count);
        if is_new { Heat::BecameHot } else { Heat::Unchanged }
    }

    /// Checks the invariants of the table, for the audit.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let is_consistent =
            self.counts.iter().all(|(key, count)| self.by_count.contains(&(count.count, *key)));
        let is_bounded = self.counts.values().all(|count| count.error < count.count);
        if is_consistent
            && is_bounded
            && self.counts.len() == self.by_count.len()
            && self.counts.len() <= HOT_KEYS_MAX
        {
            return Ok(());
        }
        Err(format!("{} keys in the table, {} in the order", self.counts.len(), self.by_count.len()))
    }

    /// Returns the count for a new key; removes the key with the lowest count if the table is full.
    fn new_count(&mut self) -> Count {
        let mut inherited = 0;
        if self.counts.len() >= HOT_KEYS_MAX
            && let Some((least, key)) = self.by_count.pop_first()
        {
            self.counts.remove(&key);
            inherited = least;
        }
        Count { count: inherited, error: inherited, reported: Reported::No }
    }

    /// Halves all counts once for each window that has ended.
    fn end_windows(&mut self, now: Tick) {
        if now < self.window_ends {
            return;
        }
        let window_us = u64::try_from(self.window.as_micros()).unwrap_or(u64::MAX);
        let over = (now.0 - self.window_ends.0) / window_us + 1;
        self.window_ends = now.after(self.window);
        let halvings = over.min(WINDOWS_KEPT) as u32;
        let halved = |count: u32| count.checked_shr(halvings).unwrap_or(0);
        self.counts.retain(|_, count| {
            *count = Count { count: halved(count.count), error: halved(count.error), reported: Reported::No };
            count.count > count.error
        });
        self.by_count = self.counts.iter().map(|(key, count)| (count.count, *key)).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_secs(60);

    fn key(number: u64) -> BlockKey {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        BlockKey(bytes)
    }

    fn at(seconds: u64) -> Tick {
        Tick(seconds * 1_000_000)
    }

    #[test]
    fn reports_hot_key_once_per_window() {
        let mut hot = HotKeys::new(4, WINDOW);
        let heats: Vec<Heat> = (0..6).map(|second| hot.note(key(1), at(second))).collect();
        assert_eq!(heats.iter().position(|heat| *heat == Heat::BecameHot), Some(3));
        assert_eq!(heats.iter().filter(|heat| **heat == Heat::BecameHot).count(), 1);
        assert_eq!(hot.note(key(1), at(61)), Heat::BecameHot, "half of six, plus one in the next window");
        hot.audit().expect("consistent");
    }

    #[test]
    fn ignores_reads_of_long_ago() {
        let mut hot = HotKeys::new(4, WINDOW);
        (0..3).for_each(|_| assert_eq!(hot.note(key(1), at(0)), Heat::Unchanged));
        assert_eq!(hot.note(key(1), at(400)), Heat::Unchanged);
        assert_eq!(hot.counts[&key(1)].count, 1);
    }

    #[test]
    fn many_cold_keys_neither_displace_a_hot_key_nor_become_hot() {
        let mut hot = HotKeys::new(4, WINDOW);
        let mut reported = Vec::new();
        for number in 0..40_000 {
            if hot.note(key(number), at(1)) == Heat::BecameHot {
                reported.push(number);
            }
            if number % 1000 == 0 && hot.note(key(1 << 40), at(1)) == Heat::BecameHot {
                reported.push(1 << 40);
            }
        }
        assert_eq!(reported, [1 << 40]);
        assert_eq!(hot.counts.len(), HOT_KEYS_MAX);
        hot.audit().expect("consistent");
    }
}
