//! The operator is killed right before or right after each of its writes; its successor converges to the same
//! objects.
//!
//! Two scenarios run once for each crash point: the creation of a cluster, and deletions that must wait for
//! agents. The seed selects the crash points of a run and their order. Their number does not depend on the
//! machine's speed.

use std::time::{Duration, Instant};

use rand::seq::SliceRandom;
use reprise_e2e::{CrashPoint, FaultProxy, Operator, OperatorFiles, PATIENCE, seed, wait_until};
use serde_json::json;

use crate::operator::agents::{Agents, PRODUCT};
use crate::operator::deletion_guard::TOO_SHORT;
use crate::operator::queues::{KIND as ALLOCATION, create_allocation};
use crate::operator::snapshot::{ClusterSnapshot, assert_same, delete_operator_objects, snapshot};
use crate::operator::test_cluster::TestCluster;

/// Percentage of a scenario's crash points that a run covers; 100 covers all.
const PERCENT_VARIABLE: &str = "REPRISE_E2E_KILL_PERCENT";
const PERCENT: u64 = 25;
/// Minimum number of writes of a scenario.
const MIN_WRITES: u64 = 8;
/// Time without a write after which the operator is idle. Pauses within a reconcile take milliseconds.
const NO_WRITES_FOR: Duration = Duration::from_millis(250);
/// Seconds without a session report after which an object counts as unused. These scenarios have no sessions;
/// the operator waits this time before it removes the finalizer of a wiped pool.
const UNUSED_SECONDS: u64 = 1;

/// Scenario that runs once for each crash point.
trait Scenario {
    /// Restores the initial state, and kills the operator if one runs.
    fn prepare(&mut self, runner: &mut CrashRunner, operator: Option<Operator>);
    /// Asserts what must hold at any time.
    fn assert_invariant(&self, runner: &CrashRunner);
}

/// Starts and kills an operator repeatedly, next to simulated agents.
struct CrashRunner {
    k8s: TestCluster,
    proxy: FaultProxy,
    files: OperatorFiles,
    agents: Agents,
}

impl CrashRunner {
    fn new() -> CrashRunner {
        let k8s = TestCluster::new();
        // A watch of a killed operator ends in the middle of a line.
        for words in
            ["reconcile failed; retrying", "watch lost; restarting it", "lease request failed", TOO_SHORT]
        {
            k8s.env.allow(words);
        }
        let proxy = k8s.env.fault_proxy(&k8s.server);
        // All processes have one name, so that none waits for the lease of a killed one.
        let files = k8s.operator_files("operator").via_proxy(&proxy).unused_for(UNUSED_SECONDS);
        CrashRunner { k8s, proxy, files, agents: Agents::default() }
    }

    fn start(&self) -> Operator {
        self.files.start().unwrap_or_else(|error| panic!("the operator does not start: {error:?}"))
    }

    /// Runs an operator until it is killed at the crash point. Returns false if it completes before.
    fn kill_at(&mut self, moment: CrashPoint, wanted: &ClusterSnapshot) -> bool {
        self.proxy.open(Some(moment));
        let operator = self.start();
        let (begun, mut is_killed) = (Instant::now(), false);
        while begun.elapsed() < PATIENCE {
            self.agents.sync(&self.k8s);
            if self.proxy.wait_closed(Duration::from_millis(20)) {
                is_killed = true;
                break;
            }
            if self.is_quiet(&operator) && snapshot(&self.k8s) == *wanted {
                break;
            }
        }
        operator.kill();
        is_killed
    }

    /// Runs an operator without a kill until it is idle in the wanted state. Returns the running operator.
    fn run_to_completion(&mut self, wanted: &ClusterSnapshot, after: &str) -> Operator {
        self.proxy.open(None);
        let operator = self.start();
        let give_up = Instant::now() + PATIENCE;
        loop {
            self.agents.sync(&self.k8s);
            let now = snapshot(&self.k8s);
            if now == *wanted && self.is_quiet(&operator) && snapshot(&self.k8s) == *wanted {
                return operator;
            }
            if Instant::now() > give_up {
                seed::print_line(&format!("{after}, the next operator does not converge"));
                assert_same(wanted, &now);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether the operator has reconciled a cluster and has not written for a while.
    fn is_quiet(&self, operator: &Operator) -> bool {
        let reconciled = operator.metric("reprise_operator_reconciles_total", "kind=\"KVCacheCluster\"");
        reconciled > 0.0 && self.proxy.time_since_last_write().is_none_or(|quiet| quiet >= NO_WRITES_FOR)
    }

    /// Waits until the operator is idle, and returns a snapshot.
    fn wait_idle(&mut self, operator: &Operator) -> ClusterSnapshot {
        wait_until("writes stop", PATIENCE, || {
            std::thread::sleep(Duration::from_millis(20));
            (!self.agents.sync(&self.k8s) && self.is_quiet(operator)).then_some(())
        });
        snapshot(&self.k8s)
    }

    /// Runs a scenario once for each selected write, with a kill before or after that write.
    fn run_scenario(&mut self, name: &str, scenario: &mut impl Scenario, moment: fn(u64) -> CrashPoint) {
        let mut random = seed::seeded(name);
        scenario.prepare(self, None);
        self.proxy.open(None);
        let operator = self.start();
        let mut wanted = self.wait_idle(&operator);
        // Some conditions depend on periodic polls.
        for _ in 0..3 {
            std::thread::sleep(10 * NO_WRITES_FOR);
            wanted = self.wait_idle(&operator);
        }
        let writes = self.proxy.writes();
        assert!(writes >= MIN_WRITES, "expected at least {MIN_WRITES} writes, counted {writes}");
        let mut moments: Vec<CrashPoint> = (1..=writes).map(moment).collect();
        moments.shuffle(&mut random);
        let percent = seed::number(PERCENT_VARIABLE, PERCENT);
        let wanted_kills = (moments.len() as u64 * percent).div_ceil(100) as usize;
        let (mut last, mut covered, mut not_reached) = (Some(operator), 0, Vec::new());
        for moment in moments {
            if covered == wanted_kills {
                break;
            }
            scenario.prepare(self, last.take());
            if self.kill_at(moment, &wanted) {
                covered += 1;
            } else {
                not_reached.push(moment);
            }
            scenario.assert_invariant(self);
            last = Some(self.run_to_completion(&wanted, &format!("{name}: killed at {moment:?}")));
            scenario.assert_invariant(self);
        }
        if let Some(operator) = last {
            operator.kill();
        }
        seed::print_line(&format!(
            "{name}: killed at {covered} of {writes} writes; completed before these crash points: {not_reached:?}"
        ));
        // An operator that finds part of the objects writes less than the first one.
        assert!(covered * 2 >= wanted_kills, "killed at {covered} of {writes} writes, not at {wanted_kills}");
    }
}

/// Creates a cluster with two pools and a managed etcd, with an object of every kind that the operator
/// creates.
struct Creation;

impl Scenario for Creation {
    fn prepare(&mut self, runner: &mut CrashRunner, operator: Option<Operator>) {
        if let Some(operator) = operator {
            operator.kill();
        }
        delete_operator_objects(&runner.k8s);
    }

    /// Asserts that the certificate of scrapers is of the stored authority.
    fn assert_invariant(&self, runner: &CrashRunner) {
        let entry =
            |secret: &str, entry: &str| Some(runner.k8s.get("Secret", secret)?.data["data"][entry].clone());
        if let Some(of) = entry("c-console", "ca.crt") {
            assert_eq!(entry("c-ca", "tls.crt"), Some(of));
        }
    }
}

fn run_creation(name: &str, moment: fn(u64) -> CrashPoint) {
    let mut runner = CrashRunner::new();
    let k8s = &runner.k8s;
    k8s.serve_pod_monitors();
    k8s.pool("p", "/var/lib/pool", json!({}));
    k8s.pool("q", "/var/lib/other", json!({ "nodeSelector": { "matchLabels": { "name": "n1" } } }));
    k8s.tenant("t", json!({ "perNode": { "ssd": { "reserved": "16Mi" } }, "namespaceSelector": {} }));
    k8s.profile("s", PRODUCT, 60);
    k8s.cluster(json!({
        "pools": [{ "name": "p" }, { "name": "q" }], "etcd": { "mode": "Managed" }, "slackProfiles": {},
        "injection": { "mode": "AdmissionPolicy", "namespaceSelector": { "matchLabels": { "engines": "yes" } } },
        "monitoring": { "mode": "PodMonitor" },
    }));
    runner.run_scenario(name, &mut Creation, moment);
}

#[test]
fn kill_before_any_write_converges_to_state_of_fresh_operator() {
    run_creation("kill_before_any_write_converges_to_state_of_fresh_operator", CrashPoint::Before);
}

#[test]
fn kill_after_any_write_converges_to_state_of_fresh_operator() {
    run_creation("kill_after_any_write_converges_to_state_of_fresh_operator", CrashPoint::After);
}

/// Deletes a pool that must be wiped, and an allocation whose queues exist, in a running cluster of one node.
struct Deletions {
    /// UID of the pool in the current run.
    pool: Option<String>,
}

impl Scenario for Deletions {
    fn prepare(&mut self, runner: &mut CrashRunner, operator: Option<Operator>) {
        runner.proxy.open(None);
        let operator = operator.unwrap_or_else(|| runner.start());
        let wiped = json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" });
        runner.k8s.pool("p", "/var/lib/pool", wiped);
        create_allocation(&runner.k8s, "a", json!({ "poolRef": { "name": "r" } }));
        runner.agents.sync_until(&runner.k8s, (ALLOCATION, "a"), ["Programmed", "True", "AsDesired"]);
        runner.agents.sync_until(&runner.k8s, ("SSDPool", "p"), ["Ready", "True", "AsDesired"]);
        runner.wait_idle(&operator);
        operator.kill();
        let k8s = &runner.k8s;
        self.pool = k8s.get("SSDPool", "p").expect("the object exists").metadata.uid;
        k8s.delete("SSDPool", "p");
        k8s.delete(ALLOCATION, "a");
    }

    /// Asserts that the pool remains until its node has wiped it, and the allocation until its queues are
    /// released.
    fn assert_invariant(&self, runner: &CrashRunner) {
        let k8s = &runner.k8s;
        if k8s.get("SSDPool", "p").is_none() {
            let done = (self.pool.clone().expect("the pool existed"), "n1".to_owned());
            assert!(runner.agents.wiped.contains(&done), "the pool was deleted before n1 wiped it");
        }
        let node = k8s.get("CacheNode", "n1").expect("the CacheNode exists");
        let has_queues =
            node.data["status"]["applied"]["queues"].as_array().is_some_and(|queues| !queues.is_empty());
        assert!(
            k8s.get(ALLOCATION, "a").is_some() || !has_queues,
            "the allocation was deleted before the agent released its queues"
        );
    }
}

fn run_deletions(name: &str, moment: fn(u64) -> CrashPoint) {
    let mut runner = CrashRunner::new();
    let k8s = &runner.k8s;
    k8s.raw_pool("r", json!({}));
    let pools = json!([{ "name": "p" }, { "name": "r" }]);
    k8s.cluster(json!({ "pools": pools, "agents": { "nodeSelector": { "name": "n1" } } }));
    runner.run_scenario(name, &mut Deletions { pool: None }, moment);
}

#[test]
fn kill_before_any_write_of_deletion_releases_nothing_early() {
    let name = "kill_before_any_write_of_deletion_releases_nothing_early";
    run_deletions(name, CrashPoint::Before);
}

#[test]
fn kill_after_any_write_of_deletion_releases_nothing_early() {
    let name = "kill_after_any_write_of_deletion_releases_nothing_early";
    run_deletions(name, CrashPoint::After);
}
