//! Which blocks peers keep reading.
//!
//! A table of so many keys (space-saving): a key that is not in it takes the place of the one that was counted least, and
//! begins with that one's count as its possible error. A key is hot when it was certainly read often enough. Counts are
//! halved with every window, by the first read after its end: no timer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_policy::{BlockKey, Tick};

use super::limits::HOT_KEYS_MAX;

/// Windows in a row after which every 32-bit count has been halved to nothing.
const WINDOWS_KEPT: u64 = 32;

/// See the module.
#[derive(Debug)]
pub(super) struct Hot {
    reads: u32,
    window: Duration,
    window_ends: Tick,
    counts: BTreeMap<BlockKey, Count>,
    /// The same keys by count.
    by_count: BTreeSet<(u32, BlockKey)>,
}

#[derive(Clone, Copy, Debug)]
struct Count {
    /// Reads, at the most.
    count: u32,
    /// So many of them may be another key's.
    error: u32,
    told: Told,
}

/// Whether a key was found hot in this window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    No,
    Yes,
}

/// What a read makes of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heat {
    /// Not hot, or known to be.
    NoNews,
    /// Hot, for the first time in this window.
    BecameHot,
}

impl Hot {
    /// `reads` within `window` make a key hot.
    pub(super) fn new(reads: u32, window: Duration) -> Hot {
        Hot {
            reads: reads.max(1),
            window: window.max(Duration::from_millis(1)),
            window_ends: Tick(0),
            counts: BTreeMap::new(),
            by_count: BTreeSet::new(),
        }
    }

    /// A peer reads a block.
    pub(super) fn note(&mut self, key: BlockKey, now: Tick) -> Heat {
        self.pass_windows(now);
        let mut count = match self.counts.get(&key) {
            Some(known) => *known,
            None => self.make_place(),
        };
        self.by_count.remove(&(count.count, key));
        count.count = count.count.saturating_add(1);
        let hot = count.count - count.error >= self.reads;
        let news = hot && count.told == Told::No;
        if news {
            count.told = Told::Yes;
        }
        self.by_count.insert((count.count, key));
        self.counts.insert(key, count);
        if news { Heat::BecameHot } else { Heat::NoNews }
    }

    /// Keys that are counted, and whether both tables agree; for the audit.
    pub(super) fn audit(&self) -> Result<(), String> {
        let agree = self.counts.iter().all(|(key, count)| self.by_count.contains(&(count.count, *key)));
        let sound = self.counts.values().all(|count| count.error < count.count);
        if agree && sound && self.counts.len() == self.by_count.len() && self.counts.len() <= HOT_KEYS_MAX {
            return Ok(());
        }
        Err(format!("{} keys counted, {} in order", self.counts.len(), self.by_count.len()))
    }

    /// A count for a new key; drops the least one when the table is full.
    fn make_place(&mut self) -> Count {
        let mut inherited = 0;
        if self.counts.len() >= HOT_KEYS_MAX
            && let Some((least, key)) = self.by_count.pop_first()
        {
            self.counts.remove(&key);
            inherited = least;
        }
        Count { count: inherited, error: inherited, told: Told::No }
    }

    /// Halves all counts once for each window that has ended.
    fn pass_windows(&mut self, now: Tick) {
        if now < self.window_ends {
            return;
        }
        let window_us = u64::try_from(self.window.as_micros()).unwrap_or(u64::MAX);
        let over = (now.0 - self.window_ends.0) / window_us + 1;
        self.window_ends = now.after(self.window);
        let halvings = over.min(WINDOWS_KEPT) as u32;
        let halved = |count: u32| count.checked_shr(halvings).unwrap_or(0);
        self.counts.retain(|_, count| {
            *count = Count { count: halved(count.count), error: halved(count.error), told: Told::No };
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
    fn a_key_becomes_hot_once_in_a_window() {
        let mut hot = Hot::new(4, WINDOW);
        let heats: Vec<Heat> = (0..6).map(|second| hot.note(key(1), at(second))).collect();
        assert_eq!(heats.iter().position(|heat| *heat == Heat::BecameHot), Some(3));
        assert_eq!(heats.iter().filter(|heat| **heat == Heat::BecameHot).count(), 1);
        assert_eq!(hot.note(key(1), at(61)), Heat::BecameHot, "half of six, and one more, in the next one");
        hot.audit().expect("consistent");
    }

    #[test]
    fn reads_of_long_ago_do_not_count() {
        let mut hot = Hot::new(4, WINDOW);
        (0..3).for_each(|_| assert_eq!(hot.note(key(1), at(0)), Heat::NoNews));
        assert_eq!(hot.note(key(1), at(400)), Heat::NoNews);
        assert_eq!(hot.counts[&key(1)].count, 1);
    }

    #[test]
    fn many_cold_keys_neither_push_a_hot_one_out_nor_are_taken_for_hot() {
        let mut hot = Hot::new(4, WINDOW);
        let mut told = Vec::new();
        for number in 0..40_000 {
            if hot.note(key(number), at(1)) == Heat::BecameHot {
                told.push(number);
            }
            if number % 1000 == 0 && hot.note(key(1 << 40), at(1)) == Heat::BecameHot {
                told.push(1 << 40);
            }
        }
        assert_eq!(told, [1 << 40]);
        assert_eq!(hot.counts.len(), HOT_KEYS_MAX);
        hot.audit().expect("consistent");
    }
}
