//! A member's ledgers: the nodes' reports of tenants, and their grants. The rules are production code
//! ([`reprise_controlplane_core::Ledgers`]). The calls around them are as in
//! `controlplane/src/placement/reports.rs` and the task of `server.rs` that updates the ledgers.

use std::collections::BTreeMap;

use reprise_controlplane_core::{Budget, Ledgers, MemberPlace, NodeLiveness, NodeReport, QuotaGrant};
use reprise_policy::{Epoch, NodeId, TenantName, Tick};

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
        if !self.members.report(node, epoch, report) {
            return None;
        }
        let grants = self.with_place(now, |place, tenancy| {
            // Under a different map, a tenant that is missing in this report may belong to another member.
            let budgets =
                tenancy.budgets.as_ref().filter(|_| [0, place.map.digest()].contains(&map_digest))?;
            Some(tenancy.ledgers.report(place, budgets, (node, epoch), tenants))
        });
        Some(grants.flatten().unwrap_or_default())
    }

    /// Returns the last report of a node.
    pub(crate) fn report_of(&self, node: NodeId) -> Option<&NodeReport> {
        self.members.report_of(node)
    }

    /// Updates the ledgers, and moves bytes between nodes.
    pub(crate) fn rebalance(&mut self, now: Tick) {
        let nodes: Vec<_> = self.members.known_nodes().collect();
        let deaf = self.variant == Variant::NewLedgerSkipsReports;
        let kept = self.with_place(now, |place, tenancy| {
            let budgets = tenancy.budgets.as_ref()?;
            if deaf {
                tenancy.ledgers.rebalance(now, place, budgets, (&[], EXPECTED_FOR));
            }
            tenancy.ledgers.rebalance(now, place, budgets, (&nodes, EXPECTED_FOR));
            Some(())
        });
        if kept.flatten().is_none() {
            self.tenancy.ledgers.drop_all();
        }
    }

    /// Calls `act` with this member's place, if that is certain.
    fn with_place<T>(
        &mut self,
        now: Tick,
        act: impl FnOnce(&MemberPlace<'_>, &mut Tenancy) -> T,
    ) -> Option<T> {
        let view = self.certain_map(now)?;
        let (map, name) = (view.map.clone(), member_name(self.name));
        let place = MemberPlace { map: &map, name: &name, incarnation: view.incarnation(&name)? };
        Some(act(&place, &mut self.tenancy))
    }

    pub(super) fn register_shares(&mut self, node: NodeId, epoch: Epoch) {
        self.tenancy.ledgers.register(node, epoch);
    }

    pub(super) fn forget_shares(&mut self, node: NodeId) {
        self.tenancy.ledgers.forget(node);
        self.tenancy.given_up.push(node);
    }

    /// Handles the death of a node: its grants are no longer renewed.
    pub(super) fn node_died(&mut self, node: NodeId) {
        if self.variant == Variant::DeadNodeGrantsReused {
            self.tenancy.ledgers.forget(node);
        }
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
        let absent = self.members.iter().filter(|(_, state)| *state == NodeLiveness::Absent);
        let mut given_up: Vec<NodeId> = absent.map(|(record, _)| record.node).filter(silent).collect();
        given_up.append(&mut self.tenancy.given_up);
        given_up
    }
}
