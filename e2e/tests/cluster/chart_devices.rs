//! Raw devices in agents' pods. While the runtime denies access, the pool reports that the devices cannot be
//! opened. It has blocks once the cluster grants access (`agents.deviceAccess`). The next release is the one
//! of [`changed`].

use reprise_client::Source;
use reprise_e2e::LoadParams;
use reprise_e2e::kubernetes::loop_device::LoopDevice;
use reprise_e2e::kubernetes::release::{Component, PODS_WITHIN};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::print_line;
use reprise_e2e::wait_until;
use serde_json::{Value, json};

use crate::chart::{SETTINGS, condition, running};
use crate::chart_faults::agent_of;
use crate::chart_rollback::changed;

/// Name of the pool.
const POOL: &str = "raw";

/// Blocks that are saved while the node has both devices.
const KEPT: std::ops::Range<u64> = 330_000..330_200;

/// More than the free bytes of the node's other device, since blocks go to the device with most free bytes.
/// The file is sparse.
const DEVICE_BYTES: u64 = 16 << 30;

/// The pools of the cluster, with the raw one.
const NAMED: &str = r#"--set-json=cluster.pools=[{"name":"lab"},{"name":"raw"}]"#;

/// Grants agents access to all devices of the node.
const PRIVILEGED: &str = "--set=cluster.agents.deviceAccess.mode=Privileged";

/// Annotation that permits the deletion of a pool despite recent sessions.
const UNUSED: &str = "reprise.dev/delete-in-use=yes";

pub(crate) fn are_opened_as_the_cluster_allows(cluster: &mut Cluster) {
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

    upgrade_and_replace_agents(release, &[SETTINGS, NAMED]);
    let refused = wait_for_device(release, node.name(), &name, "Refused");
    let pool = wait_until("the pool to report the remedy", PODS_WITHIN, || {
        let pool = release.object("ssdp", POOL);
        pool["status"].to_string().contains("deviceAccess").then_some(pool)
    });
    assert_eq!(refused["reason"], "DeviceNotPermitted", "{refused}");
    assert_eq!(condition(&pool, "Degraded"), ("True", "DeviceNotPermitted"), "{pool:#}");
    assert_eq!(condition(&pool, "Ready").0, "False", "{pool:#}");

    upgrade_and_replace_agents(release, &[SETTINGS, NAMED, PRIVILEGED]);
    let open = wait_for_device(release, node.name(), &name, "Open");
    assert_eq!(open["direct"], true, "direct I/O: {open}");
    release.kubectl(&["wait", &format!("ssdp/{POOL}"), "--for=condition=Ready", "--timeout=180s"]);
    let engine = agent_of(cluster, 0).expect("the agent responds");
    let kept: Vec<u64> = KEPT.collect();
    engine.save_durably(&kept);
    // The status reports bytes in coarse steps; the agent itself reports them exactly.
    let agent = release.pods(Component::Agents).into_iter().find(|agent| agent.node == node.name());
    let page = release.admin(&agent.expect("an agent on each node")).json("/status");
    let devices = page["devices"].as_array().expect("devices").clone();
    let used = devices
        .iter()
        .find(|device| device["path"] == name.as_str())
        .map(|device| device["used_bytes"].clone());
    let used = used.and_then(|used| used.as_u64()).unwrap_or_default();
    assert!(used > 0, "the blocks are on the emptier device: {devices:#?}");
    engine.trim();
    let sources = engine.load_all(&kept, &LoadParams::LOCAL);
    assert!(
        sources.iter().all(|source| *source == Source::OwnNvme),
        "every block is loaded from a device: {sources:?}"
    );
    print_line(&format!("the agent's pod uses a raw device: {used} bytes of blocks"));
    drop(engine);

    // The data stay on the device. A pool waits for a minute after the last session, since the engines of a
    // restarting agent may return; the annotation states that no engine uses it.
    changed(cluster);
    release.kubectl(&["annotate", "ssdp", POOL, UNUSED]);
    release.kubectl(&["delete", "ssdp", POOL, "--timeout=180s"]);
    wait_until("the device to be released", PODS_WITHIN, || {
        reported_device(release, node.name(), &name).is_none().then_some(())
    });
    release.wait_until_ready();
}

/// Upgrades the release, and waits until every agent's pod was replaced.
fn upgrade_and_replace_agents(release: Release<'_>, settings: &[&str]) {
    let before = release.pods(Component::Agents);
    release.upgrade(settings);
    release.wait_until_replaced(Component::Agents, &before, before.len());
}

/// Returns a node's report about a device.
fn reported_device(release: Release<'_>, node: &str, name: &str) -> Option<Value> {
    let node = release.object("cachenode", node);
    node["status"]["devices"].as_array()?.iter().find(|device| device["path"] == name).cloned()
}

fn wait_for_device(release: Release<'_>, node: &str, name: &str, state: &str) -> Value {
    let mut last = None;
    let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        wait_until(&format!("{name} to be {state}"), PODS_WITHIN, || {
            last = reported_device(release, node, name);
            last.clone().filter(|device| device["state"] == state)
        })
    }));
    waited.unwrap_or_else(|_| panic!("{name} is not {state} but {last:#?}\n{}", release.state()))
}
