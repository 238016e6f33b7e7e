//! Reads the inputs of a profile: its measurement, the clusters that select it, and the reports of their nodes; and
//! validates it.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::node::AppliedProfile;
use reprise_crds::status::Reason;
use reprise_crds::{CacheNode, KVCacheCluster, SlackProfile};

use super::build::RolloutStage;
use super::source::{self, Revision};
use crate::framework::error::OperatorError;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::membership::{belongs_to, has_reported, is_frozen};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::selection::selects;

/// Maximum number of profiles of one cluster, the limit of a CacheNode.
const PROFILES_MAX: usize = 16;

/// The inputs of a profile.
#[derive(Clone, Debug)]
pub struct ProfileInputs {
    /// Its revision, or why it has none.
    pub revision: Result<Revision, Refusal>,
    /// Why the profile is rejected. Condition `Valid` reports an invalid measurement.
    pub refused: Option<Refusal>,
    /// Digest of the revision that all nodes will have in the end: without [`ProfileInputs::current`], the previous one.
    pub digest: Option<String>,
    /// Number of this revision.
    pub number: i64,
    /// Clusters that select it, as `namespace/name`.
    pub clusters: Vec<String>,
    /// Nodes of these clusters that have the GPU, by name.
    pub nodes: Vec<ProfileNode>,
    /// GPU products of all nodes of these clusters.
    pub products: BTreeSet<String>,
}

/// A node that has the profile's GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileNode {
    pub name: String,
    /// Digest of the revision that it should have, from the last decision or its spec.
    pub desired: Option<String>,
    /// Its agent's report on the profile.
    pub report: Option<AppliedProfile>,
    pub stage: RolloutStage,
    /// Whether it is a canary node.
    pub canary: bool,
    /// Whether its agent has not reported recently.
    pub silent: bool,
    /// Whether its spec must not change, because its cluster is paused or not accepted.
    pub frozen: bool,
}

impl ProfileInputs {
    /// Returns the revision if the profile is valid and accepted. Otherwise nodes keep their revisions.
    pub fn current(&self) -> Option<&Revision> {
        self.revision.as_ref().ok().filter(|_| self.refused.is_none())
    }
}

/// Reads the inputs: a measurement in a ConfigMap from the API server, everything else from the local stores.
///
/// # Errors
/// The API server did not answer.
pub async fn dereference(profile: &SlackProfile, context: &Context) -> Result<ProfileInputs, OperatorError> {
    let revision = source::read(profile, context).await?;
    let (stores, spec, name) = (&context.stores, &profile.spec, profile.name_any());
    let mut clusters = stores.clusters.state_filter(|cluster| is_selected(cluster, profile));
    clusters.sort_by_key(|cluster| cluster.name_any());
    let is_full = |cluster: &&Arc<KVCacheCluster>| {
        !selected(cluster, context).iter().any(|other| other.metadata.uid == profile.metadata.uid)
    };
    let key = |cluster: &Arc<KVCacheCluster>| ClusterNames::of(cluster).key();
    let mut found = ProfileInputs {
        refused: validate(profile, &revision, clusters.is_empty(), clusters.iter().find(is_full).map(key)),
        revision,
        digest: None,
        number: 0,
        clusters: clusters.iter().map(key).collect(),
        nodes: Vec::new(),
        products: BTreeSet::new(),
    };
    let before = profile.status.as_ref();
    let previous = before.and_then(|status| status.digest.as_ref()).map(ToString::to_string);
    found.digest = found.current().map(|revision| revision.digest.clone()).or_else(|| previous.clone());
    let is_new = found.digest != previous;
    found.number = before.map_or(0, |status| status.revision) + i64::from(is_new);
    let (assignment, decided) = (stores.assignment(), context.decisions.of(profile));
    for cluster in &clusters {
        let (names, frozen) = (ClusterNames::of(cluster), is_frozen(cluster));
        // A frozen cluster keeps its profiles.
        let is_kept = frozen || !is_full(&cluster);
        let nodes = assignment.cluster(cluster).map(|own| own.nodes.as_slice()).unwrap_or_default();
        let cache_nodes = nodes.iter().filter_map(|node| stores.cache_nodes.get(&ObjectRef::new(node)));
        for live in cache_nodes.filter(|live| belongs_to(live, &names)) {
            let node = live.name_any();
            let desired = match &decided {
                Some(decided) => decided.nodes.get(&node).cloned(),
                None => claimed(&live, &name).map(str::to_owned),
            };
            let gpus = live.status.iter().flat_map(|status| &status.gpus);
            let products: BTreeSet<String> = gpus.map(|gpu| gpu.product.to_string()).collect();
            // After a start, or while a driver is loading, a node reports no GPUs; it still takes part in the
            // rollout.
            let may_have = products.is_empty() && desired.is_some();
            let has_gpu = products.contains(spec.subject.gpu_product.as_str());
            found.products.extend(products);
            if !may_have && !has_gpu {
                continue;
            }
            let desired = desired.filter(|_| is_kept);
            let applied = live.status.as_ref().and_then(|status| status.applied.as_ref());
            let report =
                applied.and_then(|applied| applied.profiles.iter().find(|one| one.name.as_str() == name));
            let digest = found.digest.as_deref().filter(|_| desired == found.digest);
            let canary = spec.rollout.canary.as_ref().zip(stores.nodes.get(&ObjectRef::new(&node)));
            found.nodes.push(ProfileNode {
                stage: RolloutStage::of(digest, report, spec.max_error_percent.0),
                name: node,
                desired,
                report: report.cloned(),
                canary: canary.is_some_and(|(canary, node)| selects(&canary.node_selector, node.labels())),
                silent: !has_reported(&live),
                frozen,
            });
        }
    }
    found.nodes.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Returns why a profile is rejected: a missing reference, no selecting cluster, or a cluster with too many profiles.
fn validate(
    profile: &SlackProfile,
    revision: &Result<Revision, Refusal>,
    is_unselected: bool,
    full: Option<String>,
) -> Option<Refusal> {
    if let Err(refusal) = revision
        && refusal.reason != Reason::ProfileInvalid
    {
        return Some(refusal.clone());
    }
    if is_unselected {
        let message = format!(
            "no KVCacheCluster in namespace {} selects this profile: set spec.slackProfiles of a cluster to labels of the \
             profile",
            profile.namespace().unwrap_or_default()
        );
        return Some(Refusal::new(Reason::ReferenceNotFound, message));
    }
    let message = format!(
        "KVCacheCluster {} selects {PROFILES_MAX} older profiles, which is the limit of nodes, so they do not get this one: \
         narrow spec.slackProfiles, or delete a profile",
        full?
    );
    Some(Refusal::new(Reason::Conflict, message))
}

/// Returns the digest of a profile's revision in the spec of a node.
pub(super) fn claimed<'a>(node: &'a CacheNode, profile: &str) -> Option<&'a str> {
    let claim = node.spec.profiles.iter().find(|claim| claim.name.as_str() == profile);
    claim.map(|claim| claim.digest.as_str())
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
fn is_selected(cluster: &KVCacheCluster, profile: &SlackProfile) -> bool {
    let labels = || cluster.spec.slack_profiles.as_ref().is_some_and(|all| selects(all, profile.labels()));
    profile.metadata.deletion_timestamp.is_none() && cluster.namespace() == profile.namespace() && labels()
}
