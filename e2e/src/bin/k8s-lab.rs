//! Starts a Kubernetes cluster for manual use: `k8s-lab [NODES]`. Prints how to use it, and runs until it is
//! interrupted.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use reprise_e2e::kubernetes::{Cluster, cluster, lab};

/// Number of nodes without an argument.
const NODES: u8 = 2;

/// Interval of the idle loop, which does nothing.
const HOUR: Duration = Duration::from_secs(3600);

fn main() -> Result<()> {
    let nodes = match std::env::args().nth(1) {
        None => NODES,
        Some(text) => text.parse().with_context(|| format!("invalid number of nodes '{text}'"))?,
    };
    cluster::enter().map_err(|words| anyhow!(words))?;
    let cluster = Cluster::start(nodes);
    let mut out = std::io::stdout();
    lab::print_instructions(&cluster, &mut out)?;
    lab::run_until_interrupted(&cluster, HOUR, || Ok(()))?;
    writeln!(out, "stopping the cluster")?;
    Ok(())
}
