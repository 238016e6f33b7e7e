//! The parts of this member that answer agents, behind their locks, for
//! [`agent_calls`](reprise_controlplane_core::agent_calls).

use reprise_controlplane_core::agent_calls::{AnswerParts, TenantBooks};
use reprise_controlplane_core::{
    KnownNode, MemberPlace, Modes, NodeReport, NodeTable, QuotaGrant, RebalanceRound, ReportedTenant,
    ReportedUsage,
};
use reprise_policy::{Epoch, NodeId, Tick};

use crate::cluster::Cluster;
use crate::shards::Shards;
use crate::tenants::Tenants;

/// The parts of this member that answer agents.
#[derive(Debug)]
pub(crate) struct Answers<'a> {
    cluster: &'a Cluster,
    shards: &'a Shards,
    books: Books<'a>,
}

/// Ledgers and usage of the tenants in this member's slots.
#[derive(Debug)]
pub(crate) struct Books<'a> {
    cluster: &'a Cluster,
    tenants: &'a Tenants,
}

impl<'a> Answers<'a> {
    /// Access to the shared state of a member.
    pub(crate) fn new(cluster: &'a Cluster, shards: &'a Shards, tenants: &'a Tenants) -> Answers<'a> {
        Answers { cluster, shards, books: Books { cluster, tenants } }
    }
}

impl<'a> AnswerParts for Answers<'a> {
    type Books = Books<'a>;

    fn store_report(&mut self, node: NodeId, epoch: Epoch, report: NodeReport) -> bool {
        self.cluster.report(node, epoch, report)
    }

    fn expire(&mut self, _: Tick) {
        self.cluster.expire();
    }

    fn nodes_and_modes<R>(&mut self, act: impl FnOnce(&mut NodeTable, &Modes) -> R) -> R {
        self.cluster.nodes_and_modes(act)
    }

    fn moves<R>(&mut self, act: impl FnOnce(&mut Self, &mut RebalanceRound) -> R) -> R {
        let cluster = self.cluster;
        act(self, &mut cluster.moves())
    }

    fn with_place<R>(
        &mut self,
        _: Tick,
        act: impl FnOnce(&MemberPlace<'_>, &mut Books<'a>) -> R,
    ) -> Option<R> {
        self.shards.with_place(|place| act(place, &mut self.books))
    }

    fn books(&mut self) -> &mut Books<'a> {
        &mut self.books
    }
}

impl TenantBooks for Books<'_> {
    fn store_usage(
        &mut self,
        now: Tick,
        place: &MemberPlace<'_>,
        node: (NodeId, Epoch),
        usage: Vec<ReportedUsage>,
    ) {
        self.cluster.tenant_usage.report(now, place, node, usage);
    }

    fn report(
        &mut self,
        place: &MemberPlace<'_>,
        node: (NodeId, Epoch),
        tenants: &[ReportedTenant],
    ) -> Vec<QuotaGrant> {
        let budgets = self.tenants.budgets();
        budgets.map_or_else(Vec::new, |budgets| self.cluster.ledgers.report(place, &budgets, node, tenants))
    }

    fn update(&mut self, now: Tick, place: Option<&MemberPlace<'_>>, nodes: &[KnownNode]) {
        let budgets = self.tenants.budgets();
        self.cluster.ledgers.update(now, place.zip(budgets.as_deref()), nodes);
    }
}
