//! Decisions on profiles: the revision of each node, and the content of the current revision.
//!
//! The reconciler of a profile makes them; those of nodes and clusters read them. They are ahead of the
//! stored objects by the latency of a write and its watch event. Without them, two nodes could be chosen for
//! one free place in a rollout. They can be lost safely: they start from the specs of `CacheNode`s.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::SlackProfile;

use super::content::Revision;
use crate::reconcile::stores::Stores;

/// The decision on one profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProfileDecision {
    /// Uid of the profile, to distinguish a later profile of the same name.
    pub uid: String,
    /// The revision that all nodes will have in the end; `None` if the profile is invalid.
    pub revision: Option<Revision>,
    /// Digest of the revision that each node should have now, by node name.
    pub nodes: BTreeMap<String, String>,
}

/// Decisions on all profiles, by `namespace/name`.
#[derive(Debug, Default)]
pub struct ProfileDecisions {
    of: Mutex<HashMap<String, Arc<ProfileDecision>>>,
}

/// Objects that a new decision affects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecisionChange {
    /// Nodes whose revision changed.
    pub nodes: BTreeSet<String>,
    /// Whether clusters must update their files: after another revision, or a first decision.
    pub clusters: bool,
}

impl ProfileDecisions {
    /// Returns the decision on a profile; `None` before the first one of this process.
    pub fn of(&self, profile: &SlackProfile) -> Option<Arc<ProfileDecision>> {
        let of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        let decided = of.get(&key(profile))?;
        (Some(&decided.uid) == profile.metadata.uid.as_ref()).then(|| Arc::clone(decided))
    }

    /// Replaces the decision on a profile. Before the first one, the revisions in specs apply: `having`
    /// returns the nodes with one.
    pub fn replace(
        &self,
        profile: &SlackProfile,
        decided: ProfileDecision,
        having: impl FnOnce() -> BTreeSet<String>,
    ) -> DecisionChange {
        let before = self.of(profile);
        let change = match before.as_deref() {
            None => {
                let mut nodes = having();
                nodes.extend(decided.nodes.keys().cloned());
                DecisionChange { nodes, clusters: true }
            }
            Some(before) => DecisionChange {
                nodes: differing(&before.nodes, &decided.nodes),
                clusters: before.revision != decided.revision,
            },
        };
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        of.insert(key(profile), Arc::new(decided));
        change
    }

    /// Removes decisions on deleted profiles.
    pub fn remove_deleted(&self, stores: &Stores) {
        let is_there = |key: &str| {
            let reference = key.split_once('/').map(|(space, name)| ObjectRef::new(name).within(space));
            reference.is_some_and(|reference| stores.profiles.get(&reference).is_some())
        };
        self.of.lock().unwrap_or_else(PoisonError::into_inner).retain(|key, _| is_there(key));
    }
}

/// Returns the nodes whose entries differ.
fn differing(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> BTreeSet<String> {
    let names = before.keys().chain(after.keys());
    names.filter(|name| before.get(*name) != after.get(*name)).cloned().collect()
}

fn key(profile: &SlackProfile) -> String {
    format!("{}/{}", profile.namespace().unwrap_or_default(), profile.name_any())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn profile(uid: &str) -> SlackProfile {
        let whole = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile",
            "metadata": { "name": "p", "namespace": "n", "uid": uid },
            "spec": { "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" }, "configMapRef": { "name": "c", "key": "k" } },
        });
        serde_json::from_value(whole).expect("a profile")
    }

    fn decided(uid: &str, text: &str, nodes: &[(&str, &str)]) -> ProfileDecision {
        let pair = |(node, digest): &(&str, &str)| ((*node).to_owned(), (*digest).to_owned());
        let revision = Revision { digest: text.to_owned(), text: text.to_owned() };
        ProfileDecision {
            uid: uid.to_owned(),
            revision: Some(revision),
            nodes: nodes.iter().map(pair).collect(),
        }
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn change_lists_nodes_with_another_revision_and_initially_all_nodes() {
        let decisions = ProfileDecisions::default();
        assert_eq!(decisions.of(&profile("u")), None);
        let first = decided("u", "a", &[("n1", "a"), ("n2", "a")]);
        let change = decisions.replace(&profile("u"), first.clone(), || names(&["n3"]));
        assert_eq!(change, DecisionChange { nodes: names(&["n1", "n2", "n3"]), clusters: true });
        assert_eq!(decisions.of(&profile("u")).as_deref(), Some(&first));
        let change = decisions.replace(&profile("u"), first, || names(&["n3"]));
        assert_eq!(change, DecisionChange::default());
        let next = decided("u", "b", &[("n1", "b"), ("n2", "a"), ("n4", "a")]);
        let change = decisions.replace(&profile("u"), next, BTreeSet::new);
        assert_eq!(change, DecisionChange { nodes: names(&["n1", "n4"]), clusters: true });
        let less = decided("u", "b", &[("n1", "b")]);
        let change = decisions.replace(&profile("u"), less, BTreeSet::new);
        assert_eq!(change, DecisionChange { nodes: names(&["n2", "n4"]), clusters: false });
        assert_eq!(decisions.of(&profile("v")), None, "a later profile of the same name");
    }
}
