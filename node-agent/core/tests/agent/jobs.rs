//! Jobs in flight and their results: device operations, reads, fetches, lookups, checks, placement queries
//! and offers.

use std::time::Duration;

use reprise_agent_core::effect::{
    ArenaSlot, BlockCheck, BlockCopy, BlockRead, DeviceId, FillId, LookupId, Offer, PlaceId, PlacementReason,
    RegionId, ServeId,
};
use reprise_agent_core::event::{Event, FillError, FillUpdate, Integrity, PeerEvent, Placement, Renewal};
use reprise_agent_core::extents::ExtentHolder;
use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_agent_core::pool::{DeviceError, DeviceOp, DeviceOpKind};
use reprise_policy::{BlockKey, Layout, NodeId, TenantId, Tier};

use crate::disk::DiskWrite;
use crate::extent_client::ExtentWrite;
use crate::harness::{Harness, layout_of};
use crate::memory::{Tag, checksums};
use crate::public::PUBLIC;

/// Operation in flight whose result is an event.
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
    Fetch {
        node: NodeId,
        tenant: TenantId,
        fill: FillId,
        key: BlockKey,
        slot: ArenaSlot,
        layout: Layout,
        layers: u32,
    },
    Lookup {
        lookup: LookupId,
        keys: Vec<BlockKey>,
    },
    Check(BlockCheck),
    Copy {
        copy: BlockCopy,
        layout: Layout,
    },
    Place {
        place: PlaceId,
        keys: Vec<BlockKey>,
        slot_bytes: u64,
        reason: PlacementReason,
    },
    Offer {
        node: NodeId,
        offer: Offer,
    },
    /// A client writes a payload.
    ExtentWrite(ExtentWrite),
    /// The runtime replaces the memory of a region.
    Renew(RegionId),
    /// The runtime waits for the end of a holder's I/O.
    AwaitExtents(ExtentHolder),
}

/// Progress of a fill.
struct Progress {
    slot: ArenaSlot,
    layout: Layout,
    layers: std::ops::Range<u32>,
    tag: Tag,
    tier: Tier,
}

impl Harness {
    /// Completes one job or a step of it, with random faults.
    pub(crate) fn advance(&mut self, job: usize) {
        let to = match &self.jobs[job] {
            Job::Read { layout, layers, .. } | Job::Fetch { layout, layers, .. } => {
                layers + 1 + self.rng.below((layout.layers() - layers) as usize) as u32
            }
            Job::Device { .. } | Job::Lookup { .. } | Job::Check(_) | Job::Renew(_) | Job::Copy { .. } => 0,
            Job::Place { .. } | Job::Offer { .. } | Job::ExtentWrite(_) | Job::AwaitExtents(_) => 0,
        };
        self.advance_to(job, to);
    }

    /// Completes one job, or advances a fill to a layer, with random faults.
    pub(crate) fn advance_to(&mut self, job: usize, to: u32) {
        match self.jobs.swap_remove(job) {
            Job::Device { device, op, covered } => self.end_device_op(device, &op, covered),
            Job::Read { device, read, layout, layers } => self.read_on(device, read, layout, layers..to),
            Job::Fetch { node, tenant, fill, key, slot, layout, layers } => {
                self.fetch_on((node, tenant), (fill, key, slot), layout, layers..to);
            }
            Job::Check(check) => self.end_check(&check),
            Job::Copy { copy, layout } => self.end_copy(&copy, &layout),
            Job::Place { place, keys, reason, .. } => self.end_place(place, &keys, reason),
            Job::Offer { node, offer } => self.end_offer(node, &offer),
            Job::ExtentWrite(write) => self.end_extent_write(&write),
            Job::Renew(region) => self.end_renewal(region),
            Job::AwaitExtents(holder) => self.end_await_extents(holder),
            Job::Lookup { lookup, keys } => {
                if self.rng.chance(self.faults.lookup) {
                    return self.apply(Event::LookupFailed { lookup });
                }
                let stale_permille = self.faults.directory_stale;
                let found =
                    keys.iter().map(|key| self.peers.find(key, &mut self.rng, stale_permille)).collect();
                self.apply(Event::LookupAnswered { lookup, found });
            }
        }
    }

    pub(crate) fn abort_serve(&mut self, serve: ServeId) {
        self.serves.remove(&serve);
        self.apply(Event::Peer(PeerEvent::ServeAborted { serve }));
    }

    /// Fails a read or fetch with an error.
    pub(crate) fn fail(&mut self, job: usize, error: FillError) {
        let update = FillUpdate::Failed(error);
        match self.jobs.swap_remove(job) {
            Job::Read { read, .. } => self.apply(Event::Fill { fill: read.fill, update }),
            Job::Copy { copy, .. } => self.apply(Event::Fill { fill: copy.fill, update }),
            Job::Fetch { fill, .. } => self.apply(Event::Peer(PeerEvent::Fill { fill, update })),
            other => panic!("{other:?} is not a fill"),
        }
    }

    /// Completes all jobs, and those that result from them.
    pub(crate) fn finish_jobs(&mut self) {
        while !self.jobs.is_empty() {
            let job = self.rng.below(self.jobs.len());
            self.advance(job);
            self.read_all();
        }
    }

    /// Completes all device operations of saves, and those that result; other jobs remain.
    pub(crate) fn finish_device_ops(&mut self) {
        while let Some(job) = self.jobs.iter().position(|job| matches!(job, Job::Device { .. })) {
            self.advance(job);
        }
    }

    /// Completes all jobs except reads and fetches, and those that result.
    pub(crate) fn finish_jobs_but_fills(&mut self) {
        let is_fill = |job: &Job| matches!(job, Job::Read { .. } | Job::Fetch { .. } | Job::Copy { .. });
        while let Some(job) = self.jobs.iter().position(|job| !is_fill(job)) {
            self.advance(job);
        }
    }

    /// Positions of reads and fetches.
    pub(crate) fn fills(&self) -> Vec<usize> {
        let is_fill = |job: &Job| matches!(job, Job::Read { .. } | Job::Fetch { .. } | Job::Copy { .. });
        (0..self.jobs.len()).filter(|at| is_fill(&self.jobs[*at])).collect()
    }

    /// Gives a region new memory, or reports a random failure.
    fn end_renewal(&mut self, region: RegionId) {
        let renewal = if self.rng.chance(self.faults.renewal) { Renewal::Failed } else { Renewal::Done };
        if renewal == Renewal::Done {
            self.memory.renew(region);
            self.region_tenants.remove(&region);
        }
        self.apply(Event::RegionRenewed { region, renewal });
    }

    /// Copies a block, if it matches its checksums.
    fn end_copy(&mut self, copy: &BlockCopy, layout: &Layout) {
        let BlockCopy { fill, from, into, checksums } = copy;
        let update = match self.memory.verify(*from, layout, checksums, layout.layers()) {
            _ if self.is_refused() => FillUpdate::Failed(FillError::Refused),
            Some(tag) => {
                self.memory.write(*into, layout, 0..layout.layers(), tag);
                FillUpdate::Layers { layers: layout.layers(), checksums: None, tier: Tier::Dram }
            }
            None => FillUpdate::Failed(FillError::Corrupt),
        };
        self.apply(Event::Fill { fill: *fill, update });
    }

    /// Reports the true state of the slot, or a random fault: the core trusts the result.
    fn end_check(&mut self, check: &BlockCheck) {
        let BlockCheck { check: id, slot, layout, checksums } = check;
        let integrity = if self.faults.check > 0 && self.rng.chance(self.faults.check) {
            [Integrity::Damaged, Integrity::Unknown][self.rng.below(2)]
        } else if self.memory.verify(*slot, layout, checksums, layout.layers()).is_some() {
            Integrity::Intact
        } else {
            Integrity::Damaged
        };
        self.apply(Event::CheckDone { check: *id, integrity });
    }

    /// Answers a placement query: correctly, or at random with an unknown or full target.
    fn end_place(&mut self, place: PlaceId, keys: &[BlockKey], reason: PlacementReason) {
        if self.is_unanswered() {
            return self.apply(Event::PlaceFailed { place });
        }
        let mut answers = Vec::new();
        for key in keys {
            let (on, to) = match reason {
                PlacementReason::Move(to) => (Some(to), to),
                PlacementReason::Hot | PlacementReason::Drain => (None, NodeId(1 + self.rng.below(3) as u16)),
            };
            let is_faulty = self.is_unanswered();
            answers.push(match self.peers.is_durable(key, on) {
                _ if is_faulty && self.rng.chance(500) => Placement::Unanswered,
                true => Placement::Enough,
                false if is_faulty => Placement::NoCapacity,
                false => Placement::To(to),
            });
        }
        self.apply(Event::PlaceAnswered { place, answers });
    }

    /// Answers an offer, with faults for some of its keys; the peer stores the accepted blocks at once.
    fn end_offer(&mut self, node: NodeId, offer: &Offer) {
        if self.is_unanswered() {
            return self.apply(Event::Peer(PeerEvent::OfferFailed { offer: offer.offer }));
        }
        let mut taken = Vec::new();
        for (at, key) in (0..).zip(&offer.keys) {
            assert_eq!(layout_of(key), offer.layout, "{key} is offered with its layout");
            if !self.is_unanswered() {
                taken.push(at);
                let tag = self.last_tag(key);
                self.peers.held.entry(node).or_default().insert(*key, (tag, Tier::Nvme));
            }
        }
        let retry_after = Duration::from_millis(self.rng.below(3) as u64 * 10);
        self.apply(Event::Peer(PeerEvent::OfferAnswered { offer: offer.offer, taken, retry_after }));
    }

    /// Uses no random number if the fault is disabled.
    fn is_unanswered(&mut self) -> bool {
        self.faults.place > 0 && self.rng.chance(self.faults.place)
    }

    /// Uses no random number if the fault is disabled, so that other random choices stay the same.
    fn is_refused(&mut self) -> bool {
        self.faults.refused > 0 && self.rng.chance(self.faults.refused)
    }

    fn end_device_op(&mut self, device: DeviceId, op: &DeviceOp, covered: u64) {
        let is_block = matches!(op.kind, DeviceOpKind::WriteBlock { .. } | DeviceOpKind::WriteHeader { .. });
        let refused = is_block && self.is_refused();
        let disk = &mut self.disks[usize::from(device.0)];
        let token = op.token;
        let lost = self.lost_devices.contains(&device) || self.rng.chance(self.faults.device_lost);
        let result = if lost {
            self.lost_devices.insert(device);
            Err(DeviceError::Lost)
        } else if self.read_only_devices.contains(&device) && !matches!(op.kind, DeviceOpKind::Sync) {
            Err(DeviceError::Unwritable)
        } else if is_block {
            let payload = match &op.kind {
                DeviceOpKind::WriteBlock { slot, .. } => self.memory.layers(*slot),
                _ => &[],
            };
            if refused {
                Err(DeviceError::Refused)
            } else if self.rng.chance(self.faults.write_media) {
                Err(DeviceError::Media)
            } else {
                disk.complete(DiskWrite::of(&op.kind, payload).expect("a write"));
                Ok(())
            }
        } else {
            match DiskWrite::of(&op.kind, &[]) {
                Some(written) => disk.complete(written),
                None => disk.synced(covered),
            }
            Ok(())
        };
        self.apply(Event::DeviceDone { device, token, result });
    }

    fn read_on(&mut self, device: DeviceId, read: BlockRead, layout: Layout, layers: std::ops::Range<u32>) {
        let fill = read.fill;
        let failed = |error| Event::Fill { fill, update: FillUpdate::Failed(error) };
        if self.lost_devices.contains(&device) {
            let stranded = self.rng.chance(self.faults.stranded);
            if stranded {
                self.memory.strand(read.slot);
            }
            let error = if stranded { FillError::Stranded } else { FillError::Device };
            return self.apply(failed(error));
        }
        if self.rng.chance(self.faults.read) {
            return self.apply(failed(FillError::Device));
        }
        if layers.start == 0 && self.is_refused() {
            return self.apply(failed(FillError::Refused));
        }
        let (page, payload) = self.disks[usize::from(device.0)].read(read.page);
        let BlockRead { key, generation, header_crc, .. } = read;
        let expected = ExpectedHeader { key, generation, header_crc };
        let header = decode_header(&page, &expected).unwrap_or_else(|error| panic!("read {key}: {error}"));
        let tag = payload[0];
        if checksums(tag, &layout) != header.checksums {
            let may_differ = self.disks[usize::from(device.0)].may_differ;
            assert!(may_differ, "{key}: its slot was overwritten");
            self.memory.write(read.slot, &layout, layers, tag);
            return self.apply(failed(FillError::Corrupt));
        }
        if layers.end < layout.layers() {
            self.jobs.push(Job::Read { device, read, layout, layers: layers.end });
        }
        let update = self.progress(Progress { slot: read.slot, layout, layers, tag, tier: Tier::Nvme });
        self.apply(Event::Fill { fill, update });
    }

    fn fetch_on(
        &mut self,
        (node, tenant): (NodeId, TenantId),
        peer: (FillId, BlockKey, ArenaSlot),
        layout: Layout,
        layers: std::ops::Range<u32>,
    ) {
        let (fill, key, slot) = peer;
        let held = self.peers.held.get(&node).and_then(|blocks| blocks.get(&key)).copied();
        let error = match held {
            _ if layout_of(&key) != layout => Some(FillError::Absent),
            // Peers find blocks by key, layout and tenant.
            _ if self.public.keys.contains(&key) != (tenant == PUBLIC) => Some(FillError::Absent),
            None => Some(FillError::Absent),
            Some(_) if self.rng.chance(self.faults.fetch) => {
                Some([FillError::PeerLost, FillError::Corrupt][self.rng.below(2)])
            }
            Some(_) => None,
        };
        if let Some(error) = error {
            let update = FillUpdate::Failed(error);
            return self.apply(Event::Peer(PeerEvent::Fill { fill, update }));
        }
        let (tag, tier) = held.expect("held, or an error above");
        if layers.end < layout.layers() {
            self.jobs.push(Job::Fetch { node, tenant, fill, key, slot, layout, layers: layers.end });
        }
        let update = self.progress(Progress { slot, layout, layers, tag, tier });
        self.apply(Event::Peer(PeerEvent::Fill { fill, update }));
    }

    /// Writes the layers of a fill and returns the update that reports them.
    fn progress(&mut self, progress: Progress) -> FillUpdate {
        let Progress { slot, layout, layers, tag, tier } = progress;
        let checksums = (layers.start == 0).then(|| checksums(tag, &layout));
        let update = FillUpdate::Layers { layers: layers.end, checksums, tier };
        self.memory.write(slot, &layout, layers, tag);
        update
    }
}
