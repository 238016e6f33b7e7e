//! The init process of a node of a test cluster: `reprise-e2e-node PLAN`. See
//! `reprise_e2e::kubernetes::node_init`.

use std::path::Path;

use anyhow::{Context, bail};
use reprise_e2e::kubernetes::node_init;

fn main() -> anyhow::Result<()> {
    let Some(plan) = std::env::args_os().nth(1) else { bail!("missing argument: PLAN") };
    if std::process::id() != 1 {
        bail!("not process 1 of its own namespaces: only the tests start this program");
    }
    node_init::run(Path::new(&plan)).context("this node")
}
