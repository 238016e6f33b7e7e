//! Partitions between any two hosts of a cluster, each host in a network namespace of its own: packets vanish, nobody is told.
//!
//! Local hits go on all the while, every load ends in its time, every byte is compared, and when the network is whole again
//! so is the directory.

use std::process::{Command, Output};
use std::time::Duration;

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::cluster::{SLOTS, load_from_peer, numbers, wait_for_sources};
use reprise_e2e::host::{Network, in_own_namespace};
use reprise_e2e::{Cluster, Engine, Loading, Outcome, PATIENCE, World, wait_until};

/// Bound on a load of a few blocks while anything is cut: the silence after which a peer is lost, and a look-up.
const LOAD_WITHIN: Duration = Duration::from_secs(6);

/// Blocks that are saved before anything is cut.
const FIRST: u64 = 60;

/// The test that needs namespaces.
const PARTITIONS: &str = "partitions::a_partition_between_any_two_costs_misses_and_nothing_else";

/// The cluster and its engines; the blocks below `saved` are on the first node.
struct Subject {
    cluster: Cluster,
    saver: Engine,
    reader: Engine,
    saved: u64,
}

impl Subject {
    /// Hits on the node itself go on, also of new blocks; their numbers.
    fn save(&mut self) -> Vec<u64> {
        let own = numbers(self.saved..self.saved + 10);
        self.saver.save_durably(&own);
        self.saved += 10;
        assert_eq!(self.saver.load_all(&own, &Loading::CLUSTER), vec![Source::OwnDram; own.len()]);
        own
    }

    /// What comes from elsewhere is right or missed, in time; how many come.
    fn come(&self, numbers: &[u64]) -> usize {
        let (outcomes, took) = self.reader.timed_load(numbers, &Loading::CLUSTER);
        assert!(took < LOAD_WITHIN, "a load took {took:?}");
        // What is known to be there and cannot be had is said to have failed; the engine computes it like any miss.
        let is_missed = |outcome: Outcome| {
            matches!(
                outcome,
                Outcome::Missing(BlockStatus::Miss | BlockStatus::Failed | BlockStatus::Deadline)
            )
        };
        for outcome in &outcomes {
            assert!(outcome.is_right() || is_missed(*outcome), "{outcome:?}");
        }
        outcomes.into_iter().filter(|outcome| outcome.is_right()).count()
    }

    /// Hits on the node itself go on, and what comes from elsewhere is right or missed, in time.
    fn assert_serves(&mut self) {
        let own = self.save();
        self.come(&own);
    }

    /// How many of the first blocks, which are on the first node alone, are known on the second up to one that is not.
    fn known(&self) -> usize {
        self.reader.matches(&numbers(0..FIRST), Scope::Cluster).len()
    }

    /// The network is whole: so is everything else, soon.
    fn assert_heals(&mut self) {
        let saved = numbers(0..self.saved);
        self.cluster.assert_complete(3, [&self.saver, &self.reader], &saved);
        wait_for_sources(&self.reader, &saved, PATIENCE);
        self.reader.trim();
        load_from_peer(&self.reader, &numbers(self.saved - 10..self.saved));
    }
}

#[test]
fn a_partition_between_any_two_costs_misses_and_nothing_else() {
    if !in_own_namespace(PARTITIONS) {
        return;
    }
    let mut network = Network::new();
    let [store, a, b, c, first, second] = std::array::from_fn(|_| network.host());
    let world = World::new();
    let etcd = world.etcd_at(&store);
    let endpoint = etcd.endpoint();
    let member = |host, name| world.member_at(host, name, &endpoint);
    let members = vec![member(&a, "a"), member(&b, "b"), member(&c, "c")];
    let cluster = Cluster::of(world, etcd, members).with_agents([&first, &second]);
    let (cluster, saver, reader) = cluster.hold(FIRST);
    let mut subject = Subject { cluster, saver, reader, saved: FIRST };
    let all = numbers(0..FIRST).len();

    // The two nodes: what the directory names cannot be fetched.
    network.cut(&first, &second);
    let fresh = subject.save();
    wait_for_sources(&subject.reader, &fresh, PATIENCE);
    assert_eq!(subject.come(&fresh), 0, "what is known and out of reach is missed");
    network.mend(&first, &second);
    subject.assert_heals();

    // A node and a member: that member offers it to nobody, the others do.
    network.cut(&first, &b);
    wait_until("b offers the node no more", PATIENCE, || {
        (subject.cluster.members[1].offers("first") == Some(false)).then_some(())
    });
    wait_until("a goes on offering it", PATIENCE, || {
        (subject.cluster.members[0].offers("first") == Some(true)).then_some(())
    });
    subject.assert_serves();
    assert!(subject.known() < all, "a third of the blocks are of the member that does not hear their node");
    network.mend(&first, &b);
    subject.assert_heals();

    // The asking node and a member: its part is unknown there, and only there.
    network.cut(&second, &a);
    subject.assert_serves();
    assert!(subject.known() < all, "a third of the blocks are of the member that cannot be asked");
    assert_eq!(subject.cluster.members[0].offers("first"), Some(true), "others are told of them");
    network.mend(&second, &a);
    subject.assert_heals();

    // A node and all members: nobody is sent to it, and its own engines notice nothing.
    for member in [&a, &b, &c] {
        network.cut(&first, member);
    }
    subject.cluster.wait_until_not_offered("first");
    let own = subject.save();
    assert_eq!((subject.known(), subject.come(&own)), (0, 0), "what only that node has is missed");
    for member in [&a, &b, &c] {
        network.mend(&first, member);
    }
    subject.assert_heals();

    // Two members: neither needs the other.
    network.cut(&a, &b);
    subject.assert_serves();
    wait_for_sources(&subject.reader, &numbers(0..subject.saved), PATIENCE);
    network.mend(&a, &b);
    subject.assert_heals();

    // A member and etcd: its lease ends on its own clock, and the others take over.
    network.cut(&c, &store);
    wait_until("two members have all slots", PATIENCE, || {
        let owned: Vec<u64> = subject.cluster.parts().iter().map(|part| part.owned).collect();
        (owned.len() >= 2 && owned[..2].iter().sum::<u64>() == SLOTS).then_some(())
    });
    subject.assert_serves();
    wait_for_sources(&subject.reader, &numbers(0..subject.saved), PATIENCE);
    network.mend(&c, &store);
    subject.assert_heals();
}

#[test]
fn where_nobody_can_make_namespaces_the_test_fails_unless_it_is_said_to_go_without_it() {
    let own = std::env::current_exe().expect("a process knows its executable");
    // Without programs there are no namespaces.
    let run = |variable: &str| -> Output {
        let mut command = Command::new(&own);
        command.args(["--exact", PARTITIONS, "--nocapture"]).env("PATH", "/nowhere");
        command.env("REPRISE_WITHOUT_NAMESPACES", variable).output().expect("it can be run")
    };
    let said = |output: &Output| {
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat()
    };
    for variable in ["", "0"] {
        let failed = run(variable);
        assert!(
            !failed.status.success() && said(&failed).contains("REPRISE_WITHOUT_NAMESPACES=1"),
            "{failed:?}"
        );
    }
    let passed = run("1");
    assert!(passed.status.success() && said(&passed).contains("SKIPPED"), "{passed:?}");
}
