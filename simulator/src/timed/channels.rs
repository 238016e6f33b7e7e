//! Channels of all nodes, and transfers over them whose end is an action of the simulation.
//!
//! A transfer occupies one or more channels at the same time and ends with the slowest. Channels are those of the timed
//! world ([`crate::serving::channel`]), in nanoseconds; an end is rounded up to the next microsecond of this world.

use reprise_policy::Tick;

use crate::queue::Queue;
use crate::serving::channel::{Channel, Totals, Transfer};
use crate::serving::events::Nanos;
use crate::serving::profiles::{Hardware, Rate};
use crate::simulation::Action;

/// Nanoseconds of a tick.
const TICK: u64 = 1000;

/// A channel of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Path {
    /// Link from DRAM to the accelerator.
    LinkIn,
    /// Link from the accelerator to DRAM.
    LinkOut,
    /// Bytes of host memory.
    Dram,
    /// Reads of the SSD.
    NvmeRead,
    /// Writes of the SSD.
    NvmeWrite,
    /// Network from other nodes.
    NetworkIn,
    /// Network to other nodes.
    NetworkOut,
}

impl Path {
    /// All channels of a node, in the order of their numbers.
    pub const ALL: [Path; 7] = [
        Path::LinkIn,
        Path::LinkOut,
        Path::Dram,
        Path::NvmeRead,
        Path::NvmeWrite,
        Path::NetworkIn,
        Path::NetworkOut,
    ];

    /// Name of the channel in reports.
    pub fn name(self) -> &'static str {
        match self {
            Path::LinkIn => "link_in",
            Path::LinkOut => "link_out",
            Path::Dram => "dram",
            Path::NvmeRead => "nvme_read",
            Path::NvmeWrite => "nvme_write",
            Path::NetworkIn => "network_in",
            Path::NetworkOut => "network_out",
        }
    }

    fn rate(self, hardware: &Hardware) -> Rate {
        match self {
            Path::LinkIn | Path::LinkOut => hardware.link,
            Path::Dram => hardware.dram,
            Path::NvmeRead => hardware.nvme_read,
            Path::NvmeWrite => hardware.nvme_write,
            // The latency is that of the messages, which follow the bytes.
            Path::NetworkIn | Path::NetworkOut => Rate { latency_nanos: 0, ..hardware.network },
        }
    }
}

/// Part of a transfer: bytes on a channel of a node.
pub(crate) type Leg = (usize, Path, u64);

/// The channels of all nodes; see the module.
#[derive(Debug)]
pub(crate) struct Channels {
    /// Those of a node follow each other, in the order of [`Path::ALL`].
    channels: Vec<Scheduled>,
    transfers: Vec<Option<Pending>>,
    vacant: Vec<usize>,
    ended: Vec<(Nanos, Transfer)>,
}

#[derive(Debug)]
struct Scheduled {
    channel: Channel,
    /// Time of the next scheduled poll.
    due: Option<Tick>,
}

/// A transfer, and what follows its end.
#[derive(Debug)]
struct Pending {
    legs: usize,
    then: Action,
}

impl Channels {
    /// Creates the idle channels of some nodes.
    pub(crate) fn new(nodes: usize, hardware: &Hardware) -> Channels {
        let of_node = || {
            Path::ALL.map(|path| {
                let rate = path.rate(hardware);
                Scheduled { channel: Channel::new(rate.bytes_per_second, rate.latency_nanos), due: None }
            })
        };
        let channels = (0..nodes).flat_map(|_| of_node()).collect();
        Channels { channels, transfers: Vec::new(), vacant: Vec::new(), ended: Vec::new() }
    }

    /// Starts a transfer, whose end schedules an action.
    pub(crate) fn start(&mut self, queue: &mut Queue<Action>, now: Tick, legs: &[Leg], then: Action) {
        let pending = Some(Pending { legs: legs.len(), then });
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.transfers.push(None);
            self.transfers.len() - 1
        });
        self.transfers[number] = pending;
        for (node, path, bytes) in legs {
            let at = node * Path::ALL.len() + *path as usize;
            let channel = &mut self.channels[at].channel;
            channel.advance(nanos(now), &mut self.ended);
            channel.start(nanos(now), *bytes, Transfer(number as u64));
            self.schedule(queue, now, at);
        }
        self.end_transfers(queue, now);
    }

    /// Polls a channel, at the scheduled time.
    pub(crate) fn look(&mut self, queue: &mut Queue<Action>, now: Tick, at: usize) {
        let scheduled = &mut self.channels[at];
        scheduled.due = scheduled.due.filter(|due| *due > now);
        scheduled.channel.advance(nanos(now), &mut self.ended);
        self.schedule(queue, now, at);
        self.end_transfers(queue, now);
    }

    /// Schedules the next poll, unless an earlier one is scheduled.
    fn schedule(&mut self, queue: &mut Queue<Action>, now: Tick, at: usize) {
        let scheduled = &mut self.channels[at];
        let Some(end) = scheduled.channel.next_end() else { return };
        let due = Tick(end.0.div_ceil(TICK)).max(now);
        if scheduled.due.is_none_or(|earlier| due < earlier) {
            scheduled.due = Some(due);
            queue.push(due, Action::Channel(at));
        }
    }

    fn end_transfers(&mut self, queue: &mut Queue<Action>, now: Tick) {
        for (_, Transfer(number)) in self.ended.drain(..) {
            let number = number as usize;
            let place = &mut self.transfers[number];
            let pending = place.as_mut().expect("a transfer ends once, after its legs");
            pending.legs -= 1;
            if pending.legs > 0 {
                continue;
            }
            if let Some(pending) = place.take() {
                queue.push(now, pending.then);
            }
            self.vacant.push(number);
        }
    }

    /// Totals of a channel over all nodes.
    pub(crate) fn totals(&self, path: Path) -> Totals {
        let of_path = self.channels.iter().skip(path as usize).step_by(Path::ALL.len());
        of_path.map(|scheduled| scheduled.channel.totals).fold(Totals::default(), |sum, one| Totals {
            bytes: sum.bytes + one.bytes,
            transfers: sum.transfers + one.transfers,
            busy: sum.busy + one.busy,
            requested: sum.requested + one.requested,
        })
    }
}

fn nanos(at: Tick) -> Nanos {
    Nanos(at.0 * TICK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfer_ends_with_its_slowest_channel_and_shares_it() {
        let hardware = Hardware::named("h100").expect("valid");
        let mut channels = Channels::new(2, &hardware);
        let mut queue = Queue::new();
        let bytes = 64 << 20;
        for node in [0, 1] {
            // Both read from the SSD of the first node; the memory of the second one is idle otherwise.
            let legs = [(0, Path::NvmeRead, bytes), (node, Path::Dram, bytes)];
            channels.start(&mut queue, Tick(0), &legs, Action::Outage(node));
        }
        let (mut ends, mut last) = (Vec::new(), Tick(0));
        while let Some((at, action)) = queue.pop(Tick(u64::MAX)) {
            last = at;
            match action {
                Action::Channel(number) => channels.look(&mut queue, at, number),
                Action::Outage(node) => ends.push(node),
                other => unreachable!("{other:?}"),
            }
        }
        let alone = hardware.nvme_read.transfer_nanos(2 * bytes).div_ceil(TICK);
        assert!(last.0.abs_diff(alone) <= 1, "{last:?} instead of {alone}");
        assert_eq!(ends, [0, 1]);
        assert_eq!(channels.totals(Path::NvmeRead).bytes, 2 * bytes);
        assert_eq!(channels.totals(Path::Dram).bytes, 2 * bytes);
        assert_eq!(channels.totals(Path::LinkIn).bytes, 0);
    }
}
