//! Opens one device: file, engine, journal; or formats it.
//!
//! Everything runs on the device's own thread, because an I/O engine belongs to the thread that first uses
//! it. The device is synced before its journal is read: a killed process may have left an unsynced journal,
//! which would be announced as durable and lost at a power loss. Unreadable parts of the journal are passed
//! to recovery, which has two superblocks and two banks for this case.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_agent_core::pool::header::HEADER_BYTES;
use reprise_agent_core::pool::{DevicePool, PoolError, PoolParams, Recovery};
use reprise_buffers::{Arena, PageBuffer, Region};
use reprise_io::{
    Caching, DeviceFile, EngineChoice, EngineSettings, FileAccess, IfMissing, IoEngine, IoError, IoErrorKind,
    Op, Preallocation, Reserve, SharedFile, Submission, Token, Wait, open_engine,
};
use reprise_policy::layout::PAGE_BYTES;

use super::names;
use super::{DeviceContent, OpenDecision, OpenProperties, RecoveredPool, RecoveryInfo};
use crate::config::{DeviceSettings, IoEngineChoice, PoolSettings};
use crate::error::{AgentError, ErrorKind};

/// Maximum duration of one wait for an operation.
const REAP_WAIT: Duration = Duration::from_secs(1);

/// Parameters for opening a device.
pub(super) struct OpenParams {
    path: PathBuf,
    bytes: Option<u64>,
    missing: IfMissing,
    reserve: Reserve,
    lend_extents: bool,
    engine: EngineSettings,
}

/// An open device without its worker.
pub(super) struct RawDevice {
    path: PathBuf,
    /// Size of the file or device, in bytes.
    size: u64,
    /// Bytes that a pool may use.
    usable: u64,
    caching: Caching,
    /// The file for clients that read and write it themselves, if it is suitable.
    shared: Option<Arc<SharedFile>>,
    lend_extents: bool,
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
        let DeviceSettings { path, bytes, missing } = device.clone();
        let (reserve, lend_extents) = (settings.reserve, settings.lend_extents);
        OpenParams { path, bytes, missing, reserve, lend_extents, engine }
    }
}

/// Opens a device and reads its content. A file is enlarged to its configured size, and its pool grows with
/// it. Any other content is not changed. The file stays locked from before the first read until its engine is
/// dropped.
pub(super) fn open(params: &OpenParams) -> Result<(RawDevice, DeviceContent), AgentError> {
    let mut file = params.open_file()?;
    let found = if file.size() == 0 { None } else { params.inspect(&file)? };
    if let (Some(recovered), Some(wanted)) = (&found, params.bytes) {
        let recorded = recovered.pool.device_bytes();
        if wanted < recorded {
            return Err(params.error(PoolError::CannotShrink { recorded, wanted }));
        }
    }
    if let Some(bytes) = params.bytes.filter(|bytes| *bytes > file.size()) {
        file = params.enlarge(file, bytes)?;
    }
    let mut open = params.start_engine(file)?;
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
    fn open_file(&self) -> Result<DeviceFile, AgentError> {
        let file = DeviceFile::open(&self.path, FileAccess::ReadWrite, self.missing)
            .map_err(|error| self.error(error))?;
        if file.caching() == Caching::PageCache {
            tracing::warn!(path = %self.path.display(), "this file system does not support direct I/O: data is copied and cached twice");
        }
        Ok(file)
    }

    /// Reads the journal; `None` if the device is blank.
    fn inspect(&self, file: &DeviceFile) -> Result<Option<RecoveredPool>, AgentError> {
        match recover(&self.path, whole_pages(file), PoolOrigin::Existing, &mut &*file) {
            Ok(recovered) => Ok(Some(recovered)),
            Err(OpenError::Pool(PoolError::NotFormatted)) => Ok(None),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Enlarges a file. Without enough space, the file is restored to its previous state.
    fn enlarge(&self, mut file: DeviceFile, bytes: u64) -> Result<DeviceFile, AgentError> {
        match file.preallocate(bytes, self.reserve) {
            Ok(Preallocation::Sparse) => {
                tracing::warn!(path = %self.path.display(), "this file system cannot reserve space: writes may fail if it is full");
                Ok(file)
            }
            Ok(Preallocation::Reserved | Preallocation::Device) => Ok(file),
            Err(error) => {
                if error.kind() == IoErrorKind::NoSpace {
                    file.discard();
                }
                Err(self.error(error))
            }
        }
    }

    fn start_engine(&self, file: DeviceFile) -> Result<RawDevice, AgentError> {
        let size = whole_pages(&file);
        let usable = self.bytes.unwrap_or(size).min(size);
        let caching = file.caching();
        let shared = SharedFile::of(&file).unwrap_or_else(|error| {
            if self.lend_extents {
                tracing::warn!(path = %self.path.display(), %error, "cannot share this file with clients");
            }
            None
        });
        let (shared, lend_extents) = (shared.map(Arc::new), self.lend_extents);
        let engine = open_engine(file, &self.engine).map_err(|error| self.error(error))?;
        Ok(RawDevice { path: self.path.clone(), size, usable, caching, shared, lend_extents, engine })
    }

    fn error(&self, source: impl Into<OpenError>) -> AgentError {
        open_error(&self.path, source.into())
    }
}

impl RawDevice {
    /// Creates a device from an engine only, for tests.
    #[cfg(test)]
    pub(super) fn over(engine: impl IoEngine + 'static, size: u64) -> RawDevice {
        let (path, engine) = (PathBuf::from("simulated"), Box::new(engine));
        let (shared, lend_extents) = (None, false);
        RawDevice { path, size, usable: size, caching: Caching::Direct, shared, lend_extents, engine }
    }

    /// Carries out the decision; formats a blank device.
    pub(super) fn apply(&mut self, decision: &OpenDecision) -> Result<Option<RecoveredPool>, AgentError> {
        match decision {
            OpenDecision::Keep => Ok(None),
            OpenDecision::Format(params) => {
                let formatted = self.format(params).and_then(|()| self.recover());
                let formatted = formatted.map_err(|error| open_error(&self.path, error))?;
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
            path = %self.path.display(),
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
        if pool.earlier_leases() > 0 {
            let is_held = self.shared.as_ref().is_some_and(|shared| is_held_by_earlier(shared));
            let (path, extents) = (self.path.display(), pool.earlier_leases());
            tracing::info!(%path, extents, is_held, "extents were leased when the agent ended");
            if !is_held {
                pool.end_earlier_leases();
            }
        }
        if self.lend_extents && self.shared.is_some() {
            pool.allow_lending();
        }
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
    pub(super) fn recover(&mut self) -> Result<RecoveredPool, OpenError> {
        let (path, size) = (self.path.clone(), self.size);
        recover(&path, size, PoolOrigin::Formatted, self)
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

impl Medium for &DeviceFile {
    fn sync(&mut self) -> Result<(), IoError> {
        DeviceFile::sync(self)
    }

    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        DeviceFile::read(self, offset, into)
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
    path: &Path,
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
                tracing::warn!(path = %path.display(), offset, bytes, %error, "cannot read a part of the journal");
                recovery.feed_unreadable()?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let (pool, stored, report) = recovery.finish()?;
    if !report.is_clean() {
        tracing::warn!(path = %path.display(), ?report, "the journal was damaged; blocks recorded only in the damaged parts are lost");
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

fn whole_pages(file: &DeviceFile) -> u64 {
    file.size() / PAGE_BYTES * PAGE_BYTES
}

fn open_error(path: &Path, error: OpenError) -> AgentError {
    let context = format!("cannot use pool device '{}'", path.display());
    AgentError::new(ErrorKind::Device, context).with_source(error)
}

/// Why a device cannot be used, as far as the remedies differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenErrorKind {
    /// The kernel does not allow the desired engine.
    Engine,
    /// It holds foreign data.
    Foreign,
    Other,
}

/// Classifies an error of opening a device.
pub(crate) fn open_error_kind(error: &AgentError) -> OpenErrorKind {
    match error.cause::<OpenError>() {
        Some(OpenError::Io(error)) if error.kind() == IoErrorKind::Unsupported => OpenErrorKind::Engine,
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
mod tests {
    use super::*;

    /// A formatted device whose journal is not synced yet.
    struct UnsyncedPool {
        pages: Vec<(u64, Vec<u8>)>,
        synced: bool,
    }

    impl Medium for UnsyncedPool {
        fn sync(&mut self) -> Result<(), IoError> {
            self.synced = true;
            Ok(())
        }

        fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
            assert!(self.synced, "reads require a previous sync");
            for (at, bytes) in &self.pages {
                let covered = (*at).max(offset)..(at + bytes.len() as u64).min(offset + into.len() as u64);
                for position in covered {
                    into[(position - offset) as usize] = bytes[(position - at) as usize];
                }
            }
            Ok(())
        }
    }

    #[test]
    fn file_is_created_only_if_allowed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pool");
        let params = |missing| OpenParams {
            path: path.clone(),
            bytes: Some(8 << 20),
            missing,
            reserve: Reserve::Bytes(0),
            lend_extents: false,
            engine: EngineSettings { queue_depth: 1, engine: EngineChoice::Plain, regions: Vec::new() },
        };
        assert!(open(&params(IfMissing::Fail)).is_err() && !path.exists(), "it must exist");
        let (_open, found) = open(&params(IfMissing::Create)).unwrap_or_else(|error| panic!("{error}"));
        assert!(
            matches!(found, DeviceContent::Blank { device_bytes } if device_bytes == 8 << 20)
                && path.exists()
        );
    }

    #[test]
    fn journal_is_synced_before_it_is_read() {
        let device_bytes = 8 << 20;
        let params = PoolParams {
            device_bytes,
            segment_bytes: 2 << 20,
            pool_uuid: [1; 16],
            device_index: 0,
            created_unix_us: 1,
        };
        let pages = DevicePool::format(&params).expect("sound parameters");
        let mut medium = UnsyncedPool { pages, synced: false };
        let opened = recover(Path::new("formatted"), device_bytes, PoolOrigin::Existing, &mut medium);
        let recovered = opened.unwrap_or_else(|error| panic!("{error}"));
        assert!(recovered.stored.is_empty() && medium.synced);
    }
}
