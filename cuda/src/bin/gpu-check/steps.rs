//! The steps, each in a separate process: it prints JSON lines and its exit code is the result.
//!
//! Exit codes: 0 passed, 1 failed.

use std::fs;
use std::thread;
use std::time::Duration;

use reprise_cuda::gpu::{Gpu, GpuError, Partition, PartitionMethod};
use reprise_cuda::gpu_bench::{self, Goal, Measurement};
use reprise_cuda::kernels::Kernels;
use reprise_cuda::ring::{self, BenchSettings, RingError};
use reprise_cuda::slack;
use serde_json::{Value, json};

use crate::{Options, differential, layers, print, transfers};

/// Why a step did not pass.
#[derive(Debug)]
pub(crate) struct StepError(pub(crate) String);

impl From<GpuError> for StepError {
    fn from(error: GpuError) -> StepError {
        StepError(error.to_string())
    }
}

/// Runs a step and returns the exit code of the process.
pub(crate) fn run(name: &str, options: &Options) -> u8 {
    match step(name, options) {
        Ok(()) => 0,
        Err(StepError(reason)) => {
            print(&reason);
            1
        }
    }
}

fn step(name: &str, options: &Options) -> Result<(), StepError> {
    let gpu = Gpu::open(0)?;
    let kernels = match &options.device_code {
        Some(file) => {
            let image = fs::read(file)
                .map_err(|error| StepError(format!("cannot read {}: {error}", file.display())))?;
            Kernels::load_image(&gpu, &image)?
        }
        None => Kernels::load(&gpu)?,
    };
    match name {
        "kernels" => differential::run(&kernels, options),
        "transfers" => transfers::run(&kernels, options),
        "partition" => partition(&kernels, options),
        "layers" => layers::run(&kernels),
        "rings" => rings(&kernels, options),
        "copies" => figures(gpu_bench::device_copies(&kernels, 11)?),
        "staged" => figures(gpu_bench::staged_load(&kernels, &Partition::new(&gpu, options.sms)?, 5)?),
        "slowdown" => figures(gpu_bench::slowdown(&kernels, options.sms, 40)?),
        "slack" => slack_of_layers(&kernels, options),
        other => Err(StepError(format!("unknown step {other}"))),
    }
}

/// Contexts per second that the ring's kernel reaches at least.
const RING_GOAL: f64 = 5e6;

/// Measures the ring's kernel with an emulated controller of several threads of the CPU.
///
/// The controller needs more CPU time than the ring needs of the GPU, so the best of several numbers of threads counts.
fn rings(kernels: &Kernels, options: &Options) -> Result<(), StepError> {
    let failed = |error: RingError| StepError(error.to_string());
    let partition = Partition::new(kernels.gpu(), options.sms)?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let mut best: Option<(f64, String)> = None;
    for queues in [4, 8, 16, 32] {
        let settings = BenchSettings {
            queues,
            controller_threads: queues.min(cores.saturating_sub(2)).max(1),
            duration: Duration::from_secs(1),
            ..BenchSettings::default()
        };
        let figures = ring::measure_on_gpu(kernels, &partition, &settings).map_err(failed)?;
        let rate = figures.contexts_per_second();
        let detail = format!(
            "{queues} queue pairs on {} SMs by {}, emulated controller with {} threads, {} contexts, {:.0} for each doorbell",
            partition.io_sms(),
            partition.method(),
            settings.controller_threads,
            figures.contexts,
            figures.contexts as f64 / figures.doorbells.max(1) as f64,
        );
        checked("ring", &format!("{:.2} million contexts/s: {detail}", rate / 1e6));
        if best.as_ref().is_none_or(|(most, _)| rate > *most) {
            best = Some((rate, detail));
        }
    }
    let (value, detail) = best.unwrap_or_default();
    let goal = Goal::AtLeast(RING_GOAL);
    figures(vec![Measurement {
        name: "ring".to_owned(),
        value,
        unit: "contexts/s",
        goal: Some(goal),
        detail,
    }])
}

/// Slowdown of computation by I/O with the scheduler of slack, in percent at most.
const SLACK_GOAL: f64 = 2.0;

/// Measures how much I/O slows a pass of layers, with and without the scheduler of slack.
fn slack_of_layers(kernels: &Kernels, options: &Options) -> Result<(), StepError> {
    let sms = options.sms.of(kernels.gpu().info().sms);
    let result = slack::slowdown(kernels, sms, 16, 5).map_err(|error| StepError(error.to_string()))?;
    let figure = |name: &str, value, goal| Measurement {
        name: name.to_owned(),
        value,
        unit: "%",
        goal,
        detail: result.detail(),
    };
    checked("slack", &format!("a pass of 16 layers takes {:.1} ms alone", result.alone_ms));
    figures(vec![
        figure("computation slowed by I/O without the scheduler", result.concurrent_percent, None),
        figure(
            "computation slowed by I/O with the scheduler",
            result.scheduled_percent,
            Some(Goal::AtMost(SLACK_GOAL)),
        ),
    ])
}

/// Prints measurements as JSON lines.
fn figures(measurements: Vec<Measurement>) -> Result<(), StepError> {
    for figure in measurements {
        let goal = match figure.goal {
            Some(Goal::AtLeast(bound)) => format!("at least {bound}"),
            Some(Goal::AtMost(bound)) => format!("at most {bound}"),
            None => String::new(),
        };
        let met = figure.is_met();
        let line = json!({
            "name": figure.name, "value": figure.value, "unit": figure.unit, "detail": figure.detail,
            "goal": goal, "met": met,
        });
        print(&line.to_string());
    }
    Ok(())
}

/// Prints that something was checked.
pub(crate) fn checked(name: &str, detail: &str) {
    print(&json!({"name": name, "detail": detail}).to_string());
}

/// Returns the description of the first GPU.
pub(crate) fn device() -> Result<Value, GpuError> {
    let gpu = Gpu::open(0)?;
    let info = gpu.info();
    let kernel = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let driver = kernel.lines().next().unwrap_or_default().split_whitespace().find(|word| {
        word.contains('.') && word.chars().all(|letter| letter.is_ascii_digit() || letter == '.')
    });
    Ok(json!({
        "name": info.name,
        "pci_address": info.pci_address,
        "compute_capability": format!("{}.{}", info.compute_capability.0, info.compute_capability.1),
        "sms": info.sms,
        "memory_bytes": info.memory_bytes,
        "driver": driver.unwrap_or("unknown"),
        "driver_cuda": format!("{}.{}", info.driver_cuda.0, info.driver_cuda.1),
        "device_code": reprise_cuda::HAS_DEVICE_CODE,
    }))
}

/// Checks that kernels of the I/O streams run only on the SMs that the partition has for them.
fn partition(kernels: &Kernels, options: &Options) -> Result<(), StepError> {
    let gpu = kernels.gpu();
    let chosen = Partition::new(gpu, options.sms)?;
    if let PartitionMethod::BoundedGrid(reason) = chosen.method() {
        checked("green contexts", &format!("not available: {reason}"));
    } else {
        let io = kernels.used_sms(&chosen.io_stream()?, 4 * gpu.info().sms)?;
        let compute = kernels.used_sms(&chosen.compute_stream()?, 4 * gpu.info().sms)?;
        if io.len() > chosen.io_sms() as usize || compute.len() > chosen.compute_sms() as usize {
            return Err(StepError(format!(
                "{} and {} SMs ran kernels of streams with {} and {}",
                io.len(),
                compute.len(),
                chosen.io_sms(),
                chosen.compute_sms()
            )));
        }
        if let Some(shared) = io.iter().find(|&sm| compute.contains(sm)) {
            return Err(StepError(format!("SM {shared} ran kernels of both partitions")));
        }
        let detail =
            format!("{} SMs for I/O ({io:?}), {} for computation", chosen.io_sms(), chosen.compute_sms());
        checked("green contexts", &detail);
    }
    let bounded = Partition::with_bounded_grid(gpu, options.sms, &"requested");
    let used = kernels.used_sms(&bounded.io_stream()?, bounded.io_sms())?;
    if used.len() > bounded.io_sms() as usize {
        return Err(StepError(format!("a grid of {} blocks ran on {used:?}", bounded.io_sms())));
    }
    checked("bounded grid", &format!("{} blocks ran on {} SMs", bounded.io_sms(), used.len()));
    Ok(())
}
