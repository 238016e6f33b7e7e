//! Saves and loads on background threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use reprise_client::path::BlockPath;
use reprise_client::{
    BlockStatus, ChainPlace, Client, ClientError, LoadOptions, Outcome, PagedMemory, PhysicalBlock,
    SaveOptions, SaveStatus, SessionKeeper, TransferId, TransferOptions, Transfers,
};
use reprise_policy::recompute::WaitLimit;
use reprise_policy::{BlockKey, Layout};
use reprise_proto::local::request;

use crate::fake_agent::{Answer, FakeAgent, Grant, LONG, Peer, SHORT, block_bytes, layout, options};
use crate::memory::{Memory, placed};

/// Limit for an agent that hangs, and for nothing else.
pub(crate) fn transfer_options(stall_timeout: Duration) -> TransferOptions {
    TransferOptions {
        save: SaveOptions { room_wait: LONG, stall_timeout, ..SaveOptions::default() },
        load: LoadOptions { deadline: LONG, stall_timeout, ..LoadOptions::default() },
        queued_max: 2,
    }
}

/// Connects to the agent and starts transfers of this memory.
pub(crate) fn start_transfers<M: PagedMemory + 'static>(
    agent: &FakeAgent,
    memory: &Arc<M>,
    options: TransferOptions,
) -> (Transfers, Arc<SessionKeeper>) {
    let keeper = Arc::new(SessionKeeper::new(agent.options()).expect("a thread"));
    assert!(keeper.wait_until_connected(LONG), "{:?}", keeper.status());
    let memory = Arc::<M>::clone(memory);
    (Transfers::new(Arc::clone(&keeper), memory, options).expect("threads"), keeper)
}

pub(crate) fn load_statuses(outcome: &Outcome) -> &[BlockStatus] {
    match outcome {
        Outcome::Loaded(loaded) => &loaded.statuses,
        Outcome::Saved(_) => panic!("expected a load, got {outcome:?}"),
    }
}

pub(crate) fn save_statuses(outcome: &Outcome) -> &[SaveStatus] {
    match outcome {
        Outcome::Saved(saved) => &saved.statuses,
        Outcome::Loaded(_) => panic!("expected a save, got {outcome:?}"),
    }
}

/// Serves one save of one block, then loads of one block.
fn serve(peer: &mut Peer) {
    peer.greet();
    peer.give_slots(1, Grant::First);
    peer.accept_commit(1);
    peer.serve_load(Answer { load: 1, entry: 0, grant: Grant::First }, 1);
    assert_eq!(peer.expect_release(), 1);
    assert!(peer.receive().is_none(), "the client closes");
}

#[test]
fn saves_and_loads_end_and_are_returned_once() {
    let agent = FakeAgent::start(serve);
    let memory = Arc::new(Memory::filled(2));
    let (transfers, _) = start_transfers(&agent, &memory, transfer_options(LONG));
    assert!(transfers.finished().is_empty());
    let save = transfers.submit_save(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
    assert!(transfers.wait(&[save], LONG));
    let load = transfers.submit_load(placed([(0, 1)])).expect("a valid call");
    assert!(transfers.wait(&[save, load], LONG));
    let finished = transfers.finished();
    assert_eq!(finished.iter().map(|ended| ended.id).collect::<Vec<_>>(), [save, load]);
    assert_eq!(save_statuses(&finished[0].outcome), [SaveStatus::Committed]);
    assert_eq!(load_statuses(&finished[1].outcome), [BlockStatus::Ok]);
    assert_eq!(*memory.block(1), block_bytes(0));
    assert!(transfers.finished().is_empty(), "each transfer is returned once");
    assert!(transfers.wait(&[save], Duration::ZERO), "an ended transfer stays ended");
    let error = transfers.submit_load(placed([(0, 2)])).expect_err("an invalid block");
    assert!(matches!(error, ClientError::BadRequest(_)), "{error}");
    agent.end(transfers);
}

/// Moves the first block of each transfer; fills loaded ones with the bytes of block 0.
#[derive(Debug)]
struct FirstBlock;

impl BlockPath for FirstBlock {
    fn load(
        &self,
        _: &Client,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        _: &LoadOptions,
    ) -> Result<Vec<bool>, ClientError> {
        let bytes = block_bytes(0);
        let objects = bytes.chunks(memory.layout().object_bytes() as usize);
        for (object, from) in (0..).zip(objects) {
            memory.write_object(blocks[0].1, object, &mut |to| to.copy_from_slice(from));
        }
        Ok((0..blocks.len()).map(|index| index == 0).collect())
    }

    fn save(
        &self,
        _: &Client,
        _: &[(BlockKey, PhysicalBlock)],
        _: &dyn PagedMemory,
        _: &SaveOptions,
    ) -> Result<Vec<SaveStatus>, ClientError> {
        Ok(vec![SaveStatus::Committed])
    }
}

#[test]
fn the_arena_moves_the_blocks_that_a_path_does_not_reach() {
    let agent = FakeAgent::start(serve);
    let memory = Arc::new(Memory::filled(4));
    let keeper = Arc::new(SessionKeeper::new(agent.options()).expect("a thread"));
    assert!(keeper.wait_until_connected(LONG), "{:?}", keeper.status());
    let paged: Arc<dyn PagedMemory> = memory.clone();
    let transfers = Transfers::with_path(keeper, paged, transfer_options(LONG), Some(Arc::new(FirstBlock)));
    let transfers = transfers.expect("threads");
    // The agent serves one block of each.
    let save = transfers.submit_save(placed([(1, 1), (0, 0)]), ChainPlace::default()).expect("a valid call");
    assert!(transfers.wait(&[save], LONG));
    let load = transfers.submit_load(placed([(1, 2), (0, 3)])).expect("a valid call");
    assert!(transfers.wait(&[load], LONG));
    let finished = transfers.finished();
    assert_eq!(save_statuses(&finished[0].outcome), [SaveStatus::Committed; 2]);
    assert_eq!(load_statuses(&finished[1].outcome), [BlockStatus::Ok; 2]);
    assert_eq!(finished.iter().map(|ended| ended.by_path).collect::<Vec<_>>(), [1, 1]);
    assert_eq!((&*memory.block(2), &*memory.block(3)), (&block_bytes(0), &block_bytes(0)));
    agent.end(transfers);
}

/// Loads as [`FirstBlock`], and returns after the deadline.
#[derive(Debug)]
struct LateBlock;

impl BlockPath for LateBlock {
    fn load(
        &self,
        client: &Client,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &LoadOptions,
    ) -> Result<Vec<bool>, ClientError> {
        let loaded = FirstBlock.load(client, blocks, memory, options);
        std::thread::sleep(options.deadline);
        loaded
    }

    fn save(
        &self,
        _: &Client,
        _: &[(BlockKey, PhysicalBlock)],
        _: &dyn PagedMemory,
        _: &SaveOptions,
    ) -> Result<Vec<SaveStatus>, ClientError> {
        Ok(Vec::new())
    }
}

#[test]
fn blocks_of_a_path_stay_loaded_when_the_deadline_passes_before_the_others() {
    let agent = FakeAgent::serve(|peer| while peer.receive().is_some() {});
    let memory = Arc::new(Memory::filled(4));
    let keeper = Arc::new(SessionKeeper::new(agent.options()).expect("a thread"));
    assert!(keeper.wait_until_connected(LONG), "{:?}", keeper.status());
    let paged: Arc<dyn PagedMemory> = memory.clone();
    let mut options = transfer_options(LONG);
    options.load.deadline = Duration::from_millis(200);
    let transfers = Transfers::with_path(keeper, paged, options, Some(Arc::new(LateBlock))).expect("threads");
    let load = transfers.submit_load(placed([(0, 2), (1, 3)])).expect("a valid call");
    assert!(transfers.wait(&[load], LONG));
    let finished = transfers.finished();
    assert_eq!(load_statuses(&finished[0].outcome), [BlockStatus::Ok, BlockStatus::Failed]);
    assert!(matches!(finished[0].outcome.stopped_by(), Some(ClientError::Busy(_))));
    assert_eq!(finished[0].by_path, 1);
    assert_eq!(*memory.block(2), block_bytes(0));
    agent.end(transfers);
}

/// Counts the parts of loads, takes a time for each, and moves nothing.
#[derive(Debug)]
pub(crate) struct FakePath {
    pub(crate) time: Duration,
    /// Result for each block.
    pub(crate) is_loaded: bool,
    pub(crate) loads: AtomicUsize,
}

impl BlockPath for FakePath {
    fn load(
        &self,
        _: &Client,
        blocks: &[(BlockKey, PhysicalBlock)],
        _: &dyn PagedMemory,
        _: &LoadOptions,
    ) -> Result<Vec<bool>, ClientError> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(self.time);
        Ok(vec![self.is_loaded; blocks.len()])
    }

    fn save(
        &self,
        _: &Client,
        _: &[(BlockKey, PhysicalBlock)],
        _: &dyn PagedMemory,
        _: &SaveOptions,
    ) -> Result<Vec<SaveStatus>, ClientError> {
        Ok(Vec::new())
    }
}

#[test]
fn limit_of_a_wait_grows_with_the_blocks_that_have_arrived() {
    let bound = SHORT;
    let agent = FakeAgent::serve(|peer| while peer.receive().is_some() {});
    let keeper = Arc::new(SessionKeeper::new(agent.options()).expect("a thread"));
    assert!(keeper.wait_until_connected(LONG), "{:?}", keeper.status());
    let path: Arc<dyn BlockPath> =
        Arc::new(FakePath { time: 2 * bound, is_loaded: true, loads: AtomicUsize::new(0) });
    let memory: Arc<dyn PagedMemory> = Arc::new(Memory::new(200));
    let transfers =
        Transfers::with_path(keeper, memory, transfer_options(LONG), Some(path)).expect("threads");
    let load = |per_block| {
        let blocks = placed((0..200).map(|block| (block, usize::from(block))));
        let load = transfers.submit_load_within(blocks, WaitLimit { bound, per_block });
        assert!(transfers.wait(&[load.expect("a valid call")], LONG));
        transfers.finished().pop().expect("the load")
    };
    let whole = load(LONG);
    assert_eq!(load_statuses(&whole.outcome), [BlockStatus::Ok; 200]);
    assert!(whole.ran <= whole.elapsed && whole.ran >= 8 * bound, "{whole:?}");
    let part = load(Duration::ZERO);
    assert!(load_statuses(&part.outcome).starts_with(&[BlockStatus::Ok; 64]));
    assert_eq!(load_statuses(&part.outcome)[64..], [BlockStatus::Failed; 136]);
    let words = part.outcome.stopped_by().expect("an error").to_string();
    assert!(words.contains("computing is faster: 64 of 200 blocks"), "{words}");
    agent.end(transfers);
}

#[test]
fn transfers_fail_at_once_without_an_agent() {
    let directory = tempfile::tempdir().expect("a directory");
    let keeper = SessionKeeper::new(options(&directory.path().join("absent"))).expect("a thread");
    let memory = Arc::new(Memory::filled(1));
    let transfers = Transfers::new(Arc::new(keeper), memory, transfer_options(LONG)).expect("threads");
    let save = transfers.submit_save(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
    let load = transfers.submit_load(placed([(0, 0)])).expect("a valid call");
    assert!(transfers.wait(&[save, load], LONG));
    for ended in transfers.finished() {
        assert!(matches!(ended.outcome.stopped_by(), Some(ClientError::AgentLost { .. })), "{ended:?}");
    }
}

#[test]
fn a_save_that_exceeds_the_queue_fails_at_once() {
    let (running, first_runs) = mpsc::channel::<()>();
    let (proceed, proceed_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_reserve();
        running.send(()).expect("the test waits for it");
        proceed_signal.recv().expect("the test sends the signal");
        peer.reply_reserved(id, 1, Grant::First);
    });
    let memory = Arc::new(Memory::filled(1));
    let (transfers, _) = start_transfers(&agent, &memory, transfer_options(LONG));
    let submit = || transfers.submit_save(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
    let first = submit();
    first_runs.recv().expect("the agent lives");
    // The running transfer has left the queue, which has room for two.
    let ids: Vec<TransferId> = std::iter::once(first).chain((0..3).map(|_| submit())).collect();
    assert!(transfers.wait(&ids[3..], LONG));
    let refused = transfers.finished();
    assert_eq!(refused.len(), 1, "{refused:?}");
    let last = &refused[0];
    assert_eq!((last.id, save_statuses(&last.outcome)), (ids[3], [SaveStatus::Unsaved].as_slice()));
    assert!(matches!(last.outcome.stopped_by(), Some(ClientError::Busy(_))), "{last:?}");
    proceed.send(()).expect("the agent lives");
    assert!(transfers.wait(&ids, LONG), "the death of the agent ends the rest");
    assert_eq!(transfers.finished().len(), 3);
    agent.join();
}

#[test]
fn only_the_first_transfer_waits_for_a_hanging_agent() {
    let agent = FakeAgent::serve(|peer| while peer.receive().is_some() {});
    let memory = Arc::new(Memory::filled(1));
    let (transfers, keeper) = start_transfers(&agent, &memory, transfer_options(SHORT));
    let load = transfers.submit_load(placed([(0, 0)])).expect("a valid call");
    assert!(transfers.wait(&[load], LONG));
    assert!(keeper.status().is_suspected);
    let started = Instant::now();
    let save = transfers.submit_save(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
    assert!(transfers.wait(&[save], LONG));
    let finished = transfers.finished();
    assert!(matches!(finished[0].outcome.stopped_by(), Some(ClientError::Timeout { .. })), "{finished:?}");
    let words = finished[1].outcome.stopped_by().expect("an error").to_string();
    assert!(words.contains("does not answer"), "{words}");
    assert!(started.elapsed() < LONG / 2);
    agent.end((transfers, keeper));
}

/// An agent that answers everything except loads.
fn standing_still() -> TransferOptions {
    let mut options = transfer_options(LONG);
    options.load.standstill_timeout = Some(SHORT);
    options
}

#[test]
fn a_stalled_load_ends_without_suspecting_the_agent_and_the_next_uses_no_peers() {
    let (asked, scopes) = mpsc::channel::<bool>();
    let agent = FakeAgent::serve(move |peer| {
        while let Some((id, request)) = peer.receive() {
            match request {
                request::Body::Load(load) => asked.send(load.local_only).expect("the test reads it"),
                request::Body::Stats(_) => peer.reply_stats(id),
                other => panic!("{other:?}"),
            }
        }
    });
    let (transfers, keeper) = start_transfers(&agent, &Arc::new(Memory::new(2)), standing_still());
    let loads = [0, 1].map(|block| transfers.submit_load(placed([(block, 0)])).expect("a valid call"));
    assert!(transfers.wait(&loads, LONG / 2));
    for ended in transfers.finished() {
        assert_eq!(load_statuses(&ended.outcome), [BlockStatus::Failed]);
        let reason = ended.outcome.stopped_by().expect("a stopped transfer");
        assert!(matches!(reason, ClientError::Stalled { .. }), "{reason}");
        assert_eq!(reason.kind(), "Stalled");
    }
    assert!(!keeper.status().is_suspected, "it has answered all along");
    assert_eq!(scopes.iter().take(2).collect::<Vec<_>>(), [false, true], "whether the load is local only");
    agent.end((transfers, keeper));
}

#[test]
fn layers_after_the_end_of_a_stalled_load_are_not_written() {
    let (ended, load_ended) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        peer.layers_ready(0, 1, 1);
        let block = peer.place_block(0);
        peer.reply_loaded(id, Answer { load: 1, entry: 0, grant: Grant::First }, vec![block]);
        let id = peer.expect_stats();
        peer.reply_stats(id);
        assert_eq!(peer.expect_release(), 1);
        load_ended.recv().expect("the test sends the signal");
        peer.progress.set_layers(0, 2);
        assert!(peer.receive().is_none(), "the client closes");
    });
    let memory = Arc::new(Memory::new(1));
    let (transfers, keeper) = start_transfers(&agent, &memory, standing_still());
    let load = transfers.submit_load(placed([(0, 0)])).expect("a valid call");
    assert!(transfers.wait(&[load], LONG / 2));
    let finished = transfers.finished();
    assert_eq!(load_statuses(&finished[0].outcome), [BlockStatus::Failed]);
    assert!(matches!(finished[0].outcome.stopped_by(), Some(ClientError::Stalled { .. })), "{finished:?}");
    assert!(!keeper.status().is_suspected);
    let held = memory.block(0).clone();
    assert_ne!(held, block_bytes(0), "only the first layer arrived in time");
    ended.send(()).expect("the agent lives");
    agent.end((transfers, keeper));
    assert_eq!(*memory.block(0), held, "later layers were not copied");
}

#[test]
fn a_load_deadline_counts_from_submission_and_an_expired_load_is_not_sent() {
    let (proceed, proceed_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        proceed_signal.recv().expect("the test sends the signal");
        peer.reply_loaded_whole(id, Answer { load: 1, entry: 0, grant: Grant::First }, 1);
        assert_eq!(peer.expect_release(), 1);
        assert!(peer.receive().is_none(), "the second load is not sent");
    });
    let mut options = transfer_options(LONG);
    options.load.deadline = SHORT;
    let (transfers, _) = start_transfers(&agent, &Arc::new(Memory::new(2)), options);
    let first = transfers.submit_load(placed([(0, 0)])).expect("a valid call");
    let submitted = Instant::now();
    let second = transfers.submit_load(placed([(1, 1)])).expect("a valid call");
    while submitted.elapsed() <= SHORT {
        std::thread::yield_now();
    }
    proceed.send(()).expect("the agent lives");
    assert!(transfers.wait(&[first, second], LONG));
    let finished = transfers.finished();
    let late = finished.iter().find(|ended| ended.id == second).expect("it has ended");
    assert_eq!(load_statuses(&late.outcome), [BlockStatus::Failed]);
    let words = late.outcome.stopped_by().expect("an error").to_string();
    assert!(words.contains("earlier loads used up the deadline"), "{words}");
    agent.end(transfers);
}

#[test]
fn a_cancelled_transfer_ends_with_its_current_part_and_queued_ones_fail() {
    let (reserved, started) = mpsc::channel::<()>();
    let (proceed, proceed_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_reserve();
        reserved.send(()).expect("the test waits");
        proceed_signal.recv().expect("the test sends the signal");
        peer.reply_reserved(id, 1, Grant::First);
        peer.accept_commit(1);
        assert!(peer.receive().is_none(), "neither the rest nor the second save is begun");
    });
    let memory = Arc::new(Memory::filled(2));
    let (transfers, _) = start_transfers(&agent, &memory, transfer_options(LONG));
    let submit =
        || transfers.submit_save(placed([(0, 0), (1, 1)]), ChainPlace::default()).expect("a valid call");
    let ids = [submit(), submit()];
    started.recv().expect("the agent sends the signal");
    transfers.cancel();
    proceed.send(()).expect("the agent lives");
    let ids = [ids[0], ids[1], submit()];
    assert!(transfers.wait(&ids, LONG));
    use SaveStatus::{Committed, Unsaved};
    for (ended, first) in transfers.finished().iter().zip([Committed, Unsaved, Unsaved]) {
        assert_eq!(save_statuses(&ended.outcome), [first, Unsaved]);
        let words = ended.outcome.stopped_by().expect("cancelled").to_string();
        assert!(words.contains("cancelled"), "{words}");
    }
    drop(transfers);
    assert_eq!(Arc::strong_count(&memory), 1, "no thread uses the memory");
    agent.join();
}

#[test]
fn cancels_a_load_between_its_layers() {
    let (answered, started) = mpsc::channel::<()>();
    let (proceed, proceed_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        answered.send(()).expect("the test waits");
        proceed_signal.recv().expect("the test sends the signal");
        peer.reply_loaded_whole(id, Answer { load: 1, entry: 0, grant: Grant::First }, 1);
        assert_eq!(peer.expect_release(), 1);
    });
    let memory = Arc::new(Memory::new(1));
    let (transfers, _) = start_transfers(&agent, &memory, transfer_options(LONG));
    let load = transfers.submit_load(placed([(0, 0)])).expect("a valid call");
    started.recv().expect("the agent sends the signal");
    transfers.cancel();
    proceed.send(()).expect("the agent lives");
    assert!(transfers.wait(&[load], LONG));
    assert_eq!(load_statuses(&transfers.finished()[0].outcome), [BlockStatus::Failed]);
    assert!(memory.block(0).iter().all(|byte| *byte == 0), "nothing was copied after that");
    agent.end(transfers);
}

/// Memory that panics on every access.
#[derive(Debug)]
struct PanickingMemory(Layout);

impl PagedMemory for PanickingMemory {
    fn layout(&self) -> &Layout {
        &self.0
    }

    fn blocks(&self) -> usize {
        1
    }

    fn read_object(&self, _: PhysicalBlock, _: u32, _: &mut dyn FnMut(&[u8])) {
        panic!("this memory cannot be read");
    }

    fn write_object(&self, _: PhysicalBlock, _: u32, _: &mut dyn FnMut(&mut [u8])) {
        panic!("this memory cannot be written");
    }
}

#[test]
fn every_transfer_ends_when_the_memory_panics() {
    let agent = FakeAgent::serve(|peer| {
        peer.give_slots(1, Grant::First);
        while let Some((id, request)) = peer.receive() {
            if matches!(request, request::Body::Reserve(_)) {
                peer.reply_reserved(id, 1, Grant::Known);
            }
        }
    });
    let memory = Arc::new(PanickingMemory(layout()));
    let (transfers, _) = start_transfers(&agent, &memory, transfer_options(LONG));
    for _ in 0..2 {
        let save = transfers.submit_save(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
        assert!(transfers.wait(&[save], LONG));
    }
    for ended in transfers.finished() {
        assert_eq!(save_statuses(&ended.outcome), [SaveStatus::Unsaved]);
    }
    agent.end(transfers);
}
