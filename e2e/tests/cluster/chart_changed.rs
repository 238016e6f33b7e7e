//! A release that is changed and taken back. As changed, agents run under the chart's own seccomp profile, which allows io_uring, and
//! give blocks to other nodes; tests in between look at what that is good for.

use std::fs;
use std::time::Duration;

use reprise_crds::OPERATOR_FIELD_MANAGER;
use reprise_e2e::kubernetes::engines::{ENGINES as COUNT, Said};
use reprise_e2e::kubernetes::release::{NAMESPACE, PODS_WITHIN, Part, Pod, RELEASE};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::say;
use reprise_e2e::{tree, wait_until};
use serde_json::{Value, json};

use crate::chart::{ENGINES, SETTINGS, condition, running};
use crate::chart_life::{OUTAGE_MAX, wait_for_all_blocks};

/// What is changed, and what agents are told.
const CHANGE: &str = "--set=cluster.cache.limits.loadDeadline=7s";
const CHANGED: &str = "load_deadline = \"7s\"";

/// The revision that was installed ([`running`]).
const INSTALLED: &str = "1";

/// Blocks may go to other nodes, as a drain needs it.
const BANDWIDTH: &str = "--set-string=cluster.cache.placement.bandwidth=256Mi";

/// The chart brings the profile to the nodes, and agents use it, as docs/KUBERNETES.md says.
const SECCOMP: &str = "--set=seccomp.installer.enabled=true,cluster.agents.seccomp.mode=Localhost,\
                       cluster.agents.seccomp.localhostProfile=reprise-agent.json";

/// A profile without these calls, and what makes agents use it.
pub(crate) const WITHOUT_IO_URING: &str = "--set=cluster.agents.seccomp.mode=Localhost,\
                                           cluster.agents.seccomp.localhostProfile=without-io-uring.json";

/// Where kubelets look for profiles, below a node's root.
const PROFILES: &str = "var/lib/kubelet/seccomp";

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// The first call of whoever uses io_uring.
const SETUP: &str = "io_uring_setup";

/// Changes the release where that has not been done; engines go on meanwhile, and the definitions are this release's afterwards.
pub(crate) fn changed(cluster: &Cluster) -> Release<'_> {
    let release = running(cluster);
    if !configuration(release).contains(CHANGED) {
        let moment = ENGINES.now(cluster);
        let definition = make_older(release);
        let before = release.pods(Part::Agents);
        release.upgrade(&[SETTINGS, CHANGE, BANDWIDTH, SECCOMP]);
        release.replaced(Part::Agents, &before, before.len());
        is_this_releases(release, &definition);
        release.wait_until_ready();
        wait_for_all_blocks(cluster);
        engines_went_on(cluster, "an upgrade", ENGINES.since(cluster, &moment));
    }
    release
}

/// A definition that no release has: what the upgrade's hook brings is the new one's, before anything else of it is there.
const OLD_WORDS: &str = "as somebody's older release has it";
const DEFINITION: &str = "slackprofiles.reprise.dev";
const WORDS_AT: &str = "/spec/versions/0/schema/openAPIV3Schema/description";

/// The definition, with who has written what of it.
fn definition(release: Release<'_>) -> Value {
    let get = ["get", "customresourcedefinition", DEFINITION, "--show-managed-fields", "--output=json"];
    serde_json::from_str(&release.kubectl(&get)).expect("kubectl says JSON")
}

/// Gives a definition other words; what it was before.
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

/// The definition is as it was, and it is the operator's image that has written it.
fn is_this_releases(release: Release<'_>, before: &Value) {
    let now = definition(release);
    assert_eq!(now["spec"], before["spec"], "the release's own definition is back");
    let written = |definition: &Value| {
        let fields = definition["metadata"]["managedFields"].as_array().into_iter().flatten();
        let by_operator = |fields: &&Value| {
            fields["manager"] == OPERATOR_FIELD_MANAGER && !fields["fieldsV1"]["f:spec"].is_null()
        };
        let times = fields.into_iter().filter(by_operator);
        times.map(|fields| fields["time"].as_str().unwrap_or_default().to_owned()).max()
    };
    assert!(written(&now) > written(before), "by its hook: {:#}", now["metadata"]["managedFields"]);
}

pub(crate) fn allows_io_uring(cluster: &mut Cluster) {
    let release = changed(cluster);
    assert!(configuration(release).contains(CHANGED), "agents are told: {}", configuration(release));
    for agent in release.pods(Part::Agents) {
        assert!(
            profile_allows(release, &agent),
            "the runtime was given the chart's profile on {}",
            agent.node
        );
    }
    engines_are_told_as_allowed(release);
}

pub(crate) fn taken_back(cluster: &mut Cluster) {
    let release = changed(cluster);
    let moment = ENGINES.now(cluster);
    let before = release.pods(Part::Agents);
    release.run(&["rollback", RELEASE, INSTALLED, "--namespace", NAMESPACE, "--wait", "--timeout=180s"]);
    release.replaced(Part::Agents, &before, before.len());
    release.wait_until_ready();
    assert!(!configuration(release).contains(CHANGED), "and told otherwise: {}", configuration(release));
    let installers = release.kubectl(&["get", "daemonsets", "--output=name"]);
    assert!(!installers.contains("seccomp"), "what brought the profile is gone: {installers}");
    engines_are_told_as_allowed(release);
    wait_for_all_blocks(cluster);
    engines_went_on(cluster, "a rollback", ENGINES.since(cluster, &moment));
}

/// Of no more than one agent at a time the engines are without, and each has found the new one.
fn engines_went_on(cluster: &Cluster, what: &str, since: [Option<Said>; COUNT]) {
    assert_eq!(since.len(), cluster.nodes().len(), "one on each node");
    for (index, said) in since.into_iter().enumerate() {
        let said = said.expect("no engine has ended");
        say(&format!(
            "{what}: engine {index} hit {:?}, opened {} sessions, and was without its block for {} ms at the most",
            said.hits, said.sessions, said.longest_outage_ms
        ));
        assert!(said.sessions >= 1, "its agent was replaced: {said:?}");
        assert!(Duration::from_millis(said.longest_outage_ms) <= OUTAGE_MAX, "{said:?}");
    }
}

/// The pool says by which engine devices are driven: io_uring where the profile in effect and the kernel allow it on all nodes, else
/// the fallback, and that it is one.
pub(crate) fn engines_are_told_as_allowed(release: Release<'_>) {
    let agents = release.pods(Part::Agents);
    let is_allowed = kernel_allows() && agents.iter().all(|agent| profile_allows(release, agent));
    let (engine, is_other) = if is_allowed { ("IoUring", "False") } else { ("Plain", "True") };
    for agent in &agents {
        wait_until(&format!("{} to say that {engine} drives its device", agent.node), PODS_WITHIN, || {
            std::thread::sleep(PAUSE);
            let node = release.object("cachenode", &agent.node);
            let is_told = node["status"]["devices"][0]["engine"] == engine;
            (is_told && condition(&node, "EngineFallback").0 == is_other).then_some(())
        });
    }
    let wanted = json!([{ "engine": engine, "nodes": agents.len() }]);
    let pool = wait_until(&format!("the pool to say {wanted}"), PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let pool = release.object("ssdp", "lab");
        (pool["status"]["effectiveEngines"] == wanted).then_some(pool)
    });
    assert_eq!(condition(&pool, "EngineFallback").0, is_other, "{pool:#}");
    assert_eq!(condition(&pool, "Ready").0, "True", "by either of them: {pool:#}");
    let spec = &release.object("kvcc", RELEASE)["spec"]["agents"]["seccomp"];
    say(&format!("with the seccomp profile {spec} devices are driven by {engine}"));
}

/// Whether a pod's container may set up io_uring, by what the runtime was told of it.
fn profile_allows(release: Release<'_>, pod: &Pod) -> bool {
    let config = release.runtime_config(pod);
    let profile = &config["linux"]["seccomp"];
    assert!(profile["defaultAction"].is_string(), "agents are never unconfined: {profile}");
    let rules = profile["syscalls"].as_array().into_iter().flatten();
    let is_named =
        |rule: &&Value| rule["names"].as_array().is_some_and(|names| names.iter().any(|name| name == SETUP));
    rules.into_iter().filter(is_named).any(|rule| rule["action"] == "SCMP_ACT_ALLOW")
}

/// Whether the kernel lets anybody use io_uring who has no right of his own.
fn kernel_allows() -> bool {
    let setting = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    setting.map_or(true, |setting| setting.trim() == "0")
}

/// Gives all nodes the chart's profile without io_uring: what a runtime's default profile is today, whatever this machine's is.
pub(crate) fn lay_down_without_io_uring(cluster: &Cluster) {
    let file = tree().join("charts/reprise/files/seccomp-agent.json");
    let text = fs::read_to_string(file).expect("it is in the chart");
    let mut profile: Value = serde_json::from_str(&text).expect("a profile is JSON");
    let rules = profile["syscalls"].as_array_mut().expect("a profile has rules");
    let before = rules.len();
    rules
        .retain(|rule| !rule["names"].as_array().is_some_and(|names| names.iter().any(|name| name == SETUP)));
    assert_eq!(rules.len() + 1, before, "io_uring is one rule of the chart's profile");
    for node in cluster.nodes() {
        let folder = node.root().join(PROFILES);
        fs::create_dir_all(&folder).expect("a node's disk takes folders");
        fs::write(folder.join("without-io-uring.json"), profile.to_string()).expect("and files");
    }
}

/// What agents read.
fn configuration(release: Release<'_>) -> String {
    release.object("configmap", "reprise-agent")["data"]["agent.toml"].as_str().unwrap_or_default().to_owned()
}
