//! Slack on a GPU: a profile of the synthetic layer, and the slowdown of computation by I/O kernels with and without
//! the scheduler.
//!
//! [`pass`] has the loop of a forward pass, which also runs on a model without a GPU. [`gpu`] has the kernels: I/O
//! kernels copy between pinned host memory and paged KV over PCIe, on a bounded number of SMs.
//!
//! Computation uses all SMs. A green context would take SMs from each layer for the whole time; windows are the spans
//! in which I/O kernels find free SMs by themselves, as measured.

pub mod gpu;
pub mod pass;

use std::sync::Arc;

use reprise_policy::slack::measure::{Plan, median};
use reprise_policy::slack::scheduler::{Counters, Limits, Reason, Scheduler};
use reprise_policy::slack::{
    Computation, Content, Direction, Fallback, Phase, Profile, ProfileError, Subject, Window,
};

use crate::gpu::GpuError;
use crate::kernels::Kernels;
use gpu::{GpuMachine, IOCB_BYTES};
use pass::{Mode, Pass, run_pass};

/// Slowdown of a pass by I/O, with and without the scheduler.
#[derive(Clone, Debug, PartialEq)]
pub struct Slowdown {
    /// Milliseconds of the pass without I/O.
    pub alone_ms: f64,
    /// Slowdown by reads and writes that start before each layer, in hundredths.
    pub concurrent_percent: f64,
    /// Slowdown by the launches of the scheduler, in hundredths.
    pub scheduled_percent: f64,
    /// Window of the layer that was measured before the passes.
    pub window: Window,
    /// Read and write IOCBs of a pass.
    pub iocbs: (u32, u32),
    /// Write IOCBs of a scheduled pass that were left for later requests, median.
    pub carried_over: f64,
    /// Decisions of the last scheduled pass.
    pub counters: Counters,
    /// SMs that I/O kernels use at most.
    pub io_sms: u32,
}

/// Why the slowdown could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum SlackError {
    /// The GPU refused work.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The measurement is not a valid profile.
    #[error("the measured profile is invalid: {0}")]
    Profile(#[from] ProfileError),
}

/// Points at which [`profile`] measures: lengths in tokens, IOCBs of 1 MiB.
pub fn full_plan() -> Plan {
    Plan {
        step_tokens: 128,
        iocb_bytes: IOCB_BYTES,
        inputs: vec![512, 2048, 8192],
        prefixes: vec![0, 8192, 32768],
        decode_inputs: vec![1],
        iocbs: vec![1, 2, 4, 8, 16, 32],
        repetitions: 5,
        tolerance_percent: 1.0,
    }
}

/// Measures a profile of a layer of Llama-3-8B with I/O kernels on at most `io_sms` SMs.
///
/// # Errors
/// The GPU refused work, or has too little memory.
pub fn profile(kernels: &Kernels, io_sms: u32, plan: &Plan) -> Result<Content, SlackError> {
    let longest = |lengths: &[u32]| lengths.iter().copied().max().unwrap_or(1);
    let input_max = longest(&plan.inputs).max(longest(&plan.decode_inputs));
    let iocbs_max = longest(&plan.iocbs);
    let mut machine = GpuMachine::new(kernels, io_sms, (input_max, longest(&plan.prefixes)), iocbs_max)?;
    let measurement = plan.measure(&mut machine)?;
    Ok(Content {
        subject: Subject {
            model: "synthetic Llama-3-8B layer".to_owned(),
            gpu_product: kernels.gpu().info().name.clone(),
            tensor_parallel: 1,
            engine_version: concat!("reprise ", env!("CARGO_PKG_VERSION")).to_owned(),
        },
        usable_percent: 80,
        fallback: Fallback::ThrottleWrites,
        max_error_percent: 30,
        measurement,
    })
}

/// Measures how much I/O slows a pass of `layers` layers with 2,048 input tokens behind 8,192 prefix tokens.
///
/// Each layer reads the KV of the prefix and writes that of the input. Without the scheduler, the reads of the next
/// layer and the writes of the last one start together before each layer, on all SMs. With it, the decisions come
/// from a profile that is measured first. Both move the same bytes; writes that the scheduler carries over are
/// written after the pass, outside of the measured time. Passes without I/O, without and with the scheduler
/// alternate, `repetitions` times; medians count.
///
/// # Errors
/// The GPU refused work, or has too little memory.
pub fn slowdown(
    kernels: &Kernels,
    io_sms: u32,
    layers: u32,
    repetitions: usize,
) -> Result<Slowdown, SlackError> {
    const INPUT: u32 = 2048;
    const PREFIX: u32 = 8192;
    let plan = Plan { inputs: vec![INPUT], prefixes: vec![PREFIX], decode_inputs: vec![], ..full_plan() };
    let profile = Arc::new(Profile::new(profile(kernels, io_sms, &plan)?)?);
    let computation = Computation { phase: Phase::Prefill, input_tokens: INPUT, prefix_tokens: PREFIX };
    let pass = Pass {
        computation,
        layers,
        reads: gpu::iocbs_of_tokens(PREFIX),
        writes: gpu::iocbs_of_tokens(INPUT),
    };
    let most = pass.reads.max(pass.writes);
    let mut machine = GpuMachine::new(kernels, io_sms, (INPUT, PREFIX), most)?;
    let (mut alone, mut concurrent, mut scheduled) = (Vec::new(), Vec::new(), Vec::new());
    let mut carried_over = Vec::new();
    let mut counters = Counters::default();
    run_pass(&mut machine, &pass, Mode::Alone)?;
    for _ in 0..repetitions.max(1) {
        alone.push(run_pass(&mut machine, &pass, Mode::Alone)?.micros);
        concurrent.push(run_pass(&mut machine, &pass, Mode::Concurrent)?.micros);
        let mut scheduler = Scheduler::new(Arc::clone(&profile), limits(&pass));
        let result = run_pass(&mut machine, &pass, Mode::Scheduled(&mut scheduler))?;
        scheduled.push(result.micros);
        carried_over.push(f64::from(result.carried_over));
        counters = scheduler.counters().clone();
    }
    let alone = median(alone);
    let percent = |times: Vec<f64>| (median(times) / alone - 1.0) * 100.0;
    let window = profile.content().measurement.windows[0];
    Ok(Slowdown {
        alone_ms: alone / 1e3,
        concurrent_percent: percent(concurrent),
        scheduled_percent: percent(scheduled),
        window,
        iocbs: ((layers - 1) * pass.reads, layers * pass.writes),
        carried_over: median(carried_over),
        counters,
        io_sms,
    })
}

/// Limits under which all I/O of a pass may wait.
fn limits(pass: &Pass) -> Limits {
    let all = |each: u32| (pass.layers * each) as usize + 1;
    Limits { reads_max: all(pass.reads), writes_max: all(pass.writes), ..Limits::default() }
}

impl Slowdown {
    /// Sizes, the measured window and the decisions, in one line.
    pub fn detail(&self) -> String {
        let (reads, writes) = self.iocbs;
        let mut parts = vec![
            format!("{reads} reads and {writes} writes of 1 MiB"),
            format!("window of {} of {} µs", self.window.slack_micros, self.window.layer_micros),
            format!("at most {} SMs by a bounded grid", self.io_sms),
            format!("{:.0} writes carried over", self.carried_over),
        ];
        for direction in [Direction::Read, Direction::Write] {
            for reason in Reason::ALL {
                let count = self.counters.launched(direction, reason);
                if count.launches > 0 {
                    let reason = reason.as_str();
                    parts.push(format!(
                        "{direction:?} {reason}: {} in {} launches",
                        count.iocbs, count.launches
                    ));
                }
            }
        }
        parts.join(", ")
    }
}
