//! Opening one device: file, engine, journal; or format.
//!
//! Everything here runs on the device's own thread, because an I/O engine belongs to the thread that first uses it.
//! What is there is synced before it is read. A process that was killed may have written a journal that nothing has synced:
//! it would be read now, announced as durable, and gone after power loss.
//! What of the journal the medium cannot read is told to recovery, which has two superblocks and two banks for that.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_agent_core::pool::header::HEADER_BYTES;
use reprise_agent_core::pool::{DevicePool, PoolError, PoolParams, Recovery};
use reprise_buffers::{Arena, PageBuffer, Region};
use reprise_io::{
    Caching, DeviceFile, EngineChoice, EngineSettings, FileAccess, IoEngine, IoError, IoErrorKind, Missing,
    Op, Preallocated, Submission, Token, Wait, open_engine,
};
use reprise_policy::layout::PAGE_BYTES;

use super::names;
use super::{Facts, Found, Recovered, RecoveryInfo, Verdict};
use crate::config::{DeviceSettings, IoEngineChoice, PoolSettings};
use crate::error::{AgentError, ErrorKind};

/// One wait for an operation; it ends earlier when the operation does.
const REAP_WAIT: Duration = Duration::from_secs(1);

/// How to open a device.
pub(super) struct Recipe {
    path: PathBuf,
    bytes: Option<u64>,
    missing: Missing,
    engine: EngineSettings,
}

/// A device that is open.
pub(super) struct Open {
    path: PathBuf,
    /// All of the file or device.
    size: u64,
    /// What a pool may use of it.
    usable: u64,
    caching: Caching,
    engine: Box<dyn IoEngine>,
}

/// How a pool came to be what is being read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum History {
    /// It was there at start.
    Found,
    /// It has just been formatted.
    Formatted,
}

impl Recipe {
    pub(super) fn new(device: &DeviceSettings, settings: &PoolSettings, arena: &Arena) -> Recipe {
        let regions: Vec<Arc<Region>> = arena.regions().to_vec();
        let engine = match settings.io_engine {
            IoEngineChoice::Auto => EngineChoice::Auto,
            IoEngineChoice::IoUring => EngineChoice::IoUring,
            IoEngineChoice::Plain => EngineChoice::Plain,
        };
        let engine = EngineSettings { queue_depth: settings.queue_depth, engine, regions };
        Recipe { path: device.path.clone(), bytes: device.bytes, missing: device.missing, engine }
    }
}

/// Opens a device and looks what is on it. A file that is not a pool yet gets its size now; one that holds anything
/// else is left as it is. The file is locked once and stays so, from before it is looked at until its engine ends.
pub(super) fn open(recipe: &Recipe) -> Result<(Open, Found), AgentError> {
    let mut file = recipe.open_file()?;
    let found = if file.size() == 0 { None } else { recipe.inspect(&file)? };
    let wanted = recipe.bytes.filter(|bytes| *bytes > file.size());
    match (&found, wanted) {
        (None, Some(bytes)) => file = recipe.enlarge(file, bytes)?,
        (Some(_), Some(_)) => {
            tracing::warn!(path = %recipe.path.display(), size = file.size(), "the pool keeps the size it was formatted with");
        }
        (_, None) => {}
    }
    let open = recipe.start_engine(file)?;
    let blank = Found::Blank { device_bytes: open.usable };
    Ok((open, found.map_or(blank, |recovered| Found::Pool(Box::new(recovered)))))
}

impl Recipe {
    fn open_file(&self) -> Result<DeviceFile, AgentError> {
        let file = DeviceFile::open(&self.path, FileAccess::ReadWrite, self.missing)
            .map_err(|error| self.error(error))?;
        if file.caching() == Caching::PageCache {
            tracing::warn!(path = %self.path.display(), "this file system has no direct I/O: every byte is copied and cached twice");
        }
        Ok(file)
    }

    /// Reads the journal; `None` when nothing was ever written.
    fn inspect(&self, file: &DeviceFile) -> Result<Option<Recovered>, AgentError> {
        match recover(&self.path, whole_pages(file), History::Found, &mut &*file) {
            Ok(recovered) => Ok(Some(recovered)),
            Err(OpenError::Pool(PoolError::NotFormatted)) => Ok(None),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Gives a blank file its size. When there is no room for it, nothing is left behind that was not there before.
    fn enlarge(&self, mut file: DeviceFile, bytes: u64) -> Result<DeviceFile, AgentError> {
        match file.preallocate(bytes) {
            Ok(Preallocated::Sparse) => {
                tracing::warn!(path = %self.path.display(), "this file system cannot reserve space: writes may find it full");
                Ok(file)
            }
            Ok(Preallocated::Reserved | Preallocated::Device) => Ok(file),
            Err(error) => {
                if error.kind() == IoErrorKind::NoSpace {
                    file.discard();
                }
                Err(self.error(error))
            }
        }
    }

    fn start_engine(&self, file: DeviceFile) -> Result<Open, AgentError> {
        let size = whole_pages(&file);
        let usable = self.bytes.unwrap_or(size).min(size);
        let caching = file.caching();
        let engine = open_engine(file, &self.engine).map_err(|error| self.error(error))?;
        Ok(Open { path: self.path.clone(), size, usable, caching, engine })
    }

    fn error(&self, source: impl Into<OpenError>) -> AgentError {
        cannot_be_used(&self.path, source.into())
    }
}

impl Open {
    /// A device that is an engine only, for tests.
    #[cfg(test)]
    pub(super) fn over(engine: impl IoEngine + 'static, size: u64) -> Open {
        let (path, engine) = (PathBuf::from("simulated"), Box::new(engine));
        Open { path, size, usable: size, caching: Caching::Direct, engine }
    }

    /// Does what was decided; a fresh device becomes a pool.
    pub(super) fn settle(&mut self, verdict: &Verdict) -> Result<Option<Recovered>, AgentError> {
        match verdict {
            Verdict::Keep => Ok(None),
            Verdict::Format(params) => {
                let formatted = self.format(params).and_then(|()| self.recover());
                formatted.map(Some).map_err(|error| cannot_be_used(&self.path, error))
            }
        }
    }

    pub(super) fn facts(&self) -> Facts {
        Facts {
            bytes: self.size,
            engine: self.engine.kind(),
            caching: self.caching,
            waker: self.engine.waker(),
        }
    }

    pub(super) fn into_engine(self) -> Box<dyn IoEngine> {
        self.engine
    }

    fn format(&mut self, params: &PoolParams) -> Result<(), OpenError> {
        for (offset, bytes) in DevicePool::format(params)? {
            let mut pages = PageBuffer::new(bytes.len())?;
            pages.copy_from_slice(&bytes);
            self.execute(Op::Write { offset, from: vec![pages.span()] })?;
        }
        Ok(self.execute(Op::Sync)?)
    }

    /// Reads what was formatted.
    pub(super) fn recover(&mut self) -> Result<Recovered, OpenError> {
        let (path, size) = (self.path.clone(), self.size);
        recover(&path, size, History::Formatted, self)
    }

    /// Runs one operation to its end.
    fn execute(&mut self, op: Op) -> Result<(), IoError> {
        let submitted = self.engine.submit(Submission { token: Token(0), op });
        submitted.map_err(|_| IoError::new(IoErrorKind::Lost, "an idle engine refuses an operation"))?;
        let mut completed = Vec::with_capacity(1);
        while completed.is_empty() {
            self.engine.reap(Wait::Until(REAP_WAIT), &mut completed)?;
        }
        completed.pop().expect("the loop ended").result
    }
}

/// What a journal is read from.
trait Medium {
    /// Makes durable what is there.
    fn sync(&mut self) -> Result<(), IoError>;
    /// Reads whole pages.
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

impl Medium for Open {
    fn sync(&mut self) -> Result<(), IoError> {
        self.execute(Op::Sync)
    }

    fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        self.execute(Op::Read { offset, into: vec![into.span()] })
    }
}

/// Reads the journal of a device of `size` bytes, after it is durable.
fn recover(
    path: &Path,
    size: u64,
    history: History,
    medium: &mut impl Medium,
) -> Result<Recovered, OpenError> {
    let started = Instant::now();
    medium.sync()?;
    let mut recovery = Recovery::new(size);
    while let Some((offset, bytes)) = recovery.next_read() {
        let mut pages = PageBuffer::new(bytes)?;
        match medium.read(offset, &mut pages) {
            Ok(()) => recovery.feed(&pages)?,
            Err(error) if error.kind() == IoErrorKind::Media => {
                tracing::warn!(path = %path.display(), offset, bytes, %error, "the journal cannot be read here");
                recovery.feed_unreadable()?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let (pool, stored, report) = recovery.finish()?;
    if !report.is_clean() {
        tracing::warn!(path = %path.display(), ?report, "the journal was damaged; blocks it named only there are lost");
    }
    let names = names::find(&stored, |offset| {
        let mut page = PageBuffer::new(HEADER_BYTES).ok()?;
        medium.read(offset, &mut page).ok().map(|()| page)
    });
    let recovery = RecoveryInfo {
        took: started.elapsed(),
        records: report.checkpoint_records + report.log_records,
        blocks: stored.len() as u64,
        formatted: history == History::Formatted,
    };
    Ok(Recovered { pool, stored, names, recovery })
}

fn whole_pages(file: &DeviceFile) -> u64 {
    file.size() / PAGE_BYTES * PAGE_BYTES
}

fn cannot_be_used(path: &Path, error: OpenError) -> AgentError {
    let context = format!("pool device '{}' cannot be used", path.display());
    AgentError::new(ErrorKind::Device, context).because(error)
}

/// What is wrong with a device, as far as somebody may act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// The kernel does not grant the engine that was asked for.
    Engine,
    /// It holds data of somebody else.
    Foreign,
    /// Anything else.
    Otherwise,
}

/// What an error of opening a device is about.
pub(crate) fn unusable(error: &AgentError) -> Unusable {
    match error.cause::<OpenError>() {
        Some(OpenError::Io(error)) if error.kind() == IoErrorKind::Unsupported => Unusable::Engine,
        Some(OpenError::Pool(PoolError::Foreign { .. })) => Unusable::Foreign,
        _ => Unusable::Otherwise,
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

    /// A formatted device whose journal a killed process may have left unsynced.
    struct Formatted {
        pages: Vec<(u64, Vec<u8>)>,
        synced: bool,
    }

    impl Medium for Formatted {
        fn sync(&mut self) -> Result<(), IoError> {
            self.synced = true;
            Ok(())
        }

        fn read(&mut self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
            assert!(self.synced, "what is read must be durable already");
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
    fn a_file_is_made_only_where_it_may_be() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pool");
        let recipe = |missing| Recipe {
            path: path.clone(),
            bytes: Some(8 << 20),
            missing,
            engine: EngineSettings { queue_depth: 1, engine: EngineChoice::Plain, regions: Vec::new() },
        };
        assert!(open(&recipe(Missing::Fail)).is_err() && !path.exists(), "it must be there");
        let (_open, found) = open(&recipe(Missing::Create)).unwrap_or_else(|error| panic!("{error}"));
        assert!(matches!(found, Found::Blank { device_bytes } if device_bytes == 8 << 20) && path.exists());
    }

    #[test]
    fn a_journal_is_made_durable_before_it_is_believed() {
        let device_bytes = 8 << 20;
        let params = PoolParams {
            device_bytes,
            segment_bytes: 2 << 20,
            pool_uuid: [1; 16],
            device_index: 0,
            created_unix_us: 1,
        };
        let pages = DevicePool::format(&params).expect("sound parameters");
        let mut medium = Formatted { pages, synced: false };
        let opened = recover(Path::new("formatted"), device_bytes, History::Found, &mut medium);
        let recovered = opened.unwrap_or_else(|error| panic!("{error}"));
        assert!(recovered.stored.is_empty() && medium.synced);
    }
}
