//! What is refused of an allocation: what it refers to is not there, or is not what it should be.
//!
//! A GPU is compared with those that the agent tells. An agent tells none while it sees none, as before the driver is loaded, and then nobody knows
//! better than who named it. Parts of GPUs (MIG) are told by no agent. A profile must have been found to be one, and have been measured on that GPU,
//! as far as it is known.

use kube::ResourceExt;
use reprise_crds::SlackProfile;
use reprise_crds::fields::GpuUuid;
use reprise_crds::status::{ConditionStatus, ConditionType, Reason, find};

use super::dereference::{Found, Presence, Referring};
use crate::cluster::dereference::knows;
use crate::names::ClusterNames;
use crate::plan::Refusal;
use crate::tenant::validate::validate as validate_tenant;

/// The tenant of whoever names none; it needs no object.
const DEFAULT_TENANT: &str = "default";

/// How the unique id of a part of a GPU begins.
const PART: &str = "MIG-";

/// Why an allocation is refused, if it is.
pub fn validate(of: &Referring, found: &Found) -> Option<Refusal> {
    node(found)
        .or_else(|| pool(of, found))
        .or_else(|| gpu(of, found))
        .or_else(|| tenant(of, found))
        .or_else(|| profile(of, found))
}

/// Whether the node's agent would tell such a GPU, if it were there.
pub fn is_told(gpu: &GpuUuid, found: &Found) -> bool {
    let sees_gpus = found.status().is_some_and(|status| !status.gpus.is_empty());
    sees_gpus && !gpu.as_str().starts_with(PART)
}

fn missing(message: String) -> Option<Refusal> {
    Some(Refusal::new(Reason::ReferenceNotFound, message))
}

fn node(found: &Found) -> Option<Refusal> {
    let node = &found.node;
    if found.presence == Presence::Gone {
        return missing(format!("node {node} is not there: name one that is, in a new GPUQueueAllocation"));
    }
    if found.presence == Presence::Left || found.cache_node.is_none() {
        return missing(format!(
            "no KVCacheCluster has node {node}, so no agent is there: select it by agents.nodeSelector of a cluster"
        ));
    }
    None
}

fn pool(of: &Referring, found: &Found) -> Option<Refusal> {
    let (name, node) = (&of.object.spec.pool_ref.name, &found.node);
    let Some(pool) = &of.pool else {
        return missing(format!(
            "SSDPool {name} is not there: make it, or name another one in a new GPUQueueAllocation"
        ));
    };
    if pool.spec.devices.is_none() {
        let message = format!(
            "SSDPool {name} is not made of raw devices, and only their controllers have queues to lend: name a pool of devices in a new \
             GPUQueueAllocation"
        );
        return Some(Refusal::new(Reason::InvalidSpec, message));
    }
    if pool.metadata.deletion_timestamp.is_some() {
        return missing(format!(
            "SSDPool {name} is being deleted: name another one in a new GPUQueueAllocation"
        ));
    }
    if let Some(refused) = &of.plan.refused {
        return Some(Refusal::new(refused.reason, format!("SSDPool {name} is refused: {}", refused.message)));
    }
    if !of.plan.nodes.contains(node) {
        return missing(format!(
            "SSDPool {name} is not on node {node}: name it in the cluster's spec.pools and let its nodeSelector select the node, or name \
             another node in a new GPUQueueAllocation"
        ));
    }
    None
}

fn gpu(of: &Referring, found: &Found) -> Option<Refusal> {
    let (gpu, node) = (&of.object.spec.gpu_uuid, &found.node);
    let gpus = &found.status()?.gpus;
    if !is_told(gpu, found) || gpus.iter().any(|there| there.uuid == *gpu) {
        return None;
    }
    let there: Vec<&str> = gpus.iter().map(|there| there.uuid.as_str()).collect();
    missing(format!(
        "node {node} has no GPU {gpu}: name one of {} in a new GPUQueueAllocation. One that was not used since the driver was loaded has no \
         unique id yet: nvidia-smi -pm 1 on the node",
        there.join(", ")
    ))
}

fn tenant(of: &Referring, found: &Found) -> Option<Refusal> {
    let name = &of.object.spec.tenant_ref.as_ref()?.name;
    let Some(tenant) = &of.tenant else {
        let is_default = name.as_str() == DEFAULT_TENANT;
        let message = format!(
            "CacheTenant {name} is not there: make it, or name another one in a new GPUQueueAllocation"
        );
        return if is_default { None } else { missing(message) };
    };
    if let Some(refused) = validate_tenant(tenant) {
        let message = format!("CacheTenant {name} is refused: {}", refused.message);
        return Some(Refusal::new(refused.reason, message));
    }
    let cluster = found.cache_node.as_ref()?.spec.cluster_ref.as_ref()?;
    let cluster = ClusterNames {
        namespace: cluster.namespace.to_string(),
        name: cluster.name.to_string(),
        uid: String::new(),
    };
    if knows(tenant, &cluster) {
        return None;
    }
    missing(format!(
        "KVCacheCluster {}, which has node {}, does not know CacheTenant {name}: add it to clusters of the tenant",
        cluster.key(),
        found.node
    ))
}

fn profile(of: &Referring, found: &Found) -> Option<Refusal> {
    let name = &of.object.spec.slack_profile_ref.as_ref()?.name;
    let Some(profile) = &of.profile else {
        let namespace = of.object.namespace().unwrap_or_default();
        return missing(format!(
            "SlackProfile {name} is not there in namespace {namespace}: make it, or leave it out in a new GPUQueueAllocation"
        ));
    };
    if profile.metadata.deletion_timestamp.is_some() {
        return missing(format!(
            "SlackProfile {name} is being deleted: name another one, or none, in a new GPUQueueAllocation"
        ));
    }
    invalid(profile).or_else(|| wrong_gpu(of, profile, found))
}

/// By what the profile's own status says of it.
fn invalid(profile: &SlackProfile) -> Option<Refusal> {
    let name = profile.name_any();
    let conditions = profile.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let Some(valid) = find(conditions, ConditionType::Valid) else {
        let message = format!("SlackProfile {name} has not been looked at yet");
        return Some(Refusal::new(Reason::Progressing, message));
    };
    let said = &valid.message;
    match valid.status {
        ConditionStatus::True => None,
        ConditionStatus::False => Some(Refusal::new(
            Reason::ProfileInvalid,
            format!(
                "SlackProfile {name} is not valid: {said}. Correct it, or name another one, or none, in a new GPUQueueAllocation"
            ),
        )),
        ConditionStatus::Unknown => missing(format!(
            "nobody knows whether SlackProfile {name} is valid: {said}. Its condition Accepted says what to do; or name another one, or none, \
             in a new GPUQueueAllocation"
        )),
    }
}

/// Of a GPU that the agent does not tell, such as a part of one, it is enough that the node has one of that kind.
fn wrong_gpu(of: &Referring, profile: &SlackProfile, found: &Found) -> Option<Refusal> {
    let (gpu, node, name) = (&of.object.spec.gpu_uuid, &found.node, profile.name_any());
    let measured = profile.spec.subject.gpu_product.as_str();
    let mut there = found.status()?.gpus.clone();
    if there.iter().any(|one| one.uuid == *gpu) {
        there.retain(|one| one.uuid == *gpu);
    }
    if there.is_empty() || there.iter().any(|one| one.product.as_str() == measured) {
        return None;
    }
    let mut products: Vec<&str> = there.iter().map(|one| one.product.as_str()).collect();
    products.sort_unstable();
    products.dedup();
    let message = format!(
        "SlackProfile {name} was measured on {measured}, and GPU {gpu} of node {node} is {}: name a profile of that GPU, or none, in a new \
         GPUQueueAllocation",
        products.join(" or ")
    );
    Some(Refusal::new(Reason::WrongGpu, message))
}
