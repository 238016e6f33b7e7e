//! Configuration of the control plane: a TOML file parsed into types with units. Unknown fields are errors.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use reprise_controlplane_store::TimeToLive;
use reprise_identity::TlsSettings;
use reprise_policy::Interval;
use reprise_policy::shards::MemberName;
use serde::Deserialize;

mod events;
mod store;

pub use events::EventsConfig;
pub use store::{EtcdConfig, EtcdTlsConfig, EtcdUserConfig, StoreConfig};

/// The text that `--print-default-config` prints; equal to [`Config::default`] (tested).
pub const DEFAULT_CONFIG: &str = include_str!("default.toml");

/// Shortest heartbeat interval; a shorter one would keep every agent busy with heartbeats.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
/// Minimum ratio of `dead_after` to `heartbeat_every`, so that one lost heartbeat does not make a node dead.
const HEARTBEATS_BEFORE_DEATH_MIN: u32 = 2;
/// Longest interval; keeps sums of intervals within the range of the clock.
const INTERVAL_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Upper bound of `limits.calls_at_once`. A call holds up to 136 KiB of request and 512 KiB of reply.
const CALLS_AT_ONCE_MAX: usize = 65_536;
/// Upper bound of `limits.watchers`; exceeds one stream for each node of a large cluster.
const WATCHERS_LIMIT_MAX: usize = 65_536;

/// Contents of the configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address of the gRPC services; with port 0 the system chooses a port, which the ready line reports.
    pub listen: SocketAddr,
    /// Address of the admin endpoint.
    pub admin: SocketAddr,
    /// File with a bearer token that may read `/metrics` without a client certificate.
    pub admin_token_file: Option<PathBuf>,
    /// Where node numbers and epochs are stored.
    pub store: StoreConfig,
    /// This process among the members that share the store.
    pub member: MemberConfig,
    /// Heartbeats, and how long a node may be silent.
    pub membership: MembershipConfig,
    /// History of directory changes, and the KV-event publisher.
    pub events: EventsConfig,
    /// Certificates of connections to agents, other members and administrators.
    pub tls: TlsSettings,
    /// Limits on concurrent calls and streams.
    pub limits: LimitsConfig,
    /// The log on standard error.
    pub log: LogConfig,
}

/// Settings of the table `[member]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemberConfig {
    /// Unique name of this member; the default is its advertised address.
    pub name: Option<String>,
    /// `host:port` at which others reach the gRPC services; the default is the listen address.
    pub advertise: Option<String>,
    /// Silence after which the other members remove this one; a lease's time to live.
    pub time_to_live: Interval,
}

/// Settings of the table `[membership]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MembershipConfig {
    /// Interval between an agent's heartbeats.
    pub heartbeat_every: Interval,
    /// Silence after which a node is no longer offered to others.
    pub dead_after: Interval,
    /// Silence after which a node must register again and announce its whole inventory.
    pub forget_after: Interval,
}

/// Settings of the table `[limits]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Maximum number of directory calls, running or queued; further ones fail with a retryable status.
    pub calls_at_once: usize,
    /// Maximum number of watch streams; further ones are rejected.
    pub watchers: usize,
}

/// Settings of the table `[log]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// Format of a log line.
    pub format: LogFormat,
    /// A `tracing` filter: `info`, or for example `info,reprise_controlplane=debug`.
    pub level: String,
}

/// Formats of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// One readable line per event.
    Text,
    /// One JSON object per event.
    Json,
}

/// Reasons to reject a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Invalid TOML, unknown field, wrong type or unit; the source names the place.
    #[error("cannot parse the configuration")]
    Parse(#[from] toml::de::Error),
    /// A value outside its valid range.
    #[error("{field}: {reason}")]
    Value {
        /// Name of the field, `table.key`.
        field: &'static str,
        /// Valid values, or the field to set.
        reason: String,
    },
}

impl Config {
    /// Parses and validates a configuration; omitted fields take their defaults.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        let config: Config = toml::from_str(text)?;
        config.check()?;
        Ok(config)
    }

    /// Checks ranges and dependencies between fields.
    pub fn check(&self) -> Result<(), ConfigError> {
        let refuse = |field, reason: String| Err(ConfigError::Value { field, reason });
        let MembershipConfig { heartbeat_every, dead_after, forget_after } = self.membership;
        for (field, interval) in [
            ("membership.heartbeat_every", heartbeat_every),
            ("membership.dead_after", dead_after),
            ("membership.forget_after", forget_after),
        ] {
            if interval.0 > INTERVAL_MAX {
                return refuse(field, format!("at most {}", Interval(INTERVAL_MAX)));
            }
        }
        if heartbeat_every.0 < HEARTBEAT_MIN {
            return refuse("membership.heartbeat_every", format!("at least {}", Interval(HEARTBEAT_MIN)));
        }
        if dead_after.0 < heartbeat_every.0 * HEARTBEATS_BEFORE_DEATH_MIN {
            return refuse(
                "membership.dead_after",
                format!("at least {HEARTBEATS_BEFORE_DEATH_MIN} times heartbeat_every ({heartbeat_every})"),
            );
        }
        if forget_after.0 < dead_after.0 {
            return refuse("membership.forget_after", format!("at least dead_after ({dead_after})"));
        }
        self.store.check()?;
        self.member.check(self.listen, &self.store)?;
        self.events.check()?;
        if !(1..=CALLS_AT_ONCE_MAX).contains(&self.limits.calls_at_once) {
            return refuse("limits.calls_at_once", format!("1 to {CALLS_AT_ONCE_MAX}"));
        }
        if !(1..=WATCHERS_LIMIT_MAX).contains(&self.limits.watchers) {
            return refuse("limits.watchers", format!("1 to {WATCHERS_LIMIT_MAX}"));
        }
        Ok(())
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: SocketAddr::from(([127, 0, 0, 1], 7400)),
            admin: SocketAddr::from(([127, 0, 0, 1], 7401)),
            admin_token_file: None,
            store: StoreConfig::default(),
            member: MemberConfig::default(),
            membership: MembershipConfig::default(),
            events: EventsConfig::default(),
            tls: TlsSettings::default(),
            limits: LimitsConfig::default(),
            log: LogConfig::default(),
        }
    }
}

impl MemberConfig {
    fn check(&self, listen: SocketAddr, store: &StoreConfig) -> Result<(), ConfigError> {
        let refuse = |field, reason: String| Err(ConfigError::Value { field, reason });
        if let Some(Err(error)) = self.name.as_deref().map(MemberName::new) {
            return refuse("member.name", error.to_string());
        }
        let has_port = |text: &str| {
            text.rsplit_once(':').is_some_and(|(host, port)| {
                !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
            })
        };
        match &self.advertise {
            Some(address) if !has_port(address) || MemberName::new(address).is_err() => {
                return refuse(
                    "member.advertise",
                    "expected host:port at which agents reach this member".to_owned(),
                );
            }
            None if listen.ip().is_unspecified() && matches!(store, StoreConfig::Etcd(_)) => {
                let reason = "required because listen has no specific address: set host:port of this member"
                    .to_owned();
                return refuse("member.advertise", reason);
            }
            _ => {}
        }
        match TimeToLive::new(self.time_to_live.0) {
            Ok(_) => Ok(()),
            Err(error) => refuse("member.time_to_live", error.to_string()),
        }
    }
}

impl Default for MemberConfig {
    /// 2 s is the shortest lease that etcd grants with its default election timeout (1.5 times, in whole
    /// seconds).
    fn default() -> MemberConfig {
        MemberConfig { name: None, advertise: None, time_to_live: Interval(Duration::from_secs(2)) }
    }
}

impl Default for MembershipConfig {
    /// Six heartbeats fit in `dead_after`, so a dead node is detected within 2 s (DESIGN §7). 8 s is four
    /// member leases: after that no member can know what a silent node did. A node paused for 10 s is fenced
    /// and announces its inventory again, 17 bytes a block.
    fn default() -> MembershipConfig {
        MembershipConfig {
            heartbeat_every: Interval(Duration::from_millis(250)),
            dead_after: Interval(Duration::from_millis(1500)),
            forget_after: Interval(Duration::from_secs(8)),
        }
    }
}

impl Default for LimitsConfig {
    fn default() -> LimitsConfig {
        LimitsConfig { calls_at_once: 1024, watchers: 4096 }
    }
}

impl Default for LogConfig {
    fn default() -> LogConfig {
        LogConfig { format: LogFormat::Text, level: "info".to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_default_parses_to_the_default() {
        assert_eq!(Config::parse(DEFAULT_CONFIG).expect("valid"), Config::default());
        assert_eq!(Config::parse("").expect("valid"), Config::default());
    }

    #[test]
    fn rejects_invalid_values_and_names_their_field() {
        for (text, expected) in [
            ("lisen = '127.0.0.1:1'", "lisen"),
            ("[store]\nkind = 'embedded'\npath = 'x'\npaht = 'y'", "paht"),
            ("[store]\nkind = 'consul'", "memory"),
            ("[store]\nkind = 'embedded'", "path"),
            ("[store]\nkind = 'memory'\npath = 'x'", "path"),
            ("[store]\nkind = 'etcd'", "endpoints"),
            ("[store]\nkind = 'etcd'\nendpoints = []", "store.endpoints"),
            ("[store]\nkind = 'etcd'\nendpoints = ['http://a:1']\nprefix = 'x'", "store.prefix"),
            ("[store]\nkind = 'etcd'\nendpoints = ['a:1']", "write it as http://host:port"),
            ("[store]\nkind = 'etcd'\nendpoints = ['https://a:1']", "add [store.tls] with ca_file"),
            (
                "[store]\nkind = 'etcd'\nendpoints = ['http://a:1']\n[store.tls]\nca_file = 'x'",
                "write it as https://host:port",
            ),
            ("[store]\nkind = 'etcd'\nendpoints = ['https://a:1']\n[store.tls]", "ca_file"),
            ("[store]\nkind = 'etcd'\nendpoints = ['a']\n[store.user]\nname = 'x'", "password_file"),
            ("[store]\nkind = 'etcd'\nendpoints = ['a']\n[store.user]\npassword = 'x'", "password"),
            (
                "[store]\nkind = 'etcd'\nendpoints = ['https://a:1']\n[store.tls]\nca_file = 'x'\nkey_file = 'y'",
                "store.tls.cert_file",
            ),
            (
                "[store]\nkind = 'etcd'\nendpoints = ['https://a:1']\n[store.tls]\nca_file = 'x'\ncert_file = 'y'",
                "store.tls.key_file",
            ),
            ("[membership]\nheartbeat_every = '250'", "50ms"),
            ("[membership]\nheartbeat_every = '1ms'", "membership.heartbeat_every"),
            ("[membership]\ndead_after = '300ms'", "membership.dead_after"),
            ("[membership]\nforget_after = '1s'", "membership.forget_after"),
            ("[membership]\nheartbeat_every = '500000000000years'", "membership.heartbeat_every"),
            ("[member]\nname = 'a b'", "member.name"),
            ("[member]\nadvertise = 'host'", "member.advertise"),
            ("[member]\ntime_to_live = '500ms'", "member.time_to_live"),
            ("listen = '0.0.0.0:1'\n[store]\nkind = 'etcd'\nendpoints = ['http://a:1']", "member.advertise"),
            ("[events]\nhistory = '1KiB'", "events.history"),
            ("[events]\npublish = '127.0.0.1:1'\nbuffer_steps = 0", "events.buffer_steps"),
            ("[events]\nreplay = '127.0.0.1:1'", "events.replay"),
            ("[limits]\ncalls_at_once = 0", "limits.calls_at_once"),
            ("[limits]\nwatchers = 0", "limits.watchers"),
            ("listen = 'localhost'", "listen"),
        ] {
            let rejected = Config::parse(text).expect_err(text);
            let mut message = rejected.to_string();
            if let Some(source) = std::error::Error::source(&rejected) {
                message = format!("{message}: {source}");
            }
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
