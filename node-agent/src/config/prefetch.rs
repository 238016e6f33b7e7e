//! Limits of reads ahead of loads, and of retention pins.

use std::time::Duration;

use reprise_agent_core::PrefetchSettings;
use reprise_agent_core::limits::LOOKAHEAD_SESSION_KEYS_MAX;
use reprise_policy::Interval;
use reprise_policy::block_command::RETENTION_TTL_MAX;
use reprise_policy::prefetch::{WINDOW_MAX, WINDOW_MIN};
use serde::Deserialize;

use super::defaults;
use super::settings::{permille, refuse, within};
use crate::error::AgentError;

/// Minimum of `session_keys`: a request of 4,096 tokens in blocks of 16.
const SESSION_KEYS_MIN: u32 = 256;

/// Maximum of `blocks_per_tenant`: 13 MiB with each pin of 200 bytes, times 16.
const BLOCKS_PER_TENANT_MAX: u32 = 1 << 20;

/// Maximum of `permille` of retention pins: the rest remains for the tenant's loads and saves.
const RETENTION_PERMILLE_MAX: u16 = 500;

/// Limits of reads ahead, as written.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PrefetchSection {
    pub(crate) arena_permille: u16,
    pub(crate) session_permille: u16,
    pub(crate) session_keys: u32,
    pub(crate) window: u32,
    pub(crate) high_water_permille: u16,
    pub(crate) staged: Interval,
    pub(crate) listed: Interval,
}

/// Limits of retention pins, as written.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RetentionSection {
    pub(crate) permille: u16,
    pub(crate) blocks_per_tenant: u32,
    pub(crate) ttl_max: Interval,
}

/// Validated limits of retention pins.
#[derive(Clone, Debug)]
pub(crate) struct RetentionSettings {
    pub(crate) permille: u16,
    pub(crate) blocks_per_tenant: u32,
    pub(crate) ttl_max: Duration,
}

impl Default for PrefetchSection {
    fn default() -> Self {
        PrefetchSection {
            arena_permille: defaults::PREFETCH_ARENA_PERMILLE,
            session_permille: defaults::PREFETCH_SESSION_PERMILLE,
            session_keys: defaults::PREFETCH_SESSION_KEYS,
            window: defaults::PREFETCH_WINDOW,
            high_water_permille: defaults::PREFETCH_HIGH_WATER_PERMILLE,
            staged: defaults::PREFETCH_STAGED,
            listed: defaults::PREFETCH_LISTED,
        }
    }
}

impl Default for RetentionSection {
    fn default() -> Self {
        RetentionSection {
            permille: defaults::RETENTION_PERMILLE,
            blocks_per_tenant: defaults::RETENTION_BLOCKS_PER_TENANT,
            ttl_max: defaults::RETENTION_TTL_MAX,
        }
    }
}

impl PrefetchSection {
    /// Returns both sections of the default configuration.
    pub(super) fn default_text(&self, retention: &RetentionSection) -> String {
        format!(
            r#"[prefetch]                 # blocks that are read from devices ahead of their load, on hints of engines
arena_permille = {prefetch_share}       # share of the arena, and of each tenant's memory limit, for these blocks
session_permille = {prefetch_session}     # share of that for one session
session_keys = {prefetch_keys}       # maximum keys of the requests that a session lists
window = {prefetch_window}                # maximum iterations to look ahead
high_water_permille = {high_water}  # share of a device's bandwidth that reads ahead may fill in one iteration
staged = "{staged}"             # blocks whose request does not run within this time are released
listed = "{listed}"           # a request that an engine lists for longer expires

[retention]                # blocks that commands pin for a limited time
permille = {retention_share}             # share of what a tenant can have in memory and on devices that its pins may keep
blocks_per_tenant = {retention_blocks}  # maximum pinned blocks of a tenant
ttl_max = "{ttl_max}"        # longest time of a pin
"#,
            prefetch_share = self.arena_permille,
            prefetch_session = self.session_permille,
            prefetch_keys = self.session_keys,
            prefetch_window = self.window,
            high_water = self.high_water_permille,
            staged = self.staged,
            listed = self.listed,
            retention_share = retention.permille,
            retention_blocks = retention.blocks_per_tenant,
            ttl_max = retention.ttl_max,
        )
    }

    pub(super) fn validate(&self) -> Result<PrefetchSettings, AgentError> {
        let PrefetchSection {
            arena_permille,
            session_permille,
            session_keys,
            window,
            high_water_permille,
            staged,
            listed,
        } = *self;
        // A budget of zero would ignore all hints: engines that send none cost nothing.
        let budget = |field: &str, found: u16, most: u16| match found {
            0 => Err(refuse(
                field,
                "0",
                &format!(
                    "1 to {most} thousandths: to read nothing ahead, turn off `lookahead` in the engines"
                ),
            )),
            _ => permille(field, found, 1..=most),
        };
        budget("prefetch.arena_permille", arena_permille, 900)?;
        budget("prefetch.session_permille", session_permille, 1000)?;
        budget("prefetch.high_water_permille", high_water_permille, 1000)?;
        let keys = SESSION_KEYS_MIN..=LOOKAHEAD_SESSION_KEYS_MAX as u32;
        if !keys.contains(&session_keys) {
            let allowed = format!("{} to {}: the keys of at least one request", keys.start(), keys.end());
            return Err(refuse("prefetch.session_keys", &session_keys.to_string(), &allowed));
        }
        if !(WINDOW_MIN..=WINDOW_MAX).contains(&window) {
            let allowed = format!("{WINDOW_MIN} to {WINDOW_MAX} iterations");
            return Err(refuse("prefetch.window", &window.to_string(), &allowed));
        }
        let hour = Duration::from_secs(3600);
        within("prefetch.staged", staged.0, Duration::from_secs(1)..=hour)?;
        within("prefetch.listed", listed.0, Duration::from_secs(1)..=24 * hour)?;
        if listed.0 < staged.0 {
            let allowed = format!("at least prefetch.staged ({staged})");
            return Err(refuse("prefetch.listed", &listed.to_string(), &allowed));
        }
        Ok(PrefetchSettings {
            session_keys: session_keys as usize,
            arena_permille: u64::from(arena_permille),
            session_permille: u64::from(session_permille),
            window_max: window,
            high_water_permille: u64::from(high_water_permille),
            staged: staged.0,
            listed: listed.0,
        })
    }
}

impl RetentionSection {
    pub(super) fn validate(&self) -> Result<RetentionSettings, AgentError> {
        let RetentionSection { permille: share, blocks_per_tenant, ttl_max } = *self;
        // 0 refuses all pins: a tenant sees the limit in the answer.
        permille("retention.permille", share, 0..=RETENTION_PERMILLE_MAX)?;
        if !(1..=BLOCKS_PER_TENANT_MAX).contains(&blocks_per_tenant) {
            let allowed =
                format!("1 to {BLOCKS_PER_TENANT_MAX}: to refuse all pins, set retention.permille = 0");
            return Err(refuse("retention.blocks_per_tenant", &blocks_per_tenant.to_string(), &allowed));
        }
        within("retention.ttl_max", ttl_max.0, Duration::from_secs(1)..=RETENTION_TTL_MAX)?;
        Ok(RetentionSettings { permille: share, blocks_per_tenant, ttl_max: ttl_max.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    #[test]
    fn defaults_are_those_of_the_core() {
        let core = reprise_agent_core::Settings::default();
        let settings = Config::default().validate().expect("valid");
        assert_eq!(settings.prefetch, core.prefetch);
        let RetentionSettings { permille, blocks_per_tenant, ttl_max } = settings.retention;
        assert_eq!(
            (permille, blocks_per_tenant, ttl_max),
            (core.retention_permille, core.retention_blocks_max, core.retention_ttl_max)
        );
    }

    #[test]
    fn zero_budgets_and_impossible_values_are_refused_with_the_remedy() {
        for (text, words) in [
            ("[prefetch]\narena_permille = 0", ["prefetch.arena_permille", "'0'", "turn off `lookahead`"]),
            ("[prefetch]\nsession_permille = 0", ["prefetch.session_permille", "'0'", "turn off"]),
            ("[prefetch]\nhigh_water_permille = 0", ["prefetch.high_water_permille", "'0'", "turn off"]),
            ("[prefetch]\narena_permille = 901", ["prefetch.arena_permille", "901", "1 to 900"]),
            ("[prefetch]\nhigh_water_permille = 1001", ["prefetch.high_water_permille", "1001", "1 to 1000"]),
            ("[prefetch]\nsession_keys = 0", ["prefetch.session_keys", "'0'", "at least one request"]),
            ("[prefetch]\nsession_keys = 16385", ["prefetch.session_keys", "16385", "16384"]),
            ("[prefetch]\nwindow = 0", ["prefetch.window", "'0'", "4 to 64"]),
            ("[prefetch]\nwindow = 65", ["prefetch.window", "65", "4 to 64"]),
            ("[prefetch]\nstaged = '0s'", ["prefetch.staged", "0ns", "1s"]),
            ("[prefetch]\nlisted = '10s'", ["prefetch.listed", "10s", "prefetch.staged (30s)"]),
            ("[retention]\npermille = 501", ["retention.permille", "501", "0 to 500"]),
            ("[retention]\nblocks_per_tenant = 0", ["retention.blocks_per_tenant", "'0'", "permille = 0"]),
            ("[retention]\nttl_max = '0s'", ["retention.ttl_max", "0ns", "1s"]),
        ] {
            let error = Config::parse(text).expect("parses").validate().expect_err("refused").chain();
            assert!(words.iter().all(|word| error.contains(word)), "{text:?} gave: {error}");
        }
        let valid = "[prefetch]\nwindow = 8\nhigh_water_permille = 500\n[retention]\npermille = 0\n";
        let settings = Config::parse(valid).expect("parses").validate().expect("valid");
        assert_eq!((settings.prefetch.window_max, settings.prefetch.high_water_permille), (8, 500));
        assert_eq!(settings.retention.permille, 0);
    }
}
