//! Loads: layers, verified copies, release, windows, the asynchronous client.

use std::ops::ControlFlow;
use std::sync::mpsc;
use std::time::Duration;

use crate::fake_agent::{Answer, FakeAgent, Grant, LONG, Peer, block_bytes, key, layout, missed};
use reprise_client::asynchronous::AsyncClient;
use reprise_client::{BlockStatus, ClientError, CopyError, LoadRequest, Scope, Source, Verify};
use reprise_proto::local;

const FIRST: Answer = Answer { load: 5, entry: 3, grant: Grant::First };

fn object_bytes() -> usize {
    layout().object_bytes() as usize
}

#[test]
fn a_whole_block_is_copied_contiguously_and_scattered() {
    let agent = FakeAgent::serve(|peer| {
        let (id, keys) = peer.expect_load();
        assert_eq!(keys, [key(0), key(1)]);
        peer.reply_loaded_whole(id, FIRST, 2);
        assert_eq!(peer.expect_release(), 5);
    });
    let client = agent.connect();
    let load = client.load(&LoadRequest::new(vec![key(0), key(1)])).expect("loaded");
    assert_eq!(load.wait_layer(1, LONG).expect("ready").layers, 2);
    assert_eq!(load.leading_blocks(), 2);
    assert_eq!(load.blocks()[1].source(), Some(Source::OwnDram));
    let mut block = vec![0; layout().block_bytes() as usize];
    load.copy_block(0, &mut block).expect("verified");
    assert_eq!(block, block_bytes(0));
    block.fill(0);
    let mut objects: Vec<&mut [u8]> = block.chunks_mut(object_bytes()).rev().collect();
    load.copy_block_scattered(1, &mut objects).expect("verified");
    let reversed: Vec<u8> = block.chunks(object_bytes()).rev().flatten().copied().collect();
    assert_eq!(reversed, block_bytes(1));
    drop(load);
    agent.join();
}

#[test]
fn layers_are_copied_as_they_become_ready() {
    let (proceed, proceed_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        peer.layers_ready(3, 5, 1);
        let block = peer.place_block(0);
        peer.reply_loaded(id, FIRST, vec![block]);
        proceed_signal.recv().expect("the test sends the signal");
        peer.progress.set_layers(3, 2);
        peer.expect_release();
    });
    let client = agent.connect();
    let load = client.load(&LoadRequest::new(vec![key(0)])).expect("placed");
    let mut parts = vec![0; 2 * object_bytes()];
    let mut copy_layer = |layer| {
        let (keys, values) = parts.split_at_mut(object_bytes());
        load.copy_layer(0, layer, &mut [keys, values]).map(|()| parts.clone())
    };
    let layer_bytes = 2 * object_bytes();
    assert_eq!(copy_layer(0).expect("ready"), block_bytes(0)[..layer_bytes]);
    assert_eq!(copy_layer(1), Err(CopyError::NotReady { layer: 1, ready: 1 }));
    let early = load.wait_layer(1, Duration::from_millis(15)).expect_err("not yet");
    assert!(matches!(early, ClientError::Timeout { call: "wait_layer", .. }), "{early}");
    proceed.send(()).expect("the agent lives");
    load.wait_layer(1, LONG).expect("the layer arrives");
    assert_eq!(copy_layer(1).expect("ready"), block_bytes(0)[layer_bytes..]);
    drop(load);
    agent.join();
}

#[test]
fn detects_a_corrupt_object_reports_it_once_and_copies_the_others() {
    let agent = FakeAgent::serve(|peer| {
        peer.serve_load(FIRST, 2);
        let wrong =
            peer.arena.span(0, layout().slot_bytes() + object_bytes() as u64 * 2, 1).expect("object 2");
        wrong.copy_in(&[!block_bytes(1)[object_bytes() * 2]]).expect("writable");
        let (id, _) = peer.expect_match();
        peer.reply_matched(id, 1);
        // Two copies do not match, and one message reports it; the release is next.
        assert_eq!(peer.expect_suspect(), (FIRST.load, vec![1]));
        peer.expect_release();
    });
    let client = agent.connect();
    let load = client.load(&LoadRequest::new(vec![key(0), key(1)])).expect("loaded");
    client.match_keys(&[key(0)], Scope::Local).expect("answered after the bytes were changed");
    let mut block = vec![0; layout().block_bytes() as usize];
    load.copy_block(0, &mut block).expect("the first block is whole");
    assert_eq!(load.copy_block(1, &mut block), Err(CopyError::Corrupt { block: 1, object: 2 }));
    let mut object = vec![0; object_bytes()];
    load.copy_object(1, 1, &mut object).expect("other objects are whole");
    assert_eq!(load.copy_object(1, 2, &mut object), Err(CopyError::Corrupt { block: 1, object: 2 }));
    let load = load.with_verify(Verify::Off);
    load.copy_object(1, 2, &mut object).expect("the copy is not verified");
    drop(load);
    agent.join();
}

#[test]
fn missing_blocks_have_a_status_and_cannot_be_copied() {
    let agent = FakeAgent::serve(|peer| {
        let (id, _) = peer.expect_load();
        peer.progress.begin(3, 5);
        let blocks = vec![
            peer.place_block(0),
            peer.place_block(1),
            missed(local::BlockStatus::BlockMiss),
            missed(local::BlockStatus::BlockNoSpace),
            missed(local::BlockStatus::BlockDeadline),
        ];
        peer.progress.fail_block(3, 1);
        peer.progress.set_layers(3, 2);
        peer.progress.done(3);
        peer.reply_loaded(id, FIRST, blocks);
        peer.expect_release();
    });
    let client = agent.connect();
    let load = client.load(&LoadRequest::new((0..5).map(key).collect())).expect("answered");
    load.wait_layer(1, LONG).expect("done");
    let statuses: Vec<BlockStatus> = (0..6).map(|block| load.status(block)).collect();
    use BlockStatus::{Deadline, Failed, Miss, NoSpace, Ok};
    assert_eq!(statuses, [Ok, Failed, Miss, NoSpace, Deadline, Miss]);
    assert_eq!(load.leading_blocks(), 1);
    let mut object = vec![0; object_bytes()];
    load.copy_object(0, 0, &mut object).expect("loaded");
    for (block, status) in [(1, Failed), (2, Miss), (3, NoSpace), (4, Deadline)] {
        assert_eq!(load.copy_object(block, 0, &mut object), Err(CopyError::Unavailable { block, status }));
    }
    drop(load);
    agent.join();
}

#[test]
fn rejects_invalid_sizes_and_numbers() {
    let agent = FakeAgent::serve(|peer| {
        peer.serve_load(FIRST, 1);
        peer.expect_release();
    });
    let client = agent.connect();
    let load = client.load(&LoadRequest::new(vec![key(0)])).expect("loaded");
    let mut object = vec![0; object_bytes()];
    let out_of_range = |block, object| Err(CopyError::OutOfRange { block, object });
    assert_eq!(load.copy_object(1, 0, &mut object), out_of_range(1, 0));
    assert_eq!(load.copy_object(0, 4, &mut object), out_of_range(0, 4));
    assert_eq!(load.copy_object(0, u32::MAX, &mut object), out_of_range(0, u32::MAX));
    assert!(matches!(load.copy_object(0, 0, &mut object[1..]), Err(CopyError::WrongSize { .. })));
    assert!(matches!(load.copy_block(0, &mut object), Err(CopyError::WrongSize { .. })));
    assert!(matches!(load.copy_block_scattered(0, &mut [&mut object]), Err(CopyError::WrongSize { .. })));
    assert!(matches!(load.wait_layer(2, LONG), Err(ClientError::BadRequest(_))));
    drop(load);
    agent.join();
}

#[test]
fn an_answer_with_a_wrong_block_count_or_without_checksums_ends_the_session() {
    for wrong in [0, 1] {
        let agent = FakeAgent::serve(move |peer| {
            let (id, _) = peer.expect_load();
            let mut blocks = vec![peer.place_block(0)];
            match wrong {
                0 => blocks.clear(),
                _ => blocks[0].checksums = blocks[0].checksums.slice(4..),
            }
            peer.progress.begin(3, 5);
            peer.reply_loaded(id, FIRST, blocks);
            assert!(peer.receive().is_none(), "the client closes");
        });
        let error = agent.connect().load(&LoadRequest::new(vec![key(0)])).expect_err("a protocol violation");
        assert!(matches!(error, ClientError::Protocol(_)), "{error}");
        agent.join();
    }
}

#[test]
fn held_blocks_can_be_copied_after_the_agent_died() {
    let agent = FakeAgent::serve(|peer| {
        peer.serve_load(FIRST, 1);
        let _ = peer.expect_match();
    });
    let client = agent.connect();
    let load = client.load(&LoadRequest::new(vec![key(0)])).expect("loaded");
    client.match_keys(&[key(0)], Scope::Local).expect_err("the agent dies");
    agent.join();
    let mut block = vec![0; layout().block_bytes() as usize];
    load.copy_block(0, &mut block).expect("still mapped, still verified");
    assert_eq!(block, block_bytes(0));
}

#[test]
fn requests_the_next_window_before_the_first_is_released() {
    let agent = FakeAgent::serve(|peer| {
        let answer = |peer: &mut Peer, load: u64, blocks: usize| {
            let (id, keys) = peer.expect_load();
            assert_eq!(keys.len(), blocks);
            let grant = if load == 0 { Grant::First } else { Grant::Known };
            peer.reply_loaded_whole(id, Answer { load: load + 1, entry: load as u16, grant }, blocks);
        };
        answer(peer, 0, 2);
        answer(peer, 1, 2);
        assert_eq!(peer.expect_release(), 1, "the second load was requested before the first was released");
        answer(peer, 2, 1);
        assert_eq!(peer.expect_release(), 2);
        assert_eq!(peer.expect_release(), 3);
    });
    let mut seen = Vec::new();
    let request = LoadRequest::new((0..5).map(key).collect());
    let used = agent.connect().load_windowed(&request, 2, |first, load| {
        seen.push((first, load.leading_blocks()));
        ControlFlow::Continue(())
    });
    used.expect("all windows");
    assert_eq!(seen, [(0, 2), (2, 2), (4, 1)]);
    agent.join();
}

#[test]
fn breaking_in_a_window_releases_the_pending_one() {
    let agent = FakeAgent::serve(|peer| {
        peer.serve_load(FIRST, 1);
        let (id, _) = peer.expect_load();
        assert_eq!(peer.expect_release(), 5);
        peer.reply_loaded_whole(id, Answer { load: 6, entry: 4, grant: Grant::Known }, 1);
        assert_eq!(peer.expect_release(), 6, "no caller waits for it");
    });
    let client = agent.connect();
    let request = LoadRequest::new(vec![key(0), key(1)]);
    client.load_windowed(&request, 1, |_, _| ControlFlow::Break(())).expect("no error");
    agent.join();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_asynchronous_client_makes_the_same_calls() {
    let agent = FakeAgent::serve(|peer| {
        peer.serve_match();
        peer.serve_load(FIRST, 1);
        peer.expect_release();
    });
    let client = AsyncClient::connect(agent.options()).await.expect("a session");
    let matched = client.match_keys(vec![key(0)], Scope::Cluster).await.expect("answered");
    assert_eq!(matched, [Source::OwnDram]);
    let load = client.load(LoadRequest::new(vec![key(0)])).await.expect("loaded");
    client.wait_layer(&load, 1, LONG).await.expect("ready");
    let mut block = vec![0; layout().block_bytes() as usize];
    load.copy_block(0, &mut block).expect("verified");
    assert_eq!(block, block_bytes(0));
    drop(load);
    agent.join();
}
