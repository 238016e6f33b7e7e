//! The agent's configuration file: TOML, unknown fields refused, values with their units.
//!
//! [`Config`] is the file as written; [`Config::validate`] turns it into [`Settings`], the only form that the
//! rest of the agent sees. Errors name the field, what was found and what is allowed. Of the environment only what a pod is told of
//! itself is read ([`PodPlace`]). Reloaded is only what an agent in a cluster is told to ([`FollowedConfig`]); else an agent
//! restarts in the time its journal takes to read.

mod defaults;
mod followed;
mod kubernetes;
mod placement;
mod settings;
mod tenants;

use std::path::{Path, PathBuf};

use reprise_policy::eviction::EvictionKind;
use reprise_policy::{ByteSize, Interval, TenantName};
use serde::Deserialize;

use crate::error::{AgentError, ErrorKind};

pub(crate) use followed::{FollowedConfig, digest};
pub(crate) use kubernetes::{KubernetesSection, KubernetesSettings, PodPlace};
pub(crate) use placement::{PlacementSection, PlacementSettings};
pub(crate) use settings::{
    ArenaSettings, DeviceSettings, LogFormat, LogSettings, PeerSettings, PoolSettings, SessionSettings,
    Settings,
};
pub(crate) use tenants::TenantSettings;

/// A configuration file of this size is a mistake, for example a device given as the configuration.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The configuration file as written.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    pub(crate) node: NodeSection,
    pub(crate) session: SessionSection,
    pub(crate) arena: ArenaSection,
    pub(crate) pool: PoolSection,
    pub(crate) cache: CacheSection,
    /// Who may have how much; others get no reservation and no limit.
    pub(crate) tenants: Vec<TenantSection>,
    pub(crate) writeback: WritebackSection,
    pub(crate) peers: PeersSection,
    pub(crate) controlplane: ControlPlaneSection,
    pub(crate) placement: PlacementSection,
    pub(crate) admin: AdminSection,
    pub(crate) limits: LimitsSection,
    pub(crate) kubernetes: KubernetesSection,
    pub(crate) log: LogSection,
}

/// Who this node is.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NodeSection {
    /// Empty: the host name.
    pub(crate) name: String,
    /// Nodes of one domain fail together (a rack, a zone). Empty: unknown.
    pub(crate) failure_domain: String,
}

/// Where engines connect.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SessionSection {
    pub(crate) socket: PathBuf,
    /// Mode bits of the socket, octal.
    pub(crate) mode: String,
    /// Empty: the agent's own user and root.
    pub(crate) allow_uids: Vec<u32>,
}

/// Memory for blocks.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ArenaSection {
    pub(crate) bytes: ByteSize,
    pub(crate) region_bytes: ByteSize,
    pub(crate) huge_pages: HugePages,
}

/// Whether to ask for 2 MiB pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum HugePages {
    /// hugetlb, else transparent, else 4 KiB.
    Prefer,
    /// 4 KiB pages.
    Never,
}

/// Disk space for blocks.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PoolSection {
    pub(crate) segment_bytes: ByteSize,
    pub(crate) queue_depth: u32,
    pub(crate) io_engine: IoEngineChoice,
    /// Empty: blocks live in memory only.
    pub(crate) devices: Vec<DeviceSection>,
}

/// How devices are driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum IoEngineChoice {
    /// io_uring, or plain calls when the kernel refuses it.
    Auto,
    /// io_uring or nothing.
    IoUring,
    /// pread and pwrite on a few threads.
    Plain,
}

/// One file or block device.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceSection {
    pub(crate) path: PathBuf,
    /// Required for a file; for a block device 0 or absent means all of it.
    #[serde(default)]
    pub(crate) bytes: ByteSize,
}

/// What is kept, and who may take how much of the memory. Shares are thousandths.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CacheSection {
    pub(crate) eviction: EvictionKind,
    pub(crate) pool_free_permille: u16,
    pub(crate) arena_unsaved_permille: u16,
    pub(crate) arena_session_permille: u16,
    pub(crate) arena_serves_permille: u16,
}

/// One tenant.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TenantSection {
    pub(crate) name: TenantName,
    /// What its blocks on devices carry; by default it follows from the name.
    #[serde(default)]
    pub(crate) number: Option<u16>,
    #[serde(default)]
    pub(crate) dram: QuotaSection,
    #[serde(default)]
    pub(crate) nvme: QuotaSection,
}

/// Bytes that a tenant is sure of, and may have at the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct QuotaSection {
    pub(crate) reserved: ByteSize,
    /// Absent: no limit.
    pub(crate) limit: Option<ByteSize>,
}

/// When committed blocks go to disk.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct WritebackSection {
    pub(crate) delay: Interval,
    pub(crate) bytes: ByteSize,
}

/// The transport between agents.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PeersSection {
    /// Empty: no peers.
    pub(crate) listen: String,
    /// What other nodes are told; empty: the address listened on.
    pub(crate) advertise: String,
    pub(crate) credit_bytes: ByteSize,
    pub(crate) stall_timeout: Interval,
}

/// The directory of the cluster.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ControlPlaneSection {
    /// Members to begin with, `host:port` each; they tell of the others. None, or an empty one: stand-alone.
    pub(crate) address: Addresses,
    pub(crate) lookup_timeout: Interval,
}

/// One address, or a list.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Addresses {
    One(String),
    Some(Vec<String>),
}

/// Metrics, health and status.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct AdminSection {
    pub(crate) listen: String,
}

/// Bounds that operators may want to move.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LimitsSection {
    pub(crate) load_deadline: Interval,
    pub(crate) load_hold: Interval,
    pub(crate) reservation: Interval,
    pub(crate) read_bytes: ByteSize,
}

/// What is logged, and how.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LogSection {
    pub(crate) format: LogFormat,
    pub(crate) level: String,
}

impl Config {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// `ErrorKind::Config`: the file cannot be read, or the text is refused (with line and field).
    pub(crate) fn read(path: &Path) -> Result<Config, AgentError> {
        Config::read_text(path).map(|(config, _)| config)
    }

    /// The same, with the text.
    fn read_text(path: &Path) -> Result<(Config, String), AgentError> {
        let refuse = |what: &str| AgentError::new(ErrorKind::Config, format!("{what} '{}'", path.display()));
        let metadata =
            std::fs::metadata(path).map_err(|error| refuse("cannot read configuration").because(error))?;
        if !metadata.is_file() || metadata.len() > CONFIG_BYTES_MAX {
            return Err(refuse("a configuration is a regular file of at most 1 MiB; this is not one:"));
        }
        let text = std::fs::read_to_string(path)
            .map_err(|error| refuse("cannot read configuration").because(error))?;
        let config = Config::parse(&text).map_err(|error| refuse("in configuration").because(error))?;
        Ok((config, text))
    }

    /// Parses a configuration text.
    pub(crate) fn parse(text: &str) -> Result<Config, toml::de::Error> {
        toml::from_str(text)
    }

    /// The default configuration as a commented file.
    pub(crate) fn default_text() -> String {
        let Config {
            session,
            arena,
            pool,
            cache,
            writeback,
            peers,
            controlplane,
            placement,
            admin,
            limits,
            kubernetes,
            log,
            ..
        } = Config::default();
        format!(
            r#"# Configuration of reprise-agent. Every value below is the default; leave out what suits you.
# Sizes: bytes or KiB, MiB, GiB, TiB, kB, MB, GB, TB. Times: ms, s, m.

[node]
name = ""                  # unique in the cluster; empty: the host name
failure_domain = ""        # nodes of one domain fail together (rack, zone); empty: unknown

[session]
socket = "{socket}"        # engines connect here; its directory must exist
mode = "{mode}"            # mode bits of the socket, octal
allow_uids = []            # users that may connect; empty: the agent's own user and root

[arena]
bytes = "{arena_bytes}"    # memory for blocks; taken at start, whole
region_bytes = "{region_bytes}" # one shared-memory file each; a multiple of 2MiB, at most 1GiB
huge_pages = "prefer"      # "prefer" or "never": 2 MiB pages decide disk bandwidth by a factor of 2 to 5

[pool]
segment_bytes = "{segment_bytes}" # unit of allocation on a device; at least one block and its 4KiB header
queue_depth = {queue_depth}   # operations in flight per device
io_engine = "auto"         # "auto", "io_uring" or "plain"
# Without devices blocks live in memory only. A file is created and preallocated; a block device is used whole
# unless bytes says otherwise.
# [[pool.devices]]
# path = "/var/lib/reprise/pool-0"
# bytes = "100GiB"

[cache]
# Order of eviction, in memory and on devices. "priority_lru": low priority first, then what was used longest ago.
eviction = {{ kind = "{eviction}" }}
# Shares in thousandths, 1 to 1000 (pool_free_permille: 0 to 900).
pool_free_permille = {pool_free}    # of the pool, kept free ahead of writes
arena_unsaved_permille = {unsaved} # of the arena, for slots that engines fill and blocks not yet on a device
arena_session_permille = {share} # of the arena, for slots that one session fills
arena_serves_permille = {serves}  # of the arena, for blocks that peers are waiting for

# Tenants that are sure of some of the memory and of the devices, or may have only so much. Others get no reservation and
# no limit. Memory is reserved in whole regions; on devices a block counts with its header page.
# [[tenants]]
# name = "team-a"          # 1 to 63 of a-z, 0-9 and '-'; sessions that name none are "default"
# number = 7               # what its blocks on devices carry; by default it follows from the name
# dram = {{ reserved = "1GiB", limit = "4GiB" }}
# nvme = {{ reserved = "100GiB", limit = "1TiB" }}

[writeback]
delay = "{delay}"          # a committed block waits at most this long before it is written
bytes = "{wb_bytes}"       # or until so much is waiting

[peers]
listen = "{listen}"        # empty: no peers; port 0: any
advertise = ""             # host:port that other nodes are told; empty: the address listened on
credit_bytes = "{credit}"  # bytes under way per fetch
stall_timeout = "{stall}"  # a peer silent for so long is lost

[controlplane]
address = ""               # host:port, or a list of members; empty: stand-alone
lookup_timeout = "{lookup}" # a slower answer counts as a miss

[placement]
bandwidth = "{bandwidth}"       # a second, of blocks that go to and come from other nodes so that they have replicas; "0": none
hot_reads = {hot_reads}              # a block that peers have read so often within hot_window gets a replica elsewhere
hot_window = "{hot_window}"

[admin]
listen = "{admin}"         # /metrics /healthz /readyz /status, not authenticated; port 0: any

[limits]
load_deadline = "{deadline}" # of loads that name none
load_hold = "{hold}"        # a load that is held longer loses its blocks
reservation = "{reservation}"      # slots that are not committed by then are taken back
read_bytes = "{read}"      # one device read of loads that name none

[kubernetes]               # for agents with --in-cluster only
state_directory = "{state}" # the last spec of the node, for a start without the API server
status_every = "{status}"     # statuses are written so far apart, over time

[log]
format = "text"            # "text" or "json", to standard error
level = "{level}"          # tracing filter, for example "info,reprise_transport=debug"
"#,
            socket = session.socket.display(),
            mode = session.mode,
            arena_bytes = arena.bytes,
            region_bytes = arena.region_bytes,
            segment_bytes = pool.segment_bytes,
            queue_depth = pool.queue_depth,
            eviction = match cache.eviction {
                EvictionKind::PriorityLru => "priority_lru",
            },
            pool_free = cache.pool_free_permille,
            unsaved = cache.arena_unsaved_permille,
            share = cache.arena_session_permille,
            serves = cache.arena_serves_permille,
            delay = writeback.delay,
            wb_bytes = writeback.bytes,
            listen = peers.listen,
            credit = peers.credit_bytes,
            stall = peers.stall_timeout,
            lookup = controlplane.lookup_timeout,
            bandwidth = placement.bandwidth,
            hot_reads = placement.hot_reads,
            hot_window = placement.hot_window,
            admin = admin.listen,
            deadline = limits.load_deadline,
            hold = limits.load_hold,
            reservation = limits.reservation,
            read = limits.read_bytes,
            state = kubernetes.state_directory.display(),
            status = kubernetes.status_every,
            level = log.level,
        )
    }
}

impl Default for SessionSection {
    fn default() -> Self {
        SessionSection {
            socket: defaults::SOCKET.into(),
            mode: defaults::SOCKET_MODE.to_owned(),
            allow_uids: Vec::new(),
        }
    }
}

impl Default for ArenaSection {
    fn default() -> Self {
        ArenaSection {
            bytes: defaults::ARENA_BYTES,
            region_bytes: defaults::REGION_BYTES,
            huge_pages: HugePages::Prefer,
        }
    }
}

impl Default for PoolSection {
    fn default() -> Self {
        PoolSection {
            segment_bytes: defaults::SEGMENT_BYTES,
            queue_depth: defaults::QUEUE_DEPTH,
            io_engine: IoEngineChoice::Auto,
            devices: Vec::new(),
        }
    }
}

impl Default for CacheSection {
    fn default() -> Self {
        CacheSection {
            eviction: EvictionKind::default(),
            pool_free_permille: defaults::POOL_FREE_PERMILLE,
            arena_unsaved_permille: defaults::ARENA_UNSAVED_PERMILLE,
            arena_session_permille: defaults::ARENA_SESSION_PERMILLE,
            arena_serves_permille: defaults::ARENA_SERVES_PERMILLE,
        }
    }
}

impl Default for WritebackSection {
    fn default() -> Self {
        WritebackSection { delay: defaults::WRITEBACK_DELAY, bytes: defaults::WRITEBACK_BYTES }
    }
}

impl Default for PeersSection {
    fn default() -> Self {
        PeersSection {
            listen: defaults::PEERS_LISTEN.to_owned(),
            advertise: String::new(),
            credit_bytes: defaults::CREDIT_BYTES,
            stall_timeout: defaults::STALL_TIMEOUT,
        }
    }
}

impl Default for ControlPlaneSection {
    fn default() -> Self {
        ControlPlaneSection {
            address: Addresses::One(String::new()),
            lookup_timeout: defaults::LOOKUP_TIMEOUT,
        }
    }
}

impl Default for AdminSection {
    fn default() -> Self {
        AdminSection { listen: defaults::ADMIN_LISTEN.to_owned() }
    }
}

impl Default for LimitsSection {
    fn default() -> Self {
        LimitsSection {
            load_deadline: defaults::LOAD_DEADLINE,
            load_hold: defaults::LOAD_HOLD,
            reservation: defaults::RESERVATION,
            read_bytes: defaults::READ_BYTES,
        }
    }
}

impl Default for LogSection {
    fn default() -> Self {
        LogSection { format: LogFormat::Text, level: defaults::LOG_LEVEL.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_default_parses_to_the_default_and_is_valid() {
        let parsed = Config::parse(&Config::default_text()).expect("the default text parses");
        assert_eq!(parsed, Config::default());
        parsed.validate().expect("the default is valid");
    }

    #[test]
    fn an_unknown_field_and_a_size_without_sense_are_refused_by_name() {
        let error = Config::parse("[arena]\nbites = \"1GiB\"").expect_err("unknown field").to_string();
        assert!(error.contains("bites"), "{error}");
        let error = Config::parse("[arena]\nbytes = \"much\"").expect_err("no size").to_string();
        assert!(error.contains("much") && error.contains("GiB"), "{error}");
    }
}
