//! What each agent does with its memory and devices. Fields stand for settings of `reprise-agent`, with their bounds.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::default_of_nothing;
use crate::fields::{Permille, Quantity, Span, choice};

/// What each agent does with its memory and devices. A change restarts agents, as `agents.updateStrategy` says.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("quantity(self.dram).compareTo(quantity(self.regionSize)) >= 0")
    .message("the arena holds at least one region: raise cache.dram or lower cache.regionSize"))]
#[x_kube(validation = Rule::new("quantity(self.dram).asInteger() / 8192 <= quantity(self.regionSize).asInteger()")
    .message("cache.dram has more than 8192 regions, which is what an engine can map: raise cache.regionSize"))]
pub struct Cache {
    /// Bytes of memory for blocks on each node, taken whole when the agent starts. The node must have them free.
    #[serde(default = "dram")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() % 2097152 == 0 && quantity(self).asInteger() <= 70368744177664")
        .message("cache.dram is a multiple of 2Mi, at most 64Ti: round it"))]
    pub dram: Quantity,
    /// Bytes of one shared-memory file of the arena. A region belongs to one tenant until the agent restarts.
    #[serde(default = "region_size")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 2097152 && quantity(self).asInteger() <= 1073741824 && \
        quantity(self).asInteger() % 2097152 == 0")
        .message("cache.regionSize is 2Mi to 1Gi and a multiple of 2Mi: round it"))]
    pub region_size: Quantity,
    /// Whether memory is asked for in pages of 2 MiB, which decide the bandwidth of devices by a factor of 2 to 5.
    #[serde(default)]
    pub huge_pages: HugePages,
    /// Order in which blocks go, in memory and on devices.
    #[serde(default)]
    pub eviction: EvictionPolicy,
    /// Who may take how much of the arena.
    #[serde(default)]
    pub shares: Shares,
    /// When committed blocks go to devices.
    #[serde(default)]
    pub writeback: Writeback,
    /// Replicas on other nodes.
    #[serde(default)]
    pub placement: Placement,
    /// Bounds of requests.
    #[serde(default)]
    pub limits: Limits,
}

choice! {
    /// Whether to ask for pages of 2 MiB.
    HugePages {
        /// Reserved huge pages, else transparent ones, else 4 KiB.
        Prefer,
        /// Pages of 4 KiB.
        Never,
    }
    default Prefer
}

choice! {
    /// Order of eviction.
    EvictionPolicy {
        /// Low priority first, then what was used longest ago.
        PriorityLru,
    }
    default PriorityLru
}

/// Shares of the arena, in thousandths.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Shares {
    /// For slots that engines fill, and blocks that are not on a device yet.
    #[serde(default = "unsaved")]
    #[schemars(range(min = 1, max = 1000))]
    pub unsaved_permille: Permille,
    /// For slots that one session fills.
    #[serde(default = "session")]
    #[schemars(range(min = 1, max = 1000))]
    pub session_permille: Permille,
    /// For blocks that peers wait for.
    #[serde(default = "serves")]
    #[schemars(range(min = 1, max = 1000))]
    pub serves_permille: Permille,
}

/// When committed blocks go to devices; what a crash may lose.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Writeback {
    /// A committed block waits at most this long before it is written.
    #[serde(default = "writeback_delay")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1ms') && duration(self) <= duration('10s')")
        .message("writeback.delay is 1ms to 10s: choose a time between"))]
    pub delay: Span,
    /// Or until so many bytes wait.
    #[serde(default = "writeback_size")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('1Mi')) >= 0 && quantity(self).compareTo(quantity('4Gi')) <= 0")
        .message("writeback.size is 1Mi to 4Gi: choose a size between"))]
    pub size: Quantity,
}

/// Replicas on other nodes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// Bytes a second of blocks that go to and come from other nodes for their replicas. `0`: none; such nodes cannot be drained.
    #[serde(default = "bandwidth")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() == 0 || (quantity(self).asInteger() >= 1048576 && \
        quantity(self).asInteger() <= 1099511627776)")
        .message("placement.bandwidth is 0, or 1Mi to 1Ti a second: choose one of them"))]
    pub bandwidth: Quantity,
    /// A block that peers have read so often within `hotWindow` gets a replica elsewhere.
    #[serde(default = "hot_reads")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub hot_reads: u32,
    /// See `hotReads`.
    #[serde(default = "hot_window")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s') && duration(self) <= duration('24h')")
        .message("placement.hotWindow is 1s to 24h: choose a time between"))]
    pub hot_window: Span,
}

/// Bounds of requests.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Deadline of loads that name none.
    #[serde(default = "load_deadline")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1ms') && duration(self) <= duration('10m')")
        .message("limits.loadDeadline is 1ms to 10m: choose a time between"))]
    pub load_deadline: Span,
    /// A load that is held for longer loses its blocks.
    #[serde(default = "load_hold")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s') && duration(self) <= duration('24h')")
        .message("limits.loadHold is 1s to 24h: choose a time between"))]
    pub load_hold: Span,
    /// Slots that are not committed by then are taken back.
    #[serde(default = "reservation")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1s') && duration(self) <= duration('24h')")
        .message("limits.reservation is 1s to 24h: choose a time between"))]
    pub reservation: Span,
    /// Bytes of one read from a device, of loads that name none.
    #[serde(default = "read_size")]
    #[x_kube(validation = Rule::new("quantity(self).asInteger() >= 4096 && quantity(self).asInteger() <= 134217728 && \
        quantity(self).asInteger() % 4096 == 0")
        .message("limits.readSize is 4Ki to 128Mi and a multiple of 4Ki: round it"))]
    pub read_size: Quantity,
    /// An answer of the directory that takes longer counts as a miss.
    #[serde(default = "lookup_timeout")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('1ms') && duration(self) <= duration('60s')")
        .message("limits.lookupTimeout is 1ms to 60s: choose a time between"))]
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

fn bandwidth() -> Quantity {
    Quantity::new("256Mi")
}

fn hot_reads() -> u32 {
    4
}

fn hot_window() -> Span {
    Span::new("60s")
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

default_of_nothing!(Cache, Shares, Writeback, Placement, Limits);
