//! The control plane's configuration: a TOML file, parsed once into types with units; unknown fields are errors.

use std::net::SocketAddr;
use std::time::Duration;

use reprise_controlplane_store::TimeToLive;
use reprise_policy::Interval;
use reprise_policy::shards::MemberName;
use serde::Deserialize;

mod events;
mod store;

pub use events::EventsConfig;
pub use store::{EtcdConfig, EtcdTlsConfig, EtcdUserConfig, StoreConfig};

/// What `--print-default-config` prints. A test holds it equal to [`Config::default`].
pub const DEFAULT_CONFIG: &str = include_str!("default.toml");

/// Beats shorter than this would be a busy loop of every agent.
const HEARTBEAT_MIN: Duration = Duration::from_millis(10);
/// A node may miss one beat without dying.
const BEATS_BEFORE_DEATH_MIN: u32 = 2;
/// No interval is longer: sums of them stay far from what a clock can hold.
const INTERVAL_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Calls at once, at the most: each holds up to 136 KiB of message, those at work up to 512 KiB of answer.
const CALLS_AT_ONCE_MAX: usize = 65_536;
/// Streams at once, at the most; one for each node of a large cluster and some.
const WATCHERS_LIMIT_MAX: usize = 65_536;

/// The whole file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address of the gRPC services; port 0 takes a free one (the ready line names it).
    pub listen: SocketAddr,
    /// Address of the admin endpoint.
    pub admin: SocketAddr,
    /// Where node numbers and epochs are kept.
    pub store: StoreConfig,
    /// This process among the members that share the store.
    pub member: MemberConfig,
    /// When silent nodes die.
    pub membership: MembershipConfig,
    /// The stream of changes, and its publisher.
    pub events: EventsConfig,
    /// Bounds.
    pub limits: LimitsConfig,
    /// The log on standard error.
    pub log: LogConfig,
}

/// `[member]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemberConfig {
    /// Its name, unique among the members; without one, its address.
    pub name: Option<String>,
    /// `host:port` at which others reach its gRPC services; without one, where it listens.
    pub advertise: Option<String>,
    /// Silence after which the others count it as gone.
    pub time_to_live: Interval,
}

/// `[membership]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MembershipConfig {
    /// How often agents shall beat.
    pub heartbeat_every: Interval,
    /// Silence after which a node is not offered.
    pub dead_after: Interval,
    /// Silence after which a node must register again and announce everything.
    pub forget_after: Interval,
}

/// `[limits]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Directory calls held at once, working or waiting; more are told to come again.
    pub calls_at_once: usize,
    /// Watch streams at once; more are refused.
    pub watchers: usize,
}

/// `[log]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// For people or for machines.
    pub format: LogFormat,
    /// A `tracing` filter: `info`, or for example `info,reprise_controlplane=debug`.
    pub level: String,
}

/// Formats of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// One readable line an event.
    Text,
    /// One JSON object an event.
    Json,
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not TOML, unknown field, wrong type or unit; the source says where.
    #[error("configuration cannot be read")]
    Parse(#[from] toml::de::Error),
    /// A value that cannot work.
    #[error("{field}: {reason}")]
    Value {
        /// Where.
        field: &'static str,
        /// What to write instead.
        reason: String,
    },
}

impl Config {
    /// Parses and checks a configuration; what is not said has its default.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        let config: Config = toml::from_str(text)?;
        config.check()?;
        Ok(config)
    }

    /// Refuses what cannot work, with words.
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
        if dead_after.0 < heartbeat_every.0 * BEATS_BEFORE_DEATH_MIN {
            return refuse(
                "membership.dead_after",
                format!("at least {BEATS_BEFORE_DEATH_MIN} times heartbeat_every ({heartbeat_every})"),
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
            store: StoreConfig::default(),
            member: MemberConfig::default(),
            membership: MembershipConfig::default(),
            events: EventsConfig::default(),
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
                return refuse("member.advertise", "write host:port, as agents reach this member".to_owned());
            }
            None if listen.ip().is_unspecified() && matches!(store, StoreConfig::Etcd(_)) => {
                let reason = "say how agents and other members reach this one, as host:port".to_owned();
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
    /// Two seconds are what etcd grants at the least with its default election timeout (1.5 of it, in whole seconds).
    fn default() -> MemberConfig {
        MemberConfig { name: None, advertise: None, time_to_live: Interval(Duration::from_secs(2)) }
    }
}

impl Default for MembershipConfig {
    /// Six beats before death keep it within two seconds (DESIGN §7). After 8 s, four leases of members, nobody knows any more
    /// what a node has done meanwhile: who was paused for 10 s is fenced, and announces 17 bytes a block anew.
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
    fn the_printed_default_is_the_default() {
        assert_eq!(Config::parse(DEFAULT_CONFIG).expect("valid"), Config::default());
        assert_eq!(Config::parse("").expect("valid"), Config::default());
    }

    #[test]
    fn what_cannot_work_is_refused_with_its_field() {
        for (text, words) in [
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
            let refused = Config::parse(text).expect_err(text);
            let mut told = refused.to_string();
            if let Some(source) = std::error::Error::source(&refused) {
                told = format!("{told}: {source}");
            }
            assert!(told.contains(words), "{text}: {told}");
        }
    }
}
