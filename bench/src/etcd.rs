//! Size of etcd's database: it must not grow with the number of blocks.
//!
//! The benchmark runs a real etcd, one member, and simulated nodes that announce over gRPC
//! ([`reprise_testkit::bench::directory_service`]). Sizes come from etcd's metrics: the database file, and the part of it in use.

use anyhow::{Context, ensure};

use reprise_testkit::bench::Settings;
use reprise_testkit::bench::directory_service::{Inventories, announce};
use reprise_testkit::bench::report::{Figure, Target};
use reprise_testkit::cluster::{Cluster, ControlPlanes};
use reprise_testkit::http;

/// Number of blocks in the first measurement.
const FEW: usize = 1000;

/// Largest allowed database, for any number of blocks.
const DATA_MIB_MAX: f64 = 2.0;

/// Names of etcd's metrics.
const FILE: &str = "etcd_mvcc_db_total_size_in_bytes";
const IN_USE: &str = "etcd_mvcc_db_total_size_in_use_in_bytes";

pub(crate) fn run(entries: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let control = ControlPlanes::Etcd { members: 1 };
    let cluster = Cluster::start_controlplane(&settings.directory, control)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let mut figures = Vec::new();
    for entries in [FEW, entries] {
        // Dropped, with its heartbeats, before the nodes register again and announce more.
        announce(&runtime, &cluster, &Inventories::new(entries))?;
        figures.extend(sizes(&cluster, entries)?);
    }
    Ok(figures)
}

/// Returns figures with the database sizes of a cluster's etcd at this number of blocks.
pub(crate) fn sizes(cluster: &Cluster, entries: usize) -> anyhow::Result<Vec<Figure>> {
    let metrics = cluster.etcd_metrics().context("the cluster has no etcd")?;
    let page = http::get(&metrics, "/metrics").context("reading etcd's metrics")?;
    let figure = |(metric, of)| {
        let mib = value(&page, metric)? / f64::from(1 << 20);
        let name = format!("etcd.{of}_at_{entries}_blocks");
        Ok(Figure::absolute(name, mib, "MiB", Target::AtMost(DATA_MIB_MAX)))
    };
    [(FILE, "database"), (IN_USE, "in_use")].into_iter().map(figure).collect()
}

/// Returns a metric without labels from a page in the Prometheus text format.
fn value(page: &str, metric: &str) -> anyhow::Result<f64> {
    let line = page.lines().find_map(|line| line.strip_prefix(metric)?.strip_prefix(' '));
    let value: f64 = line.with_context(|| format!("etcd does not export {metric}"))?.trim().parse()?;
    ensure!(value > 0.0, "{metric} is {value}");
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_metric_by_its_full_name() {
        let page = "# HELP a_b text\na_b_c 5\na_b 2.048e+04\n";
        assert_eq!(value(page, "a_b").expect("the metric exists"), 20_480.0);
        assert!(value(page, "a").is_err());
    }
}
