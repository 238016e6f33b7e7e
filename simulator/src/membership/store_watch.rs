//! Records that a member follows in the store: members, nodes, modes of nodes and budgets of tenants; and the
//! identity of the store.
//!
//! Production code decides which call is next ([`RecordCall`], [`IdentityCall`]), and derives the map
//! ([`MemberList`](reprise_controlplane_core::MemberList)).

use reprise_controlplane_core::joining::JoinInput;
use reprise_controlplane_core::record_watch::{IdentityAnswer, IdentityCall, RecordCall, WatchEnd};
use reprise_controlplane_core::{Member, ModeRecord, NodeRecord, RecordChange, RecordUpdate};
use reprise_policy::shards::MemberName;

use super::{MemberStep, Purpose};
use crate::member::{incarnations, member_name, node_name, number_of_member};
use crate::messages::StoreRequest;
use crate::network::Host;
use crate::setup::Variant;
use crate::simulation::Simulation;
use crate::store::{Change, Entry, Key, Prefix, Revision, Value};
use crate::tenants::tenant_name;

/// Kind of the followed records.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RecordKind {
    Nodes,
    Tenants,
    Modes,
    Members,
}

/// Records as the store sends them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Records<'a> {
    All(&'a [(Key, Entry)]),
    Changes(&'a [Change]),
}

impl RecordKind {
    fn prefix(self) -> Prefix {
        match self {
            RecordKind::Nodes => Prefix::Nodes,
            RecordKind::Tenants => Prefix::Tenants,
            RecordKind::Modes => Prefix::Modes,
            RecordKind::Members => Prefix::Members,
        }
    }
}

impl Records<'_> {
    /// Decodes names and values.
    fn decode<K, V>(self, name: impl Fn(Key) -> K, value: impl Fn(&K, &Entry) -> V) -> RecordUpdate<K, V> {
        let record = |key: Key, entry: &Entry| {
            let name = name(key);
            let value = value(&name, entry);
            (name, Some(value))
        };
        let change = |change: &Change| match &change.entry {
            Some(entry) => {
                let (name, value) = record(change.key, entry);
                RecordChange::Put(name, value)
            }
            None => RecordChange::Deleted(name(change.key), change.revision),
        };
        match self {
            Records::All(all) => {
                RecordUpdate::All(all.iter().map(|(key, entry)| record(*key, entry)).collect())
            }
            Records::Changes(changes) => RecordUpdate::Changes(changes.iter().map(change).collect()),
        }
    }

    fn members(self) -> RecordUpdate<MemberName, Member> {
        let name = |key| match key {
            Key::Member(member) => member_name(member),
            key => unreachable!("unexpected key of a member: {key:?}"),
        };
        self.decode(name, |name, entry| {
            let (address, version) = (String::new(), String::new());
            Member { name: name.clone(), address, incarnation: entry.created, version }
        })
    }

    fn nodes(self) -> RecordUpdate<String, NodeRecord> {
        let name = |key| match key {
            Key::Node(node) => node_name(node),
            key => unreachable!("unexpected key of a node record: {key:?}"),
        };
        self.decode(name, |_, entry| node_record(entry))
    }

    fn modes(self) -> RecordUpdate<Key, ModeRecord> {
        self.decode(|key| key, |_, entry| mode_record(entry))
    }
}

impl Simulation {
    // ---- records ------------------------------------------------------------------------------------------

    /// Makes the next call for records.
    pub(super) fn follow_records(&mut self, member: usize, of: RecordKind, call: RecordCall) {
        match call {
            RecordCall::List(pause) if pause.is_zero() => {
                self.ask_store(member, Purpose::Follow(of), StoreRequest::Range(of.prefix()));
            }
            RecordCall::List(pause) => self.member_later(member, pause, MemberStep::FollowRecords(of)),
            RecordCall::Watch(from) => {
                let watch = StoreRequest::Watch { prefix: of.prefix(), from };
                self.ask_store(member, Purpose::Watch(of), watch);
            }
        }
    }

    /// Handles the compaction of changes that a watch has not received.
    pub(super) fn records_compacted(&mut self, member: usize, of: RecordKind) {
        let loses = self.env.setup.variant == Variant::CompactionLosesChanges;
        let call = match of {
            RecordKind::Members if loses => RecordCall::after_list(self.store_process.store.revision()),
            _ => RecordCall::after(WatchEnd::Compacted),
        };
        self.follow_records(member, of, call);
    }

    pub(super) fn apply_records(
        &mut self,
        member: usize,
        of: RecordKind,
        revision: Revision,
        records: Records<'_>,
    ) {
        match of {
            RecordKind::Members => self.apply_members(member, revision, records.members()),
            RecordKind::Nodes => {
                self.member(member).apply_nodes(revision, records.nodes());
                self.notify_if_nodes_changed(member);
            }
            RecordKind::Tenants => {
                let name = |key| match key {
                    Key::Tenant(tenant) => tenant_name(tenant),
                    key => unreachable!("unexpected key of a budget: {key:?}"),
                };
                let value = |_: &_, entry: &Entry| match entry.value {
                    Value::Budget(budget) => budget,
                    ref other => unreachable!("unexpected value of a budget: {other:?}"),
                };
                let budgets = self.member(member).tenancy.budgets.get_or_insert_default();
                records.decode(name, value).apply_to(budgets);
            }
            RecordKind::Modes => {
                for (key, set) in records.modes().written() {
                    let Key::Mode(node) = key else { unreachable!("unexpected key of a mode: {key:?}") };
                    self.member(member).learn_mode(node, set);
                }
            }
        }
    }

    fn apply_members(&mut self, member: usize, revision: Revision, update: RecordUpdate<MemberName, Member>) {
        let mut list = std::mem::take(&mut self.member(member).list);
        let map = |epoch, names: Vec<MemberName>| self.env.map_of(epoch, names.iter().map(number_of_member));
        let view = list.apply(revision, update, map).cloned();
        self.member(member).list = list;
        let Some(view) = view else { return };
        self.audit_list(revision, &incarnations(&view));
        let now = self.env.time(Host::Member(member));
        if view.find(&member_name(self.member(member).name)).is_none() {
            self.join(member, JoinInput::NameFree);
        }
        self.env.trace.note(|| format!("member {member} follows revision {revision} at {now:?}"));
        self.place_changed(member);
    }

    // ---- identity -----------------------------------------------------------------------------------------

    /// Makes the next call for the identity of the store.
    pub(super) fn follow_identity(&mut self, member: usize, call: IdentityCall) {
        let prefix = Prefix::IdentityOf(self.identity(member).number);
        match call {
            IdentityCall::Read(pause) if pause.is_zero() => {
                self.ask_store(member, Purpose::IdentityRange, StoreRequest::Range(prefix));
            }
            IdentityCall::Read(pause) => self.member_later(member, pause, MemberStep::Identity),
            IdentityCall::Watch(from) => {
                let watch = StoreRequest::Watch { prefix, from };
                self.ask_store(member, Purpose::IdentityWatch(from - 1), watch);
            }
            // An emptied store has no identity to delete.
            IdentityCall::End | IdentityCall::DeleteAndEnd => self.end_member(member),
        }
    }

    pub(super) fn identity_read(&mut self, member: usize, revision: Revision, entries: &[(Key, Entry)]) {
        let identity = self.identity(member);
        let same = entries.first().is_some_and(|(_, entry)| entry.modified == identity.revision);
        let answer = if revision < self.member(member).joining.seen {
            IdentityAnswer::Restored
        } else if same {
            IdentityAnswer::Unchanged(revision)
        } else {
            IdentityAnswer::Changed
        };
        if !matches!(answer, IdentityAnswer::Unchanged(_)) {
            self.env.count("stores found replaced");
        }
        self.follow_identity(member, IdentityCall::after(answer));
    }
}

/// Decodes a node's record.
pub(super) fn node_record(entry: &Entry) -> NodeRecord {
    match &entry.value {
        Value::Node(record) => NodeRecord { revision: entry.modified, ..NodeRecord::clone(record) },
        other => unreachable!("unexpected value of a node record: {other:?}"),
    }
}

/// Decodes a node's mode.
pub(super) fn mode_record(entry: &Entry) -> ModeRecord {
    match entry.value {
        Value::Mode(mode) => ModeRecord { mode, revision: entry.modified },
        ref other => unreachable!("unexpected value of a mode: {other:?}"),
    }
}
