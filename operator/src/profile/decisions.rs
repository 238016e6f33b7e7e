//! What was decided of profiles: which node should have which revision, and what the present one says.
//!
//! Decisions are made by the reconciler of a profile and read by those of nodes and clusters. They are ahead of what is stored by as long as a
//! write and its watch take; without them two nodes could be chosen for one place. Nothing is lost with them: they begin with what stands in
//! the specs of `CacheNode`s.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::SlackProfile;

use super::content::Revision;
use crate::world::World;

/// What was decided of one profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decided {
    /// The profile's unique id; one of the same name that comes later is another one.
    pub uid: String,
    /// The revision that nodes should have in the end; none where the profile is not valid.
    pub revision: Option<Revision>,
    /// Digest of the revision that each node should have now, by the node's name.
    pub nodes: BTreeMap<String, String>,
}

/// What was decided of all profiles, by `namespace/name`.
#[derive(Debug, Default)]
pub struct Decisions {
    of: Mutex<HashMap<String, Arc<Decided>>>,
}

/// Who has to look at a decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct News {
    /// Nodes for which something else was decided.
    pub nodes: BTreeSet<String>,
    /// Clusters: there is another revision, or a first decision.
    pub clusters: bool,
}

impl Decisions {
    /// What was decided of a profile; none before anybody has looked at it.
    pub fn of(&self, profile: &SlackProfile) -> Option<Arc<Decided>> {
        let of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        let decided = of.get(&key(profile))?;
        (Some(&decided.uid) == profile.metadata.uid.as_ref()).then(|| Arc::clone(decided))
    }

    /// Decides. Before the first decision nodes have what their specs have: `having` says which have any.
    pub fn decide(
        &self,
        profile: &SlackProfile,
        decided: Decided,
        having: impl FnOnce() -> BTreeSet<String>,
    ) -> News {
        let before = self.of(profile);
        let news = match before.as_deref() {
            None => {
                let mut nodes = having();
                nodes.extend(decided.nodes.keys().cloned());
                News { nodes, clusters: true }
            }
            Some(before) => News {
                nodes: differing(&before.nodes, &decided.nodes),
                clusters: before.revision != decided.revision,
            },
        };
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        of.insert(key(profile), Arc::new(decided));
        news
    }

    /// Forgets profiles that are gone.
    pub fn forget_gone(&self, world: &World) {
        let is_there = |key: &str| {
            let reference = key.split_once('/').map(|(space, name)| ObjectRef::new(name).within(space));
            reference.is_some_and(|reference| world.profiles.get(&reference).is_some())
        };
        self.of.lock().unwrap_or_else(PoisonError::into_inner).retain(|key, _| is_there(key));
    }
}

/// Nodes that one has and the other has not, or has otherwise.
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
            "spec": { "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" }, "windows": [] },
        });
        serde_json::from_value(whole).expect("a profile")
    }

    fn decided(uid: &str, text: &str, nodes: &[(&str, &str)]) -> Decided {
        let pair = |(node, digest): &(&str, &str)| ((*node).to_owned(), (*digest).to_owned());
        let revision = Revision { digest: text.to_owned(), text: text.to_owned() };
        Decided { uid: uid.to_owned(), revision: Some(revision), nodes: nodes.iter().map(pair).collect() }
    }

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn who_has_to_look_are_the_nodes_whose_decision_changed_and_at_first_all_that_have_any() {
        let decisions = Decisions::default();
        assert_eq!(decisions.of(&profile("u")), None);
        let first = decided("u", "a", &[("n1", "a"), ("n2", "a")]);
        let news = decisions.decide(&profile("u"), first.clone(), || names(&["n3"]));
        assert_eq!(news, News { nodes: names(&["n1", "n2", "n3"]), clusters: true });
        assert_eq!(decisions.of(&profile("u")).as_deref(), Some(&first));
        let news = decisions.decide(&profile("u"), first, || names(&["n3"]));
        assert_eq!(news, News::default());
        let next = decided("u", "b", &[("n1", "b"), ("n2", "a"), ("n4", "a")]);
        let news = decisions.decide(&profile("u"), next, BTreeSet::new);
        assert_eq!(news, News { nodes: names(&["n1", "n4"]), clusters: true });
        let less = decided("u", "b", &[("n1", "b")]);
        let news = decisions.decide(&profile("u"), less, BTreeSet::new);
        assert_eq!(news, News { nodes: names(&["n2", "n4"]), clusters: false });
        assert_eq!(decisions.of(&profile("v")), None, "another one of the name");
    }
}
