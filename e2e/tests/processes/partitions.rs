//! Partitions between any two hosts of a cluster. Each host is in its own network namespace, and packets
//! vanish silently.
//!
//! Local hits continue, every load ends in time, every byte is compared, and the directory is complete after
//! the partition heals.

use std::process::{Command, Output};
use std::time::Duration;

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::cluster::{SLOTS, load_from_peer, numbers, wait_for_sources};
use reprise_e2e::host::{Network, run_in_own_namespace};
use reprise_e2e::{Cluster, Engine, LoadParams, Outcome, PATIENCE, TestEnv, fast_call, wait_until};

/// Bound on a load of a few blocks during a partition: the stall timeout of peers, and a lookup.
const LOAD_WITHIN: Duration = Duration::from_secs(6);

/// Number of blocks that are saved before the first partition.
const FIRST: u64 = 60;

/// Name of the test that runs in its own namespaces.
const PARTITIONS: &str = "processes::partitions::a_partition_between_any_two_hosts_costs_only_misses";

/// The cluster and its engines. The blocks below `saved` are on the first node.
struct Fixture {
    cluster: Cluster,
    saver: Engine,
    reader: Engine,
    saved: u64,
}

impl Fixture {
    /// Saves new blocks on the first node and checks its hits. Returns the block numbers.
    fn save(&mut self) -> Vec<u64> {
        let own = numbers(self.saved..self.saved + 10);
        self.saver.save_durably(&own);
        self.saved += 10;
        assert_eq!(self.saver.load_all(&own, &LoadParams::CLUSTER), vec![Source::OwnDram; own.len()]);
        own
    }

    /// Loads blocks on the second node, which must be right or missing, in time. Returns how many are right.
    fn load_on_second_node(&self, numbers: &[u64]) -> usize {
        let load = || self.reader.load(numbers, &LoadParams::CLUSTER).expect("a load");
        let outcomes = fast_call("a load during a partition", LOAD_WITHIN, load);
        // A known block that cannot be fetched has the status `Failed`. The engine computes it like any miss.
        let is_missed = |outcome: Outcome| {
            matches!(
                outcome,
                Outcome::Missing(BlockStatus::Miss | BlockStatus::Failed | BlockStatus::Deadline)
            )
        };
        for outcome in &outcomes {
            assert!(outcome.is_verified() || is_missed(*outcome), "{outcome:?}");
        }
        outcomes.into_iter().filter(|outcome| outcome.is_verified()).count()
    }

    /// Checks hits on the first node, and loads on the second one.
    fn assert_serves(&mut self) {
        let own = self.save();
        self.load_on_second_node(&own);
    }

    /// Returns how many leading blocks of the first ones a match on the second node finds.
    fn matched(&self) -> usize {
        self.reader.matches(&numbers(0..FIRST), Scope::Cluster).len()
    }

    /// Checks that the cluster recovers after the partition heals.
    fn assert_heals(&mut self) {
        let saved = numbers(0..self.saved);
        self.cluster.assert_complete(3, [&self.saver, &self.reader], &saved);
        wait_for_sources(&self.reader, &saved, PATIENCE);
        self.reader.trim();
        load_from_peer(&self.reader, &numbers(self.saved - 10..self.saved));
    }
}

#[test]
fn a_partition_between_any_two_hosts_costs_only_misses() {
    if !run_in_own_namespace(PARTITIONS) {
        return;
    }
    let mut network = Network::new();
    let [store, a, b, c, first, second] = std::array::from_fn(|_| network.host());
    let env = TestEnv::new();
    let etcd = env.etcd_at(&store);
    let endpoint = etcd.endpoint();
    let member = |host, name| env.member_at(host, name, &endpoint);
    let members = vec![member(&a, "a"), member(&b, "b"), member(&c, "c")];
    let cluster = Cluster::of(env, etcd, members).with_agents([&first, &second]);
    let (cluster, saver, reader) = cluster.save_blocks(FIRST);
    let mut fixture = Fixture { cluster, saver, reader, saved: FIRST };
    let all = numbers(0..FIRST).len();

    // Between the two nodes: known blocks cannot be fetched.
    network.cut(&first, &second);
    let fresh = fixture.save();
    wait_for_sources(&fixture.reader, &fresh, PATIENCE);
    assert_eq!(fixture.load_on_second_node(&fresh), 0, "known blocks that cannot be fetched are missing");
    network.heal(&first, &second);
    fixture.assert_heals();

    // Between a node and a member: only that member stops offering the node.
    network.cut(&first, &b);
    wait_until("b stops offering the node", PATIENCE, || {
        (fixture.cluster.members[1].offers("first") == Some(false)).then_some(())
    });
    wait_until("a continues to offer the node", PATIENCE, || {
        (fixture.cluster.members[0].offers("first") == Some(true)).then_some(())
    });
    fixture.assert_serves();
    assert!(fixture.matched() < all, "the member that lost the node owns a third of the blocks");
    network.heal(&first, &b);
    fixture.assert_heals();

    // Between the loading node and a member: that member's keys are unknown on this node only.
    network.cut(&second, &a);
    fixture.assert_serves();
    assert!(fixture.matched() < all, "the unreachable member owns a third of the blocks");
    assert_eq!(fixture.cluster.members[0].offers("first"), Some(true), "other nodes still get the replicas");
    network.heal(&second, &a);
    fixture.assert_heals();

    // Between a node and all members: the node is not offered, and its own engines are not affected.
    for member in [&a, &b, &c] {
        network.cut(&first, member);
    }
    fixture.cluster.wait_until_not_offered("first");
    let own = fixture.save();
    assert_eq!(
        (fixture.matched(), fixture.load_on_second_node(&own)),
        (0, 0),
        "blocks of that node only are missing"
    );
    for member in [&a, &b, &c] {
        network.heal(&first, member);
    }
    fixture.assert_heals();

    // Between two members, which do not depend on each other.
    network.cut(&a, &b);
    fixture.assert_serves();
    wait_for_sources(&fixture.reader, &numbers(0..fixture.saved), PATIENCE);
    network.heal(&a, &b);
    fixture.assert_heals();

    // Between a member and etcd: the lease expires by the member's own clock, and the others take over.
    network.cut(&c, &store);
    wait_until("two members have all slots", PATIENCE, || {
        let owned: Vec<u64> = fixture.cluster.parts().iter().map(|part| part.owned).collect();
        (owned.len() >= 2 && owned[..2].iter().sum::<u64>() == SLOTS).then_some(())
    });
    fixture.assert_serves();
    wait_for_sources(&fixture.reader, &numbers(0..fixture.saved), PATIENCE);
    network.heal(&c, &store);
    fixture.assert_heals();
}

#[test]
fn without_namespaces_the_test_fails_unless_skipping_it_is_allowed() {
    let own = std::env::current_exe().expect("a process knows its executable");
    // With this PATH, `unshare` is not found, so no namespaces can be created.
    let run = |variable: &str| -> Output {
        let mut command = Command::new(&own);
        command.args(["--exact", PARTITIONS, "--nocapture"]).env("PATH", "/nowhere");
        command.env("REPRISE_WITHOUT_NAMESPACES", variable).output().expect("the test can be run")
    };
    let text = |output: &Output| {
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
    };
    for variable in ["", "0"] {
        let failed = run(variable);
        assert!(
            !failed.status.success() && text(&failed).contains("REPRISE_WITHOUT_NAMESPACES=1"),
            "{failed:?}"
        );
    }
    let passed = run("1");
    assert!(passed.status.success() && text(&passed).contains("SKIPPED"), "{passed:?}");
}
