//! The operator in its pod with 1,000 nodes and 20 pools: it settles with all of them, within the time, the memory and the writes that it may
//! take. Pods of agents are scheduled and run as far as Kubernetes can tell (kwok); what agents tell is played.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use reprise_e2e::kubernetes::cluster::Population;
use reprise_e2e::kubernetes::fleet::{CLUSTER, Scale, pool_name};
use reprise_e2e::kubernetes::release::{NAMESPACE, Part, RELEASE, import_images};
use reprise_e2e::kubernetes::{Cluster, Fleet, Release, cluster, programs};
use reprise_e2e::seed::say;
use reprise_e2e::{Admin, tree, wait_until};
use serde_json::Value;

/// Nodes of the cluster's own: for the operator, members and etcd.
const OWN_NODES: u8 = 2;

/// What is played.
const SCALE: Scale = Scale { nodes: 1_000, pools: 20 };

/// From objects to what comes of them, on two cores that everything shares.
const SETTLES_WITHIN: Duration = Duration::from_secs(600);

/// Reports of agents whose devices get fuller, without any other change.
const STEADY: Duration = Duration::from_secs(30);

/// A reconcile, 99 of 100 of each kind: the upper bound of its bucket.
const RECONCILE_SECONDS_MAX: f64 = 1.0;

/// Requests to the API server a second, of all replicas together and of every kind, in any window while nodes come or are cordoned: the operator asks
/// 500 times a second at the most, 50 in each tenth of one. Where a second begins and ends decides about one tenth more, and about one that was late.
const REQUESTS_A_SECOND_MAX: f64 = 600.0;

/// Two looks at the requests are not nearer to each other.
const WINDOW: Duration = Duration::from_secs(1);

/// Requests for each node until it has come. Its CacheNode is made, and written once more when pools are accepted after the cluster; its condition says
/// that the agent serves: 3. What it reports changes numbers of its pool and of the cluster, and the count of pods that
/// run is told anew, each at once if a condition names it: 3. One for all that is not of nodes.
const REQUESTS_A_NODE_MAX: f64 = 7.0;

/// And until it is cordoned: its CacheNode is written, and says that the control plane does not know the node, which is an event as well: 3. Its pool and
/// the cluster name how many are: 2.
const REQUESTS_A_CORDON_MAX: f64 = 5.0;

/// What both replicas ask in rest, beside writes: the one that works looks at its lease and renews it every 3 s, the other one looks at it: 1. Some twenty
/// watches of each begin again every 290 s: 0.2. Each asks every 20 s for up to four kinds that are not served, or not allowed: 0.4.
const RESTING_MAX: f64 = 2.0;

/// Kinds that are reconciled here for sure.
const KINDS: [&str; 3] = ["KVCacheCluster", "Node", "SSDPool"];

/// What a node says of its agent.
const AGENT_READY: &str = "reprise.dev/AgentReady";

/// Memory of an operator.
const MEMORY_MIB_MAX: u64 = 200;

/// The largest object: every watcher gets all of it.
const OBJECT_KIB_MAX: usize = 256;

/// The operator's admin port.
const ADMIN_PORT: u16 = 7421;

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// A namespace for the operator.
const SPACE: &str = "
apiVersion: v1
kind: Namespace
metadata:
  name: reprise
  labels: { pod-security.kubernetes.io/enforce: restricted }
";

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let ready = || programs::images().and_then(|_| programs::prepare_kwok()).and_then(|()| cluster::enter());
    if !arguments.list
        && let Err(words) = ready()
    {
        panic!("no cluster can run here: {words}");
    }
    let test = Trial::test("an_operator_settles_with_a_thousand_nodes_within_its_bounds", || {
        settles();
        Ok(())
    });
    libtest_mimic::run(&arguments, vec![test]).exit_code()
}

fn settles() {
    let cluster = Cluster::start_for(OWN_NODES, Population::Played);
    let release = install(&cluster);
    let began = Instant::now();
    let fleet = Fleet::start(&cluster, SCALE);
    say(&format!("{} nodes were ready after {:.1?}", SCALE.nodes, began.elapsed()));
    let come = become_ready(&cluster, &fleet);
    let steady = while_devices_fill(&cluster, &fleet);
    let cordoned = cordon_all(&cluster, &fleet);
    assert_requests(&come, &steady, &cordoned);
    assert_bounds(&cluster, release, &steady);
}

/// The operator, from its chart.
fn install(cluster: &Cluster) -> Release<'_> {
    import_images(cluster);
    let release = Release::of(cluster);
    cluster.apply(SPACE);
    let chart = tree().join("charts/reprise").display().to_string();
    release.run(&["install", RELEASE, &chart, "--namespace", NAMESPACE, "--wait", "--timeout=180s"]);
    release
}

/// Requests to the API server while something happens, of all replicas of the operator together.
struct Storm<'a> {
    cluster: &'a Cluster,
    first: f64,
    last: (Instant, f64),
    /// A second, in the window that had the most.
    peak: f64,
}

impl<'a> Storm<'a> {
    fn begin(cluster: &'a Cluster) -> Storm<'a> {
        let first = requests(cluster);
        Storm { cluster, first, last: (Instant::now(), first), peak: 0.0 }
    }

    /// Ends a window, if it is long enough.
    fn look(&mut self) {
        let passed = self.last.0.elapsed();
        if passed >= WINDOW {
            let (begun, now) = (Instant::now(), requests(self.cluster));
            // What was asked during the look is counted, and its time as well.
            let time = passed + begun.elapsed();
            self.peak = self.peak.max((now - self.last.1) / time.as_secs_f64());
            self.last = (Instant::now(), now);
        }
    }

    /// All so far, for each node.
    fn a_node(&self) -> f64 {
        (self.last.1 - self.first) / SCALE.nodes as f64
    }
}

/// What is asked and written a second while nothing but numbers changes.
struct Steady {
    requests: f64,
    writes: f64,
}

fn requests(cluster: &Cluster) -> f64 {
    total(&pages(cluster), "reprise_operator_api_requests_total")
}

/// From objects to a cluster and pools that are ready on all nodes.
fn become_ready<'a>(cluster: &'a Cluster, fleet: &Fleet) -> Storm<'a> {
    let (began, mut storm) = (Instant::now(), Storm::begin(cluster));
    cluster.apply(&fleet.objects());
    wait_until("every node to have its claim", SETTLES_WITHIN, || {
        std::thread::sleep(PAUSE);
        storm.look();
        let has_claim = |claims: &Value| claims.as_array().is_some_and(|claims| claims.len() == 1);
        fleet.all(cluster, |node| has_claim(&node.data["spec"]["claims"])).then_some(())
    });
    let wanted = began.elapsed();
    wait_until("an agent's pod to run on every node", SETTLES_WITHIN, || {
        std::thread::sleep(PAUSE);
        storm.look();
        (ready_agents(cluster)? == SCALE.nodes).then_some(())
    });
    let run = began.elapsed();
    fleet.report_all(cluster);
    wait_until(
        "the cluster and all pools to be ready, and every node to say that its agent is",
        SETTLES_WITHIN,
        || {
            // Agents do not fall silent meanwhile.
            fleet.report_for(cluster, Duration::from_secs(5));
            storm.look();
            (are_ready(cluster) && fleet.all_nodes_say(cluster, AGENT_READY)).then_some(())
        },
    );
    say(&format!(
        "all nodes had their claims after {wanted:.1?}, pods of agents ran after {run:.1?}, all was ready after {:.1?}",
        began.elapsed()
    ));
    storm
}

/// What the operator asks and writes a second while all devices get fuller.
fn while_devices_fill(cluster: &Cluster, fleet: &Fleet) -> Steady {
    // What was under way comes to its end first.
    fleet.report_for(cluster, STEADY / 3);
    let (begun, before) = (Instant::now(), pages(cluster));
    fleet.report_for(cluster, STEADY);
    let (after, time) = (pages(cluster), begun.elapsed().as_secs_f64());
    let a_second = |metric: &str| (total(&after, metric) - total(&before, metric)) / time;
    let mut writes = BTreeMap::<&str, f64>::new();
    for (page, sign) in [(&after, 1.0), (&before, -1.0)] {
        for (labels, count) in samples(page, "reprise_operator_writes_total") {
            *writes.entry(label(labels, "kind")).or_default() += sign * count;
        }
    }
    writes.retain(|_, count| *count > 0.0);
    say(&format!("written in {time:.1} s while devices got fuller: {writes:?}"));
    let refused = |page: &str| {
        let all = samples(page, "reprise_operator_api_requests_total");
        // Whether there is a kind by now that was not is asked by a list, which may be refused.
        let refused =
            |labels: &str| !label(labels, "code").starts_with('2') && label(labels, "verb") != "list";
        all.filter(|(labels, _)| refused(labels)).map(|(_, count)| count).sum::<f64>()
    };
    assert_eq!(refused(&after), refused(&before), "what changes nothing but numbers is refused to nobody");
    Steady {
        requests: a_second("reprise_operator_api_requests_total"),
        writes: a_second("reprise_operator_writes_total"),
    }
}

fn cordon_all<'a>(cluster: &'a Cluster, fleet: &Fleet) -> Storm<'a> {
    let (began, mut storm) = (Instant::now(), Storm::begin(cluster));
    for pool in 0..SCALE.pools {
        let (name, patch) = (pool_name(pool), r#"--patch={"spec":{"mode":"Cordoned"}}"#);
        cluster.kubectl(&["patch", "ssdpool", &name, "--type=merge", patch]);
    }
    wait_until("every node to be cordoned", SETTLES_WITHIN, || {
        std::thread::sleep(PAUSE);
        storm.look();
        fleet.all(cluster, |node| node.data["spec"]["mode"] == "Cordoned").then_some(())
    });
    say(&format!("all nodes were cordoned after {:.1?}", began.elapsed()));
    // What is said of it comes after it.
    std::thread::sleep(STEADY / 3);
    storm.look();
    storm
}

fn assert_requests(come: &Storm<'_>, steady: &Steady, cordoned: &Storm<'_>) {
    say(&format!(
        "requests to the API server: {:.1} a node until they had come, at most {:.0} a second; {:.2} a second while devices got fuller; {:.1} a node \
         until they were cordoned, at most {:.0} a second",
        come.a_node(),
        come.peak,
        steady.requests,
        cordoned.a_node(),
        cordoned.peak,
    ));
    for peak in [come.peak, cordoned.peak] {
        assert!(peak <= REQUESTS_A_SECOND_MAX, "{peak} a second");
    }
    for (a_node, most) in [(come.a_node(), REQUESTS_A_NODE_MAX), (cordoned.a_node(), REQUESTS_A_CORDON_MAX)] {
        assert!((1.0..=most).contains(&a_node), "{a_node} a node");
    }
    let rest = steady.requests - steady.writes;
    assert!(rest <= RESTING_MAX, "{rest} a second beside {} writes", steady.writes);
}

fn assert_bounds(cluster: &Cluster, release: Release<'_>, steady: &Steady) {
    let writes = steady.writes;
    let p99 = quantiles(&pages(cluster), 0.99);
    let mib = release.peak_bytes(&release.pods(Part::Operator)) >> 20;
    let largest = largest_object(cluster) >> 10;
    say(&format!(
        "reconcile p99 at most {p99:?} s, memory {mib} MiB, largest object {largest} KiB, {writes:.2} writes a second while devices got fuller"
    ));
    assert!(KINDS.iter().all(|kind| p99.contains_key(*kind)), "{p99:?}");
    assert!(p99.values().all(|seconds| *seconds <= RECONCILE_SECONDS_MAX), "{p99:?} s");
    assert!(mib <= MEMORY_MIB_MAX, "{mib} MiB");
    assert!(largest <= OBJECT_KIB_MAX, "{largest} KiB");
    // Each pool and the cluster tell new numbers every 10 s at the most, and once meanwhile at the least: there were new ones.
    let told = (SCALE.pools + 1) as f64;
    assert!(writes <= told / 10.0 + 1.0, "{writes} a second");
    assert!(writes >= told / STEADY.as_secs_f64(), "{writes} a second: nothing new was told");
}

/// Pods of agents that are ready, once there is the set of them.
fn ready_agents(cluster: &Cluster) -> Option<usize> {
    let name = format!("{CLUSTER}-agent");
    let path = "--output=jsonpath={.status.numberReady}";
    let said = cluster.try_kubectl(&["--namespace", CLUSTER, "get", "daemonset", &name, path]).ok()?;
    said.trim().parse().ok()
}

/// Whether the cluster and all its pools say that they are ready.
fn are_ready(cluster: &Cluster) -> bool {
    let is_ready = |object: &Value| {
        let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
        conditions.into_iter().any(|one| one["type"] == "Ready" && one["status"] == "True")
    };
    let (pools, clusters) = (objects(cluster, "ssdpools"), objects(cluster, "kvcacheclusters"));
    pools.len() == SCALE.pools && pools.iter().chain(&clusters).all(is_ready)
}

/// All objects of a kind of ours.
fn objects(cluster: &Cluster, plural: &str) -> Vec<Value> {
    let kind = format!("{plural}.reprise.dev");
    let said = cluster.kubectl(&["get", &kind, "--all-namespaces", "--output=json"]);
    let mut list: Value = serde_json::from_str(&said).expect("kubectl says JSON");
    match list["items"].take() {
        Value::Array(items) => items,
        other => panic!("a list has items: {other}"),
    }
}

/// The largest object of ours, in bytes as JSON.
fn largest_object(cluster: &Cluster) -> usize {
    let all = ["kvcacheclusters", "ssdpools", "cachenodes"].map(|plural| objects(cluster, plural));
    let bytes = |object: &Value| object.to_string().len();
    all.iter().flatten().map(bytes).max().expect("there are some")
}

/// What all replicas of the operator measure: the one that works, and those that wait.
fn pages(cluster: &Cluster) -> String {
    let addresses = cluster.kubectl(&[
        "--namespace",
        NAMESPACE,
        "get",
        "pods",
        "--selector=app.kubernetes.io/name=reprise-operator",
        "--output=jsonpath={range .items[*]}{.status.podIP}{\"\\n\"}{end}",
    ]);
    let page = |address: &str| {
        let (code, page) = Admin::at(&format!("{address}:{ADMIN_PORT}")).get("/metrics").expect("it serves");
        assert_eq!(code, 200, "{page}");
        page
    };
    addresses.lines().filter(|address| !address.is_empty()).map(page).collect()
}

/// Samples of a metric, each with its labels.
fn samples<'a>(page: &'a str, metric: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
    page.lines().filter_map(move |line| {
        let (labels, value) = line.strip_prefix(metric)?.rsplit_once(' ')?;
        (labels.is_empty() || labels.starts_with('{')).then_some(())?;
        Some((labels, value.parse().ok()?))
    })
}

fn total(page: &str, metric: &str) -> f64 {
    samples(page, metric).map(|(_, value)| value).sum()
}

/// Buckets of a histogram: upper bounds, and how many are below each.
type Buckets = Vec<(f64, f64)>;

/// Of each kind of objects, the upper bound of the bucket that holds this share of its reconciles, of all replicas together.
fn quantiles(page: &str, share: f64) -> BTreeMap<String, f64> {
    let mut kinds: BTreeMap<String, Buckets> = BTreeMap::new();
    for (labels, count) in samples(page, "reprise_operator_reconcile_seconds_bucket") {
        let bound = match label(labels, "le") {
            "+Inf" => f64::INFINITY,
            number => number.parse().expect("a bound is a number"),
        };
        let buckets = kinds.entry(label(labels, "kind").to_owned()).or_default();
        match buckets.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, sum)) => *sum += count,
            None => buckets.push((bound, count)),
        }
    }
    kinds.into_iter().map(|(kind, buckets)| (kind, quantile(buckets, share))).collect()
}

/// The value of a label.
fn label<'a>(labels: &'a str, name: &str) -> &'a str {
    let value = labels.split_once(&format!("{name}=\""));
    value.and_then(|(_, rest)| rest.split('"').next()).expect("the metric has this label")
}

/// The upper bound of the bucket that holds this share.
fn quantile(mut buckets: Buckets, share: f64) -> f64 {
    buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
    let all = buckets.last().expect("a histogram has buckets").1;
    assert!(all > 0.0, "something was reconciled");
    let holds = buckets.iter().find(|(_, below)| *below >= share * all);
    holds.expect("the last bucket holds all").0
}
