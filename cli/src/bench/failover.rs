//! One of three members of the control plane is killed while an engine goes on asking: how long its keys are missed.
//!
//! Three agents, one of which holds the blocks; the second one's engine asks for three chains, each of keys that one member
//! owns, and for a chain that nobody has. A match answers up to the first key that is missed, so a chain is complete when all
//! of it is answered. Wrong is an answer for a key that nobody has, or a block that is said to be on the asking node, which
//! therefore loads nothing: the third one's engine loads a few of the blocks meanwhile, each of them once, and compares every byte. Just before the kill
//! the holder evicts blocks ([`evicting`]), which must end as not found. Once all chains are complete again the member is started again.

mod evicting;
mod keyed;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, ensure};
use reprise_client::{Client, Scope, Source};
use reprise_policy::shards::{MemberIndex, MemberName, ShardMap};
use reprise_policy::{BlockKey, Epoch};

use super::fixture::{Fixture, PATIENCE, keys, sizes};
use super::report::{Figure, Target, median};
use super::{Settings, one_page};
use crate::cluster::ControlPlanes;
use evicting::Evicting;
use keyed::Loaded;

/// Members of the control plane.
const MEMBERS: usize = 3;

/// Keys of a chain: of so many, each hash slot of a member is as likely as another.
const CHAIN: usize = 200;

/// Keys that chains are chosen from; a third of them is enough for each member by far.
const CANDIDATES: usize = CHAIN * MEMBERS * 4;

/// Nodes: the holder, the asking one, and the one that loads.
const NODES: usize = 3;

/// Two regions: one of them is the evicting tenant's.
const ARENA_MIB: u64 = 128;

/// Keys of each chain that are loaded during one loss; others during the next, so that no block becomes hot.
const SAMPLE: usize = 10;

/// Until look-ups are complete again.
const COMPLETE_SECONDS_MAX: f64 = 3.0;

/// Seeds of the keys that are there, and of those that are not.
const PRESENT: u64 = 70_001;
const ABSENT: u64 = 70_002;

/// What an engine asks for all the time.
struct Chains {
    /// By the position of the member that owns them.
    of_member: Vec<Vec<BlockKey>>,
    absent: Vec<BlockKey>,
}

/// What one loss showed.
#[derive(Clone, Copy, Debug, Default)]
struct Loss {
    /// From the kill until the member's chain was complete again.
    seconds: f64,
    /// Answers meanwhile.
    answers: usize,
    wrong: usize,
    /// Of the other members' chains, those that were not complete.
    others_missed: usize,
    /// Blocks that were loaded meanwhile and compared, and those of them that were not what was saved.
    loads: usize,
    wrong_loads: usize,
    /// Blocks that the holder had evicted just before, and those of them that were answered in the end.
    evicted: usize,
    still_answered: usize,
}

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = one_page();
    let control = ControlPlanes::Etcd { members: MEMBERS };
    let mut fixture = Fixture::start_on(settings, control, NODES, (&layout, sizes(ARENA_MIB, 256)))?;
    let chains = Chains::new(&fixture)?;
    for chain in &chains.of_member {
        keyed::save(&fixture.clients[0], chain)?;
    }
    let mut evicting = Evicting::start(&fixture, &layout)?;
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
        // The names are in order, so positions are those of the cluster's members.
        let map = ShardMap::new(Epoch(1), names)?;
        let candidates = keys(PRESENT, CANDIDATES);
        let of = |member| {
            let owned = |key: &&BlockKey| map.owner_of(key) == Some(MemberIndex(member));
            candidates.iter().filter(owned).take(CHAIN).copied().collect::<Vec<_>>()
        };
        let of_member: Vec<_> = (0..).take(MEMBERS).map(of).collect();
        ensure!(of_member.iter().all(|chain| chain.len() == CHAIN), "a member owns hardly any key");
        Ok(Chains { of_member, absent: keys(ABSENT, CHAIN) })
    }

    /// Waits until an engine finds every chain.
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

    /// Kills a member, asks and loads until all is found again, and starts it again.
    fn lose(&self, fixture: &mut Fixture, repetition: usize) -> anyhow::Result<Loss> {
        let member = repetition % MEMBERS;
        fixture.cluster.kill_member(member)?;
        let over = AtomicBool::new(false);
        let (asking, loading) = (&fixture.clients[1], &fixture.clients[2]);
        let sample = self.sample(repetition);
        let (asked, loaded) = std::thread::scope(|scope| {
            let loads = scope.spawn(|| load_until(&over, loading, sample));
            let asked = self.ask_until_complete(asking, member);
            over.store(true, Ordering::Relaxed);
            (asked, loads.join().expect("loads end with errors, not with panics"))
        });
        let mut loss = asked?;
        (loss.loads, loss.wrong_loads) = loaded?;
        fixture.cluster.restart_member(member)?;
        fixture.cluster.members_know_each_other()?;
        Ok(loss)
    }

    /// Keys of every chain, others for each of the first repetitions.
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

/// Loads each of the blocks that is answered, as long as a member is away; how many were compared, and how many of them were wrong.
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
        let loaded = if found.is_empty() { Loaded::Missing } else { keyed::load(client, &key)? };
        match loaded {
            Loaded::Right => right += 1,
            Loaded::Wrong => wrong += 1,
            Loaded::Missing => keys.push_back(key),
        }
    }
    Ok((right + wrong, wrong))
}
