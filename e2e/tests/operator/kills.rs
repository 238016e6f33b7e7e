//! The operator is killed right before or after each of its writes; whoever follows ends in the same objects.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use rand::seq::SliceRandom;
use reprise_e2e::{Interposer, Moment, OperatorFiles, PATIENCE, seed, wait_until};
use serde_json::{Value, json};

use crate::convergence::settle;
use crate::lab::{Lab, essence};

const NAME: &str = "killed_at_any_write_it_ends_in_what_a_fresh_one_makes";
/// Seconds that kills go on for, at the most; more of them cover all writes on a slow machine as well.
const SECONDS_VARIABLE: &str = "REPRISE_E2E_KILL_SECONDS";
const SECONDS: u64 = 45;
/// However slow the machine is, so many writes are covered.
const COVERED_MIN: usize = 3;
/// Nothing is written for so long once all is as it should be: pauses within a reconcile are milliseconds.
const QUIET: Duration = Duration::from_millis(400);
/// Whose conditions are compared: what is said of the rest depends on what was asked first.
const SAID: [(&str, &str, &str); 4] = [
    ("KVCacheCluster", "c", "Accepted"),
    ("KVCacheCluster", "c", "PoolsBound"),
    ("SSDPool", "p", "Accepted"),
    ("SSDPool", "q", "Accepted"),
];

/// An operator that is started again and again, and what it should come to.
struct Lives<'a> {
    lab: &'a Lab,
    gate: Interposer,
    files: OperatorFiles,
}

/// What there is and what is said of it.
fn outcome(lab: &Lab) -> BTreeMap<String, Value> {
    let mut outcome = essence(&lab.made());
    for (kind, name, condition) in SAID {
        let object = lab.get(kind, name).expect("it is there");
        let conditions = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let found = conditions.into_iter().find(|one| one["type"] == condition).unwrap_or_default();
        let said = json!([found["status"], found["reason"], found["observedGeneration"]]);
        outcome.insert(format!("{kind}/{name}/{condition}"), said);
    }
    outcome
}

/// Nothing that an operator has made is there any more, nor what it has said.
fn clear(lab: &Lab) {
    for (key, object) in lab.made() {
        lab.delete(key.split_once('/').expect("kind and name").0, &object.name_any());
    }
    for (kind, name) in [("KVCacheCluster", "c"), ("SSDPool", "p"), ("SSDPool", "q")] {
        let (api, params) = (lab.api(kind), PatchParams::default());
        let patch = Patch::Merge(json!({ "status": null }));
        lab.server.block_on(api.patch_status(name, &params, &patch)).expect("a status may be taken away");
    }
    wait_until("all of it is gone", PATIENCE, || lab.made().is_empty().then_some(()));
}

impl Lives<'_> {
    /// One that is killed at a moment, if it comes to that: not when all was done before.
    fn killed_at(&self, moment: Moment, wanted: &BTreeMap<String, Value>) -> bool {
        self.gate.open(Some(moment));
        let operator = self.files.start().expect("the operator starts");
        let (begun, mut is_killed) = (Instant::now(), false);
        while begun.elapsed() < PATIENCE {
            if self.gate.wait_closed(QUIET) {
                is_killed = true;
                break;
            }
            if self.is_quiet(&operator) && outcome(self.lab) == *wanted {
                break;
            }
        }
        operator.kill();
        is_killed
    }

    /// One that is left alone: it ends in what is wanted, and then writes nothing.
    fn finish(&self, wanted: &BTreeMap<String, Value>, after: &str) {
        self.gate.open(None);
        let operator = self.files.start().expect("the operator starts");
        let give_up = Instant::now() + PATIENCE;
        loop {
            let now = outcome(self.lab);
            if now == *wanted && self.is_quiet(&operator) && outcome(self.lab) == *wanted {
                break;
            }
            if Instant::now() > give_up {
                let differs = wanted.keys().chain(now.keys()).filter(|key| wanted.get(*key) != now.get(*key));
                let differs: Vec<_> = differs.map(|key| (key, wanted.get(key), now.get(key))).collect();
                panic!("{after}, the next one does not come to the same: {differs:#?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        operator.kill();
    }

    /// Whether it works and has written nothing for a while.
    fn is_quiet(&self, operator: &reprise_e2e::Operator) -> bool {
        let reconciled = operator.metric("reprise_operator_reconciles_total", "kind=\"KVCacheCluster\"");
        reconciled > 0.0 && self.gate.quiet_for().is_none_or(|quiet| quiet >= QUIET)
    }
}

#[test]
fn killed_at_any_write_it_ends_in_what_a_fresh_one_makes() {
    let lab = Lab::new();
    let mut random = seed::seeded(NAME);
    // A watch of a killed operator ends in the middle of a line.
    for words in
        ["a reconcile failed and is tried again", "a watch was lost and begins again", "the lease cannot be"]
    {
        lab.world.allow(words);
    }
    lab.pool("p", "/var/lib/pool", json!({}));
    lab.pool("q", "/var/lib/other", json!({ "nodeSelector": { "matchLabels": { "name": "n1" } } }));
    lab.cluster(json!({ "pools": [{ "name": "p" }, { "name": "q" }] }));
    let gate = lab.world.interposer(&lab.server);
    // All lives have one name, so that nobody waits for the lease of a dead one.
    let files = lab.operator_files("operator").through(&gate);
    let lives = Lives { lab: &lab, gate, files };
    let fresh = lives.files.start().expect("the operator starts");
    lab.wait_condition("KVCacheCluster", "c", ["PoolsBound", "True", "AsDesired"]);
    for node in ["n1", "n2"] {
        lab.wait_for("CacheNode", node);
    }
    settle(&lab);
    fresh.kill();
    let (wanted, writes) = (outcome(&lab), lives.gate.writes());
    assert!(writes > 10, "{writes} writes are not all that there is to write");

    let give_up = Instant::now() + seed::seconds(SECONDS_VARIABLE, SECONDS);
    // Each life is a write longer than the one before: the shortest that get anywhere, as whoever is started applies again what is there.
    clear(&lab);
    let mut steps = 0;
    while Instant::now() < give_up && lives.killed_at(Moment::After(steps + 1), &wanted) {
        steps += 1;
        assert!(steps <= 4 * writes, "each life comes further, and they get nowhere");
    }
    lives.finish(&wanted, &format!("after {steps} short lives"));

    // From nothing to each write, in any order: time may be over before all of them.
    let mut moments: Vec<Moment> = (1..=writes)
        .map(|write| if write % 2 == 0 { Moment::Before(write) } else { Moment::After(write) })
        .collect();
    moments.shuffle(&mut random);
    let (mut covered, mut not_reached) = (0, 0);
    for (index, moment) in moments.iter().enumerate() {
        if index >= COVERED_MIN && Instant::now() >= give_up {
            break;
        }
        clear(&lab);
        if lives.killed_at(*moment, &wanted) {
            covered += 1;
        } else {
            not_reached += 1;
        }
        lives.finish(&wanted, &format!("killed at {moment:?}"));
    }
    seed::say(&format!(
        "{NAME}: {steps} short lives; from nothing killed at {covered} of {writes} writes, {not_reached} more were not reached; \
         requests by method: {:?}",
        lives.gate.asked()
    ));
    assert!(covered > 0, "nobody was killed");
}
