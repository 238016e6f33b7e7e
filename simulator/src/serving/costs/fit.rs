//! Figures of an accelerator from measured steps of an engine.
//!
//! On an engine whose computation and memory reads do not overlap, the time of a step is linear in five figures:
//!
//! ```text
//! time = step overhead + requests · sequence overhead + operations / rate + attention / rate' + bytes / bandwidth
//! ```
//!
//! The fit minimises the squares of relative deviations, with each figure inside its possible range. Bandwidth and step
//! overhead are separated by steps that differ in KV cache only: reading the weights is a constant of each step too.

use super::super::profiles::{Hardware, Model};
use super::super::statistics::median;
use super::{Costs, Work};

/// Number of fitted figures.
const FIGURES: usize = 5;

/// Ranges of the figures in seconds, or in seconds per operation or byte: those of a CPU.
const RANGES: [(f64, f64); FIGURES] = [
    (0.0, 1.0),
    (0.0, 0.1),
    // 20 GFLOPS to 100 TFLOPS.
    (1e-14, 5e-11),
    (1e-14, 5e-11),
    // 1 to 1,000 GB/s.
    (1e-12, 1e-9),
];

/// Passes of the coordinate descent. Correlated figures converge slowly; a pass costs some 100 operations.
const PASSES: usize = 200_000;

/// Steps that a fit needs at least, three for each figure.
pub const STEPS_MIN: usize = 3 * FIGURES;

/// Tokens of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Tokens that the step computes; one: the step decodes.
    pub tokens: u32,
    /// Tokens before them.
    pub prefix: u32,
}

/// A step of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredStep {
    /// Its sequences; at least one.
    pub chunks: Vec<Chunk>,
    /// Its duration, above zero.
    pub seconds: f64,
}

/// Figures of the least-squares fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepFit {
    /// Constant seconds of a step.
    pub step_overhead: f64,
    /// Constant seconds of each sequence of a step.
    pub sequence_overhead: f64,
    /// Operations per second of the layers.
    pub flops_per_second: f64,
    /// Operations per second of attention between tokens.
    pub attention_flops_per_second: f64,
    /// Bytes per second of weights and KV cache.
    pub bytes_per_second: f64,
    /// Median of the relative deviations from the measured steps.
    pub deviation_median: f64,
    /// Largest relative deviation.
    pub deviation_max: f64,
}

/// Fits the figures to steps of a model.
///
/// # Errors
/// Too few steps, or a step without time or sequences; the text has the remedy.
pub fn fit(model: &Model, steps: &[MeasuredStep]) -> Result<StepFit, String> {
    if steps.len() < STEPS_MIN {
        return Err(format!("{} measured steps: measure at least {STEPS_MIN}", steps.len()));
    }
    if let Some(at) = steps.iter().position(|step| !step.seconds.is_normal() || step.chunks.is_empty()) {
        return Err(format!("step {at} has no sequence or no duration: measure it again"));
    }
    let rows: Vec<[f64; FIGURES]> = steps.iter().map(|step| amounts(model, step)).collect();
    let figures = solve(&rows, steps);
    let deviations: Vec<f64> =
        rows.iter().zip(steps).map(|(row, step)| (dot(row, &figures) / step.seconds - 1.0).abs()).collect();
    Ok(StepFit {
        step_overhead: figures[0],
        sequence_overhead: figures[1],
        flops_per_second: 1.0 / figures[2],
        attention_flops_per_second: 1.0 / figures[3],
        bytes_per_second: 1.0 / figures[4],
        deviation_median: median(&deviations),
        deviation_max: deviations.iter().copied().fold(0.0, f64::max),
    })
}

/// Amounts of a step, in the order of the figures.
fn amounts(model: &Model, step: &MeasuredStep) -> [f64; FIGURES] {
    // Only counts of the model are used, and they do not depend on the hardware.
    let hardware = Hardware::named("h100").expect("a built-in profile is valid");
    let costs = Costs::new(&hardware, model, 1);
    let sum = |costs: &Costs| {
        step.chunks.iter().fold(costs.weights(), |work, chunk| work + costs.chunk(chunk.tokens, chunk.prefix))
    };
    let Work { flops: layers, bytes, sequences } = sum(&Costs { flops_per_pair: 0.0, ..costs });
    let attention =
        sum(&Costs { flops_per_token: 0.0, flops_per_pair: model.flops_per_pair(), ..costs }).flops;
    [1.0, sequences, layers, attention, bytes]
}

/// Minimises the squares of relative deviations by cyclic coordinate descent within the ranges.
fn solve(rows: &[[f64; FIGURES]], steps: &[MeasuredStep]) -> [f64; FIGURES] {
    // Columns are scaled to equal length, so that the descent does not depend on units.
    let scaled: Vec<[f64; FIGURES]> =
        rows.iter().zip(steps).map(|(row, step)| row.map(|amount| amount / step.seconds)).collect();
    let lengths: [f64; FIGURES] = std::array::from_fn(|at| {
        scaled.iter().map(|row| row[at] * row[at]).sum::<f64>().sqrt().max(f64::MIN_POSITIVE)
    });
    let column = |row: &[f64; FIGURES], at: usize| row[at] / lengths[at];
    let normal: [[f64; FIGURES]; FIGURES] = std::array::from_fn(|one| {
        std::array::from_fn(|other| scaled.iter().map(|row| column(row, one) * column(row, other)).sum())
    });
    let target: [f64; FIGURES] = std::array::from_fn(|at| scaled.iter().map(|row| column(row, at)).sum());
    let mut figures: [f64; FIGURES] = std::array::from_fn(|at| RANGES[at].0 * lengths[at]);
    for _ in 0..PASSES {
        for at in 0..FIGURES {
            let others = dot(&normal[at], &figures) - normal[at][at] * figures[at];
            let (least, most) = (RANGES[at].0 * lengths[at], RANGES[at].1 * lengths[at]);
            figures[at] = ((target[at] - others) / normal[at][at]).clamp(least, most);
        }
    }
    std::array::from_fn(|at| figures[at] / lengths[at])
}

fn dot(one: &[f64; FIGURES], other: &[f64; FIGURES]) -> f64 {
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}

/// Latency in seconds and bytes per second of loads, each with its bytes and seconds: the straight line through the
/// medians of equal sizes, by relative deviations. `None` with fewer than two sizes.
pub fn fit_loads(loads: &[(f64, f64)]) -> Option<(f64, f64)> {
    let mut sizes: Vec<f64> = loads.iter().map(|(bytes, _)| *bytes).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    let points = sizes.iter().map(|size| {
        let of_size: Vec<f64> =
            loads.iter().filter(|(bytes, _)| bytes == size).map(|(_, seconds)| *seconds).collect();
        (*size, median(&of_size).max(1e-9))
    });
    let (mut weights, mut by_size, mut by_square, mut targets, mut target_by_size) =
        (0.0, 0.0, 0.0, 0.0, 0.0);
    for (size, seconds) in points {
        let (one, size) = (1.0 / seconds, size / seconds);
        weights += one * one;
        by_size += one * size;
        by_square += size * size;
        targets += one;
        target_by_size += size;
    }
    let determinant = weights * by_square - by_size * by_size;
    if sizes.len() < 2 || determinant <= 0.0 {
        return None;
    }
    let latency = (targets * by_square - target_by_size * by_size) / determinant;
    let per_byte = (weights * target_by_size - by_size * targets) / determinant;
    if latency < 0.0 {
        return Some((0.0, by_square / target_by_size));
    }
    // A slope without a sign is below the resolution of the measurement: 1,000 GB/s.
    Some((latency, 1.0 / per_byte.max(1e-12)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        Model::named("llama-3-8b").expect("valid")
    }

    /// Prefills, chunks behind prefixes, and decodes of several sizes on an exact machine.
    fn steps(hardware: &Hardware) -> Vec<MeasuredStep> {
        let costs = Costs::new(hardware, &model(), 1);
        let mut compositions: Vec<Vec<Chunk>> = Vec::new();
        for tokens in [16, 64, 256, 512] {
            for prefix in [0, 512, 2_048] {
                compositions.push(vec![Chunk { tokens, prefix }]);
            }
        }
        for sequences in [1, 2, 4, 8, 16] {
            for prefix in [64, 1_024] {
                compositions.push(vec![Chunk { tokens: 1, prefix }; sequences]);
            }
        }
        let timed = |chunks: Vec<Chunk>| {
            let work = chunks
                .iter()
                .fold(costs.weights(), |work, chunk| work + costs.chunk(chunk.tokens, chunk.prefix));
            MeasuredStep { seconds: costs.seconds(work), chunks }
        };
        compositions.into_iter().map(timed).collect()
    }

    fn machine() -> Hardware {
        let mut hardware = Hardware::named("cpu").expect("valid");
        hardware.overlap = 0.0;
        (hardware.compute_efficiency, hardware.attention_efficiency) = (0.4, 0.15);
        (hardware.step_overhead_nanos, hardware.sequence_overhead_nanos) = (8_000_000, 500_000);
        hardware
    }

    #[test]
    fn fit_recovers_the_figures_of_an_exact_machine() {
        let fit = fit(&model(), &steps(&machine())).expect("enough steps");
        let close =
            |value: f64, expected: f64| assert!((value / expected - 1.0).abs() < 0.01, "{value} {expected}");
        close(fit.flops_per_second, 0.4e12);
        close(fit.attention_flops_per_second, 0.15e12);
        close(fit.bytes_per_second, 20e9);
        assert!(fit.deviation_max < 1e-3, "{fit:?}");
        // 800 ms of weights hide an overhead of 8 ms to within some per cent.
        assert!((fit.step_overhead + fit.sequence_overhead - 0.008_5).abs() < 0.001, "{fit:?}");
    }

    #[test]
    fn noise_of_measurement_shows_as_deviation() {
        let mut steps = steps(&machine());
        for (at, step) in steps.iter_mut().enumerate() {
            step.seconds *= if at % 2 == 0 { 1.1 } else { 0.9 };
        }
        let fit = fit(&model(), &steps).expect("enough steps");
        assert!((0.05..0.15).contains(&fit.deviation_median), "{fit:?}");
    }

    #[test]
    fn too_few_steps_and_steps_without_time_are_refused_with_the_remedy() {
        let mut steps = steps(&machine());
        let error = fit(&model(), &steps[..3]).expect_err("too few");
        assert!(error.contains("at least 15"), "{error}");
        steps[4].seconds = 0.0;
        let error = fit(&model(), &steps).expect_err("no time");
        assert!(error.contains("step 4") && error.contains("again"), "{error}");
    }

    #[test]
    fn loads_have_a_latency_and_a_bandwidth() {
        let line = |bytes: f64| (bytes, 0.004 + bytes / 5e9);
        let loads: Vec<(f64, f64)> = [1e6, 4e6, 4e6, 16e6].into_iter().map(line).collect();
        let (latency, bandwidth) = fit_loads(&loads).expect("several sizes");
        assert!((latency - 0.004).abs() < 1e-9 && (bandwidth / 5e9 - 1.0).abs() < 1e-6);
        assert_eq!(fit_loads(&loads[1..3]), None, "one size");
    }
}
