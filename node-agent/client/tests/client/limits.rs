//! Loads of several windows whose time is limited.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use reprise_client::{BlockStatus, FinishedTransfer, LoadOptions, LoadedBlocks, Outcome, PhysicalBlock};
use reprise_policy::BlockKey;
use reprise_policy::recompute::WaitLimit;
use reprise_proto::local::{self, request};

use crate::fake_agent::{Answer, FakeAgent, Grant, LONG, Peer, SHORT, layout, missed};
use crate::memory::Memory;
use crate::transfers::{start_transfers, transfer_options};

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
    assert_eq!(further.recv().expect("the script has ended"), []);
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
    assert_eq!(further.recv().expect("the script has ended"), []);
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
