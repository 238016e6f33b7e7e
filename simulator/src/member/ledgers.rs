//! A member's ledgers: the nodes' reports of tenants, and their grants. The rules are production code
//! ([`reprise_controlplane_core::Ledgers`], [`MemberPlace`]). The order of the steps follows
//! `controlplane/src/placement/reports.rs`.

use std::collections::BTreeMap;

use reprise_controlplane_core::{Budget, Ledgers, MemberPlace, NodeLiveness, NodeReport, QuotaGrant};
use reprise_policy::{NodeId, TenantName, Tick};

use super::{Member, member_name};
use crate::messages::NodeReportBody;
use crate::setup::{EXPECTED_FOR, FORGET_AFTER, Variant};

/// Tenants as known to a member, and its decisions about them.
#[derive(Debug, Default)]
pub(crate) struct Tenancy {
    pub(crate) ledgers: Ledgers,
    /// `None` before the store has answered.
    pub(crate) budgets: Option<BTreeMap<TenantName, Budget>>,
    /// Nodes whose shares were given up, for the audit.
    pub(crate) given_up: Vec<NodeId>,
}

impl Member {
    /// Handles a node's report; returns its grants. `None`: the node must register again.
    pub(crate) fn report(&mut self, now: Tick, body: &NodeReportBody) -> Option<Vec<QuotaGrant>> {
        let NodeReportBody { node, epoch, report, ref tenants, map_digest } = *body;
        if !self.nodes.report(node, epoch, report) {
            return None;
        }
        let grants = self.with_place(now, |place, tenancy| {
            let budgets = tenancy.budgets.as_ref().filter(|_| place.accepts_tenants(map_digest))?;
            Some(tenancy.ledgers.report(place, budgets, (node, epoch), tenants))
        });
        Some(grants.flatten().unwrap_or_default())
    }

    /// Returns the last report of a node.
    pub(crate) fn report_of(&self, node: NodeId) -> Option<&NodeReport> {
        self.nodes.report_of(node)
    }

    /// Updates the ledgers, and moves bytes between nodes.
    pub(crate) fn rebalance(&mut self, now: Tick) {
        let nodes: Vec<_> = self.nodes.known_nodes().collect();
        let deaf = self.variant == Variant::NewLedgerSkipsReports;
        let updated = self.with_place(now, |place, Tenancy { ledgers, budgets, .. }| {
            let known = budgets.as_ref().map(|budgets| (place, budgets));
            if deaf {
                ledgers.update(now, known, (&[], EXPECTED_FOR));
            }
            ledgers.update(now, known, (&nodes, EXPECTED_FOR));
        });
        if updated.is_none() {
            self.tenancy.ledgers.update(now, None, (&nodes, EXPECTED_FOR));
        }
    }

    /// Calls `act` with this member's place, if that is certain.
    pub(super) fn with_place<T>(
        &mut self,
        now: Tick,
        act: impl FnOnce(&MemberPlace<'_>, &mut Tenancy) -> T,
    ) -> Option<T> {
        let name = member_name(self.name);
        let mut tenancy = std::mem::take(&mut self.tenancy);
        let result = self.standing(now, &name).place().map(|place| act(&place, &mut tenancy));
        self.tenancy = tenancy;
        result
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
