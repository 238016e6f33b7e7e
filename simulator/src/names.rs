//! Names of members in maps.

use reprise_policy::shards::MemberName;

/// Returns the name of a member in maps.
pub(crate) fn member_name(member: usize) -> MemberName {
    MemberName::new(&format!("m{member:03}")).expect("a printable name")
}

/// Returns the member with a name.
pub(crate) fn number_of_member(name: &MemberName) -> usize {
    name.as_str()[1..].parse().expect("the name of a member contains its number")
}
