//! The first process of a node of a test cluster: `reprise-e2e-node PLAN`. See `reprise_e2e::kubernetes::machine`.

use std::path::Path;

use anyhow::{Context, bail};
use reprise_e2e::kubernetes::machine;

fn main() -> anyhow::Result<()> {
    let Some(plan) = std::env::args_os().nth(1) else { bail!("which plan?") };
    if std::process::id() != 1 {
        bail!("a node is the first process of namespaces of its own: tests start it");
    }
    machine::run(Path::new(&plan)).context("this node")
}
