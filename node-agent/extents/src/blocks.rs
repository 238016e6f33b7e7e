//! Blocks of engines whose memory no controller may access: backends move them between extents and a window, and the CPU
//! copies between window and memory.
//!
//! An agent maps only memory that its owner cannot shrink, and engines such as vLLM allocate theirs without that. A load
//! that times out must also return its memory to the engine at once, while a controller may still write it. So the window
//! is separate memory, registered once for each session and direction, and bytes reach the engine's memory only after
//! their checksums were found right.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_client::path::{BlockPath, LOAD_TIME_MIN};
use reprise_client::{
    Client, ClientError, ExtentStatus, LoadOptions, PagedMemory, PhysicalBlock, SaveOptions, SaveStatus,
    Scope, Source,
};
use reprise_cuda::store::{RingCounters, Unusable};
use reprise_policy::BlockKey;

use crate::path::RingLoad;
use crate::way::{AnyPath, Way};

/// Limit of the writes of a save, with all its windows. The arena takes the other blocks if it passes.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Queue pairs of each device for loads.
const LOAD_PAIRS: u32 = 2;

/// Queue pairs of each device for saves: loads come first.
const SAVE_PAIRS: u32 = 1;

/// Backend of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectionReport {
    /// Name of the backend in use; `None`: all blocks take the arena, or none was moved yet.
    pub backend: Option<String>,
    /// Why backends before it are not used.
    pub unusable: Vec<String>,
}

/// What extents have done for an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtentReport {
    /// Backend of loads.
    pub loads: DirectionReport,
    /// Backend of saves: each direction has its own queue pairs, of which others may hold some.
    pub saves: DirectionReport,
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

/// Direction of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Load,
    Save,
}

/// Loads and saves through extents; see the module. It follows a client to later sessions.
#[derive(Debug, Default)]
pub struct ExtentBlocks {
    loads: Mutex<Way>,
    saves: Mutex<Way>,
    report: Mutex<ExtentReport>,
}

impl ExtentBlocks {
    /// Returns what extents have done so far.
    pub fn report(&self) -> ExtentReport {
        lock(&self.report).clone()
    }

    fn way(&self, direction: Direction) -> &Mutex<Way> {
        match direction {
            Direction::Load => &self.loads,
            Direction::Save => &self.saves,
        }
    }

    /// Runs a function with the path of a direction; `None` without a path.
    ///
    /// # Errors
    /// The session has ended, or the agent does not answer. After other errors, the arena moves the blocks.
    fn with<R>(
        &self,
        (direction, deadline): (Direction, Instant),
        client: &Client,
        run: impl FnOnce(&mut dyn AnyPath) -> anyhow::Result<R>,
    ) -> Result<Option<R>, ClientError> {
        let mut way = lock(self.way(direction));
        if let Some(unusable) = way.follow(client, direction.pairs(), deadline)? {
            let unusable = unusable.iter().map(Unusable::to_string).collect();
            let found = DirectionReport { backend: way.name(), unusable };
            match direction {
                Direction::Load => lock(&self.report).loads = found,
                Direction::Save => lock(&self.report).saves = found,
            }
        }
        let before = way.ring_counters();
        let Some(path) = way.path() else { return Ok(None) };
        let result = run(path);
        lock(&self.report).count(before, way.ring_counters());
        match result {
            Ok(result) => Ok(Some(result)),
            Err(error) => match error.downcast::<ClientError>() {
                Ok(
                    error @ (ClientError::Timeout { .. }
                    | ClientError::LimitReached { .. }
                    | ClientError::AgentLost { .. }),
                ) => Err(error),
                // The session holds its share of the devices.
                Ok(ClientError::Busy(_)) => {
                    way.leave_unusable();
                    Ok(None)
                }
                Ok(error) => Ok(way.fail(&error.into())),
                Err(error) => Ok(way.fail(&error)),
            },
        }
    }
}

impl Direction {
    fn pairs(self) -> u32 {
        match self {
            Direction::Load => LOAD_PAIRS,
            Direction::Save => SAVE_PAIRS,
        }
    }
}

impl ExtentReport {
    /// Returns why backends of any direction are not used, each reason once.
    pub fn unusable(&self) -> Vec<String> {
        let (loads, saves) = (&self.loads.unusable, &self.saves.unusable);
        let further = saves.iter().filter(|reason| !loads.contains(reason));
        loads.iter().chain(further).cloned().collect()
    }

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
        let name =
            |direction: &DirectionReport| direction.backend.clone().unwrap_or_else(|| "arena".to_owned());
        write!(f, "loads: {}, saves: {}", name(&self.loads), name(&self.saves))?;
        self.unusable().iter().try_for_each(|reason| write!(f, "; {reason}"))
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
        let stall = options.stall_timeout;
        let sources = sources(client, &keys, Scope::Local, stall.min(options.deadline))
            .map_err(|error| within_limit(error, stall))?;
        let on_devices = sources.iter().enumerate().filter(|(_, source)| **source == Source::OwnNvme);
        let on_devices: Vec<usize> = on_devices.map(|(index, _)| index).collect();
        if on_devices.is_empty() {
            return Ok(loaded);
        }
        let standstill = options.standstill_timeout.unwrap_or(options.deadline);
        lock(&self.loads).will_load(on_devices.iter().map(|index| keys[*index]));
        self.with((Direction::Load, deadline), client, |path| {
            for window in on_devices.chunks(path.slots()) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left < LOAD_TIME_MIN {
                    break;
                }
                path.set_timeout(left.min(standstill));
                let placed: Vec<_> = window.iter().map(|index| keys[*index]).enumerate().collect();
                let results = path.load(&placed).map_err(|error| match error.downcast::<ClientError>() {
                    Ok(error) => within_limit(error, stall).into(),
                    Err(error) => error,
                })?;
                for ((slot, index), result) in window.iter().enumerate().zip(results) {
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
        let deadline = Instant::now() + WRITE_TIMEOUT;
        self.with((Direction::Save, deadline), client, |path| {
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

/// A call with less time than the stall timeout, because its load has a limit, does not show that the agent hangs.
fn within_limit(error: ClientError, stall: Duration) -> ClientError {
    match error {
        ClientError::Timeout { call, after } if after < stall => {
            let reason = format!("no answer to '{call}' within {after:?}");
            ClientError::LimitReached { reason, unanswered: after }
        }
        error => error,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_stall_timeout_shows_that_the_agent_hangs() {
        let stall = Duration::from_millis(500);
        let late = |after| within_limit(ClientError::Timeout { call: "match", after }, stall);
        assert!(matches!(late(stall), ClientError::Timeout { .. }));
        let limit = Duration::from_millis(60);
        assert!(matches!(late(limit), ClientError::LimitReached { unanswered, .. } if unanswered == limit));
        let lost = within_limit(ClientError::AgentLost { reason: String::new() }, stall);
        assert!(matches!(lost, ClientError::AgentLost { .. }));
    }
}
