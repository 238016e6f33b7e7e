//! Bytes that a cold store holds and moves for a trace, and their price.
//!
//! A block is written when the last node evicts it, once, and stays until the end of the trace: a longer time stores more
//! blocks, but adds no hits. Blocks are written in bundles, and each block is read by a request.

use super::load::Load;
use super::machine::Machine;
use crate::serving::profiles::GB;

/// Blocks of a bundle, the object that is written to the store.
const BUNDLE_BLOCKS: f64 = 256.0;

/// Hours of a day.
const HOURS: f64 = 24.0;

/// Bytes of a cold store.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ColdTraffic {
    /// Bytes that it holds at the end of the trace.
    pub stored_bytes: f64,
    /// Bytes written a day.
    pub written_bytes_per_day: f64,
    /// Bytes read a day.
    pub read_bytes_per_day: f64,
}

impl ColdTraffic {
    /// Price of an hour: storage, and the requests that write bundles and read blocks of agents.
    pub fn usd_per_hour(&self, machine: &Machine, load: &Load) -> f64 {
        let hardware = &machine.hardware;
        let block_bytes = (load.recorded.block_tokens * machine.model.kv_bytes_per_token()) as f64;
        let blocks = |bytes_per_day: f64| bytes_per_day / HOURS / block_bytes;
        self.stored_bytes / GB * hardware.cold_usd_per_gb_hour
            + blocks(self.written_bytes_per_day) / BUNDLE_BLOCKS * hardware.cold_usd_per_write
            + blocks(self.read_bytes_per_day) * hardware.cold_usd_per_read
    }

    /// Mean of samples; `None` without a cold store.
    pub(super) fn mean(samples: &[ColdTraffic]) -> Option<ColdTraffic> {
        let count = samples.len() as f64;
        let mean = |of: fn(&ColdTraffic) -> f64| samples.iter().map(of).sum::<f64>() / count;
        (!samples.is_empty()).then(|| ColdTraffic {
            stored_bytes: mean(|one| one.stored_bytes),
            written_bytes_per_day: mean(|one| one.written_bytes_per_day),
            read_bytes_per_day: mean(|one| one.read_bytes_per_day),
        })
    }
}
