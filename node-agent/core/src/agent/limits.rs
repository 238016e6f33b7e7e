//! Limits of the core, each with its arithmetic.
//!
//! What is refused because of one of these gets `Busy`, a smaller answer or a miss; nothing grows past them.

use std::time::Duration;

/// Sessions at once: twice as many as the agent accepts (8 GPUs × 32 processes), because one that has ended is known
/// here until this core is told.
pub const SESSIONS_MAX: usize = 512;

/// Slots of one `Reserve`: one 128K-token request of 16-token blocks.
pub const RESERVE_SLOTS_MAX: u32 = 8192;

/// Items of one `Commit`: as many as one `Reserve` gives.
pub const COMMIT_ITEMS_MAX: usize = 8192;

/// Keys of one `Match`: one 128K-token request of 16-token blocks, as many as a message carries.
pub const MATCH_KEYS_MAX: usize = 8192;

/// Blocks of one `Load`: the failed bitmap of a progress entry has 8,192 bits.
pub const LOAD_BLOCKS_MAX: usize = 8192;

/// Loads that a session holds at once: entries of its progress page.
pub const PROGRESS_ENTRIES: usize = 64;

/// Commits of a session whose blocks have not come to their end. A ticket lives about as long as a write-back
/// delay (50 ms): 16,384 allow 300,000 commits a second.
pub const TICKETS_PER_SESSION_MAX: u32 = 16_384;

/// Questions to the directory at once, one per waiting match or load: 256 × 8,192 keys × 16 bytes are 32 MiB in the
/// client's queue. What would be one more is not asked.
pub const LOOKUPS_MAX: usize = 256;

/// Keys of a match's first question to the directory. Most prompts that are not here are nowhere, and their first keys tell that: a
/// sixteenth of the work for 1,024 keys. When all of them are found, a second question covers the rest.
pub const MATCH_FIRST_KEYS: usize = 64;

/// Blocks that are being checked at once: 64 of 2 MiB are 128 MiB, about 20 ms of one core. What would be one more is not
/// checked; whoever copies it next says so again.
pub const CHECKS_MAX: usize = 64;

/// Requests of peers at once: 1,000 nodes with one each.
pub const SERVES_MAX: usize = 1024;

/// Blocks of one request of a peer: what one load can want from one node.
pub const SERVE_BLOCKS_MAX: usize = 8192;

/// Pieces that the DRAM hits of one serve are cut into, about: bounds the effects of one event (64 bytes each)
/// to 1 MiB.
pub const SERVE_PIECES_MAX: u64 = 16_384;

/// Bytes that one round over the blocks of a serve sends at the least: a send of less costs more in calls than
/// in copying.
pub const SERVE_ROUND_BYTES: u64 = 1 << 20;

/// Pairs of tenant and layout at once: 8 ranks × a few hundred models.
pub const SHAPES_MAX: usize = 4096;

/// Of these, how many may be in use when a peer's offer brings another one: the rest is kept for this node's own engines.
pub const SHAPES_OF_OFFERS_MAX: usize = SHAPES_MAX / 2;

/// Tenants at once, those of blocks on devices included: as many as there can be shapes. A decision on NVMe looks at all,
/// which is 4 µs for so many and nothing for a few.
pub const TENANTS_MAX: usize = SHAPES_MAX;

/// Blocks of tenants over their lowered limits that one event drops at the most, about 1 µs each.
pub const SHRINK_EVICTIONS_PER_APPLY: usize = 256;

/// When the next of them go if nothing else happens: 256,000 blocks a second, 10 % of a core.
pub const SHRINK_EVERY: Duration = Duration::from_millis(1);

/// Regions of the arena: 256 MiB each gives 16 TiB.
pub const REGIONS_MAX: usize = 65_536;

/// Slots of one region: their numbers are 16 bits wide; the rest of a larger region of small slots is not used.
pub const SLOTS_PER_REGION_MAX: u64 = 65_536;

/// Devices of a pool; 255 in an index entry means "not stored".
pub const DEVICES_MAX: usize = 255;

/// Blocks of one write batch: 1,024 journal records are 16 journal pages.
pub const BATCH_BLOCKS_MAX: usize = 1024;

/// Slots that are tried for one block before it counts as lost: each failure means a bad place on a medium.
pub const WRITE_ATTEMPTS_MAX: u8 = 3;

/// Reads of a device that fail one after the other, without a success between, before it counts as lost.
pub const READ_ERRORS_MAX: u32 = 16;

/// Blocks evicted from NVMe in one `apply` at the most, so that no event takes long (about 1 µs each); the rest
/// follows with the next event, and the free target leaves time for that.
pub const POOL_EVICTIONS_PER_APPLY: usize = 1024;

/// Victims of the wanted slot size taken beyond the free target when no slot of that size is free: a batch's worth,
/// 128 MiB in 2 MiB blocks.
pub const POOL_EVICTIONS_FOR_SIZE: usize = 64;

/// Coldest blocks that are looked at for a segment that can be emptied, before the segments themselves are searched.
pub const POOL_VICTIMS_TRIED: usize = 64;

/// Deadline of a load at the most: one that waits longer is a leak, not a load.
pub const LOAD_DEADLINE_MAX: Duration = Duration::from_secs(600);

/// Time beyond a lookup's timeout after which the core stops waiting for the runtime's report of it.
pub const LOOKUP_GRACE: Duration = Duration::from_millis(100);

/// Entries that the index makes room for when a layout first appears: 4 Mi entries are 160 MB of address space.
pub const INDEX_RESERVE_MAX: u64 = 4 << 20;

/// Keys of one question to the control plane where blocks go, and of one offer: 16 KiB each.
pub const PLACE_KEYS_MAX: usize = 1024;

/// Batches of blocks that are being given away at once: of 2 MiB blocks 8 GiB, as much as four nodes take in 8 s at the
/// default bandwidth.
pub const GIVING_BATCHES_MAX: usize = 4;

/// A batch is parked after so many rounds without a block of it getting further: it is asked about as before, and others
/// have its place.
pub const PARKED_AFTER_ROUNDS: u32 = 3;

/// Parked batches besides; each is one for 16 rounds at the most. 16 × 1,024 blocks of about 40 bytes.
pub const PARKED_BATCHES_MAX: usize = 16;

/// Batches of hot blocks besides.
pub const HOT_BATCHES_MAX: usize = 2;

/// Entries of the index, or of the order of eviction, that one event looks at for blocks to give away: 20 µs.
pub const GIVING_STEP_ENTRIES: usize = 4096;

/// When the next of them are looked at if nothing else happens.
pub const GIVING_STEP_EVERY: Duration = Duration::from_millis(1);

/// The control plane has so long to say where blocks go.
pub const PLACE_TIMEOUT: Duration = Duration::from_secs(1);

/// A peer has so long to answer an offer, which it does at once.
pub const OFFER_TIMEOUT: Duration = Duration::from_secs(5);

/// A batch is asked about again after this time: a peer takes at once as much as it pulls in a second.
pub const PLACE_AGAIN: Duration = Duration::from_secs(1);

/// A batch waits so long while open questions of others cover all that could be offered: one takes some milliseconds.
pub const PLACE_HELD: Duration = Duration::from_millis(100);

/// Longest time for which a peer may put off what it did not take.
pub const OFFER_RETRY_MAX: Duration = Duration::from_secs(10);

/// Times in a row that a batch is asked about without a block of it getting further; then it counts as going nowhere.
pub const FRUITLESS_ROUNDS_MAX: u32 = 16;

/// Time between the end of a walk over all blocks of a draining node and the next, when more is to be done.
pub const WALK_AGAIN: Duration = Duration::from_secs(1);

/// The same when other nodes have no room.
pub const WALK_AGAIN_NOWHERE: Duration = Duration::from_secs(10);

/// The same when all is given away: replicas elsewhere may be lost. 10⁶ blocks are asked about in about a second.
pub const WALK_AGAIN_DRAINED: Duration = Duration::from_secs(60);

/// A draining node is drained after two walks in a row without a block that is short of a replica, the second so long after
/// the first. Modes and announcements reach everybody within about 2 s (two reports): of two nodes that vouched for each
/// other's blocks and then both drain, the second walk of each sees that the other one is to leave.
pub const DRAINED_APART: Duration = Duration::from_secs(5);

/// Of a tenant's stored bytes, the share that goes next by eviction, in thousandths: moving that is in vain.
pub const MOVE_PASSES_PERMILLE: u64 = 60;

/// Bytes a block for which a control plane charges the nodes that it names in a question that only sifts: next to none. A
/// question of none at all makes no sense to it.
pub const SIFT_BYTES: u64 = 1;

/// Keys whose reads by peers are counted; about 100 bytes each.
pub const HOT_KEYS_MAX: usize = 4096;

/// Slot bytes of blocks that are being pulled from peers or written for them at once.
pub const PULL_BYTES_MAX: u64 = 64 << 20;

/// Share of the arena that they may take, in thousandths; one block always may.
pub const PULL_ARENA_PERMILLE: u16 = 125;

/// Blocks that are taken and wait to be pulled; 40 bytes each.
pub const PULLS_WAITING_MAX: usize = 4096;

/// A taken block that is not being pulled after this time is forgotten; whoever offered it asks again.
pub const PULL_PATIENCE: Duration = Duration::from_secs(10);

/// A pull that found no room in the arena is tried again after this time.
pub const PULL_AGAIN: Duration = Duration::from_millis(10);
