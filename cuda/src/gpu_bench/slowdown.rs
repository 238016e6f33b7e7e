//! How much I/O slows computation: layers of a model while loads run, with and without limits on the loads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use super::staged::Source;
use super::{Measurement, Random, median};
use crate::copy::KvLayout;
use crate::gpu::{DeviceMemory, GpuError, Partition, SmShare, Stream};
use crate::kernels::{DeviceLayout, Kernels, Layer, LayerShape};
use crate::staged::{Staged, WINDOW_BYTES};

/// Input and prefix tokens of the layers.
const INPUT: u32 = 2048;
const PREFIX: u32 = 8192;
/// Blocks that the loads copy again and again: 1 GiB.
const BLOCKS: u32 = 512;

/// Loads that run while layers are measured.
struct Load<'a> {
    staged: Staged<'a>,
    layout: DeviceLayout,
    source: &'a Source,
}

/// Measures the time of a layer alone, and with staged loads from DRAM without a pause: on all SMs, on the SMs of
/// `share` next to computation on all SMs, and on the SMs of `share` with computation on the other SMs.
pub fn slowdown(kernels: &Kernels, share: SmShare, runs: usize) -> Result<Vec<Measurement>, GpuError> {
    let gpu = kernels.gpu();
    let source = Source::new(gpu, BLOCKS)?;
    let pages = DeviceMemory::new(gpu, source.shape.bytes())?;
    let layer = Layer::new(kernels, LayerShape::LLAMA_3_8B, INPUT, PREFIX)?;
    let stream = Stream::new(gpu)?;
    let load = |partition: &Partition| {
        Ok::<Load<'_>, GpuError>(Load {
            staged: Staged::new(kernels, partition, source.shape.block_bytes(), WINDOW_BYTES)?,
            layout: DeviceLayout::new(&KvLayout::split(source.shape)?, &pages)?,
            source: &source,
        })
    };
    let all = Partition::with_bounded_grid(gpu, SmShare::Count(gpu.info().sms), &"all SMs");
    let limited = Partition::new(gpu, share)?;
    let others = limited.compute_stream()?;
    let cases = [
        ("all SMs", &all, &stream),
        ("limited SMs", &limited, &stream),
        ("limited SMs, computation on the others", &limited, &others),
    ];
    let mut alone = Vec::new();
    let (mut times, mut rates) = (vec![Vec::new(); cases.len()], vec![Vec::new(); cases.len()]);
    for _ in 0..3 {
        alone.push(layer_ms(&layer, &stream, runs)?);
        for (index, (_, partition, stream)) in cases.iter().enumerate() {
            let (time, rate) = with_load(&load(partition)?, &layer, stream, runs)?;
            times[index].push(time);
            rates[index].push(rate);
        }
    }
    let alone = median(alone);
    let tera = layer.shape().operations(INPUT, PREFIX) / alone / 1e9;
    let detail =
        format!("{INPUT} input and {PREFIX} prefix tokens, {tera:.0} TFLOP/s, {runs} layers, 3 times");
    let limit = format!("{} SMs by {}", limited.io_sms(), limited.method());
    let mut measurements = vec![Measurement::new("layer alone", alone, "ms", detail)];
    for ((name, ..), (times, rates)) in cases.iter().zip(times.into_iter().zip(rates)) {
        let percent = (median(times) / alone - 1.0) * 100.0;
        let detail = format!("loads at {:.1} GB/s; limit: {limit}", median(rates));
        measurements.push(Measurement::new(
            format!("layers slowed by loads on {name}"),
            percent,
            "%",
            detail,
        ));
    }
    Ok(measurements)
}

/// Returns the median time of a layer in milliseconds.
fn layer_ms(layer: &Layer<'_>, stream: &Stream, runs: usize) -> Result<f64, GpuError> {
    let times = layer.time(stream, INPUT, PREFIX, runs)?;
    Ok(median(times.into_iter().map(|time| time.as_secs_f64() * 1e3).collect()))
}

/// Returns the median time of a layer in milliseconds while loads run, and the bandwidth of the loads in GB/s.
fn with_load(
    load: &Load<'_>,
    layer: &Layer<'_>,
    stream: &Stream,
    runs: usize,
) -> Result<(f64, f64), GpuError> {
    let order = Random(3).permutation(BLOCKS);
    let blocks = load.source.blocks(&order, &order);
    let expected = load.source.expected(&order);
    let (ended, loads) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let loader = scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                load.staged.load(&load.layout, &blocks, &expected)?;
                loads.fetch_add(1, Ordering::AcqRel);
            }
            Ok::<(), GpuError>(())
        });
        // The loads run from the first layer on.
        while loads.load(Ordering::Acquire) == 0 && !loader.is_finished() {
            thread::yield_now();
        }
        let (began, before) = (Instant::now(), loads.load(Ordering::Acquire));
        let time = layer_ms(layer, stream, runs);
        let count = loads.load(Ordering::Acquire) - before;
        let seconds = began.elapsed().as_secs_f64();
        ended.store(true, Ordering::Release);
        match loader.join() {
            Ok(result) => result?,
            Err(_) => return Err(GpuError::Invalid("the thread of the loads panicked".to_owned())),
        }
        Ok((time?, count as f64 * load.source.shape.bytes() as f64 / seconds / 1e9))
    })
}
