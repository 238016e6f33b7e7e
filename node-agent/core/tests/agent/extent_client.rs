//! Simulated client that writes and reads extents itself, also after the end of its session.

use reprise_agent_core::effect::{CommitStatus, DeviceId, LeaseId, Place, PlaceKind, Reply};
use reprise_agent_core::event::{CommitItem, CommitRequest, Event, Priority, Request};
use reprise_agent_core::extents::{ExtentHolder, PinId, PinRefusal, PinnedBlock};
use reprise_agent_core::pool::PageNumber;
use reprise_agent_core::pool::header::{ExpectedHeader, decode_header};
use reprise_policy::{BlockKey, Layout, SessionId};

use crate::disk::DiskWrite;
use crate::engine::{Engine, RequestKind};
use crate::harness::{Harness, layout_of};
use crate::jobs::Job;
use crate::memory::{Tag, checksums};

/// Extents of a session.
#[derive(Debug, Default)]
pub(crate) struct ExtentClient {
    pub(crate) leased: Vec<LeasedExtent>,
    pub(crate) pinned: Vec<(PinId, BlockKey, Place)>,
    /// Refusals of pins, newest last.
    pub(crate) refusals: Vec<PinRefusal>,
    /// Results of commits, newest last.
    pub(crate) statuses: Vec<(BlockKey, CommitStatus)>,
}

/// Slot that the client writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeasedExtent {
    pub(crate) lease: LeaseId,
    pub(crate) place: Place,
    pub(crate) content: Content,
}

/// State of a leased slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Unwritten,
    Writing(BlockKey, Tag),
    Written(BlockKey, Tag),
}

/// Write of a payload in flight.
#[derive(Clone, Debug)]
pub(crate) struct ExtentWrite {
    pub(crate) holder: ExtentHolder,
    pub(crate) device: DeviceId,
    page: PageNumber,
    layout: Layout,
    tag: Tag,
}

impl ExtentWrite {
    /// What the write leaves on the disk.
    pub(crate) fn content(&self) -> DiskWrite {
        DiskWrite::of_client(self.page, vec![self.tag; self.layout.layers() as usize])
    }
}

/// Device and header page of an extent.
pub(crate) fn position(place: &Place) -> (DeviceId, PageNumber) {
    match place {
        Place::Extent { device, offset, .. } => (*device, PageNumber(offset / 4096)),
        Place::Arena(slot) => panic!("{slot:?} is not an extent"),
    }
}

impl ExtentClient {
    pub(crate) fn on_leased(&mut self, leases: &[(LeaseId, Place)]) {
        let leased = |(lease, place): &(LeaseId, Place)| LeasedExtent {
            lease: *lease,
            place: *place,
            content: Content::Unwritten,
        };
        self.leased.extend(leases.iter().map(leased));
    }

    pub(crate) fn on_committed(&mut self, keys: &[BlockKey], statuses: &[CommitStatus]) {
        assert_eq!(keys.len(), statuses.len());
        assert!(!statuses.contains(&CommitStatus::NoLease), "the client commits its own leases once");
        self.statuses.extend(keys.iter().copied().zip(statuses.iter().copied()));
    }

    pub(crate) fn on_pinned(&mut self, keys: &[BlockKey], blocks: &[PinnedBlock]) {
        assert_eq!(keys.len(), blocks.len());
        for (key, block) in keys.iter().zip(blocks) {
            match *block {
                PinnedBlock::Pinned { pin, place } => self.pinned.push((pin, *key, place)),
                PinnedBlock::Refused(refusal) => self.refusals.push(refusal),
            }
        }
    }
}

impl Harness {
    pub(crate) fn lease_extents(&mut self, session: SessionId, count: u32) {
        let body = Request::Reserve { count, kind: PlaceKind::Extent };
        self.request(session, RequestKind::LeaseExtents(count), body);
    }

    /// Starts to write blocks to unwritten extents, as far as there are any.
    pub(crate) fn write_extents(&mut self, session: SessionId, keys: &[BlockKey]) {
        let layout = self.engines[&session].layout;
        for key in keys.iter().filter(|key| layout_of(key) == layout) {
            let leased = &self.engines[&session].extents.leased;
            let Some(at) = leased.iter().position(|extent| extent.content == Content::Unwritten) else {
                return;
            };
            let (device, page) = position(&leased[at].place);
            let tag = self.new_tag(*key);
            let engine = self.engines.get_mut(&session).expect("open");
            engine.extents.leased[at].content = Content::Writing(*key, tag);
            let holder = ExtentHolder::Session(session);
            self.jobs.push(Job::ExtentWrite(ExtentWrite { holder, device, page, layout, tag }));
        }
    }

    /// Commits all written extents.
    pub(crate) fn commit_extents(&mut self, session: SessionId, priority: Priority) {
        let engine = self.engines.get_mut(&session).expect("open");
        let layout = engine.layout;
        let written =
            engine.extents.leased.extract_if(.., |extent| matches!(extent.content, Content::Written(..)));
        let (mut items, mut keys) = (Vec::new(), Vec::new());
        for extent in written {
            let Content::Written(key, tag) = extent.content else { unreachable!("filtered above") };
            keys.push(key);
            items.push(CommitItem {
                lease: extent.lease,
                key: Some(key),
                checksums: checksums(tag, &layout),
            });
        }
        if !items.is_empty() {
            let commit = CommitRequest { items, priority, parent: None, position: Some(0) };
            let body = Request::Commit(commit);
            self.request(session, RequestKind::CommitExtents(keys), body);
        }
    }

    /// Returns extents without a write in flight.
    pub(crate) fn abort_extents(&mut self, session: SessionId) {
        let engine = self.engines.get_mut(&session).expect("open");
        let idle = |extent: &mut LeasedExtent| !matches!(extent.content, Content::Writing(..));
        let leases: Vec<LeaseId> =
            engine.extents.leased.extract_if(.., idle).map(|extent| extent.lease).collect();
        let body = Request::Abort { leases };
        self.request(session, RequestKind::Other, body);
    }

    pub(crate) fn pin_extents(&mut self, session: SessionId, keys: &[BlockKey]) {
        let body = Request::Pin { keys: keys.to_vec() };
        self.request(session, RequestKind::PinExtents(keys.to_vec()), body);
    }

    /// Ends all pins of a session.
    pub(crate) fn unpin_extents(&mut self, session: SessionId) {
        let engine = self.engines.get_mut(&session).expect("open");
        let pins = engine.extents.pinned.drain(..).map(|(pin, ..)| pin).collect();
        self.request(session, RequestKind::Other, Request::Unpin { pins });
    }

    /// Completes a client's write, also after the end of its session.
    pub(crate) fn end_extent_write(&mut self, write: &ExtentWrite) {
        self.disks[usize::from(write.device.0)].complete(write.content());
        let ExtentHolder::Session(session) = write.holder else { return };
        let Some(engine) = self.engines.get_mut(&session) else { return };
        for extent in &mut engine.extents.leased {
            if let Content::Writing(key, tag) = extent.content
                && tag == write.tag
            {
                extent.content = Content::Written(key, tag);
            }
        }
    }

    /// Reports the end of a holder's I/O, unless writes of it are in flight.
    pub(crate) fn end_await_extents(&mut self, holder: ExtentHolder) {
        let is_write = |job: &Job| matches!(job, Job::ExtentWrite(write) if write.holder == holder);
        match self.jobs.iter().any(is_write) {
            true => self.jobs.push(Job::AwaitExtents(holder)),
            false => self.apply(Event::ExtentsReleased { holder }),
        }
    }

    /// Writes that continue when the agent is killed.
    pub(crate) fn extent_writes_of_earlier_sessions(&mut self) -> Vec<Job> {
        let is_write = |job: &mut Job| matches!(job, Job::ExtentWrite(_));
        let writes: Vec<Job> = self.jobs.extract_if(.., is_write).collect();
        let of_earlier = |job| match job {
            Job::ExtentWrite(write) => {
                Job::ExtentWrite(ExtentWrite { holder: ExtentHolder::Earlier(write.device), ..write })
            }
            other => other,
        };
        writes.into_iter().map(of_earlier).collect()
    }

    /// Checks that a leased slot is used by no other client.
    pub(crate) fn assert_leases_are_unused(&self, reply: &Reply) {
        let Reply::Reserved { leases, .. } = reply else { return };
        for (_, place) in leases.iter().filter(|(lease, _)| lease.kind() == PlaceKind::Extent) {
            let position = position(place);
            assert!(
                !self.extents_in_use().any(|other| other == position),
                "{place:?} was leased while in use"
            );
        }
    }

    /// Checks that no client accesses a device that is released.
    pub(crate) fn assert_no_extents_on(&self, device: DeviceId) {
        assert!(
            !self.extents_in_use().any(|(on, _)| on == device),
            "{device:?} is released with extents in use"
        );
    }

    /// Extents that clients hold or write.
    fn extents_in_use(&self) -> impl Iterator<Item = (DeviceId, PageNumber)> {
        let writes = self.jobs.iter().filter_map(|job| match job {
            Job::ExtentWrite(write) => Some((write.device, write.page)),
            _ => None,
        });
        let clients = self.engines.values().map(|engine| &engine.extents);
        let held = clients.flat_map(|client| {
            let leased = client.leased.iter().map(|extent| &extent.place);
            leased.chain(client.pinned.iter().map(|(_, _, place)| place))
        });
        writes.chain(held.map(position))
    }

    /// Reads all pinned blocks of an engine from the disk.
    pub(crate) fn read_pinned(&self, engine: &Engine) {
        for (_, key, place) in &engine.extents.pinned {
            let Place::Extent { device, generation, header_crc, .. } = *place else { continue };
            let disk = &self.disks[usize::from(device.0)];
            let (page, payload) = disk.read(position(place).1);
            let expected = ExpectedHeader { key: *key, generation, header_crc };
            let header =
                decode_header(&page, &expected).unwrap_or_else(|error| panic!("pinned {key}: {error}"));
            let is_intact = checksums(payload[0], &engine.layout) == header.checksums;
            assert!(is_intact || disk.may_differ, "{key}: its pinned slot was overwritten");
            if is_intact {
                self.assert_committed(key, payload[0]);
            }
        }
    }
}
