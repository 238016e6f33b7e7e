//! `KVCacheCluster`.

use reprise_crds::KVCacheCluster;
use serde_json::{Value, json};

use super::cases::{
    Case, Table, accepts, accepts_name, changes, keeps, of_spec, refuses, refuses_name, round_trip,
};

pub(crate) fn table() -> Table {
    let mut cases = whole();
    cases.extend(etcd());
    cases.extend(agents());
    cases.extend(cache());
    cases.extend(control_plane());
    Table {
        kind: "KVCacheCluster",
        base: json!({
            "apiVersion": "reprise.dev/v1alpha1",
            "kind": "KVCacheCluster",
            "metadata": {"name": "main", "namespace": "reprise"},
            "spec": {},
        }),
        cases,
        out_of_bounds: vec![
            ("spec.etcd.keyPrefix", of_spec(json!({"etcd": {"keyPrefix": "reprise"}}))),
            (
                "spec.etcd.external.endpoints[0]",
                of_spec(json!({"etcd": {"external": {"endpoints": ["etcd-0.db:2379"]}}})),
            ),
            ("spec.controlPlane.replicas", of_spec(json!({"controlPlane": {"replicas": 0}}))),
            ("spec.agents.socket.mode", of_spec(json!({"agents": {"socket": {"mode": "0070"}}}))),
            ("spec.agents.socket.allowUids", of_spec(json!({"agents": {"socket": {"allowUids": [1, 1]}}}))),
            ("spec.agents.adminPort", of_spec(json!({"agents": {"adminPort": 80}}))),
            ("spec.agents.deviceAccess.mode", of_spec(json!({"agents": {"deviceAccess": {"mode": "Cdi"}}}))),
            ("spec.agents.nodeSelector.a", of_spec(json!({"agents": {"nodeSelector": {"a": "x y"}}}))),
            (
                "spec.cache.shares.unsavedPermille",
                of_spec(json!({"cache": {"shares": {"unsavedPermille": 0}}})),
            ),
            ("spec.cache.dram", of_spec(json!({"cache": {"dram": "1GiB"}}))),
            ("spec.cache.limits.loadHold", of_spec(json!({"cache": {"limits": {"loadHold": "1d"}}}))),
            ("spec.pools[0].name", of_spec(json!({"pools": [{"name": "Fast"}]}))),
            ("spec.pools", of_spec(json!({"pools": [{"name": "fast"}, {"name": "fast"}]}))),
        ],
        round_trip: round_trip::<KVCacheCluster>,
    }
}

fn whole() -> Vec<Case> {
    let image = json!({"repository": "registry.example/reprise/agent", "tag": "0.1.0"});
    let digest = format!("sha256:{}", "0f".repeat(32));
    vec![
        accepts("nothing but defaults", json!({})),
        accepts(
            "images, pools, injection",
            json!({
                "images": {"agent": image, "pullPolicy": "Never", "pullSecrets": [{"name": "registry"}]},
                "pools": [{"name": "fast"}, {"name": "slow"}],
                "slackProfiles": {"matchLabels": {"cluster": "main"}},
                "injection": {"mode": "Webhook", "namespaceSelector": {"matchLabels": {"reprise": "yes"}}},
                "monitoring": {"mode": "PodMonitor"},
                "paused": true,
            }),
        ),
        accepts_name("a name of 36", &"x".repeat(36)),
        refuses_name("use 1 to 36 of a-z", &"x".repeat(37)),
        refuses_name("use 1 to 36 of a-z", "main.eu"),
        refuses_name("use 1 to 36 of a-z", "9main"),
        refuses("exactly one of tag and digest", json!({"images": {"agent": {"repository": "x/y"}}})),
        refuses(
            "exactly one of tag and digest",
            json!({"images": {"etcd": {"repository": "x/y", "tag": "1", "digest": digest}}}),
        ),
        refuses(
            "a key in matchLabels is longer",
            json!({"slackProfiles": {"matchLabels": {"k".repeat(318): "v"}}}),
        ),
        refuses(
            "In and NotIn need values",
            json!({"slackProfiles": {"matchExpressions": [{"key": "a", "operator": "In"}]}}),
        ),
        changes("what may change", json!({}), json!({"paused": true, "cache": {"dram": "4Gi"}})),
    ]
}

fn etcd() -> Vec<Case> {
    let external = |more: Value| {
        let mut external = json!({"endpoints": ["http://etcd-0.db:2379", "http://etcd-1.db:2379"]});
        for (key, value) in more.as_object().into_iter().flatten() {
            external[key] = value.clone();
        }
        json!({"etcd": {"mode": "External", "external": external}})
    };
    let tls = json!({
        "caSecretRef": {"name": "etcd", "key": "ca.crt"},
        "clientSecretRef": {"name": "etcd-client"},
        "serverName": "etcd.example",
    });
    let user = json!({"name": "reprise", "passwordSecretRef": {"name": "etcd-user", "key": "password"}});
    let managed = |managed: Value| json!({"etcd": {"managed": managed}});
    let storage = |storage: Value| json!({"etcd": {"managed": {"storage": storage}}});
    vec![
        accepts("an etcd that is there", external(json!({"user": user}))),
        accepts("TLS", external(json!({"endpoints": ["https://etcd-0.db:2379"], "tls": tls}))),
        accepts(
            "three members on a class",
            managed(json!({"replicas": 3, "storage": {"storageClassName": "fast"}})),
        ),
        refuses("mode External needs endpoints", json!({"etcd": {"mode": "External"}})),
        refuses(
            "mode Managed excludes external",
            json!({"etcd": {"external": {"endpoints": ["http://etcd-0:2379"]}}}),
        ),
        refuses("mode External excludes managed", {
            let mut both = external(json!({}));
            both["etcd"]["managed"] = json!({});
            both
        }),
        refuses("endpoints must begin with https://", external(json!({"tls": tls}))),
        refuses(
            "endpoints must begin with https://",
            external(json!({"endpoints": ["https://etcd-0.db:2379"]})),
        ),
        refuses("etcd.managed.replicas is not 1, 3 or 5", managed(json!({"replicas": 2}))),
        refuses("etcd.managed.storage.size is less than 64Mi", storage(json!({"size": "1Mi"}))),
        refuses(
            "requests.memory is larger than limits.memory",
            managed(json!({"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}})),
        ),
        changes(
            "etcd grows",
            managed(json!({"replicas": 1})),
            managed(json!({"replicas": 3, "storage": {"size": "2Gi"}})),
        ),
        keeps("etcd.mode is immutable", json!({}), external(json!({}))),
        keeps("etcd.keyPrefix is immutable", json!({}), json!({"etcd": {"keyPrefix": "/other/"}})),
        keeps(
            "etcd.managed.replicas must not decrease",
            managed(json!({"replicas": 3})),
            managed(json!({"replicas": 1})),
        ),
        keeps(
            "etcd.managed.storage.size must not decrease",
            storage(json!({"size": "2Gi"})),
            storage(json!({"size": "1Gi"})),
        ),
        keeps(
            "storageClassName is immutable",
            storage(json!({"storageClassName": "fast"})),
            storage(json!({"storageClassName": "slow"})),
        ),
        keeps(
            "can neither be added nor removed",
            storage(json!({"storageClassName": "fast"})),
            storage(json!({})),
        ),
    ]
}

fn agents() -> Vec<Case> {
    let agents = |agents: Value| json!({"agents": agents});
    let toleration = |toleration: Value| json!({"agents": {"tolerations": [toleration]}});
    vec![
        accepts(
            "node selection and permissions of agents",
            agents(json!({
                "nodeSelector": {"reprise.dev/cache": "yes"},
                "tolerations": [
                    {"operator": "Exists"},
                    {"key": "gpu", "value": "yes", "effect": "NoExecute", "tolerationSeconds": 60},
                ],
                "updateStrategy": {"type": "OnDelete"},
                "socket": {"directory": "/run/other", "allowUids": [1000, 1001]},
                "seccomp": {"mode": "Localhost", "localhostProfile": "profiles/reprise.json"},
                "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1024Mi"}},
                "log": {"format": "Text", "level": "info,reprise_transport=debug"},
            })),
        ),
        accepts(
            "GPUs by a claim",
            agents(json!({"gpuAccess": {"mode": "Dra", "deviceClassName": "gpu.nvidia.com"}})),
        ),
        accepts(
            "RDMA by a device",
            agents(json!({"rdma": {"mode": "DevicePlugin", "resourceName": "rdma/ib"}})),
        ),
        accepts(
            "RDMA by a claim and GPUs by a runtime class",
            agents(json!({
                "rdma": {"mode": "Dra", "deviceClassName": "rdma.example.com"},
                "gpuAccess": {"mode": "RuntimeClass", "runtimeClassName": "nvidia"},
            })),
        ),
        accepts(
            "raw devices by a plugin",
            agents(json!({"deviceAccess": {"mode": "DevicePlugin", "resourceName": "example.com/nvme"}})),
        ),
        accepts(
            "privileged in every way",
            agents(json!({"deviceAccess": {"mode": "Privileged"}, "gpuAccess": {"mode": "Privileged"}})),
        ),
        accepts(
            "the node's network with ports of their own",
            agents(json!({"rdma": {"mode": "HostNetwork"}})),
        ),
        refuses(
            "are equal on the node's network",
            agents(json!({"rdma": {"mode": "HostNetwork"}, "adminPort": 7410})),
        ),
        refuses(
            "deviceAccess.resourceName must be set with",
            agents(json!({"deviceAccess": {"mode": "DevicePlugin"}})),
        ),
        refuses(
            "deviceAccess.resourceName must be set with",
            agents(json!({"deviceAccess": {"mode": "Privileged", "resourceName": "example.com/nvme"}})),
        ),
        refuses(
            "deviceAccess.resourceName must be set with",
            agents(json!({"deviceAccess": {"resourceName": "example.com/nvme"}})),
        ),
        refuses("gpuAccess.deviceClassName must be set with", agents(json!({"gpuAccess": {"mode": "Dra"}}))),
        refuses(
            "gpuAccess.deviceClassName must be set with",
            agents(json!({"gpuAccess": {"deviceClassName": "x"}})),
        ),
        refuses(
            "gpuAccess.runtimeClassName must be set with",
            agents(json!({"gpuAccess": {"mode": "RuntimeClass"}})),
        ),
        refuses("rdma.resourceName must be set with", agents(json!({"rdma": {"mode": "SrIov"}}))),
        refuses("rdma.deviceClassName must be set with", agents(json!({"rdma": {"deviceClassName": "x"}}))),
        refuses("rdma.deviceClassName must be set with", agents(json!({"rdma": {"mode": "Dra"}}))),
        refuses(
            "seccomp.localhostProfile must be set with",
            agents(json!({"seccomp": {"mode": "Localhost"}})),
        ),
        refuses("peers.credit is outside 1Mi to 16Gi", agents(json!({"peers": {"credit": "17Gi"}}))),
        refuses(
            "peers.stallTimeout is outside 50ms to 60s",
            agents(json!({"peers": {"stallTimeout": "10ms"}})),
        ),
        refuses("Exists takes no value", toleration(json!({"operator": "Exists", "key": "a", "value": "b"}))),
        refuses("Exists takes no value", toleration(json!({"value": "b"}))),
        refuses("effect NoExecute only", toleration(json!({"key": "a", "tolerationSeconds": 5}))),
    ]
}

fn cache() -> Vec<Case> {
    let cache = |cache: Value| json!({"cache": cache});
    let limits = |limits: Value| json!({"cache": {"limits": limits}});
    vec![
        accepts("a large arena", cache(json!({"dram": "1Ti", "regionSize": "1Gi", "hugePages": "Never"}))),
        accepts("no placement", cache(json!({"placement": {"bandwidth": "0"}}))),
        refuses("cache.dram is smaller than cache.regionSize", cache(json!({"dram": "128Mi"}))),
        refuses("more than 8192 regions", cache(json!({"dram": "64Gi", "regionSize": "2Mi"}))),
        refuses("cache.dram is not a multiple of 2Mi", cache(json!({"dram": "1025Mi"}))),
        refuses(
            "cache.regionSize is not a multiple of 2Mi from 2Mi to 1Gi",
            cache(json!({"dram": "3Gi", "regionSize": "3Mi"})),
        ),
        refuses("writeback.delay is outside 1ms to 10s", cache(json!({"writeback": {"delay": "1m"}}))),
        refuses("writeback.size is outside 1Mi to 4Gi", cache(json!({"writeback": {"size": "1k"}}))),
        accepts("writes without a delay for slack", cache(json!({"writeback": {"slackDelay": "0s"}}))),
        accepts("writes with the longest delay", cache(json!({"writeback": {"slackDelay": "1m"}}))),
        refuses("writeback.slackDelay is above 60s", cache(json!({"writeback": {"slackDelay": "61s"}}))),
        accepts(
            "few reads ahead",
            cache(json!({"prefetch": {"arenaPermille": 1, "bandwidthPermille": 1, "window": 4}})),
        ),
        accepts(
            "no pins",
            cache(json!({"retention": {"permille": 0, "blocksPerTenant": 1, "ttlMax": "1s"}})),
        ),
        refuses("retention.ttlMax is outside 1s to 24h", cache(json!({"retention": {"ttlMax": "25h"}}))),
        refuses(
            "placement.bandwidth is neither 0 nor from 1Mi",
            cache(json!({"placement": {"bandwidth": "1k"}})),
        ),
        refuses(
            "placement.hotWindow is outside 1s to 24h",
            cache(json!({"placement": {"hotWindow": "1ms"}})),
        ),
        refuses("limits.loadDeadline is outside 1ms to 10m", limits(json!({"loadDeadline": "0s"}))),
        refuses("limits.loadHold is outside 1s to 24h", limits(json!({"loadHold": "25h"}))),
        refuses("limits.reservation is outside 1s to 24h", limits(json!({"reservation": "5ms"}))),
        refuses(
            "limits.readSize is not a multiple of 4Ki from 4Ki to 128Mi",
            limits(json!({"readSize": "5k"})),
        ),
        refuses("limits.lookupTimeout is outside 1ms to 60s", limits(json!({"lookupTimeout": "2m"}))),
    ]
}

fn control_plane() -> Vec<Case> {
    let members = |members: Value| json!({"controlPlane": members});
    let publish = |publish: Value| json!({"controlPlane": {"events": {"publish": publish}}});
    vec![
        accepts("published events", publish(json!({}))),
        accepts(
            "other times",
            members(json!({
                "membership": {"heartbeatEvery": "1s", "deadAfter": "2s", "forgetAfter": "2s"},
                "timeToLive": "5s",
            })),
        ),
        refuses("controlPlane.timeToLive is outside 1s to 60s", members(json!({"timeToLive": "500ms"}))),
        refuses("at least twice heartbeatEvery", members(json!({"membership": {"deadAfter": "300ms"}}))),
        refuses(
            "membership.forgetAfter is less than deadAfter",
            members(json!({"membership": {"forgetAfter": "1s"}})),
        ),
        refuses(
            "membership.heartbeatEvery is outside 10ms to 60s",
            members(json!({"membership": {"heartbeatEvery": "1ms"}})),
        ),
        refuses(
            "membership.forgetAfter is longer than 24h",
            members(json!({"membership": {"forgetAfter": "25h"}})),
        ),
        refuses("events.history is outside 1Mi to 64Gi", members(json!({"events": {"history": "1Ki"}}))),
        refuses("need a port each", publish(json!({"port": 5558}))),
    ]
}
