//! What engines need to connect, as a ConfigMap: addresses, and configurations to be copied.

use reprise_crds::KVCacheCluster;
use serde_json::{Value, json};

use super::{config_map, metadata};
use crate::child::Child;
use crate::names::{ClusterNames, Component};

/// Memory of the host that vLLM's offloading may use, in the example for GPUs. An engine of one GPU rarely has less; people write
/// their own.
const OFFLOADING_BYTES: u64 = 16 << 30;
/// Tokens of a chunk there.
const OFFLOADING_TOKENS: u32 = 64;

pub(super) fn build(cluster: &KVCacheCluster, names: &ClusterNames) -> Child {
    let directory = &cluster.spec.agents.socket.directory;
    let socket = format!("{directory}/agent.sock");
    let data = json!({
        "socket": socket,
        "socketDirectory": directory,
        "controlPlane": names.control_plane_address(),
        "vllm-kv-transfer-config.json": in_host_memory(&socket).to_string(),
        "vllm-gpu-kv-transfer-config.json": offloading(&socket).to_string(),
    });
    config_map(metadata(cluster, names, Component::Agent, &names.connection()), &data)
}

/// For engines that keep their KV in host memory (python/README.md, "vLLM").
pub(super) fn in_host_memory(socket: &str) -> Value {
    json!({
        "kv_connector": "RepriseConnector",
        "kv_connector_module_path": "reprise.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": { "socket": socket },
    })
}

/// For engines on GPUs (python/README.md, "vLLM on GPUs").
pub(super) fn offloading(socket: &str) -> Value {
    json!({
        "kv_connector": "RepriseOffloadingConnector",
        "kv_connector_module_path": "reprise.vllm.offloading",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": OFFLOADING_BYTES,
            "block_size": OFFLOADING_TOKENS,
            "secondary_tiers": [{ "type": "RepriseTier", "module_path": "reprise.vllm.tier", "socket": socket }],
        },
    })
}
