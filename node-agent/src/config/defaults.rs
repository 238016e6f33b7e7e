//! Default values of all settings, each with its reason.
//!
//! Invariant: the output of `--print-default-config` is built from these constants and parses to them
//! (tested in [`super`]). At run time they are used only through [`super::Config`].

use std::time::Duration;

use reprise_policy::{ByteSize, Interval};

/// Engines and agent usually run as different users of one group.
pub(super) const SOCKET: &str = "/run/reprise/agent.sock";

/// Owner and group may connect; `allow_uids` decides which users are accepted.
pub(super) const SOCKET_MODE: &str = "0660";

/// A warp drives one queue pair: 8 SMs with two warps each.
pub(super) const QUEUE_PAIRS_PER_SESSION: u32 = 16;

/// Entries of a queue that a client drives. With lists of pages, each has a page: 4 MiB for each queue pair.
pub(super) const SESSION_QUEUE_DEPTH: u32 = 1024;

/// Small enough to start on any machine. A node that serves engines gives the arena most of its free
/// memory.
pub(super) const ARENA_BYTES: ByteSize = ByteSize(1 << 30);

/// One descriptor per region: with 256 MiB, 1 TiB needs 4,096 of them, and a region holds 128 blocks of 2
/// MiB.
pub(super) const REGION_BYTES: ByteSize = ByteSize(256 << 20);

/// Holds 31 slots of 2 MiB with their headers; also the maximum slot size of a default pool.
pub(super) const SEGMENT_BYTES: ByteSize = ByteSize(64 << 20);

/// Operations in flight per device. Reads of 32 KiB need about 64 to saturate an NVMe device; the rest
/// covers the time that the worker spends on verification.
pub(super) const QUEUE_DEPTH: u32 = 128;

/// 3 % of 30 TB is 15 minutes of writing at 1 GB/s.
pub(super) const POOL_FREE_PERMILLE: u16 = 30;

/// A quarter of the arena stays available for loads while the device is slower than the engines.
pub(super) const ARENA_UNSAVED_PERMILLE: u16 = 750;

/// Two engines can save concurrently, and a single one cannot block the others.
pub(super) const ARENA_SESSION_PERMILLE: u16 = 500;

/// 128 blocks of 2 MiB in 1 GiB, far more than a network transfers during one device read.
pub(super) const ARENA_SERVES_PERMILLE: u16 = 250;

/// Maximum time before a block is written. A crash loses the blocks of this time and of one batch.
pub(super) const WRITEBACK_DELAY: Interval = Interval(Duration::from_millis(50));

/// As long as the prefill of a long prompt, after which decode has other windows. A crash loses the blocks of this time
/// too.
pub(super) const SLACK_DELAY: Interval = Interval(Duration::from_secs(1));

/// One write batch: 32 blocks of 2 MiB, so the cost of two syncs is small compared to the data.
pub(super) const WRITEBACK_BYTES: ByteSize = ByteSize(64 << 20);

/// Loopback until the operator configures the peers' network.
pub(super) const PEERS_LISTEN: &str = "127.0.0.1:7410";

/// Maximum bytes in flight of one fetch between two agents.
pub(super) const CREDIT_BYTES: ByteSize = ByteSize(64 << 20);

/// A peer that is silent for this long counts as lost; also bounds how long a dead node stays in the
/// directory.
pub(super) const STALL_TIMEOUT: Interval = Interval(Duration::from_secs(2));

/// A slower lookup costs more than most misses.
pub(super) const LOOKUP_TIMEOUT: Interval = Interval(Duration::from_millis(500));

/// Admin pages are not authenticated: loopback unless configured otherwise.
pub(super) const ADMIN_LISTEN: &str = "127.0.0.1:7411";

/// Time for a request of 128 Ki tokens (16 GiB) from one device at 3.6 GB/s.
pub(super) const LOAD_DEADLINE: Interval = Interval(Duration::from_secs(5));

/// Copying a whole request takes seconds; a load held for minutes is abandoned.
pub(super) const LOAD_HOLD: Interval = Interval(Duration::from_secs(600));

/// An engine fills the slots of a whole request in seconds.
pub(super) const RESERVATION: Interval = Interval(Duration::from_secs(60));

/// Size of a device read: large enough for full bandwidth at a depth of 16, small enough that the first
/// layers of a 2 MiB block do not wait for the last.
pub(super) const READ_BYTES: ByteSize = ByteSize(512 << 10);

/// A tenth of a 25 Gbit/s network: copies 2 TiB in 2.3 h without affecting engines.
pub(super) const PLACEMENT_BANDWIDTH: ByteSize = ByteSize(256 << 20);

/// Number of peer reads within [`HOT_WINDOW`] after which a block gets another replica.
pub(super) const HOT_READS: u32 = 4;

/// Window for counting peer reads; see [`HOT_READS`].
pub(super) const HOT_WINDOW: Interval = Interval(Duration::from_secs(60));

/// At 3.6 GB/s and 20 ms an iteration, a quarter of 1 GiB is 3.7 iterations of a device.
pub(super) const PREFETCH_ARENA_PERMILLE: u16 = 250;

/// Two engines can prefetch at the same time.
pub(super) const PREFETCH_SESSION_PERMILLE: u16 = 500;

/// Eight requests of 32,768 tokens in blocks of 16; 40 bytes for each key.
pub(super) const PREFETCH_SESSION_KEYS: u32 = 16_384;

/// A request that runs later is too uncertain to hold memory for.
pub(super) const PREFETCH_WINDOW: u32 = 64;

/// The rest is for loads that no hint has announced (TierKV §3.4).
pub(super) const PREFETCH_HIGH_WATER_PERMILLE: u16 = 800;

/// A request that waits longer was listed too early, or its engine never finishes it.
pub(super) const PREFETCH_STAGED: Interval = Interval(Duration::from_secs(30));

/// Far above the time that a request waits in the queue of an engine.
pub(super) const PREFETCH_LISTED: Interval = Interval(Duration::from_secs(600));

/// Loads, saves and blocks read ahead of the tenant keep the rest.
pub(super) const RETENTION_PERMILLE: u16 = 250;

/// 128 GiB in blocks of 2 MiB; about 200 bytes for each pin.
pub(super) const RETENTION_BLOCKS_PER_TENANT: u32 = 65_536;

/// A pin of a day covers a conversation or a working day; a longer one indicates a leak.
pub(super) const RETENTION_TTL_MAX: Interval = Interval(Duration::from_secs(86_400));

/// A directory of the node, so that the state outlives pods.
pub(super) const STATE_DIRECTORY: &str = "/var/lib/reprise";

/// 1,000 nodes cause at most 100 writes a second on average, even if everything changes everywhere.
pub(super) const STATUS_EVERY: Interval = Interval(Duration::from_secs(10));

/// A filter directive of the `tracing` crate.
pub(super) const LOG_LEVEL: &str = "info";
