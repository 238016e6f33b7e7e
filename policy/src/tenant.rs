//! Tenants: their names, the numbers that blocks carry, and which namespaces are whose.
//!
//! A tenant has a name in configurations, sessions and reports, and a number of 16 bits in journals and memory. The number
//! follows from the name, so agents need nobody to agree on it; where two names of one node give the same number
//! (1 in 65,535 for any two), the second one is refused until the configuration sets a number for one of them.
//!
//! [`TenantRegistry`] is the one place of an agent that knows which tenant a session belongs to. Keys of different tenants
//! differ already when their namespaces have different salts; that a namespace belongs to one tenant is checked besides.
//!
//! Deliberately absent: authentication. Where a cluster says which pods are which tenant's, [`crate::identity`] judges; elsewhere whoever may
//! connect is believed who it says it is.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids::TenantId;
use crate::key::HASH_SLOTS;
use crate::namespace::NamespaceDigest;

/// Bytes of a tenant's name at the most: that of a DNS label, which Kubernetes names are.
pub const TENANT_NAME_BYTES_MAX: usize = 63;

/// Tenants of one node at the most: each costs a few hundred bytes and a step in decisions that look at all.
pub const TENANTS_MAX: usize = 1024;

/// How many there may be when a peer's offer brings another one: the rest is kept for sessions on this node.
pub const TENANTS_OF_OFFERS_MAX: usize = TENANTS_MAX / 2;

/// Namespaces that one node binds to tenants at the most: 65,536 × 34 bytes are 2 MiB, and a node serves tens of models.
pub const NAMESPACES_MAX: usize = 65_536;

/// The name of [`TenantId::DEFAULT`].
const DEFAULT_NAME: &str = "default";

/// A tenant's name: 1 to 63 of `a`–`z`, `0`–`9` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TenantName(String);

/// Why a tenant is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TenantError {
    /// Not a name.
    #[error("'{0}' is no tenant's name: use 1 to {TENANT_NAME_BYTES_MAX} of a-z, 0-9 and '-'")]
    Name(String),
    /// One name has two numbers.
    #[error(
        "blocks of tenant '{name}' from before carry the number {kept}, and it has {number} now: set `number = {kept}` \
         for it under [[tenants]] in the agent's configuration, or those blocks are nobody's"
    )]
    Renumbered {
        /// Whose blocks.
        name: TenantName,
        /// The number that they carry.
        kept: u16,
        /// The tenant's number.
        number: u16,
    },
    /// Two names have one number.
    #[error(
        "tenant '{name}' has the number {number}, which is tenant '{other}''s on this node: give one of them another \
         `number` under [[tenants]] in the agent's configuration"
    )]
    Number {
        /// The one that is refused.
        name: TenantName,
        /// The number.
        number: u16,
        /// The one that has it.
        other: TenantName,
    },
    /// A namespace is another tenant's.
    #[error(
        "this namespace belongs to tenant '{owner}' on this node, not to '{name}': give each tenant a salt of its own in \
         its namespaces"
    )]
    Namespace {
        /// The one that is refused.
        name: TenantName,
        /// Whose it is.
        owner: TenantName,
    },
    /// A peer's offer would bring one more than the node leaves to offers.
    #[error(
        "this node knows {0} tenants, and what it can know besides is left to its own sessions: restart its agent to forget \
         those that are gone"
    )]
    Offered(usize),
    /// The node knows as many as it can.
    #[error(
        "this node knows {0} already, as many as it can: restart its agent to forget those that are gone"
    )]
    Full(&'static str),
}

/// Which tenants there are on a node, and which namespaces are whose; for the life of an agent.
#[derive(Clone, Debug)]
pub struct TenantRegistry {
    by_number: BTreeMap<TenantId, TenantName>,
    /// Those whose number is set.
    numbers: BTreeMap<TenantName, TenantId>,
    namespaces: BTreeMap<[u8; 32], TenantId>,
}

impl TenantName {
    /// The tenant of sessions that name none.
    pub fn default_tenant() -> TenantName {
        TenantName(DEFAULT_NAME.to_owned())
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The hash slot whose owner keeps the tenant's budget, `0..HASH_SLOTS`.
    pub fn hash_slot(&self) -> u16 {
        let digest = Sha256::digest(self.0.as_bytes());
        u16::from_le_bytes([digest[2], digest[3]]) % HASH_SLOTS
    }

    /// The number of the tenant unless one is set: 0 for the default tenant, for others the first two bytes (little endian)
    /// of the SHA-256 of the name, or 1 where these are 0.
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

    /// An empty text names the default tenant.
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
    /// The default tenant only.
    fn default() -> TenantRegistry {
        TenantRegistry {
            by_number: BTreeMap::from([(TenantId::DEFAULT, TenantName::default_tenant())]),
            numbers: BTreeMap::new(),
            namespaces: BTreeMap::new(),
        }
    }
}

impl TenantRegistry {
    /// Enters a tenant, under a number that is set or its own.
    ///
    /// # Errors
    /// [`TenantError::Number`] when another one has the number, [`TenantError::Full`].
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

    /// Enters a tenant whose blocks a peer offers.
    ///
    /// # Errors
    /// As [`TenantRegistry::enter`], and [`TenantError::Offered`].
    pub fn enter_offered(&mut self, name: &TenantName) -> Result<TenantId, TenantError> {
        let id = self.numbers.get(name).copied().unwrap_or_else(|| name.number());
        if !self.by_number.contains_key(&id) && self.by_number.len() >= TENANTS_OF_OFFERS_MAX {
            return Err(TenantError::Offered(self.by_number.len()));
        }
        self.enter(name, None)
    }

    /// A tenant's blocks are found again, with its name and the number that they carry. What is known of either goes before.
    ///
    /// # Errors
    /// [`TenantError::Number`] when another one has the number, [`TenantError::Renumbered`] when the name has another number,
    /// [`TenantError::Full`].
    pub fn recall(&mut self, name: &TenantName, number: TenantId) -> Result<(), TenantError> {
        let known = self.numbers.get(name).filter(|known| **known != number);
        if let Some(known) = known {
            return Err(TenantError::Renumbered { name: name.clone(), kept: number.0, number: known.0 });
        }
        self.enter(name, Some(number)).map(drop)
    }

    /// A session of a tenant names a namespace: from now on it is that tenant's.
    ///
    /// # Errors
    /// [`TenantError`], all but `Name`.
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

    /// The name of a tenant that was entered or has had a session.
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
    fn names_are_dns_labels_and_an_empty_one_is_the_default_tenants() {
        assert_eq!(name(""), TenantName::default_tenant());
        assert_eq!(name("team-7").to_string(), "team-7");
        assert!("a".repeat(63).parse::<TenantName>().is_ok());
        for bad in ["A", "a b", "a_b", "ä", "a\n", &"a".repeat(64)] {
            let error = bad.parse::<TenantName>().expect_err("refused").to_string();
            assert!(error.contains("1 to 63 of a-z, 0-9"), "{error}");
            assert!(!error.contains('\n'));
        }
    }

    #[test]
    fn a_number_follows_from_the_name() {
        assert_eq!(name("default").number(), TenantId::DEFAULT);
        // printf team-a | sha256sum begins with these two bytes.
        assert_eq!(name("team-a").number(), TenantId(u16::from_le_bytes(TEAM_A)));
        assert_ne!(name("team-a").number(), name("team-b").number());
    }

    const TEAM_A: [u8; 2] = [0x96, 0xc2];

    #[test]
    fn a_namespace_belongs_to_the_tenant_of_its_first_session() {
        let mut registry = TenantRegistry::default();
        let first = registry.bind(&name("a"), &namespace(1)).expect("free");
        assert_eq!(registry.bind(&name("a"), &namespace(1)), Ok(first));
        let error = registry.bind(&name("b"), &namespace(1)).expect_err("it is a's");
        assert_eq!(error, TenantError::Namespace { name: name("b"), owner: name("a") });
        assert!(registry.bind(&name("b"), &namespace(2)).is_ok());
        assert_eq!(registry.name(first), Some(&name("a")));
    }

    #[test]
    fn two_tenants_never_share_a_number() {
        let mut registry = TenantRegistry::default();
        let set = Some(name("b").number());
        registry.enter(&name("a"), set).expect("free");
        let error = registry.bind(&name("b"), &namespace(2)).expect_err("a has its number").to_string();
        assert!(error.contains("'a'") && error.contains("`number`"), "{error}");
        assert_eq!(registry.bind(&name("a"), &namespace(1)).ok(), set, "a number that is set is kept");
        assert!(registry.enter(&name("b"), Some(TenantId(7))).is_ok());
        assert_eq!(registry.bind(&name("b"), &namespace(2)), Ok(TenantId(7)));
        assert!(registry.enter(&name("c"), Some(TenantId::DEFAULT)).is_err(), "0 is the default tenant's");
    }

    #[test]
    fn a_name_that_is_found_again_keeps_the_number_of_its_blocks_unless_the_configuration_says_otherwise() {
        let mut registry = TenantRegistry::default();
        registry.enter(&name("listed"), Some(TenantId(5))).expect("free");
        assert_eq!(registry.recall(&name("gone"), TenantId(9)), Ok(()));
        assert_eq!(registry.name(TenantId(9)), Some(&name("gone")));
        assert_eq!(
            registry.bind(&name("gone"), &namespace(1)),
            Ok(TenantId(9)),
            "its sessions find its blocks"
        );
        assert_eq!(registry.recall(&name("listed"), TenantId(5)), Ok(()));
        let error = registry.recall(&name("listed"), TenantId(6)).expect_err("it has 5").to_string();
        assert!(error.contains("'listed'") && error.contains("`number = 6`"), "{error}");
        let error = registry.recall(&name("other"), TenantId(5)).expect_err("it is taken");
        assert!(matches!(error, TenantError::Number { .. }));
        assert_eq!(registry.enter(&name("listed"), None), Ok(TenantId(5)), "nothing was changed");
    }

    #[test]
    fn offers_fill_half_of_a_registry_and_sessions_all_of_it() {
        let mut registry = TenantRegistry::default();
        let entered = (0..2 * TENANTS_MAX)
            .filter_map(|number| registry.enter_offered(&name(&format!("t{number}"))).ok())
            .count();
        assert_eq!(entered, TENANTS_OF_OFFERS_MAX - 1, "with the default tenant");
        let error = registry.enter_offered(&name("one-more")).expect_err("half is full").to_string();
        assert!(error.contains("512 tenants") && error.contains("left to its own sessions"), "{error}");
        assert_eq!(registry.enter_offered(&name("t0")), Ok(name("t0").number()), "it is known");
        assert!(registry.bind(&name("one-more"), &namespace(1)).is_ok());
    }

    #[test]
    fn a_full_registry_says_so() {
        let mut registry = TenantRegistry::default();
        for number in 1..TENANTS_MAX as u16 {
            registry.enter(&name(&format!("t{number}")), Some(TenantId(number))).expect("room");
        }
        let error = registry.enter(&name("one-more"), Some(TenantId(60_000))).expect_err("full");
        assert!(matches!(error, TenantError::Full(_)));
    }
}
