//! Measurement of the cost of order by streams: requests of one block, with and without a stream.
//!
//! Rings on an emulated controller move the blocks, so the device costs little. Requests of each kind are submitted at
//! once; then all are waited for. With `On`, a request begins when the one before has ended, so its time is that of a
//! chain. `Unordered` and `After` overlap.

use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use reprise_nvme::emulated::{Emulation, Storage};

use crate::gpu::{Partition, Stream};
use crate::kernels::Kernels;
use crate::ring::RingError;
use crate::store::mover::{LayerMover, LayerRequest, LayerTicket, MoveError};
use crate::store::verify::EmulatedRings;
use crate::store::{BlockPlace, EngineStream, HostStream, KvGeometry, KvOrder, RequestOrder};

/// Requests of a round: fewer than the words of a stream.
const REQUESTS: usize = 256;
/// Bytes of a block.
const BLOCK_BYTES: usize = 4096;
/// Limit of a request: none must reach it.
const LIMIT: Duration = Duration::from_secs(30);

/// Order of the requests of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostMode {
    /// Without a stream.
    Unordered,
    /// Behind one point of a stream, which waits for each request.
    After,
    /// Between work of a stream.
    On,
}

impl CostMode {
    /// All modes, the one without a stream first.
    pub const ALL: [CostMode; 3] = [CostMode::Unordered, CostMode::After, CostMode::On];

    /// Returns what orders the requests, for names of figures.
    pub fn text(self) -> &'static str {
        match self {
            CostMode::Unordered => "without a stream",
            CostMode::After => "After a point, and a stream that waits",
            CostMode::On => "On a stream",
        }
    }
}

/// Times of one request on average.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamCost {
    /// Order of the requests.
    pub mode: CostMode,
    /// Nanoseconds in the calls that submit it.
    pub submit_ns: f64,
    /// Nanoseconds from the first submission to the last end, divided by the number of requests.
    pub total_ns: f64,
}

/// Measures all modes in each round, in turn; returns the medians. The kernel drives the ring if `gpu` is present, and a
/// thread otherwise.
///
/// # Errors
/// `Invalid` if a block was not moved; `NoStreamWaits`, `Gpu`, `Ring`, `Thread`.
pub fn stream_cost(gpu: Option<(&Kernels, &Partition)>, rounds: usize) -> Result<[StreamCost; 3], MoveError> {
    // Memory of the stream before the kernel starts, and dropped after it.
    let stream = match gpu {
        Some((kernels, _)) => EngineStream::on_gpu(Arc::new(Stream::new(kernels.gpu())?))?,
        None => EngineStream::on_host(&HostStream::start()?),
    };
    let (blocks, order) = (REQUESTS, KvOrder::BlockLayerPart);
    let geometry = KvGeometry { layers: 1, parts: 1, blocks, object_bytes: BLOCK_BYTES, order };
    let bytes = geometry.bytes();
    let config = ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Never };
    let arena = Arena::new(&config).map_err(RingError::from)?;
    let memory = arena.span(0, 0, bytes).map_err(RingError::from)?;
    let emulation = Emulation::of(Storage::memory(bytes as usize));
    let mut rings = EmulatedRings::start(geometry, &memory, vec![emulation], gpu)?;
    let mut samples: [Vec<StreamCost>; 3] = Default::default();
    let mut measured = Ok(());
    // One more round than requested: the first one warms up.
    for round in 0..=rounds {
        for (mode, samples) in CostMode::ALL.into_iter().zip(&mut samples) {
            match measure(rings.mover(), &stream, mode) {
                Ok(cost) if round > 0 => samples.push(cost),
                Ok(_) => {}
                Err(error) => measured = measured.and(Err(error)),
            }
        }
    }
    rings.stop()?;
    measured?;
    let median = |costs: &[StreamCost], value: fn(&StreamCost) -> f64| {
        crate::gpu_bench::median(costs.iter().map(value).collect())
    };
    let of_mode = |(mode, costs): (CostMode, Vec<StreamCost>)| StreamCost {
        mode,
        submit_ns: median(&costs, |cost| cost.submit_ns),
        total_ns: median(&costs, |cost| cost.total_ns),
    };
    let [unordered, after, on] = samples;
    Ok([(CostMode::Unordered, unordered), (CostMode::After, after), (CostMode::On, on)].map(of_mode))
}

fn measure(
    mover: &mut dyn LayerMover,
    stream: &EngineStream,
    mode: CostMode,
) -> Result<StreamCost, MoveError> {
    let began = Instant::now();
    let point = match mode {
        CostMode::After => Some(stream.mark()?),
        CostMode::Unordered | CostMode::On => None,
    };
    let order = match (mode, &point) {
        (CostMode::On, _) => RequestOrder::On(stream),
        (_, Some(point)) => RequestOrder::After(point),
        (_, None) => RequestOrder::Unordered,
    };
    let mut tickets: Vec<LayerTicket> = Vec::with_capacity(REQUESTS);
    for slot in 0..REQUESTS {
        let place = BlockPlace { device: 0, payload: (slot * BLOCK_BYTES) as u64, slot };
        let request = LayerRequest { layer: 0, blocks: &[place], timeout: LIMIT, order };
        let ticket = mover.retrieve_layer(&request)?;
        if point.is_some() {
            mover.delay_stream(ticket, stream)?;
        }
        tickets.push(ticket);
    }
    let submitted = began.elapsed();
    for ticket in tickets {
        if let Some(failure) = mover.wait(ticket)?.failures.first() {
            return Err(MoveError::Invalid(format!("a request {}: {}", mode.text(), failure.error)));
        }
    }
    let each = |time: Duration| time.as_nanos() as f64 / REQUESTS as f64;
    Ok(StreamCost { mode, submit_ns: each(submitted), total_ns: each(began.elapsed()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_has_times() {
        let costs = stream_cost(None, 1).expect("it runs");
        assert_eq!(costs.map(|cost| cost.mode), CostMode::ALL);
        for cost in costs {
            assert!(cost.submit_ns > 0.0 && cost.total_ns > cost.submit_ns, "{cost:?}");
        }
    }
}
