//! Cold verified loads from the device and durable saves to it, compared with a bare io_uring loop.
//!
//! The bare loop ([`ReferencePool`]) reads the payloads of the loaded blocks in the agent's own pool file. It writes
//! to a file next to the pool. Both
//! sides write to space that is reserved and was never written, because the first write of an extent is
//! slower than the next, in the file system and in the storage below it. So both files have space for all
//! rounds, no round writes where another has written, and none may evict. (A new file per round would get the
//! previous file's blocks from the file system.)

use std::cell::Cell;
use std::io::ErrorKind;
use std::num::NonZeroU32;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use reprise_client::{Client, Load, LoadRequest, Scope, Source};
use reprise_io::{DeviceFile, FileAccess, IfMissing, Reserve};
use reprise_policy::BlockKey;

use reprise_testkit::bench::fixture::{self, Fixture, PATIENCE, fill, keys, payload, sizes};
use reprise_testkit::bench::pool_file;
use reprise_testkit::bench::reference_pool::{REFERENCE_BYTES, ReferencePool, shuffled};
use reprise_testkit::bench::report::{Figure, Paired, Target, paired};
use reprise_testkit::bench::{Settings, llama_3_8b};
use reprise_testkit::http;

/// Stored and loaded blocks: 384 × 2 MiB = 768 MiB.
const BLOCKS: usize = 384;

/// Blocks per load call; two calls are in flight, 256 MiB of arena.
const WINDOW_BLOCKS: usize = 64;

const _: () = assert!(2 * WINDOW_BLOCKS as u64 * BLOCK_BYTES as u64 == REFERENCE_BYTES);

/// Blocks whose objects are loaded in layer order: 128 × 2 MiB = 256 MiB.
const LAYER_ORDER_BLOCKS: usize = 128;

/// Maximum rounds of durable saves: each needs 256 MiB of unwritten pool, together 8 GiB.
const SAVE_ROUNDS_MAX: usize = 32;

/// Saves in addition to the counted rounds: one to determine the agent's syncs, and one uncounted round.
const SAVE_ROUNDS_EXTRA: usize = 2;

/// Space in the pool besides blocks: superblocks, journal, the segment in use.
const POOL_EXTRA_MIB: u64 = 256;

/// Arena of the agent: two load calls in flight, and a save.
pub(super) const ARENA_MIB: u64 = 640;

/// Blocks per durable save: 256 MiB.
const SAVE_BLOCKS: usize = 128;

/// Bytes per durable save.
const SAVE_BYTES: u64 = SAVE_BLOCKS as u64 * BLOCK_BYTES as u64;

/// Bytes of a block.
const BLOCK_BYTES: u32 = 2 << 20;

/// Bytes of an object.
const OBJECT_BYTES: u32 = 32 << 10;

/// Reserved file that the bare loop writes, one part per round.
struct ReservedFile {
    path: PathBuf,
    file: DeviceFile,
    rounds: u64,
    written: Cell<u64>,
}

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = llama_3_8b();
    let fixture = Fixture::start(settings, 1, &layout, sizes(ARENA_MIB, pool_mib(save_rounds(settings))))?;
    let client = &fixture.clients[0];
    let payload = payload(&layout);
    let cold = keys(3, BLOCKS);
    fixture::save_durable(client, &cold, SAVE_BLOCKS, &payload)?;
    let pool = fixture.cluster.pool_path(0);
    let bare = ReferencePool::new(&pool)?;
    let payloads = pool_file::payload_offsets(&pool, layout.slot_bytes(), &cold)?;

    let mut figures = vec![cold_blocks(settings, client, &cold, (&bare, &payloads))?];
    figures.push(layer_order(settings, client, &cold, (&bare, &payloads))?);
    figures.extend(fio(&pool, &payloads, &figures[0]));
    figures.push(durable_save(settings, &fixture, &payload, &bare)?);
    figures.push(decoupled(settings, &pool, (&bare, &payloads[..SAVE_BLOCKS]))?);
    Ok(figures)
}

/// Returns the size of the files: the pool, and the file that the bare loop writes.
pub(super) fn disk_bytes(settings: &Settings) -> u64 {
    let rounds = save_rounds(settings);
    // The file of decoupled writes replaces that of the bare saves, and has two parts for each round.
    (pool_mib(rounds) << 20) + 2 * (rounds + SAVE_ROUNDS_EXTRA) as u64 * SAVE_BYTES
}

/// Returns the number of counted rounds of durable saves.
fn save_rounds(settings: &Settings) -> usize {
    settings.repetitions.min(SAVE_ROUNDS_MAX)
}

/// Returns the size of a pool in which no save reuses a slot: a tenth more than the blocks, for headers and
/// ends of segments.
fn pool_mib(rounds: usize) -> u64 {
    let blocks = BLOCKS + (rounds + SAVE_ROUNDS_EXTRA) * SAVE_BLOCKS;
    (blocks as u64 * (u64::from(BLOCK_BYTES) >> 20) * 11).div_ceil(10) + POOL_EXTRA_MIB
}

fn cold_blocks(
    settings: &Settings,
    client: &Client,
    keys: &[BlockKey],
    (bare, payloads): (&ReferencePool, &[u64]),
) -> anyhow::Result<Figure> {
    let offsets = pieces(payloads, BLOCK_BYTES);
    let depth = bare.best_depth(BLOCK_BYTES, &offsets)?;
    let measured = paired(
        settings.rounds("store.cold_load_2mib"),
        || bare.read(BLOCK_BYTES, &offsets, depth),
        || cold_load(client, keys, u64::from(BLOCK_BYTES)),
    )?;
    let reference = format!("bare io_uring O_DIRECT reads of the same 2 MiB, depth {depth}");
    Ok(Figure::relative("store.cold_load_2mib", measured, "GB/s", (reference, Target::RatioAtLeast(0.95))))
}

fn layer_order(
    settings: &Settings,
    client: &Client,
    keys: &[BlockKey],
    (bare, payloads): (&ReferencePool, &[u64]),
) -> anyhow::Result<Figure> {
    let offsets = pieces(&payloads[..LAYER_ORDER_BLOCKS], OBJECT_BYTES);
    let depth = bare.best_depth(OBJECT_BYTES, &offsets)?;
    let part = &keys[..LAYER_ORDER_BLOCKS];
    let measured = paired(
        settings.rounds("store.cold_load_32kib_layer_order"),
        || bare.read(OBJECT_BYTES, &offsets, depth),
        || cold_load(client, part, u64::from(OBJECT_BYTES)),
    )?;
    let reference =
        format!("bare io_uring O_DIRECT random reads of 32 KiB of the same blocks, depth {depth}");
    let against = (reference, Target::RatioAtLeast(0.90));
    Ok(Figure::relative("store.cold_load_32kib_layer_order", measured, "GB/s", against))
}

/// Measures commit to durable notice of filled slots, compared with writes of the same bytes and number of
/// syncs.
fn durable_save(
    settings: &Settings,
    fixture: &Fixture,
    payload: &[u8],
    bare: &ReferencePool,
) -> anyhow::Result<Figure> {
    let client = &fixture.clients[0];
    let admin = fixture.cluster.file().agents[0].admin.clone();
    let bytes = SAVE_BYTES as f64;
    let save = |round: u64| -> anyhow::Result<Duration> {
        client.trim().context("trim")?;
        let filled = fill(client, &keys(1000 + round, SAVE_BLOCKS), payload)?;
        let started = Instant::now();
        let ticket = fixture::commit(client, filled)?;
        let outcome = client.wait_durable(ticket, PATIENCE).context("waiting until durable")?;
        ensure!(outcome.lost_keys.is_empty(), "{} blocks did not become durable", outcome.lost_keys.len());
        Ok(started.elapsed())
    };
    let evicted_before = nvme_evictions(&admin)?;
    let syncs_before = syncs(&admin)?;
    save(0)?;
    // Counted over all saves so far, because the number of syncs differs between saves.
    let saves = Cell::new(1);
    let blocks_per_sync = || -> anyhow::Result<NonZeroU32> {
        let syncs = (syncs(&admin)? - syncs_before).max(1);
        let blocks = (SAVE_BLOCKS as u64 * saves.get()).div_ceil(syncs).max(1);
        NonZeroU32::new(u32::try_from(blocks).context("too many blocks")?)
            .context("at least one block per sync")
    };
    let rounds = save_rounds(settings);
    let fresh = ReservedFile::reserve(settings.directory.join("bare-write.dat"), rounds + SAVE_ROUNDS_EXTRA)?;
    let measured = paired(
        settings.some_rounds("store.durable_save_2mib", rounds),
        || bare.write(&fresh.file, &fresh.next_round()?, blocks_per_sync()?),
        || {
            let took = save(saves.get())?;
            saves.set(saves.get() + 1);
            Ok(bytes / took.as_secs_f64() / 1e9)
        },
    )?;
    let evicted = nvme_evictions(&admin)? - evicted_before;
    ensure!(evicted == 0, "{evicted} blocks were evicted: saves reused slots");
    let syncs = (syncs(&admin)? - syncs_before) as f64 / saves.get() as f64;
    let reference = format!(
        "bare io_uring O_DIRECT first writes of 2 MiB, {syncs:.1} syncs per save, {rounds} of {} rounds",
        settings.repetitions
    );
    Ok(Figure::relative("store.durable_save_2mib", measured, "GB/s", (reference, Target::RatioAtLeast(0.90))))
}

/// Measures reads and writes of the same bytes one after the other, compared with both at once (Tutti, figure 6).
///
/// The reads are those of saved blocks in the pool; the writes go to a file next to it.
fn decoupled(
    settings: &Settings,
    pool: &Path,
    (bare, payloads): (&ReferencePool, &[u64]),
) -> anyhow::Result<Figure> {
    let rounds = save_rounds(settings);
    let writer = ReferencePool::new(pool)?;
    let reads = pieces(payloads, BLOCK_BYTES);
    let depth = bare.best_depth(BLOCK_BYTES, &reads)?;
    let path = settings.directory.join("decoupled-write.dat");
    let fresh = ReservedFile::reserve(path, 2 * (rounds + 1))?;
    let sync_every = NonZeroU32::new(u32::try_from(SAVE_BLOCKS)?).context("at least one block")?;
    let rate = |took: Duration| {
        (reads.len() as u64 * u64::from(BLOCK_BYTES) + SAVE_BYTES) as f64 / took.as_secs_f64() / 1e9
    };
    let measured = paired(
        settings.some_rounds("store.decoupled_read_write", rounds),
        || {
            let (writes, file) = (fresh.next_round()?, &fresh.file);
            let started = Instant::now();
            std::thread::scope(|scope| {
                let write = scope.spawn(|| writer.write(file, &writes, sync_every));
                bare.read(BLOCK_BYTES, &reads, depth)?;
                write.join().map_err(|_| anyhow!("the writing thread panicked"))?
            })?;
            Ok(rate(started.elapsed()))
        },
        || {
            let writes = fresh.next_round()?;
            let started = Instant::now();
            bare.read(BLOCK_BYTES, &reads, depth)?;
            writer.write(&fresh.file, &writes, sync_every)?;
            Ok(rate(started.elapsed()))
        },
    )?;
    let reference = format!(
        "the same 2 MiB reads and writes at once, bare io_uring O_DIRECT, depth {depth}, {rounds} of {} rounds",
        settings.repetitions
    );
    Ok(Figure::relative("store.decoupled_read_write", measured, "GB/s", (reference, Target::None)))
}

/// Loads every block from the device into the arena, verified, with two windows in flight; returns GB/s.
pub(super) fn cold_load(client: &Client, keys: &[BlockKey], read_bytes: u64) -> anyhow::Result<f64> {
    client.trim().context("trim")?;
    let (deadline, scope) = (PATIENCE, Scope::Local);
    let request = LoadRequest { deadline, read_bytes, scope, ..LoadRequest::new(keys.to_vec()) };
    let mut cold = Ok(());
    let mut loaded = 0;
    let started = Instant::now();
    client
        .load_windowed(&request, WINDOW_BLOCKS, |_, load| {
            loaded += load.blocks().len();
            cold = require_cold(client, load);
            if cold.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })
        .context("load")?;
    let elapsed = started.elapsed();
    cold?;
    ensure!(loaded == keys.len(), "{loaded} of {} blocks were loaded", keys.len());
    let bytes = keys.len() as u64 * client.layout().block_bytes();
    Ok(bytes as f64 / elapsed.as_secs_f64() / 1e9)
}

/// Waits for a complete load, whose blocks must all come from the node's own device.
fn require_cold(client: &Client, load: &Load) -> anyhow::Result<()> {
    load.wait_layer(client.layout().layers() - 1, PATIENCE).context("waiting for the last layer")?;
    ensure!(load.leading_blocks() == load.blocks().len(), "a cold block could not be loaded");
    let warm = load.blocks().iter().filter(|block| block.source() != Some(Source::OwnNvme)).count();
    ensure!(warm == 0, "{warm} blocks did not come from the device");
    Ok(())
}

/// Returns the offsets of all pieces of `bytes` of the payloads at `payloads`, in a shuffled order.
fn pieces(payloads: &[u64], bytes: u32) -> Vec<u64> {
    let within = (0..u64::from(BLOCK_BYTES)).step_by(bytes as usize);
    shuffled(payloads.iter().flat_map(|payload| within.clone().map(move |at| payload + at)).collect())
}

/// Returns the number of blocks that an agent has evicted from NVMe so far.
fn nvme_evictions(admin: &str) -> anyhow::Result<u64> {
    let status: serde_json::Value = serde_json::from_str(&http::get(admin, "/status")?)?;
    status["counters"]["nvme_evictions"].as_u64().context("the agent's status does not count evictions")
}

/// Returns the number of an agent's device syncs so far, from its metrics.
fn syncs(admin: &str) -> anyhow::Result<u64> {
    let metrics = http::get(admin, "/metrics")?;
    let counts: Vec<f64> = metrics
        .lines()
        .filter(|line| line.starts_with("reprise_agent_device_sync_seconds_count"))
        .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
        .collect();
    ensure!(!counts.is_empty(), "the agent's metrics do not count device syncs");
    Ok(counts.iter().sum::<f64>() as u64)
}

impl ReservedFile {
    /// Creates a file with reserved space, like the pool's, for this many rounds.
    fn reserve(path: PathBuf, rounds: usize) -> anyhow::Result<ReservedFile> {
        // A file left by a killed run has already been written.
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing {}", path.display()));
            }
            _ => {}
        }
        let mut file = DeviceFile::open(&path, FileAccess::ReadWrite, IfMissing::Create)
            .with_context(|| format!("opening {}", path.display()))?;
        let rounds = rounds as u64;
        file.preallocate(rounds * SAVE_BYTES, Reserve::Bytes(0))
            .context("allocating the bare loop's file")?;
        Ok(ReservedFile { path, file, rounds, written: Cell::new(0) })
    }

    /// Returns the offsets of unwritten blocks.
    fn next_round(&self) -> anyhow::Result<Vec<u64>> {
        let round = self.written.replace(self.written.get() + 1);
        ensure!(round < self.rounds, "only {} rounds were reserved", self.rounds);
        let from = round * SAVE_BYTES;
        Ok((from..from + SAVE_BYTES).step_by(BLOCK_BYTES as usize).collect())
    }
}

impl Drop for ReservedFile {
    fn drop(&mut self) {
        // A remaining file is in the benchmark's directory, and the next run removes it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Returns fio's result for the same reads, if it is installed, for information.
fn fio(pool: &Path, payloads: &[u64], measured: &Figure) -> Option<Figure> {
    let (first, last) = (payloads.iter().min()?, payloads.iter().max()?);
    let arguments = [
        format!("--filename={}", pool.display()),
        // The rest of the pool was never written, and reading it does not access the medium.
        format!("--offset={first}"),
        format!("--size={}", last + u64::from(BLOCK_BYTES) - first),
        "--name=reads".into(),
        "--rw=randread".into(),
        "--bs=2M".into(),
        "--iodepth=16".into(),
        "--direct=1".into(),
        "--ioengine=io_uring".into(),
        "--readonly".into(),
        "--output-format=json".into(),
    ];
    let output = Command::new("fio").args(arguments).output().ok()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    let rate = report["jobs"][0]["read"]["bw_bytes"].as_f64()? / 1e9;
    let paired = Paired { reference: rate, subject: measured.value, ratio: measured.value / rate };
    let reference = "fio, 2 MiB random reads, depth 16, its own buffers";
    Some(Figure::relative("store.cold_load_2mib_vs_fio", paired, "GB/s", (reference, Target::None)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_has_unwritten_slots_for_every_round() {
        for rounds in [1, 11, SAVE_ROUNDS_MAX] {
            let blocks = BLOCKS + (rounds + SAVE_ROUNDS_EXTRA) * SAVE_BLOCKS;
            let segments = ((pool_mib(rounds) - POOL_EXTRA_MIB) / 64) as usize;
            assert!(
                segments * 31 >= blocks,
                "{rounds} rounds: {segments} segments of 31 slots, {blocks} blocks"
            );
        }
    }

    #[test]
    fn pieces_cover_every_byte_of_every_payload_once() {
        let mut pieces = pieces(&[4096, 8 << 20], OBJECT_BYTES);
        pieces.sort_unstable();
        let expected = |start: u64| (0..64).map(move |object| start + object * u64::from(OBJECT_BYTES));
        assert_eq!(pieces, expected(4096).chain(expected(8 << 20)).collect::<Vec<_>>());
    }
}
