//! Random faults and their repairs.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_policy::{BlockKey, SessionId};

use crate::clock::PauseClock;
use crate::disk::{Disk, Health};
use crate::environment::Environment;
use crate::memory::is_rotten;
use crate::memory::verified;
use crate::network::Host;
use crate::node::Node;
use crate::rng::Rng;
use crate::setup::layout_of;
use crate::simulation::{Action, AgentStep, Simulation};

/// The end of a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Repair {
    StartAgent(usize),
    StartMember(usize),
    StartStore,
    Resume(Host, PauseClock),
    FastStore,
    KeepHistory,
    Heal(Host, Host),
    Disk(usize, usize),
}

/// Simulations with changes of failure domains, and the interval of the changes.
const DOMAINS_PERMILLE: u64 = 125;
const DOMAIN_EVERY_MS: std::ops::Range<u64> = 100..2000;
/// Distinguishes the random numbers of these changes from all others of the seed. With this number, the seeds that
/// found bugs have no such changes.
const DOMAINS_STREAM: u64 = 0xd03a_1e53;

/// Of 1000 simulations: those with extents.
const EXTENTS_PERMILLE: u64 = 500;
/// Distinguishes the random numbers of this choice from all others of the seed. With this number, the seeds that found
/// bugs, and those that find rare flaws, have no extents.
const EXTENTS_STREAM: u64 = 0xe915_d18a;

/// End of an agent's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CrashKind {
    Killed,
    PowerLoss,
}

/// Draws a fault, and the time of the next.
pub(crate) fn fault(simulation: &mut Simulation) {
    if simulation.env.calm {
        return;
    }
    let mean = simulation.env.setup.fault_every.as_micros() as u64;
    let delay = simulation.env.rng.micros(mean / 8..mean * 15 / 8);
    simulation.env.after(delay, Action::Fault);
    let node = simulation.env.rng.below(simulation.nodes.len());
    let member = simulation.env.rng.below(simulation.members.len());
    let (runs, host) = (simulation.nodes[node].process.is_some(), Host::Node(node));
    let of_member = Host::Member(member);
    match simulation.env.rng.below(100) {
        0..10 if runs => stop_agent(simulation, node, CrashKind::Killed),
        10..22 if runs => stop_agent(simulation, node, CrashKind::PowerLoss),
        22..29 if simulation.env.is_awake(host) => pause(&mut simulation.env, host),
        29..36 if simulation.members[member].is_some() => restart_member(simulation, member),
        36..43 if simulation.env.is_awake(of_member) => pause(&mut simulation.env, of_member),
        43..56 => partition(&mut simulation.env, node, member),
        56..61 => lose_connection(&mut simulation.env),
        61..70 => disk_fault(&mut simulation.env, &mut simulation.nodes[node]),
        70..76 => damage_memory(&mut simulation.nodes[node], &mut simulation.env),
        76..79 => {
            let (device, which) =
                (simulation.env.rng.below(simulation.env.setup.disks), simulation.env.rng.next());
            simulation.nodes[node].disks[device].rot(which);
            simulation.env.count("rot");
        }
        79..84 if runs => kill_engine(&mut simulation.nodes[node], &mut simulation.env),
        84.. => store_fault(simulation),
        _ => {}
    }
}

/// Reports whether engines use extents in the simulation of a seed.
pub(crate) fn has_extents(seed: u64) -> bool {
    Rng::new(seed ^ EXTENTS_STREAM).chance(EXTENTS_PERMILLE)
}

/// Begins changes of failure domains in some simulations.
pub(crate) fn begin_domain_changes(env: &mut Environment, seed: u64) {
    env.domains = Rng::new(seed ^ DOMAINS_STREAM);
    if env.domains.chance(DOMAINS_PERMILLE) {
        let delay = env.domains.millis(DOMAIN_EVERY_MS);
        env.after(delay, Action::Domain);
    }
}

/// Changes the failure domain of a node, and draws the next change.
pub(crate) fn change_domain(simulation: &mut Simulation) {
    if simulation.env.calm {
        return;
    }
    let delay = simulation.env.domains.millis(DOMAIN_EVERY_MS);
    simulation.env.after(delay, Action::Domain);
    let node = simulation.env.domains.below(simulation.nodes.len());
    simulation.nodes[node].failure_domain = simulation.env.domains.one_of(&["", "a", "b"]).to_owned();
    if simulation.nodes[node].process.is_some() {
        simulation.env.later(node, Duration::ZERO, AgentStep::DomainChanged);
    }
}

/// Fails the power of a node, unless faults have ended or the power has failed already.
pub(crate) fn outage(simulation: &mut Simulation, node: usize) {
    if !simulation.env.calm && simulation.nodes[node].process.is_some() {
        stop_agent(simulation, node, CrashKind::PowerLoss);
    }
}

/// `SIGKILL` or power loss; the agent restarts after a while on the surviving contents of its disks.
fn stop_agent(simulation: &mut Simulation, node: usize, death: CrashKind) {
    simulation.env.trace.note(|| format!("node {node}: {death:?}"));
    if death == CrashKind::Killed {
        simulation.env.break_lines(Host::Node(node));
    }
    let Simulation { env, nodes, budget_audit, .. } = simulation;
    let Some(mut running) = nodes[node].end(env) else { return };
    match death {
        CrashKind::Killed => nodes[node].extents.agent_killed(env),
        CrashKind::PowerLoss => {
            let lost = nodes[node].extents.power_lost(env);
            lost.into_iter().for_each(|(device, write)| running[device].push(write));
        }
    }
    budget_audit.remove_node(node);
    simulation.env.host_mut(Host::Node(node)).powered = death == CrashKind::Killed;
    simulation.env.count(if death == CrashKind::Killed { "kills" } else { "power losses" });
    for (device, running) in running.into_iter().enumerate() {
        let disk = &mut simulation.nodes[node].disks[device];
        match death {
            CrashKind::Killed => disk.abandon(running, &mut simulation.env.rng),
            CrashKind::PowerLoss => disk.power_loss(running, &mut simulation.env.rng),
        }
    }
    assert_durable_blocks_survive(simulation, node);
    replace_lost_disks(&mut simulation.env, &mut simulation.nodes[node]);
    let delay = simulation.env.rng.millis(50..3000);
    simulation.env.after(delay, Action::Repair(Repair::StartAgent(node)));
}

/// Checks that blocks that were reported durable are readable on the disks, except on disks that were
/// lost or damaged.
fn assert_durable_blocks_survive(simulation: &Simulation, node: usize) {
    let place = &simulation.nodes[node];
    let mut kept: BTreeSet<BlockKey> = BTreeSet::new();
    for disk in &place.disks {
        let (_, stored, _) = disk.recover();
        for block in stored {
            let readable = |block: &reprise_agent_core::pool::StoredBlock| {
                let (page, payload) = disk.read(block.page);
                let (key, generation, header_crc) = (block.key, block.generation, block.header_crc);
                let expected =
                    reprise_agent_core::pool::header::ExpectedHeader { key, generation, header_crc };
                let header = reprise_agent_core::pool::header::decode_header(&page, &expected).ok();
                let content =
                    header.and_then(|header| verified(payload, 0, &layout_of(&key), &header.checksums));
                content.is_some_and(|tag| simulation.truth[&key].contains(&tag))
                    && payload.len() == layout_of(&key).layers() as usize
            };
            let excused = disk.health.lost || is_rotten(disk.read(block.page).1);
            if excused || readable(&block) {
                kept.insert(block.key);
            }
        }
    }
    let missing: Vec<_> = place.durable.reported.difference(&kept).collect();
    assert!(missing.is_empty(), "node {node}: reported durable but lost: {missing:?}");
}

fn replace_lost_disks(env: &mut Environment, node: &mut Node) {
    let identity = env.rng.next();
    for (device, disk) in node.disks.iter_mut().enumerate() {
        if disk.health.lost {
            *disk = Disk::format((disk.bytes(), env.setup.segment_bytes), device as u8, identity);
            node.extents.device_replaced(device);
        }
    }
}

/// `SIGSTOP` and later `SIGCONT`; or the suspension of the machine with its clock.
fn pause(env: &mut Environment, host: Host) {
    let time = Duration::from_millis(env.rng.one_of(&[300, 2000, 10_000]));
    let ahead = env.rng.one_of(&[500_000, 20_000_000]);
    let how = env.rng.one_of(&[PauseClock::Runs, PauseClock::Stops, PauseClock::Jumps(ahead)]);
    env.stop(host);
    env.count(match host {
        Host::Node(_) => "pauses",
        Host::Member(_) => "member pauses",
        Host::Store => "store pauses",
    });
    env.after(time, Action::Repair(Repair::Resume(host, how)));
}

fn restart_member(simulation: &mut Simulation, member: usize) {
    simulation.at_member(member, |running, env| running.kill(env));
    simulation.env.count("member restarts");
    let delay = simulation.env.rng.millis(20..5000);
    simulation.env.after(delay, Action::Repair(Repair::StartMember(member)));
}

fn store_fault(simulation: &mut Simulation) {
    let delay = simulation.env.rng.millis(50..5000);
    match simulation.env.rng.below(100) {
        0..30 if simulation.env.runs(Host::Store) => {
            simulation.store_process.kill(&mut simulation.env);
            simulation.env.count("store restarts");
            simulation.env.after(delay, Action::Repair(Repair::StartStore));
        }
        30..45 if simulation.env.is_awake(Host::Store) => pause(&mut simulation.env, Host::Store),
        45..65 => {
            simulation.store_process.slow = true;
            simulation.env.count("slow stores");
            simulation.env.after(delay, Action::Repair(Repair::FastStore));
        }
        65..90 => {
            simulation.store_process.compacting = true;
            simulation.env.count("compactions");
            // Leaves a member that reads the list of members again much time in which it can miss a
            // change.
            if simulation.env.rng.chance(500) {
                simulation.store_process.slow = true;
                simulation.env.break_lines(Host::Store);
            }
            simulation.env.after(delay, Action::Repair(Repair::KeepHistory));
        }
        90.. => {
            simulation.store_process.wipe(&mut simulation.env);
            simulation.env.count("store wipes");
        }
        _ => {}
    }
}

/// Two machines do not reach each other: an agent and a member, a member and the store, or any.
fn partition(env: &mut Environment, node: usize, member: usize) {
    let hosts = env.hosts.hosts();
    let (a, b) = match env.rng.below(10) {
        0..4 => (Host::Node(node), Host::Member(member)),
        4..7 => (Host::Member(member), Host::Store),
        _ => (Host::Node(node), env.rng.one_of(&hosts)),
    };
    if a == b || env.network.is_cut(a, b) {
        return;
    }
    env.network.cut(a, b);
    env.count(match (a, b) {
        (Host::Member(_), Host::Store) => "members cut off from the store",
        _ => "partitions",
    });
    let delay = env.rng.millis(50..9000);
    env.after(delay, Action::Repair(Repair::Heal(a, b)));
}

fn lose_connection(env: &mut Environment) {
    if let Some(line) = env.network.any(env.rng.next()) {
        env.break_line(line);
        env.count("connections lost");
    }
}

fn disk_fault(env: &mut Environment, node: &mut Node) {
    let device = env.rng.below(env.setup.disks);
    let (health, what) = match env.rng.below(10) {
        0..5 => (Health { slowness: env.rng.one_of(&[20, 300, 2000]), ..HEALTHY }, "slow disks"),
        5..9 => (Health { errors_permille: env.rng.one_of(&[20, 200]), ..HEALTHY }, "bad media"),
        _ => (Health { lost: true, ..HEALTHY }, "lost disks"),
    };
    let known = &mut node.disks[device].health;
    *known = Health { lost: health.lost || known.lost, ..health };
    env.count(what);
    let delay = env.rng.millis(100..3000);
    env.after(delay, Action::Repair(Repair::Disk(node.index, device)));
}

/// Flips bits in the memory of a node.
fn damage_memory(node: &mut Node, env: &mut Environment) {
    let which = [(); 3].map(|()| env.rng.next());
    if let Some(process) = &mut node.process {
        which.into_iter().for_each(|which| process.memory.damage(which));
        env.count("damaged memory");
        node.check_readers(env);
    }
}

fn kill_engine(node: &mut Node, env: &mut Environment) {
    let sessions: Vec<SessionId> = node.process().engines.sessions.keys().copied().collect();
    if !sessions.is_empty() {
        let session = env.rng.one_of(&sessions);
        node.close_session(env, session);
        env.count("engine deaths");
    }
}

impl Simulation {
    pub(crate) fn repair(&mut self, repair: Repair) {
        match repair {
            Repair::StartAgent(node) if self.nodes[node].process.is_none() => {
                self.nodes[node].start(&mut self.env);
                // The blocks that an agent recovers must be on its disks.
                if !self.env.calm && self.env.rng.below(2) == 0 {
                    let delay = self.env.rng.millis(1..50);
                    self.env.after(delay, Action::Outage(node));
                }
            }
            Repair::StartAgent(_) => {}
            Repair::StartMember(member) if self.members[member].is_none() => self.start_member(member),
            Repair::StartMember(_) => {}
            Repair::StartStore if !self.env.runs(Host::Store) => self.store_process.start(&mut self.env),
            Repair::StartStore => {}
            Repair::Resume(host, how) => {
                if self.env.resume(host, how) && host == Host::Store {
                    self.store_process.resume(&mut self.env, how);
                }
            }
            Repair::FastStore => self.store_process.slow = false,
            Repair::KeepHistory => (self.store_process.compacting, self.store_process.slow) = (false, false),
            Repair::Heal(a, b) => {
                for (line, to, number, message) in self.env.network.heal(a, b) {
                    self.env.send_again((line, to), number, message);
                }
            }
            Repair::Disk(node, device) => {
                let health = &mut self.nodes[node].disks[device].health;
                *health = Health { lost: health.lost, ..HEALTHY };
            }
        }
    }

    /// Ends all faults and repairs everything.
    pub(crate) fn end_faults(&mut self) {
        (self.env.calm, self.env.network.calm) = (true, true);
        let hosts = self.env.hosts.hosts();
        for (at, a) in hosts.iter().enumerate() {
            self.repair(Repair::Resume(*a, PauseClock::Runs));
            hosts[at + 1..].iter().for_each(|b| self.repair(Repair::Heal(*a, *b)));
        }
        for repair in [Repair::FastStore, Repair::KeepHistory, Repair::StartStore] {
            self.repair(repair);
        }
        (0..self.members.len()).for_each(|member| self.repair(Repair::StartMember(member)));
        for node in 0..self.nodes.len() {
            (0..self.env.setup.disks).for_each(|device| self.repair(Repair::Disk(node, device)));
            self.repair(Repair::StartAgent(node));
        }
    }
}

const HEALTHY: Health = Health { lost: false, errors_permille: 0, slowness: 1 };
