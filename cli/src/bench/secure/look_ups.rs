//! Look-ups of one key with TLS and without, in one run: two members next to each other, and the same keys.

use reprise_testkit::bench::Settings;
use reprise_testkit::bench::directory_service::{Inventories, announce, single_key};
use reprise_testkit::bench::report::{Figure, Target, paired};
use reprise_testkit::cluster::{Cluster, Connections, ControlPlanes};

/// Replicas in each directory: enough that keys are not in the processor's caches.
const ENTRIES: usize = 100_000;

/// Time of a look-up with TLS at most, relative to a plain one.
const RATIO_MAX: f64 = 1.15;

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let start = |name: &str, connections| {
        Cluster::start_connected(&settings.directory.join(name), ControlPlanes::Embedded, connections)
    };
    let (plain, secure) =
        (start("lookups-plain", Connections::Plain)?, start("lookups-tls", Connections::Tls)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let inventories = Inventories::new(ENTRIES);
    let beating = [announce(&runtime, &plain, &inventories)?, announce(&runtime, &secure, &inventories)?];
    let (mut of_plain, mut of_secure) = (0.., 0..);
    let paired = paired(
        settings.rounds("secure.lookup"),
        || single_key(&plain, &inventories, of_plain.next().expect("endless")),
        || single_key(&secure, &inventories, of_secure.next().expect("endless")),
    )?;
    drop(beating);
    let against = ("the same look-up without TLS", Target::RatioAtMost(RATIO_MAX));
    Ok(vec![Figure::relative("secure.lookup_p50", paired, "us", against)])
}
