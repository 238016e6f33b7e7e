//! Decisions on profiles: the revision of each node, and the content of the current revision.
//!
//! The reconciler of a profile makes them; those of nodes and clusters read them. They are ahead of the
//! stored objects by the latency of a write and its watch event. Without them, two nodes could be chosen for
//! one free place in a rollout. They can be lost safely: they start from the specs of `CacheNode`s.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, SlackProfile};

use super::dereference::claimed;
use super::source::Revision;
use crate::reconcile::context::Context;

/// The decision on one profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProfileDecision {
    /// The revision that all nodes will have in the end; `None` if the profile is invalid.
    pub revision: Option<Revision>,
    /// Digest of the revision that each node should have now, by node name.
    pub nodes: BTreeMap<String, String>,
}

/// Decisions on all profiles, by UID.
#[derive(Debug, Default)]
pub struct ProfileDecisions(Mutex<HashMap<String, Arc<ProfileDecision>>>);

impl ProfileDecisions {
    /// Returns the decision on a profile; `None` before the first one of this process.
    pub fn of(&self, profile: &SlackProfile) -> Option<Arc<ProfileDecision>> {
        let decisions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        decisions.get(profile.metadata.uid.as_ref()?).cloned()
    }
}

/// Replaces the decision on a profile, and enqueues the clusters and nodes that differ from it: their reconcilers
/// write it.
pub async fn publish(profile: &SlackProfile, decision: ProfileDecision, context: &Context) {
    let (stores, decision) = (&context.stores, Arc::new(decision));
    let before = {
        let mut decisions = context.decisions.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Decisions on deleted profiles.
        decisions
            .retain(|uid, _| stores.profiles.find(|one| one.metadata.uid.as_ref() == Some(uid)).is_some());
        decisions.insert(profile.metadata.uid.clone().unwrap_or_default(), Arc::clone(&decision))
    };
    if before.is_none_or(|before| before.revision != decision.revision) {
        for cluster in stores.clusters.state_filter(|cluster| cluster.namespace() == profile.namespace()) {
            stores.feeds.clusters.request(cluster).await;
        }
    }
    let (name, namespace) = (profile.name_any(), profile.namespace().unwrap_or_default());
    let differs = |node: &CacheNode| {
        let cluster = node.spec.cluster_ref.as_ref();
        cluster.is_some_and(|cluster| cluster.namespace.as_str() == namespace)
            && claimed(node, &name) != decision.nodes.get(&node.name_any()).map(String::as_str)
    };
    for node in stores.cache_nodes.state_filter(differs) {
        if let Some(node) = stores.nodes.get(&ObjectRef::new(&node.name_any())) {
            stores.feeds.nodes.request(node).await;
        }
    }
}
