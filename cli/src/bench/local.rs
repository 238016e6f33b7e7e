//! DRAM hits into another process's scattered KV memory, compared with a single-thread memcpy of the same
//! pieces.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_buffers::PageBuffer;
use reprise_client::{Client, LoadRequest, Scope, Verify};
use reprise_policy::{BlockKey, Layout};

use reprise_testkit::paged_kv::{PagedKv, PhysicalBlock};

use reprise_testkit::bench::fixture::{Fixture, PATIENCE, fill, keys, payload, sizes};
use reprise_testkit::bench::report::{Figure, Target, paired};
use reprise_testkit::bench::{Settings, fixture, llama_3_8b};

/// Blocks per repetition: 128 × 2 MiB = 256 MiB, much larger than any cache.
const BLOCKS: usize = 128;

/// Blocks per load call.
const WINDOW_BLOCKS: usize = 32;

/// An engine's memory with the blocks of a request.
struct Scattered {
    kv: PagedKv,
    table: Vec<PhysicalBlock>,
}

impl Scattered {
    fn new(layout: &Layout) -> anyhow::Result<Scattered> {
        let mut kv = PagedKv::new(layout, BLOCKS)?;
        let table = kv.allocate(BLOCKS).context("the engine's memory has too few blocks")?;
        Ok(Scattered { kv, table })
    }

    /// Returns the objects of one block, in payload order.
    fn block(&mut self, block: usize) -> Vec<&mut [u8]> {
        self.kv.block_mut(self.table[block])
    }
}

/// Sizes of each agent.
pub(super) const ARENA_MIB: u64 = 512;
pub(super) const POOL_MIB: u64 = 1024;

pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let layout = llama_3_8b();
    let fixture = Fixture::start(settings, 1, &layout, sizes(ARENA_MIB, POOL_MIB))?;
    let client = &fixture.clients[0];
    let keys = keys(1, BLOCKS);
    let payload = payload(&layout);
    fixture::commit(client, fill(client, &keys, &payload)?)?;
    let mut source = PageBuffer::new(BLOCKS * payload.len()).context("memory of the reference")?;
    source.fill(0x77);
    let mut memory = Scattered::new(&layout)?;
    let mut figures = Vec::new();
    for (name, verify, target) in
        [("local.dram_hit_unverified", Verify::Off, 0.95), ("local.dram_hit_verified", Verify::Always, 0.75)]
    {
        let mut target_memory = Scattered::new(&layout)?;
        let figure = paired(
            settings.rounds(name),
            || Ok(gigabytes_per_second(&source, bare_copy(&source, &mut memory))),
            || {
                let elapsed = hits(client, &keys, &mut target_memory, verify)?;
                Ok(gigabytes_per_second(&source, elapsed))
            },
        )?;
        let reference = "single-thread memcpy of the same objects";
        figures.push(Figure::relative(name, figure, "GB/s", (reference, Target::RatioAtLeast(target))));
        let loaded = target_memory.block(BLOCKS - 1).concat();
        ensure!(loaded == payload, "loaded bytes differ from those saved");
    }
    Ok(figures)
}

fn hits(
    client: &Client,
    keys: &[BlockKey],
    memory: &mut Scattered,
    verify: Verify,
) -> anyhow::Result<Duration> {
    let mut elapsed = Duration::ZERO;
    for (window, keys) in keys.chunks(WINDOW_BLOCKS).enumerate() {
        let request = LoadRequest { scope: Scope::Local, ..LoadRequest::new(keys.to_vec()) };
        let started = Instant::now();
        let load = client.load(&request).context("load")?.with_verify(verify);
        load.wait_layer(client.layout().layers() - 1, PATIENCE).context("waiting for the last layer")?;
        elapsed += started.elapsed();
        for block in 0..keys.len() {
            // The list of destinations is not timed, as for the reference.
            let mut objects = memory.block(window * WINDOW_BLOCKS + block);
            let started = Instant::now();
            load.copy_block_scattered(block, &mut objects)
                .with_context(|| format!("copying block {block}"))?;
            elapsed += started.elapsed();
        }
    }
    Ok(elapsed)
}

fn bare_copy(source: &[u8], memory: &mut Scattered) -> Duration {
    let block_bytes = source.len() / BLOCKS;
    let mut elapsed = Duration::ZERO;
    for (block, payload) in source.chunks(block_bytes).enumerate() {
        let mut objects = memory.block(block);
        let started = Instant::now();
        let mut rest = payload;
        for object in &mut objects {
            let (head, tail) = rest.split_at(object.len());
            object.copy_from_slice(head);
            rest = tail;
        }
        elapsed += started.elapsed();
    }
    elapsed
}

fn gigabytes_per_second(source: &[u8], elapsed: Duration) -> f64 {
    source.len() as f64 / elapsed.as_secs_f64() / 1e9
}
