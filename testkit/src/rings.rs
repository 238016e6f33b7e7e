//! The way of blocks through rings: the reference engine's KV memory is registered, and rings move blocks between it and
//! extents of devices, without a copy in the agent.
//!
//! ```text
//! save: checksums ─▶ lease extents ─▶ ring writes, layer by layer ─▶ commit
//! load: pin ─▶ ring reads header pages ─▶ ring reads, layer by layer ─▶ checksums ─▶ unpin
//! ```
//!
//! [`RingMover`] moves the layers. Threads of this process drive the queue pairs (the host build of the GPU's source), so
//! the backend is `gpu-queue-host`, or `gpu-queue-emulated` if a controller is emulated.
//!
//! A command that is given up may still write KV memory. Its queue pairs are therefore returned to the agent, which
//! deletes them, before a block or an extent has another use.

mod device;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use reprise_buffers::{MappedRegion, Span};
use reprise_client::{
    Client, ClientError, CommitOptions, ExtentStatus, LeasedExtent, PinOutcome, PinnedExtent,
    RegisteredMemory,
};
use reprise_cuda::ring::Operation;
use reprise_cuda::store::{
    BackendKind, BlockFailure, BlockPlace, KvGeometry, LayerMover, LayerRequest, LayerTicket, MoverCounters,
    PlanCounters, RingMover, alternate,
};
use reprise_policy::layout::PAGE_BYTES;
use reprise_policy::session::TransferBackend;
use reprise_policy::{BlockKey, Layout};

use device::{GrantedDevice, open_ring};
pub use reprise_cuda::store::{Backend, KvOrder, RingCounters};

/// Header pages that are read at once.
const HEADERS: usize = 64;

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

/// Result of a load for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingLoad {
    /// All objects are in KV memory and match their checksums.
    Verified,
    /// The node has no durable copy: compute the block, or load it by other means.
    Miss,
    /// The copy could not be read in time or by the controller.
    Failed,
    /// The bytes on the device are not those of the block.
    Corrupt,
}

/// KV memory that rings move; see the module. It ends with its session.
pub struct RingPath {
    client: Client,
    layout: Layout,
    settings: RingPathSettings,
    geometry: KvGeometry,
    /// KV memory, then pages for headers.
    memory: MappedRegion,
    registered: RegisteredMemory,
    /// Stops its rings before the queue pairs are returned.
    mover: RingMover<'static>,
    devices: BTreeMap<u32, GrantedDevice>,
}

impl Backend for RingPath {
    fn kind(&self) -> BackendKind {
        BackendKind::GpuQueue
    }

    fn is_emulated(&self) -> bool {
        self.mover.is_emulated()
    }

    fn transfer_backend(&self) -> TransferBackend {
        self.mover.transfer_backend()
    }
}

impl RingPath {
    /// Allocates KV memory for `blocks` blocks and registers it.
    ///
    /// # Errors
    /// The agent grants no queue pairs, objects are not whole pages, or memory is short.
    pub fn open(client: &Client, blocks: usize, settings: RingPathSettings) -> anyhow::Result<RingPath> {
        let layout = *client.layout();
        let object_bytes = usize::try_from(layout.object_bytes()).context("object size")?;
        ensure!(
            layout.object_bytes().is_multiple_of(PAGE_BYTES),
            "objects of {object_bytes} bytes: rings need whole pages of {PAGE_BYTES} bytes; use more tokens per block"
        );
        let geometry = KvGeometry {
            layers: layout.layers() as usize,
            parts: layout.parts() as usize,
            blocks,
            object_bytes,
            order: settings.order,
        };
        let bytes = geometry.bytes() + HEADERS as u64 * PAGE_BYTES;
        let (memory, file) = MappedRegion::allocate(bytes).context("KV memory")?;
        let registered = client.register_memory(file, bytes)?;
        let (mover, devices) = (RingMover::new(geometry), BTreeMap::new());
        client.use_backend(mover.transfer_backend())?;
        let client = client.clone();
        Ok(RingPath { client, layout, settings, geometry, memory, registered, mover, devices })
    }

    /// Returns an object of KV memory.
    pub fn object(&self, slot: usize, object: usize) -> Span {
        let offset = self.geometry.offset(object, slot);
        self.memory.span(offset, self.geometry.object_bytes as u64).expect("KV memory has all objects")
    }

    /// Returns the work of planning so far.
    pub fn counters(&self) -> PlanCounters {
        self.mover.plan_counters()
    }

    /// Returns the requests and blocks that the rings have moved so far.
    pub fn moved(&self) -> MoverCounters {
        self.mover.counters()
    }

    /// Returns the numbers of the queue pairs in use, by device.
    pub fn queue_pairs(&self) -> BTreeMap<u32, Vec<u16>> {
        let numbers = |granted: &GrantedDevice| granted.grant.queues().iter().map(|pair| pair.id).collect();
        self.devices.iter().map(|(device, granted)| (*device, numbers(granted))).collect()
    }

    /// Returns the work of the rings so far.
    pub fn ring_counters(&self) -> RingCounters {
        self.mover.ring_counters()
    }

    /// Returns the generations of the grants in use, by device.
    pub fn generations(&self) -> BTreeMap<u32, u64> {
        self.devices.iter().map(|(device, granted)| (*device, granted.grant.generation())).collect()
    }

    /// Returns why a grant has ended, if one has.
    pub fn revoked(&self) -> Option<String> {
        self.devices.values().find_map(|granted| granted.grant.revoked())
    }

    /// Saves blocks of KV memory under their keys, as consecutive blocks of one chain. Returns the statuses of as many
    /// leading blocks as got an extent within `wait`.
    ///
    /// # Errors
    /// The session has ended, or the rings fail.
    pub fn save(
        &mut self,
        blocks: &[(usize, BlockKey)],
        options: CommitOptions,
        wait: Duration,
    ) -> anyhow::Result<Vec<ExtentStatus>> {
        let extents = self.lease(blocks.len(), wait)?;
        let leased = extents.iter().map(|extent| (extent.device(), extent.payload_offset()));
        let places = self.places(leased.zip(blocks.iter().map(|(slot, _)| *slot)))?;
        let ended = self.transfer(Operation::Write, &places);
        let failed = self.settle(ended)?;
        ensure!(failed.is_empty(), "rings could not write {} of {} blocks", failed.len(), places.len());
        let item = |(extent, (slot, key)): (LeasedExtent, &(usize, BlockKey))| {
            let checksums = (0..self.geometry.objects()).map(|object| self.object(*slot, object).crc32c());
            (extent, *key, checksums.collect())
        };
        let items = extents.into_iter().zip(blocks).map(item).collect();
        Ok(self.client.commit_extents(items, options)?)
    }

    /// Leases extents whose devices alternate.
    fn lease(&self, count: usize, wait: Duration) -> Result<Vec<LeasedExtent>, ClientError> {
        let mut leased: Vec<Option<LeasedExtent>> = Vec::new();
        while leased.len() < count {
            let left = u32::try_from(count - leased.len()).unwrap_or(u32::MAX);
            let more = self.client.lease_extents(left, wait)?;
            if more.is_empty() {
                break;
            }
            leased.extend(more.into_iter().map(Some));
        }
        let devices: Vec<u32> = leased.iter().flatten().map(LeasedExtent::device).collect();
        let order = alternate(&devices, &[]);
        Ok(order.into_iter().filter_map(|index| leased[index].take()).collect())
    }

    /// Loads blocks into KV memory and verifies them.
    ///
    /// # Errors
    /// The session has ended, or the rings fail.
    pub fn load(&mut self, blocks: &[(usize, BlockKey)]) -> anyhow::Result<Vec<RingLoad>> {
        let mut results = Vec::with_capacity(blocks.len());
        for window in blocks.chunks(HEADERS) {
            results.extend(self.load_window(window)?);
        }
        Ok(results)
    }

    fn load_window(&mut self, blocks: &[(usize, BlockKey)]) -> anyhow::Result<Vec<RingLoad>> {
        let keys: Vec<BlockKey> = blocks.iter().map(|(_, key)| *key).collect();
        let mut results = vec![RingLoad::Miss; blocks.len()];
        let mut pinned: Vec<(usize, PinnedExtent)> = Vec::new();
        for (index, outcome) in self.client.pin_extents(&keys)?.into_iter().enumerate() {
            match outcome {
                PinOutcome::Pinned(extent) if extent.file().is_none() => pinned.push((index, extent)),
                // A file is not reached by rings.
                PinOutcome::Pinned(_) | PinOutcome::Miss | PinOutcome::NotDurable | PinOutcome::Limit => {}
            }
        }
        let checksums = self.read_headers(&pinned)?;
        for ((index, _), checksums) in pinned.iter().zip(&checksums) {
            results[*index] = *checksums.as_ref().err().unwrap_or(&RingLoad::Verified);
        }
        let readable = pinned.iter().filter(|(index, _)| results[*index] == RingLoad::Verified);
        let readable: Vec<(usize, &PinnedExtent)> =
            readable.map(|(index, extent)| (*index, extent)).collect();
        let extents = readable.iter().map(|(_, extent)| (extent.device(), extent.offset() + PAGE_BYTES));
        let places = self.places(extents.zip(readable.iter().map(|(index, _)| blocks[*index].0)))?;
        let ended = self.transfer(Operation::Read, &places);
        for failed in self.settle(ended)? {
            results[readable[failed].0] = RingLoad::Failed;
        }
        for ((index, _), checksums) in pinned.iter().zip(checksums) {
            let (RingLoad::Verified, Ok(checksums)) = (results[*index], checksums) else { continue };
            let slot = blocks[*index].0;
            let is_right = |(object, checksum): (usize, u32)| self.object(slot, object).crc32c() == checksum;
            if !checksums.into_iter().enumerate().all(is_right) {
                results[*index] = RingLoad::Corrupt;
            }
        }
        Ok(results)
    }

    /// Reads header pages; returns the checksums of the objects, or why a page cannot be used.
    fn read_headers(
        &mut self,
        pinned: &[(usize, PinnedExtent)],
    ) -> anyhow::Result<Vec<Result<Vec<u32>, RingLoad>>> {
        let base = self.geometry.bytes();
        let page = |index: usize| base + index as u64 * PAGE_BYTES;
        let extents = pinned.iter().map(|(_, extent)| (extent.device(), extent.offset()));
        let extents: Vec<(u32, u64)> = extents.collect();
        self.ensure_devices(extents.iter().map(|(device, _)| *device))?;
        let list = |(device, granted): (&u32, &GrantedDevice)| {
            let own = extents.iter().enumerate().filter(|(_, (of, _))| of == device);
            let transfers =
                own.map(|(index, (_, offset))| granted.page_transfer(index, page(index), *offset));
            (granted.index, transfers.collect())
        };
        let lists = self.devices.iter().map(list).collect();
        let timeout = self.settings.timeout;
        let ticket = self.mover.submit_transfers(Operation::Read, lists, pinned.len(), timeout)?;
        let ended = self.finish([ticket]);
        let failed = self.settle(ended)?;
        let checksums = pinned.iter().enumerate().map(|(index, (_, extent))| {
            if failed.contains(&index) {
                return Err(RingLoad::Failed);
            }
            let mut header = vec![0; PAGE_BYTES as usize];
            self.memory.span(page(index), PAGE_BYTES).expect("a page for each").copy_out(&mut header);
            extent.checksums(&header).map_err(|_| RingLoad::Corrupt)
        });
        Ok(checksums.collect())
    }

    /// Resolves devices of extents to indices, and gets queue pairs of devices that have none.
    fn places(
        &mut self,
        extents: impl Iterator<Item = ((u32, u64), usize)>,
    ) -> anyhow::Result<Vec<BlockPlace>> {
        let extents: Vec<((u32, u64), usize)> = extents.collect();
        self.ensure_devices(extents.iter().map(|((device, _), _)| *device))?;
        let place = |((device, payload), slot): ((u32, u64), usize)| {
            let device = self.devices.get(&device).expect("it has queue pairs").index;
            BlockPlace { device, payload, slot }
        };
        Ok(extents.into_iter().map(place).collect())
    }

    fn ensure_devices(&mut self, devices: impl Iterator<Item = u32>) -> anyhow::Result<()> {
        for device in devices {
            if !self.devices.contains_key(&device) {
                let memory = (device, &self.registered);
                let (ring, grant) = open_ring(&self.client, memory, &self.geometry, &self.settings)?;
                let index = self.mover.attach(ring);
                self.devices.insert(device, GrantedDevice { index, grant });
            }
        }
        Ok(())
    }

    /// Moves all layers of blocks, with one call for each layer. Returns the indices of blocks that failed.
    fn transfer(&mut self, operation: Operation, places: &[BlockPlace]) -> anyhow::Result<Vec<usize>> {
        let mut tickets = Vec::with_capacity(self.geometry.layers);
        for layer in 0..self.geometry.layers {
            let timeout = self.settings.timeout;
            let request = LayerRequest { layer, blocks: places, timeout, after: None };
            tickets.push(match operation {
                Operation::Write => self.mover.store_layer(&request)?,
                Operation::Read => self.mover.retrieve_layer(&request)?,
            });
        }
        self.finish(tickets)
    }

    /// Waits for requests; returns the indices of blocks that failed in one of them.
    fn finish(&mut self, tickets: impl IntoIterator<Item = LayerTicket>) -> anyhow::Result<Vec<usize>> {
        let mut failed = BTreeSet::new();
        for ticket in tickets {
            for BlockFailure { block, error } in self.mover.wait(ticket)?.failures {
                tracing::warn!(backend = self.mover.name(), block, %error, "a ring could not move a block");
                failed.insert(block);
            }
        }
        Ok(failed.into_iter().collect())
    }

    /// Makes the queue pairs usable again after commands were given up: none of them runs any longer then.
    fn settle(&mut self, ended: anyhow::Result<Vec<usize>>) -> anyhow::Result<Vec<usize>> {
        for (device, granted) in std::mem::take(&mut self.devices) {
            // The grant may have ended, or commands may still access KV memory.
            if granted.grant.revoked().is_none() && !self.mover.has_unfinished(granted.index) {
                self.devices.insert(device, granted);
                continue;
            }
            let GrantedDevice { index, grant } = granted;
            drop(self.mover.detach(index));
            if let Some(reason) = grant.revoked() {
                bail!("the queue pairs of device {device} were revoked: {reason}");
            }
            self.client.return_queues(grant)?;
            let memory = (device, &self.registered);
            let (ring, grant) = open_ring(&self.client, memory, &self.geometry, &self.settings)?;
            self.mover.replace(index, ring);
            self.devices.insert(device, GrantedDevice { index, grant });
        }
        ended
    }

    /// Returns all queue pairs, and waits until the agent has deleted them.
    ///
    /// # Errors
    /// The session has ended.
    pub fn close(mut self) -> anyhow::Result<()> {
        for GrantedDevice { index, grant } in std::mem::take(&mut self.devices).into_values() {
            drop(self.mover.detach(index));
            self.client.return_queues(grant)?;
        }
        Ok(())
    }

    /// Returns the layout of the blocks.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}
