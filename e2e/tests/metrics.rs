//! What processes serve at `/metrics` is what `docs/METRICS.md` lists: names, types, labels and help. `promtool check metrics`
//! finds nothing wrong with it.
//!
//! Two agents and a control plane do a bit of everything first, since a family without members is not served.

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
use reprise_e2e::{Admin, AgentConfig, Loading, PATIENCE, World, wait_until};
use serde_json::json;

/// Numbers and bounds of a histogram are named after it.
const HISTOGRAM_SUFFIXES: [&str; 3] = ["_bucket", "_count", "_sum"];

/// What stands above the tables of the page.
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

/// The metrics of a scrape, by name.
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
            None => note_labels(&mut metrics, line),
        }
    }
    metrics
}

/// Panics when Prometheus' own tool finds something wrong with what a program serves to scrapers that ask for nothing.
fn check_by_promtool(admin: &Admin) {
    let (_, head, text) = admin.get_as("/metrics", "*/*").expect("the metrics are served");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    let mut promtool = Command::new(reprise_e2e::promtool());
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = promtool.spawn().expect("promtool starts");
    let mut input = running.stdin.take().expect("it is piped");
    input.write_all(text.as_bytes()).expect("promtool reads all of it");
    drop(input);
    let ended = running.wait_with_output().expect("promtool ends");
    let words = [ended.stdout, ended.stderr].concat();
    assert!(ended.status.success(), "promtool: {}", String::from_utf8_lossy(&words));
}

/// Adds the labels of a sample to its metric.
fn note_labels(metrics: &mut BTreeMap<String, Metric>, sample: &str) {
    let Some((name, labels)) = sample.split_once('{') else { return };
    let labels = labels.split_once('}').expect("labels end").0;
    let metric = HISTOGRAM_SUFFIXES
        .iter()
        .chain(&["_total", "_info"])
        .filter_map(|suffix| name.strip_suffix(suffix))
        .chain([name])
        .find(|name| metrics.contains_key(*name))
        .unwrap_or_else(|| panic!("a sample of no metric: {sample}"));
    let names = labels.split(',').filter_map(|label| label.split_once('=')).map(|(name, _)| name.to_owned());
    let metric = metrics.get_mut(metric).expect("found above");
    metric.labels.extend(names.filter(|name| name != "le"));
}

/// The name under which a metric is queried.
fn sample_name(name: &str, metric: &Metric) -> String {
    match metric.kind.as_str() {
        "counter" => format!("{name}_total"),
        "info" => format!("{name}_info"),
        _ => name.to_owned(),
    }
}

/// The table that documents a scrape.
fn table(metrics: &BTreeMap<String, Metric>) -> String {
    let mut text = "| metric | type | labels | what |\n|---|---|---|---|\n".to_owned();
    for (name, metric) in metrics {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let row = [format!("`{}`", sample_name(name, metric)), metric.kind.clone(), labels.join(", ")];
        text.push_str(&format!("| {} | {} |\n", row.join(" | "), metric.help));
    }
    text
}

/// The metrics of an operator with a cluster, whose configuration's name somebody else has.
fn operator(world: &World) -> BTreeMap<String, Metric> {
    let server = world.api_server();
    let files = world.operator(&server, "operator", "default");
    let applied = files.command(&["apply-definitions"]).output().expect("the operator can be started");
    assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
    let (maps, name) = (Api::<ConfigMap>::default_namespaced(server.admin()), "c-agent");
    let theirs = ConfigMap {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        ..ConfigMap::default()
    };
    server.block_on(maps.create(&PostParams::default(), &theirs)).expect("a ConfigMap");
    let clusters = Api::<KVCacheCluster>::default_namespaced(server.admin());
    let cluster = KVCacheCluster::new("c", reprise_crds::KVCacheClusterSpec::default());
    server.block_on(clusters.create(&PostParams::default(), &cluster)).expect("a cluster");
    // Somebody whose budget the control plane is to know, which is not there.
    let tenants = Api::<CacheTenant>::all(server.admin());
    let tenant = CacheTenant::new("team-a", reprise_crds::CacheTenantSpec::default());
    server.block_on(tenants.create(&PostParams::default(), &tenant)).expect("a tenant");
    let operator = files.control_plane("default/c", "127.0.0.1:9").start().expect("the operator starts");
    // What is the operator's alone, and somebody writes.
    let name = "c-connection";
    wait_until("the ConfigMap for engines", PATIENCE, || {
        server.block_on(maps.get_opt(name)).expect("the API server answers")
    });
    let (params, mine) = (PatchParams::default(), Patch::Merge(json!({ "data": { "socket": "/mine" } })));
    server.block_on(maps.patch(name, &params, &mine)).expect("an edit is taken");
    wait_until("the operator has met everything", PATIENCE, || {
        let met = |name: &str| operator.metric(&format!("reprise_operator_{name}_total"), "") > 0.0;
        let of_kinds = ["conflicts", "put_backs", "writes", "reconciles", "control_plane_calls"];
        of_kinds.into_iter().all(met).then_some(())
    });
    scrape(operator.admin())
}

#[test]
fn the_documentation_lists_exactly_what_is_served_and_promtool_accepts_it() {
    let world = World::new();
    let plane = world.control_plane(Store::Embedded);
    let config = |node: &str| AgentConfig {
        control_plane: vec![plane.address().to_owned()],
        ..AgentConfig::named(node)
    };
    let (first, second) = (world.agent(&config("first")), world.agent(&config("second")));
    for node in ["first", "second"] {
        wait_until("both agents are known", PATIENCE, || plane.offers(node)?.then_some(()));
    }
    let (saver, reader) = (first.engine(small()), second.engine(small()));
    let blocks: Vec<u64> = (0..8).collect();
    saver.save_durably(&blocks);
    saver.trim();
    wait_until("the directory knows all blocks", PATIENCE, || {
        (reader.matches(&blocks, Scope::Cluster) == vec![Source::PeerNvme; 8]).then_some(())
    });
    reader.load_all(&blocks, &Loading::CLUSTER);
    saver.load_all(&blocks, &Loading::LOCAL);

    // What one agent does the other one does not; both are agents.
    let mut agent = scrape(first.admin());
    for (name, metric) in scrape(second.admin()) {
        agent.entry(name).or_default().labels.extend(metric.labels.iter().cloned());
    }
    let operator = operator(&world);
    let path = reprise_e2e::tree().join("docs/METRICS.md");
    let page = std::fs::read_to_string(path).expect("docs/METRICS.md is there");
    let text = page.split(AGENT_TITLE).next().expect("a split has a first part");
    let (agent, plane, operator) = (table(&agent), table(&scrape(plane.admin())), table(&operator));
    let right = format!("{text}{AGENT_TITLE}{agent}{CONTROL_PLANE_TITLE}{plane}{OPERATOR_TITLE}{operator}");
    if page != right {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("METRICS.md");
        std::fs::write(&path, right).expect("the target folder takes a file");
        panic!("docs/METRICS.md is not what is served: look at {}, and take it over", path.display());
    }
}
