//! Opening one device: file, engine, journal; or format.
//!
//! Everything here runs on the device's own thread, because an I/O engine belongs to the thread that first uses it.
//! What of the journal the medium cannot read is told to recovery, which has two superblocks and two banks for that.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_agent_core::pool::{DevicePool, PoolError, PoolParams, Recovery};
use reprise_buffers::{Arena, PageBuffer, Region};
use reprise_io::{
    Caching, DeviceFile, EngineChoice, EngineSettings, FileAccess, IoEngine, IoError, IoErrorKind, Missing,
    Op, Preallocated, Submission, Token, Wait, open_engine,
};
use reprise_policy::layout::PAGE_BYTES;

use super::{Facts, Found, Recovered, RecoveryInfo, Verdict};
use crate::config::{DeviceSettings, IoEngineChoice, PoolSettings};
use crate::error::{AgentError, ErrorKind};

/// One wait for an operation; it ends earlier when the operation does.
const REAP_WAIT: Duration = Duration::from_secs(1);

/// How to open a device.
pub(super) struct Recipe {
    path: PathBuf,
    bytes: Option<u64>,
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

impl Recipe {
    pub(super) fn new(device: &DeviceSettings, settings: &PoolSettings, arena: &Arena) -> Recipe {
        let regions: Vec<Arc<Region>> = arena.regions().to_vec();
        let engine = match settings.io_engine {
            IoEngineChoice::Auto => EngineChoice::Auto,
            IoEngineChoice::IoUring => EngineChoice::IoUring,
            IoEngineChoice::Plain => EngineChoice::Plain,
        };
        let engine = EngineSettings { queue_depth: settings.queue_depth, engine, regions };
        Recipe { path: device.path.clone(), bytes: device.bytes, engine }
    }

    fn error(&self, source: IoError) -> AgentError {
        AgentError::new(ErrorKind::Device, format!("pool device '{}' cannot be used", self.path.display()))
            .because(source)
    }
}

/// Opens a device and looks what is on it. A file that is not a pool yet gets its size now; one that holds anything
/// else is left as it is.
pub(super) fn open(recipe: &Recipe) -> Result<(Open, Found), AgentError> {
    let mut open = open_as_it_is(recipe)?;
    let found = if open.size == 0 { Found::Blank { device_bytes: 0 } } else { open.inspect()? };
    match (found, recipe.bytes) {
        (Found::Blank { .. }, Some(bytes)) if open.size < bytes => {
            let fresh = open.size == 0;
            drop(open);
            let open = grow(recipe, bytes).inspect_err(|_| {
                if fresh {
                    // Nothing was in it: a start that fails leaves nothing behind.
                    let _ = std::fs::remove_file(&recipe.path);
                }
            })?;
            let found = Found::Blank { device_bytes: open.usable };
            Ok((open, found))
        }
        (Found::Blank { .. }, _) => {
            let found = Found::Blank { device_bytes: open.usable };
            Ok((open, found))
        }
        (found, bytes) => {
            if bytes.is_some_and(|bytes| bytes > open.size) {
                tracing::warn!(path = %recipe.path.display(), size = open.size, "the pool keeps the size it was formatted with");
            }
            Ok((open, found))
        }
    }
}

fn open_as_it_is(recipe: &Recipe) -> Result<Open, AgentError> {
    let missing = if recipe.bytes.is_some() { Missing::Create } else { Missing::Fail };
    let file = DeviceFile::open(&recipe.path, FileAccess::ReadWrite, missing)
        .map_err(|error| recipe.error(error))?;
    if file.caching() == Caching::PageCache {
        tracing::warn!(path = %recipe.path.display(), "this file system has no direct I/O: every byte is copied and cached twice");
    }
    start_engine(recipe, file)
}

fn grow(recipe: &Recipe, bytes: u64) -> Result<Open, AgentError> {
    let mut file = DeviceFile::open(&recipe.path, FileAccess::ReadWrite, Missing::Fail)
        .map_err(|error| recipe.error(error))?;
    if file.preallocate(bytes).map_err(|error| recipe.error(error))? == Preallocated::Sparse {
        tracing::warn!(path = %recipe.path.display(), "this file system cannot reserve space: writes may find it full");
    }
    start_engine(recipe, file)
}

fn start_engine(recipe: &Recipe, file: DeviceFile) -> Result<Open, AgentError> {
    let size = file.size() / PAGE_BYTES * PAGE_BYTES;
    let usable = recipe.bytes.unwrap_or(size).min(size);
    let caching = file.caching();
    let engine = open_engine(file, &recipe.engine).map_err(|error| recipe.error(error))?;
    Ok(Open { path: recipe.path.clone(), size, usable, caching, engine })
}

impl Open {
    /// Reads the journal, if there is one.
    fn inspect(&mut self) -> Result<Found, AgentError> {
        match self.recover(false) {
            Ok(recovered) => Ok(Found::Pool(Box::new(recovered))),
            Err(OpenError::Pool(PoolError::NotFormatted)) => Ok(Found::Blank { device_bytes: self.usable }),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Does what was decided; a fresh device becomes a pool.
    pub(super) fn settle(&mut self, verdict: &Verdict) -> Result<Option<Recovered>, AgentError> {
        match verdict {
            Verdict::Keep => Ok(None),
            Verdict::Format(params) => {
                let formatted = self.format(params).and_then(|()| self.recover(true));
                formatted.map(Some).map_err(|error| self.error(error))
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

    fn error(&self, error: OpenError) -> AgentError {
        let context = format!("pool device '{}' cannot be used", self.path.display());
        AgentError::new(ErrorKind::Device, context).because(error)
    }

    fn format(&mut self, params: &PoolParams) -> Result<(), OpenError> {
        for (offset, bytes) in DevicePool::format(params)? {
            let mut pages = PageBuffer::new(bytes.len())?;
            pages.copy_from_slice(&bytes);
            self.execute(Op::Write { offset, from: vec![pages.span()] })?;
        }
        Ok(self.execute(Op::Sync)?)
    }

    fn recover(&mut self, formatted: bool) -> Result<Recovered, OpenError> {
        let started = Instant::now();
        let mut recovery = Recovery::new(self.size);
        while let Some((offset, bytes)) = recovery.next_read() {
            let mut pages = PageBuffer::new(bytes)?;
            match self.execute(Op::Read { offset, into: vec![pages.span()] }) {
                Ok(()) => recovery.feed(&pages)?,
                Err(error) if error.kind() == IoErrorKind::Media => {
                    tracing::warn!(path = %self.path.display(), offset, bytes, %error, "the journal cannot be read here");
                    recovery.feed_unreadable()?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let (pool, stored, report) = recovery.finish()?;
        if !report.is_clean() {
            tracing::warn!(path = %self.path.display(), ?report, "the journal was damaged; blocks it named only there are lost");
        }
        let recovery = RecoveryInfo {
            took: started.elapsed(),
            records: report.checkpoint_records + report.log_records,
            blocks: stored.len() as u64,
            formatted,
        };
        Ok(Recovered { pool, stored, recovery })
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

/// Why a device cannot be opened.
#[derive(Debug, thiserror::Error)]
enum OpenError {
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Io(#[from] IoError),
    #[error(transparent)]
    Buffer(#[from] reprise_buffers::BufferError),
}
