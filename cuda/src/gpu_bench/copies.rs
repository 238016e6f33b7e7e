//! Bandwidth of the copy kernels, next to the GPU's own copy of contiguous memory.

use std::time::{Duration, Instant};

use super::{Goal, Measurement, Random, median};
use crate::copy::{CopyJob, CopyKind, HostCopy, KvLayout, KvShape, copy_on_host};
use crate::gpu::{DeviceMemory, Event, GpuError, Stream};
use crate::kernels::{DeviceLayout, Kernels, Slots};

/// Tokens of a block, and the bytes of one token of one part of a layer of Llama-3-8B: 8 heads, 128 values, bf16.
const TOKENS: u32 = 16;
const TOKEN_BYTES: u32 = 8 * 128 * 2;
/// Share of the bandwidth of a contiguous copy that gather and scatter reach at least.
const GOAL: f64 = 0.85;

/// One case: a layout, and whether its copies have a goal.
struct Case {
    name: &'static str,
    layout: KvLayout,
    goal: bool,
}

fn cases(blocks: u32) -> Result<Vec<Case>, GpuError> {
    let llama = KvShape { layers: 32, parts: 2, blocks, object_bytes: TOKENS * TOKEN_BYTES };
    let parallel = KvShape { object_bytes: llama.object_bytes / 8, blocks: blocks * 8, ..llama };
    Ok(vec![
        Case { name: "split K/V, 32 KiB", layout: KvLayout::split(llama)?, goal: true },
        Case { name: "block-major, 32 KiB", layout: KvLayout::block_major(llama)?, goal: true },
        Case { name: "layer-major, 32 KiB", layout: KvLayout::layer_major(llama)?, goal: true },
        Case { name: "split K/V, 4 KiB (8 ranks)", layout: KvLayout::split(parallel)?, goal: false },
        Case { name: "MLA, 18 KiB", layout: KvLayout::mla(61, blocks, TOKENS * 576 * 2)?, goal: false },
    ])
}

/// Measures all copy kernels at 16-token blocks, next to a contiguous copy of the same size in GPU memory.
///
/// Needs about 4.3 GiB of GPU memory; less is used where less is free.
pub fn device_copies(kernels: &Kernels, repetitions: usize) -> Result<Vec<Measurement>, GpuError> {
    let gpu = kernels.gpu();
    let mut blocks = 1024;
    while blocks > 16 && u64::from(blocks) * (5 << 20) > gpu.free_bytes()? {
        blocks /= 2;
    }
    let stream = Stream::new(gpu)?;
    let mut measurements = Vec::new();
    for case in cases(blocks)? {
        let bytes = u64::from(case.layout.blocks()) * case.layout.slot_bytes();
        let pages = DeviceMemory::new(gpu, bytes)?;
        let slots = DeviceMemory::new(gpu, bytes)?;
        stream.fill((&pages, 0), bytes, 0x5A)?;
        stream.fill((&slots, 0), bytes, 0xA5)?;
        let order = Random(blocks.into()).permutation(case.layout.blocks());
        let job = |(slot, block): (usize, u32)| CopyJob { block, slot: slot as u32 };
        let jobs: Vec<CopyJob> = order.into_iter().enumerate().map(job).collect();
        let table = DeviceLayout::new(&case.layout, &pages)?;
        let all = Slots::on_gpu(&slots, case.layout.slot_bytes(), case.layout.blocks())?;
        let jobs = table.jobs(all, &jobs, 0..case.layout.objects(), &[])?;
        let mut ratios = vec![Vec::new(); CopyKind::ALL.len()];
        let mut bandwidths = ratios.clone();
        let mut references = Vec::new();
        for repetition in 0..=repetitions {
            let reference = timed(&stream, || stream.copy_on_device((&pages, 0), (&slots, 0), bytes))?;
            for (index, kind) in CopyKind::ALL.into_iter().enumerate() {
                let taken = timed(&stream, || kernels.copy(&stream, kind, &jobs))?;
                // The first repetition warms up.
                if repetition > 0 {
                    ratios[index].push(reference.as_secs_f64() / taken.as_secs_f64());
                    bandwidths[index].push(bytes as f64 / taken.as_secs_f64() / 1e9);
                }
            }
            references.push(bytes as f64 / reference.as_secs_f64() / 1e9);
        }
        let detail = format!("{} MiB, {repetitions} repetitions", bytes >> 20);
        let name = format!("contiguous copy, {}", case.name);
        measurements.push(Measurement::new(name, median(references), "GB/s", &detail));
        for (index, kind) in CopyKind::ALL.into_iter().enumerate() {
            let name = format!("{kind:?}, {}", case.name);
            let bandwidth = median(std::mem::take(&mut bandwidths[index]));
            let detail = format!("{bandwidth:.0} GB/s, {detail}");
            let ratio = Measurement::new(name, median(std::mem::take(&mut ratios[index])), "ratio", detail);
            let with_goal = case.goal && matches!(kind, CopyKind::Gather | CopyKind::Scatter);
            measurements.push(if with_goal { ratio.with_goal(Goal::AtLeast(GOAL)) } else { ratio });
        }
    }
    Ok(measurements)
}

/// Returns the GPU time of the work that `enqueue` enqueues.
pub(super) fn timed(
    stream: &Stream,
    enqueue: impl FnOnce() -> Result<(), GpuError>,
) -> Result<Duration, GpuError> {
    let (before, after) = (Event::new(stream.gpu())?, Event::new(stream.gpu())?);
    before.record(stream)?;
    enqueue()?;
    after.record(stream)?;
    stream.synchronize()?;
    after.since(&before)
}

/// Measures the host build of the copy kernels on one thread, next to a plain copy of the same bytes.
pub fn host_copies(repetitions: usize) -> Result<Vec<Measurement>, GpuError> {
    let shape = KvShape { layers: 32, parts: 2, blocks: 16, object_bytes: TOKENS * TOKEN_BYTES };
    let layout = KvLayout::split(shape)?;
    let bytes = shape.bytes() as usize;
    let (mut pages, mut slots) = (vec![0x5A_u8; bytes], vec![0xA5_u8; bytes]);
    let order = Random(16).permutation(shape.blocks);
    let job = |(slot, block): (usize, u32)| CopyJob { block, slot: slot as u32 };
    let jobs: Vec<CopyJob> = order.into_iter().enumerate().map(job).collect();
    let mut measurements = Vec::new();
    let mut results = vec![Vec::new(); CopyKind::ALL.len()];
    let mut ratios = results.clone();
    for repetition in 0..=repetitions {
        let began = Instant::now();
        std::hint::black_box(&mut slots).copy_from_slice(std::hint::black_box(&pages));
        let reference = began.elapsed().as_secs_f64();
        for (index, kind) in CopyKind::ALL.into_iter().enumerate() {
            let memory = HostCopy { pages: &mut pages, slots: &mut slots, expected: &[] };
            let began = Instant::now();
            copy_on_host(kind, &layout, memory, &jobs, 0..layout.objects())?;
            let taken = began.elapsed().as_secs_f64();
            if repetition > 0 {
                results[index].push(bytes as f64 / taken / 1e9);
                ratios[index].push(reference / taken);
            }
        }
    }
    for (index, kind) in CopyKind::ALL.into_iter().enumerate() {
        let ratio = median(std::mem::take(&mut ratios[index]));
        let bandwidth = median(std::mem::take(&mut results[index]));
        let detail = format!("host build, {ratio:.2} of a plain copy, {} MiB, one thread", bytes >> 20);
        measurements.push(Measurement::new(format!("{kind:?}"), bandwidth, "GB/s", detail));
    }
    Ok(measurements)
}
