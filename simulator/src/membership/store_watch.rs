//! Records that a member follows in the store: members, nodes, modes of nodes and budgets of tenants.
//!
//! Production code decides which call is next ([`RecordCall`]), and derives the map
//! ([`MemberList`](reprise_controlplane_core::MemberList)).

use reprise_controlplane_core::joining::JoinInput;
use reprise_controlplane_core::record_watch::{RecordCall, WatchEnd};
use reprise_controlplane_core::{Member as ListedMember, ModeRecord, NodeRecord, RecordChange, RecordUpdate};
use reprise_policy::shards::MemberName;

use super::MemberStep;
use super::store_connection::Purpose;
use super::values::{mode_record, node_record};
use crate::environment::Environment;
use crate::member::{Member, incarnations, node_name};
use crate::messages::StoreRequest;
use crate::names::{member_name, number_of_member};
use crate::network::Host;
use crate::observation::Observation;
use crate::setup::Variant;
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

    fn members(self) -> RecordUpdate<MemberName, ListedMember> {
        let name = |key| match key {
            Key::Member(member) => member_name(member),
            key => unreachable!("unexpected key of a member: {key:?}"),
        };
        self.decode(name, |name, entry| {
            let (address, version) = (String::new(), String::new());
            ListedMember { name: name.clone(), address, incarnation: entry.created, version }
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

impl Member {
    // ---- records ------------------------------------------------------------------------------------------

    /// Makes the next call for records.
    pub(super) fn follow_records(&mut self, env: &mut Environment, of: RecordKind, call: RecordCall) {
        match call {
            RecordCall::List(pause) if pause.is_zero() => {
                self.talk.ask(env, Purpose::Follow(of), StoreRequest::Range(of.prefix()));
            }
            RecordCall::List(pause) => env.member_later(self.name, pause, MemberStep::FollowRecords(of)),
            RecordCall::Watch(from) => {
                let watch = StoreRequest::Watch { prefix: of.prefix(), from };
                self.talk.ask(env, Purpose::Watch(of), watch);
            }
        }
    }

    /// Handles the compaction of changes that a watch has not received.
    pub(super) fn records_compacted(&mut self, env: &mut Environment, of: RecordKind, revision: Revision) {
        let loses = env.setup.variant == Variant::CompactionLosesChanges;
        let call = match of {
            RecordKind::Members if loses => RecordCall::after_list(revision),
            _ => RecordCall::after(WatchEnd::Compacted),
        };
        self.follow_records(env, of, call);
    }

    pub(super) fn apply_records(
        &mut self,
        env: &mut Environment,
        of: RecordKind,
        revision: Revision,
        records: Records<'_>,
    ) {
        match of {
            RecordKind::Members => self.apply_members(env, revision, records.members()),
            RecordKind::Nodes => {
                self.apply_nodes(revision, records.nodes());
                self.notify_if_nodes_changed(env);
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
                let budgets = self.tenancy.budgets.get_or_insert_default();
                records.decode(name, value).apply_to(budgets);
            }
            RecordKind::Modes => {
                for (key, set) in records.modes().written() {
                    let Key::Mode(node) = key else { unreachable!("unexpected key of a mode: {key:?}") };
                    self.learn_mode(node, set);
                }
            }
        }
    }

    fn apply_members(
        &mut self,
        env: &mut Environment,
        revision: Revision,
        update: RecordUpdate<MemberName, ListedMember>,
    ) {
        let mut list = std::mem::take(&mut self.list);
        let map = |epoch, names: Vec<MemberName>| env.map_of(epoch, names.iter().map(number_of_member));
        let view = list.apply(revision, update, map).cloned();
        self.list = list;
        let Some(view) = view else { return };
        env.observe(Observation::MembersListed { revision, members: incarnations(&view) });
        let now = env.time(Host::Member(self.name));
        if view.find(&member_name(self.name)).is_none() {
            self.join(env, JoinInput::NameFree);
        }
        let name = self.name;
        env.trace.note(|| format!("member {name} follows revision {revision} at {now:?}"));
        self.place_changed(env);
    }
}
