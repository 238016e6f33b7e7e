//! All keys in the store, relative to the configured prefix (`store.prefix`), which the store adds.
//!
//! | key | value |
//! |---|---|
//! | `identity` | random text, written by the first member ([`crate::identity`]) |
//! | `identities/<text>` | empty; exists as long as the identity is valid |
//! | `next_node` | next node number to assign, decimal ([`crate::registry`]) |
//! | `nodes/<name>` | JSON: number, epoch, addresses, capacities, as last registered |
//! | `modes/<name>` | JSON: mode of the node ([`crate::modes`]) |
//! | `members/<name>` | JSON: address, version; bound to the member's lease ([`crate::shards`]) |
//! | `tenants/<name>` | JSON: the tenant's budget ([`crate::tenants`]) |
//!
//! The readers of a family validate its names.

use std::fmt;

/// A key in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key<'a> {
    /// Identity of the store.
    Identity,
    /// Marker that exists while the identity of this text is valid.
    IdentityMarker(&'a str),
    /// Next node number to assign.
    NextNode,
    /// Record of a family, by name.
    Record(Family, &'a str),
}

/// Groups of records that are listed and watched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Node numbers and epochs, by node name.
    Nodes,
    /// Node modes, by node name.
    Modes,
    /// Control-plane members, by member name.
    Members,
    /// Budgets, by tenant name.
    Tenants,
}

impl Key<'_> {
    /// Encodes the key for the store.
    pub fn bytes(self) -> Vec<u8> {
        self.to_string().into_bytes()
    }
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Identity => f.write_str("identity"),
            Key::IdentityMarker(text) => write!(f, "identities/{text}"),
            Key::NextNode => f.write_str("next_node"),
            Key::Record(family, name) => write!(f, "{}{name}", family.prefix()),
        }
    }
}

impl Family {
    /// All families of records, in key order.
    pub const ALL: [Family; 4] = [Family::Nodes, Family::Modes, Family::Members, Family::Tenants];

    /// Prefix of the keys of this family, distinct from all other keys.
    pub const fn prefix(self) -> &'static str {
        match self {
            Family::Nodes => "nodes/",
            Family::Modes => "modes/",
            Family::Members => "members/",
            Family::Tenants => "tenants/",
        }
    }

    /// Extracts the name from a key of this family.
    pub fn name(self, key: &[u8]) -> Option<&str> {
        std::str::from_utf8(key).ok()?.strip_prefix(self.prefix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_equal_those_of_earlier_releases() {
        let written = |key: Key<'_>| String::from_utf8(key.bytes()).expect("keys are text");
        assert_eq!(written(Key::Identity), "identity");
        assert_eq!(written(Key::IdentityMarker("0f")), "identities/0f");
        assert_eq!(written(Key::NextNode), "next_node");
        let of_families = Family::ALL.map(|family| written(Key::Record(family, "a")));
        assert_eq!(of_families, ["nodes/a", "modes/a", "members/a", "tenants/a"]);
    }

    #[test]
    fn extracts_names_only_from_keys_of_the_same_family() {
        for family in Family::ALL {
            let key = Key::Record(family, "node-1").bytes();
            for other in Family::ALL {
                assert_eq!(other.name(&key), (other == family).then_some("node-1"));
            }
            assert_eq!(family.name(&[family.prefix().as_bytes(), b"\xff"].concat()), None);
        }
        assert!(Family::ALL.iter().all(|family| family.name(b"identity").is_none()));
    }
}
