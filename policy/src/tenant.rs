//! Tenants: names, numbers, and ownership of namespaces.
//!
//! A tenant has a name in configurations, sessions and reports, and a 16-bit number in journals and memory.
//! The number follows from the name, so agents agree on it without coordination. If two names on one node
//! have the same number (probability 1 in 65,535 for a pair), the second one is rejected until the
//! configuration sets a number for one of them.
//!
//! [`TenantRegistry`] determines the tenant of each session of an agent. Namespaces of different tenants differ by
//! their [salts](crate::salt). In addition, the registry checks that a namespace belongs to one tenant.
//!
//! Out of scope: authentication. If a cluster binds pods to tenants, [`crate::identity`] checks sessions;
//! otherwise the tenant that a client names is trusted.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids::TenantId;
use crate::key::HASH_SLOTS;
use crate::namespace::NamespaceDigest;

/// Maximum bytes of a tenant's name: the length of a DNS label, as in Kubernetes names.
pub const TENANT_NAME_BYTES_MAX: usize = 63;

/// Maximum tenants of one node: each needs a few hundred bytes, and a step in decisions over all tenants.
pub const TENANTS_MAX: usize = 1024;

/// Maximum tenants when a peer's offer adds one: the rest is reserved for sessions on this node.
pub const OFFERED_TENANTS_MAX: usize = TENANTS_MAX / 2;

/// Maximum namespaces that one node binds to tenants: 65,536 × 34 bytes are 2 MiB, and a node serves tens of
/// models.
pub const NAMESPACES_MAX: usize = 65_536;

/// The name of [`TenantId::DEFAULT`].
const DEFAULT_NAME: &str = "default";

/// A tenant's name: 1 to 63 of `a`–`z`, `0`–`9` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TenantName(String);

/// Reason why a tenant is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TenantError {
    /// The name is invalid.
    #[error("invalid tenant name '{0}': use 1 to {TENANT_NAME_BYTES_MAX} of a-z, 0-9 and '-'")]
    Name(String),
    /// The stored blocks of a tenant have another number than the tenant.
    #[error(
        "stored blocks of tenant '{name}' have the number {kept}, but its number is now {number}: set `number = {kept}` \
        for it under [[tenants]] in the agent's configuration, or those blocks stay unused"
    )]
    Renumbered {
        /// Tenant of the blocks.
        name: TenantName,
        /// Number stored with the blocks.
        kept: u16,
        /// Current number of the tenant.
        number: u16,
    },
    /// Another tenant has the same number.
    #[error(
        "tenant '{name}' has the number {number}, which tenant '{other}' already uses on this node: set another `number` for \
        one of them under [[tenants]] in the agent's configuration"
    )]
    Number {
        /// Tenant that is rejected.
        name: TenantName,
        /// Number of both tenants.
        number: u16,
        /// Tenant that uses the number.
        other: TenantName,
    },
    /// The namespace belongs to another tenant.
    #[error(
        "this namespace belongs to tenant '{owner}' on this node, not to '{name}': give each tenant another salt \
        (session.salts of the agent)"
    )]
    Namespace {
        /// Tenant that is rejected.
        name: TenantName,
        /// Tenant that owns the namespace.
        owner: TenantName,
    },
    /// A peer's offer would exceed the number of tenants that offers may add.
    #[error(
        "this node knows {0} tenants, and the rest of its table is reserved for its own sessions: restart its agent to remove \
        unused tenants"
    )]
    Offered(usize),
    /// The registry is full.
    #[error("this node knows {0}, its maximum: restart its agent to remove unused ones")]
    Full(&'static str),
}

/// Tenants of a node and the owners of its namespaces, during the lifetime of an agent.
#[derive(Clone, Debug)]
pub struct TenantRegistry {
    by_number: BTreeMap<TenantId, TenantName>,
    /// Tenants with an explicit number.
    numbers: BTreeMap<TenantName, TenantId>,
    namespaces: BTreeMap<[u8; 32], TenantId>,
}

impl TenantName {
    /// Tenant of sessions without a tenant name.
    pub fn default_tenant() -> TenantName {
        TenantName(DEFAULT_NAME.to_owned())
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Hash slot whose owner keeps the tenant's budget, `0..HASH_SLOTS`.
    pub fn hash_slot(&self) -> u16 {
        let digest = Sha256::digest(self.0.as_bytes());
        u16::from_le_bytes([digest[2], digest[3]]) % HASH_SLOTS
    }

    /// Number of the tenant unless one is set: 0 for the default tenant, otherwise the first two bytes
    /// (little-endian) of the SHA-256 of the name, with 0 replaced by 1.
    pub fn number(&self) -> TenantId {
        if self.0 == DEFAULT_NAME {
            return TenantId::DEFAULT;
        }
        let digest = Sha256::digest(self.0.as_bytes());
        TenantId(u16::from_le_bytes([digest[0], digest[1]]).max(1))
    }
}

impl FromStr for TenantName {
    type Err = TenantError;

    /// Parses a name; an empty text is the default tenant.
    fn from_str(text: &str) -> Result<TenantName, TenantError> {
        if text.is_empty() {
            return Ok(TenantName::default_tenant());
        }
        let known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if text.len() > TENANT_NAME_BYTES_MAX || !text.bytes().all(known) {
            let shown: String = text.chars().take(TENANT_NAME_BYTES_MAX).collect();
            return Err(TenantError::Name(shown.escape_debug().to_string()));
        }
        Ok(TenantName(text.to_owned()))
    }
}

impl TryFrom<String> for TenantName {
    type Error = TenantError;

    fn try_from(text: String) -> Result<TenantName, TenantError> {
        text.parse()
    }
}

impl From<TenantName> for String {
    fn from(name: TenantName) -> String {
        name.0
    }
}

impl fmt::Display for TenantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Default for TenantRegistry {
    /// Creates a registry with the default tenant only.
    fn default() -> TenantRegistry {
        TenantRegistry {
            by_number: BTreeMap::from([(TenantId::DEFAULT, TenantName::default_tenant())]),
            numbers: BTreeMap::new(),
            namespaces: BTreeMap::new(),
        }
    }
}

impl TenantRegistry {
    /// Adds a tenant with an explicit number or its own.
    ///
    /// # Errors
    /// [`TenantError::Number`] if another tenant has the number, and [`TenantError::Full`].
    pub fn enter(&mut self, name: &TenantName, number: Option<TenantId>) -> Result<TenantId, TenantError> {
        let id = number.or_else(|| self.numbers.get(name).copied()).unwrap_or_else(|| name.number());
        match self.by_number.get(&id) {
            Some(known) if known == name => return Ok(id),
            Some(known) => {
                let (name, other) = (name.clone(), known.clone());
                return Err(TenantError::Number { name, number: id.0, other });
            }
            None if self.by_number.len() >= TENANTS_MAX => return Err(TenantError::Full("1,024 tenants")),
            None => {}
        }
        self.by_number.insert(id, name.clone());
        if number.is_some() {
            self.numbers.insert(name.clone(), id);
        }
        Ok(id)
    }

    /// Adds a tenant whose blocks a peer offers.
    ///
    /// # Errors
    /// The errors of [`TenantRegistry::enter`], and [`TenantError::Offered`].
    pub fn enter_offered(&mut self, name: &TenantName) -> Result<TenantId, TenantError> {
        let id = self.numbers.get(name).copied().unwrap_or_else(|| name.number());
        if !self.by_number.contains_key(&id) && self.by_number.len() >= OFFERED_TENANTS_MAX {
            return Err(TenantError::Offered(self.by_number.len()));
        }
        self.enter(name, None)
    }

    /// Adds a tenant with the name and number found with stored blocks. Existing entries take precedence.
    ///
    /// # Errors
    /// [`TenantError::Number`] if another tenant has the number, [`TenantError::Renumbered`] if the name has
    /// another number, and [`TenantError::Full`].
    pub fn recall(&mut self, name: &TenantName, number: TenantId) -> Result<(), TenantError> {
        let known = self.numbers.get(name).filter(|known| **known != number);
        if let Some(known) = known {
            return Err(TenantError::Renumbered { name: name.clone(), kept: number.0, number: known.0 });
        }
        self.enter(name, Some(number)).map(drop)
    }

    /// Assigns a namespace to the tenant of its first session, and returns the tenant's number.
    ///
    /// # Errors
    /// [`TenantError`], except `Name`.
    pub fn bind(&mut self, name: &TenantName, namespace: &NamespaceDigest) -> Result<TenantId, TenantError> {
        let owner = self.namespaces.get(&namespace.0);
        if let Some(owner) = owner.and_then(|owner| self.by_number.get(owner)).filter(|owner| *owner != name)
        {
            return Err(TenantError::Namespace { name: name.clone(), owner: owner.clone() });
        }
        if owner.is_none() && self.namespaces.len() >= NAMESPACES_MAX {
            return Err(TenantError::Full("65,536 namespaces"));
        }
        let id = self.enter(name, None)?;
        self.namespaces.insert(namespace.0, id);
        Ok(id)
    }

    /// Returns the number of the tenant that a peer names; `None` if another tenant has it here. The tenant need not be
    /// registered: a node may have recovered blocks of it without their tenant's name.
    pub fn number_of(&self, name: &TenantName) -> Option<TenantId> {
        let id = self.numbers.get(name).copied().unwrap_or_else(|| name.number());
        self.by_number.get(&id).is_none_or(|known| known == name).then_some(id)
    }

    /// Returns the name of a registered tenant.
    pub fn name(&self, tenant: TenantId) -> Option<&TenantName> {
        self.by_number.get(&tenant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> TenantName {
        text.parse().expect("a name")
    }

    fn namespace(byte: u8) -> NamespaceDigest {
        NamespaceDigest([byte; 32])
    }

    #[test]
    fn names_are_dns_labels_and_empty_name_is_the_default_tenant() {
        assert_eq!(name(""), TenantName::default_tenant());
        assert_eq!(name("team-7").to_string(), "team-7");
        assert!("a".repeat(63).parse::<TenantName>().is_ok());
        for bad in ["A", "a b", "a_b", "ä", "a\n", &"a".repeat(64)] {
            let error = bad.parse::<TenantName>().expect_err("rejected").to_string();
            assert!(error.contains("1 to 63 of a-z, 0-9"), "{error}");
            assert!(!error.contains('\n'));
        }
    }

    #[test]
    fn number_follows_from_the_name() {
        assert_eq!(name("default").number(), TenantId::DEFAULT);
        // printf team-a | sha256sum begins with these two bytes.
        assert_eq!(name("team-a").number(), TenantId(u16::from_le_bytes(TEAM_A)));
        assert_ne!(name("team-a").number(), name("team-b").number());
    }

    const TEAM_A: [u8; 2] = [0x96, 0xc2];

    #[test]
    fn namespace_belongs_to_the_tenant_of_its_first_session() {
        let mut registry = TenantRegistry::default();
        let first = registry.bind(&name("a"), &namespace(1)).expect("free");
        assert_eq!(registry.bind(&name("a"), &namespace(1)), Ok(first));
        let error = registry.bind(&name("b"), &namespace(1)).expect_err("it is a's");
        assert_eq!(error, TenantError::Namespace { name: name("b"), owner: name("a") });
        assert!(registry.bind(&name("b"), &namespace(2)).is_ok());
        assert_eq!(registry.name(first), Some(&name("a")));
    }

    #[test]
    fn tenants_never_share_a_number() {
        let mut registry = TenantRegistry::default();
        let set = Some(name("b").number());
        registry.enter(&name("a"), set).expect("free");
        let error = registry.bind(&name("b"), &namespace(2)).expect_err("a has its number").to_string();
        assert!(error.contains("'a'") && error.contains("`number`"), "{error}");
        assert_eq!(registry.bind(&name("a"), &namespace(1)).ok(), set, "an explicit number is kept");
        assert!(registry.enter(&name("b"), Some(TenantId(7))).is_ok());
        assert_eq!(registry.bind(&name("b"), &namespace(2)), Ok(TenantId(7)));
        assert_eq!(registry.number_of(&name("b")), Some(TenantId(7)));
        assert_eq!(registry.number_of(&name("a")), set);
        assert_eq!(registry.number_of(&name("c")), Some(name("c").number()), "it is free");
        assert!(registry.enter(&name("c"), Some(TenantId::DEFAULT)).is_err(), "0 is the default tenant's");
    }

    #[test]
    fn restored_name_keeps_number_of_its_blocks_unless_configured_otherwise() {
        let mut registry = TenantRegistry::default();
        registry.enter(&name("listed"), Some(TenantId(5))).expect("free");
        assert_eq!(registry.recall(&name("gone"), TenantId(9)), Ok(()));
        assert_eq!(registry.name(TenantId(9)), Some(&name("gone")));
        assert_eq!(
            registry.bind(&name("gone"), &namespace(1)),
            Ok(TenantId(9)),
            "its sessions use the number of its blocks"
        );
        assert_eq!(registry.recall(&name("listed"), TenantId(5)), Ok(()));
        let error = registry.recall(&name("listed"), TenantId(6)).expect_err("it has 5").to_string();
        assert!(error.contains("'listed'") && error.contains("`number = 6`"), "{error}");
        let error = registry.recall(&name("other"), TenantId(5)).expect_err("it is taken");
        assert!(matches!(error, TenantError::Number { .. }));
        assert_eq!(registry.enter(&name("listed"), None), Ok(TenantId(5)), "nothing was changed");
    }

    #[test]
    fn offers_fill_half_of_the_registry_and_sessions_all_of_it() {
        let mut registry = TenantRegistry::default();
        let entered = (0..2 * TENANTS_MAX)
            .filter_map(|number| registry.enter_offered(&name(&format!("t{number}"))).ok())
            .count();
        assert_eq!(entered, OFFERED_TENANTS_MAX - 1, "with the default tenant");
        let error = registry.enter_offered(&name("one-more")).expect_err("half is full").to_string();
        assert!(error.contains("512 tenants") && error.contains("reserved for its own sessions"), "{error}");
        assert_eq!(registry.enter_offered(&name("t0")), Ok(name("t0").number()), "a known tenant");
        assert!(registry.bind(&name("one-more"), &namespace(1)).is_ok());
    }

    #[test]
    fn full_registry_returns_an_error() {
        let mut registry = TenantRegistry::default();
        for number in 1..TENANTS_MAX as u16 {
            registry.enter(&name(&format!("t{number}")), Some(TenantId(number))).expect("room");
        }
        let error = registry.enter(&name("one-more"), Some(TenantId(60_000))).expect_err("full");
        assert!(matches!(error, TenantError::Full(_)));
    }
}
