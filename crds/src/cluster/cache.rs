//! Memory, placement and limits of each agent. Fields map to settings of `reprise-agent`, with the same
//! bounds.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::default_from_schema;
use crate::fields::{Permille, Quantity, Span, choice};

/// Memory, placement and limits of each agent. A change restarts agents according to
/// `agents.updateStrategy`.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("quantity(self.dram).compareTo(quantity(self.regionSize)) >= 0")
    .message("cache.dram is smaller than cache.regionSize: raise cache.dram or lower cache.regionSize"))]
#[x_kube(validation = Rule::new("quantity(self.dram).asInteger() / 8192 <= quantity(self.regionSize).asInteger()")
    .message("cache.dram has more than 8192 regions, the most that an engine can map: raise cache.regionSize"))]
pub struct Cache {
    /// Size of the arena: memory for blocks on each node. The agent allocates it completely at start, so
    /// the node must have that much free memory.
    #[serde(default = "dram")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() % 2097152 == 0 && quantity(self).asInteger() <= 70368744177664")
        .message("cache.dram is not a multiple of 2Mi of at most 64Ti: round it"))]
    pub dram: Quantity,
    /// Size of one shared-memory file of the arena. A region belongs to one tenant until the agent
    /// restarts.
    #[serde(default = "region_size")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 2097152 && quantity(self).asInteger() <= 1073741824 && \
        quantity(self).asInteger() % 2097152 == 0")
        .message("cache.regionSize is not a multiple of 2Mi from 2Mi to 1Gi: round it"))]
    pub region_size: Quantity,
    /// Page size of the arena. With 2 MiB pages, device bandwidth is 2 to 5 times as high as with 4 KiB
    /// pages.
    #[serde(default)]
    pub huge_pages: HugePages,
    /// Eviction policy in memory. `SSDPool` has the one of devices.
    #[serde(default)]
    pub eviction: EvictionPolicy,
    /// Upper bounds on uses of the arena.
    #[serde(default)]
    pub shares: Shares,
    /// Writing of committed blocks to devices.
    #[serde(default)]
    pub writeback: Writeback,
    /// Replicas on other nodes.
    #[serde(default)]
    pub placement: Placement,
    /// Reads of blocks from devices ahead of their load, on hints of engines.
    #[serde(default)]
    pub prefetch: Prefetch,
    /// Blocks that commands pin for a limited time.
    #[serde(default)]
    pub retention: Retention,
    /// Limits of client requests.
    #[serde(default)]
    pub limits: Limits,
}

choice! {
    /// Page size of the arena.
    HugePages {
        /// Reserved huge pages, else transparent huge pages, else 4 KiB pages.
        Prefer,
        /// 4 KiB pages only.
        Never,
    }
    default Prefer
}

choice! {
    /// Order in which blocks are evicted.
    EvictionPolicy {
        /// Blocks of the lowest priority first, and among them the least recently used.
        PriorityLru,
        /// Least recently used first.
        Lru,
        /// Least frequently used first.
        Lfu,
        /// Shared prefixes and blocks that were used again last.
        Semantic,
        /// Two queues; blocks that are not used twice leave early.
        S3Fifo,
        /// Least loss of time per freed byte first, by the reuse observed at each position of a prompt.
        CostAware,
    }
    default PriorityLru
}

choice! {
    /// Rule by which saved blocks are written to devices.
    Admission {
        /// Every block, after its commit.
        Always,
        /// Blocks that were used again after their first commit.
        SecondUse,
        /// Blocks whose expected reuse is worth the write, by the reuse observed at each position of a prompt.
        ExpectedReuse,
    }
    default Always
}

/// Upper bounds on uses of the arena, in thousandths of its size.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Shares {
    /// Share for slots that engines are filling and for blocks that are not on a device yet.
    #[serde(default = "unsaved")]
    #[schemars(range(min = 1, max = 1000))]
    pub unsaved_permille: Permille,
    /// Share for slots that one session is filling.
    #[serde(default = "session")]
    #[schemars(range(min = 1, max = 1000))]
    pub session_permille: Permille,
    /// Share for blocks that are being sent to peers. Competing tenants together may have twice the share, but beyond
    /// the share at most half of the memory.
    #[serde(default = "serves")]
    #[schemars(range(min = 1, max = 1000))]
    pub serves_permille: Permille,
}

/// Writing of committed blocks to devices. A crash loses the blocks that are not written yet.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Writeback {
    /// Upper bound on the time before a committed block is written, from 1ms to 10s.
    #[serde(default = "writeback_delay")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1ms') && duration(self) <= duration('10s')")
        .message("writeback.delay is outside 1ms to 10s: set a duration in that range"))]
    pub delay: Span,
    /// Bytes of waiting blocks that start a write before `delay` has passed, from 1Mi to 4Gi.
    #[serde(default = "writeback_size")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('1Mi')) >= 0 && quantity(self).compareTo(quantity('4Gi')) <= 0")
        .message("writeback.size is outside 1Mi to 4Gi: set a size in that range"))]
    pub size: Quantity,
    /// Maximum additional delay of writes while engines with a SlackProfile compute, from 0s (no delay) to 60s.
    #[serde(default = "writeback_slack_delay")]
    #[x_kube(validation = Rule::new("duration(self) <= duration('60s')")
        .message("writeback.slackDelay is above 60s: set a duration from 0s to 60s"))]
    pub slack_delay: Span,
}

/// Replicas on other nodes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// Bandwidth for copying replicas to and from other nodes, in bytes per second. `0` disables
    /// replication; such nodes cannot be drained.
    #[serde(default = "bandwidth")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() == 0 || (quantity(self).asInteger() >= 1048576 && \
        quantity(self).asInteger() <= 1099511627776)")
        .message("placement.bandwidth is neither 0 nor from 1Mi to 1Ti: set one of these values, in bytes per second"))]
    pub bandwidth: Quantity,
    /// Peer reads within `hotWindow` after which a block gets an additional replica.
    #[serde(default = "hot_reads")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub hot_reads: u32,
    /// Time window in which `hotReads` counts reads, from 1s to 24h.
    #[serde(default = "hot_window")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s') && duration(self) <= duration('24h')")
        .message("placement.hotWindow is outside 1s to 24h: set a duration in that range"))]
    pub hot_window: Span,
}

/// Reads of blocks from devices ahead of their load. Engines without hints cause none; `lookahead` of an engine's adapter
/// turns its hints off.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prefetch {
    /// Share of the arena, and of each tenant's memory limit, for blocks that are read ahead, in thousandths.
    #[serde(default = "prefetch_arena")]
    #[schemars(range(min = 1, max = 900))]
    pub arena_permille: Permille,
    /// Share of a device's bandwidth that reads ahead may fill in one iteration of an engine, in thousandths. Loads always
    /// come first.
    #[serde(default = "prefetch_bandwidth")]
    #[schemars(range(min = 1, max = 1000))]
    pub bandwidth_permille: Permille,
    /// Maximum number of iterations to look ahead. Agents choose the number up to it, by the reads that came too late or
    /// were wasted.
    #[serde(default = "prefetch_window")]
    #[schemars(range(min = 4, max = 64))]
    pub window: u32,
}

/// Blocks that commands pin for a limited time. Pins count against the tenant's quotas.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Retention {
    /// Share of what a tenant can have in memory and on devices of a node that its pins may keep, in thousandths. `0`
    /// refuses all pins.
    #[serde(default = "retention_share")]
    #[schemars(range(min = 0, max = 500))]
    pub permille: Permille,
    /// Maximum number of pinned blocks of a tenant on a node.
    #[serde(default = "retention_blocks")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub blocks_per_tenant: u32,
    /// Longest time of a pin, from 1s to 24h.
    #[serde(default = "retention_ttl")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s') && duration(self) <= duration('24h')")
        .message("retention.ttlMax is outside 1s to 24h: set a duration in that range"))]
    pub ttl_max: Span,
}

/// Limits of client requests.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Default deadline of a load, from 1ms to 10m.
    #[serde(default = "load_deadline")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1ms') && duration(self) <= duration('10m')")
        .message("limits.loadDeadline is outside 1ms to 10m: set a duration in that range"))]
    pub load_deadline: Span,
    /// Time after which the agent releases the blocks of a load that the engine still holds, from 1s to
    /// 24h.
    #[serde(default = "load_hold")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s') && duration(self) <= duration('24h')")
        .message("limits.loadHold is outside 1s to 24h: set a duration in that range"))]
    pub load_hold: Span,
    /// Time after which the agent reclaims reserved slots that are not committed, from 1s to 24h.
    #[serde(default = "reservation")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s') && duration(self) <= duration('24h')")
        .message("limits.reservation is outside 1s to 24h: set a duration in that range"))]
    pub reservation: Span,
    /// Default size of one device read of a load.
    #[serde(default = "read_size")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 4096 && quantity(self).asInteger() <= 134217728 && \
        quantity(self).asInteger() % 4096 == 0")
        .message("limits.readSize is not a multiple of 4Ki from 4Ki to 128Mi: round it"))]
    pub read_size: Quantity,
    /// Timeout of a directory lookup, from 1ms to 60s. A lookup that exceeds it counts as a miss.
    #[serde(default = "lookup_timeout")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1ms') && duration(self) <= duration('60s')")
        .message("limits.lookupTimeout is outside 1ms to 60s: set a duration in that range"))]
    pub lookup_timeout: Span,
}

fn dram() -> Quantity {
    Quantity::new("1Gi")
}

fn region_size() -> Quantity {
    Quantity::new("256Mi")
}

fn unsaved() -> Permille {
    Permille(750)
}

fn session() -> Permille {
    Permille(500)
}

fn serves() -> Permille {
    Permille(250)
}

fn writeback_delay() -> Span {
    Span::new("50ms")
}

fn writeback_size() -> Quantity {
    Quantity::new("64Mi")
}

fn writeback_slack_delay() -> Span {
    Span::new("1s")
}

fn bandwidth() -> Quantity {
    Quantity::new("256Mi")
}

fn hot_reads() -> u32 {
    4
}

fn hot_window() -> Span {
    Span::new("60s")
}

fn prefetch_arena() -> Permille {
    Permille(250)
}

fn prefetch_bandwidth() -> Permille {
    Permille(800)
}

fn prefetch_window() -> u32 {
    64
}

fn retention_share() -> Permille {
    Permille(250)
}

fn retention_blocks() -> u32 {
    65_536
}

fn retention_ttl() -> Span {
    Span::new("24h")
}

fn load_deadline() -> Span {
    Span::new("5s")
}

fn load_hold() -> Span {
    Span::new("10m")
}

fn reservation() -> Span {
    Span::new("60s")
}

fn read_size() -> Quantity {
    Quantity::new("512Ki")
}

fn lookup_timeout() -> Span {
    Span::new("500ms")
}

default_from_schema!(Cache, Shares, Writeback, Placement, Prefetch, Retention, Limits);
