//! Requests that wait in a queue and load their prefixes when they run, with and without hints (TierKV §3.4).
//!
//! ```text
//!  iteration:  hint: requests that run in the next 4 iterations ── compute ── next request loads its prefix
//!  off:        the same without hints
//! ```
//!
//! Both modes run the same iterations against one agent; they alternate, and each round begins with prefixes on devices
//! only. The computation is a pause. In each round, one request is aborted just before it runs, so that a part of the
//! blocks read ahead is wasted. The time to the first layer is that of the load call: its answer comes with the first
//! layer of all blocks.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_client::{Client, LoadRequest, Scope, Source};
use reprise_policy::BlockKey;
use reprise_policy::prefetch::{CONFIDENCE_MAX, HINT_VERSION, Lookahead, LookaheadRequest, WINDOW_MIN};
use reprise_testkit::bench::fixture::PATIENCE;
use reprise_testkit::bench::report::median;

/// Iterations from the first hint about a request to its load.
pub(crate) const AHEAD: usize = WINDOW_MIN as usize;

/// Requests with prefixes on the devices of one agent.
#[derive(Clone, Copy)]
pub(crate) struct WaitingQueue<'a> {
    pub(crate) client: &'a Client,
    /// Keys of each request's prefix, in the order in which the requests run.
    pub(crate) prefixes: &'a [Vec<BlockKey>],
    /// Time of an iteration.
    pub(crate) iteration: Duration,
}

/// Whether the engine sends hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hints {
    Off,
    On,
}

/// Loads of one round.
#[derive(Clone, Debug, Default)]
struct Round {
    /// Milliseconds until each request had its first layer.
    first_layer_ms: Vec<f64>,
    sources: Sources,
}

/// Sources of loaded blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sources {
    pub(crate) blocks: u64,
    /// Blocks that came from a device. Without hints, the others are shared with a request before.
    pub(crate) from_devices: u64,
}

/// Alternating rounds with and without hints.
#[derive(Clone, Debug, Default)]
pub(crate) struct Comparison {
    /// Median milliseconds to the first layer in each round without hints.
    pub(crate) off: Vec<f64>,
    /// The same with hints.
    pub(crate) on: Vec<f64>,
    /// Loaded blocks without hints.
    pub(crate) sources_off: Sources,
    /// Loaded blocks with hints.
    pub(crate) sources_on: Sources,
    /// The agent's counters of all rounds with hints.
    pub(crate) counted: Counted,
}

/// Counters of the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    /// Bytes that were read ahead.
    pub(crate) read_bytes: u64,
    /// Those of them that no load has used.
    pub(crate) wasted_bytes: u64,
    /// Requests that ran before their blocks were read.
    pub(crate) missed_windows: u64,
}

impl WaitingQueue<'_> {
    /// Runs a pair of rounds that is not counted, and one pair for each item of `pairs`.
    ///
    /// # Errors
    /// A call to the agent fails, a block of a prefix is missing, or the agent has read nothing ahead.
    pub(crate) fn compare<T>(&self, pairs: impl Iterator<Item = T>) -> anyhow::Result<Comparison> {
        self.round(Hints::Off)?;
        self.round(Hints::On)?;
        let (before, mut comparison) = (self.counted()?, Comparison::default());
        for _ in pairs {
            let (off, on) = (self.round(Hints::Off)?, self.round(Hints::On)?);
            comparison.sources_off.add(off.sources);
            comparison.sources_on.add(on.sources);
            comparison.off.push(median(off.first_layer_ms));
            comparison.on.push(median(on.first_layer_ms));
        }
        comparison.counted = self.counted()?.since(before);
        ensure!(comparison.counted.read_bytes > 0, "the agent read nothing ahead");
        Ok(comparison)
    }

    /// Runs the requests once.
    fn round(&self, hints: Hints) -> anyhow::Result<Round> {
        self.client.trim().context("trim")?;
        let mut round = Round::default();
        // Request r runs at the end of iteration r + AHEAD - 1.
        for iteration in 0..self.prefixes.len() + AHEAD - 1 {
            let begun = Instant::now();
            if hints == Hints::On {
                let report = self.client.report_lookahead(&self.hint(iteration)).context("lookahead")?;
                ensure!(report.ignored == 0, "the agent ignored {} parts of a hint", report.ignored);
            }
            std::thread::sleep(self.iteration.saturating_sub(begun.elapsed()));
            let runs = (iteration + 1).checked_sub(AHEAD);
            if let Some(request) = runs.filter(|request| *request != self.aborted()) {
                self.load(&self.prefixes[request], &mut round)?;
            }
        }
        if hints == Hints::On {
            // All requests have begun.
            self.client.report_lookahead(&self.lookahead(Vec::new())).context("lookahead")?;
        }
        Ok(round)
    }

    /// Returns the request that is aborted before it runs.
    fn aborted(&self) -> usize {
        self.prefixes.len() * 5 / 8
    }

    fn lookahead(&self, requests: Vec<LookaheadRequest>) -> Lookahead {
        Lookahead { version: HINT_VERSION, iteration: self.iteration, requests, ..Lookahead::default() }
    }

    /// Returns the hint at the begin of an iteration: requests are listed first [`AHEAD`] iterations before they run.
    fn hint(&self, iteration: usize) -> Lookahead {
        let aborted = self.aborted();
        let next = (iteration + 1).saturating_sub(AHEAD);
        let listed = (next..=iteration).filter(|request| *request < self.prefixes.len());
        let aborts = next == aborted;
        let requests =
            listed.filter(|request| !(aborts && *request == aborted)).map(|request| LookaheadRequest {
                request: request as u64,
                // At most `AHEAD`.
                iterations: (request + AHEAD - iteration) as u32,
                confidence: CONFIDENCE_MAX,
                keys: if request == iteration { self.prefixes[request].clone() } else { Vec::new() },
            });
        let cancelled = if aborts { vec![aborted as u64] } else { Vec::new() };
        Lookahead { cancelled, ..self.lookahead(requests.collect()) }
    }

    /// Loads a prefix, and adds the time until its first layer is readable.
    fn load(&self, keys: &[BlockKey], round: &mut Round) -> anyhow::Result<()> {
        let request = LoadRequest { scope: Scope::Local, ..LoadRequest::new(keys.to_vec()) };
        let started = Instant::now();
        let load = self.client.load(&request).context("load")?;
        load.wait_layer(0, PATIENCE).context("waiting for the first layer")?;
        round.first_layer_ms.push(started.elapsed().as_secs_f64() * 1e3);
        let last_layer = self.client.layout().layers() - 1;
        load.wait_layer(last_layer, PATIENCE).context("waiting for the last layer")?;
        let sources: Vec<_> = load.blocks().iter().map(|block| block.source()).collect();
        ensure!(sources.iter().all(Option::is_some), "blocks were not found: {sources:?}");
        let from_devices = sources.iter().filter(|source| **source == Some(Source::OwnNvme)).count() as u64;
        round.sources.add(Sources { blocks: sources.len() as u64, from_devices });
        Ok(())
    }

    fn counted(&self) -> anyhow::Result<Counted> {
        let mut counted = Counted::default();
        for (name, value) in self.client.stats().context("stats")? {
            match name.as_str() {
                "prefetch_bytes" => counted.read_bytes = value,
                "prefetch_wasted_bytes" => counted.wasted_bytes = value,
                "prefetch_missed_windows" => counted.missed_windows = value,
                _ => {}
            }
        }
        Ok(counted)
    }
}

impl Comparison {
    /// Returns how many times shorter the time to the first layer is with hints: the median of the pairs.
    pub(crate) fn ratio(&self) -> f64 {
        median(self.off.iter().zip(&self.on).map(|(off, on)| off / on).collect())
    }
}

impl Sources {
    /// Returns the share of blocks that came from a device, in percent.
    pub(crate) fn device_percent(self) -> f64 {
        100.0 * self.from_devices as f64 / self.blocks as f64
    }

    fn add(&mut self, other: Sources) {
        self.blocks += other.blocks;
        self.from_devices += other.from_devices;
    }
}

impl Counted {
    /// Returns the share of the bytes read ahead that no load has used, in percent.
    pub(crate) fn wasted_percent(self) -> f64 {
        100.0 * self.wasted_bytes as f64 / self.read_bytes as f64
    }

    fn since(self, before: Counted) -> Counted {
        Counted {
            read_bytes: self.read_bytes - before.read_bytes,
            wasted_bytes: self.wasted_bytes - before.wasted_bytes,
            missed_windows: self.missed_windows - before.missed_windows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_is_the_median_of_the_pairs() {
        let comparison =
            Comparison { off: vec![6.0, 8.0, 30.0], on: vec![3.0, 2.0, 3.0], ..Comparison::default() };
        assert!((comparison.ratio() - 4.0).abs() < 1e-9);
    }

    #[test]
    fn counters_of_earlier_rounds_are_excluded() {
        let before = Counted { read_bytes: 100, wasted_bytes: 10, missed_windows: 1 };
        let after = Counted { read_bytes: 300, wasted_bytes: 15, missed_windows: 1 };
        let counted = after.since(before);
        assert_eq!(counted, Counted { read_bytes: 200, wasted_bytes: 5, missed_windows: 0 });
        assert!((counted.wasted_percent() - 2.5).abs() < 1e-9);
    }
}
