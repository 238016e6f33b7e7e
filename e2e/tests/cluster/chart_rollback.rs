//! A release that is upgraded and rolled back. After the upgrade, agents run under the chart's own seccomp
//! profile, which allows io_uring, and may copy blocks to other nodes. The tests in between depend on that.

use std::fs;
use std::time::Duration;

use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_e2e::kubernetes::check_pods::{EngineCounters, PODS};
use reprise_e2e::kubernetes::release::{Component, NAMESPACE, PODS_WITHIN, Pod, RELEASE};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::print_line;
use reprise_e2e::{tree, wait_until};
use serde_json::{Value, json};

use crate::chart::{ENGINES, SETTINGS, condition, running};
use crate::chart_uninstall::{OUTAGE_MAX, wait_for_all_blocks};

/// The changed value, and its line in the agents' configuration.
const CHANGE: &str = "--set=cluster.cache.limits.loadDeadline=7s";
const CHANGED: &str = "load_deadline = \"7s\"";

/// The first revision, installed by [`running`].
const INSTALLED: &str = "1";

/// Lets agents copy blocks to other nodes, as a drain requires.
const BANDWIDTH: &str = "--set-string=cluster.cache.placement.bandwidth=256Mi";

/// Installs the chart's profile on the nodes and makes agents use it, as in docs/kubernetes/operate.md.
const SECCOMP: &str = "--set=seccomp.installer.enabled=true,cluster.agents.seccomp.mode=Localhost,\
                       cluster.agents.seccomp.localhostProfile=reprise-agent.json";

/// Makes agents use a profile that does not allow io_uring.
pub(crate) const WITHOUT_IO_URING: &str = "--set=cluster.agents.seccomp.mode=Localhost,\
                                           cluster.agents.seccomp.localhostProfile=without-io-uring.json";

/// Folder of kubelets' profiles, below a node's root.
const PROFILES: &str = "var/lib/kubelet/seccomp";

/// The system call that creates an io_uring.
const SETUP: &str = "io_uring_setup";

/// Returns the upgraded release. Upgrades it if needed, checks that engines continue, and that definitions
/// are updated.
pub(crate) fn changed(cluster: &Cluster) -> Release<'_> {
    let release = running(cluster);
    if !configuration(release).contains(CHANGED) {
        let baseline = ENGINES.now(cluster);
        let definition = make_older(release);
        let before = release.pods(Component::Agents);
        release.upgrade(&[SETTINGS, CHANGE, BANDWIDTH, SECCOMP]);
        release.wait_until_replaced(Component::Agents, &before, before.len());
        assert_definition_restored(release, &definition);
        release.wait_until_ready();
        wait_for_all_blocks(cluster);
        assert_engines_continued(cluster, "an upgrade", ENGINES.since(cluster, &baseline));
    }
    release
}

/// Text for a definition that no release has. The upgrade's hook must replace it.
const OLD_WORDS: &str = "as in an older release";
const DEFINITION: &str = "slackprofiles.reprise.dev";
const WORDS_AT: &str = "/spec/versions/0/schema/openAPIV3Schema/description";

/// Returns the definition with its managed fields.
fn definition(release: Release<'_>) -> Value {
    let get = ["get", "customresourcedefinition", DEFINITION, "--show-managed-fields", "--output=json"];
    serde_json::from_str(&release.kubectl(&get)).expect("kubectl prints JSON")
}

/// Changes the description of a definition. Returns the definition from before.
fn make_older(release: Release<'_>) -> Value {
    let before = definition(release);
    let patch = json!([{ "op": "replace", "path": WORDS_AT, "value": OLD_WORDS }]);
    release.kubectl(&[
        "patch",
        "customresourcedefinition",
        DEFINITION,
        "--type=json",
        &format!("--patch={patch}"),
        "--field-manager=an-older-release",
    ]);
    before
}

/// Checks that the definition is as before, and that the operator's image has written it.
fn assert_definition_restored(release: Release<'_>, before: &Value) {
    let now = definition(release);
    assert_eq!(now["spec"], before["spec"], "the hook restores the release's definition");
    let written = |definition: &Value| {
        let fields = definition["metadata"]["managedFields"].as_array().into_iter().flatten();
        let by_operator = |fields: &&Value| {
            fields["manager"] == OPERATOR_FIELD_MANAGER && !fields["fieldsV1"]["f:spec"].is_null()
        };
        let times = fields.into_iter().filter(by_operator);
        times.map(|fields| fields["time"].as_str().unwrap_or_default().to_owned()).max()
    };
    assert!(written(&now) > written(before), "written by the hook: {:#}", now["metadata"]["managedFields"]);
}

pub(crate) fn allows_io_uring(cluster: &mut Cluster) {
    let release = changed(cluster);
    assert!(
        configuration(release).contains(CHANGED),
        "the agents' configuration: {}",
        configuration(release)
    );
    for agent in release.pods(Component::Agents) {
        assert!(profile_allows(release, &agent), "the runtime uses the chart's profile on {}", agent.node);
    }
    assert_reported_io_engine(release);
}

pub(crate) fn rolled_back(cluster: &mut Cluster) {
    let release = changed(cluster);
    let baseline = ENGINES.now(cluster);
    let before = release.pods(Component::Agents);
    release.run(&["rollback", RELEASE, INSTALLED, "--namespace", NAMESPACE, "--wait", "--timeout=180s"]);
    release.wait_until_replaced(Component::Agents, &before, before.len());
    release.wait_until_ready();
    assert!(
        !configuration(release).contains(CHANGED),
        "the agents' configuration: {}",
        configuration(release)
    );
    let installers = release.kubectl(&["get", "daemonsets", "--output=name"]);
    assert!(!installers.contains("seccomp"), "the installer of the profile is deleted: {installers}");
    assert_reported_io_engine(release);
    wait_for_all_blocks(cluster);
    assert_engines_continued(cluster, "a rollback", ENGINES.since(cluster, &baseline));
}

/// Checks that engines lost only one agent at a time, and connected to the new one.
fn assert_engines_continued(cluster: &Cluster, what: &str, since: [Option<EngineCounters>; PODS]) {
    assert_eq!(since.len(), cluster.nodes().len(), "an engine on each node");
    for (index, counters) in since.into_iter().enumerate() {
        let counters = counters.expect("no engine restarted");
        print_line(&format!(
            "{what}: engine {index} hit {:?}, opened {} sessions, and was without its block for at most {} ms",
            counters.hits, counters.sessions, counters.longest_outage_ms
        ));
        assert!(counters.sessions >= 1, "its agent was replaced: {counters:?}");
        assert!(Duration::from_millis(counters.longest_outage_ms) <= OUTAGE_MAX, "{counters:?}");
    }
}

/// Checks the I/O engine that nodes and the pool report: io_uring if the profile in effect and the kernel
/// allow it on all nodes, otherwise the fallback, with the condition `EngineFallback`.
pub(crate) fn assert_reported_io_engine(release: Release<'_>) {
    let agents = release.pods(Component::Agents);
    let is_allowed = kernel_allows() && agents.iter().all(|agent| profile_allows(release, agent));
    let (engine, is_other) = if is_allowed { ("IoUring", "False") } else { ("Plain", "True") };
    for agent in &agents {
        wait_until(&format!("{} to report that {engine} drives its device", agent.node), PODS_WITHIN, || {
            let node = release.object("cachenode", &agent.node);
            let is_reported = node["status"]["devices"][0]["engine"] == engine;
            (is_reported && condition(&node, "EngineFallback").0 == is_other).then_some(())
        });
    }
    let wanted = json!([{ "engine": engine, "nodes": agents.len() }]);
    let pool = wait_until(&format!("the pool to report {wanted}"), PODS_WITHIN, || {
        let pool = release.object("ssdp", "lab");
        (pool["status"]["effectiveEngines"] == wanted).then_some(pool)
    });
    assert_eq!(condition(&pool, "EngineFallback").0, is_other, "{pool:#}");
    assert_eq!(condition(&pool, "Ready").0, "True", "with either engine: {pool:#}");
    let spec = &release.object("kvcc", RELEASE)["spec"]["agents"]["seccomp"];
    print_line(&format!("with the seccomp profile {spec} devices are driven by {engine}"));
}

/// Returns whether a pod's container may set up io_uring, according to its OCI configuration.
fn profile_allows(release: Release<'_>, pod: &Pod) -> bool {
    let config = release.runtime_config(pod);
    let profile = &config["linux"]["seccomp"];
    assert!(profile["defaultAction"].is_string(), "agents are never unconfined: {profile}");
    let rules = profile["syscalls"].as_array().into_iter().flatten();
    let is_named =
        |rule: &&Value| rule["names"].as_array().is_some_and(|names| names.iter().any(|name| name == SETUP));
    rules.into_iter().filter(is_named).any(|rule| rule["action"] == "SCMP_ACT_ALLOW")
}

/// Returns whether the kernel lets unprivileged processes use io_uring.
fn kernel_allows() -> bool {
    let setting = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    setting.map_or(true, |setting| setting.trim() == "0")
}

/// Writes the chart's profile without io_uring to all nodes, like a runtime's current default profile.
pub(crate) fn write_profile_without_io_uring(cluster: &Cluster) {
    let file = tree().join("charts/reprise/files/seccomp-agent.json");
    let text = fs::read_to_string(file).expect("the chart has this file");
    let mut profile: Value = serde_json::from_str(&text).expect("a profile is JSON");
    let rules = profile["syscalls"].as_array_mut().expect("a profile has rules");
    let before = rules.len();
    rules
        .retain(|rule| !rule["names"].as_array().is_some_and(|names| names.iter().any(|name| name == SETUP)));
    assert_eq!(rules.len() + 1, before, "io_uring is one rule of the chart's profile");
    for node in cluster.nodes() {
        let folder = node.root().join(PROFILES);
        fs::create_dir_all(&folder).expect("the node's disk is writable");
        fs::write(folder.join("without-io-uring.json"), profile.to_string()).expect("the folder is writable");
    }
}

/// Returns the agents' configuration file.
fn configuration(release: Release<'_>) -> String {
    release.object("configmap", "reprise-agent")["data"]["agent.toml"].as_str().unwrap_or_default().to_owned()
}
