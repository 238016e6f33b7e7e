//! Invalid values: rejected before any object is created, with an error that names the value.

use std::fs;

use reprise_e2e::TestEnv;

use crate::chart::helm::template;

/// Values, and words that the error must contain.
const BAD: &[(&str, &[&str])] = &[
    // Values of the chart itself.
    ("operators: {}", &["operators", "not allowed"]),
    ("operator: {replica: 2}", &["/operator", "replica", "not allowed"]),
    ("operator: {replicas: 0}", &["/operator/replicas", "minimum"]),
    ("operator: {replicas: two}", &["/operator/replicas", "integer"]),
    ("images: {agent: {tag: 'a b'}}", &["/images/agent/tag", "pattern"]),
    ("images: {agent: {digest: 'sha256:12'}}", &["/images/agent/digest", "pattern"]),
    ("images: {pullPolicy: Sometimes}", &["/images/pullPolicy", "one of"]),
    ("crds: {install: 'yes'}", &["/crds/install", "boolean"]),
    ("monitoring: {podMonitor: true}", &["/monitoring/podMonitor", "one of"]),
    (
        "seccomp: {installer: {kubeletDirectory: kubelet}}",
        &["/seccomp/installer/kubeletDirectory", "pattern"],
    ),
    ("test: {nodes: 0}", &["/test/nodes", "minimum"]),
    ("clusterName: Chat", &["/clusterName", "pattern"]),
    ("clusterName: a-name-that-is-much-too-long-for-what-is-made-of-it", &["/clusterName", "maxLength"]),
    // Specs of custom resources, by the schemas of the definitions.
    ("cluster: {cach: {dram: 1Gi}}", &["/cluster", "cach", "not allowed"]),
    ("cluster: {cache: {dram: 1 GB}}", &["/cluster/cache/dram", "pattern"]),
    ("cluster: {cache: {dram: 1073741824}}", &["/cluster/cache/dram", "string"]),
    ("cluster: {controlPlane: {replicas: 65}}", &["/cluster/controlPlane/replicas", "maximum"]),
    ("cluster: {agents: {adminPort: 80}}", &["/cluster/agents/adminPort", "minimum"]),
    ("cluster: {agents: {clientTransport: Tcp}}", &["/cluster/agents/clientTransport", "one of"]),
    ("cluster: {agents: {socket: {mode: '777'}}}", &["/cluster/agents/socket/mode", "minLength"]),
    ("cluster: {etcd: {external: {}}}", &["/cluster/etcd/external", "endpoints"]),
    ("cluster: {pools: [{}]}", &["/cluster/pools/0", "name"]),
    ("pools: {Fast: {directory: {path: /mnt/a, size: 1Gi}}}", &["invalid propertyName", "Fast"]),
    ("pools: {fast: {directory: {path: mnt, size: 1Gi}}}", &["/pools/fast/directory/path", "pattern"]),
    ("pools: {fast: {devices: {globs: [/dev/sda]}}}", &["/pools/fast/devices/globs/0"]),
    ("pools: {fast: {directory: {path: /mnt/a, size: 1Gi}, engin: Plain}}", &["/pools/fast", "engin"]),
    ("tenants: {team-a: {budget: {ssd: {limit: lots}}}}", &["/tenants/team-a/budget/ssd/limit", "pattern"]),
    // Rules that a schema cannot express.
    ("pools: {fast: {}}", &["pools.fast", "exactly one of devices, directory and claims"]),
    (
        "pools: {fast: {directory: {path: /mnt/a, size: 1Gi}, devices: {globs: [/dev/disk/by-id/nvme-a]}}}",
        &["pools.fast", "devices, directory"],
    ),
    (
        "pools: {fast: {claims: {storageClassName: a, size: 1Gi}}}",
        &["pools.fast.claims", "not in this release"],
    ),
    (
        "pools: {fast: {directory: {path: /mnt/a, size: 1Gi}, deletionPolicy: Wipe}}",
        &["pools.fast", "wipeConfirmation: yes-really-destroy-the-data"],
    ),
    ("cluster: {etcd: {mode: External}}", &["cluster.etcd.mode External needs endpoints"]),
    (
        "cluster: {etcd: {mode: External, managed: {}, external: {endpoints: ['http://a:2379']}}}",
        &["remove cluster.etcd.managed"],
    ),
    ("cluster: {etcd: {external: {endpoints: ['http://a:2379']}}}", &["remove cluster.etcd.external"]),
    ("cluster: {agents: {seccomp: {mode: Localhost}}}", &["seccomp.localhostProfile", "mode Localhost"]),
    (
        "cluster: {agents: {seccomp: {localhostProfile: a.json}}}",
        &["seccomp.localhostProfile", "mode Localhost"],
    ),
    (
        "cluster: {agents: {deviceAccess: {mode: DevicePlugin}}}",
        &["deviceAccess.resourceName", "mode DevicePlugin,"],
    ),
    (
        "cluster: {agents: {gpuAccess: {runtimeClassName: nvidia}}}",
        &["gpuAccess.runtimeClassName", "mode RuntimeClass,"],
    ),
    ("cluster: {agents: {gpuAccess: {mode: Dra}}}", &["gpuAccess.deviceClassName", "mode Dra,"]),
    ("cluster: {agents: {rdma: {mode: SrIov}}}", &["rdma.resourceName", "mode DevicePlugin or SrIov,"]),
    ("cluster: {agents: {rdma: {deviceClassName: a}}}", &["rdma.deviceClassName", "mode Dra,"]),
    ("cluster: {agents: {gpuAccess: {mode: Privileged}}}", &["gpuAccess.mode Privileged", "use None"]),
    ("cluster: {agents: {rdma: {mode: HostNetwork}}}", &["rdma.mode HostNetwork", "use None"]),
    ("cluster: {pools: [{name: a}, {name: a}]}", &["cluster.pools names a twice"]),
];

#[test]
fn rejects_invalid_values_with_an_error_that_names_them() {
    let env = TestEnv::new();
    let file = env.folder().join("values.yaml");
    for (values, words) in BAD {
        fs::write(&file, values).expect("the folder is writable");
        let rendered = template(&[&file], &[]);
        assert!(!rendered.success, "{values} is accepted");
        for word in *words {
            assert!(rendered.stderr.contains(word), "no '{word}' for {values} in: {}", rendered.stderr);
        }
    }
}

#[test]
fn rejects_an_unsupported_version_of_kubernetes() {
    let rendered = template(&[], &["--kube-version", "1.33.9"]);
    assert!(!rendered.success && rendered.stderr.contains("1.34"), "{}", rendered.stderr);
    assert!(template(&[], &["--kube-version", "1.34.0"]).success);
}
