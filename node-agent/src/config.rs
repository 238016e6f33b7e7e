//! The agent's configuration file: TOML with units; unknown fields are rejected.
//!
//! [`Config`] is the file as written; [`Config::validate`] converts it to [`Settings`], the only form that
//! the rest of the agent uses. Errors state field, value and allowed values. The only environment variables
//! are those that describe a pod ([`PodEnvironment`]). Only an agent in a cluster reloads its configuration
//! ([`ReloadableConfig`]); other agents are restarted, which takes as long as reading the journals.

mod defaults;
mod devices;
mod kubernetes;
mod placement;
mod prefetch;
mod reloadable;
mod settings;
mod tenants;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use reprise_identity::TlsSettings;
use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::EvictionPolicy;
use reprise_policy::{ByteSize, Interval};
use serde::Deserialize;

use crate::error::{AgentError, ErrorKind};

pub(crate) use kubernetes::{KubernetesSection, KubernetesSettings, PodEnvironment};
pub(crate) use placement::{PlacementSection, PlacementSettings};
pub(crate) use prefetch::{PrefetchSection, RetentionSection, RetentionSettings};
pub(crate) use reloadable::{ReloadableConfig, digest};
pub(crate) use settings::{
    ArenaSettings, DeviceSettings, LogFormat, LogSettings, PeerSettings, PoolSettings, SessionSettings,
    Settings,
};
pub(crate) use tenants::{EncryptionSettings, TenantSection, TenantSettings};

/// Maximum size of a configuration file. A larger one is a mistake, for example the path of a device.
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
    /// Quotas of tenants; other tenants have no reservation and no limit.
    pub(crate) tenants: Vec<TenantSection>,
    pub(crate) writeback: WritebackSection,
    pub(crate) slack: SlackSection,
    pub(crate) peers: PeersSection,
    pub(crate) controlplane: ControlPlaneSection,
    pub(crate) placement: PlacementSection,
    pub(crate) prefetch: PrefetchSection,
    pub(crate) retention: RetentionSection,
    pub(crate) admin: AdminSection,
    /// Certificates of connections to members, peers and administrators.
    pub(crate) tls: TlsSettings,
    pub(crate) limits: LimitsSection,
    pub(crate) kubernetes: KubernetesSection,
    pub(crate) log: LogSection,
    pub(crate) encryption: EncryptionSection,
}

/// Identity of the node.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NodeSection {
    /// Empty: the host name.
    pub(crate) name: String,
    /// Nodes of a failure domain (rack, zone) fail together. Empty: unknown.
    pub(crate) failure_domain: String,
}

/// The socket for engines.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SessionSection {
    pub(crate) socket: PathBuf,
    /// Mode bits of the socket, octal.
    pub(crate) mode: String,
    /// Empty: the agent's own user and root.
    pub(crate) allow_uids: Vec<u32>,
    /// Folder with the isolation salt of each tenant. Empty: none.
    pub(crate) salts: PathBuf,
    /// Whether sessions may lease and pin extents of pool files.
    pub(crate) extents: bool,
    /// Queue pairs of each NVMe controller for all sessions, and for one of them; 0: none.
    pub(crate) queue_pairs: u32,
    pub(crate) queue_pairs_per_session: u32,
    /// Maximum entries of a queue.
    pub(crate) queue_depth: u32,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ArenaSection {
    pub(crate) bytes: ByteSize,
    pub(crate) region_bytes: ByteSize,
    pub(crate) huge_pages: HugePages,
}

/// Whether to use 2 MiB pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum HugePages {
    /// hugetlb pages, else transparent huge pages, else 4 KiB pages.
    Prefer,
    /// Only 4 KiB pages.
    Never,
}

/// Disk space for blocks.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PoolSection {
    pub(crate) segment_bytes: ByteSize,
    pub(crate) queue_depth: u32,
    pub(crate) io_engine: IoEngineChoice,
    /// Eviction policy of the pool.
    pub(crate) eviction: EvictionPolicy,
    /// Rule by which saved blocks are written to devices.
    pub(crate) admission: AdmissionMode,
    /// Bytes that each device may write in 24 hours. Absent: no limit.
    pub(crate) daily_write_budget: Option<ByteSize>,
    /// Bytes of the budget that may be written at once. Absent: 1 %.
    pub(crate) write_burst: Option<ByteSize>,
    /// Bytes that files leave on their file system. Absent: 5 % of it, at least 1 GiB.
    pub(crate) reserve_bytes: Option<ByteSize>,
    /// Empty: blocks are stored in memory only.
    pub(crate) devices: Vec<DeviceSection>,
}

/// I/O engine of the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum IoEngineChoice {
    /// io_uring, or plain system calls if the kernel does not allow it.
    Auto,
    /// io_uring, without a fallback.
    IoUring,
    /// pread and pwrite on a few threads.
    Plain,
}

/// One file, block device or NVMe controller; exactly one of `path`, `pci` and `emulated` is set.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceSection {
    /// Path of a file or block device.
    #[serde(default)]
    pub(crate) path: PathBuf,
    /// PCI address of an NVMe controller that the agent drives itself.
    #[serde(default)]
    pub(crate) pci: String,
    /// Expected serial number of the controller; empty: any.
    #[serde(default)]
    pub(crate) serial: String,
    /// Namespace of the controller; 0: the only one.
    #[serde(default)]
    pub(crate) namespace: u32,
    /// Path of the file of an NVMe controller that the agent emulates, for tests and demonstrations.
    #[serde(default)]
    pub(crate) emulated: PathBuf,
    /// Required for a file; for a block device or controller, 0 or absent means the whole device.
    #[serde(default)]
    pub(crate) bytes: ByteSize,
}

/// Eviction policy in memory, and shares of pool and arena, in thousandths.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CacheSection {
    pub(crate) eviction: EvictionPolicy,
    /// Whether blocks that one request has used leave memory first once they are on a device.
    pub(crate) skip_dram: bool,
    pub(crate) pool_free_permille: u16,
    pub(crate) arena_unsaved_permille: u16,
    pub(crate) arena_session_permille: u16,
    pub(crate) arena_serves_permille: u16,
}

/// When committed blocks are written to devices.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct WritebackSection {
    pub(crate) delay: Interval,
    pub(crate) bytes: ByteSize,
    /// Maximum additional delay of writes that wait for slack of engines; 0: writes never wait for it.
    pub(crate) slack_delay: Interval,
}

/// Slack profiles of an agent outside of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct SlackSection {
    /// Files in the JSON form of `reprise profile --output`.
    pub(crate) profiles: Vec<PathBuf>,
}

/// The transport between agents.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PeersSection {
    /// Empty: no peer transport.
    pub(crate) listen: String,
    /// Address announced to other nodes; empty: the listen address.
    pub(crate) advertise: String,
    pub(crate) credit_bytes: ByteSize,
    pub(crate) stall_timeout: Interval,
}

/// Connection to the control plane.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ControlPlaneSection {
    /// Initial members, `host:port` each; other members are discovered. Absent or empty: stand-alone.
    pub(crate) address: Addresses,
    pub(crate) lookup_timeout: Interval,
}

/// One address, or a list.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Addresses {
    Single(String),
    List(Vec<String>),
}

/// Port for metrics, health and status.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct AdminSection {
    pub(crate) listen: String,
    /// File with a bearer token that may read `/metrics` without a client certificate.
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) trace: bool,
}

/// Adjustable time limits and sizes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LimitsSection {
    pub(crate) load_deadline: Interval,
    pub(crate) load_hold: Interval,
    pub(crate) reservation: Interval,
    pub(crate) read_bytes: ByteSize,
}

/// Encryption of blocks on devices.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct EncryptionSection {
    /// Folder with the keys of each tenant. Empty: none.
    pub(crate) keys: PathBuf,
}

/// Format and level of the log.
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
    /// `ErrorKind::Config`: the file cannot be read, or its content is invalid (with line and field).
    pub(crate) fn read(path: &Path) -> Result<Config, AgentError> {
        Config::read_text(path).map(|(config, _)| config)
    }

    /// Reads a configuration file and also returns its text.
    fn read_text(path: &Path) -> Result<(Config, String), AgentError> {
        let refuse = |what: &str| AgentError::new(ErrorKind::Config, format!("{what} '{}'", path.display()));
        let metadata = std::fs::metadata(path)
            .map_err(|error| refuse("cannot read configuration").with_source(error))?;
        if !metadata.is_file() || metadata.len() > CONFIG_BYTES_MAX {
            return Err(refuse("invalid configuration, expected a regular file of at most 1 MiB:"));
        }
        let text = std::fs::read_to_string(path)
            .map_err(|error| refuse("cannot read configuration").with_source(error))?;
        let config = Config::parse(&text).map_err(|error| refuse("in configuration").with_source(error))?;
        Ok((config, text))
    }

    /// Parses the text of a configuration.
    pub(crate) fn parse(text: &str) -> Result<Config, toml::de::Error> {
        toml::from_str(text)
    }

    /// Returns the default configuration as a commented file.
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
            prefetch,
            retention,
            admin,
            limits,
            kubernetes,
            log,
            ..
        } = Config::default();
        format!(
            r#"# Configuration of reprise-agent. All values below are defaults; omit those that need no change.
# Sizes: bytes or KiB, MiB, GiB, TiB, kB, MB, GB, TB. Times: ms, s, m.

[node]
name = ""                  # unique in the cluster; empty: the host name
failure_domain = ""        # nodes of a domain (rack, zone) fail together; empty: unknown

[session]
socket = "{socket}"        # engines connect here; its directory must exist
mode = "{mode}"            # mode bits of the socket, octal
allow_uids = []            # users that may connect; empty: the agent's own user and root
salts = ""                 # folder with the isolation salt of each tenant (docs/SECURITY.md); empty: only the tenant "default"
extents = false            # true: clients may read and write pool files themselves, blocks of other tenants included
queue_pairs = 0            # queue pairs of each NVMe controller that clients may drive; needs extents = true; 0 in Kubernetes
queue_pairs_per_session = {queue_pairs_per_session} # of them, at most for one client
queue_depth = {session_queue_depth}         # maximum entries of such a queue

[encryption]
keys = ""                  # folder with the encryption keys of each tenant (docs/SECURITY.md); empty: devices have plaintext

[arena]
bytes = "{arena_bytes}"    # memory for blocks; allocated completely at start
region_bytes = "{region_bytes}" # size of a shared-memory file; a multiple of 2MiB, at most 1GiB
huge_pages = "prefer"      # "prefer" or "never": 2 MiB pages improve disk bandwidth by a factor of 2 to 5

[pool]
segment_bytes = "{segment_bytes}" # unit of allocation on a device; at least one block and its 4KiB header
queue_depth = {queue_depth}   # operations in flight per device
io_engine = "auto"         # "auto", "io_uring" or "plain"
eviction = {{ kind = "{pool_eviction}", chains = "descendants_first" }} # on devices; see [cache]
admission = "{admission}"       # "always"; "second_use": once used again; "expected_reuse": if worth the write. These two: no save to extents
# daily_write_budget = "1TiB" # bytes that each device may write in any 24 hours; default: no limit
# write_burst = "10GiB"    # of them at once, up to half; 1 % by default. Sustained writes are budget - burst
# reserve_bytes = "1GiB"   # space that a new or growing file leaves on its file system; default: 5 %, at least 1GiB
# Without devices, blocks are stored in memory only. A file is created and preallocated. A block device is used
# completely unless bytes is set. When bytes or the device are larger at the next start, the pool grows and keeps
# its blocks. It does not shrink.
# [[pool.devices]]
# path = "/var/lib/reprise/pool-0"
# bytes = "100GiB"
# Instead of a path, a device can be an NVMe controller that the agent drives itself, without the kernel. It must be
# bound to vfio-pci; `reprise doctor` reports what a node lacks. The agent accepts no other drive at this address.
# [[pool.devices]]
# pci = "0000:3b:00.0"
# serial = "S5GXNF0R"      # expected serial number; empty: any
# namespace = 1            # 0: the only one
# For tests and demonstrations, the agent emulates a controller on a file. Logs and status state the emulation.
# [[pool.devices]]
# emulated = "/var/lib/reprise/emulated-0"
# bytes = "1GiB"

[cache]
# Eviction policy in memory. chains = "descendants_first": a block is evicted after all blocks that continue its prefix;
# "ignored": the policy alone decides. The kinds are:
#   "priority_lru"         low priority first, then least recently used
#   "lru", "lfu"           least recently or least frequently used first
#   "semantic"             shared prefixes and blocks that were used again last
#   "s3_fifo"              two queues; blocks that are not used twice leave early
#   "cost_aware"           least loss of time per freed byte first, by the reuse observed at each position
eviction = {{ kind = "{eviction}", chains = "descendants_first" }}
skip_dram = false          # true: blocks that one request has used leave full memory first once they are on a device
# Shares in thousandths, 1 to 1000 (pool_free_permille: 0 to 900). While the peers of several tenants compete, these
# tenants together may have twice arena_serves_permille, but beyond the share at most half of the arena.
pool_free_permille = {pool_free}    # share of the pool that is kept free ahead of writes
arena_unsaved_permille = {unsaved} # share of the arena for slots being filled and blocks not yet on a device
arena_session_permille = {share} # share of the arena for slots that one session fills
arena_serves_permille = {serves}  # share of the arena for blocks that peers wait for

# Guaranteed and maximum bytes of tenants in memory and on devices. Other tenants have no reservation and
# no limit. Memory is reserved in whole regions; on devices, the header page of a block counts too.
# [[tenants]]
# name = "team-a"          # 1 to 63 of a-z, 0-9 and '-'; sessions without a tenant use "default"
# number = 7               # stored with its blocks on devices; derived from the name by default
# encrypted = true         # never written to devices in plaintext: its keys are in encryption.keys
# public = true            # sessions of all tenants may read its blocks; for one tenant, which must not be encrypted
# uids = ["2000-2999"]     # its sessions' users; with `uids` or `gids` (primary groups), others may not use the tenant
# dram = {{ reserved = "1GiB", limit = "4GiB" }}
# nvme = {{ reserved = "100GiB", limit = "1TiB" }}
# bandwidth = {{ weight = 2 }}   # share of reads, writes and peers' requests while tenants compete: 1 to 1000, default 1

[writeback]
delay = "{delay}"          # maximum time before a committed block is written
bytes = "{wb_bytes}"       # or earlier, if this many bytes are waiting
slack_delay = "{slack_delay}"       # maximum additional delay while engines with a slack profile compute, or blocks are read; "0s": none

# Slack profiles of models, as `reprise profile --output` writes them. While engines report layers of these models,
# writes go into their slack. In a cluster, the SlackProfiles of the node apply instead.
# [slack]
# profiles = ["/etc/reprise/llama-h200.json"]

[peers]
listen = "{listen}"        # empty: no peers; port 0: any free port
advertise = ""             # host:port announced to other nodes; empty: the listen address
credit_bytes = "{credit}"  # maximum bytes in flight per fetch
stall_timeout = "{stall}"  # a peer that is silent for this long is considered lost

[controlplane]
address = ""               # host:port, or a list of members; empty: stand-alone
lookup_timeout = "{lookup}" # a slower response counts as a miss

[placement]
bandwidth = "{bandwidth}"       # per second, for copying replicas to and from other nodes; "0": off
hot_reads = {hot_reads}              # a block that peers read this often within hot_window gets another replica
hot_window = "{hot_window}"

{ahead}
[admin]
listen = "{admin}"         # /metrics /healthz /readyz /startz /status; port 0: any free port
# token_file = "/path"     # a bearer token that may read /metrics without a client certificate; default: none
# trace = true             # /trace for admins: keys, tenants, sizes and times of all blocks; default: off

[tls]            # one of both must be set
folder = ""      # ca.crt, tls.crt and tls.key of this agent (identity agent/<node>); changed files are used at once
plain = false    # true: no TLS, all callers may do all; loopback addresses only

[limits]
load_deadline = "{deadline}" # deadline of loads without one
load_hold = "{hold}"        # a load that is held longer loses its blocks
reservation = "{reservation}"      # reserved slots that are not committed in time are released
read_bytes = "{read}"      # size of a device read, for loads without one

[kubernetes]               # for agents with --in-cluster only
state_directory = "{state}" # for the node's last spec, so that the agent can start without the API server
status_every = "{status}"     # average interval between status writes

[log]
format = "text"            # "text" or "json", to standard error
level = "{level}"          # tracing filter, for example "info,reprise_transport=debug"
"#,
            socket = session.socket.display(),
            mode = session.mode,
            arena_bytes = arena.bytes,
            region_bytes = arena.region_bytes,
            queue_pairs_per_session = session.queue_pairs_per_session,
            session_queue_depth = session.queue_depth,
            segment_bytes = pool.segment_bytes,
            queue_depth = pool.queue_depth,
            eviction = cache.eviction.kind.name(),
            pool_eviction = pool.eviction.kind.name(),
            admission = pool.admission.name(),
            pool_free = cache.pool_free_permille,
            unsaved = cache.arena_unsaved_permille,
            share = cache.arena_session_permille,
            serves = cache.arena_serves_permille,
            delay = writeback.delay,
            wb_bytes = writeback.bytes,
            slack_delay = writeback.slack_delay,
            listen = peers.listen,
            credit = peers.credit_bytes,
            stall = peers.stall_timeout,
            lookup = controlplane.lookup_timeout,
            bandwidth = placement.bandwidth,
            hot_reads = placement.hot_reads,
            hot_window = placement.hot_window,
            ahead = prefetch.default_text(&retention),
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
            salts: PathBuf::new(),
            extents: false,
            queue_pairs: 0,
            queue_pairs_per_session: defaults::QUEUE_PAIRS_PER_SESSION,
            queue_depth: defaults::SESSION_QUEUE_DEPTH,
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
            eviction: EvictionPolicy::default(),
            admission: AdmissionMode::default(),
            daily_write_budget: None,
            write_burst: None,
            reserve_bytes: None,
            devices: Vec::new(),
        }
    }
}

impl Default for CacheSection {
    fn default() -> Self {
        CacheSection {
            eviction: EvictionPolicy::default(),
            skip_dram: false,
            pool_free_permille: defaults::POOL_FREE_PERMILLE,
            arena_unsaved_permille: defaults::ARENA_UNSAVED_PERMILLE,
            arena_session_permille: defaults::ARENA_SESSION_PERMILLE,
            arena_serves_permille: defaults::ARENA_SERVES_PERMILLE,
        }
    }
}

impl Default for WritebackSection {
    fn default() -> Self {
        WritebackSection {
            delay: defaults::WRITEBACK_DELAY,
            bytes: defaults::WRITEBACK_BYTES,
            slack_delay: defaults::SLACK_DELAY,
        }
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
            address: Addresses::Single(String::new()),
            lookup_timeout: defaults::LOOKUP_TIMEOUT,
        }
    }
}

impl Default for AdminSection {
    fn default() -> Self {
        AdminSection { listen: defaults::ADMIN_LISTEN.to_owned(), token_file: None, trace: false }
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
