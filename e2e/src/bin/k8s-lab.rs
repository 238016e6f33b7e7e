//! A Kubernetes cluster for a person: `k8s-lab [NODES]` starts one, says how to look around, and stays until it is interrupted.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use reprise_e2e::host::seen_from_outside;
use reprise_e2e::kubernetes::{Cluster, cluster};
use tokio::signal::unix::{SignalKind, signal};

/// Without an argument.
const NODES: u8 = 2;

fn main() -> Result<()> {
    let nodes = match std::env::args().nth(1) {
        None => NODES,
        Some(text) => text.parse().with_context(|| format!("how many nodes is '{text}'?"))?,
    };
    cluster::enter().map_err(|words| anyhow!(words))?;
    let cluster = Cluster::start(nodes);
    let mut out = std::io::stdout();
    let folder = cluster.folder();
    let tools = lay_down_tools(&cluster)?;
    writeln!(out, "{}", cluster.kubectl(&["get", "nodes", "--output=wide"]))?;
    writeln!(out, "Files: {}", folder.display())?;
    writeln!(out, "The cluster stays until this program is interrupted. From another terminal:")?;
    for (tool, what) in tools {
        writeln!(out, "  {:<60} # {what}", folder.join(tool).display())?;
    }
    out.flush()?;
    let block = cluster.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        Ok::<(), std::io::Error>(())
    });
    block.context("waiting for a signal")?;
    writeln!(out, "ending the cluster")?;
    Ok(())
}

/// Writes programs by which what is outside of the cluster's namespaces looks into them.
fn lay_down_tools(cluster: &Cluster) -> Result<Vec<(String, String)>> {
    let process = seen_from_outside().context("a cluster is in namespaces of its own")?;
    let enter = format!("exec nsenter --target {process} --net --mount --wd=\"$PWD\"");
    let config = cluster.kubeconfig();
    let mut tools = Vec::new();
    for (name, path) in cluster.tools() {
        let text = format!("KUBECONFIG={} {enter} {} \"$@\"", config.display(), path.display());
        write_tool(&cluster.folder().join(name), &text)?;
        tools.push((name.to_owned(), format!("{name} of this cluster")));
    }
    for node in cluster.nodes() {
        let enter = node.enter_from(process);
        let name = format!("on-{}", node.name());
        write_tool(&cluster.folder().join(&name), &format!("exec {enter} \"${{@:-bash}}\""))?;
        tools.push((
            name,
            format!("a command on {}, or a shell: its files, network and processes", node.name()),
        ));
    }
    Ok(tools)
}

fn write_tool(file: &Path, line: &str) -> Result<()> {
    fs::write(file, format!("#!/usr/bin/env bash\n{line}\n"))?;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
