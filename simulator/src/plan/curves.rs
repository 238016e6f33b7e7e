//! Hits of each policy by capacity, from replays of the trace.

use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::{Chains, EvictionKind, EvictionPolicy};

use super::load::Load;
use crate::replay::{Cluster, NodeSettings, replay_opt};
use crate::serving::profiles::GB;

/// Smallest capacity that is replayed, in bytes. The next ones double.
const BYTES_MIN: f64 = 32.0 * GB;

/// Policies of agents with different results: traces have no priorities, so `priority_lru` is `lru`.
pub(super) const POLICIES: [EvictionKind; EvictionKind::ALL.len() - 1] = {
    use EvictionKind::{CostAware, Lfu, Lru, S3Fifo, Semantic};
    [Lru, Lfu, Semantic, S3Fifo, CostAware]
};

/// Replay of a size and a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Hits of a policy with a capacity.
    Policy(EvictionKind, usize),
    /// Hits of Belady's bound with a capacity.
    Bound(usize),
    /// Hits of an unlimited cache.
    Unlimited,
    /// Writes and hits of SSDs behind a capacity of DRAM, with admission at the second use and always.
    SecondUse(usize),
}

/// Result of a replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Hits, of all references.
    pub hit_ratio: f64,
    /// Hits of each request of [`Load::shapes`] in blocks.
    pub hits: Vec<f32>,
    /// Writes and hits of SSDs with admission at the second use, in parts of those with admission of all blocks.
    pub second_use: (f64, f64),
}

/// Hits by policy and capacity.
#[derive(Clone, Debug)]
pub struct Curves {
    /// Capacities of a cluster in blocks, each twice the one before; the last one holds all blocks.
    pub capacities: Vec<u64>,
    /// For each one of [`POLICIES`], results by capacity.
    policies: Vec<Vec<Measured>>,
    /// Hits of Belady's bound by capacity, of all references.
    pub bound: Vec<f64>,
    unlimited: Measured,
    second_use: Vec<(f64, f64)>,
}

impl Curves {
    /// Capacities in blocks that are replayed for a trace.
    pub fn capacities(load: &Load, block_bytes: u64) -> Vec<u64> {
        let first = ((BYTES_MIN / block_bytes as f64) as u64).max(1);
        let mut capacities = vec![first];
        while capacities[capacities.len() - 1] < load.distinct && capacities.len() < 24 {
            capacities.push(capacities[capacities.len() - 1] * 2);
        }
        capacities
    }

    /// All replays of a plan, in a fixed order. They do not depend on each other.
    pub fn points(capacities: &[u64]) -> Vec<Point> {
        let sizes = || 0..capacities.len();
        let policies = POLICIES.into_iter();
        let mut points: Vec<Point> =
            policies.flat_map(|kind| sizes().map(move |size| Point::Policy(kind, size))).collect();
        points.extend(sizes().map(Point::SecondUse));
        points.extend(sizes().map(Point::Bound));
        points.push(Point::Unlimited);
        points
    }

    /// Replays the trace for a point.
    pub fn measure(load: &Load, capacities: &[u64], block_bytes: u64, point: Point) -> Measured {
        let scaled = |blocks: u64| ((blocks as f64 * load.share).round() as u64).max(1);
        let settings = |kind, dram_blocks, nvme_blocks, admission| NodeSettings {
            policy: EvictionPolicy { kind, chains: Chains::DescendantsFirst },
            dram_blocks,
            nvme_blocks,
            admission,
            block_bytes,
            block_tokens: load.block_tokens(),
            tenants: 1,
        };
        let always = AdmissionMode::Always;
        match point {
            Point::Policy(kind, size) => {
                let blocks = scaled(capacities[size]);
                measure_hits(load, settings(kind, blocks, 0, always))
            }
            Point::Unlimited => measure_hits(load, settings(EvictionKind::default(), u64::MAX, 0, always)),
            Point::Bound(size) => {
                let hits = replay_opt(load.trace(), scaled(capacities[size])).hits;
                Measured {
                    hit_ratio: hits as f64 / load.trace().references().max(1) as f64,
                    ..Measured::default()
                }
            }
            Point::SecondUse(size) => {
                let blocks = scaled(capacities[size]);
                let counts = |admission| {
                    let settings = settings(EvictionKind::default(), blocks, u64::from(u32::MAX), admission);
                    Cluster::new(1, settings).replay(load.trace()).counts
                };
                let (all, second) = (counts(always), counts(AdmissionMode::SecondUse));
                let ratio = |part: u64, whole: u64| if whole == 0 { 1.0 } else { part as f64 / whole as f64 };
                let second_use =
                    (ratio(second.nvme_written, all.nvme_written), ratio(second.hits_nvme, all.hits_nvme));
                Measured { second_use, ..Measured::default() }
            }
        }
    }

    /// Collects the results of all points, in their order.
    pub fn collect(capacities: Vec<u64>, results: Vec<Measured>) -> Curves {
        let sizes = capacities.len();
        let mut results = results.into_iter();
        let mut take = |count: usize| results.by_ref().take(count).collect::<Vec<_>>();
        let policies = POLICIES.iter().map(|_| take(sizes)).collect();
        let second_use = take(sizes).into_iter().map(|measured| measured.second_use).collect();
        let bound = take(sizes).into_iter().map(|measured| measured.hit_ratio).collect();
        let unlimited = take(1).pop().unwrap_or_default();
        Curves { capacities, policies, bound, unlimited, second_use }
    }

    /// Replays all points, one after the other.
    pub fn new(load: &Load, block_bytes: u64) -> Curves {
        let capacities = Curves::capacities(load, block_bytes);
        let measure = |point| Curves::measure(load, &capacities, block_bytes, point);
        let results = Curves::points(&capacities).into_iter().map(measure).collect();
        Curves::collect(capacities, results)
    }

    /// Hits of a policy by capacity, of all references.
    pub fn ratios(&self, kind: EvictionKind) -> Vec<f64> {
        self.policies[index(kind)].iter().map(|measured| measured.hit_ratio).collect()
    }

    /// Hits of an unlimited cache, of all references.
    pub fn unlimited_ratio(&self) -> f64 {
        self.unlimited.hit_ratio
    }

    /// Hits of a policy with a capacity in blocks, of all references; `None` is unlimited.
    pub fn ratio(&self, kind: EvictionKind, blocks: Option<f64>) -> f64 {
        self.between(kind, blocks).map_or(self.unlimited.hit_ratio, |(low, high, part)| {
            let at = |measured: Option<&Measured>| measured.map_or(0.0, |measured| measured.hit_ratio);
            at(low) + (at(high) - at(low)) * part
        })
    }

    /// Hits of each request of [`Load::shapes`] in blocks, appended to a list.
    pub fn hits(&self, kind: EvictionKind, blocks: Option<f64>, hits: &mut Vec<f32>) {
        hits.clear();
        let Some((low, high, part)) = self.between(kind, blocks) else {
            hits.extend(&self.unlimited.hits);
            return;
        };
        let of = |measured: Option<&Measured>, at: usize| measured.map_or(0.0, |measured| measured.hits[at]);
        let requests = self.unlimited.hits.len();
        hits.extend((0..requests).map(|at| of(low, at) + (of(high, at) - of(low, at)) * part as f32));
    }

    /// Writes and hits of SSDs with admission at the second use, in parts of those with admission of all blocks.
    pub fn second_use(&self, dram_blocks: f64) -> (f64, f64) {
        let size = self.capacities.iter().rposition(|blocks| *blocks as f64 <= dram_blocks).unwrap_or(0);
        self.second_use[size]
    }

    /// Results around a capacity, and the place between both, linear in the logarithm. Below the first one, hits are
    /// proportional to the capacity.
    fn between(
        &self,
        kind: EvictionKind,
        blocks: Option<f64>,
    ) -> Option<(Option<&Measured>, Option<&Measured>, f64)> {
        let (blocks, results) = (blocks?, &self.policies[index(kind)]);
        let first = self.capacities[0] as f64;
        if blocks < first {
            return Some((None, results.first(), (blocks / first).max(0.0)));
        }
        let place = (blocks / first).log2();
        let below = place.floor() as usize;
        let last = results.len() - 1;
        if below >= last {
            return Some((results.last(), results.last(), 0.0));
        }
        Some((results.get(below), results.get(below + 1), place.fract()))
    }
}

/// Place of a policy in [`POLICIES`]; that of `lru` for `priority_lru`.
fn index(kind: EvictionKind) -> usize {
    POLICIES.iter().position(|other| *other == kind).unwrap_or(0)
}

fn measure_hits(load: &Load, settings: NodeSettings) -> Measured {
    let (mut all, mut hits, mut number) = (0_u64, Vec::with_capacity(load.shapes.len()), 0);
    Cluster::new(1, settings).replay_each(load.trace(), |blocks| {
        all += blocks as u64;
        if usize::is_multiple_of(number, load.stride) {
            hits.push(blocks as f32);
        }
        number += 1;
    });
    let hit_ratio = all as f64 / load.trace().references().max(1) as f64;
    Measured { hit_ratio, hits, ..Measured::default() }
}
