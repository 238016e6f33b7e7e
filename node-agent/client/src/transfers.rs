//! Saves and loads on background threads, submitted and polled.
//!
//! An engine's worker submits the transfers of its step and continues computing. Between steps it polls for
//! ended transfers.
//!
//! ```text
//! submit_load ──► queue ──► thread for loads ──┐
//! submit_save ──► queue ──► thread for saves ──┴──► finished / wait
//! ```
//!
//! A computation that proceeds layer by layer can overlap with its transfers. A load by layers announces the
//! layers that all of its blocks have (`wait_layer`). A save by layers is submitted before its layers are
//! filled, and the engine announces them (`note_filled`).
//!
//! ```text
//! load: submit ─ layer 0 ─ layer 1 ─ … ─ end        save: submit ─ note_filled(1) ─ note_filled(2) ─ … ─ end
//!                   └ wait_layer(0): compute it                        └ copied while layer 1 is computed
//! ```
//!
//! Invariants:
//!
//! * Every submitted transfer ends with a status for each of its blocks, regardless of failures of the agent,
//!   the session or the memory.
//! * No transfer starts while the agent is suspected. A transfer with a hanging agent ends after its
//!   `stall_timeout` and makes the agent suspected, so that the transfers behind it end at once. Loads that end at their
//!   limits before that do so when their waits add up to `stall_timeout` without an answer between them.
//! * A load by layers, for which a computation waits, ends within its deadline from its submission plus one
//!   `stall_timeout`.
//! * A save by layers whose engine stops announcing layers ends unsaved after `layer_wait`; saves behind it
//!   wait for as long.
//!
//! A load without progress for its `standstill_timeout` also ends if the agent answers. The agent is then not
//! suspected, because another node or a device hangs. For [`PEER_AVOIDANCE_TIME`], later loads only use
//! blocks of this node, with a limit of [`RETRY_STANDSTILL_TIMEOUT`]. A hanging node therefore costs an
//! engine about one `standstill_timeout` instead of one for each request. A load whose wait has a shorter limit ends
//! before that: later loads avoid peers too when such loads add up to [`RETRY_STANDSTILL_TIMEOUT`] without a block.
//!
//! The deadline of a load counts from its submission, because its caller also waits for the loads before it.
//! A load whose deadline has passed when it would start fails at once. So do limits of the wait (`submit_load_within`).
//!
//! Dropping [`Transfers`] cancels: queued transfers fail, running ones end with their current part, or after
//! their `stall_timeout` when the agent hangs. The drop waits for that; the memory is not accessed
//! afterwards.
//!
//! Not included: retries, and an order between loads and saves (a caller that loads blocks it saves must wait
//! in between).

mod by_path;
mod chain;
mod health;

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use reprise_policy::BlockKey;
use reprise_policy::recompute::WaitLimit;

use crate::deadline;
use crate::error::ClientError;
use crate::keeper::SessionKeeper;
use crate::paged::{
    LoadOptions, LoadedBlocks, Order, Pace, PagedMemory, PhysicalBlock, SaveOptions, SavedBlocks, cancelled,
    check_blocks, check_layout,
};
use crate::path::BlockPath;

pub use chain::SaveChain;

/// Default limit of queued transfers of one direction: each belongs to one request, and engines run some
/// hundreds at a time.
pub const QUEUED_MAX_DEFAULT: usize = 1024;

/// Maximum number of ended transfers that are kept for [`Transfers::finished`]; beyond it the oldest are
/// dropped.
pub const FINISHED_MAX: usize = 65_536;

/// Time after a stalled load in which later loads do not use other nodes. In 2 s, the default of the agent's
/// `peers.stall_timeout`, the agent notices a hanging node and sends it no further requests.
pub const PEER_AVOIDANCE_TIME: Duration = Duration::from_secs(2);

/// Standstill limit of a load in that time. It can still stall: another process may be fetching its blocks
/// from the hanging node.
pub const RETRY_STANDSTILL_TIMEOUT: Duration = Duration::from_millis(200);

/// Options of saves and loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferOptions {
    /// Options of every save.
    pub save: SaveOptions,
    /// Options of every load.
    pub load: LoadOptions,
    /// Maximum number of waiting loads, and of waiting saves. A transfer that exceeds it fails at once.
    pub queued_max: usize,
}

/// Identifies a transfer of one [`Transfers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// Result of a transfer.
#[derive(Debug)]
pub enum Outcome {
    /// Result of a save.
    Saved(SavedBlocks),
    /// Result of a load.
    Loaded(LoadedBlocks),
}

/// A transfer that has ended.
#[derive(Debug)]
pub struct FinishedTransfer {
    /// Identifier of the transfer.
    pub id: TransferId,
    /// Result for each block.
    pub outcome: Outcome,
    /// Time from submission to end.
    pub elapsed: Duration,
    /// Time that it ran, without the wait for the transfers before it.
    pub ran: Duration,
    /// Number of blocks that a [`BlockPath`] has moved.
    pub by_path: usize,
}

/// Saves from and loads to one memory, over the session of one keeper.
#[derive(Debug)]
pub struct Transfers {
    shared: Arc<Shared>,
    /// `None` while the value is dropped.
    queues: Option<Queues>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Queues {
    saves: Sender<Job>,
    loads: Sender<Job>,
}

#[derive(Debug)]
struct Shared {
    keeper: Arc<SessionKeeper>,
    memory: Arc<dyn PagedMemory>,
    /// Moves blocks before the arena is asked, except those of transfers by layers.
    path: Option<Arc<dyn BlockPath>>,
    options: TransferOptions,
    table: Mutex<TransferTable>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct TransferTable {
    last: u64,
    unfinished: BTreeMap<TransferId, TransferProgress>,
    finished: VecDeque<FinishedTransfer>,
    is_cancelled: bool,
    /// Until then loads use only this node.
    peers_avoided_until: Option<Instant>,
    /// Time that loads have waited up to their limits without a sign of life of the agent, since the last one.
    unanswered: Duration,
    /// Time that loads of the cluster have waited up to their limits without a block, since the last one.
    standstill: Duration,
}

/// Progress of a transfer.
#[derive(Clone, Copy, Debug)]
struct TransferProgress {
    direction: Direction,
    /// Number of leading layers whose bytes are in the memory for all blocks: layers that a load has copied,
    /// or that a save may read.
    layers: u32,
}

/// Chain of a save, and limit of a load.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    chain: SaveChain,
    limit: Option<WaitLimit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Save,
    Load,
}

/// A transfer that has not ended. Dropping it ends it with an error, so that no transfer stays unfinished.
#[derive(Debug)]
struct Job {
    shared: Arc<Shared>,
    id: TransferId,
    direction: Direction,
    order: Order,
    blocks: Vec<(BlockKey, PhysicalBlock)>,
    /// Only for saves.
    chain: SaveChain,
    /// Only for loads: limit of the wait.
    limit: Option<WaitLimit>,
    submitted: Instant,
    /// Time at which it began to run.
    began: Option<Instant>,
    /// Error of a transfer that did not run.
    error: Option<ClientError>,
}

impl Default for TransferOptions {
    fn default() -> TransferOptions {
        TransferOptions {
            save: SaveOptions::default(),
            load: LoadOptions::default(),
            queued_max: QUEUED_MAX_DEFAULT,
        }
    }
}

impl Outcome {
    /// Returns the error that stopped the transfer before its end, if any.
    pub fn stopped_by(&self) -> Option<&ClientError> {
        match self {
            Outcome::Saved(saved) => saved.stopped_by.as_ref(),
            Outcome::Loaded(loaded) => loaded.stopped_by.as_ref(),
        }
    }
}

impl Transfers {
    /// Creates transfers between the memory and the keeper's current session.
    ///
    /// # Errors
    /// `BadRequest` (the memory's layout is not the session's), `Busy` (cannot spawn a thread).
    pub fn new(
        keeper: Arc<SessionKeeper>,
        memory: Arc<dyn PagedMemory>,
        options: TransferOptions,
    ) -> Result<Transfers, ClientError> {
        Transfers::with_path(keeper, memory, options, None)
    }

    /// As [`new`](Transfers::new), with a path that moves the blocks that it reaches.
    ///
    /// # Errors
    /// As [`new`](Transfers::new).
    pub fn with_path(
        keeper: Arc<SessionKeeper>,
        memory: Arc<dyn PagedMemory>,
        options: TransferOptions,
        path: Option<Arc<dyn BlockPath>>,
    ) -> Result<Transfers, ClientError> {
        check_layout(&keeper.options().layout, &*memory)?;
        let (table, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { keeper, memory, path, options, table, changed });
        let mut transfers = Transfers { shared, queues: None, threads: Vec::new() };
        let saves = transfers.start_thread("reprise-saves")?;
        let loads = transfers.start_thread("reprise-loads")?;
        transfers.queues = Some(Queues { saves, loads });
        Ok(transfers)
    }

    /// Saves consecutive blocks of one chain, in its order, of which the first has the place in `chain`. The blocks'
    /// memory must not change until the save has ended.
    ///
    /// # Errors
    /// `BadRequest`: a block number is out of range.
    pub fn submit_save(
        &self,
        blocks: Vec<(BlockKey, PhysicalBlock)>,
        chain: impl Into<SaveChain>,
    ) -> Result<TransferId, ClientError> {
        self.submit((Direction::Save, Order::ByWindows), blocks, Place { chain: chain.into(), limit: None })
    }

    /// Saves blocks that are filled layer by layer; [`Transfers::note_filled`] announces the filled layers.
    /// Filled layers must not change until the save has ended.
    ///
    /// # Errors
    /// `BadRequest`: a block number is out of range.
    pub fn submit_save_by_layers(
        &self,
        blocks: Vec<(BlockKey, PhysicalBlock)>,
        chain: impl Into<SaveChain>,
    ) -> Result<TransferId, ClientError> {
        self.submit((Direction::Save, Order::ByLayers), blocks, Place { chain: chain.into(), limit: None })
    }

    /// Announces that `layers` leading layers of all blocks of a save are filled. No effect after the
    /// transfer's end.
    pub fn note_filled(&self, id: TransferId, layers: u32) {
        self.shared.note_layers(id, Direction::Save, layers);
    }

    /// Loads blocks. Their memory has unspecified contents until the load has ended.
    ///
    /// # Errors
    /// `BadRequest`: a block number is out of range.
    pub fn submit_load(&self, blocks: Vec<(BlockKey, PhysicalBlock)>) -> Result<TransferId, ClientError> {
        self.submit((Direction::Load, Order::ByWindows), blocks, Place::default())
    }

    /// As [`submit_load`](Transfers::submit_load), with a limit of the wait next to the deadline. Both count from now. The
    /// blocks that have arrived at the limit stay loaded; the others have failed.
    ///
    /// # Errors
    /// `BadRequest`: a block number is out of range.
    pub fn submit_load_within(
        &self,
        blocks: Vec<(BlockKey, PhysicalBlock)>,
        limit: WaitLimit,
    ) -> Result<TransferId, ClientError> {
        let place = Place { limit: Some(limit), ..Place::default() };
        self.submit((Direction::Load, Order::ByWindows), blocks, place)
    }

    /// Loads blocks, the first layers of all before the others. Only the end of the load shows whether a
    /// block is complete; discard results that were computed from the layers of an incomplete one. The
    /// deadline counts from now, and includes the wait for the loads before this one.
    ///
    /// # Errors
    /// `BadRequest`: a block number is out of range.
    pub fn submit_load_by_layers(
        &self,
        blocks: Vec<(BlockKey, PhysicalBlock)>,
    ) -> Result<TransferId, ClientError> {
        self.submit((Direction::Load, Order::ByLayers), blocks, Place::default())
    }

    /// Waits until these loads have ended, or have copied a layer of all blocks that have not failed; false
    /// on timeout.
    pub fn wait_layer(&self, ids: &[TransferId], layer: u32, timeout: Duration) -> bool {
        let is_there =
            |progress: &TransferProgress| progress.direction == Direction::Load && progress.layers > layer;
        let all_there = |table: &TransferTable| {
            ids.iter().all(|id| table.unfinished.get(id).is_none_or(is_there)).then_some(())
        };
        self.shared.wait_for(timeout, all_there).is_some()
    }

    /// Returns the transfers that have ended since the last call, in the order of their ends. Does not wait.
    pub fn finished(&self) -> Vec<FinishedTransfer> {
        std::mem::take(&mut self.shared.lock().finished).into()
    }

    /// Waits until these transfers have ended; false on timeout. [`Transfers::finished`] still returns them.
    pub fn wait(&self, ids: &[TransferId], timeout: Duration) -> bool {
        let all_ended =
            |table: &TransferTable| ids.iter().all(|id| !table.unfinished.contains_key(id)).then_some(());
        self.shared.wait_for(timeout, all_ended).is_some()
    }

    /// Ends all transfers as soon as possible, including those that will be submitted later. Does not wait.
    pub fn cancel(&self) {
        self.shared.lock().is_cancelled = true;
        self.shared.changed.notify_all();
    }

    /// Returns the number of transfers that have not ended.
    pub fn unfinished(&self) -> usize {
        self.shared.lock().unfinished.len()
    }

    fn submit(
        &self,
        (direction, order): (Direction, Order),
        blocks: Vec<(BlockKey, PhysicalBlock)>,
        Place { chain, limit }: Place,
    ) -> Result<TransferId, ClientError> {
        check_blocks(&blocks, &*self.shared.memory)?;
        let id = self.shared.begin(direction);
        let shared = Arc::clone(&self.shared);
        let submitted = Instant::now();
        let (began, error) = (None, None);
        let job = Job { shared, id, direction, order, blocks, chain, limit, submitted, began, error };
        let queues = self.queues.as_ref().expect("the queues exist until the drop");
        let queue = match direction {
            Direction::Save => &queues.saves,
            Direction::Load => &queues.loads,
        };
        if let Err(refused) = queue.try_send(job) {
            let full = format!("{} transfers are queued already", self.shared.options.queued_max);
            refused.into_inner().error = Some(ClientError::Busy(full));
        }
        Ok(id)
    }

    fn start_thread(&mut self, name: &str) -> Result<Sender<Job>, ClientError> {
        let (sender, receiver) = bounded(self.shared.options.queued_max);
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&receiver))
            .map_err(|error| ClientError::Busy(format!("cannot spawn a transfer thread: {error}")))?;
        self.threads.push(thread);
        Ok(sender)
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        self.cancel();
        self.queues = None;
        for thread in self.threads.drain(..) {
            // The thread catches panics of its transfers.
            let _ = thread.join();
        }
    }
}

/// Runs transfers until the queue is closed; body of a thread.
fn work(queue: &Receiver<Job>) {
    while let Ok(job) = queue.recv() {
        // The panic hook has reported a panic, and the dropped job has ended with an error. The jobs behind
        // it must still run.
        let _ = catch_unwind(AssertUnwindSafe(|| job.run()));
    }
}

impl Job {
    fn run(mut self) {
        self.began = Some(Instant::now());
        match self.attempt() {
            Ok((outcome, by_path)) => {
                self.note_health(&outcome);
                self.end(outcome, by_path);
            }
            Err(reason) => {
                if let ClientError::Timeout { .. } = reason {
                    self.shared.keeper.suspect();
                }
                self.error = Some(reason);
            }
        }
    }

    /// Returns the outcome, and the number of blocks that a path has moved.
    fn attempt(&self) -> Result<(Outcome, usize), ClientError> {
        let shared = &self.shared;
        if !self.should_continue() {
            return Err(cancelled());
        }
        let client = shared.keeper.responsive().ok_or_else(|| shared.keeper.unavailable_reason())?;
        let path = shared.path.as_deref().filter(|_| self.order == Order::ByWindows);
        match self.direction {
            Direction::Save => {
                let (saved, by_path) = self.save(&client, path)?;
                Ok((Outcome::Saved(saved), by_path))
            }
            Direction::Load => {
                let (loaded, by_path) = self.load(&client, path)?;
                Ok((Outcome::Loaded(loaded), by_path))
            }
        }
    }

    fn end(&self, outcome: Outcome, by_path: usize) {
        let elapsed = self.submitted.elapsed();
        let ran = self.began.map_or(Duration::ZERO, |began| began.elapsed());
        let finished = FinishedTransfer { id: self.id, outcome, elapsed, ran, by_path };
        let mut table = self.shared.lock();
        table.unfinished.remove(&self.id);
        if table.finished.len() == FINISHED_MAX {
            table.finished.pop_front();
        }
        table.finished.push_back(finished);
        drop(table);
        self.shared.changed.notify_all();
    }
}

impl Pace for Job {
    fn order(&self) -> Order {
        self.order
    }

    fn should_continue(&self) -> bool {
        !self.shared.lock().is_cancelled
    }

    fn wait_filled(&self, layer: u32) -> Result<(), ClientError> {
        if self.order == Order::ByWindows {
            return Ok(());
        }
        let layer_wait = self.shared.options.save.layer_wait;
        let filled = self.shared.wait_for(layer_wait, |table| match table.unfinished.get(&self.id) {
            Some(progress) if progress.layers > layer => Some(Ok(())),
            _ if table.is_cancelled => Some(Err(cancelled())),
            _ => None,
        });
        filled.unwrap_or_else(|| {
            Err(ClientError::BadRequest(format!(
                "layer {layer} of a save was not filled within {layer_wait:?}"
            )))
        })
    }

    fn note_copied(&self, layers: u32) {
        self.shared.note_layers(self.id, Direction::Load, layers);
    }

    fn limit(&self, leading: usize) -> Option<Instant> {
        Some(deadline::from(self.submitted, self.limit?.after(leading)))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.shared.lock().unfinished.contains_key(&self.id) {
            return;
        }
        let (blocks, reason) = (self.blocks.len(), self.error.take().unwrap_or_else(cancelled));
        let outcome = match self.direction {
            Direction::Save => Outcome::Saved(SavedBlocks::unsaved(blocks, reason)),
            Direction::Load => Outcome::Loaded(LoadedBlocks::failed(blocks, reason)),
        };
        self.end(outcome, 0);
    }
}

impl Shared {
    fn begin(&self, direction: Direction) -> TransferId {
        let mut table = self.lock();
        table.last += 1;
        let id = TransferId(table.last);
        table.unfinished.insert(id, TransferProgress { direction, layers: 0 });
        id
    }

    /// Records that a transfer has reached `layers` leading layers.
    fn note_layers(&self, id: TransferId, direction: Direction, layers: u32) {
        let mut table = self.lock();
        match table.unfinished.get_mut(&id) {
            Some(progress) if progress.direction == direction && progress.layers < layers => {
                progress.layers = layers;
            }
            _ => return,
        }
        drop(table);
        self.changed.notify_all();
    }

    /// Waits until `see` returns a value; `None` on timeout.
    fn wait_for<T>(&self, timeout: Duration, see: impl Fn(&TransferTable) -> Option<T>) -> Option<T> {
        let deadline = deadline::after(timeout);
        let mut table = self.lock();
        loop {
            if let Some(seen) = see(&table) {
                return Some(seen);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, TransferTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
