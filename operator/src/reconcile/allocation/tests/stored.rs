//! Simulated API server objects of one node, and an operator whose writes may be rejected or that is killed
//! between two writes. The invariants are checked after each write.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use reprise_crds::fields::Percent;
use reprise_crds::queues::QueueIsolation;
use reprise_crds::status::{ConditionStatus, ConditionType, find};
use reprise_crds::{CacheNode, GPUQueueAllocation, SSDPool};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::reconcile::allocation::build::{Operation, PendingWrite, pending_writes};
use crate::reconcile::allocation::dereference::{GrantInputs, NodePresence, ResolvedAllocation};
use crate::reconcile::allocation::failed_writes::{FailedWrites, WriteFailure};
use crate::reconcile::allocation::grant::{LendableController, budget};
use crate::reconcile::allocation::lifecycle;
use crate::reconcile::allocation::write_queue::WriteQueue;
use crate::reconcile::assignment::PoolAssignment;
use crate::reconcile::names::QUEUES_FINALIZER;

/// No limit on the writes of a pass.
pub(super) const ALL: usize = usize::MAX;

/// The stored objects, and the state of the agent.
pub(in crate::reconcile::allocation) struct Stored {
    pub(super) objects: BTreeMap<String, GPUQueueAllocation>,
    /// Queue pairs that the agent reports as created, by uid.
    pub(super) queues: BTreeMap<String, u32>,
    /// Their numbers by controller, the same for each allocation.
    pub(super) created: Vec<Value>,
    /// Generation of the spec, and uids of the allocations that it lists.
    pub(super) claims: (i64, BTreeSet<String>),
    /// Generation that the agent has applied, and uids of allocations whose pairs it holds.
    pub(super) held: (i64, BTreeSet<String>),
    /// Generation that the agent has reported.
    pub(super) observed: i64,
    /// Whether its last report was that it leaves.
    pub(super) agent_has_left: bool,
    /// Whether it runs and has reported; before its first report it holds nothing.
    pub(super) agent_runs: bool,
    pub(super) gpus: Vec<Value>,
    pub(super) controllers: Vec<(&'static str, u32)>,
    /// Percentage of queue pairs that may be granted.
    pub(super) percent: Percent,
    pub(super) presence: NodePresence,
    pub(super) now: i64,
    pub(super) versions: u64,
    /// Allocations whose writes the API server rejects.
    pub(super) unwritable: BTreeSet<String>,
    /// Uids of allocations to which the operator's process added the finalizer, without an attempt to grant since.
    pub(super) fresh_finalizers: BTreeSet<String>,
    /// Grants at the previous check.
    pub(super) granted: BTreeMap<String, Shares>,
}

/// Queue pairs by serial number.
pub(super) type Shares = Vec<(String, u32)>;

pub(super) fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).expect("an object")
}

pub(super) fn at(seconds: i64) -> Time {
    Time(Timestamp::from_second(1_700_000_000 + seconds).expect("a time"))
}

pub(super) fn with(mut base: Value, more: Value) -> Value {
    base.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
    base
}

impl Stored {
    /// A node with two controllers of which 16 queue pairs each can be granted.
    pub(in crate::reconcile::allocation) fn new() -> Stored {
        Stored {
            objects: BTreeMap::new(),
            queues: BTreeMap::new(),
            created: Vec::new(),
            claims: (0, BTreeSet::new()),
            held: (0, BTreeSet::new()),
            observed: 0,
            agent_has_left: false,
            agent_runs: true,
            gpus: Vec::new(),
            controllers: vec![("A", 32), ("B", 32)],
            percent: Percent(50),
            presence: NodePresence::Present,
            now: 0,
            versions: 1,
            unwritable: BTreeSet::new(),
            fresh_finalizers: BTreeSet::new(),
            granted: BTreeMap::new(),
        }
    }

    pub(super) fn create(&mut self, name: &str, more: Value) {
        let spec = with(
            json!({ "nodeName": "n1", "gpuUuid": "GPU-0", "poolRef": { "name": "p" }, "queuePairs": 8 }),
            more,
        );
        let made = object(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "GPUQueueAllocation",
            "metadata": {
                "name": name, "namespace": "n", "uid": format!("uid-{name}"), "generation": 1, "resourceVersion": "1",
                "creationTimestamp": at(self.now),
            },
            "spec": spec,
        }));
        self.objects.insert(name.to_owned(), made);
    }

    pub(super) fn delete(&mut self, name: &str) {
        let now = at(self.now);
        let Some(object) = self.objects.get_mut(name) else { return };
        if object.finalizers().is_empty() {
            self.objects.remove(name);
            return;
        }
        self.versions += 1;
        object.metadata.resource_version = Some(self.versions.to_string());
        object.metadata.generation = Some(2);
        object.metadata.deletion_timestamp = Some(now);
    }

    pub(in crate::reconcile::allocation) fn found(&self) -> GrantInputs {
        let controllers: Vec<Value> = self
            .controllers
            .iter()
            .map(|(serial, pairs)| {
                json!({
                    "serial": serial, "pciAddress": "0000:01:00.0", "pool": "p", "queuePairs": pairs, "queuePairsLent": 0,
                })
            })
            .collect();
        let queue = |(uid, pairs): (&String, &u32)| json!({ "uid": uid, "queuePairs": pairs, "created": self.created });
        let queues: Vec<Value> = self.queues.iter().map(queue).collect();
        let claim = |uid: &String| json!({ "uid": uid, "allocation": "n/x", "controllers": [{ "serial": "A", "queuePairs": 8 }] });
        let claims: Vec<Value> = self.claims.1.iter().map(claim).collect();
        let left = json!([{
            "type": "AgentReady", "status": "False", "reason": "AgentGone", "lastTransitionTime": at(0),
        }]);
        let node: CacheNode = object(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode",
            "metadata": { "name": "n1", "generation": self.claims.0 },
            "spec": { "nodeName": "n1", "clusterRef": { "namespace": "n", "name": "c" }, "queues": claims },
            "status": {
                "conditions": if self.agent_has_left { left } else { json!([]) },
                "observedGeneration": self.observed, "lastUpdated": at(0), "controllers": controllers, "gpus": self.gpus, "applied": { "queues": queues },
            },
        }));
        let lender = |(serial, pairs): &(&str, u32)| LendableController {
            serial: (*serial).to_owned(),
            pool: "p".to_owned(),
            budget: budget(*pairs, self.percent),
        };
        GrantInputs {
            node: "n1".to_owned(),
            presence: self.presence,
            is_silent: false,
            cache_node: (self.presence != NodePresence::Removed).then(|| Arc::new(node)),
            lenders: self.controllers.iter().map(lender).collect(),
            allocations: self.objects.values().map(resolve).collect(),
            fresh_finalizers: self.fresh_finalizers.clone(),
            skipped: BTreeSet::new(),
        }
    }

    /// Executes a pass and is killed after `most` attempts. Returns the successful writes.
    pub(super) fn run_pass(&mut self, most: usize) -> Vec<String> {
        let mut queue = WriteQueue::new(self.found(), at(self.now));
        let (mut tries, mut written) = (0, Vec::new());
        while let Some(step) = queue.next_write() {
            if tries == most {
                self.fresh_finalizers.clear();
                break;
            }
            tries += 1;
            match self.try_to_write(step.clone()) {
                Ok(message) => written.push(message),
                Err(failure) => queue.record_failure(&step, failure),
            }
        }
        written
    }

    /// Returns the pending writes.
    pub(super) fn due(&self) -> Vec<PendingWrite> {
        pending_writes(&self.found(), &at(self.now))
    }

    /// Executes earlier decided writes, continuing after failures as far as allowed. Returns the successful
    /// writes.
    pub(super) fn execute(&mut self, due: Vec<PendingWrite>) -> Vec<String> {
        let (mut failed, mut written) = (FailedWrites::default(), Vec::new());
        for step in due {
            if !failed.allows(&step) {
                continue;
            }
            match self.try_to_write(step.clone()) {
                Ok(message) => written.push(message),
                Err(failure) => failed.record_failure(&step, failure),
            }
        }
        written
    }

    /// Executes a write and returns its name.
    fn try_to_write(&mut self, step: PendingWrite) -> Result<String, WriteFailure> {
        if matches!(step.operation, Operation::Grant(_) | Operation::RemoveFinalizer) {
            self.fresh_finalizers.remove(&step.object.uid().expect("a uid"));
        }
        if let Some(failure) = self.write_failure(&step.object) {
            return Err(failure);
        }
        let message = format!("{} {}", name_of(&step.operation), step.object.name_any());
        self.write(step);
        self.check();
        Ok(message)
    }

    fn write_failure(&self, object: &GPUQueueAllocation) -> Option<WriteFailure> {
        let name = object.name_any();
        let stored = self.objects.get(&name);
        let is_same = stored.is_some_and(|stored| stored.resource_version() == object.resource_version());
        match () {
            () if self.unwritable.contains(&name) => Some(WriteFailure::Rejected),
            () if !is_same => Some(WriteFailure::Conflict),
            () => None,
        }
    }

    /// Writes all active grants into the spec of the `CacheNode`.
    pub(super) fn write_spec(&mut self) {
        let active = self.objects.values().filter(|object| lifecycle::has_grant(object));
        let active: BTreeSet<String> = active.filter_map(ResourceExt::uid).collect();
        if active != self.claims.1 {
            self.claims = (self.claims.0 + 1, active);
        }
    }

    /// The agent holds exactly the pairs of the current spec.
    pub(super) fn agent_applies_spec(&mut self) {
        let keeps = if self.agent_runs { self.claims.1.clone() } else { BTreeSet::new() };
        self.held = (self.claims.0, keeps);
        self.check();
    }

    /// Stops the agent. Unless it is killed, it reports that it holds nothing and leaves.
    pub(super) fn stop_agent(&mut self, is_killed: bool) {
        self.held.1.clear();
        self.agent_runs = false;
        if !is_killed {
            (self.agent_has_left, self.queues) = (true, BTreeMap::new());
        }
    }

    /// The agent reports its state.
    pub(super) fn agent_reports(&mut self) {
        (self.observed, self.agent_has_left, self.agent_runs) = (self.held.0, false, true);
        self.queues = self.held.1.iter().map(|uid| (uid.clone(), 8)).collect();
    }

    /// Simulates a concurrent write by another client.
    pub(super) fn modify(&mut self, name: &str) {
        self.versions += 1;
        let object = self.objects.get_mut(name).expect("an object");
        object.metadata.resource_version = Some(self.versions.to_string());
    }

    /// Adds a finalizer of another component.
    pub(super) fn add_foreign_finalizer(&mut self, name: &str) {
        let object = self.objects.get_mut(name).expect("an object");
        object.finalizers_mut().push("others.example/hold".to_owned());
    }

    pub(super) fn run_until_stable(&mut self) {
        for _ in 0..20 {
            if self.run_pass(ALL).is_empty() {
                return;
            }
        }
        panic!("the writes do not end: {:?}", self.run_pass(ALL));
    }

    fn write(&mut self, step: PendingWrite) {
        let name = step.object.name_any();
        let object = self.objects.get_mut(&name).expect("an object");
        self.versions += 1;
        object.metadata.resource_version = Some(self.versions.to_string());
        match step.operation {
            Operation::AddFinalizer => {
                object.finalizers_mut().push(QUEUES_FINALIZER.to_owned());
                self.fresh_finalizers.insert(object.uid().expect("a uid"));
            }
            Operation::RemoveFinalizer => {
                object.finalizers_mut().retain(|one| one != QUEUES_FINALIZER);
                if object.metadata.deletion_timestamp.is_some() {
                    assert!(!self.queues.contains_key(&format!("uid-{name}")), "{name} has queues");
                    if object.finalizers().is_empty() {
                        self.objects.remove(&name);
                    }
                }
            }
            Operation::EndGrant(update) | Operation::Grant(update) | Operation::UpdateStatus(update) => {
                object.status = Some(update.status);
            }
        }
    }

    pub(super) fn grants(&self, name: &str) -> Value {
        let status = self.objects[name].status.as_ref();
        json!(status.map(|status| status.allocations.clone()).unwrap_or_default())
    }

    fn shares(&self, name: &str) -> Shares {
        let grants = self.objects[name].status.iter().flat_map(|status| &status.allocations);
        grants.map(|grant| (grant.serial.to_string(), grant.queue_pairs)).collect()
    }

    /// Checks the invariants of grants.
    fn check(&mut self) {
        let mut held: BTreeMap<String, Vec<(String, u32)>> = BTreeMap::new();
        for (name, object) in &self.objects {
            for grant in object.status.iter().flat_map(|status| &status.allocations) {
                let has_finalizer = object.finalizers().iter().any(|one| one == QUEUES_FINALIZER);
                assert!(has_finalizer, "{name} has a grant and no finalizer");
                held.entry(grant.serial.to_string()).or_default().push((name.clone(), grant.queue_pairs));
            }
        }
        for (serial, holders) in &held {
            let pairs: u32 = holders.iter().map(|(_, pairs)| pairs).sum();
            // A controller that is gone grants nothing more, but its grants remain.
            let Some((_, all)) = self.controllers.iter().find(|(one, _)| one == serial) else { continue };
            assert!(pairs <= all / 2, "{serial} grants {pairs} of {all}: {holders:?}");
            let is_exclusive =
                |name: &str| self.objects[name].spec.isolation == QueueIsolation::ExclusiveController;
            let exclusive = holders.iter().any(|(name, _)| is_exclusive(name));
            assert!(!exclusive || holders.len() == 1, "{serial} is not exclusive: {holders:?}");
        }
        for uid in &self.held.1 {
            let mut all = self.objects.values().filter(|object| object.uid().as_ref() == Some(uid));
            let has_grant =
                all.any(|object| object.status.as_ref().is_some_and(|status| !status.allocations.is_empty()));
            assert!(has_grant, "the agent holds pairs of {uid}, which were granted to others");
        }
        for name in self.objects.keys() {
            let now = self.shares(name);
            match self.granted.get(name) {
                Some(then) => {
                    let is_kept = now == *then || now.is_empty();
                    assert!(is_kept, "the grant of {name} has changed: {then:?} {now:?}");
                }
                None if !now.is_empty() => drop(self.granted.insert(name.clone(), now)),
                None => {}
            }
        }
        // A released grant stays released.
        let is_over = |name: &&String| self.objects.contains_key(*name) && self.shares(name).is_empty();
        let over: Vec<String> = self.granted.keys().filter(is_over).cloned().collect();
        for name in over {
            self.granted.insert(name, Shares::new());
        }
    }

    pub(super) fn condition(
        &self,
        name: &str,
        kind: ConditionType,
    ) -> Option<(ConditionStatus, String, String)> {
        let status = self.objects[name].status.as_ref()?;
        let found = find(&status.conditions, kind)?;
        Some((found.status, found.reason.clone(), found.message.clone()))
    }

    /// Asserts the status and reason of a condition, and returns its message.
    pub(super) fn expect(
        &self,
        name: &str,
        kind: ConditionType,
        status: ConditionStatus,
        reason: &str,
    ) -> String {
        let (has, why, message) =
            self.condition(name, kind).unwrap_or_else(|| panic!("{name} has no condition {kind}"));
        assert_eq!((has, why.as_str()), (status, reason), "{name}, {kind}: {message}");
        message
    }
}

fn resolve(object: &GPUQueueAllocation) -> ResolvedAllocation {
    let pool = SSDPool::new("p", self::object(json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } })));
    ResolvedAllocation {
        object: Arc::new(object.clone()),
        pool: Some(Arc::new(pool)),
        assignment: PoolAssignment {
            cluster: Some("n/c".to_owned()),
            nodes: vec!["n1".to_owned()],
            ..PoolAssignment::default()
        },
        profile: None,
    }
}

fn name_of(operation: &Operation) -> &'static str {
    match operation {
        Operation::AddFinalizer => "add-finalizer",
        Operation::EndGrant(_) => "end-grant",
        Operation::Grant(_) => "grant",
        Operation::UpdateStatus(_) => "update",
        Operation::RemoveFinalizer => "remove-finalizer",
    }
}
