//! What a world is made of, and the constants of the protocols that it runs.
//!
//! Times are those of the binaries' defaults where no other reason is given; sizes are small, so that everything runs
//! full, evicts and overflows within seconds.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_agent_core::agent::{Settings, TenantQuotas};
use reprise_policy::quota::Quota;
use reprise_policy::{BlockKey, Dtype, Layout, LayoutSpec, Parts, TenantId, Tick};

use crate::rng::{Rng, mix};

/// As `membership.heartbeat_every`.
pub(crate) const BEAT_EVERY: Duration = Duration::from_millis(250);
/// As an agent waits for the answer to a beat: two periods.
pub(crate) const BEAT_ANSWER: Duration = Duration::from_millis(500);
/// As `membership.dead_after`.
pub(crate) const DEAD_AFTER: Duration = Duration::from_millis(1500);
/// Less than `membership.forget_after`: more pauses of an agent are longer.
pub(crate) const FORGET_AFTER: Duration = Duration::from_secs(6);
/// As an agent's time for one call to the control plane.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// A registration that is lost sooner is renewed with growing delays, as agents do.
pub(crate) const SETTLED_AFTER: Duration = Duration::from_secs(5);
/// As an agent's time for a lookup.
pub(crate) const LOOKUP_TIMEOUT: Duration = Duration::from_millis(500);
/// As an agent's connections find out that nobody is there: a ping and the time for its answer.
pub(crate) const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(2);
/// As an agent keeps the link to a member that has left the map.
pub(crate) const LINK_KEPT: Duration = Duration::from_secs(10);
/// As an agent bears with a home that is not sure of its place.
pub(crate) const UNSURE_MAX: Duration = Duration::from_secs(3);
/// As `member.time_to_live`.
pub(crate) const TIME_TO_LIVE: Duration = Duration::from_secs(2);
/// As a member's time for a call to the store, and its pause after one has failed.
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(5);
pub(crate) const STORE_RETRY_AFTER: Duration = Duration::from_millis(250);
/// As a member waits after its start for nodes that the store knows.
pub(crate) const EXPECTED_FOR: Duration = Duration::from_secs(10);
/// Time in which everything comes to its end when faults have stopped: two calls that run into their timeout, the longest
/// delays between attempts, and the longest load.
pub(crate) const SETTLE: Duration = Duration::from_secs(14);

/// Worlds in which grants are drawn, of a thousand.
const DRAWN_PERMILLE: u64 = 200;

/// Keys of each layout of a tenant.
pub(crate) const KEYS: u64 = 64;
/// Bytes of disks: most are too small for all blocks, but where a node is to leave others should have room.
const TIGHT: [u64; 3] = [8 << 20, 8 << 20, 24 << 20];
const ROOMY: [u64; 3] = [8 << 20, 24 << 20, 24 << 20];
/// Tenants at the most.
pub(crate) const TENANTS_MAX: u16 = 3;

/// Spreads numbers over the bits that hash tables look at, and its inverse, so that traces can name keys by number.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
const SPREAD_BACK: u64 = 0xf1de_83e1_9937_733d;
const _: () = assert!(SPREAD.wrapping_mul(SPREAD_BACK) == 1);

/// What is run: the production cores as they are, or with a flaw around them, to see that the auditor finds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Variant {
    /// As they are.
    #[default]
    Production,
    /// A member that gets slots back does not ask for the inventories of nodes that have announced them before.
    RegainedSlotsUnasked,
    /// A new registration of a node does not begin a new inventory in the directory.
    RegistrationKeepsDirectory,
    /// Syncs of devices say that they are done and do nothing: what is told durable is not.
    DurableBeforeSync,
    /// Lookups do not look whether beats of nodes still arrive.
    DeadNodesOffered,
    /// What is read from devices is not compared with its checksums.
    ReadsUnchecked,
    /// An agent does not tell the directory what it evicts.
    EvictionsUnannounced,
    /// A member goes on answering when its lease has expired.
    AnswersAfterLease,
    /// A member answers by a new map with the slots of the one before.
    AnswersBetweenMaps,
    /// A member counts the time of its lease from the store's answer on, not from its question.
    LeaseFromAnswer,
    /// A member whose watch was compacted away does not read the list of members again.
    CompactionLosesChanges,
    /// A member says that it knows everything about slots that it has just been given.
    NewOwnerWhole,
    /// A new registration does not begin a new sequence of announcements, nor a new inventory.
    OutboxOutlivesRegistration,
    /// A lookup waits for its answer however long that takes.
    LookupsWithoutEnd,
    /// The queue of announcements grows without a bound.
    QueueWithoutBound,
    /// Requests for what is on the node wait for a control plane, and are misses without one.
    LocalNeedsControlPlane,
    /// What peers send is not compared with its checksums.
    PeersUnchecked,
    /// Sessions of all tenants are one tenant's.
    TenantsTogether,
    /// Grants count in the order in which they come.
    GrantsInOrderOfArrival,
    /// A member takes a replica in DRAM for a durable one when it says where further ones go.
    DramCountsAsDurable,
    /// A member does not follow what nodes are for.
    ModesUnfollowed,
    /// An agent does not hear that its node is cordoned.
    CordonsUnheard,
    /// An agent does not hear that its node is to leave.
    DrainsUnheard,
    /// An offer waits for its answer however long that takes.
    OffersWithoutEnd,
    /// An agent takes the blocks that it is offered for those of one tenant.
    OffersOfOneTenant,
    /// An agent makes room for what it is offered.
    TakenPushesOut,
    /// An agent does not hear that it is to move nothing more.
    MovesWithoutEnd,
    /// A member takes an agent for heard that takes another for the owner of the tenant's slot.
    ElsewhereHeard,
    /// A new ledger does not wait to hear what nodes hold.
    NewLedgerDeaf,
    /// What a silent node may hold is given to others when it is not offered any more.
    DeadNodesFreed,
}

/// Where the limits of tenants come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limits {
    /// Grants are drawn, and come in any order.
    Drawn,
    /// From budgets in the store, which members split.
    Budgets,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) nodes: usize,
    /// Members of the control plane.
    pub(crate) members: usize,
    /// Numbers of tenants are below this.
    pub(crate) tenants: u16,
    /// Engines of one node.
    pub(crate) engines: usize,
    pub(crate) regions: u16,
    pub(crate) region_bytes: u64,
    pub(crate) disks: usize,
    pub(crate) disk_bytes: u64,
    /// An engine does something so often, about.
    pub(crate) pace: Duration,
    /// An operator sets a node's mode so often, about.
    pub(crate) operate_every: Duration,
    /// When faults have stopped this node leaves.
    pub(crate) leaves_at_end: Option<usize>,
    /// Tenants that the agents' configuration names.
    pub(crate) names: BTreeSet<TenantId>,
    /// Faults come so often, about.
    pub(crate) fault_every: Duration,
    /// Faults stop after this.
    pub(crate) faults_until: Tick,
    /// Bound of the queue of announcements.
    pub(crate) changes_queued_max: usize,
    pub(crate) limits: Limits,
    pub(crate) settings: Settings,
    pub(crate) variant: Variant,
}

impl Setup {
    /// Many agents, each with a small arena and a small disk; nothing happens by itself.
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
            pace: Duration::from_millis(10),
            operate_every: Duration::from_secs(1),
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

    /// A world whose size and speed depend on the seed.
    pub(crate) fn draw(rng: &mut Rng, variant: Variant) -> Setup {
        let slot = large_layout().slot_bytes();
        let tenants = 1 + rng.below(usize::from(TENANTS_MAX)) as u16;
        let quotas = (0..tenants).filter_map(|tenant| quotas(rng, TenantId(tenant), 4 * slot)).collect();
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
            leaves_at_end,
            disk_bytes: rng.one_of(if leaves_at_end.is_some() { &ROOMY } else { &TIGHT }),
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

/// Quotas of a tenant, if it has any: a region reserved or none, and a limit or none.
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

/// 60 KiB a block, 64 KiB with its header on a device: 32 to a 2 MiB segment.
pub(crate) fn large_layout() -> Layout {
    layout(4, Parts::KeyValue, 240)
}

/// 6 KiB a block, padded to 8 KiB.
pub(crate) fn small_layout() -> Layout {
    layout(3, Parts::Latent, 64)
}

fn layout(layers: u16, parts: Parts, head_dim: u16) -> Layout {
    let (kv_heads, dtype, tokens_per_block, tp_rank, tp_size) = (1, Dtype::Bf16, 16, 0, 1);
    LayoutSpec { layers, parts, kv_heads, head_dim, dtype, tokens_per_block, tp_rank, tp_size }
        .validate()
        .expect("a valid layout")
}

/// The keys of a tenant's layout: large blocks have the first half of its numbers.
pub(crate) fn key(tenant: TenantId, layout: &Layout, number: u64) -> BlockKey {
    let of_layout = if *layout == small_layout() { KEYS } else { 0 };
    let number = u64::from(tenant.0) * KEYS * 2 + of_layout + number % KEYS;
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mix(number + 1).to_le_bytes());
    bytes[8..].copy_from_slice(&number.wrapping_mul(SPREAD).to_le_bytes());
    BlockKey(bytes)
}

/// The layout that blocks of a key have.
pub(crate) fn layout_of(key: &BlockKey) -> Layout {
    if number_of(key) % (KEYS * 2) < KEYS { large_layout() } else { small_layout() }
}

/// Whose blocks have a key.
pub(crate) fn tenant_of(key: &BlockKey) -> TenantId {
    TenantId((number_of(key) / (KEYS * 2)) as u16)
}

/// Number of a key.
pub(crate) fn number_of(key: &BlockKey) -> u64 {
    u64::from_le_bytes(key.0[8..].try_into().expect("a key has 16 bytes")).wrapping_mul(SPREAD_BACK)
}

/// All keys that there can be.
pub(crate) fn all_keys() -> Vec<BlockKey> {
    let of = |tenant, layout: Layout| (0..KEYS).map(move |number| key(TenantId(tenant), &layout, number));
    (0..TENANTS_MAX).flat_map(|tenant| of(tenant, large_layout()).chain(of(tenant, small_layout()))).collect()
}
