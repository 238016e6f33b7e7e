//! A member's books about tenants, and the parts of it that answer agents. The rules and their order are production
//! code ([`agent_calls`]).

use std::collections::BTreeMap;

use reprise_controlplane_core::agent_calls::{self, AnswerParts, ReportAnswer, ReportCall, TenantBooks};
use reprise_controlplane_core::member_parts::EXPECTED_FOR;
use reprise_controlplane_core::{
    Budget, KnownNode, Ledgers, MemberPlace, Modes, NodeLiveness, NodeReport, NodeTable, QuotaGrant,
    RebalanceRound, ReportedTenant, ReportedUsage,
};
use reprise_policy::{Epoch, NodeId, TenantName, Tick};

use super::{Member, member_name};
use crate::messages::NodeReportBody;
use crate::setup::{FORGET_AFTER, Variant};

/// Tenants as known to a member, and its decisions about them.
#[derive(Debug, Default)]
pub(crate) struct Tenancy {
    pub(crate) ledgers: Ledgers,
    /// `None` before the store has answered.
    pub(crate) budgets: Option<BTreeMap<TenantName, Budget>>,
    /// Nodes whose shares were given up, for the audit.
    pub(crate) given_up: Vec<NodeId>,
    /// An injected flaw: new ledgers do not wait for reports.
    skips_reports: bool,
}

impl Tenancy {
    pub(super) fn new(variant: Variant) -> Tenancy {
        Tenancy { skips_reports: variant == Variant::NewLedgerSkipsReports, ..Tenancy::default() }
    }
}

impl AnswerParts for Member {
    type Books = Tenancy;

    fn store_report(&mut self, node: NodeId, epoch: Epoch, report: NodeReport) -> bool {
        self.nodes.report(node, epoch, report)
    }

    fn expire(&mut self, now: Tick) {
        Member::expire(self, now);
    }

    fn nodes_and_modes<R>(&mut self, act: impl FnOnce(&mut NodeTable, &Modes) -> R) -> R {
        act(&mut self.nodes, &self.modes)
    }

    fn moves<R>(&mut self, act: impl FnOnce(&mut Member, &mut RebalanceRound) -> R) -> R {
        let mut round = std::mem::take(&mut self.moves);
        let result = act(self, &mut round);
        self.moves = round;
        result
    }

    fn with_place<R>(
        &mut self,
        now: Tick,
        act: impl FnOnce(&MemberPlace<'_>, &mut Tenancy) -> R,
    ) -> Option<R> {
        let name = member_name(self.name);
        let mut tenancy = std::mem::take(&mut self.tenancy);
        let result = self.standing(now, &name).place().map(|place| act(&place, &mut tenancy));
        self.tenancy = tenancy;
        result
    }

    fn books(&mut self) -> &mut Tenancy {
        &mut self.tenancy
    }
}

impl TenantBooks for Tenancy {
    /// Not kept: only operators read the usage, and the simulated ones do not.
    fn store_usage(&mut self, _: Tick, _: &MemberPlace<'_>, _: (NodeId, Epoch), _: Vec<ReportedUsage>) {}

    fn report(
        &mut self,
        place: &MemberPlace<'_>,
        node: (NodeId, Epoch),
        tenants: &[ReportedTenant],
    ) -> Vec<QuotaGrant> {
        let Tenancy { ledgers, budgets, .. } = self;
        budgets.as_ref().map_or_else(Vec::new, |budgets| ledgers.report(place, budgets, node, tenants))
    }

    fn update(&mut self, now: Tick, place: Option<&MemberPlace<'_>>, nodes: &[KnownNode]) {
        let known = place.zip(self.budgets.as_ref());
        if self.skips_reports && place.is_some() {
            self.ledgers.update(now, known, (&[], EXPECTED_FOR));
        }
        self.ledgers.update(now, known, (nodes, EXPECTED_FOR));
    }
}

impl Member {
    /// Handles a node's report; `None`: the node must register again.
    pub(crate) fn report(&mut self, now: Tick, body: NodeReportBody) -> Option<ReportAnswer> {
        let NodeReportBody { node, epoch, report, tenants, map_digest } = body;
        let (node, usage) = ((node, epoch), Vec::new());
        agent_calls::report(self, now, ReportCall { node, report, tenants, usage, map_digest })
    }

    /// Returns the last report of a node.
    pub(crate) fn report_of(&self, node: NodeId) -> Option<&NodeReport> {
        self.nodes.report_of(node)
    }

    /// Updates the ledgers, and moves bytes between nodes.
    pub(crate) fn rebalance(&mut self, now: Tick) {
        agent_calls::update_ledgers(self, now);
    }

    /// Reports whether a tenant's slot belongs to this member, by its map.
    pub(crate) fn has_slot_of(&self, tenant: &TenantName) -> bool {
        let map = self.map();
        let own = map.position(&member_name(self.name));
        own.is_some() && map.owner(tenant.hash_slot()) == own
    }

    /// Takes the nodes that this member may have given up by now after a long silence.
    pub(crate) fn given_up(&mut self, now: Tick) -> Vec<NodeId> {
        let silent = |node: &NodeId| match self.last_seen.get(node) {
            Some(seen_at) => now.since(*seen_at) >= FORGET_AFTER,
            None => now.since(self.begun) >= EXPECTED_FOR,
        };
        let absent = self.nodes.iter().filter(|(_, state)| *state == NodeLiveness::Absent);
        let mut given_up: Vec<NodeId> = absent.map(|(record, _)| record.node).filter(silent).collect();
        given_up.append(&mut self.tenancy.given_up);
        given_up
    }
}
