//! What nodes hold of the tenants whose hash slot is this member's, with a budget or without.
//!
//! Every node says it about once a second. What it said last counts as long as three things are as they were then: the list of members,
//! since by another one some tenants were another member's; this member's registration; and the node's. So a member that has begun,
//! or whose slots are others now, has heard nobody, and says so: whoever adds up has no sum that is too small without knowing it.
//!
//! Nodes that are away are not counted. Those that were away from the beginning are expected for a while, as ledgers expect them.
//!
//! Memory: a node's report of 100 tenants is about 12 KB, so 1,000 nodes are 12 MB over all members.
//!
//! Deliberately absent: budgets and orders ([`crate::ledgers`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_policy::{Epoch, NodeId, TenantName, Tick};

use crate::budgets::Amounts;
use crate::ledgers::{KnownNode, OwnPlace, Presence};

/// See the module.
#[derive(Debug, Default)]
pub struct Holdings {
    term: Option<Term>,
    heard: BTreeMap<NodeId, Heard>,
}

/// How long what was heard counts.
#[derive(Clone, Copy, Debug)]
struct Term {
    /// Of this member.
    incarnation: u64,
    /// Of the list of members.
    digest: u64,
    begun: Tick,
}

/// A node's last report.
#[derive(Debug)]
struct Heard {
    epoch: Epoch,
    tenants: BTreeMap<TenantName, Held>,
}

/// What a tenant holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Bytes, as budgets count them.
    pub used: Amounts,
    /// Slots of each kind of room, those that are being filled included; `None` when somebody who holds something does not say.
    pub blocks: Option<Amounts>,
}

/// What a node says of a tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantSaid {
    /// To the owner of its slot.
    Held(TenantName, Held),
    /// That another is the owner.
    Elsewhere(TenantName),
}

/// What tenants hold together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldTogether {
    /// Of those asked for the ones of this member, in their order, also where they hold nothing.
    pub tenants: Vec<(TenantName, Held)>,
    /// Nodes that have not said yet what they hold: all sums may be too small.
    pub unheard: Vec<NodeId>,
    /// Nodes that are away and are not counted.
    pub away: usize,
}

impl Held {
    /// Of a tenant that holds nothing.
    const NOTHING: Held =
        Held { used: Amounts { dram: 0, nvme: 0 }, blocks: Some(Amounts { dram: 0, nvme: 0 }) };

    fn plus(self, other: Held) -> Held {
        let plus = |a: Amounts, b: Amounts| Amounts {
            dram: a.dram.saturating_add(b.dram),
            nvme: a.nvme.saturating_add(b.nvme),
        };
        // Who holds nothing need not say in how many slots.
        let blocks = |held: Held| held.blocks.or((held.used == Amounts::default()).then(Amounts::default));
        let blocks = blocks(self).zip(blocks(other)).map(|(a, b)| plus(a, b));
        Held { used: plus(self.used, other.used), blocks }
    }
}

impl Holdings {
    /// A node has reported, by the list of members that `place` is of.
    pub fn report(
        &mut self,
        now: Tick,
        place: &OwnPlace<'_>,
        (node, epoch): (NodeId, Epoch),
        told: Vec<TenantSaid>,
    ) {
        self.begin(now, place);
        let differs = |told: &TenantSaid| matches!(told, TenantSaid::Elsewhere(tenant) if place.owns(tenant));
        if told.iter().any(differs) {
            // It reports by another list, so of tenants that it does not name it may hold something too.
            self.heard.remove(&node);
            return;
        }
        let own = told.into_iter().filter_map(|told| match told {
            TenantSaid::Held(tenant, held) if place.owns(&tenant) => Some((tenant, held)),
            TenantSaid::Held(..) | TenantSaid::Elsewhere(_) => None,
        });
        self.heard.insert(node, Heard { epoch, tenants: own.collect() });
    }

    /// What these tenants hold on the nodes that are here; nodes that do not come are waited for as long as `patience`.
    pub fn list(
        &mut self,
        now: Tick,
        place: &OwnPlace<'_>,
        (nodes, patience): (&[KnownNode], Duration),
        tenants: impl IntoIterator<Item = TenantName>,
    ) -> HeldTogether {
        let begun = self.begin(now, place);
        let numbers: BTreeSet<NodeId> = nodes.iter().map(|(node, ..)| *node).collect();
        self.heard.retain(|node, _| numbers.contains(node));
        let mut listed = HeldTogether::default();
        let mut counted: Vec<&Heard> = Vec::new();
        for (node, epoch, presence) in nodes {
            match self.heard.get(node).filter(|heard| heard.epoch == *epoch) {
                Some(heard) if *presence == Presence::Here => counted.push(heard),
                None if *presence == Presence::Here || now.since(begun) < patience => {
                    listed.unheard.push(*node);
                }
                Some(_) | None => listed.away += 1,
            }
        }
        let own = tenants.into_iter().filter(|tenant| place.owns(tenant));
        listed.tenants = own
            .map(|tenant| {
                let held = counted.iter().filter_map(|heard| heard.tenants.get(&tenant));
                let held = held.fold(Held::NOTHING, |sum, held| sum.plus(*held));
                (tenant, held)
            })
            .collect();
        listed
    }

    /// When it began to hear by this list of members; anew when it is another one.
    fn begin(&mut self, now: Tick, place: &OwnPlace<'_>) -> Tick {
        let (incarnation, digest) = (place.incarnation, place.map.digest());
        let same = |term: &Term| (term.incarnation, term.digest) == (incarnation, digest);
        if let Some(term) = self.term.filter(same) {
            return term.begun;
        }
        self.heard.clear();
        self.term = Some(Term { incarnation, digest, begun: now });
        now
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::shards::{MemberName, ShardMap};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn member(name: &str) -> MemberName {
        MemberName::new(name).expect("a name")
    }

    fn map(names: &[&str]) -> ShardMap {
        ShardMap::new(Epoch(1), names.iter().map(|name| member(name))).expect("members")
    }

    fn tenant(name: &str) -> TenantName {
        name.parse().expect("a name")
    }

    fn held(bytes: u64, blocks: u64) -> Held {
        Held { used: Amounts::both(bytes), blocks: Some(Amounts::both(blocks)) }
    }

    fn told(name: &str, bytes: u64, blocks: u64) -> Vec<TenantSaid> {
        vec![TenantSaid::Held(tenant(name), held(bytes, blocks))]
    }

    fn here(node: u16, epoch: u64) -> KnownNode {
        (NodeId(node), Epoch(epoch), Presence::Here)
    }

    fn away(node: u16, epoch: u64) -> KnownNode {
        (NodeId(node), Epoch(epoch), Presence::Away)
    }

    fn at(seconds: u64) -> Tick {
        Tick(0).after(Duration::from_secs(seconds))
    }

    /// One member, so that every tenant is its own.
    struct Only {
        map: ShardMap,
        name: MemberName,
        incarnation: u64,
        holdings: Holdings,
    }

    impl Only {
        fn new() -> Only {
            Only { map: map(&["m"]), name: member("m"), incarnation: 1, holdings: Holdings::default() }
        }

        fn say(&mut self, (node, epoch): (u16, u64), told: Vec<TenantSaid>) {
            let Only { map, name, incarnation, holdings } = self;
            let place = OwnPlace { map, name, incarnation: *incarnation };
            holdings.report(at(0), &place, (NodeId(node), Epoch(epoch)), told);
        }

        fn list(&mut self, second: u64, nodes: &[KnownNode]) -> (Held, Vec<u16>, usize) {
            let Only { map, name, incarnation, holdings } = self;
            let place = OwnPlace { map, name, incarnation: *incarnation };
            let listed = holdings.list(at(second), &place, (nodes, PATIENCE), [tenant("t")]);
            let [(_, held)] = listed.tenants.as_slice() else { panic!("it has all slots: {listed:?}") };
            (*held, listed.unheard.iter().map(|node| node.0).collect(), listed.away)
        }
    }

    #[test]
    fn what_nodes_said_last_is_added_up_whether_or_not_there_is_a_budget() {
        let mut only = Only::new();
        only.say((1, 1), told("t", 10, 1));
        only.say((1, 1), told("t", 30, 3));
        only.say((2, 1), told("t", 12, 2));
        only.say((3, 1), told("other", 99, 9));
        assert_eq!(only.list(0, &[here(1, 1), here(2, 1), here(3, 1)]), (held(42, 5), vec![], 0));
        // It holds nothing any more, and does not name it.
        only.say((1, 1), vec![]);
        assert_eq!(only.list(0, &[here(1, 1), here(2, 1), here(3, 1)]), (held(12, 2), vec![], 0));
    }

    #[test]
    fn a_node_that_has_not_said_anything_in_its_registration_is_named() {
        let mut only = Only::new();
        only.say((1, 1), told("t", 10, 1));
        let nodes = [here(1, 1), here(2, 1)];
        assert_eq!(only.list(0, &nodes), (held(10, 1), vec![2], 0));
        // However long it takes: it is here.
        assert_eq!(only.list(100, &nodes), (held(10, 1), vec![2], 0));
        // A newer registration may hold less or more.
        assert_eq!(only.list(0, &[here(1, 2)]), (held(0, 0), vec![1], 0));
    }

    #[test]
    fn who_is_away_is_expected_for_a_while_and_then_not_counted() {
        let mut only = Only::new();
        only.say((1, 1), told("t", 10, 1));
        let nodes = [here(1, 1), away(2, 7)];
        assert_eq!(only.list(9, &nodes), (held(10, 1), vec![2], 0));
        assert_eq!(only.list(10, &nodes), (held(10, 1), vec![], 1));
        assert_eq!(
            only.list(10, &[away(1, 1)]),
            (held(0, 0), vec![], 1),
            "it was forgotten after its report"
        );
    }

    #[test]
    fn another_list_of_members_or_another_registration_begins_with_nothing_heard() {
        let mut only = Only::new();
        let nodes = [here(1, 1)];
        only.say((1, 1), told("t", 10, 1));
        only.incarnation = 2;
        assert_eq!(only.list(0, &nodes), (held(0, 0), vec![1], 0));
        only.say((1, 1), told("t", 10, 1));
        assert_eq!(only.list(0, &nodes), (held(10, 1), vec![], 0));
        let names = (0..100).map(|number| format!("other-{number}"));
        let own = |other: &String| {
            let map = map(&["m", other]);
            map.owner(tenant("t").hash_slot()) == map.position(&member("m"))
        };
        let other = names.into_iter().find(own).expect("half of them leave it the slot");
        only.map = map(&["m", &other]);
        assert_eq!(only.list(0, &nodes), (held(0, 0), vec![1], 0), "it had named others to another member");
    }

    #[test]
    fn a_node_that_takes_another_member_for_the_owner_is_not_heard() {
        let mut only = Only::new();
        only.say((1, 1), told("t", 10, 1));
        only.say((1, 1), vec![TenantSaid::Elsewhere(tenant("t"))]);
        assert_eq!(only.list(0, &[here(1, 1)]), (held(0, 0), vec![1], 0));
    }

    #[test]
    fn slots_are_not_counted_when_somebody_who_holds_something_does_not_say_how_many() {
        let mut only = Only::new();
        only.say((1, 1), told("t", 10, 1));
        only.say((2, 1), vec![TenantSaid::Held(tenant("t"), Held { used: Amounts::both(0), blocks: None })]);
        assert_eq!(only.list(0, &[here(1, 1), here(2, 1)]).0, held(10, 1));
        only.say((2, 1), vec![TenantSaid::Held(tenant("t"), Held { used: Amounts::both(5), blocks: None })]);
        let sum = only.list(0, &[here(1, 1), here(2, 1)]).0;
        assert_eq!(sum, Held { used: Amounts::both(15), blocks: None });
    }

    #[test]
    fn tenants_of_other_members_are_not_answered_for() {
        let map = map(&["a", "b"]);
        let names: Vec<TenantName> = (0..64).map(|number| tenant(&format!("t{number}"))).collect();
        let of = |own: &MemberName| {
            let place = OwnPlace { map: &map, name: own, incarnation: 1 };
            let nodes: &[KnownNode] = &[];
            let listed = Holdings::default().list(at(0), &place, (nodes, PATIENCE), names.clone());
            listed.tenants.into_iter().map(|(name, _)| name).collect::<BTreeSet<TenantName>>()
        };
        let (a, b) = (of(&member("a")), of(&member("b")));
        assert!(!a.is_empty() && !b.is_empty() && a.is_disjoint(&b));
        assert_eq!(a.len() + b.len(), names.len());
    }
}
