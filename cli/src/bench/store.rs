//! Cold verified loads from the device and durable saves to it, beside a bare io_uring loop on the same file system.
//!
//! The bare loop reads or writes a file beside the pool, as large as what is loaded, written once before: a
//! device answers reads of never-written extents without touching the medium. Its buffers are 2 MiB pages, and
//! its depth is the best of a few, found first. Writes of both sides go to space that is reserved and was never
//! written, since the first write of an extent costs more than the next.

use std::num::NonZeroU32;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};
use reprise_client::{Client, Load, LoadRequest, Scope};
use reprise_io::bare::{self, BareLoop};
use reprise_io::{DeviceFile, FileAccess, Missing};
use reprise_policy::BlockKey;

use crate::http;
use crate::kv_function::mix;

use super::fixture::{self, Fixture, PATIENCE, fill, keys, payload, sizes};
use super::report::{Figure, Paired, Target, median, paired};
use super::{Settings, llama_3_8b};

/// Blocks that are stored and loaded: 384 × 2 MiB = 768 MiB.
const BLOCKS: usize = 384;

/// Blocks of one load call; two calls are in flight, 256 MiB of arena.
const WINDOW_BLOCKS: usize = 64;

/// Blocks of one durable save: 256 MiB.
const SAVE_BLOCKS: usize = 128;

/// Bytes of a block.
const BLOCK_BYTES: u32 = 2 << 20;

/// Bytes of an object.
const OBJECT_BYTES: u32 = 32 << 10;

/// Depths that the bare loop is tried with.
const DEPTHS: [usize; 4] = [4, 8, 16, 32];

/// Objects that the random 32 KiB loop reads: 256 MiB.
const OBJECTS: usize = 8192;

/// The bare loop's side: a file beside the pool and memory in 2 MiB pages.
struct Bare {
    file: DeviceFile,
    _arena: Arena,
    memory: Span,
}

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = llama_3_8b();
    let fixture = Fixture::start(settings, 1, &layout, sizes(640, 3072))?;
    let client = &fixture.clients[0];
    let payload = payload(&layout);
    let cold = keys(3, BLOCKS);
    fixture::save_durable(client, &cold, SAVE_BLOCKS, &payload)?;
    let bare = Bare::new(settings)?;

    let mut figures = vec![cold_blocks(settings, client, &cold, &bare)?];
    figures.push(layer_order(settings, client, &cold, &bare)?);
    figures.push(durable_save(settings, &fixture, &payload, &bare)?);
    figures.extend(fio(settings, &figures[0]));
    Ok(figures)
}

fn cold_blocks(
    settings: &Settings,
    client: &Client,
    keys: &[BlockKey],
    bare: &Bare,
) -> anyhow::Result<Figure> {
    let offsets = bare.offsets(BLOCK_BYTES, BLOCKS);
    let depth = bare.best_depth(BLOCK_BYTES, &offsets)?;
    let measured = paired(
        settings.repetitions,
        || bare.read(BLOCK_BYTES, &offsets, depth),
        || cold_load(client, keys, u64::from(BLOCK_BYTES)),
    )?;
    let reference = format!("bare io_uring O_DIRECT reads of 2 MiB, depth {depth}");
    Ok(Figure::relative("store.cold_load_2mib", measured, "GB/s", (reference, Target::RatioAtLeast(0.95))))
}

fn layer_order(
    settings: &Settings,
    client: &Client,
    keys: &[BlockKey],
    bare: &Bare,
) -> anyhow::Result<Figure> {
    let offsets = bare.offsets(OBJECT_BYTES, OBJECTS);
    let depth = bare.best_depth(OBJECT_BYTES, &offsets)?;
    let part = &keys[..OBJECTS / 64];
    let measured = paired(
        settings.repetitions,
        || bare.read(OBJECT_BYTES, &offsets, depth),
        || cold_load(client, part, u64::from(OBJECT_BYTES)),
    )?;
    let reference = format!("bare io_uring O_DIRECT random reads of 32 KiB, depth {depth}");
    let against = (reference, Target::RatioAtLeast(0.90));
    Ok(Figure::relative("store.cold_load_32kib_layer_order", measured, "GB/s", against))
}

/// Commit to durable notice of filled slots, beside writes of the same bytes from memory with as many syncs.
fn durable_save(
    settings: &Settings,
    fixture: &Fixture,
    payload: &[u8],
    bare: &Bare,
) -> anyhow::Result<Figure> {
    let client = &fixture.clients[0];
    let admin = fixture.cluster.file().agents[0].admin.clone();
    let bytes = SAVE_BLOCKS as f64 * f64::from(BLOCK_BYTES);
    let save = |round: u64| -> anyhow::Result<Duration> {
        client.trim().context("trim")?;
        let filled = fill(client, &keys(1000 + round, SAVE_BLOCKS), payload)?;
        let started = Instant::now();
        let ticket = fixture::commit(client, filled)?;
        let outcome = client.wait_durable(ticket, PATIENCE).context("waiting until durable")?;
        ensure!(outcome.lost_keys.is_empty(), "{} blocks did not become durable", outcome.lost_keys.len());
        Ok(started.elapsed())
    };
    let before = syncs(&admin)?;
    save(0)?;
    let syncs = (syncs(&admin)? - before).max(1);
    let every = (SAVE_BLOCKS as u64).div_ceil(syncs).max(1);
    let every = NonZeroU32::new(u32::try_from(every).context("too many blocks")?)
        .context("at least one block a sync")?;
    let offsets = bare.offsets(BLOCK_BYTES, SAVE_BLOCKS);
    let mut round = 0;
    let measured = paired(
        settings.repetitions,
        || bare.write_fresh(settings, &offsets, every),
        || {
            round += 1;
            Ok(bytes / save(round)?.as_secs_f64() / 1e9)
        },
    )?;
    let reference = format!("bare io_uring O_DIRECT first writes of 2 MiB, {syncs} syncs");
    Ok(Figure::relative("store.durable_save_2mib", measured, "GB/s", (reference, Target::RatioAtLeast(0.90))))
}

/// Loads every block from the device into the arena, verified, two windows in flight; GB/s.
fn cold_load(client: &Client, keys: &[BlockKey], read_bytes: u64) -> anyhow::Result<f64> {
    client.trim().context("trim")?;
    let start = |keys: &[BlockKey]| {
        let request =
            LoadRequest { keys: keys.to_vec(), deadline: PATIENCE, read_bytes, scope: Scope::Local };
        client.start_load(&request)
    };
    let finish = |load: &Load| -> anyhow::Result<()> {
        load.wait_layer(client.layout().layers() - 1, PATIENCE).context("waiting for the last layer")?;
        ensure!(load.leading_blocks() == load.blocks().len(), "a cold block could not be loaded");
        Ok(())
    };
    let started = Instant::now();
    let mut windows = keys.chunks(WINDOW_BLOCKS);
    let mut in_flight = std::collections::VecDeque::new();
    for window in windows.by_ref().take(2) {
        in_flight.push_back(start(window)?);
    }
    while let Some(pending) = in_flight.pop_front() {
        let load = pending.wait().context("load")?;
        finish(&load)?;
        drop(load);
        if let Some(window) = windows.next() {
            in_flight.push_back(start(window)?);
        }
    }
    let bytes = keys.len() as u64 * client.layout().block_bytes();
    Ok(bytes as f64 / started.elapsed().as_secs_f64() / 1e9)
}

/// Device syncs of an agent so far, from its metrics.
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

impl Bare {
    fn new(settings: &Settings) -> anyhow::Result<Bare> {
        let path = settings.directory.join("bare-loop.dat");
        let mut file = DeviceFile::open(&path, FileAccess::ReadWrite, Missing::Create)
            .with_context(|| format!("opening {}", path.display()))?;
        file.preallocate(BLOCKS as u64 * u64::from(BLOCK_BYTES))
            .context("allocating the bare loop's file")?;
        let bytes = DEPTHS[3] as u64 * u64::from(BLOCK_BYTES);
        let arena = Arena::new(&ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Prefer })
            .context("memory of the bare loop")?;
        let memory = arena.span(0, 0, bytes).context("memory of the bare loop")?;
        let pattern: Vec<u8> = (0..bytes / 8).flat_map(|index| mix(index).to_le_bytes()).collect();
        memory.copy_in(&pattern).context("filling the bare loop's memory")?;
        let bare = Bare { file, _arena: arena, memory };
        let every = NonZeroU32::new(64).expect("not zero");
        bare.write(&bare.file, &bare.offsets(BLOCK_BYTES, BLOCKS), every)?;
        Ok(bare)
    }

    /// `count` offsets of pieces of `bytes` in the file, in a shuffled order.
    fn offsets(&self, bytes: u32, count: usize) -> Vec<u64> {
        let pieces = self.file.size() / u64::from(bytes);
        let mut all: Vec<u64> = (0..pieces).collect();
        all.sort_by_key(|piece| mix(*piece));
        all.iter().take(count).map(|piece| piece * u64::from(bytes)).collect()
    }

    fn best_depth(&self, bytes: u32, offsets: &[u64]) -> anyhow::Result<usize> {
        let depths: &[usize] = if bytes == BLOCK_BYTES { &DEPTHS } else { &[16, 32, 64, 128] };
        let mut best = (0.0, depths[0]);
        for depth in depths {
            let runs = [self.read(bytes, offsets, *depth)?, self.read(bytes, offsets, *depth)?];
            let rate = median(runs.to_vec());
            if rate > best.0 {
                best = (rate, *depth);
            }
        }
        Ok(best.1)
    }

    fn read(&self, bytes: u32, offsets: &[u64], depth: usize) -> anyhow::Result<f64> {
        let buffers = bare::cut(&self.memory, bytes, depth)?;
        let parameters =
            BareLoop { file: &self.file, block_bytes: bytes, offsets, buffers: &buffers, sync_every: None };
        Ok(bare::read_loop(&parameters).context("the bare read loop")?.bytes_per_second() / 1e9)
    }

    /// Writes into a new file whose space is reserved, as the pool's is.
    fn write_fresh(
        &self,
        settings: &Settings,
        offsets: &[u64],
        sync_every: NonZeroU32,
    ) -> anyhow::Result<f64> {
        let path = settings.directory.join("bare-write.dat");
        let mut file = DeviceFile::open(&path, FileAccess::ReadWrite, Missing::Create)
            .with_context(|| format!("opening {}", path.display()))?;
        file.preallocate(self.file.size()).context("allocating the bare loop's file")?;
        let rate = self.write(&file, offsets, sync_every);
        std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        rate
    }

    fn write(&self, file: &DeviceFile, offsets: &[u64], sync_every: NonZeroU32) -> anyhow::Result<f64> {
        let buffers = bare::cut(&self.memory, BLOCK_BYTES, DEPTHS[2])?;
        let parameters = BareLoop {
            file,
            block_bytes: BLOCK_BYTES,
            offsets,
            buffers: &buffers,
            sync_every: Some(sync_every),
        };
        Ok(bare::write_loop(&parameters).context("the bare write loop")?.bytes_per_second() / 1e9)
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        drop(std::fs::remove_file(self.file.path()));
    }
}

/// fio's figure for the same reads, where it is installed: for information.
fn fio(settings: &Settings, measured: &Figure) -> Option<Figure> {
    let path = settings.directory.join("bare-loop.dat");
    let arguments = [
        format!("--filename={}", path.display()),
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
