//! A model of one node: its allocations in the API server, its agent, and operators that are killed between two writes
//! and replaced. The invariants are checked after each step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reprise_crds::queues::{QueueGrant, QueueIsolation};
use reprise_crds::{GPUQueueAllocation, SSDPool};
use serde_json::{Value, json};

use crate::reconcile::allocation::build::{Operation, Pass, PendingWrite};
use crate::reconcile::allocation::dereference::{GrantInputs, NodePresence, ResolvedAllocation};
use crate::reconcile::allocation::grant::LendableController;
use crate::reconcile::allocation::lifecycle::{granted, has_grant};
use crate::reconcile::names::QUEUES_FINALIZER;
use crate::reconcile::test_objects::{merged, object, resource};

/// Random nodes, and events on each of them.
const NODES: u64 = 60;
const EVENTS: usize = 120;

/// Passes after which a node must be stable.
const PASSES_MAX: usize = 20;

/// No limit on the writes of a pass.
pub(super) const ALL: usize = usize::MAX;

pub(super) fn at(seconds: i64) -> Time {
    Time(Timestamp::from_second(1_700_000_000 + seconds).expect("a time"))
}

/// A generation of the spec, and uids of allocations.
type Queues = (i64, BTreeSet<String>);

/// The stored objects, the agent, and requests of killed operators.
#[derive(Default)]
pub(super) struct Model {
    pub(super) objects: BTreeMap<String, GPUQueueAllocation>,
    pub(super) now: i64,
    /// Serial numbers and budgets.
    pub(super) controllers: Vec<(&'static str, u32)>,
    /// Allocations whose writes the API server rejects.
    pub(super) unwritable: BTreeSet<String>,
    /// The spec of the `CacheNode`.
    pub(super) spec: Queues,
    /// Pairs that the agent holds, and the spec that it has applied.
    held: Queues,
    /// The agent's last report.
    pub(super) reported: Queues,
    /// Whether its last report was that it leaves.
    has_left: bool,
    /// Whether it has stopped and not reported since; before its first report it holds nothing.
    has_stopped: bool,
    /// Memory of the operator's process.
    fresh_finalizers: BTreeSet<String>,
    /// Grants that killed operators have sent.
    late: Vec<PendingWrite>,
    version: u64,
    /// Each grant, until it is released.
    granted: BTreeMap<String, Vec<QueueGrant>>,
}

impl Model {
    /// A node with two controllers of which 16 queue pairs each can be granted.
    pub(super) fn new() -> Model {
        Model { controllers: vec![("A", 16), ("B", 16)], ..Model::default() }
    }

    pub(super) fn create(&mut self, name: &str, more: Value) {
        self.version += 1;
        let metadata = json!({
            "name": name, "namespace": "n", "uid": format!("uid-{name}"), "generation": 1,
            "resourceVersion": self.version.to_string(), "creationTimestamp": at(self.now),
        });
        let spec =
            json!({ "nodeName": "n1", "gpuUuid": "GPU-0", "poolRef": { "name": "p" }, "queuePairs": 8 });
        self.objects.insert(name.to_owned(), resource(metadata, json!({ "spec": merged(spec, more) })));
    }

    fn delete(&mut self, name: &str) {
        self.version += 1;
        let object = self.objects.get_mut(name).expect("an object");
        object.metadata.resource_version = Some(self.version.to_string());
        object.metadata.deletion_timestamp = Some(at(self.now));
        if object.finalizers().is_empty() {
            self.objects.remove(name);
        }
    }

    pub(super) fn inputs(&self) -> GrantInputs {
        let shares = json!([{ "serial": "A", "queuePairs": 8 }]);
        let claim = |uid: &String| json!({ "uid": uid, "allocation": "n/x", "controllers": shares });
        let claims: Vec<Value> = self.spec.1.iter().map(claim).collect();
        let applied = |uid: &String| json!({ "uid": uid, "queuePairs": 8 });
        let applied: Vec<Value> = self.reported.1.iter().map(applied).collect();
        let left = json!([{
            "type": "AgentReady", "status": "False", "reason": "AgentGone", "lastTransitionTime": at(0),
        }]);
        let node = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode",
            "metadata": { "name": "n1", "generation": self.spec.0 },
            "spec": { "nodeName": "n1", "clusterRef": { "namespace": "n", "name": "c" }, "queues": claims },
            "status": {
                "conditions": if self.has_left { left } else { json!([]) }, "observedGeneration": self.reported.0,
                "lastUpdated": at(0), "controllers": [], "gpus": [], "applied": { "queues": applied },
            },
        });
        let lender = |(serial, budget): &(&str, u32)| LendableController {
            serial: (*serial).to_owned(),
            pool: "p".to_owned(),
            budget: *budget,
        };
        GrantInputs {
            node: "n1".to_owned(),
            presence: NodePresence::Present,
            is_silent: false,
            cache_node: Some(Arc::new(object(node))),
            lenders: self.controllers.iter().map(lender).collect(),
            allocations: self.objects.values().map(resolve).collect(),
        }
    }

    /// Runs a pass of an operator, which is killed after `most` writes. A grant that it sends then is late.
    pub(super) fn run_pass(&mut self, most: usize) -> Vec<String> {
        let fresh_finalizers = std::mem::take(&mut self.fresh_finalizers);
        let mut pass = Pass::new(self.inputs(), fresh_finalizers, at(self.now));
        let mut written = Vec::new();
        while let Some(write) = pass.next_write() {
            let name = write.object.name_any();
            if written.len() == most {
                // Only grants: a late end of a grant is harmless because the agent refuses pairs that others have. The
                // model leaves that out.
                if write.operation == Operation::Grant {
                    self.late.push(write);
                }
                return written;
            }
            if self.unwritable.contains(&name) {
                pass.record_failure(&write);
                continue;
            }
            written.push(format!("{:?} {name}", write.operation));
            let result = self.write(&write).expect("no other writer changes the object");
            pass.record_success(&write, Some(result));
        }
        self.fresh_finalizers = pass.fresh_finalizers;
        written
    }

    /// Runs passes until one writes nothing. Returns all writes.
    pub(super) fn run(&mut self) -> Vec<String> {
        let mut written = Vec::new();
        for _ in 0..PASSES_MAX {
            let more = self.run_pass(ALL);
            if more.is_empty() {
                return written;
            }
            written.extend(more);
        }
        panic!("the writes do not end: {written:?}");
    }

    /// Lets the late grant that was sent last arrive. Returns whether it takes effect.
    pub(super) fn arrive(&mut self) -> Option<bool> {
        let write = self.late.pop()?;
        let is_rejected = self.unwritable.contains(&write.object.name_any());
        Some(!is_rejected && self.write(&write).is_some())
    }

    /// Executes a write unless the object has changed since it was decided.
    fn write(&mut self, write: &PendingWrite) -> Option<GPUQueueAllocation> {
        let name = write.object.name_any();
        let object = self.objects.get_mut(&name)?;
        if object.resource_version() != write.object.resource_version() {
            return None;
        }
        self.version += 1;
        object.metadata.resource_version = Some(self.version.to_string());
        match &write.update {
            Some(update) => object.status = Some(update.status.clone()),
            None => *object.finalizers_mut() = self::object(write.body()["metadata"]["finalizers"].take()),
        }
        let result = object.clone();
        if result.metadata.deletion_timestamp.is_some() && result.finalizers().is_empty() {
            self.objects.remove(&name);
        }
        self.check();
        Some(result)
    }

    /// Writes all active grants into the spec of the `CacheNode`.
    pub(super) fn write_spec(&mut self) {
        let active = self.objects.values().filter(|object| has_grant(object));
        let active: BTreeSet<String> = active.filter_map(ResourceExt::uid).collect();
        if active != self.spec.1 {
            self.spec = (self.spec.0 + 1, active);
        }
    }

    /// The agent holds exactly the pairs of the current spec.
    fn apply_spec(&mut self) {
        self.held = (self.spec.0, if self.has_stopped { BTreeSet::new() } else { self.spec.1.clone() });
        self.check();
    }

    /// The agent reports its state.
    fn report(&mut self) {
        (self.reported, self.has_left, self.has_stopped) = (self.held.clone(), false, false);
    }

    /// Stops the agent. Unless it is killed, it reports that it holds nothing and leaves.
    fn stop_agent(&mut self, is_killed: bool) {
        self.held.1.clear();
        self.has_stopped = true;
        if !is_killed {
            self.has_left = true;
            self.reported.1.clear();
        }
    }

    /// The spec is written, and the agent applies and reports it.
    pub(super) fn run_agent(&mut self) {
        self.write_spec();
        self.apply_spec();
        self.report();
    }

    /// Checks the invariants of grants.
    fn check(&mut self) {
        for (serial, budget) in &self.controllers {
            let of_it = |object: &GPUQueueAllocation| {
                let of_it = granted(object).iter().filter(|grant| grant.serial.as_str() == *serial);
                of_it.map(|grant| grant.queue_pairs).sum::<u32>()
            };
            let holders: Vec<_> = self.objects.values().filter(|object| of_it(object) > 0).collect();
            let pairs: u32 = holders.iter().map(|object| of_it(object)).sum();
            assert!(pairs <= *budget, "{serial} grants {pairs} of {budget}: {holders:?}");
            let is_exclusive =
                |object: &&GPUQueueAllocation| object.spec.isolation == QueueIsolation::ExclusiveController;
            let is_shared = holders.len() > 1;
            assert!(
                !is_shared || !holders.iter().any(is_exclusive),
                "{serial} is not exclusive: {holders:?}"
            );
        }
        for uid in &self.held.1 {
            let mut all = self.objects.values().filter(|object| object.uid().as_ref() == Some(uid));
            let has_grant = all.any(|object| !granted(object).is_empty());
            assert!(has_grant, "the agent holds pairs of {uid}, which are free for others");
        }
        for (name, object) in &self.objects {
            let now = granted(object);
            let has_finalizer = object.finalizers().iter().any(|one| one == QUEUES_FINALIZER);
            assert!(now.is_empty() || has_finalizer, "{name} has a grant and no finalizer");
            match self.granted.get_mut(name) {
                // A released grant stays released.
                Some(then) if now.is_empty() => then.clear(),
                Some(then) => assert_eq!(then, now, "the grant of {name} has changed"),
                None if now.is_empty() => {}
                None => drop(self.granted.insert(name.clone(), now.to_vec())),
            }
        }
    }

    /// A random event caused by users, agents, the network or time.
    fn disturb(&mut self, random: &mut StdRng, number: usize) -> Option<bool> {
        let names: Vec<String> = self.objects.keys().cloned().collect();
        match random.random_range(0..12) {
            0..3 if names.len() < 10 => {
                let mut more = match random.random_range(0..4) {
                    0 => json!({ "qos": "Guaranteed", "isolation": "ExclusiveController" }),
                    1 => json!({ "qos": "BestEffort", "ttl": "2m" }),
                    2 => json!({ "isolation": "ExclusiveController", "ttl": "4m" }),
                    _ => json!({}),
                };
                more["queuePairs"] = json!(random.random_range(1..18));
                self.create(&format!("x{number}"), more);
            }
            3 if !names.is_empty() => self.delete(&names[random.random_range(0..names.len())]),
            // The spec is written; the agent applies it, reports, and stops, each at a random time.
            4..7 => match random.random_range(0..8) {
                0..3 => self.write_spec(),
                3..5 => self.apply_spec(),
                5..7 => self.report(),
                _ => self.stop_agent(random.random_bool(0.3)),
            },
            7..10 => return self.arrive(),
            10 if !names.is_empty() && self.unwritable.is_empty() => {
                self.unwritable.insert(names[random.random_range(0..names.len())].clone());
            }
            10 => self.unwritable.clear(),
            _ => self.now += random.random_range(0..90),
        }
        None
    }
}

fn resolve(object: &GPUQueueAllocation) -> ResolvedAllocation {
    let pool = SSDPool::new("p", self::object(json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } })));
    ResolvedAllocation { object: Arc::new(object.clone()), pool: Some(Arc::new(pool)), is_pool_on_node: true }
}

#[test]
fn random_events_never_grant_a_queue_pair_twice() {
    let (mut grants, mut landed, mut failed) = (0, 0, 0);
    let first =
        std::env::var("REPRISE_FIRST_SEED").map_or(0, |seed| seed.parse().expect("a seed is a number"));
    for seed in first..first + NODES {
        let mut random = StdRng::seed_from_u64(seed);
        let mut model = Model::new();
        model.controllers.push(("C", 10));
        for event in 0..EVENTS {
            match model.disturb(&mut random, event) {
                Some(true) => landed += 1,
                Some(false) => failed += 1,
                None => {}
            }
            model.run_pass(random.random_range(0..6));
        }
        // All allocations are deleted, and no pair stays used.
        model.unwritable.clear();
        for name in model.objects.keys().cloned().collect::<Vec<_>>() {
            model.delete(&name);
        }
        for _ in 0..3 {
            model.run_agent();
            model.run();
        }
        assert!(model.objects.is_empty(), "seed {seed}: {:?}", model.objects.keys());
        model.create("last", json!({ "queuePairs": 10 }));
        assert_eq!(model.run(), ["AddFinalizer last", "Grant last"], "seed {seed}");
        grants += model.granted.len();
    }
    assert!(
        grants > 100 && landed > 0 && failed > 0,
        "{grants} {landed} {failed}: too few events for a meaningful test"
    );
}
