//! What an operator may set of the core.

use std::time::Duration;

use reprise_policy::eviction::EvictionKind;

use super::tenants::TenantQuotas;

/// Settings of an agent core. Times are spans, sizes bytes.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A committed block is on its way to NVMe at the latest after this.
    pub writeback_delay: Duration,
    /// So many bytes of unsaved blocks are flushed without waiting for the delay; also the size of a batch.
    pub writeback_bytes: u64,
    /// Deadline of loads that name none, and of every fetch from a peer at the least.
    pub load_deadline_default: Duration,
    /// The directory has so long to answer.
    pub lookup_timeout: Duration,
    /// Bytes of one device read for loads that name none.
    pub read_bytes_default: u64,
    /// Share of the pool, in thousandths, that is kept free ahead of need.
    pub pool_free_permille: u16,
    /// Share of the arena, in thousandths, that reservations and unsaved blocks may take: the rest stays for
    /// loads while the device is slower than the engines.
    pub arena_unsaved_permille: u16,
    /// Share of the arena, in thousandths, that one session may hold reserved.
    pub arena_session_permille: u16,
    /// A reserved slot that was not committed by then is taken back.
    pub reservation_timeout: Duration,
    /// The blocks of a load are readable for so long after the last of them has arrived.
    pub load_hold_timeout: Duration,
    /// Share of the arena, in thousandths, that blocks may take which peers are waiting for.
    pub arena_serves_permille: u16,
    /// What is told to a session that finds the arena full.
    pub retry_after: Duration,
    /// Order of eviction, in DRAM and on NVMe.
    pub eviction: EvictionKind,
    /// Bytes a second that this node gives to others and takes from them so that they have replicas of their own; 0: none.
    /// Fetches for engines are not held back.
    pub placement_bandwidth: u64,
    /// A durable block that peers have read so often within the window gets another durable replica; at least 1.
    pub hot_reads: u32,
    /// See `hot_reads`; above zero.
    pub hot_window: Duration,
    /// Quotas of tenants; those that are not named get no reservation and no limit.
    pub tenants: Vec<TenantQuotas>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            // One sync per 50 ms costs nothing; 64 MiB are 20 ms of a 3.6 GB/s device.
            writeback_delay: Duration::from_millis(50),
            writeback_bytes: 64 << 20,
            load_deadline_default: Duration::from_secs(5),
            lookup_timeout: Duration::from_millis(500),
            // A quarter of a 2 MiB block: 8 layers of Llama-3-8B, near a device's full bandwidth.
            read_bytes_default: 512 << 10,
            // 3 % of 30 TB is 15 minutes of writing at 1 GB/s; of a 1 GiB test pool 15 blocks of 2 MiB.
            pool_free_permille: 30,
            arena_unsaved_permille: 750,
            // Two engines can save at once, and none can keep the others from it.
            arena_session_permille: 500,
            // An engine fills 8,192 slots of 2 MiB, a whole request, in 6 s at the 2.7 GB/s of one copying thread.
            reservation_timeout: Duration::from_secs(60),
            // Copying 16 GiB takes seconds; an engine that holds a load for minutes has lost it.
            load_hold_timeout: Duration::from_secs(600),
            // 256 MiB of 1 GiB: 128 blocks of 2 MiB under way are 25 times what 10 GB/s carry in a millisecond.
            arena_serves_permille: 250,
            // 2 MiB blocks free at 3.6 GB/s come every 0.6 ms.
            retry_after: Duration::from_millis(2),
            eviction: EvictionKind::default(),
            // A tenth of what one stream of 25 Gbit/s carries: 2 TiB go in 2.3 h.
            placement_bandwidth: 256 << 20,
            hot_reads: 4,
            hot_window: Duration::from_secs(60),
            tenants: Vec::new(),
        }
    }
}
