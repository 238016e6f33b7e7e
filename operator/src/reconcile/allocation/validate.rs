//! Validates an allocation: the objects that it refers to must exist and be suitable.
//!
//! The GPU must be among those that the agent reports. An agent that sees no GPUs (driver not loaded) reports
//! none; then the spec is accepted as written. Agents do not report MIG partitions. A profile must be valid
//! and, as far as known, measured on the same GPU product.

use kube::ResourceExt;
use reprise_crds::SlackProfile;
use reprise_crds::fields::GpuUuid;
use reprise_crds::status::{ConditionStatus, ConditionType, Reason, find};

use super::dereference::{GrantInputs, NodePresence, ResolvedAllocation, queue_percent};
use crate::framework::refusal::Refusal;

/// Prefix of the UUID of a MIG partition.
const PART: &str = "MIG-";

/// Returns why an allocation is rejected; `None` if it is accepted.
pub fn validate(of: &ResolvedAllocation, inputs: &GrantInputs) -> Option<Refusal> {
    node(inputs).or_else(|| pool(of, inputs)).or_else(|| gpu(of, inputs)).or_else(|| profile(of, inputs))
}

/// Whether the node's agent would report this GPU if it existed.
pub fn is_reportable(gpu: &GpuUuid, inputs: &GrantInputs) -> bool {
    let sees_gpus = inputs.status().is_some_and(|status| !status.gpus.is_empty());
    sees_gpus && !gpu.as_str().starts_with(PART)
}

fn missing(message: String) -> Option<Refusal> {
    Some(Refusal::new(Reason::ReferenceNotFound, message))
}

fn node(inputs: &GrantInputs) -> Option<Refusal> {
    let node = &inputs.node;
    if inputs.presence == NodePresence::Gone {
        return missing(format!(
            "node {node} does not exist: create a GPUQueueAllocation for an existing node"
        ));
    }
    if inputs.presence == NodePresence::Removed || inputs.cache_node.is_none() {
        return missing(format!(
            "node {node} belongs to no KVCacheCluster and has no agent: select it with agents.nodeSelector of a cluster"
        ));
    }
    None
}

fn pool(of: &ResolvedAllocation, inputs: &GrantInputs) -> Option<Refusal> {
    let (name, node) = (&of.object.spec.pool_ref.name, &inputs.node);
    let Some(pool) = &of.pool else {
        return missing(format!(
            "SSDPool {name} does not exist: create it, or create a GPUQueueAllocation that names another pool"
        ));
    };
    if queue_percent(pool).is_none() {
        let message = format!(
            "SSDPool {name} does not use raw devices, so it has no NVMe queues to grant: create a GPUQueueAllocation that \
             names a pool with devices"
        );
        return Some(Refusal::new(Reason::InvalidSpec, message));
    }
    if pool.metadata.deletion_timestamp.is_some() {
        return missing(format!(
            "SSDPool {name} is being deleted: create a GPUQueueAllocation that names another pool"
        ));
    }
    if let Some(refused) = &of.assignment.refused {
        return Some(Refusal::new(
            refused.reason,
            format!("SSDPool {name} is rejected: {}", refused.message),
        ));
    }
    if !of.assignment.nodes.contains(node) {
        return missing(format!(
            "SSDPool {name} is not on node {node}: list the pool in spec.pools of the cluster and select the node with its \
             nodeSelector, or create a GPUQueueAllocation for another node"
        ));
    }
    None
}

fn gpu(of: &ResolvedAllocation, inputs: &GrantInputs) -> Option<Refusal> {
    let (gpu, node) = (&of.object.spec.gpu_uuid, &inputs.node);
    let gpus = &inputs.status()?.gpus;
    if !is_reportable(gpu, inputs) || gpus.iter().any(|there| there.uuid == *gpu) {
        return None;
    }
    let there: Vec<&str> = gpus.iter().map(|there| there.uuid.as_str()).collect();
    missing(format!(
        "node {node} has no GPU {gpu}: create a GPUQueueAllocation that names one of {}. A GPU that was not used since the \
         driver was loaded has no UUID yet: run nvidia-smi -pm 1 on the node",
        there.join(", ")
    ))
}

fn profile(of: &ResolvedAllocation, inputs: &GrantInputs) -> Option<Refusal> {
    let name = &of.object.spec.slack_profile_ref.as_ref()?.name;
    let Some(profile) = &of.profile else {
        let namespace = of.object.namespace().unwrap_or_default();
        return missing(format!(
            "SlackProfile {name} does not exist in namespace {namespace}: create it, or create a GPUQueueAllocation without it"
        ));
    };
    if profile.metadata.deletion_timestamp.is_some() {
        return missing(format!(
            "SlackProfile {name} is being deleted: create a GPUQueueAllocation with another profile or without one"
        ));
    }
    invalid(profile)
        .or_else(|| wrong_gpu(of, profile, inputs))
        .or_else(|| out_of_reach(of, name.as_str(), inputs))
}

/// Returns why the node cannot have the profile: a cluster distributes profiles of its own namespace.
fn out_of_reach(of: &ResolvedAllocation, name: &str, inputs: &GrantInputs) -> Option<Refusal> {
    let cluster = inputs.cache_node.as_ref()?.spec.cluster_ref.as_ref()?;
    let (own, theirs, node) = (of.object.namespace().unwrap_or_default(), &cluster.namespace, &inputs.node);
    if theirs.as_str() == own {
        return None;
    }
    missing(format!(
        "SlackProfile {name} of namespace {own} cannot reach node {node}, which gets profiles of namespace {theirs}: create \
         the profile and the GPUQueueAllocation there, or create a GPUQueueAllocation without the profile"
    ))
}

/// Returns why the profile is unusable, according to its own `Valid` condition.
fn invalid(profile: &SlackProfile) -> Option<Refusal> {
    let name = profile.name_any();
    let conditions = profile.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let Some(valid) = find(conditions, ConditionType::Valid) else {
        let message = format!("SlackProfile {name} has not been validated yet");
        return Some(Refusal::new(Reason::Progressing, message));
    };
    let reported = &valid.message;
    match valid.status {
        ConditionStatus::True => None,
        ConditionStatus::False => Some(Refusal::new(
            Reason::ProfileInvalid,
            format!(
                "SlackProfile {name} is invalid: {reported}. Correct it, or create a GPUQueueAllocation with another profile or \
                 without one"
            ),
        )),
        ConditionStatus::Unknown => missing(format!(
            "cannot determine whether SlackProfile {name} is valid: {reported}. See its condition Accepted, or create a \
             GPUQueueAllocation with another profile or without one"
        )),
    }
}

/// Returns why the profile does not match the GPU. For a GPU that the agent does not report, such as a MIG
/// partition, one GPU of the right product on the node is enough.
fn wrong_gpu(of: &ResolvedAllocation, profile: &SlackProfile, inputs: &GrantInputs) -> Option<Refusal> {
    let (gpu, node, name) = (&of.object.spec.gpu_uuid, &inputs.node, profile.name_any());
    let measured = profile.spec.subject.gpu_product.as_str();
    let mut there = inputs.status()?.gpus.clone();
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
        "SlackProfile {name} was measured on {measured}, but GPU {gpu} of node {node} is {}: create a GPUQueueAllocation with a \
         matching profile or without one",
        products.join(" or ")
    );
    Some(Refusal::new(Reason::WrongGpu, message))
}
