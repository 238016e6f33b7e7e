//! Open requests of a mover, and how far each is. Threads that move blocks report to it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::store::keeper::{Keeper, Pump};
use crate::store::mover::{
    BlockError, BlockFailure, LayerOutcome, LayerTicket, MoveError, MoverCounters, REQUESTS_MAX,
};
use crate::store::stream::{EngineStream, RequestOrder, Signal};

/// Streams of an engine for one mover: a few for each GPU.
const STREAMS_MAX: usize = 64;

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
    /// A query of the stream before the request has failed.
    has_failed_query: bool,
    /// Streams that wait for the end.
    signals: Vec<Signal>,
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

    /// Reports whether the request has ended or its deadline has passed: [`start`](Self::start) refuses transfers then.
    pub(super) fn has_expired(&self) -> bool {
        self.is_over() || Instant::now() >= self.deadline
    }

    /// Notes that a query of the stream before the request has failed; true for the first one.
    pub(super) fn note_failed_query(&self) -> bool {
        !std::mem::replace(&mut self.lock().has_failed_query, true)
    }

    /// Ends a started transfer of a block.
    pub(super) fn end(&self, block: u32, result: Result<(), BlockError>) {
        let block = block as usize;
        let mut state = self.lock();
        state.running -= 1;
        if state.is_over {
            self.given_up.fetch_sub(1, Ordering::AcqRel);
            self.settle(&mut state);
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
        self.settle(&mut state);
    }

    /// Ends the request before its deadline; its streams continue when its transfers have ended, at the deadline at the latest.
    fn abandon(&self) {
        let mut state = self.lock();
        self.give_up(&mut state, &BlockError::Failed("the backend was closed".to_owned()));
        self.settle(&mut state);
    }

    /// Ends the request if its deadline has passed. Reports whether streams no longer wait for it.
    pub(super) fn expire(&self) -> bool {
        let mut state = self.lock();
        if Instant::now() >= self.deadline {
            self.give_up(&mut state, &BlockError::TimedOut);
        }
        self.settle(&mut state)
    }

    /// Keeps a signal until the request has ended.
    fn signal_at_end(&self, signal: Signal) {
        let mut state = self.lock();
        state.signals.push(signal);
        self.settle(&mut state);
    }

    fn give_up(&self, state: &mut State, error: &BlockError) {
        if state.is_over {
            return;
        }
        state.is_over = true;
        self.given_up.fetch_add(state.running, Ordering::AcqRel);
        let State { left, errors, .. } = state;
        for (block, _) in left.iter().enumerate().filter(|(_, left)| **left > 0) {
            errors.entry(block).or_insert_with(|| error.clone());
        }
        self.has_ended.notify_all();
    }

    /// Releases streams if the request has ended. Reports whether it has.
    fn settle(&self, state: &mut State) -> bool {
        let is_settled = state.is_over && (state.running == 0 || Instant::now() >= self.deadline);
        if is_settled {
            // Their drop advances the words.
            state.signals.clear();
        }
        is_settled
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
        if Instant::now() >= self.deadline {
            self.give_up(state, &BlockError::TimedOut);
            self.settle(state);
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
///
/// Fields are dropped in order: the thread first, streams last.
#[derive(Default)]
pub(super) struct Requests {
    /// Ends requests for which streams wait; started with the first one.
    keeper: Option<Keeper>,
    /// Advances the backend, if polls do.
    pump: Option<Pump>,
    next: u64,
    open: HashMap<LayerTicket, (Arc<Progress>, u64)>,
    given_up: Arc<AtomicUsize>,
    counters: MoverCounters,
    /// Streams that have waited for requests. A thread that drops the last clone would wait for the GPU.
    streams: Vec<EngineStream>,
}

impl Requests {
    /// Creates requests that advance by polls.
    pub(super) fn with_pump(pump: Pump) -> Requests {
        Requests { pump: Some(pump), ..Requests::default() }
    }

    /// Delays later work of a stream until the end of a request.
    pub(super) fn delay(&mut self, ticket: LayerTicket, stream: &EngineStream) -> Result<(), MoveError> {
        let (progress, _) = self.open.get(&ticket).ok_or(MoveError::UnknownTicket)?;
        if progress.expire() {
            return Ok(());
        }
        if !self.streams.iter().any(|known| known.is_same(stream)) {
            if self.streams.len() >= STREAMS_MAX {
                return Err(MoveError::Invalid(format!(
                    "more than {STREAMS_MAX} streams of a backend: create an EngineStream once for each stream and keep it"
                )));
            }
            self.streams.push(stream.clone());
        }
        let keeper = match self.keeper.take() {
            Some(keeper) => keeper,
            None => Keeper::start(self.pump.clone())?,
        };
        self.keeper.insert(keeper).watch(progress);
        progress.signal_at_end(stream.delay()?);
        Ok(())
    }

    /// Applies the order of a request to its stream, if it has one. A request whose stream cannot wait is abandoned.
    pub(super) fn finish_order(
        &mut self,
        ticket: LayerTicket,
        order: RequestOrder<'_>,
    ) -> Result<LayerTicket, MoveError> {
        let Some(stream) = order.stream() else { return Ok(ticket) };
        let delayed = self.delay(ticket, stream);
        if delayed.is_err() {
            self.forget(ticket);
        }
        delayed.map(|()| ticket)
    }

    /// Ends all requests; transfers that run are not stopped.
    pub(super) fn abandon(&mut self) {
        self.open.values().for_each(|(progress, _)| progress.abandon());
    }

    /// Ends all requests. The thread no longer advances the backend.
    pub(super) fn close(&mut self) {
        self.abandon();
        self.keeper = None;
        self.pump = None;
    }

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
        let state = State {
            left: transfers,
            blocks_left,
            running: 0,
            errors: BTreeMap::new(),
            is_over,
            has_failed_query: false,
            signals: Vec::new(),
        };
        let progress = Arc::new(Progress {
            state: Mutex::new(state),
            has_ended: Condvar::new(),
            deadline: Instant::now() + timeout,
            given_up: Arc::clone(&self.given_up),
        });
        self.open.insert(ticket, (Arc::clone(&progress), block_bytes));
        Ok((ticket, progress))
    }

    /// Abandons a request that could not be enqueued.
    pub(super) fn forget(&mut self, ticket: LayerTicket) {
        if let Some((progress, _)) = self.open.remove(&ticket) {
            progress.abandon();
        }
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

impl std::fmt::Debug for Requests {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (open, counters) = (self.open.len(), &self.counters);
        formatter
            .debug_struct("Requests")
            .field("open", &open)
            .field("counters", counters)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::HostStream;

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
    fn stream_waits_for_the_last_transfer_and_continues_at_the_deadline_of_one_that_hangs() {
        let host = HostStream::start().expect("a thread");
        let stream = EngineStream::on_host(&host);
        let mut requests = Requests::default();
        let (ticket, progress) = requests.open(vec![1], 0, LONG).expect("room");
        assert!(progress.start(1));
        requests.delay(ticket, &stream).expect("a word");
        let point = stream.mark().expect("a mark");
        std::thread::sleep(Duration::from_millis(20));
        assert!(!point.has_passed().expect("no GPU"), "the transfer runs");
        progress.end(0, Ok(()));
        host.synchronize();

        let began = Instant::now();
        let limit = Duration::from_millis(50);
        let (ticket, progress) = requests.open(vec![1], 0, limit).expect("room");
        assert!(progress.start(1));
        requests.delay(ticket, &stream).expect("a word");
        host.synchronize();
        assert!((limit..LONG).contains(&began.elapsed()), "{:?}", began.elapsed());
        assert_eq!(requests.given_up(), 1);
        assert_eq!(requests.wait(ticket).expect("open").failures[0].error, BlockError::TimedOut);
    }

    #[test]
    fn abandoned_request_keeps_its_stream_until_its_running_transfer_has_ended() {
        let host = HostStream::start().expect("a thread");
        let stream = EngineStream::on_host(&host);
        let mut requests = Requests::default();
        let (ticket, progress) = requests.open(vec![1, 1], 0, LONG).expect("room");
        assert!(progress.start(1));
        requests.delay(ticket, &stream).expect("a word");
        let point = stream.mark().expect("a mark");
        requests.close();
        assert!(!progress.start(1), "no transfer starts after the end");
        std::thread::sleep(Duration::from_millis(20));
        assert!(!point.has_passed().expect("no GPU"), "a transfer still accesses memory");
        progress.end(0, Ok(()));
        host.synchronize();
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
