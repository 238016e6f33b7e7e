//! The channels of a node, and jobs that occupy several of them.
//!
//! A job has legs, one for each channel that it uses at the same time, and ends when all legs have ended: bytes are
//! forwarded while they arrive, so the slowest channel decides. Channels are shared and work-conserving
//! ([`super::channel`]).

use super::channel::{Channel, Totals, Transfer};
use super::events::{EventQueue, Nanos};
use super::profiles::Hardware;

/// Channels of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChannelKind {
    /// Operations of the accelerator, at the efficiency of its profile.
    Compute,
    /// Bytes of accelerator memory.
    Hbm,
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
    /// Network to other nodes.
    Network,
    /// Store behind all nodes.
    Cold,
}

impl ChannelKind {
    /// All channels, in the order of their numbers.
    pub const ALL: [ChannelKind; 9] = [
        ChannelKind::Compute,
        ChannelKind::Hbm,
        ChannelKind::LinkIn,
        ChannelKind::LinkOut,
        ChannelKind::Dram,
        ChannelKind::NvmeRead,
        ChannelKind::NvmeWrite,
        ChannelKind::Network,
        ChannelKind::Cold,
    ];

    /// Name of the channel in results.
    pub fn name(self) -> &'static str {
        match self {
            ChannelKind::Compute => "compute",
            ChannelKind::Hbm => "hbm",
            ChannelKind::LinkIn => "link_in",
            ChannelKind::LinkOut => "link_out",
            ChannelKind::Dram => "dram",
            ChannelKind::NvmeRead => "nvme_read",
            ChannelKind::NvmeWrite => "nvme_write",
            ChannelKind::Network => "network",
            ChannelKind::Cold => "cold",
        }
    }
}

/// Event of the timed world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The request with this number arrives.
    Arrival(u32),
    /// A channel has something to do, if no other call changed it since.
    Channel { kind: ChannelKind, stamp: u32 },
}

/// Events of an owner of channels.
pub(super) trait ChannelEvent {
    /// Event of a channel that has something to do, unless another call changed the channel since.
    fn of_channel(kind: ChannelKind, stamp: u32) -> Self;
}

impl ChannelEvent for Event {
    fn of_channel(kind: ChannelKind, stamp: u32) -> Event {
        Event::Channel { kind, stamp }
    }
}

#[derive(Clone, Copy, Debug)]
struct Job<P> {
    legs: u32,
    purpose: P,
}

/// All channels, and the jobs on them; `P` is the purpose of a job.
#[derive(Debug)]
pub(super) struct Fabric<P> {
    channels: [Channel; 9],
    stamps: [u32; 9],
    jobs: Vec<Option<Job<P>>>,
    free: Vec<u32>,
    ended: Vec<(Nanos, Transfer)>,
}

impl<P: Copy> Fabric<P> {
    /// Channels of some accelerators of a node. Each accelerator has its link; DRAM, SSD and network are shared.
    pub(super) fn new(hardware: &Hardware, accelerators: u32) -> Fabric<P> {
        let channels = ChannelKind::ALL.map(|kind| {
            let (rate, count) = match kind {
                ChannelKind::Compute => return compute(hardware, accelerators),
                ChannelKind::Hbm => (hardware.hbm, accelerators),
                ChannelKind::LinkIn | ChannelKind::LinkOut => (hardware.link, accelerators),
                ChannelKind::Dram => (hardware.dram, 1),
                ChannelKind::NvmeRead => (hardware.nvme_read, 1),
                ChannelKind::NvmeWrite => (hardware.nvme_write, 1),
                ChannelKind::Network => (hardware.network, 1),
                ChannelKind::Cold => (hardware.cold, 1),
            };
            Channel::new(rate.bytes_per_second * u64::from(count), rate.latency_nanos)
        });
        Fabric { channels, stamps: [0; 9], jobs: Vec::new(), free: Vec::new(), ended: Vec::new() }
    }

    /// Returns the channel of a kind.
    pub(super) fn channel(&self, kind: ChannelKind) -> &Channel {
        &self.channels[kind as usize]
    }

    /// Totals of all channels.
    pub(super) fn totals(&self) -> [Totals; 9] {
        std::array::from_fn(|index| self.channels[index].totals)
    }

    /// Starts a job with an amount on each of some channels; returns its number, which is valid until its end.
    pub(super) fn start<E: ChannelEvent>(
        &mut self,
        events: &mut EventQueue<E>,
        now: Nanos,
        legs: &[(ChannelKind, u64)],
        purpose: P,
    ) -> u32 {
        self.start_after(events, (now, 0), legs, purpose)
    }

    /// Starts a job that waits for some nanoseconds before it occupies its channels; returns its number.
    pub(super) fn start_after<E: ChannelEvent>(
        &mut self,
        events: &mut EventQueue<E>,
        (now, delay): (Nanos, u64),
        legs: &[(ChannelKind, u64)],
        purpose: P,
    ) -> u32 {
        let job = Some(Job { legs: legs.len() as u32, purpose });
        let number = match self.free.pop() {
            Some(number) => {
                self.jobs[number as usize] = job;
                number
            }
            None => {
                self.jobs.push(job);
                self.jobs.len() as u32 - 1
            }
        };
        for (kind, amount) in legs {
            let channel = &mut self.channels[*kind as usize];
            channel.advance(now, &mut self.ended);
            channel.start_after(now, delay, *amount, Transfer(u64::from(number)));
            self.schedule(events, now, *kind);
        }
        number
    }

    /// Smallest part of a job's legs that was served, in thousandths; `legs` are those of its start.
    pub(super) fn served_permille<E: ChannelEvent>(
        &mut self,
        events: &mut EventQueue<E>,
        now: Nanos,
        (number, legs): (u32, &[(ChannelKind, u64)]),
    ) -> u64 {
        let mut least = 1000;
        for (kind, amount) in legs {
            let channel = &mut self.channels[*kind as usize];
            channel.advance(now, &mut self.ended);
            let served = channel.served_bytes(Transfer(u64::from(number))).unwrap_or(*amount);
            least = least.min(u128::from(served) * 1000 / u128::from(*amount).max(1));
            self.schedule(events, now, *kind);
        }
        least as u64
    }

    /// Ends a job early, without its purpose. Call [`Fabric::served_permille`] before, at the same time.
    pub(super) fn cancel<E: ChannelEvent>(
        &mut self,
        events: &mut EventQueue<E>,
        now: Nanos,
        (number, legs): (u32, &[(ChannelKind, u64)]),
        ended: P,
    ) {
        let transfer = Transfer(u64::from(number));
        for (kind, _) in legs {
            let channel = &mut self.channels[*kind as usize];
            if channel.served_bytes(transfer).is_none() {
                continue;
            }
            channel.cancel(transfer);
            self.schedule(events, now, *kind);
            let job = self.jobs[number as usize].as_mut().expect("a leg of the job was active");
            job.legs -= 1;
            if job.legs == 0 {
                self.jobs[number as usize] = None;
                self.free.push(number);
            }
        }
        // Legs that have ended wait for the next event.
        if let Some(job) = &mut self.jobs[number as usize] {
            job.purpose = ended;
        }
    }

    /// Handles the event of a channel; appends the purposes of the jobs that ended.
    pub(super) fn due<E: ChannelEvent>(
        &mut self,
        events: &mut EventQueue<E>,
        now: Nanos,
        (kind, stamp): (ChannelKind, u32),
        ended: &mut Vec<P>,
    ) {
        if self.stamps[kind as usize] == stamp {
            self.channels[kind as usize].advance(now, &mut self.ended);
            self.schedule(events, now, kind);
        }
        for (_, transfer) in self.ended.drain(..) {
            let place = &mut self.jobs[transfer.0 as usize];
            let job = place.as_mut().expect("a transfer ends once, before its job");
            job.legs -= 1;
            if job.legs == 0 {
                ended.push(job.purpose);
                *place = None;
                self.free.push(transfer.0 as u32);
            }
        }
    }

    fn schedule<E: ChannelEvent>(&mut self, events: &mut EventQueue<E>, now: Nanos, kind: ChannelKind) {
        let stamp = &mut self.stamps[kind as usize];
        *stamp = stamp.wrapping_add(1);
        // Ends that a start has found wait for the next event, which is due now.
        let next = if self.ended.is_empty() { self.channels[kind as usize].next_end() } else { Some(now) };
        if let Some(at) = next {
            events.push(at, E::of_channel(kind, *stamp));
        }
    }
}

fn compute(hardware: &Hardware, accelerators: u32) -> Channel {
    let flops = hardware.flops * hardware.compute_efficiency * f64::from(accelerators);
    Channel::new((flops / FLOPS_PER_UNIT) as u64, 0)
}

/// Operations that count as one unit of the compute channel, so that long steps fit into 64 bits.
pub(super) const FLOPS_PER_UNIT: f64 = 1e3;
