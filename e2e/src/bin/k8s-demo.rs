//! Reprise on Kubernetes, for a person: a cluster of two nodes, the operator by its chart, the chart's examples applied, two pods that are
//! engines. Says what there is and how blocks are hit, and stays until it is interrupted.
//!
//! The examples ask for more than two nodes of one machine have, and for nodes of other names; what is changed is said. The example of an engine's
//! pod needs an image of vLLM, so pods that do to the cache what an engine does (`reprise check`) take its place.

use std::io::{Stdout, Write};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use reprise_e2e::kubernetes::release::{NAMESPACE, PODS_WITHIN, RELEASE, example, import_images};
use reprise_e2e::kubernetes::requests::Served;
use reprise_e2e::kubernetes::{Cluster, Workers, cluster, lab, programs};
use reprise_e2e::{tree, wait_until};

/// Nodes of the demonstration.
const NODES: u8 = 2;

/// Where the example's cluster is, and whom its agents let connect.
const WORKERS: Workers<'static> = Workers { namespace: "inference", user: 1000 };

/// Its level lets agents mount directories of their nodes.
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

/// Examples, and what is changed in each: what this machine does not have, and what is there instead.
const EXAMPLES: [(&str, &str, &str); 5] = [
    ("resources/pool.yaml", "size: 500Gi", "size: 1Gi"),
    ("resources/cluster.yaml", "dram: 16Gi", "dram: 256Mi"),
    ("resources/tenant.yaml", "limit: 200Gi", "limit: 512Mi"),
    ("resources/profile.yaml", "soak: 30m", "soak: 10s"),
    ("resources/queues.yaml", "nodeName: worker-1", "nodeName: node1"),
];

/// What nodes of this machine do not have, in case somebody wonders.
const WITHOUT: &str = "these nodes have neither GPUs nor NVMe controllers: the profile has no node to go to, and the queues wait (describe gqa -A says for what)";

/// Between two lines about hits.
const LINE_EVERY: Duration = Duration::from_secs(10);

fn main() -> Result<()> {
    programs::images().and_then(|_| cluster::enter()).map_err(|words| anyhow!(words))?;
    let mut out = std::io::stdout();
    let cluster = Cluster::start(NODES);
    import_images(&cluster);
    install(&cluster, &mut out)?;
    WORKERS.start(&cluster);
    say(&mut out, &cluster.kubectl(&["get", "reprise", "--all-namespaces"]))?;
    say(&mut out, &cluster.kubectl(&["get", "pods", "--all-namespaces", "--output=wide"]))?;
    lab::introduce(&cluster, &mut out)?;
    say(
        &mut out,
        "Try, with its kubectl: get reprise -A; describe kvcc chat -n inference; get cnode -o yaml; logs -f worker-0 -n inference;",
    )?;
    say(
        &mut out,
        "  delete pod -n inference -l app.kubernetes.io/component=agent; cordon node2; get events -A --watch",
    )?;
    let mut moment = WORKERS.now(&cluster);
    lab::until_interrupted(&cluster, LINE_EVERY, || {
        let since = WORKERS.since(&cluster, &moment);
        moment = WORKERS.now(&cluster);
        for (index, said) in since.iter().enumerate() {
            say(&mut out, &line(index, said.as_ref()))?;
        }
        Ok(())
    })?;
    say(&mut out, "ending the cluster")
}

/// The operator, by its chart without a cluster; then the examples, as `kubectl apply` takes them.
fn install(cluster: &Cluster, out: &mut Stdout) -> Result<()> {
    cluster.apply(NAMESPACES);
    let chart = tree().join("charts/reprise").display().to_string();
    let started = Instant::now();
    let installed = cluster.helm(&["install", RELEASE, &chart, "--namespace", NAMESPACE, "--wait"]);
    say(out, &installed.map_err(|said| anyhow!("helm install: {said}"))?)?;
    cluster.kubectl(&["label", "nodes", "--all", "reprise.dev/scratch=true"]);
    for (file, of_example, here) in EXAMPLES {
        let text = example(file);
        if !text.contains(of_example) {
            return Err(anyhow!("{file} has no '{of_example}' any more"));
        }
        say(out, &format!("applying {file} with '{here}' for '{of_example}'"))?;
        cluster.apply(&text.replace(of_example, here));
    }
    say(out, WITHOUT)?;
    for object in ["kvcc/chat", "ssdp/scratch", "ctenant/team-a"] {
        wait_until(&format!("the example's {object} to be ready"), PODS_WITHIN, || {
            std::thread::sleep(Duration::from_millis(500));
            let wait = ["wait", "-n", "inference", object, "--for=condition=Ready", "--timeout=10s"];
            cluster.try_kubectl(&wait).ok()
        });
    }
    say(
        out,
        &format!(
            "operator, members, etcd, agents, pool and tenant were ready {:.1?} after helm install",
            started.elapsed()
        ),
    )
}

/// Requests of an engine, by where their blocks came from.
fn line(index: usize, served: Option<&Served>) -> String {
    let Some(served) = served else { return format!("worker-{index}: started again") };
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

fn say(out: &mut Stdout, text: &str) -> Result<()> {
    writeln!(out, "{}", text.trim_end())?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_example_but_the_engines_is_applied_and_has_what_is_changed() {
        for (file, of_example, here) in EXAMPLES {
            let text = example(file);
            assert!(text.contains(of_example), "{file}: {of_example}");
            assert_ne!(of_example, here);
        }
        let folder = std::fs::read_dir(tree().join("charts/reprise/examples/resources")).expect("a folder");
        let there = folder.map(|entry| entry.expect("readable").file_name().into_string().expect("a text"));
        let there: BTreeSet<String> = there.map(|name| format!("resources/{name}")).collect();
        let applied = EXAMPLES.iter().map(|(file, ..)| (*file).to_owned());
        let all: BTreeSet<String> = applied.chain(["resources/engine.yaml".to_owned()]).collect();
        assert_eq!(there, all);
    }
}
