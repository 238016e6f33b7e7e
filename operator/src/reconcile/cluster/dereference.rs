//! Reads the objects that a cluster refers to: pools, tenants, profiles, nodes, workloads and its etcd.

use std::sync::Arc;

use kube::ResourceExt;
use kube::api::DynamicObject;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::cluster::Images;
use reprise_crds::fields::Image;
use reprise_crds::{CacheNode, KVCacheCluster};

use super::etcd::volumes;
use super::inputs::{AgentConfigInputs, ClusterInputs, NamedPool};
use super::workloads::number;
use crate::framework::child::ChildKind;
use crate::reconcile::authority;
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::StateResult;
use crate::reconcile::membership::{belongs_to, tenants};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::profile::files;
use crate::reconcile::tenant;
use crate::settings::DefaultImages;

/// Reads the inputs of the agents' configuration from the local stores.
pub fn agent_config_inputs(cluster: &KVCacheCluster, context: &Context) -> AgentConfigInputs {
    let (names, stores) = (ClusterNames::of(cluster), &context.stores);
    let assignment = stores.assignment();
    let pools = cluster.spec.pools.iter().map(|pool| NamedPool {
        name: pool.name.to_string(),
        pool: stores.pools.get(&ObjectRef::new(pool.name.as_str())),
        assignment: assignment.pools.get(pool.name.as_str()).cloned().unwrap_or_default(),
    });
    AgentConfigInputs { pools: pools.collect(), tenants: tenants(context, &names), names }
}

/// Reads all inputs of a cluster. It polls an external etcd and the members of the control plane.
pub async fn dereference(cluster: &KVCacheCluster, context: &Context) -> ClusterInputs {
    let (agent_config, stores) = (agent_config_inputs(cluster, context), &context.stores);
    let names = &agent_config.names;
    context.secrets.follow(names, &context.client, stores).await;
    let own = stores.assignment().cluster(cluster).cloned().unwrap_or_default();
    let cache_nodes = own.nodes.iter().filter_map(|node| {
        let found = stores.cache_nodes.get(&ObjectRef::new(node))?;
        belongs_to(&found, names).then_some(found)
    });
    let cache_nodes: Vec<Arc<CacheNode>> = cache_nodes.collect();
    let optional = ChildKind::ALL.into_iter().filter(|kind| kind.is_optional());
    let set = |name: &str| stores.children.get(ChildKind::StatefulSet, Some(&names.namespace), name);
    let (members, etcd) = (set(&names.control_plane()), set(&names.etcd()));
    let control_plane_state = match members.as_deref() {
        Some(set) if number(Some(set), "readyReplicas") > 0 => Some(member_state(set, names, context).await),
        _ => None,
    };
    ClusterInputs {
        bindings: tenant::pods::assign(names, context).bindings,
        profiles: files::of(cluster, names, &cache_nodes, context),
        cache_nodes,
        images: images(&cluster.spec.images, &context.settings.images),
        store: context.store_checks.check(cluster, context).await,
        agents: stores.children.get(ChildKind::DaemonSet, Some(&names.namespace), &names.agent()),
        members,
        control_plane_state,
        volumes: volumes::problem(cluster, etcd.as_deref(), &context.client).await,
        certificates: authority::read(names, context).await,
        etcd,
        access: optional.map(|kind| (kind, stores.children.access(kind))).collect(),
        assignment: own,
        agent_config,
    }
}

/// Returns the state reported by members that is at least as new as their StatefulSet. A state cached before
/// a rollout describes replaced members.
async fn member_state(members: &DynamicObject, names: &ClusterNames, context: &Context) -> StateResult {
    let version = members.resource_version().unwrap_or_default();
    context.control_planes.require_members_version(names, version).await;
    context.control_planes.state(names).await
}

/// Returns the images of a cluster's spec, with the operator's defaults.
pub fn images(specified: &Images, released: &DefaultImages) -> DefaultImages {
    let of = |image: &Option<Image>, released: &str| match image {
        None => released.to_owned(),
        Some(Image { repository, tag, digest }) => match (tag, digest) {
            (_, Some(digest)) => format!("{repository}@{digest}"),
            (Some(tag), None) => format!("{repository}:{tag}"),
            (None, None) => repository.to_string(),
        },
    };
    DefaultImages {
        agent: of(&specified.agent, &released.agent),
        control_plane: of(&specified.control_plane, &released.control_plane),
        etcd: of(&specified.etcd, &released.etcd),
        operator: released.operator.clone(),
    }
}
