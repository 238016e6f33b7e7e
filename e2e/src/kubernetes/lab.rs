//! A cluster for a person: how to look into its namespaces from another terminal, and staying up until somebody interrupts.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};

use super::cluster::Cluster;
use crate::host::seen_from_outside;

/// Says where the cluster is and how it is looked at.
///
/// # Errors
/// Files cannot be written, or nobody reads.
pub fn introduce(cluster: &Cluster, out: &mut impl Write) -> Result<()> {
    let tools = lay_down_tools(cluster)?;
    let folder = cluster.folder();
    writeln!(out, "{}", cluster.kubectl(&["get", "nodes", "--output=wide"]))?;
    writeln!(out, "Files: {}", folder.display())?;
    writeln!(out, "The cluster stays until this program is interrupted. From another terminal:")?;
    for (tool, what) in tools {
        writeln!(out, "  {:<60} # {what}", folder.join(tool).display())?;
    }
    Ok(out.flush()?)
}

/// Waits until the program is interrupted; meanwhile does something every so often.
///
/// # Errors
/// Signals cannot be waited for, or what is done fails.
pub fn until_interrupted(
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

/// Writes programs by which what is outside of the cluster's namespaces looks into them: their names, and what each is.
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
