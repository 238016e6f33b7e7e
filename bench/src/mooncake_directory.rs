//! A control plane member compared with Mooncake's master: look-ups of single keys and of batches, one call after
//! another, with both in turn.

use std::cell::RefCell;

use reprise_testkit::bench::Settings;
use reprise_testkit::bench::directory_service::{
    BATCH_CALLS, Inventories, LOOKUP_KEYS, SINGLE_CALLS, announce, batches, single_key,
};
use reprise_testkit::bench::report::{Figure, Target, paired};
use reprise_testkit::cluster::{Cluster, ControlPlanes};

use crate::mooncake::{self, Mooncake};

pub(crate) fn run(entries: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let mut cluster = Cluster::start_controlplane(&settings.directory, ControlPlanes::Embedded)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let inventories = Inventories::new(entries);
    // The nodes beat until the end.
    let (_beating, _) = announce(&runtime, &cluster, &inventories)?;
    let mooncake = Mooncake::start(&mut cluster, settings.audience)?;
    compared_with_mooncake(mooncake, &cluster, &inventories, settings)
}

fn compared_with_mooncake(
    mooncake: Mooncake,
    cluster: &Cluster,
    inventories: &Inventories,
    settings: &Settings,
) -> anyhow::Result<Vec<Figure>> {
    let (mut repetitions, mooncake) = (0.., RefCell::new(mooncake));
    let mut repetition = || repetitions.next().expect("endless");
    let single = paired(
        settings.rounds("directory.mooncake_single_key"),
        || mooncake.borrow_mut().exists(1, SINGLE_CALLS),
        || single_key(cluster, inventories, repetition()),
    )?;
    let rate = |microseconds: f64| LOOKUP_KEYS as f64 / microseconds;
    let batch = paired(
        settings.rounds("directory.mooncake_batches"),
        || mooncake.borrow_mut().exists(LOOKUP_KEYS, BATCH_CALLS).map(rate),
        || batches(cluster, inventories, repetition()).map(rate),
    )?;
    let name = format!("Mooncake {}", mooncake::VERSION);
    Ok(vec![
        Figure::relative(
            "directory.service_single_key_p50_beside_mooncake",
            single,
            "us",
            (name.clone(), Target::RatioAtMost(1.0)),
        ),
        Figure::relative(
            "directory.service_batch_lookups_beside_mooncake",
            batch,
            "million keys/s",
            (name, Target::RatioAtLeast(1.0)),
        ),
    ])
}
