//! Values of every setting that a configuration leaves out, each with its reason.
//!
//! Invariant: the text that `--print-default-config` prints is made of these constants and parses to them
//! (tested in [`super`]). Nothing here is read at run time except through [`super::Config`].

use std::time::Duration;

use reprise_policy::{ByteSize, Interval};

/// Engines and agent usually run as different users of one group.
pub(super) const SOCKET: &str = "/run/reprise/agent.sock";

/// Owner and group may connect; who may really talk is decided by `allow_uids`.
pub(super) const SOCKET_MODE: &str = "0660";

/// Small enough to start anywhere; a node that serves engines gives the arena most of its free memory.
pub(super) const ARENA_BYTES: ByteSize = ByteSize(1 << 30);

/// One descriptor per region: 256 MiB keeps 1 TiB at 4,096 of them, and 128 blocks of 2 MiB in each.
pub(super) const REGION_BYTES: ByteSize = ByteSize(256 << 20);

/// Holds 31 slots of 2 MiB and their headers; also the largest slot that a default pool takes.
pub(super) const SEGMENT_BYTES: ByteSize = ByteSize(64 << 20);

/// Operations in flight per device: 32 KiB reads need about 64 to saturate an NVMe device, and the
/// worker needs some more to verify behind the device's back.
pub(super) const QUEUE_DEPTH: u32 = 128;

/// 3 % of 30 TB is 15 minutes of writing at 1 GB/s.
pub(super) const POOL_FREE_PERMILLE: u16 = 30;

/// A quarter of the arena stays for loads while the device is slower than the engines.
pub(super) const ARENA_UNSAVED_PERMILLE: u16 = 750;

/// Two engines can save at once, and none can keep the others from it.
pub(super) const ARENA_SESSION_PERMILLE: u16 = 500;

/// 128 blocks of 2 MiB in 1 GiB: far more than a network carries in the time of one device read.
pub(super) const ARENA_SERVES_PERMILLE: u16 = 250;

/// A save is durable this long after its commit plus one batch; what a crash may lose.
pub(super) const WRITEBACK_DELAY: Interval = Interval(Duration::from_millis(50));

/// One write batch: 32 blocks of 2 MiB, so that two syncs cost little beside the data.
pub(super) const WRITEBACK_BYTES: ByteSize = ByteSize(64 << 20);

/// Loopback until an operator says which network peers share.
pub(super) const PEERS_LISTEN: &str = "127.0.0.1:7410";

/// Bytes of one fetch that may be under way between two agents.
pub(super) const CREDIT_BYTES: ByteSize = ByteSize(64 << 20);

/// A peer that sends nothing for this long is lost; also how soon a dead node is out of the directory.
pub(super) const STALL_TIMEOUT: Interval = Interval(Duration::from_secs(2));

/// A look-up that takes longer than this costs more than most misses.
pub(super) const LOOKUP_TIMEOUT: Interval = Interval(Duration::from_millis(500));

/// Admin pages are not authenticated: loopback unless somebody decides otherwise.
pub(super) const ADMIN_LISTEN: &str = "127.0.0.1:7411";

/// Time for a 128K-token request (16 GiB) from one device at 3.6 GB/s.
pub(super) const LOAD_DEADLINE: Interval = Interval(Duration::from_secs(5));

/// Copying a whole request takes seconds; whoever holds a load for minutes has lost it.
pub(super) const LOAD_HOLD: Interval = Interval(Duration::from_secs(600));

/// An engine fills the slots of a whole request in seconds.
pub(super) const RESERVATION: Interval = Interval(Duration::from_secs(60));

/// One device read: large enough for full bandwidth at a depth of 16, small enough that the first
/// layers of a 2 MiB block do not wait for the last.
pub(super) const READ_BYTES: ByteSize = ByteSize(512 << 10);

/// A tenth of a 25 Gbit/s network: 2 TiB go in 2.3 h, and engines do not notice.
pub(super) const PLACEMENT_BANDWIDTH: ByteSize = ByteSize(256 << 20);

/// A block that peers have fetched so often in a minute is fetched again.
pub(super) const HOT_READS: u32 = 4;

/// See [`HOT_READS`].
pub(super) const HOT_WINDOW: Interval = Interval(Duration::from_secs(60));

/// A node's own: it outlives pods.
pub(super) const STATE_DIRECTORY: &str = "/var/lib/reprise";

/// 1,000 nodes write 100 times a second over time, when everything changes everywhere.
pub(super) const STATUS_EVERY: Interval = Interval(Duration::from_secs(10));

/// `tracing` filter.
pub(super) const LOG_LEVEL: &str = "info";
