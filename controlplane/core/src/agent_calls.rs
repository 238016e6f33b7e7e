//! Reports of nodes, the ledgers of tenants, and placement requests: the order in which a member handles them.
//!
//! A report first updates the node, then the tenants that this member owns, and is answered with grants, the mode and a
//! move. A placement request gets the nodes before the replicas of its keys, and charges the chosen nodes at its end.
//!
//! Pure: the caller locks, and decodes and encodes messages.

use std::time::Duration;

use reprise_policy::placement::{PlacementDecision, PlacementNode, PlacementReason};
use reprise_policy::{Epoch, NodeId, Tick};

use crate::budgets::QuotaGrant;
use crate::ledgers::{KnownNode, MemberPlace, ReportedTenant};
use crate::node_report::NodeReport;
use crate::node_selection::{self, ModeRecord, Modes, RebalanceRound};
use crate::node_table::NodeTable;
use crate::placement_call::{self, PlaceCertainty, PlacementCall};
use crate::rebalance::Move;
use crate::tenant_usage::ReportedUsage;

/// Interval of the updates of the ledgers.
pub const LEDGER_INTERVAL: Duration = Duration::from_secs(1);

/// Access to the parts of a member that answer agents; see the module. No two are locked at once, except nodes with
/// modes, and the moves with each of them.
pub trait AnswerParts {
    /// The books of this member.
    type Books: TenantBooks;

    /// Stores a report in the node table; `false` if the node must register again.
    fn store_report(&mut self, node: NodeId, epoch: Epoch, report: NodeReport) -> bool;

    /// Expires silent nodes, as [`expire`](crate::member_parts::expire) does.
    fn expire(&mut self, now: Tick);

    /// Locks the node table and the modes.
    fn nodes_and_modes<R>(&mut self, act: impl FnOnce(&mut NodeTable, &Modes) -> R) -> R;

    /// Locks the moves between nodes.
    fn moves<R>(&mut self, act: impl FnOnce(&mut Self, &mut RebalanceRound) -> R) -> R;

    /// Calls `act` with this member's place and its books, while the place is certain.
    fn with_place<R>(
        &mut self,
        now: Tick,
        act: impl FnOnce(&MemberPlace<'_>, &mut Self::Books) -> R,
    ) -> Option<R>;

    /// The books, without a certain place.
    fn books(&mut self) -> &mut Self::Books;
}

/// Records about the tenants in this member's slots.
pub trait TenantBooks {
    /// Stores the usage that a node has reported.
    fn store_usage(
        &mut self,
        now: Tick,
        place: &MemberPlace<'_>,
        node: (NodeId, Epoch),
        usage: Vec<ReportedUsage>,
    );

    /// Stores a report in the ledgers; returns the grants that the node has not confirmed. No grants while the budgets
    /// are unknown.
    fn report(
        &mut self,
        place: &MemberPlace<'_>,
        node: (NodeId, Epoch),
        tenants: &[ReportedTenant],
    ) -> Vec<QuotaGrant>;

    /// Updates the ledgers for map, budgets and nodes, and rebalances their grants. `place` is `None` while this
    /// member's place is uncertain.
    fn update(&mut self, now: Tick, place: Option<&MemberPlace<'_>>, nodes: &[KnownNode]);
}

/// A decoded report of a node.
#[derive(Clone, Debug)]
pub struct ReportCall {
    /// The reporting registration.
    pub node: (NodeId, Epoch),
    /// State of the node.
    pub report: NodeReport,
    /// Grants of the tenants, as the node knows them.
    pub tenants: Vec<ReportedTenant>,
    /// Usage of the tenants.
    pub usage: Vec<ReportedUsage>,
    /// Digest of the list of members by which the node has found the owners of tenants.
    pub map_digest: u64,
}

/// The answer to a report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportAnswer {
    /// Grants for the node.
    pub grants: Vec<QuotaGrant>,
    /// Mode of the node; `None` if the node was removed meanwhile.
    pub mode: Option<ModeRecord>,
    /// Move that the node should make.
    pub planned: Option<Move>,
}

/// The beginning of a placement request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementHead {
    /// Node that asks, and its registration.
    pub holder: (NodeId, Epoch),
    /// Why it asks.
    pub reason: PlacementReason,
    /// Bytes of a block's slot.
    pub slot_bytes: u64,
}

/// Handles a report; `None` if the node must register again. Tenants count only if node and member know the same
/// members.
pub fn report(parts: &mut impl AnswerParts, now: Tick, call: ReportCall) -> Option<ReportAnswer> {
    let ReportCall { node, report, tenants, usage, map_digest } = call;
    if !parts.store_report(node.0, node.1, report) {
        return None;
    }
    let grants = parts.with_place(now, |place, books| {
        if !place.accepts_tenants(map_digest) {
            return Vec::new();
        }
        books.store_usage(now, place, node, usage);
        books.report(place, node, &tenants)
    });
    let mode = parts.nodes_and_modes(|nodes, modes| node_selection::send_mode(nodes, modes, node.0));
    let planned = mode.and_then(|_| move_for(parts, now, node.0));
    Some(ReportAnswer { grants: grants.unwrap_or_default(), mode, planned })
}

/// Returns the move that a node should make. One member decides the moves of all nodes.
fn move_for(parts: &mut impl AnswerParts, now: Tick, node: NodeId) -> Option<Move> {
    if !parts.with_place(now, |place, _| place.decides_moves()).unwrap_or_default() {
        return None;
    }
    parts.moves(|parts, round| round.move_for(now, node, || placement_nodes(parts, now)))
}

/// Returns the live nodes that serve peers, as input for placement. Expires silent ones first.
pub fn placement_nodes(parts: &mut impl AnswerParts, now: Tick) -> Vec<PlacementNode> {
    parts.expire(now);
    parts.nodes_and_modes(|nodes, modes| node_selection::placement_nodes(nodes, modes))
}

/// Updates the ledgers of a member, and moves bytes between nodes. Called at the interval [`LEDGER_INTERVAL`].
pub fn update_ledgers(parts: &mut impl AnswerParts, now: Tick) {
    let nodes: Vec<KnownNode> = parts.nodes_and_modes(|nodes, _| nodes.known_nodes().collect());
    let updated = parts.with_place(now, |place, books| books.update(now, Some(place), &nodes));
    if updated.is_none() {
        parts.books().update(now, None, &nodes);
    }
}

/// Begins a placement request; `None` if the holder must register again. Then every key is visited while the member is
/// certain of its place ([`PlacementCall::visit`]), and [`end_placement`] follows.
pub fn begin_placement(
    parts: &mut impl AnswerParts,
    now: Tick,
    head: PlacementHead,
) -> Option<PlacementCall> {
    let PlacementHead { holder: (holder, epoch), reason, slot_bytes } = head;
    if !parts.nodes_and_modes(|nodes, _| nodes.is_registered(holder, epoch)) {
        return None;
    }
    Some(PlacementCall::new(holder, reason, slot_bytes, placement_nodes(parts, now)))
}

/// Ends a placement request for this many keys: charges the chosen nodes, and returns the decisions, `None` for keys of
/// other members. `map_epoch` is the epoch of the map by which the member could answer throughout
/// ([`AnswerMap`](crate::AnswerMap)).
pub fn end_placement(
    parts: &mut impl AnswerParts,
    call: PlacementCall,
    keys: usize,
    map_epoch: Option<Epoch>,
) -> Vec<Option<PlacementDecision>> {
    let certainty = map_epoch.map_or(PlaceCertainty::Uncertain, |_| PlaceCertainty::Certain);
    let (decisions, charges) = call.end(keys, certainty);
    parts.nodes_and_modes(|nodes, _| placement_call::charge(nodes, &charges));
    decisions
}

#[cfg(test)]
mod tests {
    use reprise_policy::peer::PeerEndpoint;
    use reprise_policy::shards::{MemberName, ShardMap};
    use reprise_policy::{Amounts, BlockKey, NodeMode};

    use super::*;
    use crate::node_table::{LivenessSettings, NodeDetails, NodeRecord};

    const NODES: [NodeId; 2] = [NodeId(1), NodeId(2)];

    /// Parts of a member that is alone, with two nodes. The books record their calls.
    struct Parts {
        nodes: NodeTable,
        modes: Modes,
        round: RebalanceRound,
        name: MemberName,
        map: ShardMap,
        is_certain: bool,
        books: Books,
    }

    #[derive(Default)]
    struct Books(Vec<&'static str>);

    impl AnswerParts for Parts {
        type Books = Books;

        fn store_report(&mut self, node: NodeId, epoch: Epoch, report: NodeReport) -> bool {
            self.nodes.report(node, epoch, report)
        }

        fn expire(&mut self, now: Tick) {
            self.nodes.expire(now);
        }

        fn nodes_and_modes<R>(&mut self, act: impl FnOnce(&mut NodeTable, &Modes) -> R) -> R {
            act(&mut self.nodes, &self.modes)
        }

        fn moves<R>(&mut self, act: impl FnOnce(&mut Self, &mut RebalanceRound) -> R) -> R {
            let mut round = std::mem::take(&mut self.round);
            let result = act(self, &mut round);
            self.round = round;
            result
        }

        fn with_place<R>(
            &mut self,
            _: Tick,
            act: impl FnOnce(&MemberPlace<'_>, &mut Books) -> R,
        ) -> Option<R> {
            let place = MemberPlace { map: &self.map, name: &self.name, incarnation: 1 };
            self.is_certain.then(|| act(&place, &mut self.books))
        }

        fn books(&mut self) -> &mut Books {
            &mut self.books
        }
    }

    impl TenantBooks for Books {
        fn store_usage(&mut self, _: Tick, _: &MemberPlace<'_>, _: (NodeId, Epoch), _: Vec<ReportedUsage>) {
            self.0.push("usage");
        }

        fn report(
            &mut self,
            _: &MemberPlace<'_>,
            _: (NodeId, Epoch),
            _: &[ReportedTenant],
        ) -> Vec<QuotaGrant> {
            self.0.push("report");
            Vec::new()
        }

        fn update(&mut self, _: Tick, place: Option<&MemberPlace<'_>>, nodes: &[KnownNode]) {
            assert_eq!(nodes.len(), NODES.len());
            self.0.push(if place.is_some() { "update" } else { "update without a place" });
        }
    }

    fn parts() -> Parts {
        let second = Duration::from_secs(1);
        let mut nodes = NodeTable::new(LivenessSettings { dead_after: second, forget_after: 9 * second });
        for node in NODES {
            let peer_endpoints = vec![PeerEndpoint::tcp("host:1")];
            let details = NodeDetails { peer_endpoints, ..NodeDetails::default() };
            let record =
                NodeRecord { node, name: format!("n{}", node.0), epoch: Epoch(1), details, revision: 1 };
            nodes.register(Tick(0), record).expect("the first");
        }
        let name = MemberName::new("a").expect("a valid name");
        let map = ShardMap::new(Epoch(1), [name.clone()]).expect("a valid map");
        let (modes, round) = (Modes::default(), RebalanceRound::default());
        Parts { nodes, modes, round, name, map, is_certain: true, books: Books::default() }
    }

    fn call(parts: &Parts, node: NodeId, used: u64) -> ReportCall {
        let amounts = |nvme| Amounts { nvme, ..Amounts::default() };
        let report = NodeReport { capacity: amounts(1000), used: amounts(used), ..NodeReport::default() };
        let map_digest = parts.map.digest();
        ReportCall { node: (node, Epoch(1)), report, tenants: Vec::new(), usage: Vec::new(), map_digest }
    }

    #[test]
    fn report_updates_the_node_first_and_is_answered_with_mode_and_move() {
        let mut parts = parts();
        let empty = call(&parts, NODES[1], 0);
        report(&mut parts, Tick(1), empty).expect("registered");
        let full = call(&parts, NODES[0], 900);
        parts.modes.set("n1", ModeRecord { mode: NodeMode::Active, revision: 7 });
        let planned = |parts: &mut Parts, at, call| report(parts, at, call).expect("registered");
        let later = Tick(1).after(Duration::from_millis(999));
        let first = planned(&mut parts, later, full.clone());
        assert_eq!(first.planned, None, "the moves were decided with the first report");
        let answer = planned(&mut parts, Tick(1).after(Duration::from_secs(1)), full.clone());
        assert_eq!(answer.mode.map(|set| set.revision), Some(7));
        assert_eq!(answer.planned, None, "the other node is silent");
        assert!(parts.nodes.report_of(NODES[0]).is_some_and(|report| report.used.nvme == 900));
        assert_eq!(parts.books.0, ["usage", "report"].repeat(3));
        let outdated = ReportCall { node: (NODES[0], Epoch(9)), ..full };
        assert_eq!(report(&mut parts, Tick(2), outdated), None);
    }

    #[test]
    fn move_is_decided_from_the_report_that_it_answers() {
        let mut parts = parts();
        parts.nodes.report(NODES[1], Epoch(1), call(&parts, NODES[1], 0).report);
        let full = call(&parts, NODES[0], 900);
        let answer = report(&mut parts, Tick(1), full).expect("registered");
        assert_eq!(answer.planned, Some(Move { from: NODES[0], to: NODES[1], bytes: 450 }));
    }

    #[test]
    fn tenants_of_another_map_or_an_uncertain_place_do_not_count() {
        let mut parts = parts();
        let known = call(&parts, NODES[0], 0);
        let other = ReportCall { map_digest: known.map_digest + 1, ..known.clone() };
        report(&mut parts, Tick(1), other).expect("registered");
        parts.is_certain = false;
        assert_eq!(report(&mut parts, Tick(1), known).expect("registered").planned, None);
        update_ledgers(&mut parts, Tick(1));
        parts.is_certain = true;
        update_ledgers(&mut parts, Tick(1));
        assert_eq!(parts.books.0, ["update without a place", "update"]);
    }

    #[test]
    fn placement_offers_live_nodes_to_a_registered_holder_and_charges_them() {
        let mut parts = parts();
        for node in NODES {
            parts.nodes.report(node, Epoch(1), call(&parts, node, 0).report);
        }
        let (reason, slot_bytes) = (PlacementReason::Drain, 10);
        let head = |epoch| PlacementHead { holder: (NODES[0], Epoch(epoch)), reason, slot_bytes };
        assert!(begin_placement(&mut parts, Tick(1), head(2)).is_none(), "another registration");
        let mut call = begin_placement(&mut parts, Tick(1), head(1)).expect("registered");
        call.visit(&BlockKey([1; 16]), Some(&[]));
        let decisions = end_placement(&mut parts, call, 1, Some(Epoch(1)));
        assert_eq!(decisions, [Some(PlacementDecision::On(NODES[1]))]);
        assert_eq!(parts.nodes.placed_on(NODES[1]), slot_bytes);
        let late = Tick(0).after(Duration::from_secs(2));
        assert!(placement_nodes(&mut parts, late).is_empty(), "silent nodes are not offered");
    }
}
