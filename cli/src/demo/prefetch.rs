//! Prefetch in the demo: requests of the trace that wait in a queue, with and without hints about the queue.
//!
//! The loop is that of `reprise bench prefetch` ([`WaitingQueue`]). The prefixes are those of trace requests whose blocks
//! the first node has on NVMe. Agents open pools with O_DIRECT where the file system has it, so the page cache does not
//! hide the device; the report states if it could. Afterwards, the engine of the node loads the prefixes and compares every
//! byte.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context;
use reprise_client::{Client, ConnectOptions, Scope, Source};
use reprise_policy::{BlockKey, Layout, TenantName};
use reprise_testkit::bench::report::median;
use reprise_testkit::cluster::{AgentAddresses, ClusterFile};
use reprise_testkit::engine::{self, EnginePath};
use reprise_testkit::output::{Table, bytes_text, latency_text};
use reprise_testkit::trace::TraceRequest;
use serde::Serialize;

use crate::engine_process::EngineProcess;
use crate::replay::Totals;
use crate::waiting_queue::{AHEAD, Comparison, WaitingQueue};

/// Maximum requests of a round.
const REQUESTS_MAX: usize = 32;

/// Minimum requests of a round: with fewer, the median has no meaning.
const REQUESTS_MIN: usize = 8;

/// Minimum blocks of a prefix: 8,192 tokens.
const PREFIX_BLOCKS_MIN: usize = 16;

/// Time of an iteration.
const ITERATION: Duration = Duration::from_millis(20);

/// Maximum pairs of rounds; a pair takes 1.4 s and its loads.
const PAIRS: usize = 4;

/// No pair begins later than this.
const BUDGET: Duration = Duration::from_secs(9);

/// Part of the arena that reads ahead of one session may use: half of a quarter (`[prefetch]` of the agent).
const SESSION_PART: u64 = 8;

/// Ratio that `reprise bench prefetch` demands for prefixes of 16 MiB.
const BENCH_RATIO: f64 = 3.0;

/// Blocks to measure, and the cluster.
#[derive(Clone, Copy)]
pub(super) struct Subject<'a> {
    /// Cluster whose first node holds the blocks.
    pub(super) cluster: &'a ClusterFile,
    pub(super) requests: &'a [TraceRequest],
    pub(super) layout: &'a Layout,
    pub(super) tenant: &'a TenantName,
    pub(super) path: EnginePath,
    /// Size of the agent's arena.
    pub(super) arena_bytes: u64,
}

/// What the phase has measured, or why it could not.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum PrefetchReport {
    Measured(Measured),
    Skipped { skipped: String },
}

/// Loads of requests that waited, with and without hints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Measured {
    node: String,
    /// Requests of a round, one of which is aborted before it runs.
    requests: usize,
    /// Blocks of all prefixes.
    blocks: usize,
    block_bytes: u64,
    /// Pairs of rounds.
    pairs: usize,
    iteration_ms: u64,
    /// Median time to the first layer without hints, in microseconds.
    first_layer_us_p50_off: u64,
    /// The same with hints.
    first_layer_us_p50_on: u64,
    /// Time without hints divided by the time with hints.
    ratio: f64,
    /// Share of blocks that came from NVMe without hints; the others are shared with a request before.
    nvme_percent_off: f64,
    /// The same with hints.
    nvme_percent_on: f64,
    bytes_read_ahead: u64,
    wasted_bytes: u64,
    missed_windows: u64,
    /// Whether the node's pools bypass the page cache.
    direct: bool,
    seconds: f64,
}

/// Requests of the trace, and the keys of their prefixes on NVMe.
type Prefixes<'a> = Vec<(&'a TraceRequest, Vec<BlockKey>)>;

impl Subject<'_> {
    /// Measures the waiting requests, and checks the bytes of their blocks with the node's engine.
    pub(super) fn measure(
        self,
        engine: &mut EngineProcess,
        totals: &mut Totals,
    ) -> anyhow::Result<PrefetchReport> {
        if self.path == EnginePath::Rings {
            let skipped = "rings read NVMe without DRAM, into which reads ahead go".to_owned();
            return Ok(PrefetchReport::Skipped { skipped });
        }
        let started = Instant::now();
        let namespace = engine::namespace(self.layout);
        let options = ConnectOptions::new(&self.agent().socket, namespace, *self.layout)
            .client_name("demo")
            .tenant(self.tenant.clone());
        let client = Client::connect(options).context("connecting for the prefetch phase")?;
        let chosen = self.choose(&client)?;
        if chosen.len() < REQUESTS_MIN {
            let skipped = format!(
                "only {} requests have {PREFIX_BLOCKS_MIN} blocks on NVMe of {} that fit into the reserve for reads \
                 ahead: use more --requests, a smaller --arena with a larger --pool, or a larger --scale",
                chosen.len(),
                self.agent().node
            );
            return Ok(PrefetchReport::Skipped { skipped });
        }
        let (requests, prefixes): (Vec<_>, Vec<_>) = chosen.into_iter().unzip();
        let queue = WaitingQueue { client: &client, prefixes: &prefixes, iteration: ITERATION };
        let pairs = (0..PAIRS).take_while(|pair| *pair == 0 || started.elapsed() < BUDGET);
        let comparison = queue.compare(pairs).context("requests that wait")?;
        for request in requests {
            totals.add(&engine.run(request.full_blocks()).context("checking prefetched blocks")?);
        }
        let blocks = prefixes.iter().map(Vec::len).sum();
        Ok(PrefetchReport::Measured(self.report(comparison, (prefixes.len(), blocks), started)?))
    }

    fn agent(&self) -> &AgentAddresses {
        &self.cluster.agents[0]
    }

    fn report(
        self,
        comparison: Comparison,
        (requests, blocks): (usize, usize),
        started: Instant,
    ) -> anyhow::Result<Measured> {
        let counted = comparison.counted;
        let pairs = comparison.on.len();
        let (off, on) = (median(comparison.off), median(comparison.on));
        Ok(Measured {
            node: self.agent().node.clone(),
            requests,
            blocks,
            block_bytes: self.layout.block_bytes(),
            pairs,
            iteration_ms: ITERATION.as_millis() as u64,
            first_layer_us_p50_off: micros(off),
            first_layer_us_p50_on: micros(on),
            ratio: off / on,
            nvme_percent_off: comparison.sources_off.device_percent(),
            nvme_percent_on: comparison.sources_on.device_percent(),
            bytes_read_ahead: counted.read_bytes,
            wasted_bytes: counted.wasted_bytes,
            missed_windows: counted.missed_windows,
            direct: is_direct(self.cluster, self.agent())?,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// Returns requests of the trace with prefixes on NVMe of the node, most of which no request before has.
    fn choose(&self, client: &Client) -> anyhow::Result<Prefixes<'_>> {
        client.trim().context("trim")?;
        // One window of requests more than waits: the blocks of the last one that ran stay staged until it is counted.
        let prefix_bytes = self.arena_bytes / SESSION_PART / (AHEAD as u64 + 1);
        let blocks_max = usize::try_from(prefix_bytes / self.layout.slot_bytes()).unwrap_or(usize::MAX);
        let (mut chosen, mut seen) = (Prefixes::new(), BTreeSet::new());
        for request in self.requests {
            if chosen.len() == REQUESTS_MAX {
                break;
            }
            let blocks = request.full_blocks();
            let blocks = &blocks[..blocks.len().min(blocks_max)];
            if blocks.len() < PREFIX_BLOCKS_MIN {
                continue;
            }
            let mut keys = engine::chain_keys(client.namespace(), blocks);
            let sources = client.match_keys(&keys, Scope::Local).context("match")?;
            keys.truncate(sources.iter().take_while(|source| **source == Source::OwnNvme).count());
            let known = keys.iter().filter(|key| seen.contains(*key)).count();
            if keys.len() >= PREFIX_BLOCKS_MIN && 4 * known <= keys.len() {
                seen.extend(keys.iter().copied());
                chosen.push((request, keys));
            }
        }
        Ok(chosen)
    }
}

impl PrefetchReport {
    /// Returns the report as text.
    pub(super) fn text(&self) -> String {
        match self {
            PrefetchReport::Measured(measured) => measured.text(),
            PrefetchReport::Skipped { skipped } => format!("Prefetch was not measured: {skipped}.\n"),
        }
    }
}

impl Measured {
    fn text(&self) -> String {
        let mut table = Table::new(&["", "first layer, p50", "lower", "blocks from NVMe"]);
        let mut row = |name: &str, micros, lower, nvme: f64| {
            table.row(vec![name.to_owned(), latency_text(micros), lower, format!("{nvme:.0} %")]);
        };
        row("without hints", self.first_layer_us_p50_off, String::new(), self.nvme_percent_off);
        row("with hints", self.first_layer_us_p50_on, format!("{:.1}×", self.ratio), self.nvme_percent_on);
        let mean_bytes = self.blocks as u64 * self.block_bytes / self.requests as u64;
        let below = if self.ratio < BENCH_RATIO {
            format!(
                "That is below {BENCH_RATIO}×: the device is fast for prefixes of this size, or the machine is busy.\n\
                 `reprise bench prefetch` measures prefixes of 16 MiB.\n"
            )
        } else {
            String::new()
        };
        let cache = match self.direct {
            true => "The pool bypasses the page cache.",
            false => "The file system lacks O_DIRECT: the page cache may have served reads.",
        };
        format!(
            "{}\n{below}{} requests with prefixes of {} on average, iterations of {} ms, {} pairs of rounds in {:.1} s\n\
             {cache}\n\
             read ahead {}, wasted {} ({:.1} %); {} requests ran before their blocks were read\n",
            table.render(),
            self.requests,
            bytes_text(mean_bytes),
            self.iteration_ms,
            self.pairs,
            self.seconds,
            bytes_text(self.bytes_read_ahead),
            bytes_text(self.wasted_bytes),
            100.0 * self.wasted_bytes as f64 / self.bytes_read_ahead as f64,
            self.missed_windows,
        )
    }
}

fn micros(millis: f64) -> u64 {
    (millis * 1e3).round() as u64
}

/// Returns whether all pools of an agent bypass the page cache.
fn is_direct(cluster: &ClusterFile, agent: &AgentAddresses) -> anyhow::Result<bool> {
    let status: serde_json::Value = serde_json::from_str(&cluster.page(agent, "/status")?)?;
    let devices = status["devices"].as_array().context("an agent's status lists no devices")?;
    Ok(devices.iter().all(|device| device["direct"] == true))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(ratio: f64) -> Measured {
        Measured {
            node: "node-1".into(),
            requests: 32,
            blocks: 640,
            block_bytes: 64 << 10,
            pairs: 4,
            iteration_ms: 20,
            first_layer_us_p50_off: 6000,
            first_layer_us_p50_on: 500,
            ratio,
            nvme_percent_off: 97.0,
            nvme_percent_on: 0.4,
            bytes_read_ahead: 200 << 20,
            wasted_bytes: 4 << 20,
            missed_windows: 2,
            direct: true,
            seconds: 8.0,
        }
    }

    #[test]
    fn report_states_figures_and_explains_a_low_ratio() {
        let text = PrefetchReport::Measured(measured(12.0)).text();
        for part in ["6.0 ms", "500 µs", "12.0×", "97 %", "200 MiB", "4.0 MiB (2.0 %)", "bypasses"] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(!text.contains("That is below"), "{text}");
        let text = PrefetchReport::Measured(Measured { direct: false, ..measured(1.2) }).text();
        assert!(
            text.contains("1.2×") && text.contains("below 3×") && text.contains("lacks O_DIRECT"),
            "{text}"
        );
    }

    #[test]
    fn skipped_phase_gives_its_reason_in_text_and_json() {
        let report = PrefetchReport::Skipped { skipped: "no device".into() };
        assert!(report.text().contains("not measured: no device"));
        assert_eq!(
            serde_json::to_value(&report).expect("encodes"),
            serde_json::json!({ "skipped": "no device" })
        );
    }
}
