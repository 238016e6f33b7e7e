//! Extents: slots of pool files that this process reads and writes itself.
//!
//! ```text
//! lease_extents ─▶ LeasedExtent: write the payload (direct I/O) ─▶ commit_extents ─▶ durable
//! pin_extents ──▶ PinnedExtent: read header page and payload, verify ─▶ drop
//! ```
//!
//! The agent keeps a slot for as long as this process may access it: until the lease or pin ends, or, after
//! the end of the session, until the last descriptor of the file is closed and its I/O has ended. A
//! [`LeasedExtent`] or [`PinnedExtent`] that is dropped ends its lease or pin, so its I/O must have ended.
//!
//! A wrong offset damages blocks of others: use the offsets of the extents only. Readers detect damage by
//! checksums and treat the block as a miss.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
pub use reprise_buffers::PageBuffer;
use reprise_buffers::crc32c;
use reprise_policy::BlockKey;
use reprise_policy::layout::PAGE_BYTES;
use reprise_proto::local;

use crate::client::Session;
use crate::commit::{CommitOptions, priority_number};
use crate::connection::Releasable;
use crate::error::ClientError;

/// Bytes of the checksum at the end of a header page.
const PAGE_CHECKSUM_BYTES: usize = 4;

/// Open pool files of a session, by device number.
#[derive(Debug, Default)]
pub(crate) struct DeviceMap {
    /// Without a file: reached through granted queue pairs only.
    files: Mutex<BTreeMap<u32, Option<Arc<File>>>>,
}

/// Slot to write. Dropping it ends the lease.
#[derive(Debug)]
pub struct LeasedExtent {
    session: Arc<Session>,
    lease: u64,
    device: u32,
    file: Option<Arc<File>>,
    offset: u64,
    bytes: u64,
    state: LeaseState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeaseState {
    Leased,
    Committed,
}

/// Durable block that stays at its place. Dropping it ends the pin.
#[derive(Debug)]
pub struct PinnedExtent {
    session: Arc<Session>,
    pin: u64,
    device: u32,
    file: Option<Arc<File>>,
    offset: u64,
    bytes: u64,
    header_crc: u32,
    checksums_at: usize,
}

/// Result of a pin for one key.
#[derive(Debug)]
pub enum PinOutcome {
    /// The block is pinned.
    Pinned(PinnedExtent),
    /// The block is not on this node.
    Miss,
    /// The block is on this node, but on no device that clients may read: load it.
    NotDurable,
    /// The session or all sessions hold their share of the devices: drop some pins first.
    Limit,
}

/// Result of one committed extent. The lease has ended in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentStatus {
    /// The block is durable, and readable on the node.
    Durable,
    /// The node had the block already; it may not be durable yet.
    Exists,
    /// The agent does not know the lease.
    NoLease,
    /// Key or checksums do not fit the layout.
    BadItem,
    /// The device could not make the block durable.
    Failed,
}

impl DeviceMap {
    /// Keeps a device with its file, if it has one; a later device replaces it, because the agent reuses numbers.
    pub(crate) fn insert(&self, device: u32, descriptor: Option<OwnedFd>) {
        self.lock().insert(device, descriptor.map(|descriptor| Arc::new(File::from(descriptor))));
    }

    /// Closes the files, except those of extents that still exist.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    fn file(&self, device: u32) -> Result<Option<Arc<File>>, ClientError> {
        let unknown = || ClientError::Protocol(format!("device {device} was not granted"));
        self.lock().get(&device).cloned().ok_or_else(unknown)
    }

    /// Every change leaves the map consistent, so a poisoned lock is ignored.
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Option<Arc<File>>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LeasedExtent {
    /// Number of the device.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The pool file, open for direct I/O. Keeping a clone keeps the slot from being reused after the end of
    /// the session. `None` if the device is reached through granted queue pairs only.
    pub fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }

    /// Byte offset of the payload in the file or namespace, a multiple of 4096.
    pub fn payload_offset(&self) -> u64 {
        self.offset + PAGE_BYTES
    }

    /// Bytes of the payload with its padding, a multiple of 4096. The padding must be zeroes.
    pub fn payload_bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes the payload; returns the checksums of its objects for the commit.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` unless the buffer has [`LeasedExtent::payload_bytes`] bytes; `Unsupported` if
    /// the device has no file.
    pub fn write(&self, payload: &PageBuffer) -> io::Result<Vec<u32>> {
        if payload.len() as u64 != self.bytes {
            let text = format!("a payload of {} bytes: expected {}", payload.len(), self.bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        self.file.as_ref().ok_or_else(no_file)?.write_all_at(payload, self.payload_offset())?;
        let layout = self.session.layout();
        let object_bytes = usize::try_from(layout.object_bytes()).map_err(io::Error::other)?;
        Ok(payload.chunks_exact(object_bytes).take(layout.objects() as usize).map(crc32c).collect())
    }

    /// Ends the handle without ending the lease: a commit has ended it.
    pub(crate) fn mark_committed(mut self) {
        self.state = LeaseState::Committed;
    }
}

impl Drop for LeasedExtent {
    fn drop(&mut self) {
        if self.state == LeaseState::Leased {
            self.session.connection().release_each(Releasable::Leases, [self.lease]);
        }
    }
}

impl PinnedExtent {
    /// Number of the device.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The pool file, open for direct I/O. `None` if the device is reached through granted queue pairs only.
    pub fn file(&self) -> Option<&Arc<File>> {
        self.file.as_ref()
    }

    /// Byte offset of the header page in the file or namespace; the payload is directly behind it.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes of header page and payload, a multiple of 4096.
    pub fn bytes(&self) -> u64 {
        self.bytes + PAGE_BYTES
    }

    /// Reads header page and payload, and verifies them. The payload begins at 4096.
    ///
    /// # Errors
    /// The system's error; `InvalidData` if the bytes are not those of the block: treat it as a miss, and load
    /// it, so that the agent drops a damaged copy. `Unsupported` if the device has no file.
    pub fn read(&self) -> io::Result<PageBuffer> {
        let bytes = usize::try_from(self.bytes()).map_err(io::Error::other)?;
        let mut slot = PageBuffer::new(bytes).map_err(io::Error::other)?;
        self.file.as_ref().ok_or_else(no_file)?.read_exact_at(&mut slot, self.offset)?;
        self.verify(&slot)?;
        Ok(slot)
    }

    /// Verifies header page and payload that were read by other means.
    ///
    /// # Errors
    /// `InvalidData` if the bytes are not those of the block.
    pub fn verify(&self, slot: &[u8]) -> io::Result<()> {
        let layout = self.session.layout();
        let object_bytes = usize::try_from(layout.object_bytes()).map_err(io::Error::other)?;
        let Some((header, payload)) = slot.split_at_checked(PAGE_BYTES as usize) else {
            return damaged("the slot has no header page".to_owned());
        };
        let checksums = self.checksums(header)?;
        let objects = payload.chunks_exact(object_bytes).take(layout.objects() as usize);
        if objects.len() != checksums.len() {
            return damaged(format!("the payload has {} bytes", payload.len()));
        }
        for (number, (object, checksum)) in objects.zip(checksums).enumerate() {
            if crc32c(object) != checksum {
                return damaged(format!("object {number} does not match its checksum"));
            }
        }
        Ok(())
    }

    /// Verifies a header page that was read by other means; returns the checksums of the objects.
    ///
    /// # Errors
    /// `InvalidData` if the page is not that of the block.
    pub fn checksums(&self, header: &[u8]) -> io::Result<Vec<u32>> {
        let objects = self.session.layout().objects() as usize;
        // The agent has sent this checksum, so an intact page is the recorded one.
        let Some((page, recorded)) = header.split_last_chunk::<PAGE_CHECKSUM_BYTES>() else {
            return damaged("the slot has no header page".to_owned());
        };
        if crc32c(page) != self.header_crc || *recorded != self.header_crc.to_le_bytes() {
            return damaged("the header page is not the recorded one".to_owned());
        }
        let (checksums, _) = header.get(self.checksums_at..).unwrap_or_default().as_chunks();
        if checksums.len() < objects {
            return damaged(format!("the header page has no room for {objects} checksums"));
        }
        Ok(checksums[..objects].iter().map(|checksum| u32::from_le_bytes(*checksum)).collect())
    }
}

fn damaged<T>(what: String) -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::InvalidData, what))
}

fn no_file() -> io::Error {
    let text = "the device has no file: read and write it through granted queue pairs";
    io::Error::new(io::ErrorKind::Unsupported, text)
}

impl Drop for PinnedExtent {
    fn drop(&mut self) {
        self.session.connection().release_each(Releasable::Pins, [self.pin]);
    }
}

/// Decodes leases.
///
/// # Errors
/// `Protocol` when a place is not an extent of this layout on a granted device.
pub(crate) fn leased(
    session: &Arc<Session>,
    leased: &local::Reserved,
) -> Result<Vec<LeasedExtent>, ClientError> {
    let lease = |lease: &local::Lease| {
        let (file, extent) = extent_of(session, lease.place)?;
        Ok(LeasedExtent {
            session: Arc::clone(session),
            lease: lease.lease,
            device: extent.device,
            file,
            offset: extent.offset,
            bytes: extent.bytes,
            state: LeaseState::Leased,
        })
    };
    leased.leases.iter().map(lease).collect()
}

/// Decodes pins.
///
/// # Errors
/// `Protocol` for an invalid place or status.
pub(crate) fn pinned(
    session: &Arc<Session>,
    pinned: &local::Pinned,
    keys: usize,
) -> Result<Vec<PinOutcome>, ClientError> {
    if pinned.blocks.len() != keys {
        return Err(ClientError::Protocol(format!("{} results for {keys} pins", pinned.blocks.len())));
    }
    let outcome = |block: &local::PinnedBlock| match block.status() {
        local::PinStatus::PinOk => {
            let (file, extent) = extent_of(session, block.place)?;
            Ok(PinOutcome::Pinned(PinnedExtent {
                session: Arc::clone(session),
                pin: block.pin,
                device: extent.device,
                file,
                offset: extent.offset,
                bytes: extent.bytes,
                header_crc: extent.header_crc,
                checksums_at: extent.checksums_at as usize,
            }))
        }
        local::PinStatus::PinMiss => Ok(PinOutcome::Miss),
        local::PinStatus::PinNotDurable => Ok(PinOutcome::NotDurable),
        local::PinStatus::PinLimit => Ok(PinOutcome::Limit),
        local::PinStatus::PinUnspecified => Err(ClientError::Protocol("pin without a status".into())),
    };
    pinned.blocks.iter().map(outcome).collect()
}

/// Builds the request for written extents.
///
/// # Errors
/// `BadRequest` for an invalid number of checksums.
pub(crate) fn commit_message(
    session: &Session,
    items: &[(LeasedExtent, BlockKey, Vec<u32>)],
    options: CommitOptions,
) -> Result<local::Commit, ClientError> {
    let objects = session.layout().objects() as usize;
    let item = |(extent, key, checksums): &(LeasedExtent, BlockKey, Vec<u32>)| {
        if checksums.len() != objects {
            let text = format!("{} checksums for a block of {objects} objects", checksums.len());
            return Err(ClientError::BadRequest(text));
        }
        let packed: Vec<u8> = checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
        let (key, checksums) = (Bytes::copy_from_slice(&key.0), packed.into());
        Ok(local::CommitItem { lease: extent.lease, key, checksums })
    };
    let items = items.iter().map(item).collect::<Result<Vec<_>, _>>()?;
    let parent = options.parent.map(|key| Bytes::copy_from_slice(&key.0)).unwrap_or_default();
    let CommitOptions { priority, position, .. } = options;
    Ok(local::Commit { items, priority: priority_number(priority), parent, position })
}

/// Decodes the answer to a commit of `count` extents.
pub(crate) fn statuses(committed: &local::Committed, count: usize) -> Result<Vec<ExtentStatus>, ClientError> {
    let status = |number: &i32| match local::CommitStatus::try_from(*number).ok()? {
        local::CommitStatus::Durable => Some(ExtentStatus::Durable),
        local::CommitStatus::Duplicate => Some(ExtentStatus::Exists),
        local::CommitStatus::NoLease => Some(ExtentStatus::NoLease),
        local::CommitStatus::BadItem => Some(ExtentStatus::BadItem),
        local::CommitStatus::Failed => Some(ExtentStatus::Failed),
        local::CommitStatus::Committed | local::CommitStatus::CommitUnspecified => None,
    };
    let statuses: Option<Vec<ExtentStatus>> = committed.statuses.iter().map(status).collect();
    let is_complete = |statuses: &Vec<ExtentStatus>| statuses.len() == count;
    statuses
        .filter(is_complete)
        .ok_or_else(|| ClientError::Protocol(format!("invalid statuses for a commit of {count} extents")))
}

fn extent_of(
    session: &Session,
    place: Option<local::Place>,
) -> Result<(Option<Arc<File>>, local::Extent), ClientError> {
    let invalid = || ClientError::Protocol("place without an extent of this layout".into());
    let extent = place.and_then(|place| place.extent).ok_or_else(invalid)?;
    if extent.bytes != session.layout().slot_bytes() || extent.offset % PAGE_BYTES != 0 {
        return Err(invalid());
    }
    let connection = session.connection();
    match connection.devices().file(extent.device) {
        Ok(file) => Ok((file, extent)),
        // The end of the session closes the files, also those that an earlier reply names.
        Err(_) if connection.has_ended() => Err(connection.ended_error()),
        Err(error) => Err(error),
    }
}
