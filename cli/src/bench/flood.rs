//! Losses of a tenant while another one floods the cache: hits and load times, alone and during the flood.
//!
//! ```text
//! node 1:  tenant B loads prefixes of its working set ◀── NVMe of node 1, and of node 2 through the peer connection
//! nodes 1, 2:  sessions of tenant A save new blocks and load its last ones, as fast as they can, from DRAM and NVMe
//! ```
//!
//! B's working set is within its quotas and larger than its DRAM. A saves ten times its quotas in each round, and loads
//! blocks of its last saves, which are more than its DRAM: its reads and writes of NVMe compete with B's reads. In shares
//! of bandwidth ([ADR 20]), B has the weight 16 and A the weight 1: equal ones would give each half of a device, which
//! doubles the times of loads that need all of it. So the figures are those of a tenant with a large weight.
//!
//! The processes of both tenants also share the processors. So a third leg runs the flood on the agents of another
//! cluster: the same work on the same machine, without a shared agent. The difference between the two legs is what the
//! shared agents add.
//!
//! [ADR 20]: ../../../docs/adr/0020-fair-shares.md

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use reprise_client::{Client, LoadRequest, Scope, Source};
use reprise_policy::{BlockKey, ByteSize, Layout, TenantName};
use reprise_testkit::bench::fixture::{self, PATIENCE, connect_as, keys, payload};
use reprise_testkit::bench::report::{Figure, Paired, Target, median};
use reprise_testkit::bench::{Settings, llama_3_8b};
use reprise_testkit::cluster::{AgentSizes, Cluster, ControlPlanes};

/// Sizes of each of four agents: two clusters of two nodes.
pub(super) const AGENTS: u64 = 4;
pub(super) const ARENA_MIB: u64 = 384;
pub(super) const POOL_MIB: u64 = 1536;

/// Settings of all agents: quotas and weights of both tenants, and regions small enough for both.
const AGENT_SETTINGS: &str = r#"
arena.region_bytes = "64MiB"
[[tenants]]
name = "team-a"
dram = { limit = "128MiB" }
nvme = { limit = "256MiB" }
[[tenants]]
name = "team-b"
dram = { reserved = "128MiB", limit = "128MiB" }
nvme = { limit = "768MiB" }
bandwidth = { weight = 16 }
"#;

/// NVMe quota of A on each node.
const FLOOD_QUOTA: u64 = 256 << 20;

/// A's quotas that it saves on each node in a leg.
const FLOOD_QUOTAS: u64 = 10;

/// Blocks of a prefix: 32 MiB.
const PREFIX_BLOCKS: usize = 16;

/// Prefixes of B on each node: 384 MiB.
const PREFIXES: usize = 12;

/// Least number of loads in a leg; loads continue until the flood has saved its bytes.
const LOADS: usize = 100;

/// Time between the loads of B, for its computation.
const PAUSE: Duration = Duration::from_millis(5);

/// Sessions of A that save, and that load, on each node.
const FLOOD_SESSIONS: usize = 2;

/// Blocks of each save or load of A: 16 MiB.
const FLOOD_BLOCKS: usize = 8;

/// Saves of both nodes that A still loads: 192 MiB on each node, more than its DRAM (128 MiB) and within its NVMe quota.
const FLOOD_KEPT: usize = 24;

/// Load of the machine while B replays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leg {
    Alone,
    /// The flood, on B's agents.
    SameAgents,
    /// The flood, on other agents.
    OtherAgents,
}

/// Loads of B in a leg.
#[derive(Clone, Debug, Default)]
struct Loads {
    /// Blocks that were asked for, and that arrived.
    blocks: u64,
    hits: u64,
    from_nvme: u64,
    from_peer: u64,
    milliseconds: Vec<f64>,
    seconds: f64,
    /// What the flood did meanwhile.
    flood: FloodCounts,
}

/// Bytes that the flood saved and loaded, and the part of the loads that came from NVMe of this node or the peer.
#[derive(Clone, Copy, Debug, Default)]
struct FloodCounts {
    saved: u64,
    loaded: u64,
    from_nvme: u64,
}

/// One flood: sessions on two nodes.
struct Flood<'a> {
    sockets: &'a [PathBuf],
    is_over: AtomicBool,
    seed: &'a AtomicU64,
    saved: AtomicU64,
    loaded: AtomicU64,
    from_nvme: AtomicU64,
    /// Keys of the last saves.
    last: Mutex<VecDeque<Vec<BlockKey>>>,
}

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = llama_3_8b();
    let [ours, others] = ["measured", "next-to-it"].map(|name| start(&settings.directory.join(name)));
    let (ours, others) = (ours?, others?);
    let b = tenant("team-b");
    let sockets = sockets(&ours);
    let [reader, peer] = [0, 1].map(|node| connect_as(&sockets[node], &layout, &b));
    let (reader, peer) = (reader?, peer?);
    let mut prefixes = Vec::new();
    for seed in 0..PREFIXES as u64 {
        for (client, seed) in [(&reader, seed), (&peer, 1000 + seed)] {
            let prefix = keys(1 + seed, PREFIX_BLOCKS);
            fixture::save_durable(client, &prefix, PREFIX_BLOCKS, &payload(&layout))?;
            prefixes.push(prefix);
        }
    }
    await_announced(&reader, &prefixes)?;
    let seed = AtomicU64::new(1 << 20);
    let measure = |leg| match leg {
        Leg::Alone => replay(&reader, &prefixes, || false),
        Leg::SameAgents => during_flood(&sockets, &seed, &layout, |more| replay(&reader, &prefixes, more)),
        Leg::OtherAgents => {
            during_flood(&self::sockets(&others), &seed, &layout, |more| replay(&reader, &prefixes, more))
        }
    };
    let legs = [Leg::Alone, Leg::SameAgents, Leg::OtherAgents];
    for leg in legs {
        measure(leg)?;
    }
    let mut rounds = Vec::new();
    for _ in settings.rounds("flood") {
        rounds.push([measure(legs[0])?, measure(legs[1])?, measure(legs[2])?]);
    }
    figures(&rounds)
}

/// Waits until the directory has all blocks.
fn await_announced(reader: &Client, prefixes: &[Vec<BlockKey>]) -> anyhow::Result<()> {
    let give_up = Instant::now() + PATIENCE;
    for prefix in prefixes {
        while reader.match_keys(prefix, Scope::Cluster).context("match")?.len() < prefix.len() {
            ensure!(
                Instant::now() < give_up,
                "the directory has not received all blocks within {PATIENCE:?}"
            );
            thread::sleep(PAUSE);
        }
    }
    Ok(())
}

/// Starts a cluster of two agents in a folder.
fn start(folder: &Path) -> anyhow::Result<Cluster> {
    std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let mut cluster = Cluster::start_controlplane(folder, ControlPlanes::Embedded)?;
    cluster.configure_agents(AGENT_SETTINGS);
    let moves = Some(ByteSize(0));
    let sizes = AgentSizes { arena: ByteSize(ARENA_MIB << 20), pool: ByteSize(POOL_MIB << 20), moves };
    cluster.start_agents(2, sizes)?;
    Ok(cluster)
}

fn sockets(cluster: &Cluster) -> Vec<PathBuf> {
    cluster.file().agents.into_iter().map(|agent| agent.socket).collect()
}

fn tenant(name: &str) -> TenantName {
    name.parse().expect("a valid name")
}

/// Loads the prefixes in turn, until there are enough loads and `more` is false.
fn replay(client: &Client, prefixes: &[Vec<BlockKey>], more: impl Fn() -> bool) -> anyhow::Result<Loads> {
    let mut loads = Loads::default();
    let began = Instant::now();
    for prefix in prefixes.iter().cycle() {
        if loads.milliseconds.len() >= LOADS && !more() {
            break;
        }
        let request = LoadRequest { deadline: PATIENCE, ..LoadRequest::new(prefix.clone()) };
        let started = Instant::now();
        let load = client.load(&request).context("a load")?;
        load.wait_layer(client.layout().layers() - 1, PATIENCE).context("the last layer")?;
        loads.milliseconds.push(started.elapsed().as_secs_f64() * 1e3);
        loads.blocks += prefix.len() as u64;
        loads.hits += load.leading_blocks() as u64;
        for block in load.blocks() {
            match block.source() {
                Some(Source::OwnNvme) => loads.from_nvme += 1,
                Some(Source::PeerDram | Source::PeerNvme) => loads.from_peer += 1,
                _ => {}
            }
        }
        drop(load);
        thread::sleep(PAUSE);
    }
    loads.seconds = began.elapsed().as_secs_f64();
    Ok(loads)
}

/// Measures during a flood, which has filled its quotas before.
fn during_flood(
    sockets: &[PathBuf],
    seed: &AtomicU64,
    layout: &Layout,
    measure: impl FnOnce(&dyn Fn() -> bool) -> anyhow::Result<Loads>,
) -> anyhow::Result<Loads> {
    let flood = Flood {
        sockets,
        is_over: AtomicBool::new(false),
        seed,
        saved: AtomicU64::new(0),
        loaded: AtomicU64::new(0),
        from_nvme: AtomicU64::new(0),
        last: Mutex::default(),
    };
    let total = sockets.len() as u64 * FLOOD_QUOTA;
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for socket in flood.sockets {
            for _ in 0..FLOOD_SESSIONS {
                threads.push(scope.spawn(|| flood.save(socket, layout)));
                threads.push(scope.spawn(|| flood.load(socket, layout)));
            }
        }
        let result = flood.measure(total, measure, || threads.iter().any(|thread| thread.is_finished()));
        flood.is_over.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a session of the flood panicked"))?.context("the flood")?;
        }
        result
    })
}

impl Flood<'_> {
    fn measure(
        &self,
        quota: u64,
        measure: impl FnOnce(&dyn Fn() -> bool) -> anyhow::Result<Loads>,
        has_failed: impl Fn() -> bool,
    ) -> anyhow::Result<Loads> {
        while self.saved.load(Ordering::Relaxed) < quota && !has_failed() {
            thread::sleep(PAUSE);
        }
        let before = self.counts();
        let more = || self.counts().saved - before.saved < FLOOD_QUOTAS * quota && !has_failed();
        let loads = measure(&more)?;
        let after = self.counts();
        let flood = FloodCounts {
            saved: after.saved - before.saved,
            loaded: after.loaded - before.loaded,
            from_nvme: after.from_nvme - before.from_nvme,
        };
        Ok(Loads { flood, ..loads })
    }

    fn counts(&self) -> FloodCounts {
        let [saved, loaded, from_nvme] =
            [&self.saved, &self.loaded, &self.from_nvme].map(|bytes| bytes.load(Ordering::Relaxed));
        FloodCounts { saved, loaded, from_nvme }
    }

    fn last(&self) -> std::sync::MutexGuard<'_, VecDeque<Vec<BlockKey>>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Saves new blocks until the flood is over.
    fn save(&self, socket: &Path, layout: &Layout) -> anyhow::Result<()> {
        let client = connect_as(socket, layout, &tenant("team-a"))?;
        let payload = payload(layout);
        while !self.is_over.load(Ordering::Relaxed) {
            let keys = keys(self.seed.fetch_add(1, Ordering::Relaxed), FLOOD_BLOCKS);
            fixture::commit(&client, fixture::fill(&client, &keys, &payload)?)?;
            self.saved.fetch_add(FLOOD_BLOCKS as u64 * layout.block_bytes(), Ordering::Relaxed);
            let mut last = self.last();
            last.push_back(keys);
            if last.len() > FLOOD_KEPT {
                last.pop_front();
            }
        }
        Ok(())
    }

    /// Loads the last blocks until the flood is over, as far as they are still there.
    fn load(&self, socket: &Path, layout: &Layout) -> anyhow::Result<()> {
        let client = connect_as(socket, layout, &tenant("team-a"))?;
        for turn in 0.. {
            if self.is_over.load(Ordering::Relaxed) {
                break;
            }
            let chosen = {
                let last = self.last();
                last.get(turn % FLOOD_KEPT).cloned()
            };
            let Some(keys) = chosen else {
                thread::sleep(PAUSE);
                continue;
            };
            let request = LoadRequest { deadline: PATIENCE, ..LoadRequest::new(keys) };
            let load = client.load(&request).context("a load")?;
            load.wait_layer(layout.layers() - 1, PATIENCE).context("the last layer")?;
            self.loaded.fetch_add(load.leading_blocks() as u64 * layout.block_bytes(), Ordering::Relaxed);
            let of_nvme = |source: Option<Source>| matches!(source, Some(Source::OwnNvme | Source::PeerNvme));
            let from_nvme = load.blocks().iter().filter(|block| of_nvme(block.source())).count();
            self.from_nvme.fetch_add(from_nvme as u64 * layout.block_bytes(), Ordering::Relaxed);
        }
        Ok(())
    }
}

fn figures(rounds: &[[Loads; 3]]) -> anyhow::Result<Vec<Figure>> {
    for loads in rounds.iter().flatten() {
        ensure!(loads.from_nvme > 0 && loads.from_peer > 0, "B loads from NVMe and from a peer: {loads:?}");
    }
    for [_, floods @ ..] in rounds {
        let is_competing = floods.iter().all(|loads| loads.flood.from_nvme > 0);
        ensure!(is_competing, "no load of A came from NVMe: its reads did not compete with B's: {floods:?}");
    }
    let of = |leg: usize, value: &dyn Fn(&Loads) -> f64| -> Vec<f64> {
        rounds.iter().map(|round| value(&round[leg])).collect()
    };
    let compare = |value: &dyn Fn(&Loads) -> f64, reference: usize, subject: usize| {
        let (references, subjects) = (of(reference, value), of(subject, value));
        let ratios = references.iter().zip(&subjects).map(|(reference, subject)| subject / reference);
        Paired {
            ratio: median(ratios.collect()),
            reference: median(references.clone()),
            subject: median(subjects.clone()),
        }
    };
    let (alone, same, other) = (0, 1, 2);
    let lost = rounds.iter().map(|round| hit_rate(&round[alone]) - hit_rate(&round[same])).collect();
    let p99 = |loads: &Loads| percentile(&loads.milliseconds, 99);
    let p50 = |loads: &Loads| percentile(&loads.milliseconds, 50);
    let (by_alone, by_other) = ("alone", "during the same flood on other agents");
    let absolute = |name: &str, leg: usize, unit, value: &dyn Fn(&Loads) -> f64| {
        Figure::absolute(name, median(of(leg, value)), unit, Target::None)
    };
    let nvme_part = |loads: &Loads| 100.0 * loads.flood.from_nvme as f64 / loads.flood.loaded.max(1) as f64;
    let gigabytes = |bytes: u64, loads: &Loads| bytes as f64 / loads.seconds / 1e9;
    Ok(vec![
        absolute("flood.hit_rate", same, "%", &hit_rate),
        Figure::absolute("flood.lost_hits", median(lost), "points", Target::AtMost(1.0)),
        Figure::relative(
            "flood.load_p99",
            compare(&p99, alone, same),
            "ms",
            (by_alone, Target::RatioAtMost(1.2)),
        ),
        Figure::relative(
            "flood.load_p99_other_agents",
            compare(&p99, alone, other),
            "ms",
            (by_alone, Target::None),
        ),
        Figure::relative(
            "flood.load_p99_shared",
            compare(&p99, other, same),
            "ms",
            (by_other, Target::RatioAtMost(1.2)),
        ),
        Figure::relative("flood.load_p50", compare(&p50, alone, same), "ms", (by_alone, Target::None)),
        Figure::relative("flood.load_p50_shared", compare(&p50, other, same), "ms", (by_other, Target::None)),
        absolute("flood.saved_quotas", same, "quotas", &|loads| {
            loads.flood.saved as f64 / (2 * FLOOD_QUOTA) as f64
        }),
        absolute("flood.saves", same, "GB/s", &|loads| gigabytes(loads.flood.saved, loads)),
        absolute("flood.saves_other_agents", other, "GB/s", &|loads| gigabytes(loads.flood.saved, loads)),
        absolute("flood.loads", same, "GB/s", &|loads| gigabytes(loads.flood.loaded, loads)),
        absolute("flood.loads_other_agents", other, "GB/s", &|loads| gigabytes(loads.flood.loaded, loads)),
        absolute("flood.loads_from_nvme", same, "%", &nvme_part),
    ])
}

fn hit_rate(loads: &Loads) -> f64 {
    100.0 * loads.hits as f64 / loads.blocks as f64
}

/// Returns the smallest of the values that at least this percentage of them does not exceed.
fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(milliseconds: f64, hits: u64) -> Loads {
        Loads {
            blocks: 100,
            hits,
            from_nvme: 1,
            from_peer: 1,
            milliseconds: vec![milliseconds; 100],
            seconds: 1.0,
            flood: FloodCounts { from_nvme: 1, ..FloodCounts::default() },
        }
    }

    #[test]
    fn percentile_is_the_nearest_rank() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!([50, 99, 100].map(|percent| percentile(&values, percent)), [100.0, 198.0, 200.0]);
    }

    #[test]
    fn limits_are_those_of_the_leg_with_the_flood() {
        let round = [loads(10.0, 100), loads(13.0, 98), loads(12.0, 100)];
        let figures = figures(&[round]).expect("figures");
        let of = |name: &str| figures.iter().find(|figure| figure.name == name).expect("a figure");
        assert_eq!((of("flood.lost_hits").value, of("flood.lost_hits").met), (2.0, Some(false)));
        assert_eq!(of("flood.load_p99").met, Some(false));
        assert_eq!(of("flood.load_p99_shared").met, Some(true));
        assert!(super::figures(&[[Loads::default(), loads(1.0, 1), loads(1.0, 1)]]).is_err());
        let without_reads = Loads { flood: FloodCounts::default(), ..loads(1.0, 1) };
        let error =
            super::figures(&[[loads(1.0, 1), without_reads, loads(1.0, 1)]]).expect_err("no reads of A");
        assert!(error.to_string().contains("no load of A came from NVMe"), "{error}");
    }
}
