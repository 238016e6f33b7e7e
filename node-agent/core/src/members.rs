//! The members of the control plane as this agent knows them: a link to each, and the owner of each hash slot.
//!
//! ```text
//!                 in the list               left the map            not back within the grace
//!   (no link) ──────────────────► in use ◄─────────────────► grace ──────────────────► closed
//!                                   └──────────── another address ────────────────────────┘
//! ```
//!
//! A member that returns soon (a late lease, an outage of the store) still has this node's registration and
//! inventory. So its link is kept for a while after it has left the map.
//!
//! Pure: the caller receives the lists ([`crate::home`] decides which are applied), opens and closes links, and
//! measures the grace.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reprise_policy::Epoch;
use reprise_policy::shards::{MemberIndex, MemberName, ShardMap};

/// Time for which a link is kept after its member has left the map.
pub const LINK_GRACE: Duration = Duration::from_secs(10);

/// A shard map with the link of each member. `L` identifies a link.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes<L> {
    map: Arc<ShardMap>,
    /// Links in the order of the map.
    links: Vec<L>,
}

/// The members and their links; see the module.
#[derive(Clone, Debug)]
pub struct Members<L> {
    /// `None` before the first map.
    routes: Option<Arc<Routes<L>>>,
    /// Links to all members of the map, and to those that have just left it.
    links: BTreeMap<MemberName, MemberLink<L>>,
}

#[derive(Clone, Debug)]
struct MemberLink<L> {
    address: String,
    link: L,
}

/// Links that a new map no longer uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusedLinks<L> {
    /// Their members have other addresses now: close them.
    pub replaced: Vec<L>,
    /// Their members are not in the map: call [`Members::end_grace`] for each after [`LINK_GRACE`].
    pub left: Vec<L>,
}

impl<L> Routes<L> {
    /// Returns the map of hash slots.
    pub fn map(&self) -> &ShardMap {
        &self.map
    }

    /// Returns the epoch of the map.
    pub fn epoch(&self) -> Epoch {
        self.map.epoch()
    }

    /// Returns the digest of the members in the map.
    pub fn digest(&self) -> u64 {
        self.map.digest()
    }

    /// Returns the links in the order of the map.
    pub fn links(&self) -> &[L] {
        &self.links
    }

    /// Returns the link to a member of the map.
    pub fn link(&self, member: MemberIndex) -> &L {
        &self.links[usize::from(member.0)]
    }

    /// Returns the link to the owner of a hash slot.
    pub fn owner(&self, slot: u16) -> Option<&L> {
        self.map.owner(slot).map(|owner| self.link(owner))
    }
}

impl<L> Default for Members<L> {
    fn default() -> Members<L> {
        Members { routes: None, links: BTreeMap::new() }
    }
}

impl<L: Clone + PartialEq> Members<L> {
    /// Returns the current map with its links; `None` before the first one.
    pub fn routes(&self) -> Option<&Arc<Routes<L>>> {
        self.routes.as_ref()
    }

    /// Returns the epoch of the current map.
    pub fn epoch(&self) -> Option<Epoch> {
        self.routes.as_ref().map(|routes| routes.epoch())
    }

    /// Returns the links to all members, in the order of their names.
    pub fn links(&self) -> impl Iterator<Item = &L> {
        self.links.values().map(|known| &known.link)
    }

    /// Applies a list of members with their addresses. `open` creates the link to a new member or address; a
    /// member for which it returns `None` is left out. `map` computes the map of the members.
    ///
    /// Returns `None` if nothing has changed.
    ///
    /// # Errors
    /// The error of `map`; nothing has changed then, and links that were opened are not used.
    pub fn apply<E>(
        &mut self,
        list: impl IntoIterator<Item = (MemberName, String)>,
        mut open: impl FnMut(&MemberName, &str) -> Option<L>,
        map: impl FnOnce(Vec<MemberName>) -> Result<Arc<ShardMap>, E>,
    ) -> Result<Option<UnusedLinks<L>>, E> {
        let mut in_map = BTreeMap::new();
        for (name, address) in list {
            let known = self.links.get(&name).filter(|known| known.address == address);
            let link = known.map_or_else(|| open(&name, &address), |known| Some(known.link.clone()));
            in_map.extend(link.map(|link| (name, MemberLink { address, link })));
        }
        let map = map(in_map.keys().cloned().collect())?;
        let routes = Routes { map, links: in_map.values().map(|of| of.link.clone()).collect() };
        if self.routes.as_deref() == Some(&routes) {
            return Ok(None);
        }
        self.routes = Some(Arc::new(routes));
        let mut unused = UnusedLinks { replaced: Vec::new(), left: Vec::new() };
        for (name, known) in std::mem::replace(&mut self.links, in_map) {
            match self.links.get(&name) {
                Some(used) if used.link == known.link => {}
                Some(_) => unused.replaced.push(known.link),
                None => {
                    unused.left.push(known.link.clone());
                    self.links.insert(name, known);
                }
            }
        }
        Ok(Some(unused))
    }

    /// Ends the grace of a link. Returns whether its member has not returned; then close the link.
    pub fn end_grace(&mut self, link: &L) -> bool {
        if self.routes.as_ref().is_some_and(|routes| routes.links.contains(link)) {
            return false;
        }
        let before = self.links.len();
        self.links.retain(|_, known| known.link != *link);
        self.links.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applies a list of `name@address` with links that are numbered in the order of their creation.
    fn apply(members: &mut Members<u32>, opened: &mut u32, list: &[&str]) -> Option<UnusedLinks<u32>> {
        let list = list.iter().map(|text| {
            let (name, address) = text.split_once('@').expect("name@address");
            (MemberName::new(name).expect("a valid name"), address.to_owned())
        });
        let open = |_: &MemberName, address: &str| {
            *opened += u32::from(address != "invalid");
            (address != "invalid").then_some(*opened)
        };
        members.apply(list, open, |names| ShardMap::new(Epoch(1), names).map(Arc::new)).expect("a valid map")
    }

    fn unused(replaced: &[u32], left: &[u32]) -> Option<UnusedLinks<u32>> {
        Some(UnusedLinks { replaced: replaced.to_vec(), left: left.to_vec() })
    }

    fn links(members: &Members<u32>) -> Vec<u32> {
        members.routes().expect("a map").links().to_vec()
    }

    #[test]
    fn each_member_has_one_link_and_owns_its_slots() {
        let (mut members, mut opened) = (Members::default(), 0);
        assert_eq!(apply(&mut members, &mut opened, &["b@1", "a@1"]), unused(&[], &[]));
        assert_eq!((links(&members), members.epoch()), (vec![2, 1], Some(Epoch(1))), "in the order of names");
        assert_eq!(apply(&mut members, &mut opened, &["a@1", "b@1"]), None, "the same list");
        let routes = members.routes().expect("a map");
        let owner = routes.map().owner(7).expect("two members");
        assert_eq!(routes.owner(7), Some(routes.link(owner)));
        assert_eq!(apply(&mut members, &mut opened, &["a@1", "b@1", "c@invalid"]), None, "c is left out");
    }

    #[test]
    fn link_of_a_member_that_returns_within_the_grace_is_used_again() {
        let (mut members, mut opened) = (Members::default(), 0);
        apply(&mut members, &mut opened, &["a@1", "b@1"]);
        assert_eq!(apply(&mut members, &mut opened, &["a@1"]), unused(&[], &[2]));
        assert_eq!(members.links().copied().collect::<Vec<_>>(), [1, 2], "in its grace");
        assert_eq!(apply(&mut members, &mut opened, &["a@1", "b@1"]), unused(&[], &[]));
        assert!(!members.end_grace(&2), "it is used");
        assert_eq!(apply(&mut members, &mut opened, &["a@1"]), unused(&[], &[2]));
        assert!(members.end_grace(&2) && !members.end_grace(&2));
        apply(&mut members, &mut opened, &["a@1", "b@1"]);
        assert_eq!(links(&members), [1, 3], "closed links are not used again");
    }

    #[test]
    fn link_to_a_former_address_is_closed_at_once() {
        let (mut members, mut opened) = (Members::default(), 0);
        apply(&mut members, &mut opened, &["a@1", "b@1"]);
        assert_eq!(apply(&mut members, &mut opened, &["a@2", "b@1"]), unused(&[1], &[]));
        assert_eq!(links(&members), [3, 2]);
        apply(&mut members, &mut opened, &["a@2"]);
        assert_eq!(apply(&mut members, &mut opened, &["a@2", "b@2"]), unused(&[2], &[]), "in its grace");
        assert!(!members.end_grace(&2), "it is closed already");
    }

    #[test]
    fn invalid_map_changes_nothing() {
        let (mut members, mut opened) = (Members::default(), 0);
        apply(&mut members, &mut opened, &["a@1"]);
        let list = [(MemberName::new("b").expect("a valid name"), "1".to_owned())];
        assert_eq!(members.apply(list, |_, _| Some(9), |_| Err("too many")), Err("too many"));
        assert_eq!((links(&members), members.links().count()), (vec![1], 1));
    }
}
