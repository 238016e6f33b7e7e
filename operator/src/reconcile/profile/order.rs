//! Selects the profiles that the nodes of a cluster get: of those that its labels select, the [`PROFILES_MAX`] oldest
//! ones. Nodes, files and the status of the profile use the same selection.

use std::sync::Arc;

use kube::ResourceExt;
use reprise_crds::{KVCacheCluster, SlackProfile};

use super::PROFILES_MAX;
use crate::reconcile::context::Context;
use crate::reconcile::selection::selects;

/// Returns the profiles that the nodes of a cluster get, by age.
pub fn selected(cluster: &KVCacheCluster, context: &Context) -> Vec<Arc<SlackProfile>> {
    let mut selected = context.stores.profiles.state_filter(|profile| is_selected(cluster, profile));
    selected.sort_by_cached_key(|profile| {
        (profile.metadata.creation_timestamp.as_ref().map(|time| time.0), profile.uid())
    });
    selected.truncate(PROFILES_MAX);
    selected
}

/// Whether a cluster selects a profile that is not being deleted.
pub fn is_selected(cluster: &KVCacheCluster, profile: &SlackProfile) -> bool {
    let labels = || cluster.spec.slack_profiles.as_ref().is_some_and(|all| selects(all, profile.labels()));
    profile.metadata.deletion_timestamp.is_none() && cluster.namespace() == profile.namespace() && labels()
}
