//! Tenants of the configuration: their quotas, users and groups.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use reprise_agent_core::TenantQuotas;
use reprise_policy::fair_order::{WEIGHT_MAX, Weights};
use reprise_policy::quota::{self, Quota};
use reprise_policy::tenant::{TENANTS_MAX, TenantRegistry};
use reprise_policy::{ByteSize, TenantId, TenantName};

use serde::Deserialize;

use super::{Config, Settings};
use crate::encryption::EncryptionKeys;
use crate::error::{AgentError, ErrorKind};
use crate::session::{TenantSalts, TenantUsers};

/// A tenant of the configuration.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TenantSection {
    pub(crate) name: TenantName,
    /// Number stored with its blocks on devices; derived from the name by default.
    #[serde(default)]
    pub(crate) number: Option<u16>,
    /// Whether its blocks are never written to devices in plaintext.
    #[serde(default)]
    pub(crate) encrypted: bool,
    /// Whether sessions of all tenants may read its blocks; for at most one tenant.
    #[serde(default)]
    pub(crate) public: bool,
    /// Users whose sessions have this tenant, and only this one.
    #[serde(default)]
    pub(crate) uids: Vec<IdRange>,
    /// Primary groups whose sessions have this tenant, and only this one, if no tenant lists the user.
    #[serde(default)]
    pub(crate) gids: Vec<IdRange>,
    #[serde(default)]
    pub(crate) dram: QuotaSection,
    #[serde(default)]
    pub(crate) nvme: QuotaSection,
    #[serde(default)]
    pub(crate) bandwidth: BandwidthSection,
}

/// Guaranteed and maximum bytes of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct QuotaSection {
    pub(crate) reserved: ByteSize,
    /// Absent: the tenant has no limit.
    pub(crate) limit: Option<ByteSize>,
}

/// User or group ids: `2000` or `2000-2999`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct IdRange(RangeInclusive<u32>);

impl TryFrom<String> for IdRange {
    type Error = String;

    fn try_from(text: String) -> Result<IdRange, String> {
        let (start, end) = text.split_once('-').unwrap_or((&text, &text));
        match (start.parse(), end.parse()) {
            (Ok(start), Ok(end)) if start <= end => Ok(IdRange(start..=end)),
            _ => Err(format!("invalid ids \"{text}\": expected an id, \"2000\", or a range, \"2000-2999\"")),
        }
    }
}

/// Folder with keys, and the tenants that must have one.
#[derive(Clone, Debug)]
pub(crate) struct EncryptionSettings {
    keys: Option<PathBuf>,
    required: BTreeSet<TenantName>,
}

/// Share of a tenant in the bandwidth of devices and of peers' requests.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct BandwidthSection {
    pub(crate) weight: u32,
}

impl Default for BandwidthSection {
    fn default() -> Self {
        BandwidthSection { weight: 1 }
    }
}

/// Name and quotas of a tenant.
#[derive(Clone, Debug)]
pub(crate) struct TenantSettings {
    pub(crate) name: TenantName,
    pub(crate) quotas: TenantQuotas,
    /// Weight in shares of bandwidth.
    pub(crate) weight: u32,
}

impl Settings {
    /// Returns the encryption keys of tenants, which are not read yet.
    pub(crate) fn encryption_keys(&self) -> EncryptionKeys {
        let salts = TenantSalts::within(self.session.salts.clone());
        EncryptionKeys::within(self.encryption.keys.clone(), self.encryption.required.clone(), salts)
    }

    /// Returns a registry with the configured tenants.
    pub(crate) fn tenant_registry(&self) -> TenantRegistry {
        let mut registry = TenantRegistry::default();
        for TenantSettings { name, quotas, .. } in &self.tenants {
            registry.enter(name, Some(quotas.tenant)).expect("the validation applied the same rules");
        }
        registry
    }

    /// Returns the weights of the configured tenants in shares of bandwidth.
    pub(crate) fn bandwidth_weights(&self) -> Weights<TenantId> {
        self.tenants.iter().map(|tenant| (tenant.quotas.tenant, tenant.weight)).collect()
    }

    /// As [`bandwidth_weights`](Self::bandwidth_weights), by name.
    pub(crate) fn bandwidth_weights_by_name(&self) -> Weights<TenantName> {
        self.tenants.iter().map(|tenant| (tenant.name.clone(), tenant.weight)).collect()
    }
}

impl Config {
    /// Validates names, numbers and quotas, and that memory and devices of known size can hold all
    /// reservations. The actual size of devices is checked when they are open.
    pub(super) fn validate_tenants(&self) -> Result<Vec<TenantSettings>, AgentError> {
        let mut registry = TenantRegistry::default();
        let mut tenants: Vec<TenantSettings> = Vec::with_capacity(self.tenants.len().min(TENANTS_MAX));
        for section in &self.tenants {
            let name = &section.name;
            if tenants.iter().any(|other| other.name == *name) {
                return Err(refuse(name, "duplicate tenant: list each tenant once"));
            }
            let number = section.number.map(TenantId);
            let tenant = registry.enter(name, number).map_err(|error| refuse(name, &error.to_string()))?;
            let weight = section.bandwidth.weight;
            if !(1..=WEIGHT_MAX).contains(&weight) {
                let text = format!("invalid bandwidth.weight {weight}: expected 1 to {WEIGHT_MAX}");
                return Err(refuse(name, &text));
            }
            tenants.push(TenantSettings { name: name.clone(), quotas: section.quotas(tenant)?, weight });
        }
        let sum_fits = |room: &str, checked: Result<u64, quota::QuotaError>| {
            let error = |error| AgentError::new(ErrorKind::Config, format!("[[tenants]] {room}: {error}"));
            checked.map(drop).map_err(error)
        };
        let dram = tenants.iter().map(|tenant| tenant.quotas.dram);
        let region_bytes = self.arena.region_bytes.0.max(1);
        sum_fits("dram", quota::check_reservations(self.arena.bytes.0, region_bytes, dram))?;
        let sizes: Option<u64> =
            self.pool.devices.iter().map(|device| Some(device.bytes.0).filter(|bytes| *bytes > 0)).sum();
        if let Some(bytes) = sizes.filter(|_| !self.pool.devices.is_empty()) {
            let usable = bytes - bytes / 1000 * u64::from(self.cache.pool_free_permille);
            let nvme = tenants.iter().map(|tenant| tenant.quotas.nvme);
            sum_fits("nvme", quota::check_reservations(usable, 1, nvme))?;
        }
        Ok(tenants)
    }

    /// Validates the folder of keys, and returns it with the tenants that need a key.
    pub(super) fn validate_encryption(&self) -> Result<EncryptionSettings, AgentError> {
        let keys = (!self.encryption.keys.as_os_str().is_empty()).then(|| self.encryption.keys.clone());
        let encrypted = self.tenants.iter().filter(|tenant| tenant.encrypted);
        let required: BTreeSet<TenantName> = encrypted.map(|tenant| tenant.name.clone()).collect();
        if let (None, Some(name)) = (&keys, required.first()) {
            return Err(refuse(
                name,
                "it is encrypted, but there are no keys: set encryption.keys to their folder",
            ));
        }
        if let (Some(_), true) = (&keys, self.session.extents) {
            let what = "session.extents lets clients read and write blocks on devices, which would be ciphertext: \
                        remove it, or encryption.keys";
            return Err(AgentError::new(ErrorKind::Config, what));
        }
        Ok(EncryptionSettings { keys, required })
    }

    /// Returns the public tenant.
    pub(super) fn validate_public_tenant(&self) -> Result<Option<TenantName>, AgentError> {
        let mut public = self.tenants.iter().filter(|tenant| tenant.public).map(|tenant| &tenant.name);
        let Some(name) = public.next() else { return Ok(None) };
        if let Some(other) = public.next() {
            let what = format!("public = true is set for tenant '{name}' too: set it for one tenant");
            return Err(refuse(other, &what));
        }
        if *name == TenantName::default_tenant() {
            let what =
                "it has no isolation salt, so it cannot be public: use another tenant for shared prompts";
            return Err(refuse(name, what));
        }
        if self.tenants.iter().any(|tenant| tenant.public && tenant.encrypted) {
            let what = "a public tenant must not be encrypted, because readers of other tenants would write copies of its \
                        blocks without its key: remove public or encrypted";
            return Err(refuse(name, what));
        }
        if self.session.salts.as_os_str().is_empty() {
            let what =
                "a public tenant needs an isolation salt: set session.salts to the folder of the salts";
            return Err(refuse(name, what));
        }
        Ok(Some(name.clone()))
    }

    /// Validates the users and groups of tenants.
    pub(super) fn validate_users(&self) -> Result<TenantUsers, AgentError> {
        let mut users = TenantUsers::default();
        for TenantSection { name, uids, gids, .. } in &self.tenants {
            let [uids, gids] =
                [uids, gids].map(|ids| ids.iter().map(|IdRange(ids)| ids.clone()).collect::<Vec<_>>());
            users
                .add(name, &uids, &gids)
                .map_err(|words| refuse(name, &format!("{words}: list them once")))?;
        }
        Ok(users)
    }
}

impl TenantSection {
    fn quotas(&self, tenant: TenantId) -> Result<TenantQuotas, AgentError> {
        let quota = |room: &str, section: &QuotaSection| {
            let limit = section.limit.map_or(u64::MAX, |limit| limit.0);
            Quota::new(section.reserved.0, limit)
                .map_err(|error| refuse(&self.name, &format!("{room}: {error}")))
        };
        Ok(TenantQuotas { tenant, dram: quota("dram", &self.dram)?, nvme: quota("nvme", &self.nvme)? })
    }
}

fn refuse(name: &TenantName, what: &str) -> AgentError {
    AgentError::new(ErrorKind::Config, format!("[[tenants]] '{name}': {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validate(text: &str) -> Result<Settings, String> {
        let config = Config::parse(text).map_err(|error| error.to_string())?;
        config.validate().map_err(|error| error.chain())
    }

    #[test]
    fn quotas_have_units_and_defaults() {
        let text =
            "[[tenants]]\nname = 'a'\nnumber = 7\ndram = { limit = '1GiB' }\nnvme = { reserved = '1GiB' }";
        let settings = validate(text).expect("valid");
        let quotas = &settings.tenants[0].quotas;
        assert_eq!(quotas.tenant, TenantId(7));
        assert_eq!((quotas.dram.reserved(), quotas.dram.limit()), (0, 1 << 30));
        assert_eq!((quotas.nvme.reserved(), quotas.nvme.limit()), (1 << 30, u64::MAX));
        assert_eq!(settings.tenant_registry().name(TenantId(7)), Some(&settings.tenants[0].name));
    }

    #[test]
    fn weights_are_those_of_the_sections_and_one_otherwise() {
        let text = "[[tenants]]\nname = 'a'\nnumber = 7\nbandwidth = { weight = 4 }\n[[tenants]]\nname = 'b'\nnumber = 8";
        let settings = validate(text).expect("valid");
        let weights = settings.bandwidth_weights();
        assert_eq!([7, 8, 9].map(|number| weights.of(&TenantId(number))), [4, 1, 1]);
        assert_eq!(settings.bandwidth_weights_by_name().of(&"a".parse().expect("a name")), 4);
        for weight in [0, 1001] {
            let text = format!("[[tenants]]\nname = 'a'\nbandwidth = {{ weight = {weight} }}");
            let error = validate(&text).map(drop).expect_err("out of range");
            assert!(error.contains("bandwidth.weight") && error.contains("1 to 1000"), "{error}");
        }
    }

    #[test]
    fn users_and_groups_are_ids_or_ranges_of_one_tenant() {
        let tenant = |name: &str, ids: &str| format!("[[tenants]]\nname = '{name}'\n{ids}\n");
        let settings = validate(&tenant("a", "uids = ['7', '2000-2999']\ngids = ['50']")).expect("valid");
        let mut users = TenantUsers::default();
        users.add(&settings.tenants[0].name, &[7..=7, 2000..=2999], &[50..=50]).expect("no other tenant");
        assert_eq!(settings.session.users, users);
        for ids in ["'x'", "'2-1'", "'1-'", "'-1'", "''", "'4294967296'"] {
            let text = validate(&tenant("a", &format!("uids = [{ids}]"))).map(drop).expect_err("refused");
            assert!(text.contains("invalid ids") && text.contains("\"2000-2999\""), "{text}");
        }
        let both = tenant("a", "gids = ['1-5']") + &tenant("b", "gids = ['5']");
        let text = validate(&both).map(drop).expect_err("refused");
        assert!(text.contains("'b': gids 5-5 are listed for tenant 'a' too"), "{text}");
    }

    #[test]
    fn at_most_one_tenant_with_a_salt_is_public() {
        let salts = "[session]\nsalts = '/etc/reprise/salts'\n";
        let tenant = |name: &str, public: bool| format!("[[tenants]]\nname = '{name}'\npublic = {public}\n");
        let settings =
            validate(&(salts.to_owned() + &tenant("a", true) + &tenant("b", false))).expect("valid");
        assert_eq!(settings.public_tenant.map(String::from).as_deref(), Some("a"));
        assert_eq!(validate(&tenant("a", false)).expect("valid").public_tenant, None);
        for (text, wanted) in [
            (salts.to_owned() + &tenant("a", true) + &tenant("b", true), "for tenant 'a' too"),
            (salts.to_owned() + &tenant("default", true), "no isolation salt"),
            (tenant("a", true), "set session.salts"),
            (
                format!(
                    "[encryption]\nkeys = '/etc/reprise/keys'\n{salts}{}encrypted = true\n",
                    tenant("a", true)
                ),
                "a public tenant must not be encrypted",
            ),
        ] {
            let refused = validate(&text).map(drop).expect_err("refused");
            assert!(refused.contains(wanted), "{refused}");
        }
    }

    #[test]
    fn inconsistent_quotas_are_rejected_with_a_remedy() {
        let refused = |text: &str| validate(text).map(drop).expect_err("refused");
        let arena = "[arena]\nbytes = '512MiB'\nregion_bytes = '256MiB'\n";
        let tenants = |first: &str, second: &str| {
            format!("{arena}[[tenants]]\nname = 'a'\n{first}\n[[tenants]]\nname = 'b'\n{second}")
        };
        let text = refused(&tenants("dram = { reserved = '2MiB', limit = '1MiB' }", ""));
        assert!(text.contains("'a': dram") && text.contains("raise the limit"), "{text}");
        let text = refused(&tenants("dram = { reserved = '257MiB' }", "dram = { reserved = '1MiB' }"));
        assert!(text.contains("dram: 768MiB") && text.contains("256MiB more"), "{text}");
        let text = refused(&tenants("number = 9", "number = 9"));
        assert!(text.contains("'b'") && text.contains("another `number`"), "{text}");
        assert!(refused(&tenants("", "").replace("'b'", "'a'")).contains("list each tenant once"));
        assert!(refused(&tenants("", "").replace("'b'", "'B'")).contains("a-z"));
        let device = "[[pool.devices]]\npath = '/p'\nbytes = '100MiB'\n";
        let text = refused(&(device.to_owned() + &tenants("nvme = { reserved = '98MiB' }", "")));
        assert!(text.contains("nvme:") && text.contains("98MiB"), "{text}");
    }
}
