//! Passes on a model of a GPU in virtual time.

use std::convert::Infallible;
use std::sync::Arc;

use proptest::prelude::*;
use reprise_policy::slack::content::TOKENS_MAX;
use reprise_policy::slack::scheduler::{Limits, Reason};
use reprise_policy::slack::{Content, Fallback, KernelTime, Measurement, Phase, Profile, Subject, Window};

use super::*;

/// Microseconds of a layer alone, and of one IOCB.
const LAYER: f64 = 1000.0;
const IOCB: f64 = 10.0;

/// GPU that hides `window` microseconds of I/O in each layer. I/O beyond it delays the layer, and I/O of both
/// directions at once takes 2.5 times as long.
struct Model {
    window: f64,
    now: f64,
    /// Begin and end of each layer.
    layers: Vec<(f64, f64)>,
    /// End of each launch.
    launches: Vec<(Direction, u32, f64)>,
    /// I/O microseconds that started during the current layer, by direction.
    io: [f64; 2],
    finished: bool,
}

impl Model {
    fn new(window: f64) -> Model {
        let (layers, launches) = (Vec::new(), Vec::new());
        Model { window, now: 0.0, layers, launches, io: [0.0; 2], finished: false }
    }

    /// Delays the end of the current layer by the I/O that did not fit.
    fn end_layer(&mut self) {
        if let Some((_, end)) = self.layers.last_mut() {
            let factor = if self.io.iter().all(|io| *io > 0.0) { 2.5 } else { 1.0 };
            *end += (self.io.iter().sum::<f64>() * factor - self.window).max(0.0);
        }
        self.io = [0.0; 2];
    }

    fn iocbs(&self, of: Direction) -> u32 {
        self.launches.iter().filter(|(direction, ..)| *direction == of).map(|(_, iocbs, _)| iocbs).sum()
    }
}

impl PassMachine for Model {
    type Error = Infallible;

    fn start(&mut self) -> Result<(), Infallible> {
        *self = Model::new(self.window);
        Ok(())
    }

    fn enqueue(&mut self, _: Computation, behind: Option<usize>) -> Result<(), Infallible> {
        self.end_layer();
        let before = self.layers.last().map_or(0.0, |(_, end)| *end);
        let reads = behind.map_or(0.0, |launch| self.launches[launch].2);
        let begin = f64::max(before, reads);
        self.layers.push((begin, begin + LAYER));
        Ok(())
    }

    fn wait_begin(&mut self, layer: u32) -> Result<(), Infallible> {
        self.now = self.now.max(self.layers[layer as usize].0);
        Ok(())
    }

    fn launch(&mut self, direction: Direction, iocbs: u32, _: bool) -> Result<(), Infallible> {
        let micros = f64::from(iocbs) * IOCB;
        let before = self.launches.last().map_or(0.0, |(.., end)| *end);
        self.launches.push((direction, iocbs, self.now.max(before) + micros));
        self.io[usize::from(direction == Direction::Write)] += micros;
        Ok(())
    }

    fn ended(&mut self) -> Result<usize, Infallible> {
        if self.finished {
            self.now += 1.0;
        }
        Ok(self.launches.iter().take_while(|(.., end)| *end <= self.now).count())
    }

    fn finish(&mut self) -> Result<f64, Infallible> {
        self.end_layer();
        self.finished = true;
        let last = self.layers.last().map_or(0.0, |(_, end)| *end);
        self.now = self.now.max(last);
        Ok(last)
    }

    fn drain(&mut self) -> Result<f64, Infallible> {
        let layer = self.layers.last().map_or(0.0, |(_, end)| *end);
        Ok(self.launches.iter().map(|(.., end)| *end).fold(layer, f64::max))
    }
}

fn scheduler(window: u32) -> Scheduler {
    let kernels: Vec<KernelTime> =
        [1, 2, 4, 8, 16, 32].map(|iocbs| KernelTime { iocbs, micros: iocbs * IOCB as u32, sms: 8 }).to_vec();
    let window = Window {
        phase: Phase::Prefill,
        min_input_tokens: 0,
        max_input_tokens: TOKENS_MAX,
        min_prefix_tokens: 0,
        max_prefix_tokens: TOKENS_MAX,
        layer_micros: LAYER as u32,
        slack_micros: window,
        free_sms: 8,
    };
    let text = || "x".to_owned();
    let content = Content {
        subject: Subject { model: text(), gpu_product: text(), tensor_parallel: 1, engine_version: text() },
        usable_percent: 100,
        fallback: Fallback::ThrottleWrites,
        max_error_percent: 30,
        measurement: Measurement {
            step_tokens: 1,
            iocb_bytes: 1,
            windows: vec![window],
            reads: kernels.clone(),
            writes: kernels,
        },
    };
    let profile = Arc::new(Profile::new(content).expect("a profile"));
    Scheduler::new(profile, Limits { reads_max: 4096, writes_max: 4096, deferrals_max: 1024 })
}

fn pass(layers: u32, reads: u32, writes: u32) -> Pass {
    let computation = Computation { phase: Phase::Prefill, input_tokens: 1, prefix_tokens: 1 };
    Pass { computation, passes: 1, layers, reads, writes }
}

#[test]
fn scheduled_io_hides_in_windows_and_concurrent_io_does_not() {
    let (mut model, pass) = (Model::new(160.0), pass(32, 8, 4));
    let mut percent = |mode: Mode<'_>| {
        let result = run_pass(&mut model, &pass, mode).expect("a pass");
        (result.micros / (32.0 * LAYER) - 1.0) * 100.0
    };
    assert_eq!(percent(Mode::Alone), 0.0);
    let concurrent = percent(Mode::Unscheduled { limited: false });
    let mut scheduler = scheduler(160);
    let scheduled = percent(Mode::Scheduled(&mut scheduler));
    assert!(
        scheduled <= 2.0 && concurrent > 10.0,
        "{scheduled} % with, {concurrent} % without the scheduler"
    );
    assert_eq!(scheduler.counters().overlapped, 0);
    assert_eq!((model.iocbs(Direction::Read), model.iocbs(Direction::Write)), (31 * 8, 32 * 4));
}

#[test]
fn reads_that_do_not_fit_start_at_once() {
    let (mut model, pass) = (Model::new(40.0), pass(8, 8, 1));
    let mut scheduler = scheduler(40);
    let result = run_pass(&mut model, &pass, Mode::Scheduled(&mut scheduler)).expect("a pass");
    assert_eq!(scheduler.counters().launched(Direction::Read, Reason::Bottleneck).iocbs, 7 * 8);
    // The last layer has no reads, and its window takes the writes of all layers before it that fit.
    assert_eq!(result.carried_over, 8 - 4);
}

#[test]
fn all_modes_do_the_same_work_and_their_total_time_has_all_of_it() {
    let pass = Pass { passes: 3, ..pass(8, 8, 16) };
    let io = (3 * 7 * 8, 3 * 8 * 16);
    let mut scheduler = scheduler(160);
    let modes = [
        Mode::Unscheduled { limited: false },
        Mode::Unscheduled { limited: true },
        Mode::Scheduled(&mut scheduler),
    ];
    for mode in modes {
        let mut model = Model::new(160.0);
        let name = format!("{mode:?}");
        let result = run_pass(&mut model, &pass, mode).expect("passes");
        assert_eq!((result.iocbs, model.layers.len()), (io, 24), "{name}");
        assert_eq!((model.iocbs(Direction::Read), model.iocbs(Direction::Write)), io, "{name}");
        let end = model.launches.iter().map(|(.., end)| *end).fold(result.micros, f64::max);
        assert_eq!(result.total_micros, end, "{name}");
        assert!(result.total_micros > result.micros, "{name}: the last writes end behind the layers");
    }
    // A window takes reads or writes: more writes than one pass has are left over all passes.
    assert_eq!(scheduler.pending(), (0, 0));
    let idle = scheduler.counters().launched(Direction::Write, Reason::Idle);
    assert!(idle.launches >= 1 && idle.iocbs > 8 * 16, "{idle:?}");
}

proptest! {
    #[test]
    fn every_layer_begins_behind_its_reads_and_all_io_happens(
        passes in 1_u32..4,
        layers in 1_u32..12,
        reads in 0_u32..20,
        writes in 0_u32..20,
        window in 1_u32..400,
    ) {
        let (mut model, pass) = (Model::new(f64::from(window)), Pass { passes, ..pass(layers, reads, writes) });
        let mut scheduler = scheduler(window);
        run_pass(&mut model, &pass, Mode::Scheduled(&mut scheduler)).expect("passes");
        prop_assert_eq!(model.layers.len(), (passes * layers) as usize);
        prop_assert_eq!((model.iocbs(Direction::Read), model.iocbs(Direction::Write)), pass.iocbs());
        // Reads are launched in the order of layers: those of layer n end with the n-th multiple.
        let mut seen = 0;
        for (direction, iocbs, end) in &model.launches {
            if *direction == Direction::Write {
                continue;
            }
            seen += iocbs;
            // The first layer of a pass has no reads, so layers with reads are counted without it.
            let layer_of = |nth: u32| ((nth - 1) / (layers - 1) * layers + (nth - 1) % (layers - 1) + 1) as usize;
            let full = seen / reads;
            let (covered, partial) = (layer_of(full.max(1)), layer_of(full + 1));
            if let Some((begin, _)) = model.layers.get(partial).filter(|_| seen % reads.max(1) != 0) {
                prop_assert!(begin >= end, "a layer began before a part of its reads had ended");
            }
            if let Some((begin, _)) = model.layers.get(covered).filter(|_| seen % reads.max(1) == 0) {
                prop_assert!(begin >= end, "layer {covered} began at {begin}, its reads ended at {end}");
            }
        }
    }
}
