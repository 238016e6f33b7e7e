//! A staged load of 128K tokens from DRAM, next to one copy of pinned memory of the same size.

use std::thread;
use std::time::Instant;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};

use super::{Goal, Measurement, Random, median};
use crate::copy::{KvLayout, KvShape};
use crate::gpu::{DeviceMemory, Gpu, GpuError, HostMemory, Partition, Stream};
use crate::kernels::{DeviceLayout, Kernels};
use crate::staged::{HostBlock, Staged, WINDOW_BYTES};

/// Blocks of 16 tokens in 128K tokens.
const BLOCKS: u32 = 8192;
/// Share of the bandwidth of one pinned copy.
const GOAL: f64 = 0.90;
/// Blocks that are copied back and compared.
const SAMPLE: usize = 64;

/// Host blocks of the load: regions of the arena, registered, with contents and their checksums.
pub(super) struct Source {
    _arena: Arena,
    pub(super) memories: Vec<HostMemory>,
    pub(super) expected: Vec<u32>,
    pub(super) shape: KvShape,
    blocks_per_region: u32,
}

/// The shape of Llama-3-8B with blocks of 16 tokens.
pub(super) fn llama(blocks: u32) -> KvShape {
    KvShape { layers: 32, parts: 2, blocks, object_bytes: 32 << 10 }
}

impl Source {
    /// Allocates, fills and registers `blocks` blocks.
    pub(super) fn new(gpu: &Gpu, blocks: u32) -> Result<Source, GpuError> {
        let shape = llama(blocks);
        let region_bytes = (1_u64 << 30).min(shape.bytes());
        let invalid =
            |error: &dyn std::fmt::Display| GpuError::Invalid(format!("no arena for the load: {error}"));
        let config = ArenaConfig { bytes: shape.bytes(), region_bytes, huge: HugePolicy::Prefer };
        let arena = Arena::new(&config).map_err(|error| invalid(&error))?;
        let spans: Vec<Span> = arena
            .regions()
            .iter()
            .map(|region| region.span(0, region.bytes()))
            .collect::<Result<_, _>>()
            .map_err(|error| invalid(&error))?;
        let expected = thread::scope(|scope| {
            let threads: Vec<_> = spans
                .iter()
                .enumerate()
                .map(|(seed, span)| scope.spawn(move || fill(span, seed as u64, shape.object_bytes as usize)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect::<Vec<_>>().concat()
        });
        if expected.len() as u64 != u64::from(blocks) * u64::from(shape.objects()) {
            return Err(GpuError::Invalid("cannot fill the arena: a thread ended early".to_owned()));
        }
        let memories = spans.iter().map(|span| HostMemory::register(gpu, span)).collect::<Result<_, _>>()?;
        let blocks_per_region = (region_bytes / shape.block_bytes()) as u32;
        Ok(Source { _arena: arena, memories, expected, shape, blocks_per_region })
    }

    /// Returns host blocks in the given order of their index; block `i` goes to page `pages[i]`.
    pub(super) fn blocks(&self, order: &[u32], pages: &[u32]) -> Vec<HostBlock<'_>> {
        let block = |&index: &u32| HostBlock {
            memory: &self.memories[(index / self.blocks_per_region) as usize],
            offset: u64::from(index % self.blocks_per_region) * self.shape.block_bytes(),
            block: pages[index as usize],
        };
        order.iter().map(block).collect()
    }

    /// Returns the expected checksums in the given order of blocks.
    pub(super) fn expected(&self, order: &[u32]) -> Vec<u32> {
        let objects = self.shape.objects() as usize;
        order
            .iter()
            .flat_map(|&index| self.expected[index as usize * objects..][..objects].to_vec())
            .collect()
    }
}

/// Fills a region with pseudo-random bytes and returns the checksum of each object.
fn fill(span: &Span, seed: u64, object_bytes: usize) -> Vec<u32> {
    let mut random = Random(seed);
    let mut contents = vec![0_u8; object_bytes];
    let mut checksums = Vec::with_capacity(span.len() / object_bytes);
    for offset in (0..span.len()).step_by(object_bytes) {
        random.fill(&mut contents);
        let target = span.slice(offset, object_bytes);
        match target.and_then(|target| target.copy_in_checked(&contents)) {
            Ok(checksum) => checksums.push(checksum),
            Err(_) => return Vec::new(),
        }
    }
    checksums
}

/// Returns a number of blocks that host and GPU have memory for, twice on the host.
fn fitting_blocks(gpu: &Gpu) -> Result<u32, GpuError> {
    let host = available_bytes();
    let device = gpu.free_bytes()?.saturating_sub(1 << 30);
    let mut blocks = BLOCKS;
    while blocks > 64 && (2 * llama(blocks).bytes() > host / 10 * 8 || llama(blocks).bytes() > device) {
        blocks /= 2;
    }
    Ok(blocks)
}

/// Bytes of host memory that this process can allocate: of the machine and of its control group.
fn available_bytes() -> u64 {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let meminfo = read("/proc/meminfo");
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kibibytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0);
    let number = |path: &str| read(path).trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .map(|limit| limit.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    group.unwrap_or(u64::MAX).min(kibibytes << 10)
}

/// Measures a verified load of 128K tokens (16 GiB in blocks of 2 MiB, objects of 32 KiB) from registered DRAM into
/// scattered pages, next to one copy of as much pinned memory. Less memory is used where less is free.
pub fn staged_load(
    kernels: &Kernels,
    partition: &Partition,
    repetitions: usize,
) -> Result<Vec<Measurement>, GpuError> {
    let gpu = kernels.gpu();
    let blocks = fitting_blocks(gpu)?;
    let source = Source::new(gpu, blocks)?;
    let bytes = source.shape.bytes();
    let pages = DeviceMemory::new(gpu, bytes)?;
    let layout = DeviceLayout::new(&KvLayout::split(source.shape)?, &pages)?;
    let mut staged = Staged::new(kernels, partition, source.shape.block_bytes(), WINDOW_BYTES)?;
    let pinned = HostMemory::new(gpu, bytes)?;
    let stream = Stream::new(gpu)?;
    let order = Random(1).permutation(blocks);
    let targets = Random(2).permutation(blocks);
    let host_blocks = source.blocks(&order, &targets);
    let expected = source.expected(&order);
    let (mut ratios, mut loads, mut copies, mut unchecked) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for repetition in 0..=repetitions {
        let began = Instant::now();
        stream.copy_to_device((&pinned, 0), (&pages, 0), bytes)?;
        stream.synchronize()?;
        let copy = began.elapsed().as_secs_f64();
        let began = Instant::now();
        staged.load(&layout, &host_blocks, &[])?;
        let plain = began.elapsed().as_secs_f64();
        let began = Instant::now();
        let result = staged.load(&layout, &host_blocks, &expected)?;
        let load = began.elapsed().as_secs_f64();
        if let Some(index) = result.mismatches.iter().position(|&count| count > 0) {
            return Err(GpuError::Invalid(format!("block {index} of the load has wrong checksums")));
        }
        if repetition > 0 {
            ratios.push(copy / load);
            loads.push(bytes as f64 / load / 1e9);
            copies.push(bytes as f64 / copy / 1e9);
            unchecked.push(bytes as f64 / plain / 1e9);
        }
    }
    compare_sample(&mut staged, &layout, &host_blocks, &pinned)?;
    let scaled = if blocks == BLOCKS { "" } else { ", scaled down to the free memory" };
    let detail = format!(
        "{} blocks of 2 MiB{scaled}, {} SMs for I/O by {}, {repetitions} repetitions",
        blocks,
        partition.io_sms(),
        partition.method()
    );
    Ok(vec![
        Measurement::new("one pinned copy", median(copies), "GB/s", &detail),
        Measurement::new("staged load, verified", median(loads), "GB/s", &detail),
        Measurement::new("staged load, not verified", median(unchecked), "GB/s", &detail),
        Measurement::new("staged load / pinned copy", median(ratios), "ratio", &detail)
            .with_goal(Goal::AtLeast(GOAL)),
    ])
}

/// Saves some of the loaded blocks to other memory and compares every byte with their source.
fn compare_sample(
    staged: &mut Staged<'_>,
    layout: &DeviceLayout,
    loaded: &[HostBlock<'_>],
    target: &HostMemory,
) -> Result<(), GpuError> {
    let bytes = layout.layout().slot_bytes();
    let step = (loaded.len() / SAMPLE).max(1);
    let sample: Vec<&HostBlock<'_>> = loaded.iter().step_by(step).collect();
    let saved: Vec<HostBlock<'_>> = sample
        .iter()
        .enumerate()
        .map(|(index, block)| HostBlock { memory: target, offset: index as u64 * bytes, block: block.block })
        .collect();
    staged.save(layout, &saved)?;
    let (mut expected, mut found) = (vec![0; bytes as usize], vec![0; bytes as usize]);
    for (source, copy) in sample.iter().zip(&saved) {
        source.memory.read(source.offset, &mut expected)?;
        copy.memory.read(copy.offset, &mut found)?;
        if expected != found {
            return Err(GpuError::Invalid(format!("block {} has other bytes than its source", source.block)));
        }
    }
    Ok(())
}
