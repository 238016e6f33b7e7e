//! Lookahead prefetch: which blocks to read from NVMe into DRAM before the requests that need them run.
//!
//! ```text
//!  hint of an engine ──▶ plan ──▶ reads with the rank Prefetch ──▶ staged in DRAM ──▶ load
//!   iteration time        │ per channel: k · T_iter ≥ ℓ + (queued + n·S)/β      time
//!   requests, k, keys     │              queued + n·S ≤ 80 % of β · T_iter      bandwidth (k = 1: 100 %)
//!                         └ over all:    staged ≤ reserve                       memory
//! ```
//!
//! A pass sorts the requests by confidence / k and gives each as many of its leading blocks as all three
//! conditions admit. The rest waits for the next pass, or is loaded without a prefetch. The conditions are those of
//! TierKV §3.4 and §3.5, applied block by block: a request whose blocks do not all arrive in time still gets
//! the head of its chain.
//!
//! A pass costs a sort of the candidates and one step for each, and does not depend on the number of their blocks.
//!
//! Out of scope: I/O, the keys of blocks, and the hop from DRAM to a GPU, which is the engine's load.

use std::time::Duration;

mod channel;
mod hints;
mod iteration;
#[cfg(test)]
mod tests;

pub use channel::{Channel, Path};
pub use hints::{
    BegunRequest, HINT_VERSION, ITERATION_MAX, Lookahead, LookaheadReport, LookaheadRequest, RequestState,
};
pub use iteration::{ITERATION_WINDOW, IterationTime, LookaheadWindow, WINDOW_MAX, WINDOW_MIN};

/// Certain: the confidence of an engine's own schedule, in thousandths.
pub const CONFIDENCE_MAX: u16 = 1000;

/// Default of [`Pass::high_water_permille`] (TierKV §3.4: 80 %).
pub const HIGH_WATER_PERMILLE: u64 = 800;

/// Blocks of one request that can be read over one channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Iterations until the request runs; at least 1.
    pub iterations: u32,
    /// Probability that it runs then, in thousandths.
    pub confidence: u16,
    /// Index of the channel in [`Pass::channels`].
    pub channel: u8,
    /// Number of blocks.
    pub blocks: u32,
    /// Bytes of a block's slot; above zero.
    pub block_bytes: u64,
}

/// State of a channel at the begin of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelState {
    /// Latency and bandwidth.
    pub path: Path,
    /// Bytes that are being read, for loads and ahead of them.
    pub queued_bytes: u64,
}

/// Input of one pass besides the candidates.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// Expected time of one iteration; above zero.
    pub iteration: Duration,
    /// Requests that run later than this number of iterations wait.
    pub window: u32,
    /// State of each channel.
    pub channels: &'a [ChannelState],
    /// Bytes that may be staged in addition to those that are.
    pub reserve_bytes: u64,
    /// Share of a channel, in thousandths, that transfers may fill in one iteration; [`HIGH_WATER_PERMILLE`] by
    /// default. Beyond it, only blocks of requests that run in the next iteration are read.
    pub high_water_permille: u64,
}

/// Blocks to read now for one candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Index of the candidate.
    pub candidate: usize,
    /// Number of its leading blocks; above zero.
    pub blocks: u32,
}

/// Division of a candidate's blocks, in the order of their chain: those to read now, those that wait for memory, those
/// that wait for bandwidth, and those that cannot arrive in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Index of the candidate.
    pub candidate: usize,
    /// Number of blocks to read now.
    pub admitted: u32,
    /// Number of blocks that wait for memory.
    pub unstaged: u32,
    /// Number of blocks that wait for bandwidth.
    pub deferred: u32,
    /// Number of blocks that cannot arrive in time.
    pub late: u32,
}

/// Result of a pass, and the memory that passes reuse.
#[derive(Debug, Default)]
pub struct Plan {
    /// Blocks to read, the most urgent first.
    pub reads: Vec<Planned>,
    /// Blocks within the window that cannot arrive in time.
    pub late_blocks: u64,
    /// Blocks that wait for bandwidth.
    pub deferred_blocks: u64,
    /// Blocks that wait for memory.
    pub unstaged_blocks: u64,
    /// Candidates within the window of which some blocks wait.
    pub held: Vec<Held>,
    order: Vec<(u64, u32)>,
    queued: Vec<u64>,
}

/// Iterations within which a request of some confidence is planned: the less certain, the later its reads begin.
pub fn weighted_window(window: u32, confidence: u16) -> u32 {
    let weighted = u64::from(window) * u64::from(confidence.min(CONFIDENCE_MAX)) / u64::from(CONFIDENCE_MAX);
    u32::try_from(weighted).unwrap_or(u32::MAX)
}

impl Plan {
    /// Decides which blocks are read now.
    pub fn make(&mut self, pass: &Pass<'_>, candidates: &[Candidate]) {
        self.reads.clear();
        self.order.clear();
        self.queued.clear();
        self.held.clear();
        (self.late_blocks, self.deferred_blocks, self.unstaged_blocks) = (0, 0, 0);
        self.queued.extend(pass.channels.iter().map(|channel| channel.queued_bytes));
        for (at, candidate) in (0..).zip(candidates) {
            let window = weighted_window(pass.window, candidate.confidence);
            if (1..=window).contains(&candidate.iterations) && candidate.blocks > 0 {
                self.order.push((urgency(candidate), at));
            }
        }
        self.order.sort_unstable();
        let mut reserve = pass.reserve_bytes;
        for at in 0..self.order.len() {
            let (_, index) = self.order[at];
            self.admit(pass, &mut reserve, (index as usize, &candidates[index as usize]));
        }
    }

    fn admit(&mut self, pass: &Pass<'_>, reserve: &mut u64, (index, candidate): (usize, &Candidate)) {
        let Some(channel) = pass.channels.get(usize::from(candidate.channel)) else { return };
        let queued = &mut self.queued[usize::from(candidate.channel)];
        let Candidate { iterations, blocks, block_bytes, .. } = *candidate;
        let whole = |bytes: u64| bytes.checked_div(block_bytes).unwrap_or(0);
        let in_time = channel.path.bytes_within(pass.iteration.saturating_mul(iterations));
        let in_time = whole(in_time.saturating_sub(*queued)).min(u64::from(blocks));
        let share = if iterations == 1 { 1000 } else { pass.high_water_permille };
        let bandwidth = channel.path.bytes_in(pass.iteration).saturating_mul(share) / 1000;
        let bandwidth = bandwidth.saturating_sub(*queued);
        // A block that takes longer than an iteration is read while nothing else is.
        let bandwidth = whole(bandwidth).max(u64::from(*queued == 0));
        let admitted = in_time.min(bandwidth).min(whole(*reserve));
        let late = u64::from(blocks) - in_time;
        let deferred = in_time.saturating_sub(bandwidth);
        let unstaged = in_time.min(bandwidth) - admitted;
        self.late_blocks += late;
        self.deferred_blocks += deferred;
        self.unstaged_blocks += unstaged;
        if admitted < u64::from(blocks) {
            // Each is at most the number of blocks, which has 32 bits.
            let [admitted, unstaged, deferred, late] =
                [admitted, unstaged, deferred, late].map(|count| count as u32);
            self.held.push(Held { candidate: index, admitted, unstaged, deferred, late });
        }
        if admitted > 0 {
            *queued += admitted * block_bytes;
            *reserve -= admitted * block_bytes;
            // At most the number of blocks, which has 32 bits.
            self.reads.push(Planned { candidate: index, blocks: admitted as u32 });
        }
    }
}

/// Reciprocal of the priority, confidence / k, as an integer: the smallest is read first.
fn urgency(candidate: &Candidate) -> u64 {
    let confidence = u64::from(candidate.confidence.clamp(1, CONFIDENCE_MAX));
    (u64::from(candidate.iterations) << 20) / confidence
}
