//! How much I/O slows computation: layers of a model while loads run, with and without limits on the loads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::staged::Source;
use super::{Measurement, Random, median};
use crate::copy::KvLayout;
use crate::gpu::{DeviceMemory, GpuError, Partition, SmShare, Stream};
use crate::kernels::{DeviceLayout, Kernels, Layer, LayerShape};
use crate::staged::{HostBlock, Staged, WINDOW_BYTES};

/// Input and prefix tokens of the layers.
const INPUT: u32 = 2048;
const PREFIX: u32 = 8192;
/// Blocks that the loads copy again and again: 512 MiB.
const BLOCKS: u32 = 256;
/// Loads that measure the bandwidth without layers.
const LOADS_ALONE: usize = 5;
/// Share of the bandwidth without layers that loads must reach next to them, or nothing was measured.
const LEAST_SHARE: f64 = 0.25;

/// Loads that run while layers are measured. They allocate and release nothing after the first one.
struct Load<'a> {
    staged: Staged<'a>,
    layout: DeviceLayout,
    blocks: Vec<HostBlock<'a>>,
    expected: Vec<u32>,
    bytes: u64,
}

/// Layers and loads that ran at the same time.
struct Together {
    /// Median time of a layer in milliseconds.
    layer_ms: f64,
    /// Bandwidth of the loads while the layers ran, in GB/s.
    rate: f64,
    /// Bytes of the loads in that time.
    bytes: f64,
}

/// One case: loads on some SMs, and layers on a stream.
struct Case<'a> {
    name: &'static str,
    load: Load<'a>,
    stream: &'a Stream,
    alone: Vec<f64>,
    together: Vec<Together>,
}

/// Measures the time of a layer alone, and with staged loads from DRAM without a pause: on all SMs, on the SMs of
/// `share` next to computation on all SMs, and on the SMs of `share` with computation on the other SMs.
///
/// # Errors
/// Failures of the GPU; loads that reach less next to the layers than a quarter of their bandwidth without them.
pub fn slowdown(kernels: &Kernels, share: SmShare, runs: usize) -> Result<Vec<Measurement>, GpuError> {
    let gpu = kernels.gpu();
    let source = Source::new(gpu, BLOCKS)?;
    let pages = DeviceMemory::new(gpu, source.shape.bytes())?;
    let layer = Layer::new(kernels, LayerShape::LLAMA_3_8B, INPUT, PREFIX)?;
    let stream = Stream::new(gpu)?;
    let all = Partition::unlimited(gpu);
    let limited = Partition::new(gpu, share)?;
    let others = limited.compute_stream()?;
    let order = Random(3).permutation(BLOCKS);
    let case = |name, partition: &Partition, stream| {
        let load = Load {
            staged: Staged::new(kernels, partition, source.shape.block_bytes(), WINDOW_BYTES)?,
            layout: DeviceLayout::new(&KvLayout::split(source.shape)?, &pages)?,
            blocks: source.blocks(&order, &order),
            expected: source.expected(&order),
            bytes: source.shape.bytes(),
        };
        Ok::<Case<'_>, GpuError>(Case { name, load, stream, alone: Vec::new(), together: Vec::new() })
    };
    let bounded = Partition::with_bounded_grid(gpu, share, &"next to a green context");
    let mut cases = [
        case("all SMs, with the priority of computation", &all, &stream)?,
        case("limited SMs by a bounded grid", &bounded, &stream)?,
        case("limited SMs", &limited, &stream)?,
        case("limited SMs, computation on the others", &limited, &others)?,
    ];
    let mut alone = Vec::new();
    for _ in 0..3 {
        alone.push(layer_ms(&layer, &stream, runs)?);
        for case in &mut cases {
            case.alone.push(case.load.rate_alone()?);
            case.together.push(together(&mut case.load, &layer, case.stream, runs)?);
        }
    }
    let alone = median(alone);
    let tera = layer.shape().operations(INPUT, PREFIX) / alone / 1e9;
    let detail =
        format!("{INPUT} input and {PREFIX} prefix tokens, {tera:.0} TFLOP/s, {runs} layers, 3 times");
    let limit = format!("{} SMs by {}", limited.io_sms(), limited.method());
    let mut measurements = vec![Measurement::new("layer alone", alone, "ms", detail)];
    for case in &cases {
        measurements.push(case.measurement(alone, &limit)?);
    }
    Ok(measurements)
}

impl Case<'_> {
    /// Returns the slowdown of layers that take `alone` milliseconds without loads. Errors: loads that hardly ran.
    fn measurement(&self, alone: f64, limit: &str) -> Result<Measurement, GpuError> {
        let of = |value: fn(&Together) -> f64| median(self.together.iter().map(value).collect());
        let (rate, rate_alone) = (of(|one| one.rate), median(self.alone.clone()));
        check_rate(self.name, rate, rate_alone)?;
        let detail = format!(
            "verified loads from DRAM without a pause, {:.1} GB at {rate:.1} GB/s next to the layers, {rate_alone:.1} GB/s without them; limit: {limit}",
            of(|one| one.bytes) / 1e9
        );
        let percent = (of(|one| one.layer_ms) / alone - 1.0) * 100.0;
        Ok(Measurement::new(format!("layers slowed by loads on {}", self.name), percent, "%", detail))
    }
}

impl Load<'_> {
    /// Loads all blocks once.
    fn run(&mut self) -> Result<(), GpuError> {
        let result = self.staged.load(&self.layout, &self.blocks, &self.expected)?;
        match result.mismatches.iter().position(|&count| count > 0) {
            Some(index) => Err(GpuError::Invalid(format!("block {index} of a load has wrong checksums"))),
            None => Ok(()),
        }
    }

    /// Returns the bandwidth of loads without layers in GB/s.
    fn rate_alone(&mut self) -> Result<f64, GpuError> {
        // The first one allocates.
        self.run()?;
        let began = Instant::now();
        for _ in 0..LOADS_ALONE {
            self.run()?;
        }
        Ok(LOADS_ALONE as f64 * self.bytes as f64 / began.elapsed().as_secs_f64() / 1e9)
    }
}

/// Errors unless loads reached a quarter of their bandwidth alone: otherwise the layers ran without them.
fn check_rate(name: &str, rate: f64, alone: f64) -> Result<(), GpuError> {
    if rate >= LEAST_SHARE * alone {
        return Ok(());
    }
    Err(GpuError::Invalid(format!(
        "loads on {name} reached {rate:.1} GB/s next to the layers and {alone:.1} GB/s without them: less than a quarter, so the time of the layers does not show what loads cost"
    )))
}

/// Returns the median time of a layer in milliseconds.
fn layer_ms(layer: &Layer<'_>, stream: &Stream, runs: usize) -> Result<f64, GpuError> {
    let times = layer.time(stream, INPUT, PREFIX, runs)?;
    Ok(median(times.into_iter().map(|time| time.as_secs_f64() * 1e3).collect()))
}

/// Measures layers while loads run.
fn together(
    load: &mut Load<'_>,
    layer: &Layer<'_>,
    stream: &Stream,
    runs: usize,
) -> Result<Together, GpuError> {
    let (began, ended, has_begun) = (Instant::now(), AtomicBool::new(false), AtomicBool::new(false));
    let bytes = load.bytes as f64;
    thread::scope(|scope| {
        let loader = scope.spawn(|| {
            let mut ends = Vec::new();
            while !ended.load(Ordering::Acquire) {
                load.run()?;
                ends.push(began.elapsed());
                has_begun.store(true, Ordering::Release);
            }
            Ok::<Vec<Duration>, GpuError>(ends)
        });
        // The loads run from the first layer on.
        while !has_begun.load(Ordering::Acquire) && !loader.is_finished() {
            thread::yield_now();
        }
        let from = began.elapsed();
        let time = layer_ms(layer, stream, runs);
        let to = began.elapsed();
        ended.store(true, Ordering::Release);
        let ends = match loader.join() {
            Ok(result) => result?,
            Err(_) => return Err(GpuError::Invalid("the thread of the loads panicked".to_owned())),
        };
        let bytes = bytes * loads_within(&ends, from, to);
        Ok(Together { layer_ms: time?, rate: bytes / (to - from).as_secs_f64() / 1e9, bytes })
    })
}

/// Returns how many loads ran from one time to another, with fractions. Each load begins when the one before has ended,
/// the first one at time 0.
fn loads_within(ends: &[Duration], from: Duration, to: Duration) -> f64 {
    let mut begin = Duration::ZERO;
    let mut count = 0.0;
    for &end in ends {
        let shared = end.min(to).saturating_sub(begin.max(from));
        if end > begin {
            count += shared.as_secs_f64() / (end - begin).as_secs_f64();
        }
        begin = end;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_count_by_the_part_that_lies_within() {
        let at = Duration::from_millis;
        let ends = [at(10), at(20), at(60)];
        assert!((loads_within(&ends, at(10), at(60)) - 2.0).abs() < 1e-9);
        assert!((loads_within(&ends, at(15), at(30)) - 0.75).abs() < 1e-9);
        assert_eq!(loads_within(&ends, at(60), at(70)), 0.0);
        assert_eq!(loads_within(&[], at(0), at(10)), 0.0);
    }

    #[test]
    fn a_slowdown_by_loads_that_hardly_ran_is_an_error() {
        check_rate("all SMs", 12.5, 50.0).expect("a quarter");
        let error = check_rate("all SMs", 3.5, 50.0).expect_err("less");
        assert!(error.to_string().contains("3.5 GB/s next to the layers and 50.0 GB/s"), "{error}");
    }
}
