//! Opens one device: its content, engine and journal; or formats it. Nothing here depends on the kind of the
//! device.
//!
//! Everything runs on the device's own thread, because an I/O engine belongs to the thread that first uses
//! it. The device is synced before its journal is read: a killed process may have left an unsynced journal,
//! which would be announced as durable and lost at a power loss. Unreadable parts of the journal are passed
//! to recovery, which has two superblocks and two banks for this case.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_agent_core::pool::header::HEADER_BYTES;
use reprise_agent_core::pool::{DevicePool, PoolError, PoolParams, Recovery};
use reprise_buffers::{Arena, PageBuffer, Region};
use reprise_io::{
    BlockDevice, Caching, DeviceDescription, EngineChoice, EngineSettings, IfMissing, IoEngine, IoError,
    IoErrorKind, Op, Preallocation, Reserve, SharedFile, Submission, Token, Wait,
};
use reprise_policy::layout::PAGE_BYTES;

use super::access::{self, Creation, OpenDevice};
use super::names;
use super::user_nvme::ControllerHandle;
use super::{DeviceContent, OpenDecision, OpenProperties, RecoveredPool, RecoveryInfo};
use crate::config::{DeviceSettings, IoEngineChoice, PoolSettings};
use crate::error::{AgentError, ErrorKind};

/// Maximum duration of one wait for an operation.
const REAP_WAIT: Duration = Duration::from_secs(1);

/// Parameters for opening a device.
pub(super) struct OpenParams {
    description: DeviceDescription,
    bytes: Option<u64>,
    missing: IfMissing,
    reserve: Reserve,
    lend_extents: bool,
    lend_queues: bool,
    engine: EngineSettings,
}

/// An open device without its worker.
pub(super) struct RawDevice {
    description: DeviceDescription,
    /// Size of the file or device, in bytes.
    size: u64,
    /// Bytes that a pool may use.
    usable: u64,
    caching: Caching,
    /// The file for clients that read and write it themselves, if it is suitable.
    shared: Option<Arc<SharedFile>>,
    /// The controller of a device that this process drives.
    controller: Option<ControllerHandle>,
    /// Whether the pool lends extents.
    lends: bool,
    engine: Box<dyn IoEngine>,
}

/// Origin of the pool that is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PoolOrigin {
    Existing,
    /// It has just been formatted.
    Formatted,
}

impl OpenParams {
    pub(super) fn new(device: &DeviceSettings, settings: &PoolSettings, arena: &Arena) -> OpenParams {
        let regions: Vec<Arc<Region>> = arena.regions().to_vec();
        let engine = match settings.io_engine {
            IoEngineChoice::Auto => EngineChoice::Auto,
            IoEngineChoice::IoUring => EngineChoice::IoUring,
            IoEngineChoice::Plain => EngineChoice::Plain,
        };
        let engine = EngineSettings { queue_depth: settings.queue_depth, engine, regions };
        let DeviceSettings { description, bytes, missing, reserve } = device.clone();
        let PoolSettings { lend_extents, lend_queues, .. } = *settings;
        OpenParams { description, bytes, missing, reserve, lend_extents, lend_queues, engine }
    }
}

/// Opens a device and reads its content. The device stays locked from before the first read until its engine
/// is dropped.
pub(super) fn open(params: &OpenParams) -> Result<(RawDevice, DeviceContent), AgentError> {
    let opened = access::open(&params.description, params.creation()).map_err(|error| params.error(error))?;
    if opened.device.caching() == Caching::PageCache {
        tracing::warn!(path = %params.description, "this file system does not support direct I/O: data is copied and cached twice");
    }
    read_content(params, opened)
}

/// Reads the content of an open device. A file is enlarged to its configured size, and its pool grows with it.
/// Any other content is not changed.
fn read_content(
    params: &OpenParams,
    OpenDevice { mut device, controller }: OpenDevice,
) -> Result<(RawDevice, DeviceContent), AgentError> {
    let found = if device.size() == 0 { None } else { params.inspect(&mut device)? };
    if let (Some(recovered), Some(wanted)) = (&found, params.bytes) {
        let recorded = recovered.pool.device_bytes();
        if wanted < recorded {
            return Err(params.error(PoolError::CannotShrink { recorded, wanted }));
        }
    }
    if let Some(bytes) = params.bytes.filter(|bytes| *bytes > device.size()) {
        device = params.enlarge(device, bytes)?;
    }
    let has_leases = found.as_ref().is_some_and(|recovered| !recovered.pool.earlier_leases().is_empty());
    let mut open = params.start_engine((device, controller), has_leases)?;
    let found = match found {
        Some(recovered) => {
            let grown = open.grow(recovered).map_err(|error| params.error(error))?;
            Some(open.lend(grown))
        }
        None => None,
    };
    let blank = DeviceContent::Blank { device_bytes: open.usable };
    Ok((open, found.map_or(blank, |recovered| DeviceContent::Pool(Box::new(recovered)))))
}

impl OpenParams {
    fn creation(&self) -> Creation {
        let OpenParams { bytes, missing, reserve, .. } = *self;
        let mapped_bytes = self.engine.regions.iter().map(|region| region.bytes()).sum();
        Creation { missing, bytes, reserve, mapped_bytes, ..Creation::NONE }
    }

    /// Reads the journal; `None` if the device is blank.
    fn inspect(&self, device: &mut Box<dyn BlockDevice>) -> Result<Option<RecoveredPool>, AgentError> {
        let size = whole_pages(device.as_ref());
        match recover(&self.description, size, PoolOrigin::Existing, device) {
            Ok(recovered) => Ok(Some(recovered)),
            Err(OpenError::Pool(PoolError::NotFormatted)) => Ok(None),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Enlarges a file. Without enough space, the file is restored to its previous state.
    fn enlarge(
        &self,
        mut device: Box<dyn BlockDevice>,
        bytes: u64,
    ) -> Result<Box<dyn BlockDevice>, AgentError> {
        match device.preallocate(bytes, self.reserve) {
            Ok(Preallocation::Sparse) => {
                tracing::warn!(path = %self.description, "this file system cannot reserve space: writes may fail if it is full");
                Ok(device)
            }
            Ok(Preallocation::Reserved | Preallocation::Device) => Ok(device),
            Err(error) => {
                if error.kind() == IoErrorKind::NoSpace {
                    device.discard();
                }
                Err(self.error(error))
            }
        }
    }

    /// Starts the engine. If an earlier process of the agent has leased extents, clients may still write to them:
    /// then the device is opened only if their locks can be examined.
    fn start_engine(
        &self,
        (device, controller): (Box<dyn BlockDevice>, Option<ControllerHandle>),
        has_leases: bool,
    ) -> Result<RawDevice, AgentError> {
        let size = whole_pages(device.as_ref());
        let usable = self.bytes.unwrap_or(size).min(size);
        let caching = device.caching();
        let shared = match device.shared_file() {
            Ok(shared) => shared,
            Err(error) if has_leases => {
                let text = format!("cannot determine whether clients still write to leased extents: {error}");
                return Err(self.error(IoError::new(IoErrorKind::Unavailable, text)));
            }
            Err(error) => {
                if self.lend_extents {
                    tracing::warn!(path = %self.description, %error, "cannot share this file with clients");
                }
                None
            }
        };
        let shared = shared.map(Arc::new);
        // Extents of a controller have no file: sessions reach them through granted queue pairs only.
        let lends = (self.lend_extents && shared.is_some()) || self.shares_queues(controller.as_ref());
        let engine = device.start_engine(&self.engine).map_err(|error| self.error(error))?;
        let description = self.description.clone();
        Ok(RawDevice { description, size, usable, caching, shared, controller, lends, engine })
    }

    /// Whether sessions can reach extents of the device through queue pairs of its controller.
    fn shares_queues(&self, controller: Option<&ControllerHandle>) -> bool {
        self.lend_queues && controller.is_some_and(|handle| handle.controller().is_some())
    }

    fn error(&self, source: impl Into<OpenError>) -> AgentError {
        open_error(&self.description, source.into())
    }
}

impl RawDevice {
    /// Carries out the decision; formats a blank device.
    pub(super) fn apply(&mut self, decision: &OpenDecision) -> Result<Option<RecoveredPool>, AgentError> {
        match decision {
            OpenDecision::Keep => Ok(None),
            OpenDecision::Format(params) => {
                let formatted = self.format(params).and_then(|()| self.recover());
                let formatted = formatted.map_err(|error| open_error(&self.description, error))?;
                Ok(Some(self.lend(formatted)))
            }
        }
    }

    pub(super) fn properties(&self) -> OpenProperties {
        OpenProperties {
            bytes: self.size,
            engine: self.engine.kind(),
            caching: self.caching,
            shared: self.shared.clone(),
            controller: self.controller.clone(),
            waker: self.engine.waker(),
        }
    }

    pub(super) fn into_engine(self) -> Box<dyn IoEngine> {
        self.engine
    }

    /// Extends a recovered pool to the usable bytes of its device.
    fn grow(&mut self, mut recovered: RecoveredPool) -> Result<RecoveredPool, OpenError> {
        let pool = &mut recovered.pool;
        let Some(growth) = pool.plan_growth(self.usable) else { return Ok(recovered) };
        for (offset, bytes) in &growth.writes {
            self.write_pages(*offset, bytes)?;
            self.execute(Op::Sync)?;
        }
        pool.apply_growth(&growth);
        recovered.recovery.grown_bytes = growth.bytes_after - growth.bytes_before;
        tracing::info!(
            path = %self.description,
            bytes_before = growth.bytes_before,
            bytes_after = growth.bytes_after,
            block_bytes_min = pool.payload_bytes_min(),
            "the pool has grown; smaller blocks than block_bytes_min cannot fill it"
        );
        Ok(recovered)
    }

    /// Applies the settings of extents to a pool. Extents that an earlier process of the agent lent are free
    /// again, unless a process may still write to them.
    fn lend(&self, mut recovered: RecoveredPool) -> RecoveredPool {
        let pool = &mut recovered.pool;
        if !pool.earlier_leases().is_empty() {
            let is_held = self.shared.as_ref().is_some_and(|shared| is_held_by_earlier(shared));
            let (path, extents) = (&self.description, pool.earlier_leases().len());
            tracing::info!(%path, extents, is_held, "extents were leased when the agent ended");
            if !is_held {
                pool.end_earlier_leases();
            }
        }
        if self.lends {
            pool.allow_lending();
        }
        // The kernel shows a container the PCI bus of its node.
        pool.set_place(reprise_io::device_place(Path::new("/"), &self.description));
        recovered
    }

    fn write_pages(&mut self, offset: u64, bytes: &[u8]) -> Result<(), OpenError> {
        let mut pages = PageBuffer::new(bytes.len())?;
        pages.copy_from_slice(bytes);
        Ok(self.execute(Op::Write { offset, from: vec![pages.span()] })?)
    }

    fn format(&mut self, params: &PoolParams) -> Result<(), OpenError> {
        for (offset, bytes) in DevicePool::format(params)? {
            self.write_pages(offset, &bytes)?;
        }
        Ok(self.execute(Op::Sync)?)
    }

    /// Recovers the formatted pool.
    fn recover(&mut self) -> Result<RecoveredPool, OpenError> {
        let (description, size) = (self.description.clone(), self.size);
        recover(&description, size, PoolOrigin::Formatted, self)
    }

    /// Runs one operation to completion.
    fn execute(&mut self, op: Op) -> Result<(), IoError> {
        let submitted = self.engine.submit(Submission { token: Token(0), op });
        submitted.map_err(|_| IoError::new(IoErrorKind::Lost, "an idle engine rejected an operation"))?;
        let mut completed = Vec::with_capacity(1);
        while completed.is_empty() {
            self.engine.reap(Wait::Until(REAP_WAIT), &mut completed)?;
        }
        completed.pop().expect("the loop ended").result
    }
}

/// Whether a process may still do I/O for an earlier agent. An unknown answer counts as yes.
pub(crate) fn is_held_by_earlier(shared: &SharedFile) -> bool {
    shared.is_held_by_earlier().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot determine whether extents are in use");
        true
    })
}

/// Source of a journal.
trait Medium {
    /// Makes previous writes durable.
    fn sync(&mut self) -> Result<(), IoError>;
    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError>;
}

impl Medium for Box<dyn BlockDevice> {
    fn sync(&mut self) -> Result<(), IoError> {
        self.as_mut().sync()
    }

    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        self.as_mut().read(offset, into)
    }
}

impl Medium for RawDevice {
    fn sync(&mut self) -> Result<(), IoError> {
        self.execute(Op::Sync)
    }

    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        self.execute(Op::Read { offset, into: vec![into.span()] })
    }
}

/// Recovers the journal of a device of `size` bytes after syncing it.
fn recover(
    description: &DeviceDescription,
    size: u64,
    history: PoolOrigin,
    medium: &mut impl Medium,
) -> Result<RecoveredPool, OpenError> {
    let started = Instant::now();
    medium.sync()?;
    let mut recovery = Recovery::new(size);
    while let Some((offset, bytes)) = recovery.next_read() {
        let mut pages = PageBuffer::new(bytes)?;
        match medium.read(offset, &mut pages) {
            Ok(()) => recovery.feed(&pages)?,
            Err(error) if error.kind() == IoErrorKind::Media => {
                tracing::warn!(path = %description, offset, bytes, %error, "cannot read a part of the journal");
                recovery.feed_unreadable()?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let (pool, stored, report) = recovery.finish()?;
    if !report.is_clean() {
        tracing::warn!(path = %description, ?report, "the journal was damaged; blocks recorded only in the damaged parts are lost");
    }
    let names = names::find(&stored, |offset| {
        let mut page = PageBuffer::new(HEADER_BYTES).ok()?;
        medium.read(offset, &mut page).ok().map(|()| page)
    });
    let recovery = RecoveryInfo {
        took: started.elapsed(),
        records: report.checkpoint_records + report.log_records,
        blocks: stored.len() as u64,
        formatted: history == PoolOrigin::Formatted,
        grown_bytes: 0,
    };
    Ok(RecoveredPool { pool, stored, names, recovery })
}

fn whole_pages(device: &dyn BlockDevice) -> u64 {
    device.size() / PAGE_BYTES * PAGE_BYTES
}

fn open_error(description: &DeviceDescription, error: OpenError) -> AgentError {
    let context = format!("cannot use pool device '{description}'");
    AgentError::new(ErrorKind::Device, context).with_source(error)
}

/// Why a device cannot be used, as far as the remedies differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenErrorKind {
    /// The kernel does not allow the desired engine.
    Engine,
    /// No engine of this build serves this kind of device.
    Unserved,
    /// It holds foreign data.
    Foreign,
    Other,
}

/// Classifies an error of opening a device.
pub(crate) fn open_error_kind(error: &AgentError) -> OpenErrorKind {
    match error.cause::<OpenError>() {
        Some(OpenError::Io(error)) if error.kind() == IoErrorKind::Unsupported => OpenErrorKind::Engine,
        Some(OpenError::Io(error)) if error.kind() == IoErrorKind::NoEngine => OpenErrorKind::Unserved,
        Some(OpenError::Pool(PoolError::Foreign { .. })) => OpenErrorKind::Foreign,
        _ => OpenErrorKind::Other,
    }
}

/// Why a device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Io(#[from] IoError),
    #[error(transparent)]
    Buffer(#[from] reprise_buffers::BufferError),
}

#[cfg(test)]
pub(crate) mod tests;
