//! Ownership of the directory's hash slots by members of the control plane.
//!
//! A shard map consists of a list of members and the epoch of that list. The owner of a slot is computed, not
//! stored: the member whose hash with the slot is highest (rendezvous hashing; Thaler and Ravishankar, "Using
//! name-based mappings to increase hit rates", 1998). Processes with the same list therefore agree on every
//! slot, and adding or removing a member moves only its own slots.
//!
//! Cost: a map of 16 members computes 65,536 hashes of about 8 ns once, when it is created. Lookups use a
//! table of 8 KiB.
//!
//! Out of scope: weights (members are equal), the source of the list, and the state of slots.

use std::fmt;

use crate::key::{BlockKey, HASH_SLOTS};
use crate::{Epoch, SlotSet};

/// Maximum members of a map; 10⁹ entries are 63 million for each of 16 members.
pub const MEMBERS_MAX: usize = 1024;

/// Marker for a slot without an owner, in a map without members.
const NO_OWNER: u16 = u16::MAX;

/// Name of a member; names are unique, and ordered bytewise.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberName(String);

/// Position of a member in its map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberIndex(pub u16);

/// Members of the control plane, and their slots.
#[derive(Clone, PartialEq, Eq)]
pub struct ShardMap {
    epoch: Epoch,
    /// Members in the order of their names.
    members: Vec<MemberName>,
    /// Position of each slot's owner.
    owners: Box<[u16]>,
    digest: u64,
}

/// Reason why a member list is not a valid shard map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// A name is too long, empty or not printable.
    #[error("invalid member name '{0}': expected 1 to 256 printable ASCII characters without spaces")]
    Name(String),
    /// A name occurs twice.
    #[error("two members have the name '{0}': give each member a unique name")]
    Twice(MemberName),
    /// The list exceeds the maximum number of members.
    #[error("{0} members: a map has at most {MEMBERS_MAX}")]
    TooMany(usize),
}

impl MemberName {
    /// Validates a member name.
    ///
    /// # Errors
    /// [`ShardError::Name`] if it is invalid.
    pub fn new(name: &str) -> Result<MemberName, ShardError> {
        let fits = (1..=256).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        if fits {
            Ok(MemberName(name.to_owned()))
        } else {
            Err(ShardError::Name(name.chars().take(64).collect::<String>().escape_default().to_string()))
        }
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl ShardMap {
    /// Creates the map of these members, in any order, at an epoch. Without members, slots have no owner.
    ///
    /// # Errors
    /// [`ShardError::Twice`] and [`ShardError::TooMany`].
    pub fn new(epoch: Epoch, members: impl IntoIterator<Item = MemberName>) -> Result<ShardMap, ShardError> {
        let mut members: Vec<MemberName> = members.into_iter().collect();
        members.sort_unstable();
        if members.len() > MEMBERS_MAX {
            return Err(ShardError::TooMany(members.len()));
        }
        if let Some(twice) = members.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ShardError::Twice(twice[0].clone()));
        }
        let seeds: Vec<u64> = members.iter().map(seed).collect();
        let owners = (0..HASH_SLOTS).map(|slot| owner(&seeds, slot)).collect();
        // Never 0: on the wire, 0 means that the digest is absent.
        let digest = seeds.iter().fold(0, |digest, seed| mix(digest ^ seed)).max(1);
        Ok(ShardMap { epoch, members, owners, digest })
    }

    /// Epoch of the member list.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Digest of the member list, never 0. Maps with the same list have the same digest, regardless of their
    /// epochs; maps with different lists differ with probability 1 − 2⁻⁶⁴. Processes with the same digest
    /// agree on the owner of every slot.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Members in the order of their names.
    pub fn members(&self) -> &[MemberName] {
        &self.members
    }

    /// Returns the position of a member.
    pub fn position(&self, name: &MemberName) -> Option<MemberIndex> {
        self.members.binary_search(name).ok().map(|at| MemberIndex(at as u16))
    }

    /// Returns the owner of a hash slot, `0..HASH_SLOTS`; `None` without members.
    ///
    /// # Panics
    /// If the slot does not exist.
    pub fn owner(&self, slot: u16) -> Option<MemberIndex> {
        let owner = self.owners[usize::from(slot)];
        (owner != NO_OWNER).then_some(MemberIndex(owner))
    }

    /// Returns the owner of a key's slot.
    pub fn owner_of(&self, key: &BlockKey) -> Option<MemberIndex> {
        self.owner(key.hash_slot())
    }

    /// Iterates the slots of a member in ascending order.
    pub fn slots_of(&self, member: MemberIndex) -> impl Iterator<Item = u16> {
        (0..HASH_SLOTS).filter(move |slot| self.owner(*slot) == Some(member))
    }

    /// Slots that other members own.
    pub fn owned_by_others(&self, name: &MemberName) -> SlotSet {
        let member = self.position(name);
        (0..HASH_SLOTS).filter(|slot| self.owner(*slot).is_some_and(|owner| Some(owner) != member)).collect()
    }

    /// Slots of the member with this name; empty if it is not in the map.
    pub fn owned_by(&self, name: &MemberName) -> SlotSet {
        self.position(name).map_or(SlotSet::EMPTY, |member| self.slots_of(member).collect())
    }
}

/// Returns the member whose hash with the slot is highest; among equals, the first by name.
fn owner(seeds: &[u64], slot: u16) -> u16 {
    let weight = |(at, seed): (usize, &u64)| (mix(seed ^ mix(u64::from(slot))), std::cmp::Reverse(at));
    let best = seeds.iter().enumerate().map(weight).max();
    best.map_or(NO_OWNER, |(_, std::cmp::Reverse(at))| at as u16)
}

/// Hashes a name to 64 bits: FNV-1a, mixed so that names that differ only in the last letter differ in all
/// bits.
fn seed(name: &MemberName) -> u64 {
    let fnv = name.0.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    mix(fnv)
}

/// Finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
pub(crate) fn mix(mut value: u64) -> u64 {
    value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl fmt::Display for MemberName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ShardMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardMap")
            .field("epoch", &self.epoch)
            .field("members", &self.members)
            .finish_non_exhaustive()
    }
}

const _: () = assert!(MEMBERS_MAX < NO_OWNER as usize, "positions are 16 bits");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> MemberName {
        MemberName::new(text).expect("a name")
    }

    fn map(epoch: u64, names: &[&str]) -> ShardMap {
        ShardMap::new(Epoch(epoch), names.iter().map(|text| name(text))).expect("a map")
    }

    /// Names of the owners of all slots.
    fn owners(map: &ShardMap) -> Vec<Option<&MemberName>> {
        (0..HASH_SLOTS).map(|slot| map.owner(slot).map(|at| &map.members()[usize::from(at.0)])).collect()
    }

    #[test]
    fn digest_is_equal_exactly_for_equal_member_lists() {
        let digest = |epoch, names: &[&str]| map(epoch, names).digest();
        assert_eq!(digest(1, &["a", "b"]), digest(7, &["b", "a"]));
        let lists: [&[&str]; 5] = [&[], &["a"], &["b"], &["a", "b"], &["ab"]];
        let digests: std::collections::BTreeSet<u64> = lists.iter().map(|list| digest(1, list)).collect();
        assert_eq!(digests.len(), lists.len());
        assert!(!digests.contains(&0));
    }

    #[test]
    fn owners_never_change_between_versions() {
        // Members and agents of different versions must compute the same owners.
        let map = map(7, &["member-0", "member-1", "member-2"]);
        let golden: Vec<u16> =
            [0, 1, 2, 3, 4, 5, 6, 7, 1000, 4095].map(|slot| map.owner(slot).expect("owned").0).to_vec();
        assert_eq!(golden, [1, 1, 0, 2, 0, 1, 0, 0, 1, 2]);
        assert_eq!([0, 1, 2].map(|member| map.slots_of(MemberIndex(member)).count()), [1342, 1388, 1366]);
    }

    #[test]
    fn slots_have_no_owner_without_members_and_a_single_member_owns_all() {
        assert!(owners(&map(0, &[])).iter().all(Option::is_none));
        let alone = map(1, &["a"]);
        assert_eq!(alone.slots_of(MemberIndex(0)).count(), usize::from(HASH_SLOTS));
        assert_eq!(alone.owner_of(&BlockKey([0xff; 16])), Some(MemberIndex(0)));
    }

    #[test]
    fn every_slot_has_exactly_one_owner() {
        let map = map(1, &["a", "b", "c"]);
        let sets = ["a", "b", "c"].map(|text| map.owned_by(&name(text)));
        assert_eq!(sets.iter().fold(SlotSet::EMPTY, |all, set| all.or(set)), SlotSet::ALL);
        assert_eq!(sets.iter().map(SlotSet::len).sum::<usize>(), usize::from(HASH_SLOTS));
        assert!(map.owned_by(&name("d")).is_empty());
        assert_eq!(map.owned_by_others(&name("d")), SlotSet::ALL);
        assert_eq!(map.owned_by_others(&name("a")), sets[1].or(&sets[2]));
    }

    #[test]
    fn rejects_duplicate_and_unprintable_names_with_a_remedy() {
        for text in ["", "a b", "ä", "\n", &"x".repeat(257)] {
            let refused = MemberName::new(text).expect_err(text);
            assert!(refused.to_string().contains("printable"), "{refused}");
        }
        let twice = ShardMap::new(Epoch(1), ["a", "b", "a"].map(name)).expect_err("one name twice");
        assert_eq!(twice, ShardError::Twice(name("a")));
        let many = (0..=MEMBERS_MAX).map(|at| name(&format!("m{at}")));
        assert_eq!(ShardMap::new(Epoch(1), many), Err(ShardError::TooMany(MEMBERS_MAX + 1)));
    }

    proptest! {
        #[test]
        fn map_does_not_depend_on_the_order_of_members(
            names in prop::collection::btree_set("[a-z0-9.-]{1,12}", 1..12),
            seed in any::<u64>(),
        ) {
            let members: Vec<MemberName> = names.iter().map(|text| name(text)).collect();
            let mut shuffled = members.clone();
            shuffled.sort_by_key(|member| mix(seed ^ super::seed(member)));
            let one = ShardMap::new(Epoch(1), members).expect("a map");
            prop_assert_eq!(ShardMap::new(Epoch(1), shuffled), Ok(one));
        }

        #[test]
        fn removing_a_member_moves_only_its_slots(
            names in prop::collection::btree_set("[a-z0-9.-]{1,12}", 2..12),
            gone in any::<prop::sample::Index>(),
        ) {
            let members: Vec<MemberName> = names.iter().map(|text| name(text)).collect();
            let gone = &members[gone.index(members.len())];
            let before = ShardMap::new(Epoch(1), members.clone()).expect("a map");
            let left = members.iter().filter(|member| *member != gone).cloned();
            let after = ShardMap::new(Epoch(2), left).expect("a map");
            for (then, now) in owners(&before).into_iter().zip(owners(&after)) {
                prop_assert!(then == Some(gone) || then == now);
            }
        }

        #[test]
        fn slots_are_distributed_evenly(
            names in prop::collection::btree_set("[a-z0-9.-]{1,12}", 2..16),
        ) {
            let map = ShardMap::new(Epoch(1), names.iter().map(|text| name(text))).expect("a map");
            let share = f64::from(HASH_SLOTS) / names.len() as f64;
            // Binomial distribution: six standard deviations.
            let spread = 6.0 * share.sqrt();
            for member in 0..names.len() {
                let slots = map.slots_of(MemberIndex(member as u16)).count() as f64;
                prop_assert!((slots - share).abs() < spread, "{slots} of about {share}");
            }
        }
    }
}
