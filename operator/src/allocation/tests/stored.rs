//! What an API server would have of a node's allocations, and an operator that writes to it and is killed between two writes, or whose writes are
//! refused. After each write it is checked that what always holds does.

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

use crate::allocation::build::{Step, What, steps};
use crate::allocation::dereference::{Found, Presence, Referring};
use crate::allocation::grant::{Lender, budget};
use crate::allocation::life;
use crate::allocation::room::{Failure, Room};
use crate::allocation::turn::Turn;
use crate::names::QUEUES_FINALIZER;
use crate::plan::PoolPlan;

/// Everything that a turn has to write.
pub(super) const ALL: usize = usize::MAX;

/// What is stored, and what the agent says.
pub(super) struct Stored {
    pub(super) objects: BTreeMap<String, GPUQueueAllocation>,
    /// Queue pairs that the agent says that it has made, by unique id.
    pub(super) queues: BTreeMap<String, u32>,
    /// Unique ids of those that it is told to keep, and the generation of that.
    pub(super) told: (i64, BTreeSet<String>),
    /// The same as it has seen it last; of all of them it has something.
    pub(super) seen: (i64, BTreeSet<String>),
    /// The generation that it speaks of.
    pub(super) observed: i64,
    /// Whether its last word was that it leaves.
    pub(super) has_left: bool,
    /// Whether it runs, and has said so: before that it keeps nothing.
    pub(super) is_known: bool,
    pub(super) gpus: Vec<Value>,
    pub(super) controllers: Vec<(&'static str, u32)>,
    /// What may be lent of them, hundredths.
    pub(super) lent: Percent,
    pub(super) presence: Presence,
    pub(super) now: i64,
    pub(super) versions: u64,
    /// Those that the API server lets nobody write to.
    pub(super) broken: BTreeSet<String>,
    /// Unique ids of those that the operator's process has given the finalizer, for a grant that it has not tried to write since.
    pub(super) held: BTreeSet<String>,
    /// Grants that were seen.
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
    /// A node with two controllers that lend 16 queue pairs each.
    pub(super) fn new() -> Stored {
        Stored {
            objects: BTreeMap::new(),
            queues: BTreeMap::new(),
            told: (0, BTreeSet::new()),
            seen: (0, BTreeSet::new()),
            observed: 0,
            has_left: false,
            is_known: true,
            gpus: Vec::new(),
            controllers: vec![("A", 32), ("B", 32)],
            lent: Percent(50),
            presence: Presence::Here,
            now: 0,
            versions: 1,
            broken: BTreeSet::new(),
            held: BTreeSet::new(),
            granted: BTreeMap::new(),
        }
    }

    pub(super) fn make(&mut self, name: &str, more: Value) {
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

    pub(super) fn found(&self) -> Found {
        let controllers: Vec<Value> = self
            .controllers
            .iter()
            .map(|(serial, pairs)| {
                json!({
                    "serial": serial, "pciAddress": "0000:01:00.0", "pool": "p", "queuePairs": pairs, "queuePairsLent": 0,
                })
            })
            .collect();
        let queues: Vec<Value> =
            self.queues.iter().map(|(uid, pairs)| json!({ "uid": uid, "queuePairs": pairs })).collect();
        let told = |uid: &String| json!({ "uid": uid, "allocation": "n/x", "controllers": [{ "serial": "A", "queuePairs": 8 }] });
        let told: Vec<Value> = self.told.1.iter().map(told).collect();
        let left = json!([{
            "type": "AgentReady", "status": "False", "reason": "AgentGone", "lastTransitionTime": at(0),
        }]);
        let node: CacheNode = object(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode",
            "metadata": { "name": "n1", "generation": self.told.0 },
            "spec": { "nodeName": "n1", "clusterRef": { "namespace": "n", "name": "c" }, "queues": told },
            "status": {
                "conditions": if self.has_left { left } else { json!([]) },
                "observedGeneration": self.observed, "lastUpdated": at(0), "controllers": controllers, "gpus": self.gpus, "applied": { "queues": queues },
            },
        }));
        let lender = |(serial, pairs): &(&str, u32)| Lender {
            serial: (*serial).to_owned(),
            pool: "p".to_owned(),
            budget: budget(*pairs, self.lent),
        };
        Found {
            node: "n1".to_owned(),
            presence: self.presence,
            cache_node: (self.presence != Presence::Left).then(|| Arc::new(node)),
            lenders: self.controllers.iter().map(lender).collect(),
            allocations: self.objects.values().map(referring).collect(),
            held: self.held.clone(),
            passed_over: BTreeSet::new(),
        }
    }

    /// Does what is due, and is killed after so many writes. What was written.
    pub(super) fn turn(&mut self, most: usize) -> Vec<String> {
        let mut turn = Turn::of(self.found(), at(self.now));
        let (mut tries, mut written) = (0, Vec::new());
        while let Some(step) = turn.next_step() {
            if tries == most {
                self.held.clear();
                break;
            }
            tries += 1;
            match self.try_to_write(step.clone()) {
                Ok(words) => written.push(words),
                Err(failure) => turn.failed(&step, failure),
            }
        }
        written
    }

    /// What is to be written.
    pub(super) fn due(&self) -> Vec<Step> {
        steps(&self.found(), &at(self.now))
    }

    /// Writes what may be written of what was decided before, and goes on after what is refused. What was written.
    pub(super) fn carry_out(&mut self, due: Vec<Step>) -> Vec<String> {
        let (mut room, mut written) = (Room::default(), Vec::new());
        for step in due {
            if !room.allows(&step) {
                continue;
            }
            match self.try_to_write(step.clone()) {
                Ok(words) => written.push(words),
                Err(failure) => room.failed(&step, failure),
            }
        }
        written
    }

    /// What was written, unless it is refused.
    fn try_to_write(&mut self, step: Step) -> Result<String, Failure> {
        if matches!(step.what, What::Grant(_) | What::LetGo) {
            self.held.remove(&step.object.uid().expect("it has one"));
        }
        if let Some(failure) = self.refuses(&step.object) {
            return Err(failure);
        }
        let words = format!("{} {}", word(&step.what), step.object.name_any());
        self.write(step);
        self.check();
        Ok(words)
    }

    fn refuses(&self, object: &GPUQueueAllocation) -> Option<Failure> {
        let name = object.name_any();
        let stored = self.objects.get(&name);
        let is_same = stored.is_some_and(|stored| stored.resource_version() == object.resource_version());
        match () {
            () if self.broken.contains(&name) => Some(Failure::Refused),
            () if !is_same => Some(Failure::Outdated),
            () => None,
        }
    }

    /// Tells the agent of all grants that stand.
    pub(super) fn tell(&mut self) {
        let stands = self.objects.values().filter(|object| life::stands(object));
        let stands: BTreeSet<String> = stands.filter_map(ResourceExt::uid).collect();
        if stands != self.told.1 {
            self.told = (self.told.0 + 1, stands);
        }
    }

    /// The agent keeps what it is told to, and nothing else.
    pub(super) fn obey(&mut self) {
        let keeps = if self.is_known { self.told.1.clone() } else { BTreeSet::new() };
        self.seen = (self.told.0, keeps);
        self.check();
    }

    /// The agent is stopped: its last word is that it has nothing. Or it is killed, and says nothing any more.
    pub(super) fn stop(&mut self, is_killed: bool) {
        self.seen.1.clear();
        self.is_known = false;
        if !is_killed {
            (self.has_left, self.queues) = (true, BTreeMap::new());
        }
    }

    /// The agent says so.
    pub(super) fn answer(&mut self) {
        (self.observed, self.has_left, self.is_known) = (self.seen.0, false, true);
        self.queues = self.seen.1.iter().map(|uid| (uid.clone(), 8)).collect();
    }

    /// Somebody else changes something of it.
    pub(super) fn touch(&mut self, name: &str) {
        self.versions += 1;
        let object = self.objects.get_mut(name).expect("it is there");
        object.metadata.resource_version = Some(self.versions.to_string());
    }

    /// Somebody else's finalizer, of which nobody here knows what it waits for.
    pub(super) fn hold_for_others(&mut self, name: &str) {
        let object = self.objects.get_mut(name).expect("it is there");
        object.finalizers_mut().push("others.example/hold".to_owned());
    }

    pub(super) fn settle(&mut self) {
        for _ in 0..20 {
            if self.turn(ALL).is_empty() {
                return;
            }
        }
        panic!("there is always something to write: {:?}", self.turn(ALL));
    }

    fn write(&mut self, step: Step) {
        let name = step.object.name_any();
        let object = self.objects.get_mut(&name).expect("nobody else has deleted it");
        self.versions += 1;
        object.metadata.resource_version = Some(self.versions.to_string());
        match step.what {
            What::Hold => {
                object.finalizers_mut().push(QUEUES_FINALIZER.to_owned());
                self.held.insert(object.uid().expect("it has one"));
            }
            What::LetGo => {
                object.finalizers_mut().retain(|one| one != QUEUES_FINALIZER);
                if object.metadata.deletion_timestamp.is_some() {
                    assert!(!self.queues.contains_key(&format!("uid-{name}")), "{name} has queues");
                    if object.finalizers().is_empty() {
                        self.objects.remove(&name);
                    }
                }
            }
            What::GiveBack(said) | What::Grant(said) | What::Say(said) => object.status = Some(said.status),
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

    /// What holds whatever has happened.
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
            // One that is gone lends nothing more; what was lent of it stands.
            let Some((_, all)) = self.controllers.iter().find(|(one, _)| one == serial) else { continue };
            assert!(pairs <= all / 2, "{serial} lends {pairs} of {all}: {holders:?}");
            let is_exclusive =
                |name: &str| self.objects[name].spec.isolation == QueueIsolation::ExclusiveController;
            let exclusive = holders.iter().any(|(name, _)| is_exclusive(name));
            assert!(!exclusive || holders.len() == 1, "{serial} is not exclusive: {holders:?}");
        }
        for uid in &self.seen.1 {
            let mut all = self.objects.values().filter(|object| object.uid().as_ref() == Some(uid));
            let has_grant =
                all.any(|object| object.status.as_ref().is_some_and(|status| !status.allocations.is_empty()));
            assert!(has_grant, "the agent has something of {uid}, which was lent to others");
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
        // Once it is given back it stays so.
        let is_over = |name: &&String| self.objects.contains_key(*name) && self.shares(name).is_empty();
        let over: Vec<String> = self.granted.keys().filter(is_over).cloned().collect();
        for name in over {
            self.granted.insert(name, Shares::new());
        }
    }

    pub(super) fn said(&self, name: &str, kind: ConditionType) -> Option<(ConditionStatus, String, String)> {
        let status = self.objects[name].status.as_ref()?;
        let found = find(&status.conditions, kind)?;
        Some((found.status, found.reason.clone(), found.message.clone()))
    }

    /// Whether a condition has this status and reason; what it says.
    pub(super) fn expect(
        &self,
        name: &str,
        kind: ConditionType,
        status: ConditionStatus,
        reason: &str,
    ) -> String {
        let (has, why, words) =
            self.said(name, kind).unwrap_or_else(|| panic!("{name} says nothing of {kind}"));
        assert_eq!((has, why.as_str()), (status, reason), "{name}, {kind}: {words}");
        words
    }
}

fn referring(object: &GPUQueueAllocation) -> Referring {
    let pool = SSDPool::new("p", self::object(json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } })));
    Referring {
        object: Arc::new(object.clone()),
        pool: Some(Arc::new(pool)),
        plan: PoolPlan { cluster: Some("n/c".to_owned()), nodes: vec!["n1".to_owned()], refused: None },
        tenant: None,
        profile: None,
    }
}

fn word(what: &What) -> &'static str {
    match what {
        What::Hold => "hold",
        What::GiveBack(_) => "give back",
        What::Grant(_) => "grant",
        What::Say(_) => "say",
        What::LetGo => "let go",
    }
}
