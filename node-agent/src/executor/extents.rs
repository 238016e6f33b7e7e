//! Devices that sessions read and write themselves: their descriptors, and the end of their I/O.
//!
//! A session gets one descriptor of each file, with the first reply that names an extent there. The lock of
//! that descriptor ([`SharedFile`]) shows when no process can do I/O for the session. The core thread polls
//! the locks, because the kernel reports no event for them. A controller that the agent drives has no file: sessions
//! reach it through granted queue pairs only ([`crate::queue_grants`]).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use reprise_agent_core::effect::{DeviceId, Place, Reply};
use reprise_agent_core::extents::{ExtentHolder, PinnedBlock};
use reprise_io::{HolderNumber, SharedFile};
use reprise_policy::SessionId;

use super::Executor;
use crate::device::{Device, is_held_by_earlier};

/// Interval between two polls. A poll is one system call for each device of a holder.
const POLL_EVERY: Duration = Duration::from_millis(20);

/// Descriptors that sessions have, and holders whose I/O must end.
#[derive(Default)]
pub(super) struct SharedDevices {
    granted: BTreeMap<SessionId, BTreeSet<DeviceId>>,
    /// Holders without a session, with their devices.
    ending: BTreeMap<ExtentHolder, BTreeSet<DeviceId>>,
    next_poll: Option<Instant>,
}

impl SharedDevices {
    /// Starts to wait for the end of a holder's I/O.
    pub(super) fn await_end(&mut self, holder: ExtentHolder) {
        let devices = match holder {
            ExtentHolder::Session(session) => self.granted.get(&session).cloned().unwrap_or_default(),
            ExtentHolder::Earlier(device) => BTreeSet::from([device]),
        };
        self.ending.insert(holder, devices);
        self.next_poll = Some(Instant::now());
    }

    pub(super) fn session_closed(&mut self, session: SessionId) {
        self.granted.remove(&session);
    }

    /// A later device with this number is another one.
    pub(super) fn device_released(&mut self, device: DeviceId) {
        for devices in self.granted.values_mut() {
            devices.remove(&device);
        }
    }
}

impl Executor {
    /// Lets sessions have queue pairs of a controller that this process drives.
    pub(super) fn lend_queues(&self, id: DeviceId, device: &Device) {
        if let Some(lending) = device.lending() {
            self.parts.queue_grants.add_device(id, lending);
        }
    }

    /// Lets sessions have queue pairs of all controllers.
    pub(super) fn lend_all_queues(&self) {
        for (id, entry) in (0..).zip(&self.devices) {
            entry.iter().for_each(|entry| self.lend_queues(DeviceId(id), &entry.device));
        }
    }

    /// Ends all grants of queue pairs of a device, before the core may release it.
    pub(crate) fn revoke_queues(&self, id: DeviceId) {
        self.parts.queue_grants.revoke_device(id, "the agent closes the device");
    }

    /// Makes a device fail all further operations.
    pub(crate) fn close_device(&self, id: DeviceId) {
        if let Some(entry) = self.entry(id) {
            entry.device.close();
        }
    }

    /// Returns descriptors of the devices that a reply names and the session does not have; `None` if one
    /// cannot be created.
    pub(super) fn grant_devices(
        &mut self,
        session: SessionId,
        reply: &Reply,
    ) -> Option<Vec<(DeviceId, Option<OwnedFd>)>> {
        let mut grants = Vec::new();
        for device in devices_of(reply) {
            if self.extents.granted.get(&session).is_some_and(|granted| granted.contains(&device)) {
                continue;
            }
            let shared = self.entry(device).and_then(|entry| entry.device.shared());
            let granted = match (shared, holder_of(session)) {
                (Some(shared), Some(holder)) => shared.share(holder).map(Some),
                _ if self.parts.queue_grants.lends(device) => Ok(None),
                _ => Err(std::io::Error::other("the device is gone")),
            };
            match granted {
                Ok(descriptor) => grants.push((device, descriptor)),
                Err(error) => {
                    tracing::error!(session = session.0, device = device.0, %error, "session closed: cannot share a device with it");
                    return None;
                }
            }
            self.extents.granted.entry(session).or_default().insert(device);
        }
        Some(grants)
    }

    /// Whether a controller may still run commands of a session: its queue pairs are deleted before the core learns of
    /// its end, unless the controller does not confirm.
    fn has_queues(&self, holder: ExtentHolder) -> bool {
        match holder {
            ExtentHolder::Session(session) => self.parts.queue_grants.is_fenced(session),
            // A controller is reset when its device is opened.
            ExtentHolder::Earlier(_) => false,
        }
    }

    /// Time of the next call of [`Executor::released_extents`], if a holder's I/O must end.
    pub(crate) fn next_extent_poll(&self) -> Option<Instant> {
        self.extents.next_poll
    }

    /// Returns holders whose I/O has ended.
    pub(crate) fn released_extents(&mut self) -> Vec<ExtentHolder> {
        let now = Instant::now();
        if self.extents.next_poll.is_none_or(|poll| poll > now) {
            return Vec::new();
        }
        let has_ended = |holder: &ExtentHolder, device: &DeviceId| {
            let shared = self.entry(*device).and_then(|entry| entry.device.shared());
            shared.is_none_or(|shared| !is_held(shared, *holder))
        };
        let ended: Vec<ExtentHolder> = self
            .extents
            .ending
            .iter()
            .filter(|(holder, devices)| devices.iter().all(|device| has_ended(holder, device)))
            .map(|(holder, _)| *holder)
            .filter(|holder| !self.has_queues(*holder))
            .collect();
        for holder in &ended {
            self.extents.ending.remove(holder);
        }
        self.extents.next_poll = (!self.extents.ending.is_empty()).then(|| now + POLL_EVERY);
        ended
    }
}

/// Whether a process may still do I/O for a holder. An unknown answer counts as yes.
fn is_held(shared: &SharedFile, holder: ExtentHolder) -> bool {
    let ExtentHolder::Session(session) = holder else { return is_held_by_earlier(shared) };
    let Some(number) = holder_of(session) else { return false };
    shared.is_held(number).unwrap_or_else(|error| {
        tracing::warn!(session = session.0, %error, "cannot determine whether extents are in use");
        true
    })
}

/// Number of a session's lock; sessions beyond 2³² get no descriptor.
fn holder_of(session: SessionId) -> Option<HolderNumber> {
    u32::try_from(session.0).ok().map(HolderNumber)
}

fn devices_of(reply: &Reply) -> BTreeSet<DeviceId> {
    let device = |place: &Place| match place {
        Place::Extent { device, .. } => Some(*device),
        Place::Arena(_) => None,
    };
    match reply {
        Reply::Reserved { leases, .. } => leases.iter().filter_map(|(_, place)| device(place)).collect(),
        Reply::Pinned { blocks } => {
            let place = |block: &PinnedBlock| match block {
                PinnedBlock::Pinned { place, .. } => device(place),
                PinnedBlock::Refused(_) => None,
            };
            blocks.iter().filter_map(place).collect()
        }
        _ => BTreeSet::new(),
    }
}
