//! Loads of several windows whose time is limited.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use reprise_client::path::{BlockPath, LOAD_TIME_MIN};
use reprise_client::{
    BlockStatus, ClientError, FinishedTransfer, LoadOptions, LoadedBlocks, Outcome, PhysicalBlock,
    SessionKeeper, Transfers,
};
use reprise_policy::BlockKey;
use reprise_policy::recompute::WaitLimit;
use reprise_proto::local::{self, request};

use crate::fake_agent::{Answer, FakeAgent, Grant, LONG, Peer, SHORT, layout, missed};
use crate::memory::Memory;
use crate::transfers::{FakePath, start_transfers, transfer_options};

/// Blocks of one window of 32 MiB.
fn window() -> usize {
    ((32 << 20) / layout().slot_bytes()) as usize
}

/// One block more than a window, all with the same place in the memory.
fn two_windows() -> Vec<(BlockKey, PhysicalBlock)> {
    let key = |number: usize| BlockKey((number as u128).to_le_bytes());
    (0..=window()).map(|number| (key(number), PhysicalBlock(0))).collect()
}

/// Answers the first load; returns its blocks' statuses, all of them with the bytes of block 0.
fn answer_first(peer: &mut Peer, id: u64, mut blocks: Vec<local::LoadedBlock>) {
    let block = peer.place_block(0);
    blocks.resize(window(), block);
    peer.all_layers_ready(0, 1);
    peer.reply_loaded(id, Answer { load: 1, entry: 0, grant: Grant::First }, blocks);
}

/// Returns the deadlines of further loads, which are not answered.
fn further_loads(peer: &mut Peer) -> Vec<Duration> {
    let mut deadlines = Vec::new();
    while let Some((id, request)) = peer.receive() {
        match request {
            request::Body::Load(load) => deadlines.push(Duration::from_micros(load.deadline_us)),
            request::Body::Stats(_) => peer.reply_stats(id),
            _ => {}
        }
    }
    deadlines
}

fn loaded(finished: &FinishedTransfer) -> &LoadedBlocks {
    match &finished.outcome {
        Outcome::Loaded(loaded) => loaded,
        Outcome::Saved(_) => panic!("expected a load, got {finished:?}"),
    }
}

#[test]
fn load_whose_time_is_over_requests_no_further_blocks() {
    let (asked, further) = mpsc::channel();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        std::thread::sleep(2 * SHORT);
        answer_first(peer, id, Vec::new());
        asked.send(further_loads(peer)).expect("the test reads it");
    });
    let options = LoadOptions { deadline: SHORT, stall_timeout: LONG, ..LoadOptions::default() };
    let client = agent.connect();
    let loaded = client.load_blocks(&two_windows(), &Memory::new(1), &options).expect("a valid call");
    assert!(loaded.stopped_by.is_none(), "{:?}", loaded.stopped_by);
    assert_eq!((loaded.leading(), loaded.statuses[window()]), (window(), BlockStatus::Deadline));
    agent.end(client);
    assert_eq!(further.recv().expect("the script has ended"), [Duration::ZERO; 0]);
}

#[test]
fn limited_load_requests_no_blocks_behind_a_missing_one() {
    let (asked, further) = mpsc::channel();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        answer_first(peer, id, vec![missed(local::BlockStatus::BlockMiss)]);
        asked.send(further_loads(peer)).expect("the test reads it");
    });
    let (transfers, keeper) = start_transfers(&agent, &Arc::new(Memory::new(1)), transfer_options(LONG));
    let began = Instant::now();
    let limit = WaitLimit { bound: LONG, per_block: Duration::ZERO };
    let load = transfers.submit_load_within(two_windows(), limit).expect("a valid call");
    assert!(transfers.wait(&[load], LONG / 2));
    let finished = transfers.finished().pop().expect("the load");
    let loaded = loaded(&finished);
    assert!(loaded.stopped_by.is_none(), "{:?}", loaded.stopped_by);
    assert_eq!((loaded.statuses[0], loaded.statuses[1]), (BlockStatus::Miss, BlockStatus::Ok));
    assert_eq!(loaded.statuses[window()], BlockStatus::Deadline);
    assert!(began.elapsed() < LONG / 2);
    agent.end((transfers, keeper));
    assert_eq!(further.recv().expect("the script has ended"), [Duration::ZERO; 0]);
}

#[test]
fn next_window_has_the_limit_that_holds_if_the_one_before_arrives() {
    let (asked, deadline) = mpsc::channel();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        answer_first(peer, id, Vec::new());
        let (id, request) = peer.expect("the next load");
        let request::Body::Load(load) = request else { panic!("expected load, got {request:?}") };
        asked.send(Duration::from_micros(load.deadline_us)).expect("the test reads it");
        peer.all_layers_ready(1, 2);
        let answer = Answer { load: 2, entry: 1, grant: Grant::Known };
        peer.reply_loaded(id, answer, vec![missed(local::BlockStatus::BlockMiss)]);
        while peer.receive().is_some() {}
    });
    let (transfers, keeper) = start_transfers(&agent, &Arc::new(Memory::new(1)), transfer_options(LONG));
    let limit = WaitLimit { bound: LONG / 2, per_block: Duration::from_millis(1) };
    let load = transfers.submit_load_within(two_windows(), limit).expect("a valid call");
    assert!(transfers.wait(&[load], LONG));
    let finished = transfers.finished().pop().expect("the load");
    assert_eq!(loaded(&finished).leading(), window());
    let all = limit.per_block * u32::try_from(window()).expect("few blocks");
    let deadline = deadline.recv().expect("the agent has sent it");
    assert!(deadline > limit.bound + all / 2, "{deadline:?}");
    agent.end((transfers, keeper));
}

/// Agent that answers no loads; the others as `answers`. Sends deadline and scope of each load.
fn silent(asked: mpsc::Sender<local::Load>, answers: bool) -> FakeAgent {
    FakeAgent::serve(move |peer| {
        while let Some((id, request)) = peer.receive() {
            match request {
                request::Body::Load(load) => asked.send(load).expect("the test reads it"),
                request::Body::Stats(_) if answers => peer.reply_stats(id),
                _ => {}
            }
        }
    })
}

fn one_block() -> Vec<(BlockKey, PhysicalBlock)> {
    two_windows().split_off(window())
}

#[test]
fn hanging_agent_does_not_extend_a_limit_and_is_suspected_after_a_whole_stall_timeout() {
    let (asked, loads) = mpsc::channel();
    let agent = silent(asked, false);
    let (transfers, keeper) = start_transfers(&agent, &Arc::new(Memory::new(1)), transfer_options(5 * SHORT));
    let limit = WaitLimit { bound: SHORT, per_block: LONG };
    let load = || {
        let load = transfers.submit_load_within(one_block(), limit).expect("a valid call");
        assert!(transfers.wait(&[load], LONG / 2));
        transfers.finished().pop().expect("the load")
    };
    let first = load();
    assert_eq!(loaded(&first).statuses, [BlockStatus::Failed]);
    let error = first.outcome.stopped_by().expect("an error");
    assert!(matches!(error, ClientError::LimitReached { .. }), "{error}");
    assert!(error.to_string().starts_with("computing is faster: no block within"), "{error}");
    let deadline = loads.recv().expect("a load").deadline_us;
    assert!(u128::from(deadline) <= SHORT.as_micros(), "{deadline} µs");
    assert!(!keeper.status().is_suspected, "it did not answer within {SHORT:?} only");
    let began = Instant::now();
    while !keeper.status().is_suspected {
        assert!(began.elapsed() < LONG / 2, "the agent hangs");
        load();
    }
    agent.end((transfers, keeper));
}

#[test]
fn agent_that_answers_is_not_suspected_when_limits_are_reached() {
    let (asked, _loads) = mpsc::channel();
    let agent = silent(asked, true);
    let mut options = transfer_options(SHORT);
    options.queued_max = 8;
    let (transfers, keeper) = start_transfers(&agent, &Arc::new(Memory::new(1)), options);
    // Each wait is longer than half of the stall timeout, after which the agent is probed.
    let limit = WaitLimit { bound: SHORT, per_block: LONG };
    let load = transfers.submit_load_within(one_block(), limit).expect("a valid call");
    assert!(transfers.wait(&[load], LONG / 2));
    let finished = transfers.finished().pop().expect("the load");
    let error = finished.outcome.stopped_by().expect("an error");
    assert!(matches!(error, ClientError::LimitReached { .. }), "{error}");
    assert!(!keeper.status().is_suspected);
    agent.end((transfers, keeper));
}

#[test]
fn limited_loads_without_a_block_make_later_ones_avoid_peers() {
    let (asked, scopes) = mpsc::channel();
    let agent = FakeAgent::serve(move |peer| {
        let mut grant = Grant::First;
        for number in 1.. {
            let Some((id, request)) = peer.receive() else { break };
            let request::Body::Load(load) = request else { continue };
            asked.send(load.local_only).expect("the test reads it");
            std::thread::sleep(Duration::from_micros(load.deadline_us));
            peer.all_layers_ready(0, number);
            let answer = Answer { load: number, entry: 0, grant };
            peer.reply_loaded(id, answer, vec![missed(local::BlockStatus::BlockDeadline)]);
            grant = Grant::Known;
        }
    });
    let mut options = transfer_options(LONG);
    options.load.standstill_timeout = Some(LONG);
    let (transfers, keeper) = start_transfers(&agent, &Arc::new(Memory::new(1)), options);
    // Less than the time without progress that counts.
    let limit = WaitLimit { bound: Duration::from_millis(120), per_block: LONG };
    let began = Instant::now();
    let mut loads = 0;
    loop {
        let load = transfers.submit_load_within(one_block(), limit).expect("a valid call");
        assert!(transfers.wait(&[load], LONG / 2));
        loads += 1;
        if scopes.recv().expect("a load") {
            break;
        }
        assert!(began.elapsed() < LONG / 2, "the load uses peers");
    }
    assert!(loads > 2, "one load of 120 ms does not show it");
    assert!(!keeper.status().is_suspected);
    agent.end((transfers, keeper));
}

#[test]
fn path_gets_no_load_with_little_time() {
    let (asked, _loads) = mpsc::channel();
    let agent = silent(asked, true);
    let keeper = Arc::new(SessionKeeper::new(agent.options()).expect("a thread"));
    assert!(keeper.wait_until_connected(LONG), "{:?}", keeper.status());
    let path = Arc::new(FakePath { time: Duration::ZERO, is_loaded: false, loads: AtomicUsize::new(0) });
    let by_path: Arc<dyn BlockPath> = path.clone();
    let options = transfer_options(LONG);
    let memory = Arc::new(Memory::new(1));
    let transfers = Transfers::with_path(keeper, memory, options, Some(by_path)).expect("threads");
    for (bound, calls) in [(LOAD_TIME_MIN / 2, 0), (4 * SHORT, 1)] {
        let limit = WaitLimit { bound, per_block: Duration::ZERO };
        let load = transfers.submit_load_within(one_block(), limit).expect("a valid call");
        assert!(transfers.wait(&[load], LONG / 2));
        assert_eq!(path.loads.load(Ordering::Relaxed), calls, "{bound:?}");
    }
    drop(transfers);
    agent.join();
}

#[test]
fn pins_end_at_their_limit() {
    let agent = FakeAgent::serve(|peer| while peer.receive().is_some() {});
    let client = agent.connect();
    let began = Instant::now();
    let error = client.pin_extents_within(&[BlockKey([1; 16])], SHORT).expect_err("no answer");
    assert!(matches!(error, ClientError::Timeout { after, .. } if after == SHORT), "{error}");
    assert!(began.elapsed() < LONG / 2);
    agent.end(client);
}
