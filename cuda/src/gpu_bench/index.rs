//! The index on the GPU next to that on the CPU (Tutti, Fig. 3).

use super::Measurement;
use crate::gpu::GpuError;
use crate::index::{IndexTimes, compare_on_host};
use crate::kernels::{Kernels, compare_on_gpu};

/// Blocks of a request: 1K, 8K and 128K tokens in blocks of 16.
const REQUESTS: [usize; 3] = [64, 512, 8192];
/// Blocks that the indexes hold before.
const RESIDENT: usize = 200_000;

/// Measures insertion and search of the blocks of one request, on the CPU and on the GPU: time on the GPU over that on
/// the CPU, with the copies of keys and places. Medians.
///
/// # Errors
/// Failures of the GPU, and answers that differ.
pub fn index_times(kernels: &Kernels, repetitions: usize) -> Result<Vec<Measurement>, GpuError> {
    let mut figures = Vec::new();
    for blocks in REQUESTS {
        figures.extend(ratios(&compare_on_gpu(kernels, blocks, RESIDENT, repetitions)?, "GPU"));
    }
    Ok(figures)
}

/// Measures the same on one thread, with the code of the GPU's index in the host build.
pub fn host_index_times(repetitions: usize) -> Vec<Measurement> {
    REQUESTS
        .into_iter()
        .flat_map(|blocks| ratios(&compare_on_host(blocks, RESIDENT, repetitions), "host build"))
        .collect()
}

fn ratios(times: &IndexTimes, which: &str) -> [Measurement; 2] {
    let figure = |name: &str, gpu: std::time::Duration, cpu: std::time::Duration| {
        let ratio = gpu.as_secs_f64() / cpu.as_secs_f64();
        let detail = format!(
            "{} blocks next to {RESIDENT}: {gpu:.1?} in the {which}, {cpu:.1?} on the CPU",
            times.keys
        );
        Measurement::new(format!("index, {name}, {} blocks", times.keys), ratio, "ratio", detail)
    };
    [
        figure("insertion", times.gpu_insert, times.cpu_insert),
        figure("search", times.gpu_find, times.cpu_find),
    ]
}
