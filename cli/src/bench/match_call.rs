//! Match call of 8,192 local keys, as measured by an engine's scheduler.

use std::time::Instant;

use anyhow::{Context, ensure};
use reprise_client::Scope;

use reprise_testkit::bench::fixture::{Fixture, fill, keys, payload, sizes};
use reprise_testkit::bench::report::{Figure, Target, median};
use reprise_testkit::bench::{Settings, fixture, one_page};

/// Keys per call: a 128K-token request in blocks of 16 tokens.
const KEYS: usize = 8192;

const CALLS: usize = 100;

/// Blocks per reservation and commit.
const BATCH: usize = 2048;

/// Sizes of each agent.
pub(super) const ARENA_MIB: u64 = 256;
pub(super) const POOL_MIB: u64 = 512;

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = one_page();
    let fixture = Fixture::start(settings, 1, &layout, sizes(ARENA_MIB, POOL_MIB))?;
    let client = &fixture.clients[0];
    let keys = keys(2, KEYS);
    let payload = payload(&layout);
    for part in keys.chunks(BATCH) {
        fixture::commit(client, fill(client, part, &payload)?)?;
    }
    let mut medians = Vec::new();
    let mut tails = Vec::new();
    for _ in settings.rounds("match.8192_keys") {
        let mut times = Vec::with_capacity(CALLS);
        for _ in 0..CALLS {
            let started = Instant::now();
            let sources = client.match_keys(&keys, Scope::Cluster).context("match")?;
            times.push(started.elapsed().as_secs_f64() * 1e3);
            ensure!(sources.len() == KEYS, "{} of {KEYS} keys matched", sources.len());
        }
        times.sort_by(f64::total_cmp);
        tails.push(times[CALLS * 99 / 100]);
        medians.push(median(times));
    }
    Ok(vec![
        Figure::absolute("match.8192_keys_p50", median(medians), "ms", Target::AtMost(1.0)),
        Figure::absolute("match.8192_keys_p99", median(tails), "ms", Target::None),
    ])
}
