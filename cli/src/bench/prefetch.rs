//! Prefixes on NVMe, loaded by requests that waited in a queue, with and without hints about the queue.
//!
//! [`WaitingQueue`] has the loop. One agent and one pool file serve both modes.
//!
//! The pass of the planner is measured in this process, over 1,000 requests on one device.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::ensure;
use reprise_policy::BlockKey;
use reprise_policy::prefetch::{
    CONFIDENCE_MAX, Candidate, ChannelState, HIGH_WATER_PERMILLE, Pass, Path, Plan,
};
use reprise_testkit::bench::fixture::{self, Fixture, keys, payload, sizes};
use reprise_testkit::bench::report::{Figure, Paired, Target, median};
use reprise_testkit::bench::{Settings, llama_3_8b};

use crate::waiting_queue::{Comparison, Sources, WaitingQueue};

/// Requests of a round.
const REQUESTS: usize = 32;

/// Blocks of a prefix: 16 MiB. Four prefixes are the share of one session in the arena.
const PREFIX_BLOCKS: usize = 8;

/// Time of an iteration, in which a device of 0.5 GB/s reads a prefix.
const ITERATION: Duration = Duration::from_millis(40);

/// Arena of the agent: an eighth of it is 64 MiB.
pub(super) const ARENA_MIB: u64 = 576;

/// Pool of the agent: all prefixes, 512 MiB.
pub(super) const POOL_MIB: u64 = 1024;

/// Requests of the measured pass.
const PASS_REQUESTS: usize = 1000;

/// Passes of one measurement.
const PASSES: u32 = 200;

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = llama_3_8b();
    let fixture = Fixture::start(settings, 1, &layout, sizes(ARENA_MIB, POOL_MIB))?;
    let client = &fixture.clients[0];
    let prefixes: Vec<Vec<BlockKey>> =
        (0..REQUESTS as u64).map(|request| keys(request, PREFIX_BLOCKS)).collect();
    for prefix in &prefixes {
        fixture::save_durable(client, prefix, PREFIX_BLOCKS, &payload(&layout))?;
    }
    let queue = WaitingQueue { client, prefixes: &prefixes, iteration: ITERATION };
    let comparison = queue.compare(settings.rounds("prefetch.first_layer_p50"))?;
    let Sources { blocks, from_devices } = comparison.sources_off;
    ensure!(blocks == from_devices, "without hints, {from_devices} of {blocks} blocks came from the device");
    let mut figures = figures_of(comparison);
    figures.push(pass_time(settings));
    Ok(figures)
}

fn figures_of(comparison: Comparison) -> Vec<Figure> {
    let (ratio, counted) = (comparison.ratio(), comparison.counted);
    let device_blocks = comparison.sources_on.device_percent();
    let Comparison { off, on, .. } = comparison;
    // Rates, so that the ratio to the reference is how many times faster the first layer is there.
    let rate = |millis: &[f64]| 1e3 / median(millis.to_vec());
    let paired = Paired { reference: rate(&off), subject: rate(&on), ratio };
    let reference = ("the same loads without hints", Target::RatioAtLeast(3.0));
    let missed = counted.missed_windows as f64 / on.len() as f64;
    vec![
        Figure::relative("prefetch.first_layers", paired, "1/s", reference),
        Figure::absolute("prefetch.first_layer_p50_off", median(off), "ms", Target::None),
        Figure::absolute("prefetch.first_layer_p50_on", median(on), "ms", Target::None),
        Figure::absolute("prefetch.device_blocks_on", device_blocks, "%", Target::None),
        Figure::absolute("prefetch.wasted_bytes", counted.wasted_percent(), "%", Target::AtMost(5.0)),
        Figure::absolute("prefetch.missed_windows", missed, "requests", Target::None),
    ]
}

/// Measures one pass of the planner, in which all requests want blocks.
fn pass_time(settings: &Settings) -> Figure {
    let channels = [ChannelState {
        path: Path { latency: Duration::from_micros(80), bytes_per_second: 3 << 30 },
        queued_bytes: 0,
    }];
    let candidates: Vec<Candidate> = (0..PASS_REQUESTS as u32)
        .map(|request| Candidate {
            iterations: 1 + request.wrapping_mul(2_654_435_761) % 64,
            confidence: CONFIDENCE_MAX,
            channel: 0,
            blocks: 64,
            block_bytes: 2 << 20,
        })
        .collect();
    let pass = Pass {
        iteration: ITERATION,
        window: 64,
        channels: &channels,
        reserve_bytes: 1 << 40,
        high_water_permille: HIGH_WATER_PERMILLE,
    };
    let (mut plan, mut samples) = (Plan::default(), Vec::new());
    for _ in settings.rounds("prefetch.pass_1000") {
        let started = Instant::now();
        for _ in 0..PASSES {
            plan.make(black_box(&pass), black_box(&candidates));
            black_box(&plan.reads);
        }
        samples.push(started.elapsed().as_secs_f64() * 1e6 / f64::from(PASSES));
    }
    Figure::absolute("prefetch.pass_1000", median(samples), "µs", Target::AtMost(200.0))
}
