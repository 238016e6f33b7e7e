//! Blocks of engines whose memory no controller may access: backends move them between extents and a window, and the CPU
//! copies between window and memory.
//!
//! An agent maps only memory that its owner cannot shrink, and engines such as vLLM allocate theirs without that. A load
//! that times out must also return its memory to the engine at once, while a controller may still write it. So the window
//! is separate memory, registered once for each session and direction, and bytes reach the engine's memory only after
//! their checksums were found right.

use std::fmt;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_client::path::BlockPath;
use reprise_client::{
    Client, ClientError, CommitOptions, ExtentStatus, LeasedExtent, LoadOptions, PagedMemory, PhysicalBlock,
    SaveOptions, SaveStatus, Scope, Source,
};
use reprise_cuda::store::{Backend, BackendKind, KvOrder, RingCounters, Unusable, choose};
use reprise_policy::BlockKey;

use crate::files::FilePath;
use crate::path::{Devices, ExtentDevice, ExtentPath, HEADERS, RingLoad};
use crate::rings::{RingPath, RingPathSettings};

/// Size of a window, if blocks are not larger: all devices are busy while it is filled.
const WINDOW_BYTES: u64 = 32 << 20;

/// Limit of the writes of a save, with all its windows. The arena takes the other blocks if it passes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Extents that are leased for a moment, to see which devices a session may use.
const PROBED: u32 = 16;

/// Queue pairs of each device for loads.
const LOAD_PAIRS: u32 = 2;

/// Queue pairs of each device for saves: loads come first.
const SAVE_PAIRS: u32 = 1;

/// What extents have done for an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtentReport {
    /// Name of the backend in use; `None`: all blocks take the arena.
    pub backend: Option<String>,
    /// Why backends before it are not used.
    pub unusable: Vec<String>,
    /// Blocks that were read from extents and match their checksums.
    pub loaded: u64,
    /// Blocks that were written to extents and are durable.
    pub saved: u64,
    /// Blocks on devices of the node that were not read, so that the arena was asked.
    pub not_loaded: u64,
    /// Blocks that were not written, so that they took the arena.
    pub not_saved: u64,
    /// Work of rings.
    pub rings: RingCounters,
}

/// Loads and saves through extents; see the module. It follows a client to later sessions.
#[derive(Debug, Default)]
pub struct ExtentBlocks {
    loads: Mutex<Way>,
    saves: Mutex<Way>,
    report: Mutex<ExtentReport>,
}

/// Way of one direction.
#[derive(Debug, Default)]
enum Way {
    /// Not tried with the current session.
    #[default]
    Unknown,
    Rings(Box<RingPath>),
    Files(Box<FilePath>),
    /// The agent of this session allows none.
    Closed(Client),
}

/// A path with any backend.
trait AnyPath {
    fn set_timeout(&mut self, timeout: Duration);
    fn slots(&self) -> usize;
    fn load(&mut self, blocks: &[(usize, BlockKey)]) -> anyhow::Result<Vec<RingLoad>>;
    fn save(
        &mut self,
        blocks: &[(usize, BlockKey)],
        options: CommitOptions,
        wait: Duration,
    ) -> anyhow::Result<Vec<ExtentStatus>>;
    fn object(&self, slot: usize, object: u32) -> reprise_buffers::Span;
    fn objects(&self) -> u32;
    fn is_usable(&self) -> bool;
}

impl<D: Devices> AnyPath for ExtentPath<D> {
    fn set_timeout(&mut self, timeout: Duration) {
        ExtentPath::set_timeout(self, timeout);
    }

    fn slots(&self) -> usize {
        ExtentPath::slots(self)
    }

    fn load(&mut self, blocks: &[(usize, BlockKey)]) -> anyhow::Result<Vec<RingLoad>> {
        ExtentPath::load(self, blocks)
    }

    fn save(
        &mut self,
        blocks: &[(usize, BlockKey)],
        options: CommitOptions,
        wait: Duration,
    ) -> anyhow::Result<Vec<ExtentStatus>> {
        ExtentPath::save(self, blocks, options, wait)
    }

    fn object(&self, slot: usize, object: u32) -> reprise_buffers::Span {
        ExtentPath::object(self, slot, object as usize)
    }

    fn objects(&self) -> u32 {
        self.layout().objects()
    }

    fn is_usable(&self) -> bool {
        self.devices.is_usable()
    }
}

impl Way {
    /// Opens the way with the client's session, unless it is open.
    ///
    /// # Errors
    /// The session has ended, or the agent does not answer.
    fn follow(&mut self, client: &Client, pairs: u32) -> Result<Option<Vec<Unusable>>, ClientError> {
        let is_current = match self {
            Way::Unknown => false,
            Way::Rings(path) => !path.has_ended(),
            Way::Files(path) => !path.has_ended(),
            Way::Closed(_) => self.is_closed(),
        };
        if is_current {
            return Ok(None);
        }
        *self = Way::Unknown;
        let devices = match probe(client) {
            Ok(Some(devices)) => Ok(devices),
            // No extent is free at the moment.
            Ok(None) | Err(ClientError::Busy(_)) => return Ok(None),
            Err(error @ ClientError::BadRequest(_)) => Err(error.to_string()),
            Err(error) => return Err(error),
        };
        match choose(|kind| open(kind, client, devices.as_ref(), pairs)) {
            Ok(choice) => {
                *self = choice.backend;
                Ok(Some(choice.unusable))
            }
            Err(unusable) => {
                *self = Way::Closed(client.clone());
                Ok(Some(unusable))
            }
        }
    }

    /// Reports whether the agent of the current session allows no backend.
    fn is_closed(&self) -> bool {
        matches!(self, Way::Closed(client) if client.is_alive())
    }

    fn path(&mut self) -> Option<&mut dyn AnyPath> {
        match self {
            Way::Unknown | Way::Closed(_) => None,
            Way::Rings(path) => Some(&mut **path),
            Way::Files(path) => Some(&mut **path),
        }
    }

    /// Logs an error; a path that cannot be used again is opened again with the next blocks.
    fn fail<R>(&mut self, error: &anyhow::Error) -> Option<R> {
        tracing::warn!(error = format!("{error:#}"), "extents could not be used");
        if !self.path().is_some_and(|path| path.is_usable()) {
            *self = Way::Unknown;
        }
        None
    }

    fn name(&self) -> Option<String> {
        match self {
            Way::Unknown | Way::Closed(_) => None,
            Way::Rings(path) => Some(path.name().to_owned()),
            Way::Files(path) => Some(path.name().to_owned()),
        }
    }

    fn ring_counters(&self) -> RingCounters {
        match self {
            Way::Rings(path) => path.ring_counters(),
            Way::Unknown | Way::Closed(_) | Way::Files(_) => RingCounters::default(),
        }
    }
}

/// Returns the devices of extents that the session may lease; `None` if no extent is free.
fn probe(client: &Client) -> Result<Option<Vec<ExtentDevice>>, ClientError> {
    let leased = client.lease_extents(PROBED, Duration::ZERO)?;
    let devices: Vec<_> =
        leased.iter().map(|extent: &LeasedExtent| (extent.device(), extent.file().cloned())).collect();
    Ok((!devices.is_empty()).then_some(devices))
}

/// Opens a backend over a window.
fn open(
    kind: BackendKind,
    client: &Client,
    devices: Result<&Vec<ExtentDevice>, &String>,
    pairs: u32,
) -> Result<Way, String> {
    let blocks = WINDOW_BYTES / client.layout().block_bytes().max(1);
    let blocks = blocks.clamp(1, HEADERS as u64) as usize;
    let text = |error: anyhow::Error| format!("{error:#}");
    match kind {
        BackendKind::GpuQueue => {
            let driven = devices.map_err(Clone::clone)?.iter().filter(|(_, file)| file.is_none());
            let driven: Vec<ExtentDevice> = driven.cloned().collect();
            if driven.is_empty() {
                let text = "no device lends queue pairs; set session.queue_pairs of an agent that drives NVMe controllers";
                return Err(text.to_owned());
            }
            let order = KvOrder::BlockLayerPart;
            let settings = RingPathSettings { pairs, order, ..RingPathSettings::default() };
            let mut path = RingPath::open(client, blocks, settings).map_err(text)?;
            path.devices.ensure(&driven).map_err(text)?;
            Ok(Way::Rings(Box::new(path)))
        }
        BackendKind::Gds => Err("KV memory is not of a GPU; use an engine that runs on a GPU".to_owned()),
        BackendKind::Staged => {
            let mut files: Vec<(u32, Arc<File>)> = Vec::new();
            for (device, file) in devices.map_err(Clone::clone)? {
                if let Some(file) = file
                    && !files.iter().any(|(known, _)| known == device)
                {
                    files.push((*device, Arc::clone(file)));
                }
            }
            if files.is_empty() {
                return Err("no device has a file; set session.extents of the agent".to_owned());
            }
            let path = FilePath::open(client, blocks, files, WRITE_TIMEOUT).map_err(text)?;
            Ok(Way::Files(Box::new(path)))
        }
        BackendKind::Host => Err("blocks that no other backend moves take the agent's arena".to_owned()),
    }
}

impl ExtentBlocks {
    /// Returns what extents have done so far.
    pub fn report(&self) -> ExtentReport {
        lock(&self.report).clone()
    }

    /// Runs a function with the path of a direction; `None` without a path.
    ///
    /// # Errors
    /// The session has ended, or the agent does not answer. After other errors, the arena moves the blocks.
    fn with<R>(
        &self,
        (way, pairs): (&Mutex<Way>, u32),
        client: &Client,
        run: impl FnOnce(&mut dyn AnyPath) -> anyhow::Result<R>,
    ) -> Result<Option<R>, ClientError> {
        let mut way = lock(way);
        if let Some(unusable) = way.follow(client, pairs)? {
            let mut report = lock(&self.report);
            report.backend = way.name();
            report.unusable = unusable.iter().map(Unusable::to_string).collect();
        }
        let before = way.ring_counters();
        let Some(path) = way.path() else { return Ok(None) };
        let result = run(path);
        lock(&self.report).count(before, way.ring_counters());
        match result {
            Ok(result) => Ok(Some(result)),
            Err(error) => match error.downcast::<ClientError>() {
                Ok(error @ (ClientError::Timeout { .. } | ClientError::AgentLost { .. })) => Err(error),
                // The session holds its share of the devices.
                Ok(ClientError::Busy(_)) => Ok(None),
                Ok(error) => Ok(way.fail(&error.into())),
                Err(error) => Ok(way.fail(&error)),
            },
        }
    }
}

impl ExtentReport {
    /// Adds the work of rings between two readings of their counters.
    fn count(&mut self, before: RingCounters, after: RingCounters) {
        self.rings.batches += after.batches - before.batches;
        self.rings.contexts += after.contexts - before.contexts;
        self.rings.bytes_read += after.bytes_read - before.bytes_read;
        self.rings.bytes_written += after.bytes_written - before.bytes_written;
    }
}

impl fmt::Display for ExtentReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.backend.as_deref().unwrap_or("arena"))?;
        self.unusable.iter().try_for_each(|reason| write!(f, "; {reason}"))
    }
}

impl BlockPath for ExtentBlocks {
    fn load(
        &self,
        client: &Client,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &LoadOptions,
    ) -> Result<Vec<bool>, ClientError> {
        let deadline = Instant::now() + options.deadline;
        let keys: Vec<BlockKey> = blocks.iter().map(|(key, _)| *key).collect();
        let mut loaded = vec![false; blocks.len()];
        if lock(&self.loads).is_closed() {
            return Ok(loaded);
        }
        // Only blocks of this node count, so the control plane is not asked.
        let sources = sources(client, &keys, Scope::Local, options.stall_timeout)?;
        let on_devices = sources.iter().enumerate().filter(|(_, source)| **source == Source::OwnNvme);
        let on_devices: Vec<usize> = on_devices.map(|(index, _)| index).collect();
        if on_devices.is_empty() {
            return Ok(loaded);
        }
        let standstill = options.standstill_timeout.unwrap_or(options.deadline);
        self.with((&self.loads, LOAD_PAIRS), client, |path| {
            for window in on_devices.chunks(path.slots()) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                path.set_timeout(left.min(standstill));
                let placed: Vec<_> = window.iter().map(|index| keys[*index]).enumerate().collect();
                for ((slot, index), result) in window.iter().enumerate().zip(path.load(&placed)?) {
                    if result == RingLoad::Verified {
                        copy_to(memory, blocks[*index].1, path, slot);
                        loaded[*index] = true;
                    }
                }
            }
            Ok(())
        })?;
        let count = loaded.iter().filter(|loaded| **loaded).count();
        let mut report = lock(&self.report);
        report.loaded += count as u64;
        report.not_loaded += (on_devices.len() - count) as u64;
        Ok(loaded)
    }

    fn save(
        &self,
        client: &Client,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &SaveOptions,
    ) -> Result<Vec<SaveStatus>, ClientError> {
        if lock(&self.saves).is_closed() {
            lock(&self.report).not_saved += blocks.len() as u64;
            return Ok(Vec::new());
        }
        let keys: Vec<BlockKey> = blocks.iter().map(|(key, _)| *key).collect();
        let known = sources(client, &keys, Scope::Local, options.stall_timeout)?.len();
        let mut statuses = vec![SaveStatus::Duplicate; known];
        self.with((&self.saves, SAVE_PAIRS), client, |path| {
            let deadline = Instant::now() + WRITE_TIMEOUT;
            while statuses.len() < blocks.len() {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                path.set_timeout(left);
                let at = statuses.len();
                let window = &blocks[at..blocks.len().min(at + path.slots())];
                window
                    .iter()
                    .enumerate()
                    .for_each(|(slot, (_, block))| copy_from(memory, *block, path, slot));
                let placed: Vec<_> = window.iter().map(|(key, _)| *key).enumerate().collect();
                let commit = options.commit().after(at, at.checked_sub(1).map(|before| keys[before]));
                let ended = path.save(&placed, commit, options.room_wait)?;
                let saved = ended.iter().map_while(|status| match status {
                    ExtentStatus::Durable => Some(SaveStatus::Committed),
                    ExtentStatus::Exists => Some(SaveStatus::Duplicate),
                    ExtentStatus::NoLease | ExtentStatus::BadItem | ExtentStatus::Failed => None,
                });
                let before = statuses.len();
                statuses.extend(saved);
                if statuses.len() - before < window.len() {
                    break;
                }
            }
            Ok(())
        })?;
        let saved = statuses.iter().filter(|status| **status == SaveStatus::Committed).count();
        let mut report = lock(&self.report);
        report.saved += saved as u64;
        report.not_saved += (blocks.len() - statuses.len()) as u64;
        Ok(statuses)
    }
}

/// Returns the sources of leading blocks that are available.
fn sources(
    client: &Client,
    keys: &[BlockKey],
    scope: Scope,
    timeout: Duration,
) -> Result<Vec<Source>, ClientError> {
    let timed_out = ClientError::Timeout { call: "match", after: timeout };
    client.start_match(keys, scope)?.poll(timeout)?.ok_or(timed_out)
}

fn copy_to(memory: &dyn PagedMemory, block: PhysicalBlock, path: &dyn AnyPath, slot: usize) {
    for object in 0..path.objects() {
        let span = path.object(slot, object);
        memory.write_object(block, object, &mut |bytes| span.copy_out(bytes));
    }
}

fn copy_from(memory: &dyn PagedMemory, block: PhysicalBlock, path: &dyn AnyPath, slot: usize) {
    for object in 0..path.objects() {
        let span = path.object(slot, object);
        memory.read_object(block, object, &mut |bytes| {
            span.copy_in(bytes).expect("a window is writable and has whole objects");
        });
    }
}

/// Every change leaves the state consistent, so a poisoned lock is ignored.
fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
