//! Validated settings, from which the rest of the agent is built.
//!
//! All values satisfy the limits below, so they are not checked again. The validation reads only the host
//! name of the machine. Whether memory, devices and ports are available is detected when they are
//! allocated.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use reprise_agent_core::{PrefetchSettings, limits::LOAD_DEADLINE_MAX};
use reprise_buffers::{REGION_BYTES_MAX, REGIONS_MAX};
use reprise_identity::TlsSettings;
use reprise_io::{DeviceDescription, IfMissing, Reserve};
use reprise_policy::TenantName;
use reprise_policy::admission::AdmissionMode;
use reprise_policy::admission::budget::DailyBudget;
use reprise_policy::eviction::EvictionPolicy;
use reprise_policy::layout::{BLOCK_BYTES_MAX, PAGE_BYTES};
use reprise_policy::queue_grants::{PAIRS_PER_GRANT_MAX, QueueGrantLimits};
use serde::Deserialize;

use super::{
    Addresses, ArenaSection, CacheSection, Config, EncryptionSettings, HugePages, IoEngineChoice,
    KubernetesSettings, LimitsSection, LogSection, NodeSection, PeersSection, PlacementSettings, PoolSection,
    RetentionSettings, SessionSection, SlackSection, TenantSettings,
};
use crate::error::{AgentError, ErrorKind};
use crate::session::TenantUsers;

mod pool;

/// Maximum length of a node name, which appears in handshakes, log lines and metric labels.
const NAME_BYTES_MAX: usize = 63;

/// Maximum length of the socket path. `sun_path` has 108 bytes with its terminating zero, and the socket is
/// created under a temporary name that is 4 bytes longer.
const SOCKET_PATH_BYTES_MAX: usize = 103;

/// Maximum length of `allow_uids`.
const ALLOW_UIDS_MAX: usize = 64;

/// Maximum queue pairs of a controller for sessions: queue numbers have 16 bits, and controllers grant far fewer.
const QUEUE_PAIRS_MAX: u32 = 1024;

/// Maximum slack profiles, as for a node of a cluster.
const SLACK_PROFILES_MAX: usize = 16;

/// Maximum entries of a queue that a session drives: identifiers of commands have 12 bits of slot.
const SESSION_QUEUE_DEPTH_MAX: u32 = 4096;

/// Unit of regions and segments: the size of a huge page.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Maximum number of devices; a full NVMe backplane has 24.
const DEVICES_MAX: usize = 32;

/// Maximum size of a segment; [`super::defaults`] explains why segments are small.
const SEGMENT_BYTES_MAX: u64 = 1 << 30;

/// Validated settings of an agent.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) node: NodeSettings,
    pub(crate) session: SessionSettings,
    pub(crate) arena: ArenaSettings,
    pub(crate) pool: PoolSettings,
    pub(crate) cache: CacheSettings,
    pub(crate) tenants: Vec<TenantSettings>,
    /// Tenant whose blocks all tenants may read.
    pub(crate) public_tenant: Option<TenantName>,
    pub(crate) writeback_delay: Duration,
    pub(crate) writeback_bytes: u64,
    pub(crate) slack_delay: Duration,
    /// Files of slack profiles; empty in a cluster.
    pub(crate) slack_profiles: Vec<PathBuf>,
    pub(crate) load_deadline: Duration,
    pub(crate) load_hold: Duration,
    pub(crate) reservation: Duration,
    pub(crate) read_bytes: u64,
    pub(crate) lookup_timeout: Duration,
    /// `None`: no peer transport.
    pub(crate) peers: Option<PeerSettings>,
    /// `None`: the agent runs stand-alone.
    pub(crate) controlplane: Option<ControlPlaneSettings>,
    pub(crate) placement: PlacementSettings,
    pub(crate) prefetch: PrefetchSettings,
    pub(crate) retention: RetentionSettings,
    pub(crate) admin: SocketAddr,
    /// File with the bearer token of scrapers.
    pub(crate) admin_token_file: Option<PathBuf>,
    /// Whether the admin port records traces.
    pub(crate) admin_trace: bool,
    pub(crate) tls: TlsSettings,
    pub(crate) kubernetes: KubernetesSettings,
    pub(crate) log: LogSettings,
    pub(crate) encryption: EncryptionSettings,
}

/// Identity of the node.
#[derive(Clone, Debug)]
pub(crate) struct NodeSettings {
    pub(crate) name: String,
    pub(crate) failure_domain: String,
}

/// The socket for engines and its access control.
#[derive(Clone, Debug)]
pub(crate) struct SessionSettings {
    pub(crate) socket: PathBuf,
    pub(crate) mode: u32,
    /// `None`: the agent's own user and root.
    pub(crate) allow_uids: Option<Vec<u32>>,
    /// Users and groups of tenants, which may connect too.
    pub(crate) users: TenantUsers,
    /// Folder with the isolation salt of each tenant; `None`: sessions have the default tenant only.
    pub(crate) salts: Option<PathBuf>,
    pub(crate) queue_grants: QueueGrantLimits,
}

#[derive(Clone, Debug)]
pub(crate) struct ArenaSettings {
    pub(crate) bytes: u64,
    pub(crate) region_bytes: u64,
    pub(crate) huge_pages: HugePages,
}

/// Disk space for blocks.
#[derive(Clone, Debug)]
pub(crate) struct PoolSettings {
    pub(crate) segment_bytes: u64,
    pub(crate) queue_depth: u32,
    pub(crate) io_engine: IoEngineChoice,
    pub(crate) eviction: EvictionPolicy,
    pub(crate) admission: AdmissionMode,
    pub(crate) daily_write_budget: Option<DailyBudget>,
    /// Space that a claimed file leaves on its file system, unless its claim sets another reserve.
    pub(crate) reserve: Reserve,
    /// Whether sessions may lease and pin extents of files.
    pub(crate) lend_extents: bool,
    /// Whether sessions may reach extents of a controller through their own queue pairs.
    pub(crate) lend_queues: bool,
    pub(crate) devices: Vec<DeviceSettings>,
}

/// Eviction order, and shares in thousandths.
#[derive(Clone, Debug)]
pub(crate) struct CacheSettings {
    pub(crate) eviction: EvictionPolicy,
    pub(crate) skip_dram: bool,
    pub(crate) pool_free_permille: u16,
    pub(crate) arena_unsaved_permille: u16,
    pub(crate) arena_session_permille: u16,
    pub(crate) arena_serves_permille: u16,
}

/// One device of the pool.
#[derive(Clone, Debug)]
pub(crate) struct DeviceSettings {
    pub(crate) description: DeviceDescription,
    /// Size of a file, or limit within a block device; `None`: the whole device.
    pub(crate) bytes: Option<u64>,
    /// Whether a missing file is created.
    pub(crate) missing: IfMissing,
    /// Space that a file leaves on its file system.
    pub(crate) reserve: Reserve,
}

/// The transport between agents.
#[derive(Clone, Debug)]
pub(crate) struct PeerSettings {
    pub(crate) listen: SocketAddr,
    /// Address announced to other nodes, if it differs from the listen address.
    pub(crate) advertise: Option<String>,
    pub(crate) credit_bytes: u64,
    pub(crate) stall_timeout: Duration,
}

/// Connection to the control plane.
#[derive(Clone, Debug)]
pub(crate) struct ControlPlaneSettings {
    /// Initial members, `http://host:port` each; at least one.
    pub(crate) endpoints: Vec<String>,
}

/// Format and level of the log.
#[derive(Clone, Debug)]
pub(crate) struct LogSettings {
    pub(crate) format: LogFormat,
    pub(crate) level: String,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    Text,
    /// One JSON object per line.
    Json,
}

impl Config {
    /// Validates everything that does not require allocating memory, devices or ports.
    ///
    /// # Errors
    /// `ErrorKind::Config` with the field, its value and the allowed values.
    pub(crate) fn validate(&self) -> Result<Settings, AgentError> {
        let LimitsSection { load_deadline, load_hold, reservation, read_bytes } = &self.limits;
        let second = Duration::from_secs(1);
        within("writeback.delay", self.writeback.delay.0, Duration::from_millis(1)..=10 * second)?;
        within("writeback.slack_delay", self.writeback.slack_delay.0, Duration::ZERO..=60 * second)?;
        within("limits.load_deadline", load_deadline.0, Duration::from_millis(1)..=LOAD_DEADLINE_MAX)?;
        within("limits.load_hold", load_hold.0, second..=86_400 * second)?;
        within("limits.reservation", reservation.0, second..=86_400 * second)?;
        within(
            "controlplane.lookup_timeout",
            self.controlplane.lookup_timeout.0,
            Duration::from_millis(1)..=60 * second,
        )?;
        size("writeback.bytes", self.writeback.bytes.0, (1 << 20, 4 << 30, 1))?;
        size("limits.read_bytes", read_bytes.0, (PAGE_BYTES, BLOCK_BYTES_MAX, PAGE_BYTES))?;
        Ok(Settings {
            node: self.node.validate()?,
            session: self.session.validate(self.validate_users()?)?,
            arena: self.arena.validate()?,
            pool: self.pool.validate(&self.session)?,
            cache: self.cache.validate()?,
            tenants: self.validate_tenants()?,
            public_tenant: self.validate_public_tenant()?,
            writeback_delay: self.writeback.delay.0,
            writeback_bytes: self.writeback.bytes.0,
            slack_delay: self.writeback.slack_delay.0,
            slack_profiles: self.slack.validate()?,
            load_deadline: load_deadline.0,
            load_hold: load_hold.0,
            reservation: reservation.0,
            read_bytes: read_bytes.0,
            lookup_timeout: self.controlplane.lookup_timeout.0,
            peers: self.peers.validate()?,
            controlplane: control_plane(&self.controlplane.address)?,
            placement: self.placement.validate()?,
            prefetch: self.prefetch.validate()?,
            retention: self.retention.validate()?,
            admin: address("admin.listen", &self.admin.listen)?,
            admin_token_file: self.admin.token_file.clone(),
            admin_trace: self.admin.trace,
            tls: self.tls.clone(),
            kubernetes: self.kubernetes.validate()?,
            log: self.log.validate()?,
            encryption: self.validate_encryption()?,
        })
    }
}

impl NodeSection {
    fn validate(&self) -> Result<NodeSettings, AgentError> {
        let name = if self.name.is_empty() { host_name()? } else { self.name.clone() };
        label("node.name", &name)?;
        if !self.failure_domain.is_empty() {
            label("node.failure_domain", &self.failure_domain)?;
        }
        Ok(NodeSettings { name, failure_domain: self.failure_domain.clone() })
    }
}

impl SessionSection {
    fn validate(&self, users: TenantUsers) -> Result<SessionSettings, AgentError> {
        let mode = u32::from_str_radix(&self.mode, 8)
            .ok()
            .filter(|mode| *mode <= 0o777 && mode & 0o600 == 0o600)
            .ok_or_else(|| {
                refuse("session.mode", &self.mode, "octal mode bits, 0600 to 0777, with 6 or 7 for the owner")
            })?;
        let path = self.socket.as_os_str();
        if path.is_empty() || path.len() > SOCKET_PATH_BYTES_MAX || self.socket.file_name().is_none() {
            let allowed = format!("a path of 1 to {SOCKET_PATH_BYTES_MAX} bytes (the limit of unix sockets)");
            return Err(refuse("session.socket", &self.socket.display().to_string(), &allowed));
        }
        if self.allow_uids.len() > ALLOW_UIDS_MAX {
            let found = format!("{} users", self.allow_uids.len());
            return Err(refuse("session.allow_uids", &found, &format!("at most {ALLOW_UIDS_MAX}")));
        }
        let allow_uids = (!self.allow_uids.is_empty()).then(|| self.allow_uids.clone());
        let queue_grants = self.queue_grants()?;
        let salts = (!self.salts.as_os_str().is_empty()).then(|| self.salts.clone());
        Ok(SessionSettings { socket: self.socket.clone(), mode, allow_uids, users, salts, queue_grants })
    }

    fn queue_grants(&self) -> Result<QueueGrantLimits, AgentError> {
        let (pairs, each, depth) = (self.queue_pairs, self.queue_pairs_per_session, self.queue_depth);
        if pairs > QUEUE_PAIRS_MAX || (pairs > 0 && !self.extents) {
            let allowed = format!("at most {QUEUE_PAIRS_MAX}, and 0 unless session.extents is true");
            return Err(refuse("session.queue_pairs", &pairs.to_string(), &allowed));
        }
        if !(1..=PAIRS_PER_GRANT_MAX).contains(&each) {
            let allowed = format!("1 to {PAIRS_PER_GRANT_MAX}");
            return Err(refuse("session.queue_pairs_per_session", &each.to_string(), &allowed));
        }
        if !(2..=SESSION_QUEUE_DEPTH_MAX).contains(&depth) {
            let allowed = format!("2 to {SESSION_QUEUE_DEPTH_MAX}");
            return Err(refuse("session.queue_depth", &depth.to_string(), &allowed));
        }
        Ok(QueueGrantLimits { pairs_per_device: pairs, pairs_per_session: each, depth })
    }
}

impl ArenaSection {
    fn validate(&self) -> Result<ArenaSettings, AgentError> {
        let (bytes, region_bytes) = (self.bytes.0, self.region_bytes.0);
        size("arena.region_bytes", region_bytes, (HUGE_PAGE_BYTES, REGION_BYTES_MAX, HUGE_PAGE_BYTES))?;
        size("arena.bytes", bytes, (region_bytes, 1 << 46, HUGE_PAGE_BYTES))?;
        let regions = bytes.div_ceil(region_bytes);
        if regions > REGIONS_MAX as u64 {
            let found = format!("{regions} regions");
            return Err(refuse(
                "arena.region_bytes",
                &found,
                &format!("at most {REGIONS_MAX}: use larger regions"),
            ));
        }
        Ok(ArenaSettings { bytes, region_bytes, huge_pages: self.huge_pages })
    }
}

impl CacheSection {
    fn validate(&self) -> Result<CacheSettings, AgentError> {
        let CacheSection {
            eviction,
            skip_dram,
            pool_free_permille,
            arena_unsaved_permille,
            arena_session_permille,
            arena_serves_permille,
        } = *self;
        permille("cache.pool_free_permille", pool_free_permille, 0..=900)?;
        permille("cache.arena_unsaved_permille", arena_unsaved_permille, 1..=1000)?;
        permille("cache.arena_session_permille", arena_session_permille, 1..=1000)?;
        permille("cache.arena_serves_permille", arena_serves_permille, 1..=1000)?;
        Ok(CacheSettings {
            eviction,
            skip_dram,
            pool_free_permille,
            arena_unsaved_permille,
            arena_session_permille,
            arena_serves_permille,
        })
    }
}

impl SlackSection {
    fn validate(&self) -> Result<Vec<PathBuf>, AgentError> {
        if self.profiles.len() > SLACK_PROFILES_MAX {
            let found = format!("{} files", self.profiles.len());
            return Err(refuse("slack.profiles", &found, &format!("at most {SLACK_PROFILES_MAX}")));
        }
        Ok(self.profiles.clone())
    }
}

impl PeersSection {
    fn validate(&self) -> Result<Option<PeerSettings>, AgentError> {
        size("peers.credit_bytes", self.credit_bytes.0, (1 << 20, 16 << 30, 1))?;
        within(
            "peers.stall_timeout",
            self.stall_timeout.0,
            Duration::from_millis(50)..=Duration::from_secs(60),
        )?;
        if self.listen.is_empty() {
            return Ok(None);
        }
        let listen = address("peers.listen", &self.listen)?;
        if !self.advertise.is_empty() {
            host_and_port("peers.advertise", &self.advertise)?;
        } else if listen.ip().is_unspecified() {
            let allowed =
                "the host:port at which other nodes reach this one, because peers.listen is a wildcard";
            return Err(refuse("peers.advertise", "", allowed));
        }
        Ok(Some(PeerSettings {
            listen,
            advertise: (!self.advertise.is_empty()).then(|| self.advertise.clone()),
            credit_bytes: self.credit_bytes.0,
            stall_timeout: self.stall_timeout.0,
        }))
    }
}

impl LogSection {
    fn validate(&self) -> Result<LogSettings, AgentError> {
        self.level.parse::<tracing_subscriber::EnvFilter>().map_err(|error| {
            refuse("log.level", &self.level, "a level (error, warn, info, debug, trace) or a tracing filter")
                .with_source(error)
        })?;
        Ok(LogSettings { format: self.format, level: self.level.clone() })
    }
}

/// Returns the control plane's endpoints, if any.
fn control_plane(addresses: &Addresses) -> Result<Option<ControlPlaneSettings>, AgentError> {
    let addresses = match addresses {
        Addresses::Single(address) if address.is_empty() => &[],
        Addresses::Single(address) => std::slice::from_ref(address),
        Addresses::List(addresses) => addresses.as_slice(),
    };
    let endpoint = |address: &String| {
        let bare = address.strip_prefix("http://").unwrap_or(address);
        host_and_port("controlplane.address", bare)?;
        Ok(format!("http://{bare}"))
    };
    let endpoints = addresses.iter().map(endpoint).collect::<Result<Vec<String>, AgentError>>()?;
    Ok((!endpoints.is_empty()).then_some(ControlPlaneSettings { endpoints }))
}

/// Formats the error for an invalid setting.
pub(super) fn refuse(field: &str, found: &str, allowed: &str) -> AgentError {
    AgentError::new(ErrorKind::Config, format!("invalid {field} = '{found}': expected {allowed}"))
}

/// Checks a size in bytes. `limits`: minimum, maximum, unit.
pub(super) fn size(field: &str, found: u64, limits: (u64, u64, u64)) -> Result<(), AgentError> {
    let (least, most, unit) = limits;
    if (least..=most).contains(&found) && found.is_multiple_of(unit) {
        return Ok(());
    }
    let [found, least, most, unit_text] =
        [found, least, most, unit].map(|bytes| reprise_policy::ByteSize(bytes).to_string());
    let multiple = if unit > 1 { format!(", a multiple of {unit_text}") } else { String::new() };
    Err(refuse(field, &found, &format!("{least} to {most}{multiple}")))
}

pub(super) fn within(
    field: &str,
    found: Duration,
    allowed: std::ops::RangeInclusive<Duration>,
) -> Result<(), AgentError> {
    if allowed.contains(&found) {
        return Ok(());
    }
    Err(refuse(field, &format!("{found:?}"), &format!("{:?} to {:?}", allowed.start(), allowed.end())))
}

pub(super) fn permille(
    field: &str,
    found: u16,
    allowed: std::ops::RangeInclusive<u16>,
) -> Result<(), AgentError> {
    if allowed.contains(&found) {
        return Ok(());
    }
    let allowed = format!("{} to {} thousandths", allowed.start(), allowed.end());
    Err(refuse(field, &found.to_string(), &allowed))
}

/// Names are used as metric labels and in dashboard URLs.
fn label(field: &str, text: &str) -> Result<(), AgentError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !text.is_empty() && text.len() <= NAME_BYTES_MAX && text.chars().all(fits) {
        return Ok(());
    }
    Err(refuse(field, text, &format!("1 to {NAME_BYTES_MAX} letters, digits, '-', '_' or '.'")))
}

fn address(field: &str, text: &str) -> Result<SocketAddr, AgentError> {
    let allowed = "an address to listen on, for example 127.0.0.1:7410 or [::]:7410";
    let mut found =
        text.to_socket_addrs().map_err(|error| refuse(field, text, allowed).with_source(error))?;
    found.next().ok_or_else(|| refuse(field, text, allowed))
}

/// The name is resolved when it is used, as the other side may start later.
fn host_and_port(field: &str, text: &str) -> Result<(), AgentError> {
    let fits = text.rsplit_once(':').is_some_and(|(host, port)| {
        let is_ipv6 = host.starts_with('[') && host.ends_with(']');
        let is_name = !host.is_empty() && !host.contains(['/', ':']);
        (is_ipv6 || is_name) && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if fits { Ok(()) } else { Err(refuse(field, text, "host:port")) }
}

/// The host name is in a file, so no C call is needed.
fn host_name() -> Result<String, AgentError> {
    let path = Path::new("/proc/sys/kernel/hostname");
    let name = std::fs::read_to_string(path).map_err(|error| {
        refuse("node.name", "", "a name, because the host name cannot be read").with_source(error)
    })?;
    Ok(name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use reprise_policy::eviction::{Chains, EvictionKind};

    use super::*;

    fn refused(text: &str) -> String {
        Config::parse(text).expect("parses").validate().expect_err("refused").chain()
    }

    #[test]
    fn error_states_field_value_and_allowed_values() {
        for (text, words) in [
            (
                "[arena]\nbytes = \"1GiB\"\nregion_bytes = \"3MiB\"",
                ["arena.region_bytes", "3MiB", "multiple of 2MiB"],
            ),
            ("[arena]\nbytes = \"1001MiB\"", ["arena.bytes", "1001MiB", "multiple of 2MiB"]),
            ("[session]\nmode = \"0999\"", ["session.mode", "0999", "octal"]),
            ("[session]\nmode = \"0070\"", ["session.mode", "0070", "owner"]),
            ("[pool]\nqueue_depth = 0", ["pool.queue_depth", "0", "1024"]),
            ("[[pool.devices]]\npath = \"/x\"\nbytes = \"5000\"", ["pool.devices.bytes", "5000", "1MiB"]),
            ("[[pool.devices]]\npci = \"3b:00.0\"", ["pool.devices.pci", "3b:00.0", "0000:3b:00.0"]),
            (
                "[[pool.devices]]\npath = \"/x\"\npci = \"0000:3b:00.0\"",
                ["pool.devices.pci", "0000:3b:00.0", "one of path, pci and emulated"],
            ),
            (
                "[[pool.devices]]\npath = \"/x\"\nemulated = \"/y\"",
                ["pool.devices.emulated", "/y", "one of path, pci and emulated"],
            ),
            (
                "[[pool.devices]]\npath = \"/x\"\nserial = \"S1\"",
                ["pool.devices.serial", "S1", "without pool.devices.pci"],
            ),
            (
                "[[pool.devices]]\npci = \"0000:3b:00.0\"\nserial = \"0123456789012345678901\"",
                ["pool.devices.serial", "0123456789012345678901", "20 ASCII"],
            ),
            (
                "[[pool.devices]]\nemulated = \"/x\"\n[[pool.devices]]\npath = \"/x\"",
                ["pool.devices.path", "/x", "each device once"],
            ),
            ("[[pool.devices]]\nbytes = \"1GiB\"", ["pool.devices.path", "''", "file or block device"]),
            (
                "[[pool.devices]]\npci = \"0000:AF:00.0\"\n[[pool.devices]]\npci = \"0000:af:00.0\"",
                ["pool.devices.pci", "pci:0000:af:00.0", "once"],
            ),
            ("[cache]\npool_free_permille = 1000", ["cache.pool_free_permille", "1000", "0 to 900"]),
            ("[cache]\narena_serves_permille = 0", ["cache.arena_serves_permille", "0", "thousandths"]),
            ("[limits]\nreservation = \"5ms\"", ["limits.reservation", "5ms", "1s"]),
            ("[writeback]\ndelay = \"1m\"", ["writeback.delay", "60s", "10s"]),
            ("[writeback]\nslack_delay = \"2m\"", ["writeback.slack_delay", "120s", "60s"]),
            ("[peers]\nlisten = \"0.0.0.0:0\"", ["peers.advertise", "", "wildcard"]),
            (
                "[controlplane]\naddress = \"https://x:1\"",
                ["controlplane.address", "https://x:1", "host:port"],
            ),
            ("[controlplane]\naddress = [\"x:1\", \"\"]", ["controlplane.address", "''", "host:port"]),
            ("[admin]\nlisten = \"nowhere\"", ["admin.listen", "nowhere", "127.0.0.1"]),
            ("[node]\nname = \"a b\"", ["node.name", "a b", "letters"]),
            ("[log]\nlevel = \"a=b=c\"", ["log.level", "a=b=c", "tracing filter"]),
        ] {
            let error = refused(text);
            assert!(words.iter().all(|word| error.contains(word)), "{text:?} gave: {error}");
        }
    }

    #[test]
    fn eviction_order_is_chosen_by_name_and_unknown_ones_are_rejected() {
        let text = "[cache]\neviction = { kind = \"lfu\", chains = \"ignored\" }\npool_free_permille = 100\n\
                    [pool]\neviction = { kind = \"s3_fifo\" }\n";
        let settings = Config::parse(text).expect("parses").validate().expect("valid");
        assert_eq!(
            (settings.cache.eviction, settings.cache.pool_free_permille),
            (EvictionPolicy { kind: EvictionKind::Lfu, chains: Chains::Ignored }, 100)
        );
        assert_eq!(settings.pool.eviction, EvictionKind::S3Fifo.into());
        for section in ["cache", "pool"] {
            let text = format!("[{section}]\neviction = {{ kind = \"random\" }}");
            let error = Config::parse(&text).expect_err("unknown policy").to_string();
            assert!(error.contains("random"), "{error}");
            assert!(EvictionKind::ALL.iter().all(|kind| error.contains(kind.name())), "{error}");
        }
    }

    #[test]
    fn duplicate_device_is_rejected() {
        let device = "[[pool.devices]]\npath = \"/x\"\nbytes = \"64MiB\"\n";
        assert!(refused(&format!("{device}{device}")).contains("each device once"));
    }

    #[test]
    fn too_long_socket_path_is_rejected() {
        let long = "x".repeat(120);
        assert!(refused(&format!("[session]\nsocket = \"/tmp/{long}\"")).contains("103 bytes"));
    }
}
