//! Results of `reprise sim cores`.

use reprise_simulator::replay::{Counts, Trace};
use reprise_simulator::serving::statistics::percentile;
use reprise_simulator::timed::CoreReplay;
use reprise_testkit::output::{Table, bytes_text};
use serde::Serialize;

use super::CoresArgs;

/// Names of the sources of blocks.
const SOURCES: [&str; 4] = ["own_dram", "own_nvme", "peer_dram", "peer_nvme"];

/// Line of the output: what the cores did.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Outcome {
    kind: &'static str,
    trace: String,
    hardware: String,
    model: String,
    policy: &'static str,
    nodes: u16,
    members: u16,
    seed: u64,
    /// Capacity of a node.
    dram_blocks: u64,
    nvme_blocks: u64,
    requests: u64,
    references: u64,
    hits: Hits,
    hit_ratio: f64,
    /// Blocks that were found and not loaded in time.
    unloaded_blocks: u64,
    /// Blocks that found no slot in time.
    unsaved_blocks: u64,
    first_token_ms: Times,
    other_token_ms: Times,
    channels: Vec<ChannelUse>,
    /// Simulated time from the first arrival to the end of the last request.
    seconds: f64,
    steps: u64,
    events: u64,
    checks: ChecksPassed,
    digest: String,
}

/// Hit blocks by their source.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Hits {
    own_dram: u64,
    own_nvme: u64,
    peer_dram: u64,
    peer_nvme: u64,
}

/// Distribution of times in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Times {
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
}

/// Use of a channel, over all nodes.
#[derive(Clone, Debug, Serialize)]
struct ChannelUse {
    channel: &'static str,
    bytes: u64,
    transfers: u64,
    /// Share of the time in which the channel of a node carries bytes.
    busy: f64,
}

/// Checks that the run has passed.
#[derive(Clone, Copy, Debug, Serialize)]
struct ChecksPassed {
    core_audits: u64,
    lookups: u64,
    blocks_read: u64,
    pieces_received: u64,
    placements: u64,
    replicas: u64,
}

/// Line of the output: the cores next to the replay without time.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Comparison {
    kind: &'static str,
    sources: Vec<Deviation>,
    /// Largest deviation of a source or of the sum, in points.
    deviation_points_max: f64,
}

/// Hits of a source in percent of all references.
#[derive(Clone, Debug, Serialize)]
struct Deviation {
    source: &'static str,
    cores_percent: f64,
    replay_percent: f64,
    /// Replay minus cores.
    deviation_points: f64,
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { hundredths(100.0 * part as f64 / whole as f64) }
}

fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

impl Times {
    /// Describes times in microseconds.
    fn of(times: &[u64]) -> Times {
        let ms = |micros: f64| (micros / 10.0).round() / 100.0;
        let at = |share| ms(percentile(times, share));
        let mean = times.iter().sum::<u64>() as f64 / times.len().max(1) as f64;
        Times { mean: ms(mean), p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

impl Outcome {
    pub(super) fn new(args: &CoresArgs, trace: &Trace, served: &CoreReplay) -> Outcome {
        let name = args.trace.file_name().unwrap_or(args.trace.as_os_str());
        let nanos = served.elapsed.as_nanos() as f64 * f64::from(args.nodes);
        let [own_dram, own_nvme, peer_dram, peer_nvme] = served.hits;
        let hits: u64 = served.hits.iter().sum();
        let checks = served.checks;
        let channels = served.channels.iter().map(|(path, totals)| ChannelUse {
            channel: path.name(),
            bytes: totals.bytes,
            transfers: totals.transfers,
            busy: (totals.busy as f64 / nanos.max(1.0) * 1e4).round() / 1e4,
        });
        Outcome {
            kind: "cores",
            trace: name.to_string_lossy().into_owned(),
            hardware: args.hardware.clone(),
            model: args.model.clone(),
            policy: args.policy.name(),
            nodes: args.nodes,
            members: args.members,
            seed: args.seed,
            dram_blocks: served.capacity[0],
            nvme_blocks: served.capacity[1],
            requests: trace.requests().len() as u64,
            references: served.references,
            hits: Hits { own_dram, own_nvme, peer_dram, peer_nvme },
            hit_ratio: hits as f64 / served.references.max(1) as f64,
            unloaded_blocks: served.unloaded,
            unsaved_blocks: served.unsaved,
            first_token_ms: Times::of(&served.first_tokens),
            other_token_ms: Times::of(&served.other_tokens),
            channels: channels.collect(),
            seconds: hundredths(served.elapsed.as_secs_f64()),
            steps: served.steps,
            events: served.events,
            checks: ChecksPassed {
                core_audits: checks.audits,
                lookups: checks.lookups,
                blocks_read: checks.blocks_read,
                pieces_received: checks.pieces_received,
                placements: checks.placements,
                replicas: checks.replicas,
            },
            digest: format!("{:016x}", served.digest),
        }
    }

    pub(super) fn text(&self) -> String {
        let of = |blocks: u64| format!("{:.2} %", percent(blocks, self.references));
        let Hits { own_dram, own_nvme, peer_dram, peer_nvme } = self.hits;
        let times = |times: &Times| {
            let Times { mean, p50, p90, p99 } = times;
            format!("mean {mean} ms, p50 {p50}, p90 {p90}, p99 {p99}")
        };
        let mut lines = vec![
            format!(
                "{}: {} requests, {} references; {} nodes ({}, {}) with {} blocks of DRAM and {} of NVMe",
                self.trace,
                self.requests,
                self.references,
                self.nodes,
                self.hardware,
                self.model,
                self.dram_blocks,
                self.nvme_blocks
            ),
            format!(
                "hits: {} (own DRAM {}, own NVMe {}, peers' DRAM {}, peers' NVMe {}); not loaded {}, not saved {} blocks",
                of(own_dram + own_nvme + peer_dram + peer_nvme),
                of(own_dram),
                of(own_nvme),
                of(peer_dram),
                of(peer_nvme),
                self.unloaded_blocks,
                self.unsaved_blocks
            ),
            format!("first token: {}", times(&self.first_token_ms)),
            format!("other tokens: {}", times(&self.other_token_ms)),
        ];
        let mut table = Table::new(&["channel", "bytes", "transfers", "busy"]);
        for used in &self.channels {
            table.row(vec![
                used.channel.to_owned(),
                bytes_text(used.bytes),
                used.transfers.to_string(),
                format!("{:.2} %", 100.0 * used.busy),
            ]);
        }
        lines.push(table.render());
        let ChecksPassed { core_audits, lookups, blocks_read, pieces_received, placements, replicas } =
            self.checks;
        lines.push(format!(
            "no invariant violated: {core_audits} audits of cores, {lookups} lookups, {blocks_read} blocks read, \
             {pieces_received} pieces from peers, {placements} placements; the directory has the agents' {replicas} replicas"
        ));
        lines.push(format!(
            "{} events, {} steps, {} s of simulated time, digest {}",
            self.events, self.steps, self.seconds, self.digest
        ));
        lines.join("\n")
    }
}

impl Comparison {
    pub(super) fn new(served: &CoreReplay, replayed: &Counts) -> Comparison {
        let whole = served.references;
        let deviation = |source, cores: u64, replay: u64| {
            let (cores_percent, replay_percent) = (percent(cores, whole), percent(replay, whole));
            let deviation_points = hundredths(replay_percent - cores_percent);
            Deviation { source, cores_percent, replay_percent, deviation_points }
        };
        let replay =
            [replayed.hits_dram, replayed.hits_nvme, replayed.hits_peer_dram, replayed.hits_peer_nvme];
        let of_source = SOURCES.iter().zip(served.hits.iter().zip(replay));
        let mut sources: Vec<Deviation> =
            of_source.map(|(source, (cores, replay))| deviation(*source, *cores, replay)).collect();
        sources.push(deviation("all", served.hits.iter().sum(), replayed.hits()));
        let largest = sources.iter().map(|source| source.deviation_points.abs()).fold(0.0, f64::max);
        Comparison { kind: "comparison", sources, deviation_points_max: largest }
    }

    pub(super) fn table(&self) -> Table {
        let mut table = Table::new(&["hits", "cores", "sim replay", "deviation"]);
        for source in &self.sources {
            table.row(vec![
                source.source.to_owned(),
                format!("{:.2} %", source.cores_percent),
                format!("{:.2} %", source.replay_percent),
                format!("{:+.2} points", source.deviation_points),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_simulator_in_milliseconds() {
        let times: Vec<u64> = (1..=100).map(|ms| ms * 1000).collect();
        let Times { mean, p50, p90, p99 } = Times::of(&times);
        assert_eq!([mean, p50, p90, p99], [50.5, 50.5, 90.1, 99.01]);
        assert!([Times::of(&[]).mean, Times::of(&[]).p99].iter().all(|ms| *ms == 0.0));
    }
}
