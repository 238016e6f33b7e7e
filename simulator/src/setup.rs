//! Parameters of a simulation, and the constants of its protocols.
//!
//! Times equal the binaries' defaults unless stated otherwise. Sizes are small, so that everything fills up,
//! evicts and overflows within seconds.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_agent_core::{Settings, TenantQuotas};
use reprise_policy::eviction::EvictionKind;
use reprise_policy::quota::Quota;
use reprise_policy::{BlockKey, Dtype, Layout, LayoutSpec, Parts, TenantId, Tick};

use crate::rng::{Rng, mix};

/// Equals the default of `membership.heartbeat_every`.
pub(crate) const BEAT_EVERY: Duration = Duration::from_millis(250);
/// Equals the default of `membership.dead_after`.
pub(crate) const DEAD_AFTER: Duration = Duration::from_millis(1500);
/// Less than `membership.forget_after`, so that more pauses of an agent exceed it.
pub(crate) const FORGET_AFTER: Duration = Duration::from_secs(6);
/// An agent's timeout for a call to the control plane.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// An agent's timeout for a lookup.
pub(crate) const LOOKUP_TIMEOUT: Duration = Duration::from_millis(500);
/// Time within which an agent's connection detects a missing peer: a ping and its timeout.
pub(crate) const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(2);
/// A deadline is detected when the clock shows the next microsecond.
pub(crate) const CLOCK_GRAIN: Duration = Duration::from_micros(2);
/// Equals the default of `member.time_to_live`.
pub(crate) const TIME_TO_LIVE: Duration = Duration::from_secs(2);
/// A member's timeout for a call to the store.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time within which all operations end after the faults: two calls with timeouts, the longest retry delays,
/// and the longest load.
pub(crate) const FINISH_TIME: Duration = Duration::from_secs(14);

/// Of 1000 simulations: those in which grants are drawn.
const DRAWN_PERMILLE: u64 = 200;

/// Number of keys of each layout of a tenant.
pub(crate) const KEYS: u64 = 64;
/// Sizes of disks in bytes. Most are too small for all blocks; where a node is drained, the others should
/// have room.
const TIGHT: [u64; 3] = [8 << 20, 8 << 20, 24 << 20];
const ROOMY: [u64; 3] = [8 << 20, 24 << 20, 24 << 20];
/// Bytes of a segment: 32 large blocks.
const SEGMENT_BYTES: u64 = 2 << 20;
/// Maximum number of tenants.
pub(crate) const TENANTS_MAX: u16 = 3;

/// Multiplier that spreads key numbers over the bits used by hash tables. Its inverse lets traces show keys
/// by number.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
const SPREAD_BACK: u64 = 0xf1de_83e1_9937_733d;
const _: () = assert!(SPREAD.wrapping_mul(SPREAD_BACK) == 1);

/// Code under test: the production cores, or the cores with an injected flaw, to check that the audits detect
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Variant {
    /// The unmodified production cores.
    #[default]
    Production,
    /// A member that regains slots does not request the inventories of nodes that have announced them before.
    RegainedSlotsWithoutInventory,
    /// A new registration of a node does not begin a new inventory in the directory.
    RegistrationKeepsDirectory,
    /// Syncs of devices succeed without effect: blocks that are reported durable are not.
    DurableBeforeSync,
    /// Lookups do not check whether nodes still send heartbeats.
    LookupsNameDeadNodes,
    /// Data that is read from devices is not compared with its checksums.
    ReadsUnverified,
    /// An agent does not announce evictions to the directory.
    EvictionsNotAnnounced,
    /// A member continues to answer after the end of its lease.
    AnswersAfterLease,
    /// A member answers by a new map with the slots of the previous one.
    AnswersBetweenMaps,
    /// A member counts the time of its lease from the store's answer instead of from its request.
    LeaseFromAnswer,
    /// A member whose watch was compacted does not read the list of members again.
    CompactionLosesChanges,
    /// A member reports complete knowledge of slots that it has just received.
    NewOwnerClaimsComplete,
    /// A new registration begins neither a new sequence of announcements nor a new inventory.
    OutboxOutlivesRegistration,
    /// A lookup waits for its answer without a limit.
    LookupsWithoutDeadline,
    /// The queue of announcements grows without a limit.
    UnboundedQueue,
    /// Requests for blocks on the node wait for a control plane, and are misses without one.
    LocalNeedsControlPlane,
    /// Data from peers is not compared with its checksums.
    PeersUnverified,
    /// Sessions of all tenants use one tenant.
    TenantsMerged,
    /// Grants take effect in the order of their arrival.
    GrantsInOrderOfArrival,
    /// A member counts a replica in DRAM as durable in its answer to a placement request.
    DramCountsAsDurable,
    /// A member does not follow the modes of nodes.
    ModesIgnored,
    /// An agent ignores that its node is cordoned.
    CordonsIgnored,
    /// An agent ignores that its node is draining.
    DrainsIgnored,
    /// An offer waits for its answer without a limit.
    OffersWithoutDeadline,
    /// An agent evicts blocks to make room for offered ones.
    OffersEvictBlocks,
    /// An agent ignores the end of a move.
    MoveEndIgnored,
    /// A member accepts a report whose sender assigns the tenant's slot to another member.
    ReportToOtherOwnerCounts,
    /// A new ledger does not wait for the reports of the nodes.
    NewLedgerSkipsReports,
    /// The grant of a silent node is reused as soon as the node is no longer offered.
    DeadNodeGrantsReused,
    /// An agent returns a leased extent at once.
    LeasesIgnored,
    /// An agent ends a pin at once.
    PinsIgnored,
    /// An agent frees the extents of an ended session without proof that its I/O has ended.
    QuarantineIgnored,
    /// An agent frees the extents that an earlier process has leased without proof that all I/O has ended.
    EarlierLeasesIgnored,
    /// Syncs of devices do not cover the payloads that engines have written.
    ExtentsOutsideOfSyncs,
    /// An engine does not compare pinned blocks with their checksums.
    PinnedReadsUnverified,
    /// Some writes of blocks put the payload into another slot.
    WritesMisdirected,
}

/// Source of the limits of tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limits {
    /// Grants are drawn, and arrive in any order.
    Drawn,
    /// Budgets in the store, which members split.
    Budgets,
}

/// Parameters of one simulation; see the module.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) nodes: usize,
    /// Number of members of the control plane.
    pub(crate) members: usize,
    /// Tenant numbers are below this.
    pub(crate) tenants: u16,
    /// Number of engines of one node.
    pub(crate) engines: usize,
    pub(crate) regions: u16,
    pub(crate) region_bytes: u64,
    pub(crate) disks: usize,
    pub(crate) disk_bytes: u64,
    /// Bytes of a segment of a disk's pool.
    pub(crate) segment_bytes: u64,
    /// Layout of all blocks; `None`: blocks have those of [`large_layout`] and [`small_layout`].
    pub(crate) layout: Option<Layout>,
    /// Mean interval between actions of an engine.
    pub(crate) pace: Duration,
    /// Mean interval at which an operator sets a node's mode.
    pub(crate) operate_every: Duration,
    /// Whether devices lend extents, and engines use them.
    pub(crate) extents: bool,
    /// Node that is drained after the faults.
    pub(crate) leaves_at_end: Option<usize>,
    /// Tenants in the agents' configuration.
    pub(crate) names: BTreeSet<TenantId>,
    /// Mean interval of faults.
    pub(crate) fault_every: Duration,
    /// Time at which faults end.
    pub(crate) faults_until: Tick,
    /// Limit of the queue of announcements.
    pub(crate) changes_queued_max: usize,
    pub(crate) limits: Limits,
    pub(crate) settings: Settings,
    pub(crate) variant: Variant,
}

impl Setup {
    /// Many agents, each with a small arena and a small disk; no random actions or faults.
    pub(crate) fn large(nodes: usize, members: usize) -> Setup {
        let slot = large_layout().slot_bytes();
        Setup {
            nodes,
            members,
            tenants: 1,
            engines: 1,
            regions: 2,
            region_bytes: 4 * slot,
            disks: 1,
            disk_bytes: 4 << 20,
            segment_bytes: SEGMENT_BYTES,
            layout: None,
            pace: Duration::from_millis(10),
            operate_every: Duration::from_secs(1),
            extents: false,
            leaves_at_end: None,
            names: BTreeSet::new(),
            fault_every: Duration::from_secs(1),
            faults_until: Tick(0),
            changes_queued_max: 1 << 20,
            limits: Limits::Budgets,
            settings: Settings { lookup_timeout: LOOKUP_TIMEOUT, ..Settings::default() },
            variant: Variant::Production,
        }
    }

    /// Returns the layout of a key's blocks.
    pub(crate) fn layout_of(&self, key: &BlockKey) -> Layout {
        self.layout.unwrap_or_else(|| layout_of(key))
    }

    /// Bytes of the largest slot.
    pub(crate) fn slot_bytes_max(&self) -> u64 {
        self.layout.unwrap_or_else(large_layout).slot_bytes()
    }

    /// Draws sizes and speeds of a simulation.
    pub(crate) fn draw(rng: &mut Rng, variant: Variant) -> Setup {
        let slot = large_layout().slot_bytes();
        let tenants = 1 + rng.below(usize::from(TENANTS_MAX)) as u16;
        let quotas = (0..tenants).filter_map(|tenant| quotas(rng, TenantId(tenant), 4 * slot)).collect();
        // An own stream, so that other draws do not depend on the number of policies.
        let mut eviction = Rng::new(rng.clone().next());
        let settings = Settings {
            writeback_bytes: slot * (1 + rng.below(6) as u64),
            lookup_timeout: LOOKUP_TIMEOUT,
            arena_unsaved_permille: rng.one_of(&[500, 1000]),
            arena_session_permille: rng.one_of(&[500, 1000]),
            arena_serves_permille: rng.one_of(&[250, 1000]),
            pool_free_permille: rng.one_of(&[30, 300, 600]),
            tenants: quotas,
            placement_bandwidth: rng.one_of(&[1 << 20, 8 << 20, 256 << 20]),
            hot_reads: rng.one_of(&[1, 2, 4]),
            dram_eviction: eviction.one_of(&EvictionKind::ALL).into(),
            nvme_eviction: eviction.one_of(&EvictionKind::ALL).into(),
            ..Settings::default()
        };
        let configured = settings.tenants.iter().map(|quotas| quotas.tenant).collect();
        let names = if rng.chance(800) { (0..tenants).map(TenantId).collect() } else { configured };
        let nodes = 2 + rng.below(4);
        let leaves_at_end = if rng.chance(400) { Some(rng.below(nodes)) } else { None };
        Setup {
            tenants,
            nodes,
            members: 1 + rng.below(4),
            engines: 1 + rng.below(2),
            regions: 1 + tenants + rng.below(4) as u16,
            region_bytes: 4 * slot,
            disks: 1 + rng.below(2),
            operate_every: rng.millis(1_000..10_000),
            extents: false,
            leaves_at_end,
            disk_bytes: rng.one_of(if leaves_at_end.is_some() { &ROOMY } else { &TIGHT }),
            segment_bytes: SEGMENT_BYTES,
            layout: None,
            names,
            pace: rng.millis(5..120),
            fault_every: rng.millis(200..4000),
            faults_until: Tick(0).after(rng.millis(3_000..15_000)),
            changes_queued_max: rng.one_of(&[8, 64, 1 << 20]),
            limits: if rng.chance(DRAWN_PERMILLE) { Limits::Drawn } else { Limits::Budgets },
            settings,
            variant,
        }
    }
}

/// Draws the quotas of a tenant, if it has any: optionally a reserved region and a limit.
fn quotas(rng: &mut Rng, tenant: TenantId, region_bytes: u64) -> Option<TenantQuotas> {
    if rng.chance(400) {
        return None;
    }
    let mut quota = |unit: u64| {
        let reserved = if rng.chance(300) { unit } else { 0 };
        let limit = if rng.chance(300) { u64::MAX } else { unit * (1 + rng.below(8) as u64) };
        Quota::new(reserved, limit).expect("a limit is at least a unit")
    };
    Some(TenantQuotas { tenant, dram: quota(region_bytes), nvme: quota(region_bytes * 2) })
}

/// 60 KiB per block, 64 KiB with its header on a device: 32 blocks in a 2 MiB segment.
pub(crate) fn large_layout() -> Layout {
    layout(4, Parts::KeyValue, 240)
}

/// 6 KiB per block, padded to 8 KiB.
pub(crate) fn small_layout() -> Layout {
    layout(3, Parts::Latent, 64)
}

fn layout(layers: u16, parts: Parts, head_dim: u16) -> Layout {
    let (kv_heads, dtype, tokens_per_block, tp_rank, tp_size) = (1, Dtype::Bf16, 16, 0, 1);
    LayoutSpec { layers, parts, kv_heads, head_dim, dtype, tokens_per_block, tp_rank, tp_size }
        .validate()
        .expect("a valid layout")
}

/// Returns a key of a tenant's layout: large blocks have the first half of the tenant's numbers.
pub(crate) fn key(tenant: TenantId, layout: &Layout, number: u64) -> BlockKey {
    let of_layout = if *layout == small_layout() { KEYS } else { 0 };
    let number = u64::from(tenant.0) * KEYS * 2 + of_layout + number % KEYS;
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mix(number + 1).to_le_bytes());
    bytes[8..].copy_from_slice(&number.wrapping_mul(SPREAD).to_le_bytes());
    BlockKey(bytes)
}

/// Returns the key of a block of a trace, which is of the first tenant.
pub(crate) fn trace_key(block: u32) -> BlockKey {
    let number = u64::from(block) << 32;
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mix(number + 1).to_le_bytes());
    bytes[8..].copy_from_slice(&number.wrapping_mul(SPREAD).to_le_bytes());
    BlockKey(bytes)
}

/// Returns the layout of a key's blocks.
pub(crate) fn layout_of(key: &BlockKey) -> Layout {
    if number_of(key) % (KEYS * 2) < KEYS { large_layout() } else { small_layout() }
}

/// Returns the tenant of a key.
pub(crate) fn tenant_of(key: &BlockKey) -> TenantId {
    TenantId((number_of(key) / (KEYS * 2)) as u16)
}

/// Returns the number of a key.
pub(crate) fn number_of(key: &BlockKey) -> u64 {
    u64::from_le_bytes(key.0[8..].try_into().expect("a key has 16 bytes")).wrapping_mul(SPREAD_BACK)
}

/// Returns the keys of all tenants.
pub(crate) fn all_keys() -> Vec<BlockKey> {
    let of = |tenant, layout: Layout| (0..KEYS).map(move |number| key(TenantId(tenant), &layout, number));
    (0..TENANTS_MAX).flat_map(|tenant| of(tenant, large_layout()).chain(of(tenant, small_layout()))).collect()
}
