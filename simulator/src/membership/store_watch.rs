//! Watches of node records, node modes, and budgets of tenants in the store. As
//! `controlplane/src/{store_watch,tenants,modes}.rs`.
//!
//! Not reproduced: the joint check of reservations when a budget is set, which grants concurrent changes.

use reprise_controlplane_core::{Budget, ModeRecord, NodeRecord};
use reprise_policy::TenantId;

use super::Purpose;
use crate::messages::StoreRequest;
use crate::simulation::Simulation;
use crate::store::{Change, Condition, Entry, Key, Prefix, Revision, Value, Write};
use crate::tenants::tenant_name;

/// Kind of the followed records.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RecordKind {
    Nodes,
    Tenants,
    Modes,
}

impl RecordKind {
    fn prefix(self) -> Prefix {
        match self {
            RecordKind::Nodes => Prefix::Nodes,
            RecordKind::Tenants => Prefix::Tenants,
            RecordKind::Modes => Prefix::Modes,
        }
    }
}

impl Simulation {
    pub(super) fn follow_records(&mut self, member: usize, of: RecordKind) {
        self.ask_store(member, Purpose::Follow(of), StoreRequest::Range(of.prefix()));
    }

    /// Handles the list of all records; later changes are watched.
    pub(super) fn records_listed(
        &mut self,
        member: usize,
        of: RecordKind,
        revision: Revision,
        entries: &[(Key, Entry)],
    ) {
        if let RecordKind::Tenants = of {
            self.member(member).tenancy.budgets = Some(Default::default());
        }
        for (key, entry) in entries {
            self.record_put(member, *key, entry);
        }
        let watch = StoreRequest::Watch { prefix: of.prefix(), from: revision + 1 };
        self.ask_store(member, Purpose::Watch(of), watch);
    }

    pub(super) fn records_changed(&mut self, member: usize, changes: &[Change]) {
        for Change { key, entry, .. } in changes {
            match (key, entry) {
                (key, Some(entry)) => self.record_put(member, *key, entry),
                (Key::Tenant(tenant), None) => self.apply_budget(member, *tenant, None),
                // Records and modes of nodes are never deleted.
                (_, None) => {}
            }
        }
    }

    pub(super) fn record_put(&mut self, member: usize, key: Key, entry: &Entry) {
        match (key, &entry.value) {
            (Key::Node(_), Value::Node(record)) => self.apply_node_record(member, NodeRecord::clone(record)),
            (Key::Tenant(tenant), Value::Budget(budget)) => self.apply_budget(member, tenant, Some(*budget)),
            (Key::Mode(node), Value::Mode(mode)) => {
                self.member(member).learn_mode(node, ModeRecord { mode: *mode, revision: entry.modified });
            }
            (key, value) => unreachable!("unexpected value of {key:?}: {value:?}"),
        }
    }

    fn apply_node_record(&mut self, member: usize, record: NodeRecord) {
        if self.member(member).learn(record) {
            self.nodes_changed(member);
        }
    }

    fn apply_budget(&mut self, member: usize, tenant: TenantId, budget: Option<Budget>) {
        let budgets = self.member(member).tenancy.budgets.get_or_insert_default();
        match budget {
            Some(budget) => budgets.insert(tenant_name(tenant), budget),
            None => budgets.remove(&tenant_name(tenant)),
        };
    }

    /// `SetTenant` or `RemoveTenant`, as in a member.
    pub(crate) fn set_budget(&mut self, member: usize, tenant: TenantId, budget: Option<Budget>) {
        let identity = self.identity(member);
        let key = Key::Tenant(tenant);
        let conditions = vec![Condition::Modified(Key::IdentityOf(identity.number), identity.revision)];
        let request = match budget {
            Some(budget) => {
                let writes = vec![Write { key, value: Value::Budget(budget), lease: None }];
                StoreRequest::Transact { conditions, writes }
            }
            None => StoreRequest::Delete { conditions, key },
        };
        self.ask_store(member, Purpose::SetBudget, request);
    }
}
