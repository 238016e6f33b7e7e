//! Workloads that run in the timed world and in a real engine, and the figures that are compared.
//!
//! | workload | prompts | outputs | cached |
//! |---|---|---|---|
//! | `chat` | about 100 tokens | about 24 | nothing |
//! | `long` | 512 to 1,536 | 4 | nothing |
//! | `reuse` | 736 | 16 | 640, in the DRAM of the agent |
//!
//! Each runs twice. Requests arrive with a Poisson process at [`LOAD`] of the rate that the simulator serves at most:
//! that gives the times to first token. Then all arrive at once: that gives the throughput. The requests depend on a
//! seed only, and the rate on the profile; both are equal in simulator and engine.

use reprise_policy::eviction::{Chains, EvictionKind, EvictionPolicy};

use super::engine::{Admission, Engine, Preemption, Setup, Transfers};
use super::events::{Nanos, nanos, seconds};
use super::profiles::NodeProfile;
use super::random::Random;
use super::statistics::quantile;
use super::workload::{CacheSource, Request};

/// Rate of arrivals, relative to the rate that the simulator serves at most.
pub const LOAD: f64 = 0.4;

/// Blocks of DRAM in the simulation, more than all requests have.
const DRAM_BLOCKS: u64 = 1 << 20;

/// Settings of the engine that both worlds share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSettings {
    /// Tokens of a block.
    pub tokens_per_block: u32,
    /// Blocks of the engine's own KV cache.
    pub blocks: u64,
    /// Largest number of requests in a step.
    pub batch_max: u32,
    /// Largest number of tokens in a step.
    pub step_tokens_max: u32,
}

/// A request of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Submission {
    /// Seconds of its arrival.
    pub at: f64,
    /// Leading tokens that the agent has in DRAM; each request has its own.
    pub cached: u32,
    /// Further tokens of the prompt.
    pub own: u32,
    /// Tokens that it generates.
    pub output: u32,
}

/// Requests with gaps of one second on average.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Name in tables.
    pub name: &'static str,
    /// Requests in the order of their arrivals.
    pub requests: Vec<Submission>,
}

/// Times of a served request in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// Time from its arrival to its first token.
    pub ttft: f64,
    /// Time from the start of the run to its last token.
    pub end: f64,
}

/// The three workloads of a seed.
pub fn workloads(seed: u64) -> Vec<Workload> {
    let mut random = Random::new(seed);
    let chat = workload("chat", 48, &mut random, |random| Submission {
        at: 0.0,
        cached: 0,
        own: between(random.log_normal(96.0, 0.5), 16, 384),
        output: between(random.log_normal(24.0, 0.5), 4, 64),
    });
    let long = workload("long", 12, &mut random, |random| Submission {
        at: 0.0,
        cached: 0,
        own: 512 + random.below(1_025) as u32,
        output: 4,
    });
    let reuse =
        workload("reuse", 32, &mut random, |_| Submission { at: 0.0, cached: 640, own: 96, output: 16 });
    vec![chat, long, reuse]
}

fn workload(
    name: &'static str,
    count: usize,
    random: &mut Random,
    mut draw: impl FnMut(&mut Random) -> Submission,
) -> Workload {
    let mut at = 0.0;
    let mut next = || {
        at += random.exponential(1.0);
        Submission { at, ..draw(random) }
    };
    Workload { name, requests: (0..count).map(|_| next()).collect() }
}

fn between(value: f64, least: u32, most: u32) -> u32 {
    (value.round() as u32).clamp(least, most)
}

impl Workload {
    /// Requests with a mean rate in requests per second.
    pub fn paced(&self, rate: f64) -> Vec<Submission> {
        self.requests.iter().map(|request| Submission { at: request.at / rate, ..*request }).collect()
    }

    /// Requests that all arrive at once.
    pub fn at_once(&self) -> Vec<Submission> {
        self.requests.iter().map(|request| Submission { at: 0.0, ..*request }).collect()
    }

    /// Rate of arrivals, in requests per second, for a node.
    pub fn rate(&self, node: &NodeProfile, settings: EngineSettings) -> f64 {
        let served = simulate(node, settings, &self.at_once());
        let end = served.iter().map(|served| served.end).fold(0.0, f64::max);
        LOAD * served.len() as f64 / end.max(1e-9)
    }
}

/// Serves requests in the timed world, in their order.
pub fn simulate(node: &NodeProfile, settings: EngineSettings, requests: &[Submission]) -> Vec<Served> {
    let setup = Setup {
        hardware: node.hardware.clone(),
        model: node.model.clone(),
        accelerators: 1,
        tokens_per_block: settings.tokens_per_block,
        capacity: [settings.blocks, DRAM_BLOCKS, 0],
        admitted_blocks_max: settings.blocks,
        batch_max: settings.batch_max as usize,
        step_tokens_max: settings.step_tokens_max,
        turn: None,
        eviction: EvictionPolicy { kind: EvictionKind::Lru, chains: Chains::Ignored },
        lookahead: None,
        transfers: Transfers::Timed,
        preemption: Preemption::Recompute,
        load_policy: None,
        noise: 0.0,
        seed: 0,
    };
    let arrivals: Vec<Request> = requests
        .iter()
        .map(|request| Request {
            arrival: Nanos(nanos(request.at)),
            prompt: request.cached + request.own,
            output: request.output,
            cached: request.cached,
            source: CacheSource::Dram,
        })
        .collect();
    let engine = Engine::new(setup, &arrivals).admitting(Admission::BetweenSteps);
    let mut outcomes = engine.run(u64::MAX, 0).outcomes;
    outcomes.sort_by_key(|outcome| outcome.number);
    outcomes
        .iter()
        .map(|outcome| Served { ttft: seconds(outcome.ttft), end: seconds(outcome.end.0) })
        .collect()
}

/// Milliseconds to first token at a quantile between 0 and 1.
pub fn ttft_ms(served: &[Served], share: f64) -> f64 {
    let times: Vec<f64> = served.iter().map(|served| served.ttft * 1e3).collect();
    quantile(&times, share)
}

/// Generated tokens per second from the first arrival to the last token.
pub fn tokens_per_second(requests: &[Submission], served: &[Served]) -> f64 {
    let tokens: u32 = requests.iter().map(|request| request.output).sum();
    let begin = requests.iter().map(|request| request.at).fold(f64::INFINITY, f64::min);
    let end = served.iter().map(|served| served.end).fold(0.0, f64::max);
    f64::from(tokens) / (end - begin).max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::super::profiles::{Hardware, Model};
    use super::*;

    const SETTINGS: EngineSettings =
        EngineSettings { tokens_per_block: 128, blocks: 700, batch_max: 16, step_tokens_max: 512 };

    fn node() -> NodeProfile {
        let mut hardware = Hardware::named("cpu").expect("valid");
        (hardware.overlap, hardware.step_overhead_nanos) = (0.0, 5_000_000);
        NodeProfile { hardware, model: Model::named("deepseek-v2-lite").expect("valid") }
    }

    #[test]
    fn equal_seeds_give_equal_workloads_and_mean_gaps_are_a_second() {
        assert_eq!(workloads(7), workloads(7));
        assert_ne!(workloads(7), workloads(8));
        let chat = &workloads(7)[0];
        let last = chat.requests.last().expect("requests").at;
        assert!((last / chat.requests.len() as f64 - 1.0).abs() < 0.5, "{last}");
        assert_eq!(chat.paced(2.0)[3].at, chat.requests[3].at / 2.0);
    }

    #[test]
    fn every_request_is_served_and_cached_tokens_shorten_the_first_token() {
        for workload in workloads(1) {
            let requests = workload.paced(workload.rate(&node(), SETTINGS));
            let served = simulate(&node(), SETTINGS, &requests);
            assert_eq!(served.len(), requests.len());
            assert!(served.iter().all(|served| served.ttft > 0.0 && served.end > served.ttft));
            let computed: Vec<Submission> = requests
                .iter()
                .map(|request| Submission { cached: 0, own: request.cached + request.own, ..*request })
                .collect();
            let computed = simulate(&node(), SETTINGS, &computed);
            let is_shorter = ttft_ms(&served, 0.5) < 0.7 * ttft_ms(&computed, 0.5);
            assert_eq!(is_shorter, workload.name == "reuse", "{}", workload.name);
        }
    }

    #[test]
    fn load_of_a_cached_prefix_begins_after_the_step_in_which_its_request_arrives() {
        let mut node = node();
        node.hardware.link.latency_nanos = 1_000_000;
        let request = |at, cached| Submission { at, cached, own: 128 * 3, output: 40 };
        let served = simulate(&node, SETTINGS, &[request(0.0, 0), request(0.001, 128)]);
        let alone = simulate(&node, SETTINGS, &[request(0.0, 128)])[0].ttft;
        // It waits for the rest of the first step, its load, and the step that has begun meanwhile.
        assert!(served[1].ttft > served[0].ttft - 0.001 + alone, "{served:?} {alone}");
    }

    #[test]
    fn throughput_counts_from_the_first_arrival() {
        let requests = [4.0, 6.0].map(|at| Submission { at, cached: 0, own: 1, output: 5 });
        let served = [Served { ttft: 1.0, end: 6.0 }, Served { ttft: 3.0, end: 9.0 }];
        assert_eq!(tokens_per_second(&requests, &served), 2.0);
        assert_eq!([ttft_ms(&served, 0.5), ttft_ms(&served, 1.0)], [2_000.0, 3_000.0]);
    }
}
