//! Additions of each mode to the agents' pods, compared with the pods of a cluster without modes.

use std::collections::BTreeMap;

use super::*;

/// A pool of raw devices.
fn raw() -> Value {
    json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } })
}

fn directory() -> Value {
    json!({ "directory": { "path": "/data/p", "size": "1Gi" } })
}

/// Returns all children of a cluster with these modes and this pool.
fn built(modes: Value, pool: Value) -> Vec<Child> {
    let cluster = cluster(json!({ "pools": [{ "name": "p" }], "agents": modes }));
    build(&cluster, &with_pool(found(&cluster), pool), Some(&certificates()))
}

fn template(children: &[Child]) -> Value {
    child(children, ChildKind::DaemonSet, "c-agent")["spec"]["template"].clone()
}

/// Collects every leaf value of a document by its path.
fn leaves(path: &str, value: &Value, found: &mut BTreeMap<String, String>) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path} {name}") };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| leaves(&below(name), value, found)),
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, item)| leaves(&below(&index.to_string()), item, found));
        }
        leaf => {
            found.insert(path.to_owned(), leaf.to_string());
        }
    }
}

/// Returns what the pod template has more (`+`) and less (`-`) than without modes. Other children must not
/// differ, except claim templates.
fn difference(modes: Value, pool: Value) -> Vec<String> {
    let (plain, with) = (built(json!({}), pool.clone()), built(modes, pool));
    let others = |children: &[Child]| -> Vec<Child> {
        let is_other =
            |child: &&Child| ![ChildKind::DaemonSet, ChildKind::ResourceClaimTemplate].contains(&child.kind);
        children.iter().filter(is_other).cloned().collect()
    };
    assert_eq!(others(&with), others(&plain));
    let all = |children: &[Child]| {
        let mut found = BTreeMap::new();
        leaves("", &template(children), &mut found);
        found
    };
    let (before, after) = (all(&plain), all(&with));
    let gone = before.iter().filter(|(path, value)| after.get(*path) != Some(*value));
    let come = after.iter().filter(|(path, value)| before.get(*path) != Some(*value));
    let mut lines: Vec<String> = gone.map(|(path, value)| format!("- {path}: {value}")).collect();
    lines.extend(come.map(|(path, value)| format!("+ {path}: {value}")));
    lines
}

/// Returns name and spec of the only claim template.
fn claimed(modes: Value) -> (String, Value) {
    let children = built(modes, directory());
    let mut templates = children.iter().filter(|child| child.kind == ChildKind::ResourceClaimTemplate);
    let one = templates.next().expect("a template");
    assert!(templates.next().is_none(), "one claim");
    (one.name.clone(), one.body["spec"].clone())
}

/// Agents that drive controllers also have memory for 128 queue pairs with 1,024 entries each.
const PRIVILEGED: [&str; 5] = [
    "- spec containers 0 resources limits memory: \"2Gi\"",
    "- spec containers 0 securityContext allowPrivilegeEscalation: false",
    "- spec containers 0 securityContext capabilities drop 0: \"ALL\"",
    "+ spec containers 0 resources limits memory: \"2570Mi\"",
    "+ spec containers 0 securityContext privileged: true",
];

#[test]
fn mode_none_adds_nothing() {
    for pool in [raw(), directory()] {
        let none = json!({ "mode": "None" });
        let modes = json!({ "deviceAccess": none, "gpuAccess": none, "rdma": none });
        assert_eq!(difference(modes, pool), Vec::<String>::new());
    }
}

#[test]
fn device_access_is_added_only_for_raw_pools() {
    let plugin = json!({ "deviceAccess": { "mode": "DevicePlugin", "resourceName": "example.com/nvme" } });
    let expected = [
        "+ spec containers 0 resources limits example.com/nvme: \"1\"",
        "+ spec containers 0 resources requests example.com/nvme: \"1\"",
    ];
    assert_eq!(difference(plugin.clone(), raw()), expected);
    let privileged = json!({ "deviceAccess": { "mode": "Privileged" } });
    assert_eq!(difference(privileged.clone(), raw()), PRIVILEGED);
    for modes in [plugin, privileged] {
        assert_eq!(difference(modes, directory()), Vec::<String>::new());
    }
}

#[test]
fn gpu_modes_add_required_access() {
    let gpus = |mode: &str, field: &str, value: &str| {
        let mut access = json!({ "mode": mode });
        if !field.is_empty() {
            access[field] = json!(value);
        }
        json!({ "gpuAccess": access })
    };
    assert_eq!(difference(gpus("Privileged", "", ""), directory()), PRIVILEGED);
    assert_eq!(
        difference(gpus("ManagementCdi", "", ""), directory()),
        ["+ metadata annotations nvidia.cdi.k8s.io/container.agent: \"management.nvidia.com/gpu=all\""]
    );
    assert_eq!(
        difference(gpus("RuntimeClass", "runtimeClassName", "nvidia"), directory()),
        [
            "+ spec containers 0 env 5 name: \"NVIDIA_VISIBLE_DEVICES\"",
            "+ spec containers 0 env 5 value: \"all\"",
            "+ spec containers 0 env 6 name: \"NVIDIA_DRIVER_CAPABILITIES\"",
            "+ spec containers 0 env 6 value: \"utility\"",
            "+ spec runtimeClassName: \"nvidia\"",
        ]
    );
    let dra = gpus("Dra", "deviceClassName", "gpu.nvidia.com");
    let (name, spec) = claimed(dra.clone());
    let exactly =
        json!({ "deviceClassName": "gpu.nvidia.com", "allocationMode": "All", "adminAccess": true });
    let request = json!({ "name": "gpus", "exactly": exactly });
    assert_eq!(spec, json!({ "spec": { "devices": { "requests": [request] } } }));
    assert_eq!(
        difference(dra, directory()),
        [
            "+ spec containers 0 resources claims 0 name: \"gpus\"".to_owned(),
            "+ spec resourceClaims 0 name: \"gpus\"".to_owned(),
            format!("+ spec resourceClaims 0 resourceClaimTemplateName: \"{name}\""),
        ]
    );
}

#[test]
fn rdma_modes_add_required_access() {
    let locks = "+ spec containers 0 securityContext capabilities add 0: \"IPC_LOCK\"";
    for mode in ["DevicePlugin", "SrIov"] {
        let modes = json!({ "rdma": { "mode": mode, "resourceName": "rdma/shared" } });
        let expected = [
            "+ spec containers 0 resources limits rdma/shared: \"1\"",
            "+ spec containers 0 resources requests rdma/shared: \"1\"",
            locks,
        ];
        assert_eq!(difference(modes, directory()), expected, "{mode}");
    }
    let dra = json!({ "rdma": { "mode": "Dra", "deviceClassName": "rdma.example.com" } });
    let (name, spec) = claimed(dra.clone());
    let exactly =
        json!({ "deviceClassName": "rdma.example.com", "allocationMode": "ExactCount", "count": 1 });
    let request = json!({ "name": "rdma", "exactly": exactly });
    assert_eq!(spec, json!({ "spec": { "devices": { "requests": [request] } } }));
    assert_eq!(
        difference(dra, directory()),
        [
            "+ spec containers 0 resources claims 0 name: \"rdma\"".to_owned(),
            locks.to_owned(),
            "+ spec resourceClaims 0 name: \"rdma\"".to_owned(),
            format!("+ spec resourceClaims 0 resourceClaimTemplateName: \"{name}\""),
        ]
    );
    let mut host = difference(json!({ "rdma": { "mode": "HostNetwork" } }), directory());
    host.retain(|line| !PRIVILEGED.contains(&line.as_str()));
    assert_eq!(
        host,
        [
            "+ spec containers 0 volumeMounts 8 mountPath: \"/dev/infiniband\"",
            "+ spec containers 0 volumeMounts 8 name: \"rdma\"",
            "+ spec dnsPolicy: \"ClusterFirstWithHostNet\"",
            "+ spec hostNetwork: true",
            "+ spec volumes 9 hostPath path: \"/dev/infiniband\"",
            "+ spec volumes 9 hostPath type: \"Directory\"",
            "+ spec volumes 9 name: \"rdma\"",
        ]
    );
}

#[test]
fn additions_of_several_modes_appear_once() {
    let lines = |modes: Value| difference(modes, raw());
    let device = |name: &str| json!({ "mode": "DevicePlugin", "resourceName": name });
    let one = lines(json!({ "deviceAccess": device("example.com/all"), "rdma": device("example.com/all") }));
    assert_eq!(one, lines(json!({ "rdma": device("example.com/all") })));
    let two =
        lines(json!({ "deviceAccess": device("example.com/nvme"), "rdma": device("example.com/rdma") }));
    assert_eq!(two.iter().filter(|line| line.contains(" requests ")).count(), 2, "{two:?}");
    let privileged = json!({ "mode": "Privileged" });
    assert_eq!(lines(json!({ "deviceAccess": privileged, "gpuAccess": privileged })), PRIVILEGED);
    let host = json!({ "mode": "HostNetwork" });
    assert_eq!(
        lines(json!({ "deviceAccess": privileged, "gpuAccess": privileged, "rdma": host })),
        lines(json!({ "rdma": host }))
    );
    let claims = lines(json!({
        "gpuAccess": { "mode": "Dra", "deviceClassName": "g" }, "rdma": { "mode": "Dra", "deviceClassName": "r" },
    }));
    let named = claims.iter().filter(|line| line.starts_with("+ spec containers 0 resources claims"));
    assert_eq!(named.count(), 2, "{claims:?}");
}

#[test]
fn privileged_container_omits_ineffective_settings() {
    for modes in [
        json!({ "gpuAccess": { "mode": "Privileged" }, "rdma": { "mode": "SrIov", "resourceName": "a/b" } }),
        json!({ "rdma": { "mode": "HostNetwork" } }),
        json!({ "deviceAccess": { "mode": "Privileged" } }),
    ] {
        let set = template(&built(modes, raw()));
        let context = &set["spec"]["containers"][0]["securityContext"];
        assert_eq!(*context, json!({ "privileged": true, "readOnlyRootFilesystem": true }));
    }
}

#[test]
fn each_device_class_has_its_own_template_with_a_valid_name() {
    let name = |class: &str| claimed(json!({ "gpuAccess": { "mode": "Dra", "deviceClassName": class } })).0;
    assert_eq!(name("gpu.nvidia.com"), name("gpu.nvidia.com"));
    assert_ne!(name("gpu.nvidia.com"), name("mig.nvidia.com"));
    let longest = ClusterNames { namespace: "n".to_owned(), name: "x".repeat(36), uid: "u".to_owned() };
    assert!(longest.claim("gpus", "01234567").len() <= 63);
}

#[test]
fn agents_run_on_no_node_of_another_cluster() {
    let cluster = cluster(json!({}));
    let affinity = |contested: &[&str]| {
        let mut inputs = found(&cluster);
        let other = |node: &&str| ((*node).to_owned(), "n/older".to_owned());
        inputs.assignment.contested = contested.iter().map(other).collect();
        let children = build(&cluster, &inputs, Some(&certificates()));
        child(&children, ChildKind::DaemonSet, "c-agent")["spec"]["template"]["spec"]["affinity"].clone()
    };
    assert_eq!(affinity(&[]), Value::Null);
    let not = |node: &str| json!({ "key": "metadata.name", "operator": "NotIn", "values": [node] });
    assert_eq!(
        affinity(&["n1", "n2"])["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"],
        json!({ "nodeSelectorTerms": [{ "matchFields": [not("n1"), not("n2")] }] })
    );
}
