//! Saves from and loads to paged memory.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use reprise_client::{
    BlockStatus, Client, ClientError, LoadOptions, SaveOptions, SaveStatus, Source, Ticket, Verify,
};
use reprise_proto::local::{self, CommitStatus, response};

use crate::fake_agent::{Answer, FakeAgent, Grant, LONG, SHORT, block_bytes, key, layout, missed, place};
use crate::memory::{Memory, placed};

const FIRST: Answer = Answer { load: 5, entry: 3, grant: Grant::First };

fn patient_load() -> LoadOptions {
    LoadOptions { stall_timeout: LONG, ..LoadOptions::default() }
}

fn patient_save() -> SaveOptions {
    SaveOptions { room_wait: LONG, stall_timeout: LONG, ..SaveOptions::default() }
}

fn hasty_save() -> SaveOptions {
    SaveOptions { stall_timeout: SHORT, ..patient_save() }
}

fn hasty_load() -> LoadOptions {
    LoadOptions { stall_timeout: SHORT, ..patient_load() }
}

#[test]
fn saves_blocks_in_several_calls_when_slots_are_scarce() {
    let agent = FakeAgent::serve(|peer| {
        for (asked, given, ticket) in [(3, 2, 7), (1, 1, 8)] {
            let (id, count) = peer.expect_reserve();
            assert_eq!(count, asked);
            peer.reply_reserved(id, given, if ticket == 7 { Grant::First } else { Grant::Known });
            let (id, commit) = peer.expect_commit();
            let numbers: Vec<u8> = commit.items.iter().map(|item| item.key[0]).collect();
            assert_eq!(numbers, if ticket == 7 { vec![2, 0] } else { vec![1] });
            let mut found = vec![0; layout().block_bytes() as usize];
            peer.arena.span(0, 0, layout().block_bytes()).expect("the first slot").copy_out(&mut found);
            assert_eq!(found, block_bytes(numbers[0]), "the bytes of the block that the memory holds there");
            let statuses = [CommitStatus::Committed, CommitStatus::Duplicate];
            peer.reply_committed(id, ticket, &statuses[..given as usize]);
        }
    });
    let memory = Memory::filled(3);
    let blocks = placed([(2, 2), (0, 0), (1, 1)]);
    let saved = agent.connect().save_blocks(&blocks, &memory, &patient_save()).expect("a valid call");
    assert!(saved.stopped_by.is_none(), "{saved:?}");
    use SaveStatus::{Committed, Duplicate};
    assert_eq!(saved.statuses, [Committed, Duplicate, Committed]);
    assert_eq!((saved.count(Committed), saved.tickets), (2, vec![Ticket(7), Ticket(8)]));
    agent.join();
}

#[test]
fn blocks_without_room_are_unsaved_without_an_error() {
    let agent = FakeAgent::serve(|peer| {
        while let Some((id, _)) = peer.receive() {
            peer.reply_reserved(id, 0, Grant::Known);
        }
    });
    let options = SaveOptions { room_wait: Duration::from_millis(5), ..patient_save() };
    let client = agent.connect();
    let saved = client.save_blocks(&placed([(0, 0)]), &Memory::filled(1), &options).expect("a valid call");
    assert_eq!(saved.statuses, [SaveStatus::Unsaved]);
    assert!(saved.stopped_by.is_none(), "{saved:?}");
    agent.end(client);
}

#[test]
fn a_save_to_a_hanging_agent_ends_and_keeps_committed_blocks() {
    let agent = FakeAgent::serve(|peer| {
        peer.give_slots(1, Grant::First);
        peer.accept_commit(7);
        while peer.receive().is_some() {}
    });
    let client = agent.connect();
    let blocks = placed([(0, 0), (1, 1)]);
    let saved = client.save_blocks(&blocks, &Memory::filled(2), &hasty_save()).expect("a valid call");
    assert_eq!(saved.statuses, [SaveStatus::Committed, SaveStatus::Unsaved]);
    assert!(matches!(saved.stopped_by, Some(ClientError::Timeout { call: "reserve", .. })), "{saved:?}");
    agent.end(client);
}

#[test]
fn rejects_a_call_that_does_not_fit_memory_or_session_without_a_request() {
    let agent = FakeAgent::serve(|peer| {
        assert!(peer.receive().is_none(), "no request is sent");
    });
    let client = agent.connect();
    let memory = Memory::new(2);
    let outside = placed([(0, 1), (1, 2)]);
    let saved = client.save_blocks(&outside, &memory, &patient_save()).expect_err("an invalid block");
    assert!(saved.to_string().contains("invalid block 2: the memory has 2 blocks"), "{saved}");
    let loaded = client.load_blocks(&outside, &memory, &patient_load()).expect_err("an invalid block");
    assert!(matches!(loaded, ClientError::BadRequest(_)), "{loaded}");
    let nothing = client.load_blocks(&[], &memory, &patient_load()).expect("nothing to do");
    assert!(nothing.statuses.is_empty());
    agent.end(client);
}

#[test]
fn loads_blocks_to_their_places_as_layers_become_ready() {
    let (copied, first_layer_copied) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, keys) = peer.expect_load();
        assert_eq!(keys, [key(1), key(0)]);
        peer.layers_ready(3, 5, 1);
        let blocks = vec![peer.place_block(1), peer.place_block(0)];
        peer.reply_loaded(id, FIRST, blocks);
        first_layer_copied.recv().expect("the test sends the signal");
        peer.progress.set_layers(3, 2);
        peer.progress.done(3);
        assert_eq!(peer.expect_release(), 5);
    });
    let client = agent.connect();
    let memory = Memory::new(4);
    let blocks = placed([(1, 3), (0, 2)]);
    let loaded = std::thread::scope(|scope| {
        let loading = scope.spawn(|| client.load_blocks(&blocks, &memory, &patient_load()));
        let layer = layout().layer_bytes() as usize;
        while memory.block(2)[..layer] != block_bytes(0)[..layer] {
            std::thread::yield_now();
        }
        copied.send(()).expect("the agent lives");
        loading.join().expect("no panic").expect("a valid call")
    });
    assert!(loaded.stopped_by.is_none(), "{loaded:?}");
    assert_eq!((loaded.leading(), &loaded.sources), (2, &vec![Some(Source::OwnDram); 2]));
    assert_eq!((&*memory.block(3), &*memory.block(2)), (&block_bytes(1), &block_bytes(0)));
    assert!(memory.block(0).iter().all(|byte| *byte == 0), "nothing else is touched");
    agent.join();
}

#[test]
fn a_missing_or_damaged_block_fails_alone() {
    let agent = FakeAgent::serve(|peer| {
        let (id, _) = peer.expect_load();
        peer.all_layers_ready(3, 5);
        let missed = missed(local::BlockStatus::BlockMiss);
        let blocks = vec![peer.place_block(0), peer.place_block(1), missed, peer.place_block(3)];
        let at = layout().slot_bytes() + layout().object_bytes() * 3;
        peer.arena.span(0, at, 1).expect("the last object").copy_in(&[!0]).expect("writable");
        peer.reply_loaded(id, FIRST, blocks);
        assert_eq!(peer.expect_suspect(), (5, vec![1]));
        assert_eq!(peer.expect_release(), 5);
    });
    let memory = Memory::new(4);
    let blocks = placed((0..4).map(|number| (number, usize::from(number))));
    let loaded = agent.connect().load_blocks(&blocks, &memory, &patient_load()).expect("a valid call");
    use BlockStatus::{Failed, Miss, Ok};
    assert_eq!((&loaded.statuses, loaded.leading()), (&vec![Ok, Failed, Miss, Ok], 1));
    assert_eq!(*memory.block(3), block_bytes(3));
    agent.join();
}

#[test]
fn a_block_that_fails_after_its_unverified_copy_has_failed() {
    let agent = FakeAgent::serve(|peer| {
        let (id, _) = peer.expect_load();
        peer.layers_ready(3, 5, 2);
        peer.progress.fail_block(3, 0);
        peer.progress.done(3);
        let block = peer.place_block(0);
        peer.reply_loaded(id, FIRST, vec![block]);
        peer.expect_release();
    });
    let options = LoadOptions { verify: Verify::Off, ..patient_load() };
    let memory = Memory::new(1);
    let loaded = agent.connect().load_blocks(&placed([(0, 0)]), &memory, &options).expect("a valid call");
    assert_eq!(loaded.statuses, [BlockStatus::Failed]);
    agent.join();
}

#[test]
fn requests_blocks_without_room_again_when_others_were_loaded() {
    let agent = FakeAgent::serve(move |peer| {
        let mut answer = |load: u64, numbers: &[u8], placed: usize| {
            let (id, keys) = peer.expect_load();
            assert_eq!(keys, numbers.iter().map(|number| key(*number)).collect::<Vec<_>>());
            peer.all_layers_ready(3, load);
            let mut blocks: Vec<_> =
                numbers[..placed].iter().map(|number| peer.place_block(*number)).collect();
            blocks.resize_with(numbers.len(), || missed(local::BlockStatus::BlockNoSpace));
            let grant = if load == 1 { Grant::First } else { Grant::Known };
            peer.reply_loaded(id, Answer { load, entry: 3, grant }, blocks);
            assert_eq!(peer.expect_release(), load, "the previous load is released first");
        };
        answer(1, &[0, 1, 2], 1);
        answer(2, &[1, 2], 1);
        answer(3, &[2], 0);
    });
    let memory = Memory::new(3);
    let blocks = placed((0..3).map(|number| (number, usize::from(number))));
    let loaded = agent.connect().load_blocks(&blocks, &memory, &patient_load()).expect("a valid call");
    assert_eq!(loaded.statuses, [BlockStatus::Ok, BlockStatus::Ok, BlockStatus::NoSpace]);
    assert_eq!(*memory.block(1), block_bytes(1));
    agent.join();
}

#[test]
fn a_load_from_a_hanging_agent_ends_before_and_after_its_answer() {
    for answered in [0, 1] {
        let agent = FakeAgent::serve(move |peer| {
            let (id, _) = peer.expect_load();
            if answered == 1 {
                peer.layers_ready(3, 5, 1);
                let block = peer.place_block(0);
                peer.reply_loaded(id, FIRST, vec![block]);
            }
            while peer.receive().is_some() {}
        });
        let client = agent.connect();
        let started = Instant::now();
        let memory = Memory::new(1);
        let loaded = client.load_blocks(&placed([(0, 0)]), &memory, &hasty_load()).expect("a valid call");
        assert!(started.elapsed() < LONG / 2);
        assert_eq!(loaded.statuses, [BlockStatus::Failed]);
        assert!(matches!(loaded.stopped_by, Some(ClientError::Timeout { .. })), "{loaded:?}");
        agent.end(client);
    }
}

#[test]
fn waits_for_a_slow_load_while_the_agent_answers_probes() {
    let agent = FakeAgent::serve(|peer| {
        let (id, _) = peer.expect_load();
        for _ in 0..3 {
            let probe = peer.expect_stats();
            peer.reply_stats(probe);
        }
        peer.reply_loaded_whole(id, FIRST, 1);
        peer.receive();
    });
    let client = agent.connect();
    let memory = Memory::new(1);
    let loaded = client.load_blocks(&placed([(0, 0)]), &memory, &hasty_load()).expect("a valid call");
    assert_eq!(loaded.statuses, [BlockStatus::Ok], "{loaded:?}");
    agent.end(client);
}

#[test]
fn the_death_of_the_agent_ends_saves_and_loads_at_once() {
    for direction in ["save", "load"] {
        let agent = FakeAgent::serve(|peer| {
            peer.expect("a call");
        });
        let client = agent.connect();
        let memory = Memory::filled(1);
        let stopped_by = match direction {
            "save" => {
                client.save_blocks(&placed([(0, 0)]), &memory, &patient_save()).expect("right").stopped_by
            }
            _ => client.load_blocks(&placed([(0, 0)]), &memory, &patient_load()).expect("right").stopped_by,
        };
        assert!(matches!(stopped_by, Some(ClientError::AgentLost { .. })), "{stopped_by:?}");
        agent.join();
    }
}

#[test]
fn a_prefetch_waits_for_its_blocks_and_releases_them() {
    let agent = FakeAgent::serve(|peer| {
        peer.serve_load(FIRST, 2);
        assert_eq!(peer.expect_release(), 5);
    });
    let client: Client = agent.connect();
    assert_eq!(client.prefetch(&[key(0), key(1)], &patient_load()).expect("loaded"), 2);
    agent.join();
}

#[test]
fn a_save_interrupted_by_a_wrong_answer_releases_its_slots() {
    let agent = FakeAgent::serve(|peer| {
        let (id, _) = peer.expect_reserve();
        let lease = local::Lease { lease: 1, place: Some(place(1 << 40)) };
        let reserved = local::Reserved {
            regions: vec![peer.grant(true)],
            leases: vec![lease],
            ..local::Reserved::default()
        };
        peer.reply_with(id, response::Body::Reserved(reserved), &[peer.arena.regions()[0].writable_fd()]);
        assert!(peer.receive().is_none(), "the client closes");
    });
    let client = agent.connect();
    let saved =
        client.save_blocks(&placed([(0, 0)]), &Memory::filled(1), &patient_save()).expect("a valid call");
    assert!(matches!(saved.stopped_by, Some(ClientError::Protocol(_))), "{saved:?}");
    agent.join();
}
