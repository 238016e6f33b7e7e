//! Modes of access on a real API server: claims whose templates it refuses keep agents as they are, and those that it takes are in the pods.

use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::{Lab, SPACE};

/// What a namespace must say whose claims see devices that others have.
const ADMIN_ACCESS: &str = "resource.kubernetes.io/admin-access";

fn with_gpus(mode: Value) -> Value {
    json!({ "agents": { "gpuAccess": mode } })
}

#[test]
fn claims_with_admin_access_wait_for_the_namespaces_label_and_agents_stay_as_they_are_meanwhile() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(json!({}));
    let before = lab.wait_for("DaemonSet", "c-agent").data["spec"].clone();
    lab.cluster(with_gpus(json!({ "mode": "Dra", "deviceClassName": "gpu.example.com" })));
    let said = wait_until("the cluster to say what it lacks", PATIENCE, || {
        let found = lab.get("KVCacheCluster", "c")?;
        let conditions = found.data["status"]["conditions"].as_array()?.clone();
        let ready = conditions.into_iter().find(|condition| condition["type"] == "Ready")?;
        let words = ready["message"].as_str()?.to_owned();
        words.contains(ADMIN_ACCESS).then_some(words)
    });
    assert!(said.contains("label"), "{said}");
    assert_eq!(lab.wait_for("DaemonSet", "c-agent").data["spec"], before, "agents go on as they are");

    let labels = json!({ ADMIN_ACCESS: "true" });
    lab.apply(
        &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": SPACE, "labels": labels } }),
    );
    let pod = wait_until("pods with a claim", PATIENCE, || {
        let pod = lab.get("DaemonSet", "c-agent")?.data["spec"]["template"]["spec"].clone();
        pod["resourceClaims"].is_array().then_some(pod)
    });
    let template = pod["resourceClaims"][0]["resourceClaimTemplateName"].as_str().expect("a name").to_owned();
    let request =
        lab.wait_for("ResourceClaimTemplate", &template).data["spec"]["spec"]["devices"]["requests"][0]
            .clone();
    assert_eq!(request["exactly"]["adminAccess"], true, "{request}");
    assert_eq!(request["exactly"]["allocationMode"], "All", "{request}");
    let claims = pod["containers"][0]["resources"]["claims"].clone();
    assert_eq!(claims[0]["name"], pod["resourceClaims"][0]["name"]);

    lab.cluster(json!({}));
    wait_until("the template to go", PATIENCE, || {
        lab.get("ResourceClaimTemplate", &template).is_none().then_some(())
    });
    assert_eq!(lab.wait_for("DaemonSet", "c-agent").data["spec"], before, "and pods are as before");
    operator.kill();
}

#[test]
fn what_a_wanted_transport_has_come_to_is_told() {
    let lab = Lab::new();
    let operator = lab.operator();
    lab.cluster(
        json!({ "agents": { "rdma": { "mode": "DevicePlugin", "resourceName": "example.com/rdma" } } }),
    );
    let said = lab.wait_condition("KVCacheCluster", "c", ["TransportFallback", "True", "Unsupported"]);
    assert!(said.contains("TCP"), "{said}");
    let container =
        lab.wait_for("DaemonSet", "c-agent").data["spec"]["template"]["spec"]["containers"][0].clone();
    assert_eq!(container["resources"]["limits"]["example.com/rdma"], "1");
    assert_eq!(container["securityContext"]["capabilities"]["add"], json!(["IPC_LOCK"]));
    lab.cluster(json!({}));
    lab.wait_condition("KVCacheCluster", "c", ["TransportFallback", "False", "AsDesired"]);
    operator.kill();
}
