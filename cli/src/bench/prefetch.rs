//! Prefixes on NVMe, loaded by requests that waited in a queue, with and without hints about the queue (TierKV §3.4).
//!
//! ```text
//!  iteration:  hint: requests that run in the next 4 iterations ── compute ── next request loads its prefix
//!  off:        the same without hints
//! ```
//!
//! Both modes run the same iterations against one agent and one pool file; they alternate. The computation is a pause.
//! In each round, one request of 32 is aborted just before it runs, so that a part of the blocks read ahead is wasted.
//! The time to the first layer is that of the load call: its answer comes with the first layer of all blocks.
//!
//! The pass of the planner is measured in this process, over 1,000 requests on one device.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_client::{Client, LoadRequest, Scope, Source};
use reprise_policy::BlockKey;
use reprise_policy::prefetch::{
    CONFIDENCE_MAX, Candidate, ChannelState, HIGH_WATER_PERMILLE, HINT_VERSION, Lookahead, LookaheadRequest,
    Pass, Path, Plan, WINDOW_MIN,
};
use reprise_testkit::bench::fixture::{self, Fixture, PATIENCE, keys, payload, sizes};
use reprise_testkit::bench::report::{Figure, Paired, Target, median};
use reprise_testkit::bench::{Settings, llama_3_8b};

/// Requests of a round.
const REQUESTS: usize = 32;

/// Request of each round that is aborted before it runs.
const ABORTED: usize = 20;

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

/// Whether the engine sends hints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Off,
    On,
}

/// Counters of the agent.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    read: u64,
    wasted: u64,
    missed: u64,
}

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = llama_3_8b();
    let fixture = Fixture::start(settings, 1, &layout, sizes(ARENA_MIB, POOL_MIB))?;
    let client = &fixture.clients[0];
    let prefixes: Vec<Vec<BlockKey>> =
        (0..REQUESTS as u64).map(|request| keys(request, PREFIX_BLOCKS)).collect();
    for prefix in &prefixes {
        fixture::save_durable(client, prefix, PREFIX_BLOCKS, &payload(&layout))?;
    }
    let mut figures = measure(settings, client, &prefixes)?;
    figures.push(pass_time(settings));
    Ok(figures)
}

fn measure(settings: &Settings, client: &Client, prefixes: &[Vec<BlockKey>]) -> anyhow::Result<Vec<Figure>> {
    round(client, prefixes, Mode::Off)?;
    round(client, prefixes, Mode::On)?;
    let (before, mut off, mut on) = (counted(client)?, Vec::new(), Vec::new());
    for _ in settings.rounds("prefetch.first_layer_p50") {
        off.push(median(round(client, prefixes, Mode::Off)?));
        on.push(median(round(client, prefixes, Mode::On)?));
    }
    let after = counted(client)?;
    let ratio = median(off.iter().zip(&on).map(|(off, on)| off / on).collect());
    // Rates, so that the ratio to the reference is how many times faster the first layer is there.
    let rate = |millis: &[f64]| 1e3 / median(millis.to_vec());
    let paired = Paired { reference: rate(&off), subject: rate(&on), ratio };
    let reference = ("the same loads without hints", Target::RatioAtLeast(3.0));
    let read = (after.read - before.read) as f64;
    ensure!(read > 0.0, "the agent read nothing ahead");
    let wasted = 100.0 * (after.wasted - before.wasted) as f64 / read;
    let missed = (after.missed - before.missed) as f64 / on.len() as f64;
    Ok(vec![
        Figure::relative("prefetch.first_layers", paired, "1/s", reference),
        Figure::absolute("prefetch.first_layer_p50_off", median(off), "ms", Target::None),
        Figure::absolute("prefetch.first_layer_p50_on", median(on), "ms", Target::None),
        Figure::absolute("prefetch.wasted_bytes", wasted, "%", Target::AtMost(5.0)),
        Figure::absolute("prefetch.missed_windows", missed, "requests", Target::None),
    ])
}

/// Runs the requests of one round; returns the milliseconds after which each has its first layer.
fn round(client: &Client, prefixes: &[Vec<BlockKey>], mode: Mode) -> anyhow::Result<Vec<f64>> {
    client.trim().context("trim")?;
    let (ahead, mut times) = (WINDOW_MIN as usize, Vec::new());
    // Request r runs at the end of iteration r + K - 1.
    for iteration in 0..prefixes.len() + ahead - 1 {
        let begun = Instant::now();
        let runs = (iteration + 1).checked_sub(ahead);
        if mode == Mode::On {
            let report = client.report_lookahead(&hint(prefixes, iteration, ahead)).context("lookahead")?;
            ensure!(report.ignored == 0, "the agent ignored {} parts of a hint", report.ignored);
        }
        std::thread::sleep(ITERATION.saturating_sub(begun.elapsed()));
        if let Some(request) = runs.filter(|request| *request != ABORTED) {
            times.push(first_layer(client, &prefixes[request], mode)?);
        }
    }
    if mode == Mode::On {
        // All requests have begun.
        client.report_lookahead(&lookahead(Vec::new())).context("lookahead")?;
    }
    Ok(times)
}

fn lookahead(requests: Vec<LookaheadRequest>) -> Lookahead {
    Lookahead { version: HINT_VERSION, iteration: ITERATION, requests, ..Lookahead::default() }
}

/// Returns the hint at the begin of an iteration: requests are listed first `ahead` iterations before they run.
fn hint(prefixes: &[Vec<BlockKey>], iteration: usize, ahead: usize) -> Lookahead {
    let next = (iteration + 1).saturating_sub(ahead);
    let listed = (next..=iteration).filter(|request| *request < prefixes.len());
    let aborts = next == ABORTED;
    let requests = listed.filter(|request| !(aborts && *request == ABORTED)).map(|request| {
        LookaheadRequest {
            request: request as u64,
            // At most `ahead`.
            iterations: (request + ahead - iteration) as u32,
            confidence: CONFIDENCE_MAX,
            keys: if request == iteration { prefixes[request].clone() } else { Vec::new() },
        }
    });
    let cancelled = if aborts { vec![ABORTED as u64] } else { Vec::new() };
    Lookahead { cancelled, ..lookahead(requests.collect()) }
}

/// Loads a prefix; returns the milliseconds until its first layer is readable.
fn first_layer(client: &Client, keys: &[BlockKey], mode: Mode) -> anyhow::Result<f64> {
    let request = LoadRequest { scope: Scope::Local, ..LoadRequest::new(keys.to_vec()) };
    let started = Instant::now();
    let load = client.load(&request).context("load")?;
    load.wait_layer(0, PATIENCE).context("waiting for the first layer")?;
    let millis = started.elapsed().as_secs_f64() * 1e3;
    load.wait_layer(client.layout().layers() - 1, PATIENCE).context("waiting for the last layer")?;
    let sources: Vec<_> = load.blocks().iter().map(|block| block.source()).collect();
    ensure!(sources.iter().all(Option::is_some), "{mode:?}: blocks were not found: {sources:?}");
    let cold = sources.iter().all(|source| *source == Some(Source::OwnNvme));
    ensure!(cold || mode == Mode::On, "without hints, blocks come from the device: {sources:?}");
    Ok(millis)
}

fn counted(client: &Client) -> anyhow::Result<Counted> {
    let mut counted = Counted::default();
    for (name, value) in client.stats().context("stats")? {
        match name.as_str() {
            "prefetch_bytes" => counted.read = value,
            "prefetch_wasted_bytes" => counted.wasted = value,
            "prefetch_missed_windows" => counted.missed = value,
            _ => {}
        }
    }
    Ok(counted)
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
