//! Records of nodes, their modes, and budgets of tenants in the store, followed. As `controlplane/src/{followed,tenants,modes}.rs`.
//!
//! Left out of what sets a budget: reservations are not checked together, so that two changes at once do not meet.

use reprise_controlplane_core::{Budget, NodeRecord, SetMode};
use reprise_policy::TenantId;

use super::Purpose;
use crate::messages::Question;
use crate::store::{Change, Condition, Entry, Key, Prefix, Revision, Value, Write};
use crate::tenants::tenant_name;
use crate::world::World;

/// What is followed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Followed {
    Nodes,
    Tenants,
    Modes,
}

impl Followed {
    fn prefix(self) -> Prefix {
        match self {
            Followed::Nodes => Prefix::Nodes,
            Followed::Tenants => Prefix::Tenants,
            Followed::Modes => Prefix::Modes,
        }
    }
}

impl World {
    pub(super) fn follow_records(&mut self, member: usize, of: Followed) {
        self.ask_store(member, Purpose::Follow(of), Question::Range(of.prefix()));
    }

    /// All records were read: what happens from there on is watched.
    pub(super) fn records_listed(
        &mut self,
        member: usize,
        of: Followed,
        revision: Revision,
        entries: &[(Key, Entry)],
    ) {
        if let Followed::Tenants = of {
            self.member(member).tenancy.budgets = Some(Default::default());
        }
        for (key, entry) in entries {
            self.record_put(member, *key, entry);
        }
        let watch = Question::Watch { prefix: of.prefix(), from: revision + 1 };
        self.ask_store(member, Purpose::Watch(of), watch);
    }

    pub(super) fn records_changed(&mut self, member: usize, changes: &[Change]) {
        for Change { key, entry, .. } in changes {
            match (key, entry) {
                (key, Some(entry)) => self.record_put(member, *key, entry),
                (Key::Tenant(tenant), None) => self.budget_known(member, *tenant, None),
                // Records of nodes stay, and their modes.
                (_, None) => {}
            }
        }
    }

    pub(super) fn record_put(&mut self, member: usize, key: Key, entry: &Entry) {
        match (key, &entry.value) {
            (Key::Node(_), Value::Node(record)) => self.node_known(member, NodeRecord::clone(record)),
            (Key::Tenant(tenant), Value::Budget(budget)) => self.budget_known(member, tenant, Some(*budget)),
            (Key::Mode(node), Value::Mode(mode)) => {
                self.member(member).learn_mode(node, SetMode { mode: *mode, revision: entry.modified });
            }
            (key, value) => unreachable!("{value:?} is no value of {key:?}"),
        }
    }

    fn node_known(&mut self, member: usize, record: NodeRecord) {
        if self.member(member).learn(record) {
            self.nodes_changed(member);
        }
    }

    fn budget_known(&mut self, member: usize, tenant: TenantId, budget: Option<Budget>) {
        let budgets = self.member(member).tenancy.budgets.get_or_insert_default();
        match budget {
            Some(budget) => budgets.insert(tenant_name(tenant), budget),
            None => budgets.remove(&tenant_name(tenant)),
        };
    }

    /// `SetTenant` or `RemoveTenant`, as a member does it.
    pub(crate) fn set_budget(&mut self, member: usize, tenant: TenantId, budget: Option<Budget>) {
        let identity = self.identity(member);
        let key = Key::Tenant(tenant);
        let conditions = vec![Condition::Modified(Key::IdentityOf(identity.number), identity.revision)];
        let question = match budget {
            Some(budget) => {
                let writes = vec![Write { key, value: Value::Budget(budget), lease: None }];
                Question::Transact { conditions, writes }
            }
            None => Question::Delete { conditions, key },
        };
        self.ask_store(member, Purpose::SetBudget, question);
    }
}
