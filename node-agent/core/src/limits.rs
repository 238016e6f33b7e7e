//! Limits of the core, with their derivation.
//!
//! A request beyond a limit gets `Busy`, a smaller answer or a miss. No structure grows beyond its limit.

use std::time::Duration;

/// Maximum sessions: twice the number that the agent accepts (8 GPUs × 32 processes), because the core learns
/// late of closed sessions.
pub const SESSIONS_MAX: usize = 512;

/// Maximum slots of one `Reserve`: a 128K-token request of 16-token blocks.
pub const RESERVE_SLOTS_MAX: u32 = 8192;

/// Maximum leased extents, and maximum pins, of one session: two calls of the maximum size, so that one is
/// filled while the other is committed.
pub const EXTENTS_PER_SESSION_MAX: usize = 16_384;

/// Maximum extents that all sessions commit at the same time: each is one header write, and half of a device's
/// queue of commands remains for others.
pub const EXTENT_COMMITS_MAX: usize = 16_384;

/// Maximum share of the devices, in thousandths, that one session may hold as leased and pinned extents: two
/// clients can hold their share at the same time.
pub const EXTENTS_SESSION_PERMILLE: u64 = 250;

/// Maximum share of the devices, in thousandths, that all sessions may hold, those in quarantine included. The
/// rest remains for blocks that pass the arena.
pub const EXTENTS_PERMILLE: u64 = 500;

/// Maximum items of one `Commit`: as many as one `Reserve` returns.
pub const COMMIT_ITEMS_MAX: usize = 8192;

/// Maximum keys of one `Match`: a 128K-token request of 16-token blocks, which fills one message.
pub const MATCH_KEYS_MAX: usize = 8192;

/// Maximum blocks of one `Load`: the failed bitmap of a progress entry has 8,192 bits.
pub const LOAD_BLOCKS_MAX: usize = 8192;

/// Maximum loads held by a session: entries of its progress page.
pub const PROGRESS_ENTRIES: usize = 64;

/// Maximum commits of a session with pending blocks. A ticket lives about as long as a write-back delay (50
/// ms), so 16,384 tickets allow 300,000 commits per second.
pub const TICKETS_PER_SESSION_MAX: u32 = 16_384;

/// Maximum lookups in flight, one per waiting match or load. 256 × 8,192 keys × 16 bytes are 32 MiB in the
/// client's queue. Beyond the limit, the core does not ask the directory.
pub const LOOKUPS_MAX: usize = 256;

/// Keys of a match's first lookup. Most prompts that miss on this node miss everywhere, which their first
/// keys show at a sixteenth of the work for 1,024 keys. If all of them are found, a second lookup covers the
/// rest.
pub const MATCH_FIRST_KEYS: usize = 64;

/// Maximum blocks being checked: 64 of 2 MiB are 128 MiB, about 20 ms of one core. Beyond the limit a report
/// is dropped; the next engine that copies the block reports it again.
pub const CHECKS_MAX: usize = 64;

/// Requests of peers in flight: 1,000 nodes with one request each. Beyond them, only tenants with at most half of the
/// number may begin requests, up to twice the number.
pub const SERVES_MAX: usize = 1024;

/// Maximum blocks of one request of a peer: as many as one load can fetch from one node.
pub const SERVE_BLOCKS_MAX: usize = 8192;

/// Approximate number of pieces that the DRAM hits of one serve are split into. Bounds the effects of one
/// event (64 bytes each) to 1 MiB.
pub const SERVE_PIECES_MAX: u64 = 16_384;

/// Minimum bytes that one round over the blocks of a serve sends. The system call of a smaller send costs
/// more than its copying.
pub const SERVE_ROUND_BYTES: u64 = 1 << 20;

/// Maximum size classes (pairs of tenant and layout): 8 ranks × a few hundred models.
pub const SIZE_CLASSES_MAX: usize = 4096;

/// Maximum size classes in use when a peer's offer adds one. The rest is kept for this node's engines.
pub const OFFERED_SIZE_CLASSES_MAX: usize = SIZE_CLASSES_MAX / 2;

/// Maximum tenants, including those of blocks on devices: as many as size classes. A decision about NVMe
/// iterates all tenants: 4 µs at the limit.
pub const TENANTS_MAX: usize = SIZE_CLASSES_MAX;

/// Maximum blocks of tenants above a lowered limit that one event evicts, about 1 µs each.
pub const SHRINK_EVICTIONS_PER_APPLY: usize = 256;

/// Delay before the next of these evictions if no other event arrives: 256,000 blocks per second, 10 % of a
/// core.
pub const SHRINK_INTERVAL: Duration = Duration::from_millis(1);

/// Time after a failed renewal of a region until another one is tried: the machine has too little memory.
pub const RENEWAL_RETRY: Duration = Duration::from_secs(1);

/// Maximum regions of the arena: with 256 MiB each, 16 TiB.
pub const REGIONS_MAX: usize = 65_536;

/// Maximum slots of one region: slot numbers have 16 bits. The rest of a larger region is not used.
pub const SLOTS_PER_REGION_MAX: u64 = 65_536;

/// Maximum devices of a pool; an index entry has 5 bits for the device.
pub const DEVICES_MAX: usize = 32;

/// Maximum blocks of one write batch: 1,024 journal records fill 16 journal pages.
pub const BATCH_BLOCKS_MAX: usize = 1024;

/// Maximum slots that a block is written to before it counts as lost. Each failure indicates a bad spot on
/// the medium.
pub const WRITE_ATTEMPTS_MAX: u8 = 3;

/// Consecutive failed reads after which a device counts as lost.
pub const READ_ERRORS_MAX: u32 = 16;

/// Maximum blocks evicted from NVMe in one `apply`, about 1 µs each, so that no event takes long. The next
/// events evict the rest; the free target leaves time for that.
pub const POOL_EVICTIONS_PER_APPLY: usize = 1024;

/// Maximum victims evicted beyond the free target when no slot of the needed size is free: one batch, 128 MiB
/// in 2 MiB blocks.
pub const POOL_EVICTIONS_FOR_SIZE: usize = 64;

/// Maximum victims examined for a segment that can be emptied; after that, all segments are searched.
pub const POOL_VICTIMS_MAX: usize = 64;

/// Maximum deadline of a load: a longer one indicates a leak.
pub const LOAD_DEADLINE_MAX: Duration = Duration::from_secs(600);

/// Time after a lookup's timeout at which the core stops waiting for the runtime's result.
pub const LOOKUP_GRACE: Duration = Duration::from_millis(100);

/// Maximum entries that the index reserves for a new layout: 4 Mi entries are 160 MB of address space.
pub const INDEX_RESERVE_MAX: u64 = 4 << 20;

/// Maximum keys of one placement query and of one offer: 16 KiB each.
pub const PLACE_KEYS_MAX: usize = 1024;

/// Maximum batches being replicated: with 2 MiB blocks 8 GiB, as much as four nodes receive in 8 s at the
/// default bandwidth.
pub const OUTBOUND_BATCHES_MAX: usize = 4;

/// Rounds without progress after which a batch is parked. Queries for it continue, but it no longer uses one
/// of the regular places.
pub const PARKED_AFTER_ROUNDS: u32 = 3;

/// Additional parked batches; each remains for at most 16 rounds. 16 × 1,024 blocks of about 40 bytes.
pub const PARKED_BATCHES_MAX: usize = 16;

/// Additional batches of hot blocks.
pub const HOT_BATCHES_MAX: usize = 2;

/// Maximum entries of the index or of an eviction order that one event scans for blocks to replicate: 20 µs.
pub const OUTBOUND_STEP_ENTRIES: usize = 4096;

/// Delay before the next scan if no other event arrives.
pub const OUTBOUND_STEP_INTERVAL: Duration = Duration::from_millis(1);

/// Timeout of a placement query.
pub const PLACE_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout of an offer, which a peer answers immediately.
pub const OFFER_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay before a batch is queried again: a peer accepts at once the blocks that it fetches in one second.
pub const PLACE_RETRY: Duration = Duration::from_secs(1);

/// Delay of a batch while open queries of other batches cover the available bandwidth. A query takes some
/// milliseconds.
pub const PLACE_HOLD: Duration = Duration::from_millis(100);

/// Maximum delay that a peer may request for blocks that it did not accept.
pub const OFFER_RETRY_MAX: Duration = Duration::from_secs(10);

/// Consecutive queries without progress after which a batch counts as unplaceable.
pub const FRUITLESS_ROUNDS_MAX: u32 = 16;

/// Delay between two walks over the blocks of a draining node while blocks remain.
pub const WALK_INTERVAL: Duration = Duration::from_secs(1);

/// Delay between two walks while other nodes have no capacity.
pub const WALK_INTERVAL_NO_CAPACITY: Duration = Duration::from_secs(10);

/// Delay between two walks after the node is drained, because replicas elsewhere may be lost. Querying 10⁶
/// blocks takes about one second.
pub const WALK_INTERVAL_DRAINED: Duration = Duration::from_secs(60);

/// Minimum delay between the two consecutive clean walks after which a draining node is drained. Modes and
/// announcements reach all members within about 2 s (two reports). If two nodes that hold each other's
/// replicas both start to drain, the second walk of each sees the other's new mode.
pub const DRAIN_CONFIRM_DELAY: Duration = Duration::from_secs(5);

/// Share of a tenant's stored bytes, in thousandths, that is evicted next: moving it would be wasted.
pub const MOVE_PASSES_PERMILLE: u64 = 60;

/// Bytes per block that a filter query charges to the nodes in its answer: almost nothing. Zero would be an
/// invalid query.
pub const FILTER_BYTES: u64 = 1;

/// Maximum keys whose reads by peers are counted; about 100 bytes each.
pub const HOT_KEYS_MAX: usize = 4096;

/// Maximum slot bytes of replicas that are being fetched or written.
pub const PULL_BYTES_MAX: u64 = 64 << 20;

/// Maximum share of the arena, in thousandths, for these replicas; one block is always allowed.
pub const PULL_ARENA_PERMILLE: u16 = 125;

/// Maximum accepted blocks that wait to be fetched; 40 bytes each.
pub const PULLS_WAITING_MAX: usize = 4096;

/// Time after which an accepted block that is not being fetched is dropped. Its holder offers it again.
pub const PULL_WAIT_MAX: Duration = Duration::from_secs(10);

/// Delay before a fetch that found no room in the arena is retried.
pub const PULL_RETRY: Duration = Duration::from_millis(10);

/// Minimum time for which a report about an engine's computation counts: several steps of decode, each of which
/// the engine reports.
pub const SLACK_REPORT_MIN: Duration = Duration::from_secs(1);

/// Windows after which such a report no longer counts: no model has as many layers, so the computation has ended.
pub const SLACK_REPORT_WINDOWS: u32 = 128;

/// Part of the unsaved share of the arena that deferred writes may fill. The rest takes what engines save while the
/// devices write.
pub const DEFERRED_SHARE_DIVISOR: u64 = 2;

/// Maximum requests of one lookahead hint, and of the cancelled ones: twice the sequences that an engine runs at once.
pub const LOOKAHEAD_REQUESTS_MAX: usize = 1024;

/// Maximum requests known of a session: those of a hint, and as many that have begun and wait for their load.
pub const LOOKAHEAD_TRACKED_MAX: usize = 2 * LOOKAHEAD_REQUESTS_MAX;

/// Maximum keys of one hint, which exist only until it is handled: 1,024 requests of 1,024 tokens, 1 MiB.
pub const LOOKAHEAD_KEYS_MAX: usize = 65_536;

/// Maximum keys of all listed requests of a session, left to read, staged or in DRAM: eight requests of 32,768 tokens,
/// 40 bytes each. Requests beyond are ignored.
pub const LOOKAHEAD_SESSION_KEYS_MAX: usize = 16_384;

/// Maximum steps of one hint to find out which requests are ready; about 40 ns each. Requests with more blocks are
/// examined in parts, over several hints.
pub const LOOKAHEAD_READY_STEPS_MAX: usize = 4_096;

/// Maximum attempts to read a block ahead.
pub const PREFETCH_ATTEMPTS_MAX: u8 = 3;

/// Maximum blocks of failed reads that one hint tries again.
pub const PREFETCH_RETRIES_MAX: usize = 16;

/// Share of the arena, in thousandths, that staged blocks may fill: at 3.6 GB/s and 20 ms an iteration, a quarter of
/// 1 GiB is 3.7 iterations of a device.
pub const PREFETCH_ARENA_PERMILLE: u64 = 250;

/// Share of that reserve, in thousandths, for one session: two engines can prefetch at the same time.
pub const PREFETCH_SESSION_PERMILLE: u64 = 500;

/// Time for which blocks of a listed request stay staged. A request that waits longer was listed too early, or its
/// engine never finishes it.
pub const LOOKAHEAD_STAGED_MAX: Duration = Duration::from_secs(30);

/// Time after which a request that is still listed expires, even if nothing was read for it: its engine never finishes
/// it. It holds a place and keys, which other requests of the session need.
pub const LOOKAHEAD_LISTED_MAX: Duration = Duration::from_secs(600);

/// Time for which blocks that a command has prefetched stay staged. Then, they are like all others.
pub const PREFETCH_REQUESTED_MAX: Duration = Duration::from_secs(30);

/// Places of the index that one step of the erasure of tenants visits, about 1 µs each if all are removed.
pub const ERASE_STEP_ENTRIES: usize = 1024;

/// Time between two of these steps: 200,000 blocks per second at most, 20 % of a core.
pub const ERASE_INTERVAL: Duration = Duration::from_millis(5);

/// Time until blocks of erased tenants that were in use are looked for again.
pub const ERASE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Places of the index that one step of a command for a whole namespace visits, about 1 µs each if all are changed.
pub const NAMESPACE_STEP_ENTRIES: usize = 4096;

/// Maximum namespaces whose tenant and layout are known, to detect that two of them share their blocks' properties.
pub const NAMESPACES_KNOWN_MAX: usize = SIZE_CLASSES_MAX;

/// Minimum time for which blocks of a request that has begun wait for its load, which may come from another process.
pub const LOOKAHEAD_GRACE_MIN: Duration = Duration::from_secs(1);

/// Maximum time of the same wait.
pub const LOOKAHEAD_GRACE_MAX: Duration = Duration::from_secs(10);

/// Maximum keys of all requests of a session that have begun: 256 requests of 2,048 tokens. Up to 80 bytes each, 2.5 MiB.
pub const BEGUN_KEYS_MAX: usize = 32_768;

/// Maximum blocks that one hint adds to the requests that have begun: 1.2 ms. Others are ignored, and travel again.
pub const BEGUN_ADDED_MAX: usize = 4_096;

/// Maximum other blocks whose class one hint changes, 0.3 µs each. The next hint of the session changes more.
pub const BEGUN_CHANGES_MAX: usize = 2_048;

/// Time after the last hint of a session when its requests that have begun end: its engine no longer runs. Engines send
/// a hint each second while requests run.
pub const BEGUN_SILENCE_MAX: Duration = Duration::from_secs(10);

/// Time after which the class of a request's blocks ends, even if it is still listed: its engine never finishes it.
pub const BEGUN_LISTED_MAX: Duration = Duration::from_secs(3600);

/// Maximum victims that one demotion pass examines: 50 µs. With 2 MiB blocks, 2 GiB ahead of evictions.
pub const DEMOTION_VICTIMS_MAX: usize = 1024;

/// Maximum blocks of one demotion batch: 128 MiB in 2 MiB blocks, 40 ms of a device.
pub const DEMOTION_BLOCKS_MAX: usize = 64;

/// Minimum time between two demotion passes: 6,400 blocks per second, more than a device writes.
pub const DEMOTION_INTERVAL: Duration = Duration::from_millis(10);

/// Maximum share of the arena, in thousandths, for unsaved blocks when demotion adds some: the rest of the unsaved
/// share remains for engines.
pub const DEMOTION_ARENA_PERMILLE: u16 = 250;
