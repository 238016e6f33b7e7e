//! Raw devices in agents' pods: the pool says that they cannot be opened as long as the runtime keeps pods from them, and has blocks once
//! the cluster says how agents get at them (`agents.deviceAccess`). What follows is a release without them, and changed otherwise ([`changed`]).

use std::time::Duration;

use reprise_client::Source;
use reprise_e2e::Loading;
use reprise_e2e::kubernetes::loop_device::LoopDevice;
use reprise_e2e::kubernetes::release::{PODS_WITHIN, Part};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::say;
use reprise_e2e::wait_until;
use serde_json::{Value, json};

use crate::chart::{SETTINGS, condition, running};
use crate::chart_changed::changed;
use crate::chart_faults::agent_of;

/// The pool.
const POOL: &str = "raw";

/// What is saved while the node has both.
const KEPT: std::ops::Range<u64> = 330_000..330_200;

/// More than the node's other device has free, since blocks go where most is free. Nothing is behind what was never written.
const DEVICE_BYTES: u64 = 16 << 30;

/// The cluster names it beside its own.
const NAMED: &str = r#"--set-json=cluster.pools=[{"name":"lab"},{"name":"raw"}]"#;

/// Agents may open what the node has.
const PRIVILEGED: &str = "--set=cluster.agents.deviceAccess.mode=Privileged";

/// Lets a pool go whatever was heard of sessions.
const UNUSED: &str = "reprise.dev/delete-in-use=yes";

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(500);

pub(crate) fn are_opened_as_the_cluster_says(cluster: &mut Cluster) {
    let release = running(cluster);
    let cluster: &Cluster = cluster;
    let node = &cluster.nodes()[0];
    let file = node.root().join("var/lib/raw-device");
    let device = LoopDevice::new(&file, DEVICE_BYTES, "reprise-e2e-raw");
    let name = device.stable_name().to_str().expect("UTF-8").to_owned();
    cluster.apply(
        &json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": { "name": POOL },
            "spec": {
                "nodeSelector": { "matchLabels": { "kubernetes.io/hostname": node.name() } },
                "devices": { "globs": [name] }, "fallbackEngine": "Plain",
            },
        })
        .to_string(),
    );

    agents_are_replaced(release, &[SETTINGS, NAMED]);
    let refused = wait_for_device(release, node.name(), &name, "Refused");
    let pool = wait_until("the pool to say what to do", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let pool = release.object("ssdp", POOL);
        pool["status"].to_string().contains("deviceAccess").then_some(pool)
    });
    assert_eq!(refused["reason"], "DeviceNotPermitted", "{refused}");
    assert_eq!(condition(&pool, "Degraded"), ("True", "DeviceNotPermitted"), "{pool:#}");
    assert_eq!(condition(&pool, "Ready").0, "False", "{pool:#}");

    agents_are_replaced(release, &[SETTINGS, NAMED, PRIVILEGED]);
    let open = wait_for_device(release, node.name(), &name, "Open");
    assert_eq!(open["direct"], true, "the page cache is passed by: {open}");
    release.kubectl(&["wait", &format!("ssdp/{POOL}"), "--for=condition=Ready", "--timeout=180s"]);
    let engine = agent_of(cluster, 0).expect("it serves");
    let kept: Vec<u64> = KEPT.collect();
    engine.save_durably(&kept);
    // Statuses tell bytes in coarse steps; the agent itself tells all of them.
    let agent = release.pods(Part::Agents).into_iter().find(|agent| agent.node == node.name());
    let page = release.admin(&agent.expect("one on each node")).json("/status");
    let devices = page["devices"].as_array().expect("devices").clone();
    let used = devices
        .iter()
        .find(|device| device["path"] == name.as_str())
        .map(|device| device["used_bytes"].clone());
    let used = used.and_then(|used| used.as_u64()).unwrap_or_default();
    assert!(used > 0, "they are on the emptier one: {devices:#?}");
    engine.trim();
    let sources = engine.load_all(&kept, &Loading::LOCAL);
    assert!(
        sources.iter().all(|source| *source == Source::OwnNvme),
        "every byte comes from devices: {sources:?}"
    );
    say(&format!("a raw device of a node is used by its agent's pod: {used} bytes of blocks"));
    drop(engine);

    // The data stays on it, and nobody else is given it. An agent that restarts may have engines that come back, so a pool waits for a minute after the
    // last session; this one is told that there are none.
    changed(cluster);
    release.kubectl(&["annotate", "ssdp", POOL, UNUSED]);
    release.kubectl(&["delete", "ssdp", POOL, "--timeout=180s"]);
    wait_until("the device to be let go", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        told_device(release, node.name(), &name).is_none().then_some(())
    });
    release.wait_until_ready();
}

/// Changes the release, and waits until every agent's pod is another one.
fn agents_are_replaced(release: Release<'_>, settings: &[&str]) {
    let before = release.pods(Part::Agents);
    release.upgrade(settings);
    release.replaced(Part::Agents, &before, before.len());
}

/// What a node says of a device.
fn told_device(release: Release<'_>, node: &str, name: &str) -> Option<Value> {
    let told = release.object("cachenode", node);
    told["status"]["devices"].as_array()?.iter().find(|device| device["path"] == name).cloned()
}

fn wait_for_device(release: Release<'_>, node: &str, name: &str, state: &str) -> Value {
    let mut last = None;
    let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        wait_until(&format!("{name} to be {state}"), PODS_WITHIN, || {
            std::thread::sleep(PAUSE);
            last = told_device(release, node, name);
            last.clone().filter(|device| device["state"] == state)
        })
    }));
    waited.unwrap_or_else(|_| panic!("{name} is not {state} but {last:#?}\n{}", release.state()))
}
