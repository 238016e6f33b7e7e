//! Tutti: hit rates by tier, bubbles of layer-wise loads, TTFT by prefix, cost per million tokens. The rates of requests
//! under an SLO are in [`super::tutti_rates`].

use super::super::costs::Costs;
use super::super::profiles::{GB, Hardware, Model};
use super::tutti_datasets::{CHUNK, DATASETS, Dataset, Order, replay};
use super::{Choice, Figure, Position, Report, tutti_rates};

/// Tokens in a thousand, as the paper counts contexts.
const K: u32 = 1_024;

/// Bandwidths of retrieval that the paper measured (§4.2.1), which no data sheet gives.
pub(super) const TUTTI_BYTES_PER_SECOND: f64 = 25.9 * GB;
pub(super) const GDS_BYTES_PER_SECOND: f64 = 11.9 * GB;

/// Bytes of DRAM and SSD of a GPU (§4).
pub(super) const DRAM_BYTES: u64 = 256_000_000_000;
pub(super) const SSD_BYTES: u64 = 14_000_000_000_000;

/// Model and node of a reproduction.
pub(super) struct World {
    pub(super) hardware: Hardware,
    pub(super) model: Model,
    pub(super) costs: Costs,
}

pub(super) fn report() -> Report {
    let hardware = Hardware::named("h100+ps1010x2").expect("a built-in profile is valid");
    let model = Model::named("llama-3-8b").expect("a built-in model is valid");
    let world = World { costs: Costs::new(&hardware, &model, 1), hardware, model };
    let mut figures = objects_and_lists();
    let mut events = 0;
    for dataset in &DATASETS {
        figures.extend(hit_rates(&world, dataset, &mut events));
    }
    for dataset in &DATASETS {
        figures.extend(tutti_rates::figures(&world, dataset, &mut events));
    }
    figures.extend(world.bubbles());
    figures.extend(world.prefixes());
    figures.extend(world.long_context());
    figures.extend(world.cost());
    let (choices, positions, limits) = (choices(), positions(), limits());
    Report {
        name: "tutti",
        claims: Vec::new(),
        title: "Tutti: Making SSD-Backed KV Cache Practical for Long-Context LLM Serving",
        figures,
        choices,
        positions,
        limits,
        events,
    }
}

/// §2.2 and §3.1: objects of a long prefix, and the memory of their lists.
fn objects_and_lists() -> Vec<Figure> {
    let qwen = Model::named("qwen3-32b").expect("a built-in model is valid");
    let layout = qwen.layout(64).expect("a built-in layout is valid");
    let objects = u64::from(layout.objects()) * u64::from(128 * K) / 64;
    let pages = 60 * (1_u64 << 30) / 4_096;
    let lists = pages / 16;
    vec![
        Figure::new(
            "section 2.2",
            "objects of 128K tokens of Qwen3-32B",
            "objects",
            (262_144.0, objects as f64),
        ),
        Figure::new(
            "section 2.2",
            "bytes of an object",
            "KiB",
            (80.0, layout.object_bytes() as f64 / 1_024.0),
        ),
        Figure::new("section 3.1", "pages of 60 GB", "pages", (15_728_640.0, pages as f64)),
        Figure::new(
            "section 3.1",
            "PRP lists of 60 GB",
            "GiB",
            (3.75, (lists * 4_096) as f64 / f64::from(1 << 30)),
        ),
        Figure::new("section 3.1", "SGL of 60 GB", "MiB", (15.0, (lists * 16) as f64 / f64::from(1 << 20))),
    ]
}

/// Table 1: share of the prompts' chunks that each tier alone would have, for both orders of questions.
fn hit_rates(world: &World, dataset: &Dataset, events: &mut u64) -> Vec<Figure> {
    let mut figures = Vec::new();
    for order in [Order::Shuffled, Order::InSequence] {
        let requests = dataset.requests(order);
        let tiers = [("HBM", world.hbm_bytes()), ("DRAM", DRAM_BYTES), ("SSD", SSD_BYTES)];
        for ((tier, bytes), published) in tiers.into_iter().zip(dataset.published) {
            let hits: u64 =
                replay(&requests, bytes / world.chunk_bytes()).iter().map(|hits| u64::from(*hits)).sum();
            let references: u64 = requests.iter().map(|(_, chunks)| u64::from(*chunks)).sum();
            *events += references;
            let ours = hits as f64 * 100.0 / references as f64;
            let quantity = format!("{}: hit rate, {tier}, questions {}", dataset.name, order.name());
            figures.push(Figure::new("table 1", quantity, "%", (published, ours)));
        }
    }
    figures
}

impl World {
    pub(super) fn chunk_bytes(&self) -> u64 {
        self.model.kv_bytes_per_token() * u64::from(CHUNK)
    }

    /// HBM for KV cache: 90 % of the memory (vLLM's default), without the weights.
    pub(super) fn hbm_bytes(&self) -> u64 {
        (self.hardware.hbm_bytes / 10 * 9).saturating_sub(self.model.weight_bytes())
    }

    /// Seconds of computation of a prompt whose prefix is cached.
    fn compute(&self, total: u32, cached: u32) -> f64 {
        self.costs.seconds(self.costs.weights() + self.costs.prefill((total - cached).max(1), cached))
    }

    fn load(&self, cached: u32, bytes_per_second: f64) -> f64 {
        f64::from(cached) * self.model.kv_bytes_per_token() as f64 / bytes_per_second
    }

    /// Seconds that the GPU idles if layers are loaded in sequence while earlier ones are computed.
    fn bubble(&self, total: u32, cached: u32, bytes_per_second: f64) -> f64 {
        let layers = f64::from(self.model.layers);
        let (compute, load) =
            (self.compute(total, cached) / layers, self.load(cached, bytes_per_second) / layers);
        let mut end = 0.0_f64;
        for layer in 1..=self.model.layers {
            end = end.max(load * f64::from(layer)) + compute;
        }
        end - compute * layers
    }

    /// Figure 13: bubbles of a prompt of 32K tokens by hit rate, and the hit rate from which they exceed computation.
    fn bubbles(&self) -> Vec<Figure> {
        let total = 32 * K;
        let cached = |hit: f64| (f64::from(total) * hit) as u32;
        let crossover = |bandwidth: f64| {
            let exceeds = |token: &u32| self.bubble(total, *token, bandwidth) > self.compute(total, *token);
            let first = (0..total).step_by(16).find(exceeds).unwrap_or(total);
            f64::from(first) / f64::from(total) * 100.0
        };
        let ssd = self.hardware.nvme_read.bytes_per_second as f64;
        let rates = [0.0, 12.5, 25.0, 37.5, 50.0, 62.5, 75.0, 87.5, 93.75];
        let bubbles = rates.map(|rate| self.bubble(total, cached(rate / 100.0), ssd) * 1e3);
        let mean = bubbles.iter().sum::<f64>() / bubbles.len() as f64;
        let place = "figure 13";
        vec![
            Figure::new(
                place,
                "hit rate at which bubbles exceed computation, SSD",
                "%",
                (98.3, crossover(ssd)),
            ),
            Figure::new(place, "mean bubble up to 93.75 %, SSD", "ms", (25.0, mean)),
            Figure::new(place, "bubble at 93.75 %, SSD", "ms", (6.0, bubbles[8])),
        ]
    }

    /// Figure 11: TTFT of 128K tokens by cached prefix.
    fn prefixes(&self) -> Vec<Figure> {
        let total = 128 * K;
        let tutti = |cached| self.compute(total, cached) + self.bubble(total, cached, TUTTI_BYTES_PER_SECOND);
        let gds = |cached| self.compute(total, cached) + self.load(cached, GDS_BYTES_PER_SECOND);
        let gain = |cached| (1.0 - tutti(cached) / gds(cached)) * 100.0;
        let place = "section 4.2.3";
        vec![
            Figure::new(place, "TTFT with 112K of 128K cached, Tutti", "s", (3.43, tutti(112 * K))),
            Figure::new(place, "TTFT reduction against GDS, 32K of 128K cached", "%", (5.8, gain(32 * K))),
            Figure::new(
                place,
                "TTFT reduction against GDS, 128K of 128K cached",
                "%",
                (61.4, gain(total - 1)),
            ),
        ]
    }

    /// Figure 12: GLM-4-9B on two GPUs and four drives, 640K tokens of which a growing prefix is cached.
    fn long_context(&self) -> Vec<Figure> {
        let model = Model::named("glm-4-9b-1m").expect("a built-in model is valid");
        let world =
            World { costs: Costs::new(&self.hardware, &model, 2), hardware: self.hardware.clone(), model };
        let total = 640 * K;
        let tutti =
            |cached| world.compute(total, cached) + world.bubble(total, cached, 2.0 * TUTTI_BYTES_PER_SECOND);
        let gds = |cached| world.compute(total, cached) + world.load(cached, 2.0 * GDS_BYTES_PER_SECOND);
        let place = "section 4.2.4";
        let ttft = |cached: u32, system: &str| format!("TTFT with {cached}K of 640K cached, {system}");
        let mut figures = vec![
            Figure::new(place, ttft(128, "Tutti"), "s", (155.743, tutti(128 * K))),
            Figure::new(place, ttft(128, "GDS"), "s", (207.12, gds(128 * K))),
        ];
        for cached in [256, 384, 512] {
            figures.push(Figure::unpublished("figure 12", ttft(cached, "Tutti"), "s", tutti(cached * K)));
            figures.push(Figure::unpublished("figure 12", ttft(cached, "GDS"), "s", gds(cached * K)));
        }
        figures.push(Figure::new(place, ttft(640, "Tutti"), "s", (1.2, tutti(total - 1))));
        figures
    }

    /// §4.3: cost at saturation. Cost per token is price over throughput, and throughput the inverse of a request's time.
    fn cost(&self) -> Vec<Figure> {
        let hardware = &self.hardware;
        let ssd = hardware.nvme_usd_per_gb_hour * SSD_BYTES as f64 / GB;
        let total = 24_000;
        let cached = |percent: u32| total / 100 * percent;
        let layerwise = |cached, rate| self.compute(total, cached) + self.bubble(total, cached, rate);
        let tutti = layerwise(cached(86), TUTTI_BYTES_PER_SECOND) * (hardware.usd_per_hour + ssd);
        let gds = self.compute(total, cached(86)) + self.load(cached(86), GDS_BYTES_PER_SECOND);
        let gds = gds * (hardware.usd_per_hour + ssd);
        let lower = |other: f64| (1.0 - tutti / other) * 100.0;
        let place = "section 4.3";
        vec![
            Figure::new(place, "LooGLE: cost reduction against GDS", "%", (27.0, lower(gds))),
            Figure::new(
                place,
                "DRAM price over SSD price",
                "x",
                (100.0, hardware.dram_usd_per_gb_hour / hardware.nvme_usd_per_gb_hour),
            ),
        ]
    }
}

fn choices() -> Vec<Choice> {
    let choice = |parameter, value: &str, reason| Choice { parameter, value: value.to_owned(), reason };
    vec![
        choice(
            "prefill",
            "40 % of 989 TFLOPS",
            "Llama 3's training reached 38 to 43 %; the paper states none",
        ),
        choice(
            "LEval",
            "508 documents, 2,197 questions, 20 sub-tasks; each document has the mean length of its sub-task",
            "table of the dataset's repository (figs/data.png); Tutti states only the range of 3k to 200k tokens",
        ),
        choice(
            "LooGLE",
            "776 documents, 6,448 questions, 4 sub-tasks, 24k tokens on average",
            "statistics of the dataset's paper; Tutti states no mean",
        ),
        choice(
            "order of requests",
            "round-robin over sub-tasks, with the questions of a sub-task shuffled or in sequence",
            "section 4 names the strategy, not the order within a sub-task; rates are those of shuffled questions, \
             because the low hit rates of HBM in table 1 exclude a sequence",
        ),
        choice(
            "rates of requests",
            "1,500 requests of a dataset, behind its first quarter, with Poisson arrivals and answers of 64 tokens",
            "figure 8 has rates, but neither numbers of requests nor lengths of answers",
        ),
        choice(
            "tokens and requests of a step",
            "8,192 tokens and 256 requests",
            "defaults of vLLM's server on an H100 (EngineArgs), which the paper does not state",
        ),
        choice(
            "DRAM of figure 8",
            "layer by layer over the link of 50 GB/s",
            "section 4: LMCache-DRAM-LW; its bandwidth with layers is not stated",
        ),
        choice(
            "GDS of figure 8",
            "11.9 GB/s, and the step of a request waits for its load",
            "section 4.2.1 and 4.2.5: GDS has no layer-wise pipeline, and the CPU of the engine issues each I/O",
        ),
        choice(
            "figure 12",
            "640K tokens, of which 128K to 640K are cached; twice the bandwidth of one GPU",
            "section 4.2.4 states prefixes and times, not the length of prompts; 155.7 s are 512K computed tokens",
        ),
        choice(
            "retrieval of Tutti and GDS",
            "25.9 and 11.9 GB/s",
            "measured by the paper (4.2.1): software overheads that no data sheet gives",
        ),
        choice(
            "load",
            "saturated, for costs",
            "below saturation all systems have the throughput of the arrivals",
        ),
    ]
}

fn positions() -> Vec<Position> {
    vec![
        Position {
            contradiction: "Two SSDs read 29 GB/s (section 2.2), and retrieval reaches 25.9 GB/s (section 4.2.1).",
            side: "29 GB/s for the bubbles, which the paper attributes to the device; 25.9 GB/s where it compares systems.",
        },
        Position {
            contradiction: "An object of Qwen3-32B has 80 KB (section 2.2); its config.json gives 128 KiB.",
            side: "config.json: heads of 128. 80 KB follow from 5,120 over 64 heads.",
        },
    ]
}

fn limits() -> Vec<String> {
    [
        "The hit rates of DRAM are between those of both orders: shuffled questions reuse a document too late for DRAM, \
         questions in sequence within a few requests, so that HBM has it too.",
        "84 % on LEval with SSDs is not reached: 508 of 2,197 requests are the first ones of their documents, so 77 % of \
         the chunks is the bound unless documents share prefixes.",
        "HBM on both datasets and DRAM on LooGLE exceed the SLO at any rate: their rate is zero, and they have no ratio. \
         Without queues, the mean computation of the missing chunks takes more than 1 s at 40 % of the peak.",
        "The ratio to DRAM under the SLO is not reached: the hit rate of DRAM with shuffled questions is 15 points below \
         the published one, and missing chunks cost most.",
        "The mean bubble of 25 ms is not reached: loads of layers behind the first one are hidden in the model, and \
         kernel launches and queueing are not part of it.",
        "LMCache-SSD of figure 8 is not modelled: the paper states no bandwidth for it.",
        "The rates of figure 8 are higher than the paper's, up to 1.5 on LEval and 0.6 on LooGLE: the model has no kernel \
         launches, and the paper states no mean lengths. Ratios between the systems are comparable.",
        "207 s of GDS in figure 12 are not reached: loading 128K tokens takes 0.2 s at 23.8 GB/s, so the I/O does not \
         explain 51 s more than Tutti. That GDS fails at 512K needs the size of its staging buffers.",
    ]
    .map(str::to_owned)
    .into()
}
