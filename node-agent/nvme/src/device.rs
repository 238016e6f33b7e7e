//! A namespace of a controller as a block device.

use std::sync::Arc;
use std::time::Duration;

use reprise_buffers::PageBuffer;
use reprise_io::{
    BlockDevice, Bounds, Caching, EngineSettings, FileAccess, IO_ALIGN, IoEngine, IoError, IoErrorKind, Op,
    Preallocation, QUEUE_DEPTH_MAX, Reserve, Submission, Token, Wait,
};

use crate::backing::Backing;
use crate::controller::{Controller, DriverSettings, Namespace};
use crate::engine::NvmeEngine;
use crate::error::NvmeError;
use crate::shared::{OpenController, SharedController};
use crate::spec::{Command, WRITE_ZEROES};

/// Entries of the queue pair of a device. A large operation has many commands.
const ENTRIES: u32 = 1024;
/// Blocks of one Write Zeroes: its maximum.
const ZERO_BLOCKS: u64 = 1 << 16;
/// Size of a write that erases, if the controller lacks Write Zeroes.
const ERASE_BYTES: usize = 1 << 20;

/// How a namespace is opened.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSettings {
    /// Limits of the driver.
    pub driver: DriverSettings,
    /// Namespace to use; `None` for the only one.
    pub namespace: Option<u32>,
    /// Access mode.
    pub access: FileAccess,
    /// Deadline of a read or write, after which it is aborted: 30 s in the kernel's driver.
    pub command_timeout: Duration,
}

impl Default for DeviceSettings {
    fn default() -> DeviceSettings {
        DeviceSettings {
            driver: DriverSettings::default(),
            namespace: None,
            access: FileAccess::ReadWrite,
            command_timeout: Duration::from_secs(30),
        }
    }
}

/// A namespace, open for one user.
#[derive(Debug)]
pub struct NvmeDevice<B: Backing> {
    engine: NvmeEngine<B>,
    bytes: u64,
    access: FileAccess,
}

impl<B: Backing> NvmeDevice<B> {
    /// Starts a controller and opens a namespace of it.
    ///
    /// # Errors
    /// `Unavailable` if the controller does not start or lacks the namespace, with the remedy.
    pub fn open(backing: B, settings: &DeviceSettings) -> Result<NvmeDevice<B>, IoError> {
        let controller = Controller::start(backing, settings.driver).map_err(|error| unavailable(&error))?;
        let all = controller.namespaces();
        let wanted = all.iter().filter(|one| settings.namespace.is_none_or(|id| id == one.id));
        let wanted: Vec<_> = wanted.copied().collect();
        let [namespace] = wanted[..] else {
            let ids: Vec<_> = all.iter().map(|one| one.id.to_string()).collect();
            let text = format!(
                "the controller has {} usable namespaces ({}): configure one of them; its blocks must have 512 to \
                 4,096 bytes and no metadata",
                ids.len(),
                ids.join(", ")
            );
            return Err(IoError::new(IoErrorKind::Unavailable, text));
        };
        let bytes = namespace.bytes() / IO_ALIGN as u64 * IO_ALIGN as u64;
        let access = if namespace.write_protected { FileAccess::ReadOnly } else { settings.access };
        let bounds = Bounds { size: bytes, access };
        let timeout = settings.command_timeout;
        let engine = NvmeEngine::new(controller, namespace, bounds, ENTRIES, timeout)
            .map_err(|error| unavailable(&error))?;
        Ok(NvmeDevice { engine, bytes, access })
    }

    /// Returns the controller of the device, which other users share with its engine.
    pub fn controller(&self) -> &Arc<SharedController<B>> {
        self.engine.controller()
    }

    /// Returns the namespace of the device.
    pub fn namespace(&self) -> Namespace {
        self.engine.namespace()
    }

    /// Runs one operation to its end.
    fn run(&mut self, op: Op) -> Result<(), IoError> {
        let submission = Submission { token: Token(0), op };
        self.engine.submit(submission).map_err(|_| IoError::new(IoErrorKind::Busy, "the device is busy"))?;
        let mut done = Vec::new();
        while done.is_empty() {
            self.engine.reap(Wait::Until(Duration::from_secs(1)), &mut done)?;
        }
        done.pop().expect("it has ended").result
    }

    fn zero(&mut self, from: u64, to: u64) -> Result<(), IoError> {
        if self.access != FileAccess::ReadWrite {
            return Err(IoError::new(IoErrorKind::Invalid, "erasing a device that was opened read-only"));
        }
        if self.controller().identity().write_zeroes {
            match self.zero_by_command(from, to) {
                // A limit of the command that this driver does not know.
                Err(error) if error.kind() == IoErrorKind::Media => {
                    tracing::info!(%error, "the controller rejects Write Zeroes, writing zeroes");
                }
                result => return result,
            }
        }
        let no_memory = |_| IoError::new(IoErrorKind::Busy, "erasing an NVMe namespace");
        let mut zeroes = PageBuffer::new(ERASE_BYTES).map_err(no_memory)?;
        let mut offset = from;
        while offset < to {
            let bytes = (to - offset).min(ERASE_BYTES as u64) as usize;
            let part = zeroes.span().slice(0, bytes).expect("inside");
            self.run(Op::Write { offset, from: vec![part] })?;
            offset += bytes as u64;
        }
        Ok(())
    }
}

impl<B: Backing> NvmeDevice<B> {
    fn zero_by_command(&mut self, from: u64, to: u64) -> Result<(), IoError> {
        let namespace = self.engine.namespace();
        let block = u64::from(namespace.block_bytes);
        let (mut lba, end) = (from / block, to / block);
        while lba < end {
            let count = (end - lba).min(ZERO_BLOCKS);
            self.engine.run(&Command::transfer(WRITE_ZEROES, namespace.id, lba, count as u32))?;
            lba += count;
        }
        Ok(())
    }
}

impl<B: Backing> BlockDevice for NvmeDevice<B> {
    fn size(&self) -> u64 {
        self.bytes
    }

    fn caching(&self) -> Caching {
        Caching::Direct
    }

    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        if offset.checked_add(into.len() as u64).is_none_or(|end| end > self.bytes) {
            let text = format!("reading {} bytes at {offset}: the device has {}", into.len(), self.bytes);
            return Err(IoError::new(IoErrorKind::ShortTransfer, text));
        }
        self.run(Op::Read { offset, into: vec![into.span()] })
    }

    fn sync(&mut self) -> Result<(), IoError> {
        self.run(Op::Sync)
    }

    fn preallocate(&mut self, bytes: u64, _reserve: Reserve) -> Result<Preallocation, IoError> {
        if self.bytes >= bytes {
            return Ok(Preallocation::Device);
        }
        let text = format!(
            "pool of {bytes} bytes: the namespace has only {} bytes; configure a smaller pool",
            self.bytes
        );
        Err(IoError::new(IoErrorKind::NoSpace, text))
    }

    fn erase(&mut self) -> Result<(), IoError> {
        self.zero(0, self.bytes)?;
        self.sync()
    }

    fn erase_ends(&mut self, bytes: u64) -> Result<(), IoError> {
        let whole = bytes.next_multiple_of(IO_ALIGN as u64);
        let first = whole.min(self.bytes);
        self.zero(0, first)?;
        self.zero(self.bytes.saturating_sub(whole).max(first), self.bytes)?;
        self.sync()
    }

    fn discard(self: Box<Self>) {
        // Opening has created nothing; dropping disables the controller.
    }

    fn start_engine(mut self: Box<Self>, settings: &EngineSettings) -> Result<Box<dyn IoEngine>, IoError> {
        let depth = settings.queue_depth;
        if depth == 0 || depth > QUEUE_DEPTH_MAX {
            let text = format!("invalid queue depth {depth}: expected 1 to {QUEUE_DEPTH_MAX}");
            return Err(IoError::new(IoErrorKind::Invalid, text));
        }
        self.engine.configure(depth as usize, &settings.regions).map_err(|error| unavailable(&error))?;
        let identity = self.controller().identity();
        tracing::info!(
            model = identity.model, serial = identity.serial, data = %self.controller().data_format(), depth,
            "NVMe controller opened in user space"
        );
        Ok(Box::new(self.engine))
    }
}

fn unavailable(error: &NvmeError) -> IoError {
    IoError::new(IoErrorKind::Unavailable, format!("NVMe controller: {error}"))
}
