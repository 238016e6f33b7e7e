//! `reprise bench gpu`: copies, staged loads, an index, and the effect of I/O on computation, on the first GPU.
//!
//! Without a GPU, it reports the device `none` with the reason, and the figures of the host build of copies and index.

use reprise_cuda::gpu::{Gpu, Partition, SmShare};
use reprise_cuda::gpu_bench::{self, Goal, Measurement};
use reprise_cuda::kernels::Kernels;
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::{Figure, Target};

use super::device::{Device, announce};

/// SMs for I/O kernels.
const IO_SMS: SmShare = SmShare::Count(8);
/// Layers of each measurement of the effect on computation.
const LAYERS: usize = 40;

/// Measures on the first GPU, or in the host build.
pub(super) fn run(settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    let opened = Gpu::open(0).and_then(|gpu| Ok((Kernels::load(&gpu)?, gpu)));
    let (kernels, gpu) = match opened {
        Ok(opened) => opened,
        Err(error) if error.is_unavailable() => {
            let reason = Some(error.to_string());
            announce(
                settings,
                Device { benchmark: "gpu", device: "none".to_owned(), code: "host build", reason },
            );
            let mut measured = gpu_bench::host_copies(settings.repetitions)?;
            measured.extend(gpu_bench::host_index_times(settings.repetitions));
            return Ok(figures("host", measured));
        }
        Err(error) => return Err(error.into()),
    };
    let device = gpu.info().name.clone();
    announce(settings, Device { benchmark: "gpu", device, code: "kernels", reason: None });
    let mut measured = gpu_bench::device_copies(&kernels, settings.repetitions)?;
    let partition = Partition::new(&gpu, IO_SMS)?;
    measured.extend(gpu_bench::staged_load(&kernels, &partition, settings.repetitions)?);
    measured.extend(gpu_bench::index_times(&kernels, settings.repetitions)?);
    measured.extend(gpu_bench::slowdown(&kernels, IO_SMS, LAYERS)?);
    Ok(figures("gpu", measured))
}

fn figures(prefix: &str, measured: Vec<Measurement>) -> Vec<Figure> {
    let figure = |measurement: Measurement| {
        let target = match measurement.goal {
            Some(Goal::AtLeast(bound)) => Target::AtLeast(bound),
            Some(Goal::AtMost(bound)) => Target::AtMost(bound),
            None => Target::None,
        };
        let name = format!("{prefix}: {} ({})", measurement.name, measurement.detail);
        Figure::absolute(name, measurement.value, measurement.unit, target)
    };
    measured.into_iter().map(figure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_become_targets() {
        let measurement = Measurement {
            name: "Gather".to_owned(),
            value: 0.8,
            unit: "ratio",
            goal: Some(Goal::AtLeast(0.85)),
            detail: "1 GiB".to_owned(),
        };
        let figures = figures("gpu", vec![measurement]);
        assert_eq!(figures[0].name, "gpu: Gather (1 GiB)");
        assert_eq!(figures[0].met, Some(false));
    }
}
