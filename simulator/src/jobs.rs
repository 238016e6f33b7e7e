//! Operations on a node's devices, and checks of blocks in DRAM: their durations and results.

use std::ops::Range;
use std::time::Duration;

use reprise_agent_core::effect::{ArenaSlot, BlockCheck, BlockRead, DeviceId};
use reprise_agent_core::event::{Event, FillError, FillUpdate, Integrity};
use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_agent_core::pool::{DeviceError, DeviceOp, DeviceOpKind};
use reprise_policy::{Layout, Tier};

use crate::disk::DiskWrite;
use crate::memory::verified;
use crate::node::payload;
use crate::setup::Variant;
use crate::simulation::{AgentStep, Simulation};

/// Of 1000 reads of a lost device: those whose slot the device may still write to.
const STRANDED_PERMILLE: u64 = 200;

/// An operation whose end is an event.
#[derive(Debug)]
pub(crate) enum Job {
    Device { device: DeviceId, op: DeviceOp, covered: u64 },
    Read { device: DeviceId, read: BlockRead, layout: Layout, layers: u32 },
    Check(BlockCheck),
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
        }
    }
}

impl Simulation {
    pub(crate) fn begin_job(&mut self, node: usize, job: Job) {
        let process = self.process(node);
        let number = process.jobs_begun;
        process.jobs_begun += 1;
        let slowness = match &job {
            Job::Device { device, .. } | Job::Read { device, .. } => {
                self.nodes[node].disks[usize::from(device.0)].health.slowness
            }
            Job::Check(_) => 1,
        };
        self.process(node).jobs.insert(number, job);
        let time = self.job_time(slowness);
        self.env.later(node, time, AgentStep::Job(number));
    }

    fn job_time(&mut self, slowness: u32) -> Duration {
        self.env.rng.micros(30..500) * slowness
    }

    /// Ends a job, or runs its next step.
    pub(crate) fn advance_job(&mut self, node: usize, number: u64) {
        let job = self.process(node).jobs.remove(&number).expect("every job is scheduled once");
        match job {
            Job::Device { device, op, covered } => self.end_device_op(node, device, &op, covered),
            Job::Read { device, read, layout, layers } => {
                let to = layers + 1 + self.env.rng.below((layout.layers() - layers) as usize) as u32;
                if let Some(event) = self.read_on(node, (device, read), layout, layers..to) {
                    if to < layout.layers()
                        && !matches!(event, Event::Fill { update: FillUpdate::Failed(_), .. })
                    {
                        let slowness = self.disk(node, device).health.slowness;
                        self.process(node)
                            .jobs
                            .insert(number, Job::Read { device, read, layout, layers: to });
                        let time = self.job_time(slowness);
                        self.env.later(node, time, AgentStep::Job(number));
                    }
                    self.apply(node, event);
                }
            }
            Job::Check(check) => {
                let layers = self.process(node).memory.layers(check.slot);
                let intact = verified(layers, 0, &check.layout, &check.checksums).is_some();
                let integrity = if intact { Integrity::Intact } else { Integrity::Damaged };
                self.apply(node, Event::CheckDone { check: check.check, integrity });
            }
        }
    }

    fn end_device_op(&mut self, node: usize, device: DeviceId, op: &DeviceOp, covered: u64) {
        let health = self.disk(node, device).health;
        let fails = health.errors_permille > 0 && self.env.rng.chance(health.errors_permille);
        let written = DiskWrite::of(&op.kind, payload(&self.process(node).memory, &op.kind));
        let result = match written {
            _ if health.lost => Err(DeviceError::Lost),
            Some(written) if fails => {
                let torn = written.torn(&mut self.env.rng);
                self.disk(node, device).complete(torn);
                self.env.count("media errors");
                Err(DeviceError::Media)
            }
            None if fails => Err(DeviceError::Media),
            Some(written) => {
                self.disk(node, device).complete(written);
                Ok(())
            }
            None => {
                if self.env.setup.variant != Variant::DurableBeforeSync {
                    self.disk(node, device).synced(covered);
                }
                Ok(())
            }
        };
        self.apply(node, Event::DeviceDone { device, token: op.token, result });
    }

    fn read_on(
        &mut self,
        node: usize,
        from: (DeviceId, BlockRead),
        layout: Layout,
        layers: Range<u32>,
    ) -> Option<Event> {
        let (device, read) = from;
        let fill = read.fill;
        let failed = |error| Some(Event::Fill { fill, update: FillUpdate::Failed(error) });
        let health = self.disk(node, device).health;
        if health.lost {
            let stranded = self.env.rng.chance(STRANDED_PERMILLE);
            if stranded {
                self.process(node).memory.strand(read.slot);
            }
            return failed(if stranded { FillError::Stranded } else { FillError::Device });
        }
        if health.errors_permille > 0 && self.env.rng.chance(health.errors_permille) {
            self.env.count("media errors");
            return failed(FillError::Device);
        }
        let (page, payload) = self.disk(node, device).read(read.page);
        let span = layers.start as usize..layers.end as usize;
        let tags = payload.get(span).map(<[u64]>::to_vec);
        let BlockRead { key, generation, header_crc, .. } = read;
        let expected = ExpectedHeader { key, generation, header_crc };
        let (Ok(header), Some(tags)) = (decode_header(&page, &expected), tags) else {
            return failed(FillError::Corrupt);
        };
        let right = verified(&tags, layers.start, &layout, &header.checksums).is_some();
        let all = layout.layers();
        self.process(node).memory.write(read.slot, all, layers.clone(), &tags);
        if !right && self.env.setup.variant != Variant::ReadsUnverified {
            return failed(FillError::Corrupt);
        }
        let checksums = (layers.start == 0).then_some(header.checksums);
        let update = FillUpdate::Layers { layers: layers.end, checksums, tier: Tier::Nvme };
        Some(Event::Fill { fill, update })
    }
}
