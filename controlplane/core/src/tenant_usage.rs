//! Reported usage of the tenants in this member's hash slots, with or without a budget.
//!
//! Nodes report about once a second. A report is valid while three things stay the same: the member list
//! (under another list, other members own some tenants), this member's registration, and the node's
//! registration. After a start, or a change of its slots, a member has no valid reports and lists the nodes
//! as unreported. So a caller that adds up usage can detect an incomplete sum.
//!
//! Absent nodes are not counted. Nodes that are absent from the start are waited for, as ledgers do.
//!
//! Memory: a node's report of 100 tenants takes about 12 KB, so 1,000 nodes take 12 MB over all members.
//!
//! Budgets and grants are in [`crate::ledgers`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_policy::{Amounts, Epoch, NodeId, TenantName, Tick};

use crate::ledgers::{KnownNode, MemberPlace, Presence};

/// The last reports of all nodes.
#[derive(Debug, Default)]
pub struct UsageTable {
    term: Option<MapTerm>,
    last_reports: BTreeMap<NodeId, LastReport>,
}

/// Registration and member list for which reports are valid.
#[derive(Clone, Copy, Debug)]
struct MapTerm {
    /// Incarnation of this member's registration.
    incarnation: u64,
    /// Digest of the member list.
    digest: u64,
    started: Tick,
}

/// The last report of a node.
#[derive(Debug)]
struct LastReport {
    epoch: Epoch,
    tenants: BTreeMap<TenantName, UsageAmounts>,
}

/// Usage of one tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageAmounts {
    /// Bytes, as counted by budgets.
    pub used: Amounts,
    /// Slots of DRAM and NVMe, including those being filled; `None` if a node with usage does not report
    /// them.
    pub blocks: Option<Amounts>,
}

/// A tenant in a node's report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportedUsage {
    /// Usage, if this member owns the tenant's slot.
    Owned(TenantName, UsageAmounts),
    /// The node considers another member the owner.
    Elsewhere(TenantName),
}

/// Total usage of tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageSummary {
    /// Usage of the requested tenants that this member owns, in request order.
    pub tenants: Vec<(TenantName, UsageAmounts)>,
    /// Nodes without a valid report; all sums may be too small.
    pub unreported: Vec<NodeId>,
    /// Number of absent nodes, which are not counted.
    pub absent: usize,
}

impl UsageAmounts {
    /// Usage of a tenant without bytes.
    const NOTHING: UsageAmounts =
        UsageAmounts { used: Amounts { dram: 0, nvme: 0 }, blocks: Some(Amounts { dram: 0, nvme: 0 }) };

    fn plus(self, other: UsageAmounts) -> UsageAmounts {
        let plus = |a: Amounts, b: Amounts| Amounts {
            dram: a.dram.saturating_add(b.dram),
            nvme: a.nvme.saturating_add(b.nvme),
        };
        // Without bytes there are no slots, whether or not the node reports them.
        let blocks =
            |usage: UsageAmounts| usage.blocks.or((usage.used == Amounts::default()).then(Amounts::default));
        let blocks = blocks(self).zip(blocks(other)).map(|(a, b)| plus(a, b));
        UsageAmounts { used: plus(self.used, other.used), blocks }
    }
}

impl UsageTable {
    /// Stores a node's report, made under the member list of `place`.
    pub fn report(
        &mut self,
        now: Tick,
        place: &MemberPlace<'_>,
        (node, epoch): (NodeId, Epoch),
        reported: Vec<ReportedUsage>,
    ) {
        self.start(now, place);
        let differs = |reported: &ReportedUsage| matches!(reported, ReportedUsage::Elsewhere(tenant) if place.owns(tenant));
        if reported.iter().any(differs) {
            // The node reports under another list, so it may also hold tenants that the report omits.
            self.last_reports.remove(&node);
            return;
        }
        let own = reported.into_iter().filter_map(|reported| match reported {
            ReportedUsage::Owned(tenant, usage) if place.owns(&tenant) => Some((tenant, usage)),
            ReportedUsage::Owned(..) | ReportedUsage::Elsewhere(_) => None,
        });
        self.last_reports.insert(node, LastReport { epoch, tenants: own.collect() });
    }

    /// Sums the usage of tenants over the registered nodes. Absent nodes are waited for up to `patience`.
    pub fn list(
        &mut self,
        now: Tick,
        place: &MemberPlace<'_>,
        (nodes, patience): (&[KnownNode], Duration),
        tenants: impl IntoIterator<Item = TenantName>,
    ) -> UsageSummary {
        let started = self.start(now, place);
        let numbers: BTreeSet<NodeId> = nodes.iter().map(|(node, ..)| *node).collect();
        self.last_reports.retain(|node, _| numbers.contains(node));
        let mut listed = UsageSummary::default();
        let mut counted: Vec<&LastReport> = Vec::new();
        for (node, epoch, presence) in nodes {
            match self.last_reports.get(node).filter(|report| report.epoch == *epoch) {
                Some(report) if *presence == Presence::Registered => counted.push(report),
                None if *presence == Presence::Registered || now.since(started) < patience => {
                    listed.unreported.push(*node);
                }
                Some(_) | None => listed.absent += 1,
            }
        }
        let own = tenants.into_iter().filter(|tenant| place.owns(tenant));
        listed.tenants = own
            .map(|tenant| {
                let usage = counted.iter().filter_map(|report| report.tenants.get(&tenant));
                let usage = usage.fold(UsageAmounts::NOTHING, |sum, usage| sum.plus(*usage));
                (tenant, usage)
            })
            .collect();
        listed
    }

    /// Start of the current term; a change of member list or registration starts a new one.
    fn start(&mut self, now: Tick, place: &MemberPlace<'_>) -> Tick {
        let (incarnation, digest) = (place.incarnation, place.map.digest());
        let same = |term: &MapTerm| (term.incarnation, term.digest) == (incarnation, digest);
        if let Some(term) = self.term.filter(same) {
            return term.started;
        }
        self.last_reports.clear();
        self.term = Some(MapTerm { incarnation, digest, started: now });
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

    fn usage(bytes: u64, blocks: u64) -> UsageAmounts {
        UsageAmounts { used: Amounts::both(bytes), blocks: Some(Amounts::both(blocks)) }
    }

    fn reported(name: &str, bytes: u64, blocks: u64) -> Vec<ReportedUsage> {
        vec![ReportedUsage::Owned(tenant(name), usage(bytes, blocks))]
    }

    fn here(node: u16, epoch: u64) -> KnownNode {
        (NodeId(node), Epoch(epoch), Presence::Registered)
    }

    fn absent(node: u16, epoch: u64) -> KnownNode {
        (NodeId(node), Epoch(epoch), Presence::Absent)
    }

    fn at(seconds: u64) -> Tick {
        Tick(0).after(Duration::from_secs(seconds))
    }

    /// A single member, which owns all tenants.
    struct SingleMember {
        map: ShardMap,
        name: MemberName,
        incarnation: u64,
        table: UsageTable,
    }

    impl SingleMember {
        fn new() -> SingleMember {
            SingleMember { map: map(&["m"]), name: member("m"), incarnation: 1, table: UsageTable::default() }
        }

        fn send_report(&mut self, (node, epoch): (u16, u64), reported: Vec<ReportedUsage>) {
            let SingleMember { map, name, incarnation, table } = self;
            let place = MemberPlace { map, name, incarnation: *incarnation };
            table.report(at(0), &place, (NodeId(node), Epoch(epoch)), reported);
        }

        fn list(&mut self, second: u64, nodes: &[KnownNode]) -> (UsageAmounts, Vec<u16>, usize) {
            let SingleMember { map, name, incarnation, table } = self;
            let place = MemberPlace { map, name, incarnation: *incarnation };
            let listed = table.list(at(second), &place, (nodes, PATIENCE), [tenant("t")]);
            let [(_, usage)] = listed.tenants.as_slice() else {
                panic!("the member owns all slots: {listed:?}")
            };
            (*usage, listed.unreported.iter().map(|node| node.0).collect(), listed.absent)
        }
    }

    #[test]
    fn sums_the_last_reports_of_all_nodes() {
        let mut only = SingleMember::new();
        only.send_report((1, 1), reported("t", 10, 1));
        only.send_report((1, 1), reported("t", 30, 3));
        only.send_report((2, 1), reported("t", 12, 2));
        only.send_report((3, 1), reported("other", 99, 9));
        assert_eq!(only.list(0, &[here(1, 1), here(2, 1), here(3, 1)]), (usage(42, 5), vec![], 0));
        // It has no bytes left, so its report omits the tenant.
        only.send_report((1, 1), vec![]);
        assert_eq!(only.list(0, &[here(1, 1), here(2, 1), here(3, 1)]), (usage(12, 2), vec![], 0));
    }

    #[test]
    fn lists_nodes_without_a_report_in_their_current_registration() {
        let mut only = SingleMember::new();
        only.send_report((1, 1), reported("t", 10, 1));
        let nodes = [here(1, 1), here(2, 1)];
        assert_eq!(only.list(0, &nodes), (usage(10, 1), vec![2], 0));
        // A registered node is waited for without limit.
        assert_eq!(only.list(100, &nodes), (usage(10, 1), vec![2], 0));
        // The usage under a newer registration may differ.
        assert_eq!(only.list(0, &[here(1, 2)]), (usage(0, 0), vec![1], 0));
    }

    #[test]
    fn absent_nodes_are_expected_for_a_while_and_then_not_counted() {
        let mut only = SingleMember::new();
        only.send_report((1, 1), reported("t", 10, 1));
        let nodes = [here(1, 1), absent(2, 7)];
        assert_eq!(only.list(9, &nodes), (usage(10, 1), vec![2], 0));
        assert_eq!(only.list(10, &nodes), (usage(10, 1), vec![], 1));
        assert_eq!(only.list(10, &[absent(1, 1)]), (usage(0, 0), vec![], 1), "forgotten after its report");
    }

    #[test]
    fn a_change_of_member_list_or_registration_discards_all_reports() {
        let mut only = SingleMember::new();
        let nodes = [here(1, 1)];
        only.send_report((1, 1), reported("t", 10, 1));
        only.incarnation = 2;
        assert_eq!(only.list(0, &nodes), (usage(0, 0), vec![1], 0));
        only.send_report((1, 1), reported("t", 10, 1));
        assert_eq!(only.list(0, &nodes), (usage(10, 1), vec![], 0));
        let names = (0..100).map(|number| format!("other-{number}"));
        let own = |other: &String| {
            let map = map(&["m", other]);
            map.owner(tenant("t").hash_slot()) == map.position(&member("m"))
        };
        let other = names.into_iter().find(own).expect("about half of the names keep the slot here");
        only.map = map(&["m", &other]);
        assert_eq!(
            only.list(0, &nodes),
            (usage(0, 0), vec![1], 0),
            "reported other tenants to another member"
        );
    }

    #[test]
    fn discards_the_report_of_a_node_that_considers_another_member_the_owner() {
        let mut only = SingleMember::new();
        only.send_report((1, 1), reported("t", 10, 1));
        only.send_report((1, 1), vec![ReportedUsage::Elsewhere(tenant("t"))]);
        assert_eq!(only.list(0, &[here(1, 1)]), (usage(0, 0), vec![1], 0));
    }

    #[test]
    fn omits_slots_if_a_node_with_usage_does_not_report_them() {
        let mut only = SingleMember::new();
        only.send_report((1, 1), reported("t", 10, 1));
        only.send_report(
            (2, 1),
            vec![ReportedUsage::Owned(tenant("t"), UsageAmounts { used: Amounts::both(0), blocks: None })],
        );
        assert_eq!(only.list(0, &[here(1, 1), here(2, 1)]).0, usage(10, 1));
        only.send_report(
            (2, 1),
            vec![ReportedUsage::Owned(tenant("t"), UsageAmounts { used: Amounts::both(5), blocks: None })],
        );
        let sum = only.list(0, &[here(1, 1), here(2, 1)]).0;
        assert_eq!(sum, UsageAmounts { used: Amounts::both(15), blocks: None });
    }

    #[test]
    fn omits_tenants_of_other_members() {
        let map = map(&["a", "b"]);
        let names: Vec<TenantName> = (0..64).map(|number| tenant(&format!("t{number}"))).collect();
        let of = |own: &MemberName| {
            let place = MemberPlace { map: &map, name: own, incarnation: 1 };
            let nodes: &[KnownNode] = &[];
            let listed = UsageTable::default().list(at(0), &place, (nodes, PATIENCE), names.clone());
            listed.tenants.into_iter().map(|(name, _)| name).collect::<BTreeSet<TenantName>>()
        };
        let (a, b) = (of(&member("a")), of(&member("b")));
        assert!(!a.is_empty() && !b.is_empty() && a.is_disjoint(&b));
        assert_eq!(a.len() + b.len(), names.len());
    }
}
