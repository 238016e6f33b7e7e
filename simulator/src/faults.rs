//! What breaks, when, and how it is made whole again.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_policy::{BlockKey, SessionId};

use crate::clock::Stopped;
use crate::disk::{Disk, Health};
use crate::memory::is_rotten;
use crate::memory::verified;
use crate::network::Host;
use crate::setup::layout_of;
use crate::world::{Action, World};

/// Something is made whole.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Repair {
    StartAgent(usize),
    StartMember(usize),
    StartStore,
    Resume(Host, Stopped),
    FastStore,
    KeepHistory,
    Heal(Host, Host),
    Disk(usize, usize),
}

/// How an agent's process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Death {
    Killed,
    PowerLoss,
}

impl World {
    /// Draws a fault, and the time of the next.
    pub(crate) fn fault(&mut self) {
        if self.calm {
            return;
        }
        let mean = self.setup.fault_every.as_micros() as u64;
        let delay = self.rng.micros(mean / 8..mean * 15 / 8);
        self.after(delay, Action::Fault);
        let node = self.rng.below(self.nodes.len());
        let member = self.rng.below(self.members.len());
        let (runs, host) = (self.nodes[node].process.is_some(), Host::Node(node));
        let of_member = Host::Member(member);
        match self.rng.below(100) {
            0..10 if runs => self.stop_agent(node, Death::Killed),
            10..22 if runs => self.stop_agent(node, Death::PowerLoss),
            22..29 if self.is_awake(host) => self.pause(host),
            29..36 if self.members[member].is_some() => self.restart_member(member),
            36..43 if self.is_awake(of_member) => self.pause(of_member),
            43..56 => self.partition(node, member),
            56..61 => self.lose_connection(),
            61..70 => self.trouble_disk(node),
            70..76 => self.damage_memory(node),
            76..79 => {
                let (device, which) = (self.rng.below(self.setup.disks), self.rng.next());
                self.nodes[node].disks[device].rot(which);
                self.count("rot");
            }
            79..84 if runs => self.kill_engine(node),
            84.. => self.trouble_store(),
            _ => {}
        }
    }

    pub(crate) fn repair(&mut self, repair: Repair) {
        match repair {
            Repair::StartAgent(node) if self.nodes[node].process.is_none() => {
                self.start_agent(node);
                // What an agent has just believed of its disks must be on them.
                if !self.calm && self.rng.below(2) == 0 {
                    let delay = self.rng.millis(1..50);
                    self.after(delay, Action::Outage(node));
                }
            }
            Repair::StartAgent(_) => {}
            Repair::StartMember(member) if self.members[member].is_none() => self.start_member(member),
            Repair::StartMember(_) => {}
            Repair::StartStore if !self.runs(Host::Store) => self.start_store(),
            Repair::StartStore => {}
            Repair::Resume(host, how) => self.go_on(host, how),
            Repair::FastStore => self.keeper.slow = false,
            Repair::KeepHistory => (self.keeper.compacting, self.keeper.slow) = (false, false),
            Repair::Heal(a, b) => {
                for (line, to, number, message) in self.network.heal(a, b) {
                    self.send_again((line, to), number, message);
                }
            }
            Repair::Disk(node, device) => {
                let health = &mut self.nodes[node].disks[device].health;
                *health = Health { lost: health.lost, ..WELL };
            }
        }
    }

    /// No more faults: everything is made whole.
    pub(crate) fn end_faults(&mut self) {
        (self.calm, self.network.calm) = (true, true);
        let hosts = self.places.hosts();
        for (at, a) in hosts.iter().enumerate() {
            self.repair(Repair::Resume(*a, Stopped::GoesOn));
            hosts[at + 1..].iter().for_each(|b| self.repair(Repair::Heal(*a, *b)));
        }
        for repair in [Repair::FastStore, Repair::KeepHistory, Repair::StartStore] {
            self.repair(repair);
        }
        (0..self.members.len()).for_each(|member| self.repair(Repair::StartMember(member)));
        for node in 0..self.nodes.len() {
            (0..self.setup.disks).for_each(|device| self.repair(Repair::Disk(node, device)));
            self.repair(Repair::StartAgent(node));
        }
    }

    /// The power fails, unless faults are over or it has failed already.
    pub(crate) fn outage(&mut self, node: usize) {
        if !self.calm && self.nodes[node].process.is_some() {
            self.stop_agent(node, Death::PowerLoss);
        }
    }

    /// `SIGKILL` or power loss; a while later the agent starts again on what its disks have kept.
    fn stop_agent(&mut self, node: usize, death: Death) {
        self.trace.note(|| format!("node {node}: {death:?}"));
        if death == Death::Killed {
            self.break_lines(Host::Node(node));
        }
        let Some((_, running)) = self.end_agent(node) else { return };
        self.place_mut(Host::Node(node)).powered = death == Death::Killed;
        self.count(if death == Death::Killed { "kills" } else { "power losses" });
        for (device, running) in running.into_iter().enumerate() {
            let disk = &mut self.nodes[node].disks[device];
            match death {
                Death::Killed => disk.abandon(running, &mut self.rng),
                Death::PowerLoss => disk.power_loss(running, &mut self.rng),
            }
        }
        self.assert_promises_kept(node);
        self.replace_lost_disks(node);
        let delay = self.rng.millis(50..3000);
        self.after(delay, Action::Repair(Repair::StartAgent(node)));
    }

    /// What was announced durable can be read from what the disks have kept, unless its disk is lost or has changed it.
    fn assert_promises_kept(&self, node: usize) {
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
        let missing: Vec<_> = place.promised.difference(&kept).collect();
        assert!(missing.is_empty(), "node {node}: told durable and gone: {missing:?}");
    }

    fn replace_lost_disks(&mut self, node: usize) {
        let identity = self.rng.next();
        for (device, disk) in self.nodes[node].disks.iter_mut().enumerate() {
            if disk.health.lost {
                *disk = Disk::format(disk.bytes(), device as u8, identity);
            }
        }
    }

    /// `SIGSTOP`, and `SIGCONT` after a while; or the machine is suspended with its clock.
    fn pause(&mut self, host: Host) {
        let time = Duration::from_millis(self.rng.one_of(&[300, 2000, 10_000]));
        let ahead = self.rng.one_of(&[500_000, 20_000_000]);
        let how = self.rng.one_of(&[Stopped::GoesOn, Stopped::Stands, Stopped::Jumps(ahead)]);
        self.stop(host);
        self.count(match host {
            Host::Node(_) => "pauses",
            Host::Member(_) => "member pauses",
            Host::Store => "store pauses",
        });
        self.after(time, Action::Repair(Repair::Resume(host, how)));
    }

    fn restart_member(&mut self, member: usize) {
        self.kill_member(member);
        self.count("member restarts");
        let delay = self.rng.millis(20..5000);
        self.after(delay, Action::Repair(Repair::StartMember(member)));
    }

    fn trouble_store(&mut self) {
        let delay = self.rng.millis(50..5000);
        match self.rng.below(100) {
            0..30 if self.runs(Host::Store) => {
                self.kill_store();
                self.count("store restarts");
                self.after(delay, Action::Repair(Repair::StartStore));
            }
            30..45 if self.is_awake(Host::Store) => self.pause(Host::Store),
            45..65 => {
                self.keeper.slow = true;
                self.count("slow stores");
                self.after(delay, Action::Repair(Repair::FastStore));
            }
            65..90 => {
                self.keeper.compacting = true;
                self.count("compactions");
                // Whoever reads the members anew has much time to miss something in.
                if self.rng.chance(500) {
                    self.keeper.slow = true;
                    self.break_lines(Host::Store);
                }
                self.after(delay, Action::Repair(Repair::KeepHistory));
            }
            90.. => {
                self.wipe_store();
                self.count("store wipes");
            }
            _ => {}
        }
    }

    /// Two machines do not reach each other: an agent and a member, a member and the store, or any.
    fn partition(&mut self, node: usize, member: usize) {
        let hosts = self.places.hosts();
        let (a, b) = match self.rng.below(10) {
            0..4 => (Host::Node(node), Host::Member(member)),
            4..7 => (Host::Member(member), Host::Store),
            _ => (Host::Node(node), self.rng.one_of(&hosts)),
        };
        if a == b || self.network.is_cut(a, b) {
            return;
        }
        self.network.cut(a, b);
        self.count(match (a, b) {
            (Host::Member(_), Host::Store) => "members cut off from the store",
            _ => "partitions",
        });
        let delay = self.rng.millis(50..9000);
        self.after(delay, Action::Repair(Repair::Heal(a, b)));
    }

    fn lose_connection(&mut self) {
        if let Some(line) = self.network.any(self.rng.next()) {
            self.break_line(line);
            self.count("connections lost");
        }
    }

    fn trouble_disk(&mut self, node: usize) {
        let device = self.rng.below(self.setup.disks);
        let (health, what) = match self.rng.below(10) {
            0..5 => (Health { slowness: self.rng.one_of(&[20, 300, 2000]), ..WELL }, "slow disks"),
            5..9 => (Health { errors_permille: self.rng.one_of(&[20, 200]), ..WELL }, "bad media"),
            _ => (Health { lost: true, ..WELL }, "lost disks"),
        };
        let known = &mut self.nodes[node].disks[device].health;
        *known = Health { lost: health.lost || known.lost, ..health };
        self.count(what);
        let delay = self.rng.millis(100..3000);
        self.after(delay, Action::Repair(Repair::Disk(node, device)));
    }

    fn damage_memory(&mut self, node: usize) {
        let which = [(); 3].map(|()| self.rng.next());
        if let Some(process) = &mut self.nodes[node].process {
            which.into_iter().for_each(|which| process.memory.damage(which));
            self.count("damaged memory");
            self.look_at(node);
        }
    }

    fn kill_engine(&mut self, node: usize) {
        let sessions: Vec<SessionId> = self.process(node).sessions.keys().copied().collect();
        if !sessions.is_empty() {
            let session = self.rng.one_of(&sessions);
            self.close_session(node, session);
            self.count("engine deaths");
        }
    }
}

const WELL: Health = Health { lost: false, errors_permille: 0, slowness: 1 };
