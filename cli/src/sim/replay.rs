//! `reprise sim replay`: replays a trace through the production eviction policies, and with `--hardware` on engines with
//! times.
//!
//! Every line of the output depends on the trace, the arguments and the seed alone.

mod arguments;
pub(crate) mod reading;
mod report;
mod timed;

use std::num::NonZero;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use reprise_policy::Interval;
use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::{Chains, EvictionKind, EvictionPolicy};
use reprise_simulator::replay::{
    Cluster, Counts, IdScope, Knowledge, NodeSettings, OptCounts, ReadOptions, Replay, Trace, replay_opt,
    replay_recency,
};
use reprise_testkit::output::Audience;

use arguments::{Capacity, PolicyName, PolicyNames, TierSize, parse_admission, parse_chains};
use reading::Source;
pub(super) use reading::{XZ_KIB_MAX, read_archive};
use report::{Outcome, Replayed, Subject};
use timed::{Machine, TimedArgs};

/// Arguments of `reprise sim replay`.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("size").required(true).multiple(true).args(["capacity", "tier", "unlimited", "hardware"]))]
pub(super) struct ReplayArgs {
    /// Replay this trace.
    ///
    /// JSON lines in Mooncake's format, a recording of `reprise trace record`, a session of an agentic trace (.json), or
    /// an archive of sessions (.tar, .tar.xz).
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Simulate this many nodes. All requests of a session go to one node.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    nodes: u16,
    /// Evict by these policies, separated by commas.
    ///
    /// lru, lfu, priority_lru, semantic, s3_fifo and cost_aware are those of agents. Two bounds know the future:
    /// lru_known_ends (which blocks are never used again) and opt. The name all stands for all of them.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "lru")]
    policy: Vec<PolicyNames>,
    /// Evict descendants first (`descendants_first`), or use blocks in prompt order (`ignored`).
    #[arg(long, value_parser = parse_chains, default_value = "descendants_first")]
    chains: Chains,
    /// Give each node this much DRAM and no NVMe: blocks, or bytes with a unit.
    ///
    /// Several sizes, separated by commas, are replayed one after the other.
    #[arg(long, value_name = "BLOCKS", value_delimiter = ',', conflicts_with = "tier")]
    capacity: Vec<Capacity>,
    /// Give each node tiers of these sizes: blocks, or bytes with a unit.
    #[arg(long, value_name = "DRAM=BLOCKS,NVMe=BLOCKS", value_delimiter = ',', conflicts_with = "unlimited")]
    tier: Vec<TierSize>,
    /// Replay with unlimited DRAM, after all other sizes.
    #[arg(long)]
    unlimited: bool,
    /// Admit blocks to NVMe by this rule: always, second_use or expected_reuse.
    #[arg(long, value_parser = parse_admission, default_value = "always")]
    admission: AdmissionMode,
    /// Divide the sessions among this many tenants, which share each node fairly.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    tenants: u16,
    /// Read at most this many sessions of an archive [default: all].
    #[arg(long, value_name = "NUMBER")]
    sessions: Option<NonZero<u32>>,
    /// Start the sessions of an archive, and copies, at random within this time.
    #[arg(long, value_name = "TIME", default_value = "4h")]
    spread: Interval,
    /// Replay this many copies of the trace, each with its own blocks.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    copies: u32,
    /// Derive all random times from this seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Tokens of a block, if the trace does not state them [default: 512 in JSON lines].
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<u64>,
    /// Bytes of the KV cache for a token [default: those of Llama-3-8B in 16 bits].
    #[arg(long, value_name = "BYTES", default_value_t = 131_072, hide_default_value = true)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    bytes_per_token: u64,
    /// Treat hash ids of JSON lines as those of their `session`, not of the trace.
    #[arg(long)]
    local_ids: bool,
    /// Sort requests by time instead of refusing unsorted ones.
    #[arg(long)]
    sort: bool,
    /// Replay traces with gaps: missing blocks of prompts, and calls that a recording lost.
    #[arg(long)]
    allow_gaps: bool,
    #[command(flatten)]
    timed: TimedArgs,
}

/// Sizes of a node in blocks; without DRAM: unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    dram: Option<u64>,
    nvme: u64,
}

/// Runs the command `reprise sim replay`.
pub(super) fn command(args: &ReplayArgs, audience: Audience) -> anyhow::Result<()> {
    let began = Instant::now();
    let machine = args.timed.machine()?;
    let bytes_per_token = args.timed.bytes_per_token()?.unwrap_or(args.bytes_per_token);
    let trace = prepare(args, audience)?;
    let block_bytes =
        trace.block_tokens().checked_mul(bytes_per_token).context("--bytes-per-token is too large")?;
    let sizes = sizes(args, block_bytes, machine.as_ref())?;
    let policies = PolicyNames::expand(&args.policy);
    check_bounds(args, &policies, &sizes)?;
    let subject = Subject::new(args, &trace, block_bytes);
    audience.emit(&subject);
    let read_seconds = began.elapsed().as_secs_f64();
    let mut outcomes = Vec::new();
    for size in sizes {
        let mut replayed = Vec::new();
        for policy in &policies {
            let began = Instant::now();
            let replay = replay(args, &trace, block_bytes, (*policy, size), machine.as_ref())?;
            let seconds = began.elapsed().as_secs_f64();
            let per_second = |count: u64| (count as f64 / seconds.max(1e-9)) as u64;
            tracing::debug!(
                policy = policy.name(),
                seconds,
                "references/s" = per_second(trace.references()),
                "steps and events/s" = per_second(replay.steps_and_events),
                "replayed"
            );
            replayed.push((*policy, replay));
        }
        let of_size = Outcome::of_size(&subject, args, size, &replayed);
        of_size.iter().for_each(|outcome| audience.emit(outcome));
        outcomes.extend(of_size);
    }
    tracing::debug!(read_seconds, seconds = began.elapsed().as_secs_f64(), "replayed all");
    audience.print_line(subject.text());
    audience.print_line(report::table(&outcomes).render());
    if machine.is_some() {
        audience.print_line(report::timed_tables(&outcomes));
    }
    Ok(())
}

/// Reads the trace; sessions of an archive and copies get their times.
fn prepare(args: &ReplayArgs, audience: Audience) -> anyhow::Result<Trace> {
    let options = ReadOptions {
        scope: if args.local_ids { IdScope::Session } else { IdScope::Trace },
        block_tokens: args.block_tokens,
        allow_gaps: args.allow_gaps,
        sort: args.sort,
    };
    let source = Source { path: &args.trace, options, sessions: args.sessions };
    let mut trace = reading::read(&source, audience)?;
    let spread_ms = u64::try_from(args.spread.0.as_millis()).context("--spread is too long")?;
    if trace.has_session_times() {
        trace = trace.started_at_random(spread_ms, args.seed);
    }
    Ok(if args.copies > 1 { trace.copies(args.copies, spread_ms, args.seed)? } else { trace })
}

fn sizes(args: &ReplayArgs, block_bytes: u64, machine: Option<&Machine>) -> anyhow::Result<Vec<Sizes>> {
    let mut sizes = Vec::new();
    for capacity in &args.capacity {
        sizes.push(Sizes { dram: Some(capacity.blocks(block_bytes)?), nvme: 0 });
    }
    if let Some((dram, nvme)) = TierSize::both(&args.tier)? {
        let nvme = nvme.map_or(Ok(0), |nvme| nvme.blocks(block_bytes))?;
        sizes.push(Sizes { dram: Some(dram.blocks(block_bytes)?), nvme });
    }
    if args.unlimited {
        sizes.push(Sizes { dram: None, nvme: 0 });
    }
    if let Some(Machine { hardware, .. }) = machine.filter(|_| sizes.is_empty()) {
        let dram = Capacity::Bytes(hardware.dram_bytes).blocks(block_bytes)?;
        let nvme = Capacity::Bytes(hardware.nvme_bytes).blocks(block_bytes)?;
        sizes.push(Sizes { dram: Some(dram), nvme });
    }
    Ok(sizes)
}

/// Refuses bounds for clusters and tiers, for which they are not defined.
fn check_bounds(args: &ReplayArgs, policies: &[PolicyName], sizes: &[Sizes]) -> anyhow::Result<()> {
    let bound = policies.iter().find(|policy| !policy.is_of_agents());
    let is_plain = args.nodes == 1 && args.tenants == 1 && sizes.iter().all(|size| size.nvme == 0);
    let is_plain = is_plain && args.timed.hardware.is_none() && args.chains != Chains::Ignored;
    let Some(bound) = bound.filter(|_| !is_plain) else { return Ok(()) };
    bail!(
        "the policy {} is defined for one node, one tenant, one tier and chains, without time: leave out --nodes, \
         --tenants, --chains, NVMe and --hardware, or name the policies of agents",
        bound.name()
    );
}

fn replay(
    args: &ReplayArgs,
    trace: &Trace,
    block_bytes: u64,
    (policy, size): (PolicyName, Sizes),
    machine: Option<&Machine>,
) -> anyhow::Result<Replayed> {
    let dram_blocks = size.dram.unwrap_or(u64::MAX);
    let bound = |counts: OptCounts| {
        let (requests, references, hits_dram) = (counts.requests, counts.references, counts.hits);
        let counts = Counts { requests, references, hits_dram, ..Counts::default() };
        Ok(Replayed::untimed(Replay { counts, nvme_written_max: 0 }))
    };
    let kind: EvictionKind = match policy {
        PolicyName::Production(kind) => kind,
        PolicyName::LruKnownEnds => return bound(replay_recency(trace, dram_blocks, Knowledge::Ends)),
        PolicyName::Opt => return bound(replay_opt(trace, dram_blocks)),
    };
    let settings = NodeSettings {
        policy: EvictionPolicy { kind, chains: args.chains },
        dram_blocks,
        nvme_blocks: size.nvme,
        admission: args.admission,
        block_bytes,
        block_tokens: trace.block_tokens(),
        tenants: args.tenants,
    };
    let Some(machine) = machine else {
        return Ok(Replayed::untimed(Cluster::new(args.nodes, settings).replay(trace)));
    };
    let (results, timed) = machine.replay(args, trace, settings)?;
    let replay = Replay { counts: results.counts, nvme_written_max: results.nvme_written_max };
    Ok(Replayed { replay, timed: Some(timed), steps_and_events: results.steps + results.events })
}
