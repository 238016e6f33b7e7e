//! `SSDPool`.

use reprise_crds::SSDPool;
use serde_json::json;

use super::cases::{
    Table, accepts, accepts_name, changes, keeps, of_spec, refuses, refuses_name, round_trip,
};

pub(crate) fn table() -> Table {
    let devices = |more: serde_json::Value| {
        let mut devices = json!({"globs": ["/dev/disk/by-id/nvme-*"]});
        for (key, value) in more.as_object().into_iter().flatten() {
            devices[key] = value.clone();
        }
        json!({"directory": null, "devices": devices})
    };
    let confirmed = "yes-really-destroy-the-data";
    let mut wiped = devices(json!({"foreignSignatures": "Wipe"}));
    wiped["wipeConfirmation"] = confirmed.into();
    let controllers = |more: serde_json::Value| {
        let mut spec = json!({"directory": null, "engine": "UserNvme", "devices": {
            "class": "NvmeController", "globs": ["/sys/bus/pci/devices/0000:3b:00.0"],
        }});
        for (key, value) in more.as_object().into_iter().flatten() {
            spec["devices"][key] = value.clone();
        }
        spec
    };
    let mut kernel = controllers(json!({}));
    kernel["engine"] = "IoUring".into();
    let mut falls_back = controllers(json!({}));
    falls_back["fallbackEngine"] = "Plain".into();
    let mut queues = devices(json!({}));
    queues["engine"] = "GpuQueue".into();
    Table {
        kind: "SSDPool",
        base: json!({
            "apiVersion": "reprise.dev/v1alpha1",
            "kind": "SSDPool",
            "metadata": {"name": "fast"},
            "spec": {"directory": {"path": "/var/lib/reprise/pool", "size": "100Gi"}},
        }),
        cases: vec![
            accepts("a directory and nothing else", json!({})),
            accepts("a reserve of the file system", json!({"directory": {"reserve": "128Ti"}})),
            accepts("a daily write budget", json!({"dailyWriteBudget": "1Gi"})),
            accepts("devices by their names", devices(json!({"size": "1Ti"}))),
            accepts("GPU queues on raw devices", queues),
            accepts("controllers of one class", controllers(json!({"serials": ["S5G X"], "namespaceId": 1}))),
            accepts("an emulated controller", json!({"engine": "UserNvme"})),
            accepts("foreign devices are wiped when it is confirmed", wiped),
            accepts("a deletion that wipes waits for its confirmation", json!({"deletionPolicy": "Wipe"})),
            accepts("a confirmed deletion", json!({"deletionPolicy": "Wipe", "wipeConfirmation": confirmed})),
            accepts(
                "everything about nodes and health",
                json!({
                    "nodeSelector": {
                        "matchLabels": {"disk": "nvme"},
                        "matchExpressions": [
                            {"key": "zone", "operator": "In", "values": ["a", "b"]},
                            {"key": "old", "operator": "DoesNotExist"},
                        ],
                    },
                    "health": {"maxMediaErrors": 10, "minSparePercent": 5, "maxReadLatency": "50ms"},
                    "fallbackEngine": "Plain",
                    "mode": "Draining",
                }),
            ),
            accepts_name("a name of 40", &"x".repeat(40)),
            refuses_name("longer than 40 characters", &"x".repeat(41)),
            refuses("exactly one of devices", json!({"directory": null})),
            refuses("exactly one of devices", json!({"devices": {"globs": ["/dev/disk/by-id/a"]}})),
            refuses("IoUringCmd and GpuQueue require raw devices", json!({"engine": "IoUringCmd"})),
            refuses("UserNvme and devices of class NvmeController need each other", kernel),
            refuses("set fallbackEngine to None", falls_back),
            refuses("globs do not fit the class", controllers(json!({"globs": ["/dev/disk/by-id/nvme-1"]}))),
            refuses("globs do not fit the class", devices(json!({"globs": ["/sys/bus/pci/devices/*"]}))),
            refuses("for devices of class NvmeController", devices(json!({"serials": ["S1"]}))),
            refuses("for devices of class NvmeController", devices(json!({"namespaceId": 1}))),
            refuses("fallbackEngine is equal to engine", json!({"fallbackEngine": "IoUring"})),
            refuses("the pool wipes nothing", json!({"wipeConfirmation": confirmed})),
            refuses(
                "devices.foreignSignatures Wipe needs a confirmation",
                devices(json!({"foreignSignatures": "Wipe"})),
            ),
            refuses("segmentSize is not a multiple of 2Mi from 2Mi to 1Gi", json!({"segmentSize": "3Mi"})),
            refuses("segmentSize is not a multiple of 2Mi from 2Mi to 1Gi", json!({"segmentSize": "2Gi"})),
            refuses(
                "devices.size is not a multiple of 4Ki from 1Mi to 128Ti",
                devices(json!({"size": "129Ti"})),
            ),
            refuses(
                "directory.size is not a multiple of 4Ki from 1Mi to 128Ti",
                json!({"directory": {"size": "5000"}}),
            ),
            refuses("directory.reserve is above 128Ti", json!({"directory": {"reserve": "1P"}})),
            refuses("dailyWriteBudget is below 1Gi", json!({"dailyWriteBudget": "0"})),
            refuses("directory.path is a system directory", json!({"directory": {"path": "/etc/reprise"}})),
            refuses("directory.path is a system directory", json!({"directory": {"path": "/var"}})),
            refuses(
                "health.maxReadLatency is outside 1ms to 60s",
                json!({"health": {"maxReadLatency": "0s"}}),
            ),
            refuses(
                "a key in matchLabels is longer",
                json!({"nodeSelector": {"matchLabels": {"k".repeat(318): "v"}}}),
            ),
            refuses(
                "In and NotIn need values",
                json!({"nodeSelector": {"matchExpressions": [{"key": "zone", "operator": "In"}]}}),
            ),
            refuses(
                "In and NotIn need values",
                json!({"nodeSelector": {"matchExpressions": [{"key": "zone", "operator": "Exists", "values": ["a"]}]}}),
            ),
            changes("a directory grows", json!({}), json!({"directory": {"size": "200Gi"}})),
            changes("a reserve appears", json!({}), json!({"directory": {"reserve": "10Gi"}})),
            changes("devices grow", devices(json!({"size": "1Ti"})), devices(json!({"size": "2Ti"}))),
            changes("an engine changes", json!({}), json!({"engine": "Plain"})),
            keeps("directory.size must not decrease", json!({}), json!({"directory": {"size": "99Gi"}})),
            keeps("directory.path is immutable", json!({}), json!({"directory": {"path": "/srv/pool"}})),
            keeps(
                "the storage of a pool (devices, directory or claims) is immutable",
                json!({}),
                devices(json!({})),
            ),
            keeps(
                "devices.size must not decrease",
                devices(json!({"size": "2Ti"})),
                devices(json!({"size": "1Ti"})),
            ),
            keeps("devices.class is immutable", devices(json!({})), controllers(json!({}))),
            keeps("segmentSize is immutable", json!({}), json!({"segmentSize": "128Mi"})),
            keeps(
                "claims.size must not decrease",
                json!({"directory": null, "claims": {"storageClassName": "local", "size": "1Ti"}}),
                json!({"directory": null, "claims": {"storageClassName": "local", "size": "1Gi"}}),
            ),
            keeps(
                "claims.storageClassName is immutable",
                json!({"directory": null, "claims": {"storageClassName": "local", "size": "1Ti"}}),
                json!({"directory": null, "claims": {"storageClassName": "other", "size": "1Ti"}}),
            ),
        ],
        out_of_bounds: vec![
            ("spec.devices.globs[0]", of_spec(json!({"devices": {"globs": ["/dev/nvme0n1"]}}))),
            ("spec.devices.globs", of_spec(json!({"devices": {"globs": []}}))),
            ("spec.directory.path", of_spec(json!({"directory": {"path": "/var/../etc"}}))),
            ("spec.directory.path", of_spec(json!({"directory": {"path": "pool"}}))),
            ("spec.directory.size", of_spec(json!({"directory": {"size": 100}}))),
            ("spec.directory.size", of_spec(json!({"directory": {"size": "1.5Ti"}}))),
            ("spec.queueDepth", of_spec(json!({"queueDepth": 1025}))),
            ("spec.watermarks.freePermille", of_spec(json!({"watermarks": {"freePermille": 901}}))),
            ("spec.wipeConfirmation", of_spec(json!({"wipeConfirmation": "yes"}))),
            ("spec.engine", of_spec(json!({"engine": "Mmap"}))),
            ("spec.engnie", of_spec(json!({"engnie": "Plain"}))),
        ],
        round_trip: round_trip::<SSDPool>,
    }
}
