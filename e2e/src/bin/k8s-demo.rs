//! Reprise on Kubernetes, for manual use: starts a cluster of two nodes, installs the operator by its chart,
//! applies the chart's examples and runs two engine pods. Prints the state and the hits, and runs until it is
//! interrupted.
//!
//! The examples request more than two nodes of one machine have, and name other nodes; each change to an
//! example is printed. The example of an engine's pod needs an image of vLLM, so pods that use the cache as
//! an engine does (`reprise check`) replace it.

use std::io::{Stdout, Write};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use reprise_e2e::kubernetes::check_pods::RequestCounters;
use reprise_e2e::kubernetes::release::{NAMESPACE, PODS_WITHIN, RELEASE, example, import_images};
use reprise_e2e::kubernetes::{Cluster, Workers, cluster, lab, programs};
use reprise_e2e::{tree, wait_until};

/// Nodes of the demonstration cluster.
const NODES: u8 = 2;

/// Namespace of the example's cluster, and a user whose sessions its agents accept.
const WORKERS: Workers<'static> = Workers::new("inference", 1000);

/// The `privileged` level lets agents mount directories of their nodes.
const NAMESPACES: &str = "
apiVersion: v1
kind: Namespace
metadata:
  name: inference
  labels: { pod-security.kubernetes.io/enforce: privileged }
---
apiVersion: v1
kind: Namespace
metadata:
  name: reprise
  labels: { pod-security.kubernetes.io/enforce: restricted }
";

/// For each example: its file, the text that does not fit this machine, and its replacement.
const EXAMPLES: [(&str, &str, &str); 5] = [
    ("resources/pool.yaml", "size: 500Gi", "size: 1Gi"),
    ("resources/cluster.yaml", "dram: 16Gi", "dram: 256Mi"),
    ("resources/tenant.yaml", "limit: 200Gi", "limit: 512Mi"),
    ("resources/profile.yaml", "soak: 30m", "soak: 10s"),
    ("resources/queues.yaml", "nodeName: worker-1", "nodeName: node1"),
];

/// Explains why the slack profile and the queue allocations stay pending.
const WITHOUT: &str = "these nodes have neither GPUs nor NVMe controllers: no node matches the profile, and the queue allocations stay pending (describe gqa -A shows the reason)";

/// Interval between two lines about hits.
const LINE_EVERY: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    programs::images().and_then(|_| cluster::enter()).map_err(|words| anyhow!(words))?;
    let mut out = std::io::stdout();
    let cluster = Cluster::start(NODES);
    import_images(&cluster);
    install(&cluster, &mut out)?;
    WORKERS.start(&cluster);
    print_line(&mut out, &cluster.kubectl(&["get", "reprise", "--all-namespaces"]))?;
    print_line(&mut out, &cluster.kubectl(&["get", "pods", "--all-namespaces", "--output=wide"]))?;
    lab::print_instructions(&cluster, &mut out)?;
    print_line(
        &mut out,
        "Try, with its kubectl: get reprise -A; describe kvcc chat -n inference; get cnode -o yaml; logs -f worker-0 -n inference;",
    )?;
    print_line(
        &mut out,
        "  delete pod -n inference -l app.kubernetes.io/component=agent; cordon node2; get events -A --watch",
    )?;
    let mut moment = WORKERS.now(&cluster);
    lab::run_until_interrupted(&cluster, LINE_EVERY, || {
        let since = WORKERS.since(&cluster, &moment);
        moment = WORKERS.now(&cluster);
        for (index, counters) in since.iter().enumerate() {
            print_line(&mut out, &line(index, counters.as_ref()))?;
        }
        Ok(())
    })?;
    print_line(&mut out, "stopping the cluster")
}

/// Installs the operator by its chart, without a cluster; then applies the examples as `kubectl apply` does.
fn install(cluster: &Cluster, out: &mut Stdout) -> Result<()> {
    cluster.apply(NAMESPACES);
    let chart = tree().join("charts/reprise").display().to_string();
    let started = Instant::now();
    let clusters = r#"--set-json=rbac.clusters=[{"namespace":"inference","name":"chat"}]"#;
    let installed = cluster.helm(&["install", RELEASE, &chart, "--namespace", NAMESPACE, clusters, "--wait"]);
    print_line(out, &installed.map_err(|error| anyhow!("helm install: {error}"))?)?;
    cluster.kubectl(&["label", "nodes", "--all", "reprise.dev/scratch=true"]);
    for (file, of_example, here) in EXAMPLES {
        let text = example(file);
        if !text.contains(of_example) {
            return Err(anyhow!("{file} no longer contains '{of_example}'"));
        }
        print_line(out, &format!("applying {file} with '{here}' for '{of_example}'"))?;
        cluster.apply(&text.replace(of_example, here));
    }
    print_line(out, WITHOUT)?;
    for object in ["kvcc/chat", "ssdp/scratch", "ctenant/team-a"] {
        wait_until(&format!("the example's {object} to be ready"), PODS_WITHIN, || {
            let wait = ["wait", "-n", "inference", object, "--for=condition=Ready", "--timeout=10s"];
            cluster.try_kubectl(&wait).ok()
        });
    }
    print_line(
        out,
        &format!(
            "operator, members, etcd, agents, pool and tenant were ready {:.1?} after helm install",
            started.elapsed()
        ),
    )
}

/// Formats the requests of an engine by the source of their blocks.
fn line(index: usize, served: Option<&RequestCounters>) -> String {
    let Some(served) = served else { return format!("worker-{index}: restarted") };
    let hits: Vec<String> = served.hits.iter().map(|(source, count)| format!("{source} {count}")).collect();
    format!(
        "worker-{index}: {} requests, hits by tier: {}; computed {}, failed {}, wrong bytes {}; longest {} ms",
        served.requests,
        hits.join(", "),
        served.computed,
        served.failed,
        8 * served.wrong_words,
        served.longest_request_ms
    )
}

fn print_line(out: &mut Stdout, text: &str) -> Result<()> {
    writeln!(out, "{}", text.trim_end())?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn applies_every_example_except_the_engine_and_each_contains_the_replaced_text() {
        for (file, of_example, here) in EXAMPLES {
            let text = example(file);
            assert!(text.contains(of_example), "{file}: {of_example}");
            assert_ne!(of_example, here);
        }
        let folder = std::fs::read_dir(tree().join("charts/reprise/examples/resources")).expect("a folder");
        let existing =
            folder.map(|entry| entry.expect("readable").file_name().into_string().expect("a text"));
        let existing: BTreeSet<String> = existing.map(|name| format!("resources/{name}")).collect();
        let applied = EXAMPLES.iter().map(|(file, ..)| (*file).to_owned());
        let all: BTreeSet<String> = applied.chain(["resources/engine.yaml".to_owned()]).collect();
        assert_eq!(existing, all);
    }
}
