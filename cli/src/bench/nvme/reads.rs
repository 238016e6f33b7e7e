//! Reads of one size and depth, by an I/O engine.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use hdrhistogram::Histogram;
use reprise_buffers::{Arena, Span};
use reprise_io::bare::{self, BARE_BUFFERS_MAX};
use reprise_io::{IoEngine, Op, Submission, Token, Wait};
use reprise_testkit::bench::report::{Figure, Target};
use reprise_testkit::kv_function::mix;

/// Size of random and of sequential reads.
const PAGE_BYTES: u32 = 4 << 10;
const BLOCK_BYTES: u32 = 2 << 20;

/// Reads of one run, short on a busy machine too: 40 ms at 80 µs each, 8 ms at 500,000 per second, and 128 MiB.
const READS_AT_DEPTH_1: u64 = 500;
const READS_AT_DEPTH: u64 = 4_000;
const SEQUENTIAL_READS: u64 = 64;

/// Sequential reads in flight: 16 MiB.
const SEQUENTIAL_DEPTH: usize = 8;

/// Maximum number of reads in flight.
pub(super) const DEPTH_MAX: usize = 32;

/// Time limit of one read, longer than the deadline after which the driver aborts a command.
const READ_WITHIN: Duration = Duration::from_secs(120);

/// Largest recorded latency in nanoseconds; the histogram keeps three significant digits.
const LATENCY_NS_MAX: u64 = 120_000_000_000;

/// Reads of one size and depth.
#[derive(Clone, Debug)]
pub(super) struct Reads {
    bytes: u32,
    depth: usize,
    offsets: Vec<u64>,
}

/// Times from submission to completion, of all runs but the first: it is the warm-up.
pub(super) struct Latencies {
    all: Histogram<u64>,
    is_warm: bool,
}

impl Latencies {
    pub(super) fn new() -> Latencies {
        Latencies { all: histogram(), is_warm: false }
    }

    /// Adds the times of a run.
    fn add(&mut self, run: &Histogram<u64>) {
        if self.is_warm {
            self.all.add(run).expect("both have the same bounds");
        }
        self.is_warm = true;
    }

    fn quantile_us(&self, quantile: f64) -> f64 {
        self.all.value_at_quantile(quantile) as f64 / 1e3
    }
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(LATENCY_NS_MAX, 3).expect("the bounds are valid")
}

impl Reads {
    /// Returns all measurements of a device of `device_bytes`: random pages of the whole device, and the blocks at its
    /// start in their order.
    pub(super) fn all(device_bytes: u64) -> Vec<Reads> {
        let pages = (device_bytes / u64::from(PAGE_BYTES)).max(1);
        let random = |depth, count| {
            let offsets = (0..count).map(|index| mix(index) % pages * u64::from(PAGE_BYTES)).collect();
            Reads { bytes: PAGE_BYTES, depth, offsets }
        };
        let blocks = (device_bytes / u64::from(BLOCK_BYTES)).max(1);
        let sequence = (0..SEQUENTIAL_READS).map(|index| index % blocks * u64::from(BLOCK_BYTES)).collect();
        vec![
            random(1, READS_AT_DEPTH_1),
            random(DEPTH_MAX, READS_AT_DEPTH),
            Reads { bytes: BLOCK_BYTES, depth: SEQUENTIAL_DEPTH, offsets: sequence },
        ]
    }

    fn is_random(&self) -> bool {
        self.bytes == PAGE_BYTES
    }

    pub(super) fn name(&self) -> String {
        match self.is_random() {
            true => format!("nvme.read_4kib_depth_{}", self.depth),
            false => format!("nvme.read_2mib_sequential_depth_{}", self.depth),
        }
    }

    /// Returns the label of a progress bar.
    pub(super) fn label(&self) -> &'static str {
        match (self.is_random(), self.depth) {
            (true, 1) => "nvme.read_4kib_depth_1",
            (true, _) => "nvme.read_4kib_depth_32",
            (false, _) => "nvme.read_2mib_sequential",
        }
    }

    pub(super) fn unit(&self) -> &'static str {
        if self.is_random() { "reads/s" } else { "GB/s" }
    }

    pub(super) fn bytes(&self) -> u32 {
        self.bytes
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    pub(super) fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// Divides memory into buffers of one read.
    pub(super) fn buffers(&self, memory: &Arena) -> anyhow::Result<Vec<Span>> {
        let whole = memory.span(0, 0, super::BUFFER_BYTES).context("memory of the reads")?;
        let count = whole.len() / self.bytes as usize;
        Ok(bare::cut(&whole, self.bytes, count.min(BARE_BUFFERS_MAX))?)
    }

    /// Returns the rate of a run, in [`Reads::unit`].
    pub(super) fn rate(&self, elapsed: Duration) -> f64 {
        let reads = self.offsets.len() as f64 / elapsed.as_secs_f64();
        if self.is_random() { reads } else { reads * f64::from(self.bytes) / 1e9 }
    }

    /// Reads every offset once; returns the rate. Adds the latencies, unless they are of the first run.
    pub(super) fn run(
        &self,
        engine: &mut dyn IoEngine,
        memory: &Arena,
        latencies: &mut Latencies,
    ) -> anyhow::Result<f64> {
        let mut idle: VecDeque<Span> = self.buffers(memory)?.into();
        let mut submitted = vec![Instant::now(); self.offsets.len()];
        let (mut next, mut ended) = (0, Vec::new());
        let mut times = histogram();
        let start = Instant::now();
        let mut last = start;
        while next < self.offsets.len() || engine.in_flight() > 0 {
            while next < self.offsets.len() && engine.in_flight() < self.depth {
                let buffer = idle.pop_front().context("a buffer is free")?;
                let op = Op::Read { offset: self.offsets[next], into: vec![buffer] };
                submitted[next] = Instant::now();
                let accepted = engine.submit(Submission { token: Token(next as u64), op });
                ensure!(accepted.is_ok(), "the engine has room for {} reads only", engine.in_flight());
                next += 1;
            }
            engine.reap(Wait::Until(Duration::from_secs(1)), &mut ended)?;
            let now = Instant::now();
            if !ended.is_empty() {
                last = now;
            }
            ensure!(last.elapsed() < READ_WITHIN, "no read has ended within {READ_WITHIN:?}");
            for one in ended.drain(..) {
                let index = usize::try_from(one.token.0).context("a token")?;
                one.result.with_context(|| format!("reading at {}", self.offsets[index]))?;
                let latency = now.duration_since(submitted[index]).as_nanos();
                times.saturating_record(u64::try_from(latency).unwrap_or(u64::MAX));
                let Op::Read { into, .. } = one.op else { bail!("another operation has ended") };
                idle.extend(into);
            }
        }
        let elapsed = start.elapsed();
        latencies.add(&times);
        Ok(self.rate(elapsed))
    }

    /// Returns the median and the 99th percentile of latencies; none for sequential reads, which measure bandwidth.
    pub(super) fn latency_figures(&self, latencies: &Latencies) -> Vec<Figure> {
        if !self.is_random() {
            return Vec::new();
        }
        let figure = |(percent, quantile)| {
            let name = format!("{}_p{percent}", self.name());
            Figure::absolute(name, latencies.quantile_us(quantile), "us", Target::None)
        };
        [(50, 0.5), (99, 0.99)].map(figure).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_exclude_the_warm_up() {
        let run = |nanoseconds: u64, reads: u64| {
            let mut times = histogram();
            times.record_n(nanoseconds, reads).expect("within the bounds");
            times
        };
        let mut latencies = Latencies::new();
        // Slow reads of a cold device, more than of all other runs.
        latencies.add(&run(5_000_000, 1000));
        latencies.add(&run(80_000, 100));
        latencies.add(&run(90_000, 100));
        assert_eq!(latencies.all.len(), 200);
        let (p50, p99) = (latencies.quantile_us(0.5), latencies.quantile_us(0.99));
        assert!((79.0..81.0).contains(&p50) && (89.0..91.0).contains(&p99), "{p50} {p99}");
    }
}
