//! The steps, each in a separate process: it prints JSON lines and its exit code is the result.
//!
//! Exit codes: 0 passed, 1 failed.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use reprise_cuda::gpu::{Gpu, GpuError, Partition, PartitionMethod};
use reprise_cuda::gpu_bench::{self, Goal, Measurement};
use reprise_cuda::kernels::Kernels;
use reprise_cuda::ring::{self, BenchSettings, RingError};
use reprise_cuda::slack::{self, transfer::Method};
use reprise_cuda::store;
use serde_json::{Value, json};

use crate::{Options, backends, differential, layers, print, transfers};

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
        "backends" => backends::run(&Arc::new(kernels), options),
        "streams" => streams(&Arc::new(kernels), options),
        "partition" => partition(&kernels, options),
        "layers" => layers::run(&kernels),
        "index" => figures(gpu_bench::index_times(&kernels, 21)?),
        "rings" => rings(&kernels, options),
        "copies" => figures(gpu_bench::device_copies(&kernels, 11)?),
        "staged" => figures(gpu_bench::staged_load(&kernels, &Partition::new(&gpu, options.sms)?, 5)?),
        "slowdown" => figures(gpu_bench::slowdown(&kernels, options.sms, 40)?),
        "slack" => slack_of_layers(&kernels, options),
        other => Err(StepError(format!("unknown step {other}"))),
    }
}

/// Checks the order of requests by streams, and measures its cost with the ring's kernel.
fn streams(kernels: &Arc<Kernels>, options: &Options) -> Result<(), StepError> {
    backends::streams(kernels, options)?;
    let partition = Partition::new(kernels.gpu(), options.sms)?;
    let costs = store::stream_cost(Some((&**kernels, &partition)), if options.small { 1 } else { 11 });
    let costs = costs.map_err(|error| StepError(error.to_string()))?;
    figures(
        costs
            .into_iter()
            .map(|cost| Measurement {
                name: format!("request of one block, {}", cost.mode.text()),
                value: cost.total_ns,
                unit: "ns",
                goal: None,
                detail: format!(
                    "{:.0} ns of them to submit; ring by the kernel, emulated controller",
                    cost.submit_ns
                ),
            })
            .collect(),
    )
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
    for (sgl, queues, entries) in [(true, 1, 2), (true, 8, 64), (false, 4, 16), (false, 8, 1024)] {
        let threads = queues.min(cores.saturating_sub(2)).max(1);
        let settings =
            BenchSettings { queues, entries, sgl, controller_threads: threads, ..BenchSettings::default() };
        let rounds = if options.small { 1 } else { 10 };
        let verified = ring::verify_on_gpu(kernels, &partition, &settings, rounds, 1).map_err(failed)?;
        let format = if sgl { "SGL" } else { "PRP" };
        let (transfers, mebibytes) = (verified.transfers, verified.bytes >> 20);
        let detail = format!(
            "{transfers} writes and reads by {format}, {mebibytes} MiB, {queues} queue pairs of {entries}: all bytes equal"
        );
        checked("ring, contents", &detail);
    }
    backends::rings(kernels, &partition, options)?;
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
            "reads of {} bytes, {queues} queue pairs on {} SMs by {}, emulated controller with {} threads, {} contexts, {:.0} for each doorbell",
            settings.context_bytes,
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

/// Measures how much I/O slows passes of layers: with and without the scheduler of slack, and limited without it.
///
/// The goal is that of the copy engine, which moves the bytes of the backend `staged`.
fn slack_of_layers(kernels: &Kernels, options: &Options) -> Result<(), StepError> {
    let sms = options.sms.of(kernels.gpu().info().sms);
    let mut measured = Vec::new();
    for (method, goal) in
        [(Method::CopyEngine, Some(Goal::AtMost(SLACK_GOAL))), (Method::Kernel { sms }, None)]
    {
        let result = slack::slowdown(kernels, method, 16, 3).map_err(|error| StepError(error.to_string()))?;
        checked("slack", &format!("{}; {:.1} ms alone", result.detail(), result.alone_ms));
        checked("launches of the scheduler", &result.decisions());
        let modes = [
            ("without the scheduler", result.concurrent, None),
            ("with the limits of its launches but without the scheduler", result.limited, None),
            ("with the scheduler", result.scheduled, goal),
        ];
        for (name, mode, goal) in modes {
            let mut figure = |name: String, value, unit, goal| {
                measured.push(Measurement { name, value, unit, goal, detail: mode.detail() });
            };
            figure(format!("computation slowed by I/O by {method}, {name}"), mode.percent, "%", goal);
            figure(format!("computation and all of its I/O by {method}, {name}"), mode.total_ms, "ms", None);
        }
    }
    figures(measured)
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
        if io.is_empty() || compute.is_empty() {
            return Err(StepError(format!(
                "{} SMs for I/O and {} for computation ran kernels: expected some of each",
                io.len(),
                compute.len()
            )));
        }
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
    if used.is_empty() || used.len() > bounded.io_sms() as usize {
        return Err(StepError(format!("a grid of {} blocks ran on {used:?}", bounded.io_sms())));
    }
    checked("bounded grid", &format!("{} blocks ran on {} SMs", bounded.io_sms(), used.len()));
    Ok(())
}
