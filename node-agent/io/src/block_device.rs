//! The trait of open devices: what a pool needs of a device before it has an engine.

use std::io;

use reprise_buffers::PageBuffer;

use crate::device::{Caching, DeviceFile, Preallocation, Reserve};
use crate::engine::IoEngine;
use crate::error::IoError;
use crate::open::{EngineSettings, open_engine};
use crate::shared::SharedFile;

/// An open device that no other process uses. It is locked until it, or the engine that replaces it, is
/// dropped.
///
/// [`DeviceFile`] implements it for files and block devices of the kernel,
/// [`SimulatedEngine`](crate::simulated::SimulatedEngine) for tests. A driver in user space implements it for
/// its controllers.
pub trait BlockDevice: Send {
    /// Returns the size in bytes, as of opening or the last [`preallocate`](Self::preallocate).
    fn size(&self) -> u64;

    /// Reports whether transfers bypass the page cache.
    fn caching(&self) -> Caching;

    /// Reads whole pages synchronously.
    ///
    /// # Errors
    /// `Media`, `Lost`, or `ShortTransfer` beyond the end.
    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError>;

    /// Makes all earlier writes durable, by any process, and waits for it.
    ///
    /// # Errors
    /// `Lost` or another: it is then unknown which writes are durable.
    fn sync(&mut self) -> Result<(), IoError>;

    /// Makes the device at least `bytes` long. Unwritten space reads as zeroes. A file system keeps at least
    /// `reserve` available for others.
    ///
    /// # Errors
    /// `NoSpace` when the device or its file system is too small.
    fn preallocate(&mut self, bytes: u64, reserve: Reserve) -> Result<Preallocation, IoError>;

    /// Erases the contents, durably: everything reads as zeroes afterwards.
    ///
    /// # Errors
    /// Any; a part of the contents may remain.
    fn erase(&mut self) -> Result<(), IoError>;

    /// Erases the first and the last `bytes` bytes, durably: other programs identify a device by these
    /// ranges.
    ///
    /// # Errors
    /// Any; a part of the contents may remain.
    fn erase_ends(&mut self, bytes: u64) -> Result<(), IoError>;

    /// Returns the file for clients that read and write it themselves; `None` if the device cannot be shared.
    ///
    /// # Errors
    /// The system's error.
    fn shared_file(&self) -> io::Result<Option<SharedFile>> {
        Ok(None)
    }

    /// Closes the device, and removes what opening has created.
    fn discard(self: Box<Self>);

    /// Starts an engine on the device.
    ///
    /// # Errors
    /// `Invalid` for settings outside their ranges; `Unsupported` when the device cannot use the chosen engine;
    /// `Unavailable` when the process is out of descriptors or threads.
    fn start_engine(self: Box<Self>, settings: &EngineSettings) -> Result<Box<dyn IoEngine>, IoError>;
}

impl BlockDevice for DeviceFile {
    fn size(&self) -> u64 {
        DeviceFile::size(self)
    }

    fn caching(&self) -> Caching {
        DeviceFile::caching(self)
    }

    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        DeviceFile::read(self, offset, into)
    }

    fn sync(&mut self) -> Result<(), IoError> {
        DeviceFile::sync(self)
    }

    fn preallocate(&mut self, bytes: u64, reserve: Reserve) -> Result<Preallocation, IoError> {
        DeviceFile::preallocate(self, bytes, reserve)
    }

    fn erase(&mut self) -> Result<(), IoError> {
        DeviceFile::erase(self)
    }

    fn erase_ends(&mut self, bytes: u64) -> Result<(), IoError> {
        DeviceFile::erase_ends(self, bytes)
    }

    fn shared_file(&self) -> io::Result<Option<SharedFile>> {
        SharedFile::of(self)
    }

    fn discard(self: Box<Self>) {
        DeviceFile::discard(*self);
    }

    fn start_engine(self: Box<Self>, settings: &EngineSettings) -> Result<Box<dyn IoEngine>, IoError> {
        open_engine(*self, settings)
    }
}
