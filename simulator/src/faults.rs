//! What breaks, when, and how it is made whole again.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_policy::{BlockKey, SessionId, SlotSet};

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
    Resume(usize),
    StartMember,
    Slots,
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
        let running = self.nodes[node].process.is_some();
        match self.rng.below(100) {
            0..14 if running => self.stop_agent(node, Death::Killed),
            14..30 if running => self.stop_agent(node, Death::PowerLoss),
            30..38 if running && !self.nodes[node].paused => self.pause(node),
            38..44 if self.member.is_some() => self.restart_member(),
            44..50 if self.member.is_some() => self.move_slots(),
            50..60 => self.partition(node),
            60..68 => self.lose_connection(),
            68..80 => self.trouble_disk(node),
            80..88 => self.damage_memory(node),
            88..92 => {
                let (device, which) = (self.rng.below(self.setup.disks), self.rng.next());
                self.nodes[node].disks[device].rot(which);
                self.count("rot");
            }
            92.. if running => self.kill_engine(node),
            _ => {}
        }
    }

    pub(crate) fn repair(&mut self, repair: Repair) {
        match repair {
            Repair::StartAgent(node) if self.nodes[node].process.is_none() => self.start_agent(node),
            Repair::StartAgent(_) => {}
            Repair::Resume(node) => self.resume(node),
            Repair::StartMember if self.member.is_none() => self.start_member(),
            Repair::StartMember => {}
            Repair::Slots => self.own(&SlotSet::ALL),
            Repair::Heal(a, b) => {
                for (line, to, message) in self.network.heal(a, b) {
                    self.send(line, to, message);
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
        self.calm = true;
        let hosts = self.hosts();
        for (at, a) in hosts.iter().enumerate() {
            hosts[at + 1..].iter().for_each(|b| self.repair(Repair::Heal(*a, *b)));
        }
        self.repair(Repair::StartMember);
        self.repair(Repair::Slots);
        for node in 0..self.nodes.len() {
            self.repair(Repair::Resume(node));
            (0..self.setup.disks).for_each(|device| self.repair(Repair::Disk(node, device)));
            self.repair(Repair::StartAgent(node));
        }
    }

    fn hosts(&self) -> Vec<Host> {
        (0..self.nodes.len()).map(Host::Node).chain([Host::Member]).collect()
    }

    /// `SIGKILL` or power loss; a while later the agent starts again on what its disks have kept.
    fn stop_agent(&mut self, node: usize, death: Death) {
        self.trace.note(|| format!("node {node}: {death:?}"));
        if death == Death::Killed {
            self.break_lines(Host::Node(node));
        }
        let Some((_, running)) = self.end_agent(node) else { return };
        self.nodes[node].powered = death == Death::Killed;
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

    /// `SIGSTOP`, and `SIGCONT` after a while.
    fn pause(&mut self, node: usize) {
        let time = Duration::from_millis(self.rng.one_of(&[300, 2000, 10_000]));
        self.nodes[node].paused = true;
        self.count("pauses");
        self.after(time, Action::Repair(Repair::Resume(node)));
    }

    fn resume(&mut self, node: usize) {
        let place = &mut self.nodes[node];
        if !place.paused {
            return;
        }
        (place.paused, place.resumed) = (false, self.now);
        for action in std::mem::take(&mut place.deferred) {
            self.queue.push(self.now, action);
        }
    }

    fn restart_member(&mut self) {
        self.kill_member();
        self.count("member restarts");
        let delay = self.rng.millis(20..3000);
        self.after(delay, Action::Repair(Repair::StartMember));
    }

    /// Another member would own some of the slots for a while; here nobody does.
    fn move_slots(&mut self) {
        let (one_of, which) = (self.rng.one_of(&[2_u16, 3, 16]), self.rng.next() as u16);
        let left: SlotSet = SlotSet::ALL.iter().filter(|slot| slot % one_of != which % one_of).collect();
        self.own(&left);
        self.count("slots moved");
        let delay = self.rng.millis(1..3000);
        self.after(delay, Action::Repair(Repair::Slots));
    }

    fn own(&mut self, slots: &SlotSet) {
        if let Some(member) = &mut self.member {
            member.own(slots);
        }
    }

    fn partition(&mut self, node: usize) {
        let hosts = self.hosts();
        let (a, b) = (Host::Node(node), self.rng.one_of(&hosts));
        if a == b || self.network.is_cut(a, b) {
            return;
        }
        self.network.cut(a, b);
        self.count("partitions");
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
        let which = self.rng.next();
        if let Some(process) = &mut self.nodes[node].process {
            process.memory.damage(which);
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
