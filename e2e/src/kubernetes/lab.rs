//! A cluster for manual use: scripts to enter its namespaces from another terminal, and a wait for an
//! interrupt.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};

use super::cluster::Cluster;
use crate::host::outer_pid;

/// Prints where the cluster is and how to use it.
///
/// # Errors
/// Files or output cannot be written.
pub fn print_instructions(cluster: &Cluster, out: &mut impl Write) -> Result<()> {
    let tools = write_tools(cluster)?;
    let folder = cluster.folder();
    writeln!(out, "{}", cluster.kubectl(&["get", "nodes", "--output=wide"]))?;
    writeln!(out, "Files: {}", folder.display())?;
    writeln!(out, "The cluster stays until this program is interrupted. From another terminal:")?;
    for (tool, what) in tools {
        writeln!(out, "  {:<60} # {what}", folder.join(tool).display())?;
    }
    Ok(out.flush()?)
}

/// Waits until the program is interrupted, and runs `meanwhile` at an interval.
///
/// # Errors
/// Signals cannot be received, or `meanwhile` fails.
pub fn run_until_interrupted(
    cluster: &Cluster,
    every: Duration,
    mut meanwhile: impl FnMut() -> Result<()>,
) -> Result<()> {
    cluster.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).context("waiting for a signal")?;
        let mut terminate = signal(SignalKind::terminate()).context("waiting for a signal")?;
        loop {
            tokio::select! {
                _ = interrupt.recv() => return Ok(()),
                _ = terminate.recv() => return Ok(()),
                () = tokio::time::sleep(every) => meanwhile()?,
            }
        }
    })
}

/// Writes scripts that enter the cluster's namespaces from outside. Returns their names and descriptions.
fn write_tools(cluster: &Cluster) -> Result<Vec<(String, String)>> {
    let process = outer_pid().context("a cluster has its own namespaces")?;
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
            format!("run a command or a shell on {}, with its files, network and processes", node.name()),
        ));
    }
    Ok(tools)
}

fn write_tool(file: &Path, line: &str) -> Result<()> {
    fs::write(file, format!("#!/usr/bin/env bash\n{line}\n"))?;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
