//! Tenants: what reaches the agents, whether reservations fit, and what is refused.

use reprise_e2e::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::lab::Lab;

fn tenant(lab: &Lab, name: &str, spec: &Value) {
    lab.apply(&json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": { "name": name }, "spec": spec,
    }));
}

#[test]
fn reservations_of_tenants_are_compared_with_what_the_nodes_have() {
    let lab = Lab::new();
    let operator = lab.operator();
    let reserves = |size: &str| json!({ "perNode": { "ssd": { "reserved": size } } });
    tenant(&lab, "a", &reserves("48Mi"));
    lab.cluster(json!({}));
    lab.wait_condition("CacheTenant", "a", ["QuotaFeasible", "Unknown", "NotReported"]);
    let told = |words: &str| {
        let config = lab.get("ConfigMap", "c-agent")?;
        config.data["data"]["agent.toml"].as_str()?.contains(words).then_some(())
    };
    wait_until("agents are told of it", PATIENCE, || told("48MiB"));
    // Each node has 64Mi.
    for node in ["n1", "n2"] {
        lab.agent_reports(node, "Open");
    }
    // Another one, and together they are too many. One that is refused changes nothing on nodes.
    tenant(&lab, "b", &reserves("32Mi"));
    let said = lab.wait_condition("CacheTenant", "b", ["QuotaFeasible", "False", "OverCapacity"]);
    assert!(said.contains("n1") && said.contains("80Mi") && said.contains("a, b"), "{said}");
    lab.wait_condition("CacheTenant", "a", ["Ready", "False", "OverCapacity"]);
    tenant(&lab, "b", &reserves("16Mi"));
    for name in ["a", "b"] {
        lab.wait_condition("CacheTenant", name, ["Ready", "True", "AsDesired"]);
    }
    let counted = json!({ "maxGpuQueuePairs": 1, "perNode": { "ssd": { "limit": "17Mi" } } });
    tenant(&lab, "c", &counted);
    let said = lab.wait_condition("CacheTenant", "c", ["Accepted", "False", "Unsupported"]);
    assert!(said.contains("maxGpuQueuePairs"), "{said}");
    wait_until("b's new reservation is told", PATIENCE, || told("16MiB"));
    assert!(told("17MiB").is_none());
    operator.kill();
}
