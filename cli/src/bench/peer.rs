//! Verified loads of 2 MiB blocks from a peer's DRAM over TCP, compared with a bare stream in the same run.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_client::{Client, LoadRequest, Scope, Source};
use reprise_policy::BlockKey;
use reprise_transport::Congestion;
use reprise_transport::bare::stream_loop;

use reprise_testkit::bench::fixture::{Fixture, PATIENCE, fill, keys, payload, sizes};
use reprise_testkit::bench::report::{Figure, Paired, Target, median, paired};
use reprise_testkit::bench::{Settings, fixture, llama_3_8b};

/// Blocks per repetition: 128 × 2 MiB = 256 MiB.
const BLOCKS: usize = 128;

/// Time limit until the directory has new replicas.
const ANNOUNCED_WITHIN: Duration = Duration::from_secs(5);

/// Port of the iperf3 server on loopback.
const IPERF_PORT: &str = "15201";

/// Sizes of each agent.
pub(super) const ARENA_MIB: u64 = 768;
pub(super) const POOL_MIB: u64 = 4096;

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = llama_3_8b();
    let fixture = Fixture::start(settings, 2, &layout, sizes(ARENA_MIB, POOL_MIB))?;
    let (owner, reader) = (&fixture.clients[0], &fixture.clients[1]);
    let payload = payload(&layout);
    let bytes = BLOCKS as u64 * layout.block_bytes();
    let (mut round, mut iperf_rates) = (0, Vec::new());
    let measured = paired(
        settings.rounds("peer.load_2mib"),
        || {
            let run = stream_loop(bytes, &Congestion::System).context("the bare stream")?;
            Ok(run.bytes_per_second() / 1e9)
        },
        || {
            // New blocks, because a second load would hit the reader's own DRAM.
            round += 1;
            let keys = keys(100 + round, BLOCKS);
            fixture::commit(owner, fill(owner, &keys, &payload)?)?;
            await_announced(reader, &keys)?;
            let elapsed = load(reader, keys)?;
            iperf_rates.extend(iperf_once());
            Ok(bytes as f64 / elapsed.as_secs_f64() / 1e9)
        },
    )?;
    let reference = "bare TCP stream on loopback, 1 MiB writes";
    let mut figures =
        vec![Figure::relative("peer.load_2mib", measured, "GB/s", (reference, Target::RatioAtLeast(0.75)))];
    // The first round of both is not counted.
    figures.extend(iperf(measured, iperf_rates.split_off(1.min(iperf_rates.len()))));
    Ok(figures)
}

/// Waits until the directory has the last block; replicas are announced in order.
fn await_announced(reader: &Client, keys: &[BlockKey]) -> anyhow::Result<()> {
    let give_up = Instant::now() + ANNOUNCED_WITHIN;
    while reader.match_keys(keys, Scope::Cluster).context("match")?.len() < keys.len() {
        ensure!(
            Instant::now() < give_up,
            "the directory did not receive the blocks within {ANNOUNCED_WITHIN:?}"
        );
        std::thread::yield_now();
    }
    Ok(())
}

fn load(reader: &Client, keys: Vec<BlockKey>) -> anyhow::Result<Duration> {
    let request = LoadRequest { deadline: PATIENCE, ..LoadRequest::new(keys) };
    let started = Instant::now();
    let load = reader.load(&request).context("load")?;
    load.wait_layer(reader.layout().layers() - 1, PATIENCE).context("waiting for the last layer")?;
    let elapsed = started.elapsed();
    let peer = load
        .blocks()
        .iter()
        .filter(|block| matches!(block.source(), Some(Source::PeerDram | Source::PeerNvme)));
    ensure!(peer.count() == BLOCKS && load.leading_blocks() == BLOCKS, "not every block came from the peer");
    Ok(elapsed)
}

/// Returns iperf3's own result from interleaved runs, if it is installed.
fn iperf(measured: Paired, rates: Vec<f64>) -> Option<Figure> {
    if rates.is_empty() {
        return None;
    }
    let reference = median(rates);
    let paired = Paired { reference, subject: measured.subject, ratio: measured.subject / reference };
    Some(Figure::relative(
        "peer.load_2mib_vs_iperf3",
        paired,
        "GB/s",
        ("one iperf3 stream, 1 MiB writes, a run in each round", Target::RatioAtLeast(0.75)),
    ))
}

fn iperf_once() -> Option<f64> {
    let mut server = Command::new("iperf3")
        .args(["-s", "-1", "-p", IPERF_PORT, "-B", "127.0.0.1"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let rate = iperf_client(&mut server);
    drop(server.kill());
    drop(server.wait());
    rate
}

fn iperf_client(server: &mut Child) -> Option<f64> {
    let give_up = Instant::now() + Duration::from_secs(5);
    while Instant::now() < give_up && server.try_wait().ok()?.is_none() {
        let arguments = ["-c", "127.0.0.1", "-p", IPERF_PORT, "-l", "1M", "-t", "1", "-J"];
        let output = Command::new("iperf3").args(arguments).output().ok()?;
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        if let Some(bits) = report["end"]["sum_received"]["bits_per_second"].as_f64() {
            return Some(bits / 8e9);
        }
    }
    None
}
