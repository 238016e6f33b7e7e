//! The client against a fake control plane: requests, events for the agent, recovery.
//!
//! The fake member is a gRPC server on loopback with configurable replies. The real one is tested with the
//! same wire types in its own crate, and both together in `e2e`.

mod fake;
mod placement;
mod reports;
mod several_members;

use std::sync::mpsc;

use reprise_agent_core::effect::Change;
use reprise_agent_core::limits::LOOKUPS_MAX;
use reprise_identity::Security;
use reprise_policy::routing::LoadClass;
use reprise_proto::controlplane::{NodeInfo, PeerEndpoint as WireEndpoint};

use super::*;
use fake::{Fake, Mode};

/// Maximum wait for expected events. A busy machine delays events by seconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// Not reached by a lookup that is answered.
const LOOKUP_TIMEOUT: Duration = PATIENCE;
/// Not reached by a call that is answered.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// A client and its events.
struct Agent {
    client: DirectoryClient,
    events: mpsc::Receiver<DirectoryEvent>,
}

fn settings(endpoint: String) -> DirectorySettings {
    DirectorySettings {
        endpoints: vec![endpoint],
        registration: Registration {
            name: "node-a".to_owned(),
            peer_endpoints: vec![PeerEndpoint::tcp("127.0.0.1:7000")],
            ..Registration::default()
        },
        connect_timeout: CALL_TIMEOUT,
        call_timeout: CALL_TIMEOUT,
        changes_queued_max: CHANGES_QUEUED_MAX,
        lookups_max: LOOKUPS_MAX,
        security: Security::Plain,
        tenants: Arc::default(),
    }
}

/// Settings of a client that soon gives up a call that is not answered.
fn impatient(endpoint: String) -> DirectorySettings {
    DirectorySettings { call_timeout: Duration::from_millis(500), ..settings(endpoint) }
}

impl Agent {
    fn start(settings: DirectorySettings) -> Agent {
        let (sender, events) = mpsc::channel();
        let sink: DirectorySink = Arc::new(move |event| drop(sender.send(event)));
        Agent { client: DirectoryClient::start(settings, sink).expect("started"), events }
    }

    fn next(&self) -> DirectoryEvent {
        self.events.recv_timeout(PATIENCE).expect("an event")
    }

    /// Waits for an event, ignoring others.
    fn wait_for(&self, wanted: &DirectoryEvent) {
        let mut passed = Vec::new();
        while passed.last() != Some(wanted) {
            let event = self.events.recv_timeout(PATIENCE);
            passed.push(event.unwrap_or_else(|_| panic!("missing {wanted:?} after {passed:?}")));
        }
    }

    /// Waits until the client's status satisfies a condition.
    fn wait_until(&self, wanted: impl Fn(&DirectoryStatus) -> bool) {
        let start = Instant::now();
        while !wanted(&self.client.status()) {
            assert!(start.elapsed() < PATIENCE, "timed out: {:?}", self.client.status());
            std::thread::yield_now();
        }
    }

    /// Waits for the result of a placement request.
    fn wait_for_placement(&self) -> DirectoryEvent {
        loop {
            let event = self.next();
            if matches!(
                event,
                DirectoryEvent::PlacementCompleted { .. } | DirectoryEvent::PlacementFailed { .. }
            ) {
                return event;
            }
        }
    }

    /// Waits until all slots are requested, then announces an inventory.
    fn announce_inventory(&self, inventory: &[(BlockKey, Tier)]) {
        self.wait_for(&all_slots_requested());
        self.client.inventory(&SlotSet::ALL, inventory);
    }
}

fn all_slots_requested() -> DirectoryEvent {
    DirectoryEvent::InventoryRequested { slots: Box::new(SlotSet::ALL) }
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

/// Returns the address of a node's TCP transport, without the name of the node.
fn address_of(agent: &Agent, node: u16) -> Option<String> {
    let endpoints = agent.client.peer_endpoints(NodeId(node))?;
    let (name, address) = endpoints[0].address.split_once('@')?;
    assert_eq!(name, format!("node-{node}"));
    Some(address.to_owned())
}

fn info(node: u32, epoch: u64, address: &str) -> NodeInfo {
    NodeInfo {
        node,
        name: format!("node-{node}"),
        peer_endpoints: vec![WireEndpoint::tcp(address)],
        epoch,
        alive: true,
        ..NodeInfo::default()
    }
}

#[test]
fn invalid_endpoint_is_rejected_with_the_expected_format() {
    let refused = DirectoryClient::start(settings("not an address".to_owned()), Arc::new(|_| {})).err();
    let refused = refused.expect("refused").to_string();
    assert!(refused.contains("http://host:port"), "{refused}");
}

#[test]
fn without_a_control_plane_lookups_fail_immediately_and_announcements_are_dropped() {
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
fn client_registers_requests_an_inventory_and_announces_in_order() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    assert_eq!(agent.next(), registered(1));
    assert_eq!(agent.next(), DirectoryEvent::Connected);
    assert_eq!(agent.next(), all_slots_requested());
    agent.client.announce(&[change(99, Change::Added)]);
    agent.client.inventory(&SlotSet::ALL, &[(key(0), Tier::Dram), (key(1), Tier::Nvme)]);
    agent.client.announce(&[change(2, Change::Added), change(0, Change::Removed)]);
    agent.client.announce(&[change(3, Change::Added)]);
    let expected = [(key(0), 1), (key(1), 2), (key(2), 2), (key(0), 0x82), (key(3), 2)];
    fake.wait(|state| state.log == expected);
    assert_eq!(fake.read(|state| state.resets), 1);
    let status = agent.client.status();
    assert_eq!(status.registered, Some((NodeId(1), Epoch(1))));
    assert_eq!(status.changes_superseded, 1, "earlier changes are part of the inventory");
    fake.wait(|state| state.beats >= 3);
    agent.client.shutdown();
}

#[test]
fn changed_failure_domain_is_registered_with_a_new_inventory() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    agent.announce_inventory(&[(key(0), Tier::Dram)]);
    fake.wait(|state| state.resets == 1);
    assert_eq!(fake.read(|state| state.failure_domain.clone()), "");
    agent.client.set_failure_domain("zone-a");
    assert_eq!(agent.next(), registered(2), "the link stays up meanwhile");
    agent.announce_inventory(&[(key(0), Tier::Dram)]);
    fake.wait(|state| state.resets == 2);
    assert_eq!(
        fake.read(|state| (state.failure_domain.clone(), state.registrations)),
        ("zone-a".to_owned(), 2)
    );
    assert_eq!(agent.client.failure_domain(), "zone-a");
    agent.client.set_failure_domain("zone-a");
    let beats = fake.read(|state| state.beats);
    fake.wait(|state| state.beats > beats + 2);
    assert_eq!(fake.read(|state| state.registrations), 2, "the same domain is not registered again");
    agent.client.shutdown();
}

#[test]
fn lookup_returns_reachable_replicas_of_other_nodes() {
    let fake = Fake::start();
    let with = |node, peer_endpoints| NodeInfo { peer_endpoints, ..info(node, 1, "") };
    let newer = WireEndpoint { protocol: "rdma-9".to_owned(), address: "fe80::1/17".to_owned() };
    fake.write(|state| {
        state.nodes = vec![info(2, 1, "127.0.0.1:7002"), info(300, 1, "127.0.0.1:7300")];
        state.nodes.extend([with(4, Vec::new()), with(6, vec![newer])]);
        state.replicas.insert(key(5), vec![(2, 1), (2, 2)]);
        state.replicas.insert(key(7), vec![(300, 2), (9, 1)]);
        state.replicas.insert(key(8), vec![(4, 1)]);
        state.replicas.insert(key(9), vec![(6, 1), (2, 1)]);
    });
    let agent = Agent::start(settings(fake.endpoint()));
    agent.announce_inventory(&[]);
    let give_up = Instant::now() + PATIENCE;
    while agent.client.peer_endpoints(NodeId(300)).is_none() {
        assert!(Instant::now() < give_up, "the node list arrives");
        std::thread::yield_now();
    }
    agent.client.lookup(LookupId(1), (0..10_000).map(key).collect(), LOOKUP_TIMEOUT);
    let DirectoryEvent::LookupCompleted { lookup: LookupId(1), found } = agent.next() else {
        panic!("expected a completed lookup")
    };
    assert_eq!(found.len(), 10_000, "more than fit into one call");
    let replica = |node, tier| Replica { node: NodeId(node), tier, load: LoadClass::default() };
    assert_eq!(found[5], [replica(2, Tier::Dram), replica(2, Tier::Nvme)]);
    assert_eq!(found[7], [replica(300, Tier::Nvme)], "node 9 is unknown");
    assert!(found[8].is_empty(), "node 4 has no peer transport");
    assert_eq!(found[9], [replica(2, Tier::Dram)], "node 6 has no protocol in common");
    assert_eq!(found.iter().filter(|replicas| !replicas.is_empty()).count(), 3);
    assert_eq!(fake.read(|state| (state.lookups, state.asking)), (2, 1));
    agent.client.shutdown();
}

#[test]
fn lookup_without_a_response_times_out_while_heartbeats_continue() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    agent.announce_inventory(&[]);
    fake.write(|state| state.lookup_mode = Mode::Stall);
    let asked = Instant::now();
    let beats = fake.read(|state| state.beats);
    agent.client.lookup(LookupId(1), vec![key(1)], Duration::from_millis(300));
    assert_eq!(agent.next(), DirectoryEvent::LookupFailed { lookup: LookupId(1) });
    assert!(asked.elapsed() >= Duration::from_millis(300) && asked.elapsed() < CALL_TIMEOUT);
    fake.wait(|state| state.beats > beats + 2);
    assert!(agent.client.status().connected);
    fake.write(|state| state.lookup_mode = Mode::Garbage);
    agent.client.lookup(LookupId(2), vec![key(1)], LOOKUP_TIMEOUT);
    assert_eq!(agent.next(), DirectoryEvent::LookupFailed { lookup: LookupId(2) });
    agent.client.shutdown();
}

#[test]
fn lookups_beyond_the_limit_fail_immediately_and_each_ends_once() {
    let fake = Fake::start();
    fake.write(|state| state.lookup_mode = Mode::Stall);
    let agent = Agent::start(DirectorySettings { lookups_max: 4, ..settings(fake.endpoint()) });
    agent.announce_inventory(&[]);
    for id in 0..10 {
        agent.client.lookup(LookupId(id), vec![key(1)], Duration::from_secs(2));
    }
    let mut failed: Vec<u64> = (0..10)
        .map(|_| match agent.next() {
            DirectoryEvent::LookupFailed { lookup } => lookup.0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(failed[..6].iter().all(|id| *id >= 4), "lookups beyond the limit fail first: {failed:?}");
    failed.sort_unstable();
    assert_eq!(failed, (0..10).collect::<Vec<_>>());
    agent.client.shutdown();
}

#[test]
fn client_connects_to_a_late_control_plane_and_announces_again_when_it_lost_its_state() {
    let port = Fake::start().stop();
    let agent = Agent::start(settings(format!("http://127.0.0.1:{port}")));
    agent.client.lookup(LookupId(1), vec![key(1)], LOOKUP_TIMEOUT);
    assert_eq!(
        agent.next(),
        DirectoryEvent::LookupFailed { lookup: LookupId(1) },
        "no control plane: immediately"
    );

    let fake = Fake::start_at(port);
    agent.wait_for(&registered(1));
    agent.announce_inventory(&[(key(0), Tier::Dram)]);
    fake.wait(|state| state.log.len() == 1);

    fake.stop();
    agent.wait_for(&DirectoryEvent::Disconnected);
    agent.client.lookup(LookupId(2), vec![key(1)], LOOKUP_TIMEOUT);
    agent.wait_for(&DirectoryEvent::LookupFailed { lookup: LookupId(2) });
    agent.client.announce(&[change(1, Change::Added)]);

    let again = Fake::start_at(port);
    again.write(|state| state.epoch = 5);
    agent.wait_for(&registered(6));
    agent.announce_inventory(&[(key(0), Tier::Dram), (key(1), Tier::Nvme)]);
    again.wait(|state| state.log == [(key(0), 1), (key(1), 2)]);
    assert!(agent.client.status().beats_failed > 0);
    agent.client.shutdown();
}

#[test]
fn returning_control_plane_that_knows_the_node_gets_queued_changes_without_an_inventory() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    agent.announce_inventory(&[(key(0), Tier::Dram)]);
    fake.wait(|state| state.log.len() == 1);
    // A reply that is lost when the fake stops leaves its changes queued.
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
fn batch_with_a_lost_reply_is_sent_again_and_applied_once() {
    let fake = Fake::start();
    let agent = Agent::start(impatient(fake.endpoint()));
    agent.announce_inventory(&[]);
    fake.wait(|state| state.resets == 1);
    fake.write(|state| state.update_mode = Mode::Stall);
    agent.client.announce(&[change(1, Change::Added)]);
    fake.wait(|state| state.log.len() == 1 && state.updates >= 3);
    fake.write(|state| state.update_mode = Mode::Answer);
    agent.client.announce(&[change(2, Change::Added)]);
    fake.wait(|state| state.log == [(key(1), 2), (key(2), 2)]);
    assert_eq!(fake.read(|state| state.resets), 1, "no inventory was sent");
    agent.client.shutdown();
}

#[test]
fn gap_fence_and_rejection_each_lead_to_a_complete_inventory() {
    let fake = Fake::start();
    let agent = Agent::start(settings(fake.endpoint()));
    agent.announce_inventory(&[(key(0), Tier::Dram)]);
    fake.wait(|state| state.log.len() == 1);

    fake.write(|state| state.expected += 100);
    agent.client.announce(&[change(1, Change::Added)]);
    agent.announce_inventory(&[(key(7), Tier::Dram)]);
    fake.wait(|state| state.log == [(key(7), 1)] && state.resets == 2);

    fake.write(|state| state.update_mode = Mode::Refuse);
    agent.client.announce(&[change(1, Change::Added)]);
    agent.wait_for(&all_slots_requested());
    fake.write(|state| state.update_mode = Mode::Answer);
    agent.client.inventory(&SlotSet::ALL, &[(key(8), Tier::Dram)]);
    fake.wait(|state| state.log == [(key(8), 1)] && state.resets == 3);

    // Heartbeats do not report it: only the update is fenced, as when another agent has just registered the
    // name.
    fake.write(|state| state.fence_updates_of = Some(1));
    agent.client.announce(&[change(1, Change::Added)]);
    agent.wait_for(&DirectoryEvent::Disconnected);
    agent.wait_for(&registered(2));
    agent.announce_inventory(&[(key(9), Tier::Dram)]);
    fake.wait(|state| state.log == [(key(9), 1)]);
    agent.client.shutdown();
}

#[test]
fn overflowing_queue_is_replaced_by_an_inventory() {
    let fake = Fake::start();
    let agent = Agent::start(DirectorySettings { changes_queued_max: 10, ..impatient(fake.endpoint()) });
    agent.announce_inventory(&[]);
    fake.wait(|state| state.resets == 1);
    fake.write(|state| state.update_mode = Mode::Stall);
    agent.client.announce(&added(0..5));
    fake.wait(|state| state.updates >= 2);
    agent.client.announce(&added(5..20));
    agent.wait_for(&all_slots_requested());
    assert_eq!(agent.client.status().changes_superseded, 20);
    fake.write(|state| state.update_mode = Mode::Answer);
    let all: Vec<_> = (0..20).map(|number| (key(number), Tier::Nvme)).collect();
    agent.client.inventory(&SlotSet::ALL, &all);
    fake.wait(|state| state.log.len() == 20 && state.resets == 2);
    agent.client.shutdown();
}

#[test]
fn heartbeats_continue_while_the_sink_blocks_and_updates_stall() {
    let fake = Fake::start();
    let (release, blocked) = mpsc::channel::<()>();
    let blocked = Mutex::new(blocked);
    let sink: DirectorySink = Arc::new(move |event| {
        if event == all_slots_requested() {
            let blocked = blocked.lock().expect("not poisoned");
            let _ = blocked.recv_timeout(PATIENCE);
        }
    });
    let client = DirectoryClient::start(settings(fake.endpoint()), sink).expect("started");
    fake.wait(|state| state.beats >= 10);
    client.announce(&[change(1, Change::Added)]);
    client.lookup(LookupId(1), vec![key(1)], LOOKUP_TIMEOUT);
    release.send(()).expect("the sink is blocked");
    fake.wait(|state| state.lookups == 1);
    client.shutdown();
}

#[test]
fn peers_are_learned_from_the_list_and_from_changes() {
    let fake = Fake::start();
    fake.write(|state| state.nodes = vec![info(1, 1, "a:1"), info(2, 4, "b:1")]);
    let agent = Agent::start(settings(fake.endpoint()));
    agent.announce_inventory(&[]);
    let wait = |node, address: Option<&str>| {
        let start = Instant::now();
        while address_of(&agent, node).as_deref() != address {
            assert!(start.elapsed() < PATIENCE, "{node} is at {:?}", address_of(&agent, node));
            std::thread::yield_now();
        }
    };
    wait(2, Some("b:1"));
    assert_eq!(address_of(&agent, 3), None);
    fake.change_node(info(3, 1, "c:1"));
    wait(3, Some("c:1"));
    fake.change_node(info(2, 5, "b:2"));
    wait(2, Some("b:2"));
    assert_eq!(agent.client.nodes().len(), 3);

    let port = fake.stop();
    agent.wait_for(&DirectoryEvent::Disconnected);
    assert_eq!(address_of(&agent, 3).as_deref(), Some("c:1"), "the last known list is kept");
    let again = Fake::start_at(port);
    again.write(|state| state.nodes = vec![info(2, 1, "d:1")]);
    wait(3, None);
    wait(2, Some("d:1"));
    agent.client.shutdown();
}

#[test]
fn shutdown_is_quick_with_any_control_plane_and_can_be_repeated() {
    let fake = Fake::start();
    fake.write(|state| (state.lookup_mode, state.update_mode) = (Mode::Stall, Mode::Stall));
    // A call that outlasts the shutdown would run for longer than this test waits.
    let endless = DirectorySettings { call_timeout: PATIENCE * 10, ..settings(fake.endpoint()) };
    let agent = Agent::start(endless);
    agent.announce_inventory(&[(key(1), Tier::Dram)]);
    agent.client.lookup(LookupId(1), vec![key(1)], PATIENCE * 10);
    fake.wait(|state| state.updates > 0 && state.lookups > 0);
    let Agent { client, events } = agent;
    client.shutdown();
    client.shutdown();
    drop(client);
    let ended = events.recv_timeout(PATIENCE);
    assert_eq!(ended, Err(mpsc::RecvTimeoutError::Disconnected), "the threads have ended without an event");
}
