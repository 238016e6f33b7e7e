//! Operator with many nodes: duration of reconciles, memory, and number of writes.
//!
//! etcd, API server and operator are real, those of the end-to-end tests; this process simulates the nodes' agents
//! ([`fleet`]), which apply their `CacheNode`s immediately and report as often as agents. No kubelet or Kubernetes
//! controller runs, and the operator has all permissions.
//!
//! Steps: create nodes, pools and a cluster, and wait until they are ready; for a while, only agents report;
//! change the mode of every pool. The operator's own histogram has all reconciles of the run.

mod fleet;

use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use reprise_e2e::operator::StartedOperators;
use reprise_e2e::{ApiServer, Operator, OperatorFiles};
use reprise_testkit::bench::report::{Figure, Target};
use reprise_testkit::bench::{Settings, process_memory};
use reprise_testkit::cluster::cache_directory;
use reprise_testkit::metrics::{Buckets, add_bucket, quantile, samples, total};

use fleet::Fleet;

/// kube-apiserver binary that `make kubernetes` builds; the version equals the one in go.mod.
const API_SERVER: &str = "kube-apiserver-v1.36.3";

/// Goal for the 99th percentile of reconciles.
const RECONCILE_SECONDS_MAX: f64 = 1.0;

/// Goal for the operator's memory.
const MEMORY_MIB_MAX: f64 = 200.0;

/// Goal for the largest object: etcd's limit is 1.5 MiB, and every watcher receives it.
const OBJECT_KIB_MAX: f64 = 256.0;

/// Duration of the step with only reports of agents.
const STEADY: Duration = Duration::from_secs(30);

/// Time limit for the operator's reaction to a change.
const PATIENCE: Duration = Duration::from_secs(300);

/// Maximum nodes and pools, so that a typing error does not fill the machine.
const NODES_MAX: usize = 5000;
const POOLS_MAX: usize = 64;

/// Size of the fleet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    pub(crate) nodes: usize,
    pub(crate) pools: usize,
}

/// Returns the path of the API server's binary, which may not exist.
pub(crate) fn api_server() -> PathBuf {
    cache_directory().join("bin").join(API_SERVER)
}

pub(crate) fn run(scale: Scale, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let Scale { nodes, pools } = scale;
    ensure!((1..=NODES_MAX).contains(&nodes), "invalid --nodes {nodes}: expected 1 to {NODES_MAX}");
    ensure!(
        (1..=POOLS_MAX.min(nodes)).contains(&pools),
        "invalid --pools {pools}: expected 1 to {}",
        POOLS_MAX.min(nodes)
    );
    let folder = settings.directory.join("operator");
    remove(&folder)?;
    let mut api = ApiServer::start_in(&folder, Ipv4Addr::LOCALHOST);
    let files = OperatorFiles::new(&folder, &api, ("bench", "default"), StartedOperators::default());
    apply_definitions(&files)?;
    let etcd = api.etcd().endpoint();
    let fleet = Fleet::new(api.admin(), scale, etcd);
    api.block_on(fleet.create_nodes())?;
    let operator = files.start().map_err(|error| anyhow!("the operator does not start: {}", error.text))?;
    let figures = measure(scale, &api, &fleet, &operator)?;
    drop((operator, api));
    remove(&folder)?;
    Ok(figures)
}

fn measure(
    Scale { pools, .. }: Scale,
    api: &ApiServer,
    fleet: &Fleet,
    operator: &Operator,
) -> anyhow::Result<Vec<Figure>> {
    let began = Instant::now();
    api.block_on(fleet.create_cluster())?;
    api.block_on(fleet.wait_until("every node has a claim", PATIENCE, Fleet::is_wanted_everywhere))?;
    let wanted = began.elapsed();
    api.block_on(fleet.report_all());
    api.block_on(fleet.wait_until("every pool is ready", PATIENCE, Fleet::is_ready))?;
    let ready = began.elapsed();

    // Running reconciles end first.
    api.block_on(fleet.report_for(STEADY / 3));
    let before = writes(operator)?;
    api.block_on(fleet.report_for(STEADY));
    let steady = (writes(operator)? - before) / STEADY.as_secs_f64();

    let began = Instant::now();
    api.block_on(fleet.cordon_pools())?;
    api.block_on(fleet.wait_until("every node is cordoned", PATIENCE, Fleet::is_cordoned))?;
    let changed = began.elapsed();
    api.block_on(fleet.report_all());

    let page = metrics(operator)?;
    let mib = process_memory::tree_peak_bytes(operator.id())? as f64 / f64::from(1 << 20);
    let largest = api.block_on(fleet.largest_object_bytes())? as f64 / 1024.0;
    Ok(vec![
        Figure::absolute(
            "operator.reconcile_p99",
            reconcile_quantile(&page, 0.99)?,
            "s",
            Target::AtMost(RECONCILE_SECONDS_MAX),
        ),
        Figure::absolute("operator.memory_peak", mib, "MiB", Target::AtMost(MEMORY_MIB_MAX)),
        Figure::absolute("operator.largest_object", largest, "KiB", Target::AtMost(OBJECT_KIB_MAX)),
        Figure::absolute("operator.all_nodes_wanted", wanted.as_secs_f64(), "s", Target::None),
        Figure::absolute("operator.all_pools_ready", ready.as_secs_f64(), "s", Target::None),
        Figure::absolute("operator.all_nodes_changed", changed.as_secs_f64(), "s", Target::None),
        // Each pool and the cluster publish new numbers at most every 10 s.
        Figure::absolute(
            "operator.writes_while_nothing_changes",
            steady,
            "1/s",
            Target::AtMost((pools + 1) as f64 / 10.0 + 1.0),
        ),
    ])
}

/// Returns the number of writes of the operator so far.
fn writes(operator: &Operator) -> anyhow::Result<f64> {
    Ok(total(&metrics(operator)?, "reprise_operator_writes_total"))
}

/// Returns the upper bound of the histogram bucket with this quantile of all reconciles.
fn reconcile_quantile(page: &str, share: f64) -> anyhow::Result<f64> {
    let mut buckets = Buckets::new();
    for (labels, count) in samples(page, "reprise_operator_reconcile_seconds_bucket") {
        add_bucket(&mut buckets, labels, count);
    }
    quantile(buckets, share).context("the operator's metrics have no reconciles")
}

fn metrics(operator: &Operator) -> anyhow::Result<String> {
    let (code, page) = operator.admin().get("/metrics").context("reading the operator's metrics")?;
    ensure!(code == 200, "the operator's metrics: HTTP status {code}");
    Ok(page)
}

/// Applies the CustomResourceDefinitions with the operator's program.
fn apply_definitions(files: &OperatorFiles) -> anyhow::Result<()> {
    let output = files.command(&["apply-definitions"]).output().context("cannot run reprise-operator")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cannot apply the definitions: {errors}");
    Ok(())
}

/// Removes the files of an earlier run, or of this one.
fn remove(folder: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_has_the_version_that_the_script_builds() {
        let module = reprise_e2e::tree().join("e2e/kubernetes/go.mod");
        let module = std::fs::read_to_string(module).expect("the file exists");
        let version = API_SERVER.strip_prefix("kube-apiserver-").expect("the name has this prefix");
        assert!(module.contains(&format!("require k8s.io/kubernetes {version}\n")), "{version}");
    }
}
