//! Slack on a GPU: a profile of the synthetic layer, and the slowdown of computation by I/O kernels with and without
//! the scheduler.
//!
//! [`pass`] has the loop of a forward pass, which also runs on a model without a GPU. [`gpu`] has the layers, and
//! [`transfer`] moves bytes between pinned host memory and paged KV over PCIe, with kernels on a bounded number of SMs.
//!
//! Computation uses all SMs. A green context would take SMs from each layer for the whole time; windows are the spans
//! in which I/O kernels find free SMs by themselves, as measured.

pub mod gpu;
pub mod pass;
pub mod transfer;

use std::sync::Arc;

use reprise_policy::slack::measure::{Plan, median};
use reprise_policy::slack::scheduler::{Counters, Limits, Reason, Scheduler};
use reprise_policy::slack::{
    Computation, Content, Direction, Fallback, Phase, Profile, ProfileError, Subject, Window,
};

use crate::gpu::GpuError;
use crate::kernels::Kernels;
use gpu::{GpuMachine, IOCB_BYTES};
use pass::{Mode, Pass, PassResult, run_pass};
use transfer::Method;

/// Slowdown of passes by I/O, with and without the scheduler.
#[derive(Clone, Debug, PartialEq)]
pub struct Slowdown {
    /// Milliseconds of the passes without I/O.
    pub alone_ms: f64,
    /// I/O that starts before each layer, on all SMs.
    pub concurrent: ModeResult,
    /// I/O that starts before each layer, with the SMs and the priority of the scheduler's launches.
    pub limited: ModeResult,
    /// The launches of the scheduler.
    pub scheduled: ModeResult,
    /// Size of the passes.
    pub pass: Pass,
    /// Window of the layer that was measured before the passes.
    pub window: Window,
    /// Decisions of the last scheduled passes.
    pub counters: Counters,
    /// What moves the bytes.
    pub method: Method,
}

/// Passes with I/O: medians of the repetitions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModeResult {
    /// Slowdown of the layers of all passes, in hundredths.
    pub percent: f64,
    /// Milliseconds until all I/O has ended too.
    pub total_ms: f64,
    /// Mebibytes of reads and writes, each time.
    pub mebibytes: u64,
    /// Write IOCBs that were launched behind the last layer.
    pub carried_over: f64,
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

/// Measures a profile of a layer of Llama-3-8B with I/O by `method`.
///
/// # Errors
/// The GPU refused work, or has too little memory.
pub fn profile(kernels: &Kernels, method: Method, plan: &Plan) -> Result<Content, SlackError> {
    let longest = |lengths: &[u32]| lengths.iter().copied().max().unwrap_or(1);
    let input_max = longest(&plan.inputs).max(longest(&plan.decode_inputs));
    let iocbs_max = longest(&plan.iocbs);
    let mut machine = GpuMachine::new(kernels, method, (input_max, longest(&plan.prefixes)), iocbs_max)?;
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

/// Passes that follow each other without a pause.
const PASSES: u32 = 4;

/// Measures how much I/O slows passes of `layers` layers with 2,048 input tokens behind 8,192 prefix tokens.
///
/// Each layer reads the KV of the prefix and writes that of the input. Without the scheduler, the reads of the next
/// layer and the writes of the last one start before each layer: together on all SMs, and once more with the SMs and the
/// priority of the scheduler's launches. With the scheduler, the decisions come from a profile that is measured first.
///
/// One scheduler has four passes without a pause. Writes that it carries over wait for the next passes and are written
/// when the GPU computes nothing, behind the last one. [`ModeResult::total_ms`] has the time until they have ended, so
/// that all modes do the same work in it; another amount of I/O is an error. The modes alternate, `repetitions` times;
/// medians count.
///
/// # Errors
/// The GPU refused work, or has too little memory; a mode has moved other bytes than the passes have.
pub fn slowdown(
    kernels: &Kernels,
    method: Method,
    layers: u32,
    repetitions: usize,
) -> Result<Slowdown, SlackError> {
    const INPUT: u32 = 2048;
    const PREFIX: u32 = 8192;
    let plan = Plan { inputs: vec![INPUT], prefixes: vec![PREFIX], decode_inputs: vec![], ..full_plan() };
    let profile = Arc::new(Profile::new(profile(kernels, method, &plan)?)?);
    let pass = Pass {
        computation: Computation { phase: Phase::Prefill, input_tokens: INPUT, prefix_tokens: PREFIX },
        passes: PASSES,
        layers,
        reads: gpu::iocbs_of_tokens(PREFIX),
        writes: gpu::iocbs_of_tokens(INPUT),
    };
    let most = pass.reads.max(pass.writes);
    let mut machine = GpuMachine::new(kernels, method, (INPUT, PREFIX), most)?;
    let mut alone = Vec::new();
    let mut results: [Vec<PassResult>; 3] = Default::default();
    let mut counters = Counters::default();
    run_pass(&mut machine, &Pass { passes: 1, ..pass }, Mode::Alone)?;
    for _ in 0..repetitions.max(1) {
        alone.push(run_pass(&mut machine, &pass, Mode::Alone)?.micros);
        for (mode, limited) in [false, true].into_iter().enumerate() {
            results[mode].push(run_pass(&mut machine, &pass, Mode::Unscheduled { limited })?);
        }
        let mut scheduler = Scheduler::new(Arc::clone(&profile), limits(&pass));
        results[2].push(run_pass(&mut machine, &pass, Mode::Scheduled(&mut scheduler))?);
        counters = scheduler.counters().clone();
    }
    let alone = median(alone);
    let [concurrent, limited, scheduled] = results.map(|runs| mode_result(&pass, alone, &runs));
    Ok(Slowdown {
        alone_ms: alone / 1e3,
        concurrent: concurrent?,
        limited: limited?,
        scheduled: scheduled?,
        pass,
        window: profile.content().measurement.windows[0],
        counters,
        method,
    })
}

/// Returns the medians of the runs of a mode, next to passes without I/O of `alone` microseconds.
fn mode_result(pass: &Pass, alone: f64, runs: &[PassResult]) -> Result<ModeResult, GpuError> {
    let (reads, writes) = pass.iocbs();
    if let Some(run) = runs.iter().find(|run| run.iocbs != (reads, writes)) {
        return Err(GpuError::Invalid(format!(
            "passes of {reads} reads and {writes} writes launched {:?}: their times cannot be compared",
            run.iocbs
        )));
    }
    let of = |value: fn(&PassResult) -> f64| median(runs.iter().map(value).collect());
    Ok(ModeResult {
        percent: (of(|run| run.micros) / alone - 1.0) * 100.0,
        total_ms: of(|run| run.total_micros) / 1e3,
        mebibytes: (u64::from(reads + writes) * u64::from(IOCB_BYTES)) >> 20,
        carried_over: of(|run| f64::from(run.carried_over)),
    })
}

/// Limits under which all I/O of the passes may wait.
fn limits(pass: &Pass) -> Limits {
    let (reads, writes) = pass.iocbs();
    Limits { reads_max: reads as usize + 1, writes_max: writes as usize + 1, ..Limits::default() }
}

impl Slowdown {
    /// Sizes of the passes and their I/O, in one line.
    pub fn detail(&self) -> String {
        let (reads, writes) = self.pass.iocbs();
        format!(
            "{} passes of {} layers without a pause, {reads} reads and {writes} writes of 1 MiB in all modes, window of {} of {} µs, by {}",
            self.pass.passes,
            self.pass.layers,
            self.window.slack_micros,
            self.window.layer_micros,
            self.limit()
        )
    }

    /// What moves the bytes, with the limit of its kernels.
    fn limit(&self) -> String {
        match self.method {
            Method::CopyEngine => format!("{}, without a limit of SMs", self.method),
            Method::Kernel { sms } => format!("{}, on at most {sms} SMs by a bounded grid", self.method),
        }
    }

    /// Launches of the scheduler by direction and reason, in one line.
    pub fn decisions(&self) -> String {
        let mut parts = Vec::new();
        for direction in [Direction::Read, Direction::Write] {
            for reason in Reason::ALL {
                let count = self.counters.launched(direction, reason);
                if count.launches > 0 {
                    let (reason, iocbs, launches) = (reason.as_str(), count.iocbs, count.launches);
                    parts.push(format!("{direction:?} {reason}: {iocbs} in {launches} launches"));
                }
            }
        }
        parts.join(", ")
    }
}

impl ModeResult {
    /// Bytes, and writes that were left behind the layers, in one line.
    pub fn detail(&self) -> String {
        format!(
            "{} MiB moved, {:.0} writes left behind the last layer, all I/O ended after {:.1} ms",
            self.mebibytes, self.carried_over, self.total_ms
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_that_move_other_bytes_are_not_compared() {
        let computation = Computation { phase: Phase::Prefill, input_tokens: 1, prefix_tokens: 1 };
        let pass = Pass { computation, passes: 2, layers: 3, reads: 4, writes: 5 };
        let run = PassResult { micros: 110.0, total_micros: 5000.0, carried_over: 7, iocbs: (16, 30) };
        let result = mode_result(&pass, 100.0, &[run]).expect("equal work");
        assert!((result.percent - 10.0).abs() < 1e-9, "{result:?}");
        assert_eq!((result.total_ms, result.mebibytes, result.carried_over), (5.0, 46, 7.0));
        let less = PassResult { iocbs: (16, 29), ..run };
        let error = mode_result(&pass, 100.0, &[run, less]).expect_err("a write less");
        assert!(error.to_string().contains("cannot be compared"), "{error}");
    }
}
