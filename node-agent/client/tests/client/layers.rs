//! Transfers that overlap with a computation that proceeds layer by layer.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use reprise_client::{
    BlockStatus, ChainPlace, ClientError, FinishedTransfer, LoadOptions, SaveOptions, SaveStatus, TransferId,
    TransferOptions, Transfers,
};
use reprise_proto::local::{self, CommitStatus, request};

use crate::fake_agent::{Answer, FakeAgent, Grant, LONG, Peer, SHORT, block_bytes, layout, missed};
use crate::memory::{Memory, placed};
use crate::transfers::{load_statuses, save_statuses, start_transfers};

const FIRST: Answer = Answer { load: 1, entry: 0, grant: Grant::First };

fn patient() -> TransferOptions {
    TransferOptions {
        save: SaveOptions {
            room_wait: LONG,
            stall_timeout: LONG,
            layer_wait: LONG,
            ..SaveOptions::default()
        },
        load: LoadOptions { deadline: LONG, stall_timeout: LONG, ..LoadOptions::default() },
        queued_max: 8,
    }
}

/// Waits for the end of one transfer, which must be the only one that has ended.
fn end_of(transfers: &Transfers, id: TransferId) -> FinishedTransfer {
    assert!(transfers.wait(&[id], LONG));
    let mut finished = transfers.finished();
    assert_eq!(finished.iter().map(|ended| ended.id).collect::<Vec<_>>(), [id]);
    finished.remove(0)
}

fn layer_of(bytes: &[u8], layer: usize) -> &[u8] {
    let layer_bytes = layout().layer_bytes() as usize;
    &bytes[layer * layer_bytes..][..layer_bytes]
}

/// Writes one layer of a block, like an engine that computes it.
fn fill_layer(memory: &Memory, number: u8, layer: usize) {
    let at = layer * layout().layer_bytes() as usize;
    let bytes = block_bytes(number);
    let layer = layer_of(&bytes, layer);
    memory.block(number.into())[at..][..layer.len()].copy_from_slice(layer);
}

/// Waits until the first slot of the arena holds a layer of block 0.
fn wait_until_copied(peer: &Peer, layer: usize) {
    let slot = peer.arena.span(0, 0, layout().block_bytes()).expect("the first slot");
    let mut found = vec![0; layout().block_bytes() as usize];
    while layer_of(&found, layer) != layer_of(&block_bytes(0), layer) {
        std::thread::yield_now();
        slot.copy_out(&mut found);
    }
}

#[test]
fn a_layer_is_ready_when_all_blocks_have_it_and_before_the_next_layer() {
    let (proceed, proceed_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        peer.layers_ready(0, 1, 1);
        let blocks = vec![peer.place_block(0), peer.place_block(1)];
        peer.reply_loaded(id, FIRST, blocks);
        proceed_signal.recv().expect("the test sends the signal");
        peer.progress.set_layers(0, 2);
        peer.progress.done(0);
        assert_eq!(peer.expect_release(), 1);
    });
    let memory = Arc::new(Memory::new(2));
    let (transfers, _keeper) = start_transfers(&agent, &memory, patient());
    let load = transfers.submit_load_by_layers(placed([(0, 0), (1, 1)])).expect("a valid call");
    assert!(transfers.wait_layer(&[load], 0, LONG));
    for number in 0..2 {
        let wanted = block_bytes(number);
        assert_eq!(layer_of(&memory.block(number.into()), 0), layer_of(&wanted, 0));
    }
    assert!(!transfers.wait_layer(&[load], 1, Duration::ZERO));
    transfers.note_filled(load, 2);
    assert!(!transfers.wait_layer(&[load], 1, Duration::ZERO), "only saves have filled layers");
    assert!(!transfers.wait(&[load], Duration::ZERO));
    proceed.send(()).expect("the agent lives");
    assert!(transfers.wait_layer(&[load], 1, LONG));
    assert_eq!(load_statuses(&end_of(&transfers, load).outcome), [BlockStatus::Ok; 2]);
    assert!(transfers.wait_layer(&[load], 7, Duration::ZERO), "an ended transfer does not wait for layers");
    agent.end(transfers);
}

#[test]
fn a_layer_is_not_ready_while_blocks_must_be_requested_again() {
    let (released, first_part_copied) = mpsc::channel::<()>();
    let (proceed, proceed_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        peer.all_layers_ready(0, 1);
        let blocks = vec![peer.place_block(0), missed(local::BlockStatus::BlockNoSpace)];
        peer.reply_loaded(id, FIRST, blocks);
        assert_eq!(peer.expect_release(), 1);
        let (id, keys) = peer.expect_load();
        assert_eq!(keys.len(), 1);
        released.send(()).expect("the test waits");
        proceed_signal.recv().expect("the test sends the signal");
        peer.all_layers_ready(0, 2);
        let block = peer.place_block(1);
        peer.reply_loaded(id, Answer { load: 2, entry: 0, grant: Grant::Known }, vec![block]);
        assert_eq!(peer.expect_release(), 2);
    });
    let memory = Arc::new(Memory::new(2));
    let (transfers, _keeper) = start_transfers(&agent, &memory, patient());
    let load = transfers.submit_load_by_layers(placed([(0, 0), (1, 1)])).expect("a valid call");
    first_part_copied.recv().expect("the agent sends the signal");
    assert!(!transfers.wait_layer(&[load], 0, Duration::ZERO));
    proceed.send(()).expect("the agent lives");
    assert!(transfers.wait_layer(&[load], 1, LONG));
    assert_eq!(load_statuses(&end_of(&transfers, load).outcome), [BlockStatus::Ok; 2]);
    agent.end(transfers);
}

#[test]
fn waits_for_a_layer_end_when_the_agent_dies_or_hangs() {
    for agent_dies in [true, false] {
        let agent = FakeAgent::serve(move |peer| {
            let (id, _) = peer.expect_load();
            peer.layers_ready(0, 1, 1);
            let block = peer.place_block(0);
            peer.reply_loaded(id, FIRST, vec![block]);
            while !agent_dies && peer.receive().is_some() {}
        });
        let memory = Arc::new(Memory::new(1));
        let stall_timeout = if agent_dies { LONG } else { SHORT };
        let load = LoadOptions { stall_timeout, ..patient().load };
        let (transfers, keeper) = start_transfers(&agent, &memory, TransferOptions { load, ..patient() });
        let load = transfers.submit_load_by_layers(placed([(0, 0)])).expect("a valid call");
        assert!(transfers.wait_layer(&[load], 1, LONG / 2));
        assert_eq!(load_statuses(&end_of(&transfers, load).outcome), [BlockStatus::Failed]);
        assert!(agent_dies || keeper.status().is_suspected);
        agent.end((transfers, keeper));
    }
}

#[test]
fn a_load_whose_deadline_passed_in_the_queue_is_not_started() {
    let agent = FakeAgent::serve(|peer| {
        assert!(peer.receive().is_none(), "no request is sent");
    });
    let memory = Arc::new(Memory::new(1));
    let load = LoadOptions { deadline: Duration::from_nanos(1), ..patient().load };
    let (transfers, keeper) = start_transfers(&agent, &memory, TransferOptions { load, ..patient() });
    let load = transfers.submit_load_by_layers(placed([(0, 0)])).expect("a valid call");
    assert!(transfers.wait_layer(&[load], 0, LONG));
    let ended = end_of(&transfers, load);
    assert!(matches!(ended.outcome.stopped_by(), Some(ClientError::Busy(_))), "{ended:?}");
    assert!(!keeper.status().is_suspected);
    agent.end((transfers, keeper));
}

#[test]
fn copies_each_layer_of_a_save_when_it_is_filled_and_commits_after_the_last() {
    let (copied, layer_copied) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, count) = peer.expect_reserve();
        assert_eq!(count, 1);
        peer.reply_reserved(id, 1, Grant::First);
        wait_until_copied(peer, 0);
        copied.send(()).expect("the test waits");
        let (id, _) = peer.expect_commit();
        wait_until_copied(peer, 1);
        peer.reply_committed(id, 1, &[CommitStatus::Committed]);
    });
    let memory = Arc::new(Memory::new(1));
    let (transfers, _keeper) = start_transfers(&agent, &memory, patient());
    let save =
        transfers.submit_save_by_layers(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
    fill_layer(&memory, 0, 0);
    transfers.note_filled(save, 1);
    layer_copied.recv().expect("the agent sends the signal");
    assert!(!transfers.wait(&[save], Duration::ZERO));
    fill_layer(&memory, 0, 1);
    transfers.note_filled(save, 2);
    assert_eq!(save_statuses(&end_of(&transfers, save).outcome), [SaveStatus::Committed]);
    transfers.note_filled(save, 2);
    agent.end(transfers);
}

#[test]
fn a_save_without_its_layers_ends_unsaved_releases_its_slot_and_unblocks_the_next_save() {
    let agent = FakeAgent::serve(|peer| {
        peer.give_slots(1, Grant::First);
        let (_, released) = peer.expect("the release of the slot");
        assert!(matches!(released, request::Body::Abort(_)), "{released:?}");
        peer.give_slots(1, Grant::Known);
        peer.accept_commit(1);
    });
    let memory = Arc::new(Memory::filled(1));
    let save = SaveOptions { layer_wait: SHORT, ..patient().save };
    let (transfers, keeper) = start_transfers(&agent, &memory, TransferOptions { save, ..patient() });
    let never =
        transfers.submit_save_by_layers(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
    transfers.note_filled(never, 1);
    let whole = transfers.submit_save(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
    assert!(transfers.wait(&[never, whole], LONG));
    let finished = transfers.finished();
    assert_eq!(save_statuses(&finished[0].outcome), [SaveStatus::Unsaved]);
    let words = finished[0].outcome.stopped_by().expect("an error").to_string();
    assert!(words.contains("layer 1 of a save was not filled"), "{words}");
    assert_eq!(save_statuses(&finished[1].outcome), [SaveStatus::Committed]);
    assert!(!keeper.status().is_suspected, "the agent has answered");
    agent.end((transfers, keeper));
}

#[test]
fn cancelling_does_not_wait_for_a_save_that_waits_for_a_layer() {
    let (reserved, started) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        peer.give_slots(1, Grant::First);
        reserved.send(()).expect("the test waits");
        while peer.receive().is_some() {}
    });
    let memory = Arc::new(Memory::filled(1));
    let save = SaveOptions { layer_wait: LONG * 60, ..patient().save };
    let (transfers, keeper) = start_transfers(&agent, &memory, TransferOptions { save, ..patient() });
    let save =
        transfers.submit_save_by_layers(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
    started.recv().expect("the agent sends the signal");
    transfers.cancel();
    let ended = end_of(&transfers, save);
    assert_eq!(save_statuses(&ended.outcome), [SaveStatus::Unsaved]);
    drop(transfers);
    assert_eq!(Arc::strong_count(&memory), 1, "no thread uses the memory");
    drop(keeper);
    agent.join();
}

#[test]
fn only_the_save_fails_when_the_agent_dies_or_hangs_between_layers() {
    for agent_dies in [true, false] {
        let (reserved, started) = mpsc::channel::<()>();
        let agent = FakeAgent::serve(move |peer| {
            peer.give_slots(1, Grant::First);
            reserved.send(()).expect("the test waits");
            while !agent_dies && peer.receive().is_some() {}
        });
        let memory = Arc::new(Memory::filled(1));
        let stall_timeout = if agent_dies { LONG } else { SHORT };
        let save = SaveOptions { stall_timeout, ..patient().save };
        let (transfers, keeper) = start_transfers(&agent, &memory, TransferOptions { save, ..patient() });
        let save =
            transfers.submit_save_by_layers(placed([(0, 0)]), ChainPlace::default()).expect("a valid call");
        started.recv().expect("the agent sends the signal");
        transfers.note_filled(save, 1);
        transfers.note_filled(save, 2);
        assert_eq!(save_statuses(&end_of(&transfers, save).outcome), [SaveStatus::Unsaved]);
        agent.end((transfers, keeper));
    }
}
