//! Opening of a pool with a long journal, and the agent's memory per resident block.
//!
//! The real state machine ([`DevicePool`]) writes the pool; only its journal and superblocks are written to
//! the file, because recovery never reads blocks. Then a real agent opens it and reports the time.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_agent_core::effect::{ArenaSlot, RegionId};
use reprise_agent_core::pool::{
    BatchId, BlockWrite, DeviceOp, DeviceOpKind, DevicePool, PoolEvent, PoolParams, Recovery,
    SEGMENT_BYTES_DEFAULT,
};
use reprise_policy::{BlockKey, ByteSize, ContentId, Layout, TenantId};

use reprise_testkit::cluster::{AgentSizes, Cluster};
use reprise_testkit::http;

use reprise_testkit::bench::fixture::{self, Fixture, keys, payload, sizes};
use reprise_testkit::bench::report::{Figure, Target, median};
use reprise_testkit::bench::{Settings, one_page, process_memory};

/// Blocks per write batch.
const BATCH_BLOCKS: usize = 1000;

/// Device bytes per block that fits into a pool's journal (docs/FORMAT.md). The file is sparse: only
/// superblocks and journal use space.
const DEVICE_BYTES_PER_BLOCK: u64 = 64 << 10;

/// Additional space for the journal itself and the share of entries that an agent keeps free: 3 % of a
/// million are 2 GiB. With less, it evicts between repetitions.
const DEVICE_BYTES_EXTRA: u64 = 4 << 30;

/// Size of the pool that the agent formats before it gets the long one.
const FIRST_POOL_BYTES: u64 = 512 << 20;

/// Batches of blocks that are also in DRAM: 56,000 blocks of one page, 220 MiB of arena.
const DRAM_BATCHES: u64 = 56;

/// Batches before the measurement begins.
const DRAM_BATCHES_BEFORE: u64 = 16;

/// Arena for these blocks and for reservations.
pub(super) const DRAM_ARENA_MIB: u64 = 384;

/// Pool for these blocks with headers; 64 KiB of device per entry of the journal.
pub(super) const DRAM_POOL_MIB: u64 = 4 << 10;

/// Interval between checks of the directory.
const ANNOUNCEMENT_POLL: Duration = Duration::from_millis(10);

pub(super) fn run(entries: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let bytes = entries as u64 * DEVICE_BYTES_PER_BLOCK + DEVICE_BYTES_EXTRA;
    let sizes = AgentSizes { arena: ByteSize(64 << 20), pool: ByteSize(FIRST_POOL_BYTES), moves: None };
    let mut cluster = Cluster::start(&settings.directory, 1, sizes)?;
    let empty = process_memory::anonymous_bytes(pid(&cluster)?)?;
    cluster.kill_agent(0);
    write_pool(&cluster.pool_path(0), bytes, entries)?;
    cluster.configure_pool(0, ByteSize(bytes))?;
    let (mut seconds, mut ready, mut per_block) = (Vec::new(), Vec::new(), Vec::new());
    for repetition in settings.rounds("recovery.open") {
        if repetition > 0 {
            cluster.kill_agent(0);
        }
        ready.push(cluster.restart_agent(0)?);
        let device = &status(&cluster)?["devices"][0];
        let blocks =
            device["recovered_blocks"].as_u64().context("the agent's status has no recovered_blocks")?;
        ensure!(blocks == entries as u64, "{blocks} of {entries} blocks were recovered");
        let took = device["recovery_us"].as_f64().context("the agent's status has no recovery_us")?;
        seconds.push(took / 1e6);
        await_announced(&cluster, entries as u64)?;
        let grown = process_memory::anonymous_bytes(pid(&cluster)?)?.saturating_sub(empty);
        per_block.push(grown as f64 / entries as f64);
    }
    drop(cluster);
    let resident = dram_bytes_per_block(settings)?;
    Ok(vec![
        Figure::absolute(
            format!("recovery.open_{entries}_entries"),
            median(seconds),
            "s",
            Target::AtMost(2.0),
        ),
        Figure::absolute("recovery.start_to_ready", median(ready), "s", Target::None),
        Figure::absolute("recovery.agent_bytes_per_block", median(per_block), "bytes", Target::AtMost(128.0)),
        Figure::absolute(
            "recovery.agent_bytes_per_dram_and_nvme_block",
            resident,
            "bytes",
            Target::AtMost(128.0),
        ),
    ])
}

/// Returns an agent's heap per block in DRAM and on NVMe, without the block's checksums: its growth after
/// [`DRAM_BATCHES_BEFORE`] batches, which allocate threads, buffers and first tables.
fn dram_bytes_per_block(settings: &Settings) -> anyhow::Result<f64> {
    let layout = one_page();
    let fixture = Fixture::start(settings, 1, &layout, sizes(DRAM_ARENA_MIB, DRAM_POOL_MIB))?;
    let client = &fixture.clients[0];
    let payload = payload(&layout);
    let save = |batches: std::ops::Range<u64>| -> anyhow::Result<u64> {
        let batches_saved = batches.end;
        for batch in batches {
            fixture::save_durable(client, &keys(900 + batch, BATCH_BLOCKS), BATCH_BLOCKS, &payload)?;
        }
        // Each block is announced twice: in DRAM and on NVMe.
        await_announced(&fixture.cluster, 2 * batches_saved * BATCH_BLOCKS as u64)?;
        process_memory::anonymous_bytes(pid(&fixture.cluster)?)
    };
    let before = save(0..DRAM_BATCHES_BEFORE)?;
    let after = save(DRAM_BATCHES_BEFORE..DRAM_BATCHES)?;
    let page = status(&fixture.cluster)?;
    let blocks = DRAM_BATCHES * BATCH_BLOCKS as u64;
    for counter in ["dram_blocks", "nvme_blocks"] {
        let held = page["counters"][counter].as_u64().context("the agent's status has no such counter")?;
        ensure!(held == blocks, "{counter}: {held} of {blocks}");
    }
    let measured = (DRAM_BATCHES - DRAM_BATCHES_BEFORE) * BATCH_BLOCKS as u64;
    let checksums = 4.0 * f64::from(layout.objects());
    Ok(after.saturating_sub(before) as f64 / measured as f64 - checksums)
}

fn status(cluster: &Cluster) -> anyhow::Result<serde_json::Value> {
    let page = http::get(&cluster.file().agents[0].admin, "/status")?;
    serde_json::from_str(&page).context("the agent's status is not JSON")
}

/// Waits until the directory has this many changes and none is queued, because queued changes use memory
/// temporarily.
fn await_announced(cluster: &Cluster, changes: u64) -> anyhow::Result<()> {
    let deadline = Instant::now() + fixture::PATIENCE;
    loop {
        let directory = &status(cluster)?["controlplane"];
        let number = |name: &str| {
            directory[name].as_u64().with_context(|| format!("the agent's status has no {name}"))
        };
        let (announced, queued) = (number("changes_announced")?, number("changes_queued")?);
        if announced >= changes && queued == 0 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "the directory has {announced} of {changes} changes after {:?}, {queued} are queued",
            fixture::PATIENCE
        );
        std::thread::sleep(ANNOUNCEMENT_POLL);
    }
}

fn pid(cluster: &Cluster) -> anyhow::Result<u32> {
    let pid = status(cluster)?["node"]["pid"].as_u64().context("the agent's status has no pid")?;
    u32::try_from(pid).context("invalid process id")
}

/// Formats a pool file of `bytes` and journals `entries` stored blocks into it.
fn write_pool(path: &Path, bytes: u64, entries: usize) -> anyhow::Result<()> {
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| format!("opening {}", path.display()))?;
    file.set_len(bytes).context("resizing the pool")?;
    let params = PoolParams {
        device_bytes: bytes,
        segment_bytes: SEGMENT_BYTES_DEFAULT,
        pool_uuid: *b"bench recovery..",
        device_index: 0,
        created_unix_us: 0,
    };
    for (offset, pages) in DevicePool::format(&params).context("formatting")? {
        file.write_all_at(&pages, offset).context("writing the pool")?;
    }
    let mut pool = open(&file, bytes)?;
    let layout = one_page();
    for batch in 0..entries.div_ceil(BATCH_BLOCKS) {
        let count = BATCH_BLOCKS.min(entries - batch * BATCH_BLOCKS);
        let blocks = keys(5 + batch as u64, count)
            .into_iter()
            .map(|key| block(&mut pool, key, layout))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let ops = pool.write_batch(BatchId(batch as u64), blocks);
        let stored = carry_out(&file, &mut pool, ops)?;
        ensure!(stored == count, "{stored} of {count} blocks of a batch were stored");
    }
    file.sync_all().context("syncing the pool")
}

fn open(file: &File, bytes: u64) -> anyhow::Result<DevicePool> {
    let mut recovery = Recovery::new(bytes);
    while let Some((offset, length)) = recovery.next_read() {
        let mut pages = vec![0; length];
        file.read_exact_at(&mut pages, offset).context("reading the pool")?;
        recovery.feed(&pages).context("opening the pool")?;
    }
    Ok(recovery.finish().context("opening the pool")?.0)
}

fn block(pool: &mut DevicePool, key: BlockKey, layout: Layout) -> anyhow::Result<BlockWrite> {
    let page = pool.allocate(layout.slot_bytes()).context("the pool is too small for the benchmark")?;
    Ok(BlockWrite {
        key,
        tenant: TenantId::DEFAULT,
        tenant_name: None,
        layout,
        content: ContentId::UNKNOWN,
        priority: 1,
        checksums: vec![0; layout.objects() as usize].into(),
        slot: ArenaSlot { region: RegionId(0), offset: 0, bytes: layout.slot_bytes() },
        page,
    })
}

/// Runs the operations except writes of blocks; returns the number of durable blocks.
fn carry_out(file: &File, pool: &mut DevicePool, mut ops: Vec<DeviceOp>) -> anyhow::Result<usize> {
    let mut stored = 0;
    while let Some(op) = ops.pop() {
        if let DeviceOpKind::WritePages { offset, bytes } = &op.kind {
            file.write_all_at(bytes, *offset).context("writing the journal")?;
        }
        let (more, events) = pool.done(op.token, Ok(()));
        ops.extend(more);
        for event in events {
            if let PoolEvent::BatchDone { stored: blocks, .. } = event {
                stored += blocks.len();
            }
        }
    }
    Ok(stored)
}
