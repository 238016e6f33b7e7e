//! `CacheNode`.

use reprise_crds::CacheNode;
use serde_json::json;

use super::cases::{Case, Table, accepts, changes, of_spec, refuses, round_trip};

pub(crate) fn table() -> Table {
    let digest = format!("sha256:{}", "0f".repeat(32));
    let claim = json!({
        "pool": "fast", "uid": "1-2", "generation": 3, "globs": ["/dev/disk/by-id/nvme-*"],
        "maxReadLatency": "50ms", "maxMediaErrors": 0, "minSparePercent": 10,
    });
    let file = json!({"pool": "slow", "uid": "1-3", "generation": 1, "file": "/srv/pool", "size": "1Gi"});
    let both = json!({"pool": "slow", "uid": "1-3", "generation": 1, "file": "/srv/pool", "globs": ["/dev/disk/by-id/a"]});
    let neither = json!({"pool": "slow", "uid": "1-3", "generation": 1});
    let status = json!({
        "observedGeneration": 1,
        "lastUpdated": "2026-11-22T00:00:00Z",
        "agent": {"version": "0.1.0", "podName": "agent-x", "startedAt": "2026-11-22T00:00:00Z"},
        "endpoints": {"peer": "10.0.0.1:7410", "admin": "10.0.0.1:7411", "socketDirectory": "/run/reprise"},
        "registration": {"node": 1, "epoch": 7, "membersConnected": 2, "members": 2},
        "capacity": {"dramTotal": "1Gi", "dramUsed": "0", "ssdTotal": "1Ti", "ssdUsed": "0", "pageKind": "Huge"},
        "devices": [{
            "path": "/dev/disk/by-id/nvme-a", "pool": "fast", "state": "Open", "serial": "S4", "model": "Fast 9",
            "size": "1Ti", "used": "0", "engine": "IoUring", "direct": true, "mediaErrors": 0, "sparePercent": 100,
            "readLatencyP99Micros": 300, "slow": false, "worn": true, "message": "as wanted",
        }],
        "gpus": [{"uuid": "GPU-0a1b", "product": "H200"}],
        "controllers": [
            {"serial": "S4", "pciAddress": "0000:01:00.0", "pool": "fast", "queuePairs": 128, "queuePairsLent": 0},
        ],
        "applied": {
            "configurationDigest": digest,
            "pools": [{"pool": "fast", "uid": "1-2", "generation": 3}],
            "profiles": [{"name": "llama", "digest": digest, "predictionErrorP50Percent": 4, "predictionErrorP99Percent": 12}],
            "queues": [{"uid": "9-9", "queuePairs": 0, "kept": 8}, {"uid": "9-8", "queuePairs": 0, "kept": 0, "refused": "no room"}],
        },
        "drain": {"drained": false, "walkedBlocks": 10, "durableBlocks": 100, "nowhereBlocks": 0},
        "conditions": [{
            "type": "AgentReady", "status": "True", "observedGeneration": 1, "reason": "AsDesired", "message": "",
            "lastTransitionTime": "2026-11-22T00:00:00Z",
        }],
    });
    let whole = Case {
        what: "a status with everything",
        old: None,
        patch: json!({
            "spec": {
                "clusterRef": {"namespace": "reprise", "name": "main"},
                "configurationDigest": digest,
                "claims": [claim, file],
                "profiles": [{"name": "llama", "digest": digest}],
                "queues": [{
                    "uid": "9-9", "allocation": "chat/x", "isolation": "TrustedShared",
                    "controllers": [{"serial": "S4", "queuePairs": 8}],
                }],
            },
            "status": status,
        }),
        refused: None,
    };
    let renamed = Case {
        what: "another node under another name",
        old: Some(json!({})),
        patch: json!({"metadata": {"name": "worker-2"}, "spec": {"nodeName": "worker-2"}}),
        refused: Some("nodeName is immutable"),
    };
    let condition = |field: &str, value: &str| {
        let mut condition = status["conditions"][0].clone();
        condition[field] = value.into();
        json!({"status": {"conditions": [condition]}})
    };
    let twice = json!({"status": {"conditions": [status["conditions"][0], status["conditions"][0]]}});
    Table {
        kind: "CacheNode",
        base: json!({
            "apiVersion": "reprise.dev/v1alpha1",
            "kind": "CacheNode",
            "metadata": {"name": "worker-1.example"},
            "spec": {"nodeName": "worker-1.example"},
        }),
        cases: vec![
            accepts("a node of which nothing is wanted yet", json!({})),
            whole,
            changes("a node is drained", json!({}), json!({"mode": "Draining"})),
            refuses("has the name of its node", json!({"nodeName": "worker-2"})),
            refuses("exactly one of globs and file", json!({"claims": [both]})),
            refuses("exactly one of globs and file", json!({"claims": [neither]})),
            renamed,
        ],
        out_of_bounds: vec![
            (
                "spec.configurationDigest",
                of_spec(json!({"configurationDigest": format!("sha256:{}", "XY".repeat(32))})),
            ),
            ("status.conditions[0].type", condition("type", "agent-ready")),
            ("status.conditions[0].status", condition("status", "Perhaps")),
            ("status.conditions[0].message", condition("message", &"x".repeat(1025))),
            ("status.conditions", twice),
            (
                "spec.claims[0].maxDevices",
                of_spec(json!({"claims": [{
                    "pool": "fast", "uid": "1", "generation": 1, "file": "/srv/pool", "maxDevices": 33,
                }]})),
            ),
            (
                "spec.claims[0].minSparePercent",
                of_spec(json!({"claims": [{
                    "pool": "fast", "uid": "1", "generation": 1, "file": "/srv/pool", "minSparePercent": 101,
                }]})),
            ),
        ],
        round_trip: round_trip::<CacheNode>,
    }
}
