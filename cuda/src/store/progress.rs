//! Open requests of a mover, and how far each is. Threads that move blocks report to it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::store::mover::{
    BlockError, BlockFailure, LayerOutcome, LayerTicket, MoveError, MoverCounters, REQUESTS_MAX,
};

/// How far a request is. It ends once: with its last transfer, or at its deadline.
#[derive(Debug)]
pub(super) struct Progress {
    state: Mutex<State>,
    has_ended: Condvar,
    deadline: Instant,
    /// Transfers of all ended requests of the mover that still run.
    given_up: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct State {
    /// Transfers of each block that have not ended.
    left: Vec<u32>,
    blocks_left: usize,
    /// Transfers that were started and have not ended.
    running: usize,
    errors: BTreeMap<usize, BlockError>,
    is_over: bool,
}

impl Progress {
    /// Returns when the request ends at the latest.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Starts transfers; false if the request has ended, so that they must not be started.
    pub(super) fn start(&self, transfers: usize) -> bool {
        let mut state = self.lock();
        if state.is_over || Instant::now() >= self.deadline {
            return false;
        }
        state.running += transfers;
        true
    }

    /// Reports whether the request has ended. Transfers that have not touched KV memory yet must not do so then.
    pub(super) fn is_over(&self) -> bool {
        self.lock().is_over
    }

    /// Ends a started transfer of a block.
    pub(super) fn end(&self, block: u32, result: Result<(), BlockError>) {
        let block = block as usize;
        let mut state = self.lock();
        state.running -= 1;
        if state.is_over {
            self.given_up.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        if let Err(error) = result {
            state.errors.entry(block).or_insert(error);
        }
        state.left[block] -= 1;
        if state.left[block] == 0 {
            state.blocks_left -= 1;
        }
        if state.blocks_left == 0 {
            state.is_over = true;
            self.has_ended.notify_all();
        }
    }

    /// Returns the outcome if the request has ended.
    fn poll(&self) -> Option<LayerOutcome> {
        let mut state = self.lock();
        self.outcome(&mut state)
    }

    fn wait(&self) -> LayerOutcome {
        let mut state = self.lock();
        loop {
            if let Some(outcome) = self.outcome(&mut state) {
                return outcome;
            }
            let limit = self.deadline.saturating_duration_since(Instant::now());
            let waited = self.has_ended.wait_timeout(state, limit);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn outcome(&self, state: &mut State) -> Option<LayerOutcome> {
        if !state.is_over && Instant::now() >= self.deadline {
            state.is_over = true;
            self.given_up.fetch_add(state.running, Ordering::AcqRel);
            let State { left, errors, .. } = state;
            for (block, _) in left.iter().enumerate().filter(|(_, left)| **left > 0) {
                errors.entry(block).or_insert(BlockError::TimedOut);
            }
        }
        let take = |state: &mut State| {
            let errors = std::mem::take(&mut state.errors);
            errors.into_iter().map(|(block, error)| BlockFailure { block, error }).collect()
        };
        state.is_over.then(|| LayerOutcome { blocks: state.left.len(), failures: take(state) })
    }

    /// Every change leaves the state consistent, so a poisoned lock is ignored.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests of a mover whose ends were not taken.
#[derive(Debug, Default)]
pub(super) struct Requests {
    next: u64,
    open: HashMap<LayerTicket, (Arc<Progress>, u64)>,
    given_up: Arc<AtomicUsize>,
    counters: MoverCounters,
}

impl Requests {
    /// Opens a request with a number of transfers for each block, each block of so many bytes.
    pub(super) fn open(
        &mut self,
        transfers: Vec<u32>,
        block_bytes: u64,
        timeout: Duration,
    ) -> Result<(LayerTicket, Arc<Progress>), MoveError> {
        if self.open.len() >= REQUESTS_MAX {
            return Err(MoveError::Busy);
        }
        let ticket = LayerTicket(self.next);
        self.next += 1;
        let blocks_left = transfers.iter().filter(|count| **count > 0).count();
        let is_over = blocks_left == 0;
        let state = State { left: transfers, blocks_left, running: 0, errors: BTreeMap::new(), is_over };
        let progress = Arc::new(Progress {
            state: Mutex::new(state),
            has_ended: Condvar::new(),
            deadline: Instant::now() + timeout,
            given_up: Arc::clone(&self.given_up),
        });
        self.open.insert(ticket, (Arc::clone(&progress), block_bytes));
        Ok((ticket, progress))
    }

    /// Forgets a request that could not be enqueued.
    pub(super) fn forget(&mut self, ticket: LayerTicket) {
        self.open.remove(&ticket);
    }

    pub(super) fn poll(&mut self, ticket: LayerTicket) -> Result<Option<LayerOutcome>, MoveError> {
        let (progress, _) = self.open.get(&ticket).ok_or(MoveError::UnknownTicket)?;
        let outcome = progress.poll();
        Ok(outcome.inspect(|outcome| self.take(ticket, outcome)))
    }

    pub(super) fn wait(&mut self, ticket: LayerTicket) -> Result<LayerOutcome, MoveError> {
        let (progress, _) = self.open.get(&ticket).ok_or(MoveError::UnknownTicket)?;
        let outcome = progress.wait();
        self.take(ticket, &outcome);
        Ok(outcome)
    }

    fn take(&mut self, ticket: LayerTicket, outcome: &LayerOutcome) {
        let block_bytes = self.open.remove(&ticket).map_or(0, |(_, bytes)| bytes);
        let failed = outcome.failures.len() as u64;
        self.counters.requests += 1;
        self.counters.blocks += outcome.blocks as u64;
        self.counters.failed_blocks += failed;
        self.counters.bytes += (outcome.blocks as u64 - failed) * block_bytes;
    }

    pub(super) fn given_up(&self) -> usize {
        self.given_up.load(Ordering::Acquire)
    }

    pub(super) fn counters(&self) -> MoverCounters {
        self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn request_ends_with_its_last_transfer_and_reports_the_first_error_of_a_block() {
        let mut requests = Requests::default();
        let (ticket, progress) = requests.open(vec![2, 1], 100, LONG).expect("room");
        assert!(progress.start(3));
        let failed = |text: &str| Err(BlockError::Failed(text.into()));
        progress.end(0, failed("first"));
        progress.end(0, failed("second"));
        assert_eq!(requests.poll(ticket).expect("open"), None);
        progress.end(1, Ok(()));
        let outcome = requests.wait(ticket).expect("open");
        let failure = BlockFailure { block: 0, error: BlockError::Failed("first".into()) };
        assert_eq!(outcome, LayerOutcome { blocks: 2, failures: vec![failure] });
        assert!(matches!(requests.poll(ticket), Err(MoveError::UnknownTicket)));
        let counters = MoverCounters { requests: 1, blocks: 2, failed_blocks: 1, bytes: 100 };
        assert_eq!(requests.counters(), counters);
    }

    #[test]
    fn transfers_that_run_beyond_the_deadline_are_given_up_until_they_end() {
        let mut requests = Requests::default();
        let (ticket, progress) = requests.open(vec![1, 1, 1], 0, Duration::from_millis(20)).expect("room");
        assert!(progress.start(2));
        progress.end(0, Ok(()));
        let outcome = requests.wait(ticket).expect("open");
        let timed_out = |block| BlockFailure { block, error: BlockError::TimedOut };
        assert_eq!(outcome.failures, [timed_out(1), timed_out(2)]);
        assert_eq!(requests.given_up(), 1);
        assert!(!progress.start(1), "no transfer starts after the end");
        progress.end(1, Ok(()));
        assert_eq!(requests.given_up(), 0);
    }

    #[test]
    fn requests_are_bounded_and_an_empty_one_has_ended() {
        let mut requests = Requests::default();
        let (ticket, _) = requests.open(Vec::new(), 0, LONG).expect("room");
        assert_eq!(requests.wait(ticket).expect("open"), LayerOutcome::default());
        for _ in 0..REQUESTS_MAX {
            requests.open(vec![1], 0, LONG).expect("room");
        }
        assert!(matches!(requests.open(vec![1], 0, LONG), Err(MoveError::Busy)));
    }
}
