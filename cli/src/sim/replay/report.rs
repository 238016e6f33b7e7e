//! Results of `reprise sim replay`.

use reprise_policy::eviction::{Chains, EvictionKind};
use reprise_simulator::replay::{Replay, Trace, replay_opt};
use reprise_testkit::output::{Table, bytes_text};
use serde::Serialize;

use super::arguments::PolicyName;
use super::timed::{self, Timed};
use super::{ReplayArgs, Sizes};

/// Milliseconds of a day.
const DAY_MS: f64 = 86_400_000.0;

/// A replay, and its times if it has them.
#[derive(Clone, Debug)]
pub(super) struct Replayed {
    pub(super) replay: Replay,
    pub(super) timed: Option<Timed>,
    /// Steps of engines and events of queues.
    pub(super) steps_and_events: u64,
}

/// First line of the output: the trace.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Subject {
    trace: String,
    requests: u64,
    sessions: u32,
    references: u64,
    distinct_blocks: u64,
    block_tokens: u64,
    block_bytes: u64,
    /// Time from the first to the last arrival.
    seconds: f64,
    seed: u64,
    /// Hits of one unlimited cache, of all references.
    unlimited_hit_ratio: f64,
}

/// Line of the output: a policy with a size.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Outcome {
    policy: &'static str,
    /// `null` for bounds.
    chains: Option<Chains>,
    nodes: u16,
    tenants: u16,
    /// DRAM of a node; `null`: unlimited.
    dram_blocks: Option<u64>,
    /// NVMe of a node.
    nvme_blocks: u64,
    requests: u64,
    references: u64,
    hits: u64,
    /// Memory of accelerators; `null` without time.
    hits_hbm: Option<u64>,
    hits_dram: u64,
    hits_nvme: u64,
    hits_peer_dram: u64,
    hits_peer_nvme: u64,
    bytes_from_dram: u64,
    bytes_from_nvme: u64,
    bytes_from_peers: u64,
    /// `null` for bounds.
    dram_evictions: Option<u64>,
    nvme_evictions: u64,
    nvme_written_bytes: u64,
    /// All nodes; `null` without NVMe or times.
    nvme_written_bytes_per_day: Option<f64>,
    /// The node that writes most; `null` without NVMe or times.
    nvme_written_bytes_per_day_max: Option<f64>,
    /// Blocks that found no place, because all others were in use.
    unkept_blocks: u64,
    /// Hits, of those of one unlimited cache.
    of_unlimited: Option<f64>,
    /// Part of the way from lru to opt, if both were replayed with this size.
    gap_closed: Option<f64>,
    /// Times and prices, with `--hardware`.
    #[serde(skip_serializing_if = "Option::is_none")]
    timed: Option<Timed>,
    hit_ratio: f64,
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

impl Replayed {
    /// A replay without time.
    pub(super) fn untimed(replay: Replay) -> Replayed {
        Replayed { replay, timed: None, steps_and_events: 0 }
    }
}

impl Subject {
    pub(super) fn new(args: &ReplayArgs, trace: &Trace, block_bytes: u64) -> Subject {
        let name = args.trace.file_name().unwrap_or(args.trace.as_os_str());
        Subject {
            trace: name.to_string_lossy().into_owned(),
            requests: trace.requests().len() as u64,
            sessions: trace.sessions(),
            references: trace.references(),
            distinct_blocks: trace.distinct(),
            block_tokens: trace.block_tokens(),
            block_bytes,
            seconds: trace.span_ms() as f64 / 1000.0,
            seed: args.seed,
            unlimited_hit_ratio: ratio(replay_opt(trace, u64::MAX).hits, trace.references()),
        }
    }

    pub(super) fn text(&self) -> String {
        format!(
            "{}: {} requests of {} sessions in {:.0} s, {} references to {} blocks of {} tokens ({})\n",
            self.trace,
            self.requests,
            self.sessions,
            self.seconds,
            self.references,
            self.distinct_blocks,
            self.block_tokens,
            bytes_text(self.block_bytes)
        )
    }
}

impl Outcome {
    /// Returns the results of all policies with one size.
    pub(super) fn of_size(
        subject: &Subject,
        args: &ReplayArgs,
        size: Sizes,
        replays: &[(PolicyName, Replayed)],
    ) -> Vec<Outcome> {
        let hits = |wanted| {
            let found = replays.iter().find(|(policy, _)| *policy == wanted);
            found.map(|(_, replayed)| replayed.replay.counts.hits() as f64)
        };
        let lru = hits(PolicyName::Production(EvictionKind::Lru));
        let bounds = lru.zip(hits(PolicyName::Opt)).filter(|(lru, opt)| opt > lru);
        let closed = |hits: u64| bounds.map(|(lru, opt)| (hits as f64 - lru) / (opt - lru));
        let outcome = |(policy, replayed): &(PolicyName, Replayed)| Outcome {
            gap_closed: closed(replayed.replay.counts.hits()),
            ..Outcome::new(subject, args, size, (*policy, replayed))
        };
        replays.iter().map(outcome).collect()
    }

    fn new(
        subject: &Subject,
        args: &ReplayArgs,
        size: Sizes,
        (policy, replayed): (PolicyName, &Replayed),
    ) -> Outcome {
        let Replayed { replay, timed, .. } = replayed;
        let counts = &replay.counts;
        let bytes = |blocks: u64| blocks.saturating_mul(subject.block_bytes);
        let per_day = |blocks: u64| {
            let seconds = timed.as_ref().map_or(subject.seconds, |timed| timed.seconds);
            let days = seconds * 1000.0 / DAY_MS;
            (size.nvme > 0 && days > 0.0).then(|| bytes(blocks) as f64 / days)
        };
        let is_of_agents = policy.is_of_agents();
        let hit_ratio = ratio(counts.hits(), counts.references);
        let unlimited = subject.unlimited_hit_ratio;
        Outcome {
            policy: policy.name(),
            chains: is_of_agents.then_some(args.chains),
            nodes: args.nodes,
            tenants: args.tenants,
            dram_blocks: size.dram,
            nvme_blocks: size.nvme,
            requests: counts.requests,
            references: counts.references,
            hits: counts.hits(),
            hits_hbm: timed.as_ref().map(|_| counts.hits_hbm),
            hits_dram: counts.hits_dram,
            hits_nvme: counts.hits_nvme,
            hits_peer_dram: counts.hits_peer_dram,
            hits_peer_nvme: counts.hits_peer_nvme,
            bytes_from_dram: bytes(counts.hits_dram),
            bytes_from_nvme: bytes(counts.hits_nvme),
            bytes_from_peers: bytes(counts.hits_peer_dram + counts.hits_peer_nvme),
            dram_evictions: is_of_agents.then_some(counts.dram_evictions),
            nvme_evictions: counts.nvme_evictions,
            nvme_written_bytes: bytes(counts.nvme_written),
            nvme_written_bytes_per_day: per_day(counts.nvme_written),
            nvme_written_bytes_per_day_max: per_day(replay.nvme_written_max),
            unkept_blocks: counts.unkept,
            of_unlimited: (unlimited > 0.0).then(|| hit_ratio / unlimited),
            gap_closed: None,
            timed: timed.clone(),
            hit_ratio,
        }
    }
}

/// Tables of times, prices and channels.
pub(super) fn timed_tables(outcomes: &[Outcome]) -> String {
    let timed = outcomes.iter().filter_map(|outcome| Some((outcome.policy, outcome.timed.as_ref()?)));
    let lines: Vec<(&str, &Timed)> = timed.collect();
    let mut text = timed::table(&lines).render();
    for (policy, line) in lines {
        text.push_str(&format!("\nchannels, {policy}:\n{}", timed::channel_table(line).render()));
    }
    text
}

/// Table of all results.
pub(super) fn table(outcomes: &[Outcome]) -> Table {
    let mut table = Table::new(&[
        "policy",
        "DRAM",
        "NVMe",
        "hits",
        "of HBM",
        "of DRAM",
        "of NVMe",
        "of peers",
        "of unlimited",
        "LRU to OPT",
        "evictions",
        "SSD/day",
    ]);
    let percent = |ratio: f64| format!("{:.2} %", 100.0 * ratio);
    let known = |ratio: Option<f64>| ratio.map_or_else(|| "-".to_owned(), percent);
    for outcome in outcomes {
        let of = |blocks: u64| percent(ratio(blocks, outcome.references));
        table.row(vec![
            outcome.policy.to_owned(),
            outcome.dram_blocks.map_or_else(|| "unlimited".to_owned(), |blocks| blocks.to_string()),
            outcome.nvme_blocks.to_string(),
            percent(outcome.hit_ratio),
            outcome.hits_hbm.map_or_else(|| "-".to_owned(), of),
            of(outcome.hits_dram),
            of(outcome.hits_nvme),
            of(outcome.hits_peer_dram + outcome.hits_peer_nvme),
            known(outcome.of_unlimited),
            known(outcome.gap_closed),
            outcome.dram_evictions.map_or_else(|| "-".to_owned(), |evictions| evictions.to_string()),
            outcome
                .nvme_written_bytes_per_day
                .map_or_else(|| "-".to_owned(), |bytes| bytes_text(bytes as u64)),
        ]);
    }
    table
}
