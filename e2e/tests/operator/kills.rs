//! The operator is killed right before and right after each of its writes; whoever follows ends in the same objects.
//!
//! Two stories are told again and again, each time with a kill at another moment: a cluster is made of nothing, and what must not go before nodes have
//! done something is deleted. The seed draws which moments a run covers and their order, and their number does not depend on how fast the machine is.

use std::time::{Duration, Instant};

use rand::seq::SliceRandom;
use reprise_e2e::{Interposer, Moment, Operator, OperatorFiles, PATIENCE, seed, wait_until};
use serde_json::json;

use crate::agents::{Agents, PRODUCT};
use crate::in_use::TOO_SHORT;
use crate::lab::{Lab, SPACE};
use crate::outcome::{Outcome, assert_same, clear, outcome};
use crate::queues::{KIND as ALLOCATION, ask};

/// Percentage of the moments of one story that a run covers; 100 covers all.
const PERCENT_VARIABLE: &str = "REPRISE_E2E_KILL_PERCENT";
const PERCENT: u64 = 35;
/// No story has fewer writes.
const WRITES_MIN: u64 = 8;
/// Nothing is written for so long once all is as it should be: pauses within a reconcile are milliseconds.
const QUIET: Duration = Duration::from_millis(250);
/// Seconds for which nothing must be heard of sessions: there are none here, and what guards a wipe is looked at twice.
const UNUSED: u64 = 1;

/// What is told again and again.
trait Story {
    /// Brings everything to the beginning. An operator may be at work, and is killed.
    fn begin(&mut self, lives: &mut Lives, operator: Option<Operator>);
    /// What must be so at any moment.
    fn check(&self, lives: &Lives);
}

/// An operator that is started again and again, and the agents beside it.
struct Lives {
    lab: Lab,
    gate: Interposer,
    files: OperatorFiles,
    agents: Agents,
}

impl Lives {
    fn new() -> Lives {
        let lab = Lab::new();
        // A watch of a killed operator ends in the middle of a line.
        for words in [
            "a reconcile failed and is tried again",
            "a watch was lost and begins again",
            "the lease cannot be",
            TOO_SHORT,
        ] {
            lab.world.allow(words);
        }
        let gate = lab.world.interposer(&lab.server);
        // All lives have one name, so that nobody waits for the lease of a dead one.
        let files = lab.operator_files("operator").through(&gate).unused_for(UNUSED);
        Lives { lab, gate, files, agents: Agents::default() }
    }

    fn start(&self) -> Operator {
        self.files.start().unwrap_or_else(|refused| panic!("the operator does not start: {refused:?}"))
    }

    /// One that is killed at a moment, if it comes to that: not when all was done before.
    fn killed_at(&mut self, moment: Moment, wanted: &Outcome) -> bool {
        self.gate.open(Some(moment));
        let operator = self.start();
        let (begun, mut is_killed) = (Instant::now(), false);
        while begun.elapsed() < PATIENCE {
            self.agents.obey(&self.lab);
            if self.gate.wait_closed(Duration::from_millis(20)) {
                is_killed = true;
                break;
            }
            if self.is_quiet(&operator) && outcome(&self.lab) == *wanted {
                break;
            }
        }
        operator.kill();
        is_killed
    }

    /// One that is left alone: it ends in what is wanted, and then writes nothing. It goes on.
    fn finish(&mut self, wanted: &Outcome, after: &str) -> Operator {
        self.gate.open(None);
        let operator = self.start();
        let give_up = Instant::now() + PATIENCE;
        loop {
            self.agents.obey(&self.lab);
            let now = outcome(&self.lab);
            if now == *wanted && self.is_quiet(&operator) && outcome(&self.lab) == *wanted {
                return operator;
            }
            if Instant::now() > give_up {
                seed::say(&format!("{after}, the next one does not come to the same"));
                assert_same(wanted, &now);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether it works and has written nothing for a while.
    fn is_quiet(&self, operator: &Operator) -> bool {
        let reconciled = operator.metric("reprise_operator_reconciles_total{", "kind=\"KVCacheCluster\"");
        reconciled > 0.0 && self.gate.quiet_for().is_none_or(|quiet| quiet >= QUIET)
    }

    /// Waits until nothing is written any more; what there is then.
    fn rest(&mut self, operator: &Operator) -> Outcome {
        wait_until("nothing is written any more", PATIENCE, || {
            std::thread::sleep(Duration::from_millis(20));
            (!self.agents.obey(&self.lab) && self.is_quiet(operator)).then_some(())
        });
        outcome(&self.lab)
    }

    /// Tells a story again for each of its writes, with a kill at this moment of it.
    fn tell(&mut self, name: &str, story: &mut impl Story, moment: fn(u64) -> Moment) {
        let mut random = seed::seeded(name);
        story.begin(self, None);
        self.gate.open(None);
        let operator = self.start();
        let mut wanted = self.rest(&operator);
        // Some of what is said is found out in its own time.
        for _ in 0..3 {
            std::thread::sleep(10 * QUIET);
            wanted = self.rest(&operator);
        }
        let writes = self.gate.writes();
        assert!(writes >= WRITES_MIN, "{writes} writes are not all that there is to write");
        let mut moments: Vec<Moment> = (1..=writes).map(moment).collect();
        moments.shuffle(&mut random);
        let percent = seed::number(PERCENT_VARIABLE, PERCENT);
        let wanted_kills = (moments.len() as u64 * percent).div_ceil(100) as usize;
        let (mut last, mut covered, mut not_reached) = (Some(operator), 0, Vec::new());
        for moment in moments {
            if covered == wanted_kills {
                break;
            }
            story.begin(self, last.take());
            if self.killed_at(moment, &wanted) {
                covered += 1;
            } else {
                not_reached.push(moment);
            }
            story.check(self);
            last = Some(self.finish(&wanted, &format!("{name}: killed at {moment:?}")));
            story.check(self);
        }
        if let Some(operator) = last {
            operator.kill();
        }
        seed::say(&format!(
            "{name}: killed at {covered} of {writes} writes; all was done before these came: {not_reached:?}"
        ));
        // A life that finds part of the work done has fewer writes than the first one.
        assert!(covered * 2 >= wanted_kills, "killed at {covered} of {writes} writes, not at {wanted_kills}");
    }
}

/// A cluster with two pools, an etcd of its own, and an object of every kind that the operator can make, is made.
struct FromNothing;

impl Story for FromNothing {
    fn begin(&mut self, lives: &mut Lives, operator: Option<Operator>) {
        if let Some(operator) = operator {
            operator.kill();
        }
        clear(&lives.lab);
    }

    /// No certificates of etcd are there without the authority that they are of.
    fn check(&self, lives: &Lives) {
        let entry =
            |secret: &str, entry: &str| Some(lives.lab.get("Secret", secret)?.data["data"][entry].clone());
        if let Some(of) = entry("c-etcd-tls", "ca.crt") {
            assert_eq!(entry("c-etcd-ca", "tls.crt"), Some(of));
        }
    }
}

fn tell_from_nothing(name: &str, moment: fn(u64) -> Moment) {
    let mut lives = Lives::new();
    let lab = &lives.lab;
    lab.serve_pod_monitors();
    // Claims of devices that others have may be made.
    let labels = json!({ "resource.kubernetes.io/admin-access": "true" });
    lab.apply(
        &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": SPACE, "labels": labels } }),
    );
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.pool("q", "/var/lib/other", json!({ "nodeSelector": { "matchLabels": { "name": "n1" } } }));
    lab.tenant("t", json!({ "perNode": { "ssd": { "reserved": "16Mi" } }, "namespaceSelector": {} }));
    lab.profile("s", PRODUCT, 60);
    lab.cluster(json!({
        "pools": [{ "name": "p" }, { "name": "q" }], "etcd": { "mode": "Managed" }, "slackProfiles": {},
        "agents": { "gpuAccess": { "mode": "Dra", "deviceClassName": "gpu.example.com" } },
        "injection": { "mode": "AdmissionPolicy", "namespaceSelector": { "matchLabels": { "engines": "yes" } } },
        "monitoring": { "mode": "PodMonitor" },
    }));
    lives.tell(name, &mut FromNothing, moment);
}

#[test]
fn killed_before_any_write_it_ends_in_what_a_fresh_one_makes() {
    tell_from_nothing("killed_before_any_write_it_ends_in_what_a_fresh_one_makes", Moment::Before);
}

#[test]
fn killed_after_any_write_it_ends_in_what_a_fresh_one_makes() {
    tell_from_nothing("killed_after_any_write_it_ends_in_what_a_fresh_one_makes", Moment::After);
}

/// Of a cluster of one node that goes on, a pool is deleted that is to be wiped, and an allocation whose queues the agent has made.
struct Deletions {
    /// Unique id of the pool of this time.
    pool: Option<String>,
}

impl Story for Deletions {
    fn begin(&mut self, lives: &mut Lives, operator: Option<Operator>) {
        lives.gate.open(None);
        let operator = operator.unwrap_or_else(|| lives.start());
        let wiped = json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" });
        lives.lab.pool("p", "/var/lib/pool", wiped);
        ask(&lives.lab, "a", json!({ "poolRef": { "name": "r" } }));
        lives.agents.obey_until(&lives.lab, (ALLOCATION, "a"), ["Programmed", "True", "AsDesired"]);
        lives.agents.obey_until(&lives.lab, ("SSDPool", "p"), ["Ready", "True", "AsDesired"]);
        lives.rest(&operator);
        operator.kill();
        let lab = &lives.lab;
        self.pool = lab.get("SSDPool", "p").expect("it is there").metadata.uid;
        lab.delete("SSDPool", "p");
        lab.delete(ALLOCATION, "a");
    }

    /// The pool does not go before the node has wiped it, nor the allocation before its queues have.
    fn check(&self, lives: &Lives) {
        let lab = &lives.lab;
        if lab.get("SSDPool", "p").is_none() {
            let done = (self.pool.clone().expect("it was there"), "n1".to_owned());
            assert!(lives.agents.wiped.contains(&done), "the pool has gone, and n1 has not wiped it");
        }
        let node = lab.get("CacheNode", "n1").expect("the cluster goes on");
        let made = node.data["status"]["applied"]["queues"].as_array().is_some_and(|made| !made.is_empty());
        assert!(
            lab.get(ALLOCATION, "a").is_some() || !made,
            "the allocation has gone, and the agent has its queues"
        );
    }
}

fn tell_of_deletions(name: &str, moment: fn(u64) -> Moment) {
    let mut lives = Lives::new();
    let lab = &lives.lab;
    lab.raw_pool("r", json!({}));
    let pools = json!([{ "name": "p" }, { "name": "r" }]);
    lab.cluster(json!({ "pools": pools, "agents": { "nodeSelector": { "name": "n1" } } }));
    lives.tell(name, &mut Deletions { pool: None }, moment);
}

#[test]
fn killed_before_any_write_of_a_deletion_it_lets_go_what_a_fresh_one_does_and_nothing_sooner() {
    let name = "killed_before_any_write_of_a_deletion_it_lets_go_what_a_fresh_one_does_and_nothing_sooner";
    tell_of_deletions(name, Moment::Before);
}

#[test]
fn killed_after_any_write_of_a_deletion_it_lets_go_what_a_fresh_one_does_and_nothing_sooner() {
    let name = "killed_after_any_write_of_a_deletion_it_lets_go_what_a_fresh_one_does_and_nothing_sooner";
    tell_of_deletions(name, Moment::After);
}
