//! Random faults and their repairs.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_policy::{BlockKey, SessionId};

use crate::clock::PauseClock;
use crate::disk::{Disk, Health};
use crate::memory::is_rotten;
use crate::memory::verified;
use crate::network::Host;
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
/// found bugs have no such changes, and so play the same runs as before.
const DOMAINS_STREAM: u64 = 0xd03a_1e53;

/// End of an agent's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CrashKind {
    Killed,
    PowerLoss,
}

impl Simulation {
    /// Draws a fault, and the time of the next.
    pub(crate) fn fault(&mut self) {
        if self.env.calm {
            return;
        }
        let mean = self.env.setup.fault_every.as_micros() as u64;
        let delay = self.env.rng.micros(mean / 8..mean * 15 / 8);
        self.env.after(delay, Action::Fault);
        let node = self.env.rng.below(self.nodes.len());
        let member = self.env.rng.below(self.members.len());
        let (runs, host) = (self.nodes[node].process.is_some(), Host::Node(node));
        let of_member = Host::Member(member);
        match self.env.rng.below(100) {
            0..10 if runs => self.stop_agent(node, CrashKind::Killed),
            10..22 if runs => self.stop_agent(node, CrashKind::PowerLoss),
            22..29 if self.env.is_awake(host) => self.pause(host),
            29..36 if self.members[member].is_some() => self.restart_member(member),
            36..43 if self.env.is_awake(of_member) => self.pause(of_member),
            43..56 => self.partition(node, member),
            56..61 => self.lose_connection(),
            61..70 => self.disk_fault(node),
            70..76 => self.damage_memory(node),
            76..79 => {
                let (device, which) = (self.env.rng.below(self.env.setup.disks), self.env.rng.next());
                self.nodes[node].disks[device].rot(which);
                self.env.count("rot");
            }
            79..84 if runs => self.kill_engine(node),
            84.. => self.store_fault(),
            _ => {}
        }
    }

    /// Begins changes of failure domains in some simulations.
    pub(crate) fn begin_domain_changes(&mut self, seed: u64) {
        self.env.domains = Rng::new(seed ^ DOMAINS_STREAM);
        if self.env.domains.chance(DOMAINS_PERMILLE) {
            let delay = self.env.domains.millis(DOMAIN_EVERY_MS);
            self.env.after(delay, Action::Domain);
        }
    }

    /// Changes the failure domain of a node, and draws the next change.
    pub(crate) fn change_domain(&mut self) {
        if self.env.calm {
            return;
        }
        let delay = self.env.domains.millis(DOMAIN_EVERY_MS);
        self.env.after(delay, Action::Domain);
        let node = self.env.domains.below(self.nodes.len());
        self.nodes[node].failure_domain = self.env.domains.one_of(&["", "a", "b"]).to_owned();
        if self.nodes[node].process.is_some() {
            self.env.later(node, Duration::ZERO, AgentStep::DomainChanged);
        }
    }

    pub(crate) fn repair(&mut self, repair: Repair) {
        match repair {
            Repair::StartAgent(node) if self.nodes[node].process.is_none() => {
                self.start_agent(node);
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

    /// Fails the power of a node, unless faults have ended or the power has failed already.
    pub(crate) fn outage(&mut self, node: usize) {
        if !self.env.calm && self.nodes[node].process.is_some() {
            self.stop_agent(node, CrashKind::PowerLoss);
        }
    }

    /// `SIGKILL` or power loss; the agent restarts after a while on the surviving contents of its disks.
    fn stop_agent(&mut self, node: usize, death: CrashKind) {
        self.env.trace.note(|| format!("node {node}: {death:?}"));
        if death == CrashKind::Killed {
            self.env.break_lines(Host::Node(node));
        }
        let Some((_, running)) = self.end_agent(node) else { return };
        self.env.host_mut(Host::Node(node)).powered = death == CrashKind::Killed;
        self.env.count(if death == CrashKind::Killed { "kills" } else { "power losses" });
        for (device, running) in running.into_iter().enumerate() {
            let disk = &mut self.nodes[node].disks[device];
            match death {
                CrashKind::Killed => disk.abandon(running, &mut self.env.rng),
                CrashKind::PowerLoss => disk.power_loss(running, &mut self.env.rng),
            }
        }
        self.assert_durable_blocks_survive(node);
        self.replace_lost_disks(node);
        let delay = self.env.rng.millis(50..3000);
        self.env.after(delay, Action::Repair(Repair::StartAgent(node)));
    }

    /// Checks that blocks that were reported durable are readable on the disks, except on disks that were
    /// lost or damaged.
    fn assert_durable_blocks_survive(&self, node: usize) {
        let place = &self.nodes[node];
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
                    content.is_some_and(|tag| self.truth[&key].contains(&tag))
                        && payload.len() == layout_of(&key).layers() as usize
                };
                let excused = disk.health.lost || is_rotten(disk.read(block.page).1);
                if excused || readable(&block) {
                    kept.insert(block.key);
                }
            }
        }
        let missing: Vec<_> = place.reported_durable.difference(&kept).collect();
        assert!(missing.is_empty(), "node {node}: reported durable but lost: {missing:?}");
    }

    fn replace_lost_disks(&mut self, node: usize) {
        let identity = self.env.rng.next();
        for (device, disk) in self.nodes[node].disks.iter_mut().enumerate() {
            if disk.health.lost {
                *disk = Disk::format(disk.bytes(), device as u8, identity);
            }
        }
    }

    /// `SIGSTOP` and later `SIGCONT`; or the suspension of the machine with its clock.
    fn pause(&mut self, host: Host) {
        let time = Duration::from_millis(self.env.rng.one_of(&[300, 2000, 10_000]));
        let ahead = self.env.rng.one_of(&[500_000, 20_000_000]);
        let how = self.env.rng.one_of(&[PauseClock::Runs, PauseClock::Stops, PauseClock::Jumps(ahead)]);
        self.env.stop(host);
        self.env.count(match host {
            Host::Node(_) => "pauses",
            Host::Member(_) => "member pauses",
            Host::Store => "store pauses",
        });
        self.env.after(time, Action::Repair(Repair::Resume(host, how)));
    }

    fn restart_member(&mut self, member: usize) {
        self.at_member(member, |running, env| running.kill(env));
        self.env.count("member restarts");
        let delay = self.env.rng.millis(20..5000);
        self.env.after(delay, Action::Repair(Repair::StartMember(member)));
    }

    fn store_fault(&mut self) {
        let delay = self.env.rng.millis(50..5000);
        match self.env.rng.below(100) {
            0..30 if self.env.runs(Host::Store) => {
                self.store_process.kill(&mut self.env);
                self.env.count("store restarts");
                self.env.after(delay, Action::Repair(Repair::StartStore));
            }
            30..45 if self.env.is_awake(Host::Store) => self.pause(Host::Store),
            45..65 => {
                self.store_process.slow = true;
                self.env.count("slow stores");
                self.env.after(delay, Action::Repair(Repair::FastStore));
            }
            65..90 => {
                self.store_process.compacting = true;
                self.env.count("compactions");
                // Leaves a member that reads the list of members again much time in which it can miss a
                // change.
                if self.env.rng.chance(500) {
                    self.store_process.slow = true;
                    self.env.break_lines(Host::Store);
                }
                self.env.after(delay, Action::Repair(Repair::KeepHistory));
            }
            90.. => {
                self.store_process.wipe(&mut self.env);
                self.env.count("store wipes");
            }
            _ => {}
        }
    }

    /// Two machines do not reach each other: an agent and a member, a member and the store, or any.
    fn partition(&mut self, node: usize, member: usize) {
        let hosts = self.env.hosts.hosts();
        let (a, b) = match self.env.rng.below(10) {
            0..4 => (Host::Node(node), Host::Member(member)),
            4..7 => (Host::Member(member), Host::Store),
            _ => (Host::Node(node), self.env.rng.one_of(&hosts)),
        };
        if a == b || self.env.network.is_cut(a, b) {
            return;
        }
        self.env.network.cut(a, b);
        self.env.count(match (a, b) {
            (Host::Member(_), Host::Store) => "members cut off from the store",
            _ => "partitions",
        });
        let delay = self.env.rng.millis(50..9000);
        self.env.after(delay, Action::Repair(Repair::Heal(a, b)));
    }

    fn lose_connection(&mut self) {
        if let Some(line) = self.env.network.any(self.env.rng.next()) {
            self.env.break_line(line);
            self.env.count("connections lost");
        }
    }

    fn disk_fault(&mut self, node: usize) {
        let device = self.env.rng.below(self.env.setup.disks);
        let (health, what) = match self.env.rng.below(10) {
            0..5 => (Health { slowness: self.env.rng.one_of(&[20, 300, 2000]), ..HEALTHY }, "slow disks"),
            5..9 => (Health { errors_permille: self.env.rng.one_of(&[20, 200]), ..HEALTHY }, "bad media"),
            _ => (Health { lost: true, ..HEALTHY }, "lost disks"),
        };
        let known = &mut self.nodes[node].disks[device].health;
        *known = Health { lost: health.lost || known.lost, ..health };
        self.env.count(what);
        let delay = self.env.rng.millis(100..3000);
        self.env.after(delay, Action::Repair(Repair::Disk(node, device)));
    }

    fn damage_memory(&mut self, node: usize) {
        let which = [(); 3].map(|()| self.env.rng.next());
        if let Some(process) = &mut self.nodes[node].process {
            which.into_iter().for_each(|which| process.memory.damage(which));
            self.env.count("damaged memory");
            self.check_readers(node);
        }
    }

    fn kill_engine(&mut self, node: usize) {
        let sessions: Vec<SessionId> = self.process(node).sessions.keys().copied().collect();
        if !sessions.is_empty() {
            let session = self.env.rng.one_of(&sessions);
            self.close_session(node, session);
            self.env.count("engine deaths");
        }
    }
}

const HEALTHY: Health = Health { lost: false, errors_permille: 0, slowness: 1 };
