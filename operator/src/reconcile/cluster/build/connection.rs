//! ConfigMap for engines: addresses, and vLLM configurations to copy.

use reprise_crds::KVCacheCluster;
use serde_json::{Value, json};

use super::metadata::{config_map, metadata};
use crate::framework::child::Child;
use crate::reconcile::names::{ClusterNames, Component};

/// Host memory for vLLM's offloading in the example for GPUs. Hosts of GPU engines rarely have less; users
/// can write their own configuration.
const OFFLOADING_BYTES: u64 = 16 << 30;
/// Tokens per offloaded chunk in the example.
const OFFLOADING_TOKENS: u32 = 64;

pub(super) fn build(cluster: &KVCacheCluster, names: &ClusterNames) -> Child {
    let socket = socket(cluster);
    let data = json!({
        "socket": socket,
        "socketDirectory": cluster.spec.agents.socket.directory,
        "controlPlane": names.control_plane_address(),
        "vllm-kv-transfer-config.json": in_host_memory(&socket).to_string(),
        "vllm-gpu-kv-transfer-config.json": offloading(&socket).to_string(),
    });
    config_map(metadata(cluster, names, Component::Agent, &names.connection()), &data)
}

/// Path of the agent's socket on nodes and in pods.
pub(super) fn socket(cluster: &KVCacheCluster) -> String {
    format!("{}/agent.sock", cluster.spec.agents.socket.directory)
}

/// Configuration for engines that keep KV in host memory (docs/vllm.md, "Start an engine with the
/// connector").
pub(super) fn in_host_memory(socket: &str) -> Value {
    transfer("RepriseConnector", "reprise.vllm", &json!({ "socket": socket }))
}

/// Configuration for engines on GPUs (docs/vllm.md, "The tier for GPUs").
pub(super) fn offloading(socket: &str) -> Value {
    let tier = json!({ "type": "RepriseTier", "module_path": "reprise.vllm.tier", "socket": socket });
    let settings = json!({
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": OFFLOADING_BYTES,
        "block_size": OFFLOADING_TOKENS,
        "secondary_tiers": [tier],
    });
    transfer("RepriseOffloadingConnector", "reprise.vllm.offloading", &settings)
}

fn transfer(connector: &str, module: &str, settings: &Value) -> Value {
    json!({
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    })
}
