//! The operator in its pod with 1,000 nodes and 20 pools: it converges within bounds on time, memory and
//! writes. The pods of agents are scheduled, and kwok reports them as running. The agents' reports are
//! simulated.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use k8s_openapi::ByteString;
use libtest_mimic::{Arguments, Trial};
use reprise_e2e::kubernetes::cluster::Population;
use reprise_e2e::kubernetes::fleet::{CLUSTER, Scale, pool_name};
use reprise_e2e::kubernetes::release::{Component, NAMESPACE, RELEASE, import_images};
use reprise_e2e::kubernetes::{Cluster, Fleet, Release, cluster, programs};
use reprise_e2e::seed::print_line;
use reprise_e2e::{Admin, tree, wait_until};
use reprise_identity::authority::CERTIFICATE_VALID;
use reprise_identity::{Authority, Expected, Identity, Role};
use reprise_testkit::metrics::{self, Buckets, add_bucket, quantile, samples, total};
use serde_json::Value;

/// Real nodes of the cluster: for the operator, members and etcd.
const OWN_NODES: u8 = 2;

/// Number of simulated nodes and of pools.
const SCALE: Scale = Scale { nodes: 1_000, pools: 20 };

/// Bound from new objects until the operator has converged, on two cores that everything shares.
const SETTLES_WITHIN: Duration = Duration::from_secs(600);

/// Time in which agents report fuller devices and nothing else changes.
const STEADY: Duration = Duration::from_secs(30);

/// Bound on the reconcile time at the 99th percentile of each kind: the upper bound of its bucket.
const RECONCILE_SECONDS_MAX: f64 = 1.0;

/// Bound on API requests per second, of all replicas and of every kind, in any window while nodes register or
/// are cordoned. The operator sends at most 500 per second, 50 in each tenth of one. A window's edges may add
/// about two tenths.
const REQUESTS_A_SECOND_MAX: f64 = 600.0;

/// Minimum length of a window between two readings of the requests.
const WINDOW: Duration = Duration::from_secs(1);

/// Bound on requests per node until it is ready. Its CacheNode is created, and written again when pools are
/// accepted after the cluster; its condition reports the ready agent: 3. The report changes numbers of its
/// pool and of the cluster, and the count of running pods, each written at once if a condition contains it:
/// 3. One for everything that is not per node.
const REQUESTS_A_NODE_MAX: f64 = 7.0;

/// Bound on requests per node until it is cordoned. Its CacheNode is written, then reports that the control
/// plane does not know the node, with an event: 3. The statuses of its pool and of the cluster contain the
/// number of cordoned nodes: 2.
const REQUESTS_A_CORDON_MAX: f64 = 5.0;

/// Bound on idle requests per second of both replicas, except writes. The leader reads and renews its lease
/// every 3 s, and the other one reads it: 1. Each restarts some twenty watches every 290 s: 0.2. Each polls
/// up to four kinds that are not served or not allowed every 20 s: 0.4.
const RESTING_MAX: f64 = 2.0;

/// Kinds that are certainly reconciled in this test.
const KINDS: [&str; 3] = ["KVCacheCluster", "Node", "SSDPool"];

/// Condition of a node about its agent.
const AGENT_READY: &str = "reprise.dev/AgentReady";

/// Bound on the memory of an operator.
const MEMORY_MIB_MAX: u64 = 200;

/// Bound on the largest object: every watch receives all of it.
const OBJECT_KIB_MAX: usize = 256;

/// Admin port of the operator.
const ADMIN_PORT: u16 = 7421;

/// Interval between polls that each start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// Namespace of the operator.
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
        panic!("cannot run a cluster here: {words}");
    }
    let test = Trial::test("an_operator_converges_with_a_thousand_nodes_within_its_bounds", || {
        converges();
        Ok(())
    });
    libtest_mimic::run(&arguments, vec![test]).exit_code()
}

fn converges() {
    let cluster = Cluster::start_for(OWN_NODES, Population::Simulated);
    let release = install(&cluster);
    let started = Instant::now();
    let fleet = Fleet::start(&cluster, SCALE);
    print_line(&format!("{} nodes were ready after {:.1?}", SCALE.nodes, started.elapsed()));
    let registration = become_ready(&cluster, &fleet);
    let steady = while_devices_fill(&cluster, &fleet);
    let cordoned = cordon_all(&cluster, &fleet);
    assert_requests(&registration, &steady, &cordoned);
    assert_bounds(&cluster, release, &steady);
}

/// Installs the operator by its chart.
fn install(cluster: &Cluster) -> Release<'_> {
    import_images(cluster);
    let release = Release::of(cluster);
    cluster.apply(SPACE);
    let chart = tree().join("charts/reprise").display().to_string();
    release.run(&["install", RELEASE, &chart, "--namespace", NAMESPACE, "--wait", "--timeout=180s"]);
    release
}

/// Counts the API requests of all replicas of the operator during a phase.
struct RequestMeter<'a> {
    cluster: &'a Cluster,
    first: f64,
    last: (Instant, f64),
    /// Requests per second in the window with the most.
    peak: f64,
}

impl<'a> RequestMeter<'a> {
    fn begin(cluster: &'a Cluster) -> RequestMeter<'a> {
        let first = requests(cluster);
        RequestMeter { cluster, first, last: (Instant::now(), first), peak: 0.0 }
    }

    /// Ends the current window if it is long enough.
    fn sample(&mut self) {
        let passed = self.last.0.elapsed();
        if passed >= WINDOW {
            let (started, now) = (Instant::now(), requests(self.cluster));
            // Requests during the reading are counted, so its time counts as well.
            let time = passed + started.elapsed();
            self.peak = self.peak.max((now - self.last.1) / time.as_secs_f64());
            self.last = (Instant::now(), now);
        }
    }

    /// Returns all requests so far per node.
    fn per_node(&self) -> f64 {
        (self.last.1 - self.first) / SCALE.nodes as f64
    }
}

/// Requests and writes per second while only numbers change.
struct Steady {
    requests: f64,
    writes: f64,
}

fn requests(cluster: &Cluster) -> f64 {
    total(&pages(cluster), "reprise_operator_api_requests_total")
}

/// Creates the cluster and the pools, and waits until they are ready on all nodes.
fn become_ready<'a>(cluster: &'a Cluster, fleet: &Fleet) -> RequestMeter<'a> {
    let (started, mut meter) = (Instant::now(), RequestMeter::begin(cluster));
    cluster.apply(&fleet.objects());
    wait_until("every node to have its claim", SETTLES_WITHIN, || {
        std::thread::sleep(PAUSE);
        meter.sample();
        let has_claim = |claims: &Value| claims.as_array().is_some_and(|claims| claims.len() == 1);
        fleet.all(cluster, |node| has_claim(&node.data["spec"]["claims"])).then_some(())
    });
    let claimed = started.elapsed();
    wait_until("an agent's pod to run on every node", SETTLES_WITHIN, || {
        std::thread::sleep(PAUSE);
        meter.sample();
        (ready_agents(cluster)? == SCALE.nodes).then_some(())
    });
    let running = started.elapsed();
    fleet.report_all(cluster);
    wait_until(
        "the cluster and all pools to be ready, and every node to report its ready agent",
        SETTLES_WITHIN,
        || {
            // Agents must keep reporting meanwhile.
            fleet.report_for(cluster, Duration::from_secs(5));
            meter.sample();
            (are_ready(cluster) && fleet.all_nodes_have(cluster, AGENT_READY)).then_some(())
        },
    );
    print_line(&format!(
        "all nodes had their claims after {claimed:.1?}, pods of agents ran after {running:.1?}, everything was ready after {:.1?}",
        started.elapsed()
    ));
    meter
}

/// Measures the operator's requests and writes while all devices get fuller.
fn while_devices_fill(cluster: &Cluster, fleet: &Fleet) -> Steady {
    // Pending work finishes first.
    fleet.report_for(cluster, STEADY / 3);
    let (started, before) = (Instant::now(), pages(cluster));
    fleet.report_for(cluster, STEADY);
    let (after, time) = (pages(cluster), started.elapsed().as_secs_f64());
    let per_second = |metric: &str| (total(&after, metric) - total(&before, metric)) / time;
    let mut writes = BTreeMap::<&str, f64>::new();
    for (page, sign) in [(&after, 1.0), (&before, -1.0)] {
        for (labels, count) in samples(page, "reprise_operator_writes_total") {
            *writes.entry(label(labels, "kind")).or_default() += sign * count;
        }
    }
    writes.retain(|_, count| *count > 0.0);
    print_line(&format!("written in {time:.1} s while devices got fuller: {writes:?}"));
    let refused = |page: &str| {
        let all = samples(page, "reprise_operator_api_requests_total");
        // The operator lists kinds that may not be served, to find out whether they are by now.
        let refused =
            |labels: &str| !label(labels, "code").starts_with('2') && label(labels, "verb") != "list";
        all.filter(|(labels, _)| refused(labels)).map(|(_, count)| count).sum::<f64>()
    };
    assert_eq!(refused(&after), refused(&before), "no request fails while only numbers change");
    Steady {
        requests: per_second("reprise_operator_api_requests_total"),
        writes: per_second("reprise_operator_writes_total"),
    }
}

fn cordon_all<'a>(cluster: &'a Cluster, fleet: &Fleet) -> RequestMeter<'a> {
    let (started, mut meter) = (Instant::now(), RequestMeter::begin(cluster));
    for pool in 0..SCALE.pools {
        let (name, patch) = (pool_name(pool), r#"--patch={"spec":{"mode":"Cordoned"}}"#);
        cluster.kubectl(&["patch", "ssdpool", &name, "--type=merge", patch]);
    }
    wait_until("every node to be cordoned", SETTLES_WITHIN, || {
        std::thread::sleep(PAUSE);
        meter.sample();
        fleet.all(cluster, |node| node.data["spec"]["mode"] == "Cordoned").then_some(())
    });
    print_line(&format!("all nodes were cordoned after {:.1?}", started.elapsed()));
    // Statuses and events follow later.
    std::thread::sleep(STEADY / 3);
    meter.sample();
    meter
}

fn assert_requests(registration: &RequestMeter<'_>, steady: &Steady, cordoned: &RequestMeter<'_>) {
    print_line(&format!(
        "requests to the API server: {:.1} per node until they were ready, at most {:.0} per second; {:.2} per second while devices got fuller; \
         {:.1} per node until they were cordoned, at most {:.0} per second",
        registration.per_node(),
        registration.peak,
        steady.requests,
        cordoned.per_node(),
        cordoned.peak,
    ));
    for peak in [registration.peak, cordoned.peak] {
        assert!(peak <= REQUESTS_A_SECOND_MAX, "{peak} per second");
    }
    for (per_node, most) in
        [(registration.per_node(), REQUESTS_A_NODE_MAX), (cordoned.per_node(), REQUESTS_A_CORDON_MAX)]
    {
        assert!((1.0..=most).contains(&per_node), "{per_node} per node");
    }
    let rest = steady.requests - steady.writes;
    assert!(rest <= RESTING_MAX, "{rest} per second in addition to {} writes", steady.writes);
}

fn assert_bounds(cluster: &Cluster, release: Release<'_>, steady: &Steady) {
    let writes = steady.writes;
    let p99 = quantiles(&pages(cluster), 0.99);
    let mib = release.peak_bytes(&release.pods(Component::Operator)) >> 20;
    let largest = largest_object(cluster) >> 10;
    print_line(&format!(
        "reconcile p99 at most {p99:?} s, memory {mib} MiB, largest object {largest} KiB, {writes:.2} writes per second while devices got fuller"
    ));
    assert!(KINDS.iter().all(|kind| p99.contains_key(*kind)), "{p99:?}");
    assert!(p99.values().all(|seconds| *seconds <= RECONCILE_SECONDS_MAX), "{p99:?} s");
    assert!(mib <= MEMORY_MIB_MAX, "{mib} MiB");
    assert!(largest <= OBJECT_KIB_MAX, "{largest} KiB");
    // Each pool and the cluster report new numbers at most every 10 s, and at least once in this time.
    let reporting = (SCALE.pools + 1) as f64;
    assert!(writes <= reporting / 10.0 + 1.0, "{writes} per second");
    assert!(writes >= reporting / STEADY.as_secs_f64(), "{writes} per second: no new numbers were written");
}

/// Returns the number of ready pods of agents; `None` before the DaemonSet exists.
fn ready_agents(cluster: &Cluster) -> Option<usize> {
    let name = format!("{CLUSTER}-agent");
    let path = "--output=jsonpath={.status.numberReady}";
    let number = cluster.try_kubectl(&["--namespace", CLUSTER, "get", "daemonset", &name, path]).ok()?;
    number.trim().parse().ok()
}

/// Returns whether the cluster and all its pools are ready.
fn are_ready(cluster: &Cluster) -> bool {
    let is_ready = |object: &Value| {
        let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
        conditions.into_iter().any(|one| one["type"] == "Ready" && one["status"] == "True")
    };
    let (pools, clusters) = (objects(cluster, "ssdpools"), objects(cluster, "kvcacheclusters"));
    pools.len() == SCALE.pools && pools.iter().chain(&clusters).all(is_ready)
}

/// Returns all objects of a kind of Reprise.
fn objects(cluster: &Cluster, plural: &str) -> Vec<Value> {
    let kind = format!("{plural}.reprise.dev");
    let json = cluster.kubectl(&["get", &kind, "--all-namespaces", "--output=json"]);
    let mut list: Value = serde_json::from_str(&json).expect("kubectl prints JSON");
    match list["items"].take() {
        Value::Array(items) => items,
        other => panic!("a list has items: {other}"),
    }
}

/// Returns the size of the largest object of Reprise, in bytes of JSON.
fn largest_object(cluster: &Cluster) -> usize {
    let all = ["kvcacheclusters", "ssdpools", "cachenodes"].map(|plural| objects(cluster, plural));
    let bytes = |object: &Value| object.to_string().len();
    all.iter().flatten().map(bytes).max().expect("objects exist")
}

/// Issues a certificate that the operator's admin port admits, and returns its folder.
fn scraper(cluster: &Cluster) -> PathBuf {
    let secret = ["get", "secret", "reprise-operator-admin", "--output=json"];
    let secret = cluster.kubectl(&[&["--namespace", NAMESPACE], &secret[..]].concat());
    let secret: Value = serde_json::from_str(&secret).expect("JSON");
    let text = |entry: &str| {
        let bytes: ByteString = serde_json::from_value(secret["data"][entry].clone()).expect("an entry");
        String::from_utf8(bytes.0).expect("PEM")
    };
    let authority = Authority::load(&text("tls.crt"), &text("tls.key")).expect("an authority");
    let identity = Identity::new(&format!("reprise-operator.{NAMESPACE}"), Role::Console);
    let issued = authority.issue(&identity.expect("valid names"), CERTIFICATE_VALID).expect("a valid period");
    let folder = cluster.folder().join("scraper");
    std::fs::create_dir_all(&folder).expect("the folder is writable");
    issued.into_files(authority.certificate()).write(&folder).expect("the folder is writable");
    folder
}

/// Returns the metrics of all replicas of the operator.
fn pages(cluster: &Cluster) -> String {
    let addresses = cluster.kubectl(&[
        "--namespace",
        NAMESPACE,
        "get",
        "pods",
        "--selector=app.kubernetes.io/name=reprise-operator",
        "--output=jsonpath={range .items[*]}{.status.podIP}{\"\\n\"}{end}",
    ]);
    let folder = scraper(cluster);
    let page = |address: &str| {
        let admin = Admin::at(&format!("{address}:{ADMIN_PORT}"));
        let admin = admin.with_certificates(folder.clone(), Expected::Role(Role::Operator));
        let (code, page) = admin.get("/metrics").expect("the operator responds");
        assert_eq!(code, 200, "{page}");
        page
    };
    addresses.lines().filter(|address| !address.is_empty()).map(page).collect()
}

/// Returns for each kind the upper bound of the bucket that contains this quantile of the reconcile times,
/// over all replicas.
fn quantiles(page: &str, share: f64) -> BTreeMap<String, f64> {
    let mut kinds: BTreeMap<String, Buckets> = BTreeMap::new();
    for (labels, count) in samples(page, "reprise_operator_reconcile_seconds_bucket") {
        add_bucket(kinds.entry(label(labels, "kind").to_owned()).or_default(), labels, count);
    }
    kinds
        .into_iter()
        .map(|(kind, buckets)| (kind, quantile(buckets, share).expect("a reconcile was counted")))
        .collect()
}

/// Returns the value of a label.
fn label<'a>(labels: &'a str, name: &str) -> &'a str {
    metrics::label(labels, name).expect("the metric has this label")
}
