//! `GPUQueueAllocation`, `SlackProfile`, `CacheTenant`.

use reprise_crds::{CacheTenant, GPUQueueAllocation, SlackProfile};
use serde_json::{Value, json};

use super::cases::{
    Table, accepts, accepts_name, changes, keeps, of_spec, refuses, refuses_name, round_trip,
};

pub(crate) fn queues() -> Table {
    Table {
        kind: "GPUQueueAllocation",
        base: json!({
            "apiVersion": "reprise.dev/v1alpha1",
            "kind": "GPUQueueAllocation",
            "metadata": {"name": "prefill-0", "namespace": "reprise"},
            "spec": {
                "nodeName": "worker-1",
                "gpuUuid": "GPU-0123abcd-0000-1111-2222-333344445555",
                "poolRef": {"name": "fast"},
                "queuePairs": 8,
            },
        }),
        cases: vec![
            accepts("node, GPU, pool and number of queue pairs", json!({})),
            accepts(
                "a controller of its own",
                json!({"qos": "Guaranteed", "isolation": "ExclusiveController"}),
            ),
            accepts("what ends by itself", json!({"qos": "BestEffort", "ttl": "24h", "depth": 32})),
            accepts_name("a name of 63", &"x".repeat(63)),
            refuses_name("at most 63 characters", &"x".repeat(64)),
            refuses("qos Guaranteed needs an exclusive controller", json!({"qos": "Guaranteed"})),
            refuses("qos BestEffort needs a time to live", json!({"qos": "BestEffort"})),
            refuses("depth is not a power of two", json!({"depth": 1000})),
            accepts("a limit of registered memory", json!({"registeredMemory": "80Gi"})),
            refuses("registeredMemory is outside 2Mi to 1Pi", json!({"registeredMemory": "4Ki"})),
            refuses("ttl is outside 1m to 720h", json!({"ttl": "5s"})),
            changes("the same again", json!({}), json!({})),
            keeps("the spec of an allocation is immutable", json!({}), json!({"queuePairs": 9})),
            keeps("the spec of an allocation is immutable", json!({}), json!({"ttl": "2h"})),
        ],
        out_of_bounds: vec![
            ("spec.queuePairs", of_spec(json!({"queuePairs": 0}))),
            ("spec.queuePairs", of_spec(json!({"queuePairs": 129}))),
            ("spec.gpuUuid", of_spec(json!({"gpuUuid": "0"}))),
            ("spec.registeredMemory", of_spec(json!({"registeredMemory": "2GiB"}))),
            ("spec", of_spec(json!({"poolRef": null}))),
        ],
        round_trip: round_trip::<GPUQueueAllocation>,
    }
}

pub(crate) fn slack() -> Table {
    let window = |least: u32, most: u32| {
        json!({
            "phase": "Decode", "minInputTokens": least, "maxInputTokens": most, "minPrefixTokens": 0,
            "maxPrefixTokens": 64, "layerMicros": 50, "slackMicros": 40, "freeSms": 4,
        })
    };
    let kernels = json!([{"iocbs": 1, "micros": 9, "sms": 2}]);
    let measured = |windows: Value| {
        json!({
            "stepTokens": 32, "iocbBytes": 65536, "windows": windows, "reads": kernels, "writes": kernels,
        })
    };
    let with = |more: Value| {
        let mut changed = window(0, 8);
        changed.as_object_mut().expect("an object").extend(more.as_object().expect("fields").clone());
        json!({"measurement": measured(json!([window(8, 16), changed]))})
    };
    let artifact = format!("registry.example/slack/llama@sha256:{}", "0f".repeat(32));
    Table {
        kind: "SlackProfile",
        base: json!({
            "apiVersion": "reprise.dev/v1alpha1",
            "kind": "SlackProfile",
            "metadata": {"name": "llama-h200", "namespace": "reprise"},
            "spec": {
                "subject": {"model": "Llama-3-8B", "gpuProduct": "NVIDIA H200", "engineVersion": "vllm 0.33"},
                "measurement": measured(json!([window(0, 1024)])),
            },
        }),
        cases: vec![
            accepts("a measurement inline", json!({})),
            accepts(
                "a measurement in a ConfigMap",
                json!({"measurement": null, "configMapRef": {"name": "a", "key": "b.json"}}),
            ),
            accepts("an artifact", json!({"measurement": null, "ociRef": {"reference": artifact}})),
            accepts(
                "as many windows as there may be",
                json!({"measurement": measured(json!(vec![window(0, 1); 256]))}),
            ),
            accepts("a layer without a window", with(json!({"slackMicros": 0}))),
            accepts(
                "a canary",
                json!({"rollout": {"canary": {"nodeSelector": {"matchLabels": {"canary": "yes"}}, "soak": "1h"}}}),
            ),
            accepts_name("a name of 40", &"x".repeat(40)),
            refuses_name("longer than 40 characters", &"x".repeat(41)),
            refuses("exactly one of measurement", json!({"measurement": null})),
            refuses("exactly one of measurement", json!({"ociRef": {"reference": artifact}})),
            refuses(
                "set maxInputTokens above minInputTokens",
                with(json!({"maxInputTokens": 8, "minInputTokens": 8})),
            ),
            refuses("set maxPrefixTokens above minPrefixTokens", with(json!({"minPrefixTokens": 64}))),
            refuses("a window is within its layer", with(json!({"slackMicros": 51}))),
            refuses(
                "rollout.canary.soak is longer than 168h",
                json!({"rollout": {"canary": {"nodeSelector": {}, "soak": "169h"}}}),
            ),
            refuses(
                "a key in matchLabels is longer",
                json!({"rollout": {"canary": {"nodeSelector": {"matchLabels": {"k".repeat(318): "v"}}}}}),
            ),
            refuses(
                "In and NotIn need values",
                json!({"rollout": {"canary": {"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "NotIn"}]}}}}),
            ),
            changes(
                "new measurements",
                json!({}),
                json!({"measurement": measured(json!([window(0, 2048)])), "usablePercent": 50}),
            ),
            keeps("subject is immutable", json!({}), json!({"subject": {"tensorParallel": 2}})),
        ],
        out_of_bounds: vec![
            (
                "spec.measurement.windows",
                of_spec(json!({"measurement": measured(json!(vec![window(0, 1); 257]))})),
            ),
            ("spec.measurement.windows", of_spec(json!({"measurement": measured(json!([]))}))),
            ("spec.measurement.windows[1].layerMicros", of_spec(with(json!({"layerMicros": 0})))),
            (
                "spec.measurement.stepTokens",
                of_spec(json!({"measurement": {
                    "stepTokens": 0, "iocbBytes": 1, "windows": [window(0, 8)], "reads": kernels, "writes": kernels,
                }})),
            ),
            (
                "spec.measurement.reads",
                of_spec(json!({"measurement": {
                    "stepTokens": 8, "iocbBytes": 1, "windows": [window(0, 8)], "reads": [], "writes": kernels,
                }})),
            ),
            ("spec.usablePercent", of_spec(json!({"usablePercent": 9}))),
            (
                "spec.ociRef.reference",
                of_spec(json!({"ociRef": {"reference": "registry.example/slack/llama:latest".repeat(3)}})),
            ),
            ("spec.subject.model", of_spec(json!({"subject": {"model": ""}}))),
        ],
        round_trip: round_trip::<SlackProfile>,
    }
}

pub(crate) fn tenant() -> Table {
    let secret = json!({"namespace": "reprise", "name": "keys", "key": "a"});
    Table {
        kind: "CacheTenant",
        base: json!({
            "apiVersion": "reprise.dev/v1alpha1",
            "kind": "CacheTenant",
            "metadata": {"name": "team-a"},
            "spec": {},
        }),
        cases: vec![
            accepts("a name and nothing else", json!({})),
            accepts(
                "budget, quotas, namespaces, service accounts",
                json!({
                    "clusters": [{"namespace": "reprise", "name": "main"}],
                    "namespaceSelector": {"matchLabels": {"team": "a"}},
                    "serviceAccounts": [{"namespace": "a", "name": "x"}, {"namespace": "b", "name": "x"}],
                    "budget": {"ssd": {"reserved": "1Ti", "limit": "1024Gi"}, "dram": {"limit": "100Gi"}},
                    "perNode": {"dram": {"reserved": "1Gi"}},
                    "number": 7,
                    "maxGpuQueuePairs": 64,
                    "deletionPolicy": "Orphan",
                }),
            ),
            accepts("its own key", json!({"isolation": "Encrypted", "keySecretRef": secret})),
            accepts_name("a name of 63", &"x".repeat(63)),
            refuses_name("invalid tenant name: use 1 to 63 of a-z", "team.a"),
            refuses_name("invalid tenant name: use 1 to 63 of a-z", &"x".repeat(64)),
            refuses("keySecretRef must be set with isolation Encrypted", json!({"isolation": "Encrypted"})),
            refuses("keySecretRef must be set with isolation Encrypted", json!({"keySecretRef": secret})),
            refuses(
                "a public tenant must not have isolation Encrypted",
                json!({"isolation": "Encrypted", "keySecretRef": secret, "public": true}),
            ),
            refuses(
                "reserved is larger than limit",
                json!({"budget": {"ssd": {"reserved": "2Ti", "limit": "1Ti"}}}),
            ),
            refuses(
                "reserved is larger than limit",
                json!({"perNode": {"dram": {"reserved": "1Mi", "limit": "1k"}}}),
            ),
            refuses(
                "a key in matchLabels is longer",
                json!({"namespaceSelector": {"matchLabels": {"k".repeat(318): "v"}}}),
            ),
            refuses(
                "In and NotIn need values",
                json!({"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}),
            ),
            changes(
                "a budget shrinks",
                json!({"budget": {"ssd": {"limit": "2Ti"}}}),
                json!({"budget": {"ssd": {"limit": "1Ti"}}}),
            ),
            changes("a number is set", json!({}), json!({"number": 7})),
            keeps("number is immutable", json!({"number": 7}), json!({"number": 8})),
            keeps("number must not be removed", json!({"number": 7}), json!({})),
            keeps("isolation is immutable", json!({}), json!({"isolation": "Shared"})),
        ],
        out_of_bounds: vec![
            ("spec.number", of_spec(json!({"number": 0}))),
            ("spec.number", of_spec(json!({"number": 65_536}))),
            ("spec.budget.ssd.limit", of_spec(json!({"budget": {"ssd": {"limit": "-1"}}}))),
            (
                "spec.clusters",
                of_spec(json!({"clusters": [
                    {"namespace": "a", "name": "b"}, {"namespace": "a", "name": "b"},
                ]})),
            ),
            ("spec.budget.nvme", of_spec(json!({"budget": {"nvme": {}}}))),
        ],
        round_trip: round_trip::<CacheTenant>,
    }
}
