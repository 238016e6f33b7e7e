//! `reprise bench ring`: contexts per second of a ring through the emulated controller.
//!
//! The host build runs on one core: the thread of the ring, that of the controller and that of the caller. With a GPU,
//! the kernel runs too, on at most 8 SMs; the controller then has several threads of the CPU.

use std::time::Duration;

use anyhow::Context as _;
use reprise_cuda::gpu::{Gpu, GpuError, Partition, SmShare};
use reprise_cuda::kernels::Kernels;
use reprise_cuda::ring::{self, BenchSettings, RingFigures};
use reprise_cuda::store::{MoveError, StreamCost, stream_cost};
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::{Figure, Spread, Target, median};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::device::{Device, announce};

/// Contexts per second that the host build reaches at least on one core.
const HOST_GOAL: f64 = 2e6;
/// Contexts per second that the kernel reaches at least.
const GPU_GOAL: f64 = 5e6;
const IO_SMS: SmShare = SmShare::Count(8);
/// Duration of one measurement.
const DURATION: Duration = Duration::from_millis(300);
/// Numbers of queue pairs of the measurements on a GPU: the best one counts.
const GPU_QUEUES: [usize; 3] = [8, 16, 32];

/// Measures the host build, and the kernel on the first GPU if there is one.
pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let opened = Gpu::open(0).and_then(|gpu| Ok((Kernels::load(&gpu)?, gpu)));
    let (device, code, reason) = match &opened {
        Ok((_, gpu)) => (gpu.info().name.clone(), "kernel and host build", None),
        Err(error) if error.is_unavailable() => ("none".to_owned(), "host build", Some(error.to_string())),
        Err(error) => anyhow::bail!("{error}"),
    };
    announce(settings, Device { benchmark: "ring", device, code, reason });
    let mut figures = host(settings)?;
    figures.extend(streams("host", None, settings)?);
    if let Ok((kernels, gpu)) = opened {
        let partition = Partition::new(&gpu, IO_SMS)?;
        figures.push(on_gpu(&kernels, &partition)?);
        figures.extend(streams("gpu", Some((&kernels, &partition)), settings)?);
    }
    Ok(figures)
}

/// Measures sizes and descriptions of contexts on one core.
fn host(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let cases = [(512, true, Target::AtLeast(HOST_GOAL)), (512, false, Target::None)];
    let larger = [(4096, true, Target::None), (4096, false, Target::None)];
    let mut figures = Vec::new();
    for (context_bytes, sgl, target) in cases.into_iter().chain(larger) {
        let bench = BenchSettings { context_bytes, sgl, duration: DURATION, ..BenchSettings::default() };
        let mut samples = Vec::new();
        let mut last = None;
        for _ in settings.rounds("ring") {
            let measured = on_one_core(bench)?;
            samples.push(measured.contexts_per_second());
            last = Some(measured);
        }
        let detail = last.map(|one| detail(&one)).unwrap_or_default();
        let format = if sgl { "SGL" } else { "PRP" };
        let name = format!("host: reads of {context_bytes} bytes by {format} on one core ({detail})");
        let spread = Spread::of(&samples);
        let figure = Figure::absolute(name, median(samples), "contexts/s", target);
        figures.push(Figure { spread, ..figure });
    }
    Ok(figures)
}

/// Measures requests of one block with and without a stream.
fn streams(
    prefix: &str,
    gpu: Option<(&Kernels, &Partition)>,
    settings: &Settings,
) -> anyhow::Result<Vec<Figure>> {
    let costs = match stream_cost(gpu, settings.repetitions) {
        Ok(costs) => costs,
        // The other figures do not need streams.
        Err(MoveError::Gpu(error @ GpuError::NoStreamWaits { .. })) => {
            tracing::warn!(%error, "order by streams is not measured");
            return Ok(Vec::new());
        }
        Err(error) => return Err(error.into()),
    };
    let figures = costs.into_iter().flat_map(|StreamCost { mode, submit_ns, total_ns }| {
        [("request", total_ns), ("submission of a request", submit_ns)].map(|(what, value)| {
            let name = format!("{prefix}: {what} of one block, {}", mode.text());
            Figure::absolute(name, value, "ns", Target::None)
        })
    });
    Ok(figures.collect())
}

fn detail(figures: &RingFigures) -> String {
    format!(
        "{:.0} contexts for each doorbell, {} KiB of descriptors",
        figures.contexts as f64 / figures.doorbells.max(1) as f64,
        figures.descriptor_bytes >> 10
    )
}

/// Measures in a thread that is bound to one core; the threads that it starts inherit that.
fn on_one_core(bench: BenchSettings) -> anyhow::Result<RingFigures> {
    let measure = move || {
        let allowed = sched_getaffinity(None)?;
        let core = (0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).context("no core is allowed")?;
        let mut only = CpuSet::new();
        only.set(core);
        sched_setaffinity(None, &only).context("cannot bind a thread to a core")?;
        Ok(ring::measure(&bench)?)
    };
    std::thread::spawn(measure).join().expect("a measurement does not panic")
}

fn on_gpu(kernels: &Kernels, partition: &Partition) -> anyhow::Result<Figure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut most, mut name) = (0.0, String::new());
    for queues in GPU_QUEUES {
        let controller_threads = queues.min(cores.saturating_sub(2)).max(1);
        let bench = BenchSettings { queues, controller_threads, ..BenchSettings::default() };
        let figures = ring::measure_on_gpu(kernels, partition, &bench)?;
        if figures.contexts_per_second() > most {
            most = figures.contexts_per_second();
            name = format!(
                "gpu: reads of 512 bytes by SGL, {queues} queue pairs on {} SMs by {}, controller with \
                 {controller_threads} threads ({})",
                partition.io_sms(),
                partition.method(),
                detail(&figures)
            );
        }
    }
    Ok(Figure::absolute(name, most, "contexts/s", Target::AtLeast(GPU_GOAL)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_on_one_core_ends_contexts() {
        let bench = BenchSettings { duration: Duration::from_millis(20), ..BenchSettings::default() };
        let figures = on_one_core(bench).expect("it runs");
        assert!(figures.contexts >= 2048 && figures.doorbells > 0, "{figures:?}");
        assert!(detail(&figures).contains("contexts for each doorbell"));
    }
}
