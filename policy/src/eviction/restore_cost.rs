//! Estimated time to bring an evicted block back.
//!
//! The estimates order blocks of one tier; they do not predict a load. Until measured rates are available,
//! they are constants of a node of the design (docs/ARCHITECTURE.md): what matters is that recomputing costs
//! several times as much as reading.

/// Source from which an evicted block comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreFrom {
    /// A device of this node.
    Device,
    /// An engine computes it again.
    Recompute,
}

/// Latency of a read, in nanoseconds.
const DEVICE_LATENCY_NS: u64 = 100_000;

/// Nanoseconds per KiB of a read: 3.5 GB/s.
const DEVICE_NS_PER_KIB: u64 = 290;

/// Nanoseconds to recompute a token: 10,000 tokens per second.
const RECOMPUTE_NS_PER_TOKEN: u64 = 100_000;

/// Returns the time in nanoseconds for a block of `bytes` bytes and `tokens` tokens.
pub fn restore_ns(from: RestoreFrom, bytes: u64, tokens: u64) -> u64 {
    match from {
        RestoreFrom::Device => DEVICE_LATENCY_NS + bytes / 1024 * DEVICE_NS_PER_KIB,
        RestoreFrom::Recompute => tokens * RECOMPUTE_NS_PER_TOKEN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recomputing_a_block_costs_more_than_reading_it() {
        let read = restore_ns(RestoreFrom::Device, 2 << 20, 16);
        assert!((600_000..800_000).contains(&read), "{read} ns for 2 MiB at 3.5 GB/s");
        assert!(restore_ns(RestoreFrom::Recompute, 2 << 20, 16) > 2 * read);
    }
}
