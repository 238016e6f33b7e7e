//! Saves and loads of blocks between memory and extents, with any backend.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use reprise_buffers::{MappedRegion, Span};
use reprise_client::{Client, CommitOptions, ExtentStatus, LeasedExtent, PinOutcome, PinnedExtent};
use reprise_cuda::ring::Operation;
use reprise_cuda::store::{
    Backend, BackendKind, BlockFailure, BlockPlace, KvGeometry, LayerMover, LayerRequest, LayerTicket,
    MoverCounters, RequestOrder, alternate,
};
use reprise_policy::layout::PAGE_BYTES;
use reprise_policy::session::TransferBackend;
use reprise_policy::{BlockKey, Layout};

/// Header pages that are read at once.
pub(crate) const HEADERS: usize = 64;

/// A device of an extent: its number, and its file if the agent has lent one.
pub type ExtentDevice = (u32, Option<Arc<File>>);

/// Devices of a path, with the backend that reaches them.
pub trait Devices: fmt::Debug {
    /// What lets the backend reach extents.
    const REMEDY: &'static str;

    /// Reports whether the backend reaches extents of a device with this file.
    fn reaches(file: Option<&Arc<File>>) -> bool;

    /// Opens devices that are not open yet.
    ///
    /// # Errors
    /// A device cannot be opened, or not by the deadline.
    fn ensure(&mut self, devices: &[ExtentDevice], deadline: Instant) -> anyhow::Result<()>;

    /// Returns the index of an open device in the backend.
    fn index(&self, device: u32) -> usize;

    /// Returns the backend of the devices.
    fn mover(&mut self) -> &mut dyn LayerMover;

    /// Returns the backend, to read its state.
    fn state(&self) -> &dyn LayerMover;

    /// Reads header pages of extents on open devices; `None` for a page that could not be read by the deadline. `memory` has room for
    /// [`HEADERS`] pages from `at` on.
    ///
    /// # Errors
    /// The session has ended, or the backend fails.
    fn read_headers(
        &mut self,
        memory: (&MappedRegion, u64),
        extents: &[&PinnedExtent],
        deadline: Instant,
    ) -> anyhow::Result<Vec<Option<Vec<u8>>>>;

    /// Makes the devices usable again after transfers were given up. `ended` is the result of the transfers.
    ///
    /// # Errors
    /// That of `ended`, or devices cannot be made usable.
    fn settle(&mut self, ended: anyhow::Result<Vec<usize>>, deadline: Instant) -> anyhow::Result<Vec<usize>>;

    /// Reports whether no transfer that was given up accesses extents any longer.
    fn is_settled(&self) -> bool;

    /// Reports whether the devices can be used again after an error.
    fn is_usable(&self) -> bool;
}

/// Result of a load for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingLoad {
    /// All objects are in memory and match their checksums.
    Verified,
    /// The node has no durable copy that the backend reaches: compute the block, or load it by other means.
    Miss,
    /// The copy could not be read in time or by the device.
    Failed,
    /// The bytes on the device are not those of the block.
    Corrupt,
}

/// Extents whose transfers were given up and may run.
#[derive(Debug)]
enum Held {
    Leased { _extent: LeasedExtent },
    Pinned { _extent: PinnedExtent },
}

/// Memory of blocks, and the devices between which and the memory they move; see the crate. It ends with its session.
#[derive(Debug)]
pub struct ExtentPath<D> {
    pub(crate) client: Client,
    pub(crate) layout: Layout,
    pub(crate) geometry: KvGeometry,
    /// Memory of blocks, then pages for headers.
    pub(crate) memory: MappedRegion,
    /// Limit of the transfers of a save or a load, with all its blocks and layers.
    pub(crate) timeout: Duration,
    pub(crate) devices: D,
    held: Vec<Held>,
}

impl<D: Devices> Backend for ExtentPath<D> {
    fn kind(&self) -> BackendKind {
        self.devices.state().kind()
    }

    fn is_emulated(&self) -> bool {
        self.devices.state().is_emulated()
    }

    fn transfer_backend(&self) -> TransferBackend {
        self.devices.state().transfer_backend()
    }
}

impl<D: Devices> ExtentPath<D> {
    pub(crate) fn new(
        client: &Client,
        (geometry, memory): (KvGeometry, MappedRegion),
        devices: D,
        timeout: Duration,
    ) -> ExtentPath<D> {
        let (client, layout) = (client.clone(), *client.layout());
        ExtentPath { client, layout, geometry, memory, timeout, devices, held: Vec::new() }
    }

    /// Returns an object of the memory.
    pub fn object(&self, slot: usize, object: usize) -> Span {
        let offset = self.geometry.offset(object, slot);
        self.memory.span(offset, self.geometry.object_bytes as u64).expect("the memory has all objects")
    }

    /// Returns the number of blocks of the memory.
    pub fn slots(&self) -> usize {
        self.geometry.blocks
    }

    /// Sets the limit of the transfers of a save or a load, with all its blocks and layers.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the requests and blocks that the backend has moved so far.
    pub fn moved(&self) -> MoverCounters {
        self.devices.state().counters()
    }

    /// Returns the layout of the blocks.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Reports whether the session of the path has ended.
    pub fn has_ended(&self) -> bool {
        !self.client.is_alive()
    }

    /// Saves blocks of the memory under their keys, as consecutive blocks of one chain. Returns the statuses of as many
    /// leading blocks as got an extent within `wait`.
    ///
    /// # Errors
    /// The session has ended, or the backend fails.
    pub fn save(
        &mut self,
        blocks: &[(usize, BlockKey)],
        options: CommitOptions,
        wait: Duration,
    ) -> anyhow::Result<Vec<ExtentStatus>> {
        self.release_held()?;
        let extents = self.lease(blocks.len(), wait)?;
        // The wait for extents has its own limit.
        let deadline = Instant::now() + self.timeout;
        let leased = extents.iter().map(|extent| (extent.device(), extent.file().cloned()));
        let payloads = extents.iter().map(LeasedExtent::payload_offset);
        let slots = blocks.iter().map(|(slot, _)| *slot);
        let places = self.places((&leased.collect::<Vec<_>>(), deadline), payloads, slots)?;
        let ended = self.transfer(Operation::Write, &places, deadline);
        let failed = self.devices.settle(ended, deadline);
        if !self.devices.is_settled() {
            self.held.extend(extents.into_iter().map(|extent| Held::Leased { _extent: extent }));
            anyhow::bail!("a device has not written blocks within {:?}", self.timeout);
        }
        let failed = failed?;
        let name = self.name();
        ensure!(failed.is_empty(), "{name} could not write {} of {} blocks", failed.len(), places.len());
        let item = |(extent, (slot, key)): (LeasedExtent, &(usize, BlockKey))| {
            let checksums = (0..self.geometry.objects()).map(|object| self.object(*slot, object).crc32c());
            (extent, *key, checksums.collect())
        };
        let items: Vec<_> = extents.into_iter().zip(blocks).map(item).collect();
        match items.is_empty() {
            true => Ok(Vec::new()),
            false => Ok(self.client.commit_extents(items, options)?),
        }
    }

    /// Leases extents that the backend reaches, whose devices alternate. Fewer if the agent has only others.
    ///
    /// # Errors
    /// The agent's, or the backend reaches none of the leased extents.
    fn lease(&self, count: usize, wait: Duration) -> anyhow::Result<Vec<LeasedExtent>> {
        let mut leased: Vec<Option<LeasedExtent>> = Vec::new();
        while leased.len() < count {
            let left = u32::try_from(count - leased.len()).unwrap_or(u32::MAX);
            let more = self.client.lease_extents(left, wait)?;
            let (found, before) = (more.len(), leased.len());
            leased.extend(more.into_iter().filter(|extent| D::reaches(extent.file())).map(Some));
            ensure!(
                found == 0 || !leased.is_empty(),
                "{} reaches no leased extent: {}",
                self.name(),
                D::REMEDY
            );
            // Asking again would get the same devices.
            if leased.len() == before {
                break;
            }
        }
        let devices: Vec<u32> = leased.iter().flatten().map(LeasedExtent::device).collect();
        let order = alternate(&devices, &[]);
        Ok(order.into_iter().filter_map(|index| leased[index].take()).collect())
    }

    /// Loads blocks into the memory and verifies them. Blocks that are late have failed.
    ///
    /// # Errors
    /// The session has ended, the agent does not answer within the time of the load, or the backend fails.
    pub fn load(&mut self, blocks: &[(usize, BlockKey)]) -> anyhow::Result<Vec<RingLoad>> {
        let deadline = Instant::now() + self.timeout;
        let mut results = Vec::with_capacity(blocks.len());
        for window in blocks.chunks(HEADERS) {
            if Instant::now() >= deadline {
                break;
            }
            results.extend(self.load_window(window, deadline)?);
        }
        results.resize(blocks.len(), RingLoad::Failed);
        Ok(results)
    }

    fn load_window(
        &mut self,
        blocks: &[(usize, BlockKey)],
        deadline: Instant,
    ) -> anyhow::Result<Vec<RingLoad>> {
        self.release_held()?;
        let keys: Vec<BlockKey> = blocks.iter().map(|(_, key)| *key).collect();
        let mut results = vec![RingLoad::Miss; blocks.len()];
        let mut pinned: Vec<(usize, PinnedExtent)> = Vec::new();
        let left = deadline.saturating_duration_since(Instant::now());
        for (index, outcome) in self.client.pin_extents_within(&keys, left)?.into_iter().enumerate() {
            match outcome {
                PinOutcome::Pinned(extent) if D::reaches(extent.file()) => pinned.push((index, extent)),
                PinOutcome::Pinned(_) | PinOutcome::Miss | PinOutcome::NotDurable | PinOutcome::Limit => {}
            }
        }
        let read = self.read_pinned(blocks, (&pinned, deadline), &mut results);
        if !self.devices.is_settled() {
            self.held.extend(pinned.into_iter().map(|(_, extent)| Held::Pinned { _extent: extent }));
        }
        read.map(|()| results)
    }

    /// Reads pinned extents into the memory and verifies them.
    fn read_pinned(
        &mut self,
        blocks: &[(usize, BlockKey)],
        (pinned, deadline): (&[(usize, PinnedExtent)], Instant),
        results: &mut [RingLoad],
    ) -> anyhow::Result<()> {
        let checksums = self.read_checksums(pinned, deadline)?;
        for ((index, _), checksums) in pinned.iter().zip(&checksums) {
            results[*index] = *checksums.as_ref().err().unwrap_or(&RingLoad::Verified);
        }
        let readable = pinned.iter().filter(|(index, _)| results[*index] == RingLoad::Verified);
        let readable: Vec<(usize, &PinnedExtent)> =
            readable.map(|(index, extent)| (*index, extent)).collect();
        let devices = readable.iter().map(|(_, extent)| (extent.device(), extent.file().cloned()));
        let payloads = readable.iter().map(|(_, extent)| extent.offset() + PAGE_BYTES);
        let slots = readable.iter().map(|(index, _)| blocks[*index].0);
        let places = self.places((&devices.collect::<Vec<_>>(), deadline), payloads, slots)?;
        let ended = self.transfer(Operation::Read, &places, deadline);
        for failed in self.devices.settle(ended, deadline)? {
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
        Ok(())
    }

    /// Reads header pages; returns the checksums of the objects, or why a page cannot be used.
    fn read_checksums(
        &mut self,
        pinned: &[(usize, PinnedExtent)],
        deadline: Instant,
    ) -> anyhow::Result<Vec<Result<Vec<u32>, RingLoad>>> {
        let extents: Vec<&PinnedExtent> = pinned.iter().map(|(_, extent)| extent).collect();
        let devices = extents.iter().map(|extent| (extent.device(), extent.file().cloned()));
        self.devices.ensure(&devices.collect::<Vec<_>>(), deadline)?;
        let memory = (&self.memory, self.geometry.bytes());
        let headers = self.devices.read_headers(memory, &extents, deadline)?;
        let checksums = extents.into_iter().zip(headers).map(|(extent, header)| match header {
            None => Err(RingLoad::Failed),
            Some(header) => extent.checksums(&header).map_err(|_| RingLoad::Corrupt),
        });
        Ok(checksums.collect())
    }

    /// Opens the devices of extents, and returns the places of their blocks.
    fn places(
        &mut self,
        (extents, deadline): (&[ExtentDevice], Instant),
        payloads: impl Iterator<Item = u64>,
        slots: impl Iterator<Item = usize>,
    ) -> anyhow::Result<Vec<BlockPlace>> {
        self.devices.ensure(extents, deadline)?;
        let place = |(((device, _), payload), slot): ((&ExtentDevice, u64), usize)| {
            let device = self.devices.index(*device);
            BlockPlace { device, payload, slot }
        };
        Ok(extents.iter().zip(payloads).zip(slots).map(place).collect())
    }

    /// Moves all layers of blocks, with one call for each layer. Returns the indices of blocks that failed.
    fn transfer(
        &mut self,
        operation: Operation,
        places: &[BlockPlace],
        deadline: Instant,
    ) -> anyhow::Result<Vec<usize>> {
        if places.is_empty() {
            return Ok(Vec::new());
        }
        let mover = self.devices.mover();
        let mut tickets = Vec::with_capacity(self.geometry.layers);
        for layer in 0..self.geometry.layers {
            let timeout = deadline.saturating_duration_since(Instant::now());
            let request = LayerRequest { layer, blocks: places, timeout, order: RequestOrder::Unordered };
            tickets.push(match operation {
                Operation::Write => mover.store_layer(&request)?,
                Operation::Read => mover.retrieve_layer(&request)?,
            });
        }
        finish(mover, tickets)
    }

    /// Ends leases and pins whose transfers were given up, if all of these have ended.
    ///
    /// # Errors
    /// Some have not ended.
    fn release_held(&mut self) -> anyhow::Result<()> {
        ensure!(self.devices.is_settled(), "a device still runs transfers that have timed out");
        self.held.clear();
        Ok(())
    }
}

/// Waits for requests; returns the indices of blocks that failed in one of them.
pub(crate) fn finish(
    mover: &mut dyn LayerMover,
    tickets: impl IntoIterator<Item = LayerTicket>,
) -> anyhow::Result<Vec<usize>> {
    let mut failed = BTreeSet::new();
    for ticket in tickets {
        for BlockFailure { block, error } in mover.wait(ticket)?.failures {
            tracing::warn!(backend = mover.name(), block, %error, "a backend could not move a block");
            failed.insert(block);
        }
    }
    Ok(failed.into_iter().collect())
}
