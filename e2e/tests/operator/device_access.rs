//! Access modes of agents: those for GPUs and RDMA are rejected and leave running agents unchanged.

use serde_json::{Value, json};

use crate::operator::test_cluster::TestCluster;

#[test]
fn modes_for_gpus_and_rdma_are_rejected_and_leave_agents_unchanged() {
    let (k8s, _operator) = TestCluster::with_operator();
    k8s.cluster(json!({}));
    k8s.wait_condition("KVCacheCluster", "c", ["Accepted", "True", "AsDesired"]);
    let before = k8s.wait_for("DaemonSet", "c-agent").data["spec"].clone();
    let mode = |field: &str, access: Value| json!({ "agents": { field: access } });
    for (spec, field) in [
        (mode("gpuAccess", json!({ "mode": "Privileged" })), "agents.gpuAccess.mode is Privileged"),
        (
            mode("gpuAccess", json!({ "mode": "Dra", "deviceClassName": "gpu.example.com" })),
            "agents.gpuAccess.mode is Dra",
        ),
        (mode("rdma", json!({ "mode": "HostNetwork" })), "agents.rdma.mode is HostNetwork"),
    ] {
        k8s.cluster(spec);
        k8s.wait_message("KVCacheCluster", "c", ["Accepted", "False", "Unsupported"], &[field, "use None"]);
        assert_eq!(k8s.wait_for("DaemonSet", "c-agent").data["spec"], before, "agents are unchanged");
        k8s.cluster(json!({}));
        k8s.wait_condition("KVCacheCluster", "c", ["Accepted", "True", "AsDesired"]);
    }
}
