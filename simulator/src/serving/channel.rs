//! Shared channels: work-conserving links on which concurrent transfers share the bandwidth equally.
//!
//! A channel has a bandwidth β and a latency ℓ. A transfer of n bytes first waits ℓ, which does not occupy the channel
//! (commands of other transfers proceed), and then competes for the bandwidth: with m active transfers, each
//! receives β / m. This is processor sharing, as DMA engines and NVMe controllers interleave the chunks of
//! their queues. First in, first out would let one long load delay all short ones behind it, which hardware
//! with several queues does not do. Both finish the last of several transfers at the same time.
//!
//! **Virtual time.** `served` is the number of bytes that a transfer present since the start of the run would have
//! received. A transfer that starts at `served = v` ends when `served` reaches v + n, so transfers end in the order of
//! these marks, and an arrival costs O(log m) instead of O(m). `served` has [`FRACTION_BITS`] fractional bits.
//!
//! Invariant: a channel is busy exactly while it has a transfer, and the completed bytes never exceed β · busy time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::events::{Nanos, SECOND};

/// Fractional bits of virtual time. The error of one step is below 2⁻²⁰ bytes.
const FRACTION_BITS: u32 = 20;

/// Identifies a transfer for its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Transfer(pub u64);

/// A shared link; see the module.
#[derive(Clone, Debug)]
pub struct Channel {
    bytes_per_second: u64,
    latency: u64,
    /// Virtual time, in bytes with fractional bits.
    served: u128,
    at: Nanos,
    /// Virtual end, number, bytes, and owner's identification of each active transfer.
    active: BinaryHeap<Reverse<(u128, u64, u64, Transfer)>>,
    /// Transfers that wait for their latency: begin, number, bytes.
    starting: BinaryHeap<Reverse<(Nanos, u64, u64, Transfer)>>,
    started: u64,
    /// Totals of the run.
    pub totals: Totals,
}

/// Totals of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes of completed transfers.
    pub bytes: u64,
    /// Number of completed transfers.
    pub transfers: u64,
    /// Nanoseconds with at least one active transfer.
    pub busy: u64,
    /// Bytes of transfers that were started.
    pub requested: u64,
}

impl Channel {
    /// Creates an idle channel. The bandwidth is above zero.
    pub fn new(bytes_per_second: u64, latency_nanos: u64) -> Channel {
        Channel {
            bytes_per_second: bytes_per_second.max(1),
            latency: latency_nanos,
            served: 0,
            at: Nanos(0),
            active: BinaryHeap::new(),
            starting: BinaryHeap::new(),
            started: 0,
            totals: Totals::default(),
        }
    }

    /// Bandwidth in bytes per second.
    pub fn bytes_per_second(&self) -> u64 {
        self.bytes_per_second
    }

    /// Latency of transfers in nanoseconds.
    pub fn latency(&self) -> u64 {
        self.latency
    }

    /// Bytes that were requested and have not been completed.
    pub fn queued_bytes(&self) -> u64 {
        self.totals.requested - self.totals.bytes
    }

    /// Starts a transfer. Time does not decrease from call to call.
    pub fn start(&mut self, now: Nanos, bytes: u64, transfer: Transfer) {
        self.start_after(now, 0, bytes, transfer);
    }

    /// Starts a transfer that waits for some nanoseconds in addition to the latency.
    pub fn start_after(&mut self, now: Nanos, delay: u64, bytes: u64, transfer: Transfer) {
        self.totals.requested += bytes;
        self.started += 1;
        let begin = now.after(self.latency.saturating_add(delay));
        self.starting.push(Reverse((begin, self.started, bytes, transfer)));
    }

    /// Bytes of a transfer that the channel has served, as of the last advance; `None` if it has none in progress with
    /// this identification.
    pub fn served_bytes(&self, transfer: Transfer) -> Option<u64> {
        let is_same = |other: &Transfer| *other == transfer;
        if self.starting.iter().any(|Reverse((.., other))| is_same(other)) {
            return Some(0);
        }
        let active = self.active.iter().find(|Reverse((.., other))| is_same(other));
        active.map(|Reverse((mark, _, bytes, _))| {
            let rest = mark.saturating_sub(self.served).div_ceil(1 << FRACTION_BITS);
            bytes - u64::try_from(rest).unwrap_or(u64::MAX).min(*bytes)
        })
    }

    /// Ends a transfer early, as of the last advance. The bytes that were served count as requested and completed.
    pub fn cancel(&mut self, transfer: Transfer) {
        let Some(served) = self.served_bytes(transfer) else { return };
        let entry = self.starting.iter().find(|Reverse((.., other))| *other == transfer);
        let waiting = entry.map(|Reverse((_, _, bytes, _))| *bytes);
        let active = self.active.iter().find(|Reverse((.., other))| *other == transfer);
        let bytes = waiting.or(active.map(|Reverse((_, _, bytes, _))| *bytes)).unwrap_or(served);
        self.starting.retain(|Reverse((.., other))| *other != transfer);
        self.active.retain(|Reverse((.., other))| *other != transfer);
        self.totals.requested -= bytes - served;
        self.totals.bytes += served;
    }

    /// Time at which the next transfer ends, if none is started before; `None` without transfers.
    ///
    /// A transfer that becomes active earlier delays it, so the caller asks again then.
    pub fn next_end(&self) -> Option<Nanos> {
        let begin = self.starting.peek().map(|Reverse((at, ..))| *at);
        let end = self.active.peek().map(|Reverse((mark, ..))| self.time_of(*mark));
        match (begin, end) {
            (Some(begin), Some(end)) => Some(begin.min(end)),
            (begin, end) => begin.or(end),
        }
    }

    /// Advances the channel to a time and appends the transfers that ended, in the order of their ends.
    ///
    /// The caller advances at each [`Channel::next_end`]; advancing further at once is equivalent.
    pub fn advance(&mut self, now: Nanos, ended: &mut Vec<(Nanos, Transfer)>) {
        while let Some(next) = self.next_end().filter(|next| *next <= now) {
            self.move_to(next);
            // Ends before begins: a transfer that ends now does not share with one that begins now.
            while let Some(Reverse((mark, _, bytes, transfer))) = self.active.peek().copied() {
                if self.time_of(mark) > next {
                    break;
                }
                self.active.pop();
                // The end is rounded up to a nanosecond, in which the channel may have served more.
                self.served = self.served.max(mark);
                self.totals.transfers += 1;
                self.totals.bytes += bytes;
                ended.push((next, transfer));
            }
            while let Some(Reverse((at, number, bytes, transfer))) = self.starting.peek().copied() {
                if at > next {
                    break;
                }
                self.starting.pop();
                let mark = self.served + (u128::from(bytes) << FRACTION_BITS);
                self.active.push(Reverse((mark, number, bytes, transfer)));
            }
        }
        self.move_to(now);
    }

    fn move_to(&mut self, now: Nanos) {
        let elapsed = now.since(self.at);
        self.at = self.at.max(now);
        let sharing = self.active.len() as u128;
        if sharing > 0 {
            let bytes = (u128::from(elapsed) * u128::from(self.bytes_per_second)) << FRACTION_BITS;
            self.served += bytes / (sharing * u128::from(SECOND));
            self.totals.busy += elapsed;
        }
    }

    /// Time at which virtual time reaches a mark with the present transfers, rounded up.
    fn time_of(&self, mark: u128) -> Nanos {
        let rest = mark.saturating_sub(self.served) * self.active.len().max(1) as u128 * u128::from(SECOND);
        let nanos = rest.div_ceil(u128::from(self.bytes_per_second) << FRACTION_BITS);
        self.at.after(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::Random;
    use super::*;

    /// Runs transfers of (start, bytes) and returns (number, end) in the order of the ends.
    fn run(channel: &mut Channel, transfers: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let mut ended = Vec::new();
        for (at, (start, bytes)) in (0..).zip(transfers) {
            channel.advance(Nanos(*start), &mut ended);
            channel.start(Nanos(*start), *bytes, Transfer(at));
        }
        while let Some(next) = channel.next_end() {
            channel.advance(next, &mut ended);
        }
        ended.iter().map(|(at, transfer)| (transfer.0, at.0)).collect()
    }

    #[test]
    fn single_transfer_takes_latency_plus_bytes_over_bandwidth() {
        // TierKV, appendix C: 2 MB over 50 GB/s with 5 µs take 45 µs.
        let mut channel = Channel::new(50_000_000_000, 5_000);
        assert_eq!(run(&mut channel, &[(0, 2_000_000)]), [(0, 45_000)]);
    }

    #[test]
    fn two_transfers_share_and_a_short_one_does_not_starve_behind_a_long_one() {
        // 1 byte per nanosecond. Alone until 100, then half each: the short one ends at 100 + 2 · 50.
        let mut channel = Channel::new(SECOND, 0);
        assert_eq!(run(&mut channel, &[(0, 1_000), (100, 50)]), [(1, 200), (0, 1_050)]);
    }

    #[test]
    fn bytes_are_conserved_and_work_is_conserved() {
        let mut random = Random::new(7);
        for _ in 0..50 {
            let mut start = 0;
            let transfers: Vec<(u64, u64)> = (0..200)
                .map(|_| {
                    start += random.below(3_000);
                    (start, 1 + random.below(5_000))
                })
                .collect();
            let mut channel = Channel::new(SECOND, 0);
            let ends = run(&mut channel, &transfers);
            let total: u64 = transfers.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(
                (channel.totals.bytes, channel.totals.requested, channel.queued_bytes()),
                (total, total, 0)
            );
            assert_eq!((ends.len(), channel.totals.transfers), (200, 200));
            // At one byte per nanosecond a conserving channel is busy once per byte; each end rounds up by one.
            assert!(
                (total..=total + 400).contains(&channel.totals.busy),
                "{} of {total}",
                channel.totals.busy
            );
            // A conserving channel ends a busy period at the same time as first in, first out.
            let mut free = 0;
            transfers.iter().for_each(|(start, bytes)| free = free.max(*start) + bytes);
            let last = ends.iter().map(|(_, end)| *end).max().expect("transfers ended");
            assert!((free..=free + 400).contains(&last), "{last} instead of {free}");
        }
    }

    #[test]
    fn no_transfer_waits_longer_than_all_bytes_that_share_with_it() {
        let mut random = Random::new(3);
        let transfers: Vec<(u64, u64)> = (0..500).map(|at| (at * 900, 1 + random.below(2_000))).collect();
        let total: u64 = transfers.iter().map(|(_, bytes)| bytes).sum();
        let ends = run(&mut Channel::new(SECOND, 0), &transfers);
        assert_eq!(ends.len(), transfers.len(), "every transfer ends");
        for (number, end) in ends {
            let (start, bytes) = transfers[number as usize];
            // With m sharing transfers, a transfer of n bytes takes at most n · m: m is at most all of them.
            assert!(end - start <= (bytes * 500).min(total) + 500);
        }
    }

    #[test]
    fn cancelled_transfer_counts_its_received_bytes_and_leaves_the_bandwidth_to_others() {
        // 1 byte per nanosecond. Half each until 200, then the other alone: 100 + 900 more.
        let (mut channel, mut ended) = (Channel::new(SECOND, 0), Vec::new());
        channel.start(Nanos(0), 1_000, Transfer(0));
        channel.start(Nanos(0), 1_000, Transfer(1));
        channel.advance(Nanos(200), &mut ended);
        assert_eq!(channel.served_bytes(Transfer(0)), Some(100));
        channel.cancel(Transfer(0));
        assert_eq!(channel.served_bytes(Transfer(0)), None);
        while let Some(next) = channel.next_end() {
            channel.advance(next, &mut ended);
        }
        assert_eq!(ended, [(Nanos(1_100), Transfer(1))]);
        assert_eq!((channel.totals.requested, channel.totals.bytes), (1_100, 1_100));
    }

    #[test]
    fn mean_sojourn_of_fixed_sizes_is_that_of_processor_sharing() {
        // M/G/1 processor sharing: mean sojourn = service / (1 − ρ), for any distribution of sizes.
        let (service, load, count) = (1_000_u64, 0.6, 40_000);
        let mut random = Random::new(11);
        let mut at = 0.0;
        let transfers: Vec<(u64, u64)> = (0..count)
            .map(|_| {
                at += random.exponential(service as f64 / load);
                (at as u64, service)
            })
            .collect();
        let ends = run(&mut Channel::new(SECOND, 0), &transfers);
        let sum: u64 = ends.iter().map(|(number, end)| end - transfers[*number as usize].0).sum();
        let (mean, expected) = (sum as f64 / f64::from(count), service as f64 / (1.0 - load));
        assert!((mean / expected - 1.0).abs() < 0.05, "{mean} instead of {expected}");
    }
}
