//! A member's ledgers: what nodes report of tenants, and what they are ordered. The rules are the production code
//! ([`reprise_controlplane_core::Ledgers`]); what is done around them is as in `controlplane/src/placement/reports.rs`
//! and the task of `server.rs` that keeps the ledgers.

use std::collections::BTreeMap;

use reprise_controlplane_core::{Budget, Ledgers, MemberState, NodeReport, Order, OwnPlace};
use reprise_policy::{Epoch, NodeId, TenantName, Tick};

use super::{Member, member_name};
use crate::messages::NodeSays;
use crate::setup::{EXPECTED_FOR, FORGET_AFTER, Variant};

/// What a member knows and decides of tenants.
#[derive(Debug, Default)]
pub(crate) struct Tenancy {
    pub(crate) ledgers: Ledgers,
    /// `None` before the store has said.
    pub(crate) budgets: Option<BTreeMap<TenantName, Budget>>,
    /// Nodes whose shares were given up, for the auditor to take.
    pub(crate) given_up: Vec<NodeId>,
}

impl Member {
    /// A node says how it is; returns its orders. `None`: it must register again.
    pub(crate) fn report(&mut self, now: Tick, says: &NodeSays) -> Option<Vec<Order>> {
        let NodeSays { node, epoch, report, ref said, map_digest } = *says;
        if !self.members.report(node, epoch, report) {
            return None;
        }
        let orders = self.with_place(now, |place, tenancy| {
            // By another map a tenant may be another's that this report does not name.
            let budgets =
                tenancy.budgets.as_ref().filter(|_| [0, place.map.digest()].contains(&map_digest))?;
            Some(tenancy.ledgers.report(place, budgets, (node, epoch), said))
        });
        Some(orders.flatten().unwrap_or_default())
    }

    /// What a node last said of itself.
    pub(crate) fn report_of(&self, node: NodeId) -> Option<&NodeReport> {
        self.members.report_of(node)
    }

    /// Brings the ledgers in line, and moves bytes.
    pub(crate) fn rebalance(&mut self, now: Tick) {
        let nodes: Vec<_> = self.members.known().collect();
        let deaf = self.variant == Variant::NewLedgerDeaf;
        let kept = self.with_place(now, |place, tenancy| {
            let budgets = tenancy.budgets.as_ref()?;
            if deaf {
                tenancy.ledgers.rebalance(now, place, budgets, (&[], EXPECTED_FOR));
            }
            tenancy.ledgers.rebalance(now, place, budgets, (&nodes, EXPECTED_FOR));
            Some(())
        });
        if kept.flatten().is_none() {
            self.tenancy.ledgers.end();
        }
    }

    /// Does something with this member's place, while that is certain.
    fn with_place<T>(&mut self, now: Tick, act: impl FnOnce(&OwnPlace<'_>, &mut Tenancy) -> T) -> Option<T> {
        let view = self.certain_map(now)?;
        let (map, name) = (view.map.clone(), member_name(self.name));
        let place = OwnPlace { map: &map, name: &name, incarnation: view.members[&self.name] };
        Some(act(&place, &mut self.tenancy))
    }

    pub(super) fn register_shares(&mut self, node: NodeId, epoch: Epoch) {
        self.tenancy.ledgers.register(node, epoch);
    }

    pub(super) fn forget_shares(&mut self, node: NodeId) {
        self.tenancy.ledgers.forget(node);
        self.tenancy.given_up.push(node);
    }

    /// A node is not offered any more: nothing follows for what it holds.
    pub(super) fn node_died(&mut self, node: NodeId) {
        if self.variant == Variant::DeadNodesFreed {
            self.tenancy.ledgers.forget(node);
        }
    }

    /// Whether a tenant's slot is this member's, by the map that it knows.
    pub(crate) fn has_slot_of(&self, tenant: &TenantName) -> bool {
        let map = &self.view.map;
        let own = map.position(&member_name(self.name));
        own.is_some() && map.owner(tenant.hash_slot()) == own
    }

    /// Nodes that this member may have given up by now: it has not heard of them for long.
    pub(crate) fn given_up(&mut self, now: Tick) -> Vec<NodeId> {
        let silent = |node: &NodeId| match self.heard.get(node) {
            Some(heard) => now.since(*heard) >= FORGET_AFTER,
            None => now.since(self.begun) >= EXPECTED_FOR,
        };
        let absent = self.members.iter().filter(|(_, state)| *state == MemberState::Absent);
        let mut given_up: Vec<NodeId> = absent.map(|(record, _)| record.node).filter(silent).collect();
        given_up.append(&mut self.tenancy.given_up);
        given_up
    }
}
