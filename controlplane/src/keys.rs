//! Keys of the store, all of them: below the prefix that is configured (`store.prefix`), which the store puts before each.
//!
//! | key | value |
//! |---|---|
//! | `identity` | random text, put by the first member ([`crate::identity`]) |
//! | `identities/<text>` | empty: it is there while the store is |
//! | `next_node` | the next node number to give out, decimal ([`crate::registry`]) |
//! | `nodes/<name>` | JSON: number, epoch, addresses, capacities, as last registered |
//! | `modes/<name>` | JSON: what the node is for ([`crate::modes`]) |
//! | `members/<name>` | JSON: address, version; under the member's lease ([`crate::shards`]) |
//! | `tenants/<name>` | JSON: the tenant's budget ([`crate::tenants`]) |
//!
//! What names may be, whoever reads them decides.

use std::fmt;

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key<'a> {
    /// Which store this is.
    Identity,
    /// That the store of this identity is there.
    IdentityOf(&'a str),
    /// The next node number.
    NextNode,
    /// A record of many.
    Of(Family, &'a str),
}

/// Records that are read and followed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Node numbers and epochs, by the node's name.
    Nodes,
    /// What nodes are for, by the node's name.
    Modes,
    /// Members, by their names.
    Members,
    /// Budgets, by the tenant's name.
    Tenants,
}

impl Key<'_> {
    /// As the store has it.
    pub fn bytes(self) -> Vec<u8> {
        self.to_string().into_bytes()
    }
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Identity => f.write_str("identity"),
            Key::IdentityOf(text) => write!(f, "identities/{text}"),
            Key::NextNode => f.write_str("next_node"),
            Key::Of(family, name) => write!(f, "{}{name}", family.prefix()),
        }
    }
}

impl Family {
    /// All of them.
    pub const ALL: [Family; 4] = [Family::Nodes, Family::Modes, Family::Members, Family::Tenants];

    /// What all keys of the family begin with, and no others do.
    pub const fn prefix(self) -> &'static str {
        match self {
            Family::Nodes => "nodes/",
            Family::Modes => "modes/",
            Family::Members => "members/",
            Family::Tenants => "tenants/",
        }
    }

    /// The name in a key of the family.
    pub fn name(self, key: &[u8]) -> Option<&str> {
        std::str::from_utf8(key).ok()?.strip_prefix(self.prefix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_what_earlier_releases_have_written() {
        let written = |key: Key<'_>| String::from_utf8(key.bytes()).expect("keys are text");
        assert_eq!(written(Key::Identity), "identity");
        assert_eq!(written(Key::IdentityOf("0f")), "identities/0f");
        assert_eq!(written(Key::NextNode), "next_node");
        let of_families = Family::ALL.map(|family| written(Key::Of(family, "a")));
        assert_eq!(of_families, ["nodes/a", "modes/a", "members/a", "tenants/a"]);
    }

    #[test]
    fn a_name_is_read_from_keys_of_its_family_alone() {
        for family in Family::ALL {
            let key = Key::Of(family, "node-1").bytes();
            for other in Family::ALL {
                assert_eq!(other.name(&key), (other == family).then_some("node-1"));
            }
            assert_eq!(family.name(&[family.prefix().as_bytes(), b"\xff"].concat()), None);
        }
        assert!(Family::ALL.iter().all(|family| family.name(b"identity").is_none()));
    }
}
