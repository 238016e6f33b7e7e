//! Saves and loads on threads of their own: submitted now, looked at later.
//!
//! An engine's worker hands over what its step needs and goes on computing; between steps it asks what has ended.
//!
//! ```text
//! submit_load ──► queue ──► thread for loads ──┐
//! submit_save ──► queue ──► thread for saves ──┴──► finished / wait
//! ```
//!
//! Beside a computation that goes layer by layer, transfers do the same: a load by layers tells which layers its blocks have
//! (`wait_layer`), a save by layers is submitted before they are filled and follows what the engine tells (`note_filled`).
//!
//! ```text
//! load: submit ─ layer 0 ─ layer 1 ─ … ─ end        save: submit ─ note_filled(1) ─ note_filled(2) ─ … ─ end
//!                   └ wait_layer(0): compute it                        └ copied while layer 1 is computed
//! ```
//!
//! Invariants: every transfer that was submitted ends, with a status for each of its blocks, whatever happens to the
//! agent, the session or the memory; none starts while the agent is suspected. A transfer of an agent that hangs ends
//! after its `stall_timeout` and makes the agent suspected, so that those behind it end at once. A load by layers, for
//! which a computation waits, ends within its deadline from when it was submitted, and one `stall_timeout`. A save by
//! layers whose engine stops telling ends unsaved after `layer_wait`; so long saves behind it wait.
//!
//! A load for which nothing comes for its `standstill_timeout` although the agent answers ends as well, and nobody suspects the
//! agent: another node hangs, or a device. For [`PEERS_AVOIDED`] those behind it take what this node has, and have
//! [`STANDSTILL_AGAIN`] for it; so a node that hangs costs an engine about one `standstill_timeout`, not one each request.
//!
//! A load's deadline counts from when it was submitted: who waits for it has waited for those before it as well. One whose
//! time is over when its turn comes ends undone at once.
//!
//! Dropping it cancels: transfers in the queues end undone, those at work end with the part that they are at, or after
//! their `stall_timeout` when the agent hangs. It waits for that: no byte of the memory is touched after it.
//!
//! Deliberately absent: retries, order between loads and saves (a caller that loads what it saves waits in between).

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use reprise_policy::BlockKey;

use crate::deadline;
use crate::error::ClientError;
use crate::keeper::SessionKeeper;
use crate::matching::Scope;
use crate::paged::{
    LoadOptions, LoadedBlocks, Order, Pace, PagedMemory, PhysicalBlock, SaveOptions, SavedBlocks, cancelled,
    check_blocks, check_layout,
};

/// Transfers of a kind that may wait unless told otherwise: each is one request's, and engines run some hundreds at a
/// time.
pub const QUEUED_MAX_DEFAULT: usize = 1024;

/// Ends that are kept for [`Transfers::finished`] at the most; beyond it the oldest are forgotten.
pub const FINISHED_MAX: usize = 65_536;

/// How long after a load that stood still others leave out what other nodes have: in 2 s, unless told otherwise, the
/// agent has noticed a node that hangs (`peers.stall_timeout`), and asks it for nothing.
pub const PEERS_AVOIDED: Duration = Duration::from_secs(2);

/// How long one of these may stand still at the most: its blocks may be on their way from the node that hangs for
/// somebody else.
pub const STANDSTILL_AGAIN: Duration = Duration::from_millis(200);

/// How transfers are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferOptions {
    /// How to save.
    pub save: SaveOptions,
    /// How to load.
    pub load: LoadOptions,
    /// Loads, and saves, that may wait; one that finds the queue full ends undone at once.
    pub queued_max: usize,
}

/// Names a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// What became of a transfer.
#[derive(Debug)]
pub enum Outcome {
    /// Of a save.
    Saved(SavedBlocks),
    /// Of a load.
    Loaded(LoadedBlocks),
}

/// A transfer that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Which.
    pub id: TransferId,
    /// What became of it.
    pub outcome: Outcome,
    /// From when it was submitted to its end.
    pub elapsed: Duration,
}

/// Saves from and loads to one memory, over one keeper's session.
#[derive(Debug)]
pub struct Transfers {
    shared: Arc<Shared>,
    /// `None` while it is dropped.
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
    options: TransferOptions,
    board: Mutex<Board>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Board {
    last: u64,
    unfinished: BTreeMap<TransferId, Underway>,
    finished: VecDeque<Finished>,
    is_cancelled: bool,
    /// Until when loads leave out what other nodes have.
    peers_avoided_until: Option<Instant>,
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug)]
struct Underway {
    direction: Direction,
    /// Leading layers whose bytes are in the memory for all blocks: of a load those that it has copied, of a save
    /// those that it may read.
    layers: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Save,
    Load,
}

/// A transfer on its way. Dropping it ends it undone, so that none is forgotten.
#[derive(Debug)]
struct Job {
    shared: Arc<Shared>,
    id: TransferId,
    direction: Direction,
    order: Order,
    blocks: Vec<(BlockKey, PhysicalBlock)>,
    /// Of a save: the block before the first one in its chain.
    parent: Option<BlockKey>,
    submitted: Instant,
    /// Why it ends undone, if it does.
    undone: Option<ClientError>,
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
    /// Why it ended before its end, if it did.
    pub fn stopped_by(&self) -> Option<&ClientError> {
        match self {
            Outcome::Saved(saved) => saved.stopped_by.as_ref(),
            Outcome::Loaded(loaded) => loaded.stopped_by.as_ref(),
        }
    }
}

impl Transfers {
    /// Transfers between the memory and whatever session the keeper has.
    ///
    /// # Errors
    /// `BadRequest` (the memory's layout is not the session's), `Busy` (no thread can be started).
    pub fn new(
        keeper: Arc<SessionKeeper>,
        memory: Arc<dyn PagedMemory>,
        options: TransferOptions,
    ) -> Result<Transfers, ClientError> {
        check_layout(&keeper.options().layout, &*memory)?;
        let shared =
            Arc::new(Shared { keeper, memory, options, board: Mutex::default(), changed: Condvar::new() });
        let mut transfers = Transfers { shared, queues: None, threads: Vec::new() };
        let saves = transfers.start_thread("reprise-saves")?;
        let loads = transfers.start_thread("reprise-loads")?;
        transfers.queues = Some(Queues { saves, loads });
        Ok(transfers)
    }

    /// Saves consecutive blocks of one chain, in its order, behind `parent`; see
    /// [`CommitOptions::parent`](crate::CommitOptions::parent). They must not change until the save has ended.
    ///
    /// # Errors
    /// `BadRequest`: there is no such block.
    pub fn submit_save(
        &self,
        blocks: Vec<(BlockKey, PhysicalBlock)>,
        parent: Option<BlockKey>,
    ) -> Result<TransferId, ClientError> {
        self.submit((Direction::Save, Order::ByWindows), blocks, parent)
    }

    /// Saves blocks that are filled layer by layer: [`Transfers::note_filled`] says how far. What was told filled must
    /// not change until the save has ended.
    ///
    /// # Errors
    /// `BadRequest`: there is no such block.
    pub fn submit_save_by_layers(
        &self,
        blocks: Vec<(BlockKey, PhysicalBlock)>,
        parent: Option<BlockKey>,
    ) -> Result<TransferId, ClientError> {
        self.submit((Direction::Save, Order::ByLayers), blocks, parent)
    }

    /// So many leading layers of all blocks of a save by layers are filled. Nothing, of a transfer that has ended.
    pub fn note_filled(&self, id: TransferId, layers: u32) {
        self.shared.note_layers(id, Direction::Save, layers);
    }

    /// Loads blocks. They hold nothing to be used until the load has ended.
    ///
    /// # Errors
    /// `BadRequest`: there is no such block.
    pub fn submit_load(&self, blocks: Vec<(BlockKey, PhysicalBlock)>) -> Result<TransferId, ClientError> {
        self.submit((Direction::Load, Order::ByWindows), blocks, None)
    }

    /// Loads blocks, the first layers of all before the others. Whether a block is whole is known when the load has
    /// ended; what is computed from its layers before that is to be thrown away when it is not. Its deadline counts
    /// from now: who waits for it has waited for those before it as well.
    ///
    /// # Errors
    /// `BadRequest`: there is no such block.
    pub fn submit_load_by_layers(
        &self,
        blocks: Vec<(BlockKey, PhysicalBlock)>,
    ) -> Result<TransferId, ClientError> {
        self.submit((Direction::Load, Order::ByLayers), blocks, None)
    }

    /// Waits until these loads have copied a layer of all blocks that have not failed, or have ended; whether they have.
    pub fn wait_layer(&self, ids: &[TransferId], layer: u32, timeout: Duration) -> bool {
        let is_there = |underway: &Underway| underway.direction == Direction::Load && underway.layers > layer;
        let all_there =
            |board: &Board| ids.iter().all(|id| board.unfinished.get(id).is_none_or(is_there)).then_some(());
        self.shared.wait_for(timeout, all_there).is_some()
    }

    /// The transfers that have ended since the last call, in the order of their ends. Does not wait.
    pub fn finished(&self) -> Vec<Finished> {
        std::mem::take(&mut self.shared.lock().finished).into()
    }

    /// Waits until these have ended; whether they have. They are told by [`Transfers::finished`] all the same.
    pub fn wait(&self, ids: &[TransferId], timeout: Duration) -> bool {
        let all_ended = |board: &Board| ids.iter().all(|id| !board.unfinished.contains_key(id)).then_some(());
        self.shared.wait_for(timeout, all_ended).is_some()
    }

    /// Ends all transfers as soon as possible, those that are yet to be submitted as well. Does not wait.
    pub fn cancel(&self) {
        self.shared.lock().is_cancelled = true;
        self.shared.changed.notify_all();
    }

    /// Transfers that have not ended.
    pub fn unfinished(&self) -> usize {
        self.shared.lock().unfinished.len()
    }

    fn submit(
        &self,
        (direction, order): (Direction, Order),
        blocks: Vec<(BlockKey, PhysicalBlock)>,
        parent: Option<BlockKey>,
    ) -> Result<TransferId, ClientError> {
        check_blocks(&blocks, &*self.shared.memory)?;
        let id = self.shared.begin(direction);
        let shared = Arc::clone(&self.shared);
        let submitted = Instant::now();
        let job = Job { shared, id, direction, order, blocks, parent, submitted, undone: None };
        let queues = self.queues.as_ref().expect("they are there until it is dropped");
        let queue = match direction {
            Direction::Save => &queues.saves,
            Direction::Load => &queues.loads,
        };
        if let Err(refused) = queue.try_send(job) {
            let full = format!("{} transfers wait already", self.shared.options.queued_max);
            refused.into_inner().undone = Some(ClientError::Busy(full));
        }
        Ok(id)
    }

    fn start_thread(&mut self, name: &str) -> Result<Sender<Job>, ClientError> {
        let (sender, receiver) = bounded(self.shared.options.queued_max);
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&receiver))
            .map_err(|error| ClientError::Busy(format!("no thread can be started: {error}")))?;
        self.threads.push(thread);
        Ok(sender)
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        self.cancel();
        self.queues = None;
        for thread in self.threads.drain(..) {
            // It catches what its transfers panic with.
            let _ = thread.join();
        }
    }
}

/// Does transfers until there will be no more; body of a thread.
fn work(queue: &Receiver<Job>) {
    while let Ok(job) = queue.recv() {
        // What panicked was reported by the panic hook, and the job has ended undone. Those behind it have done nothing
        // wrong.
        let _ = catch_unwind(AssertUnwindSafe(|| job.run()));
    }
}

impl Job {
    fn run(mut self) {
        match self.attempt() {
            Ok(outcome) => {
                match outcome.stopped_by() {
                    Some(ClientError::Timeout { .. }) => self.shared.keeper.suspect(),
                    Some(ClientError::Stalled { .. }) => self.shared.avoid_peers(),
                    _ => {}
                }
                self.end(outcome);
            }
            Err(reason) => self.undone = Some(reason),
        }
    }

    fn attempt(&self) -> Result<Outcome, ClientError> {
        let shared = &self.shared;
        if !self.may_go_on() {
            return Err(cancelled());
        }
        let client = shared.keeper.answering().ok_or_else(|| shared.keeper.absence())?;
        let memory = &*shared.memory;
        match self.direction {
            Direction::Save => {
                let options = SaveOptions { parent: self.parent, ..shared.options.save };
                client.save_blocks_paced(&self.blocks, memory, &options, self).map(Outcome::Saved)
            }
            Direction::Load => {
                let options = LoadOptions { deadline: self.load_deadline()?, ..shared.load_options() };
                client.load_blocks_paced(&self.blocks, memory, &options, self).map(Outcome::Loaded)
            }
        }
    }

    /// What is left of a load's time.
    fn load_deadline(&self) -> Result<Duration, ClientError> {
        let deadline = self.shared.options.load.deadline;
        match deadline.saturating_sub(self.submitted.elapsed()) {
            Duration::ZERO => Err(ClientError::Busy(format!("loads before this one took {deadline:?}"))),
            left => Ok(left),
        }
    }

    fn end(&self, outcome: Outcome) {
        let finished = Finished { id: self.id, outcome, elapsed: self.submitted.elapsed() };
        let mut board = self.shared.lock();
        board.unfinished.remove(&self.id);
        if board.finished.len() == FINISHED_MAX {
            board.finished.pop_front();
        }
        board.finished.push_back(finished);
        drop(board);
        self.shared.changed.notify_all();
    }
}

impl Pace for Job {
    fn order(&self) -> Order {
        self.order
    }

    fn may_go_on(&self) -> bool {
        !self.shared.lock().is_cancelled
    }

    fn wait_filled(&self, layer: u32) -> Result<(), ClientError> {
        if self.order == Order::ByWindows {
            return Ok(());
        }
        let layer_wait = self.shared.options.save.layer_wait;
        let told = self.shared.wait_for(layer_wait, |board| match board.unfinished.get(&self.id) {
            Some(underway) if underway.layers > layer => Some(Ok(())),
            _ if board.is_cancelled => Some(Err(cancelled())),
            _ => None,
        });
        told.unwrap_or_else(|| {
            Err(ClientError::BadRequest(format!(
                "layer {layer} of a save was not filled within {layer_wait:?}"
            )))
        })
    }

    fn note_copied(&self, layers: u32) {
        self.shared.note_layers(self.id, Direction::Load, layers);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.shared.lock().unfinished.contains_key(&self.id) {
            return;
        }
        let (blocks, reason) = (self.blocks.len(), self.undone.take().unwrap_or_else(cancelled));
        self.end(match self.direction {
            Direction::Save => Outcome::Saved(SavedBlocks::unsaved(blocks, reason)),
            Direction::Load => Outcome::Loaded(LoadedBlocks::failed(blocks, reason)),
        });
    }
}

impl Shared {
    fn begin(&self, direction: Direction) -> TransferId {
        let mut board = self.lock();
        board.last += 1;
        let id = TransferId(board.last);
        board.unfinished.insert(id, Underway { direction, layers: 0 });
        id
    }

    /// A load stood still.
    fn avoid_peers(&self) {
        self.lock().peers_avoided_until = Some(deadline::after(PEERS_AVOIDED));
    }

    /// How a load is done that begins now.
    fn load_options(&self) -> LoadOptions {
        let options = self.options.load;
        match (self.lock().peers_avoided_until, options.standstill_timeout) {
            (Some(until), Some(standstill)) if Instant::now() < until => LoadOptions {
                scope: Scope::Local,
                standstill_timeout: Some(standstill.min(STANDSTILL_AGAIN)),
                ..options
            },
            _ => options,
        }
    }

    /// A transfer has come to so many layers.
    fn note_layers(&self, id: TransferId, direction: Direction, layers: u32) {
        let mut board = self.lock();
        match board.unfinished.get_mut(&id) {
            Some(underway) if underway.direction == direction && underway.layers < layers => {
                underway.layers = layers;
            }
            _ => return,
        }
        drop(board);
        self.changed.notify_all();
    }

    /// Waits until there is something to see on the board; `None`: not within this time.
    fn wait_for<T>(&self, timeout: Duration, see: impl Fn(&Board) -> Option<T>) -> Option<T> {
        let deadline = deadline::after(timeout);
        let mut board = self.lock();
        loop {
            if let Some(seen) = see(&board) {
                return Some(seen);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.changed.wait_timeout(board, left);
            board = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
