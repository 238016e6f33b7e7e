//! Settings of the core that an operator may change.

use std::time::Duration;

use reprise_policy::TenantId;
use reprise_policy::admission::AdmissionMode;
use reprise_policy::admission::budget::DailyBudget;
use reprise_policy::eviction::EvictionPolicy;
use reprise_policy::fair_order::Weights;
use reprise_policy::prefetch::{HIGH_WATER_PERMILLE, WINDOW_MAX};

use crate::cache::TenantQuotas;
use crate::limits::{
    LOOKAHEAD_LISTED_MAX, LOOKAHEAD_SESSION_KEYS_MAX, LOOKAHEAD_STAGED_MAX, PREFETCH_ARENA_PERMILLE,
    PREFETCH_SESSION_PERMILLE,
};

/// Settings of an agent core. Sizes are in bytes.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Maximum time between the commit of a block and the start of its write to NVMe.
    pub writeback_delay: Duration,
    /// Unsaved bytes that start a write before the delay has passed; also the size of a write batch.
    pub writeback_bytes: u64,
    /// Maximum time after `writeback_delay` for which a write is deferred to the slack of engines; 0 never defers.
    pub slack_delay: Duration,
    /// Deadline of loads without one, and minimum deadline of a fetch from a peer.
    pub load_deadline_default: Duration,
    /// Timeout of a lookup in the directory.
    pub lookup_timeout: Duration,
    /// Bytes of one device read, for loads that state none.
    pub read_bytes_default: u64,
    /// Share of the pool, in thousandths, that eviction keeps free ahead of writes.
    pub pool_free_permille: u16,
    /// Maximum share of the arena, in thousandths, for reservations and unsaved blocks. The rest remains for
    /// loads when the devices are slower than the engines.
    pub arena_unsaved_permille: u16,
    /// Maximum share of the arena, in thousandths, that one session may hold reserved.
    pub arena_session_permille: u16,
    /// Time after which a reserved slot that was not committed is released.
    pub reservation_timeout: Duration,
    /// Time for which a complete load may be held.
    pub load_hold_timeout: Duration,
    /// Maximum share of the arena, in thousandths, for blocks that are being sent to peers. While several tenants compete,
    /// they may together have twice as much, but beyond the share at most half of the arena.
    pub arena_serves_permille: u16,
    /// Delay that a session is asked to wait when the arena is full.
    pub retry_after: Duration,
    /// Eviction policy in DRAM.
    pub dram_eviction: EvictionPolicy,
    /// Eviction policy of the pool on NVMe.
    pub nvme_eviction: EvictionPolicy,
    /// Rule by which saved blocks are written to NVMe.
    pub admission: AdmissionMode,
    /// Limit of the writes of each device; `None`: no limit.
    pub daily_write_budget: Option<DailyBudget>,
    /// Whether DRAM copies that one request has used are evicted first once they are on NVMe, while DRAM is nearly full.
    pub skip_dram: bool,
    /// Bytes per second for replicas sent to and received from other nodes; 0 disables replication. Fetches
    /// for engines are not limited.
    pub placement_bandwidth: u64,
    /// Number of reads by peers within the window after which a durable block gets another durable replica;
    /// at least 1.
    pub hot_reads: u32,
    /// Window for `hot_reads`; above zero.
    pub hot_window: Duration,
    /// Quotas of tenants. Other tenants have no reservation and no limit.
    pub tenants: Vec<TenantQuotas>,
    /// Weights of tenants in shares of bandwidth; other tenants have 1.
    pub bandwidth: Weights<TenantId>,
    /// Limits of reads ahead of loads.
    pub prefetch: PrefetchSettings,
    /// Share, in thousandths, of what a tenant can have in a tier that its retention pins may keep.
    pub retention_permille: u16,
    /// Maximum number of blocks that a tenant pins.
    pub retention_blocks_max: u32,
    /// Longest time of a retention pin.
    pub retention_ttl_max: Duration,
}

/// Limits of reads ahead of loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchSettings {
    /// Maximum keys of all requests that a session lists; at most [`LOOKAHEAD_SESSION_KEYS_MAX`].
    pub session_keys: usize,
    /// Share of the arena, and of each tenant's limit in it, that blocks read ahead may fill, in thousandths.
    pub arena_permille: u64,
    /// Share of that for one session, in thousandths.
    pub session_permille: u64,
    /// Maximum iterations to look ahead; at most [`WINDOW_MAX`].
    pub window_max: u32,
    /// Share of a device's bandwidth, in thousandths, that reads may fill in one iteration.
    pub high_water_permille: u64,
    /// Time for which blocks of a listed request stay staged.
    pub staged: Duration,
    /// Time after which a request that is still listed expires.
    pub listed: Duration,
}

impl Default for PrefetchSettings {
    fn default() -> Self {
        PrefetchSettings {
            session_keys: LOOKAHEAD_SESSION_KEYS_MAX,
            arena_permille: PREFETCH_ARENA_PERMILLE,
            session_permille: PREFETCH_SESSION_PERMILLE,
            window_max: WINDOW_MAX,
            high_water_permille: HIGH_WATER_PERMILLE,
            staged: LOOKAHEAD_STAGED_MAX,
            listed: LOOKAHEAD_LISTED_MAX,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            // One sync per 50 ms is negligible; 64 MiB take 20 ms on a 3.6 GB/s device.
            writeback_delay: Duration::from_millis(50),
            writeback_bytes: 64 << 20,
            // As long as the prefill of a long prompt, after which decode has other windows.
            slack_delay: Duration::from_secs(1),
            load_deadline_default: Duration::from_secs(5),
            lookup_timeout: Duration::from_millis(500),
            // A quarter of a 2 MiB block, 8 layers of Llama-3-8B: near a device's full bandwidth.
            read_bytes_default: 512 << 10,
            // 3 % of 30 TB is 15 minutes of writing at 1 GB/s; of a 1 GiB test pool, 15 blocks of 2 MiB.
            pool_free_permille: 30,
            arena_unsaved_permille: 750,
            // Two engines can save at the same time, and no engine can block the others.
            arena_session_permille: 500,
            // An engine fills 8,192 slots of 2 MiB, a whole request, in 6 s at the 2.7 GB/s of one copying
            // thread.
            reservation_timeout: Duration::from_secs(60),
            // Copying 16 GiB takes seconds; an engine that holds a load for minutes has leaked it.
            load_hold_timeout: Duration::from_secs(600),
            // 256 MiB of 1 GiB: 128 blocks of 2 MiB in flight are 25 times what 10 GB/s carry in a
            // millisecond.
            arena_serves_permille: 250,
            // At 3.6 GB/s, a 2 MiB slot becomes free every 0.6 ms.
            retry_after: Duration::from_millis(2),
            dram_eviction: EvictionPolicy::default(),
            nvme_eviction: EvictionPolicy::default(),
            admission: AdmissionMode::default(),
            daily_write_budget: None,
            skip_dram: false,
            // A tenth of one 25 Gbit/s stream: 2 TiB take 2.3 h.
            placement_bandwidth: 256 << 20,
            hot_reads: 4,
            hot_window: Duration::from_secs(60),
            tenants: Vec::new(),
            bandwidth: Weights::default(),
            prefetch: PrefetchSettings::default(),
            // Loads, saves and blocks read ahead of the tenant keep the rest.
            retention_permille: 250,
            // 13 MB of pins; 128 GiB in blocks of 2 MiB.
            retention_blocks_max: 65_536,
            // A pin of a day covers a conversation or a working day; a longer one indicates a leak.
            retention_ttl_max: Duration::from_secs(86_400),
        }
    }
}
