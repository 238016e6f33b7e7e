//! Access of the agents' pods to raw devices.

use super::*;

/// Returns the agent's container in a cluster with this access and this pool.
fn container(access: Value, pool: Value) -> Value {
    let spec = json!({ "pools": [{ "name": "p" }], "agents": { "deviceAccess": access } });
    let children = built(spec, |inputs| add_pool(inputs, pool));
    pod(child(&children, ChildKind::DaemonSet, "c-agent"))["containers"][0].clone()
}

#[test]
fn device_access_is_added_only_for_raw_pools() {
    let raw = || json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
    let none = || json!({ "mode": "None" });
    let plugin = json!({ "mode": "DevicePlugin", "resourceName": "example.com/nvme" });
    let privileged = json!({ "mode": "Privileged" });
    for access in [plugin.clone(), privileged.clone()] {
        assert_eq!(container(access, directory()), container(none(), directory()));
    }
    let before = container(none(), raw());
    let mut expected = before.clone();
    for bound in ["requests", "limits"] {
        expected["resources"][bound]["example.com/nvme"] = json!("1");
    }
    assert_eq!(container(plugin, raw()), expected);
    let mut expected = before;
    expected["securityContext"] = json!({ "privileged": true, "readOnlyRootFilesystem": true });
    // Agents that drive controllers also have memory for 128 queue pairs with 1,024 entries each.
    expected["resources"]["limits"]["memory"] = json!("2570Mi");
    assert_eq!(container(privileged, raw()), expected);
}

#[test]
fn agents_run_on_no_node_of_another_cluster() {
    let cluster = cluster(json!({}));
    let affinity = |contested: &[&str]| {
        let mut inputs = found(&cluster);
        let other = |node: &&str| ((*node).to_owned(), "n/older".to_owned());
        inputs.assignment.contested = contested.iter().map(other).collect();
        let children = build(&cluster, &inputs);
        child(&children, ChildKind::DaemonSet, "c-agent")["spec"]["template"]["spec"]["affinity"].clone()
    };
    assert_eq!(affinity(&[]), Value::Null);
    let not = |node: &str| json!({ "key": "metadata.name", "operator": "NotIn", "values": [node] });
    assert_eq!(
        affinity(&["n1", "n2"])["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"],
        json!({ "nodeSelectorTerms": [{ "matchFields": [not("n1"), not("n2")] }] })
    );
}
