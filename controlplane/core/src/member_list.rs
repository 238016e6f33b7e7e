//! The registered members, as followed from the store, and the map of hash slots derived from them.
//!
//! The map is a function of the entries ([`ShardMap`]); every member computes it. Its epoch is a revision at which
//! the list was current, so a higher epoch is a later list. A list that equals the last one makes no new map.

use std::collections::BTreeMap;
use std::sync::Arc;

use reprise_policy::Epoch;
use reprise_policy::shards::{MEMBERS_MAX, MemberName, ShardMap};

use crate::record_watch::RecordUpdate;

/// A registered control-plane member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Unique name of the member.
    pub name: MemberName,
    /// `host:port` of its gRPC services.
    pub address: String,
    /// Increases with every registration under the name.
    pub incarnation: u64,
    /// Version of its program; empty if unknown.
    pub version: String,
}

/// The members at an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberView {
    /// Owner of each hash slot.
    pub map: Arc<ShardMap>,
    /// Members in the order of the map.
    pub members: Vec<Member>,
}

/// The list of members; see the module.
#[derive(Clone, Debug)]
pub struct MemberList {
    /// All entries, which may be more than a map has.
    entries: BTreeMap<MemberName, Member>,
    view: Arc<MemberView>,
}

impl MemberView {
    /// The member with this name.
    pub fn find(&self, name: &MemberName) -> Option<&Member> {
        self.map.position(name).map(|at| &self.members[usize::from(at.0)])
    }

    /// Incarnation of the member with this name.
    pub fn incarnation(&self, name: &MemberName) -> Option<u64> {
        self.find(name).map(|member| member.incarnation)
    }
}

impl Default for MemberList {
    fn default() -> MemberList {
        let map = ShardMap::new(Epoch(0), []).expect("an empty list is valid");
        let view = MemberView { map: Arc::new(map), members: Vec::new() };
        MemberList { entries: BTreeMap::new(), view: Arc::new(view) }
    }
}

impl MemberList {
    /// The members as last published; an empty list before the first update.
    pub fn view(&self) -> &Arc<MemberView> {
        &self.view
    }

    /// Applies an update at a revision. Returns the new view if it differs from the last one. `map` computes the
    /// map of at most [`MEMBERS_MAX`] members, in the order of their names.
    pub fn apply(
        &mut self,
        revision: u64,
        update: RecordUpdate<MemberName, Member>,
        map: impl FnOnce(Epoch, Vec<MemberName>) -> Arc<ShardMap>,
    ) -> Option<&Arc<MemberView>> {
        update.apply_to(&mut self.entries);
        let listed = || self.entries.values().take(MEMBERS_MAX);
        if self.view.members.iter().eq(listed()) {
            return None;
        }
        let map = map(Epoch(revision), listed().map(|member| member.name.clone()).collect());
        self.view = Arc::new(MemberView { map, members: listed().cloned().collect() });
        Some(&self.view)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record_watch::RecordChange;

    fn member(name: &str, incarnation: u64) -> (MemberName, Option<Member>) {
        let name = MemberName::new(name).expect("a valid name");
        let address = format!("{}:1", name.as_str());
        (name.clone(), Some(Member { name, address, incarnation, version: String::new() }))
    }

    fn map(epoch: Epoch, names: Vec<MemberName>) -> Arc<ShardMap> {
        Arc::new(ShardMap::new(epoch, names).expect("a valid map"))
    }

    #[test]
    fn each_changed_list_makes_a_map_under_its_revision() {
        let mut list = MemberList::default();
        assert_eq!(list.view().map.epoch(), Epoch(0));
        let all = || RecordUpdate::All(vec![member("b", 5), member("a", 4)]);
        let view = list.apply(6, all(), map).expect("a new list").clone();
        assert_eq!((view.map.epoch(), view.map.members().len()), (Epoch(6), 2));
        let name = MemberName::new("b").expect("a valid name");
        assert_eq!((view.incarnation(&name), view.members[1].name.clone()), (Some(5), name.clone()));
        assert_eq!(list.apply(7, all(), map), None, "the same list");
        let changes = vec![RecordChange::Deleted(name.clone(), 8)];
        let view = list.apply(8, RecordUpdate::Changes(changes), map).expect("a new list");
        assert_eq!((view.map.epoch(), view.find(&name)), (Epoch(8), None));
        let (name, again) = member("b", 9);
        let changes = vec![RecordChange::Put(name, again)];
        assert!(list.apply(9, RecordUpdate::Changes(changes), map).is_some(), "another incarnation");
    }

    #[test]
    fn members_beyond_the_limit_have_no_place() {
        let names = (0..MEMBERS_MAX + 2).map(|number| member(&format!("m{number:05}"), 1));
        let mut list = MemberList::default();
        let view = list.apply(1, RecordUpdate::All(names.collect()), map).expect("a new list");
        assert_eq!(view.members.len(), MEMBERS_MAX);
        let first = MemberName::new("m00000").expect("a valid name");
        let changes = vec![RecordChange::Deleted(first, 2)];
        let view = list.apply(2, RecordUpdate::Changes(changes), map).expect("a new list");
        assert_eq!(view.members.len(), MEMBERS_MAX, "the next one takes the place");
    }
}
