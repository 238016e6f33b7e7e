//! Compares the metrics that processes serve with `docs/METRICS.md`: names, types, labels and help. `promtool
//! check metrics` must accept them.
//!
//! Two agents and a control plane are used first, since a family without samples is not served.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use reprise_client::{Scope, Source};
use reprise_crds::{CacheTenant, KVCacheCluster};
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::{Admin, AgentConfig, LoadParams, PATIENCE, TestEnv, wait_until};
use serde_json::json;

/// Suffixes of the series of a histogram.
const HISTOGRAM_SUFFIXES: [&str; 3] = ["_bucket", "_count", "_sum"];

/// Headings above the tables of the page.
const AGENT_TITLE: &str = "\n## Agent\n\n";
const CONTROL_PLANE_TITLE: &str = "\n## Control plane\n\n";
const OPERATOR_TITLE: &str = "\n## Operator\n\n";

/// One row of the documentation.
#[derive(Debug, Default, PartialEq, Eq)]
struct Metric {
    kind: String,
    help: String,
    labels: BTreeSet<String>,
}

/// Scrapes the metrics of a process, by name.
fn scrape(admin: &Admin) -> BTreeMap<String, Metric> {
    let open_metrics = "application/openmetrics-text";
    let (code, head, text) = admin.get_as("/metrics", open_metrics).expect("the metrics are served");
    assert_eq!(code, 200);
    assert!(head.contains(open_metrics), "{head}");
    check_by_promtool(admin);
    let mut metrics: BTreeMap<String, Metric> = BTreeMap::new();
    for line in text.lines() {
        match line.strip_prefix("# ").map(|comment| comment.splitn(3, ' ').collect::<Vec<_>>()).as_deref() {
            Some(["HELP", name, help]) => {
                metrics.entry((*name).to_owned()).or_default().help = help.trim_end_matches('.').to_owned();
            }
            Some(["TYPE", name, kind]) => {
                metrics.entry((*name).to_owned()).or_default().kind = (*kind).to_owned();
            }
            Some(_) => {}
            None => add_labels(&mut metrics, line),
        }
    }
    metrics
}

/// Checks with `promtool` the metrics that a process serves to scrapers without an `Accept` header.
fn check_by_promtool(admin: &Admin) {
    let (_, head, text) = admin.get_as("/metrics", "*/*").expect("the metrics are served");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    let mut promtool = Command::new(reprise_e2e::promtool());
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = promtool.spawn().expect("promtool can be run");
    let mut input = running.stdin.take().expect("piped above");
    input.write_all(text.as_bytes()).expect("promtool reads its input");
    drop(input);
    let ended = running.wait_with_output().expect("promtool exits");
    let words = [ended.stdout, ended.stderr].concat();
    assert!(ended.status.success(), "promtool: {}", String::from_utf8_lossy(&words));
}

/// Adds the labels of a sample to its metric.
fn add_labels(metrics: &mut BTreeMap<String, Metric>, sample: &str) {
    let Some((name, labels)) = sample.split_once('{') else { return };
    let labels = labels.split_once('}').expect("labels end").0;
    let metric = HISTOGRAM_SUFFIXES
        .iter()
        .chain(&["_total", "_info"])
        .filter_map(|suffix| name.strip_suffix(suffix))
        .chain([name])
        .find(|name| metrics.contains_key(*name))
        .unwrap_or_else(|| panic!("a sample without a metric: {sample}"));
    let names = labels.split(',').filter_map(|label| label.split_once('=')).map(|(name, _)| name.to_owned());
    let metric = metrics.get_mut(metric).expect("found above");
    metric.labels.extend(names.filter(|name| name != "le"));
}

/// Returns the name under which a metric is queried.
fn sample_name(name: &str, metric: &Metric) -> String {
    match metric.kind.as_str() {
        "counter" => format!("{name}_total"),
        "info" => format!("{name}_info"),
        _ => name.to_owned(),
    }
}

/// Formats the table that documents a scrape.
fn table(metrics: &BTreeMap<String, Metric>) -> String {
    let mut text = "| metric | type | labels | what |\n|---|---|---|---|\n".to_owned();
    for (name, metric) in metrics {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let row = [format!("`{}`", sample_name(name, metric)), metric.kind.clone(), labels.join(", ")];
        text.push_str(&format!("| {} | {} |\n", row.join(" | "), metric.help));
    }
    text
}

/// Scrapes an operator with a cluster whose ConfigMap's name is taken by a foreign object.
fn operator(env: &TestEnv) -> BTreeMap<String, Metric> {
    let server = env.api_server();
    let files = env.operator(&server, "operator", "default");
    let applied = files.command(&["apply-definitions"]).output().expect("the operator can be started");
    assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
    let (maps, name) = (Api::<ConfigMap>::default_namespaced(server.admin()), "c-agent");
    let foreign = ConfigMap {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        ..ConfigMap::default()
    };
    server.block_on(maps.create(&PostParams::default(), &foreign)).expect("a ConfigMap");
    let clusters = Api::<KVCacheCluster>::default_namespaced(server.admin());
    let cluster = KVCacheCluster::new("c", reprise_crds::KVCacheClusterSpec::default());
    server.block_on(clusters.create(&PostParams::default(), &cluster)).expect("a cluster");
    // A tenant whose budget cannot be written, since the control plane is unreachable.
    let tenants = Api::<CacheTenant>::all(server.admin());
    let tenant = CacheTenant::new("team-a", reprise_crds::CacheTenantSpec::default());
    server.block_on(tenants.create(&PostParams::default(), &tenant)).expect("a tenant");
    let operator = files.control_plane("default/c", "127.0.0.1:9").start().expect("the operator starts");
    // A ConfigMap that belongs to the operator, and that another writer changes.
    let name = "c-connection";
    wait_until("the ConfigMap for engines", PATIENCE, || {
        server.block_on(maps.get_opt(name)).expect("the API server responds")
    });
    let (params, foreign_edit) =
        (PatchParams::default(), Patch::Merge(json!({ "data": { "socket": "/foreign_edit" } })));
    server.block_on(maps.patch(name, &params, &foreign_edit)).expect("an edit is accepted");
    wait_until("the operator has counted everything", PATIENCE, || {
        let counted = |name: &str| operator.metric(&format!("reprise_operator_{name}_total"), "") > 0.0;
        let of_kinds = ["conflicts", "put_backs", "writes", "reconciles", "control_plane_calls"];
        of_kinds.into_iter().all(counted).then_some(())
    });
    scrape(operator.admin())
}

#[test]
fn the_documentation_lists_exactly_the_served_metrics_and_promtool_accepts_them() {
    let env = TestEnv::new();
    let plane = env.control_plane(Store::Embedded);
    let config = |node: &str| AgentConfig {
        control_plane: vec![plane.address().to_owned()],
        ..AgentConfig::named(node)
    };
    let (first, second) = (env.agent(&config("first")), env.agent(&config("second")));
    for node in ["first", "second"] {
        wait_until("both agents are known", PATIENCE, || plane.offers(node)?.then_some(()));
    }
    let (saver, reader) = (first.engine(small()), second.engine(small()));
    let blocks: Vec<u64> = (0..8).collect();
    saver.save_durably(&blocks);
    saver.trim();
    wait_until("the directory has all blocks", PATIENCE, || {
        (reader.matches(&blocks, Scope::Cluster) == vec![Source::PeerNvme; 8]).then_some(())
    });
    reader.load_all(&blocks, &LoadParams::CLUSTER);
    saver.load_all(&blocks, &LoadParams::LOCAL);

    // The two agents do different work, so their labels are combined.
    let mut agent = scrape(first.admin());
    for (name, metric) in scrape(second.admin()) {
        agent.entry(name).or_default().labels.extend(metric.labels.iter().cloned());
    }
    let operator = operator(&env);
    let path = reprise_e2e::tree().join("docs/METRICS.md");
    let page = std::fs::read_to_string(path).expect("docs/METRICS.md exists");
    let text = page.split(AGENT_TITLE).next().expect("a split has a first part");
    let (agent, plane, operator) = (table(&agent), table(&scrape(plane.admin())), table(&operator));
    let expected =
        format!("{text}{AGENT_TITLE}{agent}{CONTROL_PLANE_TITLE}{plane}{OPERATOR_TITLE}{operator}");
    if page != expected {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("METRICS.md");
        std::fs::write(&path, expected).expect("the target folder is writable");
        panic!("docs/METRICS.md does not match the served metrics: replace it with {}", path.display());
    }
}
