//! A large cluster of small agents: measures how long members without state need to learn all inventories.
//!
//! Every agent is the production core with a few blocks, every member the production core. Only the faults of
//! the scenario occur. Two simulated times are measured: from the first start, and from the simultaneous loss
//! of all members' memory. Each ends when every slot has an owner that knows all nodes' inventories. While
//! there is no member, every engine matches the blocks of its node, and finds them. Members and network have
//! unlimited throughput; the store writes sequentially.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_agent_core::effect::PlaceKind;
use reprise_agent_core::event::{Ranks, Request, Scope};
use reprise_policy::{BlockKey, SessionId, SlotSet};

use crate::engine::RequestKind;
use crate::engine_driver::draw_keys;
use crate::network::Host;
use crate::setup::Setup;
use crate::simulation::Simulation;
use crate::trace::Recording;

/// Interval of the checks of the directories.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum simulated time of the whole run.
const TIME_MAX: Duration = Duration::from_secs(600);
/// Time after which lost members restart.
const RESTART_AFTER: Duration = Duration::from_millis(500);
/// Time within which every node has noticed the loss of the members: it sends four heartbeats a second.
const NOTICED_AFTER: Duration = Duration::from_millis(400);
/// Time for writing committed blocks.
const WRITE_TIME: Duration = Duration::from_secs(2);

/// Parameters of the simulated cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Number of agents, at most 65,535.
    pub nodes: usize,
    /// Number of members of the control plane, at least one.
    pub members: usize,
    /// Seed of all random decisions.
    pub seed: u64,
}

/// Results of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Time from the start, with an empty store, until every directory is complete.
    pub first_start: Duration,
    /// Time from the loss of all members until every directory is complete again.
    pub rebuild: Duration,
    /// Number of registrations in the whole run.
    pub registrations: u64,
    /// Number of requested inventories in the whole run.
    pub inventories: u64,
    /// Number of engines that found the blocks of their node while it reached no member.
    pub local_matches: u64,
    /// Number of replicas in the directories.
    pub replicas: u64,
    /// Number of actions that ran.
    pub steps: u64,
    /// Digest of all actions: equal for equal clusters.
    pub digest: u64,
}

/// Plays a cluster from its first start to the rebuild of all directories.
///
/// # Errors
/// Describes the phase that did not end within ten minutes of simulated time.
///
/// # Panics
/// When an invariant does not hold.
pub fn scale(cluster: Cluster) -> Result<Measured, String> {
    let setup = Setup::large(cluster.nodes, cluster.members);
    let mut simulation = Simulation::with(setup, cluster.seed, Recording::Digest);
    let first_start = measure(&mut simulation, "the first start")?;
    fill(&mut simulation);
    let lost = simulation.env.now;
    (0..cluster.members).for_each(|member| simulation.at_member(member, |running, env| running.kill(env)));
    simulation.run_until(lost.after(NOTICED_AFTER));
    match_own(&mut simulation);
    simulation.run_until(lost.after(RESTART_AFTER));
    (0..cluster.members).for_each(|member| simulation.start_member(member));
    let rebuild = RESTART_AFTER + measure(&mut simulation, "the rebuilding")?;
    let seen = |what: &str| simulation.env.seen.get(what).copied().unwrap_or_default();
    Ok(Measured {
        first_start,
        rebuild,
        registrations: seen("registrations"),
        inventories: seen("inventories"),
        local_matches: seen("local matches alone"),
        replicas: replicas_held(&simulation),
        steps: simulation.env.trace.steps(),
        digest: simulation.env.trace.digest(),
    })
}

/// Runs until every directory is complete.
fn measure(simulation: &mut Simulation, what: &str) -> Result<Duration, String> {
    let began = simulation.env.now;
    while simulation.env.now.since(began) < TIME_MAX {
        simulation.run_until(simulation.env.now.after(POLL_INTERVAL));
        if is_whole(simulation) {
            return Ok(simulation.env.now.since(began));
        }
    }
    Err(format!("{what} takes longer than {TIME_MAX:?}"))
}

/// Reports whether every slot has an owner that knows the inventories of all nodes.
pub(crate) fn is_whole(simulation: &Simulation) -> bool {
    let mut owned = 0;
    for member in 0..simulation.members.len() {
        let now = simulation.env.time(Host::Member(member));
        let Some(running) = simulation.members[member].as_ref() else { return false };
        let size = running.directory.size();
        let knows = size.nodes.len() == simulation.nodes.len() && size.slots_partial == 0;
        if running.certain_map(now).is_none() || !knows {
            return false;
        }
        owned += size.slots_owned;
    }
    owned == SlotSet::ALL.len() && replicas_known(simulation) == replicas_held(simulation)
}

fn replicas_known(simulation: &Simulation) -> u64 {
    simulation.members.iter().flatten().map(|member| member.directory.size().replicas).sum()
}

fn replicas_held(simulation: &Simulation) -> u64 {
    let processes = simulation.nodes.iter().filter_map(|node| node.process.as_ref());
    processes.map(|process| process.replicas.held.len() as u64).sum()
}

/// Gives every agent some blocks from an engine.
fn fill(simulation: &mut Simulation) {
    for node in 0..simulation.nodes.len() {
        let Simulation { env, nodes, .. } = &mut *simulation;
        nodes[node].open_session(env, 0);
        let session = seated(simulation, node);
        let Simulation { env, nodes, .. } = &mut *simulation;
        let engines = &mut nodes[node].process().engines;
        engines.ask(
            env,
            session,
            RequestKind::Reserve(4),
            Request::Reserve { count: 4, kind: PlaceKind::Arena },
        );
    }
    simulation.run_until(simulation.env.now.after(POLL_INTERVAL));
    for node in 0..simulation.nodes.len() {
        let session = seated(simulation, node);
        let Simulation { env, nodes, .. } = &mut *simulation;
        let engine = nodes[node].process().engines.session(session);
        let (tenant, layout) = (engine.tenant, engine.layout);
        let keys = draw_keys(env, tenant, layout);
        nodes[node].commit(env, session, &keys);
    }
    simulation.run_until(simulation.env.now.after(WRITE_TIME));
}

/// Makes every engine match all blocks of its node; the checks of matches ensure complete and timely
/// answers.
fn match_own(simulation: &mut Simulation) {
    for node in 0..simulation.nodes.len() {
        let session = seated(simulation, node);
        let held = &simulation.nodes[node].process().replicas.held;
        let keys: BTreeSet<BlockKey> = held.iter().map(|(key, _)| *key).collect();
        let (keys, scope) = (Vec::from_iter(keys), Scope::Local);
        let body =
            Request::Match { keys: keys.clone(), ranks: Ranks::Own, position: Some(0), scope, public: None };
        let Simulation { env, nodes, .. } = &mut *simulation;
        nodes[node].process().engines.ask(env, session, RequestKind::Match(keys, scope), body);
    }
}

fn seated(simulation: &Simulation, node: usize) -> SessionId {
    let process = simulation.nodes[node].process.as_ref().expect("nothing breaks");
    process.engines.seats[0].expect("its engine has a session")
}
