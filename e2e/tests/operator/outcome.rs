//! What an operator has come to: the objects that it has made, and what it says of those that it was given.

use std::collections::BTreeMap;

use kube::ResourceExt;
use kube::api::{DynamicObject, Patch, PatchParams};
use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, Objects, THEIRS, essence};

/// Behind the name of an object: what is said of it.
const SAYS: &str = " says";

/// By kind and name, and of what is said with a word for that behind it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    parts: BTreeMap<String, Value>,
    /// What was found of an older spec than there is.
    outdated: Vec<String>,
}

impl Outcome {
    /// Whether all of it is of the specs that there are.
    pub(crate) fn is_current(&self) -> bool {
        self.outdated.is_empty()
    }

    /// With something else that was come to.
    pub(crate) fn with(mut self, name: &str, what: Value) -> Outcome {
        self.parts.insert(name.to_owned(), what);
        self
    }

    /// Whether any condition has this reason.
    pub(crate) fn says(&self, reason: &str) -> bool {
        let said = self.parts.iter().filter(|(key, _)| key.ends_with(SAYS));
        let mut conditions =
            said.flat_map(|(_, said)| said.as_object().into_iter().flat_map(|all| all.values()));
        conditions.any(|condition| condition[1] == reason)
    }
}

/// As it is now. Of conditions all is compared but words and times; reasons say what the words are about.
pub(crate) fn outcome(lab: &Lab) -> Outcome {
    let (made, theirs) = (lab.made(), lab.theirs());
    let nodes: Objects =
        lab.list("Node").into_iter().map(|node| (format!("Node/{}", node.name_any()), node)).collect();
    let mut parts = essence(&made);
    let cache_nodes = made.iter().filter(|(key, _)| key.starts_with("CacheNode/"));
    for (key, object) in theirs.iter().chain(&nodes).chain(cache_nodes) {
        parts.insert(format!("{key}{SAYS}"), said(object));
        parts.insert(format!("{key} waits for"), json!(object.finalizers()));
    }
    let is_old = |object: &&DynamicObject| {
        let seen = object.data["status"]["observedGeneration"].as_i64();
        seen != object.metadata.generation
    };
    let outdated = theirs.values().filter(is_old).map(ResourceExt::name_any).collect();
    Outcome { parts, outdated }
}

/// Conditions by type: status and reason.
fn said(object: &DynamicObject) -> Value {
    let conditions = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let of = |one: Value| {
        (one["type"].as_str().unwrap_or_default().to_owned(), json!([one["status"], one["reason"]]))
    };
    json!(conditions.into_iter().map(of).collect::<BTreeMap<String, Value>>())
}

/// They are the same, or what differs is told.
pub(crate) fn assert_same(one: &Outcome, other: &Outcome) {
    let keys = one.parts.keys().chain(other.parts.keys());
    let differs = keys.filter(|key| one.parts.get(*key) != other.parts.get(*key));
    let differs: BTreeMap<_, _> =
        differs.map(|key| (key, (one.parts.get(key), other.parts.get(key)))).collect();
    assert!(differs.is_empty(), "these differ: {differs:#?}");
}

/// Nothing that an operator has made is there any more, nor what it has said. Finalizers stay: they tell of what may be elsewhere.
pub(crate) fn clear(lab: &Lab) {
    for (key, object) in lab.made() {
        lab.delete(key.split_once('/').expect("kind and name").0, &object.name_any());
    }
    let patch = Patch::Merge(json!({ "status": null }));
    for (kind, ..) in THEIRS {
        for object in lab.list(kind) {
            let (api, params) = (lab.api(kind), PatchParams::default());
            lab.server
                .block_on(api.patch_status(&object.name_any(), &params, &patch))
                .expect("a status may be taken away");
        }
    }
    wait_until("all of it is gone", PATIENCE, || lab.made().is_empty().then_some(()));
}
