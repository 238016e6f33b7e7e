//! Reads what a profile is about: its windows, the clusters that select it, and what their nodes say.

use std::collections::BTreeSet;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, SlackProfile};

use super::PROFILES_MAX;
use super::decisions::Decided;
use super::order::{is_selected, selected};
use super::source::{self, Source};
use crate::cluster::dereference::is_of;
use crate::cluster::status::has_reported;
use crate::context::Context;
use crate::error::OperatorError;
use crate::names::ClusterNames;
use crate::node::dereference::{ClusterState, state};
use crate::selection::selects;
use crate::world::World;

/// What a profile is about, as it is.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its windows, as far as they could be read.
    pub source: Source,
    /// Clusters that select it.
    pub clusters: Vec<Selecting>,
    /// Nodes of these clusters that have the GPU, by name.
    pub nodes: Vec<ProfileNode>,
    /// GPUs of all nodes of these clusters.
    pub products: BTreeSet<String>,
}

/// A cluster that selects a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selecting {
    /// `namespace/name`.
    pub cluster: String,
    /// Profiles that it selects as well, and that have a place before this one ([`super::order`]).
    pub ahead: usize,
}

/// A node that has the profile's GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProfileNode {
    /// Its name.
    pub name: String,
    /// Digest of the revision that it should have, as was decided last, or as its spec says.
    pub wanted: Option<String>,
    /// What its agent says of the profile.
    pub said: Option<Said>,
    /// Whether it gets a revision before others.
    pub canary: bool,
    /// Whether its agent has said nothing for a while.
    pub silent: bool,
    /// Whether its spec is left as it is, its cluster being paused or not accepted.
    pub left: bool,
    /// Whether it has no place for the profile, since its cluster has as many others as there is room for.
    pub crowded: bool,
}

/// What an agent says of a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// Digest of the revision that it speaks of.
    pub digest: String,
    /// Why it does not work by it.
    pub refused: Option<String>,
    /// Error of its predictions, hundredths: half of all are below it.
    pub p50: Option<u32>,
    /// The same: 99 of 100 are below it.
    pub p99: Option<u32>,
}

/// Reads it: the windows from the API server where they are in a ConfigMap, all else from the stores.
///
/// # Errors
/// The API server did not answer.
pub async fn dereference(profile: &SlackProfile, context: &Context) -> Result<Found, OperatorError> {
    let source = source::read(profile, context).await?;
    let world = &context.world;
    let (plan, decided) = (world.plan(), context.decisions.of(profile));
    let mut found = Found { source, clusters: Vec::new(), nodes: Vec::new(), products: BTreeSet::new() };
    let mut clusters = world.clusters.state_filter(|cluster| is_selected(cluster, profile));
    clusters.sort_by_key(|cluster| cluster.name_any());
    for cluster in clusters {
        let names = ClusterNames::of(&cluster);
        let all = selected(&cluster, context);
        let ahead = all.iter().take_while(|other| other.metadata.uid != profile.metadata.uid).count();
        found.clusters.push(Selecting { cluster: names.key(), ahead });
        let left = state(&cluster, &plan) == ClusterState::Left;
        // What is left as it is keeps what it has.
        let crowded = ahead >= PROFILES_MAX && !left;
        for name in plan.cluster(&cluster).map(|own| own.nodes.as_slice()).unwrap_or_default() {
            let live = world.cache_nodes.get(&ObjectRef::new(name)).filter(|live| is_of(live, &names));
            let Some(live) = live else { continue };
            let products: Vec<&str> = products(&live).collect();
            // Right after a start, or while a driver is loaded, a node has no GPUs: it is of the rollout all the same.
            let may_have = products.is_empty() && has(profile, &live, decided.as_deref());
            if may_have || products.contains(&profile.spec.subject.gpu_product.as_str()) {
                let node = node(profile, &live, decided.as_deref(), world);
                let wanted = node.wanted.clone().filter(|_| !crowded);
                found.nodes.push(ProfileNode { wanted, left, crowded, ..node });
            }
            found.products.extend(products.into_iter().map(str::to_owned));
        }
    }
    found.nodes.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Whether a node has, or should have, a revision of a profile.
fn has(profile: &SlackProfile, live: &CacheNode, decided: Option<&Decided>) -> bool {
    let (node, name) = (live.name_any(), profile.name_any());
    match decided {
        Some(decided) => decided.nodes.contains_key(&node),
        None => live.spec.profiles.iter().any(|claim| claim.name.as_str() == name),
    }
}

fn products(live: &CacheNode) -> impl Iterator<Item = &str> {
    live.status.iter().flat_map(|status| &status.gpus).map(|gpu| gpu.product.as_str())
}

fn node(profile: &SlackProfile, live: &CacheNode, decided: Option<&Decided>, world: &World) -> ProfileNode {
    let (name, of) = (live.name_any(), profile.name_any());
    let claim = live.spec.profiles.iter().find(|claim| claim.name.as_str() == of);
    let applied = live.status.as_ref().and_then(|status| status.applied.as_ref());
    let said = applied.and_then(|applied| applied.profiles.iter().find(|one| one.name.as_str() == of));
    let canary = profile.spec.rollout.canary.as_ref();
    let kubernetes = world.nodes.get(&ObjectRef::new(&name));
    let is_canary = canary.zip(kubernetes);
    let is_canary = is_canary.is_some_and(|(canary, node)| selects(&canary.node_selector, node.labels()));
    ProfileNode {
        wanted: match decided {
            Some(decided) => decided.nodes.get(&name).cloned(),
            None => claim.map(|claim| claim.digest.to_string()),
        },
        said: said.map(|said| Said {
            digest: said.digest.to_string(),
            refused: said.refused.as_ref().map(ToString::to_string),
            p50: said.prediction_error_p50_percent,
            p99: said.prediction_error_p99_percent,
        }),
        canary: is_canary,
        silent: !has_reported(live),
        left: false,
        crowded: false,
        name,
    }
}
