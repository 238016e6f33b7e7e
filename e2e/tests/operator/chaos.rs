//! Random edits, deletions and faults, with two operators at once; then quiet, and it ends in what a fresh one makes.
//!
//! Faults: requests that are answered with 409 or 504, cut off before or after they are done, an API server that is started anew, operators that are
//! killed. An operator that loses its lease ends, as it should, and is started again as a kubelet would.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, DynamicObject};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_e2e::{Interposer, Operator, OperatorFiles, PATIENCE, seed, wait_until};
use serde_json::{Value, json};

use crate::convergence::{assert_writes_nothing, settle};
use crate::lab::{Lab, NOBODY, SPACE, SYSTEM, essence};

const NAME: &str = "whatever_happens_they_end_in_what_a_fresh_one_makes_and_write_nothing_more";
/// Random events, and how long they go on for, at the most.
const EVENTS: usize = 60;
const EVENTS_WITHIN: Duration = Duration::from_secs(25);
/// Of a hundred requests so many get a fault while there are any.
const FAULTS_PERCENT: u32 = 8;
/// Starts of the API server: each takes seconds.
const RESTARTS_MAX: usize = 1;
/// After the last fault a reconcile may wait for its turn, and a watch.
const HEALS_WITHIN: Duration = Duration::from_secs(60);

/// An operator, and what stands between it and the API server.
struct Replica {
    gate: Interposer,
    files: OperatorFiles,
    operator: Option<Operator>,
}

impl Replica {
    fn new(lab: &Lab, name: &str, namespace: &str) -> Replica {
        let gate = lab.world.interposer(&lab.server);
        let files = lab.world.operator(&lab.server, name, namespace).through(&gate);
        let files = files.control_plane(&format!("{SPACE}/c"), NOBODY);
        let mut replica = Replica { gate, files, operator: None };
        replica.start_anew();
        replica
    }

    fn start_anew(&mut self) {
        self.kill();
        self.operator = Some(self.files.start().expect("the operator starts"));
    }

    fn kill(&mut self) {
        if let Some(operator) = self.operator.take() {
            operator.kill();
        }
    }

    /// As a kubelet does: one that has ended is started again.
    fn tend(&mut self) {
        if !self.operator.as_mut().is_some_and(Operator::is_alive) {
            self.start_anew();
        }
    }

    fn disturb(&self, random: &mut StdRng) {
        self.gate.disturb(Some((StdRng::seed_from_u64(random.random()), FAULTS_PERCENT)));
    }
}

/// What the spec of the cluster may become.
fn specs() -> [Value; 5] {
    [
        json!({}),
        json!({ "pools": [{ "name": "p" }] }),
        json!({ "pools": [{ "name": "p" }, { "name": "q" }], "controlPlane": { "replicas": 3 } }),
        json!({ "cache": { "dram": "128Mi", "regionSize": "2Mi" } }),
        json!({ "agents": { "nodeSelector": { "name": "n1" } }, "pools": [{ "name": "q" }] }),
    ]
}

/// Something that may happen to what the operator makes, and to what it makes it of.
fn edit(lab: &Lab, random: &mut StdRng) {
    let made: Vec<(String, DynamicObject)> = lab.made().into_iter().collect();
    let specs = specs();
    let label = |value: &str| json!({ "metadata": { "labels": { "disk": value } } });
    match random.random_range(0..10) {
        0..4 => lab.cluster(specs[random.random_range(0..specs.len())].clone()),
        4..8 if !made.is_empty() => {
            let (key, object) = &made[random.random_range(0..made.len())];
            let api: Api<DynamicObject> = lab.api(key.split_once('/').expect("kind and name").0);
            // It may be gone by now.
            let _ = lab.server.block_on(api.delete(&object.name_any(), &DeleteParams::background()));
        }
        8 => {
            let value = if random.random_bool(0.5) { "fast" } else { "slow" };
            lab.merge("Node", "n2", &label(value));
        }
        _ => {
            let depth = if random.random_bool(0.5) { 64 } else { 128 };
            lab.pool("p", "/var/lib/pool", json!({ "queueDepth": depth }));
        }
    }
}

/// All that may happen, for a while.
fn rage(lab: &mut Lab, replicas: &mut [Replica; 2], random: &mut StdRng) {
    let (begun, mut restarts) = (Instant::now(), 0);
    let mut kills = 0;
    for _ in 0..EVENTS {
        if begun.elapsed() > EVENTS_WITHIN {
            break;
        }
        match random.random_range(0..20) {
            0..4 => {
                replicas[random.random_range(0..2)].start_anew();
                kills += 1;
            }
            4 if restarts < RESTARTS_MAX => {
                lab.server.kill();
                lab.server.restart();
                restarts += 1;
            }
            5 => replicas[random.random_range(0..2)].gate.disturb(None),
            6..9 => replicas[random.random_range(0..2)].disturb(random),
            _ => edit(lab, random),
        }
        replicas.iter_mut().for_each(Replica::tend);
        std::thread::sleep(Duration::from_millis(random.random_range(0..150)));
    }
    let faults: u64 = replicas.iter().map(|replica| replica.gate.faults()).sum();
    seed::say(&format!("{NAME}: {kills} kills, {restarts} restarts of the API server, {faults} faults"));
}

#[test]
fn whatever_happens_they_end_in_what_a_fresh_one_makes_and_write_nothing_more() {
    let mut lab = Lab::new();
    let mut random = seed::seeded(NAME);
    for words in [
        "a reconcile failed and is tried again",
        "a watch was lost and begins again",
        "what belongs to no cluster could not be removed",
        "the lease cannot be",
        "the lease could not be renewed",
        "another replica holds the lease",
        "the lease is lost",
    ] {
        lab.world.allow(words);
    }
    let selected = json!({ "matchLabels": { "disk": "fast" } });
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.pool("q", "/var/lib/other", json!({ "nodeSelector": selected }));
    lab.cluster(json!({}));
    // With a lease of its own, so that both work at once.
    let mut replicas = [Replica::new(&lab, "first", SYSTEM), Replica::new(&lab, "second", "cache")];
    for replica in &replicas {
        replica.disturb(&mut random);
    }
    rage(&mut lab, &mut replicas, &mut random);

    for replica in &mut replicas {
        replica.gate.disturb(None);
        replica.tend();
    }
    // What it had never before: everything is looked at again, whatever waits.
    // The depth of both: an agent has one for all its pools.
    lab.pool("p", "/var/lib/pool", json!({ "queueDepth": 96 }));
    lab.pool("q", "/var/lib/other", json!({ "queueDepth": 96, "nodeSelector": selected }));
    lab.cluster(json!({ "pools": [{ "name": "p" }, { "name": "q" }], "cache": { "dram": "96Mi", "regionSize": "2Mi" } }));
    let bound = ["PoolsBound", "True", "AsDesired"];
    lab.wait_condition_within(HEALS_WITHIN, ("KVCacheCluster", "c"), bound);
    for replica in &mut replicas {
        replica.tend();
    }
    settle(&lab);
    let after_faults = essence(&lab.made());
    for replica in &mut replicas {
        replica.kill();
    }

    for (key, object) in lab.made() {
        lab.delete(key.split_once('/').expect("kind and name").0, &object.name_any());
    }
    wait_until("all of it is gone", PATIENCE, || lab.made().is_empty().then_some(()));
    // The lease of the killed one has to run out first.
    let leases: Api<Lease> = Api::namespaced(lab.client(), SYSTEM);
    lab.server.block_on(leases.delete("reprise-operator", &DeleteParams::default())).expect("it was held");
    let fresh = lab.operator();
    lab.wait_for("CacheNode", "n1");
    settle(&lab);
    let anew = essence(&lab.made());
    let (left, right): (Vec<_>, Vec<_>) = (after_faults.keys().collect(), anew.keys().collect());
    assert_eq!(left, right);
    for (key, object) in &anew {
        assert_eq!(after_faults[key], *object, "{key}");
    }
    assert_writes_nothing(&lab, &fresh);
    fresh.kill();
}
