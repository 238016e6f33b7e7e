//! Hits of a real vLLM engine: behind a queue from NVMe and DRAM, and against computing at every tier under load.
//!
//! ```text
//! queue   four requests compute, four wait behind them ─▶ time to first token, blocks on NVMe or in DRAM
//! alone   the same requests one after another           ─▶ what the queue hides
//! hits    a request every 0.4 s, others compute         ─▶ time to first token, computed or loaded from a tier
//! ```
//!
//! In each round, the same requests run with their blocks on NVMe and in DRAM, in alternating order; the figures are
//! medians of the rounds' medians. Blocks of peers were computed by an engine on another node, and each is loaded once,
//! because a load leaves a copy in DRAM. The agent's counters show where blocks came from.

use std::time::Duration;

use anyhow::{Context, ensure};
use reprise_policy::recompute::WaitBound;
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::{Figure, Paired, Target, median};

use crate::vllm_engine::{BLOCK_TOKENS, EngineLimits, EngineRequest, ServeAnswer, VllmArgs};
use crate::vllm_node::{Loading, VllmNode};

/// Limits of the engine. Requests beyond four wait in its queue.
const LIMITS: EngineLimits = EngineLimits { sequences: 4, step_tokens: 512 };

/// Nodes: the engine's own one, and the one whose blocks are loaded from a peer.
const OWN: usize = 0;
const PEER: usize = 1;

/// Requests that wait, and blocks of their prefixes: 24 MB each with the default model.
const WAITING: u64 = 4;
const WAITING_BLOCKS: u32 = 8;

/// Tokens that the requests before them generate.
const BLOCKERS_OUTPUT: u32 = 24;

/// Blocks of a hit's prefix, and tokens behind a prefix: less than a block.
const HIT_BLOCKS: u32 = 4;
const OWN_TOKENS: u32 = 32;

/// Seconds between hits, and between the requests that compute meanwhile.
const HIT_GAP: f64 = 0.4;
const LOAD_GAP: f64 = 1.0;
const LOAD_OUTPUT: u32 = 24;

/// Share of the hits for each of the four tiers.
const TIERS: u64 = 4;

/// Bound of the wait: the default of the engines' adapters.
const BOUND: WaitBound = WaitBound {
    cap: Duration::from_secs(1),
    base: Duration::from_millis(50),
    per_token: Duration::from_micros(100),
};

/// First seeds of prompts: prefixes of the queue, of hits on the own node, of hits from the peer; tokens behind them.
const QUEUE: u64 = 1 << 32;
const LOCAL: u64 = 1 << 33;
const REMOTE: u64 = 1 << 34;
const OTHER: u64 = 1 << 35;

#[derive(Clone, Debug, clap::Args)]
pub(super) struct EngineBenchArgs {
    #[command(flatten)]
    vllm: VllmArgs,
    /// Serve this many hits, over all tiers.
    #[arg(long, default_value_t = 160)]
    hits: u64,
}

/// Times of one tier.
struct Tier {
    name: &'static str,
    counter: &'static str,
    /// Milliseconds to first token.
    ttfts: Vec<f64>,
    /// Bytes that came from the tier, relative to those of all hits.
    share: f64,
    /// Hits whose whole prefix was loaded; of the others, a part was computed.
    loaded: usize,
}

/// Requests with tokens that no other request has.
struct Prompts {
    next: u64,
}

pub(super) fn run(args: &EngineBenchArgs, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    ensure!(args.hits >= TIERS, "invalid --hits {}: expected at least {TIERS}", args.hits);
    let folder = settings.directory.join("engine");
    let mut node = VllmNode::start_on(&args.vllm, LIMITS, Loading::Policy, (&folder, 2, PEER))?;
    let mut prompts = Prompts { next: OTHER };
    let per_tier = if args.vllm.quick { 2 } else { args.hits / TIERS };
    let rounds = if args.vllm.quick { 1 } else { settings.repetitions };
    let remote: Vec<EngineRequest> =
        (0..2 * per_tier).map(|number| prompts.of(REMOTE + number, HIT_BLOCKS)).collect();
    node.save(&remote)?;
    node.move_engine(OWN)?;
    let mut figures = queue(&mut node, &mut prompts, (settings, rounds))?;
    figures.extend(hits(&mut node, &mut prompts, per_tier)?);
    Ok(figures)
}

impl Prompts {
    /// A request behind a prefix of some blocks.
    fn of(&mut self, prefix_seed: u64, blocks: u32) -> EngineRequest {
        self.next += 1;
        EngineRequest {
            at: 0.0,
            prefix_seed,
            prefix: blocks * BLOCK_TOKENS,
            seed: self.next,
            own: OWN_TOKENS,
            output: 4,
            is_stored: false,
        }
    }
}

/// Measures requests that wait behind others, with their blocks on NVMe and in DRAM, and the same requests alone.
fn queue(
    node: &mut VllmNode,
    prompts: &mut Prompts,
    (settings, rounds): (&Settings, usize),
) -> anyhow::Result<Vec<Figure>> {
    let saved: Vec<EngineRequest> =
        (0..WAITING).map(|number| prompts.of(QUEUE + number, WAITING_BLOCKS)).collect();
    node.save(&saved)?;
    let (mut queued, mut alone) = (Pairs::default(), Pairs::default());
    // One round more, which warms up and is not counted.
    for round in settings.some_rounds("engine.queue", rounds + 1) {
        for is_nvme in [round % 2 == 0, round % 2 == 1] {
            place(node, prompts, is_nvme)?;
            let value = queued_ttft(node, prompts, is_nvme)?;
            place(node, prompts, is_nvme)?;
            let requests: Vec<EngineRequest> =
                (0..WAITING).map(|number| prompts.of(QUEUE + number, WAITING_BLOCKS)).collect();
            let answers = node.engine.loads(&requests)?;
            let single = median(answers.iter().map(|answer| answer.ttft * 1e3).collect());
            if round > 0 {
                queued.add(is_nvme, value);
                alone.add(is_nvme, single);
            }
        }
    }
    Ok(vec![
        queued.figure("engine.ttft_nvme_after_queue", Target::RatioAtMost(1.1)),
        alone.figure("engine.ttft_nvme_alone", Target::None),
    ])
}

/// Brings all saved blocks to NVMe only, or those of the waiting requests to DRAM too.
fn place(node: &mut VllmNode, prompts: &mut Prompts, is_nvme: bool) -> anyhow::Result<()> {
    if is_nvme {
        return node.empty_dram();
    }
    let requests: Vec<EngineRequest> =
        (0..WAITING).map(|number| prompts.of(QUEUE + number, WAITING_BLOCKS)).collect();
    node.engine.loads(&requests).map(drop)
}

/// Median milliseconds to first token of requests that arrive behind others.
fn queued_ttft(node: &mut VllmNode, prompts: &mut Prompts, is_nvme: bool) -> anyhow::Result<f64> {
    let blocker = |prompts: &mut Prompts| EngineRequest { output: BLOCKERS_OUTPUT, ..prompts.of(0, 0) };
    let mut requests: Vec<EngineRequest> = (0..LIMITS.sequences).map(|_| blocker(prompts)).collect();
    requests.extend((0..WAITING).map(|number| prompts.of(QUEUE + number, WAITING_BLOCKS)));
    let before = node.counters()?["hit_bytes_own_nvme"];
    let answers = &node.engine.serve(&requests)?[LIMITS.sequences as usize..];
    let from_nvme = node.counters()?["hit_bytes_own_nvme"] - before;
    ensure!(
        is_nvme || from_nvme == 0,
        "{from_nvme} bytes came from NVMe instead of DRAM: use a larger arena"
    );
    for answer in answers {
        let tokens = WAITING_BLOCKS * BLOCK_TOKENS;
        ensure!(answer.cached == tokens, "{} of {tokens} saved tokens were loaded", answer.cached);
    }
    Ok(median(answers.iter().map(|answer| answer.ttft * 1e3).collect()))
}

/// Milliseconds with blocks in DRAM and on NVMe, one of each for a round.
#[derive(Default)]
struct Pairs {
    dram: Vec<f64>,
    nvme: Vec<f64>,
}

impl Pairs {
    fn add(&mut self, is_nvme: bool, value: f64) {
        if is_nvme { self.nvme.push(value) } else { self.dram.push(value) }
    }

    fn figure(self, name: &str, target: Target) -> Figure {
        let ratios = self.nvme.iter().zip(&self.dram).map(|(nvme, dram)| nvme / dram).collect();
        let paired =
            Paired { reference: median(self.dram), subject: median(self.nvme), ratio: median(ratios) };
        Figure::relative(name, paired, "ms", ("the same requests with their blocks in DRAM", target))
    }
}

/// Counts hits of each tier that are slower than computing by more than the bound.
fn hits(node: &mut VllmNode, prompts: &mut Prompts, per_tier: u64) -> anyhow::Result<Vec<Figure>> {
    let local = |prompts: &mut Prompts| -> Vec<EngineRequest> {
        (0..per_tier).map(|number| prompts.of(LOCAL + number, HIT_BLOCKS)).collect()
    };
    let remote = |prompts: &mut Prompts, first: u64| -> Vec<EngineRequest> {
        (0..per_tier).map(|number| prompts.of(REMOTE + first + number, HIT_BLOCKS)).collect()
    };
    // Computed prompts have the length of hits, and none of their blocks is found.
    let computed: Vec<EngineRequest> = (0..per_tier)
        .map(|_| EngineRequest { own: HIT_BLOCKS * BLOCK_TOKENS + OWN_TOKENS, ..prompts.of(0, 0) })
        .collect();
    let computed = under_load(node, prompts, &computed)?;
    let computed = median(computed.iter().map(|answer| answer.ttft * 1e3).collect());
    let saved = local(prompts);
    node.save(&saved)?;
    let mut tiers = Vec::new();
    let requests = local(prompts);
    tiers.push(tier(node, prompts, ("own_dram", "hit_bytes_own_dram"), &requests)?);
    node.empty_dram()?;
    let requests = local(prompts);
    tiers.push(tier(node, prompts, ("own_nvme", "hit_bytes_own_nvme"), &requests)?);
    let requests = remote(prompts, 0);
    tiers.push(tier(node, prompts, ("peer_dram", "hit_bytes_peer_dram"), &requests)?);
    node.empty_dram_of(PEER)?;
    let requests = remote(prompts, per_tier);
    tiers.push(tier(node, prompts, ("peer_nvme", "hit_bytes_peer_nvme"), &requests)?);
    Ok(figures_of(computed, &tiers))
}

fn tier(
    node: &mut VllmNode,
    prompts: &mut Prompts,
    (name, counter): (&'static str, &'static str),
    requests: &[EngineRequest],
) -> anyhow::Result<Tier> {
    let bytes = |node: &VllmNode| -> anyhow::Result<(u64, u64)> {
        let counters = node.counters()?;
        let hits = counters.iter().filter(|(name, _)| name.starts_with("hit_bytes_"));
        let all = hits.map(|(_, bytes)| bytes).sum();
        Ok((*counters.get(counter).context("a counter of hits")?, all))
    };
    let (before, all_before) = bytes(node)?;
    let answers = under_load(node, prompts, requests)?;
    let (after, all_after) = bytes(node)?;
    ensure!(after > before, "no bytes came from {name}: the hits of this tier were not found");
    let share = (after - before) as f64 / (all_after - all_before) as f64;
    let loaded =
        requests.iter().zip(&answers).filter(|(request, answer)| answer.cached == request.prefix).count();
    Ok(Tier { name, counter, ttfts: answers.iter().map(|answer| answer.ttft * 1e3).collect(), share, loaded })
}

/// Serves requests at regular intervals while others compute.
fn under_load(
    node: &mut VllmNode,
    prompts: &mut Prompts,
    requests: &[EngineRequest],
) -> anyhow::Result<Vec<ServeAnswer>> {
    let mut all: Vec<(bool, EngineRequest)> = (0..)
        .zip(requests)
        .map(|(number, request)| (true, EngineRequest { at: f64::from(number) * HIT_GAP, ..*request }))
        .collect();
    let others = (requests.len() as f64 * HIT_GAP / LOAD_GAP).ceil() as u32;
    for number in 0..others {
        let at = f64::from(number) * LOAD_GAP;
        all.push((false, EngineRequest { at, output: LOAD_OUTPUT, ..prompts.of(0, 0) }));
    }
    all.sort_by(|(_, one), (_, other)| one.at.total_cmp(&other.at));
    let requests: Vec<EngineRequest> = all.iter().map(|(_, request)| *request).collect();
    let answers = node.engine.serve(&requests)?;
    Ok(all.iter().zip(answers).filter(|((is_hit, _), _)| *is_hit).map(|(_, answer)| answer).collect())
}

fn figures_of(computed: f64, tiers: &[Tier]) -> Vec<Figure> {
    let tokens = u64::from(HIT_BLOCKS * BLOCK_TOKENS);
    let bound = BOUND.of_tokens(tokens).as_secs_f64() * 1e3;
    let slower = |tier: &Tier| tier.ttfts.iter().filter(|ttft| **ttft > computed + bound).count() as f64;
    let hits: usize = tiers.iter().map(|tier| tier.ttfts.len()).sum();
    let mut figures = vec![
        Figure::absolute("engine.computed_ttft", computed, "ms", Target::None),
        Figure::absolute("engine.bound", bound, "ms", Target::None),
        Figure::absolute("engine.hits", hits as f64, "hits", Target::None),
        Figure::absolute("engine.slower_hits", tiers.iter().map(slower).sum(), "hits", Target::AtMost(0.0)),
    ];
    for tier in tiers {
        let name = |what: &str| format!("engine.{}_{what}", tier.name);
        let excess = tier.ttfts.iter().copied().fold(f64::MIN, f64::max) - computed;
        let share = format!("engine.{}", tier.counter.replacen("hit_bytes", "bytes_from", 1));
        figures.push(Figure::absolute(name("ttft"), median(tier.ttfts.clone()), "ms", Target::None));
        figures.push(Figure::absolute(name("excess_max"), excess, "ms", Target::AtMost(bound)));
        figures.push(Figure::absolute(name("slower"), slower(tier), "hits", Target::AtMost(0.0)));
        figures.push(Figure::absolute(name("loaded"), tier.loaded as f64, "hits", Target::None));
        figures.push(Figure::absolute(share, tier.share * 100.0, "%", Target::None));
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_beyond_the_bound_are_counted_at_their_tier() {
        let tier = |name, ttfts: &[f64]| Tier {
            name,
            counter: "hit_bytes_own_dram",
            ttfts: ttfts.to_vec(),
            share: 1.0,
            loaded: ttfts.len(),
        };
        // 512 tokens: 50 ms and 0.1 ms for each token.
        let figures =
            figures_of(300.0, &[tier("own_dram", &[100.0, 401.2]), tier("own_nvme", &[401.3, 50.0, 60.0])]);
        let value = |name: &str| figures.iter().find(|figure| figure.name == name).expect(name);
        assert!((value("engine.bound").value - 101.2).abs() < 1e-9);
        assert_eq!((value("engine.hits").value, value("engine.slower_hits").value), (5.0, 1.0));
        assert_eq!(
            (value("engine.own_dram_slower").met, value("engine.own_nvme_slower").met),
            (Some(true), Some(false))
        );
        assert_eq!(value("engine.own_nvme_ttft").value, 60.0);
    }

    #[test]
    fn rounds_are_paired() {
        let mut pairs = Pairs::default();
        for (nvme, dram) in [(110.0, 100.0), (420.0, 400.0), (300.0, 100.0)] {
            pairs.add(true, nvme);
            pairs.add(false, dram);
        }
        let figure = pairs.figure("x", Target::RatioAtMost(1.1));
        assert_eq!((figure.ratio, figure.met), (Some(1.1), Some(true)));
    }

    #[test]
    fn prompts_differ_behind_equal_prefixes() {
        let mut prompts = Prompts { next: OTHER };
        let (one, other) = (prompts.of(QUEUE, 8), prompts.of(QUEUE, 8));
        assert_eq!((one.prefix_seed, one.prefix), (other.prefix_seed, 1_024));
        assert_ne!(one.seed, other.seed);
    }
}
