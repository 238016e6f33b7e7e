//! One of three members of the control plane is killed while an engine goes on asking: how long its keys are missed.
//!
//! Two agents, one of which holds the blocks; the other one's engine asks for three chains, each of keys that one member
//! owns, and for a chain that nobody has. A match answers up to the first key that is missed, so a chain is complete when all
//! of it is answered. Wrong is an answer for a key that nobody has, or a block that is said to be on the asking node. Nothing is
//! loaded: the asking node would then have it. Once all chains are complete again the member is started again.

use std::time::Instant;

use anyhow::{Context, ensure};
use reprise_client::{Client, Scope, Source};
use reprise_policy::shards::{MemberIndex, MemberName, ShardMap};
use reprise_policy::{BlockKey, Epoch};

use super::fixture::{self, Fixture, PATIENCE, keys, payload, sizes};
use super::report::{Figure, Target, median};
use super::{Settings, one_page};
use crate::cluster::ControlPlanes;

/// Members of the control plane.
const MEMBERS: usize = 3;

/// Keys of a chain: of so many, each hash slot of a member is as likely as another.
const CHAIN: usize = 200;

/// Keys that chains are chosen from; a third of them is enough for each member by far.
const CANDIDATES: usize = CHAIN * MEMBERS * 4;

/// Blocks reserved and committed at a time.
const BATCH: usize = 200;

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
}

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = one_page();
    let control = ControlPlanes::Etcd { members: MEMBERS };
    let mut fixture = Fixture::start_on(settings, control, 2, (&layout, sizes(64, 256)))?;
    let chains = Chains::new(&fixture)?;
    let payload = payload(&layout);
    for chain in &chains.of_member {
        fixture::save_durable(&fixture.clients[0], chain, BATCH, &payload)?;
    }
    let mut losses = Vec::new();
    for repetition in settings.rounds("failover") {
        chains.await_complete(&fixture.clients[1])?;
        losses.push(chains.lose(&mut fixture, repetition % MEMBERS)?);
    }
    let seconds: Vec<f64> = losses.iter().map(|loss| loss.seconds).collect();
    let most = seconds.iter().copied().fold(0.0, f64::max);
    let sum = |of: fn(&Loss) -> usize| losses.iter().map(of).sum::<usize>() as f64;
    let complete = Target::AtMost(COMPLETE_SECONDS_MAX);
    Ok(vec![
        Figure::absolute("failover.complete_again_median", median(seconds), "s", complete),
        Figure::absolute("failover.complete_again_max", most, "s", complete),
        Figure::absolute("failover.wrong_answers", sum(|loss| loss.wrong), "answers", Target::AtMost(0.0)),
        Figure::absolute("failover.answers", sum(|loss| loss.answers), "answers", Target::None),
        Figure::absolute(
            "failover.other_members_incomplete",
            sum(|loss| loss.others_missed),
            "answers",
            Target::None,
        ),
    ])
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

    /// Kills a member, asks until all is found again, and starts it again.
    fn lose(&self, fixture: &mut Fixture, member: usize) -> anyhow::Result<Loss> {
        let mut loss = Loss::default();
        fixture.cluster.kill_member(member)?;
        let killed = Instant::now();
        let asking = &fixture.clients[1];
        let mut complete = false;
        while !complete {
            ensure!(
                killed.elapsed() < PATIENCE,
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
                loss.others_missed += usize::from(!whole && owner != member);
                all &= whole;
            }
            loss.wrong += found(&self.absent, &mut loss)?;
            complete = all;
        }
        loss.seconds = killed.elapsed().as_secs_f64();
        fixture.cluster.restart_member(member)?;
        fixture.cluster.members_know_each_other()?;
        Ok(loss)
    }
}
