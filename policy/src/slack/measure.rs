//! Measurement of a profile's tables on any machine that computes layers and launches I/O kernels.
//!
//! Kernel times are medians of launches without computation. The window of a layer is the time of the largest
//! kernel, in both directions, that slows the layer by at most the tolerance. So a window is what the machine
//! showed, not what a model of its occupancy predicts.
//!
//! Layer times follow the lengths only roughly: each measured pair of lengths stands for the range from it up
//! to the next pair.

use super::content::TOKENS_MAX;
use super::{Direction, KernelTime, Measurement, Phase, Window};

/// Machine whose layers and I/O kernels are measured.
pub trait Machine {
    /// Why a measurement failed.
    type Error;

    /// Computes one layer, next to an I/O kernel of `io` IOCBs if there is one.
    ///
    /// # Errors
    /// The machine cannot compute the layer.
    fn layer(&mut self, lengths: Lengths, io: Option<(Direction, u32)>) -> Result<LayerTime, Self::Error>;

    /// Launches an I/O kernel without computation; returns its microseconds.
    ///
    /// # Errors
    /// The machine cannot launch the kernel.
    fn kernel(&mut self, direction: Direction, iocbs: u32) -> Result<f64, Self::Error>;

    /// Multiprocessors that a kernel occupies.
    fn sms(&self, direction: Direction, iocbs: u32) -> u32;
}

/// Lengths of a measured layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Phase of the computation.
    pub phase: Phase,
    /// Tokens that the batch computes.
    pub input_tokens: u32,
    /// Tokens before the input whose KV exists.
    pub prefix_tokens: u32,
}

/// Durations of a layer and of the I/O kernel next to it, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerTime {
    /// Duration of the layer's computation.
    pub layer: f64,
    /// Duration of the I/O kernel; 0 without one.
    pub io: f64,
}

/// Medians of a layer with and without an I/O kernel.
struct Pair {
    /// Microseconds of the layer alone.
    alone: f64,
    /// Microseconds of the layer next to the kernel.
    with: f64,
    /// Microseconds of the kernel.
    io: f64,
    /// Time next to the kernel over that alone.
    ratio: f64,
}

/// Points of a measurement. All lists are sorted, without repetitions.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Tokens that one warp computes.
    pub step_tokens: u32,
    /// Bytes of an IOCB.
    pub iocb_bytes: u32,
    /// Input lengths of prefill, multiples of the step.
    pub inputs: Vec<u32>,
    /// Prefix lengths, multiples of the step.
    pub prefixes: Vec<u32>,
    /// Input lengths of decode.
    pub decode_inputs: Vec<u32>,
    /// IOCB counts of kernels.
    pub iocbs: Vec<u32>,
    /// Repetitions of each point; the median counts.
    pub repetitions: usize,
    /// Slowdown of a layer that counts as none, in hundredths.
    pub tolerance_percent: f64,
}

impl Plan {
    /// Measures all points.
    ///
    /// # Errors
    /// The first error of the machine.
    pub fn measure<M: Machine>(&self, machine: &mut M) -> Result<Measurement, M::Error> {
        let reads = self.kernels(machine, Direction::Read)?;
        let writes = self.kernels(machine, Direction::Write)?;
        let mut windows = Vec::new();
        for (phase, inputs) in [(Phase::Prefill, &self.inputs), (Phase::Decode, &self.decode_inputs)] {
            for (min_input_tokens, max_input_tokens) in ranges(inputs) {
                for (min_prefix_tokens, max_prefix_tokens) in ranges(&self.prefixes) {
                    let lengths =
                        Lengths { phase, input_tokens: min_input_tokens, prefix_tokens: min_prefix_tokens };
                    let (layer, slack, free_sms) = self.window(machine, lengths, [&reads, &writes])?;
                    windows.push(Window {
                        phase,
                        min_input_tokens,
                        max_input_tokens,
                        min_prefix_tokens,
                        max_prefix_tokens,
                        layer_micros: whole(layer),
                        slack_micros: slack.min(whole(layer)),
                        free_sms,
                    });
                }
            }
        }
        let (step_tokens, iocb_bytes) = (self.step_tokens, self.iocb_bytes);
        Ok(Measurement { step_tokens, iocb_bytes, windows, reads, writes })
    }

    /// Measures kernel times; a median below that of fewer IOCBs is raised to it.
    fn kernels<M: Machine>(
        &self,
        machine: &mut M,
        direction: Direction,
    ) -> Result<Vec<KernelTime>, M::Error> {
        let mut least = 1;
        let mut rows = Vec::with_capacity(self.iocbs.len());
        for iocbs in self.iocbs.iter().copied() {
            let micros = self.median(|| machine.kernel(direction, iocbs))?;
            least = least.max(whole(micros));
            rows.push(KernelTime { iocbs, micros: least, sms: machine.sms(direction, iocbs) });
        }
        Ok(rows)
    }

    /// Measures a layer: its microseconds without I/O, its slack, and the multiprocessors of the slack's kernels.
    fn window<M: Machine>(
        &self,
        machine: &mut M,
        lengths: Lengths,
        tables: [&[KernelTime]; 2],
    ) -> Result<(f64, u32, u32), M::Error> {
        let mut alone = self.median(|| machine.layer(lengths, None).map(|time| time.layer))?;
        let mut least = (u32::MAX, u32::MAX);
        for (direction, table) in [Direction::Read, Direction::Write].into_iter().zip(tables) {
            let mut fitting = (0, 0);
            let mut slower = 0;
            for row in table {
                let pair = self.pair(machine, lengths, (direction, row.iocbs))?;
                alone = alone.min(pair.alone);
                if pair.io > pair.with {
                    break;
                }
                if pair.ratio <= 1.0 + self.tolerance_percent / 100.0 {
                    (fitting, slower) = ((row.micros, row.sms), 0);
                    continue;
                }
                // One of them may be chance: a larger kernel slows more.
                slower += 1;
                if slower == 2 {
                    break;
                }
            }
            least = (least.0.min(fitting.0), least.1.min(fitting.1));
        }
        Ok((alone, least.0, least.1))
    }

    /// Measures a layer with and without I/O in turns: clocks change over a measurement.
    fn pair<M: Machine>(
        &self,
        machine: &mut M,
        lengths: Lengths,
        io: (Direction, u32),
    ) -> Result<Pair, M::Error> {
        let (mut alone, mut with, mut ios, mut ratios) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.repetitions.max(1) {
            let reference = machine.layer(lengths, None)?.layer;
            let time = machine.layer(lengths, Some(io))?;
            alone.push(reference);
            with.push(time.layer);
            ios.push(time.io);
            ratios.push(time.layer / reference.max(f64::MIN_POSITIVE));
        }
        Ok(Pair { alone: median(alone), with: median(with), io: median(ios), ratio: median(ratios) })
    }

    fn median<E>(&self, mut measure: impl FnMut() -> Result<f64, E>) -> Result<f64, E> {
        let values: Result<Vec<f64>, E> = (0..self.repetitions.max(1)).map(|_| measure()).collect();
        values.map(median)
    }
}

/// Median of values; 0 without any.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        count if count.is_multiple_of(2) => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// Ranges between neighbours, the last one without an end.
fn ranges(points: &[u32]) -> impl Iterator<Item = (u32, u32)> + '_ {
    let ends = points.iter().skip(1).copied().chain([TOKENS_MAX]);
    points.iter().copied().zip(ends)
}

/// Microseconds as a whole number from 1 to the largest that a profile may have.
fn whole(micros: f64) -> u32 {
    micros.round().clamp(1.0, f64::from(super::content::MICROS_MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::super::{Budget, Computation, Content, Fallback, Profile, Subject};
    use super::*;

    /// Layer of 1,000 µs per 1,024 tokens, of which a tenth, growing with the prefix, is free for I/O.
    struct Model;

    impl Machine for Model {
        type Error = std::convert::Infallible;

        fn layer(
            &mut self,
            lengths: Lengths,
            io: Option<(Direction, u32)>,
        ) -> Result<LayerTime, Self::Error> {
            let layer = 1000.0 + f64::from(lengths.prefix_tokens);
            let free = layer / 10.0;
            let io = io.map_or(0.0, |(direction, iocbs)| cost(direction, iocbs));
            Ok(LayerTime { layer: layer + (io - free).max(0.0), io })
        }

        fn kernel(&mut self, direction: Direction, iocbs: u32) -> Result<f64, Self::Error> {
            Ok(cost(direction, iocbs))
        }

        fn sms(&self, _: Direction, iocbs: u32) -> u32 {
            iocbs.min(4)
        }
    }

    fn cost(direction: Direction, iocbs: u32) -> f64 {
        let each = if direction == Direction::Read { 25.0 } else { 50.0 };
        f64::from(iocbs) * each
    }

    #[test]
    fn window_is_the_largest_kernel_in_both_directions_that_slows_nothing() {
        let plan = Plan {
            step_tokens: 32,
            iocb_bytes: 1 << 20,
            inputs: vec![0, 1024],
            prefixes: vec![0, 4096],
            decode_inputs: vec![1],
            iocbs: vec![1, 2, 4, 8],
            repetitions: 3,
            tolerance_percent: 0.5,
        };
        let measurement = plan.measure(&mut Model).expect("no error");
        assert_eq!(measurement.windows.len(), 6);
        assert_eq!(measurement.reads[3], KernelTime { iocbs: 8, micros: 200, sms: 4 });
        let subject = Subject {
            model: "m".to_owned(),
            gpu_product: "g".to_owned(),
            tensor_parallel: 1,
            engine_version: "e".to_owned(),
        };
        let fallback = Fallback::ThrottleWrites;
        let content = Content { subject, usable_percent: 100, fallback, max_error_percent: 30, measurement };
        let profile = Profile::new(content).expect("a valid measurement");
        let budget = |phase, input_tokens, prefix_tokens| {
            profile.budget(Computation { phase, input_tokens, prefix_tokens })
        };
        // 100 µs are free: 4 reads or 2 writes. 509.6 µs are free: all 8 reads take 200, all 8 writes 400.
        assert_eq!(budget(Phase::Prefill, 100, 0), Budget::Window { micros: 100, io_sms: 2 });
        assert_eq!(budget(Phase::Prefill, 1 << 20, 1 << 20), Budget::Window { micros: 200, io_sms: 4 });
        assert_eq!(budget(Phase::Decode, 0, 0), Budget::Outside(fallback), "below the first measured length");
    }
}
