//! The nodes as the store has them: those at the start, those that register with other members, and those that were forgotten.
//!
//! A node that was forgotten is gone from everything that this member knows, whatever was under way: a registration that was in the
//! store before its record was deleted, and that arrives here afterwards, is refused ([`Members::register`]) and leaves
//! nothing behind. Its number is given to nobody else, so whoever still has it is told to register, and begins anew.
//!
//! The order is that of every change of a node: members, which decide, then directory, then ledgers; the locks one by one.

use std::collections::BTreeMap;

use reprise_controlplane_core::{MemberState, Members, NodeRecord, NotRegistered, Scope};
use reprise_controlplane_store::{Event, KeyValue, Range, Revision};
use reprise_policy::{Epoch, NodeId};

use super::Cluster;
use crate::followed::News;
use crate::keys::Family;
use crate::registry;

impl Cluster {
    /// Nodes that the store knew at a revision: absent until they register, and waited for.
    pub fn restore(&self, records: Vec<NodeRecord>, revision: Revision) {
        let mut directory = self.directory_mut();
        records.iter().for_each(|record| directory.expect(record.node));
        drop(directory);
        let mut members = self.members();
        records.into_iter().for_each(|record| members.restore(record));
        members.followed(revision.0);
    }

    /// What the store says of its records of nodes.
    pub fn take_records(&self, news: News<'_>) {
        match news {
            News::All(range) => self.take_all(range),
            News::Changes(batch) => batch.events.iter().for_each(|event| self.take_change(event)),
        }
        self.members().followed(news.revision().0);
    }

    /// The store has deleted the record of a name: whoever had the name before is gone.
    pub fn deleted(&self, name: &str, revision: Revision) {
        self.leave(|members| members.deleted(name, revision.0));
    }

    /// Where a node is in its life, as of now.
    pub fn state_of(&self, node: NodeId) -> Option<MemberState> {
        self.expire();
        self.members().get(node).map(|(_, state)| state)
    }

    /// A registration was refused: the directory, which was told first, knows nothing of it. The registration of a node that
    /// stands is not touched, since it has another epoch.
    pub(super) fn unregistered(&self, node: NodeId, epoch: Epoch, refused: NotRegistered) {
        if let NotRegistered::Forgotten(_) = refused {
            self.void(node, epoch);
        }
    }

    fn take_all(&self, range: &Range) {
        let mut there: BTreeMap<&str, Option<NodeId>> = BTreeMap::new();
        for entry in &range.entries {
            let node = self.take_put(entry);
            there.extend(Family::Nodes.name(&entry.key).map(|name| (name, node)));
        }
        // A record that cannot be read says nothing: whoever has its name stays.
        let is_there = |record: &NodeRecord| {
            there.get(record.name.as_str()).is_some_and(|node| node.is_none_or(|node| node == record.node))
        };
        self.leave(|members| members.only(is_there, range.revision.0));
    }

    fn take_change(&self, event: &Event) {
        match event {
            Event::Put(entry) => {
                self.take_put(entry);
            }
            Event::Deleted { key, revision } => {
                if let Some(name) = Family::Nodes.name(key) {
                    self.deleted(name, *revision);
                }
            }
        }
    }

    /// A node, which may have registered with another member; its number.
    fn take_put(&self, entry: &KeyValue) -> Option<NodeId> {
        let record = registry::read(entry)
            .inspect_err(|error| tracing::error!(%error, "a node's record is passed over"))
            .ok()?;
        let node = record.node;
        let mut members = self.members();
        if members.learn(record) {
            let (record, state) = members.get(node).expect("it was just learned of");
            self.tell_node(&members, record, state);
        }
        Some(node)
    }

    /// Takes nodes off the list, and forgets what was known of them.
    fn leave(&self, take_off: impl FnOnce(&mut Members) -> Vec<NodeRecord>) {
        let mut members = self.members();
        let gone = take_off(&mut members);
        for record in &gone {
            tracing::info!(node = record.node.0, name = record.name, "node is gone for good");
            self.tell_gone(&members, record);
        }
        drop(members);
        for NodeRecord { node, epoch, .. } in gone {
            self.void(node, epoch);
            self.ledgers.forget(node);
        }
    }

    /// The directory forgets a node of this registration, or waits no longer for one that has none.
    fn void(&self, node: NodeId, epoch: Epoch) {
        let mut directory = self.directory_mut();
        if directory.forget(node, epoch) {
            self.events.cleared(Scope::node(node));
        }
        directory.give_up(node);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reprise_controlplane_core::{MemberSettings, NodeDetails};
    use reprise_policy::SlotSet;

    use super::*;
    use crate::cluster::News as Told;
    use crate::events::Events;
    use crate::metrics::Metrics;

    fn cluster() -> Cluster {
        let second = Duration::from_secs(1);
        let settings = MemberSettings { dead_after: second, forget_after: 60 * second };
        let cluster = Cluster::new(settings, 8, Events::new(1 << 16), Metrics::new().0);
        cluster.own(&SlotSet::ALL, Epoch(1));
        cluster
    }

    fn record(node: u16, epoch: u64, revision: u64) -> NodeRecord {
        let details = NodeDetails { peer_address: "host:1".to_owned(), ..NodeDetails::default() };
        NodeRecord { node: NodeId(node), name: format!("n{node}"), epoch: Epoch(epoch), details, revision }
    }

    fn empty(revision: u64) -> Range {
        Range { entries: Vec::new(), more: false, revision: Revision(revision) }
    }

    #[test]
    fn a_node_that_the_store_has_no_more_leaves_nothing_behind_and_watchers_are_told() {
        let cluster = cluster();
        cluster.restore(vec![record(1, 1, 5)], Revision(5));
        cluster.registered(record(2, 1, 7)).expect("newer");
        assert_eq!(cluster.directory().size().slots_partial, SlotSet::ALL.len(), "both are waited for");
        let (_, mut news) = cluster.watch_nodes();
        cluster.take_records(News::All(&empty(8)));
        assert!(cluster.nodes().is_empty());
        for number in [1, 2] {
            let Ok(Told::Change(change)) = news.try_recv() else { panic!("one for each") };
            assert_eq!((change.node.expect("a node").node, change.removed), (number, true));
        }
        let size = cluster.directory().size();
        assert_eq!((size.slots_partial, size.nodes.len()), (0, 0), "nobody is waited for");
        assert_eq!(cluster.standing(NodeId(2), Epoch(1)), None);
        assert!(!cluster.beat(NodeId(2), Epoch(1)));
    }

    #[test]
    fn a_registration_that_was_overtaken_by_its_end_is_refused_and_leaves_nothing_behind() {
        let cluster = cluster();
        cluster.registered(record(1, 1, 5)).expect("newer");
        // The registration of revision 6 is on its way from the store when revision 7 ends it.
        cluster.take_records(News::All(&empty(7)));
        let refused = cluster.registered(record(1, 2, 6)).expect_err("forgotten");
        assert_eq!(refused, NotRegistered::Forgotten(NodeId(1)));
        let size = cluster.directory().size();
        assert_eq!((size.slots_partial, size.nodes.len()), (0, 0));
        assert_eq!(cluster.standing(NodeId(1), Epoch(2)), None);
        cluster.registered(record(2, 1, 8)).expect("it has come since");
        assert!(cluster.beat(NodeId(2), Epoch(1)));
    }
}
