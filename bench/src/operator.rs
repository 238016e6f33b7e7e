//! Operator with many nodes: duration of reconciles, memory, and number of writes.
//!
//! etcd, API server and operator are real ([`server`]); this process simulates the nodes' agents ([`fleet`]),
//! which apply their `CacheNode`s immediately and report as often as agents. No kubelet or Kubernetes
//! controller runs.
//!
//! Steps: create nodes, pools and a cluster, and wait until they are ready; for a while, only agents report;
//! change the mode of every pool. The operator's own histogram has all reconciles of the run.

mod fleet;
pub(crate) mod server;

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use fleet::Fleet;
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::{Figure, Target};
use reprise_testkit::cluster::{Cluster, ControlPlanes};
use reprise_testkit::http;
use server::{ApiServer, Operator};

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

pub(crate) fn run(scale: Scale, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let Scale { nodes, pools } = scale;
    ensure!((1..=NODES_MAX).contains(&nodes), "invalid --nodes {nodes}: expected 1 to {NODES_MAX}");
    ensure!(
        (1..=POOLS_MAX.min(nodes)).contains(&pools),
        "invalid --pools {pools}: expected 1 to {}",
        POOLS_MAX.min(nodes)
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    // The API server uses the same etcd, with another prefix.
    let cluster = Cluster::start_controlplane(&settings.directory, ControlPlanes::Etcd { members: 1 })?;
    let etcd = cluster.file().etcd.context("the cluster has no etcd")?;
    let folder = cluster.path().join("operator");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let api = ApiServer::start(&folder, &etcd, &runtime)?;
    server::apply_definitions(&api)?;
    let fleet = Fleet::new(api.client(&runtime)?, scale, etcd);
    runtime.block_on(fleet.create_nodes())?;
    let operator = Operator::start(&folder, &api)?;

    let began = Instant::now();
    runtime.block_on(fleet.create_cluster())?;
    runtime.block_on(fleet.wait_until("every node has a claim", PATIENCE, Fleet::is_wanted_everywhere))?;
    let wanted = began.elapsed();
    runtime.block_on(fleet.report_all())?;
    runtime.block_on(fleet.wait_until("every pool is ready", PATIENCE, Fleet::is_ready))?;
    let ready = began.elapsed();

    // Running reconciles end first.
    runtime.block_on(fleet.report_for(STEADY / 3))?;
    let before = writes(&operator)?;
    runtime.block_on(fleet.report_for(STEADY))?;
    let steady = (writes(&operator)? - before) / STEADY.as_secs_f64();

    let began = Instant::now();
    runtime.block_on(fleet.cordon_pools())?;
    runtime.block_on(fleet.wait_until("every node is cordoned", PATIENCE, Fleet::is_cordoned))?;
    let changed = began.elapsed();
    runtime.block_on(fleet.report_all())?;

    let page = operator.metrics()?;
    let mib = operator.peak_bytes()? as f64 / f64::from(1 << 20);
    let largest = runtime.block_on(fleet.largest_object_bytes())? as f64 / 1024.0;
    Ok(vec![
        Figure::absolute(
            "operator.reconcile_p99",
            quantile(&page, 0.99)?,
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
    let page = operator.metrics()?;
    Ok(samples(&page, "reprise_operator_writes_total").map(|(_, value)| value).sum())
}

/// Returns the upper bound of the histogram bucket with this quantile of all reconciles.
fn quantile(page: &str, share: f64) -> anyhow::Result<f64> {
    let mut buckets: Vec<(f64, f64)> = Vec::new();
    for (labels, count) in samples(page, "reprise_operator_reconcile_seconds_bucket") {
        let bound = labels
            .split("le=\"")
            .nth(1)
            .and_then(|rest| rest.split('"').next())
            .context("a bucket has no bound")?;
        let bound = if bound == "+Inf" {
            f64::INFINITY
        } else {
            bound.parse().context("invalid bound of a bucket")?
        };
        match buckets.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, sum)) => *sum += count,
            None => buckets.push((bound, count)),
        }
    }
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    let all = buckets.last().context("the operator's metrics have no histogram of reconciles")?.1;
    ensure!(all > 0.0, "the operator's histogram has no reconciles");
    let holds = buckets.iter().find(|(_, below)| *below >= share * all);
    Ok(holds.context("the histogram has no last bucket")?.0)
}

/// Returns the samples of a metric, each with its labels, from a page in Prometheus' text format.
fn samples<'a>(page: &'a str, metric: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
    page.lines().filter_map(move |line| {
        let rest = line.strip_prefix(metric)?;
        let (labels, value) = rest.rsplit_once(' ')?;
        (labels.is_empty() || labels.starts_with('{')).then_some(())?;
        Some((labels, value.parse().ok()?))
    })
}

impl Operator {
    fn metrics(&self) -> anyhow::Result<String> {
        http::get(self.admin(), "/metrics").context("reading the operator's metrics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_bound_of_its_bucket_over_all_kinds() {
        let page = "\
            reprise_operator_reconcile_seconds_sum{kind=\"a\"} 1.0\n\
            reprise_operator_reconcile_seconds_bucket{le=\"0.5\",kind=\"a\"} 98\n\
            reprise_operator_reconcile_seconds_bucket{le=\"1.0\",kind=\"a\"} 98\n\
            reprise_operator_reconcile_seconds_bucket{le=\"+Inf\",kind=\"a\"} 98\n\
            reprise_operator_reconcile_seconds_bucket{le=\"0.5\",kind=\"b\"} 0\n\
            reprise_operator_reconcile_seconds_bucket{le=\"1.0\",kind=\"b\"} 2\n\
            reprise_operator_reconcile_seconds_bucket{le=\"+Inf\",kind=\"b\"} 2\n";
        assert_eq!(quantile(page, 0.98).expect("a histogram"), 0.5);
        assert_eq!(quantile(page, 0.99).expect("a histogram"), 1.0);
        assert!(quantile("", 0.99).is_err());
    }

    #[test]
    fn samples_of_other_metrics_are_not_taken() {
        let page = "a_total{x=\"1\"} 2\na_total_more 5\na_total 3\n";
        assert_eq!(samples(page, "a_total").map(|(_, value)| value).sum::<f64>(), 5.0);
    }
}
