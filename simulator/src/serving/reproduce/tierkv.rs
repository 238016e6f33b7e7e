//! TierKV: prefetch-aware memory tiering. Tables 3 to 7, the CDF, the burst and the workloads, on the timed world.
//!
//! Each run starts with as many requests as its oversubscription admits, partly decoded, and measures a steady
//! state. Runs with equal seeds have equal requests, so requests are compared in pairs.

use std::collections::BTreeMap;

use reprise_policy::eviction::{Chains, EvictionKind, EvictionPolicy};

use super::super::engine::{Engine, Preemption, Results, Setup, Transfers};
use super::super::fabric::ChannelKind;
use super::super::profiles::{Hardware, Model};
use super::super::statistics::{mean, quantile, signed_rank};
use super::super::workload::{Poisson, Request, TraceProfile};
use super::{Choice, Figure, Position, Relation, Report, tierkv_closed};

/// Seeds of the paper.
const SEEDS: [u64; 5] = [42, 43, 44, 45, 46];

/// Tokens of a block.
const TOKENS: u32 = 16;

/// Batch of the 7B model (§4.6: "~20 ms at batch 32").
const BATCH_7B: f64 = 32.0;

/// Steps of a run, and those before the measurement.
const STEPS: u64 = 1_000;
const WARM_UP: u64 = 100;

/// Requests per second at 1×: above the 27 that a batch of 32 serves, so that the admission limit binds.
const ARRIVALS_PER_SECOND: f64 = 50.0;

/// Requests of a run: candidates for the population at 5×, about one in seven of which is present, and arrivals.
const REQUESTS: usize = 30_000;

/// Policies of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Policy {
    Lru,
    Frequency,
    Static,
    Prefetch,
    Oracle,
}

const POLICIES: [Policy; 5] =
    [Policy::Lru, Policy::Frequency, Policy::Static, Policy::Prefetch, Policy::Oracle];

/// One point of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Point {
    model: &'static str,
    ratio: u64,
    policy: Policy,
    window: u32,
    workload: u8,
    /// Whether arrivals double during the second third of the run.
    is_burst: bool,
}

const BASE: Point =
    Point { model: "llama-3-8b", ratio: 3, policy: Policy::Lru, window: 4, workload: 4, is_burst: false };

/// Results of points, which run once each.
#[derive(Debug, Default)]
struct Runs {
    results: BTreeMap<Point, Vec<Results>>,
    events: u64,
}

impl Policy {
    fn name(self) -> &'static str {
        match self {
            Policy::Lru => "LRU",
            Policy::Frequency => "Frequency",
            Policy::Static => "TierKV-Static",
            Policy::Prefetch => "TierKV-Prefetch",
            Policy::Oracle => "Oracle",
        }
    }

    fn eviction(self) -> EvictionPolicy {
        let kind = if self == Policy::Frequency { EvictionKind::Lfu } else { EvictionKind::Lru };
        // The paper's policies do not know chains.
        EvictionPolicy { kind, chains: Chains::Ignored }
    }

    fn has_nvme(self) -> bool {
        !matches!(self, Policy::Lru | Policy::Frequency)
    }
}

impl Point {
    /// Accelerators: the smallest power of two whose memory has room for the weights and a batch.
    fn accelerators(self, hardware: &Hardware, model: &Model) -> u32 {
        let fits = |count: &u32| Setup::hbm_blocks(hardware, model, *count, TOKENS) >= 1_000;
        [1, 2, 4, 8].into_iter().find(fits).unwrap_or(8)
    }

    /// Batch: 32 for 7B and 8 for 70B, as the paper states; in between on the power law through both.
    fn batch(self, model: &Model) -> usize {
        let exponent = (BATCH_7B / 8.0).ln() / (70.0_f64 / 7.0).ln();
        (BATCH_7B * (7e9 / model.parameters).powf(exponent)).round().min(BATCH_7B) as usize
    }

    fn setup(self, seed: u64) -> Setup {
        let hardware = Hardware::named("h100").expect("a built-in profile is valid");
        let model = Model::named(self.model).expect("a built-in model is valid");
        let accelerators = self.accelerators(&hardware, &model);
        let hbm = Setup::hbm_blocks(&hardware, &model, accelerators, TOKENS);
        let block = model.kv_bytes_per_token() * u64::from(TOKENS);
        let nvme = if self.policy.has_nvme() { hardware.nvme_bytes / block } else { 0 };
        Setup {
            capacity: [hbm, hardware.dram_bytes / block, nvme],
            accelerators,
            tokens_per_block: TOKENS,
            admitted_blocks_max: hbm * self.ratio,
            batch_max: self.batch(&model),
            step_tokens_max: 2_048,
            turn: Some(TOKENS),
            eviction: self.policy.eviction(),
            lookahead: (self.policy == Policy::Prefetch && self.window > 0)
                .then_some((self.window, 2 * self.window)),
            transfers: if self.policy == Policy::Oracle { Transfers::Free } else { Transfers::Timed },
            preemption: Preemption::Swap,
            load_policy: None,
            noise: 0.02,
            seed,
            hardware,
            model,
        }
    }

    fn requests(self, seed: u64) -> Vec<Request> {
        let mut arrivals = Poisson::new(seed, TraceProfile::ALL[usize::from(self.workload)]);
        let rate = ARRIVALS_PER_SECOND * self.ratio as f64;
        let burst = |number: usize| self.is_burst && (REQUESTS / 3..2 * REQUESTS / 3).contains(&number);
        (0..REQUESTS).map(|number| arrivals.next(if burst(number) { 2.0 * rate } else { rate })).collect()
    }
}

impl Runs {
    /// Results of a point, one for each seed.
    fn of(&mut self, point: Point) -> &[Results] {
        if !self.results.contains_key(&point) {
            let run = |seed: &u64| {
                let mut engine = Engine::new(point.setup(*seed), &point.requests(*seed));
                engine.populate();
                engine.run(STEPS, WARM_UP)
            };
            let results: Vec<Results> = SEEDS.iter().map(run).collect();
            self.events += results.iter().map(|results| results.events).sum::<u64>();
            self.results.insert(point, results);
        }
        &self.results[&point]
    }

    /// A quantity of a point, one value for each seed.
    fn seeds(&mut self, point: Point, quantity: impl Fn(&Results) -> f64) -> Vec<f64> {
        self.of(point).iter().map(quantity).collect()
    }
}

fn tpot(results: &Results) -> f64 {
    mean(&results.tpot_ms())
}

fn ttft_p95(results: &Results) -> f64 {
    quantile(&results.service_ttft_ms(), 0.95)
}

pub(super) fn report() -> Report {
    let mut runs = Runs::default();
    let hardware = Hardware::named("h100").expect("a built-in profile is valid");
    let mut figures = tierkv_closed::figures(&hardware);
    figures.extend(tables_3_and_5(&mut runs));
    figures.extend(table_4(&mut runs));
    figures.extend(table_6(&mut runs));
    figures.extend(latency_cdf(&mut runs));
    figures.extend(burst(&mut runs));
    figures.extend(workloads(&mut runs));
    figures.extend(table_7(&mut runs));
    // A ratio without a measurement is not a number.
    figures.retain(|figure| figure.ours.is_finite());
    Report {
        name: "tierkv",
        claims: Vec::new(),
        title: "TierKV: Prefetch-Aware Memory Tiering for KV Cache in LLM Serving",
        limits: limits(&mut runs),
        figures,
        choices: choices(),
        positions: positions(),
        events: runs.events,
    }
}

/// Published mean TPOT and throughput by ratio and policy; mean and P95 TTFT are 8.0 and 12.4 ms in all rows.
const TABLE_5: [[(f64, f64); 5]; 5] = [
    [(1.20, 239_794.0), (1.20, 239_794.0), (1.20, 239_794.0), (1.20, 239_794.0), (1.20, 239_794.0)],
    [(2.57, 130_927.0), (2.59, 128_763.0), (2.57, 130_927.0), (1.20, 239_794.0), (1.20, 239_794.0)],
    [(4.35, 81_921.0), (4.36, 81_453.0), (4.35, 81_921.0), (1.20, 239_794.0), (1.20, 239_794.0)],
    [(6.25, 59_628.0), (6.25, 59_663.0), (6.25, 59_628.0), (1.79, 180_646.0), (1.20, 239_794.0)],
    [(7.74, 46_158.0), (7.75, 46_091.0), (7.74, 46_158.0), (3.10, 111_178.0), (1.20, 239_794.0)],
];

fn tables_3_and_5(runs: &mut Runs) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (ratio, row) in (1..).zip(TABLE_5) {
        for (policy, (tpot_published, throughput_published)) in POLICIES.into_iter().zip(row) {
            let point = Point { ratio, policy, ..BASE };
            let place = if ratio == 3 { "tables 3 and 5" } else { "table 5" };
            let name = |quantity: &str| format!("{ratio}x, {}: {quantity}", policy.name());
            let mut add = |quantity: &str, unit, published, ours: &[f64]| {
                figures.push(Figure::of_seeds(place, name(quantity), unit, (published, ours)));
            };
            add("mean TTFT", "ms", 8.0, &runs.seeds(point, |results| mean(&results.service_ttft_ms())));
            add("P95 TTFT", "ms", 12.4, &runs.seeds(point, ttft_p95));
            add("mean TPOT", "ms", tpot_published, &runs.seeds(point, tpot));
            add("throughput", "tok/s", throughput_published, &runs.seeds(point, Results::tokens_per_second));
        }
    }
    // Ratios do not depend on the time of a step, which the paper states in two ways.
    let of = |policy| Point { policy, ..BASE };
    for (quantity, published, value) in [
        ("3x, mean TPOT, LRU over TierKV-Prefetch", 3.6, tpot as fn(&Results) -> f64),
        ("3x, throughput, TierKV-Prefetch over LRU", 2.9, |results| 1.0 / results.tokens_per_second()),
    ] {
        let (lru, ahead) = (runs.seeds(of(Policy::Lru), value), runs.seeds(of(Policy::Prefetch), value));
        figures.push(Figure::of_seeds("section 4.1", quantity, "x", (published, &ratios(&lru, &ahead))));
    }
    figures
}

fn ratios(above: &[f64], below: &[f64]) -> Vec<f64> {
    above.iter().zip(below).map(|(above, below)| above / below).collect()
}

fn table_4(runs: &mut Runs) -> Vec<Figure> {
    let rows = [
        ("llama-3-8b", 2.7, 0.48),
        ("llama-2-13b", 3.0, 0.42),
        ("llama-34b", 3.6, 0.35),
        ("llama-3-70b", 4.2, 0.24),
    ];
    let mut figures = Vec::new();
    for (model, throughput, ttft) in rows {
        let of = |policy| Point { policy, model, ..BASE };
        let speed = |runs: &mut Runs, policy| runs.seeds(of(policy), Results::tokens_per_second);
        let ours = ratios(&speed(runs, Policy::Prefetch), &speed(runs, Policy::Lru));
        let name = format!("{model}: throughput, TierKV-Prefetch over LRU");
        figures.push(Figure::of_seeds("table 4", name, "x", (throughput, &ours)));
        let (ahead, lru) =
            (runs.seeds(of(Policy::Prefetch), ttft_p95), runs.seeds(of(Policy::Lru), ttft_p95));
        let name = format!("{model}: P95 TTFT, TierKV-Prefetch over LRU");
        figures.push(Figure::of_seeds("table 4", name, "x", (ttft, &ratios(&ahead, &lru))));
    }
    figures
}

fn table_6(runs: &mut Runs) -> Vec<Figure> {
    let rows = [
        (0, 0.0, 4.38),
        (1, 42.6, 3.19),
        (2, 76.1, 2.10),
        (4, 100.0, 1.20),
        (6, 100.0, 1.20),
        (8, 100.0, 1.20),
        (10, 100.0, 1.20),
        (12, 100.0, 1.20),
        (16, 100.0, 1.20),
    ];
    let mut figures = Vec::new();
    for (window, hits, tpot_published) in rows {
        let point = Point { policy: Policy::Prefetch, window, ..BASE };
        let ours = runs.seeds(point, |results| results.prefetch_hit_rate() * 100.0);
        figures.push(Figure::of_seeds("table 6", format!("K = {window}: hit rate"), "%", (hits, &ours)));
        let ours = runs.seeds(point, tpot);
        figures.push(Figure::of_seeds(
            "table 6",
            format!("K = {window}: mean TPOT"),
            "ms",
            (tpot_published, &ours),
        ));
    }
    figures
}

fn latency_cdf(runs: &mut Runs) -> Vec<Figure> {
    let place = "section 4.2";
    let share_above = |results: &Results, bound: f64| {
        let all = results.tpot_ms();
        all.iter().filter(|tpot| **tpot > bound).count() as f64 * 100.0 / all.len().max(1) as f64
    };
    let of = |policy| Point { policy, ..BASE };
    let mut figures = Vec::new();
    for (policy, median_ms, p95_ms) in [(Policy::Lru, 4.55, 5.83), (Policy::Prefetch, 1.20, 1.20)] {
        let name = |quantity: &str| format!("{}: {quantity}", policy.name());
        let median = runs.seeds(of(policy), |results| quantile(&results.tpot_ms(), 0.5));
        figures.push(Figure::of_seeds(place, name("median TPOT"), "ms", (median_ms, &median)));
        let p95 = runs.seeds(of(policy), |results| quantile(&results.tpot_ms(), 0.95));
        figures.push(Figure::of_seeds(place, name("P95 TPOT"), "ms", (p95_ms, &p95)));
    }
    // The paper's bound of 5 ms is 4.17 times its step without stalls.
    let step = mean(&runs.seeds(of(Policy::Oracle), tpot));
    for (policy, published) in [(Policy::Lru, 28.0), (Policy::Prefetch, 0.0)] {
        let ours = runs.seeds(of(policy), |results| share_above(results, step * 5.0 / 1.2));
        let name = format!("{}: requests above 4.17 steps a token", policy.name());
        figures.push(Figure::of_seeds(place, name, "%", (published, &ours)));
    }
    figures
}

fn burst(runs: &mut Runs) -> Vec<Figure> {
    let point = Point { policy: Policy::Prefetch, is_burst: true, ..BASE };
    let nvme = runs.seeds(point, |results| results.used_max[2] as f64);
    let bytes = runs.seeds(point, |results| results.channel(ChannelKind::NvmeRead).requested as f64);
    let hits = runs.seeds(point, |results| results.prefetch_hit_rate() * 100.0);
    let place = "section 4.3";
    vec![
        Figure::of_seeds(place, "burst: blocks on NVMe", "blocks", (0.0, &nvme)),
        Figure::of_seeds(place, "burst: bytes read from NVMe", "bytes", (0.0, &bytes)),
        Figure::of_seeds(place, "burst: prefetch hit rate", "%", (100.0, &hits)),
    ]
}

fn workloads(runs: &mut Runs) -> Vec<Figure> {
    let mut figures = Vec::new();
    for (workload, profile) in (0..).zip(TraceProfile::ALL) {
        let point = Point { policy: Policy::Prefetch, workload, ..BASE };
        let hits = runs.seeds(point, |results| results.prefetch_hit_rate() * 100.0);
        let name = format!("{}: prefetch hit rate", profile.name());
        let figure = Figure::of_seeds("section 4.7", name, "%", (80.0, &hits));
        figures.push(figure.bound(Relation::AtLeast));
        let speed = |runs: &mut Runs, policy| {
            runs.seeds(Point { policy, workload, ..BASE }, Results::tokens_per_second)
        };
        let (ahead, fixed) = (speed(runs, Policy::Prefetch), speed(runs, Policy::Static));
        // The paper shows an advantage on all axes, without values.
        let name = format!("{}: throughput, TierKV-Prefetch over TierKV-Static", profile.name());
        let figure = Figure::of_seeds("section 4.7", name, "x", (1.0, &ratios(&ahead, &fixed)));
        figures.push(figure.bound(Relation::AtLeast));
    }
    figures
}

/// TPOT of the requests that ended under both policies, in pairs, over all seeds.
fn pairs(runs: &mut Runs, first: Policy, second: Policy) -> (Vec<f64>, Vec<f64>) {
    let mut by_request = |policy| {
        let mut all = BTreeMap::new();
        for (seed, results) in runs.of(Point { policy, ..BASE }).iter().enumerate() {
            for outcome in results.outcomes.iter().filter(|outcome| outcome.decoded > 0) {
                all.insert((seed, outcome.number), outcome.decode as f64 / f64::from(outcome.decoded));
            }
        }
        all
    };
    let (first, second) = (by_request(first), by_request(second));
    first.iter().filter_map(|(key, value)| second.get(key).map(|other| (*value, *other))).unzip()
}

fn table_7(runs: &mut Runs) -> Vec<Figure> {
    let rows = [
        (Policy::Prefetch, Policy::Lru, 0.001, Relation::AtMost),
        (Policy::Prefetch, Policy::Static, 0.001, Relation::AtMost),
        (Policy::Oracle, Policy::Prefetch, 1.0, Relation::Equal),
    ];
    let mut figures = Vec::new();
    for (first, second, p, relation) in rows {
        let (one, other) = pairs(runs, first, second);
        let test = signed_rank(&one, &other);
        let name = format!("{} against {}, {} pairs", first.name(), second.name(), test.pairs);
        figures.push(Figure::new("table 7", format!("{name}: W"), "", (0.0, test.w)));
        figures.push(Figure::new("table 7", format!("{name}: p"), "", (p, test.p)).bound(relation));
    }
    figures
}

fn choices() -> Vec<Choice> {
    let choice = |parameter, value: &str, reason| Choice { parameter, value: value.to_owned(), reason };
    vec![
        choice(
            "time of a step",
            "roofline of an H100: weights and KV cache over 3,350 GB/s, operations over 40 % of 989 TFLOPS",
            "table 1 gives the bandwidth; the paper does not derive its step times",
        ),
        choice(
            "batch",
            "32 for 7B, 8 for 70B, a power law in between",
            "the only batches that the paper states (section 4.6)",
        ),
        choice(
            "rotation",
            "a request runs for 16 steps, then others run",
            "with more KV cache than HBM, requests take turns; one block is the unit at which the block manager acts",
        ),
        choice(
            "HBM for KV cache",
            "90 % of 80 GB without the weights",
            "vLLM's default; the paper counts all 80 GB, which leaves no room for weights",
        ),
        choice(
            "oversubscription",
            "KV cache of the admitted requests over HBM for KV cache, with arrivals that keep it full",
            "a rate above the service rate alone has no steady state",
        ),
        choice(
            "lengths",
            "ShareGPT, CNN/DailyMail, Azure code; sigma 1.0, 0.5, 0.5 (outputs 1.5); at most 4,096 tokens",
            "the paper states only that they are calibrated on public traces",
        ),
        choice(
            "accelerators",
            "one; two for 70B",
            "its weights of 141 GB do not fit into the 80 GB of one H100",
        ),
        choice(
            "TTFT",
            "from the first step of a request to its first token",
            "the paper has no queueing in it",
        ),
        choice("NVMe window", "2K", "section 4.4"),
        choice(
            "steps of a run",
            "1,000, of which 100 are not measured",
            "runs begin in the steady state of a rotation; intervals over the seeds are a few percent",
        ),
    ]
}

fn positions() -> Vec<Position> {
    vec![
        Position {
            contradiction: "Table 4 has P95 TTFT ratios of 0.24 to 0.48; tables 3 and 5 state that TTFT is independent of \
                            the policy.",
            side: "Table 4: prompts are computed in the same steps as decodes, so a stall of a step delays both.",
        },
        Position {
            contradiction: "Sections 3.5 and 4.6 have steps of 20 ms; the tables have a TPOT of 1.20 ms without stalls.",
            side: "Neither: the roofline decides. 1.20 ms is less than reading the weights once (4.8 ms).",
        },
        Position {
            contradiction: "A gap of 480x between NVMe and HBM is bridged with the bandwidth of DRAM in between.",
            side: "480x is 3,350 over 7 GB/s, HBM's own reads. The path of a block is 7 GB/s, then 50 GB/s: a gap of 7x.",
        },
        Position {
            contradiction: "Section 4.1 states that TierKV-Static reduces TPOT; tables 3 and 5 have the values of LRU.",
            side: "The tables: all blocks fit into HBM and DRAM up to 5x, so a third tier changes nothing.",
        },
        Position {
            contradiction: "Appendix B has a work-conserving link of 50 GB/s. At K = 4 and 3x, table 6 hides 3.15 ms of \
                            transfers behind each step of 1.20 ms, which takes 131 GB/s.",
            side: "Appendix B: a prefetch moves a transfer in time and does not add bandwidth. Windows of \
                   consecutive steps overlap, so K steps do not hide K times as much.",
        },
        Position {
            contradiction: "Table 2 has 4.8 MB for 48 layers and 8.0 MB for 80 layers; equation 2 gives 3.0 and 5.0.",
            side: "Equation 2, which is the production layout.",
        },
        Position {
            contradiction: "8 MB from DRAM take 165 us in section 3.5 and 0.47 ms in section 4.6.",
            side: "Section 3.5, which is equation 1.",
        },
    ]
}

fn limits(runs: &mut Runs) -> Vec<String> {
    let lru = mean(&runs.seeds(BASE, tpot));
    let of = |policy| Point { policy, ..BASE };
    let oracle = mean(&runs.seeds(of(Policy::Oracle), tpot));
    let ahead = mean(&runs.seeds(of(Policy::Prefetch), tpot));
    let hidden = (lru - ahead) / (lru - oracle) * 100.0;
    vec![
        format!(
            "A TPOT of 1.20 ms is not reached: without any transfer, a step of our model takes {oracle:.1} ms. \
             Throughput, batch over step, is not reached for the same reason; 239,794 tok/s at 1.20 ms is a batch of 288."
        ),
        format!(
            "The factor of 3.6 between LRU and TierKV-Prefetch at 3x is not reached: LRU has {lru:.1} ms, prefetch \
             {ahead:.1} ms, Oracle {oracle:.1} ms. Prefetch removes {hidden:.0} % of the stalls, but these are shorter than \
             a step. Stalls of 2.6 steps in each step cannot be hidden by a link that carries one step in one step."
        ),
        "A TTFT of 8.0 ms is not reached: it is about one prompt of 512 tokens at the full peak of an H100 and without a \
         batch around it."
            .to_owned(),
        "A burst does not change the hit rate: the admission limit is reached before it, so a burst lengthens the queue of \
         arrivals only."
            .to_owned(),
        "31 % of HBM left empty with blocks of 64 tokens is not reached: half a block a request is 31 % only if \
         requests have 71 tokens on average."
            .to_owned(),
    ]
}
