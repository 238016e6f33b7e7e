//! Operations on a node's devices, and checks of blocks in DRAM: their durations and results.

use std::collections::BTreeMap;
use std::ops::Range;

use reprise_agent_core::effect::{ArenaSlot, BlockCheck, BlockRead, DeviceId, RegionId};
use reprise_agent_core::event::{Event, FillError, FillUpdate, Integrity, Renewal};
use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_agent_core::pool::{DeviceError, DeviceOp, DeviceOpKind};
use reprise_policy::{Layout, Tier};

use crate::disk::{Disk, DiskWrite};
use crate::environment::Environment;
use crate::memory::{Memory, verified};
use crate::setup::Variant;
use crate::simulation::AgentStep;
use crate::timed;

/// Of 1000 reads of a lost device: those whose slot the device may still write to.
const STRANDED_PERMILLE: u64 = 200;

/// The operations of one agent that have not ended.
#[derive(Debug)]
pub(crate) struct Jobs {
    node: usize,
    pub(crate) running: BTreeMap<u64, Job>,
    begun: u64,
}

/// An operation whose end is an event.
#[derive(Debug)]
pub(crate) enum Job {
    Device {
        device: DeviceId,
        op: DeviceOp,
        covered: u64,
    },
    Read {
        device: DeviceId,
        read: BlockRead,
        layout: Layout,
        layers: u32,
    },
    Check(BlockCheck),
    /// The replacement of a region's memory.
    Renew(RegionId),
}

impl Job {
    /// Returns the slot that the operation reads or writes.
    pub(crate) fn slot(&self) -> Option<ArenaSlot> {
        match self {
            Job::Device { op, .. } => match &op.kind {
                DeviceOpKind::WriteBlock { slot, .. } => Some(*slot),
                DeviceOpKind::WritePages { .. } | DeviceOpKind::WriteHeader { .. } | DeviceOpKind::Sync => {
                    None
                }
            },
            Job::Read { read, .. } => Some(read.slot),
            Job::Check(check) => Some(check.slot),
            Job::Renew(_) => None,
        }
    }
}

impl Jobs {
    pub(crate) fn new(node: usize) -> Jobs {
        Jobs { node, running: BTreeMap::new(), begun: 0 }
    }

    pub(crate) fn begin(&mut self, env: &mut Environment, disks: &[Disk], job: Job) {
        let number = self.begun;
        self.begun += 1;
        let slowness = match &job {
            Job::Device { device, .. } | Job::Read { device, .. } => {
                disks[usize::from(device.0)].health.slowness
            }
            Job::Check(_) | Job::Renew(_) => 1,
        };
        if !timed::begin_job(env, self.node, number, &job) {
            self.schedule(env, number, slowness);
        }
        self.running.insert(number, job);
    }

    fn schedule(&self, env: &mut Environment, number: u64, slowness: u32) {
        let time = env.rng.micros(30..500) * slowness;
        env.later(self.node, time, AgentStep::Job(number));
    }

    /// Returns the writes to a device that have not ended.
    pub(crate) fn writes<'a>(
        &'a self,
        device: usize,
        memory: &'a Memory,
    ) -> impl Iterator<Item = DiskWrite> + 'a {
        self.running.values().filter_map(move |job| match job {
            Job::Device { device: of, op, .. } if usize::from(of.0) == device => written(op, memory),
            _ => None,
        })
    }

    /// Ends a job, or runs its next step; returns the event for the core.
    pub(crate) fn advance(
        &mut self,
        env: &mut Environment,
        number: u64,
        disks: &mut [Disk],
        memory: &mut Memory,
    ) -> Event {
        let job = self.running.remove(&number).expect("every job is scheduled once");
        match job {
            Job::Device { device, op, covered } => {
                let disk = &mut disks[usize::from(device.0)];
                end_device_op(env, disk, memory, (device, &op, covered))
            }
            Job::Read { device, read, layout, layers } => {
                let disk = &disks[usize::from(device.0)];
                let to = match env.timed {
                    Some(_) => layout.layers(),
                    None => layers + 1 + env.rng.below((layout.layers() - layers) as usize) as u32,
                };
                let event = read_on(env, disk, memory, (read, layout, layers..to));
                if to < layout.layers() && !matches!(event, Event::Fill { update: FillUpdate::Failed(_), .. })
                {
                    self.running.insert(number, Job::Read { device, read, layout, layers: to });
                    self.schedule(env, number, disk.health.slowness);
                }
                event
            }
            Job::Renew(region) => {
                memory.renew(region);
                Event::RegionRenewed { region, renewal: Renewal::Done }
            }
            Job::Check(check) => {
                let layers = memory.layers(check.slot);
                let intact = verified(layers, 0, &check.layout, &check.checksums).is_some();
                let integrity = if intact { Integrity::Intact } else { Integrity::Damaged };
                Event::CheckDone { check: check.check, integrity }
            }
        }
    }
}

/// Returns the data that an operation writes.
fn written(op: &DeviceOp, memory: &Memory) -> Option<DiskWrite> {
    let payload = match &op.kind {
        DeviceOpKind::WriteBlock { slot, .. } => memory.layers(*slot),
        DeviceOpKind::WritePages { .. } | DeviceOpKind::WriteHeader { .. } | DeviceOpKind::Sync => &[],
    };
    DiskWrite::of(&op.kind, payload)
}

fn end_device_op(
    env: &mut Environment,
    disk: &mut Disk,
    memory: &Memory,
    (device, op, covered): (DeviceId, &DeviceOp, u64),
) -> Event {
    let health = disk.health;
    let fails = health.errors_permille > 0 && env.rng.chance(health.errors_permille);
    let result = match written(op, memory) {
        _ if health.lost => Err(DeviceError::Lost),
        Some(written) if fails => {
            disk.complete(written.torn(&mut env.rng));
            env.count("media errors");
            Err(DeviceError::Media)
        }
        None if fails => Err(DeviceError::Media),
        Some(written) => {
            match env.setup.variant {
                Variant::WritesMisdirected => disk.complete_misdirected(written, env.rng.next()),
                _ => disk.complete(written),
            }
            Ok(())
        }
        None => {
            if env.setup.variant != Variant::DurableBeforeSync {
                disk.synced(covered);
            }
            Ok(())
        }
    };
    Event::DeviceDone { device, token: op.token, result }
}

fn read_on(
    env: &mut Environment,
    disk: &Disk,
    memory: &mut Memory,
    (read, layout, layers): (BlockRead, Layout, Range<u32>),
) -> Event {
    let fill = read.fill;
    let failed = |error| Event::Fill { fill, update: FillUpdate::Failed(error) };
    let health = disk.health;
    if health.lost {
        let stranded = env.rng.chance(STRANDED_PERMILLE);
        if stranded {
            memory.strand(read.slot);
        }
        return failed(if stranded { FillError::Stranded } else { FillError::Device });
    }
    if health.errors_permille > 0 && env.rng.chance(health.errors_permille) {
        env.count("media errors");
        return failed(FillError::Device);
    }
    let (page, payload) = disk.read(read.page);
    let span = layers.start as usize..layers.end as usize;
    let tags = payload.get(span).map(<[u64]>::to_vec);
    let BlockRead { key, generation, header_crc, .. } = read;
    let expected = ExpectedHeader { key, generation, header_crc };
    let (Ok(header), Some(tags)) = (decode_header(&page, &expected), tags) else {
        return failed(FillError::Corrupt);
    };
    let right = verified(&tags, layers.start, &layout, &header.checksums).is_some();
    memory.write(read.slot, layout.layers(), layers.clone(), &tags);
    if !right && env.setup.variant != Variant::ReadsUnverified {
        return failed(FillError::Corrupt);
    }
    let checksums = (layers.start == 0).then_some(header.checksums);
    let update = FillUpdate::Layers { layers: layers.end, checksums, tier: Tier::Nvme };
    Event::Fill { fill, update }
}
