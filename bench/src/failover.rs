//! Failover: one of three control-plane members is killed while an engine keeps looking up keys. The
//! benchmark measures how long the member's keys are not found.
//!
//! Three agents take part:
//! * The first holds the blocks. Just before the kill it evicts some of them ([`evicted_blocks`]); these must
//!   finally not be found.
//! * The engine on the second looks up three chains, each of keys that one member owns, and a chain of keys
//!   that do not exist. A match covers the keys up to the first miss, so a chain is complete if the match
//!   covers all of it.
//! * The engine on the third loads a few blocks, each once, and compares every byte.
//!
//! An answer is wrong if it covers a key that does not exist, or reports a block on the asking node, which
//! never loads any. When all chains are complete again, the member is restarted.

mod evicted_blocks;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, ensure};
use reprise_client::{Client, LoadRequest, Scope, Source};
use reprise_policy::shards::{MemberIndex, MemberName, ShardMap};
use reprise_policy::{BlockKey, Epoch};

use evicted_blocks::EvictedBlocks;
use reprise_testkit::bench::fixture::{self, Fixture, PATIENCE, keys, sizes};
use reprise_testkit::bench::report::{Figure, Target, median};
use reprise_testkit::bench::{Settings, one_page};
use reprise_testkit::cluster::ControlPlanes;
use reprise_testkit::keyed_blocks::{self, Outcome};

/// Number of control-plane members.
const MEMBERS: usize = 3;

/// Number of blocks reserved and committed at a time.
const BATCH: usize = 200;

/// Number of keys of a chain, enough to cover a member's hash slots evenly.
const CHAIN: usize = 200;

/// Number of keys that chains are chosen from; about a third of them belong to each member.
const CANDIDATES: usize = CHAIN * MEMBERS * 4;

/// Number of nodes: the holder, the asking node and the loading node.
const NODES: usize = 3;

/// Arena of two regions; the evicting tenant uses one of them.
const ARENA_MIB: u64 = 128;

/// Keys of each chain that are loaded during one loss. Each loss uses other keys, so that no block becomes
/// hot.
const SAMPLE: usize = 10;

/// Time limit for the chains to become complete again.
const COMPLETE_SECONDS_MAX: f64 = 3.0;

/// Seeds of the keys that exist, and of those that do not.
const PRESENT: u64 = 70_001;
const ABSENT: u64 = 70_002;

/// Keys that the asking engine looks up.
struct Chains {
    /// Chains by the index of the member that owns their keys.
    of_member: Vec<Vec<BlockKey>>,
    absent: Vec<BlockKey>,
}

/// Result of one loss.
#[derive(Clone, Copy, Debug, Default)]
struct Loss {
    /// Time from the kill until the member's chain was complete again.
    seconds: f64,
    /// Match calls in that time, and those with a wrong answer.
    answers: usize,
    wrong: usize,
    /// Incomplete answers for chains of the other members.
    others_missed: usize,
    /// Blocks loaded and compared in that time, and those with wrong bytes.
    loads: usize,
    wrong_loads: usize,
    /// Blocks that the holder evicted just before the kill, and those that were still found in the end.
    evicted: usize,
    still_answered: usize,
}

pub(crate) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = one_page();
    let control = ControlPlanes::Etcd { members: MEMBERS };
    let mut fixture = Fixture::start_on(settings, control, NODES, (&layout, sizes(ARENA_MIB, 256)))?;
    let chains = Chains::new(&fixture)?;
    for chain in &chains.of_member {
        save(&fixture.clients[0], chain)?;
    }
    let mut evicting = EvictedBlocks::start(&fixture, &layout)?;
    let mut losses = Vec::new();
    for repetition in settings.rounds("failover") {
        chains.await_complete(&fixture.clients[1])?;
        let evicted = evicting.evict()?;
        let mut loss = chains.lose(&mut fixture, repetition)?;
        (loss.evicted, loss.still_answered) = (evicted.len(), evicting.still_answered(&evicted)?);
        losses.push(loss);
    }
    Ok(figures(&losses))
}

fn figures(losses: &[Loss]) -> Vec<Figure> {
    let seconds: Vec<f64> = losses.iter().map(|loss| loss.seconds).collect();
    let most = seconds.iter().copied().fold(0.0, f64::max);
    let sum = |of: fn(&Loss) -> usize| losses.iter().map(of).sum::<usize>() as f64;
    let (complete, none, some) =
        (Target::AtMost(COMPLETE_SECONDS_MAX), Target::AtMost(0.0), Target::AtLeast(1.0));
    let count = |name: &str, of: fn(&Loss) -> usize, unit, target| {
        Figure::absolute(format!("failover.{name}"), sum(of), unit, target)
    };
    vec![
        Figure::absolute("failover.complete_again_median", median(seconds), "s", complete),
        Figure::absolute("failover.complete_again_max", most, "s", complete),
        count("wrong_answers", |loss| loss.wrong, "answers", none),
        count("answers", |loss| loss.answers, "answers", Target::None),
        count("other_members_incomplete", |loss| loss.others_missed, "answers", Target::None),
        count("loads_compared", |loss| loss.loads, "blocks", some),
        count("wrong_loads", |loss| loss.wrong_loads, "blocks", none),
        count("evicted_before", |loss| loss.evicted, "blocks", some),
        count("evicted_still_answered", |loss| loss.still_answered, "blocks", none),
    ]
}

impl Chains {
    fn new(fixture: &Fixture) -> anyhow::Result<Chains> {
        let members = fixture.cluster.file().members;
        let names =
            members.iter().map(|member| MemberName::new(&member.name)).collect::<Result<Vec<_>, _>>()?;
        // Member names are sorted, so indexes in the map equal those of the cluster's members.
        let map = ShardMap::new(Epoch(1), names)?;
        let candidates = keys(PRESENT, CANDIDATES);
        let of = |member| {
            let owned = |key: &&BlockKey| map.owner_of(key) == Some(MemberIndex(member));
            candidates.iter().filter(owned).take(CHAIN).copied().collect::<Vec<_>>()
        };
        let of_member: Vec<_> = (0..).take(MEMBERS).map(of).collect();
        ensure!(of_member.iter().all(|chain| chain.len() == CHAIN), "a member owns too few keys for a chain");
        Ok(Chains { of_member, absent: keys(ABSENT, CHAIN) })
    }

    /// Waits until the asking engine finds every chain.
    fn await_complete(&self, asking: &Client) -> anyhow::Result<()> {
        let give_up = Instant::now() + PATIENCE;
        for (member, chain) in self.of_member.iter().enumerate() {
            while asking.match_keys(chain, Scope::Cluster).context("match")?.len() < CHAIN {
                ensure!(
                    Instant::now() < give_up,
                    "the keys of member {member} are not found within {PATIENCE:?}"
                );
            }
        }
        Ok(())
    }

    /// Kills a member, looks up and loads until all chains are complete again, and restarts the member.
    fn lose(&self, fixture: &mut Fixture, repetition: usize) -> anyhow::Result<Loss> {
        let member = repetition % MEMBERS;
        fixture.cluster.kill_member(member);
        let over = AtomicBool::new(false);
        let (asking, loading) = (&fixture.clients[1], &fixture.clients[2]);
        let sample = self.sample(repetition);
        let (asked, loaded) = std::thread::scope(|scope| {
            let loads = scope.spawn(|| load_until(&over, loading, sample));
            let asked = self.ask_until_complete(asking, member);
            over.store(true, Ordering::Relaxed);
            (asked, loads.join().expect("the load thread does not panic"))
        });
        let mut loss = asked?;
        (loss.loads, loss.wrong_loads) = loaded?;
        fixture.cluster.restart_member(member)?;
        fixture.cluster.await_membership()?;
        Ok(loss)
    }

    /// Returns keys of every chain, different ones for each of the first repetitions.
    fn sample(&self, repetition: usize) -> VecDeque<BlockKey> {
        let of = |chain: &Vec<BlockKey>| {
            (0..SAMPLE).map(|at| chain[(repetition * SAMPLE + at) % CHAIN]).collect::<Vec<_>>()
        };
        self.of_member.iter().flat_map(of).collect()
    }

    fn ask_until_complete(&self, asking: &Client, killed: usize) -> anyhow::Result<Loss> {
        let (mut loss, began) = (Loss::default(), Instant::now());
        let mut complete = false;
        while !complete {
            ensure!(
                began.elapsed() < PATIENCE,
                "the keys of a killed member are not found within {PATIENCE:?}"
            );
            let found = |keys: &[BlockKey], loss: &mut Loss| {
                let sources = asking.match_keys(keys, Scope::Cluster).context("match")?;
                loss.answers += 1;
                let own = |source: &&Source| matches!(source, Source::OwnDram | Source::OwnNvme);
                loss.wrong += sources.iter().filter(own).count();
                anyhow::Ok(sources.len())
            };
            let mut all = true;
            for (owner, chain) in self.of_member.iter().enumerate() {
                let whole = found(chain, &mut loss)? == CHAIN;
                loss.others_missed += usize::from(!whole && owner != killed);
                all &= whole;
            }
            loss.wrong += found(&self.absent, &mut loss)?;
            complete = all;
        }
        loss.seconds = began.elapsed().as_secs_f64();
        Ok(loss)
    }
}

/// Loads the blocks that are found while the member is down; returns the numbers of compared and of wrong
/// blocks.
fn load_until(
    over: &AtomicBool,
    client: &Client,
    mut keys: VecDeque<BlockKey>,
) -> anyhow::Result<(usize, usize)> {
    let (mut right, mut wrong) = (0, 0);
    while let Some(key) = keys.pop_front()
        && !over.load(Ordering::Relaxed)
    {
        let found = client.match_keys(&[key], Scope::Cluster).context("match")?;
        let loaded = if found.is_empty() { None } else { Some(load(client, &key)?) };
        match loaded {
            Some(Outcome::Verified(_)) => right += 1,
            Some(Outcome::Wrong { .. }) => wrong += 1,
            Some(Outcome::Missing(_) | Outcome::Corrupt) | None => keys.push_back(key),
        }
    }
    Ok((right + wrong, wrong))
}

/// Saves blocks whose bytes derive from their keys, and waits until they are durable.
fn save(client: &Client, keys: &[BlockKey]) -> anyhow::Result<()> {
    let layout = *client.layout();
    for part in keys.chunks(BATCH) {
        let filled = fixture::fill_each(client, part, |reservation, key| {
            keyed_blocks::write(reservation, &layout, &key.0)
        })?;
        fixture::commit_durable(client, filled)?;
    }
    Ok(())
}

/// Loads a block from any node and compares every byte.
fn load(client: &Client, key: &BlockKey) -> anyhow::Result<Outcome> {
    let request = LoadRequest { deadline: PATIENCE, ..LoadRequest::new(vec![*key]) };
    let load = client.load(&request).context("load")?;
    Ok(keyed_blocks::compare(&load, client.layout(), &[key.0], PATIENCE).context("waiting for a layer")?[0])
}
