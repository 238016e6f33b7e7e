//! Access modes for GPUs and RDMA devices: rejected claim templates leave agents unchanged, accepted ones are
//! in their pods.

use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::test_cluster::{NAMESPACE, TestCluster};

/// Label of namespaces that may have claims with admin access.
const ADMIN_ACCESS: &str = "resource.kubernetes.io/admin-access";

fn with_gpus(mode: Value) -> Value {
    json!({ "agents": { "gpuAccess": mode } })
}

#[test]
fn admin_access_claim_waits_for_namespace_label_and_leaves_agents_unchanged() {
    let k8s = TestCluster::new();
    let operator = k8s.operator();
    k8s.cluster(json!({}));
    let before = k8s.wait_for("DaemonSet", "c-agent").data["spec"].clone();
    k8s.cluster(with_gpus(json!({ "mode": "Dra", "deviceClassName": "gpu.example.com" })));
    let message = wait_until("the cluster reports the missing label", PATIENCE, || {
        let found = k8s.get("KVCacheCluster", "c")?;
        let conditions = found.data["status"]["conditions"].as_array()?.clone();
        let ready = conditions.into_iter().find(|condition| condition["type"] == "Ready")?;
        let words = ready["message"].as_str()?.to_owned();
        words.contains(ADMIN_ACCESS).then_some(words)
    });
    assert!(message.contains("label"), "{message}");
    assert_eq!(k8s.wait_for("DaemonSet", "c-agent").data["spec"], before, "agents are unchanged");

    let labels = json!({ ADMIN_ACCESS: "true" });
    k8s.apply(
        &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE, "labels": labels } }),
    );
    let pod = wait_until("the pod template has a claim", PATIENCE, || {
        let pod = k8s.get("DaemonSet", "c-agent")?.data["spec"]["template"]["spec"].clone();
        pod["resourceClaims"].is_array().then_some(pod)
    });
    let template = pod["resourceClaims"][0]["resourceClaimTemplateName"].as_str().expect("a name").to_owned();
    let request =
        k8s.wait_for("ResourceClaimTemplate", &template).data["spec"]["spec"]["devices"]["requests"][0]
            .clone();
    assert_eq!(request["exactly"]["adminAccess"], true, "{request}");
    assert_eq!(request["exactly"]["allocationMode"], "All", "{request}");
    let claims = pod["containers"][0]["resources"]["claims"].clone();
    assert_eq!(claims[0]["name"], pod["resourceClaims"][0]["name"]);

    k8s.cluster(json!({}));
    wait_until("the claim template is deleted", PATIENCE, || {
        k8s.get("ResourceClaimTemplate", &template).is_none().then_some(())
    });
    assert_eq!(
        k8s.wait_for("DaemonSet", "c-agent").data["spec"],
        before,
        "the pod template has no claim again"
    );
    operator.kill();
}

#[test]
fn unsupported_rdma_sets_transport_fallback_condition() {
    let k8s = TestCluster::new();
    let operator = k8s.operator();
    k8s.cluster(
        json!({ "agents": { "rdma": { "mode": "DevicePlugin", "resourceName": "example.com/rdma" } } }),
    );
    let message = k8s.wait_condition("KVCacheCluster", "c", ["TransportFallback", "True", "Unsupported"]);
    assert!(message.contains("TCP"), "{message}");
    let container =
        k8s.wait_for("DaemonSet", "c-agent").data["spec"]["template"]["spec"]["containers"][0].clone();
    assert_eq!(container["resources"]["limits"]["example.com/rdma"], "1");
    assert_eq!(container["securityContext"]["capabilities"]["add"], json!(["IPC_LOCK"]));
    k8s.cluster(json!({}));
    k8s.wait_condition("KVCacheCluster", "c", ["TransportFallback", "False", "AsDesired"]);
    operator.kill();
}
