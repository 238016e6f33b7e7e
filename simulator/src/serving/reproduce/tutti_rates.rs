//! Figure 8 of Tutti: TTFT and ITL over the rate of requests, in the timed world.
//!
//! Each system has the hits of its tier, request by request, and its way to load them: HBM needs no load, DRAM and Tutti
//! load layer by layer, and a step with GDS waits for its loads. All else is equal.

use reprise_policy::eviction::{EvictionKind, EvictionPolicy};

use super::super::engine::{Engine, Preemption, PrefixLoading, Results, Setup, Transfers};
use super::super::events::{Nanos, nanos};
use super::super::random::Random;
use super::super::statistics::mean;
use super::super::workload::{CacheSource, Request};
use super::Figure;
use super::tutti::{DRAM_BYTES, GDS_BYTES_PER_SECOND, SSD_BYTES, TUTTI_BYTES_PER_SECOND, World};
use super::tutti_datasets::{CHUNK, Dataset, Order, replay};

/// Requests of a run, and the seed of their arrivals.
const REQUESTS: usize = 1_500;
const SEED: u64 = 42;

/// Tokens of an answer, and of a question behind its document.
const ANSWER: u32 = 64;
const QUESTION: u32 = 64;

/// Largest batch and tokens of a step: defaults of vLLM's server on an H100.
const BATCH_MAX: usize = 256;
const STEP_TOKENS_MAX: u32 = 8_192;

/// TTFT of the SLO in milliseconds, as the mean of all requests.
const SLO_MS: f64 = 1_000.0;

/// Rates between which the SLO breaks, and halvings of their logarithm: to within 1 %.
const RATES: (f64, f64) = (0.05, 50.0);
const HALVINGS: u32 = 10;

/// Loads at which figures are compared: parts of the rate at which Tutti breaks the SLO.
const LOADS: [f64; 3] = [0.25, 0.5, 1.0];

/// System of figure 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum System {
    Hbm,
    Dram,
    Gds,
    Tutti,
}

impl System {
    const ALL: [System; 4] = [System::Hbm, System::Dram, System::Gds, System::Tutti];

    fn name(self) -> &'static str {
        match self {
            System::Hbm => "HBM",
            System::Dram => "DRAM",
            System::Gds => "GDS",
            System::Tutti => "Tutti",
        }
    }

    fn loading(self) -> (CacheSource, PrefixLoading) {
        match self {
            System::Hbm => (CacheSource::Hbm, PrefixLoading::Ahead),
            System::Dram => (CacheSource::Dram, PrefixLoading::LayerWise),
            System::Gds => (CacheSource::Nvme, PrefixLoading::Blocking),
            System::Tutti => (CacheSource::Nvme, PrefixLoading::LayerWise),
        }
    }
}

/// Mean TTFT and ITL of a run in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Latency {
    ttft: f64,
    itl: f64,
}

/// A system that serves a dataset.
struct Run<'a> {
    world: &'a World,
    system: System,
    /// Prompt and cached tokens of each request.
    prompts: Vec<(u32, u32)>,
    events: u64,
}

/// Figures of a dataset.
pub(super) fn figures(world: &World, dataset: &Dataset, events: &mut u64) -> Vec<Figure> {
    let mut runs = System::ALL.map(|system| Run::new(world, dataset, system));
    let slo = runs.each_mut().map(Run::slo_rate);
    let mut figures = slo_rates(dataset.name, slo);
    for load in LOADS {
        let rate = slo[System::Tutti as usize].unwrap_or(RATES.0) * load;
        let latencies = runs.each_mut().map(|run| run.latency(rate));
        figures.extend(at_load(dataset.name, load, &latencies));
    }
    for rate in if dataset.name == "LEval" { &[1.5][..] } else { &[0.5, 0.6] } {
        let latencies = runs.each_mut().map(|run| run.latency(*rate));
        figures.extend(at_rate(dataset.name, *rate, &latencies));
    }
    *events += runs.iter().map(|run| run.events).sum::<u64>();
    figures
}

/// Rates at which the mean TTFT exceeds the SLO, zero if it does so at any rate; and Tutti's over the others.
fn slo_rates(dataset: &str, slo: [Option<f64>; 4]) -> Vec<Figure> {
    let mut figures: Vec<Figure> = System::ALL
        .into_iter()
        .zip(slo)
        .map(|(system, rate)| {
            let quantity = format!("{dataset}: rate at which the mean TTFT exceeds 1 s, {}", system.name());
            Figure::unpublished("figure 8", quantity, "requests/s", rate.unwrap_or(0.0))
        })
        .collect();
    for (other, published) in [(System::Dram, 1.5), (System::Gds, 2.0)] {
        let rates = slo[System::Tutti as usize].zip(slo[other as usize]);
        let Some(ratio) = rates.map(|(tutti, other)| tutti / other) else { continue };
        let quantity = format!("{dataset}: rate under the SLO, Tutti over {}", other.name());
        figures.push(match dataset {
            "LEval" => Figure::new("section 4.1", quantity, "x", (published, ratio)),
            _ => Figure::unpublished("figure 8", quantity, "x", ratio),
        });
    }
    figures
}

/// Latencies at a part of Tutti's rate under the SLO. The paper's reductions "at high load" are those at this rate.
fn at_load(dataset: &str, load: f64, latencies: &[Latency; 4]) -> Vec<Figure> {
    let at = format!("{:.0} % of Tutti's rate under the SLO", load * 100.0);
    let mut figures = Vec::new();
    for (system, latency) in System::ALL.into_iter().zip(latencies) {
        for (name, value) in [("TTFT", latency.ttft), ("ITL", latency.itl)] {
            let quantity = format!("{dataset}: mean {name}, {}, {at}", system.name());
            figures.push(Figure::unpublished("figure 8", quantity, "ms", value));
        }
    }
    let published = if dataset == "LEval" { [69.1, 78.3] } else { [93.2, 62.0] };
    for (other, published) in [System::Dram, System::Gds].into_iter().zip(published) {
        if load == 1.0 {
            let quantity = format!("{dataset}: TTFT reduction against {}, {at}", other.name());
            let ours = reduction(latencies, other, |latency| latency.ttft);
            figures.push(Figure::new("section 4.1", quantity, "%", (published, ours)));
        }
    }
    figures
}

/// Reductions at a rate that the paper names.
fn at_rate(dataset: &str, rate: f64, latencies: &[Latency; 4]) -> Vec<Figure> {
    let published: &[(&str, System, f64)] = match (dataset, rate) {
        ("LEval", _) => &[("ITL", System::Dram, 22.0), ("ITL", System::Gds, 24.4)],
        (_, 0.5) => &[("ITL", System::Gds, 18.3)],
        _ => &[("ITL", System::Gds, 10.2), ("TTFT", System::Gds, 62.0), ("TTFT", System::Dram, 93.2)],
    };
    let figure = |(name, other, published): &(&str, System, f64)| {
        let quantity = format!("{dataset}: {name} reduction against {} at {rate} requests/s", other.name());
        let of = |latency: &Latency| if *name == "ITL" { latency.itl } else { latency.ttft };
        Figure::new("section 4.1", quantity, "%", (*published, reduction(latencies, *other, of)))
    };
    published.iter().map(figure).collect()
}

/// Percent by which Tutti is below another system.
fn reduction(latencies: &[Latency; 4], other: System, of: impl Fn(&Latency) -> f64) -> f64 {
    (1.0 - of(&latencies[System::Tutti as usize]) / of(&latencies[other as usize])) * 100.0
}

impl<'a> Run<'a> {
    fn new(world: &'a World, dataset: &Dataset, system: System) -> Run<'a> {
        let bytes = match system {
            System::Hbm => world.hbm_bytes(),
            System::Dram => DRAM_BYTES,
            System::Gds | System::Tutti => SSD_BYTES,
        };
        let requests = dataset.requests(Order::Shuffled);
        let hits = replay(&requests, bytes / world.chunk_bytes());
        // The first quarter fills the tiers.
        let measured = requests.iter().zip(hits).skip(requests.len() / 4).take(REQUESTS);
        let prompts = measured.map(|((_, chunks), hits)| (chunks * CHUNK + QUESTION, hits * CHUNK)).collect();
        Run { world, system, prompts, events: 0 }
    }

    fn latency(&mut self, rate: f64) -> Latency {
        let results = self.serve(rate);
        self.events += results.events;
        Latency { ttft: mean(&results.ttft_ms()), itl: mean(&results.tpot_ms()) }
    }

    fn serve(&self, rate: f64) -> Results {
        let mut hardware = self.world.hardware.clone();
        hardware.nvme_read.bytes_per_second = match self.system {
            System::Gds => GDS_BYTES_PER_SECOND as u64,
            _ => TUTTI_BYTES_PER_SECOND as u64,
        };
        let (source, loading) = self.system.loading();
        let blocks = Setup::hbm_blocks(&hardware, &self.world.model, 1, CHUNK);
        let setup = Setup {
            hardware,
            model: self.world.model.clone(),
            accelerators: 1,
            tokens_per_block: CHUNK,
            capacity: [blocks, 0, 0],
            admitted_blocks_max: blocks,
            batch_max: BATCH_MAX,
            step_tokens_max: STEP_TOKENS_MAX,
            turn: None,
            eviction: EvictionPolicy::from(EvictionKind::Lru),
            lookahead: None,
            transfers: Transfers::Timed,
            preemption: Preemption::Recompute,
            load_policy: None,
            noise: 0.0,
            seed: SEED,
        };
        let (mut random, mut at) = (Random::new(SEED), 0.0);
        let requests: Vec<Request> = self
            .prompts
            .iter()
            .map(|(prompt, cached)| {
                at += random.exponential(1.0 / rate);
                let arrival = Nanos(nanos(at));
                Request { arrival, prompt: *prompt, output: ANSWER, cached: *cached, source }
            })
            .collect();
        Engine::new(setup, &requests).with_prefix_loading(loading).run(u64::MAX, 0)
    }

    /// Rate at which the mean TTFT exceeds the SLO; `None` if it does so without queues.
    fn slo_rate(&mut self) -> Option<f64> {
        let (mut low, mut high) = RATES;
        if self.latency(low).ttft > SLO_MS {
            return None;
        }
        for _ in 0..HALVINGS {
            let middle = (low * high).sqrt();
            if self.latency(middle).ttft > SLO_MS { high = middle } else { low = middle }
        }
        Some(low)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::costs::Costs;
    use super::super::super::profiles::{Hardware, Model};
    use super::super::tutti_datasets::DATASETS;
    use super::*;

    #[test]
    fn layer_wise_loads_from_an_ssd_beat_blocking_ones_and_a_cache_in_hbm() {
        let hardware = Hardware::named("h100+ps1010x2").expect("valid");
        let model = Model::named("llama-3-8b").expect("valid");
        let world = World { costs: Costs::new(&hardware, &model, 1), hardware, model };
        let latencies = System::ALL.map(|system| {
            let mut run = Run::new(&world, &DATASETS[0], system);
            run.prompts.truncate(100);
            let (first, again) = (run.latency(1.0), run.latency(1.0));
            assert_eq!((first.ttft, first.itl), (again.ttft, again.itl), "equal runs");
            first
        });
        let [hbm, _, gds, tutti] = latencies;
        assert!(tutti.ttft < gds.ttft && gds.ttft < hbm.ttft, "{latencies:?}");
        assert!(tutti.itl < gds.itl, "{latencies:?}");
    }
}
