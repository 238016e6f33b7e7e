//! A Kubernetes cluster for a person: `k8s-lab [NODES]` starts one, says how to look around, and stays until it is interrupted.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use reprise_e2e::kubernetes::{Cluster, cluster, lab};

/// Without an argument.
const NODES: u8 = 2;

/// Nothing is done meanwhile.
const HOUR: Duration = Duration::from_secs(3600);

fn main() -> Result<()> {
    let nodes = match std::env::args().nth(1) {
        None => NODES,
        Some(text) => text.parse().with_context(|| format!("how many nodes is '{text}'?"))?,
    };
    cluster::enter().map_err(|words| anyhow!(words))?;
    let cluster = Cluster::start(nodes);
    let mut out = std::io::stdout();
    lab::introduce(&cluster, &mut out)?;
    lab::until_interrupted(&cluster, HOUR, || Ok(()))?;
    writeln!(out, "ending the cluster")?;
    Ok(())
}
