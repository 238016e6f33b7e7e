//! The client with several members: routing of announcements and lookups, and loss of a member.

use reprise_policy::shards::{MemberName, ShardMap};
use reprise_proto::controlplane::{MemberInfo, MemberList};

use super::*;

/// Returns keys in many slots.
fn spread(count: u32) -> Vec<BlockKey> {
    (0..count)
        .map(|number| {
            let mut key = [7; 16];
            key[..2].copy_from_slice(&((number * 40_503 % 65_536) as u16).to_be_bytes());
            key[4..8].copy_from_slice(&number.to_be_bytes());
            BlockKey(key)
        })
        .collect()
}

fn list(epoch: u64, members: Vec<MemberInfo>) -> MemberList {
    MemberList { epoch, members, answering: String::new(), registered: true }
}

fn owned(list: &MemberList, name: &str) -> SlotSet {
    let name_of = |text: &str| MemberName::new(text).expect("a name");
    let names = list.members.iter().map(|member| name_of(&member.name));
    ShardMap::new(Epoch(list.epoch), names).expect("a map").owned_by(&name_of(name))
}

/// Members that know each other.
struct Members {
    fakes: Vec<Fake>,
    epoch: u64,
}

impl Members {
    fn start(names: &[&'static str]) -> Members {
        let fake = |name: &&'static str| {
            Fake::start_with(0, fake::State { name, owned: SlotSet::EMPTY, ..fake::State::default() })
        };
        let mut members = Members { fakes: names.iter().map(fake).collect(), epoch: 1 };
        members.publish();
        members
    }

    /// Publishes the list of running members to all of them.
    fn publish(&mut self) -> MemberList {
        self.epoch += 1;
        let list = list(self.epoch, self.fakes.iter().map(Fake::info).collect());
        for fake in &self.fakes {
            fake.change_members(&list, owned(&list, fake.read(|state| state.name)));
        }
        list
    }

    fn agent(&self) -> Agent {
        let endpoints = self.fakes.iter().map(Fake::endpoint).collect();
        Agent::start(DirectorySettings { endpoints, ..settings(String::new()) })
    }
}

impl Agent {
    /// Announces the requested inventories for these keys until every member has a complete one.
    fn serve(&self, members: &Members, keys: &[BlockKey]) {
        let whole = |fake: &Fake| fake.read(|state| state.whole == state.owned && !state.owned.is_empty());
        let give_up = Instant::now() + PATIENCE;
        while !members.fakes.iter().all(whole) {
            assert!(Instant::now() < give_up, "some member has no complete inventory");
            if let Ok(DirectoryEvent::InventoryRequested { slots }) =
                self.events.recv_timeout(Duration::from_millis(10))
            {
                let here = keys.iter().filter(|key| slots.has_key(key));
                let here: Vec<_> = here.map(|key| (*key, Tier::Nvme)).collect();
                self.client.inventory(&slots, &here);
            }
        }
    }

    fn found(&self, lookup: u64, keys: &[BlockKey], time: Duration) -> Vec<Vec<Replica>> {
        self.client.lookup(LookupId(lookup), keys.to_vec(), time);
        loop {
            if let DirectoryEvent::LookupCompleted { lookup: LookupId(id), found } = self.next() {
                assert_eq!(id, lookup);
                return found;
            }
        }
    }
}

/// Starts two members that both have replicas of some keys on node 2's NVMe, and an agent that has
/// announced these keys too.
fn two_that_know_replicas() -> (Members, Agent, Vec<BlockKey>) {
    let members = Members::start(&["a", "b"]);
    for fake in &members.fakes {
        fake.write(|state| state.nodes = vec![info(2, 1, "127.0.0.1:7002")]);
    }
    let agent = members.agent();
    let keys = spread(100);
    agent.serve(&members, &keys);
    for fake in &members.fakes {
        fake.write(|state| keys.iter().for_each(|key| drop(state.replicas.insert(*key, vec![(2, 2)]))));
    }
    (members, agent, keys)
}

#[test]
fn announcements_and_lookups_go_to_the_owners_of_the_slots() {
    let members = Members::start(&["a", "b", "c"]);
    let agent = members.agent();
    let keys = spread(300);
    agent.serve(&members, &keys[..200]);
    let changes: Vec<ReplicaChange> = keys[200..]
        .iter()
        .map(|key| ReplicaChange { key: *key, tier: Tier::Dram, change: Change::Added })
        .collect();
    agent.client.announce(&changes);
    for fake in &members.fakes {
        let mine = fake.read(|state| state.owned.clone());
        let expected: Vec<(BlockKey, u8)> = keys
            .iter()
            .zip((0..).map(|at| if at < 200 { 2 } else { 1 }))
            .filter(|(key, _)| mine.has_key(key))
            .map(|(key, tier)| (*key, tier))
            .collect();
        assert!(expected.len() > 50, "slots are distributed");
        fake.wait(|state| state.log == expected);
        fake.write(|state| {
            state.nodes = vec![info(2, 1, "127.0.0.1:7002")];
            for (key, tier) in &expected {
                state.replicas.insert(*key, vec![(2, *tier)]);
            }
        });
        fake.change_node(info(2, 2, "127.0.0.1:7002"));
    }
    let give_up = Instant::now() + PATIENCE;
    while agent.client.peer_endpoints(NodeId(2)).is_none() {
        assert!(Instant::now() < give_up, "the node list arrives");
        std::thread::yield_now();
    }
    let found = agent.found(1, &keys, LOOKUP_TIMEOUT);
    assert!(found.iter().all(|replicas| replicas.len() == 1), "the results are in the order of the keys");
    assert!(found[..200].iter().all(|replicas| replicas[0].tier == Tier::Nvme));
    let status = agent.client.status();
    assert_eq!((status.members, status.members_connected, status.map_epoch), (3, 3, 2));
    assert_eq!((status.lookup_keys_redirected, status.lookup_keys_unanswered), (0, 0));
    agent.client.shutdown();
}

#[test]
fn slots_of_a_lost_member_are_announced_to_their_new_owners_only() {
    let mut members = Members::start(&["a", "b", "c"]);
    let agent = members.agent();
    let keys = spread(300);
    agent.serve(&members, &keys);
    let before: Vec<SlotSet> =
        members.fakes.iter().map(|fake| fake.read(|state| state.owned.clone())).collect();
    members.fakes.remove(0).stop();
    members.publish();
    agent.serve(&members, &keys);
    for (fake, before) in members.fakes.iter().zip(&before[1..]) {
        let (now, log) = fake.read(|state| (state.owned.clone(), state.log.clone()));
        assert_eq!(before.without(&now), SlotSet::EMPTY, "remaining members keep their slots");
        let mut logged: Vec<BlockKey> = log.iter().map(|(key, _)| *key).collect();
        logged.sort_unstable();
        let mut expected: Vec<BlockKey> = keys.iter().filter(|key| now.has_key(key)).copied().collect();
        expected.sort_unstable();
        assert_eq!(logged, expected, "each key once");
        assert_eq!(fake.read(|state| (state.registrations, state.resets)), (1, 1));
    }
    agent.client.shutdown();
}

#[test]
fn keys_of_an_unresponsive_member_are_misses_and_others_are_found() {
    let (members, agent, keys) = two_that_know_replicas();
    assert!(agent.found(1, &keys, LOOKUP_TIMEOUT).iter().all(|replicas| replicas.len() == 1));
    members.fakes[1].write(|state| state.lookup_mode = Mode::Stall);
    let silent = members.fakes[1].read(|state| state.owned.clone());
    let unanswered = keys.iter().filter(|key| silent.has_key(key)).count();
    // On a busy machine, the other member may need longer than the first lookups wait.
    let (mut lookup, mut time) = (2, Duration::from_millis(300));
    let mut counted = agent.client.status().lookup_keys_unanswered;
    loop {
        let found = agent.found(lookup, &keys, time);
        let missing = |(key, replicas): &(&BlockKey, &Vec<Replica>)| {
            assert!(replicas.is_empty() || !silent.has_key(key), "the member does not answer");
            replicas.is_empty()
        };
        let before = std::mem::replace(&mut counted, agent.client.status().lookup_keys_unanswered);
        let missing = keys.iter().zip(&found).filter(missing).count();
        assert_eq!((counted - before) as usize, missing);
        if missing == unanswered {
            break;
        }
        assert!(time < PATIENCE, "{missing} of {} keys are missing", keys.len());
        (lookup, time) = (lookup + 1, 3 * time);
    }
    agent.client.shutdown();
}

#[test]
fn lookup_with_an_older_map_is_repeated_with_the_newer_map() {
    let (members, agent, keys) = two_that_know_replicas();
    // A third member takes over slots, but no home has reported it yet.
    let third = Fake::start_with(0, fake::State { name: "c", ..fake::State::default() });
    third.write(|state| keys.iter().for_each(|key| drop(state.replicas.insert(*key, vec![(2, 1)]))));
    let three = list(9, members.fakes.iter().map(Fake::info).chain([third.info()]).collect());
    third.change_members(&three, owned(&three, "c"));
    for fake in &members.fakes {
        fake.write(|state| {
            state.members = Some(three.clone());
            state.map_epoch = 9;
            state.own(owned(&three, state.name));
        });
    }
    let moved = |key: &BlockKey| owned(&three, "c").has_key(key);
    // The link to the new member may not be up at first, but eventually everything is found.
    let give_up = Instant::now() + PATIENCE;
    let mut lookup = 0;
    loop {
        lookup += 1;
        let found = agent.found(lookup, &keys, LOOKUP_TIMEOUT);
        let right = |(key, replicas): (&BlockKey, &Vec<Replica>)| {
            replicas.len() == 1 && (replicas[0].tier == Tier::Dram) == moved(key)
        };
        if keys.iter().zip(&found).all(right) {
            break;
        }
        assert!(Instant::now() < give_up, "the third member is never queried");
    }
    let status = agent.client.status();
    assert!(status.lookup_keys_redirected > 0 && status.map_epoch == 9, "{status:?}");
    agent.client.shutdown();
}

#[test]
fn another_member_becomes_home_when_the_home_is_lost_or_unsure() {
    let mut members = Members::start(&["a", "b", "c"]);
    let agent = members.agent();
    agent.serve(&members, &[]);
    for left in [2, 1] {
        members.fakes.remove(0).stop();
        let list = members.publish();
        let give_up = Instant::now() + PATIENCE;
        while agent.client.status().map_epoch != list.epoch {
            assert!(Instant::now() < give_up, "{:?}", agent.client.status());
            std::thread::yield_now();
        }
        assert_eq!(agent.client.status().members, left);
    }
    agent.client.shutdown();
}

#[test]
fn older_member_list_is_ignored() {
    let (members, agent, keys) = two_that_know_replicas();
    let known = agent.client.status().map_epoch;
    assert!(known > 1);
    // By a newer map they own nothing, but list the previous members, like a member that has just
    // registered again.
    for fake in &members.fakes {
        fake.write(|state| {
            state.members = Some(list(1, Vec::new()));
            state.map_epoch = 9;
            state.own(SlotSet::EMPTY);
        });
    }
    let give_up = Instant::now() + PATIENCE;
    let mut lookup = 0;
    while agent.client.status().lookup_keys_redirected == 0 {
        lookup += 1;
        agent.found(lookup, &keys, LOOKUP_TIMEOUT);
        assert!(Instant::now() < give_up, "no key is redirected");
    }
    let status = agent.client.status();
    assert_eq!((status.map_epoch, status.members), (known, 2), "{status:?}");
    agent.client.shutdown();
}
