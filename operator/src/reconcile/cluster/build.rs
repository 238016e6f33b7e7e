//! Builds the children of a cluster as values. Pure; its inputs were validated.

use reprise_crds::KVCacheCluster;

use super::dereference::ClusterInputs;
use super::etcd;
use crate::framework::child::{Child, ChildKind};

mod agents;
pub mod certificates;
pub mod configuration;
mod connection;
mod identities;
mod injection;
mod members;
pub(crate) mod metadata;
mod monitoring;
pub(crate) mod pods;
#[cfg(test)]
mod tests;

/// Returns all children of a cluster in the order in which they are applied.
pub fn build(cluster: &KVCacheCluster, inputs: &ClusterInputs) -> Vec<Child> {
    let mut children = agents::build(cluster, inputs);
    children.extend(members::build(cluster, inputs));
    children.extend(etcd::build::build(cluster, inputs));
    children.extend(certificates::build(cluster, inputs));
    children.push(identities::build(cluster, inputs));
    children.push(connection::build(cluster, &inputs.agent_config.names));
    children.extend(injection::build(cluster, &inputs.agent_config.names));
    children.extend(monitoring::build(cluster, &inputs.agent_config.names));
    children.sort_by_key(|child| ChildKind::ALL.iter().position(|kind| *kind == child.kind));
    children
}
