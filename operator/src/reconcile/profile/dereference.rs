//! Reads the inputs of a profile: its measurement, the clusters that select it, and the reports of their nodes.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::node::AppliedProfile;
use reprise_crds::{CacheNode, KVCacheCluster, SlackProfile};

use super::content::Revision;
use super::decisions::ProfileDecision;
use super::{PROFILES_MAX, source};
use crate::framework::error::OperatorError;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::membership::{belongs_to, has_reported, is_frozen};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::selection::selects;
use crate::reconcile::stores::Stores;

/// The inputs of a profile.
#[derive(Clone, Debug)]
pub struct ProfileInputs {
    /// Its revision, or why it has none.
    pub revision: Result<Revision, Refusal>,
    /// Clusters that select it, as `namespace/name`.
    pub clusters: Vec<String>,
    /// One of these clusters whose nodes do not get it, because older profiles reach the limit.
    pub full: Option<String>,
    /// Nodes of these clusters that have the GPU, by name.
    pub nodes: Vec<ProfileNode>,
    /// GPU products of all nodes of these clusters.
    pub products: BTreeSet<String>,
}

/// A node that has the profile's GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileNode {
    /// Name of the node.
    pub name: String,
    /// Digest of the revision that it should have, from the last decision or its spec.
    pub desired: Option<String>,
    /// Its agent's report on the profile.
    pub report: Option<AppliedProfile>,
    /// Whether it is a canary node.
    pub canary: bool,
    /// Whether its agent has not reported recently.
    pub silent: bool,
    /// Whether its spec must not change, because its cluster is paused or not accepted.
    pub frozen: bool,
}

/// Reads the inputs: a measurement in a ConfigMap from the API server, everything else from the local stores.
///
/// # Errors
/// The API server did not answer.
pub async fn dereference(profile: &SlackProfile, context: &Context) -> Result<ProfileInputs, OperatorError> {
    let revision = source::read(profile, context).await?;
    let stores = &context.stores;
    let (assignment, decided) = (stores.assignment(), context.decisions.of(profile));
    let mut found = ProfileInputs {
        revision,
        clusters: Vec::new(),
        full: None,
        nodes: Vec::new(),
        products: BTreeSet::new(),
    };
    let mut clusters = stores.clusters.state_filter(|cluster| is_selected(cluster, profile));
    clusters.sort_by_key(|cluster| cluster.name_any());
    for cluster in clusters {
        let names = ClusterNames::of(&cluster);
        found.clusters.push(names.key());
        let is_full =
            !selected(&cluster, context).iter().any(|other| other.metadata.uid == profile.metadata.uid);
        if is_full {
            found.full = Some(names.key());
        }
        let frozen = is_frozen(&cluster);
        for name in assignment.cluster(&cluster).map(|own| own.nodes.as_slice()).unwrap_or_default() {
            let live = stores.cache_nodes.get(&ObjectRef::new(name)).filter(|live| belongs_to(live, &names));
            let Some(live) = live else { continue };
            let gpus = live.status.iter().flat_map(|status| &status.gpus);
            let products: BTreeSet<String> = gpus.map(|gpu| gpu.product.to_string()).collect();
            let node = node(profile, &live, decided.as_deref(), stores);
            // After a start, or while a driver is loading, a node reports no GPUs; it still takes part in the
            // rollout.
            let may_have = products.is_empty() && node.desired.is_some();
            if may_have || products.contains(profile.spec.subject.gpu_product.as_str()) {
                // A frozen cluster keeps its profiles.
                let desired = node.desired.filter(|_| !is_full || frozen);
                found.nodes.push(ProfileNode { desired, frozen, ..node });
            }
            found.products.extend(products);
        }
    }
    found.nodes.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Returns the profiles that the nodes of a cluster get: of those that its labels select, the [`PROFILES_MAX`] oldest
/// ones. Nodes, files and the status of the profile use the same selection.
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

fn node(
    profile: &SlackProfile,
    live: &CacheNode,
    decided: Option<&ProfileDecision>,
    stores: &Stores,
) -> ProfileNode {
    let (name, of) = (live.name_any(), profile.name_any());
    let applied = live.status.as_ref().and_then(|status| status.applied.as_ref());
    let report = applied.and_then(|applied| applied.profiles.iter().find(|one| one.name.as_str() == of));
    let canary = profile.spec.rollout.canary.as_ref().zip(stores.nodes.get(&ObjectRef::new(&name)));
    ProfileNode {
        desired: match decided {
            Some(decided) => decided.nodes.get(&name).cloned(),
            None => {
                let claim = live.spec.profiles.iter().find(|claim| claim.name.as_str() == of);
                claim.map(|claim| claim.digest.to_string())
            }
        },
        report: report.cloned(),
        canary: canary.is_some_and(|(canary, node)| selects(&canary.node_selector, node.labels())),
        silent: !has_reported(live),
        name,
        ..ProfileNode::default()
    }
}
