//! The client against a control plane played by the test: what it sends, what it tells the agent, how it recovers.
//!
//! The fake member is a real gRPC server on loopback whose answers the test chooses; the real one is tested with the
//! same wire types in its own crate, and both together in `e2e`.

mod fake;
mod many;
mod places;
mod reports;

use std::sync::mpsc;

use reprise_agent_core::agent::limits::LOOKUPS_MAX;
use reprise_agent_core::effect::Change;
use reprise_policy::routing::LoadClass;
use reprise_proto::controlplane::NodeInfo;

use super::*;
use fake::{Fake, Mode};

/// Longest wait for anything that must happen.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

/// A client and what it has told.
struct Agent {
    client: DirectoryClient,
    events: mpsc::Receiver<DirectoryEvent>,
}

fn settings(endpoint: String) -> DirectorySettings {
    DirectorySettings {
        endpoints: vec![endpoint],
        registration: Registration {
            name: "node-a".to_owned(),
            peer_address: "127.0.0.1:7000".to_owned(),
            ..Registration::default()
        },
        connect_timeout: Duration::from_millis(500),
        call_timeout: Duration::from_millis(500),
        changes_queued_max: CHANGES_QUEUED_MAX,
        lookups_max: LOOKUPS_MAX,
        tenants: Arc::default(),
    }
}

impl Agent {
    fn start(settings: DirectorySettings) -> Agent {
        let (told, events) = mpsc::channel();
        let sink: DirectorySink = Arc::new(move |event| drop(told.send(event)));
        Agent { client: DirectoryClient::start(settings, sink).expect("started"), events }
    }

    fn next(&self) -> DirectoryEvent {
        self.events.recv_timeout(PATIENCE).expect("an event")
    }

    /// Waits for an event, passing over others.
    fn wait_for(&self, wanted: &DirectoryEvent) {
        let mut passed = Vec::new();
        while passed.last() != Some(wanted) {
            let event = self.events.recv_timeout(PATIENCE);
            passed.push(event.unwrap_or_else(|_| panic!("no {wanted:?} after {passed:?}")));
        }
    }

    /// Waits until the client says so of itself.
    fn wait_until(&self, wanted: impl Fn(&DirectoryStatus) -> bool) {
        let start = Instant::now();
        while !wanted(&self.client.status()) {
            assert!(start.elapsed() < PATIENCE, "never came: {:?}", self.client.status());
            std::thread::yield_now();
        }
    }

    /// Waits for the answer to a question where blocks go, whatever it is.
    fn wait_for_placed(&self) -> DirectoryEvent {
        loop {
            let event = self.next();
            if matches!(event, DirectoryEvent::Placed { .. } | DirectoryEvent::PlaceFailed { .. }) {
                return event;
            }
        }
    }

    /// Waits until everything is wanted and announces an inventory.
    fn settle(&self, inventory: &[(BlockKey, Tier)]) {
        self.wait_for(&everything_wanted());
        self.client.inventory(&SlotSet::ALL, inventory);
    }
}

fn everything_wanted() -> DirectoryEvent {
    DirectoryEvent::InventoryWanted { slots: Box::new(SlotSet::ALL) }
}

fn registered(epoch: u64) -> DirectoryEvent {
    DirectoryEvent::Registered { member: "a".to_owned(), node: NodeId(1), epoch: Epoch(epoch) }
}

fn key(number: u32) -> BlockKey {
    let mut key = [0; 16];
    key[..4].copy_from_slice(&number.to_be_bytes());
    BlockKey(key)
}

fn change(number: u32, change: Change) -> ReplicaChange {
    ReplicaChange { key: key(number), tier: Tier::Nvme, change }
}

fn added(numbers: std::ops::Range<u32>) -> Vec<ReplicaChange> {
    numbers.map(|number| change(number, Change::Added)).collect()
}

fn info(node: u32, epoch: u64, peer_address: &str) -> NodeInfo {
    NodeInfo {
        node,
        name: format!("node-{node}"),
        peer_address: peer_address.to_owned(),
        epoch,
        alive: true,
        ..NodeInfo::default()
    }
}

#[test]
fn an_endpoint_that_is_no_address_is_refused_with_words() {
    let refused = DirectoryClient::start(settings("not an address".to_owned()), Arc::new(|_| {})).err();
    let refused = refused.expect("refused").to_string();
    assert!(refused.contains("http://host:port"), "{refused}");
}

#[test]
fn without_a_control_plane_lookups_fail_at_once_and_announcements_vanish() {
    let agent = Agent::start(DirectorySettings { endpoints: Vec::new(), ..settings(String::new()) });
    agent.client.announce(&[change(1, Change::Added)]);
    agent.client.inventory(&SlotSet::ALL, &[(key(1), Tier::Dram)]);
    agent.client.lookup(LookupId(7), vec![key(1)], LOOKUP_TIMEOUT);
    assert_eq!(agent.next(), DirectoryEvent::LookupFailed { lookup: LookupId(7) });
    let status = agent.client.status();
    assert!(status.stand_alone && !status.connected);
    assert_eq!((status.changes_queued, status.lookups_failed), (0, 1));
    assert!(agent.client.nodes().is_empty());
    agent.client.shutdown();
}

#[test]
fn it_registers_wants_an_inventory_and_announces_in_order() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    assert_eq!(agent.next(), registered(1));
    assert_eq!(agent.next(), DirectoryEvent::Connected);
    assert_eq!(agent.next(), everything_wanted());
    agent.client.announce(&[change(99, Change::Added)]);
    agent.client.inventory(&SlotSet::ALL, &[(key(0), Tier::Dram), (key(1), Tier::Nvme)]);
    agent.client.announce(&[change(2, Change::Added), change(0, Change::Removed)]);
    agent.client.announce(&[change(3, Change::Added)]);
    let expected = [(key(0), 1), (key(1), 2), (key(2), 2), (key(0), 0x82), (key(3), 2)];
    fake.wait(|state| state.log == expected);
    assert_eq!(fake.read(|state| state.resets), 1);
    let status = agent.client.status();
    assert_eq!(status.registered, Some((NodeId(1), Epoch(1))));
    assert_eq!(status.changes_superseded, 1, "what came before the inventory is in it");
    fake.wait(|state| state.beats >= 3);
    agent.client.shutdown();
}

#[test]
fn a_lookup_brings_the_replicas_of_each_key_that_can_be_reached_without_asking_for_its_own() {
    let fake = Fake::start();
    fake.write(|state| {
        state.nodes = vec![info(2, 1, "127.0.0.1:7002"), info(300, 1, "127.0.0.1:7300"), info(4, 1, "")];
        state.replicas.insert(key(5), vec![(2, 1), (2, 2)]);
        state.replicas.insert(key(7), vec![(300, 2), (9, 1)]);
        state.replicas.insert(key(8), vec![(4, 1)]);
    });
    let agent = Agent::start(settings(fake.endpoint()));
    agent.settle(&[]);
    let give_up = Instant::now() + PATIENCE;
    while agent.client.peer_address(NodeId(300)).is_none() {
        assert!(Instant::now() < give_up, "the node list comes");
        std::thread::yield_now();
    }
    agent.client.lookup(LookupId(1), (0..10_000).map(key).collect(), LOOKUP_TIMEOUT);
    let DirectoryEvent::Found { lookup: LookupId(1), found } = agent.next() else { panic!("an answer") };
    assert_eq!(found.len(), 10_000, "more than one call takes");
    let replica = |node, tier| Replica { node: NodeId(node), tier, load: LoadClass::default() };
    assert_eq!(found[5], [replica(2, Tier::Dram), replica(2, Tier::Nvme)]);
    assert_eq!(found[7], [replica(300, Tier::Nvme)], "nobody has named node 9");
    assert!(found[8].is_empty(), "node 4 serves nobody");
    assert_eq!(found.iter().filter(|replicas| !replicas.is_empty()).count(), 2);
    assert_eq!(fake.read(|state| (state.lookups, state.asking)), (2, 1));
    agent.client.shutdown();
}

#[test]
fn a_lookup_without_an_answer_fails_when_its_time_is_over_while_beats_go_on() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    agent.settle(&[]);
    fake.write(|state| state.lookup_mode = Mode::Stall);
    let asked = Instant::now();
    let beats = fake.read(|state| state.beats);
    agent.client.lookup(LookupId(1), vec![key(1)], Duration::from_millis(300));
    assert_eq!(agent.next(), DirectoryEvent::LookupFailed { lookup: LookupId(1) });
    assert!(asked.elapsed() >= Duration::from_millis(300) && asked.elapsed() < Duration::from_secs(3));
    fake.wait(|state| state.beats > beats + 2);
    assert!(agent.client.status().connected);
    fake.write(|state| state.lookup_mode = Mode::Garbage);
    agent.client.lookup(LookupId(2), vec![key(1)], LOOKUP_TIMEOUT);
    assert_eq!(agent.next(), DirectoryEvent::LookupFailed { lookup: LookupId(2) });
    agent.client.shutdown();
}

#[test]
fn more_lookups_than_the_bound_fail_at_once_and_each_ends_once() {
    let fake = Fake::start();
    fake.write(|state| state.lookup_mode = Mode::Stall);
    let agent = Agent::start(DirectorySettings { lookups_max: 4, ..settings(fake.endpoint()) });
    agent.settle(&[]);
    for id in 0..10 {
        agent.client.lookup(LookupId(id), vec![key(1)], Duration::from_millis(500));
    }
    let mut failed: Vec<u64> = (0..10)
        .map(|_| match agent.next() {
            DirectoryEvent::LookupFailed { lookup } => lookup.0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(failed[..6].iter().all(|id| *id >= 4), "those beyond the bound fail first: {failed:?}");
    failed.sort_unstable();
    assert_eq!(failed, (0..10).collect::<Vec<_>>());
    agent.client.shutdown();
}

#[test]
fn an_absent_control_plane_is_found_when_it_comes_and_announced_to_again_when_it_forgot() {
    let port = Fake::start().stop();
    let agent = Agent::start(settings(format!("http://127.0.0.1:{port}")));
    agent.client.lookup(LookupId(1), vec![key(1)], LOOKUP_TIMEOUT);
    assert_eq!(
        agent.next(),
        DirectoryEvent::LookupFailed { lookup: LookupId(1) },
        "nobody is there: at once"
    );

    let fake = Fake::start_at(port);
    agent.wait_for(&registered(1));
    agent.settle(&[(key(0), Tier::Dram)]);
    fake.wait(|state| state.log.len() == 1);

    fake.stop();
    agent.wait_for(&DirectoryEvent::Disconnected);
    agent.client.lookup(LookupId(2), vec![key(1)], LOOKUP_TIMEOUT);
    agent.wait_for(&DirectoryEvent::LookupFailed { lookup: LookupId(2) });
    agent.client.announce(&[change(1, Change::Added)]);

    let again = Fake::start_at(port);
    again.write(|state| state.epoch = 5);
    agent.wait_for(&registered(6));
    agent.settle(&[(key(0), Tier::Dram), (key(1), Tier::Nvme)]);
    again.wait(|state| state.log == [(key(0), 1), (key(1), 2)]);
    assert!(agent.client.status().beats_failed > 0);
    agent.client.shutdown();
}

#[test]
fn a_control_plane_that_comes_back_knowing_the_node_gets_what_was_queued_and_no_inventory() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    agent.settle(&[(key(0), Tier::Dram)]);
    fake.wait(|state| state.log.len() == 1);
    // An answer that is lost with the fake leaves its changes queued.
    agent.wait_until(|status| status.changes_announced == 1);
    let state = fake.read(Clone::clone);
    let port = fake.stop();
    agent.wait_for(&DirectoryEvent::Disconnected);
    agent.client.announce(&[change(1, Change::Added)]);
    agent.client.announce(&[change(2, Change::Added)]);
    assert_eq!(agent.client.status().changes_queued, 2);
    let again = Fake::start_with(port, state);
    agent.wait_for(&DirectoryEvent::Connected);
    again.wait(|state| state.log == [(key(0), 1), (key(1), 2), (key(2), 2)]);
    assert_eq!(again.read(|state| (state.registrations, state.resets)), (1, 1));
    agent.client.shutdown();
}

#[test]
fn a_batch_whose_answer_was_lost_is_sent_again_and_applied_once() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    agent.settle(&[]);
    fake.wait(|state| state.resets == 1);
    fake.write(|state| state.update_mode = Mode::Stall);
    agent.client.announce(&[change(1, Change::Added)]);
    fake.wait(|state| state.log.len() == 1 && state.updates >= 3);
    fake.write(|state| state.update_mode = Mode::Answer);
    agent.client.announce(&[change(2, Change::Added)]);
    fake.wait(|state| state.log == [(key(1), 2), (key(2), 2)]);
    assert_eq!(fake.read(|state| state.resets), 1, "no inventory was needed");
    agent.client.shutdown();
}

#[test]
fn a_gap_a_fence_and_a_refusal_each_end_in_a_whole_inventory() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    agent.settle(&[(key(0), Tier::Dram)]);
    fake.wait(|state| state.log.len() == 1);

    fake.write(|state| state.expected += 100);
    agent.client.announce(&[change(1, Change::Added)]);
    agent.settle(&[(key(7), Tier::Dram)]);
    fake.wait(|state| state.log == [(key(7), 1)] && state.resets == 2);

    fake.write(|state| state.update_mode = Mode::Refuse);
    agent.client.announce(&[change(1, Change::Added)]);
    agent.wait_for(&everything_wanted());
    fake.write(|state| state.update_mode = Mode::Answer);
    agent.client.inventory(&SlotSet::ALL, &[(key(8), Tier::Dram)]);
    fake.wait(|state| state.log == [(key(8), 1)] && state.resets == 3);

    // The beats do not tell: only the update is fenced, as when another agent has just taken the name.
    fake.write(|state| state.fence_updates_of = Some(1));
    agent.client.announce(&[change(1, Change::Added)]);
    agent.wait_for(&DirectoryEvent::Disconnected);
    agent.wait_for(&registered(2));
    agent.settle(&[(key(9), Tier::Dram)]);
    fake.wait(|state| state.log == [(key(9), 1)]);
    agent.client.shutdown();
}

#[test]
fn a_queue_that_overflows_is_dropped_and_replaced_by_an_inventory() {
    let fake = Fake::start();
    let agent = Agent::start(DirectorySettings { changes_queued_max: 10, ..settings(fake.endpoint()) });
    agent.settle(&[]);
    fake.wait(|state| state.resets == 1);
    fake.write(|state| state.update_mode = Mode::Stall);
    agent.client.announce(&added(0..5));
    fake.wait(|state| state.updates >= 2);
    agent.client.announce(&added(5..20));
    agent.wait_for(&everything_wanted());
    assert_eq!(agent.client.status().changes_superseded, 20);
    fake.write(|state| state.update_mode = Mode::Answer);
    let all: Vec<_> = (0..20).map(|number| (key(number), Tier::Nvme)).collect();
    agent.client.inventory(&SlotSet::ALL, &all);
    fake.wait(|state| state.log.len() == 20 && state.resets == 2);
    agent.client.shutdown();
}

#[test]
fn beats_go_on_while_the_sink_blocks_and_updates_stall() {
    let fake = Fake::start();
    let (release, blocked) = mpsc::channel::<()>();
    let blocked = Mutex::new(blocked);
    let sink: DirectorySink = Arc::new(move |event| {
        if event == everything_wanted() {
            let blocked = blocked.lock().expect("not poisoned");
            let _ = blocked.recv_timeout(PATIENCE);
        }
    });
    let client = DirectoryClient::start(settings(fake.endpoint()), sink).expect("started");
    fake.wait(|state| state.beats >= 10);
    client.announce(&[change(1, Change::Added)]);
    client.lookup(LookupId(1), vec![key(1)], LOOKUP_TIMEOUT);
    release.send(()).expect("the sink waits");
    fake.wait(|state| state.lookups == 1);
    client.shutdown();
}

#[test]
fn peers_are_known_by_the_list_and_by_every_change() {
    let fake = Fake::start();
    fake.write(|state| state.nodes = vec![info(1, 1, "a:1"), info(2, 4, "b:1")]);
    let agent = Agent::start(settings(fake.endpoint()));
    agent.settle(&[]);
    let wait = |node, address: Option<&str>| {
        let start = Instant::now();
        while agent.client.peer_address(NodeId(node)).as_deref() != address {
            assert!(start.elapsed() < PATIENCE, "{node} is at {:?}", agent.client.peer_address(NodeId(node)));
            std::thread::yield_now();
        }
    };
    wait(2, Some("b:1"));
    assert_eq!(agent.client.peer_address(NodeId(3)), None);
    fake.change_node(info(3, 1, "c:1"));
    wait(3, Some("c:1"));
    fake.change_node(info(2, 5, "b:2"));
    wait(2, Some("b:2"));
    assert_eq!(agent.client.nodes().len(), 3);

    let port = fake.stop();
    agent.wait_for(&DirectoryEvent::Disconnected);
    assert_eq!(agent.client.peer_address(NodeId(3)).as_deref(), Some("c:1"), "the last known list stays");
    let again = Fake::start_at(port);
    again.write(|state| state.nodes = vec![info(2, 1, "d:1")]);
    wait(3, None);
    wait(2, Some("d:1"));
    agent.client.shutdown();
}

#[test]
fn shutdown_is_quick_whatever_the_control_plane_does_and_can_be_repeated() {
    let fake = Fake::start();
    fake.write(|state| (state.lookup_mode, state.update_mode) = (Mode::Stall, Mode::Stall));
    let agent = Agent::start(settings(fake.endpoint()));
    agent.settle(&[(key(1), Tier::Dram)]);
    agent.client.lookup(LookupId(1), vec![key(1)], LOOKUP_TIMEOUT);
    fake.wait(|state| state.updates > 0 && state.lookups > 0);
    let start = Instant::now();
    agent.client.shutdown();
    agent.client.shutdown();
    assert!(start.elapsed() < SHUTDOWN_WAIT, "{:?}", start.elapsed());
    assert!(agent.events.try_recv().is_err(), "the threads have ended: no event comes any more");
}
