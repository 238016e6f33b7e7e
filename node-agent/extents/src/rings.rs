//! The backend `gpu-queue`: rings on queue pairs that the agent has granted.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use reprise_buffers::MappedRegion;
use reprise_client::{Client, ClientError, PendingMemory, PinnedExtent, QueueGrant, RegisteredMemory};
use reprise_cuda::ring::Operation;
use reprise_cuda::store::{
    Backend, DetachedRing, KvGeometry, KvOrder, LayerMover, PlanCounters, RingCounters, RingMover,
};
use reprise_policy::layout::PAGE_BYTES;

use crate::device::{GrantedDevice, open_ring};
use crate::path::{Devices, ExtentDevice, ExtentPath, HEADERS, finish};

/// Memory that rings reach, and the rings; see the crate.
pub type RingPath = ExtentPath<RingDevices>;

/// Limit of a return of queue pairs within a load: longer than that of an agent whose controller hangs.
const RETURN_LIMIT: Duration = Duration::from_secs(15);

/// Least time of a request for queue pairs after a return, whose load may have reached its deadline: the agent has just
/// deleted some, so it answers at once.
const REOPEN_LIMIT: Duration = Duration::from_secs(1);

/// Size of rings and queue pairs.
#[derive(Clone, Copy, Debug)]
pub struct RingPathSettings {
    /// Queue pairs of each device.
    pub pairs: u32,
    /// Entries of each queue.
    pub depth: u32,
    /// Limit of a save or a load, for all its layers.
    pub timeout: Duration,
    /// Order of objects in KV memory.
    pub order: KvOrder,
}

impl Default for RingPathSettings {
    /// 2 queue pairs of 64 entries for each device, 10 s, a tensor for each key and value cache.
    fn default() -> RingPathSettings {
        let timeout = Duration::from_secs(10);
        RingPathSettings { pairs: 2, depth: 64, timeout, order: KvOrder::LayerPartBlock }
    }
}

/// Limit of a request for queue pairs outside of a save or a load.
const REQUEST_LIMIT: Duration = reprise_client::queues::QUEUE_CALL_TIMEOUT;

/// Registered memory of a path: blocks, then pages for headers. It stays registered until its session ends, so a path
/// that is opened again in the session uses it again.
#[derive(Clone, Debug)]
pub struct RingWindow {
    geometry: KvGeometry,
    memory: MappedRegion,
    registered: RegisteredMemory,
}

/// A window whose registration the agent has not confirmed.
#[derive(Debug)]
pub struct PendingWindow {
    geometry: KvGeometry,
    memory: MappedRegion,
    call: PendingMemory,
}

impl RingWindow {
    /// Allocates memory for `blocks` blocks, and starts its registration.
    ///
    /// # Errors
    /// Objects are not whole pages, memory is short, or the session has ended.
    pub fn start(client: &Client, blocks: usize, order: KvOrder) -> anyhow::Result<PendingWindow> {
        let layout = client.layout();
        ensure!(
            layout.object_bytes().is_multiple_of(PAGE_BYTES),
            "objects of {} bytes: rings need whole pages of {PAGE_BYTES} bytes; use more tokens per block",
            layout.object_bytes()
        );
        let geometry = geometry_of(client, blocks, order)?;
        let bytes = geometry.bytes() + HEADERS as u64 * PAGE_BYTES;
        let (memory, file) = MappedRegion::allocate(bytes).context("KV memory")?;
        let call = client.start_register_memory(file, bytes)?;
        Ok(PendingWindow { geometry, memory, call })
    }
}

impl PendingWindow {
    /// Returns the window if it is registered within `patience`; `None`: poll again.
    ///
    /// # Errors
    /// The agent refuses the memory, or the session has ended. Do not poll again after an error.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<RingWindow>, ClientError> {
        let registered = self.call.poll(patience)?;
        let (geometry, memory) = (self.geometry, &self.memory);
        Ok(registered.map(|registered| RingWindow { geometry, memory: memory.clone(), registered }))
    }
}

/// Rings of devices over one registered memory.
#[derive(Debug)]
pub struct RingDevices {
    pub(crate) client: Client,
    settings: RingPathSettings,
    geometry: KvGeometry,
    registered: RegisteredMemory,
    /// Stops its rings before the queue pairs are returned.
    mover: RingMover<'static>,
    granted: BTreeMap<u32, GrantedDevice>,
    /// Queue pairs were revoked, or a device has none in place of returned ones.
    is_broken: bool,
    /// Number of devices whose queue pairs were returned and not replaced.
    missing: usize,
    /// Devices whose commands may access the memory, without queue pairs in `granted`.
    unconfirmed: usize,
}

impl RingDevices {
    /// Stops the ring of a device, and returns its queue pairs; waits until the agent has deleted them.
    fn return_queues_of(
        &mut self,
        index: usize,
        grant: QueueGrant,
        limit: Duration,
    ) -> Result<(), ClientError> {
        let detached = self.mover.detach(index);
        self.client.return_queues_within(grant, limit)?;
        detached.into_iter().for_each(DetachedRing::release);
        Ok(())
    }
}

impl Devices for RingDevices {
    const REMEDY: &'static str = "the agent lends no queue pairs for its devices; set session.queue_pairs, and use \
                                  NVMe controllers that it drives";

    fn reaches(file: Option<&Arc<File>>) -> bool {
        file.is_none()
    }

    /// Gets queue pairs of devices that have none. States the backend, which depends on the devices.
    fn ensure(&mut self, devices: &[ExtentDevice], deadline: Instant) -> anyhow::Result<()> {
        let before = self.granted.len();
        for (device, _) in devices {
            if !self.granted.contains_key(device) {
                let memory = (*device, &self.registered);
                let left = deadline.saturating_duration_since(Instant::now()).min(REQUEST_LIMIT);
                let (ring, grant) = open_ring(&self.client, memory, &self.geometry, &self.settings, left)
                    .map_err(late_is_busy)?;
                let index = self.mover.attach(ring);
                self.granted.insert(*device, GrantedDevice { index, grant });
            }
        }
        if self.granted.len() > before {
            self.client.use_backend(self.mover.transfer_backend())?;
        }
        Ok(())
    }

    fn index(&self, device: u32) -> usize {
        self.granted.get(&device).expect("it has queue pairs").index
    }

    fn mover(&mut self) -> &mut dyn LayerMover {
        &mut self.mover
    }

    fn state(&self) -> &dyn LayerMover {
        &self.mover
    }

    fn read_headers(
        &mut self,
        (memory, at): (&MappedRegion, u64),
        extents: &[&PinnedExtent],
        deadline: Instant,
    ) -> anyhow::Result<Vec<Option<Vec<u8>>>> {
        let page = |index: usize| at + index as u64 * PAGE_BYTES;
        let list = |(device, granted): (&u32, &GrantedDevice)| {
            let own = extents.iter().enumerate().filter(|(_, extent)| extent.device() == *device);
            let transfers =
                own.map(|(index, extent)| granted.page_transfer(index, page(index), extent.offset()));
            (granted.index, transfers.collect())
        };
        let lists = self.granted.iter().map(list).collect();
        let timeout = deadline.saturating_duration_since(Instant::now());
        let ticket = self.mover.submit_transfers(Operation::Read, lists, extents.len(), timeout)?;
        let ended = finish(&mut self.mover, [ticket]);
        let failed = self.settle(ended, deadline)?;
        let header = |index: usize| {
            let mut header = vec![0; PAGE_BYTES as usize];
            memory.span(page(index), PAGE_BYTES).expect("a page for each").copy_out(&mut header);
            (!failed.contains(&index)).then_some(header)
        };
        Ok((0..extents.len()).map(header).collect())
    }

    /// Makes the queue pairs usable again after commands were given up: none of them runs any longer then.
    fn settle(&mut self, ended: anyhow::Result<Vec<usize>>, deadline: Instant) -> anyhow::Result<Vec<usize>> {
        self.is_broken = true;
        let granted = std::mem::take(&mut self.granted).into_iter();
        // Read once: commands that end meanwhile must not change the count.
        let granted: Vec<(u32, GrantedDevice, bool)> = granted
            .map(|(device, granted)| {
                let is_unfinished = self.mover.has_unfinished(granted.index);
                (device, granted, is_unfinished)
            })
            .collect();
        self.unconfirmed = granted.iter().filter(|(_, _, is_unfinished)| *is_unfinished).count();
        for (device, granted, is_unfinished) in granted {
            // The grant may have ended, or commands may still access KV memory.
            if granted.grant.revoked().is_none() && !is_unfinished {
                self.granted.insert(device, granted);
                continue;
            }
            let GrantedDevice { index, grant } = granted;
            if let Some(reason) = grant.revoked() {
                drop(self.mover.detach(index));
                bail!("the queue pairs of device {device} were revoked: {reason}");
            }
            self.missing += 1;
            // Within a load: a return that takes longer ends the session.
            self.return_queues_of(index, grant, RETURN_LIMIT)?;
            self.unconfirmed -= usize::from(is_unfinished);
            let memory = (device, &self.registered);
            let left = deadline.saturating_duration_since(Instant::now()).max(REOPEN_LIMIT);
            let (ring, grant) = open_ring(&self.client, memory, &self.geometry, &self.settings, left)
                .map_err(late_is_busy)?;
            self.mover.replace(index, ring);
            self.granted.insert(device, GrantedDevice { index, grant });
            self.missing -= 1;
        }
        self.is_broken = self.missing > 0;
        ended
    }

    /// Commands have ended, or their queue pairs were deleted, or the session has ended, because a deletion was not
    /// confirmed ([`Client::return_queues`]): then dropped extents stay with the agent, which keeps them until the deletion
    /// or a reset of the device.
    fn is_settled(&self) -> bool {
        true
    }

    fn is_usable(&self) -> bool {
        !self.is_broken
    }
}

/// A request for queue pairs that ends with the time of a load shows nothing about the agent: the arena moves the blocks.
fn late_is_busy(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<ClientError>() {
        Some(late @ ClientError::Timeout { .. }) => ClientError::Busy(late.to_string()).into(),
        _ => error,
    }
}

impl RingPath {
    /// Allocates KV memory for `blocks` blocks and registers it.
    ///
    /// # Errors
    /// The agent grants no queue pairs, objects are not whole pages, or memory is short.
    pub fn open(client: &Client, blocks: usize, settings: RingPathSettings) -> anyhow::Result<RingPath> {
        let mut pending = RingWindow::start(client, blocks, settings.order)?;
        let window = pending.poll(Duration::MAX)?.context("the agent has not registered the memory")?;
        Ok(RingPath::with_window(client, &window, settings))
    }

    /// Uses registered memory of the client's session. No other path uses it, and no command accesses it.
    pub fn with_window(client: &Client, window: &RingWindow, settings: RingPathSettings) -> RingPath {
        let RingWindow { geometry, memory, registered } = window.clone();
        let devices = RingDevices {
            client: client.clone(),
            settings,
            geometry,
            registered,
            mover: RingMover::new(geometry),
            granted: BTreeMap::new(),
            is_broken: false,
            missing: 0,
            unconfirmed: 0,
        };
        ExtentPath::new(client, (geometry, memory), devices, settings.timeout)
    }

    /// Stops the rings; returns the memory for another path of the session. `None` if a command may access it: then the
    /// memory stays registered until the session ends, without a use.
    pub fn into_window(self) -> Option<RingWindow> {
        let RingDevices { mover, granted, registered, unconfirmed, .. } = &self.devices;
        let is_unfinished = |granted: &GrantedDevice| mover.has_unfinished(granted.index);
        if *unconfirmed > 0 || granted.values().any(is_unfinished) || self.has_ended() {
            return None;
        }
        let (registered, memory) = (registered.clone(), self.memory.clone());
        Some(RingWindow { geometry: self.geometry, memory, registered })
    }

    /// Returns the work of planning so far.
    pub fn counters(&self) -> PlanCounters {
        self.devices.mover.plan_counters()
    }

    /// Returns the numbers of the queue pairs in use, by device.
    pub fn queue_pairs(&self) -> BTreeMap<u32, Vec<u16>> {
        let numbers = |granted: &GrantedDevice| granted.grant.queues().iter().map(|pair| pair.id).collect();
        self.devices.granted.iter().map(|(device, granted)| (*device, numbers(granted))).collect()
    }

    /// Returns the work of the rings so far.
    pub fn ring_counters(&self) -> RingCounters {
        self.devices.mover.ring_counters()
    }

    /// Returns the generations of the grants in use, by device.
    pub fn generations(&self) -> BTreeMap<u32, u64> {
        self.devices.granted.iter().map(|(device, granted)| (*device, granted.grant.generation())).collect()
    }

    /// Returns why a grant has ended, if one has.
    pub fn revoked(&self) -> Option<String> {
        self.devices.granted.values().find_map(|granted| granted.grant.revoked())
    }

    /// Returns all queue pairs, and waits until the agent has deleted them.
    ///
    /// # Errors
    /// The session has ended.
    pub fn close(mut self) -> anyhow::Result<()> {
        for GrantedDevice { index, grant } in std::mem::take(&mut self.devices.granted).into_values() {
            self.devices.return_queues_of(index, grant, REQUEST_LIMIT)?;
        }
        Ok(())
    }
}

/// Returns the geometry of memory for blocks of a session.
pub(crate) fn geometry_of(client: &Client, blocks: usize, order: KvOrder) -> anyhow::Result<KvGeometry> {
    let layout = client.layout();
    Ok(KvGeometry {
        layers: layout.layers() as usize,
        parts: layout.parts() as usize,
        blocks,
        object_bytes: usize::try_from(layout.object_bytes()).context("object size")?,
        order,
    })
}
