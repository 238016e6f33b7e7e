//! A member's standing: whether it may answer for its slots, and which contents it keeps.
//!
//! A member is in the list of members with an incarnation, which is new with every registration. Its standing
//! is certain while its lease is certain to live and the list contains the incarnation of that lease. Only
//! then does it answer for its slots. Otherwise it keeps their contents but serves none, until it is
//! registered again or another member owns them.

use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{Epoch, SlotSet};

use crate::ledgers::MemberPlace;

/// The standing of a member in a list of members; see the module.
#[derive(Clone, Copy, Debug)]
pub struct Standing<'a> {
    /// The map of the list.
    pub map: &'a ShardMap,
    /// Name of the member.
    pub name: &'a MemberName,
    /// Incarnation of the member in the list, if it is there.
    pub listed: Option<u64>,
    /// Incarnation whose lease is certain to live now, if any.
    pub held: Option<u64>,
}

/// Slots of a directory, and the epoch of the map that has assigned them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssignedSlots {
    /// The slots.
    pub slots: SlotSet,
    /// Epoch of the map. The directory follows the map with a delay: it may answer only if both are the same
    /// ([`Standing::answers`]).
    pub epoch: Epoch,
}

impl Standing<'_> {
    /// Whether the member may answer for its slots.
    pub fn is_certain(&self) -> bool {
        self.held.is_some() && self.held == self.listed
    }

    /// Whether the member may answer for its slots with a directory whose slots were assigned by the map of
    /// `slots_epoch`. The directory follows the map with a delay, during which its slots may belong to others.
    pub fn answers(&self, slots_epoch: Epoch) -> bool {
        self.is_certain() && self.map.epoch() == slots_epoch
    }

    /// The member's place, while it is certain.
    pub fn place(&self) -> Option<MemberPlace<'_>> {
        let incarnation = self.held.filter(|_| self.is_certain())?;
        Some(MemberPlace { map: self.map, name: self.name, incarnation })
    }

    /// Slots of a directory that had those in `before`: the slots of this member or, while its standing is uncertain,
    /// those of before that no other member owns.
    pub fn assigned_slots(&self, before: &SlotSet) -> AssignedSlots {
        AssignedSlots { slots: self.retained_slots(before), epoch: self.map.epoch() }
    }

    fn retained_slots(&self, before: &SlotSet) -> SlotSet {
        if self.is_certain() {
            self.map.owned_by(self.name)
        } else {
            before.without(&self.map.owned_by_others(self.name))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standing_is_certain_with_the_listed_incarnation_only() {
        let [name, other] = ["a", "b"].map(|name| MemberName::new(name).expect("a valid name"));
        let both = ShardMap::new(Epoch(1), [name.clone(), other.clone()]).expect("a valid map");
        let alone = ShardMap::new(Epoch(2), [other]).expect("a valid map");
        let standing = |map, listed, held| Standing { map, name: &name, listed, held };
        let certain = standing(&both, Some(4), Some(4));
        assert!(certain.is_certain() && certain.answers(Epoch(1)) && !certain.answers(Epoch(2)));
        assert_eq!(certain.place().map(|place| place.incarnation), Some(4));
        let own = certain.retained_slots(&SlotSet::EMPTY);
        assert_eq!(own, both.owned_by(&name), "it gains the slots of its place");
        for (listed, held) in [(Some(4), None), (Some(4), Some(5)), (None, Some(4)), (None, None)] {
            let standing_now = standing(&both, listed, held);
            assert!(!standing_now.is_certain() && !standing_now.answers(Epoch(1)));
            assert!(standing_now.place().is_none());
            assert_eq!(
                standing(&both, listed, held).retained_slots(&SlotSet::ALL),
                own,
                "no other member owns them"
            );
            assert_eq!(standing(&both, listed, held).retained_slots(&SlotSet::EMPTY), SlotSet::EMPTY);
        }
        let replaced = standing(&alone, None, Some(4)).retained_slots(&own);
        assert_eq!(replaced, SlotSet::EMPTY, "another member owns all slots");
    }
}
