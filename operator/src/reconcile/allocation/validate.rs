//! Validates an allocation: the objects that it refers to must exist and be suitable.
//!
//! The GPU must be among those that the agent reports. An agent that sees no GPUs (driver not loaded) reports
//! none; then the spec is accepted as written. Agents do not report MIG partitions. A profile that the node does not
//! have has no effect, so it does not delay the grant.

use reprise_crds::fields::GpuUuid;
use reprise_crds::status::Reason;

use super::dereference::{GrantInputs, NodePresence, ResolvedAllocation, queue_percent};
use crate::framework::refusal::Refusal;

/// Prefix of the UUID of a MIG partition.
const PART: &str = "MIG-";

/// Returns why an allocation is rejected; `None` if it is accepted.
pub fn validate(of: &ResolvedAllocation, inputs: &GrantInputs) -> Option<Refusal> {
    node(inputs).or_else(|| pool(of, inputs)).or_else(|| gpu(of, inputs))
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
    match inputs.presence {
        NodePresence::Present if inputs.cache_node.is_some() => None,
        NodePresence::Gone => {
            missing(format!("node {node} does not exist: create a GPUQueueAllocation for an existing node"))
        }
        NodePresence::Present | NodePresence::Removed => missing(format!(
            "node {node} belongs to no KVCacheCluster and has no agent: select it with agents.nodeSelector of a cluster"
        )),
    }
}

fn pool(of: &ResolvedAllocation, inputs: &GrantInputs) -> Option<Refusal> {
    let (name, node) = (&of.object.spec.pool_ref.name, &inputs.node);
    let other = "create a GPUQueueAllocation that names another pool";
    let Some(pool) = &of.pool else {
        return missing(format!("SSDPool {name} does not exist: create it, or {other}"));
    };
    if queue_percent(pool).is_none() {
        let message =
            format!("SSDPool {name} does not use raw devices, so it has no NVMe queues to grant: {other}");
        return Some(Refusal::new(Reason::InvalidSpec, message));
    }
    if pool.metadata.deletion_timestamp.is_some() {
        return missing(format!("SSDPool {name} is being deleted: {other}"));
    }
    if !of.is_pool_on_node {
        return missing(format!(
            "SSDPool {name} is not on node {node}: list the pool in spec.pools of the cluster, select the node with its \
             nodeSelector and see its condition Accepted, or create a GPUQueueAllocation for another node"
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
